"""What `send` gives back: one shared object for each batch, and a small handle for each record.

A record's end is its batch's end, so a handle costs a fraction of a microsecond, and completing a batch costs the
same whether it has one record or thousands.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, overload

from seriatim.producer.acknowledged import Acknowledged
from seriatim.producer.guard import Guard
from seriatim.protocol import log
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, SeriatimError, copied
from seriatim.protocol.names import Epoch, Index, Offset
from seriatim.protocol.timeouts import check_timeout

_log = log.logger("producer")
_CALLBACK_FAILED: Final = "a callback of the application failed"
_FOR_EVER: Final = -1.0
"""As a lock's timeout."""


class Ends:
    """What the batches of one producer share: the lock under which they end, the thread that ends them, and what nobody was told of.

    `guard`: of the buffer, which that thread needs for it. `is_in_parent`: the process was forked, and that thread isn't in here.
    `untold`: so many records ended as `failure`, or as one before it, and nobody was told. `tellings`: how often all were told of at once.
    """

    __slots__ = ("failure", "guard", "is_in_parent", "lock", "own_thread", "tellings", "untold")

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard
        self.lock = threading.Lock()
        self.own_thread: int | None = None
        self.is_in_parent = False
        self.untold = 0
        self.failure: SeriatimError | None = None
        self.tellings = 0

    def tell_all(self) -> None:
        """Somebody was told of all that failed until now."""
        with self.lock:
            self.untold = 0
            self.failure = None
            self.tellings += 1

    def leave_to_parent(self, guard: Guard | None) -> None:
        """In a forked process: nothing ends here any more. The locks are new ones, because who held the others doesn't run here."""
        self.guard = guard
        self.lock = threading.Lock()
        self.own_thread = None
        self.is_in_parent = True

    def check_process(self) -> None:
        """Raise InvalidArgument in a process that was forked when the producer was there already."""
        if self.is_in_parent:
            raise made_before_fork()

    @property
    def may_wait(self) -> bool:
        """Whether the calling thread may wait for the producer: not the producer's own, nor one that holds the guard."""
        is_within = self.guard is not None and self.guard.is_own
        return not is_within and threading.get_ident() != self.own_thread

    def check_wait(self) -> None:
        """Raise InvalidArgument where the calling thread would wait for itself."""
        if not self.may_wait:
            raise InvalidArgument(
                "this would have to wait: a callback must not block the producer, nor a signal's handler what it interrupted"
            )


def made_before_fork() -> InvalidArgument:
    """What a forked process is told of its parent's producers."""
    return InvalidArgument(
        "the producer was made before a fork, and runs in the parent only: start processes by spawn, and make one there"
    )


class SharedBatch:
    """The end of all records of one batch.

    Written by the producer's own thread, read by any. `seqs` is the first seq where the seqs are consecutive.
    `resumed`: rows that turned out to be stored already, rising.
    """

    __slots__ = ("_callbacks", "_ends", "_failed_in", "_told", "_waiting", "base", "count", "epoch", "error", "first_index", "is_done",
                 "number", "resumed", "seqs", "size_bytes", "source")  # fmt: skip

    def __init__(self, number: int, ends: Ends) -> None:
        self.number = number
        self._ends = ends
        self.is_done = False
        self.error: SeriatimError | None = None
        self.epoch: Epoch | None = None
        self.first_index = Index(0)
        self.base: int | None = None
        self.resumed: Sequence[int] = ()
        self.source: str | list[str] = ""
        self.seqs: int | list[int] = 0
        self.size_bytes = 0
        self.count = 0
        self._callbacks: list[Callable[[], object]] = []
        self._waiting: list[
            threading.Lock
        ] = []  # a held one for each thread; an Event would be three objects, six calls
        # Rows whose failure somebody was told of; and after how many tellings of all the batch failed.
        self._told: set[int] | None = None
        self._failed_in = 0

    def identity(self, row: int) -> tuple[str, int]:
        """Source and seq of a row. Known once the batch is closed."""
        source = self.source if isinstance(self.source, str) else self.source[row]
        return source, (self.seqs + row if isinstance(self.seqs, int) else self.seqs[row])

    def resume(self, marks: Mapping[str, int]) -> None:
        """Note which rows lie at or below their source's mark."""
        rows = set(self.resumed)
        for row in range(self.count):
            source, seq = self.identity(row)
            if seq <= marks.get(source, -1):
                rows.add(row)
        self.resumed = sorted(rows)

    def finish(self, error: SeriatimError | None = None) -> None:
        """All rows are at their end; callbacks run here, and none of them ends the producer's thread, not even by `sys.exit`."""
        # Made before the lock is taken: to make an object may start the collector, and a finalizer may ask for a record's end.
        no_callbacks: list[Callable[[], object]] = []
        none_waiting: list[threading.Lock] = []
        ends = self._ends
        with ends.lock:
            self.error = error
            self.is_done = True
            if error is not None:
                self._failed_in = ends.tellings
                ends.untold += self.count - len(self.resumed)
                ends.failure = error
            callbacks, self._callbacks = self._callbacks, no_callbacks
            waiting, self._waiting = self._waiting, none_waiting
        for held in waiting:
            held.release()
        for callback in callbacks:
            try:
                callback()
            except BaseException:
                _log.exception(_CALLBACK_FAILED)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the batch is at its end within `timeout_s`. Raises InvalidArgument where it isn't, and this thread must not wait."""
        is_done = self.is_done
        if is_done:
            return True
        self._ends.check_process()
        if timeout_s is None or timeout_s > 0:
            self._ends.check_wait()
        check_timeout(timeout_s)
        held = threading.Lock()
        held.acquire()
        with self._ends.lock:
            if self.is_done:
                return True
            self._waiting.append(held)
        if held.acquire(timeout=_FOR_EVER if timeout_s is None else max(0.0, timeout_s)):
            return True
        with self._ends.lock:
            if not self.is_done:
                self._waiting.remove(held)
            return self.is_done

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call once at the end, on the producer's thread; at once, here, where that was before."""
        if not self.is_done:
            self._ends.check_process()
        with self._ends.lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        try:
            callback()
        except Exception:
            _log.exception(_CALLBACK_FAILED)

    def _is_resumed(self, row: int) -> bool:
        at = bisect_left(self.resumed, row)
        return at < len(self.resumed) and self.resumed[at] == row

    def _tell(self, row: int) -> None:
        """Who asked for the end of this row is told."""
        ends = self._ends
        told: set[int] = set()  # made before the lock is taken, as in `finish`
        with ends.lock:
            if self._told is None:
                self._told = told
            if row not in self._told:
                self._told.add(row)
                if self._failed_in == ends.tellings:
                    ends.untold -= 1
                    if not ends.untold:
                        ends.failure = None

    def result(self, row: int) -> Acknowledged:
        """The end of a row. Raises its error."""
        is_resumed = bool(self.resumed) and self._is_resumed(row)
        if self.error is not None and not is_resumed:
            self._tell(row)
            raise copied(self.error)
        source, seq = self.identity(row)
        if is_resumed or self.epoch is None:
            return Acknowledged(None, None, None, source, seq)
        index = Index(self.first_index + row - (bisect_left(self.resumed, row) if self.resumed else 0))
        offset = None if self.base is None else Offset(self.base + index)
        return Acknowledged(self.epoch, index, offset, source, seq)


