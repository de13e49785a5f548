"""One step of the world: events told to groups, calls and senders, and what these order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seriatim.coordinator.core import invariants
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
    SessionsSeen,
    Wait,
    WakeAfter,
    Woken,
    WriteChain,
)
from seriatim.producer.core import events as sender_events
from seriatim.producer.core.sender import Phase
from seriatim.protocol.names import ChainVersion
from tests.simulation.exhaustive import calls, properties
from tests.simulation.exhaustive.bounds import Bounds
from tests.simulation.exhaustive.calls import Call, Outcome
from tests.simulation.exhaustive.group import GroupStep
from tests.simulation.exhaustive.parts import NOBODY, PLACES
from tests.simulation.exhaustive.senders import SenderStep
from tests.simulation.exhaustive.state import (
    BUDGET,
    CALL,
    CALLS,
    CLOSER,
    GHOST,
    GROUP,
    NET,
    SENDER,
    ZK,
    ZOMBIES,
    Budget,
    Ghost,
    Request,
    Zoo,
    addressed,
    bag,
    change,
    groups,
    inherited,
    registry_of,
    request_label,
    with_promise,
    without,
)
from tests.simulation.exhaustive.values import Value, shared


class Steps:
    """What follows from one event, in all parts of a state. It remembers what follows from each (part, event)."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.doing = ""
        """The step under way, for whoever meets its error."""
        self._kinds = frozenset(bounds.kinds)
        self._are_members_well = not bounds.failures or self._kinds <= {
            "append stream",
            "deadline",
            "slow call",
            "coordinator",
        }
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
        self._due: dict[Any, tuple[int, ...]] = {}
        self._writes: dict[Any, Value] = {}
        self._holds: set[Any] = set()

    def group(self, world: list[Any], number: int, event: tuple[Any, ...]) -> None:
        """One event at a group, and what it tells the rest of the world."""
        is_safe = not world[BUDGET].content.failures
        key = world[GROUP + number], event, is_safe
        found = self._groups.get(key)
        if found is None:
            step = GroupStep(key[0].content, is_safe=is_safe, is_thrifty=self.bounds.is_thrifty)
            getattr(step, event[0])(*event[1:])
            found = self._groups[key] = (step.frozen(), tuple(step.outputs))
        world[GROUP + number], outputs = found
        for output in outputs:
            self._heard(world, number, output)

    def _heard(self, world: list[Any], number: int, output: tuple[Any, ...]) -> None:
        kind = output[0]
        if kind == "sender":
            self.sender(world, output[1], output[2:])
        elif kind == "acknowledged":
            world[GHOST] = with_promise(world[GHOST], "acknowledged", output[1], output[2])
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

    def pending(self, call: Value) -> tuple[tuple[Value, Value], ...]:
        """Each pending order of a call, and the call when it is being carried out."""
        found = self._orders.get(call)
        if found is None:
            content: Call = call.content
            found = self._orders[call] = tuple(
                (order, shared(content._replace(pending=tuple(one for one in content.pending if one is not order))))
                for order in content.pending
            )
        return found

    def carried_out(self, world: list[Any], slot: int, order: Any) -> str:
        """An order to the coordinator itself. Returns what was done."""
        zoo: Zoo = world[ZK].content
        match order:
            case ReadChain():
                read = self._read(world[ZK])
                if order.may_be_remembered:  # what is remembered wrongly is refused by the write, and read again
                    read = shared(replace(read.content, is_remembered=True))
                self._tell(world, slot, read)
                return f"{CALLS[slot]} reads the chain{self._went_on(world, slot)}"
            case WriteChain():
                is_first = order.expected == zoo.version
                if not is_first:
                    self._tell(world, slot, shared(ChainConflict()))
                    return f"{CALLS[slot]} meets a conflict"
                self._written(world, order)
                self._tell(world, slot, shared(ChainWritten(ChainVersion(zoo.version + 1))))
                return f"{CALLS[slot]} writes: {change(zoo.document.content, order.document)}"
            case LookUpSessions():
                self._tell(world, slot, shared(SessionsSeen(self._read(world[ZK]).content.registry)))
                return f"{CALLS[slot]} looks up sessions"
            case LookUpElection():
                self._tell(world, slot, shared(ElectionSeen(f"node-{zoo.term}")))
                return f"{CALLS[slot]} looks up the election"
            case WakeAfter():
                self._tell(world, slot, shared(Woken()))
                return f"{CALLS[slot]} has waited long enough"
            case ReadKeptSeals():
                self._tell(world, slot, shared(KeptSealsRead({})))
                return f"{CALLS[slot]} reads the kept seals"
            case _:
                raise AssertionError(order)

    def _went_on(self, world: list[Any], slot: int) -> str:
        """What follows from a read at once: a look at the election, and a write.

        Whatever others wrote between read and write would only make the call read again, as if it hadn't read yet; and
        what they did to members doesn't touch the write. The election may have changed in between, so as long as it can,
        a write that rests on it stays a step of its own; and so does every write as long as a coordinator may die.
        """
        call: Value | None = world[CALL + slot]
        if call is None or len(call.content.pending) != 1 or call.content.awaiting or not self.bounds.is_thrifty:
            return ""
        budget: Budget = world[BUDGET].content
        order = call.content.pending[0].content
        what = ""
        is_settled = True
        if isinstance(order, ReadChain):
            world[CALL + slot] = self.pending(call)[0][1]
            self.carried_out(world, slot, order)
            return " again"
        if isinstance(order, LookUpElection):
            world[CALL + slot] = self.pending(call)[0][1]
            self.carried_out(world, slot, order)
            what = " and the election"
            call = world[CALL + slot]
            if call is None or len(call.content.pending) != 1:
                return what
            order = call.content.pending[0].content
            is_settled = not budget.takeovers
        if isinstance(order, WriteChain) and is_settled and not budget.failures:
            world[CALL + slot] = self.pending(call)[0][1]
            return f"{what}; {self.carried_out(world, slot, order)}"
        return what

    def _read(self, zoo: Value) -> Value:
        found = self._reads.get(zoo)
        if found is None:
            content: Zoo = zoo.content
            registry = registry_of(content, self.bounds.groups)
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
            self.give_up(world, slot)
        world[CALL + slot] = outcome.call
        if outcome.requests or outcome.unasked:
            new = [addressed(one, slot) for one in outcome.requests]
            new += [addressed(one, NOBODY) for one in outcome.unasked]
            world[NET] = bag([*world[NET].content, *new])
        if outcome.answer is not None:
            self._answer(world, slot, outcome.answer)
        elif outcome.call is not None:
            call: Call = outcome.call.content
            if len(call.pending) == 1 and not call.awaiting and self.bounds.is_thrifty:
                order = call.pending[0].content
                if isinstance(order, WakeAfter | ReadKeptSeals):
                    world[CALL + slot] = shared(call._replace(pending=()))
                    self.carried_out(world, slot, order)

    def give_up(self, world: list[Any], slot: int, heir: int = NOBODY) -> None:
        """Nobody waits any more for what this call asked, or the call in slot `heir` does."""
        world[NET] = inherited(world[NET], slot, heir)
        for number in range(self.bounds.groups):
            self.group(world, number, ("owner_left", slot, heir))

    def _answer(self, world: list[Any], slot: int, answer: Value) -> None:
        """A call is over, and its caller is told, if it still waits."""
        result = answer.content
        if isinstance(result, SendGrant):
            link = result.link
            properties.check_grant(world[ZK].content.document.content, groups(world), result)
            world[GHOST] = with_promise(world[GHOST], "granted", int(link.epoch), int(result.token))
        if slot >= CLOSER:
            return
        if isinstance(result, SendGrant):
            self.sender(world, slot, ("granted", answer))
        elif isinstance(result, Wait):
            self.sender(world, slot, ("told", shared(sender_events.WaitAnswered(0, result.token, 0.0))))
        elif isinstance(result, Refused):
            self.sender(world, slot, ("told", shared(sender_events.AcquireFailed(0, result.error))))

    def requests(self, net: Value) -> tuple[tuple[Request, Value, str], ...]:
        """Each different request that is on its way, and what is left when it has arrived."""
        found = self._nets.get(net)
        if found is None:
            found = self._nets[net] = tuple(
                (one, without(net, one), request_label(one)) for one in dict.fromkeys(net.content)
            )
        return found

    def sender(self, world: list[Any], number: int, event: tuple[Any, ...]) -> None:
        """One event at a sender, and what it orders."""
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
                if failed_epoch and self._are_members_well:
                    ghost: Ghost = world[GHOST].content
                    world[GHOST] = shared(ghost._replace(reported=tuple(sorted({*ghost.reported, failed_epoch}))))
                node = f"node-{world[SENDER + number].content.term}"
                self._follow(world, number, calls.send_call(node, token, failed_epoch))
            case ("open", token, route, index):
                link = route.content.link
                target = shared(link.master.incarnation)
                self.group(
                    world,
                    int(link.group[1:]) - 1,
                    ("stream_wanted", number, int(link.epoch), int(token), index, target),
                )
            case ("close",):
                for group in range(self.bounds.groups):
                    self.group(world, group, ("stream_closed", number))
            case ("stand again",):
                self._stand_again(world, number)
            case ("send", encoded):
                for group in range(self.bounds.groups):
                    self.group(world, group, ("batch_sent", number, encoded))
            case ("complete", seq, _, _) | ("resume", seq):
                ghost = world[GHOST].content
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
                self.give_up(world, number, slot)
                return
        raise AssertionError("no room for one more call without a caller: widen the state")


_ANSWERS: dict[str, Any] = {"opened": LinkOpened, "open": OpenFailed, "sealed": SealAnswered, "seal": SealFailed}


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
