"""How kazoo waits and hands over, at a fraction of the processor time; `ZooKeeperSession` uses it.

kazoo's own handler makes, fills and closes an epoll each time it waits, which is five times for one request, and wakes a thread
of its own to pass on each answer. Both together took a fifth of a coordinator's processor time.
"""

from __future__ import annotations

import logging
import math
import queue
import select
import socket
from collections.abc import Callable
from typing import Any

from kazoo.handlers.threading import SequentialThreadingHandler

_log = logging.getLogger("seriatim.protocol.zookeeper")
_Waited = list[socket.socket]
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL
"""Reading and writing will both say so."""


class _HandedOver(queue.Queue[Any]):
    """In the place of the queue of answers: one is passed on by the thread that has it. What ends the worker waits as before.

    Who asks only hands over to an event loop, which any thread may do, and which doesn't block.
    """

    def put(self, item: Callable[[], None] | object, block: bool = True, timeout: float | None = None) -> None:
        if not callable(item):
            super().put(item, block, timeout)
            return
        try:
            item()
        except Exception:
            _log.exception("an answer of ZooKeeper can't be passed on")


class Handler(SequentialThreadingHandler):  # type: ignore[misc] # kazoo has no types
    """kazoo's, but for how it waits for its sockets and passes on answers."""

    def __init__(self) -> None:
        super().__init__()
        self.completion_queue = _HandedOver()

    def select(
        self, readers: _Waited, writers: _Waited, others: _Waited, timeout: float | None = None
    ) -> tuple[_Waited, _Waited, _Waited]:
        """Those that may be read, and written, now; none where `timeout` seconds passed. Raises OSError, ValueError."""
        del others
        poll = select.poll()
        for one in {*readers, *writers}:
            poll.register(one, select.POLLIN * (one in readers) | select.POLLOUT * (one in writers))
        events = dict(poll.poll(None if timeout is None else math.ceil(timeout * 1000)))
        can_read = [one for one in readers if events.get(one.fileno(), 0) & (select.POLLIN | _ENDED)]
        can_write = [one for one in writers if events.get(one.fileno(), 0) & (select.POLLOUT | _ENDED)]
        return can_read, can_write, []
