"""What can go wrong while a plan is applied.

SeriatimError
├── RefusedError
│   ├── Fenced (protocol)     a replay with a newer token has claimed the position
│   ├── PositionMoved         the plan doesn't start at the stored position: it was applied before, or has a gap
│   └── NotClaimed            no position is stored for this queue and job
├── WorldError
│   ├── TargetLost            the connection broke; whether the plan is in the target, its position tells
│   └── TargetBusy            others collide with the plan all the time, or the target lacks space, memory or time for it
│       └── RivalJob          a replay with another subscription applies the same queue to this target
└── CallerError
    ├── ApplyFailed           the target refused a change
    │   ├── Diverged          a row that a change updates or deletes isn't there, or not once
    │   ├── CoarseKey         two rows of the source have one key in the target
    │   └── TruncateRefused   a table is to be emptied, and one that isn't refers to it
    ├── OtherJob              a replay with another subscription has written what the target has of the queue
    ├── OtherQueue            the position that the target holds is that of another queue
    ├── PooledTarget          the target's DSN leads to a pool that gives each transaction another session
    └── UnfitTarget …         see seriatim.consumer.spark.apply.errors
        └── TablesChanged     a plan was made for tables that aren't as they were then
"""

from __future__ import annotations

from collections.abc import Iterable

from seriatim.consumer.spark.apply.errors import UnfitTarget
from seriatim.consumer.spark.apply.shape import TableName
from seriatim.protocol.errors import CallerError, RefusedError, WorldError


class PositionMoved(RefusedError):
    """Nothing was done. `details` holds start (of the plan) and position (stored)."""

    code = "position-moved"
    next_step = "go on from the stored position"


class NotClaimed(RefusedError):
    """Nothing was done: `PostgresTarget.claim` comes first."""

    code = "not-claimed"


class TargetLost(WorldError):
    """The connection broke, or leads to a server that isn't the primary any more.

    The plan is in the target wholly or not at all; its position tells which.
    """

    code = "target-lost"


class TargetBusy(WorldError):
    """Others in the target kept colliding with the plan, or it can't be carried out for now; nothing was applied."""

    code = "target-busy"


class RivalJob(TargetBusy):
    """Two jobs of one queue in one target would apply each change twice: to a table without a key that is a row too many."""

    code = "rival-job"

    def __init__(self, job: str) -> None:
        super().__init__(f"a replay with subscription {job} applies this queue to this target: only one may", job=job)


class OtherJob(CallerError):
    """A job that begins empties the tables for its snapshot; one that goes on then takes for applied what isn't there any more."""

    code = "other-job"
    next_step = (
        "if the other one is to go on, start that one, and not this one; if this one is to take its place, delete its own row, if it "
        "has one, and either that one as well: the target is then filled anew from the queue's first snapshot; or set that one's job to "
        "this one's, and its token to 0: this one then goes on where that one stands"
    )

    def __init__(self, queue_id: int, job: str, writer: str, offset: int, updated_at: str) -> None:
        super().__init__(
            f"what the target has of this queue is not of the replay with subscription {job}, but of another one, {writer}, up to "
            f"offset {offset}, by {updated_at}: the row of seriatim_replay.positions with queue_id = {queue_id} AND job = '{writer}'",
            queue_id=queue_id,
            job=job,
            writer=writer,
        )


class OtherQueue(CallerError):
    """Another cluster's queue, or that of a cluster that was made anew, has the same id: its offsets mean nothing in this one."""

    code = "other-queue"
    next_step = (
        "if both are meant for this target, start this one with another --subscription NAME; if the other one is no more, "
        "delete that row: the target is then filled anew from this queue's snapshot"
    )


class PooledTarget(CallerError):
    """A replay needs a session of the server for itself, and its settings would stay in those that others have next."""

    code = "pooled-target"
    next_step = "have it lead to the server itself, or to a pool in session mode"

    def __init__(self) -> None:
        super().__init__(
            "the target's DSN leads to a pool that changes sessions between transactions (transaction mode)"
        )


class TablesChanged(UnfitTarget):
    """Somebody altered tables since the plan was made; nothing was done. A plan for what they are now may do."""

    code = "tables-changed"

    def __init__(self, tables: Iterable[TableName]) -> None:
        names = ", ".join(sorted(map(str, tables)))
        super().__init__(f"{names}: altered in the target since the plan was made; nothing was applied", tables=names)


class ApplyFailed(CallerError):
    """The target refused a change; nothing of the plan was applied. `details` holds table, key, offset."""

    code = "apply-failed"


class Diverged(ApplyFailed):
    """The target isn't a copy of the source any more: `seriatim verify` shows where."""

    code = "diverged"
    next_step = "compare with `seriatim verify`; then mend the target or take a new snapshot"


class CoarseKey(ApplyFailed):
    """The target compares keys more coarsely than the source, as by a collation that knows no case: one row would take another one's place."""

    code = "coarse-key"
    next_step = "have the key's columns in the target as they are in the source, then start the replay again"


class TruncateRefused(ApplyFailed):
    """PostgreSQL empties no table that a foreign key of another one refers to, be that one empty.

    That one is the target's alone, or isn't captured: it is in no publication, or UNLOGGED, or a part of its partitions is. To empty the other one as well (CASCADE) would take rows that nobody deleted at the source.
    """

    code = "truncate-refused"
    next_step = "drop that foreign key in the target, then start the replay again"

    def __init__(self, tables: Iterable[TableName], offset: int, detail: str) -> None:
        names = ", ".join(map(str, tables))
        super().__init__(
            f"{names}: to be emptied by the change at offset {offset}, but another table of the target refers to it, which "
            f"that change doesn't empty: {detail} Nothing of its transaction was applied",
            table=names,
            key=None,
            offset=offset,
        )
