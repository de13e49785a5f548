"""What happened, as facts in the order in which one recorder saw them: the input of the checker.

Times are seconds on one machine's monotonic clock. `session` names one stretch of reading by one elected reader: from
its grant to its end; a new session may start before where the last one ended (records handed out, not committed).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
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
    """The sender was told that the record is kept. `offset` is None where it was told without a place (a resume point)."""

    source: str
    seq: int
    offset: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The sender was told that the record is not kept, and never will be."""

    source: str
    seq: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """A reader got the record."""

    subscription: str
    session: str
    offset: int
    source: str
    seq: int
    value: str
    at_s: float


Event = Sent | Acknowledged | Refused | Delivered
_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in (Sent, Acknowledged, Refused, Delivered)}


def write(events: Iterable[Event], path: Path) -> None:
    """Append events to a file, one JSON object a line."""
    with path.open("a") as file:
        for event in events:
            file.write(json.dumps({"type": type(event).__name__} | asdict(event)) + "\n")


def read(path: Path) -> Iterator[Event]:
    """The events of a file. A last line that was cut off by a kill is left out."""
    for line in path.read_text().splitlines():
        try:
            content = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield _TYPES[content.pop("type")](**content)
