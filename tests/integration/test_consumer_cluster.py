"""The consumer against real coordinators and brokers: kills on every side of it, with one sequence to be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim import Consumer, Producer, RangeReader, Subscriber
from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.protocol.record import Record
from seriatim.protocol.seriatim_pb2 import CreateQueueRequest, QueueRequest, QueueView
from tests.clusters import ask, sound_cluster
from tests.faults.trial import wait_until_whole
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SESSION_S = 20
"""Longer than the machine stands still: nobody leaves, and is handed again what he had, but where a test wants it."""
WAITED_OUT_MS = 8000
"""The same, of a reader whose session is waited out."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    environment = {"SERIATIM_SESSION_TIMEOUT_MS": str(SESSION_S * 1000)}
    settings = ClusterSettings(tmp_path_factory.mktemp("cluster"), groups=2, environment=environment)
    with sound_cluster(settings) as started:
        yield started


def describe(cluster: DevelopmentCluster, queue: str) -> QueueView:
    return ask(cluster, "DescribeQueue", QueueRequest(queue=queue))


def send(
    cluster: DevelopmentCluster,
    queue: str,
    first: int,
    count: int,
    pause_s: float = 0.0,
    half_time: threading.Event | None = None,
) -> None:
    """Send numbers; the second half of them not before `half_time`."""
    patient = {"session_timeout_s": SESSION_S, "acknowledgement_deadline_s": 5}
    with Producer(cluster.coordinators, queue, f"from-{first}", **patient) as producer:
        for number in range(first, first + count):
            if half_time is not None and number == first + count // 2:
                assert half_time.wait(100)
            producer.send(b"%d" % number)
            if pause_s and number % 100 == 0:
                producer.flush(60)
                time.sleep(pause_s)
        producer.flush(60)


def lag(cluster: DevelopmentCluster, queue: str, subscription: str) -> int | None:
    for one in describe(cluster, queue).subscriptions:
        if one.subscription == subscription and one.has_lag:
            return one.lag_records
    return None


@pytest.mark.parametrize("side", ["master", "slave"])
def test_a_member_killed_while_it_is_read_from(cluster: DevelopmentCluster, side: str) -> None:
    queue = f"member-{side}"
    ask(cluster, "CreateQueue", CreateQueueRequest(queue=queue))
    is_killed = threading.Event()  # after which there is still something to send: else nobody would miss the member
    sending = threading.Thread(target=send, args=(cluster, queue, 0, 5000, 0.02, is_killed))
    found = []
    with Consumer(cluster.coordinators, queue, auto_commit_ms=50, session_timeout_s=SESSION_S) as consumer:
        sending.start()
        killed = ""
        while len(found) < 5000:
            found += consumer.poll(500, 60.0)
            if not killed and len(found) > 1000:
                link = getattr(describe(cluster, queue).links[-1], side)
                killed = f"{link.group}-{link.member}"
                cluster.kill(killed)
                is_killed.set()
        sending.join()
        consumer.commit()
    cluster.restart(killed)
    assert [int(record.value) for record in found] == list(range(5000))
    offsets = [record.offset for record in found]
    assert offsets == sorted(set(offsets))
    assert len({record.epoch for record in found}) >= 2, "the fault changed nothing"
    wait_until(lambda: lag(cluster, queue, "default") == 0)
    with RangeReader(cluster.coordinators, queue) as reader:
        positions = reader.positions()
        again = list(reader.read(positions.earliest, positions.end))
    assert again == found
    # Both groups have to be there again for the tests that follow.
    wait_until(lambda: all(m.is_in_sync for g in describe(cluster, queue).groups for m in g.members), 60)


