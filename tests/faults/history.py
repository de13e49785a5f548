"""What happened, as facts in the order in which one recorder saw them: the input of the checker.

Times are seconds on one machine's monotonic clock. `session` names one stretch of reading by one elected reader: from
its grant to its end; a new session may start before where the last one ended (records handed out, not committed).

In a file, a line is one run of facts of one type: a JSON object of columns, a list where a field differs from fact to
fact, else its one value. A process that is killed leaves at most its last line cut off, which is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, repeat
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sent:
    """A record was given to the sender. Sending it again under the same identity is not a new fact."""

    source: str
    seq: int
    value: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The sender was told that the record is kept. `offset` is None where it was told without a place.

    `is_resumed`: told by the resume point of an election, and not by an acknowledgement.
    """

    source: str
    seq: int
    offset: int | None
    at_s: float
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """The sender was told by the resume point of an election that all these are kept: read as one Acknowledged each.

    A fact of its own, because who has just been elected mustn't stand still to write down an hour of records.
    """

    source: str
    first_seq: int
    last_seq: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The sender was told that the record is not kept, and never will be."""

    source: str
    seq: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """A reader got the record. `generation`: of its subscription; a seek begins the next one."""

    subscription: str
    session: str
    offset: int
    source: str
    seq: int
    value: str
    at_s: float
    generation: int = 1


@dataclass(frozen=True, slots=True)
class Positioned:
    """A subscription was created, or sought: this generation starts at `offset`."""

    subscription: str
    generation: int
    offset: int
    at_s: float


Event = Sent | Acknowledged | Refused | Delivered | Positioned
Fact = Event | Resumed
"""What is written down."""
_TYPES: dict[str, type[Fact]] = {
    cls.__name__: cls for cls in (Sent, Acknowledged, Resumed, Refused, Delivered, Positioned)
}
_FIELDS: dict[str, tuple[str, ...]] = {name: tuple(field.name for field in fields(cls)) for name, cls in _TYPES.items()}


class Recorder:
    """Appends to one history, kept open. A fact is in the operating system's hands when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, events: Iterable[Fact]) -> None:
        """One line for each run of events of one type."""
        for _, run in groupby(events, type):
            os.write(self._file, _line(list(run)).encode())

    def close(self) -> None:
        os.close(self._file)


def _line(events: Sequence[Fact]) -> str:
    name = type(events[0]).__name__
    columns: dict[str, object] = {"type": name, "count": len(events)}
    for field in _FIELDS[name]:
        values = [getattr(event, field) for event in events]
        first = values[0]
        columns[field] = first if all(value == first for value in values) else values
    return json.dumps(columns, separators=(",", ":")) + "\n"


def write(events: Iterable[Fact], path: Path) -> None:
    """Append events to a file."""
    recorder = Recorder(path)
    recorder.write(events)
    recorder.close()


def read(path: Path) -> Iterator[Event]:
    """The events of a file."""
    return Tail(path).follow()


class Tail:
    """Follows a history that is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def follow(self) -> Iterator[Event]:
        """What came since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        end = content.rfind(b"\n") + 1
        self._offset += end
        for line in content[:end].splitlines():
            try:
                columns = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by a kill; who came after it went on behind it
            yield from _events(columns)


def _events(columns: dict[str, object]) -> Iterator[Event]:
    name, count = str(columns["type"]), columns["count"]
    values = [columns[field] for field in _FIELDS[name]]
    rows = zip(*(value if isinstance(value, list) else repeat(value, count) for value in values), strict=False)
    for row in rows:
        event = _TYPES[name](*row)
        if isinstance(event, Resumed):
            for seq in range(event.first_seq, event.last_seq + 1):
                yield Acknowledged(event.source, seq, None, event.at_s, is_resumed=True)
        else:
            yield event
