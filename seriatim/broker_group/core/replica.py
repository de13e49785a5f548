"""One link on one member, from open to seal: what to take, what to confirm, when it is committed.

A step takes the state and one event, and gives the next state and the effects in the order in which they must run.
The shell holds sockets, disk and clocks; a batch's bytes never come in here, only its header.

Rules (protocol.md 4, 5.2 and 8):

- A batch is taken when the lease runs, the token is the newest, it continues the link, and no record of it was taken
  before. It is passed to the slave before it is stored here, so that both disks work at once.
- It is committed when it is durable on both; acknowledgements are cumulative. The slave's word is checked: it never
  confirms more than was sent to it, and its hash must be the master's there.
- A refused batch ends its stream: nothing behind it is taken.
- A link that nobody sends to needs no stream to its slave, once the slave has confirmed everything. What was true of two equal
  copies is looked at again (H3) before the next record.
- A seal waits for the writes that were begun, is written behind them, and then for ever gives the same answer (H11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from seriatim.broker_group.core.link_record import LinkRecord, Role, sealed_error
from seriatim.broker_group.core.replica_events import (
    Acknowledge,
    BatchArrived,
    BatchCopied,
    CommittedLearnt,
    Confirm,
    DropPeer,
    Effect,
    EndStreams,
    Event,
    Flushed,
    Forward,
    KeepRecord,
    LetPeerGo,
    Opened,
    PeerConfirmed,
    PeerGone,
    PeerReady,
    PushCommitted,
    Refuse,
    SealAsked,
    SealWritten,
    SenderAway,
    Store,
    TellCommitted,
    WriteFailed,
    WriteSeal,
)
from seriatim.protocol.batch import BatchHeader
from seriatim.protocol.errors import (
    BugError,
    DiskFailed,
    DiskFull,
    Fenced,
    InvariantBroken,
    LeaseOver,
    OlderVersion,
    PartlyResend,
    PeerLost,
    RecordTooLarge,
    Resend,
    SeqNotRising,
    SeriatimError,
    TooManySources,
    WrongIndex,
)
from seriatim.protocol.hashing import hash_after_batch
from seriatim.protocol.marks import (
    SOURCES_ROOM_BYTES,
    SourceSpan,
    is_resend,
    overlaps,
    room_bytes,
    too_many_sources,
)
from seriatim.protocol.names import Index
from seriatim.protocol.position import START, Position

ROW_OVERHEAD_BYTES: Final = 64
"""What a record may take in a payload beside its value: columns, compression's worst case."""


class SealPhase(Enum):
    """open: takes records. waiting: for writes begun. writing: the seal itself is being flushed. sealed: for good."""

    OPEN = 0
    WAITING = 1
    WRITING = 2
    SEALED = 3


@dataclass(frozen=True, slots=True)
class Replica:
    """State of a link on a member.

    `committed`: all before it is known to be on both members. `durable`: index up to which this member has kept what it
    took, as the link's durability asks. `tail`: after the last batch taken. `confirmed`: index up to which the slave
    said so (master only). `flight`: the positions after `committed`, in rising order; the last one is `tail`.
    Invariant: committed.index <= durable <= tail.index on the master, and committed.index <= confirmed.
    """

    record: LinkRecord
    committed: Position = START
    durable: Index = Index(0)
    tail: Position = START
    confirmed: Index = Index(0)
    flight: tuple[Position, ...] = ()
    is_peer_ready: bool = False
    phase: SealPhase = SealPhase.OPEN
    failure: str = ""


Step = tuple[Replica, tuple[Effect, ...]]


# ---- steps ---------------------------------------------------------------------------------------------------------


def step(state: Replica, event: Event) -> Step:  # noqa: C901 - a transition table
    """The next state, and the effects in the order in which they must run."""
    match event:
        case BatchArrived():
            return _take(state, event)
        case Flushed():
            return _flushed(state, event.index)
        case PeerConfirmed():
            return _confirmed(state, event)
        case CommittedLearnt():
            return _committed_learnt(state, event.index)
        case BatchCopied():
            return _copied(state, event)
        case Opened():
            return _opened(state, event)
        case PeerReady():
            return _peer_ready(state, event)
        case PeerGone():
            return _peer_gone(state, event)
        case SenderAway():
            return _sender_away(state)
        case SealAsked():
            return _seal_asked(state, event)
        case SealWritten():
            return _seal_written(state)
        case WriteFailed():
            return _write_failed(state, event)


