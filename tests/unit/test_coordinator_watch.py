"""What watchers of queues are told where something changes that many of them show."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.coordinator import views
from seriatim.coordinator.core.background import SeenChain
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.service import CoordinatorService
from seriatim.coordinator.store import Store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.names import ChainVersion, QueueId
from seriatim.protocol.zookeeper import SessionState
from tests.property.chain_world import World, send_call, with_member

WAIT_S = 60.0


def of_some_groups(document: ChainDocument) -> ChainDocument:
    """The queue, if it was given g1 and g2 of three groups."""
    given = "g1", "g2"
    return replace(document, settings=replace(document.settings, groups=given), send_list=given)


class WatchedStore:
    """What a coordinator remembers of these queues, each named by its id, and whom it tells."""

    session = SimpleNamespace(state=SessionState.CONNECTED)

    def __init__(self, registry: Registry, documents: list[ChainDocument]) -> None:
        self.registry = registry
        self.chains = {one.queue_id: SeenChain(one, ChainVersion(1), since_ms=0) for one in documents}
        self._listeners: list[Callable[[], None]] = []

    async def queue_id(self, name: str) -> QueueId:
        return QueueId(int(name))

    async def read_chain(self, queue_id: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self.chains[queue_id].document, ChainVersion(1)

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def now_is(self, registry: Registry) -> None:
        self.registry = registry
        for listener in list(self._listeners):
            listener()


def test_where_a_member_changes_only_views_that_show_its_group_are_made_again_with_a_turn_for_others_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand watched queues took a coordinator's loop for half a second, whatever they showed, and just when a member died."""
    world = World()
    send_call(world).finish()
    first = world.registry()
    every = [replace(world.document, queue_id=QueueId(at)) for at in range(1, 41)]
    some = [replace(of_some_groups(world.document), queue_id=QueueId(at)) for at in range(41, 81)]
    store = WatchedStore(first, [*every, *some])
    nothing = cast("Any", None)
    service = CoordinatorService(cast("Store", store), nothing, nothing, nothing, nothing)
    made: Counter[QueueId] = Counter()
    told: Counter[QueueId] = Counter()
    queue_view = views.queue_view

    def counted(document: ChainDocument, *rest: Any) -> pb.QueueView:
        made[document.queue_id] += 1
        return queue_view(document, *rest)

    monkeypatch.setattr(views, "queue_view", counted)

    async def watch(queue_id: QueueId) -> None:
        async for _ in service.WatchQueue(pb.QueueRequest(queue=str(queue_id)), nothing):
            told[queue_id] += 1

    async def most_in_a_row(claim: Callable[[], bool]) -> int:
        """So many views were made at most between two turns of this, until that came true."""
        most, before = 0, made.total()
        async with asyncio.timeout(WAIT_S):
            while not claim():
                await asyncio.sleep(0)
                most, before = max(most, made.total() - before), made.total()
        return most

    async def main() -> None:
        watching = [asyncio.create_task(watch(one.queue_id)) for one in (*every, *some)]
        await most_in_a_row(lambda: told.total() == 80)
        store.now_is(replace(first))  # nobody shows that
        assert await most_in_a_row(lambda: made.total() == 160) == 1
        second = with_member(store.registry, "g3", is_accepting=False)
        store.now_is(second)
        assert await most_in_a_row(lambda: all(told[one.queue_id] == 2 for one in every)) == 1
        store.now_is(with_member(second, "g1", is_accepting=False))
        assert await most_in_a_row(lambda: told.total() == 40 * 3 + 40 * 2) == 1
        for one in watching:
            one.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    asyncio.run(main())
    assert {made[one.queue_id] for one in every} == {4}
    assert {made[one.queue_id] for one in some} == {3}


@pytest.mark.parametrize(
    ("change", "is_shown"),
    [
        (lambda registry: with_member(registry, "g3", is_in_sync=False), False),
        (lambda registry: with_member(registry, "g3", set_back=(QueueId(2),)), False),
        (lambda registry: replace(registry, is_new=True), False),
        (lambda registry: with_member(registry, "g1", address="h:2"), True),
        (lambda registry: with_member(registry, "g2", is_accepting=False), True),
        (lambda registry: with_member(registry, "g3", set_back=(QueueId(1),), problem="it knows more"), True),
        (lambda registry: replace(with_member(registry, "g3", has_compared=False), is_new=True), True),
        (lambda registry: replace(registry, outdated={QueueId(1): "it is an old one"}), True),
    ],
)
def test_a_view_differs_where_what_it_shows_of_the_registry_does(
    change: Callable[[Registry], Registry], is_shown: bool
) -> None:
    world = World()
    send_call(world).finish()
    document, before = of_some_groups(world.document), world.registry()
    after = change(before)
    shown, view = [
        [made(registry) for registry in (before, after)]
        for made in (
            lambda registry: views.shown_of(document, registry),
            lambda registry: views.queue_view(document, world.version, registry),
        )
    ]
    assert (shown[0] != shown[1]) is (view[0] != view[1]) is is_shown
