"""What a capture tells of what it waits for in its database."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import psycopg
import pytest

from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.producer.sources.postgres import attendant, catalog, replication
from seriatim.producer.sources.postgres import capture as module
from seriatim.producer.sources.postgres.capture import PostgresCapture
from seriatim.producer.sources.postgres.core.resume import Kept
from seriatim.producer.sources.postgres.errors import CaptureRefused, SourceLost, SourceSilent
from seriatim.producer.sources.postgres.replication import Data, Keepalive, ReplicationConnection
from seriatim.protocol.errors import RecordTooLarge
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
from tests.postgres.test_capture_start import WAITING

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]


class Told:
    """A capture on a thread of its own, and what it has told."""

    def __init__(self, dsn: str, kind: type[Sender] = Sender) -> None:
        self.queue = Queue()
        self.sender = kind(self.queue)
        self.reasons: list[str] = []
        self.capture = PostgresCapture(dsn, SLOT, "pub", (), self.sender, retry_s=0.05, on_waiting=self.reasons.append)
        self.thread = Thread(target=self.capture.run)


@contextmanager
def told(dsn: str, kind: type[Sender] = Sender) -> Iterator[Told]:
    capture = Told(dsn, kind)
    capture.thread.start()
    try:
        yield capture
    finally:
        capture.capture.stop()
        capture.thread.join(60)
        assert not capture.thread.is_alive()


@pytest.fixture
def dsn(new_database: Callable[[], str]) -> str:
    made = new_database()
    sql(made, "CREATE TABLE a (id int PRIMARY KEY, n int)", "CREATE PUBLICATION pub FOR ALL TABLES")
    return made


@pytest.fixture
def role(dsn: str) -> Iterator[str]:
    sql(dsn, "CREATE ROLE waiter LOGIN", "GRANT SELECT ON a TO waiter")
    yield "waiter"
    sql(dsn, "DROP OWNED BY waiter", "DROP ROLE waiter")


def test_what_the_database_refuses_is_told_once_and_in_a_line(
    dsn: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    end_all = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'waiter'"
    with told(dsn.replace("postgres@", f"{role}@")) as capture:
        wait_for(lambda: capture.reasons)
        assert "permission denied to start WAL sender" in capture.reasons[0]
        sql(dsn, f"ALTER ROLE {role} REPLICATION")
        wait_for(lambda: streaming(capture.queue))
        assert len(capture.reasons) == 1
        sql(dsn, f"ALTER ROLE {role} NOREPLICATION", end_all)
        wait_for(lambda: "permission denied to start WAL sender" in capture.reasons[-1] and len(capture.reasons) > 1)
        sql(dsn, f"ALTER ROLE {role} REPLICATION", "INSERT INTO a VALUES (1, 1)")
        wait_for(lambda: last_commit_of(capture.queue, 1))
    assert not [reason for reason in capture.reasons if "\n" in reason or "\t" in reason]
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]


@pytest.mark.parametrize("held", ["INSERT INTO a VALUES (1, 1)", "LOCK TABLE a IN ACCESS EXCLUSIVE MODE"])
def test_who_holds_up_the_start_is_told_and_a_stop_doesn_t_wait_for_them(dsn: str, held: str) -> None:
    """The slot waits for a transaction that has written, the snapshot for a lock."""
    with psycopg.connect(dsn, application_name="migration") as holding:
        holding.execute(held.encode())
        with told(dsn) as capture:
            wait_for(lambda: capture.reasons)
        pid = holding.info.backend_pid
        assert f"process {pid} (postgres, migration, idle in transaction, since " in capture.reasons[0]
        assert len(capture.reasons) == 1
    with told(dsn) as capture:
        wait_for(lambda: streaming(capture.queue))
    assert replayed(capture.queue) == table_rows(dsn, "a")


class Aside(Sender):
    stood_again = 0

    def stand_again(self) -> None:
        self.stood_again += 1


def test_who_doesn_t_reach_the_database_for_long_lets_another_go_first(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be this machine's own path that is cut."""
    now_s = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns))
    connect, is_cut = catalog.connect, Event()
    stood_again: list[int] = []

    def connect_or_fail(dsn: str) -> object:
        nonlocal now_s
        if not is_cut.is_set():
            return connect(dsn)
        now_s += 10
        stood_again.append(capture.sender.stood_again)
        raise SourceLost("no route to host")

    monkeypatch.setattr(catalog, "connect", connect_or_fail)
    with told(dsn, Aside) as capture:
        wait_for(lambda: streaming(capture.queue))
        now_s += 1000
        is_cut.set()
        sql(dsn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")
        wait_for(lambda: len(stood_again) > 8)
        assert stood_again[:9] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
        is_cut.clear()
        sql(dsn, "INSERT INTO a VALUES (7, 7)")
        wait_for(lambda: last_commit_of(capture.queue, 7))


def slots_of(dsn: str) -> list[str]:
    """Names of this database's slots."""
    found = one(dsn, "SELECT array_agg(slot_name::text) FROM pg_replication_slots WHERE database = current_database()")
    return list(found or [])  # type: ignore[call-overload]


def test_who_is_deposed_doesn_t_hold_the_slots_name_up(dsn: str) -> None:
    with psycopg.connect(dsn) as holding:
        holding.execute("INSERT INTO a VALUES (1, 1)")
        with told(dsn) as capture:
            wait_for(lambda: slots_of(dsn))
            capture.sender.is_over = True
            wait_for(lambda: not slots_of(dsn))
    assert not capture.reasons


class Gate(Sender):
    """Takes the row with id 77 when it may."""

    is_open = Event()

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        if key == b'["public.a",77]':
            assert self.is_open.wait(60)
        super().send(value, key, seq, source)


def test_a_table_whose_key_is_just_being_made_is_waited_for_and_a_stop_isn_t(dsn: str) -> None:
    with psycopg.connect(dsn) as mending:
        with told(dsn, Gate) as capture:
            wait_for(lambda: streaming(capture.queue))
            sql(dsn, "INSERT INTO a VALUES (77, 1)", "CREATE TABLE later (id int)", "INSERT INTO later VALUES (1)")
            mending.execute("ALTER TABLE later ADD PRIMARY KEY (id)")
            Gate.is_open.set()
            wait_for(lambda: capture.reasons)
        assert f"process {mending.info.backend_pid} " in capture.reasons[0]


def test_a_table_without_a_key_that_is_just_being_dropped_is_waited_for_and_no_reason_to_end(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A work table, as a batch job makes one: by the time that it can be looked at there is none."""
    monkeypatch.setattr(Gate, "is_open", Event())
    queue = Queue()
    with psycopg.connect(dsn) as dropping, running(dsn, Gate(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "INSERT INTO a VALUES (77, 1)", "CREATE TABLE work (id int)", "INSERT INTO work VALUES (1)")
        dropping.execute("DROP TABLE work")
        Gate.is_open.set()
        wait_for(lambda: one(dsn, WAITING), run)
        dropping.commit()
        sql(dsn, "INSERT INTO a VALUES (78, 1)")
        wait_for(lambda: last_commit_of(queue, 78), run)
    assert [change.after["id"] for change in queue.rows()] == [77, 1, 78]


@contextmanager
def hanging(*pids: int) -> Iterator[None]:
    """These server processes hang, and their machine goes on answering for them."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def pids_of(dsn: str, what: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        return [pid for (pid,) in connection.execute(f"SELECT {what}".encode())]


def test_a_source_that_hangs_while_it_streams_is_told_and_another_connection_gone_on_with(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "_ASK_AFTER_S", 0.2)
    monkeypatch.setattr(module, "SILENCE_S", 0.4)
    with told(dsn) as capture:
        wait_for(lambda: streaming(capture.queue))
        # A machine that stands still is silent, too: the next one may be connected just now.
        hung: list[int] = []
        wait_for(lambda: hung.extend(pids_of(dsn, "active_pid FROM pg_replication_slots WHERE active")) or hung)
        with hanging(*hung):
            wait_for(lambda: any("another process streams" in reason for reason in capture.reasons))
        assert "sends nothing, and hasn't answered for 0.4 s" in capture.reasons[0]
        sql(dsn, "INSERT INTO a VALUES (1, 1)")
        wait_for(lambda: last_commit_of(capture.queue, 1))


def test_a_source_that_is_idle_answers_and_is_not_taken_for_one_that_hangs(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "_ASK_AFTER_S", 0.05)
    monkeypatch.setattr(module, "SILENCE_S", 30.0)
    put, asked = ReplicationConnection._put_status, []

    def put_status(self: ReplicationConnection, *, asks: bool = False) -> None:
        asked.append(asks)
        put(self, asks=asks)

    monkeypatch.setattr(ReplicationConnection, "_put_status", put_status)
    with told(dsn) as capture:
        wait_for(lambda: asked.count(True) > 20)
    assert not capture.reasons


def test_a_source_that_was_silent_gets_twice_the_time_until_something_new_has_come(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be busy with what it begins anew on each connection."""
    given_s: list[float] = []
    is_silent = Event()
    receive = ReplicationConnection.receive

    def receive_or_not(self: ReplicationConnection, timeout_s: float, silence_s: float) -> list[Data | Keepalive]:
        if not is_silent.is_set():
            return receive(self, timeout_s, silence_s)
        given_s.append(silence_s)
        raise SourceSilent("sends nothing")

    monkeypatch.setattr(ReplicationConnection, "receive", receive_or_not)
    is_silent.set()
    with told(dsn) as capture:
        wait_for(lambda: len(given_s) > 2)
        is_silent.clear()
        sql(dsn, "INSERT INTO a VALUES (1, 1)")
        wait_for(lambda: last_commit_of(capture.queue, 1))
        before = len(given_s)
        is_silent.set()
        wait_for(lambda: len(given_s) > before)
    assert given_s[:3] == [60, 120, 240]
    assert given_s[before] == 60


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_stop_doesn_t_wait_for_a_source_that_hangs(
    dsn: str, postgres_server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Where one process of it does, as with a disk that doesn't answer, the server takes a cancellation, and that brings nothing."""
    holder, is_looking = catalog.holder, Event()

    def look(*given: object) -> object:
        is_looking.set()
        return holder(*given)

    monkeypatch.setattr(attendant, "_CANCEL_S", 1.0)
    monkeypatch.setattr(catalog, "holder", look)
    server = postgres_server.supervisor.pid("postgres")
    assert server is not None
    capture = Told(dsn)
    with psycopg.connect(dsn) as holding:
        holding.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
        capture.thread.start()
        wait_for(lambda: capture.reasons)
        pids = pids_of(dsn, "pid FROM pg_stat_activity WHERE application_name = 'seriatim-capture'")
        with hanging(*pids, *([server] if is_whole else [])):
            is_looking.clear()
            wait_for(is_looking.is_set)
            capture.capture.stop()
            capture.thread.join(40)
            is_ended = not capture.thread.is_alive()
    capture.thread.join(60)
    assert is_ended


def test_a_stop_doesn_t_wait_for_a_source_that_hangs_as_it_is_to_stream(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendant, "_CANCEL_S", 1.0)
    with told(dsn) as capture:
        wait_for(lambda: streaming(capture.queue))
    wait_for(lambda: is_free(dsn))
    start, hung = ReplicationConnection.start, []

    def hang(self: ReplicationConnection, *given: object) -> None:
        hung.append(self.session.info.backend_pid)
        os.kill(hung[0], signal.SIGSTOP)
        start(self, *given)

    monkeypatch.setattr(ReplicationConnection, "start", hang)
    again = Told(dsn)
    again.queue.marks |= capture.queue.marks
    again.thread.start()
    wait_for(lambda: hung)
    again.capture.stop()
    again.thread.join(40)
    is_ended = not again.thread.is_alive()
    os.kill(hung[0], signal.SIGCONT)
    again.thread.join(60)
    assert is_ended


class Small(Sender):
    """Of a queue that takes small records only, until somebody raises that."""

    limit_bytes = 1000
    attempts = 0

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        if len(value) > self.limit_bytes:
            self.attempts += 1
            raise RecordTooLarge("too large", limit_bytes=self.limit_bytes)
        super().send(value, key, seq, source)


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_a_row_over_the_queues_limit_waits_for_a_higher_one(dsn: str, is_snapshot: bool) -> None:
    """A capture that ended with it would begin the snapshot anew at each start."""
    row = "INSERT INTO \"wide one\" VALUES ({}, repeat('x', 2000))"
    sql(dsn, 'CREATE TABLE "wide one" (id int PRIMARY KEY, t text)', "INSERT INTO a VALUES (1, 1)")
    if is_snapshot:
        sql(dsn, row.format(1))
    with told(dsn, Small) as capture:
        assert isinstance(capture.sender, Small)
        if not is_snapshot:
            wait_for(lambda: streaming(capture.queue))
            sql(dsn, row.format(1))
        wait_for(lambda: capture.sender.attempts > 3)
        advice = "`seriatim queue alter NAME --max-record-bytes N`, then `seriatim queue rotate NAME`"
        assert capture.reasons == [f"table public.wide one: too large; raise it with {advice}"]
        assert len(capture.queue.marks) == 1
        capture.sender.limit_bytes = 3000
        wait_for(lambda: any("wide one" in key[0] and key[1] == 1 for key in replayed(capture.queue)))
        wait_for(lambda: streaming(capture.queue))
        capture.sender.limit_bytes = 1000
        sql(dsn, row.format(2))
        wait_for(lambda: len(capture.reasons) == 2)  # the same is news again, and the stop doesn't wait for it
    assert len(capture.queue.marks) == 1


def test_who_is_deposed_doesn_t_wait_for_a_higher_limit(dsn: str) -> None:
    sql(dsn, "ALTER TABLE a ADD t text", "INSERT INTO a VALUES (1, 1, repeat('x', 2000))")
    with told(dsn, Small) as capture:
        wait_for(lambda: capture.reasons)
        capture.sender.is_over = True
        wait_for(lambda: is_free(dsn))


def test_a_list_of_tables_over_the_queues_limit_is_told_as_what_it_is(dsn: str) -> None:
    sql(dsn, *(f"CREATE TABLE {'t' * 50}{place} (id int PRIMARY KEY)" for place in range(20)))
    with told(dsn, Small) as capture:
        wait_for(lambda: capture.reasons)
    assert capture.reasons[0].startswith("the list of the 21 tables of a snapshot: too large; raise it")


def test_a_record_that_no_queue_takes_is_told_so(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sql(dsn, "ALTER TABLE a ADD t text", "INSERT INTO a VALUES (1, 1, repeat('x', 2000))")
    monkeypatch.setattr(module, "MAX_RECORD_BYTES", 1000)
    with told(dsn, Small) as capture:
        wait_for(lambda: capture.reasons)
    assert "no queue has a higher one" in capture.reasons[0]


class Looking(Sender):
    """Counts the looks at where its queue stands."""

    looks = 0

    def kept(self) -> Kept:
        self.looks += 1
        return super().kept()


@pytest.mark.parametrize("is_away", [True, False])
def test_the_slot_of_another_clusters_queue_of_the_same_name_is_left_alone_wherever_its_capture_is(
    dsn: str, is_away: bool
) -> None:
    production = Queue()
    run = Run(dsn, Sender(production))
    try:
        wait_for(lambda: streaming(production), run)
        if is_away:
            run.end()
            wait_for(lambda: is_free(dsn))
        with told(dsn, Looking) as staging:
            wait_for(lambda: staging.reasons)
            assert (
                "slot cap is of no snapshot that this queue has: another queue's capture made it" in staging.reasons[0]
            )
            run.end()
            wait_for(lambda: is_free(dsn))
            looks = staging.sender.looks
            wait_for(lambda: staging.sender.looks > looks + 3)
            sql(dsn, "INSERT INTO a VALUES (1, 1)")
            with running(dsn, Sender(production)) as again:
                wait_for(lambda: last_commit_of(production, 1), again)
            # It is told what to run, and goes on once that is done.
            wait_for(lambda: is_free(dsn))
            sql(dsn, "SELECT pg_drop_replication_slot('cap')")
            wait_for(lambda: streaming(staging.queue))
    finally:
        run.end()
    assert len(staging.reasons) == 1
    assert len(production.marks) == 1


def test_a_capture_whose_queue_never_got_its_snapshots_beginning_leaves_no_slot(dsn: str) -> None:
    first = Sender(Queue(), 0)
    with running(dsn, first) as run:
        wait_for(lambda: first.is_over, run)
        wait_for(lambda: not slots_of(dsn), run)


class Unanswered(Sender):
    """Its queue may have what was sent; nobody says so."""

    is_answered = Event()

    def acknowledged(self, source: str) -> int:
        return super().acknowledged(source) if self.is_answered.is_set() else 0


def test_a_slot_is_made_once_the_queue_is_known_to_have_its_snapshots_beginning(dsn: str) -> None:
    with told(dsn, Unanswered) as capture:
        wait_for(lambda: capture.queue.records)
        (temporary,) = slots_of(dsn)
        assert temporary.startswith("seriatim_snapshot_")
        sql(dsn, "INSERT INTO a VALUES (1, 1)")
        assert [change.op for change in capture.queue.changes()] == ["snapshot_begin"]
        Unanswered.is_answered.set()
        wait_for(lambda: last_commit_of(capture.queue, 1))
        assert slots_of(dsn) == [SLOT]
    assert replayed(capture.queue) == table_rows(dsn, "a")


@pytest.mark.parametrize("is_made", [True, False])
def test_of_two_captures_that_would_make_one_slot_one_waits_before_its_queue_has_anything(
    dsn: str, is_made: bool
) -> None:
    make = "SELECT pg_create_logical_replication_slot('cap', 'pgoutput')"
    with closing(catalog.connect(dsn)) as connection, ExitStack() as stack:
        stack.enter_context(catalog.making_slot(connection, SLOT))
        with told(dsn) as capture:
            wait_for(lambda: capture.reasons)
            assert capture.reasons == ["another capture takes a snapshot for slot cap"]
            if is_made:
                connection.execute(make.encode())
            stack.close()
            if is_made:
                wait_for(lambda: len(capture.reasons) == 2)
                assert "another queue's capture made it" in capture.reasons[1]
                assert not capture.queue.records
            else:
                wait_for(lambda: streaming(capture.queue))


def test_a_server_without_room_for_a_snapshots_slots_is_refused_before_the_queue_has_anything(tmp_path: Path) -> None:
    """A replay that met the beginning would empty its tables, for a snapshot that never comes."""
    settings = {"fsync": "off", "max_replication_slots": "1"}
    with EmbeddedPostgres(tmp_path, settings=settings) as server:
        sql(server.dsn(), "CREATE TABLE a (id int PRIMARY KEY)")
        queue = Queue()
        with running(server.dsn(), Sender(queue)) as run:
            wait_for(lambda: run.error is not None)
        assert isinstance(run.error, CaptureRefused)
        assert "needs 2 replication slots" in str(run.error)
        assert not queue.records
        assert not slots_of(server.dsn())
