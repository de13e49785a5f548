"""A member's disk: what RocksDB would hold, what of it a power failure forgets, and what can go wrong with it.

Writes are a log: what was flushed stays for ever; of the rest, a power failure keeps the first part, however much of it
(RocksDB's recovery stops at the first hole). A process that is killed loses only what it had not given to the system, and
what bypassed the log.
"""

from __future__ import annotations

import asyncio
import bisect
import random
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seriatim.broker_group.core import link_record
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.broker_group.store import Store
from seriatim.broker_group.writer import Write
from seriatim.protocol.errors import DiskFailed
from seriatim.protocol.names import Incarnation
from tests.simulation.loop import Process, SimulatedLoop

KEY = struct.Struct(">cQQQ")
"""Keys of what a broker stores of a link: kind (`B`: a batch, `P`: a position), queue, epoch, index."""
_OF_LINKS = b"BPLSC"
_RECORD = ord("L")
STILL_S = 1.0
"""So long a disk stands still before it is said to."""
_LINK = struct.Struct(">xQQ")
"""How keys of these kinds begin: behind the kind, queue and epoch."""


class Table:
    """Keys in order, and their values."""

    def __init__(self, values: dict[bytes, bytes] | None = None) -> None:
        self.values = dict(values or {})
        self.keys = sorted(self.values)

    def between(self, first: bytes, end: bytes) -> list[bytes]:
        """Keys from `first` (inclusive) to `end` (exclusive)."""
        return self.keys[bisect.bisect_left(self.keys, first) : bisect.bisect_left(self.keys, end)]

    def apply(self, write: Write) -> None:
        for deletion in write.deletions:
            first, end = bisect.bisect_left(self.keys, deletion.first), bisect.bisect_left(self.keys, deletion.end)
            for key in self.keys[first:end]:
                del self.values[key]
            del self.keys[first:end]
        for key, value in write.puts:
            if key not in self.values:
                bisect.insort(self.keys, key)
            self.values[key] = value


def _size_bytes(write: Write) -> int:
    return sum(len(key) + len(value) for key, value in write.puts)


class _Cursor:
    """Stands for rocksdict's iterator."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._at = 0

    def seek(self, key: bytes) -> None:
        self._at = bisect.bisect_left(self._table.keys, key)

    def seek_for_prev(self, key: bytes) -> None:
        self._at = bisect.bisect_right(self._table.keys, key) - 1

    def valid(self) -> bool:
        return 0 <= self._at < len(self._table.keys)

    def key(self) -> bytes:
        return self._table.keys[self._at]

    def value(self) -> bytes:
        return self._table.values[self._table.keys[self._at]]

    def next(self) -> None:
        self._at += 1

    def status(self) -> None:
        """Reading can't fail half-way here."""


