"""gRPC, as every process of Seriatim uses it: channels, servers, deadlines, and errors on the wire.

A SeriatimError travels as a gRPC status whose details are the line of JSON that `errors.to_wire` makes; any other
status is translated here: nobody answers is Unreachable, too late is DeadlineOver.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import os
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from seriatim.protocol import checksums, descriptors, errors, lifecycle, log, patience
from seriatim.protocol.errors import BugError, DeadlineOver, InvalidArgument, MalformedFrame, SeriatimError, Unreachable
from seriatim.protocol.frames import MAX_FRAME_BYTES

_log = log.logger("rpc")

_POLLER = "PollerCompletionQueue"

_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    # Where no packet comes back the connection is given up after 5 s (TCP_USER_TIMEOUT); a broken one is seen at once.
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SMALL = [("grpc.http2.ping_timeout_ms", 2000)]
"""Where the other machine is there and its process stands still, after 5 s, too."""
_BATCHES = [("grpc.http2.ping_timeout_ms", int(patience.MAX_S * 1000))]
"""Behind a slow path an answer waits for the batches before it; whoever sends or reads them has a patience of its own."""
_STATUS_BYTES = 4096
"""gRPC refuses what a call ends with where that is some 8 KiB long, and writes what isn't a letter with up to three."""
_STATUS_CHARACTERS = 500
_DEFECTS = ("Unexpected <class", "SERVER: Sent message larger", "CLIENT: Sent message larger", "Sent message larger")
"""So grpc.aio's server says that a servicer raised what is no error of ours, and its core that a message is longer than any may be. All else that it
tells by itself is about the connection, as bytes that are no HTTP/2."""
_NO_MESSAGE = f"{DecodeError}"
"""So grpc.aio's server says that what it was asked is no message; before anybody is called."""
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    # A restarted process is found again within half a second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # So long an attempt may take, whatever its name says: two round trips to far away, a packet sent again, a busy machine.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # Also where it came back under another address: a container's name is looked up anew at each try.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    # Two processes must not share a port by accident.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    # So long may a connection stand before it talks HTTP/2.
    ("grpc.server_handshake_timeout_ms", 10_000),
]

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Stub = TypeVar("Stub")


HANDED_BACK_S = 0.01
"""gRPC hands back a call that was cancelled so much later at most. One that it can't, as its loop was closed, or gRPC itself has ended, stays in memory for good."""
_ENDING_S = 1.0
_THREADS = frozenset(("event_engine", "grpc_global_tim", "lifeguard"))
"""Of gRPC's core, as the system calls them: there as long as it is in use, and some ten milliseconds more."""


class _Process:
    """`channels`: those that are there, some of them `closed`. `is_deaf`: it was forked while there were some; gRPC's thread isn't in here."""

    def __init__(self) -> None:
        self.channels: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()
        self.closed: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()
        self.is_deaf = False
        self.closed_at_s = -math.inf
        lifecycle.call_in_child(self, _Process._forked)
        os.register_at_fork(before=self._let_go)

    def _let_go(self) -> None:
        """A closed one keeps gRPC going, too, and what went wrong with it may keep it, in a circle: an `open` that failed.

        It ends its threads a moment later, and a fork in between would leave the locks that they have held for ever.
        """
        if self.closed:
            gc.collect()
            self.closed_at_s = time.monotonic()
        if not self.channels:
            while time.monotonic() < self.closed_at_s + _ENDING_S and not _THREADS.isdisjoint(_threads()):
                time.sleep(0.001)

    def _forked(self) -> None:
        self.is_deaf = self.is_deaf or bool(self.channels)


def _threads() -> Iterator[str]:
    """What this process's threads are called by the system; none where it doesn't tell."""
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_text().rstrip("\n")


_process = _Process()


def channel(address: str, *, has_batches: bool = False) -> grpc.aio.Channel:
    """A channel to `HOST:PORT`. It connects when first used, and again whenever it has to.

    `has_batches`: of clients, who may stand behind a slow path. Raises InvalidArgument in a process forked from one that had channels:
    nothing would ever be answered here.
    """
    if _process.is_deaf:
        raise InvalidArgument(
            "this process was forked while gRPC was in use, which doesn't work here since: start processes by spawn, "
            "or close producers and consumers before the fork"
        )
    made = grpc.aio.insecure_channel(address, options=[*_CHANNEL_OPTIONS, *(_BATCHES if has_batches else _SMALL)])
    _process.channels.add(made)
    return made


def connect(to: grpc.aio.Channel) -> None:
    """Begin to connect, so that the next call finds a connection. Nothing happens where there is one, or one under way."""
    to.get_state(try_to_connect=True)


def is_connected(to: grpc.aio.Channel) -> bool:
    """Whether somebody answers there, as far as is known."""
    return to.get_state() is grpc.ChannelConnectivity.READY


