# ruff: noqa: N802 - the methods have the names of the wire's calls
"""A coordinator and members in one process, with just enough in them to read from; their chain is the test's to write."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Self

import grpc.aio

from seriatim.consumer.loop import LoopThread
from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch, RecordColumns, encode
from seriatim.protocol.errors import Fenced, InvalidArgument, SubscriptionExists, UnknownQueue, UnknownSubscription
from seriatim.protocol.marks import raised
from seriatim.protocol.names import Index
from seriatim.protocol.seriatim_pb2_grpc import (
    BrokerServicer,
    CoordinatorServicer,
    add_BrokerServicer_to_server,
    add_CoordinatorServicer_to_server,
)

BEAT_S = 0.1
"""A stream with nothing to say says so this often, as a member does: a reader leaves one that it doesn't hear."""


@dataclass
class FakeLink:
    epoch: int
    base: int
    marks: dict[str, int]
    batches: list[EncodedBatch] = field(default_factory=list)
    is_sealed: bool = False

    @property
    def length(self) -> int:
        return self.batches[-1].header.end_index if self.batches else 0

    def marks_before(self, batches: int) -> dict[str, int]:
        marks = dict(self.marks)
        for one in self.batches[:batches]:
            marks = raised(marks, one.header.spans)
        return marks


@dataclass
class FakeSubscription:
    subscription_id: int
    consume_list: list[int]
    generation: int = 1
    token: int = 0
    node: str = ""
    position: tuple[int, int] = (0, 0)
    cursors: dict[tuple[int, int], int] = field(default_factory=dict)
    told: dict[int, tuple[int, int]] = field(default_factory=dict)


