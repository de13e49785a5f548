"""Every change of the subscriptions of a chain document, as pure functions (protocol.md 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from seriatim.coordinator.core.chain import without_empty
from seriatim.coordinator.core.chain_point import point_before
from seriatim.protocol.chain import ChainDocument, LinkState, StaleCursors, Subscription, Whose
from seriatim.protocol.errors import (
    ChainSetBack,
    Fenced,
    InvalidArgument,
    SubscriptionExists,
    UnknownSubscription,
    Waiting,
)
from seriatim.protocol.names import Epoch, Generation, Index, SubscriptionId, Token

ANY_SUBSCRIPTION = SubscriptionId(0)
"""None has this id: whichever has the name."""
EARLIEST = "earliest"
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """An index in a link, and the links from there on that are still to be read."""

    epoch: Epoch
    index: Index
    consume_list: tuple[Epoch, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """How far an open link is committed, as its members tell: at least up to `index`.

    `is_exact`: its master says so, the very process that answers its sender. A slave hears of it later, and after a restart
    neither knows what was acknowledged last.
    """

    index: Index
    is_exact: bool


def found(document: ChainDocument, name: str) -> Subscription:
    """The subscription of this name. Raises UnknownSubscription."""
    subscription = document.subscription(name)
    if subscription is None:
        raise UnknownSubscription(
            f"queue {document.name} has no subscription {name}", queue=document.name, subscription=name
        )
    return subscription


def located(document: ChainDocument, where: str, committed: Committed | None) -> QueuePosition:
    """The position that `earliest`, `latest` or an offset means in the links still kept.

    `committed`: of the last link while it is open; None where nobody could tell. Raises InvalidArgument where the offset
    isn't there, Waiting where nobody can tell yet.
    """
    if where == EARLIEST:
        return _from_link(document, 0, Index(0))
    if where == LATEST:
        return _latest(document, committed)
    try:
        offset = int(where)
    except ValueError as error:
        raise InvalidArgument(f"{where!r} is no position: use earliest, latest or an offset") from error
    return _at_offset(document, offset, committed)


def _from_link(document: ChainDocument, number: int, index: Index) -> QueuePosition:
    links = document.links[number:]
    epoch = links[0].epoch if links else document.next_epoch
    return QueuePosition(epoch, index, tuple(link.epoch for link in links))


def _end_of_chain(document: ChainDocument) -> QueuePosition:
    return QueuePosition(document.next_epoch, Index(0), ())


def _latest(document: ChainDocument, committed: Committed | None) -> QueuePosition:
    last = document.last_link
    if last is None or last.state is LinkState.SEALED:
        return _end_of_chain(document)
    number = len(document.links) - 1
    if last.state is LinkState.OPENING:
        return _from_link(document, number, Index(0))
    if last.state is LinkState.OPEN and committed is not None and committed.is_exact:
        return _from_link(document, number, committed.index)
    raise Waiting(
        f"the end of link {last.epoch} ({last.state}) of queue {document.name} can't be told now",
        reasons={last.group: f"link {last.epoch} is {last.state}"},
    )


def _at_offset(document: ChainDocument, offset: int, committed: Committed | None) -> QueuePosition:
    earliest = document.dropped.offset
    if offset < earliest:
        raise InvalidArgument(f"the earliest offset still kept is {earliest}", queue=document.name, offset=offset)
    for number, link in enumerate(document.links):
        if link.base is None:
            raise Waiting(
                f"offset {offset} can't be found: the end of an earlier link is lost",
                reasons={link.group: "an earlier link is lost"},
            )
        if offset < link.base:
            return _from_link(document, number, Index(0))  # a gap behind an abandoned link
        known = committed if link.state is LinkState.OPEN else None
        end = link.end if known is None else known.index
        if end is not None and offset < link.base + end:
            return _from_link(document, number, Index(offset - link.base))
        if link.end is None and offset == link.base + (end or 0):
            return _from_link(document, number, Index(offset - link.base))
        is_known = link.end is not None or (known is not None and known.is_exact)
        if not is_known and link.state is not LinkState.OPENING:
            raise Waiting(
                f"offset {offset} can't be found: how far link {link.epoch} reaches isn't known now",
                reasons={link.group: f"link {link.epoch} is {link.state}, and its end isn't known"},
            )
    next_offset = point_before(document, document.next_epoch).offset
    # Less than that is in the gap behind an abandoned link that none follows yet.
    if next_offset is not None and offset <= next_offset:
        return _end_of_chain(document)
    raise InvalidArgument(f"offset {offset} is beyond the queue's end", queue=document.name, offset=offset)


def created(document: ChainDocument, name: str, position: QueuePosition, now_ms: int) -> ChainDocument:
    """A new subscription at `position`. Raises SubscriptionExists."""
    if document.subscription(name) is not None:
        raise SubscriptionExists(
            f"queue {document.name} has a subscription {name} already", queue=document.name, subscription=name
        )
    subscription = Subscription(
        subscription_id=document.next_subscription_id,
        name=name,
        generation=Generation(1),
        reader_token=Token(0),
        reader_node="",
        consume_list=position.consume_list,
        position_epoch=position.epoch,
        position_index=position.index,
        created_at_ms=now_ms,
    )
    return without_empty(
        replace(
            document,
            next_subscription_id=SubscriptionId(document.next_subscription_id + 1),
            subscriptions=(*document.subscriptions, subscription),
        )
    )


def sought(
    document: ChainDocument, name: str, position: QueuePosition, subscription_id: SubscriptionId = ANY_SUBSCRIPTION
) -> ChainDocument:
    """A new generation at `position`; nothing said about an older one counts any more (H9).

    `subscription_id`: of the one that is meant. Raises UnknownSubscription, also where another one has its name by now (H16).

    Its number is beyond those of readers, too, which a chain that was recovered has far beyond what its copy says: so it is
    new also to members that were told of a seek after that copy.
    """
    subscription = found(document, name)
    if subscription_id not in (ANY_SUBSCRIPTION, subscription.subscription_id):
        raise UnknownSubscription(f"subscription {name} was deleted, and made again", subscription=name)
    document = _without_moot_notes(_with(document, replace(subscription, consume_list=())))
    changed = replace(
        subscription,
        generation=Generation(max(subscription.generation, subscription.reader_token) + 1),
        consume_list=position.consume_list,
        position_epoch=position.epoch,
        position_index=position.index,
    )
    return without_empty(_with(document, changed))


def put_by(document: ChainDocument, name: str, cause_id: str) -> ChainDocument:
    """The subscription was made, or sought, by this call."""
    return _with(document, replace(found(document, name), cause_id=cause_id))


def is_put_by(document: ChainDocument, name: str, cause_id: str) -> bool:
    """Whether this very call did so at an earlier try, of which nobody heard, and nobody has sought it since."""
    subscription = document.subscription(name)
    return subscription is not None and subscription.cause_id == cause_id != ""


def deleted(document: ChainDocument, name: str, subscription_id: SubscriptionId = ANY_SUBSCRIPTION) -> ChainDocument:
    """The subscription goes, and with it the backlog it made. Its id is never used again. Raises UnknownSubscription.

    `subscription_id`: of the one that is meant. Where it has gone, nothing changes: another one may have the name by now.
    """
    if subscription_id not in (ANY_SUBSCRIPTION, *(one.subscription_id for one in document.subscriptions)):
        return document
    gone = found(document, name)
    left = replace(document, subscriptions=tuple(one for one in document.subscriptions if one is not gone))
    return _without_moot_notes(left)


def with_reader(document: ChainDocument, name: str, node: str) -> ChainDocument:
    """The next reader's token, given to the election node `node` (invariant 7)."""
    subscription = found(document, name)
    return _with(document, replace(subscription, reader_token=Token(subscription.reader_token + 1), reader_node=node))


