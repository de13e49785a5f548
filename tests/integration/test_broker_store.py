"""One contract for the store: the real one, with batches in RocksDB and in segment files, and a simple one in memory; and what survives SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rocksdict

from seriatim.broker_group import store as store_module
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.layout import StoredPosition
from seriatim.broker_group.log_files import LogFiles
from seriatim.broker_group.segments import READ_AHEAD_BYTES
from seriatim.broker_group.store import Store, open_store
from seriatim.broker_group.writer import RUN_BYTES, SLOW_AGAIN_S, SLOW_S, SlowDisk, Write, Writer, _runs
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.chain import Durability
from seriatim.protocol.errors import BadChecksum, DiskFailed, DiskFull, InvalidArgument, SeriatimError
from seriatim.protocol.names import Epoch, Generation, Incarnation, Index, QueueId, SubscriptionId, Token
from seriatim.protocol.position import START, Position
from tests.faults.logs import defects
from tests.files import sizes
from tests.integration.broker_members import as_sent, batches

RECORD = LinkRecord(QueueId(1), Epoch(2), durability=Durability.SYNC)
OTHER = replace(RECORD, epoch=Epoch(3))


@dataclass
class MemoryStore:
    """The slow and obvious one."""

    def __post_init__(self) -> None:
        self._links: dict[LinkKey, LinkRecord] = {}
        self._cursors: dict[tuple[LinkKey, int], CursorRecord] = {}
        self._batches: dict[tuple[LinkKey, int], EncodedBatch] = {}
        self._positions: dict[tuple[LinkKey, int], StoredPosition] = {}

    def append(self, record: LinkRecord, encoded: EncodedBatch, stored: StoredPosition, done: Any) -> None:
        self._batches[record.key, encoded.header.first_index] = encoded
        self._positions[record.key, stored.position.index] = stored
        asyncio.get_running_loop().call_soon(done, stored.position.index, None)

    def repair(self, link: LinkKey, encoded: EncodedBatch) -> None:
        self._batches[link, encoded.header.first_index] = encoded

    async def keep_link(self, record: LinkRecord) -> None:
        self._links[record.key] = record

    async def keep_cursor(self, link: LinkKey, cursor: CursorRecord) -> None:
        self._cursors[link, cursor.subscription_id] = cursor

    async def forget_cursors(self, link: LinkKey, of: Any) -> None:
        for one in of:
            self._cursors.pop((link, one), None)

    async def cut(self, record: LinkRecord, end: Index) -> None:
        self._links[record.key] = record
        self._batches = {key: one for key, one in self._batches.items() if key[0] != record.key or key[1] < end}
        self._positions = {key: one for key, one in self._positions.items() if key[0] != record.key or key[1] <= end}

    async def drop(self, link: LinkKey) -> None:
        self._links.pop(link, None)
        for kept in (self._batches, self._positions, self._cursors):
            for key in [key for key in kept if key[0] == link]:
                del kept[key]  # type: ignore[attr-defined]

    async def flushed(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def links(self) -> list[LinkRecord]:
        return [self._links[key] for key in sorted(self._links)]

    def cursors(self, link: LinkKey) -> list[CursorRecord]:
        return [one for key, one in sorted(self._cursors.items()) if key[0] == link]

    def last_position(self, link: LinkKey) -> StoredPosition:
        return self.position_before(link, Index(2**63))

    def position_before(self, link: LinkKey, index: Index) -> StoredPosition:
        found = [one for key, one in self._positions.items() if key[0] == link and key[1] <= index]
        return max(found, key=lambda one: one.position.index, default=StoredPosition(START, Index(0), 0))

    def position_at(self, link: LinkKey, index: Index) -> Position | None:
        if index == 0:
            return START
        found = self._positions.get((link, index))
        return None if found is None else found.position

    def positions(self, link: LinkKey, after: Index) -> list[Position]:
        return [one.position for key, one in sorted(self._positions.items()) if key[0] == link and key[1] > after]

    def position_behind(self, link: LinkKey, index: Index) -> Position | None:
        return next(iter(self.positions(link, index)), None)

    def batches(self, link: LinkKey, from_index: Index, end: Index, limit_bytes: int) -> list[EncodedBatch]:
        found: list[EncodedBatch] = []
        index = self.position_before(link, from_index).position.index
        if from_index >= end:
            return []
        while index < end and sum(one.size_bytes for one in found) < limit_bytes:
            one = self._batches.get((link, index))
            if one is None:
                if found:
                    return found
                raise BadChecksum("not there")
            found.append(one)
            index = one.header.end_index
        return found


@pytest.fixture(params=["memory", "rocksdb", "segments", "both"])
def on_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
        async def opened() -> None:
            store: Any = MemoryStore()
            if request.param != "memory":
                segment_bytes = {"rocksdb": 1 << 40, "segments": 1, "both": 1100}[request.param]
                store = open_store(tmp_path, "c/g1-a", segment_bytes)
            try:
                await scenario(store)
            finally:
                await store.close()

        asyncio.run(opened())

    return run


async def fill(store: Any, record: LinkRecord, encoded: list[EncodedBatch]) -> list[StoredPosition]:
    """Append, and wait until all is kept as the link asks."""
    found, stored = [], store.last_position(record.key)
    kept = asyncio.Event()

    def done(index: int, error: DiskFailed | None) -> None:
        assert error is None
        if index == encoded[-1].header.end_index:
            kept.set()

    for one in encoded:
        before = stored.position
        after = before.after(one.header, one.header_bytes)
        stored = StoredPosition(after, before.index, stored.size_bytes + one.size_bytes)
        store.append(record, one, stored, done)
        found.append(stored)
    async with asyncio.timeout(60):
        await kept.wait()
    return found


@pytest.mark.parametrize("durability", list(Durability))
def test_what_was_appended_is_read_in_order(on_store: Callable[..., None], durability: Durability) -> None:
    async def scenario(store: Any) -> None:
        record = replace(RECORD, durability=durability, flush_ms=10)
        sent = batches(30, size_bytes=900)
        stored = await fill(store, record, sent)
        assert store.last_position(record.key) == stored[-1]
        assert store.position_before(record.key, Index(57)) == stored[4]
        assert store.position_at(record.key, Index(60)) == stored[5].position
        assert store.position_at(record.key, Index(61)) is None
        assert store.positions(record.key, Index(280)) == [stored[28].position, stored[29].position]
        assert store.position_behind(record.key, Index(280)) == stored[28].position
        assert store.position_behind(record.key, Index(285)) == stored[28].position
        assert store.position_behind(record.key, Index(300)) is None
        assert as_sent(store.batches(record.key, Index(0), Index(300), 1 << 30)) == as_sent(sent)
        assert as_sent(store.batches(record.key, Index(57), Index(70), 1 << 30)) == as_sent(sent[5:7])
        assert as_sent(store.batches(record.key, Index(50), Index(300), 1)) == as_sent(sent[5:6])
        assert store.batches(record.key, Index(300), Index(300), 1) == []

    on_store(scenario)


def test_links_don_t_mix(on_store: Callable[..., None]) -> None:
    async def scenario(store: Any) -> None:
        before, behind = replace(RECORD, epoch=Epoch(1)), OTHER
        await fill(store, before, batches(2))
        await fill(store, behind, batches(3))
        assert store.last_position(RECORD.key) == StoredPosition(START, Index(0), 0)
        assert store.positions(RECORD.key, Index(0)) == []
        with pytest.raises(BadChecksum):
            store.batches(RECORD.key, Index(0), Index(10), 1)
        await fill(store, RECORD, batches(1))
        await store.keep_link(RECORD)
        await store.keep_link(OTHER)
        assert store.links() == [RECORD, OTHER]
        await store.drop(RECORD.key)
        assert store.links() == [OTHER]
        assert store.positions(RECORD.key, Index(0)) == []
        assert store.last_position(before.key).position.index == 20
        assert as_sent(store.batches(behind.key, Index(0), Index(30), 1 << 20)) == as_sent(batches(3))

    on_store(scenario)


def test_a_cut_leaves_exactly_what_is_below(on_store: Callable[..., None]) -> None:
    async def scenario(store: Any) -> None:
        stored = await fill(store, RECORD, batches(10))
        ended = replace(RECORD, is_sealed=True, end=Index(40), end_hash=stored[3].position.hash)
        await store.cut(ended, Index(40))
        assert store.links() == [ended]
        assert store.last_position(RECORD.key) == stored[3]
        assert as_sent(store.batches(RECORD.key, Index(0), Index(40), 1 << 20)) == as_sent(batches(4))
        with pytest.raises(BadChecksum):
            store.batches(RECORD.key, Index(40), Index(100), 1 << 20)
        await store.cut(ended, Index(0))
        assert store.last_position(RECORD.key) == StoredPosition(START, Index(0), 0)

    on_store(scenario)


@pytest.mark.parametrize("last", [(1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_the_last_link_that_a_message_can_name_is_one_as_any_other(
    on_store: Callable[..., None], last: tuple[int, int]
) -> None:
    """A Seal of it was written, and no start of that member got past it."""
    record = LinkRecord(QueueId(last[0]), Epoch(last[1]))

    async def scenario(store: Store) -> None:
        await fill(store, record, batches(2))
        await store.keep_link(record)
        await store.keep_cursor(record.key, CursorRecord(SubscriptionId(1)))
        assert len(store.cursors(record.key)) == 1
        assert len(store.positions(record.key, Index(0))) == 2
        await store.drop(record.key)
        assert (store.links(), store.cursors(record.key)) == ([], [])

    on_store(scenario)


def test_cursors_are_kept_by_link_and_subscription(on_store: Callable[..., None]) -> None:
    async def scenario(store: Any) -> None:
        one = CursorRecord(SubscriptionId(1), Generation(1), Token(1), Index(5))
        two = CursorRecord(SubscriptionId(2), Generation(1), Token(1), None)
        await store.keep_cursor(RECORD.key, two)
        await store.keep_cursor(RECORD.key, one)
        assert store.cursors(RECORD.key) == [one, two]
        assert store.cursors(OTHER.key) == []
        await store.keep_cursor(OTHER.key, one)
        await store.forget_cursors(RECORD.key, {SubscriptionId(1), SubscriptionId(3)})
        assert (store.cursors(RECORD.key), store.cursors(OTHER.key)) == ([two], [one])
        await store.drop(RECORD.key)
        assert store.cursors(RECORD.key) == []

    on_store(scenario)


def test_a_damaged_batch_is_never_not_there_and_can_be_mended(on_store: Callable[..., None]) -> None:
    async def scenario(store: Any) -> None:
        sent = batches(3)
        await fill(store, RECORD, sent)
        bad = replace(sent[1], payload=b"!" + sent[1].payload[1:])
        store.repair(RECORD.key, bad)
        await store.flushed()
        if isinstance(store, Store):
            assert store.lost() == []
            assert as_sent(store.batches(RECORD.key, Index(0), Index(30), 1 << 20)) == as_sent(sent[:1])
            with pytest.raises(BadChecksum):
                store.batches(RECORD.key, Index(10), Index(30), 1 << 20)
        store.repair(RECORD.key, sent[1])
        await store.flushed()
        assert as_sent(store.batches(RECORD.key, Index(0), Index(30), 1 << 20)) == as_sent(sent)

    on_store(scenario)


# ---- the disk


def in_the_database(scenario: Callable[[Store], Awaitable[None]], directory: Path) -> None:
    """Run it on a store none of whose batches go to segment files."""
    on_disk(scenario, directory, segment_bytes=1 << 40)


def on_disk(scenario: Callable[[Store], Awaitable[None]], directory: Path, segment_bytes: int = 1) -> None:
    """Run it on a store all of whose batches go to segment files."""

    async def opened() -> None:
        store = open_store(directory, "c/g1-a", segment_bytes)
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(opened())


SEGMENT = "segments/1-2.segment"


async def filled(store: Store) -> None:
    await store.keep_link(RECORD)
    await fill(store, RECORD, batches(3))


def test_whoever_has_read_as_much_as_it_wanted_finds_what_follows_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def advised(_descriptor: int, offset: int, size_bytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            asked.append((offset, size_bytes))

    async def scenario(store: Store) -> None:
        sent = batches(3)
        await fill(store, RECORD, sent)
        monkeypatch.setattr(os, "posix_fadvise", advised)
        ends = list(accumulate(one.size_bytes for one in sent))
        store.batches(RECORD.key, Index(0), Index(30), ends[1])
        store.batches(RECORD.key, Index(0), Index(30), 1 << 20)  # and has all that there is: nothing follows
        assert asked == [(ends[1], READ_AHEAD_BYTES)]

    on_disk(scenario, tmp_path)


@pytest.mark.parametrize("place", ["header", "payload"])
def test_a_flipped_bit_in_a_segment_file_is_damage_and_no_end(tmp_path: Path, place: str) -> None:
    on_disk(filled, tmp_path)
    sent = batches(3)
    for at, one in enumerate(sent):
        damaged = bytearray((tmp_path / SEGMENT).read_bytes())
        found = damaged.index(one.header_bytes if place == "header" else one.payload)
        damaged[found + 20] ^= 4
        (tmp_path / SEGMENT).write_bytes(damaged)

        async def scenario(store: Store, at: int = at, one: EncodedBatch = one) -> None:
            assert store.last_position(RECORD.key).position.index == 30
            with pytest.raises(BadChecksum, match=f"at index {at * 10} "):
                store.batches(RECORD.key, Index(at * 10), Index(30), 1 << 20)
            store.repair(RECORD.key, one)
            await store.flushed()
            assert as_sent(store.batches(RECORD.key, Index(0), Index(at * 10 + 10), 1 << 20)) == as_sent(sent[: at + 1])

        on_disk(scenario, tmp_path)


@pytest.mark.parametrize("left", ["nothing", "a part"])
def test_a_lost_segment_file_is_known_at_the_start(tmp_path: Path, left: str) -> None:
    on_disk(filled, tmp_path)
    path = tmp_path / SEGMENT
    if left == "nothing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size * 2 // 3 - 1)
    lost = [(RECORD.key, Index(index)) for index in ([0, 10, 20] if left == "nothing" else [10, 20])]

    async def scenario(store: Store) -> None:
        assert store.lost() == lost
        with pytest.raises(BadChecksum):
            store.batches(RECORD.key, Index(10), Index(30), 1 << 20)
        for _, index in lost:
            store.repair(RECORD.key, batches(3)[index // 10])
        await store.flushed()
        assert store.lost() == []
        assert as_sent(store.batches(RECORD.key, Index(0), Index(30), 1 << 20)) == as_sent(batches(3))

    on_disk(scenario, tmp_path)


def test_a_link_s_file_goes_with_it(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        for record in (RECORD, OTHER):
            await store.keep_link(record)
            await fill(store, record, batches(2))
        await store.drop(OTHER.key)
        assert [path.name for path in (tmp_path / "segments").iterdir()] == ["1-2.segment"]
        await store.cut(RECORD, Index(0))
        assert list((tmp_path / "segments").iterdir()) == []

    on_disk(scenario, tmp_path)


@pytest.mark.parametrize("durability", [Durability.INTERVAL, Durability.ASYNC, Durability.MEMORY])
def test_other_durabilities_keep_their_batches_in_the_database(tmp_path: Path, durability: Durability) -> None:
    async def scenario(store: Store) -> None:
        await fill(store, replace(RECORD, durability=durability, flush_ms=10), batches(3))
        assert list((tmp_path / "segments").iterdir()) == []

    on_disk(scenario, tmp_path)


def test_a_full_disk_fails_the_write_and_harms_nothing_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store) -> None:
        await filled(store)
        real = os.write

        def full(_descriptor: int, parts: list[bytes]) -> int:
            real(_descriptor, parts[0])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            position = replace(store.last_position(RECORD.key).position, index=Index(40))
            stored = StoredPosition(position, Index(30), 0)
            (one,) = batches(1, first_index=30)
            store.append(RECORD, one, stored, lambda *found: told.set_result(found))
            assert isinstance((await told)[1], DiskFailed)
        with pytest.raises(DiskFailed, match="No space left"):
            await store.flushed()

    async def afterwards(store: Store) -> None:
        assert store.last_position(RECORD.key).position.index == 30
        await fill(store, RECORD, batches(1, first_index=30))
        assert as_sent(store.batches(RECORD.key, Index(0), Index(40), 1 << 20)) == as_sent(batches(4))

    on_disk(scenario, tmp_path)
    on_disk(afterwards, tmp_path)


def test_a_directory_of_a_newer_version_is_refused_and_of_the_first_is_read(tmp_path: Path) -> None:
    def become(identity: dict[str, Any]) -> None:
        database = rocksdict.Rdict(str(tmp_path / "data"), rocksdict.Options(raw_mode=True))
        found = json.loads(database[b"Midentity"])
        found.pop("format", None)
        database[b"Midentity"] = json.dumps(found | identity).encode()
        database.close()

    async def in_the_database() -> None:
        store = open_store(tmp_path, "c/g1-a", 1 << 40)
        await filled(store)
        await store.close()

    async def scenario(store: Store) -> None:
        await fill(store, RECORD, batches(2, first_index=30))
        assert as_sent(store.batches(RECORD.key, Index(0), Index(50), 1 << 20)) == as_sent(batches(5))

    asyncio.run(in_the_database())
    shutil.rmtree(tmp_path / "segments")
    become({})
    on_disk(scenario, tmp_path)
    become({"format": 3})
    with pytest.raises(InvalidArgument, match="format 3"):
        open_store(tmp_path, "c/g1-a")


def test_a_file_system_without_locks_is_no_other_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InvalidArgument, match="No locks available"):
        open_store(tmp_path, "c/g1-a")


def test_records_without_their_database_are_no_blank_disk(tmp_path: Path) -> None:
    """The two lie on volumes of their own, and one isn't mounted: what it finds unnamed, a start removes."""

    async def scenario() -> None:
        first = open_store(tmp_path, "c/g1-a", segment_bytes=1)
        await filled(first)
        await first.close()
        (tmp_path / "data").rename(tmp_path / "elsewhere")
        (tmp_path / "data").mkdir()
        with pytest.raises(DiskFailed, match="is it mounted"):
            open_store(tmp_path, "c/g1-a")
        (tmp_path / "data").rmdir()
        (tmp_path / "elsewhere").rename(tmp_path / "data")
        second = open_store(tmp_path, "c/g1-a")
        assert second.incarnation == Incarnation(first.incarnation.disk_id, 2)
        assert as_sent(second.batches(RECORD.key, Index(0), Index(30), 1 << 20)) == as_sent(batches(3))
        await second.close()

    asyncio.run(scenario())


