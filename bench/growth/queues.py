"""Switch time, memory and idle processor time with more and more queues on the same groups.

First the other queues only exist; then each has an open link that nobody sends to, as after a quiet day.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.growth.cluster import GrownCluster, running, side_by_side
from bench.growth.findings import Finding, Verdict
from bench.growth.switching import AT_MOST, RETENTION_MS
from bench.measuring import anonymous_bytes, cpu_s, settle
from seriatim.producer import Producer

GROWN = "queues"
KIB_AT_MOST = 50.0
_GROUPS = 2
_IDLE_S = 10.0
_TIMEOUT_S = 60.0
STATES = ("without links", "with a link each")


def measure_queues(
    sizes: Sequence[int],
    states: Sequence[str],
    faults: Sequence[str],
    count: int,
    found: Finding,
) -> None:
    """Add queues up to each size, and take the figures; in a cluster of its own for each of `states`."""
    for state in states:
        with running(_GROUPS) as cluster:
            cluster.make("load", retention_ms=RETENTION_MS)
            there = 1
            for size in sorted(sizes):
                before = _memory(cluster)
                began_s = time.monotonic()
                names = [f"idle-{number}" for number in range(there, size)]
                side_by_side(lambda name: cluster.make(name, retention_ms=RETENTION_MS), names)
                if state != STATES[0]:
                    side_by_side(lambda name: _open_link(cluster, name), names)
                found.say(f"{len(names)} queues {state} made in {time.monotonic() - began_s:.1f} s")
                there = max(there, size)
                _idle(cluster, state, size, found)
                _growth(cluster, before, state, len(names), size, found)
                for fault in faults:
                    _switches(cluster, state, size, fault, count, found)


def judge(found: Finding) -> None:
    """Verdicts, of all points."""
    for what in found.named("switch, "):
        found.stays_within(what, AT_MOST)
    for what in found.named("memory of "):
        _memory_verdict(found, what)


def _open_link(cluster: GrownCluster, name: str) -> None:
    with Producer(cluster.addresses, name, max_block_s=_TIMEOUT_S) as producer:
        producer.send(b"one").result(_TIMEOUT_S)


def _idle(cluster: GrownCluster, state: str, size: int, found: Finding) -> None:
    settle()
    time.sleep(_IDLE_S / 2)  # what making them has left to do
    for what, names in _parts(cluster).items():
        pids = [cluster.pid(name) for name in names]
        before_s = cpu_s(pids)
        time.sleep(_IDLE_S)
        share = (cpu_s(pids) - before_s) / _IDLE_S
        found.add(f"idle {what}s, {state}", "processors in use", GROWN, size, [share])
        found.say(f"{size} queues {state}: {what}s take {share:.3f} processors")


def _parts(cluster: GrownCluster) -> dict[str, tuple[str, ...]]:
    return {"broker": cluster.brokers, "coordinator": cluster.coordinator_names}


def _memory(cluster: GrownCluster) -> dict[str, int]:
    """By process, in bytes."""
    return {name: anonymous_bytes(cluster.pid(name)) for names in _parts(cluster).values() for name in names}


def _growth(
    cluster: GrownCluster,
    before: dict[str, int],
    state: str,
    count: int,
    size: int,
    found: Finding,
) -> None:
    """What each of `count` new queues takes, in the process that grew the most: links lie on one of the groups."""
    after = _memory(cluster)
    for what, names in _parts(cluster).items() if count else ():
        each_kib = max(after[name] - before[name] for name in names) / count / 1024
        found.add(f"memory of a {what}, {state}", "KiB for each further queue", GROWN, size, [each_kib])
        found.say(f"{size} queues {state}: {each_kib:.1f} KiB for each in a {what}")


def _switches(cluster: GrownCluster, state: str, size: int, fault: str, count: int, found: Finding) -> None:
    times_ms = cluster.switch_times_ms("load", fault, count)
    found.add(f"switch, {fault}, {state}", "ms", GROWN, size, times_ms)
    if fault == "master-kill" and state != STATES[0]:
        # The first kill ends the others' open links, too; nobody opens new ones while nobody sends.
        found.add("switch, the first master-kill, with a link each", "ms", GROWN, size, times_ms[:1])
    found.say(f"{size} queues {state}, {fault}: {', '.join(f'{one:.0f}' for one in times_ms)} ms")


def _memory_verdict(found: Finding, what: str) -> None:
    """Of the most queues: with few, what a process took for the first time counts for all of them."""
    figures = found.at(what)
    if figures:
        each_kib = list(figures.values())[-1]
        wanted = f"{what}: at most {KIB_AT_MOST:g} KiB for each queue"
        found.verdicts.append(Verdict(wanted, f"{each_kib:.2f}", each_kib <= KIB_AT_MOST))
