"""What surrounds a replay's queries, without Spark: where a new target begins, folders, and what follows on a failure."""

from __future__ import annotations

import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_queue import QUEUE_ID, FakeQueue, Link

from seriatim.cli.replay import as_text
from seriatim.consumer.range_reader import RangeReader
from seriatim.consumer.spark import engine
from seriatim.consumer.spark import query as query_module
from seriatim.consumer.spark.application import Application, Outcome
from seriatim.consumer.spark.apply.plan import ChangeRow, Snapshot
from seriatim.consumer.spark.batch_size import FIRST_S, BatchSize
from seriatim.consumer.spark.beginning import NoSnapshot, RecordsGone, begins_snapshot, first_offset
from seriatim.consumer.spark.checkpoints import query_folder
from seriatim.consumer.spark.cursor import CursorKeeper
from seriatim.consumer.spark.engine import check_java, driver_memory, python_sockets
from seriatim.consumer.spark.failures import QueryFailed, SparkGone, last_line
from seriatim.consumer.spark.options import read_options
from seriatim.consumer.spark.progress import Applying, Event, Progress, Started, Waiting
from seriatim.consumer.spark.query import ReplayQuery, _Abandoned
from seriatim.consumer.spark.replay import Replay
from seriatim.consumer.spark.run import ReplaySettings, Run
from seriatim.consumer.spark.targets.errors import PositionMoved, TargetLost
from seriatim.consumer.spark.targets.postgres import Position
from seriatim.consumer.spark.term import ReplayTerm
from seriatim.consumer.spark.work import Work
from seriatim.consumer.subscriber import Term
from seriatim.protocol.change import Change, Origin, encode
from seriatim.protocol.clock import boottime_s, now_ms
from seriatim.protocol.errors import DeadlineOver, Fenced, InvalidArgument, NotElected, Unreachable, WorldError
from seriatim.protocol.flag import Flag

ROW = encode(
    Change("c", None, {"id": 1, "note": "snapshot_begin"}, Origin("db", "slot", 1, 2, 1, "public", "stock", ("id",)), 1)
)
TRANSACTION_BEGIN = encode(Change("begin", None, None, Origin("db", "slot", 1, 1), 1))
BEGIN = encode(Change("snapshot_begin", None, None, Origin("db", "slot", 1, 1, is_snapshot=True), 1))


@pytest.fixture
def queue():
    with FakeQueue("stock") as queue:
        yield queue


@pytest.fixture
def no_query(monkeypatch):
    """Queries that fail as they are started; what would have applied their micro-batches."""
    queries: list = []

    def started(self, offset, checkpoint):
        queries.append(self)
        raise QueryFailed(f"a query would start at {offset}")

    monkeypatch.setattr(ReplayQuery, "_started", started)
    return queries


@pytest.fixture
def reader(queue):
    with RangeReader(queue.address, "stock") as reader:
        yield reader


def without_its_first_link(queue: FakeQueue, *values: bytes) -> None:
    """Ten records, which retention drops, and then these, the last half of them in a link of its own."""
    queue.append_values([ROW] * 10, 0)
    queue.switch()
    half = len(values) // 2
    queue.append_values(values[:half], 10, per_batch=2)
    queue.switch()
    queue.append_values(values[half:], 10 + half, per_batch=2)
    queue.dropped_links = 1


def begins_at(reader, *, is_over=lambda: False) -> tuple[int, list[str]]:
    told: list[str] = []
    return first_offset(reader, told.append, is_over), told


def test_a_queue_that_has_its_first_record_is_taken_from_there(queue, reader):
    queue.append_values([ROW] * 10, 0)
    assert begins_at(reader) == (0, [])


@pytest.mark.parametrize("place", range(6))
def test_one_that_has_lost_it_is_taken_from_its_first_snapshot(queue, reader, place):
    values = [ROW, ROW, b'{"op":"snapshot_begin"', ROW, ROW, ROW, BEGIN]
    values[place] = BEGIN
    without_its_first_link(queue, *values)
    offset, told = begins_at(reader)
    assert offset == 10 + place
    assert "the first record that queue 'stock' keeps is 10: looking for a snapshot" in told[0]
    assert begins_at(reader)[0] == offset  # the reader is free again


def test_without_a_snapshot_a_new_target_would_be_part_of_a_copy(queue, reader):
    without_its_first_link(queue, ROW, ROW)
    with pytest.raises(NoSnapshot, match=r"the first one kept is 10, and up to its end, 12, none.*another --slot"):
        begins_at(reader)
    with pytest.raises(NotElected):
        begins_at(reader, is_over=lambda: True)


def without_any_link(queue: FakeQueue) -> None:
    """Ten records, the first of which began a snapshot; retention dropped them."""
    queue.append_values([BEGIN, *[ROW] * 9], 0)
    queue.switch()
    queue.links.pop()
    queue.dropped_links = 1


@pytest.mark.parametrize("base", [10, 2**40])
def test_where_the_first_link_was_given_up_whole_a_new_target_begins_at_a_snapshot_behind_it(queue, reader, base):
    """The link stays in the chain for a while: the queue's first offset is 0 as before, and nothing of the snapshot is there."""
    queue.links = [Link(1, 0, end=0), Link(2, base)]
    with pytest.raises(NoSnapshot, match=f"up to {base} are gone"):
        begins_at(reader)
    queue.append_values([ROW, ROW], 30)
    with pytest.raises(NoSnapshot, match=f"the first one kept is {base}, and up to its end, {base + 2}"):
        begins_at(reader)
    queue.append_values([BEGIN, ROW], 32)
    assert begins_at(reader)[0] == base + 2