class FakeCluster(CoordinatorServicer, BrokerServicer):
    """One queue `q`, one group `g1`; both members hold the same. Runs on a thread of its own.

    Two coordinators: a watch of the second one tells nothing behind its first word.
    """

    def __init__(self, zookeeper: str, cluster: str) -> None:
        self.zookeeper = zookeeper
        self.cluster = cluster
        self.links: list[FakeLink] = [FakeLink(1, 0, {})]
        self.dropped_links = 0
        self.nobody_tells = ""
        self.is_watch_still = False
        self.is_end_told = True
        self.are_members_told = True
        self.open_is = "open"
        self.subscriptions: dict[str, FakeSubscription] = {}
        self.version = 1
        self.meant: list[tuple[int, int]] = []
        """Ids that were named by who sought: 0 for none."""
        self.fetches: list[tuple[str, int, int]] = []
        self.registered = {"a": True, "b": True}
        self.addresses: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._servers: dict[str, grpc.aio.Server] = {}

    def __enter__(self) -> Self:
        self._thread = LoopThread("fake cluster")
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._thread.close()

    def _run(self, coroutine: Any) -> Any:
        return self._thread.run(coroutine, 60)

    async def _start(self) -> None:
        for name in ("coordinator", "still", "a", "b"):
            server = rpc.server()
            if name == "coordinator":
                add_CoordinatorServicer_to_server(self, server)
            elif name == "still":
                add_CoordinatorServicer_to_server(StillCoordinator(self), server)
            else:
                add_BrokerServicer_to_server(FakeMember(self, name), server)
            self.addresses[name] = f"127.0.0.1:{rpc.listen(server, '127.0.0.1:0')}"
            await server.start()
            self._servers[name] = server

    async def _stop(self) -> None:
        for server in self._servers.values():
            await server.stop(None)

    # ---- what a test does

    @property
    def coordinator(self) -> str:
        return self.addresses["coordinator"]

    def append(self, values: list[bytes], first_seq: int, source: str = "s") -> None:
        async def append() -> None:
            link = self.links[-1]
            seqs = list(range(first_seq, first_seq + len(values)))
            columns = RecordColumns(values, seqs, source, [1] * len(values))
            link.batches.append(encode(columns, Index(link.length)))
            await self._notify()

        self._run(append())

    def switch(self, *, next_is: str = "open") -> None:
        """Seal the open link, and open the next, whose state is called `next_is`."""

        async def switch() -> None:
            link = self.links[-1]
            link.is_sealed = True
            self.open_is = next_is
            marks = link.marks_before(len(link.batches))
            self.links.append(FakeLink(link.epoch + 1, link.base + link.length, marks))
            for one in self.subscriptions.values():
                one.consume_list.append(link.epoch + 1)
                self.drop_drained(one)
            await self._notify()

        self._run(switch())

    def drop_all(self) -> None:
        """Seal the open link, and drop all links, as retention does with what all have read."""

        async def drop_all() -> None:
            self.links[-1].is_sealed = True
            self.dropped_links = len(self.links)
            for one in self.subscriptions.values():
                one.consume_list = []
            await self._notify()

        self._run(drop_all())

    def open_next(self) -> None:
        """Open the next link where none is open."""

        async def open_next() -> None:
            last = self.links[-1]
            self.links.append(FakeLink(last.epoch + 1, last.base + last.length, last.marks_before(len(last.batches))))
            for one in self.subscriptions.values():
                one.consume_list.append(last.epoch + 1)
            await self._notify()

        self._run(open_next())

    def kill_member(self, name: str) -> None:
        async def kill() -> None:
            self.registered[name] = False
            await self._servers.pop(name).stop(None)
            await self._notify()

        self._run(kill())

    async def _notify(self) -> None:
        self.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait_changed(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != version)

    def drop_drained(self, one: FakeSubscription) -> None:
        while one.consume_list:
            link = self.links[one.consume_list[0] - 1]
            cursor = one.cursors.get((link.epoch, one.generation), 0)
            if not link.is_sealed or cursor < link.length:
                return
            one.consume_list.pop(0)

    def cursor_offset(self, subscription: str) -> int:
        """Up to where the subscription is committed."""
        one = self.subscriptions[subscription]
        if not one.consume_list:
            return self.links[-1].base + self.links[-1].length
        head = one.consume_list[0]
        return self.links[head - 1].base + one.cursors.get((head, one.generation), 0)

    # ---- coordinator

    def view(self) -> pb.QueueView:
        kept = self.links[self.dropped_links :]
        first_offset = kept[0].base if kept else self.links[-1].base + self.links[-1].length
        view = pb.QueueView(
            queue_id=1, queue="q", cluster=self.cluster, chain_version=self.version, first_offset=first_offset
        )
        for link in kept:
            view.links.append(
                pb.LinkView(
                    epoch=link.epoch,
                    group="g1",
                    state="sealed" if link.is_sealed else self.open_is,
                    has_base=True,
                    base=link.base,
                    has_end=link.is_sealed,
                    end=link.length if link.is_sealed else 0,
                    marks=link.marks,
                    are_marks_known=True,
                    has_committed=True,
                    is_committed_exact=self.is_end_told,
                    committed_index=link.length,
                    master=pb.LinkMember(group="g1", member="a", address=self.addresses["a"]),
                    slave=pb.LinkMember(group="g1", member="b", address=self.addresses["b"]),
                    master_now=self.incarnation("a"),
                    slave_now=self.incarnation("b"),
                )
            )
        for name, one in self.subscriptions.items():
            view.subscriptions.append(
                pb.SubscriptionView(
                    subscription=name,
                    subscription_id=one.subscription_id,
                    generation=one.generation,
                    reader_token=one.token,
                    consume_list=one.consume_list,
                )
            )
        return view

    def incarnation(self, name: str) -> pb.Incarnation:
        return pb.Incarnation(disk_id=f"disk-{name}", start=1) if self.registered[name] else pb.Incarnation()

    async def DescribeCluster(self, request, context):
        return pb.DescribeClusterReply(
            cluster=self.cluster,
            zookeeper=self.zookeeper,
            root=f"/seriatim/{self.cluster}",
            coordinators=[self.coordinator],
        )

    @rpc.answers_errors
    async def DescribeQueue(self, request, context):
        if request.queue != "q":
            raise UnknownQueue(f"no queue {request.queue!r}")
        return self.view()

    @rpc.stream_answers_errors
    async def WatchQueue(self, request, context):
        while True:
            version = self.version
            if not self.is_watch_still:
                yield self.view()
            await self.wait_changed(version)

    def subscription_view(self, name: str) -> pb.SubscriptionView:
        return next(one for one in self.view().subscriptions if one.subscription == name)

    @rpc.answers_errors
    async def CreateSubscription(self, request, context):
        if request.subscription in self.subscriptions:
            raise SubscriptionExists("it exists")
        made = FakeSubscription(len(self.subscriptions) + 1, [link.epoch for link in self.links[self.dropped_links :]])
        self.subscriptions[request.subscription] = made
        await self._notify()
        return self.subscription_view(request.subscription)

    @rpc.answers_errors
    async def SeekSubscription(self, request, context):
        one = self.subscriptions.get(request.subscription)
        if one is None or request.subscription_id not in (0, one.subscription_id):
            raise UnknownSubscription("no such subscription")
        self.meant.append((request.queue_id, request.subscription_id))
        offset = 0 if request.to == "earliest" else int(request.to)
        link = next(link for link in reversed(self.links) if link.base <= offset)
        one.generation += 1
        one.consume_list = [later.epoch for later in self.links if later.epoch >= link.epoch]
        one.cursors[link.epoch, one.generation] = offset - link.base
        await self._notify()
        return self.subscription_view(request.subscription)

    @rpc.answers_errors
    async def AcquireRead(self, request, context):
        one = self.subscriptions[request.subscription]
        if request.token == 0:
            if request.election_node != one.node:
                one.node, one.token = request.election_node, one.token + 1
                await self._notify()
        elif request.token < one.token:
            raise Fenced("a newer reader was elected")
        if self.nobody_tells:
            wait = pb.Wait(retry_after_ms=50, reasons=[pb.WaitReason(what="g1", reason=self.nobody_tells)])
            return pb.AcquireReadReply(wait=wait, queue_id=1, token=one.token)
        head = one.consume_list[0] if one.consume_list else 0
        one.told[head] = (one.generation, one.token)
        index = one.cursors.get((head, one.generation), 0)
        grant = pb.ReadGrant(
            subscription_id=one.subscription_id, generation=one.generation, epoch=head, index=index, view=self.view()
        )
        return pb.AcquireReadReply(grant=grant, queue_id=1, token=one.token)