def test_a_database_without_its_log_is_no_shorter_one(tmp_path: Path) -> None:
    """`find -name '*.log' -delete`, while the member is down: it sealed with what was left, as whole, and the good copy was cut to that."""
    member, killed = tmp_path / "member", tmp_path / "killed"

    async def scenario() -> None:
        for number in range(2):
            store = open_store(member, "c/g1-a")
            await fill(store, RECORD, batches(3, first_index=number * 30))
            shutil.copytree(member, killed, dirs_exist_ok=True)
            await store.close()
        for log in killed.glob("data/*.log"):
            log.unlink()
        with pytest.raises(DiskFailed, match="was it deleted"):
            open_store(killed, "c/g1-a")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskFailed)]
)
def test_whoever_lacks_only_room_is_not_sent_for_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: type[SeriatimError]
) -> None:
    """Somebody else filled the disk, and the broker is started again: RocksDB writes tables of what its log has."""

    def failing(*_: object) -> None:
        raise Exception(f"IO error: {os.strerror(number)}: While appending to file: 000010.blob")  # noqa: TRY002 - as it does

    with monkeypatch.context() as patch:
        patch.setattr(rocksdict, "Rdict", failing)
        with pytest.raises(told, match=os.strerror(number)) as error:
            open_store(tmp_path, "c/g1-a")
    assert ("an empty directory" in str(error.value)) is (number == errno.EIO)
    on_disk(filled, tmp_path)


