"""Between the loop's thread, which fetches, and the application's, which takes.

Deliveries lie here undecoded: decoding is done by the thread that takes them. Nothing is handed out beyond
`valid_until_s`, which the loop moves on only with each proof that the session lives (H8), and nothing of an earlier
term: a term starts with each ReadFrom and ends when the reader is deposed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

from seriatim.consumer.core.handed_out import Chunk
from seriatim.consumer.core.rows import Delivery, decoded
from seriatim.consumer.core.view import Place
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import InvalidArgument, SeriatimError, copied
from seriatim.protocol.flag import Waking, is_set_within, set_from_anywhere


class HandOver:
    """See the module. The loop's side: begin, put, end, renew, fail. The application's, one thread at a time: wait, take.

    There is no lock: a signal's handler that closes the consumer runs in the middle of what the application's thread does here, and
    waits for the loop's thread, which must not wait for that one. So a term's deliveries have a queue of their own, and whatever is
    written is written in one step.
    """

    def __init__(self) -> None:
        self._now: tuple[int, deque[Delivery]] = 0, deque()  # the term, and what lies here of it
        self._first: tuple[Delivery, Chunk] | None = None
        self._woken = Waking()
        self._awaited: deque[Callable[[], None]] = deque()
        self.is_reading = False
        self.valid_until_s = 0.0
        self.dropped = 0
        self.error: SeriatimError | None = None
        self.is_closed = False

    @property
    def term(self) -> int:
        """Its number."""
        return self._now[0]

    def _tell(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._woken.wake()
        while self._awaited:
            with contextlib.suppress(IndexError):  # somebody else was quicker
                self._awaited.popleft()()

    # ---- the loop's side

    def begin(self) -> None:
        """A term starts; what lies here is void."""
        self._now = self.term + 1, deque()
        self.is_reading = True
        self._tell()

    def end(self) -> None:
        """The term is over: nothing of it is handed out any more."""
        self.is_reading = False
        self._now = self.term + 1, deque()
        self._tell()

    def put(self, delivery: Delivery) -> None:
        self._now[1].append(delivery)
        self._tell()

    def renew(self, valid_until_s: float) -> None:
        """Handing out is allowed until then, by `boottime_s`; 0: not at all."""
        was_open = boottime_s() < self.valid_until_s
        self.valid_until_s = valid_until_s
        if not was_open:
            self._tell()

    def fail(self, error: SeriatimError) -> None:
        """What can't be mended by waiting: whoever takes gets it."""
        self.error = error
        self._tell()

    def close(self) -> None:
        self.is_closed = True
        self._tell()

    def leave_to_parent(self) -> None:
        """In a forked process: nothing is handed out here any more."""
        self.error = InvalidArgument(
            "the consumer was opened before a fork, and reads in the parent only: start processes by spawn, and make one there"
        )
        self.is_closed = True

    # ---- the application's side

    @property
    def is_open(self) -> bool:
        """Whether records may be handed out now."""
        return self.is_reading and not self.is_closed and boottime_s() < self.valid_until_s

    def holds(self, term: int) -> bool:
        """Whether what this term handed out may be worked on now: nobody else can have been handed it."""
        return self.term == term and boottime_s() < self.valid_until_s

    def _is_ready(self) -> bool:
        return self.is_closed or self.error is not None or (bool(self._now[1]) and self.is_open)

    def wait(self, timeout_s: float) -> None:
        """Wait for something to take, or the end of it all, at most so long."""
        until_s = boottime_s() + timeout_s
        while not self._is_ready() and (left_s := until_s - boottime_s()) > 0:
            self._woken.wait(left_s)

    async def wait_async(self, timeout_s: float) -> None:
        """As `wait`, but for any change, and on a loop of the application's: without one of the few threads that it has for all else."""
        woken = asyncio.Event()
        wake = partial(set_from_anywhere, woken, asyncio.get_running_loop())
        self._awaited.append(wake)
        try:
            if not self._is_ready():
                await is_set_within(woken, timeout_s)
        finally:
            with contextlib.suppress(ValueError):
                self._awaited.remove(wake)

    def check(self) -> None:
        """Raise what the loop failed with."""
        if self.error is not None:
            raise copied(self.error)

    def is_all_taken(self, last: Chunk | None) -> bool:
        """Whether nothing lies here but that batch, if any."""
        waiting = self._now[1]
        return len(waiting) == (1 if self._lies_first(waiting, last) else 0)

    def _lies_first(self, waiting: deque[Delivery], taken: Chunk | None) -> bool:
        """Whether this batch, which was taken here, lies here still: then it is the first."""
        first = self._first
        return first is not None and first[1] is taken and bool(waiting) and waiting[0] is first[0]

    def take(self, queue: str, done: Chunk | None = None) -> tuple[Chunk, int] | None:
        """The next batch's records and its size in bytes; None where there is none now. `done`: the one before is, if it was taken here.

        A batch lies here until it is said to be done, and is the same `Chunk` each time: who is interrupted on the way, by Ctrl-C, has
        lost none and got none twice.

        Raises what the loop failed with, and MalformedFrame where the batch can't be decoded: it then stays the next
        one, because nothing may pass it.
        """
        self.check()
        term, waiting = self._now
        if self._lies_first(waiting, done):
            waiting.popleft()
        if not waiting or not self.is_open:
            return None
        delivery, first = waiting[0], self._first
        if first is not None and first[0] is delivery:
            return first[1], delivery.size_bytes
        rows = decoded(delivery)
        chunk = Chunk(term, rows, queue, Place(delivery.epoch, delivery.start), delivery.decoded_bytes)
        if term != self.term:
            return None
        self._first = delivery, chunk
        self.dropped += rows.dropped
        return chunk, delivery.size_bytes
