"""What the growing cases found: points and verdicts, as a table, a JSON object and a picture a case.

A case that is measured again in the same directory replaces what was found of it, or adds to it, size by size; other
cases stay. So a long measurement can be made in parts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import number

_BEGAN_S = time.monotonic()


@dataclass(frozen=True, slots=True)
class Point:
    """One figure at one size of what grew. `values`: as often as it was taken; the figure is their median."""

    what: str
    unit: str
    grown: str
    """What grew, for the axis."""
    size: float
    values: list[float]

    @property
    def figure(self) -> float:
        return median(self.values)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was wanted, and what it is."""

    wanted: str
    measured: str
    is_met: bool


@dataclass(slots=True)
class Finding:
    """All of one case, or of one part of it."""

    case: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, unit: str, grown: str, size: float, values: Sequence[float]) -> None:
        """A point, in the place of one that was found before; none for no values."""
        if values:
            self.points = [one for one in self.points if (one.what, one.unit, one.size) != (what, unit, size)]
            self.points.append(Point(what, unit, grown, size, list(values)))

    def say(self, text: str) -> None:
        """Tell whoever watches how far it is."""
        print(f"{time.monotonic() - _BEGAN_S:6.1f} s  {self.case}: {text}", file=sys.stderr, flush=True)

    def named(self, start: str) -> list[str]:
        """What figures begin with these words, in the order in which they were taken."""
        return [what for what in dict.fromkeys(point.what for point in self.points) if what.startswith(start)]

    def at(self, what: str) -> dict[float, float]:
        """The figure by size, in the order of sizes."""
        return {point.size: point.figure for point in sorted(self.points, key=_size) if point.what == what}

    def stays_within(self, what: str, most: float) -> None:
        """A verdict: that the figure at no larger size is more than so many times that at the smallest."""
        figures = self.at(what)
        if len(figures) < 2:
            return
        (least, first), *others = figures.items()
        worst, highest = max(others, key=lambda one: one[1])
        ratio = highest / first if first else float("inf")
        wanted = f"{what}: at most {most:g} times as much as at {number(least)}; the most is at {number(worst)}"
        self.verdicts.append(Verdict(wanted, f"{ratio:.3g}", ratio <= most))

    def is_at_most(self, what: str, most: float) -> None:
        """A verdict: that no figure is above `most`."""
        figures = self.at(what)
        if figures:
            largest = max(figures.values())
            self.verdicts.append(Verdict(f"{what}: at most {most:g}", number(largest), largest <= most))

    def to_markdown(self) -> str:
        """A table of the points, the verdicts, the notes."""
        machine = self.environment
        told = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        load = machine["load_average"][0]
        lines = [
            f"**{self.case}**: {machine['began']}, {machine['cores']} cores, load average at the start {load:.1f}; {told}",
            "",
            "| what | grown | size | median | smallest | largest | times |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for one in sorted(self.points, key=lambda point: (point.what, point.size)):
            spread = f"{number(min(one.values))} | {number(max(one.values))} | {len(one.values)}"
            lines.append(
                f"| {one.what}, {one.unit} | {one.grown} | {number(one.size)} | {number(one.figure)} | {spread} |"
            )
        if self.verdicts:
            lines += ["", "| wanted | measured | reached |", "| --- | ---: | --- |"]
            lines += [
                f"| {one.wanted} | {one.measured} | {'yes' if one.is_met else '**no**'} |" for one in self.verdicts
            ]
        return "\n".join([*lines, *(["", *(f"- {note}" for note in self.notes)] if self.notes else [])])


def _size(point: Point) -> float:
    return point.size


def read(directory: Path) -> dict[str, Finding]:
    """What was found before in this directory, by case."""
    path = directory / "growth.json"
    if not path.exists():
        return {}
    return {case: from_json(one) for case, one in json.loads(path.read_text()).items()}


def from_json(content: dict[str, Any]) -> Finding:
    """The inverse of `asdict`."""
    points = [Point(**one) for one in content["points"]]
    verdicts = [Verdict(**one) for one in content["verdicts"]]
    return Finding(**content | {"points": points, "verdicts": verdicts})


def write(found: Mapping[str, Finding], directory: Path) -> Sequence[Path]:
    """`growth.json`, `growth.md`, and `growth-CASE.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "growth.json": json.dumps({case: asdict(one) for case, one in found.items()}, indent=1) + "\n",
        "growth.md": "\n\n".join(one.to_markdown() for one in found.values()) + "\n",
    }
    for name, text in texts.items():
        partial = directory / f"{name}.partial"
        partial.write_text(text)
        partial.replace(directory / name)
    return [*(directory / name for name in texts), *(_drawn(one, directory) for one in found.values() if one.points)]


def _drawn(finding: Finding, directory: Path) -> Path:
    """A panel for each unit, a line for each figure over what grew; whiskers reach from the smallest to the largest."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys((point.unit, point.grown) for point in finding.points))
    figure, grid = plt.subplots(len(panels), 1, figsize=(7.5, 3.2 * len(panels)), squeeze=False, layout="constrained")
    for (unit, grown), axes in zip(panels, grid[:, 0], strict=True):
        points = [point for point in finding.points if (point.unit, point.grown) == (unit, grown)]
        for what in dict.fromkeys(point.what for point in points):
            line = sorted((point for point in points if point.what == what), key=_size)
            middles = [point.figure for point in line]
            whiskers = [
                [point.figure - min(point.values) for point in line],
                [max(point.values) - point.figure for point in line],
            ]
            axes.errorbar([point.size for point in line], middles, yerr=whiskers, marker="o", capsize=3, label=what)
        smallest = min((point.size for point in points if point.size), default=1.0)
        axes.set_xscale("symlog", linthresh=smallest)
        axes.set_xticks(
            sorted({point.size for point in points}), [number(one) for one in sorted({p.size for p in points})]
        )
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel(grown, fontsize=8)
        axes.set_ylabel(unit, fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(f"{finding.case}: medians, {finding.environment['began']}", fontsize=9)
    path = directory / f"growth-{finding.case}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
