"""Slot first, snapshot at its point: a write between the two is neither lost nor doubled (synchdb#256)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest

from seriatim.producer.sources.postgres import catalog
from seriatim.producer.sources.postgres.attendant import Attendant
from seriatim.producer.sources.postgres.capture import PostgresCapture
from seriatim.producer.sources.postgres.core.identity import Server
from seriatim.producer.sources.postgres.core.resume import Kept, Stream, TakeSnapshot
from seriatim.producer.sources.postgres.errors import CaptureRefused, ResumePointUnknown, RowsHidden
from seriatim.producer.sources.postgres.replication import Connection, ReplicationConnection
from tests.postgres.test_capture import (
    SLOT,
    Queue,
    Run,
    Sender,
    is_free,
    last_commit_of,
    one,
    replayed,
    running,
    sql,
    streaming,
    table_rows,
    wait_for,
)

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'seriatim-capture' AND wait_event_type = 'Lock'"
)


class SnapshotFirst(PostgresCapture):
    """The planted wrong rule: the tables are read as they were before the slot was made."""

    def _take_snapshot(
        self,
        connection: Connection,
        replication: ReplicationConnection,
        attendant: Attendant,
        step: TakeSnapshot,
        server: Server,
    ) -> Stream:
        make = replication.create_slot
        with closing(catalog.connect(self._dsn)) as earlier:
            earlier.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            row = earlier.execute("SELECT pg_export_snapshot()").fetchone()
            assert row is not None
            replication.create_slot = lambda slot: (make(slot)[0], row[0])  # type: ignore[method-assign]
            return super()._take_snapshot(connection, replication, attendant, step, server)


def copied(dsn: str, kind: type[PostgresCapture], monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Captured from the start, with one write just before the slot is made and one just after it."""
    make = ReplicationConnection.create_slot

    def make_between_writes(self: ReplicationConnection, slot: str) -> tuple[int, str]:
        sql(dsn, "INSERT INTO a VALUES (2, 'before')", "UPDATE a SET t = 'changed' WHERE id = 1")
        made = make(self, slot)
        sql(dsn, "INSERT INTO a VALUES (3, 'after')")
        return made

    monkeypatch.setattr(ReplicationConnection, "create_slot", make_between_writes)
    queue = Queue()
    run = Run(dsn, Sender(queue), kind=kind)
    try:
        wait_for(lambda: any(change.op == "snapshot_end" for change in queue.changes()), run)
        sql(dsn, "INSERT INTO a VALUES (4, 'end')")
        wait_for(lambda: last_commit_of(queue, 4), run)
    finally:
        run.end()
    return queue


@pytest.fixture
def dsn(new_database: Callable[[], str]) -> str:
    made = new_database()
    sql(made, "CREATE TABLE a (id int PRIMARY KEY, t text)", "INSERT INTO a VALUES (1, 'x')")
    return made


def test_a_write_beside_the_slots_making_is_copied_once(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replayed(copied(dsn, PostgresCapture, monkeypatch)) == table_rows(dsn, "a")


class Unsure(Sender):
    """Nobody can tell what the queue holds, for a while."""

    asked = 0

    def kept(self) -> Kept:
        self.asked += 1
        if self.asked <= 3:
            raise ResumePointUnknown("an earlier link is lost")
        return super().kept()


def test_an_unknown_resume_point_is_waited_for_and_never_a_reason_for_a_snapshot(dsn: str) -> None:
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: any(change.op == "snapshot_end" for change in queue.changes()), run)
    sql(dsn, "INSERT INTO a VALUES (2, 'meanwhile')")
    wait_for(lambda: is_free(dsn))  # a busy slot is waited for, too, and then it is asked once more
    unsure = Unsure(queue)
    with running(dsn, unsure) as run:
        wait_for(lambda: last_commit_of(queue, 2), run)
    assert unsure.asked == 4
    assert [change.op for change in queue.changes()].count("snapshot_begin") == 1
    assert replayed(queue) == table_rows(dsn, "a")


