"""The reader's calls over gRPC: to any coordinator, and to members."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import grpc
import grpc.aio

from seriatim.consumer.core.view import ChainView
from seriatim.consumer.views import chain_view
from seriatim.protocol import log, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, SeriatimError, Unreachable
from seriatim.protocol.seriatim_pb2_grpc import BrokerStub, CoordinatorStub

_log = log.logger("consumer")

CALL_TIMEOUT_S = 5.0
_RETRY_S = 0.1
_RETRY_MAX_S = 1.0


def addresses(coordinators: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses given as a list, or as one string with commas between. Raises InvalidArgument where there are none."""
    parts = coordinators.split(",") if isinstance(coordinators, str) else list(coordinators)
    found = tuple(part.strip() for part in parts if part.strip())
    if not found or any(":" not in part for part in found):
        raise InvalidArgument(f"coordinators are given as HOST:PORT[,HOST:PORT…], not as {coordinators!r}")
    return found


class Coordinators:
    """All coordinators of a cluster: any of them answers any call; one that doesn't is passed over."""

    def __init__(self, coordinators: str | Sequence[str]) -> None:
        self._addresses = list(addresses(coordinators))
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    def know(self, found: Sequence[str]) -> None:
        """Coordinators that the cluster itself names, behind those given."""
        self._addresses += [address for address in found if address not in self._addresses]

    @property
    def first(self) -> str:
        """The one that is asked first."""
        return self._addresses[0]

    def stub(self, address: str) -> CoordinatorStub:
        if address not in self._channels:
            self._channels[address] = rpc.channel(address)
        return CoordinatorStub(self._channels[address])

    def pass_over(self, address: str) -> None:
        """Ask this one last."""
        if address in self._addresses:
            self._addresses.remove(address)
            self._addresses.append(address)

    async def call(self, method: str, request: object, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a unary method, at each coordinator in turn until one answers.

        Raises what the coordinator answered, or Unreachable where none did within `timeout_s`.
        """
        deadline_s = boottime_s() + timeout_s
        pause_s = _RETRY_S
        last: SeriatimError = Unreachable("no coordinator answers")
        while True:
            for address in list(self._addresses):
                left_s = deadline_s - boottime_s()
                if left_s <= 0:
                    raise Unreachable(f"no coordinator answers at {', '.join(self._addresses)}: {last.message}")
                try:
                    return await rpc.call(getattr(self.stub(address), method), request, min(left_s, 2.0), address)
                except (Unreachable, DeadlineOver) as error:
                    last = error
                    self.pass_over(address)
            await asyncio.sleep(min(pause_s, max(0.0, deadline_s - boottime_s())))
            pause_s = min(_RETRY_MAX_S, pause_s * 2)

    async def describe(self, queue: str, cause_id: str, timeout_s: float = CALL_TIMEOUT_S) -> ChainView:
        """The queue with what only members know. Raises UnknownQueue, Unreachable."""
        request = pb.QueueRequest(queue=queue, cause_id=cause_id)
        return chain_view(await self.call("DescribeQueue", request, timeout_s))

    async def watch(self, queue: str, cause_id: str) -> AsyncIterator[ChainView]:
        """The queue now and whenever it changes, without end: a coordinator that fails is replaced by the next.

        Raises UnknownQueue and other errors of the caller's.
        """
        pause_s = _RETRY_S
        while True:
            address = self.first
            stream: Any = self.stub(address).WatchQueue(pb.QueueRequest(queue=queue, cause_id=cause_id))
            try:
                async for view in stream:
                    pause_s = _RETRY_S
                    yield chain_view(view)
            except grpc.aio.AioRpcError as failed:
                error = rpc.translated(failed, address)
                if not error.can_retry:
                    raise error from failed
                _log.debug("watch broke", queue=queue, coordinator=address, error=error.message)
            finally:
                stream.cancel()
            self.pass_over(address)
            await asyncio.sleep(pause_s)
            pause_s = min(_RETRY_MAX_S, pause_s * 2)


class Members:
    """Channels to members, one an address."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(self, address: str) -> BrokerStub:
        if address not in self._channels:
            self._channels[address] = rpc.channel(address)
        return BrokerStub(self._channels[address])

    async def close(self) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(Exception):
                await channel.close(None)
        self._channels.clear()


class FetchStream:
    """One Fetch at one member: credit goes there, batches come back.

    Iterate it for the replies. Raises SeriatimErrors.
    """

    def __init__(self, stub: BrokerStub, address: str, opening: pb.FetchOpen) -> None:
        self._address = address
        self._requests: asyncio.Queue[pb.FetchRequest | None] = asyncio.Queue()
        self._requests.put_nowait(pb.FetchRequest(open=opening))
        self._call: Any = stub.Fetch(self._outgoing())  # type: ignore[arg-type] # grpc-stubs knows sync calls only

    async def _outgoing(self) -> AsyncIterator[pb.FetchRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def give_credit(self, size_bytes: int) -> None:
        self._requests.put_nowait(pb.FetchRequest(credit_bytes=size_bytes))

    def close(self) -> None:
        self._requests.put_nowait(None)
        self._call.cancel()

    async def replies(self) -> AsyncIterator[pb.FetchReply]:
        try:
            async for reply in self._call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise rpc.translated(error, self._address) from error
        finally:
            self.close()
