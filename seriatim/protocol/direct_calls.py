"""Unary calls to brokers past gRPC: many at a time on one direct stream.

Problem: through grpc.aio a call costs each end a third of a millisecond of processor time, and each of its two messages wakes a
thread that wakes the loop. A switch makes a dozen of them while sending stands still, and on a busy machine it waits for all those turns.

Idea: a stream of `direct` for each pair of processes, on it numbered requests and their answers, in any order. The messages are
gRPC's, and so is what a call promises: an answer or a typed error within its deadline; who gives a call up, or is gone, has it
cancelled where it runs. Where no such stream can be had at once, or the member is of an earlier version, it is a call by gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from seriatim.protocol import checksums, direct, errors, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.direct import DirectStream
from seriatim.protocol.errors import (
    DeadlineOver,
    IncompatibleVersion,
    MalformedFrame,
    PeerLost,
    SeriatimError,
    Unreachable,
)
from seriatim.protocol.frames import Data
from seriatim.protocol.seriatim_pb2_grpc import BrokerServicer

_METHOD: Final = "Calls"
EARLIER_S: Final = 60.0
"""So long a member of an earlier version isn't tried again: it may have been replaced by one of this version."""

_REQUEST: Final = struct.Struct("<IIB")
"""Number, time limit in ms, length of the method's name, which follows, and then the request. Without a name: the call is given up.

The checksum at the end, of `checksums`, is of all this, and that of a reply of what is before it; an error has its own.
"""
_ANSWER: Final = struct.Struct("<I?")
"""Number, and whether an error follows as `errors.to_wire` writes it, or the reply."""

_UNARY: Final = {
    GetMessageClass(one.input_type): (one.name, GetMessageClass(one.output_type))
    for one in pb.DESCRIPTOR.services_by_name["Broker"].methods
    if not one.client_streaming and not one.server_streaming
}
"""By the type of the request, which no two of them share: name, and type of the reply."""

Reply = TypeVar("Reply")


def _as_they_are(parts: Any) -> Any:
    """Messages of such a stream are parts of bytes."""
    return parts


async def opened(address: str) -> DirectStream | None:
    """As `direct.opened`, for calls."""
    return await direct.opened(address, _METHOD, _as_they_are, bytes)


def methods(serve: direct.Serve) -> dict[str, direct.Method]:
    """What a server of direct streams takes, with calls served so."""
    return {_METHOD: direct.Method(serve, _as_they_are, bytes)}


# ---- calling -------------------------------------------------------------------------------------------------------


class _EarlierVersion(Exception):
    """Who listens there takes no calls."""


