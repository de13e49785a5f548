"""Every interleaving within small bounds keeps every invariant, and can be healed; what is planted is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation import jobs
from tests.simulation.conftest import TIMEOUT_S, Ahead
from tests.simulation.exhaustive.bounds import QUICK, Bounds
from tests.simulation.exhaustive.explorer import explore
from tests.simulation.exhaustive.plants import PLANTS, lying_slave

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.mark.parametrize("number", range(len(QUICK)), ids=map(str, QUICK))
def test_no_interleaving_breaks_an_invariant(ahead: Ahead, number: int) -> None:
    result = ahead.summary(jobs.explored, number)
    print(result["text"])  # noqa: T201
    assert not result["violation"], result["text"]
    assert result["is_complete"]
    assert result["goals"]
    assert result["text"].startswith(str(QUICK[number]))


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(ahead: Ahead, name: str) -> None:
    result = ahead.summary(jobs.explored_plant, name)
    assert result["violation"].startswith(PLANTS[name].finds), result["text"]


def test_a_slave_that_confirms_too_much_does_no_harm_while_its_answer_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lying_slave(monkeypatch)
    result = explore(Bounds(records=2, failures=0, takeovers=0), checks_liveness=False)
    assert not result.violation, str(result)
    assert result.is_complete


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(records=1, failures=0, takeovers=1),
        Bounds(own=1, failures=0, takeovers=1),
        Bounds(records=1, takeovers=0, kinds=("blank",)),
    ],
    ids=str,
)
def test_what_is_taken_at_once_hides_no_ending(bounds: Bounds) -> None:
    thrifty, plain = explore(bounds), explore(replace(bounds, is_thrifty=False))
    assert not plain.violation, str(plain)
    assert thrifty.ends == plain.ends
    assert thrifty.states < plain.states
