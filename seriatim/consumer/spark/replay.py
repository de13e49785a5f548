"""The replay: an elected streaming query that applies a queue of captured changes to a target.

Life: stand for election; elected, claim the target with the token and learn where it stands; stream from there, in a
checkpoint of this run's own; apply each micro-batch on the driver (`application`); commit the subscription's cursor behind
it. Deposed: stop the query, stand by again. Any failure that waiting can mend ends in the same loop; one that it can't
ends the replay, with the record's offset and what to do.

Why nothing is lost or repeated: the target compares position and token in the transaction that applies a micro-batch.
Everything else here (election, checkpoint, cursor) may be late or wrong and costs only time.

`Replay` is the whole, `term.ReplayTerm` one time of being elected, `query.ReplayQuery` one streaming query of that time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from seriatim.consumer.range_reader import RangeReader
from seriatim.consumer.spark.batch_size import BatchSize
from seriatim.consumer.spark.checkpoints import check_folder
from seriatim.consumer.spark.cursor import CursorKeeper
from seriatim.consumer.spark.engine import check_conf, check_java, give_up_starting, spark_session
from seriatim.consumer.spark.progress import SLOW_S, Report, Stopped, Waiting
from seriatim.consumer.spark.run import ReplaySettings, Run
from seriatim.consumer.spark.scratch import scratch_folder
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.consumer.spark.term import ReplayTerm
from seriatim.consumer.spark.work import Work
from seriatim.consumer.subscriber import Subscriber, Term
from seriatim.protocol import log
from seriatim.protocol.clock import boottime_s

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = log.logger("replay")


class Replay:
    """See the module. `run` in one thread until done; `stop` from any thread or signal handler.

    `beside`: makes what is entered once Spark runs, and left at the end; anything that uses gRPC has to wait for that.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        report: Report,
        beside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._run = Run(settings, report)
        self._beside = beside
        self._standing: Subscriber | None = None

    def stop(self) -> None:
        """Finish the micro-batch under way, then end. Returns at once."""
        self._run.stopping.set()

    @property
    def is_connected(self) -> bool:
        """Whether it stands in the election, elected or not. From any thread."""
        return self._standing is not None and self._standing.is_connected

    @property
    def is_live(self) -> bool:
        """Whether its place in the election is kept: its loop turns. From any thread."""
        return self._standing is None or self._standing.is_live

    @property
    def is_elected(self) -> bool:
        """Whether it applies records now. From any thread."""
        return self._run.elected is not None and self.is_live

    def run(self) -> None:
        """Replay until stopped or idle.

        Raises JavaMissing or SparkNotStarted, and InvalidArgument for a setting that isn't the user's, or is none; TargetLost,
        Unreachable or UnknownQueue where it never worked; UnfitTarget, ApplyFailed, OtherJob, OtherQueue, RecordsGone, BrokenStream or
        InvalidArgument where going on needs somebody to mend something; Fenced where the target was claimed with a newer token than this election gives.
        """
        run, settings = self._run, self._run.settings
        check_conf(settings.spark_conf)
        check_folder(settings.checkpoint)
        check_java()
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(scratch_folder())
            target = stack.enter_context(PostgresTarget(settings.target, settings.subscription))
            for limit in target.limits():
                _log.warning("target", limit=limit)
            # Spark first: it is started by a fork, which gRPC's threads don't survive. On a thread of its own, because on the
            # main one it would put its own handler on Ctrl-C.
            starting = stack.enter_context(ThreadPoolExecutor(1))
            level, conf = settings.spark_log_level, settings.spark_conf
            spark = self._started(
                starting.submit(spark_session, settings.master, directory, log_level=level, conf=conf)
            )
            if spark is not None:
                stack.callback(_stop, spark)
                self._stand(stack, spark, target, directory)
        run.report(Stopped(run.offset, run.records, run.changes))

    def _stand(self, stack: contextlib.ExitStack, spark: SparkSession, target: PostgresTarget, directory: Path) -> None:
        """In the election, until stopped or idle."""
        run, settings = self._run, self._run.settings
        stack.enter_context(self._beside())
        reader = stack.enter_context(RangeReader(settings.coordinators, settings.queue))
        reader.positions()
        subscriber = self._standing = stack.enter_context(self._subscriber())
        while not run.stopping.is_set():
            term = self._elected(subscriber)
            if term is not None:
                cursor, size = CursorKeeper(subscriber, term), BatchSize(settings.max_records)
                work = Work(run, spark, target, reader, subscriber, term, cursor, size)
                ReplayTerm(work, Path(settings.checkpoint or directory / "checkpoints")).run()

    def _started(self, starting: Future[SparkSession]) -> SparkSession | None:
        """Spark, when it runs; None when the replay is to stop before. A master that isn't there is waited for for a minute."""
        run = self._run
        next_word_s = boottime_s() + SLOW_S
        while not starting.done():
            if run.stopping.wait(0.05):
                while not starting.done():
                    give_up_starting()  # again and again: there may be no JVM yet, only its beginning
                    time.sleep(0.05)
                return None if starting.exception() is not None else starting.result()
            if boottime_s() >= next_word_s:
                next_word_s += SLOW_S
                run.report(Waiting(f"Spark hasn't started yet at {run.settings.master}"))
        return starting.result()

    def _subscriber(self) -> Subscriber:
        run = self._run
        return Subscriber(
            run.settings.coordinators,
            run.settings.queue,
            run.settings.subscription,
            session_timeout_s=run.settings.session_timeout_s,
            on_elected=run.grant,
            on_deposed=run.depose,
        )

    def _elected(self, subscriber: Subscriber) -> Term | None:
        """The term to work in; None when the replay is to stop."""
        told = ""
        while not self._run.stopping.is_set():
            term = subscriber.term
            if term is not None:
                return term
            reason = subscriber.waiting_for
            if reason and reason != told:
                told = reason
                self._run.report(Waiting(f"standing by: {reason}"))
            self._run.stopping.wait(0.05)
        return None


def _stop(spark: SparkSession) -> None:
    """Also where the signal that ends this process has ended the JVM."""
    with contextlib.suppress(Exception):
        spark.stop()
