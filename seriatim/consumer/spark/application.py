"""How micro-batches reach a target: by transactions of the source, from the target's own position.

Problem: a micro-batch begins and ends anywhere, also inside a transaction; it may have been applied before, by a run that
was killed before it could say so; and a transaction may be larger than memory likes.

Idea: the target's position is the only memory. The rows between that position and the micro-batch are *held* while they
are few; when they aren't, they are let go and read again from the queue once the commit that completes them has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from seriatim.consumer.spark.apply.errors import UnfitTarget
from seriatim.consumer.spark.apply.plan import ChangeRow, Plan
from seriatim.consumer.spark.apply.planner import plan
from seriatim.consumer.spark.apply.shape import Shapes
from seriatim.consumer.spark.targets.errors import PositionMoved
from seriatim.consumer.spark.targets.positions import Position
from seriatim.consumer.spark.targets.postgres import Applied
from seriatim.protocol.change import MalformedChange, decode

HELD_ROWS = 50_000
HELD_BYTES = 64 * 1024 * 1024
"""More than this of an unfinished transaction isn't held between micro-batches."""

_SCANNED_ROWS = 2_000
"""Where fewer rows are held, planning them once more costs less than to look for a commit first."""
_INNER = frozenset({"begin", "c", "u", "d", "t"})
_MOVES = 5

COLUMNS = ("offset", "source", "seq", "value")
"""What is needed of a record, in `ChangeRow`'s order."""


class Target(Protocol):
    """What is needed of a target; `targets.postgres.PostgresTarget` is one."""

    def tables(self) -> Shapes: ...

    def position(self, queue_id: int) -> Position | None: ...

    def apply(self, queue_id: int, plan: Plan, token: int) -> Applied: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a micro-batch.

    position: first offset that is not in the target. records: rows of the micro-batch. changes, transactions: carried
    out now, those of earlier micro-batches included that were completed. commit_ts_ms: the newest commit among them.
    """

    position: int
    records: int
    changes: int = 0
    transactions: int = 0
    commit_ts_ms: int | None = None


def change_rows(table: pa.Table) -> list[ChangeRow]:
    """The rows of an Arrow table with `COLUMNS`, by rising offset."""
    columns = [
        table.column("offset").to_pylist(),
        table.column("source").to_pylist(),
        table.column("seq").cast(pa.uint64()).to_pylist(),
        table.column("value").to_pylist(),
    ]
    rows = list(map(ChangeRow._make, zip(*columns, strict=True)))
    # Spark hands partitions out in their order, so this only looks; it would move rows if a plan ever changed that.
    rows.sort()
    return rows


class Application:
    """Applies the micro-batches of one run of a query to one target.

    `read(start, end)` gives the records of a range of offsets. The micro-batches must follow each other without a gap,
    the first one beginning at `position`, which the target was claimed at with `token`. A micro-batch that raised may
    be handed in again.
    """

    def __init__(
        self,
        target: Target,
        queue_id: int,
        token: int,
        position: int,
        read: Callable[[int, int], Sequence[ChangeRow]],
    ) -> None:
        self._target = target
        self._queue_id = queue_id
        self._token = token
        self._read = read
        self._shapes: Shapes | None = None
        self._held: list[ChangeRow] | None = []
        self.position = position

    def apply(self, rows: Sequence[ChangeRow]) -> Outcome:
        """Apply what is complete in `rows` and what is held; all of it, and the new position, or nothing.

        Raises:
            UnfitTarget, ApplyFailed, BrokenStream: nothing was done, and trying again won't help.
            Fenced: a newer replay has the target. TargetLost, TargetBusy: to be tried again.
        """
        if not rows:
            return Outcome(self.position, 0)
        end = rows[-1].offset + 1
        whole = self._whole(rows, end)
        if whole is None:
            return Outcome(self.position, len(rows))
        for _ in range(_MOVES):
            if self.position >= end:
                self._hold(())
                return Outcome(self.position, len(rows))
            planned = self._planned(whole)
            if planned.end == planned.start:
                self._hold(planned.leftover)
                return Outcome(self.position, len(rows))
            try:
                self._target.apply(self._queue_id, planned, self._token)
            except PositionMoved as moved:
                # An earlier try reached the target although its answer didn't reach us; or somebody restored the target.
                before, self.position = self.position, int(str(moved.details["position"]))
                if self.position < before:
                    whole = self._read(self.position, end)
                continue
            self.position = planned.end
            self._hold(planned.leftover)
            return Outcome(planned.end, len(rows), planned.changes, planned.transactions, planned.commit_ts_ms)
        raise PositionMoved(
            f"the target's position changed {_MOVES} times under this replay: who else writes it?",
            position=self.position,
        )

    def _whole(self, rows: Sequence[ChangeRow], end: int) -> Sequence[ChangeRow] | None:
        """All rows from the target's position on; None where they complete nothing."""
        held = self._held
        is_much = held is None or len(held) > _SCANNED_ROWS
        if is_much and not _may_complete(rows):
            if held is not None:
                self._hold([*held, *rows])
            return None
        return self._read(self.position, end) if held is None else [*held, *rows]

    def _planned(self, rows: Sequence[ChangeRow]) -> Plan:
        if self._shapes is not None:
            try:
                return plan(rows, self.position, self._shapes)
            except UnfitTarget:
                pass  # somebody may have mended the target since its tables were looked at
        self._shapes = self._target.tables()
        return plan(rows, self.position, self._shapes)

    def _hold(self, rows: Sequence[ChangeRow]) -> None:
        is_small = len(rows) <= HELD_ROWS and sum(len(row.value) for row in rows) <= HELD_BYTES
        self._held = list(rows) if is_small else None


def _may_complete(rows: Sequence[ChangeRow]) -> bool:
    """Whether a transaction may end among these rows. Looks from the end, where it is found soon if there is one."""
    for row in reversed(rows):
        try:
            if decode(row.value).op not in _INNER:
                return True
        except MalformedChange:
            return True  # the plan says what is wrong, and where
    return False
