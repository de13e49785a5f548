"""How long a switch takes with more and more groups on the send list, and what idle brokers take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from bench.growth.cluster import GrownCluster, running
from bench.growth.findings import Finding
from bench.measuring import anonymous_bytes, cpu_s, settle

GROWN = "groups on the send list"
AT_MOST = 1.2
RETENTION_MS = 10_000
"""Short, so that the chain document stays as short as it is in practice."""
_IDLE_S = 10.0


def measure_groups(sizes: Sequence[int], faults: Sequence[str], count: int, found: Finding) -> None:
    """A cluster of each size, all its brokers processes of their own. Points are added to `found`."""
    for groups in sizes:
        began_s = time.monotonic()
        with running(groups) as cluster:
            found.say(f"{groups} groups serve after {time.monotonic() - began_s:.0f} s")
            cluster.make("load", retention_ms=RETENTION_MS)
            settle()
            idle(cluster, found)
            measure_switches(cluster, (GROWN, groups), faults, count, found)


def measure_switches(
    cluster: GrownCluster,
    at: tuple[str, int],
    faults: Sequence[str],
    count: int,
    found: Finding,
) -> None:
    """A point for each fault, on queue `load`; `at`: what grew, and how large it is now."""
    grown, size = at
    for fault in faults:
        times_ms = cluster.switch_times_ms("load", fault, count)
        found.add(f"switch, {fault}", "ms", grown, size, times_ms)
        found.say(f"{size} {grown}, {fault}: {', '.join(f'{one:.0f}' for one in times_ms)} ms")


def judge(found: Finding) -> None:
    """Verdicts, of all points."""
    for what in found.named("switch, "):
        found.stays_within(what, AT_MOST)


def idle(cluster: GrownCluster, found: Finding) -> None:
    """Processor time and memory while nobody sends."""
    parts: dict[str, Iterable[str]] = {
        "all brokers": cluster.brokers,
        "coordinators": cluster.coordinator_names,
        "ZooKeeper": ("zookeeper",),
    }
    pids = {what: [cluster.pid(name) for name in names] for what, names in parts.items()}
    before_s = {what: cpu_s(of) for what, of in pids.items()}
    time.sleep(_IDLE_S)
    for what, of in pids.items():
        share = (cpu_s(of) - before_s[what]) / _IDLE_S
        found.add(f"idle: {what}", "processors in use", GROWN, cluster.groups, [share])
        found.add(f"idle: {what}", "MB in all", GROWN, cluster.groups, [sum(map(anonymous_bytes, of)) / 1e6])
        found.say(f"{cluster.groups} groups, idle: {what}: {share:.3f} processors")
