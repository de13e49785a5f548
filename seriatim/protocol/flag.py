"""How whoever waits is woken: by another thread or a signal's handler without a lock that the handler's own thread may hold already, or on a loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any


class Waking:
    """Whoever waits goes on once it was woken, be it before or during the wait, once or often.

    In the place of a `SimpleQueue`, whose `get` waits for ever where a signal's handler came between and ran until the time-out was over
    (CPython up to 3.12 goes on with a negative one), or for a time-out of a few microseconds.
    """

    def __init__(self) -> None:
        self._asleep = threading.Lock()  # held while nobody has woken anybody
        self._asleep.acquire()

    def wake(self) -> None:
        """By anybody; never waits."""
        with contextlib.suppress(RuntimeError):  # it was done already
            self._asleep.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it was woken, which is forgotten by that; waits up to `timeout_s`, from 0 on. None: for ever."""
        return self._asleep.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Flag:
    """As `threading.Event`, whose `set` takes a lock: in a signal's handler for ever, where it has interrupted a `wait` that holds it."""

    def __init__(self) -> None:
        self._is_set = False
        self._told = Waking()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._told.wake()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set; waits for that up to `timeout_s`."""
        if not self._is_set and self._told.wait(timeout_s):
            self._told.wake()  # whoever else waits
        return self._is_set


def set_from_anywhere(event: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Set an event of that loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(event.set)


async def is_set_within(event: asyncio.Event, within_s: float | None) -> bool:
    """Whether it is set; waits for that up to `within_s`, None: for ever."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def until_set(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do it until it is done, or the event is set: then it is cancelled, and its end is waited for. Raises what it raises."""
    tasks = asyncio.ensure_future(event.wait()), asyncio.ensure_future(work)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
