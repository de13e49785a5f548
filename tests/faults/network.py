"""Hosts on one machine: each a network namespace with an address of its own, joined by a bridge; cut by nftables.

Everything is made inside a network and a mount namespace that this process alone has (`enter`), where the bridge lies
and `/run/netns` is empty. However the process ends, the kernel takes all of it away: nothing of the machine's own
network is touched, and nothing can be left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NETWORK = "10.213.0"
_OWN_NUMBER = 254
_INSIDE = "SERIATIM_FAULTS_INSIDE"
_RULES = """
table inet faults {
    set cut { type ipv4_addr; }
    chain input { type filter hook input priority 0; ip saddr @cut drop; }
}
"""


class NoNamespaces(Exception):
    """This machine doesn't let hosts be made; the message says why, and what to do."""


def enter(module: str) -> None:
    """Go on inside namespaces of this process's own: runs `python -m MODULE` there, with the same arguments, in its place.

    Raises `NoNamespaces` where that can't be; it is never done without.
    """
    for command, package in (
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
        ("ip", "iproute2"),
        ("nft", "nftables"),
    ):
        if shutil.which(command) is None:
            raise NoNamespaces(f"the command {command} is missing: tools/setup --faults, or apt-get install {package}")
    unshare = ("unshare", "--mount", "--propagation", "private", "--net", "--")
    tried = subprocess.run((*unshare, "true"), capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise NoNamespaces(
            f"network namespaces can't be made here ({tried.stderr.strip()}): run this as root, in a container with "
            "--privileged or with the rights NET_ADMIN and SYS_ADMIN"
        )
    sys.stdout.flush()
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", (*unshare, sys.executable, "-m", module, *sys.argv[1:]))


def is_inside() -> bool:
    """Whether this process runs where `enter` leads."""
    return os.environ.get(_INSIDE) == "1"


class Network:
    """The hosts named, up and connected. This process has a place on the bridge, which is never cut."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        Path("/run/netns").mkdir(exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        lines = [
            "link set lo up",
            "link add bridge type bridge",
            f"address add {NETWORK}.{_OWN_NUMBER}/24 dev bridge",
            "link set bridge up",
        ]
        for number, name in enumerate(self.names, 1):
            lines += [
                f"netns add {name}",
                f"link add host{number} type veth peer name eth0 netns {name}",
                f"link set host{number} master bridge up",
            ]
        _run("ip", "-batch", "-", given="\n".join(lines))
        for name in self.names:
            own = ["link set lo up", f"address add {self.address(name)}/24 dev eth0", "link set eth0 up"]
            _run("ip", "-netns", name, "-batch", "-", given="\n".join(own))
            _run(*self.entered(name, ("nft", "-f", "-")), given=_RULES)
        self._cut_at: set[str] = set()

    def address(self, name: str) -> str:
        """The host's address."""
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def entered(self, name: str, command: tuple[str, ...]) -> tuple[str, ...]:
        """The command that runs another on a host."""
        return ("nsenter", f"--net=/run/netns/{name}", "--", *command)

    def cut(self, some: Iterable[str], others: Iterable[str]) -> None:
        """Nothing passes any more between any of some and any of the others."""
        some, others = set(some), set(others)
        self.cut_one_way(some, others)
        self.cut_one_way(others, some)

    def cut_one_way(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """What the sources send reaches the targets no more; the other direction goes on."""
        sources = set(sources)
        for target in set(targets):
            addresses = ", ".join(self.address(source) for source in sorted(sources - {target}))
            if addresses:
                self._cut_at.add(target)
                _run(*self.entered(target, ("nft", f"add element inet faults cut {{ {addresses} }}")))

    def heal(self) -> None:
        """Everything passes again."""
        for name in sorted(self._cut_at):
            _run(*self.entered(name, ("nft", "flush set inet faults cut")))
        self._cut_at.clear()


def _run(*command: str, given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(command)} failed: {done.stderr.strip()}")
