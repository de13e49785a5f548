"""A world for the coordinator's procedures: one chain document, members that hold batches, and any order of events.

Members do what the protocol asks of them, in a few lines. Every write of the chain is held against the invariants, and
every recorded end against what was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from seriatim.coordinator.core import acquire_send, chain, close_link, invariants
from seriatim.coordinator.core.acquire_send import SendRequest
from seriatim.coordinator.core.events import (
    Answer,
    ChainConflict,
    ChainRead,
    ChainWritten,
    Effect,
    ElectionSeen,
    Event,
    KeptSealsRead,
    LinkOpened,
    LookUpElection,
    LookUpSessions,
    OpenFailed,
    ReadChain,
    ReadKeptSeals,
    SealAnswered,
    SealFailed,
    SendOpen,
    SendSeal,
    SessionsSeen,
    WakeAfter,
    Woken,
    WriteChain,
)
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.protocol.chain import ChainDocument, Durability, LinkState, QueueSettings
from seriatim.protocol.errors import (
    DiskFailed,
    Fenced,
    OlderVersion,
    Sealed,
    SeriatimError,
    Unreachable,
    WrongIncarnation,
)
from seriatim.protocol.hashing import hash_after_batch
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, MemberName, QueueId, Token
from seriatim.protocol.position import START, Position
from seriatim.protocol.registration import Registration

GROUPS = ("g1", "g2", "g3")


@dataclass
class Copy:
    """What one member holds of one link."""

    positions: list[Position] = field(default_factory=lambda: [START])
    committed: int = 0
    is_sealed: bool = False
    is_open: bool = False
    version: int = -1
    token: int = 0

    def add(self, header: bytes, marks: dict[str, int]) -> None:
        last = self.positions[-1]
        self.positions.append(Position(Index(last.index + 1), hash_after_batch(last.hash, header), marks))

    def answer(self) -> tuple[Position, ...]:
        return tuple(one for one in self.positions if one.index >= self.committed)


@dataclass
class Member:
    """`has_failed`: its disk has, and its process lives: it takes nothing more, and can't seal."""

    name: MemberName
    disk: int = 1
    start: int = 1
    is_up: bool = True
    is_registered: bool = True
    has_failed: bool = False
    copies: dict[Epoch, Copy] = field(default_factory=dict)

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.name}-disk{self.disk}", self.start)

    def copy(self, epoch: Epoch) -> Copy:
        return self.copies.setdefault(epoch, Copy())


