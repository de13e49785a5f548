"""The reader's own loop, on its own thread: nobody waits on for what it doesn't come to any more."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from seriatim.consumer.loop import LoopThread
from seriatim.protocol.errors import InvalidArgument

WAIT_S = 60.0


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


class Handler:
    """Has something done by the loop at the line of this number, as a signal's handler may, in the middle of what waits for the loop already."""

    def __init__(self, thread: LoopThread, number: int) -> None:
        self._thread = thread
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        del frame
        self.left -= event == "line"
        if self.left == 0:
            sys.settrace(None)
            self._thread.run(asyncio.sleep(0), WAIT_S)
        return self if self.left > 0 else None


def test_a_signal_s_handler_may_wait_for_the_loop_that_it_has_interrupted_somebody_waiting_for() -> None:
    """Who commits each record is mostly there when SIGTERM comes; its handler closes the consumer, on the same thread."""
    thread, before, number = LoopThread("interrupted"), sys.gettrace(), 0
    while True:
        number += 1
        handler = Handler(thread, number)
        sys.settrace(handler)
        try:
            thread.run(asyncio.sleep(0.001), WAIT_S)
        finally:
            sys.settrace(before)
        if handler.left > 0:
            break
    assert number > 10
    thread.close()
