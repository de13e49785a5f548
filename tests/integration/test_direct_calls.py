"""What a unary call promises, over gRPC and direct alike; and what only direct ones meet."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from seriatim.protocol import direct, direct_calls, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.checksums import without_checksum
from seriatim.protocol.direct import DirectServer, DirectStream
from seriatim.protocol.direct_calls import CallServer, DirectCalls
from seriatim.protocol.errors import (
    BugError,
    DeadlineOver,
    IncompatibleVersion,
    MalformedFrame,
    PeerLost,
    SeriatimError,
    UnknownLink,
    Unreachable,
)
from seriatim.protocol.rpc import answers_errors
from seriatim.protocol.seriatim_pb2_grpc import BrokerServicer, BrokerStub, add_BrokerServicer_to_server
from tests.ways import as_it_is, way_to

WAIT_S = 60.0
LONG_S = 10.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, a server that is there is reached, and nothing goes through gRPC instead."""
    monkeypatch.setattr(direct, "CONNECT_S", LONG_S)
    monkeypatch.setattr(direct, "GREETING_S", LONG_S)


class Servicer(BrokerServicer):
    """Answers DescribeLink as its epoch says: 1 at once, 2 to 9 the later the smaller, from 10 on otherwise."""

    def __init__(self) -> None:
        self.asked = 0
        self.cancelled = asyncio.Event()
        self.begun = asyncio.Event()

    @answers_errors
    async def DescribeLink(self, request: pb.DescribeLinkRequest, context: Any) -> pb.DescribeLinkReply:  # noqa: N802
        self.asked += 1
        self.begun.set()
        epoch = request.link.epoch
        if epoch == 10:
            raise UnknownLink("not here", epoch=10)
        if epoch == 11:
            raise ValueError("a defect")
        try:
            await asyncio.sleep(LONG_S if epoch == 12 else 0.02 * (9 - epoch))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return pb.DescribeLinkReply(is_known=True, next_index=epoch, hash=bytes(request.link.queue_id))


class Served:
    """A servicer by gRPC, and direct as `takes` says: direct (what gRPC would take is refused), grpc, earlier, nobody there."""

    def __init__(self, servicer: Servicer, stub: Any, address: str, streams: DirectServer) -> None:
        self.servicer = servicer
        self.calls = DirectCalls()
        self.streams = streams
        self.address = address
        self._stub = stub

    async def describe(self, epoch: int, timeout_s: float = LONG_S, size: int = 1) -> Any:
        request = pb.DescribeLinkRequest(link=pb.LinkName(epoch=epoch, queue_id=size))
        return await self.calls.call(self.address, lambda: self._stub.DescribeLink, request, timeout_s, "g1-a")


@contextlib.asynccontextmanager
async def serving(takes: str) -> AsyncIterator[Served]:
    servicer = Servicer()
    server = rpc.server()
    add_BrokerServicer_to_server(servicer, server)
    port = rpc.listen(server, "127.0.0.1:0")
    if takes != "direct":
        await server.start()
    streams = DirectServer(direct_calls.methods(CallServer(servicer).serve) if takes == "direct" else {})
    direct_port = await streams.listen("127.0.0.1", 0)
    address = "" if takes == "grpc" else "127.0.0.1:1" if takes == "nobody" else f"127.0.0.1:{direct_port}"
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        served = Served(servicer, BrokerStub(channel), address, streams)
        try:
            yield served
        finally:
            await served.calls.close()
            await streams.stop()
            await server.stop(0)


