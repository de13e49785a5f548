"""What `seriatim bench` makes of its observations: pure arithmetic on seconds and counts."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` per cent of the values don't exceed (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def milliseconds(seconds: float | None) -> float | None:
    """Rounded to a microsecond."""
    return None if seconds is None else round(seconds * 1000, 3)


def throughput(
    count: int, size_bytes: int, seconds: float, latencies_s: Sequence[float]
) -> dict[str, float | int | None]:
    """Figures that every kind of measurement has; a megabyte is a million bytes of values."""
    seconds = max(seconds, 1e-9)
    return {
        "count": count,
        "seconds": round(seconds, 3),
        "records_per_s": round(count / seconds),
        "mb_per_s": round(count * size_bytes / seconds / 1e6, 3),
        "latency_p50_ms": milliseconds(percentile(latencies_s, 50)),
        "latency_p99_ms": milliseconds(percentile(latencies_s, 99)),
    }


@dataclass(frozen=True, slots=True)
class Standstill:
    """`shown_s`: how long something stood still because of a harm; `later_s`: the longest that it did later."""

    shown_s: float
    later_s: float


def standstill(
    happened_at_s: Sequence[float], harmed_at_s: float, until_s: float, shows_within_s: float
) -> Standstill | None:
    """How long something stood still that happens in bursts, as a batch's records are acknowledged at one moment.

    It is the longest time between two events of which the second came after the harm and the first no later than
    `shows_within_s` after it, less the ordinary silence. Later ones up to `until_s`, as while a killed process starts
    again, are told apart. None where nothing happened after the harm.

    happened_at_s: rising, at least one before the harm.
    """
    harmed = bisect_right(happened_at_s, harmed_at_s)
    if harmed in {0, len(happened_at_s)}:
        return None
    ordinary_s = ordinary_silence_s(happened_at_s[:harmed])
    shown = max(harmed, bisect_right(happened_at_s, harmed_at_s + shows_within_s))
    later = happened_at_s[shown : max(shown, bisect_left(happened_at_s, until_s)) + 1]
    return Standstill(_longest_s(happened_at_s[harmed - 1 : shown + 1], ordinary_s), _longest_s(later, ordinary_s))


def ordinary_silence_s(happened_at_s: Sequence[float]) -> float:
    """The gap in which a moment taken at random lies: half of the time is in gaps that are no longer. 0 of one event."""
    gaps_s = sorted(later - earlier for earlier, later in pairwise(happened_at_s))
    half_s, passed_s = sum(gaps_s) / 2, 0.0
    for gap_s in gaps_s:
        passed_s += gap_s
        if passed_s >= half_s:
            return gap_s
    return 0.0


def _longest_s(times_s: Sequence[float], ordinary_s: float) -> float:
    longest_s = max((later - earlier for earlier, later in pairwise(times_s)), default=0.0)
    return max(0.0, longest_s - ordinary_s)
