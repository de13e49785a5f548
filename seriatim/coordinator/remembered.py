"""Chains, names and the registry as one coordinator has seen them in ZooKeeper, kept fresh by watches, for whoever only looks.

A decision never rests on what is remembered, except where a compare-and-set, or a member, would refuse it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeVar

from seriatim.coordinator.core.background import SeenChain
from seriatim.coordinator.core.registry import MEMBERS, GroupState, Registry
from seriatim.protocol import chain_json, log
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.clock import now_ms
from seriatim.protocol.errors import NoChainDocument, Unreachable, WorldError
from seriatim.protocol.names import ChainVersion, QueueId
from seriatim.protocol.nodes import ChainNode, NotUnderstood, Paths, queue_id_from, queue_ids, read_as, read_chain_node
from seriatim.protocol.registration import Registration
from seriatim.protocol.zookeeper import BadVersion, NoNode, SessionState, TellsOf, Watch, ZooKeeperSession

_log = log.logger("coordinator.remembered")
_RETRY_S = 0.2
_AT_ONCE = 16
"""So many nodes are read side by side."""
Item = TypeVar("Item")
Found = TypeVar("Found")


def _slices(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


async def side_by_side(
    items: Sequence[Item], read: Callable[[Item], Coroutine[Any, Any, Found]]
) -> list[tuple[Item, Found]]:
    """Each item and what was read of it, so many at a time. Raises what `read` does."""
    found: list[tuple[Item, Found]] = []
    for some in _slices(items):
        if len(some) == 1:  # as it mostly is: without a task of its own
            found.append((some[0], await read(some[0])))
        else:
            found += zip(some, await asyncio.gather(*map(read, some)), strict=True)
    return found


# ---- what may have to be read again


class Listing(Enum):
    """What there is of a kind. ALL_NAMES: and of each name, which queue has it."""

    GROUPS = auto()
    QUEUES = auto()
    NAMES = auto()
    ALL_NAMES = auto()


@dataclass(frozen=True, slots=True)
class GroupNodes:
    """A group's own mark, and all its members'."""

    group: str


@dataclass(frozen=True, slots=True)
class MemberNode:
    group: str
    place: str


@dataclass(frozen=True, slots=True)
class NameNode:
    name: str


@dataclass(frozen=True, slots=True)
class QueueNode:
    """A queue's chain."""

    queue_id: QueueId


Stale = Listing | GroupNodes | MemberNode | NameNode | QueueNode


def _after_a_gap(chains: Iterable[QueueId]) -> set[Stale]:
    """All that no watch has told of, as none was there; these chains were known before."""
    return {Listing.GROUPS, Listing.QUEUES, Listing.ALL_NAMES, *map(QueueNode, chains)}