def checked(stub: Callable[[Any], Stub]) -> Callable[[grpc.aio.Channel], Stub]:
    """Makes such stubs, for `Connections`, whose messages have checksums."""
    return lambda to: stub(checksums.CheckedChannel(to))


class Connections(Generic[Stub]):
    """A channel for each address, and on it a stub that `make` makes: once, because a stub makes a callable for each method."""

    def __init__(self, make: Callable[[grpc.aio.Channel], Stub], *, has_batches: bool = False) -> None:
        self._make = make
        self._has_batches = has_batches
        self._found: dict[str, tuple[grpc.aio.Channel, Stub]] = {}

    def _at(self, address: str) -> tuple[grpc.aio.Channel, Stub]:
        found = self._found.get(address)
        if found is None:
            to = channel(address, has_batches=self._has_batches)
            found = self._found[address] = to, self._make(to)
        return found

    def stub(self, address: str) -> Stub:
        return self._at(address)[1]

    def connect(self, address: str) -> None:
        """As the function of this name."""
        connect(self._at(address)[0])

    def dead(self, known: Collection[str]) -> list[str]:
        """Other addresses than these where nobody answers: gRPC would try them twice a second, for ever.

        Where somebody does, what is under way may be worth waiting for.
        """
        others = [address for address in self._found if address not in known]
        return [one for one in others if not is_connected(self._found[one][0])]

    async def forget_dead(self, known: Collection[str]) -> None:
        """Close the channels to those."""
        await self.forget(self.dead(known))

    async def close(self) -> None:
        """Close all channels. There may be no others in the process, and its loop may be closed behind this."""
        last = [to for to, _ in self._found.values()]
        await self.forget(list(self._found))
        if last:
            await asyncio.sleep(HANDED_BACK_S)  # while they keep gRPC going

    async def forget(self, addresses: Iterable[str]) -> None:
        """Close the channels to these addresses, where there are any. One that can't be closed is let go."""
        gone = [self._found.pop(address)[0] for address in addresses if address in self._found]
        _process.closed.update(gone)
        _process.closed_at_s = time.monotonic()
        for to in gone:
            with contextlib.suppress(Exception):
                await to.close(None)


def server_options(*, has_batches: bool = False) -> list[tuple[str, Any]]:
    """Seriatim's limits, also for a server on threads."""
    return [*_SERVER_OPTIONS, *(_BATCHES if has_batches else _SMALL)]


def server(interceptors: Sequence[Any] = (), *, has_batches: bool = False) -> grpc.aio.Server:
    """A server with Seriatim's limits; add servicers, then `listen`, then start it. `has_batches`: of brokers, see `channel`."""
    # A broker takes direct streams besides; a coordinator may have two servers.
    most = descriptors.share(4 if has_batches else 3)
    options = [*server_options(has_batches=has_batches), ("grpc.max_allowed_incoming_connections", most)]
    return grpc.aio.server(options=options, interceptors=interceptors)


def listen(to: grpc.aio.Server, address: str) -> int:
    """Bind `HOST:PORT` (port 0: any free one) and return the port. Raises InvalidArgument where it can't be bound."""
    try:
        port = to.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidArgument(f"can't listen on {address}: it is in use, or not an address of this machine") from error
    if port == 0:
        raise InvalidArgument(f"can't listen on {address}: it is in use, or not an address of this machine")
    return port


def translated(error: grpc.aio.AioRpcError, peer: str = "") -> SeriatimError:
    """The error that a failed call means."""
    details = error.details() or ""
    found = _ours(details)
    if found is not None:
        if type(found) is SeriatimError and error.code() is grpc.StatusCode.UNAVAILABLE:
            # A reason that isn't known here, such as the end of the server's own session: it can't serve, another may.
            return Unreachable(f"can't serve now{f' at {peer}' if peer else ''}: {found.message}")
        return found
    where = f" at {peer}" if peer else ""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineOver(f"no answer in time{where}")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unreachable(f"what answers{where} is another kind of server, or an earlier version: {details}")
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unreachable(f"nobody answers{where}: {details}")
    if error.code() is grpc.StatusCode.INTERNAL and details == "Internal error from Core":
        # A write that met the end of its stream hides the status with which the other side ended it.
        return Unreachable(f"the stream was ended{where}")
    if error.code() is grpc.StatusCode.UNKNOWN and _NO_MESSAGE in details:
        return damaged_request(peer)
    if details.startswith("{"):
        return damaged_answer(peer)
    if details.startswith(_DEFECTS):
        return BugError(f"{error.code().name}{where}: {details}")
    return Unreachable(f"the connection failed{where}: {error.code().name}: {details}")


def _ours(details: str) -> SeriatimError | None:
    """What the other side's own server told; None where something between us did, as a proxy."""
    if details.startswith("{"):
        with contextlib.suppress(MalformedFrame):
            return errors.from_wire(details)
    return None


def is_answer(error: SeriatimError) -> bool:
    """Whether the other side told of this error itself, and so is there."""
    failure = error.__cause__
    return isinstance(failure, grpc.aio.AioRpcError) and (failure.details() or "").startswith("{")


