"""The reader's core against a slow, obvious model: chains of links with re-sends, members that fail, take-overs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from seriatim.consumer.core import invariants, reading
from seriatim.consumer.core.reading import Reading
from seriatim.consumer.core.reading_events import (
    BatchesArrived,
    CloseFetch,
    Deliver,
    Drained,
    EndReached,
    Event,
    FetchFailed,
    GiveCredit,
    Heard,
    OpenFetch,
    ReadFrom,
    RowsTaken,
    StartArrived,
    Tick,
    ViewChanged,
    WakeAt,
)
from seriatim.consumer.core.rows import decoded
from seriatim.consumer.core.view import ChainView, LinkView, Place, Side
from seriatim.protocol.batch import EncodedBatch, RecordColumns, encode
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import InvariantBroken
from seriatim.protocol.marks import raised
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, Offset

Identity = tuple[str, int]
Handed = tuple[int, str, int]
"""Offset, source, seq."""


@dataclass
class World:
    """The whole truth: for each link its batches, each a list of identities."""

    links: list[list[list[Identity]]]

    def encoded(self, number: int) -> list[EncodedBatch]:
        made, index = [], 0
        for rows in self.links[number]:
            sources, seqs = [source for source, _ in rows], [seq for _, seq in rows]
            columns = RecordColumns([b"%d" % seq for seq in seqs], seqs, sources, [1] * len(rows))
            made.append(encode(columns, Index(index)))
            index += len(rows)
        return made

    def length(self, number: int) -> int:
        return sum(map(len, self.links[number]))

    def base(self, number: int) -> int:
        return sum(self.length(earlier) for earlier in range(number))

    def marks(self, number: int, batches: int | None = None) -> dict[str, int]:
        """At the start of link `number`, or behind so many of its batches."""
        marks: dict[str, int] = {}
        for earlier in range(number):
            for one in self.encoded(earlier):
                marks = raised(marks, one.header.spans)
        for one in self.encoded(number)[: batches or 0]:
            marks = raised(marks, one.header.spans)
        return marks

    def model(self) -> list[Handed]:
        """Each record once, in order: one pass, record by record."""
        found, marks, offset = [], {}, 0
        for link in self.links:
            for rows in link:
                for source, seq in rows:
                    if seq > marks.get(source, -1):
                        marks[source] = seq
                        found.append((offset, source, seq))
                    offset += 1
        return found


@dataclass
class Reader:
    """Drives the core: a scripted shell.

    `head`: number of the first link that isn't committed to its end, by whoever reads; `kept`: of the first that the chain still
    has; `gone`: offsets that were let go before this reader had read them.
    """

    world: World
    known: int = 1
    is_last_open: bool = True
    is_opening: bool = False
    has_marks: bool = True
    version: int = 1
    registered: dict[str, bool] = field(default_factory=lambda: {"a": True, "b": True})
    starts: int = 1
    answered: tuple[str, ...] = ("a", "b")
    head: int = 0
    kept: int = 0
    gone: set[int] = field(default_factory=set)
    state: Reading = field(default_factory=lambda: Reading(2000))
    now_s: float = 100.0
    wake_at_s: float | None = None
    fetches: dict[int, list[Event]] = field(default_factory=dict)
    handed: list[Handed] = field(default_factory=list)
    taken_bytes: list[int] = field(default_factory=list)
    dropped: int = 0

    def side(self, number: int, member: str) -> Side:
        del number
        incarnation = Incarnation(f"disk-{member}", self.starts) if self.registered[member] else None
        return Side("g1", member, f"{member}:1" if incarnation else "", incarnation)

    def view(self) -> ChainView:
        links = []
        for number in range(self.kept, self.known):
            is_last = number == self.known - 1
            state = LinkState.SEALED
            if is_last and self.is_last_open:
                state = LinkState.OPENING if self.is_opening else LinkState.OPEN
            marks = self.world.marks(number) if self.has_marks else {}
            end = Index(self.world.length(number)) if state is LinkState.SEALED else None
            links.append(
                LinkView(
                    Epoch(number + 1),
                    state,
                    Offset(self.world.base(number)),
                    end,
                    self.side(number, "a"),
                    self.side(number, "b"),
                    marks,
                    answered=self.answered if state is LinkState.SEALED else (),
                )
            )
        return ChainView("c", 1, "q", ChainVersion(self.version), tuple(links))

    def happened(self, event: Event) -> None:
        before = self.state
        self.state, effects = reading.decide(before, event, self.now_s)
        if isinstance(event, ReadFrom):
            self.handed.clear()
            self.taken_bytes.clear()
        else:
            invariants.check_reading(before, self.state, effects)
        for effect in effects:
            match effect:
                case OpenFetch():
                    self.fetches[effect.fetch_id] = self.script(effect)
                case CloseFetch(fetch_id):
                    self.fetches.pop(fetch_id, None)
                case Deliver(delivery):
                    rows = decoded(delivery)
                    self.dropped += rows.dropped
                    columns = rows.columns
                    self.handed += [
                        (offset, columns.source_of(row), columns.seqs[row]) for row, offset in enumerate(rows.offsets)
                    ]
                    self.taken_bytes.append(delivery.size_bytes)
                case WakeAt(at_s):
                    self.wake_at_s = at_s
                case GiveCredit():
                    pass
        assert sum(self.taken_bytes) == self.state.buffered_bytes

    def script(self, order: OpenFetch) -> list[Event]:
        """What a sound member sends: all it has of the link, then the end where it is recorded."""
        number = order.epoch - 1
        batches = self.world.encoded(number)
        first = sum(1 for one in batches if one.header.end_index <= order.from_index)
        at = batches[first].header.first_index if first < len(batches) else Index(self.world.length(number))
        marks = self.world.marks(number, first) if self.has_marks else {}
        events: list[Event] = [StartArrived(order.fetch_id, at, marks)]
        events += [BatchesArrived(order.fetch_id, [one]) for one in batches[first:]]
        if number < self.known - 1 or not self.is_last_open:
            events.append(EndReached(order.fetch_id, Index(self.world.length(number))))
        return events

    # ---- what may happen

    def serve(self, fetch_id: int, most: int = 1) -> None:
        """The next thing that the member says; up to so many batches come together."""
        left = self.fetches.get(fetch_id)
        if not left:
            return
        event = left.pop(0)
        while isinstance(event, BatchesArrived) and len(event.batches) < most and left:
            following = left[0]
            if not isinstance(following, BatchesArrived):
                break
            event = BatchesArrived(fetch_id, [*event.batches, *following.batches])
            left.pop(0)
        self.happened(event)

    def fail(self, fetch_id: int) -> None:
        if self.fetches.pop(fetch_id, None) is not None:
            self.happened(FetchFailed(fetch_id, "broken"))

    def change(self) -> None:
        self.version += 1
        self.happened(ViewChanged(self.view()))

    def grow(self) -> None:
        """The chain's next step: the opening link opens, the open one is sealed and the next listed."""
        if self.is_opening:
            self.is_opening = False
        elif self.known < len(self.world.links):
            self.known += 1
            self.is_opening = True
        else:
            self.is_last_open = False
        self.change()

    def commit(self) -> None:
        """All that has ended, and perhaps more than this reader has read: a reader before it did, whose commit nobody had answered."""
        self.head = self.known - 1

    def tell(self) -> None:
        self.happened(Drained(Epoch(self.head + 1)))

    def let_go(self) -> None:
        """Retention: of all that is committed, read by this reader or not."""
        self.kept = self.head
        number, index = self.state.at.epoch - 1, self.state.at.index
        if number < self.kept:
            at = self.world.base(number) + min(index, self.world.length(number))
            self.gone.update(range(at, self.world.base(self.kept)))
        self.change()

    def take(self) -> None:
        if self.taken_bytes:
            self.happened(RowsTaken(self.taken_bytes.pop(0)))

    def wake(self) -> None:
        if self.wake_at_s is not None:
            self.now_s = max(self.now_s, self.wake_at_s)
            self.wake_at_s = None
            self.happened(Tick())

    def finish(self) -> None:
        """Everything is healed, everything is read."""
        self.registered = {"a": True, "b": True}
        self.change()
        self.tell()
        while self.is_opening or self.known < len(self.world.links) or self.is_last_open:
            self.grow()
        for _ in range(2000):
            if self.taken_bytes:
                self.take()
            elif any(self.fetches.values()):
                self.serve(next(number for number, events in self.fetches.items() if events))
            elif self.state.is_at_end and self.state.at.epoch == len(self.world.links):
                return
            else:
                self.wake()
        raise AssertionError(f"not done: {self.state}")


