"""The cluster that is harmed: every process a real one on a host of its own, every broker and every ZooKeeper server on a disk of its own.

Hosts have the names of their processes: `zookeeper-1` to `-3`, `coordinator-1`, `-2`, `g1-a`, `g1-b`, …, and one for
each process of the workload. One group more than serves is prepared: people add it and remove it. So are two coordinators, for those
that people replace.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kazoo.client import KazooClient

from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
from seriatim.protocol.nodes import Paths
from tests.faults import ensemble
from tests.faults.disks import RESERVE_MB, ImageDisk, MemberDisk, compile_library
from tests.faults.network import Network

ROOT = Path(__file__).parents[2]
ZOOKEEPERS = ("zookeeper-1", "zookeeper-2", "zookeeper-3")
COORDINATORS = ("coordinator-1", "coordinator-2", "coordinator-3", "coordinator-4")
_COORDINATORS_AT_ONCE = 2
SPARE_GROUP = "g4"
GROUPS = ("g1", "g2", "g3")
SENDERS = ("sender-1", "sender-2")
READERS = {"reader-1": "main", "reader-2": "main", "reader-3": "other", "reader-4": "late"}
SESSION_S = 1.5
_PORT = 7000
_START_S = 120.0
CLIENT_ENDS_S = 60.0
_NAME = "faults"
_SEGMENT_BYTES = {"a": 1, "b": 400}
"""On one member all batches lie in segment files, on the other some: those of the workload have a few hundred bytes."""


def members(groups: Iterable[str]) -> tuple[str, ...]:
    """Such as `g1-a`, group by group."""
    return tuple(f"{group}-{member}" for group in groups for member in ("a", "b"))


MEMBERS = members(GROUPS)
SPARE_MEMBERS = members((SPARE_GROUP,))


def hosts() -> Network:
    """All of them; once a process, for they outlive a cluster."""
    return Network((*ZOOKEEPERS, *COORDINATORS, *MEMBERS, *SPARE_MEMBERS, *SENDERS, *READERS))


class FaultCluster:
    """A context manager; starts everything, and ends everything."""

    def __init__(self, directory: Path, network: Network) -> None:
        self.network = network
        self.supervisor = Supervisor(directory)
        folder = self.supervisor.directory
        library = compile_library(folder)
        self.disks = {name: MemberDisk(folder, name, library) for name in (*MEMBERS, *SPARE_MEMBERS)}
        self.ensemble_disks = {name: ImageDisk(folder, name, library) for name in ZOOKEEPERS}
        self.coordinating = COORDINATORS[:_COORDINATORS_AT_ONCE]
        """Names of the coordinators that are there by now."""
        self._moved: Counter[str] = Counter()
        """How often a server has gone to another port."""
        self.expected: set[str] = set()
        """Servers that have to run when nothing is harmed."""

    def start(self) -> None:
        """Raises StartFailed.

        A ZooKeeper server of an ensemble doesn't flush the snapshot that it begins with, and doesn't start without (`No snapshot found, but
        there are log entries`): whoever loses power here has been there for half a minute.
        """
        self.start_servers(self.servers)
        self.expected = set(self.servers)
        for disk in self.ensemble_disks.values():
            disk.flush()

    def close(self) -> None:
        """End everything. Once."""
        self.network.heal()
        for name in self.supervisor.pids():
            self.signal(name, signal.SIGCONT)
        self.supervisor.stop_all((*MEMBERS, *SPARE_MEMBERS))
        self.supervisor.close()
        for disk in self.all_disks.values():
            disk.close()

    @property
    def servers(self) -> tuple[str, ...]:
        """All but those of a group that was added."""
        return (*ZOOKEEPERS, *self.coordinating, *MEMBERS)

    @property
    def all_disks(self) -> dict[str, ImageDisk]:
        """By server."""
        return {**self.disks, **self.ensemble_disks}

    # ------------------------------------------------------------------------------------------------------ addresses

    def address(self, name: str) -> str:
        """HOST:PORT."""
        return f"{self.network.address(name)}:{_PORT + self._moved[name]}"

    @property
    def coordinators(self) -> str:
        """What clients are given that start now."""
        return ",".join(map(self.address, self.coordinating))

    @property
    def zookeeper(self) -> str:
        """Of the whole ensemble."""
        return ",".join(f"{self.network.address(name)}:{ensemble.CLIENT_PORT}" for name in ZOOKEEPERS)

    def zookeeper_modes(self) -> dict[str, str]:
        """Server to `leader` or `follower`, of those that serve."""
        found = {name: ensemble.mode(self.network.address(name)) for name in ZOOKEEPERS}
        return {name: mode for name, mode in found.items() if mode}

    def queue_ids(self) -> list[str]:
        """Of all that ZooKeeper has anything of, deleted ones among them."""
        client = KazooClient(self.zookeeper)
        try:
            client.start(timeout=_START_S)
            return list(client.get_children(Paths(_NAME).queues))
        finally:
            client.stop()
            client.close()

    # ------------------------------------------------------------------------------------------------------ processes

    def start_servers(self, names: Iterable[str]) -> None:
        """Start those that don't run, ZooKeeper first, and wait until each serves. Raises StartFailed."""
        names = [name for name in names if self.supervisor.pid(name) is None]
        for stage in (ZOOKEEPERS, COORDINATORS, (*MEMBERS, *SPARE_MEMBERS)):
            started = [name for name in names if name in stage]
            for name in started:
                self.supervisor.start(self._spec(name))
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(self._wait_until_ready, started))

    def replace_coordinator(self, gone: str) -> str:
        """Start another one at an address of its own, and then stop this one. Returns its name. Raises StartFailed."""
        new = next(name for name in COORDINATORS if name not in self.coordinating)
        self.start_servers([new])
        self.coordinating = tuple(new if name == gone else name for name in self.coordinating)
        self.expected = self.expected - {gone} | {new}
        self.supervisor.stop(gone)
        return new

    def move(self, names: Iterable[str]) -> None:
        """From its next start on each of these servers listens on another port."""
        self._moved.update(names)

    def start_client(self, name: str, kind: str, arguments: tuple[str, ...]) -> None:
        """Start a process of the workload on its host."""
        command = (sys.executable, "-m", "tests.faults.workload", kind, self.coordinators, *arguments)
        self.supervisor.start(
            ProcessSpec(
                name,
                self.network.entered(name, command),
                environment={"PYTHONPATH": str(ROOT)},
                stop_timeout_s=CLIENT_ENDS_S,
            )
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """SIGKILL returns when the process is dead."""
        with contextlib.suppress(ProcessLookupError):
            self.supervisor.kill(name, number)

    def _wait_until_ready(self, name: str) -> None:
        if name in ZOOKEEPERS:
            self.supervisor.wait_until(
                name, lambda: bool(ensemble.mode(self.network.address(name))), timeout_s=_START_S
            )
        else:
            self.supervisor.wait_for_line(name, "ready", timeout_s=_START_S)

    def _spec(self, name: str) -> ProcessSpec:
        environment = {"PYTHONPATH": str(ROOT), "SERIATIM_SESSION_TIMEOUT_MS": str(int(SESSION_S * 1000))}
        if name in ZOOKEEPERS:
            addresses = tuple(map(self.network.address, ZOOKEEPERS))
            disk = self.ensemble_disks[name]
            command = ensemble.command(disk.path, ZOOKEEPERS.index(name) + 1, addresses)
            environment |= disk.environment
        else:
            common = ("--zookeeper", self.zookeeper, "--cluster", _NAME, "--listen", self.address(name))
            own: tuple[str, ...] = ("coordinator",)
            if name not in COORDINATORS:
                own_disk, (group, member) = self.disks[name], name.split("-")
                own = ("broker", "--group", group, "--member", member, "--dir", str(own_disk.path))
                own = (*own, "--reserve-mb", str(RESERVE_MB), "--segment-bytes", str(_SEGMENT_BYTES[member]))
                environment |= own_disk.environment
            command = (sys.executable, "-m", "seriatim.cli.main", *own, *common)
        return ProcessSpec(name, self.network.entered(name, command), environment=environment)
