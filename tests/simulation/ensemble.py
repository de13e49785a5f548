"""ZooKeeper as a model: ephemeral and sequential nodes, versions, watches, servers that lag, sessions that expire.

Writes go through one leader and are applied by each server in the leader's order, a moment later; reads are answered by
the server that a session is connected to, from what it has applied (H10: one that is cut off still answers them). The client's
end of a session, and how long it lives, is in `zookeeper_session`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from seriatim.protocol.zookeeper import BadVersion, NodeExists, NoNode, NotEmpty
from tests.simulation.loop import Process, SimulatedLoop

SERVERS = 3
CUT_OFF_SERVER_S = 2.5, 8.0
"""So long a server that hears nothing of the leader still serves its clients' reads, as it is set up (H10)."""
LEFT_S = 4.0
"""So long a session lives that nobody is in."""


@dataclass(slots=True)
class Node:
    """`written_under`: the number of who led when it was written last."""

    data: bytes
    version: int = 0
    owner: int = 0
    written_under: int = 0


class Tree:
    """Nodes by path. `apply` a change; nothing is checked here. `leader`: the number of who leads, as far as is known here."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.children: dict[str, dict[str, None]] = {"": {}}
        self.applied = 0
        self.leader = 1

    def apply(self, change: tuple[Any, ...]) -> None:
        match change:
            case ("create", path, data, owner):
                self.nodes[path] = Node(data, 0, owner, self.leader)
                parent, _, name = path.rpartition("/")
                self.children.setdefault(parent, {})[name] = None
            case ("set", path, data, version):
                node = self.nodes[path]
                node.data, node.version, node.written_under = data, version, self.leader
            case ("delete", path):
                del self.nodes[path]
                parent, _, name = path.rpartition("/")
                self.children[parent].pop(name, None)
            case ("lead", number):
                self.leader = number


class Session(Protocol):
    """What servers know of a client (`zookeeper_session.SimulatedSession`)."""

    process: Process
    session_id: int
    session_timeout_s: float
    server: Server | None

    def notify(self, watch: Callable[[], None]) -> None:
        """Call a watch at the client."""

    def heard_of(self, *, is_fresh: bool = False) -> None:
        """What keeps the session alive may have changed."""

    def reached(self) -> None:
        """A cut is over before anybody gave the connection up."""

    def disconnect(self) -> None:
        """The connection to the server is gone."""


@dataclass(frozen=True)
class Kept:
    """What a copy of ZooKeeper's data has: nodes, the next numbers of sequences, and which sessions there were."""

    nodes: dict[str, Node] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    sessions: frozenset[int] = frozenset()


@dataclass
class Server:
    """`is_cut_off`: hears nothing of the leader; `held` is what it would tell it. `watches`: by kind and path, in order."""

    number: int
    tree: Tree = field(default_factory=Tree)
    is_cut_off: bool = False
    pending: deque[tuple[int, tuple[Any, ...]]] = field(default_factory=deque)
    watches: dict[tuple[str, str], list[tuple[Session, int, Callable[[], None]]]] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    held: list[Callable[[], None]] = field(default_factory=list)


def _is_on(server: Server, session: Session, session_id: int) -> bool:
    """Whether the client that was in this session there still is."""
    return session.session_id == session_id and session.server is server


