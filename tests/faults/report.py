"""What a campaign found, as a page for people and as JSON; the picture is `picture`'s."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.outages import BOUNDS_MS, histogram, percentile
from tests.faults.probe import STILL_S

KEPT = "## Campaigns so far"
_RARE = 5
_FAMILIES = ("processes", "network", "impaired network", "zookeeper", "disk", "people", "two at once")


@dataclass(slots=True)
class Judged:
    """A fault after its round was judged. Seconds from the campaign's start; outages in seconds.

    `sending_s`, `reading_s`: longest standstill between harm and healing; `healing_s`: longest one of sending from
    then on, until all was as before. `disk_s`: how long the machine's own disk stood still meanwhile (`probe`).
    """

    number: int
    round: int
    kind: str
    family: str
    targets: tuple[str, ...]
    at_s: float
    healed_at_s: float
    whole_at_s: float
    sending_s: float
    reading_s: float
    healing_s: float
    note: str
    disk_s: float = 0.0


@dataclass(slots=True)
class Findings:
    """Everything that the report tells."""

    command: str
    seed: int
    records_per_s: float
    faults: list[Judged] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    """What processes logged of defects of their own."""
    records: Counter[str] = field(default_factory=Counter)
    quiet_gaps_s: list[float] = field(default_factory=list)
    acknowledged: Counter[int] = field(default_factory=Counter)
    """By half seconds from the campaign's start."""
    delivered: Counter[int] = field(default_factory=Counter)
    """To one subscription, by half seconds."""
    rounds: int = 0
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.violations or self.stuck or self.deaths or self.defects)


