"""Calls at coordinators: procedures of the core, driven as `coordinator.execution` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from seriatim.coordinator.core import acquire_send, chain, close_link
from seriatim.coordinator.core.acquire_send import AcquireSend, SendRequest
from seriatim.coordinator.core.close_link import CloseLink
from seriatim.coordinator.core.closing import Closing, Phase
from seriatim.coordinator.core.events import Answer, Effects, Event, ReadChain, SendOpen, SendSeal, WriteChain
from seriatim.protocol.chain import QueueSettings
from seriatim.protocol.names import ChainVersion, Epoch, QueueId, Token
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
    and requests to members. Nobody waits for the answers of `unasked`: a new round began after them in the same step.
    """

    call: Value | None
    answer: Value | None
    is_new_round: bool
    requests: tuple[Value, ...] = ()
    unasked: tuple[Value, ...] = ()


def send_call(node: str, token: int, failed_epoch: int) -> Outcome:
    return _followed(Call(shared(None)), *acquire_send.start(SendRequest(node, Token(token), Epoch(failed_epoch))))


def close_call(epoch: int) -> Outcome:
    return _followed(Call(shared(None)), *close_link.start(Epoch(epoch)))


def restarted(state: AcquireSend) -> Value:
    """The call as it goes on when the chain has changed under it."""
    return shared(Call(shared(AcquireSend(state.request)), (shared(ReadChain()),)))


def told(call: Call, event: Event) -> Outcome:
    """One event is told to the procedure."""
    state = call.state.content
    step: Callable[..., Any] = acquire_send.step if isinstance(state, AcquireSend) else close_link.step
    after, effects = step(state, event, NOW_MS)
    return _followed(call, after, effects)


def _followed(call: Call, state: Any, effects: Effects) -> Outcome:
    pending, awaiting = list(call.pending), list(call.awaiting)
    requests: list[Value] = []
    unasked: list[Value] = []
    is_new_round = False
    for effect in effects:
        if isinstance(effect, Answer):
            return Outcome(None, shared(effect.result), is_new_round=True)
        if isinstance(effect, ReadChain | WriteChain):
            pending, awaiting, requests, unasked, is_new_round = [], [], [], [*unasked, *requests], True
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
        tuple(unasked),
    )


def _uncounted(state: AcquireSend | CloseLink) -> AcquireSend | CloseLink:
    """Without what never tells two futures apart.

    The counters that end a call after forty rounds: an endless repetition is a cycle, not forty states. Of a closing that was
    overtaken, only its answers count, and only until the link has ended.
    """
    before = state.before
    if before is not None:
        before = _answers_only(before)
        if isinstance(state, AcquireSend) and before is not None and state.read is not None:
            link = state.read.document.link(before.epoch)
            before = None if link is None or link.end is not None else before
    if isinstance(state, AcquireSend):
        return replace(state, rounds=0, opens=min(state.opens, 1), before=before)
    return replace(state, restarts=0, before=before)


def _answers_only(before: Closing) -> Closing | None:
    if not before.answers:
        return None
    return replace(before, document=_NO_CHAIN, version=ChainVersion(0), phase=Phase.SEALING, failures={})


_NO_CHAIN = chain.created(cluster="", queue_id=QueueId(0), name="", settings=QueueSettings(), groups=(), now_ms=0)
