"""Records one by one to a handler: one whose handler fails blocks the queue, or is parked."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seriatim.consumer.core.handed_out import HandedOut
from seriatim.consumer.handover import HandOver
from seriatim.protocol import log
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.record import Record

if TYPE_CHECKING:
    from seriatim.consumer.client import Consumer

_log = log.logger("consumer")


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why nothing passes: `record` failed `attempts` times, the last time with `error`, first at `since_s` (time.time)."""

    record: Record
    error: Exception
    attempts: int
    since_s: float


def handle(
    consumer: Consumer,
    hand_over: HandOver,
    handed_out: HandedOut,
    handler: Callable[[Record], object],
    park: Callable[[Record, Exception], object] | None,
    backoff_s: float,
    backoff_max_s: float,
) -> None:
    """See Consumer.run. To ask for the next record is to be done with the one before: who isn't, asks for none."""

    def failure(record: Record, term: int) -> Exception | None:
        """Hand it over, once. None: it is done. Who is deposed meanwhile doesn't park it: another reader may be past it."""
        try:
            answered = handler(record)
        except Exception as error:
            if park is None or not hand_over.holds(term):
                return error
            try:
                answered = park(record, error)
            except Exception as failed:
                return failed
            _check_ran(answered)
            _log.warning("record parked", queue=consumer.queue, offset=record.offset, error=_told(error))
        _check_ran(answered)
        return None

    for record in consumer:
        term = handed_out.term
        error = failure(record, term)
        if error is None:
            continue
        attempts, since_s, pause_s = 1, time.time(), backoff_s
        while error is not None:
            consumer.blocked = Blocked(record, error, attempts, since_s)
            _log.warning(
                "queue blocked", queue=consumer.queue, offset=record.offset, attempts=attempts, error=_told(error)
            )
            if not _may_be_repeated(hand_over, term, pause_s):
                break
            attempts, pause_s = attempts + 1, min(backoff_max_s, pause_s * 2)
            error = failure(record, term)
        consumer.blocked = None
        if error is not None and hand_over.is_closed:
            return


def _check_ran(answered: object) -> None:
    """Raises InvalidArgument where an `async def` was called: nothing of it ran, and the record would count as done."""
    if isinstance(answered, Coroutine):
        answered.close()
        raise InvalidArgument(
            "a handler is a plain function: what is awaited belongs into `async for record in consumer`"
        )


def _told(error: Exception) -> str:
    """With its kind: a KeyError says a key and no more, and a failed assertion nothing."""
    try:
        text = str(error)
    except Exception as failure:  # the application's own, too
        text = f"(its text can't be made: {type(failure).__name__})"
    return f"{type(error).__name__}: {text}"


def _may_be_repeated(hand_over: HandOver, term: int, pause_s: float) -> bool:
    """Wait so long, and for the lease. False: the consumer was closed, or the term is over."""
    until_s = boottime_s() + pause_s
    while hand_over.term == term and not hand_over.is_closed:
        left_s = until_s - boottime_s()
        if left_s <= 0 and hand_over.holds(term):
            return True
        time.sleep(min(0.05, max(0.01, left_s)))
    return False