class Disk:
    """One disk, through all lives of the processes that use it. `starts`: of processes on it."""

    def __init__(self, disk_id: str, chance: random.Random) -> None:
        self.disk_id = disk_id
        self.starts = 0
        self.table = Table()
        self.durable = Table()
        self.is_failing = False
        self.is_full = False
        self.is_still = False
        """Whether it neither takes what is written nor refuses it."""
        self.distrusted_by: Process | None = None
        """Who saw it fail, and writes to it no more."""
        self.room_bytes: int | None = None
        """Left for what is written; None: as much as is wanted."""
        self.flush_s = 0.002
        self.has_forgotten = False
        """Whether a crash took something that had been given to the system, or to the process only."""
        self.has_lied = False
        """Whether a flush was answered that wasn't done: a planted world, not a fault that the protocol bears."""
        self.on_write: Callable[[Disk, Write], None] = lambda *_: None
        self._chance = chance
        self._log: deque[Write] = deque()
        self._unlogged: list[Write] = []

    def get(self, key: bytes) -> bytes | None:
        if self.is_failing:
            raise OSError("Input/output error")
        return self.table.values.get(key)

    def iter(self) -> _Cursor:
        if self.is_failing:
            raise OSError("Input/output error")
        return _Cursor(self.table)

    def write(self, write: Write) -> None:
        self.on_write(self, write)
        if self.room_bytes is not None:
            self.room_bytes -= _size_bytes(write)
        self.table.apply(write)
        if write.uses_log:
            self._log.append(write)
        else:
            self._unlogged.append(write)

    @property
    def unflushed(self) -> int:
        return len(self._log)

    def flushed(self, count: int) -> None:
        """The first `count` writes of the log are durable."""
        for _ in range(min(count, len(self._log))):
            self.durable.apply(self._log.popleft())

    def emptied_memory(self) -> None:
        """What bypassed the log is in tables, and durable, and with it all else, in the order in which it was written."""
        self._log.clear()
        self._unlogged.clear()
        self.durable = Table(self.table.values)

    def process_died(self) -> None:
        """The system still has what it was given."""
        if self._unlogged:
            self.has_forgotten = True
            self._unlogged.clear()
            self.table = Table(self.durable.values)
            for write in self._log:
                self.table.apply(write)

    def power_failed(self) -> None:
        """What wasn't flushed is gone from some point on."""
        self.has_forgotten = self.has_forgotten or bool(self._log or self._unlogged)
        kept = self._chance.randint(0, len(self._log))
        self.flushed(kept)
        self._log.clear()
        self._unlogged.clear()
        self.table = Table(self.durable.values)

    def damage(self, key: bytes) -> None:
        """Flip a bit of a stored value, on the disk and for every reader."""
        for table in (self.table, self.durable):
            value = table.values.get(key)
            if value:
                at = self._chance.randrange(len(value))
                table.values[key] = value[:at] + bytes([value[at] ^ 1 << self._chance.randrange(8)]) + value[at + 1 :]

    def keys(self, kind: bytes) -> Iterator[bytes]:
        return (key for key in self.table.keys if key[:1] == kind)

    def links(self) -> set[tuple[int, int]]:
        """Queue and epoch of each link of which it holds anything."""
        return {_LINK.unpack_from(key) for key in self.table.keys if key[0] in _OF_LINKS}

    def chains(self) -> set[int]:
        """The queues of whose chains it has a copy."""
        return {_LINK.unpack_from(key)[0] for key in self.keys(b"Q")}

    def open_links(self) -> set[LinkKey]:
        """Those that were opened here and not sealed."""
        values = self.table.values
        records = [link_record.decode(values[key]) for key in self.table.keys if key[0] == _RECORD]
        return {record.key for record in records if record.opened_start and not record.is_sealed}


