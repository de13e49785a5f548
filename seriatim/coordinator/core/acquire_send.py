"""AcquireSend: where the elected sender sends (protocol.md 4).

    reading    the chain is being read: every round starts here (step 1)
    electing   the caller has no token: who is first in line is being looked up
    naming     the next token is being written
    looking    a member of the link seems to be gone: sessions are looked up, after the chain was read (H10)
    opening    OpenLink is on its way to both members (step 2)
    pausing    their copies weren't equal yet: asked again after a moment (H3)
    granting   the link is being set to *open*, before its first grant (H13)
    closing    the last link is being closed (step 3, `closing`)
    listing    how it ended, the send list and the next link are being written, all in one (step 4, H24)

It remembers nothing that it couldn't read again: cut off anywhere, the next call goes on from what is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from seriatim.coordinator.core import chain, chain_length, closing
from seriatim.coordinator.core.acquiring import OLDER_PAUSE_MS, Acquiring
from seriatim.coordinator.core.chain_point import point_before
from seriatim.coordinator.core.closing import Closing, Ended, Overtaken, Undecidable
from seriatim.coordinator.core.events import (
    Answer,
    ChainConflict,
    ChainRead,
    ChainWritten,
    Effects,
    ElectionSeen,
    Event,
    LinkOpened,
    LookUpElection,
    LookUpSessions,
    OpenFailed,
    ReadChain,
    SendGrant,
    SendOpen,
    SessionsSeen,
    WakeAfter,
    Woken,
    WriteChain,
)
from seriatim.protocol.chain import ChainDocument, Link, LinkState
from seriatim.protocol.errors import ChainSetBack, Fenced, InvariantBroken, OlderVersion, Waiting
from seriatim.protocol.marks import merged
from seriatim.protocol.names import ChainVersion, Epoch, Token
from seriatim.protocol.position import Position

MAX_OPENS = 40
"""So often are two members asked whose copies aren't equal, with OPEN_PAUSE_MS between. Both answer, so neither has failed: a
stream of the same token still runs, and the caller is asked to come again.
"""
OPEN_PAUSE_MS = 5


class Phase(StrEnum):
    READING = "reading"
    ELECTING = "electing"
    NAMING = "naming"
    LOOKING = "looking"
    OPENING = "opening"
    PAUSING = "pausing"
    GRANTING = "granting"
    CLOSING = "closing"
    LISTING = "listing"


@dataclass(frozen=True, slots=True)
class SendRequest:
    """`token` 0: the caller has none yet. `failed_epoch` 0: it reports no failure."""

    election_node: str
    token: Token = Token(0)
    failed_epoch: Epoch = Epoch(0)


@dataclass(frozen=True, slots=True)
class AcquireSend(Acquiring):
    """`positions`: what OpenLink was answered with, by place. `before`: how far a closing was when the chain changed under it.

    `avoid`: groups that couldn't be opened in this call, and why; they aren't tried again in it.
    """

    request: SendRequest
    phase: Phase = Phase.READING
    positions: Mapping[str, Position] = field(default_factory=dict)
    closing: Closing | None = None
    before: Closing | None = None
    avoid: Mapping[str, str] = field(default_factory=dict)
    opens: int = 0

    @property
    def kept(self) -> dict[str, Any]:
        """Which groups couldn't be opened, and seals that were answered."""
        return {"avoid": self.avoid, "before": self.closing or self.before}

    @property
    def last_link(self) -> Link:
        link = self.document.last_link
        if link is None:
            raise InvariantBroken("the chain has no link to open", queue=self.document.name)
        return link


Step = tuple[AcquireSend, Effects]


def start(request: SendRequest) -> Step:
    """Begin with reading the chain.

    Where the first thing to do is a write, what is remembered does as well: the write refuses what is old.
    """
    begins_with_write = request.token == 0 or request.failed_epoch != 0
    return AcquireSend(request), (ReadChain(may_be_remembered=begins_with_write),)


