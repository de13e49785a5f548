"""The streams that carry batches (Append, Replicate, CopyLink, Fetch), without protobuf around the payload.

Append, Replicate, Fetch and Connect also go past gRPC, where the member registered a port for that (`direct`): the same messages, in the same bytes.

Problem: a batch of 256 KiB passes through gRPC as bytes. Building a protobuf message around it, serialising that, parsing it
and taking the payload out again copies it each time into fresh memory: about 1 ms of processor time for each MB.

Another: a message costs either end a tenth of a millisecond, whatever is in it, so small batches that wait go together.

Idea: on the wire it is protobuf, as seriatim.proto says; only it is written and read by hand. In every one of these
messages the batch is a field of length and bytes, and so are its header and its payload: a few bytes, joined once with
the payload where it is sent. Where it arrives a broker leaves a large payload in the message and looks at it there; a client,
which takes values out of it, has it cut off.

`BatchMessage` stands for each of these messages while it carries a batch; all others stay what the stubs generate. What
another encoder wrote in another order of fields is read by protobuf.

Up to CHECKED_BYTES each has a checksum (`checksums`): a larger one is a batch, for all that counts, which has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from seriatim.protocol import checksums, direct, direct_calls, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch, Payload, parse
from seriatim.protocol.errors import MalformedFrame
from seriatim.protocol.frames import Data
from seriatim.protocol.seriatim_pb2_grpc import BrokerServicer, BrokerStub, add_BrokerServicer_to_server
from seriatim.protocol.streams import read

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Broker"].full_name
_LENGTH_DELIMITED: Final = 2
_VARINT: Final = 0
_VIEWED_BYTES: Final = 16 * 1024
"""A smaller payload is cut off by a broker, too: a view takes as long to make, and more memory."""
CHECKED_BYTES: Final = 32 * 1024
"""So large may a message be that has a checksum, without it: all that is no batch; a payload may end as a checksum does."""
TOGETHER_BYTES: Final = 16 * 1024
"""So large may several batches be in one message: a reader that hears nothing for 0.3 s goes elsewhere, and on a slow path this is soon."""


@dataclass(frozen=True, slots=True)
class BatchMessage:
    """A message with a batch. `committed_index`: of ReplicateRequest and FetchReply, 0 elsewhere.

    `following`: header and payload of those behind it that came with it, of FetchReply and CopyLink.
    """

    header: bytes
    payload: Payload
    committed_index: int = 0
    following: tuple[tuple[bytes, Payload], ...] = ()

    @classmethod
    def of(cls, encoded: EncodedBatch, committed_index: int = 0) -> BatchMessage:
        return cls(encoded.header_bytes, encoded.payload, committed_index)

    @classmethod
    def of_several(cls, batches: Sequence[EncodedBatch], committed_index: int = 0) -> BatchMessage:
        """At least one, in the order of the link."""
        first, *others = batches
        following = tuple((one.header_bytes, one.payload) for one in others)
        return cls(first.header_bytes, first.payload, committed_index, following)

    def batches(self) -> list[EncodedBatch]:
        """All that came, checked. Raises BadChecksum, MalformedFrame."""
        return [parse(header, payload) for header, payload in ((self.header, self.payload), *self.following)]


def together(batches: Iterable[EncodedBatch]) -> Iterator[list[EncodedBatch]]:
    """In their order, as many at a time as go into one message."""
    found: list[EncodedBatch] = []
    size_bytes = 0
    for one in batches:
        if found and size_bytes + one.size_bytes > TOGETHER_BYTES:
            yield found
            found, size_bytes = [], 0
        found.append(one)
        size_bytes += one.size_bytes
    if found:
        yield found


def _tag(field: int, wire_type: int) -> bytes:
    return bytes((field << 3 | wire_type,))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _read_varint(data: Data, at: int) -> tuple[int, int]:
    """A number and where it ends. Raises IndexError where the bytes end before, or it is larger than any that protobuf writes."""
    number = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise IndexError


_HEADER: Final = _tag(pb.Batch.HEADER_FIELD_NUMBER, _LENGTH_DELIMITED)
_PAYLOAD: Final = _tag(pb.Batch.PAYLOAD_FIELD_NUMBER, _LENGTH_DELIMITED)
_FOLLOWING: Final = _tag(pb.Batch.FOLLOWING_FIELD_NUMBER, _LENGTH_DELIMITED)


def _fields(header: bytes, payload: Payload) -> tuple[bytes, bytes, bytes, Payload]:
    """The parts of a Batch, to be joined."""
    return _HEADER + _varint(len(header)), header, _PAYLOAD + _varint(len(payload)), payload


def _following(header: bytes, payload: Payload) -> bytes:
    fields = _fields(header, payload)
    return b"".join((_FOLLOWING, _varint(sum(map(len, fields))), *fields))


class Codec:
    """Writes and reads one type of message.

    `batch_field`: 0 where the message is the batch; `committed_field`: 0 for none; `is_viewed`: a large payload is a view of
    the message that it came in.
    """

    def __init__(
        self, generated: Any, batch_field: int = 0, committed_field: int = 0, *, is_viewed: bool = False
    ) -> None:
        self._generated = generated
        self._is_viewed = is_viewed
        self._batch = _tag(batch_field, _LENGTH_DELIMITED) if batch_field else b""
        self._committed = _tag(committed_field, _VARINT) if committed_field else b""

    def serialize(self, message: Any) -> bytes:
        """The bytes of a BatchMessage or of a generated message."""
        return b"".join(self.parts(message))

    def parts(self, message: Any) -> Sequence[Data]:
        """The same in parts, of which a large payload is one."""
        parts = self._parts(message)
        return (checksums.with_checksum(b"".join(parts)),) if sum(map(len, parts)) <= CHECKED_BYTES else parts

    def _parts(self, message: Any) -> Sequence[Data]:
        if not isinstance(message, BatchMessage):
            return (message.SerializeToString(),)
        parts = *_fields(message.header, message.payload), *(_following(*one) for one in message.following)
        head = b""
        if self._committed and message.committed_index:
            head = self._committed + _varint(message.committed_index)
        if self._batch:
            head += self._batch + _varint(sum(map(len, parts)))
        return head, *parts

    def parse(self, data: Data) -> Any:
        """A BatchMessage or a generated message. Raises protobuf's DecodeError."""
        if len(data) <= CHECKED_BYTES + checksums.SIZE_BYTES:
            data = checksums.without_checksum(data)
        try:
            found = self._parse_batch(data)
        except IndexError:
            found = None
        return self._parse_any(data) if found is None else found

    def _parse_batch(self, data: Data) -> BatchMessage | None:
        at = committed_index = 0
        if self._committed and data[:1] == self._committed:
            committed_index, at = _read_varint(data, 1)
        if self._batch:
            if data[at : at + 1] != self._batch:
                return None
            size, at = _read_varint(data, at + 1)
            if at + size != len(data):
                return None
        if data[at : at + 1] != _HEADER:
            return None
        size, at = _read_varint(data, at + 1)
        header = bytes(data[at : at + size])
        at += size
        if data[at : at + 1] != _PAYLOAD:
            return None
        size, at = _read_varint(data, at + 1)
        if at + size != len(data):
            return None
        payload = memoryview(data)[at:] if self._is_viewed and size >= _VIEWED_BYTES else bytes(data[at:])
        return BatchMessage(header, payload, committed_index)

    def _parse_any(self, data: Data) -> Any:
        message = self._generated.FromString(bytes(data))
        if self._batch and message.WhichOneof("kind") != "batch":
            return message
        batch = message.batch if self._batch else message
        if not batch.header:
            raise DecodeError("a batch without a header")
        committed_index = message.committed_index if self._committed else 0
        following = tuple((one.header, one.payload) for one in batch.following)
        return BatchMessage(batch.header, batch.payload, committed_index, following)


