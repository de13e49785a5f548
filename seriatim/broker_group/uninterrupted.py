"""What has begun on a disk is done to its end, also when whoever asked for it has given up."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[_Arguments, Coroutine[Any, Any, _Result]]

_under_way: set[asyncio.Task[Any]] = set()


def uninterrupted(method: _Method[_Arguments, _Result]) -> _Method[_Arguments, _Result]:
    """For a method that changes the disk and what is remembered of it under a lock.

    Cut off between the two by a caller's deadline, it would leave a disk that is ahead of memory, and a lock that is free:
    the next one would decide by what is remembered, and write over what is newer.
    """

    @functools.wraps(method)
    async def whole(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        task = asyncio.get_running_loop().create_task(method(*arguments, **keywords))
        _under_way.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(_under_way.discard)
        return await asyncio.shield(task)

    return whole
