"""Golden traces of the reader's core: events in, orders out, as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.consumer.core import reading, reading_events
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
    LookAtChain,
    OpenFetch,
    ReadFrom,
    RowsTaken,
    StartArrived,
    Stopped,
    Tick,
    ViewChanged,
    WakeAt,
)
from seriatim.consumer.core.view import ChainView, LinkView, Place, Side
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.chain import LinkState
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, Offset, beyond_abandoned
from seriatim.protocol.patience import Patience


def line(effect: reading_events.Effect) -> str:
    match effect:
        case OpenFetch():
            return f"open {effect.fetch_id}: link {effect.epoch} at {effect.side} from {effect.from_index}"
        case CloseFetch(fetch_id):
            return f"close {fetch_id}"
        case GiveCredit(fetch_id, size_bytes):
            return f"credit {fetch_id}: {size_bytes}"
        case Deliver(delivery):
            resends = "" if delivery.marks is None else " with re-sends"
            return f"deliver link {delivery.epoch} {delivery.start}..{delivery.stop}{resends}"
        case WakeAt(at_s):
            return f"wake at {at_s:g}"
        case LookAtChain():
            return "look at the chain"


class Trace:
    def __init__(self, limit_bytes: int = 1_000_000) -> None:
        self.state = Reading(limit_bytes)

    def __call__(self, event: Event, now_s: float = 0.0) -> list[str]:
        self.state, effects = reading.decide(self.state, event, now_s)
        return [line(effect) for effect in effects]


def side(member: str, start: int | None = 1) -> Side:
    return Side("g1", member, f"{member}:1", None if start is None else Incarnation(member, start))


def link(epoch: int, state: LinkState, base: int | None = 0, end: int | None = None, **sides: int | None) -> LinkView:
    return LinkView(
        Epoch(epoch),
        state,
        None if base is None else Offset(base),
        None if end is None else Index(end),
        side("a", sides.get("a", 1)),
        side("b", sides.get("b", 1)),
        {},
        are_marks_known=base is not None,
    )


def chain(*links: LinkView, version: int = 1) -> ChainView:
    return ChainView("c", 1, "q", ChainVersion(version), links)


def batch(fetch_id: int, first_index: int, seqs: list[int]) -> BatchesArrived:
    columns = RecordColumns([b"v" * 100] * len(seqs), seqs, "s", [1] * len(seqs))
    encoded = encode(columns, Index(first_index))
    return BatchesArrived(fetch_id, [encoded])


START = Place(Epoch(1), Index(0))


def test_from_one_link_to_the_next_with_a_resend() -> None:
    trace = Trace()
    opened = chain(link(1, LinkState.OPEN))
    assert trace(ReadFrom(opened, START)) == ["open 1: link 1 at g1-b from 0"]
    assert trace(StartArrived(1, Index(0), {})) == []
    assert trace(batch(1, 0, [1, 2, 3])) == ["deliver link 1 0..3"]
    sealed = link(1, LinkState.SEALED, end=3)
    assert trace(ViewChanged(chain(sealed, link(2, LinkState.OPENING, base=3), version=2))) == [
        "close 1",
        "wake at 0.3",
    ]
    assert trace.state.waiting_for == "link 2 to be opened"
    assert trace(ViewChanged(chain(sealed, link(2, LinkState.OPEN, base=3), version=3))) == [
        "open 2: link 2 at g1-b from 0"
    ]
    assert trace(StartArrived(2, Index(0), {"s": 1})) == []
    assert trace(batch(2, 0, [3, 4])) == ["deliver link 2 0..2 with re-sends"]


def together(*arrived: BatchesArrived) -> BatchesArrived:
    return replace(arrived[0], batches=[one for event in arrived for one in event.batches])


def test_batches_that_come_together_are_taken_one_by_one() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {"s": 0}))
    assert trace(together(batch(1, 0, [1, 2]), batch(1, 2, [2]), batch(1, 3, [3]))) == [
        "deliver link 1 0..2",
        "deliver link 1 2..3 with re-sends",
        "deliver link 1 3..4",
    ]
    # What was there already, what comes next, and something behind a gap: the gap ends it, what came before it counts.
    assert trace(together(batch(1, 3, [3]), batch(1, 4, [4]), batch(1, 6, [6]))) == [
        "deliver link 1 4..5",
        "close 1",
        "open 2: link 1 at g1-a from 5",
    ]
    assert trace.state.failures == 1


def test_who_is_stopped_reads_nothing_more_and_keeps_nothing() -> None:
    trace = Trace()
    opened = chain(link(1, LinkState.OPEN))
    trace(ReadFrom(opened, START))
    trace(StartArrived(1, Index(0), {}))
    trace(batch(1, 0, [1]))
    assert trace(Stopped()) == ["close 1"]
    assert (trace.state.at, trace.state.room_bytes) == (None, 1_000_000)
    assert trace.state.waiting_for == "being elected"
    for event in (batch(1, 1, [2]), Tick(), ViewChanged(replace(opened, version=ChainVersion(2)))):
        assert trace(event) == []


def test_a_member_that_sends_all_ends_the_link() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {}))
    trace(batch(1, 0, [1, 2, 3]))
    assert trace(EndReached(1, Index(3))) == ["close 1", "wake at 0.3"]  # the chain tells of it later
    assert (trace.state.is_at_end, trace.state.at, trace.state.end_offset) == (True, Place(Epoch(1), Index(3)), 3)
    assert trace.state.waiting_for == "the next link"
    followed = chain(link(1, LinkState.SEALED, end=3), link(2, LinkState.OPEN, base=3), version=2)
    assert trace(ViewChanged(followed)) == ["open 2: link 2 at g1-b from 0"]


@pytest.mark.parametrize("head", [0, 1, 2])
def test_a_link_that_was_let_go_is_read_only_for_who_was_told_that_the_next_one_is_the_head(head: int) -> None:
    """Else who reads a range, or was put back there, would go on behind records that it never had."""
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(Drained(Epoch(head)))
    orders = trace(ViewChanged(chain(link(2, LinkState.OPEN, base=3), version=2)))
    if head == 2:
        assert orders == ["close 1", "open 2: link 2 at g1-b from 0"]
    else:
        assert (orders, trace.state.waiting_for) == (["close 1"], "link 1, which the chain doesn't have")


def test_all_is_delivered_where_the_view_has_no_more_and_its_end_is_known() -> None:
    def told(committed: int, version: int = 1, **changes) -> ChainView:
        last = replace(link(1, LinkState.OPEN), committed=Index(committed), is_committed_exact=True)
        return chain(replace(last, **changes), version=version)

    trace = Trace()
    assert not trace.state.has_all_of(told(0))
    trace(ReadFrom(told(0), START))
    assert trace.state.has_all_of(told(0))
    trace(StartArrived(1, Index(0), {}))
    trace(batch(1, 0, [1, 2, 3]))
    assert [trace.state.has_all_of(told(committed)) for committed in (2, 3, 4)] == [True, True, False]
    assert not trace.state.has_all_of(told(3, is_committed_exact=False))
    trace(EndReached(1, Index(3)))
    assert trace.state.has_all_of(told(3))
    assert trace.state.has_all_of(chain())  # retention has let it go
    following = link(2, LinkState.OPEN, base=3)
    followed = chain(link(1, LinkState.SEALED, end=3), replace(following, committed=Index(1), is_committed_exact=True))
    assert not trace.state.has_all_of(followed)  # the reader was told of no next link
    trace(ViewChanged(replace(followed, version=ChainVersion(2))))
    assert not trace.state.has_all_of(followed)
    trace(StartArrived(2, Index(0), {}))
    trace(batch(2, 0, [4]))
    assert trace.state.has_all_of(followed)
    assert not trace.state.has_all_of(chain(link(1, LinkState.SEALED, end=3), replace(following, base=None)))
    trace(Stopped())
    assert not trace.state.has_all_of(followed)


def test_h6_the_marks_of_a_link_s_start_count_also_where_what_is_before_it_was_not_read() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {}))
    trace(batch(1, 0, [1, 2, 3]))
    behind = replace(link(3, LinkState.OPEN, base=6), marks={"s": 6})
    assert trace(ViewChanged(chain(link(1, LinkState.SEALED, end=3), behind, version=2)))[-1].startswith(
        "open 2: link 3"
    )
    trace(StartArrived(2, Index(0), {}))
    assert trace(batch(2, 0, [6, 7])) == ["deliver link 3 0..2 with re-sends"]


def test_start_in_the_middle_of_a_batch() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), Place(Epoch(1), Index(5))))
    trace(StartArrived(1, Index(4), {"s": 4}))
    assert trace(batch(1, 4, [5, 6, 7])) == ["deliver link 1 5..7"]


def test_to_the_other_member_at_once_and_back_after_a_while() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    assert trace(FetchFailed(1, "gone"), 10.0) == ["open 2: link 1 at g1-a from 0"]
    assert trace(FetchFailed(2, "gone too"), 10.0) == ["wake at 10.1"]
    assert trace.state.waiting_for == "g1-a: gone too"
    assert trace(Tick(), 10.1) == ["open 3: link 1 at g1-b from 0"]


def test_what_failed_before_something_arrived_or_in_an_earlier_link_is_past() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    assert trace(FetchFailed(1, "gone"), 10.0) == ["open 2: link 1 at g1-a from 0"]
    trace(StartArrived(2, Index(0), {"s": 1}), 10.0)  # of which the other one had said nothing
    assert trace(batch(2, 0, [1, 2]), 10.0) == ["deliver link 1 0..2 with re-sends"]
    assert trace(FetchFailed(2, "gone"), 10.0) == ["open 3: link 1 at g1-b from 2"]
    trace(StartArrived(3, Index(2), {}), 10.0)
    assert trace(batch(3, 2, [2]), 10.0) == ["deliver link 1 2..3 with re-sends"]
    assert trace(FetchFailed(3, "gone"), 10.0) == ["open 4: link 1 at g1-a from 3"]
    ended = chain(link(1, LinkState.SEALED, end=3), link(2, LinkState.OPEN, base=3), version=2)
    assert trace(ViewChanged(ended), 10.0) == ["close 4", "open 5: link 2 at g1-b from 0"]
    assert trace(FetchFailed(5, "gone"), 10.0) == ["open 6: link 2 at g1-a from 0"]


def test_the_only_member_there_is_tried_again_after_a_while() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN, a=None)), START), 10.0)
    assert trace(FetchFailed(1, "gone"), 10.0) == ["wake at 10.05"]


def test_nothing_is_fetched_while_there_is_no_room_for_it() -> None:
    trace = Trace(limit_bytes=100)
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {}))
    one = batch(1, 0, [1])
    trace(one)
    assert trace(FetchFailed(1, "gone")) == []
    assert trace(RowsTaken(one.batches[0].size_bytes)) == ["open 2: link 1 at g1-a from 1"]


def test_who_failed_is_tried_at_once_when_it_is_another_one_and_not_because_the_chain_was_seen_again() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    trace(FetchFailed(1, "gone"), 10.0)
    assert trace(FetchFailed(2, "gone too"), 10.0) == ["wake at 10.1"]
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN), version=2)), 10.01) == ["wake at 10.1"]
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN, b=2), version=3)), 10.02) == [
        "open 3: link 1 at g1-b from 0"
    ]


@pytest.mark.parametrize(
    "changed", [link(1, LinkState.SEALED, end=3), link(1, LinkState.CLOSING, b=2)], ids=["end known", "member back"]
)
def test_what_failed_before_the_link_changed_makes_nobody_wait_longer_after_it(changed: LinkView) -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.CLOSING)), START), 10.0)
    for number in range(1, 13):  # both members are away
        trace(Tick(), 10.0 + number * reading.RETRY_MAX_S)
        trace(FetchFailed(number, "gone"), 10.0 + number * reading.RETRY_MAX_S)
    assert trace.state.failures == 12
    trace(ViewChanged(chain(changed, version=2)), 50.0)
    trace(FetchFailed(13, "it wasn't told yet"), 50.0)
    assert trace(FetchFailed(14, "it wasn't told yet"), 50.0)[-1] == "wake at 50.1"


def test_a_member_that_left_or_came_back_changed_is_left() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN, a=2)))) == []  # the other one says nothing of it
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN, b=None)))) == ["close 1", "open 2: link 1 at g1-a from 0"]
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN, a=None, b=None)))) == ["close 2"]
    assert trace.state.waiting_for == "g1-a or g1-b: neither is registered"
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN, a=None, b=2)))) == ["open 3: link 1 at g1-b from 0"]


def test_a_lost_link_stops_the_reading_until_its_end_is_known() -> None:
    trace = Trace()
    lost = chain(link(1, LinkState.LOST), link(2, LinkState.OPEN, base=None))
    assert trace(ReadFrom(lost, START)) == []
    assert "lost" in trace.state.waiting_for
    found = chain(link(1, LinkState.SEALED, end=0), link(2, LinkState.OPEN), version=2)
    assert trace(ViewChanged(found)) == ["open 1: link 2 at g1-b from 0"]


def test_h16_of_a_queue_that_was_deleted_or_made_again_nothing_more_is_read() -> None:
    opened = chain(link(1, LinkState.OPEN))
    for changed in (replace(opened, version=ChainVersion(2), is_deleted=True), replace(opened, queue_id=2)):
        trace = Trace()
        trace(ReadFrom(opened, START))
        assert trace(ViewChanged(changed)) == ["close 1"]
        assert trace.state.waiting_for == "nothing: the queue was deleted"


def test_without_the_base_of_its_link_nothing_is_read() -> None:
    trace = Trace()
    lost = chain(link(1, LinkState.LOST), link(2, LinkState.OPEN, base=None))
    assert trace(ReadFrom(lost, Place(Epoch(2), Index(0)))) == []
    assert "earlier link is lost" in trace.state.waiting_for


def test_a_cursor_beyond_the_end_counts_as_the_end() -> None:
    # H22
    trace = Trace()
    view = chain(link(1, LinkState.SEALED, end=3), link(2, LinkState.OPEN, base=3))
    assert trace(ReadFrom(view, Place(Epoch(1), Index(9)))) == ["open 1: link 2 at g1-b from 0"]


def test_a_member_that_ends_early_or_leaves_a_gap_is_not_believed() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {}))
    assert trace(EndReached(1, Index(3))) == ["close 1", "open 2: link 1 at g1-a from 0"]
    trace(StartArrived(2, Index(0), {}))
    assert trace(batch(2, 2, [3, 4]))[0] == "close 2"
    assert trace.state.at == START
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.SEALED, end=2)), START))
    assert trace(batch(1, 0, [1]))[0] == "close 1"  # not having said where it starts
    trace(StartArrived(2, Index(0), {}))
    assert trace(batch(2, 0, [1, 2, 3]))[0] == "close 2"  # over the end
    assert trace.state.at == START


def test_a_member_that_sends_nothing_of_a_sealed_link_is_left() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    sealed = chain(link(1, LinkState.SEALED, end=3), version=2)
    assert trace(ViewChanged(sealed), 50.0) == ["wake at 51"]
    assert trace(Tick(), 51.0) == ["close 1", "open 2: link 1 at g1-a from 0", "wake at 52"]


def test_a_member_that_speaks_and_sends_nothing_of_a_sealed_link_is_left_whatever_else_the_chain_shows() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    trace(Heard(1), 49.9)
    sealed = link(1, LinkState.SEALED, end=3)
    assert trace(ViewChanged(chain(sealed, version=2)), 50.0) == ["wake at 51"]
    for number in range(1, 5):
        trace(Heard(1), 50.0 + number / 5)
        later = chain(
            sealed, *(link(epoch, LinkState.OPENING, base=3) for epoch in range(2, 2 + number)), version=2 + number
        )
        assert trace(ViewChanged(later), 50.0 + number / 5) == ["wake at 51"]
    assert trace(Tick(), 51.0)[:2] == ["close 1", "open 2: link 1 at g1-a from 0"]
    assert trace.state.failure == "g1-b: it sends nothing of a sealed link"
    trace(Heard(2), 51.1)
    assert trace(Tick(), 51.1) == ["wake at 52"]


def test_a_member_that_says_where_it_starts_has_given_something() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.SEALED, end=3)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.25)
    trace(Heard(1), 11.1)
    assert trace(Tick(), 11.1) == ["wake at 11.25"]
    assert trace(FetchFailed(1, "broken"), 11.1) == ["open 2: link 1 at g1-a from 0", "wake at 12.1"]
    trace(StartArrived(2, Index(0), {}), 11.3)
    trace(Heard(2), 12.2)
    assert trace(Tick(), 12.2) == ["wake at 12.3"]
    assert trace(batch(2, 0, [1]), 12.25) == ["deliver link 1 0..1", "wake at 13.25"]
    trace(Heard(2), 13.2)
    assert trace(Tick(), 13.2) == ["wake at 13.25"]


def test_a_member_that_had_no_credit_is_not_left_for_having_sent_nothing() -> None:
    """The application stood still for 40 s with all that it had room for."""
    trace = Trace(limit_bytes=100)
    trace(ReadFrom(chain(link(1, LinkState.SEALED, end=2)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    one = batch(1, 0, [1])
    assert trace(one, 10.0) == ["deliver link 1 0..1"]
    assert trace(Heard(1), 50.0) == []
    size_bytes = one.batches[0].size_bytes
    assert trace(RowsTaken(size_bytes), 50.0) == [f"credit 1: {size_bytes}"]
    trace(Heard(1), 50.1)
    assert trace(Tick(), 50.2) == ["wake at 51"]


def test_a_member_that_says_that_more_is_committed_than_it_gives_is_left() -> None:
    """A bit of a credit's length was flipped on its way: the member waits for the rest of it, swallows all that follows, and beats."""
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    trace(batch(1, 0, [1]), 10.0)
    for number in range(400):  # nothing more is committed
        assert trace(Heard(1, Index(1)), 10.1 + number / 10) == []
    for number in range(100):
        assert trace(Heard(1, Index(2)), 50.1 + number / 10) == []
    assert trace(Heard(1, Index(2)), 60.1) == ["close 1", "open 2: link 1 at g1-a from 1"]
    assert trace.state.failure == "g1-b: it sends nothing of what it says is committed"


