"""When a group may be forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.coordinator.core import chain, removal, status
from seriatim.coordinator.core.registry import GroupState
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import Waiting
from tests.property.chain_world import World, send_call, with_subscription

DRAINED = GroupState("g1", is_draining=True)


def world_with_a_link() -> World:
    world = World()
    with_subscription(world)
    send_call(world).finish()
    return world


def test_everything_that_stands_against_it_is_told() -> None:
    world = world_with_a_link()
    told = removal.obstacles(world.registry().group("g1"), [world.document])
    assert told == {
        "g1": "it is in service, drain it first",
        "g1-a": "it is registered, stop it first",
        "g1-b": "it is registered, stop it first",
        "queue orders": "1 of its links are there, until all is read and its retention is over",
    }


def test_a_lost_link_is_named_with_what_ends_it() -> None:
    document = world_with_a_link().document
    lost = replace(document, links=(replace(document.links[0], state=LinkState.LOST),))
    assert removal.obstacles(DRAINED, [lost]) == {"queue orders": "link 1 is lost there, abandon it"}


def test_a_queue_that_is_to_be_served_by_the_group_is_told_how_to_be_served_by_others() -> None:
    document = World().document
    given = replace(document, settings=replace(document.settings, groups=("g1", "g2")))
    assert "`seriatim queue alter`" in removal.obstacles(DRAINED, [given])["queue orders"]


@pytest.mark.parametrize("group", ["g1", "g2"])
def test_a_drained_group_without_members_and_links_can_go(group: str) -> None:
    documents = [World().document] if group == "g1" else [World().document, world_with_a_link().document]
    assert removal.obstacles(replace(DRAINED, name=group), documents) == {}
    assert removal.obstacles(DRAINED, []) == {}


def test_it_leaves_the_send_list_once() -> None:
    document = World().document
    without = removal.without(document, "g1")
    assert without == chain.without_group(document, "g1")
    assert removal.without(without, "g1") == without


def test_a_link_that_came_meanwhile_keeps_it() -> None:
    with pytest.raises(Waiting, match="queue orders: 1 of its links"):
        removal.without(world_with_a_link().document, "g1")


def test_of_many_reasons_a_person_is_told_the_first_few() -> None:
    reasons = {f"queue q{number}": "it is in use" for number in range(status.TOLD + 3)}
    error = removal.refused("g1", reasons)
    assert error.message.count("it is in use") == status.TOLD
    assert error.message.endswith("; and 3 more")
    assert error.details["reasons"] == reasons
    assert removal.refused("g1", {"queue q": "it is in use"}).message.endswith(": queue q: it is in use")
