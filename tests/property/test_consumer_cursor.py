"""The cursor's core in a small world: commits that fail or lose their answer, links that drain, seeks in between."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from seriatim.consumer.core import cursor, invariants
from seriatim.consumer.core.cursor import (
    AcquireAgain,
    Commit,
    CommitAsked,
    CommitFailed,
    Committed,
    CursorState,
    Deposed,
    Event,
    Granted,
    Refuse,
    StartReading,
    Tick,
    ViewChanged,
    WakeAt,
)
from seriatim.consumer.core.view import ChainView, Grant, LinkView, Place, Side, SubscriptionView
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import InvariantBroken
from seriatim.protocol.names import (
    ChainVersion,
    Epoch,
    Generation,
    Incarnation,
    Index,
    Offset,
    SubscriptionId,
)

SUBSCRIPTION = SubscriptionId(1)


def place(epoch: int, index: int) -> Place:
    return Place(Epoch(epoch), Index(index))


@dataclass
class World:
    """Coordinator and members: lengths of the links, the consume list, and what is committed where."""

    lengths: list[int]
    listed: int = 1
    is_last_open: bool = True
    is_last_closing: bool = False
    version: int = 1
    generation: int = 1
    consume_list: list[int] = field(default_factory=lambda: [1])
    cursors: dict[int, int] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    state: CursorState = field(default_factory=CursorState)
    now_s: float = 0.0
    wake_at_s: float | None = None
    commits: list[Commit] = field(default_factory=list)
    is_acquiring: bool = True
    started: list[Place] = field(default_factory=list)
    refused: list[Place] = field(default_factory=list)

    def is_sealed(self, epoch: int) -> bool:
        return epoch < self.listed or not self.is_last_open

    def view(self) -> ChainView:
        sides = [Side("g1", member, f"{member}:1", Incarnation(member, 1)) for member in "ab"]
        unsealed = LinkState.CLOSING if self.is_last_closing else LinkState.OPEN
        links = tuple(
            LinkView(
                Epoch(epoch),
                LinkState.SEALED if self.is_sealed(epoch) else unsealed,
                Offset(0),
                Index(self.lengths[epoch - 1]) if self.is_sealed(epoch) else None,
                sides[0],
                sides[1],
                {},
            )
            for epoch in range(1, self.listed + 1)
        )
        own = SubscriptionView(SUBSCRIPTION, "s", Generation(self.generation), tuple(map(Epoch, self.consume_list)))
        return ChainView("c", 1, "q", ChainVersion(self.version), links, (own,))

    def happened(self, event: Event) -> None:
        before = self.state
        self.state, effects = cursor.decide(before, event, self.now_s)
        invariants.check_cursor(before, self.state)
        for effect in effects:
            match effect:
                case Commit():
                    self.commits.append(effect)
                case AcquireAgain():
                    self.is_acquiring = True
                case StartReading():
                    self.started.append(effect.place)
                case Refuse():
                    self.refused.append(effect.place)
                case WakeAt(at_s):
                    self.wake_at_s = at_s

    def changed(self) -> None:
        while self.consume_list and self.is_sealed(self.consume_list[0]):
            head = self.consume_list[0]
            if self.cursors.get(head, 0) < self.lengths[head - 1]:
                break
            self.consume_list.pop(0)
        self.version += 1
        self.happened(ViewChanged(self.view()))

    def grow(self) -> None:
        if self.listed < len(self.lengths):
            self.listed += 1
            self.consume_list.append(self.listed)
        else:
            self.is_last_open = False
        self.changed()

    def acquire(self) -> None:
        if self.is_acquiring:
            self.is_acquiring = False
            head = self.consume_list[0] if self.consume_list else 0
            self.told[head] = self.generation
            where = place(head, self.cursors.get(head, 0))
            self.happened(Granted(self.view(), Grant(SUBSCRIPTION, Generation(self.generation)), where))

    def commit(self, outcome: str) -> None:
        if not self.commits:
            return
        order = self.commits.pop(0)
        if outcome != "refused" and self.told.get(order.epoch) == order.grant.generation == self.generation:
            is_ahead = bool(self.consume_list) and order.epoch > self.consume_list[0]
            assert not is_ahead, "a commit to a link behind the head"
            if outcome == "lags" or order.index > self.lengths[order.epoch - 1]:
                self.happened(CommitFailed(order.commit_id, "not so far", is_grant_old=False, is_beyond=True))
                return
            self.cursors[order.epoch] = max(self.cursors.get(order.epoch, 0), order.index)
            if outcome == "stored":
                self.happened(Committed(order.commit_id))
            else:
                self.happened(CommitFailed(order.commit_id, "the answer was lost", is_grant_old=False))
            self.changed()
        else:
            self.happened(CommitFailed(order.commit_id, "refused", is_grant_old=outcome != "refused"))

    def seek(self, epoch: int, index: int) -> None:
        self.generation += 1
        self.consume_list = list(range(epoch, self.listed + 1))
        self.cursors = {epoch: index}
        self.changed()

    def wake(self) -> None:
        if self.wake_at_s is not None:
            self.now_s, self.wake_at_s = max(self.now_s, self.wake_at_s), None
            self.happened(Tick())

    def offset(self, where: Place) -> int:
        """Of a place; one beyond its link's end counts as the end (H22)."""
        return sum(self.lengths[: max(0, where.epoch - 1)]) + min(where.index, sum(self.lengths[where.epoch - 1 :][:1]))


