"""Two real broker processes of one group, with the test in the place of coordinator, sender and reader."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from kazoo.client import KazooClient

from seriatim.coordinator.core import acquire_send
from seriatim.protocol import batch, batch_streams, chain_json
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch, RecordColumns
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.chain import (
    Certificate,
    ChainDocument,
    ChainMember,
    Dropped,
    Durability,
    Link,
    LinkState,
    QueueSettings,
    StaleCursors,
    Subscription,
)
from seriatim.protocol.errors import SeriatimError, from_wire
from seriatim.protocol.hashing import EMPTY_HASH
from seriatim.protocol.names import Epoch, Incarnation, Index, MemberName, Offset, QueueId, SubscriptionId, Token
from seriatim.protocol.nodes import Paths
from seriatim.protocol.registration import Registration
from seriatim.protocol.seriatim_pb2_grpc import BrokerStub
from seriatim.protocol.streams import read, send, write
from seriatim.protocol.zookeeper import NoNode, ZooKeeperSession
from tests.faults.logs import logged_defects

QUEUE = QueueId(7)
GROUP = "g1"
READY_S = 60.0
CALL_S = 30.0
"""For each call to a member: whoever is slow is waited for. How soon something comes isn't what is tested."""
SESSION_MS = 20_000
"""Longer than a machine stands still: no member is to lose its session, or its lease, but where a test wants it."""


class Member:
    """One broker process; `start` again on the same directory is the next incarnation."""

    def __init__(self, zookeeper: str, cluster: str, member: str, directory: Path, *flags: str) -> None:
        self.member = member
        self.directory = directory
        self.address = ""
        self.registration: Registration | None = None
        self._command = [
            sys.executable, "-m", "seriatim.cli.main", "broker", "--zookeeper", zookeeper, "--cluster", cluster,
            "--group", GROUP, "--member", member, "--session-timeout-ms", str(SESSION_MS), *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self._channel: grpc.aio.Channel | None = None

    def launch(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--dir", str(self.directory)], stdout=subprocess.PIPE, stderr=log, text=True
            )

    @property
    def log_path(self) -> Path:
        return self.directory.with_suffix(".log")

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    async def ready(self) -> None:
        """Until it says that it serves."""
        assert self.process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await asyncio.to_thread(self.process.stdout.readline)
        assert line.startswith(f"ready {GROUP}-{self.member} "), f"{line!r}; log: {self.log_path.read_text()[-3000:]}"
        self.address = line.split()[2]
        # Without keep-alive: the test's connection outlives a pause, of this process or of the member's.
        self._channel = grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])

    @property
    def stub(self) -> Any:
        assert self._channel is not None
        return BrokerStub(self._channel)

    @property
    def incarnation(self) -> Incarnation:
        assert self.registration is not None
        return self.registration.incarnation

    @property
    def direct(self) -> str:
        """Where it takes batches without gRPC; empty: nowhere."""
        assert self.registration is not None
        return self.registration.direct

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        await self.close()

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, 60)
        await self.close()
        return code

    async def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


