"""A member's database with damage that RocksDB takes for a write that a power failure tore: it isn't opened as a shorter one.

A member that did would seal with what is left as all it acknowledged, and the other one's good copy would be cut to that.
"""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seriatim.broker_group import flush_mark
from seriatim.broker_group.core import rocksdb_log
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.flush_mark import FlushMark
from seriatim.broker_group.store import Store, open_store
from seriatim.protocol.chain import Durability
from seriatim.protocol.errors import DiskFailed
from seriatim.protocol.names import Epoch, Index
from tests.integration.broker_members import as_sent, batches
from tests.integration.test_broker_store import RECORD, fill

COUNT = 40
SENT = batches(COUNT)
PLACE = "c/g1-a"
IN_THE_LOG = 1 << 40  # bytes from which on a batch goes to a segment file
HEADER_BYTES = 7
SECTOR_BYTES = rocksdb_log.SECTOR_BYTES
LENGTH_AT = 4


def left(directory: Path, *, flushes_at: tuple[int, ...] = (), record: LinkRecord = RECORD) -> Path:
    """What a power failure leaves of a member that was told to keep all of `SENT`, each in a record of the log, or a table."""

    async def lived() -> None:
        store = open_store(directory / "alive", PLACE, IN_THE_LOG)
        await store.keep_link(record)
        for number, one in enumerate(SENT, 1):
            await fill(store, record, [one])
            if number in flushes_at:
                vars(store)["_database"].flush(True)  # as where its memory is full
        shutil.copytree(directory / "alive", directory / "left")
        await store.close()

    asyncio.run(lived())
    return directory / "left"


