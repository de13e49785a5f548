"""Hundreds of readers of one queue are elected in one moment: each has its token written into the same chain."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.coordinator import administration
from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core.acquire_read import ReadRequest
from seriatim.coordinator.core.events import ReadGrant, TellReader
from seriatim.coordinator.core.registry import GroupState
from seriatim.coordinator.execution import Execution
from seriatim.coordinator.remembered import GroupNodes, Listing, NameNode
from seriatim.coordinator.store import Store
from seriatim.protocol import chain_json
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.errors import NotElected
from seriatim.protocol.names import ChainVersion, Epoch, QueueId
from seriatim.protocol.zookeeper import BadVersion, NoNode, Watch, ZooKeeperSession
from tests.property.chain_world import World, close_call, send_call, with_subscription

READERS = 20


class ChainNode:
    """A session with ZooKeeper, in which there is one chain; at its subscriptions stand nodes that are called by their ids.

    `answers`: nothing is answered while it isn't set. `refused`: how many writes were.
    """

    def __init__(self, document: ChainDocument) -> None:
        self.data, self.version = chain_json.encode(document), 0
        self.is_there = True
        self.refused = 0
        self.answers = asyncio.Event()
        self.answers.set()

    def on_state(self, _: object) -> None: ...

    async def sync(self, _: str) -> None:
        await asyncio.sleep(0)

    async def children(self, path: str, _: Watch | None = None) -> list[str]:
        return [f"{path.rpartition('/')[2]}-0000000000"]

    async def get(self, _: str, __: Watch | None = None) -> tuple[bytes, int]:
        if not self.is_there:
            raise NoNode
        await self.answers.wait()
        await asyncio.sleep(0)
        return self.data, self.version

    async def version(self, path: str) -> int:
        return (await self.get(path))[1]

    async def set(self, _: str, data: bytes, expected: int) -> int:
        await asyncio.sleep(0)
        if expected != self.version:
            self.refused += 1
            raise BadVersion
        self.data, self.version = data, expected + 1
        return self.version


class Decoded:
    """How many chains were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._decode = chain_json.decode
        monkeypatch.setattr(chain_json, "decode", self._counted)

    def _counted(self, data: bytes) -> ChainDocument:
        self.count += 1
        return self._decode(data)


class StandsStill:
    """Members that are told who reads, and don't answer."""

    def __init__(self) -> None:
        self.asked = 0
        self.are_all_asked = asyncio.Event()

    async def tell_reader(self, *_: object) -> None:
        self.asked += 1
        if self.asked == 2 * READERS:
            self.are_all_asked.set()
        await asyncio.Event().wait()


class AtTheEnd:
    """Members that have it that each has read all of the link."""

    def __init__(self) -> None:
        self.asked = 0

    async def tell_reader(self, effect: TellReader, *_: object) -> pb.TellReaderReply:
        self.asked += 1
        for _ in range(2 * READERS):  # until others have written
            await asyncio.sleep(0)
        return pb.TellReaderReply(has_cursor=True, cursor=1, by=effect.token)


def queue(*, is_open: bool = False) -> World:
    """Subscriptions, each of which has yet to read its first link, if there is one."""
    world = World()
    if is_open:
        send_call(world).finish()
    for number in range(READERS):
        with_subscription(world, f"s{number}")
    return world


def coordinator(world: World, members: object = None) -> tuple[Execution, Store, ChainNode]:
    node = ChainNode(world.document)
    store = Store(cast("ZooKeeperSession", node), "c")
    store.registry = world.registry()
    cast("Any", store).look_up_registry = lambda _: asyncio.sleep(0, store.registry)
    return Execution(store, cast("Any", members), 600.0, lambda: True), store, node


async def read(execution: Execution, world: World, number: int, node: str = "") -> Any:
    found = world.document.subscription(f"s{number}")
    assert found is not None
    request = ReadRequest(found.name, node or f"{found.subscription_id}-0000000000")
    return await execution.acquire_read(world.document.queue_id, request, "cause")


def test_none_of_them_is_in_another_ones_way_and_what_is_read_is_decoded_once(monkeypatch: pytest.MonkeyPatch):
    """Each write let one of them go on; all others read and decoded the chain again, and ZooKeeper lost a coordinator that did nothing else."""

    async def scenario() -> None:
        decoded, world = Decoded(monkeypatch), queue()
        execution, _, node = coordinator(world)
        grants = await asyncio.gather(
            read(execution, world, 0, "another-0000000001"),
            *(read(execution, world, number) for number in range(READERS)),
            return_exceptions=True,
        )
        assert isinstance(grants[0], NotElected)
        assert [type(grant) for grant in grants[1:]] == [ReadGrant] * READERS
        assert (node.version, node.refused, decoded.count) == (READERS, 0, 1)
        del grants
        await asyncio.sleep(0)  # the loop lets go of the last one
        gc.collect()  # an error knows where it was raised, and what is there knows it
        assert not execution._store.lines

    asyncio.run(scenario())


def test_nobody_waits_for_a_member_that_another_reader_waits_for():
    async def scenario() -> None:
        world, members = queue(is_open=True), StandsStill()
        execution, _, node = coordinator(world, members)
        calls = [asyncio.ensure_future(read(execution, world, number)) for number in range(READERS)]
        async with asyncio.timeout(110):
            await members.are_all_asked.wait()
        assert node.version == READERS
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await execution.close()

    asyncio.run(scenario())


