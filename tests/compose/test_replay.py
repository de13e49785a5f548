"""From one database's log into another database, through containers of capture and Spark, harmed and upgraded meanwhile."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from seriatim.cli.main import run
from seriatim.consumer import RangeReader
from seriatim.protocol import seriatim_pb2 as pb
from tests.compose.deployment import OF_REPLAY, PASSWORD, Deployment
from tests.faults.trial import wait_until

REPLAY = (
    "postgres-east", "postgres-west", "capture-1", "capture-2", "spark-master", "spark-worker", "replay",
)  # fmt: skip
READERS = ("reader-1", "reader-2")
UPGRADES = (
    ("postgres-east", "postgres-west"), ("capture-1",), ("capture-2",), ("spark-master",), ("spark-worker", "replay"),
    ("customers", *READERS),
)  # fmt: skip
"""What is upgraded together; records arrive again before the next."""
ORDER = "INSERT INTO orders (customer_id, item, price_cents) VALUES (%s, %s, %s)"
PAYMENT = "UPDATE customers SET balance_cents = balance_cents - %s WHERE id = %s"
REFLECTED = """
import grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
print(*ProtoReflectionDescriptorDatabase(grpc.insecure_channel("127.0.0.1:7900")).get_services())
"""


@pytest.fixture(scope="module")
def replaying(deployment: Deployment) -> Iterator[Deployment]:
    deployment.choose_ports(*OF_REPLAY)
    deployment.up(profile="replay")
    deployment.wait_until_healthy(REPLAY, 300)
    yield deployment
    deployment.compose("--profile", "demo", "stop", "-t", "20", *REPLAY, "customers", *READERS)


def dsn(deployment: Deployment, side: str) -> str:
    port = deployment.ports[f"POSTGRES_{side}_PORT"]
    return f"postgresql://postgres:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/shop"


def buy(connection: psycopg.Connection, first: int, count: int) -> None:
    for number in range(first, first + count):
        with connection.transaction():
            connection.execute(ORDER, (number % 1000 + 1, f"item {number}", number))
            connection.execute(PAYMENT, (number, number % 1000 + 1))


def orders(deployment: Deployment, side: str) -> int:
    """How many a database has; 0 while it can't be asked."""
    try:
        with psycopg.connect(dsn(deployment, side), connect_timeout=5) as connection:
            row = connection.execute("SELECT count(*) FROM orders").fetchone()
    except psycopg.OperationalError:
        return 0
    return 0 if row is None else int(row[0])


def assert_identical(deployment: Deployment) -> None:
    sides = ("--source", dsn(deployment, "EAST"), "--target", dsn(deployment, "WEST"))
    assert run(["verify", *sides, "--tables", "public.customers,public.orders"]) == 0


def elected(deployment: Deployment, names: tuple[str, ...], node_of: Callable[[pb.QueueView], str]) -> str:
    """Which of the containers stands first in its election."""

    def found() -> str | None:
        node = node_of(deployment.ask("DescribeQueue", pb.QueueRequest(queue="log")))
        return next((name for name in names if node.startswith(f"{name}-")), None)

    return wait_until(found, f"one of {names} is elected", 60)


def sender(view: pb.QueueView) -> str:
    return view.sender


def audit_reader(view: pb.QueueView) -> str:
    return next((one.reader for one in view.subscriptions if one.subscription == "audit"), "")


def printed(deployment: Deployment, reader: str) -> list[dict[str, Any]]:
    """The records that a reader printed."""
    lines = deployment.container(reader).logs(stdout=True, stderr=False).splitlines()
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def assert_all_from_the_start(deployment: Deployment, records: list[dict[str, Any]]) -> None:
    """Each was printed once, in order, as another reader is handed it.

    The offsets that neither is handed are those of re-sends (protocol.md, invariant 11): of what was on its way when a
    link ended, as one does by itself on a slow disk. They stand behind the start of a later link.
    """
    with RangeReader(deployment.coordinators, "log") as reader:
        whole = [(one.offset, one.seq) for one in reader.read(0, records[-1]["offset"] + 1)]
    assert [(one["offset"], one["seq"]) for one in records] == whole
    for before, after in pairwise(records):
        assert after["offset"] == before["offset"] + 1 or after["epoch"] > before["epoch"], (before, after)


def test_one_database_becomes_the_other(replaying: Deployment) -> None:
    with psycopg.connect(dsn(replaying, "EAST"), autocommit=True) as east:
        buy(east, 0, 200)
        wait_until(lambda: orders(replaying, "WEST") == 200, "the first orders are in west", 180)

        capture = replaying.container(elected(replaying, ("capture-1", "capture-2"), sender))
        capture.kill()
        buy(east, 200, 200)
        replaying.container("replay").restart(timeout=20)
        buy(east, 400, 200)
        wait_until(lambda: orders(replaying, "WEST") == 600, "all orders are in west", 180)
        capture.start()
    assert_identical(replaying)


def test_everything_around_is_upgraded_while_customers_buy(replaying: Deployment) -> None:
    replaying.up(profile="demo")
    replaying.wait_until_healthy((*READERS, "capture-1", "capture-2"))

    def wait_for_arrivals(when: str) -> None:
        seen: list[int] = []  # from when on west can be asked: it may just be starting

        def have_arrived() -> bool:
            seen.append(orders(replaying, "WEST"))
            return seen[-1] > next((count for count in seen if count), 0) > 0

        wait_until(have_arrived, f"orders arrive in west {when}", 180)

    wait_for_arrivals("before the upgrade")
    # The first reader's end shows: the other one goes on.
    first = elected(replaying, READERS, audit_reader)
    wait_until(lambda: bool(printed(replaying, first)), f"{first} prints")
    replaying.container(first).stop(timeout=60)
    before, second = printed(replaying, first), next(name for name in READERS if name != first)
    assert elected(replaying, (second,), audit_reader) == second
    wait_until(lambda: bool(printed(replaying, second)), f"{second} prints")
    after = printed(replaying, second)
    assert_all_from_the_start(replaying, before + after)

    replaying.next_version("SERIATIM_IMAGE", "SERIATIM_FULL_IMAGE", "POSTGRES_IMAGE", "SPARK_IMAGE")
    for services in UPGRADES:
        replaying.up("--no-deps", *services, profile="demo")
        for service in services:
            image = replaying.container(service).image
            assert any(tag.endswith("-next") for tag in image.tags), (service, image.tags)
        wait_for_arrivals(f"after the upgrade of {services}")
    replaying.wait_until_healthy(READERS)
    # The ends of a row of readers and senders answer as servers do.
    for service in ("capture-1", "replay", "reader-1"):
        answer = replaying.container(service).exec_run(["python3", "-c", REFLECTED])
        assert answer.exit_code == 0, answer.output
        assert b"grpc.health.v1.Health" in answer.output.split()
    customers = replaying.container("customers")
    customers.stop(timeout=60)
    assert customers.wait(timeout=60)["StatusCode"] != 128 + signal.SIGKILL, "it didn't hear that it was to stop"
    wait_until(lambda: orders(replaying, "WEST") == orders(replaying, "EAST") > 600, "all orders are in west", 180)
    replaying.wait_until_healthy((*REPLAY, *READERS))
    assert_identical(replaying)
