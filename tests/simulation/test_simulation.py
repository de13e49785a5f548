"""The random simulator as a test: many schedules, each sound; and a seed is a schedule, to the same step."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.conftest import SCHEDULES, TIMEOUT_S
from tests.simulation.schedule import KINDS

ROOT = Path(__file__).parents[2]


def simulate(*arguments: str) -> str:
    """What the simulator prints, in a process of its own: it puts a world in the place of what this one uses."""
    command = (sys.executable, "-m", "tests.simulation", *arguments)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_no_schedule_breaks_an_invariant(summaries: list[dict[str, Any]]) -> None:
    faults = sum((Counter(one["faults"]) for one in summaries), Counter[str]())
    schedules, steps, records = (sum(one[key] for one in summaries) for key in ("schedules", "steps", "records"))
    print(f"{schedules} schedules, {steps} steps, {records} records, faults: {dict(faults)}")  # noqa: T201
    assert [seed for one in summaries for seed in one["broken"]] == []
    assert schedules == SCHEDULES
    # It is no proof of anything unless records flow, and every kind of fault happens.
    assert records > 10 * SCHEDULES
    assert faults.keys() == KINDS.keys()


@pytest.mark.parametrize("seed", [3, 17, 29])
def test_a_seed_is_replayed_to_the_same_step(seed: int) -> None:
    first, second = (simulate("--replay", str(seed)) for _ in range(2))
    assert first.splitlines()[-1].startswith(f"seed {seed}: all well, ")
    assert len(first.splitlines()) > 50
    assert first == second
