"""The stream by which the members of a group know that they reach each other, over real gRPC and direct."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from seriatim.broker_group.peer import Peer, Registered
from seriatim.cli.embedded.ports import free_port
from seriatim.protocol import direct_calls, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.batch_streams import BatchMessage, BatchStub, add_broker, direct_server
from seriatim.protocol.direct import DirectServer
from seriatim.protocol.errors import PeerLost, Unreachable
from seriatim.protocol.names import Incarnation, Index
from seriatim.protocol.rpc import answers_errors
from seriatim.protocol.seriatim_pb2_grpc import BrokerServicer
from seriatim.protocol.streams import read, write
from tests.ways import as_it_is, way_to

ME, OTHER = Incarnation("a" * 32, 1), Incarnation("b" * 32, 1)
WAIT_S = 60.0
PING_S = dict(rpc._SMALL)["grpc.http2.ping_timeout_ms"] / 1000
BATCH = encode(RecordColumns([os.urandom(1_000_000)], [1], "s", [0]), Index(0))


class Ending(BrokerServicer):
    """Answers once on each stream, and ends it a little later: with an error, or as if all were said."""

    def __init__(self, *, with_error: bool) -> None:
        self._with_error = with_error

    @answers_errors
    async def Connect(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802 - gRPC's name
        await self.converse(context)

    async def converse(self, context: Any) -> None:
        await read(context)
        await context.write(pb.ConnectReply())
        await asyncio.sleep(0.1)  # the other has heard it, and has nothing to say for a while
        if self._with_error:
            raise Unreachable("ended")


@contextlib.asynccontextmanager
async def serving(other: Ending, takes: str = "grpc") -> AsyncIterator[Registered]:
    """`other` as it is registered; all within `WAIT_S`. `takes`: direct streams, gRPC only, or direct ones but not this (earlier)."""
    server = rpc.server()
    add_broker(other, server)
    port = rpc.listen(server, "127.0.0.1:0")
    await server.start()
    streams = direct_server(*[other.converse] * 5) if takes == "direct" else DirectServer({})
    direct_port = await streams.listen("127.0.0.1", 0)
    try:
        async with asyncio.timeout(WAIT_S):
            direct = "" if takes == "grpc" else f"127.0.0.1:{direct_port}"
            yield Registered(OTHER, "127.0.0.1:1" if takes == "direct" else f"127.0.0.1:{port}", direct)
    finally:
        await streams.stop()
        await server.stop(None)


@pytest.mark.parametrize("takes", ["direct", "grpc", "earlier"])
@pytest.mark.parametrize("with_error", [True, False])
def test_a_peer_whose_stream_ended_between_two_beats_is_connected_again(with_error: bool, takes: str) -> None:
    async def scenario() -> None:
        other, peer = Ending(with_error=with_error), Peer("test", ME)
        seen: asyncio.Queue[Incarnation | None] = asyncio.Queue()
        peer.changed = lambda: seen.put_nowait(peer.connected)
        async with serving(other, takes) as registered:
            peer.register(registered)
            try:
                assert [await seen.get() for _ in range(4)] == [OTHER, None, OTHER, None]
            finally:
                await peer.close()

    asyncio.run(scenario())


def test_a_peer_that_is_registered_where_nobody_reaches_it_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As under an address of inside a container: ten lines a second told of the way round, and none of what was wrong."""
    caplog.set_level("INFO")

    async def scenario() -> None:
        peer, tries = Peer("test", ME), asyncio.Semaphore(0)
        stub = peer.stub
        peer.stub = lambda address: (tries.release(), stub(address))[1]  # type: ignore[method-assign]
        nowhere, neither = f"127.0.0.1:{free_port()}", f"localhost:{free_port()}"
        peer.register(Registered(OTHER, nowhere, neither))
        try:
            async with asyncio.timeout(WAIT_S):
                for _ in range(4):
                    await tries.acquire()
        finally:
            await peer.close()
        own = [record for record in caplog.records if record.name.startswith("seriatim")]  # not gRPC's to other loops
        assert [record.levelname for record in own] == ["INFO", "WARNING"]
        assert f"peer doesn't answer peer={OTHER} address={nowhere} direct={neither} reason=" in caplog.text

    asyncio.run(scenario())


def test_a_call_on_its_way_to_where_the_peer_was_has_an_error_once_it_is_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC said that it was used wrongly, which ended the broker."""

    async def scenario() -> None:
        is_opening = asyncio.Event()

        async def never(_: str) -> None:
            is_opening.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(direct_calls, "opened", never)
        peer, nowhere = Peer("test", ME), f"127.0.0.1:{free_port()}"
        peer.register(Registered(OTHER, nowhere, nowhere))
        request = pb.ListCursorsRequest()
        asked = asyncio.create_task(peer.call(peer.to_call(), lambda stub: stub.ListCursors, request, WAIT_S))
        await is_opening.wait()
        peer.register(Registered(OTHER, "127.0.0.1:1"))
        with pytest.raises(Unreachable, match="was closed"):
            await asked
        await peer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("with_error", "expected"), [(True, Unreachable), (False, PeerLost)])
def test_who_writes_to_a_stream_that_was_ended_is_told_how(with_error: bool, expected: type[Exception]) -> None:
    async def scenario() -> None:
        async with serving(Ending(with_error=with_error)) as registered, rpc.channel(registered.address) as channel:
            call = BatchStub(channel).Connect()
            await write(call, pb.ConnectRequest())
            assert await read(call) is not None
            async with asyncio.timeout(WAIT_S):
                await call.code()  # gRPC doesn't tell a write that is under way what the stream ended with
            with pytest.raises(expected, match="ended"):
                await write(call, pb.ConnectRequest())

    asyncio.run(scenario())


class Copying(BrokerServicer):
    """Has one large batch to be copied."""

    @answers_errors
    async def CopyLink(self, request: pb.CopyLinkRequest, context: Any) -> None:  # type: ignore[override] # noqa: N802
        await context.write(BatchMessage.of(BATCH))


def test_a_batch_that_takes_longer_than_an_answer_may_is_copied_all_the_same() -> None:
    """Behind a slow path an answer to gRPC's ping waits for the batch before it: the connection ended after 2 s, again and again."""

    passed_bytes = 0

    async def hold_up(data: bytes) -> bytes:
        nonlocal passed_bytes
        before_bytes, passed_bytes = passed_bytes, passed_bytes + len(data)
        if before_bytes <= len(BATCH.payload) / 2 < passed_bytes:
            await asyncio.sleep(PING_S + 2)
        return data

    async def scenario() -> None:
        server, peer = rpc.server(has_batches=True), Peer("test", ME)
        add_broker(Copying(), server)
        port = rpc.listen(server, "127.0.0.1:0")
        await server.start()
        async with asyncio.timeout(WAIT_S), way_to(f"127.0.0.1:{port}", as_it_is, hold_up) as address:
            copied = [message async for message in peer.stub(address).CopyLink(pb.CopyLinkRequest())]
            assert [one.payload for message in copied for one in message.batches()] == [BATCH.payload]
            await peer.close()
        await server.stop(None)

    asyncio.run(scenario())
