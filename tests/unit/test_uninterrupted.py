"""What was begun goes on when its caller has gone, and its lock isn't free before."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from seriatim.broker_group.uninterrupted import Lock, uninterrupted
from seriatim.protocol.errors import Unreachable
from seriatim.protocol.sharing import shared


class Disk:
    """Written slowly; what is remembered follows what is written."""

    def __init__(self) -> None:
        self.under_way: set[asyncio.Task[Any]] = set()
        self.lock = Lock()
        self.goes_on = asyncio.Event()
        self.written: list[int] = []
        self.remembered = 0

    @uninterrupted
    async def write(self, value: int) -> int:
        async with self.lock:
            self.written.append(value)
            await self.goes_on.wait()
            self.remembered = value
            return value

    @uninterrupted
    async def fail(self) -> None:
        raise OSError("no room")


def test_a_caller_that_gives_up_leaves_neither_half_of_it_nor_a_free_lock() -> None:
    async def scenario() -> None:
        disk = Disk()
        given_up = asyncio.create_task(disk.write(1))
        await asyncio.sleep(0.01)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        following = asyncio.create_task(disk.write(2))
        await asyncio.sleep(0.01)
        assert disk.written == [1]
        disk.goes_on.set()
        assert await following == 2
        assert (disk.written, disk.remembered) == ([1, 2], 2)
        await asyncio.sleep(0)
        assert not disk.under_way

    asyncio.run(scenario())


def test_who_gives_up_before_it_has_begun_leaves_nothing_behind() -> None:
    """While a disk hangs, all that came, each for some seconds, were kept, and done one after the other when it went on: 7,000 tasks in a test."""

    async def scenario() -> None:
        disk = Disk()
        begun = asyncio.create_task(disk.write(1))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(disk.write(value)) for value in range(2, 100)]
        await asyncio.sleep(0.01)
        for one in (begun, *waiting):
            one.cancel()
        await asyncio.wait([begun, *waiting])
        await asyncio.sleep(0)
        assert len(disk.under_way) == 1
        disk.goes_on.set()
        assert await disk.write(100) == 100
        assert (disk.written, disk.remembered) == ([1, 100], 100)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_before", [True, False])
def test_who_gives_up_when_its_turn_has_come_passes_it_on_or_has_begun(is_before: bool) -> None:
    async def scenario() -> None:
        disk = Disk()
        await disk.lock.acquire()
        given_up, following = (asyncio.create_task(disk.write(value)) for value in (1, 2))
        await asyncio.sleep(0.01)
        disk.goes_on.set()
        if is_before:
            given_up.cancel()
        disk.lock.release()
        given_up.cancel()
        assert await following == 2
        assert disk.written == ([2] if is_before else [1, 2])
        await asyncio.wait([given_up])

    asyncio.run(scenario())


def test_a_caller_that_waits_gets_the_error() -> None:
    async def scenario() -> None:
        with pytest.raises(OSError, match="no room"):
            await Disk().fail()

    asyncio.run(scenario())


@pytest.mark.parametrize(("failure", "said"), [(Unreachable("nobody answers"), 0), (KeyError("a defect"), 1)])
def test_what_fails_when_nobody_waits_any_more_is_said_where_it_is_a_defect(failure: Exception, said: int) -> None:
    async def scenario() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        goes_on = asyncio.Event()

        async def work() -> None:
            await goes_on.wait()
            raise failure

        task = asyncio.create_task(work())
        waiter = asyncio.create_task(shared(task))
        await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        goes_on.set()
        await asyncio.wait([task])
        del task
        await asyncio.sleep(0.01)
        gc.collect()
        assert [problem["exception"] for problem in problems] == [failure] * said

    asyncio.run(scenario())
