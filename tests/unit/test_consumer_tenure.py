"""What an elected reader holds, and until when: whatever comes late, of an earlier node, or of an earlier term."""

from __future__ import annotations

import pytest

from seriatim.consumer.core import invariants, tenure
from seriatim.consumer.core.cursor import Granted
from seriatim.consumer.core.tenure import (
    RETRY_S,
    ActUntil,
    Answered,
    Ask,
    AskAfter,
    AskEnded,
    Deposed,
    Effect,
    Elected,
    EndTerm,
    Event,
    Failed,
    Overtaken,
    Prove,
    Proved,
    TakeUp,
    Tenure,
    Tick,
    Unanswered,
    Unsure,
    Wanted,
)
from seriatim.consumer.core.view import ChainView, Grant, Place
from seriatim.protocol.errors import InvariantBroken
from seriatim.protocol.lease import Lease
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Index, SubscriptionId, Token

A, B = "n-0000000001", "n-0000000002"
ONE, TWO = Token(1), Token(2)
STOP = ActUntil(0.0)


def with_token(token: int) -> Granted:
    view = ChainView("c", 1, "q", ChainVersion(1))
    return Granted(view, Grant(SubscriptionId(1), Generation(1), Token(token)), Place(Epoch(1), Index(0)))


def answered(node: str, token: int) -> Answered:
    return Answered(node, Token(token), with_token(token))


def take_up(token: int) -> TakeUp:
    return TakeUp(with_token(token))


class Reader:
    def __init__(self) -> None:
        self.state = Tenure()

    def happened(self, *events: Event) -> list[Effect]:
        found: list[Effect] = []
        for event in events:
            before = self.state
            self.state, effects = tenure.decide(before, event)
            invariants.check_tenure(before, self.state, effects)
            found += effects
        return found


def granted() -> Reader:
    """Elected, granted, and sure of it until 104."""
    reader = Reader()
    reader.happened(Elected(A), Proved(A, 100.0, 6.0), answered(A, ONE), AskEnded())
    return reader


def test_who_is_elected_proves_that_it_lives_and_asks_where_to_read_and_may_act_when_both_are_there() -> None:
    reader = Reader()
    assert reader.happened(Elected(A)) == [Prove(), Ask(A, Token(0), is_again=False)]
    assert reader.happened(Proved(A, 100.0, 6.0)) == []
    assert reader.happened(answered(A, ONE)) == [take_up(ONE)]
    assert reader.happened(AskEnded()) == [ActUntil(pytest.approx(104.0))]
    assert reader.happened(Proved(A, 101.0, 6.0)) == [ActUntil(pytest.approx(105.0))]


def test_nor_may_it_before_anything_is_proved_or_while_nothing_is_granted() -> None:
    reader = Reader()
    assert reader.happened(Elected(A), answered(A, ONE), AskEnded())[-1] == STOP
    waits = Reader()
    waits.happened(Elected(A), Proved(A, 100.0, 6.0))
    waits.happened(Answered(A, ONE, waiting_for="g1-a: it can't be told", retry_after_s=0.5))
    assert waits.state.waiting_for == "g1-a: it can't be told"
    assert waits.happened(AskEnded()) == [AskAfter(0.5)]
    assert waits.happened(Tick()) == [Ask(A, ONE, is_again=True)]  # with the token that it was given
    assert waits.happened(Unanswered("no coordinator answers"), AskEnded()) == [AskAfter(RETRY_S)]
    assert waits.happened(Tick()) == [Ask(A, ONE, is_again=True)]
    assert waits.happened(answered(A, ONE)) == [take_up(ONE)]
    assert waits.state.waiting_for == ""
    assert waits.happened(AskEnded()) == [ActUntil(pytest.approx(104.0))]


def test_where_nobody_can_tell_nothing_is_done_but_the_term_goes_on_with_the_next_proof() -> None:
    reader = granted()
    assert reader.happened(Unsure()) == [STOP]
    assert reader.state.waiting_for == "ZooKeeper"
    assert reader.happened(Proved(A, 101.0, 6.0)) == []
    assert reader.happened(Wanted()) == []
    assert reader.happened(Elected(A)) == [Prove(), Ask(A, ONE, is_again=False)]
    assert reader.happened(Proved(A, 102.0, 6.0)) == [ActUntil(pytest.approx(106.0))]  # before anybody answered
    assert reader.happened(answered(A, ONE), AskEnded()) == [take_up(ONE), ActUntil(pytest.approx(106.0))]


def test_a_term_ends_where_somebody_else_is_elected_and_what_arrives_then_begins_none() -> None:
    reader = granted()
    reader.happened(Wanted())
    assert reader.happened(Deposed("standing is waiting", "another reader is elected")) == [
        STOP,
        EndTerm("standing is waiting"),
    ]
    assert reader.state.waiting_for == "another reader is elected"
    assert reader.happened(Proved(A, 101.0, 6.0), answered(A, ONE), AskEnded(), Wanted(), Tick()) == []


@pytest.mark.parametrize("late", [answered(A, ONE), Proved(A, 200.0, 6.0)])
def test_what_is_of_an_earlier_node_counts_for_nothing(late: Event) -> None:
    """The session expired, and this reader stands with another node; another one was granted in between."""
    reader = granted()
    reader.happened(Wanted(), Deposed("standing is out"))
    assert reader.happened(Elected(B)) == [Prove()]  # the answer that is waited for may never come
    assert reader.happened(late) == []
    assert reader.happened(AskEnded()) == [AskAfter(RETRY_S)]
    assert reader.happened(Tick()) == [Ask(B, Token(0), is_again=True)]  # as who has no token: the next one
    assert reader.happened(answered(B, Token(3)), AskEnded()) == [take_up(Token(3)), STOP]


