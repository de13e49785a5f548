"""The benchmark's whole way, with the peer that needs nothing fetched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


def test_the_floor_is_measured_and_drawn(tmp_path) -> None:
    command = (sys.executable, "-m", "bench", "--only", "floor", "--cases", "single 1 KiB,one in flight", "--rounds", "1",
               "--seconds", "0.3", "--warm-up", "0", "--out", str(tmp_path))  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["medians"]["single 1 KiB"]["floor"]["records_per_s"] > 0
    assert found["medians"]["one in flight"]["floor"]["p50_ms"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md", "throughput.png", "latency.png"}
    assert "**one in flight**" in done.stdout


def test_a_peer_that_is_none_is_wrong_use() -> None:
    command = (sys.executable, "-m", "bench", "--only", "kafak")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "kafak" in done.stderr
