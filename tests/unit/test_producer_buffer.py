"""Batches, identities, handles and the bound on memory, without a network."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from seriatim.producer.acknowledged import Acknowledged
from seriatim.producer.buffer import Buffer
from seriatim.producer.core import sequencing
from seriatim.producer.core.batching import BatchLimits, closes_in_s
from seriatim.producer.core.sequencing import Identities
from seriatim.producer.core.timing import AcknowledgementTiming
from seriatim.producer.guard import IS_COMPILED
from seriatim.producer.handle import Ends, Handle, SharedBatch
from seriatim.producer.loop import SendingLoop
from seriatim.producer.record import checked
from seriatim.producer.sources.lines import Line, chunks, parsed
from seriatim.protocol import errors
from seriatim.protocol.batch import MAX_RECORD_BYTES, MAX_SOURCES, RecordColumns, encode
from seriatim.protocol.marks import MARK_BYTES, SOURCES_ROOM_BYTES, room_bytes
from seriatim.protocol.names import TOKEN_MAX, Epoch, Index, Token

FIRST = 1 << 40


def new(**settings: Any) -> Buffer:
    limits = BatchLimits(settings.pop("batch_bytes", 1000), settings.pop("linger_s", 0.005))
    buffer = Buffer("p", limits, settings.pop("max_buffer_bytes", 1 << 20), settings.pop("max_block_s", 0.05))
    buffer.elect(Token(1), settings.pop("resume_point", {}), settings.pop("held", None))
    assert not settings
    return buffer


def send(buffer: Buffer, value: bytes = b"v", **parts: Any) -> Handle:
    parts = {"key": None, "headers": None, "seq": None, "source": None, "timestamp_ms": None, **parts}
    return buffer.send(value, **parts)


def taken(buffer: Buffer) -> list[RecordColumns]:
    """Everything, as batches; each can be encoded."""
    found = []
    while (one := buffer.take(0)) is not None:
        encode(one[1], Index(0))
        found.append(one[1])
    return found


def complete(buffer: Buffer, shared: SharedBatch, first_index: int = 0) -> None:
    shared.epoch, shared.first_index, shared.base = Epoch(3), Index(first_index), 100
    buffer.complete(shared)


def _until_it_waits(buffer: Buffer) -> None:
    while not buffer._waiters:
        time.sleep(0)


def test_usual_records_share_a_batch_and_get_consecutive_seqs() -> None:
    buffer = new()
    handles = [send(buffer, b"%d" % number) for number in range(20)]
    shared, columns = buffer.take(0) or pytest.fail("nothing to take")
    assert columns.values == [b"%d" % number for number in range(20)]
    assert list(columns.seqs) == list(range(FIRST, FIRST + 20))
    complete(buffer, shared, 5)
    assert handles[2].result() == Acknowledged(Epoch(3), Index(7), 107, "p", FIRST + 2)
    assert buffer.used_bytes == 0


def test_automatic_seqs_have_a_source_of_their_own_where_the_application_has_no_name_and_given_ones_never_share_it() -> (
    None
):
    buffer = Buffer("host-1", BatchLimits(1000, 0.005), 1 << 20, 0.05, "producer")
    buffer.elect(Token(2), {"producer": FIRST + 7, "host-1": 3})
    send(buffer)
    send(buffer, seq=3)  # stored before, in another term of the same name
    send(buffer, seq=4)
    send(buffer)
    send(buffer, seq=1, source="log")
    (columns,) = taken(buffer)
    assert columns.sources == ["producer", "host-1", "producer", "log"]
    assert list(columns.seqs) == [2 * FIRST, 4, 2 * FIRST + 1, 1]
    send(buffer)
    assert [one.sources for one in taken(buffer)] == ["producer"]
    with pytest.raises(errors.InvalidArgument, match="automatic"):
        send(buffer, seq=1 << 60, source="producer")


def test_a_batch_holds_no_more_than_its_bytes() -> None:
    buffer = new()
    for _ in range(50):
        send(buffer, b"x" * 68)
    assert [len(columns) for columns in taken(buffer)] == [10] * 5


def test_a_large_record_has_a_batch_of_its_own() -> None:
    buffer = new()
    for size in (10, 5000, 10):
        send(buffer, b"x" * size)
    assert [len(columns) for columns in taken(buffer)] == [1, 1, 1]


def test_all_kinds_of_records_in_one_batch_keep_their_parts() -> None:
    buffer = new()
    send(buffer, b"a")
    send(buffer, b"b", key=b"k")
    send(buffer, b"c", headers=[("h", b"1"), ("h", b"2")])
    send(buffer, b"d", seq=4, source="s", timestamp_ms=-5)
    send(buffer, b"e")
    (columns,) = taken(buffer)
    assert columns.values == [b"a", b"b", b"c", b"d", b"e"]
    assert columns.keys == [None, b"k", None, None, None]
    assert columns.headers == [(), (), (("h", b"1"), ("h", b"2")), (), ()]
    assert list(columns.seqs) == [FIRST, FIRST + 1, FIRST + 2, 4, FIRST + 3]
    assert columns.sources == ["p", "p", "p", "s", "p"]
    assert columns.timestamps_ms[3] == -5


def test_automatic_seqs_rise_from_batch_to_batch_whatever_is_between() -> None:
    buffer = new(batch_bytes=200)
    for number in range(40):
        send(buffer, b"x" * 20, **({"seq": number, "source": "s"} if number % 7 == 3 else {}))
    automatic = [
        seq for columns in taken(buffer) for row, seq in enumerate(columns.seqs) if columns.source_of(row) == "p"
    ]
    assert automatic == list(range(FIRST, FIRST + len(automatic)))


def test_more_sources_than_a_batch_takes_go_into_the_next() -> None:
    buffer = new(batch_bytes=1 << 16)
    for number in range(2 * MAX_SOURCES):
        send(buffer, b"v", seq=1, source=f"s{number}")
    assert sum(len(columns) for columns in taken(buffer)) == 2 * MAX_SOURCES


def test_many_at_once_are_cut_into_batches_in_order() -> None:
    buffer = new()
    send(buffer, b"first")
    handles = buffer.send_many([b"%02d" % number + b"x" * 66 for number in range(35)])
    batches = taken(buffer)
    values = [value for columns in batches for value in columns.values]
    assert values == [b"first"] + [b"%02d" % number + b"x" * 66 for number in range(35)]
    assert max(len(columns) for columns in batches) == 10
    assert [handle.batch.identity(handle.row)[1] for handle in handles] == list(range(FIRST + 1, FIRST + 36))
    assert handles[-1].row == handles[34].row
    assert [handle.row for handle in handles[2:4]] == [handles[2].row, handles[3].row]
    with pytest.raises(IndexError):
        handles[35]


def test_a_seq_that_does_not_rise_is_refused_and_the_next_goes_on() -> None:
    buffer = new()
    send(buffer, b"a", seq=5)
    for seq in (5, 4, 0):
        with pytest.raises(errors.SeqNotRising):
            send(buffer, b"b", seq=seq)
    send(buffer, b"c", seq=6)
    assert taken(buffer)[0].seqs == [5, 6]


def test_a_queue_that_has_no_room_for_another_source_takes_the_ones_it_has() -> None:
    had = {f"{number:0180}": 5 for number in range(SOURCES_ROOM_BYTES // 200 - 1)}
    left_bytes = SOURCES_ROOM_BYTES - room_bytes(had)
    assert 200 <= left_bytes <= 220
    buffer = new(resume_point=had)
    last = "n" * (left_bytes - MARK_BYTES)
    send(buffer, seq=0, source=last)
    for _ in range(2):
        with pytest.raises(errors.TooManySources, match="no room for another source") as refused:
            send(buffer, seq=0, source="m" * 180)
    assert refused.value.details == {"source": "m" * 180, "limit_bytes": SOURCES_ROOM_BYTES}
    send(buffer, seq=1, source=last)
    send(buffer, seq=6, source=min(had))
    (columns,) = taken(buffer)
    assert columns.sources == [last, last, min(had)]


def test_automatic_seqs_are_refused_as_well_where_there_is_no_room_for_their_source() -> None:
    full = {f"{number:0180}": 5 for number in range(SOURCES_ROOM_BYTES // 200)} | {"q" * 130: 1}
    assert SOURCES_ROOM_BYTES - room_bytes(full) < room_bytes(["p"])
    buffer = new(resume_point=full)
    with pytest.raises(errors.TooManySources):
        send(buffer)
    buffer = new(resume_point=full | {"p": 4})  # it has it since it was smaller
    send(buffer)
    assert len(taken(buffer)) == 1


def test_automatic_seqs_take_the_room_of_their_source_once() -> None:
    had = {f"{number:0180}": 5 for number in range(SOURCES_ROOM_BYTES // 200 - 1)}
    left_bytes = SOURCES_ROOM_BYTES - room_bytes(had)
    buffer = new(resume_point=had)
    for _ in range(20):
        send(buffer, b"v", key=b"k")
    with pytest.raises(errors.TooManySources):
        send(buffer, seq=0, source="n" * (left_bytes - MARK_BYTES))
    send(buffer, seq=0, source="n" * (left_bytes - MARK_BYTES - room_bytes(["p"])))


def test_a_seq_is_not_used_up_by_a_record_that_was_not_sent() -> None:
    buffer = new(max_buffer_bytes=1000)
    send(buffer, b"x" * 900, seq=1, source="fill")
    with pytest.raises(errors.DeadlineOver, match="full"):
        send(buffer, b"x" * 900, seq=1)
    shared, _ = buffer.take(0) or pytest.fail("nothing to take")
    complete(buffer, shared)
    send(buffer, b"x" * 900, seq=1)


def test_a_record_at_or_below_the_resume_point_is_complete_at_once() -> None:
    buffer = new(resume_point={"p": 7})
    handle = send(buffer, b"v", seq=7)
    assert handle.done()
    assert handle.result() == Acknowledged(None, None, None, "p", 7)
    assert not send(buffer, b"v", seq=8).done()


@pytest.mark.parametrize(
    "parts",
    [
        {"source": "s"},
        {"seq": -1},
        {"seq": 1 << 64},
        {"seq": 1, "source": ""},
        {"seq": 1, "source": "s" * 201},
        {"seq": 1, "source": "\ud800"},
        {"headers": {"\ud800": b"v"}},
        {"seq": "1"},
        {"key": "text"},
        {"headers": {"h": "text"}},
        {"headers": [(1, b"")]},
        {"headers": [b"alone"]},
        {"headers": 7},
        {"seq": 1, "source": 5},
        {"timestamp_ms": "now"},
        {"timestamp_ms": 1 << 63},
        {"value": "text"},
        {"value": None},
    ],
)
def test_what_cannot_be_a_record_is_refused_and_harms_nothing(parts: dict[str, Any]) -> None:
    buffer = new()
    send(buffer, b"before")
    with pytest.raises(errors.InvalidArgument):
        send(buffer, **parts)
    send(buffer, b"after")
    assert taken(buffer)[0].values == [b"before", b"after"]


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"seq": -1}, errors.InvalidArgument),
        ({"value": b"x" * (MAX_RECORD_BYTES + 1)}, errors.RecordTooLarge),
        ({"value": b"", "key": b"k" * (MAX_RECORD_BYTES + 1)}, errors.RecordTooLarge),
    ],
)
def test_what_no_queue_takes_is_refused_before_anybody_is_elected(
    parts: dict[str, Any], kind: type[errors.SeriatimError]
) -> None:
    """It waited for that, and said that nobody answers."""
    buffer = Buffer("p", BatchLimits(1000, 0.005), 1 << 20, 0.0)
    with pytest.raises(kind):
        send(buffer, **parts)


@pytest.mark.parametrize("wrong", ["text", None, bytearray(b"v"), 7])
def test_of_many_that_hold_one_wrong_none_is_sent(wrong: Any) -> None:
    buffer = new()
    with pytest.raises(errors.InvalidArgument):
        buffer.send_many([b"good", wrong])
    send(buffer, b"after")
    assert taken(buffer)[0].values == [b"after"]


def test_a_source_has_automatic_seqs_or_the_users() -> None:
    buffer = new()
    send(buffer, b"a")
    with pytest.raises(errors.InvalidArgument):
        send(buffer, b"b", seq=1)
    other = new()
    send(other, b"a", seq=1)
    with pytest.raises(errors.InvalidArgument):
        send(other, b"b")


@pytest.mark.parametrize(
    "before", [{"resume_point": {"p": FIRST}}, {"held": {"p": FIRST}}, {"resume_point": None, "held": {"p": 1 << 60}}]
)
def test_a_source_that_had_seqs_of_the_users_in_an_earlier_term_has_no_automatic_ones_that_would_lie_below(
    before: dict[str, Any],
) -> None:
    buffer = new(**before)
    for parts in ({}, {"key": b"k"}):
        with pytest.raises(errors.InvalidArgument, match="the queue has records of source 'p' up to seq"):
            send(buffer, **parts)
    send(buffer, seq=1 << 61)
    assert [columns.seqs for columns in taken(buffer)] == [[1 << 61]]


def test_automatic_seqs_go_on_above_those_of_earlier_terms() -> None:
    buffer = new(resume_point={"p": FIRST - 1}, held={"p": FIRST - 1, "other": 1 << 63})
    send(buffer)
    assert list(taken(buffer)[0].seqs) == [FIRST]


def test_the_records_limit_counts_key_and_headers() -> None:
    buffer = new()
    buffer.set_record_limit(100)
    send(buffer, b"x" * 100)
    for parts in ({"value": b"x" * 101}, {"value": b"x" * 99, "key": b"kk"}, {"headers": {"h": b"x" * 100}}):
        with pytest.raises(errors.RecordTooLarge):
            send(buffer, **parts)
    with pytest.raises(errors.RecordTooLarge):
        buffer.send_many([b"1", b"x" * 101])
    assert len(taken(buffer)[0]) == 1


def test_many_that_wait_for_the_election_are_held_to_the_limit_that_it_brings() -> None:
    buffer = Buffer("p", BatchLimits(1000, 0.005), 1 << 20, 60, None)
    failure: list[errors.SeriatimError] = []

    def send_many() -> None:
        try:
            buffer.send_many([b"small", b"also small", b"x" * 101, b"y" * 300])
        except errors.SeriatimError as error:
            failure.append(error)

    thread = threading.Thread(target=send_many)
    thread.start()
    _until_it_waits(buffer)
    buffer.set_record_limit(100)
    buffer.elect(Token(1), {})
    thread.join(60)
    assert isinstance(failure[0], errors.RecordTooLarge)
    assert failure[0].details == {"limit_bytes": 100}
    assert [columns.values for columns in taken(buffer)] == [[b"small"]]


def test_a_full_buffer_holds_the_sender_back_until_there_is_room() -> None:
    buffer = new(max_buffer_bytes=2000, max_block_s=60)
    for _ in range(20):
        send(buffer, b"x" * 68)
    shared, _ = buffer.take(0) or pytest.fail("nothing to take")
    has_begun = threading.Event()

    def make_room() -> None:
        has_begun.set()
        complete(buffer, shared)

    timer = threading.Timer(0.05, make_room)
    timer.start()
    send(buffer, b"x" * 68)
    assert has_begun.is_set()
    # There is room a moment before the batch is done.
    timer.join()
    assert shared.is_done


def test_a_record_larger_than_a_batch_waits_for_no_more_room_than_others_do() -> None:
    """Threads that send small ones would take each room that comes free before there is enough for it."""
    buffer = new(max_buffer_bytes=3200, max_block_s=0)
    for _ in range(21):
        send(buffer, b"x" * 68)  # two batches of ten, and an open one
    send(buffer, b"y" * 2500)
    with pytest.raises(errors.DeadlineOver):
        send(buffer, b"x" * 68)
    assert [len(columns.values) for columns in taken(buffer)] == [10, 10, 1, 1]


def test_whoever_sends_while_a_batch_is_being_closed_waits() -> None:
    buffer = new()
    send(buffer, b"before")
    found: list[Handle] = []
    sender = threading.Thread(target=lambda: found.append(send(buffer, b"meanwhile")))
    with buffer._lock:
        sender.start()
        sender.join(0.05)
        assert sender.is_alive()
        assert buffer._values == [b"before"]
    sender.join(60)
    assert [columns.values for columns in taken(buffer)] == [[b"before", b"meanwhile"]]
    assert found[0].row == 1


class _Interrupting:
    """Garbage: when the collector finds it, another thread runs."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


