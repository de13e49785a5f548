"""What was handed out, by itself: what counts as passed, what may be committed, and what is handed out once more."""

from __future__ import annotations

import pytest

from seriatim.consumer.core.handed_out import Chunk, HandedOut
from seriatim.consumer.core.rows import Delivery, decoded
from seriatim.consumer.core.view import START, ChainView, LinkView, Place, Side
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import Fenced, InvalidArgument
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, Offset
from seriatim.protocol.record import Record

SIDES = [Side("g1", member, f"{member}:1", Incarnation(member, 1)) for member in "ab"]
TWO_LINKS = (
    LinkView(Epoch(1), LinkState.SEALED, Offset(0), Index(10), SIDES[0], SIDES[1], {}),
    LinkView(Epoch(2), LinkState.OPEN, Offset(10), None, SIDES[0], SIDES[1], {}),
)
BOTH = ChainView("c", 1, "q", ChainVersion(1), TWO_LINKS)
SECOND = ChainView("c", 1, "q", ChainVersion(2), TWO_LINKS[1:])
"""As when retention let the first one go."""


def chunk(term: int, epoch: int, *, resends: int = 0) -> Chunk:
    """Ten records of that link from its start on, of which the last so many are re-sends."""
    columns = RecordColumns([b"v"] * 10, list(range(10)), ["s"] * (10 - resends) + ["t"] * resends, [1] * 10)
    marks = {"t": 50} if resends else None
    of = Delivery(Epoch(epoch), Offset(10 * epoch - 10), encode(columns, Index(0)), Index(0), Index(10), marks)
    return Chunk(term, decoded(of), "q", Place(Epoch(epoch), Index(0)), 100)


def place(epoch: int, index: int) -> Place:
    return Place(Epoch(epoch), Index(index))


def hand_out(handed: HandedOut, count: int, *, of: Chunk | None = None) -> list[Record]:
    """So many of the batch in hand, or of this one, which is begun."""
    if of is not None:
        handed.begin(of)
    now = handed.in_hand
    assert now is not None
    found = now.records(now.row, now.row + count)
    now.row += count
    return found


def test_what_was_handed_out_is_passed_when_the_application_asks_for_more() -> None:
    handed = HandedOut("q")
    assert handed.passed(0) is None
    hand_out(handed, 4, of=chunk(1, 1))
    assert handed.passed(1) is None
    handed.move_past()
    hand_out(handed, 2)
    assert handed.passed(1) == place(1, 4)


def test_nothing_is_passed_in_a_term_that_an_earlier_one_handed_out() -> None:
    handed = HandedOut("q")
    hand_out(handed, 10, of=chunk(1, 1))
    handed.move_past()
    assert handed.passed(1) == place(1, 10)
    assert handed.passed(2) is None
    assert handed.rest(2, is_done=True) is None
    handed.begin(chunk(2, 1))
    assert handed.passed(2) is None


@pytest.mark.parametrize(("is_done", "passed"), [(True, place(1, 10)), (False, place(1, 3))])
def test_resends_behind_the_last_record_are_passed_by_who_is_done_with_all_before_them(is_done, passed) -> None:
    handed = HandedOut("q")
    hand_out(handed, 3, of=chunk(1, 1, resends=4))
    handed.move_past()
    hand_out(handed, 3)
    if is_done:
        handed.move_past()
    assert handed.rest(1, is_done=is_done) is None
    handed.begin(chunk(1, 2))
    assert handed.passed(1) == passed


def test_what_was_given_back_is_handed_out_again_in_its_order_before_all_else() -> None:
    handed = HandedOut("q")
    first, second, third = (chunk(1, epoch) for epoch in (1, 2, 3))
    hand_out(handed, 4, of=first)
    handed.move_past()
    taken = [(first, 4), (second, 0)]
    hand_out(handed, 6)
    hand_out(handed, 10, of=second)
    handed.begin(third)  # and was interrupted there
    handed.give_back(taken)
    assert handed.has_rest(1)
    assert handed.passed(1) == place(1, 4)
    found = []
    while (rest := handed.rest(1, is_done=False)) is not None:
        found += [record.offset for record in hand_out(handed, rest.count - rest.row)]
    assert found == list(range(4, 30))
    assert not handed.has_rest(1)


def test_what_was_given_back_is_not_handed_out_in_another_term() -> None:
    handed = HandedOut("q")
    first, second = chunk(1, 1), chunk(1, 2)
    hand_out(handed, 10, of=first)
    hand_out(handed, 10, of=second)
    handed.give_back([(first, 0), (second, 0)])
    assert handed.rest(2, is_done=True) is None
    assert not handed.has_rest(2)


def test_what_an_application_is_not_done_with_is_handed_out_once_more() -> None:
    handed = HandedOut("q")
    hand_out(handed, 4, of=chunk(1, 1))
    handed.move_past()
    again = hand_out(handed, 3)
    handed.take_back()
    assert handed.place_to_commit(None, 1, BOTH) == (1, place(1, 4))
    assert hand_out(handed, 3) == again


def test_all_is_committed_until_more_is_handed_out_in_whatever_term() -> None:
    handed = HandedOut("q")
    assert handed.is_all_committed
    hand_out(handed, 4, of=chunk(1, 1))
    assert not handed.is_all_committed
    handed.note_committed(handed.place_to_commit(None, 1, BOTH))
    assert handed.is_all_committed
    hand_out(handed, 4, of=chunk(2, 1))
    assert not handed.is_all_committed


def test_who_commits_late_what_an_earlier_term_handed_out_is_told_so_until_this_one_has_come_as_far() -> None:
    """It was taken for a mistake of the application's (`invalid-argument`) from the first record of the new term on."""
    handed = HandedOut("q")
    hand_out(handed, 10, of=chunk(1, 1))
    late = hand_out(handed, 5, of=chunk(1, 2))[-1]
    again = chunk(3, 1), chunk(3, 2)
    for count, of in ((0, None), (10, again[0]), (4, again[1])):
        if of is not None:
            hand_out(handed, count, of=of)
        for what in (late, late.offset + 1):
            with pytest.raises(Fenced, match="of an earlier term"):
                handed.place_to_commit(what, 3, BOTH)
        if of is not None:
            with pytest.raises(InvalidArgument, match="this was not handed out"):
                handed.place_to_commit(late.offset + 2, 3, BOTH)
    hand_out(handed, 1)
    assert handed.place_to_commit(late, 3, BOTH) == (3, place(2, 5))


def test_who_commits_an_offset_that_is_not_kept_any_more_has_committed_it() -> None:
    """It was `invalid-argument`, where the last record below it could be committed once more."""
    handed = HandedOut("q")
    hand_out(handed, 5, of=chunk(1, 2))
    for offset in (0, 9, 10):
        assert handed.place_to_commit(offset, 1, SECOND) == (1, START)
    with pytest.raises(InvalidArgument):
        handed.place_to_commit(-1, 1, SECOND)


def test_all_below_the_next_offset_can_be_committed_at_the_end_of_a_link() -> None:
    """`commit(last.offset + 1)`, as with Kafka: it is the offset of the next link's first record, too."""
    handed = HandedOut("q")
    last = hand_out(handed, 10, of=chunk(1, 1))[-1]
    assert handed.place_to_commit(last, 1, BOTH) == (1, place(1, 10))
    assert handed.place_to_commit(5, 1, BOTH) == (1, place(1, 5))
    for view in (BOTH, SECOND):
        assert handed.place_to_commit(last.offset + 1, 1, view) == (1, place(1, 10))
        with pytest.raises(InvalidArgument):
            handed.place_to_commit(11, 1, view)
