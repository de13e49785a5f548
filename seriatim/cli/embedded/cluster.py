"""A whole development cluster on one machine: ZooKeeper, coordinators, and broker groups of two members each.

Every server is a process of its own, run by the same commands as in production, under the names `zookeeper`,
`coordinator-1`, `g1-a`, `g1-b`, … A second start in the same directory finds the same data, and the same ports where they
are still free.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from seriatim.cli.embedded.errors import EmbeddedError, StartFailed
from seriatim.cli.embedded.ports import LOCALHOST, PortBook
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
from seriatim.cli.embedded.zookeeper import start_zookeeper

COORDINATORS = 2
DEFAULT_GROUPS = 3
MEMBERS = ("a", "b")
COMMAND = (sys.executable, "-P", "-m", "seriatim.cli.main")
"""`seriatim`, for a supervisor's child: no module is looked for in its directory, where users may have files of any name."""
_OF_ONE_SERVER = (
    "SERIATIM_NAME", "SERIATIM_ADVERTISE", "SERIATIM_ADVERTISE_OUTSIDE", "SERIATIM_LISTEN_OUTSIDE",
    "SERIATIM_ZOOKEEPER_OUTSIDE", "SERIATIM_DIRECT_PORT", "SERIATIM_CONFIG",
)  # fmt: skip
"""Variables that are for one server, or for clients, and aren't handed down: all servers here would take them for theirs."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What `DevelopmentCluster` starts."""

    directory: Path
    groups: int | None = None
    """How many; None: as many as the directory holds, else three. Fewer than it holds is refused."""
    first_port: int | None = None
    """Of consecutive ones: coordinators, ZooKeeper, members. None: remembered or free ones."""
    name: str = "development"
    is_restarted: bool = False
    """Start again whatever dies."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For coordinators and brokers, such as SERIATIM_SESSION_TIMEOUT_MS."""
    start_timeout_s: float = 60.0


class DevelopmentCluster:
    """A context manager around start and close. To harm it: `kill(name)`, `supervisor.stop(name)`, `restart(name)`."""

    def __init__(self, settings: ClusterSettings, say: Callable[[str], object] = lambda _: None) -> None:
        """Take the directory; nothing starts yet. Raises `DirectoryInUse`, `EmbeddedError`.

        `say`: told, in a line, of each server that starts to serve.
        """
        self.settings = settings
        self._say = say
        self.supervisor = Supervisor(settings.directory)
        try:
            self.groups = tuple(f"g{number}" for number in range(1, self._group_count() + 1))
        except EmbeddedError:
            self.supervisor.close()
            raise
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------ names

    @property
    def coordinator_names(self) -> tuple[str, ...]:
        """Such as `coordinator-1`."""
        return tuple(f"coordinator-{number}" for number in range(1, COORDINATORS + 1))

    @property
    def member_names(self) -> tuple[str, ...]:
        """Such as `g1-a`, group by group."""
        return tuple(f"{group}-{member}" for group in self.groups for member in MEMBERS)

    def address(self, name: str) -> str:
        """HOST:PORT of a process. Raises `KeyError` before the first start."""
        return f"{LOCALHOST}:{self._ports[name]}"

    @property
    def zookeeper(self) -> str:
        """HOST:PORT."""
        return self.address("zookeeper")

    @property
    def coordinators(self) -> str:
        """HOST:PORT,HOST:PORT: what `--coordinator` takes."""
        return ",".join(map(self.address, self.coordinator_names))

    # ---------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Start everything and wait until all of it serves; on failure nothing is left running.

        Raises `Missing`, `PortInUse`, `StartFailed`.
        """
        try:
            self._choose_ports()
            timeout_s = self.settings.start_timeout_s
            self._say(f"starting {len(self._ports)} servers in {self.supervisor.directory}")
            self._start_zookeeper(timeout_s)
            self._say(f"zookeeper serves at {self.zookeeper}")
            names = (*self.coordinator_names, *self.member_names)
            for name in names:
                self.supervisor.start(self._spec(name))
            for name in names:
                self.supervisor.wait_for_line(name, "ready", timeout_s=timeout_s)
                self._say(f"{name} serves at {self.address(name)}")
        except BaseException:
            self.close()
            raise

    def kill(self, name: str) -> int:
        """SIGKILL; answers the process id it had. It comes back only if the settings say so."""
        return self.supervisor.kill(name)

    def restart(self, name: str, *, timeout_s: float = 60.0) -> int:
        """Start a process again (ending it first if it runs) and wait until it serves; answers its new process id."""
        self.supervisor.stop(name)
        if name == "zookeeper":
            self._start_zookeeper(timeout_s)
        else:
            self.supervisor.start(self._spec(name))
            self.supervisor.wait_for_line(name, "ready", timeout_s=timeout_s)
        pid = self.supervisor.pid(name)
        if pid is None:
            raise StartFailed(f"{name} ended as soon as it served")
        return pid

    def close(self) -> None:
        """End brokers, then coordinators, then ZooKeeper; data stay. Safe to call twice."""
        self.supervisor.stop_all(self.member_names)
        self.supervisor.stop_all(self.coordinator_names)
        self.supervisor.close()

    # ------------------------------------------------------------------------------------------------------ parts

    def _group_count(self) -> int:
        folders = (re.fullmatch(r"g(\d+)-[ab]", path.name) for path in self.supervisor.directory.iterdir())
        held = max((int(match[1]) for match in folders if match), default=0)
        wanted = self.settings.groups if self.settings.groups is not None else held or DEFAULT_GROUPS
        if wanted < held:
            raise EmbeddedError(
                f"{self.supervisor.directory} holds {held} groups; started with {wanted}, records of the others would be missing"
            )
        return wanted

    def _choose_ports(self) -> None:
        book = PortBook(self.supervisor.directory)
        names = (*self.coordinator_names, "zookeeper", *self.member_names)
        first = self.settings.first_port
        for number, name in enumerate(names):
            self._ports[name] = book.port(name, wanted=None if first is None else first + number)

    def _start_zookeeper(self, timeout_s: float) -> None:
        port, is_restarted = self._ports["zookeeper"], self.settings.is_restarted
        start_zookeeper(self.supervisor, port, is_restarted=is_restarted, timeout_s=timeout_s)

    def _spec(self, name: str) -> ProcessSpec:
        common = ("--zookeeper", self.zookeeper, "--cluster", self.settings.name, "--listen", self.address(name))
        if name in self.coordinator_names:
            own: tuple[str, ...] = ("coordinator",)
        else:
            group, member = name.split("-")
            own = ("broker", "--group", group, "--member", member, "--dir", str(self.supervisor.directory / name))
        return ProcessSpec(
            name,
            (*COMMAND, *own, *common),
            environment={**dict.fromkeys(_OF_ONE_SERVER), **self.settings.environment},
            is_restarted=self.settings.is_restarted,
        )
