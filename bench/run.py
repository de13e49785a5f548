"""Measures the product with its own commands, on an embedded cluster: `make bench`.

Each case runs for some rounds, in turn, so that a machine whose speed drifts harms all alike. Prints a Markdown table
of medians with the smallest and largest value, and with `--json FILE` writes every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster


@dataclass(frozen=True)
class Case:
    """One call of `seriatim bench`. `figures`: key in its JSON and how the table names it."""

    name: str
    kind: str
    size_bytes: int
    count: int
    figures: dict[str, str]


THROUGHPUT = {"records_per_s": "records/s", "mb_per_s": "MB/s"}
CASES = [
    Case("produce 100 B", "produce", 100, 1_000_000, THROUGHPUT),
    Case("produce 1 KiB", "produce", 1024, 200_000, THROUGHPUT),
    Case("consume 100 B", "consume", 100, 1_000_000, THROUGHPUT),
    Case("consume 1 KiB", "consume", 1024, 200_000, THROUGHPUT),
    Case("one in flight, 100 B", "latency", 100, 2_000, {"latency_p50_ms": "p50 ms", "latency_p99_ms": "p99 ms"}),
    Case("master killed", "failover", 100, 10, {"outage_p50_ms": "p50 ms", "outage_max_ms": "max ms"}),
]


def run_case(case: Case, cluster: DevelopmentCluster, round_number: int) -> dict[str, float]:
    """The figures of one run. Queues are named by size and round, so that consume reads what produce wrote."""
    queue = f"{'failover' if case.kind == 'failover' else f'bench-{case.size_bytes}'}-{round_number}"
    command = [
        *(sys.executable, "-m", "seriatim.cli.main", "bench", case.kind, "--queue", queue, "--json"),
        *("--size", str(case.size_bytes), "--count", str(case.count)),
    ]
    if case.kind == "failover":
        command += ["--pids", str(cluster.settings.directory / "pids.json")]
    environment = os.environ | {"SERIATIM_COORDINATOR": cluster.coordinators}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Run every case for so many rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {case.name: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="seriatim-bench-") as directory:
        cluster = DevelopmentCluster(ClusterSettings(directory=Path(directory), is_restarted=True))
        cluster.start()
        try:
            for round_number in range(1, arguments.rounds + 1):
                for case in CASES:
                    found[case.name].append(run_case(case, cluster, round_number))
                    print(f"round {round_number}: {case.name}", file=sys.stderr)
        finally:
            cluster.close()
    print("| case | figure | median | smallest | largest |\n| --- | --- | --- | --- | --- |")
    for case in CASES:
        for key, label in case.figures.items():
            values = [figures[key] for figures in found[case.name]]
            print(
                f"| {case.name} | {label} | {statistics.median(values):,.1f} | {min(values):,.1f} | {max(values):,.1f} |"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
