"""ZooKeeper, as the coordinator uses it: chain documents by compare-and-set, names, elections, seals and groups."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from seriatim.coordinator import messages
from seriatim.coordinator.core import removal
from seriatim.coordinator.core.chain import deleted_error
from seriatim.coordinator.core.registry import MEMBERS, unknown_group
from seriatim.coordinator.core.seal import SealAnswer
from seriatim.coordinator.remembered import Remembered, side_by_side
from seriatim.protocol import chain_json
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.checksums import without_checksum
from seriatim.protocol.clock import now_ms
from seriatim.protocol.election import first_in_line
from seriatim.protocol.errors import (
    IncompatibleVersion,
    NoChainDocument,
    QueueExists,
    UnknownQueue,
    Unreachable,
    Waiting,
)
from seriatim.protocol.names import ChainVersion, Epoch, MemberName, QueueId, SubscriptionId, checked_name
from seriatim.protocol.nodes import ChainNode, NotUnderstood, queue_id_from, queue_ids, read_as, read_coordinators
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.zookeeper import BadVersion, NodeExists, NoNode, NotEmpty, ZooKeeperSession, check_path

NO_QUEUE = QueueId(0)
_Found = TypeVar("_Found")


class Lines(weakref.WeakValueDictionary[QueueId, asyncio.Lock]):
    """Of those that read a queue's chain to write it, while there are some.

    Of hundreds that do so at once, one would succeed, and all others read, decode and encode all of the chain again, and again.
    """

    def of(self, queue_id: QueueId) -> asyncio.Lock:
        """To be held from reading to writing."""
        return self.setdefault(queue_id, asyncio.Lock())


class Store(Remembered):
    """One coordinator's window on ZooKeeper: what it has seen there, and what is read now and written. `start` it, then keep `run` going."""

    def __init__(self, session: ZooKeeperSession, cluster: str) -> None:
        super().__init__(session, cluster)
        self.lines = Lines()
        self._freeing = asyncio.Lock()  # side by side they would only be in each other's way

    async def start(self) -> None:
        """Make the cluster's nodes where they aren't there, and read everything once. Raises Unreachable."""
        try:
            await self.make_nodes()
        except NoNode as error:
            check_path(self.session.hosts, error)
            raise
        await self._refresh()

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
            raise UnknownQueue(f"there is no queue {name}{self._perhaps_lost()}", queue=name) from error
        return queue_id

    def _perhaps_lost(self) -> str:
        """For who asks for a queue by a name that ZooKeeper doesn't know: before he makes it anew, which would be in its way."""
        is_lost = bool(self.registry.all_set_back - self.chains.keys())
        return ", but ZooKeeper has lost some that members know: `seriatim group list` names them" if is_lost else ""

    async def read_chain(self, queue_id: QueueId) -> tuple[ChainDocument, ChainVersion]:
        """The chain document now. Raises UnknownQueue, NoChainDocument, and Unreachable where a newer version wrote it.

        By such a chain this process ends, as soon as its watch tells; whoever asks is to ask another coordinator.
        """
        try:
            node = await self._found(lambda: self._whole_node(queue_id))
        except NoNode as error:
            raise UnknownQueue(f"there is no queue with id {queue_id}", queue_id=queue_id) from error
        try:
            return self._decoded(queue_id, node.data), ChainVersion(node.version)
        except NoChainDocument as error:
            raise NoChainDocument(f"{self.paths.chain(queue_id)}: {error.message}") from error
        except IncompatibleVersion as error:
            raise Unreachable(f"this coordinator is too old for queue {queue_id}: {error}") from error

    async def _whole_node(self, queue_id: QueueId) -> ChainNode:
        """What a chain's node holds. Raises NoNode, and Unreachable where bits have changed in it."""
        node = await self._chain_node(queue_id)
        if not node.is_whole:
            raise Unreachable(
                f"bits have changed in the chain of queue {queue_id}; whoever wrote it writes it again. If it stays so, delete "
                f"{self.paths.chain(queue_id)} in ZooKeeper, then `seriatim queue recover NAME`"
            )
        return node

    async def read_chains(self) -> list[ChainDocument]:
        """The chains of all queues, deleted ones among them, none older than now."""
        await self.catch_up()
        there = queue_ids(await self.listed(self.paths.queues))
        found = await side_by_side(there, self._chain_if_any)
        return [document for _, document in found if document is not None]

    async def _chain_if_any(self, queue_id: QueueId) -> ChainDocument | None:
        """None: the queue is being made, or cleared away."""
        with contextlib.suppress(UnknownQueue):
            return (await self.read_chain(queue_id))[0]
        return None

    async def _found(self, read: Callable[[], Awaitable[_Found]]) -> _Found:
        """What is read of a node. NoNode only where it is so now: this session's ZooKeeper server may be behind."""
        try:
            return await read()
        except NoNode:
            await self.catch_up()
            return await read()

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
        self._wrote(document.queue_id, version, data)
        self._held[document.queue_id] = data, document
        if document.queue_id in self.chains and self._saw(document, version):
            self._tell()  # whoever watches is told now; the watch on the node says the same a moment later
        return version

    async def new_queue_id(self, above: QueueId = NO_QUEUE) -> QueueId:
        """A number that no queue had before (H16), above this one and all that are known here.

        It is the time, for what ZooKeeper counts goes with it: an empty one would give the ids again of which disks still have records.
        """
        known = max(above, *self.chains, *self.names.values(), *self.registry.all_set_back, NO_QUEUE)
        while True:
            try:
                await self.session.sync(self.paths.ids)
                data, version = await self.session.get(self.paths.ids)
                last = int(data) if data.isdigit() else NO_QUEUE
                queue_id = QueueId(max(now_ms(), last + 1, known + 1))
                await self.session.set(self.paths.ids, str(queue_id).encode(), version)
            except BadVersion:
                continue  # somebody else was given one
            except NoNode:  # somebody deleted it
                await self.make_nodes()
            else:
                return queue_id

    async def create_queue(self, document: ChainDocument, cause_id: str = "") -> ChainVersion | None:
        """The chain first, then the name: one that is cut off between them is cleared away. Raises QueueExists, Waiting.

        None: something is there of this id, and nothing was written. Whoever still stands for election at a queue that ZooKeeper lost
        makes what that lies in. Whoever was so long between the two that it was cleared away meanwhile takes the name back.
        `cause_id`: of the call that makes it, for `made_by`.
        """
        queue_id = document.queue_id
        try:
            await self.session.create(self.paths.queue(queue_id), messages.kept_cause(cause_id).encode())
        except NodeExists:
            return None
        await self.session.ensure(self.paths.senders(queue_id))
        await self.session.ensure(self.paths.seals(queue_id))
        late = Waiting(f"making queue {document.name} took too long; make it again", queue=document.name)
        data = chain_json.encode(document)
        try:
            await self.session.create(self.paths.chain(queue_id), data)
        except (NoNode, NodeExists) as error:  # cleared away; or of another queue, not seen here yet
            raise late from error
        self._wrote(queue_id, 0, data)
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
            data, _ = await self._found(lambda: self.session.get(self.paths.queue(queue_id)))
            if data and data == messages.kept_cause(cause_id).encode():
                return queue_id
        return None

    async def recover_queue(self, document: ChainDocument, expected: ChainVersion | None) -> bool:
        """Make or replace a queue's chain; its version is to be raised after it. False: somebody changed it, nothing was written.

        `expected`: the version that is there; None: there is no chain. No name leads to a chain that isn't there, or is another queue's,
        and no chain is made whose name another one has got: both come at once.
        """
        paths, queue_id = self.paths, document.queue_id
        path, data = paths.chain(queue_id), chain_json.encode(document)
        name = (paths.name(document.name), json.dumps(queue_id).encode())
        try:
            is_named = await self.queue_id(document.name) == queue_id
        except UnknownQueue:
            is_named = False
        await self.session.ensure(paths.senders(queue_id))
        await self.session.ensure(paths.seals(queue_id))
        version = 0
        try:
            if expected is None:
                await self.session.create(path, data, beside=None if is_named else name)
            else:
                if not is_named:
                    await self.session.create(*name)
                version = await self.session.set(path, data, expected)
        except (BadVersion, NodeExists, NoNode):
            return False
        self._wrote(queue_id, version, data)
        return True

    async def raise_version(self, queue_id: QueueId, version: ChainVersion) -> None:
        """Write what a chain's node has until it has this version, many times in one transaction: somebody else may change it between two.

        Each ends with the chain as it was: whoever is cut off leaves one that can be read, and raised further. Raises UnknownQueue
        where it was deleted meanwhile, and Unreachable where bits have changed in it.
        """
        path = self.paths.chain(queue_id)
        data, now = b"", -1
        while now < version:
            try:
                if now < 0:
                    await self.session.sync(path)
                    node = await self._whole_node(queue_id)
                    data, now = node.data, node.version
                else:
                    now = await self.session.rewrite(path, data, now, version)
                    self._wrote(queue_id, now, data)
            except BadVersion:
                now = -1
            except NoNode as error:
                raise UnknownQueue(f"the queue with id {queue_id} was deleted", queue_id=queue_id) from error

    async def is_gone(self, queue_id: QueueId) -> bool:
        """Whether the queue is marked as deleted, or cleared away already."""
        try:
            document, _ = await self.read_chain(queue_id)
        except UnknownQueue:
            return True
        return document.is_deleted

    async def free_name(self, name: str, queue_id: QueueId) -> None:
        """The name of a deleted queue may be given to another one. What isn't understood there is left.

        A ZooKeeper server that is behind would show this one's node still, where another queue has one by now, with the same version. And this
        process may stand still behind its look: so names go one after the other, each by the version of what they lie in.
        """
        path, names = self.paths.name(name), self.paths.names
        async with self._freeing:
            with contextlib.suppress(NoNode, NotUnderstood):
                while True:
                    await self.catch_up()
                    _, removals = await self.session.get(names)
                    found, version = await read_as(queue_id_from, self.session, path)
                    if found != queue_id:
                        return
                    with contextlib.suppress(BadVersion):
                        await self.session.delete(path, version, (names, removals))
                        return

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
            await self._sweep_readers(queue_id, set)
            for path in (paths.all_readers(queue_id), paths.senders(queue_id), paths.seals(queue_id), queue):
                with contextlib.suppress(NoNode):
                    await self.session.delete(path)
        except NotEmpty:
            return False
        return True

    async def sweep_readers(self, document: ChainDocument) -> None:
        """Delete where readers of subscriptions that are gone stood for election; where one still does, it is left."""
        await self._sweep_readers(document.queue_id, document.deleted_of)

    async def sweep_seals(self, document: ChainDocument) -> None:
        """Delete what members wrote beside the chain (protocol.md 5.4) of links that it doesn't hold any more."""
        seals = self.paths.seals(document.queue_id)
        with contextlib.suppress(NoNode):
            for name in await self.session.children(seals):
                epoch = name.partition("-")[0]
                if epoch.isdecimal() and int(epoch) < document.dropped.epoch:
                    await self.session.delete(f"{seals}/{name}")

    async def _sweep_readers(
        self, queue_id: QueueId, gone_of: Callable[[Collection[SubscriptionId]], set[SubscriptionId]]
    ) -> None:
        with contextlib.suppress(NoNode):
            names = await self.session.children(self.paths.all_readers(queue_id))
            for subscription_id in gone_of([SubscriptionId(int(name)) for name in names if name.isdecimal()]):
                with contextlib.suppress(NoNode, NotEmpty):
                    await self.session.delete(self.paths.readers(queue_id, subscription_id))

    # ---- elections, seals

    async def first_in_line(self, queue_id: QueueId, subscription_id: SubscriptionId | None) -> str:
        """The election node of the elected sender, or reader; empty where nobody stands."""
        return (await self.first_in_lines(queue_id, [subscription_id]))[0]

    async def first_in_lines(self, queue_id: QueueId, lines: Sequence[SubscriptionId | None]) -> list[str]:
        """As `first_in_line`, of each of these; None: the senders' line. A queue may have hundreds, and one `sync` is enough for all."""
        await self.catch_up()
        return [first for _, first in await side_by_side(lines, lambda line: self._first_seen(queue_id, line))]

    async def _first_seen(self, queue_id: QueueId, subscription_id: SubscriptionId | None) -> str:
        paths = self.paths
        path = paths.senders(queue_id) if subscription_id is None else paths.readers(queue_id, subscription_id)
        try:
            return first_in_line(await self.session.children(path)) or ""
        except NoNode:
            return ""

    async def kept_seals(self, queue_id: QueueId, epoch: Epoch) -> dict[str, SealAnswer]:
        """Seal answers that members wrote beside the chain, by place (protocol.md 5.4)."""
        answers = {}
        for place in MEMBERS:
            with contextlib.suppress(NoNode, DecodeError):
                data, _ = await self.session.get(self.paths.seal(queue_id, epoch, place))
                answers[place] = messages.seal_answer_from(pb.SealReply.FromString(bytes(without_checksum(data))))
        return answers

    # ---- groups and coordinators

    async def set_draining(self, group: str, *, is_draining: bool) -> None:
        """Mark a group as drained by an operator, or no longer. Raises UnknownGroup."""
        try:
            await self.session.set(self.paths.group(group), json.dumps({"is_draining": is_draining}).encode())
        except NoNode as error:
            raise unknown_group(group) from error

    async def standing_aside(self, member: MemberName) -> str:
        """Why a member whose process is there isn't registered, as it says; empty where it says nothing."""
        try:
            said, _ = await self.session.get(self.paths.lease(member.group, member.member))
        except NoNode:
            return ""
        return said.decode(errors="replace")

    async def knows_all_groups(self) -> bool:
        """Whether every group that there is now is in the registry."""
        await self.session.sync(self.paths.groups)
        return self.registry.groups.keys() >= set(await self.listed(self.paths.groups))

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
        found = {one.address: one.outside for one in self.registry.registered.values()}
        found |= {one.address: one.outside for one in (await self._registered_coordinators()).values()}
        return {inside: outside for inside, outside in found.items() if outside}

    async def _registered_coordinators(self) -> dict[str, CoordinatorRegistration]:
        return await read_coordinators(self.session, self.paths, await self.listed(self.paths.coordinators))

    async def elected_coordinator(self) -> str:
        """The election node of the coordinator that does the background work; empty where there is none."""
        return first_in_line(await self.listed(self.paths.coordinator_election)) or ""
