"""The verdict, from the figures: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from seriatim.cli.demo.plan import FaultKind

IDENTICAL = "identical"


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """One fault.

    target: name of the process. outage_ms: how long sending stood still, None where it never went on. apply_outage_ms: the
    same for west. The two are told with the resolution of whoever looked (see `outage`). So it stands in `--json`.
    """

    kind: FaultKind
    target: str
    outage_ms: int | None
    apply_outage_ms: int | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured and found.

    records_sent: in the queue, each once. records_applied: of these, below the position that west holds. end: of the
    queue, an offset. lag_s: by how much west was behind east when the load ended. catch_up_s: how long after that west had
    everything. table_differences, offset_problems: sentences; empty is good. planned: faults that were to happen.
    """

    records_sent: int
    records_applied: int
    duplicates_dropped: int
    transactions: int
    end: int
    tables: int
    rows: int
    table_differences: tuple[str, ...]
    offset_problems: tuple[str, ...]
    planned: tuple[FaultKind, ...]
    faults: tuple[FaultFigures, ...]
    lag_s: float
    catch_up_s: float
    duration_s: float

    def as_json(self) -> dict[str, object]:
        """For `--json`; stable keys."""
        return {
            "verdict": verdict(self),
            "records_sent": self.records_sent,
            "records_applied": self.records_applied,
            "duplicates_dropped": self.duplicates_dropped,
            "faults": [asdict(fault) for fault in self.faults],
            "transactions": self.transactions,
            "tables": self.tables,
            "rows": self.rows,
            "lag_s": round(self.lag_s, 2),
            "catch_up_s": round(self.catch_up_s, 2),
            "duration_s": round(self.duration_s, 1),
        }


def problems(figures: Figures) -> tuple[str, ...]:
    """Everything that didn't hold, as sentences; empty when all did."""
    found = list(figures.table_differences)
    if not figures.tables or not figures.rows:
        found.append("there was nothing to compare")
    found += figures.offset_problems
    if not figures.transactions or not figures.records_sent:
        found.append("nothing was sent")
    if figures.records_applied != figures.records_sent:
        found.append(f"{figures.records_applied:,} of {figures.records_sent:,} records were applied")
    struck = [fault.kind for fault in figures.faults]
    found += [f"no {kind} was killed" for kind in figures.planned if kind not in struck]
    found += [
        f"sending didn't go on after {fault.target} was killed" for fault in figures.faults if fault.outage_ms is None
    ]
    return tuple(found)


def verdict(figures: Figures) -> str:
    """`identical`, or what went wrong."""
    return "; ".join(problems(figures)) or IDENTICAL


def failed(reason: str) -> dict[str, object]:
    """The object for `--json` of a demo that couldn't be carried through."""
    return {"verdict": reason, "records_sent": None, "records_applied": None, "duplicates_dropped": None, "faults": []}


def as_text(figures: Figures) -> str:
    """Some lines for a person."""
    lines = [
        f"records sent          {figures.records_sent:>12,}   of {figures.transactions:,} transactions and the snapshot",
        f"records applied       {figures.records_applied:>12,}",
        f"duplicates dropped    {figures.duplicates_dropped:>12,}   re-sends in the queue, {figures.end:,} offsets in all",
        f"west behind east      {figures.lag_s:>10.2f} s   when the load ended; had everything {figures.catch_up_s:.2f} s later",
    ]
    if figures.faults:
        lines.append(f"faults                {len(figures.faults):>12,}   sending stood still   applying stood still")
        lines += [
            f"  {fault.kind:<12}{fault.target:<14}      {_time(fault.outage_ms):>18}   {_time(fault.apply_outage_ms):>20}"
            for fault in figures.faults
        ]
    lines.append(f"compared              {figures.rows:>12,}   rows of {figures.tables} tables")
    found = problems(figures)
    if found:
        lines += ["verdict: NOT identical, or not proven:", *(f"  - {sentence}" for sentence in found)]
    else:
        lines.append("offsets               no gap, no repeat, no step back")
        lines.append(f"verdict: {IDENTICAL}")
    lines.append(f"took {figures.duration_s:.0f} s")
    return "\n".join(lines)


def milliseconds(seconds: Sequence[float | None]) -> list[int | None]:
    """Rounded; None stays."""
    return [None if one is None else round(one * 1000) for one in seconds]


def _time(milliseconds_: int | None) -> str:
    return "to the end" if milliseconds_ is None else f"{milliseconds_:,} ms"
