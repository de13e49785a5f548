"""Every kind of fault, as data: who is harmed, how, and for how long.

A role names processes by what they do at that moment (`roles` of the round says who that is); `nemesis` knows how each
kind of harm is done and undone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

Role = Literal[
    "master", "slave", "head", "idle member", "members",
    "coordinator", "other coordinator", "coordinators",
    "zookeeper leader", "zookeeper follower", "zookeepers", "zookeeper majority",
    "sender", "standby sender", "reader", "standby reader",
    "servers",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; healed by a start. `moves`: at another address, with its disk, as a container does."""

    role: Role
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """SIGTERM, as somebody does on purpose; healed by a start."""

    role: Role


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP; healed by SIGCONT."""

    role: Role


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between two roles; with `is_one_way` only the second is deaf to the first."""

    one: Role
    other: Role
    is_one_way: bool = False


@dataclass(frozen=True, slots=True)
class Lose:
    """Packets between two roles are lost by chance, both ways: so many of each hundred that have more bytes than `over_bytes`."""

    one: Role
    other: Role
    percent: int
    over_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Narrow:
    """What the role sends, and what it is sent, passes at so many kbit/s, and queues; the load alone is some 1,000."""

    role: Role
    kbit_s: int


@dataclass(frozen=True, slots=True)
class DiskTrouble:
    """Disks as `disks` can harm them, `filled` and `nearly filled` only members'; healed by mending the disk and starting the server again.

    `slow_ms`: how long a slow flush takes, at least and less than.
    """

    role: Role
    trouble: Literal[
        "write error", "flush error", "slow flush", "still flush", "still", "full", "filled", "nearly filled"
    ]
    slow_ms: tuple[int, int] = (20, 150)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bits of stored records flipped on the disk; `is_killed`: of a member that is dead meanwhile, or its log cut short."""

    role: Role
    is_killed: bool


@dataclass(frozen=True, slots=True)
class BlankDisk:
    """The member is killed, and comes back at the same address with an empty disk."""

    role: Role


@dataclass(frozen=True, slots=True)
class LosePower:
    """Machines of servers without power, all at once: what their file systems weren't told to flush is gone; healed by a start."""

    role: Role


@dataclass(frozen=True, slots=True)
class Order:
    """What people do, on purpose."""

    what: Literal[
        "rotate", "drain the head", "add a group", "remove a group", "restart everything", "create a subscription",
        "seek back", "seek forward", "alter", "leave the head", "replace a coordinator",
    ]  # fmt: skip


Harm = Kill | Stop | Pause | Cut | Lose | Narrow | DiskTrouble | Damage | BlankDisk | LosePower | Order


@dataclass(frozen=True, slots=True)
class Kind:
    """`held_s`: least and most seconds from harm to healing. `share`: its part of the faults that aren't headlines."""

    name: str
    family: Literal["processes", "network", "impaired network", "zookeeper", "disk", "people", "two at once"]
    harms: tuple[Harm, ...]
    held_s: tuple[float, float] = (0.5, 1.0)
    is_headline: bool = False
    share: float = 1.0


