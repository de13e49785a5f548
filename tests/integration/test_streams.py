"""What a stream of batches promises to both ends, over gRPC and direct alike; and what only direct ones meet."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast
from unittest import mock

import pytest

from seriatim.broker_group.replicate import MasterStream
from seriatim.consumer.core.view import Side
from seriatim.consumer.transport import FetchStream, Members
from seriatim.protocol import batch, batch_streams, descriptors, direct, frames, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import RecordColumns
from seriatim.protocol.batch_streams import BatchMessage, BatchStub, add_broker
from seriatim.protocol.checksums import with_checksum
from seriatim.protocol.direct import DirectStream
from seriatim.protocol.errors import (
    BadChecksum,
    IncompatibleVersion,
    MalformedFrame,
    SeriatimError,
    UnknownLink,
    Unreachable,
    from_wire,
)
from seriatim.protocol.frames import Kind
from seriatim.protocol.names import Incarnation, Index
from seriatim.protocol.rpc import answers_errors
from seriatim.protocol.seriatim_pb2_grpc import BrokerServicer
from seriatim.protocol.streams import each, read, send, send_now, write

Serve = Callable[[Any], Awaitable[None]]
Open = Callable[[], Awaitable[Any]]

WAIT_S = 60.0


@contextlib.asynccontextmanager
async def over_grpc(serve: Serve) -> AsyncIterator[Open]:
    class Servicer(BrokerServicer):
        @answers_errors
        async def Append(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
            await serve(context)

    server = rpc.server(has_batches=True)
    add_broker(Servicer(), server)
    address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1:0')}"
    await server.start()
    try:
        async with rpc.channel(address, has_batches=True) as channel:
            yield lambda: batch_streams.append("", lambda: BatchStub(channel))
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def over_tcp(serve: Serve) -> AsyncIterator[Open]:
    server = batch_streams.direct_server(*[serve] * 5)
    port = await server.listen("127.0.0.1", 0)
    direct._greeted.add(f"127.0.0.1:{port}")  # which would be a stream beside those that are meant
    try:
        yield lambda: opened(port)
    finally:
        await server.stop()


APPENDING = "Append", batch_streams.APPEND.parts, pb.AppendReply.FromString
REPLICATING = "Replicate", batch_streams.REPLICATE.parts, pb.ReplicateReply.FromString


async def opened(port: int, how: Any = APPENDING, host: str = "127.0.0.1") -> Any:
    """A direct stream; a busy machine may need more than one try."""
    for _ in range(50):
        direct._avoided_until_s.clear()
        found = await direct.opened(f"{host}:{port}", *how)
        if found is not None:
            return found
    raise AssertionError("nobody can be reached")


@pytest.fixture(params=[over_grpc, over_tcp], ids=["grpc", "direct"])
def over(request: pytest.FixtureRequest) -> Any:
    return request.param


def run(scenario: Awaitable[None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario
        for _ in range(10):  # what was given up is closed in the loop's next turns
            await asyncio.sleep(0.001)

    asyncio.run(in_time())


def encoded(size: int, first_index: int) -> BatchMessage:
    columns = RecordColumns([bytes((first_index % 256,)) * size], [first_index], "s", [0])
    return BatchMessage.of(batch.encode(columns, Index(first_index)))


def frame(kind: Kind, data: bytes) -> bytes:
    return b"".join(frames.encode(kind, data))


async def answer_each(call: Any) -> None:
    """Check each batch, and say where the next one belongs."""
    while (message := await read(call)) is not None:
        if isinstance(message, BatchMessage):
            found = batch.parse(message.header, message.payload)
            await call.write(pb.AppendReply(next_index=found.header.end_index))


def test_messages_of_all_sizes_arrive_whole_and_in_order_both_ways(over: Any) -> None:
    sizes = [1, 100, 70_000, 10, 65_530, 65_536, 3_000_000, 5, 600_000, 0] * 3

    async def scenario() -> None:
        async with over(answer_each) as open_call:
            call = await open_call()
            sending = asyncio.ensure_future(send_all(call))
            for number, _ in enumerate(sizes):
                reply = await read(call)
                assert reply is not None
                assert reply.next_index == number + 1
            await sending
            await call.done_writing()
            assert await read(call) is None
            call.cancel()

    async def send_all(call: Any) -> None:
        await write(call, pb.AppendRequest(open=pb.AppendOpen(token=3)))
        for number, size in enumerate(sizes):
            await write(call, encoded(size, number))

    run(scenario())


async def read_to_its_end(call: Any) -> None:
    while await read(call) is not None:
        pass


async def write_to_its_end(call: Any) -> None:
    while True:
        await write(call, encoded(1, 1))
        await asyncio.sleep(0.01)


def test_an_error_of_the_server_reaches_who_reads_also_behind_much_that_it_never_read() -> None:
    """Over gRPC it needn't: a write that meets the stream's end hides it (`rpc.translated`)."""

    async def refuse(call: Any) -> None:
        await read(call)
        raise UnknownLink("this member doesn't know it", epoch=7)

    async def scenario() -> None:
        async with over_tcp(refuse) as open_call:
            call = await open_call()
            writing = asyncio.ensure_future(send_many(call))
            with pytest.raises(UnknownLink, match="doesn't know") as told:
                await read_to_its_end(call)
            assert told.value.details == {"epoch": 7}
            call.cancel()
            assert not await writing

    async def send_many(call: Any) -> bool:
        for number in range(400):
            if not await send(call, encoded(50_000, number)):
                return False
        return await send(call, encoded(1, 400))

    run(scenario())


def test_a_defect_of_the_server_is_told_as_one(over: Any) -> None:
    async def fail(call: Any) -> None:
        await read(call)
        raise ZeroDivisionError("oh")

    async def scenario() -> None:
        async with over(fail) as open_call:
            call = await open_call()
            await send(call, encoded(1, 0))
            with pytest.raises(SeriatimError, match="ZeroDivisionError"):
                await read(call)
            call.cancel()

    run(scenario())


def test_a_server_that_is_done_says_so_and_writing_to_it_ends(over: Any) -> None:
    async def one_only(call: Any) -> None:
        await read(call)
        await call.write(pb.AppendReply(next_index=5))

    async def scenario() -> None:
        async with over(one_only) as open_call:
            call = await open_call()
            await write(call, encoded(1, 0))
            reply = await read(call)
            assert reply is not None
            assert reply.next_index == 5
            assert await read(call) is None
            with pytest.raises(SeriatimError, match="ended"):
                await write_to_its_end(call)
            call.cancel()

    run(scenario())


def test_a_caller_that_gives_up_ends_the_server_s_task(over: Any) -> None:
    seen = asyncio.Queue[str]()

    async def wait(call: Any) -> None:
        await read(call)
        seen.put_nowait("begun")
        try:
            await read(call)
        finally:
            seen.put_nowait("over")

    async def scenario() -> None:
        async with over(wait) as open_call:
            call = await open_call()
            await write(call, encoded(1, 0))
            assert await seen.get() == "begun"
            call.cancel()
            assert await seen.get() == "over"

    run(scenario())


def test_a_writer_waits_for_a_reader_that_takes_nothing(over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it is over where a machine stands still with its buffers full.
    options = [option for option in vars(rpc)["_CHANNEL_OPTIONS"] if "keepalive" not in option[0]]
    monkeypatch.setattr(rpc, "_CHANNEL_OPTIONS", options)
    taken = asyncio.Event()

    async def take_late(call: Any) -> None:
        await taken.wait()
        await answer_each(call)

    written = 0

    async def scenario() -> None:
        nonlocal written
        async with over(take_late) as open_call:
            call = await open_call()
            writing = asyncio.ensure_future(write_many(call))
            before = -1
            while written != before:  # until nothing goes any more
                before = written
                await asyncio.sleep(0.5)
            assert before < 100
            taken.set()
            await writing
            for number in range(100):
                reply = await read(call)
                assert reply is not None
                assert reply.next_index == number + 1
            call.cancel()

    async def write_many(call: Any) -> None:
        nonlocal written
        for number in range(100):
            await write(call, encoded(500_000, number))
            written += 1

    run(scenario())


def test_messages_of_no_size_take_no_end_of_room_where_nobody_takes_them() -> None:
    async def scenario() -> None:
        async def take_none(_: Any) -> None:
            await asyncio.Event().wait()

        async with over_tcp(take_none) as open_call:
            call = await open_call()
            await asyncio.sleep(0)
            empty = frame(Kind.MESSAGE, b"") * 200_000
            for _ in range(60):  # 60 MB, twelve million messages
                if not call._is_full:
                    call._transport.write(empty)
                await asyncio.sleep(0.02)
            assert call._is_full
            call.cancel()

    run(scenario())


def test_each_message_is_given_until_no_more_is_wanted_and_the_rest_is_kept(over: Any) -> None:
    async def answer_many(call: Any) -> None:
        await read(call)
        for number in range(60):
            await call.write(pb.AppendReply(next_index=number))

    async def scenario() -> None:
        found: list[int] = []

        def ten(reply: Any) -> bool:
            found.append(reply.next_index)
            return len(found) % 10 != 0

        def refused(reply: Any) -> bool:
            found.append(reply.next_index)
            raise UnknownLink("not this one")

        async with over(answer_many) as open_call:
            call = await open_call()
            await write(call, encoded(1, 0))
            for _ in range(3):
                assert await each(call, ten)
            assert found == list(range(30))
            with pytest.raises(UnknownLink):
                await each(call, refused)
            assert (await read(call)).next_index == 31
            assert not await each(call, lambda reply: bool(found.append(reply.next_index) or True))
            assert found == [*range(31), *range(32, 60)]
            call.cancel()

    run(scenario())


# ---- direct ones only ----------------------------------------------------------------------------------------------


async def until_closed(data: bytes, port: int) -> bytes:
    """What a server answers to these bytes, to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


