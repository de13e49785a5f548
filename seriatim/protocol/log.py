"""One line a decision, key=value, on standard error or, in a container, on standard output.

    2026-11-21T03:27:00.123Z INFO coordinator link sealed queue=orders epoch=3 end=1200 cause_id=acquire-send-1f3a

A `cause_id` starts with the event and rides on every effect and RPC it causes.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from typing import Any, TextIO

from seriatim.protocol.standard_streams import LineWriter

AGAIN_S = 60.0
"""What goes on is told again after so long."""
_REMEMBERED = 10_000
"""So many lines that last are known at most."""
MOST_CHARACTERS = 8192
"""Of a value. Callers send some, and a line that is told again and again is remembered."""
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


class _Handler(logging.Handler):
    """Nobody who logs waits for whoever takes the log."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._writer = LineWriter(stream, self._as_line)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._writer.put(line)

    def _as_line(self, said: str) -> str:
        return self.format(logging.LogRecord("seriatim.log", logging.WARNING, "", 0, said, (), None))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
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