def _kinds_of_processes() -> list[Kind]:
    past_session_s, briefly_s = (2.0, 3.0), (0.5, 1.2)
    return [
        Kind("master killed", "processes", (Kill("master"),), is_headline=True),
        Kind("slave killed", "processes", (Kill("slave"),), is_headline=True),
        Kind("master paused", "processes", (Pause("master"),), (0.7, 1.8), is_headline=True),
        Kind("elected sender killed", "processes", (Kill("sender"),), (1.9, 2.0), is_headline=True),
        Kind("sender stopped on purpose", "processes", (Stop("sender"),), (0.5, 0.7), is_headline=True),
        Kind("both members of the head killed", "processes", (Kill("head"),), (0.5, 2.5), share=3),
        Kind("master back at another address", "processes", (Kill("master", moves=True),)),
        Kind("slave back at another address", "processes", (Kill("slave", moves=True),)),
        Kind("both members of the head back at other addresses", "processes", (Kill("head", moves=True),)),
        Kind("a member of another group killed", "processes", (Kill("idle member"),)),
        Kind("elected coordinator killed", "processes", (Kill("coordinator"),), share=2),
        Kind("other coordinator killed", "processes", (Kill("other coordinator"),)),
        Kind("both coordinators killed", "processes", (Kill("coordinators"),)),
        Kind("standby sender killed", "processes", (Kill("standby sender"),)),
        Kind("elected reader killed", "processes", (Kill("reader"),), (1.9, 2.2), share=2),
        Kind("elected reader stopped on purpose", "processes", (Stop("reader"),)),
        Kind("standby reader killed", "processes", (Kill("standby reader"),)),
        Kind("all servers killed at once", "processes", (Kill("servers"),), (0.1, 1.0), share=0.7),
        Kind("master paused past its session", "processes", (Pause("master"),), past_session_s, share=2),
        Kind("slave paused", "processes", (Pause("slave"),), briefly_s),
        Kind("slave paused past its session", "processes", (Pause("slave"),), past_session_s),
        Kind("both members of the head paused", "processes", (Pause("head"),), (0.5, 3.0), share=2),
        Kind("elected coordinator paused", "processes", (Pause("coordinator"),), (0.5, 3.0)),
        Kind("both coordinators paused", "processes", (Pause("coordinators"),), (0.5, 2.0)),
        Kind("elected sender paused", "processes", (Pause("sender"),), briefly_s),
        Kind("elected sender paused past its session", "processes", (Pause("sender"),), past_session_s, share=2),
        Kind("elected reader paused", "processes", (Pause("reader"),), briefly_s),
        Kind("elected reader paused past its session", "processes", (Pause("reader"),), past_session_s, share=2),
        Kind("all servers paused at once", "processes", (Pause("servers"),), (0.3, 2.5)),
    ]


_PLACES: dict[str, Role] = {
    "sender": "sender",
    "master": "master",
    "slave": "slave",
    "coordinators": "coordinators",
    "ZooKeeper": "zookeepers",
    "reader": "reader",
}


def _who_talk() -> list[tuple[tuple[str, Role], tuple[str, Role]]]:
    """Whoever says anything to each other: all but sender and reader."""
    return [
        (one, other) for one, other in combinations(_PLACES.items(), 2) if {one[0], other[0]} != {"sender", "reader"}
    ]


def _kinds_of_network() -> list[Kind]:
    found = []
    for (one, one_role), (other, other_role) in _who_talk():
        # Longer than a session where ZooKeeper is cut off: sessions then end with their processes alive.
        held_s = (1.8, 2.8) if "ZooKeeper" in {one, other} else (0.7, 1.5)
        found += [
            Kind(f"cut: {one} | {other}", "network", (Cut(one_role, other_role),), held_s, share=0.5),
            Kind(f"cut: {one} → {other}", "network", (Cut(one_role, other_role, is_one_way=True),), held_s, share=0.3),
            Kind(f"cut: {other} → {one}", "network", (Cut(other_role, one_role, is_one_way=True),), held_s, share=0.3),
        ]
    found.append(Kind("master cut off from all servers", "network", (Cut("master", "servers"),), (0.7, 2.8)))
    return found


_SWALLOWED_OVER_BYTES = 500
"""A ping of anybody's and an acknowledgement are smaller; a batch of some records, a chain and most answers aren't."""


_SAY_MUCH = {
    ("sender", "master"),
    ("sender", "coordinators"),
    ("master", "slave"),
    ("master", "coordinators"),
    ("master", "ZooKeeper"),
    ("master", "reader"),
    ("slave", "ZooKeeper"),
    ("coordinators", "ZooKeeper"),
    ("coordinators", "reader"),
}


