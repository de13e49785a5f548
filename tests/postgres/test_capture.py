"""The capture against a real PostgreSQL: what reaches the queue is the log, whole, once, wherever it is interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from seriatim.producer.sources.postgres.capture import PostgresCapture, SnapshotProgress
from seriatim.producer.sources.postgres.core.identity import parse_lsn
from seriatim.producer.sources.postgres.core.resume import Kept
from seriatim.producer.sources.postgres.errors import CaptureGap, CaptureRefused, KeylessTable
from seriatim.producer.sources.postgres.replication import ReplicationConnection
from seriatim.producer.sources.postgres.sender import Deposed, OrderedSender
from seriatim.protocol.change import Change, decode, encode
from tests.changes import key_of

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]
SLOT = "cap"


class Queue:
    """A queue in memory: refuses a seq that doesn't rise, as the real one does."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self.records: list[tuple[str, int, bytes | None, bytes]] = []

    def changes(self) -> list[Change]:
        changes = [decode(value) for *_, value in self.records]
        return [change for change in changes if change.op != "heartbeat"]

    def rows(self) -> list[Change]:
        return [change for change in self.changes() if change.op in "cudtr"]


class Sender:
    """Sends into a queue; after `limit` records it is deposed."""

    def __init__(self, queue: Queue, limit: int | None = None) -> None:
        self.queue = queue
        self.limit = limit
        self.is_over = False
        self.sent = 0

    def wait_until_elected(self, timeout_s: float) -> bool:
        if self.is_over:
            time.sleep(0.02)
        return not self.is_over

    def is_elected(self) -> bool:
        return not self.is_over

    def stand_again(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def kept(self) -> Kept:
        return Kept(dict(self.queue.marks), dict(self.queue.marks))

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        if self.limit is not None and self.sent >= self.limit:
            self.is_over = True
        if self.is_over:
            raise Deposed
        assert seq > self.queue.marks.get(source, 0)
        self.queue.marks[source] = seq
        self.queue.records.append((source, seq, key, value))
        self.sent += 1

    def acknowledged(self, source: str) -> int:
        return self.queue.marks.get(source, 0)


class Run:
    """A capture on a thread of its own."""

    def __init__(
        self,
        dsn: str,
        sender: OrderedSender,
        tables: tuple[str, ...] = (),
        heartbeat_s: float = 3.0,
        kind: type[PostgresCapture] = PostgresCapture,
        slot: str = SLOT,
        on_waiting: Callable[[str], None] | None = None,
        on_progress: Callable[[SnapshotProgress], None] | None = None,
    ) -> None:
        self.error: Exception | None = None
        self.capture = kind(
            dsn, slot, "pub", tables, sender, heartbeat_s=heartbeat_s, retry_s=0.05,
            on_progress=on_progress, on_waiting=on_waiting,
        )  # fmt: skip
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.capture.run()
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self.capture.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def running(dsn: str, sender: OrderedSender, **more: object) -> Iterator[Run]:
    run = Run(dsn, sender, **more)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.end()


def wait_for(condition: Callable[[], object], run: Run | None = None, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if run is not None and run.error is not None:
            raise run.error
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def sql(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def one(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
        return row and row[0]


def replayed(queue: Queue) -> dict[tuple[str, object], dict[str, object]]:
    """Tables with a key column `id`, as the queue's records make them."""
    state: dict[tuple[str, object], dict[str, object]] = {}
    for change in queue.changes():
        table = change.source.table
        if change.op == "snapshot_begin":
            state.clear()
        elif change.op in ("c", "r"):
            assert (table, change.after["id"]) not in state
            state[table, change.after["id"]] = dict(change.after)
        elif change.op == "u":
            old = (change.before or change.after)["id"]
            row = state.pop((table, old))
            state[table, change.after["id"]] = {**row, **change.after}
        elif change.op == "d":
            del state[table, change.before["id"]]
        elif change.op == "t":
            names = {each.name for each in change.source.tables}
            state = {key: row for key, row in state.items() if key[0] not in names}
    return state


def table_rows(dsn: str, table: str) -> dict[tuple[str, object], dict[str, object]]:
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as connection:
        return {(table, row["id"]): row for row in connection.execute(f"SELECT * FROM {table}".encode())}


def is_free(dsn: str, slot: str = SLOT) -> bool:
    """Whether nobody streams from the slot: a walsender ends a moment after its client."""
    return one(dsn, f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'") is False


def streaming(queue: Queue) -> bool:
    return any(value.startswith(b'{"op":"snapshot_end"') for *_, value in queue.records)


def last_commit_of(queue: Queue, marker: int) -> bool:
    """Whether the queue holds the row that was inserted with this id, and ends with a commit."""
    values = [value for *_, value in queue.records if not value.startswith(b'{"op":"heartbeat"')]
    inserted = (value for value in values if value.startswith(b'{"op":"c"') and b'"id":%d' % marker in value)
    return (
        bool(values)
        and values[-1].startswith(b'{"op":"commit"')
        and any(decode(value).after.get("id") == marker for value in inserted)
    )


def test_snapshot_and_stream_join_while_writes_run(new_database):
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE a (id bigint PRIMARY KEY, n int)",
        "INSERT INTO a SELECT g, 0 FROM generate_series(1, 3000) g",
    )
    ended = threading.Event()

    def write() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            place = 0
            while not ended.is_set():
                place += 1
                connection.execute("UPDATE a SET n = n + 1 WHERE id = %s", (place % 3000 + 1,))
                connection.execute("INSERT INTO a VALUES (%s, 1)", (10_000 + place,))
                connection.execute("DELETE FROM a WHERE id = %s AND id %% 3 = 0", (10_000 + place,))

    writer = threading.Thread(target=write)
    writer.start()
    queue = Queue()
    try:
        with running(dsn, Sender(queue)) as run:
            wait_for(lambda: streaming(queue), run)
            copied = len(queue.records)
            wait_for(lambda: len(queue.records) > copied + 200, run)
            ended.set()
            writer.join()
            sql(dsn, "INSERT INTO a VALUES (-1, 0)")
            wait_for(lambda: last_commit_of(queue, -1), run)
    finally:
        ended.set()
        writer.join()
    assert replayed(queue) == table_rows(dsn, "a")


def test_taken_over_at_any_record_nothing_is_lost_or_repeated(new_database):
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY, t text)", "INSERT INTO a VALUES (1, 'x'), (2, 'y')")
    queue = Queue()
    done = 0
    for limit in range(4):  # inside the snapshot: begin, two rows, end
        sender = Sender(queue, limit)
        with running(dsn, sender) as run:
            wait_for(lambda sender=sender: sender.is_over, run)
    assert len(queue.marks) == 3
    with running(dsn, Sender(queue, 4)) as run:
        wait_for(lambda: streaming(queue), run)
    for limit in range(1, 12):
        sender = Sender(queue, limit)
        with running(dsn, sender) as run:
            done += 1
            sql(
                dsn,
                f"BEGIN; INSERT INTO a VALUES ({100 + done}, 'n'); DELETE FROM a WHERE id = {100 + done - 1};"
                f"INSERT INTO a VALUES ({1000 + done}, 'n'); UPDATE a SET t = 'v' WHERE id = 2; COMMIT",
            )
            wait_for(lambda sender=sender, last=1000 + done: sender.is_over or last_commit_of(queue, last), run)
    with running(dsn, Sender(queue)) as run:
        sql(dsn, "INSERT INTO a VALUES (5000, 'end')")
        wait_for(lambda: last_commit_of(queue, 5000), run)
    assert replayed(queue) == table_rows(dsn, "a")
    stream = [change for change in queue.changes() if change.source.tx_id is not None]
    numbers: dict[int, list[int]] = {}
    for change in stream:
        numbers.setdefault(change.source.commit_lsn, []).append(change.source.number)
        if change.op == "commit":
            assert numbers[change.source.commit_lsn] == list(range(1, change.source.changes + 3))
    assert all(key == key_of(decode(value)) for _, _, key, value in queue.records)
    assert all(encode(decode(value)) == value for *_, value in queue.records)


def test_images_keys_and_types_are_lossless(new_database):
    dsn = new_database()
    sql(
        dsn,
        'CREATE TABLE k (id int, "o d%d" text, b bool, n numeric, j json, at timestamptz, PRIMARY KEY (id, "o d%d"))',
        "CREATE TABLE f (id int, n float8, big text)",
        "ALTER TABLE f REPLICA IDENTITY FULL",
        "ALTER TABLE f ALTER big SET STORAGE EXTERNAL",
        "CREATE TABLE toasted (id int PRIMARY KEY, n int, big text)",
        "ALTER TABLE toasted ALTER big SET STORAGE EXTERNAL",
        r"""INSERT INTO k VALUES (1, E'a"\\\t\n%ä', true, 1.50, '{"x": "é\\"}', '2024-02-03 04:05:06.789+02')""",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(
            dsn,
            r"""INSERT INTO k VALUES (2, E'a"\\\t\n%ä', true, 1.50, '{"x": "é\\"}', '2024-02-03 04:05:06.789+02')""",
            "UPDATE k SET id = 3, b = NULL WHERE id = 2",
            "DELETE FROM k WHERE id = 3",
            "INSERT INTO f VALUES (1, 0.1, repeat('x', 9000))",
            "UPDATE f SET n = 0.2",
            "INSERT INTO toasted VALUES (1, 1, repeat('y', 9000))",
            "UPDATE toasted SET n = 2",
            "ALTER TABLE toasted RENAME n TO m",
            "ALTER TABLE toasted ADD more int",
            "UPDATE toasted SET m = 3, more = 4",
            "TRUNCATE f, toasted RESTART IDENTITY CASCADE",
        )
        wait_for(lambda: queue.changes()[-2].op == "t", run)
    rows = queue.rows()
    snapshot, insert, update, delete = rows[:4]
    assert dict(snapshot.after) == {**insert.after, "id": 1}
    assert dict(insert.after) == {
        "id": 2, "o d%d": 'a"\\\t\n%ä', "b": True, "n": "1.50", "j": '{"x": "é\\\\"}', "at": "2024-02-03 02:05:06.789+00",
    }  # fmt: skip
    assert update.before == {"id": 2, "o d%d": insert.after["o d%d"]}
    assert (update.after["id"], update.after["b"]) == (3, None)
    assert delete.before == {"id": 3, "o d%d": insert.after["o d%d"]}
    assert delete.source.key == ("id", "o d%d")
    assert [row.source.text_key for row in (snapshot, insert, update, delete)] == [("o d%d",)] * 4
    full = rows[5]
    assert full.before == {"id": 1, "n": "0.1", "big": "x" * 9000}
    assert full.after == {"id": 1, "n": "0.2", "big": "x" * 9000}
    assert full.source.key == ()
    assert full.source.unchanged == ()
    assert (rows[7].after, rows[7].source.unchanged) == ({"id": 1, "n": 2}, ("big",))
    assert rows[8].after == {"id": 1, "m": 3, "more": 4}
    truncate = rows[9].source
    assert {table.name for table in truncate.tables} == {"f", "toasted"}
    assert truncate.restart_identity
    assert truncate.cascade


def test_columns_that_an_index_only_includes_are_no_key(new_database):
    """The log tells the columns it searches by; a snapshot that told more would be of a table with another key."""
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE a (id int, name text, PRIMARY KEY (id) INCLUDE (name))",
        "CREATE TABLE b (id int NOT NULL, name text NOT NULL, part int NOT NULL)",
        "CREATE UNIQUE INDEX chosen ON b (part, id) INCLUDE (name)",
        "ALTER TABLE b REPLICA IDENTITY USING INDEX chosen",
        "INSERT INTO a VALUES (1, 'x')",
        "INSERT INTO b VALUES (1, 'x', 7)",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "UPDATE a SET name = 'y'", "UPDATE b SET name = 'y'", "DELETE FROM a", "DELETE FROM b")
        wait_for(lambda: [change.op for change in queue.rows()] == ["r", "r", "u", "u", "d", "d"], run)
    keys = {"a": {("id",)}, "b": {("id", "part")}}
    for table, expected in keys.items():
        assert {change.source.key for change in queue.rows() if change.source.table == table} == expected
    described = {table.name: {table.key} for table in queue.changes()[0].source.tables}
    assert described == keys


def test_slot_dropped_under_its_feet_is_a_gap(new_database):
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)")
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: one(dsn, "SELECT active FROM pg_replication_slots WHERE slot_name = 'cap'"), run)
        wait_for(lambda: streaming(queue), run)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots")
            wait_for(lambda: _drop(connection))
        wait_for(lambda: run.error is not None)
        assert isinstance(run.error, CaptureGap)


def _drop(connection: psycopg.Connection) -> bool:
    try:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE slot_name = 'cap' AND active"
        )
        connection.execute("SELECT pg_drop_replication_slot('cap')")
    except psycopg.errors.ObjectInUse:
        return False
    return True


