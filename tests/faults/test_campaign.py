"""About five minutes of the fault campaign: every kind of harm, in an order of chance, and everything judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 270
LEAST_FAULTS = 20
pytestmark = [pytest.mark.faults, pytest.mark.slow]


def campaign(report: Path, *arguments: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "tests.faults.campaign", "--report", str(report), *arguments)
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.timeout(1800)
def test_nothing_is_lost_repeated_or_out_of_order_in_five_minutes_of_faults(tmp_path: Path) -> None:
    seed = os.environ.get("SERIATIM_FAULTS_SEED")
    length = ("--faults", "200", "--seconds", str(SECONDS), "--at-least", str(LEAST_FAULTS))
    process = campaign(tmp_path, *length, *(("--seed", seed) if seed is not None else ()))
    output, _ = process.communicate()
    sys.stdout.write(output)
    assert process.returncode == 0, output[-6000:]
    found = json.loads((tmp_path / "faults.json").read_text())
    assert [found[what] for what in ("violations", "stuck", "deaths", "defects")] == [[], [], [], []]
    assert len(found["faults"]) >= LEAST_FAULTS
    assert found["records"]["acknowledged"] > 1000 * len(found["faults"])
    assert (tmp_path / "faults.png").stat().st_size > 1000


@pytest.mark.timeout(600)
def test_an_interrupted_campaign_ends_with_its_report_and_leaves_nothing(tmp_path: Path) -> None:
    process = campaign(tmp_path, "--faults", "100", "--only", "planned rotation")
    assert process.stdout is not None
    lines = []
    while not any(" 1/100 " in line for line in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 0, "".join(lines) + output
    found = json.loads((tmp_path / "faults.json").read_text())
    assert 1 <= len(found["faults"]) < 100
    assert f"{len(found['faults'])} faults" in output
    mounts = Path("/proc/mounts").read_text()
    assert f"seriatim-faults-{process.pid}-" not in mounts
    assert not list(Path("/tmp").glob(f"seriatim-faults-{process.pid}-*"))
