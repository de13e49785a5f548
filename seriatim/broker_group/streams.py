"""Reading gRPC streams message by message, at both ends; the generated types only know iterators."""

from __future__ import annotations

from typing import Any

import grpc.aio

_END: Any = vars(grpc.aio)["EOF"]


async def read(call: Any) -> Any | None:
    """The next message of a call or a servicer's context; None where the other side has ended its half.

    Raises grpc.aio.AioRpcError where the server ended the call with an error.
    """
    message = await call.read()
    return None if message is _END else message
