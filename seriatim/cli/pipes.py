"""Whether anybody reads what a command prints: a pipe that was closed is told of by the next write only, and that may never come.

And whether anybody takes what tells how a command stands: a pipe may be full, a terminal stopped. Its thread would wait in that write for good,
whatever signal comes, and what it serves would stand still.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from seriatim.protocol import log

PATIENCE_S = 1.0
"""So long somebody is waited for who takes a line; who doesn't isn't waited for again until he does."""


class _Descriptor(Protocol):
    def fileno(self) -> int: ...


def is_output_read() -> bool:
    """False where standard output is a pipe or a socket whose other end was closed."""
    with suppress(AttributeError, OSError):  # there is none, or it is no file
        output = sys.stdout.fileno()
        mode = os.fstat(output).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            look = select.poll()
            look.register(output, 0)
            return not look.poll(0)
    return True


class Taker:
    """Whoever takes lines that tell how a command stands. What he doesn't take is left out."""

    def __init__(self) -> None:
        self._patience_s = PATIENCE_S

    def has_room(self, output: _Descriptor) -> bool:
        """Whether a write of up to `select.PIPE_BUF` bytes doesn't wait. True also where nothing would tell, as of no file."""
        with suppress(TypeError, OSError):
            look = select.poll()
            look.register(output, select.POLLOUT)
            is_taken = bool(look.poll(1000 * self._patience_s))
            self._patience_s = PATIENCE_S if is_taken else 0.0
            return is_taken
        return True

    @contextmanager
    def undivided(self, output: _Descriptor) -> Iterator[bool]:
        """As `log.undivided`, around a line that isn't waited for: whether it is to be written."""
        turn = log.undivided()
        if not turn.acquire(timeout=self._patience_s):  # the log goes there, too, and isn't taken either
            self._patience_s = 0.0
            yield False
            return
        try:
            yield self.has_room(output)
        finally:
            turn.release()


class Teller:
    """Tells what a service does, on any thread: as JSON, else as lines of its log, else as lines for a person, with waiting on standard error."""

    def __init__(self, name: str, *, is_json: bool, is_log: bool) -> None:
        """`name`: of the log."""
        self._is_json = is_json
        self._log = log.logger(name) if is_log and not is_json else None
        self._taker = Taker()

    def tell(self, event: str, text: str, /, **keys: object) -> None:
        """An event with its keys, or a line of `text`. Who doesn't take it is told nothing. Raises OSError where nobody ever will."""
        if self._log is not None:
            self._log.info(event, **keys)
            return
        output = sys.stderr if event == "waiting" and not self._is_json else sys.stdout
        with self._taker.undivided(output) as is_taken:
            if is_taken:
                print(json.dumps({"event": event, **keys}) if self._is_json else text, flush=True, file=output)
