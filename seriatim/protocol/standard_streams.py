"""The process's standard output and error: lines are handed over, and nobody waits for whoever takes them.

Problem: a pipe may be full, a terminal stopped, a disk hang. An event loop that waited for that would stand still, and its process go on
otherwise, as if it served.

Idea: a thread of its own writes the lines (`LineWriter`). A line that finds no room, here or where it goes, is dropped, and counted. It
goes past the stream's own buffer, whose lock would be held for good, and keep the process from its end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, TextIO

from seriatim.protocol import lifecycle

LINES = 4096
"""So many wait at most for whoever takes them."""
FLUSH_S = 1.0
"""So long who ends waits for somebody to take more of it."""
_AT_ONCE_BYTES = 65536


class _Output:
    """Standard output, written to by one thread at a time."""

    def __init__(self) -> None:
        self._begin()
        lifecycle.call_in_child(self, _Output._begin)

    def _begin(self) -> None:
        self.turn = threading.Lock()


_output = _Output()


def undivided() -> threading.Lock:
    """Around a command's write to standard output, with its flush, while a `LineWriter` may write there, too.

    A pipe takes megabytes in parts, between which that one's thread would put its lines: into the midst of a record. Who hands it a line
    waits for nobody.
    """
    return _output.turn


class _Line(NamedTuple):
    text: str
    stands_for: int = 1
    """So many are missing where it is."""


class LineWriter:
    """See the module. `as_line`: what the writer's own words are as a line."""

    def __init__(self, stream: TextIO, as_line: Callable[[str], str] = str) -> None:
        self._stream = stream
        self._as_line = as_line
        self._begin()
        # Before any line comes: whoever starts a thread waits for its first steps, in which a finalizer may log, too, and wait for him.
        self._start()
        lifecycle.call_in_child(self, LineWriter._begin)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[_Line] = deque()
        self._written_bytes = 0
        self._dropped = 0
        self._is_refused = False
        """The last write failed: what was dropped is told with the next line."""
        self._is_cut = False
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="seriatim-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # none is given out now: lines wait for the next one
            self._thread = None

    def put(self, line: str) -> None:
        """A line, or several, as they are."""
        with self._changed:
            if self._is_closed:
                return
            if len(self._lines) >= LINES:
                self._dropped += 1
                return
            self._lines.append(_Line(line))
            self._changed.notify_all()
            if self._thread is None:
                self._start()

    def _serve(self) -> None:
        while True:
            lines: list[_Line] = []
            told = 0
            # Whatever is met, such as a lack of memory, ends no log: it tells later that lines are missing.
            with contextlib.suppress(Exception):
                lines = self._next()
                if not lines:
                    return
                told = self._write(lines)
            with self._changed:
                for _ in lines:
                    self._lines.popleft()
                self._dropped += sum(line.stands_for for line in lines[told:])
                self._is_refused = told < len(lines)
                self._changed.notify_all()

    def _has_more(self) -> bool:
        return bool(self._lines) or (self._dropped > 0 and not self._is_refused)

    def _next(self) -> list[_Line]:
        """Those to write now: some, unless it is closed. They stay where they are until they are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_more() or self._is_closed)
            if self._dropped and self._has_more() and (self._is_refused or not self._lines):
                self._lines.appendleft(self._gap())
                self._dropped = 0
            lines, characters = [], 0
            for line in self._lines:
                lines.append(line)
                characters += len(line.text)
                if characters >= _AT_ONCE_BYTES:
                    break
            return lines

    def _gap(self) -> _Line:
        return _Line(self._as_line(f"lines were dropped, nobody took them count={self._dropped}"), self._dropped)

    def _write(self, lines: list[_Line]) -> int:
        """Answers how many of them were written to their end."""
        parts = [f"{line.text}\n".encode(self._stream.encoding, "backslashreplace") for line in lines]
        if self._is_cut:
            parts[0] = b"\n" + parts[0]
        data, written = memoryview(b"".join(parts)), 0
        # Who can't be told, as where the stream is closed, isn't told that now.
        with contextlib.suppress(OSError, ValueError), self._turn():
            while written < len(data):
                some = self._write_some(data[written:])
                written += some
                with self._changed:
                    self._written_bytes += some
                    self._changed.notify_all()
        if written:
            self._is_cut = data[written - 1] != ord("\n")
        return sum(end <= written for end in itertools.accumulate(map(len, parts)))

    def _turn(self) -> AbstractContextManager[object]:
        """Standard output's, where this goes there, too, which may change."""
        with contextlib.suppress(AttributeError, OSError):  # there is none, or it is no file
            if os.path.sameopenfile(self._stream.fileno(), sys.stdout.fileno()):
                return undivided()
        return contextlib.nullcontext()

    def _write_some(self, data: memoryview) -> int:
        descriptor = self._stream.fileno()
        try:
            return os.write(descriptor, data[:_AT_ONCE_BYTES])
        except BlockingIOError:  # it is one for all who share it, and somebody made it non-blocking
            look = select.poll()
            look.register(descriptor, select.POLLOUT)
            look.poll()
            return 0

    def flush(self) -> None:
        """Wait until all lines are written, as long as somebody takes them."""
        with self._changed:
            self._changed.notify_all()  # by a finalizer on that thread, between its look and its wait, one may have been logged
            while self._has_more() and self._thread is not None:
                if not self._changed.wait_for(functools.partial(self._goes_on, self._written_bytes), FLUSH_S):
                    return

    def _goes_on(self, before_bytes: int) -> bool:
        return not self._has_more() or self._written_bytes != before_bytes

    def close(self) -> None:
        """No line is taken any more; those that are there are written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def say_ready(name: str, address: str) -> None:
    """Tell whoever started this server, and waits for the line, that it serves. Who doesn't take it keeps it from nothing."""
    writer = LineWriter(sys.stdout)
    writer.put(f"ready {name} {address}")
    writer.close()


def say(text: str) -> None:
    """Tell it on standard error, as the last word of a command: who doesn't take it is waited for as the log's taker is."""
    writer = LineWriter(sys.stderr)
    writer.put(text)
    writer.flush()
    writer.close()
