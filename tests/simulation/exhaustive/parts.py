"""The immutable parts of two members and of the streams that lead to them."""

from __future__ import annotations

from typing import NamedTuple

from seriatim.protocol.names import Incarnation
from tests.simulation.exhaustive.values import Value

PLACES = ("a", "b")
MASTER, SLAVE = 0, 1
"""A new link's master is always at place `a`."""
NOBODY = -1
"""Owner of a request whose answer nobody waits for any more."""


class Entry(NamedTuple):
    """A batch as it lies on a disk: the position after it, and what was known to be committed then."""

    position: Value
    committed: int
    batch: Value


class Write(NamedTuple):
    """One atomic write: a `batch`, or the link's record: to `keep` it, with its `seal`, or sealed though `unheard` of."""

    kind: str
    epoch: int
    entry: Entry | None = None
    record: Value | None = None
    owner: int = NOBODY
    disk_id: str = ""


class DiskLink(NamedTuple):
    """What is flushed of a link."""

    epoch: int
    record: Value | None = None
    entries: tuple[Entry, ...] = ()


class Open(NamedTuple):
    """An OpenLink that isn't answered. `stage`: connecting the slave; keeping the record; settling: the position at `index`."""

    owner: int
    stage: str
    index: int = 0


class Runner(NamedTuple):
    """A link in a member's memory. `learnt`: what the master said is committed. `seals`: Seals not answered, and the disk they mean."""

    epoch: int
    replica: Value
    learnt: int = 0
    opens: tuple[Open, ...] = ()
    seals: tuple[tuple[int, str], ...] = ()


class Member(NamedTuple):
    """`session`: on; lease over; expired; starting (sealing its links before it registers); gone."""

    place: int
    name: str
    disk: int = 1
    start: int = 1
    is_up: bool = True
    comes_blank: bool = False
    session: str = "on"
    runners: tuple[Runner, ...] = ()
    unflushed: tuple[Write, ...] = ()
    links: tuple[DiskLink, ...] = ()

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.name}-disk{self.disk}", self.start)

    @property
    def next_incarnation(self) -> Incarnation:
        """Who comes when this process, or this disk, is replaced."""
        if self.comes_blank:
            return Incarnation(f"{self.name}-disk{self.disk + 1}", 1)
        return Incarnation(f"{self.name}-disk{self.disk}", self.start + 1)

    def link(self, epoch: int) -> DiskLink:
        return next((one for one in self.links if one.epoch == epoch), DiskLink(epoch))

    def runner(self, epoch: int) -> Runner | None:
        return next((one for one in self.runners if one.epoch == epoch), None)

    def entries(self, epoch: int) -> tuple[Entry, ...]:
        """All batches of a link, flushed or not."""
        unflushed = [one.entry for one in self.unflushed if one.epoch == epoch and one.entry is not None]
        return (*self.link(epoch).entries, *unflushed)


class Append(NamedTuple):
    """A sender's stream to a master. `is_used`: the sender still listens.

    `state`: new (its opening is on its way), source, refused (reads no more; `error` follows the acknowledgements),
    ended (the sender is to see `error`; None: the stream broke). `ack`: the newest acknowledgement on its way, or -1.
    """

    sender: int
    epoch: int
    token: int
    first_index: int
    incarnation: Value
    state: str = "new"
    batches: tuple[Value, ...] = ()
    ack: int = -1
    error: Value | None = None
    is_used: bool = True


class Replication(NamedTuple):
    """A master's stream to its slave; each end may see its end at another time.

    `phase`: opening; greeted (the slave has it, and waits until its disk is quiet); greeting (what the slave has is on
    its way); copying, filling (the copies are being made equal); ready. `confirm`: the newest one on its way.
    """

    epoch: int
    slave: Value
    phase: str = "opening"
    messages: tuple[tuple[Value | None, int], ...] = ()
    confirm: tuple[int, bytes] | None = None
    is_master_open: bool = True
    is_slave_open: bool = False


class Group(NamedTuple):
    members: tuple[Member, Member]
    appends: tuple[Append, ...] = ()
    replications: tuple[Replication, ...] = ()
