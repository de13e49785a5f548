"""The chain document: all that decides a queue's order, in one ZooKeeper node with one version.

The types are here, and their JSON in `chain_json`, because coordinators write the document and members watch it. Every change of
it is a pure function in `coordinator.core`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from seriatim.protocol.names import (
    Epoch,
    Generation,
    Incarnation,
    Index,
    MemberName,
    Offset,
    QueueId,
    SubscriptionId,
    Token,
)


class Durability(StrEnum):
    """What an acknowledgement promises, on both members (protocol.md 8)."""

    SYNC = "sync"
    INTERVAL = "interval"
    ASYNC = "async"
    MEMORY = "memory"

    @property
    def survives_restart(self) -> bool:
        """Whether a member that restarted still holds all that it acknowledged."""
        return self in (Durability.SYNC, Durability.INTERVAL)


class LinkState(StrEnum):
    """opening: listed, told to nobody. open: may have been granted. closing: being sealed.

    sealed: its end is recorded. lost: closed while nobody could tell the end.
    """

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    SEALED = "sealed"
    LOST = "lost"


class Readmit(StrEnum):
    """When a group may come back to the send list: with nothing left to read on it, or as soon as it is in sync (H14)."""

    DRAINED = "drained"
    IN_SYNC = "in-sync"


ROTATE_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What an operator chose for a queue. Changes hold from the next link on.

    `groups`: the groups that may serve it, in order; empty: every group. `retention_ms`: how long a drained link is
    kept after its seal. `flush_ms`: between flushes, for `interval` and `async`. `rotate_ms`: how long a link is in use, about,
    until a planned switch; 0: until people ask for one.
    """

    durability: Durability = Durability.SYNC
    flush_ms: int = 5
    groups: tuple[str, ...] = ()
    retention_ms: int = 24 * 3600 * 1000
    readmit: Readmit = Readmit.DRAINED
    max_record_bytes: int = 1024 * 1024
    rotate_ms: int = ROTATE_MS


@dataclass(frozen=True, slots=True)
class ChainMember:
    """One side of a link: the place in the group and who stood there when the link was made."""

    name: MemberName
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is recorded when a link is sealed. Never changed, but for `chain_hash` and `marks`, which wait for what comes before.

    `end`: exclusive. `answered`: the incarnations whose answer decided it. `is_whole`: no acknowledged record can be
    missing. `marks`: at the end, for readers. `marks_on_two`: at the last index known to be on two members, for
    senders (H2). `link_hash`, `chain_hash`: 32 bytes; the latter None while an earlier end is lost.
    """

    end: Index
    answered: tuple[Incarnation, ...]
    durability: Durability
    is_whole: bool
    marks: Mapping[str, int]
    marks_on_two: Mapping[str, int]
    link_hash: bytes
    chain_hash: bytes | None
    sealed_at_ms: int
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """One term of service of one group. `base` is None while an earlier end is lost.

    `marks_on_two` at its start: what OpenLink tells the members. Invariant: state is SEALED exactly where there is a
    certificate.
    """

    epoch: Epoch
    group: str
    master: ChainMember
    slave: ChainMember
    state: LinkState
    durability: Durability
    flush_ms: int
    base: Offset | None
    marks_on_two: Mapping[str, int]
    created_at_ms: int
    certificate: Certificate | None = None

    @property
    def end(self) -> Index | None:
        return None if self.certificate is None else self.certificate.end

    @property
    def sides(self) -> tuple[ChainMember, ChainMember]:
        return self.master, self.slave

    def side(self, member: str) -> ChainMember | None:
        """The side on which `member` ("a" or "b") of the group stands."""
        return next((side for side in self.sides if side.name.member == member), None)


Whose = tuple[SubscriptionId, Generation]
"""Whose a cursor is: a subscription's, in one of its generations."""


def whose_from(content: Iterable[Iterable[int]]) -> tuple[Whose, ...]:
    """As JSON, or a message, brings them: each a pair of numbers."""
    return tuple((SubscriptionId(subscription_id), Generation(generation)) for subscription_id, generation in content)


@dataclass(frozen=True, slots=True)
class Subscription:
    """`consume_list`: epochs not yet consumed, in order; only the first is read. `position`: where this generation starts.

    `reader_node`: the election node that got `reader_token`. `cause_id`: of the call that put it where it starts, by making or
    seeking it; empty where a version before this was asked.
    """

    subscription_id: SubscriptionId
    name: str
    generation: Generation
    reader_token: Token
    reader_node: str
    consume_list: tuple[Epoch, ...]
    position_epoch: Epoch
    position_index: Index
    created_at_ms: int
    cause_id: str = ""

    @property
    def whose(self) -> Whose:
        """Whose its cursors are now."""
        return self.subscription_id, self.generation


@dataclass(frozen=True, slots=True)
class StaleCursors:
    """A note that `member` ("a" or "b") of a link's group may lack cursors there, so that those it has must not be used (H7).

    `of`: whose: of each that had a commit, or was to start at one, while the member was away.
    """

    epoch: Epoch
    member: str
    of: tuple[Whose, ...]

    def is_of(self, subscription: Subscription) -> bool:
        return subscription.whose in self.of


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What an operator gave up for good; every status shows it.

    `from_seqs`: for each source of which records are known to have been in what was given up, the first seq that may be.
    Whether such a record was sent again, and is in a later link, nobody can tell from the chain.
    """

    epoch: Epoch
    what: str
    at_ms: int
    from_seqs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dropped:
    """What stands for the links that retention let go: the state of the chain where the first kept link starts."""

    epoch: Epoch
    offset: Offset
    chain_hash: bytes
    marks: Mapping[str, int]
    marks_on_two: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ChainDocument:
    """See the module. `links` by rising epoch. `send_list`: its first entry is the head. `stale_cursors`: one a link and member."""

    cluster: str
    queue_id: QueueId
    name: str
    settings: QueueSettings
    created_at_ms: int
    dropped: Dropped
    sender_token: Token = Token(0)
    sender_node: str = ""
    next_epoch: Epoch = Epoch(1)
    next_subscription_id: SubscriptionId = SubscriptionId(1)
    send_list: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    subscriptions: tuple[Subscription, ...] = ()
    stale_cursors: tuple[StaleCursors, ...] = ()
    abandoned: tuple[Abandoned, ...] = ()
    is_deleted: bool = False

    @property
    def last_link(self) -> Link | None:
        return self.links[-1] if self.links else None

    def link(self, epoch: Epoch) -> Link | None:
        return next((link for link in self.links if link.epoch == epoch), None)

    def subscription(self, name: str) -> Subscription | None:
        return next((one for one in self.subscriptions if one.name == name), None)

    def deleted_of(self, subscription_ids: Collection[SubscriptionId]) -> set[SubscriptionId]:
        """Those that the queue had, and has no more; their ids are never given again. Of one made since it says nothing."""
        there = {one.subscription_id for one in self.subscriptions}
        return {one for one in subscription_ids if one not in there and one < self.next_subscription_id}

    def readers_of(self, epoch: Epoch) -> tuple[Subscription, ...]:
        """The subscriptions that have yet to read a link to its end."""
        return tuple(one for one in self.subscriptions if epoch in one.consume_list)

    def stale_note(self, epoch: Epoch, member: str) -> StaleCursors | None:
        return next((one for one in self.stale_cursors if (one.epoch, one.member) == (epoch, member)), None)
