"""Apache ZooKeeper from the jars that PySpark ships: one server, for development, demo and tests.

Durable as in production (it syncs its log), but with short ticks, so that sessions of half a second are possible and an
expired one is noticed soon.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

from seriatim.cli.embedded.errors import Missing, PortInUse, StartFailed
from seriatim.cli.embedded.ports import LOCALHOST, PortBook, obstacle
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
from seriatim.consumer.spark import class_archive

NAME = "zookeeper"
"""Of its process, in the supervisor; of its port, and of its folder."""
_TICK_MS = 100  # a session's end is noticed at the next tick, so that a stand-by takes over no later than that
_MIN_SESSION_MS = 500
_MAX_SESSION_MS = 60_000
_STOP_S = 5.0
# ZooKeeper needs these of PySpark's some 250 jars; with all of them on the class path it starts half as fast.
_JARS = ("zookeeper", "zookeeper-jute", "slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl", "commons-io",
         "commons-cli", "metrics-core", "snappy-java", "audience-annotations", "netty-*", "jackson-*")  # fmt: skip
_LOG_SETTINGS = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


def java_path() -> str:
    """The Java to run: JAVA_HOME's, else the first on PATH. Raises `Missing`."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        where = f"JAVA_HOME={home} has no bin/java" if home else "Java isn't installed"
        raise Missing(
            f"{where}; ZooKeeper and Spark need Java 17 or newer: sudo apt-get install openjdk-17-jre-headless (on Debian 13 openjdk-21-jre-headless)"
        )
    return java


def class_path() -> str:
    """ZooKeeper's jars out of the installed PySpark (which isn't imported). Raises `Missing`."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        raise Missing("PySpark, whose jars hold ZooKeeper, isn't installed: pip install 'seriatim[demo]'")
    folder = Path(package.origin).parent / "jars"
    jars = sorted({jar for name in _JARS for jar in folder.glob(f"{name}-[0-9]*.jar")})
    if not any(jar.name.startswith("zookeeper-3") for jar in jars):
        raise Missing(
            f"{folder} holds no zookeeper-3*.jar; this version of PySpark can't serve as a source of ZooKeeper"
        )
    return ":".join(map(str, jars))


def start_zookeeper(
    supervisor: Supervisor,
    port: int,
    host: str = LOCALHOST,
    *,
    is_restarted: bool = False,
    archive_options: tuple[str, ...] | None = None,
    stop_timeout_s: float = _STOP_S,
    timeout_s: float = 60.0,
) -> None:
    """Start ZooKeeper, whose folder in the supervisor's is made if missing and kept between starts, and wait until it answers.

    `archive_options`: Java's, about its class archive; None: use the one that there is, if any. `stop_timeout_s`: after this, SIGKILL.
    Raises `Missing`, `PortInUse`, `StartFailed`.
    """
    command = _command(supervisor.directory / NAME, port, host, archive_options)
    if reason := obstacle(port, host):
        raise PortInUse(f"{NAME}: {reason}")
    supervisor.start(ProcessSpec(NAME, command, is_restarted=is_restarted, stop_timeout_s=stop_timeout_s))
    try:
        supervisor.wait_until(NAME, lambda: answers(host, port), timeout_s=timeout_s)
    except StartFailed:
        supervisor.stop(NAME)
        raise


def answers(host: str, port: int) -> bool:
    """Whether a ZooKeeper serves there."""
    return mode(host, port) != ""


def mode(host: str, port: int, *, timeout_s: float = 1.0) -> str:
    """`standalone`, `leader` or `follower`; empty where no ZooKeeper serves.

    `srvr` tells its mode only once it does; `ruok` says yes too soon.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(b"srvr")
            reply = b""
            while chunk := connection.recv(4096):
                reply += chunk
    except OSError:
        return ""
    _, _, found = reply.partition(b"\nMode: ")
    return found.split(b"\n", 1)[0].decode()


