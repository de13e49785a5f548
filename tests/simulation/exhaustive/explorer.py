"""Every state that the bounds allow, once: breadth first, so that the first trace found is a shortest one."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from seriatim.protocol.errors import SeriatimError
from tests.simulation.exhaustive.bounds import Bounds
from tests.simulation.exhaustive.state import BUDGET, GHOST, ZK, World
from tests.simulation.exhaustive.world import Everything

Ending = tuple[object, ...]
"""How a run may end: each link's group, state, end and hash; what is complete."""


def _ending(world: World) -> Ending:
    links = world[ZK].content.document.content.links
    ends = tuple((link.group, link.state, link.end, link.certificate and link.certificate.link_hash) for link in links)
    return ends, world[GHOST].content.complete


@dataclass
class Result:
    """What an exploration found. `violation`: empty where nothing is wrong; `trace`: the steps that lead there."""

    bounds: Bounds
    states: int = 0
    transitions: int = 0
    goals: int = 0
    depth: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    is_complete: bool = True
    ends: set[Ending] = field(default_factory=set)

    def summary(self) -> dict[str, Any]:
        """For whoever asked another process for it. `text`: all of it, for a person."""
        is_complete, text = self.is_complete, str(self)
        return {"violation": self.violation, "is_complete": is_complete, "goals": self.goals, "text": text}

    def __str__(self) -> str:
        text = (
            f"{self.bounds}: {self.states:,} states, {self.transitions:,} transitions, {self.goals:,} goals, "
            f"depth {self.depth}, {self.seconds:.1f} s"
        )
        if not self.is_complete:
            text += " (not all: the limit was reached)"
        if self.violation:
            text += f"\nviolation: {self.violation}\n" + "\n".join(
                f"{n:4} {step}" for n, step in enumerate(self.trace, 1)
            )
        return text


def explore(bounds: Bounds, *, max_states: int = 50_000_000, checks_liveness: bool = True) -> Result:
    """All states within the bounds, or up to the first violation."""
    return _Exploration(bounds, max_states).run(checks_liveness=checks_liveness)


class _Exploration:
    def __init__(self, bounds: Bounds, max_states: int) -> None:
        self.result = Result(bounds)
        self._steps = Everything(bounds)
        self._max_states = max_states
        self._states: list[World] = []
        self._number: dict[World, int] = {}
        self._parents = array("I")
        self._labels = array("I")
        self._texts: dict[str, int] = {}
        self._edges = array("I")
        self._first_edge = array("Q")
        self._goals = bytearray()

    def run(self, *, checks_liveness: bool) -> Result:
        began_s = time.process_time()
        result = self.result
        self._add(self._steps.first(), 0, "")
        at = 0
        try:
            while at < len(self._states) and not result.violation:
                if len(self._states) > self._max_states:
                    result.is_complete = False
                    break
                self._expand(at)
                at += 1
            result.states = len(self._states)
            if checks_liveness and result.is_complete and not result.violation:
                self._check_liveness()
        finally:
            result.seconds = time.process_time() - began_s
        return result

    def _add(self, world: World, parent: int, label: str) -> int:
        number = self._number.get(world)
        if number is None:
            number = self._number[world] = len(self._states)
            self._states.append(world)
            self._parents.append(parent)
            self._labels.append(self._texts.setdefault(label, len(self._texts)))
        return number

    def _expand(self, at: int) -> None:
        world, result = self._states[at], self.result
        self._steps.doing = "a check of this state"
        try:
            self._steps.check(world)
            is_goal = self._steps.is_goal(world)
            self._goals.append(is_goal)
            result.goals += is_goal
            if is_goal:
                result.ends.add(_ending(world))
            self._first_edge.append(len(self._edges))
            for label, after in self._steps.moves(world):
                self._edges.append(self._add(after, at, label))
            for label, after in self._steps.failures(world):
                result.transitions += 1
                self._add(after, at, label)
            result.transitions += len(self._edges) - self._first_edge[-1]
        except (AssertionError, SeriatimError) as error:
            result.violation = f"{error} ({type(error).__name__}, at: {self._steps.doing})"
            result.trace = self._trace(at)
            result.depth = len(result.trace)

    def _trace(self, at: int) -> list[str]:
        texts = list(self._texts)
        steps: list[str] = []
        while at:
            steps.append(texts[self._labels[at]])
            at = self._parents[at]
        return steps[::-1]

    def _check_liveness(self) -> None:
        """From every state a goal can be reached without a failure: whatever happened can be healed (invariant 12)."""
        count = len(self._states)
        self._first_edge.append(len(self._edges))
        reaches = bytearray(self._goals)
        edges, first = self._edges, self._first_edge
        is_changed = True
        while is_changed:
            is_changed = False
            for at in range(count - 1, -1, -1):
                if not reaches[at]:
                    for edge in range(first[at], first[at + 1]):
                        if reaches[edges[edge]]:
                            reaches[at] = 1
                            is_changed = True
                            break
        stuck = reaches.find(0)
        if stuck >= 0:
            self.result.violation = f"12: from here on nothing leads to the end ({self._states[stuck][BUDGET]})"
            self.result.trace = self._trace(stuck)
        self.result.depth = len(self._trace(count - 1))