def test_each_start_is_another_and_a_directory_has_one_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = open_store(tmp_path, "c/g1-a")
        with pytest.raises(InvalidArgument, match="another broker"):
            open_store(tmp_path, "c/g1-a")
        await fill(first, RECORD, batches(3))
        await first.keep_link(RECORD)
        await first.close()
        second = open_store(tmp_path, "c/g1-a")
        assert second.incarnation.disk_id == first.incarnation.disk_id
        assert (first.incarnation.start, second.incarnation.start) == (1, 2)
        assert second.links() == [RECORD]
        assert as_sent(second.batches(RECORD.key, Index(0), Index(30), 1 << 20)) == as_sent(batches(3))
        await second.close()
        with pytest.raises(InvalidArgument, match="belongs to c/g1-a"):
            open_store(tmp_path, "c/g1-b")

    asyncio.run(scenario())


WRITER = """
import asyncio, sys
from pathlib import Path
from seriatim.broker_group.store import open_store
from tests.integration.broker_members import batches
from tests.integration.test_broker_store import RECORD, fill

async def main():
    store = open_store(Path(sys.argv[1]), "c/g1-a")
    for number in range(1000):
        await fill(store, RECORD, batches(4, first_index=number * 40, size_bytes=4000))
        print((number + 1) * 40, flush=True)

asyncio.run(main())
"""


