"""The reader's own loop, on its own thread: nobody waits on for what it doesn't come to any more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from seriatim.consumer import RangeReader, Subscriber
from seriatim.consumer import subscriber as subscriber_module
from seriatim.consumer.commits import OVERDUE
from seriatim.consumer.loop import LoopThread
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import DeadlineOver, InvalidArgument
from seriatim.protocol.names import Offset
from tests.interruption import Interruption

WAIT_S = 30.0


def test_who_waits_for_what_is_closed_is_told_so() -> None:
    """Neither are they left waiting, nor cancelled, which would end a task of the application's without a word."""
    thread, has_begun, told = LoopThread("closed"), threading.Semaphore(0), list[type[BaseException]]()

    async def forever() -> None:
        has_begun.release()
        await asyncio.get_running_loop().create_future()

    def wait(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            told.append(type(error))

    calls = (lambda: thread.run(forever()), lambda: asyncio.run(thread.elsewhere(forever())))
    waiting = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
    for one in waiting:
        one.start()
        assert has_begun.acquire(timeout=WAIT_S)
    thread.close()
    for one in waiting:
        one.join(WAIT_S)
    assert told == [InvalidArgument, InvalidArgument]


def test_who_comes_to_what_is_closed_is_told_so() -> None:
    """As a commit that another thread has just closed the consumer of: no task of the loop's is left that nobody runs."""
    thread = LoopThread("closed")
    thread.close()
    for wait in (thread.run, lambda coroutine: asyncio.run(thread.elsewhere(coroutine))):
        with pytest.raises(InvalidArgument):
            wait(asyncio.sleep(0))
    assert not thread.tell(print)


def test_who_comes_while_it_is_closed_is_told_so(monkeypatch) -> None:
    """Having looked just before. What the loop waits for then, such as the thread that ends a session, takes some milliseconds."""
    monkeypatch.setattr(LoopThread, "is_running", True)
    thread, is_closing, has_begun, told = LoopThread("closing"), threading.Event(), asyncio.Event(), list[str]()
    shut_down = thread._loop.shutdown_default_executor

    async def late() -> None:
        is_closing.set()
        await has_begun.wait()
        await shut_down()

    async def forever() -> None:
        has_begun.set()
        await asyncio.get_running_loop().create_future()

    def wait() -> None:
        is_closing.wait(WAIT_S)
        with pytest.raises(InvalidArgument) as error:
            thread.run(forever())
        told.append(str(error.value))

    thread._loop.shutdown_default_executor = late
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    thread.close()
    waiting.join(WAIT_S)
    assert told == ["it is closed"]


def test_a_signal_s_handler_may_wait_for_the_loop_that_it_has_interrupted_somebody_waiting_for() -> None:
    """Who commits each record is mostly there when SIGTERM comes; its handler closes the consumer, on the same thread."""
    thread, number = LoopThread("interrupted"), 0
    while True:
        number += 1
        with Interruption(number, lambda: thread.run(asyncio.sleep(0), WAIT_S)) as interruption:
            thread.run(asyncio.sleep(0.001), WAIT_S)
        if not interruption.has_come:
            break
    assert number > 10
    thread.close()


class OfSubscriber:
    """A session that is open, and nobody elected."""

    waiting_for = "being elected"

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    async def close(self) -> None:
        self._subscriber._leased(0.0)

    def leave(self) -> None:
        pass


def test_a_signal_s_handler_may_close_the_subscriber_that_it_has_interrupted_somebody_waiting_for() -> None:
    """Its loop waited for a lock that the waiting thread held, and the handler for the loop: one SIGTERM in some thousands was for ever."""

    def wait(subscriber: Subscriber, interruption: Interruption) -> None:
        with interruption, contextlib.suppress(DeadlineOver, InvalidArgument):
            subscriber.wait_elected(0.001)

    number = 0
    while True:
        number += 1
        subscriber: Any = Subscriber("127.0.0.1:1", "orders")
        subscriber._thread, subscriber._session = LoopThread("interrupted"), OfSubscriber(subscriber)
        interruption = Interruption(number, subscriber.close, subscriber_module.__file__, threading.__file__)
        waiting = threading.Thread(target=wait, args=(subscriber, interruption), daemon=True)
        waiting.start()
        waiting.join(WAIT_S)
        assert not waiting.is_alive(), f"interrupted at {number}"
        subscriber.close()
        if not interruption.has_come:
            break
    assert number > 5


def test_who_waits_for_a_subscriber_to_be_elected_is_told_that_it_is_closed_or_was_never_open() -> None:
    """They waited for ever for an election that nobody stood in any more."""
    subscriber: Any = Subscriber("127.0.0.1:1", "orders")
    with pytest.raises(InvalidArgument, match="isn't open"):
        subscriber.wait_elected()
    subscriber._thread, subscriber._session = LoopThread("closed meanwhile"), OfSubscriber(subscriber)
    told: list[InvalidArgument] = []

    def wait() -> None:
        try:
            subscriber.wait_elected()
        except InvalidArgument as error:
            told.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    subscriber.close()
    waiting.join(WAIT_S)
    assert len(told) == 1


def test_a_time_out_beyond_what_the_system_can_wait_is_refused() -> None:
    """`Consumer.commit` and others raised OverflowError, having begun what they were asked for."""
    thread, begun = LoopThread("patient"), list[bool]()

    async def begin() -> None:
        begun.append(True)

    try:
        for timeout_s in (1e12, float("inf"), float("nan")):
            with pytest.raises(InvalidArgument, match="a time-out is a number of seconds, at most"):
                thread.run(begin(), timeout_s)
        assert not begun
    finally:
        thread.close()


def test_who_is_told_that_a_commit_is_overdue_is_told_that_it_may_still_be_done() -> None:
    thread = LoopThread("test")
    try:
        with pytest.raises(DeadlineOver, match="not done within 0 s: the commit may still be"):
            thread.run(asyncio.sleep(60), 0, OVERDUE)
    finally:
        thread.close()


@pytest.mark.parametrize("is_reading", [False, True])
def test_a_range_reader_that_nobody_has_any_more_ends_its_thread_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_reading: bool
) -> None:
    """It was kept as long as the process lived, with its connections, and all that it had fetched ahead."""

    async def told(*_: object) -> pb.QueueView:
        return pb.QueueView(queue="q", queue_id=1)

    async def watched(*_: object) -> AsyncIterator[pb.QueueView]:
        await asyncio.get_running_loop().create_future()
        yield pb.QueueView()

    monkeypatch.setattr(Coordinators, "call_within", told)
    monkeypatch.setattr(Coordinators, "watch", watched)
    reader = RangeReader("127.0.0.1:1", "q")
    if is_reading:
        reader._thread.run(reader._begin(Offset(0), Offset(5)))
    thread = reader._thread._thread
    with pytest.warns(ResourceWarning, match="unclosed range reader of queue 'q'"):
        del reader
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "range reader not closed, and nobody has it any more" in caplog.text


def test_a_range_reader_that_is_closed_says_nothing_when_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    with RangeReader("127.0.0.1:1", "q") as reader:
        thread = reader._thread._thread
    del reader
    assert not thread.is_alive()
    assert not caplog.text
