"""How long the machine's own disk stands still: every process of a campaign waits for that one, whatever is done to it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Self

EVERY_S = 0.02
STILL_S = 0.1
"""A small write with its flush takes under a millisecond; what takes this long would be seen in an outage."""


class DiskProbe:
    """Writes a byte and flushes it, again and again, in a thread of its own, from entering it on.

    `standstills`: from when to when each flush lasted that took STILL_S or longer, by the monotonic clock.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-probe", daemon=True)
        self.standstills: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        descriptor = os.open(self._file, os.O_CREAT | os.O_WRONLY)
        try:
            while not self._is_over.wait(EVERY_S):
                began_s = time.monotonic()
                os.pwrite(descriptor, b"x", 0)
                os.fdatasync(descriptor)
                ended_s = time.monotonic()
                if ended_s - began_s >= STILL_S:
                    self.standstills.append((began_s, ended_s))
        finally:
            os.close(descriptor)