class Handle:
    """One record on its way, a row of a batch. `result()` from a thread, `await` from asyncio."""

    __slots__ = ("batch", "row")

    def __init__(self, batch: SharedBatch, row: int) -> None:
        self.batch = batch
        self.row = row

    def done(self) -> bool:
        """Whether the record is at its end, acknowledged or not."""
        return self.batch.is_done

    def result(self, timeout: float | None = None) -> Acknowledged:
        """Where the record is stored; waits up to `timeout` seconds, None: for ever.

        Raises OutcomeUnknown where nobody can tell any more whether it is stored, DeadlineOver where it is still on
        its way, InvalidArgument where this is a callback on the producer's thread, which would wait for itself.
        """
        if not self.batch.wait(timeout):
            raise DeadlineOver(f"the record was not acknowledged within {timeout} s; it still may be")
        return self.batch.result(self.row)

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Call `callback(handle)` at the record's end, on the producer's thread (it must not block there)."""
        self.batch.when_done(lambda: callback(self))

    def __await__(self) -> Generator[Any, None, Acknowledged]:
        """Wait for the record's end without blocking the loop."""
        if not self.batch.is_done:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()
            self.batch.when_done(lambda: _set_from_thread(loop, ended))
            yield from ended
        return self.batch.result(self.row)


def _set_from_thread(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def set_result() -> None:
        if not future.done():
            future.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(set_result)


class Handles(Sequence[Handle]):
    """The handles of many records that were sent at once, made when asked for."""

    __slots__ = ("_count", "_runs", "_starts")

    def __init__(self, runs: Sequence[tuple[SharedBatch, int, int]]) -> None:
        """`runs`: batch, first row in it, how many."""
        self._runs = list(runs)
        self._starts: list[int] = []
        self._count = 0
        for _, _, count in runs:
            self._starts.append(self._count)
            self._count += count

    @classmethod
    def of(cls, handles: Sequence[Handle]) -> Handles:
        """Handles that were made one by one."""
        return cls([(handle.batch, handle.row, 1) for handle in handles])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, position: int) -> Handle: ...
    @overload
    def __getitem__(self, position: slice) -> list[Handle]: ...
    def __getitem__(self, position: int | slice) -> Handle | list[Handle]:
        if isinstance(position, slice):
            return [self[one] for one in range(*position.indices(self._count))]
        at = position + self._count if position < 0 else position
        if not 0 <= at < self._count:
            raise IndexError(position)
        run = bisect_left(self._starts, at + 1) - 1
        batch, first_row, _ = self._runs[run]
        return Handle(batch, first_row + at - self._starts[run])

    def __iter__(self) -> Iterator[Handle]:
        for batch, first_row, count in self._runs:
            for row in range(first_row, first_row + count):
                yield Handle(batch, row)
