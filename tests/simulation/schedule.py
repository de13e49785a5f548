"""One schedule: a seed decides the cluster, its load, what breaks when, and every delay in between.

quiet start - load, and faults at any step - everything healed - all must be well again: read to the end, in sync, listed
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import Link
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import Incarnation
from seriatim.protocol.zookeeper import Paths, Registration
from tests.simulation.applications import QUEUE, Reader, Sender
from tests.simulation.disk import Disk
from tests.simulation.ensemble import CUT_OFF_SERVER_S
from tests.simulation.loop import EndOfSteps, Host, Step
from tests.simulation.oracle import Violation
from tests.simulation.scenarios import IDLE, SCENARIOS, give_up_lost, settle_idle
from tests.simulation.world import CLUSTER, MemberHost, World, installed

START_S = 60.0
HEAL_S = 120.0
OPERATOR_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule. `failure`: what didn't hold, "" for nothing. `faults`: kinds, in their order."""

    seed: int
    failure: str
    steps: int
    simulated_s: float
    real_s: float
    records: int
    faults: tuple[str, ...]
    trace: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Shape:
    """What a schedule is drawn from. `kinds`: of faults, none for all. `groups`, `coordinators`: how many, by chance.

    `settings`: of the queue. `faults`: at least and at most so many. `senders`: below 0.6 with seqs of one log, below 0.8
    each under a name of its own, else all under one; None for any. `lasts_s`: how long the last faults go on, at most.
    `pause_s`: between records of a sender.
    `paces`: of readers, in records each 0.1 s, beside 2.5 on average that are sent.
    """

    kinds: tuple[str, ...] = ()
    groups: tuple[int, ...] = (2, 2, 2, 3)
    coordinators: tuple[int, ...] = (1, 2, 2)
    settings: pb.QueueSettings | None = None
    faults: tuple[int, int] = (1, 4)
    senders: float | None = None
    lasts_s: tuple[float, ...] = (0.1, 1.0, 5.0)
    paces: tuple[int, ...] = (1000, 1000, 4)
    pause_s: float = 0.1


class Stuck(Violation):
    """Everything is healed, and yet something that must happen doesn't (invariant 12)."""


