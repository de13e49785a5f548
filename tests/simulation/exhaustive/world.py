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
from dataclasses import replace
from typing import Any, NamedTuple

from seriatim.broker_group.core.replica import SealPhase
from seriatim.coordinator.core import chain, invariants, subscriptions
from seriatim.coordinator.core.acquire_send import AcquireSend
from seriatim.coordinator.core.events import (
    ChainConflict,
    ChainRead,
    ChainWritten,
    ElectionSeen,
    KeptSealsRead,
    LinkOpened,
    LookUpElection,
    LookUpSessions,
    OpenFailed,
    ReadChain,
    ReadKeptSeals,
    Refused,
    SealAnswered,
    SealFailed,
    SendGrant,
    SendOpen,
    SendSeal,
    SessionsSeen,
    Wait,
    WakeAfter,
    Woken,
    WriteChain,
)
from seriatim.coordinator.core.registry import GroupState, MemberState, Registry
from seriatim.producer.core import events as sender_events
from seriatim.producer.core.sender import Phase, SenderState
from seriatim.protocol.chain import ChainDocument, LinkState, QueueSettings
from seriatim.protocol.errors import DeadlineOver, SeriatimError, Unreachable
from seriatim.protocol.names import ChainVersion, Incarnation, QueueId
from tests.simulation.exhaustive import calls, properties
from tests.simulation.exhaustive import group as group_module
from tests.simulation.exhaustive.bounds import Bounds
from tests.simulation.exhaustive.calls import Call, Outcome
from tests.simulation.exhaustive.group import GroupStep
from tests.simulation.exhaustive.parts import MASTER, NOBODY, PLACES, SLAVE, Group, Member
from tests.simulation.exhaustive.senders import Sender, SenderStep
from tests.simulation.exhaustive.values import Value, shared

ZK, GROUP, SENDER, CALL, NET, GHOST, BUDGET = 0, 1, 3, 5, 10, 11, 12
"""Where the parts stand in a state: two groups from GROUP, two senders from SENDER, five calls from CALL."""
CLOSER, ZOMBIES = 2, (3, 4)
"""Calls 0 and 1 are those of the senders, then that of the elected coordinator, then those that their sender gave up."""

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
    """What was promised so far. `acknowledged`: (epoch, index). `granted`: (epoch, newest token). `complete`: seqs."""

    acknowledged: tuple[tuple[int, int], ...] = ()
    granted: tuple[tuple[int, int], ...] = ()
    complete: tuple[int, ...] = ()


class Budget(NamedTuple):
    failures: int
    takeovers: int


