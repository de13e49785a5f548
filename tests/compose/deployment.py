"""The deployment of compose/compose.yaml under test: brought up and down by Compose, looked at and harmed through Docker's API."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container

from seriatim.cli.embedded.ports import free_port
from seriatim.producer import Producer
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import QueueExists
from tests.faults.trial import wait_until

ROOT = Path(__file__).parents[2]
PROJECTS = "seriatim-test-"
"""What the names of the projects under test begin with."""
COMPOSE_FILE = ROOT / "compose" / "compose.yaml"
PASSWORD = "p@ss/w:rd?%#x"
"""The databases'. As part of an address it would be read otherwise."""
ZOOKEEPERS = tuple(f"zookeeper-{number}" for number in (1, 2, 3))
COORDINATORS = ("coordinator-1", "coordinator-2")
MEMBERS = tuple(f"g{group}-{member}" for group in (1, 2, 3) for member in "ab")
CORE = (*ZOOKEEPERS, *COORDINATORS, *MEMBERS)
OF_REPLAY = ("POSTGRES_EAST_PORT", "POSTGRES_WEST_PORT", "SPARK_UI_PORT")
_PORTS = (
    *(f"ZOOKEEPER_{number}_PORT" for number in (1, 2, 3)),
    *(f"COORDINATOR_{number}_PORT" for number in (1, 2)),
    *(f"G{group}_{member}_PORT" for group in (1, 2, 3) for member in "AB"),
    *OF_REPLAY,
)


def compose_command() -> tuple[str, ...]:
    """The plugin where there is one, else docker-compose 1.29."""
    has_plugin = subprocess.run(("docker", "compose", "version"), capture_output=True, check=False).returncode == 0
    if has_plugin:
        return ("docker", "compose")
    assert shutil.which("docker-compose"), "neither docker compose nor docker-compose is there"
    return ("docker-compose",)


def remove_all(client: docker.DockerClient, prefix: str) -> None:
    """Containers, volumes and networks whose names begin with `prefix`, in whatever state."""
    # A filter of Docker's finds a name anywhere in a name.
    containers = client.containers.list(all=True, filters={"name": prefix}, ignore_removed=True)
    for kind in (
        containers,
        client.volumes.list(filters={"name": prefix}),
        client.networks.list(filters={"name": prefix}),
    ):
        for one in kind:
            if one.name.startswith(prefix):
                if kind is containers:
                    one.remove(force=True, v=True)
                else:
                    one.remove()


