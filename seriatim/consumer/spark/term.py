"""One time of being elected: queries from the target's position on, one after the other while they fail."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from seriatim.consumer.range_reader import Positions, RangeReader
from seriatim.consumer.spark.application import COLUMNS, Application, Outcome, change_rows
from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.batch_size import BatchSize
from seriatim.consumer.spark.beginning import RecordsGone, first_offset
from seriatim.consumer.spark.checkpoints import query_folder
from seriatim.consumer.spark.cursor import CursorKeeper
from seriatim.consumer.spark.datasource import NAME
from seriatim.consumer.spark.engine import has_ended, lacks_executors, result_limit_bytes
from seriatim.consumer.spark.progress import SLOW_S, Applying, Progress, Started, Waiting
from seriatim.consumer.spark.run import Run
from seriatim.consumer.spark.targets.errors import PositionMoved
from seriatim.consumer.spark.targets.positions import Position
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.consumer.subscriber import Subscriber, Term
from seriatim.protocol import log
from seriatim.protocol.clock import boottime_s, now_ms
from seriatim.protocol.errors import (
    BugError,
    DeadlineOver,
    Fenced,
    NotElected,
    RefusedError,
    SeriatimError,
    Unreachable,
    WorldError,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = log.logger("replay")

_PAUSE_FIRST_S = 0.2
_PAUSE_MAX_S = 5.0
_LAG_EVERY_S = 0.5
_LOOK_EVERY_S = 5.0
_QUIET_S = 0.5
"""For so long no micro-batch came: there may be time to look at the last one's progress."""
_QUERIES_FAILED_MAX = 10
"""So many failed queries, without a transaction applied between them and with a queue that answers, are no passing trouble."""
_FINISH_S = 10.0
_CLAIM_FINISH_S = 1.0
_Answer = TypeVar("_Answer")


class _Abandoned(Exception):
    """The micro-batch is given up because the replay stops or is deposed; nothing of it is in the target, or all."""


class QueryFailed(WorldError):
    """Spark's query ended by itself: a task failed too often, or Spark itself did."""

    code = "query-failed"


class QueueSilent(QueryFailed):
    """Its tasks waited for records in vain, as while both members of their link are away: no fault of Spark's, and as long as that lasts."""

    code = "queue-silent"


class SparkGone(SeriatimError):
    """The JVM died under the replay, or Spark ended in it."""

    code = "spark-gone"
    next_step = "start the replay again: it goes on where the target stands"


