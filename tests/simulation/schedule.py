"""One schedule: a seed decides the cluster, its load, what breaks when, and every delay in between.

quiet start - load, and faults at any step - everything healed - all must be well again: read to the end, in sync, listed
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Subscription
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.names import Incarnation
from seriatim.protocol.nodes import Paths
from seriatim.protocol.registration import Registration
from tests.simulation import limits, nemesis
from tests.simulation.applications import SMALL_BYTES, Reader, Replay, Sender
from tests.simulation.beside import BESIDE, make_queue
from tests.simulation.ensemble import CUT_OFF_SERVER_S
from tests.simulation.ledger import Ledger, Violation
from tests.simulation.limits import Limits
from tests.simulation.loop import EndOfSteps, Host
from tests.simulation.nemesis import OPERATOR_PATIENCE_S, Nemesis
from tests.simulation.network import MANY
from tests.simulation.operators import OPERATORS
from tests.simulation.queue import Queue
from tests.simulation.readers import READERS
from tests.simulation.scenarios import IDLE, SCENARIOS, give_up_lost, seek_lost, settle_idle
from tests.simulation.setbacks import SETBACKS
from tests.simulation.stops import CLOSE_S, STOPS
from tests.simulation.verdict import Verdict
from tests.simulation.world import CLUSTER, MemberHost, World, installed

QUEUE = "q"
OTHER = "other"
START_S = 60.0
HEAL_S = 120.0
WINDOWS = (MANY, MANY, MANY, 2, 10)
"""Of messages in a stream."""


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
    `paces`: of readers, in records each 0.1 s, beside 2.5 on average that are sent. `replays`: how often one reads by offset.
    `limits`: None for any. `direct`: how often batches go over direct streams. `polls`: how often readers poll. `acts`: how often they commit, and
    seek, of their own accord.
    `stops`: how often something is stopped on purpose before a fault, or by it.
    `beside`: how often there is another queue, on the same groups; `changes`: how often that one is made, or deleted, before a fault.
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
    replays: float = 0.2
    limits: Limits | None = None
    direct: float = 0.0
    polls: float = 0.0
    acts: float = 0.0
    stops: float = 0.0
    beside: float = 0.0
    changes: float = 0.3


ANY: Final = Shape(direct=0.5, polls=0.3, acts=0.2, stops=0.08, beside=1 / 6)
"""Whatever there is. Plants, which take their schedules from shapes of their own, were found without direct streams, readers that act, stops, and
other queues, unless they say so.
"""


class Stuck(Violation):
    """Everything is healed, and yet something that must happen doesn't (invariant 12)."""


