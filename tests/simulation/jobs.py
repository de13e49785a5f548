"""What tests have others run for them: each job in a process of its own, which takes what schedules leave.

Those processes are forked from one that has imported everything, which takes a second.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any
from unittest import mock

from tests.simulation import schedule
from tests.simulation.exhaustive import plants as explored_plants
from tests.simulation.exhaustive.bounds import QUICK
from tests.simulation.exhaustive.explorer import explore
from tests.simulation.plants import ALL, planted
from tests.simulation.tally import Tally

FOUND = Path(__file__).parent / "plants" / "found.json"
"""By plant, the seed of the schedule that found it last. Written by `python -m tests.simulation --plants`."""

Job = tuple[Callable[..., dict[str, Any]], Any]
"""What is called, and with what; it answers with an object of JSON."""


_STALE = re.compile(r"\b(Attribute|Key|Name|Type)Error\b")
"""What a plant ends in that calls what isn't there any more: it breaks a schedule, too, and shows nothing."""


def schedules(seeds: range) -> dict[str, Any]:
    """As they are drawn, with all rules right."""
    tally = Tally()
    for seed in seeds:
        tally.add(schedule.run(seed))
    return tally.summary()


def plant(name: str) -> dict[str, Any]:
    """Up to the first schedule that breaks as is said beforehand, which is run again with the right rule.

    The one that found this plant last is the first: as long as the rest is as it was then, it does so again.
    """
    shape, tally, found = ALL[name].shape, Tally(), None
    noted = json.loads(FOUND.read_text()).get(name)
    with planted(name):
        for seed in sorted(range(ALL[name].within), key=lambda seed: seed != noted):
            outcome = schedule.run(seed, shape)
            tally.add(outcome)
            if outcome.failure and re.search(ALL[name].finds, outcome.failure) and not _STALE.search(outcome.failure):
                found = seed
                break
    without = "" if found is None else schedule.run(found, shape).failure
    return {**tally.summary(), "found_by": found, "without_the_plant": without}


def explored(number: int) -> dict[str, Any]:
    """One of what is explored quickly, with all rules right."""
    return explore(QUICK[number]).summary()


def explored_plant(name: str) -> dict[str, Any]:
    """One of what is explored with a rule made wrong."""
    return explored_plants.PLANTS[name].explored().summary()


def quiet() -> None:
    """What never ended in a schedule has nothing to say when it is let go of; what was imported isn't looked through again."""
    warnings.simplefilter("ignore", RuntimeWarning)  # a coroutine of a killed process is never awaited
    sys.unraisablehook = lambda _: None
    gc.freeze()


def _begin(niceness: int) -> None:
    quiet()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for who waits to say
    os.nice(niceness)


def pool(niceness: int = 0) -> Pool:
    """As many processes at a time as there are processors, each for one job."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # The order of a set of names decides the order of requests: the same seed is to be the same schedule.
    with mock.patch.dict(os.environ, PYTHONHASHSEED="0"):
        return context.Pool(os.cpu_count(), _begin, (niceness,), maxtasksperchild=1)


def find_plants(names: Iterable[str]) -> Iterator[tuple[str, int | None]]:
    """By which seed each is found, if by any."""
    with pool() as workers:
        for name, summary in [(name, workers.apply_async(plant, (name,))) for name in names]:
            yield name, summary.get()["found_by"]
