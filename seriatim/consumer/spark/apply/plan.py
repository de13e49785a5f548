"""The orders a target carries out: plan, segments, and what stands in them.

All values are as the envelope gives them: int and bool as such, everything else PostgreSQL's text, None for null.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from seriatim.consumer.spark.apply.shape import TableName
from seriatim.protocol.change import Value

Values = tuple[Value, ...]


class ChangeRow(NamedTuple):
    """One record of the queue: its offset, and the change envelope as JSON."""

    offset: int
    value: bytes | str


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table with the same columns; `values[i]` comes from the change at `offsets[i]`."""

    columns: tuple[str, ...]
    values: list[Values] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The last change of each key of one table. No key stands in more than one of the three.

    Carried out in this order: deletes (rows of key values), patches (an update of a row that the target must have;
    columns that aren't named keep what they hold), upserts (insert, or overwrite the row of the same key).
    """

    table: TableName
    key: tuple[str, ...]
    deletes: Rows
    patches: tuple[Rows, ...]
    upserts: tuple[Rows, ...]

    def __len__(self) -> int:
        return len(self.deletes) + sum(map(len, self.patches)) + sum(map(len, self.upserts))


@dataclass(frozen=True, slots=True)
class Put:
    """Insert a row; with a key, overwrite the row that has it."""

    table: TableName
    offset: int
    key: tuple[str, ...]
    columns: tuple[str, ...]
    values: Values


@dataclass(frozen=True, slots=True)
class Change:
    """Update the one row that `key` = `key_values` names; it may get another key. It must exist."""

    table: TableName
    offset: int
    key: tuple[str, ...]
    key_values: Values
    columns: tuple[str, ...]
    values: Values


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete the row that `key` = `key_values` names, if it is there."""

    table: TableName
    offset: int
    key: tuple[str, ...]
    key_values: Values


@dataclass(frozen=True, slots=True)
class ChangeOne:
    """Update exactly one row that equals the old image (a table without a key). It must exist."""

    table: TableName
    offset: int
    match: tuple[str, ...]
    match_values: Values
    columns: tuple[str, ...]
    values: Values


@dataclass(frozen=True, slots=True)
class RemoveOne:
    """Delete exactly one row that equals the old image (a table without a key). It must exist."""

    table: TableName
    offset: int
    match: tuple[str, ...]
    match_values: Values


@dataclass(frozen=True, slots=True)
class ChangeIfThere:
    """Update the row that `key` = `key_values` names, which must equal the old image. Nothing, where there is none of that key."""

    table: TableName
    offset: int
    key: tuple[str, ...]
    key_values: Values
    match: tuple[str, ...]
    match_values: Values
    columns: tuple[str, ...]
    values: Values


Step = Put | Change | Remove | ChangeOne | RemoveOne | ChangeIfThere


@dataclass(frozen=True, slots=True)
class Truncate:
    """Empty these tables."""

    tables: tuple[TableName, ...]
    offset: int
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """What stands between two truncates. Collapsed tables and stepwise tables are different ones, free of each other.

    First `truncate`, then `collapsed`, then `steps` in their order.
    """

    truncate: Truncate | None
    collapsed: tuple[TableChanges, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What of a snapshot came before an offset: its consistent point, and the `number` of its last record. `NO_SNAPSHOT`: none is under way.

    Where one stands at None it isn't known whether, and how much of it.
    """

    point: int
    number: int


NO_SNAPSHOT = Snapshot(0, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, and what position it reaches.

    start, end: offsets in the queue; the plan covers start <= offset < end. start == end: nothing to do yet.
    segments: in the order they must run.
    changes: row changes read (before collapsing).
    transactions: commits among the rows covered.
    commit_ts_ms: time of the last commit at the source in milliseconds since 1970, None where there was none.
    leftover: rows behind `end`: the beginning of a transaction whose commit has not come yet.
    snapshot: the one that is under way at `end`.
    source_lsn: where in the source's log that is: of the last commit, heartbeat or snapshot's record covered, None where there was none.
    """

    start: int
    end: int
    segments: tuple[Segment, ...]
    changes: int
    transactions: int
    commit_ts_ms: int | None
    leftover: tuple[ChangeRow, ...]
    snapshot: Snapshot | None = None
    source_lsn: int | None = None

    @property
    def tables(self) -> set[TableName]:
        """All that it changes."""
        segments = self.segments
        return {
            *(name for segment in segments if segment.truncate is not None for name in segment.truncate.tables),
            *(changes.table for segment in segments for changes in segment.collapsed),
            *(step.table for segment in segments for step in segment.steps),
        }

    def __len__(self) -> int:
        """Changes after collapsing."""
        return sum(
            (segment.truncate is not None) + sum(map(len, segment.collapsed)) + len(segment.steps)
            for segment in self.segments
        )