def _kinds_of_impaired_network() -> list[Kind]:
    """Neither up nor down."""
    held_s = (1.5, 3.0)
    lossy = [
        Kind(f"{percent} % lost: {one} | {other}", "impaired network", (Lose(role, to, percent),), held_s, share=0.2)
        for (one, role), (other, to) in _who_talk()
        for percent in (3, 30)
        if percent > 3 or (one, other) in _SAY_MUCH
    ]
    # As where a tunnel takes less than the hosts believe, and nobody tells them: pings pass, and what matters doesn't.
    swallowing = [
        Kind(
            f"packets over {_SWALLOWED_OVER_BYTES} bytes lost: {one} | {other}",
            "impaired network",
            (Lose(role, to, 100, _SWALLOWED_OVER_BYTES),),
            (3.0, 6.0),
            share=0.2,
        )
        for (one, role), (other, to) in (
            *(pair for pair in _who_talk() if (pair[0][0], pair[1][0]) in _SAY_MUCH),
            (("elected coordinator", "coordinator"), ("ZooKeeper", "zookeepers")),
            (("ZooKeeper's leader", "zookeeper leader"), ("the others", "zookeepers")),
        )
    ]
    kbit_s = 300
    narrow = [
        Kind(f"narrow: {place}, {kbit_s} kbit/s", "impaired network", (Narrow(role, kbit_s),), held_s, share=0.2)
        for place, role in _PLACES.items()
    ]
    return lossy + swallowing + narrow


def _kinds_of_zookeeper() -> list[Kind]:
    return [
        Kind("ZooKeeper's leader killed", "zookeeper", (Kill("zookeeper leader"),), share=2),
        Kind("ZooKeeper's follower killed", "zookeeper", (Kill("zookeeper follower"),)),
        Kind("ZooKeeper's leader paused", "zookeeper", (Pause("zookeeper leader"),), (0.5, 3.0)),
        Kind("ZooKeeper's follower paused", "zookeeper", (Pause("zookeeper follower"),), (0.5, 3.0)),
        Kind("ZooKeeper without a majority", "zookeeper", (Kill("zookeeper majority"),), (1.0, 3.5), share=2),
        Kind("all of ZooKeeper's machines lose power", "zookeeper", (LosePower("zookeepers"),), (0.2, 1.0)),
        Kind(
            "ZooKeeper's leader cut off from the others",
            "zookeeper",
            (Cut("zookeeper leader", "zookeepers"),),
            (1.5, 3.0),
        ),
        # Longer than a session: it goes on answering its clients' pings, and can't tell them what the leader ends (H10).
        Kind(
            "ZooKeeper's follower cut off from the others",
            "zookeeper",
            (Cut("zookeeper follower", "zookeepers"),),
            (3.0, 9.0),
        ),
        *_kinds_of_zookeepers_disks(),
    ]


A_WHILE_MS = 300, 1500
"""So long one flush takes where a disk all but stands still."""


def _kinds_of_zookeepers_disks() -> list[Kind]:
    """A server that can't write ends itself, and may do so again at each start."""

    def kind(name: str, role: Role, trouble: Literal["write error", "flush error", "full"]) -> Kind:
        return Kind(name, "zookeeper", (DiskTrouble(role, trouble),), (0.5, 2.0), share=0.5)

    def slow(name: str, role: Role, slow_ms: tuple[int, int] = A_WHILE_MS) -> Kind:
        return Kind(name, "zookeeper", (DiskTrouble(role, "slow flush", slow_ms),), (1.5, 3.5), share=0.5)

    return [
        kind("ZooKeeper's follower finds no room", "zookeeper follower", "full"),
        kind("ZooKeeper's majority finds no room", "zookeeper majority", "full"),
        kind("all of ZooKeeper finds no room", "zookeepers", "full"),
        kind("writes of ZooKeeper's leader fail", "zookeeper leader", "write error"),
        kind("flushes of ZooKeeper's leader fail", "zookeeper leader", "flush error"),
        kind("flushes of ZooKeeper's majority fail", "zookeeper majority", "flush error"),
        slow("flushes of ZooKeeper's leader are slow", "zookeeper leader"),
        slow("flushes of ZooKeeper's majority are slow", "zookeeper majority", (20, 150)),
        slow("ZooKeeper's majority's disks all but stand still", "zookeeper majority"),
        slow("all of ZooKeeper's disks all but stand still", "zookeepers"),
        Kind(
            "ZooKeeper's leader's disk stands still",
            "zookeeper",
            (DiskTrouble("zookeeper leader", "still"),),
            (2.0, 5.0),
            share=0.5,
        ),
    ]


