"""`python -m tests.simulation.exhaustive`: explore, and print what was found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace

from tests.simulation.exhaustive.bounds import KINDS, QUICK, Bounds
from tests.simulation.exhaustive.explorer import Result, explore
from tests.simulation.exhaustive.plants import PLANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.exhaustive", description=__doc__)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--records", type=int, default=2)
    parser.add_argument("--own", type=int, default=0)
    parser.add_argument("--failures", type=int, default=1)
    parser.add_argument("--takeovers", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--each", action="store_true", help="each kind of failure in a run of its own")
    parser.add_argument("--quick", action="store_true", help="all that `make test` explores")
    parser.add_argument("--plant", default="", help=f"one of: {'; '.join(PLANTS)}")
    parser.add_argument("--max-states", type=int, default=50_000_000)
    parser.add_argument("--json", action="store_true", help="one object a line")
    asked = parser.parse_args()
    kinds = tuple(kind for kind in asked.kinds.split(",") if kind)
    runs = (Bounds(asked.groups, asked.records, asked.own, asked.failures, asked.takeovers, kinds),)
    if asked.each:
        runs = tuple(replace(runs[0], kinds=(kind,)) for kind in kinds)
    if asked.quick:
        runs = QUICK
    results: Iterable[Result] = (explore(one, max_states=asked.max_states) for one in runs)
    if asked.plant:
        results = (PLANTS[asked.plant].explored(),)
    is_broken = False
    for result in results:
        sys.stdout.write(f"{json.dumps(result.summary()) if asked.json else result}\n")
        sys.stdout.flush()
        is_broken = is_broken or bool(result.violation)
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