def captured(dsn: str) -> Queue:
    """The queue of a database with one empty table, which was captured for a moment."""
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)")
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
    return queue


def test_slot_made_again_is_a_gap(new_database):
    dsn = new_database()
    queue = captured(dsn)
    wait_for(lambda: is_free(dsn))
    sql(
        dsn,
        "SELECT pg_drop_replication_slot('cap')",
        "INSERT INTO a VALUES (1)",
        "SELECT pg_create_logical_replication_slot('cap', 'pgoutput')",
    )
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, CaptureGap)


@pytest.mark.parametrize("change", ["SELECT pg_replication_slot_advance('cap', pg_current_wal_lsn())", "made again"])
def test_slot_that_is_moved_just_before_it_is_streamed_from_is_a_gap(new_database, monkeypatch, change):
    """As by a capture for another queue that was given the same slot: it drops one that its queue knows nothing of."""
    dsn = new_database()
    queue = captured(dsn)
    wait_for(lambda: is_free(dsn))
    sql(dsn, "INSERT INTO a VALUES (1)")
    make = "SELECT pg_create_logical_replication_slot('cap', 'pgoutput')"
    moving = ["SELECT pg_drop_replication_slot('cap')", make] if change == "made again" else [change]
    start = ReplicationConnection.start

    def move_and_start(self, *named):
        sql(dsn, *moving)
        moving.clear()
        start(self, *named)

    monkeypatch.setattr(ReplicationConnection, "start", move_and_start)
    with running(dsn, Sender(queue)) as run:
        sql(dsn, "INSERT INTO a VALUES (2)")
        wait_for(lambda: run.error is not None or last_commit_of(queue, 2))
    assert isinstance(run.error, CaptureGap)
    assert not queue.rows()


