"""One broker process: settings, the parts and their tasks, from the lock on the directory to the last flush."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seriatim.broker_group import sealing
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.coordinators import Coordinators
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.membership import Membership
from seriatim.broker_group.peer import Peer
from seriatim.broker_group.resyncer import Resyncer
from seriatim.broker_group.scrubber import Scrubber
from seriatim.broker_group.service import BrokerService
from seriatim.broker_group.store import SEGMENT_BYTES, Store, open_store
from seriatim.protocol import log, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import add_broker, direct_server
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.direct_calls import CallServer
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.flag import until_set
from seriatim.protocol.health import add_health
from seriatim.protocol.names import MemberName, check_served, checked_address, checked_name
from seriatim.protocol.nodes import Paths
from seriatim.protocol.zookeeper import MILLISECONDS_MAX, ZooKeeperSession, check_hosts

_log = log.logger("broker.process")

STOP_S = 0.5


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What one broker is told. `advertise`: the address that others are given, if it isn't the one listened on.

    `advertise_outside`: the one that reaches it from outside of the cluster's network, for clients that ask there.
    `reserve_mb`: room on the disk that is kept for seals, cursors and resync; below it no records are taken (H17).
    `segment_bytes`: batches from this size on lie in segment files, smaller ones in RocksDB. `scrub_interval_s`: how often all
    that is stored is read, to find damage; 0: never. `direct_port`: where batches and calls come without gRPC around them, on the
    same host; 0: any free one, -1: nowhere.
    """

    zookeeper: str
    cluster: str
    group: str
    member: str
    dir: Path
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    advertise_outside: str = ""
    session_timeout_ms: int = 4000
    reserve_mb: int = 256
    segment_bytes: int = SEGMENT_BYTES
    scrub_interval_s: int = 24 * 60 * 60
    direct_port: int = 0

    @property
    def name(self) -> MemberName:
        return MemberName(self.group, self.member)

    def check(self) -> None:
        """Raises InvalidArgument."""
        check_hosts(self.zookeeper, "zookeeper")
        checked_name(self.cluster, "cluster")
        checked_name(self.group, "group")
        if self.member not in ("a", "b"):
            raise InvalidArgument(f"a member of a group is a or b, not {self.member!r}")
        check_served(self.listen, self.advertise)
        if self.advertise_outside:
            checked_address(self.advertise_outside, "advertise_outside")
        if not 0 < self.session_timeout_ms <= MILLISECONDS_MAX:
            raise InvalidArgument(f"session_timeout_ms has to be more than 0, and {MILLISECONDS_MAX} at most")
        for key in ("reserve_mb", "segment_bytes"):
            if getattr(self, key) < 0:
                raise InvalidArgument(f"{key} has to be 0 or more, not {getattr(self, key)}")
        if self.scrub_interval_s < 0:
            raise InvalidArgument(f"a scrub interval is 0 (never) or more seconds, not {self.scrub_interval_s}")
        if not -1 <= self.direct_port <= 65_535:
            raise InvalidArgument(f"a direct port is 0 (any), -1 (none), or 1 to 65535, not {self.direct_port}")


async def serve(settings: BrokerSettings, ready: Callable[[str, str], None], stop: asyncio.Event) -> None:
    """Run a broker until `stop` is set; `ready(name, address)` is called when it is registered and serves.

    Raises InvalidArgument for settings that can't be, DiskFailed or DiskFull where the directory can't be read, Unreachable where
    no ZooKeeper answers.
    """
    settings.check()
    store = open_store(settings.dir, f"{settings.cluster}/{settings.name}", settings.segment_bytes)
    try:
        await until_set(stop, _live(settings, store, ready))
    finally:
        await store.close()


async def _live(settings: BrokerSettings, store: Store, ready: Callable[[str, str], None]) -> None:
    """Until cancelled."""
    session = ZooKeeperSession(settings.zookeeper, settings.session_timeout_ms / 1000)
    await session.start()
    try:
        peer = Peer(settings.cluster, store.incarnation)
        broker = Broker(settings.cluster, settings.name, store, peer, settings.reserve_mb * 1024 * 1024)
        await _serve(broker, session, settings, ready)
    finally:
        await session.stop()


async def _serve(
    broker: Broker, session: ZooKeeperSession, settings: BrokerSettings, ready: Callable[[str, str], None]
) -> None:
    is_stopping = False
    paths = Paths(settings.cluster)
    coordinators = Coordinators(session, paths)
    keeper = CursorKeeper(broker, coordinators)
    server = rpc.server(has_batches=True)
    host = settings.listen.rsplit(":", 1)[0]
    port = rpc.listen(server, settings.listen)
    address = settings.advertise or f"{host}:{port}"
    resyncer = Resyncer(broker, keeper, session, paths)
    membership = Membership(broker, session, address, settings.advertise_outside)
    service = BrokerService(broker, keeper, membership)
    add_broker(service, server)
    calls = CallServer(service).serve
    direct = direct_server(service.append, service.replicate, service.fetch, service.connect, calls)

    def is_ready() -> bool:
        """Registered, and sure of it: without a lease, or a disk, it takes no records."""
        is_there = membership.is_registered.is_set() and broker.lease.usable_until_s > boottime_s()
        return is_there and broker.store.failure is None and not broker.store.stands_still and not is_stopping

    add_health(server, pb.DESCRIPTOR.services_by_name["Broker"].full_name, is_ready)
    try:
        # What the last start left open is sealed before anybody can ask for it (protocol.md 5.5).
        await sealing.seal_open_links(broker)
        await server.start()
        if settings.direct_port >= 0:
            direct_port = await direct.listen(host, settings.direct_port)
            membership.direct = f"{address.rsplit(':', 1)[0]}:{direct_port}"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(membership.run_session())
            tasks.create_task(membership.watch_peer())
            tasks.create_task(membership.watch_chains())
            tasks.create_task(resyncer.run())
            tasks.create_task(keeper.report_drained())
            tasks.create_task(Scrubber(broker, settings.scrub_interval_s).run())
            await membership.is_registered.wait()
            ready(str(broker.name), address)
    finally:
        is_stopping = True
        await direct.stop()
        await server.stop(STOP_S)
        await broker.peer.close()
        await coordinators.close()