def test_threads_that_send_at_once_lose_no_record_and_share_no_row() -> None:
    buffer = new(max_block_s=60)
    batches: dict[SharedBatch, list[bytes]] = {}
    sent: list[tuple[bytes, Handle]] = []
    is_over = False

    def take() -> None:
        while not is_over or buffer._open is not None:
            while (one := buffer.take(0)) is not None:
                batches[one[0]] = one[1].values
                buffer.complete(one[0])

    def send_many(name: int) -> None:
        for number in range(5000):
            _Interrupting()
            value = b"%d %d" % (name, number)
            sent.append((value, buffer.send(value)))

    taker, senders = threading.Thread(target=take), [threading.Thread(target=send_many, args=(n,)) for n in range(3)]
    before, collected = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    try:
        for thread in (taker, *senders):
            thread.start()
        for thread in senders:
            thread.join()
        is_over = True
        taker.join()
    finally:
        sys.setswitchinterval(before)
        gc.set_threshold(*collected)
    assert [batches[handle.batch][handle.row] for _, handle in sent] == [value for value, _ in sent]
    assert len({(handle.batch.number, handle.row) for _, handle in sent}) == sum(map(len, batches.values())) == 15_000


class _CtrlC:
    """Ctrl-C at one step of the interpreter, outside of what is compiled."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("core/sequencing.py", "protocol/clock.py", "producer/loop.py")):
            return None
        if event in ("call", "line") and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self


class _Loop:
    """The part of an asyncio loop that a sending loop wakes."""

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        callback()


def _waking(buffer: Buffer) -> Any:
    """A sending loop that only counts how often it was woken for the buffer."""
    loop: Any = SendingLoop.__new__(SendingLoop)
    loop._loop, loop._is_wake_due, loop.wakes = _Loop(), False, 0

    def woken() -> None:
        loop.wakes += 1

    loop._woken = woken
    buffer.wake = loop._wake
    return loop


Work = Callable[[Buffer], Sequence[Handle]]
_ONE_BY_ONE: list[Work] = [
    lambda buffer: [buffer.send(b"keyed", b"key")],
    lambda buffer: [buffer.send(b"own", None, None, 5, "log")],
    lambda buffer: [buffer.send(b"mixed")],
    lambda buffer: [buffer.send(b"x" * 190)],
    lambda buffer: [buffer.send(b"z" * 190, None, None, 6, "log")],
]
_AT_ONCE: list[Work] = [lambda buffer: buffer.send_many([b"y" * 60] * 9)]


def _flushed(buffer: Buffer) -> list[Handle]:
    buffer.flush()
    return []


@pytest.mark.parametrize("works", [_ONE_BY_ONE, _AT_ONCE, [_flushed]])
def test_an_interrupt_at_any_step_of_sending_leaves_no_record_without_an_end(works: list[Work]) -> None:
    """As Ctrl-C is one, or a signal's handler that raises. What was accepted keeps its place, and the producer is woken for it."""
    for step in itertools.count():
        buffer = new(batch_bytes=200)
        loop = _waking(buffer)
        handles = [buffer.send(b"first")]
        loop._is_wake_due, loop.wakes = False, 0
        interrupt, traced = _CtrlC(step), sys.gettrace()
        for work in works:
            sys.settrace(interrupt)
            try:
                handles += work(buffer)
            except KeyboardInterrupt:
                assert loop.wakes or not (loop._is_wake_due or buffer._full)
            finally:
                sys.settrace(traced)
        buffer.flush()
        batches = {}
        while (one := buffer.take(0)) is not None:
            encode(one[1], Index(0))
            batches[one[0]] = one[1].values
            complete(buffer, one[0])
        assert all(handle.done() for handle in handles)
        assert all(batches[handle.batch][handle.row] for handle in handles)
        assert buffer.used_bytes == 0
        if interrupt.left >= 0:
            assert [batches[handle.batch][handle.row] for handle in handles] == [
                value for values in batches.values() for value in values
            ]
            assert step > 5
            return


