"""When to kill what: pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What is killed."""

    MASTER = "master"
    """The master of the group in use."""
    CAPTURE = "capture"
    """The elected capture."""
    REPLAY = "replay"
    """The Spark job, with all its processes."""
    COORDINATOR = "coordinator"
    """The elected coordinator."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """`at_s`: seconds after the load began."""

    kind: FaultKind
    at_s: float


_SHARES = (
    (FaultKind.MASTER, 0.05),
    (FaultKind.CAPTURE, 0.10),
    (FaultKind.REPLAY, 0.20),
    (FaultKind.COORDINATOR, 0.80),
)
"""Of the load's time. Spark takes by far the longest to come back, so that most of the time is left after it."""


def planned(seconds: float) -> tuple[PlannedFault, ...]:
    """All four faults, spread over a load of `seconds`, in rising order."""
    return tuple(PlannedFault(kind, share * seconds) for kind, share in _SHARES)
