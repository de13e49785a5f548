"""gRPC over simulated connections: the same stubs and servicers as in production, between what stands for grpc.aio.

Both ends of a call, and the server and the channel that make them. What they send each other is in the hands of `network`.
"""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

import grpc
import grpc.aio

from tests.simulation.network import MANY, Connection, Network

_EOF = vars(grpc.aio)["EOF"]
_DIRECT = "/Append", "/Replicate", "/Fetch", "/Connect"
"""How the paths end of what goes over direct streams, where there are some."""


@types.coroutine
def _next_step() -> Generator[None]:
    """As `asyncio.sleep(0)`."""
    yield


def _error(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class _Window:
    """How many messages of one direction of a stream may be on their way, or unread: a writer waits for the others to be read.

    As HTTP/2 has it, but in messages: where these are small, so are windows.
    """

    __slots__ = ("_most", "_unread", "_waiter")

    def __init__(self, most: int) -> None:
        self._most = most
        self._unread = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return self._unread >= self._most

    def sent(self) -> None:
        self._unread += 1

    def taken(self) -> None:
        """The other end has read one, and this end has heard of it."""
        self._unread -= 1
        self.wake()

    def wake(self) -> None:
        """There is room again, or there is nothing more to wait for."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def room(self, is_over: Callable[[], bool]) -> bool:
        """Wait for it. False: the call was over first."""
        while self.is_full:
            if is_over():
                return False
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return True


class SimulatedServer:
    """Stands for grpc.aio.Server."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._handlers: dict[str, Any] = {}
        self.address = ""
        self._is_closed = False
        process = network.loop.process
        assert process is not None
        self.process = process

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are used."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    async def start(self) -> None:
        self._network.started(self)

    async def stop(self, grace: float | None) -> None:
        """As with grpc.aio: who comes now is refused, who is here has so long, and is cut off then. Direct streams end at once."""
        self._is_closed = True
        if not self.address:
            return  # it was never started
        calls = self._network.closed(self)
        for call in calls if self._network.is_direct else ():
            if call.path.endswith(_DIRECT):
                call.context.gone()
                call.to_client(call.ended, grpc.StatusCode.UNAVAILABLE, "the connection broke")
        under_way = {task for call in calls if (task := call.context.task) is not None and not task.done()}
        if grace and under_way:
            await asyncio.wait(under_way, timeout=grace)
        for call in calls:
            call.context.gone()
        self._network.stopped(self)

    def accept(self, call: ClientCall) -> None:
        """A call's head arrived; runs as the server's process."""
        handler = self._handlers.get(call.path)
        context = call.context
        if self._is_closed:
            context.finish(grpc.StatusCode.UNAVAILABLE, "the server is being stopped")
            return
        if handler is None:
            context.finish(grpc.StatusCode.UNIMPLEMENTED, call.path)
            return
        if not context.is_gone:
            context.known = self._network.on_request(call.path, call.request)
            loop = self._network.loop
            context.task = loop.create_task(context.serve(handler))
            if call.timeout_s is not None:  # the server, too, counts from when it hears of the call
                context.timer = loop.call_later(call.timeout_s, context.gone)


class _Abort(grpc.aio.AbortError):
    pass


class ServerContext:
    """Stands for grpc.aio.ServicerContext: the server's end of a call."""

    __slots__ = (
        "_call", "_first", "_incoming", "_is_finished", "_is_half_closed", "_waiter", "is_gone", "known", "task", "timer", "window",
    )  # fmt: skip

    def __init__(self, call: ClientCall) -> None:
        self._call = call
        self._first = call.request
        self._incoming: list[Any] = []  # few at a time: a deque is ten times as large
        self._waiter: asyncio.Future[None] | None = None
        self._is_half_closed = False
        self.is_gone = False
        self._is_finished = False
        self.task: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.known: Any = None
        self.window = _Window(call.network.window)

    async def serve(self, handler: Any) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            if handler.unary_unary is not None:
                self._send(await handler.unary_unary(self._call.request, self), is_last=True)
            else:
                served = (
                    handler.unary_stream(self._call.request, self)
                    if handler.unary_stream is not None
                    else handler.stream_stream(None, self)
                )
                if inspect.isasyncgen(served):
                    async for reply in served:
                        await self.write(reply)
                else:
                    await served
        except _Abort as abort:
            code, details = abort.args
        except asyncio.CancelledError:
            code, details = grpc.StatusCode.CANCELLED, "cancelled"
            raise
        except Exception as error:
            code, details = grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"
        finally:
            self.finish(code, details)

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self._is_finished and not self.is_gone:
            self._is_finished = True
            if code is not grpc.StatusCode.OK:
                self._call.network.on_refusal(self._call.path, self._first, details)
            self._call.to_client(self._call.ended, code, details)

    def _send(self, message: Any, *, is_last: bool = False) -> None:
        """`is_last`: it brings the end of the call with it, as the reply to a unary one does."""
        if not self.is_gone and not self._is_finished:
            self._is_finished = is_last
            self._call.network.on_reply(self._call.path, self._first, message, self.known)
            self._call.to_client(self._call.replied if is_last else self._call.arrived, message)

    async def write(self, message: Any) -> None:
        self.window.sent()
        self._send(message)
        await _next_step()
        if self.window.is_full:
            await self.window.room(lambda: self.is_gone)

    def write_now(self, message: Any) -> bool:
        """As that of a direct stream."""
        if self.is_gone or self._is_finished or self.window.is_full:
            return False
        self.window.sent()
        self._send(message)
        return True

    async def read(self) -> Any:
        while not self._incoming:
            if self._is_half_closed or self.is_gone:
                return _EOF
            self._waiter = self._call.network.loop.create_future()
            await self._waiter
        if self._call.network.window < MANY:
            self._call.to_client(self._call.window.taken)
        return self._incoming.pop(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _Abort(code, details)

    # ---- from the client

    def arrived(self, message: Any) -> None:
        self._first = message if self._first is None else self._first
        self._incoming.append(message)
        self._wake()

    def half_closed(self) -> None:
        self._is_half_closed = True
        self._wake()

    def gone(self) -> None:
        """The client has cancelled the call, or its connection is broken."""
        if not self.is_gone:
            self.is_gone = True
            if self.task is not None:
                self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ClientCall:
    """The client's end of a call; stands for grpc.aio's call objects."""

    __slots__ = (
        "_incoming", "_pump", "_status", "_waiter", "client", "connection", "context", "network", "number", "path", "request", "timeout_s",
        "window",
    )  # fmt: skip

    def __init__(self, network: Network, path: str, address: str, request: Any, timeout_s: float | None = None) -> None:
        client = network.loop.process
        assert client is not None
        network.calls += 1
        self.number = network.calls
        self.network = network
        self.client = client
        self.path = path
        self.request = request
        self.timeout_s = timeout_s
        self.connection: Connection | None = None
        self.context = ServerContext(self)
        self._incoming: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._pump: asyncio.Task[None] | None = None
        self.window = _Window(network.window)
        network.begin(self, address)

    def to_client(self, deliver: Callable[..., None], *arguments: Any) -> None:
        if self.connection is not None:
            self.connection.send(0, deliver, *arguments)

    def _to_server(self, deliver: Callable[..., None], *arguments: Any) -> None:
        if self.connection is not None:
            self.connection.send(1, deliver, *arguments)

    # ---- from the server

    def arrived(self, message: Any) -> None:
        if self._status is None:
            self._incoming.append(message)
            self._wake()

    def replied(self, message: Any) -> None:
        """To a unary call."""
        if self._status is None:
            self._incoming.append(message)
            self.ended(grpc.StatusCode.OK, "")

    def ended(self, code: grpc.StatusCode, details: str) -> None:
        if self._status is None:
            self._status = code, details
            self._leave()
            self._wake()

    def _leave(self) -> None:
        if self.connection is not None:
            self.connection.calls.discard(self)
        if self._pump is not None:
            self._pump.cancel()
        self.window.wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- what a program calls

    async def reply(self) -> Any:
        """The reply of a unary call."""
        timer = None if self.timeout_s is None else self.network.loop.call_later(self.timeout_s, self._late)
        try:
            message = await self._next()
            if message is _EOF:
                raise _error(grpc.StatusCode.INTERNAL, "no reply")
            return message
        finally:
            if timer is not None:
                timer.cancel()
            self.cancel()

    def _late(self) -> None:
        if self._status is None:
            self._to_server(self.context.gone)
            self.ended(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    async def read(self) -> Any:
        message = await self._next()
        if self.network.window < MANY and self._status is None:
            self._to_server(self.context.window.taken)
        return message

    async def _next(self) -> Any:
        while not self._incoming:
            if self._status is not None:
                code, details = self._status
                if code is grpc.StatusCode.OK:
                    return _EOF
                if code is grpc.StatusCode.CANCELLED and details == "locally":
                    raise asyncio.CancelledError
                raise _error(code, details)
            self._waiter = self.network.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()  # who gives up reading has given up the call
                raise
        return self._incoming.pop(0)

    async def write(self, message: Any) -> None:
        if self._status is not None:
            # However it ended: grpc.aio doesn't say it here, only where one reads.
            raise asyncio.InvalidStateError("RPC already finished.")
        self.window.sent()
        self._to_server(self.context.arrived, self.network.carried(message))
        try:
            await _next_step()
            is_written = not self.window.is_full or await self.window.room(lambda: self._status is not None)
        except asyncio.CancelledError:
            self.cancel()  # and so has who gives up writing
            raise
        if not is_written and self._status is not None:
            raise _error(*self._status)

    def write_now(self, message: Any) -> bool:
        """As that of a direct stream."""
        if self._status is not None or self.window.is_full:
            return False
        self.window.sent()
        self._to_server(self.context.arrived, self.network.carried(message))
        return True

    async def done_writing(self) -> None:
        self._to_server(self.context.half_closed)

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._to_server(self.context.gone)
        self.ended(grpc.StatusCode.CANCELLED, "locally")
        return True

    def feed(self, requests: Any) -> None:
        """Send what an iterator of requests brings."""

        async def pump() -> None:
            async for request in requests:
                self._to_server(self.context.arrived, request)
            self._to_server(self.context.half_closed)

        self._pump = asyncio.get_running_loop().create_task(pump())

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is _EOF:
            raise StopAsyncIteration
        return message


class SimulatedChannel:
    """Stands for grpc.aio.Channel."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    async def close(self, grace: float | None = None) -> None:
        """Connections are kept: closing one ends no call here that its owner hasn't cancelled."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        del try_to_connect
        return grpc.ChannelConnectivity.READY

    def unary_unary(self, path: str, **_: Any) -> Any:
        def call(request: Any, timeout: float | None = None) -> Any:
            return ClientCall(self._network, path, self._address, request, timeout).reply()

        return call

    def unary_stream(self, path: str, **_: Any) -> Any:
        return lambda request, **_: ClientCall(self._network, path, self._address, request)

    def stream_stream(self, path: str, **_: Any) -> Any:
        def call(requests: Any = None, **_: Any) -> Any:
            made = ClientCall(self._network, path, self._address, None)
            if requests is not None:
                made.feed(requests)
            return made

        return call
