"""Who writes how a link ended tells its members, where the elected coordinator may stand still."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from seriatim.coordinator import execution as execution_shell
from seriatim.coordinator.core import close_link
from seriatim.coordinator.core.background import TellEnd
from seriatim.coordinator.core.seal import SealAnswer
from seriatim.protocol.errors import Unreachable
from seriatim.protocol.names import Epoch
from tests.property.chain_world import World, send_call
from tests.unit.test_coordinator_many_readers import coordinator


class Members:
    """Which are sealed, and can't be told of the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.told: list[tuple[int, str]] = []

    async def seal(self, effect: Any, *_: object) -> SealAnswer:
        event: Any = self._world.seal(effect)
        return cast("SealAnswer", event.answer)

    async def record_end(self, end: TellEnd, _cause: object) -> None:
        self.told.append((end.link.epoch, str(end.member)))
        raise Unreachable("nobody answers")


@pytest.mark.parametrize("is_elected", [False, True])
def test_members_are_told_of_an_end_by_who_wrote_it_unless_that_is_the_elected_coordinator(
    monkeypatch: pytest.MonkeyPatch, *, is_elected: bool
) -> None:
    """Which tells them at once, and until they have it."""
    monkeypatch.setattr(execution_shell, "ENDS_AFTER_S", 0.0)
    world = World()
    send_call(world).finish()
    members = Members(world)

    async def scenario() -> None:
        execution, store, node = coordinator(world, members)
        cast("Any", store).kept_seals = lambda *_: asyncio.sleep(0, ())
        node.version = store._newest[world.document.queue_id] = world.version
        execution._is_elected = lambda: is_elected
        await execution.run(world.document.queue_id, close_link.start(Epoch(1)), close_link.step, "cause")
        while execution._tasks:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert members.told == ([] if is_elected else [(1, "g1-a"), (1, "g1-b")])