@contextmanager
def reader_of(dsn: str, role: str) -> Iterator[str]:
    """DSN of a role that may replicate, and is shown the row with id 1 only."""
    sql(
        dsn,
        "CREATE PUBLICATION pub FOR TABLE a",
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON a TO {role}",
        "INSERT INTO a VALUES (2, 'hidden')",
        "ALTER TABLE a ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY few ON a USING (id = 1)",
    )
    try:
        yield dsn.replace("postgres@", f"{role}@")
    finally:
        sql(dsn, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_snapshot_that_would_leave_hidden_rows_out_is_refused_before_there_is_a_slot(dsn: str) -> None:
    queue = Queue()
    with reader_of(dsn, "seriatim_capture") as few:
        with running(few, Sender(queue)) as run:
            wait_for(lambda: run.error is not None)
        assert isinstance(run.error, RowsHidden)
        assert not queue.records
        assert one(dsn, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'cap'") == 0
        sql(dsn, str(run.error.details["statement"]))
        with running(few, Sender(queue)) as run:
            wait_for(lambda: any(change.op == "snapshot_end" for change in queue.changes()), run)
        assert replayed(queue) == table_rows(dsn, "a")


def test_rows_that_are_hidden_just_before_the_snapshot_end_it(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "check_rows", lambda _connection, _publication: None)
    queue = Queue()
    with reader_of(dsn, "seriatim_capture") as few:
        with running(few, Sender(queue)) as run:
            wait_for(lambda: run.error is not None)
        assert isinstance(run.error, CaptureRefused)
        assert run.error.details["table"] == "public.a"
        assert not queue.records
        assert one(dsn, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'cap'") == 0


def test_a_snapshot_from_before_the_slot_is_rejected(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = copied(dsn, SnapshotFirst, monkeypatch)
    assert queue.changes()[0].source.slot == SLOT
    assert set(table_rows(dsn, "a")) - set(replayed(queue)) == {("a", 2)}


@contextmanager
def streaming_behind(dsn: str, queue: Queue, statement: str) -> Iterator[Run]:
    """A capture that started while this was open in another transaction, waited for that to be committed, and streams."""
    with psycopg.connect(dsn) as altering:
        altering.execute(statement.encode())
        with running(dsn, Sender(queue)) as run:
            wait_for(lambda: one(dsn, WAITING), run)
            altering.commit()
            wait_for(lambda: streaming(queue), run)
            yield run


def test_a_replica_identity_that_changes_while_a_capture_starts_is_seen_as_it_was(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By half of each, a table with a primary key has no key."""
    sql(dsn, "CREATE TABLE b (id int PRIMARY KEY, t text)")
    make = ReplicationConnection.create_slot

    def make_and_alter(self: ReplicationConnection, slot: str) -> tuple[int, str]:
        made = make(self, slot)
        sql(dsn, "ALTER TABLE a REPLICA IDENTITY FULL")
        return made

    monkeypatch.setattr(ReplicationConnection, "create_slot", make_and_alter)
    queue = Queue()
    with streaming_behind(dsn, queue, "ALTER TABLE b REPLICA IDENTITY FULL") as run:
        sql(dsn, "UPDATE a SET t = 'y', id = 2", "INSERT INTO b VALUES (10, 'z')")
        wait_for(lambda: last_commit_of(queue, 10), run)
    assert replayed(queue) == table_rows(dsn, "a") | table_rows(dsn, "b")


@pytest.mark.parametrize("mending", ["ADD PRIMARY KEY (id)", "REPLICA IDENTITY FULL"])
def test_what_just_gives_a_table_a_key_is_waited_for_by_a_capture_that_starts(dsn: str, mending: str) -> None:
    sql(dsn, "CREATE TABLE b (id int, t text)")
    queue = Queue()
    with streaming_behind(dsn, queue, f"ALTER TABLE b {mending}") as run:
        sql(dsn, "INSERT INTO b VALUES (10, 'z')")
        wait_for(lambda: last_commit_of(queue, 10), run)
    assert replayed(queue) == table_rows(dsn, "a") | table_rows(dsn, "b")


def test_a_table_without_a_key_that_is_just_being_dropped_keeps_no_capture_from_starting(dsn: str) -> None:
    sql(dsn, "CREATE TABLE b (id int, t text)")
    queue = Queue()
    with streaming_behind(dsn, queue, "DROP TABLE b"):
        pass
    assert replayed(queue) == table_rows(dsn, "a")


def test_a_start_that_meets_a_deadlock_with_who_alters_tables_is_tried_again(new_database, monkeypatch) -> None:
    """PostgreSQL ends the look at the tables for it, or the migration: the capture ended, and said that its connection had been."""
    dsn, queue, reasons = new_database(), Queue(), list[str]()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)")
    check, met = catalog.check_server, [psycopg.errors.DeadlockDetected("deadlock detected")] * 2

    def meeting(connection: Connection) -> None:
        if met:
            raise met.pop()
        check(connection)

    monkeypatch.setattr(catalog, "check_server", meeting)
    with running(dsn, Sender(queue), on_waiting=reasons.append) as run:
        wait_for(lambda: streaming(queue), run)
    assert reasons == ["deadlock detected"]
