"""The slave's end of a link's stream, with a call that breaks at any moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.broker_group.batch_cache import BatchCache
from seriatim.broker_group.core.link_record import LinkRecord, Role
from seriatim.broker_group.link_runner import Flight, LinkRunner
from seriatim.broker_group.service import BrokerService
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import Unreachable
from seriatim.protocol.names import Epoch, Incarnation, Index, QueueId
from seriatim.protocol.position import START, Position

MASTER = Incarnation("disk", 1)
STORE: Any = SimpleNamespace(
    last_position=lambda _: SimpleNamespace(size_bytes=0, committed_index=0),
    position_before=lambda *_: SimpleNamespace(position=START),
    positions=lambda *_: [Position(Index(10), b"hash", {})],
)


class Call:
    """Its first confirmation is never written: the connection breaks meanwhile, or the master gives up."""

    def __init__(self, *, is_broken: bool) -> None:
        self._is_broken = is_broken

    async def read(self) -> pb.ReplicateRequest:
        opened = pb.ReplicateOpen(from_master=pb.Incarnation(disk_id=MASTER.disk_id, start=MASTER.start), token=1)
        return pb.ReplicateRequest(open=opened)

    async def write(self, _: object) -> None:
        if self._is_broken:
            raise Unreachable("the connection broke")
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_stream_that_ends_before_it_began_is_nobody_s(is_broken: bool) -> None:
    """The slave took it for one that would tell what is committed, and kept its readers waiting."""

    async def scenario() -> None:
        runner = LinkRunner(
            LinkRecord(QueueId(1), Epoch(1), role=Role.SLAVE, peer=MASTER, opened_start=1),
            STORE,
            BatchCache(1000),
            Flight(),
        )

        async def opened(*_: object) -> LinkRunner:
            return runner

        broker: Any = SimpleNamespace(until_opened=opened, check_name=lambda _: runner.key)
        service = BrokerService(broker, cast("Any", None), cast("Any", None))
        serving = asyncio.create_task(service.replicate(Call(is_broken=is_broken)))
        await asyncio.wait([serving], timeout=60 if is_broken else 0.1)
        assert serving.done() is is_broken
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert runner.source is None

    asyncio.run(scenario())
