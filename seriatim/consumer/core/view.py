"""The queue as a coordinator shows it: the part a reader decides by."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter

from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Incarnation, Index, Offset, SubscriptionId, Token


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a queue: before the record at `index` of link `epoch`. Places compare in the queue's order."""

    epoch: Epoch
    index: Index


@dataclass(frozen=True, slots=True)
class Grant:
    """What an elected reader holds, in whose name it fetches and commits: fencing token, and the subscription's generation. All 0: nobody's."""

    subscription_id: SubscriptionId = SubscriptionId(0)
    generation: Generation = Generation(0)
    token: Token = Token(0)


NOBODYS = Grant()
_epoch_of = attrgetter("epoch")
START = Place(Epoch(0), Index(0))
"""Before the first link."""


@dataclass(frozen=True, slots=True)
class Side:
    """A member of a link, as it can be reached now.

    `incarnation`: who answers at `address`; None where nobody is registered there. `direct`: where it takes Fetch without gRPC;
    empty: nowhere.
    """

    group: str
    member: str
    address: str
    incarnation: Incarnation | None
    direct: str = ""

    @property
    def is_registered(self) -> bool:
        return self.incarnation is not None and self.address != ""

    def __str__(self) -> str:
        return f"{self.group}-{self.member}"


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link of the chain.

    `base`: offset of index 0, None while an earlier end is lost. `end`: exclusive, None until it is recorded.
    `marks`: at the link's start; only to be used where `are_marks_known`. `committed`: what a member says, where it
    was asked; nothing more was acknowledged by then where `is_committed_exact`. `answered`: the members (`a`, `b`) on whose seal the end rests.
    """

    epoch: Epoch
    state: LinkState
    base: Offset | None
    end: Index | None
    master: Side
    slave: Side
    marks: Mapping[str, int]
    are_marks_known: bool = True
    is_abandoned: bool = False
    committed: Index | None = None
    is_committed_exact: bool = False
    answered: tuple[str, ...] = ()

    @property
    def registered(self) -> list[Side]:
        """The sides where somebody answers; the slave first: it has less to do."""
        return [side for side in (self.slave, self.master) if side.is_registered]

    def choice(self, avoid: str, first: Collection[str] = ()) -> Side | None:
        """Whom to ask: not `avoid` where there is another, and of the rest one of `first`. None where nobody is registered."""
        found = sorted(self.registered, key=lambda side: (side.member == avoid, side.member not in first))
        return found[0] if found else None

    @property
    def nobody_there(self) -> str:
        """What is waited for where `choice` finds nobody, for a person."""
        return f"{self.master} or {self.slave}: neither is registered"

    def side(self, member: str) -> Side:
        return self.slave if self.slave.member == member else self.master


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """`consume_list`: epochs not yet consumed, in order; only the first takes commits."""

    subscription_id: SubscriptionId
    name: str
    generation: Generation
    consume_list: tuple[Epoch, ...]


@dataclass(frozen=True, slots=True)
class ChainView:
    """A snapshot of a queue. `links` by rising epoch. `ahead`: addresses of the members that a switch would lead to now.

    `created_at_ms`: when the queue was made, by a coordinator's clock; 0 where it isn't told. Ids counted from 1 in each cluster once, so
    outside of the cluster it takes both to name a queue for good. `first_offset`: what is below was let go; 0 where it isn't told.
    `may_be_outdated`: somebody may know of more records, by a newer chain than ZooKeeper has.
    """

    cluster: str
    queue_id: int
    queue: str
    version: ChainVersion
    links: tuple[LinkView, ...] = ()
    subscriptions: tuple[SubscriptionView, ...] = ()
    is_deleted: bool = False
    ahead: tuple[str, ...] = ()
    created_at_ms: int = 0
    first_offset: Offset = Offset(0)
    may_be_outdated: bool = False

    def link(self, epoch: Epoch) -> LinkView | None:
        at = bisect_left(self.links, epoch, key=_epoch_of)
        return self.links[at] if at < len(self.links) and self.links[at].epoch == epoch else None

    def next_after(self, epoch: Epoch) -> LinkView | None:
        """The next link of the chain."""
        at = bisect_right(self.links, epoch, key=_epoch_of)
        return self.links[at] if at < len(self.links) else None

    def subscription(self, subscription_id: SubscriptionId) -> SubscriptionView | None:
        return next((one for one in self.subscriptions if one.subscription_id == subscription_id), None)

    @property
    def earliest(self) -> Offset:
        """Offset of the first record kept; where none is, of the next one that comes."""
        first = self.links[0].base if self.links else None
        return self.first_offset if first is None else first

    @property
    def latest(self) -> Offset:
        """Offset up to which records can be read in order now, exclusive; needs `LinkView.committed`."""
        reached = self.earliest
        for link in self.links:
            if link.base is None:
                break
            reached = Offset(link.base + (link.committed or 0))
            if link.end is None:
                break
            reached = Offset(link.base + link.end)
        return reached

    @property
    def is_latest_known(self) -> bool:
        """Whether all that was acknowledged lies below `latest`: else it is as much as somebody knows of, who knows less than the master, or nobody."""
        if self.may_be_outdated:
            return False
        for link in self.links:
            if link.base is None:
                return False
            if link.end is None:
                return link.is_committed_exact or link.state is LinkState.OPENING
        return True

    def offset_of(self, place: Place) -> Offset | None:
        """The offset of a place, at most that of its link's end; None where the link isn't in the chain, or nobody knows yet where it starts."""
        link = self.link(place.epoch)
        if link is None or link.base is None:
            return None
        return Offset(link.base + (place.index if link.end is None else min(place.index, link.end)))

    def place_of(self, offset: Offset) -> Place:
        """The place of an offset. One in the gap that an abandoned link leaves is the start of the link behind the gap.

        START where no link is kept: a reader goes on from there as from the end of a link, at the next one that comes.
        Raises InvalidArgument where the offset is no longer kept, or beyond a link whose end isn't known.
        """
        if offset < self.earliest:
            raise InvalidArgument(
                f"offset {offset} of queue {self.queue!r} is no longer kept, the first one is {self.earliest}",
                queue=self.queue,
                offset=offset,
                earliest=self.earliest,
            )
        place = START
        for link in self.links:
            if link.base is None:
                raise InvalidArgument(
                    f"nobody knows yet where offset {offset} of queue {self.queue!r} is: an earlier link's end is lost",
                    queue=self.queue,
                    offset=offset,
                    epoch=link.epoch,
                )
            if offset < link.base:
                return Place(link.epoch, Index(0))
            place = Place(link.epoch, Index(offset - link.base))
            if link.end is None or place.index < link.end:
                return place
            place = Place(link.epoch, link.end)
        return place