class _Line:
    """The stream to one address, made when it is first needed, and again when it broke.

    A frame whose size was damaged on its way swallows all that follows: whoever reads it waits for the rest. So where two calls run out,
    one begun after the other, and nothing was answered since before the first, the next call has another stream. Whoever waits on the old
    one goes on: it may be the member that stands still, or a long answer that stands before theirs. It ends with the last of them.

    `_awaited`: by number, which no two streams share. `_silent_at_s`: when the first call ran out since `_heard_at_s`, if that is later.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._earlier_until_s = 0.0
        self._stream: DirectStream | None = None
        self._opening: asyncio.Task[DirectStream | None] | None = None
        self._readings: dict[DirectStream, asyncio.Task[None]] = {}
        self._awaited: dict[int, tuple[DirectStream, asyncio.Future[bytes]]] = {}
        self._last = 0
        self._heard_at_s = self._silent_at_s = 0.0

    async def stream(self) -> DirectStream | None:
        """None where there can't be one now."""
        if self._stream is not None or self._is_of_earlier_version():
            return self._stream
        opening = self.begin()
        await asyncio.wait([opening])  # who gives up waiting doesn't end it for others
        return None if opening.cancelled() else opening.result()

    def begin(self) -> asyncio.Task[DirectStream | None]:
        """Open it, if nobody does so already."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return self._opening

    async def _open(self) -> DirectStream | None:
        if self._stream is None and not self._is_of_earlier_version():
            stream = await opened(self._address)
            if stream is not None:
                stream.end_when_unheard()
                self._stream = stream
                self._heard_at_s = self._silent_at_s = asyncio.get_running_loop().time()
                self._readings[stream] = asyncio.get_running_loop().create_task(self._read(stream))
        return self._stream

    def _is_of_earlier_version(self) -> bool:
        return asyncio.get_running_loop().time() < self._earlier_until_s

    async def _read(self, stream: DirectStream) -> None:
        over: Exception = Unreachable("the connection was closed")
        try:
            await stream.each(lambda data: self._answered(stream, data))
        except IncompatibleVersion:
            self._earlier_until_s = asyncio.get_running_loop().time() + EARLIER_S
            over = _EarlierVersion()
        except SeriatimError as error:
            over = error
        self._end(stream, over)

    def _end(self, stream: DirectStream, over: Exception) -> None:
        """Nobody gets an answer on this stream any more."""
        if stream is self._stream:
            self._stream = None
        self._readings.pop(stream, None)
        stream.cancel()
        for asked_on, future in self._awaited.values():
            if asked_on is stream and not future.done():
                future.set_exception(over)

    def _answered(self, stream: DirectStream, data: bytes) -> bool:
        """Raises DeadlineOver where it was damaged on its way: nobody knows whose it is."""
        data = _whole(data)
        if len(data) < _ANSWER.size:
            raise MalformedFrame("an answer without a number")
        if stream is self._stream:
            self._heard_at_s = asyncio.get_running_loop().time()
        _, future = self._awaited.get(_ANSWER.unpack_from(data)[0], (None, None))
        if future is not None and not future.done():
            future.set_result(data)
        return True

    def _ran_out(self, began_s: float) -> None:
        """A call on the stream, begun then, had no answer in time."""
        if self._heard_at_s > began_s:
            return
        if self._silent_at_s <= self._heard_at_s:
            self._silent_at_s = asyncio.get_running_loop().time()
        elif began_s >= self._silent_at_s:
            self._stream = None

    async def call(self, stream: DirectStream, request: Any, timeout_s: float, peer: str) -> Any:
        """The reply. Raises what the member answered, Unreachable, DeadlineOver, and _EarlierVersion where nothing was done."""
        name, reply_type = _UNARY[type(request)]
        self._last = number = self._last + 1 & 0xFFFFFFFF
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._awaited[number] = stream, future
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                head = _REQUEST.pack(number, int(timeout_s * 1000), len(name))
                await stream.write((_written(head, name.encode(), request.SerializeToString()),))
                data = await future
        except TimeoutError:
            if stream is self._stream:
                self._ran_out(began_s)
            raise DeadlineOver(f"no answer in time{_at(peer)}") from None
        except IncompatibleVersion:  # of the stream; that of a reply is raised below
            raise _EarlierVersion from None
        except (Unreachable, PeerLost) as error:
            raise Unreachable(f"nobody answers{_at(peer)}: {error.message}") from error
        finally:
            self._awaited.pop(number, None)
            if not future.done() or future.cancelled():
                stream.write_now((_written(_REQUEST.pack(number, 0, 0)),))
            if stream is not self._stream and all(asked_on is not stream for asked_on, _ in self._awaited.values()):
                stream.cancel()
        _, is_error = _ANSWER.unpack_from(data)
        body = data[_ANSWER.size :]
        if is_error:
            raise _error_in(body, peer)
        try:
            return reply_type.FromString(body)
        except DecodeError as error:
            raise rpc.damaged_answer(peer) from error

    def close(self) -> list[asyncio.Task[Any]]:
        """End it; what is still to be waited for."""
        tasks = [task for task in (self._opening, *self._readings.values()) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        for stream in list(self._readings):
            self._end(stream, Unreachable("the connection was closed"))
        return tasks


def _at(peer: str) -> str:
    return f" at {peer}" if peer else ""


def _written(*parts: bytes) -> bytes:
    return checksums.with_checksum(b"".join(parts))


def _whole(data: bytes) -> bytes:
    try:
        return bytes(checksums.without_checksum(data))
    except DecodeError as error:
        raise rpc.damaged_answer() from error


def _error_in(body: bytes, peer: str) -> SeriatimError:
    try:
        return errors.from_wire(body.decode(errors="replace"))
    except MalformedFrame:
        return rpc.damaged_answer(peer)


class DirectCalls:
    """Calls of one process to members, by where each takes direct streams."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def connect(self, address: str, otherwise: Callable[[], object]) -> None:
        """Begin to connect, so that the next call finds a connection. `otherwise`: done where that can't be."""
        opening = self._line(address).begin()
        opening.add_done_callback(lambda _: None if opening.cancelled() or opening.result() else otherwise())

    def _line(self, address: str) -> _Line:
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(address)
        return line

    async def call(
        self,
        address: str,
        method: Callable[[], Callable[..., Awaitable[Reply]]],
        request: Any,
        timeout_s: float,
        peer: str = "",
    ) -> Reply:
        """As `rpc.call`, which it is where nobody takes this at `address` (empty: nobody does): then `method` says by which of a stub."""
        line = self._line(address) if address else None
        stream = None if line is None else await line.stream()
        if line is not None and stream is not None:
            with contextlib.suppress(_EarlierVersion):
                reply: Reply = await line.call(stream, request, timeout_s, peer)
                return reply
        return await rpc.call(method(), request, timeout_s, peer)

    def keep_only(self, addresses: Collection[str]) -> list[asyncio.Task[Any]]:
        """Close the connections to all others; what is still to be waited for."""
        gone = [self._lines.pop(address) for address in list(self._lines) if address not in addresses]
        return [task for line in gone for task in line.close()]

    async def close(self) -> None:
        """Close all of them."""
        await asyncio.gather(*self.keep_only(()), return_exceptions=True)


