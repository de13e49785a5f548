"""What a process logged of a defect of its own: whatever happens to it, no process of ours may print a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_SIGNS = (
    "Traceback (most recent call last)",
    "Task was destroyed but it is pending",
    "was never awaited",
    "Fatal Python error",
)
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def defects(log: str) -> list[str]:
    """Each entry of a log with a sign of a defect: the line that begins it, and its end."""
    entries: list[list[str]] = []
    for line in log.splitlines():
        if not entries or _STAMP.match(line):
            entries.append([])
        entries[-1].append(line)
    return [_shortened(entry) for entry in entries if any(sign in line for line in entry for sign in _SIGNS)]


def logged_defects(logs: Iterable[Path]) -> list[str]:
    """Of log files that are named after their processes; ZooKeeper's are Java's and not ours."""
    return [
        f"{path.stem}: {one}"
        for path in sorted(logs)
        if "zookeeper" not in path.stem
        for one in defects(path.read_text(errors="replace"))
    ]


def _shortened(entry: list[str]) -> str:
    return " … ".join(line.strip()[:300] for line in (entry if len(entry) < 5 else [entry[0], *entry[-3:]]))
