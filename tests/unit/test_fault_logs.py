"""What is looked for in the logs of processes: a traceback, which is a defect whatever the test itself saw; a moment."""

from __future__ import annotations

from pathlib import Path

from tests.faults.logs import defects, logged_between, logged_defects

SOUND = "2026-11-23T03:23:30.581Z INFO broker.link slave let go, nobody sends queue=kill epoch=7\nready\n"
UNSEEN = """2026-11-23T03:23:30.581Z ERROR asyncio Task exception was never retrieved
future: <Task finished name='slave-stream'>
Traceback (most recent call last):
  File "replication.py", line 83, in _run
    await self._serve()
asyncio.exceptions.InvalidStateError: RPC already finished.
"""


def test_a_sound_log_has_none():
    assert defects(SOUND * 3) == []
    assert defects("") == []


def test_a_traceback_is_told_with_its_beginning_and_end():
    (found,) = defects(SOUND + UNSEEN + SOUND)
    assert found.startswith("2026-11-23T03:23:30.581Z ERROR asyncio Task exception was never retrieved")
    assert found.endswith("asyncio.exceptions.InvalidStateError: RPC already finished.")


def test_what_a_process_prints_before_it_has_a_log_counts_too():
    assert len(defects('Traceback (most recent call last):\n  File "main.py"\nImportError: no\n')) == 1
    assert len(defects("sys:1: RuntimeWarning: coroutine 'x' was never awaited\n" + SOUND)) == 1


def test_of_files_those_of_java_are_left_out(tmp_path: Path):
    for name in ("g1-a", "zookeeper-1", "coordinator-1"):
        (tmp_path / f"{name}.log").write_text(SOUND + (UNSEEN if name != "coordinator-1" else ""))
    (found,) = logged_defects(tmp_path.iterdir())
    assert found.startswith("g1-a: ")


def test_what_was_logged_around_a_moment_is_told_by_time_with_what_belongs_to_it(tmp_path: Path):
    stamps = (
        "2026-11-23T03:23:29.999Z",
        "2026-11-23T03:23:30.000Z",
        "2026-11-23 03:23:30,700",
        "2026-11-23T03:23:32.001Z",
    )
    logs = [[f"{stamps[0]} INFO early", f"{stamps[1]} ERROR first", "  and more of it"], [f"{stamps[2]} [main] second"]]
    for name, lines in zip(("zookeeper-1", "coordinator-1"), reversed(logs), strict=True):
        (tmp_path / f"{name}.log").write_text("\n".join([*lines, f"{stamps[3]} INFO late", ""]))
    since_s = 1795404210.0
    assert logged_between(tmp_path.iterdir(), since_s, since_s + 2) == [
        f"coordinator-1: {stamps[1]} ERROR first",
        "coordinator-1:   and more of it",
        f"zookeeper-1: {stamps[2]} [main] second",
    ]