def test_what_comes_when_nobody_waits_any_more_is_kept() -> None:
    async def scenario() -> None:
        async with over_tcp(answer_each) as open_call:
            call = await open_call()
            waiting = asyncio.ensure_future(each(call, lambda _: pytest.fail("given up")))
            await write(call, encoded(1, 0))
            waiting.cancel()
            await asyncio.sleep(0.05)  # the answer arrives meanwhile
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await read(call)).next_index == 1
            given_up = asyncio.ensure_future(each(call, lambda _: not given_up.cancel()))
            await write(call, encoded(1, 1))
            with pytest.raises(asyncio.CancelledError):
                await given_up
            await write(call, encoded(1, 2))
            assert (await read(call)).next_index == 3
            call.cancel()

    run(scenario())


def test_a_server_that_goes_away_breaks_its_streams() -> None:
    async def scenario() -> None:
        async with over_tcp(answer_each) as open_call:
            call = await open_call()
            await write(call, encoded(1, 0))
            assert await read(call) is not None
        with pytest.raises(Unreachable):
            await read(call)
        with pytest.raises(Unreachable):
            await write(call, encoded(1, 1))
        call.cancel()

    run(scenario())


def test_who_writes_without_waiting_is_told_at_once_that_the_caller_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    caller = socket.socket()
    ended = asyncio.Queue[SeriatimError | None]()

    async def write_all(call: Any) -> None:
        caller.close()  # the loop hears of it when it turns, which it doesn't until all is written
        error: SeriatimError | None = None
        try:
            for number in range(1000):
                await write(call, pb.AppendReply(next_index=number))
        except SeriatimError as failure:
            error = failure
        ended.put_nowait(error)

    async def scenario() -> None:
        server = batch_streams.direct_server(*[write_all] * 5)
        port = await server.listen("127.0.0.1", 0)
        caller.connect(("127.0.0.1", port))
        caller.sendall(frame(Kind.OPEN, direct._FORMAT + b"Append"))
        assert isinstance(await ended.get(), Unreachable)
        await server.stop()

    run(scenario())
    assert not [one for one in caplog.records if one.name == "asyncio"]


