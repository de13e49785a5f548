"""When a queue goes on with its next group unasked, and when it had better not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import pytest

from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core import background, chain, rotation
from seriatim.coordinator.core.background import Rotate
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.core.subscriptions import (
    Committed,
    created,
    deleted,
    located,
    put_by,
    sought,
    with_reader,
)
from seriatim.coordinator.description import Description, lags
from seriatim.coordinator.members import Members
from seriatim.coordinator.messages import settings, settings_from
from seriatim.coordinator.store import Store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, QueueSettings, Readmit
from seriatim.protocol.chain_json import decode, encode
from seriatim.protocol.errors import InvalidArgument, Unreachable, Waiting
from seriatim.protocol.names import ChainVersion, Epoch, Index, QueueId
from tests.property.chain_world import World, close_call, send_call, with_subscription

OLD_MS = 5_000


def sending_world() -> World:
    """g1 serves, g2 is next; a link is in use for five seconds."""
    world = World()
    with_subscription(world)
    world.document = with_settings(world.document, rotate_ms=OLD_MS)
    send_call(world).finish()
    return world


def with_settings(document: ChainDocument, **settings: object) -> ChainDocument:
    return replace(document, settings=replace(document.settings, **settings))


def created_ms(world: World) -> int:
    return world.document.links[-1].created_at_ms


def test_an_open_link_is_left_when_it_is_old_enough_and_there_is_somewhere_to_go() -> None:
    world = sending_world()
    document, registry, old_ms = world.document, world.registry(), created_ms(world) + OLD_MS
    assert rotation.is_due(document, registry, old_ms)
    assert not rotation.is_due(document, registry, old_ms - 1)
    assert not rotation.is_due(with_settings(document, rotate_ms=0), registry, old_ms)
    assert not rotation.is_due(chain.closing(document, Epoch(1)), registry, old_ms)
    assert not rotation.is_due(replace(document, send_list=("g1",)), registry, old_ms)
    assert not rotation.is_due(replace(document, links=(), send_list=("g1", "g2")), registry, old_ms)


@pytest.mark.parametrize(
    ("lags", "is_refused"),
    [
        ({}, False),
        ({"live": 0, "near": rotation.NEAR_RECORDS}, False),
        ({"live": 0, "away": rotation.NEAR_RECORDS + 1}, True),
        ({"untold": None}, True),
    ],
)
def test_with_one_more_group_it_waits_until_the_one_that_serves_can_come_back_at_once(
    lags: dict[str, int | None], is_refused: bool
) -> None:
    world = sending_world()
    document, registry = replace(world.document, send_list=("g1", "g2")), world.registry()
    reason = rotation.obstacle(document, registry, lags)
    assert bool(reason) is is_refused
    if is_refused:
        assert list(lags)[-1] in reason
        assert "live" not in reason
    assert not rotation.obstacle(with_settings(document, readmit=Readmit.IN_SYNC), registry, lags)
    assert not rotation.obstacle(world.document, registry, lags)  # g3 is there, too


def test_who_has_little_left_and_nobody_to_read_it_does_not_count_as_near() -> None:
    told = [
        pb.SubscriptionView(subscription="live", has_lag=True, lag_records=5, reader="r-1"),
        pb.SubscriptionView(subscription="done", has_lag=True, lag_records=0),
        pb.SubscriptionView(subscription="left", has_lag=True, lag_records=5),
        pb.SubscriptionView(subscription="untold", reader="r-2"),
    ]
    assert lags(pb.QueueView(subscriptions=told)) == {"live": 5, "done": 0, "left": None, "untold": None}


def test_status_says_what_it_waits_for_and_the_elected_coordinator_leaves_it() -> None:
    world = sending_world()
    world.document = replace(world.document, send_list=("g1", "g2"))

    class Silent:
        """Members that nobody hears."""

        async def describe_links(self, *_: object) -> dict[Epoch, pb.HeldLink]:
            raise Unreachable("no answer")

    class OneStore:
        registry = world.registry()

        def size_bytes(self, _: QueueId) -> int:
            return 0

        async def first_in_lines(self, _: QueueId, lines: list[object]) -> list[str]:
            return [""] * len(lines)

        async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
            return world.document, world.version

        async def look_up_registry(self, _: object) -> None: ...

    store, members = cast("tuple[Store, Members]", (OneStore(), Silent()))
    description = Description(store, members)
    operations = Operations(store, cast("Any", None), description)

    async def scenario() -> tuple[pb.QueueView, bool, bool]:
        view = await description.queue(world.document, world.version)
        left = await operations.rotate_aged(QueueId(1), Epoch(1), "test")
        return view, left, await operations.rotate_aged(QueueId(1), Epoch(2), "test")

    view, is_done, is_another_done = asyncio.run(scenario())
    assert "rotation" in {one.what for one in view.waits}
    assert not is_done
    assert is_another_done, "that link isn't the last one any more"


def test_the_elected_coordinator_does_it_behind_everything_else_in_a_quiet_chain() -> None:
    world = sending_world()
    world.append(Epoch(1), 2)

    def planned(now_ms: int, since_ms: int = 0) -> list[object]:
        seen = background.SeenChain(world.document, world.version, since_ms)
        names = {"orders": QueueId(1)}
        view = background.View((seen,), world.registry(), names, background.Told())
        return list(background.plan(view, now_ms))

    old_ms = created_ms(world) + OLD_MS
    assert planned(old_ms) == [Rotate(QueueId(1), Epoch(1))]
    assert planned(old_ms, since_ms=old_ms - OLD_MS + 1) == []
    assert planned(old_ms, since_ms=old_ms - OLD_MS) == [Rotate(QueueId(1), Epoch(1))]
    assert planned(old_ms - 1) == []
    daily_ms = 24 * 3600 * 1000
    world.document = with_settings(world.document, rotate_ms=daily_ms)
    made_ms = created_ms(world) + daily_ms  # by a clock that is a day behind
    assert planned(made_ms, since_ms=made_ms - background.ROTATION_QUIET_MS + 1) == []
    assert planned(made_ms, since_ms=made_ms - background.ROTATION_QUIET_MS) == [Rotate(QueueId(1), Epoch(1))]
    world.document = replace(world.document, send_list=("g1", "g2"))
    world.restart(("g1", "b"))
    assert Rotate not in map(type, planned(old_ms)), "it is closed because a member is gone"


def test_readers_that_come_and_go_keep_no_queue_from_being_rotated() -> None:
    """As a job that is started each second, and reads what has come: each of them is elected, or has a subscription of its own."""
    world = sending_world()
    seen, made_ms = None, created_ms(world)
    for second in range(6):
        if second < 2:
            world.document = with_reader(world.document, world.document.subscriptions[0].name, f"n{second}")
        elif second % 2 == 0:
            world.document = created(world.document, "own", located(world.document, "earliest", None), second)
        else:
            world.document = deleted(world.document, "own")
        seen = background.SeenChain.after(seen, world.document, ChainVersion(second), made_ms + second * 1000)
    assert seen is not None
    view = background.View((seen,), world.registry(), {"orders": QueueId(1)}, background.Told())
    assert list(background.plan(view, made_ms + OLD_MS)) == [Rotate(QueueId(1), Epoch(1))]


def test_a_subscription_that_is_sought_all_the_time_keeps_no_queue_from_being_rotated() -> None:
    """As by a probe that is started every few seconds and reads what comes last (`consume --from latest`)."""
    world = sending_world()
    seen, made_ms, name = None, created_ms(world), world.document.subscriptions[0].name
    for second in range(6):
        where = "earliest" if second % 2 else "latest"
        position = located(world.document, where, Committed(Index(second), is_exact=True))
        world.document = put_by(sought(world.document, name, position), name, f"seek-{second}")
        seen = background.SeenChain.after(seen, world.document, ChainVersion(second), made_ms + second * 1000)
    assert seen is not None
    view = background.View((seen,), world.registry(), {"orders": QueueId(1)}, background.Told())
    assert list(background.plan(view, made_ms + OLD_MS)) == [Rotate(QueueId(1), Epoch(1))]


def test_the_setting_goes_through_messages_and_0_is_not_the_default() -> None:
    assert settings_from(pb.QueueSettings(), frozenset()).rotate_ms == 24 * 3600 * 1000
    never = settings_from(pb.QueueSettings(rotate_ms=0), frozenset())
    assert never.rotate_ms == 0
    assert settings_from(settings(never), frozenset()) == never
    assert settings_from(pb.QueueSettings(flush_ms=7), frozenset(), never).rotate_ms == 0
    with pytest.raises(InvalidArgument, match="at least 1000 ms"):
        settings_from(pb.QueueSettings(rotate_ms=999), frozenset())


def test_a_document_with_the_default_is_one_that_versions_without_the_setting_can_read() -> None:
    document = World().document
    content = json.loads(encode(document))
    assert content["settings"].keys() == set(QueueSettings.__dataclass_fields__) - {"rotate_ms"}
    assert decode(encode(document)) == document
    changed = with_settings(document, rotate_ms=0)
    assert decode(encode(changed)) == changed


class Behind:
    """A ZooKeeper server that shows an old chain until it has caught up. Whoever would switch asks who is elected first."""

    def __init__(self, old: ChainDocument, world: World) -> None:
        self._shown, self._now = old, world.document
        self.registry = world.registry()

    async def queue_id(self, _: str) -> QueueId:
        """As the store's: behind all that was written until now."""
        self._shown = self._now
        return QueueId(1)

    async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self._shown, ChainVersion(1)

    def size_bytes(self, _: QueueId) -> int:
        return 0

    async def look_up_registry(self, *_: object) -> Registry:
        return self.registry

    async def first_in_line(self, *_: object) -> str:
        raise Unreachable("it would be left")


