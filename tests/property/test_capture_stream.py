"""A capture that dies at any moment, again and again: the queue ends up with the log, whole, once and in order.

A small world around the real `Assembler` and `plan`: a server that sends its log as pgoutput bytes from the slot's position,
a queue that takes what was sent in order and acknowledges later, and crashes that leave any part of what was in flight in
the queue. The queue's group restarts and its link is sealed by one answer, which knows of less than was acknowledged; an
operator gives up the tail of such a link. `World.faults` is the judge; wrong rules, planted, have to be rejected by it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from seriatim.producer.sources.postgres.core.assembler import Assembler, Outgoing
from seriatim.producer.sources.postgres.core.identity import NUMBER_BITS, NUMBER_LIMIT, Server, base_seq, source_name
from seriatim.producer.sources.postgres.core.invariants import broken_confirmation, broken_order
from seriatim.producer.sources.postgres.core.resume import Kept, Slot, Stream, plan
from seriatim.producer.sources.postgres.errors import CaptureGap

START: Final = 0x100_0000
SOURCE: Final = source_name("1", 1, "s", START)
OID: Final = 16384
RELATION: Final = (
    b"R" + struct.pack(">I", OID) + b"public\0t\0d" + struct.pack(">H", 1) + b"\1id\0" + struct.pack(">Ii", 23, -1)
)


def tuple_of(number: int) -> bytes:
    text = b"%d" % number
    return struct.pack(">Hc", 1, b"t") + struct.pack(">I", len(text)) + text


def row(kind: str, number: int) -> bytes:
    oid = struct.pack(">I", OID)
    return {
        "c": b"I" + oid + b"N" + tuple_of(number),
        "u": b"U" + oid + b"N" + tuple_of(number),
        "d": b"D" + oid + b"K" + tuple_of(number),
        "t": b"T" + struct.pack(">IBI", 1, 0, OID),
    }[kind]


@dataclass(frozen=True)
class Transaction:
    """One of the log: the start and the end of its commit record, and its row messages."""

    commit_lsn: int
    end_lsn: int
    rows: tuple[bytes, ...]

    def messages(self) -> Iterator[bytes]:
        yield struct.pack(">cQqI", b"B", self.commit_lsn, 0, self.commit_lsn % 1000)
        if self.rows:
            yield RELATION
        yield from self.rows
        yield struct.pack(">cBQQq", b"C", 0, self.commit_lsn, self.end_lsn, 0)


@st.composite
def logs(draw: st.DrawFn) -> list[Transaction]:
    """Commit records as close as PostgreSQL can write them (40 bytes, multiples of 8), or further apart."""
    log: list[Transaction] = []
    at = START
    number = 0
    for kinds in draw(st.lists(st.lists(st.sampled_from("ccudt"), max_size=4), min_size=1, max_size=6)):
        at += 8 * draw(st.integers(0, 12))
        rows = []
        for kind in kinds:
            number += 1
            rows.append(row(kind, number))
        log.append(Transaction(at, at + 40, tuple(rows)))
        at += 40
    return log


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("receive", "receive", "acknowledge", "confirm", "reach", "keepalive", "crash", "lose database"),
                *("catch up", "restart group", "give up tail"),
            ]
        ),
        st.integers(0, 9),
    ),
    max_size=40,
)


@dataclass(frozen=True)
class Rules:
    """What may be planted: where the slot is confirmed to, what a new term believes of the queue, from which mark it goes on."""

    confirmable: Callable[[Assembler, int], int] = lambda following, acknowledged: following.confirmable(acknowledged)
    kept: Callable[[Kept], Kept] = lambda kept: kept
    mark: Callable[[int], int] = lambda mark: mark


def reference(log: list[Transaction]) -> list[Outgoing]:
    """All records of the log, read in one go."""
    following = Assembler(db="d", slot="s", mark=base_seq(START), confirmed_lsn=START, heartbeat_ms=0)
    read = [following.feed(data) for transaction in log for data in transaction.messages()]
    return [record for record in read if record is not None]


@dataclass
class World:
    """Server, slot, queue and the capture of the present term.

    `queue`: what the chain's links hold, one after the other; the present link begins at `link_start`. `on_two`: up to which
    seq two members are known to hold all. `acknowledged`: the highest seq that was, in any term. `is_told`: the capture has
    stopped, and said why.
    """

    log: list[Transaction]
    rules: Rules
    confirmed_lsn: int = START
    queue: list[Outgoing] = field(default_factory=list)
    link_start: int = 0
    on_two: int = base_seq(START)
    acknowledged: int = base_seq(START)
    given_up_from: int | None = None
    is_told: bool = False
    faults: list[str] = field(default_factory=list)
    in_flight: list[Outgoing] = field(default_factory=list)
    heartbeats: set[int] = field(default_factory=set)
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.begin_term()

    def kept(self) -> Kept:
        """What a grant says: on the present link both members agree about all that it has."""
        if len(self.queue) > self.link_start:
            self.on_two = max(self.on_two, self.queue[-1].seq)
        held = max([self.on_two, *(record.seq for record in self.queue)])
        given_up = {} if self.given_up_from is None else {SOURCE: self.given_up_from}
        return Kept({SOURCE: self.on_two}, {SOURCE: held}, given_up)

    def begin_term(self) -> None:
        slot = Slot(
            "pgoutput", "d", is_active=False, confirmed_lsn=self.confirmed_lsn, wal_status=None, invalidation=None
        )
        kept = self.rules.kept(self.kept())
        try:
            stream = plan(server=Server("1", 1, "d"), slot_name="s", slot=slot, kept=kept, log_end=1 << 46)
        except CaptureGap as gap:
            self.is_told = True
            if self.given_up_from is None:
                self.faults.append(f"it stopped, and nothing is lost: {gap}")
            return
        assert isinstance(stream, Stream)
        if stream.mark > max(self.on_two, self.acknowledged):
            self.faults.append(f"{stream.mark} counts as stored, and is neither acknowledged nor on two disks (H2)")
        mark = self.known = self.rules.mark(stream.mark)
        self.following = Assembler(db="d", slot="s", mark=mark, confirmed_lsn=self.confirmed_lsn, heartbeat_ms=0)
        # A transaction comes whole if its commit record starts at or after the slot's position.
        self.coming = [each for each in self.log if each.commit_lsn >= self.confirmed_lsn]
        self.messages: list[bytes] = []
        self.read_lsn = self.confirmed_lsn

    def step(self, what: str, count: int) -> None:  # noqa: C901, PLR0912 - a table
        if self.is_told:
            return
        match what:
            case "receive":
                for _ in range(count):
                    self.receive()
            case "acknowledge":
                self.acknowledge(count)
            case "confirm":
                confirmed = self.rules.confirmable(self.following, self.known)
                self.confirmed_lsn = max(self.confirmed_lsn, confirmed)
            case "catch up":
                for what_follows in ("receive", "acknowledge", "confirm"):
                    self.step(what_follows, 9)
            case "reach":  # a keepalive, with no heartbeat due yet
                self.reach(count)
            case "keepalive":
                self.keepalive(count)
            case "crash":  # any part of what was in flight is in the queue, without anybody having been told
                self.crash(count)
                self.begin_term()
            case "lose database":  # what was in flight is waited for first
                self.acknowledge(len(self.in_flight))
                self.begin_term()
            case "restart group":  # the one that answers doesn't know that its last `count` records were acknowledged
                self.crash(count // 3)
                known = self.queue[self.link_start : max(self.link_start, len(self.queue) - count)]
                self.on_two = max([self.on_two, *(record.seq for record in known)])
                self.link_start = len(self.queue)
                self.begin_term()
            case "give up tail":
                self.give_up(count)
        wrong = broken_confirmation(self.confirmed_lsn, max(self.known, self.acknowledged))
        if wrong is not None:
            self.faults.append(wrong)

    def receive(self) -> bool:
        if not self.messages:
            if not self.coming:
                return False
            self.messages = list(self.coming[0].messages())
        record = self.following.feed(self.messages.pop(0))
        if not self.messages:
            self.read_lsn = self.coming.pop(0).end_lsn
        if record is not None:
            self.in_flight.append(record)
        return True

    def reach(self, further: int) -> None:
        """The server says how far it has read: at most to the next transaction's commit record."""
        limit = self.coming[0].commit_lsn if self.coming else self.read_lsn + 800
        self.following.reach(min(self.read_lsn + 8 * further, limit))

    def keepalive(self, further: int) -> None:
        self.reach(further)
        self.now_ms += 1
        heartbeat = self.following.heartbeat(self.now_ms)
        if heartbeat is not None:
            self.heartbeats.add(heartbeat.seq)
            self.in_flight.append(heartbeat)

    def store(self, count: int) -> None:
        self.queue += self.in_flight[:count]
        del self.in_flight[:count]

    def acknowledge(self, count: int) -> None:
        self.store(count)
        if len(self.queue) > self.link_start:
            self.known = max(self.known, self.queue[-1].seq)
            self.acknowledged = max(self.acknowledged, self.known)

    def crash(self, count: int) -> None:
        self.store(count)
        self.in_flight.clear()

    def give_up(self, count: int) -> None:
        """The last `count` records of the links before the present one are gone, and an operator says so."""
        end = max(0, self.link_start - count)
        lost = self.queue[end : self.link_start]
        del self.queue[end : self.link_start]
        self.link_start = end
        left = max([base_seq(START), *(record.seq for record in self.queue[:end])])
        if any(record.seq > left for record in lost):
            self.given_up_from = left + 1 if self.given_up_from is None else min(self.given_up_from, left + 1)

    def delivered(self) -> list[Outgoing]:
        """What readers are handed: records sent again, at or below the highest seq before them, are dropped."""
        marks = base_seq(START)
        handed = []
        for record in self.queue:
            if record.seq > marks:
                marks = record.seq
                handed.append(record)
        return handed

    def finish(self) -> list[str]:
        """What is wrong, after everything has come, in a last term of its own."""
        self.step("lose database", 0)
        if self.is_told:
            return self.faults
        while self.receive():
            pass
        self.acknowledge(len(self.in_flight))
        self.step("confirm", 0)
        if self.link_start == 0:
            wrong = broken_order(self.queue, base_seq(START))
            if wrong is not None:
                self.faults.append(wrong)
        if [record for record in self.delivered() if record.seq not in self.heartbeats] != reference(self.log):
            self.faults.append("the queue doesn't hold the log")
        return self.faults


