"""The command: `python -m bench`, `make bench ARGS="…"`; `python -m bench growth` is another one, `growth.command`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from bench import artifacts, plots, report
from bench.cases import CASES, chosen
from bench.driver import Plan, Sample, environment, run
from bench.growth import command
from bench.peers import PEERS
from seriatim.cli.embedded.errors import EmbeddedError

_QUICK = {"rounds": 3, "seconds": 4.0, "warm_up": 6.0, "catch_up": 1_000_000, "fill": 20.0, "outages": 1}
_FULL = {"rounds": 5, "seconds": 10.0, "warm_up": 10.0, "catch_up": 10_000_000, "fill": 90.0, "outages": 2}


def main() -> int:
    """0: all was measured; 1: something failed; 2: wrong use; 3: a peer can't be had; 130: ended by Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] == ["growth"]:
        return command.main(sys.argv[2:])
    try:
        arguments, plan = _parsed()
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    directory: Path = arguments.out or artifacts.HERE / "results" / time.strftime("%Y%m%d-%H%M%S")
    found = report.Report(plan, environment())
    print(f"about {plan.estimate_s() / 60:.0f} minutes; results go to {directory}", file=sys.stderr)

    def note(sample: Sample) -> None:
        found.samples.append(sample)
        report.write(found, directory)  # each time, so that what there is outlives Ctrl-C
        print(_line(sample), file=sys.stderr, flush=True)

    status = 0
    try:
        run(plan, note)
    except KeyboardInterrupt:
        print("bench: stopped; what was measured so far is kept", file=sys.stderr)
        status = 130
    except EmbeddedError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 3
    if found.samples:
        pictures = plots.draw(found, directory)
        print(found.to_markdown())
        print("written:", *(str(path) for path in [*report.write(found, directory), *pictures]), file=sys.stderr)
    return status or (1 if found.failures else 0)


def _parsed() -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(prog="bench", description="Seriatim and its peers, side by side.")
    parser.add_argument("--only", default="", metavar="PEER,…", help=f"of {', '.join(PEERS)} [all]")
    parser.add_argument(
        "--cases", default="", metavar="WORD,…", help="by kind or part of a name [all]; --list shows them"
    )
    parser.add_argument("--full", action="store_true", help="5 rounds, 10 s a case, 10 million records, 10 outages")
    parser.add_argument("--rounds", type=int, help=f"[{_QUICK['rounds']}]")
    parser.add_argument("--seconds", type=float, help=f"of sending in a case [{_QUICK['seconds']:g}]")
    parser.add_argument("--warm-up", type=float, help=f"seconds, twice, not counted [{_QUICK['warm_up']:g}]")
    parser.add_argument("--catch-up", type=int, metavar="RECORDS", help=f"to read [{_QUICK['catch_up']:,}]")
    parser.add_argument("--fill", type=float, metavar="SECONDS", help=f"to write them, at most [{_QUICK['fill']:g}]")
    parser.add_argument("--outages", type=int, help=f"of each kind in each round [{_QUICK['outages']}]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for bench.md, bench.json and *.png [bench/results/…]")
    parser.add_argument("--list", action="store_true", help="show peers and cases")
    arguments = parser.parse_args()
    if arguments.list:
        for name, peer in PEERS.items():
            print(f"{name:12} {peer.title}")
        for case in CASES:
            print(f"{case.kind:12} {case.name}")
        sys.exit(0)
    peers = tuple(arguments.only.split(",")) if arguments.only else tuple(PEERS)
    if unknown := set(peers) - set(PEERS):
        raise ValueError(f"no peer is called {', '.join(unknown)}; there are: {', '.join(PEERS)}")
    settings = dict(_FULL if arguments.full else _QUICK)
    settings |= {key: value for key in settings if (value := getattr(arguments, key)) is not None}
    cases = chosen(arguments.cases.split(",") if arguments.cases else [])
    return arguments, Plan(
        peers,
        cases,
        int(settings["rounds"]),
        settings["seconds"],
        settings["warm_up"],
        int(settings["catch_up"]),
        settings["fill"],
        int(settings["outages"]),
    )


def _line(sample: Sample) -> str:
    start = f"round {sample.round_number}: {sample.peer}: {sample.case}: "
    if sample.failure:
        return start + "failed: " + sample.failure
    shown = ("records_per_s", "mb_per_s", "p50_ms", "p99_ms", "p999_ms", "cpu_s_per_million", "outage_p50_ms")
    figures = ", ".join(f"{key} {report.number(sample.figures[key])}" for key in shown if sample.figures.get(key))
    return start + figures


if __name__ == "__main__":
    sys.exit(main())
