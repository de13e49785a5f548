"""Reading and writing streams message by message, gRPC's and direct ones alike; gRPC's generated types only know iterators."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from seriatim.protocol import rpc
from seriatim.protocol.direct import DirectStream, Take
from seriatim.protocol.errors import BadChecksum, PeerLost, SeriatimError

_END: Any = vars(grpc.aio)["EOF"]
_DAMAGED = "the stream's bytes were damaged on their way"


async def read(call: Any, peer: str = "") -> Any | None:
    """The next message of a call, a servicer's context or a direct stream; None where the other side is done.

    Raises the SeriatimError with which the server ended the call, Unreachable where its connection is broken, BadChecksum where what
    came is no message. `peer`: who that is, for people.
    """
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise rpc.translated(error, peer) from error
    except DecodeError as error:  # as of a direct stream: of a batch's bytes we'd say the same
        raise BadChecksum(_DAMAGED) from error
    if message is _END:
        return None
    return message if isinstance(call, DirectStream) else intact(message)


def intact(message: Any) -> Any:
    """A message that a caller got by gRPC, which hands on None for bytes that are none. Raises BadChecksum for that."""
    if message is None:
        raise BadChecksum(_DAMAGED)
    return message


async def each(call: Any, take: Take, peer: str = "") -> bool:
    """Give each message to `take` until it says no (True), or the other side is done (False); of a direct stream where it arrives.

    Raises as `read`, and what `take` raises.
    """
    if isinstance(call, DirectStream):
        return await call.each(take)
    while (message := await read(call, peer)) is not None:
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


class Outgoing:
    """What one end has to say on a stream, in order: sent where it arises if that needs no waiting, else by `run`."""

    def __init__(self) -> None:
        self._call: Any = None  # once it was told what it is for
        self._unsent: deque[Any] = deque()
        self._has_unsent = asyncio.Event()

    def put(self, message: Any) -> None:
        """Send a message behind those put before."""
        if not self._unsent and send_now(self._call, message):
            return
        self._unsent.append(message)
        self._has_unsent.set()

    async def run(self, call: Any, opening: Any) -> None:
        """Send `opening`, and behind it what is put, until the call is over: its reader learns why."""
        is_open = await send(call, opening)
        self._call = call
        while is_open:
            while self._unsent and is_open:
                is_open = await send(call, self._unsent.popleft())
            self._has_unsent.clear()
            await self._has_unsent.wait()
