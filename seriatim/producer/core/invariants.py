"""What must hold of a sender after every step. Tests call `broken` after each; it answers what doesn't hold."""

from __future__ import annotations

from itertools import pairwise

from seriatim.producer.core.events import Acquire, Complete, Effect, FailAll, OpenStream, Resume, Send
from seriatim.producer.core.sender_state import Pending, Phase, SenderSettings, SenderState


def broken(state: SenderState, settings: SenderSettings) -> list[str]:
    """Sentences about what is wrong with a state; empty where nothing is."""
    wrong: list[str] = []
    if not 0 <= state.in_flight <= len(state.pending):
        wrong.append(f"{state.in_flight} batches in flight of {len(state.pending)}")
    if state.in_flight and state.phase is not Phase.SENDING:
        wrong.append(f"batches are in flight while {state.phase}")
    if state.phase in (Phase.STANDING_BY, Phase.ENDED) and (state.pending or state.token):
        wrong.append(f"H4: batches or a token are kept while {state.phase}")
    if state.phase is Phase.SENDING and not (state.token and state.epoch):
        wrong.append("sending without token or epoch")
    if any(later.number <= earlier.number for earlier, later in pairwise(state.pending)):
        wrong.append("batches are out of order")
    return wrong + _window_faults(state, settings) + _order_faults(state.pending)


def _window_faults(state: SenderState, settings: SenderSettings) -> list[str]:
    wrong: list[str] = []
    flying = [pending.batch for pending in state.pending[: state.in_flight]]
    if any(earlier.header.end_index != later.header.first_index for earlier, later in pairwise(flying)):
        wrong.append("indexes in flight have a gap")
    if flying and flying[-1].header.end_index != state.next_index:
        wrong.append("the next index doesn't follow what is in flight")
    size_bytes = sum(batch.size_bytes for batch in flying)
    if size_bytes != state.in_flight_bytes:
        wrong.append(f"{size_bytes} bytes are in flight, {state.in_flight_bytes} counted")
    if len(flying) > 1 and (size_bytes > settings.window_bytes or len(flying) > settings.window_batches):
        wrong.append("the window is exceeded")
    return wrong


def _order_faults(pending_batches: tuple[Pending, ...]) -> list[str]:
    wrong: list[str] = []
    last: dict[str, int] = {}
    for pending in pending_batches:
        for span in pending.batch.header.spans:
            if span.first_seq <= last.get(span.source, -1):
                wrong.append(f"seqs of {span.source} don't rise over batches")
            last[span.source] = span.last_seq
    return wrong


def broken_step(before: SenderState, after: SenderState, effects: list[Effect]) -> list[str]:
    """Sentences about what is wrong with a step: every batch ends once, by the right effect, and only then."""
    wrong: list[str] = []
    ended = [
        effect.number
        for effect in effects
        if isinstance(effect, Complete) or (isinstance(effect, Resume) and effect.is_whole)
    ]
    known = {pending.number for pending in before.pending}
    kept = {pending.number for pending in after.pending}
    if len(set(ended)) != len(ended) or not set(ended) <= known or set(ended) & kept:
        wrong.append("a batch ended that wasn't pending, or twice, or is pending still")
    vanished = known - kept - set(ended)
    if vanished and not any(isinstance(effect, FailAll) for effect in effects):
        wrong.append(f"batches {sorted(vanished)} vanished")
    for effect in effects:
        if isinstance(effect, OpenStream | Acquire) and effect.token != after.token:
            wrong.append("a route was used with a token other than the present one")
        if isinstance(effect, Send) and (effect.stream != after.stream or after.phase is not Phase.SENDING):
            wrong.append("a batch was sent on a stream that isn't the present one")
    return wrong
