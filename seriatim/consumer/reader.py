"""What `Consumer` and `Subscriber` have in common: a thread with a loop, and on it a session that stands for election.

Problem: a reader that an application drops without closing it, as by a `break` out of the records of one that it gave no name, would be
elected as long as its process lives, and nobody else would be handed anything.

Idea: its thread, and what runs there, knows it weakly only. So it is gone with the last that the application has of it, and its
finalizer has the thread resign and end.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

from seriatim.consumer.loop import LoopThread
from seriatim.consumer.session import ReaderSession, ReaderSettings
from seriatim.protocol import log

_log = log.logger("consumer")
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
        weakref.finalize(self, _dropped, thread, self._session, type(self).__name__.lower(), self.queue).atexit = False

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


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A reader's method for its own thread to call: nothing is done, and None answered, once the reader is gone."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = found()
        return None if bound is None else bound(*arguments)

    return call


def _dropped(thread: LoopThread, session: ReaderSession | None, kind: str, queue: str) -> None:
    """As a finalizer, in the middle of whatever any thread does: nothing here may wait."""

    async def resign() -> None:
        _log.warning(f"{kind} not closed, and nobody has it any more: it closes itself", queue=queue)
        if session is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await session.close()
            finally:
                session.leave()

    if thread.end_alone(resign):
        warnings.warn(f"unclosed {kind} of queue {queue!r}", ResourceWarning, stacklevel=1)
