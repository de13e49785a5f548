from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from random import Random
from struct import pack, unpack

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.consumer.spark.apply.digits import rounding_columns
from seriatim.consumer.spark.apply.errors import (
    GeneratedKey,
    MissingColumns,
    MissingKey,
    MissingTables,
    NarrowColumn,
    UnloggedTable,
)
from seriatim.consumer.spark.apply.plan import NO_SNAPSHOT, ChangeRow, Plan, Snapshot
from seriatim.consumer.spark.apply.planner import plan, plan_part
from seriatim.consumer.spark.apply.shape import TableName, TableShape
from seriatim.consumer.spark.apply.spelling import spelled
from seriatim.consumer.spark.targets import catalogue, execution, positions, postgres, sessions, statements
from seriatim.consumer.spark.targets import parts as target_parts
from seriatim.consumer.spark.targets.errors import (
    ApplyFailed,
    CoarseKey,
    Diverged,
    NotClaimed,
    OtherJob,
    OtherQueue,
    PooledTarget,
    PositionMoved,
    RivalJob,
    TablesChanged,
    TargetBusy,
    TargetLost,
    TruncateRefused,
)
from seriatim.consumer.spark.targets.execution import BULK_FROM
from seriatim.consumer.spark.targets.postgres import Position, PostgresTarget
from seriatim.protocol.change import TEXT_SETTINGS, Change, Origin, Table, encode
from seriatim.protocol.errors import Fenced, InvalidArgument, SeriatimError
from seriatim.protocol.postgres import TARGET_SETTINGS
from tests.postgres.pool import Pool
from tests.property import change_strategies as changes
from tests.waiting import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

QUEUE = 7


def transaction(first: int, *steps: tuple, table: str = "keyed", key=("id",), text_key=()) -> list[ChangeRow]:
    """Steps are (op, before, after) or (op, before, after, unchanged)."""

    def row(place, op, before=None, after=None, unchanged=(), **extra) -> ChangeRow:
        named = ("public", table, tuple(key), tuple(text_key)) if op in "cud" else (None, None, ())
        origin = Origin("db", "slot", 100, place, 5, *named, unchanged=tuple(unchanged), **extra)
        return ChangeRow(first + place, encode(Change(op, before, after, origin, 1)))

    return [
        row(0, "begin"),
        *(row(place, *step) for place, step in enumerate(steps, 1)),
        row(len(steps) + 1, "commit", changes=len(steps), end_lsn=1),
    ]


def inserts(count: int, first: int = 0) -> list[ChangeRow]:
    return transaction(first, *(("c", None, {"id": i, "code": i, "note": f"n{i}"}) for i in range(count)))


def applied(target: PostgresTarget, start: int, *steps, **named) -> int:
    """Apply a transaction of these steps, which begins at offset `start`; the offset behind it."""
    made = transaction(start, *steps, **named)
    target.apply(QUEUE, planned(target, made, start), 1)
    return start + len(made)


def emptying(first: int, *names: str, **extra: bool) -> list[ChangeRow]:
    """A transaction that truncates these tables, as the source's log names them."""
    begin, _, commit = transaction(first, ("d", {}, None))
    tables = tuple(Table("public", name, ("id",), ("id",)) for name in names)
    origin = Origin("db", "slot", 100, 1, 5, tables=tables, **extra)
    return [begin, ChangeRow(first + 1, encode(Change("t", None, None, origin, 1))), commit]


def fetch(dsn: str, query: str) -> list[tuple]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def dsn(new_database) -> str:
    made = new_database()
    with psycopg.connect(made) as connection:
        connection.execute(changes.SCHEMA)
    return made


@pytest.fixture
def target(dsn):
    with PostgresTarget(dsn, "job") as made:
        made.claim(QUEUE, "q", 1)
        yield made


def planned(target: PostgresTarget, rows: list[ChangeRow], start: int = 0) -> Plan:
    return plan(rows, start, target.tables())


@pytest.mark.parametrize("count", [3, BULK_FROM * 3])
def test_repeated_micro_batch_does_nothing(target, dsn, count) -> None:
    made = planned(target, inserts(count))
    applied = target.apply(QUEUE, made, 1)
    assert applied.position == Position(count + 2, 1)
    assert applied.rows == {"public.keyed": count}
    assert fetch(dsn, "SELECT count(*), sum(code) FROM keyed") == [(count, sum(range(count)))]
    with pytest.raises(PositionMoved) as refused:
        target.apply(QUEUE, made, 1)
    assert refused.value.details["position"] == count + 2
    assert target.position(QUEUE) == applied.position


def test_older_token_is_fenced_and_a_newer_one_goes_on(target, dsn) -> None:
    made = planned(target, inserts(2))
    with PostgresTarget(dsn, "job") as newer:
        assert newer.claim(QUEUE, "q", 2) == Position(0, 2)
        with pytest.raises(Fenced):
            target.apply(QUEUE, made, 1)
        with pytest.raises(Fenced):
            target.claim(QUEUE, "q", 1)
        assert fetch(dsn, "SELECT count(*) FROM keyed") == [(0,)]
        newer.apply(QUEUE, made, 2)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(2,)]


def test_a_claim_that_waits_holds_up_no_other_job(target, dsn) -> None:
    impatient = f"{dsn}?options=-clock_timeout%3D5s"
    with (
        psycopg.connect(dsn) as holding,
        PostgresTarget(dsn, "job") as waiting,
        PostgresTarget(impatient, "other") as other,
    ):
        holding.execute("SELECT FROM seriatim_replay.positions FOR UPDATE")
        claiming = threading.Thread(target=waiting.claim, args=(QUEUE, "q", 2))
        claiming.start()
        while not fetch(dsn, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            claiming.join(0.01)
        assert other.claim(QUEUE + 1, "another", 1) == Position(0, 1)
        assert claiming.is_alive()
        holding.rollback()
        claiming.join()


def test_nothing_is_applied_without_a_claim(dsn) -> None:
    with PostgresTarget(dsn, "job") as target:
        assert target.position(QUEUE) is None
        with pytest.raises(NotClaimed):
            target.apply(QUEUE, planned(target, inserts(1)), 1)
        assert target.claim(QUEUE, "q", 1) == Position(0, 1)


@pytest.mark.parametrize(
    ("taken", "left"),
    [("DROP SCHEMA seriatim_replay CASCADE", 0), ("ALTER TABLE seriatim_replay.positions DROP COLUMN snapshot", 3)],
)
def test_a_position_that_was_taken_away_with_its_table_is_made_anew(target, dsn, taken, left) -> None:
    """As by a backup from before the replay, or one of an earlier version, that is put back beneath it."""
    target.apply(QUEUE, planned(target, inserts(1)), 1)
    with psycopg.connect(dsn) as connection:
        connection.execute(taken)
    with pytest.raises(NotClaimed):
        target.apply(QUEUE, planned(target, inserts(1, 3), 3), 1)
    assert target.claim(QUEUE, "q", 1) == Position(left, 1)


def test_an_overtaken_replay_finds_the_position_moved(target, dsn) -> None:
    """Two replays with the same plan at the same time: the second waits for the first, then does nothing."""
    made = planned(target, inserts(5))
    moved, go_on = threading.Event(), threading.Event()

    def pause(step: str) -> None:
        if step == "changes carried out":
            moved.set()
            assert go_on.wait(60)

    failures: list[Exception] = []
    with PostgresTarget(dsn, "job", on_step=pause) as slow:

        def first() -> None:
            slow.apply(QUEUE, made, 1)

        def second() -> None:
            try:
                target.apply(QUEUE, made, 1)
            except PositionMoved as error:
                failures.append(error)

        threads = [threading.Thread(target=first), threading.Thread(target=second)]
        threads[0].start()
        assert moved.wait(60)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert len(failures) == 1
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(5,)]


@pytest.mark.parametrize("count", [4, BULK_FROM * 2])
def test_a_refused_change_names_table_key_and_offset(target, dsn, count) -> None:
    rows = inserts(count)
    rows[3:4] = transaction(2, ("c", None, {"id": 2, "code": "no number", "note": ""}))[1:2]
    with pytest.raises(ApplyFailed) as refused:
        target.apply(QUEUE, planned(target, rows), 1)
    assert refused.value.details == {"table": "public.keyed", "key": (2,), "offset": 3}
    assert target.position(QUEUE) == Position(0, 1)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(0,)]
    target.apply(QUEUE, planned(target, inserts(count)), 1)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(count,)]


def test_a_transaction_empties_the_stages_that_it_filled_and_touches_no_others(target, dsn) -> None:
    """With those of 200 tables in the session, each commit took 0.4 s, whichever table it was about."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE other (id integer PRIMARY KEY)")
    start = 0
    for table in ("keyed", "other", "other"):
        rows = [("c", None, {"id": start + number}) for number in range(BULK_FROM)]
        start = applied(target, start, *rows, table=table)
        if table == "keyed":
            (first,) = _stages(target)
            target._connection.execute(f"INSERT INTO {first} VALUES (1)")
    assert {
        name: target._connection.execute(f"SELECT count(*) FROM {name}").fetchone() for name in _stages(target)
    } == {
        first: (1,),
        "seriatim_stage_2": (0,),
    }


def test_a_stage_that_is_used_no_more_goes_and_keeps_nothing_from_being_frozen(target, dsn, monkeypatch) -> None:
    """One that stays for months would end with a database that takes no transactions any more."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE other (id integer PRIMARY KEY)")

    def rows(start: int) -> list[tuple]:
        return [("c", None, {"id": start + number}) for number in range(BULK_FROM)]

    start = applied(target, 0, *rows(0))
    start = applied(target, start, *rows(start), table="other")
    first, second = sorted(_stages(target))
    monkeypatch.setattr(execution, "IDLE_S", -1.0)

    def interrupted(step: str) -> None:
        if step == "changes carried out":
            raise KeyboardInterrupt

    with monkeypatch.context() as at_the_end:
        at_the_end.setattr(target, "_on_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            applied(target, start, ("c", None, {"id": start}))
    assert sorted(_stages(target)) == [first, second]
    for steps, left in (((("c", None, {"id": start}),), [second]), ((), [])):  # the other one has nothing to apply
        start = applied(target, start, *steps)
        assert _stages(target) == left
    start = applied(target, start, *rows(start))
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(2 * BULK_FROM + 1,)]


def _stages(target: PostgresTarget) -> list[str]:
    found = target._connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'seriatim_stage%'").fetchall()
    return [name for (name,) in found]


def test_what_is_refused_leaves_no_stage_behind_in_the_session(target) -> None:

    def rows(first: int, code: object) -> list[ChangeRow]:
        return transaction(first, *(("c", None, {"id": first + i, "code": code}) for i in range(BULK_FROM)))

    start = 0
    for _ in range(3):
        target.apply(QUEUE, planned(target, rows(start, None), start), 1)
        start += BULK_FROM + 2
        with pytest.raises(ApplyFailed):
            target.apply(QUEUE, planned(target, rows(start, "no number"), start), 1)
    assert len(_stages(target)) == 1


@pytest.mark.parametrize(
    ("alter", "rows", "left"),
    [
        ("ALTER note TYPE bigint USING 0", [{"id": 1, "code": 1, "note": 3_000_000_000}], (3_000_000_000, 1)),
        # Planned for a key that takes them for one row, and would leave the last one.
        (
            "DROP CONSTRAINT altered_pkey, ADD PRIMARY KEY (id, code)",
            [{"id": 1, "code": 1, "note": 1}, {"id": 1, "code": 2, "note": 1}],
            (1, 2),
        ),
    ],
)
def test_a_plan_for_tables_that_were_altered_since_is_made_anew(target, dsn, alter, rows, left) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE altered (id integer PRIMARY KEY, code integer, note integer)")
    start = 0
    for number in range(10):  # by then psycopg has the statement prepared, with the types of these columns
        steps = [("c", None, {"id": -number, "code": 0, "note": 0})]
        start = applied(target, start, *steps, table="altered", key=())
    made = transaction(start, *(("c", None, row) for row in rows), table="altered", key=())
    before = planned(target, made, start)
    with psycopg.connect(dsn) as connection:
        connection.execute(f"ALTER TABLE altered {alter}")
    with pytest.raises(TablesChanged, match=r"public\.altered"):
        target.apply(QUEUE, before, 1)
    target.apply(QUEUE, planned(target, made, start), 1)
    assert fetch(dsn, "SELECT max(note), count(*) FROM altered WHERE id = 1") == [left]


