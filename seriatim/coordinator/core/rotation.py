"""When a queue goes on with its next group unasked (protocol.md 7, planned switch).

A link that is never left is never let go, and the way that a failure takes would never be tried.
"""

from __future__ import annotations

from collections.abc import Mapping

from seriatim.coordinator.core import chain, status
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol.chain import ChainDocument, LinkState, Readmit

NEAR_RECORDS = 100_000
"""Who has so many left to read has read them in a second or two."""


def is_due(document: ChainDocument, registry: Registry, now_ms: int) -> bool:
    """Whether the open link is as old as the queue's settings want it to get, and another group could take over."""
    last, rotate_ms = document.last_link, document.settings.rotate_ms
    if not rotate_ms or last is None or last.state is not LinkState.OPEN:
        return False
    # Also where the clock of who made it was ahead: nothing of the link can be let go before it is left.
    return abs(now_ms - last.created_at_ms) >= rotate_ms and chain.next_group(document, registry) != ""


def obstacle(document: ChainDocument, registry: Registry, lags: Mapping[str, int | None]) -> str:
    """Why the queue would be worse off after it, or empty: nobody would be left to take over from the next group.

    The group that served comes back when all is read (H14). `lags`: how many records each subscription has left; None: nobody
    can tell, or nobody reads them.
    """
    if status.switches_left(document, registry) > 1 or document.settings.readmit is Readmit.IN_SYNC:
        return ""
    behind = [name for name, lag in lags.items() if lag is None or lag > NEAR_RECORDS]
    return f"no group would be left to take over until {', '.join(behind)} has read all" if behind else ""
