"""A producer where Python's main thread has returned: other threads go on, and what was registered for the exit runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient

from tests.integration.test_producer_client import QUEUE_ID, SmallCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

PREAMBLE = """
import asyncio, atexit, sys, threading
from seriatim.producer import Producer
from seriatim.protocol import direct

def new(**settings):
    patient = {"max_block_s": 60, "session_timeout_s": 60, "acknowledgement_deadline_s": 5}
    return Producer(sys.argv[1], "q", "a", **patient, **settings)

def after_main(work):
    def run():
        threading.main_thread().join()
        work()
    threading.Thread(target=run).start()
"""


@pytest.fixture
def cluster(zookeeper: str) -> Iterator[SmallCluster]:
    with SmallCluster(zookeeper) as small:
        yield small


def run(cluster: SmallCluster, script: str) -> str:
    command = (sys.executable, "-c", PREAMBLE + script, cluster.address)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def left_by_itself(cluster: SmallCluster, zookeeper: str) -> bool:
    """Whether nobody stands in the election long before a session that was left would end."""
    client = KazooClient(zookeeper)
    client.start(timeout=60)
    try:
        wait_until(lambda: not client.get_children(f"/seriatim/test/queues/{QUEUE_ID}/senders"), 15)
    finally:
        client.stop()
        client.close()
    return True


def test_a_thread_that_outlives_the_main_one_sends_through_a_deposal_and_closes(
    cluster: SmallCluster, zookeeper: str
) -> None:
    script = """
deposed = threading.Event()
producer = new(on_deposed=lambda _: deposed.set())
producer.send(b"1").result(60)

def work():
    producer.send(b"2").result(60)
    producer.stand_again()
    deposed.wait(60)
    producer.send(b"3").result(60)
    producer.close()
    print("closed")

after_main(work)
"""
    assert run(cluster, script) == "closed\n"
    assert cluster.values() == [b"1", b"2", b"3"]
    assert left_by_itself(cluster, zookeeper)


def test_a_producer_that_begins_after_the_main_thread_has_returned(cluster: SmallCluster, zookeeper: str) -> None:
    script = """
def work():
    with new() as producer:
        producer.send(b"1").result(60)
    print("closed")

after_main(work)
"""
    assert run(cluster, script) == "closed\n"
    assert left_by_itself(cluster, zookeeper)


def test_a_producer_that_is_closed_at_the_exit(cluster: SmallCluster, zookeeper: str) -> None:
    script = """
producer = new()
atexit.register(producer.close)
producer.wait_until_elected(60)
producer.send(b"1")
"""
    run(cluster, script)
    assert cluster.values() == [b"1"]
    assert left_by_itself(cluster, zookeeper)


@pytest.mark.parametrize("are_acknowledged", [False, True])
def test_a_producer_that_is_not_closed_says_what_may_be_lost(cluster: SmallCluster, *, are_acknowledged: bool) -> None:
    """A script that sends, and ends, had sent nothing, and ended with 0 and without a word."""
    if not are_acknowledged:
        cluster.silent_epochs.add(1)
    script = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
producer = new()
producer.wait_until_elected(60)
handles = producer.send_many([b"1", b"2"])
"""
    said = run(cluster, script + "[handle.result(60) for handle in handles]" * are_acknowledged)
    lost = "not closed at the end of the process: records may be lost queue=q records=2"
    assert (lost in said.splitlines()) is not are_acknowledged


FORK = """
import os
from seriatim.protocol.errors import SeriatimError

def in_a_fork(work):
    if os.fork():
        if status := os.wait()[1]:
            print("it ended with", os.waitstatus_to_exitcode(status))
        return
    try:
        work()
    except SeriatimError as error:
        print(type(error).__name__, error)
    sys.stdout.flush()
    os._exit(0)

def send():
    with new() as producer:
        producer.send(b"2").result(60)
    print("sent")
"""


def test_a_forked_process_has_producers_of_its_own_where_all_were_closed_before(cluster: SmallCluster) -> None:
    script = """
producer = new()
producer.send(b"1").result(60)
producer.close()
in_a_fork(send)
"""
    assert run(cluster, FORK + script) == "sent\n"
    assert cluster.values() == [b"1", b"2"]


def test_a_forked_process_is_told_where_it_can_have_none(cluster: SmallCluster) -> None:
    script = """
with new() as producer:
    producer.send(b"1").result(60)
    in_a_fork(send)
    producer.send(b"3").result(60)
"""
    said = run(cluster, FORK + script)
    assert said.startswith("InvalidArgument this process was forked while gRPC was in use")
    assert cluster.values() == [b"1", b"3"]


def test_a_name_that_no_thread_looks_up_any_more_is_left_to_grpc(cluster: SmallCluster) -> None:
    script = """
async def opened():
    return await direct.opened("localhost:9", "Append", lambda message: (message,), bytes)

after_main(lambda: print(asyncio.run(opened())))
"""
    assert run(cluster, script) == "None\n"
