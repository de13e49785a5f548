from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.outage import outage_s
from seriatim.cli.failover import FailoverRun, Fault
from seriatim.cli.measurement import (
    Standstill,
    milliseconds,
    ordinary_silence_s,
    percentile,
    standstill,
    throughput,
)
from seriatim.cli.workload import Workload
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import InvalidArgument


def test_percentiles_are_of_the_nearest_rank():
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([3.0], 99) == 3
    assert percentile([1.0, 2.0], 50) == 1
    assert percentile([], 50) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_the_least_value_that_enough_values_don_t_exceed(values, percent):
    found = percentile(values, percent)
    need = len(values) * percent / 100
    assert found in values
    assert sum(value <= found for value in values) >= need - 1e-9
    assert sum(value < found for value in values) < need + 1e-9


def test_throughput_in_the_units_of_its_keys():
    assert throughput(2000, 500, 2.0, [0.001, 0.002, 0.004]) == {
        "count": 2000, "seconds": 2.0, "records_per_s": 1000, "mb_per_s": 0.5, "latency_p50_ms": 2.0,
        "latency_p99_ms": 4.0,
    }  # fmt: skip
    assert throughput(0, 500, 0.0, [])["latency_p50_ms"] is None
    assert milliseconds(0.0123456) == 12.346


def acknowledgements(*, gap_s=0.001, stood_still=((1.0, 0.2),), end_s=3.0):
    found, now_s = [], 0.0
    harms = list(stood_still)
    while now_s < end_s:
        found.append(now_s)
        now_s += gap_s
        if harms and now_s >= harms[0][0]:
            now_s += harms.pop(0)[1]
    return found


def test_an_outage_is_the_longest_silence_less_the_ordinary_gap():
    assert outage_s(acknowledgements(), 1.0, 3.0) == pytest.approx(0.2, abs=0.0015)
    assert outage_s(acknowledgements(stood_still=()), 1.0, 3.0) == pytest.approx(0.0, abs=1e-6)


def test_silences_before_the_harm_and_after_the_end_don_t_count():
    times = acknowledgements(stood_still=((0.5, 0.4), (1.5, 0.1), (2.5, 0.8)), end_s=4.0)
    assert outage_s(times, 1.4, 2.4) == pytest.approx(0.1, abs=0.0015)


def test_a_silence_that_lasts_until_the_end_counts_whole():
    assert outage_s([0.0, 0.1, 0.2, 1.2, 1.3], 0.25, 0.9) == pytest.approx(0.9)


def test_without_an_acknowledgement_afterwards_there_is_no_outage_to_tell():
    assert outage_s([0.1, 0.2], 0.5, 1.0) is None
    assert outage_s([0.6], 0.5, 1.0) is None
    assert outage_s([], 0.5, 1.0) is None


NOTHING = pytest.approx(0.0, abs=1e-9)
BURSTS = [burst + record * 1e-5 for burst in (0.0, 0.005, 0.010, 0.015) for record in range(5)]


def test_the_ordinary_silence_of_bursts_is_the_one_between_them():
    assert ordinary_silence_s(BURSTS) == pytest.approx(0.005, abs=1e-4)
    assert ordinary_silence_s([0.0, 1.0, 2.0, 3.0]) == 1.0
    assert ordinary_silence_s([0.0]) == 0.0


def test_a_standstill_is_the_longest_silence_less_the_ordinary_one():
    assert standstill(acknowledgements(), 1.0, 3.0, 0.2) == Standstill(pytest.approx(0.2, abs=0.0015), NOTHING)
    bursts = [*BURSTS, 0.055, 0.055]
    assert standstill(bursts, 0.016, 0.1, 0.2) == Standstill(pytest.approx(0.035, abs=2e-4), NOTHING)


def test_a_silence_that_begins_later_is_told_apart():
    times = acknowledgements(stood_still=((1.5, 0.1), (2.5, 0.8)), end_s=4.0)
    about = pytest.approx(0.1, abs=0.0015), pytest.approx(0.8, abs=0.0015)
    assert standstill(times, 1.4, 4.0, 0.2) == Standstill(*about)
    assert standstill(times, 1.4, 4.0, 2.0) == Standstill(about[1], NOTHING)
    assert standstill(times, 1.4, 2.4, 0.2) == Standstill(about[0], NOTHING)


@given(st.lists(st.floats(0, 10), min_size=2), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_a_standstill_lies_between_two_events(times, harmed_at_s, lasts_s, shows_within_s):
    times = sorted(times)
    found = standstill(times, harmed_at_s, harmed_at_s + lasts_s, shows_within_s)
    longest_s = max(later - earlier for earlier, later in pairwise(times))
    assert 0 <= ordinary_silence_s(times) <= longest_s
    if found is None:
        assert times[0] > harmed_at_s or times[-1] <= harmed_at_s
    else:
        assert 0 <= found.shown_s <= longest_s
        assert 0 <= found.later_s <= longest_s


def test_without_an_event_afterwards_there_is_no_standstill_to_tell():
    assert standstill([0.1, 0.2], 0.5, 1.0, 0.2) is None
    assert standstill([0.6], 0.5, 1.0, 0.2) is None


def test_no_process_is_harmed_that_isnt_the_member(tmp_path):
    """As one that by now has the number of a member which was killed together with its `seriatim up`."""
    pids = tmp_path / "pids.json"
    workload = Workload("", "load", 100, 200, 4)
    run, member = FailoverRun(Fault.MASTER_KILL, workload, 1, pids, bool), pb.LinkMember(group="g1", member="a")
    program = (sys.executable, "-c", "print(flush=True); input()", "--group", "g1", "--member", "a", "--listen")
    for listens_at, address in ("127.0.0.1:7000", "127.0.0.1:7000"), ("127.0.0.1:7001", "127.0.0.1:7000"):
        with subprocess.Popen((*program, listens_at), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()  # it has its arguments
            pids.write_text(json.dumps({"g1-a": process.pid}))
            member.address = address
            if listens_at == address:
                assert run._pid(member) == process.pid
            else:
                with pytest.raises(InvalidArgument, match="doesn't name the member"):
                    run._pid(member)
            process.communicate(b"\n")
    with pytest.raises(InvalidArgument, match="doesn't name the member"):
        run._pid(member)  # it has ended
