"""What to do with the slot when elected, decided from the slot and from where the queue stands.

Problem: the slot is confirmed to what was acknowledged; the resume point can lie below that, because the one member whose
answer sealed a link didn't know yet that its last records were committed. What lies between can't be read from the log again.

A database that was set back writes other transactions at positions that the queue has passed. Once it has written beyond what
the queue holds nothing shows that any more, so the slot, which is set back too, is dropped as soon as it is seen.

Rule: what the log still has is sent again from the resume point on (H2), and what it has let go the chain has to hold. A slot
that is confirmed beyond what the chain holds, or beyond what an operator gave up of it, proves a gap. A slot behind which a capture
with another one began a snapshot is over: whoever applies the queue has emptied the tables there.

Whose a slot is: the queues of two clusters may have one name, and so one slot, and which one made it PostgreSQL doesn't tell. So a slot is made
for good only once the queue has the beginning of its snapshot, and by one capture at a time: a slot that a queue knows nothing of is another
one's. So is one beside an unfinished snapshot that isn't confirmed to that one's point, where nothing moves it before the snapshot is whole:
it was made since, and later slots have later points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from seriatim.producer.sources.postgres.core.identity import (
    LSN_SHIFT,
    NUMBER_BITS,
    Server,
    base_seq,
    later_source,
    latest_source,
    parse_source,
)
from seriatim.producer.sources.postgres.errors import CaptureGap, CaptureRefused, SlotBusy, SlotForeign
from seriatim.protocol.change import format_lsn


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a queue stands, for each source.

    Attributes:
        resume_point: highest seq up to which the queue is known to hold all on two disks: what lies above is sent again.
        held: highest seq that the queue holds, be it on one disk. Invariant: at or above the resume point.
        given_up_from: first seq that may have been in what an operator gave up; sources of which nothing was are left out.
    """

    resume_point: Mapping[str, int]
    held: Mapping[str, int]
    given_up_from: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot as pg_replication_slots shows it.

    Attributes:
        plugin: output plugin; None for a physical slot.
        db: its database; None for a physical slot.
        is_active: some process streams from it.
        confirmed_lsn: position confirmed; None for a physical slot.
        wal_status: reserved, extended, unreserved or lost.
        invalidation: why it can't be used any more; None if it can.
    """

    plugin: str | None
    db: str | None
    is_active: bool
    confirmed_lsn: int | None
    wal_status: str | None
    invalidation: str | None


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Send a snapshot, and make the slot at its point, after dropping the old one if `drops_slot`."""

    drops_slot: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """Go on from the slot: records of `source` at or below `mark` are skipped."""

    source: str
    mark: int
    confirmed_lsn: int


@dataclass(frozen=True, slots=True)
class GiveUpSlot:
    """Drop the slot, and end with a gap for this reason.

    For what can be seen now, and no longer once the database has written on: with the slot still there, a later start would
    go on from it.
    """

    reason: str


Plan: TypeAlias = TakeSnapshot | Stream | GiveUpSlot