@dataclass
class Members:
    """Both members of a group and a session of the test's own. `version`: of the chain, as they are told."""

    zookeeper: str
    session: ZooKeeperSession
    paths: Paths
    a: Member
    b: Member
    version: int = 0
    has_chain: bool = False
    chain_members: dict[Epoch, tuple[pb.LinkMember, pb.LinkMember]] = field(default_factory=dict)

    @property
    def both(self) -> tuple[Member, Member]:
        return self.a, self.b

    async def registered(self, claim: Callable[[Registration, Registration], bool]) -> None:
        """Until both are registered as `claim` says."""

        async def holds() -> bool:
            for member in self.both:
                try:
                    data, _ = await self.session.get(self.paths.member(GROUP, member.member))
                except NoNode:
                    return False
                member.registration = Registration.decode(data)
            assert self.a.registration is not None
            assert self.b.registration is not None
            return claim(self.a.registration, self.b.registration)

        await until(holds)

    async def start(self) -> None:
        for member in self.both:
            member.launch()
        for member in self.both:
            await member.ready()
        await self.whole()

    async def whole(self) -> None:
        """Until both are in sync and connected to each other."""
        await self.registered(
            lambda a, b: a.peer == b.incarnation and b.peer == a.incarnation and a.is_in_sync and b.is_in_sync
        )

    def link_members(self) -> tuple[pb.LinkMember, pb.LinkMember]:
        found = [
            pb.LinkMember(
                group=GROUP,
                member=member.member,
                incarnation=message(member.incarnation),
                address=member.address,
                direct=member.direct,
            )
            for member in self.both
        ]
        return found[0], found[1]

    def name(self, epoch: int, to: Incarnation) -> pb.LinkName:
        return pb.LinkName(cluster=self.paths.cluster, queue_id=QUEUE, epoch=epoch, to=message(to))

    def opening(
        self, member: Member, epoch: int = 1, token: int = 1, durability: str = "sync", **fields: Any
    ) -> pb.OpenLinkRequest:
        """What a member is asked for a link of which it is told which members it has."""
        master, slave = self.chain_members[Epoch(epoch)]
        return pb.OpenLinkRequest(
            link=self.name(epoch, member.incarnation), chain_version=self.version, token=token, master=master,
            slave=slave, durability=durability, flush_ms=20, max_record_bytes=1 << 20, queue="orders", **fields,
        )  # fmt: skip

    async def open(self, epoch: int = 1, token: int = 1, durability: str = "sync", **fields: Any) -> pb.Position:
        """OpenLink to both, repeated until they agree, as a coordinator and its callers do; the position granted."""
        self.chain_members.setdefault(Epoch(epoch), self.link_members())
        give_up_at_s = asyncio.get_running_loop().time() + CALL_S
        while True:
            requests = [
                member.stub.OpenLink(self.opening(member, epoch, token, durability, **fields), timeout=CALL_S)
                for member in self.both
            ]
            one, other = await asyncio.gather(*requests)
            if (one.next.index, one.next.hash) == (other.next.index, other.next.hash):
                return one.next
            assert asyncio.get_running_loop().time() < give_up_at_s, f"the members don't agree: {one} {other}"
            await asyncio.sleep(acquire_send.OPEN_PAUSE_MS / 1000)

    async def seal(self, member: Member, epoch: int = 1, durability: str = "sync") -> pb.SealReply:
        if self.has_chain:
            data, _ = await self.session.get(self.paths.chain(QUEUE))
            self.version = await self.session.set(self.paths.chain(QUEUE), data)
        else:
            self.version += 1
        master, slave = self.chain_members.get(Epoch(epoch)) or self.link_members()
        request = pb.SealRequest(
            link=self.name(epoch, member.incarnation), chain_version=self.version, master=master, slave=slave,
            durability=durability,
        )  # fmt: skip
        return await member.stub.Seal(request, timeout=CALL_S)

    async def committed(self, index: int, epoch: int = 1) -> None:
        """Until both members know that all below `index` is committed: the slave hears of it after the sender."""

        async def holds() -> bool:
            for member in self.both:
                asked = pb.DescribeLinkRequest(link=self.name(epoch, member.incarnation))
                if (await member.stub.DescribeLink(asked, timeout=CALL_S)).committed_index < index:
                    return False
            return True

        await until(holds)

    async def record_end(self, member: Member, end: pb.Position, epoch: int = 1) -> pb.RecordEndReply:
        master, slave = self.chain_members[Epoch(epoch)]
        request = pb.RecordEndRequest(
            link=self.name(epoch, member.incarnation), chain_version=self.version, master=master, slave=slave,
            end=end.index, link_hash=end.hash, durability="sync",
        )  # fmt: skip
        return await member.stub.RecordEnd(request, timeout=CALL_S)

    async def write_chain(
        self,
        end: pb.Position | None,
        epoch: int = 1,
        state: LinkState = LinkState.SEALED,
        readers: tuple[Subscription, ...] = (),
        stale: tuple[StaleCursors, ...] = (),
        next_subscription_id: int = 1,
    ) -> None:
        """The chain document with one link, as a coordinator would have written it."""
        master, slave = self.chain_members[Epoch(epoch)]
        sides = [
            ChainMember(MemberName(one.group, one.member), Incarnation(one.incarnation.disk_id, one.incarnation.start))
            for one in (master, slave)
        ]
        certificate = None
        if end is not None:
            certificate = Certificate(
                Index(end.index), (sides[0].incarnation,), Durability.SYNC, True, {}, {}, end.hash, None, 0
            )
        link = Link(Epoch(epoch), GROUP, sides[0], sides[1], state, Durability.SYNC, 0, Offset(0), {}, 0, certificate)
        dropped = Dropped(Epoch(1), Offset(0), EMPTY_HASH, {}, {})
        document = ChainDocument(
            self.paths.cluster,
            QUEUE,
            "orders",
            QueueSettings(),
            0,
            dropped,
            links=(link,),
            sender_token=Token(100),
            next_epoch=Epoch(max(self.chain_members) + 1),
            next_subscription_id=SubscriptionId(next_subscription_id),
            subscriptions=readers,
            stale_cursors=stale,
        )
        path, data = self.paths.chain(QUEUE), chain_json.encode(document)
        await self.session.ensure(self.paths.seals(QUEUE))
        self.version = await asyncio.to_thread(_written, self.zookeeper, path, data, max(self.version, 10))
        self.has_chain = True

    def append(self, member: Member, epoch: int = 1, token: int = 1, next_index: int = 0) -> Appending:
        call = batch_streams.append(member.direct, lambda: member.stub)
        return Appending(call, self.name(epoch, member.incarnation), token, next_index)

    async def fetch(self, member: Member, epoch: int = 1, from_index: int = 0, **fields: Any) -> list[pb.FetchReply]:
        """Everything up to the recorded end."""
        return [reply async for reply in self.fetching(member, epoch, from_index, **fields)]

    async def fetching(
        self, member: Member, epoch: int = 1, from_index: int = 0, credit_bytes: int = 1 << 30, **fields: Any
    ) -> AsyncIterator[pb.FetchReply]:
        call = await batch_streams.fetch(member.direct, lambda: member.stub)
        try:
            opened = pb.FetchOpen(
                link=self.name(epoch, member.incarnation), from_index=from_index, credit_bytes=credit_bytes, **fields
            )
            await write(call, pb.FetchRequest(open=opened))
            while (reply := await read(call)) is not None:
                if isinstance(reply, BatchMessage):
                    yield as_generated(reply)
                elif reply.WhichOneof("kind") is not None:  # else only to be heard
                    yield reply
        finally:
            call.cancel()

    async def close(self) -> None:
        for member in self.both:
            await member.close()
        await self.session.stop()
        assert not logged_defects(member.log_path for member in self.both)


