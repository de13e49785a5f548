"""Looks after what a capture asks of its database before it streams, which may have to wait there for somebody else.

A slot is made once every transaction that had begun is over; a publication, and a snapshot, wait for locks. Meanwhile the capture's
thread is in libpq, and neither notices that it is to stop nor can tell why it stands still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from types import TracebackType
from typing import Final, Self

import psycopg

from seriatim.producer.sources.postgres import catalog
from seriatim.producer.sources.postgres.errors import SourceLost
from seriatim.producer.sources.postgres.replication import Connection

_POLL_S: Final = 0.1
_LOOK_EVERY_S: Final = 2.0
_CANCEL_S: Final = 5.0


class Attendant:
    """While it is entered: cancels what its connections do once that isn't wanted, and tells who holds them up."""

    def __init__(self, dsn: str, is_wanted: Callable[[], bool], on_waiting: Callable[[str], None]) -> None:
        """`on_waiting` is told on a thread of the attendant's own, the same again and again while that lasts."""
        self._dsn = dsn
        self._is_wanted = is_wanted
        self._on_waiting = on_waiting
        self._connections: list[Connection] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="capture-attendant", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def attend(self, connection: Connection) -> None:
        """Look after this one, too."""
        self._connections.append(connection)

    def _attend(self) -> None:
        look_at_s = time.monotonic() + _LOOK_EVERY_S
        with ExitStack() as stack:
            own: Connection | None = None  # the others are busy
            while not self._ended.wait(_POLL_S):
                if not self._is_wanted():
                    self._cancel()
                elif time.monotonic() >= look_at_s:
                    with suppress(psycopg.Error, SourceLost):
                        if own is None or own.closed:
                            own = stack.enter_context(closing(catalog.connect(self._dsn)))
                        self._look(own)
                    look_at_s = time.monotonic() + _LOOK_EVERY_S

    def _cancel(self) -> None:
        for connection in self._connections:
            with suppress(psycopg.Error):  # closed meanwhile, or the server is gone; what was asked of it ends by that
                connection.cancel_safe(timeout=_CANCEL_S)

    def _look(self, own: Connection) -> None:
        holder = catalog.holder(own, [each.info.backend_pid for each in self._connections if not each.closed])
        if holder is not None:
            self._on_waiting(holder)
