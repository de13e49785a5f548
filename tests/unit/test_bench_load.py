from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bench import load
from bench.clients.base import Client
from bench.load import TICK_S, Order, rate, throughput


class Clock:
    """In place of the module `time`: only who waits lets time pass, so no machine is too slow for these tests."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(load, "time", made)
    return made


class Fake(Client):
    """Acknowledges at once, and stands still where it is told to; whatever is sent takes a little."""

    has_bulk = True

    def __init__(self, clock: Clock, stall_s: float = 0.0) -> None:
        self.calls: list[int] = []
        self._clock = clock
        self._stall_s = stall_s

    def send_each(self, values: Sequence[bytes]) -> None:
        self.calls.append(len(values))
        self.idle(0.0005)

    def send_bulk(self, values: Sequence[bytes]) -> None:
        self.send_each(values)

    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        self.calls.append(len(notes))
        self.idle(self._stall_s)
        self._stall_s = 0.0
        for note in notes:
            note()

    def send_and_wait(self, value: bytes) -> None:
        self.calls.append(1)

    def idle(self, seconds: float) -> None:
        self._clock.now_s += seconds

    def flush(self, timeout_s: float) -> None:
        pass

    def open_reader(self) -> None:
        pass

    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        pass


def test_throughput_counts_what_was_sent_after_the_first(clock: Clock, capsys) -> None:
    client = Fake(clock)
    figures = throughput(client, Order("", {}, "throughput", 100, seconds=0.02))
    assert figures["count"] == sum(client.calls) - 1
    assert figures["seconds"] >= 0.02
    assert max(client.calls) == 500
    assert '"begin"' in capsys.readouterr().out


def test_a_steady_rate_hands_over_what_is_due_each_tick(clock: Clock) -> None:
    client = Fake(clock)
    figures = rate(client, Order("", {}, "rate", 100, seconds=0.1, rate=10_000))
    assert set(client.calls[1:]) == {10}
    assert figures["count"] <= 0.1 / TICK_S * 10 + 10
    assert len(figures["latencies_s"]) == figures["count"]


def test_a_stall_counts_for_all_records_that_were_due_meanwhile(clock: Clock) -> None:
    stall_s = 0.05
    figures = rate(Fake(clock, stall_s), Order("", {}, "rate", 100, seconds=0.2, rate=1_000))
    late = [one for one in figures["latencies_s"] if one > stall_s / 2]
    assert len(late) >= stall_s / 2 / TICK_S - 2


def test_a_rate_between_ticks_is_refused(clock: Clock) -> None:
    with pytest.raises(ValueError, match="multiple"):
        rate(Fake(clock), Order("", {}, "rate", 100, rate=1_500))
