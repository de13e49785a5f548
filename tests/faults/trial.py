"""One trial: a queue of its own on a shared cluster, the workload's processes, harm and healing, and the judgement."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from seriatim.cli.embedded.cluster import DevelopmentCluster
from seriatim.cli.embedded.processes import ProcessSpec
from seriatim.consumer import RangeReader
from seriatim.consumer.transport import Members
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import Epoch, Index
from tests.faults import certificates, checker
from tests.faults.history import Acknowledged, Delivered, Event, Sent, read
from tests.faults.workload import SESSION_VARIABLE

ROOT = Path(__file__).parents[2]
SENDERS = ("sender-1", "sender-2")
READERS = {"reader-1": "main", "reader-2": "main", "reader-3": "other"}
SUBSCRIPTIONS = ("main", "other")
RECORDS_PER_S = 400
SESSION_S = 6.0
"""Longer than a busy machine stands still: who is elected stays so until it is harmed."""
Found = TypeVar("Found")


def wait_until(claim: Callable[[], Found | None], what: str, timeout_s: float = 60.0) -> Found:
    """Wait for a claim to come true, or for something to be found, and return that: it may be another a moment later.

    A cluster that can't be asked just now answers later.
    """
    deadline_s = time.monotonic() + timeout_s
    last: SeriatimError | None = None
    while True:
        try:
            if found := claim():
                return found
        except SeriatimError as error:
            last = error
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what} ({last})"
        time.sleep(0.1)


def ask(cluster: DevelopmentCluster, method: str, request: object) -> Any:
    async def call() -> Any:
        async with Coordinators(cluster.coordinators) as coordinators:
            return await coordinators.call_within(method, request, 5)

    return asyncio.run(call())


def wait_until_whole(cluster: DevelopmentCluster) -> None:
    """Every group registered whole, in sync and connected."""

    def is_whole() -> bool:
        groups = ask(cluster, "ListGroups", pb.ListGroupsRequest()).groups
        members = [member for group in groups for member in group.members]
        return len(members) == len(cluster.member_names) and all(
            member.is_registered and member.is_in_sync and member.is_peer_connected for member in members
        )

    wait_until(is_whole, "all members are back", 90)


class Trial:
    """Use it as a context manager: it starts the workload, and at the end heals and ends everything of its own."""

    def __init__(self, cluster: DevelopmentCluster, queue: str) -> None:
        self.cluster = cluster
        self.queue = queue
        self.directory = cluster.supervisor.directory / "histories" / queue
        self.killed: list[str] = []
        self.paused: list[str] = []

    def __enter__(self) -> Self:
        wait_until_whole(self.cluster)
        self.directory.mkdir(parents=True)
        ask(self.cluster, "CreateQueue", pb.CreateQueueRequest(queue=self.queue))
        for name in (*SENDERS, *READERS):
            self._start(name)
        self.wait_for_progress("at the start")
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self.cluster.supervisor.stop_all([self._process(name) for name in (*SENDERS, *READERS)])
        ask(self.cluster, "DeleteQueue", pb.QueueRequest(queue=self.queue))

    def _process(self, name: str) -> str:
        """A process's name in the supervisor: the workload's are this queue's own."""
        return f"{self.queue}-{name}" if name in (*SENDERS, *READERS) else name

    def _start(self, name: str) -> None:
        kind = "sender" if name in SENDERS else "reader"
        arguments = (kind, self.cluster.coordinators, self.queue, name, str(self._history(name)))
        what = READERS.get(name, str(RECORDS_PER_S))
        self.cluster.supervisor.start(
            ProcessSpec(
                self._process(name),
                (sys.executable, "-m", "tests.faults.workload", *arguments, what),
                environment={"PYTHONPATH": str(ROOT), SESSION_VARIABLE: str(SESSION_S)},
                stop_timeout_s=60.0,
            )
        )

    # ------------------------------------------------------------------------------------------------ what is known

    def _history(self, name: str) -> Path:
        return self.directory / f"{name}.jsonl"

    def events(self, *names: str) -> list[Event]:
        """What was recorded so far, in the order of time; of all processes where none is named."""
        paths = [self._history(name) for name in names or (*SENDERS, *READERS)]
        found = [event for path in paths if path.exists() for event in read(path)]
        return sorted(found, key=lambda event: event.at_s)

    def view(self) -> pb.QueueView:
        return ask(self.cluster, "DescribeQueue", pb.QueueRequest(queue=self.queue))

    @property
    def head(self) -> pb.LinkView:
        return self.view().links[-1]

    def place(self, side: str) -> str:
        """The process that is `master` or `slave` of the head."""
        member = getattr(self.head, side)
        return f"{member.group}-{member.member}"

    def elected_sender(self) -> str:
        return self.view().sender[:-11]

    def first_sent_s(self) -> dict[int, float]:
        """When each record was sent for the first time, by its seq."""
        found: dict[int, float] = {}
        for one in self.events(*SENDERS):
            if isinstance(one, Sent):
                found.setdefault(one.seq, one.at_s)
        return found

    def acknowledged_since(self, since_s: float) -> int:
        """How many; one behind a lost link has no offset yet."""
        return sum(isinstance(one, Acknowledged) and one.at_s > since_s for one in self.events(*SENDERS))

    def wait_for_sending(self, when: str, least: int = 50) -> None:
        since_s = time.monotonic()
        wait_until(lambda: self.acknowledged_since(since_s) >= least, f"sending goes on {when}")

    def wait_for_progress(self, when: str) -> None:
        """Records are sent, and each subscription gets some."""
        self.wait_for_sending(when)
        since_s = time.monotonic()

        def is_read() -> bool:
            found = {
                one.subscription for one in self.events(*READERS) if isinstance(one, Delivered) and one.at_s > since_s
            }
            return found == set(SUBSCRIPTIONS)

        wait_until(is_read, f"reading goes on {when}")

    # ------------------------------------------------------------------------------------------------ harm and healing

    def kill(self, name: str) -> None:
        """SIGKILL; it is dead when this returns."""
        pid = self.cluster.kill(self._process(name))
        assert not Path(f"/proc/{pid}").exists(), f"{name} lives on"
        self.killed.append(name)

    def kill_at_once(self, names: Collection[str]) -> None:
        """SIGKILL to several, none of which answers anybody any more when the first one dies."""
        for name in names:
            self.cluster.supervisor.kill(self._process(name), signal.SIGSTOP)
        for name in names:
            self.kill(name)

    def pause(self, name: str) -> None:
        self.cluster.supervisor.kill(self._process(name), signal.SIGSTOP)
        self.paused.append(name)

    def resume(self, name: str) -> None:
        self.paused.remove(name)
        self.cluster.supervisor.kill(self._process(name), signal.SIGCONT)

    def heal(self) -> None:
        """Everything that was killed or paused goes on: ZooKeeper first, clients last, members side by side."""
        for name in list(self.paused):
            self.resume(name)
        killed, self.killed = self.killed, []
        for name in ("zookeeper", *self.cluster.coordinator_names):
            if name in killed:
                self.cluster.restart(name)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.cluster.restart, [name for name in killed if name in self.cluster.member_names]))
        for name in killed:
            if name in (*SENDERS, *READERS):
                self._start(name)

    def wait_for_switch(self, epoch: int) -> None:
        """A later link than `epoch` is open."""
        wait_until(lambda: self.head.epoch > epoch and self.head.state == "open", f"a link behind {epoch} opens")

    # ------------------------------------------------------------------------------------------------ judging

    def judge(self, *, least: int = 300) -> checker.Verdict:
        """Heal, read to the end, and judge everything; asserts that all of it holds."""
        self.heal()
        wait_until_whole(self.cluster)
        self.wait_for_sending("after healing", 200)
        self.wait_for_progress("after healing")
        self._end(SENDERS)
        wait_until(lambda: is_all_read(self.view(), SUBSCRIPTIONS), "everything is read")
        self._end(READERS)
        events = [*self.events(), *read_again(self.cluster.coordinators, self.queue)]
        verdict = checker.check(events)
        assert verdict.is_clean, (verdict.kinds(), verdict.anomalies[:10], str(self.directory))
        assert verdict.counts["acknowledged"] >= least, verdict.counts
        assert not self._forgeries()
        return verdict

    def _end(self, names: tuple[str, ...] | dict[str, str]) -> None:
        processes = [self._process(name) for name in names]
        statuses = self.cluster.supervisor.stop_all(processes)
        outputs = {name: self.cluster.supervisor.log_path(name) for name in processes}
        assert statuses == dict.fromkeys(processes, 0), (statuses, outputs)

    def _forgeries(self) -> list[str]:
        """What both copies of each sealed link lack of what its certificate says."""

        def has_two_copies() -> bool:
            return all(link.copies == 2 for link in self.view().links if link.has_end and link.end)

        wait_until(has_two_copies, "each sealed link has two copies again")
        view = self.view()
        claims, links = sealed_links(view)
        return certificates.problems(claims, asyncio.run(copies_of(view, links)))

    def zombie_acknowledgements(self, name: str, *, paused_s: float, resumed_s: float) -> list[Event]:
        """What a sender was told is kept after its pause, though it had not sent it before."""
        before = {one.seq for one in self.events(name) if isinstance(one, Sent) and one.at_s <= paused_s}
        return [
            one
            for one in self.events(name)
            if isinstance(one, Acknowledged) and one.offset is not None and one.at_s > resumed_s
            if one.seq not in before
        ]


