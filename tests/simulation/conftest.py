"""Runs schedules and explorations ahead of their tests, behind everything else: they need a processor, and nothing but that.

Other tests mostly wait for processes; each plant, each part of the sound schedules, and each exploration has a process of its own,
which takes what they leave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.simulation.plants import ALL

TIMEOUT_S = 1800
SCHEDULES = 5000
_PART = 250

Job = tuple[str, str]
"""Of what kind, and which: a plant by name, a part of the sound schedules by its first seed, what is explored by its number, or
with which plant.
"""


def _job_of(item: pytest.Item) -> Job | None:
    """What a test waits for, if anything."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    match item.path.name, parameters:
        case "test_plants.py", {"name": name}:
            return "plant", name
        case "test_exhaustive.py", {"number": number}:
            return "explored", str(number)
        case "test_exhaustive.py", {"name": name}:
            return "explored with", name
    return None


def _command(kind: str, which: str) -> tuple[str, ...]:
    schedules = ("tests.simulation", "--processes", "1", "--seeds")
    match kind:
        case "plant":
            return (*schedules, f"0:{ALL[which].within}", "--first", "--plant", which)
        case "schedules":
            return (*schedules, f"{which}:{int(which) + _PART}")
        case "explored":
            return ("tests.simulation.exhaustive", "--quick-number", which)
    return ("tests.simulation.exhaustive", "--plant", which)


class Ahead:
    """All jobs, in their order, at the lowest priority, as many at once as there are processors."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._jobs = {job: self._pool.submit(self._run, *_command(*job)) for job in jobs}

    def summary(self, kind: str, which: str) -> dict[str, Any]:
        """Of a job. Waits for it."""
        return self._jobs[kind, which].result()

    def _run(self, *arguments: str) -> dict[str, Any]:
        command = ["nice", "-n", "19", sys.executable, "-m", *arguments, "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            self._running.add(process)
            try:
                if self._is_over:
                    process.kill()
                output, errors = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
                self._running.discard(process)
        assert output, errors
        summary: dict[str, Any] = json.loads(output.splitlines()[-1])
        return summary

    def close(self) -> None:
        """End what runs, and begin no more."""
        self._is_over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()
        self._pool.shutdown()


_KEY = pytest.StashKey[Ahead]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    jobs = [job for item in session.items if (job := _job_of(item)) is not None]
    if any("summaries" in getattr(item, "fixturenames", ()) for item in session.items):
        jobs += [("schedules", str(first)) for first in range(0, SCHEDULES, _PART)]
    if jobs:
        session.config.stash[_KEY] = Ahead(jobs)


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
    return [ahead.summary("schedules", str(first)) for first in range(0, SCHEDULES, _PART)]
