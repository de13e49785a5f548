"""What a grant says of cursors, and what it doesn't: one that was read before the chain went on, one behind a link that is gone."""

from __future__ import annotations

from dataclasses import replace

from seriatim.consumer.core import cursor, reading
from seriatim.consumer.core.cursor import (
    AcquireAgain,
    Commit,
    CommitAsked,
    CommitFailed,
    Committed,
    CursorState,
    Granted,
    Refuse,
    StartReading,
    WakeAt,
)
from seriatim.consumer.core.reading import Reading
from seriatim.consumer.core.reading_events import (
    CloseFetch,
    Drained,
    FetchFailed,
    OpenFetch,
    ReadFrom,
    StartArrived,
    Tick,
    ViewChanged,
)
from seriatim.consumer.core.view import ChainView, Grant, LinkView, Place, Side, SubscriptionView
from seriatim.protocol.chain import LinkState
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Incarnation, Index, Offset, SubscriptionId

SUBSCRIPTION, GENERATION = SubscriptionId(1), Generation(1)


def link(epoch: int, base: int, end: int | None = None) -> LinkView:
    sides = [Side(f"g{epoch}", member, f"{epoch}{member}:1", Incarnation(f"{epoch}{member}", 1)) for member in "ab"]
    state = LinkState.OPEN if end is None else LinkState.SEALED
    return LinkView(Epoch(epoch), state, Offset(base), None if end is None else Index(end), sides[0], sides[1], {})


def view(version: int, consume_list: tuple[int, ...], *links: LinkView) -> ChainView:
    own = SubscriptionView(SUBSCRIPTION, "s", GENERATION, tuple(map(Epoch, consume_list)))
    return ChainView("c", 1, "q", ChainVersion(version), links, (own,))


def granted(seen: ChainView, epoch: int, index: int) -> Granted:
    return Granted(seen, Grant(SUBSCRIPTION, GENERATION), Place(Epoch(epoch), Index(index)))


class Commits:
    """The core and its clock."""

    def __init__(self) -> None:
        self.state = CursorState()
        self.now_s = 0.0

    def happened(self, event: cursor.Event) -> list[cursor.Effect]:
        self.state, effects = cursor.decide(self.state, event, self.now_s)
        return effects


def test_a_grant_that_was_read_before_the_next_link_was_listed_commits_nothing_of_that_link() -> None:
    commits = Commits()
    happened = commits.happened
    happened(granted(view(1, (1,), link(1, 0, 5)), 1, 5))
    # Link 1 was sealed while nobody sent, and left the list: the reader asks again, and the coordinator reads version 2.
    assert AcquireAgain() in happened(cursor.ViewChanged(view(2, (), link(1, 0, 5))))
    # While its answer is on the way, a sender opens link 2, the watch tells, and three records are read, handled and committed.
    later = view(4, (2,), link(1, 0, 5), link(2, 5))
    happened(cursor.ViewChanged(later))
    wanted = Place(Epoch(2), Index(3))
    happened(CommitAsked(wanted))
    happened(granted(view(2, (), link(1, 0, 5)), 0, 0))
    assert commits.state.committed < wanted
    assert AcquireAgain() in happened(cursor.ViewChanged(later))
    assert happened(cursor.ViewChanged(later)) == []  # it is being asked
    assert happened(cursor.ViewChanged(view(3, (), link(1, 0, 5)))) == []  # of a coordinator that lags behind
    assert commits.state.view == later
    (order,) = happened(granted(later, 2, 0))
    assert isinstance(order, Commit)
    assert (order.epoch, order.index) == (2, 3)
    assert happened(CommitAsked(Place(Epoch(2), Index(1)))) == []
    assert commits.state.wanted == wanted
    happened(Committed(order.commit_id))
    assert commits.state.committed == wanted


def test_the_late_answer_to_an_earlier_commit_says_nothing_of_the_one_under_way() -> None:
    commits = Commits()
    happened = commits.happened
    happened(granted(view(1, (1,), link(1, 0)), 1, 0))
    (first,) = happened(CommitAsked(Place(Epoch(1), Index(3))))
    happened(Committed(first.commit_id))
    (second,) = happened(CommitAsked(Place(Epoch(1), Index(5))))
    assert happened(CommitFailed(first.commit_id, "late", is_grant_old=True)) == []
    assert happened(Committed(first.commit_id)) == []
    assert (commits.state.in_flight, commits.state.committed) == (second, Place(Epoch(1), Index(3)))
    happened(Committed(second.commit_id))
    assert commits.state.committed == Place(Epoch(1), Index(5))
    assert happened(CommitFailed(second.commit_id, "later still", is_grant_old=True)) == []
    assert (commits.state.is_acquiring, commits.state.failures) == (False, 0)