def _written(zookeeper: str, path: str, data: bytes, least: int) -> int:
    """Write a node until its version is at least this, and return that. In one transaction: no member sees a version in between.

    It would take ZooKeeper for one that was set back, if it was told of a newer one before.
    """
    client = KazooClient(zookeeper)
    client.start(timeout=CALL_S)
    try:
        stat, transaction = client.exists(path), client.transaction()
        if stat is None:
            transaction.create(path, data)
        for _ in range(max(1, least - (0 if stat is None else stat.version))):
            transaction.set_data(path, data)
        version: int = transaction.commit()[-1].version
        return version
    finally:
        client.stop()
        client.close()


def as_generated(message: BatchMessage) -> pb.FetchReply:
    """What a direct stream brings, as the generated stubs have it."""
    first, *others = (
        pb.Batch(header=header, payload=bytes(payload))
        for header, payload in ((message.header, message.payload), *message.following)
    )
    first.following.extend(others)
    return pb.FetchReply(batch=first, committed_index=message.committed_index)


class Appending:
    """An Append stream, direct unless the member takes none. `acknowledged` is the newest next index that was answered."""

    def __init__(self, opening: Awaitable[Any], name: pb.LinkName, token: int, next_index: int) -> None:
        self._opening = opening
        self._call: Any = None
        self._open = pb.AppendOpen(link=name, token=token, next_index=next_index)
        self.acknowledged = -1
        self.is_stopped = False
        self.sent_index = 0
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> Appending:
        self._call = await self._opening
        await self._call.write(pb.AppendRequest(open=self._open))
        self._reading = asyncio.ensure_future(self._read())
        # A test that harms a member needn't ask how its stream ended.
        self._reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return self

    async def send(self, batches: Iterable[EncodedBatch]) -> None:
        for one in batches:
            if self.is_stopped:
                return
            message = pb.Batch(header=one.header_bytes, payload=one.payload)
            try:
                if not await send(self._call, pb.AppendRequest(batch=message)):
                    return
            except asyncio.CancelledError:
                if (
                    isinstance(self._call, grpc.aio.Call) and self._call.done()
                ):  # by the reading side, which was told why
                    return
                raise
            self.sent_index = one.header.end_index

    async def _read(self) -> None:
        while (reply := await read(self._call)) is not None:
            assert reply.next_index >= self.acknowledged
            self.acknowledged = reply.next_index
            if reply.refusal:
                self._call.cancel()
                raise from_wire(reply.refusal)

    async def until_acknowledged(self, index: int, timeout_s: float = 45) -> None:
        async def holds() -> bool:
            return self.acknowledged >= index

        await until(holds, timeout_s)

    async def error(self, timeout_s: float = 45) -> Exception:
        """The error with which the stream ended."""
        async with asyncio.timeout(timeout_s):
            assert self._reading is not None
            try:
                await self._reading
            except SeriatimError as refused:
                return refused
        raise AssertionError("the stream ended without an error")

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._call.cancel()


