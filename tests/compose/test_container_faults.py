"""Harm through Docker's API while records flow, judged by the checker of tests/faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from tests.compose.deployment import COORDINATORS, MEMBERS, ZOOKEEPERS, Deployment
from tests.compose.flow import READERS, SENDERS, Flow
from tests.faults.trial import wait_until

TARGETS = ("master", "slave", "coordinator", "zookeeper", "sender", "reader")
MakeFlow = Callable[[str], Flow]


@pytest.fixture
def make_flow(deployment: Deployment, images: dict[str, str], tmp_path: Path) -> MakeFlow:
    return lambda queue: Flow(deployment, queue, tmp_path / "histories", images["SERIATIM_IMAGE"])


@pytest.mark.parametrize("how", ["kill", "pause", "restart", "disconnect"])
def test_records_flow_whoever_is_harmed(make_flow: MakeFlow, deployment: Deployment, how: str) -> None:
    with make_flow(how) as flow:
        for who in TARGETS:
            name = flow.find(who)
            flow.harm(how, name)
            flow.wait_for_progress(f"after {how} of {who} {name}")
            flow.heal()
            if who in ("master", "slave"):
                deployment.wait_until_whole()
        flow.judge(least=1000)


def test_records_flow_whoever_is_harmed_two_at_once(make_flow: MakeFlow, deployment: Deployment) -> None:
    pairs = (
        (("kill", "master"), ("kill", "coordinator")),
        (("disconnect", "master"), ("pause", "sender")),
        (("pause", "zookeeper"), ("kill", "reader")),
        (("disconnect", "coordinator"), ("kill", "slave")),
    )
    with make_flow("two") as flow:
        for pair in pairs:
            found = [(how, flow.find(who)) for how, who in pair]
            for how, name in found:
                flow.harm(how, name)
            flow.wait_for_progress(f"after {found}")
            flow.heal()
            deployment.wait_until_whole()
        flow.judge(least=700)


def test_a_broker_that_lost_its_volume_is_filled_again(
    make_flow: MakeFlow, deployment: Deployment, client: docker.DockerClient
) -> None:
    with make_flow("wiped") as flow:
        name = flow.find("slave")
        deployment.container(name).remove(force=True)
        client.volumes.get(f"{deployment.project}_{name}").remove()
        flow.wait_for_progress(f"while {name} is gone")
        deployment.up(name)
        deployment.wait_until_whole()
        flow.judge(least=200)  # reads both copies of every link


def test_every_service_is_upgraded_while_records_flow(
    make_flow: MakeFlow, deployment: Deployment, client: docker.DockerClient
) -> None:
    with make_flow("upgrade") as flow:
        deployment.next_version("SERIATIM_IMAGE", "ZOOKEEPER_IMAGE")
        for service in (*ZOOKEEPERS, *MEMBERS, *COORDINATORS):
            deployment.up("--no-deps", service)
            wanted = deployment.settings["ZOOKEEPER_IMAGE" if service in ZOOKEEPERS else "SERIATIM_IMAGE"]
            assert deployment.container(service).image == client.images.get(wanted), service
            if service in ZOOKEEPERS:
                wait_until(lambda name=service: bool(deployment.zookeeper_mode(name)), f"{service} serves")
            deployment.wait_until_whole()
            flow.wait_for_progress(f"after the upgrade of {service}")
        for name in (*SENDERS, *READERS):
            flow.instance(name).stop(timeout=20)
            flow.instance(name).remove()
            flow.start(name, deployment.settings["SERIATIM_IMAGE"])
        flow.wait_for_progress("after the upgrade of senders and readers")
        flow.judge(least=1000)