class ReplayTerm:
    """See the module. A context manager; `run` returns when the term is over, or all is done."""

    def __init__(
        self,
        run: Run,
        spark: SparkSession,
        target: PostgresTarget,
        reader: RangeReader,
        subscriber: Subscriber,
        term: Term,
        directory: Path,
    ) -> None:
        self._run = run
        self._settings = run.settings
        self._spark = spark
        self._target = target
        self._reader = reader
        self._subscriber = subscriber
        self._term = term
        self._queue_id = subscriber.queue_id
        self._checkpoints = Path(self._settings.checkpoint or directory / "checkpoints")
        self._cursor = CursorKeeper(subscriber, term)
        self._application = Application(target, self._queue_id, term.fence, 0, self._read_range)
        self._failure: BaseException | None = None
        self._queries_failed = 0
        self._size = BatchSize(self._settings.max_records)
        self._has_moved = False  # the target, by a micro-batch of the last query
        self._began_at = 0
        self._is_busy = threading.Event()
        self._turn = threading.Lock()  # of the application, and of the connection to the target
        self._applied_id: int | None = None  # of the last micro-batch of this query that was handed in whole
        self._passed_id: int | None = None
        self._slow_at_s = 0.0
        self._reading_since_s: float | None = None
        self._awaited = 0  # the queue's end at a look since which no micro-batch has begun; 0: at none
        self._awaited_at_s = 0.0
        self._look_at_s = 0.0
        self._applying_at_s = 0.0
        self._batch_end = 0
        self._asked_lag_at_s = 0.0
        self._end = 0
        self._worked_at_s = boottime_s()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cursor.close()

    @property
    def _is_over(self) -> bool:
        return self._run.is_over(self._term)

    def run(self) -> None:
        """Run queries until the term is over; one that failed is followed by another after a pause."""
        pause_s = _PAUSE_FIRST_S
        while not self._is_over:
            try:
                self._stream()
            except (WorldError, RefusedError) as error:
                more = self._judge(error)
                pause_s = _PAUSE_FIRST_S if self._has_moved else min(_PAUSE_MAX_S, pause_s * 2)
                self._run.report(Waiting(f"{error}{more}"))
                self._run.stopping.wait(pause_s)

    def _judge(self, error: SeriatimError) -> str:
        """Count a failure; raise what can't be mended by waiting. Halve the micro-batches of the next query where the target is where it was.

        One that is too large for the memory that Spark has, or may use for it, fails whenever it is tried. So it does behind others
        of its transaction: they pass, and are read anew each time. What is to be told of it is returned.
        """
        # One that was stopped for a while (by a signal, with its machine) may meet the next one's token before it is told that it
        # is deposed. Its own clock knows.
        if isinstance(error, Fenced) and not self._is_over and self._subscriber.term == self._term:
            raise error
        if isinstance(error, PositionMoved):
            self._target.close()  # the server of before may still answer there, beside the one that has its address now
        is_query_s_own = isinstance(error, QueryFailed) and not isinstance(error, QueueSilent)
        if not is_query_s_own or not self._does_queue_answer():
            return ""
        self._queries_failed += 1
        may_take_less = self._size.records > 1 and not self._has_moved
        if self._queries_failed >= _QUERIES_FAILED_MAX and not may_take_less:
            raise error
        if self._is_over or not may_take_less:
            return ""
        self._size.halve()
        return f"; the next try is with at most {self._size.records:,} records at a time"

    def _does_queue_answer(self) -> bool:
        try:
            self._reader.positions()
        except WorldError:
            return False
        return True

    def _stream(self) -> None:
        settings = self._settings
        self._has_moved = False
        claimed = self._claimed()
        positions = self._reader.positions()
        if claimed.offset > 0:
            self._check_within(positions, claimed.offset)
        self._end = positions.end
        application = self._application = Application(
            self._target, self._queue_id, self._term.fence, claimed.offset, self._read_range, claimed.snapshot
        )
        if claimed.offset > 0:
            self._asked(lambda: application.pass_gap(positions.beyond_gap(claimed.offset)))
            start = application.position
        else:  # where it stays until it has something: what it is to begin with may be given up yet
            start = first_offset(self._reader, lambda reason: self._run.report(Waiting(reason)), lambda: self._is_over)
        if start < max(self._term.cursor_offset, self._cursor.wanted):
            # The target was set back. What lies between counts as read, and could be let go before it is applied again.
            self._cursor.seek(start)
            return
        self._failure = None
        self._began_at = start
        self._applied_id = self._passed_id = None
        self._size.begin()
        self._worked_at_s = boottime_s()
        self._look_at_s = boottime_s() + _LOOK_EVERY_S
        self._slow_at_s = boottime_s() + SLOW_S
        self._awaited = 0
        self._run.report(Started(settings.queue, self._term.token, start))
        created_at_ms = self._subscriber.queue_created_at_ms
        folder = query_folder(self._checkpoints, self._queue_id, created_at_ms, settings.subscription, self._term.fence)
        is_done = False
        with folder as checkpoint, self._telling_if_spark_is_gone():
            query = self._started(start, checkpoint)
            try:
                is_done = self._follow(query)
            finally:
                self._stop(query)
        if is_done:
            _check_kept(application.position, self._asked(lambda: self._target.position(self._queue_id)))
            self._run.stopping.set()

    def _claimed(self) -> Position:
        target, queue = self._target, self._settings.queue
        created_at_ms = self._subscriber.queue_created_at_ms
        return self._asked(lambda: target.claim(self._queue_id, queue, self._term.fence, created_at_ms=created_at_ms))

    def _check_within(self, positions: Positions, offset: int) -> None:
        """Raise RecordsGone where the queue has let go what the target lacks; WorldError where it ends before it."""
        queue = self._settings.queue
        if offset < positions.earliest:
            raise RecordsGone(
                f"the target stands at offset {offset} of queue {queue!r}, whose first record kept is "
                f"{positions.earliest}: what is between is gone; the target's row of seriatim_replay.positions is the one with "
                f"queue_id = {self._queue_id} AND job = '{self._settings.subscription}'",
                offset=offset,
                earliest=positions.earliest,
            )
        if offset > positions.end:
            # A member that answers for the end may be behind for a moment. (A queue that was made anew is another one: OtherQueue.)
            end = (
                f"which is {positions.end}"
                if positions.is_end_known
                else f"of which no member tells more than {positions.end}"
            )
            raise WorldError(f"the target stands at offset {offset}, behind the end of queue {queue!r}, {end}")

    def _asked(self, ask: Callable[[], _Answer]) -> _Answer:
        """What the target answers. Beside it, one that takes long is told, and given up when the term is over."""
        slow_at_s = boottime_s() + SLOW_S
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(ask)
            while not wait([asked], 0.05).done:
                if boottime_s() >= slow_at_s:
                    slow_at_s = boottime_s() + SLOW_S
                    self._tell_hindrance()
                if self._is_over and not wait([asked], _CLAIM_FINISH_S).done:
                    self._target.cancel()
            return asked.result()

    @contextlib.contextmanager
    def _telling_if_spark_is_gone(self) -> Iterator[None]:
        """py4j has many errors for it, each with a long traceback; where Spark ended in a Java that lives, a query fails, and the next one as well."""
        try:
            yield
        except Exception as error:
            is_query_s = isinstance(error, QueryFailed)
            if not is_query_s and (isinstance(error, SeriatimError) or error is self._failure):
                raise
            if self._run.stopping.is_set():
                return  # the signal that ends this process may have ended the JVM as well
            if has_ended(self._spark):
                raise SparkGone(f"Spark has ended: {_last_line(error)}") from error
            if is_query_s:
                raise
            raise _query_failed("the query failed", error) from error

    def _source(self, reader: Any) -> Any:
        settings, term = self._settings, self._term
        return (
            reader.format(NAME)
            .option("coordinators", settings.coordinators)
            .option("queue", settings.queue)
            .option("subscriptionId", term.subscription_id)
            .option("generation", term.generation)
            .option("token", term.token)
            .option("maxBytesPerTask", result_limit_bytes(self._spark))
        )

    def _started(self, offset: int, checkpoint: str) -> StreamingQuery:
        settings = self._settings
        source = self._source(self._spark.readStream)
        records = source.option("startingOffsets", offset).option("maxRecordsPerTrigger", self._size.records).load()
        writer = records.select(*COLUMNS).writeStream.foreachBatch(self._apply_batch)
        writer = writer.option("checkpointLocation", checkpoint)
        query: StreamingQuery = writer.trigger(processingTime=f"{settings.trigger_ms} milliseconds").start()
        return query

    def _read_range(self, start: int, end: int) -> Sequence[ChangeRow]:
        """What a micro-batch needs of those before it, read again through Spark. A replay that is to stop needs no more of it."""
        if self._is_over:
            raise _Abandoned
        if boottime_s() >= self._applying_at_s:
            self._applying_at_s = boottime_s() + SLOW_S
            self._run.report(Applying(self._settings.queue, start, self._batch_end))
        source = self._source(self._spark.read)
        records: DataFrame = source.option("startingOffsets", start).option("endingOffsets", end).load()
        return self._read(records.select(*COLUMNS))

    def _read(self, records: DataFrame) -> list[ChangeRow]:
        self._reading_since_s = boottime_s()
        try:
            return _collected(records)
        finally:
            self._reading_since_s = None

    # ---- a micro-batch, on a thread of Spark's

    def _apply_batch(self, records: DataFrame, batch_id: int) -> None:
        with self._turn:
            self._slow_at_s = boottime_s() + SLOW_S
            self._awaited = 0
            self._is_busy.set()
            try:
                self._take(records)
                self._applied_id = batch_id
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self._is_busy.clear()

    def _take(self, records: DataFrame) -> None:
        began_s = boottime_s()
        self._applying_at_s = began_s + SLOW_S
        before = self._application.position
        rows = self._read(records)
        if before == 0 and self._applied_id is None:
            self._check_beginning(rows)
        if not rows:
            self._pass_gap()
        self._batch_end = rows[-1].offset + 1 if rows else before
        outcome = self._applied(rows)
        self._worked_at_s = boottime_s()
        self._run.count(rows)
        self._came_to(outcome, before, boottime_s() - began_s)

    def _came_to(self, outcome: Outcome, before: int, took_s: float) -> None:
        if outcome.position > before:
            self._has_moved = True
            self._size.moved(boottime_s())
            self._queries_failed = 0
        self._cursor.want(outcome.position)
        self._tell(outcome, took_s)

    def _check_beginning(self, rows: Sequence[ChangeRow]) -> None:
        """Raises WorldError where the record that a target that has nothing was to begin with isn't there: it was given up, or let go."""
        if not rows or rows[0].offset != self._began_at:
            raise WorldError(
                f"the first records of queue {self._settings.queue!r} were given up before the target had any: "
                f"it was to begin at offset {self._began_at}"
            )

    def _pass_gap(self) -> None:
        """A micro-batch has no records where it leads over what an operator gave up (protocol.md 5.7): the target goes there, too.

        Its last link may be let go before the next record comes, and then nobody could tell that nothing is missing.
        """
        application = self._application
        with contextlib.suppress(WorldError):  # the next record leads there as well
            application.pass_gap(self._reader.positions().beyond_gap(application.position))

    def _applied(self, rows: Sequence[ChangeRow]) -> Outcome:
        """Apply, and while the target can't be reached, try again: it is where the position says."""
        pause_s = _PAUSE_FIRST_S
        while not self._is_over:
            try:
                return self._application.apply(rows)
            except QueryFailed:
                raise  # reading again failed, not the target: the next query will do better
            except WorldError as error:
                self._run.report(Waiting(str(error)))
                self._run.stopping.wait(pause_s)
                pause_s = min(_PAUSE_MAX_S, pause_s * 2)
        raise _Abandoned

    # ---- beside it

    def _follow(self, query: StreamingQuery) -> bool:
        """Until the query fails, the term is over, one with more records is to begin, or nothing comes any more, which is then True. Raises PositionMoved."""
        idle_s = self._settings.until_idle_s
        while not self._is_over:
            if not query.isActive:
                raise self._query_failure(query)
            if self._size.may_grow and not self._is_busy.is_set():
                self._size.grow()
                self._run.report(Waiting(f"the next query is with at most {self._size.records:,} records at a time"))
                return False
            if idle_s is not None and not self._is_busy.is_set() and boottime_s() - self._worked_at_s >= idle_s:
                if self._is_all_read(query):
                    self._pass_dropped(query)
                    return True
                self._worked_at_s = boottime_s() - idle_s + min(idle_s, 0.2)
            self._tell_if_held_up()
            if not self._is_busy.is_set() and boottime_s() >= self._slow_at_s:
                self._slow_at_s = boottime_s() + SLOW_S + self._settings.trigger_ms / 1000
                self._tell_if_nothing_comes(query)
            if not self._is_busy.is_set() and boottime_s() >= self._look_at_s:
                self._look_at_s = boottime_s() + _LOOK_EVERY_S
                self._look_at_target()
            if boottime_s() - self._worked_at_s >= _QUIET_S:
                self._pass_dropped(query)
            self._run.stopping.wait(0.05)
        return False

    def _look_at_target(self) -> None:
        """Raise PositionMoved where it was set back: while nothing comes for it, nobody else would see that."""
        reached = self._application.position  # before the look: it may move meanwhile
        if not reached:
            return
        with contextlib.suppress(WorldError):  # for what comes next it is waited for
            _check_kept(reached, self._target.position_beside(self._queue_id))

    def _pass_dropped(self, query: StreamingQuery) -> None:
        """Move the target behind the re-sends with which the last micro-batch ended: nobody is handed them. Raises as `Application.apply`.

        It would stand before them until another record comes, and so would the cursor: their link wouldn't be drained. Nothing where
        another micro-batch has begun.
        """
        application = self._application
        if self._applied_id == self._passed_id or not self._turn.acquire(blocking=False):
            return
        try:
            progress, before = query.lastProgress, application.position
            if progress and progress["batchId"] == self._applied_id:
                end = _handed_in(progress)
                self._asked(lambda: application.pass_gap(end))
                self._passed_id = self._applied_id
                if application.position > before:
                    self._came_to(Outcome(application.position, 0), before, 0.0)
        finally:
            self._turn.release()

    def _tell_if_held_up(self) -> None:
        """What a micro-batch is at that takes long: Spark's tasks, or the target, whose server of before is left by that."""
        if not self._is_busy.is_set() or boottime_s() < self._slow_at_s:
            return
        self._slow_at_s = boottime_s() + SLOW_S
        began_s = self._reading_since_s
        if began_s is None:
            self._tell_hindrance()
        elif lacks_executors(self._spark):
            master = self._settings.master
            self._run.report(
                Waiting(f"Spark has no executors at {master}: has it a worker with a core and memory to spare?")
            )
        elif (reading_s := boottime_s() - began_s) >= SLOW_S / 2:  # what took less may be one of many parts
            self._run.report(Waiting(f"Spark has been reading records for {reading_s:.0f} s"))

    def _tell_if_nothing_comes(self, query: StreamingQuery) -> None:
        """A micro-batch is to have begun by now with what the queue had at a look before this one."""
        if self._awaited and not self._has_handed_in(query, self._awaited):
            waited_s = boottime_s() - self._awaited_at_s
            self._run.report(Waiting(f"Spark has begun no micro-batch for {waited_s:.0f} s, with records in the queue"))
            return
        with contextlib.suppress(WorldError):
            positions = self._reader.positions()
            self._awaited = positions.end if positions.is_end_known else 0
            self._awaited_at_s = boottime_s()

    def _tell_hindrance(self) -> None:
        hindrance = self._target.hindrance()
        if hindrance is not None:
            self._run.report(Waiting(hindrance))

    def _is_all_read(self, query: StreamingQuery) -> bool:
        """Whether the query has handed in everything that the queue holds now."""
        with contextlib.suppress(WorldError):
            positions = self._reader.positions()
            return positions.is_end_known and self._has_handed_in(query, positions.end)
        return False

    def _has_handed_in(self, query: StreamingQuery, end: int) -> bool:
        """Whether all before `end` is in the target, or was in a micro-batch, as the unfinished transaction that the target waits to have whole."""
        if self._application.position >= end:
            return True
        progress = query.lastProgress
        return progress is not None and _handed_in(progress) >= end

    def _query_failure(self, query: StreamingQuery) -> Exception:
        failure = self._failure
        if isinstance(failure, SeriatimError | OSError):  # OSError: nobody takes what is told, as of standard output
            return failure
        if isinstance(failure, _Abandoned):
            return NotElected("the micro-batch was given up")
        if failure is not None:
            return BugError(f"a micro-batch failed: {failure!r}")
        return _query_failed("the query ended", query.exception())

    def _stop(self, query: StreamingQuery) -> None:
        """Let the micro-batch under way finish, within reason; what it leaves undone is not in the target at all."""
        self._wait_until_done()
        if self._is_busy.is_set():
            self._run.report(Waiting("the micro-batch under way isn't done yet: it is undone in the target"))
            self._target.cancel()  # else its session would wait on, for a lock perhaps, when this process has ended
        try:
            query.stop()
        except Exception as error:  # Spark's, of any kind
            _log.debug("query not stopped", error=_last_line(error))
        self._wait_until_done()
        self._run.offset = self._application.position
        self._cursor.finish()

    def _wait_until_done(self) -> None:
        """Without end, unless the process is to end: the next term uses the same connection to the target."""
        deadline_s = boottime_s() + _FINISH_S
        while self._is_busy.is_set() and not (self._run.stopping.is_set() and boottime_s() > deadline_s):
            self._tell_if_held_up()
            time.sleep(0.02)

    # ---- telling

    def _tell(self, outcome: Outcome, batch_s: float) -> None:
        run = self._run
        run.changes += outcome.changes
        run.offset = outcome.position
        lag_s = None if outcome.commit_ts_ms is None else max(0.0, (now_ms() - outcome.commit_ts_ms) / 1000)
        run.report(
            Progress(
                self._settings.queue,
                self._term.token,
                outcome.position,
                outcome.records,
                outcome.changes,
                outcome.transactions,
                self._lag_records(outcome.position),
                None if lag_s is None else round(lag_s, 3),
                round(batch_s, 4),
            )
        )

    def _lag_records(self, position: int) -> int | None:
        """Asked rarely: a coordinator asks members for it."""
        if boottime_s() - self._asked_lag_at_s >= _LAG_EVERY_S:
            self._asked_lag_at_s = boottime_s()
            try:
                positions = self._reader.positions()
            except SeriatimError:
                return None
            if not positions.is_end_known:
                return None
            self._end = positions.end
        return max(0, self._end - position)


