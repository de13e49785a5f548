"""What a member is, apart from its sockets: its links, its disk, its lease, and who its peer is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from seriatim.broker_group.batch_cache import BatchCache
from seriatim.broker_group.core import disk, setback
from seriatim.broker_group.core.disk import Room
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.core.replica import SealPhase
from seriatim.broker_group.core.setback import KeptChain, SeenChain
from seriatim.broker_group.link_runner import Flight, LinkRunner, no_longer_kept
from seriatim.broker_group.peer import Peer
from seriatim.broker_group.store import Store
from seriatim.broker_group.uninterrupted import Lock, uninterrupted
from seriatim.protocol import chain_json, log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.chain import Durability
from seriatim.protocol.errors import (
    BadChecksum,
    ChainSetBack,
    DiskFailed,
    InvalidArgument,
    UnknownLink,
    WrongCluster,
    WrongIncarnation,
)
from seriatim.protocol.flag import is_set_within
from seriatim.protocol.incarnations import as_message, from_message
from seriatim.protocol.lease import Lease
from seriatim.protocol.names import Epoch, Incarnation, Index, MemberName, QueueId

_log = log.logger("broker")

CACHE_BYTES = 64 * 1024 * 1024
MOST_READ_AGAIN = 100
"""Damaged batches, in a pass of the resync: a lost file has thousands."""
EVERY_EPOCH = Epoch(1 << 64)
"""Beyond all links that a queue can have."""
DELETED = 10_000
"""So many deleted queues are remembered, the last ones: a call that was under way when one went ends long before so many others go."""


class Unread(NamedTuple):
    """A read of batches that failed, apart from link and start."""

    end: Index
    limit_bytes: int
    why: str


class Broker:
    """One member. `resync_wanted` is set when something may be missing here.

    `lacking`: what surely is, by queue, as it is told; `found`: what of it was found since the present pass of the resync began. `doubt`:
    why it isn't known what is. With none of it the member is in sync. `is_registration_old` is set whenever the member may have
    something else to say of itself.

    `opened` is told of each link that is new here. `maybe_drained`: links whose end or cursors have changed since somebody
    looked whether they are read to their end; `drained_wanted` is set when one comes to it. `has_compared`: the disk with the
    chains, since ZooKeeper was connected last; `disconnections`: how often it was lost. `set_back`: queues of which the disk knows
    more than their chains (`core.setback`). `unknown_chains`: queues of whose chains the disk has a copy, and ZooKeeper nothing, by
    name; `unknown_before`: those when the last pass of the resync ended, since the next one that ends tells what is lacking of them.
    `unread_chains`: queues whose chains aren't understood, damaged or a newer version's, and why: what is lacking of those isn't
    known. `known_to_peer`: queues of which only the other member knows more than their chains, so that nobody can tell what is
    lacking of them here. `damaged`: batches that are to be mended from the peer. `unreadable`: where a read met what can't be read, and can't be
    mended here.
    """

    def __init__(self, cluster: str, name: MemberName, store: Store, peer: Peer, reserve_bytes: int) -> None:
        self.cluster = cluster
        self.name = name
        self.store = store
        self.peer = peer
        self.cache = BatchCache(CACHE_BYTES)
        self._flight = Flight()
        self.lease = Lease(0)
        self.room = disk.seen(Room(reserve_bytes), store.free_bytes())
        self.resync_wanted = asyncio.Event()
        self.drained_wanted = asyncio.Event()
        self.is_registration_old = asyncio.Event()
        self.doubt = "not compared with the chain yet"
        self.lacking: dict[QueueId, str] = {}
        self.found: dict[QueueId, str] = {}
        self.maybe_drained: set[LinkKey] = set()
        self.damaged: set[tuple[LinkKey, Index]] = set(store.lost())
        self.unreadable: dict[tuple[LinkKey, Index], Unread] = {}
        self.has_compared = False
        self.disconnections = 0
        self.set_back: dict[QueueId, str] = {}
        self.unknown_chains: dict[QueueId, str] = {}
        self.unread_chains: dict[QueueId, str] = {}
        self.unknown_before: frozenset[QueueId] = frozenset()
        self.known_to_peer: frozenset[QueueId] = frozenset()
        self.opened: Callable[[LinkKey], None] = lambda _: None
        self._links: dict[LinkKey, LinkRecord | LinkRunner] = {}
        self._epochs: dict[QueueId, set[Epoch]] = {}
        self._first_kept: dict[QueueId, Epoch] = {}
        self._deleted: deque[QueueId] = deque()
        self._leaving: set[LinkKey] = set()  # forgotten here; the disk may still have them
        for record in store.links():
            self._add(record.key, record)
            self.maybe_drained.add(record.key)
        self._kept_chains = {
            one: KeptChain.of(chain_json.decode(data), version) for one, version, data in store.chains()
        }
        # As long as somebody waits: a call may come when the link was let go, and be given up, or ended, at any moment.
        self._locks: WeakValueDictionary[LinkKey, Lock] = WeakValueDictionary()
        self._opening: WeakValueDictionary[LinkKey, asyncio.Event] = WeakValueDictionary()
        self.under_way: set[asyncio.Task[Any]] = set()

    @property
    def incarnation(self) -> Incarnation:
        return self.store.incarnation

    @property
    def problem(self) -> str:
        """Why it isn't in sync, for people; empty where it is."""
        return self.doubt or next(iter(self.lacking.values()), "")

    def found_lacking(self, queue_id: QueueId, problem: str) -> None:
        """Said at once, not only when the next pass ends: nobody may take this member for one in sync with that queue meanwhile."""
        self.lacking[queue_id] = self.found[queue_id] = problem
        self.is_registration_old.set()

    # ---- links

    def links(self) -> list[LinkRecord]:
        return [_written(link) for link in self._links.values()]

    def links_of(self, queue_id: QueueId) -> list[LinkRecord]:
        """The links of one queue, in the order of the chain."""
        return [_written(self._links[queue_id, epoch]) for epoch in sorted(self._epochs.get(queue_id, ()))]

    def unsealed(self) -> list[LinkRecord]:
        """The links that were opened here, in whatever start of the process, and whose seal isn't on the disk."""
        found = (_written(link) for link in self._links.values() if not _has_seal_on_disk(link))
        return [record for record in found if record.opened_start != 0]

    def _add(self, key: LinkKey, link: LinkRecord | LinkRunner) -> None:
        self._links[key] = link
        self._epochs.setdefault(key[0], set()).add(key[1])

    def is_sealed(self, key: LinkKey) -> bool:
        """Whether the link takes no more records here; nothing is loaded for the answer."""
        record = self.record(key)
        return record is not None and record.is_sealed

    def record(self, key: LinkKey) -> LinkRecord | None:
        """What is written of the link; nothing is loaded for the answer."""
        link = self._links.get(key)
        return None if link is None else _written(link)

    def extent(self, key: LinkKey) -> tuple[Index, Index] | None:
        """Where the records end that this member has of a link, and up to where readers may have them; None: it doesn't know it.

        A link that ended isn't loaded for the answer. Raises DiskFailed.
        """
        link = self._links.get(key)
        if isinstance(link, LinkRecord) and link.end is not None:
            next_index = self.store.last_position(key).position.index
            return next_index, Index(min(link.end, next_index))
        runner = self.find(key)
        return None if runner is None else (runner.state.durable, runner.readable_end)

    def find(self, key: LinkKey) -> LinkRunner | None:
        """The link, loaded from the disk when it is first asked for."""
        link = self._links.get(key)
        if isinstance(link, LinkRecord):
            link = self._links[key] = self._runner(link)
        return link

    def _runner(self, record: LinkRecord) -> LinkRunner:
        return LinkRunner(record, self.store, self.cache, self._flight)

    def link(self, key: LinkKey) -> LinkRunner:
        """Raises UnknownLink."""
        runner = self.find(key)
        if runner is None:
            raise UnknownLink("this member doesn't have this link", queue_id=key[0], epoch=key[1])
        return runner

    def check_kept(self, key: LinkKey) -> None:
        """Raises UnknownLink for a link that was let go: its seal went with it, so it is never made again (H11).

        A call that was under way for so long must not open it for records, nor leave anything that nobody would remove. A
        process that starts anew remembers nothing of this, and is another incarnation than such a call names.
        """
        if key[1] < self._first_kept.get(key[0], 0):
            raise no_longer_kept(key)

    def made(self, record: LinkRecord) -> LinkRunner:
        """The link, made where this member never heard of it; nothing of it is on disk yet. Raises UnknownLink."""
        runner = self.find(record.key)
        if runner is None:
            self.check_kept(record.key)
            runner = self._runner(record)
            self._add(record.key, runner)
        return runner

    @uninterrupted
    async def known(self, record: LinkRecord) -> LinkRunner:
        """The link; where this member never heard of it, with this record, on disk first. Raises UnknownLink.

        Under the link's lock: an OpenLink whose record is still being written is not to be written over.
        """
        async with self.lock(record.key):
            runner = self.find(record.key)
            if runner is None:
                runner = await self.introduced(record)
                self.opened(record.key)
            return runner

    async def introduced(self, record: LinkRecord) -> LinkRunner:
        """A link that this member never heard of, on disk first; the caller has its lock. Raises UnknownLink."""
        self.check_kept(record.key)
        await self.store.keep_link(record)
        try:
            return self.made(record)
        except UnknownLink:
            await self.store.drop(record.key)  # let go meanwhile, by who saw nothing of it to remove
            raise

    async def keep(self, runner: LinkRunner, record: LinkRecord) -> None:
        """Change a link's record, on disk first. Raises UnknownLink for one that was let go."""
        self.check_kept(record.key)
        await self.store.keep_link(record)
        runner.changed_record(record)

    def lets_go(self, queue_id: QueueId, below: Epoch) -> None:
        """Links of the queue before this epoch are kept no longer, and not made again; `drop` forgets each."""
        before = self._first_kept.get(queue_id, Epoch(0))
        self._first_kept[queue_id] = max(below, before)
        if before < below == EVERY_EPOCH:
            self._deleted.append(queue_id)
            if len(self._deleted) > DELETED:
                self._first_kept.pop(self._deleted.popleft(), None)

    def to_drop(self, queue_id: QueueId, below: Epoch) -> list[LinkKey]:
        """Links of the queue before this epoch, and those that somebody began to drop who gave up, or met a disk that failed."""
        known = {record.key for record in self.links_of(queue_id)} | self._leaving
        return sorted(key for key in known if key[0] == queue_id and key[1] < below)

    async def drop(self, key: LinkKey) -> None:
        """Forget a link for good, the earlier ones before it. Raises DiskFailed."""
        self.lets_go(key[0], Epoch(key[1] + 1))
        link = self._links.pop(key, None)
        self.maybe_drained.discard(key)
        self._forget_damage(key, Index(0))
        epochs = self._epochs.get(key[0], set())
        epochs.discard(key[1])
        if not epochs:
            self._epochs.pop(key[0], None)
        self.cache.forget(key)
        if isinstance(link, LinkRunner):
            link.apply_drop()
        if link is not None or key in self._leaving:
            self._leaving.add(key)
            await self.store.drop(key)
            self._leaving.discard(key)
            _log.info("link dropped", queue_id=key[0], epoch=key[1])

    # ---- chains

    @property
    def kept_chains(self) -> dict[QueueId, KeptChain]:
        """The copies of chains that this disk has now."""
        return dict(self._kept_chains)

    def _queue(self, queue_id: QueueId) -> str:
        copy = self._kept_chains.get(queue_id)
        return f"queue {queue_id if copy is None else copy.queue}"

    def told(self, key: LinkKey) -> str:
        """A link for people; its queue by name, as they know it, where a copy of its chain is here."""
        return f"{self._queue(key[0])} epoch {key[1]}"

    def set_back_problem(self, queue_id: QueueId) -> str:
        """For people; of a queue in `set_back`."""
        what = self.set_back[queue_id]
        return f"{self._queue(queue_id)}: ZooKeeper was set back, its chain is older than this disk: {what}"

    def kept_version(self, queue_id: QueueId) -> int:
        """Of the copy of this queue's chain; -1: there is none."""
        copy = self._kept_chains.get(queue_id)
        return -1 if copy is None else copy.version

    async def saw_chain(self, seen: SeenChain) -> None:
        """Keep a copy of a chain that is newer than the one here, if there is one, for when ZooKeeper loses it. Raises DiskFailed.

        Of a queue that nobody sent to there is nothing to keep, and of a deleted one nothing more. Another queue of its id ends nothing.
        """
        document, queue_id = seen.document, seen.document.queue_id
        if self.is_another(queue_id, document.name, document.created_at_ms):
            return
        if document.is_deleted:
            self.lets_go(queue_id, EVERY_EPOCH)
            await self.forget_chain(queue_id)
        elif (
            document.next_epoch > 1
            and (queue_id not in self._kept_chains or seen.version > self._kept_chains[queue_id].version)
            and queue_id not in self.set_back
            and document.next_epoch >= self._first_kept.get(queue_id, 0)  # else it was deleted since it was read
            and self.room.has_room
        ):
            self._kept_chains[queue_id] = KeptChain.of(document, seen.version)
            self.store.put_chain(queue_id, seen.version, seen.data)

    async def forget_chain(self, queue_id: QueueId) -> None:
        """The queue is deleted. Raises DiskFailed."""
        if queue_id in self._kept_chains:
            await self.store.forget_chain(queue_id)
            self._kept_chains.pop(queue_id, None)

    def is_another(self, queue_id: QueueId, queue: str, created_at_ms: int = 0) -> bool:
        """Whether what is here of this id is another queue's than this one, which is said then. `queue` empty: it isn't told."""
        copy = self._kept_chains.get(queue_id)
        records = self.links_of(queue_id) if copy is None else ()
        what = setback.another_queue(queue, created_at_ms, copy, records) if queue else ""
        if what:
            self.found_set_back(queue_id, what)
        return bool(what)

    def found_set_back(self, queue_id: QueueId, what: str) -> ChainSetBack:
        """The error of whoever goes by a chain that is older than this disk, which is said from now on."""
        if self.set_back.get(queue_id) != what:
            self.set_back[queue_id] = what
            self.found_lacking(queue_id, self.set_back_problem(queue_id))
            _log.error("ZooKeeper was set back", queue_id=queue_id, what=what)
        return ChainSetBack(self.set_back_problem(queue_id), queue_id=queue_id)

    def check_not_set_back(self, queue_id: QueueId) -> None:
        """Raises ChainSetBack."""
        if queue_id in self.set_back:
            raise self.found_set_back(queue_id, self.set_back[queue_id])

    def lock(self, key: LinkKey) -> Lock:
        """Serialises what changes a link's record or cursors beside the replica's steps."""
        return self._locks.setdefault(key, Lock())

    async def batches(self, key: LinkKey, from_index: Index, end: Index, limit_bytes: int) -> list[EncodedBatch]:
        """As the store's, beside the loop, and with damage noted. Raises BadChecksum, DiskFailed."""
        loop, read = asyncio.get_running_loop(), self.store.batches
        try:
            reading = loop.run_in_executor(None, read, key, from_index, end, limit_bytes)
        except (OSError, RuntimeError) as error:  # OSError: the first of all imports what makes threads
            raise DiskFailed(f"no thread can be had now to read with: {error}", epoch=key[1]) from error
        try:
            return await reading
        except BadChecksum as error:
            self.note_damage(key, Index(int(str(error.details.get("index", from_index)))))
            raise
        except DiskFailed as error:
            self._note_unreadable(key, from_index, Unread(end, limit_bytes, error.message))
            raise

    def _note_unreadable(self, key: LinkKey, index: Index, unread: Unread) -> None:
        """What lies in a damaged table of RocksDB's can't be mended batch by batch: it trusts no table that it can't read."""
        if key in self._links and self.unreadable.get((key, index)) != unread:
            self.unreadable[key, index] = unread
            self.found_lacking(key[0], self._unreadable_problem(key[0]))

    @property
    def unreadable_problems(self) -> dict[QueueId, str]:
        """For people, by queue, the one that was met first before the others."""
        met = dict.fromkeys(key[0] for key, _ in self.unreadable)
        return {queue_id: self._unreadable_problem(queue_id) for queue_id in met}

    def _unreadable_problem(self, queue_id: QueueId) -> str:
        """The first of a queue that has one: of a damaged table they are as many as its batches, and each is met by itself."""
        return next(f"{self.told(key)}: {one.why}" for (key, _), one in self.unreadable.items() if key[0] == queue_id)

    async def read_again(self) -> None:
        """What couldn't be read is asked of the disk once more: a failure that passes, as where no file could be opened, is none."""
        for (key, index), unread in list(self.unreadable.items()):
            with contextlib.suppress(BadChecksum, DiskFailed):  # noted by who met it
                await self.batches(key, index, unread.end, unread.limit_bytes)
                self.unreadable.pop((key, index), None)
        for key, index in sorted(self.damaged)[:MOST_READ_AGAIN]:
            with contextlib.suppress(BadChecksum, DiskFailed, UnknownLink):
                (found,) = await self.batches(key, index, Index(index + 1), 1)
                if self.link(key).is_here(found, index):
                    self.damaged.discard((key, index))
                    _log.info("damaged batch can be read again", queue_id=key[0], epoch=key[1], index=index)

    def note_damage(self, key: LinkKey, index: Index) -> None:
        """The batch that starts there can't be read: readers go to the peer, and it is mended from there."""
        runner = self.find(key)
        if runner is None or index >= runner.state.durable or (key, index) in self.damaged:
            return  # dropped, or cut, while it was read; or a reader tries again, whose only other member is away
        _log.error("damaged batch", queue_id=key[0], epoch=key[1], index=index)
        self.damaged.add((key, index))
        self.found_lacking(key[0], f"{self.told(key)}: the batch at index {index} is damaged")
        self.resync_wanted.set()

    def _forget_damage(self, key: LinkKey, from_index: Index) -> None:
        """What was damaged from there on isn't kept any more."""
        known = itertools.chain(self.damaged, self.unreadable)
        gone = {one for one in known if one[0] == key and one[1] >= from_index}
        self.damaged -= gone
        for one in gone:
            self.unreadable.pop(one, None)

    def is_damaged(self, key: LinkKey) -> bool:
        """Whether something of the link can't be read here, as far as is known."""
        return any(found == key for found, _ in itertools.chain(self.damaged, self.unreadable))

    async def cut(self, runner: LinkRunner, record: LinkRecord, end: Index) -> None:
        """Forget what a link has from `end` on, and keep this record of it. Raises DiskFailed, UnknownLink for one that was let go."""
        self.check_kept(runner.key)
        await self.store.cut(record, end)
        self._forget_damage(runner.key, end)
        runner.reload(record)

    def look_for_drained(self, key: LinkKey) -> None:
        """A subscription may have read this link to its end: it is looked at, and reported."""
        if key in self._links:
            self.maybe_drained.add(key)
            self.drained_wanted.set()

    # ---- names

    def check_cluster(self, cluster: str) -> None:
        if cluster != self.cluster:
            raise WrongCluster(f"this is a broker of cluster {self.cluster!r}, not of {cluster!r}")

    def check_addressed(self, cluster: str, to: pb.Incarnation) -> None:
        """Raises WrongCluster, and WrongIncarnation where another process is meant (H25)."""
        self.check_cluster(cluster)
        meant = from_message(to)
        if meant != self.incarnation:
            raise WrongIncarnation(f"this is {self.incarnation}, not {meant}", incarnation=str(self.incarnation))

    def link_name(self, key: LinkKey, to: Incarnation) -> pb.LinkName:
        """The name of a link in a request to the other member."""
        return pb.LinkName(cluster=self.cluster, queue_id=key[0], epoch=key[1], to=as_message(to))

    def check_name(self, name: pb.LinkName) -> LinkKey:
        """The link that a request names. Raises WrongCluster, and WrongIncarnation where another process is meant (H25)."""
        self.check_addressed(name.cluster, name.to)
        return QueueId(name.queue_id), Epoch(name.epoch)

    def side_of(self, member: pb.LinkMember) -> bool:
        return (member.group, member.member) == (self.name.group, self.name.member)

    # ---- opening

    def opens(self, record: LinkRecord) -> LinkRunner:
        """The link takes records here from now on; its record is on the way to the disk, in front of all that it may take (`LinkRunner.kept`)."""
        runner = self.made(record)
        runner.changed_record(record)
        runner.keep(record)
        self.opened(record.key)
        if (opening := self._opening.get(record.key)) is not None:
            opening.set()
        return runner

    async def until_opened(self, key: LinkKey, timeout_s: float) -> LinkRunner:
        """The link, once it takes records here: its master may be told of it a moment sooner. Raises UnknownLink."""
        runner = self.find(key)
        if runner is None or not (runner.record.opened_start or runner.record.is_sealed):
            opened = self._opening.setdefault(key, asyncio.Event())
            await is_set_within(opened, timeout_s)
        return self.link(key)


def durability_from(name: str) -> Durability:
    """As a message says it. Raises InvalidArgument."""
    try:
        return Durability(name)
    except ValueError as error:
        raise InvalidArgument(f"unknown durability {name!r}") from error


def _has_seal_on_disk(link: LinkRecord | LinkRunner) -> bool:
    """Whether it is there: a runner's record says so as soon as the seal is on its way."""
    return link.is_sealed if isinstance(link, LinkRecord) else link.state.phase is SealPhase.SEALED


def _written(link: LinkRecord | LinkRunner) -> LinkRecord:
    return link.record if isinstance(link, LinkRunner) else link
