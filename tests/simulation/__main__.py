"""Run schedules by number or by time, or replay one, with its trace, to the same step.

python -m tests.simulation --seeds 0:5000
python -m tests.simulation --minutes 30
python -m tests.simulation --replay 4711
python -m tests.simulation --plants
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Self

from tests.simulation import jobs, schedule
from tests.simulation.plants import ALL, PLANTS, planted
from tests.simulation.schedule import Outcome
from tests.simulation.tally import SHOWN_FAILURES, Tally

_CHUNK = 4
_CHUNKS_A_LIFE = 16
"""A worker ends after so many: the system takes back what its schedules left, a third faster than the collector does."""
_COLLECTED_AFTER = 256
"""Schedules, where there is one process: it holds some 700 MB then."""
PROGRESS_S = 30.0


def _seeds(arguments: argparse.Namespace) -> Iterator[int]:
    """Those asked for; by time, new ones each time."""
    if arguments.minutes is None:
        first, last = map(int, arguments.seeds.split(":"))
        yield from range(first, last)
        return
    end_s = time.monotonic() + arguments.minutes * 60
    for seed in itertools.count(random.SystemRandom().randrange(1 << 40)):
        if time.monotonic() > end_s:
            return
        yield seed


def _run(job: tuple[int, str, str]) -> Outcome:
    seed, plant, shape = job
    with planted(plant):
        return schedule.run(seed, ALL[shape].shape if shape else None)


class _Ahead:
    """Jobs for a pool, which would take all at once, and there may be no end of them: only so many that aren't done."""

    def __init__(self, jobs: Iterable[tuple[int, str, str]], most: int) -> None:
        self._jobs = jobs
        self._most = most
        self._room = threading.Semaphore(most)
        self._is_over = False

    def __iter__(self) -> Iterator[tuple[int, str, str]]:
        """Runs on the pool's thread."""
        for job in self._jobs:
            self._room.acquire()
            if self._is_over:
                return
            yield job

    def done(self) -> None:
        self._room.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody takes what comes: let go of the pool's thread, for which the pool waits."""
        self._is_over = True
        self._room.release(self._most)


def _run_all(arguments: argparse.Namespace) -> Iterator[Outcome]:
    jobs: Iterable[tuple[int, str, str]] = ((seed, arguments.plant, arguments.shape) for seed in _seeds(arguments))
    if arguments.processes == 1:
        for number, job in enumerate(jobs, 1):
            yield _run(job)
            if number % _COLLECTED_AFTER == 0:
                gc.collect()
        return
    # Forked workers: they have imported everything, and don't collect what they share.
    context = multiprocessing.get_context("fork")
    ahead = _Ahead(jobs, arguments.processes * _CHUNK * 2)
    with context.Pool(arguments.processes, maxtasksperchild=_CHUNKS_A_LIFE) as pool, ahead:
        for outcome in pool.imap_unordered(_run, ahead, _CHUNK):
            ahead.done()
            yield outcome


def _replay(arguments: argparse.Namespace) -> int:
    with planted(arguments.plant):
        shape = ALL[arguments.shape].shape if arguments.shape else None
        outcome = schedule.run(arguments.replay, shape, is_traced=True)
    print("\n".join(outcome.trace))
    ended = f"{outcome.failure or 'all well'}, {outcome.steps} steps, faults: {', '.join(outcome.faults)}"
    print(f"seed {outcome.seed}: {ended}")
    return int(bool(outcome.failure))


def main() -> int:
    """Exit status 1 where a schedule broke an invariant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", default="0:1000", metavar="FIRST:LAST", help="schedules by number (default 0:1000)")
    what.add_argument("--minutes", type=float, help="new schedules for so long")
    what.add_argument("--replay", type=int, metavar="SEED", help="one schedule again, with its trace")
    what.add_argument(
        "--plants",
        action="store_true",
        help="find all plants, and note by which seeds, so that tests find them at once",
    )
    parser.add_argument("--plant", default="", choices=["", *ALL], metavar="NAME", help="with this rule made wrong")
    parser.add_argument(
        "--shape", choices=["", *ALL], metavar="NAME", help="drawn as for this plant (default: --plant)"
    )
    parser.add_argument(
        "--first", action="store_true", help="end at the first broken schedule; a plant's is run again right"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="the summary as one object")
    arguments = parser.parse_args()
    if arguments.shape is None:
        arguments.shape = arguments.plant
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of a set of names decides the order of requests: the same seed is to be the same schedule.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    gc.collect()
    jobs.quiet()
    if arguments.plants:
        return _note_plants()
    return _replay(arguments) if arguments.replay is not None else _report(arguments)


def _note_plants() -> int:
    found = {}
    for name, seed in jobs.find_plants(PLANTS):
        print(f"{name}: {'not found' if seed is None else f'seed {seed}'}", flush=True)
        if seed is not None:
            found[name] = seed
    jobs.FOUND.write_text(json.dumps(found, indent=1) + "\n")
    return int(len(found) < len(PLANTS))


def _options(arguments: argparse.Namespace) -> str:
    """What else a replay has to name."""
    plant = f' --plant "{arguments.plant}"' if arguments.plant else ""
    return plant + (f' --shape "{arguments.shape}"' if arguments.shape != arguments.plant else "")


def _report(arguments: argparse.Namespace) -> int:
    began_s = shown_s = time.monotonic()
    tally = Tally()
    failures = tally.failures
    for outcome in _run_all(arguments):
        tally.add(outcome)
        if time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            print(f"{tally.count} schedules, {len(failures)} broken", file=sys.stderr, flush=True)
        if outcome.failure:
            if len(failures) <= SHOWN_FAILURES:
                print(f"seed {outcome.seed}: {outcome.failure} ({', '.join(outcome.faults)})", flush=True)
                print(f"  python -m tests.simulation --replay {outcome.seed}{_options(arguments)}", flush=True)
            if arguments.first:
                break
    without = ""
    if arguments.first and arguments.plant and failures:
        without = _run((failures[0].seed, "", arguments.shape)).failure
    took_s = time.monotonic() - began_s
    rate = tally.count / took_s
    if arguments.json:
        run = {"without_the_plant": without, "schedules_per_s": round(rate, 1), "took_s": round(took_s, 1)}
        print(json.dumps({**tally.summary(), **run}))
    else:
        each = f"{rate:.1f} a second, {tally.steps} steps ({tally.steps_each} each)"
        print(f"{tally.count} schedules, {len(failures)} broken; {each}, ", end="")
        print(f"{tally.records} records, {tally.simulated_s / 3600:.1f} h simulated in {took_s:.0f} s")
        print("faults: " + ", ".join(f"{kind} {number}" for kind, number in tally.faults.most_common()))
    return int(bool(failures))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what never ended in a schedule has nothing more to say