async def call(method: Callable[..., Awaitable[Reply]], request: object, timeout_s: float, peer: str = "") -> Reply:
    """Call a unary method of a stub within `timeout_s`. Raises a SeriatimError, never gRPC's own.

    DeadlineOver, too, where an answer came that can't be read: what was asked for may have been done.
    """
    try:
        reply = await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise translated(error, peer) from error
    except grpc.aio.UsageError as error:  # between two looks at the channel
        raise _was_closed(peer) from error
    except asyncio.CancelledError:
        check_cancelled(peer)
        raise
    if reply is None:  # so grpc.aio hands on bytes that are no message
        raise damaged_answer(peer)
    return reply


def opened(stream: Callable[[], Reply]) -> Reply:
    """The call that a stub's method makes which streams. Raises Unreachable where its channel was closed since the stub was made."""
    try:
        return stream()
    except grpc.aio.UsageError as error:
        raise _was_closed("") from error


def damaged_request(peer: str = "") -> Unreachable:
    """What was asked is no message, and so nobody was called."""
    return Unreachable(f"the request was damaged on its way, and nothing was done{f' at {peer}' if peer else ''}")


def damaged_answer(peer: str = "") -> DeadlineOver:
    """What was answered is no message: what was asked for may have been done, as where nothing comes in time."""
    return DeadlineOver(f"the answer was damaged on its way{f' from {peer}' if peer else ''}")


def check_cancelled(peer: str = "") -> None:
    """For whoever meets a CancelledError while he waits for a call.

    Raises Unreachable where nobody has cancelled him: the channel was closed, with all calls on it.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise _was_closed(peer) from None


def _was_closed(peer: str) -> Unreachable:
    return Unreachable(f"the connection{f' to {peer}' if peer else ''} was closed")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SeriatimError) -> None:
    """End a call with `error`; where that is too long, without its details, and without the end of a long message."""
    said = errors.to_wire(error)
    if len(said) > _STATUS_BYTES:
        message = error.message
        is_cut = len(message) > _STATUS_CHARACTERS
        said = errors.to_wire(type(error)(f"{message[:_STATUS_CHARACTERS]}…" if is_cut else message))
    await context.abort(grpc.StatusCode[error.grpc_status], said)


def ignore_shared_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler for a loop that is not the only one of its process.

    grpc.aio wakes every loop for what one of them may read: the others find nothing there, or what was meant for a loop
    that is closed. Neither is an error.
    """
    error = context.get("exception")
    is_for_nobody = isinstance(error, RuntimeError) and _POLLER in repr(context.get("handle"))
    if not (is_for_nobody or isinstance(error, BlockingIOError)):
        loop.default_exception_handler(context)


def forget(loop: asyncio.AbstractEventLoop) -> None:
    """To be called before a loop is closed that isn't its process's only one: gRPC would keep it for as long as anybody uses gRPC here.

    gRPC can't be told that. What it knows of loops is found by how it watches this one; where it isn't, as in another version
    of gRPC or of another kind of loop, the loop stays, some 5 KB.
    """
    selector = getattr(loop, "_selector", None)
    for watched in [] if selector is None else list(selector.get_map().values()):
        poller = getattr(getattr(getattr(watched.data[0], "_callback", None), "func", None), "__self__", None)
        if type(poller).__name__ == _POLLER:
            loop.remove_reader(watched.fileobj)
            for known in gc.get_referents(poller):
                if isinstance(known, dict):
                    known.pop(loop, None)


async def _tell(context: Any, error: Exception, method: str) -> None:
    """End a call with what its method raised, unless that is gRPC's own: then the call, or the whole server, is over."""
    if isinstance(error, SeriatimError):
        await abort(context, error)
    elif not isinstance(error, grpc.aio.BaseError):
        _log.exception("call failed", method=method)
        await abort(context, errors.defect(error, method))


def answers_errors(
    method: Callable[[Any, Any, Any], Awaitable[Reply]],
) -> Callable[[Any, Any, Any], Awaitable[Reply]]:
    """For a unary method of a servicer: a SeriatimError that it raises becomes the call's status."""

    @functools.wraps(method)
    async def answer(self: Any, request: Any, context: Any) -> Reply:
        try:
            return await method(self, request, context)
        except Exception as error:
            await _tell(context, error, method.__name__)
            raise

    return answer


def stream_answers_errors(
    method: Callable[[Any, Any, Any], AsyncIterator[Reply]],
) -> Callable[[Any, Any, Any], AsyncIterator[Reply]]:
    """As `answers_errors`, for a method that streams its replies."""

    @functools.wraps(method)
    async def answer(self: Any, request: Any, context: Any) -> AsyncIterator[Reply]:
        try:
            async for reply in method(self, request, context):
                yield reply
        except Exception as error:
            await _tell(context, error, method.__name__)
            raise

    return answer
