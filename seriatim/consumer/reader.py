"""What `Consumer` and `Subscriber` have in common: a thread with a loop, and on it a session that stands for election."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Self

from seriatim.consumer.loop import LoopThread
from seriatim.consumer.session import ReaderSession, ReaderSettings

CLOSE_TIMEOUT_S = 5.0


class Reader(ABC):
    """See the module. A context manager."""

    def __init__(self, coordinators: str | Iterable[str] | None, settings: ReaderSettings) -> None:
        self.queue = settings.queue
        self._coordinators = coordinators
        self._settings = settings
        self._thread: LoopThread | None = None
        self._session: ReaderSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @abstractmethod
    def open(self) -> Self:
        """Connect, and stand for election."""

    @abstractmethod
    def close(self) -> None:
        """Stop, and resign."""

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_live(self) -> bool:
        """Whether its loop turns: not where a callback has kept it for longer than its ZooKeeper session has."""
        return self._session is None or self._session.is_live

    @property
    def is_connected(self) -> bool:
        """Whether it stands in the election, elected or not: its ZooKeeper session is known to live."""
        return self._session is not None and self._session.is_connected

    def _leave(self) -> None:
        if self._session is not None:
            self._session.leave()

    def _opened_on(self, thread: LoopThread) -> None:
        """It is open, and closed at latest when nobody has it any more."""
        self._thread = thread
        thread.end_when_dropped(self, type(self).__name__.lower(), self.queue, partial(_resign, self._session))

    # ---- on the loop

    async def _stand(self, session: ReaderSession) -> None:
        """Connect, and stand for election from now on. Raises as `connect`."""
        try:
            await session.connect()
        except BaseException:
            await session.close()
            raise
        self._session = session
        self._tasks.append(asyncio.create_task(session.run()))

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


async def _resign(session: ReaderSession | None) -> None:
    if session is not None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await session.close()
        finally:
            session.leave()
