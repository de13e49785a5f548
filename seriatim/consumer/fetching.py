"""Carries out what `core.reading` orders: fetch streams, timer, delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from seriatim.consumer.core import reading
from seriatim.consumer.core.reading import Reading
from seriatim.consumer.core.reading_events import (
    BatchesArrived,
    CloseFetch,
    Deliver,
    EndReached,
    Event,
    FetchFailed,
    GiveCredit,
    Heard,
    LookAtChain,
    OpenFetch,
    RowsTaken,
    StartArrived,
    Tick,
    WakeAt,
)
from seriatim.consumer.core.rows import Delivery
from seriatim.consumer.transport import FetchStream, Members
from seriatim.consumer.views import link_name
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import Fenced, OlderGeneration, SeriatimError, defect
from seriatim.protocol.names import Index

_log = log.logger("consumer")


class Fetcher:
    """The reading core and its streams. To be used on one loop.

    `on_delivery`: where batches go. `on_refused`: a member refused the grant, which is to be looked at again. `on_missed`: who tells
    of the chain may stand still, and another coordinator is to be asked. `on_failure`: a bug
    of our own in a stream's task or a timer, at which nobody looks: what reads would wait for ever. `settled`: the last state of which
    everything is carried out; who looks from another thread goes by that, or he would see that all is delivered before it is.
    """

    def __init__(
        self,
        members: Members,
        limit_bytes: int,
        on_delivery: Callable[[Delivery], object],
        on_refused: Callable[[SeriatimError], object],
        on_missed: Callable[[], object],
        on_failure: Callable[[SeriatimError], object],
    ) -> None:
        self.state = self.settled = Reading(limit_bytes)
        self._members = members
        self._on_delivery = on_delivery
        self._on_refused = on_refused
        self._on_missed = on_missed
        self._on_failure = on_failure
        self._streams: dict[int, tuple[FetchStream, asyncio.Task[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._silence_at_s = 0.0
        self._taken_bytes = self._told_of_bytes = 0  # in all, each written by one thread: see HandOver
        self._told_bytes = max(1, reading.asked_for_bytes(limit_bytes) // 2)

    def taken(self, size_bytes: int) -> bool:
        """The application took so much, on its one thread.

        True: `tell_taken` is to be called on the loop; else that is on its way, or nothing would follow from it yet. It is said again
        with as much more: who was to call it may have been interrupted.
        """
        before = self._taken_bytes
        self._taken_bytes = after = before + size_bytes
        return before // self._told_bytes < after // self._told_bytes

    def tell_taken(self) -> None:
        """What the application took since the last time."""
        before, self._told_of_bytes = self._told_of_bytes, self._taken_bytes
        self.happened(RowsTaken(self._told_of_bytes - before))

    def happened(self, event: Event) -> None:
        """Step the core and carry out its orders."""
        before = self.state
        self.state, effects = reading.decide(before, event, boottime_s())
        for effect in effects:
            match effect:
                case OpenFetch():
                    self._open(effect)
                case CloseFetch(fetch_id):
                    self._close(fetch_id)
                case GiveCredit(fetch_id, size_bytes):
                    if fetch_id in self._streams:
                        self._streams[fetch_id][0].give_credit(size_bytes)
                case Deliver(delivery):
                    self._on_delivery(delivery)
                case WakeAt(at_s):
                    self._wake_at(at_s)
                case LookAtChain():
                    self._on_missed()
        self.settled = self.state
        self._watch_silence()
        if self.state.waiting_for != before.waiting_for and self.state.waiting_for:
            _log.debug("reading waits", waiting_for=self.state.waiting_for, at=self.state.at)
        if self.state.failures > before.failures:
            _log.info("fetch failed", reason=self.state.failure, failures=self.state.failures, at=self.state.at)

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, at_s - boottime_s()), self._ticked)

    def _watch_silence(self) -> None:
        """Keep one timer. Where the member was heard meanwhile, it is set anew when it fires; at once only for an earlier look."""
        now_s = boottime_s()
        at_s = reading.next_look_s(self.state, now_s)
        if at_s is None:
            return
        if self._silence is not None:
            if at_s >= self._silence_at_s:
                return
            self._silence.cancel()
        self._silence = asyncio.get_running_loop().call_later(at_s - now_s, self._look_for_silence)
        self._silence_at_s = at_s

    def _look_for_silence(self) -> None:
        self._silence = None
        self._ticked()

    def _ticked(self) -> None:
        try:
            self.happened(Tick())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.exception("reader failed", at=self.state.at)
        self._on_failure(defect(error, "a reader"))

    def _open(self, order: OpenFetch) -> None:
        view, grant = self.state.view, self.state.grant
        if view is None:
            return
        opening = pb.FetchOpen(
            link=link_name(view, order.epoch, order.side.incarnation),
            subscription_id=grant.subscription_id,
            generation=grant.generation,
            token=grant.token,
            from_index=order.from_index,
            credit_bytes=order.credit_bytes,
            takes_several=True,
        )
        _log.debug("fetch", queue=view.queue, epoch=order.epoch, from_index=order.from_index, member=order.side)
        stream = FetchStream(self._members, order.side, opening)
        self._streams[order.fetch_id] = stream, asyncio.create_task(self._followed(order.fetch_id, stream))

    async def _followed(self, fetch_id: int, stream: FetchStream) -> None:
        try:
            await self._follow(fetch_id, stream)
        except Exception as error:
            self._fail(error)

    async def _follow(self, fetch_id: int, stream: FetchStream) -> None:
        def take(reply: pb.FetchReply | BatchMessage) -> bool:
            if fetch_id in self._streams:
                self.happened(_event(fetch_id, reply))
            return fetch_id in self._streams

        reason = "the member ended the stream"
        try:
            await stream.run(take)
        except SeriatimError as error:
            reason = f"{error.code}: {error.message}"
            if error.code in {Fenced.code, OlderGeneration.code}:
                self._on_refused(error)
        if self._streams.pop(fetch_id, None) is not None:
            self.happened(FetchFailed(fetch_id, reason))

    def _close(self, fetch_id: int) -> None:
        found = self._streams.pop(fetch_id, None)
        if found is not None:
            found[1].cancel()

    async def stop(self) -> None:
        """Close every stream and the timer."""
        for timer in (self._timer, self._silence):
            if timer is not None:
                timer.cancel()
        tasks = [task for _, task in self._streams.values()]
        self._streams.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _event(fetch_id: int, reply: pb.FetchReply | BatchMessage) -> StartArrived | BatchesArrived | EndReached | Heard:
    """Raises BadChecksum or MalformedFrame where a batch arrives damaged."""
    if isinstance(reply, BatchMessage):
        return BatchesArrived(fetch_id, reply.batches())
    match reply.WhichOneof("kind"):
        case "start":
            return StartArrived(fetch_id, Index(reply.start.index), dict(reply.start.marks))
        case "end":
            return EndReached(fetch_id, Index(reply.end))
        case _:
            return Heard(fetch_id, Index(reply.committed_index), reply.is_sealed)
