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
    handling = _Handling(records, hand_over, handler, park)
    for record in records:
        term = hand_over.handed_in
        error = handling.failure(record, term)
        if error is not None and not _repeat(handling, term, Blocked(record, error, 1, time.time()), backoff):
            return


@dataclass(frozen=True, slots=True)
class _Handling:
    """What is done with each record."""

    records: Records
    hand_over: HandOver
    handler: Callable[[Record], object]
    park: Callable[[Record, Exception], object] | None

    def failure(self, record: Record, term: int) -> Exception | None:
        """Hand it over, once. None: it is done. Who is deposed meanwhile doesn't park it: another reader may be past it."""
        try:
            self.handler(record)
        except Exception as error:
            if self.park is None or not self.hand_over.holds(term):
                return error
            try:
                self.park(record, error)
            except Exception as failed:
                return failed
            _log.warning("record parked", queue=self.records.queue, offset=record.offset, error=error)
        return None


def _repeat(handling: _Handling, term: int, blocked: Blocked, backoff: Backoff) -> bool:
    """Try again until it works, or the record is another term's to hand out. False: the consumer was closed before it worked."""
    pause_s, record, records = backoff.first_s, blocked.record, handling.records
    while True:
        records.blocked = blocked
        _log.warning(
            "queue blocked", queue=records.queue, offset=record.offset, attempts=blocked.attempts, error=blocked.error
        )
        if not _may_be_repeated(handling.hand_over, term, pause_s):
            records.blocked = None
            return not handling.hand_over.is_closed
        pause_s = min(backoff.max_s, pause_s * 2)
        error = handling.failure(record, term)
        if error is None:
            records.blocked = None
            return True
        blocked = Blocked(record, error, blocked.attempts + 1, blocked.since_s)


def _may_be_repeated(hand_over: HandOver, term: int, pause_s: float) -> bool:
    """Wait so long, and for the lease. False: the consumer was closed, or the term is over."""
    until_s = boottime_s() + pause_s
    while hand_over.term == term and not hand_over.is_closed:
        left_s = until_s - boottime_s()
        if left_s <= 0 and hand_over.holds(term):
            return True
        time.sleep(min(0.05, max(0.01, left_s)))
    return False
