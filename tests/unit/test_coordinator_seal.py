"""Where a link ends: the decision from the members' answers (protocol.md 5.3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.coordinator.core import seal
from seriatim.coordinator.core.chain_point import ChainPoint
from seriatim.coordinator.core.seal import SealAnswer, Undecided, Wholeness
from seriatim.protocol.chain import Certificate, ChainMember, Durability, Link, LinkState
from seriatim.protocol.hashing import EMPTY_HASH
from seriatim.protocol.names import Epoch, Incarnation, Index, MemberName, Offset
from seriatim.protocol.position import START, Position

MASTER = ChainMember(MemberName("g1", "a"), Incarnation("disk-a", 1))
SLAVE = ChainMember(MemberName("g1", "b"), Incarnation("disk-b", 1))
LINK = Link(Epoch(1), "g1", MASTER, SLAVE, LinkState.CLOSING, Durability.SYNC, 5, Offset(0), {"s": 2}, created_at_ms=0)
BEFORE = ChainPoint(Offset(0), EMPTY_HASH, {"s": 4, "old": 9}, {"s": 2})


def at(index: int, content: str = "x") -> Position:
    return Position(Index(index), f"{content}{index}".encode(), {"s": 10 + index})


def answer(wholeness: Wholeness, *positions: Position, side: ChainMember = MASTER) -> SealAnswer:
    return SealAnswer(wholeness, side.incarnation, positions)


def decided(
    answers: dict[str, SealAnswer], durability: Durability = Durability.SYNC, link: Link = LINK
) -> Certificate | Undecided:
    return seal.decide(replace(link, durability=durability), BEFORE, answers, now_ms=7)


def test_one_whole_answer_decides_and_only_what_was_committed_counts_as_on_two_h2():
    certificate = decided({"b": answer(Wholeness.WHOLE, at(4), at(5), at(6), side=SLAVE)})
    assert isinstance(certificate, Certificate)
    assert (certificate.end, certificate.link_hash, certificate.is_whole) == (6, at(6).hash, True)
    assert certificate.marks == {"s": 16, "old": 9}
    assert certificate.marks_on_two == {"s": 14}
    assert certificate.answered == (SLAVE.incarnation,)


def test_of_two_whole_answers_the_last_common_position_is_the_end_and_on_two():
    certificate = decided(
        {
            "a": answer(Wholeness.WHOLE, at(4), at(5), at(6)),
            "b": answer(Wholeness.WHOLE, at(3), at(4), at(5), side=SLAVE),
        }
    )
    assert isinstance(certificate, Certificate)
    assert (certificate.end, certificate.marks_on_two) == (5, {"s": 15})


def test_copies_that_part_after_what_is_committed_end_where_they_part():
    certificate = decided(
        {
            "a": answer(Wholeness.WHOLE, at(4), at(5), at(6, "one")),
            "b": answer(Wholeness.WHOLE, at(4), at(5), at(6, "other"), side=SLAVE),
        }
    )
    assert isinstance(certificate, Certificate)
    assert certificate.end == 5


def test_whole_copies_without_a_common_point_decide_nothing():
    undecided = decided(
        {
            "a": answer(Wholeness.WHOLE, at(4, "one"), at(5)),
            "b": answer(Wholeness.WHOLE, at(4, "other"), side=SLAVE),
        }
    )
    assert isinstance(undecided, Undecided)
    assert undecided.reasons == dict.fromkeys("ab", "its copy differs from the other one")


def test_a_whole_copy_that_lacks_what_the_other_has_committed_cuts_nothing():
    undecided = decided(
        {
            "a": answer(Wholeness.WHOLE, at(4), at(5)),
            "b": answer(Wholeness.WHOLE, START, at(1), at(2), at(3), side=SLAVE),  # it never heard what was committed
        }
    )
    assert isinstance(undecided, Undecided)
    assert undecided.reasons == dict.fromkeys("ab", "its copy differs from the other one")


@pytest.mark.parametrize("durability", [Durability.SYNC, Durability.INTERVAL])
@pytest.mark.parametrize("other", [None, Wholeness.UNKNOWN, Wholeness.PARTIAL])
def test_without_a_whole_answer_nothing_is_decided_where_acknowledged_means_on_disk_h1(durability, other):
    answers = {"a": answer(Wholeness.PARTIAL, at(4))}
    if other is not None:
        answers["b"] = answer(other, side=SLAVE)
    undecided = decided(answers, durability)
    assert isinstance(undecided, Undecided)
    assert undecided.reasons["g1-a"] == "it may have lost records"
    if other is Wholeness.UNKNOWN:
        assert undecided.reasons["g1-b"] == "it can't read the link"


@pytest.mark.parametrize("durability", [Durability.ASYNC, Durability.MEMORY])
def test_where_a_loss_is_allowed_both_disks_have_to_answer_and_the_larger_counts(durability):
    one = answer(Wholeness.PARTIAL, at(3), at(4))
    assert isinstance(decided({"a": one}, durability), Undecided)
    unknown = answer(Wholeness.UNKNOWN, side=SLAVE)
    assert isinstance(decided({"a": one, "b": unknown}, durability), Undecided)
    certificate = decided({"a": one, "b": answer(Wholeness.PARTIAL, at(3), side=SLAVE)}, durability)
    assert isinstance(certificate, Certificate)
    assert (certificate.end, certificate.is_whole, certificate.marks_on_two) == (4, False, {"s": 13})
    # What was committed on one isn't on the other any more: nothing of this link is on two.
    certificate = decided(
        {"a": answer(Wholeness.PARTIAL, at(3), at(4)), "b": answer(Wholeness.PARTIAL, START, side=SLAVE)}, durability
    )
    assert isinstance(certificate, Certificate)
    assert (certificate.end, certificate.is_whole, certificate.marks_on_two) == (4, False, {"s": 2})


def test_a_partial_answer_never_shortens_a_whole_one():
    certificate = decided(
        {"a": answer(Wholeness.WHOLE, at(4), at(6)), "b": answer(Wholeness.PARTIAL, at(1), side=SLAVE)},
        Durability.ASYNC,
    )
    assert isinstance(certificate, Certificate)
    assert (certificate.end, certificate.is_whole) == (6, True)
    assert certificate.marks_on_two == {"s": 2}  # it isn't known what the other one still has
    left = answer(Wholeness.PARTIAL, at(1), at(4), side=SLAVE)
    certificate = decided({"a": answer(Wholeness.WHOLE, at(4), at(6)), "b": left}, Durability.ASYNC)
    assert isinstance(certificate, Certificate)
    assert (certificate.end, certificate.marks_on_two) == (6, {"s": 14})


def test_another_disk_says_nothing_whatever_it_says_h1():
    blank = SealAnswer(Wholeness.WHOLE, Incarnation("new-disk", 1), (START,))
    judged = seal.judged(LINK, MASTER, blank)
    assert judged.wholeness is Wholeness.UNKNOWN
    assert isinstance(decided({"a": judged}), Undecided)


def test_another_disk_tells_what_it_has_only_of_a_link_whose_end_is_recorded():
    """It was filled by the certificate: for who gives up the link's tail, that is a copy like any other."""
    filled = SealAnswer(Wholeness.PARTIAL, Incarnation("new-disk", 1), (at(4),), "another disk")
    ended = decided({"b": answer(Wholeness.WHOLE, at(4), at(6), side=SLAVE)})
    assert isinstance(ended, Certificate)
    for state in LinkState:
        assert seal.judged(replace(LINK, state=state), MASTER, filled).wholeness is Wholeness.UNKNOWN
    link = replace(LINK, state=LinkState.SEALED, certificate=ended)
    assert seal.judged(link, MASTER, filled) == filled
    assert seal.given_up(link, BEFORE, [filled], now_ms=7).end == 4


