"""Waiting for work that goes on when whoever waits for it has given up."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from seriatim.protocol.errors import SeriatimError

Result = TypeVar("Result")


async def shared(task: asyncio.Task[Result]) -> Result:
    """The result of a task that isn't cancelled with its waiter; several may wait for one.

    What it fails with when its waiter has gone is of no use to anybody, unless it is a defect: the loop says that.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_left_alone)
        raise


def _left_alone(task: asyncio.Task[Result]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, SeriatimError):
        context = {"message": "a task failed that nobody waits for any more", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)