def _kinds_of_disks() -> list[Kind]:
    found: list[Kind] = []
    for role in ("master", "slave"):
        found += [
            Kind(f"{role}'s writes fail", "disk", (DiskTrouble(role, "write error"),)),
            Kind(f"{role}'s flushes fail", "disk", (DiskTrouble(role, "flush error"),)),
            Kind(f"{role}'s flushes are slow", "disk", (DiskTrouble(role, "slow flush"),), (0.8, 1.5)),
            Kind(
                f"{role}'s disk all but stands still",
                "disk",
                (DiskTrouble(role, "slow flush", A_WHILE_MS),),
                (1.5, 3.5),
            ),
            # Whoever writes there has the interpreter's lock: the process stands still with its disk, but for gRPC's own threads.
            Kind(f"{role}'s disk stands still", "disk", (DiskTrouble(role, "still"),), (1.5, 3.5), share=0.5),
            # For longer than until a member says so: who is to read there next can't be told of by writing it down.
            Kind(
                f"{role}'s flushes stand still, and the elected reader is killed",
                "disk",
                (DiskTrouble(role, "still flush"), Kill("reader")),
                (12.0, 13.0),
                share=0.3,
            ),
            Kind(f"{role}'s writes find no room", "disk", (DiskTrouble(role, "full"),)),
            Kind(f"{role}'s disk full to the last byte", "disk", (DiskTrouble(role, "filled"),), (1.0, 1.5)),
            Kind(f"{role}'s disk full up to its reserve", "disk", (DiskTrouble(role, "nearly filled"),), (1.0, 1.5)),
            Kind(
                f"bits flipped, or the log cut, on the killed {role}'s disk",
                "disk",
                (Damage(role, is_killed=True),),
                share=1.5,
            ),
            Kind(f"bits flipped on the living {role}'s disk", "disk", (Damage(role, is_killed=False),)),
            Kind(f"{role} back with a blank disk", "disk", (BlankDisk(role),), share=1.5),
        ]
    # Both at once, as disks of one age and one size do: nobody is left who could end the link.
    found += [
        Kind("both members' flushes fail", "disk", (DiskTrouble("head", "flush error"),)),
        Kind("both members' writes find no room", "disk", (DiskTrouble("head", "full"),)),
        Kind(
            "both members' disks full up to their reserve", "disk", (DiskTrouble("head", "nearly filled"),), (1.0, 1.5)
        ),
        Kind("both members' disks stand still", "disk", (DiskTrouble("head", "still"),), (1.5, 3.5), share=0.5),
        Kind("master's machine loses power", "disk", (LosePower("master"),)),
        Kind("both members' machines lose power", "disk", (LosePower("head"),), (0.1, 1.0), share=2),
        Kind("all members' machines lose power", "disk", (LosePower("members"),), (0.1, 1.0)),
        Kind("all servers' machines lose power", "disk", (LosePower("servers"),), (0.1, 1.0), share=2),
    ]
    return found


def _kinds_of_people() -> list[Kind]:
    return [
        Kind("planned rotation", "people", (Order("rotate"),), (0.3, 0.5), is_headline=True),
        Kind("durability altered, then rotated", "people", (Order("alter"),), (0.3, 0.5), share=2),
        Kind("groups altered, then rotated", "people", (Order("leave the head"),), (0.3, 0.5), share=2),
        Kind("head drained and resumed", "people", (Order("drain the head"),), share=3),
        Kind("group added", "people", (Order("add a group"),), share=1.5),
        Kind("group drained and removed", "people", (Order("remove a group"),), share=1.5),
        Kind("rolling restart of everything", "people", (Order("restart everything"),), share=0.3),
        Kind("subscription created", "people", (Order("create a subscription"),), share=2),
        Kind("subscription sought back", "people", (Order("seek back"),), share=2),
        Kind("subscription sought forward", "people", (Order("seek forward"),), share=1.5),
        Kind("coordinator replaced at another address", "people", (Order("replace a coordinator"),)),
    ]


