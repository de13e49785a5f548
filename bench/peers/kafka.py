"""Kafka in KRaft mode: brokers, and a controller of its own that nothing harms."""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import time
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import artifacts
from bench.cases import Kind
from bench.peers.base import Peer, PeerFailed
from seriatim.cli.embedded.errors import StartFailed
from seriatim.cli.embedded.ports import LOCALHOST, PortBook
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
from seriatim.cli.embedded.zookeeper import java_path

_START_TIMEOUT_S = 60.0
# What Kafka's own start scripts give (kafka-run-class.sh, kafka-server-start.sh).
_JVM = ("-Xmx1G", "-Xms1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
        "-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent",
        "-XX:MaxInlineLevel=15", "-Djava.awt.headless=true")  # fmt: skip
_LOG_SETTINGS = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""
# Of config/server.properties as it ships, but for the addresses and the replication that the case asks for.
_SHIPPED = {
    "num.network.threads": 3,
    "num.io.threads": 8,
    "socket.send.buffer.bytes": 102_400,
    "socket.receive.buffer.bytes": 102_400,
    "socket.request.max.bytes": 104_857_600,
    "num.recovery.threads.per.data.dir": 2,
    "log.retention.hours": 168,
    "log.segment.bytes": 1_073_741_824,
    "log.retention.check.interval.ms": 300_000,
}


class Kafka(Peer):
    """As it comes: acknowledged when both brokers have it in their page caches."""

    name = "kafka"
    title = "Kafka, 2 copies, as it comes (page cache)"
    client = "kafka"
    kinds = frozenset(Kind)
    brokers = 2
    topic_settings: dict[str, str] = {"min.insync.replicas": "2"}  # noqa: RUF012 (replaced by subclasses, never changed)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.supervisor = Supervisor(directory)
        book = PortBook(directory)
        self._names = ("controller", *(f"broker-{number}" for number in range(1, self.brokers + 1)))
        self._addresses = {name: f"{LOCALHOST}:{book.port(name)}" for name in self._names}
        self._cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")

    @classmethod
    def fetch(cls) -> tuple[Path, ...]:
        artifacts.jars("kafka")
        return (artifacts.packages("kafka"),)

    @property
    def _bootstrap(self) -> str:
        return ",".join(self._addresses[name] for name in self._names[1:])

    def start(self) -> None:
        log_settings = self.directory / "log4j2.properties"
        log_settings.write_text(_LOG_SETTINGS)
        java = (java_path(), "-cp", f"{artifacts.jars('kafka')}/*")
        for number, name in enumerate(self._names):
            settings = self.directory / f"{name}.properties"
            settings.write_text("".join(f"{key}={value}\n" for key, value in self._settings(number).items()))
            subprocess.run(
                (*java, "kafka.tools.StorageTool", "format", f"--cluster-id={self._cluster_id}", "-c", str(settings)),
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=_START_TIMEOUT_S,
            )
            logging = f"-Dlog4j2.configurationFile={log_settings}"
            command = (java[0], *_JVM, logging, *java[1:], "kafka.Kafka", str(settings))
            self.supervisor.start(ProcessSpec(name, command, is_restarted=True, stop_signal=signal.SIGKILL))
        self._wait_for_brokers()

    def _settings(self, number: int) -> dict[str, object]:
        name = self._names[number]
        settings: dict[str, object] = {
            "process.roles": "controller" if number == 0 else "broker",
            "node.id": number + 1,
            "controller.quorum.voters": f"1@{self._addresses['controller']}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{'CONTROLLER' if number == 0 else 'PLAINTEXT'}://{self._addresses[name]}",
            "log.dirs": self.directory / name,
            "default.replication.factor": self.brokers,
            "min.insync.replicas": 2,
            "offsets.topic.replication.factor": self.brokers,
        }
        return settings | _SHIPPED

    @cached_property
    def _admin(self) -> Any:
        path = str(self.fetch()[0])
        if path not in sys.path:
            sys.path.append(path)
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self._bootstrap, "log_level": 0})

    def _wait_for_brokers(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (metadata := _metadata(self._admin)) is None or len(metadata.brokers) < self.brokers:
            if time.monotonic() > deadline_s:
                raise StartFailed(
                    f"Kafka's brokers didn't register within {_START_TIMEOUT_S:g} s; see {self.directory}"
                )
            time.sleep(0.2)

    def make_queue(self, name: str) -> dict[str, str]:
        admin = self._admin
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import NewTopic

        topic = NewTopic(name, num_partitions=1, replication_factor=self.brokers, config=dict(self.topic_settings))
        try:
            admin.create_topics([topic])[name].result(timeout=_START_TIMEOUT_S)
        except KafkaException as error:
            raise PeerFailed(f"topic {name}: {error}") from error
        return {"bootstrap": self._bootstrap, "queue": name}

    # ---- outages

    def _partition(self, queue: str) -> Any:
        metadata = _metadata(self._admin, queue)
        if metadata is None or not metadata.topics[queue].partitions:
            raise LookupError(f"no broker tells where {queue} is")
        return metadata.topics[queue].partitions[0]

    def leader(self, queue: str) -> str:
        leader = int(self._partition(queue).leader)
        if leader < 0:
            raise LookupError(f"{queue} has no leader")
        return self._names[leader - 1]

    def is_whole(self, queue: str) -> bool:
        try:
            partition = self._partition(queue)
        except LookupError:
            return False
        return partition.leader >= 0 and len(partition.isrs) == self.brokers


def _metadata(admin: Any, topic: str | None = None) -> Any:
    from confluent_kafka import KafkaException

    try:
        return admin.list_topics(topic, timeout=2) if topic else admin.list_topics(timeout=2)
    except KafkaException:
        return None


class KafkaFlush(Kafka):
    """As durable as Seriatim: each append flushed on both before the acknowledgement."""

    name = "kafka-flush"
    title = "Kafka, 2 copies, flush.messages=1"
    kinds = Kafka.kinds - {Kind.OUTAGE}
    topic_settings = {"min.insync.replicas": "2", "flush.messages": "1"}  # noqa: RUF012


class KafkaThree(Kafka):
    """Three copies of which two must be in step: how Kafka stays available when a broker fails."""

    name = "kafka-rf3"
    title = "Kafka, 3 copies, min.insync.replicas=2"
    kinds = frozenset({Kind.OUTAGE})
    brokers = 3