@st.composite
def worlds(draw) -> World:
    """Up to four links. A later link may begin again with any part of what was sent before: re-sends, some of them."""
    counters = {"one": 0, "two": 0}
    sent: list[Identity] = []
    links = []
    for number in range(draw(st.integers(1, 4))):
        resent = draw(st.integers(0, 6)) if number else 0
        pending = sent[len(sent) - min(resent, len(sent)) :]
        for _ in range(draw(st.integers(0, 8))):
            source = draw(st.sampled_from(["one", "two"]))
            counters[source] += draw(st.integers(1, 3))
            pending.append((source, counters[source]))
            sent.append(pending[-1])
        batches = []
        while pending:
            size = draw(st.integers(1, 4))
            batches.append(pending[:size])
            pending = pending[size:]
        links.append(batches)
    return World(links)


@given(world=worlds(), data=st.data())
@settings(max_examples=400)
def test_each_reader_delivers_what_the_model_does_from_wherever_it_starts(world: World, data: st.DataObject) -> None:
    answered = data.draw(st.sampled_from([("a",), ("b",), ("a", "b"), ()]))
    reader = Reader(world, known=data.draw(st.integers(1, len(world.links))), answered=answered)
    reader.happened(ReadFrom(reader.view(), Place(Epoch(1), Index(0))))
    start = 0
    in_link = ["serve", "fail", "take", "wake", "leave", "return", "stale", "silent", "heard"]
    actions = st.sampled_from([*in_link, "grow", "commit", "tell", "let_go", "take-over"])
    for action in data.draw(st.lists(actions, max_size=40)):
        latest = max(reader.fetches, default=0)
        match action:
            case "serve":
                reader.serve(latest, data.draw(st.integers(1, 4)))
            case "fail":
                reader.fail(latest)
            case "grow" | "take" | "wake" | "commit" | "tell" | "let_go":
                getattr(reader, action)()
            case "leave":
                reader.registered[data.draw(st.sampled_from("ab"))] = False
                reader.change()
            case "return":
                reader.registered = {"a": True, "b": True}
                reader.starts += 1
                reader.change()
            case "heard":
                reader.happened(Heard(latest, Index(data.draw(st.integers(0, 8)))))
            case "silent":  # time passes and nothing comes; perhaps it was this process that stood still
                reader.now_s += data.draw(st.sampled_from([0.1, 0.35, 2.0]))
                reader.happened(Tick())
            case "stale":
                reader.happened(FetchFailed(latest - 1, "an older stream"))
            case "take-over":
                number = data.draw(st.integers(reader.kept, reader.known - 1))
                index = data.draw(st.integers(0, world.length(number) + 2))  # a cursor may lie beyond the end (H22)
                if number == reader.known - 1 and reader.is_last_open:
                    index = min(index, world.length(number))
                start = world.base(number) + min(index, world.length(number))
                reader.gone.clear()
                reader.happened(ReadFrom(reader.view(), Place(Epoch(number + 1), Index(index))))
    reader.finish()
    assert reader.handed == [one for one in world.model() if one[0] >= start and one[0] not in reader.gone]
    offsets = world.base(len(world.links)) - start - len(reader.gone)
    assert len(reader.handed) + reader.dropped >= offsets


