"""`RangeReader`: records between two offsets, without election and without a cursor, for Spark tasks and tools."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from seriatim.consumer.core import reading_events
from seriatim.consumer.core.reading import Reading
from seriatim.consumer.core.rows import Delivery, Rows, decoded
from seriatim.consumer.core.view import START, ChainView, Grant
from seriatim.consumer.fetching import Fetcher
from seriatim.consumer.loop import LoopThread, weakly
from seriatim.consumer.transport import Members
from seriatim.consumer.views import chain_view
from seriatim.protocol import values
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.coordinators import CALL_TIMEOUT_S, Coordinators
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, SeriatimError, Unreachable
from seriatim.protocol.flag import Waking
from seriatim.protocol.names import Generation, Offset, SubscriptionId, Token
from seriatim.protocol.patience import Patience
from seriatim.protocol.record import Record
from seriatim.protocol.seriatim_pb2 import QueueRequest
from seriatim.protocol.timeouts import check_number

PREFETCH_BYTES = 4 * 1024 * 1024
_ASKED_AGAIN_S = 0.1
END_WITHIN_S = CALL_TIMEOUT_S
"""So long a member's word for the end is waited for."""


@dataclass(frozen=True, slots=True)
class Positions:
    """`earliest`: offset of the first record kept; `end` where none is. `end`: offset up to which records can be read now, exclusive.

    `spans`: the offsets that links hold between the two, in order; a link that was given up leaves a wide gap (H21).
    `is_end_known`: False where the master of the last link didn't tell how far that is written, or ZooKeeper may have been set back:
    there is no less than up to `end`.
    `of`: which queue that is, of all that ever had its name (H16); empty where a coordinator of an earlier version answered.
    """

    earliest: Offset
    end: Offset
    spans: tuple[range, ...] = ()
    is_end_known: bool = True
    of: str = ""

    @classmethod
    def seen(cls, view: ChainView) -> Self:
        """As far as this view, of a DescribeQueue, tells."""
        latest = view.latest
        spans = [
            range(link.base, min(latest, link.base + (link.committed or 0 if link.end is None else link.end)))
            for link in view.links
            if link.base is not None
        ]
        of = f"{view.queue_id}@{view.created_at_ms}" if view.created_at_ms else ""
        return cls(view.earliest, latest, tuple(span for span in spans if span), view.is_latest_known, of)

    def beyond_gap(self, offset: int) -> int:
        """The first offset behind the gap that this one is in; the offset itself where it is in none."""
        if not self.earliest <= offset < self.end:
            return offset
        following = next((span.start for span in self.spans if offset < span.stop), self.end)
        return max(offset, following)

    def check_same(self, queue: str, noted: str, offset: int) -> None:
        """Raises InvalidArgument where `offset` was noted of another queue of that name; passes where nobody told which one it was."""
        if noted and self.of and noted != self.of:
            raise InvalidArgument(
                f"queue {queue!r} is another one than that of which offset {offset} was noted: it was deleted and made again; "
                "start a stream of its own, with another checkpoint",
                queue=queue,
                offset=offset,
            )


