"""AcquireRead: where the elected reader reads (protocol.md 6).

    reading    the chain is being read: every round starts here
    electing   the caller has no token: who is first in line is being looked up
    naming     the next token is being written
    looking    who of the head link's members is registered is being looked up, after the chain was read
    telling    the reader's token is on its way to every registered member (H8)
    checking   a member couldn't be told: is it still registered?
    passing    the further of two cursors is on its way to the member that has less (H7)
    noting     a member may lack what the other one has: its cursors are being noted as stale, of the chain as it is by then (H7)
    leaving    the cursor is at the end of the head: it is being taken off the consume list (H22), of the chain as it is by then
    confirming all is known: is what it rests on still in the chain as it was read?

The first read may be that of a ZooKeeper server that is behind, and a note of stale cursors may be made while members are told;
looking up sessions brings that server up to date, so what is read again after it shows both (H7).

Hundreds may be elected, or come to a link's end, in one moment, and each writes the chain. What is read for a write says so
(`leads_to_write`), and members aren't told again for what others wrote.

It remembers nothing that it couldn't read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from seriatim.coordinator.core import subscriptions
from seriatim.coordinator.core.acquiring import MAX_ROUNDS, OLDER_PAUSE_MS, Acquiring
from seriatim.coordinator.core.events import (
    Answer,
    ChainConflict,
    ChainRead,
    ChainWritten,
    Effects,
    ElectionSeen,
    Event,
    LookUpElection,
    LookUpSessions,
    ReadChain,
    ReaderNotTold,
    ReaderTold,
    ReadGrant,
    SessionsSeen,
    TellReader,
    Woken,
    WriteChain,
)
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol.chain import ChainDocument, ChainMember, Link, Subscription
from seriatim.protocol.errors import (
    Fenced,
    InvariantBroken,
    OlderGeneration,
    OlderVersion,
    SeriatimError,
    StaleCursor,
    UnknownLink,
    UnknownSubscription,
)
from seriatim.protocol.names import ChainVersion, Index, Token

_NO_HINDRANCE = UnknownLink, StaleCursor
"""Of a member that serves nobody older: it has nothing of the link, or its disk failed and it only remembers who reads."""


class Phase(StrEnum):
    READING = "reading"
    ELECTING = "electing"
    NAMING = "naming"
    LOOKING = "looking"
    TELLING = "telling"
    PASSING = "passing"
    CHECKING = "checking"
    NOTING = "noting"
    CONFIRMING = "confirming"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """`token` 0: the caller has none yet."""

    subscription: str
    election_node: str
    token: Token = Token(0)


@dataclass(frozen=True, slots=True)
class AcquireRead(Acquiring):
    """`told`, `failed`: what the members answered that have to be told, by place.

    `is_newest`: the chain was read behind all that had been written until then. `noted`: the place of the member that
    this run has noted as stale. `passed`: the cursor that was passed on since the members were asked, whatever they made of it.
    `index`: where the reader is to start, if the chain is still the same.
    """

    request: ReadRequest
    phase: Phase = Phase.READING
    told: Mapping[str, ReaderTold] = field(default_factory=dict)
    failed: Mapping[str, SeriatimError] = field(default_factory=dict)
    is_newest: bool = False
    noted: str = ""
    passed: Index = Index(0)
    index: Index = Index(0)

    @property
    def subscription(self) -> Subscription:
        return subscriptions.found(self.document, self.request.subscription)

    @property
    def head(self) -> Link | None:
        consume_list = self.subscription.consume_list
        return self.document.link(consume_list[0]) if consume_list else None


Step = tuple[AcquireRead, Effects]


def start(request: ReadRequest) -> Step:
    """Begin with reading the chain: for who has no token yet, to write the next one there."""
    return AcquireRead(request), (ReadChain(leads_to_write=request.token == 0),)


def step(  # noqa: C901, PLR0912 - a transition table
    state: AcquireRead,
    event: Event,
    now_ms: int,  # noqa: ARG001 - as every procedure's step
) -> Step:
    """What follows from one event. Raises InvariantBroken for an event that nothing asked for."""
    match state.phase, event:
        case Phase.READING, ChainRead():
            return _with_token(replace(state, read=event))
        case Phase.READING, Woken():
            return state, (ReadChain(),)
        case Phase.CONFIRMING, ChainRead():
            return _confirmed(state, event)
        case Phase.LEAVING, ChainRead():
            return _left(state, event)
        case Phase.NOTING, ChainRead():
            return _noted(state, event)
        case Phase.READING, ReaderTold() | ReaderNotTold():
            return state, ()  # late: the other member's answer has decided already
        case Phase.ELECTING, ElectionSeen(first):
            return _elected(state, first)
        case Phase.NAMING, ChainConflict():
            return state.again()
        case Phase.NOTING | Phase.LEAVING, ChainConflict():
            return _in_turn(replace(state, rounds=state.rounds + 1), state.phase)
        case Phase.NAMING | Phase.NOTING | Phase.LEAVING, ChainWritten(version):
            return _written(state, version)
        case Phase.LOOKING, SessionsSeen(registry):
            return _tell(state, registry)
        case Phase.TELLING | Phase.PASSING, ReaderTold(place):
            return _answered(replace(state, told={**state.told, place: event}))
        case Phase.TELLING | Phase.PASSING, ReaderNotTold(place, error):
            if isinstance(error, OlderVersion | Fenced | OlderGeneration):
                return state.again(OLDER_PAUSE_MS)
            return _answered(replace(state, failed={**state.failed, place: error}))
        case Phase.CHECKING, SessionsSeen(registry):
            return _checked(state, registry)
        case _:
            raise InvariantBroken(f"{type(event).__name__} while {state.phase}")


def _with_token(state: AcquireRead) -> Step:
    document = state.document
    if unserved := state.unserved:
        return state.refused(unserved)
    try:
        found = state.subscription
    except UnknownSubscription as unknown:
        if state.is_newest:
            return state.refused(unknown)
        return replace(state, is_newest=True), (ReadChain(is_newest=True),)  # this ZooKeeper server may be behind
    if state.request.token == 0:
        if set_back := state.registry.set_back_error(document):
            return state.refused(set_back)
        return replace(state, phase=Phase.ELECTING), (LookUpElection(found.subscription_id),)
    return state.with_another_token(found.reader_token, "reader", subscription=found.name) or _look(state)


def _elected(state: AcquireRead, first: str) -> Step:
    node, found = state.request.election_node, state.subscription
    if error := state.not_elected(first):
        return state.refused(error)
    if found.reader_node == node:  # it has its token, but the answer that brought it was lost
        return _look(_with_own_token(state))
    named = subscriptions.with_reader(state.document, found.name, node)
    what = f"reader {node} of {found.name} elected token={found.reader_token + 1}"
    return replace(state, phase=Phase.NAMING, pending=named), (WriteChain(named, state.version, what),)


def _with_own_token(state: AcquireRead) -> AcquireRead:
    return replace(state, request=replace(state.request, token=state.subscription.reader_token))


def _written(state: AcquireRead, version: ChainVersion) -> Step:
    wrote = state.written(version)
    return _look(_with_own_token(wrote) if state.phase is Phase.NAMING else wrote)


def _look(state: AcquireRead) -> Step:
    if set_back := state.registry.set_back(state.document.queue_id):
        return state.waits(set_back)
    link = state.head
    if link is None:
        return _granted(state, Index(0))
    return replace(state, phase=Phase.LOOKING, told={}, failed={}, passed=Index(0)), (LookUpSessions(link.group),)


def _head(state: AcquireRead) -> Link:
    link = state.head
    if link is None:
        raise InvariantBroken("there is no head link to read", queue=state.document.name)
    return link


def _tell(state: AcquireRead, registry: Registry) -> Step:
    """To every registered member of the head link, whichever incarnation is there now (H8)."""
    link = _head(state)
    looked = state.looked_up(registry)
    present = _present(looked)
    if not present:
        reason = f"no member of {link.group} is registered, so nobody can tell where link {link.epoch} was read to"
        return looked.waits({link.group: reason})
    return replace(looked, phase=Phase.TELLING), _tellings(state, link, present, Index(0))


def _present(state: AcquireRead) -> list[ChainMember]:
    """The members of the head link that were registered when that was looked up: all of them answer, or fail to."""
    return [side for side in _head(state).sides if state.registry.member(side.name) is not None]


def _tellings(state: AcquireRead, link: Link, sides: Iterable[ChainMember], cursor: Index) -> Effects:
    found = state.subscription
    return tuple(
        TellReader(side.name, link, found.subscription_id, found.generation, found.reader_token, cursor)
        for side in sides
    )


def _answered(state: AcquireRead) -> Step:
    if len(state.told) + len(state.failed) < len(_present(state)):
        return state, ()
    if any(not isinstance(error, _NO_HINDRANCE) for error in state.failed.values()):
        return replace(state, phase=Phase.CHECKING), (LookUpSessions(_head(state).group),)
    return _with_cursors(state)


def _checked(state: AcquireRead, registry: Registry) -> Step:
    """A registered member that can't be told is waited for until it can, or its session is gone.

    Not where the end was committed: who came to it has read all, and whoever was before that one was served no more when it was
    granted its place (H8).
    """
    link = _head(state)
    if link.end is not None and _furthest(state, link) >= link.end:
        return _in_turn(state, Phase.LEAVING)
    reasons = {}
    for side in link.sides:
        error = state.failed.get(side.name.member)
        if error is not None and not isinstance(error, _NO_HINDRANCE) and registry.member(side.name) is not None:
            reasons[str(side.name)] = f"it is registered, but can't be told who reads: {error.message}"
    if reasons:
        return state.waits(reasons)
    return _with_cursors(state)


def _with_cursors(state: AcquireRead) -> Step:
    """The further of the cursors that count, on each member that gives one, and none beyond the link's end (H7, H22)."""
    link, found = _head(state), state.subscription
    sound = _sound(state, link)
    if not sound:
        reason = (
            f"no registered member of {link.group} has sound cursors of link {link.epoch}: "
            f"it has yet to catch up with its peer (or seek the subscription to an offset)"
        )
        return state.waits({link.group: reason})
    furthest = _furthest(state, link)
    cursor = max(subscriptions.start_index(found, link.epoch), furthest)
    if link.end is not None and cursor >= link.end:
        return _in_turn(state, Phase.LEAVING)
    behind = tuple(answer.place for answer in sound if not _has_start(state, answer, furthest))
    if behind and furthest != state.passed:  # else it was passed on; an older member doesn't say whose it is
        return _pass_on(state, link, behind, furthest)
    unsure = _unsure(state, link)
    if unsure and unsure != state.noted and cursor > subscriptions.start_index(found, link.epoch):
        return _note_stale(state, unsure)
    return replace(state, phase=Phase.CONFIRMING, index=cursor), (ReadChain(),)