def test_a_flush_waits_for_every_batch_that_was_sent_before_and_for_none_after() -> None:
    """They don't end in order where some were stored before in an earlier link."""
    buffer = new(batch_bytes=100)
    for _ in range(6):
        send(buffer, b"x" * 60)
    first, second, third = (one[0] for _ in range(3) if (one := buffer.take(1)) is not None)
    complete(buffer, second)
    waited_for, _ = buffer.flush()
    assert waited_for[:2] == [first, third]
    assert len(waited_for) == 5
    send(buffer, b"x" * 60)
    assert buffer.flush()[0][:-1] == waited_for
    complete(buffer, first)
    complete(buffer, third)
    for _ in range(4):
        complete(buffer, (buffer.take(1) or pytest.fail("nothing to take"))[0])
    assert buffer.flush()[0] == []
    send(buffer)
    assert len(buffer._incomplete) == 1


@pytest.mark.skipif(not IS_COMPILED, reason="not compiled: it stands still there")
def test_who_calls_in_the_middle_of_a_call_of_the_same_thread_is_refused_and_harms_nothing() -> None:
    """A signal's handler, or a finalizer: what it would wait for goes on only when it has returned."""
    buffer = new(batch_bytes=100)
    first = send(buffer, b"0")
    buffer.flush()
    refused: list[str] = []
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: buffer.send(b"in between"),
        "keyed": lambda: buffer.send(b"in between", b"key"),
        "many": lambda: buffer.send_many([b"in between"]),
        "flush": buffer.flush,
        "result": first.result,
    }

    def interrupt() -> None:
        assert not buffer.ends.may_wait
        for name, call in calls.items():
            try:
                call()
            except errors.InvalidArgument:
                refused.append(name)

    def work() -> None:
        for value in (b"1", b"2" * 60, b"3" * 60):
            buffer.send(value)
        assert buffer.ends.may_wait

    buffer.wake = interrupt
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert refused == [*calls] * 5  # three batches were opened, and two closed
    buffer.wake = lambda: None
    buffer.flush()
    assert [columns.values for columns in taken(buffer)] == [[b"0"], [b"1"], [b"2" * 60], [b"3" * 60]]


