"""Each wrong rule is found by the simulator, in as few schedules as is said, and the schedule that finds it is sound without it."""

from __future__ import annotations

import pytest

from tests.simulation import jobs
from tests.simulation.conftest import TIMEOUT_S, Ahead
from tests.simulation.plants import HARMLESS, PLANTS

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)  # one that isn't found is to be said, not to end the whole run


@pytest.mark.parametrize("name", HARMLESS)
def test_a_worse_world_is_borne(ahead: Ahead, name: str) -> None:
    summary = ahead.summary(jobs.plant, name)
    assert summary["schedules"] == HARMLESS[name].within
    assert not summary["broken"]


@pytest.mark.parametrize("name", PLANTS)
def test_planted_defect_is_found(ahead: Ahead, name: str) -> None:
    plant, summary = PLANTS[name], ahead.summary(jobs.plant, name)
    assert summary["found_by"] is not None, (
        f"not found in {plant.within} schedules: {plant.rule}; {summary['failures']}"
    )
    assert not summary["without_the_plant"]
