"""What a member remembers of damage, and what the disk says of it, on a real store."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import pytest

from seriatim.broker_group import cursor_keeper, layout, opening, scrubber, sealing
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.coordinators import Coordinators
from seriatim.broker_group.core import cursors, disk, resync
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.disk import Room
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord, Role
from seriatim.broker_group.core.setback import SeenChain
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.membership import STANDS_ASIDE, Membership
from seriatim.broker_group.peer import Peer, Registered
from seriatim.broker_group.resyncer import AT_ONCE, BUSY_S, IDLE_S, REST_S, Resyncer
from seriatim.broker_group.scrubber import Scrubber
from seriatim.broker_group.service import BrokerService
from seriatim.broker_group.store import Store, open_store
from seriatim.protocol import chain_json, checksums, errors
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.chain import (
    Certificate,
    ChainDocument,
    ChainMember,
    Dropped,
    Durability,
    Link,
    LinkState,
    QueueSettings,
    Subscription,
    Whose,
)
from seriatim.protocol.errors import (
    BadChecksum,
    ChainSetBack,
    DeadlineOver,
    DiskFailed,
    DiskFull,
    Fenced,
    MemberBehind,
    OlderVersion,
    PeerLost,
    SeriatimError,
    StaleCursor,
    UnknownLink,
    Unreachable,
    from_wire,
)
from seriatim.protocol.hashing import EMPTY_HASH
from seriatim.protocol.names import (
    ChainVersion,
    Epoch,
    Generation,
    Incarnation,
    Index,
    MemberName,
    Offset,
    QueueId,
    SubscriptionId,
    Token,
)
from seriatim.protocol.nodes import NotUnderstood, Paths
from seriatim.protocol.registration import CoordinatorRegistration, Registration
from seriatim.protocol.zookeeper import NodeExists, NoNode, SessionState, ZooKeeperSession
from tests.chains import without_checksum
from tests.integration.broker_members import batches
from tests.integration.test_broker_store import fill

RECORD = LinkRecord(QueueId(1), Epoch(2), is_sealed=True, end=Index(50))
OTHER = replace(RECORD, epoch=Epoch(3))

Scenario = Callable[[Broker, LinkRunner], Awaitable[None]]


def with_store(folder: Path, work: Callable[[Store], Awaitable[None]], *, segment_bytes: int) -> None:
    """What a member's process does with its disk, from opening to closing it."""

    async def opened() -> None:
        store = open_store(folder, "c/g1-a", segment_bytes=segment_bytes)
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(opened())


def broker_of(store: Store) -> Broker:
    return Broker("c", MemberName("g1", "a"), store, Peer("c", store.incarnation), 0)


