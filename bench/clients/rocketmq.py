"""RocketMQ through its own Python client and the proxy; ordered messages of one group, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocketmq.v5.client import ClientConfiguration, Credentials
from rocketmq.v5.model import Message
from rocketmq.v5.producer import Producer

from bench.clients.base import Client, Purpose


class RocketMqClient(Client):
    """`target`: endpoint (of the proxy), queue (the topic). `send` waits, so nothing is ever left to flush."""

    def __init__(self, target: dict[str, str], _purpose: Purpose) -> None:
        self._topic = target["queue"]
        self._producer = Producer(ClientConfiguration(target["endpoint"], Credentials()), (self._topic,))
        self._producer.startup()

    def send_each(self, values: Sequence[bytes]) -> None:
        for value in values:
            self.send_and_wait(value)

    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        for note in notes:
            self.send_and_wait(value)
            note()

    def send_and_wait(self, value: bytes) -> None:
        message = Message()
        message.topic = self._topic
        message.message_group = "bench"
        message.body = value
        self._producer.send(message)

    def idle(self, seconds: float) -> None:
        raise NotImplementedError("a steady rate isn't kept with one record in flight")

    def flush(self, timeout_s: float) -> None:
        """Nothing waits."""

    def open_reader(self) -> None:
        raise NotImplementedError("catch-up isn't measured")

    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        raise NotImplementedError("catch-up isn't measured")

    def close(self) -> None:
        self._producer.shutdown()
