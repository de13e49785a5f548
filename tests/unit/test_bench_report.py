from __future__ import annotations

import json

import pytest

from bench.cases import CASES, Kind, chosen
from bench.driver import Plan, Sample
from bench.goals import GOALS
from bench.peers import PEERS
from bench.report import Report, number, write

MACHINE = {
    "began": "today", "cores": 2, "cpu": "some", "memory_gib": 4, "kernel": "6", "load_average": [0.5, 0.5, 0.5], "is_compiled": True,
}  # fmt: skip


def plan(*words: str, peers: tuple[str, ...] = ("seriatim", "kafka")) -> Plan:
    return Plan(peers, chosen(list(words)), 3, 1.0, 1.0, 1000, 1.0, 1)


def report_of(*figures: tuple[str, str, dict[str, float]], words: tuple[str, ...] = ("single 1 KiB",)) -> Report:
    report = Report(plan(*words), MACHINE)
    for number_, (peer, case, found) in enumerate(figures):
        report.samples.append(Sample(number_, peer, case, found))
    return report


def test_words_choose_by_kind_or_by_part_of_a_name() -> None:
    assert {case.kind for case in chosen(["latency"])} == {Kind.LATENCY}
    assert [case.name for case in chosen(["single 1 KiB", "killed"])] == ["single 1 KiB", "leader killed"]
    assert chosen([]) == CASES


def test_a_word_that_names_no_case_is_refused() -> None:
    with pytest.raises(ValueError, match="thruput"):
        chosen(["thruput"])


def test_names_of_cases_and_peers_in_goals_exist() -> None:
    for goal in GOALS:
        assert goal.peer in PEERS
        assert goal.case in {case.name for case in CASES}


def test_ratio_is_of_medians_and_decides_the_goal() -> None:
    report = report_of(
        *(("seriatim", "single 1 KiB", {"records_per_s": value}) for value in (10.0, 90.0, 60.0)),
        *(("kafka", "single 1 KiB", {"records_per_s": value}) for value in (1.0, 31.0, 40.0)),
    )
    found = report.to_json()
    assert found["medians"]["single 1 KiB"]["seriatim"]["records_per_s"] == 60
    assert found["ratios"]["single 1 KiB"]["kafka"]["records_per_s"] == pytest.approx(60 / 31)
    (goal,) = found["goals"]
    assert (goal["case"], goal["peer"], goal["is_met"]) == ("single 1 KiB", "kafka", False)
    assert "| 1.94 | **no** |" in report.to_markdown()


def test_a_goal_of_at_most_is_met_below_its_bound() -> None:
    report = report_of(
        ("seriatim", "one in flight", {"p50_ms": 1.0}), ("kafka", "one in flight", {"p50_ms": 1.0}), words=("one in",)
    )
    (goal,) = report.to_json()["goals"]
    assert goal["is_met"]


def test_what_failed_is_named_and_gives_no_figure() -> None:
    report = report_of(("seriatim", "single 1 KiB", {"records_per_s": 5.0}))
    report.samples.append(Sample(1, "kafka", "single 1 KiB", {}, "no broker"))
    text = report.to_markdown()
    assert "not measured: single 1 KiB, kafka, round 1: no broker" in text
    assert report.to_json()["goals"] == []


def test_peers_are_given_only_what_they_can_do() -> None:
    whole = plan(peers=tuple(PEERS))
    assert {case.kind for case in whole.cases_of(PEERS["kafka-rf3"])} == {Kind.OUTAGE}
    assert not any(case.is_bulk for case in whole.cases_of(PEERS["nats"]))
    assert not any(case.rate for case in whole.cases_of(PEERS["rocketmq"]))


def test_numbers_have_three_digits_that_count() -> None:
    assert [number(value) for value in (123_456.7, 99.96, 0.012345)] == ["123,457", "100", "0.0123"]


def test_written_json_can_be_read(tmp_path) -> None:
    paths = write(report_of(("seriatim", "single 1 KiB", {"records_per_s": 5.0})), tmp_path)
    assert [path.name for path in paths] == ["bench.json", "bench.md"]
    assert json.loads(paths[0].read_text())["samples"][0]["figures"] == {"records_per_s": 5.0}