def step(state: AcquireSend, event: Event, now_ms: int) -> Step:  # noqa: C901, PLR0912 - a transition table
    """What follows from one event. Raises InvariantBroken for an event that nothing asked for."""
    match state.phase, event:
        case Phase.READING, ChainRead():
            if event.is_remembered and not _begins_with_write(state.request, event.document):
                return state, (ReadChain(),)
            return _with_token(replace(state, read=event), now_ms)
        case Phase.READING, Woken():
            return state, (ReadChain(),)
        case Phase.PAUSING, Woken():
            return _open(state)
        case Phase.ELECTING, ElectionSeen(first):
            return _elected(state, first)
        case Phase.NAMING | Phase.GRANTING | Phase.LISTING, ChainConflict():
            return state.again()
        case Phase.NAMING | Phase.GRANTING | Phase.LISTING, ChainWritten(version):
            return _written(state, version, now_ms)
        case Phase.LOOKING, SessionsSeen(registry):
            return _looked(state.looked_up(registry), now_ms)
        case Phase.OPENING, LinkOpened(place, position):
            return _opened(replace(state, positions={**state.positions, place: position}))
        case Phase.OPENING | Phase.PAUSING, OpenFailed(place, error):
            if isinstance(error, OlderVersion | Fenced):
                return state.again(OLDER_PAUSE_MS)  # no failure of a member (H12)
            if isinstance(error, ChainSetBack):
                return state.waits({f"{state.last_link.group}-{place}": error.message})
            return _failed(state, f"{state.last_link.group}-{place}: {error.message}", now_ms)
        case Phase.READING, LinkOpened() | OpenFailed():
            return state, ()  # late: the other member's answer has decided already
        case Phase.CLOSING, _ if state.closing is not None:
            outcome, effects = closing.step(state.closing, event, now_ms)
            return _closed(state, outcome, effects, now_ms)
        case _:
            raise InvariantBroken(f"{type(event).__name__} while {state.phase}")


def _begins_with_write(request: SendRequest, document: ChainDocument) -> bool:
    """Whether the first effect on this chain is a write on its version: of the token, or of *closing*."""
    if document.is_deleted:
        return False
    if request.token == 0:
        return True
    last = document.last_link
    is_reported = last is not None and last.state is LinkState.OPEN and last.epoch == request.failed_epoch
    return is_reported and request.token == document.sender_token


def _with_token(state: AcquireSend, now_ms: int) -> Step:
    """Step 1: refuse an older token; without one, see who is elected."""
    document = state.document
    if unserved := state.unserved:
        return state.refused(unserved)
    if state.request.token == 0:
        if set_back := state.registry.set_back_error(document):
            return state.refused(set_back)
        return replace(state, phase=Phase.ELECTING), (LookUpElection(),)
    return state.with_another_token(document.sender_token, "sender") or _routed(state, now_ms)


def _elected(state: AcquireSend, first: str) -> Step:
    node = state.request.election_node
    if error := state.not_elected(first):
        return state.refused(error)
    # Also the node that got the latest token: who asks without one has been deposed by its own clock meanwhile, and
    # what it sent under that token is never to be taken for what it sends from now on (H4).
    named = chain.with_sender(state.document, node)
    what = f"sender {node} elected token={named.sender_token}"
    return replace(state, phase=Phase.NAMING, pending=named), (WriteChain(named, state.version, what),)


def _with_own_token(state: AcquireSend) -> AcquireSend:
    return replace(state, request=replace(state.request, token=state.document.sender_token))


def _written(state: AcquireSend, version: ChainVersion, now_ms: int) -> Step:
    wrote = state.written(version)
    if state.phase is Phase.GRANTING:
        return _granted(wrote)
    if state.phase is Phase.NAMING:
        return _routed(_with_own_token(wrote), now_ms)
    return _routed(replace(wrote, closing=None, positions={}, opens=0), now_ms)


def _routed(state: AcquireSend, now_ms: int) -> Step:
    """What the last link's state and the caller's report ask for."""
    if set_back := state.registry.set_back(state.document.queue_id):
        return state.waits(set_back)
    last = state.document.last_link
    if last is None or last.state in (LinkState.SEALED, LinkState.LOST):
        return _listed(state, state.document, state.version, "", now_ms)
    if last.state is LinkState.CLOSING or last.epoch == state.request.failed_epoch:
        return _close(state, now_ms)
    if state.registry.absence(last):
        return replace(state, phase=Phase.LOOKING), (LookUpSessions(last.group),)
    return _open(state)


