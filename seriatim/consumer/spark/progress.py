"""What a replay tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SLOW_S = 10.0
"""What takes longer, and each time so much longer again, gets a word about what it may be waiting for."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing is applied now: another replay is elected, or something can't be reached. `reason` is for a person."""

    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """Elected with `token`; goes on at `offset`, where the target stands."""

    queue: str
    token: int
    offset: int


@dataclass(frozen=True, slots=True)
class Applying:
    """A transaction larger than memory is on its way into the target: up to `offset` so far, of `end`. Nobody sees it there yet."""

    queue: str
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A micro-batch is in the target, as far as it was complete.

    offset: where the target stands (exclusive). records: rows of the micro-batch. changes, transactions: carried out.
    lag_records: committed in the queue and not in the target; None where no coordinator or member said. lag_s: from the newest
    commit in it, by the source's clock, to now; None where there is none, as where the source is at rest and the capture tells only that.
    batch_s: time for the micro-batch. source_lsn: up to where in the source's log all is in the target, as PostgreSQL writes it; None where
    nothing came that tells.
    """

    queue: str
    token: int
    offset: int
    records: int
    changes: int
    transactions: int
    lag_records: int | None
    lag_s: float | None
    batch_s: float
    source_lsn: str | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The replay ended well. `records`, `changes`: in all its terms."""

    offset: int | None
    records: int
    changes: int


Event = Waiting | Started | Applying | Progress | Stopped
Report = Callable[[Event], None]
"""Is called on any thread, one at a time."""
