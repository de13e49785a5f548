"""Between the application's threads and the producer's own: the open batch, the full ones, and the bound on memory.

`send` runs here, a million times a second at best, so its usual case is one short function: a value of bytes without
key, headers or seq, put into the open batch. Everything else (no open batch, no room, not elected, a seq of the
user's) goes through `_admit`.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, cast

from seriatim.producer.core.batching import BatchLimits, closes_in_s
from seriatim.producer.core.sequencing import Identities
from seriatim.producer.guard import IS_COMPILED, Guard
from seriatim.producer.handle import Ends, Handle, Handles, SharedBatch, made_before_fork
from seriatim.producer.open_batch import OpenBatch
from seriatim.producer.record import CheckedRecord, checked, too_large
from seriatim.protocol.batch import MAX_RECORD_BYTES, MAX_SOURCES, RecordColumns
from seriatim.protocol.clock import monotonic_s, now_ms
from seriatim.protocol.errors import (
    DeadlineOver,
    InvalidArgument,
    NotElected,
    OutcomeUnknown,
    SeriatimError,
    Unreachable,
    Waiting,
    copied,
)
from seriatim.protocol.names import Token

_COLUMN_BYTES: Final = 32
_now_ns = time.time_ns
_IS_UNINTERRUPTED: Final = IS_COMPILED and getattr(sys, "_is_gil_enabled", lambda: True)()
"""Threads change, and Ctrl-C comes, between two steps of the interpreter. In compiled code there are none, and where the interpreter's lock
exists nobody else runs meanwhile: who sees that nobody holds the buffer's lock needn't take it, which is a fifth of what a record costs."""


class Buffer:
    """Thread-safe. The application's side: `send`, `send_many`, `flush`. The producer's: the others.

    `wake` is called, with the lock held, when the producer's thread has something to take.
    Bound: records that aren't complete take at most `max_buffer_bytes`, or one batch where that is larger; a record that is larger than
    a batch may be in it in part: if it had to wait for all its room, smaller ones of other threads would take it each time.
    """

    def __init__(
        self,
        name: str,
        limits: BatchLimits,
        max_buffer_bytes: int,
        max_block_s: float,
        automatic_source: str | None = None,
    ) -> None:
        """`name`: source of records with a seq of the application's own and no source. `automatic_source`: of those without either."""
        self._name = name
        self._automatic_source = name if automatic_source is None else automatic_source
        self._limits = limits
        self._max_buffer_bytes = max_buffer_bytes
        self._max_block_s = max_block_s
        self._lock = threading.Lock()
        self._is_locked: Callable[[], bool] = self._lock.locked
        self._now_ns: Callable[[], int] = _now_ns
        guard = Guard(self._lock) if IS_COMPILED else None
        self._guard = cast(Guard, self._lock) if guard is None else guard  # the lock alone does as well for a `with`
        self.ends = Ends(guard)
        self._waiters: dict[Callable[[], None], None] = {}
        self.wake: Callable[[], None] = lambda: None
        self._open: OpenBatch | None = None
        self._values: list[bytes] = []
        self._timestamps_ms: list[int] = []
        # Bytes left in the open batch (below 0 where one large record fills it), and whether the usual case applies.
        self._room = 0
        self._is_plain = False
        self._record_limit = MAX_RECORD_BYTES + _COLUMN_BYTES
        self._full: deque[tuple[SharedBatch, RecordColumns]] = deque()
        self._used_bytes = 0
        self._numbers = 0
        # Those that may be incomplete, in order; which aren't is seen when another is opened.
        self._incomplete: deque[SharedBatch] = deque()
        self._identities: Identities | None = None
        self._term = 0
        self._is_to_be_taken_up = False
        self._is_taken_up = False
        self._stopped: SeriatimError | None = None
        self._on_stopped: Callable[[], None] = lambda: None
        self._problem: SeriatimError = NotElected("not elected yet: another instance may be, or none can be")

    # ---- the application's side --------------------------------------------------------------------------------

    def send(
        self,
        value: object,
        key: object = None,
        headers: object = None,
        seq: object = None,
        source: object = None,
        timestamp_ms: object = None,
    ) -> Handle:
        """See Producer.send, whose arguments these are: whatever an application made of them."""
        if key is None and seq is None and headers is None and timestamp_ms is None and type(value) is bytes:
            size = len(value) + _COLUMN_BYTES
            if size <= self._record_limit and source is None:
                handle: Handle | None = None
                if _IS_UNINTERRUPTED:
                    if not self._is_locked():
                        handle = self._put(value, size)
                else:
                    with self._guard:
                        if size <= self._record_limit:
                            handle = self._put(value, size)
                if handle is not None:
                    return handle
        record = checked(value, key, headers, seq, source, timestamp_ms)
        term: int | None = None
        give_up_at_s: float | None = None
        while True:
            with self._guard:
                term = self._term if term is None else term
                handle = self._admit(record, term)
                if handle is not None:
                    return handle
                if threading.get_ident() == self.ends.own_thread:
                    raise InvalidArgument("send would have to wait, and a callback must not block the producer")
                held = threading.Lock()
                held.acquire()
                self._waiters[held.release] = None
            now_s = monotonic_s()
            give_up_at_s = now_s + self._max_block_s if give_up_at_s is None else give_up_at_s
            try:
                is_worth_a_try = held.acquire(timeout=max(0.0, give_up_at_s - now_s))
            finally:
                self.forget(held.release)
            if not is_worth_a_try:
                raise self.reason_to_give_up()

    def _put(self, value: bytes, size: int) -> Handle | None:
        """The usual case: into the open batch. None: it isn't one. With the lock held, or nobody else running.

        The handle is made last: to make an object may start the collector, and then anybody may run.
        """
        room = self._room - size
        if room < 0 or not self._is_plain:
            return None
        self._room = room
        values = self._values
        values.append(value)
        self._timestamps_ms.append(self._now_ns() // 1_000_000)
        return Handle(self._open.shared, len(values) - 1)  # type: ignore[union-attr]

    def try_send(
        self, record: CheckedRecord, term: int | None, waiter: Callable[[], None]
    ) -> tuple[Handle | None, int]:
        """As `send`, without blocking: where it would, `waiter` is called, from any thread, once it is worth another try.

        Answers the term, too, which the next try of the same record hands back.
        """
        with self._guard:
            term = self._term if term is None else term
            handle = self._admit(record, term)
            if handle is None:
                self._waiters[waiter] = None
            return handle, term

    @property
    def term(self) -> int:
        """The present one, or the last, which who tries later hands to `try_send`."""
        return self._term

    def forget(self, waiter: Callable[[], None]) -> None:
        """Who waited for room, or for an election, doesn't any more."""
        with self._guard:
            self._waiters.pop(waiter, None)

    def reason_to_give_up(self) -> SeriatimError:
        """Why nothing can be sent just now."""
        with self._guard:
            problem = self._problem
            waited = f"waited {self._max_block_s} s; {problem.message}"
            if self._identities is None and not isinstance(problem, Unreachable | Waiting):
                return NotElected(waited)
            return type(problem)(waited, **problem.details)

    def send_many(self, given: Iterable[object]) -> Handles:
        """See Producer.send_many: values only."""
        runs: list[tuple[SharedBatch, int, int]] = []
        values: list[bytes] = []
        limit = self._record_limit
        for value in given:
            if type(value) is not bytes:
                raise InvalidArgument(f"a value is bytes, not {type(value).__name__}")
            self._check_size(len(value))
            values.append(value)
        ends = list(accumulate(len(value) + _COLUMN_BYTES for value in values))
        at = 0
        taken_bytes = 0
        while at < len(values):
            with self._guard:
                if self._record_limit < limit:  # an election brought the queue's limit meanwhile
                    for value in values[at:]:
                        self._check_size(len(value))
                    limit = self._record_limit
                # How many fit into the open batch; where none does, the slow path below opens one.
                stop = bisect_right(ends, taken_bytes + self._room) if self._is_plain else at
                if stop > at:
                    self._take_values(values[at:stop], runs)
                    self._room -= ends[stop - 1] - taken_bytes
                    taken_bytes = ends[stop - 1]
                    at = stop
            if at < len(values):
                handle = self.send(values[at])
                runs.append((handle.batch, handle.row, 1))
                taken_bytes = ends[at]
                at += 1
        return Handles(runs)

    def _take_values(self, values: Sequence[bytes], runs: list[tuple[SharedBatch, int, int]]) -> None:
        open_batch = self._open
        stamps_ms = [now_ms()] * len(values)
        if open_batch is not None:
            runs.append((open_batch.shared, len(open_batch.values), len(values)))
            open_batch.values.extend(values)
            open_batch.timestamps_ms.extend(stamps_ms)

    def flush(self) -> tuple[list[SharedBatch], SeriatimError | None]:
        """Close the open batch; the batches that what was sent before waits for, and what `failure_of` is to be asked with once they have ended."""
        self.ends.check_process()
        with self._guard:
            self._close_open()
            self._wake()
            return [shared for shared in self._incomplete if not shared.is_done], self.ends.failure

    def failure_of(self, waited_for: Iterable[SharedBatch], before: SeriatimError | None) -> SeriatimError | None:
        """What a flush raises, and by that tells of: how one of these batches failed, or records that nobody was told of when it began.

        So each of several that wait at the same time hears of it, whatever handles tell meanwhile.
        """
        failure = before
        for shared in waited_for:
            failure = shared.error or failure
        if failure is None:
            return None
        self.ends.tell_all()
        return copied(failure)

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left to take of a term that gives no more automatic seqs: what waits needs another one."""
        with self._guard:
            return self._identities is not None and self._identities.is_spent and not (self._open or self._full)

    def take_up(self, token: Token) -> None:
        """The application knows of the term with this token, and where its own seqs go on."""
        with self._guard:
            if self._identities is not None and self._identities.token == token:
                self._is_to_be_taken_up = False
                self._is_taken_up = True

    def leave_to_parent(self) -> None:
        """In a forked process: refuse everything. The locks are new ones, because who held the others doesn't run here."""
        self._lock = threading.Lock()
        self._is_locked = self._lock.locked
        guard = Guard(self._lock) if IS_COMPILED else None
        self._guard = cast(Guard, self._lock) if guard is None else guard
        self.ends.leave_to_parent(guard)
        self._is_plain = False
        self._stopped = made_before_fork()

    # ---- admission ---------------------------------------------------------------------------------------------

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes + _COLUMN_BYTES > self._record_limit:
            raise too_large(size_bytes, self._record_limit - _COLUMN_BYTES)

    def _admit(self, record: CheckedRecord, term: int) -> Handle | None:
        """Put a record into the open batch; None where that has to wait. With the lock held.

        What a signal's handler may break off, Ctrl-C above all, is what the interpreter runs: identities, clocks, `wake`. That comes
        before anything is changed, or after all is.
        """
        self._check_term(record, term)
        identities = self._identities
        if identities is None:
            return None
        self._check_size(record.size_bytes)
        size_bytes = record.size_bytes + _COLUMN_BYTES
        open_batch = self._batch_for(size_bytes, identities)
        if open_batch is None:
            return None
        seq = record.seq
        source = record.source
        if source is None:
            source = self._automatic_source if seq is None else self._name
        is_new = open_batch is not self._open
        if is_new:
            open_batch.seqs = None if seq is None else []
        elif seq is not None or open_batch.seqs is not None:
            self._is_plain = False
            open_batch.give_seqs(identities)
        stamp_ms = now_ms() if record.timestamp_ms is None else record.timestamp_ms
        if seq is None:
            identities.check_automatic()
            if open_batch.seqs is not None:
                seq = identities.automatic(1)
        elif identities.is_resumed(source, seq):
            return Handle(_stored_before(source, seq, self.ends), 0)
        if is_new:
            self._begin(open_batch)
        self._room -= size_bytes
        row = open_batch.append(record, stamp_ms, seq, source)
        self._is_plain = open_batch.is_plain
        if is_new:
            self._wake()
        return Handle(open_batch.shared, row)

    def _batch_for(self, size_bytes: int, identities: Identities) -> OpenBatch | None:
        """The open batch, or where that has no room another one, which isn't begun yet; None where that has to wait."""
        open_batch = self._open
        if open_batch is not None:
            if size_bytes <= self._room and len(open_batch.source_names) < MAX_SOURCES - 1:
                return open_batch
            self._close_open()
            self._wake()
        if identities.is_spent or not self._has_room():
            return None
        return OpenBatch(SharedBatch(self._numbers + 1, self.ends))

    def _has_room(self) -> bool:
        """For another batch."""
        return not self._used_bytes or self._used_bytes + self._limits.batch_bytes <= self._max_buffer_bytes

    def _check_term(self, record: CheckedRecord, term: int) -> None:
        if self._stopped is not None:
            raise copied(self._stopped)
        is_over = self._term > 0 and (term or 1) != self._term  # who came before the first term waits for that one
        if record.seq is not None and (self._is_to_be_taken_up or is_over):
            # Records before this one ended as unknown: going on behind them would leave a gap for good (H4).
            raise NotElected("deposed meanwhile: call wait_until_elected, and go on from its resume point")

    def _begin(self, open_batch: OpenBatch) -> None:
        self._numbers += 1
        self._open = open_batch
        while self._incomplete and self._incomplete[0].is_done:
            self._incomplete.popleft()
        self._incomplete.append(open_batch.shared)
        self._values = open_batch.values
        self._timestamps_ms = open_batch.timestamps_ms
        self._room = self._limits.batch_bytes

    def _close_open(self) -> None:
        open_batch, identities = self._open, self._identities
        if open_batch is None or identities is None or not open_batch.values:
            return
        shared = open_batch.shared
        columns = open_batch.closed(identities)  # where that is broken off, the batch is still open
        shared.size_bytes = self._limits.batch_bytes - self._room
        self._used_bytes += shared.size_bytes
        self._open = None
        self._is_plain = False
        self._full.append((shared, columns))

    def _wake(self) -> None:
        try:
            self.wake()
        except BaseException:
            self.wake()  # broken off by a signal's handler: nobody else would wake the producer for what is there now
            raise

    # ---- the producer's side -----------------------------------------------------------------------------------

    def take(self, in_flight: int) -> tuple[SharedBatch, RecordColumns] | None:
        """The next batch to send, None where none is to be sent yet."""
        with self._guard:
            if not self._full and self._open is not None and self._closes_in_s(in_flight) == 0.0:
                self._close_open()
            return self._full.popleft() if self._full else None

    def closes_in_s(self, in_flight: int) -> float | None:
        """In how many seconds `take` has something; None: not before a wake."""
        with self._guard:
            return 0.0 if self._full else self._closes_in_s(in_flight)

    def _closes_in_s(self, in_flight: int) -> float | None:
        open_batch = self._open
        if open_batch is None:
            return None
        age_s = monotonic_s() - open_batch.opened_at_s
        return closes_in_s(records=len(open_batch.values), age_s=age_s, in_flight=in_flight, limits=self._limits)

    def elect(
        self, token: Token, resume_point: Mapping[str, int] | None, held: Mapping[str, int] | None = None
    ) -> None:
        """A term begins."""
        with self._guard:
            self._term += 1
            self._identities = Identities(self._automatic_source, token, resume_point, held)
            self._problem = DeadlineOver("the buffer is full: records come faster than they are stored")
            self._notify()

    def set_record_limit(self, limit_bytes: int) -> None:
        """The link's limit on a record; 0: none but the format's own."""
        with self._guard:
            self._record_limit = min(limit_bytes or MAX_RECORD_BYTES, MAX_RECORD_BYTES) + _COLUMN_BYTES

    def depose(self, reason: str, in_flight: Iterable[SharedBatch]) -> None:
        """A term ends: everything that isn't complete fails as outcome unknown (H4)."""
        with self._guard:
            self._close_open()
            failed = [*in_flight, *(shared for shared, _ in self._full)]
            self._full.clear()
            self._used_bytes = 0
            if self._is_taken_up or (self._identities is not None and self._identities.has_own):
                self._is_to_be_taken_up = True
            self._is_taken_up = False
            self._identities = None
            self._problem = NotElected(f"deposed: {reason}")
            self._notify()
        for shared in failed:
            shared.finish(_unknown(reason))

    def complete(self, shared: SharedBatch) -> None:
        """A batch is at its end, and its memory free."""
        with self._guard:
            self._used_bytes -= shared.size_bytes
            self._notify()
        shared.finish()

    def note(self, problem: SeriatimError) -> None:
        """What the producer waits for just now, for whoever waits too long for it."""
        with self._guard:
            self._problem = problem

    def stop(self, error: SeriatimError) -> None:
        """Nothing can be sent any more."""
        with self._guard:
            if self._stopped is None:
                self._stopped = error
            self._notify()
        self._on_stopped()

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Call `callback`, on the producer's thread, when nothing can be sent any more."""
        self._on_stopped = callback

    @property
    def stopped(self) -> SeriatimError | None:
        """Why nothing can be sent any more; None while it can."""
        return self._stopped

    @property
    def problem(self) -> SeriatimError:
        """What the producer waits for, or waited for last; an error of its own for each raise.

        Only these kinds: an instance that was overtaken (Fenced), or had no answer in time, just stands by.
        """
        problem = self._problem
        kind = type(problem) if isinstance(problem, Unreachable | Waiting) else NotElected
        return kind(problem.message, **problem.details)

    @property
    def used_bytes(self) -> int:
        """Bytes of records that aren't complete, without those of the open batch."""
        return self._used_bytes

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            waiter()


def _unknown(reason: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"the record may have been stored or not: {reason}")


def _stored_before(source: str, seq: int, ends: Ends) -> SharedBatch:
    shared = SharedBatch(0, ends)
    shared.source = source
    shared.seqs = seq
    shared.is_done = True
    return shared