@pytest.fixture
def with_links(tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario with a member that holds two links of five batches each, in segment files."""

    def run(scenario: Scenario) -> None:
        async def filled(store: Store) -> None:
            for record in (RECORD, OTHER):
                await fill(store, record, batches(5))
                await store.keep_link(record)
            broker = broker_of(store)
            await scenario(broker, broker.link(RECORD.key))

        with_store(tmp_path, filled, segment_bytes=1)

    return run


def test_damage_of_what_was_cut_or_dropped_is_forgotten(with_links: Callable[[Scenario], None]) -> None:
    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        for index in (0, 20, 40):
            broker.note_damage(RECORD.key, Index(index))
        broker.note_damage(OTHER.key, Index(30))
        await broker.cut(runner, replace(RECORD, end=Index(30)), Index(30))
        assert broker.damaged == {(RECORD.key, Index(0)), (RECORD.key, Index(20)), (OTHER.key, Index(30))}
        broker.note_damage(RECORD.key, Index(40))  # read before it was cut
        await broker.drop(RECORD.key)
        broker.note_damage(RECORD.key, Index(0))  # and before it was dropped
        assert broker.damaged == {(OTHER.key, Index(30))}

    with_links(scenario)


def test_bytes_that_the_disk_has_lost_are_damage_and_a_disk_that_fails_is_not(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(number: int) -> None:
        def pread(*_: int) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pread", pread)

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        failing(errno.EIO)
        with pytest.raises(BadChecksum, match="index 10 is damaged"):
            broker.store.batches(RECORD.key, Index(10), Index(50), 1)
        failing(errno.EBADF)
        with pytest.raises(DiskFailed):
            broker.store.batches(RECORD.key, Index(10), Index(50), 1)

    with_links(scenario)


def test_a_scrub_finds_every_damaged_batch_of_every_link_and_goes_on_behind_it(
    with_links: Callable[[Scenario], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(broker: Broker, _: LinkRunner) -> None:
        monkeypatch.setattr(scrubber, "READ_BYTES", 1)
        for record, numbers in ((RECORD, (0, 1, 4)), (OTHER, (2,))):
            path = tmp_path / "segments" / f"{record.queue_id}-{record.epoch}.segment"
            content = bytearray(path.read_bytes())
            size_bytes = len(content) // 5
            for number in numbers:
                content[number * size_bytes + size_bytes // 2] ^= 1
            path.write_bytes(content)
        running = asyncio.create_task(Scrubber(broker, 0.01).run())
        async with asyncio.timeout(60):
            while len(broker.damaged) < 4:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        running.cancel()
        found = {(RECORD.key, Index(0)), (RECORD.key, Index(10)), (RECORD.key, Index(40)), (OTHER.key, Index(20))}
        assert broker.damaged == found

    with_links(scenario)


def no_thread(*_: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


def no_directory(*_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("of", "name", "failing"),
    [(ThreadPoolExecutor, "_adjust_thread_count", no_thread), (Store, "forget_cached", no_directory)],
)
def test_a_scrub_that_can_t_begin_is_told_and_the_next_one_reads(
    with_links: Callable[[Scenario], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    of: type,
    name: str,
    failing: Callable[..., NoReturn],
) -> None:
    """It ended the whole broker."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(of, name, failing)
            await Scrubber(broker, 1)._pass()
        assert "can't be read" in caplog.text
        assert "all stored batches read" not in caplog.text
        await Scrubber(broker, 1)._pass()
        assert "all stored batches read" in caplog.text

    caplog.set_level("INFO")
    with_links(scenario)


def test_what_no_thread_is_there_to_read_can_t_be_read_now_and_is_no_damage(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the resync, and so the broker; and readers were told of a defect."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "_adjust_thread_count", no_thread)
            with pytest.raises(DiskFailed, match="can't start new thread"):
                await broker.batches(RECORD.key, Index(0), Index(50), 1)
        assert not broker.unreadable
        assert await broker.batches(RECORD.key, Index(0), Index(50), 1)

    with_links(scenario)


def test_a_table_that_can_t_be_read_is_said_as_long_as_the_link_in_it_is_kept(tmp_path: Path) -> None:
    """A flipped bit among small batches: the daily read wrote it into the log, and the member stayed in sync, and in service, for good."""
    sent = batches(5)

    async def filled(store: Store) -> None:
        await fill(store, RECORD, sent)
        await store.keep_link(RECORD)

    async def started(_: Store) -> None:
        """What was in the log is in a table now."""

    async def read(store: Store) -> None:
        broker = broker_of(store)
        resyncer, _ = resyncer_of(broker)
        broker.doubt = ""
        await Scrubber(broker, 1)._pass()
        assert "Corruption" in broker.problem
        assert "Corruption" in (await resyncer._pass())[RECORD.queue_id]
        assert broker.is_damaged(RECORD.key)  # what its seal then says
        await broker.drop(RECORD.key)
        assert not broker.is_damaged(RECORD.key)
        assert await resyncer._pass() == {}

    for life in (filled, started):
        with_store(tmp_path, life, segment_bytes=1 << 30)
    (table,) = (path for path in (tmp_path / "data").glob("*.sst") if sent[0].payload in path.read_bytes())
    damaged = bytearray(table.read_bytes())
    damaged[damaged.index(sent[0].payload) + 5] ^= 4
    table.write_bytes(damaged)
    with_store(tmp_path, read, segment_bytes=1 << 30)


def test_a_read_that_failed_once_is_no_damage(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no file could be opened any more: the link's seal was no whole answer, and the member out of sync, until it was started again."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        def failing(*_: object) -> list[EncodedBatch]:
            raise DiskFailed("the disk can't be read: too many open files")

        resyncer, _ = resyncer_of(broker)
        with monkeypatch.context() as patched:
            patched.setattr(broker.store, "batches", failing)
            with pytest.raises(DiskFailed):
                await broker.batches(runner.key, Index(0), runner.readable_end, 1)
            assert "too many open files" in str(await resyncer._pass())
            assert broker.is_damaged(runner.key)
        assert "too many open files" not in str(await resyncer._pass())
        assert not broker.is_damaged(runner.key)

    with_links(scenario)


def test_bytes_that_came_only_at_the_second_try_are_no_damage(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sector that the disk could read when it was asked again: the seal was no whole answer as long as the peer was away."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        def failing(*_: object) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        resyncer, _ = resyncer_of(broker)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", failing)
            with pytest.raises(BadChecksum):
                await broker.batches(runner.key, Index(0), runner.readable_end, 1)
            await resyncer._pass()
            assert broker.damaged == {(runner.key, Index(0))}
        with monkeypatch.context() as patched:  # another batch is in its place
            (other,) = batches(1, first_seq=77)
            patched.setattr(broker.store, "batches", lambda *_: [other])
            await resyncer._pass()
            assert broker.damaged == {(runner.key, Index(0))}
        await resyncer._pass()
        assert not broker.damaged

    with_links(scenario)


def test_a_scrub_reads_the_disk_and_not_what_the_system_remembers_of_it(
    with_links: Callable[[Scenario], None], tmp_path: Path
) -> None:
    def is_remembered(path: Path) -> bool:
        with path.open("rb") as file:
            try:
                return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                return False

    def drop(path: Path) -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    async def is_forgotten(path: Path, forget: Callable[[], None]) -> bool:
        for _ in range(100):  # what somebody holds just then is kept
            forget()
            if not is_remembered(path):
                return True
            await asyncio.sleep(0.05)
        return False

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        (path, other) = (tmp_path / "segments").iterdir()
        os.sync()
        if not await is_forgotten(other, lambda: drop(other)):
            pytest.skip("this file system is memory itself")
        path.read_bytes()
        assert is_remembered(path)
        assert await is_forgotten(path, broker.store.forget_cached)
        assert broker.store.batches(RECORD.key, Index(0), Index(50), 1)

    with_links(scenario)


@pytest.mark.parametrize("asked", ["posix_fadvise", "statvfs"])
def test_a_disk_that_can_t_answer_a_question_ends_nobody(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A network file system, or one in user space: of the first the scrubber asks, of the second whoever renews the lease."""

    def failing(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        monkeypatch.setattr(os, asked, failing)
        await Scrubber(broker, 1)._pass()
        assert (broker.store.free_bytes() == 0) is (asked == "statvfs")

    with_links(scenario)


def test_a_directory_that_is_gone_is_not_said_to_be_full(
    with_links: Callable[[Scenario], None], tmp_path: Path
) -> None:
    """Moved, or unmounted: there was no room, said its member, and who looked at the disk found plenty."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        membership = Membership(broker, cast("ZooKeeperSession", ZooKeeperWithALink()), "")
        broker.doubt = ""
        there, broker.store.directory = broker.store.directory, tmp_path / "gone"
        membership._look_at_disk()
        said = membership._registration()
        assert not said.is_accepting
        assert said.problem == f"what room {tmp_path / 'gone'} has can't be told: No such file or directory"
        broker.store.directory = there
        membership._look_at_disk()
        assert membership._registration().problem == ""

    with_links(scenario)


def test_a_disk_that_failed_is_told_also_where_nobody_waited_for_it(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is idle was in sync, with room for records, for as long as nobody sent to it."""

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        monkeypatch.setattr(os, "fdatasync", failing)
        broker.store.put_chain(RECORD.queue_id, ChainVersion(3), b"a copy")
        async with asyncio.timeout(60):
            while broker.store.failure is None:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        session = ZooKeeperWithALink()
        membership = Membership(broker, cast("ZooKeeperSession", session), "")
        broker.room = disk.seen(broker.room, broker.store.free_bytes())
        await membership._register(session.session_id)
        told = Registration.decode(session.created[-1])
        assert not told.is_in_sync
        assert not told.is_accepting
        assert told.problem == "the disk failed: [Errno 5] Input/output error"

    with_links(scenario)


def test_a_disk_that_failed_is_told_again_and_again_without_what_was_told_before(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member goes on serving, and meets it ten times a second: one error kept the frames of all tries, with the chains in them."""

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        runner = broker.made(replace(RECORD, epoch=Epoch(4), is_sealed=False, end=None))

        async def sealed() -> None:
            refused = await runner.sealed(ChainVersion(1))
            assert refused is not None
            raise refused

        monkeypatch.setattr(os, "fdatasync", failing)
        for asked in (broker.store.flushed, sealed):
            frames = []
            for _ in range(3):
                with pytest.raises(DiskFailed) as told:
                    await asked()
                frames.append(len(list(traceback.walk_tb(told.value.__traceback__))))
            assert frames == frames[:1] * 3

    with_links(scenario)


def test_a_chain_that_is_looked_at_again_and_again_is_watched_once(with_links: Callable[[Scenario], None]) -> None:
    """As where its end can't be written: kazoo keeps every watch, but for equal ones, until the chain changes."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        session = ZooKeeperWithALink()
        membership = Membership(broker, cast("ZooKeeperSession", session), "")
        runner.changed_record(replace(RECORD, end=None))
        for _ in range(2):
            await membership._look_at(RECORD.queue_id)
        (watch,) = session.watches
        membership._chains.clear()
        watch()
        assert membership._chains == {RECORD.queue_id}

    with_links(scenario)


def test_a_disk_that_was_filled_between_two_looks_at_it_is_told(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took the last batch knows that there is no room; the registration went on saying that there is, and the group was chosen again."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        session = ZooKeeperWithALink()
        membership = Membership(broker, cast("ZooKeeperSession", session), "")
        broker.doubt = ""
        broker.room = disk.seen(Room(1000), 2000)
        await membership._register(session.session_id)
        broker.room = disk.taken(broker.room, 600)
        monkeypatch.setattr(broker.store, "free_bytes", lambda: 900)
        membership._look_at_disk()
        assert broker.is_registration_old.is_set()
        await membership._register(session.session_id)
        told = [Registration.decode(one) for one in session.created]
        assert [one.is_accepting for one in told] == [True, False]
        assert told[1].problem.startswith("no room on the disk for more records: --reserve-mb keeps")
        membership._look_at_disk()
        assert not broker.is_registration_old.is_set()

    with_links(scenario)


def test_a_member_whose_disk_stands_still_is_not_registered_as_long_as_it_does(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing any more before that is seen, and seals what is open before it is there again."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        done = []

        async def seal_open_links(_: Broker) -> None:
            done.append("sealed")

        def told(what: str) -> None:
            done.append(f"{what}, lease {broker.lease.usable_until_s > 0}")

        monkeypatch.setattr(sealing, "seal_open_links", seal_open_links)
        session = ZooKeeperWithARegistration(told)
        membership = Membership(broker, cast("ZooKeeperSession", session), "")
        running = asyncio.create_task(membership.run_session())
        await asyncio.wait_for(membership.is_registered.wait(), 45)
        monkeypatch.setattr(Store, "stands_still", True)
        await asyncio.wait_for(session.is_gone.wait(), 45)
        await asyncio.sleep(0.3)
        assert not membership.is_registered.is_set()
        assert session.lease.decode() == STANDS_ASIDE
        monkeypatch.setattr(Store, "stands_still", False)
        await asyncio.wait_for(membership.is_registered.wait(), 45)
        running.cancel()
        again = ["sealed", "registered, lease False"]
        assert done == [*again, "gone, lease False", *again]
        assert session.lease == b""
        assert broker.lease.usable_until_s > 0

    with_links(scenario)


class EmptyZooKeeper:
    """No queue is there. `watch`: to be called when one is."""

    watch: Callable[[], None] | None = None

    async def sync(self, _: str) -> None:
        pass

    async def children(self, _: str, watch: Callable[[], None] | None = None) -> list[str]:
        self.watch = watch
        return []

    async def get(self, path: str = "", *_: Any) -> tuple[bytes, int]:
        raise NoNode(path)

    async def version(self, path: str) -> int:
        return (await self.get(path))[1]


class ZooKeeperWithALink(EmptyZooKeeper):
    """The chain with the first link, which is closing, and nobody comes to it. `created`: what nodes were made with."""

    session_id = 1

    def __init__(self) -> None:
        self.created: list[bytes] = []
        self.watches: set[Callable[[], None]] = set()

    def on_state(self, _: object) -> None:
        pass

    async def get(self, path: str = "", watch: Callable[[], None] | None = None) -> tuple[bytes, int]:
        if watch is not None:
            self.watches.add(watch)
        paths = Paths("c")
        if path in (paths.member("g1", "a"), paths.seal(RECORD.queue_id, RECORD.epoch, "a")):
            if not self.created:
                raise NoNode(path)
            return self.created[-1], 0
        a, b = (ChainMember(MemberName("g1", one), Incarnation(one, 1)) for one in "ab")
        link = Link(RECORD.epoch, "g1", a, b, LinkState.CLOSING, Durability.SYNC, 0, Offset(0), {}, 0)
        dropped = Dropped(Epoch(1), Offset(0), EMPTY_HASH, {}, {})
        document = ChainDocument(
            "c", RECORD.queue_id, "orders", QueueSettings(), 0, dropped, links=(link,), next_epoch=Epoch(3)
        )
        return chain_json.encode(document), 7

    async def create(self, _: str, data: bytes, **__: object) -> None:
        self.created.append(data)


class ZooKeeperWithAnotherQueue(ZooKeeperWithALink):
    """All is let go of the first queue; of another one, 9, this member has nothing of the link that ended. `state`: of that one's chain."""

    state = "lost"

    async def children(self, *_: object) -> list[str]:
        return [str(RECORD.queue_id)] if self.state == "lost" else [str(RECORD.queue_id), "9"]

    async def get(self, path: str = "", watch: Callable[[], None] | None = None) -> tuple[bytes, int]:
        data, version = await super().get(path, watch)
        if not path.endswith("chain"):
            return data, version
        document = chain_json.decode(data)
        if path == Paths("c").chain(RECORD.queue_id):
            let_go = replace(document.dropped, epoch=Epoch(9))
            return chain_json.encode(replace(document, links=(), dropped=let_go, next_epoch=Epoch(9))), version
        if self.state == "damaged":
            return b"junk", version
        end = Certificate(Index(3), (), Durability.SYNC, True, {}, {}, b"of three records", None, 3)
        link = replace(document.links[0], state=LinkState.SEALED, certificate=end)
        return chain_json.encode(replace(document, queue_id=QueueId(9), links=(link,))), version


class ZooKeeperWithARegistration(ZooKeeperWithALink):
    """`told`: of the registration, when it is made and when it goes."""

    state = SessionState.CONNECTED
    session_timeout_s = 1.0

    def __init__(self, told: Callable[[str], None]) -> None:
        super().__init__()
        self._told = told
        self.is_gone = asyncio.Event()
        self.lease = b""

    async def ensure(self, _: str) -> None:
        pass

    async def set(self, path: str, data: bytes) -> None:
        assert path == Paths("c").lease("g1", "a")
        self.lease = data

    async def owner(self, _: str) -> int:
        return self.session_id

    async def create(self, path: str, data: bytes, **keys: object) -> None:
        if path == Paths("c").member("g1", "a"):
            await super().create(path, data, **keys)
            self._told("registered")
        if path == Paths("c").lease("g1", "a"):
            if self.lease:
                raise NodeExists
            self.lease = data

    async def delete(self, _: str) -> None:
        self.created.clear()
        self._told("gone")
        self.is_gone.set()


def damage_batches(broker: Broker, *damaged: tuple[LinkKey, int]) -> None:
    """They can't be read, and that was noted."""

    def failing(_: LinkKey, from_index: Index, *__: object) -> list[EncodedBatch]:
        raise BadChecksum("damaged", index=from_index)

    broker.store.batches = failing  # type: ignore[method-assign]
    for key, index in damaged:
        broker.note_damage(key, Index(index))


def damage_index(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the first link's index can't be read."""
    right = broker.store.last_position

    def damaged(link: LinkKey) -> layout.StoredPosition:
        if link == RECORD.key:
            raise DiskFailed("the disk can't be read: Corruption: block checksum mismatch")
        return right(link)

    monkeypatch.setattr(broker.store, "last_position", damaged)


class ZooKeeperWithEnds(ZooKeeperWithALink):
    """The chain with links of these epochs, which are sealed at 50."""

    def __init__(self, *epochs: int, link_hash: bytes) -> None:
        super().__init__()
        self._epochs, self._link_hash = epochs, link_hash

    async def children(self, *_: object) -> list[str]:
        return [str(RECORD.queue_id)]

    async def get(self, *_: Any) -> tuple[bytes, int]:
        document = chain_json.decode((await super().get())[0])
        end = Certificate(Index(50), (), Durability.SYNC, True, {}, {}, self._link_hash, None, 0)
        ended = replace(document.links[0], state=LinkState.SEALED, certificate=end)
        links = tuple(replace(ended, epoch=Epoch(epoch)) for epoch in self._epochs)
        return chain_json.encode(replace(document, links=links, next_epoch=Epoch(self._epochs[-1] + 1))), 7


def test_a_place_that_another_broker_has_is_told_rarely_and_by_whom(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two brokers were set up as one member: the second logged two equal lines a second, and not who the other one is."""
    pauses: list[float] = []

    class Taken(ZooKeeperWithALink):
        async def get(self, *_: object) -> tuple[bytes, int]:
            return Registration(Incarnation("other disk", 7), "h:7", None, True, True).encode(), 0

    async def served() -> None:
        raise NodeExists("a")

    async def slept(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) > 2 * 31:
            raise asyncio.CancelledError

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        membership = Membership(broker, cast("ZooKeeperSession", Taken()), "")
        membership._serve_session = served  # type: ignore[method-assign]
        monkeypatch.setattr(asyncio, "sleep", slept)
        with pytest.raises(asyncio.CancelledError):
            await membership.run_session()
        monkeypatch.undo()

    caplog.set_level("INFO")
    with_links(scenario)
    told = [one.getMessage() for one in caplog.records if "another broker" in one.getMessage()]
    assert len(told) == 2
    assert all("other disk" in one and "h:7" in one for one in told)
    assert pauses[::2][:4] == [0.5, 1.0, 2.0, 2.0]
    assert sum(pauses) > 50


@pytest.mark.parametrize(("interval_s", "is_told"), [(0.001, True), (1000.0, False)])
def test_that_not_all_is_read_within_the_interval_is_told(
    caplog: pytest.LogCaptureFixture, interval_s: float, is_told: bool
) -> None:
    """Beyond 360 GB "once a day" wasn't so."""

    async def scenario() -> None:
        passes = asyncio.Semaphore(0)

        async def read() -> None:
            await asyncio.sleep(0.01)
            passes.release()

        reading = Scrubber(cast("Broker", None), interval_s)
        reading._pass = read  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scrubber, "FIRST_S", 0.0)
            running = asyncio.create_task(reading.run())
            await passes.acquire()
            if is_told:
                await passes.acquire()
            await asyncio.sleep(0)
            running.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 45))
    assert ("takes longer than its interval" in caplog.text) is is_told


def test_a_path_of_zookeeper_that_isn_t_there_is_told_once(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten times a second a node was said to have gone between two looks at it, for ever."""
    pauses: list[float] = []

    class Elsewhere(ZooKeeperWithALink):
        hosts, state, session_id = "zk:2181/apps/x", SessionState.CONNECTED, 1

        async def create(self, *_: object, **__: object) -> None:
            raise NoNode("/apps/x")

    async def slept(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 20:
            raise asyncio.CancelledError

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        membership = Membership(broker, cast("ZooKeeperSession", Elsewhere()), "")
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", slept)
            with pytest.raises(asyncio.CancelledError):
                await membership.run_session()

    caplog.set_level("INFO")
    with_links(scenario)
    assert caplog.text.count("no such node as zk:2181/apps/x names behind the slash") == 1
    assert "between two looks" not in caplog.text


@pytest.mark.parametrize("junk", [b"", b"[]", b"{}", b"\xff"])
def test_registrations_that_are_not_understood_end_no_broker(
    with_links: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture, junk: bytes
) -> None:
    """Written by hand, or by a newer version: of a coordinator, of the peer, and at this very place."""
    sound = CoordinatorRegistration("c2:1").encode()

    class Junk(ZooKeeperWithALink):
        watch: Callable[[], None] | None = None

        async def get(self, path: str, watch: Callable[[], None] | None = None) -> tuple[bytes, int]:
            self.watch = watch
            return (sound if path.endswith("/c2") else junk), 0

        async def children(self, *_: object) -> list[str]:
            return ["c1", "c2"]

        async def create(self, path: str, *_: object, **__: object) -> None:
            raise NodeExists(path)

        async def owner(self, _: str) -> int:
            return 0

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        session = Junk()
        membership = Membership(broker, cast("ZooKeeperSession", session), "")
        assert await Coordinators(cast("ZooKeeperSession", session), Paths("c"))._addresses() == ["c2:1"]
        watching = asyncio.ensure_future(membership.watch_peer())
        async with asyncio.timeout(60):
            while "registration can't be read" not in caplog.text:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
        assert session.watch is not None  # it is read again when it changes
        assert not watching.done()
        watching.cancel()
        with pytest.raises(NotUnderstood):
            await membership._register(session.session_id)

    with_links(scenario)


@pytest.mark.parametrize("address", ["here:1", "elsewhere:1"])
def test_a_copy_of_a_disk_takes_no_place_from_the_other(with_links: Callable[[Scenario], None], address: str) -> None:
    """Two machines made from one image, started as often: each would make its node anew, without end. An earlier session's own node goes."""

    class Registered(ZooKeeperWithALink):
        def __init__(self, there: Registration) -> None:
            super().__init__()
            self.created = [there.encode()]

        async def owner(self, _: str) -> int:
            return self.session_id + 1

        async def delete(self, _: str) -> None:
            self.created.clear()

        async def create(self, path: str, data: bytes, **named: object) -> None:
            if self.created:
                raise NodeExists(path)
            await super().create(path, data, **named)

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        session = Registered(Registration(broker.incarnation, address, None, True, True))
        membership = Membership(broker, cast("ZooKeeperSession", session), "here:1")
        if address == "here:1":
            await membership._register(session.session_id)
        else:
            with pytest.raises(NodeExists):
                await membership._register(session.session_id)
        assert Registration.decode(session.created[0]).address == address
        assert membership._registered_in == (session.session_id if address == "here:1" else 0)

    with_links(scenario)


def resyncer_of(broker: Broker, zookeeper: EmptyZooKeeper | None = None) -> tuple[Resyncer, CursorKeeper]:
    keeper = CursorKeeper(broker, cast("Coordinators", None))
    return Resyncer(broker, keeper, cast("ZooKeeperSession", zookeeper or EmptyZooKeeper()), Paths("c")), keeper


def test_what_was_copied_before_the_peer_was_gone_for_good_counts(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its process was started again the member answered what it had had before: more was given up than was gone."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        await broker.cut(runner, runner.record, Index(20))
        broker.room = disk.seen(broker.room, 1 << 40)
        resyncer, _ = resyncer_of(broker)

        async def gone_amid(*_: object) -> AsyncIterator[EncodedBatch]:
            for one in batches(5)[2:4]:
                yield one
            raise Unreachable("the other member is gone")

        monkeypatch.setattr(resyncer, "_fetch", gone_amid)
        with pytest.raises(Unreachable):
            await resyncer._copy(runner, Index(20), Index(50))
        assert (runner.state.durable, broker.extent(RECORD.key)[1]) == (40, 40)

    with_links(scenario)


@pytest.mark.parametrize(("disk_id", "opened_start"), [("another-disk", 1), ("", 7)])
def test_a_disk_that_came_later_tells_what_it_has_once_the_end_is_recorded(
    with_links: Callable[[Scenario], None], disk_id: str, opened_start: int
) -> None:
    """A new one, or an older copy. It said nothing of what resync had filled it with: an operator gave up that, too."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        mine = pb.Incarnation(disk_id=disk_id or broker.incarnation.disk_id, start=opened_start)
        link = pb.LinkName(cluster="c", queue_id=RECORD.queue_id, epoch=RECORD.epoch)
        request = pb.SealRequest(link=link, master=pb.LinkMember(group="g1", member="a", incarnation=mine))
        await broker.cut(runner, runner.record, Index(20))
        reply = await sealing.seal(broker, request)
        assert (reply.answer, reply.positions[-1].index) == (pb.SealReply.PARTIAL, 20)
        assert reply.reason.startswith("this ")
        runner.changed_record(replace(RECORD, end=None))
        reply = await sealing.seal(broker, request)
        assert (reply.answer, list(reply.positions)) == (pb.SealReply.UNKNOWN, [])

    with_links(scenario)


class LostBetweenTwoChains(EmptyZooKeeper):
    """The connection is lost, and there again, when the first slice of chains has been read the first time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def children(self, _: str, __: Callable[[], None] | None = None) -> list[str]:
        return [str(queue_id) for queue_id in range(1, AT_ONCE + 2)]

    async def get(self, path: str, *_: object) -> tuple[bytes, int]:
        if path == Paths("c").chain(QueueId(AT_ONCE + 1)):
            self._broker.disconnections = 1
        raise NoNode(path)


def test_a_disk_is_compared_with_chains_that_were_read_on_one_connection(
    with_links: Callable[[Scenario], None],
) -> None:
    """Between two of them ZooKeeper may have been set back."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        resyncer, _keeper = resyncer_of(broker, LostBetweenTwoChains(broker))
        with pytest.raises(Unreachable, match="connection was lost"):
            await resyncer._pass()
        assert not broker.has_compared
        await resyncer._pass()
        assert broker.has_compared

    with_links(scenario)


class BlankSlave:
    """Its stream, which says that it has nothing of the link yet."""

    def Replicate(self) -> BlankSlave:  # noqa: N802 - the stub's name for it
        return self

    async def write(self, _: object) -> None:
        pass

    async def read(self) -> pb.ReplicateReply:
        return pb.ReplicateReply(next_index=0, hash=EMPTY_HASH)

    def cancel(self) -> None:
        pass


def test_damage_that_a_master_meets_while_it_makes_the_copies_equal_is_noted(
    with_links: Callable[[Scenario], None], tmp_path: Path
) -> None:
    """Its seal said that it has everything, and the slave, which has less, could never copy up to that end."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        opened = LinkRecord(QueueId(1), Epoch(5), role=Role.MASTER, peer=Incarnation("b", 1), opened_start=1)
        await fill(broker.store, opened, batches(5))
        runner = await broker.introduced(opened)
        path = tmp_path / "segments" / "1-5.segment"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(PeerLost):
            await opening.connect_slave(broker, runner, BlankSlave(), "")
        assert broker.damaged == {(opened.key, Index(20))}
        ends = pb.LinkMember(
            group="g1", member="a", incarnation=pb.Incarnation(disk_id=broker.incarnation.disk_id, start=1)
        )
        request = pb.SealRequest(link=pb.LinkName(cluster="c", queue_id=1, epoch=5), master=ends)
        assert (await sealing.seal(broker, request)).answer == pb.SealReply.PARTIAL

    with_links(scenario)


def test_what_was_said_of_an_end_before_an_operator_gave_it_up_comes_too_late(
    with_links: Callable[[Scenario], None],
) -> None:
    """A coordinator's call, a resync pass and a cut that were on their way: readers were let past the end again."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        at_50, at_30, at_20 = (runner.position_at(Index(index)) for index in (50, 30, 20))
        assert at_50 is not None
        assert at_30 is not None
        assert at_20 is not None
        runner.changed_record(replace(RECORD, end=None))
        before = replace(RECORD, end_hash=at_50.hash, chain_version=ChainVersion(9))
        await sealing.record_end(broker, before)
        known = runner.record
        given_up = replace(before, end=Index(30), end_hash=at_30.hash, is_abandoned=True)
        for version in (10, 12):  # told again by a later chain, it is the same
            assert (await sealing.record_end(broker, replace(given_up, chain_version=ChainVersion(version))))[1]
        adopt = resync.Adopt(*RECORD.key, Index(50), at_50.hash, is_abandoned=False)
        for late in (
            sealing.record_end(broker, before),
            sealing.record_end(broker, known),
            resyncer._do(adopt, ChainVersion(9)),
        ):
            with pytest.raises(OlderVersion):
                await late
        assert (runner.record.end, runner.record.is_abandoned, runner.readable_end) == (30, True, 30)
        more = resync.Adopt(*RECORD.key, Index(20), at_20.hash, is_abandoned=True)
        await resyncer._do(more, ChainVersion(13))
        assert (runner.record.end, runner.readable_end) == (20, 20)

    with_links(scenario)


def test_a_batch_that_can_t_be_mended_keeps_nothing_else_from_being_done(
    with_links: Callable[[Scenario], None],
) -> None:
    async def scenario(broker: Broker, _: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        done: list[object] = []

        async def mended(key: LinkKey, index: Index) -> None:
            done.append((key, index))
            if key == RECORD.key:
                raise MemberBehind("the peer's copy doesn't reach so far")

        async def brought_up(_: object) -> dict[QueueId, SeriatimError]:
            done.append("peer")
            return {}

        resyncer._mend, resyncer._bring_up_peer = mended, brought_up  # type: ignore[method-assign]
        damage_batches(broker, (RECORD.key, 0), (OTHER.key, 30))
        assert "epoch 2: mend index 0: the peer's copy doesn't reach so far" in str(await resyncer._pass())
        assert done == [(RECORD.key, 0), (OTHER.key, 30), "peer"]

    with_links(scenario)


def test_a_link_that_one_member_can_t_read_keeps_no_reader_waiting(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That member could not be told who reads, so nobody was let read what the other one has whole."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        def damaged(_: LinkKey) -> NoReturn:
            raise DiskFailed("the disk can't be read: Corruption: block checksum mismatch")

        fresh, here = broker_of(broker.store), broker.incarnation
        service = BrokerService(
            fresh, CursorKeeper(fresh, cast("Coordinators", None)), cast("Membership", SimpleNamespace())
        )
        name = pb.LinkName(cluster="c", queue_id=1, epoch=2, to=pb.Incarnation(disk_id=here.disk_id, start=here.start))
        request = pb.TellReaderRequest(link=name, subscription_id=5, generation=1, token=7)
        tell: Any = BrokerService.TellReader
        with monkeypatch.context() as while_damaged:
            while_damaged.setattr(broker.store, "last_position", damaged)
            with pytest.raises(StaleCursor, match="can't read this link"):
                await tell.__wrapped__(service, request, None)
        told = CursorKeeper(broker_of(broker.store), cast("Coordinators", None)).get(RECORD.key, SubscriptionId(5))
        with pytest.raises(Fenced):  # an older one
            cursors.check_reader(told, Generation(1), Token(6))

    with_links(scenario)


def test_cursors_that_one_member_can_t_read_keep_no_reader_waiting(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lay in a damaged table of a member that was restarted: each new reader waited until somebody stopped it."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        def damaged(_: LinkKey) -> NoReturn:
            raise DiskFailed("the disk can't be read: Corruption: block checksum mismatch")

        keeper = CursorKeeper(broker_of(broker.store), cast("Coordinators", None))
        told = (SubscriptionId(5), Generation(1), Token(7), Index(3))
        with monkeypatch.context() as while_damaged:
            while_damaged.setattr(broker.store, "cursors", damaged)
            for _ in range(2):
                with pytest.raises(StaleCursor, match="gives no cursor: the disk can't be read"):
                    await keeper.tell(runner, CursorRecord(*told))
            with pytest.raises(Fenced):
                await keeper.tell(runner, CursorRecord(*told[:2], Token(6)))
        with pytest.raises(Fenced):  # should they be readable again, nobody older reads
            cursors.check_reader(keeper.get(runner.key, SubscriptionId(5)), Generation(1), Token(6))

    with_links(scenario)


def test_a_link_that_can_t_be_read_hides_no_other_from_status(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each link of the queue on that member counted as one with one copy."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        here = broker.incarnation
        damage_index(broker, monkeypatch)
        fresh = broker_of(broker.store)
        keeper = CursorKeeper(fresh, cast("Coordinators", None))
        to = pb.Incarnation(disk_id=here.disk_id, start=here.start)
        request = pb.DescribeLinksRequest(cluster="c", to=to, queue_id=1, epochs=[2, 3])
        describe: Any = BrokerService.DescribeLinks
        reply = await describe.__wrapped__(BrokerService(fresh, keeper, cast("Membership", None)), request, None)
        assert [(one.epoch, one.next_index) for one in reply.links] == [(3, 50)]

    with_links(scenario)


def test_a_broker_starts_with_an_open_link_that_can_t_be_read(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index lay in a damaged table: all that this disk holds of other links was read, and made two copies again, nowhere."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        for record in (RECORD, OTHER):
            await broker.store.keep_link(replace(record, is_sealed=False, end=None, opened_start=7))
        damage_index(broker, monkeypatch)
        fresh, said = broker_of(broker.store), list[str]()
        fresh.found_lacking = lambda _, told: said.append(told)  # type: ignore[method-assign]
        await sealing.seal_open_links(fresh)
        assert fresh.is_sealed(OTHER.key)
        assert not fresh.is_sealed(RECORD.key)
        assert "epoch 2: the disk can't be read" in said[0]
        mine = pb.LinkMember(group="g1", member="a")
        asked = pb.SealRequest(link=pb.LinkName(cluster="c", queue_id=1, epoch=2), master=mine, durability="sync")
        answer = await sealing.seal(fresh, asked)
        assert answer.answer == pb.SealReply.UNKNOWN

    with_links(scenario)


def test_a_seal_of_a_link_that_was_never_opened_here_says_so(with_links: Callable[[Scenario], None]) -> None:
    """A recovered chain may have one for open that nobody opened: that both disks were older copies is what an operator read, who was to give it up."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        await broker.keep(broker.link(OTHER.key), replace(OTHER, end=None, opened_start=7))
        own = pb.Incarnation(disk_id=broker.incarnation.disk_id, start=broker.incarnation.start)
        mine = pb.LinkMember(group="g1", member="a", incarnation=own)
        said = []
        for epoch in (9, 9, OTHER.epoch):  # the second time there is the record of the first
            link = pb.LinkName(cluster="c", queue_id=OTHER.queue_id, epoch=epoch)
            answer = await sealing.seal(broker, pb.SealRequest(link=link, master=mine, durability="sync"))
            assert answer.answer == pb.SealReply.UNKNOWN
            said.append(answer.reason)
        never, again, before = said
        assert (
            never
            == again
            == ("this disk never had the link's opening: nobody sent to it, or this is an older copy of the disk")
        )
        assert before == "this disk lacks the link's opening, so it is an older copy of itself"

    with_links(scenario)


def test_a_link_that_can_t_be_read_keeps_no_other_from_being_made_whole(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index lay in a damaged table: a disk replaced beside it left the peer's cursors stale, and links behind it with one copy."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        done: list[object] = []

        async def brought_up(_: object) -> dict[QueueId, SeriatimError]:
            done.append("peer")
            return {}

        fresh = broker_of(broker.store)
        damage_index(broker, monkeypatch)
        keeper = CursorKeeper(fresh, cast("Coordinators", None))
        keeper.found_stale(RECORD.key)
        keeper.bring_up_peer = brought_up  # type: ignore[method-assign]
        fresh.peer.connected = Incarnation("other", 1)
        resyncer = Resyncer(fresh, keeper, cast("ZooKeeperSession", ZooKeeperWithEnds(2, 4, link_hash=b"")), Paths("c"))
        await resyncer._pass()
        record = fresh.record((RECORD.queue_id, Epoch(4)))
        assert record is not None
        assert record.end == 50
        assert "epoch 2: the disk can't be read" in fresh.found[RECORD.queue_id]
        assert done == ["peer"]
        document = chain_json.decode((await ZooKeeperWithEnds(2, 4, link_hash=b"").get())[0])
        gone = replace(document, dropped=replace(document.dropped, epoch=Epoch(3)))
        assert resync.Drop(*RECORD.key) in resync.plan(fresh.name, {RECORD.queue_id: gone}, await resyncer._held())

    with_links(scenario)


@pytest.mark.parametrize("why", [Unreachable("the other member isn't registered"), DiskFull("no room")])
def test_what_keeps_all_batches_from_being_mended_is_met_once_a_pass(
    with_links: Callable[[Scenario], None], why: SeriatimError
) -> None:
    """A lost file of 200,000 batches, and nobody to ask: seconds of the loop in each pass."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        tried: list[object] = []

        async def mended(key: LinkKey, index: Index) -> None:
            tried.append((key, index))
            raise why

        resyncer._mend = mended  # type: ignore[method-assign]
        damage_batches(broker, *((RECORD.key, index) for index in (0, 10, 20)))
        assert f"mend index 0: {why}" in str(await resyncer._pass())
        assert tried == [(RECORD.key, 0)]

    with_links(scenario)


def test_to_mend_a_batch_costs_the_same_however_many_come_behind_it(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a link's positions were read for each: seconds of the loop, and with them the lease, where a link is long."""
    read: list[bytes] = []

    def counted(key: bytes, value: bytes) -> layout.StoredPosition:
        read.append(key)
        return decode(key, value)

    decode = layout.decode_position
    monkeypatch.setattr(layout, "decode_position", counted)

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        await fill(broker.store, RECORD, batches(500, first_index=50))
        runner.reload(runner.record)
        resyncer, _ = resyncer_of(broker)

        async def fetched(_: LinkRunner, index: Index, end: Index) -> AsyncIterator[EncodedBatch]:
            for encoded in broker.store.batches(RECORD.key, index, end, 1):
                yield encoded

        resyncer._fetch = fetched  # type: ignore[method-assign]
        broker.note_damage(RECORD.key, Index(10))
        read.clear()
        await resyncer._mend(RECORD.key, Index(10))
        assert not broker.damaged
        assert len(read) < 10

    with_links(scenario)


def test_what_comes_of_a_link_after_it_was_let_go_is_not_kept(with_links: Callable[[Scenario], None]) -> None:
    async def scenario(broker: Broker, _: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        refilled = replace(RECORD, epoch=Epoch(4), is_sealed=False)
        runner = await broker.introduced(refilled)

        async def fetched(*_: object) -> AsyncIterator[EncodedBatch]:
            first, second, *_ = batches(5)
            yield first
            broker.lets_go(RECORD.queue_id, Epoch(5))
            await broker.drop(refilled.key)
            yield second

        resyncer._fetch = fetched  # type: ignore[method-assign, assignment]
        with pytest.raises(UnknownLink):
            await resyncer._copy(runner, Index(0), Index(50))
        await broker.store.flushed()
        assert broker.store.last_position(refilled.key).position.index == 0

    with_links(scenario)


def test_a_copy_on_its_way_from_where_the_peer_was_has_an_error_once_it_is_back_elsewhere(
    with_links: Callable[[Scenario], None],
) -> None:
    """It was cancelled, and with it, for good and without a word, all that this member does to be whole."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            broker.peer.register(Registered(Incarnation("b", 1), f"127.0.0.1:{silent.getsockname()[1]}"))
            copying = asyncio.create_task(anext(resyncer._fetch(runner, Index(0), Index(50))))
            await asyncio.sleep(0)
            broker.peer.register(Registered(Incarnation("b", 2), "127.0.0.1:1"))
            with pytest.raises(Unreachable, match="was closed"):
                await copying
        await broker.peer.close()

    with_links(scenario)


def test_what_a_member_did_for_a_link_is_forgotten_with_it(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links come and go for years, in a process that stays."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        _, keeper = resyncer_of(broker)
        session = cast("ZooKeeperSession", ZooKeeperWithALink())
        membership = Membership(broker, session, "")

        async def done(_: object, of: Iterable[Whose], *__: object) -> frozenset[Whose]:
            return frozenset(of)

        async def sealed(*_: object) -> pb.SealReply:
            return pb.SealReply()

        def mentioned() -> list[str]:
            kept = {**vars(keeper), **vars(membership)}.items()
            return sorted(
                name for name, value in kept if isinstance(value, (dict, set)) and repr(runner.key) in repr(value)
            )

        keeper._report = done  # type: ignore[method-assign]
        monkeypatch.setattr(sealing, "seal", sealed)
        runner.changed_record(replace(RECORD, end=None, lacks=()))
        for _ in range(2):  # the second time it is late
            await membership._look_at(RECORD.queue_id)
        runner.changed_record(replace(RECORD, lacks=()))
        await keeper.tell(runner, CursorRecord(SubscriptionId(5), Generation(0), Token(1), Index(50)))
        broker.look_for_drained(runner.key)
        assert await keeper._report_once()
        assert mentioned() == ["_late", "_records", "_reported", "_seals_written"]
        await broker.drop(runner.key)
        keeper.forget(runner.key)
        await membership._look_at(RECORD.queue_id)  # its chain has changed
        assert mentioned() == []

    with_links(scenario)


def test_of_the_chains_that_are_kept_only_those_of_the_queue_that_is_recovered_are_read(
    with_links: Callable[[Scenario], None],
) -> None:
    """With a thousand queues, which are all recovered, each call read a thousand chains, for seconds in which the broker did nothing else."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        data, _ = await ZooKeeperWithALink().get()
        document = chain_json.decode(data)
        for queue_id, name in ((50, "letters"), (40, document.name), (60, "letters"), (30, document.name)):
            of_queue = replace(document, queue_id=QueueId(queue_id), name=name)
            kept = chain_json.encode(of_queue) if name == document.name else b"that nobody reads"
            await broker.saw_chain(SeenChain(of_queue, ChainVersion(queue_id + 1), kept))
        await broker.store.flushed()
        to = pb.Incarnation(disk_id=broker.incarnation.disk_id, start=broker.incarnation.start)
        service = BrokerService(broker, cast("CursorKeeper", None), cast("Membership", None))

        async def listed(name: str) -> pb.ListKeptChainsReply:
            request = pb.ListKeptChainsRequest(cluster=broker.cluster, to=to, queue=name)
            reply: pb.ListKeptChainsReply = await cast(Any, BrokerService.ListKeptChains).__wrapped__(
                service, request, None
            )
            return reply

        reply = await listed(document.name)
        assert [(one.queue_id, one.version) for one in reply.chains] == [(30, 31), (40, 41)]
        assert [chain_json.decode(one.document).queue_id for one in reply.chains] == [30, 40]
        assert reply.last_queue_id == 60
        reply = await listed("unheard of")
        assert (list(reply.chains), reply.last_queue_id) == ([], 60)

    with_links(scenario)


def test_a_queue_of_which_nothing_is_left_is_kept_up_to_date_until_it_is_deleted(
    with_links: Callable[[Scenario], None],
) -> None:
    """Nobody had sent to it for days: who came to it since then was not in the copies, from which a lost chain is recovered."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        data, _ = await ZooKeeperWithALink().get()
        document = replace(chain_json.decode(data), links=(), next_epoch=Epoch(4))

        def seen(version: int, **changes: bool) -> SeenChain:
            changed = replace(document, **changes)
            return SeenChain(changed, ChainVersion(version), chain_json.encode(changed))

        broker.lets_go(RECORD.queue_id, document.next_epoch)
        await broker.saw_chain(seen(8))
        assert broker.kept_chains[RECORD.queue_id].version == 8
        await asyncio.gather(broker.saw_chain(seen(10, is_deleted=True)), broker.saw_chain(seen(9)))
        assert broker.kept_chains == {}
        await broker.store.flushed()
        assert list(broker.store.chains()) == []

    with_links(scenario)


@pytest.mark.parametrize("has_copy", [False, True])
def test_nothing_is_let_go_for_another_queue_that_got_the_id_h16(
    with_links: Callable[[Scenario], None], has_copy: bool
) -> None:
    """ZooKeeper had lost what counted ids, and queue `bills` got that of `orders`; it was deleted, and with it all records of both."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        runner.changed_record(replace(runner.record, queue="orders"))
        data, _ = await ZooKeeperWithALink().get()
        document = chain_json.decode(data)
        if has_copy:
            await broker.saw_chain(SeenChain(document, ChainVersion(7), data))
        before = broker.links_of(RECORD.queue_id), broker.kept_chains
        other = replace(document, name="bills", created_at_ms=9, next_epoch=Epoch(9), is_deleted=True)

        class OfAnother(ZooKeeperWithALink):
            async def get(self, *_: object) -> tuple[bytes, int]:
                return chain_json.encode(other), 99

            async def children(self, *_: object) -> list[str]:
                return [str(RECORD.queue_id)]

        resyncer, keeper = resyncer_of(broker, OfAnother())
        service = BrokerService(broker, keeper, cast("Membership", None))
        me = pb.Incarnation(disk_id=broker.incarnation.disk_id, start=broker.incarnation.start)
        drop = pb.DropLinksRequest(cluster="c", to=me, queue_id=RECORD.queue_id, queue="bills", created_at_ms=9)
        link = pb.LinkName(cluster="c", queue_id=RECORD.queue_id, epoch=20, to=me)
        asked = pb.OpenLinkRequest(link=link, queue="bills")
        for is_deleted in (False, True):
            other = replace(other, is_deleted=is_deleted)
            await broker.saw_chain(SeenChain(other, ChainVersion(99), b"of bills"))
            await service.DropLinks(drop, Caller())  # nothing of that queue is here
            with pytest.raises(ChainSetBack):
                await opening.open_link(broker, asked)
            broker.set_back.clear()
            assert "of queue orders, under the id of queue bills" in str(await resyncer._pass())
            assert list(broker.set_back) == [RECORD.queue_id]
            assert (broker.links_of(RECORD.queue_id), broker.kept_chains) == before
        broker.set_back.clear()
        drop.queue, drop.created_at_ms = "orders", document.created_at_ms
        await service.DropLinks(drop, Caller())
        assert (broker.links_of(RECORD.queue_id), broker.kept_chains) == ([], {})

    with_links(scenario)


def test_a_chain_that_is_made_again_is_compared_at_once(with_links: Callable[[Scenario], None]) -> None:
    """It was recovered, and the queue stood still for up to half a minute more, for a chain of which ZooKeeper knows nothing."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        zookeeper = EmptyZooKeeper()
        resyncer, _keeper = resyncer_of(broker, zookeeper)
        wanted = broker.resync_wanted
        await resyncer._pass()
        assert zookeeper.watch is None
        assert not wanted.is_set()
        data, _ = await ZooKeeperWithALink().get()
        await broker.saw_chain(SeenChain(chain_json.decode(data), ChainVersion(7), data))
        await resyncer._pass()
        assert broker.unknown_chains == {RECORD.queue_id: "orders"}
        assert wanted.is_set()
        wanted.clear()
        await resyncer._pass()
        assert not wanted.is_set()
        assert zookeeper.watch is not None
        zookeeper.watch()
        assert wanted.is_set()

    with_links(scenario)


def test_a_version_that_was_damaged_on_its_way_is_not_kept(with_links: Callable[[Scenario], None]) -> None:
    """A member kept it with its copy of the chain: ZooKeeper counted as set back, and the queue stood still until an operator recovered it."""

    class Damaged(ZooKeeperWithALink):
        flipped = 0

        async def get(self, path: str = "", watch: Callable[[], None] | None = None) -> tuple[bytes, int]:
            data, version = await super().get(path, watch)
            version, self.flipped = version ^ self.flipped, 0
            return data, version

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        broker.room = disk.seen(broker.room, 1 << 40)
        runner.changed_record(replace(RECORD, end=None))
        zookeeper = Damaged()
        resyncer, _ = resyncer_of(broker, zookeeper)
        membership = Membership(broker, cast("ZooKeeperSession", zookeeper), "")
        zookeeper.flipped = 1 << 30
        await membership._look_at(RECORD.queue_id)
        assert broker.kept_chains[RECORD.queue_id].version == 7
        zookeeper.flipped = 1 << 30
        seen = await resyncer._chain(RECORD.queue_id)
        assert seen is not None
        assert seen.version == 7

    with_links(scenario)


def test_that_a_link_is_not_whole_is_said_once_and_not_each_time_that_a_coordinator_asks(
    with_links: Callable[[Scenario], None],
) -> None:
    """A blank disk lacks many, each asked for each second: its registration changed with each question, and whoever watches was told."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        said: list[str] = []
        broker.doubt = ""
        broker.is_registration_old.set = lambda: said.append(broker.problem)
        for _ in range(2):
            for epoch in (4, 5):
                ended = LinkRecord(RECORD.queue_id, Epoch(epoch), end=Index(50), end_hash=bytes(32))
                assert (await sealing.record_end(broker, ended))[1] is False
        assert said == ["queue 1 epoch 4 isn't whole here", "queue 1 epoch 5 isn't whole here"]
        assert broker.resync_wanted.is_set()

    with_links(scenario)


def test_what_troubles_a_member_names_the_queue_as_people_know_it(with_links: Callable[[Scenario], None]) -> None:
    """By its id, which no list of queues shows, whoever looked at the groups of a cluster couldn't tell which one to see to."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        broker.room = disk.seen(broker.room, 1 << 40)
        data, _version = await ZooKeeperWithALink().get()
        document = replace(chain_json.decode(data), name="orders")
        await broker.saw_chain(SeenChain(document, ChainVersion(7), chain_json.encode(document)))
        resyncer, _ = resyncer_of(broker, ZooKeeperWithALink())
        said: list[str] = []
        broker.doubt = ""
        broker.is_registration_old.set = lambda: said.append(broker.problem)
        broker.note_damage(RECORD.key, Index(10))
        ended = LinkRecord(RECORD.queue_id, Epoch(4), end=Index(50), end_hash=bytes(32))
        await sealing.record_end(broker, ended)
        await resyncer._carry_out(
            [resync.Copy(*ended.key, Index(0), Index(50))], {RECORD.queue_id: SeenChain(document, ChainVersion(7), b"")}
        )
        said += resyncer._waiting[RECORD.queue_id]
        broker.found_set_back(RECORD.queue_id, "it has link 9")
        assert len(said) == 4
        assert all(one.startswith(("queue orders epoch ", "queue orders: ZooKeeper was set back")) for one in said), (
            said
        )

    with_links(scenario)


def test_that_a_batch_is_damaged_is_said_once_and_not_each_time_that_somebody_wants_it(
    with_links: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The other member is away, so readers try again and again: the registration changed to and fro."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        said: list[str] = []
        broker.doubt = ""
        broker.is_registration_old.set = lambda: said.append(broker.problem)
        for index in (10, 20, 10, 20):
            broker.note_damage(RECORD.key, Index(index))
        assert said == [f"queue 1 epoch 2: the batch at index {index} is damaged" for index in (10, 20)]
        assert sum("damaged batch" in one.getMessage() for one in caplog.records) == 2
        assert broker.resync_wanted.is_set()
        broker.damaged.clear()  # they are mended
        broker.note_damage(RECORD.key, Index(10))
        assert len(said) == 3

    with_links(scenario)


def test_what_is_tried_again_each_second_is_told_once_a_minute(
    with_links: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost link is sealed again and again until an operator gives it up; by a chain that was set back no report is taken."""

    async def refused(*_: object) -> None:
        raise ChainSetBack("the chain of queue orders is an old one")

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        keeper = CursorKeeper(broker, cast("Coordinators", None))
        keeper._report = refused  # type: ignore[method-assign]
        runner.changed_record(replace(RECORD, lacks=(), is_whole=False))
        at_end = CursorRecord(SubscriptionId(1), Generation(1), Token(1), RECORD.end)
        await keeper._changed(RECORD.key, SubscriptionId(1), lambda _: at_end)
        link = pb.LinkName(cluster="c", queue_id=RECORD.queue_id, epoch=RECORD.epoch)
        mine = pb.Incarnation(disk_id=broker.incarnation.disk_id, start=RECORD.opened_start)
        request = pb.SealRequest(link=link, master=pb.LinkMember(group="g1", member="a", incarnation=mine))
        caplog.set_level("INFO")
        for logger in (cursor_keeper._log, sealing._log):  # another test may have had the same told a moment ago
            monkeypatch.setattr(logger, "_told_at_s", {})
        for _ in range(3):
            assert (await sealing.seal(broker, request)).answer == pb.SealReply.PARTIAL
            broker.look_for_drained(RECORD.key)
            assert not await keeper._report_once()
        for told in ("seal answered", "drained report failed"):
            assert sum(told in one.getMessage() for one in caplog.records) == 1

    with_links(scenario)


def test_what_resync_waits_for_is_told_once_for_each_link_and_not_in_each_pass(
    with_links: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A blank disk lacked 150 links, and the other member was away: 150 lines in each pass."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        keeper = CursorKeeper(broker, cast("Coordinators", None))
        resyncer = Resyncer(
            broker, keeper, cast("ZooKeeperSession", ZooKeeperWithEnds(4, 5, link_hash=bytes(32))), Paths("c")
        )
        for _ in range(4):  # in the first it hears of the ends
            problem = await resyncer._pass()
        assert "epoch 5: copy: the other member isn't registered" in problem[RECORD.queue_id]
        assert sum("resync waits" in one.getMessage() for one in caplog.records) == 2

    with_links(scenario)


def test_a_chain_of_a_newer_version_keeps_no_other_from_being_resynced(with_links: Callable[[Scenario], None]) -> None:
    """In an upgrade: a member of the version before brought up nothing more, of no queue, as soon as one chain was written by the newer."""

    class ZooKeeperWithTwo(ZooKeeperWithALink):
        async def children(self, *_: object) -> list[str]:
            return ["made by hand", "9", str(RECORD.queue_id)]

        async def get(self, path: str = "", *_: object) -> tuple[bytes, int]:
            data = (await super().get())[0]
            if path == Paths("c").chain(QueueId(9)):
                return without_checksum(data).replace(b'"format":1', b'"format":2'), 7
            document = chain_json.decode(data)
            end = Certificate(Index(0), (), Durability.SYNC, True, {}, {}, EMPTY_HASH, None, 0)
            ended = replace(document.links[0], epoch=Epoch(4), state=LinkState.SEALED, certificate=end)
            return chain_json.encode(replace(document, links=(ended,), next_epoch=Epoch(5))), 7

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        kept = chain_json.decode((await ZooKeeperWithALink().get())[0])
        await broker.saw_chain(SeenChain(replace(kept, queue_id=QueueId(9)), ChainVersion(7), b"a copy"))
        broker.set_back[QueueId(9)] = "it knows more"
        resyncer = Resyncer(
            broker,
            CursorKeeper(broker, cast("Coordinators", None)),
            cast("ZooKeeperSession", ZooKeeperWithTwo()),
            Paths("c"),
        )
        assert "it knows more" in str(await resyncer._pass())
        broker.set_back.clear()
        await resyncer._pass()
        assert "has format 2, this version reads 1" in broker.unread_chains[QueueId(9)]
        assert broker.unknown_chains == {}
        record = broker.record((RECORD.queue_id, Epoch(4)))
        assert record is not None
        assert record.end == 0

    with_links(scenario)


def test_a_member_that_can_t_read_one_chain_is_in_sync_with_all_other_queues(
    with_links: Callable[[Scenario], None],
) -> None:
    """It wasn't with any: one damaged node kept every group from coming back, for every queue."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        zookeeper = ZooKeeperWithAnotherQueue()
        zookeeper.state = "damaged"
        membership = Membership(broker, cast("ZooKeeperSession", zookeeper), "")
        resyncer, _keeper = resyncer_of(broker, zookeeper)
        broker.doubt, broker.lacking = "", await resyncer._pass()
        said = membership._registration()
        assert said.is_in_sync_with(RECORD.queue_id)
        assert not said.is_in_sync_with(QueueId(9))
        assert (
            said.problem == "it doesn't understand the chain, nor what it lacks, of queue with id 9: its log says why"
        )
        assert Registration.decode(said.encode()) == said

        meanwhile = []

        async def saw(_: object) -> None:
            meanwhile.append(membership._registration())

        broker.saw_chain = saw  # type: ignore[method-assign]
        zookeeper.state = "whole"
        broker.lacking = await resyncer._pass()
        meanwhile.append(membership._registration())
        assert broker.problem
        assert not broker.unread_chains
        assert not any(one.is_in_sync_with(QueueId(9)) for one in meanwhile)

    with_links(scenario)


def test_a_blank_disk_is_not_in_sync_with_a_queue_that_only_the_other_member_knows(
    with_links: Callable[[Scenario], None],
) -> None:
    """ZooKeeper lost it. The blank one said *in sync* meanwhile, as who replaces the other disk asks, and for half a minute after it was recovered."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        zookeeper = ZooKeeperWithAnotherQueue()
        membership = Membership(broker, cast("ZooKeeperSession", zookeeper), "")
        resyncer, _keeper = resyncer_of(broker, zookeeper)
        other = Registration(Incarnation("b", 1), "", set_back=(QueueId(9),))
        for told in (other, replace(other, set_back=(), has_compared=False)):  # started again, it hasn't looked yet
            membership._peer_compared(told)
            broker.doubt, broker.lacking = "", await resyncer._pass()
            said = membership._registration()
            assert said.is_in_sync_with(RECORD.queue_id)
            assert not said.is_in_sync_with(QueueId(9))
            assert (
                said.problem == "g1-b knows more of queue with id 9 than ZooKeeper: what it lacks here nobody can tell"
            )

        zookeeper.state = "whole"
        broker.resync_wanted.clear()
        membership._peer_compared(replace(other, set_back=()))
        assert broker.resync_wanted.is_set()
        assert not membership._registration().is_in_sync_with(QueueId(9))
        broker.lacking = await resyncer._pass()
        assert broker.problem
        assert not broker.known_to_peer

    with_links(scenario)


def test_a_member_is_not_in_sync_with_a_queue_that_zookeeper_lost_until_it_has_looked_behind_its_recovery(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it lacked of that queue it told only behind the pass in which it saw the chain again; until then it was in sync."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        zookeeper = ZooKeeperWithAnotherQueue()
        membership = Membership(broker, cast("ZooKeeperSession", zookeeper), "")
        resyncer, _keeper = resyncer_of(broker, zookeeper)
        zookeeper.state = "whole"
        data, version = await zookeeper.get(Paths("c").chain(QueueId(9)))
        await broker.saw_chain(SeenChain(chain_json.decode(data), ChainVersion(version), data))
        zookeeper.state = "lost"
        broker.doubt, broker.lacking = "", await resyncer._pass()
        said = [membership._registration()]
        assert (said[0].is_in_sync, said[0].unread) == (True, ()), "it lacks nothing of all others"
        carried_out = resyncer._carry_out

        async def watched(*arguments: Any) -> None:
            said.append(membership._registration())
            await carried_out(*arguments)

        monkeypatch.setattr(resyncer, "_carry_out", watched)
        zookeeper.state = "whole"
        broker.lacking = await resyncer._pass()
        assert broker.unknown_chains == {}
        said.append(membership._registration())
        assert len(said) == 3
        assert all(one.is_in_sync_with(RECORD.queue_id) and not one.is_in_sync_with(QueueId(9)) for one in said)

    with_links(scenario)


def test_what_is_missing_is_copied_only_as_long_as_there_is_room_for_seals(
    with_links: Callable[[Scenario], None],
) -> None:
    """A blank disk that is too small for what it should hold was filled to its last byte, and then failed for all links."""

    async def scenario(broker: Broker, full: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        runner = await broker.introduced(replace(RECORD, epoch=Epoch(4)))
        sent = batches(5)

        async def fetched(_: LinkRunner, index: Index, end: Index) -> AsyncIterator[EncodedBatch]:
            for encoded in sent:
                if index <= encoded.header.first_index < end:
                    yield encoded

        resyncer._fetch = fetched  # type: ignore[method-assign]
        broker.room = disk.seen(Room(10_000), 5_000 + 2 * sum(one.size_bytes for one in sent[:2]))
        with pytest.raises(DiskFull):
            await resyncer._copy(runner, Index(0), Index(50))
        await broker.store.flushed()
        assert broker.store.last_position(runner.key).position.index == 20
        with pytest.raises(DiskFull):  # and throws nothing away for it
            await resyncer._copy(full, Index(0), Index(50))
        broker.note_damage(RECORD.key, Index(10))
        with pytest.raises(DiskFull):
            await resyncer._mend(RECORD.key, Index(10))
        broker.room = disk.seen(broker.room, 20_000)
        await resyncer._copy(runner, Index(20), Index(50))
        assert runner.state.durable == 50
        await resyncer._mend(RECORD.key, Index(10))
        assert not broker.damaged

    with_links(scenario)


def test_a_copy_that_is_not_what_the_certificate_names_is_replaced_from_its_start(
    with_links: Callable[[Scenario], None],
) -> None:
    """What two disks hold of a link of `async` may differ in what was in flight: as long as the other one's, it would stay as it is."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        sent, asked = batches(5), []

        async def has_it(*_: object) -> None: ...

        async def fetched(_: LinkRunner, index: Index, end: Index) -> AsyncIterator[EncodedBatch]:
            asked.append((index, end, broker.store.last_position(runner.key).position.index))
            for encoded in sent:
                yield encoded

        resyncer._check_peer_has = has_it  # type: ignore[method-assign]
        resyncer._fetch = fetched  # type: ignore[method-assign]
        await resyncer._copy(runner, Index(0), Index(50))
        assert asked == [(0, 50, 0)]
        assert runner.state.durable == 50

    with_links(scenario)


def test_what_comes_to_mend_a_link_after_it_was_let_go_is_not_kept(with_links: Callable[[Scenario], None]) -> None:
    async def scenario(broker: Broker, _: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        repaired: list[object] = []

        async def fetched(*_: object) -> AsyncIterator[EncodedBatch]:
            await broker.drop(RECORD.key)
            yield batches(5)[4]

        resyncer._fetch = fetched  # type: ignore[method-assign, assignment]
        broker.store.repair = lambda *arguments: repaired.append(arguments)  # type: ignore[method-assign]
        with pytest.raises(UnknownLink):
            await resyncer._mend(RECORD.key, Index(40))
        assert not repaired

    with_links(scenario)


def test_a_copy_that_was_abandoned_meanwhile_is_not_thrown_away(with_links: Callable[[Scenario], None]) -> None:
    """It is kept aside (H21); and its record isn't put back to what it was when the peer was asked."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        abandoned = replace(RECORD, end=Index(30), is_abandoned=True)

        async def checked(*_: object) -> None:
            await broker.keep(runner, abandoned)

        resyncer._check_peer_has = checked  # type: ignore[method-assign]
        with pytest.raises(MemberBehind):
            await resyncer._copy(runner, Index(0), Index(50))
        assert broker.store.links()[0] == runner.record == abandoned
        assert broker.store.last_position(RECORD.key).position.index == 50

    with_links(scenario)


def test_what_is_lacking_of_one_queue_says_nothing_of_another(with_links: Callable[[Scenario], None]) -> None:
    """Cursors of one queue that waited for an operator's seek kept the group off every queue's send list, so that all waited for him."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        membership = Membership(broker, cast("ZooKeeperSession", ZooKeeperWithALink()), "")
        for doubt in ("not compared with the chain yet", ""):
            broker.doubt = doubt
            broker.found_lacking(QueueId(9), "queue bills epoch 4: the newest cursors are lost; seek main")
            said = Registration.decode(membership._registration().encode())
            assert not said.is_in_sync  # so it is to coordinators that don't look further
            assert said.problem == (doubt or broker.lacking[QueueId(9)])
            assert said.is_in_sync_with(RECORD.queue_id) is not bool(doubt)
            assert not said.is_in_sync_with(QueueId(9))

    with_links(scenario)


def test_what_is_found_lacking_while_a_pass_runs_is_not_unsaid_by_it(with_links: Callable[[Scenario], None]) -> None:
    """Damage that a reader met just then: the member was in sync until the next pass, and its group could come back."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        for one in (runner, broker.link(OTHER.key)):
            one.changed_record(replace(one.record, end=None))
        resyncer, _ = resyncer_of(broker)
        passes = 0
        said: list[bool] = []

        async def brought_up(_: object) -> dict[QueueId, SeriatimError]:
            nonlocal passes
            passes += 1
            broker.note_damage(RECORD.key, Index(0))
            return {}

        resyncer._bring_up_peer = brought_up  # type: ignore[method-assign]
        broker.is_registration_old.set = lambda: said.append(not broker.problem)
        running = asyncio.create_task(resyncer.run())
        async with asyncio.timeout(60):
            while passes < 2:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        running.cancel()
        assert said
        assert not any(said)

    with_links(scenario)


def test_a_seal_that_no_node_of_zookeeper_takes_is_not_sent_there(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a queue with hundreds of sources: ZooKeeper broke the connection, and with it what else was asked, again and again."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        session = ZooKeeperWithALink()
        membership = Membership(broker, cast("ZooKeeperSession", session), "")
        asked = []

        async def sealed(_: Broker, request: pb.SealRequest) -> pb.SealReply:
            asked.append(request)
            return pb.SealReply(reason="x" * chain_json.MAX_BYTES)

        monkeypatch.setattr(sealing, "seal", sealed)
        runner.changed_record(replace(RECORD, end=None))
        for _ in range(3):  # the first time it isn't late
            await membership._look_at(RECORD.queue_id)
        assert len(asked) == 1
        assert session.created == []

    with_links(scenario)


@asynccontextmanager
async def chain_in(zookeeper: str, broker: Broker, paths: Paths) -> AsyncIterator[ZooKeeperSession]:
    """A session with a real ZooKeeper that holds the chain of `ZooKeeperWithALink`, in a cluster that is the broker's then."""
    session = ZooKeeperSession(zookeeper, 20.0)
    broker.cluster = paths.cluster
    await session.start()
    try:
        data, _ = await ZooKeeperWithALink().get()
        await session.ensure(paths.seals(RECORD.queue_id))
        await session.create(paths.chain(RECORD.queue_id), data)
        yield session
    finally:
        await session.stop()


def test_a_seal_makes_nothing_anew_of_a_queue_that_was_cleared_away(
    zookeeper: str, with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slow disk took so long: the queue's node was there again, with a seal in it, and was tried to be swept away each second, for ever."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        paths = Paths("cleared")
        async with chain_in(zookeeper, broker, paths) as session:
            membership = Membership(broker, session, "")
            path, seals = paths.chain(RECORD.queue_id), paths.seals(RECORD.queue_id)

            async def sealed(*_: object) -> pb.SealReply:
                for gone in (seals, path, paths.queue(RECORD.queue_id)):
                    await session.delete(gone)
                return pb.SealReply()

            monkeypatch.setattr(sealing, "seal", sealed)
            runner.changed_record(replace(RECORD, end=None))
            await membership._look_at(RECORD.queue_id)  # the first time it isn't late
            with pytest.raises(NoNode):
                await membership._look_at(RECORD.queue_id)
            assert await session.children(paths.queues) == []

    with_links(scenario)


def test_a_seal_that_was_damaged_on_its_way_beside_the_chain_is_written_again(
    zookeeper: str, with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coordinator could read it, and while none reached the member by itself the end stayed lost."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        paths = Paths("damaged")
        async with chain_in(zookeeper, broker, paths) as session:
            membership = Membership(broker, session, "")
            create, asked = session.create, []

            async def damaged(path: str, data: bytes, **keys: Any) -> str:
                return await create(path, bytes((data[0], data[1] ^ 1)) + data[2:], **keys)

            async def sealed(*_: object) -> pb.SealReply:
                asked.append(1)
                return pb.SealReply(reason="as it is")

            monkeypatch.setattr(session, "create", damaged)
            monkeypatch.setattr(sealing, "seal", sealed)
            runner.changed_record(replace(RECORD, end=None))
            for _ in range(4):  # the first time it isn't late
                await membership._look_at(RECORD.queue_id)
            found, _ = await session.get(paths.seal(RECORD.queue_id, RECORD.epoch, broker.name.member))
            assert pb.SealReply.FromString(bytes(checksums.without_checksum(found))).reason == "as it is"
            assert len(asked) == 2

    with_links(scenario)


def test_what_fails_at_the_other_member_is_not_told_as_this_one_s(with_links: Callable[[Scenario], None]) -> None:
    """It said of itself that its disk failed, and what to do then: to start with an empty directory. It was the good copy."""

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        resyncer, keeper = resyncer_of(broker)
        runner.changed_record(replace(RECORD, lacks=()))
        await keeper.commit(runner, pb.CommitCursorRequest(subscription_id=5, token=1, index=50, is_relayed=True))
        keeper.found_stale(RECORD.key)

        answers: list[SeriatimError] = [
            DiskFailed("the disk failed: [Errno 5] Input/output error", epoch=2),
            DeadlineOver("no answer in time"),
        ]

        async def failed(*_: object) -> None:
            raise answers.pop(0)

        peer = broker.peer
        peer.registered = Registered(Incarnation("b", 1), "")
        peer.connected = peer.registered.incarnation
        peer.stub = lambda _: None  # type: ignore[method-assign]
        peer._calls.call = failed  # type: ignore[method-assign]
        refused = (await keeper.bring_up_peer(resyncer._version))[RECORD.queue_id]
        assert str(refused).startswith(
            "the other member says: the disk failed: [Errno 5] Input/output error (start the"
        )
        assert "this member" not in str(refused)
        assert refused.details == {"epoch": 2}
        with pytest.raises(DeadlineOver, match=r"^no answer in time"):  # that it did not say
            await resyncer._pass()

    with_links(scenario)


def test_the_chains_are_not_read_over_and_over_for_a_peer_that_is_away(with_links: Callable[[Scenario], None]) -> None:
    """All of them, three times a second, for as long as it was: of ZooKeeper and of this member, some percent of a processor."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        resyncer, keeper = resyncer_of(broker)
        broker.doubt = ""
        keeper.found_stale(RECORD.key)
        assert resyncer._pause_s() == IDLE_S
        broker.peer.connected = Incarnation("b", 1)
        assert resyncer._pause_s() == BUSY_S

    with_links(scenario)


@pytest.mark.parametrize("was_lost", [True, False])
def test_what_a_recovered_chain_lacks_is_said_again(with_links: Callable[[Scenario], None], *, was_lost: bool) -> None:
    """ZooKeeper lost its data, or had older ones; the copy was seconds old. A link that was read counted as unread, and a cursor that was missed as one to start at (H7)."""
    reader = Subscription(
        SubscriptionId(3), "main", Generation(0), Token(1), "", (RECORD.epoch,), RECORD.epoch, Index(0), 0
    )

    class Recovered(ZooKeeperWithALink):
        async def children(self, *_: object) -> list[str]:
            return [str(RECORD.queue_id)]

        async def get(self, *arguments: Any) -> tuple[bytes, int]:
            document = chain_json.decode((await super().get(*arguments))[0])
            return chain_json.encode(replace(document, subscriptions=(reader,), next_epoch=Epoch(4))), 7

    async def scenario(broker: Broker, runner: LinkRunner) -> None:
        said: list[object] = []

        async def reported(key: object, of: Iterable[Whose], *_: object) -> frozenset[Whose]:
            said.extend((key, *whose) for whose in of)
            return frozenset(of)

        async def noted(_: LinkKey, whose: object, **__: object) -> None:
            said.append(whose)

        _, keeper = resyncer_of(broker)
        keeper._report, keeper._note = reported, noted  # type: ignore[method-assign]
        resyncer = Resyncer(broker, keeper, cast("ZooKeeperSession", Recovered()), Paths("c"))
        runner.changed_record(replace(RECORD, lacks=(), chain_version=ChainVersion(7)))
        await keeper.tell(runner, CursorRecord(reader.subscription_id, reader.generation, Token(1)))
        await keeper.commit(runner, pb.CommitCursorRequest(subscription_id=3, token=1, index=50))
        assert await keeper._report_once()
        assert said == [reader.whose, (RECORD.key, *reader.whose)]
        if was_lost:
            broker.unknown_chains = {RECORD.queue_id: "orders"}
        else:
            broker.set_back = {RECORD.queue_id: "it knows more"}
        await resyncer._pass()
        assert await keeper._report_once()
        assert said[2:] == said[:2]

    with_links(scenario)


class Caller:
    """Gets the error as it would have come to it."""

    async def abort(self, _: object, details: str) -> None:
        raise from_wire(details)


def test_a_queue_is_said_to_be_let_go_only_where_the_disk_has_let_it_go(
    with_links: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try found nothing left in memory. With that the queue's nodes went, and its links came back with the disk."""

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        _, keeper = resyncer_of(broker)
        service = BrokerService(broker, keeper, cast("Membership", None))
        me = pb.Incarnation(disk_id=broker.incarnation.disk_id, start=broker.incarnation.start)
        monkeypatch.setattr(os, "fdatasync", failing)
        for _ in (RECORD, OTHER, "and once more"):
            with pytest.raises(DiskFailed):
                await service.DropLinks(pb.DropLinksRequest(cluster="c", to=me, queue_id=RECORD.queue_id), Caller())
        await service.DropLinks(pb.DropLinksRequest(cluster="c", to=me, queue_id=9), Caller())  # it has nothing of that

    with_links(scenario)


def test_cursors_that_can_t_be_read_keep_no_others_from_being_reported(with_links: Callable[[Scenario], None]) -> None:
    async def scenario(broker: Broker, _: LinkRunner) -> None:
        _, keeper = resyncer_of(broker)
        looked_at: list[LinkKey] = []

        def of_link(key: LinkKey) -> dict[SubscriptionId, CursorRecord]:
            looked_at.append(key)
            if key == RECORD.key:
                raise DiskFailed("Corruption: block checksum mismatch")
            return {}

        keeper.of_link = of_link  # type: ignore[method-assign]
        broker.maybe_drained |= {RECORD.key, OTHER.key}
        assert not await keeper._report_once()
        assert looked_at == [RECORD.key, OTHER.key]
        assert broker.maybe_drained == {RECORD.key}

    with_links(scenario)


class ServesAllButOne:
    """A coordinator that can't read one chain, as if each link were of a queue of its own, and one where nobody answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def children(self, _: str) -> list[str]:
        return ["dead", "serves"]

    async def get(self, path: str, *_: object) -> tuple[bytes, int]:
        return CoordinatorRegistration(f"{path.rpartition('/')[2]}:1").encode(), 0

    async def forget_dead(self, _: object) -> None:
        pass

    async def close(self) -> None:
        pass

    def stub(self, address: str) -> SimpleNamespace:
        async def serve(request: Any, **_: object) -> pb.DrainedNoted:
            if address == "dead:1":
                raise failed("failed to connect")
            self.asked.append(request)
            if request.epoch == RECORD.epoch:
                raise failed(errors.to_wire(Unreachable("bits have changed in the chain of queue 1")))
            return pb.DrainedNoted()

        return SimpleNamespace(ReportDrained=serve, NoteStaleCursors=serve)

    def coordinators(self) -> Coordinators:
        made = Coordinators(cast("ZooKeeperSession", self), Paths("c"))
        made._connections = cast("Any", self)
        return made


def failed(details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def test_a_queue_whose_chain_nobody_can_read_keeps_no_other_from_being_reported_or_brought_up(
    with_links: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Bits had changed in one chain, for good: of no queue behind it was a link's end reported, nor a note of stale cursors taken back."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        zookeeper = ServesAllButOne()
        keeper = CursorKeeper(broker, zookeeper.coordinators())
        at_end = CursorRecord(SubscriptionId(1), Generation(1), Token(1), RECORD.end, Token(1))
        caplog.set_level("INFO")
        for one in (RECORD, OTHER):
            broker.link(one.key).changed_record(replace(one, lacks=()))
            await keeper._changed(one.key, SubscriptionId(1), lambda _: at_end)
            broker.look_for_drained(one.key)
            keeper.found_stale(one.key)
        assert not await keeper._report_once()
        assert [one.epoch for one in zookeeper.asked] == [RECORD.epoch, OTHER.epoch]
        assert broker.maybe_drained == {RECORD.key}
        assert "bits have changed" in caplog.text
        zookeeper.asked.clear()

        async def relayed(*_: object, **__: object) -> None:
            """The other member has it."""

        keeper._relay = relayed  # type: ignore[method-assign]
        refused = await keeper.bring_up_peer(lambda _: asyncio.sleep(0, 7))
        assert "bits have changed" in refused[RECORD.queue_id].message
        assert [one.epoch for one in zookeeper.asked] == [RECORD.epoch, OTHER.epoch]

    with_links(scenario)


def test_a_queue_that_is_recovered_isn_t_kept_waiting_by_who_knew_more(with_links: Callable[[Scenario], None]) -> None:
    """ZooKeeper lost all it had: after `queue recover` the queue stood still for up to half a minute, and status said what it said before."""

    async def scenario(broker: Broker, _: LinkRunner) -> None:
        resyncer, _ = resyncer_of(broker)
        broker.doubt = ""
        broker.unknown_chains = {QueueId(1): "orders"}
        assert resyncer._pause_s() == REST_S
        broker.unknown_chains = {}
        assert resyncer._pause_s() == IDLE_S

    with_links(scenario)
