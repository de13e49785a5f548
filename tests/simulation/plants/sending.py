"""Wrong rules of sending: what is acknowledged, what a link and its seal let through, what a sender believes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seriatim.broker_group.core import replica, replica_events
from seriatim.coordinator.core import acquire_send, chain, seal
from seriatim.producer.core import sender
from seriatim.producer.loop import SendingLoop
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, LinkState
from tests.simulation.applications import SMALL_BYTES
from tests.simulation.plants.plant import Plant, changed, together
from tests.simulation.schedule import Shape

# ---- sealing


def _largest_that_came(right: Any, link: Any, before: Any, answers: Mapping[str, Any], *, now_ms: int) -> Any:
    decision = right(link, before, answers, now_ms=now_ms)
    if isinstance(decision, seal.Undecided) and answers:
        largest = max((answer.next for answer in answers.values()), key=lambda position: position.index)
        return seal._certificate(link, before, largest, {}, answers.values(), is_whole=True, now_ms=now_ms)
    return decision


def _all_of_one(right: Any, whole: seal.SealAnswer, known: Any) -> Any:
    del right, known
    return whole.next.marks


def _holds_what_two_do(right: Any, state: Any) -> Any:
    after, (answer,) = right(state)
    return after, (replace(answer, result=replace(answer.result, held=answer.result.resume_point)),)


# ---- a new token


def _drops_the_rest(right: Any, state: Any, event: replica_events.Opened) -> Any:
    after, effects = right(state, event)
    if after.record.role is not replica.Role.MASTER or after.record.token == state.record.token:
        return after, effects
    committed = after.committed
    return replace(after, tail=committed, durable=committed.index, flight=()), effects


def _keeps_its_limit(right: Any, state: Any, event: replica_events.Opened) -> Any:
    return right(state, replace(event, max_record_bytes=0))


def _flushed_what_is_left(right: Any, state: Any, index: Any) -> Any:
    return right(state, min(index, state.tail.index))


def _same_index_will_do(right: Any, state: Any, event: replica_events.BatchArrived) -> Any:
    if event.header.end_index > state.tail.index:
        return right(state, event)
    position = replica.position_at(state, state.durable)
    return state, () if position is None else (replica_events.Confirm(position.index, position.hash),)


def _believes_the_index(right: Any, state: Any, event: Any) -> Any:
    position = replica.position_at(state, event.index)
    return right(state, event if position is None else replace(event, hash=position.hash))


def _grants_at_the_first(right: Any, state: Any) -> Any:
    if len(state.positions) == 2:
        state = replace(state, positions={"a": state.positions["a"], "b": state.positions["a"]})
    return right(state)


# ---- acknowledging


def _one_copy(right: Any, state: Any) -> Any:
    return right(replace(state, confirmed=state.tail.index))


def _any_token(right: Any, state: Any, event: replica_events.BatchArrived) -> Any:
    return right(state, replace(event, token=None if event.token is None else state.record.token))


# ---- listing


def _listed_when_it_ends(right: Any, document: ChainDocument, *arguments: Any, **named: Any) -> ChainDocument:
    listed: ChainDocument = right(document, *arguments, **named)
    return replace(listed, subscriptions=document.subscriptions)


def _open_at_once(right: Any, document: ChainDocument, *arguments: Any, **named: Any) -> ChainDocument:
    listed: ChainDocument = right(document, *arguments, **named)
    return replace(listed, links=(*listed.links[:-1], replace(listed.links[-1], state=LinkState.OPEN)))


# ---- being elected


def _keeps_its_records(right: Any, state: Any, reason: str) -> Any:
    after, effects = right(state, reason)
    return replace(after, pending=state.pending), effects


def _fails_nothing(_: Any, self: SendingLoop, reason: str) -> None:
    del reason
    if self._asking is not None:
        self._asking.cancel()
    with self._buffer._guard:
        self._buffer._close_open()
        self._buffer._identities = None


PLANTS = (
    Plant(
        "H1",
        "without a whole answer to a seal, the largest of those that came tells the end",
        changed(seal, "decide", _largest_that_came),
        within=100,
        shape=Shape(kinds=("blank disk", "kill both members"), faults=(3, 5)),
        finds="[34]:",
    ),
    Plant(
        "H2",
        "the resume point counts all that the one answering member has",
        changed(seal, "_on_two_of", _all_of_one),
        within=100,
        shape=Shape(kinds=("isolate", "pause", "cut", "blank disk", "slow disk"), faults=(2, 4)),
        finds="counts as kept",
    ),
    Plant(
        "held like the resume point",
        "the chain holds no more than two members are known to",
        changed(acquire_send, "_granted", _holds_what_two_do),
        within=100,
        shape=Shape(kinds=("kill both members", "kill all", "kill an application"), faults=(2, 4), senders=0.0),
        finds="8:",
    ),
    Plant(
        "H3",
        "on a new token the master drops what isn't acknowledged, and brings the slave up by index alone",
        together(
            changed(replica, "_opened", _drops_the_rest),
            changed(replica, "_flushed", _flushed_what_is_left),
            changed(replica, "_at_used_index", _same_index_will_do),
            changed(replica, "_confirmed", _believes_the_index),
            changed(replica, "_peer_ready", _believes_the_index),
            changed(acquire_send, "_opened", _grants_at_the_first),
        ),
        within=100,
        shape=Shape(kinds=("slow disk", "expire an application's session", "strain a sender"), faults=(6, 9)),
    ),
    Plant(
        "H4",
        "a sender that is elected again sends its old records again",
        together(
            changed(sender, "_deposed", _keeps_its_records),
            changed(SendingLoop, "_end_term", _fails_nothing),
        ),
        within=100,
        shape=Shape(kinds=("strain a sender", "expire an application's session"), faults=(6, 9), senders=0.9),
        finds="everything is read",
    ),
    Plant(
        "H13",
        "a link may be granted as soon as it is listed",
        changed(chain, "next_link", _open_at_once),
        within=1,
        finds="(H13)",
    ),
    Plant(
        "one copy",
        "a batch is acknowledged when the master has it",
        changed(replica, "_commit", _one_copy),
        within=20,
        finds="3:",
    ),
    Plant(
        "token not checked on append",
        "a batch is taken whatever token its stream has",
        changed(replica, "_take", _any_token),
        within=100,
        shape=Shape(kinds=("strain a sender",), faults=(4, 7)),
        finds="7:",
    ),
    Plant(
        "an open link keeps its limit",
        "a sender is granted a limit that was raised, and a link that is open keeps what it was made with",
        changed(replica, "_opened", _keeps_its_limit),
        within=200,
        shape=Shape(
            kinds=("settings altered", "kill an application", "strain a sender"),
            faults=(4, 7),
            senders=0.7,
            settings=pb.QueueSettings(max_record_bytes=SMALL_BYTES),
        ),
        finds="12:",
    ),
    Plant(
        "sender told first",
        "a link is on the consume lists only after its sender was told",
        changed(chain, "next_link", _listed_when_it_ends),
        within=1,
        finds="2:",
    ),
)
