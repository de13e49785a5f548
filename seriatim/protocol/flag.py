"""What a signal's handler sets, and its own thread waits for."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue


class Flag:
    """As `threading.Event`, whose `set` takes a lock: in a signal's handler for ever, where it has interrupted a `wait` that holds it."""

    def __init__(self) -> None:
        self._is_set = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._told.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set; waits for that up to `timeout_s`."""
        if not self._is_set:
            with contextlib.suppress(Empty):
                self._told.get(timeout=timeout_s)
                self._told.put(None)  # for whoever else waits
        return self._is_set
