"""What a crash or a power failure leaves of a member's disk, at every step of its writing thread.

The disk is copied at each step as it could be found afterwards: of the segment files what was flushed, all that was written,
or zeros in its place; of RocksDB's log what was flushed, zeros from the next sector on, or all of it. Each copy is opened, and must hold every batch that
was said to be kept, and nothing that can't be read; copies that are the same, as where nothing waited to be flushed, are looked at once. Wrong orders of
the steps are planted, and must be found.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seriatim.broker_group import directories, segments, store
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.core.rocksdb_log import SECTOR_BYTES
from seriatim.broker_group.segments import SegmentFiles
from seriatim.broker_group.store import Store, open_store
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import Epoch, Index
from tests.files import sizes
from tests.integration.broker_members import as_sent, batches
from tests.integration.test_broker_store import RECORD, fill

OTHER = replace(RECORD, epoch=Epoch(3))
PLACE = "c/g1-a"
SINK: Any = vars(store)["_Sink"]


class Crashes:
    """Copies of a disk at every step. `kept`: what was said to be kept of each link by then."""

    def __init__(self, disk: Path, images: Path) -> None:
        self.disk = disk
        self.images = images
        self.kept: dict[LinkKey, list[EncodedBatch]] = {}
        self.found: list[tuple[str, Path, dict[LinkKey, int]]] = []
        self.copies = 0
        self.is_watching = False
        self._told: set[tuple[bytes, frozenset[tuple[LinkKey, int]]]] = set()
        self._segment_bytes: dict[str, int] = {}
        self._names: set[str] = set()
        self._log_bytes: dict[str, int] = {}

    def flushed_segments(self, *_: object) -> None:
        for path in self._segments(self.disk):
            self._segment_bytes[path.name] = path.stat().st_size

    def flushed_names(self, directory: Path) -> None:
        if directory.name == "segments":
            self._names = {path.name for path in self._segments(self.disk)}

    def flushed_logs(self, *_: object) -> None:
        self._log_bytes = sizes(self.disk / "data", "*.log")

    def step(self, name: str) -> None:
        if not self.is_watching:
            return
        kept = {link: len(of_link) for link, of_link in self.kept.items()}
        for log_left in ("flushed", "zeros", "all"):
            for bytes_left in ("flushed", "zeros", "all"):
                image = self.images / f"{self.copies}"
                self.copies += 1
                shutil.copytree(self.disk, image)
                self._lose(image, bytes_left, log_left)
                told = content(image), frozenset(kept.items())
                if told in self._told:
                    shutil.rmtree(image)
                else:
                    self._told.add(told)
                    self.found.append((f"{name}, log {log_left}, segments {bytes_left}", image, kept))

    def _lose(self, image: Path, bytes_left: str, log_left: str) -> None:
        for path in self._segments(image):
            flushed, size = self._segment_bytes.get(path.name, 0), path.stat().st_size
            if bytes_left != "all" and path.name not in self._names:
                path.unlink()
            elif bytes_left != "all" and flushed < size:
                os.truncate(path, flushed)
                if bytes_left == "zeros":
                    os.truncate(path, size)
        for path in (image / "data").glob("*.log") if log_left != "all" else ():
            flushed, size = self._log_bytes.get(path.name, 0), path.stat().st_size
            if log_left == "zeros":
                os.truncate(path, min(-(-flushed // SECTOR_BYTES) * SECTOR_BYTES, size))
                os.truncate(path, size)
            else:
                os.truncate(path, min(flushed, size))

    @staticmethod
    def _segments(disk: Path) -> list[Path]:
        return list((disk / "segments").iterdir()) if (disk / "segments").is_dir() else []


def content(image: Path) -> bytes:
    """A hash of all its files, with their names."""
    found = hashlib.sha256()
    for path in sorted(image.rglob("*")):
        found.update(f"\0{path.relative_to(image)}\0".encode())
        if path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.digest()


@contextmanager
def watched(crashes: Crashes) -> Iterator[None]:
    """Each step of the writing thread is followed by copies of the disk."""

    def watch(owner: Any, name: str, after: Callable[..., None] = lambda *_: None) -> None:
        right = vars(owner)[name]

        def step(*arguments: Any, **named: Any) -> Any:
            found = right(*arguments, **named)
            after(*arguments)
            crashes.step(name)
            return found

        patch.setattr(owner, name, step)

    with pytest.MonkeyPatch.context() as patch:
        watch(SegmentFiles, "append")
        watch(SegmentFiles, "sync", crashes.flushed_segments)
        watch(directories, "sync", crashes.flushed_names)
        watch(SegmentFiles, "remove")
        watch(SINK, "write")
        watch(SINK, "flush", crashes.flushed_logs)
        yield


async def served(crashes: Crashes) -> None:
    """A member's life: two links in turn, one is emptied and filled again, one dropped."""
    one = open_store(crashes.disk, PLACE, segment_bytes=1)
    crashes.flushed_logs()
    await one.keep_link(RECORD)
    await one.keep_link(OTHER)
    crashes.is_watching = True
    for turn in range(2):
        for record in (RECORD, OTHER):
            await kept(crashes, one, record, batches(2, first_index=turn * 20))
    ended = replace(RECORD, is_sealed=True, end=Index(20))
    crashes.kept[RECORD.key] = crashes.kept[RECORD.key][:2]
    await one.cut(ended, Index(20))
    await kept(crashes, one, RECORD, batches(1, first_index=20, size_bytes=70))
    crashes.kept[RECORD.key] = []
    await one.cut(ended, Index(0))
    await kept(crashes, one, RECORD, batches(2, size_bytes=80))
    del crashes.kept[OTHER.key]
    await one.drop(OTHER.key)
    crashes.is_watching = False
    await one.close()


