"""Whether a connection to a target has a session of the server for itself.

A replay sets its session up, marks it, and stages rows in it. A pool in transaction mode gives each transaction whichever session is
free: what was set stays in those that others have next, and what was marked and staged isn't there in the next one.

No pool says that it is one, but each names a process of its own making where a server names the session's. So does one in session
mode, which is as good as none. There another connection looks, within a transaction: the session that was this one's just now goes to
whoever comes next (PgBouncer gives away first what came back last), or this one's next transaction is elsewhere. Amid others' traffic both
may fail to show, so it is looked again whenever the position moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import psycopg

from seriatim.consumer.spark.targets.errors import PooledTarget

Connection: TypeAlias = psycopg.Connection[Any]

_LOOKS = 10
"""Of two sessions that many wait for, each look may well meet the same one."""


def own_process(connection: Connection, beside: Callable[[], AbstractContextManager[Connection]]) -> int:
    """The id of the server's process that serves the connection; nothing is to be set in it before. `beside` opens another connection.

    Raises PooledTarget where that isn't one and the same, and what psycopg does.
    """
    process = _process(connection)
    if process == connection.info.backend_pid:
        return process
    is_shared = False
    with contextlib.suppress(psycopg.Error), beside() as other, other.transaction():
        is_shared = _process(other) == process or _process(connection) != process
    if is_shared or any(_process(connection) != process for _ in range(_LOOKS)):
        raise PooledTarget
    return process


def check_process(process: int, own: int) -> None:
    """Raise PooledTarget where what has just been done was done by another process than the connection's own."""
    if process != own:
        raise PooledTarget


def _process(connection: Connection) -> int:
    # A statement that is prepared stays in a session, too.
    return int(next(pid for (pid,) in connection.execute("SELECT pg_backend_pid()", prepare=False)))
