"""A batch gives back what was put in; a damaged one is never taken for another."""

from __future__ import annotations

import os
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from seriatim.protocol import batch
from seriatim.protocol.errors import BadChecksum, MalformedFrame
from seriatim.protocol.marks import SourceSpan
from seriatim.protocol.names import SEQ_MAX, Index


@st.composite
def columns(draw):
    count = draw(st.integers(1, 30))
    sources = draw(st.sampled_from(["p", ["p", "q"], ["a", "b", "pg/1/slot"]]))
    names = sources if isinstance(sources, str) else [draw(st.sampled_from(sources)) for _ in range(count)]
    used: dict[str, int] = {}
    seqs = []
    for row in range(count):
        source = names if isinstance(names, str) else names[row]
        low = used.get(source, -1) + 1
        seq = low + draw(st.sampled_from([0, 0, 0, 1, 2**40]))
        used[source] = seq
        seqs.append(min(seq, SEQ_MAX))
    rows = st.lists(st.binary(max_size=40), min_size=count, max_size=count)
    header = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=9)), max_size=2).map(tuple)
    return batch.RecordColumns(
        draw(rows),
        seqs,
        names,
        draw(st.lists(st.integers(0, 2**50), min_size=count, max_size=count)),
        draw(st.none() | st.lists(st.none() | st.binary(max_size=9), min_size=count, max_size=count)),
        draw(st.none() | st.lists(header, min_size=count, max_size=count)),
    )


def _rows(one: batch.RecordColumns):
    for row in range(len(one)):
        yield (
            one.source_of(row),
            one.seqs[row],
            one.values[row],
            one.timestamps_ms[row],
            one.keys[row] if one.keys is not None else None,
            one.headers[row] if one.headers is not None else (),
        )


@given(columns(), st.integers(0, 2**63), st.booleans())
def test_what_goes_in_comes_out(one, first_index, compress):
    encoded = batch.encode(one, Index(first_index), compress=compress)
    arrived = batch.parse(encoded.header_bytes, encoded.payload)
    assert arrived == encoded
    assert arrived.header.end_index == first_index + len(one)
    assert list(_rows(batch.decode(arrived))) == list(_rows(one))
    for span in arrived.header.spans:
        seqs = [one.seqs[row] for row in range(len(one)) if one.source_of(row) == span.source]
        assert (span.first_seq, span.last_seq, span.count) == (seqs[0], seqs[-1], len(seqs))
    assert batch.split(encoded.header_bytes + encoded.payload) == (encoded.header_bytes, encoded.payload)


def test_what_compressing_would_not_make_smaller_stays_as_it_is():
    chance = os.urandom(8 * 1024 * 1024)
    plain, asked = (
        batch.encode(batch.RecordColumns([chance], [1], "s", [1]), Index(0), compress=compress)
        for compress in (False, True)
    )
    assert asked == plain
    assert not asked.header.is_compressed
    assert batch.decode(asked).values == [chance]
    even = batch.encode(batch.RecordColumns([bytes(1000)], [1], "s", [1]), Index(0), compress=True)
    assert even.header.is_compressed
    assert even.header.payload_size < 100
    assert batch.decode(even).values == [bytes(1000)]


