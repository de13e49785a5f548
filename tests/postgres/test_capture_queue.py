"""Captures over a real cluster: taken over under writes and with a broker killed, the queue holds the log once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, islice

import psycopg
import pytest
from kazoo.client import KazooClient

from seriatim import Consumer, Producer
from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.producer.sources.postgres.core.identity import LSN_SHIFT, NUMBER_BITS, parse_lsn
from seriatim.producer.sources.postgres.producing import CaptureSender
from seriatim.protocol.nodes import Paths
from seriatim.protocol.seriatim_pb2 import (
    AlterQueueRequest,
    CreateQueueRequest,
    DescribeClusterRequest,
    QueueRequest,
    QueueSettings,
)
from tests.clusters import ask, sound_cluster
from tests.postgres.test_capture import Queue, Run, one, replayed, sql, table_rows, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(900)]
SESSION_S = 10
"""Longer than a busy machine stands still: who is elected stays so."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    settings = ClusterSettings(
        tmp_path_factory.mktemp("cluster"),
        groups=2,
        environment={"SERIATIM_SESSION_TIMEOUT_MS": str(SESSION_S * 1000)},
    )
    with sound_cluster(settings) as started:
        yield started


def test_captures_that_take_over_from_each_other_leave_the_log_in_the_queue_once(
    cluster: DevelopmentCluster, new_database: Callable[[], str]
) -> None:
    ask(cluster, "CreateQueue", CreateQueueRequest(queue="log"))
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a SELECT g, 0 FROM generate_series(1, 500) g")
    ended = threading.Event()

    def write() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            place = 500
            while not ended.is_set():
                place += 1
                connection.execute("INSERT INTO a VALUES (%s, 1)", (place,))
                connection.execute("UPDATE a SET n = n + 1 WHERE id BETWEEN %s AND %s", (place - 20, place))
                ended.wait(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    killed = ""
    try:
        for term in range(3):
            producer = Producer(
                cluster.coordinators, "log", f"capture-{term}", max_block_s=0.5, session_timeout_s=SESSION_S
            )
            sender = CaptureSender(producer)
            run = Run(dsn, sender)
            try:
                wait_for(lambda sender=sender: sender.sent > 2000, run)
                if term == 1:
                    link = ask(cluster, "DescribeQueue", QueueRequest(queue="log")).links[-1]
                    killed = f"{link.master.group}-{link.master.member}"
                    cluster.kill(killed)
                    sent = sender.sent
                    wait_for(lambda sender=sender, sent=sent: sender.sent > sent + 2000, run)
                if term == 2:
                    ended.set()
                    writer.join()
                    sql(dsn, "INSERT INTO a VALUES (-1, 0)")
                    wait_until_confirmed(dsn, run)
            finally:
                producer.abort()  # as a kill does: what is in flight may be stored or not
                run.end()
    finally:
        ended.set()
        writer.join()
    if killed:
        cluster.restart(killed, timeout_s=120)
    queue, epochs = read(cluster, "log")
    assert replayed(queue) == table_rows(dsn, "a")
    assert len(queue.marks) == 1  # so no snapshot was taken anew
    assert len(epochs) > 1  # the kill was met


def test_a_capture_goes_on_when_its_whole_group_restarts_and_one_answer_ends_the_link(
    cluster: DevelopmentCluster, new_database: Callable[[], str]
) -> None:
    """What was acknowledged last isn't known to be on two disks then, and PostgreSQL has let go of it."""
    settings = QueueSettings(durability="sync", groups=["g1"])
    ask(cluster, "CreateQueue", CreateQueueRequest(queue="restarted", settings=settings))
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a SELECT g, 0 FROM generate_series(1, 20) g")
    down: list[str] = []
    # A master that is slow ends no link here: the one that the kill ends is looked at.
    first = Producer(
        cluster.coordinators,
        "restarted",
        "capture-1",
        max_block_s=0.5,
        session_timeout_s=SESSION_S,
        acknowledgement_deadline_s=60,
    )
    sender = CaptureSender(first)
    # So long that no heartbeat comes between the one that is confirmed and the kill.
    run = Run(dsn, sender, heartbeat_s=8)
    try:
        wait_for(lambda: sender.unacknowledged == 0 and sender.sent > 20, run)
        places = count(21)
        epoch = 0
        while epoch != (last := _last_epoch(cluster, "restarted")):  # all of it in the link that ends with the kill
            epoch = last
            sql(dsn, *(f"INSERT INTO a VALUES ({place}, 1)" for place in islice(places, 20)))
            # Until a heartbeat is confirmed: the batch that ends a transaction may have begun inside it, and a slot that
            # is confirmed to its commit only isn't beyond what both disks are known to have.
            wait_until_confirmed(dsn, run)
            wait_for(lambda: sender.unacknowledged == 0, run)
        down += kill_at_once(cluster, "g1-a", "g1-b")
        sql(dsn, f"INSERT INTO a VALUES ({next(places)}, 1)")
        wait_for(lambda: sender.unacknowledged, run)
    finally:
        first.abort()  # as a kill does
        run.end()
    second = Producer(cluster.coordinators, "restarted", "capture-2", max_block_s=0.5, session_timeout_s=SESSION_S)
    sender = CaptureSender(second)
    run = Run(dsn, sender)
    try:
        cluster.restart(down.pop(), timeout_s=120)
        wait_for(lambda: _has_end(cluster, "restarted", epoch), run)
        cluster.restart(down.pop(), timeout_s=120)
        elected = second.wait_until_elected(60)
        assert elected.resume_point is not None
        (source,) = elected.held
        assert elected.resume_point.get(source, 0) < elected.held[source]  # the schedule was met
        assert elected.resume_point.get(source, 0) >> NUMBER_BITS < _confirmed(dsn) >> LSN_SHIFT
        sql(dsn, "INSERT INTO a VALUES (-1, 0)")
        wait_until_confirmed(dsn, run)
    finally:
        run.end()  # before its producer, which it would miss
        second.abort()
        for name in down:
            cluster.restart(name, timeout_s=120)
    assert run.error is None
    queue, epochs = read(cluster, "restarted")
    assert replayed(queue) == table_rows(dsn, "a")
    assert len(queue.marks) == 1
    assert min(epochs) <= epoch < max(epochs)  # the restart was met


def test_a_row_over_the_queues_limit_goes_on_once_it_is_raised_and_the_queue_rotated(
    cluster: DevelopmentCluster, new_database: Callable[[], str]
) -> None:
    ask(cluster, "CreateQueue", CreateQueueRequest(queue="small", settings=QueueSettings(max_record_bytes=2000)))
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY, t text)", "INSERT INTO a VALUES (1, repeat('x', 5000))")
    reasons: list[str] = []
    with Producer(cluster.coordinators, "small", "capture", max_block_s=0.5, session_timeout_s=SESSION_S) as producer:
        run = Run(dsn, CaptureSender(producer), on_waiting=reasons.append)
        try:
            wait_for(lambda: reasons, run)
            assert "table public.a: a record of 5" in reasons[0]
            settings = QueueSettings(max_record_bytes=10_000)
            ask(cluster, "AlterQueue", AlterQueueRequest(queue="small", settings=settings))
            ask(cluster, "RotateQueue", QueueRequest(queue="small"))
            sql(dsn, "INSERT INTO a VALUES (-1, '')")
            wait_until_confirmed(dsn, run)
        finally:
            run.end()
    queue, _ = read(cluster, "small")
    assert replayed(queue) == table_rows(dsn, "a")
    assert len(queue.marks) == 1