def test_where_nobody_tells_whether_the_first_link_has_records_it_may_be_given_up_yet(queue, reader):
    assert begins_at(reader) == (0, [])
    queue.tells_committed = False
    with pytest.raises(Unreachable):
        begins_at(reader)
    queue.append_values([BEGIN, ROW], 0)
    queue.switch()
    assert begins_at(reader) == (0, [])


def test_where_all_is_dropped_a_new_target_has_no_beginning_and_stays_at_none(queue, reader, tmp_path):
    without_any_link(queue)
    target = Claims()
    events: list[Event] = []
    with replay_term(target, reader, tmp_path, events) as term, pytest.raises(NoSnapshot, match=r"up to 10 are gone"):
        term._stream()
    assert (target.stored, events) == (Position(0, TERM.fence), [])


@pytest.mark.parametrize(("offset", "error"), [(9, RecordsGone), (10, None)])
def test_where_all_is_dropped_a_target_goes_on_at_the_end_and_nowhere_before(
    no_query, queue, reader, tmp_path, offset, error
):
    without_any_link(queue)
    events: list[Event] = []
    target = Claims(Position(offset, 4))
    with replay_term(target, reader, tmp_path, events) as term, pytest.raises(error or QueryFailed):
        term._stream()
    assert [one.offset for one in events if isinstance(one, Started)] == ([] if error else [10])


def test_where_records_are_gone_the_way_to_a_new_snapshot_is_told_and_leads_there(no_query, queue, reader, tmp_path):
    without_its_first_link(queue, ROW, BEGIN, ROW)
    target = Claims(Position(3, 4))
    with replay_term(target, reader, tmp_path, []) as term:
        with pytest.raises(RecordsGone, match=r"queue_id = 7 AND job = 'replay' .*another --slot.*delete that row"):
            term._stream()
        target.stored = None
        with pytest.raises(QueryFailed, match="start at 11"):
            term._stream()


def test_only_the_operation_begins_a_snapshot():
    assert begins_snapshot(BEGIN)
    assert not begins_snapshot(ROW)
    assert not begins_snapshot(b"snapshot_begin")


def test_of_spark_s_traces_the_line_is_told_that_says_what_happened():
    trace = """An error occurred while calling o92.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.util.SparkErrorUtils.tryWithSafeFinally$(SparkErrorUtils.scala:83)
Caused by: org.apache.spark.SparkException: Job aborted: results are bigger than spark.driver.maxResultSize
\tat org.apache.spark.util.SparkErrorUtils.tryWithSafeFinally$(SparkErrorUtils.scala:83)
\t... 1 more"""
    assert last_line(trace) == (
        "org.apache.spark.SparkException: Job aborted: results are bigger than spark.driver.maxResultSize"
    )
    python = """Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "x.py", line 1, in read
seriatim.protocol.errors.Fenced: a newer reader

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)"""
    assert last_line(python) == "seriatim.protocol.errors.Fenced: a newer reader"
    ended = """Job 3 cancelled because SparkContext was shut down
=== Streaming Query ===
Identifier: [id = 3b, runId = 9c]
Current State: ACTIVE
Thread State: RUNNABLE

Logical Plan:
+- ~StreamingDataSourceV2ScanRelation[queue#28, offset#29L] seriatim"""
    assert last_line(ended) == "Job 3 cancelled because SparkContext was shut down"
    assert last_line("java.io.EOFException\nwhile a task was read") == "java.io.EOFException"
    assert last_line("nothing to see") == "nothing to see"
    assert last_line("") == "no reason given"


def java_is_gone():
    raise ConnectionError("Java is gone")


@pytest.mark.parametrize("is_stopped", [lambda: True, java_is_gone])
@pytest.mark.parametrize("error", [QueryFailed("the query ended"), AttributeError("py4j's")])
def test_spark_that_has_ended_ends_the_replay_at_once_also_where_java_lives(
    queue, reader, tmp_path, monkeypatch, is_stopped, error
):
    """Query after query failed then, each with half as many records, and none said why."""

    def started(self, offset, checkpoint):
        raise error

    monkeypatch.setattr(ReplayQuery, "_started", started)
    events: list[Event] = []
    with replay_term(Claims(Position(0, 4)), reader, tmp_path, events, spark=spark_s(is_stopped)) as term:
        with pytest.raises(SparkGone, match="Spark has ended: "):
            term.run()
        assert [type(event) for event in events] == [Started]
        term._run.stopping.set()
        term._stream()  # the signal may have ended Java as well


def a_java(home: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> Path:
    """The one that is found, which is a shell's script."""
    java = home / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{does}\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))
    return java


def test_ctrl_c_is_not_taken_for_a_java_that_does_not_work(tmp_path, monkeypatch):
    a_java(tmp_path, monkeypatch, '[ "$(ps -o sid= -p $$)" -eq $$ ] && echo \'openjdk version "17"\' >&2')
    check_java()  # it is out of reach of what a terminal sends