def _kinds_of_people_amid_failures() -> list[Kind]:
    """What people do while something else is harmed: each order can be carried out before that is healed."""
    return [
        Kind(f"{name}, {harm.name}", "two at once", (*harm.harms, order), harm.held_s, share=0.3)
        for order, name, harms in (
            (Order("add a group"), "group added", ("master killed", "elected coordinator killed", "master | slave")),
            (Order("drain the head"), "head drained and resumed", ("slave killed", "elected coordinator killed")),
            (Order("rotate"), "rotation", ("slave paused", "sender | master")),
            (Order("create a subscription"), "subscription created", ("master paused", "slave | reader")),
            (Order("replace a coordinator"), "coordinator replaced", ("slave killed", "elected coordinator killed")),
        )
        for harm in (*_kinds_of_processes(), *_kinds_of_network())
        if harm.name.removeprefix("cut: ") in harms
    ]


def _kinds_unheard() -> list[Kind]:
    """A switch of which a reader isn't told: its coordinator stands still, and its member hears nobody who knows.

    In the place of a rotation while that coordinator stands still: with 500 faults there is room for each kind.
    """
    harms = Pause("coordinator"), Cut("master", "zookeepers"), Kill("slave")
    return [
        Kind("elected coordinator paused, master without ZooKeeper, slave killed", "two at once", harms, (2.5, 3.0))
    ]


KINDS: tuple[Kind, ...] = (
    *_kinds_of_processes(),
    *_kinds_of_network(),
    *_kinds_of_impaired_network(),
    *_kinds_of_zookeeper(),
    *_kinds_of_disks(),
    *_kinds_of_people(),
    *_kinds_of_people_amid_failures(),
    *_kinds_unheard(),
)


def _may_come_in_twos(kind: Kind) -> bool:
    """Nothing that takes a copy away, nor all servers at once. Narrow paths neither: a cable has one queue."""
    return all(isinstance(harm, Kill | Stop | Pause | Cut | Lose) for harm in kind.harms) and kind.name not in {
        "all servers killed at once",
        "all servers paused at once",
    }


def pair(chance: random.Random, kinds: Sequence[Kind] = KINDS) -> Kind:
    """Two of the kinds at once; held as long as the longer one asks."""
    one, other = chance.sample([kind for kind in kinds if _may_come_in_twos(kind)], 2)
    held_s = (max(one.held_s[0], other.held_s[0]), max(one.held_s[1], other.held_s[1]))
    return Kind(f"{one.name}; {other.name}", "two at once", (*one.harms, *other.harms), held_s)


_HEADLINE_PART = 0.1
_PAIRS_PART = 0.1


def plan(count: int, chance: random.Random, kinds: Sequence[Kind] = KINDS, *, with_pairs: bool = True) -> list[Kind]:
    """So many faults in random order.

    A tenth of each headline; of the rest a tenth in twos, then every other kind once before any
    comes again, the likelier ones first. With 500 each headline comes 50 times, and every kind at least once.
    """
    headlines, others = [kind for kind in kinds if kind.is_headline], [kind for kind in kinds if not kind.is_headline]
    of_each = round(count * _HEADLINE_PART) if others else -(-count // max(1, len(headlines)))
    chosen = [kind for kind in headlines for _ in range(of_each)]
    if with_pairs:
        chosen += [pair(chance, kinds) for _ in range(int((count - len(chosen)) * _PAIRS_PART))]
    while len(chosen) < count:
        chosen += sorted(others, key=lambda kind: chance.random() ** (1 / kind.share), reverse=True)
    chosen = chosen[:count]
    chance.shuffle(chosen)
    return chosen
