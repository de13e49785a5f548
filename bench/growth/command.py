"""`python -m bench growth`: the growing cases, one after the other."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import artifacts
from bench.driver import FAILURES, environment
from bench.growth import backlog, disk, findings, herds, links, pressure, queues, switching
from bench.growth.findings import Finding

JUDGES = {
    "backlog": backlog.judge,
    "groups": switching.judge,
    "queues": queues.judge,
    "links": switching.judge,
    "herds": herds.judge,
    "pressure": pressure.judge,
    "disk": disk.judge,
}
CASES = tuple(JUDGES)
_QUICK = {"backlog": "1000000,10000000", "groups": "2,16"}
_FULL = {"backlog": "10000000,100000000", "groups": "2,16,64"}


def main(words: list[str]) -> int:
    """0: all was measured; 1: a case failed; 2: wrong use; 130: ended by Ctrl-C."""
    arguments = _parsed(words)
    chosen = arguments.cases.split(",")
    if unknown := set(chosen) - set(CASES):
        print(f"bench growth: no case is called {', '.join(unknown)}; there are: {', '.join(CASES)}", file=sys.stderr)
        return 2
    directory: Path = arguments.out or artifacts.HERE / "results" / time.strftime("growth-%Y%m%d-%H%M%S")
    found = findings.read(directory)
    status = 0
    written: Sequence[Path] = ()
    for case in chosen:
        finding = Finding(case, environment(), _settings(case, arguments))
        if arguments.add and case in found:
            finding.points, finding.notes = found[case].points, found[case].notes
        finding.notes.append(f"{finding.environment['began']}: `python -m bench growth {' '.join(words)}`")
        try:
            _measure(case, arguments, finding)
        except KeyboardInterrupt:
            finding.notes.append("stopped before it was done")
            status = 130
        except FAILURES as error:
            finding.notes.append(f"not all was measured: {type(error).__name__}: {error}")
            print(f"bench growth: {case}: {error}", file=sys.stderr)
            status = 1
        JUDGES[case](finding)
        found[case] = finding
        written = findings.write(found, directory)
        print(finding.to_markdown(), end="\n\n", flush=True)
        if status == 130:
            break
    print("written:", *(str(path) for path in written), file=sys.stderr)
    return status


def _measure(case: str, arguments: argparse.Namespace, finding: Finding) -> None:
    match case:
        case "backlog":
            backlog.measure_backlog(_backlog_plan(arguments), finding)
        case "groups":
            switching.measure_groups(arguments.groups, arguments.faults, arguments.switches, finding)
        case "queues":
            faults, states = arguments.faults, arguments.states
            queues.measure_queues(arguments.queues, states, faults, arguments.switches, finding)
        case "links":
            links.measure_links(arguments.links, arguments.faults, arguments.switches, finding)
        case "herds":
            herds.measure_herds(arguments.herds, finding)
        case "pressure":
            pressure.measure_pressure(arguments.pressure_mb, (100, 1024), finding)
        case "disk":
            disk.measure_disk((100, 1024), arguments.disk_mb, finding)


def _backlog_plan(arguments: argparse.Namespace) -> backlog.Plan:
    return backlog.Plan(arguments.backlog, arguments.rounds, arguments.seconds, arguments.starts, arguments.data)


def _settings(case: str, arguments: argparse.Namespace) -> dict[str, object]:
    match case:
        case "backlog":
            return backlog.settings(_backlog_plan(arguments))
        case "groups" | "queues" | "links":
            return {"switches": arguments.switches, "rate": "1,000 records/s of 100 B"}
        case "disk":
            return {"values": f"{arguments.disk_mb} MB of each size"}
    return {}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.split(",")))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench growth", description="Whether Seriatim stays fast as the work grows.")
    parser.add_argument("--cases", default=",".join(CASES), metavar="CASE,…", help="[%(default)s]")
    parser.add_argument("--full", action="store_true", help="backlog of 100 million records, 64 groups")
    parser.add_argument("--backlog", type=_numbers, metavar="RECORDS,…", help=f"sizes [{_QUICK['backlog']}]")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of send rates at each backlog [%(default)s]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of sending for one rate [%(default)s]")
    parser.add_argument("--starts", type=int, default=3, help="of a broker, of each kind [%(default)s]")
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the backlog there, or use what is there")
    parser.add_argument("--groups", type=_numbers, metavar="N,…", help=f"sizes [{_QUICK['groups']}]")
    parser.add_argument("--queues", type=_numbers, default=(1, 100, 1000), metavar="N,…", help="sizes [1,100,1000]")
    parser.add_argument("--links", type=_numbers, default=(5, 100, 1000), metavar="N,…", help="sizes [5,100,1000]")
    parser.add_argument("--herds", type=_numbers, default=(50, 200, 500), metavar="N,…", help="sizes [50,200,500]")
    parser.add_argument(
        "--states",
        type=_words,
        default=queues.STATES,
        metavar="STATE,…",
        help=f"of the queues [{','.join(queues.STATES)}]",
    )
    parser.add_argument("--switches", type=int, default=20, help="of each kind at each size [%(default)s]")
    parser.add_argument(
        "--faults", type=_words, default=("rotate", "master-kill"), metavar="FAULT,…", help="[rotate,master-kill]"
    )
    parser.add_argument("--pressure-mb", type=_numbers, default=(8, 32, 128), metavar="MB,…", help="[8,32,128]")
    parser.add_argument("--disk-mb", type=int, default=500, metavar="MB", help="of values of each size [%(default)s]")
    parser.add_argument("--add", action="store_true", help="keep the other sizes of these cases that --out holds")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for growth.md, .json and *.png [bench/results/…]")
    arguments = parser.parse_args(words)
    for name, text in (_FULL if arguments.full else _QUICK).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, _numbers(text))
    return arguments
