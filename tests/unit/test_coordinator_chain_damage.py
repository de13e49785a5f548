"""A chain that is damaged on its way to ZooKeeper is written again by whoever wrote it, and until then costs nobody more than a moment.

Nor does one that is damaged on its way from there, its version or what it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from seriatim.coordinator.store import Store
from seriatim.protocol import chain, chain_json
from seriatim.protocol.errors import Unreachable
from seriatim.protocol.names import ChainVersion, Epoch, Offset, QueueId
from seriatim.protocol.zookeeper import BadVersion, NoNode, ZooKeeperSession

QUEUE = chain.ChainDocument(
    "c", QueueId(1), "q", chain.QueueSettings(), 1, chain.Dropped(Epoch(0), Offset(0), bytes(32), {}, {})
)


class Node:
    """ZooKeeper, with one node; what is written there for the first time arrives with one bit flipped.

    `flipped`: of the next version that is read.
    """

    def __init__(self) -> None:
        self.data, self.version, self.writes, self.flipped = b"", 0, 0, 0

    def session(self) -> ZooKeeperSession:
        return cast("ZooKeeperSession", Session(self))


class Session:
    def __init__(self, node: Node) -> None:
        self._node = node

    def on_state(self, listener: Callable[[Any], None]) -> None:
        """Nothing happens to it."""

    async def sync(self, path: str) -> None:
        """It is never behind."""

    async def ensure(self, path: str) -> None:
        """It is there."""

    async def create(self, path: str, data: bytes, beside: tuple[str, bytes] | None = None) -> None:
        if path.endswith("/chain"):
            self._write(data, 0)

    async def get(self, path: str, watch: object = None) -> tuple[bytes, int]:
        if "/names/" in path:
            raise NoNode(path)
        node = self._node
        version, node.flipped = node.version ^ node.flipped, 0
        return node.data, version

    async def version(self, path: str) -> int:
        return self._node.version

    async def set(self, path: str, data: bytes, version: int) -> int:
        if version != self._node.version:
            raise BadVersion(path)
        return self._write(data, version + 1)

    async def rewrite(self, path: str, data: bytes, version: int, to: int) -> int:
        return await self.set(path, data, version)

    def _write(self, data: bytes, version: int) -> int:
        node = self._node
        node.writes += 1
        node.data = data if node.writes != 1 else data.replace(b'"created_at_ms":1', b'"created_at_ms":3')
        node.version = version
        return version


def test_a_chain_that_was_damaged_on_its_way_to_zookeeper_is_written_again_by_who_wrote_it() -> None:
    """What arrived was the chain from then on, or none: its queue stood still until an operator recovered it."""

    async def scenario() -> None:
        node = Node()
        writer, other = Store(node.session(), "c"), Store(node.session(), "c")
        assert await writer.write_chain(QUEUE, ChainVersion(0)) == 1
        assert not chain_json.is_whole(node.data)
        with pytest.raises(Unreachable, match="bits have changed"):  # which is asked for again
            await other.read_chain(QUEUE.queue_id)
        assert node.writes == 1
        assert await writer.read_chain(QUEUE.queue_id) == (QUEUE, 2)
        assert await other.read_chain(QUEUE.queue_id) == (QUEUE, 2)
        assert node.writes == 2

    asyncio.run(scenario())


def test_nobody_writes_over_what_somebody_else_wrote() -> None:
    async def scenario() -> None:
        node = Node()
        writer = Store(node.session(), "c")
        await writer.write_chain(QUEUE, ChainVersion(0))
        node.version += 1
        with pytest.raises(Unreachable):
            await writer.read_chain(QUEUE.queue_id)
        assert node.writes == 1

    asyncio.run(scenario())


def test_a_version_that_was_damaged_on_its_way_is_nobody_s_newest() -> None:
    """ZooKeeper counted as set back from then on: the queue stood still at this coordinator until its version had come so far."""

    async def scenario() -> None:
        node = Node()
        writer, other = Store(node.session(), "c"), Store(node.session(), "c")
        node.writes = 1  # nothing is damaged any more on its way there
        await writer.write_chain(QUEUE, ChainVersion(0))
        node.flipped = 1 << 20
        assert await other.read_chain(QUEUE.queue_id) == (QUEUE, 1)
        assert await other.read_chain(QUEUE.queue_id) == (QUEUE, 1)
        assert not other.registry.outdated

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["made", "recovered", "recovered over another", "raised"])
def test_so_is_one_that_was_just_made_or_recovered(how: str) -> None:
    """Nobody could send to that queue, or delete it: its writer didn't know what it had written."""

    async def scenario() -> None:
        node = Node()
        store = Store(node.session(), "c")
        match how:
            case "made":
                await store.create_queue(QUEUE)
            case "recovered":
                assert await store.recover_queue(QUEUE, None)
            case "recovered over another":
                assert await store.recover_queue(QUEUE, ChainVersion(0))
            case _:
                node.data, node.writes = chain_json.encode(QUEUE), -1
                await store.raise_version(QUEUE.queue_id, ChainVersion(2))
        document, version = await store.read_chain(QUEUE.queue_id)
        assert document == QUEUE
        assert (node.version, node.writes) == (version, 2)
        await store.raise_version(QUEUE.queue_id, ChainVersion(version + 2))
        assert await store.read_chain(QUEUE.queue_id) == (QUEUE, version + 2)

    asyncio.run(scenario())