def _command(directory: Path, port: int, host: str, archive_options: tuple[str, ...] | None) -> tuple[str, ...]:
    """Write the settings of a server that stands alone; answer what to run."""
    (directory / "data").mkdir(parents=True, exist_ok=True)
    configuration = {
        "dataDir": directory / "data",
        "clientPort": port,
        "clientPortAddress": host,
        "tickTime": _TICK_MS,
        "minSessionTimeout": _MIN_SESSION_MS,
        "maxSessionTimeout": _MAX_SESSION_MS,
        "maxClientCnxns": 0,  # no limit: every process of the cluster comes from one address
        "admin.enableServer": "false",
        "4lw.commands.whitelist": "ruok,srvr",
        "autopurge.purgeInterval": 1,
        "autopurge.snapRetainCount": 3,
    }
    return server_command(directory, configuration, archive_options=archive_options)


def server_command(
    directory: Path,
    configuration: Mapping[str, object],
    heap_mb: int = 128,
    *,
    archive_options: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Write a server's settings into `directory`; answer what to run. Raises `Missing`."""
    if archive_options is None:
        archive_options = class_archive.using(class_archive.ZOOKEEPER)
    java, jars = java_path(), class_path()
    # Java reads it as Latin-1, so that data of a folder Größe lay elsewhere, but knows the escapes that JSON has.
    lines = (f"{key}={json.dumps(str(value))[1:-1]}\n" for key, value in configuration.items())
    (directory / "zoo.cfg").write_text("".join(lines))
    (directory / "log4j2.properties").write_text(_LOG_SETTINGS)
    return (
        java, "-cp", jars, f"-Xmx{heap_mb}m", "-Xms16m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData", *archive_options, f"-Dlog4j2.configurationFile={directory / 'log4j2.properties'}",
        "-Dzookeeper.jmx.log4j.disable=true", "-Dzookeeper.preAllocSize=4096",
        "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(directory / "zoo.cfg"),
    )  # fmt: skip


class EmbeddedZooKeeper:
    """A ZooKeeper with a supervisor of its own, in one directory; a context manager.

    Port, data and process id live in the directory as in a development cluster.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        host: str = LOCALHOST,
        archive_options: tuple[str, ...] | None = None,
        stop_timeout_s: float = _STOP_S,
    ) -> None:
        """Nothing starts yet. Without `port`, the directory's port is used again, or a free one is taken.

        `archive_options`, `stop_timeout_s`: as in `start_zookeeper`.
        """
        self._directory = directory
        self._wanted_port = port
        self._host = host
        self._archive_options = archive_options
        self._stop_timeout_s = stop_timeout_s
        self._port: int | None = None
        self.supervisor: Supervisor | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """HOST:PORT; what kazoo calls hosts."""
        if self._port is None:
            raise StartFailed("ZooKeeper hasn't been started")
        return f"{self._host}:{self._port}"

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start it and wait until it answers. Raises as `start_zookeeper`, and `DirectoryInUse`."""
        supervisor = Supervisor(self._directory)
        try:
            self._port = PortBook(supervisor.directory).port(NAME, wanted=self._wanted_port)
            start_zookeeper(
                supervisor,
                self._port,
                self._host,
                archive_options=self._archive_options,
                stop_timeout_s=self._stop_timeout_s,
                timeout_s=timeout_s,
            )
        except BaseException:
            supervisor.close()
            raise
        self.supervisor = supervisor

    def ended(self) -> list[str]:
        """Its name where it has ended by itself."""
        return [] if self.supervisor is None else self.supervisor.ended()

    def fail(self, name: str) -> NoReturn:
        """Raises `StartFailed`, with the last that it said."""
        raise StartFailed(f"{name} ended by itself. {'' if self.supervisor is None else self.supervisor.log_end(name)}")

    def close(self) -> None:
        """Stop it; its data stays."""
        if self.supervisor is not None:
            self.supervisor.close()
