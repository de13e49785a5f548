"""How far a member's database was flushed at least, kept beside it, so that what is gone from its end is missed.

Problem: a log that ends early is what a power failure leaves, and what damage leaves that looks so; a member that can't tell them apart
says that it has all it acknowledged, and what lies behind is cut off the other member's good copy.

Idea: RocksDB numbers all changes. The number of the last one is written down after each flush, and never before. This is itself
not flushed, which costs a write to the system's memory and no more: what a power failure leaves of it was true, too.
A database that is opened with less has lost what it was told to keep.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import Final

from crc32c import crc32c

NAME: Final = "flushed"
_NUMBER: Final = struct.Struct(">Q")
_CHECKSUM: Final = struct.Struct(">I")


class FlushMark:
    """The mark of one directory; `number`: of the last change that was flushed before this start, 0 where that isn't known."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.number = _decode(os.pread(self._file, _NUMBER.size + _CHECKSUM.size, 0))

    def keep(self, number: int) -> None:
        """All changes up to `number` are flushed. One that can't be written leaves the one before: it is still true."""
        encoded = _NUMBER.pack(number)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, encoded + _CHECKSUM.pack(crc32c(encoded)), 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


def _decode(stored: bytes) -> int:
    encoded, checksum = stored[: _NUMBER.size], stored[_NUMBER.size :]
    is_whole = len(checksum) == _CHECKSUM.size and checksum == _CHECKSUM.pack(crc32c(encoded))
    return int(_NUMBER.unpack(encoded)[0]) if is_whole else 0
