"""A PostgreSQL database as target.

The table `seriatim_replay.positions` holds, per queue and job, the offset up to which the queue is in the target, and
the token of the replay that may go on from there. `apply` moves that offset by compare-and-set in the very
transaction that carries out the plan: killed at any moment, it leaves all or nothing, and whoever comes next reads
where to go on (protocol.md 6, *Exactly once elsewhere*).

Foreign keys and triggers are left to the source, whose changes already show what they did: the session sets
`session_replication_role = replica`. Where the role may not (`limits` says so), tables with foreign keys that are
checked at once get their changes in the original order, and triggers of the target fire.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import errors as sql
from psycopg.conninfo import conninfo_to_dict

from seriatim.consumer.spark.apply.plan import Plan
from seriatim.consumer.spark.apply.shape import Shapes
from seriatim.consumer.spark.targets.catalogue import read_shapes
from seriatim.consumer.spark.targets.errors import (
    ApplyFailed,
    Diverged,
    NotClaimed,
    PositionMoved,
    TargetBusy,
    TargetLost,
)
from seriatim.consumer.spark.targets.execution import Execution, Place, Stages
from seriatim.protocol.change import TEXT_SETTINGS
from seriatim.protocol.errors import Fenced
from seriatim.protocol.postgres import TARGET_SETTINGS, defaults_beside

_LOG = logging.getLogger(__name__)

ATTEMPTS = 5
"""Tries of one plan when others in the target collide with it."""
BACKOFF_S = 0.05
"""Wait before the second try; it doubles with each further one."""

_POSITIONS = b"""
CREATE SCHEMA IF NOT EXISTS seriatim_replay;
CREATE TABLE IF NOT EXISTS seriatim_replay.positions (
    queue_id    bigint NOT NULL,
    job         text NOT NULL,
    queue       text NOT NULL,
    next_offset bigint NOT NULL,
    token       bigint NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue_id, job)
);
COMMENT ON TABLE seriatim_replay.positions IS
    'Up to which offset (exclusive) each queue is in this database, and the token of the replay that may go on.';
"""
_POSITION = b"SELECT next_offset, token FROM seriatim_replay.positions WHERE queue_id = %s AND job = %s"
_CLAIM = b"""
INSERT INTO seriatim_replay.positions AS p (queue_id, job, queue, next_offset, token) VALUES (%s, %s, %s, %s, %s)
    ON CONFLICT (queue_id, job) DO UPDATE SET token = excluded.token, queue = excluded.queue, updated_at = now()
    WHERE p.token <= excluded.token
RETURNING next_offset, token
"""
_ADVANCE = b"""
UPDATE seriatim_replay.positions SET next_offset = %s, token = %s, updated_at = now()
 WHERE queue_id = %s AND job = %s AND next_offset = %s AND token <= %s
