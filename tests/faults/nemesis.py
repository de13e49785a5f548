"""Does each harm of the catalogue to a running cluster, and undoes all of it."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import assert_never

from seriatim.cli.embedded.errors import StartFailed
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import SubscriptionExists, UnknownGroup
from tests.faults.catalogue import (
    BlankDisk,
    Cut,
    Damage,
    DiskTrouble,
    Harm,
    Kill,
    Kind,
    Lose,
    LosePower,
    Narrow,
    Order,
    Pause,
    Role,
    Stop,
)
from tests.faults.cluster import (
    CLIENT_ENDS_S,
    GROUPS,
    MEMBERS,
    SPARE_GROUP,
    SPARE_MEMBERS,
    ZOOKEEPERS,
    FaultCluster,
)
from tests.faults.disks import RESERVE_MB, Trouble
from tests.faults.round import LATE, Round

_TROUBLES = {
    "write error": Trouble.WRITE_ERROR,
    "flush error": Trouble.FLUSH_ERROR,
    "slow flush": Trouble.SLOW_FLUSH,
    "still flush": Trouble.STILL_FLUSH,
    "still": Trouble.STILL,
    "full": Trouble.FULL,
}
_STAYS_TRUSTED = {"slow flush", "still flush", "still", "nearly filled"}


@dataclass(slots=True)
class Fault:
    """What was done. Times by the monotonic clock: from harm to healing, and until all was as before."""

    number: int
    kind: str
    family: str
    targets: tuple[str, ...] = ()
    harmed_s: float = 0.0
    healed_s: float = 0.0
    whole_s: float = 0.0
    note: str = ""


def _roles(harm: Harm) -> tuple[Role, ...]:
    """Those that a harm is done to."""
    match harm:
        case Cut() | Lose():
            return harm.one, harm.other
        case Order():
            return ("master",) if harm.what in {"rotate", "alter", "leave the head", "drain the head"} else ()
        case _:
            return (harm.role,)


class Nemesis:
    """One for a cluster's life. `deaths`: processes that ended without having been killed, and what was going on."""

    def __init__(self, cluster: FaultCluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self.deaths: list[str] = []
        self._paused: set[str] = set()
        self._killed: set[str] = set()
        self._stopped: set[str] = set()  # on purpose, which isn't to end otherwise
        self._distrusted: set[str] = set()
        self._damaged: set[str] = set()  # whose disk may be refused at a start, because of what we did to it
        self._unread: set[str] = set()  # whose damage nobody has read yet
        self._drained: set[str] = set()
        self._is_for_some = False
        self._has_spare = False
        self._left: set[str] = set()  # spare members that hold records of this round, and are stopped

    # ------------------------------------------------------------------------------------------------------ one fault

    def strike(self, number: int, kind: Kind, scene: Round) -> Fault:
        """Harm, hold, heal, and wait until all is as before. Raises Stuck."""
        kind = self._possible(kind)
        fault = Fault(number, kind.name, kind.family)
        players = self._players(kind, scene)
        fault.targets = tuple(dict.fromkeys(name for names in players.values() for name in names))
        fault.harmed_s = time.monotonic()
        for harm in kind.harms:
            self._harm(harm, players, scene, fault)
        time.sleep(max(0.0, fault.harmed_s + self._chance.uniform(*kind.held_s) - time.monotonic()))
        fault.healed_s = time.monotonic()
        self._heal(scene, fault)
        self.wait_until_whole(scene, fault)
        fault.whole_s = time.monotonic()
        return fault

    def _groups(self) -> set[str]:
        return {*GROUPS, *((SPARE_GROUP,) if self._has_spare else ())}

    def wait_until_whole(self, scene: Round, fault: Fault) -> None:
        """Everything runs, everything is in service, records flow; who dies meanwhile is started again. Raises Stuck."""
        groups = self._groups()
        members = {*MEMBERS, *(SPARE_MEMBERS if self._has_spare else ())}

        def is_whole() -> bool:
            self._note_deaths(scene, fault)
            self._start_servers(fault)
            self._replace_failed_disks(scene, fault)
            for name in scene.clients:
                scene.start_client(name)
            return len(self._cluster.zookeeper_modes()) == len(ZOOKEEPERS) and scene.is_whole(members, groups)

        scene.wait_until(is_whole, "all servers run, all members are whole, all groups are on the send list")
        if self._unread:
            # Damage that nobody has read yet is one copy less: with the next fault on the other copy there would be none.
            scene.wait_until(lambda: scene.is_readable(self._unread), "what was damaged is found and mended")
            self._unread.clear()
        scene.wait_for_clients()
        scene.wait_for_progress("after healing")

    def _possible(self, kind: Kind) -> Kind:
        """The spare group is added only where it isn't there, and removed only where it is."""
        add, remove = (Order("add a group"), "group added"), (Order("remove a group"), "group drained and removed")
        (wrong, its_name), (right, name) = (add, remove) if self._has_spare else (remove, add)
        harms = tuple(right if harm == wrong else harm for harm in kind.harms)
        return kind if harms == kind.harms else replace(kind, harms=harms, name=kind.name.replace(its_name, name))

    @staticmethod
    def _players(kind: Kind, scene: Round) -> dict[Role, tuple[str, ...]]:
        """Who plays the roles that are to be harmed, when each of them is played by somebody. Raises Stuck."""
        found: dict[Role, tuple[str, ...]] = {}

        def is_settled() -> bool:
            view = scene.view()
            found.update((role, scene.roles(role, view)) for harm in kind.harms for role in _roles(harm))
            return all(found.values())

        scene.wait_until(is_settled, f"there is somebody to be harmed by {kind.name}")
        return found

    # ------------------------------------------------------------------------------------------------------ harm

    def _harm(self, harm: Harm, players: dict[Role, tuple[str, ...]], scene: Round, fault: Fault) -> None:
        names = tuple(name for role in _roles(harm) for name in players[role])
        match harm:
            case Kill():
                self._kill(names)
                self._cluster.move(names if harm.moves else ())
            case Stop():
                self._stop(names)
            case Pause():
                self._pause(names)
            case Cut():
                one, other = players[harm.one], players[harm.other]
                cut = self._cluster.network.cut_one_way if harm.is_one_way else self._cluster.network.cut
                cut(one, [name for name in other if name not in one])
            case Lose():
                one, other = players[harm.one], players[harm.other]
                others = [name for name in other if name not in one]
                self._cluster.network.lose(one, others, harm.percent, harm.over_bytes)
            case Narrow():
                for name in names:
                    self._cluster.network.narrow(name, harm.kbit_s)
            case DiskTrouble() | Damage() | BlankDisk() | LosePower():
                self._harm_disks(harm, names, scene, fault)
            case Order():
                self._order(harm, scene, fault)
            case _:
                assert_never(harm)

    def _harm_disks(
        self, harm: DiskTrouble | Damage | BlankDisk | LosePower, names: tuple[str, ...], scene: Round, fault: Fault
    ) -> None:
        match harm:
            case DiskTrouble():
                self._trouble(harm, names)
            case Damage():
                self._damage(harm, names, scene, fault)
            case BlankDisk():
                self._kill(names)
                self._wipe(names)
            case LosePower():
                self._lose_power(names)

    def _stop(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._killed:
                self._killed.add(name)
                self._stopped.add(name)
                self._cluster.signal(name, signal.SIGTERM)

    def _pause(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._killed:
                self._paused.add(name)
                self._cluster.signal(name, signal.SIGSTOP)

    def _wipe(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._cluster.disks[name].wipe()
            self._damaged.discard(name)

    def _kill(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._killed.add(name)
            self._stopped.discard(name)
            self._paused.discard(name)
            with contextlib.suppress(StartFailed):
                self._cluster.signal(name, signal.SIGKILL)

    def _lose_power(self, names: tuple[str, ...]) -> None:
        disks = {name: disk for name, disk in self._cluster.all_disks.items() if name in names}
        for name, disk in disks.items():
            disk.lose_power(self._cluster.supervisor.pid(name))
        self._kill(names)
        for disk in disks.values():
            disk.come_back()

    def _trouble(self, harm: DiskTrouble, names: tuple[str, ...]) -> None:
        for name in names:
            if harm.trouble == "filled":
                self._cluster.disks[name].fill(0)
            elif harm.trouble == "nearly filled":
                self._cluster.disks[name].fill(RESERVE_MB // 2)
            else:
                delay_ms = self._chance.randrange(*harm.slow_ms)
                self._cluster.all_disks[name].trouble(_TROUBLES[harm.trouble], delay_ms)
            if harm.trouble not in _STAYS_TRUSTED:
                self._distrusted.add(name)

    def _damage(self, harm: Damage, names: tuple[str, ...], scene: Round, fault: Fault) -> None:
        if harm.is_killed:
            self._kill(names)
        scene.follow()
        values = scene.some_values(self._chance, 40)
        for name in names:
            disk = self._cluster.disks[name]
            if harm.is_killed and self._chance.random() < 0.5:
                done = f"cut {disk.cut_log(self._chance)}"
            else:
                done = f"flipped {', '.join(disk.flip(self._chance, values)) or 'nothing: no records on this disk'}"
            self._damaged.add(name)
            self._unread.add(name)
            fault.note += f"{name}: {done}; "

    # ------------------------------------------------------------------------------------------------------ people

    def _order(self, harm: Order, scene: Round, fault: Fault) -> None:
        match harm.what:
            case "rotate":
                scene.do("RotateQueue", pb.QueueRequest(queue=scene.queue))
            case "alter":
                durability = self._chance.choice(("sync", "interval"))  # nothing acknowledged may be lost in either
                fault.note += f"{durability}; "
                settings = pb.QueueSettings(durability=durability)
                scene.do("AlterQueue", pb.AlterQueueRequest(queue=scene.queue, settings=settings))
                scene.do("RotateQueue", pb.QueueRequest(queue=scene.queue))
            case "leave the head":
                head = scene.view().links[-1].group
                others = pb.QueueSettings(groups=sorted(self._groups() - {head}))
                self._is_for_some = True
                scene.do("AlterQueue", pb.AlterQueueRequest(queue=scene.queue, settings=others))
                scene.do("RotateQueue", pb.QueueRequest(queue=scene.queue))
            case "drain the head":
                group = scene.view().links[-1].group
                self._drained.add(group)
                scene.do("DrainGroup", pb.GroupRequest(group=group))
            case "add a group":
                self._has_spare = True
                self._left.clear()
                self._cluster.start_servers(SPARE_MEMBERS)
                self._cluster.expected |= set(SPARE_MEMBERS)
                scene.do("ResumeGroup", pb.GroupRequest(group=SPARE_GROUP))
            case "remove a group":
                scene.do("DrainGroup", pb.GroupRequest(group=SPARE_GROUP))
                scene.wait_until(lambda: self._is_out_of_use(scene, SPARE_GROUP), f"{SPARE_GROUP} is drained")
                self._has_spare = False
                self._cluster.expected -= set(SPARE_MEMBERS)
                self._cluster.supervisor.stop_all(SPARE_MEMBERS)
                self._left |= set(SPARE_MEMBERS)
            case "restart everything":
                self._restart_everything(scene, fault)
            case "replace a coordinator":
                self._replace_coordinator(scene, fault)
            case "create a subscription":
                self._create_subscription(scene, fault)
            case "seek back" | "seek forward":
                self._seek(scene, fault, is_back=harm.what == "seek back")
            case _:
                assert_never(harm.what)

    @staticmethod
    def _is_out_of_use(scene: Round, group: str) -> bool:
        found = {one.group: one for one in scene.ask("ListGroups", pb.ListGroupsRequest()).groups}[group]
        return not found.sending_queues and not found.backlog_queues

    def _restart_everything(self, scene: Round, fault: Fault) -> None:
        """Each process in its turn, gently, and the next only when all is well."""
        for name in (*self._cluster.servers, *scene.clients):
            self._stop_gently(name, fault)
            if name in scene.clients:
                scene.start_client(name)
            else:
                self._cluster.start_servers([name])
            self.wait_until_whole(scene, fault)

    def _replace_coordinator(self, scene: Round, fault: Fault) -> None:
        """However soon after the one before: senders and readers may know nobody of those that are there now."""
        gone = self._chance.choice(self._cluster.coordinating)
        fault.note += f"{gone} by {self._cluster.replace_coordinator(gone)}; "
        scene.name_coordinators()

    def _create_subscription(self, scene: Round, fault: Fault) -> None:
        start = self._chance.choice(("earliest", "latest", "offset"))
        if "reader-4" in scene.clients:
            self._seek(scene, fault, is_back=start != "latest", subscription=LATE)
            return
        if start != "latest":
            earliest = self._earliest(scene)
            if start == "offset" or earliest:
                start = self._some_offset(scene, earliest)
        fault.note += f"from {start}; "
        request = pb.CreateSubscriptionRequest(queue=scene.queue, subscription=LATE, **{"from": start})
        with contextlib.suppress(SubscriptionExists):  # the first call's answer was lost
            scene.do("CreateSubscription", request)
        scene.note_positions()  # before it is sought, which begins another generation
        scene.clients["reader-4"] = "reader"
        scene.start_client("reader-4")

    def _some_offset(self, scene: Round, earliest: int) -> str:
        return str(self._chance.randrange(earliest, max(earliest + 1, scene.last_offset)))

    def _earliest(self, scene: Round) -> int:
        """From which offset on there is somebody to read from: what was on a group that was removed is gone with it."""
        if self._has_spare:
            return 0
        return max((link.base + link.end for link in scene.view().links if link.group == SPARE_GROUP), default=0)

    def _seek(self, scene: Round, fault: Fault, *, is_back: bool, subscription: str = "other") -> None:
        to = self._some_offset(scene, self._earliest(scene)) if is_back else "latest"
        fault.note += f"{subscription} to {to}; "
        request = pb.SeekSubscriptionRequest(queue=scene.queue, subscription=subscription, to=to)
        scene.do("SeekSubscription", request)
        scene.note_positions()

    # ------------------------------------------------------------------------------------------------------ healing

    def _heal(self, scene: Round, fault: Fault) -> None:
        """Undo everything: network first, clients last, members side by side."""
        cluster = self._cluster
        cluster.network.heal()
        for name in self._paused:
            with contextlib.suppress(StartFailed):
                cluster.signal(name, signal.SIGCONT)
        self._paused.clear()
        for name, disk in cluster.all_disks.items():
            hits = disk.hits
            if disk.mend():
                fault.note += f"{name}: {hits} calls harmed; "
        self._note_deaths(scene, fault)
        for name in self._distrusted:
            cluster.supervisor.stop(name)
        for name in self._killed:
            if name in self._stopped:
                self._wait_for_end(name)
                self._stop_gently(name, fault)
            else:
                cluster.supervisor.stop(name)
        self._killed.clear()
        self._stopped.clear()
        self._start_servers(fault)
        for name in scene.clients:
            scene.start_client(name)
        if self._is_for_some:
            scene.do("AlterQueue", pb.AlterQueueRequest(queue=scene.queue, all_groups=True))
            self._is_for_some = False
        for group in list(self._drained):
            scene.wait_until(lambda group=group: self._is_out_of_use(scene, group), f"{group} is drained")
            scene.do("ResumeGroup", pb.GroupRequest(group=group))
            self._drained.discard(group)

    def _wait_for_end(self, name: str) -> None:
        """Of who was asked to end before: at the very end of a Python a second SIGTERM is one too many."""
        until_s = time.monotonic() + CLIENT_ENDS_S
        while self._cluster.supervisor.pid(name) is not None and time.monotonic() < until_s:
            time.sleep(0.01)

    def _stop_gently(self, name: str, fault: Fault) -> None:
        """Who doesn't end as he is asked has died, too. Java ends with a status of its own."""
        status = self._cluster.supervisor.stop(name)
        if status and name not in ZOOKEEPERS and name not in self._distrusted | self._damaged:
            self.deaths.append(
                f"{name} didn't end as it was asked ({status}), during fault {fault.number} ({fault.kind})"
            )

    def _note_deaths(self, scene: Round, fault: Fault) -> None:
        """Who ended without having been killed; a member whose disk failed or was damaged may."""
        running = self._cluster.supervisor.pids()
        for name in (*sorted(self._cluster.expected), *scene.clients):
            if name not in running and name not in self._killed:
                fault.note += f"{name} ended; "
                if name not in self._distrusted | self._damaged:
                    self.deaths.append(f"{name}, during fault {fault.number} ({fault.kind})")

    def _start_servers(self, fault: Fault) -> None:
        """Start what doesn't run. A disk that was damaged by us and is refused at the start is replaced by a blank one."""
        expected = self._cluster.expected
        self._cluster.start_servers(name for name in expected if name not in MEMBERS and name not in SPARE_MEMBERS)
        stopped = sorted(expected - set(self._cluster.supervisor.pids()))

        def start(name: str) -> None:
            try:
                self._cluster.start_servers([name])
            except StartFailed:
                if name not in self._damaged:
                    raise
                fault.note += f"{name}'s disk was refused at the start, and replaced by a blank one; "
                self._replace_disk(name)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(start, stopped))
        self._distrusted.clear()

    def _replace_failed_disks(self, scene: Round, fault: Fault) -> None:
        """Damage in a table of RocksDB's ends all writing where that table is rewritten, also long after the batch in it was mended.

        A member that says so of a disk that we damaged is given a blank one, as operations.md has it.
        """
        failed = self._damaged & scene.members_that_say("Corruption") if self._damaged else set()
        for name in sorted(failed):
            fault.note += f"{name}'s disk failed, and was replaced by a blank one; "
            self._replace_disk(name)

    def _replace_disk(self, name: str) -> None:
        self._cluster.supervisor.stop(name)
        self._wipe((name,))
        self._cluster.start_servers([name])

    def bring_back_what_left(self, scene: Round) -> None:
        """The disks of a group that was removed are kept until the round is judged: then they are looked at, too."""
        if self._left:
            self._cluster.start_servers(self._left)
            members = {*MEMBERS, *SPARE_MEMBERS}
            scene.wait_until(lambda: scene.is_whole(members, set(GROUPS)), "members that had left are back")

    def end_round(self, scene: Round) -> None:
        """Members that only came back to be judged go again. A group that was removed is forgotten, once nothing on it is wanted."""
        if self._left:
            self._cluster.supervisor.stop_all(self._left)
            self._left.clear()
        scene.delete_queue()
        if not self._has_spare:
            with contextlib.suppress(UnknownGroup):  # it never came, or has been removed before
                scene.do("RemoveGroup", pb.GroupRequest(group=SPARE_GROUP))
            self._wipe(SPARE_MEMBERS)
        scene.wait_until(lambda: not self._cluster.queue_ids(), "deleted queues are cleared away")