def test_a_node_that_is_another_one_ends_the_term_also_where_nobody_told_of_the_loss() -> None:
    reader = granted()
    effects = reader.happened(Elected(B))
    assert effects[:2] == [STOP, EndTerm("its election node is another one")]
    assert effects[2:] == [Prove(), Ask(B, Token(0), is_again=False)]


def test_another_token_is_another_term() -> None:
    reader = granted()
    assert reader.happened(Wanted()) == [Ask(A, ONE, is_again=False)]
    assert reader.happened(answered(A, TWO)) == [STOP, EndTerm("a new token was given"), take_up(TWO)]
    assert reader.happened(AskEnded()) == [
        ActUntil(pytest.approx(104.0))
    ]  # the node is the same, and proved to be there
    assert reader.happened(Wanted()) == [Ask(A, TWO, is_again=False)]
    # Nor does the term go on where nothing can be granted by the new one yet.
    assert reader.happened(Answered(A, Token(3), waiting_for="g1-a")) == [STOP, EndTerm("a new token was given")]


def test_who_was_overtaken_asks_as_somebody_new() -> None:
    reader = granted()
    reader.happened(Wanted())
    assert reader.happened(Overtaken("a newer reader was elected")) == [STOP, EndTerm("a newer reader was elected")]
    assert reader.state.waiting_for == "a newer reader was elected"
    assert reader.happened(AskEnded(), Tick()) == [AskAfter(RETRY_S), Ask(A, Token(0), is_again=True)]


def test_where_nobody_answers_it_is_asked_again_and_the_term_goes_on() -> None:
    reader = granted()
    reader.happened(Wanted())
    assert reader.happened(Unanswered("no coordinator answers")) == []
    assert reader.state.waiting_for == "no coordinator answers"
    assert reader.happened(AskEnded()) == [ActUntil(pytest.approx(104.0)), AskAfter(RETRY_S)]
    assert reader.happened(Proved(A, 101.0, 6.0)) == [ActUntil(pytest.approx(105.0))]
    assert reader.happened(Tick()) == [Ask(A, ONE, is_again=True)]


def test_who_wants_an_answer_while_one_is_waited_for_gets_another_one_behind_it_after_a_moment() -> None:
    """The first may be of before there was a reason. Two at once would be one too many; without a moment, thousands."""
    reader = granted()
    reader.happened(Wanted())
    assert reader.happened(Wanted(), Wanted()) == []
    assert reader.happened(answered(A, ONE)) == [take_up(ONE)]
    assert reader.happened(AskEnded()) == [ActUntil(pytest.approx(104.0)), AskAfter(RETRY_S)]
    assert reader.happened(Wanted()) == []
    assert reader.happened(Tick()) == [Ask(A, ONE, is_again=True)]
    assert reader.happened(answered(A, ONE), AskEnded())[-1:] == [ActUntil(pytest.approx(104.0))]
    assert reader.happened(Wanted()) == [Ask(A, ONE, is_again=False)]


def test_who_isn_t_elected_any_more_asks_nobody_and_asks_at_once_when_it_is_again() -> None:
    for before_the_tick in (True, False):
        reader = granted()
        reader.happened(Wanted(), Unanswered("no coordinator answers"))
        if before_the_tick:
            reader.happened(AskEnded(), Unsure())
            assert reader.happened(Tick()) == []
        else:
            assert reader.happened(Unsure(), AskEnded()) == [STOP]
        assert reader.happened(Elected(A)) == [Prove(), Ask(A, ONE, is_again=False)]


def test_who_failed_is_done_unless_somebody_wants_more() -> None:
    reader = granted()
    reader.happened(Wanted(), Wanted())
    assert reader.happened(Failed("the queue was deleted")) == [STOP, EndTerm("the queue was deleted")]
    assert reader.state.waiting_for == "the queue was deleted"
    assert reader.happened(AskEnded()) == []
    assert reader.happened(Proved(A, 101.0, 6.0)) == []


@pytest.mark.parametrize(
    ("before", "after", "effects"),
    [
        (Tenure(), Tenure(Lease(A, 4.0, is_admitted=True)), []),
        (Tenure(), Tenure(is_asked_again=True), []),
        (Tenure(Lease(A, 4.0)), Tenure(Lease(A, 3.0)), []),
        (Tenure(Lease(A), token=ONE), Tenure(Lease(B), token=ONE), []),
        (Tenure(Lease(A, is_admitted=True), token=ONE), Tenure(Lease(A), token=ONE), []),
        (Tenure(Lease(A)), Tenure(Lease(A, 4.0), is_elected=True), [ActUntil(4.0)]),
        (
            Tenure(Lease(A, 4.0, is_admitted=True), token=ONE),
            Tenure(Lease(A, 4.0, is_admitted=True), token=ONE),
            [ActUntil(4.0)],
        ),
        (
            Tenure(Lease(A, is_admitted=True), token=ONE),
            Tenure(Lease(A, is_admitted=True), token=TWO),
            [take_up(TWO)],
        ),
        (Tenure(Lease(A)), Tenure(Lease(A), is_asking=True), [Ask(B, Token(0), is_again=False)]),
        (Tenure(Lease(A)), Tenure(Lease(A), is_asking=True), [Ask(A, ONE, is_again=False)]),
    ],
)
def test_a_wrong_step_is_noticed(before: Tenure, after: Tenure, effects: list[Effect]) -> None:
    with pytest.raises(InvariantBroken):
        invariants.check_tenure(before, after, effects)
