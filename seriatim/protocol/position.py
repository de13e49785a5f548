"""Places in a link, as members tell of them and coordinators compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seriatim.protocol.batch import BatchHeader
from seriatim.protocol.hashing import EMPTY_HASH, hash_after_batch
from seriatim.protocol.marks import raised
from seriatim.protocol.names import Index


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two batches: all batches before `index` give this hash and raise the marks to these.

    A member keeps the marks of the link alone, and tells them with those of before it (`LinkRecord.start_marks`).
    """

    index: Index
    hash: bytes
    marks: Mapping[str, int]

    def after(self, header: BatchHeader, header_bytes: bytes) -> Position:
        """The place behind a batch that begins here."""
        return Position(header.end_index, hash_after_batch(self.hash, header_bytes), raised(self.marks, header.spans))


START = Position(Index(0), EMPTY_HASH, {})
"""The beginning of every link."""
