"""The reader's and the sender's core behind a path on which a batch takes longer than any fixed patience: both go on.

The path is a model: what is said to one side shares a rate; what lies in buffers passes, even if nobody wants it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from seriatim.consumer.core import reading
from seriatim.consumer.core.reading import Reading
from seriatim.consumer.core.reading_events import (
    BatchesArrived,
    CloseFetch,
    Deliver,
    EndReached,
    Event,
    GiveCredit,
    Heard,
    OpenFetch,
    ReadFrom,
    RowsTaken,
    StartArrived,
    Tick,
    WakeAt,
)
from seriatim.consumer.core.view import ChainView, LinkView, Place, Side
from seriatim.producer.core import events as sending
from seriatim.producer.core import sender
from seriatim.producer.core.events import Grant
from seriatim.producer.core.sender_state import SenderSettings, SenderState
from seriatim.protocol import patience
from seriatim.protocol.batch import EncodedBatch, RecordColumns, encode
from seriatim.protocol.chain import LinkState
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, Offset, Token
from seriatim.protocol.patience import Patience

BATCH_BYTES = 512 * 1024
WORD_BYTES = 100
BUFFERED_BYTES = 1_200_000
"""What gRPC and the kernel took of a connection's messages."""
BEAT_S = 0.1
STEP_S = 0.01
BATCHES = 8
RATES_KBIT_S = (90, 150, 300, 800, 1_500, 4_000, 8_000, 15_000, 100_000)


def took_at_best_s(rate_kbit_s: int) -> float:
    return BATCHES * BATCH_BYTES * 8 / (rate_kbit_s * 1000)


def bound_s(rate_kbit_s: int) -> float:
    """What was sent in vain until the path was known is at most as much as one batch takes, three times over, and its patience."""
    return 3 * took_at_best_s(rate_kbit_s) + 5


def numbered(count: int) -> list[EncodedBatch]:
    return [encode(RecordColumns([b"v"], [seq], "s", [0]), Index(seq)) for seq in range(count)]


@dataclass
class Message:
    stream: int
    left_bytes: float
    arrive: Callable[[], None]


@dataclass
class Path:
    """Each end has a connection; they share the rate. What lies in its buffers can't be taken back."""

    rate_kbit_s: int
    connections: dict[str, deque[Message]] = field(default_factory=dict)

    def say(self, end: str, stream: int, size_bytes: int, arrive: Callable[[], None]) -> None:
        self.connections.setdefault(end, deque()).append(Message(stream, size_bytes, arrive))

    def cancel(self, stream: int) -> None:
        for end, waiting in self.connections.items():
            kept, before_bytes = deque[Message](), 0.0
            for one in waiting:
                if one.stream != stream or before_bytes < BUFFERED_BYTES:
                    kept.append(one)
                before_bytes += one.left_bytes
            self.connections[end] = kept

    def is_idle(self, end: str) -> bool:
        return not self.connections.get(end)

    def pass_on(self, seconds: float) -> None:
        left_bytes = self.rate_kbit_s * 1000 / 8 * seconds
        while left_bytes > 0 and (busy := [one for one in self.connections.values() if one]):
            share = min(left_bytes / len(busy), *(one[0].left_bytes for one in busy))
            for waiting in busy:
                waiting[0].left_bytes -= share
            left_bytes -= share * len(busy)
            for waiting in busy:
                if waiting[0].left_bytes <= 0:
                    waiting.popleft().arrive()


def side(member: str) -> Side:
    return Side("g1", member, f"{member}:1", Incarnation(member, 1))


def chain(end: Index | None) -> ChainView:
    state = LinkState.OPEN if end is None else LinkState.SEALED
    link = LinkView(Epoch(1), state, Offset(0), end, side("a"), side("b"), {})
    return ChainView("c", 1, "q", ChainVersion(1), (link,))


@dataclass
class Served:
    """A fetch, as its member sees it."""

    member: str
    index: int
    credit_bytes: int


