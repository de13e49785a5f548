"""Streams of messages straight over TCP, for what carries the records, and is said all the time: Append, Replicate, Fetch, Connect; and for calls (`direct_calls`).

Problem: through grpc.aio a message costs each end a quarter of a millisecond of processor time, wakes a thread that wakes the
loop, and its bytes are copied again at each end. A record passes four such ends before it is acknowledged.

Idea: one connection for a stream, on it the frames of `frames`; the messages are the same bytes as in gRPC. A broker listens for
them on a port of its own and registers it. All else stays gRPC's, and so do these calls where that port can't be reached at
once: from outside of the cluster's network, behind a firewall, from or to an older version.

A stream is opened by a frame that names the format and the method. Who is done writing says *end*; a server that refuses
says the error. What is read ahead of its reader is bounded, and so is what is written ahead of the network. A connection whose
other machine is gone ends after SILENCE_S, as gRPC's do; a process that stands still behind a living one is noticed by
whoever waits for its answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from seriatim.protocol import descriptors, errors, frames, log, patience
from seriatim.protocol.errors import (
    BadChecksum,
    IncompatibleVersion,
    InvalidArgument,
    MalformedFrame,
    PeerLost,
    SeriatimError,
    Unreachable,
)
from seriatim.protocol.frames import Data, FrameReader, Kind
from seriatim.protocol.names import bare, is_every_address

_log = log.logger("direct")

_FORMAT: Final = b"SRS\x01"
CONNECT_S: Final = 0.1
"""Who isn't connected within that goes through gRPC, which is patient with paths that are long, or swallow what they don't let by."""
AVOIDED_S: Final = 10.0
"""An address that didn't answer within CONNECT_S isn't tried again for so long: who reads a thousand links there opens a thousand streams."""
GREETING_S: Final = 1.0
"""So long may who was never heard before take to answer; else as AVOIDED_S says."""
STRANGER_S: Final = 60.0
"""An address at which somebody else answers isn't tried again for so long."""
OPENING_S: Final = 5.0
"""So long may a connection stand before it says what it is for."""
SILENCE_S: Final = 5
OPENING_BYTES: Final = 1024
"""So long may what it is for be."""
LINGER_S: Final = patience.MAX_S
"""So long who was told the end of a stream has for leaving it: what was said before may be long on its way."""
STRANGER_LINGER_S: Final = 1.0
"""The same for who didn't say what the connection is for."""
REFUSED_AT_ONCE: Final = 16
"""So many, of those for whom there is no room, are told so at a time; the others are cut off."""
UNREAD_BYTES: Final = 1024 * 1024
"""Beyond so much that nobody has taken, nothing more is read."""
MESSAGE_BYTES: Final = 64
"""So much room a message takes that nobody has taken, beside its own bytes: it may have none, and there may be millions."""
UNSENT_BYTES: Final = 1024 * 1024
"""Beyond so much that the network hasn't taken, who writes waits."""


Take = Callable[[Any], bool]
"""Is given a message; says whether another one may come."""
Parse = Callable[[Data], Any]
Serialize = Callable[[Any], Sequence[Data]]


