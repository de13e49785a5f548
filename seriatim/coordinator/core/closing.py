"""The part of a procedure that brings one link to its end (protocol.md 5).

    marking   the chain is being set to *closing*
    sealing   Seal is on its way to both members
    reading   nothing decided by what they answered: what they wrote beside the chain is read
    looking   nothing decided by that either: sessions are looked up, after the chain version was read (H10, H15)

It ends with a document for the caller to write (`Ended`), with nothing to tell yet (`Undecidable`), or with a chain that
has changed under it (`Overtaken`): the caller goes on from what is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from seriatim.coordinator.core import chain, seal
from seriatim.coordinator.core.chain_point import point_before
from seriatim.coordinator.core.events import (
    ChainConflict,
    ChainWritten,
    Effects,
    Event,
    KeptSealsRead,
    LookUpSessions,
    ReadKeptSeals,
    SealAnswered,
    SealFailed,
    SendSeal,
    SessionsSeen,
    WakeAfter,
    Woken,
    WriteChain,
)
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.core.seal import SealAnswer, Undecided, Wholeness
from seriatim.protocol.chain import Certificate, ChainDocument, Link, LinkState
from seriatim.protocol.errors import InvariantBroken, OlderVersion, SeriatimError
from seriatim.protocol.names import ChainVersion, Epoch

OTHER_ANSWER_MS = 10
"""How long a second answer is waited for when a whole one is there: it can show what is on two members (H2)."""


class Phase(StrEnum):
    MARKING = "marking"
    SEALING = "sealing"
    READING = "reading"
    LOOKING = "looking"


@dataclass(frozen=True, slots=True)
class Closing:
    """`document` and `version`: the chain as last read or written. `answers`, `failures`: by place."""

    epoch: Epoch
    document: ChainDocument
    version: ChainVersion
    phase: Phase
    answers: Mapping[str, SealAnswer] = field(default_factory=dict)
    failures: Mapping[str, SeriatimError] = field(default_factory=dict)

    @property
    def link(self) -> Link:
        link = self.document.link(self.epoch)
        if link is None:
            raise InvariantBroken(f"link {self.epoch} left the chain while it was being closed", epoch=self.epoch)
        return link


@dataclass(frozen=True, slots=True)
class Ended:
    """How the link ended stands in `document`, to be written on `expected`. `what`: for the log. `closing`: what led here."""

    document: ChainDocument
    expected: ChainVersion
    what: str
    closing: Closing | None = None


@dataclass(frozen=True, slots=True)
class Undecidable:
    """Nobody can tell the end now, and the link can't be counted as lost (or is lost already)."""

    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Overtaken:
    """The chain changed meanwhile, or a member knows a newer version: start again from reading it (H12)."""


Outcome = Ended | Undecidable | Overtaken


def begin(
    document: ChainDocument, version: ChainVersion, epoch: Epoch, now_ms: int, before: Closing | None = None
) -> tuple[Closing | Outcome, Effects]:
    """Start to close link `epoch`, which is opening, open, closing or lost.

    `before`: how far the same procedure was when the chain changed under it. A seal is final, so what was answered then
    still holds: members are asked again only where it tells no end.
    """
    link = document.link(epoch)
    if link is None or link.state is LinkState.SEALED:
        raise InvariantBroken(f"link {epoch} has ended or is not in the chain", queue=document.name, epoch=epoch)
    if link.state is LinkState.OPENING:
        return Ended(chain.emptied(document, epoch, now_ms), version, f"link {epoch} closed before it was granted"), ()
    if link.state is LinkState.OPEN:
        marked = chain.closing(document, epoch)
        return Closing(epoch, marked, version, Phase.MARKING), (WriteChain(marked, version, f"closing link {epoch}"),)
    again = Closing(epoch, document, version, Phase.SEALING)
    known = before.answers if before is not None and before.epoch == epoch else {}
    if known and (ended := _ended(replace(again, answers=known), now_ms)):
        return ended, ()
    return _sealing(again)


def _sealing(state: Closing) -> tuple[Closing, Effects]:
    link = state.link
    return replace(state, phase=Phase.SEALING), tuple(SendSeal(side, link, state.version) for side in link.sides)