@pytest.mark.parametrize("count", [2, BULK_FROM * 2])
@pytest.mark.parametrize("alter", ["ALTER note TYPE uuid USING note::uuid", "RENAME id TO number"])
def test_a_table_that_was_being_altered_when_it_was_looked_at_is_planned_for_anew(target, dsn, alter, count) -> None:
    """The look sees what was before, and the statement behind it waits for what will be."""
    uuids = [f"00000000-0000-0000-0000-{i:012}" for i in range(count)]
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE altered (note text PRIMARY KEY, id integer)")
    start = applied(target, 0, *(("c", None, {"note": u, "id": 0}) for u in uuids), table="altered", key=("note",))
    steps = [("u", None, {"note": u, "id": 1}, ("more",)) for u in uuids]
    made = transaction(start, *steps, table="altered", key=("note",))
    before = planned(target, made, start)
    failures: list[Exception] = []

    def apply() -> None:
        try:
            target.apply(QUEUE, before, 1)
        except SeriatimError as error:
            failures.append(error)

    with psycopg.connect(dsn) as altering:
        altering.execute(f"ALTER TABLE altered {alter}")
        applying = threading.Thread(target=apply)
        applying.start()
        while not fetch(dsn, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            applying.join(0.01)
    applying.join(60)
    assert [type(failure) for failure in failures] == [TablesChanged]
    if "uuid" in alter:
        target.apply(QUEUE, planned(target, made, start), 1)
        assert fetch(dsn, "SELECT sum(id) FROM altered") == [(count,)]


def strictly(dsn: str) -> str:
    """The DSN, with another isolation for transactions that don't say theirs, as of a role's or a database's."""
    return f"{dsn}?options=-cdefault_transaction_isolation%3Drepeatable%5C%20read"


@pytest.mark.parametrize("count", [1, BULK_FROM * 2])
def test_rows_of_a_table_that_was_being_rewritten_are_found_whatever_isolation_is_the_default(dsn, count) -> None:
    """To a snapshot from before the rewrite the table is empty."""
    with PostgresTarget(strictly(dsn), "job") as target, ThreadPoolExecutor(1) as beside:
        target.claim(QUEUE, "q", 1)
        start = applied(target, 0, *(("c", None, {"id": i}) for i in range(count)))
        deletes = transaction(start, *(("d", {"id": i}, None) for i in range(count)))
        made = planned(target, deletes, start)
        with psycopg.connect(dsn) as altering:
            altering.execute("ALTER TABLE keyed ALTER note TYPE text USING note || ''")
            applying = beside.submit(target.apply, QUEUE, made, 1)
            while not fetch(dsn, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert not applying.done()
        applying.result(60)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(0,)]


def test_who_looks_at_the_tables_anew_forgets_the_types_that_columns_had(target, dsn) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE altered (id integer PRIMARY KEY, note integer)")
    start = 0
    for number in range(10):
        start = applied(target, start, ("c", None, {"id": number, "note": 0}), table="altered")
    with psycopg.connect(dsn) as connection:
        connection.execute("ALTER TABLE altered ALTER note TYPE bigint")
    applied(target, start, ("c", None, {"id": 10, "note": 3_000_000_000}), table="altered")
    assert fetch(dsn, "SELECT max(note) FROM altered") == [(3_000_000_000,)]


def test_a_plan_for_a_table_that_was_dropped_since_is_made_anew(target, dsn) -> None:
    made = planned(target, inserts(3))
    with psycopg.connect(dsn) as connection:
        connection.execute("DROP TABLE keyed")
    with pytest.raises(TablesChanged):
        target.apply(QUEUE, made, 1)
    with pytest.raises(MissingTables):
        planned(target, inserts(3))


def test_what_the_commit_refuses_is_blamed_on_no_row(dsn, role_of) -> None:
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE unlike (id integer PRIMARY KEY, code integer UNIQUE DEFERRABLE)")
        connection.execute("GRANT ALL ON unlike TO PUBLIC")
        connection.execute(f"GRANT CREATE ON DATABASE {dsn.rsplit('/', 1)[1]} TO {poor.split('//')[1].split('@')[0]}")
    with PostgresTarget(poor, "job") as target:  # whose role may not switch such rules off
        target.claim(QUEUE, "q", 1)
        with pytest.raises(ApplyFailed, match=r"from offset 0 on[\s\S]*Key \(code\)=\(1\) already exists") as refused:
            applied(target, 0, *(("c", None, {"id": i, "code": max(i, 1)}) for i in range(4)), table="unlike")
    assert refused.value.details == {"table": None, "key": None, "offset": None}


def in_parts(target: PostgresTarget, rows: list[ChangeRow], *cuts: int) -> Callable[[], Iterator[Plan]]:
    """Plans of the rows from each cut to the next, the last one to the end."""

    def parts() -> Iterator[Plan]:
        unfinished, start = None, rows[0].offset
        for cut in (*cuts, rows[-1].offset + 1):
            part = [row for row in rows if start <= row.offset < cut]
            made, unfinished = plan_part(part, start, cut, shapes, unfinished)
            yield made
            start = cut

    shapes = target.tables()
    return parts


def test_of_all_tables_those_are_looked_at_that_plans_change_and_once_in_a_transaction(
    target, dsn, monkeypatch
) -> None:
    looks, look = [], postgres.read_shapes

    def watched(*arguments: object, **more: bool) -> dict[TableName, TableShape]:
        looks.append(look(*arguments, **more))
        return looks[-1]

    row = ("c", None, {"id": 7, "code": 7, "note": "n"})
    rows = [*inserts(2), *transaction(4, row, table="keyless", key=()), *transaction(7, row)]
    parts = in_parts(target, rows, 4, 7)
    monkeypatch.setattr(postgres, "read_shapes", watched)
    target.apply_parts(QUEUE, 0, 10, parts, 1)
    assert [{str(name) for name in found} for found in looks] == [{"public.keyed"}, {"public.keyless"}]
    assert fetch(dsn, "SELECT (SELECT count(*) FROM keyed), (SELECT count(*) FROM keyless)") == [(3, 1)]


@pytest.mark.parametrize("count", [3, BULK_FROM * 4])
def test_parts_of_a_transaction_are_in_the_target_all_or_none(target, dsn, count) -> None:
    rows = inserts(count)
    seen = []

    def watched() -> Iterator[Plan]:
        for part in in_parts(target, rows, 2, count - 1)():
            yield part
            seen.append(fetch(dsn, "SELECT count(*) FROM keyed"))

    done = target.apply_parts(QUEUE, 0, count + 2, watched, 1)
    assert seen == [[(0,)]] * 3
    assert (done.position, done.changes, done.transactions) == (Position(count + 2, 1), count, 1)
    assert done.rows == {"public.keyed": count}
    assert done.commit_ts_ms == 1
    assert fetch(dsn, "SELECT count(*), sum(code) FROM keyed") == [(count, sum(range(count)))]


def test_a_position_goes_on_where_nothing_is_to_be_applied(target) -> None:
    assert target.apply_parts(QUEUE, 0, 100, lambda: iter(()), 1).position == Position(100, 1)
    assert target.position(QUEUE) == Position(100, 1)


def test_what_goes_wrong_while_parts_are_read_undoes_those_before(target, dsn) -> None:
    rows = inserts(50)

    def broken() -> Iterator[Plan]:
        yield next(in_parts(target, rows, 30)())
        raise TargetBusy("as if Spark couldn't read")

    with pytest.raises(TargetBusy):
        target.apply_parts(QUEUE, 0, 52, broken, 1)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(0,)]
    assert target.position(QUEUE) == Position(0, 1)
    target.apply_parts(QUEUE, 0, 52, in_parts(target, rows, 30), 1)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(50,)]


def slowly(target: PostgresTarget, dsn: str, parts: Callable[[], Iterator[Plan]]) -> Callable[[], Iterator[Plan]]:
    """Until a part has been read the target's session has said something again and again, or was ended."""

    def read() -> Iterator[Plan]:
        last = f"SELECT state_change FROM pg_stat_activity WHERE pid = {target._connection.info.backend_pid}"
        for part in parts():
            for _ in range(3):
                before = fetch(dsn, last)
                wait_until(lambda before=before: fetch(dsn, last) != before, 60)
            yield part

    return read


@pytest.fixture
def impatient(dsn, monkeypatch):
    """A target that ends a session which says nothing for some seconds within a transaction."""
    short = {**TARGET_SETTINGS, "idle_in_transaction_session_timeout": "10s"}
    monkeypatch.setattr(postgres, "TARGET_SETTINGS", short)
    monkeypatch.setattr(target_parts, "AWAKE_S", 0.1)
    with PostgresTarget(dsn, "job") as made:
        made.claim(QUEUE, "q", 1)
        yield made


def test_a_transaction_whose_parts_take_long_to_be_read_is_not_begun_anew_for_ever(impatient, dsn) -> None:
    """The target had ended the session by then, each time."""
    rows = inserts(3)
    assert impatient.apply_parts(QUEUE, 0, 5, slowly(impatient, dsn, in_parts(impatient, rows, 2)), 1).changes == 3
    steps = [("c", None, {"id": 10 + n, "code": code, "note": "n"}) for n, code in enumerate((1, "no number"))]
    refused = slowly(impatient, dsn, in_parts(impatient, transaction(5, *steps), 7))
    with pytest.raises(ApplyFailed) as raised:
        impatient.apply_parts(QUEUE, 5, 9, refused, 1)
    assert raised.value.details["offset"] == 7


def test_a_session_that_is_lost_while_a_part_is_read_is_told_as_lost(impatient, dsn) -> None:
    def read() -> Iterator[Plan]:
        yield next(parts)
        fetch(dsn, f"SELECT pg_terminate_backend({impatient._connection.info.backend_pid})")
        time.sleep(0.5)
        yield next(parts)

    parts = in_parts(impatient, inserts(3), 2)()
    with pytest.raises(TargetLost):
        impatient.apply_parts(QUEUE, 0, 5, read, 1)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(0,)]


def test_a_row_that_is_refused_in_a_later_part_is_named(target, dsn) -> None:
    rows = inserts(90)
    target.apply_parts(QUEUE, 0, 92, in_parts(target, rows, 30, 60), 1)
    steps = [("c", None, {"id": 100 + i, "code": 100 + i, "note": "n"}) for i in range(90)]
    steps[70] = ("c", None, {"id": 170, "code": "no number", "note": "n"})
    refused = transaction(92, *steps)
    with pytest.raises(ApplyFailed) as raised:
        target.apply_parts(QUEUE, 92, 184, in_parts(target, refused, 122, 152), 1)
    assert raised.value.details == {"table": "public.keyed", "key": (170,), "offset": 92 + 71}
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(90,)]


def test_update_with_a_value_not_sent_leaves_it(target, dsn) -> None:
    target.apply(QUEUE, planned(target, inserts(BULK_FROM + 1)), 1)
    start = target.position(QUEUE).offset
    patches = [("u", None, {"id": i, "code": -i}, ("note",)) for i in range(BULK_FROM + 1)]
    target.apply(QUEUE, planned(target, transaction(start, *patches), start), 1)
    assert fetch(dsn, "SELECT count(*) FROM keyed WHERE code = -id AND note = 'n' || id") == [(BULK_FROM + 1,)]


@pytest.mark.parametrize(
    ("step", "left"),
    [(("d", {"id": "1"}, None), []), (("u", {"id": "1"}, {"id": "2", "code": 1, "note": "n"}), [(2,)])],
)
def test_a_row_is_found_by_a_key_that_is_written_in_another_way_since_it_was_put_in(target, dsn, step, left) -> None:
    """ALTER TABLE keyed ALTER id TYPE numeric, at the source, within a micro-batch."""
    rows = transaction(0, ("c", None, {"id": 1, "code": 1, "note": "n"}))
    rows += transaction(len(rows), step)
    target.apply(QUEUE, planned(target, rows), 1)
    assert fetch(dsn, "SELECT id FROM keyed") == left


SPELLINGS = {
    "text": ("", "a ", "A\n"),
    "character varying": ("a ",),
    "character varying(2)": ("", "a ", "ab", "ab "),
    "character(3)": ("a", "a  ", "a   ", "a\nb"),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc999c0b4ef8bb6d6bb9bd380a11"),
    "numeric": ("0", "-0", "00", "7", "+7", "-70", "1e3"),
    "numeric(9,0)": ("0", "7.0", "70"),
    "numeric(9,2)": ("0", "0.00", "-0.00", "-0.01", ".50", "0.50", "00.50", "7.5", "7.50", "7.500", "70.00"),
    "date": ("2026-11-26", "26 Nov 2026", "2026-11-26 00:00:00", "12026-11-26", "02026-11-26", "0044-03-15 BC", "44-03-15 BC"),
    "timestamp without time zone": ("2026-11-26", "2026-11-26 01:02:03", "2026-11-26 01:02:03.50", "2026-11-26 01:02:03.000005"),
    "timestamp with time zone": ("2026-11-26 01:02:03", "2026-11-26 01:02:03+00", "2026-11-26 01:02:03.5+00", "2026-11-26 01:02:03+01"),
    "bytea": ("\\x", "\\x00ff", "\\x00FF", "a"),
}  # fmt: skip


def test_a_value_is_spelled_as_its_type_spells_it_where_it_comes_back_as_it_was(target) -> None:
    """Of such values no two are one key."""
    target.tables()
    for type_name, values in SPELLINGS.items():
        is_spelled = spelled([type_name])
        for value in values:
            (back,) = target._connection.execute(f"SELECT format('%%s', CAST(%s AS {type_name}))", (value,)).fetchone()
            assert is_spelled((value,)) is (back == value), (type_name, value)


def test_an_update_of_a_row_that_is_not_there_is_told(target) -> None:
    with pytest.raises(Diverged):
        target.apply(QUEUE, planned(target, transaction(0, ("u", None, {"id": 1, "code": 2}, ("note",)))), 1)
    with pytest.raises(Diverged):
        target.apply(
            QUEUE,
            planned(target, transaction(0, ("d", {"id": 1, "code": 1, "note": None}, None), table="keyless", key=())),
            1,
        )


@pytest.mark.parametrize("role", ["replica", "poor"])
@pytest.mark.parametrize("count", [3, BULK_FROM * 2])
def test_the_row_that_is_not_there_is_named_among_many(target, dsn, role_of, count, role) -> None:
    """In a later part than the first; all is undone."""
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("GRANT ALL ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON seriatim_replay.positions, keyed TO PUBLIC")
    start = applied(target, 0, *(("c", None, {"id": i, "code": 0}) for i in range(count) if i != 2))
    updates = [("u", None, {"id": i, "code": 1}, ("note",)) for i in range(count)]
    rows = transaction(start, ("c", None, {"id": -1, "code": 1}), *updates)
    with PostgresTarget(poor if role == "poor" else dsn, "job") as reached, pytest.raises(Diverged) as refused:
        reached.apply_parts(QUEUE, start, start + len(rows), in_parts(reached, rows, start + 2), 1)
    assert refused.value.details == {"table": "public.keyed", "key": (2,), "offset": start + 4}
    assert f"the row (2,) that the change at offset {start + 4} is for is not there" in str(refused.value)
    assert ("GRANT SET ON PARAMETER" in str(refused.value)) is (role == "poor")
    assert fetch(dsn, "SELECT DISTINCT code FROM keyed") == [(0,)]


def test_a_dsn_that_cannot_be_read_is_wrong_use_and_told_in_a_line() -> None:
    with PostgresTarget("password='secret host=y", "job") as target, pytest.raises(InvalidArgument) as refused:
        target.tables()
    assert "the target's DSN can't be read" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_unfit_targets_name_what_mends_them(target, dsn) -> None:
    with pytest.raises(MissingTables, match=r"pg_dump --schema-only --table=public\.elsewhere SOURCE"):
        planned(target, transaction(0, ("c", None, {"id": 1}), table="elsewhere"))
    with pytest.raises(MissingTables, match=r"""--table='public\."it'"'"'s 1 ""User"' SOURCE"""):
        planned(target, transaction(0, ("c", None, {"id": 1}), table="it's 1 \"User"))
    # What older rows have in it by default is in no record.
    with pytest.raises(MissingColumns, match=r'ALTER TABLE "public"\."keyed" ADD COLUMN "more" TYPE_AND_DEFAULT_AS'):
        planned(target, transaction(0, ("c", None, {"id": 1, "more": 1})))
    with pytest.raises(MissingKey, match="ADD PRIMARY KEY"):
        planned(target, transaction(0, ("c", None, {"id": 1}), table="keyless"))


@pytest.mark.parametrize("count", [1, BULK_FROM])
@pytest.mark.parametrize("table", ["excluded", "s", "t"])
def test_a_table_may_be_called_what_statements_call_others(target, dsn, table, count) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, note text)")
    end = 0
    for op, note in (("c", "a"), ("u", "b")):
        end = applied(target, end, *((op, None, {"id": i, "note": note}) for i in range(count)), table=table)
        assert fetch(dsn, f"SELECT DISTINCT note FROM {table}") == [(note,)]
    end = applied(target, end, *(("d", {"id": i}, None) for i in range(count)), table=table)
    assert fetch(dsn, f"SELECT FROM {table}") == []


