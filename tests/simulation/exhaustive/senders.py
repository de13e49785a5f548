"""Instances of a sending application: the sender core, driven as `producer.loop` does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from seriatim.producer.core import events, invariants
from seriatim.producer.core.sender import Phase, SenderSettings, SenderState, decide
from seriatim.producer.core.timing import AcknowledgementTiming
from seriatim.protocol import batch
from seriatim.protocol.batch import EncodedBatch, RecordColumns
from seriatim.protocol.names import Epoch, Index, Token, automatic_seq
from seriatim.protocol.patience import Patience
from tests.simulation.exhaustive.bounds import Bounds
from tests.simulation.exhaustive.values import Value, shared

SOURCE = "s"
SETTINGS = SenderSettings(tries_on_link=1, late_s=1e9)
_PATIENT = Patience()
_FRESH = AcknowledgementTiming()
Order = tuple


class Sender(NamedTuple):
    """`state`: of the core. `is_elected`: it believes so. `term`: the election in which it stands, or stood last."""

    state: Value
    is_elected: bool = False
    term: int = 0


def record(seq: int) -> EncodedBatch:
    """One record, as a batch of its own."""
    return batch.encode(RecordColumns([b"%d" % seq], [seq], SOURCE, [0]), Index(0))


def seq_of(encoded: EncodedBatch) -> int:
    return encoded.header.spans[0].last_seq


class SenderStep:
    """One event and all that follows from it at once. `orders`: for the world, in order."""

    def __init__(self, sender: Sender, bounds: Bounds) -> None:
        self.state: SenderState = sender.state.content
        self.is_elected = sender.is_elected
        self.term = sender.term
        self.orders: list[Order] = []
        self._bounds = bounds

    def frozen(self) -> Value:
        state = self.state
        # Numbers of requests and streams only tell the present one from earlier ones, whose answers never come here;
        # times and what is learnt from them only say when a deadline passes, which may be at any time.
        pending = tuple(replace(one, sent_at_s=0.0) if one.sent_at_s else one for one in state.pending)
        plain = replace(
            state,
            request=1 if state.phase is Phase.ACQUIRING else 0,
            stream=1 if state.phase is Phase.SENDING else 0,
            failure="failed" if state.failure else "",
            progress_at_s=0.0,
            answered_at_s=0.0,
            is_excused=False,
            has_progress=False,
            timing=_FRESH,
            patience=_PATIENT,
            tries=0,
            retry_at_s=0.0,
            pending=pending,
        )
        return shared(Sender(shared(plain), self.is_elected, self.term))

    def take(self, event: events.Event, now_s: float = 0.0) -> None:
        before = self.state
        self.state, effects = decide(before, event, now_s, SETTINGS)
        wrong = invariants.broken(self.state, SETTINGS) + invariants.broken_step(before, self.state, effects)
        if wrong:
            raise AssertionError("; ".join(wrong))
        for effect in effects:
            self._run(effect)

    def _run(self, effect: events.Effect) -> None:
        match effect:
            case events.Acquire():
                self.orders.append(("acquire", int(effect.token), int(effect.failed_epoch)))
            case events.OpenStream():
                self.orders.append(("open", effect.token, effect.grant.route, int(effect.grant.next_index)))
            case events.CloseStream():
                self.orders.append(("close",))
            case events.Send():
                self.orders.append(("send", shared(effect.batch)))
            case events.Complete():
                self.orders.append(("complete", effect.number, int(effect.epoch), int(effect.first_index)))
            case events.Resume():
                self.orders.append(("resume", effect.number))
            case events.TellElected():
                self._elected(effect)
            case events.StandAgain():
                self.is_elected = False
                self.orders.append(("stand again",))
            case events.Stop():
                raise AssertionError(f"the sender stopped: {effect.error}")
            case events.FailAll() | events.TellDeposed():
                pass

    def _elected(self, effect: events.TellElected) -> None:
        """The application sends what it has, as soon as it is told."""
        if self._bounds.own:
            seqs = [automatic_seq(effect.token, number) for number in range(self._bounds.own)]
        else:
            stored = (effect.grant.resume_point or {}).get(SOURCE, 0)
            seqs = list(range(stored + 1, self._bounds.records + 1))
            self.orders += [("resume", seq) for seq in range(1, stored + 1)]  # it goes on behind what is stored
        self.orders.append(("records", tuple(seqs)))

    # ---- what happens

    def elected(self, term: int) -> None:
        self.is_elected, self.term = True, term
        self.take(events.Elected())

    def deposed(self) -> None:
        self.is_elected = False
        self.take(events.Deposed("another instance is first in line"))

    def granted(self, grant: Any, route: Value) -> None:
        resume_point = dict(grant.resume_point) if grant.is_resume_known else None
        self.take(
            events.Granted(
                self.state.request,
                Token(grant.token),
                events.Grant(Epoch(grant.link.epoch), grant.next_index, resume_point, grant.base, route),
            )
        )
        handed = [order for order in self.orders if order[0] == "records"]
        for seq in handed[0][1] if handed else ():
            self.take(events.BatchClosed(seq, record(seq)))

    def waited(self) -> None:
        self.take(events.Tick(), self.state.retry_at_s)

    def deadline_passed(self) -> None:
        self.take(events.Tick(), 1e6)
