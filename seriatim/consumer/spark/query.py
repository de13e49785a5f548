"""One streaming query of a replay's, and the micro-batches that it hands in.

Spark hands them in on a thread of its own; beside it the replay's thread looks whether the query goes on, says what it waits for, and
ends it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seriatim.consumer.spark.application import COLUMNS, Application, Outcome, change_rows
from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.datasource import NAME
from seriatim.consumer.spark.engine import has_ended, lacks_executors, result_limit_bytes
from seriatim.consumer.spark.failures import QueryFailed, SparkGone, last_line, query_failed
from seriatim.consumer.spark.progress import SLOW_S, Applying, Progress, Waiting
from seriatim.consumer.spark.targets.errors import PositionMoved
from seriatim.consumer.spark.targets.positions import Position
from seriatim.consumer.spark.work import PAUSE_FIRST_S, PAUSE_MAX_S, Work
from seriatim.protocol import log
from seriatim.protocol.change import format_lsn
from seriatim.protocol.clock import boottime_s, now_ms
from seriatim.protocol.errors import BugError, NotElected, RefusedError, SeriatimError, WorldError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_log = log.logger("replay")

_LAG_EVERY_S = 0.5
_LOOK_EVERY_S = 5.0
_QUIET_S = 0.5
"""For so long no micro-batch came: there may be time to look at the last one's progress."""
_FINISH_S = 10.0


class _Abandoned(Exception):
    """The micro-batch is given up because the replay stops or is deposed; nothing of it is in the target, or all."""


