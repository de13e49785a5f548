"""The thread that writes: it collects what waits, writes it in a few calls, and flushes once for all of it.

While one flush runs the next writes gather, so the slower the disk, the larger the group. Completions are handed to the
loop, one call a group. A disk that failed once is not trusted again: everything after it fails.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from seriatim.broker_group.core.link_record import LinkKey
from seriatim.broker_group.segments import LargeBatch
from seriatim.protocol import log
from seriatim.protocol.errors import DiskFailed, copied

_log = log.logger("broker.writer")

GROUP_BYTES: Final = 256 * 1024
"""At most so much in one call of the database, which holds the interpreter lock."""
RUN_BYTES: Final = 16 * 1024 * 1024
"""Of more that waits, this much is written and flushed first: a slow disk is seen to go on (STILL_S)."""

SLOW_S: Final = 0.2
"""A group of writes that takes the disk this long is told of: a sender waits some 0.3 s before it goes on with the next group."""
STILL_S: Final = 10.0
"""A disk that has been at the same call for so long stands still: its member leaves until it goes on."""
SLOW_AGAIN_S: Final = 10.0
"""As long as the disk is slow it is told again after so long."""

Done = Callable[[int, DiskFailed | None], None]
"""Called on the loop with the tag of a write, or of the last of several with the same callback; or with an error."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """All keys from `first` (inclusive) to `end` (exclusive)."""

    first: bytes
    end: bytes


@dataclass(frozen=True, slots=True)
class Write:
    """One atomic change.

    `flush_within_s`: 0 at once; None: never for its own sake. `waits_for_flush`: complete only then.
    `uses_log`: False for what may be lost with the process. `empties_memory`: also what wasn't logged goes to disk.
    `batch`: bytes that are to lie in a segment file; `puts` get their place when they are durable there, not before.
    `empties`: a link whose segment file goes away once this is durable. `clears_up`: what the database was told to forget leaves
    the disk soon (True), or again when it comes to it (False).
    """

    puts: tuple[tuple[bytes, bytes], ...]
    done: Done
    tag: int = 0
    deletions: tuple[Deletion, ...] = ()
    flush_within_s: float | None = 0.0
    waits_for_flush: bool = True
    uses_log: bool = True
    empties_memory: bool = False
    size_bytes: int = 0
    batch: LargeBatch | None = None
    empties: LinkKey | None = None
    clears_up: bool | None = None


class Sink(Protocol):
    """What the thread writes to. Called from that thread only."""

    def placed(self, writes: Sequence[Write]) -> list[Write]:
        """The same writes, with the places of batches that are durable in segment files."""
        ...

    def write(self, writes: Sequence[Write], *, uses_log: bool) -> None: ...

    def flush(self) -> None: ...

    def empty_memory(self) -> None: ...

    def clear_up(self, *, is_urgent: bool) -> None: ...

    def remove_segments(self, link: LinkKey) -> None: ...


class SlowDisk:
    """When to tell of a slow disk, and what: a line for each of many slow flushes would make it slower still."""

    def __init__(self) -> None:
        self._told_at_s = -math.inf
        self._count = 0
        self._longest_s = 0.0

    def took(self, took_s: float, now_s: float) -> tuple[int, float] | None:
        """How many slow groups there were since it was told of them last, and the longest; None: nothing is to be told now."""
        if took_s < SLOW_S:
            return None
        self._count += 1
        self._longest_s = max(self._longest_s, took_s)
        if now_s - self._told_at_s < SLOW_AGAIN_S:
            return None
        found = self._count, self._longest_s
        self._told_at_s, self._count, self._longest_s = now_s, 0, 0.0
        return found


class Writer:
    """See the module. `submit` may be called from the loop only; it never blocks. `failure`: why nothing is written any more."""

    def __init__(self, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self._sink = sink
        self._loop = loop
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()  # None: that was all
        self._unflushed: list[Write] = []
        self._due_s: float | None = None
        self._slow = SlowDisk()
        self._at_it_since_s: float | None = None
        self.failure: DiskFailed | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> None:
        self._queue.put(write)

    @property
    def stands_still(self) -> bool:
        """Whether the disk answers nothing: it neither takes what is written nor refuses it. May be read from any thread."""
        since_s = self._at_it_since_s
        return since_s is not None and time.monotonic() - since_s >= STILL_S

    def close(self) -> None:
        """Finish what was submitted, flush, and end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            writes, is_closing = self._waiting()
            for run in _runs(writes):
                began_s = self._at_it_since_s = time.monotonic()
                try:
                    self._serve(run, is_last=is_closing)
                    self._tell_if_slow(began_s)
                except Exception as error:  # the thread's outermost loop: whatever it is, the disk can't be trusted
                    if is_the_disk_s(error):
                        _log.error("write failed", reason=error)
                    else:
                        _log.exception("write failed")
                    self._fail(run, error)
                self._at_it_since_s = None

    def _waiting(self) -> tuple[list[Write], bool]:
        """All that waits, and whether it is the last; nothing where a flush is due before something comes."""
        found: list[Write] = []
        try:
            timeout_s = None if self._due_s is None else max(0.0, self._due_s - time.monotonic())
            one = self._queue.get(timeout=timeout_s)
            while one is not None:
                found.append(one)
                one = self._queue.get_nowait()
        except queue.Empty:
            return found, False
        return found, True

    def _serve(self, writes: list[Write], *, is_last: bool) -> None:
        if self.failure is not None:
            self._tell([*self._unflushed, *writes], self.failure)
            self._unflushed = []
            return
        for group in _groups(self._sink.placed(writes)):
            self._went_on()
            self._sink.write(group, uses_log=group[0].uses_log)
        self._went_on()
        now_s = time.monotonic()
        for write in writes:
            if write.flush_within_s is not None:
                due_s = now_s + write.flush_within_s
                self._due_s = due_s if self._due_s is None else min(self._due_s, due_s)
        self._tell([write for write in writes if not write.waits_for_flush], None)
        self._unflushed += [write for write in writes if write.waits_for_flush]
        if any(write.empties_memory for write in writes):
            self._sink.empty_memory()
            self._went_on()
        for write in writes:
            if write.clears_up is not None:
                self._at_it_since_s = None  # it may take its time
                self._sink.clear_up(is_urgent=write.clears_up)
                self._went_on()
        if self._due_s is not None and (is_last or self._due_s <= time.monotonic()):
            self._sink.flush()
            self._went_on()
            self._due_s = None
            for write in writes:
                if write.empties is not None:
                    self._sink.remove_segments(write.empties)
            self._tell(self._unflushed, None)
            self._unflushed = []

    def _went_on(self) -> None:
        """The disk has answered a call."""
        self._at_it_since_s = time.monotonic()

    def _tell_if_slow(self, began_s: float) -> None:
        now_s = time.monotonic()
        if slow := self._slow.took(now_s - began_s, now_s):
            times, longest_s = slow
            _log.warning("the disk is slow", took_ms=round(longest_s * 1000), times=times)

    def _fail(self, writes: list[Write], error: Exception) -> None:
        self.failure = DiskFailed(f"the disk failed: {error}")
        waiting = [*self._unflushed, *(write for write in writes if write not in self._unflushed)]
        self._unflushed = []
        self._due_s = None
        self._tell(waiting, self.failure)

    def _tell(self, writes: list[Write], error: DiskFailed | None) -> None:
        if writes and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._complete, writes, error)

    def _complete(self, writes: list[Write], error: DiskFailed | None) -> None:
        last: dict[Done, int] = {}
        for write in writes:
            last[write.done] = write.tag
        for done, tag in last.items():
            done(tag, None if error is None else copied(error))


