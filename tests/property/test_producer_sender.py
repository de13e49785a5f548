"""Any interleaving of acknowledgements, breaks, grants and deposals: what must hold of every record, against a slow model.

The model of the world keeps two things: what was ever put on a stream (by token), and what the link's members hold. A
resume point is drawn from what they hold, so that it covers batches wholly, in part or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from seriatim.producer.core import events
from seriatim.producer.core.events import Effect, Event, Grant
from seriatim.producer.core.invariants import broken, broken_step
from seriatim.producer.core.sender import decide
from seriatim.producer.core.sender_state import Phase, SenderSettings, SenderState
from seriatim.protocol import errors
from seriatim.protocol.batch import RecordColumns, decode, encode
from seriatim.protocol.names import Epoch, Index, Token

SETTINGS = SenderSettings(window_batches=3, tries_on_link=2)
Step = tuple[SenderState, list[Effect]]
Decide = Callable[[SenderState, Event, float, SenderSettings], Step]


class World(RuleBasedStateMachine):
    """One sender in a world that may do anything to it, and remembers everything."""

    decide: Decide = staticmethod(decide)

    def __init__(self) -> None:
        super().__init__()
        self.state = SenderState()
        self.now_s = 0.0
        self.token = 0
        self.epoch = 1
        self.next_seq = 0
        self.numbers = 0
        self.rows: dict[int, list[tuple[str, int]]] = {}
        """Identities of the batches that aren't at their end, by number."""
        self.ended: dict[tuple[int, str, int], str] = {}
        """How each record ended, by token and identity."""
        self.content: dict[tuple[str, int], bytes] = {}
        self.stream_token = 0
        self.on_stream: list[tuple[str, int]] = []
        """Identities on the present stream, in order."""
        self.link: list[tuple[str, int]] = []
        """What a member of the present link holds, in order: all of it may be on two members, or only a part."""
        self.stored_two: dict[str, int] = {}
        """Marks up to which two members hold everything."""

    # ---- running steps -------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        self.now_s += 0.01
        before = self.state
        self.state, effects = type(self).decide(before, event, self.now_s, SETTINGS)
        assert broken_step(before, self.state, effects) == []
        for effect in effects:
            self.run(effect)

    def run(self, effect: Effect) -> None:
        match effect:
            case events.TellElected(token, _):
                self.next_seq = self.stored_two.get("s", -1) + 1
                assert token == self.token
            case events.OpenStream(_, token, _):
                assert token == self.token, "H4: a stream was opened with an older token"
                self.stream_token, self.on_stream = token, []
            case events.Send(_, number, batch):
                self.send(number, batch)
            case events.Complete(number):
                self.end(number, "acknowledged", lambda source, seq: True)
                assert number not in self.rows
            case events.Resume(number, marks, is_whole):
                self.end(number, "resumed", lambda source, seq: seq <= marks.get(source, -1))
                assert (number not in self.rows) == is_whole
            case events.FailAll():
                for number in list(self.rows):
                    self.end(number, "unknown", lambda source, seq: True)

    def send(self, number: int, batch: object) -> None:
        columns = decode(batch)  # type: ignore[arg-type]
        assert self.stream_token == self.token, "H4: something was sent with an older token"
        identities = [(columns.source_of(row), columns.seqs[row]) for row in range(len(columns))]
        assert identities == self.rows[number], "a batch was sent with other records than it has left"
        for identity, value in zip(identities, columns.values, strict=True):
            assert self.content.setdefault(identity, value) == value, "one identity for two contents"
        assert not self.on_stream or self.on_stream[-1][1] < identities[0][1], "records overtook one another"
        self.on_stream += identities

    def end(self, number: int, how: str, is_ended: Callable[[str, int], bool]) -> None:
        left = []
        for source, seq in self.rows[number]:
            if not is_ended(source, seq):
                left.append((source, seq))
                continue
            identity = (self.token, source, seq)
            assert identity not in self.ended, "a record ended twice"
            self.ended[identity] = how
            if how == "resumed":
                assert seq <= self.stored_two.get(source, -1), "H2: a record is complete that two members don't hold"
            if how == "acknowledged":
                assert (source, seq) in self.link, "a record is complete that was not acknowledged"
        if left:
            self.rows[number] = left
        else:
            del self.rows[number]

    # ---- what may happen -----------------------------------------------------------------------------------

    def is_in(self, *phases: Phase) -> bool:
        return self.state.phase in phases

    @precondition(lambda self: self.is_in(Phase.STANDING_BY))
    @rule()
    def elected(self) -> None:
        self.feed(events.Elected())

    @precondition(lambda self: not self.is_in(Phase.STANDING_BY, Phase.ENDED) and self.state.is_told)
    @rule(count=st.integers(1, 4))
    def batch_closed(self, count: int) -> None:
        self.numbers += 1
        seqs = list(range(self.next_seq, self.next_seq + count))
        self.next_seq += count
        self.rows[self.numbers] = [("s", seq) for seq in seqs]
        values = [self.content.get(("s", seq), f"{seq}".encode()) for seq in seqs]
        self.feed(events.BatchClosed(self.numbers, encode(RecordColumns(values, seqs, "s", [0] * count), Index(0))))

    @precondition(lambda self: self.is_in(Phase.SENDING) and self.state.in_flight)
    @rule(batches=st.integers(1, 3))
    def acknowledged(self, batches: int) -> None:
        flying = self.state.pending[: self.state.in_flight]
        last = flying[min(batches, len(flying)) - 1].batch
        for pending in flying[:batches]:
            self.link += [identity for identity in self.rows[pending.number] if identity not in self.link]
        self.stored_two["s"] = max(self.stored_two.get("s", -1), last.header.spans[0].last_seq)
        self.feed(events.Acknowledged(self.state.stream, last.header.end_index))

    @precondition(lambda self: self.is_in(Phase.SENDING))
    @rule(rows=st.integers(0, 6), both=st.booleans())
    def stored_without_acknowledgement(self, rows: int, both: bool) -> None:
        """Records reach one member or both, and the acknowledgement never arrives."""
        for identity in [one for one in self.on_stream if one not in self.link][:rows]:
            self.link.append(identity)
            if both and identity[1] == self.stored_two.get("s", -1) + 1:
                self.stored_two["s"] = identity[1]

    @precondition(lambda self: self.is_in(Phase.SENDING))
    @rule(error=st.sampled_from([errors.Sealed, errors.PeerLost, errors.WrongIndex, errors.OlderVersion, None]))
    def stream_ended(self, error: type[errors.SeriatimError] | None) -> None:
        stream = self.state.stream
        self.feed(events.StreamBroken(stream, "broken") if error is None else events.Refused(stream, error("refused")))

    @precondition(lambda self: self.is_in(Phase.SENDING))
    @rule(is_late=st.booleans())
    def refused_as_resend(self, is_late: bool) -> None:
        marks = dict(self.stored_two)
        error = errors.PartlyResend("part", marks=marks) if is_late else errors.Resend("again", marks=marks)
        self.feed(events.Refused(self.state.stream, error))

    @precondition(lambda self: self.is_in(Phase.ACQUIRING))
    @rule(is_known=st.booleans(), is_next_link=st.booleans())
    def granted(self, is_known: bool, is_next_link: bool) -> None:
        if self.state.token == 0:
            self.token += 1
        if is_next_link or self.state.failed_epoch:
            self.epoch += 1
            self.link = []
        marks = dict(self.stored_two) if is_known else None
        grant = Grant(Epoch(self.epoch), Index(len(self.link)), marks, None, "route")
        self.feed(events.Granted(self.state.request, Token(self.token), grant))

    @precondition(lambda self: self.is_in(Phase.ACQUIRING))
    @rule(is_wait=st.booleans())
    def not_granted(self, is_wait: bool) -> None:
        request = self.state.request
        if is_wait:
            if self.state.token == 0:
                self.token += 1
            self.feed(events.WaitAnswered(request, Token(self.token), 0.05))
        else:
            self.feed(events.AcquireFailed(request, errors.Unreachable("down")))

    @rule(later_s=st.sampled_from([0.01, 0.2, 1.05, 2.0]))
    def time_passes(self, later_s: float) -> None:
        self.now_s += later_s
        self.feed(events.Tick())

    @precondition(lambda self: not self.is_in(Phase.STANDING_BY, Phase.ENDED))
    @rule(is_fenced=st.booleans())
    def deposed(self, is_fenced: bool) -> None:
        if is_fenced and self.is_in(Phase.SENDING):
            self.feed(events.Refused(self.state.stream, errors.Fenced("token")))
        else:
            self.feed(events.Deposed("suspended"))
        assert self.rows == {}, "a record of a deposed sender has no end"

    @rule(stream=st.integers(0, 3), index=st.integers(0, 50))
    def late_word(self, stream: int, index: int) -> None:
        """Something of an earlier stream arrives."""
        if stream < self.state.stream:
            before = self.state
            self.feed(events.Acknowledged(stream, Index(index)))
            self.feed(events.StreamBroken(stream, "late"))
            assert self.state == before

    @invariant()
    def sound(self) -> None:
        assert broken(self.state, SETTINGS) == []
        assert [pending.number for pending in self.state.pending] == sorted(self.rows)


