"""ZooKeeper's servers are replaced one by one: who was told of the old ones finds the new ones."""

from __future__ import annotations

import asyncio

import pytest

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