def test_a_commit_that_both_members_lack_the_records_of_is_only_refused_while_the_link_can_still_be_seen() -> None:
    for seen, is_refused in ((view(1, (1,), link(1, 0)), True), (view(2, (1,)), False)):
        commits = Commits()
        happened = commits.happened
        happened(granted(view(1, (1,), link(1, 0)), 1, 0))
        (first,) = happened(CommitAsked(Place(Epoch(1), Index(9))))
        (second,) = happened(CommitFailed(first.commit_id, "behind", is_grant_old=False, is_beyond=True))
        assert second.side.member != first.side.member  # both are asked, one after the other
        happened(cursor.ViewChanged(seen))
        refused = happened(CommitFailed(second.commit_id, "behind", is_grant_old=False, is_beyond=True))
        assert any(isinstance(effect, Refuse) for effect in refused) is is_refused
        if is_refused:  # it is as if it had never been asked for
            state = commits.state
            assert (state.in_flight, state.wanted, state.failures, state.failure, state.avoid) == (
                None,
                state.committed,
                0,
                "",
                "",
            )


def test_who_has_nothing_left_to_read_stands_at_the_end_of_the_last_link_whatever_was_asked_for() -> None:
    commits = Commits()
    first = granted(view(1, (), link(1, 0, 5)), 0, 0)
    assert commits.happened(first) == [StartReading(first.view, first.grant, Place(Epoch(1), Index(5)), is_end=True)]
    commits.happened(CommitAsked(Place(Epoch(1), Index(7))))  # beyond the end counts as the end (H22)
    commits.happened(granted(view(2, (), link(1, 0, 5)), 0, 0))
    assert commits.state.committed == commits.state.wanted
    # The links were let go, of which this reader hears with the grant.
    commits.happened(granted(view(9, ()), 0, 0))
    assert commits.state.committed == commits.state.wanted


def test_a_member_that_knows_of_a_newer_reader_has_the_coordinator_asked_at_once() -> None:
    commits = Commits()
    commits.happened(granted(view(1, (1,), link(1, 0)), 1, 0))
    (order,) = commits.happened(CommitAsked(Place(Epoch(1), Index(3))))
    assert commits.happened(CommitFailed(order.commit_id, "fenced", is_grant_old=True)) == [AcquireAgain()]


def test_an_answer_from_before_a_seek_that_a_grant_tells_of_moves_nothing() -> None:
    commits, seen = Commits(), view(1, (1,), link(1, 0))
    commits.happened(granted(seen, 1, 0))
    (order,) = commits.happened(CommitAsked(Place(Epoch(1), Index(9))))
    sought = replace(seen, subscriptions=(replace(seen.subscriptions[0], generation=Generation(2)),))
    commits.happened(replace(granted(sought, 1, 2), grant=Grant(SUBSCRIPTION, Generation(2))))
    commits.happened(Committed(order.commit_id))
    assert commits.state.committed == commits.state.wanted == Place(Epoch(1), Index(2))


def test_commits_go_to_members_that_are_registered() -> None:
    both = link(1, 0)
    alone = replace(both, slave=replace(both.slave, incarnation=None))
    commits = Commits()
    commits.happened(granted(view(1, (1,), alone), 1, 0))
    (order,) = commits.happened(CommitAsked(Place(Epoch(1), Index(3))))
    assert order.side == alone.master
    (again,) = commits.happened(CommitFailed(order.commit_id, "no", is_grant_old=False))
    assert again.side == alone.master
    commits = Commits()
    commits.happened(granted(view(1, (1,), replace(alone, master=replace(alone.master, incarnation=None))), 1, 0))
    assert commits.happened(CommitAsked(Place(Epoch(1), Index(3)))) == []
    assert commits.state.waiting_for == "g1-a or g1-b: neither is registered"