BUSY = settings(max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck))


def test_any_interleaving_keeps_every_promise() -> None:
    run_state_machine_as_test(World, settings=BUSY)


def _all_of_one_member(state: SenderState, event: Event, now_s: float, given: SenderSettings) -> Step:
    """H2 broken: what the last stream carried counts as kept when the next link is granted."""
    if isinstance(event, events.Granted) and event.grant.resume_point is not None and state.pending:
        last = state.pending[0].batch.header.spans[0].last_seq
        marks = {"s": max(last, event.grant.resume_point.get("s", -1))}
        event = replace(event, grant=replace(event.grant, resume_point=marks))
    return decide(state, event, now_s, given)


def _keeps_its_records(state: SenderState, event: Event, now_s: float, given: SenderSettings) -> Step:
    """H4 broken: a deposed sender keeps its batches for its next term."""
    after, effects = decide(state, event, now_s, given)
    if after.phase is Phase.STANDING_BY and state.pending:
        after = replace(after, pending=state.pending)
        effects = [effect for effect in effects if not isinstance(effect, events.FailAll)]
    return after, effects


def _old_token(state: SenderState, event: Event, now_s: float, given: SenderSettings) -> Step:
    """H4 broken: a re-elected sender goes on under its old token."""
    after, effects = decide(state, event, now_s, given)
    if after.phase is Phase.STANDING_BY and state.token:
        after = replace(after, token=state.token)
    return after, effects


@pytest.mark.parametrize("wrong", [_all_of_one_member, _keeps_its_records, _old_token])
def test_a_wrong_rule_is_found(wrong: Decide) -> None:
    class WrongWorld(World):
        decide = staticmethod(wrong)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            WrongWorld,
            settings=settings(
                BUSY,
                max_examples=2000,
                database=None,
                derandomize=True,
                phases=[hypothesis.Phase.generate],
                print_blob=False,
                report_multiple_bugs=False,
            ),
        )