def reason_not_to_take(state: Replica, now_s: float, lease_until_s: float, *, has_room: bool) -> SeriatimError | None:
    """Why this member takes no record of this link now, whatever it is; None where it does."""
    record = state.record
    if state.phase is not SealPhase.OPEN:
        return sealed_error(record)
    if state.failure:
        return disk_failed(state)
    if now_s >= lease_until_s:
        return LeaseOver("this member can't tell whether its ZooKeeper session still lives", **record.named)
    if record.role is Role.MASTER and not state.is_peer_ready:
        return PeerLost("the other member of this link can't be reached", **record.named)
    if not has_room:
        return DiskFull("this member's disk has no room for more records", **record.named)
    return None


def disk_failed(state: Replica) -> DiskFailed:
    """For whoever brings records to a link of which nothing can be written any more."""
    return DiskFailed(f"this member's disk failed: {state.failure}", **state.record.named)


def _take(state: Replica, event: BatchArrived) -> Step:
    record, header, token = state.record, event.header, event.token
    error = reason_not_to_take(state, event.now_s, event.lease_until_s, has_room=event.has_room)
    if error is not None:
        return state, (Refuse(error),)
    if token is not None and token != record.token:
        if token < record.token:
            return state, (Refuse(Fenced("a newer sender was elected", token=record.token, **record.named)),)
        return state, (Refuse(OlderVersion("this member wasn't told of this sender's token", **record.named)),)
    if header.first_index != state.tail.index:
        return _at_used_index(state, event)
    if header.payload_size > header.count * (record.max_record_bytes + ROW_OVERHEAD_BYTES) + ROW_OVERHEAD_BYTES:
        limit = record.max_record_bytes
        error = RecordTooLarge("a record is over the queue's limit", limit_bytes=limit, **record.named)
        return state, (Refuse(error),)
    error = _resend_error(state, header) or _source_error(state, header)
    if error is not None:
        return state, (Refuse(error),)
    after, store = _stored(state, header, event.header_bytes)
    return after, ((Forward(), store) if record.role is Role.MASTER else (store,))


def _stored(state: Replica, header: BatchHeader, header_bytes: bytes) -> tuple[Replica, Store]:
    position = state.tail.after(header, header_bytes)
    after = replace(state, tail=position, flight=(*state.flight, position))
    return after, Store(header.first_index, position, state.committed.index)


def _copied(state: Replica, event: BatchCopied) -> Step:
    """Only between streams: a batch that the sender passes on meanwhile would be in its place."""
    if state.phase is not SealPhase.OPEN or state.failure:
        return state, (Refuse(sealed_error(state.record)),)
    if state.is_peer_ready or event.header.first_index != state.tail.index:
        error = WrongIndex(f"the slave's copy doesn't continue at {state.tail.index}", epoch=state.record.epoch)
        return state, (Refuse(error),)
    after, store = _stored(state, event.header, event.header_bytes)
    return after, (store,)


def _at_used_index(state: Replica, event: BatchArrived) -> Step:
    """A batch that doesn't continue the link: the one that is there is acknowledged again, anything else refused."""
    header = event.header
    before = _hash_at(state, header.first_index) or event.hash_before
    after = _hash_at(state, header.end_index) or event.hash_after
    if before is not None and hash_after_batch(before, event.header_bytes) == after:
        is_master = state.record.role is Role.MASTER
        return state, (Acknowledge(state.committed.index) if is_master else _durable_here(state),)
    error = WrongIndex(
        f"this link takes index {state.tail.index} next, not {header.first_index}",
        next_index=state.tail.index,
        **state.record.named,
    )
    return state, (Refuse(error),)