class Steps:
    """All steps of the world within these bounds. It remembers what follows from each (part, event)."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.doing = ""
        """The step under way, for whoever meets its error."""
        self._kinds = frozenset(bounds.kinds)
        self._groups: dict[Any, tuple[Value, tuple[Any, ...]]] = {}
        self._calls: dict[tuple[Value, Value], Outcome] = {}
        self._senders: dict[Any, tuple[Value, tuple[Any, ...]]] = {}
        self._moves: dict[Value, tuple[tuple[str, tuple[Any, ...]], ...]] = {}
        self._faults: dict[Value, tuple[tuple[str, tuple[Any, ...]], ...]] = {}
        self._orders: dict[Value, tuple[tuple[Value, Value], ...]] = {}
        self._answers: dict[Any, tuple[Value, Value]] = {}
        self._nets: dict[Value, tuple[tuple[Request, Value, str], ...]] = {}
        self._left: dict[Any, bool] = {}
        self._reads: dict[Value, Value] = {}
        self._reading: dict[Any, tuple[tuple[Any, ...], ...]] = {}
        self._due: dict[Any, tuple[int, ...]] = {}
        self._writes: dict[Any, Value] = {}
        self._holds: set[Any] = set()

    # ---- the first state

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
        world += [sender, sender, None, None, None, None, None, shared(())]
        world += [shared(Ghost()), shared(Budget(self.bounds.failures, self.bounds.takeovers))]
        self._sender(world, 0, ("elected", 0))
        return self._normal(tuple(world))

    # ---- all steps

    def moves(self, world: World) -> Iterator[Move]:
        """What can follow without a failure. A take-over counts as one."""
        for label, after in self._all_moves(world):
            yield label, self._normal(after)

    def _all_moves(self, world: World) -> Iterator[Move]:
        for number in range(self.bounds.groups):
            if self._is_left(world, number):
                moves = [*self._group_moves(world, number), *self._deliveries(world, number)]
                if moves:
                    yield from moves
                    return
        for number in range(self.bounds.groups):
            yield from self._group_moves(world, number)
        for slot in range(5):
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
                yield label, self._normal(after)
        if not budget.failures:
            return
        spent = (*world[:BUDGET], shared(budget._replace(failures=budget.failures - 1)))
        for label, after in self._all_failures(spent):
            yield label, self._normal(after)

    def _is_left(self, world: World, number: int) -> bool:
        """Whether this group has nothing to do with the rest of the world any more, for good.

        All its links are sealed in the chain, it is off the send list, nothing can fail, and no call goes by an older
        chain. What still happens in it (a restart, late batches and requests) is then independent of all other steps,
        and ends; so it is explored first, in every order of its own, and not between those.
        """
        if world[BUDGET].content.failures:
            return False
        zoo: Zoo = world[ZK].content
        key = zoo.document, number, *world[CALL : CALL + 5]
        found = self._left.get(key)
        if found is None:
            documents = [zoo.document.content]
            for call in world[CALL : CALL + 5]:
                documents += [] if call is None else _documents(call.content.state.content)
            name = f"g{number + 1}"
            found = self._left[key] = all(
                name not in one.send_list and all(link.end is not None for link in one.links if link.group == name)
                for one in documents
            )
        return found

    # ---- what is done at once

    def _normal(self, world: World) -> World:
        """The state after all steps that are taken at once (see the module)."""
        after = list(world)
        is_safe = not after[BUDGET].content.failures
        if is_safe:
            for number in range(self.bounds.groups):
                self._group(after, number, ("settled",))
        while self._hurry(after, is_safe=is_safe):
            pass
        return tuple(after)

    def _hurry(self, world: list[Any], *, is_safe: bool) -> bool:
        for slot in range(5):
            call = world[CALL + slot]
            if call is not None and self._hurry_call(world, slot, call, is_safe=is_safe):
                return True
        for number in (0, 1):
            if world[SENDER + number].content.state.content.phase is Phase.WAITING:
                self._sender(world, number, ("waited",))
                return True
        for number in range(self.bounds.groups):
            for event in self._hurried(world[GROUP + number], is_safe=is_safe):
                self._group(world, number, event)
                return True
        for request, rest, _ in self._requests(world[NET]):
            if request.owner == NOBODY and _says_nothing(world[GROUP + request.group].content, request):
                world[NET] = rest
                return True
        return False

    def _hurry_call(self, world: list[Any], slot: int, call: Value, *, is_safe: bool) -> bool:
        zoo: Zoo = world[ZK].content
        for order, rest in self._pending(call):
            content = order.content
            kind = content.__class__
            if kind is WriteChain:
                is_due = content.expected != zoo.version
            elif kind is LookUpSessions:
                is_due = is_safe and self._is_registry_settled(world)
            elif kind is ReadChain:
                is_due = _is_fenced(zoo.document.content, call.content.state.content)
            else:
                continue
            if is_due:
                world[CALL + slot] = rest
                self._carried_out(world, slot, content)
                return True
        if slot == CLOSER and _is_closed(zoo.document.content, call.content):
            self._give_up(world, slot)
            world[CALL + slot] = None
            return True
        return False

    def _is_registry_settled(self, world: list[Any]) -> bool:
        return all(
            member.is_up and member.session == "on"
            for number in range(self.bounds.groups)
            for member in world[GROUP + number].content.members
        )

    def _hurried(self, group: Value, *, is_safe: bool) -> tuple[tuple[Any, ...], ...]:
        """What senders read at once."""
        key = group, is_safe
        found = self._reading.get(key)
        if found is None:
            found = self._reading[key] = tuple(_readings(group.content, is_safe=is_safe))[:1]
        return found

    # ---- groups

    def _group_moves(self, world: World, number: int) -> Iterator[Move]:
        group: Value = world[GROUP + number]
        moves = self._moves.get(group)
        if moves is None:
            moves = self._moves[group] = tuple(_group_moves(group.content, number))
        for label, event in moves:
            if event[0] == "patience_over" and self._may_be_opened(world, number, event[1]):
                continue
            self.doing = label
            after = list(world)
            if event[0] in ("restarted", "registered") and not self._may_register(after, number, event):
                continue
            self._group(after, number, event)
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
        world[ZK] = _registered(world[ZK], 2 * number + place, mine)
        return True

    def _expiries(self, world: World, number: int) -> Iterator[Move]:
        """The session of a member that is gone, or whose lease is over, ends."""
        zoo: Zoo = world[ZK].content
        for member in world[GROUP + number].content.members:
            there = zoo.registered[2 * number + member.place]
            if there is None or member.session not in ("gone", "lease over"):
                continue
            after = list(world)
            after[ZK] = _registered(world[ZK], 2 * number + member.place, None)
            if member.session == "lease over":
                self._group(after, number, ("session_changed", member.place, "expired"))
            yield f"the session of {member.name} is gone", tuple(after)

    def _group(self, world: list[Any], number: int, event: tuple[Any, ...]) -> None:
        """One event at a group, and what it tells the rest of the world."""
        is_safe = not world[BUDGET].content.failures
        key = world[GROUP + number], event, is_safe
        found = self._groups.get(key)
        if found is None:
            step = GroupStep(key[0].content, is_safe=is_safe)
            getattr(step, event[0])(*event[1:])
            found = self._groups[key] = (step.frozen(), tuple(step.outputs))
        world[GROUP + number], outputs = found
        for output in outputs:
            self._heard(world, number, output)

    def _heard(self, world: list[Any], number: int, output: tuple[Any, ...]) -> None:
        kind = output[0]
        if kind == "sender":
            self._sender(world, output[1], output[2:])
        elif kind == "acknowledged":
            world[GHOST] = _with(world[GHOST], "acknowledged", output[1], output[2])
        elif kind == "stored":
            newest = dict(world[GHOST].content.granted).get(output[1], 0)
            if output[2] < newest:
                raise AssertionError(f"7: a record with token {output[2]} was stored after token {newest} was granted")
        else:
            _, owner, place, what = output
            self._answered(world, owner, "open" if kind in ("open", "opened") else "seal", place, kind, what)

    def _answered(self, world: list[Any], owner: int, what: str, place: int, kind: str, content: Value) -> None:
        call: Value | None = None if owner == NOBODY else world[CALL + owner]
        if call is None or (what, place) not in call.content.awaiting:
            return
        key = call, kind, place, content
        found = self._answers.get(key)
        if found is None:
            awaiting = tuple(one for one in call.content.awaiting if one != (what, place))
            event = _ANSWERS[kind](PLACES[place], content.content)
            found = self._answers[key] = shared(call.content._replace(awaiting=awaiting)), shared(event)
        world[CALL + owner] = found[0]
        self._tell(world, owner, found[1])

    # ---- calls

    def _call_moves(self, world: World, slot: int) -> Iterator[Move]:
        for order, rest in self._pending(world[CALL + slot]):
            self.doing = order.content.__class__.__name__
            after = list(world)
            after[CALL + slot] = rest
            label = self._carried_out(after, slot, order.content)
            yield label, tuple(after)

    def _pending(self, call: Value) -> tuple[tuple[Value, Value], ...]:
        """Each pending order of a call, and the call when it is being carried out."""
        found = self._orders.get(call)
        if found is None:
            content: Call = call.content
            found = self._orders[call] = tuple(
                (order, shared(content._replace(pending=tuple(one for one in content.pending if one is not order))))
                for order in content.pending
            )
        return found

    def _carried_out(self, world: list[Any], slot: int, order: Any) -> str:
        """An order to the coordinator itself. Returns what was done."""
        zoo: Zoo = world[ZK].content
        match order:
            case ReadChain():
                read = self._read(world[ZK])
                if order.may_be_remembered:  # what is remembered wrongly is refused by the write, and read again
                    read = shared(replace(read.content, is_remembered=True))
                self._tell(world, slot, read)
                return f"{_CALLS[slot]} reads the chain{self._went_on(world, slot)}"
            case WriteChain():
                is_first = order.expected == zoo.version
                if not is_first:
                    self._tell(world, slot, shared(ChainConflict()))
                    return f"{_CALLS[slot]} meets a conflict"
                self._written(world, order)
                self._tell(world, slot, shared(ChainWritten(ChainVersion(zoo.version + 1))))
                return f"{_CALLS[slot]} writes: {_change(zoo.document.content, order.document)}"
            case LookUpSessions():
                self._tell(world, slot, shared(SessionsSeen(self._read(world[ZK]).content.registry)))
                return f"{_CALLS[slot]} looks up sessions"
            case LookUpElection():
                self._tell(world, slot, shared(ElectionSeen(f"node-{zoo.term}")))
                return f"{_CALLS[slot]} looks up the election"
            case WakeAfter():
                self._tell(world, slot, shared(Woken()))
                return f"{_CALLS[slot]} has waited long enough"
            case ReadKeptSeals():
                self._tell(world, slot, shared(KeptSealsRead({})))
                return f"{_CALLS[slot]} reads the kept seals"
            case _:
                raise AssertionError(order)

    def _went_on(self, world: list[Any], slot: int) -> str:
        """What follows from a read at once: a look at the election, and a write.

        Whatever others wrote between read and write would only make the call read again, as if it hadn't read yet; and
        what they did to members doesn't touch the write. The election may have changed in between, so as long as it can,
        a write that rests on it stays a step of its own; and so does every write as long as a coordinator may die.
        """
        call: Value | None = world[CALL + slot]
        if call is None or len(call.content.pending) != 1 or call.content.awaiting:
            return ""
        budget: Budget = world[BUDGET].content
        order = call.content.pending[0].content
        what = ""
        is_settled = True
        if isinstance(order, ReadChain):
            world[CALL + slot] = self._pending(call)[0][1]
            self._carried_out(world, slot, order)
            return " again"
        if isinstance(order, LookUpElection):
            world[CALL + slot] = self._pending(call)[0][1]
            self._carried_out(world, slot, order)
            what = " and the election"
            call = world[CALL + slot]
            if call is None or len(call.content.pending) != 1:
                return what
            order = call.content.pending[0].content
            is_settled = not budget.takeovers
        if isinstance(order, WriteChain) and is_settled and not budget.failures:
            world[CALL + slot] = self._pending(call)[0][1]
            return f"{what}; {self._carried_out(world, slot, order)}"
        return what

    def _read(self, zoo: Value) -> Value:
        found = self._reads.get(zoo)
        if found is None:
            content: Zoo = zoo.content
            registry = _registry(content, self.bounds.groups)
            found = shared(ChainRead(content.document.content, ChainVersion(content.version), registry))
            self._reads[zoo] = found
        return found

    def _written(self, world: list[Any], order: WriteChain) -> None:
        zoo: Zoo = world[ZK].content
        key = zoo.document, id(order.document)
        if key not in self._writes:
            invariants.check_change(zoo.document.content, order.document)
            self._writes[key] = shared(order.document)
        world[ZK] = shared(zoo._replace(document=self._writes[key], version=zoo.version + 1))

    def _tell(self, world: list[Any], slot: int, event: Value) -> None:
        call: Value = world[CALL + slot]
        outcome = self._calls.get((call, event))
        if outcome is None:
            outcome = self._calls[call, event] = calls.told(call.content, event.content)
        self._follow(world, slot, outcome)

    def _follow(self, world: list[Any], slot: int, outcome: Outcome) -> None:
        if outcome.is_new_round:
            self._give_up(world, slot)
        world[CALL + slot] = outcome.call
        if outcome.requests or outcome.unasked:
            new = [_addressed(one, slot) for one in outcome.requests]
            new += [_addressed(one, NOBODY) for one in outcome.unasked]
            world[NET] = _bag([*world[NET].content, *new])
        if outcome.answer is not None:
            self._answer(world, slot, outcome.answer)
        elif outcome.call is not None:
            call: Call = outcome.call.content
            if len(call.pending) == 1 and not call.awaiting:
                order = call.pending[0].content
                if isinstance(order, WakeAfter | ReadKeptSeals):
                    world[CALL + slot] = shared(call._replace(pending=()))
                    self._carried_out(world, slot, order)

    def _give_up(self, world: list[Any], slot: int, heir: int = NOBODY) -> None:
        """Nobody waits any more for what this call asked, or the call in slot `heir` does."""
        world[NET] = _inherited(world[NET], slot, heir)
        for number in range(self.bounds.groups):
            self._group(world, number, ("owner_left", slot, heir))

    def _answer(self, world: list[Any], slot: int, answer: Value) -> None:
        """A call is over, and its caller is told, if it still waits."""
        result = answer.content
        if isinstance(result, SendGrant):
            link = result.link
            properties.check_grant(world[ZK].content.document.content, _groups(world), result)
            world[GHOST] = _with(world[GHOST], "granted", int(link.epoch), int(result.token))
        if slot >= CLOSER:
            return
        if isinstance(result, SendGrant):
            self._sender(world, slot, ("granted", answer))
        elif isinstance(result, Wait):
            self._sender(world, slot, ("told", shared(sender_events.WaitAnswered(0, result.token, 0.0))))
        elif isinstance(result, Refused):
            self._sender(world, slot, ("told", shared(sender_events.AcquireFailed(0, result.error))))

    # ---- requests on their way

    def _deliveries(self, world: World, number: int | None = None) -> Iterator[Move]:
        for request, rest, label in self._requests(world[NET]):
            if number is not None and request.group != number:
                continue
            group: Group = world[GROUP + request.group].content
            if not group.members[request.place].is_up or self._is_unregistered(world, request):
                after = list(world)
                after[NET] = rest
                what = "open" if isinstance(request.order.content, SendOpen) else "seal"
                self._answered(after, request.owner, what, request.place, what, _DOWN)
                yield f"{label} reaches nobody", tuple(after)
            elif not _is_busy(group, request.place, int(request.order.content.link.epoch)):
                after = list(world)
                after[NET] = rest
                self.doing = label
                self._group(after, request.group, ("asked", request.place, request.owner, request.order))
                yield f"{label} arrives", tuple(after)

    def _requests(self, net: Value) -> tuple[tuple[Request, Value, str], ...]:
        """Each different request that is on its way, and what is left when it has arrived."""
        found = self._nets.get(net)
        if found is None:
            found = self._nets[net] = tuple(
                (one, _without(net, one), _request(one)) for one in dict.fromkeys(net.content)
            )
        return found

    def _is_unregistered(self, world: World, request: Request) -> bool:
        zoo: Zoo = world[ZK].content
        return request.owner != NOBODY and zoo.registered[2 * request.group + request.place] is None

    # ---- senders

    def _sender_moves(self, world: World) -> Iterator[Move]:
        for number in (0, 1):
            sender: Sender = world[SENDER + number].content
            term = world[ZK].content.term
            is_idle = sender.state.content.phase is Phase.STANDING_BY and not sender.is_elected
            if is_idle and sender.term < term and term % 2 == number:
                yield self._sender_move(world, number, ("elected", term), "learns that it is elected")
            if sender.is_elected and sender.term != term:
                yield self._sender_move(world, number, ("deposed",), "learns that it isn't elected any more")

    def _sender_move(self, world: World, number: int, event: tuple[Any, ...], what: str) -> Move:
        after = list(world)
        self.doing = f"{_SENDERS[number]} {what}"
        self._sender(after, number, event)
        return f"{_SENDERS[number]} {what}", tuple(after)

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
        self._sender(after, number, ("elected", zoo.term + 1))
        yield f"{_SENDERS[number]} is elected", tuple(after)

    def _sender(self, world: list[Any], number: int, event: tuple[Any, ...]) -> None:
        key = world[SENDER + number], event
        found = self._senders.get(key)
        if found is None:
            step = SenderStep(key[0].content, self.bounds)
            _sender_event(step, event)
            found = self._senders[key] = (step.frozen(), tuple(step.orders))
        world[SENDER + number], orders = found
        for order in orders:
            self._ordered(world, number, order)

    def _ordered(self, world: list[Any], number: int, order: tuple[Any, ...]) -> None:
        match order:
            case ("acquire", token, failed_epoch):
                if world[CALL + number] is not None:
                    self._leave(world, number)
                node = f"node-{world[SENDER + number].content.term}"
                self._follow(world, number, calls.send_call(node, token, failed_epoch))
            case ("open", token, route, index):
                link = route.content.link
                target = shared(link.master.incarnation)
                self._group(
                    world, int(link.group[1:]) - 1, ("stream_wanted", number, int(link.epoch), int(token), index, target)
                )
            case ("close",):
                for group in range(self.bounds.groups):
                    self._group(world, group, ("stream_closed", number))
            case ("stand again",):
                self._stand_again(world, number)
            case ("send", encoded):
                for group in range(self.bounds.groups):
                    self._group(world, group, ("batch_sent", number, encoded))
            case ("complete", seq, _, _) | ("resume", seq):
                ghost: Ghost = world[GHOST].content
                world[GHOST] = shared(ghost._replace(complete=tuple(sorted({*ghost.complete, seq}))))
            case _:
                pass

    def _stand_again(self, world: list[Any], number: int) -> None:
        """It leaves the line, and is elected again at once where the other one doesn't stand."""
        zoo: Zoo = world[ZK].content
        if world[SENDER + number].content.term != zoo.term:
            return
        budget: Budget = world[BUDGET].content
        is_alone = budget.takeovers == 0
        if not is_alone:
            world[BUDGET] = shared(budget._replace(takeovers=budget.takeovers - 1))
        world[ZK] = shared(zoo._replace(term=zoo.term + (2 if is_alone else 1)))

    def _leave(self, world: list[Any], number: int) -> None:
        """The call goes on, and nobody waits for its answer."""
        for slot in ZOMBIES:
            if world[CALL + slot] is None:
                world[CALL + slot], world[CALL + number] = world[CALL + number], None
                self._give_up(world, number, slot)
                return
        raise AssertionError("no room for one more call without a caller: widen the state")

    # ---- what the elected coordinator does unasked

    def _closing_moves(self, world: World) -> Iterator[Move]:
        if world[CALL + CLOSER] is not None:
            return
        zoo: Zoo = world[ZK].content
        is_quiet = all(world[CALL + slot] is None for slot in range(5))
        key = zoo.document, zoo.registered, world[GROUP], world[GROUP + 1], is_quiet
        due = self._due.get(key)
        if due is None:
            registry = _registry(zoo, self.bounds.groups)
            due = self._due[key] = tuple(_to_close(zoo.document.content, registry, _groups(world), is_quiet=is_quiet))
        for epoch in due:
            after = list(world)
            self._follow(after, CLOSER, calls.close_call(epoch))
            order, rest = self._pending(after[CALL + CLOSER])[0]
            after[CALL + CLOSER] = rest
            yield f"{self._carried_out(after, CLOSER, order.content)} to close link {epoch}", tuple(after)

    # ---- failures

    def _all_failures(self, world: World) -> Iterator[Move]:
        for number in range(self.bounds.groups):
            group: Value = world[GROUP + number]
            faults = self._faults.get(group)
            if faults is None:
                faults = self._faults[group] = tuple(_group_faults(group.content, number, self._kinds))
            for label, event in faults:
                after = list(world)
                if event[0] == "crashed":
                    after[NET] = _bag(
                        [
                            one
                            for one in world[NET].content
                            if (one.group, one.place, one.owner) != (number, event[1], NOBODY)
                        ]
                    )
                self.doing = label
                self._group(after, number, event)
                yield label, tuple(after)
        for number in (0, 1):
            yield from self._sender_failures(world, number)
        for slot in range(5):
            if world[CALL + slot] is not None:
                yield from self._call_failures(world, slot)

    def _sender_failures(self, world: World, number: int) -> Iterator[Move]:
        state: SenderState = world[SENDER + number].content.state.content
        if "deadline" in self._kinds and state.phase is Phase.SENDING and state.in_flight:
            yield self._sender_move(world, number, ("deadline_passed",), "has waited too long for an acknowledgement")
        if "slow call" in self._kinds and state.phase is Phase.ACQUIRING and world[CALL + number] is not None:
            after = list(world)
            self._leave(after, number)
            self._sender(after, number, ("told", shared(sender_events.AcquireFailed(0, DeadlineOver("late")))))
            yield f"{_SENDERS[number]} gives its call up, which goes on", tuple(after)

    def _call_failures(self, world: World, slot: int) -> Iterator[Move]:
        call: Call = world[CALL + slot].content
        if "coordinator" in self._kinds:
            yield self._died(world, slot, f"the coordinator of {_CALLS[slot]} dies")
            for order in call.pending:
                write = order.content
                if isinstance(write, WriteChain) and write.expected == world[ZK].content.version:
                    after = list(world)
                    self._written(after, write)
                    change = _change(world[ZK].content.document.content, write.document)
                    yield self._died(tuple(after), slot, f"{_CALLS[slot]} writes: {change}; and its coordinator dies")
        for what, place in call.awaiting:
            if f"slow {what}" in self._kinds:
                after = list(world)
                after[NET] = _orphaned(world[NET], slot, what, place)
                self._answered(after, slot, what, place, what, shared(DeadlineOver("late")))
                yield f"{_CALLS[slot]}: the deadline of {what} at {PLACES[place]} passes", tuple(after)

    def _died(self, world: World, slot: int, label: str) -> Move:
        after = list(world)
        self._give_up(after, slot)
        after[CALL + slot] = None
        if slot < CLOSER:
            self._sender(after, slot, ("told", shared(sender_events.AcquireFailed(0, Unreachable("died")))))
        return label, tuple(after)

    # ---- what must hold

    def check(self, world: World) -> None:
        """Raises AssertionError where the invariants don't hold of this state."""
        key = world[ZK].content.document, world[GROUP], world[GROUP + 1], world[GHOST]
        if key not in self._holds:
            ghost: Ghost = key[3].content
            groups = (key[1].content, key[2].content)
            properties.check(key[0].content, groups, ghost.acknowledged, ghost.complete, is_log=not self.bounds.own)
            self._holds.add(key)

    def is_goal(self, world: World) -> bool:
        """Whoever is elected has sent all that it has, all of it is complete, and no link waits for its end."""
        zoo: Zoo = world[ZK].content
        sender: Sender = world[SENDER + zoo.term % 2].content
        state: SenderState = sender.state.content
        if state.phase is not Phase.SENDING or state.pending or not sender.is_elected or world[NET].content:
            return False
        if any(world[CALL + slot] is not None for slot in range(5)):
            return False
        document: ChainDocument = zoo.document.content
        if any(link.state in (LinkState.CLOSING, LinkState.LOST) for link in document.links):
            return False
        complete = world[GHOST].content.complete
        if not self.bounds.own and complete != tuple(range(1, self.bounds.records + 1)):
            raise AssertionError(f"8: all was sent, but only {complete} are complete")
        return True


