"""What a session asks its server: each request is on its way, waits for the leader where it has to, and is answered to the client.

A third of all steps are such requests. So each is one object with few parts, none of which leads back to it: what refers to itself stays in
memory until the schedule is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from seriatim.protocol.zookeeper import BadVersion, NodeExists, NoNode, NotEmpty, SessionExpired
from tests.simulation.ensemble import Server

if TYPE_CHECKING:
    from tests.simulation.zookeeper_session import SimulatedSession


class Request:
    """`work` does what is asked, at the server; `future` is told what came of it."""

    __slots__ = ("_server", "_session", "_session_id", "future")

    def __init__(self, session: SimulatedSession) -> None:
        self._session = session
        self.future: asyncio.Future[Any] = session.ensemble.loop.create_future()

    def send(self, server: Server) -> None:
        """On the connection of now."""
        session = self._session
        self._server, self._session_id = server, session.session_id
        ensemble = session.ensemble
        session.asked_s = asked_s = max(session.asked_s, ensemble.loop.now_s + ensemble.delay_s() / 4)
        ensemble.loop.at(asked_s, None, self._arrive)

    @property
    def _is_connected(self) -> bool:
        """Whether the session is still on the connection on which this was asked."""
        return self._session.server is self._server and self._session.session_id == self._session_id

    def _arrive(self) -> None:
        session, server = self._session, self._server
        if not self._is_connected:
            return
        if session.network.has_cuts and session.is_cut:
            session.held_requests.append(self._arrive)
            return
        if not server.is_cut_off and not session.ensemble.is_live(self._session_id):
            self._answer(None, SessionExpired("the ZooKeeper session has expired"))
            return
        self.work()

    def work(self) -> None:
        raise NotImplementedError

    def _answer(self, result: Any, error: Exception | None = None) -> None:
        """To the client, behind all answers that were told before."""
        if self._is_connected:
            session, tree = self._session, self._server.tree
            told = self._settle, result, error, tree.applied, tree.leader
            session.ensemble.loop.at(session.next_told_s(), session.process, *told)

    def _settle(self, *told: Any) -> None:
        session = self._session
        if session.server is not self._server:
            return
        if session.held_replies or (session.network.has_cuts and session.is_cut):
            session.held_replies.append((self._settle, told))
            return
        result, error, session.seen, session.leader = told[0], told[1], max(session.seen, told[2]), told[3]
        future = self.future
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class Read(Request):
    """`get`, `exists` or `children`, of what the server has applied. `watch`: to be called once."""

    __slots__ = ("_kind", "_path", "_watch")

    def __init__(self, session: SimulatedSession, kind: str, path: str, watch: Callable[[], None] | None) -> None:
        super().__init__(session)
        self._kind = kind
        self._path = path
        self._watch = None if watch is None else Watch(session, watch)

    def work(self) -> None:
        session, kind, path = self._session, self._kind, self._path
        loop = session.ensemble.loop
        if session.answered_s > loop.now_s:
            loop.at(session.answered_s, None, self._behind_writes)
            return
        tree, watch = self._server.tree, self._watch
        node = tree.nodes.get(path)
        if watch is not None and (node is not None or kind == "exists"):
            key = ("children" if kind == "children" else "data", path)
            self._server.watches.setdefault(key, []).append((session, self._session_id, watch))
            session.watching[watch] = None
        if kind == "exists":
            self._answer(None if node is None else (node.owner, node.written_under, node.version))
        elif node is None:
            self._answer(None, NoNode(path))
        elif kind == "get":
            self._answer((node.data, node.version))
        else:
            self._answer(list(tree.children.get(path, ())))

    def _behind_writes(self) -> None:
        if self._is_connected:
            self.work()


class Watch:
    """Tells the client once: of a change, or that the connection is lost."""

    __slots__ = ("_session", "_tell")

    def __init__(self, session: SimulatedSession, tell: Callable[[], None]) -> None:
        self._session = session
        self._tell = tell

    def __call__(self) -> None:
        if self._session.watching.pop(self, 0) is None:
            self._tell()


class Write(Request):
    """A change, which the leader decides on. `details`: what else `Ensemble.write` is told of it."""

    __slots__ = ("_data", "_details", "_is_ephemeral", "_kind", "_path", "_version")

    def __init__(
        self,
        session: SimulatedSession,
        kind: str,
        path: str,
        data: bytes = b"",
        version: int = -1,
        *,
        is_ephemeral: bool = False,
        **details: Any,
    ) -> None:
        super().__init__(session)
        self._kind = kind
        self._path = path
        self._data = data
        self._version = version
        self._is_ephemeral = is_ephemeral
        self._details = details

    def work(self) -> None:
        session, ensemble = self._session, self._session.ensemble
        session.undecided.add((self._kind, self._path))
        # A session's writes are done in their order, on whatever connections they came.
        session.answered_s = session.decided_s = max(session.decided_s, ensemble.decided_s())
        ensemble.loop.at(session.decided_s, None, self._commit)

    def _commit(self) -> None:
        session, server, ensemble = self._session, self._server, self._session.ensemble
        if server.is_cut_off:
            server.held.append(self._commit)
            return
        session.undecided.discard((self._kind, self._path))
        if ensemble.is_down:
            return
        if not ensemble.is_live(self._session_id):
            self._answer(None, SessionExpired("the ZooKeeper session has expired"))
            return
        session.wrote_s = ensemble.loop.now_s
        owner = self._session_id if self._is_ephemeral else 0
        result, failure = None, None
        try:
            result = ensemble.write(
                self._kind, self._path, self._data, self._version, owner=owner, through=server, **self._details
            )
        except (NoNode, NodeExists, BadVersion, NotEmpty) as error:
            failure = error
        ensemble.catch_up(server)
        self._answer(result, failure)


class Sync(Request):
    """Behind all that was asked of the leader before."""

    __slots__ = ()

    def work(self) -> None:
        session, ensemble = self._session, self._session.ensemble
        session.answered_s = max(ensemble.newest_decision_s, ensemble.decided_s())
        ensemble.loop.at(session.answered_s, None, self._decided)

    def _decided(self) -> None:
        server, ensemble = self._server, self._session.ensemble
        if server.is_cut_off:
            server.held.append(self._decided)
        elif not ensemble.is_down:
            self._done()
            ensemble.catch_up(server)
            self._answer(None)

    def _done(self) -> None:
        """What the leader does."""


class Close(Sync):
    """The client closes its session: the leader ends it."""

    __slots__ = ()

    def work(self) -> None:
        session, ensemble = self._session, self._session.ensemble
        ensemble.loop.at(max(session.decided_s, ensemble.decided_s()), None, self._decided)

    def _done(self) -> None:
        self._session.ensemble.expire(self._session_id)
