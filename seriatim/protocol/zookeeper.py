"""A session with ZooKeeper, for asyncio over kazoo.

kazoo runs its own thread; its callbacks hand an event to the loop and return. Nothing is retried in here: whoever
asked decides whether to ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import kazoo.exceptions
from kazoo.client import KazooClient
from kazoo.hosts import collect_hosts
from kazoo.protocol.states import EventType, KazooState, WatchedEvent
from kazoo.retry import KazooRetry

from seriatim.protocol.clock import monotonic_s
from seriatim.protocol.errors import InvalidArgument, InvariantBroken, Unreachable, WorldError
from seriatim.protocol.names import can_be_looked_up
from seriatim.protocol.zookeeper_threads import Connection, Handler

_Result = TypeVar("_Result")

MILLISECONDS_MAX = 2**31 - 1
"""The longest session time-out that can be asked for."""
_CONNECT_S, _CONNECT_SHARE = 0.5, 1 / 8
"""So long, or such a part of its time-out, a session waits for one server of several that doesn't take its connection: two of them cost
less than what it has left when a lease is over. Each round asks all of them, so that nothing is lost by a packet that is."""
_TURNED_AWAY_S = 5.0
"""So long it is told that a server took a connection and gave no session: others of the ensemble may not even do that."""
_REQUEST_BYTES, _WRITE_BYTES = 1_020_000, 32
"""So long a transaction may be, also beside the longest node (`jute.maxbuffer` is 1 MiB), and what a write takes in it beside its path and data."""
_MOST_WRITES = 100
"""In one transaction. ZooKeeper keeps its last 500 in memory, with each write in them: with 400 a server with 128 MB of it ended."""
_LOOK_S = 0.1
"""How late who is cancelled while it connects may notice that."""
_BEAT_SHARE = 1 / 10
"""In such a part of the session's time-out the loop notes that it goes on."""


class NoNode(Exception):
    """The node isn't there."""


class NodeExists(Exception):
    """The node is there already."""


class BadVersion(Exception):
    """The node was changed meanwhile; the compare-and-set did nothing."""


class NotEmpty(Exception):
    """The node has children; it was not deleted."""


def check_hosts(hosts: str, what: str) -> None:
    """Raises InvalidArgument for what kazoo can't connect to, whoever answers."""
    wrong = InvalidArgument(f"{what} has to be HOST:PORT[,HOST:PORT…], not {hosts!r}")
    try:
        found = collect_hosts(hosts)[0]
    except ValueError as error:
        raise wrong from error
    if not all(can_be_looked_up(host) for host, _ in found):  # a look-up that raises ends kazoo's thread
        raise wrong


def path_of(hosts: str) -> str:
    """What of ZooKeeper's tree these hosts stand for: the path behind the first slash, without the one at its end."""
    return hosts.partition("/")[2].strip("/")


def check_path(hosts: str, error: NoNode) -> None:
    """For whoever met `error` although he makes all nodes that lie above his: raises Unreachable where the path of `hosts` may be missing."""
    if path_of(hosts):
        raise Unreachable(f"ZooKeeper has no such node as {hosts} names behind the slash: make it first") from error


_ANY_VERSION: Final = (NoNode,)
_WRITTEN: Final = (NoNode, BadVersion)
_MADE: Final = (NoNode, NodeExists)


class SessionExpired(WorldError):
    """The session is gone, and with it every ephemeral node it made."""

    code = "session-expired"


class NotAllowed(Unreachable):
    """ZooKeeper answers, and refuses: its ACLs don't let us."""

    code = "not-allowed"
    next_step = "whoever serves, sends or reads needs all rights to these nodes"