def test_a_coordinator_killed_under_the_reader(cluster: DevelopmentCluster) -> None:
    wait_until_whole(cluster)  # a planned switch needs the other group, in which the test before may have killed
    ask(cluster, "CreateQueue", CreateQueueRequest(queue="coordinators"))
    send(cluster, "coordinators", 0, 100)
    with Consumer(cluster.coordinators, "coordinators", session_timeout_s=SESSION_S) as consumer:
        first: list[Record] = []
        while len(first) < 50:  # a poll returns what is there, which may be the first of several batches
            first += consumer.poll(50 - len(first), 10.0)
        assert [int(record.value) for record in first] == list(range(50))
        cluster.kill("coordinator-1")
        try:
            send(cluster, "coordinators", 100, 100)
            # Else a busy machine's deadline has switched already.
            if describe(cluster, "coordinators").links[-1].epoch == first[0].epoch:
                ask(cluster, "RotateQueue", QueueRequest(queue="coordinators"))
            send(cluster, "coordinators", 200, 100)
            found = []
            while len(found) < 250:
                found += consumer.poll(1000, 60.0)
            assert [int(record.value) for record in found] == list(range(50, 300))
            assert len({record.epoch for record in (*first, *found)}) >= 2, "nothing was switched"
            consumer.commit()
        finally:
            cluster.restart("coordinator-1")


def start_reader(cluster: DevelopmentCluster, queue: str, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "seriatim.cli.main", "consume", "--queue", queue]
    command += ["--coordinator", cluster.coordinators, "--session-timeout-ms", str(WAITED_OUT_MS)]
    with output.open("wb") as to:
        return subprocess.Popen(command, stdout=to, stderr=subprocess.DEVNULL)


def numbers(output: Path) -> list[int]:
    return [int(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_takes_over_from_a_reader_killed_or_paused(
    cluster: DevelopmentCluster, tmp_path: Path, harm: signal.Signals
) -> None:
    queue = f"readers-{harm.name.lower()}"
    ask(cluster, "CreateQueue", CreateQueueRequest(queue=queue))
    send(cluster, queue, 0, 1000)
    first, second = tmp_path / "first", tmp_path / "second"
    readers = [start_reader(cluster, queue, first)]
    try:
        wait_until(lambda: len(numbers(first)) == 1000)
        readers.append(start_reader(cluster, queue, second))
        wait_until(lambda: lag(cluster, queue, "default") == 0)
        os.kill(readers[0].pid, harm)
        send(cluster, queue, 1000, 500)
        wait_until(lambda: len(numbers(second)) == 500)
        if harm is signal.SIGSTOP:
            # By its own clock it must not hand out what it may have fetched ahead (H8).
            os.kill(readers[0].pid, signal.SIGCONT)
            send(cluster, queue, 1500, 100)
            wait_until(lambda: len(numbers(second)) == 600)
            time.sleep(1.0)
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    assert numbers(first) == list(range(1000))
    assert numbers(second) == list(range(1000, 1600 if harm is signal.SIGSTOP else 1500))


def test_a_subscriber_commits_across_links(cluster: DevelopmentCluster) -> None:
    wait_until_whole(cluster)  # for the planned switch
    ask(cluster, "CreateQueue", CreateQueueRequest(queue="offsets"))
    send(cluster, "offsets", 0, 100)
    ask(cluster, "RotateQueue", QueueRequest(queue="offsets"))
    send(cluster, "offsets", 100, 100)
    with Subscriber(cluster.coordinators, "offsets", "replay", session_timeout_s=SESSION_S) as subscriber:
        assert subscriber.wait_elected(60).cursor_offset == 0
        subscriber.commit(30)
        subscriber.commit(150)
        wait_until(lambda: lag(cluster, "offsets", "replay") == 50)  # unknown where a member doesn't answer at once
    with Consumer(cluster.coordinators, "offsets", "replay", session_timeout_s=SESSION_S) as consumer:
        assert consumer.poll(1, 60.0)[0].offset == 150
        consumer.seek(20)
        assert consumer.poll(1, 60.0)[0].offset == 20
        consumer.seek("latest")
        send(cluster, "offsets", 200, 1)
        assert consumer.poll(1, 60.0)[0].offset == 200
