"""`Consumer`: what an application reads a queue with."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Self

from seriatim.consumer.commits import OVERDUE
from seriatim.consumer.core.handed_out import Chunk, HandedOut, of_earlier_term
from seriatim.consumer.core.view import Grant, Place
from seriatim.consumer.fetching import Fetcher
from seriatim.consumer.handling import Blocked, handle
from seriatim.consumer.handover import HandOver
from seriatim.consumer.loop import LoopThread, weakly
from seriatim.consumer.reader import CLOSE_TIMEOUT_S, Reader
from seriatim.consumer.session import ReaderSession, ReaderSettings
from seriatim.protocol import lifecycle, log, values
from seriatim.protocol.callbacks import call_back
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.coordinators import CALL_TIMEOUT_S
from seriatim.protocol.election import Standing
from seriatim.protocol.errors import InvalidArgument, NotElected, SeriatimError
from seriatim.protocol.record import Record
from seriatim.protocol.timeouts import check_number, check_seconds

_log = log.logger("consumer")

PREFETCH_BYTES = 16 * 1024 * 1024
RECORDS_AT_ONCE = 100
"""So many records are made at a time for who iterates."""
RECORDS_A_TURN = 200
"""So many are awaited at most before whatever else runs on the application's loop has its turn: timers, cancellations, other tasks."""
_COMMIT_TIMEOUT_S = 30.0
_CLOSED = "the consumer is closed"