def _resend_error(state: Replica, header: BatchHeader) -> SeriatimError | None:
    """The error of a batch with records taken before.

    Only what two members hold may count as stored (H2); the rest of what was taken makes a seq that doesn't rise.
    """
    on_two = _marks_of(header.spans, state.record.start_marks, state.committed.marks)
    is_stored = overlaps(on_two, header.spans)
    if not is_stored and not overlaps(state.tail.marks, header.spans):
        return None
    details = {**state.record.named, "next_index": state.tail.index}
    if not is_stored:
        return SeqNotRising("this batch repeats a seq that is on its way", **details)
    if is_resend(on_two, header.spans):
        return Resend("every record of this batch was stored before", marks=on_two, **details)
    return PartlyResend("some records of this batch were stored before", marks=on_two, **details)


def _source_error(state: Replica, header: BatchHeader) -> TooManySources | None:
    """The error of a batch with a source that the queue never had and has no room for."""
    before, tail = state.record.start_marks, state.tail.marks
    new = [span.source for span in header.spans if span.source not in before and span.source not in tail]
    if not new or room_bytes(before.keys() | tail.keys() | set(new)) <= SOURCES_ROOM_BYTES:
        return None
    return too_many_sources(new[0], **state.record.named)


def _marks_of(spans: tuple[SourceSpan, ...], start: Mapping[str, int], place: Mapping[str, int]) -> dict[str, int]:
    """Marks of these sources, of a link's start and of a place in it, without merging them: a link may have many sources, a batch has few.

    A link takes no record at or below a mark of its start, so where both have a mark, that of the place is the further one.
    """
    return {span.source: marks[span.source] for marks in (start, place) for span in spans if span.source in marks}


def position_at(state: Replica, index: Index) -> Position | None:
    """Where a batch ends at `index`, of the last one committed and those behind it."""
    if index == state.tail.index:
        return state.tail
    if index == state.committed.index:
        return state.committed
    return next((position for position in state.flight if position.index == index), None)


def _hash_at(state: Replica, index: Index) -> bytes | None:
    position = position_at(state, index)
    return None if position is None else position.hash


def _flushed(state: Replica, index: Index) -> Step:
    if index > state.tail.index:
        raise InvariantBroken(f"flushed {index}, beyond what was taken: {state.tail.index}")
    if index <= state.durable:
        return state, ()
    state = replace(state, durable=index)
    if state.phase is SealPhase.WAITING:
        return _write_seal_when_quiet(state)
    if state.phase is not SealPhase.OPEN:
        return state, ()
    if state.record.role is Role.MASTER:
        return _commit(state)
    return state, (_durable_here(state),)


def _durable_here(state: Replica) -> Confirm:
    position = position_at(state, state.durable)
    if position is None:
        raise InvariantBroken(f"flushed {state.durable}, which is not the end of a batch")
    return Confirm(position.index, position.hash)


def _confirmed(state: Replica, event: PeerConfirmed) -> Step:
    if not state.is_peer_ready or event.index <= state.confirmed:
        return state, ()
    position = position_at(state, event.index)
    if position is None or position.hash != event.hash:
        error = PeerLost(
            f"the slave confirmed {event.index} with a hash that isn't the master's, or beyond what it was sent",
            **state.record.named,
        )
        return replace(state, is_peer_ready=False), (DropPeer(error), EndStreams(error))
    return _commit(replace(state, confirmed=event.index))


def _commit(state: Replica) -> Step:
    """Master: what both hold is committed."""
    state, is_new = _with_committed(state, min(state.durable, state.confirmed))
    if not is_new:
        return state, ()
    index = state.committed.index
    return state, (Acknowledge(index), TellCommitted(index), PushCommitted(index))


def _with_committed(state: Replica, index: Index) -> tuple[Replica, bool]:
    """With all positions up to `index` committed; batches end where they end, so it may be one before `index`."""
    passed = 0
    for position in state.flight:
        if position.index > index:
            break
        passed += 1
    if passed == 0:
        return state, False
    return replace(state, committed=state.flight[passed - 1], flight=state.flight[passed:]), True


