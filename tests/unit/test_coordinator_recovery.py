"""A chain made again from the copies that members keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.coordinator.core import chain, recovery
from seriatim.coordinator.core.recovery import BEYOND, Copy
from seriatim.protocol.chain import ChainMember
from seriatim.protocol.errors import ChainSetBack
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, QueueId
from tests.property.chain_world import World, close_call, send_call, with_subscription


def a_copy(world: World, holder: str = "g1-a", **changes) -> Copy:
    return Copy(replace(world.document, **changes), world.version, holder)


@pytest.fixture
def world() -> World:
    """A queue with a subscription and the open link 1."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    return world


def test_the_newest_copy_is_the_one_with_the_last_link_whoever_changed_an_older_chain_since(world):
    older = replace(a_copy(world), version=ChainVersion(99))
    close_call(world, 1).finish()
    send_call(world, token=1).finish()
    newest = a_copy(world, "g2-b")
    assert recovery.newest([older, newest, older], "orders") is newest
    assert recovery.newest([older], "orders") is older
    assert recovery.version([older, newest]) == 99 + BEYOND
    of_another = a_copy(world, queue_id=QueueId(7), next_epoch=Epoch(1))
    assert recovery.newest([of_another, newest], "orders") is of_another
    with pytest.raises(ChainSetBack, match="no member"):
        recovery.newest([], "orders")


def test_two_histories_are_not_made_one(world):
    link = world.document.links[0]
    other = replace(link, master=ChainMember(link.master.name, Incarnation("elsewhere", 1)))
    another = a_copy(world, "g3-a", links=(other,))
    with pytest.raises(
        ChainSetBack, match="link 1 is on g1 in the chain of g1-a, and another one on g1 in that of g3-a"
    ):
        recovery.newest([a_copy(world), another], "orders")


def test_whoever_comes_next_gets_numbers_that_nobody_had(world):
    copy = a_copy(world)
    document = recovery.recovered(copy)
    before = world.document
    assert document.links == before.links
    assert (document.queue_id, document.created_at_ms) == (before.queue_id, before.created_at_ms)  # the same queue
    assert (document.sender_token, document.sender_node) == (before.sender_token + BEYOND, "")
    assert document.next_subscription_id == before.next_subscription_id + BEYOND
    assert document.subscriptions[0].reader_token == before.subscriptions[0].reader_token + BEYOND
    assert document.subscriptions[0].consume_list == before.subscriptions[0].consume_list


def test_a_call_that_was_cut_off_goes_on_where_it_was(world):
    copy = a_copy(world)
    now = replace(copy, document=recovery.recovered(copy))
    assert recovery.goes_on_from(now, copy)
    assert recovery.goes_on_from(replace(now, document=chain.with_sender(now.document, "node-2")), copy)
    assert not recovery.goes_on_from(copy, copy)
    assert not recovery.goes_on_from(replace(now, document=replace(now.document, next_epoch=Epoch(1))), copy)
