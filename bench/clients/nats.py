"""NATS JetStream through nats-py on uvloop: asynchronous publishes, many unacknowledged at a time.

nats-py has no call for many records. Its loop runs while a call of this class runs, as its user's would between awaits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import nats
import nats.errors
import nats.js
import uvloop
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from bench.clients.base import Client, Purpose

_PENDING = 16_384
_OUTAGE_PENDING = 1_000_000
_OUTAGE = {"reconnect_time_wait": 0.02, "max_reconnect_attempts": -1, "ping_interval": 1, "max_outstanding_pings": 2}


class NatsClient(Client):
    """`target`: servers (comma separated), queue (stream and subject)."""

    def __init__(self, target: dict[str, str], purpose: Purpose) -> None:
        self._subject = target["queue"]
        self._is_outage = purpose.is_outage
        self._loop = uvloop.new_event_loop()
        self._run(self._connect(target["servers"].split(","), _OUTAGE if purpose.is_outage else {}))
        self._reader: nats.js.JetStreamContext.PullSubscription | None = None
        self.failure: BaseException | None = None

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    async def _connect(self, servers: list[str], settings: dict[str, Any]) -> None:
        self._connection = await nats.connect(servers, error_cb=_ignore, pending_size=64 * 1024 * 1024, **settings)
        pending = _OUTAGE_PENDING if self._is_outage else _PENDING
        self._stream = self._connection.jetstream(publish_async_max_pending=pending)

    def send_each(self, values: Sequence[bytes]) -> None:
        self._run(self._send_each(values))

    async def _send_each(self, values: Sequence[bytes]) -> None:
        publish, subject, note = self._stream.publish_async, self._subject, self._note
        for value in values:
            (await publish(subject, value)).add_done_callback(note)

    def _note(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self.failure = future.exception()

    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        self._run(self._send_noted(value, notes))

    async def _send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        for note in notes:
            try:
                future = await self._stream.publish_async(self._subject, value)
            except nats.errors.Error:
                if not self._is_outage:
                    raise
            else:
                future.add_done_callback(partial(self._ended, note))

    def _ended(self, note: Callable[[], None], future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        if future.exception() is None:
            note()
        elif not self._is_outage:  # in an outage a refused publish is the application's to repeat: not counted
            self.failure = future.exception()

    def send_and_wait(self, value: bytes) -> None:
        self._run(self._stream.publish(self._subject, value))

    def idle(self, seconds: float) -> None:
        # Timers of the loop are of whole milliseconds, a thread's sleep is not.
        self._loop.run_until_complete(self._loop.run_in_executor(None, time.sleep, seconds))

    def flush(self, timeout_s: float) -> None:
        if not self._is_outage:  # what got lost on its way is never acknowledged
            self._run(self._flush(timeout_s))
        if self.failure is not None:
            raise self.failure

    async def _flush(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self._stream.publish_async_completed()

    def open_reader(self) -> None:
        self._run(self._open_reader())

    async def _open_reader(self) -> None:
        settings = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, mem_storage=True)
        self._reader = await self._stream.pull_subscribe(self._subject, stream=self._subject, config=settings)

    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        return self._run(self._read(most, timeout_s))  # type: ignore[no-any-return]

    async def _read(self, most: int, timeout_s: float) -> tuple[int, int]:
        assert self._reader is not None, "open_reader comes first"  # noqa: S101 (for the type checker)
        try:
            messages = await self._reader.fetch(most, timeout_s)
        except nats.errors.TimeoutError:
            return 0, 0
        return len(messages), sum(len(message.data) for message in messages)

    def close(self) -> None:
        self._run(self._connection.close())
        self._loop.close()


async def _ignore(_error: Exception) -> None:
    """Connections break in some cases on purpose; what counts is which records were acknowledged."""
