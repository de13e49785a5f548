"""Where a target begins that has nothing yet.

A queue that still has its first record is taken from there. One whose first links retention has dropped, or whose first records an
operator gave up, can only be begun at a snapshot: what comes before it changes rows that the target would have to have, and what wasn't changed since would never come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from seriatim.consumer.range_reader import Positions, RangeReader
from seriatim.protocol.change import MalformedChange, decode
from seriatim.protocol.errors import CallerError, NotElected, Unreachable


class RecordsGone(CallerError):
    """Retention dropped records that the target doesn't have."""

    code = "records-gone"
    next_step = (
        "start the capture with another --slot, which takes a new snapshot; delete that row in the target; then start the replay "
        "again, which begins at the snapshot"
    )


class NoSnapshot(RecordsGone):
    """The queue's first records were dropped, or given up, and with them the snapshot that a new target would begin with."""

    code = "no-snapshot"
    next_step = "start the capture with another --slot, which takes a new snapshot, then start the replay again"


def first_offset(reader: RangeReader, report: Callable[[str], None], is_over: Callable[[], bool]) -> int:
    """The offset to begin at: 0, or that of the first snapshot that is kept.

    Reads the queue until that is found, at most to its end; `report` is told before, `is_over` asked meanwhile.
    Raises NoSnapshot where there is none, NotElected where it is over before that is known, Unreachable where nobody knows whether the
    first link has records, and what else `RangeReader` raises.
    """
    positions = reader.positions()
    if not positions.spans:
        _check_end(reader, positions)
        if positions.end == 0:
            return 0
        raise NoSnapshot(
            f"the target has nothing yet, and queue {reader.queue!r} has no snapshot to begin with: its records up to "
            f"{positions.end} are gone, and none has come since",
            earliest=positions.end,
            end=positions.end,
        )
    # `earliest` may be of a link that was given up whole, and stays in the chain for a while.
    first = positions.spans[0].start
    if first == 0:
        return 0
    report(
        f"the target has nothing yet, and the first record that queue {reader.queue!r} keeps is {first:,}: "
        "looking for a snapshot from there on"
    )
    with closing(_records(reader, first, positions.end)) as records:
        for offset, value in records:
            if begins_snapshot(value):
                return offset
            if is_over():
                raise NotElected("looking for a snapshot was given up")
    _check_end(reader, positions)
    raise NoSnapshot(
        f"the target has nothing yet, and queue {reader.queue!r} has no snapshot to begin with: its first records are gone, "
        f"the first one kept is {first}, and up to its end, {positions.end}, none begins",
        earliest=first,
        end=positions.end,
    )


def _check_end(reader: RangeReader, positions: Positions) -> None:
    if not positions.is_end_known:
        raise Unreachable(
            f"no member tells where queue {reader.queue!r} ends: there may be a snapshot in its last link"
        )


def _records(reader: RangeReader, start: int, end: int) -> Generator[tuple[int, bytes], None, None]:
    for rows in reader.read_columns(start, end):
        yield from zip(rows.offsets, rows.columns.values, strict=True)


def begins_snapshot(value: bytes) -> bool:
    """Whether a record's value is the envelope that begins a snapshot."""
    if b"snapshot_begin" not in value:
        return False
    try:
        return decode(value).op == "snapshot_begin"
    except MalformedChange:
        return False
