"""The connections of one producer to masters: the stream to the present one, and a connection where a switch would lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from seriatim.producer.core import events
from seriatim.producer.transport import AppendStream
from seriatim.protocol import rpc
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import BatchStub
from seriatim.protocol.errors import DeadlineOver, InvariantBroken, SeriatimError, Unreachable
from seriatim.protocol.names import QueueId
from seriatim.protocol.seriatim_pb2 import AppendOpen, LinkName, SendGrant


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
        self._stream: AppendStream | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, effect: events.OpenStream, cluster: str, queue_id: QueueId) -> None:
        """Open the stream of a grant, and connect to where the next switch would lead."""
        route = effect.grant.route
        if not isinstance(route, SendGrant):
            raise InvariantBroken("a grant without a route")
        address = route.master.address
        link = LinkName(cluster=cluster, queue_id=queue_id, epoch=route.epoch, to=route.master.incarnation)
        opening = AppendOpen(link=link, token=effect.token, next_index=route.next_index)
        number = effect.stream

        def ended(error: SeriatimError) -> None:
            if isinstance(error, Unreachable | DeadlineOver):
                # The next connection to this address must not inherit the present one's back-off.
                self._spawn(self._connections.forget([address]))
                self._handle(events.StreamBroken(number, error.message))
            else:
                self._handle(events.Refused(number, error))

        self._stream = AppendStream(
            route.master.direct,
            lambda: self._connections.stub(address),
            opening,
            lambda next_index: self._handle(events.Acknowledged(number, next_index)),
            ended,
        )
        self._task = self._spawn(self._stream.run())
        if route.next_master:
            self._connections.connect(route.next_master)
        if dead := self._connections.dead((address, route.next_master)):
            self._spawn(self._connections.forget(dead))

    def send(self, batch: EncodedBatch) -> None:
        """Send a batch on the stream, behind those sent before."""
        if self._stream is not None:
            self._stream.put(batch)

    def close_stream(self) -> None:
        """Nothing more is sent or heard on the stream."""
        task, self._task, self._stream = self._task, None, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def close(self) -> None:
        """Close every connection; the stream's task is the producer's to end."""
        await self._connections.close()
