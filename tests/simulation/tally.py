"""What schedules came to, all together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.schedule import Outcome

SHOWN_FAILURES = 20


@dataclass
class Tally:
    """Of all outcomes that were added."""

    count: int = 0
    steps: int = 0
    records: int = 0
    simulated_s: float = 0.0
    failures: list[Outcome] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.count += 1
        self.steps += outcome.steps
        self.records += outcome.records
        self.simulated_s += outcome.simulated_s
        self.faults.update(outcome.faults)
        if outcome.failure:
            self.failures.append(outcome)

    @property
    def steps_each(self) -> int:
        return round(self.steps / max(1, self.count))

    def summary(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {
            "schedules": self.count,
            "broken": sorted(one.seed for one in self.failures),
            "failures": {one.seed: one.failure for one in self.failures[:SHOWN_FAILURES]},
            "steps": self.steps,
            "steps_per_schedule": self.steps_each,
            "records": self.records,
            "simulated_s": round(self.simulated_s),
            "faults": dict(self.faults.most_common()),
        }
