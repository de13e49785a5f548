"""Hosts on one machine: each a network namespace with an address of its own, joined by a bridge; cut by nftables, slowed by tc.

Everything is made inside a network and a mount namespace that this process alone has (`enter`), where the bridge lies
and `/run/netns` is empty. However the process ends, the kernel takes all of it away: nothing of the machine's own
network is touched, and nothing can be left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

NETWORK = "10.213.0"
_OWN_NUMBER = 254
_INSIDE = "SERIATIM_FAULTS_INSIDE"
_RULES = """
table inet faults {
    set cut { type ipv4_addr; }
    chain input { type filter hook input priority 0; ip saddr @cut drop; }
    chain lossy { type filter hook input priority 0; }
}
"""
_QUEUED_MS = 400
"""So long what is sent may wait for a narrow path; what would wait for longer is lost, as it is in a router."""


class NoNamespaces(Exception):
    """This machine doesn't let hosts be made; the message says why, and what to do."""


def run_inside(module: str, main: Callable[[], int]) -> int:
    """What `main` answers inside namespaces of this process's own (`enter`); 3 where they can't be had, which is said then."""
    try:
        enter(module)
        return main()
    except NoNamespaces as error:
        sys.stderr.write(f"{module} can't run: {error}\n")
        return 3


def enter(module: str) -> None:
    """Go on inside namespaces of this process's own: runs `python -m MODULE` there, with the same arguments, in its place.

    Nothing happens where this process is there already. Raises `NoNamespaces` where that can't be; it is never done without.
    """
    if os.environ.get(_INSIDE) == "1":
        return
    for command, package in (
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
        ("ip", "iproute2"),
        ("tc", "iproute2"),
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
        self._lossy_at: set[str] = set()
        self._narrow: set[str] = set()

    def why_not_impaired(self) -> str:
        """What the kernel lacks for `lose` and `narrow`; "" for nothing. They do nothing yet to anybody then."""
        some = self.names[0]
        try:
            self.lose([some], [some], 1)
            self.narrow(some, 1_000_000)
        except NoNamespaces as error:
            return str(error)
        finally:
            self.heal()
        return ""

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

    def lose(self, some: Iterable[str], others: Iterable[str], percent: int, over_bytes: int = 0) -> None:
        """So many of each hundred packets with more bytes than that, between any of some and any of the others, are lost, both ways."""
        some, others = set(some), set(others)
        for sources, targets in ((some, others), (others, some)):
            addresses = ", ".join(self.address(source) for source in sorted(sources))
            chance = f"numgen random mod 100 < {percent} " if percent < 100 else ""
            rule = f"add rule inet faults lossy ip saddr {{ {addresses} }} meta length > {over_bytes} {chance}drop"
            for target in targets:
                self._lossy_at.add(target)
                _run(*self.entered(target, ("nft", rule)))

    def narrow(self, name: str, kbit_s: int) -> None:
        """What the host sends, and what it is sent, passes at this rate, and queues before it."""
        queue = f"root tbf rate {kbit_s}kbit burst 10kb latency {_QUEUED_MS}ms"
        self._narrow.add(name)
        _run(*self.entered(name, ("tc", *f"qdisc add dev eth0 {queue}".split())))
        _run("tc", *f"qdisc add dev {self._bridged(name)} {queue}".split())

    def heal(self) -> None:
        """Everything passes again, and at once."""
        for name in sorted(self._cut_at):
            _run(*self.entered(name, ("nft", "flush set inet faults cut")))
        for name in sorted(self._lossy_at):
            _run(*self.entered(name, ("nft", "flush chain inet faults lossy")))
        for name in sorted(self._narrow):
            for command in (self.entered(name, _wide("eth0")), _wide(self._bridged(name))):
                subprocess.run(command, capture_output=True, check=False)  # one end, where the other couldn't be had
        self._cut_at.clear()
        self._lossy_at.clear()
        self._narrow.clear()

    def _bridged(self, name: str) -> str:
        """The bridge's end of a host's cable."""
        return f"host{self.names.index(name) + 1}"


def _wide(device: str) -> tuple[str, ...]:
    return ("tc", "qdisc", "del", "dev", device, "root")


def _run(*command: str, given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(command)} failed: {done.stderr.strip()}")
