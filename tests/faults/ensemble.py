"""ZooKeeper as an ensemble of three, one server a host: settings, commands, and who leads."""

from __future__ import annotations

import socket
from pathlib import Path

from seriatim.cli.embedded.zookeeper import class_path, java_path

CLIENT_PORT = 2181
TICK_MS = 250
_LOG_SETTINGS = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


def command(directory: Path, number: int, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Write the settings of server `number` (from 1) of those at `addresses`; what to run."""
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "myid").write_text(f"{number}\n")
    settings = {
        "dataDir": data,
        "clientPort": CLIENT_PORT,
        "clientPortAddress": addresses[number - 1],
        "tickTime": TICK_MS,
        "initLimit": 20,
        "syncLimit": 6,
        "minSessionTimeout": 2 * TICK_MS,
        "maxSessionTimeout": 60_000,
        "maxClientCnxns": 0,
        "admin.enableServer": "false",
        "4lw.commands.whitelist": "ruok,srvr",
        **{f"server.{at}": f"{address}:2888:3888" for at, address in enumerate(addresses, 1)},
    }
    (directory / "zoo.cfg").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    (directory / "log4j2.properties").write_text(_LOG_SETTINGS)
    return (
        java_path(), "-cp", class_path(), "-Xmx128m", "-Xms16m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData", f"-Dlog4j2.configurationFile={directory / 'log4j2.properties'}",
        "-Dzookeeper.jmx.log4j.disable=true", "-Dzookeeper.preAllocSize=4096",
        "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(directory / "zoo.cfg"),
    )  # fmt: skip


def mode(address: str) -> str:
    """`leader`, `follower`, or empty where the server doesn't serve."""
    try:
        with socket.create_connection((address, CLIENT_PORT), timeout=0.5) as connection:
            connection.sendall(b"srvr")
            reply = b""
            while chunk := connection.recv(4096):
                reply += chunk
    except OSError:
        return ""
    _, _, found = reply.partition(b"\nMode: ")
    return found.split(b"\n", 1)[0].decode()
