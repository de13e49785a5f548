"""Samples to medians, ratios, a Markdown table and a JSON object. Pure, but for the writing at its end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.cases import CASES, FIGURES, Case, Figure
from bench.driver import Plan, Sample
from bench.goals import GOALS
from bench.peers import PEERS

REFERENCE = "seriatim"
"""Ratios are its median divided by the peer's."""


class Report:
    """All samples of a run, growing."""

    def __init__(self, plan: Plan, environment: dict[str, Any]) -> None:
        self.plan = plan
        self.environment = environment
        self.samples: list[Sample] = []

    def values(self, case: str, peer: str, key: str) -> list[float]:
        """One figure in all rounds that gave it."""
        return [
            sample.figures[key]
            for sample in self.samples
            if sample.case == case and sample.peer == peer and sample.figures.get(key) is not None
        ]

    def medians(self) -> dict[str, dict[str, dict[str, float]]]:
        """By case, peer and key."""
        return {
            case.name: {
                peer: {
                    figure.key: median(values)
                    for figure in FIGURES[case.kind]
                    if (values := self.values(case.name, peer, figure.key))
                }
                for peer in self.plan.peers
            }
            for case in self.plan.cases
        }

    @property
    def failures(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.failure]

    # ---- JSON

    def to_json(self) -> dict[str, Any]:
        """Everything: plan, machine, each round's figures, medians, ratios, goals."""
        medians = self.medians()
        plan = asdict(self.plan) | {"cases": [case.name for case in self.plan.cases]}
        return {
            "environment": self.environment,
            "plan": plan,
            "peers": {name: PEERS[name].title for name in self.plan.peers},
            "samples": [asdict(sample) for sample in self.samples],
            "medians": medians,
            "ratios": _ratios(medians),
            "goals": [
                asdict(goal) | {"ratio": ratio, "is_met": goal.is_met(ratio)}
                for goal in GOALS
                if (ratio := goal.ratio(medians)) is not None
            ],
        }

    # ---- Markdown

    def to_markdown(self) -> str:
        """Tables: one a case, then the goals, then what failed."""
        head = (
            f"{self.environment['began']}, {self.environment['cores']} cores ({self.environment['cpu']}), "
            f"{self.environment['memory_gib']} GiB, Linux {self.environment['kernel']}, "
            f"Seriatim {'compiled' if self.environment['is_compiled'] else 'not compiled'}; "
            f"{self.plan.rounds} rounds of {self.plan.seconds:g} s a case; load average at the start "
            f"{self.environment['load_average'][0]:.1f}. Medians (smallest to largest); ratio: Seriatim's median divided "
            "by the peer's."
        )
        medians = self.medians()
        parts = [head, *(self._case_table(case, medians[case.name]) for case in self.plan.cases)]
        parts += [self._goal_table(), self._failure_list()]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _case_table(self, case: Case, medians: dict[str, dict[str, float]]) -> str:
        figures = [figure for figure in FIGURES[case.kind] if any(figure.key in of for of in medians.values())]
        if not figures:
            return ""
        lines = [
            f"**{case.name}**"
            + (f" ({case.size_bytes:,} B)" if case.kind in {"latency", "catch-up", "outage"} else ""),
            "",
            "| peer | " + " | ".join(f"{figure.label}, {figure.unit} | ratio" for figure in figures) + " |",
            "| --- |" + " ---: | ---: |" * len(figures),
        ]
        for peer in self.plan.peers:
            if medians[peer]:
                cells = (self._cell(case.name, peer, figure, medians) for figure in figures)
                lines.append(f"| {PEERS[peer].title} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _cell(self, case: str, peer: str, figure: Figure, medians: dict[str, dict[str, float]]) -> str:
        values = self.values(case, peer, figure.key)
        if not values:
            return "not given |"
        spread = "" if len(values) == 1 else f" ({number(min(values))} to {number(max(values))})"
        own = medians.get(REFERENCE, {}).get(figure.key)
        ratio = "" if peer == REFERENCE or own is None or not median(values) else f"{own / median(values):.3g}"
        return f"{number(median(values))}{spread} | {ratio}"

    def _goal_table(self) -> str:
        lines = []
        medians = self.medians()
        for goal in GOALS:
            ratio = goal.ratio(medians)
            if ratio is not None:
                wanted = f"{'at least' if goal.is_at_least else 'at most'} {goal.bound:g}"
                reached = "yes" if goal.is_met(ratio) else "**no**"
                lines.append(
                    f"| {goal.case}: {_label(goal.case, goal.key)} | {goal.peer} | {wanted} | {ratio:.3g} | {reached} |"
                )
        head = ["| goal | beside | wanted ratio | measured | reached |", "| --- | --- | --- | ---: | --- |"]
        return "\n".join([*head, *lines]) if lines else ""

    def _failure_list(self) -> str:
        return "\n".join(
            f"- not measured: {one.case}, {one.peer}, round {one.round_number}: {one.failure}" for one in self.failures
        )


def number(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _label(case: str, key: str) -> str:
    kind = next(one.kind for one in CASES if one.name == case)
    return next(figure.label for figure in FIGURES[kind] if figure.key == key)


def _ratios(medians: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        case: {
            peer: {key: peers[REFERENCE][key] / value for key, value in of.items() if value and key in peers[REFERENCE]}
            for peer, of in peers.items()
            if peer != REFERENCE
        }
        for case, peers in medians.items()
        if peers.get(REFERENCE)
    }


def write(report: Report, directory: Path) -> Sequence[Path]:
    """`bench.json` and `bench.md` in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    texts: Iterable[tuple[str, str]] = (
        ("bench.json", json.dumps(report.to_json(), indent=1) + "\n"),
        ("bench.md", report.to_markdown()),
    )
    for name, text in texts:
        partial = directory / f"{name}.partial"
        partial.write_text(text)
        partial.replace(directory / name)
        written.append(directory / name)
    return written
