"""gRPC between simulated processes: the same stubs and servicers as in production, over connections that the world rules.

A connection keeps the order of what is sent on it, as TCP does. A cut holds back what is under way; what isn't cut off
for too long arrives late, and after `KEEPALIVE_S` both ends give the connection up. A killed process resets its connections at
once, a machine that lost its power is only found out by silence.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from seriatim.protocol.batch_streams import BatchMessage
from tests.simulation.loop import Host, Process, SimulatedLoop

KEEPALIVE_S = 5.0
CONNECT_S = 20.0
"""So long a connection is tried where nothing answers, as gRPC does."""
_EOF = vars(grpc.aio)["EOF"]


def _error(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class Connection:
    """Between a client's process and a server's. `send` brings a callback to the other end, in order."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self._network = network
        self.ends = client, server
        self.is_broken = False
        self.calls: set[_Call] = set()
        self._arrives_s = [0.0, 0.0]
        self._held: list[list[tuple[Any, tuple[Any, ...]]]] = [[], []]
        self._is_watched = False

    def send(self, to: int, deliver: Callable[..., None], *arguments: Any) -> None:
        """To `ends[to]`."""
        if self.is_broken:
            return
        network = self._network
        source, target = self.ends[1 - to], self.ends[to]
        if self._held[to] or (network.has_cuts and network.is_cut(source.host, target.host)):
            self._held[to].append((deliver, arguments))
            self.watch()
            return
        loop, slow_s = network.loop, network.slow_s
        late_s = slow_s.get((source.host.name, target.host.name), 0.0) if slow_s else 0.0
        at_s = max(self._arrives_s[to], loop.now_s + network.delay_s() + late_s)
        self._arrives_s[to] = at_s
        loop.at(at_s, target, self._deliver, deliver, arguments)

    def _deliver(self, deliver: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.is_broken:
            deliver(*arguments)

    def watch(self) -> None:
        """Silence has begun: it may be the end of the connection."""
        if not self._is_watched and not self.is_broken:
            self._is_watched = True
            self._network.loop.after(KEEPALIVE_S, None, self._give_up)

    def _give_up(self) -> None:
        self._is_watched = False
        client, server = self.ends
        is_gone = not (client.is_alive and server.is_alive)
        if is_gone or any(self._held) or self._network.is_silent(client, server):
            self.end("keepalive watchdog timeout")

    def healed(self) -> None:
        """What was held back arrives now, or finds nobody there any more."""
        if not all(end.is_alive for end in self.ends):
            self.end("connection reset by peer")
            return
        for to in (0, 1):
            held, self._held[to] = self._held[to], []
            for deliver, arguments in held:
                self.send(to, deliver, *arguments)

    def end(self, reason: str) -> None:
        """Both ends learn that it is broken, each as soon as it can run."""
        if self.is_broken:
            return
        self.is_broken = True
        self._network.forget(self)
        loop = self._network.loop
        for call in sorted(self.calls, key=lambda one: one.number):
            loop.after(self._network.delay_s(), self.ends[0], call.ended, grpc.StatusCode.UNAVAILABLE, reason)
            loop.after(self._network.delay_s(), self.ends[1], call.context.gone)


class Network:
    """All servers and connections."""

    def __init__(self, loop: SimulatedLoop, chance: random.Random, mean_delay_s: float = 0.0005) -> None:
        self.loop = loop
        self.chance = chance
        self._random = chance.random
        self.mean_delay_s = mean_delay_s
        self.late_share = 0.01
        self.damages = 0
        """So many of the next batches that are sent arrive with another bit."""
        self._servers: dict[str, SimulatedServer] = {}
        self._hosts: dict[str, Host] = {}
        self._cuts: set[tuple[str, str]] = set()
        self.has_cuts = False
        self.slow_s: dict[tuple[str, str], float] = {}
        """By how much every message from one host to another is late."""
        self._connections: dict[tuple[Process, Process], Connection] = {}
        self.calls = 0
        self.on_reply: Callable[[str, Any, Any], None] = lambda *_: None
        """Told of each message that a server sends: path, first message of the call, reply."""

    def add(self, host: Host) -> None:
        self._hosts[host.address] = host

    def delay_s(self) -> float:
        random = self._random
        delay_s = -math.log(1.0 - random()) * self.mean_delay_s  # `expovariate(1.0)`, without the call
        if random() < self.late_share:
            delay_s += random() * 0.1
        return delay_s

    # ---- cuts

    def is_cut(self, source: Host, target: Host) -> bool:
        return self.has_cuts and (source.name, target.name) in self._cuts

    def is_silent(self, client: Process, server: Process) -> bool:
        return self.has_cuts and (self.is_cut(client.host, server.host) or self.is_cut(server.host, client.host))

    def cut(self, source: Host, target: Host) -> None:
        self._cuts.add((source.name, target.name))
        self.has_cuts = True
        for connection in list(self._connections.values()):
            if {end.host for end in connection.ends} == {source, target}:
                connection.watch()

    def heal(self, source: Host, target: Host) -> None:
        self._cuts.discard((source.name, target.name))
        self.has_cuts = bool(self._cuts)
        for connection in list(self._connections.values()):
            if {end.host for end in connection.ends} == {source, target} and not self.is_silent(*connection.ends):
                connection.healed()

    def heal_all(self) -> None:
        self._cuts.clear()
        self.has_cuts = False
        self.slow_s.clear()
        for connection in list(self._connections.values()):
            connection.healed()

    def break_between(self, one: Host, other: Host) -> None:
        """Connections break without anybody's fault."""
        for connection in list(self._connections.values()):
            if {end.host for end in connection.ends} == {one, other}:
                connection.end("connection reset")

    # ---- processes

    def killed(self, process: Process, *, is_silent: bool) -> None:
        """Its connections are reset, or, after a power failure, just go silent."""
        for address in [address for address, server in self._servers.items() if server.process is process]:
            del self._servers[address]
        for connection in list(self._connections.values()):
            if process in connection.ends:
                if is_silent:
                    self.loop.after(KEEPALIVE_S, None, connection.end, "keepalive watchdog timeout")
                    self.forget(connection)
                elif not self.is_silent(*connection.ends):
                    connection.end("connection reset by peer")
                else:
                    connection.watch()

    def carried(self, message: Any) -> Any:
        """What arrives of a request: mostly the same."""
        if not self.damages or not isinstance(message, BatchMessage):
            return message
        self.damages -= 1
        payload = bytearray(message.payload)
        payload[self.chance.randrange(len(payload))] ^= 1 << self.chance.randrange(8)
        return replace(message, payload=bytes(payload))

    def forget(self, connection: Connection) -> None:
        client, server = connection.ends
        if self._connections.get((client, server)) is connection:
            del self._connections[client, server]

    # ---- what stands for grpc.aio

    def listen(self, server: SimulatedServer, address: str) -> int:
        host, port = address.rsplit(":", 1)
        server.address = f"{host}:{port if port != '0' else '7000'}"
        return int(server.address.rsplit(":", 1)[1])

    def started(self, server: SimulatedServer) -> None:
        self._servers[server.address] = server

    def stopped(self, server: SimulatedServer) -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]
        for connection in list(self._connections.values()):
            if connection.ends[1] is server.process:
                connection.end("the server was stopped")

    def begin(self, call: _Call, address: str) -> None:
        """Connect where there is no connection yet, and send the call's head."""
        client = call.client
        host = self._hosts.get(address.rsplit(":", 1)[0])
        server = self._servers.get(address)
        if host is None or server is None or not server.process.is_alive:
            if host is not None and (self.is_cut(client.host, host) or self.is_cut(host, client.host)):
                self.loop.after(CONNECT_S, client, call.ended, grpc.StatusCode.UNAVAILABLE, "connecting timed out")
                return
            refused = "Failed to connect to remote host: connection refused"
            self.loop.after(2 * self.delay_s(), client, call.ended, grpc.StatusCode.UNAVAILABLE, refused)
            return
        connection = self._connections.get((client, server.process))
        if connection is None:
            if self.is_silent(client, server.process):
                self.loop.after(CONNECT_S, client, call.ended, grpc.StatusCode.UNAVAILABLE, "connecting timed out")
                return
            connection = self._connections[client, server.process] = Connection(self, client, server.process)
        call.connection = connection
        connection.calls.add(call)
        connection.send(1, server.accept, call)


