"""Has threads stop between two lines: `pytest --slow-lines SEED`, with which chance picks lines of the product that take their thread a while.

Problem: what two threads share breaks where one of them stands still between two lines for as long as the other takes to look. That
is a matter of microseconds: a test meets it once in thousands of runs, and whoever has a busy machine meets it.

Idea: a trace function on every thread. A line in so many is slow, from a millisecond to longer than anybody here waits before he looks
again; always the same ones for a seed, and each only the first few times: time-outs are not what is looked for.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import seriatim

_PRODUCT: Final = f"{Path(seriatim.__file__).parent}{os.sep}"
_CORE: Final = f"{os.sep}core{os.sep}"
ONE_IN: Final = 12
DELAYS_S: Final = (0.001, 0.01, 0.05, 0.3)
TIMES: Final = 4
"""A line that chance picked is slow so often."""
EACH_S: Final = 0.003
SWITCH_S: Final = 1e-5


class SlowLines:
    """A context manager: on this thread, and on all that are begun meanwhile, of this process.

    `at`: part of the paths of the files meant. `seed`: None: each line there takes EACH_S, each time. Compiled modules have no lines.
    """

    def __init__(self, at: str = "", seed: int | None = None) -> None:
        self._at = at
        self._seed = seed
        self._left: dict[tuple[str, int], list[float]] = {}
        self._before: tuple[float, Any, Any] = sys.getswitchinterval(), None, None

    def __enter__(self) -> Self:
        self._before = sys.getswitchinterval(), threading.gettrace(), sys.gettrace()
        sys.setswitchinterval(SWITCH_S)
        threading.settrace(self._called)
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        switch_s, of_threads, of_this = self._before
        sys.settrace(of_this)
        threading.settrace(of_threads)
        sys.setswitchinterval(switch_s)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        del event, argument
        name = frame.f_code.co_filename
        is_meant = name.startswith(_PRODUCT) and self._at in name and _CORE not in name
        return self._stepped if is_meant else None

    def _stepped(self, frame: FrameType, event: str, argument: object) -> Any:
        del argument
        if event == "line" and (delay_s := self._delay_s(frame.f_code.co_filename, frame.f_lineno)):
            time.sleep(delay_s)
        return self._stepped

    def _delay_s(self, name: str, line: int) -> float:
        if self._seed is None:
            return EACH_S
        left = self._left.get((name, line))
        if left is None:
            chance = random.Random(f"{self._seed} {name.removeprefix(_PRODUCT)} {line}")
            left = [chance.choice(DELAYS_S)] * TIMES if chance.randrange(ONE_IN) == 0 else []
            self._left[name, line] = left
        return left.pop() if left else 0.0
