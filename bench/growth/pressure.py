"""Memory of a sender that has nowhere to send to, and of a reader whose application stopped reading."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.growth.cluster import GrownCluster, running
from bench.growth.findings import Finding, Verdict
from bench.growth.pressed import Pressure
from bench.load import Order
from bench.measuring import LoadProcess, measure

GROWN = "MB of the setting"
_TIMEOUT_S = 180.0
_GONE_S = 0.5


def measure_pressure(settings_mb: Sequence[int], sizes_bytes: Sequence[int], found: Finding) -> None:
    """Each setting with each size of a value."""
    with running(1) as cluster:
        for size_bytes in sizes_bytes:
            target = cluster.make(f"full-{size_bytes}")
            count = 4 * max(settings_mb) * 1_000_000 // size_bytes
            measure(cluster, Order("seriatim", target, "throughput", size_bytes, 60, count, is_bulk=True), ())
            for setting_mb in settings_mb:
                order = Pressure("reader", target, setting_mb * 1_000_000, size_bytes)
                _one(cluster, order, f"reader's growth, {size_bytes:,} B", setting_mb, found)
        for size_bytes in sizes_bytes:
            target = cluster.make(f"stuck-{size_bytes}")
            for setting_mb in settings_mb:
                order = Pressure("sender", target, setting_mb * 1_000_000, size_bytes)
                _one(cluster, order, f"sender's growth, {size_bytes:,} B", setting_mb, found)
                for name in cluster.brokers:
                    cluster.restart(name)


def judge(found: Finding) -> None:
    """Verdicts, of all points."""
    for what in found.named(""):
        figures = found.at(what)
        if len(figures) > 1:
            (least, first), *_, (largest, last) = figures.items()
            slope = (last - first) / (largest - least)
            wanted = f"{what}: grows with its setting, by MB for each MB set, at most 2"
            found.verdicts.append(Verdict(wanted, f"{slope:.2f}", slope <= 2))


def _one(cluster: GrownCluster, order: Pressure, what: str, setting_mb: int, found: Finding) -> None:
    log = cluster.directory / "load.log"
    with LoadProcess(order, (), log, module="bench.growth.pressed") as process:
        process.wait_for("begin", _TIMEOUT_S)
        if order.kind == "sender":
            cluster.supervisor.stop_all(cluster.brokers)
            time.sleep(_GONE_S)
            process.stop()
        end = process.wait_for("end", _TIMEOUT_S)
    found.add(what, "MB", GROWN, setting_mb, [end["grown_bytes"] / 1e6])
    found.say(f"{what}, setting {setting_mb} MB: {end['grown_bytes'] / 1e6:.1f} MB, {end['taken']:,} records taken")