def test_who_leaves_a_link_is_in_nobody_s_way_and_members_are_told_once():
    """Of each write all others told both members again, and read, decoded and encoded the chain: of 200, hardly one got on."""

    async def scenario() -> None:
        world, members = queue(is_open=True), AtTheEnd()
        world.append(Epoch(1), 2)
        close_call(world, 1).finish()
        execution, _, node = coordinator(world, members)
        grants = await asyncio.gather(*(read(execution, world, number) for number in range(READERS)))
        assert [grant.link for grant in grants] == [None] * READERS
        assert (node.version, node.refused, members.asked) == (2 * READERS, 0, 2 * READERS)
        await execution.close()

    asyncio.run(scenario())


def test_nor_is_who_starts_where_a_member_is_away_which_is_noted_of_each():
    """A slave that is down while all readers of a queue are rolled out: of 100, 60 were asked to come again for 4,000 calls."""

    async def scenario() -> None:
        world, members = queue(is_open=True), AtTheEnd()
        world.append(Epoch(1), 2)
        world.kill(("g1", "b"))
        world.expire(("g1", "b"))
        execution, _, node = coordinator(world, members)
        grants = await asyncio.gather(*(read(execution, world, number) for number in range(READERS)))
        assert [grant.index for grant in grants] == [1] * READERS
        assert (node.version, node.refused, members.asked) == (2 * READERS, 0, 2 * READERS)
        await execution.close()

    asyncio.run(scenario())


def test_nor_is_who_has_a_subscription_made(monkeypatch: pytest.MonkeyPatch):
    """Of 200 readers that had one made at their start, all in one moment, 150 ended: the chain kept changing."""

    async def scenario() -> None:
        monkeypatch.setattr(administration, "MAX_CONFLICTS", 2)
        world = queue(is_open=True)
        execution, store, node = coordinator(world)
        cast("Any", store).queue_id = lambda *_: asyncio.sleep(0, QueueId(1))
        told = SimpleNamespace(subscription=lambda *_: asyncio.sleep(0, pb.SubscriptionView()))
        operations = Operations(store, execution, cast("Any", told))
        requests = [pb.CreateSubscriptionRequest(queue="orders", subscription=f"new{one}") for one in range(READERS)]
        members = StandsStill()
        cast("Any", execution)._members = members
        reading = [asyncio.ensure_future(read(execution, world, number)) for number in range(READERS)]
        await asyncio.gather(*map(operations.create_subscription, requests))
        async with asyncio.timeout(110):
            await members.are_all_asked.wait()
        assert (node.version, node.refused) == (2 * READERS, 0)
        for call in reading:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await execution.close()

    asyncio.run(scenario())


def test_who_gives_up_in_line_or_in_its_turn_holds_up_nobody():
    async def scenario() -> None:
        world = queue()
        execution, _, node = coordinator(world)
        node.answers.clear()
        calls = [asyncio.ensure_future(read(execution, world, number)) for number in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        calls[0].cancel()
        calls[1].cancel()
        node.answers.set()
        assert isinstance(await calls[2], ReadGrant)
        assert node.version == 1
        await execution.close()

    asyncio.run(scenario())


def test_a_chain_that_zookeeper_was_set_back_to_is_told_from_another_one_of_the_same_version():
    async def scenario() -> None:
        world = queue()
        _, store, node = coordinator(world)
        assert await store.read_chain(QueueId(1)) == (world.document, ChainVersion(0))
        assert store.size_bytes(QueueId(1)) == len(node.data)
        other = queue(is_open=True).document
        node.data = chain_json.encode(other)
        assert await store.read_chain(QueueId(1)) == (other, ChainVersion(0))
        await store._read_seen(QueueId(1))
        assert store.chains[QueueId(1)].size_bytes == store.size_bytes(QueueId(1)) == len(node.data)
        node.is_there = False
        store._await_node = lambda *_: asyncio.sleep(0, False)  # type: ignore[method-assign]
        await store._read_seen(QueueId(1))
        assert not store._held

    asyncio.run(scenario())


def test_what_was_looked_up_before_something_newer_was_seen_is_looked_at_again():
    """A member that had registered while a call looked its group up stayed away for this coordinator, until it had something else to say."""

    async def scenario() -> None:
        store = Store(cast("ZooKeeperSession", ChainNode(queue().document)), "c")
        older, newer = GroupState("g1"), GroupState("g1", is_draining=True)

        async def read_group(name: str, *, is_watching: bool) -> GroupState:
            store._remember(name, newer)  # by a watch, while this answer was on its way
            return older

        store._read_group = read_group  # type: ignore[method-assign]
        store._stale.clear()
        assert (await store.look_up_registry(["g1"])).group("g1") == older
        assert store._stale == {GroupNodes("g1")}
        assert store._wake.is_set()

    asyncio.run(scenario())


def test_behind_a_connection_that_was_lost_every_name_is_read_again_whoever_had_it_before():
    """It may have gone to another queue meanwhile, which nothing tells: its watch went with the session."""

    async def scenario() -> None:
        store = Store(cast("ZooKeeperSession", ChainNode(queue().document)), "c")
        store.names = {"orders": QueueId(1), "bills": QueueId(2)}
        known: list[dict[str, QueueId]] = []

        async def read_names(names: dict[str, QueueId]) -> None:
            known.append(dict(names))

        store._read_names = read_names  # type: ignore[method-assign, assignment]
        for stale in (Listing.ALL_NAMES, Listing.NAMES, NameNode("orders")):
            store._stale = {stale}
            await store._refresh()
        assert known == [{}, store.names, {"bills": QueueId(2)}]

    asyncio.run(scenario())