def test_what_was_said_to_be_flushed_outlives_sigkill(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "disk")], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )  # fmt: skip
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(25)]
    process.kill()
    said += [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    process.wait()

    async def scenario() -> None:
        store = open_store(tmp_path / "disk", "c/g1-a")
        end = store.last_position(RECORD.key).position.index
        assert end >= said[-1]
        found = []
        while len(found) * 10 < end:
            found += store.batches(RECORD.key, Index(len(found) * 10), end, 1 << 20)
        expected = [
            one for number in range(end // 40 + 1) for one in batches(4, first_index=number * 40, size_bytes=4000)
        ]
        assert as_sent(found) == as_sent(expected[: end // 10])
        await store.close()

    asyncio.run(scenario())


FAILING = """
import asyncio, resource, signal, sys
from pathlib import Path
from seriatim.broker_group.store import open_store
from seriatim.protocol.errors import DiskFailed
from tests.integration.broker_members import batches
from tests.integration.test_broker_store import RECORD, fill

async def main():
    store = open_store(Path(sys.argv[1]), "c/g1-a", segment_bytes=1 << 30)
    await fill(store, RECORD, batches(4))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))  # as a disk that takes no more
    for ending in (store.keep_link(RECORD), store.close()):
        try:
            await ending
        except DiskFailed as error:
            print(error.message)

asyncio.run(main())
"""


def test_a_disk_that_fails_is_told_in_a_line_when_it_writes_and_when_it_closes(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, str(tmp_path / "disk")], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )  # fmt: skip
    told = ended.stdout.splitlines()
    assert len(told) == 2
    assert all("File too large" in one for one in told)
    assert not defects(ended.stderr)


def test_damage_in_a_table_ends_writing_when_that_is_rewritten_also_after_its_batch_was_mended(tmp_path: Path) -> None:
    """RocksDB trusts no table that it can't read, and so does the member: it says what to do."""
    sent = batches(60)

    def reopened(scenario: Callable[[Store], Awaitable[None]]) -> None:
        async def opened() -> None:
            store = open_store(tmp_path, "c/g1-a", segment_bytes=1 << 30)
            try:
                await scenario(store)
            finally:
                with contextlib.suppress(DiskFailed):
                    await store.close()

        asyncio.run(opened())

    async def mended(store: Store) -> None:
        store.repair(RECORD.key, sent[0])
        await store.flushed()

    async def rewritten(store: Store) -> None:
        for _ in range(50):  # a table is rewritten by a thread of RocksDB's
            await store.keep_link(RECORD)
            await asyncio.sleep(0.02)

    reopened(filled)
    reopened(mended)
    table = min(path for path in (tmp_path / "data").glob("*.sst") if sent[0].payload in path.read_bytes())
    damaged = bytearray(table.read_bytes())
    damaged[damaged.index(sent[0].payload) + 5] ^= 4
    table.write_bytes(damaged)
    told = ""
    for _ in range(12):
        try:
            reopened(rewritten)
        except DiskFailed as error:
            told = str(error)
            break
    assert "Corruption" in told
    assert "empty directory" in told


def test_every_log_that_can_hold_unsynced_bytes_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fdatasync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", noted)
    directories: list[int] = []
    monkeypatch.setattr(os, "fsync", directories.append)
    logs = LogFiles(tmp_path)
    steps: list[tuple[list[str], list[str], int]] = [
        (["000004.log"], ["000004.log"], 1),
        (["000004.log"], ["000004.log"], 1),
        # superseded since: once more, and the new one with its directory
        (["000004.log", "000007.log"], ["000004.log", "000007.log"], 2),
        (["000004.log", "000007.log"], ["000007.log"], 2),
        (["000004.log", "000007.log", "000009.log", "000010.log"], ["000007.log", "000009.log", "000010.log"], 3),
        (["000010.log"], ["000010.log"], 3),
        (["000010.log", "000011.log"], ["000010.log", "000011.log"], 4),
        (["000011.log"], ["000011.log"], 4),
    ]
    for present, expected, directory_syncs in steps:
        for path in tmp_path.iterdir():
            if path.name not in present:
                path.unlink()
        for name in present:
            (tmp_path / name).touch()
        with (tmp_path / present[-1]).open("ab") as newest:
            newest.write(b"a write")
        synced.clear()
        logs.wrote()
        logs.sync()
        assert list(dict.fromkeys(synced)) == expected
        assert len(directories) == directory_syncs
    logs.close()


def test_the_log_that_a_write_went_to_is_synced_whenever_the_database_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(64 * 1024)
    database = rocksdict.Rdict(str(tmp_path), options)
    logs = LogFiles(tmp_path)
    synced: set[str] = set()
    listings: list[object] = []
    real_sync, real_list = os.fdatasync, os.listdir

    def noted(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name.removesuffix(" (deleted)"))
        real_sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", noted)
    monkeypatch.setattr(os, "listdir", lambda path: listings.append(path) or real_list(path))
    found: set[str] = set()
    for number in range(600):
        written: set[str] = set()
        if number % 97 == 0:
            database.flush(True)
        for part in range(number % 3 + 1):  # of some groups of writes, too
            before = sizes(tmp_path, "*.log")
            database.put(b"%d %d" % (number, part), b"v" * (1 + number * 7 % 900))
            logs.wrote()
            written |= {name for name, size in sizes(tmp_path, "*.log").items() if size > before.get(name, 0)}
        assert written
        logs.sync()
        assert written & sizes(tmp_path, "*.log").keys() <= synced, "or a table file has superseded it"
        synced.clear()
        found |= written
    assert len(found) > 5
    assert len(listings) < 100
    logs.close()
    database.close()


def test_what_rocksdb_notes_of_itself_doesn_t_grow_with_all_that_is_ever_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MEMORY_BYTES", 64 * 1024)
    monkeypatch.setattr(store_module, "NOTES_BYTES", 64 * 1024)
    record = replace(RECORD, durability=Durability.ASYNC, flush_ms=20)

    async def scenario(store: Store) -> None:
        for number in range(40):
            await fill(store, record, batches(10, first_index=number * 100, size_bytes=15_000))

    in_the_database(scenario, tmp_path)
    notes = list((tmp_path / "data").glob("LOG*"))
    assert len(notes) > 1, "it had more to say than goes into one"
    assert sum(path.stat().st_size for path in notes) < 4 * 64 * 1024


def test_what_was_forgotten_is_cleared_away_also_where_little_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links come and go for months, and each read goes through what RocksDB notes of those that went."""
    monkeypatch.setattr(store_module, "MOST_FORGOTTEN", 5)

    def noted(store: Store) -> int:
        tables = re.search(
            r"# range deletions=(\d+)", store._database.property_value("rocksdb.aggregated-table-properties")
        )
        assert tables is not None
        return int(store._database.property_value("rocksdb.num-entries-active-mem-table")) + int(tables[1])

    async def scenario(store: Store) -> None:
        for number in range(80):
            await store.drop((RECORD.queue_id, Epoch(100 + number)))
            store.make_room(is_short=False, is_enough_to_copy=False)
        assert noted(store) >= 80 * 5
        async with asyncio.timeout(60):
            while noted(store) >= 80 * 5 // 2:
                await store.drop((RECORD.queue_id, Epoch(200)))
                store.make_room(is_short=False, is_enough_to_copy=True)

    in_the_database(scenario, tmp_path)


def test_the_room_of_much_that_was_dropped_is_free_soon_also_where_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue was deleted to have its room; until its broker's own was short, RocksDB kept all of it."""
    monkeypatch.setattr(store_module, "MEMORY_BYTES", 64 * 1024)
    monkeypatch.setattr(store_module, "MOST_FORGOTTEN_BYTES", 1024 * 1024)
    record = replace(RECORD, durability=Durability.ASYNC, flush_ms=20)

    def used_bytes() -> int:
        return sum(sizes(tmp_path / "data", "*.blob").values())

    async def scenario(store: Store) -> None:
        for number in range(10):
            await fill(store, record, batches(10, first_index=number * 100, size_bytes=20_000))
        store.make_room(is_short=False, is_enough_to_copy=True)
        held_bytes = used_bytes()
        assert held_bytes > 1024 * 1024
        await store.drop(record.key)
        async with asyncio.timeout(60):
            while used_bytes() > held_bytes // 10:
                store.make_room(is_short=False, is_enough_to_copy=True)
                await asyncio.sleep(0.01)

    in_the_database(scenario, tmp_path)


def test_a_power_failure_while_a_log_has_a_successor_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a flush. Of the older log is left what was synced, of the newer all: the system wrote it by itself."""
    record = replace(RECORD, durability=Durability.ASYNC, flush_ms=10**7)
    monkeypatch.setattr(store_module, "MEMORY_BYTES", 16 * 1024 * 1024)
    data, image = tmp_path / "disk" / "data", tmp_path / "image" / "data"
    synced: dict[str, int] = {}
    real = os.fdatasync

    def noted(descriptor: int) -> None:
        real(descriptor)
        synced[Path(f"/proc/self/fd/{descriptor}").readlink().name] = os.fstat(descriptor).st_size

    def is_copied() -> bool:
        logs = sorted(data.glob("*.log"))
        if len(logs) < 2:
            return False
        shutil.rmtree(image.parent, ignore_errors=True)
        image.mkdir(parents=True)
        try:
            for path in logs:  # before they go: their table is being written
                os.link(path, image / path.name)
            for path in [*data.glob("[CM]*"), *data.glob("*.*")]:  # what is named before who names it has others named
                if path.suffix != ".log":
                    shutil.copy(path, image)
        except FileNotFoundError:  # it was written meanwhile
            return False
        os.truncate(image / logs[0].name, synced[logs[0].name])
        return True

    async def until_there_are_two(store: Store) -> None:
        await store.keep_link(record)
        end = 0
        while not is_copied():
            await fill(store, record, batches(1, first_index=end, size_bytes=100_000))
            end += 10

    async def is_without_a_hole(store: Store) -> None:
        end = store.last_position(record.key).position.index
        found = store.batches(record.key, Index(0), end, 1 << 30)
        assert found[-1].header.end_index == end > 0

    monkeypatch.setattr(os, "fdatasync", noted)
    in_the_database(until_there_are_two, data.parent)
    in_the_database(is_without_a_hole, image.parent)


class Sink:
    """A disk that takes all."""

    def __init__(self) -> None:
        self.written = 0

    def placed(self, writes: Any) -> Any:
        return writes

    def write(self, writes: Any, *, uses_log: bool) -> None:
        self.written += len(writes)

    def flush(self) -> None: ...


@pytest.mark.parametrize(("failure", "is_defect"), [(OSError("broken"), False), (KeyError("a defect"), True)])
def test_a_disk_that_failed_once_is_not_trusted_again(
    failure: Exception, is_defect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Sink):
        is_broken = True

        def flush(self) -> None:
            if self.is_broken:
                raise failure

    async def scenario() -> None:
        sink = Failing()
        writer = Writer(sink, asyncio.get_running_loop())
        told: list[tuple[int, DiskFailed | None]] = []
        is_told = asyncio.Event()

        def done(tag: int, error: DiskFailed | None) -> None:
            told.append((tag, error))
            is_told.set()

        for tag in (1, 2):
            is_told.clear()
            writer.submit(Write(((b"k", b"v"),), done, tag))
            async with asyncio.timeout(60):
                await is_told.wait()
            sink.is_broken = False
        assert [tag for tag, _ in told] == [1, 2]
        assert all(isinstance(error, DiskFailed) for _, error in told)
        assert sink.written == 1
        await asyncio.to_thread(writer.close)

    asyncio.run(scenario())
    assert [bool(one.exc_info) for one in caplog.records if "write failed" in one.getMessage()] == [is_defect]


def test_a_disk_that_answers_nothing_stands_still_but_not_one_that_is_put_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seriatim.broker_group.writer.STILL_S", 0.0)

    class Still(Sink):
        def __init__(self) -> None:
            super().__init__()
            self.came, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)

        def flush(self) -> None:
            self.came.release()
            self.may_go_on.acquire()

        def clear_up(self, *, is_urgent: bool) -> None:
            self.flush()

    async def scenario() -> None:
        sink = Still()
        writer = Writer(sink, asyncio.get_running_loop())
        done = asyncio.Event()
        writer.submit(Write(((b"k", b"v"),), lambda *_: done.set(), clears_up=True))
        seen = []
        for _ in ("clearing up", "flushing"):
            await asyncio.to_thread(sink.came.acquire)
            seen.append(writer.stands_still)
            sink.may_go_on.release()
        async with asyncio.timeout(60):
            await done.wait()
        await asyncio.to_thread(writer.close)
        assert [*seen, writer.stands_still] == [False, True, False]

    asyncio.run(scenario())


def test_a_slow_disk_that_answers_each_call_doesn_t_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted from the beginning of all that waited, which may be 512 MiB: members with disks of 5 MB/s left, one after the other."""
    now_s = 0.0
    monkeypatch.setattr("seriatim.broker_group.writer.time", SimpleNamespace(monotonic=lambda: now_s))

    class Slow(Sink):
        def __init__(self) -> None:
            super().__init__()
            self.may_begin = threading.Event()
            self.calls: list[tuple[str, bool]] = []

        def answers(self, what: str) -> None:
            nonlocal now_s
            now_s += 6.0
            self.calls.append((what, writer.stands_still))

        def placed(self, writes: Any) -> Any:
            self.may_begin.wait()
            self.answers(f"place {len(writes)}")
            return writes

        def write(self, writes: Any, *, uses_log: bool) -> None:
            self.answers(f"write {len(writes)}")

        def flush(self) -> None:
            self.answers("flush")

        def empty_memory(self) -> None:
            self.answers("empty memory")

        def remove_segments(self, link: Any) -> None:
            self.answers("remove")

    async def scenario() -> None:
        nonlocal writer
        writer = Writer(sink, asyncio.get_running_loop())
        size_bytes = RUN_BYTES // 2  # so much of them is placed in one call
        for rest in ({}, {}, {"empties_memory": True, "empties": (QueueId(1), Epoch(1))}):
            writer.submit(Write(((b"k", b"v"),), lambda *_: None, size_bytes=size_bytes, **rest))
        sink.may_begin.set()
        await asyncio.to_thread(writer.close)

    sink = Slow()
    writer: Writer
    asyncio.run(scenario())
    assert {what for what, _ in sink.calls} >= {"write 1", "flush", "empty memory", "remove"}
    assert [what for what, is_still in sink.calls if is_still] == []


def test_all_that_waits_is_written_in_runs_that_a_slow_disk_can_be_seen_to_get_through() -> None:
    write = partial(Write, ((b"k", b"v"),), lambda *_: None)
    half = RUN_BYTES // 2
    writes = [
        write(size_bytes=half),
        write(size_bytes=half),
        write(size_bytes=1),
        write(empties=(QueueId(1), Epoch(1))),
        write(),
    ]
    assert _runs(writes) == [writes[:2], writes[2:4], writes[4:]]
    assert _runs(writes[:2]) == [writes[:2]]
    assert _runs([]) == [[]]


def test_a_slow_disk_is_told_of_at_once_and_then_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    """Its senders go on with the next group, and nothing else says why."""

    class Slow(Sink):
        def flush(self) -> None:
            time.sleep(SLOW_S)

    async def scenario() -> None:
        writer = Writer(Slow(), asyncio.get_running_loop())
        for _ in range(3):
            flushed = asyncio.Event()
            writer.submit(Write(((b"k", b"v"),), lambda *_: flushed.set()))  # noqa: B023 - awaited at once
            async with asyncio.timeout(60):
                await flushed.wait()
        await asyncio.to_thread(writer.close)

    asyncio.run(scenario())
    assert len([one for one in caplog.records if "the disk is slow took_ms=" in one.getMessage()]) == 1

    slow = SlowDisk()
    assert slow.took(SLOW_S / 2, 0.0) is None
    assert slow.took(SLOW_S, 1.0) == (1, SLOW_S)
    assert slow.took(3.0, 2.0) is None
    assert slow.took(2.0, 1.0 + SLOW_AGAIN_S) == (2, 3.0)
    assert slow.took(SLOW_S / 2, 100.0) is None
    assert slow.took(SLOW_S, 101.0) == (1, SLOW_S)