class Schedule:
    """See the module."""

    def __init__(self, seed: int, shape: Shape, *, is_traced: bool = False) -> None:
        self.seed = seed
        self.shape = shape
        self.chance = random.Random(f"schedule {seed}")
        groups, coordinators = self.chance.choice(shape.groups), self.chance.choice(shape.coordinators)
        self.world = World(seed, groups=groups, coordinators=coordinators)
        self._kinds = list(shape.kinds or KINDS)
        self.faults: list[str] = []
        if is_traced:
            self.world.trace = []
        self._pending: list[Step] = []
        self.settings = shape.settings or self._any_settings()
        self._damaged_groups: set[str] = set()
        self._damaged_keys: set[bytes] = set()

    def _any_settings(self) -> pb.QueueSettings:
        durability = self.chance.choices(("sync", "interval", "async", "memory"), (7, 1, 1, 1))[0]
        flush_ms = self.chance.choice((5, 200))
        return pb.QueueSettings(
            durability=durability,
            flush_ms=flush_ms,
            readmit=self.chance.choices(("drained", "in-sync"), (3, 1))[0],
        )

    # ---- the whole

    def go(self) -> None:
        world, chance = self.world, self.chance
        world.network.mean_delay_s = chance.choice((0.0002, 0.001, 0.01))
        world.ensemble.lag_s = chance.choice((0.001, 0.004, 0.02))
        world.ensemble.cut_off_server_s = random.Random(f"cut off {self.seed}").choice(CUT_OFF_SERVER_S)
        self._add_applications()
        self._start()
        self.until(lambda: QUEUE in {one.name for one in world.oracle.documents.values()}, "the queue is made", START_S)
        self.until(lambda: self._kept() > 0, "the first record is kept", START_S)
        for _ in range(chance.randint(*self.shape.faults)):
            world.loop.run(world.loop.now_s + chance.choice((0.05, 0.5, 2.0)) * chance.random())
            self._harm()
        world.loop.run(world.loop.now_s + chance.choice(self.shape.lasts_s) * chance.random())
        self._heal()
        self._settle()

    def _start(self) -> None:
        """All at once, or, as people do it, members first and applications last; the latter is cheaper."""
        world = self.world
        first = [*world.member_names, *world.coordinator_names, "operator"]
        is_hasty = self.chance.random() < 0.1
        for name in first:
            delay_s = 0.0 if is_hasty or name in world.member_names else 0.2
            self.later(delay_s, world.start, name)
        if not is_hasty:
            self.until(lambda: bool(world.oracle.documents), "the queue is made", START_S)
        for name in world.hosts:
            world.start(name)

    def _add_applications(self) -> None:
        world, chance = self.world, self.chance
        mode = chance.random()
        mode = mode if self.shape.senders is None else self.shape.senders
        for name in ("sender-1", "sender-2"):
            source = name if mode < 0.8 else "sender"
            self.add(name, Sender(world, source, has_own_seqs=mode < 0.6, pause_s=self.shape.pause_s).main)
        pace = random.Random(f"pace {self.seed}").choice(self.shape.paces)
        readers = {"reader-1": "main", "reader-2": "main"} | ({"audit": "audit"} if chance.random() < 0.4 else {})
        for name, subscription in readers.items():
            self.add(name, Reader(world, name, subscription, pace).main)
        self.add("operator", self._create_queue)

    def add(self, name: str, main: Callable) -> None:
        world = self.world
        world.add_host(Host(name, f"10.3.0.{len(world.hosts) + 1}", *world._clock()))
        world.mains[name] = main

    async def _create_queue(self) -> None:
        coordinators = Coordinators(self.world.coordinator_addresses)
        request = pb.CreateQueueRequest(queue=QUEUE, settings=self.settings)
        await coordinators.call_within("CreateQueue", request, 50.0)

    def _kept(self) -> int:
        return sum(sent.acknowledged_at_s is not None for sent in self.world.oracle.sent.values())

    def until(self, is_so: Callable[[], bool], what: str, within_s: float) -> None:
        loop = self.world.loop
        if not loop.run(loop.now_s + within_s, is_so):
            self._note_state()
            raise Stuck(f"12: not within {within_s:g} s: {what}")

    def _note_state(self) -> None:
        """For whoever reads the trace: where everything stands."""
        world, oracle = self.world, self.world.oracle
        unread = [
            one for one, sent in oracle.sent.items() if sent.acknowledged_at_s is not None and one not in oracle.places
        ]
        world.note(f"kept, not read: {unread}")
        for name, progress in oracle.progress.items():
            world.note(
                f"{name} was handed {len(progress.delivered)} of {len(oracle.records)}, committed {progress.committed}"
            )
        document = world.document
        if document is not None:
            world.note(f"send list {document.send_list}, stale cursors {document.stale_cursors}")
            for link in document.links:
                world.note(f"link {link.epoch} {link.group} {link.state} end={link.end} {link.master.incarnation}")
            for one in document.subscriptions:
                world.note(f"subscription {one.name} {one.consume_list}")
        for path, node in world.ensemble.leader.nodes.items():
            if "/members/" in path:
                world.note(f"{path} {node.data!r}")

    # ---- harm

    def _harm(self) -> None:
        kind = self.chance.choices(self._kinds, [KINDS[kind][0] for kind in self._kinds])[0]
        self.faults.append(kind)
        self.world.note(f"FAULT {kind}")
        KINDS[kind][1](self)

    def later(self, seconds: float, callback: Callable[..., object], *arguments: object) -> None:
        """Unless everything is healed before."""
        self._pending.append(self.world.loop.after(seconds, None, callback, *arguments))

    def some_s(self) -> float:
        return self.chance.choice((0.2, 2.0, 8.0)) * self.chance.random()

    def _any(self) -> str:
        document = self.world.document
        link = None if document is None else document.last_link
        names = [name for name in self.world.hosts if name != "operator"]
        if link is not None and self.chance.random() < 0.5:
            names = [str(link.master.name), str(link.slave.name)]
        return self.chance.choice(names)

    def any_member(self) -> str:
        name = self._any()
        return name if name in self.world.member_names else self.chance.choice(self.world.member_names)

    def _disk(self, name: str) -> Disk:
        host = self.world.hosts[name]
        assert isinstance(host, MemberHost)
        return host.disk

    def _is_twice(self, name: str, key: bytes) -> bool:
        """Whether the other member has this batch, or cursor, too, so that one may be lost."""
        group, member = name.split("-")
        other = self._disk(f"{group}-{'b' if member == 'a' else 'a'}")
        return other.durable.values.get(key) == self._disk(name).table.values[key]

    def _application(self) -> str:
        return self.chance.choice([name for name in self.world.hosts if name.startswith(("sender", "reader", "audit"))])

    def kill_application(self) -> None:
        self._dies(self._application(), False)

    def pause_application(self) -> None:
        """Not long enough for another one to be elected, or just so."""
        name = self._application()
        self.world.pause(name)
        seconds = 2 * self.chance.random() if self.chance.random() < 0.5 else 4 + 3 * self.chance.random()
        self.later(seconds, self.world.resume, name)

    def pause_coordinator(self) -> None:
        name = self.chance.choice(self.world.coordinator_names)
        self.world.pause(name)
        self.later(self.some_s(), self.world.resume, name)

    def slow_path(self) -> None:
        """What one host sends to another is late, and late enough to be overtaken by what others do."""
        one, other = self._any(), self._any()
        late_s = self.chance.choice((0.05, 0.3, 1.0)) * self.chance.random()
        self.world.note(f"what {one} sends to {other} is {late_s:.3f} s late")
        slow_s = self.world.network.slow_s
        slow_s[one, other] = late_s
        self.later(self.some_s(), slow_s.pop, (one, other), None)

    def cut_application(self) -> None:
        """From ZooKeeper, for long."""
        name, seconds = self._application(), 8 * self.chance.random()
        for direction in ((name, "zookeeper"), ("zookeeper", name)):
            self.world.cut(*direction)
            self.later(seconds, self.world.heal_cut, *direction)

    def cut_pair(self) -> None:
        """The members of a group lose each other."""
        one, seconds = self.any_member(), 8 * self.chance.random()
        other = one[:-1] + ("b" if one.endswith("a") else "a")
        for direction in ((one, other), (other, one)):
            self.world.cut(*direction)
            self.later(seconds, self.world.heal_cut, *direction)

    def _link_read(self) -> Link | None:
        document = self.world.document
        heads = [] if document is None else [one.consume_list[0] for one in document.subscriptions if one.consume_list]
        return None if document is None or not heads else document.link(self.chance.choice(heads))

    def kill_reader_and_member(self) -> None:
        """Readers die, and with them, for longer, a member of a link that is being read: they were on one machine."""
        link = self._link_read()
        if link is not None:
            self._kill_with_readers(link)

    def divide_and_kill(self) -> None:
        """The members of a link that is being read lose each other; a moment later its readers and one of them die."""
        link = self._link_read()
        if link is None:
            return
        names = str(link.master.name), str(link.slave.name)
        for direction in (names, names[::-1]):
            self.world.cut(*direction)
            self.later(8.0, self.world.heal_cut, *direction)
        self.later(0.5 + 1.5 * self.chance.random(), self._kill_with_readers, link)

    def _kill_with_readers(self, link: Link) -> None:
        for name in self.world.hosts:
            if name.startswith(("reader", "audit")):
                self._dies(name, False)
        member = str(self.chance.choice((link.master, link.slave)).name)
        self.world.kill(member, is_power=True)
        self.later(4 + 5 * self.chance.random(), self.world.start, member)

    def kill(self) -> None:
        name = self._any()
        self._dies(name, self.chance.random() < 0.5)

    def _dies(self, name: str, is_power: bool) -> None:
        self.world.kill(name, is_power=is_power)
        self.later(0.05 + self.some_s(), self.world.start, name)

    def kill_at_step(self) -> None:
        name = self._any()
        process = self.world.hosts[name].process
        if process is not None and process.is_alive:
            process.steps_to_live = self.chance.randint(0, 400)
            self.world.note(f"{name} has {process.steps_to_live} steps to live")
        self.later(2 + self.some_s(), self.world.start, name)

    def kill_both(self) -> None:
        document = self.world.document
        link = None if document is None else document.last_link
        if link is not None:
            is_power = self.chance.random() < 0.5
            for side in (link.master, link.slave):
                self.later(self.chance.choice((0.0, 0.01)), self._dies, str(side.name), is_power)

    def kill_all(self) -> None:
        is_power = self.chance.random() < 0.5
        for name in self.world.hosts:
            if name != "operator":
                self._dies(name, is_power)

    def pause(self) -> None:
        name = self._any()
        self.world.pause(name)
        self.later(self.some_s(), self.world.resume, name)

    def pause_slave(self) -> None:
        """Of the head: what is on its way then is on the master alone."""
        document = self.world.document
        link = None if document is None else document.last_link
        if link is not None:
            self.world.pause(str(link.slave.name))
            self.later(self.some_s(), self.world.resume, str(link.slave.name))

    def cut(self) -> None:
        one, other = self._any(), self._any()
        if self.chance.random() < 0.3:
            other = "zookeeper"
        if one == other:
            return
        directions = [(one, other), (other, one)]
        if self.chance.random() < 0.3:
            directions = directions[:1]
        seconds = self.some_s()
        for direction in directions:
            self.world.cut(*direction)
            self.later(seconds, self.world.heal_cut, *direction)

    def isolate(self) -> None:
        """A machine is cut off from everybody."""
        name, seconds = self._any(), self.some_s()
        for other in (*self.world.hosts, "zookeeper"):
            if other != name:
                for direction in ((name, other), (other, name)):
                    self.world.cut(*direction)
                    self.later(seconds, self.world.heal_cut, *direction)

    def reset_connections(self) -> None:
        one, other = self._any(), self._any()
        self.world.note(f"connections of {one} and {other} are reset")
        self.world.network.break_between(self.world.hosts[one], self.world.hosts[other])

    def _expire(self, name: str) -> None:
        process = self.world.hosts[name].process
        if process is not None:
            for session in self.world.ensemble.sessions_of(process):
                self.world.note(f"the session of {process} expires")
                self.world.ensemble.expire(session.session_id)
                session.disconnect()

    def strain_sender(self) -> None:
        """What a sender has sent to the master comes late, and meanwhile its session expires."""
        name, document = self.chance.choice(("sender-1", "sender-2")), self.world.document
        link = None if document is None else document.last_link
        if link is not None:
            path, late_s = (name, str(link.master.name)), 0.05 + 0.5 * self.chance.random()
            self.world.note(f"what {name} sends to {link.master.name} is {late_s:.3f} s late")
            self.world.network.slow_s[path] = late_s
            self.later(0.1 * self.chance.random(), self._expire, name)
            self.later(1.0, self.world.network.slow_s.pop, path, None)

    def expire_session(self) -> None:
        self._expire(self._any())

    def expire_application(self) -> None:
        self._expire(self._application())

    def cut_off_server(self) -> None:
        server = self.chance.choice(self.world.ensemble.servers)
        self.world.note(f"ZooKeeper server {server.number} is cut off")
        self.world.ensemble.cut_off(server)
        self.later(self.some_s(), self.world.ensemble.rejoin, server)

    def stop_zookeeper(self) -> None:
        self.world.note("ZooKeeper stops")
        self.world.ensemble.stop()
        self.later(self.some_s(), self.world.ensemble.go_on)

    def blank_disk(self) -> None:
        """Only where the other member's disk is sound, and holds what this one does: else an operator has to abandon it."""
        name = self.any_member()
        group = name.split("-")[0]
        kept = [key for kind in (b"B", b"C") for key in self._disk(name).keys(kind)]
        if group in self._damaged_groups or not all(self._is_twice(name, key) for key in kept):
            return
        self._damaged_groups.add(group)
        self.world.kill(name, is_power=True)
        self.world.blank_disk(name)
        self.later(self.some_s(), self.world.start, name)

    def damage(self) -> None:
        name = self.any_member()
        group = name.split("-")[0]
        keys = [key for key in self._disk(name).keys(b"B") if self._is_twice(name, key)]
        if group in self._damaged_groups or not keys:
            return
        self._damaged_groups.add(group)
        key = self.chance.choice(keys)
        self.world.note(f"{name} returns damaged data for {key.hex()}")
        self._disk(name).damage(key)
        self._damaged_keys.add(key)
        if self.chance.random() < 0.5:
            self._dies(name, False)

    def disk_fails(self) -> None:
        name = self.any_member()
        disk = self._disk(name)
        self.world.note(f"the disk of {name} fails")
        disk.is_failing = True

        def mend() -> None:
            disk.is_failing = False
            self._dies(name, True)

        self.later(self.some_s(), mend)

    def disk_full(self) -> None:
        name = self.any_member()
        disk = self._disk(name)
        self.world.note(f"the disk of {name} is full")
        disk.is_full = True

        def mend() -> None:
            disk.is_full = False
            self._dies(name, False)

        self.later(self.some_s(), mend)

    def slow_disk(self) -> None:
        self.slow_down(self.any_member(), self.chance.choice((0.02, 0.3, 1.0)), self.some_s())

    def slow_down(self, name: str, flush_s: float, for_s: float) -> None:
        """A member's disk, for a while."""
        disk = self._disk(name)
        disk.flush_s = flush_s
        self.world.note(f"the disk of {name} is slow: {flush_s} s a flush")

        def mend() -> None:
            disk.flush_s = 0.002

        self.later(for_s, mend)

    def rotate(self) -> None:
        self.operate("RotateQueue", pb.QueueRequest(queue=QUEUE))

    def drain_group(self) -> None:
        group = self.chance.choice(self.world.group_names)
        self.operate("DrainGroup", pb.GroupRequest(group=group))
        self.later(self.some_s(), self.operate, "ResumeGroup", pb.GroupRequest(group=group))

    def seek(self) -> None:
        """Back to the beginning, to that of a link, or to anywhere: over nothing that wasn't read before."""
        document = self.world.document
        assert document is not None
        subscription = self.chance.choice([one.name for one in document.subscriptions])
        reached = max(self.world.oracle.progress[subscription].delivered, default=0)
        starts = [str(link.base) for link in document.links if link.base is not None and link.base <= reached]
        to = self.chance.choice((str(self.chance.randint(0, reached)), self.chance.choice(starts or ["0"]), "earliest"))
        self.operate("SeekSubscription", pb.SeekSubscriptionRequest(queue=QUEUE, subscription=subscription, to=to))

    def operate(self, method: str, request: object) -> None:
        world = self.world

        async def operate() -> None:
            try:
                await Coordinators(world.coordinator_addresses).call_within(method, request, OPERATOR_PATIENCE_S)
            except SeriatimError as error:
                world.note(f"{method} is refused: {error}")

        process = world.hosts["operator"].process
        assert process is not None
        world.note(f"an operator asks for {method}")
        world.loop.start(process, operate)

    # ---- and after it

    def _heal(self) -> None:
        world = self.world
        world.note("everything is healed")
        world.dies_at_write.clear()
        world.dies_at_chain_write = False
        world.network.damages = 0
        world.ensemble.heal()
        world.network.heal_all()
        for server in world.ensemble.servers:
            for session in list(server.sessions):
                session.reached()
        for name, host in world.hosts.items():
            world.resume(name)
            if isinstance(host, MemberHost):
                host.disk.flush_s = 0.002
                host.disk.room_bytes = None
                if host.disk.is_failing or host.disk.is_full:
                    host.disk.is_failing = host.disk.is_full = False
                    world.kill(name, is_power=False)
            if host.process is not None:
                host.process.steps_to_live = None
            world.start(name)
            process = host.process
            assert process is not None
            for session in world.ensemble.sessions_of(process):
                session.heard_of()

    def _settle(self) -> None:
        world, oracle = self.world, self.world.oracle
        self._resume_operator()
        self.later(OPERATOR_PATIENCE_S + 1, self._resume_operator)  # a drain that was asked for before may come late
        self.until_sending_goes_on(HEAL_S)
        world.is_draining = True
        self.until(self.is_all_read, "everything is read", HEAL_S)
        self.until(self._is_whole, "every group is whole, in sync and listed", HEAL_S)
        self.until(self.is_all_read, "what was acknowledged last is read", HEAL_S)
        oracle.check_end()
        document = world.document
        assert document is not None
        by_name = {name: host.disk for name, host in world.hosts.items() if isinstance(host, MemberHost)}
        oracle.check_copies(document, by_name, self._damaged_keys)
        if world.loop.problems:
            raise Violation(f"not handled: {world.loop.problems[0]}")

    def until_sending_goes_on(self, within_s: float) -> None:
        """Something sent from now on is acknowledged."""
        now_s = self.world.loop.now_s
        sent = self.world.oracle.sent

        def goes_on() -> bool:
            return any((one.acknowledged_at_s or 0) > now_s and one.at_s > now_s for one in sent.values())

        self.until(goes_on, "sending goes on", within_s)

    def calm(self) -> None:
        """Everything is healed, and no fault is under way; all is well again, while records flow."""
        for step in self._pending:
            step.cancel()
        self._pending.clear()
        self._heal()
        self._resume_operator()
        self.until_sending_goes_on(HEAL_S)
        self.until(self._is_whole, "every group is whole, in sync and listed", HEAL_S)

    def has_damaged(self, group: str) -> bool:
        """Whether one of the group's two copies is spoilt."""
        return group in self._damaged_groups

    def note_damaged(self, group: str) -> None:
        self._damaged_groups.add(group)

    def _resume_operator(self) -> None:
        for group in self.world.group_names:
            self.operate("ResumeGroup", pb.GroupRequest(group=group))
        settle_idle(self)
        self.later(15.0, give_up_lost, self)

    def is_all_read(self) -> bool:
        """Every subscription was handed all that was acknowledged."""
        oracle = self.world.oracle
        return not oracle.undelivered() and not any(oracle.lacking(name) for name in oracle.progress)

    def _is_present(self, name: str) -> bool:
        """Whether the process that runs now is registered, and says that it lacks nothing."""
        host = self.world.hosts[name]
        assert isinstance(host, MemberHost)
        registration = _registration(self.world, name)
        now = Incarnation(host.disk.disk_id, host.disk.starts)
        return registration is not None and registration.incarnation == now and registration.is_in_sync

    def _is_whole(self) -> bool:
        document = self.world.document
        if document is None or set(document.send_list) != set(self.world.group_names):
            return False
        if not all(self._is_present(name) for name in self.world.member_names):
            return False
        return all(link.certificate is not None for link in document.links[:-1]) and all(
            one.name == IDLE or not one.consume_list or one.consume_list == (document.links[-1].epoch,)
            for one in document.subscriptions
        )


