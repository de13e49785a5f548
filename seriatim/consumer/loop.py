"""An asyncio loop on a thread of its own, for use from plain threads.

Problem: a reader that an application drops without closing it, as by a `break` out of the records of one that it gave no name, would
have its thread, and be elected, as long as its process lives, and nobody else would be handed anything.

Idea: its thread, and what runs there, knows it weakly only (`weakly`). So it is gone with the last that the application has of it, and
its finalizer has the thread end (`LoopThread.end_when_dropped`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from seriatim.protocol import log, rpc
from seriatim.protocol.errors import DeadlineOver, InvalidArgument
from seriatim.protocol.flag import Waking
from seriatim.protocol.timeouts import check_timeout

_log = log.logger("consumer")
Result = TypeVar("Result")
_CLOSED = "it is closed"


class LoopThread:
    """Runs coroutines on its own thread until it is closed."""

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._is_stopped = False
        self._ending: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(rpc.ignore_shared_poller)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            # Once more at the end: what was begun meanwhile is waited for as well.
            for last in (_nothing_left, loop.shutdown_asyncgens, loop.shutdown_default_executor, _nothing_left):
                loop.run_until_complete(last())
            rpc.forget(loop)
            loop.close()

    @property
    def is_running(self) -> bool:
        """Whether anything is done there any more: not once it is closed, nor in a forked process, nor while the interpreter ends."""
        # Not by `is_alive`, which Ctrl-C may leave with the wrong answer for good.
        return not self._is_stopped and os.getpid() == self._process and not sys.is_finalizing()

    def check_may_wait(self) -> None:
        """Raises InvalidArgument on this very thread: what a callback waited for would go on only when the callback has returned."""
        if threading.current_thread() is self._thread:
            raise InvalidArgument("a callback can't wait for whoever called it: do that on another thread")

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None, overdue: str = "") -> Result:
        """Run to the end and return the result.

        Raises DeadlineOver after `timeout_s`, having cancelled it, which says what became of it where `overdue` does, InvalidArgument where this is closed, before or meanwhile, and as `check_may_wait`
        and `check_timeout`.
        """
        try:
            self.check_may_wait()
            check_timeout(timeout_s)
        except InvalidArgument:
            coroutine.close()
            raise
        # A concurrent.futures.Future has a lock, for which the loop would wait where a signal's handler has interrupted who holds it.
        is_ended = Waking()
        begun: list[asyncio.Task[Result]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(coroutine))
            begun[0].add_done_callback(end)

        def end(task: asyncio.Task[Result]) -> None:
            if not task.cancelled():
                task.exception()  # which may interest nobody any more
            is_ended.wake()

        def give_up() -> None:
            for task in begun:
                task.cancel()

        if not self.tell(begin):
            coroutine.close()
            raise InvalidArgument(_CLOSED)
        try:
            is_in_time = is_ended.wait(None if timeout_s is None else max(0.0, timeout_s))
        except BaseException:
            self.tell(give_up)
            raise
        if not is_in_time:
            self.tell(give_up)
            raise DeadlineOver(f"not done within {timeout_s} s{overdue and ': '}{overdue}")
        try:
            return begun[0].result()
        except asyncio.CancelledError as error:
            raise InvalidArgument(_CLOSED) from error

    async def elsewhere(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run there, awaited from another loop. Raises InvalidArgument where this is closed, before or meanwhile."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise InvalidArgument(_CLOSED) from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise InvalidArgument(_CLOSED) from error

    def tell(self, function: Callable[..., object], *arguments: object) -> bool:
        """Call a function there, soon. False: nobody does any more."""
        if not self.is_running:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # closed at this moment
            return False
        return True

    def end(
        self, last: Coroutine[Any, Any, object], timeout_s: float, behind: Callable[[], object] = lambda: None
    ) -> None:
        """Run `last`, call `behind`, and close: each of them also where the one before it was interrupted. Raises as `run`.

        Where it is closed already, or in a forked process, there is nothing to end.
        """
        if not self.is_running:
            last.close()
            return
        try:
            self.run(last, timeout_s)
        finally:
            try:
                behind()
            finally:
                self.close()

    def end_when_dropped(
        self, client: object, kind: str, queue: str, last: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        """When nobody has `client` any more, and this runs still: warn, end what runs here, run `last`, and close. `last` must not have it."""
        weakref.finalize(client, self._dropped, kind, queue, last).atexit = False

    def _dropped(self, kind: str, queue: str, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """As a finalizer, in the middle of whatever any thread does: no lock is taken, and nothing waited for, nor logged, before that thread has its turn."""

        def begin() -> None:
            _log.warning(f"{kind} not closed, and nobody has it any more: it closes itself", queue=queue)
            self._ending = self._loop.create_task(self._ended(last))

        if self.tell(begin):
            warnings.warn(f"unclosed {kind} of queue {queue!r}", ResourceWarning, stacklevel=1)

    async def _ended(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await _nothing_left()
            await last()
        finally:
            self._is_stopped = True
            self._loop.stop()

    def close(self) -> None:
        """End what runs there, and the thread."""
        if self.is_running:
            self._is_stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A reader's method for its own thread to call: nothing is done, and None answered, once the reader is gone."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = found()
        return None if bound is None else bound(*arguments)

    return call


async def _nothing_left() -> None:
    """What still runs is cancelled, and comes to its end."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