def _looked(state: AcquireSend, now_ms: int) -> Step:
    why = state.registry.absence(state.last_link)
    return _failed(state, why, now_ms) if why else _open(state)


def _open(state: AcquireSend) -> Step:
    link = state.last_link
    asked = replace(state, phase=Phase.OPENING, positions={}, opens=state.opens + 1)
    limit_bytes = state.document.settings.max_record_bytes
    return asked, tuple(
        SendOpen(side, link, state.document.sender_token, state.version, limit_bytes) for side in link.sides
    )


def _opened(state: AcquireSend) -> Step:
    """A grant needs both to answer the same next index and the same running hash (H3)."""
    if len(state.positions) < 2:
        return state, ()
    one, other = state.positions.values()
    if (one.index, one.hash) != (other.index, other.hash):
        if state.opens >= MAX_OPENS:
            reason = f"records are still on their way ({one.index} and {other.index})"
            return state.waits({f"link {state.last_link.epoch}": reason})
        return replace(state, phase=Phase.PAUSING), (WakeAfter(OPEN_PAUSE_MS),)
    if state.last_link.state is LinkState.OPEN:
        return _granted(state)
    link = state.last_link
    marked = chain.opened(state.document, link.epoch)
    write = WriteChain(marked, state.version, f"link {link.epoch} open on {link.group}")
    return replace(state, phase=Phase.GRANTING, pending=marked), (write,)


def _granted(state: AcquireSend) -> Step:
    """The resume point: the marks where both copies agree, so what two members hold (H2).

    Where a link was sealed by one answer, its end can lie beyond what two are known to hold, and what was acknowledged as
    well: what the chain holds is told apart.
    """
    link = state.last_link
    position = next(iter(state.positions.values()))
    before = point_before(state.document, link.epoch)
    grant = SendGrant(
        link=link,
        token=state.request.token,
        next_index=position.index,
        is_resume_known=before.is_known,
        resume_point=merged(link.marks_on_two, position.marks),
        held=merged(before.marks, position.marks),
        given_up_from=chain.given_up_from(state.document),
        max_record_bytes=state.document.settings.max_record_bytes,
        base=link.base,
        next_group=chain.next_group(state.document, state.registry),
    )
    return state, (Answer(grant),)


def _failed(state: AcquireSend, why: str, now_ms: int) -> Step:
    """The link can't be opened: close it and take the next group (step 3)."""
    group = state.last_link.group
    return _close(replace(state, avoid={**state.avoid, group: why}), now_ms)


def _close(state: AcquireSend, now_ms: int) -> Step:
    outcome, effects = closing.begin(state.document, state.version, state.last_link.epoch, now_ms, state.before)
    return _closed(replace(state, phase=Phase.CLOSING), outcome, effects, now_ms)


def _closed(state: AcquireSend, outcome: Closing | closing.Outcome, effects: Effects, now_ms: int) -> Step:
    match outcome:
        case Closing():
            return replace(state, closing=outcome), effects
        case Ended(document, expected, what, last):
            return _listed(replace(state, closing=last), document, expected, what, now_ms)
        case Undecidable(reasons):
            return state.waits(reasons)
        case Overtaken():
            return state.again()


def _listed(state: AcquireSend, document: ChainDocument, expected: ChainVersion, what: str, now_ms: int) -> Step:
    """Step 4, one write: how the last link ended, the send list, and a link for its new head.

    Where no group is left, or the chain has no room for another link, how the last one ended is recorded all the same.
    """
    try:
        listed = chain.next_link(document, state.registry, avoid=state.avoid, now_ms=now_ms)
    except Waiting as waiting:
        if what:
            return _writing(state, document, expected, what)
        reasons = waiting.details["reasons"]
        return state.waits(reasons if isinstance(reasons, Mapping) else {})
    if error := chain_length.listing_error(listed):
        return _writing(state, document, expected, what) if what else state.refused(error)
    link = listed.links[-1]
    listing = f"link {link.epoch} listed for {link.group}"
    return _writing(state, listed, expected, f"{what}; {listing}" if what else listing)


def _writing(state: AcquireSend, document: ChainDocument, expected: ChainVersion, what: str) -> Step:
    return replace(state, phase=Phase.LISTING, pending=document), (WriteChain(document, expected, what),)
