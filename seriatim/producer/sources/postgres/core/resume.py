"""What to do with the slot when elected, decided from the slot and the resume point together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from seriatim.producer.sources.postgres.core.identity import (
    LSN_SHIFT,
    NUMBER_BITS,
    base_seq,
    format_lsn,
    latest_source,
    source_name,
)
from seriatim.producer.sources.postgres.errors import CaptureGap, CaptureRefused, SlotBusy


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
    """Make the slot, after dropping the old one if `drops_slot`, and send a snapshot from its start."""

    drops_slot: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """Go on from the slot: records of `source` at or below `mark` are skipped."""

    source: str
    mark: int
    confirmed_lsn: int


Plan: TypeAlias = TakeSnapshot | Stream


def plan(*, system_id: str, db: str, slot_name: str, slot: Slot | None, marks: Mapping[str, int], log_end: int) -> Plan:
    """Decide how a term starts.

    The queue's marks tell how far the queue is, the slot how far the log was confirmed. Only what both agree to is gone
    on with; a snapshot that was not finished is taken again, with a new slot, and therefore under a new source.

    Raises:
        SlotBusy: another process streams from the slot.
        CaptureRefused: the slot's name is taken by something that isn't a slot of this capture.
        CaptureGap: the slot can't give all that follows on the marks.
    """
    if slot is not None and slot.is_active:
        raise SlotBusy(f"another process streams from slot {slot_name}", slot=slot_name)
    if slot is not None and (slot.plugin != "pgoutput" or slot.db != db):
        raise CaptureRefused(
            f"slot {slot_name} exists and is no pgoutput slot of database {db}; choose another slot name",
            slot=slot_name,
        )
    latest = latest_source(marks, system_id, slot_name)
    if latest is None:
        _refuse_moved(marks, system_id, slot_name)
    if latest is None or latest[1] < base_seq(latest[0]):
        return TakeSnapshot(drops_slot=slot is not None)
    consistent_point, mark = latest
    if slot is None:
        raise _gap(slot_name, "the slot is gone, and with it the changes since")
    if slot.wal_status == "lost" or slot.invalidation is not None:
        raise _gap(slot_name, f"PostgreSQL has given up the slot ({slot.invalidation or slot.wal_status})")
    if slot.confirmed_lsn is None or slot.confirmed_lsn >> LSN_SHIFT > mark >> NUMBER_BITS:
        at = "nothing" if slot.confirmed_lsn is None else format_lsn(slot.confirmed_lsn)
        raise _gap(slot_name, f"the slot is confirmed to {at}, beyond what the queue holds: it was made again or moved")
    if log_end >> LSN_SHIFT < mark >> NUMBER_BITS:
        raise _gap(
            slot_name, f"the database's log ends at {format_lsn(log_end)}, before what the queue holds: it was set back"
        )
    return Stream(source_name(system_id, slot_name, consistent_point), mark, slot.confirmed_lsn)


def _refuse_moved(marks: Mapping[str, int], system_id: str, slot_name: str) -> None:
    """Another cluster's log under the same slot name: the database was replaced under the capture."""
    for source in marks:
        parts = source.split("/")
        if len(parts) == 4 and parts[0] == "pg" and parts[2] == slot_name and parts[1] != system_id:
            raise _gap(
                slot_name, f"the queue holds the log of cluster {parts[1]}, and the database is cluster {system_id}"
            )


def _gap(slot_name: str, reason: str) -> CaptureGap:
    return CaptureGap(f"slot {slot_name}: {reason}", slot=slot_name, reason=reason)