@pytest.mark.parametrize("count", [1, BULK_FROM])
def test_an_array_s_null_is_one_whatever_the_target_s_settings_are(dsn, count) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE arrays (id integer PRIMARY KEY, items text[])")
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET array_nulls = off")
    with PostgresTarget(dsn, "job") as target:
        target.claim(QUEUE, "q", 1)
        rows = [("c", None, {"id": i, "items": '{a,NULL,"NULL"}'}) for i in range(count)]
        applied(target, 0, *rows, table="arrays")
    assert fetch(dsn, "SELECT DISTINCT items FROM arrays") == [(["a", None, "NULL"],)]


def test_a_piece_of_xml_is_read_as_one_whatever_the_target_s_settings_are(dsn) -> None:
    """As `pg_dump` has it: a document is one of them. The server that comes with the tests knows the setting, but no xml."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE read (id integer PRIMARY KEY, by text DEFAULT current_setting('xmloption'))")
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET xmloption = document")
    with PostgresTarget(dsn, "job") as target:
        target.claim(QUEUE, "q", 1)
        applied(target, 0, ("c", None, {"id": 1}), table="read")
    assert fetch(dsn, "SELECT by FROM read") == [("content",)]


def test_a_type_is_told_by_its_name_whatever_the_target_s_settings_are(dsn) -> None:
    """By another one nobody saw that a date has no place for a time of day, and no date was a key that many rows are named by at once."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE quoted (id integer PRIMARY KEY, d date)")
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET quote_all_identifiers = on")
    with PostgresTarget(dsn, "job") as target:
        target.claim(QUEUE, "q", 1)
        with pytest.raises(NarrowColumn):
            applied(target, 0, ("c", None, {"id": 1, "d": "2024-01-02 10:00:00"}), table="quoted")


def test_identity_generated_and_awkward_names(target, dsn) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(
            'CREATE TABLE "100%s ""odd""" ("a%" integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, b numeric(9,2), '
            "twice numeric GENERATED ALWAYS AS (b * 2) STORED, c integer GENERATED ALWAYS AS IDENTITY)"
        )
    table = '100%s "odd"'
    for count, start in ((3, 0), (BULK_FROM * 2, 5)):
        steps = [("c", None, {"a%": i, "b": f"{i}.50", "twice": "9", "c": 70 + i}) for i in range(count)]
        target.apply(QUEUE, planned(target, transaction(start, *steps, table=table, key=("a%",)), start), 1)
        assert fetch(dsn, 'SELECT count(*) FROM "100%s ""odd""" WHERE twice = "a%" * 2 + 1 AND c = 70 + "a%"') == [
            (count,)
        ]


@pytest.mark.parametrize("count", [3, BULK_FROM * 2])
@pytest.mark.parametrize("kind", ["one by one", "patched", "without a key"])
def test_an_identity_column_that_an_update_sets_to_its_default_is_as_in_the_source(target, dsn, kind, count) -> None:
    """As a row's version is kept. PostgreSQL lets nobody set such a column to anything else."""
    rule = "UNIQUE" if kind == "one by one" else ""
    key = () if kind == "without a key" else ("id",)
    with psycopg.connect(dsn) as connection:
        connection.execute(
            f"CREATE TABLE versions (id integer {'PRIMARY KEY' if key else ''}, note text, here text DEFAULT 'kept', "
            f"version bigint GENERATED ALWAYS AS IDENTITY {rule}, twice bigint GENERATED ALWAYS AS (version * 2) STORED)"
        )
    rows = [{"id": i, "note": "n", "version": i} for i in range(count)]
    end = applied(target, 0, *(("c", None, row) for row in rows), table="versions", key=key)
    if key:  # the note lies elsewhere, and wasn't touched
        updates = [("u", None, {"id": i, "version": 100 + i}, ("note",)) for i in range(count)]
    else:
        updates = [("u", row, {**row, "version": 100 + row["id"]}) for row in rows]
    end = applied(target, end, *updates, table="versions", key=key)
    found = "SELECT count(*) FROM versions WHERE version = id + 100 AND twice = version * 2 AND note = 'n' AND here = 'kept'"
    assert fetch(dsn, found) == [(count,)]


def test_a_row_that_others_refer_to_is_not_taken_out_to_be_put_in_anew(target, dsn, role_of) -> None:
    """Where the role may not switch foreign keys off."""
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE parent (id integer PRIMARY KEY, v integer GENERATED ALWAYS AS IDENTITY, note text)"
        )
        connection.execute("CREATE TABLE child (id integer PRIMARY KEY REFERENCES parent ON DELETE CASCADE)")
        connection.execute("INSERT INTO parent VALUES (1)")
        connection.execute("INSERT INTO child VALUES (1)")
        connection.execute("GRANT ALL ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON seriatim_replay.positions, parent, child TO PUBLIC")
    with PostgresTarget(poor, "job") as weak:
        end = applied(weak, 0, ("u", None, {"id": 1, "v": 1, "note": "n"}), table="parent")
        with pytest.raises(Diverged):
            applied(weak, end, ("u", None, {"id": 1, "v": 2, "note": "m"}), table="parent")
    assert fetch(dsn, "SELECT note FROM parent JOIN child USING (id)") == [("n",)]


@pytest.mark.parametrize("is_superuser", [True, False])
def test_foreign_keys(new_database, is_superuser) -> None:
    dsn = new_database()
    role = f"weak_{dsn.rsplit('_', 1)[1]}"
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE parent (id integer PRIMARY KEY)")
        connection.execute("CREATE TABLE child (id integer PRIMARY KEY, parent integer REFERENCES parent)")
        connection.execute(f"CREATE ROLE {role} LOGIN")
        connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        connection.execute(f"GRANT CREATE ON DATABASE {dsn.rsplit('/', 1)[1]} TO {role}")
    try:
        own = dsn if is_superuser else dsn.replace("postgres@", f"{role}@")
        with PostgresTarget(own, "job") as target:
            target.claim(QUEUE, "q", 1)
            assert bool(target.limits()) is not is_superuser
            rows = transaction(0, ("c", None, {"id": 1}), ("c", None, {"id": 2}), table="parent")
            rows += transaction(10, ("c", None, {"id": 1, "parent": 2}), table="child")
            rows += transaction(20, ("u", None, {"id": 1, "parent": 1}), table="child")
            rows += transaction(30, ("d", {"id": 2}, None), table="parent")
            target.apply(QUEUE, planned(target, rows), 1)
        assert fetch(dsn, "SELECT * FROM child") == [(1, 1)]
        assert fetch(dsn, "SELECT * FROM parent") == [(1,)]
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"DROP OWNED BY {role} CASCADE")
            connection.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("does", ["ON UPDATE CASCADE", ""])
def test_what_a_foreign_key_of_the_target_has_done_already_is_told_with_what_mends_it(
    target, dsn, role_of, does
) -> None:
    """Where the role can't switch it off. One without an action, checked at the end, leaves the change to the source."""
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE parent (id integer PRIMARY KEY)")
        connection.execute(
            f"CREATE TABLE child (up integer REFERENCES parent {does or 'DEFERRABLE'}, n integer, PRIMARY KEY (up, n))"
        )
        connection.execute("INSERT INTO parent VALUES (1)")
        connection.execute("INSERT INTO child VALUES (1, 5)")
        connection.execute("GRANT ALL ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON seriatim_replay.positions, parent, child TO PUBLIC")
    rows = transaction(0, ("u", {"id": 1}, {"id": 2}), table="parent")[:-1]
    rows += transaction(1, ("u", {"up": 1, "n": 5}, {"up": 2, "n": 5}), table="child", key=("up", "n"))[1:-1]
    rows += transaction(1, *[("d", {}, None)] * 2)[-1:]
    with PostgresTarget(poor, "job") as weak:
        if does:
            with pytest.raises(Diverged, match=r"not there in the target.*ON UPDATE.*GRANT SET ON PARAMETER"):
                weak.apply(QUEUE, planned(weak, rows), 1)
            assert fetch(dsn, "SELECT up FROM child") == [(1,)]
            target.apply(QUEUE, planned(target, rows), 1)
        else:
            weak.apply(QUEUE, planned(weak, rows), 1)
    assert fetch(dsn, "SELECT up, n FROM child") == [(2, 5)]


@pytest.mark.parametrize("checked", ["", "DEFERRABLE INITIALLY DEFERRED"])
def test_a_role_for_which_a_snapshot_s_rows_come_too_early_is_told_what_mends_it(target, dsn, role_of, checked) -> None:
    """They come table by table, in the order of names."""
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE parent (id integer PRIMARY KEY)")
        connection.execute(f"CREATE TABLE child (id integer PRIMARY KEY, parent integer REFERENCES parent {checked})")
        connection.execute("GRANT ALL ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON seriatim_replay.positions, parent, child TO PUBLIC")
    origin = Origin("db", "slot", 100, 0, 5, "public", "child", ("id",))
    rows = [ChangeRow(0, encode(Change("r", None, {"id": 1, "parent": 2}, origin, 1)))]
    with (
        PostgresTarget(poor, "job") as weak,
        pytest.raises(ApplyFailed, match=r"foreign key[\s\S]*GRANT SET ON PARAMETER"),
    ):
        weak.apply(QUEUE, planned(weak, rows), 1)
    target.apply(QUEUE, planned(target, rows), 1)
    assert fetch(dsn, "SELECT parent FROM child") == [(2,)]


def test_a_table_is_emptied_behind_rows_whose_checks_are_deferred(target, dsn, role_of) -> None:
    """In one plan, as a new snapshot is with what came before it, by a role that can't switch foreign keys off. Django defers all of them."""
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE later (id integer PRIMARY KEY, up integer REFERENCES later DEFERRABLE INITIALLY DEFERRED)"
        )
        connection.execute("GRANT ALL ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON seriatim_replay.positions, later TO PUBLIC")
    rows = transaction(0, ("c", None, {"id": 1, "up": 2}), ("c", None, {"id": 2, "up": 1}), table="later")
    rows += emptying(4, "later") + transaction(7, ("c", None, {"id": 3, "up": 3}), table="later")
    with PostgresTarget(poor, "job") as weak:
        weak.apply(QUEUE, planned(weak, rows), 1)
        assert fetch(dsn, "SELECT id FROM later") == [(3,)]
        # What the source never had is refused all the same.
        rows = transaction(10, ("c", None, {"id": 4, "up": 9}), table="later") + emptying(13, "later")
        with pytest.raises(ApplyFailed, match="violates foreign key"):
            weak.apply(QUEUE, planned(weak, rows, 10), 1)
    assert fetch(dsn, "SELECT id FROM later") == [(3,)]


def test_a_truncate_empties_the_tables_it_names_and_no_others(target, dsn) -> None:
    """The source's TRUNCATE … CASCADE names in the log what it reached there. The target has a child, and an heir, of its own."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE heir () INHERITS (keyed)")
        connection.execute("CREATE TABLE parent (id integer PRIMARY KEY)")
        connection.execute("CREATE TABLE known (id integer REFERENCES parent)")
        connection.execute("CREATE TABLE parted (id integer PRIMARY KEY) PARTITION BY RANGE (id)")
        connection.execute("CREATE TABLE part PARTITION OF parted DEFAULT")
        for table in ("heir", "keyed", "parent", "known", "parted"):
            connection.execute(f"INSERT INTO {table} (id) VALUES (1)")
    target.apply(QUEUE, planned(target, emptying(0, "keyed", "parent", "known", "parted", cascade=True)), 1)
    left = "SELECT (SELECT count(*) FROM ONLY keyed), (SELECT count(*) FROM heir), (SELECT count(*) FROM parted)"
    assert fetch(dsn, left) == [(0, 1, 0)]
    assert fetch(dsn, "SELECT id FROM parent UNION ALL SELECT id FROM known") == []
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE stranger (id integer REFERENCES parent)")
        connection.execute("INSERT INTO parent VALUES (1)")
        connection.execute("INSERT INTO stranger VALUES (1)")
    with pytest.raises(
        TruncateRefused, match=r'Table "stranger" references "parent".*drop that foreign key'
    ) as refused:
        target.apply(QUEUE, planned(target, emptying(3, "parent", "known", cascade=True), 3), 1)
    assert refused.value.details == {"table": "public.parent, public.known", "key": None, "offset": 4}
    assert fetch(dsn, "SELECT id FROM parent UNION ALL SELECT id FROM stranger") == [(1,), (1,)]
    assert target.position(QUEUE).offset == 3


@pytest.mark.parametrize("count", [2, BULK_FROM * 2])
def test_a_key_that_the_target_generates_in_part_tells_whole_rows_apart_and_is_none_else(target, dsn, count) -> None:
    """From a publication that has generated columns, of a source with replica identity full; or with that key."""
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE doubled (id int, n int, twice int GENERATED ALWAYS AS (n * 2) STORED, PRIMARY KEY (id, twice))"
        )
    rows = [{"id": 1, "n": i, "twice": 2 * i} for i in range(count)]
    end = applied(target, 0, *(("c", None, row) for row in rows), table="doubled", key=())
    moved = [("u", row, {"id": 2, "n": row["n"], "twice": row["twice"]}) for row in rows]
    end = applied(target, end, *moved, table="doubled", key=())
    assert fetch(dsn, "SELECT count(*) FROM doubled WHERE id = 2") == [(count,)]
    by_key = [("u", None, {**row, "id": 2}) for row in rows]
    with pytest.raises(GeneratedKey) as refused:
        applied(target, end, *by_key, table="doubled", key=("id", "twice"))
    with psycopg.connect(dsn) as connection:
        connection.execute(str(refused.value).split("mend it with: ")[1].encode())
    applied(target, end, *by_key, ("d", {"id": 2, "twice": 0}, None), table="doubled", key=("id", "twice"))
    assert fetch(dsn, "SELECT count(*), sum(twice) FROM doubled") == [(count - 1, count * (count - 1))]


@pytest.mark.parametrize(
    ("made", "unlogged"),
    [
        ("CREATE UNLOGGED TABLE forgetful (id int PRIMARY KEY)", "public.forgetful"),
        (
            (
                "CREATE TABLE forgetful (id int PRIMARY KEY) PARTITION BY RANGE (id);"
                "CREATE TABLE kept PARTITION OF forgetful FOR VALUES FROM (0) TO (10);"
                'CREATE UNLOGGED TABLE "Late" PARTITION OF forgetful DEFAULT'
            ),
            'public."Late"',
        ),
    ],
)
def test_a_table_that_a_crash_would_empty_is_refused(target, dsn, made, unlogged) -> None:
    """Its rows were gone, the position stayed, and the replay went on behind them."""
    with psycopg.connect(dsn) as connection:
        connection.execute(made)
    with pytest.raises(UnloggedTable, match=f"{unlogged} is UNLOGGED") as refused:
        applied(target, 0, ("c", None, {"id": 1}), table="forgetful")
    with psycopg.connect(dsn) as connection:
        connection.execute(str(refused.value).split("mend it with: ")[1].encode())
    applied(target, 0, ("c", None, {"id": 1}), table="forgetful")
    assert fetch(dsn, "SELECT id FROM forgetful") == [(1,)]


RETYPED = {"money", "time", "daterange", "pair", "couple", "couple[]", "nest"}
"""What PostgreSQL alters to no wider type by itself; there is nothing in the column."""


@pytest.mark.parametrize(
    ("kind", "wide", "keys"),
    [
        ("numeric(9,2)", "numeric(9,4)", ["1.0010", "1.0040"]),
        ("price", "numeric(9,4)", ["1.0010", "1.0040"]),
        ("dearer", "numeric(9,4)", ["1.0010", "1.0040"]),
        ("price[]", "numeric[]", ["{1,1.001}", "{1,1.004}"]),
        ("date", "timestamp", ["2024-01-01 10:00:00", "2024-01-01 11:00:00"]),
        ("money", "numeric", ["1.001", "1.004"]),
        ("double precision", "bigint", [2**53, 2**53 + 1]),
        ("real", "double precision", ["1", "1.00000001"]),
        ("varchar(3)", "varchar(9)", ["abc", "abc  "]),
        ("varchar(3)[]", "text[]", ['{"abc  "}', "{abc}"]),
        ("interval hour", "interval", ["01:00:00", "01:30:00"]),
        ("interval year to month", "interval", ["1 year", "1 year 1 day"]),
        ("name", "text", ["n" * 63, "n" * 64]),
        ('"char"', "text", ["a", "ab"]),
        ("time", "timestamp", ["2024-01-01 10:00:00", "2024-01-02 10:00:00"]),
        ("time", "timetz", ["10:00:00+00", "10:00:00+01"]),
        ("daterange", "tsrange", ['["2024-01-01 10:00:00",)', '["2024-01-01 11:00:00",)']),
        ("pair", "wider", ['(1.0010,"a ""b"" (\\\\),")', '(1.0040,"a ""b"" (\\\\),")']),
        ("couple", "wider", ["(1.0010,)", "(1.0040,)"]),
        ("couple[]", "wider[]", [r'{"(1.0010,\"a \"\"b\"\"\")"}', r'{"(1.0040,\"a \"\"b\"\"\")"}']),
        ("nest", "wider_nest", ['("{""(1.0010,x)""}")', '("{""(1.0040,x)""}")']),
    ],
)
def test_keys_that_the_target_would_round_are_refused_until_it_holds_them(target, dsn, kind, wide, keys) -> None:
    """They were one row."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE DOMAIN price AS numeric(9,2); CREATE DOMAIN dearer AS price CHECK (value > 0)")
        connection.execute("CREATE TYPE pair AS (n price, t text); CREATE TYPE wider AS (n numeric(9,4), t text)")
        connection.execute("CREATE DOMAIN couple AS pair; CREATE TYPE nest AS (p couple[])")
        connection.execute("CREATE TYPE wider_nest AS (p wider[])")
        connection.execute(f"CREATE TABLE widened (id {kind} PRIMARY KEY)")
        assert connection.execute(f"SELECT %s::text::{kind} = %s::text::{kind}", keys).fetchone() == (True,)
    changes = [("c", None, {"id": key}) for key in keys]
    with pytest.raises(NarrowColumn) as refused:
        applied(target, 0, *changes, table="widened")
    with psycopg.connect(dsn) as connection:
        statement = str(refused.value).split("mend it with: ")[1].replace("TYPE_AS_IN_THE_SOURCE", wide)
        connection.execute(f"{statement} USING id::text::{wide}" if kind in RETYPED else statement)
    applied(target, 0, *changes, table="widened")
    assert fetch(dsn, "SELECT id::text FROM widened ORDER BY id") == [(str(key),) for key in keys]


