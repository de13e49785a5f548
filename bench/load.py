"""The load: a process that sends or reads as one case asks, and tells its figures, one JSON object a line.

    python -m bench.load '{"client": …, "target": …, "case": …, …}'

`begin` is said when everything is open and the case begins, `end` with the figures when it is over; in outage cases
`progress` in between, until a line on standard input asks it to stop.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.clients.base import Client, Purpose

CLIENTS = {
    "seriatim": "bench.clients.seriatim:SeriatimClient",
    "kafka": "bench.clients.kafka:KafkaClient",
    "nats": "bench.clients.nats:NatsClient",
    "rocketmq": "bench.clients.rocketmq:RocketMqClient",
    "floor": "bench.clients.floor:FloorClient",
}
TICK_S = 0.001
"""Records of a steady rate are handed over once in so long, all that are due."""
FLUSH_TIMEOUT_S = 120.0
_CHUNK_BYTES = 64 * 1024
_CHUNK_RECORDS = 500
_CHUNK_S = 0.005
_READ_RECORDS = 500
_READ_TIMEOUT_S = 30.0
_PROGRESS_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Order:
    """What the process is to do. `mode`: throughput, one-in-flight, rate, read or steady."""

    client: str
    target: dict[str, str]
    mode: str
    size_bytes: int
    seconds: float = 5.0
    """How long to send or read; at most so long, where a count is given."""
    count: int = sys.maxsize
    """Records to send or to read, at most."""
    rate: float = 0.0
    is_bulk: bool = False

    @property
    def purpose(self) -> Purpose:
        """How the client is to be set."""
        is_steady = self.mode == "steady"
        return Purpose(is_latency=is_steady or self.mode in {"one-in-flight", "rate"}, is_outage=is_steady)


def main() -> None:
    """Carry out the order on the command line."""
    order = Order(**json.loads(sys.argv[1]))
    module, name = CLIENTS[order.client].split(":")
    client: Client = getattr(importlib.import_module(module), name)(order.target, order.purpose)
    figures = MODES[order.mode](client, order)
    tell("end", **figures)
    client.close()


def tell(event: str, **figures: Any) -> None:
    """Say something to the process that asked for this load."""
    print(json.dumps({"event": event, "cpu_s": time.process_time(), **figures}), flush=True)


def throughput(client: Client, order: Order) -> dict[str, Any]:
    """Send as fast as it is taken, for so long; the clock stops when the last record is acknowledged."""
    _open(client, order)
    tell("begin")
    started_s = time.perf_counter()
    count = _send_until(client, order, started_s + order.seconds)
    client.flush(FLUSH_TIMEOUT_S)
    return {"count": count, "seconds": time.perf_counter() - started_s}


def one_in_flight(client: Client, order: Order) -> dict[str, Any]:
    """Send one record after the other, each when the one before is acknowledged; latency from call to acknowledgement."""
    value = os.urandom(order.size_bytes)
    _open(client, order)
    tell("begin")
    latencies_s: list[float] = []
    started_s = now_s = time.perf_counter()
    while now_s < started_s + order.seconds:
        client.send_and_wait(value)
        before_s, now_s = now_s, time.perf_counter()
        latencies_s.append(now_s - before_s)
    return {"count": len(latencies_s), "seconds": now_s - started_s, "latencies_s": latencies_s}


def rate(client: Client, order: Order) -> dict[str, Any]:
    """Send at a steady rate; latency from the moment a record was due to its acknowledgement, so that a stall counts."""
    _open(client, order)
    tell("begin")
    latencies_s: list[float] = []
    sender = _Steady(client, order, lambda due_s: latencies_s.append(time.perf_counter() - due_s))
    sender.run_until(sender.started_s + order.seconds)
    client.flush(FLUSH_TIMEOUT_S)
    seconds = time.perf_counter() - sender.started_s
    return {"count": sender.sent, "seconds": seconds, "latencies_s": latencies_s}


def steady(client: Client, order: Order) -> dict[str, Any]:
    """Send at a steady rate until told to stop; tell when each acknowledgement came, by the machine's monotonic clock."""
    stopping = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stopping.set()), name="stop", daemon=True).start()
    _open(client, order)
    tell("begin")
    acknowledged_at_s: list[float] = []
    sender = _Steady(client, order, lambda _due_s: acknowledged_at_s.append(time.perf_counter()))
    while not stopping.is_set():
        sender.run_until(time.perf_counter() + _PROGRESS_EVERY_S)
        tell("progress", acknowledged=len(acknowledged_at_s), last_at_s=max(acknowledged_at_s[-1:], default=0.0))
    client.flush(FLUSH_TIMEOUT_S)
    return {"count": sender.sent, "acknowledged_at_s": acknowledged_at_s}


