"""One load, measured: the process that makes it, and what it and the servers take meanwhile.

Processor time is that of the client's and the servers' processes between the load's `begin` and its `end`. Memory is the
anonymous resident part, looked at every fifth of a second: pages of files that a process maps belong to the page cache,
which all peers use and none is charged for.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from bench.artifacts import HERE
from bench.load import Order
from bench.peers.base import Peer
from seriatim.cli.embedded import launcher

_LOOK_EVERY_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SLACK_S = 180.0
"""What a load may take beside its own seconds: to connect, to flush what the client's buffer holds."""


class LoadFailed(Exception):
    """The load ended before it could tell its figures; the message has the end of what it said."""


def wait_until(is_so: Callable[[], bool], otherwise: str, timeout_s: float = 120.0, *, every_s: float = 0.1) -> None:
    """Look until it is so. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(otherwise)
        time.sleep(every_s)


class LoadProcess:
    """A process of `bench.load`, or of a module that tells its figures in the same way; a context manager, at whose end it is gone."""

    def __init__(self, order: Any, packages: Sequence[Path], log: Path, module: str = "bench.load") -> None:
        """`order`: what `module` is told. `packages`: folders for its PYTHONPATH. `log`: where its standard error goes."""
        self._log = log
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.latest: dict[str, Any] = {}
        prefix = (sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), "9")
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                (*prefix, sys.executable, "-m", module, json.dumps(asdict(order))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [HERE.parent, *packages]))},
                start_new_session=True,
            )
        threading.Thread(target=self._listen, name="load's figures", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.process.kill()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:  # it told its figures; a client that doesn't end in time isn't waited for
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None  # noqa: S101 (for the type checker)
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "progress":
                self.latest = event
            else:
                self._events.put(event)
        self._events.put(None)

    def wait_for(self, name: str, timeout_s: float) -> dict[str, Any]:
        """The next event, which has to be this one. Raises LoadFailed."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise LoadFailed(f"no {name} within {timeout_s:g} s. {self._log_end()}") from None
        if event is None or event["event"] != name:
            raise LoadFailed(f"the load ended before its {name}. {self._log_end()}")
        return event

    def stop(self) -> None:
        """Tell a steady load that it is enough."""
        assert self.process.stdin is not None  # noqa: S101 (for the type checker)
        self.process.stdin.write("stop\n")
        self.process.stdin.flush()

    def _log_end(self) -> str:
        return "Its log ends with: " + " | ".join(self._log.read_text(errors="replace").splitlines()[-4:])


def measure(peer: Peer, order: Order, packages: Sequence[Path]) -> dict[str, Any]:
    """Put the load on the peer; its own figures, and what client and servers took. Raises LoadFailed."""
    with LoadProcess(order, packages, peer.directory / "load.log") as load:
        load_before = load.wait_for("begin", _SLACK_S)
        servers_before = cpu_s(peer.supervisor.pids().values())
        with _MemoryWatch(peer, load.process.pid) as memory:
            found = load.wait_for("end", order.seconds + _SLACK_S)
        servers_s = cpu_s(peer.supervisor.pids().values()) - servers_before
    client_s = found.pop("cpu_s") - load_before["cpu_s"]
    del found["event"]
    return found | {
        "client_cpu_s": client_s,
        "servers_cpu_s": servers_s,
        "client_peak_mb": memory.client_peak_bytes / 1e6,
        "servers_peak_mb": memory.servers_peak_bytes / 1e6,
    }


class _MemoryWatch:
    """Peaks between enter and exit: of the client, and of all servers together."""

    def __init__(self, peer: Peer, client: int) -> None:
        self.client_peak_bytes = self.servers_peak_bytes = 0
        self._peer = peer
        self._client = client
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.client_peak_bytes = max(self.client_peak_bytes, anonymous_bytes(self._client))
            servers_bytes = sum(map(anonymous_bytes, self._peer.supervisor.pids().values()))
            self.servers_peak_bytes = max(self.servers_peak_bytes, servers_bytes)
            if self._ending.wait(_LOOK_EVERY_S):
                return


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of the living ones, all threads (proc(5), stat fields 14 and 15)."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def anonymous_bytes(pid: int) -> int:
    """The resident part that no file stands behind; 0 of a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has just ended
    return 0


def settle() -> None:
    """Let what the case before has left in the page cache reach the disk, so that it isn't charged to the next."""
    os.sync()
    time.sleep(0.5)