class ReplayQuery:
    """See the module. `application`: what is in the target, which was `claimed` there, and what of it is held."""

    def __init__(self, work: Work, claimed: Position) -> None:
        self._work = work
        self._run = work.run
        self._settings = work.run.settings
        self.application = Application(
            work.target, work.queue_id, work.term.fence, claimed.offset, self._read_range, claimed.snapshot
        )
        self._failure: BaseException | None = None
        self._began_at = 0
        self._is_busy = threading.Event()
        self._turn = threading.Lock()  # of the application, and of the connection to the target
        self._applied_id: int | None = None  # of the last micro-batch that was handed in whole
        self._passed_id: int | None = None
        self._slow_at_s = 0.0
        self._reading_since_s: float | None = None
        self._awaited = 0  # the queue's end at a look since which no micro-batch has begun; 0: at none
        self._awaited_at_s = 0.0
        self._look_at_s = 0.0
        self._applying_at_s = 0.0
        self._batch_end = 0
        self._asked_lag_at_s = 0.0
        self._end: int | None = None  # the queue's, when that was asked
        self._worked_at_s = boottime_s()

    def run(self, start: int, checkpoint: str) -> bool:
        """From `start` on, until it fails, the term is over, one with more records is to begin, or nothing comes any more: only then True.

        Raises what it failed with, and PositionMoved where the target hasn't all that was applied.
        """
        self._began_at = start
        self._worked_at_s = boottime_s()
        self._look_at_s = boottime_s() + _LOOK_EVERY_S
        self._slow_at_s = boottime_s() + SLOW_S
        is_done = False
        with self._telling_if_spark_is_gone():
            query = self._started(start, checkpoint)
            try:
                is_done = self._follow(query)
            finally:
                self._stop(query)
        if is_done:
            work = self._work
            _check_kept(self.application.position, work.asked(lambda: work.target.position(work.queue_id)))
        return is_done

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
            if has_ended(self._work.spark):
                raise SparkGone(f"Spark has ended: {last_line(error)}") from error
            if is_query_s:
                raise
            raise query_failed("the query failed", error) from error

    def _source(self, reader: Any) -> Any:
        settings, term = self._settings, self._work.term
        return (
            reader.format(NAME)
            .option("coordinators", settings.coordinators)
            .option("queue", settings.queue)
            .option("subscriptionId", term.subscription_id)
            .option("generation", term.generation)
            .option("token", term.token)
            .option("maxBytesPerTask", result_limit_bytes(self._work.spark))
        )

    def _started(self, offset: int, checkpoint: str) -> StreamingQuery:
        settings = self._settings
        source = self._source(self._work.spark.readStream)
        records = (
            source.option("startingOffsets", offset).option("maxRecordsPerTrigger", self._work.size.records).load()
        )
        writer = records.select(*COLUMNS).writeStream.foreachBatch(self._apply_batch)
        writer = writer.option("checkpointLocation", checkpoint)
        query: StreamingQuery = writer.trigger(processingTime=f"{settings.trigger_ms} milliseconds").start()
        return query

    def _read_range(self, start: int, end: int) -> Sequence[ChangeRow]:
        """What a micro-batch needs of those before it, read again through Spark. A replay that is to stop needs no more of it."""
        if self._work.is_over:
            raise _Abandoned
        if boottime_s() >= self._applying_at_s:
            self._applying_at_s = boottime_s() + SLOW_S
            self._run.report(Applying(self._settings.queue, start, self._batch_end))
        source = self._source(self._work.spark.read)
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
        before = self.application.position
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
            self._work.size.moved(boottime_s())
        self._work.cursor.want(outcome.position)
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
        application = self.application
        with contextlib.suppress(WorldError):  # the next record leads there as well
            application.pass_gap(self._work.reader.positions().beyond_gap(application.position))

    def _applied(self, rows: Sequence[ChangeRow]) -> Outcome:
        """Apply, and while the target can't be reached, try again: it is where the position says."""
        pause_s = PAUSE_FIRST_S
        while not self._work.is_over:
            try:
                return self.application.apply(rows)
            except QueryFailed:
                raise  # reading again failed, not the target: the next query will do better
            except WorldError as error:
                self._run.report(Waiting(str(error)))
                self._run.stopping.wait(pause_s)
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
        raise _Abandoned

    # ---- beside it

    def _follow(self, query: StreamingQuery) -> bool:
        """Until the query fails, the term is over, one with more records is to begin, or nothing comes any more, which is then True. Raises PositionMoved."""
        idle_s, size = self._settings.until_idle_s, self._work.size
        while not self._work.is_over:
            if not query.isActive:
                raise self._query_failure(query)
            if self._is_busy.is_set():
                self._tell_if_held_up()
            elif size.may_grow:
                size.grow()
                self._run.report(Waiting(f"the next query is with at most {size.records:,} records at a time"))
                return False
            elif idle_s is not None and boottime_s() - self._worked_at_s >= idle_s:
                if self._is_all_read(query):
                    self._pass_dropped(query)
                    return True
                self._worked_at_s = boottime_s() - idle_s + min(idle_s, 0.2)
            if not self._is_busy.is_set():
                self._look_about(query)
            if boottime_s() - self._worked_at_s >= _QUIET_S:
                self._pass_dropped(query)
            self._run.stopping.wait(0.05)
        return False

    def _look_about(self, query: StreamingQuery) -> None:
        """While no micro-batch is under way, now and then: whether one should be, and whether the target is where it was."""
        if boottime_s() >= self._slow_at_s:
            self._slow_at_s = boottime_s() + SLOW_S + self._settings.trigger_ms / 1000
            self._tell_if_nothing_comes(query)
        if boottime_s() >= self._look_at_s:
            self._look_at_s = boottime_s() + _LOOK_EVERY_S
            self._look_at_target()

    def _look_at_target(self) -> None:
        """Raise PositionMoved where it was set back: while nothing comes for it, nobody else would see that."""
        reached = self.application.position  # before the look: it may move meanwhile
        if not reached:
            return
        with contextlib.suppress(WorldError):  # for what comes next it is waited for
            _check_kept(reached, self._work.target.position_beside(self._work.queue_id))

    def _pass_dropped(self, query: StreamingQuery) -> None:
        """Move the target behind the re-sends with which the last micro-batch ended: nobody is handed them. Raises as `Application.apply`.

        It would stand before them until another record comes, and so would the cursor: their link wouldn't be drained. Nothing where
        another micro-batch has begun.
        """
        application = self.application
        if self._applied_id == self._passed_id or not self._turn.acquire(blocking=False):
            return
        try:
            progress, before = query.lastProgress, application.position
            if progress and progress["batchId"] == self._applied_id:
                end = _handed_in(progress)
                self._work.asked(lambda: application.pass_gap(end))
                self._passed_id = self._applied_id
                if application.position > before:
                    self._came_to(Outcome(application.position, 0), before, 0.0)
        finally:
            self._turn.release()

    def _tell_if_held_up(self) -> None:
        """What a micro-batch is at that takes long: Spark's tasks, or the target, whose server of before is left by that."""
        if boottime_s() < self._slow_at_s:
            return
        self._slow_at_s = boottime_s() + SLOW_S
        began_s = self._reading_since_s
        if began_s is None:
            self._work.tell_hindrance()
        elif lacks_executors(self._work.spark):
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
        self._awaited = self._queue_end() or 0
        self._awaited_at_s = boottime_s()

    def _is_all_read(self, query: StreamingQuery) -> bool:
        """Whether the query has handed in everything that the queue holds now."""
        end = self._queue_end()
        return end is not None and self._has_handed_in(query, end)

    def _queue_end(self) -> int | None:
        """None where nobody tells it now."""
        with contextlib.suppress(WorldError, RefusedError):
            positions = self._work.reader.positions()
            return positions.end if positions.is_end_known else None
        return None

    def _has_handed_in(self, query: StreamingQuery, end: int) -> bool:
        """Whether all before `end` is in the target, or was in a micro-batch, as the unfinished transaction that the target waits to have whole."""
        if self.application.position >= end:
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
        return query_failed("the query ended", query.exception())

    def _stop(self, query: StreamingQuery) -> None:
        """Let the micro-batch under way finish, within reason; what it leaves undone is not in the target at all."""
        self._wait_until_done()
        if self._is_busy.is_set():
            self._run.report(Waiting("the micro-batch under way isn't done yet: it is undone in the target"))
            self._work.target.cancel()  # else its session would wait on, for a lock perhaps, when this process has ended
        try:
            query.stop()
        except Exception as error:  # Spark's, of any kind
            _log.debug("query not stopped", error=last_line(error))
        self._wait_until_done()
        self._run.offset = self.application.position
        self._work.cursor.finish()

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
                self._work.term.token,
                outcome.position,
                outcome.records,
                outcome.changes,
                outcome.transactions,
                self._lag_records(outcome.position),
                None if lag_s is None else round(lag_s, 3),
                round(batch_s, 4),
                None if outcome.source_lsn is None else format_lsn(outcome.source_lsn),
            )
        )

    def _lag_records(self, position: int) -> int | None:
        """Asked rarely: a coordinator asks members for it."""
        if boottime_s() - self._asked_lag_at_s >= _LAG_EVERY_S:
            self._asked_lag_at_s = boottime_s()
            self._end = self._queue_end()
        return None if self._end is None else max(0, self._end - position)


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
        raise query_failed("the records couldn't be read", error) from error