def opened(directory: Path, record: LinkRecord = RECORD) -> int:
    """How many of `SENT` a member that starts on the directory has; raises as `open_store`."""

    async def count() -> int:
        store: Store = open_store(directory, PLACE, IN_THE_LOG)
        try:
            end = store.last_position(record.key).position.index
            assert as_sent(store.batches(record.key, Index(0), end, 1 << 30)) == as_sent(SENT[: end // 10])
            return end // 10
        finally:
            await store.close()

    return asyncio.run(count())


def copied(directory: Path, name: str) -> Path:
    return shutil.copytree(directory, directory.parent / name)


def log_of(directory: Path) -> Path:
    return max(directory.glob("data/*.log"), key=lambda path: path.stat().st_size)


def places(log: bytes) -> Iterator[tuple[int, int]]:
    """Where each record begins and how long its payload is."""
    at = 0
    while at + HEADER_BYTES <= len(log):
        if rocksdb_log.BLOCK_BYTES - at % rocksdb_log.BLOCK_BYTES < HEADER_BYTES:
            at += rocksdb_log.BLOCK_BYTES - at % rocksdb_log.BLOCK_BYTES
        length, kind = struct.unpack_from("<HB", log, at + LENGTH_AT)
        if not kind:
            return
        yield at, length
        at += HEADER_BYTES + length


def harm(path: Path, at: int, changed: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(changed)


def flip(path: Path, at: int, bit: int) -> None:
    harm(path, at + bit // 8, bytes([path.read_bytes()[at + bit // 8] ^ 1 << bit % 8]))


def test_a_length_in_the_log_that_points_beyond_its_end_is_damage(tmp_path: Path) -> None:
    disk = left(tmp_path)
    found = list(places(log_of(disk).read_bytes()))
    for number, bits in ((0, (14,)), (-2, (9, 14)), (-1, (0, 1, 7, 14))):
        for bit in bits:
            image = copied(disk, f"{number} {bit}")
            (image / flush_mark.NAME).unlink()  # it is seen in the log itself
            flip(log_of(image), found[number][0] + LENGTH_AT, bit)
            for _ in range(2):  # and at each start
                with pytest.raises(DiskFailed, match="Corruption"):
                    opened(image)
    assert opened(disk) == COUNT


@pytest.mark.parametrize(("first", "behind"), [(-2, -1), (-2, None), (-1, None), (3, 5)])
@pytest.mark.parametrize("within", [0, 50])
def test_zeros_in_the_place_of_what_was_flushed_are_damage(
    tmp_path: Path, first: int, behind: int | None, within: int
) -> None:
    """As sectors that the disk has lost: from a record's begin on, or from within it, up to another one or the end."""
    disk = left(tmp_path)
    log = log_of(disk)
    content = log.read_bytes()
    found = [at for at, _ in places(content)]
    at, end = found[first] + within, len(content) if behind is None else found[behind]
    harm(log, at, bytes(end - at))
    with pytest.raises(DiskFailed, match="Corruption"):
        opened(disk)


def test_a_log_that_ends_before_what_was_flushed_is_no_torn_one(tmp_path: Path) -> None:
    disk = left(tmp_path)
    found = list(places(log_of(disk).read_bytes()))
    for number, kept in ((-1, COUNT - 1), (-4, COUNT - 4), (0, 0)):
        image = copied(disk, str(number))
        with log_of(image).open("r+b") as file:
            file.truncate(found[number][0])
        unmarked = copied(image, f"{number} unmarked")
        for _ in range(2):
            with pytest.raises(
                DiskFailed,
                match=r"Corruption: .*(log is damaged at|changes are missing).*only while its peer is in sync.*never both",
            ):
                opened(image)
        (unmarked / flush_mark.NAME).unlink()
        assert opened(unmarked) == kept  # as RocksDB has it


def test_what_is_torn_behind_what_was_flushed_never_was(tmp_path: Path) -> None:
    disk = left(tmp_path)
    content = log_of(disk).read_bytes()
    *_, (at, length) = places(content)
    for kept in (1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + length - 1):
        image = copied(disk, str(kept))
        log_of(image).write_bytes(content + content[at : at + kept])
        assert opened(image) == COUNT


def large(directory: Path) -> tuple[Path, Path]:
    """What a power failure leaves behind `SENT` and amid a batch of some blocks of the log, and the mark of before that."""

    async def lived() -> None:
        store = open_store(directory / "alive", PLACE, IN_THE_LOG)
        await store.keep_link(RECORD)
        await fill(store, RECORD, SENT)
        shutil.copy(directory / "alive" / flush_mark.NAME, directory / "mark")
        await fill(store, RECORD, batches(1, rows=40, first_index=COUNT * 10, size_bytes=2000))
        shutil.copytree(directory / "alive", directory / "left")
        await store.close()

    asyncio.run(lived())
    shutil.copy(directory / "mark", directory / "left" / flush_mark.NAME)
    return directory / "left", log_of(directory / "left")


def unflushed_sectors(disk: Path, log: Path) -> list[int]:
    """Where sectors begin of which nothing was flushed, some of them: behind the first, at the blocks' bounds, before the end."""
    mark = FlushMark(disk)
    mark.close()
    sectors = range(
        -(-mark.before.logs[int(log.stem)] // SECTOR_BYTES) * SECTOR_BYTES, log.stat().st_size, SECTOR_BYTES
    )
    bounds = [at for at in sectors if at % rocksdb_log.BLOCK_BYTES in (0, SECTOR_BYTES)]
    assert len(bounds) >= 4
    return sorted({sectors[0], sectors[1], *bounds, sectors[-1]})


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("has_successor", [True, False])
def test_a_log_that_has_its_length_and_not_its_last_bytes_is_a_torn_one(
    tmp_path: Path, *, is_marked: bool, has_successor: bool
) -> None:
    """As ext4 leaves it where power fails amid a write: RocksDB told it as corruption, and the member wasn't started without an empty directory."""
    disk, log = large(tmp_path)
    if has_successor:
        (log.parent / f"{int(log.stem) + 1:06}.log").touch()
    sectors = unflushed_sectors(disk, log)
    if not is_marked:
        (disk / flush_mark.NAME).unlink()
    for at in sectors:
        image = copied(disk, str(at))
        torn = image / log.relative_to(disk)
        harm(torn, at, bytes(torn.stat().st_size - at))
        for _ in range(2):
            assert opened(image) == COUNT


@pytest.mark.parametrize("how", ["flushed", "bytes behind", "another log behind"])
def test_nothing_is_cut_off_that_was_flushed_or_has_more_behind_it(tmp_path: Path, how: str) -> None:
    disk, log = large(tmp_path)
    at, size_bytes = unflushed_sectors(disk, log)[1], log.stat().st_size
    if how == "flushed":
        at -= 2 * SECTOR_BYTES
    harm(log, at, bytes(size_bytes - at))
    if how == "bytes behind":
        harm(log, size_bytes - 1, b"\x01")
    if how == "another log behind":
        (log.parent / f"{int(log.stem) + 1:06}.log").write_bytes(b"\x01" * 20)
    content = log.read_bytes()
    for _ in range(2):
        with pytest.raises(DiskFailed, match="Corruption"):
            opened(disk)
    assert log.read_bytes() == content


@pytest.mark.parametrize("how", ["cut", "zeros", "whole"])
def test_an_older_log_that_lacks_its_end_leaves_no_hole_before_a_newer_one(tmp_path: Path, how: str) -> None:
    """Both are there while what the older one has is written to a table: RocksDB takes its end for torn, and goes on with the newer one."""
    alive, disk = tmp_path / "alive", tmp_path / "left"

    async def lived() -> None:
        store = open_store(alive, PLACE, IN_THE_LOG)
        await store.keep_link(RECORD)
        for number, one in enumerate(SENT, 1):
            await fill(store, RECORD, [one])
            if number == COUNT // 2:
                shutil.copytree(alive, disk)  # as long as the table isn't there
                vars(store)["_database"].flush(True)
        for path in (*alive.glob("data/*.log"), alive / flush_mark.NAME):
            shutil.copy(path, disk / path.relative_to(alive))
        await store.close()

    asyncio.run(lived())
    older, newer = sorted(path for path in disk.glob("data/*.log") if path.stat().st_size)
    # The newer one's first flush was the older one's last: it is marked as it was then.
    marked = FlushMark(disk)
    assert marked.before.logs.keys() <= {int(newer.stem)}
    marked.keep(marked.before.number, {**marked.before.logs, int(older.stem): older.stat().st_size})
    marked.close()
    content = older.read_bytes()
    at = list(places(content))[-3][0]
    if how == "cut":
        older.write_bytes(content[:at])
    elif how == "zeros":
        harm(older, at, bytes(len(content) - at))
    if how == "whole":
        assert opened(disk) == COUNT
    else:
        with pytest.raises(DiskFailed, match="Corruption"):
            opened(disk)


def test_how_far_each_log_was_flushed_is_kept(tmp_path: Path) -> None:
    disk = left(tmp_path)
    mark = FlushMark(disk)
    assert mark.before.logs == {int(log_of(disk).stem): log_of(disk).stat().st_size}
    for logs in ({}, {7: 70}, {number: number for number in range(100)}):
        mark.keep(5, logs)
        again = FlushMark(disk)
        assert (again.before.number, again.before.logs) == (5, dict(sorted(logs.items())[-31:]))
        again.close()
    mark.close()


@pytest.mark.parametrize("number", [-1, -2, -3])
def test_a_length_in_manifest_that_points_beyond_its_end_is_damage(tmp_path: Path, number: int) -> None:
    """It left out a table: a hole in the middle of a link, and where nothing was written behind it a shorter one."""
    disk = left(tmp_path, flushes_at=(10, 20))
    (manifest,) = disk.glob("data/MANIFEST-*")
    flip(manifest, list(places(manifest.read_bytes()))[number][0] + LENGTH_AT, 14)
    with pytest.raises(DiskFailed, match=r"Corruption: MANIFEST-\d+ is damaged"):
        opened(disk)


@pytest.mark.parametrize(
    ("flushes_at", "why"),
    [((10, COUNT), "changes are missing that were flushed"), ((COUNT // 2,), "what names this disk is missing")],
)
def test_a_manifest_that_lacks_the_last_table_is_no_whole_one(
    tmp_path: Path, flushes_at: tuple[int, ...], why: str
) -> None:
    disk = left(tmp_path, flushes_at=flushes_at)
    (manifest,) = disk.glob("data/MANIFEST-*")
    content = manifest.read_bytes()
    with manifest.open("r+b") as file:
        file.truncate([at for at, length in places(content) if length > 60][-1])  # behind it: what is no table
    with pytest.raises(DiskFailed, match=why):
        opened(disk)


def test_what_isn_t_logged_and_goes_with_the_process_is_not_missed(tmp_path: Path) -> None:
    """RocksDB numbers it, too."""
    unlogged = replace(RECORD, epoch=Epoch(9), durability=Durability.MEMORY)

    async def lived() -> None:
        store = open_store(tmp_path / "alive", PLACE)
        for one in SENT[:3]:
            await fill(store, unlogged, [one])
        await store.keep_link(RECORD)
        await fill(store, RECORD, SENT[:2])
        for one in SENT[3:6]:
            last = await fill(store, unlogged, [one])
        shutil.copytree(tmp_path / "alive", tmp_path / "left")
        flushed: Any = asyncio.get_running_loop().create_future()
        sealed = replace(unlogged, is_sealed=True, end=last[-1].position.index)
        store.put_link(sealed, lambda *_: flushed.set_result(None))
        await flushed
        shutil.copytree(tmp_path / "alive", tmp_path / "sealed")
        await store.close()

    asyncio.run(lived())
    assert opened(tmp_path / "left") == 2
    assert opened(tmp_path / "sealed", unlogged) == 6


def test_a_mark_that_can_t_be_read_or_written_is_none_and_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(28, "No space left on device")

    disk = left(tmp_path)
    marked = (disk / flush_mark.NAME).read_bytes()
    for damaged in (b"", marked[:20], bytes([marked[0] ^ 1]) + marked[1:]):
        (disk / flush_mark.NAME).write_bytes(damaged)
        with monkeypatch.context() as patch:
            patch.setattr(flush_mark.os, "pwrite", failing)
            assert opened(disk) == COUNT
        mark = FlushMark(disk)
        assert mark.before.number == 0
        mark.close()
    asyncio.run(_started(disk))
    mark = FlushMark(disk)
    assert mark.before.number > 0
    mark.close()


async def _started(disk: Path) -> None:
    store = open_store(disk, PLACE)
    await store.flushed()
    await store.close()
