"""What the producer says on the network to a master: one append stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from seriatim.protocol import batch_streams
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.errors import SeriatimError, Unreachable, from_wire
from seriatim.protocol.names import Index
from seriatim.protocol.seriatim_pb2 import AppendOpen, AppendReply, AppendRequest
from seriatim.protocol.streams import Outgoing, each


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
        self._outgoing = Outgoing()

    def put(self, batch: EncodedBatch) -> None:
        """Send a batch behind those put before."""
        self._outgoing.put(BatchMessage.of(batch))

    async def run(self) -> None:
        """Send and listen until the stream ends or this task is cancelled."""
        call = await batch_streams.append(self._direct, self._stub)
        writer = asyncio.create_task(self._outgoing.run(call, AppendRequest(open=self._opening)))
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
            try:
                await asyncio.gather(writer, return_exceptions=True)
            finally:
                call.cancel()  # also where the producer is closed at this moment, which cancels once more
        self._on_ended(error)