def test_a_java_that_does_not_answer_is_told(tmp_path, monkeypatch):
    java = a_java(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(engine, "_ANSWER_S", 0.1)
    with pytest.raises(engine.JavaMissing, match=f"{java} -version didn't answer within 0.1 s"):
        check_java()


def test_too_much_for_the_driver_is_refused_before_its_memory_is_out():
    assert driver_memory({}) == {"spark.driver.memory": "768m", "spark.driver.maxResultSize": "160m"}
    assert driver_memory({"spark.driver.memory": "4g"}) == {}  # the limit is Spark's own then


@pytest.mark.parametrize(("folder", "is_there"), [("/tmp/seriatim-replay-x", True), ("/tmp/" + 60 * "x", False)])
def test_java_and_python_meet_in_the_replay_s_folder_where_they_can(folder, is_there):
    settings = python_sockets(Path(folder))
    assert settings.pop("spark.python.unix.domain.socket.enabled") == "true"
    assert settings == ({} if is_there else {"spark.python.unix.domain.socket.dir": "/tmp"})


@pytest.mark.parametrize("shown", [{"offset": 10}, '{"offset": 10}', {"offset": 9}, '{"offset": 9}', None])
def test_all_is_read_where_the_query_reached_the_end_within_a_transaction(queue, reader, tmp_path, shown):
    queue.append_values([ROW] * 10, 0)

    class Query:
        lastProgress = {"sources": [{"endOffset": shown}]}  # noqa: N815, RUF012

    with replay_query(Claims(), reader, tmp_path, []) as query:
        assert query._is_all_read(Query()) is ("10" in str(shown))


def test_while_nobody_tells_the_end_all_is_not_read_and_the_lag_not_known(queue, reader, tmp_path):
    queue.append_values([ROW] * 10, 0)
    queue.tells_committed = False
    with replay_query(Claims(), reader, tmp_path, [], SimpleNamespace(position=5)) as query:
        assert not query._is_all_read(SimpleNamespace(lastProgress=None))
        assert query._lag_records(5) is None


def test_a_source_at_rest_is_no_lag(queue, reader, tmp_path):
    """What the capture tells of it, every few seconds, came with the age of the last commit: `lag 0 records, 3600.00 s`."""
    events: list[Event] = []
    with replay_query(Claims(), reader, tmp_path, events) as query:
        query._tell(Outcome(8, 3, 1, 1, commit_ts_ms=now_ms() - 1000), 0.1)
        query._tell(Outcome(9, 1, 0, 0, source_lsn=0x1_0000_00AB), 0.1)
    assert [isinstance(event, Progress) and event.lag_s for event in events] == [pytest.approx(1, abs=60), None]
    assert [isinstance(event, Progress) and event.source_lsn for event in events] == [None, "1/AB"]


def test_while_nobody_tells_the_end_a_new_target_waits_for_its_snapshot(queue, reader):
    without_its_first_link(queue, ROW, BEGIN)
    queue.tells_committed = False
    with pytest.raises(Unreachable):
        begins_at(reader)
    queue.tells_committed = True
    assert begins_at(reader)[0] == 11


def test_a_new_target_does_not_wait_for_an_end_that_it_does_not_need(queue, reader):
    without_its_first_link(queue, BEGIN, ROW, ROW, ROW)
    queue.tells_committed = False
    assert begins_at(reader)[0] == 10


def test_a_micro_batch_that_does_not_end_is_undone_when_the_replay_is_to_stop(queue, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(query_module, "_FINISH_S", 0.0)
    events: list[Event] = []
    target = Claims()
    with replay_query(target, reader, tmp_path, events) as query:
        target.cancel = query._is_busy.clear  # as the statement's end lets the micro-batch end
        query._is_busy.set()
        query._run.stopping.set()
        query._stop(SimpleNamespace(stop=lambda: None))
        assert not query._is_busy.is_set()
    assert "undone in the target" in events[0].reason


def test_who_holds_a_micro_batch_up_in_the_target_is_told(queue, reader, tmp_path):
    target, told = Claims(), []
    with replay_query(target, reader, tmp_path, []) as query:
        query._run.report = lambda event: (told.append(event), query._run.stopping.set())
        target.hindrance = lambda: "in the target process 7 has to end first"
        query._is_busy.set()
        query._slow_at_s = 1.0  # it has been at it for longer than that
        query._follow(SimpleNamespace(isActive=True))
    assert told == [Waiting("in the target process 7 has to end first")]


def test_who_holds_a_micro_batch_up_is_told_and_left_also_where_its_replay_was_deposed(queue, reader, tmp_path):
    """The connection to a server of before a failover is left by that look: elected again, this one stood still for ever."""
    target, events = Claims(), list[Event]()
    with replay_query(target, reader, tmp_path, events) as query, ThreadPoolExecutor(1) as beside:
        target.hindrance = lambda: (query._is_busy.clear(), "the target's address leads to another server by now")[1]
        query._is_busy.set()
        query._slow_at_s = 1.0
        query._run.depose()
        try:
            beside.submit(query._stop, SimpleNamespace(stop=lambda: None)).result(20)
        finally:
            query._is_busy.clear()
    assert events == [Waiting("the target's address leads to another server by now")]


def test_spark_that_does_not_hand_out_what_a_micro_batch_has_is_told(queue, reader, tmp_path, monkeypatch):
    """As where a task's Python process stands still. What the target is at has nothing to do with it."""
    go_on, told = threading.Event(), []

    def collected(_records):
        assert go_on.wait(60)
        return [ChangeRow(5, ROW)]

    monkeypatch.setattr(query_module, "_collected", collected)
    monkeypatch.setattr(query_module, "SLOW_S", 0.0)
    target = Claims(Position(5, 5))
    target.hindrance = lambda: pytest.fail("the target isn't asked")
    application = SimpleNamespace(position=5, apply=lambda _rows: Outcome(5, 0))
    with (
        replay_query(target, reader, tmp_path, [], application) as query,
        ThreadPoolExecutor(1) as spark_thread,
    ):
        query._run.report = lambda event: (told.append(event), query._run.stopping.set())
        applying = spark_thread.submit(query._apply_batch, None, 0)
        try:
            while query._reading_since_s is None:
                time.sleep(0.001)
            query._follow(ended())
        finally:
            query._run.stopping = Flag()
            go_on.set()
        assert [as_text(one).split(" for ")[0] for one in told] == ["waiting: Spark has been reading records"]
        applying.result(60)
        assert query._reading_since_s is None


def test_spark_that_begins_no_micro_batch_for_what_the_queue_has_is_told(queue, reader, tmp_path, monkeypatch):
    """As where the Python process that plans them stands still. What came since the last look may still be on its way."""
    monkeypatch.setattr(query_module, "_collected", lambda _records: [ChangeRow(5, ROW)])
    events: list[Event] = []
    target = Claims(Position(5, 5))
    target.position_beside = lambda _queue_id: target.stored

    def looks(of_spark) -> list[str]:
        events.clear()
        for _ in range(2):
            query._slow_at_s = 0.0
            query._run.stopping = Flag()
            query._run.stopping.wait = lambda _s: query._run.stopping.set()
            query._follow(of_spark)
        query._run.stopping = Flag()
        return [as_text(event).split(" for ")[0] for event in events]

    application = SimpleNamespace(position=5, apply=lambda _rows: Outcome(5, 0))
    with replay_query(target, reader, tmp_path, events, application) as query:
        queue.append_values([ROW] * 5, 0)
        assert looks(ended()) == []  # all is in the target
        queue.append_values([ROW] * 5, 5)
        assert looks(ended()) == ["waiting: Spark has begun no micro-batch"]
        assert looks(ended()) == ["waiting: Spark has begun no micro-batch"] * 2
        for batch_id in range(2):  # one of many that are to bring all this
            query._apply_batch(None, batch_id)
            assert looks(ended()) == ["waiting: Spark has begun no micro-batch"]
        unfinished = ended(10)
        unfinished.lastProgress  # noqa: B018 - the second one has it
        assert looks(unfinished) == []  # of a transaction
        queue.tells_committed = False
        assert looks(unfinished) == []


@pytest.mark.parametrize("stored", [Position(35, 5), None])
def test_a_target_that_was_set_back_is_noticed_while_nothing_comes(queue, reader, tmp_path, stored):
    """As by a fail-over to a stand-by that lagged; until another record came, which might be never, it lacked what it had had."""
    target = Claims(Position(70, 5))
    answers = [Position(70, 5), Position(75, 5), TargetLost("it fails over"), stored]

    def tell(queue_id):
        application.position = 75  # a micro-batch that is committed during the look
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    target.position_beside = tell
    application = SimpleNamespace(position=70)
    with replay_query(target, reader, tmp_path, [], application) as query:
        query._run.stopping.wait = lambda _s: setattr(query, "_look_at_s", 0.0)
        with pytest.raises(PositionMoved, match=rf"offset {stored.offset if stored else 0}, and had all up to 75"):
            query._follow(SimpleNamespace(isActive=True))
    assert answers == []
    with replay_term(target, reader, tmp_path, []) as term:
        term._judge(PositionMoved("it was set back"))
    assert target.is_closed  # and asked anew: the server of before may answer still


@pytest.mark.parametrize("wanted", [0, 8])
@pytest.mark.parametrize("unanswered", [0, 1])
def test_where_the_target_stands_before_the_cursor_the_subscription_goes_back_there_first(
    queue, reader, tmp_path, monkeypatch, wanted, unanswered
):
    """What lay between counted as read by all: retention let it go while it was applied again."""
    queue.append_values([ROW] * 10, 0)
    events: list[Event] = []
    monkeypatch.setattr(ReplayQuery, "_started", lambda *_: pytest.fail("a query starts before"))
    with replay_term(Claims(Position(5, 4)), reader, tmp_path, events, term=Term(3, 1, 5, 5 if wanted else 8)) as term:
        subscriber = term._work.subscriber
        subscriber.unanswered = unanswered
        if wanted:
            term._work.cursor.want(wanted)
        for _ in range(unanswered):
            with pytest.raises(Unreachable):
                term._stream()
        term._stream()
        assert subscriber.steps == [("asked for", 8), ("sought", 5)] if wanted else [("sought", 5)]
        assert events == []
        term._work.cursor.want(6)
        term._work.cursor.finish()
        assert subscriber.steps[-2:] == [("asked for", 6), ("committed", 6)]


def test_idle_is_a_replay_whose_target_still_has_what_was_applied(queue, reader, tmp_path, monkeypatch):
    """It ended well, and told of an offset that the target had no more."""
    queue.append_values([ROW] * 10, 0)
    events: list[Event] = []
    target = Claims(Position(10, 4))

    def started(self, offset, checkpoint):
        target.stored, left[0] = Position(left[0], 4), 10
        self.application.position = 10
        return SimpleNamespace(isActive=True, stop=lambda: None)

    left = [5]
    monkeypatch.setattr(ReplayQuery, "_started", started)
    with replay_term(target, reader, tmp_path, events, until_idle_s=0.0) as term:
        term.run()
        assert term._run.stopping.is_set()
    assert [one.offset for one in events if isinstance(one, Started)] == [10, 5]
    assert "the target stands at offset 5, and had all up to 10: it was set back" in events[1].reason


def test_a_query_knows_of_the_snapshot_that_was_under_way_where_it_begins(no_query, queue, reader, tmp_path):
    """What was lost of it while another one failed, as with the disks of the member it read from, was passed over."""
    queue.append_values([ROW] * 10, 0)
    target = Claims(Position(10, 4, Snapshot(1, 7)))
    with replay_term(target, reader, tmp_path, []) as term, pytest.raises(QueryFailed):
        term._stream()
    assert no_query[0].application.snapshot == Snapshot(1, 7)


def test_a_target_that_does_not_answer_a_claim_is_told_and_keeps_no_replay_from_stopping(
    queue, reader, tmp_path, monkeypatch
):
    monkeypatch.setattr(query_module, "SLOW_S", 0.1)
    target, given_up, told = Claims(), threading.Event(), []

    def hang(*_, **__):
        assert given_up.wait(60)
        raise TargetLost("given up")

    target.claim = hang
    target.hindrance = lambda: "the target doesn't answer"
    target.cancel = given_up.set
    with replay_term(target, reader, tmp_path, []) as term:
        term._run.report = lambda event: (told.append(event.reason), term._run.stopping.set())
        term.run()
    assert told == ["the target doesn't answer", "given up"]


class Claims:
    """A target that keeps its position."""

    def __init__(self, stored: Position | None = None) -> None:
        self.stored = stored
        self.created_at_ms = 0
        self.is_closed = False

    def close(self):
        self.is_closed = True

    def position(self, queue_id):
        assert queue_id == QUEUE_ID
        return self.stored

    def claim(self, queue_id, queue, token, *, created_at_ms=0):
        self.created_at_ms = created_at_ms
        if self.stored is not None and self.stored.token > token:
            raise Fenced(f"{token} is older than {self.stored.token}")
        self.stored = Position(0, token) if self.stored is None else replace(self.stored, token=token)
        return self.stored


class Elected:
    queue_id = QUEUE_ID
    queue_created_at_ms = 1234

    def __init__(self):
        self.steps: list[tuple[str, int]] = []
        self.unanswered = 0

    def ask_commit(self, offset, *, term):
        self.steps.append(("asked for", offset))

    def commit(self, offset, *, term, timeout_s):
        self.steps.append(("committed", offset))

    def seek(self, offset, *, timeout_s):
        if self.unanswered:
            self.unanswered -= 1
            raise Unreachable("no coordinator answers")
        self.steps.append(("sought", offset))


TERM = Term(3, 1, 5, 0)


def spark_s(is_stopped) -> SimpleNamespace:
    """A session of a Java that lives, as far as it is asked whether Spark does."""
    java = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=is_stopped))
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java, master="local[1]"))


