"""Segment files: the bytes of large batches, one file a link, written once and appended to only.

Problem: RocksDB writes each byte twice (log, then table or blob file) and runs a checksum of its own over it both times, where a
batch has one already. Large batches cost it ten times what a plain file costs.

Idea: the bytes go to a file of the link's own, and RocksDB keeps the *place*: where in that file they lie. What makes that
as safe as one atomic write is the order: a place is given to RocksDB only after the bytes are flushed. So whatever of
RocksDB's log a crash leaves, no place in it names bytes that were not durable before; what a crash leaves in the file
without a place is garbage that nobody names, and is never taken for damage. And bytes at a place that can't be read, or
aren't those of the place, are always damage, and never a tail that may be cut.

Nothing in a file is ever written over: after a crash or a cut the link goes on behind what is there. A file goes away as a
whole, when its link is dropped or emptied, after that is durable in RocksDB; one that a crash left behind without its
link is removed at the next start.

What is flushed leaves the system's page cache at once. The newest batches are in the member's own memory (`batch_cache`),
and a reader that is further behind comes to these bytes, if ever, after gigabytes of others: a copy in the page cache
would only push out what is read again, and the system would have to find, and clear the way for, a new page for each one
that is written, where now it has the same few again. So a reader that is behind has the disk read ahead of it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from seriatim.broker_group import directories
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.protocol.batch import Payload
from seriatim.protocol.errors import DiskFailed, MalformedFrame

_MAGIC: Final = b"SRP\x01"
_PLACE: Final = struct.Struct(">4sQIHI")
SUFFIX: Final = ".segment"
_OPEN_FILES: Final = 128
READ_AHEAD_BYTES: Final = 2 * 1024 * 1024
_PARTS: Final = 1024
"""Of one call: the system takes no more."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a batch lies: header and payload end to end. `header_crc`: the header's own last four bytes, and with them the payload's checksum."""

    offset: int
    size_bytes: int
    header_bytes: int
    header_crc: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes

    def encode(self) -> bytes:
        return _PLACE.pack(_MAGIC, self.offset, self.size_bytes, self.header_bytes, self.header_crc)

    @classmethod
    def of(cls, stored: bytes) -> Self | None:
        """What RocksDB has for a batch; None where that is the batch itself. Raises MalformedFrame."""
        return cls.decode(stored) if stored.startswith(_MAGIC) else None

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises MalformedFrame."""
        if len(data) != _PLACE.size:
            raise MalformedFrame("these bytes are not a place in a segment file")
        return cls(*_PLACE.unpack(data)[1:])


@dataclass(frozen=True, slots=True)
class LargeBatch:
    """A batch on its way to its link's file; `key`: under which RocksDB gets its place."""

    link: LinkKey
    key: bytes
    header: bytes
    payload: Payload


@dataclass(slots=True)
class _OpenFile:
    """`is_named`: its name is surely on the disk; whoever opened it before may have died too early for that.

    `flushed_end`: what was written here before it is durable.
    """

    descriptor: int
    end: int
    flushed_end: int
    is_named: bool = False