def ask(world: World, data: st.DataObject) -> None:
    if world.state.grant is not None and world.state.grant.generation == world.generation:
        epoch = data.draw(st.integers(max(1, world.state.wanted.epoch), world.listed))
        most = world.lengths[epoch - 1] + (0 if world.is_sealed(epoch) else 2)  # beyond an end that isn't known yet
        world.happened(CommitAsked(place(epoch, data.draw(st.integers(0, most)))))


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), data=st.data())
@settings(max_examples=300)
def test_all_the_application_is_done_with_is_committed_in_the_end(lengths: list[int], data: st.DataObject) -> None:
    world = World(lengths)
    world.acquire()
    outcomes = ["stored", "lost", "refused", "lags"]
    actions = st.sampled_from(["ask", "ask", *outcomes, "grow", "acquire", "wake", "seek", "depose"])
    for action in data.draw(st.lists(actions, max_size=40)):
        match action:
            case "ask":
                ask(world, data)
            case "stored" | "lost" | "refused" | "lags":
                world.commit(action)
            case "grow":
                world.grow()
            case "acquire":
                world.acquire()
            case "wake":
                world.wake()
            case "seek":
                epoch = data.draw(st.integers(1, world.listed))
                world.seek(epoch, data.draw(st.integers(0, lengths[epoch - 1])))
            case "depose":
                world.happened(Deposed())
                world.is_acquiring = True
    for _ in range(200):
        if world.is_acquiring:
            world.acquire()
        elif world.commits:
            world.commit("stored")
        else:
            world.wake()
    assert world.state.committed == world.state.wanted
    head = world.consume_list[0] if world.consume_list else world.listed
    there = place(head, world.cursors.get(head, 0) if world.consume_list else lengths[head - 1])
    assert world.offset(there) >= world.offset(world.state.wanted)
    assert world.state.grant is not None
    assert world.state.grant.generation == world.generation


def test_a_commit_beyond_the_head_waits_until_the_head_is_drained() -> None:
    world = World([3, 3], listed=2, consume_list=[1, 2])
    world.acquire()
    assert world.started == [place(1, 0)]
    world.happened(CommitAsked(place(2, 1)))
    assert [(one.epoch, one.index) for one in world.commits] == [(1, 3)]
    world.commit("stored")
    assert world.is_acquiring
    assert not world.commits
    world.acquire()
    assert [(one.epoch, one.index) for one in world.commits] == [(2, 1)]
    assert world.started == [place(1, 0)]


def test_what_both_members_have_less_for_is_refused_and_wanted_no_more() -> None:
    world = World([5])
    world.acquire()
    world.happened(CommitAsked(place(1, 3)))
    world.commit("stored")
    world.happened(CommitAsked(place(1, 9)))
    assert [one.side.member for one in world.commits] == ["b"]
    world.commit("stored")
    assert [one.side.member for one in world.commits] == ["a"]  # from which the records may have come
    assert world.refused == []
    world.commit("stored")
    assert world.refused == [place(1, 9)]
    assert (world.state.committed, world.commits) == (world.state.wanted, [])
    world.happened(CommitAsked(place(1, 5)))
    world.commit("stored")
    assert world.cursors == {1: 5}


def test_a_member_that_lags_behind_the_other_refuses_nothing() -> None:
    world = World([5])
    world.acquire()
    for index in (2, 5):
        world.happened(CommitAsked(place(1, index)))
        world.commit("lags")
        world.commit("stored")
    assert (world.cursors, world.refused) == ({1: 5}, [])


def test_what_a_link_has_that_is_being_closed_is_known_at_its_end_and_not_before() -> None:
    world = World([5])
    world.acquire()
    world.happened(CommitAsked(place(1, 9)))
    world.is_last_closing = True
    world.changed()
    for _ in range(4):
        world.commit("lags")
        world.acquire()
        world.wake()
    assert world.refused == []
    world.grow()  # the end is recorded
    world.commit("lags")
    world.acquire()
    world.wake()
    world.commit("stored")
    assert world.cursors == {1: 5}


def test_what_was_committed_stays_so_where_all_links_were_let_go() -> None:
    world = World([5])
    world.acquire()
    world.happened(CommitAsked(place(1, 5)))
    world.commit("stored")
    world.grow()
    world.acquire()
    without = replace(world.view(), links=(), version=ChainVersion(9))
    world.happened(ViewChanged(without))
    # It wasn't sure of its session for a moment, and asked again.
    world.happened(Granted(without, Grant(SUBSCRIPTION, Generation(1)), place(0, 0)))
    assert world.state.committed == world.state.wanted
    assert world.state.committed == place(1, 5)


def test_a_seek_starts_reading_anew_and_forgets_older_commits() -> None:
    world = World([5])
    world.acquire()
    world.happened(CommitAsked(place(1, 4)))
    world.seek(1, 2)
    world.commit("stored")
    assert world.cursors == {1: 2}
    world.acquire()
    assert world.started == [place(1, 0), place(1, 2)]
    assert world.state.wanted == place(1, 2)


def test_a_cursor_that_moves_back_without_a_seek_is_found_out() -> None:
    world = World([5])
    world.acquire()
    world.happened(CommitAsked(place(1, 4)))
    with pytest.raises(InvariantBroken, match="moved back"):
        invariants.check_cursor(world.state, replace(world.state, wanted=place(1, 1), in_flight=None))
