"""What the parts of a replay share: its settings, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.progress import Report
from seriatim.consumer.subscriber import Term
from seriatim.protocol.flag import Flag


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """One replay.

    checkpoint: folder for Spark's checkpoints, on the driver's machine, which alone has them; empty: a temporary one.
    until_idle_s: end when everything is applied and nothing came for so long; None: never.
    spark_conf: settings of Spark's, by name.
    """

    coordinators: str
    queue: str
    target: str
    subscription: str = "replay"
    master: str = "local[*]"
    checkpoint: str = ""
    trigger_ms: int = 100
    max_records: int = 20_000
    until_idle_s: float | None = None
    session_timeout_s: float = 4.0
    spark_log_level: str = "fatal"
    spark_conf: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """One process's replay, over all its terms.

    stopping: it is to end. elected: (token, generation) of the grant that stands, None while there is none.
    records, changes: applied so far. A record that a later query reads anew counts once: all below `counted_to` are counted.
    offset: where the target stands, None before the first term.
    """

    settings: ReplaySettings
    report: Report
    stopping: Flag = field(default_factory=Flag)
    elected: tuple[int, int] | None = None
    records: int = 0
    changes: int = 0
    counted_to: int = 0
    offset: int | None = None

    def grant(self, term: Term) -> None:
        """Elected."""
        self.elected = (term.token, term.generation)

    def depose(self) -> None:
        """No longer elected."""
        self.elected = None

    def count(self, rows: Sequence[ChangeRow]) -> None:
        """A micro-batch with these rows passed."""
        if rows:
            self.records += sum(row.offset >= self.counted_to for row in rows)
            self.counted_to = max(self.counted_to, rows[-1].offset + 1)

    def is_over(self, term: Term) -> bool:
        """Whether nothing more is to be done under `term`."""
        return self.stopping.is_set() or self.elected != (term.token, term.generation)
