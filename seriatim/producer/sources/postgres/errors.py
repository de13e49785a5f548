"""What can end a capture. Part of the tree in `seriatim.protocol.errors`."""

from __future__ import annotations

from typing import Final

from seriatim.protocol.errors import BugError, CallerError, WorldError

_START_AGAIN: Final = (
    "to start again with a new snapshot, capture with another slot name; the replay empties its tables at that snapshot"
)


class CaptureRefused(CallerError):
    """The source database can't be captured as it is; `details["statement"]`, where given, mends it."""

    code = "capture-refused"


class KeylessTable(CaptureRefused):
    """A table without a replica identity: its updates and deletes could not be told apart.

    `details`: schema, table, statement.
    """

    code = "keyless-table"


class RowsHidden(CaptureRefused):
    """Row-level security hides rows of a table from the capture's role.

    `details`: schema, table, role, statement.
    """

    code = "rows-hidden"
    next_step = "only a superuser can run that; or capture as a role that is shown every row"


class CaptureGap(CallerError):
    """What the queue holds and what the slot still gives don't join: going on would leave changes out silently.

    Nothing acknowledged is touched. `details`: slot, reason.
    """

    code = "capture-gap"
    next_step = (
        f"{_START_AGAIN}; drop the old slot where it is still there, it keeps the log until the disk is full: "
        "SELECT pg_drop_replication_slot('SLOT')"
    )


class SlotGivenUp(CaptureGap):
    """A gap for good: the slot belongs to a history that the database left, and was dropped, so that no later start takes it up.

    `details`: slot, reason.
    """

    code = "slot-given-up"
    next_step = f"the slot was dropped, since it would have left changes out; {_START_AGAIN}"


class TransactionTooLarge(CallerError):
    """A transaction has more records than the number in a seq can count. `details`: tx_id, limit."""

    code = "transaction-too-large"
    next_step = (
        "nothing of it was confirmed; to get past it, capture with another slot name, which starts with a new snapshot"
    )


class LogTooFar(CallerError):
    """A log position beyond what a seq can hold."""

    code = "log-too-far"
    next_step = "dump the database into a new cluster, whose log starts again, and capture that"


class SourceLost(WorldError):
    """The source database can't be reached, or ended the connection. A retry may help."""

    code = "source-lost"
    next_step = "is the database running, and is the DSN right?"


class LogUnreadable(SourceLost):
    """The server met an error while it read its log for the slot. A retry may help; met again at the same place, it stays."""

    code = "log-unreadable"
    next_step = ""


class PartitionUnclear(SourceLost):
    """It can't be told whether a row is of a partition whose replica identity is too little. A new stream that begins with its transaction tells."""

    code = "partition-unclear"
    next_step = ""


class SourceSilent(SourceLost):
    """The source database's machine is there, and the process that streams says nothing. Another connection may help."""

    code = "source-silent"
    next_step = "does the database hang (its disk, a stopped process), or something on the way to it?"


class ResumePointUnknown(WorldError):
    """Nobody can tell which changes the queue holds, because the end of an earlier link is lost. Asking again may help."""

    code = "resume-point-unknown"
    next_step = (
        "start a member of the lost link's group again, or abandon the link; nothing is sent or confirmed before"
    )


class SlotBusy(WorldError):
    """Another process streams from the slot, usually the capture that was elected before, or has just moved it. A retry may help."""

    code = "slot-busy"


class SlotForeign(WorldError):
    """The slot is another queue's: it is left alone, also where nobody streams from it just now. `details`: slot."""

    code = "slot-foreign"

    def __init__(self, slot: str) -> None:
        super().__init__(
            f"slot {slot} is of no snapshot that this queue has: another queue's capture made it, of another cluster, or of a queue that is gone; "
            f"capture with another --slot, or, if no capture comes back to it, run: SELECT pg_drop_replication_slot('{slot}')",
            slot=slot,
        )


class SourceTablesChanged(WorldError):
    """A table was written anew, changed or dropped between the slot's making and the snapshot's first row. A retry, with a new slot, helps."""

    code = "source-tables-changed"
    next_step = "the snapshot begins again by itself"


class MalformedLog(BugError):
    """A message of the log can't be read, or comes where it can't come."""

    code = "malformed-log"
