"""Rounds, peers and cases in turn.

Only one peer runs at a time, each begins a round with an empty disk and a load that isn't counted, and the order of the
peers shifts from round to round, so that a machine whose speed drifts harms all alike.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import seriatim.producer.buffer
from bench.artifacts import CACHE
from bench.cases import Case, Kind
from bench.load import Order
from bench.measuring import LoadFailed, measure, settle
from bench.outage import measure_outages
from bench.peers import PEERS
from bench.peers.base import Peer, PeerFailed
from seriatim.cli.embedded.errors import EmbeddedError
from seriatim.cli.measurement import milliseconds, percentile
from seriatim.protocol.errors import SeriatimError

FAILURES = (EmbeddedError, SeriatimError, LoadFailed, PeerFailed, LookupError, OSError, subprocess.SubprocessError)
"""What costs a peer its figure, and not the others theirs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how long."""

    peers: tuple[str, ...]
    cases: tuple[Case, ...]
    rounds: int
    seconds: float
    """Of sending in each throughput and latency case."""
    warm_up_s: float
    """Of sending before each peer's first case: of many records, and again of one in flight."""
    catch_up: int
    """Records to read."""
    fill_s: float
    """At most so long they are written; a slow peer then reads fewer."""
    outages: int
    """Of each kind, in each round."""

    def cases_of(self, peer: type[Peer]) -> list[Case]:
        """Those that the peer can be given."""
        return [case for case in self.cases if peer.takes(case)]

    def estimate_s(self) -> float:
        """About how long it takes: on two cores, without fetching."""
        each_s = {
            Kind.THROUGHPUT: self.seconds + 3,
            Kind.LATENCY: self.seconds + 3,
            Kind.CATCH_UP: min(self.fill_s, 5 + self.catch_up / 150_000) + 5 + self.catch_up / 500_000,
            Kind.OUTAGE: 5 + self.outages * 20,
        }
        turn_s = sum(
            20 + 2 * self.warm_up_s + sum(each_s[case.kind] for case in self.cases_of(PEERS[name]))
            for name in self.peers
        )
        return self.rounds * turn_s


@dataclass(frozen=True, slots=True)
class Sample:
    """What one case gave for one peer in one round; `failure` says why where it gave nothing."""

    round_number: int
    peer: str
    case: str
    figures: dict[str, Any]
    failure: str = ""


def run(plan: Plan, on_sample: Callable[[Sample], None]) -> None:
    """Measure everything; each sample is told when it is there. Raises Missing where a peer can't be fetched."""
    packages = {name: PEERS[name].fetch() for name in plan.peers}
    for number in range(1, plan.rounds + 1):
        shift = (number - 1) % len(plan.peers)
        for name in plan.peers[shift:] + plan.peers[:shift]:
            cases = plan.cases_of(PEERS[name])
            if cases:
                _one_turn(plan, number, PEERS[name], cases, packages[name], on_sample)


def _one_turn(
    plan: Plan,
    number: int,
    kind: type[Peer],
    cases: Sequence[Case],
    packages: Sequence[Path],
    on_sample: Callable[[Sample], None],
) -> None:
    CACHE.mkdir(exist_ok=True)  # on the disk of the work tree: /tmp may be memory, where a flush costs nothing
    directory = Path(tempfile.mkdtemp(prefix=f"data-{kind.name}-", dir=CACHE))
    peer = kind(directory)
    try:
        try:
            peer.start()
            _warm_up(plan, peer, packages)
        except FAILURES as error:
            for case in cases:
                on_sample(Sample(number, peer.name, case.name, {}, f"could not start: {error}"))
            return
        for case in cases:
            on_sample(_sample(plan, number, peer, case, packages))
    finally:
        peer.close()
        shutil.rmtree(directory, ignore_errors=True)


def _warm_up(plan: Plan, peer: Peer, packages: Sequence[Path]) -> None:
    if plan.warm_up_s > 0:
        target = peer.make_queue("warm-up")
        for mode in ("throughput", "one-in-flight"):
            measure(peer, Order(peer.client, target, mode, 1024, plan.warm_up_s), packages)


def _sample(plan: Plan, number: int, peer: Peer, case: Case, packages: Sequence[Path]) -> Sample:
    settle()
    load_average = os.getloadavg()[0]
    try:
        target = peer.make_queue(case.name.replace(" ", "-").replace(",", ""))
        figures = _figures(plan, peer, case, target, packages)
    except FAILURES as error:
        return Sample(number, peer.name, case.name, {}, f"{type(error).__name__}: {error}")
    return Sample(number, peer.name, case.name, figures | {"load_average": load_average})


def _figures(plan: Plan, peer: Peer, case: Case, target: dict[str, str], packages: Sequence[Path]) -> dict[str, Any]:
    """The figures of a case (`cases.FIGURES`), and what they were made of."""
    if case.kind is Kind.OUTAGE:
        return measure_outages(peer, case, target, plan.outages, packages)
    if case.kind is Kind.CATCH_UP:
        order = Order(
            peer.client, target, "throughput", case.size_bytes, plan.fill_s, plan.catch_up, is_bulk=peer.has_bulk
        )
        filled = measure(peer, order, packages)
        settle()
        order = Order(peer.client, target, "read", case.size_bytes, 10 * plan.fill_s, filled["count"])
        found = measure(peer, order, packages)
        if found["count"] != filled["count"]:
            raise LoadFailed(f"read {found['count']:,} of {filled['count']:,} records")
    else:
        mode = "throughput" if case.kind is Kind.THROUGHPUT else "rate" if case.rate else "one-in-flight"
        order = Order(peer.client, target, mode, case.size_bytes, plan.seconds, rate=case.rate, is_bulk=case.is_bulk)
        found = measure(peer, order, packages)
    count, seconds = found["count"], max(found["seconds"], 1e-9)
    cpu_s = found["client_cpu_s"] + found["servers_cpu_s"]
    latencies_s = found.pop("latencies_s", [])
    if latencies_s:
        found |= {
            "p50_ms": milliseconds(percentile(latencies_s, 50)),
            "p99_ms": milliseconds(percentile(latencies_s, 99)),
            "p999_ms": milliseconds(percentile(latencies_s, 99.9)),
        }
    return found | {
        "records_per_s": count / seconds,
        "mb_per_s": count * case.size_bytes / seconds / 1e6,
        "cpu_s_per_million": cpu_s / max(count, 1) * 1e6,
        "cpu_share": cpu_s / seconds,
    }


def environment() -> dict[str, Any]:
    """What the figures were taken on."""
    models = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    cpu = next(models, "").partition(":")[2].strip()
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "began": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "cores": os.cpu_count(),
        "cpu": cpu,
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "is_compiled": str(seriatim.producer.buffer.__file__).endswith(".so"),
        "load_average": os.getloadavg(),
    }