def test_a_deposed_buffer_ends_everything_as_unknown_once() -> None:
    buffer = new()
    handles = [send(buffer, b"x" * 68, seq=seq) for seq in range(25)]
    first, _ = buffer.take(0) or pytest.fail("nothing to take")
    ends: list[Handle] = []
    for handle in handles:
        handle.add_done_callback(ends.append)
    buffer.depose("fenced", [first])
    assert ends == handles
    for handle in handles:
        with pytest.raises(errors.OutcomeUnknown, match="fenced"):
            handle.result(0)
    assert buffer.take(0) is None


def _untold(buffer: Buffer) -> errors.SeriatimError | None:
    """What a flush that begins now, with nothing on its way, would raise."""
    return buffer.failure_of(*buffer.flush())


def _failed(buffer: Buffer, count: int) -> list[Handle]:
    """So many records whose outcome nobody knows."""
    handles = [send(buffer) for _ in range(count)]
    shared, _ = buffer.take(0) or pytest.fail("nothing to take")
    buffer.depose("fenced", [shared])
    buffer.elect(Token(2), {})
    return handles


def test_a_flush_tells_of_what_no_handle_told() -> None:
    """Who was told by its handle, and has sent that again since, would be told once more when it closes the producer."""
    buffer = new()
    handles = _failed(buffer, 3)
    for handle in (handles[2], handles[2], handles[0]):
        with pytest.raises(errors.OutcomeUnknown):
            handle.result(0)
    assert isinstance(_untold(buffer), errors.OutcomeUnknown)
    for handle in _failed(buffer, 3):
        with pytest.raises(errors.OutcomeUnknown):
            handle.result(0)
    assert _untold(buffer) is None


