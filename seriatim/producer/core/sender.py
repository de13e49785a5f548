"""What an elected sender does next: the state machine between a producer's batches and the links that take them.

Problem: batches leave in one order, many in flight, over links that break, to members that refuse; the sender may be
deposed at any moment. Every record must end acknowledged, or as outcome unknown, once, and nothing may overtake.

Idea: one ordered list of batches that aren't complete (`pending`); the first `in_flight` of them are on the present
stream. A batch leaves the list by a cumulative acknowledgement of the present stream, or by a resume point (H2).
Whatever goes wrong with the stream, it is given up, a route is asked for, the list is cut by the resume point, and
what is left is sent again from its front: same identities, same order. Being deposed empties the list (H4).

    STANDING_BY --Elected--> ACQUIRING --Granted--> SENDING
                              ^   | WaitAnswered,     | Refused, StreamBroken, or nothing acknowledged in time
                              |   v AcquireFailed     |
                              |  WAITING              |
                              +---+-------------------+
    any --Deposed, Fenced, Withdrawn--> STANDING_BY      any --Closed, a caller's error--> ENDED

`decide` is total over the events of the present stream and the present request; those of earlier ones are ignored,
because an answer that comes late says nothing about what is on its way now. Rules: protocol.md 4, H2, H4, H12.
"""

from __future__ import annotations

from dataclasses import replace

from seriatim.producer.core.events import (
    Acknowledged,
    Acquire,
    AcquireFailed,
    BatchClosed,
    Closed,
    CloseStream,
    Complete,
    Deposed,
    Effect,
    Elected,
    Event,
    FailAll,
    Granted,
    OpenStream,
    Refused,
    Send,
    StandAgain,
    Stop,
    StreamBroken,
    TellDeposed,
    TellElected,
    Tick,
    WaitAnswered,
    Withdrawn,
)
from seriatim.producer.core.resume import cut, marks_of
from seriatim.producer.core.sender_state import Pending, Phase, SenderSettings, SenderState
from seriatim.protocol.errors import (
    BadChecksum,
    CallerError,
    Fenced,
    InvariantBroken,
    MalformedFrame,
    NotElected,
    OlderVersion,
    PartlyResend,
    Resend,
    SeqNotRising,
    SeriatimError,
    WrongIndex,
)
from seriatim.protocol.names import Epoch
from seriatim.protocol.patience import backoff_s

Step = tuple[SenderState, list[Effect]]


def wake_at_s(state: SenderState, settings: SenderSettings) -> float | None:
    """When the next Tick is wanted; None: not before another event."""
    if state.phase is Phase.WAITING:
        return state.retry_at_s
    return _due_at_s(state, settings) if _is_waited_for(state) else None


def _is_waited_for(state: SenderState) -> bool:
    """Whether the master owes an acknowledgement, or its first word before anything is sent."""
    return state.phase is Phase.SENDING and (state.in_flight > 0 or _is_asked_first(state))


def _is_asked_first(state: SenderState) -> bool:
    """Whether nothing is sent before the master said something: what was sent in vain stands in its way."""
    return state.patience.is_tried and not state.is_answered


def decide(state: SenderState, event: Event, now_s: float, settings: SenderSettings) -> Step:
    """The next state, and the effects in the order they must run.

    Raises InvariantBroken for an event that can't come in this phase.
    """
    match event:
        case Acknowledged():
            return _acknowledged(state, event, now_s, settings)
        case BatchClosed():
            return _closed_batch(state, event, now_s, settings)
        case Tick():
            return _tick(state, now_s, settings)
        case Granted() | WaitAnswered() | AcquireFailed():
            return _answered(state, event, now_s, settings)
        case Refused() | StreamBroken():
            return _stream_ended(state, event, settings)
        case Elected():
            if state.phase is not Phase.STANDING_BY:
                raise InvariantBroken(f"elected while {state.phase}")
            return _asked(state)
        case Deposed():
            return (state, []) if state.phase in _IDLE else _deposed(state, event.reason)
        case Withdrawn():
            return (state, []) if state.phase in _IDLE else _withdrawn(state, "the application stands again")
        case Closed():
            state, effects = _deposed(state, "the producer was closed")
            return replace(state, phase=Phase.ENDED), effects


_IDLE = (Phase.STANDING_BY, Phase.ENDED)


def _closed_batch(state: SenderState, event: BatchClosed, now_s: float, settings: SenderSettings) -> Step:
    if state.phase in _IDLE:
        raise InvariantBroken(f"a batch was closed while {state.phase}")
    state = replace(state, pending=(*state.pending, Pending(event.number, event.batch)))
    return _filled(state, [], now_s, settings)


