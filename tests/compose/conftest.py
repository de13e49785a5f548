"""A Docker engine, our images, and one deployment for all tests of this folder.

Engine and images take minutes on a machine that hasn't had them, so they are made ahead, beside all other tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


class Missing(Exception):
    """No engine or no base image can be had here; the message says why."""


@dataclass(frozen=True)
class Engine:
    """`host`: its DOCKER_HOST. `is_ours`: nobody else uses it, and it ends with these tests."""

    host: str
    is_ours: bool


class Ahead:
    """Makes engine and images on a thread, so that they are there, or nearly, when the first test wants them."""

    def __init__(self) -> None:
        self._is_over = False
        self._running: subprocess.Popen[str] | None = None
        self._pool = ThreadPoolExecutor(1)
        self._engine = self._pool.submit(self._start)
        self._images = self._pool.submit(self._build)

    def engine(self) -> Engine:
        """Waits for it. Raises Missing."""
        return self._engine.result()

    def images(self) -> dict[str, str]:
        """The names of ours by the variables that the deployment reads. Waits for them. Raises Missing."""
        return self._images.result()

    def close(self) -> None:
        """End what runs but for an installation of packages, which is let end, and the engine if it is ours."""
        self._is_over = True
        if self._engine.done():
            self._end_running()
        self._pool.shutdown()
        if self._engine.exception() is None and self._engine.result().is_ours:
            subprocess.run((HERE / "start-engine", "--stop"), check=True, timeout=60)

    def _start(self) -> Engine:
        host, *started = self._run(HERE / "start-engine", timeout_s=400, error=Missing).split()
        found = Engine(host, bool(started))
        if found.is_ours:  # what a run that was killed left behind
            with contextlib.closing(docker.DockerClient(base_url=host)) as client:
                remove_all(client, PROJECTS)
        return found

    def _build(self) -> dict[str, str]:
        """The stand-ins for the official ones, too, because those may not be to be had."""
        environment = {"DOCKER_HOST": self.engine().host, "TAG": TAG}
        base = self._run(HERE / "make-base", timeout_s=600, error=Missing, **environment).strip()
        build = ROOT / "compose" / "build"
        self._run(build, "--stand-ins", timeout_s=900, error=AssertionError, BASE=base, **environment)
        return {
            "SERIATIM_IMAGE": f"seriatim:{TAG}",
            "SERIATIM_FULL_IMAGE": f"seriatim-full:{TAG}",
            "ZOOKEEPER_IMAGE": f"seriatim-zookeeper:{TAG}",
            "POSTGRES_IMAGE": f"seriatim-postgres:{TAG}",
            "SPARK_IMAGE": f"seriatim-spark:{TAG}",
        }

    def _run(self, *command: str | Path, timeout_s: float, error: type[Exception], **environment: str) -> str:
        """What it prints; behind everything else that wants a processor."""
        if self._is_over:
            raise Missing("the tests are over")
        with subprocess.Popen(
            ("nice", "-n", "19", *command), start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
        ) as self._running:  # fmt: skip
            try:
                output, errors = self._running.communicate(timeout=timeout_s)
            finally:
                self._end_running()
        if self._running.returncode:
            raise error(f"{Path(command[0]).name}: {output[-2000:]}{errors[-4000:]}".strip())
        return output

    def _end_running(self) -> None:
        """With all that it has started: a shell would wait for it before it cleans up."""
        if self._running is not None and self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGTERM)


_KEY = pytest.StashKey[Ahead]()


def pytest_first_test(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(HERE in item.path.parents for item in items):
        config.stash[_KEY] = Ahead()


def pytest_sessionfinish(session: pytest.Session) -> None:
    ahead = session.config.stash.get(_KEY, None)
    if ahead is not None:
        ahead.close()


@pytest.fixture(scope="package")
def ahead(pytestconfig: pytest.Config) -> Ahead:
    return pytestconfig.stash[_KEY]


@pytest.fixture(scope="package")
def engine(ahead: Ahead) -> str:
    """DOCKER_HOST of an engine that answers; where none can be had, the tests are skipped, and the reason is told."""
    try:
        return ahead.engine().host
    except Missing as error:
        pytest.skip(f"tests/compose: {error}")


@pytest.fixture(scope="package")
def client(engine: str) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(base_url=engine, timeout=120)
    yield client
    client.close()


@pytest.fixture(scope="package")
def images(ahead: Ahead) -> dict[str, str]:
    """Our images, of the code as it is."""
    try:
        return ahead.images()
    except Missing as error:
        pytest.skip(f"tests/compose: {error}")


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