class SessionState(StrEnum):
    """connected; suspended: nobody can tell whether the session lives; lost: it is gone, a new one may follow."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


_STATES = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}

Watch = Callable[[], None]
"""Called once on the loop, when what was read has changed (or may have: also when the session was lost)."""


@dataclass(frozen=True, slots=True)
class TellsOf:
    """A watch that tells of what it is. Two of the same are equal: what is read again before it changes has one, not one for each look."""

    tell: Callable[[Any], None]
    what: object

    def __call__(self) -> None:
        self.tell(self.what)


class ZooKeeperSession:
    """A session with ZooKeeper for one asyncio loop.

    Every method raises NoNode, NodeExists, BadVersion or NotEmpty where ZooKeeper says so, SessionExpired where the session is
    gone, Unreachable where no server answered. After a loss kazoo starts a new session by itself; `on_state` tells.
    `timeout_s` is the session time-out asked for; the server may have another minimum. A loop that stands still for longer than it loses
    the session, though kazoo's thread goes on.
    """

    def __init__(self, hosts: str, timeout_s: float) -> None:
        self.hosts = hosts
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[Callable[[SessionState], None]] = []
        self.state = SessionState.LOST
        self._turned_away_s = -math.inf
        self._beat_s = math.inf
        self._is_ended = False
        # kazoo can't be stopped amid its start, and lets a second stop close what the first hasn't stopped yet.
        self._turn = threading.Lock()
        # A quick, endless reconnect: the session lives only a few seconds.
        reconnect = KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=0.5)
        handler = Handler(max(_CONNECT_S, timeout_s * _CONNECT_SHARE))
        self._end_soon = handler.end_soon
        self._client = KazooClient(hosts=hosts, timeout=timeout_s, connection_retry=reconnect, handler=handler)
        self._client._connection = Connection(  # noqa: SLF001
            self._client, reconnect.copy(), logger=self._client.logger, stands_still=lambda: self.stands_still
        )
        self._note_negotiated_timeout()

    def _note_negotiated_timeout(self) -> None:
        """Learn what the server agrees to at each connect.

        A lease rests on it, and kazoo tells nobody: its connection returns the read time-out, which is two thirds of it.
        The write that renews a lease is answered on the same thread, so it is noted before any lease counts on it.
        """
        connection = self._client._connection  # noqa: SLF001
        connect = connection._connect  # noqa: SLF001
        asked_s = self._timeout_s

        def noting(*arguments: Any) -> Any:
            try:
                read_timeout_ms, connect_timeout_ms = connect(*arguments)
            except Exception:
                if connection._socket is not None:  # noqa: SLF001 - somebody took the connection
                    self._turned_away_s = time.monotonic()
                raise
            self._timeout_s = min(asked_s, read_timeout_ms * 1.5 / 1000)
            return read_timeout_ms, connect_timeout_ms

        connection._connect = noting  # noqa: SLF001

    async def start(self, timeout_s: float = 15) -> None:
        """Connect. Raises Unreachable where no server answers within `timeout_s`, and where this process has no file or thread left for it.

        Then, or where it is cancelled, no session is left behind.
        """
        self._loop = asyncio.get_running_loop()
        self._client.add_listener(self._state_changed)
        self._beat()
        is_begun, is_given_up = threading.Event(), threading.Event()

        def start() -> bool:
            with self._turn:
                if is_begun.is_set():
                    return False  # it was done where no thread was given out, and is left to the next one that is
                is_begun.set()
                is_live = self._client.start_async()
            deadline_s = time.monotonic() + timeout_s
            while not is_live.wait(_LOOK_S) and not is_given_up.is_set():
                if time.monotonic() >= deadline_s:
                    return False
            if is_given_up.is_set():
                self.end()
            return True

        try:
            is_connected = await _apart(start)
        except asyncio.CancelledError:
            is_given_up.set()
            _apart(self.end)  # beside `start`, which may be past its look
            raise
        except (OSError, RuntimeError) as error:
            await self.stop()
            raise Unreachable(f"no session with ZooKeeper can be begun in this process now: {error}") from error
        if not is_connected:
            await self.stop()
            raise self._unreached()
        self.state = SessionState.CONNECTED

    async def stop(self) -> None:
        """End the session at once; its ephemeral nodes go with it."""
        await _apart(self.end)

    def end(self) -> None:
        """As `stop`, for whoever may wait. Done again it does nothing."""
        self._is_ended = True
        self._end_soon()
        with self._turn:
            with contextlib.suppress(AttributeError):  # it wakes its thread also by what there was no file for
                self._client.stop()
            self._client.close()

    def _beat(self) -> None:
        self._beat_s = monotonic_s()
        if not self._is_ended:
            self._running_loop().call_later(self._timeout_s * _BEAT_SHARE, self._beat)

    @property
    def stands_still(self) -> bool:
        """Whether its loop hasn't gone on for longer than its time-out: then `state` is an old one. From any thread. By the clock of the loop's own timers: that the machine slept is no standstill, nor is an end."""
        return not self._is_ended and monotonic_s() - self._beat_s > self._timeout_s

    def go_to(self, hosts: str) -> None:
        """Where the same ensemble is found from the next try to connect on. Another path is another tree, and nowhere to go."""
        if hosts.partition("/")[1:] == self.hosts.partition("/")[1:]:
            self.hosts = hosts
            self._client.set_hosts(hosts)

    def leave_server(self, reason: str) -> None:
        """Try another one, where there are several: what this one shows is not what others go by. Its address may be another ensemble's by now."""
        if self._client.connected:
            self._client._connection.leave_server(reason)  # noqa: SLF001

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` on the loop whenever the session's state changes."""
        self._listeners.append(listener)

    @property
    def session_id(self) -> int:
        client_id = self._client.client_id
        return 0 if client_id is None else int(client_id[0])

    @property
    def session_timeout_s(self) -> float:
        """The shorter of the time-out asked for and the one that the server agreed to.

        The latter is known from the first answer to a write on; read it anew for each lease.
        """
        return self._timeout_s

    async def get(self, path: str, watch: Watch | None = None) -> tuple[bytes, int]:
        """Data and version of a node."""
        data, stat = await self._ask(self._client.get_async, path, watch=self._watch(watch))
        if stat.dataLength != len(data or b""):
            raise Unreachable("an answer of ZooKeeper was damaged on its way: it says that it has another length")
        return data, stat.version

    async def exists(self, path: str, watch: Watch | None = None) -> bool:
        return await self._ask(self._client.exists_async, path, watch=self._watch(watch)) is not None

    async def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """Names of a node's children, in no order."""
        names: list[str] = await self._ask(self._client.get_children_async, path, watch=self._watch(watch))
        return names

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
        """Make a node and return its path (with the number, where sequential).

        `beside`: another one and its data; where one of the two can't be made, neither is.
        """
        if beside is not None:
            await self._together(path, ("create", path, data), ("create", *beside))
            return path
        made: str = await self._ask(
            self._client.create_async, path, data, ephemeral=ephemeral, sequence=sequential, makepath=parents, may=_MADE
        )
        return made

    async def ensure(self, path: str) -> None:
        """Make a node and its parents where they aren't there."""
        await self._ask(self._client.ensure_path_async, path)

    async def set(self, path: str, data: bytes, version: int = -1) -> int:
        """Write a node; with `version`, only if it still has it. Returns the new version, which is the next one then, whatever comes back."""
        stat = await self._ask(
            self._client.set_async, path, data, version, may=_ANY_VERSION if version < 0 else _WRITTEN
        )
        return int(stat.version) if version < 0 else version + 1

    async def rewrite(self, path: str, data: bytes, version: int, to: int) -> int:
        """Write a node again and again, with these data at last, until it has version `to`; only if it still has `version`.

        As many times as one request holds, in one transaction: nobody sees what is between, which is empty. Returns the new version,
        which is lower than `to` where that took more.
        """
        room = max(0, _REQUEST_BYTES - len(data)) // (len(self._client.chroot) + len(path) + _WRITE_BYTES)
        to = min(to, version + max(1, min(room, _MOST_WRITES)))
        empty = [("set_data", path, b"", before) for before in range(version, to - 1)]
        await self._together(path, *empty, ("set_data", path, data, to - 1))
        return to

    async def delete(self, path: str, version: int = -1, guard: tuple[str, int] | None = None) -> None:
        """Delete a node; with `version`, only if it still has it.

        `guard`: a node and its version, which this raises; only if it still has it. A node that was made anew has the versions of the
        one before again; one that is only deleted so isn't taken for that by who comes late.
        """
        if guard is None:
            may = (*_ANY_VERSION, NotEmpty) if version < 0 else (*_WRITTEN, NotEmpty)
            await self._ask(self._client.delete_async, path, version, may=may)
            return
        await self._together(path, ("set_data", guard[0], b"", guard[1]), ("delete", path, version))

    async def _together(self, path: str, *parts: tuple[Any, ...]) -> None:
        """One transaction of these, each by its name and arguments; where one can't be done, none is, and this raises why."""
        transaction = self._client.transaction()
        for name, *arguments in parts:
            getattr(transaction, name)(*arguments)
        for result in await self._ask(lambda _: transaction.commit_async(), path):
            if isinstance(result, Exception) and not isinstance(result, kazoo.exceptions.RolledBackError):
                raise _translated(result, path)

    async def sync(self, path: str) -> None:
        """Let this server catch up with the leader: what is read next is not older than now."""
        await self._ask(self._client.sync_async, path)

    async def version(self, path: str) -> int:
        return int((await self._stat(path)).version)

    async def owner(self, path: str) -> int:
        """Session that made an ephemeral node; 0 for another node."""
        return int((await self._stat(path)).ephemeralOwner)

    async def leader_of(self, path: str) -> int:
        """The number of ZooKeeper's leader under which a node was written last. Each is higher than those before; a lone server's is always 0."""
        return _leader((await self._stat(path)).last_modified_transaction_id)

    @property
    def leader(self) -> int:
        """The number of the newest leader of whose changes it was answered, its own session's beginning among them."""
        return _leader(self._client.last_zxid)

    async def _stat(self, path: str) -> Any:
        stat = await self._ask(self._client.exists_async, path)
        if stat is None:
            raise NoNode(path)
        return stat

    async def _ask(
        self, ask: Callable[..., Any], *arguments: Any, may: tuple[type[Exception], ...] = _ANY_VERSION, **keys: Any
    ) -> Any:
        """What kazoo's answers. `may`: what ZooKeeper may say to this, beside that it can't serve; anything else was damaged on its way."""
        loop = self._running_loop()
        if not self._client.connected:
            # kazoo would keep it until it is connected again, long after who asked has gone; and it tells its thread by a socket
            # that nobody reads before: once that is full, after some hundred times, the loop stands still.
            raise self._unreached()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any) -> None:
            if future.done():
                return
            if result.exception is None:
                future.set_result(result.value)
            else:
                error = _translated(result.exception, arguments[0])
                future.set_exception(error if isinstance(error, (WorldError, *may)) else _translated(error, ""))

        def hand_over(result: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result)

        ask(*arguments, **keys).rawlink(hand_over)
        return await future

    def _unreached(self) -> Unreachable:
        if time.monotonic() - self._turned_away_s < _TURNED_AWAY_S:
            return Unreachable(
                f"ZooKeeper takes connections at {self.hosts} and gives no session: it may have no majority, too many "
                "connections from one address (maxClientCnxns), or older data than it had; or another server has the port"
            )
        return Unreachable(f"ZooKeeper doesn't answer at {self.hosts}")

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise InvariantBroken("a ZooKeeper session was used before it was started")
        return self._loop

    def _watch(self, watch: Watch | None) -> Callable[[WatchedEvent], None] | None:
        return None if watch is None else _Fired(self._running_loop(), watch)

    def _state_changed(self, state: str) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._tell, _STATES[state])

    def _tell(self, state: SessionState) -> None:
        self.state = state
        for listener in list(self._listeners):
            listener(state)


@dataclass(frozen=True, slots=True)
class _Fired:
    """kazoo's side of a watch. kazoo keeps a set of them for each node: equal ones are one."""

    loop: asyncio.AbstractEventLoop
    watch: Watch

    def __call__(self, event: WatchedEvent) -> None:
        # A lost session drops its watches: that, too, is a reason to look again.
        if (event.type != EventType.NONE or event.state != KazooState.CONNECTED) and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.watch)


def _apart(work: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """Run what blocks on another thread; here, where Python gives out none any more, because its main thread has returned, or none now.

    Then threads of an application may still send, and end their sessions. What isn't given out now may be run again by the next one.
    """
    loop = asyncio.get_running_loop()
    try:
        return loop.run_in_executor(None, work)
    except (OSError, RuntimeError):  # OSError: the first of all imports what makes them
        done: asyncio.Future[_Result] = loop.create_future()
        done.set_result(work())
        return done


def _leader(zxid: int) -> int:
    """The upper half of a transaction's number (ZooKeeper's internals, "Zxid")."""
    return int(zxid) >> 32


_REFUSED = kazoo.exceptions.NoAuthError, kazoo.exceptions.AuthFailedError, kazoo.exceptions.InvalidACLError


def _translated(error: BaseException, path: str) -> Exception:
    match error:
        case kazoo.exceptions.NoNodeError():
            return NoNode(path)
        case kazoo.exceptions.NodeExistsError():
            return NodeExists(path)
        case kazoo.exceptions.BadVersionError():
            return BadVersion(path)
        case kazoo.exceptions.NotEmptyError():
            return NotEmpty(path)
        case kazoo.exceptions.SessionExpiredError():
            return SessionExpired("the ZooKeeper session has expired")
        case _ if isinstance(error, _REFUSED):
            return NotAllowed(f"ZooKeeper refuses {path}: {type(error).__name__}")
        case _:
            return Unreachable(f"ZooKeeper didn't answer: {type(error).__name__}")
