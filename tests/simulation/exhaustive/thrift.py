"""What is done at once: steps for which every later moment gives nothing that another order doesn't give (see `world`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seriatim.coordinator.core.acquire_send import AcquireSend
from seriatim.coordinator.core.acquire_send import Phase as AcquirePhase
from seriatim.coordinator.core.events import LookUpSessions, ReadChain, WriteChain
from seriatim.producer.core.sender import Phase
from seriatim.protocol.chain import ChainDocument
from tests.simulation.exhaustive import calls
from tests.simulation.exhaustive.parts import NOBODY
from tests.simulation.exhaustive.possible import is_closed, is_fenced, readings, says_nothing
from tests.simulation.exhaustive.state import BUDGET, CALL, CLOSER, GROUP, NET, SENDER, SLOTS, ZK, World, Zoo
from tests.simulation.exhaustive.steps import Steps
from tests.simulation.exhaustive.values import Value


class Thrift:
    """Takes such steps, as long as there are any. It remembers which there are."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._bounds = steps.bounds
        self._hurries: dict[Any, tuple[tuple[Any, Value | None], ...]] = {}
        self._reading: dict[Any, tuple[tuple[Any, ...], ...]] = {}

    def normal(self, world: World, *, is_new: bool = False) -> World:
        """The state after all steps that are taken at once (see `world`). `is_new`: a failure has just happened."""
        if not self._bounds.is_thrifty:
            return world
        after = list(world)
        is_safe = not after[BUDGET].content.failures
        if is_new and is_safe:
            for number in range(self._bounds.groups):
                self._steps.group(after, number, ("settled",))
        while self._hurry(after, is_safe=is_safe):
            pass
        return tuple(after)

    def _hurry(self, world: list[Any], *, is_safe: bool) -> bool:
        for slot in SLOTS:
            call = world[CALL + slot]
            if call is not None and self._hurry_call(world, slot, call, is_safe=is_safe):
                return True
        for number in (0, 1):
            if world[SENDER + number].content.state.content.phase is Phase.WAITING:
                self._steps.sender(world, number, ("waited",))
                return True
        for number in range(self._bounds.groups):
            for event in self._hurried(world[GROUP + number], is_safe=is_safe):
                self._steps.group(world, number, event)
                return True
        if world[NET].content:
            for request, rest, _ in self._steps.requests(world[NET]):
                if request.owner == NOBODY and says_nothing(world[GROUP + request.group].content, request):
                    world[NET] = rest
                    return True
        return False

    def _hurry_call(self, world: list[Any], slot: int, call: Value, *, is_safe: bool) -> bool:
        """An order of a call that needn't wait is carried out."""
        key = call, slot, world[ZK]
        due = self._hurries.get(key)
        if due is None:
            due = self._hurries[key] = tuple(self._due_orders(call, slot, world[ZK].content))
        for order, rest in due:
            if order is None:
                self._steps.give_up(world, slot)
                world[CALL + slot] = rest
                return True
            if order.__class__ is not LookUpSessions or (is_safe and self._is_registry_settled(world)):
                world[CALL + slot] = rest
                self._steps.carried_out(world, slot, order)
                return True
        return False

    def _due_orders(self, call: Value, slot: int, zoo: Zoo) -> Iterator[tuple[Any, Value | None]]:
        """Orders that needn't wait (LookUpSessions: if who is registered can't change), and the call while they are
        carried out. None: whatever the call still hears, it ends, or reads the chain again, without having changed anything.
        """
        document: ChainDocument = zoo.document.content
        state = call.content.state.content
        if slot == CLOSER and is_closed(document, call.content):
            yield None, None
        elif isinstance(state, AcquireSend) and state.phase is AcquirePhase.CLOSING and is_fenced(document, state):
            yield None, calls.restarted(state)
        for order, rest in self._steps.pending(call):
            content = order.content
            if (
                (isinstance(content, WriteChain) and content.expected != zoo.version)
                or isinstance(content, LookUpSessions)
                or (isinstance(content, ReadChain) and is_fenced(document, call.content.state.content))
            ):
                yield content, rest

    def _is_registry_settled(self, world: list[Any]) -> bool:
        return all(
            member.is_up and member.session == "on"
            for number in range(self._bounds.groups)
            for member in world[GROUP + number].content.members
        )

    def _hurried(self, group: Value, *, is_safe: bool) -> tuple[tuple[Any, ...], ...]:
        """What senders read at once."""
        key = group, is_safe
        found = self._reading.get(key)
        if found is None:
            found = self._reading[key] = tuple(readings(group.content, is_safe=is_safe))[:1]
        return found
