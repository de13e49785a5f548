"""An asyncio loop on a thread of its own, for use from plain threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from seriatim.protocol import rpc
from seriatim.protocol.errors import DeadlineOver

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines on its own thread until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(rpc.ignore_shared_poller)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Run to the end and return the result. Raises DeadlineOver after `timeout_s`, having cancelled it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineOver(f"not done within {timeout_s} s") from error
        except BaseException:
            future.cancel()
            raise

    async def elsewhere(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run there, awaited from another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function there, soon. Nothing happens once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
