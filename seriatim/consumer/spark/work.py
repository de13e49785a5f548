"""What the queries of a replay's term work with, and how the target is asked what may take long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from seriatim.consumer.range_reader import RangeReader
from seriatim.consumer.spark.batch_size import BatchSize
from seriatim.consumer.spark.cursor import CursorKeeper
from seriatim.consumer.spark.progress import SLOW_S, Waiting
from seriatim.consumer.spark.run import Run
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.consumer.subscriber import Subscriber, Term
from seriatim.protocol.clock import boottime_s

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 5.0
_CLAIM_FINISH_S = 1.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Work:
    """One term's, shared by all its queries."""

    run: Run
    spark: SparkSession
    target: PostgresTarget
    reader: RangeReader
    subscriber: Subscriber
    term: Term
    cursor: CursorKeeper
    size: BatchSize

    @property
    def queue_id(self) -> int:
        return self.subscriber.queue_id

    @property
    def is_over(self) -> bool:
        """Whether the term is, or the replay is to stop."""
        return self.run.is_over(self.term)

    def asked(self, ask: Callable[[], _Answer]) -> _Answer:
        """What the target answers. Beside it, one that takes long is told, and given up when the term is over."""
        slow_at_s = boottime_s() + SLOW_S
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(ask)
            while not wait([asked], 0.05).done:
                if boottime_s() >= slow_at_s:
                    slow_at_s = boottime_s() + SLOW_S
                    self.tell_hindrance()
                if self.is_over and not wait([asked], _CLAIM_FINISH_S).done:
                    self.target.cancel()
            return asked.result()

    def tell_hindrance(self) -> None:
        """What the target is at that takes long, where it is anything; its server of before is left by that."""
        hindrance = self.target.hindrance()
        if hindrance is not None:
            self.run.report(Waiting(hindrance))
