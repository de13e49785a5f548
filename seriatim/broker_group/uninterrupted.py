"""What has begun on a disk is done to its end, also when whoever asked for it has given up."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from seriatim.protocol.sharing import shared


class Working(Protocol):
    """`under_way`: the tasks that were begun; the loop itself holds tasks weakly."""

    under_way: set[asyncio.Task[Any]]


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound=Working)
_Method = Callable[Concatenate[_Self, _Arguments], Coroutine[Any, Any, _Result]]


def uninterrupted(method: _Method[_Self, _Arguments, _Result]) -> _Method[_Self, _Arguments, _Result]:
    """For a method that changes the disk and what is remembered of it under a lock.

    Cut off between the two by a caller's deadline, it would leave a disk that is ahead of memory, and a lock that is free:
    the next one would decide by what is remembered, and write over what is newer.
    """

    @functools.wraps(method)
    async def whole(self: _Self, /, *arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        task = asyncio.get_running_loop().create_task(method(self, *arguments, **keywords))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return await shared(task)

    return whole
