"""Which offsets a micro-batch takes, and which of them each task reads: decided by what a coordinator shows, maybe late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from seriatim.consumer.range_reader import Positions


def offset_ranges(spans: Sequence[range], start: int, end: int, records_per_partition: int) -> list[range]:
    """What tasks read of start <= offset < end: parts of links, each at most `records_per_partition` offsets long.

    A link that was given up leaves a gap of a million million offsets, which nobody reads.
    """
    found = []
    for span in spans:
        first, stop = max(start, span.start), min(end, span.stop)
        if first < stop:
            parts = -(-(stop - first) // records_per_partition)
            bounds = [first + (stop - first) * part // parts for part in range(parts + 1)]
            found += [range(*pair) for pair in pairwise(bounds)]
    return found


def offset_after(spans: Sequence[range], start: int, count: int, end: int) -> int:
    """The offset behind `count` records from `start` on, at most `end`. Re-sends count, too: nobody knows them yet."""
    for span in spans:
        first = max(start, span.start)
        if first >= span.stop:
            continue
        if count <= span.stop - first:
            return min(end, first + count)
        count -= span.stop - first
    return end


def promised_ranges(positions: Positions, start: int, end: int, records_per_partition: int) -> list[range]:
    """As `offset_ranges`, of a micro-batch for which there was all up to `end` when it was begun.

    Whoever tells less now lags behind, and a task waits for it: one range, because there may be a gap in it.
    """
    ranges = offset_ranges(positions.spans, start, end, records_per_partition)
    if end > positions.end:
        ranges.append(range(max(start, positions.end), end))
    return ranges
