"""Looks at east and west without pause, on a thread of its own: how far west has come, and how far it is behind."""

from __future__ import annotations

import threading
import time
from datetime import datetime
from typing import Any, Self

import psycopg

_EVERY_S = 0.2
_LAG_EVERY = 5  # rounds
_HAS_POSITION = "SELECT to_regclass('seriatim_replay.positions') IS NOT NULL"
_POSITION = "SELECT max(next_offset) FROM seriatim_replay.positions"
_NEWEST = "SELECT max(mtime) FROM pgbench_history"
_CONFIRMED = "SELECT bool_and(confirmed_flush_lsn >= %s::pg_lsn) FROM pg_replication_slots WHERE plugin = 'pgoutput'"
_ROWS = (
    "SELECT (SELECT count(*) FROM pgbench_accounts) + (SELECT count(*) FROM pgbench_tellers)"
    " + (SELECT count(*) FROM pgbench_branches)"
)


class Databases:
    """A context manager. Times are those of `time.monotonic`, in seconds. Other methods raise `psycopg.Error`."""

    def __init__(self, east: str, west: str) -> None:
        self._dsns = (east, west)
        self._stopped = threading.Event()
        self._guard = threading.Lock()  # of the two connections
        self._thread = threading.Thread(target=self._run, name="demo databases", daemon=True)
        self._east: psycopg.Connection[Any] | None = None
        self._west: psycopg.Connection[Any] | None = None
        self.applied = 0
        """Offset up to which the queue is in west."""
        self.advances: list[tuple[float, int]] = []
        self.lag_s = 0.0
        """By how much west's newest transaction of the load is older than east's."""
        self.problem = ""

    def __enter__(self) -> Self:
        self._east, self._west = (psycopg.connect(dsn, autocommit=True) for dsn in self._dsns)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10)
        for connection in (self._east, self._west):
            if connection is not None:
                connection.close()

    def log_end(self) -> str:
        """The position to which east's log is written."""
        return str(self._one(self._east, "SELECT pg_current_wal_flush_lsn()"))

    def is_captured(self, log_end: str) -> bool:
        """Whether the capture has confirmed east's log up to there: all of it is acknowledged by the queue."""
        return self._one(self._east, _CONFIRMED, log_end) is True

    def snapshot_rows(self) -> int:
        """How many rows of the tables that the snapshot fills are in west."""
        return int(self._one(self._west, _ROWS))

    def newest_s(self) -> tuple[float, float]:
        """When the newest transaction of the load that is in east, and in west, began; 0 where there is none."""
        return self._newest(self._east), self._newest(self._west)

    # ---- parts

    def _run(self) -> None:
        rounds = 0
        has_position = False
        while not self._stopped.wait(_EVERY_S):
            try:
                has_position = has_position or self._one(self._west, _HAS_POSITION) is True
                applied = self._one(self._west, _POSITION) if has_position else None
                if applied is not None and applied > self.applied:
                    self.advances.append((time.monotonic(), applied))
                    self.applied = applied
                if rounds % _LAG_EVERY == 0:
                    east_s, west_s = self.newest_s()
                    self.lag_s = max(0.0, east_s - west_s) if west_s else 0.0
                rounds += 1
                self.problem = ""
            except psycopg.Error as error:
                self.problem = str(error).strip()

    def _newest(self, connection: psycopg.Connection[Any] | None) -> float:
        newest = self._one(connection, _NEWEST)
        return newest.timestamp() if isinstance(newest, datetime) else 0.0

    def _one(self, connection: psycopg.Connection[Any] | None, query: str, *arguments: object) -> Any:
        if connection is None:
            raise RuntimeError("not connected")
        with self._guard:
            row = connection.execute(query.encode(), arguments or None).fetchone()
        return None if row is None else row[0]
