"""Each wrong rule is found by the simulator, in as few schedules as is said, and the schedule that finds it is sound without it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.simulation.plants import PLANTS


@pytest.mark.parametrize("name", PLANTS)
def test_planted_defect_is_found(name: str) -> None:
    plant = PLANTS[name]
    command = [sys.executable, "-m", "tests.simulation", "--plant", name, "--seeds", f"0:{plant.within}"]
    run = subprocess.run(
        [*command, "--first", "--json", "--processes", "1"], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.stdout, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["broken"], f"not found in {plant.within} schedules: {plant.rule}"
    (found,) = summary["failures"].values()
    assert plant.finds in found
    assert not summary["without_the_plant"]