def _check_kept(reached: int, found: Position | None) -> None:
    """Raise PositionMoved where the target stands before what was in it: restored, or failed over to a stand-by that lagged."""
    position = 0 if found is None else found.offset
    if position < reached:
        raise PositionMoved(
            f"the target stands at offset {position}, and had all up to {reached}: it was set back",
            start=reached,
            position=position,
        )


def _handed_in(progress: Mapping[str, Any]) -> int:
    """Where the micro-batch of this progress ended, by offset: all before it was handed in."""
    reached = progress["sources"][0]["endOffset"]
    if isinstance(reached, str):  # as JSON, where Spark is not told that it is an object
        reached = json.loads(reached)
    return 0 if reached is None else int(reached["offset"])


def _collected(records: DataFrame) -> list[ChangeRow]:
    """The rows, on the driver. Raises QueryFailed for whatever Spark raises: py4j's errors when the JVM is gone, and others."""
    try:
        return change_rows(records.toArrow())
    except Exception as error:
        raise _query_failed("the records couldn't be read", error) from error


def _query_failed(what: str, error: object) -> QueryFailed:
    """All that comes of a task's error through Spark is its text."""
    line = _last_line(error)
    is_silent = line.startswith(tuple(f"{kind.__module__}.{kind.__name__}:" for kind in (DeadlineOver, Unreachable)))
    return (QueueSilent if is_silent else QueryFailed)(f"{what}: {line}")


def _last_line(error: object) -> str:
    """The line of a traceback that says what happened; Spark wraps it in many others, and puts what the query was at behind them."""
    said = str(error).partition("=== Streaming Query ===")[0]
    lines = [line for each in said.splitlines() if (line := each.strip()) and not line.startswith("at ")]
    telling = [
        line
        for line in lines
        if "Traceback" not in line
        and (line.startswith(("seriatim.", "Caused by: ")) or "Error" in line or "Exception" in line)
    ]
    return (telling or lines or ["no reason given"])[-1].removeprefix("Caused by: ")[:500]