@pytest.fixture(params=["grpc", "direct", "earlier", "nobody"])
def takes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(scenario: Awaitable[None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario

    asyncio.run(in_time())


def test_many_calls_at_a_time_each_get_their_own_answer(takes: str) -> None:
    async def scenario() -> None:
        async with serving(takes) as served:
            first = [await served.describe(9, size=size) for size in (0, 1, 100_000, 3_000_000)]
            assert [len(one.hash) for one in first] == [0, 1, 100_000, 3_000_000]
            found = await asyncio.gather(*[served.describe(epoch) for epoch in (2, 5, 9, 3, 2)])
            assert [one.next_index for one in found] == [2, 5, 9, 3, 2]

    run(scenario())


def test_an_error_comes_as_it_was_raised(takes: str) -> None:
    async def scenario() -> None:
        async with serving(takes) as served:
            with pytest.raises(UnknownLink, match="not here") as raised:
                await served.describe(10)
            assert raised.value.details["epoch"] == 10
            with pytest.raises(BugError, match="DescribeLink"):
                await served.describe(11)
            assert (await served.describe(9)).next_index == 9

    run(scenario())


def test_a_call_that_is_too_late_is_ended_at_both_ends(takes: str) -> None:
    async def scenario() -> None:
        async with serving(takes) as served:
            assert (await served.describe(9)).next_index == 9
            while served.servicer.asked == 1:  # one may be over before it came there
                with pytest.raises(DeadlineOver, match="g1-a"):
                    await served.describe(12, timeout_s=0.2)
            await served.servicer.cancelled.wait()
            assert (await served.describe(9)).next_index == 9

    run(scenario())


def test_a_call_that_is_given_up_is_cancelled_where_it_runs(takes: str) -> None:
    async def scenario() -> None:
        async with serving(takes) as served:
            call = asyncio.create_task(served.describe(12))
            await served.servicer.begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await served.servicer.cancelled.wait()
            assert (await served.describe(9)).next_index == 9

    run(scenario())


def test_what_no_direct_stream_takes_is_asked_by_grpc_once(takes: str) -> None:
    async def scenario() -> None:
        async with serving(takes) as served:
            for _ in range(3):
                await served.describe(9)
            assert served.servicer.asked == 3

    run(scenario())


def test_who_has_called_and_is_gone_has_its_calls_cancelled() -> None:
    async def scenario() -> None:
        async with serving("direct") as served:
            call = asyncio.create_task(served.describe(12))
            await served.servicer.begun.wait()
            served.calls.keep_only(())
            with pytest.raises(Unreachable, match="g1-a"):
                await call
            await served.servicer.cancelled.wait()
            assert (await served.describe(9)).next_index == 9  # by another one

    run(scenario())


def test_a_member_that_is_gone_ends_all_calls_at_once() -> None:
    async def scenario() -> None:
        async with serving("direct") as served:
            calls = [asyncio.create_task(served.describe(12)) for _ in range(3)]
            await served.servicer.begun.wait()
            await served.streams.stop()
            for call in calls:
                with pytest.raises(Unreachable, match="nobody answers at g1-a"):
                    await call
            with pytest.raises((DeadlineOver, Unreachable)):  # nor by gRPC
                await served.describe(9, timeout_s=0.3)

    run(scenario())


def test_the_next_call_after_a_broken_stream_has_another_one() -> None:
    async def scenario() -> None:
        async with serving("direct") as served:
            await served.describe(9)
            for stream in list(served.streams._streams):
                stream.cancel()
            found = None
            while found is None:
                with contextlib.suppress(Unreachable):  # one that was made before it is known
                    found = await served.describe(9)
            assert found.next_index == 9

    run(scenario())


def test_a_line_that_is_closed_as_soon_as_it_is_made_leaves_nothing_open() -> None:
    async def scenario() -> None:
        async with serving("direct") as served:
            line = served.calls._line(served.address)
            stream = await line.stream()
            assert stream is not None
            await served.calls.close()
            while served.streams._streams:  # noqa: ASYNC110 - until the other end has heard of it
                await asyncio.sleep(0.01)

    run(scenario())


@pytest.mark.parametrize(("error", "goes_on"), [(IncompatibleVersion("too new"), True), (PeerLost("it ended"), False)])
def test_a_stream_that_ends_just_before_it_is_used_ends_the_call_as_it_would_have(
    error: SeriatimError, goes_on: bool
) -> None:
    async def scenario() -> None:
        async with serving("earlier") as served:
            stream = DirectStream()
            stream._over(error)
            served.calls._line(served.address)._stream = stream
            stream.cancel = stream.write_now = lambda *_: False  # type: ignore[assignment] # it has no connection
            if goes_on:
                assert (await served.describe(9)).next_index == 9
            else:
                with pytest.raises(Unreachable, match="g1-a"):
                    await served.describe(9)

    run(scenario())


def test_a_member_of_an_earlier_version_is_tried_again_after_a_while() -> None:
    async def scenario() -> None:
        async with serving("earlier") as served:
            assert (await served.describe(9)).next_index == 9
            host, port = served.address.split(":")
            await served.streams.stop()
            served.streams = DirectServer(direct_calls.methods(CallServer(served.servicer).serve))
            await served.streams.listen(host, int(port))
            await served.describe(9)
            assert not served.streams._streams
            line = served.calls._lines[served.address]
            assert 0 < line._earlier_until_s - asyncio.get_running_loop().time() < direct_calls.EARLIER_S
            line._earlier_until_s = 0.0
            await served.describe(9)
            assert served.streams._streams
            await served.streams.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (struct.pack("<IIB", 7, 1000, 12) + b"DescribeLink" + b"\xff", Unreachable),
        (struct.pack("<IIB", 7, 1000, 5) + b"Guess", Unreachable),
    ],
    ids=["no message", "no method"],
)
def test_a_call_that_makes_no_sense_is_answered_with_an_error(
    request_bytes: bytes, expected: type[SeriatimError]
) -> None:
    async def scenario() -> None:
        async with serving("direct") as served:
            stream = await direct_calls.opened(served.address)
            assert stream is not None
            await stream.write((request_bytes,))
            answer = await stream.read()
            assert struct.unpack_from("<I?", answer) == (7, True)
            assert expected.code.encode() in answer
            stream.cancel()

    run(scenario())


