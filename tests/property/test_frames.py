"""Frames of direct streams, however their bytes arrive; and bytes that are none."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.protocol import frames
from seriatim.protocol.errors import MalformedFrame
from seriatim.protocol.frames import (
    BUFFER_BYTES,
    FIRST_BUFFER_BYTES,
    LARGE_BYTES,
    MAX_FRAME_BYTES,
    Frame,
    FrameReader,
    Kind,
)

sizes = st.one_of(
    st.integers(0, 300),
    st.integers(FIRST_BUFFER_BYTES - 20, FIRST_BUFFER_BYTES + 20),
    st.integers(BUFFER_BYTES - 20, BUFFER_BYTES + 20),
    st.integers(BUFFER_BYTES, 4 * BUFFER_BYTES),
)
messages = st.lists(st.tuples(st.sampled_from(Kind), st.lists(sizes, max_size=4)), max_size=8)


def written(*parts: bytes, kind: Kind = Kind.MESSAGE) -> bytes:
    return b"".join(frames.encode(kind, *parts))


def fed(reader: FrameReader, data: bytes, most: list[int]) -> list[Frame]:
    """Feed `data`, at most so much at a time, in turn: as a socket does, that has more or less to give."""
    found: list[Frame] = []
    at = turn = 0
    while at < len(data):
        room = reader.room()
        assert len(room) > 0
        size = min(len(room), len(data) - at, most[turn % len(most)])
        room[:size] = data[at : at + size]
        found += reader.filled(size)
        at, turn = at + size, turn + 1
    return found


@given(messages, st.lists(st.integers(1, 3 * BUFFER_BYTES), min_size=1, max_size=5))
def test_frames_arrive_as_they_were_sent_however_they_are_cut(
    sent: list[tuple[Kind, list[int]]], most: list[int]
) -> None:
    parts = [(kind, [bytes((number + 1,)) * size for number, size in enumerate(sizes)]) for kind, sizes in sent]
    whole = [(kind, b"".join(contents)) for kind, contents in parts]
    data = b"".join(written(*contents, kind=kind) for kind, contents in parts)
    if len(data) > 5_000:
        most = [max(one, 1_000) for one in most]  # byte by byte only where there are few
    found = fed(FrameReader(), data, most)
    assert [(kind, bytes(content)) for kind, content in found] == whole


def test_who_says_little_keeps_little() -> None:
    reader = FrameReader()
    for _ in range(100):
        fed(reader, written(b"credit" * 10), [10])
    assert len(reader.room()) == FIRST_BUFFER_BYTES
    assert len(fed(reader, written(b"x" * FIRST_BUFFER_BYTES), [BUFFER_BYTES])) == 1
    assert len(reader.room()) == BUFFER_BYTES, "who says much is read in large pieces"


def test_the_bytes_of_a_large_frame_stay_while_others_arrive() -> None:
    reader = FrameReader()
    large = fed(reader, written(b"a" * 3 * BUFFER_BYTES), [10_000])
    small = fed(reader, written(b"b" * 100), [7])
    again = fed(reader, written(b"c" * 3 * BUFFER_BYTES), [10_000])
    assert [set(bytes(content)) for _, content in (*large, *small, *again)] == [set(b"a"), set(b"b"), set(b"c")]


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\n",
        struct.pack("<IB", 3, 9) + b"abc",
        struct.pack("<IB", MAX_FRAME_BYTES + 1, Kind.MESSAGE),
    ],
)
def test_what_is_no_frame_is_refused_before_room_is_made_for_it(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        fed(FrameReader(), data, [1000])


def test_a_frame_over_the_limit_is_not_sent() -> None:
    with pytest.raises(MalformedFrame, match="at most"):
        frames.encode(Kind.MESSAGE, bytes(MAX_FRAME_BYTES + 1))


def test_who_says_that_much_comes_takes_no_memory_by_it() -> None:
    reader = FrameReader()
    large = written(b"x" * 5_000_000)
    assert fed(reader, large[:5], [5]) == []
    assert len(reader.room()) == LARGE_BYTES
    [(_, content)] = fed(reader, large[5:], [300_000, 70_000])
    assert content == large[5:]


def test_the_first_frame_may_be_small_only() -> None:
    assert len(fed(FrameReader(10), written(b"x" * 10) + written(b"x" * 200_000), [4096])) == 2
    with pytest.raises(MalformedFrame, match="at most 10 bytes here"):
        fed(FrameReader(10), written(b"x" * 11), [4096])