_SENDERS = "A", "B"
_ANSWERS: dict[str, Any] = {"opened": LinkOpened, "open": OpenFailed, "sealed": SealAnswered, "seal": SealFailed}
_CALLS = "A's call", "B's call", "the elected coordinator", "a call given up", "another call given up"


_DOWN = shared(Unreachable("down"))


def _is_fenced(document: ChainDocument, state: Any) -> bool:
    """Whenever it reads the chain, this call finds a newer token, and is over."""
    return isinstance(state, AcquireSend) and 0 < state.request.token < document.sender_token


def _documents(state: Any) -> list[ChainDocument]:
    """The chains that a procedure goes by."""
    if isinstance(state, AcquireSend):
        found = [] if state.read is None else [state.read.document]
        return found if state.closing is None else [*found, state.closing.document]
    return [] if state.closing is None else [state.closing.document]


def _is_closed(document: ChainDocument, call: Call) -> bool:
    """The elected coordinator's procedure will find its link ended, whatever it is doing now."""
    link = document.link(call.state.content.epoch)
    return link is None or link.state is LinkState.SEALED


def _groups(world: Any) -> tuple[Group, Group]:
    return world[GROUP].content, world[GROUP + 1].content


def _sender_event(step: SenderStep, event: tuple[Any, ...]) -> None:
    match event:
        case ("granted", answer):
            if step.state.phase is Phase.ACQUIRING:
                step.granted(answer.content, answer)
        case ("told", told):
            fact = told.content
            if isinstance(fact, sender_events.WaitAnswered):
                step.take(sender_events.WaitAnswered(step.state.request, fact.token, 0.0))
            else:
                step.take(sender_events.AcquireFailed(step.state.request, fact.error))
        case ("acknowledged", index):
            step.take(sender_events.Acknowledged(step.state.stream, index))
        case ("ended", None):
            step.take(sender_events.StreamBroken(step.state.stream, "broken"))
        case ("ended", error):
            step.take(sender_events.Refused(step.state.stream, error.content))
        case (name, *arguments):
            getattr(step, name)(*arguments)


