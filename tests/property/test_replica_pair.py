"""Master and slave cores under any schedule of messages, flushes, broken streams, crashes and seals.

The model is slow and obvious: two disks with what was flushed, and the list of what the sender was told. Whatever
happens, each acknowledged batch is on both disks, and each seal's answer covers all that is ever acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.broker_group.core import invariants, replica, replica_events
from seriatim.broker_group.core.link_record import LinkRecord, Role
from seriatim.broker_group.core.replica import Replica, SealPhase
from seriatim.protocol import batch
from seriatim.protocol.batch import EncodedBatch, RecordColumns
from seriatim.protocol.chain import Durability
from seriatim.protocol.names import ChainVersion, Epoch, Index, QueueId, Token
from seriatim.protocol.position import START, Position

ACTIONS = (
    "send", "send", "to_slave", "to_slave", "to_master", "to_master", "flush_a", "flush_b", "break_stream", "open",
    "crash_a", "crash_b", "seal_a", "seal_b", "elect", "sender_away",
)  # fmt: skip
NOT_AGAIN = "crash_a", "crash_b", "seal_a", "seal_b"


@dataclass
class Disk:
    """What was written, and how many of it were flushed."""

    written: list[tuple[EncodedBatch, Position]] = field(default_factory=list)
    flushed: int = 0


class Side:
    """One member."""

    def __init__(self, role: Role) -> None:
        self.disk = Disk()
        self.is_up = True
        self.answer: int | None = None
        self.state = Replica(
            LinkRecord(
                QueueId(1), Epoch(1), role=role, durability=Durability.SYNC, max_record_bytes=1000, token=Token(1),
                opened_start=1,
            )
        )  # fmt: skip

    def crash(self) -> None:
        """The disk forgets what was not flushed; the next start seals before anything else (5.5)."""
        del self.disk.written[self.disk.flushed :]
        positions = tuple(position for _, position in self.disk.written)
        tail = positions[-1] if positions else START
        record = self.state.record
        phase = SealPhase.SEALED if record.is_sealed else SealPhase.OPEN
        self.state = Replica(record, START, tail.index, tail, Index(0), positions, phase=phase)


class Pair:
    """The two members, the stream between them, and the sender."""

    def __init__(self, *, opens_equal: bool = True) -> None:
        self.a, self.b = Side(Role.MASTER), Side(Role.SLAVE)
        self.to_slave: list[EncodedBatch | int] = []
        self.to_master: list[tuple[Index, bytes]] = []
        self.acknowledged = 0
        self.token = 1
        self.seq = 0
        self.opens_equal = opens_equal
        self.is_at_rest = False
        self.open()

    def apply(self, side: Side, event: replica_events.Event, encoded: EncodedBatch | None = None) -> None:
        side.state, effects = replica.step(side.state, event)
        invariants.check(side.state)
        for effect in effects:
            match effect:
                case replica_events.Forward():
                    assert encoded is not None
                    self.to_slave.append(encoded)
                case replica_events.Store():
                    assert encoded is not None
                    side.disk.written.append((encoded, effect.position))
                case replica_events.Acknowledge():
                    self.acknowledged = max(self.acknowledged, effect.index)
                case replica_events.Confirm():
                    self.to_master.append((effect.index, effect.hash))
                case replica_events.TellCommitted():
                    self.to_slave.append(effect.index)
                case replica_events.EndStreams() | replica_events.DropPeer():
                    self.break_stream()
                case replica_events.LetPeerGo():
                    self.is_at_rest = True  # what the slave was to be told still arrives
                case replica_events.WriteSeal():
                    side.disk.flushed = len(side.disk.written)
                    self.apply(side, replica_events.SealWritten())
                    side.answer = replica.sealed_positions(side.state)[-1].index
                case replica_events.Refuse() | replica_events.KeepRecord() | replica_events.PushCommitted():
                    pass
        self.check()

    # ---- actions

    def send(self) -> None:
        if self.a.state.phase is not SealPhase.OPEN:
            return
        first = self.a.state.tail.index
        columns = RecordColumns([b"%d" % self.token] * 2, [self.seq, self.seq + 1], f"s{self.token}", [0, 0])
        self.seq += 2
        encoded = batch.encode(columns, Index(first))
        event = replica_events.BatchArrived(encoded.header, encoded.header_bytes, Token(self.token), 0.0, 1.0)
        self.apply(self.a, event, encoded)

    def deliver_to_slave(self) -> None:
        if not self.to_slave:
            return
        message = self.to_slave.pop(0)
        if isinstance(message, int):
            self.apply(self.b, replica_events.CommittedLearnt(Index(message)))
        else:
            event = replica_events.BatchArrived(message.header, message.header_bytes, None, 0.0, 1.0)
            self.apply(self.b, event, message)

    def deliver_to_master(self) -> None:
        if self.to_master:
            self.apply(self.a, replica_events.PeerConfirmed(*self.to_master.pop(0)))

    def flush(self, side: Side) -> None:
        if side.disk.flushed < len(side.disk.written):
            side.disk.flushed = len(side.disk.written)
            self.apply(side, replica_events.Flushed(side.disk.written[-1][1].index))

    def break_stream(self) -> None:
        self.to_slave.clear()
        self.to_master.clear()
        self.is_at_rest = False
        if self.a.state.is_peer_ready:
            self.apply(self.a, replica_events.PeerGone("broken"))

    def open(self) -> None:
        """The stream, opened anew: the copies are made equal first (H3)."""
        self.break_stream()
        self.flush(self.a)
        self.flush(self.b)
        a, b = self.a, self.b
        if a.state.phase is not SealPhase.OPEN or b.state.phase is not SealPhase.OPEN:
            return
        if self.opens_equal or len(a.disk.written) > len(b.disk.written):
            for encoded, _ in b.disk.written[len(a.disk.written) :]:
                self.apply(a, replica_events.BatchCopied(encoded.header, encoded.header_bytes), encoded)
            for encoded, _ in a.disk.written[len(b.disk.written) :]:
                event = replica_events.BatchArrived(encoded.header, encoded.header_bytes, None, 0.0, 1.0)
                self.apply(b, event, encoded)
            self.flush(a)
            self.flush(b)
        self.to_master.clear()
        self.apply(a, replica_events.PeerReady(b.state.tail.index, b.state.tail.hash))

    def sender_away(self) -> None:
        self.apply(self.a, replica_events.SenderAway())

    def elect(self) -> None:
        """The next sender, granted only when both members hold the same."""
        self.token += 1
        for side in (self.a, self.b):
            self.apply(side, replica_events.Opened(side.state.record.chain_version, Token(self.token)))
        self.open()

    def seal(self, side: Side) -> None:
        self.apply(side, replica_events.SealAsked(ChainVersion(2)))

    def crash(self, side: Side) -> None:
        self.break_stream()
        side.crash()
        self.seal(side)

    def do(self, action: str) -> None:
        actions: dict[str, Callable[[], None]] = {
            "send": self.send,
            "to_slave": self.deliver_to_slave,
            "to_master": self.deliver_to_master,
            "flush_a": lambda: self.flush(self.a),
            "flush_b": lambda: self.flush(self.b),
            "break_stream": self.break_stream,
            "open": self.open,
            "elect": self.elect,
            "sender_away": self.sender_away,
            "crash_a": lambda: self.crash(self.a),
            "crash_b": lambda: self.crash(self.b),
            "seal_a": lambda: self.seal(self.a),
            "seal_b": lambda: self.seal(self.b),
        }
        actions[action]()

    # ---- what must hold

    def check(self) -> None:
        copies = []
        for side in (self.a, self.b):
            flushed = side.disk.written[: side.disk.flushed]
            kept = [encoded.header_bytes for encoded, position in flushed if position.index <= self.acknowledged]
            held = flushed[len(kept) - 1][1].index if kept else 0
            assert held == self.acknowledged, f"acknowledged {self.acknowledged}, flushed on one member: {held}"
            copies.append(kept)
            if side.answer is not None:
                assert side.answer >= self.acknowledged, "acknowledged behind a seal's answer"
                flushed_end = flushed[-1][1].index if flushed else 0
                assert side.answer <= flushed_end, "the answer counts what a power cut loses"
        assert copies[0] == copies[1], "two contents at one index"

    def quiet(self) -> None:
        """Everything arrives and is flushed; then nothing may be left unsaid."""
        while (
            self.to_slave or self.to_master or any(one.disk.flushed < len(one.disk.written) for one in (self.a, self.b))
        ):
            self.flush(self.a)
            self.flush(self.b)
            self.deliver_to_slave()
            self.deliver_to_master()
        is_open = all(one.state.phase is SealPhase.OPEN for one in (self.a, self.b))
        if is_open and (self.a.state.is_peer_ready or self.is_at_rest):
            assert self.a.state.committed == self.b.state.committed == self.a.state.tail


schedules = st.lists(st.sampled_from(ACTIONS), max_size=60)


def run(schedule: list[str], *, opens_equal: bool = True) -> None:
    pair = Pair(opens_equal=opens_equal)
    for action in schedule:
        pair.do(action)
    pair.quiet()


@settings(max_examples=400)
@given(schedules)
def test_no_schedule_loses_what_was_acknowledged(schedule: list[str]) -> None:
    run(schedule)


# ---- the model finds what is planted


def plant(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable) -> None:
    right = getattr(replica, name)
    monkeypatch.setattr(replica, name, lambda *arguments: wrong(right, *arguments))


def acknowledge_when_durable_here(right, state):
    return right(replace(state, confirmed=state.tail.index))


def acknowledge_when_confirmed(right, state):
    return right(replace(state, durable=state.confirmed))


def seal_from_memory(right, state):
    return right(replace(state, durable=state.tail.index))


def keep_acknowledging(right, state, event):
    after, effects = right(state, event)
    if isinstance(event, replica_events.PeerConfirmed) or after.phase is SealPhase.OPEN:
        return after, effects
    return replace(after, phase=SealPhase.OPEN, is_peer_ready=state.is_peer_ready), effects


def let_go_at_once(_, state):
    return replace(state, is_peer_ready=False), (replica_events.LetPeerGo(),)


PLANTED = {
    "one copy is enough": (
        "_commit", acknowledge_when_durable_here, ["send", "flush_a", "to_slave", "flush_b", "to_master"],
    ),
    "the master's own disk doesn't count": (
        "_commit", acknowledge_when_confirmed, ["send", "to_slave", "flush_b", "to_master"],
    ),
    "the slave is let go before it has confirmed": ("_sender_away", let_go_at_once, ["send", "sender_away"]),
    "H11: a seal answers from memory": ("_write_seal_when_quiet", seal_from_memory, ["send", "seal_a"]),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_rule_is_rejected(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    name, wrong, schedule = PLANTED[planted]
    run(schedule)
    plant(monkeypatch, name, wrong)
    if planted.startswith("H11"):
        # The seal's own flush would hide it: the power goes before that write is done.
        def answered_unflushed(self: Pair, side: Side) -> None:
            side.state, effects = replica.step(side.state, replica_events.SealAsked(ChainVersion(2)))
            if any(isinstance(effect, replica_events.WriteSeal) for effect in effects):
                side.answer = side.state.durable
            self.check()

        monkeypatch.setattr(Pair, "seal", answered_unflushed)
    with pytest.raises(AssertionError):
        run(schedule)


def test_h3_a_grant_without_equal_copies_is_rejected() -> None:
    # The slave stored what the master's disk dropped; the next sender writes other content there.
    pair = Pair()
    pair.send()
    pair.deliver_to_slave()
    pair.flush(pair.b)
    pair.break_stream()
    pair.a.disk.written.clear()
    pair.a.state = Replica(pair.a.state.record)
    pair.a.state, effects = replica.step(
        pair.a.state, replica_events.PeerReady(pair.b.state.tail.index, pair.b.state.tail.hash)
    )
    assert [type(effect) for effect in effects] == [replica_events.DropPeer]
    assert not pair.a.state.is_peer_ready


def test_h19_a_committed_index_that_waits_for_the_next_batch_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(right, state):
        after, effects = right(state)
        return after, tuple(effect for effect in effects if not isinstance(effect, replica_events.TellCommitted))

    plant(monkeypatch, "_commit", silent)
    with pytest.raises(AssertionError):
        run(["send", "to_slave", "flush_a", "flush_b", "to_master"])


def test_a_slave_that_confirms_too_much_is_rejected() -> None:
    pair = Pair()
    pair.send()
    pair.flush(pair.a)
    pair.apply(pair.a, replica_events.PeerConfirmed(Index(2), b"?" * 32))
    assert pair.acknowledged == 0
    assert not pair.a.state.is_peer_ready