def _registration(world: World, name: str) -> Registration | None:
    group, member = name.split("-")
    node = world.ensemble.leader.nodes.get(Paths(CLUSTER).member(group, member))
    return None if node is None else Registration.decode(node.data)


KINDS: dict[str, tuple[float, Callable[[Schedule], None]]] = {
    "kill": (8, Schedule.kill),
    "kill at a step": (10, Schedule.kill_at_step),
    "kill both members": (3, Schedule.kill_both),
    "kill all": (2, Schedule.kill_all),
    "pause": (8, Schedule.pause),
    "cut": (8, Schedule.cut),
    "isolate": (3, Schedule.isolate),
    "reset connections": (4, Schedule.reset_connections),
    "expire session": (4, Schedule.expire_session),
    "cut off a ZooKeeper server": (3, Schedule.cut_off_server),
    "stop ZooKeeper": (2, Schedule.stop_zookeeper),
    "blank disk": (3, Schedule.blank_disk),
    "damage": (3, Schedule.damage),
    "disk fails": (2, Schedule.disk_fails),
    "disk full": (2, Schedule.disk_full),
    "slow disk": (3, Schedule.slow_disk),
    "rotate": (4, Schedule.rotate),
    "drain group": (3, Schedule.drain_group),
    "seek": (3, Schedule.seek),
    "kill an application": (3, Schedule.kill_application),
    "pause an application": (4, Schedule.pause_application),
    "pause a coordinator": (2, Schedule.pause_coordinator),
    "cut an application from ZooKeeper": (2, Schedule.cut_application),
    "cut a pair": (2, Schedule.cut_pair),
    "divide and kill": (2, Schedule.divide_and_kill),
    "kill a reader and whom it reads": (2, Schedule.kill_reader_and_member),
    "pause the slave": (2, Schedule.pause_slave),
    "slow path": (4, Schedule.slow_path),
    "expire an application's session": (2, Schedule.expire_application),
    "strain a sender": (2, Schedule.strain_sender),
    **SCENARIOS,
}


