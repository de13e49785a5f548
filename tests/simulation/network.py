"""Connections between simulated processes, which the world rules; the calls over them are in `calls`.

A connection keeps the order of what is sent on it, as TCP does. A cut holds back what is under way; what isn't cut off
for too long arrives late, and after `KEEPALIVE_S` both ends give the connection up. A killed process resets its connections at
once, a machine that lost its power is only found out by silence.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import grpc

from seriatim.protocol import direct
from seriatim.protocol.batch_streams import BatchMessage
from tests.simulation.loop import Host, Process, SimulatedLoop

KEEPALIVE_S = 5.0
CONNECT_S = 2.0
BACKOFF_S = 0.05, 0.5
"""So long a connection is tried where nothing answers; after one that failed so long nothing is tried, at first and at most,
and calls fail at once. As `rpc.channel` has gRPC do it.
"""

MANY = 1_000_000_000


class Context(Protocol):
    """The server's end of a call (`calls.ServerContext`)."""

    def gone(self) -> None:
        """The connection is broken."""


class Call(Protocol):
    """The client's end of a call (`calls.ClientCall`), as connections know it."""

    number: int
    client: Process
    connection: Connection | None

    @property
    def context(self) -> Context: ...

    def ended(self, code: grpc.StatusCode, details: str) -> None:
        """Nothing more comes."""


class Server(Protocol):
    """Whoever listens at an address (`calls.SimulatedServer`)."""

    address: str
    process: Process

    def accept(self, call: Any) -> None:
        """The head of a call arrived; a server knows more of calls than connections do."""


class Connection:
    """Between a client's process and a server's. `send` brings a callback to the other end, in order."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self._network = network
        self.ends = client, server
        self.is_broken = False
        self.calls: set[Call] = set()
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
        self._servers: dict[str, Server] = {}
        self._hosts: dict[str, Host] = {}
        self._cuts: set[tuple[str, str]] = set()
        self.has_cuts = False
        self.window = MANY
        """So many messages of a stream may be on their way, or unread, before who writes has to wait."""
        self.is_direct = False
        """Whether batches go over direct streams: what `send_now` is given is sent at once, where the window has room."""
        self.slow_s: dict[tuple[str, str], float] = {}
        """By how much every message from one host to another is late."""
        self._connections: dict[tuple[Process, Process], Connection] = {}
        self._backoffs: dict[tuple[Process, str], tuple[float, float, float]] = {}
        """By client and address: how long the last one lasts, until when a connection is tried, until when it isn't tried again."""
        self.calls = 0
        self.on_request: Callable[[str, Any], Any] = lambda *_: None
        """What it says of a request that arrives is handed to `on_reply` with each answer."""
        self.on_reply: Callable[[str, Any, Any, Any], None] = lambda *_: None
        """Told of each message that a server sends: path, first message of the call, reply, and what `on_request` said."""
        self.on_refusal: Callable[[str, Any, str], None] = lambda *_: None
        """Told of each call that ends with an error: path, first message of the call, and the error's text."""

    def add(self, host: Host) -> None:
        self._hosts[host.address] = host

    def delay_s(self) -> float:
        random = self._random
        delay_s = -math.log(1.0 - random()) * self.mean_delay_s  # `expovariate(1.0)`, without the call
        if random() < self.late_share:
            delay_s += random() * 0.1
        return delay_s

    async def connected(self, *_: Any) -> None:
        """A direct stream takes a round trip to connect, or is given up; what stands for it is made by the stub, as one of gRPC's is."""
        if self.is_direct:
            await asyncio.sleep(min(self.delay_s() + self.delay_s(), direct.CONNECT_S))

    # ---- cuts

    def is_cut(self, source: Host, target: Host) -> bool:
        return self.has_cuts and (source.name, target.name) in self._cuts

    def is_silent(self, client: Process, server: Process) -> bool:
        return self.are_divided(client.host, server.host)

    def are_divided(self, one: Host, other: Host) -> bool:
        """Whether something of what they send each other is held back."""
        return self.has_cuts and (self.is_cut(one, other) or self.is_cut(other, one))

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

    # ---- servers and calls

    def listen(self, server: Server, address: str) -> int:
        host, port = address.rsplit(":", 1)
        server.address = f"{host}:{port if port != '0' else '7000'}"
        return int(server.address.rsplit(":", 1)[1])

    def started(self, server: Server) -> None:
        self._servers[server.address] = server

    def closed(self, server: Server) -> list[Any]:
        """Nobody comes in any more; the calls of those who are in."""
        if self._servers.get(server.address) is server:
            del self._servers[server.address]
        to_it = [one for one in self._connections.values() if one.ends[1] is server.process]
        return sorted((call for one in to_it for call in one.calls), key=lambda one: one.number)

    def stopped(self, server: Server) -> None:
        for connection in list(self._connections.values()):
            if connection.ends[1] is server.process:
                connection.end("the server was stopped")

    def begin(self, call: Call, address: str) -> None:
        """Connect where there is no connection yet, and send the call's head."""
        client = call.client
        host = self._hosts.get(address.rsplit(":", 1)[0])
        server = self._servers.get(address)
        if server is not None and not server.process.is_alive:
            server = None
        connection = None if server is None else self._connections.get((client, server.process))
        if connection is None:
            backoff_s, tried_until_s, until_s = self._backoffs.get((client, address), (0.0, 0.0, 0.0))
            if self.loop.now_s < until_s:  # the first try is waited for
                is_first = backoff_s == BACKOFF_S[0]
                self._not_connected(call, tried_until_s if is_first else 0.0, "it is not tried again yet")
                return
            is_silent = host is not None and self.are_divided(client.host, host)
            if server is None or is_silent:
                tried_until_s = self.loop.now_s + (CONNECT_S if is_silent else 2 * self.delay_s())
                backoff_s = min(BACKOFF_S[1], 1.6 * backoff_s) or BACKOFF_S[0]
                until_s = tried_until_s + backoff_s * (0.8 + 0.4 * self._random())
                self._backoffs[client, address] = backoff_s, tried_until_s, until_s
                self._not_connected(call, tried_until_s, "timed out" if is_silent else "connection refused")
                return
            self._backoffs.pop((client, address), None)
            connection = self._connections[client, server.process] = Connection(self, client, server.process)
        call.connection = connection
        connection.calls.add(call)
        connection.send(1, server.accept, call)

    def _not_connected(self, call: Call, at_s: float, why: str) -> None:
        refused = f"Failed to connect to remote host: {why}"
        at_s = max(at_s, self.loop.now_s)
        self.loop.at(at_s, call.client, call.ended, grpc.StatusCode.UNAVAILABLE, refused)