def test_an_end_that_nobody_tells_is_asked_for() -> None:
    """Who tells of the chain stands still, and its member can't be told either: the reader waited for ten seconds (campaign, seed 62)."""
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    trace(batch(1, 0, [1]), 10.0)

    def looked_at_s(first_s: int, end_s: int, *, is_sealed: bool) -> list[float]:
        beats = [number / 8 for number in range(8 * first_s, 8 * end_s)]
        return [at_s for at_s in beats if trace(Heard(1, Index(1), is_sealed), at_s) == ["look at the chain"]]

    assert looked_at_s(11, 20, is_sealed=False) == []
    assert looked_at_s(20, 39, is_sealed=True) == [20.375, 21.0, 22.25, 24.75, 29.625, 34.625]
    assert looked_at_s(39, 40, is_sealed=False) == [], "what was before counts no more"
    assert looked_at_s(40, 41, is_sealed=True) == [40.375]


def test_what_follows_an_end_that_only_the_member_was_told_of_is_asked_for() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    trace(batch(1, 0, [1]), 10.0)
    assert trace(EndReached(1, Index(1)), 11.0) == ["close 1", "wake at 11.3"]
    assert trace(Tick(), 11.3) == ["look at the chain", "wake at 11.9"]
    sealed = link(1, LinkState.SEALED, end=1)
    assert trace(ViewChanged(chain(sealed, version=2)), 11.5) == [], "a link that nobody sends to may follow late"
    opening = link(2, LinkState.OPENING, base=1)
    assert trace(ViewChanged(chain(sealed, opening, version=3)), 20.0) == ["wake at 20.3"]
    assert trace(Tick(), 20.3) == ["look at the chain", "wake at 20.9"]
    opened = link(2, LinkState.OPEN, base=1)
    assert trace(ViewChanged(chain(sealed, opened, version=4)), 20.4) == ["open 2: link 2 at g1-b from 0"]


