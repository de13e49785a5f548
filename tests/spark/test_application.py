"""Micro-batches to a target that only keeps what it is told: cuts, repeats, moves, and what is held or read again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from seriatim.consumer.spark import application
from seriatim.consumer.spark.application import Application, Outcome
from seriatim.consumer.spark.apply.errors import BrokenStream, MissingColumns, MissingTables
from seriatim.consumer.spark.apply.plan import ChangeRow, Snapshot
from seriatim.consumer.spark.apply.shape import TableName, TableShape
from seriatim.consumer.spark.targets.errors import ApplyFailed, PositionMoved, TablesChanged, TargetLost
from seriatim.consumer.spark.targets.postgres import Applied, Position
from seriatim.protocol.change import Change, Origin, encode

NAME = TableName("public", "stock")
SHAPE = TableShape(
    NAME, {"id": "bigint"}, ("id",), unique=(frozenset({"id"}),), arbiters=frozenset({frozenset({"id"})})
)


class MemoryTarget:
    """Keeps the ranges of offsets it was given; `fails` are raised in turn, before or after the plan is in."""

    def __init__(self) -> None:
        self.stored = Position(0, 1)
        self.ranges: list[tuple[int, int]] = []
        self.changes = 0
        self.has_table = True
        self.shape = SHAPE
        self.fails: list[str] = []

    def tables(self):
        return {NAME: self.shape} if self.has_table else {}

    def position(self, queue_id):
        return self.stored

    def apply(self, queue_id, plan, token):
        return self.apply_parts(queue_id, plan.start, plan.end, lambda: iter([plan]), token, plan.snapshot)

    def apply_parts(self, queue_id, start, end, parts, token, snapshot=None):
        failure = self.fails.pop(0) if self.fails else ""
        if failure == "before":
            raise TargetLost("gone")
        if failure == "refused":
            raise ApplyFailed("refused")
        if failure == "altered":
            raise TablesChanged([NAME])
        if start != self.stored.offset:
            raise PositionMoved("moved", position=self.stored.offset)
        plans = list(parts())
        assert [start, *(plan.end for plan in plans)] == [*(plan.start for plan in plans), end if plans else start]
        self.stored = replace(self.stored, offset=end, snapshot=snapshot)
        self.ranges.append((start, end))
        changes = sum(plan.changes for plan in plans)
        self.changes += changes
        if failure == "after":
            raise TargetLost("gone")
        return Applied(
            self.stored,
            changes,
            {},
            sum(plan.transactions for plan in plans),
            plans[-1].commit_ts_ms if plans else None,
            1,
        )


def log(sizes: list[int]) -> list[ChangeRow]:
    """Transactions of these sizes, from offset 0."""
    rows: list[ChangeRow] = []

    def add(op: str, after=None, **origin) -> None:
        source = Origin("db", "slot", 1, len(rows), **origin)
        offset = len(rows)
        rows.append(ChangeRow(offset, encode(Change(op, None, after, source, offset))))

    for size in sizes:
        add("begin")
        for number in range(size):
            add("c", {"id": number}, schema="public", table="stock", key=("id",))
        add("commit", changes=size, end_lsn=1)
    return rows


def snapshot(offset: int, size: int) -> list[ChangeRow]:
    """A snapshot of so many rows, from this offset on."""
    named = {"schema": "public", "table": "stock", "key": ("id",), "is_snapshot": True}
    made = [
        Change("snapshot_begin", None, None, Origin("db", "slot", 1, 1, is_snapshot=True), 1),
        *(Change("r", None, {"id": n}, Origin("db", "slot", 1, 2 + n, **named), 1) for n in range(size)),
        Change("snapshot_end", None, None, Origin("db", "slot", 1, 0, is_snapshot=True, changes=size), 1),
    ]
    return [ChangeRow(n, encode(change)) for n, change in enumerate(made, offset)]


class Queue:
    def __init__(self, rows: list[ChangeRow]) -> None:
        self.rows = rows
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, end: int) -> list[ChangeRow]:
        self.reads.append((start, end))
        return self.rows[start:end]


def applying(target: MemoryTarget, queue: Queue) -> Application:
    return Application(target, 7, 1, target.stored.offset, queue.read, target.stored.snapshot)


def replayed(sizes: list[int], count: int, seed: int, *, new_runs: float) -> tuple[MemoryTarget, Queue]:
    """All of a log of `count` transactions of such sizes, in micro-batches that end anywhere, with failures and new runs between them."""
    chance = random.Random(seed)
    rows = log([chance.choice(sizes) for _ in range(count)])
    target, queue = MemoryTarget(), Queue(rows)
    running = applying(target, queue)
    at = 0
    while at < len(rows):
        part = rows[at : at + chance.randrange(1, 25)]
        target.fails = [chance.choice(["", "", "before", "after"])]
        if chance.random() < new_runs:
            running = applying(target, queue)  # another run, which starts where the target stands
            at = target.stored.offset
            continue
        try:
            running.apply(part)
        except TargetLost:
            running.apply(part)
        at += len(part)
    assert target.stored.offset == len(rows)
    assert target.changes == sum(b'"op":"c"' in row.value for row in rows)
    return target, queue


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_cuts_and_failures_every_transaction_arrives_once(seed):
    target, queue = replayed([0, 1, 3, 40], 60, seed, new_runs=0.05)
    assert target.ranges == list(zip([0, *(end for _, end in target.ranges)], [end for _, end in target.ranges]))  # noqa: B905
    assert queue.reads == []


@pytest.fixture
def little_is_held(monkeypatch):
    monkeypatch.setattr(application, "HELD_ROWS", 30)
    monkeypatch.setattr(application, "_SCANNED_ROWS", 10)


def test_large_transaction_is_let_go_and_read_again_part_by_part(little_is_held):
    rows = log([2, 500, 3])
    target, queue = MemoryTarget(), Queue(rows)
    running = applying(target, queue)
    outcomes = [running.apply(rows[at : at + 20]) for at in range(0, len(rows), 20)]
    assert queue.reads == [(4, 20), *((at, at + 20) for at in range(20, 500, 20))]
    assert target.ranges == [(0, 4), (4, 511)]
    assert target.stored.offset == len(rows)
    assert sum(outcome.changes for outcome in outcomes) == 505
    assert sum(outcome.transactions for outcome in outcomes) == 3
    assert outcomes[3].changes == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_cuts_and_failures_large_transactions_arrive_once(little_is_held, seed):
    _, queue = replayed([0, 3, 40, 200], 30, seed, new_runs=0.02)
    assert queue.reads
    assert max(end - start for start, end in queue.reads) <= 25  # never more than a micro-batch


def test_what_a_snapshot_takes_the_place_of_is_left_out_also_where_it_was_let_go(little_is_held):
    rows = log([3, 100])[:-30]  # the capture was killed in the second one, and a new one began with a snapshot
    rows += snapshot(len(rows), 0)
    rows += [row._replace(offset=len(rows) + number) for number, row in enumerate(log([4]))]
    target, queue = MemoryTarget(), Queue(rows)
    running = applying(target, queue)
    for at in range(0, len(rows), 20):
        running.apply(rows[at : at + 20])
    assert target.stored.offset == len(rows)
    assert target.changes == 3 + 4


def test_a_large_transaction_for_a_table_that_was_made_meanwhile(little_is_held):
    rows = log([100])
    target, queue = MemoryTarget(), Queue(rows)
    target.has_table = False
    running = applying(target, queue)
    for at in range(0, 100, 20):
        running.apply(rows[at : at + 20])
    with pytest.raises(MissingTables):
        running.apply(rows[100:])
    target.has_table = True
    assert running.apply(rows[100:]).changes == 100


def test_micro_batch_that_is_in_the_target_already_changes_nothing():
    rows = log([3, 3])
    target, queue = MemoryTarget(), Queue(rows)
    applying(target, queue).apply(rows)
    before = list(target.ranges)
    late = Application(target, 7, 1, 0, queue.read)  # believes that nothing was applied
    outcome = late.apply(rows)
    assert (outcome.position, outcome.changes) == (len(rows), 0)
    assert target.ranges == before


def test_a_target_that_was_set_back_is_told_so_that_the_query_begins_anew_from_there():
    rows = log([3, 3, 3])
    target, queue = MemoryTarget(), Queue(rows)
    running = applying(target, queue)
    running.apply(rows[:10])
    target.stored = Position(5, 1)
    with pytest.raises(PositionMoved) as raised:
        running.apply(rows[10:])
    assert raised.value.details["position"] == 5
    applying(target, queue).apply(rows[5:])
    assert target.stored.offset == 15


def test_table_that_was_made_meanwhile_is_found():
    rows = log([3])
    target, queue = MemoryTarget(), Queue(rows)
    target.has_table = False
    running = applying(target, queue)
    with pytest.raises(MissingTables):
        running.apply(rows)
    target.has_table = True
    assert running.apply(rows).changes == 3


@pytest.mark.parametrize("size", [3, 100])
def test_tables_that_are_altered_meanwhile_are_planned_for_anew(little_is_held, size):
    rows = log([size])
    target, queue = MemoryTarget(), Queue(rows)
    running = applying(target, queue)
    target.fails = ["altered", "altered"]
    outcomes = [running.apply(rows[at : at + 20]) for at in range(0, len(rows), 20)]
    assert (outcomes[-1].changes, target.changes, target.fails) == (size, size, [])


@pytest.mark.parametrize("cut", [0, 1, 6])
def test_a_column_that_the_source_renamed_is_renamed_in_the_target_between_two_transactions(cut):
    rows = [row._replace(value=row.value.replace(b'"id":1}', b'"id":1,"old":2}')) for row in log([2, 2, 2, 2, 2])]
    rows[12:] = [row._replace(value=row.value.replace(b'"old"', b'"new"')) for row in rows[12:]]
    target, queue = MemoryTarget(), Queue(rows)
    target.shape = replace(SHAPE, columns={"id": "bigint", "old": "text"})
    running = applying(target, queue)
    if cut:
        running.apply(rows[:cut])
    with pytest.raises(MissingColumns) as raised:
        running.apply(rows[cut:])
    assert raised.value.details["offset"] == 14
    assert (target.stored.offset, target.changes) == (12, 6)
    target.shape = replace(SHAPE, columns={"id": "bigint", "new": "text"})
    started = applying(target, queue)
    assert started.apply(rows[12:]).changes == 4
    assert target.ranges[-1] == (12, 20)


def test_what_the_source_renames_behind_a_snapshot_is_renamed_in_the_target_behind_it():
    behind = [
        row._replace(offset=4 + row.offset, value=row.value.replace(b'{"id":1}', b'{"new":1,"id":1}'))
        for row in log([2])
    ]
    target, queue = MemoryTarget(), Queue([*snapshot(0, 2), *behind])
    with pytest.raises(MissingColumns):
        applying(target, queue).apply(queue.rows)
    assert (target.stored.offset, target.changes) == (4, 2)
    target.shape = replace(SHAPE, columns={"id": "bigint", "new": "bigint"})
    assert applying(target, queue).apply(queue.rows).changes == 2


def test_one_by_one_a_micro_batch_is_told_as_one():
    rows = log([2, 2, 1])
    target, queue = MemoryTarget(), Queue(rows)
    target.fails = ["refused"]
    outcome = applying(target, queue).apply(rows[:-1])
    assert outcome == Outcome(8, len(rows) - 1, 4, 2, 7, 1)
    assert target.ranges == [(0, 4), (4, 8)]


def test_a_target_goes_behind_a_gap_but_not_from_within_a_transaction():
    rows = log([3])
    target, queue = MemoryTarget(), Queue(rows)
    running = applying(target, queue)
    running.apply(rows[:2])
    running.pass_gap(1000)
    assert target.stored.offset == 0
    running.apply(rows[2:])
    running.pass_gap(1000)
    assert (target.stored.offset, running.position) == (1000, 1000)
    behind = [row._replace(offset=1000 + row.offset) for row in rows]
    assert running.apply(behind).changes == 3
    assert target.stored.offset == 1005


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_a_hole_in_a_snapshot_stops_it_also_between_micro_batches(size):
    rows = [*log([3]), *snapshot(5, 6), *(row._replace(offset=13 + row.offset) for row in log([3]))]
    target = MemoryTarget()
    running = applying(target, Queue(rows))
    for at in range(0, len(rows), size):
        running.apply(rows[at : at + size])
    assert target.stored.offset == len(rows)
    target = MemoryTarget()
    running = applying(target, Queue(rows))
    behind = [row._replace(offset=1000 + row.offset) for row in rows[9:]]  # what is between was given up
    for at in range(0, 8, size):
        running.apply(rows[at : min(at + size, 8)])
    running.pass_gap(1000)
    with pytest.raises(BrokenStream, match="record 5 of a snapshot came after 3"):
        running.apply(behind[:size])
    assert (target.stored.offset, target.changes) == (1000, 3 + 2)


def heartbeat(offset: int) -> ChangeRow:
    return ChangeRow(offset, encode(Change("heartbeat", None, None, Origin("db", "slot", 9, 0), 1)))


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        (9, [heartbeat(1000)]),  # alone in its micro-batch
        (9, [row._replace(offset=1000 + row.offset) for row in log([3])]),
        (5, snapshot(1000, 6)[3:]),  # its begin was lost
        (5, snapshot(1000, 6)[-1:]),
        (0, snapshot(1000, 6)[3:]),
        (
            9,
            [
                row._replace(value=row.value.replace(b'"commit_lsn":1', b'"commit_lsn":7'))
                for row in snapshot(996, 6)[4:]
            ],
        ),
    ],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_what_is_left_of_a_snapshot_behind_a_gap_stops_it_whatever_it_is(before, behind, is_new):
    rows = [*log([3]), *snapshot(5, 6)]
    target = MemoryTarget()
    running = applying(target, Queue(rows))
    running.apply(rows[:before])
    if is_new:
        running = applying(target, Queue(rows))
    running.pass_gap(behind[0].offset)
    with pytest.raises(BrokenStream):
        running.apply(behind)
    assert target.stored.offset in {0, behind[0].offset}


def test_a_large_transaction_is_known_to_come_behind_a_whole_snapshot(little_is_held):
    transactions = [row._replace(offset=8 + row.offset) for row in log([100])]
    rows = [*snapshot(0, 6), *transactions, *snapshot(110, 6)]
    target, queue = MemoryTarget(), Queue(rows)
    running = applying(target, queue)
    for at in range(0, len(rows), 20):
        running.apply(rows[at : at + 20])
    assert (target.stored.offset, queue.reads != []) == (118, True)
    target.stored = Position(8, 1, Snapshot(1, 7))  # one that lacks its end
    running = applying(target, queue)
    with pytest.raises(BrokenStream, match="a transaction begins within a snapshot"):
        running.apply(rows[8:28])


def test_a_micro_batch_of_which_a_part_was_applied_may_be_handed_in_again():
    rows = [*log([3]), *snapshot(5, 6)]
    target = MemoryTarget()
    running = applying(target, Queue(rows))
    running.apply(rows[:8])
    assert running.apply(rows[4:10]).position == 10
    assert running.apply(rows).changes == 2


def test_value_that_is_no_change_stops_it():
    rows = log([3])
    broken = [*rows[:2], rows[2]._replace(value=b"hello"), *rows[3:]]
    with pytest.raises(BrokenStream) as raised:
        applying(MemoryTarget(), Queue(broken)).apply(broken)
    assert raised.value.details["offset"] == 2
