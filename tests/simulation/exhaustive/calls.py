"""Calls at coordinators: procedures of the core, driven as `coordinator.execution` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from seriatim.coordinator.core import acquire_send, close_link
from seriatim.coordinator.core.acquire_send import AcquireSend, SendRequest
from seriatim.coordinator.core.close_link import CloseLink
from seriatim.coordinator.core.events import Answer, Effects, Event, ReadChain, SendOpen, SendSeal, WriteChain
from seriatim.protocol.names import Epoch, Token
from tests.simulation.exhaustive.values import Value, shared

NOW_MS = 1
"""No procedure compares times, so one moment is enough."""


class Call(NamedTuple):
    """`pending`: orders to the coordinator itself (ZooKeeper, timers), not carried out yet. `awaiting`: requests to members
    of this round that aren't answered, by what and place.
    """

    state: Value
    pending: tuple[Value, ...] = ()
    awaiting: tuple[tuple[str, int], ...] = ()


class Outcome(NamedTuple):
    """What a step of a call led to: the call as it goes on (None: it is over, with `answer`), whether a new round began,
    and requests to members.
    """

    call: Value | None
    answer: Value | None
    is_new_round: bool
    requests: tuple[Value, ...]


def send_call(node: str, token: int, failed_epoch: int) -> Outcome:
    return _followed(Call(shared(None)), *acquire_send.start(SendRequest(node, Token(token), Epoch(failed_epoch))))


def close_call(epoch: int) -> Outcome:
    return _followed(Call(shared(None)), *close_link.start(Epoch(epoch)))


def told(call: Call, event: Event) -> Outcome:
    """One event is told to the procedure."""
    state = call.state.content
    step: Callable[..., Any] = acquire_send.step if isinstance(state, AcquireSend) else close_link.step
    after, effects = step(state, event, NOW_MS)
    return _followed(call, after, effects)


def _followed(call: Call, state: Any, effects: Effects) -> Outcome:
    pending, awaiting = list(call.pending), list(call.awaiting)
    requests: list[Value] = []
    is_new_round = False
    for effect in effects:
        if isinstance(effect, Answer):
            return Outcome(None, shared(effect.result), is_new_round=True, requests=())
        if isinstance(effect, ReadChain | WriteChain):
            pending, awaiting, requests, is_new_round = [], [], [], True
        if isinstance(effect, SendOpen | SendSeal):
            what = "open" if isinstance(effect, SendOpen) else "seal"
            place = 0 if effect.side.name.member == "a" else 1
            awaiting.append((what, place))
            requests.append(shared(effect))
        else:
            pending.append(shared(effect))
    return Outcome(
        shared(Call(shared(_uncounted(state)), tuple(pending), tuple(sorted(awaiting)))),
        None,
        is_new_round,
        tuple(requests),
    )


def _uncounted(state: AcquireSend | CloseLink) -> AcquireSend | CloseLink:
    """Without the counters that end a call after forty rounds: an endless repetition is a cycle, not forty states."""
    if isinstance(state, AcquireSend):
        return replace(state, rounds=0, opens=min(state.opens, 1)) if state.rounds or state.opens > 1 else state
    return replace(state, restarts=0) if state.restarts else state
