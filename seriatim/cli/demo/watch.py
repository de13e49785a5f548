"""Looks at the queue without pause, through `DescribeQueue` at any coordinator, on a thread and loop of its own.

The queue's committed end is what the outages of sending are measured by. It is looked at every 25 ms while a fault is
near (`is_close`), else every 150 ms: that, and some milliseconds for the answer, is how exact an outage is known.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any, Self

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.log import new_cause_id

_CLOSE_S = 0.025
_USUAL_S = 0.15
_TIMEOUT_S = 2.0
_START_S = 30.0


def committed_end(view: pb.QueueView) -> int:
    """The offset up to which the queue's records are committed, as far as the view tells."""
    return max(
        (link.base + link.committed_index for link in view.links if link.has_base and link.has_committed), default=0
    )


class Watch:
    """A context manager. Times are those of `time.monotonic`, in seconds."""

    def __init__(self, coordinators: str, queue: str) -> None:
        self._addresses = coordinators
        self._queue = queue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = threading.Event()
        self._began: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="demo watch", daemon=True)
        self._coordinators: Coordinators | None = None
        self.is_close = False
        self.view: pb.QueueView | None = None
        """The newest."""
        self.end = 0
        self.advances: list[tuple[float, int]] = []
        """When the committed end was seen higher than ever before, and how high."""
        self.problem = ""
        """Why there is no newer view; empty while all is well."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._began.result(_START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(2 * _TIMEOUT_S)

    def describe(self) -> pb.QueueView:
        """The queue now. Raises SeriatimErrors, TimeoutError."""
        view: pb.QueueView = self._asked("DescribeQueue", pb.QueueRequest(queue=self._queue))
        return view

    def elected_coordinator(self) -> str:
        """HOST:PORT; empty where none is. Raises SeriatimErrors, TimeoutError."""
        reply: pb.DescribeClusterReply = self._asked("DescribeCluster", pb.DescribeClusterRequest())
        return reply.elected_coordinator

    # ---- on the thread

    def _run(self) -> None:
        asyncio.run(self._look())

    async def _look(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Coordinators(self._addresses) as coordinators:
            self._coordinators = coordinators
            self._began.set_result(None)
            while not self._stopped.is_set():
                try:
                    request = pb.QueueRequest(queue=self._queue, cause_id=new_cause_id("demo"))
                    self._see(await coordinators.call("DescribeQueue", request, _TIMEOUT_S))
                except SeriatimError as error:
                    self.problem = error.message
                await asyncio.sleep(_CLOSE_S if self.is_close else _USUAL_S)

    def _see(self, view: pb.QueueView) -> None:
        end = committed_end(view)
        if end > self.end:
            self.advances.append((time.monotonic(), end))
            self.end = end
        self.view, self.problem = view, ""

    def _asked(self, method: str, request: Any) -> Any:
        if self._loop is None or self._coordinators is None:
            raise RuntimeError("the watch hasn't been started")
        call = self._coordinators.call(method, request, _TIMEOUT_S)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(2 * _TIMEOUT_S)
