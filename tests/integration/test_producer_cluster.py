"""The producer against real coordinators and brokers, with a kill under load; and the command on top of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.producer import Producer, loop
from seriatim.protocol import rpc
from seriatim.protocol.seriatim_pb2 import (
    CreateQueueRequest,
    DescribeClusterRequest,
    QueueRequest,
    QueueSettings,
    QueueView,
)
from tests.clusters import ask, sound_cluster
from tests.faults.disks import Disk, Trouble, compile_library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SESSION_S = 20
PATIENT = {"acknowledgement_deadline_s": 5, "session_timeout_s": SESSION_S}
"""A producer that gives neither its session nor a link up because the machine stands still for a moment."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    environment = {"SERIATIM_SESSION_TIMEOUT_MS": str(SESSION_S * 1000)}
    settings = ClusterSettings(
        tmp_path_factory.mktemp("cluster"), groups=2, environment=environment, start_timeout_s=90
    )
    with sound_cluster(settings) as started:
        yield started


def create(cluster: DevelopmentCluster, queue: str) -> None:
    ask(cluster, "CreateQueue", CreateQueueRequest(queue=queue, settings=QueueSettings(durability="sync")))


def described(cluster: DevelopmentCluster, queue: str) -> QueueView:
    return ask(cluster, "DescribeQueue", QueueRequest(queue=queue))


def test_a_killed_master_costs_no_record_and_no_order(cluster: DevelopmentCluster) -> None:
    create(cluster, "killed")
    with Producer(cluster.coordinators, "killed", "p", **PATIENT) as producer:
        handles = [producer.send(b"%d" % number) for number in range(5000)]
        handles[-1].result(60)
        link = described(cluster, "killed").links[-1]  # the first, but where the machine stood still for long
        master = f"{link.master.group}-{link.master.member}"
        for number in range(5000, 15_000):
            handles.append(producer.send(b"%d" % number))
            if number == 9000:
                cluster.kill(master)
        producer.flush(60)
        ends = [handle.result(0) for handle in handles]
    cluster.restart(master)
    epochs = [end.epoch for end in ends if end.epoch is not None]
    assert epochs == sorted(epochs)
    assert epochs[-1] > link.epoch, "the kill was met"
    assert [end.seq for end in ends] == list(range(1 << 40, (1 << 40) + 15_000))
    places = [(end.epoch, end.index) for end in ends if end.epoch is not None]
    assert places == sorted(set(places))


