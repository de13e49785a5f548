"""The demo's pure parts."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from seriatim.cli import exits, foreground, main
from seriatim.cli.demo.command import _keep
from seriatim.cli.demo.errors import DemoFailed
from seriatim.cli.demo.offsets import OffsetCheck
from seriatim.cli.demo.outage import outages_s
from seriatim.cli.demo.plan import FaultKind, planned
from seriatim.cli.demo.run import Demo
from seriatim.cli.demo.stage import Load, Stage
from seriatim.cli.demo.verdict import FaultFigures, Figures, as_text, problems, verdict
from seriatim.cli.demo.view import LiveView, Sight, one_line
from seriatim.cli.embedded.cluster import DevelopmentCluster
from seriatim.cli.embedded.postgres import EmbeddedPostgres


def test_what_is_set_for_the_caller_s_own_commands_is_not_for_the_demo_s(tmp_path, monkeypatch):
    monkeypatch.setenv("SERIATIM_TABLES", "public.orders")
    started = []
    with Stage(tmp_path, is_kept=True) as stage:
        stage.cluster._choose_ports()
        monkeypatch.setattr(stage.supervisor, "start", started.append)
        monkeypatch.setattr(EmbeddedPostgres, "port", 5432)
        stage.start_capture("capture-1")
        stage.start_replay()
    assert [spec.environment["SERIATIM_TABLES"] for spec in started] == [None, None]


def test_a_demo_on_a_full_disk_has_a_verdict_too_and_a_server_that_ended_is_named(tmp_path, monkeypatch, capsys):
    def start_cluster(stage):
        monkeypatch.setattr(stage.supervisor, "pids", dict)
        raise OSError(errno.ENOSPC, "No space left on device", f"without {stage.ended()[0]}")

    monkeypatch.setattr(Stage, "start_cluster", start_cluster)
    assert main.run(["demo", "--dir", str(tmp_path), "--json"]) == exits.ANSWER_IS_NO
    report = json.loads(capsys.readouterr().out)
    assert "No space left on device: 'without zookeeper'" in report["verdict"]


def test_what_ends_by_itself_is_noticed_while_something_is_killed_and_ends_nothing_that_is_kept(
    tmp_path, monkeypatch, capsys
):
    """Whoever looked around, and made a table in east, which the replay finds no place for, had all of it end."""

    def sleep(_):
        ended.append("replay")
        if len(ended) > 2:
            raise KeyboardInterrupt

    ended = []
    with Stage(tmp_path, is_kept=True) as stage:
        monkeypatch.setattr(Stage, "ended", lambda _: ended)
        monkeypatch.setattr(EmbeddedPostgres, "dsn", lambda _: "DSN")
        monkeypatch.setattr(DevelopmentCluster, "coordinators", "127.0.0.1:1")
        monkeypatch.setattr(stage.supervisor, "log_end", "{} says why".format)
        monkeypatch.setattr(foreground, "time", SimpleNamespace(sleep=sleep))
        _keep(stage)
        ended[:] = ["g1-a", "west"]
        demo = Demo(stage, SimpleNamespace(), Load(5, 1, 1, 1), (), 0.0)
        with pytest.raises(DemoFailed, match="west ended by itself"):
            demo._look({"g1-a"})
    *_, why, again, last = capsys.readouterr().err.splitlines()
    assert why == "replay ended by itself, and the others run on. replay says why"
    assert again == "to start it again: seriatim replay --queue east-log --target DSN"
    assert last == "stopping"


@pytest.mark.parametrize("seconds", [5, 30, 3600])
def test_the_plan_has_every_fault_once_in_rising_order_inside_the_load(seconds):
    faults = planned(seconds)
    assert [fault.kind for fault in faults] == list(FaultKind)
    assert faults[0].at_s > 0
    assert all(one.at_s < other.at_s for one, other in pairwise(faults))
    assert faults[-1].at_s < 0.9 * seconds


def test_an_outage_is_the_gap_around_the_fault():
    assert outages_s([0.0, 10.0, 11.0, 16.0, 17.0], [12.0], 100) == [pytest.approx(5.0)]


def test_what_was_on_its_way_at_the_fault_does_not_hide_the_gap():
    assert outages_s([0.0, 10.0, 10.3, 40.0, 41.0, 42.0], [10.1, 30.0], 100) == [pytest.approx(29.7), pytest.approx(1)]


def test_a_longer_gap_later_counts_for_the_last_fault_before_it():
    assert outages_s([0, 10, 20, 21, 50, 51, 52], [15, 50.6], 100) == [29, 1]


def test_gaps_before_the_first_fault_count_for_nobody():
    assert outages_s([0, 70, 71, 72, 73], [71.8], 100) == [1]


def test_the_end_of_the_load_is_no_outage_but_a_fault_just_before_it_is():
    assert outages_s([0, 10, 11, 12, 42], [10.6], 20) == [1]
    assert outages_s([0, 10, 11, 42], [10.2, 19], 20) == [1, 31]


def test_two_faults_in_one_gap_share_it_and_nothing_after_a_fault_is_no_end():
    assert outages_s([0, 10, 50], [20, 30], 100) == [40, 40]
    assert outages_s([0, 10], [20], 100) == [None]
    assert outages_s([], [20], 100) == [None]


def _checked(*batches, start=0, end):
    check = OffsetCheck(start)
    for offsets, dropped, seqs in batches:
        check.batch(offsets, dropped, "s", seqs)
    return check.problems(end)


def test_whole_offsets_hold_also_with_counted_resends():
    assert _checked((range(3), 0, [1, 2, 3]), ([3, 6], 2, [4, 5]), ([], 1, []), end=8) == ()


@pytest.mark.parametrize(
    ("batches", "end", "what"),
    [
        ([([0, 2], 0, [1, 2])], 3, "1 offsets hold no record"),
        ([([0, 1], 0, [1, 2])], 3, "1 offsets hold no record"),
        ([([0, 1], 1, [1, 2])], 2, "1 more re-sends"),
        ([([0, 1, 1], 0, [1, 2, 3])], 2, "1 offsets were handed out twice"),
        ([([0, 1, 2], 0, [1, 2, 3]), ([0], 0, [4])], 3, "stepped back 1"),
        ([([0, 1], 0, [2, 1])], 2, "out of their source's order"),
        ([([0, 1], 0, [2, 2])], 2, "out of their source's order"),
        ([([0, 1], 0, [1, 2])], 1, "beyond offset 1"),
    ],
)
def test_each_breach_of_offsets_is_named(batches, end, what):
    found = _checked(*batches, end=end)
    assert any(what in sentence for sentence in found), found


GOOD = Figures(
    records_sent=100,
    records_applied=100,
    duplicates_dropped=3,
    transactions=20,
    end=103,
    tables=4,
    rows=50,
    table_differences=(),
    offset_problems=(),
    planned=(FaultKind.MASTER,),
    faults=(FaultFigures(FaultKind.MASTER, "g1-a", 120, 400),),
    lag_s=0.5,
    catch_up_s=0.7,
    duration_s=60.0,
)


def test_a_demo_in_which_everything_held_is_identical():
    assert verdict(GOOD) == "identical"
    assert "verdict: identical" in as_text(GOOD)
    assert GOOD.as_json()["faults"] == [{"kind": "master", "target": "g1-a", "outage_ms": 120, "apply_outage_ms": 400}]


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        ({"table_differences": ("t: 1 rows missing",)}, "t: 1 rows missing"),
        ({"rows": 0}, "nothing to compare"),
        ({"offset_problems": ("offsets stepped back 1 times",)}, "stepped back"),
        ({"transactions": 0}, "nothing was sent"),
        ({"records_applied": 99}, "99 of 100 records were applied"),
        ({"faults": ()}, "no master was killed"),
        ({"faults": (FaultFigures(FaultKind.MASTER, "g1-a", None, None),)}, "didn't go on after g1-a"),
    ],
)
def test_whatever_did_not_hold_is_in_the_verdict(harm, what):
    figures = replace(GOOD, **harm)
    assert what in verdict(figures)
    assert len(problems(figures)) == 1
    assert "NOT identical" in as_text(figures)
    assert figures.as_json()["verdict"] != "identical"


def test_what_ends_a_demo_is_told_as_it_is_where_its_terminal_is_closed(monkeypatch):
    class Closed(io.StringIO):
        def write(self, _):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    view = LiveView(0.0)
    view.__enter__()
    view._console.file = Closed()
    view.__exit__(KeyboardInterrupt, None, None)  # raises nothing in its place


def test_a_sight_is_one_line_with_its_lag():
    sight = Sight(
        3.0, "load", ((1, "g1", "open", 5),), ("g1", "g2"), (1,), "", "", 500, 400, 10.0, 9.0, 0.25, ("g3: down",), ()
    )
    line = one_line(sight)
    assert "lag 100 records, 0.2 s" in line
    assert "send list g1 g2" in line
    assert "waits for g3: down" in line
