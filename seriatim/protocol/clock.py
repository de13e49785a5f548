"""The clocks. Cores never read them: time is given to a core as data."""

from __future__ import annotations

import time


def boottime_s() -> float:
    """Seconds that also count while the machine sleeps, for leases and deadlines (protocol.md 4, Lease)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def monotonic_s() -> float:
    """Seconds that don't count while the machine sleeps, for what one process waits for within itself."""
    return time.monotonic()


def now_ms() -> int:
    """Milliseconds since 1970, for what a person reads. No decision about order rests on it."""
    return time.time_ns() // 1_000_000