"""


_NO_REPLICA_ROLE = (
    "the target's role may not set session_replication_role: triggers of the target fire, and tables with foreign keys "
    "get their changes one by one; mend it with: GRANT SET ON PARAMETER session_replication_role TO ROLE"
)


@dataclass(frozen=True, slots=True)
class Position:
    """offset: the first one that isn't in the target yet. token: of the replay that may go on from there."""

    offset: int
    token: int


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` did.

    position: where the target stands now. changes: row changes read. rows: changes carried out (after collapsing) per
    table. transactions: of the source. attempts: 1 where nobody collided.
    """

    position: Position
    changes: int
    rows: dict[str, int]
    transactions: int
    attempts: int


class PostgresTarget:
    """One connection to a target database, for one job (the name of a replay; usually its subscription).

    Not for several threads at once. `on_step` is told of each step of `apply` when it is done: for progress. An error
    it raises undoes the plan.
    """

    def __init__(self, dsn: str, job: str, *, on_step: Callable[[str], None] = lambda _step: None) -> None:
        """Connects at the first call that needs the target."""
        self._dsn = dsn
        self._job = job
        self._on_step = on_step
        self._connection: psycopg.Connection[Any] | None = None
        self._stages = Stages()
        self._has_positions = False
        self._may_replicate = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A later call opens another one."""
        connection, self._connection = self._connection, None
        self._stages.forget()
        if connection is not None:
            connection.close()

    def limits(self) -> tuple[str, ...]:
        """What the role may not do, and what follows from it; empty where all is well. Raises TargetLost."""
        self._connected()
        if self._may_replicate:
            return ()
        return (_NO_REPLICA_ROLE,)

    def tables(self) -> Shapes:
        """All user tables of the target as the planner wants them, read anew. Raises TargetLost."""
        connection = self._connected()
        try:
            with connection.transaction():
                return read_shapes(connection, fires_triggers=not self._may_replicate)
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def position(self, queue_id: int) -> Position | None:
        """Where the target stands; None before the first claim. Raises TargetLost."""
        connection = self._connected()
        try:
            with connection.transaction():
                return self._position(connection, queue_id)
        except sql.UndefinedTable:
            return None
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def claim(self, queue_id: int, queue: str, token: int, start: int = 0) -> Position:
        """Become the replay that may apply: raise the stored token to `token`. Where nothing is stored, begin at `start`.

        Returns the position to go on from. Raises Fenced where a newer token is stored, TargetLost.
        """
        connection = self._connected()
        try:
            if not self._has_positions:
                # A transaction of its own: the claim may have to wait, and another job's needs this lock, too.
                with connection.transaction():
                    connection.execute("SELECT pg_advisory_xact_lock(hashtext('seriatim_replay.positions'))")
                    connection.execute(_POSITIONS)
            with connection.transaction():
                row = connection.execute(_CLAIM, (queue_id, self._job, queue, start, token)).fetchone()
                stored = None if row else self._position(connection, queue_id)
        except psycopg.OperationalError as error:
            raise self._lost(error) from error
        self._has_positions = True
        if row is None:
            raise self._fenced(token, stored)
        _LOG.info(
            "target claimed queue=%s queue_id=%d job=%s token=%d offset=%d", queue, queue_id, self._job, token, row[0]
        )
        return Position(*row)

    def apply(self, queue_id: int, plan: Plan, token: int) -> Applied:
        """Carry out the plan and move the position from `plan.start` to `plan.end`, in one transaction.

        `plan` must come from shapes that `tables` gave for this target. A plan that reaches nothing (start == end) only
        checks position and token.

        Raises:
            PositionMoved: the target stands elsewhere; where it stands at `plan.end` or beyond, the plan was applied before.
            Fenced: a newer token is stored. NotClaimed: no position is stored.
            ApplyFailed, Diverged: the target refused a change; table, key and offset say which.
            TargetBusy: deadlocks or serialization failures, `ATTEMPTS` times. TargetLost: the connection broke.
        In all cases but TargetLost nothing was done; after TargetLost, `position` tells.
        """
        wait_s = BACKOFF_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                rows = self._apply(queue_id, plan, token)
            except (sql.SerializationFailure, sql.DeadlockDetected) as error:
                self._stages.forget()
                if attempt == ATTEMPTS:
                    raise TargetBusy(
                        f"{ATTEMPTS} tries of the plan from offset {plan.start} failed: {error}"
                    ) from error
                _LOG.warning("target busy job=%s start=%d attempt=%d error=%s", self._job, plan.start, attempt, error)
                time.sleep(wait_s)
                wait_s *= 2
                continue
            self._on_step("committed")
            return Applied(Position(plan.end, token), plan.changes, rows, plan.transactions, attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _apply(self, queue_id: int, plan: Plan, token: int) -> dict[str, int]:
        connection = self._connected()
        self._stages.begin()
        execution: Execution | None = None
        try:
            with connection.transaction():
                self._advance(connection, queue_id, plan, token)
                self._on_step("position moved")
                if plan.segments:
                    execution = self._execution(connection)
                    execution.run(plan)
                self._on_step("changes carried out")
        except (sql.SerializationFailure, sql.DeadlockDetected):
            raise
        except psycopg.Error as error:
            self._stages.forget()
            if connection.closed or isinstance(error, (sql.AdminShutdown, sql.CrashShutdown)):
                raise self._lost(error) from error
            raise self._failed(error, plan, execution) from error
        except BaseException:
            self._stages.forget()
            raise
        return execution.applied if execution else {}

    def _execution(self, connection: psycopg.Connection[Any], *, singly: bool = False) -> Execution:
        if self._may_replicate:
            connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute("SET CONSTRAINTS ALL DEFERRED")
        # A stage is joined to the target by the target's unique index, whatever the planner guesses of a fresh stage's size.
        connection.execute("SET LOCAL enable_hashjoin = off")
        connection.execute("SET LOCAL enable_mergejoin = off")
        shapes = read_shapes(connection, fires_triggers=not self._may_replicate)
        return Execution(connection, shapes, self._stages, self._on_step, singly=singly)

    def _advance(self, connection: psycopg.Connection[Any], queue_id: int, plan: Plan, token: int) -> None:
        """Compare and set. The row stays locked until the end, so a second replay waits here, and then finds it moved."""
        try:
            done = connection.execute(_ADVANCE, (plan.end, token, queue_id, self._job, plan.start, token))
        except sql.UndefinedTable as error:
            raise NotClaimed(f"queue {queue_id} has no position for job {self._job}") from error
        if done.rowcount == 1:
            return
        stored = self._position(connection, queue_id)
        if stored is None:
            raise NotClaimed(f"queue {queue_id} has no position for job {self._job}")
        if stored.token > token:
            raise self._fenced(token, stored)
        raise PositionMoved(
            f"the target stands at offset {stored.offset}, the plan starts at {plan.start}: nothing was done",
            start=plan.start,
            position=stored.offset,
        )

    def _position(self, connection: psycopg.Connection[Any], queue_id: int) -> Position | None:
        row = connection.execute(_POSITION, (queue_id, self._job)).fetchone()
        return None if row is None else Position(*row)

    def _fenced(self, token: int, stored: Position | None) -> Fenced:
        newer = stored.token if stored else None
        return Fenced(
            f"job {self._job}: token {token} is older than {newer}, which the target has", token=token, stored=newer
        )

    def _failed(self, error: psycopg.Error, plan: Plan, execution: Execution | None) -> ApplyFailed:
        """The typed error for what the server refused. After a bulk statement the row is looked for, one by one."""
        place = execution.place if execution else None
        if (place is not None and place.key is None) or _may_be_another(error):
            place = self._located(plan) or place
        where = f"{place.table}, key {place.key}, offset {place.offset}" if place else f"offset {plan.start}"
        return ApplyFailed(
            f"the target refused a change ({where}): {error}; nothing was applied",
            table=str(place.table) if place else None,
            key=place.key if place else None,
            offset=place.offset if place else None,
        )

    def _located(self, plan: Plan) -> Place | None:
        """Carry out the plan statement by statement up to the one that fails, and undo it all."""
        connection = self._connected()
        execution: Execution | None = None
        try:
            with connection.transaction(force_rollback=True):
                execution = self._execution(connection, singly=True)
                execution.on_step = lambda _step: None
                execution.run(plan)
        except (psycopg.Error, Diverged):
            return execution.place if execution else None
        finally:
            self._stages.forget()
        return None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        self._stages.forget()
        try:
            defaults: dict[str, Any] = defaults_beside(conninfo_to_dict(self._dsn))
            connection = psycopg.connect(self._dsn, autocommit=True, **defaults)
            for name, value in (*TEXT_SETTINGS.items(), *TARGET_SETTINGS.items()):
                connection.execute("SELECT set_config(%s, %s, false)", (name, value))
            try:
                connection.execute("SET session_replication_role = replica")
                connection.execute("RESET session_replication_role")
                self._may_replicate = True
            except sql.InsufficientPrivilege:
                self._may_replicate = False
        except psycopg.OperationalError as error:
            raise self._lost(error) from error
        self._connection = connection
        return connection

    def _lost(self, error: Exception) -> TargetLost:
        self.close()
        return TargetLost(f"the target's connection failed: {str(error).strip()}")


def _may_be_another(error: psycopg.Error) -> bool:
    """In a pipeline the error belongs to one of many statements."""
    return isinstance(error, (sql.DataError, sql.IntegrityError, sql.ProgrammingError))