def is_all_read(view: pb.QueueView, subscriptions: Collection[str]) -> bool:
    """Whether nothing is left to these."""
    done = {one.subscription for one in view.subscriptions if one.has_lag and one.lag_records == 0}
    return done.issuperset(subscriptions)


def read_again(coordinators: str, queue: str) -> list[Event]:
    """The whole queue, read by offset by nobody's reader."""
    with RangeReader(coordinators, queue) as reader:
        positions = reader.positions(needs_end=True)
        return [
            Delivered("range", "range", one.offset, one.source, one.seq, one.value.decode(), time.monotonic())
            for one in reader.read(positions.earliest, positions.end)
        ]


def sealed_links(view: pb.QueueView) -> tuple[list[certificates.Claim], list[pb.LinkView]]:
    """What is certified of the chain's links from the first on, and which of them hold records."""
    sealed = []
    for link in view.links:
        if not link.has_end:
            break
        sealed.append(link)
    claims = [
        certificates.Claim(Epoch(one.epoch), one.base, Index(one.end), one.link_hash, one.chain_hash) for one in sealed
    ]
    return claims, [link for link in sealed if link.end]


async def copies_of(
    view: pb.QueueView, links: list[pb.LinkView], of: Collection[str] = ()
) -> dict[tuple[Epoch, str], list[certificates.StoredBatch]]:
    """What both members of each link hold, or those of them that are named, by epoch and member."""
    found = {}
    members = Members()
    try:
        for link in links:
            for side, now in ((link.master, link.master_now), (link.slave, link.slave_now)):
                if of and f"{side.group}-{side.member}" not in of:
                    continue
                name = pb.LinkName(cluster=view.cluster, queue_id=view.queue_id, epoch=link.epoch, to=now)
                asked = pb.CopyLinkRequest(link=name, from_index=0, to_index=link.end, takes_several=True)
                stream: Any = members.stub(side.address).CopyLink(asked, timeout=60, wait_for_ready=True)
                batches: list[certificates.StoredBatch] = []
                async for message in stream:
                    batches += [(message.header, message.payload), *message.following]
                found[Epoch(link.epoch), f"{side.group}-{side.member}"] = batches
    finally:
        await members.close()
    return found
