"""Brings this member to hold again all that it should: after a return, on a blank disk, after a cut, after damage.

It compares the disk with the chain documents, does what `core.resync` plans, and repeats that until nothing is left; then
the member is in sync. Nothing of it is remembered between passes, so it may be stopped at any step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import replace

from seriatim.broker_group import sealing
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core import disk, resync, setback
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.core.setback import KeptChain, SeenChain
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.layout import StoredPosition
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.replication import copied
from seriatim.broker_group.writer import ignored
from seriatim.protocol import chain_json, log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.chain import ChainDocument, Durability
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import (
    BadChecksum,
    DiskFailed,
    DiskFull,
    IncompatibleVersion,
    MemberBehind,
    SeriatimError,
    Unreachable,
)
from seriatim.protocol.flag import is_set_within
from seriatim.protocol.names import ChainVersion, Index, QueueId
from seriatim.protocol.nodes import Paths, queue_ids, read_chain_node
from seriatim.protocol.zookeeper import NoNode, ZooKeeperSession

_log = log.logger("broker.resync")

UNFLUSHED_BYTES = 4 * 1024 * 1024
DESCRIBE_TIMEOUT_S = 1.0
BUSY_S = 0.3
IDLE_S = 30.0
SETTLE_S = 0.05
"""A pass begins so much after its cause: what tells a member to look is often a death, and a switch follows."""
REST_S = 5.0
"""After each pass this member rests as long as the pass took, and no longer than this: it looks at all queues."""
AT_ONCE = 16
"""So many queues, or links, are looked at before somebody else has a turn: a switch may wait for this member."""


class Resyncer:
    """See the module."""

    def __init__(self, broker: Broker, keeper: CursorKeeper, session: ZooKeeperSession, paths: Paths) -> None:
        self._broker = broker
        self._keeper = keeper
        self._session = session
        self._paths = paths
        self._waiting: dict[QueueId, list[str]] = {}  # what the last pass couldn't do

    async def run(self) -> None:
        """Passes, one after the other, as long as the process lives."""
        broker, wanted = self._broker, self._broker.resync_wanted
        while True:
            await asyncio.sleep(SETTLE_S)
            wanted.clear()
            broker.found = {}
            began_s = boottime_s()
            told = broker.doubt, broker.lacking
            try:
                left = await self._pass()
                broker.doubt, broker.lacking = "", {**broker.found, **left}
            except SeriatimError as error:
                broker.doubt = str(error)
            if (broker.doubt, broker.lacking) != told:
                problem = broker.problem
                _log.info("in sync" if not problem else "not in sync", problem=problem or None)
                broker.is_registration_old.set()
            await asyncio.sleep(min(boottime_s() - began_s, REST_S))
            await is_set_within(wanted, self._pause_s())

    def _pause_s(self) -> float:
        """How long nothing is done unasked. A peer that isn't there can't be brought up, and when it comes that asks for a pass."""
        can_bring_up = self._keeper.has_noted and self._broker.peer.connected is not None
        if self._broker.problem or can_bring_up:
            return BUSY_S
        # Where an operator recovers such a queue something waits until this member has looked again.
        return REST_S if self._broker.unknown_chains or self._broker.unread_chains else IDLE_S

    async def _pass(self) -> dict[QueueId, str]:
        """Do what is planned. Returns what is still missing, by queue."""
        held, kept = await self._held(), self._broker.kept_chains
        known_to_peer = self._broker.peer.set_back  # older than the chains: what it says no more, they have
        chains, unread = await self._chains()
        self._found_unread(self._broker.unread_chains | unread)
        self._compare(chains, unread, held, kept)
        for seen in chains.values():
            await self._broker.saw_chain(seen)
        documents = {
            queue_id: seen.document for queue_id, seen in chains.items() if queue_id not in self._broker.set_back
        }
        await self._carry_out(resync.plan(self._broker.name, documents, await self._held()), chains)
        await self._broker.read_again()
        damaged = await self._mend_all()
        await self._keeper.forget_deleted(documents)
        refused = await self._bring_up_peer(documents)
        held = await self._held()
        left = resync.plan(self._broker.name, documents, held)
        self._found_unread(unread)  # only now: what lacks of one that is understood again is told with it, below
        self._found_known_to_members(known_to_peer)
        steps = Counter(action.queue_id for action in left)
        problems: dict[QueueId, str] = {}
        for found in (
            {queue_id: self._broker.set_back_problem(queue_id) for queue_id in self._broker.set_back},
            {queue_id: told[-1] for queue_id, told in self._waiting.items()},
            damaged,
            {queue_id: str(error) for queue_id, error in refused.items()},
            self._broker.unreadable_problems,
            {queue_id: f"{number} steps left" for queue_id, number in steps.items()},
            resync.unfinished(self._broker.name, self._broker.incarnation, documents, held, self._broker.told),
        ):
            problems |= {queue_id: told for queue_id, told in found.items() if queue_id not in problems}
        return problems

    async def _carry_out(self, actions: Iterable[resync.Action], chains: Mapping[QueueId, SeenChain]) -> None:
        """Each once; what one of them waits for keeps none of the others."""
        told, self._waiting = {one for some in self._waiting.values() for one in some}, {}
        for action in actions:
            try:
                await self._do(action, chains[action.queue_id].version)
            except SeriatimError as error:
                problem = (
                    f"{self._broker.told((action.queue_id, action.epoch))}: {type(action).__name__.lower()}: {error}"
                )
                if isinstance(action, resync.TakeCursors) and isinstance(error, MemberBehind):
                    problem += f"; unless it soon has them, seek {', '.join(action.of)}"
                self._waiting.setdefault(action.queue_id, []).append(problem)
                if problem not in told:
                    _log.warning("resync waits", queue_id=action.queue_id, epoch=action.epoch, reason=problem)

    async def _mend_all(self) -> dict[QueueId, str]:
        """All that is damaged. Returns what the first one of each queue waits for that can't be mended now."""
        problems: dict[QueueId, str] = {}
        for key, index in sorted(self._broker.damaged):
            try:
                await self._mend(key, index)
            except SeriatimError as error:  # the others, and the peer, need not wait for this one
                problems.setdefault(key[0], f"{self._broker.told(key)}: mend index {index}: {error}")
                if isinstance(error, (Unreachable, DiskFull)):
                    # For all the others, too; of a lost file they are as many as its batches.
                    for left, at in sorted(self._broker.damaged):
                        problems.setdefault(left[0], f"{self._broker.told(left)}: mend index {at}: {error}")
                    break
        return problems

    def _compare(
        self,
        chains: Mapping[QueueId, SeenChain],
        unread: Collection[QueueId],
        held: list[resync.Holding],
        kept: Mapping[QueueId, KeptChain],
    ) -> None:
        """What this disk knows that its queues' chains don't is said at once. `held` and `kept` are older than `chains`."""
        broker = self._broker
        found = setback.queues(broker.name, broker.incarnation.disk_id, chains, held, kept)
        for queue_id in [one for one in broker.set_back if one not in found and one not in unread]:
            del broker.set_back[queue_id]
            self._keeper.report_anew(queue_id)
        for queue_id, what in found.items():
            broker.found_set_back(queue_id, what)
        # One that was kept and isn't now was deleted meanwhile.
        known = chains.keys() | unread
        unknown = {one: copy.queue for one, copy in kept.items() if one not in known and one in broker.kept_chains}
        if not broker.has_compared or unknown != broker.unknown_chains:
            for queue_id in broker.unknown_chains.keys() - unknown.keys():
                self._keeper.report_anew(queue_id)
            broker.has_compared, broker.unknown_chains = True, unknown
            broker.is_registration_old.set()
            if unknown:
                broker.resync_wanted.set()  # another pass asks to be told when one of them is made again

    async def _chains(self) -> tuple[dict[QueueId, SeenChain], dict[QueueId, str]]:
        """All there are, and why some aren't understood.

        Raises Unreachable where they were read on two connections: between those ZooKeeper may have been set back.
        """
        disconnections = self._broker.disconnections
        try:
            # Not what a server that is cut off still shows: who says in sync by it may lack the link that was just sealed.
            await self._session.sync(self._paths.queues)
            recovered = self._broker.resync_wanted.set if self._broker.unknown_chains else None
            names = await self._session.children(self._paths.queues, recovered)
        except NoNode:
            return {}, {}
        there = queue_ids(names)
        found: dict[QueueId, SeenChain | str | None] = {}
        for start in range(0, len(there), AT_ONCE):
            some = there[start : start + AT_ONCE]
            began_s = boottime_s()
            found |= zip(some, await asyncio.gather(*map(self._chain, some)), strict=True)
            if start:
                await asyncio.sleep(min(boottime_s() - began_s, SETTLE_S))  # ZooKeeper, too, has others to serve
        if self._broker.disconnections != disconnections:
            raise Unreachable("ZooKeeper's connection was lost while chains were read")
        unread = {queue_id: seen for queue_id, seen in found.items() if isinstance(seen, str)}
        # One that isn't there is being made, or being removed: nothing is decided about it here.
        return {queue_id: seen for queue_id, seen in found.items() if isinstance(seen, SeenChain)}, unread

    def _found_unread(self, unread: dict[QueueId, str]) -> None:
        """Of these queues nobody may take this member for one in sync: it can't tell what it lacks of them. It can of all others."""
        broker = self._broker
        for queue_id in unread.keys() - broker.unread_chains.keys():
            _log.warning("chain not understood", queue_id=queue_id, reason=unread[queue_id])
        if unread != broker.unread_chains:
            broker.unread_chains = unread
            broker.is_registration_old.set()

    def _found_known_to_members(self, known_to_peer: Iterable[QueueId]) -> None:
        """As of unread ones: on a blank disk nothing shows that a queue was lost, nor what was here of it. And which are lost by now."""
        broker = self._broker
        known = frozenset(known_to_peer) - broker.set_back.keys() - broker.unknown_chains.keys()
        unknown = frozenset(broker.unknown_chains)
        if (known, unknown) != (broker.known_to_peer, broker.unknown_before):
            broker.known_to_peer, broker.unknown_before = known, unknown
            broker.is_registration_old.set()

    async def _chain(self, queue_id: QueueId) -> SeenChain | str | None:
        """None: there is none. Text: why nobody here understands what there is."""
        try:
            path, known = self._paths.chain(queue_id), self._broker.kept_version(queue_id)
            node = await read_chain_node(self._session, path, known=known)
        except NoNode:
            return None
        try:
            return SeenChain(chain_json.decode(node.data), ChainVersion(node.version), node.data)
        except IncompatibleVersion as error:
            return str(error)

    async def _version(self, queue_id: QueueId) -> int:
        """Of the queue's chain. Raises MemberBehind for a queue that is being removed."""
        try:
            return await self._session.version(self._paths.chain(queue_id))
        except NoNode as error:
            raise MemberBehind(f"there is no queue with id {queue_id}", queue_id=queue_id) from error

    async def _held(self) -> list[resync.Holding]:
        """What the disk has of every link, at one moment."""
        for number, record in enumerate(self._broker.links(), start=1):
            self._holding(record)  # reads what isn't known yet, so that below nothing is read
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        holdings = (self._holding(record) for record in self._broker.links())
        return [one for one in holdings if one is not None]

    def _holding(self, record: LinkRecord) -> resync.Holding | None:
        """None: it was dropped meanwhile. What can't be read is said, and keeps no other link from being made whole."""
        try:
            runner = self._broker.find(record.key)
            return None if runner is None else runner.holding()
        except DiskFailed as error:
            self._broker.found[record.queue_id] = f"{self._broker.told(record.key)}: {error}"
            return resync.Holding(record, Index(0), is_readable=False)

    async def _do(self, action: resync.Action, version: ChainVersion) -> None:
        """`version`: of the chain that it was planned by."""
        key = (action.queue_id, action.epoch)
        match action:
            case resync.Drop():
                await self._broker.drop(key)
                self._keeper.forget(key)
            case resync.Adopt():
                await sealing.record_end(
                    self._broker,
                    LinkRecord(
                        *key,
                        chain_version=version,
                        end=action.end,
                        end_hash=action.end_hash,
                        is_abandoned=action.is_abandoned,
                    ),
                )
            case resync.Copy():
                await self._copy(self._broker.link(key), action.from_index, action.end)
            case resync.Lack():
                await self._keeper.lack(self._broker.link(key), action.of)
            case resync.TakeCursors():
                await self._keeper.take_from_peer(self._broker.link(key))

    # ---- copying

    def _fetch(self, runner: LinkRunner, from_index: Index, end: Index) -> AsyncIterator[EncodedBatch]:
        peer = self._broker.peer
        registered = peer.to_call()
        name = self._broker.link_name(runner.key, registered.incarnation)
        return copied(peer.stub(registered.address), name, from_index, end)

    async def _copy(self, runner: LinkRunner, from_index: Index, end: Index) -> None:
        """Take what is missing below the end. What is here is thrown away only when the peer has all of it (H5)."""
        record = runner.record
        self._check_room()
        if from_index == 0 and runner.state.durable > 0:
            await self._check_peer_has(runner, end)
            async with self._broker.lock(runner.key):
                if runner.record is not record:
                    raise MemberBehind("what is known of the link has changed meanwhile", epoch=record.epoch)
                await self._broker.cut(runner, record, Index(0))
        try:
            await self._take(runner, record, end)
        finally:
            # Also what came before it was broken off: the peer may never come back.
            await self._broker.store.flushed()
            runner.reload(runner.record)
        _log.info("link copied", queue_id=record.queue_id, epoch=record.epoch, end=end)

    async def _take(self, runner: LinkRunner, record: LinkRecord, end: Index) -> None:
        """What the peer has behind the last batch here."""
        last = self._broker.store.last_position(runner.key)
        position, size_bytes, unflushed = last.position, last.size_bytes, 0
        if end <= position.index:
            return
        async for encoded in self._fetch(runner, position.index, end):
            self._broker.check_kept(runner.key)  # let go meanwhile: nobody would remove what came after that
            self._check_room()
            if encoded.header.first_index != position.index:
                raise MemberBehind(f"the peer's copy doesn't continue at {position.index}")
            position = position.after(encoded.header, encoded.header_bytes)
            size_bytes += encoded.size_bytes
            unflushed += encoded.size_bytes
            stored = StoredPosition(position, position.index, size_bytes)
            self._broker.store.append(replace(record, durability=Durability.SYNC), encoded, stored, ignored)
            self._broker.room = disk.taken(self._broker.room, encoded.size_bytes)
            if unflushed > UNFLUSHED_BYTES:
                await self._broker.store.flushed()
                unflushed = 0

    def _check_room(self) -> None:
        """A disk that is filled to its last byte has failed: nothing can be sealed there, nor started again. Raises DiskFull."""
        if not disk.has_room_to_copy(self._broker.room):
            raise DiskFull("this member's disk has no room for what it lacks")

    async def _check_peer_has(self, runner: LinkRunner, end: Index) -> None:
        peer = self._broker.peer
        registered = peer.to_call()
        request = pb.DescribeLinkRequest(link=self._broker.link_name(runner.key, registered.incarnation))
        reply = await peer.call(registered, lambda stub: stub.DescribeLink, request, DESCRIBE_TIMEOUT_S)
        if not reply.has_end or reply.next_index != end or reply.hash != runner.record.end_hash:
            raise MemberBehind("the peer doesn't hold what the certificate names either", epoch=runner.record.epoch)

    async def _mend(self, key: LinkKey, index: Index) -> None:
        """Replace a damaged batch by the peer's, if that is what the link's hash says it must be."""
        runner = self._broker.link(key)
        behind = self._broker.store.position_behind(key, index)
        if behind is None:  # cut off meanwhile
            self._broker.damaged.discard((key, index))
            return
        end = behind.index
        self._check_room()
        async for encoded in self._fetch(runner, index, end):
            self._broker.check_kept(key)  # as in `_copy`
            if not runner.is_here(encoded, index):
                raise BadChecksum(f"the peer's batch at index {index} isn't the one that was stored here", epoch=key[1])
            self._broker.store.repair(key, encoded)
            self._broker.room = disk.taken(self._broker.room, encoded.size_bytes)
        await self._broker.store.flushed()
        self._broker.damaged.discard((key, index))
        _log.info("damaged batch mended", queue_id=key[0], epoch=key[1], index=index)

    async def _bring_up_peer(self, documents: Mapping[QueueId, ChainDocument]) -> dict[QueueId, SeriatimError]:
        name = self._broker.name
        for queue_id, document in documents.items():
            for note in document.stale_cursors:
                link = document.link(note.epoch)
                if link is not None and link.group == name.group and note.member != name.member:
                    self._keeper.found_stale((queue_id, note.epoch))
        await self._keeper.note_lost(documents)
        if self._keeper.has_noted and self._broker.peer.connected is not None:
            return await self._keeper.bring_up_peer(self._version)
        return {}
