"""How far a member's database was flushed at least, kept beside it, so that what is gone from its end is missed.

Problem: a log that ends early is what a power failure leaves, and what damage leaves that looks so; a member that can't tell them apart
says that it has all it acknowledged, and what lies behind is cut off the other member's good copy.

Idea: RocksDB numbers all changes. The number of the last one is written down after each flush, and never before; and how far each of
its logs was flushed, for an older one may lose its end, too, while a newer one has the number. This is itself not flushed, which
costs a write to the system's memory and no more: what a power failure leaves of it was true, too. A database that is
opened with less has lost what it was told to keep.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from crc32c import crc32c

NAME: Final = "flushed"
_NUMBER: Final = struct.Struct(">Q")
_LOG: Final = struct.Struct(">QQ")
_CHECKSUM: Final = struct.Struct(">I")
_MOST_LOGS: Final = 31
"""All in one sector. There are as many as tables in memory that are being written, and one."""
_MOST_BYTES: Final = _NUMBER.size + _MOST_LOGS * _LOG.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Flushed:
    """`number`: of the last change, 0 where it isn't known; `logs`: bytes of each log, by its number."""

    number: int = 0
    logs: Mapping[int, int] = field(default_factory=dict)


class FlushMark:
    """The mark of one directory; `before`: what was flushed when it was last used."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.before = _decode(os.pread(self._file, _MOST_BYTES, 0))

    def keep(self, number: int, logs: Mapping[int, int]) -> None:
        """All changes up to `number` are flushed. What can't be written leaves what was before: it is still true, or told as unknown."""
        of_logs = [_LOG.pack(log, logs[log]) for log in sorted(logs)[-_MOST_LOGS:]]
        encoded = b"".join((_NUMBER.pack(number), *of_logs))
        with contextlib.suppress(OSError):
            os.pwrite(self._file, (encoded + _CHECKSUM.pack(crc32c(encoded))).ljust(_MOST_BYTES, b"\0"), 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


def _decode(stored: bytes) -> Flushed:
    """Its length is what has a checksum that holds."""
    for size_bytes in range(_NUMBER.size, len(stored) - _CHECKSUM.size + 1, _LOG.size):
        encoded, checksum = stored[:size_bytes], stored[size_bytes : size_bytes + _CHECKSUM.size]
        if checksum == _CHECKSUM.pack(crc32c(encoded)):
            (number,) = _NUMBER.unpack_from(encoded)
            return Flushed(number, dict(_LOG.iter_unpack(encoded[_NUMBER.size :])))
    return Flushed()