@contextmanager
def replay_term(
    target,
    reader,
    tmp_path: Path,
    events: list[Event],
    max_records: int = 20_000,
    term: Term = TERM,
    until_idle_s: float | None = None,
    spark: object = None,
):
    settings = ReplaySettings("nowhere", "stock", "dsn", max_records=max_records, until_idle_s=until_idle_s)
    run = Run(settings, events.append)
    run.grant(term)
    subscriber = Elected()
    cursor, size = CursorKeeper(subscriber, term), BatchSize(max_records)
    work = Work(run, spark or spark_s(lambda: False), target, reader, subscriber, term, cursor, size)
    yield ReplayTerm(work, tmp_path)


@contextmanager
def replay_query(target, reader, tmp_path: Path, events: list[Event], application=None, **options):
    """One of a term's, at the target's beginning. `application`: which stands in for its own."""
    with replay_term(target, reader, tmp_path, events, **options) as term:
        yield query_of(term, application)


def query_of(term: ReplayTerm, application=None) -> ReplayQuery:
    query = ReplayQuery(term._work, Position(0, TERM.fence))
    if application is not None:
        query.application = application
    return query


def test_a_target_that_has_nothing_begins_at_the_snapshot_and_later_where_it_stands(no_query, queue, reader, tmp_path):
    without_its_first_link(queue, ROW, ROW, ROW, BEGIN, ROW)
    target = Claims()
    events: list[Event] = []
    for _ in range(2):
        with replay_term(target, reader, tmp_path, events) as term, pytest.raises(QueryFailed, match="start at 13"):
            term._stream()
        assert target.stored == Position(0, TERM.fence)
    target.stored = Position(14, 5)
    with replay_term(target, reader, tmp_path, events) as term, pytest.raises(QueryFailed, match="start at 14"):
        term._stream()
    assert target.created_at_ms == 1234
    assert [type(event) for event in events] == [Waiting, Started, Waiting, Started, Started]


