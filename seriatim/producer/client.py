"""The producer as an application sees it."""

from __future__ import annotations

import asyncio
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Literal, Self

from seriatim.producer.buffer import Buffer
from seriatim.producer.core.batching import BATCH_BYTES, BatchLimits
from seriatim.producer.core.sender_state import SenderSettings
from seriatim.producer.guard import IS_COMPILED
from seriatim.producer.handle import Handle, Handles, SharedBatch
from seriatim.producer.line import Lines
from seriatim.producer.loop import LoopSettings, SendingLoop, all_done
from seriatim.producer.record import HeadersArgument, checked
from seriatim.producer.terms import Elected, Terms
from seriatim.protocol import lifecycle, values
from seriatim.protocol.batch import MAX_PAYLOAD_BYTES
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.election import check_name, made_up_name
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, SeriatimError, Unreachable, Waiting, copied
from seriatim.protocol.flag import Waking, is_set_within, set_from_anywhere
from seriatim.protocol.timeouts import SESSION_MAX_S, check_seconds, check_timeout

AUTOMATIC_SOURCE = "producer"
"""Of records that an application names nothing of. One for all such senders of a queue: their seqs rise with the token."""


class Producer:
    """Sends records to one queue while it is the queue's elected sender; stands by otherwise.

    Use it from plain threads (`send`) or from asyncio (`send_async`, `await handle`); both may share one. It runs a
    thread of its own; callbacks run there and must not block: whatever would have to wait there for the producer itself raises
    InvalidArgument. What a callback raises is logged, and harms no other.

    A signal's handler, or a finalizer, may run in the middle of any call of this class. Whatever it calls works there, or raises
    InvalidArgument where it would wait for the call that it interrupted (`abort` never does); without the compiled modules
    (setup.py) it may stand still there instead. Better: set an event in the handler, and close the producer elsewhere.

    Keep it open: each election takes one of 16,777,215 numbers that a queue has for senders whose records have no seqs of their own.
    When they are used up, such records are refused (TooManyElections); `seriatim status` warns in time.
    And close it: what isn't acknowledged when the process ends may never be sent. As a context manager it is closed at the end,
    or, where that comes by an exception, aborted. One that nobody has any more, and that wasn't closed, warns (ResourceWarning), and closes
    itself behind what it was given to send. Its callbacks are kept: who has it and gives it methods of their own has it as long.

    A forked process can't use its parent's producers: what sends or waits raises InvalidArgument there, and `close` does nothing. Nor
    can it have any of its own, where the parent's weren't closed before the fork: gRPC doesn't outlive one. Start processes by spawn.

    coordinators: "HOST:PORT,HOST:PORT" or a list; default: the environment's SERIATIM_COORDINATOR.
    name: this application in the election, and the source of records for which none is given: the same one for all its
        instances, and needed where seqs are the application's own and go on from instance to instance. Default: host,
        process and chance, and AUTOMATIC_SOURCE for records without a seq of their own. A queue remembers every source
        that it ever had: a name for each run would make it remember all runs. A source has seqs of the application's own
        for good, or never: where records without them came before, those lie above any usual seq of its own, and what is
        sent at or below them is taken for sent again, acknowledged without a place and not stored. Nobody can tell it from
        a record that was; automatic seqs after the application's own are refused where they would lie below.
    batch_bytes, linger_ms: how large and old a batch gets while others are on their way.
    max_buffer_bytes: bound on records that aren't complete; `send` waits for room. A record that is larger than `batch_bytes` waits no
        longer than others, and may go beyond it.
    max_block_s: how long `send` waits, for room or for being elected.
    acknowledgement_deadline_s: after so long without any acknowledgement the link counts as failed; grows by itself
        where acknowledgements are seen to take longer.
    on_elected(Elected), on_deposed(reason): told on the producer's thread.

    Raises InvalidArgument for settings that can't be. That nobody answers is met by the first `send` or
    `wait_until_elected`.
    """

    def __init__(
        self,
        coordinators: str | Iterable[str] | None,
        queue: str,
        name: str | None = None,
        *,
        batch_bytes: int = BATCH_BYTES,
        linger_ms: float = 5,
        max_buffer_bytes: int = 32 * 1024 * 1024,
        max_block_s: float = 60,
        compression: Literal["zstd"] | None = None,
        acknowledgement_deadline_s: float = 0.3,
        session_timeout_s: float = 4,
        on_elected: Callable[[Elected], None] | None = None,
        on_deposed: Callable[[str], None] | None = None,
    ) -> None:
        values.make_faster()
        any_coordinator = Coordinators(coordinators)
        self.queue = queue
        self.name = made_up_name() if name is None else name
        _check(self.queue, self.name, batch_bytes, max_buffer_bytes, compression)
        check_seconds("linger_ms", linger_ms, may_be_zero=True)
        check_seconds("max_block_s", max_block_s, may_be_zero=True)
        check_seconds("acknowledgement_deadline_s", acknowledgement_deadline_s)
        check_seconds("session_timeout_s", session_timeout_s, most=SESSION_MAX_S)
        limits, automatic_source = (
            BatchLimits(batch_bytes, linger_ms / 1000),
            AUTOMATIC_SOURCE if name is None else name,
        )
        self._buffer = Buffer(self.name, limits, max_buffer_bytes, max_block_s, automatic_source)
        # Who has this, or the producer, can send; the producer's thread has neither. A method that isn't compiled would be gone once it is called.
        self._sending = self._buffer.send if IS_COMPILED else partial(self._buffer.send)
        if type(self).send is _SEND:
            self.send = self._sending  # type: ignore[method-assign] # the same, one call less for each record
        self._max_block_s = max_block_s
        self._lines = Lines()
        self._terms = Terms(on_elected, on_deposed)
        self._buffer.when_stopped(self._terms.end)
        self._loop = SendingLoop(
            LoopSettings(queue, self.name, session_timeout_s, compression == "zstd"),
            SenderSettings(deadline_s=acknowledgement_deadline_s),
            self._buffer,
            any_coordinator,
            self._terms,
        )
        self._is_closed = False
        self._loop.start()
        weakref.finalize(self._sending, _dropped, self._loop, queue).atexit = False
        lifecycle.call_in_child(self, Producer._leave_to_parent)
        lifecycle.call_at_exit(self._loop, SendingLoop.tell_what_is_left)

    # ---- sending -----------------------------------------------------------------------------------------------

    def send(
        self,
        value: bytes,
        key: bytes | None = None,
        headers: HeadersArgument = None,
        seq: int | None = None,
        source: str | None = None,
        timestamp_ms: int | None = None,
    ) -> Handle:
        """Send one record; the handle tells where it is stored.

        Waits up to `max_block_s` while this instance stands by or the buffer is full. `seq` and `source` are the
        record's identity where the application has one (protocol.md 1); a seq at or below the resume point of the
        election is complete at once, because it is stored already. `timestamp_ms`: since 1970, default now.

        After a deposal, records with seqs of the application's own are refused until it has called
        `wait_until_elected`, which says where they go on: a record behind one that ended as unknown would be a gap.

        Raises NotElected, Waiting, Unreachable or DeadlineOver where the wait was in vain, RecordTooLarge,
        SeqNotRising, TooManySources, TooManyElections, InvalidArgument (also where the producer was closed, before or meanwhile); the record
        was then not sent, and no other is harmed.
        """
        return self._buffer.send(value, key, headers, seq, source, timestamp_ms)

    async def send_async(
        self,
        value: bytes,
        key: bytes | None = None,
        headers: HeadersArgument = None,
        seq: int | None = None,
        source: str | None = None,
        timestamp_ms: int | None = None,
    ) -> Handle:
        """As `send`, but waits without blocking the caller's loop. What is sent on one loop is stored in the order of the calls."""
        record = checked(value, key, headers, seq, source, timestamp_ms)
        loop, buffer = asyncio.get_running_loop(), self._buffer
        may_try = asyncio.Event()
        waiter = partial(set_from_anywhere, may_try, loop)
        if self._lines.is_anybody_before(loop):
            term = buffer.term
        else:
            handle, term = buffer.try_send(record, None, waiter)
            if handle is not None:
                return handle
        give_up_at_s = time.monotonic() + self._max_block_s
        with self._lines.standing(loop, may_try):
            try:
                while await is_set_within(may_try, max(0.0, give_up_at_s - time.monotonic())):
                    may_try.clear()
                    handle, term = buffer.try_send(record, term, waiter)
                    if handle is not None:
                        return handle
                raise buffer.reason_to_give_up()
            finally:
                buffer.forget(waiter)

    def send_many(
        self,
        values: Sequence[bytes],
        *,
        keys: Sequence[bytes | None] | None = None,
        seqs: Sequence[int] | None = None,
        source: str | None = None,
    ) -> Handles:
        """Send many records in order; quicker than one by one where only values are given.

        `keys` and `seqs` have one entry a value. Raises as `send`; then some of the first records may have been sent.
        """
        if keys is None and seqs is None and source is None:
            return self._buffer.send_many(values)
        if any(each is not None and len(each) != len(values) for each in (keys, seqs)):
            raise InvalidArgument("keys and seqs need one entry for each value")
        # Of what isn't given there is no end.
        each_key, each_seq = (repeat(None) if each is None else each for each in (keys, seqs))
        records = zip(values, each_key, each_seq, strict=False)
        return Handles.of([self._buffer.send(value, key, None, seq, source, None) for value, key, seq in records])

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every record sent before is at its end.

        Raises DeadlineOver where that takes longer than `timeout` seconds (`details["reason"]`: where it is known), OutcomeUnknown where the end of
        some record that it waited for was that, or of an earlier one and nobody was told: neither by its handle's `result`, or `await`, nor by
        a flush. Raises InvalidArgument for a `timeout` that can't be.
        """
        check_timeout(timeout)
        give_up_at_s = None if timeout is None else time.monotonic() + timeout
        incomplete, before = self._buffer.flush()
        for shared in incomplete:
            if not shared.wait(None if give_up_at_s is None else max(0.0, give_up_at_s - time.monotonic())):
                raise self._overdue(timeout)
        self._raise_failure(incomplete, before)

    def _overdue(self, timeout: float | None) -> DeadlineOver:
        problem = self._buffer.problem
        message = f"not everything was acknowledged within {timeout} s; it still may be"
        if not isinstance(problem, Unreachable | Waiting):
            return DeadlineOver(message)
        return DeadlineOver(f"{message}; {problem.message}", reason=problem.message)

    async def flush_async(self) -> None:
        """As `flush`, without blocking the caller's loop."""
        incomplete, before = self._buffer.flush()
        await all_done(incomplete)
        self._raise_failure(incomplete, before)

    def _raise_failure(self, waited_for: Sequence[SharedBatch], before: SeriatimError | None) -> None:
        failure = self._buffer.failure_of(waited_for, before)
        if failure is not None:
            raise failure

    # ---- election ----------------------------------------------------------------------------------------------

    @property
    def elected(self) -> Elected | None:
        """The term in which this instance is the elected sender, as far as its loop has told; None: it isn't."""
        return self._terms.elected

    @property
    def is_elected(self) -> bool:
        """Whether this instance is the elected sender, as far as it can know: where its loop stands still, another one may be."""
        return self._terms.elected is not None and self._loop.is_live

    @property
    def is_live(self) -> bool:
        """Whether its loop turns: not where a callback has kept it for longer than its ZooKeeper session has, nor once it is closed."""
        return self._loop.is_live

    @property
    def is_connected(self) -> bool:
        """Whether it stands in the election, elected or not: its ZooKeeper session is known to live."""
        return self._loop.is_connected

    def wait_until_elected(self, timeout: float | None = None) -> Elected:
        """Wait until this instance may send; its token and the resume point.

        After a deposal the application's own seqs go on from here. Raises NotElected, Waiting or Unreachable after
        `timeout` seconds, saying what was waited for; UnknownQueue and others that can't get better, at once, as InvalidArgument
        where the producer was closed.
        """
        check_timeout(timeout)
        give_up_at_s = None if timeout is None else time.monotonic() + timeout
        may_look = Waking()
        waiter = may_look.wake
        try:
            self._terms.waiters[waiter] = None  # before the first look
            while (elected := self._taken_up()) is None:
                left_s = None if give_up_at_s is None else give_up_at_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise self._buffer.problem
                self._buffer.ends.check_wait()
                may_look.wait(left_s)
        finally:
            self._terms.waiters.pop(waiter, None)
        return elected

    async def wait_until_elected_async(self) -> Elected:
        """As `wait_until_elected`, without blocking the caller's loop."""
        may_look = asyncio.Event()
        waiter = partial(set_from_anywhere, may_look, asyncio.get_running_loop())
        try:
            self._terms.waiters[waiter] = None
            while (elected := self._taken_up()) is None:
                await may_look.wait()
                may_look.clear()
        finally:
            self._terms.waiters.pop(waiter, None)
        return elected

    def _taken_up(self) -> Elected | None:
        """The term, whose records are taken from now on; None while there is none. Raises why there will be none any more."""
        elected, stopped = self._terms.elected, self._buffer.stopped
        if elected is not None:
            self._buffer.take_up(elected.token)
        elif stopped is not None:
            raise copied(stopped)
        return elected

    def stand_again(self) -> None:
        """Give this election up and stand for the next one: for a new resume point, or to let another instance go first.

        Does nothing while standing by. What isn't complete ends as outcome unknown. `wait_until_elected` waits for the next term
        from now on.
        """
        if not self._is_closed:
            self._terms.end()
            self._loop.stand_again()

    def _leave_to_parent(self) -> None:
        """In a process that was forked from the one that it runs in: refuse everything, and leave nothing to close."""
        self._buffer.leave_to_parent()
        self._terms.elected = None
        self._is_closed = True

    # ---- the end -----------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = 30) -> None:
        """Flush, leave the election, end the thread. What isn't complete within `timeout` ends as outcome unknown.

        Raises as `flush`; the producer is closed all the same. A second call does nothing. Raises InvalidArgument for a
        `timeout` that can't be, and where it must not wait, in a callback say (call `abort` there); then nothing is closed.
        """
        check_timeout(timeout)
        if self._is_closed:
            return
        self._buffer.ends.check_wait()
        self._is_closed = True
        try:
            self.flush(timeout)
        finally:
            self._loop.close(10)

    def abort(self) -> None:
        """Close at once: what isn't complete ends as outcome unknown. Soon after in a callback, where `close` is refused, and where it waits already."""
        is_first, self._is_closed = not self._is_closed, True
        if not self._buffer.ends.is_in_parent:
            self._loop.close(10 if is_first and self._buffer.ends.may_wait else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        await asyncio.to_thread(self.close if error is None else self.abort)


def _dropped(loop: SendingLoop, queue: str) -> None:
    """Nobody can send any more. As a finalizer, in the middle of whatever any thread does: nothing here may wait."""
    if loop.close_behind_last():
        warnings.warn(f"unclosed producer of queue {queue!r}", ResourceWarning, stacklevel=1)


_SEND = Producer.send
"""The method that producers have by themselves: not what somebody put in its place."""


def _check(queue: object, name: object, batch_bytes: int, max_buffer_bytes: int, compression: str | None) -> None:
    if not isinstance(queue, str) or not queue:
        raise InvalidArgument("name the queue")
    if not isinstance(name, str):
        raise InvalidArgument(f"a producer's name is text, not {type(name).__name__}")
    check_name(name, "producer")
    sizes: tuple[tuple[str, object], ...] = (("batch_bytes", batch_bytes), ("max_buffer_bytes", max_buffer_bytes))
    for setting, size in sizes:
        if not isinstance(size, int):
            raise InvalidArgument(f"{setting} is a whole number, not {size!r}")
    if not 1 <= batch_bytes <= MAX_PAYLOAD_BYTES // 2:
        raise InvalidArgument(f"batch_bytes is 1 to {MAX_PAYLOAD_BYTES // 2}, not {batch_bytes}")
    if max_buffer_bytes < 1:
        raise InvalidArgument(f"max_buffer_bytes is at least 1, not {max_buffer_bytes}")
    if compression not in (None, "zstd"):
        raise InvalidArgument(f"compression is None or 'zstd', not {compression!r}")
