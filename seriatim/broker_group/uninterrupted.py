"""What has begun on a disk is done to its end, also when whoever asked for it has given up."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

from seriatim.protocol.sharing import shared


class Working(Protocol):
    """`under_way`: the tasks that were begun; the loop itself holds tasks weakly."""

    under_way: set[asyncio.Task[Any]]


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound=Working)
_Method = Callable[Concatenate[_Self, _Arguments], Coroutine[Any, Any, _Result]]


_begun: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()


class Lock(asyncio.Lock):
    """Of those under which the disk is changed: whoever has it has begun."""

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        task = asyncio.current_task()
        if task is not None:
            _begun.add(task)
        return True


def uninterrupted(method: _Method[_Self, _Arguments, _Result]) -> _Method[_Self, _Arguments, _Result]:
    """For a method that changes the disk and what is remembered of it under a `Lock`.

    Cut off between the two by a caller's deadline, it would leave a disk that is ahead of memory, and a lock that is free:
    the next one would decide by what is remembered, and write over what is newer. As long as it only waits for its first lock it has
    begun nothing, and ends with its caller: all that come while a disk hangs would else pile up behind it.
    """

    @functools.wraps(method)
    async def whole(self: _Self, /, *arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        task = asyncio.get_running_loop().create_task(method(self, *arguments, **keywords))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        try:
            return await shared(task)
        except asyncio.CancelledError:
            if task not in _begun:
                task.cancel()
            raise

    return whole
