"""ZooKeeper as an ensemble of three, one server a host: settings, commands, and who leads."""

from __future__ import annotations

from pathlib import Path

from seriatim.cli.embedded import zookeeper

CLIENT_PORT = 2181
TICK_MS = 100
HEAP_MB = 128


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
        "initLimit": 50,
        "syncLimit": 15,
        "minSessionTimeout": 500,
        "maxSessionTimeout": 60_000,
        "maxClientCnxns": 0,
        "admin.enableServer": "false",
        "4lw.commands.whitelist": "ruok,srvr",
        **{f"server.{at}": f"{address}:2888:3888" for at, address in enumerate(addresses, 1)},
    }
    return zookeeper.server_command(directory, settings, HEAP_MB)


def mode(address: str) -> str:
    """`leader`, `follower`, or empty where the server doesn't serve."""
    return zookeeper.mode(address, CLIENT_PORT, timeout_s=0.5)
