"""Sender and reader behind a path on which a batch takes longer than any patience they begin with; brokers are real ones."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.consumer import Consumer, RangeReader
from seriatim.consumer.core.reading import SILENCE_S
from seriatim.producer import Producer
from seriatim.protocol import direct, rpc
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.seriatim_pb2 import CreateQueueRequest
from tests.clusters import sound_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BYTES_PER_S = 350_000
"""A batch of 512 KiB takes one and a half seconds."""
BATCH_BYTES = 512 * 1024
RECORDS, RECORD_BYTES = 100, 10_000
_BUFFER_BYTES = 256 * 1024
_LATE_S = 0.1
SESSION_S = 20
"""Longer than a busy machine stands still: whoever has a session keeps it."""
_SILENCE = re.compile(r"it said nothing for ([0-9.]+) s")


class Direction:
    """One rate for all who wait; a wait that a busy machine ends late doesn't make the path slower, but for the last one."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._free_at_s = 0.0

    def wait_for(self, size_bytes: int) -> None:
        with self._turn:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - _LATE_S) + size_bytes / BYTES_PER_S
            time.sleep(max(0.0, self._free_at_s - now_s))


class SlowPath:
    """Between this process and members: all that is said in one direction, whoever says it, shares one rate."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self._addresses: dict[str, str] = {}
        self._directions = (Direction(), Direction())

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
                for direction, source, target in zip(self._directions, (near, far), (far, near), strict=True):
                    threading.Thread(target=self._carry, args=(direction, source, target), daemon=True).start()

    def _carry(self, direction: Direction, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                direction.wait_for(len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._opened.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    directory: Path = tmp_path_factory.mktemp("cluster")
    environment = {"SERIATIM_SESSION_TIMEOUT_MS": str(SESSION_S * 1000)}
    with sound_cluster(ClusterSettings(directory, groups=2, environment=environment, start_timeout_s=90)) as started:
        yield started


@pytest.fixture(params=["grpc", "direct"])
def slow_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPath]:
    """Sending by gRPC, as from outside of the cluster's network, or direct."""
    path, channel, opened = SlowPath(), rpc.channel, direct.opened

    def behind(address: str, *, has_batches: bool = False) -> Any:
        return channel(path.beyond(address) if has_batches else address, has_batches=has_batches)

    async def opened_behind(address: str, *how: Any) -> direct.DirectStream | None:
        return await opened(path.beyond(address), *how) if request.param == "direct" else None

    monkeypatch.setattr(rpc, "channel", behind)
    monkeypatch.setattr(direct, "opened", opened_behind)
    yield path
    path.close()


def create(cluster: DevelopmentCluster, queue: str) -> None:
    async def call() -> None:
        coordinators = Coordinators(cluster.coordinators)
        await coordinators.call("CreateQueue", CreateQueueRequest(queue=queue), 60)
        await coordinators.close()

    asyncio.run(call())


def send(cluster: DevelopmentCluster, queue: str, within_s: float) -> list[int | None]:
    """Offsets; None for what a link held already when it was sealed, unanswered."""
    with Producer(cluster.coordinators, queue, "p", batch_bytes=BATCH_BYTES, session_timeout_s=SESSION_S) as producer:
        producer.wait_until_elected(60)
        handles = [producer.send(number.to_bytes(4) * (RECORD_BYTES // 4)) for number in range(RECORDS)]
        try:
            producer.flush(within_s)
        finally:
            producer.abort()
    return [handle.result(0).offset for handle in handles]


def read(cluster: DevelopmentCluster, queue: str, within_s: float) -> list[int]:
    found: list[int] = []
    deadline_s = time.monotonic() + within_s
    with Consumer(cluster.coordinators, queue, "s", start="earliest", session_timeout_s=SESSION_S) as consumer:
        while len(found) < RECORDS and time.monotonic() < deadline_s:
            found += [int.from_bytes(record.value[:4]) for record in consumer.poll(RECORDS, 1)]
    return found


def silences_at(reader: RangeReader, caplog: pytest.LogCaptureFixture) -> list[float]:
    """How long members were waited for that were left then, while the first batch was read."""
    caplog.clear()
    assert [record.offset for record in reader.read(0, RECORDS // 2)] == list(range(RECORDS // 2))
    return [float(silence_s) for silence_s in _SILENCE.findall(caplog.text)]


@pytest.mark.usefixtures("slow_path")
def test_what_takes_longer_than_the_first_patience_arrives_all_the_same(
    cluster: DevelopmentCluster, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    queue = f"slow-{request.node.callspec.id}"
    create(cluster, queue)
    offsets = send(cluster, queue, 120)
    assert all(offset in {None, number} for number, offset in enumerate(offsets))
    assert read(cluster, queue, 120) == list(range(RECORDS))
    caplog.set_level("INFO", "seriatim")
    with RangeReader(cluster.coordinators, queue, timeout_s=60) as reader:
        silences_s = [silences_at(reader, caplog)]
        assert min(silences_s[0]) < 1, "the usual patience, on a path that isn't known"
        # What is seen of it in one read is little where the first word stood behind what earlier tries had asked for.
        while (known_s := reader._patience.limit_s(SILENCE_S)) <= SILENCE_S and len(silences_s) < 10:
            silences_s.append(silences_at(reader, caplog))
        assert known_s > SILENCE_S, "nothing is learnt of the path"
        again_s = silences_at(reader, caplog)
    assert all(silence_s > known_s - 0.001 for silence_s in again_s[:1]), (
        "what is known isn't learnt anew by the next read"
    )