def test_no_end_is_asked_for_that_is_told_soon_enough() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    for at_s in (10.1, 10.2, 10.3):
        assert trace(Heard(1, Index(0), is_sealed=True), at_s) == []
    trace(ViewChanged(chain(link(1, LinkState.SEALED, end=1), version=2)), 10.35)
    assert trace(Heard(1, Index(0), is_sealed=True), 10.4) == []


def test_it_is_read_anew_where_it_is_the_only_one() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN, a=None)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    assert trace(Heard(1, Index(2)), 10.1) == trace(Heard(1, Index(2)), 20.0) == []
    assert trace(Heard(1, Index(2)), 20.1) == ["close 1", "wake at 20.15"]
    assert trace.state.waiting_for == "g1-b: it sends nothing of what it says is committed"
    assert trace(Tick(), 20.2) == ["open 2: link 1 at g1-b from 0"]


def test_a_member_that_has_no_credit_is_not_left_for_what_it_may_not_send() -> None:
    """The application is slow; and what the member said before the credit came to it still arrives behind that."""
    trace = Trace(limit_bytes=100)
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    one = batch(1, 0, [1])
    trace(one, 10.0)
    for number in range(400):
        assert trace(Heard(1, Index(2)), 10.1 + number / 10) == []
    size_bytes = one.batches[0].size_bytes
    assert trace(RowsTaken(size_bytes), 50.05) == [f"credit 1: {size_bytes}"]
    for number in range(8):
        assert trace(Heard(1, Index(2)), 50.1 + number / 10) == []
    assert trace(batch(1, 1, [2]), 50.9) == ["deliver link 1 1..2"]


