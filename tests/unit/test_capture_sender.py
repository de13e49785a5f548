"""The capture's sender over the producer's own buffer: what is acknowledged, what an unknown resume point does."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.producer.buffer import Buffer
from seriatim.producer.client import Producer
from seriatim.producer.core.batching import BatchLimits
from seriatim.producer.handle import Handle, SharedBatch
from seriatim.producer.sources.postgres import producing
from seriatim.producer.sources.postgres.core.resume import Kept
from seriatim.producer.sources.postgres.errors import ResumePointUnknown
from seriatim.producer.sources.postgres.producing import CaptureSender
from seriatim.producer.sources.postgres.sender import Deposed, OrderedSender
from seriatim.producer.terms import Elected
from seriatim.protocol import errors
from seriatim.protocol.names import Epoch, Token


class FakeProducer:
    """The public face of a producer over a real buffer; the test is its thread."""

    queue = "q"
    is_connected = False

    def __init__(self, batch_bytes: int = 1000, max_buffer_bytes: int = 1 << 20) -> None:
        self.buffer = Buffer("p", BatchLimits(batch_bytes, 0), max_buffer_bytes, 0.01)
        self.elected: Elected | None = None
        self.stood_again = 0
        self.in_flight: list[SharedBatch] = []

    def elect(self, token: int, resume_point: Mapping[str, int] | None) -> None:
        self.buffer.elect(Token(token), resume_point)
        self.elected = Elected(Token(token), resume_point)

    def depose(self) -> None:
        self.buffer.depose("fenced", self.in_flight)
        self.in_flight = []
        self.elected = None

    def take(self) -> None:
        """Put what was sent on its way."""
        self.buffer.flush()
        while (taken := self.buffer.take(0)) is not None:
            self.in_flight.append(taken[0])

    def acknowledge(self, batches: int) -> None:
        for shared in self.in_flight[:batches]:
            shared.epoch = Epoch(1)
            self.buffer.complete(shared)
        del self.in_flight[:batches]

    # the public face

    def wait_until_elected(self, timeout: float) -> Elected:
        if self.elected is None:
            if self.buffer.stopped is not None:
                raise self.buffer.stopped
            time.sleep(timeout)
            raise errors.NotElected("another instance is")
        self.buffer.take_up(self.elected.token)
        return self.elected

    def send(self, value: bytes, key: bytes | None, *, seq: int, source: str) -> Handle:
        return self.buffer.send(value, key, None, seq, source, None)

    def stand_again(self) -> None:
        self.stood_again += 1


def new(resume_point: Mapping[str, int] | None = None, **settings: Any) -> tuple[FakeProducer, CaptureSender]:
    producer = FakeProducer(**settings)
    sender = CaptureSender(cast(Producer, producer))
    producer.elect(1, {} if resume_point is None else resume_point)
    assert sender.wait_until_elected(0.01)
    return producer, sender


def test_it_is_what_a_capture_sends_through() -> None:
    sender: OrderedSender = new()[1]
    assert sender.is_elected()


def test_only_what_is_acknowledged_without_a_hole_counts() -> None:
    producer, sender = new()
    for first in (1, 4, 7):
        for seq in range(first, first + 3):
            sender.send(b"v", None, seq, "s")
        producer.take()
    assert sender.acknowledged("s") == 0
    # A later batch that is done first says nothing about an earlier one.
    producer.buffer.complete(producer.in_flight.pop(1))
    assert sender.acknowledged("s") == 0
    producer.acknowledge(1)
    assert sender.acknowledged("s") == 6
    assert sender.acknowledged("other") == 0
    producer.acknowledge(1)
    assert sender.acknowledged("s") == 9


def test_the_resume_point_waits_for_what_is_in_flight_and_counts_it() -> None:
    producer, sender = new({"s": 10, "other": 3})
    assert sender.kept().resume_point == {"s": 10, "other": 3}
    sender.send(b"v", None, 11, "s")
    producer.take()
    thread = threading.Thread(target=lambda: (time.sleep(0.05), producer.acknowledge(1)))
    thread.start()
    assert sender.kept().resume_point == {"s": 11, "other": 3}
    thread.join()
    assert sender.kept().resume_point == {"s": 11, "other": 3}


def test_what_the_chain_holds_is_at_or_above_the_resume_point() -> None:
    producer, sender = new()
    producer.elect(2, {"s": 10, "other": 3})
    producer.elected = Elected(Token(2), {"s": 10, "other": 3}, {"s": 12}, {"other": 2})
    assert sender.wait_until_elected(0.01)
    assert sender.kept() == Kept({"s": 10, "other": 3}, {"s": 12, "other": 3}, {"other": 2})
    sender.send(b"v", None, 13, "s")
    producer.take()
    producer.acknowledge(1)
    assert sender.kept() == Kept({"s": 13, "other": 3}, {"s": 13, "other": 3}, {"other": 2})


def test_what_the_queue_holds_already_is_acknowledged_at_once() -> None:
    _, sender = new({"s": 10})
    sender.send(b"v", None, 9, "s")
    assert sender.acknowledged("s") == 9
    assert sender.kept().resume_point == {"s": 10}


def test_an_unknown_resume_point_is_not_an_empty_one() -> None:
    producer = FakeProducer()
    sender = CaptureSender(cast(Producer, producer))
    producer.elect(1, None)
    assert sender.wait_until_elected(0.01)
    with pytest.raises(ResumePointUnknown):
        sender.kept()
    assert producer.stood_again == 1
    producer.depose()
    producer.elect(2, {"s": 5})
    assert sender.wait_until_elected(0.01)
    assert sender.kept().resume_point == {"s": 5}


def test_a_deposal_ends_every_call() -> None:
    producer, sender = new()
    sender.send(b"v", None, 1, "s")
    producer.depose()
    assert not sender.is_elected()
    for call in (lambda: sender.send(b"v", None, 2, "s"), lambda: sender.acknowledged("s"), sender.kept):
        with pytest.raises(Deposed):
            call()


def test_a_new_term_knows_nothing_of_the_one_before_but_by_its_resume_point() -> None:
    producer, sender = new()
    sender.send(b"v", None, 1, "s")
    sender.send(b"v", None, 2, "s")
    producer.depose()
    producer.elect(2, {"s": 1})
    # The capture hasn't noticed yet: neither the old records nor new ones pass.
    with pytest.raises(Deposed):
        sender.acknowledged("s")
    with pytest.raises(Deposed):
        sender.send(b"v", None, 3, "s")
    assert sender.wait_until_elected(0.01)
    assert sender.acknowledged("s") == 0
    assert sender.kept().resume_point == {"s": 1}
    sender.send(b"v", None, 2, "s")


def test_a_term_that_sent_nothing_does_not_send_into_the_next_one() -> None:
    """It may have made up its mind, for a snapshot say, by a resume point that is no longer true."""
    producer, sender = new()
    assert sender.kept().resume_point == {}
    producer.depose()
    producer.elect(2, {"s": 99})
    with pytest.raises(Deposed):
        sender.send(b"snapshot", None, 1, "another")


def test_a_term_that_is_over_says_nothing_of_where_the_queue_stands() -> None:
    """Another instance may have captured, and gone, while this one connected: by what it knew, the slot would be made anew, or a gap."""
    producer, sender = new()
    producer.depose()
    producer.elect(3, {"s": 99})
    assert not sender.is_elected()
    with pytest.raises(Deposed):
        sender.kept()
    assert sender.wait_until_elected(0.01)
    assert sender.kept().resume_point == {"s": 99}


def test_the_same_term_goes_on_after_the_database_was_lost() -> None:
    producer, sender = new()
    sender.send(b"v", None, 1, "s")
    producer.take()
    producer.acknowledge(1)
    assert sender.wait_until_elected(0.01)
    assert sender.kept().resume_point == {"s": 1}


def test_a_full_buffer_blocks_until_there_is_room() -> None:
    producer, sender = new(batch_bytes=100, max_buffer_bytes=200)
    for seq in (1, 2):
        sender.send(b"v" * 60, None, seq, "s")
    producer.take()
    ended = threading.Event()

    def send() -> None:
        sender.send(b"v" * 60, None, 3, "s")
        ended.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not ended.wait(0.1)  # several waits of the buffer's own have passed
    producer.acknowledge(1)
    assert ended.wait(60)
    thread.join()


def test_stopping_ends_a_send_that_blocks() -> None:
    producer, sender = new(batch_bytes=100, max_buffer_bytes=200)
    for seq in (1, 2):
        sender.send(b"v" * 60, None, seq, "s")
    producer.take()
    threading.Timer(0.05, sender.stop).start()
    with pytest.raises(Deposed):
        sender.send(b"v" * 60, None, 3, "s")


def test_what_is_acknowledged_is_told_once_it_is_stopped() -> None:
    producer, sender = new()
    sender.send(b"v", None, 1, "s")
    producer.take()
    producer.acknowledge(1)
    sender.stop()
    assert sender.acknowledged("s") == 1
    producer.depose()
    with pytest.raises(Deposed):
        sender.acknowledged("s")


def test_memory_is_an_entry_for_each_batch_in_flight() -> None:
    producer, sender = new(batch_bytes=10_000)
    for seq in range(1, 1001):
        sender.send(b"v", None, seq, "s")
    producer.take()
    assert len(sender._sent) == len(producer.in_flight)
    producer.acknowledge(len(producer.in_flight))
    sender.send(b"v", None, 1001, "s")
    assert len(sender._sent) == 1


def test_standing_by_is_no_error_and_a_stopped_producer_is_one() -> None:
    producer = FakeProducer()
    sender = CaptureSender(cast(Producer, producer))
    assert not sender.wait_until_elected(0.01)
    producer.buffer.stop(errors.InvalidArgument("the producer was closed"))
    with pytest.raises(errors.InvalidArgument, match="closed"):
        sender.wait_until_elected(0.5)


def test_who_watches_is_told_once_of_each_reason_and_of_each_term() -> None:
    told: list[object] = []
    producer = FakeProducer()
    sender = CaptureSender(cast(Producer, producer), on_elected=told.append, on_waiting=told.append)
    for _ in range(2):
        assert not sender.wait_until_elected(0.001)
    producer.elect(7, {})
    for _ in range(2):
        assert sender.wait_until_elected(0.001)
    assert told == ["another instance is", 7]
    for seq in (1, 2, 3):
        sender.send(b"v", None, seq, "s")
    assert (sender.sent, sender.unacknowledged) == (3, 3)
    producer.take()
    producer.acknowledge(len(producer.in_flight))
    sender.acknowledged("s")
    assert (sender.sent, sender.unacknowledged) == (3, 0)


class Stalling(FakeProducer):
    """The queue takes nothing where the script says why, one entry for each try."""

    script = ("no group is eligible", "g1 failed", "no group is eligible", "", "", "no group is eligible", "")
    tries = 0

    def send(self, value: bytes, key: bytes | None, *, seq: int, source: str) -> Handle:
        self.tries += 1
        if self.script[self.tries - 1]:
            raise errors.Waiting(self.script[self.tries - 1])
        return super().send(value, key, seq=seq, source=source)


def test_a_second_stand_still_for_the_same_reason_is_told_too() -> None:
    told: list[str] = []
    producer = Stalling()
    sender = CaptureSender(cast(Producer, producer), on_waiting=told.append)
    producer.elect(1, {})
    assert sender.wait_until_elected(0.01)
    for seq in (1, 2, 3):
        sender.send(b"v", None, seq, "s")
    assert producer.tries == len(producer.script)
    assert told == ["no group is eligible", "g1 failed", "no group is eligible"]


def test_a_part_that_was_kept_of_a_failed_batch_acknowledges_nothing_behind_it() -> None:
    """A resume point took the first rows of a batch off, and then the term ended."""
    producer, sender = new()
    for seq in (1, 2, 3):
        sender.send(b"v", None, seq, "s")
    producer.take()
    producer.in_flight[0].resume({"s": 1})
    for shared in producer.in_flight:
        shared.finish(errors.OutcomeUnknown("deposed"))
    with pytest.raises(Deposed):
        sender.acknowledged("s")


def test_nobody_answering_at_the_start_is_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is found out late, as of a coordinator that takes connections and says nothing: it waited for ever."""
    now_s = 100.0
    monkeypatch.setattr(producing, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Lonely(FakeProducer):
        is_asked = False

        def wait_until_elected(self, timeout: float) -> Elected:
            nonlocal now_s
            now_s += timeout
            if self.is_asked:
                raise errors.Unreachable("nobody")
            self.is_asked = True
            raise errors.NotElected("not elected yet")

    sender = CaptureSender(cast(Producer, Lonely()), connect_timeout_s=5)
    assert not sender.wait_until_elected(4.5)
    with pytest.raises(errors.Unreachable):
        sender.wait_until_elected(0.5)
    patient = CaptureSender(cast(Producer, Lonely()))
    assert not patient.wait_until_elected(10)
    assert not patient.wait_until_elected(10)
    standing = Lonely()
    sender = CaptureSender(cast(Producer, standing), connect_timeout_s=5)
    standing.is_connected = True
    assert not sender.wait_until_elected(4.5)
    standing.is_connected = False
    assert not sender.wait_until_elected(4.5)