def test_a_snapshot_that_is_given_up_before_the_target_had_any_of_it_is_not_passed_over(
    no_query, queue, reader, tmp_path, monkeypatch
):
    """The target had been put there when it was claimed, and took what came behind for what follows."""
    monkeypatch.setattr(query_module, "_collected", lambda records: records)
    without_its_first_link(queue, BEGIN, ROW)
    target = Claims()
    with replay_term(target, reader, tmp_path, []) as term:
        with pytest.raises(QueryFailed, match="start at 10"):
            term._stream()
        queue.links[1:] = [Link(2, 10, end=0), Link(3, 2**40)]
        queue.append_values([ROW, ROW], 30)
        for rows in ([], [ChangeRow(2**40, ROW)]):
            with pytest.raises(
                WorldError, match="were given up before the target had any: it was to begin at offset 10"
            ):
                no_query[-1]._apply_batch(rows, 0)
        with pytest.raises(NoSnapshot):
            term._stream()
    assert target.stored.offset == 0


def test_the_first_record_is_missed_whatever_a_coordinator_tells_of_it(queue, reader, tmp_path, monkeypatch):
    """One that lagged still knew of no gap, and the target took what came behind it."""
    monkeypatch.setattr(query_module, "_collected", lambda records: records)
    application = SimpleNamespace(position=0, apply=lambda rows: Outcome(0, len(rows)))
    with replay_query(Claims(), reader, tmp_path, [], application) as query:
        with pytest.raises(WorldError, match="it was to begin at offset 0"):
            query._apply_batch([ChangeRow(2**40, ROW)], 0)
        for batch_id, offset in enumerate((0, 1)):  # a transaction that goes on
            query._apply_batch([ChangeRow(offset, ROW)], batch_id)


