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
from contextlib import suppress
from typing import Protocol, TextIO, cast

from seriatim.protocol import log, standard_streams

PATIENCE_S = 1.0
"""So long somebody is waited for who takes a line; who doesn't isn't waited for again until he does."""


_NO_FILE = -1


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

    def __init__(self, output: _Descriptor) -> None:
        self._output = output
        self._descriptor = _without_waiting(output)
        self._patience_s = PATIENCE_S
        self._is_cut = False

    def tell(self, text: str) -> None:
        """Print a line, in the turn of `standard_streams.undivided`. Raises OSError."""
        turn = standard_streams.undivided()
        if not turn.acquire(timeout=self._patience_s):  # the log goes there, too, and isn't taken either
            self._patience_s = 0.0
            return
        try:
            if self._descriptor == _NO_FILE:
                print(text, file=cast("TextIO", self._output), flush=True)
            else:
                self.write(f"{text}\n".encode(getattr(self._output, "encoding", "utf-8"), "backslashreplace"))
        finally:
            turn.release()

    def write(self, data: bytes | memoryview) -> None:
        """Write what is taken of it, on a line of its own. Raises OSError."""
        whole = left = memoryview(b"".join((b"\n" * self._is_cut, data)))
        with suppress(BlockingIOError):  # there is less room than this takes
            while left and self._has_room():
                left = left[os.write(self._descriptor, left[: select.PIPE_BUF]) :]
        if len(left) < len(whole):
            self._is_cut = len(left) > 0

    def _has_room(self) -> bool:
        """Whether a write of up to `select.PIPE_BUF` bytes doesn't wait; on a terminal, of less."""
        look = select.poll()
        look.register(self._descriptor, select.POLLOUT)
        is_taken = bool(look.poll(1000 * self._patience_s))
        self._patience_s = PATIENCE_S if is_taken else 0.0
        return is_taken


def _without_waiting(output: _Descriptor) -> int:
    """Where to write so that nothing waits that `Taker` hasn't waited for.

    A terminal that nobody reads, as where the line to it hangs, tells of room for a part of a line, and keeps whoever writes for the rest. So it
    is opened once more, if it can be: whether a write waits holds for all who share a descriptor.
    """
    try:
        descriptor = output.fileno()
    except (AttributeError, OSError):
        return _NO_FILE
    if os.isatty(descriptor):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


class Teller:
    """Tells what a service does, on any thread: as JSON, else as lines of its log, else as lines for a person, with waiting on standard error."""

    def __init__(self, name: str, *, is_json: bool, is_log: bool) -> None:
        """`name`: of the log."""
        self._is_json = is_json
        self._log = log.logger(name) if is_log and not is_json else None
        self._taker = Taker(sys.stdout)

    def tell(self, event: str, text: str, /, **keys: object) -> None:
        """An event with its keys, or a line of `text`. Who doesn't take it is told nothing. Raises OSError where nobody ever will."""
        if self._log is not None:
            self._log.info(event, **keys)
            return
        if event == "waiting" and not self._is_json:
            print(text, flush=True, file=sys.stderr)
        else:
            self._taker.tell(json.dumps({"event": event, **keys}) if self._is_json else text)