def drained(
    document: ChainDocument, subscription_id: SubscriptionId, generation: Generation, epoch: Epoch
) -> ChainDocument:
    """The cursor is at the end of link `epoch`: it leaves the head of the consume list (invariant 5).

    Reported twice, for a subscription that is gone, or from before a seek (H9), it changes nothing. Raises Waiting for
    a link that isn't sealed or isn't the head: the member has to report it again.
    """
    subscription = next((one for one in document.subscriptions if one.subscription_id == subscription_id), None)
    if subscription is None or generation != subscription.generation or epoch not in subscription.consume_list:
        return document
    link = document.link(epoch)
    if subscription.consume_list[0] != epoch or link is None or link.state is not LinkState.SEALED:
        raise _not_drained(document, epoch, f"it isn't a sealed head of {subscription.name}'s consume list")
    changed = replace(subscription, consume_list=subscription.consume_list[1:])
    return _without_moot_notes(without_empty(_with(document, changed)))


def all_drained(
    document: ChainDocument, epoch: Epoch, of: Mapping[Whose, Token]
) -> tuple[ChainDocument, tuple[Whose, ...]]:
    """As `drained`, of several; and of whom nothing is left to say. Raises Waiting where that is nobody.

    `of`: with the token of the reader that committed the end; 0: a member of an earlier version doesn't say.
    """
    noted: list[Whose] = []
    refused: Waiting | None = None
    for (subscription_id, generation), by in of.items():
        try:
            _check_own(document, (subscription_id, generation), by, epoch)
            document = drained(document, subscription_id, generation, epoch)
        except Waiting as waiting:
            refused = waiting
        else:
            noted.append((subscription_id, generation))
    if refused is not None and not noted:
        raise refused
    return document, tuple(noted)