def test_bytes_that_are_no_call_end_the_stream() -> None:
    async def scenario() -> None:
        async with serving("direct") as served:
            stream = await direct_calls.opened(served.address)
            assert stream is not None
            await stream.write((b"abc",))
            with pytest.raises(MalformedFrame):
                await stream.read()
            stream.cancel()

    run(scenario())


def test_two_calls_of_one_number_end_the_stream() -> None:
    async def scenario() -> None:
        async with serving("direct") as served:
            stream = await direct_calls.opened(served.address)
            assert stream is not None
            for _ in range(2):
                request = pb.DescribeLinkRequest(link=pb.LinkName(epoch=2)).SerializeToString()
                await stream.write((struct.pack("<IIB", 7, 1000, 12), b"DescribeLink", request))
            with pytest.raises(MalformedFrame, match="of one number"):
                await stream.read()
            stream.cancel()

    run(scenario())


def test_who_takes_no_answers_is_given_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "SILENCE_S", int(WAIT_S))  # else it is over where a machine stands still

    async def scenario() -> None:
        async with serving("direct") as served:
            stream = await direct_calls.opened(served.address)
            assert stream is not None
            stream._transport.pause_reading()
            request = pb.DescribeLinkRequest(link=pb.LinkName(epoch=9, queue_id=1_000_000)).SerializeToString()
            for number in range(100):
                await stream.write((struct.pack("<IIB", number, 60_000, 12), b"DescribeLink", request))
                await asyncio.sleep(0.001)
            before = 0
            while served.servicer.asked != before or not before:  # until nothing goes any more
                before = served.servicer.asked
                await asyncio.sleep(0.2)
            assert before < 50
            stream._transport.resume_reading()
            answered = {struct.unpack_from("<I", await stream.read())[0] for _ in range(100)}
            assert answered == set(range(100))
            stream.cancel()

    run(scenario())


def reply(request: bytes, index: int) -> tuple[bytes, ...]:
    return request[:4] + b"\0", pb.DescribeLinkReply(next_index=index).SerializeToString()


@contextlib.asynccontextmanager
async def answering(answer: Callable[[DirectStream], Awaitable[None]]) -> AsyncIterator[Served]:
    server = DirectServer(direct_calls.methods(answer))
    served = Served(Servicer(), None, f"127.0.0.1:{await server.listen('127.0.0.1', 0)}", server)
    try:
        yield served
    finally:
        await served.calls.close()
        await server.stop()


def test_an_answer_that_comes_too_late_is_given_to_nobody() -> None:
    async def answer(stream: DirectStream) -> None:
        first = await stream.read()
        given_up = await stream.read()
        assert without_checksum(given_up) == first[:4] + bytes(5)
        second = await stream.read()
        for request, index in ((first, 1), (second, 2), (second, 3), (first, 4)):
            await stream.write(reply(request, index))
        await stream.write(reply(await stream.read(), 5))
        await stream.read()

    async def scenario() -> None:
        async with answering(answer) as served:
            with pytest.raises(DeadlineOver):
                await served.describe(9, timeout_s=0.5)
            assert (await served.describe(9)).next_index == 2
            assert (await served.describe(9)).next_index == 5

    run(scenario())


def test_an_answer_that_makes_no_sense_ends_the_calls_with_an_error() -> None:
    """The member may have done what the first was for."""

    async def answer(stream: DirectStream) -> None:
        number = struct.unpack_from("<I", await stream.read())[0]
        await stream.write((struct.pack("<I?", number, False) + b"\xff",))
        await stream.read()
        await stream.write((b"abc",))
        await stream.read()

    async def scenario() -> None:
        async with answering(answer) as served:
            for expected in (DeadlineOver, MalformedFrame):
                with pytest.raises(expected):
                    await served.describe(9)

    run(scenario())