class Ensemble:
    """The servers, and every session. `on_write(path, data, version)` is told of each committed write, `on_session` of each new one.

    `on_delete(path, owner)` is told of each node that is about to go, and whose it is.
    """

    def __init__(self, loop: SimulatedLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self._random = chance.random
        self.leader = Tree()
        self.servers = [Server(number) for number in range(SERVERS)]
        self.is_down = False
        self.lag_s = 0.002
        self.slow_s = 0.0
        """By how much at most a write is decided later, where disks are slow."""
        self.late_share = 0.02
        self.newest_decision_s = 0.0
        self.cut_off_server_s = CUT_OFF_SERVER_S[0]
        self.on_write: Callable[[str, bytes, int], None] = lambda *_: None
        self.on_session: Callable[[int, Process], None] = lambda *_: None
        self.on_delete: Callable[[str, int], None] = lambda *_: None
        self._last_session = 100
        self._sequences: dict[str, int] = {}
        self._live: dict[int, Session] = {}
        self._left: set[int] = set()
        """Sessions that nobody is in any more, and that a copy has brought back."""
        self._timed_out: set[Process] = set()

    def delay_s(self) -> float:
        random = self._random
        delay_s = self.lag_s * (0.2 + random())
        return delay_s + random() * 0.1 if random() < self.late_share else delay_s

    def decided_s(self) -> float:
        """When the leader has decided what is asked of it now. Who syncs hears of all that was asked before."""
        decided_s = self.loop.now_s + self.delay_s()
        if self.slow_s:
            decided_s += self.slow_s * self._random()
        self.newest_decision_s = max(self.newest_decision_s, decided_s)
        return decided_s

    # ---- sessions

    def new_session(self, session: Session) -> int:
        self._last_session += 1
        self._live[self._last_session] = session
        self.on_session(self._last_session, session.process)
        return self._last_session

    def is_live(self, session_id: int) -> bool:
        return session_id in self._live

    def session_of(self, process: Process) -> int | None:
        """The live session of a process."""
        return next((number for number, session in self._live.items() if session.process is process), None)

    def process_of(self, session_id: int) -> Process | None:
        """Whose live session this is."""
        session = self._live.get(session_id)
        return None if session is None else session.process

    def has_timed_out(self, process: Process) -> bool:
        """Whether a session of this process ended by silence, as its lease counts on, and not by an order."""
        return process in self._timed_out

    def timed_out(self, session: Session) -> None:
        self._timed_out.add(session.process)
        self.expire(session.session_id)

    def expire(self, session_id: int) -> None:
        """The leader ends a session: its ephemeral nodes go, in one."""
        if self._live.pop(session_id, None) is None and session_id not in self._left:
            return
        self._left.discard(session_id)
        for path in [path for path, node in self.leader.nodes.items() if node.owner == session_id]:
            self.commit(("delete", path))

    def sessions_of(self, process: Process | None) -> list[Session]:
        return [session for server in self.servers for session in list(server.sessions) if session.process is process]

    def watched_in_vain(self) -> list[str]:
        """Paths of nodes that aren't there, and that somebody watches; not where a server has yet to hear that one went."""
        return [
            path
            for server in self.servers
            for (_, path), watches in server.watches.items()
            if path not in self.leader.nodes
            and path not in server.tree.nodes
            and any(_is_on(server, session, number) for session, number, _ in watches)
        ]

    # ---- changes

    def commit(self, *changes: tuple[Any, ...], through: Server | None = None) -> None:
        """Apply at the leader at once, at the servers in order, each a moment later.

        `through`: the server of whoever wrote, which has it before it answers; that is for the caller (`catch_up`).
        """
        loop = self.loop
        for change in changes:
            if change[0] == "delete":
                self.on_delete(change[1], self.leader.nodes[change[1]].owner)
            self.leader.apply(change)
            self.leader.applied += 1
            if change[0] in ("create", "set"):
                self.on_write(change[1], change[2], self.leader.nodes[change[1]].version)
            for server in self.servers:
                server.pending.append((self.leader.applied, change))
                if not server.is_cut_off and server is not through:
                    loop.at(loop.now_s + self.delay_s(), None, self._apply_up_to, server, self.leader.applied)

    def catch_up(self, server: Server) -> None:
        self._apply_up_to(server, self.leader.applied)

    def _apply_up_to(self, server: Server, number: int) -> None:
        if server.is_cut_off:
            return
        pending, tree = server.pending, server.tree
        while pending and pending[0][0] <= number:
            at, change = pending.popleft()
            tree.apply(change)
            tree.applied = at
            self._fire(server, change)

    def _fire(self, server: Server, change: tuple[Any, ...]) -> None:
        kind, path = change[0], change[1]
        if kind == "lead":
            return
        touched = [("data", path)]
        if kind != "set":
            touched += ("children", path.rpartition("/")[0]), ("children", path)
        for key in touched:
            if key not in server.watches:
                continue
            for session, session_id, watch in server.watches.pop(key, ()):
                if _is_on(server, session, session_id):
                    session.notify(watch)

    def write(
        self,
        kind: str,
        path: str,
        data: bytes,
        version: int,
        *,
        owner: int,
        through: Server,
        is_sequential: bool = False,
        guard: tuple[str, int] | None = None,
        beside: tuple[str, bytes] | None = None,
    ) -> Any:
        """Check and commit at the leader. Returns the path made, or the new version. Raises as ZooKeeper does."""
        nodes = self.leader.nodes
        if guard is not None and nodes[guard[0]].version != guard[1]:
            raise BadVersion(guard[0])
        if kind == "create":
            if is_sequential:
                parent = path.rpartition("/")[0]
                number = self._sequences.get(parent, 0)
                self._sequences[parent] = number + 1
                path = f"{path}{number:010d}"
            made = [(path, data), *([] if beside is None else [beside])]
            for one, _ in made:
                parent = one.rpartition("/")[0]
                if parent and parent not in nodes:
                    raise NoNode(one)
                if one in nodes:
                    raise NodeExists(one)
            self.commit(*(("create", one, content, owner) for one, content in made), through=through)
            return path
        node = nodes.get(path)
        if node is None:
            raise NoNode(path)
        if version not in (-1, node.version):
            raise BadVersion(path)
        if kind == "set":
            self.commit(("set", path, data, node.version + 1), through=through)
            return node.version
        if self.leader.children.get(path):
            raise NotEmpty(path)
        if guard is not None:
            self.commit(("set", guard[0], b"", guard[1] + 1), through=through)
        self.commit(("delete", path), through=through)
        return None

    # ---- faults

    def cut_off(self, server: Server, drops_after_s: float | None = None) -> None:
        """The server loses the leader; after a while, which is `cut_off_server_s` unless said otherwise, it drops its clients."""
        server.is_cut_off = True
        for session in list(server.sessions):
            session.heard_of()

        def drop() -> None:
            if server.is_cut_off:
                server.held.clear()
                for session in list(server.sessions):
                    session.disconnect()

        self.loop.after(self.cut_off_server_s if drops_after_s is None else drops_after_s, None, drop)

    def rejoin(self, server: Server) -> None:
        server.is_cut_off = False
        self.catch_up(server)
        held, server.held = server.held, []
        for request in held:
            self.loop.after(self.delay_s(), None, request)
        for session in list(server.sessions):
            if self.is_live(session.session_id):
                session.heard_of()
            else:
                session.disconnect()

    def stop(self) -> None:
        """No majority: nothing is served; sessions don't expire meanwhile, for there is nobody to end them."""
        self.is_down = True
        for server in self.servers:
            for session in list(server.sessions):
                session.disconnect()

    def go_on(self) -> None:
        """A leader is elected, and has a higher number than any before."""
        self.is_down = False
        self.commit(("lead", self.leader.leader + 1))
        for server in self.servers:
            self.catch_up(server)
        for session in list(self._live.values()):
            session.heard_of(is_fresh=True)

    def copied(self) -> Kept:
        """What the leader has now."""
        nodes = {path: replace(node) for path, node in self.leader.nodes.items()}
        return Kept(nodes, dict(self._sequences), frozenset(self._live))

    def put_back(self, kept: Kept) -> None:
        """All servers have these data instead of theirs. Every process has to be dead: no session is known any more."""
        self._live.clear()
        self._left.clear()
        self._have(kept)

    def set_back_under_all(self, kept: Kept) -> None:
        """As `put_back`, while processes run on: an ensemble lets them in, also into their sessions, where the copy has those, too.

        Those that have ended since the copy was made are there again, until they time out.
        """
        self.stop()
        for gone in self._live.keys() - kept.sessions:
            del self._live[gone]
        self._left = set(kept.sessions - self._live.keys())
        self._have(kept)
        for session_id in sorted(self._left):
            self.loop.after(LEFT_S, None, self.expire, session_id)
        self.go_on()

    def _have(self, kept: Kept) -> None:
        """Nodes of sessions that aren't there go."""
        self._sequences = dict(kept.sequences)
        there = self._live.keys() | self._left
        nodes = {path: node for path, node in kept.nodes.items() if not node.owner or node.owner in there}
        before = self.leader
        trees = [self._tree_of(nodes, before) for _ in range(SERVERS + 1)]
        self.leader = trees.pop()
        for server, server.tree in zip(self.servers, trees, strict=True):
            server.pending.clear()
            server.watches.clear()
            server.held.clear()

    @staticmethod
    def _tree_of(nodes: Mapping[str, Node], before: Tree) -> Tree:
        tree = Tree()
        for path, node in nodes.items():
            tree.apply(("create", path, node.data, node.owner))
            tree.nodes[path] = replace(node)
        tree.applied, tree.leader = before.applied, before.leader + 1
        return tree

    def heal(self) -> None:
        self.slow_s = 0.0
        if self.is_down:
            self.go_on()
        for server in self.servers:
            if server.is_cut_off:
                self.rejoin(server)
