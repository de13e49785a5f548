"""Send rate, memory, and start-up of a broker with more and more unread records.

Two clusters run side by side and are sent to in turn: one whose queue keeps everything, and one that is sent to a new
queue each time. So what the machine does at that hour harms both alike, and the figure is the ratio of such a pair.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.growth.cluster import GrownCluster, running
from bench.growth.findings import Finding, Verdict
from bench.load import Order
from bench.measuring import anonymous_bytes, measure, settle, wait_until
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import WorldError

QUEUE = "kept"
READER = "absent"
GROWN = "unread records"
SIZE_BYTES = 100
STORED_BYTES = 115
"""What a member keeps of a record: the value, and some 13 bytes in a hundred of frames, places and the log."""
LEAST_RATIO = 0.9
START_AT_MOST_S = 5.0
_GROUPS = 2
_FILL_RATE = 50_000
"""Records a second, at the least: a fill that is slower is given up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`sizes`: of the backlog, rising; `directory`: where the kept records stay, None: they go."""

    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    starts: int
    directory: Path | None


def measure_backlog(plan: Plan, found: Finding) -> None:
    """Fill up to each size; at each one take the figures. Points are added to `found`."""
    with ExitStack() as stack:
        fresh = stack.enter_context(running(_GROUPS))
        kept = stack.enter_context(running(_GROUPS, plan.directory))
        _make_kept(kept)
        if plan.rounds:
            _warm_up(plan, fresh)
        for size in plan.sizes:
            _fill(kept, size, found)
            _memory(kept, size, found)
            if plan.rounds:
                _rates(plan, fresh, kept, size, found)
        if plan.starts and plan.sizes:
            _starts(plan, fresh, 0, found)
            _starts(plan, kept, unread(kept), found)


def judge(found: Finding) -> None:
    """Verdicts, of all points."""
    ratios = found.at("rate beside that into an empty queue")
    for grown, ratio in ratios.items():
        wanted = f"send rate with {grown:,.0f} unread records beside 0: at least {LEAST_RATIO:g}"
        found.verdicts.append(Verdict(wanted, f"{ratio:.3f}", ratio >= LEAST_RATIO))
    for what in ("start after SIGKILL", "start, nothing in the page cache"):
        found.is_at_most(f"{what}: registered", START_AT_MOST_S)


def unread(cluster: GrownCluster) -> int:
    """How many records the subscription has before it, once members tell: after a start, or a long fill, not at once. Raises TimeoutError."""
    told: list[int] = []

    def is_told() -> bool:
        try:
            subscriptions = cluster.view(QUEUE).subscriptions
        except WorldError:
            return False
        told.extend(one.lag_records for one in subscriptions if one.subscription == READER and one.has_lag)
        return bool(told)

    wait_until(is_told, "how much is unread isn't known")
    return told[0]


def check_room(records: int, free_bytes: int) -> None:
    """Raises LookupError where so many records, on both members, don't fit."""
    needed = records * STORED_BYTES * 2
    if needed > free_bytes:
        raise LookupError(f"{records:,} records take {needed / 1e9:,.0f} GB, {free_bytes / 1e9:,.0f} are free")


def _make_kept(cluster: GrownCluster) -> None:
    if QUEUE in {one.queue for one in cluster.call("ListQueues", pb.ListQueuesRequest()).queues}:
        return  # its records are there from before
    cluster.make(QUEUE)
    request = pb.CreateSubscriptionRequest(queue=QUEUE, subscription=READER, **{"from": "earliest"})
    cluster.call("CreateSubscription", request)


def _fill(cluster: GrownCluster, size: int, found: Finding) -> None:
    missing = size - unread(cluster)
    if missing > 0:
        check_room(missing, shutil.disk_usage(cluster.directory).free)
        target = {"coordinators": cluster.addresses, "queue": QUEUE}
        order = Order("seriatim", target, "throughput", SIZE_BYTES, missing / _FILL_RATE, missing, is_bulk=True)
        filled = measure(cluster, order, ())
        found.say(f"filled {filled['count']:,} records, {filled['count'] / filled['seconds']:,.0f} a second")
        settle()
    if unread(cluster) < size:
        raise TimeoutError(f"{unread(cluster):,} of {size:,} records could be written at {_FILL_RATE:,} a second")


