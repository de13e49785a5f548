"""One line a decision, key=value, on standard error or, in a container, on standard output.

    2026-11-21T03:27:00.123Z INFO coordinator link sealed queue=orders epoch=3 end=1200 cause_id=acquire-send-1f3a

A `cause_id` starts with the event and rides on every effect and RPC it causes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TextIO

from seriatim.protocol import lifecycle

AGAIN_S = 60.0
"""What goes on is told again after so long."""
_REMEMBERED = 10_000
"""So many lines that last are known at most."""
MOST_CHARACTERS = 8192
"""Of a value. Callers send some, and a line that is told again and again is remembered."""
LINES = 4096
"""So many wait at most for whoever takes the log."""
FLUSH_S = 1.0
"""So long who ends waits for somebody to take more of it."""
_AT_ONCE_BYTES = 65536
_TRIED = ("Connection dropped: ", "Connection time-out: ", "Cannot resolve ")
_ALWAYS_AND_NOTHING = (
    "Transition to CONNECTING",
    "Exception raised during deserialization of request: Connect(",
    "Failed connecting to Zookeeper within the connection retry policy",
)
"""What kazoo says beside that each time, with a traceback where another server has the port, and when it is stopped."""


class _TellsAgain:
    """What goes on is told once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._told_at_s: dict[str, float] = {}

    def _is_due(self, what: str) -> bool:
        """Whether it is to be told now, which is remembered."""
        now_s = time.monotonic()
        if now_s - self._told_at_s.get(what, -math.inf) < AGAIN_S:
            return False
        if len(self._told_at_s) >= _REMEMBERED:
            self._told_at_s.clear()
        self._told_at_s[what] = now_s
        return True


class KeyValueLogger(_TellsAgain):
    """Logs an event with its keys; the values are formatted only where the line is written."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def debug(self, event: str, **keys: Any) -> None:
        self._write(logging.DEBUG, event, keys)

    def info(self, event: str, **keys: Any) -> None:
        self._write(logging.INFO, event, keys)

    def lasting(self, event: str, *, cause_id: str, **keys: Any) -> None:
        """As `info`, of what is met at each try for as long as it lasts: the same is told again after a minute."""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        if self._is_due(_line(event, keys)):
            self.info(event, **keys, cause_id=cause_id)

    def warning(self, event: str, **keys: Any) -> None:
        self._write(logging.WARNING, event, keys)

    def error(self, event: str, **keys: Any) -> None:
        self._write(logging.ERROR, event, keys)

    def exception(self, event: str, **keys: Any) -> None:
        """Log with the traceback of the exception being handled."""
        self._logger.error("%s", _line(event, keys), exc_info=True)  # noqa: LOG014 - callers are handlers

    def _write(self, level: int, event: str, keys: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", _line(event, keys))


def logger(name: str) -> KeyValueLogger:
    """The logger of a part of Seriatim, under `seriatim.` in Python's own logging."""
    return KeyValueLogger(logging.getLogger(f"seriatim.{name}"))


def say_ready(name: str, address: str) -> None:
    """Tell whoever started this server, and waits for the line, that it serves. Who doesn't take it keeps it from nothing."""
    handler = _Handler(sys.stdout)
    handler.put(f"ready {name} {address}")
    handler.close()


def say(text: str) -> None:
    """Tell it on standard error, as the last word of a command: who doesn't take it is waited for as the log's taker is."""
    handler = _Handler(sys.stderr)
    handler.put(text)
    handler.flush()
    handler.close()


def _line(event: str, keys: dict[str, Any]) -> str:
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in keys.items() if value is not None)])