def test_a_subscription_that_was_made_again_is_newer_than_the_one_before_whose_tokens_were_higher(
    queue, reader, tmp_path
):
    target = Claims()
    before, again = Term(3, 1, 12, 0), Term(4, 1, 1, 0)
    for term in (before, again):
        with replay_term(target, reader, tmp_path, [], term=term) as elected:
            assert elected._claimed().offset == 0
    with replay_term(target, reader, tmp_path, [], term=before) as stopped, pytest.raises(Fenced):
        stopped._claimed()


def test_a_replay_that_is_to_stop_reads_no_more_of_a_large_transaction(queue, reader, tmp_path, monkeypatch):
    events: list[Event] = []
    with replay_query(Claims(), reader, tmp_path, events, spark=SimpleNamespace(read=None)) as query:
        monkeypatch.setattr(query, "_source", lambda _: pytest.fail("it reads"))
        query._batch_end = 100
        with pytest.raises(pytest.fail.Exception):
            query._read_range(10, 20)
        assert events == [Applying("stock", 10, 100)]
        assert as_text(events[0]).startswith("a large transaction: 10 of 100 carried out")
        with pytest.raises(pytest.fail.Exception):
            query._read_range(20, 30)
        assert len(events) == 1  # a word now and then
        query._run.stopping.set()
        with pytest.raises(_Abandoned):
            query._read_range(30, 40)


