"""Runs schedules and explorations ahead of their tests, behind everything else: they need a processor, and nothing but that.

Other tests mostly wait for processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.simulation import jobs
from tests.simulation.jobs import Job

TIMEOUT_S = 1800
SCHEDULES = 5000
_PARTS = [range(first, first + 250) for first in range(0, SCHEDULES, 250)]
LOWEST = 19


def _job_of(item: pytest.Item) -> Job | None:
    """What a test waits for, if anything."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    match item.path.name, parameters:
        case "test_plants.py", {"name": name}:
            return jobs.plant, name
        case "test_exhaustive.py", {"number": number}:
            return jobs.explored, number
        case "test_exhaustive.py", {"name": name}:
            return jobs.explored_plant, name
    return None


class Ahead:
    """All jobs, in their order, at the lowest priority."""

    def __init__(self, asked: Iterable[Job]) -> None:
        self._pool = jobs.pool(LOWEST)
        self._summaries = {job: self._pool.apply_async(job[0], job[1:]) for job in asked}

    def summary(self, *job: Any) -> dict[str, Any]:
        """Of a job. Waits for it."""
        summary: dict[str, Any] = self._summaries[job].get(TIMEOUT_S)  # type: ignore[index]
        return summary

    def close(self) -> None:
        """End what runs, and begin no more."""
        self._pool.terminate()
        self._pool.join()


_KEY = pytest.StashKey[Ahead]()


def pytest_first_test(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = [job for item in items if (job := _job_of(item)) is not None]
    if any("summaries" in getattr(item, "fixturenames", ()) for item in items):
        asked += [(jobs.schedules, part) for part in _PARTS]
    if asked:
        config.stash[_KEY] = Ahead(asked)


def pytest_sessionfinish(session: pytest.Session) -> None:
    ahead = session.config.stash.get(_KEY, None)
    if ahead is not None:
        ahead.close()


@pytest.fixture
def ahead(pytestconfig: pytest.Config) -> Ahead:
    return pytestconfig.stash[_KEY]


@pytest.fixture
def summaries(ahead: Ahead) -> list[dict[str, Any]]:
    """Of the sound schedules, part by part."""
    return [ahead.summary(jobs.schedules, part) for part in _PARTS]
