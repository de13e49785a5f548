"""Runs schedules ahead of their tests, behind everything else: they need a processor, and nothing but that.

Other tests mostly wait for processes; each plant, and each part of the sound schedules, has a process of its own, which takes what
they leave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.simulation.plants import ALL

TIMEOUT_S = 1800
SCHEDULES = 5000
_PART = 250


class Ahead:
    """`within` schedules of each plant, or as many as show it, and the sound ones. All at the lowest priority, as many at once as
    there are processors.
    """

    def __init__(self, plants: Sequence[str], schedules: int) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._plants = {
            name: self._pool.submit(self._run, "--plant", name, "--seeds", f"0:{ALL[name].within}", "--first")
            for name in plants
        }
        self._parts = [
            self._pool.submit(self._run, "--seeds", f"{first}:{first + _PART}") for first in range(0, schedules, _PART)
        ]

    def summary_of(self, plant: str) -> dict[str, Any]:
        """Waits for it."""
        return self._plants[plant].result()

    def summaries(self) -> list[dict[str, Any]]:
        """Of all parts of the sound schedules. Waits for them."""
        return [part.result() for part in self._parts]

    def _run(self, *arguments: str) -> dict[str, Any]:
        simulation = [sys.executable, "-m", "tests.simulation", *arguments]
        command = ["nice", "-n", "19", *simulation, "--json", "--processes", "1"]
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
    parameters = (vars(item).get("callspec") for item in session.items if item.path.name == "test_plants.py")
    plants = [one.params["name"] for one in parameters if one is not None]
    schedules = SCHEDULES if any("summaries" in getattr(item, "fixturenames", ()) for item in session.items) else 0
    if plants or schedules:
        session.config.stash[_KEY] = Ahead(plants, schedules)


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
    return ahead.summaries()
