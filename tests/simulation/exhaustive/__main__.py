"""`python -m tests.simulation.exhaustive`: explore, and print what was found."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.exhaustive.bounds import KINDS, Bounds
from tests.simulation.exhaustive.explorer import explore


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.exhaustive", description=__doc__)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--records", type=int, default=2)
    parser.add_argument("--own", type=int, default=0)
    parser.add_argument("--failures", type=int, default=1)
    parser.add_argument("--takeovers", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--max-states", type=int, default=50_000_000)
    asked = parser.parse_args()
    kinds = tuple(kind for kind in asked.kinds.split(",") if kind)
    bounds = Bounds(asked.groups, asked.records, asked.own, asked.failures, asked.takeovers, kinds)
    result = explore(bounds, max_states=asked.max_states)
    print(result)
    return 1 if result.violation else 0


if __name__ == "__main__":
    sys.exit(main())
