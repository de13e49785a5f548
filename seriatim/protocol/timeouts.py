"""Seconds as an application gives them: what can't be waited for is refused when it is given, and not when it is waited for."""

from __future__ import annotations

import math
import threading
from typing import Final

from seriatim.protocol.errors import InvalidArgument

SESSION_MAX_S: Final = 2_000_000
"""Of a session with ZooKeeper, which takes milliseconds in 31 bits."""


def check_timeout(timeout: object) -> None:
    """Of one wait; None is for ever. Raises InvalidArgument where it is no number, or the system can't wait so long."""
    if timeout is not None and not (isinstance(timeout, int | float) and timeout <= threading.TIMEOUT_MAX):
        raise InvalidArgument(
            f"a time-out is a number of seconds, at most {threading.TIMEOUT_MAX:.0f}, not {timeout!r}; None is for ever"
        )


def check_number(what: str, given: object) -> None:
    """Of one wait that is made in steps, so that any number will do. Raises InvalidArgument where it is none."""
    if not isinstance(given, int | float) or math.isnan(given):
        raise InvalidArgument(f"{what} is a number of seconds, not {given!r}")


def check_seconds(what: str, given: object, *, may_be_zero: bool = False, most: float = threading.TIMEOUT_MAX) -> None:
    """Of a setting. Raises InvalidArgument where it is no number, below 0, more than `most`, or 0 and mustn't be."""
    if not isinstance(given, int | float) or not 0 <= given <= most or (given == 0 and not may_be_zero):
        raise InvalidArgument(f"{what} is a number {'from' if may_be_zero else 'above'} 0 to {most:.0f}, not {given!r}")
