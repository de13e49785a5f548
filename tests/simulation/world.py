"""A whole cluster in one process: production code on simulated hosts, disks, connections, clocks and ZooKeeper.

What stands for the world is put in the place of gRPC's channels and servers, of the ZooKeeper session, of the store's files
and thread, and of the clocks; everything above them is the code that runs in production.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import seriatim.broker_group.process
import seriatim.consumer.client
import seriatim.consumer.session
import seriatim.coordinator.process
import seriatim.coordinator.service
import seriatim.producer.buffer
import seriatim.producer.loop
from seriatim.broker_group import append, replicate, replication
from seriatim.broker_group.core import cursors, invariants, link_record, replica
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.broker_group.process import BrokerSettings
from seriatim.broker_group.process import serve as serve_broker
from seriatim.broker_group.writer import Write
from seriatim.coordinator import views
from seriatim.coordinator.core import readmission, recovery, rotation
from seriatim.coordinator.core.events import SendGrant
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.execution import Execution
from seriatim.coordinator.process import CoordinatorProcess, CoordinatorSettings
from seriatim.protocol import (
    batch,
    batch_streams,
    chain_json,
    checksums,
    clock,
    coordinators,
    log,
    position,
    rpc,
    streams,
    values,
)
from seriatim.protocol.chain import ChainDocument, Link
from seriatim.protocol.nodes import Paths, queue_id_from
from seriatim.protocol.registration import Registration
from tests.simulation import disk as disks
from tests.simulation.calls import SimulatedChannel, SimulatedServer
from tests.simulation.disk import Disk
from tests.simulation.ensemble import Ensemble, Session
from tests.simulation.holdings import Holdings
from tests.simulation.ledger import Ledger, Violation
from tests.simulation.limits import Limits
from tests.simulation.loop import Host, Process, SimulatedEvent, SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.once import once_described, once_viewed
from tests.simulation.oracle import Oracle
from tests.simulation.queue import Queue
from tests.simulation.readings import JUDGED
from tests.simulation.zookeeper_session import SimulatedSession

_PURE: tuple[tuple[Any, str], ...] = (
    (chain_json, "decode"),
    (chain_json, "is_whole"),
    (Registration, "encode"),
    (Registration, "decode"),
    (link_record, "decode"),
    (position, "hash_after_batch"),
    (cursors, "decode"),
    (batch, "parse"),
    (batch_streams, "parse"),
)
"""What becomes of the same bytes, which never changes: everybody reads the same, and most of them one after the other."""
CLUSTER = "main"
RESERVE_MB = 1
SCRUB_S = 5


class MemberHost(Host):
    """A host with a disk."""

    disk: Disk


@dataclass
class _Clocks:
    """Stands for the module `time` where production asks it for the time."""

    loop: SimulatedLoop
    CLOCK_BOOTTIME: int = 7

    def clock_gettime(self, _: int) -> float:
        return self.loop.time()

    def monotonic(self) -> float:
        return self.loop.time()

    def time(self) -> float:
        return 1_700_000_000 + self.loop.now_s

    def time_ns(self) -> int:
        return int(self.time() * 1_000_000_000)


def names_of(link: Link) -> tuple[str, str]:
    """Of its members."""
    return str(link.master.name), str(link.slave.name)


class World:
    """Hosts by name: `g1-a`, `coordinator-1`, …; ZooKeeper is `zookeeper` in cuts."""

    def __init__(self, seed: object, *, groups: int = 2, coordinators: int = 2, max_steps: int = 400_000) -> None:
        self.chance = random.Random(f"{seed}")
        self.loop = SimulatedLoop(max_steps)
        self.network = Network(self.loop, self.chance)
        self.ensemble = Ensemble(self.loop, self.chance)
        self.hosts: dict[str, Host] = {}
        self.disks: dict[str, Disk] = {}
        self.queues: list[Queue] = []
        self.ledgers: dict[str, Ledger] = {}
        """By queue."""
        self.oracle = Oracle(self.loop, self.disks, self.ledgers)
        self.holdings = Holdings(
            self.loop, self.disks, self.oracle.documents, lambda what: self.violated(Violation(what))
        )
        self.oracle.on_chain = self.holdings.changed
        self.holdings.registered = self._registered
        self.mains: dict[str, Callable[[], Any]] = {}
        self.trace: list[str] | None = None
        self.zookeeper = Host("zookeeper", "10.9.9.9")
        self.dies_at_write: dict[str, tuple[int, bool]] = {}
        """Members that die behind so many more writes: of any kind, or of other than batches."""
        self.at_chain_write: Callable[[], None] | None = None
        """Done once, behind the next write of the chain."""
        self.limits = Limits()
        self.may_seek = True
        """Whether applications may seek: what they do just before ZooKeeper is lost may be in no copy of the chain."""
        self._disk_count = 0
        self._addresses = 0
        self._numbers = itertools.count(1)
        self._lives: list[Process] = []
        self.ensemble.on_write = self._written
        self.ensemble.on_session = self._session_began
        self.ensemble.on_delete = self._deleted
        self._open_before: dict[int, set[LinkKey]] = {}
        self.oracle.sessions = self.ensemble
        self.network.on_request = self.oracle.readings.asked
        self.network.on_reply = self._replied
        self.network.on_refusal = self._refused
        self.loop.on_kill = lambda process: self.kill(process.host.name, is_power=self.chance.random() < 0.5)
        self.reserve_mb = RESERVE_MB  # as it is when the world is made
        self.group_names = [f"g{number + 1}" for number in range(groups)]
        self.coordinator_names = [f"coordinator-{number + 1}" for number in range(coordinators)]
        for name in self.coordinator_names:
            self.add_host(Host(name, self.address(1), *self._clock()))
            self.mains[name] = lambda name=name: self._coordinator(name)  # type: ignore[misc]
        for group in self.group_names:
            self.add_group(group)

    def _clock(self) -> tuple[float, float]:
        return 1 + self.chance.uniform(-0.01, 0.01), self.chance.uniform(0, 1000)

    def address(self, net: int) -> str:
        """One that no host had before."""
        self._addresses += 1
        return f"10.{net}.0.{self._addresses}"

    def add_host(self, host: Host) -> None:
        self.hosts[host.name] = host
        self.network.add(host)

    def add_group(self, group: str) -> None:
        """Two machines more, with blank disks."""
        for member in "ab":
            name = f"{group}-{member}"
            host = MemberHost(name, self.address(2), *self._clock())
            host.disk = self._new_disk(name)
            self.add_host(host)
            self.mains[name] = lambda name=name: self._broker(name)  # type: ignore[misc]

    # ---- queues

    def add_queue(self, name: str) -> Queue:
        """One that there may be; nobody has made it yet."""
        ledger = self.ledgers[name] = Ledger(self.loop)
        queue = Queue(name, ledger, self._chain_of)
        self.queues.append(queue)
        return queue

    def _chain_of(self, name: str) -> ChainDocument | None:
        node = self.ensemble.leader.nodes.get(Paths(CLUSTER).name(name))
        document = None if node is None else self.oracle.documents.get(Paths(CLUSTER).chain(queue_id_from(node.data)))
        return None if document is None or document.is_deleted else document

    @property
    def live_queues(self) -> list[Queue]:
        return [one for one in self.queues if one.is_there]

    def begin_queue(self, queue: Queue) -> None:
        """It is about to be made."""
        queue.number = next(self._numbers)
        queue.is_draining = False
        queue.is_there = True

    def end_queue(self, queue: Queue) -> None:
        """It was deleted: what is made under its name from now on has nothing to do with it."""
        for name in queue.applications:
            self.kill(name, is_power=False)
        queue.is_there = False
        queue.ledger.begin_again()
        self.oracle.forget(queue.name)

    # ---- machines

    def move(self, addresses: Mapping[str, str]) -> None:
        """These hosts, which are down, have other addresses from now on."""
        for name, address in addresses.items():
            host = self.hosts[name]
            self.note(f"{name} goes from {host.address} to {address}")
            host.address = address
            self.network.add(host)

    def remove_group(self, group: str) -> None:
        """The members are switched off, and won't be started again."""
        self.group_names.remove(group)
        for member in "ab":
            name = f"{group}-{member}"
            self.kill(name, is_power=self.chance.random() < 0.5)
            del self.hosts[name]

    def _new_disk(self, name: str) -> Disk:
        self._disk_count += 1
        disk = Disk(f"{name}.{self._disk_count}", self.chance)
        self.disks[disk.disk_id] = disk
        disk.on_write = lambda disk, write: self._disk_written(name, disk, write)
        return disk

    def _registered(self, group: str) -> list[Registration]:
        nodes, paths = self.ensemble.leader.nodes, Paths(CLUSTER)
        found = [nodes.get(paths.member(group, member)) for member in "ab"]
        return [Registration.decode(node.data) for node in found if node is not None]

    def _disk_written(self, name: str, disk: Disk, write: Write) -> None:
        if self.holdings.written(disk, write):
            self.loop.after(0.0, None, self._check_cursors)
        left, is_any = self.dies_at_write.get(name, (0, True))
        if left == 0 or not (is_any or write.size_bytes == 0):
            return
        self.dies_at_write[name] = left - 1, is_any
        if left == 1:
            is_power = self.chance.random() < 0.5
            self.loop.after(0.0, None, lambda: self.kill(name, is_power=is_power))

    def _check_cursors(self) -> None:
        """A member may have written that it lacks no more cursors of a link."""
        for document in self.oracle.documents.values():
            self.told(self.oracle.readings.check_cursors, document)

    @property
    def member_names(self) -> list[str]:
        return [name for name, host in self.hosts.items() if isinstance(host, MemberHost)]

    @property
    def coordinator_addresses(self) -> str:
        return ",".join(f"{self.hosts[name].address}:7000" for name in self.coordinator_names)

    def note(self, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.loop.now_s:9.4f} {self.loop.steps:7d} {what}")

    # ---- processes

    async def _broker(self, name: str) -> None:
        host = self.hosts[name]
        group, member = name.split("-")
        settings = BrokerSettings(
            "zookeeper",
            CLUSTER,
            group,
            member,
            Path("/"),
            listen=f"{host.address}:7000",
            reserve_mb=self.reserve_mb,
            scrub_interval_s=SCRUB_S,
            direct_port=-1,
        )
        stop = asyncio.Event()
        self.at_stop(stop.set)
        await serve_broker(settings, lambda *_: None, stop)

    async def _coordinator(self, name: str) -> None:
        settings = CoordinatorSettings("zookeeper", CLUSTER, f"{self.hosts[name].address}:7000", name=name)
        self.cancel_at_stop()
        await CoordinatorProcess(settings).live(lambda *_: None)

    def running(self) -> Process:
        """The process that runs now."""
        process = self.loop.process
        assert process is not None
        return process

    def at_stop(self, tell: Callable[[], object]) -> None:
        """The process that runs now learns by this that it is asked to end."""
        self.running().at_stop = tell

    def cancel_at_stop(self) -> None:
        """As `asyncio.run` does: the task that runs now is cancelled when its process is asked to end."""
        task = asyncio.current_task()
        assert task is not None
        self.at_stop(task.cancel)

    def start(self, name: str) -> None:
        """Start a host's process, unless it runs."""
        host = self.hosts[name]
        if host.process is not None and host.process.is_alive:
            return
        process = host.process = Process(host)
        self._lives.append(process)
        self.note(f"{name} starts")
        task = self.loop.start(process, self.mains[name])

        def ended(task: Any) -> None:
            if not process.is_alive:
                return
            if not task.cancelled() and task.exception() is not None:
                self.note(f"{name} ends: {task.exception()!r}")
                if not self._is_excused(name):
                    self.violated(Violation(f"12: {name} ended by itself: {task.exception()!r}"))
                self.kill(name, is_power=False)
            elif process.is_stopping:
                self.loop.start(process, lambda: self._run_out(process))

        task.add_done_callback(ended)

    def stop(self, name: str, away_s: float) -> None:
        """Ask a process to end, as SIGTERM does, and start it again so long after its end."""
        process = self.hosts[name].process
        if process is not None and process.is_alive and not process.is_stopping:
            self.note(f"{name} is asked to stop")
            process.is_stopping, process.away_s = True, away_s
            self.loop.after(0.0, process, process.told_to_stop)

    @property
    def stopping(self) -> list[str]:
        """Who was asked to end, and hasn't yet."""
        processes = [host.process for host in self.hosts.values()]
        return [one.host.name for one in processes if one is not None and one.is_alive and one.is_stopping]

    async def _run_out(self, process: Process) -> None:
        """As asyncio.run does it: what still runs is cancelled, and comes to its end, and with it the process."""
        me = asyncio.current_task()
        while rest := [one for one in process.tasks if one is not me and not one.done()]:
            for one in rest:
                one.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        if self.ensemble.sessions_of(process):
            self.violated(Violation(f"12: {process} has stopped, and holds its session"))
        for one in self.loop.unseen_of(process):
            self.violated(Violation(f"not handled: {one}"))
        self.note(f"{process} has stopped")
        self.kill(process.host.name, is_power=False)

    def _is_excused(self, name: str) -> bool:
        """Whether a process may end: its disk fails, or there was no ZooKeeper to begin with."""
        host = self.hosts[name]
        return self.ensemble.is_down or (isinstance(host, MemberHost) and (host.disk.is_failing or host.disk.is_full))

    def kill(self, name: str, *, is_power: bool) -> None:
        """End a process wherever it is; with `is_power`, its machine loses its power."""
        host = self.hosts[name]
        process = host.process
        if process is None or not process.is_alive:
            return
        self.note(f"{name} {'loses its power' if is_power else 'is gone' if process.is_stopping else 'is killed'}")
        process.is_alive = False
        process.backlog.clear()
        self.network.killed(process, is_silent=is_power)
        for session in self.ensemble.sessions_of(process):
            session.heard_of()
        if isinstance(host, MemberHost):
            host.disk.process_died()
            if is_power:
                host.disk.power_failed()
            self.holdings.crashed(host.disk)
        if process.is_stopping:
            self.loop.after(process.away_s, None, self._start_again, host)

    def _start_again(self, host: Host) -> None:
        if self.hosts.get(host.name) is host:  # its machine is still there
            self.start(host.name)

    def pause(self, name: str) -> None:
        process = self.hosts[name].process
        if process is not None and process.is_alive:
            self.note(f"{name} is paused")
            process.is_paused = True
            for session in self.ensemble.sessions_of(process):
                session.heard_of()

    def resume(self, name: str) -> None:
        process = self.hosts[name].process
        if process is not None and process.is_paused:
            self.note(f"{name} goes on")
            self.loop.resume(process)
            for session in self.ensemble.sessions_of(process):
                session.heard_of()

    # ---- the network

    def cut(self, one: str, other: str) -> None:
        """What `one` sends doesn't reach `other`; a cut from ZooKeeper counts for both directions."""
        self.note(f"{one} is cut off from {other}")
        source, target = self._host(one), self._host(other)
        self.network.cut(source, target)
        self._zookeeper_cut(source, target)

    def heal_cut(self, one: str, other: str) -> None:
        self.note(f"{one} reaches {other} again")
        source, target = self._host(one), self._host(other)
        self.network.heal(source, target)
        self._zookeeper_cut(source, target)

    def _host(self, name: str) -> Host:
        return self.zookeeper if name == "zookeeper" else self.hosts[name]

    def _zookeeper_cut(self, source: Host, target: Host) -> None:
        if self.zookeeper not in (source, target):
            return
        host = target if source is self.zookeeper else source
        process = host.process
        if process is None:
            return
        for session in self.ensemble.sessions_of(process):
            session.heard_of()
            if self._is_cut_from_zookeeper(process):
                # The client notices after a third to two thirds of its session's time-out.
                delay_s = session.session_timeout_s * self.chance.uniform(0.2, 0.66)
                self.loop.after(delay_s, None, self._lose_zookeeper, session)
            else:
                session.reached()

    def _lose_zookeeper(self, session: Session) -> None:
        if self._is_cut_from_zookeeper(session.process):
            session.disconnect()

    def _is_cut_from_zookeeper(self, process: Process) -> bool:
        return self.network.are_divided(process.host, self.zookeeper)

    # ---- disks

    def blank_disk(self, name: str) -> None:
        """The disk is replaced; the process on it has to be dead."""
        host = self.hosts[name]
        assert isinstance(host, MemberHost)
        assert host.process is None or not host.process.is_alive
        self.note(f"{name} gets a blank disk")
        host.disk = self._new_disk(name)

    # ---- judging

    def _session_began(self, session_id: int, process: Process) -> None:
        if isinstance(process.host, MemberHost):
            self._open_before[session_id] = process.host.disk.open_links()

    def _deleted(self, path: str, owner: int) -> None:
        """A member that isn't registered any more in a session that lives has left by itself: what is open then is sealed before it comes back.

        A chain that goes is that of a queue that was deleted, or whose making was cut off.
        """
        if "/members/" in path and self.ensemble.is_live(owner):
            self._open_before[owner] = self._member(path).disk.open_links()
        if path.endswith("/chain"):
            self.oracle.documents.pop(path, None)

    def _member(self, path: str) -> MemberHost:
        *_, group, _, member = path.split("/")
        host = self.hosts[f"{group}-{member}"]
        assert isinstance(host, MemberHost)
        return host

    def _check_registration(self, path: str) -> None:
        host = self._member(path)
        if host.disk.distrusted_by is host.process:
            return  # it can seal nothing, takes no more records, and says that its disk failed
        before = self._open_before.get(self.ensemble.leader.nodes[path].owner, set())
        unsealed = {key for key in before & host.disk.open_links() if self._is_kept(key)}
        if unsealed:
            self.violated(Violation(f"5.5: {host} registers before it sealed {sorted(unsealed)}"))

    def _is_kept(self, key: LinkKey) -> bool:
        """Whether the chain has it still: one that it let go takes no records, though its member may not have cleared it away yet."""
        document = self.oracle.documents.get(Paths(CLUSTER).chain(key[0]))
        return document is not None and not document.is_deleted and key[1] >= document.dropped.epoch

    def _written(self, path: str, data: bytes, version: int) -> None:
        if version == 0 and "/members/" in path:
            self._check_registration(path)
        self.told(self.oracle.written, path, data, version)
        if self.at_chain_write is not None and path.endswith("/chain"):
            happens, self.at_chain_write = self.at_chain_write, None
            happens()
        if self.trace is not None and path in self.oracle.documents:
            document = self.oracle.documents[path]
            links = " ".join(f"{link.epoch}:{link.group}:{link.state}:{link.end}" for link in document.links)
            lists = " ".join(f"{one.name}={one.consume_list}" for one in document.subscriptions)
            self.note(
                f"chain of {document.name} {version}: send={document.send_list} {links} {lists} token={document.sender_token}"
            )

    def _replied(self, path: str, request: Any, reply: Any, known: Any) -> None:
        if (method := path.rpartition("/")[2]) in JUDGED:
            self.told(self.oracle.readings.replied, method, request, reply, known)

    def _refused(self, path: str, request: Any, details: str) -> None:
        self.told(self.oracle.readings.refused, path.rpartition("/")[2], request, details)

    def told(self, tell: Callable[..., None], *arguments: Any) -> None:
        """Tell ledger or oracle what happened: nothing goes on where that breaks an invariant."""
        try:
            tell(*arguments)
        except Exception as error:  # one of their own would be lost, and with it the answer that was looked at
            self.violated(error if isinstance(error, Violation) else Violation(repr(error)))

    def violated(self, violation: Violation) -> None:
        """Nothing goes on after this."""
        self.note(f"VIOLATION {violation}")
        self.loop.failure = self.loop.failure or violation


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """Put the world in the place of what production finds outside, while the block runs."""
    values.make_faster()
    loop, network = world.loop, world.network
    clocks = _Clocks(loop)
    right_step, right_run, right_eligible = replica.step, Execution.run, readmission.eligible

    def session(hosts: str, timeout_s: float) -> SimulatedSession:
        return SimulatedSession(world.ensemble, network, world.zookeeper, hosts, timeout_s)

    def open_store(_: Path, place: str, _segment_bytes: int) -> Any:
        del place
        process = loop.process
        assert process is not None
        assert isinstance(process.host, MemberHost)
        return disks.opened(process.host.disk, loop, process)

    def step(state: Any, event: Any) -> Any:
        after, effects = right_step(state, event)
        try:
            invariants.check(after)
            world.oracle.stepped(after, event, effects)
        except Exception as error:
            world.violated(error if isinstance(error, Violation) else Violation(repr(error)))
        return after, effects

    def eligible(document: ChainDocument, registry: Registry) -> tuple[str, ...]:
        groups = right_eligible(document, registry)
        world.holdings.vouched(document, registry, groups)
        return groups

    async def run(self: Execution, queue_id: Any, begun: Any, procedure: Any, cause_id: str) -> Any:
        result = await right_run(self, queue_id, begun, procedure, cause_id)
        if isinstance(result, SendGrant):
            world.told(world.oracle.send_granted, queue_id, result.link.epoch, result.token)
        return result

    def send_now(call: Any, message: Any) -> bool:
        return network.is_direct and call is not None and bool(call.write_now(message))

    causes = itertools.count()
    replaced: list[tuple[Any, str, Any]] = [
        (asyncio, "Event", SimulatedEvent),
        # There is but one; asyncio's own asks the system each time which process this is.
        *((module, "get_running_loop", itertools.repeat(loop).__next__) for module in (asyncio, asyncio.events)),
        (log, "new_cause_id", lambda event: f"{event}-{next(causes)}"),
        *((owner, name, functools.lru_cache(maxsize=256)(getattr(owner, name))) for owner, name in _PURE),
        (views, "queue_view", once_described(views.queue_view)),
        (seriatim.consumer.session, "chain_view", once_viewed(seriatim.consumer.session.chain_view)),
        (coordinators, "uniform", random.Random(0).uniform),
        # Messages are handed on as they are: nothing to be written or read by a stub, which is made for each of hundreds of addresses.
        (checksums, "CheckedChannel", lambda channel: channel),
        (rpc, "channel", lambda address, **_: SimulatedChannel(network, address)),
        (rpc, "server", lambda *_, **__: SimulatedServer(network)),
        (rpc, "connect", lambda _: None),
        (rpc, "listen", network.listen),
        *((module, "send_now", send_now) for module in (append, replicate, replication, streams)),
        (batch_streams, "_direct", network.connected),
        (seriatim.broker_group.process, "ZooKeeperSession", session),
        (seriatim.coordinator.process, "ZooKeeperSession", session),
        (seriatim.producer.loop, "ZooKeeperSession", session),
        (seriatim.consumer.session, "ZooKeeperSession", session),
        (seriatim.broker_group.process, "open_store", open_store),
        (clock, "time", clocks),
        (seriatim.producer.loop, "time", clocks),
        (seriatim.producer.buffer, "_now_ns", clocks.time_ns),
        (seriatim.consumer.client, "time", clocks),
        (rotation, "NEAR_RECORDS", 20),
        (recovery, "BEYOND", 20),
        *world.limits.changed,
        (replica, "step", step),
        (readmission, "eligible", eligible),
        (Execution, "run", run),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    # Nobody asks for all tasks here: a set of those of all schedules, where each takes its time to come and go.
    known = vars(asyncio.tasks)
    all_tasks: Any = known["_all_tasks" if "_all_tasks" in known else "_scheduled_tasks"]  # its name since Python 3.12
    all_tasks.add = id  # does nothing, in the least time
    try:
        yield
    finally:
        del all_tasks.add
        for owner, name, value in before:
            setattr(owner, name, value)