def test_a_coordinator_that_says_nothing_any_more_delays_a_switch_by_a_moment_only(
    cluster: DevelopmentCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open: nobody waits for the deadline of a call to it, here a minute."""
    monkeypatch.setattr(loop, "ACQUIRE_TIMEOUT_S", 60.0)
    without_keepalive = [option for option in vars(rpc)["_CHANNEL_OPTIONS"] if "keepalive" not in option[0]]
    monkeypatch.setattr(rpc, "_CHANNEL_OPTIONS", without_keepalive)
    create(cluster, "silent")
    with Producer(cluster.coordinators, "silent", "p", **PATIENT) as producer:
        epoch = producer.send(b"0").result(60).epoch
        wait_for_another_group(cluster, "silent")
        used = producer._loop._coordinators._addresses[0]
        (name,) = [one for one in cluster.coordinator_names if cluster.address(one) == used]
        link = described(cluster, "silent").links[-1]
        assert link.epoch == epoch
        master = f"{link.master.group}-{link.master.member}"
        cluster.supervisor.kill(name, signal.SIGSTOP)
        try:
            cluster.kill(master)
            begun_s = time.monotonic()
            assert producer.send(b"1").result(60).epoch == epoch + 1
            assert time.monotonic() - begun_s < 40
        finally:
            cluster.supervisor.kill(name, signal.SIGCONT)
        assert producer._loop._coordinators._addresses[0] != used
    cluster.restart(master)


def test_sending_goes_on_while_the_disks_of_both_members_stand_still(tmp_path: Path) -> None:
    """Neither can seal, and both had their sessions: the link was waited for as long as the disks hung."""
    shared, directory = tmp_path / "shared", tmp_path / "cluster"
    directory.mkdir()
    for name in ("g1-a", "g1-b"):
        (shared / name).mkdir(parents=True)
        (directory / name).symlink_to(shared / name)
    disk = Disk(shared, tmp_path / "control", compile_library(tmp_path))
    environment = {"SERIATIM_SESSION_TIMEOUT_MS": "6000", **disk.environment}
    with sound_cluster(ClusterSettings(directory, groups=2, environment=environment, start_timeout_s=90)) as cluster:
        create(cluster, "hung")
        with Producer(cluster.coordinators, "hung", "p", **PATIENT) as producer:
            handles = [producer.send(b"0")]
            handles[0].result(60)
            if described(cluster, "hung").links[-1].group != "g1":
                wait_for_another_group(cluster, "hung")
                ask(cluster, "RotateQueue", QueueRequest(queue="hung"))
                handles.append(producer.send(b"1"))
                handles[-1].result(60)
            epoch = described(cluster, "hung").links[-1].epoch
            disk.trouble(Trouble.STILL_FLUSH)
            handles += [producer.send(b"%d" % number) for number in range(2, 50)]
            assert handles[-1].result(60).epoch == epoch + 1
            assert [link.state for link in described(cluster, "hung").links if link.epoch == epoch] == ["lost"]
            disk.mend()
            wait_for_another_group(cluster, "hung")
        links = described(cluster, "hung").links
        ends = [handle.result(0) for handle in handles]
    assert all(link.state == "sealed" for link in links if link.epoch <= epoch)
    assert [end.epoch for end in ends] == sorted(end.epoch for end in ends)


def wait_for_another_group(cluster: DevelopmentCluster, queue: str) -> None:
    """Until sending could go on with another group."""
    until = time.monotonic() + 60
    while not described(cluster, queue).switches_left:
        assert time.monotonic() < until, "no other group came back"
        time.sleep(0.05)


@contextlib.contextmanager
def running_produce(cluster: DevelopmentCluster, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "SERIATIM_COORDINATOR": cluster.coordinators}
    with subprocess.Popen(
        [sys.executable, "-m", "seriatim.cli.main", "produce", "--session-timeout-ms", str(int(SESSION_S * 1000)), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE,
    ) as running:  # fmt: skip
        try:
            yield running
        finally:
            running.kill()


def produce(cluster: DevelopmentCluster, *arguments: str) -> tuple[int, bytes, bytes]:
    """Exit code, standard output and standard error of a whole run."""
    with running_produce(cluster, *arguments) as running:
        output, problems = running.communicate(b"line\n", timeout=100)
        return running.returncode, output, problems


def wait_for_lines(log: Path, count: int) -> None:
    until = time.monotonic() + 60
    while not log.exists() or log.read_text().count("\n") < count:
        assert time.monotonic() < until, f"{log} never had {count} lines"
        time.sleep(0.01)


def test_lines_of_a_file_become_records_with_a_log_of_their_places(cluster: DevelopmentCluster, tmp_path: Path) -> None:
    create(cluster, "lines")
    lines, log = tmp_path / "lines", tmp_path / "log"
    lines.write_text("".join(f"{number}\tvalue {number}\n" for number in range(1000)))
    arguments = ("--queue", "lines", "--name", "n", "--with-seq", "--ack-log", str(log), "--json", str(lines))
    _, output, problems = produce(cluster, *arguments)
    summary = json.loads(output)
    assert (summary["read"], summary["acknowledged"], summary["unknown"]) == (1000, 1000, 0), problems
    rows = [line.split() for line in log.read_text().splitlines()]
    assert [row[0] for row in rows] == [str(number) for number in range(1000)]
    # One link; a second one, and perhaps no place, where the disk stands still for longer than the command's patience.
    links = described(cluster, "lines").links
    for number, row in enumerate(rows):
        link = next(link for link in reversed(links) if link.base <= number)
        place = [str(link.epoch), str(number - link.base), str(number)]
        assert row[1:] == place or (len(links) > 1 and row[1:] == ["-", "-", "-"])
    _, output, problems = produce(cluster, *arguments)
    assert json.loads(output)["stored_before"] == 1000, problems


def test_a_stopped_command_flushes_what_it_read(cluster: DevelopmentCluster, tmp_path: Path) -> None:
    create(cluster, "stopped")
    log = tmp_path / "log"
    with running_produce(cluster, "--queue", "stopped", "--ack-log", str(log), "--json") as running:
        assert running.stdin is not None
        assert running.stderr is not None
        running.stdin.write(b"one\ntwo\n")
        running.stdin.flush()
        wait_for_lines(log, 2)
        running.send_signal(signal.SIGTERM)
        output, problems = running.communicate(timeout=100)
    assert running.returncode == 0, problems
    assert b"elected with token 1" in problems
    assert json.loads(output)["acknowledged"] == 2


def test_a_deposed_command_with_seqs_goes_on_from_the_resume_point(cluster: DevelopmentCluster, tmp_path: Path) -> None:
    create(cluster, "deposed")
    log = tmp_path / "log"
    client = KazooClient(cluster.zookeeper)
    client.start(timeout=60)
    with running_produce(cluster, "--queue", "deposed", "--name", "n", "--with-seq", "--ack-log", str(log)) as running:
        assert running.stdin is not None
        for start in range(0, 20_000, 1000):
            if start in (3000, 9000):
                wait_for_lines(log, start)
            running.stdin.write(b"".join(b"%d\tvalue\n" % seq for seq in range(start, start + 1000)))
            running.stdin.flush()
            if start in (3000, 9000):
                depose(client, cluster, "deposed")
        _, problems = running.communicate(timeout=100)
    client.stop()
    client.close()
    assert running.returncode == 0, problems
    assert b"elected with token 3" in problems
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [int(line[0]) for line in lines] == list(range(20_000))
    assert committed(cluster, "deposed") == 20_000, "a record was stored twice, or not at all"


def committed(cluster: DevelopmentCluster, queue: str) -> int:
    """How many records of all links are committed, once members have told: one that doesn't answer at once is left out."""
    until = time.monotonic() + 60
    while True:
        links = described(cluster, queue).links
        if all(link.has_committed for link in links):
            return sum(link.committed_index for link in links)
        assert time.monotonic() < until, "nobody tells what is committed"
        time.sleep(0.05)


def depose(client: KazooClient, cluster: DevelopmentCluster, queue: str) -> None:
    """Delete the elected sender's node, as an operator would, and wait until somebody is elected after it."""
    view = described(cluster, queue)
    root = ask(cluster, "DescribeCluster", DescribeClusterRequest()).root
    path = f"{root}/queues/{view.queue_id}/senders"
    (node,) = client.get_children(path)
    client.delete(f"{path}/{node}")
    until = time.monotonic() + 60
    while described(cluster, queue).sender_token == view.sender_token:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--queue", "none"), 2, b"none"),
        (("--queue", "lines", "--with-seq"), 2, b"--name"),
        (("--queue", "lines", "--coordinator", "127.0.0.1:1", "--connect-timeout", "1"), 3, b"127.0.0.1:1"),
        (("--queue", "lines", "--coordinator", "nowhere"), 2, b"HOST:PORT"),
        (("--queue", "lines", "no such file"), 2, b"no such file"),
    ],
)
def test_wrong_use_says_what_is_wrong(
    cluster: DevelopmentCluster, arguments: tuple[str, ...], code: int, message: bytes
) -> None:
    returned, _, problems = produce(cluster, *arguments)
    assert returned == code, problems
    assert message in problems
    assert b"Traceback" not in problems