def _committed_learnt(state: Replica, index: Index) -> Step:
    # Beyond what is durable here nothing can be committed, whatever the master says.
    state, is_new = _with_committed(state, min(index, state.durable))
    return state, (PushCommitted(state.committed.index),) if is_new else ()


def _opened(state: Replica, event: Opened) -> Step:
    record = state.record
    if event.token < record.token:
        return state, (Refuse(Fenced("a newer sender was elected", token=record.token, **record.named)),)
    # Before the seal: who goes by an older chain, as where ZooKeeper was set back, is not to take this for a failure, and go on with the next group.
    if event.chain_version < record.chain_version:
        return state, (
            Refuse(OlderVersion("the chain has changed", chain_version=record.chain_version, **record.named)),
        )
    if state.phase is not SealPhase.OPEN:
        return state, (Refuse(sealed_error(record)),)
    if event.token == record.token and event.chain_version == record.chain_version:
        return state, ()
    limit_bytes = max(record.max_record_bytes, event.max_record_bytes)
    record = replace(record, token=event.token, chain_version=event.chain_version, max_record_bytes=limit_bytes)
    return replace(state, record=record), (KeepRecord(record),)


def _peer_ready(state: Replica, event: PeerReady) -> Step:
    if state.phase is not SealPhase.OPEN:
        return state, (DropPeer(sealed_error(state.record)),)
    if _hash_at(state, event.index) != event.hash:
        error = PeerLost("the two copies of this link differ", **state.record.named)
        return state, (DropPeer(error),)
    state, effects = _commit(replace(state, is_peer_ready=True, confirmed=event.index))
    # What the broken stream was to tell the slave may never have arrived.
    if not effects and state.committed.index > 0:
        return state, (TellCommitted(state.committed.index),)
    return state, effects


def _peer_gone(state: Replica, event: PeerGone) -> Step:
    if not state.is_peer_ready:
        return state, ()
    error = PeerLost(f"the slave is lost: {event.reason}", **state.record.named)
    return replace(state, is_peer_ready=False), (EndStreams(error),)


def _sender_away(state: Replica) -> Step:
    if not state.is_peer_ready or state.flight:
        return state, ()
    return replace(state, is_peer_ready=False), (LetPeerGo(),)


def _seal_asked(state: Replica, event: SealAsked) -> Step:
    if event.chain_version < state.record.chain_version:
        older = OlderVersion("the chain has changed", chain_version=state.record.chain_version)
        return state, (Refuse(older),)
    if state.phase is not SealPhase.OPEN:
        return state, ()
    record = replace(state.record, chain_version=event.chain_version)
    state = replace(state, record=record, phase=SealPhase.WAITING, is_peer_ready=False)
    state, effects = _write_seal_when_quiet(state)
    return state, (EndStreams(sealed_error(record)), *effects)


def _write_seal_when_quiet(state: Replica) -> Step:
    if state.durable < state.tail.index and not state.failure:
        return state, ()
    record = replace(state.record, is_sealed=True, is_whole=state.record.is_whole and not state.failure)
    return replace(state, record=record, phase=SealPhase.WRITING), (WriteSeal(record),)


def _seal_written(state: Replica) -> Step:
    if state.phase is not SealPhase.WRITING:
        raise InvariantBroken(f"a seal was written in phase {state.phase}")
    return replace(state, phase=SealPhase.SEALED), ()


def _write_failed(state: Replica, event: WriteFailed) -> Step:
    """What was taken but not kept is gone: the position falls back to what is durable, and the link takes no more."""
    state = replace(state, failure=event.reason or "unknown", is_peer_ready=False)
    error = disk_failed(state)
    if state.phase is SealPhase.WAITING:
        state, effects = _write_seal_when_quiet(state)
        return state, (EndStreams(error), *effects)
    return state, (EndStreams(error),)


def sealed_positions(state: Replica) -> tuple[Position, ...]:
    """What a seal is answered with: from the committed position to the last durable one. Raises where it isn't sealed."""
    if state.phase is not SealPhase.SEALED:
        raise BugError("a seal is answered only when it is written")
    return (state.committed, *(position for position in state.flight if position.index <= state.durable))
