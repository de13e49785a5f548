"""Marks: the highest seq of each source at a position of a queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from seriatim.protocol.errors import TooManySources

SOURCES_ROOM_BYTES: Final = 192 * 1024
"""What the marks of a queue may take, each its source's name and MARK_BYTES: 3,000 sources with names of 44 bytes. With more of them a
batch, which is stored with the marks of its link, would cost more than its records, and the chain's node would be full.
"""
MARK_BYTES: Final = 20


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """The records of one source in one batch: their first and last seq and how many they are.

    Invariant: 0 <= first_seq <= last_seq < 2**64, 1 <= count <= last_seq - first_seq + 1.
    """

    source: str
    first_seq: int
    last_seq: int
    count: int


def raised(marks: Mapping[str, int], spans: Iterable[SourceSpan]) -> dict[str, int]:
    """Marks after a batch with these spans: for each source the larger of both. The input is not changed."""
    after = dict(marks)
    for span in spans:
        if after.get(span.source, -1) < span.last_seq:
            after[span.source] = span.last_seq
    return after


def merged(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """For each source the larger of both marks."""
    both = dict(one)
    for source, seq in other.items():
        if both.get(source, -1) < seq:
            both[source] = seq
    return both


def is_resend(marks: Mapping[str, int], spans: Iterable[SourceSpan]) -> bool:
    """Whether every record of a batch lies at or below its source's mark."""
    return all(span.last_seq <= marks.get(span.source, -1) for span in spans)


def overlaps(marks: Mapping[str, int], spans: Iterable[SourceSpan]) -> bool:
    """Whether some record of a batch lies at or below its source's mark."""
    return any(span.first_seq <= marks.get(span.source, -1) for span in spans)


def too_many_sources(source: str, **details: object) -> TooManySources:
    """For a queue that has no room for this source."""
    return TooManySources(
        f"the queue has no room for another source, {source!r}",
        source=source,
        limit_bytes=SOURCES_ROOM_BYTES,
        **details,
    )


def room_bytes(sources: Iterable[str]) -> int:
    """What the marks of these sources take of SOURCES_ROOM_BYTES."""
    return sum(len(one.encode()) + MARK_BYTES for one in sources)
