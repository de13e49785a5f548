"""Which wrong rules would nobody notice? Change the cores one small thing at a time, and see what finds it.

python -m tests.mutation --sample 300 --report mutants.jsonl     of all cores
python -m tests.mutation --modules seriatim.broker_group.core.replica
python -m tests.mutation --modules seriatim.consumer.session --kinds seek "expire session" "cut an application from ZooKeeper"
python -m tests.mutation --quick                                  against the tests alone, and those only that reach a mutant
python -m tests.mutation --since 3d7047e --list

Each mutant runs in a process of its own: schedules of the simulator first, then the cores' own tests, then what is explored
quickly. What is found by none is a rule that no check holds, or a change that makes no difference: somebody has to look.
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from tests.mutation import quick
from tests.mutation.judge import MODULES, SHELL_MODULES, Schedules, Verdict, check, judge
from tests.mutation.operators import changed_lines, mutants
from tests.simulation.schedule import FAULTS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modules",
        nargs="+",
        default=MODULES,
        choices=[*MODULES, *SHELL_MODULES],
        metavar="MODULE",
        help="default: all cores",
    )
    parser.add_argument("--functions", nargs="+", metavar="NAME", help="of these functions only")
    parser.add_argument("--since", metavar="REVISION", help="of lines only that are changed since then")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, by chance (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--schedules", type=int, default=60, metavar="N", help="for each (default 60)")
    parser.add_argument(
        "--kinds", nargs="+", default=(), choices=list(FAULTS), metavar="KIND", help="with faults of these kinds only"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="a line of JSON for each")
    parser.add_argument("--quick", action="store_true", help="only by the cores' own tests that reach its line")
    parser.add_argument("--list", action="store_true", help="print them, and run none")
    return parser.parse_args()


def _line(verdict: Verdict) -> dict[str, Any]:
    return {**dataclasses.asdict(verdict.mutant), "by": verdict.by, "how": verdict.how[:300], "took_s": verdict.took_s}


def main() -> None:
    arguments = _arguments()
    asked = [one for module in arguments.modules for one in mutants(module)]
    if arguments.functions:
        asked = [one for one in asked if one.function in arguments.functions]
    if arguments.since is not None:
        lines = {module: changed_lines(module, arguments.since) for module in arguments.modules}
        asked = [one for one in asked if one.line in lines[one.module]]
    if arguments.sample is not None:
        asked = random.Random(arguments.seed).sample(asked, min(arguments.sample, len(asked)))
    if arguments.list:
        for one in asked:
            print(one.module, one.number, one.function, one.what)
        return
    schedules = Schedules(arguments.schedules, tuple(arguments.kinds))
    if not arguments.quick:
        check({one.module.rpartition(".")[0]: one.module for one in asked}.values(), schedules)
    verdicts = quick.judge(asked) if arguments.quick else judge(asked, schedules)
    found: dict[str, int] = {}
    with arguments.report.open("a") if arguments.report else contextlib.nullcontext() as report:
        for count, verdict in enumerate(verdicts, 1):
            found[verdict.by or "nothing"] = found.get(verdict.by or "nothing", 0) + 1
            if report:
                print(json.dumps(_line(verdict)), file=report, flush=True)
            if not verdict.by:
                print(f"{verdict.mutant.module} {verdict.mutant.function} {verdict.mutant.what}", flush=True)
            if count % 50 == 0 or count == len(asked):
                print(f"{count} of {len(asked)}: found by {found}", flush=True)


if __name__ == "__main__":
    main()
