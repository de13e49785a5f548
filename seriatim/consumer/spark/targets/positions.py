"""The table `seriatim_replay.positions` of a target: up to where each queue is in it, and which replay may go on.

Who applies a plan holds the row's lock until its transaction ends, and who claims the position waits for that. A replay that was
stopped within its transaction (by a signal, by a container's pause) would hold it for ever: its machine answers for its connection.
So a session that applies is marked, by an advisory lock that hinders nobody, and a claim that has waited for long enough
ends those that are marked. At any moment that costs at most a try: the row tells who may move the position, not the lock.

Two jobs of one queue, as of a second replay that was started with another subscription, would each apply all of its changes to the same
tables. So a session is marked from its claim on, also while nothing comes, and none is while one that is marked for another job of the
queue is there. One looks after the other: who only looked before it marks itself, beside another who does, would see none.

Nor may one follow the other: the second begins at a snapshot, which empties the tables, and then the first would go on behind rows that
aren't there, or are already. So what one job has written no other job of the queue goes on upon, until somebody says in this table
whose it is: the row goes, or gets the other job's name.

Beside the offset stands which snapshot of the source is under way there (`Snapshot`), so that whoever goes on notices where the rest of it
is missing. With it stands the offset once more: where that is another one, somebody set it, or an earlier version moved it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import psycopg
from psycopg import errors as sql

from seriatim.consumer.spark.apply.plan import Snapshot
from seriatim.consumer.spark.targets.errors import (
    NotClaimed,
    OtherJob,
    OtherQueue,
    PositionMoved,
    RivalJob,
    TargetBusy,
)
from seriatim.protocol.errors import Fenced

Connection: TypeAlias = psycopg.Connection[Any]

CLAIM_WAIT = "10s"
"""So long a claim waits for a lock, in PostgreSQL's spelling."""

_TABLE = b"""
CREATE SCHEMA IF NOT EXISTS seriatim_replay;
CREATE TABLE IF NOT EXISTS seriatim_replay.positions (
    queue_id    bigint NOT NULL,
    job         text NOT NULL,
    queue       text NOT NULL,
    next_offset bigint NOT NULL,
    token       bigint NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now(),
    queue_created_at_ms bigint,
    snapshot    bigint[],
    PRIMARY KEY (queue_id, job)
);
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'seriatim_replay.positions'::regclass
                      AND attname = 'snapshot') THEN
        ALTER TABLE seriatim_replay.positions
            ADD COLUMN IF NOT EXISTS queue_created_at_ms bigint, ADD COLUMN snapshot bigint[];
    END IF;
END $$;
COMMENT ON TABLE seriatim_replay.positions IS
    'Up to which offset (exclusive) each queue is in this database, and the token of the replay that may go on.';
COMMENT ON COLUMN seriatim_replay.positions.snapshot IS
    'Of the source''s snapshot that is under way: next_offset it is told for, consistent point, number of the last record; 0, 0 for none.';
"""
_WAIT_ONLY = b"""
SELECT set_config(name, CASE name WHEN 'lock_timeout' THEN %s ELSE '0' END, true) FROM pg_settings
 WHERE name IN ('lock_timeout', 'statement_timeout', 'transaction_timeout')
"""
_IS_MADE = b"""
SELECT FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'seriatim_replay' AND c.relname = 'positions' AND a.attname = 'snapshot'
"""
"""The newest column; by the catalogue, which everybody may read."""
_STORED = b"SELECT next_offset, token FROM seriatim_replay.positions WHERE queue_id = %s AND job = %s"
_CLAIM = b"""
INSERT INTO seriatim_replay.positions AS p (queue_id, job, queue, next_offset, token, queue_created_at_ms)
    VALUES (%s, %s, %s, 0, %s, %s)
    ON CONFLICT (queue_id, job) DO UPDATE SET token = excluded.token, queue = excluded.queue, updated_at = now(),
        queue_created_at_ms = coalesce(p.queue_created_at_ms, excluded.queue_created_at_ms)
    WHERE p.token <= excluded.token AND (p.queue_created_at_ms = excluded.queue_created_at_ms) IS NOT FALSE
RETURNING next_offset, token, snapshot
"""
_OTHER = b"""
SELECT queue, to_timestamp(queue_created_at_ms / 1000.0)::text, to_timestamp(%s / 1000.0)::text
  FROM seriatim_replay.positions WHERE queue_id = %s AND job = %s AND queue_created_at_ms <> %s
"""
_ADVANCE = b"""
UPDATE seriatim_replay.positions SET next_offset = %s, token = %s, updated_at = now(), snapshot = %s::bigint[]
 WHERE queue_id = %s AND job = %s AND next_offset = %s AND token <= %s
RETURNING pg_backend_pid()
"""
_MARK = b"SELECT pg_advisory_lock_shared(hashtext('seriatim_replay'), hashtext(%s))"
_IS_MARK = b"""
locktype = 'advisory' AND classid = hashtext('seriatim_replay')::oid AND objsubid = 2
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
"""Of a lock in pg_locks; `objid` has the hash of whose it is."""
_END_MARKED = (
    b"SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE "
    + _IS_MARK
    + b"AND objid = hashtext(%s)::oid AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
)
_TURN = b"SELECT pg_advisory_xact_lock(hashtext('seriatim_replay.turn'), hashtext(%s))"
_OF_OTHERS = b"""
  FROM seriatim_replay.positions p LEFT JOIN seriatim_replay.positions own ON own.queue_id = p.queue_id AND own.job = %(job)s
 WHERE p.queue_id = %(queue_id)s AND p.job <> %(job)s
   AND (p.queue_created_at_ms = coalesce(%(created_at_ms)s, own.queue_created_at_ms)) IS NOT FALSE