class Consumer(Reader):
    """An elected reader of one subscription: an iterator of records in the queue's order, sync or async.

    Of all consumers of a subscription one is elected and gets records; the others stand by and wait. A consumer that
    is deposed hands out nothing from that moment on, by its own clock before its session can expire (H8), and stands
    by again; `on_deposed` tells. When it is elected again, it starts at the last committed cursor. So records handed
    out and not committed are handed out again, to it or to another. To commit what an earlier term handed out raises
    Fenced, until this term has come as far; then it is committed: a record doesn't tell its term.
    A seek, by whomever, begins a term, too.

    `coordinators`: "HOST:PORT,HOST:PORT" or a list; None: the environment's SERIATIM_COORDINATOR.
    A subscription that doesn't exist is made at `start`: "earliest", "latest" or an offset (`create=False`: raises
    UnknownSubscription). `auto_commit_ms`: so often, what the application has moved past is committed, that is
    all records before the one just handed out by the iterator, or before those of the last `poll`; None: only `commit`
    does. `idle_timeout_s`: iteration ends when, while elected, no record came for so long, also where there are some that can't be
    read now, or nobody tells where to read for at least `connect_timeout_s`: `waiting_for` may say so, `is_at_end` tells; None: never.
    `prefetch_bytes` bounds what is fetched ahead, in bytes of batches, of which one may be larger; objects come on top,
    some 700 B a batch. `on_elected()` and `on_deposed()` are called on the consumer's own thread and must return quickly:
    what would wait there raises InvalidArgument, and what they raise is logged.

    Used by one application thread, and by one task of a loop, at a time: whoever asks for a record is done with the one before, and with
    two of them that is another one's. `close` and `commit` by any. A signal's handler better sets an event: it may have
    interrupted what they wait for. Opened by its first use, or as a context manager. Opening raises Unreachable, DeadlineOver, UnknownQueue, UnknownSubscription.
    One that nobody has any more, and that wasn't closed, warns (ResourceWarning) and resigns. Its callbacks are kept: who has it and gives
    it methods of their own has it as long.

    A forked process can't use what its parent has opened: all but `close`, which does nothing there, raises InvalidArgument. Nor can it
    open any of its own, where the parent's weren't closed before the fork: gRPC doesn't outlive one. Start processes by spawn.
    """

    def __init__(
        self,
        coordinators: str | Iterable[str] | None,
        queue: str,
        subscription: str = "default",
        *,
        start: str | int = "earliest",
        create: bool = True,
        prefetch_bytes: int = PREFETCH_BYTES,
        session_timeout_s: float = 4.0,
        connect_timeout_s: float = 10.0,
        auto_commit_ms: int | None = 1000,
        idle_timeout_s: float | None = None,
        on_elected: Callable[[], object] | None = None,
        on_deposed: Callable[[], object] | None = None,
        name: str = "",
    ) -> None:
        values.make_faster()
        if prefetch_bytes < 1:
            raise InvalidArgument("prefetch_bytes must be above 0")
        if auto_commit_ms is not None:
            check_seconds("auto_commit_ms", auto_commit_ms)
        if idle_timeout_s is not None:
            check_seconds("idle_timeout_s", idle_timeout_s, may_be_zero=True)
        super().__init__(
            coordinators,
            ReaderSettings(queue, subscription, str(start), create, session_timeout_s, connect_timeout_s, name),
        )
        self.subscription = subscription
        self.blocked: Blocked | None = None
        self._prefetch_bytes = prefetch_bytes
        self._auto_commit_ms = auto_commit_ms
        self._idle_timeout_s = idle_timeout_s
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._hand_over = HandOver()
        self._handed_out = HandedOut(queue)
        self._opening = threading.RLock()  # a signal's handler may close what its own thread is opening or closing
        self._fetcher: Fetcher | None = None
        self._is_elected = False
        self._ungranted_since_s: float | None = None
        self._is_closing = False
        self._lapse: asyncio.TimerHandle | None = None
        lifecycle.call_in_child(self, Consumer._leave_to_parent)

    # ---- life

    def open(self) -> Self:
        """Connect, and stand for election. Raises Unreachable, UnknownQueue, UnknownSubscription."""
        self._check_not_closed()  # also while it is being closed, which a callback must not wait for
        self._check_may_wait()  # nor for records
        with self._opening:
            self._check_not_closed()
            if self._thread is None:
                thread = LoopThread(f"seriatim-consumer-{self.queue}")
                try:
                    thread.run(self._start())
                    self._check_not_closed()  # by a signal's handler
                except BaseException:
                    self._end(thread)
                    raise
                self._opened_on(thread)
        return self

    def _opened(self) -> LoopThread:
        """Its thread, once it is open. Raises as `open`, also where another thread, or a signal's handler, closes it at this moment."""
        self.open()
        thread = self._thread
        if thread is None:
            raise InvalidArgument(_CLOSED)
        return thread

    def _check_not_closed(self) -> None:
        if self._hand_over.is_closed:
            self._hand_over.check()
            raise InvalidArgument(_CLOSED)

    async def _start(self) -> None:
        session = ReaderSession(
            self._coordinators,
            self._settings,
            on_grant=weakly(self._granted),
            on_lease=weakly(self._leased),
            on_end=self._hand_over.end,
            on_failure=self._hand_over.fail,
        )
        fetcher = session.fetch(self._prefetch_bytes, self._hand_over.put)
        await self._stand(session)
        self._fetcher = fetcher
        if self._auto_commit_ms is not None:
            commit = weakly(self._ask_commit)
            self._tasks.append(asyncio.create_task(_regularly(self._auto_commit_ms / 1000, commit)))

    def close(self) -> None:
        """Commit what the application has moved past, unless commits are its own affair; then stop and resign."""
        self._check_may_wait()  # not in a callback, where the lock may be held by who waits for that
        with self._opening:
            self._check_may_wait()
            self._hand_over.close()
            thread = self._thread
            if thread is None or self._is_closing:
                return
            self._is_closing = True
            try:
                self._end(thread)
            finally:
                self._is_closing = False
                if not thread.is_running:  # else it was interrupted, and to close it again ends it
                    self._thread = None

    def _check_may_wait(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.check_may_wait()

    def _end(self, thread: LoopThread) -> None:
        thread.end(self._stop(), 2 * CLOSE_TIMEOUT_S, self._leave)

    async def _stop(self) -> None:
        session = self._session
        if session is not None and self._auto_commit_ms is not None:
            place = self._handed_out.passed(self._hand_over.term)
            if place is not None and place > session.committed:
                try:
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await session.commit(place)
                except (SeriatimError, TimeoutError) as error:
                    _log.info("not all committed at the end", queue=self.queue, reason=error)
        await super()._stop()

    def _leave_to_parent(self) -> None:
        """In a process that was forked from the one that it reads in: hand out nothing, and leave nothing to close."""
        self._opening = threading.RLock()  # who holds the other one doesn't run here
        if self._thread is not None:
            self._thread = self._session = None
            self._hand_over.leave_to_parent()

    async def __aenter__(self) -> Self:
        try:
            return await asyncio.to_thread(self.open)
        except asyncio.CancelledError:
            # The thread goes on, and nobody else would close what it opens.
            asyncio.get_running_loop().run_in_executor(None, self.close)
            raise

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- on the loop

    def _granted(self, grant: Grant, place: Place) -> None:
        self._hand_over.begin()
        _log.info("reading", queue=self.queue, token=grant.token, epoch=place.epoch, index=place.index)

    def _leased(self, valid_until_s: float) -> None:
        self._hand_over.renew(valid_until_s)
        if self._lapse is not None:
            self._lapse.cancel()
        left_s = valid_until_s - boottime_s()
        is_elected = left_s > 0
        if is_elected:  # where no write is answered, but pings are, nothing else tells the end (H10)
            self._lapse = asyncio.get_running_loop().call_later(left_s, weakly(self._leased), 0.0)
        if is_elected is not self._is_elected:
            self._is_elected = is_elected
            call_back(_log, self._on_elected if is_elected else self._on_deposed)

    def _ask_commit(self) -> None:
        place = self._handed_out.passed(self._hand_over.term)
        if place is not None and self._session is not None:
            self._session.ask_commit(place)

    # ---- reading

    @property
    def is_elected(self) -> bool:
        """Whether this consumer is handed records now."""
        return self._hand_over.is_open

    @property
    def is_first_in_line(self) -> bool:
        """Whether ZooKeeper says that it is elected: it is handed records as soon as a coordinator grants where to read."""
        session = self._session
        return session is not None and session.standing is Standing.ELECTED and session.is_live

    @property
    def waiting_for(self) -> str:
        """What it waits for, for a person; empty while records can come."""
        session, fetcher = self._session, self._fetcher
        if self._hand_over.is_open:
            reason = "" if fetcher is None else fetcher.state.waiting_for
            problem = "" if session is None else session.coordinators.problem  # who would tell of the next link
            return f"{reason}: {problem}" if reason and problem else reason
        return (session.waiting_for if session is not None else "") or "being elected"

    @property
    def duplicates_dropped(self) -> int:
        """Re-sends that were not handed out."""
        return self._hand_over.dropped

    def _take(self, *, is_done: bool = True) -> Chunk | None:
        """The batch in hand, or the next one, where it is there; not waited for. `is_done`: the application is, with all it was handed."""
        hand_over, handed_out = self._hand_over, self._handed_out
        while hand_over.is_open:
            chunk = handed_out.rest(hand_over.term, is_done=is_done)
            if chunk is not None:
                return chunk
            taken = hand_over.take(self.queue, handed_out.in_hand)
            if taken is None:
                return None
            following, size_bytes = taken
            thread, fetcher = self._thread, self._fetcher  # no thread where it is closed at this moment
            if thread is not None and fetcher is not None and fetcher.taken(size_bytes):
                thread.tell(fetcher.tell_taken)
            handed_out.begin(following)
        hand_over.check()
        return None

    def _patience(self, idle_since_s: float) -> tuple[float, float]:
        """How long to wait for more, 0: it was closed, or idle too long; and when idling began."""
        hand_over = self._hand_over
        if hand_over.is_closed:
            return 0.0, idle_since_s
        idle_s, now_s = self._idle_timeout_s, boottime_s()
        if not hand_over.is_open:
            if idle_s is None or not self.is_first_in_line:
                self._ungranted_since_s = None
                return 0.1, now_s
            since_s = self._ungranted_since_s = self._ungranted_since_s or now_s
            left_s = since_s + max(idle_s, self._settings.connect_timeout_s) - now_s
            return max(0.0, min(0.1, left_s)), now_s
        self._ungranted_since_s = None
        left_s = 1.0 if idle_s is None else idle_since_s + idle_s - now_s
        return max(0.0, min(1.0, left_s)), idle_since_s

    def __iter__(self) -> Iterator[Record]:
        """Records in order, until the consumer is closed or idle for too long."""
        self.open()
        idle_since_s, self._ungranted_since_s = boottime_s(), None
        while True:
            self._handed_out.move_past()
            chunk = self._take()
            if chunk is None:
                left_s, idle_since_s = self._patience(idle_since_s)
                if left_s == 0:
                    return
                self._hand_over.wait(left_s)
                continue
            yield from self._records_left(chunk)
            idle_since_s = boottime_s()

    async def __aiter__(self) -> AsyncIterator[Record]:
        """As the plain iterator; waits without holding up the caller's loop, and lets it turn where there is nothing to wait for."""
        await asyncio.to_thread(self.open)
        idle_since_s, self._ungranted_since_s = boottime_s(), None
        left = RECORDS_A_TURN
        while True:
            self._handed_out.move_past()
            chunk = self._take()
            if chunk is None:
                left_s, idle_since_s = self._patience(idle_since_s)
                if left_s == 0:
                    return
                await self._hand_over.wait_async(left_s)
                continue
            for record in self._records_left(chunk):
                yield record
                left -= 1
                if not left:
                    left = RECORDS_A_TURN
                    self._handed_out.move_past()  # whoever is cancelled here has asked for more
                    await asyncio.sleep(0)
            idle_since_s = boottime_s()

    def _records_left(self, chunk: Chunk) -> Iterator[Record]:
        """The rest of a batch, as long as the term and the lease go on; the clock is asked for each record."""
        hand_over, term, clock, row = self._hand_over, chunk.term, time.clock_gettime, chunk.row
        while row < chunk.count:
            for record in chunk.records(row, row + RECORDS_AT_ONCE):
                is_over = hand_over.is_closed or clock(time.CLOCK_BOOTTIME) >= hand_over.valid_until_s
                if is_over or chunk.row != row or hand_over.term != term:
                    return
                chunk.passed = row
                chunk.row = row = row + 1
                yield record

    def poll(self, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """Up to `max_records` records, as soon as there are any; none where none came within `timeout_s`.

        Fewer where these are of batches that take `prefetch_bytes`, decompressed: however well they were compressed, memory is enough.

        To ask for more is to be done with those returned before. Raises InvalidArgument for less than one record, or for what is no number.
        """
        if max_records < 1:
            raise InvalidArgument(f"max_records is at least 1, not {max_records}")
        check_number("timeout_s", timeout_s)
        self.open()
        deadline_s = boottime_s() + timeout_s
        self._handed_out.move_past()
        while (chunk := self._take()) is None:
            left_s = deadline_s - boottime_s()
            if left_s <= 0 or self._hand_over.is_closed:
                return []
            self._hand_over.wait(min(left_s, 1.0))
        found: list[Record] = []
        found_bytes, term = 0, chunk.term
        following: Chunk | None = chunk
        taken: list[tuple[Chunk, int]] = []
        try:
            while following is not None:
                if following.term != term:
                    found, found_bytes, term = [], 0, following.term  # what was found will be handed out again
                taken.append((following, following.row))
                end = min(following.count, following.row + max_records - len(found))
                found += following.records(following.row, end)
                following.row = end
                found_bytes += following.size_bytes
                is_enough = len(found) >= max_records or found_bytes >= self._prefetch_bytes
                following = None if is_enough else self._take(is_done=False)
        except SeriatimError:  # the batch stays, and the next call meets it before all else
            if not found:
                raise
        except BaseException:
            self._handed_out.give_back(taken)
            raise
        return found

    def is_at_end(self, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Whether all that was acknowledged before this call was handed out. The cluster is asked: that nothing comes proves nothing.

        False also where nobody can tell now, and where this consumer isn't elected. Raises Unreachable or DeadlineOver where no
        coordinator answers within `timeout_s`, UnknownQueue where the queue was deleted.
        """
        check_number("timeout_s", timeout_s)
        thread, session, hand_over = self._opened(), self._session, self._hand_over
        hand_over.check()
        if session is None or not hand_over.is_open:
            return False
        term = hand_over.term
        if not thread.run(session.is_all_delivered(timeout_s), timeout_s + 1):
            return False
        return hand_over.term == term and self._has_all_of(term)

    def _has_all_of(self, term: int) -> bool:
        """Whether the application was handed all that was taken for this term."""
        return not self._handed_out.has_rest(term) and self._hand_over.is_all_taken(self._handed_out.in_hand)

    # ---- moving

    def commit(self, record_or_offset: Record | int | None = None, *, timeout_s: float = _COMMIT_TIMEOUT_S) -> None:
        """Commit, and wait until both members have it: the given record and all before it, or all below an offset.

        With neither: all that was handed out; where nothing was, or all of it is committed, nothing is done, elected or
        not, and as little where an offset isn't kept any more: everybody has read what is below. Raises Fenced for what an earlier term handed
        out, and the present one hasn't yet (what both have can't be told apart), InvalidArgument for what none has, and NotElected
        where this consumer isn't elected. Raises OlderGeneration where somebody seeks meanwhile, UnknownQueue or UnknownSubscription where it was
        deleted, DeadlineOver where the members don't answer within `timeout_s`.
        """
        thread = self._opened()
        if not self._is_committed(record_or_offset):
            thread.run(self._commit(self._place_to_commit(record_or_offset)), timeout_s, OVERDUE)

    async def commit_async(self, record_or_offset: Record | int | None = None) -> None:
        """As `commit`, awaited."""
        thread = await asyncio.to_thread(self._opened)
        if not self._is_committed(record_or_offset):
            await thread.elsewhere(self._commit(self._place_to_commit(record_or_offset)))

    def _is_committed(self, what: Record | int | None) -> bool:
        """Whether there is nothing to commit."""
        return what is None and self._handed_out.is_all_committed

    async def _commit(self, handed: tuple[int, Place]) -> None:
        term, place = handed
        if self._session is not None:
            self._hand_over.check()
            if term != self._hand_over.term:  # since it was looked at, on the application's thread
                raise of_earlier_term(self.queue)
            await self._session.commit(place)
            self._handed_out.note_committed(handed)

    def _place_to_commit(self, what: Record | int | None) -> tuple[int, Place]:
        """As `HandedOut.place_to_commit`. Raises NotElected, too, and what the loop failed with."""
        view = self._session.view if self._session is not None else None
        self._hand_over.check()
        if not self._hand_over.is_reading or view is None:
            raise NotElected("this consumer isn't elected", queue=self.queue)
        return self._handed_out.place_to_commit(what, self._hand_over.term, view)

    def seek(self, position: str | int, *, timeout_s: float = _COMMIT_TIMEOUT_S) -> None:
        """Move the subscription to "earliest", "latest" or an offset: for all its readers, at once.

        Where this consumer is elected, the next record is that of the new position. Raises InvalidArgument for an
        offset that isn't kept, UnknownQueue or UnknownSubscription where this one's was deleted; after `timeout_s` Unreachable or Waiting
        where nothing was moved, DeadlineOver where it may have been, or was, and this consumer reads on at the old position for now.
        """
        check_number("timeout_s", timeout_s)
        thread = self._opened()
        self._hand_over.check()  # what has its name now is another one's
        if self._session is not None:
            thread.run(self._session.seek(str(position), timeout_s), timeout_s + 1)

    # ---- with a handler

    def run(
        self,
        handler: Callable[[Record], object],
        park: Callable[[Record, Exception], object] | None = None,
        *,
        backoff_s: float = 0.1,
        backoff_max_s: float = 30.0,
    ) -> None:
        """Hand each record to `handler`, until the consumer is closed or idle for too long.

        A record whose handler raises blocks the queue: nothing passes it. It is tried again after `backoff_s`,
        doubled up to `backoff_max_s`; `blocked` and the log say why. With `park`, which is given the record and the
        error, the record counts as done instead, once `park` returned; where that raises, too, the record blocks the queue.
        What fails when this consumer is no longer elected, or somebody sought, is neither parked nor tried again by that term.
        What isn't an `Exception` (KeyboardInterrupt) ends this at once, and its record is not done: the next `run` begins with it.
        So does a handler, or `park`, that is an `async def`, whose call does nothing by itself: raises InvalidArgument.
        """
        check_number("backoff_s", backoff_s)
        check_number("backoff_max_s", backoff_max_s)
        try:
            handle(self, self._hand_over, self._handed_out, handler, park, backoff_s, backoff_max_s)
        except BaseException:
            self._handed_out.take_back()
            raise


async def _regularly(interval_s: float, call: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        call()