def test_behind_a_way_that_takes_long_a_member_is_not_left_for_what_it_said_before_its_credit_was_there() -> None:
    """What was sent in vain stands in the way, of words too. Left again and again, before the one batch comes, it would never give any."""
    trace = Trace()
    trace.state = replace(trace.state, patience=Patience(silences=12))  # 19.2 s
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    assert trace(StartArrived(1, Index(0), {}), 20.0) == ["credit 1: 1"]
    for number in range(99):
        assert trace(Heard(1, Index(2)), 20.1 + number / 10) == []
    assert trace(batch(1, 0, [1]), 30.0)[0] == "deliver link 1 0..1"


def test_a_member_that_was_given_no_credit_yet_owes_nothing() -> None:
    trace = Trace()
    trace.state = replace(trace.state, patience=Patience(silences=12))
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    for number in range(20):
        assert trace(Heard(1, Index(2)), 11.0 + 10 * number) == []


def test_a_member_whose_batch_takes_long_to_arrive_owes_nothing() -> None:
    """What it says between two batches is said before the second one is on its way; no word can pass that."""
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN, a=None)), START), 10.0)
    trace(StartArrived(1, Index(0), {}), 10.0)
    for number in range(5):
        now_s = 15.0 + 5 * number
        assert trace(Heard(1, Index(9)), now_s - 4.95) == []
        assert trace(Tick(), now_s - 2.0) == []
        assert trace(batch(1, number, [number]), now_s) == [f"deliver link 1 {number}..{number + 1}"]
    assert trace(Heard(1, Index(9)), 35.05) == []


