"""What the producer says on the network to a master: one append stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from seriatim.protocol import batch_streams
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.errors import SeriatimError, Unreachable, from_wire
from seriatim.protocol.names import Index
from seriatim.protocol.seriatim_pb2 import AppendOpen, AppendReply, AppendRequest
from seriatim.protocol.streams import each, send, send_now


class AppendStream:
    """One stream of batches to a master; many are in flight.

    `direct` and `stub`: see `batch_streams.append`. `on_acknowledged(next_index)` and, once, `on_ended(error)` are called on
    the loop.
    """

    def __init__(
        self,
        direct: str,
        stub: Callable[[], Any],
        opening: AppendOpen,
        on_acknowledged: Callable[[Index], None],
        on_ended: Callable[[SeriatimError], None],
    ) -> None:
        self._direct = direct
        self._stub = stub
        self._opening = opening
        self._on_acknowledged = on_acknowledged
        self._on_ended = on_ended
        self._call: Any = None  # once it was told what it is for
        self._unsent: deque[EncodedBatch] = deque()
        self._has_unsent = asyncio.Event()

    def put(self, batch: EncodedBatch) -> None:
        """Send a batch behind those put before."""
        if not self._unsent and send_now(self._call, BatchMessage.of(batch)):
            return
        self._unsent.append(batch)
        self._has_unsent.set()

    async def run(self) -> None:
        """Send and listen until the stream ends or this task is cancelled."""
        call = await batch_streams.append(self._direct, self._stub)
        writer = asyncio.create_task(self._write(call))
        try:
            error: SeriatimError = Unreachable("the master ended the stream")

            def told(reply: AppendReply) -> bool:
                nonlocal error
                self._on_acknowledged(Index(reply.next_index))
                if reply.refusal:
                    error = from_wire(reply.refusal)
                return not reply.refusal

            await each(call, told)
        except SeriatimError as failure:
            error = failure
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            call.cancel()
        self._on_ended(error)

    async def _write(self, call: Any) -> None:
        is_open = await send(call, AppendRequest(open=self._opening))
        self._call = call
        while is_open:
            while self._unsent and is_open:
                is_open = await send(call, BatchMessage.of(self._unsent.popleft()))
            self._has_unsent.clear()
            await self._has_unsent.wait()
