"""What breaks: each kind of harm, who is chosen for it, for how long, and how it is undone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import Link
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from tests.simulation.disk import Disk
from tests.simulation.loop import Step
from tests.simulation.queue import Queue
from tests.simulation.world import MemberHost, World, names_of

OPERATOR_PATIENCE_S = 20.0


class Nemesis:
    """Harms a world by chance. What is to be undone later is undone by itself, unless everything is healed before.

    `queue`: the one that the present fault is about, as far as it is about one.
    """

    def __init__(self, world: World, queue: Queue, chance: random.Random) -> None:
        self.world = world
        self.queue = queue
        self.chance = chance
        self._pending: list[Step] = []
        self._damaged_groups: set[str] = set()
        self._damaged_keys: set[bytes] = set()
        self._operator = asyncio.Lock()

    def later(self, seconds: float, callback: Callable[..., object], *arguments: object) -> None:
        """Unless everything is healed before."""
        self._pending.append(self.world.loop.after(seconds, None, callback, *arguments))

    def some_s(self) -> float:
        return self.chance.choice((0.2, 2.0, 8.0)) * self.chance.random()

    def _any(self) -> str:
        link = self.queue.head
        names = [name for name in self.world.hosts if name != "operator"]
        if link is not None and self.chance.random() < 0.5:
            names = [*names_of(link)]
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

    def cut_for(self, seconds: float, *directions: tuple[str, str]) -> None:
        """What the first of each sends doesn't reach the second."""
        for direction in directions:
            self.world.cut(*direction)
            self.later(seconds, self.world.heal_cut, *direction)

    def cut_application(self) -> None:
        """From ZooKeeper, for long."""
        name, seconds = self._application(), 8 * self.chance.random()
        self.cut_for(seconds, (name, "zookeeper"), ("zookeeper", name))

    def cut_pair(self) -> None:
        """The members of a group lose each other."""
        one, seconds = self.any_member(), 8 * self.chance.random()
        other = one[:-1] + ("b" if one.endswith("a") else "a")
        self.cut_for(seconds, (one, other), (other, one))

    def link_read(self) -> Link | None:
        """One that is being read."""
        document = self.queue.document
        heads = [] if document is None else [one.consume_list[0] for one in document.subscriptions if one.consume_list]
        return None if document is None or not heads else document.link(self.chance.choice(heads))

    def kill_reader_and_member(self) -> None:
        """Readers die, and with them, for longer, a member of a link that is being read: they were on one machine."""
        link = self.link_read()
        if link is not None:
            self._kill_with_readers(link, self.readers)

    def divide_and_kill(self) -> None:
        """The members of a link that is being read lose each other; a moment later its readers and one of them die."""
        link = self.link_read()
        if link is None:
            return
        names = names_of(link)
        self.cut_for(8.0, names, names[::-1])
        self.later(0.5 + 1.5 * self.chance.random(), self._kill_with_readers, link, self.readers)

    @property
    def readers(self) -> list[str]:
        """Whoever reads for a subscription that there is from the start."""
        return [name for name in self.queue.readers if name.startswith(("reader", "audit"))]

    def kill_readers(self) -> None:
        for name in self.readers:
            self._dies(name, False)

    def _kill_with_readers(self, link: Link, readers: list[str]) -> None:
        for name in readers:
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
        link = self.queue.head
        if link is not None:
            is_power = self.chance.random() < 0.5
            for name in names_of(link):
                self.later(self.chance.choice((0.0, 0.01)), self._dies, name, is_power)

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
        link = self.queue.head
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
        self.cut_for(seconds, *directions)

    def isolate(self) -> None:
        """A machine is cut off from everybody."""
        name, seconds = self._any(), self.some_s()
        for other in (*self.world.hosts, "zookeeper"):
            if other != name:
                self.cut_for(seconds, (name, other), (other, name))

    def reset_connections(self) -> None:
        one, other = self._any(), self._any()
        self.world.note(f"connections of {one} and {other} are reset")
        self.world.network.break_between(self.world.hosts[one], self.world.hosts[other])

    def _expire(self, name: str) -> None:
        for session in self.world.ensemble.sessions_of(self.world.hosts[name].process):
            self.world.note(f"the session of {session.process} expires")
            self.world.ensemble.expire(session.session_id)
            session.disconnect()

    def strain_sender(self) -> None:
        """What a sender has sent to the master comes late, and meanwhile its session expires."""
        name, link = self.chance.choice(self.queue.senders), self.queue.head
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

    def slow_zookeeper(self) -> None:
        """Its disks take long for each flush: a write is decided late, also after its client was let in by another server and looked.

        What sessions begin with is written, so some of them end meanwhile.
        """
        ensemble, chance = self.world.ensemble, self.chance
        slow_s, seconds = chance.choice((0.1, 0.5, 1.5)), self.some_s()
        self.world.note(f"ZooKeeper is slow: up to {slow_s} s a write")
        ensemble.slow_s = slow_s
        self.later(seconds, setattr, ensemble, "slow_s", 0.0)
        for name in self.world.hosts:
            if chance.random() < 0.5:
                begins_s = seconds * chance.random()
                if chance.random() < 0.7:
                    self.later(begins_s, self._expire, name)
                for _ in range(2):
                    self.later(begins_s + 0.3 + 2 * slow_s * chance.random(), self._disconnect, name)

    def _disconnect(self, name: str) -> None:
        for session in self.world.ensemble.sessions_of(self.world.hosts[name].process):
            self.world.note(f"{session.process} loses its connection to ZooKeeper")
            session.disconnect()

    def blank_disk(self) -> None:
        """Only where the other member's disk is sound, and holds what this one does: else an operator has to abandon it."""
        name = self.any_member()
        if not self.has_damaged(name.split("-", maxsplit=1)[0]) and self.is_twice(name):
            self.blank_disk_of(name)
            self.later(self.some_s(), self.world.start, name)

    def is_twice(self, name: str, kinds: tuple[bytes, ...] = (b"B", b"C")) -> bool:
        """Whether the other member has all that this one holds of these kinds."""
        return all(self._is_twice(name, key) for kind in kinds for key in self._disk(name).keys(kind))

    def blank_disk_of(self, name: str) -> None:
        """The member dies and has a blank disk."""
        self._damaged_groups.add(name.split("-", maxsplit=1)[0])
        self.world.kill(name, is_power=True)
        self.world.blank_disk(name)

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
        mend = self.fail_disk_of(self.any_member())
        self.later(self.some_s(), mend)

    def fail_disk_of(self, name: str) -> Callable[[], None]:
        """What mends it is for the caller to call."""
        disk = self._disk(name)
        self.world.note(f"the disk of {name} fails")
        disk.is_failing = True

        def mend() -> None:
            disk.is_failing = False
            self._dies(name, True)

        return mend

    def disk_full(self) -> None:
        mend = self.fill_disk_of(self.any_member())
        self.later(self.some_s(), mend)

    def fill_disk_of(self, name: str) -> Callable[[], None]:
        """To the last byte; what mends it is for the caller to call."""
        disk = self._disk(name)
        self.world.note(f"the disk of {name} is full")
        disk.is_full = True

        def mend() -> None:
            disk.is_full = False
            self._dies(name, False)

        return mend

    def disk_stands_still(self) -> None:
        go_on = self.stop_disk_of(self.any_member())
        self.later(self.some_s(), go_on)

    def disks_stand_still(self) -> None:
        """Both of the group that records go to, and for long: what they share hangs."""
        link = self.queue.head
        if link is not None:
            seconds = 1 + 7 * self.chance.random()
            for name in names_of(link):
                self.later(seconds, self.stop_disk_of(name))

    def stop_disk_of(self, name: str) -> Callable[[], None]:
        """It stands still; what has it go on is for the caller to call."""
        disk = self._disk(name)
        self.world.note(f"the disk of {name} stands still")
        disk.is_still = True

        def go_on() -> None:
            self.world.note(f"the disk of {name} goes on")
            disk.is_still = False

        return go_on

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
        self.operate("RotateQueue", pb.QueueRequest(queue=self.queue.name))

    def drain_group(self) -> None:
        group = self.chance.choice(self.world.group_names)
        self.operate("DrainGroup", pb.GroupRequest(group=group))
        self.later(self.some_s(), self.operate, "ResumeGroup", pb.GroupRequest(group=group))

    def seek(self) -> None:
        """Back to the beginning, to that of a link, or to anywhere: over nothing that wasn't read before."""
        queue, document = self.queue, self.queue.document
        if document is None or not document.subscriptions:
            return
        subscription = self.chance.choice([one.name for one in document.subscriptions])
        reached = max(queue.ledger.progress[subscription].delivered, default=0)
        starts = [str(link.base) for link in document.links if link.base is not None and link.base <= reached]
        to = self.chance.choice((str(self.chance.randint(0, reached)), self.chance.choice(starts or ["0"]), "earliest"))
        given_up = len(queue.ledger.given_up)

        def look() -> None:
            """An offset that was chosen before records were given up stands for another one, which may not have been read."""
            if len(queue.ledger.given_up) > given_up:
                earliest = pb.SeekSubscriptionRequest(queue=queue.name, subscription=subscription, to="earliest")
                self.operate("SeekSubscription", earliest)

        request = pb.SeekSubscriptionRequest(queue=queue.name, subscription=subscription, to=to)
        self.operate("SeekSubscription", request, look)

    def operate(self, method: str, request: object, after: Callable[[], None] = lambda: None) -> None:
        """One order after the other: a drain that is answered late doesn't follow on the resume behind it."""

        async def operate() -> None:
            async with self._operator:
                await self.answer(method, request)
            after()

        self.order(method, operate)

    def beside(self, method: str, request: object, after_s: float = 0.0) -> asyncio.Event:
        """Another operator, who waits for nobody. Set when that one is answered."""
        answered = asyncio.Event()

        async def operate() -> None:
            await asyncio.sleep(after_s)
            await self.answer(method, request)
            answered.set()

        self.order(method, operate)
        return answered

    def order(self, method: str, order: Callable[[], Coroutine[Any, Any, None]]) -> None:
        process = self.world.hosts["operator"].process
        assert process is not None
        self.world.note(f"an operator asks for {method}")
        self.world.loop.start(process, order)

    async def answer(self, method: str, request: object) -> Any:
        """What an operator is answered; None where it is refused."""
        world = self.world
        try:
            async with Coordinators(world.coordinator_addresses) as coordinators:
                return await coordinators.call_within(method, request, OPERATOR_PATIENCE_S)
        except SeriatimError as error:
            world.note(f"{method} is refused: {error}")

    def has_damaged(self, group: str) -> bool:
        """Whether one of the group's two copies is spoilt."""
        return group in self._damaged_groups


