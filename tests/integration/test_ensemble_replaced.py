"""ZooKeeper's servers are replaced one by one: who was told of the old ones finds the new ones, also where an old one's address is another ensemble's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from kazoo.client import KazooClient

from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper
from seriatim.consumer import Consumer
from seriatim.producer import Producer
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from tests.integration.test_coordinator_store import CLUSTER, SESSION_MS, until
from tests.integration.test_health import coordinator
from tests.integration.test_zookeeper_cut_off import Path

pytestmark = pytest.mark.timeout(120)


def test_senders_and_readers_find_the_servers_that_took_the_place_of_those_they_were_told_of(zookeeper: str) -> None:
    async def scenario() -> None:
        old, new = Path(zookeeper), Path(zookeeper)
        async with coordinator(await new.lay(), CLUSTER) as stays:
            async with coordinator(await old.lay(), CLUSTER) as leaves:
                async with Coordinators(leaves.address) as coordinators:
                    await coordinators.call("CreateQueue", pb.CreateQueueRequest(queue="orders"))
                producer = Producer(leaves.address, "orders", session_timeout_s=SESSION_MS / 1000)
                make = {"create": True, "session_timeout_s": SESSION_MS / 1000}
                consumer = await asyncio.to_thread(lambda: Consumer(leaves.address, "orders", **make).open())
                await until(lambda: producer.is_connected and consumer.is_connected, "they are connected")
            await old.cut()
            await until(lambda: not (producer.is_connected or consumer.is_connected), "the old one is gone")
            await until(lambda: producer.is_connected and consumer.is_connected, "they are at the new one", 30)
            assert stays.address
            await asyncio.gather(*map(asyncio.to_thread, (producer.close, consumer.close)))
        await new.cut()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def new_ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that has counted fewer changes than the other tests', with a path of its own."""
    with EmbeddedZooKeeper(tmp_path_factory.mktemp("new")) as server:
        in_zookeeper(server.address, lambda client: client.create("/own"))
        yield f"{server.address}/own"


def in_zookeeper(address: str, do: Callable[[KazooClient], object]) -> None:
    client = KazooClient(address)
    client.start(timeout=60)
    do(client)
    client.stop()
    client.close()


@pytest.mark.parametrize("has_path", [False, True])
def test_senders_and_readers_leave_a_server_that_is_another_ensemble_s(
    zookeeper: str, new_ensemble: str, *, has_path: bool
) -> None:
    """They were elected there, or nobody was, and waited for as long as that connection lasted."""
    queue = f"has_path_{has_path}"
    another = zookeeper.partition("/")[0]
    in_zookeeper(another, lambda client: [client.set_async("/", b"") for _ in range(1000)][-1].get())
    if has_path:
        in_zookeeper(another, lambda client: client.ensure_path("/own"))

    async def scenario() -> None:
        ours, others = Path(new_ensemble), Path(another)
        servers = f"{(await ours.lay()).partition('/')[0]},127.0.0.1:{others.port}/own"
        async with coordinator(servers, CLUSTER) as process, Coordinators(process.address) as coordinators:
            await coordinators.call("CreateQueue", pb.CreateQueueRequest(queue=queue))
            await others.lay()
            ours.is_full = True
            producer = Producer(process.address, queue, session_timeout_s=SESSION_MS / 1000)
            options = {"create": True, "session_timeout_s": SESSION_MS / 1000}
            consumer = await asyncio.to_thread(lambda: Consumer(process.address, queue, **options).open())
            await until(lambda: producer.is_connected and consumer.is_connected, "they are led to the other one")
            ours.is_full = False
            asked = pb.QueueRequest(queue=queue)

            async def are_elected() -> bool:
                view = await coordinators.call("DescribeQueue", asked)
                return bool(view.sender and view.subscriptions[0].reader)

            await until(are_elected, "they are elected here")
            await asyncio.gather(*map(asyncio.to_thread, (producer.close, consumer.close)))
        await asyncio.gather(ours.cut(), others.cut())

    asyncio.run(scenario())
