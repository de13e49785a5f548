"""The files of large batches: what is appended is found at its place, and what isn't there is never something else."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import pytest

from seriatim.broker_group import directories, segments
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.broker_group.segments import LargeBatch, Place, SegmentFiles
from seriatim.protocol.errors import MalformedFrame
from seriatim.protocol.names import Epoch, QueueId

LINK = (QueueId(1), Epoch(2))
OTHER = (QueueId(1), Epoch(3))


def large(number: int, link: LinkKey = LINK, size_bytes: int = 100) -> LargeBatch:
    return LargeBatch(link, b"key", b"header%4d" % number, (b"%d." % number * size_bytes)[:size_bytes])


def descriptors(directory: Path) -> int:
    """How many are open of the files in a directory: others of this process come and go."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += directory.resolve() in one.readlink().parents
    return found


def test_every_batch_is_at_its_place(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "segments")
    sent = [large(number, LINK if number % 3 else OTHER, 50 + number) for number in range(2000)]
    places = files.append(sent)
    files.sync()
    assert [files.read(one.link, place) for one, place in zip(sent, places, strict=True)] == [
        (one.header, one.payload) for one in sent
    ]
    assert [Place.decode(place.encode()) for place in places] == places
    ends = {one.link: place.end for one, place in zip(sent, places, strict=True)}
    assert {link: files.size_bytes(link) for link in ends} == ends
    files.close()


def test_a_file_goes_on_behind_whatever_is_in_it(tmp_path: Path) -> None:
    first = SegmentFiles(tmp_path)
    (kept,) = first.append([large(1)])
    first.close()
    path = tmp_path / "1-2.segment"
    path.write_bytes(path.read_bytes() + b"half a batch")
    second = SegmentFiles(tmp_path)
    (next_one,) = second.append([large(2)])
    assert next_one.offset == kept.end + len(b"half a batch")
    assert second.read(LINK, kept) == (large(1).header, large(1).payload)
    assert second.read(LINK, next_one) == (large(2).header, large(2).payload)
    second.close()


def test_what_is_cut_off_gone_or_another_s_is_not_there(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    one, two = files.append([large(1), large(2)])
    path = tmp_path / "1-2.segment"
    assert files.read(LINK, Place(two.offset, two.size_bytes, two.header_bytes, one.header_crc)) is None
    os.truncate(path, two.end - 1)
    assert files.read(LINK, two) is None
    assert files.read(LINK, one) is not None
    os.truncate(path, 0)
    assert files.read(LINK, one) is None
    path.unlink()
    assert files.read(LINK, one) is None
    assert files.size_bytes(LINK) == 0
    files.close()


def test_a_place_is_of_its_size() -> None:
    with pytest.raises(MalformedFrame):
        Place.decode(Place(1, 2, 3, 4).encode()[:-1])


def test_flushed_is_what_was_appended_and_the_directory_once_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def noted(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fdatasync", noted)
    monkeypatch.setattr(os, "fsync", noted)
    files = SegmentFiles(tmp_path / "segments")
    assert flushed == [tmp_path.name]
    flushed.clear()
    files.append([large(1), large(2)])
    files.sync()
    assert flushed == ["1-2.segment", "segments"]
    flushed.clear()
    files.append([large(3), large(4, OTHER)])
    files.sync()
    assert flushed == ["1-2.segment", "1-3.segment", "segments"]
    flushed.clear()
    files.sync()
    assert flushed == []
    files.remove(OTHER)
    files.append([large(5, OTHER)])
    files.sync()
    assert flushed == ["1-3.segment", "segments"]
    files.close()


def test_a_name_that_an_earlier_life_left_is_flushed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been killed between its write and the flush of the directory, or between making that and its parent's."""
    earlier = SegmentFiles(tmp_path / "new" / "segments")
    earlier.append([large(1)])
    earlier.close()
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda one: flushed.append(Path(f"/proc/self/fd/{one}").readlink().name))
    files = SegmentFiles(tmp_path / "new" / "segments")
    assert flushed == ["new"]
    files.append([large(2)])
    files.sync()
    assert flushed == ["new", "segments"]
    files.append([large(3)])
    files.sync()
    assert flushed == ["new", "segments"]
    files.close()


def test_each_directory_on_the_way_to_a_new_one_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda one: flushed.append(Path(f"/proc/self/fd/{one}").readlink().name))
    directories.make(tmp_path / "a" / "b" / "c")
    assert sorted(flushed) == sorted(["b", "a", tmp_path.name])
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_what_is_flushed_leaves_the_page_cache_but_for_a_page_that_is_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = mmap.PAGESIZE
    happened: list[tuple[str, int, int]] = []
    sync = os.fdatasync

    def flushed(descriptor: int) -> None:
        sync(descriptor)
        happened.append(("flushed", 0, os.fstat(descriptor).st_size))

    def advised(descriptor: int, offset: int, size_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        happened.append(("let go", offset, offset + size_bytes))
        raise OSError(errno.EOPNOTSUPP, "advice isn't taken")

    monkeypatch.setattr(os, "fdatasync", flushed)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    files = SegmentFiles(tmp_path)
    header_bytes = len(large(1).header)
    for size_bytes in (2 * page + 10, 20, 2 * page - 30, 25):
        files.append([large(1, size_bytes=size_bytes - header_bytes)])
        files.sync()
    files.close()
    again = SegmentFiles(tmp_path)
    again.append([large(1, size_bytes=page)])
    again.sync()
    again.close()
    end = 4 * page + 25
    assert happened == [
        ("flushed", 0, 2 * page + 10),
        ("let go", 0, 2 * page),
        ("flushed", 0, 2 * page + 30),
        ("flushed", 0, 4 * page),
        ("let go", 2 * page, 4 * page),
        ("flushed", 0, end),
        ("flushed", 0, end + header_bytes + page),
        ("let go", 4 * page, 5 * page),
    ]


def test_files_held_open_are_bounded(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    links = [(QueueId(number), Epoch(1)) for number in range(1000)]
    places = {}
    for turn in range(3):
        for first in range(0, len(links), 50):
            sent = [large(turn, link) for link in links[first : first + 50]]
            for one, place in zip(sent, files.append(sent), strict=True):
                places[one.link, turn] = place
            files.sync()
            assert descriptors(tmp_path) <= 128
    for (link, turn), place in places.items():
        assert files.read(link, place) == (large(turn).header, large(turn).payload)
    assert descriptors(tmp_path) > 0
    files.close()
    assert descriptors(tmp_path) == 0


def test_only_files_of_links_that_are_named_stay(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    files.append([large(1), large(2, OTHER)])
    files.close()
    (tmp_path / "notes.segment").touch()
    files.keep_only({OTHER})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-3.segment", "notes.segment"]


def test_a_write_that_takes_a_part_goes_on_and_one_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev
    monkeypatch.setattr(segments.os, "writev", lambda descriptor, parts: real(descriptor, [parts[0][:5]]))
    files = SegmentFiles(tmp_path)
    (place,) = files.append([large(1)])
    assert files.read(LINK, place) == (large(1).header, large(1).payload)

    def full(_descriptor: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        files.append([large(2)])
    files.close()