# ---- serving -------------------------------------------------------------------------------------------------------


class _Aborted(grpc.aio.AbortError):
    """As gRPC's own context raises it. Its argument: the error, as it goes to the caller."""


class _Context:
    """What a method of a servicer needs of a call's context."""

    async def abort(self, _: grpc.StatusCode, details: str) -> NoReturn:
        """The error says all; gRPC's code only repeats it."""
        raise _Aborted(details)


def _error_answer(number: int, error: SeriatimError) -> tuple[bytes, bytes]:
    return _ANSWER.pack(number, True), errors.to_wire(error).encode()


class CallServer:
    """Serves the unary methods of a servicer on direct streams."""

    def __init__(self, servicer: BrokerServicer) -> None:
        self._methods: Mapping[bytes, tuple[Callable[..., Awaitable[Any]], direct.Parse]] = {
            name.encode(): (getattr(servicer, name), direct.parsed_by(request_type.FromString))
            for request_type, (name, _) in _UNARY.items()
        }

    async def serve(self, stream: DirectStream) -> None:
        """Until the caller is gone, which ends what it asked for."""
        running: dict[int, asyncio.Task[None]] = {}

        def take(data: bytes) -> bool:
            try:
                data = bytes(checksums.without_checksum(data))
            except DecodeError:
                # If this is its number, it is told at once; who waits for another one hears of nothing that was done.
                stream.write_now(_error_answer(_ANSWER.unpack_from(data)[0], rpc.damaged_request()))
                return not stream.is_full
            if len(data) < _REQUEST.size:
                raise MalformedFrame("a call without a number")
            number, limit_ms, length = _REQUEST.unpack_from(data)
            name, body = data[_REQUEST.size : _REQUEST.size + length], data[_REQUEST.size + length :]
            if not name:
                if (task := running.get(number)) is not None:
                    task.cancel()
                return True
            if number in running:
                raise MalformedFrame("two calls of one number")
            task = asyncio.get_running_loop().create_task(self._answer(stream, number, limit_ms, name, body))
            running[number] = task
            task.add_done_callback(lambda _: running.pop(number, None))
            return not stream.is_full

        try:
            while await stream.each(take):
                await stream.drained()  # who doesn't take answers is given no more: they would fill the memory
        finally:
            for task in list(running.values()):
                task.cancel()

    async def _answer(self, stream: DirectStream, number: int, limit_ms: int, name: bytes, body: bytes) -> None:
        answer: tuple[Data, ...]
        try:
            async with asyncio.timeout(limit_ms / 1000):
                answer = (_written(_ANSWER.pack(number, False), await self._called(name, body)),)
        except TimeoutError:
            return  # who asked has stopped waiting
        except _Aborted as aborted:
            answer = _ANSWER.pack(number, True), aborted.args[0].encode()
        except SeriatimError as error:
            answer = _error_answer(number, error)
        with contextlib.suppress(SeriatimError):  # the caller is gone
            await stream.write(answer)

    async def _called(self, name: bytes, body: bytes) -> bytes:
        """The reply. Raises Unreachable for what can't be called, which may have been damaged on its way, and _Aborted for what the method raised."""
        if name not in self._methods:
            raise Unreachable(f"{name.decode(errors='replace')} is not known here")
        method, parse = self._methods[name]
        try:
            request = parse(body)
        except MalformedFrame as error:
            raise rpc.damaged_request() from error
        reply: bytes = (await method(request, _Context())).SerializeToString()
        return reply