def test_a_commit_that_both_members_refuse_is_tried_ever_more_slowly_and_anew_after_one_that_succeeds() -> None:
    commits, seen = Commits(), view(1, (1,), link(1, 0))
    happened = commits.happened
    happened(granted(seen, 1, 0))
    (order,) = happened(CommitAsked(Place(Epoch(1), Index(3))))
    waits = []
    for _ in range(6):
        (other,) = happened(CommitFailed(order.commit_id, "no", is_grant_old=False))
        assert (order.side.member, other.side.member) == ("b", "a")  # at once
        assert happened(CommitFailed(other.commit_id, "no", is_grant_old=False)) == [AcquireAgain()]
        (wake,) = happened(granted(seen, 1, 0))
        assert isinstance(wake, cursor.WakeAt)
        assert commits.state.waiting_for == "no"
        waits.append(round(wake.at_s - commits.now_s, 3))
        commits.now_s = wake.at_s
        (order,) = happened(cursor.Tick())
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    (other,) = happened(CommitFailed(order.commit_id, "no", is_grant_old=False))
    assert happened(Committed(other.commit_id)) == []
    (order,) = happened(CommitAsked(Place(Epoch(1), Index(5))))
    (other,) = happened(CommitFailed(order.commit_id, "no", is_grant_old=False))
    assert (order.side.member, other.side.member) == ("b", "a")


def test_a_link_that_was_read_to_its_end_and_stays_listed_has_a_coordinator_asked_ever_more_seldom() -> None:
    commits = Commits()
    happened = commits.happened
    happened(granted(view(1, (1,), link(1, 0)), 1, 5))
    # Where it starts was told to no member as its own, so what they report of the end is an earlier reader's, and refused.
    listed = view(3, (1, 2), link(1, 0, 5), link(2, 5))
    asked_at_s: list[float] = []
    (effect,) = happened(cursor.ViewChanged(listed))
    happened(CommitAsked(Place(Epoch(2), Index(3))))
    for _ in range(6):
        assert isinstance(effect, WakeAt)
        assert happened(cursor.ViewChanged(listed)) == [effect]  # what happens meanwhile puts nothing off
        commits.now_s = effect.at_s
        assert happened(cursor.Tick()) == [AcquireAgain()]
        assert happened(cursor.Tick()) == []  # it is being asked
        asked_at_s.append(commits.now_s)
        (effect,) = happened(granted(listed, 1, 5))  # that one couldn't leave it either
    assert commits.state.waiting_for == "link 1, read to its end, to leave the consume list"
    assert asked_at_s == [5, 15, 35, 75, 135, 195]
    (order,) = happened(granted(view(4, (2,), link(1, 0, 5), link(2, 5)), 2, 0))
    assert isinstance(order, Commit)
    assert (order.epoch, order.index) == (2, 3)
    happened(Committed(order.commit_id))
    assert happened(cursor.ViewChanged(view(5, (2,), link(2, 5, 3)))) == [
        WakeAt(195 + 5)
    ]  # the next one is asked for anew


def test_a_coordinator_isn_t_asked_to_leave_a_link_while_none_of_its_members_is_there() -> None:
    commits = Commits()
    happened = commits.happened
    there = link(1, 0, 5)
    gone = [replace(side, incarnation=None) for side in (there.master, there.slave)]
    happened(granted(view(1, (1,), there), 1, 5))
    commits.now_s = 99.0
    assert happened(cursor.ViewChanged(view(2, (1,), replace(there, master=gone[0], slave=gone[1])))) == []
    assert commits.state.waiting_for == "g1-a or g1-b: neither is registered"
    assert happened(cursor.ViewChanged(view(3, (1,), replace(there, master=gone[0])))) == [AcquireAgain()]


def test_what_failed_before_a_seek_holds_nothing_up_after_it() -> None:
    commits, seen = Commits(), view(1, (1,), link(1, 0))
    commits.happened(granted(seen, 1, 0))
    (order,) = commits.happened(CommitAsked(Place(Epoch(1), Index(3))))
    (other,) = commits.happened(CommitFailed(order.commit_id, "no", is_grant_old=False))
    commits.happened(CommitFailed(other.commit_id, "no", is_grant_old=False))
    sought = replace(
        seen, version=ChainVersion(2), subscriptions=(replace(seen.subscriptions[0], generation=Generation(2)),)
    )
    commits.happened(replace(granted(sought, 1, 0), grant=Grant(SUBSCRIPTION, Generation(2))))
    (order,) = commits.happened(CommitAsked(Place(Epoch(1), Index(2))))
    assert (order.index, order.side.member) == (2, "b")
    assert (commits.state.failures, commits.state.failure) == (0, "")