class World:
    """`acknowledged`: by epoch, how many batches were acknowledged there. `granted`: epochs given to a sender.

    `lag`: by how many versions what coordinators remember is behind; None: they remember nothing.
    """

    def __init__(self, durability: Durability = Durability.SYNC, groups: tuple[str, ...] = GROUPS) -> None:
        self.members = {(group, place): Member(MemberName(group, place)) for group in groups for place in ("a", "b")}
        self.document = chain.created(
            cluster="c",
            queue_id=QueueId(1),
            name="orders",
            settings=QueueSettings(durability=durability),
            groups=groups,
            now_ms=0,
        )
        self.version = ChainVersion(0)
        self.now_ms = 1
        self.seq, self.source = 0, "s"
        self.acknowledged: dict[Epoch, int] = {}
        self.granted: dict[Epoch, int] = {}
        self.first_in_line = "node-1"
        self.written: list[str] = []
        self.lag: int | None = None
        self.earlier: list[tuple[ChainDocument, ChainVersion]] = []

    # ---- what the procedures see

    def registry(self) -> Registry:
        groups: dict[str, dict[str, Registration]] = {}
        for (group, place), member in self.members.items():
            states = groups.setdefault(group, {})
            if member.is_registered:
                peer = self.members[group, "b" if place == "a" else "a"]
                states[place] = Registration(
                    member.incarnation, f"{member.name}:1", peer.incarnation if peer.is_up else None, is_in_sync=True
                )
        return Registry({name: GroupState(name, members=states) for name, states in groups.items()})

    def carry_out(self, effect: Effect) -> Event:
        match effect:
            case ReadChain(may_be_remembered):
                if not may_be_remembered or self.lag is None or len(self.earlier) < self.lag:
                    return ChainRead(self.document, self.version, self.registry())
                known = [*self.earlier, (self.document, self.version)][-1 - self.lag]
                return ChainRead(*known, self.registry(), is_remembered=True)
            case WriteChain(document, expected, what):
                return self.write(document, expected, what)
            case LookUpSessions():
                return SessionsSeen(self.registry())
            case LookUpElection():
                return ElectionSeen(self.first_in_line)
            case SendOpen():
                return self.open(effect)
            case SendSeal():
                return self.seal(effect)
            case ReadKeptSeals():
                return KeptSealsRead({})
            case WakeAfter():
                return Woken()
            case _:
                raise AssertionError(effect)

    def write(self, document: ChainDocument, expected: ChainVersion, what: str) -> Event:
        if expected != self.version:
            return ChainConflict()
        invariants.check_change(self.document, document)
        for link in document.links:
            if link.end is not None and link.certificate is not None and link.certificate.is_whole:
                assert link.end >= self.acknowledged.get(link.epoch, 0), f"acknowledged records cut off: {what}"
            if link.state is LinkState.OPENING:
                assert link.epoch not in self.granted
        self.earlier.append((self.document, self.version))
        self.document, self.version = document, ChainVersion(self.version + 1)
        self.written.append(what)
        return ChainWritten(self.version)

    # ---- members

    def open(self, effect: SendOpen) -> Event:
        place = effect.side.name.member
        try:
            return LinkOpened(place, self._opened(effect))
        except SeriatimError as error:
            return OpenFailed(place, error)

    def _opened(self, effect: SendOpen) -> Position:
        member = self._reached(effect.side.name)
        if member.incarnation != effect.side.incarnation:
            raise WrongIncarnation("another incarnation")
        if member.has_failed:
            raise DiskFailed("the disk failed")
        copy = member.copy(effect.link.epoch)
        if effect.version < copy.version:
            raise OlderVersion("older version")
        if copy.is_sealed:
            raise Sealed("sealed")
        if effect.token < copy.token:
            raise Fenced("older token")
        copy.version, copy.token, copy.is_open = effect.version, effect.token, True
        self._equalise(effect)
        return copy.positions[-1]

    def _equalise(self, effect: SendOpen) -> None:
        copies = []
        for side in (effect.link.master, effect.link.slave):
            member = self.members[side.name.group, side.name.member]
            if not member.is_up or member.has_failed or member.incarnation != side.incarnation:
                return
            if member.copy(effect.link.epoch).is_sealed:
                return
            copies.append(member.copy(effect.link.epoch))
        longer = max(copies, key=lambda copy: len(copy.positions))
        for copy in copies:
            copy.positions = list(longer.positions)

    def seal(self, effect: SendSeal) -> Event:
        place = effect.side.name.member
        try:
            return SealAnswered(place, self._sealed(effect))
        except SeriatimError as error:
            return SealFailed(place, error)

    def _sealed(self, effect: SendSeal) -> SealAnswer:
        member = self._reached(effect.side.name)
        if member.has_failed:
            return SealAnswer(Wholeness.UNKNOWN, member.incarnation, (), "the disk failed", has_failed=True)
        copy = member.copy(effect.link.epoch)
        if effect.version < copy.version:
            raise OlderVersion("older version")
        copy.version, copy.is_sealed = effect.version, True
        return SealAnswer(Wholeness.WHOLE, member.incarnation, copy.answer())

    def _reached(self, name: MemberName) -> Member:
        member = self.members[name.group, name.member]
        if not member.is_up:
            raise Unreachable(f"{name} is down")
        return member

    # ---- what senders and fate do

    def append(self, epoch: Epoch, reach: int) -> None:
        """A batch reaches both members (2) and is acknowledged, or only master (1), or only slave (0)."""
        link = self.document.link(epoch)
        if link is None:
            return
        sides = (link.master, link.slave)
        copies = []
        for side in sides:
            member = self.members[side.name.group, side.name.member]
            copy = member.copy(epoch)
            if not member.is_up or member.incarnation != side.incarnation or copy.is_sealed or not copy.is_open:
                return
            if member.has_failed and reach != len(copies):  # a batch may still reach the other one alone
                return
            copies.append(copy)
        if copies[0].positions[-1] != copies[1].positions[-1]:
            return  # the slave refuses what doesn't continue its copy
        self.seq += 1
        header, marks = f"batch {self.seq}".encode(), {self.source: self.seq}
        for copy in copies if reach == 2 else [copies[1 - reach]]:
            copy.add(header, marks)
        if reach == 2:
            for copy in copies:
                copy.committed = copies[0].positions[-1].index
            self.acknowledged[epoch] = copies[0].committed

    def kill(self, key: tuple[str, str]) -> None:
        self.members[key].is_up = False

    def fail(self, key: tuple[str, str]) -> None:
        self.members[key].has_failed = True

    def expire(self, key: tuple[str, str]) -> None:
        self.members[key].is_registered = self.members[key].is_up

    def restart(self, key: tuple[str, str], *, is_blank: bool = False) -> None:
        """The old session is gone, all open links are sealed, then it registers (protocol.md 5.5)."""
        member = self.members[key]
        if is_blank:
            member.disk, member.start, member.copies = member.disk + 1, 0, {}
        for copy in member.copies.values():
            copy.is_sealed = True
        member.start += 1
        member.is_up, member.is_registered, member.has_failed = True, True, False