def write(findings: Findings, directory: Path, targets_ms: dict[str, tuple[float, float]]) -> None:
    """`faults.md` and `faults.json`; what people wrote on the page, from the section `KEPT` on, stays as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "faults.json").write_text(json.dumps(_data(findings), indent=1) + "\n")
    page = directory / "faults.md"
    kept = ""
    if page.exists():
        _, head, tail = page.read_text().partition(KEPT)
        kept = head + tail
    text = "\n".join([*_page(findings, targets_ms), ""])
    page.write_text(text + ("\n" + kept if kept else ""))


def _data(findings: Findings) -> dict[str, object]:
    return asdict(findings) | {"acknowledged": None, "delivered": None, "records": dict(findings.records)}


def _page(findings: Findings, targets_ms: dict[str, tuple[float, float]]) -> Iterable[str]:
    records = findings.records
    clean = "none" if not findings.violations else f"**{len(findings.violations)}**"
    yield "# Fault campaign"
    yield ""
    yield (
        "Real processes, each on a host of its own (network namespaces, a bridge, nftables), each broker on a real file "
        "system of its own, ZooKeeper as an ensemble of three. Two senders of which one is elected send "
        f"{findings.records_per_s:g} records a second; two subscriptions read, one with two readers. One fault at a "
        "time, or two at once, with quiet times between. Afterwards a checker judges the recorded history of each "
        "round (its own queue), a reader reads the whole queue again by offset, and both copies of each sealed link "
        "are checked against its certificate."
    )
    yield ""
    yield f"    {findings.command}"
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    yield f"| machine | {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()} |"
    yield f"| faults | {len(findings.faults)} in {findings.seconds / 60:.1f} minutes, {findings.rounds} rounds, seed {findings.seed} |"
    yield f"| records | {records['sent']:,} sent, {records['acknowledged']:,} acknowledged, {records['handed out']:,} handed out |"
    yield f"| violations (lost, repeated, out of order, disagreement of offsets, forged copies) | {clean} |"
    yield f"| didn't go on in time | {len(findings.stuck) or 'none'} |"
    yield f"| processes that ended by themselves | {len(findings.deaths) or 'none'} |"
    yield f"| tracebacks in their logs | {len(findings.defects) or 'none'} |"
    if findings.quiet_gaps_s:
        quiet = findings.quiet_gaps_s
        yield (
            "| longest standstill of sending in a quiet time, without any fault | "
            f"median {_ms(percentile(quiet, 50))} ms, 99th percentile {_ms(percentile(quiet, 99))} ms |"
        )
    yield ""
    yield "![throughput over time, with the faults marked](faults.png)"
    yield ""
    yield from _wrong(findings)
    yield from _headlines(findings.faults, targets_ms)
    yield from _by_kind(findings.faults)
    yield from _histograms(findings.faults)


def _wrong(findings: Findings) -> Iterable[str]:
    for title, found in (
        ("Violations", findings.violations),
        ("Didn't go on in time", findings.stuck),
        ("Ended by themselves", findings.deaths),
        ("Tracebacks", findings.defects),
    ):
        if found:
            yield f"## {title}"
            yield ""
            yield from (f"- {one}" for one in found[:50])
            yield ""


def _headlines(faults: Sequence[Judged], targets_ms: dict[str, tuple[float, float]]) -> Iterable[str]:
    yield "## Outage of sending, against what it must reach"
    yield ""
    yield "| fault | count | median ms | goal | 99th percentile ms | goal | longest ms | the disk stood still | 99th percentile of the others |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind, (median_goal, high_goal) in targets_ms.items():
        values = [one.sending_s for one in faults if one.kind == kind]
        others = [one.sending_s for one in faults if one.kind == kind and not one.disk_s]
        if values:
            yield (
                f"| {kind} | {len(values)} | {_ms(percentile(values, 50))} | {median_goal:g} | "
                f"{_ms(percentile(values, 99))} | {high_goal:g} | {_ms(max(values))} | "
                f"{len(values) - len(others)} times | {_ms(percentile(others, 99)) if others else ''} |"
            )
    yield ""
    yield (
        f"*The disk stood still*: for {STILL_S * 1000:g} ms or longer during the fault, the machine's own, on which all processes "
        "have their files (measured beside them, by small writes that are flushed). Nothing else is left out anywhere."
    )
    yield ""
    longer = [one for one in faults if one.reading_s > one.sending_s + 0.05 and "reader" not in one.kind]
    yield (
        f"Reading stood still for over 50 ms longer than sending in {len(longer)} of {len(faults)} faults, readers' own "
        f"faults not counted{_listed(longer)}."
    )
    yield ""


def _listed(faults: Sequence[Judged]) -> str:
    kinds = Counter(one.kind for one in faults)
    return ": " + ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(12)) if kinds else ""


def _by_kind(faults: Sequence[Judged]) -> Iterable[str]:
    yield "## Faults by kind"
    yield ""
    yield (
        "Standstill in milliseconds between harm and healing: median, 99th percentile (nearest rank), longest. "
        "*After*: longest standstill of sending from healing until all was as before."
    )
    yield ""
    yield "| kind | count | sending | | | reading | | | after |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for family in _FAMILIES:
        mine = [one for one in faults if one.family == family]
        if not mine:
            continue
        yield f"| **{family}** | **{len(mine)}** | | | | | | | |"
        if family == "two at once":
            yield _row("all pairs", mine)
            continue
        for kind in sorted({one.kind for one in mine}):
            yield _row(kind, [one for one in mine if one.kind == kind])
    yield ""


def _row(kind: str, faults: Sequence[Judged]) -> str:
    def three(value: Callable[[Judged], float]) -> str:
        values = [value(one) for one in faults]
        return f"{_ms(percentile(values, 50))} | {_ms(percentile(values, 99))} | {_ms(max(values))}"

    after = max(one.healing_s for one in faults)
    return (
        f"| {kind.replace('|', 'and')} | {len(faults)} | {three(lambda one: one.sending_s)} | "
        f"{three(lambda one: one.reading_s)} | {_ms(after)} |"
    )


def _histograms(faults: Sequence[Judged]) -> Iterable[str]:
    """Of sending, and of reading. Kinds of which there were few are together; a class without faults is left empty."""
    heads = [*(f"≤ {bound}" for bound in BOUNDS_MS), "more"]
    often = {kind for kind, count in Counter(one.kind for one in faults).items() if count >= _RARE}
    rows: dict[str, list[Judged]] = {}
    for one in sorted(faults, key=lambda one: (_FAMILIES.index(one.family), one.kind not in often, one.kind)):
        rows.setdefault(one.kind if one.kind in often else f"{one.family}, each less than {_RARE} times", []).append(
            one
        )
    rows["**all**"] = list(faults)
    for what, value in (("sending", lambda one: one.sending_s), ("reading", lambda one: one.reading_s)):
        yield f"## Histogram of the outage of {what}"
        yield ""
        yield f"| kind, ms | {' | '.join(heads)} |"
        yield f"| --- |{' ---: |' * len(heads)}"
        for name, mine in rows.items():
            cells = " | ".join(str(count) if count else "" for count in histogram([value(one) for one in mine]))
            yield f"| {name.replace('|', 'and')} | {cells} |"
        yield ""


def _ms(seconds: float) -> str:
    return "∞" if seconds == float("inf") else f"{seconds * 1000:.0f}"