def plan(
    *,
    server: Server,
    slot_name: str,
    slot: Slot | None,
    kept: Kept,
    log_end: int,
) -> Plan:
    """Decide how a term starts.

    The chain tells how far the queue is, the slot how far the log was confirmed. Only what both agree to is gone on with;
    a snapshot that isn't known to be kept whole is taken again, with a new slot, and therefore under a new source.

    Raises:
        SlotForeign: the slot is another queue's.
        SlotBusy: another process streams from the slot.
        CaptureRefused: the slot's name is taken by something that isn't a slot of this capture.
        CaptureGap: the slot can't give all that follows on the marks.
    """
    found = latest_source(kept.held, server.system_id, slot_name)
    if found is None:
        _refuse_moved(kept.held, server.system_id, slot_name)
        _refuse_slot(slot_name, slot, server.db, is_own=False)
        return TakeSnapshot(drops_slot=False)
    latest, held = found
    source = latest.name
    mark = kept.resume_point.get(source, 0)
    is_kept = _is_snapshot_kept(latest.consistent_point, mark, held, slot)
    is_at_its_point = slot is not None and slot.confirmed_lsn == latest.consistent_point
    _refuse_slot(slot_name, slot, server.db, is_own=is_kept or is_at_its_point)
    if not is_kept:
        return TakeSnapshot(drops_slot=slot is not None)
    if latest.timeline not in {None, server.timeline}:
        raise gap(
            slot_name,
            f"the queue holds the log of timeline {latest.timeline}, and the database is on timeline {server.timeline}: "
            "it was restored, or a stand-by was promoted, and the same positions hold other transactions",
        )
    later = later_source(kept.held, latest)
    if later is not None:
        raise gap(
            slot_name,
            f"a capture with slot {later.slot} began a snapshot behind it, which took the place of all before",
        )
    if slot is None:
        raise gap(slot_name, "the slot is gone, and with it the changes since")
    if slot.wal_status == "lost" or slot.invalidation is not None:
        raise gap(slot_name, f"PostgreSQL has given up the slot ({slot.invalidation or slot.wal_status})")
    if slot.confirmed_lsn is None or slot.confirmed_lsn >> LSN_SHIFT > held >> NUMBER_BITS:
        at = "nothing" if slot.confirmed_lsn is None else format_lsn(slot.confirmed_lsn)
        raise gap(slot_name, f"the slot is confirmed to {at}, beyond what the queue holds: it was made again or moved")
    lost = kept.given_up_from.get(source)
    if lost is not None and (lost <= mark or lost < base_seq(slot.confirmed_lsn)):
        at = format_lsn(lost >> NUMBER_BITS << LSN_SHIFT)
        raise gap(slot_name, f"an operator gave up a part of the queue in which changes from {at} on may have been")
    if log_end >> LSN_SHIFT < held >> NUMBER_BITS:
        return GiveUpSlot(
            f"the database's log ends at {format_lsn(log_end)}, before what the queue holds: it was set back"
        )
    return Stream(source, mark, slot.confirmed_lsn)


def _refuse_slot(slot_name: str, slot: Slot | None, db: str, *, is_own: bool) -> None:
    """One that isn't this capture's to use, or to drop."""
    if slot is None:
        return
    if slot.plugin != "pgoutput" or slot.db != db:
        raise CaptureRefused(
            f"slot {slot_name} exists and is no pgoutput slot of database {db}; choose another slot name",
            slot=slot_name,
        )
    if not is_own:
        raise SlotForeign(slot_name)
    if slot.is_active:
        raise SlotBusy(f"another process streams from slot {slot_name}", slot=slot_name)


def _is_snapshot_kept(consistent_point: int, mark: int, held: int, slot: Slot | None) -> bool:
    """Whether the whole snapshot is on two disks, or was acknowledged: only then is the slot confirmed beyond its start.

    A slot beyond what the queue holds tells nothing of that: it was made again for another snapshot, of which nothing was sent.
    """
    end = base_seq(consistent_point)
    if slot is None or slot.confirmed_lsn is None:
        return mark >= end
    is_acknowledged = consistent_point >> LSN_SHIFT < slot.confirmed_lsn >> LSN_SHIFT <= held >> NUMBER_BITS
    return mark >= end or (held >= end and is_acknowledged)


def _refuse_moved(marks: Mapping[str, int], system_id: str, slot_name: str) -> None:
    """Another cluster's log under the same slot name: the database was replaced under the capture."""
    for name in marks:
        source = parse_source(name)
        if source is not None and source.slot == slot_name and source.system_id != system_id:
            raise gap(
                slot_name,
                f"the queue holds the log of cluster {source.system_id}, and the database is cluster {system_id}",
            )


def gap(slot_name: str, reason: str, kind: type[CaptureGap] = CaptureGap) -> CaptureGap:
    """The error for a slot that can't be gone on from."""
    return kind(f"slot {slot_name}: {reason}", slot=slot_name, reason=reason)