class Schedule(Nemesis):
    """See the module."""

    def __init__(self, seed: int, shape: Shape, *, is_traced: bool = False) -> None:
        self.seed = seed
        self.shape = shape
        chance = random.Random(f"schedule {seed}")
        groups, coordinators = chance.choice(shape.groups), chance.choice(shape.coordinators)
        world = World(seed, groups=groups, coordinators=coordinators)
        super().__init__(world, world.add_queue(QUEUE), chance)
        self._kinds = list(shape.kinds or FAULTS)
        self.stop_chance = random.Random(f"stop {seed}")
        self.queue_chance = random.Random(f"queue {seed}")
        self.faults: list[str] = []
        if is_traced:
            self.world.trace = []
        self.queue.settings = shape.settings or self._any_settings(chance, f"{seed}")
        self.has_other = self.queue_chance.random() < shape.beside
        some = limits.some(random.Random(f"limits {seed}"), are_several=self.has_other)
        world.limits = shape.limits or some

    def _any_settings(self, chance: random.Random, of: str) -> pb.QueueSettings:
        durability = chance.choices(("sync", "interval", "async", "memory"), (7, 1, 1, 1))[0]
        flush_ms = chance.choice((5, 200))
        return pb.QueueSettings(
            durability=durability,
            flush_ms=flush_ms,
            readmit=chance.choices(("drained", "in-sync"), (3, 1))[0],
            groups=self._some_groups(of),
            rotate_ms=random.Random(f"age {of}").choice((None, None, None, 0, 1000)),
            max_record_bytes=random.Random(f"limit {of}").choice((0, SMALL_BYTES)),
        )

    def _some_groups(self, of: str) -> tuple[str, ...]:
        """Those that a queue is given, in their order; none, as most often: it is served by all."""
        names, chance = self.world.group_names, random.Random(f"groups {of}")
        return tuple(chance.sample(names, 2)) if len(names) > 2 and chance.random() < 0.4 else ()

    # ---- the whole

    def go(self) -> None:
        world, chance = self.world, self.chance
        world.network.mean_delay_s = chance.choice((0.0002, 0.001, 0.01))
        world.ensemble.lag_s = chance.choice((0.001, 0.004, 0.02))
        world.ensemble.cut_off_server_s = random.Random(f"cut off {self.seed}").choice(CUT_OFF_SERVER_S)
        world.network.window = random.Random(f"window {self.seed}").choice(WINDOWS)
        world.network.is_direct = random.Random(f"direct {self.seed}").random() < self.shape.direct
        self._add_applications()
        if self.has_other:
            self._add_other()
        self._start()
        self.until(lambda: self.queue.document is not None, "the queue is made", START_S)
        self.until(lambda: self._kept() > 0, "the first record is kept", START_S)
        if self.has_other and self.queue_chance.random() < 0.6:
            make_queue(self, self.other)
        for _ in range(chance.randint(*self.shape.faults)):
            world.loop.run(world.loop.now_s + chance.choice((0.05, 0.5, 2.0)) * chance.random())
            if self.stop_chance.random() < self.shape.stops:
                self.queue = world.queues[0]  # which others stand by for
                self._harm(list(STOPS), self.stop_chance)
                world.loop.run(world.loop.now_s + self.stop_chance.choice((0.0, 0.02, 0.6)) * self.stop_chance.random())
            if self.has_other and self.queue_chance.random() < self.shape.changes:
                self._harm(list(BESIDE), self.queue_chance)
            self.queue = self.queue_chance.choice(world.live_queues)
            self._harm(self._kinds, chance)
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
            self._add_sender(self.queue, name, mode)
        pace = random.Random(f"pace {self.seed}").choice(self.shape.paces)
        readers = {"reader-1": "main", "reader-2": "main"} | ({"audit": "audit"} if chance.random() < 0.4 else {})
        for name, subscription in readers.items():
            polls = random.Random(f"polls {self.seed}").random() < self.shape.polls
            chance_to_act = random.Random(f"acts {self.seed} {name}")
            acts = chance_to_act if chance_to_act.random() < self.shape.acts else None
            self._add_reader(self.queue, name, subscription, pace, polls=polls, acts=acts)
        if random.Random(f"replay {self.seed}").random() < self.shape.replays:
            self.add(Replay.NAME, Replay(world, self.queue).main, self.queue)
        world.begin_queue(self.queue)
        self.add("operator", self._create_queue, self.queue)

    def _add_sender(self, queue: Queue, name: str, mode: float) -> None:
        source = name if mode < 0.8 else "sender"
        sender = Sender(self.world, queue, source, has_own_seqs=mode < 0.6, pause_s=self.shape.pause_s)
        self.add(name, sender.main, queue)
        queue.senders.append(name)

    def _add_reader(
        self, queue: Queue, name: str, subscription: str, pace: int, *, polls: bool, acts: random.Random | None
    ) -> None:
        # What it waits for, and reads once more, is not to keep it behind for good.
        own_pace = max(pace, 5 * min(self.shape.paces)) if acts else pace
        self.add(name, Reader(self.world, queue, name, subscription, own_pace, polls=polls, acts=acts).main, queue)
        queue.readers.append(name)

    def _add_other(self) -> None:
        """Another queue, which is made later on, and its applications, whom nobody stands by for."""
        chance = self.queue_chance
        self.other = other = self.world.add_queue(OTHER)
        other.settings = self._any_settings(chance, f"{self.seed} {OTHER}")
        other.settings.retention_ms = chance.choice((1, 1000, 24 * 3600 * 1000))
        self._add_sender(other, "sender-3", chance.random())
        acts = random.Random(f"acts {self.seed} {OTHER}") if chance.random() < self.shape.acts else None
        polls = chance.random() < self.shape.polls
        self._add_reader(other, "reader-3", "main", chance.choice(self.shape.paces), polls=polls, acts=acts)

    def add(self, name: str, main: Callable, queue: Queue) -> None:
        """A host, and what runs there for a queue: nothing while that isn't there."""
        world = self.world

        async def when_there() -> None:
            world.cancel_at_stop()
            while not queue.is_there:  # noqa: ASYNC110 - nobody tells of that
                await asyncio.sleep(0.1)
            world.at_stop(lambda: None)
            await main()

        world.add_host(Host(name, world.address(3), *world._clock()))
        world.mains[name] = when_there

    async def _create_queue(self) -> None:
        request = pb.CreateQueueRequest(queue=self.queue.name, settings=self.queue.settings)
        async with Coordinators(self.world.coordinator_addresses) as coordinators:
            await coordinators.call_within("CreateQueue", request, 50.0)

    def _kept(self) -> int:
        return sum(sent.acknowledged_at_s is not None for sent in self.queue.ledger.sent.values())

    def until(self, is_so: Callable[[], bool], what: str, within_s: float) -> None:
        loop = self.world.loop
        if not loop.run(loop.now_s + within_s, is_so):
            self._note_state()
            raise Stuck(f"12: not within {within_s:g} s: {what}")

    def _note_state(self) -> None:
        """For whoever reads the trace: where everything stands."""
        for queue in self.world.live_queues:
            self._note_queue(queue)
        for path, node in self.world.ensemble.leader.nodes.items():
            if "/members/" in path:
                self.world.note(f"{path} {node.data!r}")

    def _note_queue(self, queue: Queue) -> None:
        world, ledger, document = self.world, queue.ledger, queue.document
        world.note(f"queue {queue.name}:")
        unread = [
            one for one, sent in ledger.sent.items() if sent.acknowledged_at_s is not None and one not in ledger.places
        ]
        world.note(f"kept, not read: {unread}")
        for name, progress in ledger.progress.items():
            world.note(
                f"{name} was handed {len(progress.delivered)} of {len(ledger.records)}, committed {progress.committed}"
            )
        if document is not None:
            world.note(f"send list {document.send_list}, stale cursors {document.stale_cursors}")
            for link in document.links:
                world.note(f"link {link.epoch} {link.group} {link.state} end={link.end} {link.master.incarnation}")
            for one in document.subscriptions:
                world.note(f"subscription {one.name} {one.consume_list}")

    # ---- harm

    def _harm(self, kinds: list[str], chance: random.Random) -> None:
        kind = chance.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]
        self.faults.append(kind)
        self.world.note(f"FAULT {kind}, of queue {self.queue.name}")
        KINDS[kind][1](self)

    # ---- and after it

    def _heal(self) -> None:
        world = self.world
        world.note("everything is healed")
        world.dies_at_write.clear()
        world.at_chain_write = None
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
                host.disk.is_still = False
                host.disk.room_bytes = None
                if host.disk.is_failing or host.disk.is_full:
                    host.disk.is_failing = host.disk.is_full = False
                    world.kill(name, is_power=False)
            if host.process is not None:
                host.process.steps_to_live = None
                host.process.away_s = 0.0
            world.start(name)
            process = host.process
            assert process is not None
            for session in world.ensemble.sessions_of(process):
                session.heard_of()

    def _settle(self) -> None:
        world = self.world
        queues = world.live_queues
        self._until_stopped()
        self._resume_operator()
        self.later(OPERATOR_PATIENCE_S + 1, self._resume_operator)  # a drain that was asked for before may come late
        self.until_sending_goes_on(HEAL_S)
        for queue in queues:
            queue.is_draining = True
        self.until(lambda: all(map(self._is_read, queues)), "everything is read", HEAL_S)
        self.until(self._is_committed, "all that was handed out is committed, at both members", HEAL_S)
        self.until(self._is_whole, "every group is whole, in sync and listed", HEAL_S)
        self.until(self._is_let_go, "the members forget what is kept no longer", HEAL_S)
        self.until(self._is_cleared_away, "deleted queues are cleared away", HEAL_S)
        # Whole again, too: a link that ends just then may have at its end what no sender was told of and nobody has read yet.
        self.until(
            lambda: all(map(self._is_read, queues)) and self._is_whole(), "what was acknowledged last is read", HEAL_S
        )
        by_name = {name: host.disk for name, host in world.hosts.items() if isinstance(host, MemberHost)}
        for queue in queues:
            verdict = Verdict(queue)
            verdict.check_end()
            verdict.check_copies(by_name, self._damaged_keys)
        for path in world.ensemble.watched_in_vain():
            if path.startswith(Paths(CLUSTER).queues):
                raise Violation(f"12: somebody watches {path}, which never comes again")
        if problems := [*world.loop.problems, *world.loop.unseen()]:
            raise Violation(f"not handled: {problems[0]}")

    def until_sending_goes_on(self, within_s: float) -> None:
        """Something sent from now on to each queue is acknowledged, or more than can have been on its way: a log may have much to send first."""
        now_s = self.world.loop.now_s

        def goes_on(queue: Queue) -> bool:
            new = [one for one in queue.ledger.sent.values() if (one.acknowledged_at_s or 0) > now_s]
            return len(new) > 50 or any(one.at_s > now_s for one in new)

        self.until(lambda: all(map(goes_on, self.world.live_queues)), "sending goes on", within_s)

    def calm(self) -> None:
        """Everything is healed, and no fault is under way; all is well again, while records flow."""
        self.leave()
        self._heal()
        self._until_stopped()
        self._resume_operator()
        self.until_sending_goes_on(HEAL_S)
        self.until(self._is_whole, "every group is whole, in sync and listed", HEAL_S)

    def leave(self) -> None:
        """What was to be done later isn't."""
        for step in self._pending:
            step.cancel()
        self._pending.clear()

    def _until_stopped(self) -> None:
        """Who was asked to before everything was healed."""
        if names := self.world.stopping:
            self.until(lambda: not self.world.stopping, f"{', '.join(names)} stop", CLOSE_S)

    def _resume_operator(self) -> None:
        for group in self.world.group_names:
            self.operate("ResumeGroup", pb.GroupRequest(group=group))
        for queue in self.world.live_queues:
            settle_idle(self, queue)
        self.later(15.0, give_up_lost, self)
        self.later(15.0, seek_lost, self)

    def links_without_cursors(self, document: ChainDocument) -> set[int]:
        """Epochs of this queue of which a member says that cursors are lost, and whom to seek."""
        said = [
            registration.problem
            for name in self.world.member_names
            if (registration := _registration(self.world, name))
        ]
        told = re.compile(
            rf"queue (?:{document.name}|{document.queue_id}) epoch (\d+): .*; (?:unless it soon has them, )?seek "
        )
        return {int(found[1]) for problem in said if (found := told.match(problem))}

    def is_all_read(self) -> bool:
        """Of the queue that the present fault is about."""
        return self._is_read(self.queue)

    def _is_read(self, queue: Queue) -> bool:
        """Every subscription was handed all that was acknowledged; a replay, which asks from time to time, what was sent last too."""
        verdict = Verdict(queue)
        names = [name for name in queue.ledger.progress if queue.is_draining or name != Replay.NAME]
        missing = chain(verdict.undelivered(), *map(verdict.lacking, names))
        return next(missing, None) is None

    def _is_committed(self) -> bool:
        """Whether both members of the link that somebody reads have a cursor behind all of it that was handed out."""
        found = [(queue.ledger, queue.document) for queue in self.world.live_queues]
        return all(
            self._has_committed(ledger, document, one)
            for ledger, document in found
            if document is not None
            for one in document.subscriptions
        )

    def _has_committed(self, ledger: Ledger, document: ChainDocument, one: Subscription) -> bool:
        link, delivered = (
            document.link(one.consume_list[0]) if one.consume_list else None,
            ledger.progress[one.name].delivered,
        )
        if link is None:
            return True
        handed_out = (
            record for record in ledger.standing() if record.epoch == link.epoch and record.offset in delivered
        )
        reached = max((record.index + 1 for record in handed_out), default=0)
        return not reached or self.world.oracle.readings.has_cursors(document.queue_id, link, one, reached)

    def _is_present(self, name: str) -> bool:
        """Whether the process that runs now is registered, and says that it lacks nothing."""
        host = self.world.hosts[name]
        assert isinstance(host, MemberHost)
        registration = _registration(self.world, name)
        now = Incarnation(host.disk.disk_id, host.disk.starts)
        return registration is not None and registration.incarnation == now and registration.is_in_sync

    def _is_whole(self) -> bool:
        return all(map(self.is_listed, self.world.live_queues)) and all(map(self._is_present, self.world.member_names))

    def is_listed(self, queue: Queue) -> bool:
        """Whether every group that may serve it is listed, and all that lies before its last link is read."""
        document = queue.document
        if document is None:
            return False
        names, link = self.world.group_names, document.last_link
        # Who serves stays listed until its link ends, whoever may.
        serving = {link.group} if link is not None and link.certificate is None else set()
        if set(document.send_list) != {one for one in document.settings.groups or names if one in names} | serving:
            return False
        last = () if document.last_link is None else (document.last_link.epoch,)
        return all(link.certificate is not None for link in document.links[:-1]) and all(
            one.name == IDLE or one.consume_list in {(), last} for one in document.subscriptions
        )

    def _is_let_go(self) -> bool:
        """No member holds anything of links that left the chain, nor of queues that were deleted."""
        first_kept = {one.queue_id: one.dropped.epoch for one in self.world.oracle.documents.values()}
        disks = [host.disk for host in self.world.hosts.values() if isinstance(host, MemberHost)]
        return all(disk.chains() <= first_kept.keys() for disk in disks) and all(
            epoch >= first_kept.get(queue_id, epoch + 1) for disk in disks for queue_id, epoch in disk.links()
        )

    def _is_cleared_away(self) -> bool:
        """No node is left of any queue but those that are there."""
        return len(self.world.ensemble.leader.children[Paths(CLUSTER).queues]) == len(self.world.live_queues)


def _registration(world: World, name: str) -> Registration | None:
    group, member = name.split("-")
    node = world.ensemble.leader.nodes.get(Paths(CLUSTER).member(group, member))
    return None if node is None else Registration.decode(node.data)


FAULTS: dict[str, tuple[float, Callable[[Any], None]]] = {
    **nemesis.KINDS,
    **SCENARIOS,
    **SETBACKS,
    **OPERATORS,
    **READERS,
}
KINDS = {**FAULTS, **STOPS, **BESIDE}


def run(seed: int, shape: Shape | None = None, *, is_traced: bool = False) -> Outcome:
    """Run the schedule of a seed; the same seed and shape give the same steps.

    What it leaves behind, some 3 MB of tasks that never ended, is for the caller to collect, and not during a schedule.
    """
    gc.disable()
    ignoring, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return _outcome(seed, shape or ANY, is_traced=is_traced)
    finally:
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
        sum(len(one.records) for one in world.ledgers.values()),
        tuple(schedule.faults),
        tuple(world.trace or ()),
    )
