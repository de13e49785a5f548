"""What an elected reader holds, and until when: its election node, the token that it was given, the grant, the lease.

Problem: ZooKeeper tells who is first in line; a coordinator, when it is asked, gives token and grant; answered writes to the node prove that
the session lives. Each comes in its own time, and may be of a node, or a term, that is over by then.

Idea: an election node stands for one candidacy, and never comes again. Token and lease are of one node; what is told of another one counts
for nothing. Where nobody can tell who is first, nothing may be done, but the term goes on: nobody is granted a newer token as long as the
node is there, which the next write to it that is answered proves.

`decide` is as in `reading`, but for the clock: a lease counts from when its proof was sent. The shell tells AskEnded behind each Ask, once it
has carried out all that follows from the answer. So nothing is acted on before it is taken up, and who wants to be granted anew because of
that waits a little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, assert_never

from seriatim.consumer.core.cursor import Granted
from seriatim.protocol.lease import Lease
from seriatim.protocol.names import Token

RETRY_S: Final = 0.1
_OF_NOBODY: Final = Lease("")


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """This node of the reader's is first in line."""

    node: str


@dataclass(frozen=True, slots=True)
class Unsure:
    """Nobody can tell just now who is first in line."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """Somebody else is, or the node is gone. `waiting_for`: as in the state."""

    reason: str
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class Proved:
    """A write to this node, sent then, was answered."""

    node: str
    sent_at_s: float
    session_timeout_s: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """A coordinator is to be asked once more, with the same token."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A coordinator's answer to who asked for this node.

    `granted`: with that token; None: nothing can be granted now, because of `waiting_for`, and it is to be asked again.
    """

    node: str
    token: Token
    granted: Granted | None = None
    waiting_for: str = ""
    retry_after_s: float = RETRY_S


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nobody could tell, or gave an answer that counts."""

    reason: str


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A coordinator refuses the token: a newer one was given."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """What no waiting mends."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskEnded:
    """All is carried out that follows from the answer, or from its lack."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time is over after which a coordinator is asked again."""


Event = Elected | Unsure | Deposed | Proved | Wanted | Answered | Unanswered | Overtaken | Failed | AskEnded | Tick


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prove:
    """Write to the node now, and not only when that is due."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a coordinator where to read, for this node, with this token; 0: for one. `is_again`: of the same reason as the one before."""

    node: str
    token: Token
    is_again: bool


@dataclass(frozen=True, slots=True)
class AskAfter:
    """Send a Tick after so long."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class TakeUp:
    """Begin, or go on, with this. Whether it may be acted on is said at AskEnded."""

    granted: Granted


@dataclass(frozen=True, slots=True)
class ActUntil:
    """What is granted may be acted on until then, by CLOCK_BOOTTIME; 0: not at all."""

    until_s: float


@dataclass(frozen=True, slots=True)
class EndTerm:
    """Nothing is granted any more."""

    reason: str


Effect = Prove | Ask | AskAfter | TakeUp | ActUntil | EndTerm


@dataclass(frozen=True, slots=True)
class Tenure:
    """State.

    lease: of the node that is elected, or was last; admitted while a term goes on, also where nobody can tell.
    is_elected: that node is first in line, for all that is known here.
    token: given for that node; 0: none yet. Above 0 while a term goes on.
    is_asking: from Ask until AskEnded, and on while another one is to follow. is_asked_again: one is.
    retry_after_s: so long after AskEnded. waiting_for: why nothing is granted, for a person.
    """

    lease: Lease[str] = _OF_NOBODY
    is_elected: bool = False
    token: Token = Token(0)
    is_asking: bool = False
    is_asked_again: bool = False
    retry_after_s: float = RETRY_S
    waiting_for: str = ""


Step = tuple[Tenure, list[Effect]]


def decide(state: Tenure, event: Event) -> Step:
    """What follows from `event`."""
    match event:
        case Elected(node):
            return _elected(state, node)
        case Unsure():
            return replace(state, is_elected=False, waiting_for="ZooKeeper"), [ActUntil(0.0)]
        case Deposed():
            return _ended(replace(state, is_elected=False, waiting_for=event.waiting_for), event.reason)
        case Proved():
            lease = state.lease.renewed(event.node, event.sent_at_s, event.session_timeout_s)
            state = replace(state, lease=lease)
            return state, _acting(state)
        case Failed(reason):
            return _ended(replace(state, is_asked_again=False, waiting_for=reason), reason)
        case _:
            return _asking(state, event)


def _asking(state: Tenure, event: Wanted | Answered | Unanswered | Overtaken | AskEnded | Tick) -> Step:
    match event:
        case Wanted():
            return _wanted(state)
        case Answered():
            return _answered(state, event)
        case Unanswered(reason):
            return replace(state, is_asked_again=True, waiting_for=reason), []
        case Overtaken(reason):
            return _ended(replace(state, token=Token(0), is_asked_again=True, waiting_for=reason), reason)
        case AskEnded():
            if state.is_elected and state.is_asked_again:
                return state, [*_acting(state), AskAfter(state.retry_after_s)]
            return replace(state, is_asking=False, is_asked_again=False), _acting(state)
        case Tick():
            return _asked(state, is_again=True)
        case _:
            assert_never(event)


def _elected(state: Tenure, node: str) -> Step:
    effects: list[Effect] = []
    if node != state.lease.holder:
        if state.lease.is_admitted:
            state, effects = _ended(state, "its election node is another one")
        state = replace(state, lease=Lease(node), token=Token(0))
    state, more = _wanted(replace(state, is_elected=True))
    return state, [*effects, Prove(), *more]


def _ended(state: Tenure, reason: str) -> Step:
    return replace(state, lease=state.lease.dismissed()), [ActUntil(0.0), EndTerm(reason)]


def _acting(state: Tenure) -> list[Effect]:
    """As far as the last answered write to the present node allows it, and nothing else (H8, H10)."""
    return [ActUntil(state.lease.usable_until_s)] if state.is_elected and state.lease.is_admitted else []


def _wanted(state: Tenure) -> Step:
    """Who is asked already is asked once more: it may have looked before there was a reason."""
    return (replace(state, is_asked_again=True), []) if state.is_asking else _asked(state, is_again=False)


def _asked(state: Tenure, *, is_again: bool) -> Step:
    if not state.is_elected:
        return replace(state, is_asking=False, is_asked_again=False), []
    state = replace(state, is_asking=True, is_asked_again=False, retry_after_s=RETRY_S)
    return state, [Ask(state.lease.holder, state.token, is_again)]


def _answered(state: Tenure, event: Answered) -> Step:
    if not state.is_elected or event.node != state.lease.holder:
        return state, []  # the standing changed meanwhile; where it is elected again, that wanted an answer of its own
    effects: list[Effect] = []
    if state.lease.is_admitted and event.token != state.token:
        state, effects = _ended(state, "a new token was given")
    state = replace(state, token=event.token)
    if event.granted is None:
        retry_after_s = event.retry_after_s
        return replace(state, is_asked_again=True, retry_after_s=retry_after_s, waiting_for=event.waiting_for), effects
    state = replace(state, lease=state.lease.admitted(), waiting_for="")
    return state, [*effects, TakeUp(event.granted)]
