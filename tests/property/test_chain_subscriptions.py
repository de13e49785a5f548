"""Positions in a chain, against a slow and obvious model: a list of every offset."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.coordinator.core import invariants, subscriptions
from seriatim.coordinator.core.chain_point import point_before
from seriatim.protocol.chain import LinkState, StaleCursors
from seriatim.protocol.errors import ChainSetBack, InvalidArgument, SubscriptionExists, UnknownSubscription, Waiting
from seriatim.protocol.names import Epoch, Generation, Index, SubscriptionId
from tests.property.chain_world import World, send_call


def world_with(counts: list[int]) -> World:
    """One link for each count, with so many batches of one record; the last is open."""
    world = World()
    send_call(world).finish()
    for number, count in enumerate(counts):
        epoch = Epoch(number + 1)
        for _ in range(count):
            world.append(epoch, 2)
        if number + 1 < len(counts):
            send_call(world, token=1, failed_epoch=epoch).finish()
    return world


counts = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(counts)
def test_every_offset_is_found_where_it_lies(sizes: list[int]) -> None:
    world = world_with(sizes)
    committed = subscriptions.Committed(Index(sizes[-1]), is_exact=True)
    model = [(epoch + 1, index) for epoch, size in enumerate(sizes) for index in range(size)]
    for offset, (epoch, index) in enumerate(model):
        found = subscriptions.located(world.document, str(offset), committed)
        assert (found.epoch, found.index) == (epoch, index)
        assert found.consume_list == tuple(range(epoch, len(sizes) + 1))
    end = subscriptions.located(world.document, str(len(model)), committed)
    latest = subscriptions.located(world.document, "latest", committed)
    assert (end.epoch, end.index) == (latest.epoch, latest.index) == (len(sizes), sizes[-1])
    with pytest.raises(InvalidArgument):
        subscriptions.located(world.document, str(len(model) + 1), committed)


@given(counts, st.lists(st.sampled_from(["earliest", "latest", "drain", "late report"]), max_size=12))
def test_whatever_is_sought_and_drained_the_lists_stay_in_order(sizes: list[int], steps: list[str]) -> None:
    world = world_with(sizes)
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "s", position, 0)
    old = document.subscriptions[0]
    for step in steps:
        before = document
        now = document.subscriptions[0]
        if step == "drain" and now.consume_list:
            head = document.link(now.consume_list[0])
            if head is not None and head.state is LinkState.SEALED:
                document = subscriptions.drained(document, SubscriptionId(1), now.generation, head.epoch)
                assert head.epoch not in document.subscriptions[0].consume_list
        elif step == "late report" and now.generation != old.generation:
            for epoch in now.consume_list:
                assert subscriptions.drained(document, SubscriptionId(1), old.generation, epoch) is document
        elif step in ("earliest", "latest"):
            where = subscriptions.located(document, step, subscriptions.Committed(Index(sizes[-1]), is_exact=True))
            document = subscriptions.sought(document, "s", where)
            assert document.subscriptions[0].generation == now.generation + 1
        invariants.check_change(before, document)
        assert document.subscriptions[0].consume_list == tuple(
            epoch
            for epoch in range(1, len(sizes) + 1)
            if epoch >= min(document.subscriptions[0].consume_list, default=len(sizes) + 1)
            and (sizes[epoch - 1] or epoch == len(sizes))  # of a link that ended empty there is nothing to read
        )


def test_only_a_sealed_head_can_be_drained_and_whoever_reports_another_link_comes_again() -> None:
    for sizes, epoch in (([1, 1], 2), ([1], 1)):
        world = world_with(sizes)
        position = subscriptions.located(world.document, "earliest", None)
        document = subscriptions.created(world.document, "s", position, 0)
        with pytest.raises(Waiting):
            subscriptions.drained(document, SubscriptionId(1), document.subscriptions[0].generation, Epoch(epoch))


def test_a_note_of_stale_cursors_ends_with_the_last_generation_that_can_have_cursors_there() -> None:
    world = world_with([1, 1])
    position = subscriptions.located(world.document, "earliest", None)
    one = subscriptions.created(world.document, "s", position, 0)
    noted = subscriptions.with_stale_cursors(one, Epoch(1), "a", None)
    assert noted.stale_cursors == (StaleCursors(Epoch(1), "a", ((1, 1),)),)
    two = subscriptions.created(one, "t", position, 0)
    two = subscriptions.with_stale_cursors(two, Epoch(1), "a", None)
    note = StaleCursors(Epoch(1), "a", ((1, 1), (2, 1)))
    assert two.stale_cursors == (note,)
    of = {each.name: each for each in two.subscriptions}

    sought = subscriptions.sought(noted, "s", position)
    assert (sought.stale_cursors, sought.subscriptions[0].consume_list[0]) == ((), 1)
    sought = subscriptions.sought(two, "s", position)
    assert sought.stale_cursors == (note,)  # t may have a cursor there
    assert subscriptions.created(noted, "t", position, 0).stale_cursors == noted.stale_cursors  # and no newer one
    again = subscriptions.with_stale_cursors(sought, Epoch(1), "a", None)
    assert again.stale_cursors == (StaleCursors(Epoch(1), "a", ((1, 2), (2, 1))),)
    assert subscriptions.sought(sought, "t", position).stale_cursors == ()  # both were, one after the other

    drained = subscriptions.drained(two, of["s"].subscription_id, of["s"].generation, Epoch(1))
    assert drained.stale_cursors == (note,)
    drained = subscriptions.drained(drained, of["t"].subscription_id, of["t"].generation, Epoch(1))
    assert drained.stale_cursors == ()
    assert subscriptions.with_stale_cursors(drained, Epoch(1), "a", None) == drained
    assert subscriptions.deleted(noted, "s").stale_cursors == ()


def test_a_note_of_stale_cursors_names_those_who_had_a_commit_and_no_others() -> None:
    world = world_with([1, 1])
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "s", position, 0)
    document = subscriptions.created(document, "t", position, 0)
    s, t = (one.whose for one in document.subscriptions)
    noted = subscriptions.with_stale_cursors(document, Epoch(1), "a", t)
    assert noted.stale_cursors == (StaleCursors(Epoch(1), "a", (t,)),)
    assert subscriptions.with_stale_cursors(noted, Epoch(1), "a", t) is noted
    both = subscriptions.with_stale_cursors(noted, Epoch(1), "a", s)
    assert both.stale_cursors == (StaleCursors(Epoch(1), "a", (s, t)),)
    assert subscriptions.sought(noted, "t", position).stale_cursors == ()
    sought = subscriptions.sought(both, "t", position)
    late = subscriptions.with_stale_cursors(sought, Epoch(1), "a", t)
    assert late.stale_cursors == (StaleCursors(Epoch(1), "a", (s,)),)  # nobody uses that cursor any more
    now = (t[0], Generation(2))
    again = subscriptions.with_stale_cursors(sought, Epoch(1), "a", now)
    assert again.stale_cursors == (StaleCursors(Epoch(1), "a", (s, now)),)


def test_names_that_are_taken_or_unknown() -> None:
    world = world_with([1])
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "s", position, 0)
    with pytest.raises(SubscriptionExists):
        subscriptions.created(document, "s", position, 0)
    with pytest.raises(UnknownSubscription):
        subscriptions.deleted(document, "other")
    with pytest.raises(InvalidArgument):
        subscriptions.located(document, "soon", None)
    again = subscriptions.created(subscriptions.deleted(document, "s"), "s", position, 0)
    assert again.subscriptions[0].subscription_id == 2


def test_a_stale_note_is_kept_once_and_cleared() -> None:
    world = world_with([1])
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "s", position, 0)
    noted = subscriptions.with_stale_cursors(document, Epoch(1), "a", None)
    assert noted.stale_note(Epoch(1), "a") == StaleCursors(Epoch(1), "a", ((1, 1),))
    assert subscriptions.with_stale_cursors(noted, Epoch(1), "a", None) is noted
    assert subscriptions.without_stale_cursors(noted, Epoch(1), "a") == document
    with pytest.raises(ChainSetBack):
        subscriptions.with_stale_cursors(document, Epoch(9), "a", None)
    assert point_before(document, Epoch(1)).is_known
