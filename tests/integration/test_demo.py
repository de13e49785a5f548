"""The demo as a command: its verdict, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.cli.embedded.processes import Supervisor
from seriatim.cli.main import run

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.spark]


def _started(folder, *arguments, **environment):
    # A shell's background job ignores SIGINT, and so would everything that it starts.
    return subprocess.Popen(
        ("env", "--default-signal=INT", sys.executable, "-m", "seriatim.cli.main", "demo", "--json", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), **environment},
    )


def _children(pid):
    """Process ids of a process's children, whichever of its threads started them."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(600)
def test_the_whole_demo_is_identical_under_four_faults_and_leaves_nothing(tmp_path):
    demo = _started(tmp_path, "--seconds", "10")
    output, messages = demo.communicate(timeout=560)
    assert demo.returncode == 0, messages
    report = json.loads(output.splitlines()[-1])
    assert report["verdict"] == "identical"
    assert report["records_sent"] == report["records_applied"] > 100_000
    assert report["duplicates_dropped"] >= 0
    assert [fault["kind"] for fault in report["faults"]] == ["master", "capture", "replay", "coordinator"]
    assert all(fault["target"] and fault["outage_ms"] > 0 for fault in report["faults"])
    assert report["tables"] == 4
    assert report["rows"] == 100_011 + report["transactions"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_everything_it_started(tmp_path, stop):
    demo = _started(tmp_path)
    seen = []
    for line in demo.stderr:
        seen.append(line)
        if "starting two captures" in line:
            break
    time.sleep(1)  # in the midst of starting
    children = _children(demo.pid)
    assert len(children) >= 10, seen
    demo.send_signal(stop)
    demo.communicate(timeout=150)
    assert demo.returncode == 130
    assert [pid for pid in children if _is_running(pid)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_without_java_it_says_what_to_install_and_leaves_nothing(tmp_path):
    demo = _started(tmp_path, JAVA_HOME=str(tmp_path / "none"))
    _, messages = demo.communicate(timeout=150)
    assert demo.returncode == 3
    assert "apt-get install openjdk-17-jre-headless" in messages
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_reads_on_it_says_no_and_leaves_nothing(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = (sys.executable, "-m", "seriatim.cli.main", "demo")
    with os.fdopen(writing) as output:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        demo = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, env=environment, check=False)
    assert demo.returncode == 1
    assert b"without a verdict" in demo.stderr
    assert list(tmp_path.iterdir()) == []


def test_wrong_values_and_a_directory_in_use_are_refused(tmp_path, capfd):
    assert run(["demo", "--seconds", "1"]) == 2
    with Supervisor(tmp_path):
        assert run(["demo", "--dir", str(tmp_path)]) == 3
    assert "in use" in capfd.readouterr().err


@pytest.mark.timeout(300)
def test_a_directory_with_an_earlier_demo_is_refused_with_a_verdict_and_its_logs_stay(tmp_path):
    with EmbeddedPostgres(tmp_path / "east") as east:
        east.run("pgbench", "--initialize", "--quiet", "--init-steps", "dt")
    demo = _started(tmp_path, "--dir", str(tmp_path))
    output, messages = demo.communicate(timeout=250)
    assert demo.returncode == 1
    assert "holds an earlier demo" in json.loads(output.splitlines()[-1])["verdict"]
    assert f"logs: {tmp_path / 'logs'}" in messages
    assert (tmp_path / "logs" / "g1-a.log").exists()