def test_what_a_flush_told_of_is_told_and_what_handles_say_of_it_hides_nothing_later() -> None:
    buffer = new()
    handles = _failed(buffer, 2)
    assert isinstance(_untold(buffer), errors.OutcomeUnknown)
    assert _untold(buffer) is None
    later = _failed(buffer, 1)
    with pytest.raises(errors.OutcomeUnknown):
        handles[0].result(0)
    assert isinstance(_untold(buffer), errors.OutcomeUnknown)
    with pytest.raises(errors.OutcomeUnknown):
        later[0].result(0)
    assert _untold(buffer) is None


def test_each_flush_tells_of_what_it_waited_for_and_of_what_was_untold_when_it_began() -> None:
    """Whatever handles, and other flushes, tell while it waits."""
    buffer = new()
    _failed(buffer, 1)
    began = buffer.flush()
    began_too = buffer.flush()
    handle = send(buffer)
    waiting = buffer.flush()
    shared, _ = buffer.take(0) or pytest.fail("nothing to take")
    buffer.depose("closed", [shared])
    with pytest.raises(errors.OutcomeUnknown):
        handle.result(0)
    for before in (began, began_too, waiting):
        assert isinstance(buffer.failure_of(*before), errors.OutcomeUnknown)
    assert _untold(buffer) is None


