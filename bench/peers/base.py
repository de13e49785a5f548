"""What the driver asks of a peer."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from pathlib import Path

from bench.cases import Case, Kind
from seriatim.cli.embedded.processes import Supervisor


class PeerFailed(Exception):
    """A peer didn't do what it was asked; its library's error is the cause."""


class Peer(ABC):
    """One system under load. Made anew for each round, in an empty directory."""

    name: str
    """What `--only` takes."""
    title: str
    """In tables: what it is, and how durable an acknowledged record is."""
    client: str
    """Which of `load.CLIENTS` drives it."""
    kinds: frozenset[Kind] = frozenset({Kind.THROUGHPUT, Kind.LATENCY, Kind.CATCH_UP})
    has_bulk = True
    supervisor: Supervisor
    """Of all its servers."""

    def __init__(self, directory: Path) -> None:
        """Take an empty directory; nothing starts yet."""
        self.directory = directory

    @classmethod
    def fetch(cls) -> tuple[Path, ...]:
        """Fetch what is missing; answers folders of Python packages that the client needs."""
        return ()

    @classmethod
    def takes(cls, case: Case) -> bool:
        """Whether it can be given the case."""
        return case.kind in cls.kinds and (cls.has_bulk or not case.is_bulk)

    @abstractmethod
    def start(self) -> None:
        """Start all servers and wait until they serve."""

    @abstractmethod
    def make_queue(self, name: str) -> dict[str, str]:
        """Make a queue that nobody used yet; answers what its client is told."""

    def close(self) -> None:
        """End all servers, as quickly as can be: their data goes too."""
        self.supervisor.close()

    # ---- outages; only where `kinds` names them

    def leader(self, queue: str) -> str:
        """The process that takes the queue's records now."""
        raise NotImplementedError(self.name)

    def is_whole(self, queue: str) -> bool:
        """Whether every copy is there and in step, so that the next harm meets an ordinary state."""
        raise NotImplementedError(self.name)

    def harm(self, process: str, with_signal: signal.Signals) -> None:
        """Send the signal. One that is killed is started again by the supervisor at once."""
        self.supervisor.kill(process, with_signal)

    def heal(self, process: str) -> None:
        """Let a paused process go on."""
        self.supervisor.kill(process, signal.SIGCONT)