@given(world=worlds(), data=st.data())
@settings(max_examples=150)
def test_a_range_ends_exactly_where_it_was_asked_to(world: World, data: st.DataObject) -> None:
    total = world.base(len(world.links))
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))
    reader = Reader(world, known=len(world.links), is_last_open=False)
    view = reader.view()
    if start == end:
        return
    reader.happened(ReadFrom(view, view.place_of(Offset(start)), until=Offset(end)))
    for _ in range(500):
        if reader.state.is_done:
            break
        if reader.taken_bytes:
            reader.take()
        reader.serve(max(reader.fetches, default=0))
    assert reader.state.is_done
    assert not reader.fetches
    assert reader.handed == [one for one in world.model() if start <= one[0] < end]


RESENT = World([[[("one", 1), ("one", 2), ("one", 3)]], [[("one", 2), ("one", 3), ("one", 4)]]])


def test_what_another_reader_had_committed_is_read_to_its_end_as_long_as_it_is_kept() -> None:
    """A commit that nobody had answered counted later, or was never a commit: the reader that went on there passed over the rest of its link."""
    reader = Reader(RESENT, known=2)
    reader.happened(ReadFrom(reader.view(), Place(Epoch(1), Index(0))))
    reader.commit()
    reader.tell()
    reader.finish()
    assert reader.handed == RESENT.model()


@pytest.mark.parametrize("is_told_first", [True, False])
def test_what_another_reader_had_committed_isn_t_waited_for_when_it_was_let_go(is_told_first: bool) -> None:
    reader = Reader(RESENT, known=2)
    reader.happened(ReadFrom(reader.view(), Place(Epoch(1), Index(0))))
    reader.commit()
    for step in (reader.tell, reader.let_go) if is_told_first else (reader.let_go, reader.tell):
        step()
    assert reader.state.at == Place(Epoch(2), Index(0))
    reader.finish()
    assert reader.handed == [(5, "one", 4)]


def test_marks_come_from_the_place_after_a_take_over() -> None:
    reader = Reader(RESENT, known=2)
    reader.happened(ReadFrom(reader.view(), Place(Epoch(2), Index(0))))
    reader.finish()
    assert reader.handed == [(5, "one", 4)]


def test_a_reader_without_the_places_marks_is_found_out() -> None:
    # H6: marks kept only in the cursor; nothing was committed in the second link yet.
    reader = Reader(RESENT, known=2, has_marks=False)
    reader.happened(ReadFrom(reader.view(), Place(Epoch(2), Index(0))))
    reader.finish()
    assert reader.handed != [one for one in RESENT.model() if one[0] >= 3]


def test_leaving_a_link_that_is_not_sealed_is_found_out() -> None:
    reader = Reader(RESENT, known=2)
    view = reader.view()
    first = dataclasses.replace(view.links[0], state=LinkState.LOST, end=None)
    view = dataclasses.replace(view, links=(first, view.links[1]))
    before, _ = reading.decide(Reading(2000), ReadFrom(view, Place(Epoch(1), Index(3))), 0.0)
    assert "lost" in before.waiting_for
    assert before.at == Place(Epoch(1), Index(3))
    # The wrong rule: nothing more came, so the link is over.
    wrong = dataclasses.replace(before, is_at_end=True)
    after, effects = reading.decide(wrong, Tick(), 0.0)
    with pytest.raises(InvariantBroken, match="isn't sealed"):
        invariants.check_reading(before, after, effects)