@pytest.mark.parametrize(
    ("kind", "values", "others"),
    [
        ("time", ["00:00:00", "10:00:00.123456", "24:00:00"], ["10:00:00+01"]),
        ("timetz", ["10:00:00+00", "10:00:00.5-08", "10:00:00+05:30:15"], ["10:00:00.5"]),
        ("date", ["2024-01-01", "12024-12-31", "0044-03-15 BC", "infinity"], ["2024-01-01 10:00:00"]),
        ("timestamp", ["2024-01-01 10:00:00", "0044-03-15 12:00:00.5 BC", "-infinity"], ["2024-01-01 10:00:00+00"]),
        (
            "timestamptz",
            ["2024-01-01 10:00:00+00", "0044-03-15 12:00:00.5+00 BC"],
            ["2024-01-01 10:00:00", "0044-03-15 12:00:00 BC"],
        ),
        ("interval hour", ["-10 mons +3 days -04:00:00", "00:00:00", "100:00:00"], ["00:30:00"]),
        ("interval year to month", ["1 year 2 mons", "00:00:00", "-1 mons"], ["1 day"]),
    ],
)
def test_a_type_of_time_holds_its_own_values_and_not_those_that_it_takes_for_another(dsn, kind, values, others) -> None:
    """Each as PostgreSQL writes it, also in arrays and ranges."""
    ranges = {"date": "daterange", "timestamp": "tsrange", "timestamptz": "tstzrange"}
    columns = {"one": kind, "many": f"{kind}[]"} | ({"span": ranges[kind]} if kind in ranges else {})
    settings = f"-c datestyle=ISO,YMD -c timezone={TEXT_SETTINGS['timezone']} -c intervalstyle=postgres"
    with psycopg.connect(dsn, options=settings) as connection:
        connection.execute(f"CREATE TABLE clocks ({', '.join(map(' '.join, columns.items()))})")
        found = connection.execute("""
            SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
             WHERE attrelid = 'clocks'::regclass AND attnum > 0""").fetchall()
        (rounding := rounding_columns(TableShape(TableName("public", "clocks"), dict(found)))).sort()
        assert [name for name, *_ in rounding] == sorted(columns)
        for value, is_own in [*((each, True) for each in values), *((each, False) for each in others)]:
            for name, search, holds in rounding:
                given = {"one": value, "many": f'{{"{value}",NULL}}', "span": f'["{value}",)'}[name]
                ((written,),) = connection.execute(f"SELECT %s::text::{columns[name]}::text", (given,)).fetchall()
                text = written if is_own else given
                assert bool(holds(text)) is is_own, (name, text)
                assert is_own or search(text), (name, text)
                assert not is_own or name != "one" or text == value


@pytest.mark.parametrize(("kind", "wide"), [("real", "float8"), ("double precision", "numeric")])
def test_a_float_holds_each_of_its_own_values(dsn, kind, wide) -> None:
    """As PostgreSQL writes them; and those of others that it would write the same."""
    ((_, search, holds),) = rounding_columns(TableShape(TableName("public", "a"), {"n": kind}))
    chance = Random(1)
    sizes = ("f", "I", 32) if kind == "real" else ("d", "Q", 64)
    values = [unpack(sizes[0], pack(sizes[1], chance.getrandbits(sizes[2])))[0] for _ in range(20_000)]
    values += [chance.randrange(10**8) / 10 ** chance.randrange(9) for _ in range(20_000)]
    values += [2.0**exponent * factor for exponent in range(-149, 127) for factor in (1, -1, 1.5, 0.75)]
    usual = [repr(value) for value in values if value == 0 or 1.5e-45 < abs(value) < 3.4e38]
    usual += [f"{chance.randrange(10 ** chance.randrange(1, 20))}e-{chance.randrange(20)}" for _ in range(20_000)]
    query = f"SELECT v::{wide}::text, v::{wide}::{kind}::text FROM unnest(%s::text[]) v"
    with psycopg.connect(dsn, options="-c extra_float_digits=3") as connection:
        found = connection.execute(query, (usual,)).fetchall()
    assert [text for _, text in found if not holds(text)] == []
    assert [given for given, text in found if not holds(given) and Decimal(given) == Decimal(text)] == []
    assert [given for given, _ in found if not holds(given) and not search(given)] == []


COARSE = [
    # type at the target, a key there, another one of the source that is the same to it
    ("citext", "a", "A"),
    ("bpchar", "a", "a "),
    ("double precision", "0", "-0"),
    ("interval", "1 day", "24:00:00"),
]


@pytest.mark.parametrize("count", [1, BULK_FROM * 2])
@pytest.mark.parametrize("table", ["coarse", "bare"])
@pytest.mark.parametrize(("kind", "held", "other"), COARSE)
def test_a_row_that_comes_takes_no_other_ones_place_whose_key_is_the_same_to_the_target(
    target, dsn, kind, held, other, table, count
) -> None:
    """Two rows of the source became one, without a word: the target's column knew no case, say."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE EXTENSION citext")
        connection.execute(f"CREATE TABLE bare (id {kind}, place int, PRIMARY KEY (id, place))")
        connection.execute("CREATE TABLE coarse (LIKE bare INCLUDING ALL, n int)")

    def named(key, place: int) -> dict:
        return {"id": key, "place": place} | ({"n": place} if table == "coarse" else {})

    def apply(start: int, *steps: tuple) -> int:
        return applied(target, start, *steps, table=table, key=("id", "place"))

    rows = [named(held, place) for place in range(count)]
    new = [named(other, place) for place in range(count)]
    end = apply(0, *(("c", None, row) for row in rows))
    end = apply(end, *(("u", None, row) for row in rows))
    end = apply(end, *(("c", None, row) for row in rows))  # as of a table that was made again under its name
    for before in ([], [("c", None, named(held, -1)), ("c", None, named(other, -1))]):
        with pytest.raises(CoarseKey, match=rf"written otherwise \(id is {kind}\)") as refused:
            apply(end, *before, *(("c", None, row) for row in new))
        assert refused.value.details["key"] == ((other, -1) if before else (other, 0))
        assert refused.value.details["offset"] == end + (2 if before else 1)
    end = apply(end, *(("u", old, row) for old, row in zip(rows, new, strict=True)))
    back = (step for old, row in zip(rows, new, strict=True) for step in (("d", row, None), ("c", None, old)))
    end = apply(end, *back)
    apply(end, *(("d", old, None) for old in rows), *(("c", None, row) for row in new))
    found = f"SELECT format('%s', id), count(*) FROM {table} GROUP BY 1"
    assert fetch(dsn, found) == [(other, count)]


OF_ANOTHER_TYPE = [
    # type at the target, and two keys of the source, whose column has another one, that are the same to it
    ("integer", "1", "01"),
    ("boolean", "t", "true"),
    ("uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"),
    ("date", "2024-01-02", "20240102"),
    ("timestamp without time zone", "2024-01-02 00:00:00", "2024-01-02"),
    ("numeric", "1", "1.0"),
    ("numeric(9,2)", "1.00", "1.0"),
    ("character(3)", "a", "a "),
    ("bytea", "\\x00", "\\000"),
]


@pytest.mark.parametrize("count", [1, BULK_FROM * 2])
@pytest.mark.parametrize(("kind", "held", "other"), OF_ANOTHER_TYPE)
def test_a_row_whose_key_is_of_another_type_at_the_source_takes_no_other_ones_place(
    target, dsn, kind, held, other, count
) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(f"CREATE TABLE strict (id {kind}, place int, n int, PRIMARY KEY (id, place))")

    def apply(start: int, *steps: tuple) -> int:
        return applied(target, start, *steps, table="strict", key=("id", "place"))

    def rows(key: str, n: int) -> list[dict]:
        return [{"id": key, "place": place, "n": n} for place in range(count)]

    first, second = rows(held, 1), rows(other, 2)
    # Both in one micro-batch, in any order.
    for one, two in ((first, second), (second, first)):
        with pytest.raises(ApplyFailed, match="duplicate key value"):
            apply(0, *(("c", None, row) for row in (*one, *two)))
    end = apply(0, *(("c", None, row) for row in first))
    with pytest.raises(ApplyFailed, match="duplicate key value") as refused:
        apply(end, *(("c", None, row) for row in second))
    assert (refused.value.details["key"], refused.value.details["offset"]) == ((other, 0), end + 1)
    with pytest.raises(ApplyFailed, match="duplicate key value"):
        apply(end, *(step for row in second for step in (("c", None, row), ("u", None, {**row, "n": 3}))))
    # One that came and went is none of the target's.
    end = apply(end, *(step for row in second for step in (("c", None, row), ("d", row, None))))
    assert fetch(dsn, "SELECT n, count(*) FROM strict GROUP BY 1") == [(1, count)]
    # Where the other one has gone, and where one is the other one.
    end = apply(end, *(("d", row, None) for row in first), *(("c", None, row) for row in second))
    end = apply(end, *(("u", row, {**row, "id": held}) for row in second))
    end = apply(end, *(step for row in first for step in (("d", row, None), ("c", None, {**row, "n": 4}))))
    assert fetch(dsn, "SELECT n, count(*) FROM strict GROUP BY 1") == [(4, count)]


@pytest.mark.parametrize("count", [1, BULK_FROM * 2])
@pytest.mark.parametrize(
    ("kind", "held", "other"),
    [*OF_ANOTHER_TYPE, ("inet", "10.0.0.1", "10.0.0.1/32"), ("integer[]", "{1}", "{01}"), ("once", "(1)", "(01)")],
)
def test_a_row_whose_key_is_a_text_at_the_source_takes_no_other_ones_place_however_it_is_written(
    target, dsn, kind, held, other, count
) -> None:
    """The second one, written as the target's type writes it, took the place of the first without a word."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TYPE once AS (n int)")
        connection.execute(f"CREATE TABLE strict (id {kind}, place int, n int, PRIMARY KEY (id, place))")

    def apply(start: int, *steps: tuple) -> int:
        return applied(target, start, *steps, table="strict", key=("id", "place"), text_key=("id",))

    first, second = ([{"id": key, "place": place, "n": 1} for place in range(count)] for key in (other, held))
    end = apply(0, *(("c", None, row) for row in first))
    end = apply(end, *(("u", None, {**row, "n": 2}) for row in first))
    with pytest.raises(ApplyFailed, match="duplicate key value") as refused:
        apply(end, *(("c", None, row) for row in second))
    assert (refused.value.details["key"], refused.value.details["offset"]) == ((held, 0), end + 1)
    # Where the other one has gone, and where one is the other one.
    end = apply(end, *(("d", row, None) for row in first), *(("c", None, row) for row in second))
    end = apply(end, *(("u", row, {**row, "id": other}) for row in second))
    apply(end, *(step for row in first for step in (("d", row, None), ("c", None, {**row, "n": 4}))))
    assert fetch(dsn, "SELECT n, count(*) FROM strict GROUP BY 1") == [(4, count)]