class DirectStream(asyncio.BufferedProtocol):
    """One end of a stream. `write` and `read` take and give messages, which `serialize` makes bytes of, in parts, and `parse` finds in them.

    `opened(stream, method)`: on the side that was connected to, called once, raises for what it isn't opened for. `lost` is called when the connection is gone.
    """

    def __init__(self, opened: Callable[[DirectStream, str], None] | None = None) -> None:
        self._opened = opened
        self._is_caller = opened is None
        self._reader = FrameReader(frames.MAX_FRAME_BYTES if opened is None else OPENING_BYTES)
        self._unread: deque[Data] = deque()
        self._unread_bytes = 0
        self._arrived: asyncio.Future[bool] | None = None
        self._taker: Take | None = None
        self._waiting: list[asyncio.Future[bool]] = []
        self._is_full = False
        self._is_reading = True
        self._is_ended = False
        self._is_closing = False
        self._is_open = False
        self._is_lost = False
        self._leaving: asyncio.TimerHandle | None = None
        self._error: SeriatimError | None = None
        self._transport: Any = None
        self.parse: Parse = bytes
        self.serialize: Serialize = lambda message: (message,)
        self.lost: Callable[[], None] = lambda: None

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        _end_when_silent(transport.get_extra_info("socket"))
        if not self._is_caller:
            self.end_when_unheard()
        if self._is_lost:
            self._transport.abort()  # cancelled before it was made

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._is_lost = True
        if self._leaving is not None:
            self._leaving.cancel()
        self._over(Unreachable(f"the connection broke: {exc or 'it was closed'}"))
        self.lost()

    def eof_received(self) -> None:
        """See asyncio.Protocol: the transport closes itself."""

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        """See asyncio.BufferedProtocol."""
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        if self._is_closing:
            return  # thrown away
        try:
            for kind, data in self._reader.filled(nbytes):
                self._take(kind, data)
        except SeriatimError as error:
            if self._is_caller:  # nothing is wrong with what it asked: somebody else has the port
                self._over(Unreachable(f"who answers there makes no sense: {error.message}"))
                self.cancel()
            else:
                self.fail(_damaged(error) if self._is_open and isinstance(error, MalformedFrame) else error)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_full = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_full = False
        self._wake_writers()

    # ---- what arrives

    def _take(self, kind: Kind, data: Data) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened(self, _method(kind, bytes(data)))
            self._is_open = True
        elif kind is Kind.MESSAGE:
            if self._taker is None or not self._handed(self._taker, data):
                self._unread.append(data)
                self._unread_bytes += len(data) + MESSAGE_BYTES
                self._keep_reading()
                _wake(self._arrived)
        elif kind is Kind.END:
            self._is_ended = True
            _wake(self._arrived)
        elif kind is Kind.ERROR:
            self._over(_told(bytes(data)))
        else:
            raise MalformedFrame("a stream is opened once")

    def _handed(self, taker: Take, data: Data) -> bool:
        """Whether `each` still waits, and so has it now."""
        waiting = self._arrived
        if waiting is None or waiting.done():
            return False
        try:
            goes_on = taker(self._parsed(data))
        except Exception as error:
            if waiting.done():  # given up by what it led to
                raise
            waiting.set_exception(error)
        else:
            if not goes_on and not waiting.done():
                waiting.set_result(True)
        return True

    def _keep_reading(self) -> None:
        wanted = self._unread_bytes <= UNREAD_BYTES
        if wanted is not self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _over(self, error: SeriatimError) -> None:
        """Nothing more comes; what came before may still be read."""
        self._error = self._error or error
        _wake(self._arrived)
        self._wake_writers()

    def _wake_writers(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            _wake(each)

    def _parsed(self, data: Data) -> Any:
        try:
            return self.parse(data)
        except MalformedFrame as error:
            raise _damaged(error) from error

    # ---- for who uses it

    async def read(self) -> Any | None:
        """The next message; None where the other side is done. Raises the error with which it ended, Unreachable where it is gone."""
        while not self._unread:
            if self._is_over():
                return None
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return self._next()

    async def each(self, take: Take) -> bool:
        """Give messages to `take` where they arrive, waking nobody for each, until it says no (True) or the other side is done (False).

        Raises as `read`, and what `take` raises.
        """
        while True:
            while self._unread:
                if not take(self._next()):
                    return True
            if self._is_over():
                return False
            self._arrived = asyncio.get_running_loop().create_future()
            self._taker = take
            try:
                if await self._arrived:
                    return True
            finally:
                self._taker = None

    def _is_over(self) -> bool:
        """Whether the other side is done. Raises the error with which it ended."""
        if not self._is_ended and self._error is not None:
            raise self._error
        return self._is_ended

    def _next(self) -> Any:
        data = self._unread.popleft()
        self._unread_bytes -= len(data) + MESSAGE_BYTES
        self._keep_reading()
        return self._parsed(data)

    async def write(self, message: Any) -> None:
        """Send a message behind those before it; waits where the network is slower. Raises as `read`, and PeerLost where the server is done."""
        self._send(Kind.MESSAGE, *self.serialize(message))
        await self.drained()

    @property
    def is_full(self) -> bool:
        """Whether the network has yet to take what was written."""
        return self._is_full

    async def drained(self) -> None:
        """When there is room to write, or the stream is over."""
        while self._is_full and self._error is None:
            drained = asyncio.get_running_loop().create_future()
            self._waiting.append(drained)
            await drained

    def write_now(self, message: Any) -> bool:
        """Send a message behind those before it, where that needs no waiting. False: nothing was sent, `write` says why."""
        if self._is_full:
            return False
        try:
            self._send(Kind.MESSAGE, *self.serialize(message))
        except SeriatimError:
            return False
        return True

    async def done_writing(self) -> None:
        """Say that nothing more comes. Raises as `write`."""
        self._send(Kind.END)

    def _send(self, kind: Kind, *parts: Data) -> None:
        if self._is_ended and self._is_caller:
            raise PeerLost("the other side ended the stream")
        if self._error is not None:
            raise self._error
        if self._transport.is_closing():
            # `connection_lost` is called when the loop turns, which who sends a backlog may not wait for; asyncio would warn of each part.
            raise Unreachable("the connection broke: it was closed")
        for part in frames.encode(kind, *parts):
            self._transport.write(part)

    def expect_opened(self) -> None:
        """It is time that the other side has said what it wants."""
        if self._opened is not None:
            self.cancel()

    def open(self, method: str) -> None:
        """Say what the stream is for."""
        self._send(Kind.OPEN, _FORMAT + method.encode())

    def end_when_unheard(self) -> None:
        """What wasn't received for SILENCE_S ends it, too: a server's stream, and that of a caller that says little.

        Who sends the batches has deadlines of its own, and mustn't take a server for gone that doesn't read while its disk is slow.
        """
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)

    def cancel(self) -> None:
        """End it at once, on both sides."""
        if self._is_lost:
            return  # asyncio's transport may be in pieces
        if self._transport is None:
            self._is_lost = True
            return
        self._transport.abort()

    def finish(self) -> None:
        """The server is done: what was written before reaches the other side."""
        self._close(Kind.END)

    def fail(self, error: SeriatimError) -> None:
        """As `finish`, with an error."""
        self._close(Kind.ERROR, errors.to_wire(error).encode())
        self._over(error)

    def _close(self, kind: Kind, data: bytes = b"") -> None:
        """Say why, and wait for the other side to leave: to close on what it still sends would take back what it was told."""
        if self._is_closing or self._transport.is_closing():
            return
        self._is_closing = True
        self._transport.writelines(frames.encode(kind, data))
        self._transport.write_eof()
        if not self._is_reading:
            self._transport.resume_reading()
        linger_s = LINGER_S if self._is_open else STRANGER_LINGER_S
        self._leaving = asyncio.get_running_loop().call_later(linger_s, self.cancel)


