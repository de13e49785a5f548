"""What RocksDB would leave out of its log without a word: found wherever it is, and never in what a power failure tore.

The real reader's opinion of the same damage is in tests/integration/test_broker_store_damage.py.
"""

from __future__ import annotations

import struct

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from seriatim.broker_group.core.rocksdb_log import BLOCK_BYTES, SECTOR_BYTES, damage, masked, torn

HEADER_BYTES = 7
payloads = st.lists(
    st.one_of(st.binary(max_size=60), st.integers(0, 2 * BLOCK_BYTES).map(lambda size: b"\x01" * size)),
    min_size=1,
    max_size=12,
)


def written(payloads: list[bytes]) -> tuple[bytes, list[int]]:
    """A log with these, in pieces where they cross a block's bounds, and where each piece begins."""
    log, places = bytearray(), []
    for payload in payloads:
        rest, is_first = payload, True
        while is_first or rest:
            room = BLOCK_BYTES - len(log) % BLOCK_BYTES
            if room < HEADER_BYTES:
                log += bytes(room)
                continue
            piece, rest = rest[: room - HEADER_BYTES], rest[room - HEADER_BYTES :]
            kind = bytes([(1 if not rest else 2) if is_first else (4 if not rest else 3)])
            places.append(len(log))
            log += struct.pack("<IH", masked(crc32c(kind + piece)), len(piece)) + kind + piece
            is_first = False
    return bytes(log), places


def test_the_checksum_is_rocksdb_s() -> None:
    """The first record of a MANIFEST that RocksDB wrote: the database's identity."""
    payload = b"\x81@$5c8d61a8-1fa3-422a-be37-99c5a73430c4\x0b"[:39]
    assert masked(crc32c(b"\x01" + payload)) == 4180184561


@given(payloads, st.data())
def test_what_is_torn_anywhere_or_ends_in_zeros_is_no_damage(payloads: list[bytes], data: st.DataObject) -> None:
    log, _ = written(payloads)
    torn = log[: data.draw(st.integers(0, len(log)))]
    assert damage(torn) is None
    assert damage(torn + bytes(data.draw(st.integers(0, 2 * BLOCK_BYTES)))) is None


@given(payloads, st.data())
def test_a_length_beyond_the_end_and_zeros_before_more_are_found(payloads: list[bytes], data: st.DataObject) -> None:
    log, places = written(payloads)
    at = data.draw(st.sampled_from(places))
    (length,) = struct.unpack_from("<H", log, at + 4)
    wrong = length ^ 1 << data.draw(st.integers(0, 15))
    in_last_block = at // BLOCK_BYTES == (len(log) - 1) // BLOCK_BYTES
    if in_last_block and at + HEADER_BYTES + wrong > len(log):  # elsewhere RocksDB tells
        longer = bytearray(log)
        struct.pack_into("<H", longer, at + 4, wrong)
        assert damage(bytes(longer)) == at
    zeroed = bytearray(log)
    zeroed[at : at + HEADER_BYTES] = bytes(HEADER_BYTES)
    assert damage(bytes(zeroed)) == (at if any(zeroed[at + HEADER_BYTES :]) else None)


@given(payloads, st.integers(0, 2 * BLOCK_BYTES), st.data())
def test_zeros_from_a_sector_to_the_end_are_torn_where_nothing_of_the_record_was_flushed(
    payloads: list[bytes], zeros: int, data: st.DataObject
) -> None:
    log, places = written(payloads)
    assert torn(log) is None
    at = SECTOR_BYTES * data.draw(st.integers(0, len(log) // SECTOR_BYTES))
    left = log[:at] + bytes(len(log) - at + zeros)
    ends = [*places[1:], len(log)]
    (first, *_) = [place for place, end in zip(places, ends, strict=True) if left[place:end] != log[place:end]] or [
        None
    ]
    assert damage(left) is None
    found = torn(left)
    if first is None:
        assert found is None or found >= len(log)
    else:
        assert found == torn(left, first) == first
        assert torn(left, first + 1) is None


@given(payloads, st.data())
def test_what_has_damage_before_it_or_bytes_behind_it_is_not_torn(payloads: list[bytes], data: st.DataObject) -> None:
    log, places = written([b"\x01" * 600, *payloads, b"\x01" * 600])
    left = log[: -(-places[-1] // SECTOR_BYTES) * SECTOR_BYTES].ljust(len(log) + SECTOR_BYTES, b"\0")
    assert torn(left) == places[-1]
    harmed = bytearray(left)
    harmed[data.draw(st.integers(0, 600))] ^= 1 << data.draw(st.integers(0, 7))
    assert torn(bytes(harmed)) is None
    assert torn(left + b"\x01") is None


def test_a_whole_record_that_is_said_to_be_longer_is_not_torn() -> None:
    """In the last block, or where it was flushed, nobody but this tells; nor is it cut off where zeros follow, with what came behind it."""
    log, _ = written([b"\x01" * (BLOCK_BYTES + 600)])
    longer = bytearray(log)
    struct.pack_into("<H", longer, 4, BLOCK_BYTES)
    assert damage(bytes(longer)) is None  # RocksDB tells
    assert damage(bytes(longer), 1) == 0
    zeros_behind = bytearray(written([b"\x01" * 600])[0].ljust(4 * SECTOR_BYTES, b"\0"))
    struct.pack_into("<H", zeros_behind, 4, 3 * SECTOR_BYTES)
    assert torn(bytes(zeros_behind)) is None


def test_what_has_no_zeros_in_its_place_is_not_torn() -> None:
    log, _ = written([b"\x01" * (SECTOR_BYTES - HEADER_BYTES), b"\x01" * 600])
    assert torn(log[: 2 * SECTOR_BYTES]) is None
    harmed = bytearray(log[:SECTOR_BYTES].ljust(2 * SECTOR_BYTES, b"\0"))
    harmed[20] ^= 1
    assert torn(bytes(harmed)) is None
