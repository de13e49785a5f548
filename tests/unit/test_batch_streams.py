"""Messages with a batch are protobuf on the wire, whoever wrote them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.batch_streams import APPEND, COPY, FETCH, REPLICATE, BatchMessage, Codec, together
from seriatim.protocol.checksums import SIZE_BYTES
from seriatim.protocol.errors import BadChecksum
from seriatim.protocol.names import Index

HEADER = bytes(range(70))
SIZES = (0, 1, 127, 128, 16_383, 16_384, 300_000)


def generated(codec: Codec, message: BatchMessage) -> Any:
    """What protobuf's own code makes of it."""
    following = [pb.Batch(header=header, payload=payload) for header, payload in message.following]
    batch = pb.Batch(header=message.header, payload=message.payload, following=following)
    if codec is COPY:
        return batch
    if codec is APPEND:
        return pb.AppendRequest(batch=batch)
    if codec is REPLICATE:
        return pb.ReplicateRequest(batch=batch, committed_index=message.committed_index)
    return pb.FetchReply(batch=batch, committed_index=message.committed_index)


def messages(codec: Codec) -> list[BatchMessage]:
    committed = (0, 1, 300, 2**64 - 1) if codec in {REPLICATE, FETCH} else (0,)
    alone = [BatchMessage(HEADER, b"p" * size, index) for size in SIZES for index in committed]
    if codec not in {COPY, FETCH}:
        return alone
    several = tuple((HEADER[number:], b"f" * size) for number, size in enumerate(SIZES))
    return [replace(one, following=several[:count]) for one in alone for count in (0, 1, len(several))]


@pytest.mark.parametrize("codec", [APPEND, REPLICATE, COPY, FETCH])
def test_protobuf_reads_what_is_written_by_hand(codec: Codec) -> None:
    for message in messages(codec):
        expected = generated(codec, message)
        found = type(expected).FromString(codec.serialize(message))
        found.DiscardUnknownFields()  # the checksum
        assert found == expected


@pytest.mark.parametrize("codec", [APPEND, REPLICATE, COPY, FETCH])
def test_what_protobuf_or_this_module_wrote_is_read(codec: Codec) -> None:
    for message in messages(codec):
        assert codec.parse(codec.serialize(message)) == message
        assert codec.parse(generated(codec, message).SerializeToString()) == message


@pytest.mark.parametrize("codec", [APPEND, REPLICATE, COPY])
def test_a_broker_leaves_a_large_payload_where_it_came_and_passes_it_on_as_it_is(codec: Codec) -> None:
    data = codec.serialize(BatchMessage(HEADER, bytes(range(256)) * 2000))
    arrived = codec.parse(data)
    assert isinstance(arrived.payload, memoryview)
    assert arrived.payload.obj is data
    assert arrived.payload.readonly
    for onwards in (REPLICATE, COPY, FETCH):
        assert onwards.parse(onwards.serialize(arrived)) == arrived


def test_a_client_has_bytes_and_so_has_everybody_of_a_small_payload() -> None:
    for codec, size in ((FETCH, 300_000), (APPEND, 1000), (REPLICATE, 1000), (COPY, 1000)):
        assert isinstance(codec.parse(codec.serialize(BatchMessage(HEADER, b"p" * size))).payload, bytes)


def test_batches_go_together_as_far_as_they_fit_into_a_message() -> None:
    sizes = [7_000, 7_000, 3_000, 1, 100_000, 1, 16_300]
    batches = [encode(RecordColumns([b"v" * size], [1], "s", [0]), Index(0)) for size in sizes]
    assert [[len(one.payload) // 1000 for one in several] for several in together(batches)] == [
        [7, 7], [3, 0], [100], [0], [16]
    ]  # fmt: skip
    message = BatchMessage.of_several(batches[:3], 7)
    assert FETCH.parse(FETCH.serialize(message)).batches() == batches[:3]
    damaged = replace(
        message, following=(message.following[0], (batches[2].header_bytes, bytes(len(batches[2].payload))))
    )
    with pytest.raises(BadChecksum):
        damaged.batches()


def test_fields_may_come_in_pieces_and_in_any_order() -> None:
    part, rest = pb.ReplicateRequest(batch=pb.Batch(payload=b"1")), pb.ReplicateRequest(batch=pb.Batch(header=HEADER))
    data = part.SerializeToString() + rest.SerializeToString()
    assert REPLICATE.parse(data) == BatchMessage(HEADER, b"1")
    twice = pb.AppendRequest(batch=pb.Batch(header=b"old", payload=b"old")).SerializeToString()
    data = twice + pb.AppendRequest(batch=pb.Batch(header=HEADER, payload=b"new")).SerializeToString()
    assert APPEND.parse(data) == BatchMessage(HEADER, b"new")


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (APPEND, pb.AppendRequest(open=pb.AppendOpen(token=3))),
        (APPEND, pb.AppendRequest()),
        (REPLICATE, pb.ReplicateRequest(committed_index=70_000)),
        (REPLICATE, pb.ReplicateRequest(open=pb.ReplicateOpen(token=3))),
        (FETCH, pb.FetchReply(end=9, committed_index=9)),
        (FETCH, pb.FetchReply(start=pb.Position(index=5, marks={"s": 1}))),
    ],
)
def test_other_messages_stay_as_they_are(codec: Codec, message: Any) -> None:
    assert codec.parse(codec.serialize(message)) == message


def test_a_message_that_was_cut_off_is_refused() -> None:
    for codec in (APPEND, REPLICATE, COPY, FETCH):
        data = codec.serialize(BatchMessage(HEADER, b"p" * 300, 7 if codec in {REPLICATE, FETCH} else 0))
        for size in range(1, len(data) - SIZE_BYTES):  # without its checksum it is whole, too
            try:
                found = codec.parse(data[:size])
            except DecodeError:
                continue
            # Between two fields a message may end, as far as protobuf can tell.
            assert not isinstance(found, BatchMessage) or found.payload == b""


def test_a_length_that_never_ends_is_refused_at_once() -> None:
    tag = APPEND.serialize(pb.AppendRequest(batch=pb.Batch(header=b"h", payload=b"p")))[:1]
    with pytest.raises(DecodeError):  # a megabyte of it took a minute
        APPEND.parse(tag + b"\xff" * 1_000_000)