def _method(kind: Kind, data: bytes) -> str:
    if kind is not Kind.OPEN or not data.startswith(_FORMAT[:-1]) or len(data) < len(_FORMAT):
        raise MalformedFrame("a stream begins with what it is for: is it Seriatim that talks?")
    if not data.startswith(_FORMAT):
        raise IncompatibleVersion(f"streams of format {data[len(_FORMAT) - 1]} are not known here")
    return data[len(_FORMAT) :].decode(errors="replace")


def _damaged(error: MalformedFrame) -> BadChecksum:
    """Of a stream that was opened right: bytes that TCP's checksum let by. As with a batch's, they are sent again."""
    return BadChecksum(f"the stream's bytes were damaged on their way: {error.message}")


def _told(data: bytes) -> SeriatimError:
    try:
        return errors.from_wire(data.decode())
    except UnicodeDecodeError as error:
        raise MalformedFrame("an error that can't be read") from error


def _wake(future: asyncio.Future[bool] | None) -> None:
    if future is not None and not future.done():
        future.set_result(False)


def _end_when_silent(connection: socket.socket) -> None:
    """Where no packet comes back, the other machine's system is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S - 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _on_every_address(port: int) -> socket.socket:
    """Of both kinds, whichever was written, as gRPC takes it: asyncio would be reached by one only."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)


def parsed_by(parse: Callable[[Any], Any]) -> Parse:
    """What gRPC's core does elsewhere: bytes that are no message are the other side's fault. Small messages come as bytes."""

    def parsed(data: Data) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise MalformedFrame("these bytes are not the message that belongs here") from error

    return parsed


# ---- calling -------------------------------------------------------------------------------------------------------


_avoided_until_s: dict[str, float] = {}
"""By address that couldn't be reached when it was last tried; the clock is that of all loops."""
_greeted: set[str] = set()
"""Addresses at which a server of ours answered, and that could be reached since."""


class _Stranger(OSError):
    """Somebody takes the connection, and isn't a server of ours: another program, or a proxy or firewall on the way."""


