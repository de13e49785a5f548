"""What was begun goes on when its caller has gone, and its lock isn't free before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seriatim.broker_group.uninterrupted import uninterrupted


class Disk:
    """Written slowly; what is remembered follows what is written."""

    def __init__(self) -> None:
        self.under_way: set[asyncio.Task[Any]] = set()
        self.lock = asyncio.Lock()
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


def test_a_caller_that_waits_gets_the_error() -> None:
    async def scenario() -> None:
        with pytest.raises(OSError, match="no room"):
            await Disk().fail()

    asyncio.run(scenario())