@dataclass
class SlowReader:
    """The reading core and two members that have everything. `said_s`: how long what it says is on its way to them."""

    path: Path
    is_sealed: bool = False
    said_s: float = 0.0
    state: Reading = field(default_factory=lambda: Reading(64 * BATCH_BYTES))
    now_s: float = 100.0
    wake_at_s: float | None = None
    streams: dict[int, Served] = field(default_factory=dict)
    beat_at_s: float = 0.0
    delivered: list[int] = field(default_factory=list)
    batches: list[EncodedBatch] = field(default_factory=lambda: numbered(BATCHES))
    said: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)

    def happened(self, event: Event) -> None:
        self.state, effects = reading.decide(self.state, event, self.now_s)
        for effect in effects:
            match effect:
                case OpenFetch() | CloseFetch() | GiveCredit():
                    self.said.append((self.now_s + self.said_s, partial(self._taken, effect)))
                case Deliver(delivery):
                    self.delivered.append(delivery.batch.header.first_index)
                    self.happened(RowsTaken(delivery.size_bytes))
                case WakeAt(at_s):
                    self.wake_at_s = at_s

    def _taken(self, effect: OpenFetch | CloseFetch | GiveCredit) -> None:
        match effect:
            case OpenFetch(fetch_id):
                self.streams[fetch_id] = Served(effect.side.member, effect.from_index, effect.credit_bytes)
                self._say(fetch_id, WORD_BYTES, StartArrived(fetch_id, effect.from_index, {}))
                self._serve(fetch_id)
            case CloseFetch(fetch_id):
                self.streams.pop(fetch_id, None)
                self.path.cancel(fetch_id)
            case GiveCredit(fetch_id, size_bytes):
                self.streams[fetch_id].credit_bytes += size_bytes
                self._serve(fetch_id)

    def _serve(self, fetch_id: int) -> None:
        served = self.streams[fetch_id]
        while served.index < BATCHES and served.credit_bytes > 0:
            batch = self.batches[served.index]
            self._say(fetch_id, BATCH_BYTES, BatchesArrived(fetch_id, (batch,)))
            served.index, served.credit_bytes = served.index + 1, served.credit_bytes - batch.size_bytes
            if self.is_sealed and served.index == BATCHES:
                self._say(fetch_id, WORD_BYTES, EndReached(fetch_id, Index(BATCHES)))

    def _say(self, fetch_id: int, size_bytes: int, event: Event) -> None:
        self.path.say(self.streams[fetch_id].member, fetch_id, size_bytes, lambda: self.happened(event))

    def run(self, within_s: float) -> bool:
        """Whether all was read within this time."""
        view = chain(Index(BATCHES) if self.is_sealed else None)
        self.happened(ReadFrom(view, Place(Epoch(1), Index(0))))
        end_s = self.now_s + within_s
        while self.now_s < end_s and len(self.delivered) < BATCHES:
            self.now_s += STEP_S
            while self.said and self.said[0][0] <= self.now_s:
                self.said.popleft()[1]()
            self.path.pass_on(STEP_S)
            if self.now_s >= self.beat_at_s:
                self.beat_at_s = self.now_s + BEAT_S
                for fetch_id, served in self.streams.items():
                    if self.path.is_idle(served.member):
                        self._say(fetch_id, WORD_BYTES, Heard(fetch_id, Index(BATCHES)))
            look_s = reading.next_look_s(self.state, self.now_s - STEP_S)
            if any(at_s is not None and at_s <= self.now_s for at_s in (look_s, self.wake_at_s)):
                self.wake_at_s = None
                self.happened(Tick())
        assert self.delivered == list(range(len(self.delivered)))
        return len(self.delivered) == BATCHES


@dataclass
class SlowSender:
    """The sender's core, and two groups of which each takes what reaches it, and acknowledges it at once."""

    path: Path
    state: SenderState = field(default_factory=SenderState)
    now_s: float = 100.0
    open_streams: set[int] = field(default_factory=set)
    epoch: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    completed: list[int] = field(default_factory=list)

    def happened(self, event: sending.Event) -> None:
        self.state, effects = sender.decide(self.state, event, self.now_s, SenderSettings())
        for effect in effects:
            match effect:
                case sending.Acquire(request):
                    self.epoch += 1
                    grant = Grant(Epoch(self.epoch), Index(0), dict(self.stored), 0, "route")
                    self.happened(sending.Granted(request, Token(7), grant))
                case sending.OpenStream(stream):
                    self.open_streams.add(stream)
                    self.path.say(self._end(), stream, WORD_BYTES, lambda stream=stream: self._taken(stream, 0, -1))
                case sending.Send(stream, _, batch):
                    end, seq = batch.header.end_index, batch.header.spans[0].last_seq
                    arrive = lambda stream=stream, end=end, seq=seq: self._taken(stream, end, seq)  # noqa: E731
                    self.path.say(self._end(), stream, BATCH_BYTES, arrive)
                case sending.CloseStream(stream):
                    self.open_streams.discard(stream)
                    self.path.cancel(stream)
                case sending.Complete(number) | sending.Resume(number):
                    self.completed.append(number)

    def _end(self) -> str:
        return f"g{self.epoch % 2}"

    def _taken(self, stream: int, next_index: int, seq: int) -> None:
        if stream in self.open_streams:
            if seq >= 0:
                self.stored["s"] = seq
            self.happened(sending.Acknowledged(stream, Index(next_index)))

    def run(self, within_s: float) -> bool:
        """Whether all was acknowledged within this time."""
        self.happened(sending.Elected())
        for number, batch in enumerate(numbered(BATCHES)):
            self.happened(sending.BatchClosed(number, batch))
        end_s = self.now_s + within_s
        while self.now_s < end_s and len(self.completed) < BATCHES:
            self.now_s += STEP_S
            self.path.pass_on(STEP_S)
            wake_s = sender.wake_at_s(self.state, SenderSettings())
            if wake_s is not None and wake_s <= self.now_s:
                self.happened(sending.Tick())
        assert self.completed == list(range(len(self.completed)))
        return len(self.completed) == BATCHES


