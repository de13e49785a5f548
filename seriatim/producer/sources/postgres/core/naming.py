"""Names of slots, and those of slot and publication where the user gives none: one of each for each queue.

Two captures that shared a slot would take each other's changes, so the queue's name is in it.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

from seriatim.protocol.errors import InvalidArgument

CAPTURE: Final = "seriatim-capture"
"""What a connection of a capture calls itself."""
NAME_BYTES: Final = 63
"""Longest name of a slot or publication (NAMEDATALEN - 1)."""
_PREFIX: Final = "seriatim_"
_DIGEST_CHARACTERS: Final = 8


def default_slot(queue: str) -> str:
    """Slot for a queue, and its publication's name too: ``seriatim_<queue>``.

    A slot's name has lower-case letters, digits and underscores only (PostgreSQL manual, "Replication Slots"). Where
    the queue's name has others or is too long, what is left of it is followed by a digest, so that two queues never
    share a slot.
    """
    plain = re.sub(r"[^a-z0-9_]", "_", queue.lower())
    if plain == queue and len(_PREFIX) + len(plain) <= NAME_BYTES:
        return _PREFIX + plain
    digest = sha256(queue.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{(_PREFIX + plain)[: NAME_BYTES - _DIGEST_CHARACTERS - 1]}_{digest}"


def snapshot_slot(pid: int) -> str:
    """The temporary slot at whose point a snapshot is taken, of the server process that has it."""
    return f"{_PREFIX}snapshot_{pid}"


def check_slot(name: str) -> None:
    """Refuse a name that PostgreSQL takes for no slot, before a publication is made for it.

    Raises:
        InvalidArgument: it is too long, empty, or has other characters.
    """
    if re.fullmatch(rf"[a-z0-9_]{{1,{NAME_BYTES}}}", name) is None:
        raise InvalidArgument(f"{name!r} is no name of a slot: 1 to {NAME_BYTES} of a-z, 0-9 and _")
