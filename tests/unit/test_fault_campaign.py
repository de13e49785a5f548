"""What the fault campaign's report is made of: the plan, the outages, the page."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import report
from tests.faults.catalogue import KINDS, Kill, Kind, plan
from tests.faults.outages import histogram, longest_gap_s, longest_of_s, longest_within_s, percentile
from tests.faults.report import Findings, Judged

HEADLINES = [kind.name for kind in KINDS if kind.is_headline]


def steady(from_s: float, until_s: float, every_s: float = 0.01) -> list[float]:
    return [from_s + number * every_s for number in range(int((until_s - from_s) / every_s))]


def test_a_plan_has_fifty_of_each_headline_and_every_kind():
    counts = Counter(kind.name for kind in plan(500, random.Random(1)))
    assert counts.total() == 500
    assert len(HEADLINES) == 6
    assert all(counts[name] >= 50 for name in HEADLINES)
    assert {kind.name for kind in KINDS} <= counts.keys()
    assert sum(";" in name for name in counts.elements()) >= 20


@pytest.mark.parametrize("count", [1, 7, 80])
def test_a_short_plan_has_as_many_as_were_asked_for(count):
    assert len(plan(count, random.Random(2))) == count


def test_a_plan_of_one_kind_repeats_it():
    kind = Kind("one", "processes", (Kill("master"),))
    assert plan(5, random.Random(3), [kind], with_pairs=False) == [kind] * 5


def test_names_of_kinds_are_unique_and_the_same_seed_gives_the_same_plan():
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert plan(50, random.Random(4)) == plan(50, random.Random(4))


def test_an_outage_is_the_longest_gap_that_overlaps_the_fault_less_the_ordinary_one():
    times = [*steady(0, 2), *steady(2.5, 4), *steady(9, 10)]
    assert longest_gap_s(times, 2.0, 3.0) == pytest.approx(0.5, abs=0.02)
    assert longest_gap_s(times, 1.0, 1.5) == pytest.approx(0.0, abs=1e-6)
    # The gap began before the healing, so it is the fault's, however long it lasts.
    assert longest_gap_s(times, 3.0, 4.5) == pytest.approx(5.0, abs=0.03)


def test_what_never_went_on_is_an_endless_outage():
    assert longest_gap_s(steady(0, 2), 1.5, 3.0) == math.inf
    assert longest_gap_s([], 1.5, 3.0) == math.inf


def test_a_quiet_time_is_judged_by_what_lies_inside():
    times = [*steady(0, 1), *steady(3, 4)]
    assert longest_within_s(times, 3.0, 3.5) == pytest.approx(0.01)
    assert longest_within_s(times, 1.5, 2.5) == 0.0


def test_what_the_disk_stood_still_for_is_the_longest_that_overlaps():
    assert longest_of_s([(0.0, 0.9), (1.5, 1.7), (2.9, 3.2)], 1.0, 3.0) == pytest.approx(0.3)
    assert longest_of_s([(0.0, 1.0), (3.0, 4.0)], 1.0, 3.0) == 0.0


def test_percentile_and_histogram():
    values = [number / 1000 for number in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (0.05, 0.099, 0.1)
    assert histogram([0.005, 0.010, 0.011, 5.0]) == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def judged(number: int, kind: str, sending_s: float) -> Judged:
    return Judged(number, 1, kind, "processes", ("g1-a",), 1.0, 2.0, 3.0, sending_s, sending_s + 0.1, 0.01, "")


def test_the_page_tells_figures_goals_and_what_went_wrong_and_keeps_what_people_wrote(tmp_path: Path):
    findings = Findings("the command", 7, 1000.0)
    findings.faults = [judged(1, "master killed", 0.03), judged(2, "master killed", 0.12)]
    findings.faults[1].disk_s = 0.1
    findings.violations = ["round 1: lost-write: main: log:5"]
    findings.records.update({"sent": 10, "acknowledged": 9, "handed out": 18})
    page = tmp_path / "faults.md"
    page.write_text(f"# old\n\n{report.KEPT}\n\n- what it was\n")
    report.write(findings, tmp_path, {"master killed": (40, 150)})
    text = page.read_text()
    assert "| master killed | 2 | 30 | 40 | 120 | 150 | 120 | 1 times | 30 |" in text
    assert "lost-write: main: log:5" in text
    assert "in 2 of 2 faults" in text
    assert text.endswith(f"{report.KEPT}\n\n- what it was\n")
    assert "# old" not in text