def test_rows_that_were_stored_before_are_nothing_to_be_told_of() -> None:
    buffer = new()
    handles = [send(buffer, seq=seq) for seq in range(2)]
    shared, _ = buffer.take(0) or pytest.fail("nothing to take")
    shared.resume({"p": 0})
    buffer.depose("fenced", [shared])
    assert handles[0].result(0).epoch is None
    with pytest.raises(errors.OutcomeUnknown):
        handles[1].result(0)
    assert _untold(buffer) is None


def test_after_a_deposal_seqs_of_the_users_wait_for_the_resume_point_to_be_read() -> None:
    """A thread that didn't notice must not send behind the records that ended as unknown."""
    buffer = new()
    send(buffer, b"1", seq=1)
    buffer.depose("fenced", [])
    buffer.elect(Token(2), {"p": 0})
    with pytest.raises(errors.NotElected, match="resume point"):
        send(buffer, b"2", seq=2)
    buffer.take_up(Token(2))
    send(buffer, b"1", seq=1)


def test_a_send_that_waits_through_a_deposal_is_refused_in_the_next_term() -> None:
    buffer = new(max_buffer_bytes=1000, max_block_s=60)
    send(buffer, b"x" * 900, seq=1)
    failure: list[BaseException] = []

    def wait_and_send() -> None:
        try:
            send(buffer, b"x" * 900, seq=2)
        except errors.SeriatimError as error:
            failure.append(error)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    _until_it_waits(buffer)
    buffer.depose("fenced", [])
    buffer.elect(Token(2), {"p": 0})
    buffer.take_up(Token(2))
    thread.join(60)
    assert isinstance(failure[0], errors.NotElected)


def test_a_send_that_waits_for_the_first_term_is_refused_in_the_next() -> None:
    """Of several that wait at once, as from asyncio, one may go into the first term, and end there as unknown."""
    buffer = Buffer("p", BatchLimits(1000, 0.005), 1 << 20, 60)
    first, second = (checked(b"v", None, None, seq, None, None) for seq in (1, 2))
    (_, term), (_, second_term) = (buffer.try_send(one, None, lambda: None) for one in (first, second))
    buffer.elect(Token(1), {})
    assert buffer.try_send(first, term, lambda: None)[0] is not None
    buffer.depose("fenced", [])
    buffer.elect(Token(2), {})
    for _ in range(2):
        with pytest.raises(errors.NotElected, match="resume point"):
            buffer.try_send(second, second_term, lambda: None)
        buffer.take_up(Token(2))
    send(buffer, seq=1)


def test_a_stopped_buffer_says_why() -> None:
    buffer = new()
    buffer.stop(errors.UnknownQueue("deleted"))
    with pytest.raises(errors.UnknownQueue):
        send(buffer)


def test_a_callback_on_the_producers_thread_never_waits() -> None:
    buffer = new()
    buffer.depose("suspended", [])
    buffer.ends.own_thread = threading.get_ident()
    with pytest.raises(errors.InvalidArgument, match="callback"):
        send(buffer)