class Deployment:
    """One project of Compose with ports and volumes of its own."""

    def __init__(self, client: docker.DockerClient, host: str, project: str, images: dict[str, str]) -> None:
        self.client = client
        self.project = project
        self.ports: dict[str, str] = {}
        # Sessions a little shorter than the default: a fault that only time tells costs less of it. Micro-batches more seldom: each
        # costs the same, however few records it has.
        self.settings = {
            "COMPOSE_PROJECT_NAME": project,
            "SESSION_TIMEOUT_MS": "3000",
            "REPLAY_TRIGGER_MS": "500",
            "POSTGRES_PASSWORD": PASSWORD,
            **images,
        }
        self.choose_ports(*_PORTS)
        self.seconds_to_acknowledge = 0.0
        """From `up` to the first acknowledged record; set by who brought it up."""
        self._environment = {**os.environ, "DOCKER_HOST": host, "COMPOSE_HTTP_TIMEOUT": "180"}
        self._environment.pop("COMPOSE_PROFILES", None)
        self._compose = compose_command()

    @property
    def coordinators(self) -> str:
        """From outside: what `--coordinator` takes."""
        return ",".join(f"127.0.0.1:{self.ports[f'COORDINATOR_{number}_PORT']}" for number in (1, 2))

    @property
    def network(self) -> str:
        return f"{self.project}_default"

    # ---- Compose

    def compose(self, *arguments: str, timeout_s: float = 240, file: Path = COMPOSE_FILE, **settings: str) -> str:
        """Run Compose; its standard output."""
        done = subprocess.run(
            (*self._compose, "-f", str(file), *arguments), capture_output=True, text=True, timeout=timeout_s, check=False,
            env={**self._environment, **self.settings, **settings}, stdin=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def choose_ports(self, *names: str) -> None:
        """Free ones, of services that don't run: minutes after they were chosen somebody else may have one."""
        for name in names:
            self.ports[name] = self.settings[name] = str(free_port(map(int, self.ports.values())))

    def up(self, *services: str, profile: str = "core", **settings: str) -> None:
        self.compose("--profile", profile, "up", "-d", *services, **settings)

    def down(self) -> None:
        # `--remove-orphans`: whoever the profile doesn't name.
        self.compose("--profile", "demo", "down", "-t", "20", "--remove-orphans")

    def run(self, *arguments: str) -> str:
        """The `seriatim` command inside the network; its standard output."""
        return self.compose("--profile", "tools", "run", "--rm", "-T", "seriatim", *arguments)

    def next_version(self, *variables: str) -> None:
        """From now on `up` uses other images: the same, under another identity, as a new version is to Compose."""
        for variable in variables:
            name = f"{self.settings[variable]}-next"
            dockerfile = f'FROM {self.settings[variable]}\nLABEL org.opencontainers.image.version="{name}"\n'
            self.client.images.build(fileobj=io.BytesIO(dockerfile.encode()), tag=name, rm=True)
            self.settings[variable] = name

    # ---- containers

    def describe(self) -> str:
        """Each container's state, and the end of what it logged."""
        found = self.client.containers.list(all=True, filters={"name": self.project}, ignore_removed=True)
        return "\n".join(
            f"---- {one.name}: {one.attrs['State']['Status']}, {self.health_of(one)}, restarts {one.attrs['RestartCount']}\n"
            + one.logs(tail=12).decode(errors="replace")
            for one in found
        )

    def container(self, service: str) -> Container:
        found = self.client.containers.list(
            all=True,
            filters={"label": [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]},
        )
        assert len(found) == 1, f"{service}: {found}"
        return found[0]

    def health_of(self, container: Container) -> str:
        """What Docker knows of it; of a container without a check of its health, whether it runs."""
        state = container.attrs["State"]
        return str(state.get("Health", {}).get("Status", state["Status"]))

    def wait_until_healthy(self, services: Iterable[str], timeout_s: float = 180) -> None:
        left = set(services)

        def are_healthy() -> bool:
            """One question for all: to ask for each of a dozen takes a processor, which they need to start."""
            found = self.client.containers.list(
                all=True, filters={"label": f"com.docker.compose.project={self.project}"}, sparse=True
            )
            left.difference_update(
                one.attrs["Labels"]["com.docker.compose.service"] for one in found if "(healthy)" in one.attrs["Status"]
            )
            return not left

        try:
            wait_until(are_healthy, "every container is healthy", timeout_s)
        except AssertionError:
            logs = {name: self.container(name).logs(tail=15).decode(errors="replace") for name in left}
            raise AssertionError(f"not healthy: {logs}") from None

    # ---- the cluster

    def ask(self, method: str, request: object, within_s: float = 8) -> Any:
        async def call() -> Any:
            async with Coordinators(self.coordinators) as coordinators:
                return await coordinators.call_within(method, request, within_s)

        return asyncio.run(call())

    def wait_until_whole(self, timeout_s: float = 120) -> None:
        """Every member of the three groups registered, in sync, connected to the other one; both coordinators there."""

        def is_whole() -> bool:
            groups = self.ask("ListGroups", pb.ListGroupsRequest()).groups
            members = [member for group in groups for member in group.members if group.group in {"g1", "g2", "g3"}]
            return (
                len(members) == len(MEMBERS)
                and all(one.is_registered and one.is_in_sync and one.is_peer_connected for one in members)
                and len(self.ask("DescribeCluster", pb.DescribeClusterRequest()).coordinators) >= len(COORDINATORS)
            )

        wait_until(is_whole, "all members and coordinators are back", timeout_s)

    def send_first(self, queue: str, value: bytes = b"first", timeout_s: float = 180) -> None:
        """Make a queue as soon as somebody answers, and have one record acknowledged in it."""

        def is_made() -> bool:
            with contextlib.suppress(QueueExists):
                self.ask("CreateQueue", pb.CreateQueueRequest(queue=queue), 2)
            return True

        wait_until(is_made, "a queue is made", timeout_s)
        with Producer(self.coordinators, queue, session_timeout_s=20) as producer:
            producer.wait_until_elected(timeout_s)
            producer.send(value).result(timeout_s)

    def elected_coordinator(self) -> str:
        def elected() -> str | None:
            address = self.ask("DescribeCluster", pb.DescribeClusterRequest()).elected_coordinator
            numbers = (n for n in (1, 2) if address.endswith(f":{self.ports[f'COORDINATOR_{n}_PORT']}"))
            return next((f"coordinator-{number}" for number in numbers), None)

        return wait_until(elected, "a coordinator is elected")

    def zookeeper_leader(self) -> str:
        def leader() -> str | None:
            leaders = [name for name in ZOOKEEPERS if self.zookeeper_mode(name) == "leader"]
            return leaders[0] if len(leaders) == 1 else None

        return wait_until(leader, "ZooKeeper has a leader")

    def zookeeper_mode(self, name: str) -> str:
        """leader or follower; empty while it doesn't serve."""
        command = ("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/2181 && echo srvr >&3 && cat <&3")
        found = re.search(rb"^Mode: (\w+)", self.container(name).exec_run(command).output, re.MULTILINE)
        return found[1].decode() if found else ""