def faults(log: list[Transaction], steps: list[Step], rules: Rules) -> list[str]:
    world = World(log, rules)
    for what, count in steps:
        world.step(what, count)
    return world.finish()


@given(logs(), STEPS)
@settings(max_examples=250)
def test_crashes_anywhere_lose_and_repeat_nothing(log: list[Transaction], steps: list[Step]) -> None:
    assert faults(log, steps, Rules()) == []


@given(logs(), st.data())
@settings(max_examples=150)
def test_a_second_reading_gives_the_same_records_and_skips_exactly_what_is_held(
    log: list[Transaction], data: st.DataObject
) -> None:
    everything = reference(log)
    held = data.draw(st.integers(0, len(everything) - 1))
    mark = everything[held].seq
    following = Assembler(db="d", slot="s", mark=mark, confirmed_lsn=START, heartbeat_ms=0)
    first = data.draw(st.integers(0, (mark >> NUMBER_BITS << 5) - START)) + START  # a slot behind the queue
    read = [
        following.feed(message)
        for transaction in log
        if transaction.commit_lsn >= first or base_seq(transaction.commit_lsn) == base_seq(first)
        for message in transaction.messages()
    ]
    assert [record for record in read if record is not None] == everything[held + 1 :]


@given(logs(), st.lists(st.integers(0, 2**64 - 1), max_size=5), st.data())
@settings(max_examples=150)
def test_confirmable_never_passes_what_is_acknowledged_and_never_falls(
    log: list[Transaction], strays: list[int], data: st.DataObject
) -> None:
    following = Assembler(db="d", slot="s", mark=base_seq(START), confirmed_lsn=START, heartbeat_ms=0)
    for transaction in log:
        for message in transaction.messages():
            following.feed(message)
    seqs = [record.seq for record in reference(log)] + [seq for seq in strays if seq >= base_seq(START)]
    last = START
    for acknowledged in sorted(data.draw(st.lists(st.sampled_from(seqs)))):
        confirmed = following.confirmable(acknowledged)
        assert broken_confirmation(confirmed, acknowledged) is None
        assert confirmed >= last
        last = confirmed
        # Everything that isn't acknowledged comes again from there.
        assert all(each.commit_lsn >= confirmed for each in log if base_seq(each.commit_lsn) > acknowledged)