def test_tasks_are_told_what_may_come_to_the_driver_at_once(queue, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(query_module, "result_limit_bytes", lambda _spark: 5)
    given: dict[str, object] = {}
    source = SimpleNamespace(
        format=lambda _name: source, option=lambda name, value: given.update({name: value}) or source
    )
    with replay_query(Claims(), reader, tmp_path, []) as query:
        assert query._source(source) is source
    assert read_options(given, is_stream=True).max_task_bytes == 5


def test_folders_of_older_runs_go_and_those_of_other_replays_stay(tmp_path):
    def names() -> set[str]:
        return {folder.name for folder in tmp_path.iterdir()}

    with (
        query_folder(tmp_path, 1, 1234, "replay", 3),
        query_folder(tmp_path, 12, 1234, "replay", 2),
        query_folder(tmp_path, 1, 1234, "replay-9", 2),
        query_folder(tmp_path, 1, 1234, "a/b", 2),
    ):
        others = names()
        assert len(others) == 4
        with query_folder(tmp_path, 2, 1234, "replay", 9), query_folder(tmp_path, 1, 1234, "other", 9):
            assert others < names()
        with query_folder(tmp_path, 1, 1235, "replay", 9):  # ids count from 1 in each cluster
            assert others < names()
        with query_folder(tmp_path, 1, 1234, "replay", 4) as newer:
            assert len(others & names()) == 3
            with query_folder(tmp_path, 1, 1234, "replay", 4):
                assert Path(newer.removeprefix("file://")).is_dir()
    assert names() == set()


def test_checkpoints_are_on_this_machine_wherever_spark_s_cluster_stores_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with query_folder(Path("checkpoints"), 1, 1234, "replay", 3) as made:
        assert made.startswith(f"file://{tmp_path}/checkpoints/run-1-")
    for given in ("hdfs://name:8020/checkpoints", "s3a://bucket", "file:///checkpoints"):
        with pytest.raises(InvalidArgument, match=given):
            Replay(ReplaySettings("nowhere:1", "stock", "dsn", checkpoint=given), [].append).run()
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoints"]


class Failing:
    """In the place of a term's queries: which sizes of a micro-batch pass."""

    def __init__(self, term: ReplayTerm, passing: int, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self._term = term
        self._passing = passing
        self._error = error or QueryFailed("the query failed: larger than spark.driver.maxResultSize")
        term._stream = self._stream

    def _stream(self) -> None:
        term = self._term
        term._work.size.begin()
        if term._work.size.records <= self._passing:
            term._work.size.moved(0.0)
        self.sizes.append(term._work.size.records)
        if len(self.sizes) == 4:
            term._run.stopping.set()
            return
        raise self._error


def test_micro_batches_that_fail_are_halved_until_they_pass(queue, reader, tmp_path, monkeypatch):
    events: list[Event] = []
    with replay_term(Claims(), reader, tmp_path, events) as term:
        failing = Failing(term, passing=5_000)
        term.run()
        assert failing.sizes == [20_000, 10_000, 5_000, 5_000]
    said = [event.reason for event in events if isinstance(event, Waiting)]
    assert said[0].endswith("spark.driver.maxResultSize; the next try is with at most 10,000 records at a time")
    assert said[2].endswith("spark.driver.maxResultSize")


@pytest.mark.parametrize(
    ("max_records", "error", "sizes"),
    [
        (3, None, [3, 1, 1, 1]),
        (9, Unreachable("no coordinator answers"), [9, 9, 9, 9]),  # says nothing about their size
    ],
)
def test_micro_batches_have_a_record_at_least(queue, reader, tmp_path, max_records, error, sizes):
    with replay_term(Claims(), reader, tmp_path, [], max_records) as term:
        failing = Failing(term, 0, error)
        term.run()
        assert failing.sizes == sizes


def test_micro_batches_that_were_halved_grow_again_while_they_pass(queue, reader, tmp_path, monkeypatch):
    """A trouble of Spark's that passes, as a worker that is away, left a replay with a few records at a time until it was elected anew."""
    sizes: list[int] = []

    def started(self, offset, checkpoint):
        sizes.append(self._work.size.records)
        self._applied_id, self.application.position = 0, 10
        for now_s in (0.0, FIRST_S):
            monkeypatch.setattr(query_module, "boottime_s", lambda now_s=now_s: now_s)
            self._came_to(Outcome(10, 1), 5, 0.0)
        monkeypatch.undo()
        monkeypatch.setattr(ReplayQuery, "_started", started)
        if len(sizes) == 3:
            self._run.stopping.set()
        return SimpleNamespace(isActive=True, stop=lambda: None)

    monkeypatch.setattr(ReplayQuery, "_started", started)
    queue.append_values([ROW] * 20, 0)
    events: list[Event] = []
    with replay_term(Claims(Position(10, 4)), reader, tmp_path, events) as term:
        term._work.size.halve()
        term._work.size.halve()
        term.run()
        assert sizes == [5_000, 10_000, 20_000]
    told = [event.reason for event in events if isinstance(event, Waiting)]
    assert told == [f"the next query is with at most {size} records at a time" for size in ("10,000", "20,000")]


class Ending:
    """In the place of a term's queries: one error after the other, and then the end."""

    def __init__(self, term: ReplayTerm, *errors: Exception) -> None:
        self._term = term
        self._left = list(errors)
        term._stream = self._stream
        term._run.stopping = Flag()
        term._run.stopping.wait = lambda _s: None

    def _stream(self) -> None:
        if self._left:
            raise self._left.pop(0)
        self._term._run.stopping.set()


def test_a_query_that_fails_after_a_long_outage_is_not_the_last_of_many(queue, reader, tmp_path):
    with replay_term(Claims(), reader, tmp_path, [], max_records=1) as term:
        Ending(term, *[Unreachable("the target is away")] * 30, *[QueryFailed("a task failed")] * 9)
        term.run()
        Ending(term, QueryFailed("a task failed"))
        with pytest.raises(QueryFailed):
            term.run()


def test_the_last_try_is_made_with_one_record_at_a_time(queue, reader, tmp_path):
    """As of rows of 5 MB, of which the tenth try still has 39."""
    with replay_term(Claims(), reader, tmp_path, []) as term:
        Ending(term, *[QueryFailed("larger than spark.driver.maxResultSize")] * 14)
        term.run()
        assert term._work.size.records == 1
        Ending(term, QueryFailed("a task failed"))
        with pytest.raises(QueryFailed):
            term.run()


@pytest.mark.parametrize(("reached", "size"), [(5, 10_000), (6, 20_000)])
def test_micro_batches_that_only_lead_into_a_transaction_do_not_keep_those_behind_them_large(
    queue, reader, tmp_path, monkeypatch, reached, size
):
    monkeypatch.setattr(query_module, "_collected", lambda _records: [ChangeRow(5, ROW)])
    with replay_term(Claims(), reader, tmp_path, []) as term:
        query_of(term, SimpleNamespace(position=5, apply=lambda _rows: Outcome(reached, 1)))._apply_batch(None, 0)
        Ending(term, QueryFailed("larger than spark.driver.maxResultSize"))
        term.run()
        assert term._work.size.records == size


def test_records_that_are_read_anew_within_their_transaction_are_counted_once(queue, reader, tmp_path, monkeypatch):
    rows = [ChangeRow(offset, ROW) for offset in range(5, 9)]
    monkeypatch.setattr(query_module, "_collected", lambda records: records)
    application = SimpleNamespace(position=5, apply=lambda part: Outcome(5, len(part)))
    with replay_query(Claims(), reader, tmp_path, [], application) as query:
        for part in (rows[:2], rows[:2], rows[:3], rows[3:]):  # the second query begins anew, and so does the third
            query._apply_batch(part, 0)
        assert query._run.records == 4


def test_records_that_nobody_gives_are_waited_for_however_long_and_not_in_smaller_parts(queue, reader, tmp_path):
    with RangeReader(queue.address, "stock", timeout_s=0.05) as impatient, pytest.raises(DeadlineOver) as late:
        list(impatient.read(0, 1))
    traced = "".join(traceback.format_exception(late.value))
    events: list[Event] = []
    with replay_term(Claims(), reader, tmp_path, events) as term:
        failed = query_of(term)._query_failure(
            SimpleNamespace(exception=lambda: f"Caused by: PythonException: {traced}")
        )
        Ending(term, *[failed] * 30)
        term.run()
        assert term._work.size.records == 20_000
    assert [event.reason for event in events] == [str(failed)] * 30
    assert "waiting for" in str(failed)


def test_a_newer_token_ends_the_replay_only_where_its_own_clock_says_that_it_is_elected(queue, reader, tmp_path):
    with replay_term(Claims(), reader, tmp_path, []) as term:
        Ending(term, Fenced("the target has a newer token"))
        term._work.subscriber.term = None  # it was stopped, and isn't told yet
        term.run()
        term._work.subscriber.term = term._work.term
        Ending(term, Fenced("the target has a newer token"))
        with pytest.raises(Fenced):
            term.run()


def test_output_that_nobody_takes_ends_it_as_it_ends_other_commands(queue, reader, tmp_path, monkeypatch):
    def report(event: Event) -> None:
        if isinstance(event, Progress):
            raise BrokenPipeError

    def started(self, offset, checkpoint):
        with suppress(BrokenPipeError):  # as Spark's thread does: the query has failed then
            self._apply_batch(None, 0)
        return SimpleNamespace(isActive=False, stop=lambda: None)

    monkeypatch.setattr(query_module, "_collected", lambda _records: [])
    monkeypatch.setattr(ReplayQuery, "_started", started)
    queue.append_values([ROW] * 10, 0)
    with replay_term(Claims(Position(5, 4)), reader, tmp_path, []) as term:
        term._run.report = report
        with pytest.raises(BrokenPipeError):
            term.run()


def test_a_target_at_the_end_of_what_was_given_up_does_not_need_it_to_be_kept(
    no_query, queue, reader, tmp_path, monkeypatch
):
    queue.append_values([ROW] * 10, 0)
    queue.links[-1].end = 10
    queue.links.append(Link(2, 2**40))
    moves: list[tuple[int, int]] = []

    class Moved(Claims):
        def apply_parts(self, queue_id, start, end, parts, token, snapshot):
            moves.append((start, end))

    monkeypatch.setattr(query_module, "_collected", lambda _records: [])
    target = Moved()
    for position in (5, 10):
        application = Application(target, QUEUE_ID, 5, position, None)
        with replay_query(target, reader, tmp_path, [], application) as query:
            query._apply_batch(None, 0)
    assert moves == [(10, 2**40)]
    with (
        replay_term(Moved(Position(10, 4)), reader, tmp_path, []) as term,
        pytest.raises(QueryFailed, match=f"start at {2**40}"),
    ):
        term._stream()


def ended(*end_offsets: int) -> SimpleNamespace:
    """A query whose micro-batches ended there, each one's progress to be had at the second look."""
    shown = [
        None,
        *({"batchId": at, "sources": [{"endOffset": {"offset": end}}]} for at, end in enumerate(end_offsets)),
    ]

    class Query:
        isActive = True  # noqa: N815

        @property
        def lastProgress(self):  # noqa: N802
            return shown.pop(0) if len(shown) > 1 else shown[0]

    return Query()


@pytest.mark.parametrize(
    ("values", "last", "moves"),
    [
        ([BEGIN], 1, [(3, 4), (4, 8)]),
        ([TRANSACTION_BEGIN], 1, []),  # it is unfinished
        ([], 0, [(3, 8)]),
        ([], 1, []),  # another micro-batch was handed in meanwhile, whose end isn't known yet
    ],
)
def test_a_target_goes_behind_the_re_sends_that_come_last(queue, reader, tmp_path, monkeypatch, values, last, moves):
    """Their link was never drained, and its group not admitted again, for as long as no further record came."""
    queue.append_values([ROW] * 8, 0)
    monkeypatch.setattr(query_module, "_collected", lambda records: records)
    monkeypatch.setattr(query_module, "_QUIET_S", 0.0)
    made: list[tuple[int, int]] = []

    class Moved(Claims):
        def apply(self, queue_id, plan, token):
            made.append((plan.start, plan.end))

        def apply_parts(self, queue_id, start, end, parts, token, snapshot):
            made.append((start, end))

        def tables(self):
            return {}

    events: list[Event] = []
    target = Moved()
    application = Application(target, QUEUE_ID, 5, 3, None)
    with replay_query(target, reader, tmp_path, events, application) as query:
        cursors: list[int] = []
        query._work.cursor.want = cursors.append
        query._look_at_s = boottime_s() + 60
        for batch_id in range(last + 1):
            part = values if batch_id == last else []
            query._apply_batch([ChangeRow(offset, value) for offset, value in enumerate(part, 3)], batch_id)
        looks = iter(range(4))
        query._run.stopping.wait = lambda _s: next(looks, None) is None and query._run.stopping.set()
        query._follow(ended(*[8] * (1 if (values, last) == ([], 1) else last + 1)))
    assert made == moves
    assert cursors[-1] == (moves[-1][1] if moves else 3)
    assert [one.offset for one in events if isinstance(one, Progress)] == cursors


def test_a_target_that_waited_for_what_was_given_up_goes_on_at_a_snapshot(
    no_query, queue, reader, tmp_path, monkeypatch
):
    """It had been claimed at 0, and would have had what came behind the first link alone."""
    monkeypatch.setattr(query_module, "_collected", lambda records: records)
    target = Claims()
    with replay_term(target, reader, tmp_path, []) as term:
        with pytest.raises(QueryFailed, match="start at 0"):
            term._stream()
        queue.links = [Link(1, 0, end=0), Link(2, 2**40)]
        for rows in ([], [ChangeRow(2**40, ROW)]):
            with pytest.raises(WorldError, match="first records of queue 'stock' were given up"):
                no_query[-1]._apply_batch(rows, 0)
        with pytest.raises(NoSnapshot):
            term._stream()
        assert target.stored.offset == 0
        queue.append_values([ROW, BEGIN, ROW], 30)
        with pytest.raises(QueryFailed, match=f"start at {2**40 + 1}"):
            term._stream()
        assert target.stored.offset == 0


def test_micro_batches_keep_their_size_where_the_queue_does_not_answer(queue, reader, tmp_path, monkeypatch):
    with replay_term(Claims(), reader, tmp_path, []) as term:
        monkeypatch.setattr(term, "_does_queue_answer", lambda: False)
        failing = Failing(term, 0)
        term.run()
        assert failing.sizes == [20_000] * 4