def test_a_collation_that_takes_different_texts_for_equal_is_seen(target, dsn) -> None:
    """Here by PostgreSQL's word alone: without ICU it makes none."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE COLLATION caseless (provider = libc, locale = 'C')")
        connection.execute("UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'caseless'")
        connection.execute("CREATE TABLE coarse (id text COLLATE caseless PRIMARY KEY, n text)")
    shape = target.tables()[TableName("public", "coarse")]
    assert (shape.coarse, statements.doubtful(shape, ("id", "n"))) == ({"id"}, ["id"])
    end = applied(target, 0, ("c", None, {"id": "a", "n": "1"}), table="coarse")
    applied(target, end, ("u", None, {"id": "a", "n": "2"}), ("c", None, {"id": "A", "n": "3"}), table="coarse")
    assert fetch(dsn, 'SELECT n FROM coarse ORDER BY id COLLATE "C"') == [("3",), ("2",)]


@pytest.mark.parametrize("count", [2, BULK_FROM * 2])
def test_rows_without_columns_are_counted(target, dsn, count) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE bare ()")
    end = applied(target, 0, *[("c", None, {})] * count, table="bare", key=())
    applied(target, end, ("d", {}, None), table="bare", key=())
    assert fetch(dsn, "SELECT count(*) FROM bare") == [(count - 1,)]


@pytest.mark.parametrize("count", [2, BULK_FROM * 2])
def test_changes_of_a_table_leave_its_heirs_alone(target, dsn, count) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE heir () INHERITS (keyed)")
        connection.execute("CREATE TABLE heirless () INHERITS (keyless)")
    start = 0
    for table, key in (("keyed", ("id",)), ("keyless", ())):
        rows = [{"id": i, "code": i, "note": f"n{i}"} for i in range(count)]
        start = applied(target, start, *(("c", None, row) for row in rows), table=table, key=key)
    with psycopg.connect(dsn) as connection:
        connection.execute("INSERT INTO heir SELECT * FROM ONLY keyed")
        connection.execute("INSERT INTO heirless SELECT * FROM ONLY keyless")
    half = count // 2
    for table, key in (("keyed", ("id",)), ("keyless", ())):
        steps = [("u", None if key else row, {**row, "code": -1}, ("note",) if key else ()) for row in rows[:half]]
        for _op, _before, after, unchanged in steps:
            for name in unchanged:
                del after[name]
        steps += [("d", {"id": row["id"]} if key else row, None) for row in rows[half:]]
        start = applied(target, start, *steps, table=table, key=key)
    assert fetch(dsn, "SELECT count(*), sum(code) FROM ONLY keyed") == [(half, -half)]
    assert fetch(dsn, "SELECT count(*), sum(code) FROM ONLY keyless") == [(half, -half)]
    assert fetch(dsn, "SELECT count(*), sum(code) FROM heir") == [(count, sum(range(count)))]
    assert fetch(dsn, "SELECT count(*), sum(code) FROM heirless") == [(count, sum(range(count)))]


@pytest.mark.parametrize("count", [2, BULK_FROM * 2])
@pytest.mark.parametrize(
    ("state", "means"),
    [
        *[(state, TargetBusy) for state in ("53100", "53200", "53400", "55P03", "57014", "58030")],
        *[(state, TargetLost) for state in ("25006", "57P01", "08006")],
        *[(state, ApplyFailed) for state in ("54000", "22003", "P0001")],
    ],
)
def test_what_passes_is_no_refusal(target, dsn, state, means, count) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '{state}'; END $$"
        )
        connection.execute("CREATE TRIGGER fails BEFORE INSERT ON keyed FOR EACH ROW EXECUTE FUNCTION fail()")
        connection.execute("ALTER TABLE keyed ENABLE ALWAYS TRIGGER fails")
    made = planned(target, inserts(count))
    with pytest.raises(means, match="no room") as met:
        target.apply(QUEUE, made, 1)
    assert means is ApplyFailed or "\n" not in str(met.value)
    with psycopg.connect(dsn) as connection:
        connection.execute("DROP TRIGGER fails ON keyed")
    assert target.apply(QUEUE, made, 1).position == Position(made.end, 1)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(count,)]


def test_a_lock_that_lasts_longer_than_the_role_may_wait_is_waited_for(dsn) -> None:
    with psycopg.connect(dsn) as holding, PostgresTarget(f"{dsn}?options=-clock_timeout%3D100ms", "job") as target:
        target.claim(QUEUE, "q", 1)
        made = planned(target, inserts(2))
        holding.execute("LOCK TABLE keyed IN EXCLUSIVE MODE")
        with pytest.raises(TargetBusy, match="lock timeout"):
            target.apply(QUEUE, made, 1)
        holding.rollback()
        assert target.apply(QUEUE, made, 1).position.offset == made.end


@pytest.fixture
def patient(monkeypatch) -> None:
    """A server that stands still with this machine is waited for: what is told doesn't say that it doesn't answer."""
    monkeypatch.setattr(postgres, "_ASK_S", 60)


@pytest.mark.usefixtures("patient")
def test_what_waits_for_a_lock_is_told_and_can_be_given_up(target, dsn) -> None:
    made = planned(target, inserts(1))
    ends: list[Exception] = []

    def apply() -> None:
        try:
            target.apply(QUEUE, made, 1)
        except TargetBusy as error:
            ends.append(error)

    assert target.hindrance() is None
    with psycopg.connect(dsn, application_name="migration") as holding:
        holding.execute("LOCK TABLE keyed")
        applying = threading.Thread(target=apply)
        applying.start()
        while not fetch(dsn, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            applying.join(0.01)
        assert f"process {holding.info.backend_pid} (postgres, migration, idle in" in target.hindrance()
        target.cancel()
        applying.join(60)
        assert len(ends) == 1
        assert target.position(QUEUE) == Position(0, 1)
    target.cancel()  # nothing is under way
    assert target.apply(QUEUE, made, 1).changes == 1


@pytest.mark.parametrize("hangs_whole", [True, False])
def test_what_waits_for_a_server_that_hangs_is_told_and_can_be_given_up(
    target, dsn, postgres_server, monkeypatch, hangs_whole
) -> None:
    """Its machine answers for its connections. A replay that was to stop took 40 s then, and Java ended with a trace."""
    monkeypatch.setattr(postgres, "CANCEL_S", 0.5)
    plan = planned(target, inserts(3))
    connection = target._connected()
    stopped = [connection.info.backend_pid]
    if hangs_whole:
        stopped.insert(0, postgres_server.supervisor.pid("postgres"))
    with ThreadPoolExecutor(1) as thread:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            applying = thread.submit(target.apply, QUEUE, plan, 1)
            wait_until(lambda: connection.info.transaction_status is TransactionStatus.ACTIVE)
            with pytest.raises(TimeoutError):
                applying.result(0.5)
            if hangs_whole:
                assert "the target doesn't answer: connection timeout" in target.hindrance()
            target.cancel()
            with pytest.raises(TargetLost):
                applying.result(30)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
    assert target.position(QUEUE) == Position(0, 1)


def until_at(dsn: str, applying: Future, event: str) -> None:
    while not fetch(dsn, f"SELECT 1 FROM pg_stat_activity WHERE wait_event = '{event}' AND pid <> pg_backend_pid()"):
        assert not applying.done()


@pytest.mark.usefixtures("patient")
def test_a_statement_that_takes_long_is_told_where_it_waits_for_nobody(target, dsn, monkeypatch) -> None:
    made = planned(target, inserts(1))
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(600); RETURN new; END $$"
        )
        connection.execute("CREATE TRIGGER slow BEFORE INSERT ON keyed FOR EACH ROW EXECUTE FUNCTION slow()")
        connection.execute("ALTER TABLE keyed ENABLE ALWAYS TRIGGER slow")
    assert target.hindrance() is None  # nothing is under way
    with ThreadPoolExecutor(1) as thread:
        applying = thread.submit(target.apply, QUEUE, made, 1)
        try:
            until_at(dsn, applying, "PgSleep")
            monkeypatch.setattr(postgres, "_LONG_S", 3600.0)
            assert target.hindrance() is None  # it may be one of many that are quick
            monkeypatch.setattr(postgres, "_LONG_S", 0.0)
            told = target.hindrance()
        finally:
            target.cancel()
        assert told.startswith("since 2")
        assert " the target has been at a statement, waiting for Timeout PgSleep: INSERT INTO" in told
        with pytest.raises(TargetBusy):
            applying.result(60)


@pytest.mark.usefixtures("patient")
def test_a_commit_that_waits_for_a_stand_by_is_told(target, dsn, postgres_server, monkeypatch) -> None:
    """Nobody's lock is in its way: it waited without a word."""
    monkeypatch.setattr(postgres, "_LONG_S", 0.0)
    made = planned(target, inserts(1))

    def waits_for(names: str) -> None:
        with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
            connection.execute("SELECT pg_reload_conf()")

    with ThreadPoolExecutor(1) as thread:
        try:
            waits_for("away")
            while fetch(dsn, "SHOW synchronous_standby_names") != [("away",)]:
                pass
            applying = thread.submit(target.apply, QUEUE, made, 1)
            until_at(dsn, applying, "SyncRep")
            assert "waiting for a synchronous stand-by, which is away or behind" in target.hindrance()
        finally:
            waits_for("")
        assert applying.result(60).position.offset == made.end


@pytest.fixture
def promoted(tmp_path, patient) -> Iterator[str]:
    """The DSN of another server with the same tables, and a position at 0: a stand-by that was promoted."""
    with EmbeddedPostgres(tmp_path / "promoted", settings={"fsync": "off", "full_page_writes": "off"}) as server:
        with psycopg.connect(server.dsn()) as connection:
            connection.execute(changes.SCHEMA)
        with PostgresTarget(server.dsn(), "job") as target:
            target.claim(QUEUE, "q", 1)
        yield server.dsn()


@contextmanager
def stuck(target: PostgresTarget, dsn: str, made: Plan) -> Iterator[Future]:
    """An `apply` that waits as long as this lasts."""
    with ThreadPoolExecutor(1) as thread, psycopg.connect(dsn) as holding:
        holding.execute("LOCK TABLE keyed")
        applying = thread.submit(target.apply, QUEUE, made, 1)
        while not fetch(dsn, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            assert not applying.done()
        yield applying


def test_what_a_server_of_before_does_not_end_is_done_where_the_address_leads_by_now(target, dsn, promoted) -> None:
    """It waited for ever, and said nothing: the promoted server was asked for a session that it never had."""
    made = planned(target, inserts(3))
    with stuck(target, dsn, made) as applying:
        vars(target)["_dsn"] = promoted
        assert "leads to another server by now" in target.hindrance()
        with pytest.raises(TargetLost):
            applying.result(60)
    assert target.apply(QUEUE, made, 1).position == Position(made.end, 1)
    assert fetch(promoted, "SELECT count(*) FROM keyed") == [(3,)]
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(0,)]


def test_who_waits_for_a_server_of_before_is_not_left_waiting_for_whoever_has_its_descriptor_next(
    target, dsn, promoted
) -> None:
    """As a connection of Spark's that nothing comes on: closed under it, the one to the server took all that time to be missed."""
    made = planned(target, inserts(3))
    descriptor = target._connected().fileno()
    ours, theirs = socket.socketpair()
    with ours, theirs, stuck(target, dsn, made) as applying:
        vars(target)["_dsn"] = promoted
        assert "leads to another server by now" in target.hindrance()
        is_free = not Path(f"/proc/self/fd/{descriptor}").exists()
        if is_free:
            os.dup2(ours.fileno(), descriptor)
        try:
            with pytest.raises(TargetLost):
                applying.result(60)
        finally:
            theirs.send(b"something")
            if is_free:
                wait([applying])
                os.close(descriptor)


def test_behind_an_address_of_many_servers_what_takes_long_is_left_to_end(target, dsn, promoted) -> None:
    """Each further time only when more looks in a row miss it; else nothing that takes longer than a look would ever be done."""

    def looks_until_lost() -> int:
        made = planned(target, inserts(3))
        with stuck(target, dsn, made) as applying:
            for looks in range(1, 100):
                vars(target)["_dsn"] = promoted
                assert "leads to another server by now" in target.hindrance()
                vars(target)["_dsn"] = dsn
                if vars(target)["_missed"] == 0:
                    with pytest.raises(TargetLost):
                        applying.result(60)
                    return looks
                if looks == 1:
                    assert "process" in target.hindrance()  # this one found it
        raise AssertionError("never")

    assert [looks_until_lost() for _ in range(3)] == [1, 3, 5]
    made = planned(target, inserts(3))
    target.apply(QUEUE, made, 1)
    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE seriatim_replay.positions SET next_offset = 0")
    assert looks_until_lost() == 1


def test_a_stand_by_says_nothing_of_a_session(target, dsn, promoted) -> None:
    """As where the DSN names them all."""
    made = planned(target, inserts(3))
    with psycopg.connect(promoted) as connection:
        connection.execute("CREATE FUNCTION public.pg_is_in_recovery() RETURNS bool LANGUAGE sql RETURN true")
    with stuck(target, dsn, made) as applying:
        vars(target)["_dsn"] = f"{promoted}?options=-csearch_path%3Dpublic,pg_catalog"
        assert target.hindrance() == "the target's address leads to a stand-by"
        assert not applying.done()
    assert applying.result(60).position == Position(made.end, 1)


def test_who_is_let_in_and_gets_no_answer_then_does_not_wait_for_it(target, dsn, monkeypatch) -> None:
    """As where a pool of connections stands before a server that hangs."""
    asleep = b"SELECT pg_sleep(60)"
    monkeypatch.setattr(postgres, "HOLDER", asleep + b", %s::int[]")
    assert "the target doesn't answer" in target.hindrance()
    monkeypatch.setattr(postgres, "_SET_UP_S", 0.2)
    monkeypatch.setattr(PostgresTarget, "_set_up", lambda _self, connection: connection.execute(asleep))
    with pytest.raises(TargetLost):
        PostgresTarget(dsn, "job").limits()


def test_what_a_role_may_is_found_out_without_a_trace_in_others_sessions(dsn) -> None:
    """Whoever had one of them next had no foreign keys there, and no triggers."""
    with Pool(dsn, in_turn=True) as pool:
        with psycopg.connect(pool.dsn, autocommit=True, prepare_threshold=None) as pooled:
            assert postgres._may_replicate(pooled)
        assert pool.found("session_replication_role") == ["origin", "origin"]


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_pool_that_changes_sessions_is_refused_before_anything_is_set_in_one(dsn, in_turn) -> None:
    with Pool(dsn, in_turn=in_turn) as pool:
        with PostgresTarget(pool.dsn, "job") as target, pytest.raises(PooledTarget, match="transaction mode"):
            target.claim(QUEUE, "q", 1)
        assert target._connection is None
        for setting in ("row_security", "idle_in_transaction_session_timeout", "tcp_keepalives_idle"):
            assert pool.found(setting) == [fetch(dsn, f"SELECT current_setting('{setting}')")[0][0]] * 2