def step(  # noqa: C901, PLR0912 - a transition table
    state: Closing, event: Event, now_ms: int
) -> tuple[Closing | Outcome, Effects]:
    """What follows from one event. Raises InvariantBroken for an event that nothing asked for."""
    match state.phase, event:
        case Phase.MARKING, ChainWritten(version):
            return _sealing(replace(state, version=version))
        case Phase.MARKING, ChainConflict():
            return Overtaken(), ()
        case _, SealFailed(_, OlderVersion()):
            return Overtaken(), ()
        case Phase.SEALING, SealFailed(place, error):
            return _considered(replace(state, failures={**state.failures, place: error}), now_ms)
        case Phase.SEALING, SealAnswered(place, answer):
            return _considered(_with_answer(state, place, answer), now_ms)
        case Phase.SEALING, Woken():
            return _ended(state, now_ms) or state, ()
        case Phase.READING, KeptSealsRead(answers):
            for place, answer in answers.items():
                if place not in state.answers or state.answers[place].wholeness is Wholeness.UNKNOWN:
                    state = _with_answer(state, place, answer)
            if ended := _ended(state, now_ms):
                return ended, ()
            return replace(state, phase=Phase.LOOKING), (LookUpSessions(state.link.group),)
        case Phase.LOOKING, SessionsSeen(registry):
            return _without_answer(state, registry), ()
        case _, Woken():
            return state, ()
        case _:
            raise InvariantBroken(f"{type(event).__name__} while {state.phase} link {state.epoch}")


def _with_answer(state: Closing, place: str, answer: SealAnswer) -> Closing:
    side = state.link.side(place)
    if side is None:
        raise InvariantBroken(f"link {state.epoch} has no side {place}")
    return replace(state, answers={**state.answers, place: seal.judged(state.link, side, answer)})


def _decision(state: Closing, now_ms: int) -> Certificate | Undecided:
    before = point_before(state.document, state.epoch)
    return seal.decide(state.link, before, state.answers, now_ms=now_ms)


def _considered(state: Closing, now_ms: int) -> tuple[Closing | Outcome, Effects]:
    """Decide as soon as one whole answer is there and the other has come, has failed, or was waited for."""
    if len(state.answers) + len(state.failures) < 2:
        is_told = isinstance(_decision(state, now_ms), Certificate)
        return state, (WakeAfter(OTHER_ANSWER_MS),) if is_told else ()
    if ended := _ended(state, now_ms):
        return ended, ()
    return replace(state, phase=Phase.READING), (ReadKeptSeals(state.link),)


def _ended(state: Closing, now_ms: int) -> Ended | None:
    """How the link ended, where what was answered tells that."""
    certificate = _decision(state, now_ms)
    if isinstance(certificate, Undecided):
        return None
    document = chain.sealed(state.document, state.epoch, certificate)
    answered = ",".join(str(one) for one in certificate.answered)
    what = f"link {state.epoch} sealed at {certificate.end} whole={certificate.is_whole} answered={answered}"
    return Ended(document, state.version, what, state)


def _without_answer(state: Closing, registry: Registry) -> Outcome:
    """Nobody can tell the end: it is lost once one of the two can take no records any more (protocol.md 5.4)."""
    link = state.link
    why = registry.absence(link) or _over_without_use(state)
    if link.state is LinkState.CLOSING and why:
        what = f"link {state.epoch} lost: {why}"
        return Ended(chain.lost(state.document, state.epoch), state.version, what, state)
    return Undecidable(_reasons(state))


def _over_without_use(state: Closing) -> str:
    """A member that sealed takes no more records, even where its answer can't tell the end; nor does one whose disk failed.

    That holds for the incarnation that says so: where it is the link's own, nothing more is confirmed, or acknowledged, there. Where
    the disks of both failed, as on one storage, neither ever seals, and both stay registered.
    """
    for side in state.link.sides:
        answer = state.answers.get(side.name.member)
        if answer is None:
            continue
        if answer.wholeness is not Wholeness.UNKNOWN:
            return f"{side.name} is sealed, but may have lost records: {answer.reason}"
        if answer.has_failed and answer.incarnation == side.incarnation:
            return f"{side.name} takes no more records: {answer.reason}"
    return ""


def _reasons(state: Closing) -> dict[str, str]:
    decision = _decision(state, 0)
    reasons = dict(decision.reasons) if isinstance(decision, Undecided) else {}
    for side in state.link.sides:
        failure = state.failures.get(side.name.member)
        if failure is not None:
            reasons[str(side.name)] = failure.message
    return {f"link {state.epoch}": f"its end can't be told ({state.link.state})", **reasons}
