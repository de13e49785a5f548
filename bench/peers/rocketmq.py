"""RocketMQ 5: a synchronous master and its slave with synchronous flush, a name server, and the proxy that clients ask.

Its client keeps an order only by sending one record after the other: `send_async` overtakes (tried: offsets come back out
of order). So ordered throughput is that of one record in flight, a steady rate can't be kept, and there is no bulk. A
master and slave of this kind don't change places by themselves; outages aren't measured.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from bench import artifacts
from bench.cases import Case, Kind
from bench.peers.base import Peer, PeerFailed
from seriatim.cli.embedded.ports import LOCALHOST, PortBook, is_free
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
from seriatim.cli.embedded.zookeeper import java_path

_CLUSTER = "bench"
_START_TIMEOUT_S = 90.0
_BROKERS = {"master": (0, "SYNC_MASTER"), "slave": (1, "SLAVE")}
_STARTUP = "org.apache.rocketmq."


class RocketMq(Peer):
    """Each record flushed on master and slave before the acknowledgement."""

    name = "rocketmq"
    title = "RocketMQ, sync master and slave, sync flush"
    client = "rocketmq"
    kinds = frozenset({Kind.THROUGHPUT, Kind.LATENCY})
    has_bulk = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.supervisor = Supervisor(directory)
        book = PortBook(directory)
        self._ports = {name: _port(book, name) for name in (*_BROKERS, "names", "proxy")}
        self._more_ports = {name: book.port(f"{name}-more") for name in (*_BROKERS, "proxy")}

    @classmethod
    def fetch(cls) -> tuple[Path, ...]:
        artifacts.jars("rocketmq")
        return (artifacts.packages("rocketmq"),)

    @classmethod
    def takes(cls, case: Case) -> bool:
        return super().takes(case) and not case.rate

    @property
    def _names(self) -> str:
        return f"{LOCALHOST}:{self._ports['names']}"

    def start(self) -> None:
        self._write("names.conf", {"listenPort": self._ports["names"]})
        self._run("names", "namesrv.NamesrvStartup", "-c", "names.conf", until="boot success")
        for name in _BROKERS:
            self._write(f"{name}.conf", self._broker_settings(name))
            self._run(name, "broker.BrokerStartup", "-c", f"{name}.conf", until="boot success")
        proxy = {
            "rocketMQClusterName": _CLUSTER,
            "grpcServerPort": self._ports["proxy"],
            "remotingListenPort": self._more_ports["proxy"],
            "namesrvAddr": self._names,
        }
        (self.directory / "proxy.json").write_text(json.dumps(proxy))
        self._run("proxy", "proxy.ProxyStartup", "-pc", "proxy.json", "-pm", "cluster", until="startup successfully")

    def _broker_settings(self, name: str) -> dict[str, object]:
        number, role = _BROKERS[name]
        return {
            "brokerClusterName": _CLUSTER,
            "brokerName": "pair",
            "brokerId": number,
            "brokerRole": role,
            "flushDiskType": "SYNC_FLUSH",
            "inSyncReplicas": 2,  # a record is acknowledged only with both copies
            "minInSyncReplicas": 2,
            "listenPort": self._ports[name],
            "haListenPort": self._more_ports[name],
            "brokerIP1": LOCALHOST,
            "brokerIP2": LOCALHOST,
            "namesrvAddr": self._names,
            "storePathRootDir": self.directory / name,
            "storePathCommitLog": self.directory / name / "commitlog",
        }

    def _write(self, file: str, settings: dict[str, object]) -> None:
        (self.directory / file).write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def _java(self, main: str) -> tuple[str, ...]:
        # Its scripts give a broker 8 GiB; a gigabyte each, as Kafka's have, is more than these cases use.
        jars = f"{artifacts.jars('rocketmq')}/*"
        home = f"-Duser.home={self.directory}"  # where it puts its logs
        return (java_path(), "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", home, "-cp", jars, _STARTUP + main)

    def _run(self, name: str, main: str, *arguments: str, until: str) -> None:
        environment = {"ROCKETMQ_HOME": str(self.directory)}
        command = (*self._java(main), *arguments)
        self.supervisor.start(ProcessSpec(name, command, environment, stop_signal=signal.SIGKILL))
        self.supervisor.wait_until(name, lambda: until in self.supervisor.output(name), timeout_s=_START_TIMEOUT_S)

    def make_queue(self, name: str) -> dict[str, str]:
        command = (*self._java("tools.command.MQAdminStartup"), "updateTopic", "-n", self._names, "-c", _CLUSTER,
                   "-t", name, "-r", "1", "-w", "1", "-a", "+message.type=FIFO")  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False)
        if "success" not in done.stdout:
            raise PeerFailed(f"topic {name}: {done.stdout} {done.stderr}")
        return {"endpoint": f"{LOCALHOST}:{self._ports['proxy']}", "queue": name}


def _port(book: PortBook, name: str) -> int:
    """A port whose second neighbour below is free too: a broker takes that one unasked."""
    number = 0
    while not is_free((port := book.port(f"{name}-{number}")) - 2):
        number += 1
    return port
