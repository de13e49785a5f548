"""Election through ZooKeeper: ephemeral sequential nodes; the smallest number is elected.

kazoo's own Election can't be told that leadership is gone and gives no number to fence with, so the nodes are made
here, and the token comes from the chain document. An instance watches the node before its own: one change wakes one
instance. A suspended session counts as not elected at once, a lost one as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from seriatim.protocol import log
from seriatim.protocol.batch import MAX_SOURCE_BYTES
from seriatim.protocol.errors import InvalidArgument, Unreachable
from seriatim.protocol.zookeeper import NoNode, SessionExpired, SessionState, ZooKeeperSession

_log = log.logger("election")
_NUMBER_DIGITS = 10
_RETRY_S = 0.2
_CONTRADICTED = 3
"""A server that shows an instance as elected is left once coordinators have said so often that it isn't, who look behind all that was written before."""
_RESIGN_S = 1.0
"""A server that has lost the leader of ZooKeeper answers pings for seconds more, and no write (H10): who closes doesn't wait for that."""
_BREAKS = 5
_BREAKS_WITHIN_SESSIONS = 8.0
"""An instance that gives way does so when its connection broke so often within so many times its session's time-out, while it was
elected: its session lives, for each connection begins well, and nothing gets done.
"""
MAX_NAME_BYTES: Final = MAX_SOURCE_BYTES
"""A sender's name is also a source's."""
_NUMBERED = re.compile(r"-[0-9]{10}$")
_NO_NODE = re.compile("[/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff]")
"""What a node's name doesn't have (ZooKeeper Programmer's Guide, "The ZooKeeper Data Model")."""


class Standing(StrEnum):
    """out: no node. waiting: somebody else is first. elected: first. unsure: the session is suspended."""

    OUT = "out"
    WAITING = "waiting"
    ELECTED = "elected"
    UNSURE = "unsure"


def check_name(name: str, whose: str) -> None:
    """Raises InvalidArgument for a name that an instance can't have in an election: ZooKeeper would refuse its node, each time."""
    if _NO_NODE.search(name) or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidArgument(
            f"a {whose}'s name has 1 to {MAX_NAME_BYTES} bytes, no slash, and nothing else that ZooKeeper doesn't take: {name!r}"
        )


def made_up_name() -> str:
    """Of an instance that wasn't given one: host, process and chance."""
    return f"{socket.gethostname().replace('/', '-')}-{os.getpid()}-{os.urandom(4).hex()}"


def number_of(node: str) -> int:
    """The number that ZooKeeper gave an election node; the smallest is first in line."""
    return int(node[-_NUMBER_DIGITS:])


def candidates(nodes: list[str]) -> list[str]:
    """Those who stand for election: a node without such a number was put there by somebody else."""
    return [node for node in nodes if _NUMBERED.search(node)]


def first_in_line(nodes: list[str]) -> str | None:
    """Who is elected among these election nodes."""
    return min(candidates(nodes), key=number_of, default=None)


def right_before(nodes: list[str], own: str) -> str | None:
    """By whose end the node `own` may become first; None: it is."""
    before = [node for node in candidates(nodes) if number_of(node) < number_of(own)]
    return max(before, key=number_of, default=None)