def test_a_range_is_cut_off_by_a_gap_where_it_stands_and_by_no_later_one() -> None:
    trace, until = Trace(), Offset(20)
    ended = link(1, LinkState.SEALED, end=3)
    kept = chain(ended, link(2, LinkState.SEALED, base=3, end=3), link(3, LinkState.OPEN, base=6))
    trace(ReadFrom(kept, Place(Epoch(1), Index(3)), until=until))
    assert trace.state.at == Place(Epoch(2), Index(0))
    assert not trace.state.is_cut_off
    trace(ReadFrom(chain(ended, link(3, LinkState.OPEN, base=6)), Place(Epoch(1), Index(3)), until=until))
    assert trace.state.waiting_for == "offset 3, which is no longer kept"
    assert trace.state.is_cut_off
    trace(ReadFrom(chain(ended), Place(Epoch(1), Index(3)), until=until))
    assert not trace.state.is_cut_off
    # It began where all that was kept ended, and what came next was let go before it was seen.
    later = chain(link(3, LinkState.OPEN, base=6))
    trace(ReadFrom(later, Place(Epoch(1), Index(3)), since=Offset(3), until=until, is_end=True))
    assert trace.state.waiting_for == "offset 3, which is no longer kept"
    assert trace.state.is_cut_off
    # Who reads for a subscription has read what was let go, or was put behind it.
    assert trace(ReadFrom(chain(link(3, LinkState.OPEN, base=6)), Place(Epoch(1), Index(3)), is_end=True))[-1:] == [
        "open 2: link 3 at g1-b from 0"
    ]


