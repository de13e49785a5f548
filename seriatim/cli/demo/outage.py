"""How long something stood still at each fault, from what was observed: pure.

An observation is a moment at which a counter (the queue's committed end, say) was seen higher than before. The time
between two of them is a gap. A gap belongs to the first fault that happened inside it, or so shortly before it that what
was on its way may have been seen still; a gap in which none happened, to the last fault before it. The outage of a fault
is the longest of its gaps.

So an outage is measured from the last advance seen before to the first one seen after, which is as exact as the observer
looks often, and never less than his usual interval: where nothing stood still, the outage is about that interval.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

ON_ITS_WAY_S = 0.5
"""For so long after a fault what was done before it may be seen to advance."""


def outages_s(advances_s: Sequence[float], faults_s: Sequence[float], until_s: float) -> list[float | None]:
    """The outage of each fault in seconds; None where nothing was seen to advance after it.

    Args:
        advances_s: moments at which the counter was seen higher than before, rising.
        faults_s: moments of the faults, rising.
        until_s: when the load ended. A gap that ends later counts only if a fault happened in it.
    """
    longest: list[float | None] = [None] * len(faults_s)
    for begin_s, end_s in pairwise(advances_s):
        before = bisect_right(faults_s, begin_s - ON_ITS_WAY_S)
        has_fault = before < len(faults_s) and faults_s[before] <= end_s
        if not has_fault and (before == 0 or end_s > until_s):
            continue
        owner = before if has_fault else before - 1
        longest[owner] = max(longest[owner] or 0.0, end_s - begin_s)
    return _with_shared(longest, advances_s, faults_s)


def _with_shared(
    longest: list[float | None], advances_s: Sequence[float], faults_s: Sequence[float]
) -> list[float | None]:
    """A fault whose only gap belongs to an earlier fault shares it."""
    shared = list(longest)
    for number, at_s in enumerate(faults_s):
        if shared[number] is None and advances_s and at_s <= advances_s[-1]:
            place = bisect_right(advances_s, at_s)
            if 0 < place < len(advances_s):
                shared[number] = advances_s[place] - advances_s[place - 1]
    return shared
