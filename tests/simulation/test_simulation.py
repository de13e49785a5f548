"""The random simulator as a test: many schedules, each sound; and a seed is a schedule, to the same step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.schedule import KINDS

ROOT = Path(__file__).parents[2]
SCHEDULES = 5000


def simulate(*arguments: str) -> str:
    """What the simulator prints, in a process of its own: it puts a world in the place of what this one uses."""
    command = (sys.executable, "-m", "tests.simulation", *arguments)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_schedule_breaks_an_invariant(record_property: Any) -> None:
    summary = json.loads(simulate("--seeds", f"0:{SCHEDULES}", "--json").splitlines()[-1])
    record_property("summary", summary)
    print(summary)  # noqa: T201 - how many, how fast
    assert summary["broken"] == []
    assert summary["schedules"] == SCHEDULES
    # It is no proof of anything unless records flow, and every kind of fault happens.
    assert summary["records"] > 10 * SCHEDULES
    assert summary["faults"].keys() == KINDS.keys()


@pytest.mark.parametrize("seed", [3, 17, 29])
def test_a_seed_is_replayed_to_the_same_step(seed: int) -> None:
    first, second = (simulate("--replay", str(seed)) for _ in range(2))
    assert first.splitlines()[-1].startswith(f"seed {seed}: all well, ")
    assert len(first.splitlines()) > 50
    assert first == second
