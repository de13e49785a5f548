"""Two real brokers: append, crash, seal, resync, fetch."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import (
    BadChecksum,
    DiskFull,
    Fenced,
    MalformedFrame,
    MemberBehind,
    OlderGeneration,
    PartlyResend,
    PeerLost,
    Resend,
    Sealed,
    UnknownLink,
    WrongCluster,
    WrongIncarnation,
    WrongIndex,
)
from seriatim.protocol.names import Epoch
from seriatim.protocol.rpc import call
from tests.integration.broker_members import (
    QUEUE,
    Members,
    as_sent,
    batches,
    members,
    message,
    sent_batches,
    until,
)

Scenario = Callable[[Members], Awaitable[None]]


@pytest.fixture
def run(zookeeper: str, cluster_name: str, tmp_path: Path) -> Callable[..., None]:
    """Run a scenario with a started group."""

    def run(scenario: Scenario, *flags: str) -> None:
        async def scenario_with_group() -> None:
            group = await members(zookeeper, cluster_name, tmp_path, *flags)
            try:
                async with asyncio.timeout(90):
                    await scenario(group)
            finally:
                await group.close()

        asyncio.run(scenario_with_group())

    return run


async def filled(group: Members, count: int = 20, durability: str = "sync") -> pb.Position:
    """Link 1 with that many batches acknowledged."""
    await group.open(durability=durability)
    stream = await group.append(group.a).open()
    await stream.send(batches(count))
    await stream.until_acknowledged(count * 10)
    await stream.close()
    return await group.open(durability=durability)


@pytest.mark.parametrize("durability", ["sync", "interval", "async", "memory"])
def test_many_batches_in_flight_are_acknowledged_and_on_both(run: Callable[..., None], durability: str) -> None:
    async def scenario(group: Members) -> None:
        position = await filled(group, 200, durability)
        assert position.index == 2000
        assert dict(position.marks) == {"source": 1999}
        ends = [await group.seal(member, durability=durability) for member in group.both]
        for end in ends:
            assert end.answer == pb.SealReply.WHOLE
            assert end.positions[-1].index == 2000
            assert end.positions[-1].hash == position.hash
        for member in group.both:
            assert (await group.record_end(member, ends[0].positions[-1])).has_it
            assert sent_batches(await group.fetch(member)) == as_sent(batches(200))

    run(scenario)
