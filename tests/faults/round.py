"""One round of a campaign: a queue of its own, the workload's processes, and at the end everything read and judged."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import grpc.aio

from seriatim.cli.embedded.errors import StartFailed
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import QueueExists, SeriatimError, UnknownQueue, WorldError
from tests.faults import certificates, checker
from tests.faults.catalogue import Role
from tests.faults.cluster import MEMBERS, READERS, SENDERS, ZOOKEEPERS, FaultCluster
from tests.faults.history import Acknowledged, Delivered, Event, Positioned, Sent, Tail
from tests.faults.trial import copies_of, is_all_read, read_again, sealed_links

LATE = "late"
_CALL_S = 5.0
_POLL_S = 0.05
_WAIT_S = 90.0


class Stuck(Exception):
    """What had to happen didn't, in time: liveness is broken, or the machine far too slow."""


class Round:
    """`start`, then harm and wait, then `judge`; `close` whatever happened."""

    def __init__(self, cluster: FaultCluster, queue: str, directory: Path, records_per_s: float) -> None:
        self.cluster = cluster
        self.queue = queue
        self.events: list[Event] = []
        self.acknowledged_at_s: list[float] = []
        self.delivered_at_s: dict[str, list[float]] = {"main": [], "other": []}
        self.clients = dict.fromkeys(SENDERS, "sender") | {
            name: "reader" for name, subscription in READERS.items() if subscription != LATE
        }
        self._directory = directory
        self._records_per_s = records_per_s
        self._bases: dict[int, int] = {}
        self._starting: set[str] = set()
        self._tails: dict[str, Tail] = {}
        self.last_offset = 0
        self._last_acknowledged = 0
        self._last_delivered: dict[str, int] = {}
        self._positions: dict[tuple[str, int], tuple[int, int]] = {}
        self._loop = asyncio.new_event_loop()
        self._coordinators = Coordinators(cluster.coordinators)

    # ------------------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Make the queue, start the workload, wait until records flow. Raises Stuck."""
        self._directory.mkdir(parents=True)
        with contextlib.suppress(QueueExists):  # the first call's answer was lost
            self.do("CreateQueue", pb.CreateQueueRequest(queue=self.queue))
        for name in self.clients:
            self.start_client(name)
        self.wait_for_clients()
        self.wait_for_progress("at the start")

    def start_client(self, name: str) -> None:
        """Start a process of the workload that doesn't run."""
        if self.cluster.supervisor.pid(name) is not None:
            return
        path = self._directory / f"{name}.jsonl"
        self._tails.setdefault(name, Tail(path))
        what = str(self._records_per_s) if name in SENDERS else READERS[name]
        kind = self.clients[name]
        with contextlib.suppress(StartFailed):  # it was running after all
            self.cluster.start_client(name, kind, (self.queue, name, str(path), what))
            self._starting.add(name)

    def wait_for_clients(self) -> None:
        """Whoever was started stands for election. Raises Stuck."""

        def stands(name: str) -> bool:
            return " standing " in self.cluster.supervisor.output(name)

        for name in sorted(self._starting):
            self.wait_until(lambda name=name: stands(name), f"{name} stands for election")
        self._starting.clear()

    def close(self) -> None:
        """End what still runs of it."""
        for name in self.clients:
            if self.cluster.supervisor.pid(name) is not None:
                self.cluster.signal(name, signal.SIGCONT)
                self.cluster.signal(name, signal.SIGKILL)
        with contextlib.suppress(SeriatimError):
            self._loop.run_until_complete(self._coordinators.close())
        self._loop.close()

    def delete_queue(self) -> None:
        """Also where it was deleted before. Raises Stuck."""
        with contextlib.suppress(UnknownQueue):
            self.do("DeleteQueue", pb.QueueRequest(queue=self.queue))

    # ------------------------------------------------------------------------------------------------------ asking

    def name_coordinators(self) -> None:
        """Whoever asks and orders here has no session with ZooKeeper, which tells clients who coordinates by now."""
        self._loop.run_until_complete(self._coordinators.close())
        self._coordinators = Coordinators(self.cluster.coordinators)

    def ask(self, method: str, request: object, timeout_s: float = _CALL_S) -> Any:
        """Of any coordinator. Raises SeriatimError."""
        return self._loop.run_until_complete(self._coordinators.call_within(method, request, timeout_s))

    def do(self, method: str, request: object) -> None:
        """An order, repeated until it is answered. Raises Stuck, and CallerError where the order is wrong."""
        self.wait_until(lambda: self.ask(method, request) is not None, f"{method} is carried out")

    def view(self) -> pb.QueueView:
        return self.ask("DescribeQueue", pb.QueueRequest(queue=self.queue))

    def wait_until(self, claim: Callable[[], object], what: str, timeout_s: float = _WAIT_S) -> None:
        """Until the claim holds; what can't be asked just now can be asked later. Raises Stuck."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            last: WorldError | None = None
            try:
                if claim():
                    return
            except WorldError as error:
                last = error
            if time.monotonic() > deadline_s:
                raise Stuck(f"not within {timeout_s:g} s: {what}{'' if last is None else f' ({last})'}")
            time.sleep(_POLL_S)

    # ------------------------------------------------------------------------------------------------------ roles

    def roles(self, role: Role, view: pb.QueueView) -> tuple[str, ...]:
        """The processes that play a role now; none where nobody does. Raises SeriatimError."""
        fixed: dict[Role, tuple[str, ...]] = {
            "coordinators": self.cluster.coordinating,
            "zookeepers": ZOOKEEPERS,
            "members": MEMBERS,
            "servers": self.cluster.servers,
        }
        if role in fixed:
            return fixed[role]
        if role.startswith("zookeeper"):
            return self._zookeepers(role)
        if role in {"coordinator", "other coordinator"}:
            elected = self._elected_coordinator()
            found = [name for name in self.cluster.coordinating if (name == elected) is (role == "coordinator")]
            return tuple(found[:1])
        if role in {"sender", "standby sender"}:
            elected = view.sender[:-11]
            return tuple(name for name in SENDERS if (name == elected) is (role == "sender"))[:1]
        if role in {"reader", "standby reader"}:
            elected = next((one.reader[:-11] for one in view.subscriptions if one.subscription == "main"), "")
            mine = [name for name, subscription in READERS.items() if subscription == "main"]
            return tuple(name for name in mine if (name == elected) is (role == "reader"))[:1]
        return self._members(role, view)

    def _members(self, role: str, view: pb.QueueView) -> tuple[str, ...]:
        if not view.links:
            return ()
        head = view.links[-1]
        by_side = {side: f"{one.group}-{one.member}" for side, one in (("master", head.master), ("slave", head.slave))}
        if role == "head":
            return tuple(by_side.values())
        if role == "idle member":
            return tuple(name for name in MEMBERS if name not in by_side.values())[:1]
        return (by_side[role],)

    def _zookeepers(self, role: str) -> tuple[str, ...]:
        modes = self.cluster.zookeeper_modes()
        leaders = [name for name, mode in modes.items() if mode == "leader"]
        followers = [name for name, mode in modes.items() if mode == "follower"]
        if role == "zookeeper majority":
            return tuple([*leaders, *followers][:2])
        return tuple((leaders if role == "zookeeper leader" else followers)[:1])

    def _elected_coordinator(self) -> str:
        address = self.ask("DescribeCluster", pb.DescribeClusterRequest()).elected_coordinator
        return next((name for name in self.cluster.coordinating if self.cluster.address(name) == address), "")

    # ------------------------------------------------------------------------------------------------------ watching

    def follow(self) -> None:
        """Take in what the workload has recorded; of readers first: what one has, its sender had recorded before."""
        for name, tail in sorted(self._tails.items(), key=lambda item: item[0] in SENDERS):
            for event in tail.follow():
                self.events.append(event)
                if isinstance(event, Acknowledged):
                    if not event.is_resumed:
                        self.acknowledged_at_s.append(event.at_s)
                        self._last_acknowledged = max(self._last_acknowledged, event.seq)
                elif isinstance(event, Delivered):
                    subscription = READERS[name]
                    if subscription in self.delivered_at_s:
                        self.delivered_at_s[subscription].append(event.at_s)
                    self.last_offset = max(self.last_offset, event.offset)
                    self._last_delivered[subscription] = max(self._last_delivered.get(subscription, 0), event.seq)

    def _subscriptions(self) -> set[str]:
        """Those that somebody reads."""
        return {READERS[name] for name, kind in self.clients.items() if kind == "reader"}

    def some_values(self, chance: random.Random, count: int) -> tuple[bytes, ...]:
        """Values of records that were sent, old and new ones."""
        sent = [event for event in self.events[-4000:] if isinstance(event, Sent)]
        sent += [event for event in chance.choices(self.events, k=count * 4) if isinstance(event, Sent)]
        return tuple(one.value.encode() for one in chance.sample(sent, min(count, len(sent))))

    def wait_for_progress(self, when: str) -> None:
        """Records are acknowledged that weren't sent yet, and every subscription reads beyond them. Raises Stuck."""
        self.follow()
        goal = self._last_acknowledged + 50

        def is_sent() -> bool:
            self.follow()
            return self._last_acknowledged >= goal

        self.wait_until(is_sent, f"sending goes on {when}")

        def is_read() -> bool:
            self.follow()
            return all(self._last_delivered.get(subscription, 0) >= goal for subscription in self._subscriptions())

        self.wait_until(is_read, f"reading goes on {when}")

    def is_whole(self, members: set[str], groups: set[str]) -> bool:
        """All members registered, in sync and connected, and all groups on the send list. Raises SeriatimError."""
        found = {
            f"{group.group}-{one.member}"
            for group in self.ask("ListGroups", pb.ListGroupsRequest()).groups
            for one in group.members
            if one.is_registered and one.is_in_sync and one.is_peer_connected and not one.problem
        }
        return members <= found and groups <= set(self.view().send_list)

    def members_that_say(self, what: str) -> set[str]:
        """Whose problem, as people are told it, has this in it. Raises SeriatimError."""
        groups = self.ask("ListGroups", pb.ListGroupsRequest()).groups
        return {f"{group.group}-{one.member}" for group in groups for one in group.members if what in one.problem}

    def note_positions(self) -> None:
        """Keep where each subscription's present generation started. Raises SeriatimError."""
        view = self.view()
        for one in view.subscriptions:
            self._positions[one.subscription, one.generation] = (one.position_epoch, one.position_index)
        self._bases = {link.epoch: link.base for link in view.links}

    # ------------------------------------------------------------------------------------------------------ judging

    def judge(self) -> tuple[checker.Verdict, list[str]]:
        """Send and read to the end, read all again by offset, and judge; what is wrong with the copies. Raises Stuck."""
        self._end(SENDERS)
        self.wait_until(lambda: is_all_read(self.view(), self._subscriptions()), "everything is read")
        self._end(tuple(name for name, kind in self.clients.items() if kind == "reader"))
        self.follow()
        self.note_positions()
        again = [*read_again(self.cluster.coordinators, self.queue), *self.positioned()]
        events = sorted(self.events, key=lambda event: event.at_s)
        return checker.check([*events, *again]), self._forgeries()

    def _end(self, names: tuple[str, ...]) -> None:
        ended = self.cluster.supervisor.stop_all(names)
        failed = {name: status for name, status in ended.items() if status != 0}
        if failed:
            raise Stuck(f"clients didn't end as they were asked: {failed}")

    def positioned(self) -> Iterator[Positioned]:
        """Where generations started, by the bases that were last seen. An empty link may be gone meanwhile."""
        for (subscription, generation), (epoch, index) in self._positions.items():
            found = min((one for one in self._bases if one >= epoch), default=None)
            base = 0 if found is None else self._bases[found]
            yield Positioned(subscription, generation, base + (index if found == epoch else 0), 0.0)

    def is_readable(self, names: Collection[str]) -> bool:
        """Whether these members can read all that they hold of the queue. What one can't read, it mends after this."""
        view = self.view()
        for link in view.links:
            if not link.has_end:
                link.end = link.committed_index
        try:
            self._loop.run_until_complete(copies_of(view, [link for link in view.links if link.end], names))
        except grpc.aio.AioRpcError:
            return False
        return True

    def _forgeries(self) -> list[str]:
        """What both copies of each sealed link lack of what its certificate says."""

        def has_two_copies() -> bool:
            return all(link.copies == 2 for link in self.view().links if link.has_end and link.end)

        self.wait_until(has_two_copies, "each sealed link has two copies again")
        view = self.view()
        claims, links = sealed_links(view)
        return certificates.problems(claims, self._loop.run_until_complete(copies_of(view, links)))
