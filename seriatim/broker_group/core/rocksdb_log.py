"""What RocksDB leaves out of its write-ahead log and MANIFEST without a word, though it was written whole.

Problem: after a power failure the newest log may end within a record, and has to be read up to there. RocksDB's reader takes two
kinds of damage for that, too, and what lies behind is as if it had never been written: a length that reaches beyond the
file's end, and a header of zeros, which has it go on with the next block (db/log_reader.cc, ReadPhysicalRecord). All
else that can't be read it tells.

Idea: what is torn ends within its record, so a checksum that holds for less than the length says, or anything but zeros
behind zeros, is damage.

Format ("Write Ahead Log File Format" in RocksDB's wiki): blocks of BLOCK_BYTES, in them records that don't cross their bounds: masked
crc32c u32 of type and payload, length of the payload u16, type u8, payload; less than a header at a block's end is filled with zeros.
"""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

BLOCK_BYTES: Final = 32 * 1024
_HEADER: Final = struct.Struct("<IHB")
_KIND_AT: Final = _HEADER.size - 1
_WORD: Final = (1 << 32) - 1
_MASK: Final = 0xA282EAD8


def masked(checksum: int) -> int:
    """As RocksDB stores it: a checksum over bytes that hold checksums would be weak."""
    return ((checksum >> 15 | checksum << 17) + _MASK) & _WORD


def damage(data: bytes, flushed_bytes: int = 0) -> int | None:
    """Where in the file lies what was written whole and RocksDB would leave out without telling; None for nowhere.

    `flushed_bytes`: how many of its first bytes are known to have been flushed: none of these is torn.
    """
    size_bytes = len(data)
    for block in range(0, size_bytes, BLOCK_BYTES):
        at, end = block, min(block + BLOCK_BYTES, size_bytes)
        while end - at >= _HEADER.size:
            checksum, length, kind = _HEADER.unpack_from(data, at)
            behind = at + _HEADER.size + length
            if behind > end:
                if at < flushed_bytes or (end == size_bytes and _holds_for_less(data[at + _KIND_AT :], checksum)):
                    return at
                break  # torn; or RocksDB tells
            if kind == length == 0:
                return at if at < flushed_bytes or any(memoryview(data)[at + _HEADER.size :]) else None
            at = behind
    return size_bytes if size_bytes < flushed_bytes else None


def _holds_for_less(kind_and_payload: bytes, checksum: int) -> bool:
    """Whether a record's checksum is that of the first bytes of what there is."""
    found = 0
    for at in range(len(kind_and_payload)):
        found = crc32c(kind_and_payload[at : at + 1], found)
        if masked(found) == checksum:
            return True
    return False