class RangeReader:
    """Reads committed records by offset, as often as asked, dropping the same re-sends as every consumer.

    With a token and a subscription's id and generation, members refuse it once a newer reader was told (Fenced).
    `timeout_s`: how long it waits while nothing comes, before DeadlineOver. A context manager; raises Unreachable,
    UnknownQueue. One that nobody has any more, and that wasn't closed, warns (ResourceWarning), and closes itself.
    """

    def __init__(
        self,
        coordinators: str | Iterable[str] | None,
        queue: str,
        token: int = 0,
        subscription_id: int = 0,
        generation: int = 0,
        *,
        timeout_s: float = 30.0,
        prefetch_bytes: int = PREFETCH_BYTES,
    ) -> None:
        values.make_faster()
        check_number("timeout_s", timeout_s)
        self.queue = queue
        self.duplicates_dropped = 0
        self._timeout_s = timeout_s
        self._prefetch_bytes = prefetch_bytes
        self._grant = Grant(SubscriptionId(subscription_id), Generation(generation), Token(token))
        self._woken = Waking()  # and no lock, as in HandOver
        self._waiting: deque[Delivery] = deque()
        self._error: SeriatimError | None = None
        self._fetcher: Fetcher | None = None
        self._patience = Patience()  # one path, however often it is read
        self._watching: asyncio.Task[None] | None = None
        self._coordinators = Coordinators(coordinators)
        self._members = Members()
        self._thread = LoopThread(f"seriatim-range-{queue}")
        self._thread.end_when_dropped(self, "range reader", queue, partial(_close, self._members, self._coordinators))

    def close(self) -> None:
        self._thread.end(self._stop(), CALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _stop(self) -> None:
        await self._end()
        await _close(self._members, self._coordinators)

    def positions(self, *, needs_end: bool = False) -> Positions:
        """What can be read now, asked of the members.

        `needs_end`: asked again and again until the end is known; raises Unreachable where it doesn't get so.
        """
        deadline_s = boottime_s() + END_WITHIN_S
        view = self._thread.run(self._describe())
        while needs_end and not view.is_latest_known:
            if boottime_s() >= deadline_s:
                why = "ZooKeeper may have been set back: nobody knows" if view.may_be_outdated else "no member tells"
                raise Unreachable(f"{why} where queue {self.queue!r} ends")
            time.sleep(_ASKED_AGAIN_S)
            view = self._thread.run(self._describe())
        return Positions.seen(view)

    def read_columns(self, start_offset: int, end_offset: int, of: str = "") -> Iterator[Rows]:
        """Batches in order, decoded by columns, cut to start_offset <= offset < end_offset, re-sends left out.

        `Rows.dropped` counts those per batch, `duplicates_dropped` in all. `of`: the queue whose offsets these are, as in
        `Positions`; empty: that which has the name now. One read at a time. Raises InvalidArgument where another one has the name,
        the start isn't kept, what follows was let go meanwhile, or this was closed, DeadlineOver where nothing comes, Fenced.
        """
        if not 0 <= start_offset <= end_offset:
            raise InvalidArgument(f"no range of offsets: {start_offset} to {end_offset}")
        if start_offset == end_offset:
            return
        if self._fetcher is not None:
            raise InvalidArgument("this reader is reading already; finish or close that iterator first")
        fetcher = self._thread.run(self._begin(Offset(start_offset), Offset(end_offset), of))
        try:
            while (delivery := self._next(fetcher)) is not None:
                rows = decoded(delivery)
                self.duplicates_dropped += rows.dropped
                if fetcher.taken(delivery.size_bytes):
                    self._thread.tell(self._tell_taken, fetcher)
                yield rows
        finally:
            if self._is_current(fetcher) and self._thread.is_running:
                self._thread.run(self._end())

    def read(self, start_offset: int, end_offset: int) -> Iterator[Record]:
        """As `read_columns`, record by record."""
        for rows in self.read_columns(start_offset, end_offset):
            yield from rows.records(self.queue)

    # ---- on the loop

    async def _describe(self, *, only_chain: bool = False) -> ChainView:
        request = QueueRequest(queue=self.queue, only_chain=only_chain, no_elections=True)
        return chain_view(await self._coordinators.call_within("DescribeQueue", request))

    async def _begin(self, start: Offset, end: Offset, of: str = "") -> Fetcher:
        view = await self._describe(only_chain=True)
        Positions.seen(view).check_same(self.queue, of, start)
        place = view.place_of(start)
        on_missed, fail = self._coordinators.compare_watches, weakly(self._fail)
        fetcher = Fetcher(self._members, self._prefetch_bytes, weakly(self._put), fail, on_missed, fail)
        fetcher.state = replace(fetcher.state, patience=self._patience)
        self._waiting.clear()
        self._error = None
        self._fetcher = fetcher
        # Where the start lies behind all that this view knows of, it is in a link that follows, and not at its beginning.
        fetcher.happened(
            reading_events.ReadFrom(view, place, is_end=place == START, since=start, until=end, grant=self._grant)
        )
        self._watching = asyncio.create_task(_watch(self._coordinators, self.queue, fetcher, self._woken, fail))
        return fetcher

    async def _end(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        watching, self._watching = self._watching, None
        # Whoever waits for it may be interrupted once more: nothing goes on even where this is cancelled then.
        if watching is not None:
            watching.cancel()
        if fetcher is not None:
            self._patience = fetcher.state.patience
            await fetcher.stop()
        if watching is not None:
            await asyncio.gather(watching, return_exceptions=True)
        self._woken.wake()

    def _put(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._woken.wake()

    def _tell_taken(self, fetcher: Fetcher) -> None:
        if self._is_current(fetcher):  # what is read no more asks for nothing more
            fetcher.tell_taken()

    def _is_current(self, fetcher: Fetcher) -> bool:
        return self._fetcher is fetcher

    def _fail(self, error: SeriatimError) -> None:
        self._error = error
        self._woken.wake()

    # ---- on the caller's thread

    def _next(self, fetcher: Fetcher) -> Delivery | None:
        """The next batch; None when all that was asked for is read."""
        deadline_s = boottime_s() + self._timeout_s
        while True:
            state, error = fetcher.settled, self._error  # before what waits: all that came before these is there
            if not self._is_current(fetcher):
                raise InvalidArgument("the reader was closed before all was read")
            if self._waiting:
                return self._waiting.popleft()
            if error is not None:
                raise error
            if state.is_done:
                return None
            if state.is_cut_off:
                raise _gone(self.queue, state)
            left_s = deadline_s - boottime_s()
            if left_s <= 0:
                waiting_for = state.waiting_for or "records to be committed"
                raise DeadlineOver(f"nothing came in {self._timeout_s} s; waiting for {waiting_for}")
            self._woken.wait(min(left_s, 0.2))


async def _watch(
    coordinators: Coordinators, queue: str, fetcher: Fetcher, woken: Waking, fail: Callable[[SeriatimError], object]
) -> None:
    try:
        async for view in coordinators.watch(queue):
            fetcher.happened(reading_events.ViewChanged(chain_view(view)))
            woken.wake()
    except SeriatimError as error:
        fail(error)


async def _close(members: Members, coordinators: Coordinators) -> None:
    await members.close()
    await coordinators.close()


def _gone(queue: str, state: Reading) -> InvalidArgument:
    earliest = 0 if state.view is None else state.view.earliest
    return InvalidArgument(
        f"offset {state.end_offset} of queue {queue!r} was let go before it was read, the first one kept is {earliest}",
        queue=queue,
        offset=state.end_offset,
        earliest=earliest,
    )
