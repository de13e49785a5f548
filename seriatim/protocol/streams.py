"""Reading and writing streams message by message, gRPC's and direct ones alike; gRPC's generated types only know iterators."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from seriatim.protocol import rpc
from seriatim.protocol.direct import DirectStream, Take
from seriatim.protocol.errors import PeerLost, SeriatimError

_END: Any = vars(grpc.aio)["EOF"]


async def read(call: Any) -> Any | None:
    """The next message of a call, a servicer's context or a direct stream; None where the other side is done.

    Raises the SeriatimError with which the server ended the call, Unreachable where its connection is broken.
    """
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise rpc.translated(error) from error
    return None if message is _END else message


async def each(call: Any, take: Take) -> bool:
    """Give each message to `take` until it says no (True), or the other side is done (False); of a direct stream where it arrives.

    Raises as `read`, and what `take` raises.
    """
    if isinstance(call, DirectStream):
        return await call.each(take)
    while (message := await read(call)) is not None:
        if not take(message):
            return True
    return False


def send_now(call: Any, message: Any) -> bool:
    """Send a message of a direct stream that has room for it: nobody is woken for that. False: nothing was sent; never by gRPC.

    Whatever was given to `write` or `send` before is on its way before it.
    """
    return isinstance(call, DirectStream) and call.write_now(message)


async def send(call: Any, message: Any) -> bool:
    """Send a message of a call that somebody else reads. False: it is over, and the reader learns why."""
    try:
        await call.write(message)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, SeriatimError):
        return False
    return True


async def write(call: Any, message: Any) -> None:
    """Send a message of a call. Raises as `read`, and PeerLost where the server has ended the call without an error."""
    try:
        await call.write(message)
    except grpc.aio.AioRpcError as error:
        raise rpc.translated(error) from error
    except asyncio.InvalidStateError as over:
        # What it ended with, grpc.aio only tells a reader.
        while await read(call) is not None:
            pass
        raise PeerLost("the other side ended the stream") from over