KINDS: dict[str, tuple[float, Callable[[Nemesis], None]]] = {
    "kill": (8, Nemesis.kill),
    "kill at a step": (10, Nemesis.kill_at_step),
    "kill both members": (3, Nemesis.kill_both),
    "kill all": (2, Nemesis.kill_all),
    "pause": (8, Nemesis.pause),
    "cut": (8, Nemesis.cut),
    "isolate": (3, Nemesis.isolate),
    "reset connections": (4, Nemesis.reset_connections),
    "expire session": (4, Nemesis.expire_session),
    "cut off a ZooKeeper server": (3, Nemesis.cut_off_server),
    "stop ZooKeeper": (2, Nemesis.stop_zookeeper),
    "slow ZooKeeper": (2, Nemesis.slow_zookeeper),
    "blank disk": (3, Nemesis.blank_disk),
    "damage": (3, Nemesis.damage),
    "disk fails": (2, Nemesis.disk_fails),
    "disk full": (2, Nemesis.disk_full),
    "disk stands still": (2, Nemesis.disk_stands_still),
    "disks of the head stand still": (2, Nemesis.disks_stand_still),
    "slow disk": (3, Nemesis.slow_disk),
    "rotate": (4, Nemesis.rotate),
    "drain group": (3, Nemesis.drain_group),
    "seek": (3, Nemesis.seek),
    "kill an application": (3, Nemesis.kill_application),
    "pause an application": (4, Nemesis.pause_application),
    "pause a coordinator": (2, Nemesis.pause_coordinator),
    "cut an application from ZooKeeper": (2, Nemesis.cut_application),
    "cut a pair": (2, Nemesis.cut_pair),
    "divide and kill": (2, Nemesis.divide_and_kill),
    "kill a reader and whom it reads": (2, Nemesis.kill_reader_and_member),
    "pause the slave": (2, Nemesis.pause_slave),
    "slow path": (4, Nemesis.slow_path),
    "expire an application's session": (2, Nemesis.expire_application),
    "strain a sender": (2, Nemesis.strain_sender),
}
