"""One bit that is flipped on its way never makes another message of what a process said, nor of what it keeps in ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from seriatim.protocol import errors
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.batch_streams import APPEND, CHECKED_BYTES, COPY, FETCH, REPLICATE, BatchMessage, Codec
from seriatim.protocol.checksums import SIZE_BYTES, read_by, with_checksum, without_checksum, written_by
from seriatim.protocol.errors import MalformedFrame, PartlyResend
from seriatim.protocol.names import Incarnation, Index
from seriatim.protocol.registration import CoordinatorRegistration, Registration

LINK = pb.LinkName(cluster="c", queue_id=1_700_000_000_000, epoch=3, to=pb.Incarnation(disk_id="d", start=2))
END = pb.Position(index=5000, hash=bytes(range(32)), marks={"orders": 4999})


def flipped(data: bytes) -> Iterator[bytes]:
    """The bytes, each time with another bit."""
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@pytest.mark.parametrize(
    "message",
    [
        pb.AppendReply(next_index=5000),
        pb.AppendReply(next_index=7, refusal="x" * 80),
        pb.ReplicateReply(next_index=5000, hash=bytes(32)),
        pb.OpenLinkRequest(link=LINK, chain_version=300, token=70_000, marks={"orders": 4999}),
        pb.OpenLinkReply(next=END),
        pb.SealRequest(link=LINK, chain_version=300),
        pb.SealReply(answer=pb.SealReply.WHOLE, committed_index=4990, positions=[END, END]),
        pb.TellReaderRequest(link=LINK, subscription_id=1, generation=1, token=9, cursor=4000),
        pb.CommitCursorRequest(link=LINK, subscription_id=1, generation=1, token=9, index=4000),
        pb.CommitCursorReply(),
        pb.AcquireSendReply(
            grant=pb.SendGrant(epoch=3, next_index=5000, is_resume_known=True, resume_point={"orders": 4999}), token=2
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_the_same_or_none_whichever_bit_was_flipped(message: Any) -> None:
    parse = read_by(type(message).FromString)
    written = written_by(type(message).SerializeToString)(message)
    assert parse(written) == parse(message.SerializeToString()) == message  # as an earlier version writes it
    at_earlier_version = type(message).FromString(written)
    at_earlier_version.DiscardUnknownFields()
    assert at_earlier_version == message
    for data in flipped(written):
        try:
            found = parse(data)
        except DecodeError:
            continue
        found.DiscardUnknownFields()  # the checksum is none any more
        assert found == message


@pytest.mark.parametrize("codec", [APPEND, REPLICATE, COPY, FETCH])
@pytest.mark.parametrize("committed", [0, 5000])
def test_a_batch_is_the_same_or_damaged_whichever_bit_was_flipped(codec: Codec, committed: int) -> None:
    """A master told its sender that it isn't Seriatim that talks, which ended the producer; a slave took for committed what wasn't."""
    batch = encode(RecordColumns([b"x" * 20] * 3, range(1, 4), "orders", [1_700_000_000_000] * 3), Index(5000))
    sent = BatchMessage.of(batch, committed if codec in {REPLICATE, FETCH} else 0)
    assert codec.parse(codec.serialize(sent)) == sent
    for data in flipped(codec.serialize(sent)):
        try:
            found = codec.parse(data)
        except DecodeError:
            continue
        assert found == sent


@pytest.mark.parametrize("codec", [APPEND, REPLICATE, COPY, FETCH])
def test_a_batch_too_large_for_a_checksum_has_its_own_and_may_end_like_one(codec: Codec) -> None:
    for size in (CHECKED_BYTES - 200, CHECKED_BYTES, 3 * CHECKED_BYTES):
        value = bytes(size - SIZE_BYTES) + with_checksum(b"") + bytes(4)
        for ending in (value, value[:-4]):
            batch = encode(RecordColumns([ending], [1], "orders", [0]), Index(0))
            message = codec.parse(codec.serialize(BatchMessage.of(batch)))
            assert message.batches() == [batch]


def test_what_is_left_of_a_large_batch_whose_header_is_nowhere_is_damaged() -> None:
    data = APPEND.serialize(BatchMessage.of(encode(RecordColumns([bytes(100_000)], [1], "s", [0]), Index(0))))
    head = data.index(b"SRB") - 2
    with pytest.raises(DecodeError):
        APPEND.parse(data[:head] + bytes((data[head] ^ 0x10,)) + data[head + 1 :])


def test_a_view_is_checked_as_bytes_are() -> None:
    data = with_checksum(b"what was said")
    assert without_checksum(memoryview(data)) == b"what was said"
    with pytest.raises(DecodeError):
        without_checksum(memoryview(b"W" + data[1:]))
    for short in (b"", data[:4], data[-SIZE_BYTES:][:-1]):
        assert without_checksum(short) == short


def test_an_error_is_the_same_or_none_whichever_bit_was_flipped() -> None:
    """By a mark that is too high records count as stored that aren't."""
    error = PartlyResend('a "quoted" one, "crc32c": 7', marks={"orders": 4999}, next_index=5)
    said = errors.to_wire(error)
    assert errors.from_wire(said).details == error.details
    assert errors.from_wire('{"code": "partly-resend", "message": "m"}').code == error.code  # an earlier version's
    for data in flipped(said.encode()):
        try:
            found = errors.from_wire(data.decode())
        except (MalformedFrame, UnicodeDecodeError):
            continue
        assert (type(found), found.message, found.details) == (type(error), error.message, error.details)


@pytest.mark.parametrize(
    "registration",
    [
        Registration(Incarnation("d", 3), "10.0.0.1:7100", Incarnation("e", 4), direct="10.0.0.1:7101"),
        CoordinatorRegistration("10.0.0.1:7000", "example.org:7000"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_registration_is_the_same_or_none_whichever_bit_was_flipped(registration: Any) -> None:
    written = registration.encode()
    assert type(registration).decode(written) == registration
    for data in flipped(written):
        try:
            found = type(registration).decode(data)
        except (KeyError, ValueError):
            continue
        assert found == registration
