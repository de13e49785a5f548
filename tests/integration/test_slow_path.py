"""Sender and reader behind a path on which a batch takes longer than any patience they begin with; brokers are real ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.consumer import Consumer, RangeReader
from seriatim.producer import Producer
from seriatim.protocol import rpc
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.seriatim_pb2 import CreateQueueRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BYTES_PER_S = 350_000
"""A batch of 512 KiB takes one and a half seconds."""
BATCH_BYTES = 512 * 1024
RECORDS, RECORD_BYTES = 100, 10_000
_BUFFER_BYTES = 256 * 1024


class SlowPath:
    """Between this process and members: all that is said in one direction, whoever says it, shares one rate."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self._addresses: dict[str, str] = {}
        self._turns = (threading.Lock(), threading.Lock())

    def beyond(self, address: str) -> str:
        """The address here of what is there."""
        if address not in self._addresses:
            listening = self._opened.enter_context(socket.socket())
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            threading.Thread(target=self._accept, args=(listening, address), daemon=True).start()
            self._addresses[address] = f"127.0.0.1:{listening.getsockname()[1]}"
        return self._addresses[address]

    def _accept(self, listening: socket.socket, address: str) -> None:
        host, port = address.rsplit(":", 1)
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            while True:
                near = opened.enter_context(listening.accept()[0])
                far = opened.enter_context(socket.socket())
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                far.connect((host, int(port)))
                for turn, source, target in zip(self._turns, (near, far), (far, near), strict=True):
                    threading.Thread(target=self._carry, args=(turn, source, target), daemon=True).start()

    def _carry(self, turn: threading.Lock, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                with turn:
                    time.sleep(len(data) / BYTES_PER_S)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._opened.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    directory: Path = tmp_path_factory.mktemp("cluster")
    with DevelopmentCluster(ClusterSettings(directory, groups=2, start_timeout_s=90)) as started:
        yield started


@pytest.fixture
def slow_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPath]:
    path, channel = SlowPath(), rpc.channel

    def behind(address: str, *, has_batches: bool = False) -> Any:
        return channel(path.beyond(address) if has_batches else address, has_batches=has_batches)

    monkeypatch.setattr(rpc, "channel", behind)
    yield path
    path.close()


def create(cluster: DevelopmentCluster, queue: str) -> None:
    async def call() -> None:
        coordinators = Coordinators(cluster.coordinators)
        await coordinators.call("CreateQueue", CreateQueueRequest(queue=queue), 30)
        await coordinators.close()

    asyncio.run(call())


def send(cluster: DevelopmentCluster, queue: str, within_s: float) -> list[int]:
    """Offsets."""
    with Producer(cluster.coordinators, queue, "p", batch_bytes=BATCH_BYTES) as producer:
        producer.wait_until_elected(30)
        handles = [producer.send(number.to_bytes(4) * (RECORD_BYTES // 4)) for number in range(RECORDS)]
        try:
            producer.flush(within_s)
        finally:
            producer.abort()
    return [handle.result(0).offset for handle in handles]


def read(cluster: DevelopmentCluster, queue: str, within_s: float) -> list[int]:
    found: list[int] = []
    deadline_s = time.monotonic() + within_s
    with Consumer(cluster.coordinators, queue, "s", start="earliest") as consumer:
        while len(found) < RECORDS and time.monotonic() < deadline_s:
            found += [int.from_bytes(record.value[:4]) for record in consumer.poll(RECORDS, 1)]
    return found


@pytest.mark.usefixtures("slow_path")
def test_what_takes_longer_than_the_first_patience_arrives_all_the_same(
    cluster: DevelopmentCluster, caplog: pytest.LogCaptureFixture
) -> None:
    create(cluster, "slow")
    assert send(cluster, "slow", 120) == list(range(RECORDS))
    assert read(cluster, "slow", 120) == list(range(RECORDS))
    caplog.set_level("INFO", "seriatim")
    with RangeReader(cluster.coordinators, "slow", timeout_s=60) as reader:
        for is_known in (False, True):
            caplog.clear()
            assert [record.offset for record in reader.read(0, RECORDS // 2)] == list(range(RECORDS // 2))
            assert ("fetch failed" in caplog.text) is not is_known, "what a path is like is learnt once"
