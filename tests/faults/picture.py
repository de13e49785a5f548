"""The picture of a campaign: acknowledgements and deliveries over time, with the faults marked."""

from __future__ import annotations

import math
from pathlib import Path

from tests.faults.report import Findings

BUCKET_S = 0.5
_ROW_S = 300.0
_COLOURS = {
    "processes": "#d62728",
    "network": "#1f77b4",
    "impaired network": "#17becf",
    "zookeeper": "#9467bd",
    "disk": "#8c564b",
    "people": "#2ca02c",
    "two at once": "#ff7f0e",
}


def draw(findings: Findings, path: Path) -> None:
    """A PNG: five minutes a row, a coloured bar from the harm to the healing of each fault."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = max(1, math.ceil(findings.seconds / _ROW_S))
    figure, found = plt.subplots(rows, 1, figsize=(14, 0.8 + 1.5 * rows), squeeze=False, layout="constrained")
    highest = max([*findings.acknowledged.values(), 1]) / BUCKET_S
    for number, axis in enumerate(found[:, 0]):
        first = int(number * _ROW_S / BUCKET_S)
        buckets = range(first, first + int(_ROW_S / BUCKET_S))
        times = [bucket * BUCKET_S for bucket in buckets]
        for counts, colour, name in (
            (findings.delivered, "#bbbbbb", "delivered to one subscription"),
            (findings.acknowledged, "#222222", "acknowledged"),
        ):
            rates = [counts[bucket] / BUCKET_S for bucket in buckets]
            axis.plot(times, rates, color=colour, linewidth=0.7, label=name)
        for fault in findings.faults:
            if times[0] <= fault.at_s < times[0] + _ROW_S:
                axis.axvspan(fault.at_s, fault.healed_at_s, color=_COLOURS[fault.family], alpha=0.35, linewidth=0)
        axis.set_xlim(times[0], times[0] + (_ROW_S if rows > 1 else findings.seconds))
        axis.set_ylim(0, min(highest, 3 * findings.records_per_s) * 1.05)
        axis.tick_params(labelsize=7)
    found[0, 0].set_ylabel("records/s", fontsize=8)
    found[-1, 0].set_xlabel("seconds", fontsize=8)
    marks = [mpl.patches.Patch(color=colour, alpha=0.35, label=family) for family, colour in _COLOURS.items()]
    lines = found[0, 0].get_lines()[:2]
    figure.legend(handles=[*lines, *marks], loc="outside upper center", ncols=8, fontsize=8, frameon=False)
    figure.savefig(path, dpi=80)
    plt.close(figure)