class _Plain:
    """As `Codec`, of a message that carries no batch."""

    def __init__(self, generated: Any) -> None:
        self.serialize = checksums.written_by(generated.SerializeToString)
        self.parse = checksums.read_by(generated.FromString)

    def parts(self, message: Any) -> Sequence[Data]:
        return (self.serialize(message),)


APPEND: Final = Codec(pb.AppendRequest, pb.AppendRequest.BATCH_FIELD_NUMBER, is_viewed=True)
REPLICATE: Final = Codec(
    pb.ReplicateRequest,
    pb.ReplicateRequest.BATCH_FIELD_NUMBER,
    pb.ReplicateRequest.COMMITTED_INDEX_FIELD_NUMBER,
    is_viewed=True,
)
COPY: Final = Codec(pb.Batch, is_viewed=True)
FETCH: Final = Codec(pb.FetchReply, pb.FetchReply.BATCH_FIELD_NUMBER, pb.FetchReply.COMMITTED_INDEX_FIELD_NUMBER)
_MESSAGES: Final[dict[str, tuple[Codec | _Plain, Codec | _Plain]]] = {
    "Append": (APPEND, _Plain(pb.AppendReply)),
    "Replicate": (REPLICATE, _Plain(pb.ReplicateReply)),
    "CopyLink": (_Plain(pb.CopyLinkRequest), COPY),
    "Fetch": (_Plain(pb.FetchRequest), FETCH),
    "Connect": (_Plain(pb.ConnectRequest), _Plain(pb.ConnectReply)),
}
"""What the caller says, and what it is told, by method."""


