"""From one database's log into another database, through containers of capture and Spark, one of them killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from seriatim.cli.main import run
from seriatim.protocol import seriatim_pb2 as pb
from tests.compose.deployment import Deployment
from tests.faults.trial import wait_until

SERVICES = (
    "postgres-east", "postgres-west", "capture-1", "capture-2", "spark-master", "spark-worker", "replay",
)  # fmt: skip
ORDER = "INSERT INTO orders (customer_id, item, price_cents) VALUES (%s, %s, %s)"
PAYMENT = "UPDATE customers SET balance_cents = balance_cents - %s WHERE id = %s"


@pytest.fixture
def replaying(deployment: Deployment) -> Iterator[Deployment]:
    deployment.up(profile="replay")
    deployment.wait_until_healthy(SERVICES, 150)
    yield deployment
    deployment.compose("--profile", "replay", "stop", "-t", "20", *SERVICES)


def dsn(deployment: Deployment, side: str) -> str:
    return f"postgresql://postgres:seriatim@127.0.0.1:{deployment.ports[f'POSTGRES_{side}_PORT']}/shop"


def buy(connection: psycopg.Connection, first: int, count: int) -> None:
    for number in range(first, first + count):
        with connection.transaction():
            connection.execute(ORDER, (number % 1000 + 1, f"item {number}", number))
            connection.execute(PAYMENT, (number, number % 1000 + 1))


def test_one_database_becomes_the_other(replaying: Deployment) -> None:
    with (
        psycopg.connect(dsn(replaying, "EAST"), autocommit=True) as east,
        psycopg.connect(dsn(replaying, "WEST"), autocommit=True) as west,
    ):

        def has_arrived(count: int) -> bool:
            row = west.execute("SELECT count(*) FROM orders").fetchone()
            return row is not None and row[0] == count

        buy(east, 0, 200)
        wait_until(lambda: has_arrived(200), "the first orders are in west", 90)

        elected = replaying.ask("DescribeQueue", pb.QueueRequest(queue="log")).sender[:9]
        capture = replaying.container(elected)
        capture.kill()
        buy(east, 200, 200)
        replaying.container("replay").restart(timeout=20)
        buy(east, 400, 200)
        wait_until(lambda: has_arrived(600), "all orders are in west", 120)
        capture.start()
    sides = ("--source", dsn(replaying, "EAST"), "--target", dsn(replaying, "WEST"))
    assert run(["verify", *sides, "--tables", "public.customers,public.orders"]) == 0