@dataclass
class Run:
    """One call at one coordinator: its state and what it is still to be told."""

    world: World
    state: Any
    step: Callable[[Any, Event, int], tuple[Any, tuple[Effect, ...]]]
    pending: list[Effect] = field(default_factory=list)
    answer: object = None

    def take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Answer):
                self.answer = effect.result
                self.pending = []
                return
            if isinstance(effect, ReadChain | WriteChain):
                self.pending = []
            self.pending.append(effect)

    def go(self, number: int = 0) -> None:
        """One effect is carried out, and its event told."""
        effect = self.pending.pop(number % len(self.pending))
        event = self.world.carry_out(effect)
        self.state, effects = self.step(self.state, event, self.world.now_ms)
        self.take(effects)

    def finish(self) -> object:
        for _ in range(10_000):
            if self.answer is not None:
                return self.answer
            self.go()
        raise AssertionError("the procedure doesn't end")


def begun(world: World, begin: tuple[Any, tuple[Effect, ...]], step: Callable[..., Any]) -> Run:
    run = Run(world, begin[0], step)
    run.take(begin[1])
    return run


def send_call(world: World, *, token: int = 0, failed_epoch: int = 0, node: str = "node-1") -> Run:
    request = SendRequest(node, Token(token), Epoch(failed_epoch))
    return begun(world, acquire_send.start(request), acquire_send.step)


def close_call(world: World, epoch: int) -> Run:
    return begun(world, close_link.start(Epoch(epoch)), close_link.step)


def with_member(registry: Registry, group: str, place: str = "a", **said: Any) -> Registry:
    """The registry once a member of the group says something else of itself; all other groups are the same objects."""
    state = registry.groups[group]
    member: Registration = replace(state.members[place], **said)
    changed = replace(state, members={**state.members, place: member})
    return replace(registry, groups={**registry.groups, group: changed})


def with_subscription(world: World, name: str = "s") -> None:
    from seriatim.coordinator.core import subscriptions

    position = subscriptions.located(world.document, subscriptions.EARLIEST, None)
    world.document = subscriptions.created(world.document, name, position, 0)