def test_what_is_sent_at_once_and_what_waits_keep_their_order() -> None:
    taken = asyncio.Event()
    found: list[int] = []

    async def take_late(call: Any) -> None:
        await read(call)
        await taken.wait()
        while (message := await read(call)) is not None:
            found.append(batch.parse(message.header, message.payload).header.first_index)

    async def scenario() -> None:
        at_once = 0
        async with over_tcp(take_late) as open_call:
            call = await open_call()
            assert await send(call, pb.AppendRequest(open=pb.AppendOpen()))
            for number in range(200):
                if send_now(call, encoded(100_000, number)):
                    at_once += 1
                else:
                    taken.set()
                    await write(call, encoded(100_000, number))
            await call.done_writing()
            assert await read(call) is None
            call.cancel()
            assert not send_now(call, encoded(1, 200))
        assert found == list(range(200))
        assert 0 < at_once < 200

    run(scenario())


def test_a_slave_s_first_word_is_what_it_has_also_where_more_becomes_durable_just_then() -> None:
    async def confirm(call: Any) -> None:
        stream = MasterStream(cast("Any", None), call)
        stream.confirm(Index(7), b"later")
        await asyncio.sleep(0.05)
        await call.write(pb.ReplicateReply(next_index=5, hash=b"first"))
        writing = asyncio.ensure_future(stream.write_confirmations())
        await asyncio.sleep(0.05)
        stream.confirm(Index(9), b"at once")
        await asyncio.sleep(0.05)
        writing.cancel()

    async def scenario() -> None:
        server = batch_streams.direct_server(*[confirm] * 5)
        call = await opened(await server.listen("127.0.0.1", 0), REPLICATING)
        assert [(await call.read()).next_index for _ in range(3)] == [5, 7, 9]
        assert await call.read() is None
        call.cancel()
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", MalformedFrame),
        (frame(Kind.MESSAGE, b"before it is opened"), MalformedFrame),
        (frame(Kind.OPEN, b"x" * 2000), MalformedFrame),
        (frame(Kind.OPEN, b"SRS"), MalformedFrame),
        (frame(Kind.ERROR, b"\xff"), MalformedFrame),
        (frame(Kind.OPEN, b"SRS\x02Append"), IncompatibleVersion),
        (frame(Kind.OPEN, b"SRS\x01Subtract"), IncompatibleVersion),
        # Of who has opened it right: then they were damaged on their way, and are to be sent again.
        (frame(Kind.OPEN, b"SRS\x01Append") * 2, BadChecksum),
        (frame(Kind.OPEN, b"SRS\x01Append") + frame(Kind.MESSAGE, b"\xff"), BadChecksum),
        (frame(Kind.OPEN, b"SRS\x01Append") + frame(Kind.ERROR, b"[]"), BadChecksum),
        (frame(Kind.OPEN, b"SRS\x01Append") + frame(Kind.ERROR, b"[" * 100_000), BadChecksum),
    ],
)
def test_bytes_that_make_no_sense_are_answered_with_an_error(data: bytes, expected: type[SeriatimError]) -> None:
    async def scenario() -> None:
        server = batch_streams.direct_server(*[answer_each] * 5)
        port = await server.listen("127.0.0.1", 0)
        try:
            answer = await until_closed(data, port)
        finally:
            await server.stop()
        reader = frames.FrameReader()
        reader.room()[: len(answer)] = answer
        [(kind, told)] = reader.filled(len(answer))
        assert kind is Kind.ERROR
        assert type(from_wire(bytes(told).decode())) is expected

    run(scenario())