class StillCoordinator(CoordinatorServicer):
    """Knows how the queue was when it was asked first."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.DescribeCluster = cluster.DescribeCluster
        self.DescribeQueue = cluster.DescribeQueue
        self.CreateSubscription = cluster.CreateSubscription
        self.AcquireRead = cluster.AcquireRead
        self._cluster = cluster

    async def WatchQueue(self, request, context):
        yield self._cluster.view()
        await asyncio.Event().wait()


class FakeMember(BrokerServicer):
    def __init__(self, cluster: FakeCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    @rpc.stream_answers_errors
    async def Fetch(self, requests, context):
        opening = (await anext(requests)).open
        cluster = self.cluster
        link = cluster.links[opening.link.epoch - 1]
        cluster.fetches.append((self.name, link.epoch, opening.from_index))
        credit = [opening.credit_bytes]
        more = asyncio.Event()

        async def listen() -> None:
            async for request in requests:
                credit[0] += request.credit_bytes
                more.set()

        listening = asyncio.create_task(listen())
        try:
            number = sum(1 for one in link.batches if one.header.end_index <= opening.from_index)
            at = link.batches[number].header.first_index if number < len(link.batches) else link.length
            yield pb.FetchReply(start=pb.Position(index=at, marks=link.marks_before(number)))
            while True:
                version = cluster.version
                while number < len(link.batches):
                    while credit[0] <= 0:
                        more.clear()
                        await more.wait()
                    several = link.batches[number : number + (2 if opening.takes_several else 1)]
                    credit[0] -= sum(one.size_bytes for one in several)
                    batch, *following = (pb.Batch(header=one.header_bytes, payload=one.payload) for one in several)
                    batch.following.extend(following)
                    yield pb.FetchReply(batch=batch, committed_index=link.length)
                    number += len(several)
                if link.is_sealed and cluster.are_members_told:
                    yield pb.FetchReply(end=link.length)
                    return
                try:
                    async with asyncio.timeout(BEAT_S):
                        await cluster.wait_changed(version)
                except TimeoutError:
                    yield pb.FetchReply(committed_index=link.length, is_sealed=link.is_sealed)
        finally:
            listening.cancel()

    @rpc.answers_errors
    async def CommitCursor(self, request, context):
        cluster = self.cluster
        one = next(one for one in cluster.subscriptions.values() if one.subscription_id == request.subscription_id)
        epoch = request.link.epoch
        if one.told.get(epoch) != (request.generation, request.token):
            raise Fenced("told otherwise")
        committed = cluster.links[epoch - 1].length
        if request.index > committed:
            raise InvalidArgument(f"a cursor can't be at {request.index}: the link is committed up to {committed}")
        key = (epoch, request.generation)  # a seek that this member hasn't been told of has a cursor of its own
        one.cursors[key] = max(one.cursors.get(key, 0), request.index)
        before = list(one.consume_list)
        cluster.drop_drained(one)
        if one.consume_list != before:
            await cluster._notify()
        return pb.CommitCursorReply()
