"""Each wrong rule is found by the simulator, in as few schedules as is said, and the schedule that finds it is sound without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.simulation.plants import ALL, HARMLESS, PLANTS

TIMEOUT_S = 600
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)  # one that isn't found is to be said, not to end the whole run


def summary_of(name: str) -> dict[str, Any]:
    """Of as many schedules as the plant may take, up to the first broken one."""
    command = [sys.executable, "-m", "tests.simulation", "--plant", name, "--seeds", f"0:{ALL[name].within}"]
    run = subprocess.run(
        [*command, "--first", "--json", "--processes", "1"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.stdout, run.stderr
    summary: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return summary


@pytest.mark.parametrize("name", HARMLESS)
def test_a_worse_world_is_borne(name: str) -> None:
    summary = summary_of(name)
    assert summary["schedules"] == HARMLESS[name].within
    assert not summary["broken"]


@pytest.mark.parametrize("name", PLANTS)
def test_planted_defect_is_found(name: str) -> None:
    plant, summary = PLANTS[name], summary_of(name)
    assert summary["broken"], f"not found in {plant.within} schedules: {plant.rule}"
    (found,) = summary["failures"].values()
    assert re.search(plant.finds, found)
    assert not summary["without_the_plant"]