class Damaged:
    """What was a message when it was sent."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's
        return b"\xff"


def test_a_message_that_was_damaged_on_its_way_is_nobody_s_defect(over: Any) -> None:
    """By gRPC a sender was told of a defect, and gave the link up; what is damaged is sent again."""

    async def scenario() -> None:
        async with over(answer_each) as open_stream:
            call = await open_stream()
            await call.write(Damaged())
            with pytest.raises(BadChecksum):
                await read(call)
            call.cancel()

    run(scenario())


def test_an_answer_that_was_damaged_on_its_way_is_not_the_end_of_the_stream() -> None:
    """By gRPC it was taken for one: a sender gave the link up, and a slave that was copied from had sent all it had."""

    async def scenario() -> None:
        async with over_grpc(answer_each) as open_stream:
            call = await open_stream()
            call._response_deserializer = lambda data: pb.AppendReply.FromString(data + b"\xff")
            await call.write(encoded(1, 0))
            with pytest.raises(BadChecksum):
                await read(call)
            call.cancel()

    run(scenario())


def test_a_connection_that_never_says_what_it_is_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "OPENING_S", 0.05)

    async def scenario() -> None:
        server = batch_streams.direct_server(*[answer_each] * 5)
        port = await server.listen("127.0.0.1", 0)
        try:
            with contextlib.suppress(ConnectionError):
                assert await until_closed(b"", port) == b""
        finally:
            await server.stop()

    run(scenario())


STRANGERS = [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(Kind.OPEN, b"SRS\x01Append"), frame(Kind.ERROR, b"no JSON")]


@contextlib.asynccontextmanager
async def stranger(answer: bytes) -> AsyncIterator[tuple[int, list[None]]]:
    """A port at which another program answers, and one for each that came; who is answered nothing is left."""
    came: list[None] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(None)
        await reader.read(1)
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await (reader.read() if answer else asyncio.sleep(0))
        writer.close()

    other = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield other.sockets[0].getsockname()[1], came
    finally:
        other.close()


@pytest.mark.parametrize("answer", STRANGERS)
def test_somebody_else_s_answer_is_no_fault_of_the_caller_s(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a broker was once: another program has its port."""
    monkeypatch.setattr(direct, "CONNECT_S", WAIT_S)  # on a busy machine, too, it is asked who it is

    async def scenario() -> None:
        async with stranger(answer) as (port, _):
            direct._greeted.add(f"127.0.0.1:{port}")
            call = await opened(port)
            with pytest.raises(Unreachable, match="makes no sense"):
                await read(call)
            call.cancel()

    run(scenario())


