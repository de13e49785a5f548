"""Whether the offsets of a queue hold: no gap, no repeat, no step back (invariant 11); pure.

The only offsets a reader isn't handed are those of re-sends, which are counted: handed out and dropped make up all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class OffsetCheck:
    """Fed with the batches of one reader from `start` on, in the order handed out. One call a batch.

    handed: records handed out. dropped: re-sends left out. skipped: offsets that were passed over, re-sends or not.
    repeats, steps_back: offsets handed out that were not above the one before. unordered: records whose seq isn't above
    that of the record of the same source before (invariants 9 and 10).
    """

    start: int
    handed: int = 0
    dropped: int = 0
    skipped: int = 0
    repeats: int = 0
    steps_back: int = 0
    unordered: int = 0
    _next: int = field(init=False)
    _seqs: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._next = self.start

    def batch(self, offsets: Sequence[int], dropped: int, sources: str | Sequence[str], seqs: Sequence[int]) -> None:
        """Offset, source (one for all, or one each) and seq of each record of a batch, and re-sends dropped in it."""
        self.handed += len(offsets)
        self.dropped += dropped
        for offset in offsets:
            if offset >= self._next:
                self.skipped += offset - self._next
                self._next = offset + 1
            elif offset == self._next - 1:
                self.repeats += 1
            else:
                self.steps_back += 1
        for row, seq in enumerate(seqs):
            source = sources if isinstance(sources, str) else sources[row]
            if seq <= self._seqs.get(source, -1):
                self.unordered += 1
            self._seqs[source] = seq

    def problems(self, end: int) -> tuple[str, ...]:
        """What doesn't hold, as sentences, when everything below `end` was asked for."""
        found = []
        missing = self.skipped + max(0, end - self._next) - self.dropped
        if missing > 0:
            found.append(f"{missing} offsets hold no record and no counted re-send")
        if missing < 0:
            found.append(f"{-missing} more re-sends were dropped than offsets were passed over")
        if self._next > end:
            found.append(f"records were handed out beyond offset {end}")
        if self.repeats:
            found.append(f"{self.repeats} offsets were handed out twice")
        if self.steps_back:
            found.append(f"offsets stepped back {self.steps_back} times")
        if self.unordered:
            found.append(f"{self.unordered} records came repeated or out of their source's order")
        return tuple(found)
