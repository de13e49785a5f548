"""Reading and writing gRPC streams message by message; the generated types only know iterators."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from seriatim.protocol.errors import PeerLost

_END: Any = vars(grpc.aio)["EOF"]


async def read(call: Any) -> Any | None:
    """The next message of a call or a servicer's context; None where the other side has ended its half.

    Raises grpc.aio.AioRpcError where the server ended the call with an error.
    """
    message = await call.read()
    return None if message is _END else message


async def write(call: Any, message: Any) -> None:
    """Send a message of a call.

    Raises grpc.aio.AioRpcError where the server has ended the call with an error or its connection is broken, PeerLost
    where it has ended it without one.
    """
    try:
        await call.write(message)
    except asyncio.InvalidStateError as over:
        # What it ended with, grpc.aio only tells a reader.
        while await read(call) is not None:
            pass
        raise PeerLost("the other member ended the stream") from over