def test_slot_behind_which_another_one_began_a_snapshot_is_a_gap(new_database):
    """A capture that stood by, or was forgotten, while a new snapshot was taken with another slot."""
    dsn = new_database()
    queue = captured(dsn)
    sql(dsn, "INSERT INTO a VALUES (1)")
    with running(dsn, Sender(queue, limit=2), slot="new") as run:
        wait_for(lambda: queue.changes()[-1].op == "r", run)
    wait_for(lambda: is_free(dsn))
    with running(dsn, Sender(queue)) as run:
        sql(dsn, "INSERT INTO a VALUES (2)")
        wait_for(lambda: run.error is not None or last_commit_of(queue, 2))
    assert isinstance(run.error, CaptureGap)
    assert "slot new" in str(run.error)


def test_table_without_a_key_is_refused_with_what_mends_it(new_database):
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int)")
    with running(dsn, Sender(Queue())) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, KeylessTable)
    sql(dsn, str(run.error.details["statement"]))
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "CREATE TABLE later (id int)", "INSERT INTO later VALUES (1)")
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, KeylessTable)
    assert run.error.details["table"] == "later"
    sql(dsn, str(run.error.details["statement"]))
    with running(dsn, Sender(queue)) as run:
        sql(dsn, "UPDATE later SET id = 2")
        wait_for(lambda: queue.changes()[-2].op == "u", run)
    assert [change.op for change in queue.rows()] == ["c", "u"]


def test_unknown_table_is_refused(new_database):
    with running(new_database(), Sender(Queue()), tables=("nowhere",)) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, CaptureRefused)


def test_heartbeats_let_the_log_go(new_database):
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)")
    queue = Queue()
    confirmed = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 'cap'"
    with running(dsn, Sender(queue), tables=("a",), heartbeat_s=0.2) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "CREATE TABLE other AS SELECT generate_series(1, 10000)")
        wanted = parse_lsn(str(one(dsn, "SELECT pg_current_wal_flush_lsn()::text")))
        wait_for(lambda: parse_lsn(str(one(dsn, confirmed))) >= wanted - 64, run)
    assert decode(queue.records[-1][3]).op == "heartbeat"


def test_large_transaction_and_confirmation_only_after_it(new_database):
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)")
    queue = Queue()
    with running(dsn, Sender(queue, 20_000)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "INSERT INTO a SELECT generate_series(1, 50000)")
        wait_for(lambda: len(queue.records) >= 20_000, run)
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: any(value.startswith(b'{"op":"commit"') for *_, value in queue.records), run)
    assert [change.after["id"] for change in queue.rows()] == list(range(1, 50_001))
    assert queue.changes()[-1].source.changes == 50_000