@pytest.mark.parametrize("durability", list(Durability))
def test_a_restarted_member_is_whole_only_where_that_survives_a_restart(durability):
    restarted = SealAnswer(Wholeness.WHOLE, Incarnation("disk-a", 2), (at(4),))
    judged = seal.judged(replace(LINK, durability=durability), MASTER, restarted)
    assert (judged.wholeness is Wholeness.WHOLE) == durability.survives_restart
    link = replace(LINK, durability=durability)
    for one in (answer(Wholeness.WHOLE, at(4)), replace(restarted, wholeness=Wholeness.UNKNOWN, positions=())):
        assert seal.judged(link, MASTER, one) == one  # it didn't restart; who can't read something says nothing


def test_an_empty_links_marks_are_those_before_it():
    certificate = decided({"a": answer(Wholeness.WHOLE), "b": answer(Wholeness.WHOLE, side=SLAVE)})
    assert isinstance(certificate, Certificate)
    assert (certificate.end, certificate.marks, certificate.link_hash) == (0, BEFORE.marks, EMPTY_HASH)
    assert decided({"a": answer(Wholeness.WHOLE)}) == replace(certificate, answered=(MASTER.incarnation,))


def test_what_is_given_up_ends_with_the_largest_readable_copy():
    answers = [answer(Wholeness.PARTIAL, at(2), at(3)), SealAnswer(Wholeness.UNKNOWN, SLAVE.incarnation, (at(9),))]
    certificate = seal.given_up(LINK, BEFORE, answers, now_ms=7)
    assert (certificate.end, certificate.is_whole) == (3, False)
    assert seal.given_up(LINK, BEFORE, [], now_ms=7).end == 0
    both = [answer(Wholeness.PARTIAL, at(2)), answer(Wholeness.PARTIAL, at(2), at(3), side=SLAVE)]
    assert [seal.given_up(LINK, BEFORE, one, now_ms=7).end for one in (both, both[::-1])] == [3, 3]
