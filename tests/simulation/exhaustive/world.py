"""The whole world as one immutable value, and every step that can follow from it.

A state is a tuple of Values: ZooKeeper, the groups, two instances of the sending application, calls at coordinators, requests on
their way to members, what was promised so far, and what may still fail. A step changes a few of them.

Where two things are one step here, the reason is that nobody can tell them apart:

- An answer is given to the procedure, or the sender, when it is made. Whoever gets it does nothing but change its own
  state and give orders, which are steps of their own; so an answer that takes its time is an order that does.
  An answer that never comes is a failure of its own (see `bounds`).
- A timer of a procedure that waits for nothing else runs off at once, and so does what it asks of nobody (ReadKeptSeals: no
  member writes its seal beside the chain here): both only bring the next order.
- Cumulative messages (acknowledgements, confirmations, committed indexes) that are on their way in one stream are the newest
  one: who reads the older first, and then loses the newer, could as well have read it before the newer was there.
- A request whose answer nobody waits for, and a batch on a stream that its sender left, may stay on its way for ever; that
  needs no step of its own, because every invariant is checked in every state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seriatim.coordinator.core import chain, subscriptions
from seriatim.coordinator.core.events import (
    SendOpen,
    WriteChain,
)
from seriatim.producer.core import events as sender_events
from seriatim.producer.core.sender import Phase, SenderState
from seriatim.protocol.chain import ChainDocument, LinkState, QueueSettings
from seriatim.protocol.errors import DeadlineOver, Unreachable
from seriatim.protocol.names import QueueId
from tests.simulation.exhaustive import calls, properties
from tests.simulation.exhaustive.bounds import Bounds
from tests.simulation.exhaustive.calls import Call
from tests.simulation.exhaustive.parts import MASTER, NOBODY, PLACES, SLAVE, Group, Member
from tests.simulation.exhaustive.possible import (
    documents_of,
    group_faults,
    group_moves,
    is_busy,
    to_close,
)
from tests.simulation.exhaustive.senders import Sender
from tests.simulation.exhaustive.state import (
    BUDGET,
    CALL,
    CALLS,
    CLOSER,
    GHOST,
    GROUP,
    NET,
    SENDER,
    SENDERS,
    SLOTS,
    ZK,
    ZOMBIES,
    Budget,
    Ghost,
    Move,
    Request,
    World,
    Zoo,
    bag,
    change,
    groups,
    orphaned,
    registry_of,
    with_registered,
)
from tests.simulation.exhaustive.steps import Steps
from tests.simulation.exhaustive.thrift import Thrift
from tests.simulation.exhaustive.values import Value, shared

_DOWN = shared(Unreachable("down"))


class Everything(Steps):
    """All that can follow from a state within the bounds."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._thrift = Thrift(self)

    def first(self) -> World:
        """Nothing was ever sent; the first instance has just been elected, and asks for its route."""
        names = tuple(f"g{number + 1}" for number in range(self.bounds.groups))
        document = chain.created(
            cluster="c", queue_id=QueueId(1), name="q", settings=QueueSettings(), groups=names, now_ms=0
        )
        position = subscriptions.located(document, subscriptions.EARLIEST, None)
        document = subscriptions.created(document, "s", position, 0)
        groups = [Group((Member(MASTER, f"g{number}-a"), Member(SLAVE, f"g{number}-b"))) for number in (1, 2)]
        registered = tuple(member.incarnation for group in groups for member in group.members)
        if self.bounds.groups == 1:
            registered = (*registered[:2], None, None)
        sender = shared(Sender(shared(SenderState())))
        world: list[Any] = [shared(Zoo(shared(document), 0, registered)), *(shared(group) for group in groups)]
        world += [sender, sender, *[None for _ in SLOTS], shared(())]
        world += [shared(Ghost()), shared(Budget(self.bounds.failures, self.bounds.takeovers))]
        self.sender(world, 0, ("elected", 0))
        first = self._thrift.normal(tuple(world))
        return self._reported(first) if self.bounds.starts_reported else first

    def _reported(self, world: World) -> World:
        while world[SENDER].content.state.content.phase is not Phase.SENDING:
            _, world = next(self.moves(world))
        return self._thrift.normal(self._sender_move(world, 0, ("deadline_passed",), "")[1])

    def moves(self, world: World) -> Iterator[Move]:
        """What can follow without a failure. A take-over counts as one."""
        for label, after in self._all_moves(world):
            yield label, self._thrift.normal(after)

    def _all_moves(self, world: World) -> Iterator[Move]:
        for number in range(self.bounds.groups):
            if self._is_left(world, number):
                moves = [*self._group_moves(world, number), *self._deliveries(world, number)]
                if moves:
                    yield from moves
                    return
        for number in range(self.bounds.groups):
            yield from self._group_moves(world, number)
        for slot in SLOTS:
            if world[CALL + slot] is not None:
                yield from self._call_moves(world, slot)
        yield from self._deliveries(world)
        yield from self._sender_moves(world)
        yield from self._closing_moves(world)

    def failures(self, world: World) -> Iterator[Move]:
        """A take-over, and whatever may fail."""
        budget: Budget = world[BUDGET].content
        if budget.takeovers:
            for label, after in self._takeover(world):
                yield label, self._thrift.normal(after)
        if not budget.failures:
            return
        spent = (*world[:BUDGET], shared(budget._replace(failures=budget.failures - 1)))
        for label, after in self._all_failures(spent):
            yield label, self._thrift.normal(after, is_new=True)

    def _is_left(self, world: World, number: int) -> bool:
        """Whether this group has nothing to do with the rest of the world any more, for good.

        All its links are sealed in the chain, it is off the send list, nothing can fail, and no call goes by an older
        chain. What still happens in it (a restart, late batches and requests) is then independent of all other steps,
        and ends; so it is explored first, in every order of its own, and not between those.
        """
        if world[BUDGET].content.failures or not self.bounds.is_thrifty:
            return False
        zoo: Zoo = world[ZK].content
        key = zoo.document, number, *world[CALL:NET]
        found = self._left.get(key)
        if found is None:
            documents = [zoo.document.content]
            for call in world[CALL:NET]:
                documents += [] if call is None else documents_of(call.content.state.content)
            name = f"g{number + 1}"
            found = self._left[key] = all(
                name not in one.send_list and all(link.end is not None for link in one.links if link.group == name)
                for one in documents
            )
        return found

    def _group_moves(self, world: World, number: int) -> Iterator[Move]:
        group: Value = world[GROUP + number]
        moves = self._moves.get(group)
        if moves is None:
            moves = self._moves[group] = tuple(group_moves(group.content, number))
        for label, event in moves:
            if event[0] == "patience_over" and self._may_be_opened(world, number, event[1]):
                continue
            self.doing = label
            after = list(world)
            if event[0] in ("restarted", "registered") and not self._may_register(after, number, event):
                continue
            self.group(after, number, event)
            yield label, tuple(after)
        yield from self._expiries(world, number)

    def _may_be_opened(self, world: World, number: int, replication: int) -> bool:
        """An OpenLink is on its way to the slave: the master is patient for longer than it can be."""
        group: Group = world[GROUP + number].content
        epoch = group.replications[replication].epoch
        return any(
            (one.group, one.place) == (number, SLAVE)
            and isinstance(one.order.content, SendOpen)
            and one.order.content.link.epoch == epoch
            for one in world[NET].content
        )

    def _may_register(self, world: list[Any], number: int, event: tuple[Any, ...]) -> bool:
        """Registers the member, as it will be, unless another disk's session is still there."""
        zoo: Zoo = world[ZK].content
        name, place = event
        member: Member = world[GROUP + number].content.members[place]
        mine = member.incarnation
        if name == "restarted":
            if member.comes_blank and zoo.registered[2 * number + place] is not None:
                return False
            mine = member.next_incarnation
        world[ZK] = with_registered(world[ZK], 2 * number + place, mine)
        return True

    def _expiries(self, world: World, number: int) -> Iterator[Move]:
        """The session of a member that is gone, or whose lease is over, ends."""
        zoo: Zoo = world[ZK].content
        for member in world[GROUP + number].content.members:
            there = zoo.registered[2 * number + member.place]
            if there is None or member.session not in ("gone", "lease over"):
                continue
            after = list(world)
            after[ZK] = with_registered(world[ZK], 2 * number + member.place, None)
            if member.session == "lease over":
                self.group(after, number, ("session_changed", member.place, "expired"))
            yield f"the session of {member.name} is gone", tuple(after)

    def _call_moves(self, world: World, slot: int) -> Iterator[Move]:
        for order, rest in self.pending(world[CALL + slot]):
            self.doing = order.content.__class__.__name__
            after = list(world)
            after[CALL + slot] = rest
            label = self.carried_out(after, slot, order.content)
            yield label, tuple(after)

    def _deliveries(self, world: World, number: int | None = None) -> Iterator[Move]:
        for request, rest, label in self.requests(world[NET]):
            if number is not None and request.group != number:
                continue
            group: Group = world[GROUP + request.group].content
            if not group.members[request.place].is_up or self._is_unregistered(world, request):
                after = list(world)
                after[NET] = rest
                what = "open" if isinstance(request.order.content, SendOpen) else "seal"
                self._answered(after, request.owner, what, request.place, what, _DOWN)
                yield f"{label} reaches nobody", tuple(after)
            elif not is_busy(group, request.place, int(request.order.content.link.epoch)):
                after = list(world)
                after[NET] = rest
                self.doing = label
                self.group(after, request.group, ("asked", request.place, request.owner, request.order))
                yield f"{label} arrives", tuple(after)

    def _is_unregistered(self, world: World, request: Request) -> bool:
        zoo: Zoo = world[ZK].content
        return request.owner != NOBODY and zoo.registered[2 * request.group + request.place] is None

    def _sender_moves(self, world: World) -> Iterator[Move]:
        for number in (0, 1):
            sender: Sender = world[SENDER + number].content
            if sender.state.content.phase is Phase.WAITING:
                yield self._sender_move(world, number, ("waited",), "asks again")
            term = world[ZK].content.term
            is_idle = sender.state.content.phase is Phase.STANDING_BY and not sender.is_elected
            if is_idle and sender.term < term and term % 2 == number:
                yield self._sender_move(world, number, ("elected", term), "learns that it is elected")
            if sender.is_elected and sender.term != term:
                yield self._sender_move(world, number, ("deposed",), "learns that it isn't elected any more")

    def _sender_move(self, world: World, number: int, event: tuple[Any, ...], what: str) -> Move:
        after = list(world)
        self.doing = f"{SENDERS[number]} {what}"
        self.sender(after, number, event)
        return f"{SENDERS[number]} {what}", tuple(after)

    def _takeover(self, world: World) -> Iterator[Move]:
        zoo: Zoo = world[ZK].content
        number = (zoo.term + 1) % 2
        sender: Sender = world[SENDER + number].content
        if sender.is_elected or sender.state.content.phase is not Phase.STANDING_BY:
            return
        after = list(world)
        budget: Budget = world[BUDGET].content
        after[BUDGET] = shared(budget._replace(takeovers=budget.takeovers - 1))
        after[ZK] = shared(zoo._replace(term=zoo.term + 1))
        self.sender(after, number, ("elected", zoo.term + 1))
        yield f"{SENDERS[number]} is elected", tuple(after)

    def _closing_moves(self, world: World) -> Iterator[Move]:
        is_quiet = all(world[CALL + slot] is None for slot in SLOTS)
        if world[CALL + CLOSER] is not None:
            return
        zoo: Zoo = world[ZK].content
        key = zoo.document, zoo.registered, world[GROUP], world[GROUP + 1], is_quiet
        due = self._due.get(key)
        if due is None:
            registry = registry_of(zoo, self.bounds.groups)
            due = self._due[key] = tuple(to_close(zoo.document.content, registry, groups(world), is_quiet=is_quiet))
        for epoch in due:
            after = list(world)
            self._follow(after, CLOSER, calls.close_call(epoch))
            order, rest = self.pending(after[CALL + CLOSER])[0]
            after[CALL + CLOSER] = rest
            yield f"{self.carried_out(after, CLOSER, order.content)} to close link {epoch}", tuple(after)

    def _all_failures(self, world: World) -> Iterator[Move]:
        for number in range(self.bounds.groups):
            group: Value = world[GROUP + number]
            faults = self._faults.get(group)
            if faults is None:
                faults = self._faults[group] = tuple(group_faults(group.content, number, self._kinds))
            for label, event in faults:
                after = list(world)
                if event[0] == "crashed":
                    after[NET] = bag(
                        [
                            one
                            for one in world[NET].content
                            if (one.group, one.place, one.owner) != (number, event[1], NOBODY)
                        ]
                    )
                self.doing = label
                self.group(after, number, event)
                yield label, tuple(after)
        for number in (0, 1):
            yield from self._sender_failures(world, number)
        for slot in SLOTS:
            if world[CALL + slot] is not None:
                yield from self._call_failures(world, slot)

    def _sender_failures(self, world: World, number: int) -> Iterator[Move]:
        state: SenderState = world[SENDER + number].content.state.content
        if "deadline" in self._kinds and state.phase is Phase.SENDING and state.in_flight:
            yield self._sender_move(world, number, ("deadline_passed",), "has waited too long for an acknowledgement")
        has_room = any(world[CALL + slot] is None for slot in ZOMBIES)
        is_asking = state.phase is Phase.ACQUIRING and world[CALL + number] is not None
        if "slow call" in self._kinds and is_asking and has_room:
            after = list(world)
            self._leave(after, number)
            self.sender(after, number, ("told", shared(sender_events.AcquireFailed(0, DeadlineOver("late")))))
            yield f"{SENDERS[number]} gives its call up, which goes on", tuple(after)

    def _call_failures(self, world: World, slot: int) -> Iterator[Move]:
        call: Call = world[CALL + slot].content
        if "coordinator" in self._kinds:
            yield self._died(world, slot, f"the coordinator of {CALLS[slot]} dies")
            for order in call.pending:
                write = order.content
                if isinstance(write, WriteChain) and write.expected == world[ZK].content.version:
                    after = list(world)
                    self._written(after, write)
                    said = change(world[ZK].content.document.content, write.document)
                    yield self._died(tuple(after), slot, f"{CALLS[slot]} writes: {said}; and its coordinator dies")
        for what, place in call.awaiting:
            if f"slow {what}" in self._kinds:
                after = list(world)
                after[NET] = orphaned(world[NET], slot, what, place)
                self._answered(after, slot, what, place, what, shared(DeadlineOver("late")))
                yield f"{CALLS[slot]}: the deadline of {what} at {PLACES[place]} passes", tuple(after)

    def _died(self, world: World, slot: int, label: str) -> Move:
        after = list(world)
        self.give_up(after, slot)
        after[CALL + slot] = None
        if slot < CLOSER:
            self.sender(after, slot, ("told", shared(sender_events.AcquireFailed(0, Unreachable("died")))))
        return label, tuple(after)

    def check(self, world: World) -> None:
        """Raises AssertionError where the invariants don't hold of this state."""
        key = world[ZK].content.document, world[GROUP], world[GROUP + 1], world[GHOST]
        if key not in self._holds:
            ghost: Ghost = key[3].content
            groups = (key[1].content, key[2].content)
            properties.check(key[0].content, groups, ghost.acknowledged, ghost.complete, is_log=not self.bounds.own)
            if self._are_members_well:
                properties.check_closed(key[0].content, ghost.reported)
            self._holds.add(key)

    def is_goal(self, world: World) -> bool:
        """Whoever is elected has sent all that it has, all of it is complete, and no link waits for its end."""
        zoo: Zoo = world[ZK].content
        sender: Sender = world[SENDER + zoo.term % 2].content
        state: SenderState = sender.state.content
        if state.phase is not Phase.SENDING or state.pending or not sender.is_elected or world[NET].content:
            return False
        if any(world[CALL + slot] is not None for slot in SLOTS):
            return False
        if any(one.is_used and one.state == "ended" for group in groups(world) for one in group.appends):
            return False
        document: ChainDocument = zoo.document.content
        if any(link.state in (LinkState.CLOSING, LinkState.LOST) for link in document.links):
            return False
        complete = world[GHOST].content.complete
        if not self.bounds.own and complete != tuple(range(1, self.bounds.records + 1)):
            raise AssertionError(f"8: all was sent, but only {complete} are complete")
        return True