class SimulatedWriter:
    """Stands for seriatim.broker_group.writer.Writer: groups what waits, one flush for all of it, in simulated time."""

    def __init__(self, disk: Disk, loop: SimulatedLoop, process: Process) -> None:
        self._disk = disk
        self._loop = loop
        self._process = process
        self._queue: list[Write] = []
        self._unflushed: list[Write] = []
        self._is_busy = False
        self._due_s: float | None = None
        self._still_since_s: float | None = None
        self.failure: DiskFailed | None = None

    @property
    def stands_still(self) -> bool:
        """As the writer's own, sooner: a schedule is short."""
        return self._still_since_s is not None and self._loop.now_s - self._still_since_s >= STILL_S

    def _waits(self, then: Callable[..., None], *arguments: object) -> bool:
        """Whether the disk stands still: `then` is what it does when it goes on."""
        if not self._disk.is_still:
            self._still_since_s = None
            return False
        now_s = self._loop.now_s
        self._still_since_s = now_s if self._still_since_s is None else self._still_since_s
        self._loop.at(now_s + 0.05, self._process, then, *arguments)
        return True

    def submit(self, write: Write) -> None:
        self._queue.append(write)
        if not self._is_busy:
            self._is_busy = True
            self._loop.at(self._loop.now_s + 0.00005, self._process, self._serve)

    async def close(self) -> None:
        """Finish what was submitted, and write down what RocksDB has in memory. Raises DiskFailed."""
        await asyncio.sleep(self._disk.flush_s * (0.2 + 2 * self._disk._chance.random()))
        while self._disk.is_still:  # noqa: ASYNC110 - nobody tells a disk's user that it goes on
            await asyncio.sleep(0.05)
        if self._disk.is_failing:
            raise self._distrust("Input/output error")
        writes, self._queue = self._queue, []
        for write in writes:
            self._disk.write(write)
        self._disk.emptied_memory()
        waiting, self._unflushed = [*self._unflushed, *writes], []
        self._complete(waiting, self.failure)

    def _serve(self) -> None:
        if self._waits(self._serve):
            return
        writes, self._queue = self._queue, []
        disk = self._disk
        is_full = disk.is_full and any(write.size_bytes for write in writes)
        if disk.room_bytes is not None and sum(map(_size_bytes, writes)) > disk.room_bytes:
            is_full = True
        if self.failure is None and (disk.is_failing or is_full):
            what = "Input/output error" if disk.is_failing else "No space left on device"
            self._distrust(what)
        if self.failure is not None:
            waiting, self._unflushed = [*self._unflushed, *writes], []
            self._is_busy = False
            self._complete(waiting, self.failure)
            return
        now_s, written, empties_memory = self._loop.now_s, [], False
        for write in writes:
            disk.write(write)
            if write.flush_within_s is not None:
                due_s = now_s + write.flush_within_s
                self._due_s = due_s if self._due_s is None else min(self._due_s, due_s)
            (self._unflushed if write.waits_for_flush else written).append(write)
            empties_memory = empties_memory or write.empties_memory
        if empties_memory:
            disk.emptied_memory()
        self._complete(written, None)
        self._go_on()

    def _distrust(self, what: str) -> DiskFailed:
        """A disk that failed once is not written to again."""
        self.failure = DiskFailed(f"the disk failed: {what}")
        self._disk.distrusted_by = self._process
        return self.failure

    def _go_on(self) -> None:
        if self._due_s is not None and self._due_s <= self._loop.now_s:
            self._due_s = None
            flushing, self._unflushed = self._unflushed, []
            delay_s = self._disk.flush_s * (0.2 + 2 * self._disk._chance.random())
            self._loop.at(self._loop.now_s + delay_s, self._process, self._flushed, flushing, self._disk.unflushed)
        elif self._queue:
            self._loop.at(self._loop.now_s + 0.00005, self._process, self._serve)
        else:
            self._is_busy = False
            if self._due_s is not None:
                self._is_busy = True
                self._loop.at(self._due_s, self._process, self._serve)

    def _flushed(self, writes: list[Write], count: int) -> None:
        if self._waits(self._flushed, writes, count):
            return
        if self._disk.is_failing:
            self._complete(writes, self._distrust("Input/output error"))
        else:
            if not self._disk.has_lied:
                self._disk.flushed(count)
            self._complete(writes, None)
        self._go_on()

    def _complete(self, writes: list[Write], error: DiskFailed | None) -> None:
        last: dict[Any, int] = {}
        for write in writes:
            last[write.done] = write.tag
        for done, tag in last.items():
            done(tag, error)


class NoSegments:
    """All batches are in the database."""

    def size_bytes(self, _: object) -> int:
        return 0


class SimulatedStore(Store):
    """The production store on a simulated disk."""

    def __init__(self, disk: Disk, loop: SimulatedLoop, process: Process) -> None:  # the parent opens files
        self.directory = Path("/")
        self.incarnation = Incarnation(disk.disk_id, disk.starts)
        self._disk = disk
        self._database = disk  # type: ignore[assignment]
        self._segments = NoSegments()  # type: ignore[assignment]
        self._segment_bytes = sys.maxsize
        self._forgotten = self._forgotten_bytes = 0
        self._writer = SimulatedWriter(disk, loop, process)  # type: ignore[assignment]

    def free_bytes(self) -> int:
        room_bytes = 1 << 40 if self._disk.room_bytes is None else self._disk.room_bytes
        return 0 if self._disk.is_full or self.failure is not None else room_bytes

    def make_room(self, *, is_short: bool, is_enough_to_copy: bool) -> None:
        """Nothing: what is forgotten takes no room."""

    def forget_cached(self) -> None:
        """Nothing: this disk is always read itself."""

    async def close(self) -> None:
        await self._writer.close()  # type: ignore[func-returns-value, misc] # the parent's is another class


def opened(disk: Disk, loop: SimulatedLoop, process: Process) -> SimulatedStore:
    """What `open_store` does: a new start, on disk before anything else."""
    if disk.is_failing:
        raise DiskFailed("can't open the data: Input/output error")
    disk.starts += 1
    return SimulatedStore(disk, loop, process)
