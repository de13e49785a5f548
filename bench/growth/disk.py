"""Bytes that brokers write to the disk for each byte of values sent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from bench.growth.cluster import GrownCluster, running, written_bytes
from bench.growth.findings import Finding
from bench.load import Order
from bench.measuring import measure

GROWN = "bytes of a value"
AT_MOST = 2.5
_SECONDS_AT_MOST = 120.0
_QUIET_S = 5.0
_SETTLES_WITHIN_S = 60.0
_NOTHING_BYTES = 1_000_000


def measure_disk(sizes_bytes: Sequence[int], megabytes: int, found: Finding) -> None:
    """Send so many megabytes of values of each size; what the brokers wrote when nothing is written any more."""
    with running(2) as cluster:
        for size_bytes in sizes_bytes:
            before = _written(cluster)
            count = megabytes * 1_000_000 // size_bytes
            order = Order(
                "seriatim", cluster.make(f"of-{size_bytes}"), "throughput", size_bytes, _SECONDS_AT_MOST, count
            )
            sent_bytes = measure(cluster, order, ())["count"] * size_bytes
            after = _settled(cluster)
            group = cluster.wait_until_link_is_open(f"of-{size_bytes}").group
            members = {
                name: (after[name] - before[name]) / sent_bytes for name in after if name.partition("-")[0] == group
            }
            found.add("a member", "bytes written for each byte sent", GROWN, size_bytes, list(members.values()))
            found.add("both members", "bytes written for each byte sent", GROWN, size_bytes, [sum(members.values())])
            found.say(f"{size_bytes} B, {sent_bytes / 1e6:,.0f} MB: {members}")


def judge(found: Finding) -> None:
    """Verdicts, of all points."""
    found.is_at_most("a member", AT_MOST)
    found.is_at_most("both members", AT_MOST)


def _written(cluster: GrownCluster) -> dict[str, int]:
    return {name: written_bytes(cluster.pid(name)) for name in cluster.brokers}


def _settled(cluster: GrownCluster) -> dict[str, int]:
    """What was written, once hardly anything more is: what a store puts off (merging files) counts."""
    deadline_s = time.monotonic() + _SETTLES_WITHIN_S
    while True:
        os.sync()
        before = _written(cluster)
        time.sleep(_QUIET_S)
        after = _written(cluster)
        if sum(after.values()) - sum(before.values()) < _NOTHING_BYTES or time.monotonic() > deadline_s:
            return after