PLANTED = {
    "confirming what was sent": Rules(confirmable=lambda following, _: following.confirmable(following.last_seq)),
    "confirming how far the server has read": Rules(
        confirmable=lambda following, seq: max(following.confirmable(seq), following.reached_lsn)
    ),
    # debezium PR 7531: the position of the commit says nothing about how much of the transaction was sent
    "resuming behind a transaction that is held in part": Rules(mark=lambda mark: mark | NUMBER_LIMIT),
    "resuming at the start of a transaction that is held in part": Rules(
        mark=lambda mark: mark >> NUMBER_BITS << NUMBER_BITS
    ),
    "counting as stored what the chain holds": Rules(kept=lambda kept: replace(kept, resume_point=kept.held)),
    "holding the slot against the resume point": Rules(kept=lambda kept: replace(kept, held=kept.resume_point)),
    "not asking what was given up": Rules(kept=lambda kept: replace(kept, given_up_from={})),
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_wrong_rule_is_rejected(rule: str) -> None:
    @given(logs(), STEPS)
    @settings(
        max_examples=2000,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    def judged(log: list[Transaction], steps: list[Step]) -> None:
        assert faults(log, steps, PLANTED[rule]) == []

    with pytest.raises(AssertionError):
        judged()


TWO = [
    Transaction(START + 64, START + 104, (row("c", 1), row("c", 2))),
    Transaction(START + 128, START + 168, (row("u", 2),)),
]
SHARP: dict[str, tuple[list[Step], str]] = {
    "confirming what was sent": ([("receive", 9), ("confirm", 0)], "acknowledged"),
    "confirming how far the server has read": ([("reach", 9), ("confirm", 0)], "acknowledged"),
    "resuming behind a transaction that is held in part": (
        [("receive", 9), ("crash", 2)],
        "the queue doesn't hold the log",
    ),
    "resuming at the start of a transaction that is held in part": ([("receive", 9), ("crash", 2)], "after"),
    "counting as stored what the chain holds": ([("receive", 9), ("restart group", 9)], "counts as stored"),
    "holding the slot against the resume point": (
        [("catch up", 0), ("restart group", 9)],
        "nothing is lost",
    ),
    "not asking what was given up": (
        # The second transaction is sent again, the first can't be.
        [("catch up", 0), ("restart group", 9), ("catch up", 0), ("give up tail", 9)],
        "the queue doesn't hold the log",
    ),
}


@pytest.mark.parametrize("rule", PLANTED)
def test_the_shortest_way_in_which_a_planted_rule_goes_wrong(rule: str) -> None:
    steps, fault = SHARP[rule]
    assert faults(TWO, steps, Rules()) == []
    assert any(fault in each for each in faults(TWO, steps, PLANTED[rule]))