def test_rows_that_were_stored_before_have_no_place_and_those_after_move_up() -> None:
    shared = SharedBatch(1, Ends())
    shared.source, shared.seqs, shared.count = "s", 10, 5
    shared.resume({"s": 11})
    shared.epoch, shared.first_index = Epoch(2), Index(40)
    shared.finish()
    ends = [shared.result(row) for row in range(5)]
    assert [end.index for end in ends] == [None, None, 40, 41, 42]
    assert [end.seq for end in ends] == [10, 11, 12, 13, 14]
    assert ends[3].offset is None


def test_rows_that_were_stored_before_stay_acknowledged_when_the_rest_is_lost() -> None:
    shared = SharedBatch(1, Ends())
    shared.source, shared.seqs, shared.count = ["a", "b"], [1, 1], 2
    shared.resume({"b": 3})
    shared.finish(errors.OutcomeUnknown("deposed"))
    assert shared.result(1).seq == 1
    with pytest.raises(errors.OutcomeUnknown):
        shared.result(0)


def test_a_handle_times_out_with_a_word_about_it() -> None:
    with pytest.raises(errors.DeadlineOver):
        send(new()).result(0.01)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e300])
def test_a_time_that_cannot_be_waited_for_is_refused(timeout: float) -> None:
    buffer = new()
    handle = send(buffer)
    with pytest.raises(errors.InvalidArgument, match="None is for ever"):
        handle.result(timeout)
    shared, _ = buffer.take(0) or pytest.fail("nothing to take")
    complete(buffer, shared)
    assert handle.result(0).epoch == 3