async def opened(address: str, method: str, serialize: Serialize, parse: Parse) -> DirectStream | None:
    """A stream to `HOST:PORT` for a method; None where nobody of ours can be reached there within CONNECT_S, or could be a moment ago."""
    now_s = asyncio.get_running_loop().time()
    if now_s < _avoided_until_s.get(address, 0.0):
        return None
    try:
        if address not in _greeted:
            await _greet(address)
            _greeted.add(address)
        stream = await _connected(address)
    except (OSError, TimeoutError, RuntimeError, UnicodeError) as error:
        # RuntimeError: once Python's main thread has returned there is none to look a name up. gRPC does that by itself.
        # UnicodeError: no name that can be looked up, as a member of an earlier version may be advertised under.
        if address not in _avoided_until_s:  # once: members try ten times a second to reach each other
            _log.info("no direct stream, it goes through gRPC", address=address, method=method, reason=repr(error))
        _greeted.discard(address)
        is_silent = type(error) is TimeoutError  # and not the system's, which is an OSError with a number
        avoided_s = STRANGER_S if isinstance(error, _Stranger) else AVOIDED_S if is_silent else 0.0
        _avoided_until_s[address] = now_s + avoided_s
        return None
    _avoided_until_s.pop(address, None)
    stream.serialize, stream.parse = serialize, parse
    stream.open(method)
    return stream


async def _connected(address: str) -> DirectStream:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(CONNECT_S):
        to, stream = await asyncio.get_running_loop().create_connection(DirectStream, bare(host), int(port))
    if to.get_extra_info("sockname") == to.get_extra_info("peername"):
        # A free port of this machine, where a broker was: the system may give it to this very connection, as its own end.
        stream.cancel()
        raise ConnectionRefusedError("nobody listens there")
    return stream


async def _greet(address: str) -> None:
    """Returns where a server of ours answers: one of each version knows no method of this name, and says so. Raises _Stranger, and as connecting does.

    Who says nothing may be one of ours that stands still: TimeoutError, and it is asked again sooner. Were nobody asked, the first that is
    told of a stranger would be whoever sends, as a failure of the master, of each in turn.
    """
    stream = await _connected(address)
    try:
        async with asyncio.timeout(GREETING_S):
            stream.open("Greet")
            await stream.read()
    except IncompatibleVersion:
        return
    except SeriatimError as error:
        raise _Stranger(str(error)) from error
    finally:
        stream.cancel()
    raise _Stranger("somebody takes the connection, and ends it")


# ---- serving -------------------------------------------------------------------------------------------------------


Serve = Callable[[DirectStream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Method:
    """What a stream may be opened for. `serve` reads and writes it, and returns when it is done; a SeriatimError ends it with that."""

    serve: Serve
    serialize: Serialize
    parse: Parse


class DirectServer:
    """Listens for streams, and serves each in a task of its own, which is cancelled when the connection is gone."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = methods
        self._streams: set[DirectStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._most = descriptors.share(2)

    async def listen(self, host: str, port: int) -> int:
        """Start; `port` 0: any free one. Returns the port. Raises InvalidArgument where it can't be had."""
        loop = asyncio.get_running_loop()
        try:
            if is_every_address(host):
                self._server = await loop.create_server(self._accepted, sock=_on_every_address(port))
            else:
                self._server = await loop.create_server(self._accepted, bare(host), port)
        except OSError as error:
            raise InvalidArgument(f"can't listen on {host}:{port}: {error.strerror}") from error
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def stop(self) -> None:
        """Take no more, and end those that there are."""
        if self._server is not None:
            self._server.close()
        for stream in list(self._streams):
            stream.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self) -> DirectStream:
        is_full = len(self._streams) >= self._most
        stream = DirectStream(self._refuse if is_full else self._begin)
        if is_full:
            _log.lasting("no more streams are taken", most=self._most, cause_id=log.new_cause_id("direct"))
        if len(self._streams) >= self._most + REFUSED_AT_ONCE:
            stream.cancel()
            return stream
        stream.lost = lambda: self._streams.discard(stream)
        self._streams.add(stream)
        opening_s = STRANGER_LINGER_S if is_full else OPENING_S
        asyncio.get_running_loop().call_later(opening_s, stream.expect_opened)
        return stream

    def _refuse(self, _: DirectStream, __: str) -> None:
        raise Unreachable(f"there is no room for another stream, {self._most} are open")

    def _begin(self, stream: DirectStream, name: str) -> None:
        method = self._methods.get(name)
        if method is None:
            raise IncompatibleVersion(f"{name!r} is nothing that a stream can be opened for here")
        stream.serialize, stream.parse = method.serialize, method.parse
        task = asyncio.get_running_loop().create_task(_serve(stream, name, method), name=f"direct-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def lost() -> None:
            self._streams.discard(stream)
            task.cancel()

        stream.lost = lost


async def _serve(stream: DirectStream, name: str, method: Method) -> None:
    try:
        await method.serve(stream)
    except SeriatimError as error:
        stream.fail(error)
    except Exception as error:
        _log.exception("call failed", method=name)
        stream.fail(errors.defect(error, name))
    else:
        stream.finish()
