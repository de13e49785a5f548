"""What is measured: the list of cases, and what each yields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Sort of a case; `--cases` chooses by it."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    CATCH_UP = "catch-up"
    OUTAGE = "outage"


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure. Unique by `name`, which is also its key in the JSON."""

    name: str
    kind: Kind
    size_bytes: int
    """Of a record's value."""
    is_bulk: bool = False
    """Many records handed over with one call."""
    rate: float = 0
    """Records a second; latency with 0: one in flight."""
    signal: str = ""
    """What the leader gets: SIGKILL or SIGSTOP."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a case."""

    key: str
    label: str
    unit: str


RECORDS_PER_S = Figure("records_per_s", "throughput", "records/s")
MB_PER_S = Figure("mb_per_s", "throughput", "MB/s")
CPU_S = Figure("cpu_s_per_million", "processor seconds per million records", "s")
CPU_SHARE = Figure("cpu_share", "processors in use", "cores")
SENDER_MB = Figure("client_peak_mb", "peak memory of the client", "MB")
SERVERS_MB = Figure("servers_peak_mb", "peak memory of the servers", "MB")
P50 = Figure("p50_ms", "p50", "ms")
P99 = Figure("p99_ms", "p99", "ms")
P999 = Figure("p999_ms", "p99.9", "ms")
OUTAGE_P50 = Figure("outage_p50_ms", "outage p50", "ms")
OUTAGE_MAX = Figure("outage_max_ms", "longest outage", "ms")

FIGURES = {
    Kind.THROUGHPUT: (RECORDS_PER_S, MB_PER_S, CPU_S, SENDER_MB, SERVERS_MB),
    Kind.LATENCY: (P50, P99, P999, RECORDS_PER_S, CPU_SHARE, SENDER_MB, SERVERS_MB),
    Kind.CATCH_UP: (RECORDS_PER_S, MB_PER_S, CPU_S, SENDER_MB, SERVERS_MB),
    Kind.OUTAGE: (OUTAGE_P50, OUTAGE_MAX),
}

_SIZES = {"100 B": 100, "1 KiB": 1024, "10 KiB": 10 * 1024}

CASES: tuple[Case, ...] = (
    *(Case(f"single {label}", Kind.THROUGHPUT, size) for label, size in _SIZES.items()),
    *(Case(f"bulk {label}", Kind.THROUGHPUT, size, is_bulk=True) for label, size in _SIZES.items()),
    Case("one in flight", Kind.LATENCY, 100),
    Case("1,000 a second", Kind.LATENCY, 100, rate=1_000),
    Case("10,000 a second", Kind.LATENCY, 100, rate=10_000),
    Case("catch-up read", Kind.CATCH_UP, 100),
    Case("leader killed", Kind.OUTAGE, 100, rate=1_000, signal="SIGKILL"),
    Case("leader paused", Kind.OUTAGE, 100, rate=1_000, signal="SIGSTOP"),
)


def chosen(words: list[str]) -> tuple[Case, ...]:
    """The cases that the words name, by kind or by a part of the name; all for none.

    Raises ValueError for a word that names none.
    """
    for word in words:
        if not any(_fits(case, word) for case in CASES):
            known = ", ".join([*Kind, *(case.name for case in CASES)])
            raise ValueError(f"no case is called {word!r}; there are: {known}")
    return tuple(case for case in CASES if not words or any(_fits(case, word) for word in words))


def _fits(case: Case, word: str) -> bool:
    return word == case.kind or word in case.name
