"""Waiting for what is to become true, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(claim: Callable[[], object], timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline_s, "it didn't come true in time"
        time.sleep(0.02)
