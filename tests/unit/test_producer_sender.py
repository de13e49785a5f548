"""Golden traces of the sender's state machine: events in, effects out, one trace for each way in which sending fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.producer.core import events
from seriatim.producer.core.events import Grant
from seriatim.producer.core.invariants import broken, broken_step
from seriatim.producer.core.sender import decide, wake_at_s
from seriatim.producer.core.sender_state import Phase, SenderSettings, SenderState
from seriatim.protocol import errors
from seriatim.protocol.batch import EncodedBatch, RecordColumns, encode
from seriatim.protocol.names import Epoch, Index, Token

SETTINGS = SenderSettings(window_batches=3)


def batch(first_seq: int, count: int, source: str = "s") -> EncodedBatch:
    seqs = list(range(first_seq, first_seq + count))
    return encode(RecordColumns([b"v"] * count, seqs, source, [0] * count), Index(0))


def grant(epoch: int = 1, next_index: int = 0, marks: dict[str, int] | None = None, *, known: bool = True) -> Grant:
    return Grant(Epoch(epoch), Index(next_index), (marks or {}) if known else None, 0, "route")


def text(effect: events.Effect) -> str:
    """One word and the numbers that matter."""
    match effect:
        case events.Send(stream, number, sent):
            seqs = "+".join(f"{span.first_seq}..{span.last_seq}" for span in sent.header.spans)
            return f"send {number} at {sent.header.first_index} seqs {seqs} on stream {stream}"
        case events.Acquire(request, token, failed_epoch, _):
            return f"acquire {request} token {token} failed {failed_epoch}"
        case events.OpenStream(stream, token, given):
            return f"open stream {stream} token {token} epoch {given.epoch} from {given.next_index}"
        case events.CloseStream(stream):
            return f"close stream {stream}"
        case events.Complete(number, epoch, first_index, _):
            return f"complete {number} epoch {epoch} at {first_index}"
        case events.Resume(number, _, is_whole):
            return f"resume {number} {'whole' if is_whole else 'part'}"
        case events.FailAll():
            return "fail all"
        case events.TellElected(token, grant):
            return f"tell elected {token} {grant.resume_point}"
        case events.TellDeposed():
            return "tell deposed"
        case events.StandAgain():
            return "stand again"
        case events.Stop(error):
            return f"stop {error.code}"


class Trace:
    """A sender that is fed event by event; invariants are judged after each."""

    def __init__(self, state: SenderState | None = None) -> None:
        self.state = state or SenderState()
        self.now_s = 0.0
        self.settings = SETTINGS

    def __call__(self, event: events.Event, *, after_s: float = 0.001) -> list[str]:
        self.now_s += after_s
        before = self.state
        self.state, effects = decide(before, event, self.now_s, self.settings)
        assert broken(self.state, self.settings) == []
        assert broken_step(before, self.state, effects) == []
        return [text(effect) for effect in effects]

    def granted(self, given: Grant, token: int = 7) -> list[str]:
        return self(events.Granted(self.state.request, Token(token), given))


@pytest.fixture
def sending() -> Trace:
    """Elected with token 7 on epoch 1, batches 1 to 3 (seqs 0..1, 2..3, 4..5) in flight and batch 4 behind them."""
    trace = Trace()
    assert trace(events.Elected()) == ["acquire 1 token 0 failed 0"]
    assert trace.granted(grant()) == ["tell elected 7 {}", "open stream 1 token 7 epoch 1 from 0"]
    sent = [trace(events.BatchClosed(number, batch(2 * number - 2, 2))) for number in (1, 2, 3, 4)]
    assert sent == [
        ["send 1 at 0 seqs 0..1 on stream 1"],
        ["send 2 at 2 seqs 2..3 on stream 1"],
        ["send 3 at 4 seqs 4..5 on stream 1"],
        [],
    ]
    return trace


def test_acknowledgements_are_cumulative_and_make_room(sending: Trace) -> None:
    assert sending(events.Acknowledged(1, Index(4))) == [
        "complete 1 epoch 1 at 0",
        "complete 2 epoch 1 at 2",
        "send 4 at 6 seqs 6..7 on stream 1",
    ]
    assert sending(events.Acknowledged(1, Index(8))) == ["complete 3 epoch 1 at 4", "complete 4 epoch 1 at 6"]
    assert sending.state.pending == ()


def test_an_acknowledgement_inside_a_batch_completes_only_what_lies_below(sending: Trace) -> None:
    assert sending(events.Acknowledged(1, Index(3)))[0] == "complete 1 epoch 1 at 0"
    assert [pending.number for pending in sending.state.pending] == [2, 3, 4]


def test_an_acknowledgement_of_what_was_never_sent_stops_the_sender(sending: Trace) -> None:
    assert sending(events.Acknowledged(1, Index(7))) == [
        "close stream 1",
        "fail all",
        "tell deposed",
        "stop invariant-broken",
    ]


def test_a_broken_stream_is_reported_and_the_rest_sent_again_in_order(sending: Trace) -> None:
    sending(events.Acknowledged(1, Index(2)))
    assert sending(events.StreamBroken(1, "reset")) == ["close stream 1", "acquire 2 token 7 failed 1"]
    assert sending.granted(grant(2, 0, {"s": 3})) == [
        "resume 2 whole",
        "open stream 2 token 7 epoch 2 from 0",
        "send 3 at 0 seqs 4..5 on stream 2",
        "send 4 at 2 seqs 6..7 on stream 2",
    ]


def test_a_resume_point_inside_a_batch_cuts_it(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    assert sending.granted(grant(2, 0, {"s": 2})) == [
        "resume 1 whole",
        "resume 2 part",
        "open stream 2 token 7 epoch 2 from 0",
        "send 2 at 0 seqs 3..3 on stream 2",
        "send 3 at 1 seqs 4..5 on stream 2",
        "send 4 at 3 seqs 6..7 on stream 2",
    ]


def test_an_unknown_resume_point_sends_everything_again(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    assert sending.granted(grant(2, 0, known=False)) == [
        "open stream 2 token 7 epoch 2 from 0",
        "send 1 at 0 seqs 0..1 on stream 2",
        "send 2 at 2 seqs 2..3 on stream 2",
        "send 3 at 4 seqs 4..5 on stream 2",
    ]


@pytest.mark.parametrize(
    "error",
    [
        errors.Sealed("sealed"),
        errors.LeaseOver("lease"),
        errors.DiskFull("full"),
        errors.DiskFailed("broken"),
        errors.PeerLost("no slave"),
        errors.WrongIncarnation("another"),
        errors.UnknownLink("none"),
        errors.BugError("the master's"),
    ],
)
def test_a_member_that_cannot_take_records_is_reported_as_failed_at_once(
    sending: Trace, error: errors.SeriatimError
) -> None:
    assert sending(events.Refused(1, error)) == ["close stream 1", "acquire 2 token 7 failed 1"]


@pytest.mark.parametrize(
    "error",
    [
        errors.OlderVersion("older"),
        errors.WrongIndex("7"),
        errors.BadChecksum("flipped"),
        errors.SeqNotRising("on its way"),
    ],
)
def test_a_refusal_that_is_no_failure_costs_no_group(sending: Trace, error: errors.SeriatimError) -> None:
    assert sending(events.Refused(1, error)) == ["close stream 1", "acquire 2 token 7 failed 0"]
    assert sending.granted(grant(1, 2, {"s": 1}))[:3] == [
        "resume 1 whole",
        "open stream 2 token 7 epoch 1 from 2",
        "send 2 at 2 seqs 2..3 on stream 2",
    ]


@pytest.mark.parametrize(
    "error", [errors.WrongIndex("7"), errors.Resend("again"), errors.PartlyResend("part", marks={"another": 9})]
)
def test_a_sender_refused_again_and_again_gives_the_link_up_in_the_end(
    sending: Trace, error: errors.SeriatimError
) -> None:
    for stream in range(1, SETTINGS.tries_on_link + 1):
        assert sending(events.Refused(stream, error))[-1].endswith("failed 0")
        sending.granted(grant(1, 0))
    assert sending(events.Refused(SETTINGS.tries_on_link + 1, error))[-1].endswith("failed 1")


def test_refusals_on_one_link_say_nothing_of_the_next(sending: Trace) -> None:
    """A planned switch came in between."""
    for stream in range(1, 2 * SETTINGS.tries_on_link + 1):
        assert sending(events.Refused(stream, errors.WrongIndex("7")))[-1].endswith("failed 0")
        sending.granted(grant(1 if stream < SETTINGS.tries_on_link else 2, 0))
    assert sending(events.Refused(2 * SETTINGS.tries_on_link + 1, errors.WrongIndex("7")))[-1].endswith("failed 2")


def test_refusals_count_in_a_row(sending: Trace) -> None:
    tries = SETTINGS.tries_on_link
    for stream in range(1, 2 * tries + 1):
        assert sending(events.Refused(stream, errors.WrongIndex("7")))[-1].endswith("failed 0")
        sending.granted(grant(1, 0))
        if stream == tries:
            sending(events.Acknowledged(stream + 1, Index(2)))


def test_what_one_link_failed_of_is_told_once(sending: Trace) -> None:
    (_, asked) = decide(sending.state, events.StreamBroken(1, "reset"), sending.now_s, SETTINGS)[1]
    assert asked == events.Acquire(2, Token(7), Epoch(1), "reset")
    sending(events.StreamBroken(1, "reset"))
    sending.granted(grant(2))
    (_, asked) = decide(sending.state, events.Refused(2, errors.WrongIndex("7")), sending.now_s, SETTINGS)[1]
    assert asked == events.Acquire(3, Token(7), Epoch(0), "")


def test_what_is_complete_has_its_place_in_the_queue(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    sending.granted(replace(grant(2), base=100))
    (first, *_) = decide(sending.state, events.Acknowledged(2, Index(2)), sending.now_s, SETTINGS)[1]
    assert first == events.Complete(1, Epoch(2), Index(0), 100)


def test_a_resend_is_complete_and_what_follows_is_sent_on_the_same_link(sending: Trace) -> None:
    assert sending(events.Refused(1, errors.Resend("again", marks={"s": 3}))) == [
        "close stream 1",
        "resume 1 whole",
        "resume 2 whole",
        "acquire 2 token 7 failed 0",
    ]
    assert sending.granted(grant(1, 5, {})) == [
        "open stream 2 token 7 epoch 1 from 5",
        "send 3 at 5 seqs 4..5 on stream 2",
        "send 4 at 7 seqs 6..7 on stream 2",
    ]


def test_resends_of_a_long_past_cost_no_group(sending: Trace) -> None:
    """Where the resume point is unknown an application sends all again that it has: the master refuses it window by window."""
    sending(events.Refused(1, errors.Resend("again", marks={"s": 7})))
    for number in range(5, 5 + 3 * SETTINGS.tries_on_link):
        stream = sending.state.stream + 1
        assert sending.granted(grant(1, 0, known=False)) == [f"open stream {stream} token 7 epoch 1 from 0"]
        last = 2 * number - 1
        sending(events.BatchClosed(number, batch(last - 1, 2)))
        assert sending(events.Refused(stream, errors.Resend("again", marks={"s": last}))) == [
            f"close stream {stream}",
            f"resume {number} whole",
            f"acquire {sending.state.request} token 7 failed 0",
        ]


def test_a_partial_resend_is_cut_by_the_marks_that_come_with_it(sending: Trace) -> None:
    assert sending(events.Refused(1, errors.PartlyResend("part", marks={"s": 0})))[:2] == [
        "close stream 1",
        "resume 1 part",
    ]
    assert "send 1 at 0 seqs 1..1 on stream 2" in sending.granted(grant(1, 0, {}))


def test_a_resend_without_marks_is_settled_by_the_resume_point(sending: Trace) -> None:
    assert sending(events.Refused(1, errors.Resend("again"))) == ["close stream 1", "acquire 2 token 7 failed 0"]
    assert sending.granted(grant(1, 0, {"s": 1}))[0] == "resume 1 whole"


def test_an_overtaken_sender_fails_everything_and_stands_again(sending: Trace) -> None:
    assert sending(events.Refused(1, errors.Fenced("token 8"))) == [
        "close stream 1",
        "fail all",
        "tell deposed",
        "stand again",
    ]
    assert sending.state.phase is Phase.STANDING_BY
    assert sending(events.Elected()) == ["acquire 2 token 0 failed 0"]
    assert sending.granted(grant(2, 0, {"s": 3}), token=9) == [
        "tell elected 9 {'s': 3}",
        "open stream 2 token 9 epoch 2 from 0",
    ]


def test_a_sender_that_withdraws_fails_everything_and_stands_again(sending: Trace) -> None:
    """As one that was overtaken: what comes next has another token."""
    ended = ["close stream 1", "fail all", "tell deposed", "stand again"]
    assert sending(events.Withdrawn()) == ended
    assert sending(events.Withdrawn()) == []
    assert sending(events.Elected()) == ["acquire 2 token 0 failed 0"]


def test_an_uncertain_session_stops_the_sender_at_once(sending: Trace) -> None:
    assert sending(events.Deposed("suspended")) == ["close stream 1", "fail all", "tell deposed"]
    assert sending(events.Acknowledged(1, Index(2))) == []


def test_a_sender_overtaken_while_it_asks_fails_everything(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    asked = sending.state
    for error in (errors.NotElected("another"), errors.Fenced("token 8")):
        sending.state = asked
        assert sending(events.AcquireFailed(2, error)) == ["fail all", "tell deposed", "stand again"]


def test_a_coordinator_that_reads_the_election_late_is_asked_again() -> None:
    trace = Trace()
    trace(events.Elected())
    assert trace(events.AcquireFailed(1, errors.NotElected("not yet"))) == []
    assert trace(events.Tick(), after_s=SETTINGS.retry_s) == ["acquire 2 token 0 failed 0"]


def test_an_unreachable_coordinator_is_asked_again_ever_more_slowly(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    waits = []
    for request in range(2, 12):
        assert sending(events.AcquireFailed(request, errors.Unreachable("down"))) == []
        due_at_s = wake_at_s(sending.state, SETTINGS)
        assert due_at_s is not None
        waits.append(round(due_at_s - sending.now_s, 3))
        assert sending(events.Tick(), after_s=due_at_s - sending.now_s) == [f"acquire {request + 1} token 7 failed 1"]
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0, 1.0]
    sending.granted(grant(2))
    sending(events.StreamBroken(2, "reset"))
    assert sending(events.AcquireFailed(sending.state.request, errors.Unreachable("down"))) == []
    assert waits_s(sending) == 0.02  # a grant came in between


def test_waiting_for_a_group_keeps_the_batches_and_the_token(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    assert sending(events.WaitAnswered(2, Token(7), 0.5)) == []
    assert sending(events.BatchClosed(5, batch(8, 1))) == []
    assert sending(events.Tick(), after_s=0.4) == []
    assert sending(events.Tick(), after_s=0.2) == ["acquire 3 token 7 failed 1"]
    assert sending.granted(grant(3))[1] == "send 1 at 0 seqs 0..1 on stream 2"


def test_waiting_before_there_is_a_token_is_followed_by_another_request_without_one() -> None:
    trace = Trace()
    trace(events.Elected())
    assert trace(events.WaitAnswered(1, Token(0), 0.5)) == []
    assert trace(events.Tick(), after_s=0.4) == []
    assert trace(events.Tick(), after_s=0.2) == ["acquire 2 token 0 failed 0"]
    assert trace.granted(grant(), 3)[0] == "tell elected 3 {}"


def test_an_answer_without_the_token_that_was_given_stops_the_sender(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    asked = sending.state
    assert sending(events.WaitAnswered(2, Token(0), 0.5))[-1] == "stop invariant-broken"
    sending.state = asked
    assert sending.granted(grant(2), token=8)[-1] == "stop invariant-broken"
    trace = Trace()
    trace(events.Elected())
    assert trace.granted(grant(), 0)[-1] == "stop invariant-broken"


def test_an_error_of_the_callers_stops_the_sender(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    assert sending(events.AcquireFailed(2, errors.UnknownQueue("deleted")))[-1] == "stop unknown-queue"
    assert sending.state.phase is Phase.ENDED


def test_what_the_master_refuses_for_the_callers_fault_stops_the_sender_and_costs_no_group(sending: Trace) -> None:
    assert sending(events.Refused(1, errors.RecordTooLarge("over the limit")))[-1] == "stop too-large"
    assert sending.state.phase is Phase.ENDED


def test_one_bit_that_makes_nonsense_of_a_batch_on_its_way_does_not_stop_the_sender(sending: Trace) -> None:
    """In a hundred bytes one of 200 bits is in what no checksum covers. Who sends nothing else is stopped, and costs no group."""
    for stream in range(1, SETTINGS.tries_on_link + 1):
        assert sending(events.Refused(stream, errors.MalformedFrame("no batch")))[-1].endswith("failed 0")
        assert len(sending.granted(grant(1, 0))) == 1 + SETTINGS.window_batches
    assert sending(events.Refused(SETTINGS.tries_on_link + 1, errors.MalformedFrame("no batch")))[-1] == (
        "stop malformed-frame"
    )


def test_nothing_acknowledged_in_time_gives_the_link_up(sending: Trace) -> None:
    sending(events.Acknowledged(1, Index(2)))
    assert sending(events.Tick(), after_s=0.29) == []
    assert sending(events.Tick(), after_s=0.02) == ["close stream 1", "acquire 2 token 7 failed 1"]


def test_a_process_that_stood_still_reads_its_acknowledgements_first(sending: Trace) -> None:
    sending(events.Acknowledged(1, Index(2)))
    assert sending(events.Tick(), after_s=5.0) == []
    assert sending(events.Tick(), after_s=0.29) == []
    assert sending(events.Tick(), after_s=5.0) == ["close stream 1", "acquire 2 token 7 failed 1"]


def test_a_process_that_stands_still_again_behind_an_acknowledgement_is_excused_again(sending: Trace) -> None:
    sending(events.Acknowledged(1, Index(2)))
    assert sending(events.Tick(), after_s=5.0) == []
    sending(events.Acknowledged(1, Index(4)))
    assert sending(events.Tick(), after_s=60.0) == []


def waits_s(trace: Trace) -> float | None:
    """How long from now until the master is given up."""
    due_at_s = wake_at_s(trace.state, trace.settings)
    return None if due_at_s is None else round(due_at_s - trace.now_s, 3)


def test_a_first_acknowledgement_is_waited_for_longer_on_every_stream(sending: Trace) -> None:
    """It may have to connect first."""
    first_s = SETTINGS.first_deadline_s
    assert waits_s(sending) == pytest.approx(first_s - 0.003)  # since the first of four was sent
    sending(events.Acknowledged(1, Index(2)))
    assert waits_s(sending) == SETTINGS.deadline_s
    sending(events.StreamBroken(1, "reset"), after_s=0.1)
    assert waits_s(sending) is None  # a coordinator is asked
    sending.granted(grant(2))
    assert waits_s(sending) == first_s


def test_time_runs_while_there_is_something_to_acknowledge_and_from_when_that_was_sent(sending: Trace) -> None:
    sending(events.Acknowledged(1, Index(6)))
    sending(events.Acknowledged(1, Index(8)))
    assert waits_s(sending) is None
    assert sending(events.Tick(), after_s=60.0) == sending(events.Tick(), after_s=60.0) == []
    sending(events.BatchClosed(5, batch(8, 1)))
    assert waits_s(sending) == SETTINGS.deadline_s
    sending(events.BatchClosed(6, batch(9, 1)), after_s=0.2)
    assert waits_s(sending) == pytest.approx(SETTINGS.deadline_s - 0.2)


def left_for_its_silence(trace: Trace) -> None:
    trace(events.Acknowledged(1, Index(2)))
    assert trace(events.Tick(), after_s=0.31)[0] == "close stream 1"


def test_behind_a_silence_nothing_is_sent_before_the_master_speaks_and_then_one_batch_at_a_time(sending: Trace) -> None:
    left_for_its_silence(sending)
    assert waits_s(sending) is None
    assert sending(events.Tick(), after_s=60.0) == []  # a coordinator may take its time
    assert sending.granted(grant(2)) == ["open stream 2 token 7 epoch 2 from 0"]
    assert sending(events.BatchClosed(5, batch(8, 1))) == []
    assert sending(events.Acknowledged(2, Index(0))) == ["send 2 at 0 seqs 2..3 on stream 2"]
    assert sending(events.Acknowledged(2, Index(0))) == []
    assert sending(events.Acknowledged(2, Index(2)))[1:] == [
        f"send {number} at {index} seqs {first}..{last} on stream 2"
        for number, index, first, last in ((3, 2, 4, 5), (4, 4, 6, 7), (5, 6, 8, 8))
    ]


def test_a_master_that_never_says_a_word_behind_a_silence_is_left_as_well(sending: Trace) -> None:
    left_for_its_silence(sending)
    sending.granted(grant(2))
    assert waits_s(sending) == SETTINGS.first_deadline_s
    assert sending(events.Tick(), after_s=SETTINGS.first_deadline_s + 0.01)[-1].endswith("failed 2")
    assert waits_s(sending) is None  # the one that is asked for now isn't there yet
    sending.granted(grant(3))
    assert sending(events.Acknowledged(3, Index(0)))  # this one speaks, and takes nothing
    assert sending(events.Tick(), after_s=2 * SETTINGS.first_deadline_s + 0.01)[-1].endswith("failed 3")
    assert sending.granted(grant(4)) == ["open stream 4 token 7 epoch 4 from 0"]
    sending(events.StreamBroken(4, "reset"))
    assert sending(events.Tick(), after_s=60.0) == sending(events.Tick(), after_s=60.0) == []


def test_slow_acknowledgements_lengthen_the_deadline(sending: Trace) -> None:
    sending(events.Acknowledged(1, Index(2)), after_s=0.8)
    due_at_s = wake_at_s(sending.state, SETTINGS)
    assert due_at_s is not None
    assert 0.8 < due_at_s - sending.now_s <= SETTINGS.deadline_max_s


def test_what_one_link_showed_of_latency_holds_at_the_start_of_the_next(sending: Trace) -> None:
    sending(events.Acknowledged(1, Index(2)), after_s=0.8)
    learnt = sending.state.timing
    sending(events.StreamBroken(1, "reset"))
    sending.granted(grant(2))
    assert sending.state.timing == learnt
    started_s = sending.now_s
    for index in range(1, 40):
        sending(events.BatchClosed(100 + index, batch(1000 + index, 1)))
        sending(events.Acknowledged(2, Index(sending.state.next_index)))
    due_at_s = wake_at_s(sending.state, SETTINGS)
    assert due_at_s is None
    assert sending.state.timing.deadline_s(SETTINGS.deadline_s, SETTINGS.deadline_max_s) == SETTINGS.deadline_s
    assert sending.now_s - started_s < 0.1


def test_answers_to_an_earlier_request_and_words_of_an_earlier_stream_are_ignored(sending: Trace) -> None:
    sending(events.StreamBroken(1, "reset"))
    assert sending(events.Acknowledged(1, Index(6))) == []
    assert sending(events.Granted(1, Token(7), grant(2))) == []
    assert sending(events.Refused(1, errors.Sealed("late"))) == []
    sending.granted(grant(2))
    assert sending.granted(grant(3)) == []
    before = sending.state
    assert sending(events.StreamBroken(1, "late")) == []
    assert sending(events.Acknowledged(1, Index(2))) == []
    assert sending.state == before


def test_a_closed_sender_fails_what_is_left_and_is_elected_no_more(sending: Trace) -> None:
    assert sending(events.Closed()) == ["close stream 1", "fail all", "tell deposed"]
    assert sending(events.Closed()) == []
    assert sending(events.Deposed("suspended")) == []
    assert sending(events.Withdrawn()) == []
    assert sending.state.phase is Phase.ENDED
    with pytest.raises(errors.InvariantBroken):
        sending(events.Elected())


def test_a_window_in_bytes_lets_one_batch_through_whatever_its_size() -> None:
    trace = Trace()
    trace.settings = replace(SETTINGS, window_bytes=1)
    trace(events.Elected())
    trace.granted(grant())
    assert trace(events.BatchClosed(1, batch(0, 1))) == ["send 1 at 0 seqs 0..0 on stream 1"]
    assert trace(events.BatchClosed(2, batch(1, 1))) == []
    assert trace(events.Acknowledged(1, Index(1)))[1] == "send 2 at 1 seqs 1..1 on stream 1"


def test_the_invariants_reject_batches_kept_after_a_deposal(sending: Trace) -> None:
    """H4: a re-elected sender that still has its old records."""
    kept = replace(SenderState(), pending=sending.state.pending)
    assert any("H4" in sentence for sentence in broken(kept, SETTINGS))


def test_the_invariants_reject_a_batch_that_vanishes(sending: Trace) -> None:
    gone = replace(sending.state, pending=sending.state.pending[1:], in_flight=2)
    assert broken_step(sending.state, gone, []) == ["batches [1] vanished"]


def test_the_invariants_reject_a_gap_in_flight(sending: Trace) -> None:
    first, _, *rest = sending.state.pending
    assert broken(replace(sending.state, pending=(first, *rest), in_flight=2), SETTINGS)


def test_an_event_that_cannot_come_raises() -> None:
    with pytest.raises(errors.InvariantBroken):
        decide(SenderState(), events.BatchClosed(1, batch(0, 1)), 0.0, SETTINGS)
