"""How kazoo waits and hands over, at a fraction of the processor time; `ZooKeeperSession` uses it.

kazoo's own handler makes, fills and closes an epoll each time it waits, which is five times for one request, and wakes a thread
of its own to pass on each answer. Both together took a fifth of a coordinator's processor time.

Who asks wakes kazoo's thread, by a byte for each request in a pair of sockets that holds some hundred: then it waits for that thread. That
is no way for an event loop, and the end where it is kazoo's thread itself that asks, in what an answer led to. Here that is a number.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import ConnectionDropped, ConnectionLoss
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.retry import ForceRetryError

_log = logging.getLogger("seriatim.protocol.zookeeper")
_Waited = list[Any]
"""Sockets, and what `create_socket_pair` gives."""
LOOK_UP_S = 0.5
"""So long names are looked up before what is known of them has to do."""
END_S = 2.0
"""So long its end is waited for by who ends a session. A server that stands still, or a path that swallows all, ends it later, or its time-out does."""
_LOOK_S = 1.0
"""How late a wait that has begun may notice that the session is to end."""
_STANDS_STILL = "this process's event loop stands still"
_NO_ANSWER = IndexError, MemoryError, RuntimeError, TypeError, ValueError, struct.error
"""So kazoo takes bytes that can't be what ZooKeeper says; memory is short where four of them are taken for a length."""
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