def _check_own(document: ChainDocument, whose: Whose, by: Token, epoch: Epoch) -> None:
    """Whether the end was committed by the reader of now, or is where it was to start. Raises Waiting where it is an earlier one's.

    Of that commit one member alone may have heard, and the reader of now was granted a place before it (invariant 7): it would be
    led past what it hasn't read. Where it wasn't granted any yet, it finds the end itself. Of a link that is left already nothing is
    to be said: a member that was started again tells of all that it keeps, whoever came to their ends.
    """
    one = next((one for one in document.readers_of(epoch) if one.whose == whose), None)
    if one is not None and by not in (0, one.reader_token):
        raise _not_drained(
            document, epoch, f"a newer reader of {one.name} was elected than the one that came to the end"
        )


def _not_drained(document: ChainDocument, epoch: Epoch, reason: str) -> Waiting:
    return Waiting(
        f"link {epoch} can't be drained yet: {reason}",
        queue=document.name,
        epoch=epoch,
        reasons={f"link {epoch}": reason},
    )


def with_stale_cursors(
    document: ChainDocument, epoch: Epoch, member: str, whose: Whose | None, token: Token = Token(0)
) -> ChainDocument:
    """A note that the cursors which `member` ("a" or "b") has of this link must not be used (H7).

    `whose`: None for those of all who read it. Of somebody who doesn't there is no note: see `_without_moot_notes`. `token`: of the
    reader for whose commit it is, if for anybody's. Raises Fenced where a newer one was elected (invariant 7), ChainSetBack of a link,
    or for somebody, that this chain hasn't come to: a note that nobody keeps would count as made.
    """
    if epoch >= document.next_epoch or (whose is not None and whose[0] >= document.next_subscription_id):
        what = f"link {epoch}" if whose is None else f"subscription {whose[0]} in link {epoch}"
        raise ChainSetBack(
            f"a member knows {what}, the chain of queue {document.name} doesn't: it is an old one", queue=document.name
        )
    for one in document.subscriptions:
        if one.whose == whose and 0 < token < one.reader_token:
            raise Fenced(
                "a newer reader was elected", queue=document.name, subscription=one.name, token=one.reader_token
            )
    before = document.stale_note(epoch, member)
    noted = () if before is None else before.of
    readers = tuple(one.whose for one in document.readers_of(epoch))
    of = tuple(one for one in readers if whose is None or one == whose or one in noted)
    return _with_note(document, before, StaleCursors(epoch, member, of) if of else None)


def without_stale_cursors(document: ChainDocument, epoch: Epoch, member: str) -> ChainDocument:
    """The end of such a note: the member was brought all that the other one has."""
    return _with_note(document, document.stale_note(epoch, member), None)


def _with_note(document: ChainDocument, before: StaleCursors | None, note: StaleCursors | None) -> ChainDocument:
    if note == before:
        return document
    others = tuple(one for one in document.stale_cursors if one is not before)
    return _without_moot_notes(replace(document, stale_cursors=others if note is None else (*others, note)))


def _without_moot_notes(document: ChainDocument) -> ChainDocument:
    """Without the notes of which nobody is left who reads the link.

    A cursor there is then never used again, whoever missed it: the link comes back to a list only under a new subscription
    or a new generation, which has no cursor yet, and of whose first commit there a member makes a note of its own. Else a
    disk replaced beside it would keep the group off the send lists: nobody could bring it cursors that count.
    """
    alive = (one for one in document.stale_cursors if any(map(one.is_of, document.readers_of(one.epoch))))
    return replace(document, stale_cursors=tuple(alive))


def start_index(subscription: Subscription, epoch: Epoch) -> Index:
    """Where this generation starts in a link: its position in the link it was put into, else 0."""
    return subscription.position_index if subscription.position_epoch == epoch else Index(0)


def _with(document: ChainDocument, subscription: Subscription) -> ChainDocument:
    return replace(
        document,
        subscriptions=tuple(
            subscription if one.subscription_id == subscription.subscription_id else one
            for one in document.subscriptions
        ),
    )
