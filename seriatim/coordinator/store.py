"""ZooKeeper, as the coordinator uses it: chain documents by compare-and-set, the registry, names and elections.

Chains and the registry are also remembered, kept fresh by watches, for whoever only looks. A decision never rests on what
is remembered, except where a compare-and-set, or a member, would refuse it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from seriatim.coordinator import messages
from seriatim.coordinator.core import removal
from seriatim.coordinator.core.background import SeenChain
from seriatim.coordinator.core.chain import deleted_error
from seriatim.coordinator.core.registry import MEMBERS, GroupState, MemberState, Registry, unknown_group
from seriatim.coordinator.core.seal import SealAnswer
from seriatim.protocol import chain_json, log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.clock import now_ms
from seriatim.protocol.election import first_in_line
from seriatim.protocol.errors import NoChainDocument, QueueExists, UnknownQueue, Unreachable, Waiting, WorldError
from seriatim.protocol.names import ChainVersion, Epoch, QueueId, SubscriptionId, checked_name
from seriatim.protocol.zookeeper import (
    BadVersion,
    CoordinatorRegistration,
    NodeExists,
    NoNode,
    NotEmpty,
    NotUnderstood,
    Paths,
    Registration,
    SessionState,
    Watch,
    ZooKeeperSession,
    queue_id_from,
    queue_ids,
    read_as,
)

_log = log.logger("coordinator.store")
_RETRY_S = 0.2
_GROUP = "group "
_MEMBER = "member "
_NAME = "name "
_AT_ONCE = 16
"""So many nodes are read side by side."""
Item = TypeVar("Item")
Found = TypeVar("Found")


def _slices(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


async def _side_by_side(
    items: Sequence[Item], read: Callable[[Item], Coroutine[Any, Any, Found]]
) -> list[tuple[Item, Found]]:
    found: list[tuple[Item, Found]] = []
    for some in _slices(items):
        if len(some) == 1:  # as it mostly is: without a task of its own
            found.append((some[0], await read(some[0])))
        else:
            found += zip(some, await asyncio.gather(*map(read, some)), strict=True)
    return found


def _those(stale: Collection[str], kind: str) -> list[str]:
    """Of what has to be read again, the names of one kind."""
    return [what.removeprefix(kind) for what in stale if what.startswith(kind)]


class Store:
    """One coordinator's window on ZooKeeper. `start` it, then keep `run` going; `on_change` listeners are called on the loop."""

    def __init__(self, session: ZooKeeperSession, cluster: str) -> None:
        self.session = session
        self.cluster = cluster
        self.paths = Paths(cluster)
        self.registry = Registry()
        self.chains: dict[QueueId, SeenChain] = {}
        self.bare: dict[QueueId, int] = {}
        """Queues that have nodes and no chain, and since when (milliseconds) that is seen."""
        self.names: dict[str, QueueId] = {}
        self._listeners: list[Callable[[], None]] = []
        self._stale: set[str] = {"groups", "queues", "names"}
        self._wake = asyncio.Event()
        self._session_id = 0
        self._of_earlier_session: set[QueueId] = set()
        session.on_state(self._session_changed)

    async def start(self) -> None:
        """Make the cluster's nodes where they aren't there, and read everything once. Raises Unreachable."""
        paths = self.paths
        try:
            for path in (
                paths.groups,
                paths.coordinators,
                paths.coordinator_election,
                paths.names,
                paths.ids,
                paths.queues,
            ):
                await self.session.ensure(path)
        except NoNode as error:
            if "/" not in (where := self.session.hosts):
                raise
            raise Unreachable(f"ZooKeeper has no such node as {where} names behind the slash: make it first") from error
        await self._refresh()

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
                await asyncio.sleep(_RETRY_S)
                self._wake.set()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a chain, a name or the registry has changed. Returns how to stop that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # ---- queues

    async def queue_id(self, name: str, known: int = 0) -> QueueId:
        """The id of the queue that has this name now. Raises UnknownQueue, NotUnderstood.

        This session's ZooKeeper server may be behind, and show the one that had it before, which was deleted (H16).
        `known`: who knows the id needs no name: the chain of a queue that was deleted says so, or is gone.
        """
        if known:
            return QueueId(known)
        path = self.paths.name(checked_name(name, "queue"))
        await self.catch_up()
        try:
            queue_id, _ = await read_as(queue_id_from, self.session, path)
        except NoNode as error:
            raise UnknownQueue(f"there is no queue {name}", queue=name) from error
        return queue_id

    async def read_chain(self, queue_id: QueueId) -> tuple[ChainDocument, ChainVersion]:
        """The chain document now. Raises UnknownQueue."""
        try:
            data, version = await self._found(self.paths.chain(queue_id))
        except NoNode as error:
            raise UnknownQueue(f"there is no queue with id {queue_id}", queue_id=queue_id) from error
        return chain_json.decode(data), ChainVersion(version)

    async def read_chains(self) -> list[ChainDocument]:
        """The chains of all queues, deleted ones among them, none older than now."""
        await self.catch_up()
        there = queue_ids(await self.session.children(self.paths.queues))
        found = await _side_by_side(there, self._chain_if_any)
        return [document for _, document in found if document is not None]

    async def _chain_if_any(self, queue_id: QueueId) -> ChainDocument | None:
        """None: the queue is being made, or cleared away."""
        with contextlib.suppress(UnknownQueue):
            return (await self.read_chain(queue_id))[0]
        return None

    async def _found(self, path: str) -> tuple[bytes, int]:
        """A node's data and version. NoNode only where it is so now: this session's ZooKeeper server may be behind."""
        try:
            return await self.session.get(path)
        except NoNode:
            await self.catch_up()
            return await self.session.get(path)

    async def catch_up(self) -> None:
        """Whatever is read after this is as new as now, also where this session's ZooKeeper server was behind."""
        await self.session.sync(self.paths.queues)

    async def write_chain(self, document: ChainDocument, expected: ChainVersion) -> ChainVersion | None:
        """Compare-and-set. None: somebody changed it first, nothing was written. Raises ChainSetBack; a queue can be deleted even then."""
        if not document.is_deleted and (set_back := self.registry.set_back_error(document)):
            raise set_back
        try:
            data = chain_json.encode(document)
            version = ChainVersion(await self.session.set(self.paths.chain(document.queue_id), data, expected))
        except BadVersion:
            return None
        except NoNode as error:
            raise deleted_error(document) from error
        if document.queue_id in self.chains and self._saw(document, version):
            self._tell()  # whoever watches is told now; the watch on the node says the same a moment later
        return version

    async def new_queue_id(self) -> QueueId:
        """A number that no queue had before (H16). Its node goes with the session, where this is cut off."""
        path = await self.session.create(f"{self.paths.ids}/q-", ephemeral=True, sequential=True)
        with contextlib.suppress(NoNode):  # so it did, in between
            await self.session.delete(path)
        return QueueId(int(path[-10:]) + 1)

    async def create_queue(self, document: ChainDocument, cause_id: str = "") -> ChainVersion:
        """The chain first, then the name: one that is cut off between them is cleared away. Raises QueueExists, Waiting.

        Whoever was so long between the two that it was cleared away meanwhile takes the name back. `cause_id`: of the call
        that makes it, for `made_by`.
        """
        queue_id = document.queue_id
        with contextlib.suppress(NodeExists):  # who stands for an election makes what it lies in
            await self.session.create(self.paths.queue(queue_id), messages.kept_cause(cause_id).encode())
        await self.session.ensure(self.paths.senders(queue_id))
        await self.session.ensure(self.paths.seals(queue_id))
        late = Waiting(f"making queue {document.name} took too long; make it again", queue=document.name)
        try:
            await self.session.create(self.paths.chain(queue_id), chain_json.encode(document))
        except NoNode as error:
            raise late from error
        try:
            await self.session.create(self.paths.name(document.name), json.dumps(queue_id).encode())
        except NodeExists as error:
            await self.clear_queue(queue_id)
            raise QueueExists(f"there is a queue {document.name} already", queue=document.name) from error
        if await self.is_gone(queue_id):
            await self.free_name(document.name, queue_id)
            raise late
        return ChainVersion(0)

    async def made_by(self, cause_id: str, name: str) -> QueueId | None:
        """The queue of this name, if it was made by this very call at an earlier try, of which nobody heard."""
        with contextlib.suppress(UnknownQueue, NoNode):
            queue_id = await self.queue_id(name)
            data, _ = await self._found(self.paths.queue(queue_id))
            if data and data == messages.kept_cause(cause_id).encode():
                return queue_id
        return None

    async def recover_queue(self, document: ChainDocument, expected: ChainVersion | None) -> bool:
        """Make or replace a queue's chain; its version is to be raised after it. False: somebody changed it, nothing was written.

        `expected`: the version that is there; None: there is no chain. The name first: a chain without one is cleared away.
        """
        paths, queue_id = self.paths, document.queue_id
        data, path = chain_json.encode(document), paths.chain(document.queue_id)
        with contextlib.suppress(NodeExists):
            await self.session.create(paths.name(document.name), json.dumps(queue_id).encode())
        await self.session.ensure(paths.senders(queue_id))
        await self.session.ensure(paths.seals(queue_id))
        try:
            if expected is None:
                await self.session.create(path, data)
            else:
                await self.session.set(path, data, expected)
        except (BadVersion, NodeExists, NoNode):
            return False
        return True

    async def raise_version(self, queue_id: QueueId, version: ChainVersion) -> None:
        """Write what a chain's node has until it has this version, one after the other: somebody else may change it meanwhile.

        Raises UnknownQueue where it was deleted meanwhile.
        """
        path = self.paths.chain(queue_id)
        data, now = b"", -1
        while now < version:
            try:
                if now < 0:
                    await self.session.sync(path)
                    data, now = await self.session.get(path)
                else:
                    now = await self.session.set(path, data, now)
            except BadVersion:
                now = -1
            except NoNode as error:
                raise UnknownQueue(f"the queue with id {queue_id} was deleted", queue_id=queue_id) from error

    async def skip_queue_ids(self, last: QueueId) -> None:
        """No queue gets an id up to this one: it had been given to one that ZooKeeper lost (H16)."""
        while await self.new_queue_id() <= last:
            pass

    async def is_gone(self, queue_id: QueueId) -> bool:
        """Whether the queue is marked as deleted, or cleared away already."""
        try:
            document, _ = await self.read_chain(queue_id)
        except UnknownQueue:
            return True
        return document.is_deleted

    async def free_name(self, name: str, queue_id: QueueId) -> None:
        """The name of a deleted queue may be given to another one. What isn't understood there is left.

        A ZooKeeper server that is behind would show this one's node still, where another queue has one by now, with the same version.
        """
        path = self.paths.name(name)
        await self.catch_up()
        with contextlib.suppress(NoNode, BadVersion, NotUnderstood):
            found, version = await read_as(queue_id_from, self.session, path)
            if found == queue_id:
                await self.session.delete(path, version)

    async def clear_queue(self, queue_id: QueueId) -> None:
        """Delete all nodes of a queue. Raises Waiting.

        The chain goes behind the others: where that is cut off, the queue is a deleted one still, and cleared away again.
        """
        await self._delete_tree(self.paths.queue(queue_id), last=self.paths.chain(queue_id))

    async def _delete_tree(self, path: str, last: str = "") -> None:
        try:
            children = [f"{path}/{name}" for name in await self.session.children(path)]
            for child in sorted(children, key=lambda child: child == last):
                await self._delete_tree(child)
            await self.session.delete(path)
        except NoNode:
            return
        except NotEmpty as error:
            raise Waiting(f"something was put below {path} meanwhile") from error

    async def sweep_queue(self, queue_id: QueueId) -> bool:
        """Delete the empty nodes of a queue without a chain. False: it has one now, or somebody stands for an election there.

        Whoever is about to make the chain goes on with what is left, or hears that he was too late.
        """
        paths, queue = self.paths, self.paths.queue(queue_id)
        try:
            await self.catch_up()
            if await self.session.exists(paths.chain(queue_id)):
                return False
            await self._sweep_readers(queue_id, lambda _: True)
            for path in (paths.all_readers(queue_id), paths.senders(queue_id), paths.seals(queue_id), queue):
                with contextlib.suppress(NoNode):
                    await self.session.delete(path)
        except NotEmpty:
            return False
        return True

    async def sweep_readers(self, document: ChainDocument) -> None:
        """Delete where readers of subscriptions that are gone stood for election; where one still does, it is left."""
        alive = {one.subscription_id for one in document.subscriptions}
        await self._sweep_readers(
            document.queue_id, lambda one: one < document.next_subscription_id and one not in alive
        )

    async def sweep_seals(self, document: ChainDocument) -> None:
        """Delete what members wrote beside the chain (protocol.md 5.4) of links that it doesn't hold any more."""
        seals = self.paths.seals(document.queue_id)
        with contextlib.suppress(NoNode):
            for name in await self.session.children(seals):
                epoch = name.partition("-")[0]
                if epoch.isdecimal() and int(epoch) < document.dropped.epoch:
                    await self.session.delete(f"{seals}/{name}")

    async def _sweep_readers(self, queue_id: QueueId, is_gone: Callable[[SubscriptionId], bool]) -> None:
        with contextlib.suppress(NoNode):
            for name in await self.session.children(self.paths.all_readers(queue_id)):
                if name.isdecimal() and is_gone(subscription_id := SubscriptionId(int(name))):
                    with contextlib.suppress(NoNode, NotEmpty):
                        await self.session.delete(self.paths.readers(queue_id, subscription_id))

    # ---- elections, seals, groups

    async def first_in_line(self, queue_id: QueueId, subscription_id: SubscriptionId | None) -> str:
        """The election node of the elected sender, or reader; empty where nobody stands."""
        paths = self.paths
        path = paths.senders(queue_id) if subscription_id is None else paths.readers(queue_id, subscription_id)
        try:
            await self.session.sync(path)
            return first_in_line(await self.session.children(path)) or ""
        except NoNode:
            return ""

    async def kept_seals(self, queue_id: QueueId, epoch: Epoch) -> dict[str, SealAnswer]:
        """Seal answers that members wrote beside the chain, by place (protocol.md 5.4)."""
        answers = {}
        for place in MEMBERS:
            with contextlib.suppress(NoNode, DecodeError):
                data, _ = await self.session.get(self.paths.seal(queue_id, epoch, place))
                answers[place] = messages.seal_answer_from(pb.SealReply.FromString(data))
        return answers

    async def look_up_registry(self, groups: Collection[str] | None = None) -> Registry:
        """The registry, of these groups (None: of all) read now and not from memory (H10, H15).

        Raises NotUnderstood for one of these groups; of all, those that aren't understood stay as they were seen last.
        """
        await self.session.sync(self.paths.groups)
        if groups is None:
            found = await self._read_groups(await self.session.children(self.paths.groups), is_watching=False)
        else:
            found = await _side_by_side(list(groups), lambda name: self._read_group(name, is_watching=False))
        for name, state in found:
            if state != self.registry.groups.get(name):
                self._stale.add(f"{_GROUP}{name}")  # while this was read, something newer may have been seen
                self._wake.set()
            self._remember(name, state)
        return self.registry

    async def set_draining(self, group: str, *, is_draining: bool) -> None:
        """Mark a group as drained by an operator, or no longer. Raises UnknownGroup."""
        try:
            await self.session.set(self.paths.group(group), json.dumps({"is_draining": is_draining}).encode())
        except NoNode as error:
            raise unknown_group(group) from error

    async def knows_all_groups(self) -> bool:
        """Whether every group that there is now is in the registry."""
        await self.session.sync(self.paths.groups)
        return self.registry.groups.keys() >= set(await self.session.children(self.paths.groups))

    async def mark_version(self, group: str) -> int:
        """Version of the mark that says whether a group is drained; it changes with each `set_draining`. Raises UnknownGroup."""
        await self.catch_up()
        try:
            _, version = await self.session.get(self.paths.group(group))
        except NoNode as error:
            raise unknown_group(group) from error
        return version

    async def remove_group(self, group: str, mark_version: int) -> None:
        """Delete the nodes of a group without members whose mark still has this version. Raises Waiting.

        May be done again where it was cut off: the mark goes last.
        """
        for path in (self.paths.members(group), self.paths.leases(group)):
            await self._deleted(path, -1, group)
        await self._deleted(self.paths.group(group), mark_version, group)

    async def _deleted(self, path: str, version: int, group: str) -> None:
        try:
            await self.session.delete(path, version)
        except NoNode:
            return
        except (BadVersion, NotEmpty) as error:
            raise removal.refused(group, {group: "it has changed meanwhile"}) from error

    async def coordinators(self) -> dict[str, str]:
        """Addresses of the registered coordinators, by name."""
        return {name: one.address for name, one in (await self._registered_coordinators()).items()}

    async def outside_addresses(self) -> dict[str, str]:
        """Of coordinators and members: from each address to the one that reaches it from outside, where it has one."""
        members = [state for group in self.registry.groups.values() for state in group.members.values()]
        found = {one.address: one.outside for one in members}
        found |= {one.address: one.outside for one in (await self._registered_coordinators()).values()}
        return {inside: outside for inside, outside in found.items() if outside}

    async def _registered_coordinators(self) -> dict[str, CoordinatorRegistration]:
        found = {}
        for name in await self.session.children(self.paths.coordinators):
            path = f"{self.paths.coordinators}/{name}"
            with contextlib.suppress(NoNode, NotUnderstood):
                found[name], _ = await read_as(CoordinatorRegistration.decode, self.session, path)
        return found

    async def elected_coordinator(self) -> str:
        """The election node of the coordinator that does the background work; empty where there is none."""
        return first_in_line(await self.session.children(self.paths.coordinator_election)) or ""

    # ---- what is remembered

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._stale |= {"groups", "queues", "names", *(str(queue_id) for queue_id in self.chains)}
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

    def changed(self, what: str) -> None:
        """A watch said so: `what` has to be read again."""
        self._stale.add(what)
        self._wake.set()

    def _watch(self, what: str) -> Callable[[], None]:
        return _Changed(self, what)

    async def _refresh(self) -> None:
        stale, self._stale = self._stale, set()
        try:
            if "groups" in stale:
                stale |= await self._list_groups()
            groups = _those(stale, _GROUP)
            for name, state in await self._read_groups(groups, is_watching=True):
                self._remember(name, state)
            for group, place in map(str.split, sorted(_those(stale, _MEMBER))):
                if group not in groups:
                    await self._read_again(group, place)
            renamed = _those(stale, _NAME)
            if renamed or stale & {"names", "list of names"}:
                known = {} if "names" in stale else {k: v for k, v in self.names.items() if k not in renamed}
                await self._read_names(known)
            if "queues" in stale:
                stale |= await self._read_queues()
            for some in _slices(queue_ids(stale)):
                await _side_by_side(some, self._read_seen)
                self._tell()
        except BaseException:
            self._stale |= stale
            raise
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    async def _list_groups(self) -> set[str]:
        """Forget groups that are gone; returns all that are there, to be read."""
        there = await self.session.children(self.paths.groups, self._watch("groups"))
        if gone := self.registry.groups.keys() - set(there):
            left = {name: one for name, one in self.registry.groups.items() if name not in gone}
            self.registry = replace(self.registry, groups=left)
        return {f"{_GROUP}{name}" for name in there}

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

        return await _side_by_side(list(names), read)

    async def _read_group(self, name: str, *, is_watching: bool) -> GroupState | None:
        """None: it isn't there."""
        watch = self._watch(f"{_GROUP}{name}") if is_watching else None
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

    async def _read_member(self, group: str, place: str, *, is_watching: bool) -> MemberState:
        watch = self._watch(f"{_MEMBER}{group} {place}") if is_watching else None
        registration, _ = await read_as(Registration.decode, self.session, self.paths.member(group, place), watch)
        return _member_state(registration)

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
        there = await self.session.children(self.paths.names, self._watch("list of names"))
        found = await _side_by_side([name for name in there if name not in known], self._named)
        kept = {name: known[name] for name in there if name in known}
        self.names = kept | {name: queue_id for name, queue_id in found if queue_id is not None}

    async def _named(self, name: str) -> QueueId | None:
        try:
            queue_id, _ = await read_as(
                queue_id_from, self.session, self.paths.name(name), self._watch(f"{_NAME}{name}")
            )
        except NoNode:
            return None
        except NotUnderstood as error:
            _log.error("name left as it was", name=name, reason=error)
            return self.names.get(name)
        return queue_id

    async def _read_queues(self) -> set[str]:
        """Forget queues that are gone; returns those not seen yet."""
        there = set(queue_ids(await self.session.children(self.paths.queues, self._watch("queues"))))
        for gone in self.chains.keys() - there:
            del self.chains[gone]
        for gone in self.bare.keys() - there:
            del self.bare[gone]
        return {str(queue_id) for queue_id in there - self.chains.keys()}

    async def _read_seen(self, queue_id: QueueId) -> None:
        path, watch = self.paths.chain(queue_id), self._watch(str(queue_id))
        try:
            data, version = await self.session.get(path, watch)
        except NoNode:
            self.chains.pop(queue_id, None)
            if await self._await_node(path, watch):
                self.bare.setdefault(queue_id, now_ms())
            else:
                self.bare.pop(queue_id, None)
            return
        self.bare.pop(queue_id, None)
        if self._is_news(queue_id, version):  # what isn't need not be decoded
            try:
                self._saw(chain_json.decode(data), ChainVersion(version))
            except NoChainDocument as error:
                self.chains.pop(queue_id, None)
                _log.error("queue left out", path=path, reason=error)

    def _is_news(self, queue_id: QueueId, version: int) -> bool:
        """Of an earlier session nothing counts: there, the same version may have been another chain's."""
        seen = self.chains.get(queue_id)
        return seen is None or seen.version < version or queue_id in self._of_earlier_session

    def _saw(self, document: ChainDocument, version: ChainVersion) -> bool:
        """Remember it, unless something newer is: of this session, because between two of them ZooKeeper may have been set back."""
        queue_id = document.queue_id
        is_news = self._is_news(queue_id, version)
        self._of_earlier_session.discard(queue_id)
        if is_news:
            self.chains[queue_id] = SeenChain(document, version, now_ms())
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


@dataclass(frozen=True, slots=True)
class _Changed:
    """Marks `what` as stale. Two of the same are equal, so that a node that is read again has one watch, not two."""

    store: Store
    what: str

    def __call__(self) -> None:
        self.store.changed(self.what)


def _member_state(registration: Registration) -> MemberState:
    return MemberState(
        registration.incarnation,
        registration.address,
        registration.peer,
        registration.is_in_sync,
        registration.is_accepting,
        registration.problem,
        registration.outside,
        registration.has_compared,
        registration.set_back,
        registration.direct,
    )
