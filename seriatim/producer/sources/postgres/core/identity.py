"""Positions in PostgreSQL's log and the identities made from them.

A record's seq is ``(commit_lsn >> 5) << 22 | number``, an unsigned 64-bit number:

- PostgreSQL hands transactions out in the order of their commit records. A commit record takes at least 40 bytes and
  starts at a multiple of 8, so two of them never share ``lsn >> 5``: that part rises strictly from transaction to
  transaction. 42 bits of it reach to 128 TiB of log.
- `number` counts inside the transaction: begin is 1, the changes follow, the commit is the last. 22 bits count to
  4,194,303. A larger transaction can't be given rising seqs, and is refused while it is read: nothing of it is confirmed.
- A heartbeat at position ``lsn`` is number 0 of that position: above every transaction whose commit record lies before
  it, below every one that follows.

The snapshot's records are 1, 2, 3, …; its end is number 0 at the slot's consistent point, and every transaction of the
stream commits at or after that point. A cluster's log starts at 16 MiB, so that even there 2 * 10**12 rows fit below.

A record's source is ``pg/<system identifier>.<timeline>/<slot>/<consistent point>``: all that a log position needs to mean
one thing. A restored database, or a promoted stand-by, has another timeline, where the same positions hold other
transactions. A stream that an earlier version began has no timeline in its source, and goes on without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from seriatim.producer.sources.postgres.errors import LogTooFar, TransactionTooLarge
from seriatim.protocol.change import format_lsn

NUMBER_BITS: Final = 22
LSN_SHIFT: Final = 5
NUMBER_LIMIT: Final = (1 << NUMBER_BITS) - 1
"""Largest number inside a transaction."""
LSN_LIMIT: Final = 1 << (64 - NUMBER_BITS + LSN_SHIFT)
"""First log position that no seq can hold: 128 TiB."""


def parse_lsn(text: str) -> int:
    """A log position from PostgreSQL's form ``16/B374D848``."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def base_seq(lsn: int) -> int:
    """Seq of number 0 at a log position.

    Raises:
        LogTooFar: the position has no seq.
    """
    if lsn >= LSN_LIMIT:
        raise LogTooFar(f"log position {format_lsn(lsn)} is beyond {format_lsn(LSN_LIMIT)}", lsn=lsn)
    return lsn >> LSN_SHIFT << NUMBER_BITS


def too_large(tx_id: int) -> TransactionTooLarge:
    """The error for a transaction with more than `NUMBER_LIMIT` records."""
    return TransactionTooLarge(
        f"transaction {tx_id} has more than {NUMBER_LIMIT:,} records, begin and commit included: more than a seq can count",
        tx_id=tx_id,
        limit=NUMBER_LIMIT,
    )


class Server(NamedTuple):
    """Who answers: the cluster's identifier, the timeline of its log, and the database."""

    system_id: str
    timeline: int
    db: str


@dataclass(frozen=True, slots=True)
class Source:
    """What a source's name says.

    Attributes:
        system_id: of the database cluster.
        timeline: of its log, from 1; None in the name of a stream that an earlier version began.
        slot: its name.
        consistent_point: position at which the slot was made: a slot made again is another source.
    """

    system_id: str
    timeline: int | None
    slot: str
    consistent_point: int

    @property
    def name(self) -> str:
        """The source's name; `parse_source` reads it."""
        timeline = "" if self.timeline is None else f".{self.timeline}"
        return f"pg/{self.system_id}{timeline}/{self.slot}/{self.consistent_point:x}"


_match_source = re.compile(r"pg/([^/.]+)(?:\.([0-9]+))?/([^/]+)/([0-9a-f]+)").fullmatch


def source_name(system_id: str, timeline: int | None, slot: str, consistent_point: int) -> str:
    """Source of the records of one slot."""
    return Source(system_id, timeline, slot, consistent_point).name


def parse_source(name: str) -> Source | None:
    """What the name says; None for the source of somebody else."""
    match = _match_source(name)
    if match is None:
        return None
    system_id, timeline, slot, consistent_point = match.groups()
    return Source(system_id, None if timeline is None else int(timeline), slot, int(consistent_point, 16))


def latest_source(marks: Mapping[str, int], system_id: str, slot: str) -> tuple[Source, int] | None:
    """The source begun last, and its mark, among those of this slot's name in this cluster.

    Timelines rise, and on one of them so do consistent points. One without a timeline was begun before any that has one.
    """
    found = [(source, mark) for source, mark in _sources_of(marks, system_id) if source.slot == slot]
    return max(found, key=lambda each: _begin(each[0]), default=None)


def later_source(marks: Mapping[str, int], source: Source) -> Source | None:
    """A source of the same log that was begun later than this one, by another slot; the last of them."""
    later = [
        other
        for other, _ in _sources_of(marks, source.system_id)
        if source.timeline in {None, other.timeline} and other.consistent_point > source.consistent_point
    ]
    return max(later, key=_begin, default=None)


def _sources_of(marks: Mapping[str, int], system_id: str) -> Iterator[tuple[Source, int]]:
    """Those of one cluster of databases, with their marks."""
    for name, mark in marks.items():
        source = parse_source(name)
        if source is not None and source.system_id == system_id:
            yield source, mark


def _begin(source: Source) -> tuple[int, int]:
    return source.timeline or 0, source.consistent_point