class BatchStub(BrokerStub):
    """The generated stub, but that batches are sent and arrive as BatchMessages."""

    def __init__(self, channel: Any) -> None:
        super().__init__(checksums.CheckedChannel(channel))  # type: ignore[call-arg] # the stub file knows another way to make one
        self.Append = _method(channel.stream_stream, "Append")
        self.Replicate = _method(channel.stream_stream, "Replicate")
        self.CopyLink = _method(channel.unary_stream, "CopyLink")
        self.Fetch = _method(channel.stream_stream, "Fetch")


def _method(kind: Callable[..., Any], name: str) -> Any:
    request, reply = _MESSAGES[name]
    return kind(
        f"/{_SERVICE}/{name}",
        request_serializer=request.serialize,
        response_deserializer=reply.parse,
        _registered_method=True,
    )


async def append(address: str, stub: Callable[[], Any]) -> Any:
    """An Append stream, direct where the master takes them at `address` (empty: it doesn't), else of what `stub` makes."""
    return await _direct(address, "Append") or rpc.opened(lambda: stub().Append())


async def replicate(address: str, stub: Callable[[], Any]) -> Any:
    """A Replicate stream, as `append`."""
    return await _direct(address, "Replicate") or rpc.opened(lambda: stub().Replicate())


async def fetch(address: str, stub: Callable[[], Any]) -> Any:
    """A Fetch stream, as `append`. A member of an earlier version takes none there: the first answer is IncompatibleVersion."""
    return await _direct(address, "Fetch") or rpc.opened(lambda: stub().Fetch())


async def connect(address: str, stub: Callable[[], Any]) -> Any:
    """A Connect stream, as `fetch`: it carries no records, but a group that is idle says nothing else."""
    return await _direct(address, "Connect") or rpc.opened(lambda: stub().Connect())


async def _direct(address: str, method: str) -> direct.DirectStream | None:
    request, reply = _MESSAGES[method]
    return await direct.opened(address, method, request.parts, direct.parsed_by(reply.parse)) if address else None


async def opening(context: Any, stream: str) -> Any:
    """What a stream of a servicer's is opened for: its first message says that. Raises MalformedFrame."""
    message = await read(context)
    if message is None or isinstance(message, BatchMessage) or message.WhichOneof("kind") != "open":
        raise MalformedFrame(f"{stream} stream starts with what it is for")
    return message.open


def direct_server(
    append: direct.Serve, replicate: direct.Serve, fetch: direct.Serve, connect: direct.Serve, calls: direct.Serve
) -> direct.DirectServer:
    """Serves them as a servicer's methods of these names do, but that they are given the stream in the place of the call.

    `calls`: all unary methods (`direct_calls.CallServer.serve`).
    """
    served = {"Append": append, "Replicate": replicate, "Fetch": fetch, "Connect": connect}
    methods = direct_calls.methods(calls)
    for name, serve in served.items():
        request, reply = _MESSAGES[name]
        methods[name] = direct.Method(serve, reply.parts, direct.parsed_by(request.parse))
    return direct.DirectServer(methods)


def add_broker(servicer: BrokerServicer, server: Any) -> None:
    """Register a servicer whose methods are given, and give, BatchMessages for batches."""
    how = {
        name: {"request_deserializer": request.parse, "response_serializer": reply.serialize}
        for name, (request, reply) in _MESSAGES.items()
    }
    to: Any = checksums.CheckedServer(server, how)
    add_BrokerServicer_to_server(servicer, to)
