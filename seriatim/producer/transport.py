"""What the producer says on the network: questions to any coordinator, one append stream to a master."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import grpc
import grpc.aio

from seriatim.protocol import rpc
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, SeriatimError, Unreachable
from seriatim.protocol.names import Index
from seriatim.protocol.seriatim_pb2 import AppendOpen, AppendRequest, Batch
from seriatim.protocol.seriatim_pb2_grpc import BrokerStub, CoordinatorStub


def addresses_of(coordinators: str | Iterable[str]) -> list[str]:
    """`host:port,host:port`, or a list of such. Raises InvalidArgument where it names none, or something else."""
    parts = coordinators.split(",") if isinstance(coordinators, str) else list(coordinators)
    addresses = [part.strip() for part in parts if part.strip()]
    if not addresses:
        raise InvalidArgument("name a coordinator: HOST:PORT, or set SERIATIM_COORDINATOR")
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidArgument(f"{address!r} is not HOST:PORT")
    return addresses


class Coordinators:
    """The coordinators of a cluster; any serves any request. The last that answered is asked first."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def call(self, method: str, request: object, timeout_s: float) -> Any:
        """Ask one after another until one answers. Raises its error, or Unreachable where none answers in time."""
        problems: list[str] = []
        for address in list(self._addresses):
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = rpc.channel(address)
            try:
                return await rpc.call(getattr(CoordinatorStub(channel), method), request, timeout_s, address)
            except (Unreachable, DeadlineOver) as error:
                problems.append(f"{address}: {error.message}")
                self._addresses.remove(address)
                self._addresses.append(address)
        raise Unreachable(f"no coordinator answers: {'; '.join(problems)}")

    def add(self, addresses: Iterable[str]) -> None:
        """Learn of more of them."""
        self._addresses += [address for address in addresses if address and address not in self._addresses]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)


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
        call: Any = cast(Any, BrokerStub(self._channel)).Append()
        writer = asyncio.create_task(self._write(call))
        try:
            async for reply in call:
                self._on_acknowledged(Index(reply.next_index))
            error: SeriatimError = Unreachable("the master ended the stream")
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
                    await call.write(AppendRequest(batch=Batch(header=batch.header_bytes, payload=batch.payload)))
                self._has_unsent.clear()
                await self._has_unsent.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side learns of it, with its reason