@pytest.mark.parametrize("answer", [*STRANGERS, b""])
def test_where_somebody_else_answers_it_goes_through_grpc(
    answer: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy or firewall takes every connection, or the number is another program's where a broker is advertised: no link fails by it."""
    caplog.set_level("INFO", "seriatim")
    monkeypatch.setattr(direct, "CONNECT_S", WAIT_S)  # on a busy machine, too, it is asked who it is
    monkeypatch.setattr(direct, "GREETING_S", WAIT_S)

    async def scenario() -> None:
        async with stranger(answer) as (port, came), over_grpc(answer_each) as open_call:
            for _ in range(3):
                by_grpc = await open_call()
                assert (
                    await batch_streams.append(f"127.0.0.1:{port}", lambda by_grpc=by_grpc: _Only(by_grpc)) is by_grpc
                )
                by_grpc.cancel()
            assert len(came) == 1
            assert caplog.text.count("no direct stream") == 1

    run(scenario())


def test_who_takes_a_connection_and_says_nothing_isnt_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "GREETING_S", 0.1)

    async def scenario() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            assert await direct.opened(address, *APPENDING) is None
            now_s = asyncio.get_running_loop().time()
            assert direct._avoided_until_s[address] <= now_s + direct.AVOIDED_S  # it may be one that stands still

    run(scenario())


async def listening(way: str) -> tuple[int, Callable[[], Awaitable[None]]]:
    """Where a broker, or a coordinator, takes connections, and how to end that."""
    if way == "direct":
        server = batch_streams.direct_server(*[answer_each] * 5)
        return await server.listen("127.0.0.1", 0), server.stop
    by_grpc = rpc.server(has_batches=way == "grpc")
    port = rpc.listen(by_grpc, "127.0.0.1:0")
    await by_grpc.start()
    return port, lambda: by_grpc.stop(0)