class SimulatedServer:
    """Stands for grpc.aio.Server."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._handlers: dict[str, Any] = {}
        self.address = ""
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
        if grace:
            await asyncio.sleep(min(grace, 0.05))
        self._network.stopped(self)

    def accept(self, call: _Call) -> None:
        """A call's head arrived; runs as the server's process."""
        handler = self._handlers.get(call.path)
        context = call.context
        if handler is None:
            context.finish(grpc.StatusCode.UNIMPLEMENTED, call.path)
            return
        if not context.is_gone:
            context.task = asyncio.ensure_future(context.serve(handler))


class _Abort(grpc.aio.AbortError):
    pass


class ServerContext:
    """Stands for grpc.aio.ServicerContext: the server's end of a call."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._first = call.request
        self._incoming: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_half_closed = False
        self.is_gone = False
        self._is_finished = False
        self.task: asyncio.Future[None] | None = None

    async def serve(self, handler: Any) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            if handler.unary_unary is not None:
                reply = await handler.unary_unary(self._call.request, self)
                self._send(reply)
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
        if not self._is_finished and not self.is_gone:
            self._is_finished = True
            self._call.to_client(self._call.ended, code, details)

    def _send(self, message: Any) -> None:
        if not self.is_gone and not self._is_finished:
            self._call.network.on_reply(self._call.path, self._first, message)
            self._call.to_client(self._call.arrived, message)

    async def write(self, message: Any) -> None:
        self._send(message)
        await asyncio.sleep(0)

    async def read(self) -> Any:
        while not self._incoming:
            if self._is_half_closed or self.is_gone:
                return _EOF
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._incoming.popleft()

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


