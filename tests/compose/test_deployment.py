"""The deployment as a user meets it: images, start, addresses inside and outside, health, logs, stop, and data that stay."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable

import docker
import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from seriatim.consumer import Consumer
from seriatim.producer import Producer
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.health import ask
from tests.compose.deployment import COORDINATORS, CORE, MEMBERS, ZOOKEEPERS, Deployment
from tests.compose.flow import pause
from tests.faults.trial import wait_until

LOG_LINE = re.compile(rb"^\d{4}-\d\d-\d\dT[\d:.]+Z (INFO|WARNING|ERROR) [\w.]+ .*\w+=\S+", re.MULTILINE)
SESSION_S = 20
"""Longer than this machine stands still: who is elected stays it."""
PATIENT = {"acknowledgement_deadline_s": 60, "session_timeout_s": SESSION_S}


@pytest.fixture
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:8]}"


def outside(deployment: Deployment, service: str) -> str:
    """The published address of one of our servers."""
    variable = service.upper().replace("-", "_") + "_PORT"
    return f"127.0.0.1:{deployment.ports[variable]}"


def read(deployment: Deployment, queue: str, count: int, subscription: str) -> list[tuple[int, bytes]]:
    with Consumer(deployment.coordinators, queue, subscription, session_timeout_s=SESSION_S) as consumer:
        found: list[tuple[int, bytes]] = []
        give_up_at_s = time.monotonic() + 60
        while len(found) < count and time.monotonic() < give_up_at_s:
            found += [(one.offset, one.value) for one in consumer.poll(count - len(found), 0.5)]
        consumer.commit()
    return found


def test_the_first_record_is_acknowledged_soon(deployment: Deployment) -> None:
    """A minute is promised on a machine of its own, where it takes 11 s (docs/benchmarks.md). Here schedules and all other tests run beside it."""
    assert deployment.seconds_to_acknowledge < 180


def test_images_are_small_labelled_compiled_and_not_root(client: docker.DockerClient, images: dict[str, str]) -> None:
    core = client.images.get(images["SERIATIM_IMAGE"])
    assert core.attrs["Size"] < 250_000_000
    for name in ("SERIATIM_IMAGE", "SERIATIM_FULL_IMAGE"):
        image = client.images.get(images[name])
        assert image.attrs["Config"]["User"] == "seriatim"
        assert {"title", "description", "licenses", "version", "revision"} <= {
            label.rsplit(".", 1)[-1] for label, value in image.labels.items() if value
        }
        assert not any("BEGIN CERTIFICATE" in str(layer["CreatedBy"]) for layer in image.history())

    def printed(program: str) -> str:
        return client.containers.run(core, entrypoint="python", command=["-c", program], remove=True).decode().strip()

    assert int(printed("import os; print(os.getuid())")) != 0
    compiled = printed("from seriatim.producer import buffer; print(buffer.__file__)")
    assert compiled.endswith(".so"), "a sender takes twice the processor time uncompiled"


def test_the_command_reaches_everything_from_inside_and_outside(deployment: Deployment, queue: str) -> None:
    deployment.run("queue", "create", queue)
    # From outside. No slow answer ends a link: what was on its way might then be sent again, which costs offsets.
    with Producer(deployment.coordinators, queue, "shop", **PATIENT) as producer:
        handles = [producer.send(str(number).encode()) for number in range(20)]
        producer.flush(60)
        assert [handle.result().offset for handle in handles] == list(range(20))
    printed = deployment.run("consume", "--queue", queue, "--max", "20")  # from inside
    assert printed.split() == [str(number) for number in range(20)]
    assert [value for _, value in read(deployment, queue, 20, "outside")] == [str(n).encode() for n in range(20)]

    inside = json.loads(deployment.run("status", "--json").splitlines()[0])
    assert sorted(inside["coordinators"]) == ["coordinator-1:7000", "coordinator-2:7000"]
    seen = deployment.ask("DescribeCluster", pb.DescribeClusterRequest())
    assert sorted(seen.coordinators) == sorted(deployment.coordinators.split(","))


def test_servers_answer_for_their_health_and_describe_themselves(deployment: Deployment) -> None:
    for service in (*COORDINATORS, *MEMBERS):
        address = outside(deployment, service)
        for name in ("", "live"):
            wait_until(
                lambda address=address, name=name: ask(address, name, 5) == "SERVING", f"{service} serves {name}"
            )
        with grpc.insecure_channel(address) as channel:
            found = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        own = "seriatim.v1.Coordinator" if service in COORDINATORS else "seriatim.v1.Broker"
        assert found == {own, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_health_tells_the_truth_about_a_lost_zookeeper(deployment: Deployment) -> None:
    servers = [outside(deployment, service) for service in (*COORDINATORS, "g1-a", "g2-b")]
    paused = [deployment.container(name) for name in ZOOKEEPERS[:2]]
    undo: list[Callable[[], object]] = []
    try:
        for container in paused:
            pause(container)
            undo.append(container.unpause)
        wait_until(lambda: {ask(one, "", 5) for one in servers} == {"NOT_SERVING"}, "nobody is ready any more")
        wait_until(lambda: {ask(one, "live", 5) for one in servers} == {"SERVING"}, "everybody lives")
    finally:
        for unpause in undo:
            unpause()
    wait_until(lambda: {ask(one, "", 5) for one in servers} == {"SERVING"}, "everybody is ready again", 60)
    deployment.wait_until_whole()


def test_servers_log_keys_and_values_to_standard_output(deployment: Deployment) -> None:
    for service in (*COORDINATORS, *MEMBERS):
        assert LOG_LINE.search(deployment.container(service).logs(stdout=True, stderr=False)), service


def test_servers_stop_cleanly_when_told_to(deployment: Deployment) -> None:
    for service in ("coordinator-2", "g3-b", "g3-a"):
        container = deployment.container(service)
        started_s = time.monotonic()
        container.stop(timeout=60)
        assert container.wait(timeout=60)["StatusCode"] == 0, container.logs(tail=20)
        assert time.monotonic() - started_s < 60, f"{service} waited to be killed"
        container.start()
    deployment.wait_until_whole()


def test_data_survive_down_and_up(deployment: Deployment, queue: str) -> None:
    deployment.ask("CreateQueue", pb.CreateQueueRequest(queue=queue))
    with Producer(deployment.coordinators, queue, "shop", **PATIENT) as producer:
        for number in range(100):
            producer.send(str(number).encode())
        producer.flush(60)
    before = read(deployment, queue, 40, "main")
    deployment.down()
    deployment.up()
    deployment.wait_until_healthy(CORE)
    deployment.wait_until_whole()
    with Producer(deployment.coordinators, queue, "shop", **PATIENT) as producer:
        producer.wait_until_elected(60)
        assert producer.send(b"100").result(60).offset == 100
    after = read(deployment, queue, 61, "main")
    assert before + after == [(number, str(number).encode()) for number in range(101)]
