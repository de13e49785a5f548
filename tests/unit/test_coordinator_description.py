"""What of a queue only its members know."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from seriatim.coordinator import administration, views
from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core import subscriptions
from seriatim.coordinator.core.subscriptions import Committed
from seriatim.coordinator.description import Description
from seriatim.coordinator.members import Members
from seriatim.coordinator.service import CoordinatorService
from seriatim.coordinator.store import Store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, LinkState
from seriatim.protocol.errors import Unreachable, Waiting
from seriatim.protocol.names import ChainVersion, Epoch, Index, MemberName, QueueId
from seriatim.protocol.zookeeper import ZooKeeperSession
from tests.property.chain_world import World, close_call, send_call, with_subscription


def viewed(world: World, members: object) -> pb.QueueView:
    class OneStore:
        registry = world.registry()

        def size_bytes(self, _: QueueId) -> int:
            return 0

        async def first_in_lines(self, _: object, lines: Sequence[object]) -> list[str]:
            return [""] * len(lines)

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
    with_subscription(world)
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

        async def subscription(self, *_: object) -> pb.SubscriptionView:
            return pb.SubscriptionView(subscription="s")

    async def change(*_: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Waiting):
            raise answer
        return answer

    nothing = cast("Any", None)
    operations = Operations(cast("Store", OneStore()), nothing, cast("Description", Untold()))
    monkeypatch.setattr(operations, "change", change)
    request = pb.SeekSubscriptionRequest(queue="q", subscription="s", to="latest")
    assert asyncio.run(operations.seek_subscription(request)).subscription == "s"
    answers += [Waiting("not now")] * 2
    monkeypatch.setattr(administration, "POSITION_PATIENCE_S", -1.0)
    with pytest.raises(Waiting):
        asyncio.run(operations.seek_subscription(request))
    assert len(answers) == 1


class Lines:
    """ZooKeeper: who stands for election where, and what it is asked."""

    def __init__(self, **standing: str) -> None:
        self._standing = standing
        self.syncs = 0
        self.looked_at: list[str] = []

    def on_state(self, _: object) -> None: ...

    async def sync(self, _: str) -> None:
        self.syncs += 1

    async def children(self, path: str) -> list[str]:
        line = path.rpartition("/")[2]
        assert self.syncs, "a line was looked at that may be an old one"
        self.looked_at.append(line)
        return [self._standing[line]] if line in self._standing else []


class Asked:
    """Members: of which links they are asked."""

    def __init__(self) -> None:
        self.epochs: set[Epoch] = set()

    async def describe_links(self, _: object, epochs: list[Epoch], __: object) -> dict[Epoch, pb.HeldLink]:
        self.epochs |= set(epochs)
        return {epoch: pb.HeldLink(epoch=epoch, next_index=2, committed_index=2) for epoch in epochs}


def of_two_links(names: list[str]) -> tuple[World, Lines, Store]:
    """A queue of two links with these subscriptions, the last of which, sought to the end, has nothing to read in the first one."""
    world = World()
    for name in names:
        with_subscription(world, name)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    close_call(world, 1).finish()
    at_the_end = subscriptions.located(world.document, subscriptions.LATEST, None)
    world.document = subscriptions.sought(world.document, names[-1], at_the_end)
    send_call(world).finish()
    ids = {one.name: one.subscription_id for one in world.document.subscriptions}
    zookeeper = Lines(senders="shop-0000000007", **{str(ids[names[-1]]): "host-0000000003"})
    store = Store(cast("ZooKeeperSession", zookeeper), "c")
    store.registry = world.registry()
    return world, zookeeper, store


def test_a_queue_s_lines_are_looked_at_behind_one_sync_however_many_they_are() -> None:
    """Two calls each: of 200 readers of as many subscriptions that were started at the same moment 5 got to know their queue in 10 s."""
    names = [f"s{number}" for number in range(200)]
    world, zookeeper, store = of_two_links(names)
    view = asyncio.run(Description(store, cast("Members", Asked())).queue(world.document, world.version))
    assert (zookeeper.syncs, len(zookeeper.looked_at)) == (1, 201)
    assert view.sender == "shop-0000000007"
    assert {one.subscription: one.reader for one in view.subscriptions if one.reader} == {"s199": "host-0000000003"}


def test_who_wants_less_of_a_queue_is_told_that_and_nobody_else_is_asked() -> None:
    world, zookeeper, store = of_two_links(["s", "t"])

    class OneQueue(Store):
        async def queue_id(self, *_: object) -> QueueId:
            return world.document.queue_id

        async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
            return world.document, world.version

    members, nothing = Asked(), cast("Any", None)
    one_queue = OneQueue(cast("ZooKeeperSession", zookeeper), "c")
    one_queue.registry = store.registry
    description = Description(one_queue, cast("Members", members))
    service = CoordinatorService(one_queue, nothing, nothing, description, nothing)
    told = asyncio.run(service.DescribeQueue(pb.QueueRequest(queue="q", only_chain=True), nothing))
    assert told == views.queue_view(world.document, world.version, store.registry)
    assert (zookeeper.syncs, zookeeper.looked_at, members.epochs) == (0, [], set())
    ended = asyncio.run(service.DescribeQueue(pb.QueueRequest(queue="q", no_elections=True), nothing))
    assert members.epochs == {1, 2}
    assert (zookeeper.syncs, zookeeper.looked_at) == (0, [])
    whole = asyncio.run(service.DescribeQueue(pb.QueueRequest(queue="q"), nothing))
    assert whole.sender == "shop-0000000007"
    assert ended.links == whole.links


@pytest.mark.parametrize(("name", "epochs"), [("s", {1, 2}), ("t", {2})])
def test_of_one_subscription_the_same_is_told_as_in_the_whole_view_and_nothing_is_asked_for_others(
    name: str, epochs: set[int]
) -> None:
    world, zookeeper, store = of_two_links(["s", "t"])
    members = Asked()
    description = Description(store, cast("Members", members))
    subscription = subscriptions.found(world.document, name)
    told = asyncio.run(description.subscription(world.document, subscription))
    assert (zookeeper.looked_at, members.epochs) == ([str(subscription.subscription_id)], epochs)
    whole = asyncio.run(description.queue(world.document, world.version))
    assert told == next(one for one in whole.subscriptions if one.subscription == name)
    assert told.has_lag
