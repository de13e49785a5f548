"""Which port each child listens on.

Ports are taken below the kernel's range for outgoing connections, so that no client of ours can sit on a server's port
while that server is down. A directory remembers them by name: a second start gives the same ports again when they are free,
so that addresses written down by clients stay true.
"""

from __future__ import annotations

import errno
import json
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from seriatim.cli.embedded.errors import EmbeddedError, PortInUse

_FIRST, _LAST = 15_000, 31_999
LOCALHOST = "127.0.0.1"


def is_free(port: int, host: str = LOCALHOST) -> bool:
    """Whether a server can listen on the port."""
    return not obstacle(port, host)


def obstacle(port: int, host: str = LOCALHOST) -> str:
    """Why no server can listen on the port; empty where one can.

    Without SO_REUSEPORT, so that a gRPC server which shares its port counts.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use on {host}"
            return f"can't listen on {host}:{port}: {error.strerror}"
        return ""


def free_port(taken: Iterable[int] = ()) -> int:
    """A port that nobody listens on and that isn't in `taken`. Raises `PortInUse` when there is none."""
    taken = set(taken)
    for port in random.sample(range(_FIRST, _LAST + 1), 1000):
        if port not in taken and is_free(port):
            return port
    raise PortInUse(f"found no free port between {_FIRST} and {_LAST}")


class PortBook:
    """The ports of one directory, by name, in its `ports.json`."""

    def __init__(self, directory: Path) -> None:
        """Read what an earlier start wrote, if any. Raises `EmbeddedError` where that can't be read."""
        self._path = directory / "ports.json"
        self._ports: dict[str, int] = {}
        if self._path.exists():
            try:
                found = json.loads(self._path.read_text()).items()
                self._ports = {name: range(65_536).index(port) for name, port in found}  # raises for what is no port
            except (ValueError, TypeError, AttributeError) as error:
                raise EmbeddedError(f"{self._path} is damaged: remove it, then other ports are taken") from error

    def port(self, name: str, *, wanted: int | None = None) -> int:
        """The port of `name`: `wanted`, else the remembered one if it is free, else a free one. Remembers it.

        Raises `PortInUse` when `wanted` isn't free.
        """
        if wanted is not None:
            if not 0 < wanted < 65_536:
                raise PortInUse(f"{wanted} is no port number")
            if reason := obstacle(wanted):
                raise PortInUse(f"{name}: {reason}")
            port = wanted
        else:
            remembered = self._ports.get(name)
            port = remembered if remembered and is_free(remembered) else free_port(self._ports.values())
        # A start that was refused half-way may have left it to another name.
        ports = {other: at for other, at in self._ports.items() if at != port} | {name: port}
        if self._ports != ports:
            self._ports = ports
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self._ports, indent=1) + "\n")
            partial.replace(self._path)
        return port