def test_nothing_is_committed_in_a_queue_or_for_a_subscription_that_was_deleted() -> None:
    seen = view(2, (1,), link(1, 0))
    for gone in (replace(seen, is_deleted=True), replace(seen, subscriptions=())):
        commits = Commits()
        commits.happened(granted(view(1, (1,), link(1, 0)), 1, 0))
        commits.happened(cursor.ViewChanged(gone))
        assert commits.happened(CommitAsked(Place(Epoch(1), Index(3)))) == []
        assert commits.state.waiting_for == "nothing: the subscription was deleted"


def test_a_member_that_starts_behind_what_was_asked_for_is_left() -> None:
    """What lies between would be passed over."""
    seen = view(1, (1,), link(1, 0))
    state, effects = reading.decide(Reading(1000), ReadFrom(seen, Place(Epoch(1), Index(5)), is_end=False), 0.0)
    (order,) = [effect for effect in effects if isinstance(effect, OpenFetch)]
    state, effects = reading.decide(state, StartArrived(order.fetch_id, Index(7), {}), 0.1)
    assert CloseFetch(order.fetch_id) in effects
    assert (state.at, state.marks) == (Place(Epoch(1), Index(5)), None)


def test_a_reader_goes_on_behind_a_link_that_ended_and_was_let_go_unseen() -> None:
    reads, commits, now_s = Reading(1000), CursorState(), 0.0
    opened: list[int] = []

    def both(*events: object) -> list[object]:
        """As ReaderSession has them: StartReading, and what a grant tells, go to the reading core."""
        nonlocal reads, commits
        found: list[object] = []
        for event in events:
            if isinstance(event, (Granted, cursor.ViewChanged)):
                commits, effects = cursor.decide(commits, event, now_s)
            else:
                reads, effects = reading.decide(reads, event, now_s)
            found += effects
            opened.extend(effect.epoch for effect in effects if isinstance(effect, OpenFetch))
            for effect in effects:
                if isinstance(effect, StartReading):
                    found += both(ReadFrom(effect.view, effect.place, effect.is_end, grant=effect.grant))
            if isinstance(event, Granted):
                found += both(ViewChanged(event.view), Drained(event.head.epoch))
        return found

    # It has read and committed all 5 records of link 1, which is open and quiet.
    both(granted(view(1, (1,), link(1, 0)), 1, 5), StartArrived(1, Index(5), {}))
    assert opened == [1]
    # It is cut off from the coordinators, not from ZooKeeper. Link 1's group dies; its end, 5, is recorded; the cursor is there,
    # so the link leaves the consume list, and after the retention the chain; link 2 takes the records.
    now_s = 1.0
    both(FetchFailed(1, "the connection broke"))
    now_s = 100.0
    later = view(9, (2,), link(2, 5))
    assert AcquireAgain() in both(cursor.ViewChanged(later), ViewChanged(later))
    both(granted(later, 2, 0), ViewChanged(replace(later, version=ChainVersion(10))), Tick())
    assert opened[-1] == 2


def test_a_reader_that_is_in_the_next_link_already_isn_t_started_anew_where_the_one_before_was_let_go() -> None:
    """It would be handed the same records again. All of link 1 is committed; link 2 is read before its grant comes."""
    commits = Commits()
    happened = commits.happened
    happened(granted(view(1, (1,), link(1, 0, 5)), 1, 5))
    happened(cursor.ViewChanged(view(2, (), link(1, 0, 5))))
    happened(granted(view(2, (), link(1, 0, 5)), 0, 0))
    later = view(9, (2,), link(2, 5))
    assert happened(cursor.ViewChanged(later)) == [AcquireAgain()]
    assert happened(granted(later, 2, 0)) == []
    reads, _ = reading.decide(Reading(1000), ReadFrom(later, Place(Epoch(2), Index(3)), is_end=False), 0.0)
    after, effects = reading.decide(reads, Drained(Epoch(2)), 0.0)
    assert (after.at, after.fetch, effects) == (reads.at, reads.fetch, [])