def test_a_range_is_cut_off_by_no_gap_that_an_operator_left() -> None:
    """Of a link whose end was recorded the tail was given up: the next one keeps the base that it had, and needn't be the next epoch."""
    trace, until = Trace(), Offset(20)
    ended = replace(link(2, LinkState.SEALED, base=3, end=1), is_abandoned=True)
    for following in (3, 4):
        later = link(following, LinkState.OPEN, base=6)
        trace(ReadFrom(chain(ended, later), Place(Epoch(2), Index(1)), until=until))
        assert (trace.state.at, trace.state.is_cut_off) == (Place(Epoch(following), Index(0)), False)
    # Retention has let it go since.
    trace(ReadFrom(chain(ended), Place(Epoch(2), Index(1)), until=until))
    trace(ViewChanged(chain(link(3, LinkState.OPEN, base=6), version=2)))
    assert (trace.state.at, trace.state.is_cut_off) == (Place(Epoch(3), Index(0)), False)
    # Of a link whose end nobody could tell, with the links behind it: the next one is beyond all that it can have had.
    for base, is_cut_off in ((beyond_abandoned(Offset(4)), False), (Offset(7), True)):
        trace(
            ReadFrom(chain(link(2, LinkState.SEALED, base=3, end=1)), Place(Epoch(2), Index(1)), until=Offset(1 << 50))
        )
        trace(ViewChanged(chain(link(5, LinkState.OPEN, base=base), version=2)))
        assert trace.state.is_cut_off is is_cut_off