def test_a_pool_that_does_not_show_at_first_is_refused_when_it_changes_the_session(dsn, monkeypatch) -> None:
    """As amid the traffic of others. Nothing is applied then."""
    with Pool(dsn) as pool, PostgresTarget(pool.dsn, "job") as target:
        monkeypatch.setattr(postgres, "own_process", lambda connection, _beside: sessions._process(connection))
        target.claim(QUEUE, "q", 1)
        made = planned(target, inserts(2))
        with psycopg.connect(pool.dsn, autocommit=True) as other, other.transaction():
            other.execute("SELECT")  # in the session that was the target's
            with pytest.raises(PooledTarget):
                target.apply(QUEUE, made, 1)
        assert fetch(dsn, "SELECT count(*) FROM keyed") == [(0,)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_pool_in_session_mode_is_as_good_as_none(dsn, size) -> None:
    """Also where it has no second session to look by."""
    with Pool(dsn, size, is_session_mode=True) as pool, PostgresTarget(pool.dsn, "job") as target:
        assert target.claim(QUEUE, "q", 1) == Position(0, 1)
        assert target.apply(QUEUE, planned(target, inserts(2)), 1).changes == 2


@pytest.mark.usefixtures("patient")
def test_behind_a_pool_in_session_mode_the_session_is_asked_for_that_the_target_has(dsn) -> None:
    """A pool names a process of its own making, of which the server knows nothing, or something else."""
    with Pool(dsn, is_session_mode=True) as pool, PostgresTarget(pool.dsn, "job") as target:
        target.claim(QUEUE, "q", 1)
        made = planned(target, inserts(2))
        with stuck(target, dsn, made) as applying:
            assert "in the target a transaction of the database has to end first: process" in target.hindrance()
        assert applying.result(60).changes == 2


def test_a_connection_that_could_not_be_set_up_is_closed_and_its_dsn_is_not_blamed(dsn, monkeypatch) -> None:
    opened: list[psycopg.Connection] = []

    def fail(_self, connection) -> None:
        opened.append(connection)
        connection.execute("SELECT no_such_thing")

    monkeypatch.setattr(PostgresTarget, "_set_up", fail)
    with PostgresTarget(dsn, "job") as target, pytest.raises(ApplyFailed, match=r"session needs: .*no_such_thing"):
        target.limits()
    assert opened[0].closed


def test_where_it_stands_is_told_beside_what_is_under_way_but_by_no_stand_by(target, dsn, monkeypatch) -> None:
    with target._connected().transaction():
        assert target.position_beside(QUEUE) == Position(0, 1)
    assert target.position_beside(QUEUE + 1) is None
    monkeypatch.setattr(positions, "_STORED", b"SELECT pg_sleep(60), %s::int, %s::text")
    with pytest.raises(TargetLost, match="the target doesn't answer"):
        target.position_beside(QUEUE)
    with psycopg.connect(dsn) as connection:
        connection.execute("DROP SCHEMA seriatim_replay CASCADE")
    monkeypatch.undo()
    assert target.position_beside(QUEUE) is None
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE FUNCTION public.pg_is_in_recovery() RETURNS bool LANGUAGE sql RETURN true")
    behind = PostgresTarget(f"{dsn}?options=-csearch_path%3Dpublic,pg_catalog", "job")
    with pytest.raises(TargetLost, match="stand-by"):
        behind.position_beside(QUEUE)


def test_a_server_that_only_reads_is_the_wrong_one_since_a_failover(target, dsn) -> None:
    made = planned(target, inserts(2))
    read_only = "default_transaction_read_only"
    with (
        PostgresTarget(f"{dsn}?options=-c{read_only}%3Don", "job") as other,
        pytest.raises(TargetLost, match="read-only"),
    ):
        other.claim(QUEUE, "q", 2)
    vars(target)["_connection"].execute(f"SET {read_only} = on")
    with pytest.raises(TargetLost, match="read-only"):
        target.apply(QUEUE, made, 1)
    assert target.apply(QUEUE, made, 1).position.offset == made.end  # by another connection


@pytest.fixture
def role_of(new_database) -> Iterator[Callable[[str], str]]:
    """Call it with the DSN of a database for that of a role that may do nothing there yet."""
    made: list[tuple[str, str]] = []

    def make(dsn: str) -> str:
        role = f"poor_{dsn.rsplit('_', 1)[1]}"
        with psycopg.connect(dsn) as connection:
            connection.execute(f"CREATE ROLE {role} LOGIN")
        made.append((dsn, role))
        return dsn.replace("postgres@", f"{role}@")

    yield make
    for dsn, role in made:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


def test_a_role_that_may_not_keep_a_position_is_told(dsn, role_of) -> None:
    with PostgresTarget(role_of(dsn), "job") as target, pytest.raises(ApplyFailed, match="permission denied"):
        target.claim(QUEUE, "q", 1)


def test_a_role_that_may_not_see_the_position_of_another_one_is_told(target, dsn, role_of) -> None:
    with PostgresTarget(role_of(dsn), "job") as poor, pytest.raises(ApplyFailed, match="permission denied for schema"):
        poor.position(QUEUE)


def test_a_role_may_keep_a_position_in_a_table_that_somebody_else_made(target, dsn, role_of) -> None:
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute(f"GRANT USAGE ON SCHEMA seriatim_replay TO {poor.split('//')[1].split('@')[0]}")
        connection.execute("GRANT SELECT, INSERT, UPDATE ON seriatim_replay.positions TO PUBLIC")
    with PostgresTarget(poor, "job") as following:
        assert following.claim(QUEUE, "q", 2) == Position(0, 2)


@pytest.mark.parametrize("count", [2, BULK_FROM * 2])
def test_rows_that_the_target_hides_from_the_role_are_not_taken_for_gone(target, dsn, role_of, count) -> None:
    poor = role_of(dsn)
    end = target.apply(QUEUE, planned(target, inserts(count)), 1).position.offset
    with psycopg.connect(dsn) as connection:
        connection.execute("GRANT USAGE ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON seriatim_replay.positions, keyed TO PUBLIC")
        connection.execute("ALTER TABLE keyed ENABLE ROW LEVEL SECURITY")
        connection.execute("CREATE POLICY tenant ON keyed USING (id > 0)")
    rows = transaction(end, *(("d", {"id": i}, None) for i in range(count)))
    with PostgresTarget(poor, "job") as following:
        following.claim(QUEUE, "q", 2)
        with pytest.raises(ApplyFailed, match='row-level security policy for table "keyed"') as refused:
            following.apply(QUEUE, planned(following, rows, end), 2)
    assert refused.value.details["table"] == "public.keyed"
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(count,)]


def test_a_claim_tells_that_somebody_holds_the_position(target, dsn, monkeypatch) -> None:
    monkeypatch.setattr(positions, "CLAIM_WAIT", "100ms")
    with psycopg.connect(dsn) as holding:
        holding.execute("SELECT FROM seriatim_replay.positions FOR UPDATE")
        with pytest.raises(TargetBusy, match="job job in the target has been held for 100ms by another session"):
            target.claim(QUEUE, "q", 2)
    assert target.claim(QUEUE, "q", 2) == Position(0, 2)


def test_a_replay_of_the_same_queue_with_another_subscription_waits_until_the_first_one_is_gone(target, dsn) -> None:
    with PostgresTarget(dsn, "other") as other:
        assert other.claim(QUEUE + 1, "another", 1) == Position(0, 1)
        for _ in range(2):
            with pytest.raises(TargetBusy, match="a replay with subscription job applies this queue"):
                other.claim(QUEUE, "q", 1)
        assert other.position(QUEUE) is None
        assert target.claim(QUEUE, "q", 2) == Position(0, 2)
        gone(target, dsn)
        assert other.claim(QUEUE, "q", 1) == Position(0, 1)
        other.apply(QUEUE, planned(other, inserts(1)), 1)


def gone(target: PostgresTarget, dsn: str) -> None:
    """Its session is no more, and another one may claim."""
    target.close()
    while fetch(dsn, "SELECT FROM pg_locks WHERE locktype = 'advisory'"):
        pass


def written(target: PostgresTarget, dsn: str, end: int = 0) -> int:
    """The target after a transaction of two rows by the fixture's replay, which then ends; the offset behind it."""
    end = applied(target, end, *(("c", None, {"id": end + i, "code": i, "note": "n"}) for i in range(2)))
    gone(target, dsn)
    return end


def test_what_one_replay_has_written_none_with_another_subscription_begins_anew_upon(target, dsn) -> None:
    """Where --subscription was forgotten once, it emptied the tables, and the right one went on behind rows that were gone."""
    end = written(target, dsn)
    with PostgresTarget(dsn, "other") as other:
        for _ in range(2):
            with pytest.raises(
                OtherJob, match=rf"of another one, job, up to offset {end}, .*queue_id = 7 AND job = 'job'"
            ):
                other.claim(QUEUE, "q", 1)
        assert other.position(QUEUE) is None
        assert other.claim(QUEUE + 1, "another", 1) == Position(0, 1)
    assert target.claim(QUEUE, "q", 2) == Position(end, 2)


@pytest.mark.parametrize(
    ("told", "offset"), [("DELETE FROM {}", 0), ("UPDATE {} SET job = 'other', token = 0", 4)], ids=["anew", "there"]
)
def test_a_replay_takes_another_one_s_place_where_somebody_says_so(target, dsn, told, offset) -> None:
    assert written(target, dsn) == 4
    with psycopg.connect(dsn) as connection:
        connection.execute(told.format("seriatim_replay.positions"))
    with PostgresTarget(dsn, "other") as other:
        assert other.claim(QUEUE, "q", 1) == Position(offset, 1)
        if offset:
            gone(other, dsn)
            with pytest.raises(OtherJob):
                target.claim(QUEUE, "q", 2)


def test_of_two_that_have_written_as_earlier_versions_let_them_the_later_one_goes_on(target, dsn) -> None:
    end = written(target, dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "INSERT INTO seriatim_replay.positions SELECT queue_id, 'later', queue, 9, 1 FROM seriatim_replay.positions"
        )
    with PostgresTarget(dsn, "later") as later:
        assert later.claim(QUEUE, "q", 2) == Position(9, 2)
        gone(later, dsn)
        with pytest.raises(OtherJob):
            target.claim(QUEUE, "q", 2)
        with pytest.raises(OtherJob):  # as one whose connection broke, and which claims nothing anew
            target.apply(QUEUE, planned(target, inserts(1, end), end), 1)
        assert later.claim(QUEUE, "q", 3) == Position(9, 3)
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(2,)]


def test_a_replay_to_which_nothing_has_come_yet_is_there_all_the_same(target, dsn) -> None:
    with PostgresTarget(dsn, "other") as other, pytest.raises(RivalJob):
        other.claim(QUEUE, "q", 1)


@pytest.mark.parametrize("named", [str, strictly])
def test_of_two_replays_that_claim_at_once_one_has_the_queue(dsn, named) -> None:
    with PostgresTarget(dsn, "job") as made:
        made.claim(QUEUE + 1, "another", 1)
    with PostgresTarget(named(dsn), "other") as other, psycopg.connect(dsn) as first, ThreadPoolExecutor(1) as beside:
        first.execute("SELECT")  # begins a transaction, so that the claim isn't committed yet
        positions.claim(first, QUEUE, "job", "q", 1, 0)
        second = beside.submit(other.claim, QUEUE, "q", 1)
        while not fetch(dsn, "SELECT FROM pg_locks WHERE NOT granted"):
            assert not second.done()
        first.commit()
        with pytest.raises(RivalJob):
            second.result()


def test_a_replay_whose_connection_broke_waits_for_the_one_that_has_come_since(target, dsn) -> None:
    made = planned(target, inserts(1))
    with PostgresTarget(dsn, "other") as other:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory'"
            )
        with pytest.raises(TargetLost):
            target.apply(QUEUE, made, 1)
        assert other.claim(QUEUE, "q", 1) == Position(0, 1)
        for _ in range(2):
            with pytest.raises(RivalJob):
                target.apply(QUEUE, made, 1)
    gone(other, dsn)
    assert target.apply(QUEUE, made, 1).position.offset == made.end


def test_a_position_of_another_queue_with_the_same_id_is_refused(dsn) -> None:
    """Ids count from 1 in each cluster. The first token of a cluster that was made anew is lower than the last one's of the old."""
    with PostgresTarget(dsn, "job") as old:
        old.claim(QUEUE, "orders", 5, created_at_ms=1_700_000_000_000)
        old.apply(QUEUE, planned(old, inserts(2)), 5)
        assert old.claim(QUEUE, "orders", 6, created_at_ms=1_700_000_000_000) == Position(4, 6)
        assert old.claim(QUEUE, "orders", 6) == Position(4, 6)  # one that doesn't know is believed
    for token in (1, 7):
        with PostgresTarget(dsn, "job") as new, pytest.raises(OtherQueue) as refused:
            new.claim(QUEUE, "stock", token, created_at_ms=1_700_000_000_001)
        said = str(refused.value)
        assert "'orders', made at 2023-11-14 22:13:20+00, while 'stock' was made at 2023-11-14 22:13:20.001+00" in said
        assert "queue_id = 7 AND job = 'job'" in said
        assert "--subscription NAME" in said
    with PostgresTarget(dsn, "other") as new:
        assert new.claim(QUEUE, "stock", 1, created_at_ms=1_700_000_000_001) == Position(0, 1)
    with PostgresTarget(dsn, "job") as old, pytest.raises(Fenced):
        old.claim(QUEUE, "orders", 5, created_at_ms=1_700_000_000_000)


def test_which_snapshot_is_under_way_is_kept_for_whoever_goes_on(target, dsn) -> None:
    """A replay that was started, or elected, behind a hole in one passed over it."""

    def told() -> Snapshot | None:
        return target.claim(QUEUE, "q", 1).snapshot

    assert told() is None
    target.apply(QUEUE, Plan(0, 5, (), 0, 0, None, (), Snapshot(2**46, 5)), 1)
    assert told() == Snapshot(2**46, 5)
    target.apply_parts(QUEUE, 5, 9, lambda: iter(()), 1, NO_SNAPSHOT)
    assert told() == NO_SNAPSHOT
    with psycopg.connect(dsn) as connection:  # as somebody does, or a replay of an earlier version
        connection.execute("UPDATE seriatim_replay.positions SET next_offset = 20")
    assert told() is None
    target.apply_parts(QUEUE, 20, 30, lambda: iter(()), 1)
    assert told() is None