def read(client: Client, order: Order) -> dict[str, Any]:
    """Read `count` records from the queue's start, touching each value; the clock runs from when the reader may read."""
    client.open_reader()
    tell("begin")
    count = size_bytes = 0
    started_s = last_s = time.perf_counter()
    while count < order.count and last_s < started_s + order.seconds:
        found, found_bytes = client.read(min(_READ_RECORDS, order.count - count), _READ_TIMEOUT_S)
        if not found:
            break
        last_s = time.perf_counter()
        count += found
        size_bytes += found_bytes
    return {"count": count, "seconds": last_s - started_s, "read_bytes": size_bytes}


MODES = {
    "throughput": throughput,
    "one-in-flight": one_in_flight,
    "rate": rate,
    "steady": steady,
    "read": read,
}


class _Steady:
    """Hands over, every tick, the records that are due; behind its time it catches up at once."""

    def __init__(self, client: Client, order: Order, on_acknowledged: Callable[[float], None]) -> None:
        """`on_acknowledged(due_s)`: called for each record. The rate is a multiple of the ticks' own."""
        self.sent = 0
        self._client = client
        self._each_tick = round(order.rate * TICK_S)
        if self._each_tick != order.rate * TICK_S or self._each_tick < 1:
            raise ValueError(f"a rate is a multiple of {1 / TICK_S:g} a second, not {order.rate:g}")
        self._value = os.urandom(order.size_bytes)
        self._on_acknowledged = on_acknowledged
        self._ticks = 0
        self.started_s = time.perf_counter()

    def run_until(self, until_s: float) -> None:
        while (now_s := time.perf_counter()) < until_s:
            while (due_s := self.started_s + (self._ticks + 1) * TICK_S) <= now_s:
                self._client.send_noted(self._value, [partial(self._on_acknowledged, due_s)] * self._each_tick)
                self._ticks += 1
                self.sent += self._each_tick
            self._client.idle(max(0.0, due_s - time.perf_counter()))


def _open(client: Client, order: Order) -> None:
    """The first record makes connections and, with some, opens what is to be written to; it isn't counted."""
    client.send_each([os.urandom(order.size_bytes)])
    client.flush(FLUSH_TIMEOUT_S)


def _send_until(client: Client, order: Order, until_s: float) -> int:
    """How many were sent. The clock is looked at between chunks, which grow as long as one takes no time to speak of."""
    largest = max(1, min(_CHUNK_RECORDS, _CHUNK_BYTES // order.size_bytes))
    chunk = [os.urandom(order.size_bytes)]
    send = client.send_bulk if order.is_bulk else client.send_each
    count = 0
    now_s = time.perf_counter()
    while count < order.count and now_s < until_s:
        send(chunk)
        count += len(chunk)
        before_s, now_s = now_s, time.perf_counter()
        if len(chunk) < largest and now_s - before_s < _CHUNK_S:
            chunk = chunk[:1] * min(2 * len(chunk), largest)
    return count


if __name__ == "__main__":
    main()
