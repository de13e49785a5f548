from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from bench.clients.base import Client
from bench.load import TICK_S, Order, rate, throughput


class Fake(Client):
    """Acknowledges at once, and stands still where it is told to."""

    has_bulk = True

    def __init__(self, stall_s: float = 0.0) -> None:
        self.calls: list[int] = []
        self._stall_s = stall_s

    def send_each(self, values: Sequence[bytes]) -> None:
        self.calls.append(len(values))

    def send_bulk(self, values: Sequence[bytes]) -> None:
        self.calls.append(len(values))

    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        self.calls.append(len(notes))
        time.sleep(self._stall_s)
        self._stall_s = 0.0
        for note in notes:
            note()

    def send_and_wait(self, value: bytes) -> None:
        self.calls.append(1)

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def flush(self, timeout_s: float) -> None:
        pass

    def open_reader(self) -> None:
        pass

    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        pass


def test_throughput_counts_what_was_sent_after_the_first(capsys) -> None:
    client = Fake()
    figures = throughput(client, Order("", {}, "throughput", 100, seconds=0.02))
    assert figures["count"] == sum(client.calls) - 1
    assert figures["seconds"] >= 0.02
    assert max(client.calls) == 500
    assert '"begin"' in capsys.readouterr().out


def test_a_steady_rate_hands_over_what_is_due_each_tick() -> None:
    client = Fake()
    figures = rate(client, Order("", {}, "rate", 100, seconds=0.1, rate=10_000))
    assert set(client.calls[1:]) == {10}
    assert figures["count"] <= 0.1 / TICK_S * 10 + 10
    assert len(figures["latencies_s"]) == figures["count"]


def test_a_stall_counts_for_all_records_that_were_due_meanwhile() -> None:
    stall_s = 0.05
    figures = rate(Fake(stall_s), Order("", {}, "rate", 100, seconds=0.2, rate=1_000))
    late = [one for one in figures["latencies_s"] if one > stall_s / 2]
    assert len(late) >= stall_s / 2 / TICK_S - 2


def test_a_rate_between_ticks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        rate(Fake(), Order("", {}, "rate", 100, rate=1_500))