def _warm_up(plan: Plan, cluster: GrownCluster) -> None:
    """The other cluster is warm from being filled."""
    target = cluster.make("warm-up")
    measure(cluster, Order("seriatim", target, "throughput", SIZE_BYTES, plan.seconds), ())
    cluster.call("DeleteQueue", pb.QueueRequest(queue="warm-up"))


def _memory(cluster: GrownCluster, size: int, found: Finding) -> None:
    for names, what in ((cluster.brokers, "broker"), (cluster.coordinator_names, "coordinator")):
        largest = max(anonymous_bytes(cluster.pid(name)) for name in names)
        found.add(f"memory of the largest {what}", "MB", GROWN, size, [largest / 1e6])


def _rates(plan: Plan, fresh: GrownCluster, kept: GrownCluster, size: int, found: Finding) -> None:
    with_none: list[float] = []
    with_backlog: list[float] = []
    for turn in range(plan.rounds):
        name = f"new-{size}-{turn}"
        target = fresh.make(name)
        pair: list[tuple[GrownCluster, dict[str, str], list[float]]] = [
            (fresh, target, with_none),
            (kept, target | {"coordinators": kept.addresses, "queue": QUEUE}, with_backlog),
        ]
        for cluster, at, rates in pair if turn % 2 else reversed(pair):
            settle()
            done = measure(cluster, Order("seriatim", at, "throughput", SIZE_BYTES, plan.seconds), ())
            rates.append(done["count"] / done["seconds"])
        fresh.call("DeleteQueue", pb.QueueRequest(queue=name))
        found.say(f"{size:,} unread: {with_backlog[-1]:,.0f} records/s; none: {with_none[-1]:,.0f}")
    ratios = [backlog / none for backlog, none in zip(with_backlog, with_none, strict=True)]
    found.add("send rate, with the backlog", "records/s", GROWN, size, with_backlog)
    found.add("send rate, into an empty queue in turn", "records/s", GROWN, size, with_none)
    found.add("rate beside that into an empty queue", "ratio of each pair", GROWN, size, ratios)
    found.say(f"{size:,} unread: {median(ratios):.3f} times the rate into an empty queue")


def _starts(plan: Plan, cluster: GrownCluster, size: int, found: Finding) -> None:
    """A member of the group that holds the most, stopped or killed and started again."""
    registered: dict[str, list[float]] = {"start after SIGKILL": [], "start, nothing in the page cache": []}
    in_sync: list[float] = []
    view = cluster.view(QUEUE) if size else None
    held: dict[str, int] = dict.fromkeys((f"g{number}" for number in range(1, _GROUPS + 1)), 0)
    for link in view.links if view else ():
        held[link.group] += link.committed_index
    group = max(held, key=lambda one: held[one])
    for _ in range(plan.starts):
        for what, times_s in registered.items():
            name = f"{group}-a"
            started_s = _killed(cluster, name) if "SIGKILL" in what else _evicted(cluster, name)
            times_s.append(time.perf_counter() - started_s)
            wait_until(lambda: cluster.group_is_in_sync(group), f"{group} isn't in sync")
            in_sync.append(time.perf_counter() - started_s)
    for what, times_s in registered.items():
        found.add(f"{what}: registered", "s", "records of the broker", held[group], times_s)
        found.say(f"{what}, {held[group]:,} records: {', '.join(f'{one:.2f}' for one in times_s)} s")
    found.add("start: group in sync again", "s", "records of the broker", held[group], in_sync)


def _killed(cluster: GrownCluster, name: str) -> float:
    """SIGKILL; when the supervisor started it again (perf_counter), once it says that it is registered."""
    before = cluster.supervisor.kill(name)
    while cluster.supervisor.pid(name) in {None, before}:
        time.sleep(0.005)
    started_s = time.perf_counter()
    cluster.supervisor.wait_for_line(name, timeout_s=START_AT_MOST_S * 10)
    return started_s


def _evicted(cluster: GrownCluster, name: str) -> float:
    """End it, drop its files from the page cache, start it; when it was started, once it says that it is registered."""
    cluster.supervisor.stop(name)
    os.sync()
    for path in (cluster.directory / name).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started_s = time.perf_counter()
    cluster.restart(name)
    return started_s


def settings(plan: Plan) -> dict[str, Any]:
    """For the report."""
    return {"rounds": plan.rounds, "seconds of sending": plan.seconds, "value": f"{SIZE_BYTES} B", "groups": _GROUPS}
