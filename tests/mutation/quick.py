"""Mutants against those of the cores' own tests that reach them: all of a core in a minute or two.

The tests are collected once, and run once with each line noted that they reach. A mutant is then made in a fork, in which the tests of
its line run, or else those of its function, the shortest first. What they don't find, schedules of the simulator may.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings

from tests.mutation.judge import Verdict, own_tests
from tests.mutation.operators import Mutant, apply

LIMIT_S = 30.0
"""Of processor time."""
WAIT_S = 60.0
"""So long at most a mutant of a shell may have its tests wait, for what never comes; a busy machine is not to find that of one that is well."""
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--timeout=0", "-W", "ignore")


class _Tests:
    """A plugin that runs, in place of all tests once, these mutants against those that reach them."""

    def __init__(self, asked: list[Mutant]) -> None:
        self._asked = asked
        self._files = {importlib.import_module(one.module).__file__: one.module for one in asked}
        self._of_line: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._of_function: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        self._took_s: dict[int, float] = {}
        self.verdicts: list[Verdict] = []

    def pytest_configure(self) -> None:
        """What is found needn't be made small, and a second run finds the same."""
        phases = (Phase.explicit, Phase.generate)
        found = settings(phases=phases, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
        settings.register_profile("quick", found)
        settings.load_profile("quick")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for number in range(len(session.items)):
            self._reach(session, number)
        for mutant in self._asked:
            began_s = time.monotonic()
            tests = self._of_line[mutant.module, mutant.line] or self._of_function[mutant.module, mutant.function]
            how = _found(mutant, [session.items[number] for number in sorted(tests, key=self._took_s.__getitem__)])
            took_s = round(time.monotonic() - began_s, 1)
            self.verdicts.append(Verdict(mutant, "tests" if how else "", how, took_s))
        return True

    def _reach(self, session: pytest.Session, number: int) -> None:
        def noted(frame: FrameType, event: str, _: Any) -> Any:
            module = self._files.get(frame.f_code.co_filename)
            if module is None:
                return None
            if event == "line":
                self._of_line[module, frame.f_lineno].add(number)
            self._of_function[module, frame.f_code.co_qualname.partition(".<locals>")[0]].add(number)
            return noted

        began_s = time.process_time()
        sys.settrace(noted)
        try:
            how = _failed(session.items[number])
        finally:
            sys.settrace(None)
        self._took_s[number] = time.process_time() - began_s
        if how:
            raise RuntimeError(f"found without a mutant: {how}")


def _failed(item: pytest.Item) -> str:
    """Runs one test: its name where it fails."""
    return item.nodeid if any(one.failed for one in runtestprotocol(item, log=False, nextitem=None)) else ""


def _found(mutant: Mutant, tests: Iterable[pytest.Item]) -> str:
    """In a process of its own: the test that fails, empty for none."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:

        def give_up(*_: object) -> None:
            os.write(writing, b"it never ends")
            os._exit(0)

        try:
            for number, timer, limit_s in (
                (signal.SIGPROF, signal.ITIMER_PROF, LIMIT_S),
                (signal.SIGALRM, signal.ITIMER_REAL, WAIT_S),
            ):
                signal.signal(number, give_up)
                signal.setitimer(timer, limit_s)
            apply(mutant)
            os.write(writing, next(filter(None, map(_failed, tests)), "").encode()[:900])
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    how = os.read(reading, 1000).decode()
    os.close(reading)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"no verdict: the process ended ({mutant})")
    return how


def judge(asked: list[Mutant]) -> list[Verdict]:
    """Package by package. Raises RuntimeError where a test fails without a mutant."""
    verdicts: list[Verdict] = []
    for package in dict.fromkeys(one.module.rpartition(".")[0] for one in asked):
        of_package = [one for one in asked if one.module.startswith(f"{package}.")]
        tests = _Tests(of_package)
        pytest.main([*_OPTIONS, *own_tests(of_package[0].module)], plugins=[tests])
        if len(tests.verdicts) != len(of_package):
            raise RuntimeError(f"the tests of {package} didn't run")
        verdicts += tests.verdicts
    return verdicts