def _value(value: Any) -> str:
    text = str(value)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}…"
    is_plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if text and is_plain else repr(text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        part = record.name.removeprefix("seriatim.")
        said = record.getMessage()
        if part == record.name:  # a library's words are no line of ours
            said = _line("says", {"message": said})
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {part} {said}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Output:
    """Standard output, written to by one thread at a time."""

    def __init__(self) -> None:
        self._begin()
        lifecycle.call_in_child(self, _Output._begin)

    def _begin(self) -> None:
        self.turn = threading.Lock()


_output = _Output()


def undivided() -> threading.Lock:
    """Around a command's write to standard output, with its flush, while the log may go there, too.

    A pipe takes megabytes in parts, between which the log's thread would put its lines: into the midst of a record. Who logs waits for nobody.
    """
    return _output.turn


class _Line(NamedTuple):
    text: str
    stands_for: int = 1
    """So many are missing where it is."""


class _Handler(logging.Handler):
    """Writes on a thread of its own, so that nobody waits for whoever takes the log: a pipe may be full, a terminal stopped, a disk hang.

    An event loop would stand still, and its process go on otherwise, as if it served. A line that finds no room, here or where it goes, is
    dropped, and counted.
    It goes past the stream's own buffer, whose lock would be held for good, and keep the process from its end.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._begin()
        # Before anybody logs: whoever starts a thread waits for its first steps, in which a finalizer may log, too, and wait for him.
        self._start()
        lifecycle.call_in_child(self, _Handler._begin)

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

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self.put(line)

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
        told = _line("lines were dropped, nobody took them", {"count": self._dropped})
        record = logging.LogRecord("seriatim.log", logging.WARNING, "", 0, told, (), None)
        return _Line(self.format(record), self._dropped)

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
        """Wait until what was logged is written, as long as somebody takes it."""
        with self._changed:
            self._changed.notify_all()  # by a finalizer on that thread, between its look and its wait, one may have been logged
            while self._has_more() and self._thread is not None:
                if not self._changed.wait_for(functools.partial(self._goes_on, self._written_bytes), FLUSH_S):
                    return

    def _goes_on(self, before_bytes: int) -> bool:
        return not self._has_more() or self._written_bytes != before_bytes

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()


def _without_gone_callers(record: logging.LogRecord) -> bool:
    """A filter for gRPC's log: a caller that has gone before its answer could be sent is an error, with a traceback, to gRPC alone."""
    if str(record.msg).startswith("ExecuteBatchError raised in core by servicer method"):
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)
    return True


class _OfALibrary(_TellsAgain, logging.Filter):
    """What a library says many times a second, for as long as it lasts, is told once a minute, in our words."""

    def _is_told(self, record: logging.LogRecord, part: str, event: str, reason: str) -> bool:
        if not self._is_due(reason):
            return False
        record.name, record.msg, record.args = f"seriatim.{part}", _line(event, {"reason": reason}), ()
        record.exc_info = None
        return True


class _SearchForZooKeeper(_OfALibrary):
    """kazoo tells of each try to reach a server."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if said.startswith(_ALWAYS_AND_NOTHING):
            return False
        if not said.startswith(_TRIED):
            return True
        reason = said.partition(": ")[2] if said.startswith("Connection ") else said
        return self._is_told(record, "zookeeper", "it can't be reached, and is tried again", reason)


class _NoMoreConnections(_OfALibrary):
    """asyncio tells a hundred times a second, with a traceback, that there is no descriptor left for who connects."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, OSError) or not record.getMessage().startswith(
            "socket.accept() out of system resource"
        ):
            return True
        return self._is_told(record, "direct", "nobody can connect now", error.strerror or str(error))


_search, _no_more = _SearchForZooKeeper(), _NoMoreConnections()


def start_logging(level: str = "INFO", to: str = "stderr") -> None:
    """Send the process's log to standard error or `stdout`. Called once, by an entry point; libraries don't call it."""
    handler = _Handler(sys.stdout if to == "stdout" else sys.stderr)
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kazoo").setLevel(logging.WARNING)
    logging.getLogger("kazoo.client").addFilter(_search)
    logging.getLogger("asyncio").addFilter(_no_more)
    # What it warns of, with a traceback, are exceptions of ours on their way through Java; whoever gets them there tells.
    logging.getLogger("py4j").setLevel(logging.ERROR)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_without_gone_callers)


def flush() -> None:
    """Wait until what was logged is written, as long as somebody takes it."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def new_cause_id(event: str) -> str:
    """A fresh cause id: the event and eight random hexadecimal digits."""
    return f"{event}-{os.urandom(4).hex()}"
