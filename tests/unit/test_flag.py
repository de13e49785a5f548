"""Who is told to stop by a signal's handler, which runs in the middle of whatever its thread does, also of its wait for that."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from seriatim.consumer import Subscriber
from seriatim.consumer.handover import HandOver
from seriatim.consumer.loop import LoopThread
from seriatim.consumer.spark.replay import Replay
from seriatim.producer.sources.postgres.capture import PostgresCapture
from seriatim.protocol import flag
from seriatim.protocol.errors import DeadlineOver
from seriatim.protocol.flag import Flag, until_set
from tests.interruption import Interruption

WAIT_S = 30.0


def a_replay() -> tuple[Callable[[], None], Any]:
    replay = Replay(SimpleNamespace(), print)
    return replay.stop, replay._run.stopping


def a_capture() -> tuple[Callable[[], None], Any]:
    capture = PostgresCapture("", "slot", "slot", (), SimpleNamespace(stop=lambda: None))
    return capture.stop, capture._stopped


@pytest.mark.parametrize("make", [a_replay, a_capture])
def test_wherever_a_signal_interrupts_who_waits_to_be_stopped_he_is_stopped(make) -> None:
    """A capture that waited for its database, or a replay, stood still for good after one SIGTERM in some thousands."""

    def wait(waiting: Any, interruption: Interruption) -> None:
        with interruption:
            waiting.wait(0.001)

    number = 0
    while True:
        number += 1
        stop, waiting = make()
        interruption = Interruption(number, stop, flag.__file__, threading.__file__)
        thread = threading.Thread(target=wait, args=(waiting, interruption), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"interrupted at {number}"
        if not interruption.has_come:
            break
        assert waiting.is_set()
    assert number > 3


def test_all_who_wait_are_told() -> None:
    told, everybody = Flag(), [threading.Thread(target=lambda: told.wait(WAIT_S), daemon=True) for _ in range(3)]
    for one in everybody:
        one.start()
    assert not told.wait(0.01)
    told.set()
    for one in everybody:
        one.join(WAIT_S)
        assert not one.is_alive()
    assert told.wait(0)


def in_a_loop(timeout_s: float) -> None:
    thread = LoopThread("slow")
    try:
        with suppress(DeadlineOver):
            thread.run(asyncio.sleep(2 * WAIT_S), timeout_s)
    finally:
        thread.close()


def elected(timeout_s: float) -> None:
    subscriber: Any = Subscriber("localhost:1", "q")
    subscriber._thread = object()  # open
    with suppress(DeadlineOver):
        subscriber.wait_elected(timeout_s)


@contextmanager
def a_signal(after_s: float, takes_s: float) -> Iterator[None]:
    """Its handler takes so long. Who waits for longer than WAIT_S after that fails."""
    has_come = False

    def handle(_number: int, _frame: object) -> None:
        nonlocal has_come
        assert not has_come, "it waits for ever"
        has_come = True
        time.sleep(takes_s)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, after_s, WAIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert has_come


@pytest.mark.parametrize("wait", [Flag().wait, HandOver().wait, in_a_loop, elected])
def test_who_waits_does_so_no_longer_for_a_signal_whose_handler_outlasts_the_time(wait) -> None:
    """A reader whose main thread was told to end while it waited for records, on a busy machine, waited on for ever."""
    with a_signal(0.1, 0.4):
        wait(0.3)


def test_work_ends_with_what_it_waits_for_once_it_is_to_stop() -> None:
    async def scenario() -> list[str]:
        stop, said = asyncio.Event(), []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                said.append("cleared away")

        asyncio.get_running_loop().call_later(0.01, stop.set)
        await until_set(stop, work())
        return said

    assert asyncio.run(scenario()) == ["cleared away"]


def test_work_that_ends_by_itself_says_how() -> None:
    async def works() -> None: ...

    async def fails() -> None:
        raise DeadlineOver("late")

    async def scenario() -> None:
        await until_set(asyncio.Event(), works())
        with pytest.raises(DeadlineOver):
            await until_set(asyncio.Event(), fails())

    asyncio.run(scenario())
