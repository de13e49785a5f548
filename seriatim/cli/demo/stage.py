"""All processes of the demo, under one supervisor in one directory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from seriatim.cli import coordinators
from seriatim.cli.demo.errors import DemoFailed
from seriatim.cli.demo.plan import FaultKind
from seriatim.cli.embedded.cluster import COMMAND, ClusterSettings, DevelopmentCluster
from seriatim.cli.embedded.postgres import EmbeddedPostgres, binary
from seriatim.cli.embedded.processes import ProcessSpec

QUEUE = "east-log"
CAPTURES = ("capture-1", "capture-2")
REPLAY = "replay"
PGBENCH = "pgbench"
ROWS_PER_SCALE = 100_000 + 10 + 1  # accounts, tellers, branches
_REPLICA_IDENTITY = "ALTER TABLE pgbench_history REPLICA IDENTITY FULL"  # it has no key


@dataclass(frozen=True, slots=True)
class Load:
    """What pgbench does: TPC-B for `seconds`, by `clients`, at most `rate` transactions a second (0: as fast as it can)."""

    seconds: int
    clients: int
    scale: int
    rate: int


class Stage:
    """Cluster, databases, captures, replay and load. A context manager: at its end nothing of it runs any more."""

    def __init__(self, directory: Path | None, *, is_kept: bool) -> None:
        """Take the directory (None: a temporary one, removed at the end unless `is_kept`). Raises as `DevelopmentCluster`."""
        self._is_temporary = directory is None and not is_kept
        self.directory = Path(tempfile.mkdtemp(prefix="seriatim-demo-")) if directory is None else directory.resolve()
        self.keeps_logs = True
        """Whether the logs of a temporary directory stay: until it is known that nothing failed."""
        try:
            self.cluster = DevelopmentCluster(ClusterSettings(self.directory, name="demo"))
        except BaseException:
            self.keeps_logs = False
            self._tidy()
            raise
        self.supervisor = self.cluster.supervisor
        scratch = self.directory / "scratch"  # of children: what a killed one leaves behind goes with the directory
        scratch.mkdir(exist_ok=True)
        # What is set for captures and replays of the caller's own isn't meant for these.
        own = (name for name in os.environ if name.startswith("SERIATIM_"))
        self._environment: dict[str, str | None] = {**dict.fromkeys(own), "TMPDIR": str(scratch)}
        self.east, self.west = (
            EmbeddedPostgres(self.directory / name, name=name, supervisor=self.supervisor) for name in ("east", "west")
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.supervisor.stop_all([PGBENCH, *CAPTURES, REPLAY])
            self.cluster.close()
        finally:
            self._tidy()

    # ------------------------------------------------------------------------------------------------------- steps

    def start_cluster(self) -> None:
        """ZooKeeper, coordinators, brokers."""
        self.cluster.start()

    def start_databases(self) -> None:
        """East and west. A directory that holds them already is refused: their rows would not be this demo's."""
        for server in (self.east, self.west):
            server.start()
        if self.east.run("psql", "-Atc", "SELECT count(*) FROM pg_class WHERE relname LIKE 'pgbench%'").strip() != "0":
            raise DemoFailed(f"{self.directory} holds an earlier demo; choose another directory, or remove it")

    def make_tables(self, scale: int) -> None:
        """Make pgbench's tables: filled in east, empty in west."""
        self.east.run(PGBENCH, "--initialize", "--quiet", "--scale", str(scale), timeout_s=300)
        self.east.run("psql", "-qc", _REPLICA_IDENTITY)
        self.west.run(PGBENCH, "--initialize", "--quiet", "--init-steps", "dtp")

    def create_queue(self) -> None:
        """The queue, with the durability that loses nothing."""
        from seriatim.protocol import seriatim_pb2 as pb

        coordinators.call(self.cluster.coordinators, "CreateQueue", pb.CreateQueueRequest(queue=QUEUE))

    def start_capture(self, name: str) -> None:
        """One of the captures."""
        self._start(
            name, "capture", "postgres", "--dsn", self.east.dsn(), "--queue", QUEUE, "--name", name,
        )  # fmt: skip

    def start_replay(self) -> None:
        """The Spark job."""
        self._start(REPLAY, "replay", "--queue", QUEUE, "--target", self.west.dsn())

    def start_load(self, load: Load) -> None:
        """Start pgbench on east."""
        command = [binary(PGBENCH), "--no-vacuum", "--client", str(load.clients), "--jobs", str(min(load.clients, 2)),
                   "--time", str(load.seconds)]  # fmt: skip
        if load.rate:
            command += ["--rate", str(load.rate)]
        self.supervisor.start(
            ProcessSpec(PGBENCH, tuple(command), environment={**self._environment, **self.east.environment()})
        )

    def load_result(self) -> int:
        """How many transactions pgbench has done, when it has ended. Raises `DemoFailed` where it failed."""
        output = self.supervisor.output(PGBENCH)
        done = re.search(r"^number of transactions actually processed: (\d+)", output, re.MULTILINE)
        if done is None:
            raise DemoFailed(f"pgbench failed: {output.strip()[-500:]}")
        return int(done[1])

    # ------------------------------------------------------------------------------------------------------ faults

    def restart(self, kind: FaultKind, target: str) -> None:
        """Start again what was killed."""
        match kind:
            case FaultKind.MASTER | FaultKind.COORDINATOR:
                self.cluster.restart(target)
            case FaultKind.CAPTURE:
                self.start_capture(target)
            case FaultKind.REPLAY:
                self.start_replay()

    def ended(self) -> list[str]:
        """Which processes run no more and should. pgbench isn't looked at, it ends by itself."""
        running = self.supervisor.pids()
        cluster = ("zookeeper", *self.cluster.coordinator_names, *self.cluster.member_names)
        return [name for name in (*cluster, "east", "west", *CAPTURES, REPLAY) if name not in running]

    # ------------------------------------------------------------------------------------------------------- parts

    def _start(self, name: str, *arguments: str) -> None:
        command = (*COMMAND, *arguments, "--coordinator", self.cluster.coordinators)
        self.supervisor.start(ProcessSpec(name, command, environment=self._environment))

    def _tidy(self) -> None:
        """Remove a temporary directory; its logs stay where they are wanted."""
        if not self._is_temporary:
            return
        if not self.keeps_logs:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        for entry in list(os.scandir(self.directory)):
            if entry.name == "logs":
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)
