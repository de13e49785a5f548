"""What of a queue only its members know."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from seriatim.coordinator import administration
from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core.subscriptions import Committed
from seriatim.coordinator.description import Description
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import Unreachable, Waiting
from seriatim.protocol.names import Epoch, Index, MemberName
from tests.property.chain_world import World, close_call, send_call, with_subscription


def viewed(world: World, members: object) -> pb.QueueView:
    class OneStore:
        registry = world.registry()

        async def first_in_line(self, *_: object) -> str:
            return ""

    description = Description(cast("Store", OneStore()), cast("Members", members))
    return asyncio.run(description.queue(world.document, world.version))


@pytest.mark.parametrize(
    ("told", "restarted", "known"),
    [
        ({"a": 7, "b": 5}, "", Committed(Index(7), is_exact=True)),
        ({"a": 7}, "b", Committed(Index(7), is_exact=True)),
        ({"b": 5}, "", Committed(Index(5), is_exact=False)),
        ({"a": 4, "b": 5}, "a", Committed(Index(5), is_exact=False)),
        ({}, "", None),
    ],
)
def test_how_far_an_open_link_is_committed_its_master_says_while_it_is_the_same_process(
    told: dict[str, int], restarted: str, known: Committed | None
) -> None:
    world = World()
    send_call(world).finish()

    class Answering:
        async def describe_links(self, _: object, epochs: list[Epoch], member: MemberName) -> dict[Epoch, pb.HeldLink]:
            if member.member not in told:
                raise Unreachable("no answer")
            return {Epoch(1): pb.HeldLink(epoch=1, committed_index=told[member.member])}

    if restarted:
        world.restart(("g1", restarted))

    class OneStore:
        registry = world.registry()

    description = Description(cast("Store", OneStore()), cast("Members", Answering()))
    assert asyncio.run(description.committed(world.document)) == known


@pytest.mark.parametrize(
    ("places", "said"),
    [("ab", []), ("b", ["one copy of its 1 records"]), ("", ["no member tells of a copy of its 1 records"])],
)
def test_a_link_that_lost_copies_is_shown_and_most_of_all_where_it_lost_both(places: str, said: list[str]) -> None:
    """Its readers wait for one; where one copy was left status said so, and where none was, nothing."""
    world = World()
    send_call(world).finish()
    world.append(Epoch(1), 2)
    close_call(world, 1).finish()

    class Answering:
        async def describe_links(self, _: object, epochs: list[Epoch], member: MemberName) -> dict[Epoch, pb.HeldLink]:
            if member.member not in places:
                raise Unreachable("no answer")
            return {Epoch(1): pb.HeldLink(epoch=1, next_index=1)}

    view = viewed(world, Answering())
    assert [wait.reason for wait in view.waits if wait.what == "link 1"] == said


def test_what_a_blank_disk_has_of_a_lost_link_tells_nothing_of_that_link() -> None:
    """Status showed `0` records of it, one copy and a lag: as if there were nothing to wait for, or to give up."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    for place in "ab":
        world.kill(("g1", place))
        world.expire(("g1", place))
    close_call(world, 1).finish()
    world.restart(("g1", "a"), is_blank=True)
    assert world.document.links[0].state is LinkState.LOST

    class Answering:
        async def describe_links(self, *_: object) -> dict[Epoch, pb.HeldLink]:
            return {Epoch(1): pb.HeldLink(epoch=1)}  # a seal of a link that it never heard of (H11)

    view = viewed(world, Answering())
    link, subscription = view.links[0], view.subscriptions[0]
    assert (link.has_committed, link.copies) == (False, 0)
    assert (subscription.has_cursor, subscription.has_lag) == (False, False)


def test_a_position_that_cant_be_told_now_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    now = world.document, world.version
    answers = [Waiting("not now"), Waiting("not now"), now]

    class OneStore:
        async def queue_id(self, _: str, __: int) -> int:
            return 1

        async def read_chain(self, _: int) -> object:
            return now

    class Untold:
        async def committed(self, _: object) -> None:
            return None

        async def queue(self, *_: object) -> pb.QueueView:
            return pb.QueueView(subscriptions=[pb.SubscriptionView(subscription="s")])

    async def change(*_: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Waiting):
            raise answer
        return answer

    nothing = cast("Any", None)
    operations = Operations(cast("Store", OneStore()), nothing, nothing, cast("Description", Untold()))
    monkeypatch.setattr(operations, "change", change)
    request = pb.SeekSubscriptionRequest(queue="q", subscription="s", to="latest")
    assert asyncio.run(operations.seek_subscription(request)).subscription == "s"
    answers += [Waiting("not now")] * 2
    monkeypatch.setattr(administration, "POSITION_PATIENCE_S", -1.0)
    with pytest.raises(Waiting):
        asyncio.run(operations.seek_subscription(request))
    assert len(answers) == 1