@pytest.mark.parametrize("way", ["direct", "grpc", "coordinator"])
def test_who_connects_leaves_files_to_the_disk_and_to_zookeeper(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred strangers, where a process may have a thousand files open, and both members' disks counted as failed.

    A coordinator's clients had all its files; when ZooKeeper was back from a restart, it wasn't, as long as they stayed.
    """
    monkeypatch.setattr(descriptors, "share", lambda _: 3)
    monkeypatch.setattr(direct, "OPENING_S", 10 * WAIT_S)
    monkeypatch.setattr(direct, "STRANGER_LINGER_S", 0.01)

    async def scenario() -> None:
        port, stop = await listening(way)
        there = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        one_more, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await one_more.read() == b""
        assert not any(reader.at_eof() for reader, _ in there)
        for one in (writer, *(other for _, other in there)):
            one.close()
        await stop()

    run(scenario())


def test_who_finds_no_room_is_told_so_unless_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of a member with some hundred streams saw their connections reset, and nobody told them, or their people, why."""
    monkeypatch.setattr(descriptors, "share", lambda _: 1)
    monkeypatch.setattr(direct, "REFUSED_AT_ONCE", 1)
    monkeypatch.setattr(direct, "STRANGER_LINGER_S", 10 * WAIT_S)

    async def scenario() -> None:
        async with over_tcp(answer_each) as open_one:
            first = await open_one()
            await write(first, encoded(10, 0))
            assert (await read(first)).next_index == 1
            refused = await open_one()
            with pytest.raises(Unreachable, match="no room for another stream, 1 are open"):
                await read(refused)
            cut_off = await open_one()
            with pytest.raises(Unreachable, match="the connection broke"):
                await read(cut_off)
            await write(first, encoded(10, 1))
            assert (await read(first)).next_index == 2
            for one in (first, refused, cut_off):
                one.cancel()

    run(scenario())


def test_what_was_said_before_the_end_arrives_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "SILENCE_S", 60)  # else it is over where a machine stands still
    said = pb.AppendReply(refusal="x" * 3_000_000)

    async def say_much(call: Any) -> None:
        await call.write(said)

    async def scenario() -> None:
        server = batch_streams.direct_server(*[say_much] * 5)
        port = await server.listen("127.0.0.1", 0)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(reader, ("127.0.0.1", port))
            await loop.sock_sendall(reader, frame(Kind.OPEN, b"SRS\x01Append"))
            await asyncio.sleep(2)  # a batch's on a slow path
            found = bytearray()
            while data := await loop.sock_recv(reader, 1 << 20):
                found += data
        assert bytes(found) == frame(Kind.MESSAGE, with_checksum(said.SerializeToString())) + frame(Kind.END, b"")
        await server.stop()

    run(scenario())


class Pipe:
    """What a stream writes to, and what asyncio's transport does with an end that comes while something is unsent."""

    def __init__(self) -> None:
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, _: str) -> Any:
        return mock.Mock(spec=socket.socket)

    def write(self, _: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def test_a_stream_that_is_over_can_be_cancelled_and_one_that_is_not_yet() -> None:
    pipes = [Pipe(), Pipe(), Pipe()]
    cancelled, over, early = DirectStream(), DirectStream(), DirectStream()
    for stream, pipe in ((cancelled, pipes[0]), (over, pipes[1])):
        stream.connection_made(cast("Any", pipe))
    over.connection_lost(None)
    for stream in (cancelled, over, early):
        stream.cancel()
    early.connection_made(cast("Any", pipes[2]))
    assert [pipe.is_aborted for pipe in pipes] == [True, False, True]


def test_all_who_wait_for_the_network_go_on() -> None:
    async def scenario() -> None:
        stream = DirectStream()
        stream.connection_made(cast("Any", Pipe()))
        stream.pause_writing()
        writing = [asyncio.create_task(stream.write(b"answer")) for _ in range(3)]
        await asyncio.sleep(0)
        writing[1].cancel()
        stream.resume_writing()
        ended = await asyncio.gather(*writing, return_exceptions=True)
        assert [type(one) for one in ended] == [type(None), asyncio.CancelledError, type(None)]

    run(scenario())


def test_a_connection_to_itself_is_none() -> None:
    """The system may give a connection the very port that it is made to, where that is free."""

    async def scenario() -> None:
        connection = socket.socket()
        connection.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{connection.getsockname()[1]}"
        direct._greeted.add(address)  # a broker was there once
        connect = connected_to_itself(direct.DirectStream(), connection)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(asyncio.get_running_loop()), "create_connection", connect)
            assert await direct.opened(address, *APPENDING) is None

    def connected_to_itself(stream: direct.DirectStream, connection: socket.socket) -> Any:
        async def create_connection(loop: Any, *_: Any) -> tuple[Any, Any]:
            connection.connect(connection.getsockname())  # both ends are this one
            connection.setblocking(False)
            return await loop._create_connection_transport(connection, lambda: stream, None, "")

        return create_connection

    run(scenario())


