"""A state of the world: its parts beside groups, senders and calls, and how they are changed."""

from __future__ import annotations

from typing import Any, NamedTuple

from seriatim.coordinator.core.events import (
    SendOpen,
)
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.names import Incarnation
from seriatim.protocol.registration import Registration
from tests.simulation.exhaustive.parts import NOBODY, PLACES, Group
from tests.simulation.exhaustive.values import Value, shared

ZK, GROUP, SENDER, CALL, NET, GHOST, BUDGET = 0, 1, 3, 5, 11, 12, 13
"""Where the parts stand in a state: two groups from GROUP, two senders from SENDER, six calls from CALL."""
SLOTS = range(6)
CLOSER, ZOMBIES = 2, (3, 4, 5)
"""Calls 0 and 1 are those of the senders, then that of the elected coordinator, then those that their sender gave up."""
SENDERS = "A", "B"
CALLS = "A's call", "B's call", "the elected coordinator", "a call given up", "a second one", "a third one"

World = tuple[Any, ...]
Move = tuple[str, World]


class Zoo(NamedTuple):
    """ZooKeeper: the chain, who is registered (by group and place), and the election's term: instance `term % 2` is first in line."""

    document: Value
    version: int
    registered: tuple[Incarnation | None, ...]
    term: int = 0


class Request(NamedTuple):
    """OpenLink or Seal on its way. `owner`: the call that waits for the answer."""

    group: int
    place: int
    owner: int
    order: Value


class Ghost(NamedTuple):
    """What was promised so far. `acknowledged`: (epoch, index). `granted`: (epoch, newest token). `complete`: seqs.

    `reported`: epochs that a sender reported as failed; kept only where nothing else may close a link.
    """

    acknowledged: tuple[tuple[int, int], ...] = ()
    granted: tuple[tuple[int, int], ...] = ()
    complete: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()


class Budget(NamedTuple):
    failures: int
    takeovers: int


def groups(world: Any) -> tuple[Group, Group]:
    return world[GROUP].content, world[GROUP + 1].content


def registry_of(zoo: Zoo, groups: int) -> Registry:
    states = {}
    for number in range(groups):
        name = f"g{number + 1}"
        pair = zoo.registered[2 * number : 2 * number + 2]
        states[name] = GroupState(
            name,
            members={
                place: Registration(one, f"{name}-{place}:1", pair[1 - PLACES.index(place)])
                for place, one in zip(PLACES, pair, strict=True)
                if one is not None
            },
        )
    return Registry(states)


def with_registered(zoo: Value, at: int, incarnation: Incarnation | None) -> Value:
    content: Zoo = zoo.content
    return shared(content._replace(registered=(*content.registered[:at], incarnation, *content.registered[at + 1 :])))


def with_promise(ghost: Value, name: str, epoch: int, number: int) -> Value:
    """The ghost with the larger number for an epoch."""
    content: Ghost = ghost.content
    known = dict(getattr(content, name))
    if known.get(epoch, 0) >= number:
        return ghost
    known[epoch] = number
    return shared(content._replace(**{name: tuple(sorted(known.items()))}))


def addressed(order: Value, owner: int) -> Request:
    name = order.content.side.name
    return Request(int(name.group[1:]) - 1, PLACES.index(name.member), owner, order)


def bag(requests: list[Request]) -> Value:
    return shared(tuple(sorted(requests, key=lambda one: (one.group, one.place, one.owner, one.order.number))))


def without(net: Value, request: Request) -> Value:
    requests = list(net.content)
    requests.remove(request)
    return shared(tuple(requests))


def inherited(net: Value, slot: int, heir: int) -> Value:
    if not any(one.owner == slot for one in net.content):
        return net
    return bag([one._replace(owner=heir) if one.owner == slot else one for one in net.content])


def orphaned(net: Value, slot: int, what: str, place: int) -> Value:
    kind = "open" if what == "open" else "seal"
    return bag(
        [
            one._replace(owner=NOBODY)
            if (one.owner, one.place) == (slot, place)
            and ("open" if isinstance(one.order.content, SendOpen) else "seal") == kind
            else one
            for one in net.content
        ]
    )


def change(before: ChainDocument, after: ChainDocument) -> str:
    """What a write of the chain says."""
    said = []
    if after.sender_token != before.sender_token:
        said.append(f"{after.sender_node} has token {after.sender_token}")
    for link in after.links:
        old = before.link(link.epoch)
        if old is None:
            said.append(f"link {link.epoch} listed for {link.group}")
        elif old.state is not link.state:
            where = "" if link.end is None else f" at {link.end}"
            said.append(f"link {link.epoch} {link.state}{where}")
    return ", ".join(said) or "no link changed"


def request_label(request: Request) -> str:
    what = "OpenLink" if isinstance(request.order.content, SendOpen) else "Seal"
    of = "an earlier call or round" if request.owner == NOBODY else CALLS[request.owner]
    name = f"g{request.group + 1}-{PLACES[request.place]}"
    return f"{what} of link {request.order.content.link.epoch} of {of} to {name}"
