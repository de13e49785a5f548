"""Disks that can be harmed: of any server, what it writes and flushes; a member's in every way.

Failing, slow, standing still or without room, by the library of `faulty_disk.c` under the server. One in an image is a real file system besides:
without power, by what ext4's own tests take for that. And a member's, of limited size, can be full, by real bytes; damaged, by flipped
bits in the files of the database and in segment files, or by an end that its log lacks; blank, by removal.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from enum import IntEnum
from pathlib import Path

SIZE_MB = 768
RESERVE_MB = 64
_MIB = 1024 * 1024
_CONTROL = struct.Struct("=iiq")
_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN, which is _IOR('X', 125, __u32)."""
_NO_FLUSH = struct.pack("=I", 2)
"""EXT4_GOING_FLAGS_NOLOGFLUSH: neither data nor the journal reach the disk any more."""


class Trouble(IntEnum):
    """What `faulty_disk.c` does to writes or flushes."""

    NONE = 0
    WRITE_ERROR = 1
    FLUSH_ERROR = 2
    SLOW_FLUSH = 3
    FULL = 4
    STILL_FLUSH = 5
    STILL = 6


def compile_library(directory: Path) -> Path:
    """The library to preload, compiled by the system's cc. Raises CalledProcessError."""
    library = directory / "faulty_disk.so"
    source = Path(__file__).with_name("faulty_disk.c")
    subprocess.run(("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"), check=True)
    return library


class Disk:
    """What one server writes and flushes below `path`."""

    def __init__(self, path: Path, control_path: Path, library: Path) -> None:
        self.path = path
        self._library = library
        self._control_path = control_path
        self._control_path.write_bytes(bytes(mmap.PAGESIZE))
        with self._control_path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    @property
    def environment(self) -> dict[str, str]:
        """What a server on this disk is started with."""
        return {
            "LD_PRELOAD": str(self._library),
            "SERIATIM_DISK_CONTROL": str(self._control_path),
            "SERIATIM_DISK_DIRECTORY": str(self.path),
        }

    def trouble(self, kind: Trouble, delay_ms: int = 0) -> None:
        """From now on; the count of calls that were harmed starts again."""
        self._control[: _CONTROL.size] = _CONTROL.pack(kind, delay_ms, 0)

    @property
    def hits(self) -> int:
        """How many calls were harmed since `trouble`."""
        return _CONTROL.unpack(self._control[: _CONTROL.size])[2]

    def mend(self) -> bool:
        """Obedience again; whether there was any trouble."""
        had_trouble = _CONTROL.unpack(self._control[: _CONTROL.size])[0] != Trouble.NONE
        self._control[: _CONTROL.size] = _CONTROL.pack(Trouble.NONE, 0, self.hits)
        return had_trouble

    def close(self) -> None:
        """Nothing is asked of it any more."""
        self._control.close()


class ImageDisk(Disk):
    """With a file system of its own. Mounted by this process, in its own mount namespace, which ends with it."""

    def __init__(self, directory: Path, name: str, library: Path) -> None:
        path = directory / name
        path.mkdir()
        self._image = directory / f"{name}.image"
        with self._image.open("wb") as file:
            file.truncate(SIZE_MB * _MIB)
        subprocess.run(("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image)), check=True)
        super().__init__(path, directory / f"{name}.control", library)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(("mount", "-o", "loop,noatime", str(self._image), str(self.path)), check=True)

    def lose_power(self, pid: int | None) -> None:
        """At once: what wasn't flushed never reaches it, and every call fails until `come_back`, for which this process has to be dead.

        It is stopped before: fdatasync answers well where this comes amid it (Linux 6.18: eleven of 150 loops of write and
        fdatasync were promised a write too many so), and a machine without power wouldn't have heard that.
        """
        if pid is not None:
            _stop(pid)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _NO_FLUSH)
        finally:
            os.close(descriptor)

    def flush(self) -> None:
        """All that was written to it by now, as the operating system does within half a minute."""
        subprocess.run(("sync", "--file-system", str(self.path)), check=True)

    def come_back(self) -> None:
        """As the file system finds it at the next start, by its journal. Nobody has a file of it open."""
        subprocess.run(("umount", str(self.path)), check=True)
        self._mount()

    def close(self) -> None:
        """Take it out of the tree of files; its image stays."""
        super().close()
        subprocess.run(("umount", "--lazy", str(self.path)), check=True)


class MemberDisk(ImageDisk):
    """One member's."""

    def fill(self, leaving_mb: int) -> None:
        """Take room by a real file, until so much is left; 0: nothing at all."""
        found = os.statvfs(self.path)
        size = found.f_bavail * found.f_frsize - leaving_mb * _MIB
        with (self.path / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(size - _MIB, _MIB))
            file.seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):  # no space left: as wished
                while not leaving_mb:
                    os.write(file.fileno(), bytes(4096))

    def mend(self) -> bool:
        """Room again, besides."""
        (self.path / "ballast").unlink(missing_ok=True)
        return super().mend()

    def wipe(self) -> None:
        """A blank disk at the same place."""
        for path in self.path.iterdir():
            if path.name != "lost+found":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def cut_log(self, chance: random.Random) -> str:
        """Cut the database's newest log off at any byte; says which, and where."""
        newest = max((self.path / "data").glob("*.log"), key=lambda path: int(path.stem))
        size_bytes = newest.stat().st_size
        left = chance.randrange(size_bytes) if size_bytes else 0
        with newest.open("r+b") as file:
            file.truncate(left)
            os.fsync(file.fileno())
        return f"{newest.name}@{left} of {size_bytes}"

    def flip(self, chance: random.Random, needles: tuple[bytes, ...], most: int = 3) -> list[str]:
        """Flip a bit in up to `most` places where stored records lie (found by a needle); says where."""
        places = []
        for path in sorted((*(self.path / "data").iterdir(), *(self.path / "segments").iterdir())):
            if path.suffix not in {".log", ".sst", ".blob", ".segment"}:
                continue
            content = path.read_bytes()
            for needle in needles:
                at = content.find(needle)
                while at >= 0:
                    places.append((path, at + chance.randrange(len(needle))))
                    at = content.find(needle, at + 1)
        chosen = chance.sample(places, min(most, len(places)))
        for path, at in chosen:
            with path.open("r+b") as file:
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << chance.randrange(8)]))
                file.flush()
                os.fsync(file.fileno())
        return [f"{path.name}@{at}" for path, at in chosen]


def _stop(pid: int) -> None:
    """No thread of it does anything any more; one that waits for a disk doesn't go on behind that."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(path) not in "TDZX" for path in Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.0001)


def _state(stat: Path) -> str:
    """Of a thread; proc(5)."""
    return stat.read_text().rpartition(") ")[2][0]
