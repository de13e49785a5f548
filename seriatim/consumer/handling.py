"""Records one by one to a handler: one whose handler fails blocks the queue, or is parked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from seriatim.consumer.handover import HandOver
from seriatim.protocol import log
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.record import Record

_log = log.logger("consumer")


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why nothing passes: `record` failed `attempts` times, the last time with `error`, first at `since_s` (time.time)."""

    record: Record
    error: Exception
    attempts: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds until a record that failed is tried again: doubled each time, up to a bound."""

    first_s: float
    max_s: float


class Records(Protocol):
    """An iterator of records that shows what blocks it."""

    queue: str
    blocked: Blocked | None

    def __iter__(self) -> Iterator[Record]: ...


def handle(
    records: Records,
    hand_over: HandOver,
    handler: Callable[[Record], object],
    park: Callable[[Record, Exception], object] | None,
    backoff: Backoff,
) -> None:
    """See Consumer.run."""
    for record in records:
        try:
            handler(record)
        except Exception as error:
            if park is not None:
                park(record, error)
                _log.warning("record parked", queue=records.queue, offset=record.offset, error=error)
            else:
                _repeat(records, hand_over, handler, Blocked(record, error, 1, time.time()), backoff)


def _repeat(
    records: Records, hand_over: HandOver, handler: Callable[[Record], object], blocked: Blocked, backoff: Backoff
) -> None:
    """Try again until it works, or this reader may not go on with the record."""
    term, pause_s, record = hand_over.term, backoff.first_s, blocked.record
    while True:
        records.blocked = blocked
        _log.warning(
            "queue blocked", queue=records.queue, offset=record.offset, attempts=blocked.attempts, error=blocked.error
        )
        until_s = boottime_s() + pause_s
        while (left_s := until_s - boottime_s()) > 0 or not hand_over.is_open:
            if hand_over.is_closed or hand_over.term != term:
                records.blocked = None
                return
            time.sleep(min(0.05, max(0.01, left_s)))
        pause_s = min(backoff.max_s, pause_s * 2)
        try:
            handler(record)
        except Exception as again:
            blocked = Blocked(record, again, blocked.attempts + 1, blocked.since_s)
        else:
            records.blocked = None
            return
