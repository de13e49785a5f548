"""One contract for the store: the real RocksDB and a simple one in memory; and what survives SIGKILL."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import START, LinkRecord, Position
from seriatim.broker_group.log_files import LogFiles
from seriatim.broker_group.store import LinkKey, Store, StoredPosition, open_store
from seriatim.broker_group.writer import Write, Writer
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.chain import Durability
from seriatim.protocol.errors import BadChecksum, DiskFailed, InvalidArgument
from seriatim.protocol.hashing import hash_after_batch
from seriatim.protocol.marks import raised
from seriatim.protocol.names import Epoch, Generation, Index, QueueId, SubscriptionId, Token
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

    def repair(self, link: LinkKey, encoded: EncodedBatch, done: Any) -> None:
        self._batches[link, encoded.header.first_index] = encoded
        asyncio.get_running_loop().call_soon(done, 0, None)

    async def keep_link(self, record: LinkRecord) -> None:
        self._links[record.key] = record

    async def keep_cursor(self, link: LinkKey, cursor: CursorRecord) -> None:
        self._cursors[link, cursor.subscription_id] = cursor

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

    def cursor(self, link: LinkKey, subscription_id: SubscriptionId) -> CursorRecord | None:
        return self._cursors.get((link, subscription_id))

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


@pytest.fixture(params=["memory", "rocksdb"])
def on_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
        async def opened() -> None:
            store = MemoryStore() if request.param == "memory" else open_store(tmp_path, "c/g1-a")
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
        after = Position(
            one.header.end_index,
            hash_after_batch(before.hash, one.header_bytes),
            raised(before.marks, one.header.spans),
        )
        stored = StoredPosition(after, before.index, stored.size_bytes + one.size_bytes)
        store.append(record, one, stored, done)
        found.append(stored)
    async with asyncio.timeout(10):
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


def test_cursors_are_kept_by_link_and_subscription(on_store: Callable[..., None]) -> None:
    async def scenario(store: Any) -> None:
        one = CursorRecord(SubscriptionId(1), Generation(1), Token(1), Index(5))
        two = CursorRecord(SubscriptionId(2), Generation(1), Token(1), None)
        await store.keep_cursor(RECORD.key, two)
        await store.keep_cursor(RECORD.key, one)
        assert store.cursors(RECORD.key) == [one, two]
        assert store.cursor(RECORD.key, SubscriptionId(2)) == two
        assert store.cursor(OTHER.key, SubscriptionId(2)) is None
        await store.drop(RECORD.key)
        assert store.cursors(RECORD.key) == []

    on_store(scenario)


def test_a_damaged_batch_is_never_not_there_and_can_be_mended(on_store: Callable[..., None]) -> None:
    async def scenario(store: Any) -> None:
        sent = batches(3)
        await fill(store, RECORD, sent)
        bad = replace(sent[1], payload=b"!" + sent[1].payload[1:])
        store.repair(RECORD.key, bad, lambda *_: None)
        await store.flushed()
        if isinstance(store, Store):
            assert as_sent(store.batches(RECORD.key, Index(0), Index(30), 1 << 20)) == as_sent(sent[:1])
            with pytest.raises(BadChecksum):
                store.batches(RECORD.key, Index(10), Index(30), 1 << 20)
        store.repair(RECORD.key, sent[1], lambda *_: None)
        await store.flushed()
        assert as_sent(store.batches(RECORD.key, Index(0), Index(30), 1 << 20)) == as_sent(sent)

    on_store(scenario)


# ---- the disk


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
    ]
    for present, expected, directory_syncs in steps:
        for path in tmp_path.iterdir():
            if path.name not in present:
                path.unlink()
        for name in present:
            (tmp_path / name).touch()
        synced.clear()
        logs.sync()
        assert synced == expected
        assert len(directories) == directory_syncs
    logs.close()


def test_a_disk_that_failed_once_is_not_trusted_again() -> None:
    class Failing:
        def __init__(self) -> None:
            self.is_broken = True
            self.written = 0

        def write(self, writes: Any, *, uses_log: bool) -> None:
            self.written += len(writes)

        def flush(self) -> None:
            if self.is_broken:
                raise OSError("broken")

        def empty_memory(self) -> None:
            pass

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
            async with asyncio.timeout(5):
                await is_told.wait()
            sink.is_broken = False
        assert [tag for tag, _ in told] == [1, 2]
        assert all(isinstance(error, DiskFailed) for _, error in told)
        assert sink.written == 1
        await asyncio.to_thread(writer.close)

    asyncio.run(scenario())
