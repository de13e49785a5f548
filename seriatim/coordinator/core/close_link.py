"""The procedure that closes one link, for the elected coordinator and for operators (protocol.md 5, 5.6).

It records how the link ended and takes its group off the send list, in one write; the next sender's call adds the next
link. `AcquireSend` has the same steps, but adds the next link in that write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from seriatim.coordinator.core import chain, closing
from seriatim.coordinator.core.closing import Closing, Ended, Overtaken, Undecidable
from seriatim.coordinator.core.events import (
    Answer,
    ChainConflict,
    ChainRead,
    ChainWritten,
    Effects,
    Event,
    LinkClosed,
    ReadChain,
    Refused,
    Wait,
    WriteChain,
)
from seriatim.protocol.chain import ChainDocument, LinkState
from seriatim.protocol.errors import InvariantBroken
from seriatim.protocol.names import Epoch

MAX_RESTARTS = 20


@dataclass(frozen=True, slots=True)
class CloseLink:
    """`written`: the document whose write is under way. `restarts`: how often the chain changed under the procedure.

    `before`: how far the closing was when it last did.
    """

    epoch: Epoch
    closing: Closing | None = None
    before: Closing | None = None
    written: ChainDocument | None = None
    restarts: int = 0


def start(epoch: Epoch) -> tuple[CloseLink, Effects]:
    """Begin with reading the chain."""
    return CloseLink(epoch), (ReadChain(),)


def step(state: CloseLink, event: Event, now_ms: int) -> tuple[CloseLink, Effects]:
    """What follows from one event."""
    if isinstance(event, ChainRead):
        return _read(state, event, now_ms)
    if state.written is not None:
        if isinstance(event, ChainWritten):
            return state, (Answer(LinkClosed(state.written, event.version)),)
        if isinstance(event, ChainConflict):
            return _again(state)
        return state, ()
    if state.closing is None:
        raise InvariantBroken(f"{type(event).__name__} before the chain was read")
    outcome, effects = closing.step(state.closing, event, now_ms)
    return _followed(state, outcome, effects)


def _read(state: CloseLink, event: ChainRead, now_ms: int) -> tuple[CloseLink, Effects]:
    if event.document.is_deleted:
        # Its members may have let the link go, seal and all: nobody can say any more how it ended.
        return state, (Answer(Refused(chain.deleted_error(event.document))),)
    link = event.document.link(state.epoch)
    if link is None or link.state is LinkState.SEALED:
        return state, (Answer(LinkClosed(event.document, event.version)),)
    if standstill := event.registry.standstill(event.document.queue_id):
        return state, (Answer(Wait(standstill)),)
    outcome, effects = closing.begin(event.document, event.version, state.epoch, now_ms, state.before)
    return _followed(state, outcome, effects)


def _followed(state: CloseLink, outcome: Closing | closing.Outcome, effects: Effects) -> tuple[CloseLink, Effects]:
    match outcome:
        case Closing():
            return replace(state, closing=outcome), effects
        case Ended(document, expected, what, last):
            return replace(state, closing=last, written=document), (WriteChain(document, expected, what),)
        case Undecidable(reasons):
            return state, (Answer(Wait(reasons)),)
        case Overtaken():
            return _again(state)


def _again(state: CloseLink) -> tuple[CloseLink, Effects]:
    if state.restarts >= MAX_RESTARTS:
        return state, (Answer(Wait({f"link {state.epoch}": "the chain keeps changing"})),)
    return CloseLink(state.epoch, before=state.closing, restarts=state.restarts + 1), (ReadChain(),)
