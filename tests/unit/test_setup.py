"""Which Python set-up makes .venv with: one that was built with a profile before the first in PATH, and the one that is asked for before all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SETUP = Path(__file__).parents[2] / "tools" / "setup"


def fake(folder: Path, name: str, *, is_new: bool = True, is_fast: bool = True) -> Path:
    """A command that answers as a Python does: it is asked for its version by -c, and by standard input how it was built."""
    path = folder / name
    path.write_text(
        f"#!/bin/sh\ncase $1,$2 in *version_info*) exit {int(not is_new)};; -,*) exit {int(not is_fast)};; esac\n"
    )
    path.chmod(0o755)
    return path


def chosen(folder: Path, **environment: str) -> str:
    paths = f"{folder}:{os.environ['PATH']}"
    command, others = (SETUP, "--python"), {key: value for key, value in os.environ.items() if key != "PYTHON"}
    run = subprocess.run(
        command, check=False, env={**others, "PATH": paths, **environment}, capture_output=True, text=True
    )
    return run.stdout.strip()


def test_one_built_with_a_profile_goes_before_the_first_in_path(tmp_path: Path) -> None:
    fake(tmp_path, "python3", is_fast=False)
    fast = fake(tmp_path, "python3.13")
    assert chosen(tmp_path) == str(fast)


def test_the_first_of_those_is_taken(tmp_path: Path) -> None:
    first = fake(tmp_path, "python3")
    fake(tmp_path, "python3.13")
    assert chosen(tmp_path) == str(first)


def test_one_that_is_too_old_is_none(tmp_path: Path) -> None:
    fake(tmp_path, "python3", is_new=False)
    newer = fake(tmp_path, "python3.13")
    assert chosen(tmp_path) == str(newer)


def test_one_that_is_asked_for_is_taken_however_it_was_built(tmp_path: Path) -> None:
    fake(tmp_path, "python3")
    slow = fake(tmp_path, "my-python", is_fast=False)
    assert chosen(tmp_path, PYTHON="my-python") == str(slow)
    assert chosen(tmp_path, PYTHON=str(slow)) == str(slow)


def test_one_that_is_asked_for_and_too_old_is_refused(tmp_path: Path) -> None:
    fake(tmp_path, "python3")
    fake(tmp_path, "my-python", is_new=False)
    assert chosen(tmp_path, PYTHON="my-python") == ""