class _Call:
    """The client's end of a call; stands for grpc.aio's call objects."""

    def __init__(self, network: Network, path: str, address: str, request: Any) -> None:
        client = network.loop.process
        assert client is not None
        network.calls += 1
        self.number = network.calls
        self._network = network
        self.network = network
        self.client = client
        self.path = path
        self.request = request
        self.connection: Connection | None = None
        self.context = ServerContext(self)
        self._incoming: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._pump: asyncio.Task[None] | None = None
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

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- what a program calls

    async def reply(self, timeout: float | None) -> Any:  # noqa: ASYNC109 - as gRPC has it
        """The reply of a unary call."""
        loop = asyncio.get_running_loop()
        timer = None if timeout is None else loop.call_later(timeout, self._late)
        try:
            message = await self.read()
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
        while not self._incoming:
            if self._status is not None:
                code, details = self._status
                if code is grpc.StatusCode.OK:
                    return _EOF
                if code is grpc.StatusCode.CANCELLED and details == "locally":
                    raise asyncio.CancelledError
                raise _error(code, details)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._incoming.popleft()

    async def write(self, message: Any) -> None:
        if self._status is not None:
            code, details = self._status
            if code is grpc.StatusCode.OK or details == "locally":
                raise asyncio.InvalidStateError("the call is over")
            raise _error(code, details)
        self._to_server(self.context.arrived, self._network.carried(message))
        await asyncio.sleep(0)

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

    def unary_unary(self, path: str, **_: Any) -> Any:
        def call(request: Any, timeout: float | None = None) -> Any:
            return _Call(self._network, path, self._address, request).reply(timeout)

        return call

    def unary_stream(self, path: str, **_: Any) -> Any:
        return lambda request, **_: _Call(self._network, path, self._address, request)

    def stream_stream(self, path: str, **_: Any) -> Any:
        def call(requests: Any = None, **_: Any) -> Any:
            made = _Call(self._network, path, self._address, None)
            if requests is not None:
                made.feed(requests)
            return made

        return call
