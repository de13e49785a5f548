"""The floor: the batches that Seriatim would make of the same records, sent over a bare gRPC stream.

They are encoded before the clock starts; a record costs nothing here. What may be in flight is what Seriatim allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from bench.clients.base import Client, Purpose
from bench.floor_member import METHOD
from seriatim.producer.core.batching import BATCH_BYTES
from seriatim.producer.core.sender import SenderSettings
from seriatim.protocol import rpc
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.names import Index

_COLUMN_BYTES = 32  # what Producer counts for a record beside its value


class FloorClient(Client):
    """`target`: address. Its loop runs while a call of this class runs."""

    def __init__(self, target: dict[str, str], _purpose: Purpose) -> None:
        self._loop = asyncio.new_event_loop()
        self._window = SenderSettings()
        self._batches: dict[tuple[int, int], bytes] = {}
        self._open_records = 0
        self._sent = self._acknowledged = 0
        self._in_flight: deque[tuple[int, Sequence[Callable[[], None]]]] = deque()
        self._in_flight_bytes = 0
        self._run(self._connect(target["address"]))

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        self._loop.run_until_complete(work)

    async def _connect(self, address: str) -> None:
        self._changed = asyncio.Event()
        self._channel = rpc.channel(address)
        self._call: Any = self._channel.stream_stream(METHOD)()
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for reply in self._call:
            count = int.from_bytes(reply)
            while self._acknowledged < count:
                size_bytes, notes = self._in_flight.popleft()
                self._in_flight_bytes -= size_bytes
                self._acknowledged += 1
                for note in notes:
                    note()
            self._changed.set()

    def _batch(self, size_bytes: int, count: int) -> bytes:
        batch = self._batches.get((size_bytes, count))
        if batch is None:
            values = [os.urandom(size_bytes) for _ in range(count)]
            columns = RecordColumns(values, list(range(1, count + 1)), "floor", [0] * count)
            encoded = encode(columns, Index(0))
            batch = self._batches[size_bytes, count] = encoded.header_bytes + encoded.payload
        return batch

    def send_each(self, values: Sequence[bytes]) -> None:
        size_bytes = len(values[0])
        of_batch = max(1, BATCH_BYTES // (size_bytes + _COLUMN_BYTES))
        self._open_records += len(values)
        while self._open_records >= of_batch:
            self._open_records -= of_batch
            self._run(self._send(self._batch(size_bytes, of_batch), ()))
        self._last_size_bytes = size_bytes

    async def _send(self, batch: bytes, notes: Sequence[Callable[[], None]]) -> None:
        window = self._window
        while self._in_flight and (
            len(self._in_flight) >= window.window_batches or self._in_flight_bytes >= window.window_bytes
        ):
            await self._change()
        self._in_flight.append((len(batch), notes))
        self._in_flight_bytes += len(batch)
        self._sent += 1
        await self._call.write(batch)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        self._run(self._send(self._batch(len(value), len(notes)), notes))

    def send_and_wait(self, value: bytes) -> None:
        self._run(self._send_and_wait(self._batch(len(value), 1)))

    async def _send_and_wait(self, batch: bytes) -> None:
        await self._send(batch, ())
        await self._all_acknowledged()

    async def _all_acknowledged(self) -> None:
        while self._acknowledged < self._sent:
            await self._change()

    def idle(self, seconds: float) -> None:
        # Timers of the loop are of whole milliseconds, a thread's sleep is not.
        self._loop.run_until_complete(self._loop.run_in_executor(None, time.sleep, seconds))

    def flush(self, timeout_s: float) -> None:
        if self._open_records:
            rest, self._open_records = self._open_records, 0
            self._run(self._send(self._batch(self._last_size_bytes, rest), ()))
        self._run(asyncio.wait_for(self._all_acknowledged(), timeout_s))

    def open_reader(self) -> None:
        raise NotImplementedError("the floor has no reader")

    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        raise NotImplementedError("the floor has no reader")

    def close(self) -> None:
        self._run(self._close())
        self._loop.close()

    async def _close(self) -> None:
        self._call.cancel()
        self._listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener
        await self._channel.close()
