"""A PostgreSQL database as target.

The table `seriatim_replay.positions` (`positions`) holds, per queue and job, the offset up to which the queue is in the target, and
the token of the replay that may go on from there. `apply` moves that offset by compare-and-set in the very
transaction that carries out the plan: killed at any moment, it leaves all or nothing, and whoever comes next reads
where to go on (protocol.md 6, *Exactly once elsewhere*).

Foreign keys and triggers are left to the source, whose changes already show what they did: the session sets
`session_replication_role = replica`. Where the role may not (`limits` says so), tables with foreign keys that are
checked at once get their changes in the original order, and triggers of the target fire.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

import psycopg
from psycopg import errors as sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from seriatim.consumer.spark.apply.plan import Plan, Snapshot
from seriatim.consumer.spark.apply.shape import Shapes
from seriatim.consumer.spark.targets import positions
from seriatim.consumer.spark.targets.catalogue import read_beneath, read_shapes
from seriatim.consumer.spark.targets.errors import (
    ApplyFailed,
    CoarseKey,
    Diverged,
    RivalJob,
    TablesChanged,
    TargetBusy,
    TargetLost,
)
from seriatim.consumer.spark.targets.execution import Execution, Place, Stages
from seriatim.consumer.spark.targets.parts import read_awake
from seriatim.consumer.spark.targets.positions import Position
from seriatim.consumer.spark.targets.sessions import check_process, own_process
from seriatim.consumer.spark.targets.troubles import trouble
from seriatim.protocol import log
from seriatim.protocol.change import TEXT_SETTINGS
from seriatim.protocol.errors import InvalidArgument, SeriatimError
from seriatim.protocol.postgres import HOLDER, TARGET_SETTINGS, cut, defaults_beside, in_a_line, told_holder

_log = log.logger("replay")

ATTEMPTS = 5
"""Tries of one plan when others in the target collide with it."""
CANCEL_S = 5.0
_LONG_S = 5.0
"""A statement that has taken less may be one of many that are quick."""
_ASK_S = 2
_SET_UP_S = 10.0
BACKOFF_S = 0.05
"""Wait before the second try; it doubles with each further one."""

_STARTED = b"(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint"
"""When a server was, in µs: it tells servers that have one database apart, to whatever role, and in every DateStyle."""
_SEEN = (
    b"SELECT pg_is_in_recovery(), "
    + _STARTED
    + b""", a.pid IS NOT NULL,
       CASE WHEN state = 'active' AND clock_timestamp() - query_start >= %s * interval '1s'
            THEN ARRAY[date_trunc('second', query_start)::text, left(query, 80), wait_event_type, wait_event] END
  FROM (SELECT) one LEFT JOIN pg_stat_activity a ON a.pid = %s"""
)
"""Of a server process, by the server to which the DSN leads; in the end what it is at, if that is a statement that takes so long."""

_NO_REPLICA_ROLE = (
    "the target's role may not set session_replication_role: triggers of the target fire, and ON DELETE and ON UPDATE of its foreign "
    "keys, before what they do comes from the source; tables with foreign keys get their changes one by one, and a snapshot is refused "
    "where rows come before those that they refer to, as is one statement of the source that changed rows which refer to each other; mend it with: "
    "GRANT SET ON PARAMETER session_replication_role TO ROLE, or have the foreign keys, without actions, DEFERRABLE in the target"
)


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` did.

    position: where the target stands now. changes: row changes read. rows: changes carried out (after collapsing) per
    table. transactions: of the source. commit_ts_ms: the newest commit among them. attempts: 1 where nobody collided.
    source_lsn: as `Plan` has it.
    """

    position: Position
    changes: int
    rows: dict[str, int]
    transactions: int
    commit_ts_ms: int | None
    attempts: int
    source_lsn: int | None = None


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
        self._told: Shapes = {}
        self._marked_for: int | None = None
        self._process = 0
        self._may_replicate = False
        self._server_started = 0  # the server of the connection
        self._missed = 0  # looks in a row that found the connection's session nowhere
        self._patience = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A later call opens another one."""
        connection, self._connection = self._connection, None
        self._stages.forget()
        if connection is not None:
            connection.close()

    def cancel(self) -> None:
        """From any thread: the statement under way, if any, is given up, so that its call raises TargetBusy; TargetLost, where the server hangs."""
        connection = self._connection
        if connection is None or connection.closed:
            return
        try:
            connection.cancel_safe(timeout=CANCEL_S)
        except sql.CancellationTimeout:
            _cut(connection)
            return
        except psycopg.Error:
            return  # the server is away, and nothing waits there
        deadline_s = time.monotonic() + CANCEL_S
        while connection.info.transaction_status == TransactionStatus.ACTIVE:
            if time.monotonic() > deadline_s:
                _cut(connection)  # its process there hangs, and another one took the order
                return
            time.sleep(0.02)

    def hindrance(self) -> str | None:
        """From any thread: what makes the statement under way take so long, in a sentence; None where that isn't known, or nothing takes long.

        Where the DSN leads to another server by now, as behind a failover, what the old one has begun may never end: the connection
        is cut, so that its call raises TargetLost.
        """
        connection = self._connection
        if connection is None or connection.closed:
            return None
        try:
            with self._beside() as own:
                ((is_standby, started, is_there, doing),) = own.execute(_SEEN, (_LONG_S, self._process)).fetchall()
                holder = told_holder(own.execute(HOLDER, ([self._process],)).fetchone())
        except psycopg.Error as error:
            return f"the target doesn't answer: {in_a_line(error)}"
        if not (is_there and started == self._server_started):
            return "the target's address leads to a stand-by" if is_standby else self._left(connection)
        self._missed = 0
        if holder is not None:
            return f"in the target {holder}"
        return _told_doing(*doing) if doing is not None else None

    def _left(self, connection: psycopg.Connection[Any]) -> str:
        """Cut it, at once the first time, and until something is applied only where ever more looks in a row miss its session.

        An address may lead to many servers that take writes; what takes long there ends nevertheless.
        """
        self._missed += 1
        if self._missed >= self._patience:
            self._missed, self._patience = 0, 2 * self._patience
            _cut(connection)
        return "the target's address leads to another server by now, or its session there has ended"

    def position_beside(self, queue_id: int) -> Position | None:
        """From any thread: as `position`, of the server to which the DSN leads now. Raises TargetLost where that doesn't tell, or is a stand-by."""
        try:
            with self._beside() as own:
                if own.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
                    raise TargetLost("the target's address leads to a stand-by")
                return positions.stored(own, queue_id, self._job)
        except sql.UndefinedTable:
            return None
        except psycopg.Error as error:
            raise TargetLost(f"the target doesn't answer: {in_a_line(error)}") from error

    @contextlib.contextmanager
    def _beside(self) -> Iterator[psycopg.Connection[Any]]:
        """Another connection, for a short question. Raises what psycopg does."""
        with psycopg.connect(self._dsn, autocommit=True, connect_timeout=_ASK_S) as own, _within(_ASK_S, own):
            yield own

    def limits(self) -> tuple[str, ...]:
        """What the role may not do, and what follows from it; empty where all is well. Raises TargetLost."""
        self._connected()
        if self._may_replicate:
            return ()
        return (_NO_REPLICA_ROLE,)

    def tables(self) -> Shapes:
        """All user tables of the target as the planner wants them, read anew. Raises TargetLost, TargetBusy, ApplyFailed."""
        self._told = self._seen()
        return self._told

    def _seen(self) -> Shapes:
        connection = self._connected()
        try:
            # Rolled back, so that psycopg lets go what it has prepared: those statements take values for what columns were before.
            with connection.transaction(force_rollback=True):
                shapes = read_shapes(connection, fires_triggers=not self._may_replicate)
                read_beneath(connection, shapes)
                return shapes
        except psycopg.Error as error:
            self._raise_trouble(error)
            raise ApplyFailed(f"the target refused to show its tables: {str(error).strip()}") from error

    def position(self, queue_id: int) -> Position | None:
        """Where the target stands; None before the first claim. Raises TargetLost, TargetBusy; ApplyFailed where the role may not look."""
        connection = self._connected()
        try:
            with connection.transaction():
                return positions.stored(connection, queue_id, self._job)
        except sql.UndefinedTable:
            return None
        except psycopg.Error as error:
            self._raise_trouble(error)
            raise ApplyFailed(f"the target refused to tell its position: {str(error).strip()}") from error

    def claim(self, queue_id: int, queue: str, token: int, *, created_at_ms: int = 0) -> Position:
        """Become the replay that may apply: raise the stored token to `token`. Where nothing is stored, begin at 0, also where the queue does not.

        `created_at_ms`: when the queue was made; with its id it says which queue that is, in whatever cluster. 0: unknown.

        Returns the position to go on from. Raises OtherQueue where what is stored is another queue's; OtherJob where another job has written to the target since; Fenced where a newer token is stored; TargetLost; TargetBusy where somebody holds
        the position, or applies the queue under another one, which is to be tried again, or the target lacks something; ApplyFailed where the role may not claim.
        """
        connection = self._connected()
        try:
            positions.make_table(connection)
            claimed = positions.claim(connection, queue_id, self._job, queue, token, created_at_ms)
            self._marked_for = queue_id
        except RivalJob:
            self.close()  # what this session applied is no reason for the other one to wait in turn
            raise
        except psycopg.Error as error:
            self._raise_trouble(error)
            raise ApplyFailed(f"the target refused to keep a position: {str(error).strip()}") from error
        keys = {"queue": queue, "queue_id": queue_id, "job": self._job, "token": token, "offset": claimed.offset}
        _log.info("target claimed", **keys)
        return claimed

    def apply(self, queue_id: int, plan: Plan, token: int) -> Applied:
        """Carry out the plan and move the position from `plan.start` to `plan.end`, in one transaction.

        `plan` must come from shapes that `tables` gave for this target. A plan that reaches nothing (start == end) only
        checks position and token.

        Raises:
            PositionMoved: the target stands elsewhere; where it stands at `plan.end` or beyond, the plan was applied before.
            Fenced: a newer token is stored. NotClaimed: no position is stored.
            TablesChanged: a table isn't any more as `tables` told. ApplyFailed, Diverged: the target refused a change; table, key and offset say which.
            TargetBusy: deadlocks or serialization failures, `ATTEMPTS` times; or the target lacks space, memory or time. RivalJob.
            OtherJob: as in `claim`. PooledTarget: the connection has no session for itself.
            TargetLost: the connection broke, or the server isn't the primary any more.
        In all cases but TargetLost nothing was done; after TargetLost, `position` tells.
        """
        return self.apply_parts(queue_id, plan.start, plan.end, lambda: iter((plan,)), token, plan.snapshot)

    def apply_parts(
        self,
        queue_id: int,
        start: int,
        end: int,
        parts: Callable[[], Iterator[Plan]],
        token: int,
        snapshot: Snapshot | None = None,
    ) -> Applied:
        """As `apply`, with plans that follow each other from `start` to `end`: all in one transaction, but only one in memory.

        `parts` is called for each attempt. What it raises undoes all that was done. `snapshot`: the one under way at `end`.
        """
        wait_s = BACKOFF_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                applied = self._apply(queue_id, start, end, parts, token, snapshot)
            except (sql.SerializationFailure, sql.DeadlockDetected) as error:
                if attempt == ATTEMPTS:
                    raise TargetBusy(f"{ATTEMPTS} tries of the plan from offset {start} failed: {error}") from error
                _log.warning("target busy", job=self._job, start=start, attempt=attempt, error=error)
                time.sleep(wait_s)
                wait_s *= 2
                continue
            self._on_step("committed")
            self._patience = 1
            return replace(applied, attempts=attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _apply(
        self,
        queue_id: int,
        start: int,
        end: int,
        parts: Callable[[], Iterator[Plan]],
        token: int,
        snapshot: Snapshot | None,
    ) -> Applied:
        connection = self._connected()
        execution: Execution | None = None
        begun: Plan | None = None
        applied = Applied(Position(end, token, snapshot), 0, {}, 0, None, 1)
        done = 0
        try:
            if self._marked_for != queue_id:
                positions.mark(connection, queue_id, self._job)
                self._marked_for = queue_id
            with self._stages.transaction(), connection.transaction():
                process = positions.advance(connection, queue_id, self._job, token, start, end, snapshot)
                check_process(process, self._process)
                self._on_step("position moved")
                for plan in read_awake(connection, parts()):
                    if plan.segments:
                        execution = execution or self._execution(connection)
                        self._look(execution, plan)
                        self._check_same(plan, execution.shapes)
                        begun = plan
                        execution.run(plan)
                    applied = replace(
                        applied,
                        changes=applied.changes + plan.changes,
                        transactions=applied.transactions + plan.transactions,
                        commit_ts_ms=plan.commit_ts_ms or applied.commit_ts_ms,
                        source_lsn=plan.source_lsn or applied.source_lsn,
                    )
                    done += 1
                if execution is not None:
                    execution.place = (
                        None  # what is refused from here on, by a deferred rule, no statement is to blame for
                    )
                self._stages.empty(connection)
                self._on_step("changes carried out")
        except (sql.SerializationFailure, sql.DeadlockDetected):
            raise
        except RivalJob:
            self.close()  # as in `claim`
            raise
        except (Diverged, CoarseKey) as error:
            is_one_of_many = error.details["key"] is None
            met = self._singly(parts, done)[0] if is_one_of_many else None
            told = met if isinstance(met, type(error)) else error
            more = "" if self._may_replicate else f"; {_NO_REPLICA_ROLE}"
            raise type(told)(f"{told.message}{more}", **told.details) from error
        except psycopg.Error as error:
            self._raise_trouble(error)
            if begun is not None:  # who was altering a table then was waited for behind the look at it
                self._check_same(begun, self._seen())
            raise self._failed(error, start, parts, done, execution) from error
        return replace(applied, rows=execution.applied if execution else {})

    def _execution(self, connection: psycopg.Connection[Any]) -> Execution:
        if self._may_replicate:
            connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute("SET CONSTRAINTS ALL DEFERRED")
        # A stage is joined to the target by the target's unique index, whatever the planner guesses of a fresh stage's size.
        connection.execute("SET LOCAL enable_hashjoin = off")
        connection.execute("SET LOCAL enable_mergejoin = off")
        return Execution(connection, {}, self._stages, self._on_step)

    def _look(self, execution: Execution, plan: Plan) -> None:
        """At the plan's tables. A target may have thousands of others, and to look at those takes many times as long as to apply a plan."""
        new = plan.tables - execution.shapes.keys()
        if new:
            execution.shapes |= read_shapes(execution.connection, new, fires_triggers=not self._may_replicate)

    def _check_same(self, plan: Plan, shapes: Shapes) -> None:
        """A plan keeps the rules of the tables as they were told."""
        told = self._told
        changed = [name for name in plan.tables if name in told and told[name] != shapes.get(name)]
        if changed:
            raise TablesChanged(changed)

    def _failed(
        self,
        error: psycopg.Error,
        start: int,
        parts: Callable[[], Iterator[Plan]],
        done: int,
        execution: Execution | None,
    ) -> ApplyFailed:
        """The typed error for what the server refused. After a bulk statement the row is looked for, one by one."""
        place = execution.place if execution else None
        if place is not None and (place.key is None or _may_be_another(error)):
            met, found = self._singly(parts, done)
            if isinstance(met, CoarseKey):
                return met  # two of them in one statement
            place = found or place
        where = f"{place.table}, key {place.key}, offset {place.offset}" if place else f"from offset {start} on"
        more = f"; {_NO_REPLICA_ROLE}" if isinstance(error, sql.ForeignKeyViolation) and not self._may_replicate else ""
        return ApplyFailed(
            f"the target refused a change ({where}): {error}; nothing of its transaction was applied{more}",
            table=str(place.table) if place else None,
            key=place.key if place else None,
            offset=place.offset if place else None,
        )

    def _singly(
        self, parts: Callable[[], Iterator[Plan]], before: int
    ) -> tuple[psycopg.Error | SeriatimError | None, Place | None]:
        """Carry out so many plans `before`, then the next one statement by statement, and undo it all. What one failed with, and which it was."""
        connection = self._connected()
        execution: Execution | None = None
        try:
            with connection.transaction(force_rollback=True):
                self._stages.begin()
                execution = self._execution(connection)
                execution.on_step = lambda _step: None
                for number, plan in enumerate(islice(read_awake(connection, parts()), before + 1)):
                    execution.singly = number == before
                    self._look(execution, plan)
                    execution.run(plan)
        except (psycopg.Error, SeriatimError) as error:
            return error, execution.place if execution else None
        finally:
            self._stages.roll_back()
        return None, None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        self._stages.forget()
        self._marked_for = None
        try:
            self._connection = self._opened()
        except psycopg.OperationalError as error:
            raise TargetLost(f"the target's connection failed: {in_a_line(error)}") from error
        except psycopg.Error as error:
            raise ApplyFailed(f"the target refused what a replay's session needs: {in_a_line(error)}") from error
        return self._connection

    def _opened(self) -> psycopg.Connection[Any]:
        try:
            defaults: dict[str, Any] = defaults_beside(conninfo_to_dict(self._dsn))
            connection = psycopg.connect(self._dsn, autocommit=True, **defaults)
        except psycopg.ProgrammingError as error:
            raise InvalidArgument(f"the target's DSN can't be read: {in_a_line(error)}") from error
        try:
            with _within(_SET_UP_S, connection):
                self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: psycopg.Connection[Any]) -> None:
        self._process = own_process(connection, self._beside)
        for name, value in (*TEXT_SETTINGS.items(), *TARGET_SETTINGS.items()):
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        # A row that policies hide is refused; it would be left as it is.
        connection.execute("SET row_security = off")
        self._may_replicate = _may_replicate(connection)
        ((self._server_started,),) = connection.execute(b"SELECT " + _STARTED).fetchall()

    def _raise_trouble(self, error: psycopg.Error) -> None:
        """Raise TargetLost or TargetBusy, where the error is one that may pass."""
        connection = self._connection
        found = trouble(error, is_closed=connection is None or connection.closed)
        if isinstance(found, TargetLost):
            self.close()
        if found is not None:
            raise found from error