async def until(claim: Callable[[], Awaitable[bool]], timeout_s: float = 45) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(timeout_s):
        while not await claim():  # noqa: ASYNC110 - what is waited for is in other processes
            await asyncio.sleep(0.02)


def message(incarnation: Incarnation) -> pb.Incarnation:
    return pb.Incarnation(disk_id=incarnation.disk_id, start=incarnation.start)


def batches(
    count: int, rows: int = 10, first_index: int = 0, first_seq: int | None = None, size_bytes: int = 100
) -> list[EncodedBatch]:
    """Batches of records that continue one another; seqs start at the index unless said otherwise."""
    found = []
    index, seq = first_index, first_index if first_seq is None else first_seq
    for _ in range(count):
        values = [f"{seq + row}:".encode().ljust(size_bytes, b"x") for row in range(rows)]
        columns = RecordColumns(values, list(range(seq, seq + rows)), "source", [0] * rows)
        found.append(batch.encode(columns, Index(index)))
        index += rows
        seq += rows
    return found


def sent_batches(replies: Iterable[pb.FetchReply]) -> list[tuple[bytes, bytes]]:
    first = [reply.batch for reply in replies if reply.WhichOneof("kind") == "batch"]
    return [(one.header, one.payload) for batch in first for one in (batch, *batch.following)]


def as_sent(found: Iterable[EncodedBatch]) -> list[tuple[bytes, bytes]]:
    return [(one.header_bytes, one.payload) for one in found]


async def members(zookeeper: str, cluster: str, directory: Path, *flags: str) -> Members:
    """A started group."""
    session = ZooKeeperSession(zookeeper, SESSION_MS / 1000)
    await session.start()
    group = Members(
        zookeeper,
        session,
        Paths(cluster),
        Member(zookeeper, cluster, "a", directory / "a", "--segment-bytes", "1", *flags),
        Member(zookeeper, cluster, "b", directory / "b", "--segment-bytes", "1500", *flags),
    )
    await group.start()
    return group
