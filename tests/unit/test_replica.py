"""The replica core: golden traces, one event a line, its effects below."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from seriatim.broker_group.core import invariants
from seriatim.broker_group.core.link_record import LinkRecord, Role
from seriatim.broker_group.core.replica import Replica, SealPhase, sealed_positions, step
from seriatim.broker_group.core.replica_events import (
    Acknowledge,
    BatchArrived,
    BatchCopied,
    CommittedLearnt,
    Confirm,
    DropPeer,
    EndStreams,
    Event,
    Flushed,
    KeepRecord,
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
from seriatim.protocol import batch
from seriatim.protocol.batch import RecordColumns
from seriatim.protocol.chain import Durability
from seriatim.protocol.errors import BugError, InvariantBroken
from seriatim.protocol.hashing import EMPTY_HASH, hash_after_batch
from seriatim.protocol.marks import SOURCES_ROOM_BYTES
from seriatim.protocol.names import ChainVersion, Epoch, Index, QueueId, Token

NOW_S = 100.0


def record(role: Role, **changes) -> LinkRecord:
    return replace(
        LinkRecord(
            QueueId(1), Epoch(3), "orders", role, Durability.SYNC, max_record_bytes=100, token=Token(2),
            chain_version=ChainVersion(5), opened_start=1,
        ),
        **changes,
    )  # fmt: skip


def arrived(first: int, count: int = 1, token: int | None = 2, seq: int | None = None, **changes) -> BatchArrived:
    seq = first if seq is None else seq
    columns = RecordColumns([b"v"] * count, list(range(seq, seq + count)), "s", [0] * count)
    one = batch.encode(columns, Index(first))
    event = BatchArrived(one.header, one.header_bytes, None if token is None else Token(token), NOW_S, NOW_S + 1)
    return replace(event, **changes)


def hash_of(*events: BatchArrived) -> bytes:
    digest = EMPTY_HASH
    for event in events:
        digest = hash_after_batch(digest, event.header_bytes)
    return digest


def shown(effect: object) -> str:
    match effect:
        case Store():
            return f"store {effect.first_index}..{effect.position.index} committed={effect.committed_index}"
        case Acknowledge() | TellCommitted() | PushCommitted() | Confirm():
            return f"{type(effect).__name__} {effect.index}"
        case Refuse() | EndStreams() | DropPeer():
            return f"{type(effect).__name__} {effect.error.code}"
        case KeepRecord() | WriteSeal():
            kept = effect.record
            return f"{type(effect).__name__} token={kept.token} version={kept.chain_version} sealed={kept.is_sealed}"
        case _:
            return type(effect).__name__


def label(event: Event) -> str:
    match event:
        case BatchArrived():
            return f"batch {event.header.first_index}..{event.header.end_index}"
        case Flushed() | PeerConfirmed() | PeerReady() | CommittedLearnt():
            return f"{type(event).__name__} {event.index}"
        case SealAsked():
            return f"SealAsked {event.chain_version}"
        case _:
            return type(event).__name__


def trace(state: Replica, *events: Event) -> tuple[Replica, str]:
    lines = []
    for event in events:
        state, effects = step(state, event)
        invariants.check(state)
        lines.append(f"{label(event)}: {', '.join(shown(effect) for effect in effects) or '-'}")
    return state, "\n".join(lines)


def of_source(first: int, source: str) -> BatchArrived:
    columns = RecordColumns([b"v"], [first], source, [0])
    one = batch.encode(columns, Index(first))
    return BatchArrived(one.header, one.header_bytes, Token(2), NOW_S, NOW_S + 1)


def golden(text: str) -> str:
    return textwrap.dedent(text).strip()


def master(**changes) -> Replica:
    return replace(Replica(record(Role.MASTER)), is_peer_ready=True, **changes)


def slave() -> Replica:
    return Replica(record(Role.SLAVE))


def refusal(state: Replica, event: Event) -> str:
    after, effects = step(state, event)
    assert after == state
    (effect,) = effects
    assert isinstance(effect, Refuse)
    return effect.error.code


def test_a_batch_is_forwarded_before_it_is_stored_and_committed_when_both_have_it() -> None:
    one, two = arrived(0, 2), arrived(2, 3)
    state, text = trace(
        master(),
        one,
        two,
        Flushed(Index(5)),
        PeerConfirmed(Index(2), hash_of(one)),
        PeerConfirmed(Index(5), hash_of(one, two)),
    )
    assert text == golden("""
        batch 0..2: Forward, store 0..2 committed=0
        batch 2..5: Forward, store 2..5 committed=0
        Flushed 5: -
        PeerConfirmed 2: Acknowledge 2, TellCommitted 2, PushCommitted 2
        PeerConfirmed 5: Acknowledge 5, TellCommitted 5, PushCommitted 5
    """)
    assert state.committed.marks == {"s": 4}
    assert state.flight == ()


def test_the_slave_confirms_what_is_flushed_and_serves_what_is_committed() -> None:
    one, two = arrived(0, token=None), arrived(1, token=None)
    _, text = trace(slave(), one, two, CommittedLearnt(Index(1)), Flushed(Index(2)), CommittedLearnt(Index(9)))
    assert text == golden("""
        batch 0..1: store 0..1 committed=0
        batch 1..2: store 1..2 committed=0
        CommittedLearnt 1: -
        Flushed 2: Confirm 2
        CommittedLearnt 9: PushCommitted 2
    """)


def test_a_seal_waits_for_writes_begun_and_answers_the_same_for_ever() -> None:
    one, two = arrived(0), arrived(1)
    state, text = trace(
        master(),
        one,
        two,
        Flushed(Index(1)),
        PeerConfirmed(Index(1), hash_of(one)),
        SealAsked(ChainVersion(6)),
        PeerConfirmed(Index(2), hash_of(one, two)),
        Flushed(Index(2)),
        SealAsked(ChainVersion(6)),
        SealWritten(),
        SealAsked(ChainVersion(7)),
    )
    assert text == golden("""
        batch 0..1: Forward, store 0..1 committed=0
        batch 1..2: Forward, store 1..2 committed=0
        Flushed 1: -
        PeerConfirmed 1: Acknowledge 1, TellCommitted 1, PushCommitted 1
        SealAsked 6: EndStreams sealed
        PeerConfirmed 2: -
        Flushed 2: WriteSeal token=2 version=6 sealed=True
        SealAsked 6: -
        SealWritten: -
        SealAsked 7: -
    """)
    assert [position.index for position in sealed_positions(state)] == [1, 2]
    assert refusal(state, arrived(2)) == "sealed"
    assert refusal(state, Opened(ChainVersion(9), Token(9))) == "sealed"


def test_who_goes_by_an_older_chain_doesnt_take_a_sealed_link_for_one_that_cant_be_opened() -> None:
    """As where ZooKeeper was set back: the link would be closed as one that nobody was let send to, and the next one listed."""
    state, _ = trace(master(), SealAsked(ChainVersion(6)), SealWritten())
    assert refusal(state, Opened(ChainVersion(5), Token(9))) == "older-version"
    assert refusal(state, Opened(ChainVersion(6), Token(9))) == "sealed"


def test_nothing_is_acknowledged_behind_a_seal_also_where_both_have_it() -> None:
    one, two = arrived(0), arrived(1)
    state, text = trace(
        master(), one, two, Flushed(Index(1)), SealAsked(ChainVersion(6)), PeerConfirmed(Index(1), hash_of(one))
    )
    assert text.splitlines()[-1] == "PeerConfirmed 1: -"
    # A failed write ends the waiting, and what was flushed before is told later.
    late = replace(state, confirmed=Index(2))
    state, text = trace(late, WriteFailed("broken"), Flushed(Index(2)), SealWritten())
    assert text == golden("""
        WriteFailed: EndStreams disk-failed, WriteSeal token=2 version=6 sealed=True
        Flushed 2: -
        SealWritten: -
    """)
    assert not state.record.is_whole
    _, text = trace(state, PeerReady(Index(2), hash_of(one, two)))
    assert text == "PeerReady 2: DropPeer sealed"


def test_a_copy_that_may_have_lost_something_is_not_whole_again_by_its_seal() -> None:
    state, _ = trace(Replica(record(Role.MASTER, is_whole=False)), SealAsked(ChainVersion(6)))
    assert not state.record.is_whole


def test_what_comes_late_takes_nothing_back() -> None:
    one, two, three = arrived(0), arrived(1), arrived(2)
    of_master, text = trace(
        master(),
        *(one, two, three),
        Flushed(Index(2)),
        Flushed(Index(1)),
        PeerConfirmed(Index(2), hash_of(one, two)),
        PeerConfirmed(Index(1), hash_of(one)),
    )
    assert text.splitlines()[3:] == [
        "Flushed 2: -",
        "Flushed 1: -",
        "PeerConfirmed 2: Acknowledge 2, TellCommitted 2, PushCommitted 2",
        "PeerConfirmed 1: -",
    ]
    assert (of_master.durable, of_master.confirmed) == (2, 2)
    of_slave = [arrived(first, token=None) for first in range(3)]
    _, text = trace(slave(), *of_slave, Flushed(Index(2)), Flushed(Index(2)), Flushed(Index(1)))
    assert text.splitlines()[3:] == ["Flushed 2: Confirm 2", "Flushed 2: -", "Flushed 1: -"]


def test_a_seal_with_an_older_version_is_refused() -> None:
    assert refusal(master(), SealAsked(ChainVersion(4))) == "older-version"


def test_only_a_written_seal_has_positions() -> None:
    state, _ = trace(master(), arrived(0), SealAsked(ChainVersion(6)))
    with pytest.raises(BugError):
        sealed_positions(state)


def test_opening_again_changes_nothing_and_a_new_token_fences() -> None:
    state, text = trace(
        master(), arrived(0), Opened(ChainVersion(5), Token(2)), Opened(ChainVersion(6), Token(3)), arrived(1)
    )
    assert text == golden("""
        batch 0..1: Forward, store 0..1 committed=0
        Opened: -
        Opened: KeepRecord token=3 version=6 sealed=False
        batch 1..2: Refuse fenced
    """)
    assert state.is_peer_ready
    assert refusal(state, Opened(ChainVersion(9), Token(2))) == "fenced"
    assert refusal(state, Opened(ChainVersion(5), Token(3))) == "older-version"
    assert refusal(state, arrived(1, token=4)) == "older-version"


def test_a_limit_that_was_raised_holds_for_the_open_link_and_never_falls() -> None:
    state, _ = step(master(), Opened(ChainVersion(6), Token(2), 200))
    assert state.record.max_record_bytes == 200
    state, effects = step(state, Opened(ChainVersion(7), Token(2), 100))
    assert state.record.max_record_bytes == 200
    assert effects == (KeepRecord(state.record),)


@pytest.mark.parametrize(
    ("sizes_bytes", "is_taken"), [([100], True), ([100] * 3, True), ([300], False), ([0, 500], False)]
)
def test_the_limit_is_for_what_a_record_holds_and_not_for_what_it_takes(sizes_bytes: list[int], is_taken: bool) -> None:
    columns = RecordColumns(
        [bytes(size) for size in sizes_bytes], list(range(len(sizes_bytes))), "s", [0] * len(sizes_bytes)
    )
    one = batch.encode(columns, Index(0), compress=False)
    _, effects = step(master(), replace(arrived(0), header=one.header, header_bytes=one.header_bytes))
    assert [shown(effect) for effect in effects] == (
        ["Forward", f"store 0..{len(sizes_bytes)} committed=0"] if is_taken else ["Refuse too-large"]
    )


@pytest.mark.parametrize(
    ("state", "event", "code"),
    [
        (master(), arrived(0, lease_until_s=NOW_S), "lease-over"),
        (slave(), arrived(0, token=None, lease_until_s=NOW_S), "lease-over"),
        (master(), arrived(0, has_room=False), "disk-full"),
        (Replica(record(Role.MASTER)), arrived(0), "peer-lost"),
        (master(), arrived(1), "wrong-index"),
        (master(failure="broken"), arrived(0), "disk-failed"),
        (replace(master(), record=record(Role.MASTER, max_record_bytes=-200)), arrived(0), "too-large"),
        (replace(master(), record=record(Role.MASTER, start_marks={"s": 5})), arrived(0, 3), "resend"),
        (replace(master(), record=record(Role.MASTER, start_marks={"s": 5})), arrived(0, 9), "partly-resend"),
    ],
)
def test_what_is_refused(state: Replica, event: BatchArrived, code: str) -> None:
    assert refusal(state, event) == code


def test_only_what_two_members_hold_counts_as_stored() -> None:
    one = arrived(0, 3)
    state, _ = trace(master(), one, Flushed(Index(3)))
    assert refusal(state, arrived(3, 2, seq=1)) == "seq-not-rising"
    state, _ = trace(state, PeerConfirmed(Index(3), hash_of(one)))
    assert refusal(state, arrived(3, 2, seq=1)) == "resend"
    assert refusal(state, arrived(3, 4, seq=1)) == "partly-resend"


def test_the_same_batch_is_acknowledged_again_and_another_refused() -> None:
    one = arrived(0, 3)
    state, text = trace(master(), one, one)
    assert text.splitlines()[1] == "batch 0..3: Acknowledge 0"
    assert refusal(state, arrived(0, 3, seq=7)) == "wrong-index"
    assert refusal(state, arrived(0, 2)) == "wrong-index"
    assert refusal(state, replace(arrived(1, 2), hash_after=hash_of(one))) == "wrong-index"
    # Long committed, so only the store knows the hashes around it.
    state = replace(state, committed=state.tail, flight=(), durable=state.tail.index, confirmed=state.tail.index)
    two = arrived(3)
    after, _ = step(state, two)
    assert [shown(effect) for effect in step(after, two)[1]] == ["Acknowledge 3"]  # where the committed ones end
    after = replace(after, committed=after.tail, flight=(), durable=after.tail.index, confirmed=after.tail.index)
    known = replace(one, hash_before=EMPTY_HASH, hash_after=hash_of(one))
    assert [shown(effect) for effect in step(after, known)[1]] == ["Acknowledge 4"]
    assert (
        refusal(after, replace(arrived(0, 3, seq=7), hash_before=EMPTY_HASH, hash_after=hash_of(one))) == "wrong-index"
    )
    three = arrived(4)
    after, _ = step(after, three)
    after = replace(after, committed=after.tail, flight=(), durable=after.tail.index, confirmed=after.tail.index)
    known = replace(two, hash_before=hash_of(one), hash_after=hash_of(one, two))
    assert [shown(effect) for effect in step(after, known)[1]] == ["Acknowledge 5"]


def test_a_slave_confirms_the_same_batch_again_as_far_as_it_is_durable() -> None:
    one, two = arrived(0, token=None), arrived(1, token=None)
    _, text = trace(slave(), one, two, Flushed(Index(1)), one, two)
    assert text.splitlines()[-2:] == ["batch 0..1: Confirm 1", "batch 1..2: Confirm 1"]


@pytest.mark.parametrize(("index", "digest"), [(1, b"x" * 32), (2, EMPTY_HASH), (7, EMPTY_HASH)])
def test_a_slave_that_contradicts_itself_is_dropped(index: int, digest: bytes) -> None:
    state, text = trace(master(), arrived(0), Flushed(Index(1)), PeerConfirmed(Index(index), digest))
    assert text.splitlines()[-1] == f"PeerConfirmed {index}: DropPeer peer-lost, EndStreams peer-lost"
    assert state.committed.index == 0
    assert refusal(state, arrived(1)) == "peer-lost"


def test_a_lost_slave_ends_the_sender_at_once_and_a_new_one_must_be_equal() -> None:
    one = arrived(0)
    state, text = trace(master(), one, PeerGone("reset"), Flushed(Index(1)), PeerReady(Index(1), b"y" * 32))
    assert text == golden("""
        batch 0..1: Forward, store 0..1 committed=0
        PeerGone: EndStreams peer-lost
        Flushed 1: -
        PeerReady 1: DropPeer peer-lost
    """)
    assert refusal(state, arrived(1)) == "peer-lost"
    _, text = trace(state, PeerReady(Index(1), hash_of(one)))
    assert text == "PeerReady 1: Acknowledge 1, TellCommitted 1, PushCommitted 1"


def test_a_link_that_nobody_sends_to_lets_its_slave_go_once_it_has_confirmed_everything() -> None:
    one, two = arrived(0), arrived(1)
    confirmed = PeerConfirmed(Index(1), hash_of(one))
    state, text = trace(master(), one, Flushed(Index(1)), SenderAway(), confirmed, SenderAway(), SenderAway())
    assert text.splitlines()[2:] == [
        "SenderAway: -",
        "PeerConfirmed 1: Acknowledge 1, TellCommitted 1, PushCommitted 1",
        "SenderAway: LetPeerGo",
        "SenderAway: -",
    ]
    assert refusal(state, two) == "peer-lost"
    _, text = trace(state, PeerReady(Index(1), hash_of(one)), two)
    assert text == golden("""
        PeerReady 1: TellCommitted 1
        batch 1..2: Forward, store 1..2 committed=1
    """)
    # The stream that was let go ends; who sends by now waits for the next one.
    assert step(state, PeerGone("let go")) == (state, ())
    sealed, _ = trace(state, SealAsked(ChainVersion(6)), SealWritten())
    assert step(sealed, SenderAway()) == (sealed, ())


def test_a_copied_batch_is_taken_only_while_no_stream_is_open() -> None:
    one = arrived(0)
    copied = BatchCopied(one.header, one.header_bytes)
    _, text = trace(Replica(record(Role.MASTER)), copied, Flushed(Index(1)), PeerReady(Index(1), hash_of(one)))
    assert text.splitlines()[0] == "BatchCopied: store 0..1 committed=0"
    assert refusal(master(), copied) == "wrong-index"
    ahead = arrived(1)
    assert refusal(Replica(record(Role.MASTER)), BatchCopied(ahead.header, ahead.header_bytes)) == "wrong-index"
    sealed, _ = trace(Replica(record(Role.MASTER)), SealAsked(ChainVersion(6)), SealWritten())
    assert refusal(sealed, copied) == "sealed"
    being_sealed, _ = trace(Replica(record(Role.MASTER)), SealAsked(ChainVersion(6)))
    assert refusal(being_sealed, copied) == "sealed"
    failed, _ = trace(Replica(record(Role.MASTER)), copied, WriteFailed("broken"))
    assert refusal(failed, copied) == "sealed"


def test_a_failed_disk_takes_nothing_more_and_is_not_whole() -> None:
    state, text = trace(master(), arrived(0), WriteFailed("broken"), SealAsked(ChainVersion(6)), SealWritten())
    assert text == golden("""
        batch 0..1: Forward, store 0..1 committed=0
        WriteFailed: EndStreams disk-failed
        SealAsked 6: EndStreams sealed, WriteSeal token=2 version=6 sealed=True
        SealWritten: -
    """)
    assert not state.record.is_whole
    assert [position.index for position in sealed_positions(state)] == [0]


def test_a_disk_that_fails_without_a_word_has_failed() -> None:
    failed, _ = trace(master(), arrived(0), WriteFailed(""))
    assert refusal(failed, arrived(1)) == "disk-failed"


@pytest.mark.parametrize("event", [Flushed(Index(4)), Flushed(Index(1)), SealWritten()])
def test_what_no_write_ends_with_is_a_bug(event: Event) -> None:
    state, _ = step(slave(), arrived(0, 3, token=None))
    with pytest.raises(InvariantBroken):
        step(state, event)


def test_nothing_is_flushed_beyond_what_was_taken() -> None:
    with pytest.raises(InvariantBroken):
        step(master(), Flushed(Index(1)))


def test_the_invariants_reject_bad_states() -> None:
    state, _ = trace(master(), arrived(0))
    bad = [
        replace(state, durable=Index(2)),
        replace(state, committed=state.tail),
        replace(state, flight=()),
        replace(state, phase=SealPhase.SEALED),
        replace(state, record=replace(state.record, end=Index(1))),
    ]
    for one in bad:
        with pytest.raises(InvariantBroken):
            invariants.check(one)


def test_a_source_that_the_queue_has_no_room_for_is_refused_and_the_others_are_not():
    before = {f"{number:0180}": 5 for number in range(SOURCES_ROOM_BYTES // 200 - 2)}
    state = replace(master(), record=replace(record(Role.MASTER), start_marks=before))
    names = [f"new-{number:0176}" for number in range(3)]
    _, shown_effects = trace(
        state,
        of_source(0, names[0]),
        of_source(1, names[0]),  # counted once
        of_source(2, names[1]),
        of_source(3, names[2]),
        of_source(3, min(before)),
        of_source(3, names[1]),
    )
    assert shown_effects == golden(
        """
        batch 0..1: Forward, store 0..1 committed=0
        batch 1..2: Forward, store 1..2 committed=0
        batch 2..3: Forward, store 2..3 committed=0
        batch 3..4: Refuse too-many-sources
        batch 3..4: Refuse resend
        batch 3..4: Forward, store 3..4 committed=0
        """
    )


def test_a_source_that_the_queue_has_goes_on_also_where_there_is_no_room_left() -> None:
    """Earlier versions had no limit."""
    before = {f"{number:0180}": 5 for number in range(SOURCES_ROOM_BYTES // 200 + 1)}
    state = replace(master(), record=replace(record(Role.MASTER), start_marks=before))
    columns = RecordColumns([b"v"], [6], min(before), [0])
    one = batch.encode(columns, Index(0))
    state, text = trace(state, BatchArrived(one.header, one.header_bytes, Token(2), NOW_S, NOW_S + 1))
    assert text == "batch 0..1: Forward, store 0..1 committed=0"
    assert refusal(state, of_source(1, "new")) == "too-many-sources"
