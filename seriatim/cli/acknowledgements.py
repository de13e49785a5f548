"""What came of the records that a command sent: `seriatim produce` counts and logs their ends while it goes on sending."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Final

from seriatim.producer import Handle
from seriatim.producer.sources.lines import Line
from seriatim.protocol.errors import OutcomeUnknown, WorldError

PART_BYTES: Final = 32 * 1024 * 1024
_RECORD_BYTES: Final = 256
"""What a record takes here besides its value and its key."""
_Sent = tuple[Handle, Line]


class Acknowledgements:
    """Follows the records in the order in which they were sent, on a thread of its own: counts, logs, and keeps those whose end is unknown.

    Bound: at most two parts of PART_BYTES, and one record, are sent and not followed, where each `add` waits for `has_room`.
    `why_unknown`: of the last of these. `failure`: why nothing more can be logged; `on_failure` is called then, on that thread. Records are followed all the same.
    """

    def __init__(self, log: IO[str] | None, on_failure: Callable[[], None]) -> None:
        self._log = log
        self._may_log = log is not None
        self._on_failure = on_failure
        self._sent: queue.SimpleQueue[_Sent | threading.Event | None] = queue.SimpleQueue()
        self._part_bytes = 0
        self._part_before = threading.Event()
        self._part_before.set()
        self.acknowledged = 0
        self.stored_before = 0
        self.unknown: deque[Line] = deque()
        self.why_unknown = ""
        self.failure: WorldError | None = None
        self._thread = threading.Thread(target=self._follow, name="acknowledgements", daemon=True)
        self._thread.start()

    def has_room(self, timeout_s: float) -> bool:
        """Whether another record may be added; waits up to `timeout_s` until the part before the present one was followed."""
        if self._part_bytes < PART_BYTES:
            return True
        if not self._part_before.wait(timeout_s):
            return False
        self._part_before = threading.Event()
        self._sent.put(self._part_before)
        self._part_bytes = 0
        return True

    def add(self, handle: Handle, line: Line) -> None:
        self._part_bytes += _RECORD_BYTES + len(line.value) + len(line.key or b"")
        self._sent.put((handle, line))

    def settling(self) -> threading.Event:
        """Set once every record added before is at its end."""
        settled = threading.Event()
        self._sent.put(settled)
        return settled

    def close(self) -> None:
        """Follow what was added to its end, and close the log."""
        self._sent.put(None)
        self._thread.join()
        if self._log is not None:
            try:
                self._log.close()
            except OSError as error:
                self._fail(error)

    def _follow(self) -> None:
        while (sent := self._next()) is not None:
            if isinstance(sent, threading.Event):
                sent.set()
                continue
            handle, line = sent
            if not handle.done():
                self._write_out()
            self._end(handle, line)
        self._write_out()

    def _next(self) -> _Sent | threading.Event | None:
        """What was added next; the log is written out before this waits for it."""
        if self._sent.empty():
            self._write_out()
        return self._sent.get()

    def _end(self, handle: Handle, line: Line) -> None:
        try:
            ended = handle.result()
        except OutcomeUnknown as error:
            self.unknown.append(line)
            self.why_unknown = error.message
            return
        self.acknowledged += 1
        self.stored_before += ended.epoch is None
        if self._may_log:
            places = ("-" if place is None else place for place in (ended.epoch, ended.index, ended.offset))
            self._write_out(" ".join(map(str, (ended.seq, *places))) + "\n")

    def _write_out(self, text: str = "") -> None:
        """Write to the log; without a text, all that was written goes to the file."""
        if self._log is None or not self._may_log:
            return
        try:
            if text:
                self._log.write(text)
            else:
                self._log.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._may_log = False
        if self._log is not None and self.failure is None:
            self.failure = WorldError(
                f"can't write {self._log.name}: {error.strerror}; the last acknowledgements are missing there"
            )
            self._on_failure()
