"""Which of PostgreSQL's errors say nothing about a change, so that waiting, or another connection, may be the answer to them."""

from __future__ import annotations

from psycopg import Error, OperationalError
from psycopg import errors as sql

from seriatim.consumer.spark.targets.errors import TargetBusy, TargetLost
from seriatim.protocol.postgres import in_a_line

_OVER = (
    sql.AdminShutdown,
    sql.CrashShutdown,
    sql.CannotConnectNow,
    sql.DatabaseDropped,
    sql.IdleInTransactionSessionTimeout,
    sql.ReadOnlySqlTransaction,
)
"""The session has ended, or is with a server that isn't to be written to: after a failover the old primary may answer as a stand-by."""
_PASSING = (sql.QueryCanceled, sql.LockNotAvailable)
"""By a time-out that was set for the role or the database, or by somebody's hand."""
_PASSING_CLASSES = frozenset({"40", "53", "58"})
"""Collisions; what the server lacks (space on its disk, memory, connections); errors of its operating system (I/O)."""


def trouble(error: Error, *, is_closed: bool) -> TargetLost | TargetBusy | None:
    """What an error means that may pass; None for one that the same statement would meet again.

    `is_closed`: whether the connection is over now.
    """
    text = in_a_line(error)
    state = error.sqlstate or ""
    is_libpq = not state and isinstance(error, OperationalError) and not isinstance(error, sql.PipelineAborted)
    if is_closed or is_libpq or state.startswith("08") or isinstance(error, _OVER):
        return TargetLost(f"the target's connection failed: {text}")
    if isinstance(error, _PASSING) or state[:2] in _PASSING_CLASSES:
        return TargetBusy(f"the target can't do it now: {text}")
    return None
