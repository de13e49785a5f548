"""How long a chain may get before it is given no further link.

A node of ZooKeeper holds so much and no more, and what makes a chain shorter again is a write, too, and often a longer one at first: how a
link ended, a reader's token, a subscription deleted. So listing a link ends early, and leaves the rest to everything else.
"""

from __future__ import annotations

from typing import Final

from seriatim.protocol import chain_json
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.errors import ChainTooLong

LISTED_BYTES: Final = 650_000
"""No link is listed in a chain that would then take more. When a lost link is given up, all behind it get their bases and hashes, which
don't compress: with few sources a chain takes 1.45 times as much then. One number, whether a link is lost or not: the next one may be.
"""
SWITCHED_BYTES: Final = 500_000
"""No switch that nothing forces is made with a chain that takes more: the rest is for failures."""


def listing_error(listed: ChainDocument) -> ChainTooLong | None:
    """Why the chain can't be given the link that is listed here as its last."""
    return _error(listed, chain_json.size_bytes(listed), LISTED_BYTES, "would take", "it gets no further link")


def switch_error(document: ChainDocument, size_bytes: int) -> ChainTooLong | None:
    """Why a planned switch had better not be made: sending might find no next link.

    `size_bytes`: of its node, as that was read. Of thousands of links to find it anew takes as long as a few calls, and this is asked
    again and again.
    """
    what = f"no planned switch is made, and beyond {LISTED_BYTES:,} none at all"
    return _error(document, size_bytes, SWITCHED_BYTES, "takes", what)


def _error(document: ChainDocument, size_bytes: int, most_bytes: int, takes: str, what: str) -> ChainTooLong | None:
    if size_bytes <= most_bytes:
        return None
    return ChainTooLong(
        f"the chain of queue {document.name} {takes} {size_bytes:,} bytes: beyond {most_bytes:,} {what}",
        queue=document.name,
        links=len(document.links),
        limit_bytes=most_bytes,
    )
