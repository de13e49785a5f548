"""Makes what RocksDB wrote to its write-ahead log durable, without asking RocksDB to.

Problem: a synced write of rocksdict holds the interpreter lock for as long as the disk takes, and stalls the loop.

Idea: write without sync, which puts the bytes into the log file in the operating system's cache, and then call
fdatasync on that file from a worker thread, where Python lets the lock go. One call makes every write before it durable.

Algorithm, after the writes returned: list the live `*.log` files. Bytes not yet synced can lie in the newest log of the
last call, and in those that came after it; sync them all, oldest first (recovery reads them in order and stops at
the first hole). A log older than the last call's newest was synced then, or later, when it had already been superseded,
and gets no writes any more. When a log is new, sync its directory, too. A log that is gone was superseded by a table
file, which RocksDB itself syncs before it removes the log; such a file counts as synced. RocksDB must not recycle log files.

To list them takes five calls of the system, 0.06 ms that a record in flight waits for. So each write is looked for where the last one
went (`wrote`): a log that has grown got it, because only one at a time is written to, and only by who calls this. Where every write
since the last sync was found so, the newest log of that sync is still the newest, and there is nothing else to sync.

A log that ends early counts as one whose tail was never confirmed, and recovery goes on with the next one: where the system had
written that one's bytes to the disk by itself, and a power failure took the tail of the older, a link would have a hole. So
a log that has a successor is synced as soon as that is seen, however long a flush may wait.
"""

from __future__ import annotations

import os
from pathlib import Path

from seriatim.broker_group import directories


class LogFiles:
    """The write-ahead log of one database directory. Used by one thread at a time.

    `flushed`: by the number of each log that was there at the last `sync`, how many of its bytes are surely durable.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._newest = -1
        self._open: dict[int, int] = {}
        self._size_bytes = 0
        self._is_newest_known = False
        self.flushed: dict[int, int] = {}

    def wrote(self) -> None:
        """A write to the log has returned; to be called behind each. Where it began another, all are synced. Raises OSError."""
        if self._is_newest_known:
            before, self._size_bytes = self._size_bytes, os.fstat(self._open[self._newest]).st_size
            self._is_newest_known = self._size_bytes > before
            if not self._is_newest_known:
                self.sync()

    def sync(self) -> None:
        """Everything that was written before the call is durable after it. Raises OSError; then nothing is known."""
        if self._is_newest_known:
            os.fdatasync(self._open[self._newest])
            self.flushed[self._newest] = self._size_bytes
            return
        self._sync_all()
        self._is_newest_known = self._newest in self._open
        if self._is_newest_known:
            self._size_bytes = os.fstat(self._open[self._newest]).st_size

    def _sync_all(self) -> None:
        names = {int(name[:-4]): name for name in os.listdir(self._directory) if name.endswith(".log")}  # noqa: PTH208 - per flush
        numbers = sorted(number for number in names if number >= self._newest)
        for number in [number for number in self._open if number not in names]:
            os.close(self._open.pop(number))
        is_new = False
        self.flushed = {number: size_bytes for number, size_bytes in self.flushed.items() if number in names}
        for number in numbers:
            descriptor = self._open.get(number)
            if descriptor is None:
                try:
                    descriptor = os.open(self._directory / names[number], os.O_RDONLY)
                except FileNotFoundError:
                    continue  # its table file was written and synced meanwhile
                self._open[number] = descriptor
                is_new = True
            size_bytes = os.fstat(descriptor).st_size
            os.fdatasync(descriptor)
            self.flushed[number] = size_bytes
        if is_new:
            directories.sync(self._directory)
        if numbers:
            self._newest = numbers[-1]
        for number in [number for number in self._open if number < self._newest]:
            os.close(self._open.pop(number))

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
