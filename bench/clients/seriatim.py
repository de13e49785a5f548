"""Seriatim through its public libraries, as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from bench.clients.base import Client, Purpose
from seriatim.consumer import Consumer
from seriatim.producer import Handle, Producer

_TIMEOUT_S = 60.0


class SeriatimClient(Client):
    """`target`: coordinators, queue."""

    has_bulk = True

    def __init__(self, target: dict[str, str], _purpose: Purpose) -> None:
        self._target = target
        self._opened: Producer | None = None
        self._consumer: Consumer | None = None
        self.failure: Exception | None = None

    @property
    def _producer(self) -> Producer:
        if self._opened is None:
            self._opened = Producer(self._target["coordinators"], self._target["queue"])
            self._opened.wait_until_elected(_TIMEOUT_S)
        return self._opened

    def send_each(self, values: Sequence[bytes]) -> None:
        send = self._producer.send
        for value in values:
            send(value)

    def send_bulk(self, values: Sequence[bytes]) -> None:
        self._producer.send_many(values)

    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        for note in notes:
            self._producer.send(value).add_done_callback(partial(self._ended, note))

    def _ended(self, note: Callable[[], None], handle: Handle) -> None:
        try:
            handle.result(0)
        except Exception as error:
            self.failure = error
            return
        note()

    def send_and_wait(self, value: bytes) -> None:
        self._producer.send(value).result(_TIMEOUT_S)

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def flush(self, timeout_s: float) -> None:
        self._producer.flush(timeout_s)
        if self.failure is not None:
            raise self.failure

    def open_reader(self) -> None:
        self._consumer = Consumer(self._target["coordinators"], self._target["queue"], "bench", start="earliest")
        self._consumer.open()
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not self._consumer.is_elected:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not elected to read: waiting for {self._consumer.waiting_for}")
            time.sleep(0.005)

    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        assert self._consumer is not None, "open_reader comes first"  # noqa: S101 (for the type checker)
        records = self._consumer.poll(most, timeout_s)
        return len(records), sum(len(record.value) for record in records)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        if self._opened is not None:
            self._opened.close()