def _group_moves(group: Group, number: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for member in group.members:
        place, name = member.place, member.name
        if not member.is_up:
            yield f"{name} starts again{' with a blank disk' if member.comes_blank else ''}", ("restarted", place)
            continue
        if member.unflushed:
            what = ", ".join(one.kind for one in member.unflushed)
            yield f"{name}'s disk has flushed {what}", ("flushed", place)
        if member.session == "expired":
            yield f"{name} learns that its session is gone", ("session_loss_noticed", place)
        if member.session == "starting":
            yield f"{name} registers", ("registered", place)
    yield from _append_moves(group, number)
    yield from _replication_moves(group, number)


def _readings(group: Group, *, is_safe: bool) -> Iterator[tuple[Any, ...]]:
    for at, stream in enumerate(group.appends):
        if not stream.is_used:
            continue
        is_ended = stream.state == "ended"
        if stream.ack >= 0 and ((is_ended and stream.error is not None) or (is_safe and not is_ended)):
            yield "acknowledgement_read", at
        elif stream.ack < 0 and is_ended:
            yield "append_end_read", at


def _says_nothing(group: Group, request: Request) -> bool:
    """Nothing would ever follow from this request, for whose answer nobody waits."""
    member, order = group.members[request.place], request.order.content
    if not member.is_up:
        return True  # it is on its way to a process that is gone
    runner = member.runner(int(order.link.epoch))
    is_sealed = runner is not None and runner.replica.content.phase is SealPhase.SEALED
    if isinstance(order, SendSeal):
        return is_sealed
    if is_sealed or (group_module.checks_incarnation and order.side.incarnation != member.incarnation):
        return True
    if runner is None:
        return False
    record = runner.replica.content.record
    return bool(order.token < record.token or order.version < record.chain_version)


def _append_moves(group: Group, number: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for at, stream in enumerate(group.appends):
        who = f"{_SENDERS[stream.sender]}'s stream to g{number + 1}" + ("" if stream.is_used else " (left)")
        if stream.state == "new":
            yield f"{who}: the master reads its opening", ("append_opened", at)
        elif stream.state == "source" and stream.batches:
            yield f"{who}: the master reads a batch", ("append_read", at)
        if stream.is_used and stream.ack >= 0:
            yield f"{who}: the sender reads acknowledgement {stream.ack}", ("acknowledgement_read", at)
        if stream.is_used and stream.state == "ended" and (stream.ack < 0 or stream.error is None):
            why = "a break" if stream.error is None else f"the error {stream.error.content.code}"
            yield f"{who}: the sender reads {why}", ("append_end_read", at)


def _replication_moves(group: Group, number: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    master, slave = group.members
    who = f"g{number + 1}'s replication stream"
    for at, one in enumerate(group.replications):
        runner = master.runner(one.epoch)
        if one.is_master_open and one.phase == "opening":
            if slave.is_up and shared(slave.incarnation) is one.slave and slave.runner(one.epoch) is None:
                yield f"{who}: the master's patience is over", ("patience_over", at)
            else:
                yield f"{who}: the slave reads its opening", ("replication_opened", at)
        if one.is_slave_open and one.messages:
            yield f"{who}: the slave reads a message", ("replicated", at)
        if one.is_master_open and one.confirm is not None and runner is not None:
            if one.phase in ("filling", "ready"):
                yield f"{who}: the master reads confirmation {one.confirm[0]}", ("confirmed", at)
            elif one.phase == "greeting":
                state = runner.replica.content
                if state.durable == state.tail.index:
                    yield f"{who}: the master reads what the slave has: {one.confirm[0]}", ("greeted", at)
        if one.is_master_open and not one.is_slave_open and one.phase != "opening":
            yield f"{who}: the master sees its end", ("slave_end_noticed", at)


def _group_faults(group: Group, number: int, kinds: frozenset[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for member in group.members:
        if not member.is_up:
            continue
        lost = len(member.unflushed)
        if "crash" in kinds:
            for survivors in range(lost + 1):
                what = f" and forgets {lost - survivors} of {lost} writes" if lost else ""
                yield f"{member.name} crashes{what}", ("crashed", member.place, survivors, False)
        if "blank" in kinds:
            yield f"{member.name} crashes, and its disk is lost", ("crashed", member.place, 0, True)
        if "expiry" in kinds and member.session == "on":
            yield f"{member.name}'s lease is over", ("session_changed", member.place, "lease over")
    if "append stream" in kinds:
        for at, stream in enumerate(group.appends):
            if stream.is_used and stream.state != "ended":
                yield f"{_SENDERS[stream.sender]}'s stream to g{number + 1} breaks", ("append_broken", at)
    if "replication stream" in kinds:
        for at, one in enumerate(group.replications):
            if one.is_master_open:
                yield f"g{number + 1}'s replication stream breaks", ("replication_broken", at)


def _is_busy(group: Group, place: int, epoch: int) -> bool:
    """Another request holds the link's lock (Broker.lock)."""
    member = group.members[place]
    if any(one.epoch == epoch and one.kind in ("unheard", "seal") for one in member.unflushed):
        return True
    runner = member.runner(epoch)
    return runner is not None and runner.replica.content.phase in (SealPhase.WAITING, SealPhase.WRITING)


def _to_close(document: ChainDocument, registry: Registry, groups: tuple[Group, Group], *, is_quiet: bool) -> Iterator[int]:
    """As background._closings; its grace for a closing link is that no call is under way."""
    for link in document.links:
        if link.state in (LinkState.OPEN, LinkState.OPENING):
            members = groups[int(link.group[1:]) - 1].members
            runners = [one.runner(int(link.epoch)) for one in members if one.is_up]
            is_sealed = any(one is not None and one.replica.content.record.is_sealed for one in runners)
            if registry.absence(link) or (is_sealed and link.state is LinkState.OPEN):
                yield int(link.epoch)
        elif (link.state is LinkState.CLOSING and is_quiet) or (
            link.state is LinkState.LOST and registry.group(link.group).members
        ):
            yield int(link.epoch)


def _registry(zoo: Zoo, groups: int) -> Registry:
    states = {}
    for number in range(groups):
        name = f"g{number + 1}"
        pair = zoo.registered[2 * number : 2 * number + 2]
        states[name] = GroupState(
            name,
            members={
                place: MemberState(one, f"{name}-{place}:1", pair[1 - PLACES.index(place)])
                for place, one in zip(PLACES, pair, strict=True)
                if one is not None
            },
        )
    return Registry(states)


def _registered(zoo: Value, at: int, incarnation: Incarnation | None) -> Value:
    content: Zoo = zoo.content
    return shared(content._replace(registered=(*content.registered[:at], incarnation, *content.registered[at + 1 :])))


def _with(ghost: Value, name: str, epoch: int, number: int) -> Value:
    """The ghost with the larger number for an epoch."""
    content: Ghost = ghost.content
    known = dict(getattr(content, name))
    if known.get(epoch, 0) >= number:
        return ghost
    known[epoch] = number
    return shared(content._replace(**{name: tuple(sorted(known.items()))}))


def _addressed(order: Value, owner: int) -> Request:
    name = order.content.side.name
    return Request(int(name.group[1:]) - 1, PLACES.index(name.member), owner, order)


def _bag(requests: list[Request]) -> Value:
    return shared(tuple(sorted(requests, key=lambda one: (one.group, one.place, one.owner, one.order.number))))


def _without(net: Value, request: Request) -> Value:
    requests = list(net.content)
    requests.remove(request)
    return shared(tuple(requests))


def _inherited(net: Value, slot: int, heir: int) -> Value:
    if not any(one.owner == slot for one in net.content):
        return net
    return _bag([one._replace(owner=heir) if one.owner == slot else one for one in net.content])


def _orphaned(net: Value, slot: int, what: str, place: int) -> Value:
    kind = "open" if what == "open" else "seal"
    return _bag(
        [
            one._replace(owner=NOBODY)
            if (one.owner, one.place) == (slot, place)
            and ("open" if isinstance(one.order.content, SendOpen) else "seal") == kind
            else one
            for one in net.content
        ]
    )


def _change(before: ChainDocument, after: ChainDocument) -> str:
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


def _request(request: Request) -> str:
    what = "OpenLink" if isinstance(request.order.content, SendOpen) else "Seal"
    of = "an earlier call or round" if request.owner == NOBODY else _CALLS[request.owner]
    name = f"g{request.group + 1}-{PLACES[request.place]}"
    return f"{what} of link {request.order.content.link.epoch} of {of} to {name}"


__all__ = ["SeriatimError", "Steps", "World"]
