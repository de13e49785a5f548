"""The floor: two bare processes, see `bench.floor_member`."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.artifacts import HERE
from bench.cases import Kind
from bench.peers.base import Peer
from seriatim.cli.embedded.ports import LOCALHOST, PortBook
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor


class Floor(Peer):
    """What no system of this shape can beat."""

    name = "floor"
    title = "floor: bare gRPC to 2 flushed files"
    client = "floor"
    kinds = frozenset({Kind.THROUGHPUT, Kind.LATENCY})
    has_bulk = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.supervisor = Supervisor(directory)
        book = PortBook(directory)
        self._addresses = {name: f"{LOCALHOST}:{book.port(name)}" for name in ("first", "second")}

    def start(self) -> None:
        first, second = self._addresses["first"], self._addresses["second"]
        for name, more in (("second", ()), ("first", (second,))):
            address = first if name == "first" else second
            command = (sys.executable, "-m", "bench.floor_member", address, str(self.directory / f"{name}.data"), *more)
            self.supervisor.start(ProcessSpec(name, command, environment={"PYTHONPATH": str(HERE.parent)}))
            self.supervisor.wait_for_line(name)

    def make_queue(self, name: str) -> dict[str, str]:
        return {"address": self._addresses["first"], "queue": name}
