"""Looks at the queue without pause, through `DescribeQueue` at any coordinator, on a thread and loop of its own.

The queue's committed end is what the outages of sending are measured by. It is looked at every 25 ms while a fault is
near (`is_close`), else every 150 ms: that, and some milliseconds for the answer, is how exact an outage is known.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Self

from seriatim.consumer.loop import LoopThread
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.log import new_cause_id

_CLOSE_S = 0.025
_USUAL_S = 0.15
_TIMEOUT_S = 2.0


def committed_end(view: pb.QueueView) -> int:
    """The offset up to which the queue's records are committed, as far as the view tells."""
    return max(
        (link.base + link.committed_index for link in view.links if link.has_base and link.has_committed), default=0
    )


class Watch:
    """A context manager. Times are those of `time.monotonic`, in seconds."""

    def __init__(self, coordinators: str, queue: str) -> None:
        self._queue = queue
        self._coordinators = Coordinators(coordinators)
        self._thread = LoopThread("demo watch")
        self._looking: asyncio.Task[None] | None = None
        self.is_close = False
        self.view = pb.QueueView()
        """The newest; an empty one before the first."""
        self.end = 0
        self.advances: list[tuple[float, int]] = []
        """When the committed end was seen higher than ever before, and how high."""
        self.problem = ""
        """Why there is no newer view; empty while all is well."""

    def __enter__(self) -> Self:
        self._thread.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.end(self._end(), 2 * _TIMEOUT_S)

    def describe(self) -> pb.QueueView:
        """The queue now. Raises SeriatimErrors."""
        view: pb.QueueView = self._asked("DescribeQueue", pb.QueueRequest(queue=self._queue))
        return view

    def elected_coordinator(self) -> str:
        """HOST:PORT; empty where none is. Raises SeriatimErrors."""
        reply: pb.DescribeClusterReply = self._asked("DescribeCluster", pb.DescribeClusterRequest())
        return reply.elected_coordinator

    # ---- on the thread

    async def _begin(self) -> None:
        self._looking = asyncio.create_task(self._look())

    async def _end(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._coordinators.close()

    async def _look(self) -> None:
        while True:
            try:
                request = pb.QueueRequest(queue=self._queue, cause_id=new_cause_id("demo"))
                self._see(await self._coordinators.call("DescribeQueue", request, _TIMEOUT_S))
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
        return self._thread.run(self._coordinators.call(method, request, _TIMEOUT_S), 2 * _TIMEOUT_S)
