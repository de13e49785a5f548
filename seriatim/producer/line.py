"""Who waits on a loop for room in the buffer: one behind the other.

Problem: where all of them try at once, when a batch is at its end, those who came later may get its room, so that records are stored in
another order than they were sent in; and each end of a batch wakes all who wait, for room that a few have.

Idea: only the first of each loop tries, and waits at the buffer; whoever gets what it came for, or gives up, leaves the next one its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator


class Lines:
    """A line for each loop on which somebody waits. Each is its own loop's, and so needs no lock."""

    def __init__(self) -> None:
        self._of: dict[asyncio.AbstractEventLoop, deque[asyncio.Event]] = {}

    def is_anybody_before(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether who comes now would be behind somebody."""
        return loop in self._of

    @contextlib.contextmanager
    def standing(self, loop: asyncio.AbstractEventLoop, turn: asyncio.Event) -> Iterator[None]:
        """Behind all who stand there. `turn` is set once nobody does before."""
        line = self._of.setdefault(loop, deque())
        line.append(turn)
        try:
            yield
        finally:
            was_first = line[0] is turn
            line.remove(turn)
            if not line:
                del self._of[loop]
            elif was_first:
                line[0].set()