async def runs_out(served: Served) -> None:
    with pytest.raises(DeadlineOver):
        await served.describe(9, timeout_s=0.3)


@pytest.mark.parametrize("whose", ["request", "answer"])
def test_a_size_that_was_damaged_on_its_way_costs_two_calls_and_not_all_that_follow(whose: str) -> None:
    """All that came was taken for the rest of that frame: the member was there, and out of reach, until one of the two was started again."""

    is_due = False

    async def damage(data: bytes) -> bytes:
        nonlocal is_due
        if not is_due:
            return data
        is_due = False
        return bytes((*data[:2], data[2] ^ 0x10, *data[3:]))  # a MiB more

    async def scenario() -> None:
        nonlocal is_due
        passes = (damage, as_it_is) if whose == "request" else (as_it_is, damage)
        async with serving("direct") as served, way_to(served.address, *passes) as served.address:
            assert (await served.describe(9)).next_index == 9
            is_due = True
            await runs_out(served)
            assert not is_due
            await runs_out(served)
            assert (await served.describe(9)).next_index == 9
            await served.calls.close()

    run(scenario())


def test_who_waits_on_a_line_that_fell_silent_may_still_be_answered_and_it_ends_behind_him() -> None:
    streams, long_asked, is_over = list[DirectStream](), asyncio.Event(), asyncio.Event()
    first = b""

    async def answer(stream: DirectStream) -> None:
        nonlocal first
        streams.append(stream)
        if len(streams) == 1:
            first = await stream.read()
            long_asked.set()
            try:
                while await stream.read() is not None:
                    pass
            finally:
                is_over.set()
        await stream.write(reply(await stream.read(), 2))
        await streams[0].write(reply(first, 1))
        await stream.write(reply(await stream.read(), 3))
        await stream.read()

    async def scenario() -> None:
        async with answering(answer) as served:
            long = asyncio.create_task(served.describe(9))
            await long_asked.wait()
            await runs_out(served)
            await runs_out(served)
            assert (await served.describe(9)).next_index == 2
            assert (await long).next_index == 1
            await is_over.wait()
            assert (await served.describe(9)).next_index == 3
            assert len(streams) == 2

    run(scenario())


def test_calls_that_run_out_together_or_with_an_answer_between_them_keep_their_line() -> None:
    """It is the member that was slow, for a moment: another connection would help nobody."""
    opened = 0

    async def answer(stream: DirectStream) -> None:
        nonlocal opened
        opened += 1
        for is_answered in (True, False, False, True, False, True):
            while without_checksum(request := await stream.read())[4:] == bytes(5):  # given up
                pass
            if is_answered:
                await stream.write(reply(request, opened))
        await stream.read()

    async def scenario() -> None:
        async with answering(answer) as served:
            await served.describe(9)
            await asyncio.gather(runs_out(served), runs_out(served))
            assert (await served.describe(9)).next_index == 1
            await runs_out(served)
            assert (await served.describe(9)).next_index == 1

    run(scenario())


@pytest.mark.parametrize("whose", ["request", "answer"])
def test_whatever_bit_was_flipped_on_its_way_a_call_is_answered_right_or_told_that_it_may_be_made_again(
    whose: str,
) -> None:
    """A token, an index or an epoch that is another one was taken as it came; an answer, by whoever's number it had."""
    head_bytes = 5  # of the frame: see above
    at: int | None = None
    size = 0

    async def damage(data: bytes) -> bytes:
        nonlocal at, size
        size = len(data)
        if at is None:
            return data
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        at = None
        return bytes(changed)

    async def scenario() -> None:
        nonlocal at
        passes = (damage, as_it_is) if whose == "request" else (as_it_is, damage)
        told = list[type[SeriatimError]]()
        async with serving("direct") as served, way_to(served.address, *passes) as served.address:
            for _ in range(2):  # on the first it is said what the stream is for
                assert (await served.describe(9)).next_index == 9
            for place in range(head_bytes, size):
                at = place
                try:
                    assert (await served.describe(9, timeout_s=0.3)).next_index == 9
                except (Unreachable, DeadlineOver) as error:
                    told.append(type(error))
                    at = None
                    await served.describe(9)
            await served.calls.close()
        assert len(told) > size - 2 * head_bytes  # of a key that marks the checksum some bits tell nothing
        assert {*told} == ({Unreachable, DeadlineOver} if whose == "request" else {DeadlineOver})

    run(scenario())
