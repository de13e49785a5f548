"""The connections of one producer to masters: the stream to the present one, and a connection where a switch would lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from seriatim.producer.core import events
from seriatim.protocol import batch_streams, rpc
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import BatchMessage, BatchStub
from seriatim.protocol.errors import DeadlineOver, InvariantBroken, SeriatimError, Unreachable, from_wire
from seriatim.protocol.names import Index, QueueId
from seriatim.protocol.seriatim_pb2 import AppendOpen, AppendReply, AppendRequest, LinkMember, LinkName, SendGrant
from seriatim.protocol.streams import Outgoing, each


class Route:
    """At most one stream at a time. For one asyncio loop.

    `spawn` runs a coroutine as a task of the producer's; `handle` is told what comes of the stream.
    """

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        handle: Callable[[events.Event], None],
    ) -> None:
        self._spawn = spawn
        self._handle = handle
        self._connections = rpc.Connections(BatchStub, has_batches=True)
        self._outgoing: Outgoing | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, effect: events.OpenStream, cluster: str, queue_id: QueueId) -> None:
        """Open the stream of a grant, and connect to where the next switch would lead."""
        route = effect.grant.route
        if not isinstance(route, SendGrant):
            raise InvariantBroken("a grant without a route")
        link = LinkName(cluster=cluster, queue_id=queue_id, epoch=route.epoch, to=route.master.incarnation)
        opening = AppendRequest(open=AppendOpen(link=link, token=effect.token, next_index=route.next_index))
        self._outgoing = Outgoing()
        self._task = self._spawn(self._converse(effect.stream, route.master, self._outgoing, opening))
        if route.next_master:
            self._connections.connect(route.next_master)
        if dead := self._connections.dead((route.master.address, route.next_master)):
            self._spawn(self._connections.forget(dead))

    async def _converse(self, number: int, master: LinkMember, outgoing: Outgoing, opening: AppendRequest) -> None:
        """Send and listen until the stream of this number ends, or this task is cancelled."""
        call = await batch_streams.append(master.direct, lambda: self._connections.stub(master.address))
        writer = asyncio.create_task(outgoing.run(call, opening))
        error: SeriatimError = Unreachable("the master ended the stream")

        def told(reply: AppendReply) -> bool:
            nonlocal error
            self._handle(events.Acknowledged(number, Index(reply.next_index)))
            if reply.refusal:
                error = from_wire(reply.refusal)
            return not reply.refusal

        try:
            await each(call, told)
        except SeriatimError as failure:
            error = failure
        finally:
            writer.cancel()
            try:
                await asyncio.gather(writer, return_exceptions=True)
            finally:
                call.cancel()  # also where the producer is closed at this moment, which cancels once more
        if isinstance(error, Unreachable | DeadlineOver):
            # The next connection to this address must not inherit the present one's back-off.
            self._spawn(self._connections.forget([master.address]))
            self._handle(events.StreamBroken(number, error.message))
        else:
            self._handle(events.Refused(number, error))

    def send(self, batch: EncodedBatch) -> None:
        """Send a batch on the stream, behind those sent before."""
        if self._outgoing is not None:
            self._outgoing.put(BatchMessage.of(batch))

    def close_stream(self) -> None:
        """Nothing more is sent or heard on the stream."""
        task, self._task, self._outgoing = self._task, None, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def close(self) -> None:
        """Close every connection; the stream's task is the producer's to end."""
        await self._connections.close()