def test_a_link_is_left_once_however_often_that_is_asked_for() -> None:
    """The coordinator died before it answered, so that the next one is asked, by whom its ZooKeeper server hasn't told yet."""
    world = sending_world()
    old = world.document
    close_call(world, 1).finish()
    send_call(world).finish()
    operations = Operations(*cast("tuple[Store, Any, Any]", (Behind(old, world), None, None)))
    request = pb.QueueRequest(queue="orders", epoch=1)
    links = [(link.epoch, link.state) for link in asyncio.run(operations.rotate_queue(request)).links]
    assert links == [(1, "sealed"), (2, "open")]
    for epoch in (0, 2):
        request.epoch = epoch
        with pytest.raises(Unreachable, match="it would be left"):
            asyncio.run(operations.rotate_queue(request))


def test_who_asks_for_a_switch_that_no_group_can_take_is_told_why() -> None:
    """It said no more than that none could, and left it to the operator to look for what to do."""
    world = sending_world()
    for group in ("g2", "g3"):
        world.kill((group, "a"))
        world.expire((group, "a"))
    operations = Operations(*cast("tuple[Store, Any, Any]", (Behind(world.document, world), None, None)))
    asked = operations.rotate_queue(pb.QueueRequest(queue="orders", epoch=1))
    with pytest.raises(Waiting, match="over queue orders: g2: g2-a not registered; g3: g3-a not registered") as told:
        asyncio.run(asked)
    assert set(told.value.details["reasons"]) == {"g2", "g3"}