COLLECT_EVERY = 16


def run(seed: int, shape: Shape | None = None, *, is_traced: bool = False) -> Outcome:
    """Run the schedule of a seed; the same seed and shape give the same steps."""
    gc.disable()
    ignoring, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return _outcome(seed, shape or Shape(), is_traced=is_traced)
    finally:
        # Tasks that never ended are let go here, and not during a schedule; what they still say goes nowhere.
        if seed % COLLECT_EVERY == 0:
            gc.collect()
        sys.unraisablehook = ignoring


@contextlib.contextmanager
def _logged(world: World) -> Iterator[None]:
    """What the processes log becomes part of the trace; without one nothing is logged."""
    logger = logging.getLogger("seriatim")
    before = logger.level, logger.propagate
    handler = _TraceHandler(world)
    logger.setLevel(logging.CRITICAL + 1 if world.trace is None else logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _TraceHandler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"  {self._world.loop.process}: {record.getMessage()}")


def _outcome(seed: int, shape: Shape, *, is_traced: bool) -> Outcome:
    began_s = time.perf_counter()
    schedule = Schedule(seed, shape, is_traced=is_traced)
    world, failure = schedule.world, ""
    with installed(world), _logged(world):
        try:
            schedule.go()
        except (Violation, EndOfSteps) as error:
            failure = f"{type(error).__name__}: {error}"
        world.loop.is_over = True
    return Outcome(
        seed,
        failure,
        world.loop.steps,
        world.loop.now_s,
        time.perf_counter() - began_s,
        len(world.oracle.records),
        tuple(schedule.faults),
        tuple(world.trace or ()),
    )
