"""A Docker engine, our images, and one deployment for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.compose.deployment import CORE, ROOT, Deployment

HERE = Path(__file__).parent
TAG = "test"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.compose)
            item.add_marker(pytest.mark.slow)
            # The first one waits for images and the whole deployment.
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="package")
def engine() -> Iterator[str]:
    """DOCKER_HOST of an engine that answers; where none can be had, the tests are skipped, and the reason is told."""
    if not os.environ.get("SERIATIM_TEST_COMPOSE"):
        pytest.skip("SERIATIM_TEST_COMPOSE isn't set: some eight minutes, and two cores to themselves, are needed")
    found = subprocess.run((HERE / "start-engine",), capture_output=True, text=True, timeout=400, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    host, *started = found.stdout.split()
    try:
        yield host
    finally:
        if started:
            subprocess.run((HERE / "start-engine", "--stop"), check=True, timeout=60)


@pytest.fixture(scope="package")
def client(engine: str) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(base_url=engine, timeout=120)
    yield client
    client.close()


@pytest.fixture(scope="package")
def images(engine: str) -> dict[str, str]:
    """Our images, built now; the stand-ins for the official ones, because those may not be to be had."""
    environment = {**os.environ, "DOCKER_HOST": engine, "TAG": TAG}
    base = subprocess.run(
        (HERE / "make-base",), capture_output=True, text=True, timeout=400, check=False, env=environment
    )
    if base.returncode:
        pytest.skip(base.stderr.strip())
    built = subprocess.run(
        (ROOT / "compose" / "build", "--stand-ins"),
        capture_output=True, text=True, timeout=550, check=False, env={**environment, "BASE": base.stdout.strip()},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-4000:]
    return {
        "SERIATIM_IMAGE": f"seriatim:{TAG}",
        "SERIATIM_FULL_IMAGE": f"seriatim-full:{TAG}",
        "ZOOKEEPER_IMAGE": f"seriatim-zookeeper:{TAG}",
        "POSTGRES_IMAGE": f"seriatim-postgres:{TAG}",
        "SPARK_IMAGE": f"seriatim-spark:{TAG}",
    }


@pytest.fixture(scope="package")
def deployment(engine: str, client: docker.DockerClient, images: dict[str, str]) -> Iterator[Deployment]:
    """The core, up and healthy; `seconds_to_acknowledge` says how long it took to the first record."""
    deployment = Deployment(client, engine, f"seriatim-test-{uuid.uuid4().hex[:8]}", images)
    try:
        started_s = time.monotonic()
        deployment.up()
        deployment.send_first("first")
        deployment.seconds_to_acknowledge = time.monotonic() - started_s
        deployment.wait_until_healthy(CORE)
        yield deployment
    finally:
        deployment.down(volumes=True)