class SegmentFiles:
    """The files of one directory. `read`, `read_ahead` and `size_bytes` may be called from any thread, all else from the writer's."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory where it isn't there. Raises OSError."""
        self._directory = directory
        self._open: OrderedDict[LinkKey, _OpenFile] = OrderedDict()
        directories.make(directory)

    # ---- writing

    def append(self, batches: Sequence[LargeBatch]) -> list[Place]:
        """Give the batches to the system, and say where each lies. Nothing is durable before `sync`. Raises OSError."""
        of_link: dict[LinkKey, list[Payload]] = {}
        places = []
        for batch in batches:
            file = self._file(batch.link)
            size_bytes = len(batch.header) + len(batch.payload)
            places.append(Place(file.end, size_bytes, len(batch.header), int.from_bytes(batch.header[-4:], "little")))
            file.end += size_bytes
            of_link.setdefault(batch.link, []).extend((batch.header, batch.payload))
        for link, parts in of_link.items():
            for first in range(0, len(parts), _PARTS):
                _write(self._open[link].descriptor, parts[first : first + _PARTS])
        return places

    def sync(self) -> None:
        """All that was appended is durable. Raises OSError; then nothing is known."""
        are_named = True
        for file in self._open.values():
            if file.flushed_end < file.end:
                os.fdatasync(file.descriptor)
                forget_pages(file.descriptor, file.flushed_end, file.end)
                file.flushed_end = file.end
                are_named, file.is_named = are_named and file.is_named, True
        if not are_named:
            directories.sync(self._directory)
        while len(self._open) > _OPEN_FILES:
            _, file = self._open.popitem(last=False)
            os.close(file.descriptor)

    def remove(self, link: LinkKey) -> None:
        """The link's file goes away; RocksDB names no place in it any more, durably. Raises OSError."""
        file = self._open.pop(link, None)
        if file is not None:
            os.close(file.descriptor)
        self._path(link).unlink(missing_ok=True)

    def keep_only(self, links: Collection[LinkKey]) -> None:
        """Remove the files of all other links. Raises OSError."""
        for path in self._directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(ValueError):  # not a name that this class gives
                queue_id, epoch = (int(number) for number in path.stem.split("-"))
                if (queue_id, epoch) not in links:
                    path.unlink()

    def close(self) -> None:
        for file in self._open.values():
            os.close(file.descriptor)
        self._open.clear()

    def _file(self, link: LinkKey) -> _OpenFile:
        file = self._open.get(link)
        if file is not None:
            self._open.move_to_end(link)
            return file
        descriptor = os.open(self._path(link), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end = os.fstat(descriptor).st_size
        file = self._open[link] = _OpenFile(descriptor, end, flushed_end=end)
        return file

    # ---- reading

    def read(self, link: LinkKey, place: Place) -> tuple[bytes, bytes] | None:
        """Header and payload at a place, unchecked but for the header's checksum; None where they can't be had any more.

        That is where they aren't there, or the disk has lost these very bytes (EIO). Raises DiskFailed where it can't be read.
        """
        try:
            descriptor = os.open(self._path(link), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DiskFailed(f"the disk can't be read: {error}") from error
        try:
            header = os.pread(descriptor, place.header_bytes, place.offset)
            payload = os.pread(descriptor, place.size_bytes - place.header_bytes, place.offset + place.header_bytes)
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise DiskFailed(f"the disk can't be read: {error}") from error
        finally:
            os.close(descriptor)
        is_it = len(header) + len(payload) == place.size_bytes and (
            int.from_bytes(header[-4:], "little") == place.header_crc
        )
        return (header, payload) if is_it else None

    def read_ahead(self, link: LinkKey, offset: int) -> None:
        """Have the system read what comes from there on, beside whatever is done meanwhile."""
        with contextlib.suppress(OSError):  # it is advice: who reads meets what is wrong
            descriptor = os.open(self._path(link), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, offset, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def size_bytes(self, link: LinkKey) -> int:
        """Of the link's file; 0 where it isn't there. Raises DiskFailed."""
        try:
            return self._path(link).stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise DiskFailed(f"the disk can't be read: {error}") from error

    def _path(self, link: LinkKey) -> Path:
        return self._directory / f"{link[0]}-{link[1]}{SUFFIX}"


def forget_pages(descriptor: int, start: int, end: int) -> None:
    """What was just flushed leaves the page cache: from the page on that holds `start` to the last full one before `end`.

    A page with room in it stays: the next write would read it back.
    """
    start, end = start - start % mmap.PAGESIZE, end - end % mmap.PAGESIZE
    if start < end:
        with contextlib.suppress(OSError):  # it is advice: a file system may know nothing of it
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def _write(descriptor: int, parts: list[Payload]) -> None:
    written = os.writev(descriptor, parts)
    if written < sum(map(len, parts)):
        rest = memoryview(b"".join(parts))[written:]
        while rest:  # says by an error why it didn't take all
            rest = rest[os.write(descriptor, rest) :]
