"""Captures over a real cluster: taken over under writes and with a broker killed, the queue holds the log once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from kazoo.client import KazooClient

from seriatim import Consumer, Producer
from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.producer.sources.postgres.core.identity import LSN_SHIFT, NUMBER_BITS, parse_lsn
from seriatim.producer.sources.postgres.producing import CaptureSender
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.seriatim_pb2 import CreateQueueRequest, DescribeClusterRequest, QueueRequest, QueueSettings
from seriatim.protocol.zookeeper import Paths
from tests.postgres.test_capture import Queue, Run, one, replayed, sql, table_rows, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    with DevelopmentCluster(ClusterSettings(tmp_path_factory.mktemp("cluster"), groups=2)) as started:
        yield started


def ask(cluster: DevelopmentCluster, method: str, request: object) -> Any:
    async def call() -> Any:
        coordinators = Coordinators(cluster.coordinators)
        try:
            return await coordinators.call(method, request, 10)
        finally:
            await coordinators.close()

    return asyncio.run(call())


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
            producer = Producer(cluster.coordinators, "log", f"capture-{term}", max_block_s=0.5, session_timeout_s=2)
            sender = CaptureSender(producer)
            run = Run(dsn, sender)
            try:
                wait_for(lambda sender=sender: sender.sent > 2000, run, 40)
                if term == 1:
                    link = ask(cluster, "DescribeQueue", QueueRequest(queue="log")).links[-1]
                    killed = f"{link.master.group}-{link.master.member}"
                    cluster.kill(killed)
                    sent = sender.sent
                    wait_for(lambda sender=sender, sent=sent: sender.sent > sent + 2000, run, 40)
                if term == 2:
                    ended.set()
                    writer.join()
                    sql(dsn, "INSERT INTO a VALUES (-1, 0)")
                    wait_for(lambda sender=sender: sender.unacknowledged == 0 and _is_confirmed(dsn), run, 40)
            finally:
                producer.abort()  # as a kill does: what is in flight may be stored or not
                run.end()
    finally:
        ended.set()
        writer.join()
    if killed:
        cluster.restart(killed)
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
    first = Producer(cluster.coordinators, "restarted", "capture-1", max_block_s=0.5, session_timeout_s=2)
    sender = CaptureSender(first)
    run = Run(dsn, sender)
    try:
        wait_for(lambda: sender.unacknowledged == 0 and sender.sent > 20, run, 40)
        for place in range(21, 41):
            sql(dsn, f"INSERT INTO a VALUES ({place}, 1)")
        # Until a heartbeat is confirmed: the batch that ends a transaction may have begun inside it, and a slot that is
        # confirmed to its commit only isn't beyond what both disks are known to have.
        committed = parse_lsn(str(one(dsn, "SELECT pg_current_wal_insert_lsn()")))
        wait_for(lambda: sender.unacknowledged == 0 and _confirmed(dsn) >= committed, run, 40)
        for name in ("g1-a", "g1-b"):
            cluster.kill(name)
            down.append(name)
        sql(dsn, "INSERT INTO a VALUES (41, 1)")
        wait_for(lambda: sender.unacknowledged, run, 40)
    finally:
        first.abort()  # as a kill does
        run.end()
    second = Producer(cluster.coordinators, "restarted", "capture-2", max_block_s=0.5, session_timeout_s=2)
    sender = CaptureSender(second)
    run = Run(dsn, sender)
    try:
        cluster.restart(down.pop())
        wait_for(lambda: _first_link(cluster, "restarted").has_end, run, 60)
        cluster.restart(down.pop())
        elected = second.wait_until_elected(60)
        assert elected.resume_point is not None
        (source,) = elected.held
        assert elected.resume_point.get(source, 0) < elected.held[source]  # the schedule was met
        assert elected.resume_point.get(source, 0) >> NUMBER_BITS < _confirmed(dsn) >> LSN_SHIFT
        sql(dsn, "INSERT INTO a VALUES (-1, 0)")
        wait_for(lambda: sender.sent > 0 and sender.unacknowledged == 0 and _is_confirmed(dsn), run, 40)
    finally:
        second.abort()
        run.end()
        for name in down:
            cluster.restart(name)
    assert run.error is None
    queue, epochs = read(cluster, "restarted")
    assert replayed(queue) == table_rows(dsn, "a")
    assert len(queue.marks) == 1
    assert len(epochs) == 2


def _first_link(cluster: DevelopmentCluster, queue: str) -> Any:
    return ask(cluster, "DescribeQueue", QueueRequest(queue=queue)).links[0]


def _confirmed(dsn: str) -> int:
    """Where the slot is confirmed to."""
    return parse_lsn(str(one(dsn, "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'cap'")))


def read(cluster: DevelopmentCluster, name: str) -> tuple[Queue, set[int]]:
    """The queue up to the row with id -1, and the epochs its records are in."""
    queue = Queue()
    epochs = set()
    with Consumer(cluster.coordinators, name, auto_commit_ms=50) as consumer:
        while not any(b'"after":{"id":-1,' in value for *_, value in queue.records):
            for record in consumer.poll(1000, 20.0):
                assert record.seq > queue.marks.get(record.source, 0)
                queue.marks[record.source] = record.seq
                epochs.add(record.epoch)
                queue.records.append((record.source, record.seq, record.key, record.value))
    return queue, epochs


def test_standing_again_brings_a_new_token_and_lets_another_go_first(cluster: DevelopmentCluster) -> None:
    ask(cluster, "CreateQueue", CreateQueueRequest(queue="again"))
    with Producer(cluster.coordinators, "again", "one") as one_producer:
        first = one_producer.wait_until_elected(20)
        one_producer.send(b"v", seq=5, source="s").result(20)
        one_producer.stand_again()
        wait_for(lambda: not one_producer.is_elected or one_producer.wait_until_elected(20).token != first.token)
        second = one_producer.wait_until_elected(20)
        assert second.token > first.token
        assert second.resume_point == {"s": 5}
        with Producer(cluster.coordinators, "again", "other") as other:
            wait_for(lambda: _candidates(cluster) == 2)
            one_producer.stand_again()
            assert other.wait_until_elected(20).token > second.token
            assert not one_producer.is_elected


def _candidates(cluster: DevelopmentCluster) -> int:
    """How many stand for election as sender of the queue `again`."""
    view = ask(cluster, "DescribeQueue", QueueRequest(queue="again"))
    described = ask(cluster, "DescribeCluster", DescribeClusterRequest())
    client = KazooClient(described.zookeeper)
    client.start(timeout=10)
    try:
        return len(client.get_children(Paths(described.cluster).senders(view.queue_id)))
    finally:
        client.stop()
        client.close()


def _is_confirmed(dsn: str) -> object:
    """Whether the slot is confirmed to the commit of the last transaction at least."""
    return one(
        dsn,
        "SELECT confirmed_flush_lsn >= pg_current_wal_insert_lsn() - 400 FROM pg_replication_slots"
        " WHERE slot_name = 'cap'",
    )