def test_a_member_that_falls_silent_is_left_and_both_get_longer_each_round() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    assert trace(Heard(1), 10.1) == []
    assert trace(Heard(1), 10.2) == []
    assert reading.next_look_s(trace.state, 10.2) == 10.5
    assert trace(Tick(), 10.4) == []
    assert trace(Tick(), 10.5) == ["close 1", "open 2: link 1 at g1-a from 0"]
    assert trace(Tick(), 10.8) == ["close 2", "wake at 10.9"]
    assert trace(Tick(), 10.9) == ["open 3: link 1 at g1-b from 0"]
    assert reading.next_look_s(trace.state, 10.9) == 10.9 + 0.6
    assert trace(Tick(), 10.95) == []
    assert trace(StartArrived(3, Index(0), {}), 11.0) == ["credit 3: 1"], "one batch, and when it has answered"
    assert trace(Heard(3), 11.05) == trace(Tick(), 11.05) == []
    assert trace(batch(3, 0, [1]), 11.1) == ["deliver link 1 0..1", "credit 3: 999999"]
    assert reading.next_look_s(trace.state, 11.1) == 11.1 + 0.3


def test_a_member_that_speaks_for_a_while_and_gives_nothing_has_nothing_to_give() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    assert trace(Tick(), 10.3) == ["close 1", "open 2: link 1 at g1-a from 0"]
    assert trace(StartArrived(2, Index(0), {}), 10.4) == ["credit 2: 1"]
    trace(Heard(2), 10.6)
    assert trace(Tick(), 10.6) == []
    for now_s in (10.8, 11.0, 11.2, 11.41):
        trace(Heard(2), now_s)
    assert trace(Tick(), 11.41) == ["credit 2: 999999"]


def test_a_member_far_away_is_waited_for_once_the_way_there_is_known() -> None:
    """It takes 0.5 s there and back: the first time three tries, later links none in vain."""
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    assert trace(Tick(), 10.35) == ["close 1", "open 2: link 1 at g1-a from 0"]
    assert trace(Tick(), 10.7) == ["close 2", "wake at 10.8"]
    assert trace(Tick(), 10.8) == ["open 3: link 1 at g1-b from 0"]
    trace(StartArrived(3, Index(0), {}), 11.3)
    trace(batch(3, 0, [1]), 11.8)
    sealed = chain(link(1, LinkState.SEALED, end=1), link(2, LinkState.OPEN, base=1), version=2)
    assert trace(ViewChanged(sealed), 12.0) == ["close 3", "open 4: link 2 at g1-b from 0"]
    assert trace(Tick(), 12.35) == []
    assert trace(Tick(), 12.45) == []
    assert trace(StartArrived(4, Index(0), {}), 12.5) == []


def test_a_silence_is_put_down_to_a_process_that_slept_itself_but_once() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    assert trace(Tick(), 20.0) == []
    assert trace(Tick(), 20.25) == []
    assert trace(Tick(), 40.0) == ["close 1", "open 2: link 1 at g1-a from 0"]
    trace(StartArrived(2, Index(0), {}), 40.1)
    assert trace(Tick(), 80.0) == []
    trace(Heard(2), 80.1)
    assert trace(Tick(), 90.0) == []  # another sleep, since it was heard