def _sound(state: AcquireRead, link: Link) -> list[ReaderTold]:
    """What those answered whose cursors count (H7)."""
    return [answer for place, answer in state.told.items() if not answer.is_stale and not _is_noted(state, link, place)]


def _furthest(state: AcquireRead, link: Link) -> Index:
    return max((answer.cursor or Index(0) for answer in _sound(state, link)), default=Index(0))


def _in_turn(state: AcquireRead, phase: Phase) -> Step:
    """Read the chain again, for a write of this phase."""
    if state.rounds >= MAX_ROUNDS:
        return state.again()
    return replace(state, phase=phase), (ReadChain(leads_to_write=True),)


def _left(state: AcquireRead, again: ChainRead) -> Step:
    """What members answered still holds where only others have changed the chain: hundreds come to a link's end at once."""
    if again.version != state.version and not _is_as_read(state, again.document):
        return state.again()
    link, found = _head(state), state.subscription
    left = subscriptions.drained(again.document, found.subscription_id, found.generation, link.epoch)
    what = f"{found.name} has read link {link.epoch} to its end {link.end}"
    return replace(state, pending=left), (WriteChain(left, again.version, what),)


def _has_start(state: AcquireRead, answer: ReaderTold, furthest: Index) -> bool:
    """Whether this member has the cursor where the reader starts, and as this reader's own.

    An earlier one's may be answered to nobody, and of one member alone: nothing counts as the end of a link but what the reader of
    now has come to, or was to start at.
    """
    return furthest == 0 or (answer.cursor == furthest and answer.by == state.subscription.reader_token)


