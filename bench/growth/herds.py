"""How long a herd takes: hundreds of senders, or readers, who ask the coordinators for the same in one moment.

So it is when ZooKeeper was away and all sessions ended with it, when a roll-out starts everybody anew, or when a master dies that
hundreds of queues have. Each of them is a task here, with connections and an election's node of its own, and asks as the libraries do:
two cores are to be busy with what serves them, not with hundreds of interpreters that start.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.growth.cluster import GrownCluster, running, side_by_side
from bench.growth.findings import Finding
from bench.measuring import cpu_s, settle
from seriatim.producer import Producer
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import QueueId, SubscriptionId
from seriatim.protocol.nodes import Paths
from seriatim.protocol.zookeeper import ZooKeeperSession

GROWN = "of them at once"
AT_MOST = 2.0
"""What each adds may grow so much: it waits for those before it, but is no more work than they are."""
_GROUPS = 3
_SESSION_S = 60.0
_CALL_S = 5.0
_RETRY_S = 0.02
_RETRY_MAX_S = 1.0
_LIMIT_S = 300.0
_QUIET_S = 5.0
_READERS_QUEUE = "readers"


@dataclass(slots=True)
class _One:
    """Who asks: a sender, or where `subscription` is said a reader."""

    queue: str
    queue_id: QueueId
    election: str
    asks: Coordinators
    subscription: str = ""
    node: str = ""
    token: int = 0
    epoch: int = 0
    group: str = ""


@dataclass(slots=True)
class _Herd:
    """`why`: what they were told in the place of a grant, and how often."""

    members: list[_One]
    why: Counter[str] = field(default_factory=Counter)

    async def granted(self, failure: str = "") -> float:
        """Seconds until the last has its grant. Raises TimeoutError. `failure`: of the link that each has."""
        began_s = time.monotonic()
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as tasks:
            for one in self.members:
                tasks.create_task(self._ask(one, failure))
        return time.monotonic() - began_s

    async def _ask(self, one: _One, failure: str) -> None:
        tries = 0
        while True:
            pause_s = min(_RETRY_MAX_S, _RETRY_S * 2 ** min(tries, 16))
            tries += 1
            try:
                reply = await (_read(one) if one.subscription else _send(one, failure))
            except SeriatimError as error:
                self.why[error.code] += 1
            else:
                one.token = reply.token or one.token
                if reply.WhichOneof("kind") == "grant":
                    one.epoch = reply.grant.epoch
                    one.group = "" if one.subscription else reply.grant.master.group
                    return
                self.why.update(reason.what for reason in reply.wait.reasons)
                pause_s = max(_RETRY_S, reply.wait.retry_after_ms / 1000)
            await asyncio.sleep(pause_s)


async def _send(one: _One, failure: str) -> pb.AcquireSendReply:
    request = pb.AcquireSendRequest(
        queue=one.queue, queue_id=one.queue_id, election_node=one.node, token=one.token,
        failed_epoch=one.epoch if failure else 0, failure=failure,
    )  # fmt: skip
    reply: pb.AcquireSendReply = await one.asks.call("AcquireSend", request, _CALL_S)
    return reply


async def _read(one: _One) -> pb.AcquireReadReply:
    request = pb.AcquireReadRequest(
        queue=one.queue, subscription=one.subscription, queue_id=one.queue_id, election_node=one.node, token=one.token
    )
    reply: pb.AcquireReadReply = await one.asks.call_within("AcquireRead", request, _CALL_S)
    return reply


def measure_herds(sizes: Sequence[int], found: Finding) -> None:
    """A cluster for each size and kind: senders of as many queues, readers of as many subscriptions of one queue."""
    for size in sorted(sizes):
        with running(_GROUPS) as cluster:
            names = [f"queue-{number}" for number in range(size)]
            side_by_side(cluster.make, names)
            paths = _paths(cluster)
            ids = {name: QueueId(cluster.view(name).queue_id) for name in names}
            settle()
            senders = [
                _One(name, ids[name], paths.senders(ids[name]), Coordinators(cluster.addresses)) for name in names
            ]
            asyncio.run(_senders(cluster, senders, found))
        with running(_GROUPS) as cluster:
            with Producer(**cluster.make(_READERS_QUEUE)) as producer:
                producer.send(b"one").result(_LIMIT_S)
            names = [f"reader-{number}" for number in range(size)]
            side_by_side(lambda name: _subscribe(cluster, name), names)
            paths, view = _paths(cluster), cluster.view(_READERS_QUEUE)
            queue_id = QueueId(view.queue_id)
            settle()
            readers = [
                _One(
                    _READERS_QUEUE,
                    queue_id,
                    paths.readers(queue_id, SubscriptionId(one.subscription_id)),
                    Coordinators(cluster.addresses),
                    one.subscription,
                )
                for one in view.subscriptions
            ]
            asyncio.run(_readers(cluster, readers, found))


def judge(found: Finding) -> None:
    """Verdicts, of all points."""
    for what in found.named(""):
        found.stays_within(what, AT_MOST)


def _paths(cluster: GrownCluster) -> Paths:
    return Paths(cluster.call("DescribeCluster", pb.DescribeClusterRequest()).cluster)


def _subscribe(cluster: GrownCluster, name: str) -> None:
    cluster.call("CreateSubscription", pb.CreateSubscriptionRequest(queue=_READERS_QUEUE, subscription=name))


async def _senders(cluster: GrownCluster, members: list[_One], found: Finding) -> None:
    async with _standing(cluster, members) as herd:
        await _timed(cluster, "sender, elected", herd, found)
        await asyncio.sleep(_QUIET_S)
        ((group, _),) = Counter(one.group for one in members).most_common(1)
        cluster.supervisor.kill(f"{group}-a")
        await _timed(cluster, "sender, its master killed", herd, found, "its stream broke")


async def _readers(cluster: GrownCluster, members: list[_One], found: Finding) -> None:
    async with _standing(cluster, members) as herd:
        await _timed(cluster, "reader, elected", herd, found)


@asynccontextmanager
async def _standing(cluster: GrownCluster, members: list[_One]) -> AsyncIterator[_Herd]:
    """Each is the first in line of its election, by a node of one session that all share."""
    session = ZooKeeperSession(cluster.zookeeper, _SESSION_S)
    await session.start(_CALL_S)
    try:
        for one in members:
            await session.ensure(one.election)
            path = await session.create(f"{one.election}/herd-", ephemeral=True, sequential=True)
            one.node = path.rpartition("/")[2]
        await asyncio.sleep(_QUIET_S)
        yield _Herd(members)
    finally:
        await asyncio.gather(*(one.asks.close() for one in members))
        await session.stop()


async def _timed(
    cluster: GrownCluster,
    what: str,
    herd: _Herd,
    found: Finding,
    failure: str = "",
) -> None:
    herd.why.clear()
    pids = [cluster.pid(name) for name in cluster.coordinator_names]
    before_s = cpu_s(pids)
    took_s = await herd.granted(failure)
    size = len(herd.members)
    found.add(f"{what}: until the last is granted", "ms for each", GROWN, size, [took_s * 1000 / size])
    found.add(
        f"{what}: both coordinators",
        "ms of processor time for each",
        GROWN,
        size,
        [(cpu_s(pids) - before_s) * 1000 / size],
    )
    links = max(one.epoch for one in herd.members)
    told = ", ".join(f"{reason} {count}" for reason, count in herd.why.most_common(4)) or "nothing else"
    found.say(f"{size} {what}: {took_s:.2f} s, {links} links at most; before that they were told: {told}")