"""
"""Rows `p` that other jobs of the queue have; `own`, which may be missing, is that of the job that asks, perhaps still of another queue."""
_RIVAL = (
    b"SELECT p.job"
    + _OF_OTHERS
    + b"AND EXISTS (SELECT FROM pg_locks WHERE "
    + _IS_MARK
    + b"AND objid = hashtext(p.queue_id || ' ' || p.job)::oid) LIMIT 1"
)
_WRITER = (
    b"SELECT p.job, p.next_offset, p.updated_at::text"
    + _OF_OTHERS
    + b"AND p.next_offset > 0 AND (own.next_offset > 0 AND own.updated_at > p.updated_at) IS NOT TRUE"
    + b" ORDER BY p.updated_at DESC LIMIT 1"
)
"""At offset 0 nothing was applied. Of two that have, as earlier versions let them, the later one has the target."""


@dataclass(frozen=True, slots=True)
class Position:
    """offset: the first one that isn't in the target yet. token: of the replay that may go on from there.

    snapshot: the one under way there, as a claim tells it; None: not known.
    """

    offset: int
    token: int
    snapshot: Snapshot | None = field(default=None, compare=False)


def make_table(connection: Connection) -> None:
    """Make the table where it isn't there yet. Where it is, a role will do that may write to it, and isn't its owner."""
    if connection.execute(_IS_MADE).rowcount:
        return
    # A transaction of its own: the claim may have to wait, and another job's needs this lock, too.
    with connection.transaction():
        _wait_only(connection)
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('seriatim_replay.positions'))")
        connection.execute(_TABLE)


def stored(connection: Connection, queue_id: int, job: str) -> Position | None:
    """Where the target stands; None before the first claim. Raises UndefinedTable before the first of all."""
    row = connection.execute(_STORED, (queue_id, job)).fetchone()
    return None if row is None else Position(*row)


def claim(connection: Connection, queue_id: int, job: str, queue: str, token: int, created_at_ms: int) -> Position:
    """Raise the stored token to `token`; where nothing is stored, begin at 0. The session is marked.

    `created_at_ms`: when the queue was made, 0 for unknown. A row of an earlier version doesn't say it, and is taken for this queue's.

    Raises OtherQueue where the row is of another queue, Fenced where a newer token is stored, TargetBusy where somebody has held the
    position for `CLAIM_WAIT`: a session that applies is ended then, so that the next try finds it free; RivalJob, OtherJob.
    """
    try:
        with connection.transaction():
            _wait_only(connection)
            _check_alone(connection, queue_id, job, created_at_ms)
            values = (queue_id, job, queue, token, created_at_ms or None)
            row = connection.execute(_CLAIM, values).fetchone()
            if row is None:
                _check_same(connection, queue_id, job, queue, created_at_ms)
                raise _fenced(job, token, stored(connection, queue_id, job))
            connection.execute(_MARK, (_marked(queue_id, job),))
            offset, token, snapshot = row
            return Position(offset, token, _told(snapshot, offset))
    except sql.LockNotAvailable as error:
        raise TargetBusy(_held(connection, queue_id, job)) from error


def _told(snapshot: list[int] | None, offset: int) -> Snapshot | None:
    if snapshot is None or snapshot[0] != offset:
        return None
    _, point, number = snapshot
    return Snapshot(point, number)


def _check_same(connection: Connection, queue_id: int, job: str, queue: str, created_at_ms: int) -> None:
    other = connection.execute(_OTHER, (created_at_ms, queue_id, job, created_at_ms)).fetchone()
    if other is not None and created_at_ms:
        name, then, now = other
        raise OtherQueue(
            f"the target's position is that of another queue with id {queue_id}, {name!r}, made at {then}, while {queue!r} was made at "
            f"{now}: the row of seriatim_replay.positions with queue_id = {queue_id} AND job = '{job}'",
            queue_id=queue_id,
            job=job,
        )


def advance(
    connection: Connection, queue_id: int, job: str, token: int, start: int, end: int, snapshot: Snapshot | None
) -> int:
    """Compare and set. The row stays locked until the end, so a second replay waits here, and then finds it moved.

    Returns the id of the server's process that does it.
    Raises NotClaimed, Fenced, PositionMoved.
    """
    told = None if snapshot is None else [end, snapshot.point, snapshot.number]
    try:
        done = connection.execute(_ADVANCE, (end, token, told, queue_id, job, start, token))
    except (sql.UndefinedTable, sql.UndefinedColumn) as error:  # or one of an earlier version, put back beneath it
        raise _not_claimed(queue_id, job) from error
    for (process,) in done:
        return int(process)
    found = stored(connection, queue_id, job)
    if found is None:
        raise _not_claimed(queue_id, job)
    if found.token > token:
        raise _fenced(job, token, found)
    raise PositionMoved(
        f"the target stands at offset {found.offset}, the plan starts at {start}: nothing was done",
        start=start,
        position=found.offset,
    )


def mark(connection: Connection, queue_id: int, job: str) -> None:
    """Say, for as long as the session lasts, that it applies under this position. Raises RivalJob, OtherJob, NotClaimed."""
    try:
        with connection.transaction():
            _wait_only(connection)
            if stored(connection, queue_id, job) is None:
                raise _not_claimed(queue_id, job)
            _check_alone(connection, queue_id, job)
            connection.execute(_MARK, (_marked(queue_id, job),))
    except sql.UndefinedTable as error:
        raise _not_claimed(queue_id, job) from error


def _check_alone(connection: Connection, queue_id: int, job: str, created_at_ms: int = 0) -> None:
    """Raise RivalJob, or OtherJob; none comes until the transaction ends."""
    connection.execute(_TURN, (str(queue_id),))
    own = {"queue_id": queue_id, "job": job, "created_at_ms": created_at_ms or None}
    rival = connection.execute(_RIVAL, own).fetchone()
    if rival is not None:
        raise RivalJob(rival[0])
    # Behind the look for rivals: what one that has just gone wrote is to be seen.
    writer = connection.execute(_WRITER, own).fetchone()
    if writer is not None:
        raise OtherJob(queue_id, job, *writer)


def _marked(queue_id: int, job: str) -> str:
    return f"{queue_id} {job}"


def _wait_only(connection: Connection) -> None:
    """In this transaction, for a lock, so long. A role's time-out that comes before would leave whoever holds it there."""
    connection.execute(_WAIT_ONLY, (CLAIM_WAIT,))


def _held(connection: Connection, queue_id: int, job: str) -> str:
    """End who applies, and tell who it was that held the position."""
    what = f"the position of job {job} in the target has been held for {CLAIM_WAIT}"
    try:
        ended = connection.execute(_END_MARKED, (_marked(queue_id, job),)).fetchall()
    except sql.InsufficientPrivilege as error:
        return f"{what} by a replay before this one, whose session this one's role can't end: {error}"
    if ended:
        return f"{what} by a replay before this one: its session was ended"
    return f"{what} by another session, which is no replay's: pg_stat_activity there shows whose"


def _not_claimed(queue_id: int, job: str) -> NotClaimed:
    return NotClaimed(f"queue {queue_id} has no position for job {job}")


def _fenced(job: str, token: int, found: Position | None) -> Fenced:
    newer = found.token if found else None
    return Fenced(f"job {job}: token {token} is older than {newer}, which the target has", token=token, stored=newer)