def _pass_on(state: AcquireRead, link: Link, behind: tuple[str, ...], furthest: Index) -> Step:
    """A reader that starts at a cursor counts on it, so both members are to have it, as its own, before it does (H7)."""
    told = {place: answer for place, answer in state.told.items() if place not in behind}
    sides = (side for side in link.sides if side.name.member in behind)
    return replace(state, phase=Phase.PASSING, told=told, passed=furthest), _tellings(state, link, sides, furthest)


def _unsure(state: AcquireRead, link: Link) -> str:
    """The member that may lack what the other one has: it isn't registered, or is noted as stale. "" for none.

    A blank disk has no cursor to give.
    """
    for side in link.sides:
        place = side.name.member
        is_answered = place in state.told or isinstance(state.failed.get(place), UnknownLink)
        if not is_answered or _is_noted(state, link, place):
            return place
    return ""


def _is_noted(state: AcquireRead, link: Link, place: str) -> bool:
    """Whether this member may lack cursors of this subscription. Of a generation sought since the note it lacks none (H9)."""
    note = state.document.stale_note(link.epoch, place)
    return note is not None and note.is_of(state.subscription)


def _note_stale(state: AcquireRead, unsure: str) -> Step:
    """A reader starts at what the other member alone may have: this one gives no cursor before it has that (H7)."""
    return _in_turn(replace(state, noted=unsure), Phase.NOTING)