@pytest.mark.parametrize("made", ["", "queue_created_at_ms bigint, "])
def test_a_position_of_an_earlier_version_is_taken_over(dsn, made) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE SCHEMA seriatim_replay")
        connection.execute(
            "CREATE TABLE seriatim_replay.positions (queue_id bigint NOT NULL, job text NOT NULL, queue text NOT NULL, next_offset "
            "bigint NOT NULL, token bigint NOT NULL, updated_at timestamptz NOT NULL DEFAULT now(), "
            f"{made}PRIMARY KEY (queue_id, job))"
        )
        connection.execute("INSERT INTO seriatim_replay.positions VALUES (7, 'job', 'q', 20, 3)")
    for _ in range(2):
        with PostgresTarget(dsn, "job") as target:
            assert target.claim(QUEUE, "q", 4, created_at_ms=9) == Position(20, 4)
    with PostgresTarget(dsn, "job") as target, pytest.raises(OtherQueue):
        target.claim(QUEUE, "q", 5, created_at_ms=8)


class Halted:
    """A replay that stands still behind a step of its transaction, such as one stopped by a signal; then it tries again."""

    def __init__(self, dsn: str, step: str, rows: list[ChangeRow]) -> None:
        self.ends: list[Exception] = []
        self.moved, self.go_on = threading.Event(), threading.Event()
        self._step = step
        self._target = PostgresTarget(dsn, "job", on_step=self._stand_still)
        self._target.claim(QUEUE, "q", 1)
        self.plan = planned(self._target, rows)
        self._thread = threading.Thread(target=self._apply_twice)

    def __enter__(self):
        self._thread.start()
        assert self.moved.wait(60)
        return self

    def __exit__(self, *_) -> None:
        self.go_on.set()
        self._thread.join(60)
        self._target.close()

    def _stand_still(self, step: str) -> None:
        if step == self._step:
            self.moved.set()
            assert self.go_on.wait(60)

    def _apply_twice(self) -> None:
        for _ in range(2):
            try:
                self._target.apply(QUEUE, self.plan, 1)
            except SeriatimError as error:
                self.ends.append(error)


@pytest.mark.parametrize("step", ["position moved", "changes carried out"])
@pytest.mark.parametrize("count", [3, BULK_FROM * 2])
def test_a_replay_that_stands_still_in_a_transaction_is_ended_by_the_next_one(dsn, monkeypatch, step, count) -> None:
    monkeypatch.setattr(positions, "CLAIM_WAIT", "300ms")
    with PostgresTarget(dsn, "job") as following, Halted(dsn, step, inserts(count)) as halted:
        with pytest.raises(TargetBusy, match="held for 300ms by a replay before this one: its session was ended"):
            following.claim(QUEUE, "q", 2)
        assert following.claim(QUEUE, "q", 2) == Position(0, 2)
        assert following.apply(QUEUE, halted.plan, 2).position.offset == halted.plan.end
    assert [type(error) for error in halted.ends] == [TargetLost, Fenced]
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(count,)]


@pytest.mark.parametrize("setting", ["statement_timeout", "transaction_timeout"])
def test_a_replay_that_stands_still_is_ended_also_where_the_role_has_less_time_than_a_claim(
    dsn, monkeypatch, setting
) -> None:
    monkeypatch.setattr(positions, "CLAIM_WAIT", "4s")
    with PostgresTarget(dsn, "job") as following, Halted(dsn, "position moved", inserts(3)) as halted:
        following._connected().execute(f"SET {setting} = '3s'")
        with pytest.raises(TargetBusy, match="held for 4s by a replay before this one: its session was ended"):
            following.claim(QUEUE, "q", 2)
        assert following.claim(QUEUE, "q", 2) == Position(0, 2)
    assert [type(error) for error in halted.ends] == [TargetLost, Fenced]


def test_a_replay_of_another_queue_or_job_is_left_alone(dsn, monkeypatch) -> None:
    monkeypatch.setattr(positions, "CLAIM_WAIT", "100ms")
    with PostgresTarget(dsn, "job") as following, psycopg.connect(dsn) as holding:
        following.claim(QUEUE + 1, "q", 1)
        with Halted(dsn, "position moved", inserts(3)) as halted:
            holding.execute("SELECT FROM seriatim_replay.positions WHERE queue_id = %s FOR UPDATE", (QUEUE + 1,))
            with pytest.raises(TargetBusy, match="by another session"):
                following.claim(QUEUE + 1, "q", 2)
            holding.rollback()
    assert [type(error) for error in halted.ends] == [PositionMoved]
    assert fetch(dsn, "SELECT count(*) FROM keyed") == [(3,)]


def test_a_replay_that_stands_still_keeps_nothing_locked_for_longer_than_a_minute(dsn, monkeypatch) -> None:
    assert TARGET_SETTINGS["idle_in_transaction_session_timeout"] == "1min"
    short = {**TARGET_SETTINGS, "idle_in_transaction_session_timeout": "300ms"}
    monkeypatch.setattr(postgres, "TARGET_SETTINGS", short)
    with PostgresTarget(dsn, "job") as following, Halted(dsn, "position moved", inserts(3)) as halted:
        assert following.claim(QUEUE, "q", 2) == Position(0, 2)
    assert [type(error) for error in halted.ends] == [TargetLost, Fenced]


@pytest.mark.parametrize("count", [2, BULK_FROM * 2])
def test_a_key_that_the_target_numbers_itself_identifies_no_row_of_the_source(target, dsn, count) -> None:
    """The source has replica identity full, the target a key of its own: one that the source's rows have, or don't have."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE numbered (number serial PRIMARY KEY, id integer, note text)")
        connection.execute("CREATE TABLE known (id integer PRIMARY KEY, note text)")
    start = 0
    for table in ("numbered", "known"):
        rows = [{"id": i, "note": f"n{i}"} for i in range(count)]
        for steps in (
            [("c", None, row) for row in rows],
            [("u", row, {**row, "note": "new"}) for row in rows[1:]] + [("d", rows[0], None)],
        ):
            start = applied(target, start, *steps, table=table, key=())
        assert fetch(dsn, f"SELECT id, note FROM {table} ORDER BY id") == [(i, "new") for i in range(1, count)]
    assert fetch(dsn, "SELECT count(*) FROM numbered WHERE number = id + 1") == [(count - 1,)]


@pytest.mark.parametrize("checked", ["DEFERRABLE", ""])
@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ([("u", (1, "a"), (2, "a")), ("u", (2, "b"), (1, "b"))], [(1, "b"), (2, "a")]),
        ([("c", None, (1, "new")), ("d", (1, "a"), None)], [(1, "new"), (2, "b")]),
        ([("c", None, (1, "new")), ("u", (1, "a"), (3, "a"))], [(1, "new"), (2, "b"), (3, "a")]),
        ([("c", None, (1, "a")), ("d", (1, "a"), None)], [(1, "a"), (2, "b")]),
        (
            [("c", None, (1, "b")), ("c", None, (2, "a")), ("d", (2, "b"), None), ("d", (1, "a"), None)],
            [(1, "b"), (2, "a")],
        ),
    ],
)
def test_rows_that_have_the_same_deferrable_key_for_a_while_are_told_apart(target, dsn, steps, left, checked) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(f"CREATE TABLE swapped (id integer PRIMARY KEY {checked}, note text)")

    def named(step: tuple) -> tuple:
        op, before, after = step
        return op, *(None if row is None else dict(zip(("id", "note"), row, strict=True)) for row in (before, after))

    start = applied(target, 0, *map(named, [("c", None, (1, "a")), ("c", None, (2, "b"))]), table="swapped", key=())
    applied(target, start, *map(named, steps), table="swapped", key=())
    assert fetch(dsn, "SELECT id, note FROM swapped ORDER BY id") == left


CAME_AND_WENT = {
    "a column was added": {"note": "a", "code": 1, "more": None},
    "a column was dropped": {"code": 1},
    "a column was dropped and made again": {"note": None, "code": 1},
    "a column has another type": {"note": "a", "code": "1.00"},
    "its partition's replica identity names the key alone": {"note": None, "code": None},
}


@pytest.mark.parametrize("image", CAME_AND_WENT.values(), ids=CAME_AND_WENT)
@pytest.mark.parametrize("rule", ["", "UNIQUE"])
def test_a_row_that_came_and_went_is_none_of_the_target_s_whatever_its_old_image_looks_like(
    target, dsn, image, rule
) -> None:
    """The source's replica identity is full. What its transaction takes away may also be a row that the target has, which is told from the other one."""
    with psycopg.connect(dsn) as connection:
        connection.execute(f"CREATE TABLE wide (id integer PRIMARY KEY, note text, code numeric {rule}, more integer)")
    came, after = {"id": 1, "note": "a", "code": 1}, {"id": 1, **image, "note": "b"}
    steps = [("c", None, came), ("u", {"id": 1, **image}, after), ("d", after, None)]
    start = applied(target, 0, *steps[:2], table="wide", key=())
    assert fetch(dsn, "SELECT id, note FROM wide") == [(1, "b")]
    start = applied(target, start, steps[2], table="wide", key=())
    moved = [("u", {"id": 1, **image}, {**after, "id": 2}), ("d", {"id": 2, **image}, None)]
    for gone in ([("d", {"id": 1, **image}, None)], steps[1:], moved):
        start = applied(target, start, came_as(came), *gone, table="wide", key=())
        assert fetch(dsn, "SELECT FROM wide") == []
    start = applied(target, start, came_as({**came, "code": 7}), table="wide", key=())
    with pytest.raises(Diverged, match="is not there"):
        applied(target, start, came_as(came), ("d", {"id": 1, **image, "note": "other"}, None), table="wide", key=())
    assert fetch(dsn, "SELECT code FROM wide") == [(7,)]


def came_as(row: dict[str, object]) -> tuple:
    return "c", None, row


@pytest.mark.parametrize("count", [1, BULK_FROM])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_second_row_of_a_key_that_only_the_target_has_is_refused(target, dsn, count, is_cut) -> None:
    """Where it stays, and where the first one goes only in a later part of its transaction: neither is overwritten by the other."""
    start = applied(target, 0, ("c", None, {"id": 0, "note": "a"}), table="shared", key=())
    steps = [("c", None, {"id": number, "note": "new"}) for number in range(count)]
    rows = transaction(
        start, *steps, *([("d", {"id": 0, "note": "a"}, None)] if is_cut else []), table="shared", key=()
    )
    cuts = [0, 1 + count, len(rows)] if is_cut else [0, len(rows)]

    def parts() -> Iterator[Plan]:
        unfinished = None
        for first, end in pairwise(cuts):
            made, unfinished = plan_part(rows[first:end], start + first, start + end, target.tables(), unfinished)
            yield made

    with pytest.raises(ApplyFailed, match="duplicate key") as refused:
        target.apply_parts(QUEUE, start, start + len(rows), parts, 1)
    assert refused.value.details["offset"] == start + 1
    assert fetch(dsn, "SELECT id, note FROM shared") == [(0, "a")]


def test_a_row_that_a_whole_image_names_is_found_by_the_index_of_a_deferrable_key(target, dsn) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE swapped (id integer PRIMARY KEY DEFERRABLE, note text)")
        connection.commit()
        shape = target.tables()[TableName("public", "swapped")]
        connection.execute("SET enable_seqscan = off")
        text = statements.delete_one(shape, ("id", "note"))
        told = connection.execute(f"EXPLAIN {text}", (1, "a")).fetchall()
    assert any("swapped_pkey" in line for (line,) in told)


ALIKE = {
    "interval": ("24:00:00", "1 day"),
    "double precision": ("0", "-0"),
    "real": ("-0", "0"),
    "numeric": ("1.0", "1.00"),
    "bpchar": ("a", "a  "),
    "hundredths": ("1.5", "1.50"),
    "numeric[]": ("{1.0}", "{1.00}"),
    "pair": ("(0,1.0)", "(0,1.00)"),
    "jsonb": ('{"a": 1.0}', '{"a": 1.00}'),
}
"""Of each type two values that its equality takes for the same one."""
OTHERS = {
    "boolean": ("t", "f"),
    "smallint": ("1", "2"),
    "character(4)": ("a   ", "b   "),
    "inet": ("10.0.0.1", "10.0.0.2/8"),
    "timestamp(3) without time zone": ("2026-01-01 00:00:00", "2026-01-01 00:00:00.5"),
    "time without time zone": ("00:00:00", "24:00:00"),
    "bytea": ("\\x00", "\\x0000"),
    "json": ('{"a":1}', '{"a": 1}'),
    "point": ("(0,1)", "(1,0)"),
    "integer[]": ("{1,2}", "{1,NULL}"),
    "mood": ("sad", "glad"),
    "money": ("$1.00", "$2.00"),
    "text": ("", None),
    "box": ("(1,1),(0,0)", None),
    "nothing": ("(,)", None),
}


def test_rows_without_a_key_are_told_apart_by_all_of_their_values(target, dsn) -> None:
    types = ALIKE | OTHERS
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE DOMAIN hundredths AS numeric")
        connection.execute("CREATE TYPE pair AS (a double precision, b numeric)")
        connection.execute("CREATE TYPE nothing AS (a integer, b integer)")
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
        for number, type_name in enumerate(types):
            connection.execute(f"CREATE TABLE t{number} (id integer, v {type_name})")
    start = 0
    for number, (type_name, (kept, other)) in enumerate(types.items()):
        steps = [
            ("c", None, {"id": 1, "v": other}),
            ("c", None, {"id": 1, "v": kept}),
            ("d", {"id": 1, "v": kept}, None),  # the second one, though the first comes to hand first
            ("c", None, {"id": 1, "v": kept}),
            ("u", {"id": 1, "v": other}, {"id": 2, "v": other}),
        ]
        made = transaction(start, *steps, table=f"t{number}", key=())
        target.apply(QUEUE, planned(target, made, start), 1)
        start += len(made)
        held = fetch(dsn, f"SELECT id, CASE num_nulls(v) WHEN 0 THEN format('%s', v) END FROM t{number} ORDER BY id")
        assert held == [(1, kept), (2, other)], type_name
    for number, type_name in enumerate(ALIKE):
        equal = f"SELECT a.v = b.v FROM t{number} a, t{number} b WHERE (a.id, b.id) = (1, 2)"
        assert fetch(dsn, equal) == [(True,)], type_name