@pytest.mark.parametrize(
    ("listened", "host"),
    [("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]")]
    + [(every, host) for every in ("0.0.0.0", "[::]") for host in ("127.0.0.1", "[::1]")],
)
def test_either_kind_of_address_is_listened_on_and_reached(listened: str, host: str) -> None:
    """Who listens on every address is reached by both kinds, whichever he wrote, as at gRPC's port."""

    async def scenario() -> None:
        server = batch_streams.direct_server(*[answer_each] * 5)
        port = await server.listen(listened, 0)
        call = await opened(port, host=host)
        await write(call, encoded(1, 0))
        assert (await read(call)).next_index == 1
        call.cancel()
        await server.stop()

    run(scenario())


@pytest.mark.parametrize("host", ["g1-a..svc", "x" * 64, "nowhere.invalid"])
def test_a_name_that_leads_nowhere_is_as_nobody_there(host: str) -> None:
    async def scenario() -> None:
        assert await direct.opened(f"{host}:7101", *APPENDING) is None

    run(scenario())


def test_a_member_that_takes_no_fetch_there_is_read_from_by_grpc() -> None:
    """One of an earlier version has a port for what it takes without gRPC."""

    class Servicer(BrokerServicer):
        @answers_errors
        async def Fetch(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
            opened = await read(context)
            await context.write(pb.FetchReply(end=opened.open.from_index))

    async def scenario() -> None:
        earlier = direct.DirectServer({})
        port = await earlier.listen("127.0.0.1", 0)
        server = rpc.server(has_batches=True)
        add_broker(Servicer(), server)
        address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1:0')}"
        await server.start()
        members = Members()
        side = Side("g1", "a", address, Incarnation("disk", 1), f"127.0.0.1:{port}")
        found: list[int] = []
        await FetchStream(members, side, pb.FetchOpen(from_index=7)).run(lambda reply: not found.append(reply.end))
        assert found == [7]
        await members.close()
        await server.stop(0)
        await earlier.stop()

    run(scenario())


def test_where_nobody_listens_and_where_packets_are_swallowed_grpc_is_used_instead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "seriatim")
    monkeypatch.setattr(direct, "CONNECT_S", 1.0)  # on a busy machine, too, who refuses isn't taken for silent

    async def scenario() -> None:
        loop, tried_ports = asyncio.get_running_loop(), []
        connect = loop.create_connection

        async def counting(made: Any, host: str, port: int) -> Any:
            tried_ports.append(port)
            return await connect(made, host, port)

        loop.create_connection = counting  # type: ignore[method-assign, assignment]
        with socket.socket() as free, socket.socket() as full:
            free.bind(("127.0.0.1", 0))
            full.bind(("127.0.0.1", 0))
            full.listen(0)  # nobody accepts: what comes beyond the backlog is dropped
            waiting = [socket.create_connection(full.getsockname()) for _ in range(1)]
            extra = [socket.socket() for _ in range(4)]
            for one in extra:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            async with over_grpc(answer_each) as open_call:
                for port, tried in [(free.getsockname()[1], 2), (full.getsockname()[1], 1)] * 2:
                    by_grpc = await open_call()
                    call = await batch_streams.append(f"127.0.0.1:{port}", lambda by_grpc=by_grpc: _Only(by_grpc))
                    assert call is by_grpc
                    call.cancel()
                    assert tried_ports.count(port) <= tried, "who waited in vain doesn't wait again at once"
            assert len(tried_ports) == 3
            assert caplog.text.count("no direct stream") == 2, "each is told of once"
            for one in (*waiting, *extra):
                one.close()

    run(scenario())


class _Only:
    """A stub with one call in it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def Append(self) -> Any:  # noqa: N802 - the stub's
        return self._call
