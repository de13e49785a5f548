"""How many records a micro-batch may have.

Problem: one that is too large for Spark's memory fails whenever it is tried, and so it does behind others of its transaction. But a query
fails for other reasons, too, as with a worker of Spark's that is away for a minute, and nobody can tell from its error which it was.

Idea: half as many after each query that failed where it began; twice as many again, up to what was set, once a size has moved the target
for a while. Each such try that was one too many makes that while twice as long.
"""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 60.0
MAX_S: Final = 3600.0


class BatchSize:
    """`records`: what a micro-batch of the next query may have, 1 ≤ records ≤ limit. `may_grow`: it is time for a query with more.

    `failures`: of queries, since one moved the target.
    """

    def __init__(self, limit: int) -> None:
        self.records = limit
        self.may_grow = False
        self.failures = 0
        self._limit = limit
        self._while_s = FIRST_S
        self._has_grown = False  # since it was last halved
        self._moving_since_s: float | None = None  # the target, by the query that runs

    def begin(self) -> None:
        """A query begins."""
        self.may_grow = False
        self._moving_since_s = None

    @property
    def has_moved(self) -> bool:
        """Whether the query that runs, or was the last, has moved the target."""
        return self._moving_since_s is not None

    def moved(self, now_s: float) -> None:
        """A micro-batch has moved the target. Only then it may be time: a transaction that is unfinished would be read anew."""
        if self._moving_since_s is None:
            self._moving_since_s = now_s
        self.failures = 0
        self.may_grow = self.records < self._limit and now_s - self._moving_since_s >= self._while_s

    def grow(self) -> None:
        """Have twice as many."""
        self.records = min(self._limit, 2 * self.records)
        self._has_grown = True

    def halve(self) -> None:
        """Have half as many, of two at least."""
        self.records //= 2
        if self._has_grown:
            self._has_grown = False
            self._while_s = min(MAX_S, 2 * self._while_s)
