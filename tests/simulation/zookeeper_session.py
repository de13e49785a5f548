"""A client's session with the ensemble, in the place of `seriatim.protocol.zookeeper`: what it asks, hears and loses.

What a session reads is never older than what it saw before. It lives as long as the leader hears of it; whether it does depends on
the client's process, on its connection to the server, and on the server's own to the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from seriatim.protocol.errors import Unreachable
from seriatim.protocol.zookeeper import NodeExists, NoNode, SessionExpired, SessionState
from tests.simulation.ensemble import Ensemble, Server
from tests.simulation.loop import Host
from tests.simulation.network import Network
from tests.simulation.zookeeper_requests import Close, Read, Request, Sync, Write

TICK_S = 0.5
LATE_WATCHES = 0.1
LATE_WATCH_S = 0.02


class SimulatedSession:
    """Stands for seriatim.protocol.zookeeper.ZooKeeperSession. `place`: where ZooKeeper is in the network."""

    def __init__(self, ensemble: Ensemble, network: Network, place: Host, hosts: str, timeout_s: float) -> None:
        process = ensemble.loop.process
        assert process is not None
        self.hosts = hosts
        self.process = process
        self.session_timeout_s = timeout_s
        self.state = SessionState.LOST
        self.session_id = 0
        self.server: Server | None = None
        self.ensemble = ensemble
        self.network = network
        self._place = place
        self._listeners: list[Callable[[SessionState], None]] = []
        self._pending: dict[asyncio.Future[Any], None] = {}  # a set in the order of asking
        self._queued: list[Request] = []  # for the next connection
        self.watching: dict[Callable[[], None], None] = {}  # as well
        self._is_stopped = False
        self._expiry: Any = None
        self._told_s = 0.0
        self._notified_s = 0.0
        self.asked_s = 0.0
        self.wrote_s = 0.0
        self.decided_s = 0.0
        """When the last of its writes is decided: none behind it is earlier."""
        self.answered_s = 0.0
        """The same, of this connection: nor is a look behind it."""
        self.seen = 0
        self.leader = 0
        self._is_reconnecting = False
        self.held_requests: list[Callable[[], None]] = []
        self.undecided: set[tuple[str, str]] = set()  # kind and path of writes that are at its server
        self.held_replies: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    # ---- life

    async def start(self, timeout_s: float = 15) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        self._connect()
        while self.state is not SessionState.CONNECTED:
            if loop.time() > deadline_s:
                self._is_stopped = True
                raise Unreachable(f"no ZooKeeper answers at {self.hosts}")
            await asyncio.sleep(0.05)

    def go_to(self, hosts: str) -> None:
        self.hosts = hosts

    def leave_server(self, reason: str) -> None:
        """All are of one ensemble."""

    async def stop(self) -> None:
        """As kazoo's: behind what was asked before, and waited for as long as a silent server isn't given up."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self.server is not None:
            closing = Close(self)
            self._pending[closing.future] = None
            closing.send(self.server)
            await asyncio.wait((closing.future,), timeout=self.session_timeout_s * 2 / 3)
        self.end()

    def end(self) -> None:
        """Behind `stop` nothing is left to do but to hang up: the leader ends a session that it hears no more of."""
        self._is_stopped = True
        self._leave()
        if self.ensemble.is_live(self.session_id):
            self.heard_of()
        self._fail_pending(Unreachable("ZooKeeper didn't answer: ConnectionClosedError"))
        self._tell_state(SessionState.LOST)

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append(listener)

    def _connect(self) -> None:
        """Try one server after the other, as long as it takes; runs as a step of the client's."""
        ensemble = self.ensemble
        self._is_reconnecting = False
        if self._is_stopped or self.server is not None:
            return
        server = ensemble.chance.choice(ensemble.servers)
        is_answered = not ensemble.is_down and not server.is_cut_off and not self.is_cut
        if not is_answered or server.tree.applied < self.seen:
            if is_answered:
                ensemble.catch_up(server)
            self._retry()
            return
        if not ensemble.is_live(self.session_id):
            if self.session_id:
                self.session_id = 0
                self._tell_state(SessionState.LOST)
                self._fail_pending(SessionExpired("the ZooKeeper session has expired"))
            self.session_id = ensemble.new_session(self)
        self.server = server
        server.sessions.append(self)
        self.heard_of()
        self._tell_state(SessionState.CONNECTED)
        queued, self._queued = self._queued, []
        for request in queued:  # also what nobody waits for any more: kazoo doesn't know that
            request.send(server)

    def _retry(self) -> None:
        if not self._is_reconnecting and not self._is_stopped:
            self._is_reconnecting = True
            delay_s = 0.05 + self.ensemble.chance.random() * 0.3
            self.ensemble.loop.after(delay_s, self.process, self._connect)

    def _leave(self) -> None:
        if self.server is not None:
            self.server.sessions.remove(self)
            self.server = None
        self.answered_s = 0.0
        self.held_requests.clear()
        self.held_replies.clear()

    def reached(self) -> None:
        """A cut is over before anybody gave the connection up: what was under way arrives."""
        requests, self.held_requests = self.held_requests, []
        replies, self.held_replies = self.held_replies, []
        for request in requests:
            request()
        for callback, arguments in replies:
            self.tell(callback, *arguments)

    def disconnect(self) -> None:
        """The connection to the server is gone; what was asked may have been done."""
        if self.server is None:
            return
        self._leave()
        self.heard_of()
        self.ensemble.loop.after(self.ensemble.delay_s(), self.process, self._disconnected)

    def _fail_pending(self, error: Exception) -> None:
        """All that isn't answered, the queued among it."""
        self._queued.clear()
        pending, self._pending = self._pending, {}
        for future in pending:
            if not future.done():
                future.set_exception(error)

    def _disconnected(self) -> None:
        self._fail_pending(Unreachable("ZooKeeper didn't answer: ConnectionLoss"))
        if self.server is None:
            self._tell_state(SessionState.SUSPENDED)
            self._retry()
        for watch in list(self.watching):  # as kazoo does: what happens meanwhile isn't seen
            watch()

    def _tell_state(self, state: SessionState) -> None:
        if state is self.state:
            return
        self.state = state
        for listener in list(self._listeners):
            listener(state)

    @property
    def is_heard(self) -> bool:
        """Whether the leader hears of this session."""
        server, process = self.server, self.process
        return (
            server is not None
            and not server.is_cut_off
            and process.is_alive
            and not process.is_paused
            and not self.is_cut
        )

    def heard_of(self, *, is_fresh: bool = False) -> None:
        """What keeps the session alive may have changed: begin or stop to count towards its end."""
        loop = self.ensemble.loop
        if self.is_heard or self.ensemble.is_down:
            if self._expiry is not None:
                self._expiry.cancel()
                self._expiry = None
            return
        if self._expiry is None or is_fresh:
            if self._expiry is not None:
                self._expiry.cancel()
            silent_s = 0.0 if is_fresh else self.ensemble.chance.random() * self.session_timeout_s / 3
            left_s = self.session_timeout_s - silent_s + self.ensemble.chance.random() * TICK_S
            # A write is heard, too.
            left_s = max(left_s, self.wrote_s + self.session_timeout_s - loop.now_s)
            self._expiry = loop.after(left_s, None, self._expired)

    def _expired(self) -> None:
        self._expiry = None
        self.ensemble.timed_out(self)
        if self.server is not None and not self.server.is_cut_off:  # one that is goes on answering pings
            self.disconnect()

    # ---- asking

    @property
    def is_cut(self) -> bool:
        """Whether something of what client and server send each other is held back."""
        return self.network.are_divided(self.process.host, self._place)

    def next_told_s(self) -> float:
        """When the client hears what is told it now: behind all answers that were told before."""
        self._told_s = told_s = max(self._told_s, self.ensemble.loop.now_s + self.ensemble.delay_s() / 4)
        return told_s

    def tell(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self.ensemble.loop.at(self.next_told_s(), self.process, self._receive, self.server, callback, arguments)

    def notify(self, watch: Callable[[], None]) -> None:
        """A watch, behind those before, and not before an answer told later: kazoo passes watches on by a thread of their own."""
        ensemble = self.ensemble
        late_s = ensemble.chance.random() * LATE_WATCH_S if ensemble.chance.random() < LATE_WATCHES else 0.0
        told_s = max(self._told_s, ensemble.loop.now_s + ensemble.delay_s() / 4) + late_s
        self._notified_s = max(self._notified_s, told_s)
        ensemble.loop.at(self._notified_s, self.process, self._receive, self.server, watch, ())

    def _receive(self, server: Server | None, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self.server is not server:
            return
        if self.held_replies or self.is_cut:
            self.held_replies.append((callback, arguments))
        else:
            callback(*arguments)

    async def _ask(self, make: Callable[..., Request], *what: Any, **details: Any) -> Any:
        """Nothing is asked while it is known that there is no connection. What is asked before waits for the next one, as with kazoo:
        however long, and unless the session is lost.
        """
        if self._is_stopped:
            raise Unreachable("ZooKeeper didn't answer: ConnectionClosedError")
        if self.state is not SessionState.CONNECTED:
            raise Unreachable(f"ZooKeeper doesn't answer at {self.hosts}")
        request = make(self, *what, **details)
        future = request.future
        self._pending[future] = None
        if self.server is None:
            self._queued.append(request)
        else:
            request.send(self.server)
        try:
            return await future
        finally:
            self._pending.pop(future, None)

    def get(self, path: str, watch: Callable[[], None] | None = None) -> Coroutine[Any, Any, tuple[bytes, int]]:
        return self._ask(Read, "get", path, watch)

    async def exists(self, path: str, watch: Callable[[], None] | None = None) -> bool:
        return await self._ask(Read, "exists", path, watch) is not None

    def children(self, path: str, watch: Callable[[], None] | None = None) -> Coroutine[Any, Any, list[str]]:
        return self._ask(Read, "children", path, watch)

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        ephemeral: bool = False,
        sequential: bool = False,
        parents: bool = False,
        beside: tuple[str, bytes] | None = None,
    ) -> str:
        if parents:
            await self.ensure(path.rpartition("/")[0])
        how = {"is_ephemeral": ephemeral, "is_sequential": sequential, "beside": beside}
        made: str = await self._ask(Write, "create", path, data, **how)
        return made

    async def ensure(self, path: str) -> None:
        missing = []
        # Looked up where reads are answered: what is not there yet is asked of the leader, and is there afterwards.
        tree = self.ensemble.leader if self.server is None else self.server.tree
        while path and path not in tree.nodes:
            missing.append(path)
            path = path.rpartition("/")[0]
        for one in reversed(missing):
            try:
                await self._ask(Write, "create", one)
            except NodeExists:
                continue
        if not missing:
            await asyncio.sleep(0)

    async def set(self, path: str, data: bytes, version: int = -1) -> int:
        found: int = await self._ask(Write, "set", path, data, version)
        return found

    async def rewrite(self, path: str, data: bytes, version: int, to: int) -> int:
        """A transaction holds one write: so most can happen between two."""
        del to
        return await self.set(path, data, version)

    async def delete(self, path: str, version: int = -1, guard: tuple[str, int] | None = None) -> None:
        await self._ask(Write, "delete", path, b"", version, guard=guard)

    async def sync(self, path: str) -> None:
        del path
        await self._ask(Sync)

    async def version(self, path: str) -> int:
        return (await self._existing(path))[2]

    async def owner(self, path: str) -> int:
        return (await self._existing(path))[0]

    async def leader_of(self, path: str) -> int:
        return (await self._existing(path))[1]

    async def _existing(self, path: str) -> tuple[int, int, int]:
        found: tuple[int, int, int] | None = await self._ask(Read, "exists", path, None)
        if found is None:
            raise NoNode(path)
        return found
