"""The reader's own loop, on its own thread: nobody waits on for what it doesn't come to any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

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
