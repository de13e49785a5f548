"""What RocksDB leaves out of its write-ahead log and MANIFEST without a word, though it was written whole; and what it refuses that is torn.

Problem: after a power failure the newest log may end within a record, and has to be read up to there. RocksDB's reader takes two
kinds of damage for that, too, and what lies behind is as if it had never been written: a length that reaches beyond the
file's end, and a header of zeros, which has it go on with the next block (db/log_reader.cc, ReadPhysicalRecord). All
else that can't be read it tells.

Idea: what is torn ends within its record, so a checksum that holds for less than the length says, or anything but zeros
behind zeros, is damage.

A file system may keep a file's length and not its last bytes: then the record at the end has its length, and zeros from a sector on.
RocksDB tells that as damage. It is to be cut off before: where all is whole up to that record, and none of it was flushed, it is torn.

Format ("Write Ahead Log File Format" in RocksDB's wiki): blocks of BLOCK_BYTES, in them records that don't cross their bounds: masked
crc32c u32 of type and payload, length of the payload u16, type u8, payload; less than a header at a block's end is filled with zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from crc32c import crc32c

BLOCK_BYTES: Final = 32 * 1024
SECTOR_BYTES: Final = 512
"""What a disk writes whole or not at all."""
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
    for at, end, checksum, length, kind in _records(data):
        if at + _HEADER.size + length > end:
            if at < flushed_bytes or (end == size_bytes and _holds_for_less(data[at + _KIND_AT :], checksum)):
                return at
        elif kind == length == 0:
            return at if at < flushed_bytes or any(memoryview(data)[at + _HEADER.size :]) else None
    return size_bytes if size_bytes < flushed_bytes else None


def torn(data: bytes, flushed_bytes: int = 0) -> int | None:
    """Where the record begins that has zeros in its place, from a sector to the file's end, and before which all is whole; None for nowhere.

    `flushed_bytes`: as for `damage`, which is to be asked first.
    """
    zeros_at = -(-len(data.rstrip(b"\0")) // SECTOR_BYTES) * SECTOR_BYTES
    if zeros_at >= len(data):
        return None
    for at, end, checksum, length, _ in _records(data):
        behind = at + _HEADER.size + length
        if behind > end or masked(crc32c(data[at + _KIND_AT : behind])) != checksum:
            is_torn = behind > zeros_at and at >= flushed_bytes
            return at if is_torn and not _holds_for_less(data[at + _KIND_AT : behind], checksum) else None
    return None


def _records(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Where each record begins, and its block ends; its checksum, length and kind. One that reaches beyond is its block's last."""
    for block in range(0, len(data), BLOCK_BYTES):
        at, end = block, min(block + BLOCK_BYTES, len(data))
        while end - at >= _HEADER.size:
            checksum, length, kind = _HEADER.unpack_from(data, at)
            yield at, end, checksum, length, kind
            at += _HEADER.size + length


def _holds_for_less(kind_and_payload: bytes, checksum: int) -> bool:
    """Whether a record's checksum is that of the first bytes of what there is."""
    found = 0
    for at in range(len(kind_and_payload)):
        found = crc32c(kind_and_payload[at : at + 1], found)
        if masked(found) == checksum:
            return True
    return False
