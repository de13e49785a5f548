"""Numbers and names that must not be mistaken for one another."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import NewType

from seriatim.protocol.errors import InvalidArgument

QueueId = NewType("QueueId", int)
"""Identity of a queue for all time; a name may be given to another queue later (H16)."""
SubscriptionId = NewType("SubscriptionId", int)
"""Identity of a subscription within its queue; never used again in it."""
Generation = NewType("Generation", int)
"""Number of a subscription's position: rises by one with each seek (H9)."""
Epoch = NewType("Epoch", int)
"""Number of a link in its queue; the first link has epoch 1."""
Token = NewType("Token", int)
"""Fencing token of an elected instance; 0 means none."""
Index = NewType("Index", int)
"""Position in a link, from 0."""
Offset = NewType("Offset", int)
"""Position in a queue: base of the link + index."""
ChainVersion = NewType("ChainVersion", int)
"""ZooKeeper's version of a chain document."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%a-z]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_PORT = re.compile(r"[0-9]{1,5}")
PORT_MAX = 65_535

SEQ_MAX = 2**64 - 1
TOKEN_BITS = 24
COUNTER_BITS = 40
TOKEN_MAX = 2**TOKEN_BITS - 1
ABANDON_STRIDE = 2**40
"""After an abandoned link the next base is the next multiple of this, beyond any index it can have had (H21)."""


def beyond_abandoned(end: int) -> Offset:
    """Where the next link begins behind an abandoned one that ends at this offset (H21)."""
    return Offset((end // ABANDON_STRIDE + 1) * ABANDON_STRIDE)


def checked_name(name: str, what: str) -> str:
    """The name, if clusters, groups, queues and the like may be called so. Raises InvalidArgument."""
    if _NAME.fullmatch(name) is None:
        raise InvalidArgument(
            f"{name!r} can't name a {what}: use 1 to 128 letters, digits, dots, underscores and dashes", name=name
        )
    return name


def checked_address(address: str, what: str, *, least_port: int = 1) -> str:
    """The address, if it is HOST:PORT, an IPv6 host in brackets. Raises InvalidArgument."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not least_port <= int(match[2]) <= PORT_MAX or not can_be_looked_up(match[1]):
        raise InvalidArgument(f"{what} has to be HOST:PORT, not {address!r}")
    return address


def is_host_and_port(address: str) -> bool:
    """Whether somebody can be asked there. Python makes no number of some that it calls digits, nor of thousands."""
    host, _, port = address.rpartition(":")
    return bool(host) and _PORT.fullmatch(port) is not None and 0 < int(port) <= PORT_MAX


def can_be_looked_up(host: str) -> bool:
    """Whether Python asks for a host of this name at all: it refuses one with an empty part, as `g1-a..svc`, or one of more than 63 letters."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def check_served(listen: str, advertise: str | None) -> None:
    """Where a server listens, and what others are told to reach it by, if that isn't the same. Raises InvalidArgument."""
    checked_address(listen, "listen", least_port=0)
    if advertise:
        checked_address(advertise, "advertise")
    elif is_every_address(listen.rpartition(":")[0]):
        raise InvalidArgument(f"who listens on {listen} has to be given advertise: HOST:PORT that others reach it by")


def bare(host: str) -> str:
    """The host of an address; of IPv6 without its brackets."""
    return host.removeprefix("[").removesuffix("]")


def is_every_address(host: str) -> bool:
    """Whether who listens on it is reached by each address of the machine, as `0.0.0.0` and `[::]`."""
    try:
        return ipaddress.ip_address(bare(host)).is_unspecified
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, order=True)
class Incarnation:
    """One start of one member's process on one disk.

    `disk_id` is made when a disk is first used; `start` counts the process's starts on it, from 1.
    """

    disk_id: str
    start: int

    def __str__(self) -> str:
        return f"{self.disk_id}#{self.start}"


@dataclass(frozen=True, slots=True, order=True)
class MemberName:
    """A place in a group (`g1`, `a`), whoever stands there now."""

    group: str
    member: str

    def __str__(self) -> str:
        return f"{self.group}-{self.member}"

    @property
    def peer(self) -> MemberName:
        """The other place in the group."""
        return MemberName(self.group, "b" if self.member == "a" else "a")


def automatic_seq(token: Token, counter: int) -> int:
    """The seq of a record for which the user gave none: token in the upper 24 bits, counter in the lower 40.

    It rises from one elected sender to the next without asking anyone (protocol.md 1).
    Raises OverflowError when either part does not fit.
    """
    if not 0 <= token <= TOKEN_MAX or not 0 <= counter < 2**COUNTER_BITS:
        raise OverflowError(f"token {token} or counter {counter} does not fit into a seq")
    return (token << COUNTER_BITS) | counter
