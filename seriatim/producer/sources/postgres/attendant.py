"""Looks after what a capture asks of its database before it streams, which may have to wait there for somebody else.

A slot is made once every transaction that had begun is over; a publication, and a snapshot, wait for locks; a server may hang. Meanwhile
the capture's thread is in libpq, and neither notices that it is to stop nor can tell why it stands still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Final, Self

import psycopg

from seriatim.producer.sources.postgres import catalog
from seriatim.producer.sources.postgres.errors import SourceLost
from seriatim.producer.sources.postgres.replication import Connection
from seriatim.protocol.postgres import cut

_POLL_S: Final = 0.1
_LOOK_EVERY_S: Final = 2.0
_CANCEL_S: Final = 5.0
_LOOK_S: Final = 1.0


class Attendant:
    """While it is entered: breaks off what its connections do once that isn't wanted, and tells who holds them up."""

    def __init__(self, dsn: str, is_wanted: Callable[[], bool], on_waiting: Callable[[str], None]) -> None:
        """`on_waiting` is told on a thread of the attendant's own, the same again and again while that lasts."""
        self._dsn = dsn
        self._is_wanted = is_wanted
        self._on_waiting = on_waiting
        self._connections: list[Connection] = []
        self._own: Connection | None = None  # the others are busy
        self._ended = threading.Event()
        self._breaking = threading.Thread(target=self._attend, name="capture-attendant", daemon=True)
        self._looking = threading.Thread(target=self._look_on, name="capture-lookout", daemon=True)

    def __enter__(self) -> Self:
        self._breaking.start()
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._breaking.join()
        self._looking.join(_LOOK_S)
        if self._own is not None:
            _cut(self._own)  # one that is still being made has a time-out

    def attend(self, connection: Connection) -> None:
        """Look after this one, too."""
        self._connections.append(connection)

    def _attend(self) -> None:
        while not self._ended.wait(_POLL_S):
            if not self._is_wanted():
                self._break_off()

    def _break_off(self) -> None:
        """Cancel what they do; where nothing comes of that, since the server hangs, or one process of it does, leave it."""
        until_s = time.monotonic() + _CANCEL_S
        while (left_s := until_s - time.monotonic()) > 0:
            for connection in self._connections:
                with suppress(psycopg.Error):  # closed meanwhile, or the server is gone, and what was asked of it ends
                    connection.cancel_safe(timeout=left_s)
            if self._ended.wait(_POLL_S):
                return
        for connection in self._connections:
            _cut(connection)

    def _look_on(self) -> None:
        with ExitStack() as stack:
            while not self._ended.wait(_LOOK_EVERY_S):
                with suppress(psycopg.Error, SourceLost):
                    if self._own is None or self._own.closed:
                        self._own = stack.enter_context(closing(catalog.connect(self._dsn)))
                    self._look(self._own)

    def _look(self, own: Connection) -> None:
        holder = catalog.holder(own, [each.info.backend_pid for each in self._connections if not each.closed])
        if holder is not None:
            self._on_waiting(holder)


def _cut(connection: Connection) -> None:
    with suppress(psycopg.Error):  # closed meanwhile
        cut(connection.fileno())
