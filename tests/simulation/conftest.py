"""Runs the schedules of planted defects ahead of their tests, behind everything else: they need a processor, and nothing but that.

Other tests mostly wait for processes; each plant has a process of its own, which takes what they leave.
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

TIMEOUT_S = 600


class Ahead:
    """`within` schedules of each plant, or as many as show it. All at the lowest priority, as many at once as there are processors."""

    def __init__(self, names: Sequence[str]) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._found = {name: self._pool.submit(self._run, name) for name in names}

    def summary_of(self, name: str) -> dict[str, Any]:
        """Waits for it."""
        return self._found[name].result()

    def _run(self, name: str) -> dict[str, Any]:
        simulation = [sys.executable, "-m", "tests.simulation", "--plant", name, "--seeds", f"0:{ALL[name].within}"]
        command = ["nice", "-n", "19", *simulation, "--first", "--json", "--processes", "1"]
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
    names = [one.params["name"] for one in parameters if one is not None]
    if names:
        session.config.stash[_KEY] = Ahead(names)


def pytest_sessionfinish(session: pytest.Session) -> None:
    ahead = session.config.stash.get(_KEY, None)
    if ahead is not None:
        ahead.close()


@pytest.fixture
def ahead(pytestconfig: pytest.Config) -> Ahead:
    return pytestconfig.stash[_KEY]