def _acknowledged(state: SenderState, event: Acknowledged, now_s: float, settings: SenderSettings) -> Step:
    if state.phase is not Phase.SENDING or event.stream != state.stream:
        return state, []
    if event.next_index > state.next_index:
        error = InvariantBroken(
            f"index {event.next_index} was acknowledged, {state.next_index} never sent", epoch=state.epoch
        )
        return _stopped(state, error)
    effects: list[Effect] = []
    done = 0
    done_bytes = 0
    for pending in state.pending[: state.in_flight]:
        header = pending.batch.header
        if header.end_index > event.next_index:
            break
        effects.append(Complete(pending.number, state.epoch, header.first_index, state.base))
        done += 1
        done_bytes += pending.batch.size_bytes
    if done == 0:
        if state.is_answered:
            return state, []
        return _filled(replace(state, answered_at_s=now_s, is_excused=False), [], now_s, settings)
    patience = state.patience
    if state.is_answered:  # before that, it was the connection that took its time
        gap_s = now_s - max(state.progress_at_s, state.answered_at_s)
        patience = patience.heard(gap_s, _usual_s(state, settings))
    state = replace(
        state,
        pending=state.pending[done:],
        in_flight=state.in_flight - done,
        in_flight_bytes=state.in_flight_bytes - done_bytes,
        progress_at_s=now_s,
        has_progress=True,
        is_excused=False,
        patience=patience.arrived(),
        timing=state.timing.after(max(0.0, now_s - state.pending[done - 1].sent_at_s)),
        refusals=0,
    )
    return _filled(state, effects, now_s, settings)


def _filled(state: SenderState, effects: list[Effect], now_s: float, settings: SenderSettings) -> Step:
    """Send what the window has room for."""
    if state.phase is not Phase.SENDING or _is_asked_first(state):
        return state, effects
    in_flight, in_flight_bytes, next_index = state.in_flight, state.in_flight_bytes, state.next_index
    window_batches = 1 if state.patience.is_tried else settings.window_batches
    sent: list[Pending] = []
    for pending in state.pending[in_flight:]:
        size_bytes = pending.batch.size_bytes
        is_full = in_flight >= window_batches or in_flight_bytes + size_bytes > settings.window_bytes
        if in_flight and is_full:
            break
        placed = pending.batch.at(next_index)
        sent.append(Pending(pending.number, placed, now_s))
        effects.append(Send(state.stream, pending.number, placed))
        in_flight += 1
        in_flight_bytes += size_bytes
        next_index = placed.header.end_index
    if not sent:
        return state, effects
    pending_now = (*state.pending[: state.in_flight], *sent, *state.pending[in_flight:])
    # Time without an acknowledgement runs only while there is something to acknowledge.
    progress_at_s = state.progress_at_s if state.in_flight else now_s
    state = replace(
        state,
        pending=pending_now,
        in_flight=in_flight,
        in_flight_bytes=in_flight_bytes,
        next_index=next_index,
        progress_at_s=progress_at_s,
    )
    return state, effects


def _due_at_s(state: SenderState, settings: SenderSettings) -> float:
    return state.progress_at_s + state.patience.limit_s(_usual_s(state, settings))


def _usual_s(state: SenderState, settings: SenderSettings) -> float:
    deadline_s = state.timing.deadline_s(settings.deadline_s, settings.deadline_max_s)
    return deadline_s if state.has_progress else max(deadline_s, settings.first_deadline_s)


def _tick(state: SenderState, now_s: float, settings: SenderSettings) -> Step:
    if state.phase is Phase.WAITING:
        return _asked(state) if now_s >= state.retry_at_s else (state, [])
    if not _is_waited_for(state):
        return state, []
    due_at_s = _due_at_s(state, settings)
    if now_s < due_at_s:
        return state, []
    if now_s > due_at_s + settings.late_s and not state.is_excused:
        # This process slept. What the master said meanwhile hasn't been read yet: no group is given up for that.
        return replace(state, progress_at_s=now_s, is_excused=True), []
    state = replace(state, patience=state.patience.left())
    return _failed(state, f"nothing was acknowledged within {now_s - state.progress_at_s:.1f} s")


def _asked(state: SenderState) -> Step:
    request = state.request + 1
    state = replace(state, phase=Phase.ACQUIRING, request=request)
    return state, [Acquire(request, state.token, state.failed_epoch, state.failure)]