async def kept(crashes: Crashes, one: Store, record: LinkRecord, sent: list[EncodedBatch]) -> None:
    await fill(one, record, sent)
    crashes.kept.setdefault(record.key, []).extend(sent)


async def check(image: Path, expected: dict[LinkKey, int], sent: list[EncodedBatch]) -> None:
    """Everything that was kept is there; what is there can be read, and goes on. Raises AssertionError, SeriatimError."""
    one = open_store(image, PLACE, segment_bytes=1)
    try:
        assert one.lost() == []
        for record in one.links():
            last = one.last_position(record.key)
            found = one.batches(record.key, Index(0), last.position.index, 1 << 30)
            assert len(found) >= expected.get(record.key, 0)
            assert sum(each.size_bytes for each in found) == last.size_bytes
            assert all(each in as_sent(sent) for each in as_sent(found))
            more = batches(2, first_index=last.position.index, size_bytes=90)
            await fill(one, record, more)
            again = one.batches(record.key, Index(0), more[-1].header.end_index, 1 << 30)
            assert as_sent(again) == as_sent([*found, *more])
        assert {record.key for record in one.links()} >= expected.keys()
    finally:
        await one.close()


def wrong(disk: Path) -> Iterator[str]:
    """Live, crash at every step, look at each copy. What is wrong with them."""
    crashes = Crashes(disk / "disk", disk / "images")
    crashes.images.mkdir()
    with watched(crashes):
        asyncio.run(served(crashes))
    sent = [
        *batches(4),
        *batches(1, first_index=20, size_bytes=70),
        *batches(2, size_bytes=80),
    ]
    assert crashes.copies > 100
    for name, image, expected in crashes.found:
        try:
            asyncio.run(check(image, expected, sent))
        except (AssertionError, SeriatimError) as error:
            yield f"{name}: {type(error).__name__} {error}"


@pytest.mark.timeout(300)
def test_no_crash_takes_what_was_kept_or_leaves_what_can_t_be_read(tmp_path: Path) -> None:
    assert list(wrong(tmp_path)) == []


def _places_before_bytes(sink: Any, writes: Any) -> Any:
    """Flushes the bytes only together with RocksDB's log."""
    sync = sink._segments.sync
    sink._segments.sync = lambda: None
    try:
        return _PLACED(sink, writes)
    finally:
        sink._segments.sync = sync


def _then_the_bytes(sink: Any) -> None:
    _FLUSH(sink)
    sink._segments.sync()


def _emptied_before_it_is_durable(sink: Any, writes: Any, *, uses_log: bool) -> None:
    for write in writes:
        if write.empties is not None:
            sink._segments.remove(write.empties)
    _WRITE(sink, writes, uses_log=uses_log)


_PLACED, _FLUSH, _WRITE = (vars(SINK)[name] for name in ("placed", "flush", "write"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "planted",
    [
        {"placed": _places_before_bytes, "flush": _then_the_bytes},
        {"write": _emptied_before_it_is_durable},
    ],
    ids=["a place before its bytes", "a file removed before its link is"],
)
def test_a_wrong_order_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: dict[str, Any]) -> None:
    for name, rule in planted.items():
        monkeypatch.setattr(SINK, name, rule)
    assert any(wrong(tmp_path))


@pytest.mark.timeout(300)
def test_a_directory_that_is_not_flushed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(vars(segments)["_OpenFile"]):  # type: ignore[misc]
        """Never one whose name may be new to the disk."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named, is_named=True)

    monkeypatch.setattr(segments, "_OpenFile", Old)
    assert any(wrong(tmp_path))