def test_a_silent_member_without_another_one_is_not_left() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN, a=None)), START), 10.0)
    assert trace(Tick(), 10.3) == []
    assert reading.next_look_s(trace.state, 10.3) == 10.3 + 0.3, "not at once, and so again and again"
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN), version=2)), 10.35) == [
        "close 1",
        "open 2: link 1 at g1-a from 0",
    ]


def test_a_member_that_didn_t_answer_the_seal_is_left_for_the_one_that_did() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START), 10.0)
    sealed = replace(link(1, LinkState.SEALED, end=3), answered=("a",))
    opened = ["close 1", "open 2: link 1 at g1-a from 0", "wake at 11.1"]
    assert trace(ViewChanged(chain(sealed, version=2)), 10.1) == opened
    # Who has come back since may be asked as well, but not first.
    trace = Trace()
    assert trace(ReadFrom(chain(sealed), START), 10.0)[0] == "open 1: link 1 at g1-a from 0"
    # Nor is it left, by whom the one that did has failed, or where that is gone, or where both answered.
    assert trace(FetchFailed(1, "gone"), 10.0)[0] == "open 2: link 1 at g1-b from 0"
    assert trace(ViewChanged(chain(sealed, link(2, LinkState.OPENING, base=3), version=2)), 10.0) == ["wake at 11"]
    for answered, there in ((("a",), None), (("a", "b"), 1), (("b",), 1)):
        trace = Trace()
        trace(ReadFrom(chain(link(1, LinkState.OPEN, a=there)), START), 10.0)
        ended = replace(link(1, LinkState.SEALED, end=3, a=there), answered=answered)
        assert trace(ViewChanged(chain(ended, version=2)), 10.0) == ["wake at 11"]


def test_a_member_that_has_given_all_is_not_left_for_its_missing_answer() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {}))
    trace(batch(1, 0, [1, 2, 3]))
    sealed = replace(link(1, LinkState.SEALED, end=3), answered=("a",))
    assert trace(ViewChanged(chain(sealed, link(2, LinkState.OPEN, base=3), version=2))) == [
        "close 1",
        "open 2: link 2 at g1-b from 0",
    ]
    assert trace.state.failures == 0


def test_credit_bounds_what_is_fetched_ahead() -> None:
    trace = Trace(limit_bytes=2000)
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {}))
    arrived = [batch(1, 3 * number, [3 * number + 1, 3 * number + 2, 3 * number + 3]) for number in range(3)]
    for number, one in enumerate(arrived):
        assert trace(one) == [f"deliver link 1 {3 * number}..{3 * number + 3}"]
    size = arrived[0].batches[0].size_bytes
    assert trace(RowsTaken(size)) == []  # less than a quarter of the limit is free: not worth a message
    assert trace(RowsTaken(size)) == [f"credit 1: {2 * size}"]
    assert trace.state.buffered_bytes == size


def test_a_batch_beyond_the_limit_is_followed_by_the_next_one_as_soon_as_it_is_taken() -> None:
    """What it took beyond the credit is given back in one: in parts, each with the next event, it took seconds for each batch."""
    trace = Trace(limit_bytes=100)
    trace(ReadFrom(chain(link(1, LinkState.OPEN)), START))
    trace(StartArrived(1, Index(0), {}))
    for index in range(3):
        arrived = batch(1, index, [index])
        size_bytes = arrived.batches[0].size_bytes
        assert size_bytes > 100
        assert trace(arrived) == [f"deliver link 1 {index}..{index + 1}"]
        assert trace(Tick()) == []
        assert trace(RowsTaken(size_bytes)) == [f"credit 1: {size_bytes}"]


def test_an_older_view_changes_nothing() -> None:
    trace = Trace()
    trace(ReadFrom(chain(link(1, LinkState.SEALED, end=0), version=5), START))
    assert trace.state.waiting_for == "the next link"
    assert trace(ViewChanged(chain(link(1, LinkState.OPEN), version=4))) == []
    assert trace.state.view is not None
    assert trace.state.view.version == 5
