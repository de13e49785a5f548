"""A command's calls to the coordinators of a cluster: any of them serves, one that doesn't answer is passed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import grpc.aio

from seriatim.producer.transport import addresses_of
from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import DeadlineOver, Unreachable
from seriatim.protocol.log import new_cause_id
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorStub

CALL_TIMEOUT_S = 10.0
_READING = ("Describe", "List")
_PAUSE_S = 0.2
_PAUSE_MAX_S = 2.0


class Coordinators:
    """Coordinators by their addresses, `HOST:PORT[,…]`; the one that answered last is asked first.

    Raises InvalidArgument for anything else than addresses.
    """

    def __init__(self, addresses: str) -> None:
        self._addresses = addresses_of(addresses)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    async def call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a unary method; `timeout_s` is for each coordinator asked.

        A call that changes something is not repeated elsewhere after a time-out: it may have been done. Raises the
        error that a coordinator answers, DeadlineOver, or Unreachable where none answers.
        """
        if "cause_id" in request.DESCRIPTOR.fields_by_name and not request.cause_id:
            request.cause_id = new_cause_id(f"cli-{method}")
        problems: list[str] = []
        for address in list(self._addresses):
            try:
                return await rpc.call(getattr(self._stub(address), method), request, timeout_s, address)
            except DeadlineOver as error:
                if not method.startswith(_READING):
                    raise DeadlineOver(
                        f"coordinator {address} didn't answer {method} within {timeout_s:g} s; it may have done it"
                    ) from error
                problems.append(error.message)
            except Unreachable as error:
                problems.append(error.message)
            self._pass_over(address)
        raise Unreachable(f"no coordinator answers at {', '.join(self._addresses)}: {_short(problems[-1])}")

    async def watch(self, queue: str) -> AsyncIterator[pb.QueueView]:
        """The queue now and whenever it changes, without end; a coordinator that fails is replaced by the next.

        Raises UnknownQueue and other errors of the caller's.
        """
        pause_s = _PAUSE_S
        while True:
            address = self._addresses[0]
            request = pb.QueueRequest(queue=queue, cause_id=new_cause_id("cli-watch"))
            stream: Any = self._stub(address).WatchQueue(request)
            try:
                async for view in stream:
                    pause_s = _PAUSE_S
                    yield view
            except grpc.aio.AioRpcError as failure:
                error = rpc.translated(failure, address)
                if not error.can_retry:
                    raise error from failure
            finally:
                stream.cancel()
            self._pass_over(address)
            await asyncio.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, pause_s * 2)

    def _stub(self, address: str) -> CoordinatorStub:
        if address not in self._channels:
            self._channels[address] = rpc.channel(address)
        return CoordinatorStub(self._channels[address])

    def _pass_over(self, address: str) -> None:
        self._addresses.remove(address)
        self._addresses.append(address)


def call(addresses: str, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """One call, for a command that has no loop of its own. Raises as `Coordinators.call`."""

    async def ask() -> Any:
        async with Coordinators(addresses) as coordinators:
            return await coordinators.call(method, request, timeout_s)

    return asyncio.run(ask())


def _short(problem: str) -> str:
    """The reason, which gRPC's text for a connection that failed says last."""
    return problem.rsplit(": ", 1)[-1] if "Failed to connect" in problem else problem
