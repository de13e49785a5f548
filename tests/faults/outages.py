"""How long sending and reading stood still because of a fault: pure arithmetic on times."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

_BEFORE_S = 1.0


def longest_gap_s(happened_at_s: Sequence[float], from_s: float, until_s: float) -> float:
    """The longest time in which nothing happened, of all that overlap `from_s` to `until_s`; infinite at an open end.

    Less the ordinary gap, which is the median of those in the second before: at 1,000 records a second they come a few
    milliseconds apart anyway. `happened_at_s`: rising.
    """
    first = max(0, bisect_right(happened_at_s, from_s) - 1)
    last = bisect_left(happened_at_s, until_s)
    if last >= len(happened_at_s) or not happened_at_s or happened_at_s[0] > from_s:
        return math.inf
    around = happened_at_s[first : last + 1]
    before = happened_at_s[bisect_left(happened_at_s, from_s - _BEFORE_S) : first + 1]
    gaps = [later - earlier for earlier, later in pairwise(before) if later > earlier]
    ordinary_s = median(gaps) if gaps else 0.0
    return max(0.0, max((later - earlier for earlier, later in pairwise(around)), default=0.0) - ordinary_s)


def longest_within_s(happened_at_s: Sequence[float], from_s: float, until_s: float) -> float:
    """The longest time between two of those that happened from `from_s` to `until_s`; 0 of fewer than two."""
    inside = happened_at_s[bisect_left(happened_at_s, from_s) : bisect_left(happened_at_s, until_s)]
    return max((later - earlier for earlier, later in pairwise(inside)), default=0.0)


def longest_of_s(periods_s: Iterable[tuple[float, float]], from_s: float, until_s: float) -> float:
    """The longest of the periods (begin, end) that overlap `from_s` to `until_s`; 0 where none does."""
    return max((end - begin for begin, end in periods_s if begin < until_s and end > from_s), default=0.0)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of the values don't exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


BOUNDS_MS = (10, 20, 40, 80, 150, 350, 700, 1500, 3000)
"""Upper ends of the histogram's classes; one more holds the rest."""


def histogram(values_s: Sequence[float]) -> list[int]:
    """How many values lie in each class."""
    counts = [0] * (len(BOUNDS_MS) + 1)
    for value_s in values_s:
        counts[bisect_left(BOUNDS_MS, value_s * 1000)] += 1
    return counts
