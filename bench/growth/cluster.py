"""Seriatim with any number of groups, and what its processes take."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.artifacts import CACHE
from bench.measuring import wait_until
from bench.peers.seriatim import Seriatim
from seriatim.cli import coordinators
from seriatim.cli.failover import FailoverRun, Fault
from seriatim.cli.views import open_link
from seriatim.cli.workload import Workload
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import WorldError

START_TIMEOUT_S = 400.0
AT_ONCE = 8
_SESSION_S = 4.0
_RATE = 1000.0


class GrownCluster(Seriatim):
    """`groups`: how many, of two brokers each, every one a process of its own as in production."""

    def __init__(self, directory: Path, groups: int) -> None:
        super().__init__(directory, groups, START_TIMEOUT_S)

    @property
    def addresses(self) -> str:
        """Of the coordinators."""
        return self._cluster.coordinators

    @property
    def zookeeper(self) -> str:
        return self._cluster.zookeeper

    @property
    def brokers(self) -> tuple[str, ...]:
        return self._cluster.member_names

    @property
    def coordinator_names(self) -> tuple[str, ...]:
        return self._cluster.coordinator_names

    def pid(self, name: str) -> int:
        """Of a process that runs. Raises LookupError."""
        pid = self.supervisor.pid(name)
        if pid is None:
            raise LookupError(f"{name} doesn't run")
        return pid

    def restart(self, name: str) -> None:
        """Start a process that was stopped, and wait until it says that it is registered."""
        self._cluster.restart(name, timeout_s=START_TIMEOUT_S)

    def call(self, method: str, request: Any) -> Any:
        """One call to a coordinator."""
        return coordinators.call(self.addresses, method, request)

    def make(self, queue: str, **settings: Any) -> dict[str, str]:
        """A queue with settings of its own; what a client is told."""
        made = pb.QueueSettings(**{"durability": "sync", "readmit": "in-sync"} | settings)
        self.call("CreateQueue", pb.CreateQueueRequest(queue=queue, settings=made))
        return {"coordinators": self.addresses, "queue": queue}

    def view(self, queue: str) -> pb.QueueView:
        """The queue as a coordinator describes it, with what its members tell."""
        view: pb.QueueView = self.call("DescribeQueue", pb.QueueRequest(queue=queue))
        return view

    def group_is_in_sync(self, group: str) -> bool:
        """Whether both members of the group are registered and hold all that they should."""
        try:
            reply: pb.ListGroupsReply = self.call("ListGroups", pb.ListGroupsRequest())
        except WorldError:
            return False
        members = [member for one in reply.groups if one.group == group for member in one.members]
        return len(members) == 2 and all(member.is_in_sync for member in members)

    def switch_times_ms(self, queue: str, fault: str, count: int) -> list[float]:
        """How long sending stood still, for each of `count` faults; measured as `seriatim bench failover` does."""
        load = Workload(self.addresses, queue, 100, _RATE, _SESSION_S, f"bench-{os.urandom(4).hex()}")
        pids = self.supervisor.directory / "pids.json"
        run = FailoverRun(Fault(fault), load, count, pids, lambda: None)
        figures = run.measure()
        if (figures["records_sent"], 0) != (figures["records_acknowledged"], figures["records_unknown"]):
            raise LookupError(
                f"{fault}: of {figures['records_sent']} records {figures['records_acknowledged']} were acknowledged"
            )
        # A planned switch comes after a look at all groups: with many, later than what counts as the cause's own.
        is_planned = run.fault is Fault.ROTATE
        return [max(one.sending_s, one.later_s if is_planned else 0.0) * 1000 for one in run.outages]

    def wait_until_link_is_open(self, queue: str) -> pb.LinkView:
        """The open link, once there is one."""
        found: list[pb.LinkView] = []

        def is_open() -> bool:
            link = open_link(self.view(queue))
            found.extend([link] if link is not None and link.state == "open" else [])
            return bool(found)

        wait_until(is_open, f"queue {queue} has no open link")
        return found[0]


@contextmanager
def running(groups: int, directory: Path | None = None) -> Iterator[GrownCluster]:
    """A cluster that serves. In `directory` its data stay, and are found again; otherwise they go."""
    CACHE.mkdir(exist_ok=True)  # on the disk of the work tree: /tmp may be memory, where a flush costs nothing
    own = directory or Path(tempfile.mkdtemp(prefix="data-growth-", dir=CACHE))
    cluster = GrownCluster(own, groups)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        if directory is None:
            shutil.rmtree(own, ignore_errors=True)


def side_by_side(work: Callable[[Any], Any], items: list[Any]) -> None:
    """`work` for each item, some at once. Raises what the first that failed raised."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(work, items):
            pass


def written_bytes(pid: int) -> int:
    """What a process has caused to be written to the disk since its start (proc(5), io, write_bytes)."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise LookupError(f"/proc/{pid}/io has no write_bytes")
