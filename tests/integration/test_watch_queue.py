"""Who watches a queue at a coordinator that ZooKeeper is cut off from goes to another one, and misses nothing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from seriatim.coordinator import service
from seriatim.coordinator.process import CoordinatorProcess, CoordinatorSettings
from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorStub

SESSION_MS = 20_000
"""Longer than a machine stands still."""
CUT_OFF_MS = 2000
"""The same, of a coordinator that is to lose its session."""


class Proxy:
    """TCP to an address; once `is_cut` nothing passes, and connections stay, as where packets are dropped."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self.is_cut = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._to)
        for one, other in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._pipe(one, other)))

    async def _pipe(self, one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(other):
            while data := await one.read(65536):
                if not self.is_cut:
                    other.write(data)
                    await other.drain()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        await self._server.wait_closed()


def test_a_watcher_learns_what_happens_while_its_coordinator_is_cut_off_from_zookeeper(zookeeper: str) -> None:
    asyncio.run(_watched_through_a_cut(zookeeper))


async def _watched_through_a_cut(zookeeper: str) -> None:
    hosts, _, chroot = zookeeper.partition("/")
    host, port = hosts.split(":")
    proxy = Proxy(host, int(port))
    behind = f"127.0.0.1:{await proxy.start()}/{chroot}"
    one = CoordinatorProcess(CoordinatorSettings(behind, "c", name="one", session_timeout_ms=CUT_OFF_MS))
    other = CoordinatorProcess(CoordinatorSettings(zookeeper, "c", name="other", session_timeout_ms=SESSION_MS))
    versions: asyncio.Queue[int] = asyncio.Queue()

    async def watch() -> None:
        async with Coordinators([one.address, other.address]) as watcher:
            async for view in watcher.watch("q"):
                versions.put_nowait(view.chain_version)

    async with contextlib.AsyncExitStack() as stack:
        for process in (one, other):
            await process.start()
            stack.push_async_callback(process.stop)
            running = asyncio.create_task(process.run())
            stack.callback(running.cancel)
        stack.push_async_callback(proxy.stop)
        async with Coordinators(other.address) as healthy:
            await healthy.call("CreateQueue", pb.CreateQueueRequest(queue="q"))
            watching = asyncio.create_task(watch())
            stack.callback(watching.cancel)
            async with asyncio.timeout(60):
                await versions.get()
                proxy.is_cut = True
                await healthy.call("CreateSubscription", pb.CreateSubscriptionRequest(queue="q", subscription="s"))
                newest = (await healthy.call("DescribeQueue", pb.QueueRequest(queue="q"))).chain_version
                while await versions.get() < newest:
                    pass
        proxy.is_cut = False


def test_a_watch_beats_where_that_is_asked_for_and_tells_changes_all_the_same(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BEAT_S", 0.05)
    asyncio.run(_watched_with_and_without_beats(zookeeper))


async def _watched_with_and_without_beats(zookeeper: str) -> None:
    process = CoordinatorProcess(CoordinatorSettings(zookeeper, "c", name="one", session_timeout_ms=SESSION_MS))
    async with contextlib.AsyncExitStack() as stack:
        await process.start()
        stack.push_async_callback(process.stop)
        running = asyncio.create_task(process.run())
        stack.callback(running.cancel)
        channel = await stack.enter_async_context(rpc.channel(process.address))
        stub = rpc.checked(CoordinatorStub)(channel)
        await stub.CreateQueue(pb.CreateQueueRequest(queue="q"))
        beating, silent = (stub.WatchQueue(pb.QueueRequest(queue="q", wants_beats=wants)) for wants in (True, False))
        async with asyncio.timeout(60):
            assert await beating.read() == await silent.read()
            for _ in range(3):
                assert await beating.read() == pb.QueueView(is_beat=True)
            await stub.CreateSubscription(pb.CreateSubscriptionRequest(queue="q", subscription="s"))
            told = await silent.read()
            assert [one.subscription for one in told.subscriptions] == ["s"]
            while (seen := await beating.read()).is_beat:
                pass
            assert seen == told
            assert (await beating.read()).is_beat
