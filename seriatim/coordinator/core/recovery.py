"""A queue's chain made again from a copy that a member keeps, after ZooKeeper lost it.

A copy is what ZooKeeper had at some moment, so whatever follows from it is what would have followed then, as long as nothing
came after it that somebody acts by. What may have come after it unseen are elections and subscriptions: their numbers go on
far beyond. Members whose disks know more than the copy say so, and nothing is done by it, as by the chain before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from seriatim.coordinator.core.chain import opened, without_empty
from seriatim.protocol.chain import ChainDocument, Link, LinkState, Subscription
from seriatim.protocol.errors import ChainSetBack
from seriatim.protocol.names import ChainVersion, QueueId, SubscriptionId, Token

BEYOND = 1000
"""So many versions, tokens and subscriptions at most are taken to have come after a copy; it is seconds old."""


_WAY = (LinkState.OPENING, LinkState.OPEN, LinkState.CLOSING, LinkState.LOST, LinkState.SEALED)


@dataclass(frozen=True, slots=True)
class Copy:
    """A queue's chain, and whose it is."""

    document: ChainDocument
    version: ChainVersion
    holder: str


def is_same(one: ChainDocument, other: ChainDocument) -> bool:
    """Whether they are of one queue: a ZooKeeper that lost what it had given may have given an id to two (H16)."""
    return _who(one) == _who(other)


def _who(document: ChainDocument) -> tuple[QueueId, int, str]:
    return document.queue_id, document.created_at_ms, document.name


def newest(copies: Iterable[Copy], queue: str) -> Copy:
    """The copy to go on with. Raises ChainSetBack where there is none, or where there are two histories.

    It is the one with most links, and of those the one that knows most of the last link's way, whatever others wrote by a chain that was
    set back. Where two know the same, the one with more writes, the last of `copies` where they have as many.
    """
    rising = sorted(
        copies,
        key=lambda one: (_who(one.document), one.document.next_epoch, _way_of_last_link(one.document), one.version),
    )
    if not rising:
        what = f"no member that is registered keeps a copy of the chain of queue {queue}"
        raise ChainSetBack(
            f"{what}; of one that nobody ever sent to there is none: delete it, and make it again", queue=queue
        )
    last = rising[-1]
    for one in rising:
        if is_same(one.document, last.document):
            check_same(one, last)
    return last


def _way_of_last_link(document: ChainDocument) -> int:
    """How far on its way the last link is; none of it where it was closed unasked, because nobody had been let send to it."""
    last = document.last_link
    if last is None:
        return _WAY.index(LinkState.SEALED)  # and let go since
    return 0 if _is_unasked(last) else _WAY.index(last.state)


def _is_unasked(link: Link) -> bool:
    """Whether it was closed as empty, because nobody had been let send to it."""
    certificate = link.certificate
    return certificate is not None and not certificate.answered and not certificate.is_abandoned


def check_same(one: Copy, other: Copy) -> None:
    """Raises ChainSetBack where they give an epoch to different links, or the other one knows nothing of its grant.

    In between somebody has sent by a chain that was set back.
    """
    for link in one.document.links:
        there = other.document.link(link.epoch)
        if there is None:
            continue
        if _is_unasked(there) and not _is_unasked(link) and link.state is not LinkState.OPENING:
            raise ChainSetBack(
                f"link {link.epoch} is {link.state} in the chain of {one.holder}, and was closed unasked in that of "
                f"{other.holder}, which went on: both may have been sent to",
                queue=one.document.name,
                epoch=link.epoch,
            )
        if there.sides != link.sides:
            raise ChainSetBack(
                f"link {link.epoch} is on {link.group} in the chain of {one.holder}, and another one on {there.group} "
                f"in that of {other.holder}: both have been sent to",
                queue=one.document.name,
                epoch=link.epoch,
            )


def recovered(copy: Copy) -> ChainDocument:
    """The chain to go on with: whoever is elected next gets a token that nobody had, whoever subscribes an id.

    A link that is opening in the copy may have been granted since (H13): closed unasked, what was acknowledged there would be cut off.
    """
    document, last = copy.document, copy.document.last_link
    if last is not None and last.state is LinkState.OPENING:
        document = opened(document, last.epoch)
    return replace(
        document,
        sender_token=Token(document.sender_token + BEYOND),
        sender_node="",
        next_subscription_id=SubscriptionId(document.next_subscription_id + BEYOND),
        subscriptions=tuple(
            replace(one, reader_token=Token(one.reader_token + BEYOND), reader_node="")
            for one in document.subscriptions
        ),
    )


def with_last_seeks(document: ChainDocument, copies: Iterable[Copy]) -> ChainDocument:
    """Each subscription where it was sought last, as the copy that tells of it has it, and every link since.

    Else the member with that copy would say for good that the chain is an old one, as after a recovery in which it was away.
    """
    known = [copy.document for copy in copies if is_same(copy.document, document)]
    subscriptions = tuple(_sought_last(document, one, known) for one in document.subscriptions)
    if subscriptions == document.subscriptions:
        return document
    return without_empty(replace(document, subscriptions=subscriptions))


def _sought_last(document: ChainDocument, subscription: Subscription, known: Iterable[ChainDocument]) -> Subscription:
    for copied in known:
        for one in copied.subscriptions:
            if one.subscription_id == subscription.subscription_id and one.generation > subscription.generation:
                epochs = (link.epoch for link in document.links)
                unread = tuple(epoch for epoch in epochs if epoch in one.consume_list or epoch >= copied.next_epoch)
                subscription = replace(one, consume_list=unread, reader_token=subscription.reader_token, reader_node="")
    return subscription


def goes_on_from(now: Copy, copy: Copy) -> bool:
    """Whether the chain that is there now was recovered from this copy, or one as new, by a call that was cut off."""
    is_beyond = now.document.sender_token >= copy.document.sender_token + BEYOND
    return is_beyond and now.document.next_epoch >= copy.document.next_epoch


def version(copies: Iterable[Copy]) -> ChainVersion:
    """The version that the recovered chain needs: no member was told a higher one."""
    return ChainVersion(max(one.version for one in copies) + BEYOND)
