"""How micro-batches reach a target: by transactions of the source, from the target's own position.

Problem: a micro-batch begins and ends anywhere, also inside a transaction; it may have been applied before, by a run that
was killed before it could say so; and a transaction may be larger than memory likes.

Idea: the target's position is the only memory. The rows between that position and the micro-batch are *held* while they
are few; when they aren't, they are let go, and once the commit that completes them has come they are read again from the queue,
micro-batch by micro-batch, each carried out and let go before the next, all within one transaction of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import pyarrow as pa

from seriatim.consumer.spark.apply.errors import BrokenStream, GivenUp, UnfitTarget
from seriatim.consumer.spark.apply.plan import NO_SNAPSHOT, ChangeRow, Plan, Snapshot
from seriatim.consumer.spark.apply.planner import plan, plan_part, snapshot_behind
from seriatim.consumer.spark.apply.shape import Shapes
from seriatim.consumer.spark.targets.errors import ApplyFailed, PositionMoved, TablesChanged
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.protocol.change import MalformedChange, decode

HELD_ROWS = 50_000
HELD_BYTES = 64 * 1024 * 1024
"""More than this of an unfinished transaction isn't held between micro-batches."""

_SCANNED_ROWS = 2_000
"""Where fewer rows are held, planning them once more costs less than to look for a commit first."""
_INNER = frozenset({"begin", "c", "u", "d", "t"})
_Made = TypeVar("_Made")

COLUMNS = ("offset", "value")
"""What is needed of a record, in `ChangeRow`'s order."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a micro-batch.

    position: first offset that is not in the target. records: rows of the micro-batch. changes, transactions: carried
    out now, those of earlier micro-batches included that were completed. commit_ts_ms: the newest commit among them. source_lsn: up to where
    in the source's log all is in the target; None where nothing came that tells.
    """

    position: int
    records: int
    changes: int = 0
    transactions: int = 0
    commit_ts_ms: int | None = None
    source_lsn: int | None = None


def change_rows(table: pa.Table) -> list[ChangeRow]:
    """The rows of an Arrow table with `COLUMNS`, by rising offset."""
    columns = [table.column(name).to_pylist() for name in COLUMNS]
    rows = list(map(ChangeRow._make, zip(*columns, strict=True)))
    # Spark hands partitions out in their order, so this only looks; it would move rows if a plan ever changed that.
    rows.sort()
    return rows


