"""A Docker engine, our images, and one deployment for all tests of this folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.compose.deployment import CORE, PROJECTS, ROOT, Deployment, remove_all

HERE = Path(__file__).parent
TAG = "test"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.compose)
            item.add_marker(pytest.mark.slow)
            # What fixtures do has deadlines of its own: images may have to be built first. Too late is an exception here,
            # and not the end of the process, so that nothing is left running.
            item.add_marker(pytest.mark.timeout(900, method="signal", func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that fails shows how the containers are."""
    report = yield
    deployment = getattr(item, "funcargs", {}).get("deployment")
    if report.failed and deployment is not None:
        report.sections.append(("containers", deployment.describe()))
    return report


@pytest.fixture(scope="package")
def engine() -> Iterator[str]:
    """DOCKER_HOST of an engine that answers; where none can be had, the tests are skipped, and the reason is told."""
    found = subprocess.run((HERE / "start-engine",), capture_output=True, text=True, timeout=400, check=False)
    if found.returncode:
        pytest.skip(f"tests/compose: {found.stderr.strip()}")
    host, *started = found.stdout.split()
    try:
        if started:  # nobody else uses it: what a run that was killed left behind
            with contextlib.closing(docker.DockerClient(base_url=host)) as client:
                remove_all(client, PROJECTS)
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
        (HERE / "make-base",), capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    if base.returncode:
        pytest.skip(f"tests/compose: {base.stderr.strip()}")
    built = subprocess.run(
        (ROOT / "compose" / "build", "--stand-ins"),
        capture_output=True, text=True, timeout=900, check=False, env={**environment, "BASE": base.stdout.strip()},
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
    deployment = Deployment(client, engine, f"{PROJECTS}{uuid.uuid4().hex[:8]}", images)
    try:
        started_s = time.monotonic()
        deployment.up()
        deployment.send_first("first")
        deployment.seconds_to_acknowledge = time.monotonic() - started_s
        deployment.wait_until_healthy(CORE)
        yield deployment
    finally:
        remove_all(client, deployment.project)