@given(columns(), st.data())
def test_a_flipped_bit_is_seen(one, data):
    encoded = batch.encode(one, Index(0))
    whole = bytearray(encoded.header_bytes + encoded.payload)
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[at // 8] ^= 1 << at % 8
    size = len(encoded.header_bytes)
    with pytest.raises(BadChecksum):  # and no fault of who sent it: a sender would stop for good
        batch.parse(bytes(whole[:size]), bytes(whole[size:]))


@given(columns(), st.integers(0, 400))
def test_a_cut_batch_is_seen(one, keep):
    encoded = batch.encode(one, Index(0))
    if keep < len(encoded.header_bytes):
        with pytest.raises((BadChecksum, MalformedFrame)):
            batch.parse(encoded.header_bytes[:keep], encoded.payload)
    elif keep < encoded.size_bytes:
        with pytest.raises(MalformedFrame):
            batch.parse(encoded.header_bytes, encoded.payload[: keep - len(encoded.header_bytes)])


def said_to_be(payload: bytes, count: int, *, is_compressed: bool) -> tuple[bytes, bytes]:
    """Header and payload, with right checksums."""
    span = SourceSpan("s", 0, count - 1, count)
    header = batch.BatchHeader(Index(0), count, (span,), len(payload), _crc32c(payload), is_compressed)
    return batch.encode_header(header), payload


def test_more_records_than_a_payload_has_room_for_are_refused_before_they_are_stored():
    """What a broker had taken took each reader's memory, 4 billion records' in 13 bytes, and nobody got past it."""
    with pytest.raises(MalformedFrame):
        batch.parse(*said_to_be(bytes(13), 2**32 - 1, is_compressed=False))


def spans(*each: tuple[str, int, int, int]) -> tuple[SourceSpan, ...]:
    return tuple(SourceSpan(*one) for one in each)


@pytest.mark.parametrize(
    ("count", "of", "size_bytes"),
    [
        (0, (), 100),
        (3, spans(("s", 0, 1, 2)), 100),
        (2, spans(("s", 0, 0, 1), ("s", 1, 1, 1)), 100),
        (2, spans(("s", 0, 1, 2), ("t", 5, 5, 0)), 100),
        (2, spans(("s", 7, 7, 2)), 100),
        (2, spans(("s", 8, 7, 2)), 100),
        (2, spans(("s", 0, 1, 2)), batch.MAX_PAYLOAD_BYTES + 1),
    ],
    ids=[
        "no record",
        "too few",
        "a source twice",
        "a source without a record",
        "too few seqs",
        "seqs that fall",
        "too large",
    ],
)
def test_a_header_that_contradicts_itself_is_malformed_though_it_arrived_undamaged(count, of, size_bytes):
    right = batch.BatchHeader(Index(0), 2, spans(("s", 0, 1, 2)), 100, 0)
    assert batch.decode_header(batch.encode_header(right)) == right
    with pytest.raises(MalformedFrame, match="contradicts itself"):
        batch.decode_header(batch.encode_header(batch.BatchHeader(Index(0), count, of, size_bytes, 0)))


def test_what_is_no_header_or_one_of_another_format_is_told_as_that():
    right = batch.encode_header(batch.BatchHeader(Index(0), 2, spans(("s", 0, 1, 2)), 100, 0))[:-4]
    two = batch.encode_header(batch.BatchHeader(Index(0), 2, spans(("s", 0, 0, 1), ("t", 0, 0, 1)), 100, 0))[:-4]
    long = right[:6] + (len(right) + 5).to_bytes(2, "little") + right[8:] + b"!"
    for body, said in (
        (b"XRB\x01" + right[4:], "not the header of a batch"),
        (b"SRB\x02" + right[4:], "batch format 2 is not known here"),
        (right + b"!", "the header says"),
        (long, "contradicts itself"),
        (two.replace(b"\x01\0t", b"\x01\0\xff"), "can't be read"),
        (two.replace(b"\x01\0t", b"\xff\0t"), "can't be read"),
    ):
        with pytest.raises(MalformedFrame, match=said):
            batch.decode_header(body + _crc32c(body).to_bytes(4, "little"))
    for short in (b"", b"SRB"):
        with pytest.raises(MalformedFrame):
            batch.split(short)
        with pytest.raises(MalformedFrame):
            batch.decode_header(short)


TOO_LARGE = 2 * batch.MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (zstandard.compress(bytes(13)), 2**20),
        (zstandard.compress(bytes(TOO_LARGE)), 1),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(TOO_LARGE)), 1),
        (b"\x28\xb5\x2f\xfd\xc0\x50" + (1 << 40).to_bytes(8, "little") + b"\x01\0\0", 1),
    ],
    ids=["more records than bytes", "too large", "too large, and doesn't say so", "says that it has a terabyte"],
)
def test_who_reads_what_is_said_to_be_larger_than_it_can_be_takes_little_memory_by_it(payload, count):
    arrived = batch.parse(*said_to_be(payload, count, is_compressed=True))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame):
            batch.decode(arrived)
        assert tracemalloc.get_traced_memory()[1] <= batch.MAX_PAYLOAD_BYTES + 2**20
    finally:
        tracemalloc.stop()


@given(columns(), st.data())
def test_resends_are_cut_by_marks(one, data):
    sources = sorted({one.source_of(row) for row in range(len(one))})
    marks = {source: data.draw(st.integers(-1, max(one.seqs))) for source in sources}
    kept = one.without_resends(marks)
    assert list(_rows(kept)) == [row for row in _rows(one) if row[1] > marks[row[0]]]


@pytest.mark.parametrize("seqs", [[1, 3, 2, 4], [5, 5], [2, 1], [-1, 0], [SEQ_MAX, SEQ_MAX + 1]])
def test_seqs_that_do_not_rise_are_refused(seqs):
    with pytest.raises(ValueError, match="seq"):
        batch.encode(batch.RecordColumns([b""] * len(seqs), seqs, "p", [0] * len(seqs)), Index(0))


def _crc32c(data: bytes) -> int:
    """As RFC 3720 defines it, bit by bit by way of a table."""
    found = 0xFFFFFFFF
    for byte in data:
        found = found >> 8 ^ _TABLE[(found ^ byte) & 0xFF]
    return found ^ 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_entry(byte) for byte in range(256)]


@pytest.mark.parametrize("size", [*range(70), 255, 256, 1023, 1024, 4096, 24 * 1024 + 1, 33 * 1024, 600_007])
def test_the_checksum_is_crc32c_at_every_size(size):
    assert _crc32c(b"123456789") == 0xE3069283
    encoded = batch.encode(batch.RecordColumns([bytes(range(256)) * (size // 256 + 1)], [0], "p", [size]), Index(0))
    shorter = batch.encode(batch.RecordColumns([encoded.payload[:size]], [0], "p", [size]), Index(7))
    for one in (encoded, shorter):
        assert one.header.payload_crc == _crc32c(one.payload)
        assert int.from_bytes(one.header_bytes[-4:], "little") == _crc32c(one.header_bytes[:-4])
