"""A snapshot beside changes of the tables themselves, and under settings that end long work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.producer.sources.postgres import capture as module
from seriatim.producer.sources.postgres.capture import SnapshotProgress
from seriatim.producer.sources.postgres.errors import CaptureRefused
from seriatim.producer.sources.postgres.replication import ReplicationConnection
from tests.postgres.test_capture import (
    Queue,
    Sender,
    last_commit_of,
    replayed,
    running,
    sql,
    streaming,
    table_rows,
    wait_for,
)

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]


@pytest.fixture
def dsn(new_database: Callable[[], str]) -> str:
    made = new_database()
    for table in "ab":
        sql(made, f"CREATE TABLE {table} (id int PRIMARY KEY, n int)", f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
    return made


def captured(dsn: str, sender: Sender, inserting: str = "") -> Queue:
    """What is in the queue once a row that was inserted after the snapshot is. `inserting`: the DSN for that, where it's another one."""
    with running(dsn, sender) as run:
        wait_for(lambda: any(change.op == "snapshot_end" for change in sender.queue.changes()), run)
        sql(inserting or dsn, "INSERT INTO a VALUES (7, 7)")
        wait_for(lambda: last_commit_of(sender.queue, 7), run)
    return sender.queue


def after_the_first_slot(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> list[int]:
    """Where slots are made, in the end."""
    make = ReplicationConnection.create_slot
    points: list[int] = []

    def make_and_do(self: ReplicationConnection, slot: str) -> tuple[int, str]:
        made = make(self, slot)
        points.append(made[0])
        if len(points) == 1:
            do()
        return made

    monkeypatch.setattr(ReplicationConnection, "create_slot", make_and_do)
    return points


@pytest.mark.parametrize(
    "change", ["ALTER TABLE b ALTER n TYPE bigint", "ALTER TABLE b DROP n", "ALTER TABLE b RENAME TO c", "DROP TABLE b"]
)
def test_a_table_that_changes_just_before_it_is_read_is_copied_as_it_is(
    dsn: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """To a snapshot from before it, a table that was written anew is empty."""
    after_the_first_slot(monkeypatch, lambda: sql(dsn, change))
    queue = captured(dsn, Sender(Queue()))
    tables = "a" if change.startswith("DROP") else "ac" if "RENAME" in change else "ab"
    assert replayed(queue) == {key: row for table in tables for key, row in table_rows(dsn, table).items()}


def test_a_table_that_the_server_cannot_read_from_its_disk_ends_the_snapshot(dsn: str) -> None:
    """It began again, once a second, and filled the queue with the rows of all tables before that one."""
    sql(dsn, "ALTER TABLE b ADD t text; ALTER TABLE b ALTER t SET STORAGE EXTERNAL")
    sql(dsn, "INSERT INTO b VALUES (3, 3, repeat('x', 10000))")  # stored out of line, in a file of its own
    is_its = "oid = (SELECT reltoastrelid FROM pg_class WHERE relname = 'b')"
    sql(dsn, f"UPDATE pg_class SET relfilenode = 4000000000 WHERE {is_its}")
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: run.error is not None or len(queue.marks) > 1)
    assert isinstance(run.error, CaptureRefused)
    assert "table public.b can't be read: could not open file" in str(run.error)
    assert [change.op for change in queue.changes()] == ["snapshot_begin", *4 * ["r"]]


def test_a_snapshot_that_goes_with_its_connection_before_it_is_taken_begins_again(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE backend_type = 'walsender'"
    points = after_the_first_slot(monkeypatch, lambda: sql(dsn, f"{end} AND datname = current_database()"))
    queue = captured(dsn, Sender(Queue()))
    assert len(points) == 2
    assert replayed(queue) == table_rows(dsn, "a") | table_rows(dsn, "b")


class Altering(Sender):
    """Somebody writes the second table anew when the first one's rows are on their way."""

    def __init__(self, dsn: str) -> None:
        super().__init__(Queue())
        self.dsn = dsn
        self.is_altered = False

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        super().send(value, key, seq, source)
        if value.startswith(b'{"op":"r"') and not self.is_altered:
            self.is_altered = True
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute("SET lock_timeout = 300")
                with suppress(psycopg.errors.LockNotAvailable):
                    connection.execute("ALTER TABLE b ALTER n TYPE bigint")


def test_no_table_is_written_anew_before_its_turn(dsn: str) -> None:
    queue = captured(dsn, Altering(dsn))
    assert replayed(queue) == table_rows(dsn, "a") | table_rows(dsn, "b")


def test_partitions_that_are_read_through_their_table_count(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sql(
        dsn,
        "CREATE TABLE c (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE c1 PARTITION OF c DEFAULT",
        "INSERT INTO c VALUES (1, 1)",
        "CREATE PUBLICATION pub FOR TABLE a, c WITH (publish_via_partition_root)",
    )
    after_the_first_slot(monkeypatch, lambda: sql(dsn, "ALTER TABLE c ALTER n TYPE bigint"))
    assert replayed(captured(dsn, Sender(Queue()))) == table_rows(dsn, "a") | table_rows(dsn, "c")


def test_a_role_that_may_read_what_is_published_and_no_more_can_capture(dsn: str) -> None:
    sql(
        dsn,
        "CREATE PUBLICATION pub FOR TABLE a (id)",
        "CREATE ROLE narrow LOGIN REPLICATION",
        "GRANT SELECT (id) ON a TO narrow",
    )
    try:
        queue = Queue()
        with running(dsn.replace("postgres@", "narrow@"), Sender(queue)) as run:
            wait_for(lambda: any(change.op == "snapshot_end" for change in queue.changes()), run)
        assert [change.after for change in queue.rows()] == [{"id": 1}, {"id": 2}]
    finally:
        sql(dsn, "DROP OWNED BY narrow", "DROP ROLE narrow")


class Blocked(Sender):
    """The queue takes nothing for a second behind the snapshot's first record."""

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        super().send(value, key, seq, source)
        if self.sent == 1:
            time.sleep(1)


@pytest.mark.parametrize(
    "setting",
    [
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "transaction_timeout",
    ],
)
def test_time_outs_of_a_database_end_no_snapshot(dsn: str, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """A statement waits for a lock for a second, and a transaction for the queue, where either may take 300 ms."""
    sql(dsn, f"ALTER DATABASE {dsn.rpartition('/')[2]} SET {setting} = 300")
    patient = f"{dsn}?options=-c%20{setting}%3D0"  # else a machine that stands still ends the test's own

    def lock_for_a_second() -> None:
        holding = psycopg.connect(patient)
        holding.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
        threading.Timer(1, holding.close).start()

    slots = after_the_first_slot(monkeypatch, lock_for_a_second)
    queue = captured(dsn, Blocked(Queue()), patient)
    assert replayed(queue) == table_rows(patient, "a") | table_rows(patient, "b")
    assert len(slots) == 1


class Interrupted(Sender):
    """Behind the first row of the snapshot these statements are run in the database."""

    def __init__(self, dsn: str, *statements: str) -> None:
        super().__init__(Queue())
        self.dsn = dsn
        self.statements = statements

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        super().send(value, key, seq, source)
        if self.sent == 2:
            sql(self.dsn, *self.statements)


def test_a_slot_is_in_use_while_its_snapshot_is_read(tmp_path: Path) -> None:
    """Else every snapshot that takes longer than an idle slot is kept ends as a gap."""
    settings = {"fsync": "off", "idle_replication_slot_timeout": "1s"}
    with EmbeddedPostgres(tmp_path, settings=settings) as server:
        sql(server.dsn(), "CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a VALUES (1, 1), (2, 2)")
        # The queue takes nothing for longer than a slot may be idle, and a checkpoint looks for idle slots.
        stalled = Interrupted(server.dsn(), "SELECT pg_sleep(2)", "INSERT INTO a VALUES (3, 3)", "CHECKPOINT")
        queue = captured(server.dsn(), stalled)
        assert replayed(queue) == table_rows(server.dsn(), "a")


def test_a_snapshot_outlives_the_stream_behind_it(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = after_the_first_slot(monkeypatch, lambda: None)
    ended = "SELECT pg_terminate_backend(active_pid, 60000) FROM pg_replication_slots"
    queue = captured(dsn, Interrupted(dsn, ended, "INSERT INTO a VALUES (3, 3)"))
    assert replayed(queue) == table_rows(dsn, "a") | table_rows(dsn, "b")
    assert len(slots) == 1


@pytest.mark.parametrize(
    ("published", "altered"),
    [
        ("a, b", "ADD TABLE c"),
        ("a, b", "ADD TABLES IN SCHEMA public"),
        ("a, b, c WHERE (id < 2)", "SET TABLE a, b, c"),
    ],
)
def test_a_table_that_joins_between_the_slot_and_the_look_at_the_publication_is_copied_as_of_a_slot_that_knows_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch, published: str, altered: str
) -> None:
    """It was copied as of before, and what was changed in it since is in no log that this slot gives."""
    sql(dsn, "CREATE TABLE c (id int PRIMARY KEY, n int)", "INSERT INTO c VALUES (1, 1), (2, 2)")
    sql(dsn, f"CREATE PUBLICATION pub FOR TABLE {published}")
    changes = "INSERT INTO c VALUES (3, 3)", "UPDATE c SET n = 99 WHERE id = 2"
    points = after_the_first_slot(monkeypatch, lambda: sql(dsn, *changes, f"ALTER PUBLICATION pub {altered}"))
    queue = captured(dsn, Sender(Queue()))
    assert len(points) == 2
    assert {key: row for key, row in replayed(queue).items() if key[0] == "c"} == table_rows(dsn, "c")


def test_rows_of_another_table_are_not_copied_under_a_name_that_it_has_now(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql(dsn, "CREATE TABLE c (id int PRIMARY KEY, n int)", "INSERT INTO c VALUES (1, 1000)")
    sql(dsn, "CREATE PUBLICATION pub FOR TABLE a, b")
    swap = "ALTER TABLE b RENAME TO b_old", "ALTER TABLE c RENAME TO b"
    after_the_first_slot(monkeypatch, lambda: sql(dsn, *swap))
    queue = captured(dsn, Sender(Queue()))
    assert 1000 not in [row["n"] for row in replayed(queue).values()]


class Meanwhile(Sender):
    """Has something done behind the first row of a snapshot."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__(Queue())
        self._do: Callable[[], None] | None = do

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        super().send(value, key, seq, source)
        if self._do is not None and value.startswith(b'{"op":"r"'):
            do, self._do = self._do, None
            do()


@pytest.mark.parametrize("was_there", [True, False])
def test_a_table_that_is_attached_while_others_are_read_is_not_copied_as_it_was(dsn: str, was_there: bool) -> None:
    """What was changed in it since the slot is in no log; of one that was made since all is. The whole is as of one moment."""
    made = "CREATE TABLE p (id int PRIMARY KEY, n int)", "INSERT INTO p VALUES (1, 1), (2, 2)"
    attach = "ALTER TABLE z ATTACH PARTITION p FOR VALUES FROM (0) TO (100)"
    sql(
        dsn,
        "CREATE TABLE z (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE z1 PARTITION OF z FOR VALUES FROM (100) TO (200)",
        "INSERT INTO z VALUES (100, 100)",
        "CREATE PUBLICATION pub FOR TABLE a, z WITH (publish_via_partition_root)",
        *(made if was_there else ()),
    )
    changes = "INSERT INTO p VALUES (3, 3)", "UPDATE p SET n = 99 WHERE id = 2"

    def grow() -> None:
        if was_there:
            sql(dsn, *changes, attach)
        else:
            sql(dsn, made[0], attach, *made[1:], *changes)

    queue = captured(dsn, Meanwhile(grow))
    assert [change.op for change in queue.changes()].count("snapshot_begin") == (2 if was_there else 1)
    assert {key: row for key, row in replayed(queue).items() if key[0] == "z"} == table_rows(dsn, "z")


def test_a_snapshot_tells_once_a_second_and_at_each_tables_end(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred million rows it told a hundred thousand times."""
    sql(dsn, "INSERT INTO a SELECT g FROM generate_series(3, 5000) g")
    now_s = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns))

    class Slow(Sender):
        def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
            nonlocal now_s
            now_s += 0.0004
            super().send(value, key, seq, source)

    told: list[SnapshotProgress] = []
    queue = Queue()
    with running(dsn, Slow(queue), on_progress=told.append) as run:
        wait_for(lambda: streaming(queue), run)
    assert [(one.table, one.rows) for one in told] == [("a", 3000), ("a", 5000), ("b", 2)]
