"""What Seriatim wants to reach beside its peers: ratios of medians of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Medians = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By case, peer and key of the figure."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Seriatim's figure divided by the peer's is at least, or at most, `bound`."""

    case: str
    key: str
    peer: str
    bound: float
    is_at_least: bool

    def ratio(self, medians: Medians) -> float | None:
        """None where one of the two was not measured."""
        of_case = medians.get(self.case, {})
        own, other = of_case.get("seriatim", {}).get(self.key), of_case.get(self.peer, {}).get(self.key)
        return None if own is None or not other else own / other

    def is_met(self, ratio: float) -> bool:
        """Whether the ratio is within the bound."""
        return ratio >= self.bound if self.is_at_least else ratio <= self.bound


def _at_least(case: str, key: str, peer: str, bound: float) -> Goal:
    return Goal(case, key, peer, bound, is_at_least=True)


def _at_most(case: str, key: str, peer: str, bound: float) -> Goal:
    return Goal(case, key, peer, bound, is_at_least=False)


GOALS = (
    *(_at_least(f"single {size}", "records_per_s", "kafka", 2) for size in ("100 B", "1 KiB")),
    *(_at_least(f"single {size}", "records_per_s", "kafka-flush", 4) for size in ("100 B", "1 KiB")),
    *(_at_least(f"single {size}", "records_per_s", "nats-always", 10) for size in ("100 B", "1 KiB")),
    _at_least("single 1 KiB", "records_per_s", "floor", 0.5),
    _at_most("one in flight", "p50_ms", "kafka", 1),
    _at_most("1,000 a second", "p99_ms", "kafka", 1),
    _at_least("catch-up read", "records_per_s", "kafka", 1),
    *(_at_most("leader killed", "outage_p50_ms", peer, 1 / 50) for peer in ("kafka", "kafka-rf3", "nats")),
    *(_at_most("leader paused", "outage_p50_ms", peer, 1 / 10) for peer in ("kafka", "kafka-rf3", "nats")),
    *(_at_most(f"single {size}", "cpu_s_per_million", "kafka", 1) for size in ("100 B", "1 KiB")),
)
