"""Something in the middle of what a thread does, at each of its lines in turn, as a signal's handler may come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Interruption:
    """A context manager: at the line of this number of these files, or of all, the handler is called; nothing is traced in it.

    `has_come`: whether there was such a line; where not, all of them have been tried.
    """

    def __init__(self, number: int, handler: Callable[[], object], *files: str | None) -> None:
        self._left = number
        self._handler = handler
        self._files = files

    @property
    def has_come(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self._files and frame.f_code.co_filename not in self._files:
            return None
        self._left -= event == "line"
        if event == "line" and self._left == 0:
            sys.settrace(self._before)
            self._handler()
        return self._trace if self._left > 0 else None
