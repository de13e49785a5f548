"""A traceback in a process's log is a defect, whatever the test itself saw."""

from __future__ import annotations

from pathlib import Path

from tests.faults.defects import defects, logged_defects

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