def _noted(state: AcquireRead, again: ChainRead) -> Step:
    """A note that stands already is written again: what takes it back may be on its way, and is refused once the chain has changed.

    Behind it members are told once more. So what counts here is who reads what, and that nobody's cursors got to count, or not to,
    meanwhile: who was brought up by the other one is looked at again, and the other one may have gone.
    """
    link, found, unsure = _head(state), state.subscription, state.noted
    before, now = (_whose_count_not(document, link, found) for document in (state.document, again.document))
    if again.version != state.version and (before != now or not _is_head_as_read(state, again.document)):
        return state.again()
    noted = subscriptions.with_stale_cursors(again.document, link.epoch, unsure, found.whose)
    what = f"{unsure} of {link.group} may lack cursors of {found.name} in link {link.epoch}: they are stale"
    return replace(state, pending=noted), (WriteChain(noted, again.version, what),)


def _whose_count_not(document: ChainDocument, link: Link, of: Subscription) -> set[str]:
    """The members that are noted to have no sound cursors of this subscription in the link."""
    return {one.member for one in document.stale_cursors if one.epoch == link.epoch and one.is_of(of)}


def _confirmed(state: AcquireRead, again: ChainRead) -> Step:
    if again.version != state.version and not _is_as_read(state, again.document):
        return state.again()
    return _granted(replace(state, read=again), state.index)


def _is_as_read(state: AcquireRead, now: ChainDocument) -> bool:
    """Whether what changed in the chain meanwhile is others': many readers come to a link's end at once.

    Only where each member was told, and has cursors that count: none takes a commit of an earlier reader after that, so what they
    answered is all that there is, whatever notes of others came and went (H7). Or where it was noted, and is, that this reader's don't
    count there.
    """
    return _is_head_as_read(state, now) and all(
        _is_settled(state, now, side.name.member) for side in _head(state).sides
    )


def _is_settled(state: AcquireRead, now: ChainDocument, place: str) -> bool:
    link, found, answer = _head(state), state.subscription, state.told.get(place)
    is_out, is_out_now = (place in _whose_count_not(document, link, found) for document in (state.document, now))
    return is_out_now if is_out else not is_out_now and answer is not None and not answer.is_stale


def _is_head_as_read(state: AcquireRead, now: ChainDocument) -> bool:
    """Whether the same reader is to read the same link. What is compared here never becomes again what it was."""
    found, link = state.subscription, _head(state)
    there = now.subscription(found.name)
    if now.is_deleted or there is None or there.consume_list[:1] != (link.epoch,):
        return False
    return replace(there, consume_list=found.consume_list) == found and now.link(link.epoch) == link


def _granted(state: AcquireRead, index: Index) -> Step:
    found = state.subscription
    grant = ReadGrant(
        document=state.document,
        version=state.version,
        subscription_id=found.subscription_id,
        generation=found.generation,
        token=found.reader_token,
        link=state.head,
        index=index,
    )
    return state, (Answer(grant),)
