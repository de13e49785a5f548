"""A sender that finds no group to send to, or a reader whose application stops reading: a process of its own.

    python -m bench.growth.pressed '{"kind": "sender", …}'

A sender says `begin` when it has sent one record, and waits for a line on standard input, before which every group is
taken away; then it sends until nothing is taken any more. `end` tells how many records were taken, and what the process
holds in memory beyond what it held before.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.load import tell
from bench.measuring import anonymous_bytes
from seriatim.consumer import Consumer
from seriatim.producer import Producer

_TIMEOUT_S = 60.0
_STUCK_S = 3.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Pressure:
    """`kind`: sender or reader. `setting_bytes`: what its memory is to be bounded by."""

    kind: str
    target: dict[str, str]
    setting_bytes: int
    size_bytes: int


def main() -> None:
    """Carry out the order on the command line; the process leaves without closing, for nothing of it can be sent."""
    order = Pressure(**json.loads(sys.argv[1]))
    (_send if order.kind == "sender" else _read)(order)
    sys.stdout.flush()
    os._exit(0)


def _send(order: Pressure) -> None:
    producer = Producer(
        order.target["coordinators"], order.target["queue"], max_buffer_bytes=order.setting_bytes, max_block_s=600
    )
    producer.send(os.urandom(order.size_bytes)).result(_TIMEOUT_S)
    tell("begin")
    sys.stdin.readline()
    base_bytes = anonymous_bytes(os.getpid())
    count = 0

    def send() -> None:
        nonlocal count
        while True:
            producer.send(os.urandom(order.size_bytes))  # each another one, or one value would stand for all
            count += 1

    threading.Thread(target=send, daemon=True).start()
    _tell_growth(base_bytes, lambda: count, order)


def _read(order: Pressure) -> None:
    base_bytes = anonymous_bytes(os.getpid())
    consumer = Consumer(
        order.target["coordinators"], order.target["queue"], "stopped", prefetch_bytes=order.setting_bytes
    )
    consumer.open()
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not consumer.poll(1, 1.0):
        if time.monotonic() > deadline_s:
            raise TimeoutError("nothing to read")
    tell("begin")
    _tell_growth(base_bytes, lambda: anonymous_bytes(os.getpid()) >> 20, order)


def _tell_growth(base_bytes: int, progress: Callable[[], int], order: Pressure) -> None:
    peak_bytes, seen, since_s = 0, -1, time.monotonic()
    while time.monotonic() - since_s < _STUCK_S:
        peak_bytes = max(peak_bytes, anonymous_bytes(os.getpid()))
        if progress() != seen:
            seen, since_s = progress(), time.monotonic()
        time.sleep(_LOOK_EVERY_S)
    taken = seen if order.kind == "sender" else 0
    tell("end", taken=taken, grown_bytes=peak_bytes - base_bytes)


if __name__ == "__main__":
    main()
