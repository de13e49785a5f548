"""The stream to a master, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seriatim.producer.route import Route
from seriatim.protocol import batch_streams
from seriatim.protocol.seriatim_pb2 import AppendRequest, LinkMember
from seriatim.protocol.streams import Outgoing


class Call:
    """Of a master that says nothing."""

    def __init__(self) -> None:
        self.is_cancelled = False

    async def read(self) -> Any:
        await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        pass

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize("steps", range(6))
def test_a_stream_that_is_cancelled_again_while_it_ends_leaves_no_connection_behind(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the producer is closed just after it closed its stream."""
    call = Call()

    async def append(*_: Any) -> Call:
        return call

    async def scenario() -> None:
        route = Route(asyncio.create_task, lambda _: None)
        running = asyncio.create_task(route._converse(1, LinkMember(), Outgoing(), AppendRequest()))
        await asyncio.sleep(0.01)
        running.cancel()
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert call.is_cancelled

    monkeypatch.setattr(batch_streams, "append", append)
    asyncio.run(scenario())
