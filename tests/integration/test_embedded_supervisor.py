from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from seriatim.cli.embedded import processes
from seriatim.cli.embedded.cluster import COMMAND
from seriatim.cli.embedded.errors import DirectoryInUse, StartFailed
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
from tests.waiting import wait_until

SLEEPER = (sys.executable, "-c", "import time; print('ready here'); time.sleep(600)")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)",
)


def written_pids(directory: Path) -> dict[str, int]:
    return json.loads((directory / "pids.json").read_text())


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_pids_json_is_true_through_start_death_and_stop(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        one = supervisor.start(ProcessSpec("one", SLEEPER))
        two = supervisor.start(ProcessSpec("two", SLEEPER))
        assert written_pids(tmp_path) == {"one": one, "two": two}
        os.kill(one, signal.SIGKILL)
        wait_until(lambda: written_pids(tmp_path) == {"two": two})
        supervisor.stop("two")
        assert written_pids(tmp_path) == {}
        assert not runs(two)


def test_a_restarted_child_comes_back_and_pids_json_knows(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        first = supervisor.start(ProcessSpec("one", SLEEPER, is_restarted=True))
        assert supervisor.wait_for_line("one") == "ready here"
        supervisor.kill("one")
        assert written_pids(tmp_path).get("one") != first  # true at once; a moment later there is the next one
        wait_until(lambda: written_pids(tmp_path).get("one", first) != first)
        assert supervisor.wait_for_line("one") == "ready here"
        supervisor.stop("one")
        time.sleep(0.5)  # longer than the back-off: what was stopped on purpose stays down
        assert supervisor.pids() == {}


def test_deaths_are_looked_for_however_little_is_left_of_the_wait_for_orders(tmp_path, monkeypatch):
    """They weren't until the next order came, where the machine had stood still just as the wait began."""
    monkeypatch.setattr(processes, "_LOOK_S", 1e-9)
    has_looked, is_ordered = threading.Event(), threading.Event()

    def look(_: Supervisor) -> None:
        has_looked.set()
        time.sleep(0)  # others have their turn

    monkeypatch.setattr(Supervisor, "_look_after", look)

    def order() -> None:
        has_looked.clear()
        is_ordered.set()

    with Supervisor(tmp_path) as supervisor:
        for _ in range(3000):  # once in some thousand
            is_ordered.clear()
            supervisor._orders.put(order)
            assert is_ordered.wait(30)
            assert has_looked.wait(30)


def test_what_can_t_be_written_or_started_ends_no_other_child(tmp_path, caplog):
    """As on a full disk. Children end with the thread that starts them."""
    with Supervisor(tmp_path) as supervisor:
        other = supervisor.start(ProcessSpec("other", SLEEPER))
        one = supervisor.start(ProcessSpec("one", SLEEPER, is_restarted=True))
        supervisor.logs.rename(tmp_path / "aside")  # so it can't be started again
        (tmp_path / "pids.partial").mkdir()
        os.kill(one, signal.SIGKILL)
        wait_until(lambda: "process can't be started name=one" in caplog.text or not runs(other))
        assert runs(other)
        (tmp_path / "aside").rename(supervisor.logs)
        (tmp_path / "pids.partial").rmdir()
        wait_until(lambda: written_pids(tmp_path).get("one", one) != one)
        assert written_pids(tmp_path)["other"] == other
    assert caplog.text.count("pids.json can't be written") == 1


def test_why_a_child_dies_is_told_and_the_same_not_for_ever(tmp_path, caplog, monkeypatch):
    """`up` on a full disk said `process died ... status=3`, every five seconds."""
    monkeypatch.setattr(processes, "_BACKOFF_MAX_S", 0.2)
    script = """
import pathlib, sys
runs = pathlib.Path("runs")
number = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (number + 1))
if number != 3:
    print("as ever")
    print("Error: no room", "for a key" if number > 3 else "for a log", "[disk-full]", file=sys.stderr)
sys.exit(3)
"""
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("one", (sys.executable, "-c", script), is_restarted=True))
        wait_until(lambda: (tmp_path / "runs").exists() and len((tmp_path / "runs").read_text()) > 7)
    told = [line for line in caplog.text.splitlines() if "process died name=one" in line]
    said = [line.partition("said=")[2] for line in told]
    assert said[0].startswith("'Error: no room for a log [disk-full]'")
    assert "(nothing; " in said[1]
    assert "MiB are free" in said[1]
    assert said[2].startswith("'Error: no room for a key [disk-full]'")
    assert len(said) == 3
    assert "status=3" in told[0]


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("one", STUBBORN, stop_timeout_s=0.2))
        supervisor.wait_for_line("one")
        assert supervisor.stop("one") == -signal.SIGKILL


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_child_hears_its_stop_signal_where_who_starts_it_ignores_that(tmp_path, stop_signal):
    before = signal.signal(stop_signal, signal.SIG_IGN)  # as in `nohup`, or in a script's background
    try:
        with Supervisor(tmp_path) as supervisor:
            supervisor.start(ProcessSpec("one", SLEEPER, stop_signal=stop_signal))
            supervisor.wait_for_line("one")
            assert supervisor.stop("one") == -stop_signal
    finally:
        signal.signal(stop_signal, before)


def test_a_second_supervisor_in_the_directory_is_refused(tmp_path):
    with Supervisor(tmp_path), pytest.raises(DirectoryInUse, match=str(os.getpid())):
        Supervisor(tmp_path)
    Supervisor(tmp_path).close()


def test_a_child_that_dies_early_shows_the_end_of_its_log(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("one", (sys.executable, "-c", "print('no disk'); raise SystemExit(7)")))
        with pytest.raises(StartFailed, match=r"(?s)exit status 7.*no disk"):
            supervisor.wait_for_line("one")


def test_a_child_that_dies_without_a_word_has_the_room_on_the_disk_told(tmp_path):
    """`up` on a full disk ended with `Its log ends with:`, and nothing behind it."""
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("one", ("false",)))
        with pytest.raises(
            StartFailed, match=r"exit status 1\). Its log, .*one.log, says nothing; [\d,]+ MiB are free"
        ):
            supervisor.wait_for_line("one")


def test_no_file_of_the_directory_is_taken_for_a_module(tmp_path):
    (tmp_path / "click.py").write_text("raise SystemExit('it was')")
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("one", (*COMMAND, "--version")))
        assert supervisor.wait_for_line("one", "seriatim, version")


def test_a_program_that_is_missing_says_so(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("one", ("no-such-program",)))
        with pytest.raises(StartFailed, match="no-such-program: No such file"):
            supervisor.wait_for_line("one")


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_their_supervisor(tmp_path, with_signal):
    program = f"""
import time
from pathlib import Path
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
supervisor = Supervisor(Path({str(tmp_path)!r}))
for name in ("one", "two"):
    supervisor.start(ProcessSpec(name, {STUBBORN!r}))
    supervisor.wait_for_line(name)
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen((sys.executable, "-c", program), stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"ready\n"
        pids = written_pids(tmp_path)
        assert set(pids) == {"one", "two"}
        assert all(map(runs, pids.values()))
        parent.send_signal(with_signal)
        parent.wait()
    wait_until(lambda: not any(map(runs, pids.values())))
    with Supervisor(tmp_path) as successor:
        assert written_pids(tmp_path) == successor.pids() == {}