def kill_at_once(cluster: DevelopmentCluster, *names: str) -> tuple[str, ...]:
    """None of them answers anybody any more when the first one dies."""
    for name in names:
        cluster.supervisor.kill(name, signal.SIGSTOP)
    for name in names:
        cluster.kill(name)
    return names


def _last_epoch(cluster: DevelopmentCluster, queue: str) -> int:
    return int(ask(cluster, "DescribeQueue", QueueRequest(queue=queue)).links[-1].epoch)


def _has_end(cluster: DevelopmentCluster, queue: str, epoch: int) -> bool:
    return any(
        link.epoch == epoch and link.has_end for link in ask(cluster, "DescribeQueue", QueueRequest(queue=queue)).links
    )


def _confirmed(dsn: str) -> int:
    """Where the slot is confirmed to."""
    return parse_lsn(str(one(dsn, "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'cap'")))


def wait_until_confirmed(dsn: str, run: Run) -> None:
    """Until the slot is confirmed, by a heartbeat, to the end of all that is committed now: so the queue holds all of it."""
    end = parse_lsn(str(one(dsn, "SELECT pg_current_wal_flush_lsn()")))
    wait_for(lambda: _confirmed(dsn) >= end, run)


def read(cluster: DevelopmentCluster, name: str) -> tuple[Queue, set[int]]:
    """The queue up to the row with id -1, and the epochs its records are in."""
    queue = Queue()
    epochs = set()
    deadline_s = time.monotonic() + 120
    with Consumer(cluster.coordinators, name, auto_commit_ms=50, session_timeout_s=2 * SESSION_S) as consumer:
        while not any(b'"after":{"id":-1,' in value for *_, value in queue.records):
            assert time.monotonic() < deadline_s, "the row with id -1 never came"
            for record in consumer.poll(1000, 5.0):
                assert record.seq > queue.marks.get(record.source, 0)
                queue.marks[record.source] = record.seq
                epochs.add(record.epoch)
                queue.records.append((record.source, record.seq, record.key, record.value))
    return queue, epochs


def test_standing_again_brings_a_new_token_and_lets_another_go_first(cluster: DevelopmentCluster) -> None:
    ask(cluster, "CreateQueue", CreateQueueRequest(queue="again"))
    with Producer(cluster.coordinators, "again", "one", session_timeout_s=SESSION_S) as one_producer:
        first = one_producer.wait_until_elected(60)
        one_producer.send(b"v", seq=5, source="s").result(60)
        one_producer.stand_again()
        second = one_producer.wait_until_elected(60)
        assert second.token > first.token
        assert second.resume_point == {"s": 5}
        with Producer(cluster.coordinators, "again", "other", session_timeout_s=SESSION_S) as other:
            wait_for(lambda: _candidates(cluster) == 2)
            one_producer.stand_again()
            assert other.wait_until_elected(60).token > second.token
            assert not one_producer.is_elected


def _candidates(cluster: DevelopmentCluster) -> int:
    """How many stand for election as sender of the queue `again`."""
    view = ask(cluster, "DescribeQueue", QueueRequest(queue="again"))
    described = ask(cluster, "DescribeCluster", DescribeClusterRequest())
    client = KazooClient(described.zookeeper)
    client.start(timeout=60)
    try:
        return len(client.get_children(Paths(described.cluster).senders(view.queue_id)))
    finally:
        client.stop()
        client.close()