def _answered(
    state: SenderState, event: Granted | WaitAnswered | AcquireFailed, now_s: float, settings: SenderSettings
) -> Step:
    if state.phase is not Phase.ACQUIRING or event.request != state.request:
        return state, []
    if isinstance(event, AcquireFailed):
        return _not_granted(state, event.error, now_s, settings)
    # Who has no token yet is told to wait without one where the chain kept changing before the token was written.
    is_named = event.token != 0 or isinstance(event, WaitAnswered)
    if not is_named or (state.token and event.token != state.token):
        return _stopped(state, InvariantBroken(f"token {state.token} was answered with token {event.token}"))
    state = replace(state, token=event.token)
    if isinstance(event, WaitAnswered):
        return replace(state, phase=Phase.WAITING, retry_at_s=now_s + max(settings.retry_s, event.retry_after_s)), []
    grant = event.grant
    effects: list[Effect] = []
    if grant.resume_point is not None:
        state = cut(state, grant.resume_point, effects)
    if not state.is_told:
        effects.append(TellElected(state.token, grant))
    stream = state.stream + 1
    effects.append(OpenStream(stream, state.token, grant))
    state = replace(
        state,
        phase=Phase.SENDING,
        is_told=True,
        stream=stream,
        refusals=state.refusals if grant.epoch == state.epoch else 0,
        epoch=grant.epoch,
        failed_epoch=Epoch(0),
        failure="",
        base=grant.base,
        next_index=grant.next_index,
        progress_at_s=now_s,
        answered_at_s=0.0,
        has_progress=False,
        is_excused=False,
        tries=0,
    )
    return _filled(state, effects, now_s, settings)


def _not_granted(state: SenderState, error: SeriatimError, now_s: float, settings: SenderSettings) -> Step:
    if isinstance(error, Fenced) or (isinstance(error, NotElected) and state.token):
        return _withdrawn(state, str(error))
    if isinstance(error, CallerError):
        return _stopped(state, error)
    # A coordinator that reads the election late says not elected too; without a token nothing is at stake.
    delay_s = backoff_s(settings.retry_s, settings.retry_max_s, state.tries)
    return replace(state, phase=Phase.WAITING, tries=state.tries + 1, retry_at_s=now_s + delay_s), []


def _stream_ended(state: SenderState, event: Refused | StreamBroken, settings: SenderSettings) -> Step:
    if state.phase is not Phase.SENDING or event.stream != state.stream:
        return state, []
    if isinstance(event, StreamBroken):
        return _failed(state, event.reason)
    error = event.error
    if isinstance(error, Fenced):
        return _withdrawn(state, str(error))
    # Seqs were checked when they were sent: one that doesn't rise at the master is on its way there twice. Nonsense may be a bit that was
    # flipped on its way, outside of what a batch's checksums cover; who sends it again and again is wrong.
    is_damaged = isinstance(error, MalformedFrame) and state.refusals < settings.tries_on_link
    is_harmless = is_damaged or isinstance(
        error, OlderVersion | WrongIndex | Resend | PartlyResend | BadChecksum | SeqNotRising
    )
    if isinstance(error, CallerError) and not is_harmless:
        return _stopped(state, error)
    if not is_harmless:
        return _failed(state, f"{error.code}: {error.message}")
    # The link is sound; only this stream, or the batches on it, were not as the master wants them (H12).
    refusals = state.refusals + 1
    if refusals > settings.tries_on_link:
        return _failed(state, f"refused {refusals} times: {error.code}: {error.message}")
    effects: list[Effect] = [CloseStream(state.stream)]
    state = replace(state, in_flight=0, in_flight_bytes=0, refusals=refusals)
    if isinstance(error, Resend | PartlyResend):
        state = cut(state, marks_of(error), effects)
        if len(effects) > 1:  # something is complete by it, as by an acknowledgement
            state = replace(state, refusals=0)
    state, more = _asked(state)
    return state, effects + more


def _failed(state: SenderState, failure: str) -> Step:
    """Give the link up, and ask for the next one."""
    state = replace(state, in_flight=0, in_flight_bytes=0, refusals=0, failed_epoch=state.epoch, failure=failure)
    state, asked = _asked(state)
    return state, [CloseStream(state.stream), *asked]


def _deposed(state: SenderState, reason: str) -> Step:
    """Stop at once; nothing that isn't complete is ever sent again under its identity (H4)."""
    effects: list[Effect] = []
    if state.phase is Phase.SENDING:
        effects.append(CloseStream(state.stream))
    if state.phase not in _IDLE:
        effects.append(FailAll(reason))
    if state.is_told:
        effects.append(TellDeposed(reason))
    return SenderState(request=state.request, stream=state.stream), effects


def _withdrawn(state: SenderState, reason: str) -> Step:
    state, effects = _deposed(state, reason)
    return state, [*effects, StandAgain()]


def _stopped(state: SenderState, error: SeriatimError) -> Step:
    state, effects = _deposed(state, str(error))
    return replace(state, phase=Phase.ENDED), [*effects, Stop(error)]