class Remembered:
    """Of one coordinator. Keep `run` going; `on_change` listeners are called on the loop."""

    def __init__(self, session: ZooKeeperSession, cluster: str) -> None:
        self.session = session
        self.cluster = cluster
        self.paths = Paths(cluster)
        self.registry = Registry()
        self.chains: dict[QueueId, SeenChain] = {}
        self.bare: dict[QueueId, int] = {}
        """Queues that have nodes and no chain, and since when (milliseconds) that is seen."""
        self.damaged: dict[QueueId, str] = {}
        """Queues whose chain can't be read, and why."""
        self.names: dict[str, QueueId] = {}
        self._newest: dict[QueueId, ChainVersion] = {}
        """The last version that was seen of each chain that is there, in whatever session."""
        self._held: dict[QueueId, tuple[bytes, ChainDocument]] = {}
        """What each chain's node was last seen to hold, and what that says."""
        self._written: dict[QueueId, tuple[int, bytes]] = {}
        """The last version of each chain that was written here, and its bytes."""
        self._listeners: list[Callable[[], None]] = []
        self._stale = _after_a_gap(())
        self._wake = asyncio.Event()
        self._session_id = 0
        self._of_earlier_session: set[QueueId] = set()
        session.on_state(self._session_changed)

    async def run(self) -> None:
        """Follow the watches until cancelled."""
        told = ""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._refresh()
                told = ""
            except (WorldError, NoNode) as error:
                if told != (told := repr(error)):
                    _log.warning("can't follow ZooKeeper now", error=told)
                if isinstance(error, NoNode):  # somebody deleted what all of the cluster lies in
                    with contextlib.suppress(WorldError, NoNode):
                        await self.make_nodes()
                await asyncio.sleep(_RETRY_S)
                self._wake.set()

    async def make_nodes(self) -> None:
        """What all of the cluster lies in, where it isn't there. Raises NoNode where the path behind ZooKeeper's address isn't."""
        paths = self.paths
        for path in (
            paths.groups,
            paths.coordinators,
            paths.coordinator_election,
            paths.names,
            paths.ids,
            paths.queues,
        ):
            await self.session.ensure(path)

    async def listed(self, path: str) -> list[str]:
        """Names of what lies in one of these. Raises Unreachable where that isn't there: somebody deleted it, and it is made again."""
        try:
            return await self.session.children(path)
        except NoNode as error:
            raise Unreachable(f"ZooKeeper has nothing at {path}: it was emptied, or deleted") from error

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a chain, a name or the registry has changed. Returns how to stop that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def look_up_registry(self, groups: Collection[str] | None = None) -> Registry:
        """The registry, of these groups (None: of all) read now and not from memory (H10, H15).

        Raises NotUnderstood for one of these groups; of all, those that aren't understood stay as they were seen last.
        """
        await self.session.sync(self.paths.groups)
        if groups is None:
            found = await self._read_groups(await self.listed(self.paths.groups), is_watching=False)
        else:
            found = await side_by_side(list(groups), lambda name: self._read_group(name, is_watching=False))
        for name, state in found:
            if state != self.registry.groups.get(name):
                self._stale.add(GroupNodes(name))  # while this was read, something newer may have been seen
                self._wake.set()
            self._remember(name, state)
        return self.registry

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._stale |= _after_a_gap(self.chains)
            self._wake.set()
            if self._session_id != self.session.session_id:
                self._session_id = self.session.session_id
                self._of_earlier_session |= self.chains.keys()
                self.registry = replace(self.registry, is_new=True)
                delay_s = self.session.session_timeout_s
                asyncio.get_running_loop().call_later(delay_s, self._is_here_for_long, self._session_id)
        else:
            self._tell()  # who watches goes to a coordinator that sees what changes

    def _is_here_for_long(self, session_id: int) -> None:
        """Whoever lives and came to ZooKeeper with this coordinator is registered by now."""
        if session_id == self._session_id:
            self.registry = replace(self.registry, is_new=False)
            self._tell()

    def changed(self, what: Stale) -> None:
        """A watch said so: `what` has to be read again."""
        self._stale.add(what)
        self._wake.set()

    def _watch(self, what: Stale) -> Callable[[], None]:
        return TellsOf(self.changed, what)

    async def _refresh(self) -> None:
        stale, self._stale = self._stale, set()
        try:
            if Listing.GROUPS in stale:
                stale |= await self._list_groups()
            groups = sorted(one.group for one in stale if isinstance(one, GroupNodes))
            for name, state in await self._read_groups(groups, is_watching=True):
                self._remember(name, state)
            for group, place in sorted((one.group, one.place) for one in stale if isinstance(one, MemberNode)):
                if group not in groups:
                    await self._read_again(group, place)
            renamed = {one.name for one in stale if isinstance(one, NameNode)}
            if renamed or stale & {Listing.ALL_NAMES, Listing.NAMES}:
                is_anew = Listing.ALL_NAMES in stale
                known = {} if is_anew else {name: of for name, of in self.names.items() if name not in renamed}
                await self._read_names(known)
            if Listing.QUEUES in stale:
                stale |= await self._read_queues()
            for some in _slices(sorted(one.queue_id for one in stale if isinstance(one, QueueNode))):
                await side_by_side(some, self._read_seen)
                self._tell()
        except BaseException:
            self._stale |= stale
            raise
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    async def _list_groups(self) -> set[GroupNodes]:
        """Forget groups that are gone; returns all that are there, to be read."""
        there = await self.session.children(self.paths.groups, self._watch(Listing.GROUPS))
        if gone := self.registry.groups.keys() - set(there):
            left = {name: one for name, one in self.registry.groups.items() if name not in gone}
            self.registry = replace(self.registry, groups=left)
        return {GroupNodes(name) for name in there}

    def _remember(self, name: str, state: GroupState | None) -> None:
        """The registry stays the same object where nothing has changed."""
        if state != self.registry.groups.get(name):
            groups = {one: known for one, known in self.registry.groups.items() if one != name}
            if state is not None:
                groups[name] = state
            self.registry = replace(self.registry, groups=dict(sorted(groups.items())))

    async def _read_groups(self, names: Collection[str], *, is_watching: bool) -> list[tuple[str, GroupState | None]]:
        """Those that aren't understood stay as they were seen last: nobody is absent whose node can't be read."""

        async def read(name: str) -> GroupState | None:
            try:
                return await self._read_group(name, is_watching=is_watching)
            except NotUnderstood as error:
                if is_watching:
                    _log.error("group left as it was", group=name, reason=error)
                return self.registry.groups.get(name)

        return await side_by_side(list(names), read)

    async def _read_group(self, name: str, *, is_watching: bool) -> GroupState | None:
        """None: it isn't there."""
        watch = self._watch(GroupNodes(name)) if is_watching else None
        try:
            data, _ = await self.session.get(self.paths.group(name), watch)
        except NoNode:
            return None
        is_draining = True  # until an operator resumes it, which writes the node anew
        try:
            is_draining = bool(json.loads(data)["is_draining"]) if data else False
        except (KeyError, TypeError, ValueError) as error:
            if is_watching:
                _log.error("group counts as drained, its mark can't be read", group=name, reason=repr(error))
        state = GroupState(name, is_draining)
        try:
            places = [one for one in await self.session.children(self.paths.members(name), watch) if one in MEMBERS]
        except NoNode:
            places = []
            if watch is not None:
                await self._await_node(self.paths.members(name), watch)
        members = {}
        for place in places:
            with contextlib.suppress(NoNode):
                members[place] = await self._read_member(name, place, is_watching=is_watching)
        return replace(state, members=members)

    async def _read_member(self, group: str, place: str, *, is_watching: bool) -> Registration:
        """What one says of itself. By what it said to an earlier leader of ZooKeeper it may have compared its disk with newer chains."""
        session, path = self.session, self.paths.member(group, place)
        watch = self._watch(MemberNode(group, place)) if is_watching else None
        is_said_anew = not self.registry.is_new or await session.leader_of(path) >= session.leader
        registration, _ = await read_as(Registration.decode, session, path, watch)
        return registration if is_said_anew else replace(registration, has_compared=False)

    async def _read_again(self, group: str, place: str) -> None:
        """A member that says something else of itself; one that is gone changes its group's list, which is watched too."""
        try:
            member = await self._read_member(group, place, is_watching=True)
        except NoNode:
            return
        except NotUnderstood as error:
            _log.error("member left as it was", group=group, member=place, reason=error)
            return
        known = self.registry.groups.get(group)
        if known is not None:
            self._remember(group, replace(known, members={**known.members, place: member}))

    async def _read_names(self, known: Mapping[str, QueueId]) -> None:
        """The names that are there; only those that aren't `known` are read."""
        there = await self.session.children(self.paths.names, self._watch(Listing.NAMES))
        found = await side_by_side([name for name in there if name not in known], self._named)
        kept = {name: known[name] for name in there if name in known}
        self.names = kept | {name: queue_id for name, queue_id in found if queue_id is not None}

    async def _named(self, name: str) -> QueueId | None:
        try:
            queue_id, _ = await read_as(queue_id_from, self.session, self.paths.name(name), self._watch(NameNode(name)))
        except NoNode:
            return None
        except NotUnderstood as error:
            _log.error("name left as it was", name=name, reason=error)
            return self.names.get(name)
        return queue_id

    async def _read_queues(self) -> set[QueueNode]:
        """Forget queues that are gone; returns those not seen yet."""
        there = set(queue_ids(await self.session.children(self.paths.queues, self._watch(Listing.QUEUES))))
        for gone in (self.chains.keys() | self.damaged.keys()) - there:
            self._forget_chain(gone)
        for gone in self.bare.keys() - there:
            del self.bare[gone]
        return {QueueNode(queue_id) for queue_id in there - self.chains.keys()}

    async def _read_seen(self, queue_id: QueueId) -> None:
        path, watch = self.paths.chain(queue_id), self._watch(QueueNode(queue_id))
        try:
            node = await self._chain_node(queue_id, watch)
        except NoNode:
            self._forget_chain(queue_id)
            if await self._await_node(path, watch):
                self.bare.setdefault(queue_id, now_ms())
            else:
                self.bare.pop(queue_id, None)
            return
        self.bare.pop(queue_id, None)
        if self._is_news(queue_id, node.version):  # what isn't need not be decoded
            try:
                self._saw(self._decoded(queue_id, node.data), ChainVersion(node.version))
            except NoChainDocument as error:
                self.chains.pop(queue_id, None)
                self.damaged[queue_id] = error.message
                _log.error("queue left out", path=path, reason=error)

    def _forget_chain(self, queue_id: QueueId) -> None:
        """It isn't there."""
        self.chains.pop(queue_id, None)
        self.damaged.pop(queue_id, None)
        self._newest.pop(queue_id, None)
        self._held.pop(queue_id, None)
        self._written.pop(queue_id, None)
        self._note_outdated(queue_id, "")

    async def _chain_node(self, queue_id: QueueId, watch: Watch | None = None) -> ChainNode:
        """What a chain's node holds. Raises NoNode.

        One that is older than what was seen before, also behind a `sync`, says that ZooKeeper was set back, whatever sessions outlived
        that: an ensemble lets its clients in again, as each leader's numbers are higher than all before.
        """
        path, newest = self.paths.chain(queue_id), self._newest.get(queue_id, 0)
        node = await read_chain_node(self.session, path, watch, newest)
        if node.version < newest:
            await self.session.sync(path)
            node = await read_chain_node(self.session, path, watch, newest)
        is_older = node.version < newest
        seen = (
            f"this coordinator has seen version {newest} of the chain, which is at {node.version}" if is_older else ""
        )
        self._note_outdated(queue_id, seen)
        if not node.is_whole:
            node = await self._written_again(queue_id, node)
        self._note_version(queue_id, node.version)
        return node

    async def _written_again(self, queue_id: QueueId, node: ChainNode) -> ChainNode:
        """A chain that isn't whole, or as it is again: by whoever wrote this version of it, where it was damaged on its way there."""
        written_at, data = self._written.get(queue_id, (-1, b""))
        if written_at != node.version:
            return node
        try:
            version = await self.session.set(self.paths.chain(queue_id), data, node.version)
        except BadVersion:
            return node
        self._wrote(queue_id, version, data)
        _log.warning("chain written again, bits had changed", queue_id=queue_id, version=version)
        return ChainNode(data, version, is_whole=True)

    def _wrote(self, queue_id: QueueId, version: int, data: bytes) -> None:
        self._note_version(queue_id, version)
        self._written[queue_id] = version, data

    def _decoded(self, queue_id: QueueId, data: bytes) -> ChainDocument:
        """What a chain's node says. Decoded once: where readers of a queue are elected at once, all read it, and it takes tens of milliseconds.

        By its bytes: once ZooKeeper was set back, the same version may be another chain's. Raises as `chain_json.decode`.
        """
        held = self._held.get(queue_id)
        if held is None or held[0] != data:
            held = self._held[queue_id] = data, chain_json.decode(data)
        return held[1]

    def size_bytes(self, queue_id: QueueId) -> int:
        """How much of its node a chain takes, as it was last read or written here; 0 where it wasn't."""
        held = self._held.get(queue_id)
        return 0 if held is None else len(held[0])

    def _note_version(self, queue_id: QueueId, version: int) -> None:
        self._newest[queue_id] = ChainVersion(max(version, self._newest.get(queue_id, 0)))

    def _note_outdated(self, queue_id: QueueId, what: str) -> None:
        """How a chain is older than what was seen; empty where it isn't."""
        outdated = self.registry.outdated
        if outdated.get(queue_id, "") != what:
            if what and queue_id not in outdated:
                _log.error("ZooKeeper was set back", queue_id=queue_id, what=what)
            left = {one: said for one, said in outdated.items() if one != queue_id}
            self.registry = replace(self.registry, outdated=left | ({queue_id: what} if what else {}))

    def _is_news(self, queue_id: QueueId, version: int) -> bool:
        """Of an earlier session nothing counts: there, the same version may have been another chain's."""
        seen = self.chains.get(queue_id)
        return seen is None or seen.version < version or queue_id in self._of_earlier_session

    def _saw(self, document: ChainDocument, version: ChainVersion) -> bool:
        """Remember it, unless something newer is: of this session, because between two of them ZooKeeper may have been set back."""
        queue_id = document.queue_id
        is_news = self._is_news(queue_id, version)
        before = None if queue_id in self._of_earlier_session else self.chains.get(queue_id)
        self._of_earlier_session.discard(queue_id)
        self.damaged.pop(queue_id, None)
        if is_news:
            self.chains[queue_id] = SeenChain.after(before, document, version, now_ms(), self.size_bytes(queue_id))
        return is_news

    async def _await_node(self, path: str, watch: Watch) -> bool:
        """Call `watch` once a node that isn't there is, or what it lies in goes: its making is under way, or it was cleared away.

        False: there is nothing that it would lie in.
        What it lies in is watched: a watch of the node itself would stay for ever where it never comes (H16).
        """
        parent, _, name = path.rpartition("/")
        with contextlib.suppress(NoNode):
            if name in await self.session.children(parent, watch):
                watch()
            return True
        return False
