"""When to close a batch.

A batch is closed when it is full or a flush asks for it, when nothing is in flight (waiting would only add latency),
and else when it is old enough. So a lone record leaves at once, and under load batches grow while others
are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BATCH_BYTES: Final = 512 * 1024
"""`BatchLimits.batch_bytes`, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When a batch is full or old.

    `batch_bytes`: a batch holds no more, but for a single record that is larger. `linger_s`: how long a batch may
    stay open while others are in flight.
    """

    batch_bytes: int
    linger_s: float


def closes_in_s(*, records: int, age_s: float, in_flight: int, limits: BatchLimits) -> float | None:
    """In how many seconds an open batch that isn't full is to be closed: 0 at once, None while it is empty."""
    if records == 0:
        return None
    if in_flight == 0:
        return 0.0
    return max(0.0, limits.linger_s - age_s)
