"""Whoever calls members or coordinators lets the addresses go where nobody answers and nobody is said to be."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest

from seriatim.broker_group.coordinators import Coordinators
from seriatim.broker_group.peer import Peer, Registered
from seriatim.cli.embedded.ports import free_port
from seriatim.consumer.transport import Members
from seriatim.coordinator.background import BackgroundWork
from seriatim.producer.route import Route
from seriatim.protocol import coordinators, rpc
from seriatim.protocol.errors import Unreachable
from seriatim.protocol.names import Incarnation, QueueId
from seriatim.protocol.nodes import Paths
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.seriatim_pb2 import DescribeClusterRequest, LinkMember, QueueRequest, SendGrant

DEAD = "dead:1"


class FakeChannel:
    def __init__(self, address: str, closed: list[str]) -> None:
        self._address = address
        self._closed = closed

    def get_state(self, *, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        del try_to_connect
        is_dead = self._address.startswith("dead")
        return grpc.ChannelConnectivity.TRANSIENT_FAILURE if is_dead else grpc.ChannelConnectivity.READY

    async def close(self, _: None) -> None:
        self._closed.append(self._address)

    def __getattr__(self, kind: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which channels were closed, in order."""
    found: list[str] = []
    monkeypatch.setattr(rpc, "channel", lambda address, **_: FakeChannel(address, found))
    return found


def test_a_producer_forgets_a_master_that_a_switch_no_longer_leads_to(closed: list[str]) -> None:
    tasks: list[asyncio.Task[None]] = []

    def spawn(work: Any) -> asyncio.Task[None]:
        tasks.append(asyncio.get_running_loop().create_task(work))
        return tasks[-1]

    async def scenario() -> None:
        route = Route(spawn, lambda _: None)
        for master, following in (("left:1", DEAD), ("m:1", "dead:2")):
            grant = SendGrant(epoch=1, master=LinkMember(address=master), next_master=following)
            effect = SimpleNamespace(grant=SimpleNamespace(route=grant), token=1, stream=1)
            route.open(cast("Any", effect), "c", QueueId(1))
            route.close_stream()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert closed == [DEAD]

    asyncio.run(scenario())


def test_a_consumer_forgets_a_member_that_it_neither_reads_nor_may_read_next(closed: list[str]) -> None:
    async def scenario() -> None:
        members = Members()
        members.connect(["dead:2", "m:2"])
        async with members.using(DEAD):
            members.stub(DEAD)
            members.connect(["dead:3"])
            async with members.using("m:1"):
                assert closed == ["dead:2"]
            assert closed == ["dead:2"]
        async with members.using("m:1"):
            assert closed == ["dead:2", DEAD]

    asyncio.run(scenario())


def test_a_broker_forgets_where_its_peer_was(closed: list[str]) -> None:
    async def scenario() -> None:
        peer = Peer("c", Incarnation("a", 1))
        peer.stub(DEAD)
        peer.register(Registered(Incarnation("b", 2), "m:1"))
        await asyncio.sleep(0)
        assert closed == [DEAD]
        peer.register(None)

    asyncio.run(scenario())


def test_a_broker_forgets_where_coordinators_were(closed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class OneCoordinator:
        address = DEAD

        async def children(self, _: str) -> list[str]:
            return ["one"]

        async def get(self, *_: object) -> tuple[bytes, int]:
            return CoordinatorRegistration(self.address).encode(), 0

    async def answer(*_: object) -> str:
        return "answer"

    monkeypatch.setattr("seriatim.protocol.rpc.call", answer)

    async def scenario() -> None:
        session = OneCoordinator()
        coordinators = Coordinators(cast("Any", session), Paths("c"))
        await coordinators.call("ReportDrained", None, 1.0)
        assert closed == []
        session.address = "m:1"
        await coordinators.call("ReportDrained", None, 1.0)
        assert closed == [DEAD]

    asyncio.run(scenario())


def test_a_client_forgets_where_nobody_coordinates_any_more_also_where_it_was_given(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connected there twice a second for as long as it lived, whoever had the address by then."""

    async def scenario() -> None:
        monkeypatch.setattr(coordinators, "LOOK_S", 0.0)
        async with coordinators.Coordinators(["dead:2", DEAD, "c:1"]) as client:
            for (
                address
            ) in client._addresses:  # the first one is asked next, and is to be there as soon as it comes back
                client._stub(address)
            monkeypatch.setattr(client, "call", AsyncMock())
            client._keep_looking()
            async with asyncio.timeout(60):
                while not closed:  # noqa: ASYNC110 - nobody tells of that
                    await asyncio.sleep(0.01)
            assert closed == [DEAD]

    asyncio.run(scenario())


async def describing(client: coordinators.Coordinators) -> None:
    with pytest.raises(Unreachable):
        await client.call("DescribeCluster", DescribeClusterRequest())


async def changing(client: coordinators.Coordinators) -> None:
    with pytest.raises(Unreachable):
        await client.call("DeleteQueue", QueueRequest(queue="orders"))


async def watching(client: coordinators.Coordinators) -> None:
    asked = asyncio.ensure_future(anext(client.watch("orders")))
    await client._missed.wait()
    asked.cancel()
    await asyncio.wait([asked])


@pytest.mark.parametrize("ask", [describing, changing, watching])
def test_nothing_is_left_of_a_call_where_nobody_coordinates(
    ask: Callable[[coordinators.Coordinators], Awaitable[None]],
) -> None:
    """It keeps its channel going, though that is closed, until somebody looks for circles: never where nothing else goes on."""

    async def scenario() -> None:
        async with coordinators.Coordinators(f"127.0.0.1:{free_port()}") as client:
            await ask(client)
            assert met() == before

    def met() -> list[object]:
        return [one for one in gc.get_objects() if isinstance(one, grpc.aio.AioRpcError)]

    gc.collect()
    gc.disable()
    before = met()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_a_coordinator_forgets_where_members_were_also_while_another_one_is_elected() -> None:
    async def scenario() -> None:
        has_forgotten = asyncio.Event()

        class FakeMembers:
            async def forget_gone(self) -> None:
                has_forgotten.set()

        store = SimpleNamespace(on_change=lambda _: None)
        work = BackgroundWork(*cast("Any", (store, FakeMembers(), None, None, lambda: False, None)))
        running = asyncio.create_task(work.run())
        async with asyncio.timeout(60):
            await has_forgotten.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