@contextlib.contextmanager
def _within(limit_s: float, connection: psycopg.Connection[Any]) -> Iterator[None]:
    """What takes longer ends with the connection, which is cut: a server that hangs, or whoever stands before it, may have let it in."""
    cutting = threading.Timer(limit_s, _cut, (connection,))
    cutting.start()
    try:
        yield
    finally:
        cutting.cancel()


def _cut(connection: psycopg.Connection[Any]) -> None:
    with contextlib.suppress(psycopg.Error):  # closed meanwhile
        cut(connection.fileno())


def _may_replicate(connection: psycopg.Connection[Any]) -> bool:
    """Whether the role may set it. Undone where it is set: behind a pool, what undoes it later may come to another session."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute("SET LOCAL session_replication_role = replica")
    except sql.InsufficientPrivilege:
        return False
    return True


def _told_doing(since: str, statement: str, kind: str | None, event: str | None) -> str | None:
    """What a session is at that waits for no other one, in a sentence; None where it waits for the replay."""
    if event == "SyncRep":
        return f"since {since} the target has been waiting for a synchronous stand-by, which is away or behind, to have what it commits"
    if kind == "Client":
        return None
    waits = f", waiting for {kind} {event}" if event else ""
    return f"since {since} the target has been at a statement{waits}: {in_a_line(statement)}"


def _may_be_another(error: psycopg.Error) -> bool:
    """In a pipeline the error belongs to one of many statements."""
    return isinstance(error, (sql.DataError, sql.IntegrityError, sql.ProgrammingError))