class Election:
    """One instance in one election.

    `on_change(standing)` is called on the loop whenever the standing changes. After ELECTED the caller asks a
    coordinator for its token; after anything else it must already have stopped. `node`: the name of its node; empty
    where it has none. The caller owns the session; `run` is a task of the caller's, which ends when cancelled and then
    resigns. `gives_way`: where others stand as well, one whose connection breaks again and again goes behind them.
    """

    def __init__(
        self,
        session: ZooKeeperSession,
        path: str,
        name: str,
        on_change: Callable[[Standing], None],
        *,
        gives_way: bool = False,
    ) -> None:
        self._session = session
        self._path = path
        self._name = name
        self._on_change = on_change
        self._wake = asyncio.Event()
        self.node = ""
        self._node_session = 0
        self._gives_way = gives_way
        self._broken_at_s: deque[float] = deque(maxlen=_BREAKS)
        self._reason_to_go = ""
        self._contradictions = 0
        self.standing = Standing.OUT
        session.on_state(self._session_changed)

    async def run(self) -> None:
        """Stand for election until cancelled, then resign."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look()
                except (Unreachable, SessionExpired, NoNode) as error:
                    _log.debug("election can't be read", path=self._path, error=error)
                    if isinstance(error, NoNode):
                        # Also where all of it is gone, with the queue: a coordinator says so to who is elected.
                        self.node = ""
                    self._change(Standing.UNSURE if self.node else Standing.OUT)
                    await asyncio.sleep(_RETRY_S)
                    continue
                await self._wake.wait()
        finally:
            self._change(Standing.OUT)
            await self._resign()

    def give_way(self, reason: str) -> None:
        """Go behind the others who stand, if there are any."""
        self._reason_to_go = reason
        self._wake.set()

    def contradicted(self) -> None:
        """A coordinator says that this instance isn't elected, by which it stands for election elsewhere.

        An address of the ensemble's may belong to another one by now: whoever is led there makes the election anew, and is elected,
        for as long as that connection lasts.
        """
        self._contradictions += 1
        if self._contradictions >= _CONTRADICTED:
            self._contradictions = 0
            self._session.leave_server("coordinators know nothing of what this server shows")

    async def _look(self) -> None:
        session = self._session
        if session.state is not SessionState.CONNECTED:
            raise Unreachable("the session is not connected")
        if self.node and self._node_session != session.session_id:
            self.node = ""
        if not self.node:
            await self._enter()
        nodes = await session.children(self._path)
        if self.node not in nodes:
            self.node = ""
            raise NoNode(self._path)
        before = right_before(nodes, self.node)
        if before is None:
            await self._stand_first(is_alone=len(candidates(nodes)) == 1)
            return
        self._change(Standing.WAITING)
        if not await self._watch_end(before):
            self._wake.set()

    async def _enter(self) -> None:
        """Get a node of this session."""
        session = self._session
        self._node_session = session.session_id
        try:
            await session.ensure(self._path)
        except NoNode:  # not even the path that the cluster has in ZooKeeper is there
            session.leave_server("this server has no such path")
            raise
        await session.sync(self._path)  # what was asked through another server may be on its way still
        self.node = await self._find_own() or await self._make_own()
        self._contradictions = 0

    async def _stand_first(self, *, is_alone: bool) -> None:
        """Be elected, or give way to the others."""
        session, reason = self._session, self._reason_to_go
        self._reason_to_go = ""
        if self._gives_way and self._breaks_often():
            reason = "its connection breaks again and again"
        if reason and not is_alone:
            self._broken_at_s.clear()
            _log.warning("gives way", path=self._path, node=self.node, reason=reason)
            await session.delete(f"{self._path}/{self.node}")
            raise NoNode(self._path)
        if session.state is SessionState.CONNECTED:
            # Watched, so that an operator (or a coordinator) can depose an instance by deleting its node.
            if not await self._watch_end(self.node):
                self.node = ""
                raise NoNode(self._path)
            self._change(Standing.ELECTED)

    def _breaks_often(self) -> bool:
        broken_at_s = self._broken_at_s
        within_s = _BREAKS_WITHIN_SESSIONS * self._session.session_timeout_s
        return len(broken_at_s) == _BREAKS and asyncio.get_running_loop().time() - broken_at_s[0] < within_s

    async def _watch_end(self, node: str) -> bool:
        """Wake when the node goes. False: it is gone.

        Its children are watched, of which it has none: a watch of its data fires with each lease of a reader, which is
        written there, and one of its existence stays for ever where the node has just gone, for none comes again.
        """
        try:
            await self._session.children(f"{self._path}/{node}", self._wake.set)
        except NoNode:
            return False
        return True

    async def _make_own(self) -> str:
        made = await self._session.create(f"{self._path}/{self._name}-", ephemeral=True, sequential=True)
        return made.rsplit("/", 1)[1]

    async def _find_own(self) -> str:
        """The node that a create made whose answer was lost; without it, this session would wait behind itself. Empty for none."""
        for node in await self._session.children(self._path):
            if node[:-_NUMBER_DIGITS] == f"{self._name}-":
                with contextlib.suppress(NoNode):
                    if await self._session.owner(f"{self._path}/{node}") == self._session.session_id:
                        return node
        return ""

    def _session_changed(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            if self.standing is Standing.ELECTED:
                self._broken_at_s.append(asyncio.get_running_loop().time())
            if state is SessionState.LOST:
                self.node = ""
            self._change(Standing.UNSURE if self.node else Standing.OUT)
        self._wake.set()

    def _change(self, standing: Standing) -> None:
        if standing is not self.standing:
            self.standing = standing
            _log.info("standing", path=self._path, node=self.node, standing=standing)
            self._on_change(standing)

    async def _resign(self) -> None:
        """Give the node back. Where nobody answers for long, it has been asked for, or goes with the session."""
        node, self.node = self.node, ""
        if node and self._session.state is SessionState.CONNECTED:
            with contextlib.suppress(Unreachable, SessionExpired, NoNode, TimeoutError):
                async with asyncio.timeout(_RESIGN_S):
                    await self._session.delete(f"{self._path}/{node}")
