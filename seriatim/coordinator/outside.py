"""Addresses for clients outside of the cluster's own network, as behind published ports of containers.

Every process may register a second address, the one that it is reached by from outside. A coordinator that listens on a
second port answers calls there in terms of those: which door a client comes through says where it is. Inside and
outside, the same names mean the same; only addresses differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from seriatim.protocol import rpc
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.seriatim_pb2 import DescribeClusterReply

_ADDRESSES = frozenset({"address", "coordinators", "elected_coordinator", "next_master", "zookeeper"})
"""Fields of the .proto file that hold addresses."""
_INSIDE_ONLY = "direct"
"""Holds an address that only reaches inside."""

OutsideAddresses = Callable[[], Awaitable[Mapping[str, str]]]
"""From inside to outside, of all that have one."""


class AnswersOutside(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not generic when it runs
    """Gives every reply of a server in addresses that reach from outside."""

    def __init__(self, addresses: OutsideAddresses) -> None:
        self._addresses = addresses

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        # Health and reflection name no addresses, and have to answer also where the registrations can't be read.
        is_ours = str(handler_call_details.method).startswith("/seriatim.")
        if handler is None or handler.request_streaming or not is_ours:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._single(handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _single(self, method: Callable[[Any, Any], Awaitable[Message]]) -> Callable[[Any, Any], Awaitable[Message]]:
        async def answer(request: Any, context: Any) -> Message:
            return await self._outside(await method(request, context), context)

        return answer

    def _streaming(
        self, method: Callable[[Any, Any], AsyncIterator[Message]]
    ) -> Callable[[Any, Any], AsyncIterator[Message]]:
        async def answer(request: Any, context: Any) -> AsyncIterator[Message]:
            async for reply in method(request, context):
                yield await self._outside(reply, context)

        return answer

    async def _outside(self, reply: Message, context: Any) -> Message:
        try:
            return outside(reply, await self._addresses())
        except SeriatimError as error:
            await rpc.abort(context, error)
            raise


def outside(reply: Message, addresses: Mapping[str, str]) -> Message:
    """A copy of `reply` with every address that has one from outside replaced; others stay."""
    copied = type(reply)()
    copied.CopyFrom(reply)
    _replace(copied, addresses)
    if isinstance(copied, DescribeClusterReply):
        copied.is_outside = True
    return copied


def _replace(message: Message, addresses: Mapping[str, str]) -> None:
    for field, value in message.ListFields():
        if field.name == _INSIDE_ONLY:
            message.ClearField(_INSIDE_ONLY)
        elif field.name in _ADDRESSES:
            if field.is_repeated:
                value[:] = [addresses.get(one, one) for one in value]
            else:
                setattr(message, field.name, addresses.get(value, value))
        elif field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        elif field.is_repeated:
            for one in value:
                _replace(one, addresses)
        else:
            _replace(value, addresses)