class Application:
    """Applies the micro-batches of one run of a query to one target.

    `read(start, end)` gives the records of a range of offsets, no more at a time than a micro-batch brought. The micro-batches must
    follow each other without a gap, the first one beginning at `position`, which the target was claimed at with `token`. A
    micro-batch that raised may be handed in again. `snapshot`: the one under way at `position`, in the target in part.
    """

    def __init__(
        self,
        target: PostgresTarget,
        queue_id: int,
        token: int,
        position: int,
        read: Callable[[int, int], Sequence[ChangeRow]],
        snapshot: Snapshot | None = None,
    ) -> None:
        self._target = target
        self._queue_id = queue_id
        self._token = token
        self._read = read
        self._shapes: Shapes | None = None
        self._held: list[ChangeRow] | None = []
        self._ends: list[int] = []
        self.position = position
        self.snapshot = NO_SNAPSHOT if position == 0 else snapshot

    def apply(self, rows: Sequence[ChangeRow]) -> Outcome:
        """Apply what is complete in `rows` and what is held; all of it, and the new position, or nothing.

        Raises:
            UnfitTarget, ApplyFailed: of a transaction; all before it is in the target, so that it can be mended for what follows.
            BrokenStream: nothing was done, and trying again won't help.
            Fenced: a newer replay has the target. TargetLost, TargetBusy: to be tried again.
            PositionMoved: the target stands before what was applied: somebody restored it. To be begun anew from there.
        """
        if not rows:
            return Outcome(self.position, 0)
        end = rows[-1].offset + 1
        while self.position < end:
            try:
                return self._apply(rows, end)
            except PositionMoved as moved:
                # An earlier try reached the target although its answer didn't reach us.
                position = int(str(moved.details["position"]))
                if position <= self.position:
                    raise
                self._moved(position)
                self.snapshot = None
            except (UnfitTarget, ApplyFailed):
                parts = _transactions(rows)
                if len(parts) == 1:
                    raise
                # What comes before the source's ALTER TABLE fits a target that what comes behind it doesn't fit.
                return _together([self.apply(part) for part in parts])
        return Outcome(self.position, len(rows))

    def pass_gap(self, end: int) -> None:
        """Move the target to `end`, before which no more will come, as behind re-sends.

        Nothing at 0, where the target has yet to begin, nor where a transaction is unfinished: it needs what it began with.
        Raises as `apply`.
        """
        if self._held == [] and 0 < self.position < end:
            self._target.apply_parts(self._queue_id, self.position, end, lambda: iter(()), self._token, self.snapshot)
            self._moved(end)

    def _apply(self, rows: Sequence[ChangeRow], end: int) -> Outcome:
        held = self._held
        is_much = held is None or len(held) > _SCANNED_ROWS
        complete = _complete(rows) if is_much else len(rows)
        if complete == 0:
            self._hold(rows, end)
            return Outcome(self.position, len(rows))
        if held is None:
            return self._apply_parts(rows, complete)
        taken = [*held, *rows]
        planned = self._planned(lambda shapes: self._carried_out(plan(taken, self.position, shapes, self.snapshot)))
        if planned.end > planned.start:
            self._reached(planned.end, planned.snapshot, planned.leftover)
        else:
            self._hold(rows, end)
        done = planned.changes, planned.transactions, planned.commit_ts_ms, planned.source_lsn
        return Outcome(self.position, len(rows), *done)

    def _carried_out(self, planned: Plan) -> Plan:
        if planned.end > planned.start:
            self._target.apply(self._queue_id, planned, self._token)
        return planned

    def _apply_parts(self, rows: Sequence[ChangeRow], complete: int) -> Outcome:
        """What was let go, and the first `complete` of `rows`, by which it is finished."""
        end, snapshot = rows[complete - 1].offset + 1, snapshot_behind(rows[complete - 1])
        given_up: list[range] = []
        while True:
            try:
                applied = self._planned(
                    lambda shapes: self._target.apply_parts(
                        *(self._queue_id, self.position, end),
                        lambda: self._parts(rows[:complete], end, given_up, shapes),
                        *(self._token, snapshot),
                    )
                )
            except GivenUp as error:
                given_up.append(range(error.begun_at, error.ended_at))
                continue
            self._reached(end, snapshot, rows[complete:])
            done = applied.changes, applied.transactions, applied.commit_ts_ms, applied.source_lsn
            return Outcome(end, len(rows), *done)

    def _parts(self, rows: Sequence[ChangeRow], end: int, given_up: Sequence[range], shapes: Shapes) -> Iterator[Plan]:
        """Plans from the target's position to `end`, one for each micro-batch that was let go, and one for `rows`, the last."""
        start, unfinished, snapshot = self.position, None, self.snapshot
        for stop in [*self._ends, end]:
            part = rows if stop == end else self._read(start, stop)
            wanted = [row for row in part if not any(row.offset in gap for gap in given_up)] if given_up else part
            planned, unfinished = plan_part(wanted, start, stop, shapes, unfinished, snapshot)
            yield planned
            start, snapshot = stop, planned.snapshot
        if unfinished is not None:
            raise BrokenStream("a transaction that was complete before isn't any more", unfinished.begun_at)

    def _planned(self, make: Callable[[Shapes], _Made]) -> _Made:
        """What `make` makes with the target's tables, which somebody may have mended, or altered, since they were looked at."""
        while True:
            is_new = self._shapes is None
            shapes = self._shapes = self._target.tables() if self._shapes is None else self._shapes
            try:
                return make(shapes)
            except UnfitTarget as error:
                if is_new and not isinstance(error, TablesChanged):
                    raise
                self._shapes = None

    def _moved(self, position: int) -> None:
        """The target stands further than was known."""
        self.position = position
        self._ends = [end for end in self._ends if end > position]
        if self._held is not None or not self._ends:
            self._held = [row for row in self._held or () if row.offset >= position]

    def _reached(self, position: int, snapshot: Snapshot | None, leftover: Sequence[ChangeRow]) -> None:
        """All up to `position` is in the target, where `snapshot` is under way; `leftover` was handed in, and comes behind it."""
        self.position = position
        self.snapshot = snapshot
        self._held, self._ends = [], []
        if leftover:
            self._hold(leftover, leftover[-1].offset + 1)

    def _hold(self, rows: Sequence[ChangeRow], end: int) -> None:
        """Keep what a transaction that isn't complete yet has so far; or only where its micro-batches ended."""
        self._ends.append(end)
        held = None if self._held is None else [*self._held, *rows]
        is_small = held is not None and len(held) <= HELD_ROWS and sum(len(row.value) for row in held) <= HELD_BYTES
        self._held = held if is_small else None


def _transactions(rows: Sequence[ChangeRow]) -> list[Sequence[ChangeRow]]:
    """The rows cut behind each commit, and behind a snapshot."""
    ends = [number for number, row in enumerate(rows, 1) if _operation(row) in {"commit", "snapshot_end"}]
    parts = [rows[start:end] for start, end in pairwise([0, *ends, len(rows)])]
    return [part for part in parts if part]


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(
        outcomes[-1].position,
        sum(each.records for each in outcomes),
        sum(each.changes for each in outcomes),
        sum(each.transactions for each in outcomes),
        next((each.commit_ts_ms for each in reversed(outcomes) if each.commit_ts_ms is not None), None),
        next((each.source_lsn for each in reversed(outcomes) if each.source_lsn is not None), None),
    )


def _complete(rows: Sequence[ChangeRow]) -> int:
    """How many of them come before, or are, the last one behind which a plan may end; none, where a transaction goes on to the end.

    Looks from the end, where it is found soon if there is one.
    """
    for count in range(len(rows), 0, -1):
        if _operation(rows[count - 1]) not in _INNER:
            return count
    return 0


def _operation(row: ChangeRow) -> str | None:
    try:
        return decode(row.value).op
    except MalformedChange:
        return None  # the plan says what is wrong, and where
