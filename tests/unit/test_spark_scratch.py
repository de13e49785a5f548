"""Spark's scratch folders: whose replay was killed, and who lives."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from seriatim.consumer.spark.scratch import PREFIX, scratch_folder


def test_what_killed_replays_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, living, young, strange = (
        tmp_path / name for name in (f"{PREFIX}left", f"{PREFIX}living", f"{PREFIX}young", "strange")
    )
    for folder in (left, living, young, strange):
        (folder / "blockmgr").mkdir(parents=True)
        (folder / "blockmgr" / "spilled").write_bytes(b"x")
    for folder in (left, living, strange):
        os.utime(folder, (0, 0))
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with scratch_folder() as mine:
        assert sorted(tmp_path.iterdir()) == sorted((mine, living, young, strange))
        os.utime(mine, (0, 0))
        with scratch_folder() as other:
            assert sorted(tmp_path.iterdir()) == sorted((mine, other, living, young, strange))
    os.close(held)
    with scratch_folder():
        pass
    assert sorted(tmp_path.iterdir()) == sorted((young, strange))


def test_what_can_t_be_removed_at_the_end_is_no_failure_and_the_next_one_s_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patched, scratch_folder() as mine:
        patched.setattr(os, "rmdir", refused)
    assert mine.is_dir()
    os.utime(mine, (0, 0))
    with scratch_folder():
        assert not mine.exists()
