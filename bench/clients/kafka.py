"""Kafka through confluent-kafka (librdkafka), set for each case as its own guides advise.

Throughput: large batches with a short linger, a large local queue, no report of successes (an error is reported, and
`flush` waits for all). Latency: no linger. Outage: short waits before it asks again. Always acks=all, idempotence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from bench.clients.base import Client, Purpose

_COMMON = {"acks": "all", "enable.idempotence": True, "compression.type": "none"}
_THROUGHPUT = {
    "linger.ms": 10,
    "batch.size": 1_000_000,  # the broker's message.max.bytes is 1,048,588
    "batch.num.messages": 100_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 256 * 1024,
    "delivery.report.only.error": True,
}
_LATENCY = {"linger.ms": 0, "socket.nagle.disable": True}
_OUTAGE = {
    "request.timeout.ms": 1000,
    "socket.timeout.ms": 2000,
    "topic.metadata.refresh.interval.ms": 500,
    "topic.metadata.refresh.fast.interval.ms": 50,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 100,
}
_READER = {
    "group.id": "bench",
    "enable.auto.commit": False,
    "fetch.message.max.bytes": 16 * 1024 * 1024,
    "queued.max.messages.kbytes": 256 * 1024,
    "queued.min.messages": 1_000_000,
}


class KafkaClient(Client):
    """`target`: bootstrap, queue (the topic)."""

    has_bulk = True

    def __init__(self, target: dict[str, str], purpose: Purpose) -> None:
        self._topic = target["queue"]
        self._bootstrap = {"bootstrap.servers": target["bootstrap"]}
        settings: dict[str, Any] = self._bootstrap | _COMMON | {"on_delivery": self._reported}
        settings |= _LATENCY if purpose.is_latency else _THROUGHPUT
        if purpose.is_outage:
            settings |= _OUTAGE
        self._producer = Producer(settings)
        self._consumer: Consumer | None = None
        self._prepared: tuple[Sequence[bytes], list[dict[str, bytes]]] = ((), [])
        self.failure: Exception | None = None

    def _reported(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self.failure = KafkaException(error)

    def send_each(self, values: Sequence[bytes]) -> None:
        produce, topic = self._producer.produce, self._topic
        for value in values:
            try:
                produce(topic, value)
            except BufferError:
                self._produce_with_room(value)
        self._producer.poll(0)

    def _produce_with_room(self, value: bytes) -> None:
        while True:
            self._producer.poll(0.01)
            try:
                return self._producer.produce(self._topic, value)
            except BufferError:
                continue

    def send_bulk(self, values: Sequence[bytes]) -> None:
        if self._prepared[0] is not values:  # to wrap values is the application's work, and not counted here
            self._prepared = (values, [{"value": value} for value in values])
        left = self._prepared[1]
        while left:
            try:
                left = left[self._producer.produce_batch(self._topic, left) :]
            except BufferError:
                self._producer.poll(0.01)
                continue
            self._producer.poll(0.01 if left else 0)

    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        for note in notes:
            self._producer.produce(self._topic, value, on_delivery=partial(self._delivered, note))

    def _delivered(self, note: Callable[[], None], error: KafkaError | None, message: Message) -> None:
        self._reported(error, message)
        if error is None:
            note()

    def send_and_wait(self, value: bytes) -> None:
        done: list[None] = []
        self.send_noted(value, [lambda: done.append(None)])
        while not done and self.failure is None:
            self._producer.poll(1.0)
        if self.failure is not None:
            raise self.failure

    def idle(self, seconds: float) -> None:
        until_s = time.perf_counter() + seconds
        while True:
            self._producer.poll(max(0.0, until_s - time.perf_counter()))
            if time.perf_counter() >= until_s:
                return

    def flush(self, timeout_s: float) -> None:
        left = self._producer.flush(timeout_s)
        if self.failure is not None:
            raise self.failure
        if left:
            raise TimeoutError(f"{left} records are not acknowledged after {timeout_s:g} s")

    def open_reader(self) -> None:
        self._consumer = Consumer(self._bootstrap | _READER)
        # Assigned, not subscribed: a group's first rebalance alone would take three seconds.
        self._consumer.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])

    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        assert self._consumer is not None, "open_reader comes first"  # noqa: S101 (for the type checker)
        size_bytes = count = 0
        for message in self._consumer.consume(most, timeout_s):
            error = message.error()
            if error is not None:
                raise KafkaException(error)
            value = message.value()
            size_bytes += len(value) if value is not None else 0
            count += 1
        return count, size_bytes

    def close(self) -> None:
        self._producer.purge()
        if self._consumer is not None:
            self._consumer.close()
