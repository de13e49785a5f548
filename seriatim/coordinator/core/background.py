"""What the elected coordinator does unasked: a pure function from what is recorded and registered to actions.

It keeps no memory but what it was told already (`Told`); losing that repeats harmless calls and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Self

from seriatim.coordinator.core import chain, readmission, retention, rotation
from seriatim.coordinator.core.registry import MEMBERS, GroupState, Registry
from seriatim.protocol.chain import ChainDocument, Link, LinkState, Whose
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, MemberName, QueueId, SubscriptionId, Token

CLOSING_GRACE_MS = 300
"""A closing link is left this long to the call that began to close it."""
QUIET_MS = 1000
"""What isn't urgent is written only to a chain that nobody changed for this long: it is not to overtake a sender's call, and
by then a living member has noticed that its peer died. A group that sending waits for is urgent. That somebody else was elected,
or a subscription made, sought or deleted, is no change: where clients come and go all the time no link would ever be left, or let go.
"""
ROTATION_QUIET_MS = 10_000
"""As `QUIET_MS`, for a rotation that nobody asked for."""
ORPHAN_AFTER_MS = 60_000
"""A queue without a name, or without a chain, is one whose making was cut off, once it is this old."""


@dataclass(frozen=True, slots=True)
class SeenChain:
    """A chain document as it was last read, and since when (milliseconds) it has been so, whichever clients came and went.

    `size_bytes`: of its node.
    """

    document: ChainDocument
    version: ChainVersion
    since_ms: int
    size_bytes: int = 0

    @classmethod
    def after(
        cls, before: SeenChain | None, document: ChainDocument, version: ChainVersion, now_ms: int, size_bytes: int = 0
    ) -> Self:
        """What was just read; `before`: what was seen of the same chain before, where that counts."""
        if before is None:
            return cls(document, version, now_ms, size_bytes)
        stayed = {one.whose for one in before.document.subscriptions} & {one.whose for one in document.subscriptions}
        is_same = _without_clients(before.document, stayed) == _without_clients(document, stayed)
        return cls(document, version, before.since_ms if is_same else now_ms, size_bytes)


def _without_clients(document: ChainDocument, stayed: AbstractSet[Whose]) -> ChainDocument:
    """Without who was elected, and with these of the subscriptions: one that was sought is as another one."""
    subscriptions = tuple(
        replace(one, reader_token=Token(0), reader_node="") for one in document.subscriptions if one.whose in stayed
    )
    return replace(
        document,
        sender_token=Token(0),
        sender_node="",
        subscriptions=subscriptions,
        next_subscription_id=SubscriptionId(1),
    )


@dataclass(slots=True)
class Told:
    """What members have confirmed to the present elected coordinator, which adds to it.

    `ends`: the member has the link exactly up to its end. `drops`: below which epoch it let links go; 0: the queue.
    """

    ends: set[tuple[QueueId, Epoch, bytes, Incarnation]] = field(default_factory=set)
    drops: set[tuple[QueueId, Epoch, Incarnation]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class View:
    """All that the background work looks at.

    `names`: the queue names and whose they are. `sealed`: links of which a member said that it takes no more records.
    `bare`: queues that have nodes and no chain, and since when (milliseconds).
    """

    chains: tuple[SeenChain, ...]
    registry: Registry
    names: Mapping[str, QueueId]
    told: Told
    sealed: frozenset[tuple[QueueId, Epoch]] = field(default_factory=frozenset)
    bare: Mapping[QueueId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CloseIt:
    """Run the procedure `close_link`. `there`: of a lost link, who of its group can be asked; others, later, may know more."""

    queue_id: QueueId
    epoch: Epoch
    why: str
    there: tuple[Incarnation, ...] = ()


@dataclass(frozen=True, slots=True)
class Rotate:
    """Go on with the next group, unless it is better not to (`rotation.obstacle`): that takes asking members."""

    queue_id: QueueId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Change:
    """Write the chain by compare-and-set; a conflict is no harm, the next look sees the new one."""

    document: ChainDocument
    expected: ChainVersion
    what: str


@dataclass(frozen=True, slots=True)
class TellEnd:
    """RecordEnd to the member that is at `member` now."""

    document: ChainDocument
    version: ChainVersion
    link: Link
    member: MemberName
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class TellDrop:
    """DropLinks to the member that is at `member` now; `below` 0: the whole queue."""

    document: ChainDocument
    below: Epoch
    member: MemberName
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class FreeName:
    """Give the name of a deleted queue back: who deleted it was cut off before."""

    queue_id: QueueId
    name: str


@dataclass(frozen=True, slots=True)
class ClearQueue:
    """Every registered member let the deleted queue go: its nodes go, too, unless there is a group that the registry lacks."""

    queue_id: QueueId
    name: str


@dataclass(frozen=True, slots=True)
class SweepQueue:
    """Delete the empty nodes of a queue without a chain: its making was cut off, or a sender came back that was away when it went."""

    queue_id: QueueId


Action = CloseIt | Rotate | Change | TellEnd | TellDrop | FreeName | ClearQueue | SweepQueue


def plan(view: View, now_ms: int) -> tuple[Action, ...]:
    """The actions that are due now. At most one of them writes each chain, beside what brings links to their end."""
    actions: list[Action] = [
        SweepQueue(queue_id) for queue_id, since_ms in view.bare.items() if now_ms - since_ms > ORPHAN_AFTER_MS
    ]
    for seen in view.chains:
        # Who keeps another queue of its id says so, and lets go nothing for a deleted one: that is recovered when this one is gone (H16).
        if view.registry.awaited if seen.document.is_deleted else view.registry.standstill(seen.document.queue_id):
            continue
        if seen.document.is_deleted:
            actions += _deletion(seen, view, now_ms)
            continue
        if _is_orphan(seen, view, now_ms):
            actions.append(Change(chain.deleted(seen.document), seen.version, "deleted: its making was cut off"))
            continue
        closings = tuple(_closings(seen, view, now_ms))
        actions += closings
        # A lost link may stay so until an operator gives it up: nothing else waits for that.
        if {one.epoch for one in closings} <= _lost(seen.document):
            actions += _change(seen, view, now_ms) or _rotation(seen, view, now_ms)
        elif _quiet_ms(seen, now_ms) >= QUIET_MS:
            # Else a chain that the end finds no room in would never get shorter.
            actions += _shorter(seen, seen.document, (), now_ms)
        actions += _ends(seen, view)
        actions += _drops(seen.document, seen.document.dropped.epoch, view)
    return tuple(actions)


def _lost(document: ChainDocument) -> set[Epoch]:
    return {link.epoch for link in document.links if link.state is LinkState.LOST}


def end_key(document: ChainDocument, link: Link, incarnation: Incarnation) -> tuple[QueueId, Epoch, bytes, Incarnation]:
    """By what `Told.ends` knows an end: a link whose tail was abandoned has another hash, and is told again."""
    link_hash = b"" if link.certificate is None else link.certificate.link_hash
    return document.queue_id, link.epoch, link_hash, incarnation


def _quiet_ms(seen: SeenChain, now_ms: int) -> int:
    """How long nobody has changed the chain. A clock that was set back says nothing of that, and is not to make it a long wait."""
    return abs(now_ms - seen.since_ms)


def _is_orphan(seen: SeenChain, view: View, now_ms: int) -> bool:
    """A queue that never had a name, so that nobody has sent to it, or subscribed. One that somebody uses is for people to delete."""
    document = seen.document
    # Its version says nothing: a group that is drained leaves its send list, too.
    if document.sender_token or document.next_subscription_id > 1:
        return False
    is_old = now_ms - document.created_at_ms > ORPHAN_AFTER_MS and _quiet_ms(seen, now_ms) > ORPHAN_AFTER_MS
    return is_old and view.names.get(document.name) != document.queue_id


def _closings(seen: SeenChain, view: View, now_ms: int) -> Iterable[CloseIt]:
    """Links to bring to their end: a member can take no more records (H18), the closer died, or a member returned."""
    document = seen.document
    for link in document.links:
        why = ""
        there: tuple[Incarnation, ...] = ()
        if link.state in (LinkState.OPEN, LinkState.OPENING):
            why = view.registry.absence(link)
            if not why and (document.queue_id, link.epoch) in view.sealed:
                why = "a member has sealed it"
            is_draining = view.registry.group(link.group).is_draining
            if not why and is_draining and chain.can_switch(document, view.registry, seen.size_bytes):
                why = f"{link.group} is being drained"
        elif link.state is LinkState.CLOSING and _quiet_ms(seen, now_ms) >= CLOSING_GRACE_MS:
            why = "nobody finished closing it"
        elif link.state is LinkState.LOST:
            there = tuple(state.incarnation for state in view.registry.group(link.group).members.values())
            why = "it is lost, and a member of its group is there" if there else ""
        if why:
            yield CloseIt(document.queue_id, link.epoch, why, there)


def _change(seen: SeenChain, view: View, now_ms: int) -> tuple[Change, ...]:
    """One write with all that is due: draining groups leave the send list, others come back, old links go."""
    document, registry = seen.document, view.registry
    if _quiet_ms(seen, now_ms) < QUIET_MS and not _waits_for_group(document, registry):
        return ()
    done = []
    serving = chain.serving(document)
    for group in document.send_list:
        if registry.group(group).is_draining and group != serving:
            document = chain.without_group(document, group)
            done.append(f"{group} off the send list, it is being drained")
    for group in readmission.eligible(document, registry):
        if any(link.group == group for link, *_ in _untold(seen, view)):
            continue  # that it is in sync may have been said before a link's end was recorded (invariant 6)
        document = chain.readmitted(document, group)
        done.append(f"{group} back at the send list's tail")
    return _shorter(seen, document, done, now_ms)


def _shorter(seen: SeenChain, document: ChainDocument, done: Sequence[str], now_ms: int) -> tuple[Change, ...]:
    """The write of what was done to the document so far, without the links that are kept no longer; none if that is nothing."""
    epochs = retention.due(document, now_ms)
    if epochs:
        document = retention.without(document, epochs)
        done = (*done, f"links {epochs[0]} to {epochs[-1]} are kept no longer")
    return (Change(document, seen.version, "; ".join(done)),) if done else ()


def _waits_for_group(document: ChainDocument, registry: Registry) -> bool:
    """Whether who wants to send waits until a group comes back.

    No call is in the way then, and no group comes back that can't serve: both its members have answered since its last link ended.
    """
    return not chain.serving(document) and chain.next_group(document, registry) == ""


def _rotation(seen: SeenChain, view: View, now_ms: int) -> tuple[Rotate, ...]:
    document = seen.document
    last = document.last_link
    if last is None or not rotation.is_due(document, view.registry, now_ms):
        return ()
    # How old the link is says the clock of whoever made it: one that is wrong by days is not to make this go round and round.
    quiet_ms = max(QUIET_MS, min(document.settings.rotate_ms, ROTATION_QUIET_MS))
    return (Rotate(document.queue_id, last.epoch),) if _quiet_ms(seen, now_ms) >= quiet_ms else ()


def _ends(seen: SeenChain, view: View) -> Iterable[TellEnd]:
    """Members are told a recorded end until they say that they have it (protocol.md 5.3)."""
    for link, member, incarnation in _untold(seen, view):
        yield TellEnd(seen.document, seen.version, link, member, incarnation)


def _untold(seen: SeenChain, view: View) -> Iterable[tuple[Link, MemberName, Incarnation]]:
    """Sealed links, with each registered member that hasn't said that it has them."""
    document = seen.document
    for link in document.links:
        if link.state is LinkState.SEALED:
            for member, incarnation in _registered(link, view.registry):
                if end_key(document, link, incarnation) not in view.told.ends:
                    yield link, member, incarnation