@pytest.mark.parametrize(
    ("type_name", "value"),
    [
        ("regclass", "public.keyed"),
        ("regclass[]", "{public.keyed,public.keyless}"),
        ("place", "(1,x)"),
        ("integer[]", "{1,2}"),
        ("int4range", "[1,3)"),
        ("few", "ab"),
        ("feeling", "sad"),
        ("character varying(2)", "ab"),
    ],
)
@pytest.mark.parametrize("key", [("k",), ()])
def test_a_row_is_found_by_a_value_of_any_type(target, dsn, type_name, value, key) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TYPE place AS (a integer, b text); CREATE DOMAIN few AS varchar(2)")
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE DOMAIN feeling AS mood")
        connection.execute(f"CREATE TABLE found (k {type_name} {'PRIMARY KEY' if key else ''}, code integer UNIQUE)")
    row = {"k": value, "code": 1}
    end = applied(target, 0, ("c", None, row), table="found", key=key)
    end = applied(target, end, ("u", None if key else row, {**row, "code": 2}), table="found", key=key)
    assert fetch(dsn, "SELECT code FROM found") == [(2,)]
    applied(target, end, ("d", {"k": value} if key else {**row, "code": 2}, None), table="found", key=key)
    assert fetch(dsn, "SELECT code FROM found") == []


@pytest.mark.parametrize("count", [1, BULK_FROM])
@pytest.mark.parametrize("type_name", ["ltree", "citext", "labels", "enumerated"])
def test_a_row_is_found_by_a_key_whose_type_is_in_a_schema_of_its_own(target, dsn, type_name, count) -> None:
    """By the index: a citext would be compared as text, which none serves. Of a domain over an enum there is no equality."""
    with psycopg.connect(dsn) as connection:
        connection.execute(
            'CREATE SCHEMA "100%"; CREATE EXTENSION ltree SCHEMA "100%"; CREATE EXTENSION citext SCHEMA "100%"'
        )
        connection.execute('CREATE DOMAIN "100%".label AS "100%".ltree; CREATE DOMAIN "100%".labels AS "100%".label')
        labels = ", ".join(f"'a.b{number}'" for number in range(BULK_FROM))
        connection.execute(f'CREATE TYPE "100%".kind AS ENUM ({labels}); CREATE DOMAIN "100%".narrow AS "100%".kind')
        connection.execute('CREATE DOMAIN "100%".enumerated AS "100%".narrow')
        connection.execute(f'CREATE TABLE found (n integer, k "100%".{type_name}, note text, PRIMARY KEY (n, k))')
    rows = [{"n": 1, "k": f"a.b{number}", "note": "a"} for number in range(count)]
    named = {"table": "found", "key": ("n", "k")}
    end = applied(target, 0, *(("c", None, row) for row in rows), **named)
    end = applied(target, end, *(("u", None, {"n": 1, "k": row["k"]}, ("note",)) for row in rows), **named)
    shape = target.tables()[TableName("public", "found")]
    with psycopg.connect(dsn) as connection:
        connection.execute("SET enable_seqscan = off")
        told = connection.execute(f"EXPLAIN {statements.delete(shape, ('k',))}", ("a.b0",)).fetchall()
    assert any("Index Cond" in line and "k" in line for (line,) in told)
    applied(target, end, *(("d", row, None) for row in rows), **named)
    assert fetch(dsn, "SELECT FROM found") == []


_CHILD = """
import os, pickle, signal, sys
from seriatim.consumer.spark.targets.postgres import PostgresTarget
dsn, path, wanted = sys.argv[1:]
made, token = pickle.load(open(path, "rb"))
steps = 0
def die(step):
    global steps
    if steps == int(wanted):
        os.kill(os.getpid(), signal.SIGKILL)
    steps += 1
target = PostgresTarget(dsn, "job", on_step=die)
target.apply(7, made, token)
"""


def test_killed_between_any_two_steps_it_leaves_all_or_nothing(dsn, tmp_path: Path) -> None:
    import pickle

    rows = inserts(BULK_FROM * 2)
    first = len(rows)
    rows += transaction(
        first,
        ("c", None, {"id": 1, "code": 1, "note": "x"}),
        ("u", None, {"id": 1, "code": 2, "note": "y"}),
        table="with_unique",
    )
    path = tmp_path / "plan"
    with PostgresTarget(dsn, "job") as target:
        target.claim(QUEUE, "q", 1)
        made = planned(target, rows)
        path.write_bytes(pickle.dumps((made, 1)))
        seen = set()
        for step in range(20):
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, dsn, str(path), str(step)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, timeout=120, check=False, capture_output=True,
            )  # fmt: skip
            # The server may still be busy ending the dead session; a lock on the position waits for it.
            with psycopg.connect(dsn) as connection:
                (position,) = connection.execute(
                    "SELECT next_offset FROM seriatim_replay.positions FOR UPDATE"
                ).fetchone()
            counts = fetch(dsn, "SELECT (SELECT count(*) FROM keyed), (SELECT count(*) FROM with_unique)")
            seen.add(position)
            assert (position, counts) in [(0, [(0, 0)]), (made.end, [(BULK_FROM * 2, 1)])]
            if position:
                assert done.returncode == -signal.SIGKILL, "killed after the commit, before its answer"
                with pytest.raises(PositionMoved):
                    target.apply(QUEUE, made, 1)
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
        assert seen == {0, made.end}
        assert step >= 4, "killed before the commit at least four times"


def test_a_lost_connection_is_told_and_the_next_call_connects_again(target, dsn, postgres_server) -> None:
    made = planned(target, inserts(2))
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (dsn.rsplit("/", 1)[1],)
        )
    with pytest.raises(TargetLost):
        target.apply(QUEUE, made, 1)
    assert target.apply(QUEUE, made, 1).position.offset == made.end
    with pytest.raises(TargetLost):
        PostgresTarget("postgresql://postgres@127.0.0.1:1/none", "job").tables()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_planned_and_applied_to_postgres_equals_the_source(target, dsn, data) -> None:
    source = data.draw(changes.sources())
    wanted = dict(source.after_commit)
    with psycopg.connect(dsn) as connection:
        connection.execute("TRUNCATE keyed, with_unique, keyless, shared")
        connection.execute("UPDATE seriatim_replay.positions SET next_offset = 0")
    position = 0
    for cut in data.draw(changes.cuts(len(source.rows))):
        made = planned(target, source.rows[:cut], position)
        try:
            position = target.apply(QUEUE, made, 1).position.offset
        except ApplyFailed as refused:
            if not source.is_altered or refused.details["table"] != "public.shared":
                raise
            return
        for name, rows in zip(changes.SHAPES, wanted[position], strict=True):
            expected = sorted((tuple(row[c] for c in changes.COLUMNS) for row in rows), key=repr)
            assert sorted(fetch(dsn, f"SELECT id, code, note FROM {name}"), key=repr) == expected
    assert position == len(source.rows)


@pytest.mark.parametrize("count", [3, BULK_FROM * 3])
def test_a_primary_key_without_overlaps_tells_rows_apart(target, dsn, count) -> None:
    """PostgreSQL 18. Where one period ends earlier and the next one begins there, the order of the two matters."""
    with psycopg.connect(dsn) as connection:
        if connection.info.server_version < 180000:
            pytest.skip("no such keys")
        connection.execute(
            "CREATE TABLE periods (id int4range, during int4range, note text, PRIMARY KEY (id, during WITHOUT OVERLAPS))"
        )

    def row(number: int, start: int, end: int, **more: object) -> dict[str, object]:
        return {"id": f"[{number},{number + 1})", "during": f"[{start},{end})", **more}

    numbers = range(count)
    named: dict = {"table": "periods", "key": ("id", "during")}
    first = [("c", None, row(n, start, start + 5, note="x")) for n in numbers for start in (0, 5)]
    moved = [("u", row(n, 0, 5), row(n, 0, 3, note="y")) for n in numbers]
    moved += [("u", row(n, 5, 10), row(n, 3, 10, note="y")) for n in numbers]
    written = [("u", None, row(n, 3, 10, note="z")) for n in numbers]
    end = applied(target, 0, *first, **named)
    end = applied(target, end, *moved, *written, **named)
    applied(target, end, ("d", row(0, 0, 3), None), **named)
    assert fetch(dsn, "SELECT during::text, note, count(*) FROM periods GROUP BY 1, 2 ORDER BY 1") == [
        ("[0,3)", "y", count - 1),
        ("[3,10)", "z", count),
    ]


SWAP = [("u", None, {"id": number, "code": code}) for number, code in ((1, 3), (2, 1), (1, 2))]
"""Two rows exchange a value, over a third one, as under a unique rule they have to."""


@pytest.mark.parametrize("rule", ["UNIQUE (code)", "EXCLUDE (code WITH =)"])
def test_values_pass_on_under_a_rule_that_only_a_partition_has(target, dsn, rule) -> None:
    """The table above, which `publish_via_partition_root` names, can't have it without the column that parts it."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE parted (id integer PRIMARY KEY, code integer) PARTITION BY LIST (id)")
        connection.execute("CREATE TABLE upper PARTITION OF parted FOR VALUES IN (1, 2) PARTITION BY LIST (id)")
        connection.execute("CREATE TABLE lower PARTITION OF upper FOR VALUES IN (1, 2)")
        connection.execute("INSERT INTO parted VALUES (1, 1), (2, 2)")
    assert target.tables()[TableName("public", "parted")].unique == (frozenset({"id"}),)
    with psycopg.connect(dsn) as connection:
        connection.execute(f"ALTER TABLE lower ADD {rule}")
    applied(target, 0, *SWAP, table="parted")
    assert fetch(dsn, "SELECT id, code FROM parted ORDER BY id") == [(1, 2), (2, 1)]


def unfinished(dsn: str, index: str) -> None:
    """As one that is being built CONCURRENTLY, or was given up: enforced, but not valid."""
    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s::regclass", (index,))


def test_values_pass_on_under_a_rule_that_is_being_built(target, dsn) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE ruled (id integer PRIMARY KEY, code integer)")
        connection.execute("INSERT INTO ruled VALUES (1, 1), (2, 2)")
        connection.execute("CREATE UNIQUE INDEX ruled_code ON ruled (code)")
    unfinished(dsn, "ruled_code")
    applied(target, 0, *SWAP, table="ruled")
    assert fetch(dsn, "SELECT id, code FROM ruled ORDER BY id") == [(1, 2), (2, 1)]
    with pytest.raises(MissingKey):  # two rows may still have it
        applied(target, len(SWAP) + 2, ("d", {"code": 1}, None), table="ruled", key=("code",))


def test_an_index_that_is_built_anew_beside_the_key_s_keeps_no_order(target, dsn) -> None:
    """By REINDEX CONCURRENTLY, or left behind by one that was given up."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE ruled (id integer PRIMARY KEY, code integer)")
        connection.execute("CREATE UNIQUE INDEX ruled_pkey_ccnew ON ruled (id)")
    unfinished(dsn, "ruled_pkey_ccnew")
    assert target.tables()[TableName("public", "ruled")].unique == (frozenset({"id"}),)


PARTED = """
CREATE TABLE customers (id integer PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE customers_1 PARTITION OF customers FOR VALUES FROM (0) TO (9);
CREATE TABLE orders (id integer PRIMARY KEY, up integer REFERENCES orders, customer integer REFERENCES customers) PARTITION BY LIST (id);
CREATE TABLE orders_1 PARTITION OF orders FOR VALUES IN (1);
CREATE TABLE "orders%" PARTITION OF orders FOR VALUES IN (2) PARTITION BY LIST (id);
CREATE TABLE orders_2 PARTITION OF "orders%" FOR VALUES IN (2);
CREATE TABLE items (n integer, item integer REFERENCES orders) PARTITION BY LIST (n);
INSERT INTO customers VALUES (1);
INSERT INTO orders VALUES (1, 1, 1), (2, 1, 1);
"""
"""A partitioned table that refers to another one and to itself; and one without a partition, that refers to it."""
PARTS = ("customers_1", "orders_1", "orders_2")
HELD = "SELECT id FROM customers UNION ALL SELECT id FROM orders"


def test_partitions_are_emptied_with_the_tables_above_them_that_have_foreign_keys(target, dsn, role_of) -> None:
    """Without `publish_via_partition_root` the source names the partitions alone, at a TRUNCATE and where a snapshot begins."""
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute(PARTED)
        connection.execute("GRANT ALL ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA seriatim_replay, public TO PUBLIC")
    with PostgresTarget(poor, "job") as weak:
        weak.apply(QUEUE, planned(weak, emptying(0, *PARTS)), 1)
    assert fetch(dsn, HELD) == []


def test_a_partition_that_is_not_to_be_emptied_is_not(target, dsn, monkeypatch) -> None:
    """One of the target's own, that comes when the table above it has been looked at, and one that is there by then."""
    with psycopg.connect(dsn) as connection:
        connection.execute(PARTED)
    looks = []

    def look(connection, tables) -> set[TableName]:
        looks.append(catalogue.read_above(connection, tables))
        if len(looks) == 1:
            with psycopg.connect(dsn) as beside:
                beside.execute("CREATE TABLE orders_3 PARTITION OF orders DEFAULT")
                beside.execute("INSERT INTO orders VALUES (3, 1, 1)")
        return looks[-1]

    monkeypatch.setattr(execution, "read_above", look)
    made = emptying(0, *PARTS)
    with pytest.raises(TablesChanged, match=r"public\.orders"):
        target.apply(QUEUE, planned(target, made), 1)
    with pytest.raises(TruncateRefused, match='Table "orders" references'):
        target.apply(QUEUE, planned(target, made), 1)
    assert fetch(dsn, HELD) == [(1,), (1,), (2,), (3,)]


@pytest.mark.parametrize("checked", ["", "DEFERRABLE INITIALLY DEFERRED"])
def test_a_table_is_emptied_whose_sequence_the_role_may_not_restart(target, dsn, role_of, checked) -> None:
    """Only its owner may. One that may still does."""
    poor = role_of(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute(f"CREATE TABLE counted (id serial PRIMARY KEY, up integer REFERENCES counted {checked})")
        connection.execute("GRANT ALL ON SCHEMA seriatim_replay TO PUBLIC")
        connection.execute("GRANT ALL ON seriatim_replay.positions, counted TO PUBLIC")
        connection.execute("SELECT setval('counted_id_seq', 7)")
    start = 0
    for reached, after in ((poor, 7), (dsn, 1)):
        rows = transaction(start, ("c", None, {"id": 1, "up": 1}), table="counted")
        rows += emptying(start + len(rows), "counted", restart_identity=True)
        with PostgresTarget(reached, "job") as emptier:
            emptier.apply(QUEUE, planned(emptier, rows, start), 1)
        start += len(rows)
        assert fetch(dsn, "SELECT last_value, (SELECT count(*) FROM counted) FROM counted_id_seq") == [(after, 0)]
    with psycopg.connect(dsn) as connection:
        connection.execute("REVOKE TRUNCATE ON counted FROM PUBLIC")
    with PostgresTarget(poor, "job") as weak, pytest.raises(ApplyFailed, match="permission denied for table counted"):
        weak.apply(QUEUE, planned(weak, emptying(start, "counted", restart_identity=True), start), 1)
