"""What a real file system leaves of a member's disk when its machine loses power."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.power import WRONG

ROOT = Path(__file__).parents[2]
LIVES = int(os.environ.get("SERIATIM_POWER_LIVES", "10"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600 + 60 * LIVES)]


def lives(count: int, *arguments: str) -> tuple[int, str]:
    """Its exit status, and what it says."""
    command = (sys.executable, "-m", "tests.faults.power", "--lives", str(count), *arguments)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_what_was_kept_is_there_whenever_the_power_goes() -> None:
    status, said = lives(LIVES)
    assert status == 0, said
    assert f"{LIVES} lives" in said


@pytest.mark.parametrize("wrong", WRONG)
def test_a_store_that_promises_too_early_is_found(wrong: str) -> None:
    status, said = lives(10, "--wrong", wrong)
    assert status == 1, said
    assert "broken" in said
