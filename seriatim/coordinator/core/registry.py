"""Groups and members as ZooKeeper knows them: who is registered, as which incarnation, and in which condition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from seriatim.protocol.chain import ChainDocument, ChainMember, Link
from seriatim.protocol.errors import ChainSetBack, UnknownGroup, Unreachable
from seriatim.protocol.names import MemberName, QueueId
from seriatim.protocol.registration import Registration

MEMBERS = ("a", "b")
"""The two places in a group; `a` is the master of new links."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group and those of its members that are registered now, by place (`a`, `b`)."""

    name: str
    is_draining: bool = False
    members: Mapping[str, Registration] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{place}" for place in MEMBERS if place not in self.members)

    def is_peer_connected(self, place: str) -> bool:
        """Whether the member at `place` is connected to the present incarnation of the other one."""
        own = self.members.get(place)
        other = self.members.get("b" if place == "a" else "a")
        return own is not None and other is not None and own.peer == other.incarnation


def not_ready(awaited: tuple[str, ...]) -> Unreachable:
    """The error of a coordinator that waits for these members: another one may do what was asked of it."""
    return Unreachable(f"this coordinator has just come to ZooKeeper, and waits for {', '.join(awaited)}")


def unknown_group(name: str) -> UnknownGroup:
    """The error for a name that no group has."""
    return UnknownGroup(f"there is no group {name}", group=name)


@dataclass(frozen=True, slots=True)
class Registry:
    """All groups that ever had a member and weren't removed, by name. A group without members is registered with none.

    `is_new`: who looks came to ZooKeeper less than a session's time-out ago, so that a member that lives may not be seen yet.
    `outdated`: queues of which who looks has seen a newer chain than there is now, and how. `registered`: all members of all groups
    that are, derived once: each look at a queue asks whether one of them knows more of it.
    """

    groups: Mapping[str, GroupState] = field(default_factory=dict)
    is_new: bool = False
    outdated: Mapping[QueueId, str] = field(default_factory=dict)
    registered: Mapping[MemberName, Registration] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        registered = {
            MemberName(name, place): state
            for name, group in self.groups.items()
            for place, state in group.members.items()
        }
        object.__setattr__(self, "registered", registered)

    def group(self, name: str) -> GroupState:
        return self.groups.get(name) or GroupState(name)

    def member(self, name: MemberName) -> Registration | None:
        return self.group(name.group).members.get(name.member)

    def is_present(self, side: ChainMember) -> bool:
        """Whether the very process that stood on this side of a link when it was made is registered now."""
        state = self.member(side.name)
        return state is not None and state.incarnation == side.incarnation

    def absence(self, link: Link) -> str:
        """Why a member of the link can take no records any more, or empty (protocol.md 5.4)."""
        for side in link.sides:
            state = self.member(side.name)
            if state is None:
                return f"{side.name} is not registered"
            if state.incarnation != side.incarnation:
                return f"{side.name} was started again ({state.incarnation}, the link was made with {side.incarnation})"
        return ""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Members that who looks may not see yet, or that may yet say that a chain is older than their disks.

        Where ZooKeeper was set back everybody comes to it anew, and the first are not to go on without those who know.
        """
        if not self.is_new:
            return ()
        return tuple(
            f"{group.name}-{place}"
            for group in self.groups.values()
            for place in MEMBERS
            if place not in group.members or not group.members[place].has_compared
        )

    def set_back(self, queue_id: QueueId) -> dict[str, str]:
        """Who knows more of a queue than its chain: members, by their disks, and who looks. What each says."""
        seen = {"coordinator": self.outdated[queue_id]} if queue_id in self.outdated else {}
        return seen | {str(name): one.problem for name, one in self.registered.items() if queue_id in one.set_back}

    @property
    def all_set_back(self) -> frozenset[QueueId]:
        """The queues of which somebody knows more than their chains."""
        return frozenset(self.outdated).union(*(state.set_back for state in self.registered.values()))

    def set_back_error(self, document: ChainDocument) -> ChainSetBack | None:
        """The error for who would write the chain, where somebody knows more of the queue: its version would soon be that of what is lost."""
        set_back = self.set_back(document.queue_id)
        if not set_back:
            return None
        said = "; ".join(f"{member}: {what}" for member, what in set_back.items())
        return ChainSetBack(f"the chain of queue {document.name} is an old one: {said}", queue=document.name)

    def standstill(self, queue_id: QueueId) -> dict[str, str]:
        """Why nothing is done by a queue's chain; empty where there is no reason."""
        awaited = self.awaited
        return self.set_back(queue_id) or ({"coordinator": not_ready(awaited).message} if awaited else {})

    def apart(self, name: str) -> str:
        """Which member of a group doesn't reach the other one, and where that is said to be, or empty."""
        group = self.group(name)
        for place, other in zip(MEMBERS, reversed(MEMBERS), strict=True):
            if not group.is_peer_connected(place):
                where = f" at {group.members[other].address}" if other in group.members else ""
                return f"{name}-{place} is not connected to {name}-{other}{where}"
        return ""

    def send_obstacle(self, name: str) -> str:
        """Why a group of a send list can't take records now, or empty (protocol.md 4, step 4)."""
        if name not in self.groups:
            return "no member of it was ever started"
        group = self.groups[name]
        if group.missing:
            return f"{' and '.join(group.missing)} not registered"
        if group.is_draining:
            return "it is being drained by an operator"
        for place in MEMBERS:
            state = group.members[place]
            if not state.is_accepting:
                return f"{name}-{place} takes no records: {state.problem or 'its disk is full'}"
        return ""

    def link_obstacle(self, name: str) -> str:
        """Why no link can be opened on a group now, or empty."""
        return self.send_obstacle(name) or self.apart(name)
