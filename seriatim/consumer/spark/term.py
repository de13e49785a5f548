"""One time of being elected: queries from the target's position on, one after the other while they fail."""

from __future__ import annotations

from pathlib import Path

from seriatim.consumer.range_reader import Positions
from seriatim.consumer.spark.beginning import RecordsGone, first_offset
from seriatim.consumer.spark.checkpoints import query_folder
from seriatim.consumer.spark.failures import QueryFailed, QueueSilent
from seriatim.consumer.spark.progress import Started, Waiting
from seriatim.consumer.spark.query import ReplayQuery
from seriatim.consumer.spark.targets.errors import PositionMoved
from seriatim.consumer.spark.targets.positions import Position
from seriatim.consumer.spark.work import PAUSE_FIRST_S, PAUSE_MAX_S, Work
from seriatim.protocol.errors import Fenced, RefusedError, SeriatimError, WorldError

_QUERIES_FAILED_MAX = 10
"""So many failed queries, without a transaction applied between them and with a queue that answers, are no passing trouble."""


class ReplayTerm:
    """See the module. `run` returns when the term is over, or all is done."""

    def __init__(self, work: Work, checkpoints: Path) -> None:
        self._work = work
        self._run = work.run
        self._checkpoints = checkpoints

    def run(self) -> None:
        """Run queries until the term is over; one that failed is followed by another after a pause."""
        pause_s = PAUSE_FIRST_S
        while not self._work.is_over:
            try:
                self._stream()
            except (WorldError, RefusedError) as error:
                more = self._judge(error)
                pause_s = PAUSE_FIRST_S if self._work.size.has_moved else min(PAUSE_MAX_S, pause_s * 2)
                self._run.report(Waiting(f"{error}{more}"))
                self._run.stopping.wait(pause_s)

    def _judge(self, error: SeriatimError) -> str:
        """Count a failure; raise what can't be mended by waiting. Halve the micro-batches of the next query where the target is where it was.

        One that is too large for the memory that Spark has, or may use for it, fails whenever it is tried. So it does behind others
        of its transaction: they pass, and are read anew each time. What is to be told of it is returned.
        """
        # One that was stopped for a while (by a signal, with its machine) may meet the next one's token before it is told that it
        # is deposed. Its own clock knows.
        if isinstance(error, Fenced) and not self._work.is_over and self._work.subscriber.term == self._work.term:
            raise error
        if isinstance(error, PositionMoved):
            self._work.target.close()  # the server of before may still answer there, beside the one that has its address now
        is_query_s_own = isinstance(error, QueryFailed) and not isinstance(error, QueueSilent)
        if not is_query_s_own or not self._does_queue_answer():
            return ""
        size = self._work.size
        size.failures += 1
        may_take_less = size.records > 1 and not size.has_moved
        if size.failures >= _QUERIES_FAILED_MAX and not may_take_less:
            raise error
        if self._work.is_over or not may_take_less:
            return ""
        size.halve()
        return f"; the next try is with at most {size.records:,} records at a time"

    def _does_queue_answer(self) -> bool:
        try:
            self._work.reader.positions()
        except WorldError:
            return False
        return True

    def _stream(self) -> None:
        work, settings = self._work, self._work.run.settings
        work.size.begin()
        claimed = self._claimed()
        positions = work.reader.positions()
        if claimed.offset > 0:
            self._check_within(positions, claimed.offset)
        query = ReplayQuery(work, claimed)
        if claimed.offset > 0:
            work.asked(lambda: query.application.pass_gap(positions.beyond_gap(claimed.offset)))
            start = query.application.position
        else:  # where it stays until it has something: what it is to begin with may be given up yet
            start = first_offset(work.reader, lambda reason: self._run.report(Waiting(reason)), lambda: work.is_over)
        if start < max(work.term.cursor_offset, work.cursor.wanted):
            # The target was set back. What lies between counts as read, and could be let go before it is applied again.
            work.cursor.seek(start)
            return
        self._run.report(Started(settings.queue, work.term.token, start))
        created_at_ms = work.subscriber.queue_created_at_ms
        folder = query_folder(self._checkpoints, work.queue_id, created_at_ms, settings.subscription, work.term.fence)
        with folder as checkpoint:
            if query.run(start, checkpoint):
                self._run.stopping.set()

    def _claimed(self) -> Position:
        work, queue = self._work, self._run.settings.queue
        created_at_ms = work.subscriber.queue_created_at_ms
        return work.asked(lambda: work.target.claim(work.queue_id, queue, work.term.fence, created_at_ms=created_at_ms))

    def _check_within(self, positions: Positions, offset: int) -> None:
        """Raise RecordsGone where the queue has let go what the target lacks; WorldError where it ends before it."""
        queue = self._run.settings.queue
        if offset < positions.earliest:
            raise RecordsGone(
                f"the target stands at offset {offset} of queue {queue!r}, whose first record kept is "
                f"{positions.earliest}: what is between is gone; the target's row of seriatim_replay.positions is the one with "
                f"queue_id = {self._work.queue_id} AND job = '{self._run.settings.subscription}'",
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
