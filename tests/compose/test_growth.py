"""A group and a coordinator more, and out again, as docs/operations.md says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seriatim.cli.embedded.ports import free_port
from seriatim.cli.main import run
from seriatim.consumer import Consumer
from seriatim.producer import Producer
from seriatim.protocol import seriatim_pb2 as pb
from tests.compose.deployment import ROOT, Deployment
from tests.faults.trial import wait_until


@pytest.fixture
def settings(deployment: Deployment) -> Iterator[dict[str, str]]:
    """Of what is added; it is away afterwards, whatever happens."""
    ports = [free_port()]
    while len(ports) < 3:
        ports.append(free_port(ports))
    settings = {
        "GROUP": "g4", "A_PORT": str(ports[0]), "B_PORT": str(ports[1]), "COORDINATOR": "coordinator-3",
        "PORT": str(ports[2]), "NETWORK": deployment.network,
    }  # fmt: skip
    yield settings
    for name in ("group", "coordinator"):
        _compose(deployment, name, settings, "down", "-v")


def _compose(deployment: Deployment, name: str, settings: dict[str, str], *arguments: str) -> None:
    project = {**settings, "COMPOSE_PROJECT_NAME": f"{deployment.project}-{name}"}
    deployment.compose(*arguments, file=ROOT / "compose" / f"{name}.yaml", **project)


def _group(deployment: Deployment) -> pb.GroupView:
    found = deployment.ask("ListGroups", pb.ListGroupsRequest()).groups
    return next((group for group in found if group.group == "g4"), pb.GroupView())


def _links_on(deployment: Deployment, queue: str) -> list[str]:
    return [link.group for link in deployment.ask("DescribeQueue", pb.QueueRequest(queue=queue)).links]


def test_a_group_and_a_coordinator_come_and_go(deployment: Deployment, settings: dict[str, str]) -> None:
    queue = "growing"
    kept = pb.QueueSettings(retention_ms=1000)
    deployment.ask("CreateQueue", pb.CreateQueueRequest(queue=queue, settings=kept))
    for name in ("group", "coordinator"):
        _compose(deployment, name, settings, "up", "-d")
    added = f"127.0.0.1:{settings['PORT']}"
    wait_until(
        lambda: len(_group(deployment).members) == 2 and all(one.is_in_sync for one in _group(deployment).members),
        "the new group is whole",
        60,
    )
    wait_until(
        lambda: added in deployment.ask("DescribeCluster", pb.DescribeClusterRequest()).coordinators,
        "the new coordinator is known",
        60,
    )

    # The queue was there before the group; it moves on until it is there.
    patient = {"session_timeout_s": 20}  # longer than this machine stands still: nothing is sent, or read, twice
    with Producer(added, queue, "shop", **patient) as producer, Consumer(added, queue, **patient) as consumer:
        sent = 0

        def is_there() -> bool:
            nonlocal sent
            producer.send(str(sent).encode()).result(60)
            sent += 1
            if _links_on(deployment, queue)[-1] == "g4":
                return True
            deployment.ask("RotateQueue", pb.QueueRequest(queue=queue))
            return False

        wait_until(is_there, "the queue sends to the new group", 120)
        producer.send(b"last").result(60)
        values: list[bytes] = []

        def is_read() -> bool:
            values.extend(one.value for one in consumer.poll(100, 0.5))
            return values[-1:] == [b"last"]

        wait_until(is_read, "all is read", 60)
        assert values == [*(str(number).encode() for number in range(sent)), b"last"]

        # Out again: it takes no more, what it holds is read and its retention is over.
        consumer.commit()
        arguments = ("group", "drain", "g4", "--until", "drained", "--timeout", "120")
        assert run([*arguments, "--coordinator", deployment.coordinators]) == 0
        wait_until(lambda: "g4" not in _links_on(deployment, queue), "no link on the group is kept", 60)
        _compose(deployment, "group", settings, "down", "-v")
        _compose(deployment, "coordinator", settings, "down")
    with Producer(deployment.coordinators, queue, "shop-2", **patient) as producer:
        producer.wait_until_elected(60)
        assert producer.send(b"later").result(60).offset is not None
    wait_until(lambda: not any(member.is_registered for member in _group(deployment).members), "the group has left", 60)
    assert run(["group", "remove", "g4", "--coordinator", deployment.coordinators]) == 0
    assert "g4" not in [one.group for one in deployment.ask("ListGroups", pb.ListGroupsRequest()).groups]
