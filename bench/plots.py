"""The figures as pictures: one PNG a kind of case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.cases import CPU_S, MB_PER_S, OUTAGE_P50, P50, P99, P999, RECORDS_PER_S, SERVERS_MB, Case, Figure, Kind
from bench.peers import PEERS
from bench.report import Report, number

_PANELS: dict[Kind, tuple[Figure, ...]] = {
    Kind.THROUGHPUT: (RECORDS_PER_S, MB_PER_S, CPU_S, SERVERS_MB),
    Kind.LATENCY: (P50, P99, P999),
    Kind.CATCH_UP: (RECORDS_PER_S, CPU_S),
    Kind.OUTAGE: (OUTAGE_P50,),
}


def draw(report: Report, directory: Path) -> Sequence[Path]:
    """Draw what was measured; bars are medians, whiskers reach from the smallest to the largest round."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    written: list[Path] = []
    for kind, panels in _PANELS.items():
        cases = [case for case in report.plan.cases if case.kind is kind and _has(report, case)]
        if not cases:
            continue
        figure, grid = plt.subplots(
            len(panels), 1, figsize=(max(7.0, 2.2 * len(cases)), 3.2 * len(panels)), squeeze=False, layout="constrained"
        )
        for panel, axes in zip(panels, grid[:, 0], strict=True):
            _panel(report, cases, panel, axes)
        grid[0, 0].legend(fontsize=7, ncols=2)
        figure.suptitle(f"{kind}: medians of {report.plan.rounds} rounds, {report.environment['began']}", fontsize=9)
        path = directory / f"{kind}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    return written


def _has(report: Report, case: Case) -> bool:
    return any(sample.case == case.name and sample.figures for sample in report.samples)


def _panel(report: Report, cases: Sequence[Case], panel: Figure, axes: Any) -> None:
    from matplotlib.ticker import NullFormatter

    width = 0.8 / len(report.plan.peers)
    for at, peer in enumerate(report.plan.peers):
        colour = f"C{list(PEERS).index(peer)}"  # a peer's own in every picture of every run
        for place, case in enumerate(cases):
            values = report.values(case.name, peer, panel.key)
            if not values:
                continue
            middle = median(values)
            left = place - 0.4 + (at + 0.5) * width
            whiskers = [[middle - min(values)], [max(values) - middle]]
            axes.bar(left, middle, width, color=colour, yerr=whiskers, capsize=2, error_kw={"linewidth": 0.8})
            axes.annotate(number(middle), (left, middle), ha="center", va="bottom", fontsize=6)
        if any(report.values(case.name, peer, panel.key) for case in cases):
            axes.bar(0, 0, width, color=colour, label=peer)
    axes.set_xticks(range(len(cases)), [case.name for case in cases], fontsize=8)
    axes.set_ylabel(f"{panel.label}\n{panel.unit}", fontsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _place: number(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", alpha=0.3)
