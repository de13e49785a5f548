"""A reader among others, with words that come late or never: it acts only while nobody else can have been granted, and is granted in the end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from seriatim.consumer.core import invariants, tenure
from seriatim.consumer.core.cursor import Granted
from seriatim.consumer.core.tenure import (
    ActUntil,
    Answered,
    Ask,
    AskAfter,
    AskEnded,
    Deposed,
    Elected,
    EndTerm,
    Event,
    Prove,
    Proved,
    TakeUp,
    Tenure,
    Tick,
    Unanswered,
    Unsure,
    Wanted,
)
from seriatim.consumer.core.view import START, ChainView, Grant
from seriatim.protocol.names import ChainVersion, Generation, SubscriptionId, Token

TIMEOUT_S = 6.0
VIEW = ChainView("c", 1, "q", ChainVersion(1))


@dataclass
class World:
    """ZooKeeper and a coordinator, as they are, and one reader, by what it is told.

    node: the reader's own, 0 where there is none. before_it: others stand before it. lives_until_s: when its session is over at the latest
    word that ZooKeeper had of it. newest: the newest token, and whose: of a node, 0 for somebody else's.
    """

    now_s: float = 100.0
    node: int = 0
    nodes: int = 0
    is_another_before: bool = False
    lives_until_s: float = 0.0
    newest: int = 0
    newest_of: int = 0
    state: Tenure = field(default_factory=Tenure)
    may_act_until_s: float = 0.0
    held: int = 0
    is_told_elected: bool = False
    proofs: deque[tuple[str, float]] = field(default_factory=deque)
    ask: Ask | None = None
    reply: Event | None = None
    is_to_tick: bool = False

    def happened(self, event: Event) -> None:
        before = self.state
        self.state, effects = tenure.decide(before, event)
        invariants.check_tenure(before, self.state, effects)
        for effect in effects:
            match effect:
                case Prove():
                    self.prove()
                case Ask():
                    assert self.ask is None, "two are asked at once"
                    assert not self.is_to_tick, "it is asked before its time"
                    self.ask, self.reply = effect, None
                case AskAfter():
                    self.is_to_tick = True
                case TakeUp(granted):
                    self.held = granted.grant.token
                case ActUntil(until_s):
                    self.may_act_until_s = until_s
                case EndTerm():
                    self.held = 0

    @property
    def acts(self) -> bool:
        return self.held > 0 and self.now_s < self.may_act_until_s

    # ---- what is

    def pass_time(self, for_s: float = 1.5) -> None:
        """A session ends as early as it can: ZooKeeper has heard of each proof when it was sent. Another reader is granted at once."""
        self.now_s += for_s
        if self.node and self.now_s >= self.lives_until_s:
            assert not self.acts, "it acts, and another reader is granted"
            self.node, self.newest, self.newest_of = 0, self.newest + 1, 0

    def pass_more_time(self) -> None:
        self.pass_time(TIMEOUT_S)

    def stand(self) -> None:
        if not self.node:
            self.nodes += 1
            self.node, self.lives_until_s = self.nodes, self.now_s + TIMEOUT_S
            self.is_another_before = self.nodes % 3 == 1
            self.is_told_elected = False

    def go(self) -> None:
        """Whoever stood before this reader goes."""
        self.is_another_before = False

    # ---- what the reader does, and hears

    def prove(self) -> None:
        if self.node and self.state.is_elected and self.state.lease.holder == str(self.node):
            self.lives_until_s = self.now_s + TIMEOUT_S
            self.proofs.append((str(self.node), self.now_s))

    def answer_proof(self) -> None:
        if self.proofs:
            self.happened(Proved(*self.proofs.popleft(), TIMEOUT_S))

    def hear(self) -> None:
        """Of the election as it is."""
        if self.node and not self.is_another_before:
            if not self.is_told_elected:
                self.is_told_elected = True
                self.happened(Elected(str(self.node)))
        else:
            self.is_told_elected = False
            self.happened(Deposed("standing is waiting" if self.node else "standing is out"))

    def doubt(self) -> None:
        self.is_told_elected = False
        self.happened(Unsure())

    def want(self) -> None:
        self.happened(Wanted())

    def look(self) -> None:
        """The coordinator looks who is elected; its answer may come much later."""
        if self.ask is None or self.reply is not None:
            return
        if self.is_another_before or self.ask.node != str(self.node):
            self.reply = Unanswered("not first in line")
        elif self.ask.token and self.ask.token < self.newest:
            self.reply = tenure.Overtaken("a newer one was elected")
        else:
            if self.newest_of != self.node:
                self.newest, self.newest_of = self.newest + 1, self.node
            grant = Grant(SubscriptionId(1), Generation(1), Token(self.newest))
            self.reply = Answered(self.ask.node, grant.token, Granted(VIEW, grant, START))

    def answer(self) -> None:
        if self.ask is not None and self.reply is not None:
            reply, self.ask, self.reply = self.reply, None, None
            self.happened(reply)
            self.happened(AskEnded())

    def lose_answer(self) -> None:
        if self.ask is not None:
            self.ask = self.reply = None
            self.happened(Unanswered("no answer in time"))
            self.happened(AskEnded())

    def tick(self) -> None:
        if self.is_to_tick:
            self.is_to_tick = False
            self.happened(Tick())

    def settle(self) -> None:
        """All is well for a moment: it is first in line, and everybody answers."""
        for step in ("stand", "go", "hear", "prove"):
            getattr(self, step)()
        for step in ("answer", "tick", "look", "answer", "tick") * 3:
            getattr(self, step)()
        self.prove()
        while self.proofs:
            self.answer_proof()


STEPS = (
    "settle", "pass_time", "pass_more_time", "stand", "go", "prove", "answer_proof", "hear", "doubt", "want", "look", "answer", "lose_answer", "tick",
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(STEPS), min_size=20, max_size=80))
def test_a_reader_acts_only_while_nobody_else_can_be_granted_and_is_granted_once_it_is_first(steps: list[str]) -> None:
    world = World()
    for step in steps:
        getattr(world, step)()
    world.settle()
    assert world.acts
    assert world.held == world.newest
    assert world.newest_of == world.node