def test_a_callback_that_fails_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    buffer = new()
    handle = send(buffer)
    ends: list[Handle] = []
    handle.add_done_callback(lambda _: 1 // 0)
    handle.add_done_callback(ends.append)
    complete(buffer, (buffer.take(0) or pytest.fail("nothing to take"))[0])
    assert ends == [handle]
    assert "callback" in caplog.text


def test_a_callback_that_exits_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It runs on the producer's thread, which nobody would miss."""
    buffer = new()
    handle = send(buffer)
    ends: list[Handle] = []
    handle.add_done_callback(lambda _: sys.exit(1))
    handle.add_done_callback(ends.append)
    complete(buffer, (buffer.take(0) or pytest.fail("nothing to take"))[0])
    assert ends == [handle]
    assert "callback" in caplog.text
    with pytest.raises(SystemExit):  # done before: called by whoever asks, on its own thread
        handle.add_done_callback(lambda _: sys.exit(1))


def test_on_the_producers_thread_a_handle_never_waits() -> None:
    buffer = new()
    handle = send(buffer)
    buffer.ends.own_thread = threading.get_ident()
    for timeout in (None, 5):
        with pytest.raises(errors.InvalidArgument, match="callback"):
            handle.result(timeout)
    with pytest.raises(errors.DeadlineOver):
        handle.result(0)
    complete(buffer, (buffer.take(0) or pytest.fail("nothing to take"))[0])
    assert handle.result().offset == 100


def test_a_handle_is_awaited_from_another_threads_loop() -> None:
    buffer = new()

    async def main() -> Acknowledged:
        handle = send(buffer)
        shared, _ = buffer.take(0) or pytest.fail("nothing to take")
        threading.Timer(0.02, complete, (buffer, shared)).start()
        return await handle

    assert asyncio.run(main()).offset == 100


def test_when_a_batch_closes() -> None:
    limits = BatchLimits(1000, 0.005)
    assert closes_in_s(records=0, age_s=9, in_flight=0, limits=limits) is None
    assert closes_in_s(records=1, age_s=0, in_flight=0, limits=limits) == 0
    assert closes_in_s(records=1, age_s=0.002, in_flight=1, limits=limits) == pytest.approx(0.003)
    assert closes_in_s(records=1, age_s=9, in_flight=1, limits=limits) == 0


def test_identities_end_with_their_bits() -> None:
    identities = Identities("p", Token(1), None)
    identities.automatic((1 << 40) - 1)
    with pytest.raises(OverflowError):
        identities.automatic(2)
    identities.automatic(1)
    with pytest.raises(OverflowError):
        identities.automatic(1)


@pytest.mark.parametrize(("token", "has_automatic"), [(TOKEN_MAX, True), (TOKEN_MAX + 1, False), (1 << 40, False)])
def test_identities_end_with_the_elections_that_a_seq_tells_apart(token: int, has_automatic: bool) -> None:
    identities = Identities("p", Token(token), {"p": FIRST})
    if has_automatic:
        identities.check_automatic()
        assert identities.automatic(1) == TOKEN_MAX << 40
    else:
        with pytest.raises(errors.TooManyElections, match="send to another queue") as told:
            identities.check_automatic()
        assert told.value.details == {"token": token}
        assert not told.value.can_retry
        assert not identities.is_resumed("p", FIRST + 1)  # the application's own go on


@pytest.mark.parametrize("seq", [-1, 2**64])
def test_what_no_seq_can_be_is_refused(seq: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="unsigned 64-bit"):
        Identities("p", Token(1), None).is_resumed("s", seq)


def test_a_spent_term_admits_nothing_more_once_its_batch_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = new()
    assert not buffer.is_spent
    monkeypatch.setattr(sequencing, "SPARE_SEQS", (1 << 40) - 3)
    for _ in range(4):
        send(buffer)
    assert not buffer.is_spent  # what is open is still to be sent
    (columns,) = taken(buffer)
    assert len(columns) == 4
    assert buffer.is_spent
    with pytest.raises(errors.DeadlineOver, match="waited"):
        send(buffer)
    buffer.elect(Token(2), {})
    send(buffer)
    assert not buffer.is_spent
    assert list(taken(buffer)[0].seqs) == [2 << 40]


def test_more_elections_than_a_seq_tells_apart_leave_seqs_of_the_applications_own() -> None:
    buffer = Buffer("p", BatchLimits(1000, 0.005), 1 << 20, 0.05)
    buffer.elect(Token(TOKEN_MAX + 1), {})
    for _ in range(2):
        with pytest.raises(errors.TooManyElections, match="16,777,215 elected senders"):
            send(buffer)
    send(buffer, seq=7)
    assert taken(buffer)[0].seqs == [7]


def test_the_deadline_follows_what_is_seen_within_its_bounds() -> None:
    timing = AcknowledgementTiming()
    assert timing.deadline_s(0.3, 5) == 0.3
    for _ in range(100):
        timing = timing.after(0.001)
    assert timing.deadline_s(0.3, 5) == 0.3
    for _ in range(100):
        timing = timing.after(1.0)
    assert 1.0 < timing.deadline_s(0.3, 5) < 1.2
    assert timing.after(100.0).deadline_s(0.3, 5) == 5


def test_lines_come_whole_and_news_between_them_lose_none() -> None:
    reading, writing = os.pipe()
    stop_reading, stop_writing = os.pipe()
    os.write(writing, b"one\n\ntwo\nthr")
    lines = chunks(reading, stop_reading)
    assert next(lines) == [b"one", b"", b"two"]
    os.write(stop_writing, b"x")
    assert next(lines) == []
    os.write(writing, b"ee\n")
    assert next(lines) == [b"three"]
    for descriptor in (reading, writing, stop_reading, stop_writing):
        os.close(descriptor)


def test_the_last_line_needs_no_line_end() -> None:
    reading, writing = os.pipe()
    stop_reading, stop_writing = os.pipe()
    os.write(writing, b"one\ntwo")
    os.close(writing)
    assert list(chunks(reading, stop_reading)) == [[b"one"], [b"two"]]
    for descriptor in (reading, stop_reading, stop_writing):
        os.close(descriptor)


def test_the_parts_of_a_line() -> None:
    assert parsed(b"v\t1", 1, key_separator=None, has_seq=False) == Line(b"v\t1", None, None)
    assert parsed(b"12\tv\t1", 1, key_separator=None, has_seq=True) == Line(b"v\t1", None, 12)
    assert parsed(b"12\tk:v:w", 1, key_separator=b":", has_seq=True) == Line(b"v:w", b"k", 12)
    assert parsed(b"v", 1, key_separator=b":", has_seq=False) == Line(b"v", None, None)
    for text in (b"v", b"\tv", b"x\tv", b"-1\tv", b"18446744073709551616\tv"):
        with pytest.raises(errors.InvalidArgument, match="line 3"):
            parsed(text, 3, key_separator=None, has_seq=True)


def test_whoever_took_a_term_up_is_refused_in_the_next_until_it_takes_that_up() -> None:
    """It may have decided by the old resume point, though it has not sent anything in that term."""
    buffer = new()
    buffer.take_up(Token(1))
    buffer.depose("fenced", [])
    buffer.elect(Token(2), {"p": 0})
    buffer.take_up(Token(1))  # late: it speaks of the term before
    with pytest.raises(errors.NotElected, match="resume point"):
        send(buffer, b"1", seq=1)
    buffer.take_up(Token(2))
    send(buffer, b"1", seq=1)


@pytest.mark.parametrize(
    ("noted", "told"),
    [
        (errors.Fenced("overtaken"), errors.NotElected),
        (errors.DeadlineOver("no answer in time"), errors.NotElected),
        (errors.Unreachable("nobody answers"), errors.Unreachable),
        (errors.Waiting("no group"), errors.Waiting),
    ],
)
def test_whoever_stands_by_is_told_so_whatever_the_coordinators_said(
    noted: errors.SeriatimError, told: type[errors.SeriatimError]
) -> None:
    buffer = new()
    buffer.note(noted)
    assert type(buffer.problem) is told
    assert buffer.problem.message == noted.message
