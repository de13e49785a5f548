"""Commands that have to end: one that doesn't is asked where it stands."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_CHARACTERS = 6000


def ended(
    command: Sequence[str], within_s: float, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What became of a command. Raises AssertionError where it takes longer, with where each Python process of its own stood then.

    What it says goes to files: it never waits for this process to read it.
    """
    asked_to_tell = {**(os.environ if environment is None else environment), "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=said, stderr=errors, env=asked_to_tell, cwd=cwd, start_new_session=True
        )
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            for number in _of_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGABRT)
            process.wait(30)
            raise AssertionError(
                f"{' '.join(command)} didn't end in {within_s:g} s: {_last(said)}\n{_last(errors)}"
            ) from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, said.read(), errors.read())


def _of_session(number: int) -> list[int]:
    """Its processes, in whatever process groups: a shell gives each job one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state = path.read_text().rpartition(")")[2].split()
            if int(state[3]) == number:
                found.append(int(path.parent.name))
    return found


def _last(file: tempfile._TemporaryFileWrapper[str]) -> str:
    file.seek(0)
    return file.read()[-MOST_CHARACTERS:]
