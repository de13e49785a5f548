"""What finds a mutant: schedules of the simulator, or else the cores' own tests, or else what is explored quickly."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.operators import Mutant, apply
from tests.simulation import jobs, schedule
from tests.simulation.exhaustive.bounds import QUICK
from tests.simulation.exhaustive.explorer import explore

CORES = {
    "seriatim.coordinator.core": (
        (
            "acquire_send acquire_read acquiring background chain chain_length chain_point close_link closing draining reach readmission "
            "recovery registry removal retention rotation seal status subscriptions"
        ),
        "tests/unit/test_coordinator_*.py tests/property/test_chain_*.py",
    ),
    "seriatim.broker_group.core": (
        "replica cursors link_record resync rocksdb_log setback disk",
        "tests/unit/test_replica.py tests/unit/test_broker_cores.py tests/property/test_replica_pair.py tests/property/test_rocksdb_log.py",
    ),
    "seriatim.protocol": ("lease", "tests/unit/test_lease.py"),
    "seriatim.producer.core": (
        "sequencing resume sender sender_state batching timing",
        (
            "tests/unit/test_producer_*.py tests/unit/test_capture_sender.py tests/property/test_producer_sender.py "
            "tests/property/test_slow_paths.py"
        ),
    ),
    "seriatim.consumer.core": (
        "reading cursor tenure following rows view",
        "tests/unit/test_consumer_*.py tests/property/test_consumer_*.py tests/property/test_slow_paths.py",
    ),
}
"""By package: its modules that decide something, and the tests of their own."""
SHELLS = {
    "seriatim.coordinator": (
        "abandoning administration background description execution members messages recovery remembered service store turns",
        "tests/unit/test_coordinator_*.py",
    ),
    "seriatim.broker_group": (
        (
            "append broker cursor_keeper fetch link_runner membership opening peer replicate replication resyncer sealing service "
            "uninterrupted"
        ),
        "tests/unit/test_broker_*.py tests/unit/test_replica.py",
    ),
    "seriatim.producer": ("loop route", "tests/unit/test_producer_*.py"),
    "seriatim.consumer": (
        "client commits fetching handover session transport views",
        "tests/unit/test_consumer_*.py",
    ),
}
"""The same, of what carries out what those decide: schedules know more of it than tests of its own."""
MODULES = [f"{package}.{name}" for package, (names, _) in CORES.items() for name in names.split()]
SHELL_MODULES = [f"{package}.{name}" for package, (names, _) in SHELLS.items() for name in names.split()]
EXPLORED = {
    *(
        f"seriatim.coordinator.core.{name}"
        for name in ("acquire_send", "acquiring", "chain", "close_link", "closing", "seal")
    ),
    "seriatim.broker_group.core.replica",
    "seriatim.producer.core.sender",
}
"""What the exhaustive exploration runs."""
LIMIT_S = 180.0
"""Of processor time, so that a busy machine finds nothing: a change after which a step never ends is found, too."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`by`: what found it, "" for nothing. `how`: what that said."""

    mutant: Mutant
    by: str
    how: str
    took_s: float


def own_tests(module: str) -> list[str]:
    patterns = (CORES | SHELLS)[module.rpartition(".")[0]][1]
    return [str(path) for pattern in patterns.split() for path in sorted(Path().glob(pattern))]


@dataclass(frozen=True, slots=True)
class Schedules:
    """How many there are for each mutant, and of which kinds of faults; of all where none is named."""

    count: int
    kinds: tuple[str, ...] = ()


def _simulated(_: str, schedules: Schedules) -> str:
    shape = replace(schedule.ANY, kinds=schedules.kinds)
    for seed in range(schedules.count):
        try:
            failure = schedule.run(seed, shape).failure
        except Exception as error:  # whatever it is: the right rule doesn't raise it
            failure = repr(error)
        if failure:
            return f"seed {seed}: {failure}"
    return ""


def _tested(module: str, _: Schedules) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        options = ("-x", "-q", "--timeout=600", "--timeout-method=signal", "-p", "no:cacheprovider")
        code = pytest.main([*options, *own_tests(module)])
    if code == pytest.ExitCode.OK:
        return ""
    if code != pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError(f"pytest ended with {code}: {said.getvalue()[-2000:]}")
    return next((line for line in said.getvalue().splitlines() if line.startswith("FAILED")), "failed")


def _explored(module: str, _: Schedules) -> str:
    if module not in EXPLORED:
        return ""
    return next(filter(None, (explore(bounds).violation for bounds in QUICK)), "")


_STAGES = {"simulator": _simulated, "tests": _tested, "explorer": _explored}
"""Each in a process of its own: what one leaves behind is not for the next."""


def _judge(module: str, mutant: Mutant | None, stage: str, schedules: Schedules, answer: Connection) -> None:
    jobs.quiet()
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)

    def give_up(*_: object) -> None:
        answer.send(f"not over after {LIMIT_S:g} s")
        os._exit(0)

    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    if mutant is not None:
        apply(mutant)
    answer.send(_STAGES[stage](module, schedules))
    os._exit(0)


Asked = tuple[str, Mutant | None, str]
"""A module, what is changed in it, and the stage that is to find it."""


def _ran(waiting: list[Asked], schedules: Schedules) -> Iterator[tuple[Asked, str, float]]:
    """As many at a time as there are processors, from the end of `waiting`, which may grow meanwhile: how each was found, and after how long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    os.environ["PYTHONHASHSEED"] = "0"
    running: dict[Connection, tuple[Asked, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            one = waiting.pop()
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_judge, args=(*one, schedules, its))
            process.start()
            its.close()
            running[mine] = one, process, time.monotonic()
        for mine in wait(list(running)):
            assert isinstance(mine, Connection)
            one, process, began_s = running.pop(mine)
            try:
                how = mine.recv()
            except EOFError as error:
                raise RuntimeError(f"no verdict: the process ended ({one})") from error
            process.join()
            mine.close()
            yield one, how, time.monotonic() - began_s


def check(modules: Iterable[str], schedules: Schedules) -> None:
    """That nothing is found where nothing is changed. Raises RuntimeError: then no verdict means anything."""
    for one, how, _ in _ran([(module, None, stage) for module in modules for stage in _STAGES], schedules):
        if how:
            raise RuntimeError(f"found without a mutant: {one}: {how}")


def judge(asked: Iterable[Mutant], schedules: Schedules) -> Iterator[Verdict]:
    """By the first stage that finds it, in their order. Raises RuntimeError where there is no verdict."""
    stages, took_s = list(_STAGES), Counter[Mutant]()
    waiting: list[Asked] = [(mutant.module, mutant, stages[0]) for mutant in reversed(list(asked))]
    for (module, mutant, stage), how, stage_s in _ran(waiting, schedules):
        assert mutant is not None
        took_s[mutant] += stage_s
        if how or stage == stages[-1]:
            yield Verdict(mutant, stage if how else "", how, round(took_s.pop(mutant), 1))
        else:
            waiting.append((module, mutant, stages[stages.index(stage) + 1]))