class _Wakings:
    """Both ends of kazoo's pair of sockets: how many requests are to be sent. Adding one never waits, whoever does it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._fd

    def send(self, _: bytes) -> None:
        """One more. Raises ValueError once it is closed."""
        with self._lock:  # else the number may be another file's by now
            os.eventfd_write(self._fd, 1)

    def recv(self, _: int) -> None:
        """One less; waits for it where there is none."""
        os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Connection(ConnectionHandler):  # type: ignore[misc] # kazoo has no types
    """kazoo's, but for how it looks names up, and for an answer that it can't make sense of: that ends the connection, as with ZooKeeper's own client.

    There is one after some failures of ZooKeeper's leader (the answer to the second request, and none to the first). It would
    end kazoo's thread, and whoever has the session would wait for the next connection for ever.

    While the loop whose session it is `stands_still`, which this thread doesn't notice, nothing is sent, and it isn't connected: the session
    ends as that of a process that is stopped. Else it would count as there for ever, and do nothing.
    """

    def __init__(self, *arguments: Any, stands_still: Callable[[], bool], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stands_still = stands_still
        self._found: dict[tuple[str, int], list[tuple[str, str, int]]] = {}
        self._at: tuple[Any, ...] = ()
        self._left: tuple[Any, ...] = ()

    def leave_server(self, reason: str) -> None:
        """End the connection soon, and try this server behind all others from now on. From any thread."""
        self._left = self._at
        self.handler.why_leave = reason

    def _expand_client_hosts(self) -> list[tuple[str, str, int]]:
        """Where all servers are, by what is found at once, or was before.

        kazoo looks one name up after the other, each time: where the first name server of three is gone, that takes 5 s a name, longer than a
        session has, and with three names longer than a server's start may take.
        """
        # No SimpleQueue, whose `get` may wait on where its time-out has run out by the time it begins (see `Waking`).
        looked_up = threading.Semaphore(0)
        hosts = self.client.hosts  # others from one moment to the next, where its session is led elsewhere
        for host, port in hosts:
            try:
                threading.Thread(target=self._look_up, args=(host, port, looked_up), daemon=True).start()
            except RuntimeError:
                # No thread is given out any more: Python's main thread has returned, or there are too many.
                self._look_up(host, port, looked_up)
        until_s = time.monotonic() + LOOK_UP_S
        for _ in hosts:
            is_any_known = any(host in self._found for host in hosts)
            if not looked_up.acquire(timeout=max(0.0, until_s - time.monotonic()) if is_any_known else None):
                break
        found = [one for host in hosts for one in self._found.get(host, ())]
        if self.client.randomize_hosts:
            random.shuffle(found)
        found.sort(key=lambda one: one == self._left)
        return found

    def _look_up(self, host: str, port: int, looked_up: threading.Semaphore) -> None:
        try:
            addresses = socket.getaddrinfo(host, port, 0, 0, socket.IPPROTO_TCP)
        except OSError as error:
            self.logger.warning("Cannot resolve %s: %s", host, error)
        else:
            self._found[host, port] = [(host, str(address[4][0]), port) for address in addresses]
        finally:
            looked_up.release()

    def _connect_loop(self, retry: Any) -> Any:
        if self._stands_still():
            raise ForceRetryError(_STANDS_STILL)
        return super()._connect_loop(retry)

    def _connect_attempt(self, *to: Any) -> Any:
        """As kazoo's, but for what follows where a server was left.

        Others would refuse who has seen more changes than they have, and that one may count other ones. And a new session begins at all
        of them in their order: kazoo begins it at the next one, which may be that which was left.
        """
        client = self.client
        session_id = client._session_id  # noqa: SLF001
        status = super()._connect_attempt(*to)
        if self.handler.why_leave:
            self.handler.why_leave = ""
            client.last_zxid = 0
        if self._left and session_id and not client._session_id:  # noqa: SLF001
            raise ForceRetryError("the session has expired")
        return status

    def _connect(self, *to: Any) -> Any:
        """As kazoo's, but that a first answer that can't be one ends the connection, too, and leaves nothing behind.

        Another server may have the port (the first four bytes of an HTTP server's are a length of 1.2 GB), or a bit was flipped on its way.
        """
        client = self.client
        self._at = to
        session = client._session_id, client._session_passwd  # noqa: SLF001
        try:
            return super()._connect(*to)
        except _NO_ANSWER as error:
            client._session_id, client._session_passwd = session  # noqa: SLF001
            raise ConnectionDropped(f"a first answer that can't be one: {error!r}") from error

    def _send_ping(self, connect_timeout: float) -> None:
        if self._stands_still():
            raise ConnectionDropped(_STANDS_STILL)
        super()._send_ping(connect_timeout)

    def _read_socket(self, read_timeout: float) -> Any:
        try:
            return super()._read_socket(read_timeout)
        except _NO_ANSWER as error:
            raise ConnectionDropped(f"an answer that can't be one: {error}") from error

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        """As kazoo's. What nobody waits for was damaged on its way, and somebody waits for what it told: for ever, as ZooKeeper tells it once.

        Where the connection has ended all look again.
        """
        watchers = self.client._data_watchers, self.client._child_watchers  # noqa: SLF001
        before = sum(map(len, watchers))
        super()._read_watch_event(buffer, offset)
        if sum(map(len, watchers)) == before and not self.client._stopped.is_set():  # noqa: SLF001
            raise ConnectionDropped("a change was told of what nobody watches")

    def _read_response(self, header: Any, buffer: bytes, offset: int) -> Any:
        """As kazoo's, which forgets who asked where the answer is an error that there is none of: he would wait for ever."""
        _, asked, _ = self.client._pending[0]  # noqa: SLF001
        try:
            return super()._read_response(header, buffer, offset)
        except RuntimeError as error:
            if asked is not None and not asked.ready():
                asked.set_exception(ConnectionLoss(str(error)))
            raise


class Handler(SequentialThreadingHandler):  # type: ignore[misc] # kazoo has no types
    """kazoo's, but for how it waits for its sockets and passes on answers, and for how long it tries to reach a server, `connect_s`.

    kazoo's thread would wait for the answer to a session's last request, or first, for as long as the session may last. `why_leave`: why the
    connection is to end soon; empty where it isn't.
    """

    def __init__(self, connect_s: float) -> None:
        super().__init__()
        self._over_s = math.inf
        self.completion_queue = _HandedOver()
        self._connect_s = connect_s
        self.why_leave = ""

    def start(self) -> None:
        """As kazoo's, which would leave its first thread waiting for ever where a second one isn't given out."""
        try:
            super().start()
        except RuntimeError:
            self._running = True  # else there is nothing to stop
            self.stop()
            raise

    def end_soon(self) -> None:
        """Let kazoo's thread wait for nobody from END_S on."""
        self._over_s = min(self._over_s, time.monotonic() + END_S)

    def create_connection(self, *, timeout: float, **to: Any) -> Any:
        """As kazoo's, which would wait a whole session's time-out for a server whose machine is gone, while the others are there."""
        return super().create_connection(timeout=min(timeout, self._connect_s), **to)

    def create_socket_pair(self) -> tuple[_Wakings, _Wakings]:
        """See `_Wakings`: what is read, and what is written."""
        wakings = _Wakings()
        return wakings, wakings

    def select(
        self, readers: _Waited, writers: _Waited, others: _Waited, timeout: float | None = None
    ) -> tuple[_Waited, _Waited, _Waited]:
        """Those that may be read, and written, now; none where `timeout` seconds passed. Raises OSError, ValueError, ConnectionDropped where it is to end."""
        del others
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        for one in {*readers, *writers}:
            poll.register(one, select.POLLIN * (one in readers) | select.POLLOUT * (one in writers))
        events: dict[int, int] = {}
        left_s = math.inf
        while not events and left_s > 0:
            now_s = time.monotonic()
            if now_s >= self._over_s:
                raise ConnectionDropped("nobody answers, and the session is to end")
            if self.why_leave:
                raise ConnectionDropped(self.why_leave)
            left_s = until_s - now_s
            events = dict(poll.poll(math.ceil(1000 * max(0.0, min(left_s, self._over_s - now_s, _LOOK_S)))))
        can_read = [one for one in readers if events.get(one.fileno(), 0) & (select.POLLIN | _ENDED)]
        can_write = [one for one in writers if events.get(one.fileno(), 0) & (select.POLLOUT | _ENDED)]
        return can_read, can_write, []
