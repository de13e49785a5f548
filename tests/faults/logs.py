"""What processes logged: of a defect of their own, which none of ours may whatever happens to it, and around a moment."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_SIGNS = (
    "Traceback (most recent call last)",
    "Task was destroyed but it is pending",
    "was never awaited",
    "Fatal Python error",
)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)[.,](\d{3})")
"""Of ours, and of ZooKeeper's; both are told in UTC."""


def defects(log: str) -> list[str]:
    """Each entry of a log with a sign of a defect: the line that begins it, and its end."""
    return [_shortened(entry) for entry in _entries(log) if any(sign in line for line in entry for sign in _SIGNS)]


def logged_defects(logs: Iterable[Path]) -> list[str]:
    """Of log files that are named after their processes; ZooKeeper's are Java's and not ours."""
    return [
        f"{path.stem}: {one}"
        for path in sorted(logs)
        if "zookeeper" not in path.stem
        for one in defects(path.read_text(errors="replace"))
    ]


def logged_between(logs: Iterable[Path], from_s: float, until_s: float) -> list[str]:
    """What all processes logged in that time, by time; each line with its process's name. Seconds of the epoch."""
    found = [
        (at_s, f"{path.stem}: {line}")
        for path in sorted(logs)
        for entry in _entries(path.read_text(errors="replace"))
        if (at_s := _at_s(entry[0])) is not None and from_s <= at_s <= until_s
        for line in entry
    ]
    return [line for _, line in sorted(found, key=lambda one: one[0])]


def _entries(log: str) -> Iterator[list[str]]:
    """Lines from one with a stamp to the next one."""
    entry: list[str] = []
    for line in log.splitlines():
        if entry and _STAMP.match(line):
            yield entry
            entry = []
        entry.append(line)
    if entry:
        yield entry


def _at_s(line: str) -> float | None:
    if (stamp := _STAMP.match(line)) is None:
        return None
    return dt.datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}.{stamp[3]}+00:00").timestamp()


def _shortened(entry: list[str]) -> str:
    return " … ".join(line.strip()[:300] for line in (entry if len(entry) < 5 else [entry[0], *entry[-3:]]))