def ignored(_: int, error: DiskFailed | None) -> None:
    """Of a write that nobody waits for: the next that somebody waits for meets the same error."""


def settling(future: asyncio.Future[None]) -> Done:
    """What settles it when a write is complete, unless nobody waits for that any more."""

    def done(_: int, error: DiskFailed | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return done


def is_the_disk_s(error: Exception) -> bool:
    """And no defect of ours. What RocksDB says comes as a plain Exception."""
    return isinstance(error, OSError) or type(error) is Exception


def _runs(writes: list[Write]) -> list[list[Write]]:
    """Cut behind each write that empties a link, since what follows for the same link goes to a new file, and at RUN_BYTES. At least one run."""
    runs: list[list[Write]] = [[]]
    size_bytes = 0
    for write in writes:
        runs[-1].append(write)
        size_bytes += write.size_bytes
        if write.empties is not None or size_bytes >= RUN_BYTES:
            runs.append([])
            size_bytes = 0
    return runs if runs[-1] or len(runs) == 1 else runs[:-1]


def _groups(writes: Sequence[Write]) -> list[list[Write]]:
    """Runs of writes of one kind, none over GROUP_BYTES but for a single larger write."""
    groups: list[list[Write]] = []
    size_bytes = 0
    for write in writes:
        of_this_bytes = write.size_bytes if write.batch is None else 0
        if groups and groups[-1][0].uses_log is write.uses_log and size_bytes + of_this_bytes <= GROUP_BYTES:
            groups[-1].append(write)
            size_bytes += of_this_bytes
        else:
            groups.append([write])
            size_bytes = of_this_bytes
    return groups
