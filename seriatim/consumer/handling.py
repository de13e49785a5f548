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
    """See Consumer.run. To ask for the next record is to be done with the one before: who isn't, asks for none."""
    handling = _Handling(records, handler, park)
    for record in records:
        error = handling.failure(record)
        if error is not None and not _repeat(handling, hand_over, Blocked(record, error, 1, time.time()), backoff):
            return


@dataclass(frozen=True, slots=True)
class _Handling:
    """What is done with each record."""

    records: Records
    handler: Callable[[Record], object]
    park: Callable[[Record, Exception], object] | None

    def failure(self, record: Record) -> Exception | None:
        """Hand it over, once. None: it is done."""
        try:
            self.handler(record)
        except Exception as error:
            if self.park is None:
                return error
            try:
                self.park(record, error)
            except Exception as failed:
                return failed
            _log.warning("record parked", queue=self.records.queue, offset=record.offset, error=error)
        return None


def _repeat(handling: _Handling, hand_over: HandOver, blocked: Blocked, backoff: Backoff) -> bool:
    """Try again until it works, or the record is another term's to hand out. False: the consumer was closed before it worked."""
    term, pause_s, record, records = hand_over.term, backoff.first_s, blocked.record, handling.records
    while True:
        records.blocked = blocked
        _log.warning(
            "queue blocked", queue=records.queue, offset=record.offset, attempts=blocked.attempts, error=blocked.error
        )
        until_s = boottime_s() + pause_s
        while (left_s := until_s - boottime_s()) > 0 or not hand_over.is_open:
            if hand_over.is_closed or hand_over.term != term:
                records.blocked = None
                return not hand_over.is_closed
            time.sleep(min(0.05, max(0.01, left_s)))
        pause_s = min(backoff.max_s, pause_s * 2)
        error = handling.failure(record)
        if error is None:
            records.blocked = None
            return True
        blocked = Blocked(record, error, blocked.attempts + 1, blocked.since_s)