def slow_ones(path: Path) -> list[SlowReader | SlowSender]:
    return [SlowReader(path), SlowReader(path, is_sealed=True), SlowSender(path)]


@pytest.mark.parametrize("rate_kbit_s", RATES_KBIT_S)
@pytest.mark.parametrize("number", range(3), ids=["reader", "reader of a sealed link", "sender"])
def test_who_stands_behind_a_slow_path_goes_on(rate_kbit_s: int, number: int) -> None:
    assert slow_ones(Path(rate_kbit_s))[number].run(bound_s(rate_kbit_s))


FAR_S = (0.3, 1.5, 2.5, 4.0, 8.0)


def far_reader(said_s: float, *, is_sealed: bool = False) -> SlowReader:
    """What a member may send at a time is two batches: it says that more is committed until it hears that some were taken."""
    return SlowReader(Path(100_000), is_sealed=is_sealed, said_s=said_s, state=Reading(2 * numbered(1)[0].size_bytes))


@pytest.mark.parametrize("said_s", FAR_S)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_reader_whose_word_takes_long_goes_on(said_s: float, is_sealed: bool) -> None:
    assert far_reader(said_s, is_sealed=is_sealed).run(5 + 10 * said_s)


@pytest.mark.parametrize("said_s", [one for one in FAR_S if one > 2])
def test_leaving_whoever_owes_something_for_a_second_is_found_out(
    said_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "OWED_S", 1.0)
    assert not far_reader(said_s).run(5 + 10 * said_s)


@pytest.mark.parametrize("number", range(3), ids=["reader", "reader of a sealed link", "sender"])
def test_a_fixed_limit_is_found_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MAX_S", 5.0)
    assert not slow_ones(Path(300))[number].run(5 * bound_s(300))


@pytest.mark.parametrize("number", range(3), ids=["reader", "reader of a sealed link", "sender"])
def test_forgetting_what_the_path_showed_is_found_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "heard", lambda self, _gap_s, _limit_s: self)
    assert not slow_ones(Path(300))[number].run(bound_s(300))


@pytest.mark.parametrize("number", range(3), ids=["reader", "reader of a sealed link", "sender"])
def test_pouring_out_all_again_is_found_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "is_tried", False)
    assert not slow_ones(Path(90))[number].run(bound_s(90))


def test_a_slow_path_that_is_fast_again_is_forgotten_within_a_minute() -> None:
    path = Patience()
    for gap_s in (0.3, 0.6, 1.2, 2.4, 4.8):
        path = path.heard(gap_s, 0.3)
    assert path.limit_s(0.3) == 9.6
    for _ in range(600):
        path = path.heard(0.1, 0.3)
    assert path.limit_s(0.3) == 0.3


def test_the_sleep_of_this_process_is_not_put_down_to_the_path() -> None:
    assert Patience().heard(1000.0, 0.3).limit_s(0.3) == 0.6


def test_a_first_answer_that_takes_less_than_it_may_tells_nothing_of_the_later_ones() -> None:
    assert Patience().heard(0.4, 1.0).limit_s(0.3) == 0.3


def test_how_long_a_first_answer_took_counts_for_first_answers_only_and_not_for_long() -> None:
    path = Patience().answered(20.0)  # a cut healed
    assert [path.limit_s(0.3), path.limit_s(0.3, is_answered=False)] == [0.3, 2.0]
    for _ in range(3):
        path = path.answered(0.001)
    assert path.limit_s(0.3, is_answered=False) == 0.3
