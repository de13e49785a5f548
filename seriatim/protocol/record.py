"""The record: what a user sends and gets."""

from __future__ import annotations

from typing import NamedTuple

from seriatim.protocol.names import Epoch, Index, Offset

Headers = tuple[tuple[str, bytes], ...]
"""Name and value pairs, in the order given; names may repeat."""


class Record(NamedTuple):
    """A delivered record, with its identity and its place.

    `offset` never changes and is never used twice; `(source, seq)` names the record whoever sends it how often.
    `timestamp_ms` is milliseconds since 1970 by the sender's clock. A named tuple, because a reader makes
    a million of them a second.
    """

    queue: str
    offset: Offset
    epoch: Epoch
    index: Index  # type: ignore[assignment]  # shadows tuple.index, which nobody calls on a record
    source: str
    seq: int
    key: bytes | None
    value: bytes
    headers: Headers
    timestamp_ms: int