def _registered(link: Link, registry: Registry) -> Iterable[tuple[MemberName, Incarnation]]:
    for place in MEMBERS:
        state = registry.group(link.group).members.get(place)
        if state is not None:
            yield MemberName(link.group, place), state.incarnation


def ends_written(
    before: ChainDocument, document: ChainDocument, version: ChainVersion, registry: Registry
) -> tuple[TellEnd, ...]:
    """Who is to be told of the ends that a write recorded, in the place of an elected coordinator that stands still.

    A member that is cut off from ZooKeeper hears of its link's end from nobody else, and its readers wait for that.
    """
    open_before = {link.epoch for link in before.links if link.state is not LinkState.SEALED}
    return tuple(
        TellEnd(document, version, link, member, incarnation)
        for link in document.links
        if link.state is LinkState.SEALED and link.epoch in open_before
        for member, incarnation in _registered(link, registry)
    )


def _drops(document: ChainDocument, below: Epoch, view: View) -> Iterable[TellDrop]:
    """To every group's members: any may hold something of the queue."""
    if below == 1:
        return
    for name, state in view.registry.registered.items():
        if (document.queue_id, below, state.incarnation) not in view.told.drops:
            yield TellDrop(document, below, name, state.incarnation)


def _deletion(seen: SeenChain, view: View, now_ms: int) -> list[Action]:
    """First the members let it go, then its nodes go; its id is never used again (H16).

    As long as one is away that may hold something of it, the chain stays, and tells that one when it is back. A group that was
    removed doesn't come back.

    The name is left for a moment to who deletes it: ZooKeeper doesn't tell one node of a name from the next, and what frees it a
    second time, and is late, would free it of the queue that was made meanwhile. But it waits for no member.
    """
    document = seen.document
    due: list[Action] = list(_drops(document, Epoch(0), view))
    is_quiet = _quiet_ms(seen, now_ms) >= QUIET_MS
    if is_quiet and view.names.get(document.name) == document.queue_id:
        due.append(FreeName(document.queue_id, document.name))
    if due or not is_quiet:
        return due
    is_awaited = any(awaits(document, group) for group in view.registry.groups.values())
    return [] if is_awaited else [ClearQueue(document.queue_id, document.name)]


def awaits(document: ChainDocument, group: GroupState) -> bool:
    """Whether a deleted queue stays for this group: a member that is away may hold something of it, if it ever had a link."""
    return document.next_epoch > 1 and bool(group.missing)
