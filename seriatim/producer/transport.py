"""What the producer says on the network to a master: one append stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio

from seriatim.protocol import rpc
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import BatchMessage, BatchStub
from seriatim.protocol.errors import SeriatimError, Unreachable, from_wire
from seriatim.protocol.names import Index
from seriatim.protocol.seriatim_pb2 import AppendOpen, AppendRequest


class AppendStream:
    """One stream of batches to a master; many are in flight.

    `on_acknowledged(next_index)` and, once, `on_ended(error)` are called on the loop.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        opening: AppendOpen,
        on_acknowledged: Callable[[Index], None],
        on_ended: Callable[[SeriatimError], None],
    ) -> None:
        self._channel = channel
        self._opening = opening
        self._on_acknowledged = on_acknowledged
        self._on_ended = on_ended
        self._unsent: deque[EncodedBatch] = deque()
        self._has_unsent = asyncio.Event()

    def put(self, batch: EncodedBatch) -> None:
        """Send a batch behind those put before."""
        self._unsent.append(batch)
        self._has_unsent.set()

    async def run(self) -> None:
        """Send and listen until the stream ends or this task is cancelled."""
        call: Any = cast(Any, BatchStub(self._channel)).Append()
        writer = asyncio.create_task(self._write(call))
        try:
            error: SeriatimError = Unreachable("the master ended the stream")
            async for reply in call:
                self._on_acknowledged(Index(reply.next_index))
                if reply.refusal:
                    error = from_wire(reply.refusal)
                    break
        except grpc.aio.AioRpcError as failure:
            error = rpc.translated(failure)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            call.cancel()
        self._on_ended(error)

    async def _write(self, call: Any) -> None:
        try:
            await call.write(AppendRequest(open=self._opening))
            while True:
                while self._unsent:
                    batch = self._unsent.popleft()
                    await call.write(BatchMessage.of(batch))
                self._has_unsent.clear()
                await self._has_unsent.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side learns of it, with its reason
