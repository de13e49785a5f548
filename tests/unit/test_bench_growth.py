from __future__ import annotations

from pathlib import Path

import pytest

from bench.growth import backlog, command
from bench.growth.cluster import GrownCluster
from bench.growth.findings import Finding, read, write

MACHINE = {"began": "today", "cores": 2, "load_average": [0.5, 0.5, 0.5]}


def finding(*points: tuple[float, list[float]], case: str = "groups") -> Finding:
    found = Finding(case, MACHINE, {"switches": 3})
    for size, values in points:
        found.add("switch", "ms", "groups", size, values)
    return found


@pytest.mark.parametrize(("last", "is_met"), [([11.0, 12.0, 90.0], True), ([12.5, 13.0, 13.0], False)])
def test_what_grows_is_judged_by_medians_beside_that_of_the_smallest_size(last: list[float], is_met: bool) -> None:
    found = finding((64, last), (2, [1.0, 10.0, 30.0]), (16, [9.0, 9.0, 500.0]))
    found.stays_within("switch", 1.2)
    (verdict,) = found.verdicts
    assert verdict.is_met is is_met


def test_one_size_says_nothing_about_growth() -> None:
    found = finding((2, [10.0]))
    found.stays_within("switch", 1.2)
    assert found.verdicts == []


def test_a_bound_holds_for_every_size() -> None:
    found = finding((1, [6.0]), (2, [4.0]))
    found.is_at_most("switch", 5)
    assert [one.is_met for one in found.verdicts] == [False]
    assert "**no**" in found.to_markdown()


def test_a_size_measured_again_takes_the_place_of_what_was_found() -> None:
    found = finding((2, [10.0]), (16, [11.0]), (2, [20.0]))
    assert found.at("switch") == {2: 20.0, 16: 11.0}


def test_a_case_measured_later_stands_beside_what_is_there(tmp_path: Path) -> None:
    first = finding((2, [10.0]), (16, [11.0]))
    first.stays_within("switch", 1.2)
    write({first.case: first}, tmp_path)
    found = read(tmp_path)
    assert found == {"groups": first}
    write(found | {"queues": finding((64, [12.0]), case="queues")}, tmp_path)
    assert list(read(tmp_path)) == ["groups", "queues"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"growth-groups.png", "growth-queues.png"}


def test_who_runs_a_grown_cluster_is_asked_for_its_processes(tmp_path: Path) -> None:
    """It was that of a cluster of two groups which was closed before: no process was found, to be killed or looked at."""
    cluster = GrownCluster(tmp_path, groups=3)
    try:
        assert len(cluster.brokers) == 6
        assert cluster.supervisor is cluster._cluster.supervisor
        with pytest.raises(LookupError, match="g3-a doesn't run"):
            cluster.pid("g3-a")
    finally:
        cluster.close()


def test_a_backlog_that_does_not_fit_on_the_disk_is_not_begun() -> None:
    backlog.check_room(100_000_000, free_bytes=24_000_000_000)
    with pytest.raises(LookupError, match="100,000,000 records take 23 GB, 20 are free"):
        backlog.check_room(100_000_000, free_bytes=20_000_000_000)


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cases", "groups,grops"]) == 2
    assert "grops" in capsys.readouterr().err
