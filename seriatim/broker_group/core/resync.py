"""What a returning or blank member has to do to hold again all that it should (protocol.md 7).

The measure is the chain document with its certificates, never the peer (H5). Every action is repeated until the plan is
empty, and each is one atomic write or a run of them that can stop anywhere, so a crash in between costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.protocol.chain import ChainDocument, Link, LinkState, Subscription, Whose
from seriatim.protocol.names import Epoch, Incarnation, Index, MemberName, QueueId


@dataclass(frozen=True, slots=True)
class Holding:
    """What the disk has of a link. `hash_at_end`: running hash at the recorded end, None where no batch ends there.

    `is_readable`: else nobody knows what it has beside the record, and nothing is done but to drop it.
    """

    record: LinkRecord
    next_index: Index
    hash_at_end: bytes | None = None
    is_readable: bool = True

    @property
    def has_it(self) -> bool:
        """Exactly the records below the end, with the hash of the certificate. What was abandoned may have more (H21)."""
        record = self.record
        return self.hash_at_end == record.end_hash and (self.next_index == record.end or record.is_abandoned)


@dataclass(frozen=True, slots=True)
class Drop:
    """The chain no longer keeps it."""

    queue_id: QueueId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Adopt:
    """Record the end that the chain has, and remove what lies at or beyond it."""

    queue_id: QueueId
    epoch: Epoch
    end: Index
    end_hash: bytes
    is_abandoned: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Take from the peer what is missing, and compare with the certificate.

    `from_index` 0 where what is here can't be the start of what the certificate names.
    """

    queue_id: QueueId
    epoch: Epoch
    from_index: Index
    end: Index


@dataclass(frozen=True, slots=True)
class Lack:
    """Note whose commits may be missing here: no others than before."""

    queue_id: QueueId
    epoch: Epoch
    of: tuple[Whose, ...]


@dataclass(frozen=True, slots=True)
class TakeCursors:
    """Take the further cursors from the peer. `of`: the subscriptions of which they may be missing here."""

    queue_id: QueueId
    epoch: Epoch
    of: tuple[str, ...]


Action = Drop | Adopt | Copy | Lack | TakeCursors


def plan(name: MemberName, documents: Mapping[QueueId, ChainDocument], held: Iterable[Holding]) -> tuple[Action, ...]:
    """What has to be done now, given the chain documents of queues; empty: in sync, unless something is `unfinished`.

    Of a queue without a document nothing is known. Links whose end isn't recorded are left alone.
    """
    by_queue: dict[QueueId, dict[Epoch, Holding]] = {}
    for holding in held:
        by_queue.setdefault(holding.record.queue_id, {})[holding.record.epoch] = holding
    actions: list[Action] = []
    for queue_id, document in sorted(documents.items()):
        of_queue = by_queue.get(queue_id, {})
        actions += [Drop(queue_id, epoch) for epoch in droppable(document, sorted(of_queue))]
        for link in () if document.is_deleted else document.links:
            certificate, here = link.certificate, of_queue.get(link.epoch)
            if link.group != name.group or certificate is None or (here is not None and not here.is_readable):
                continue
            wanted = Adopt(queue_id, link.epoch, certificate.end, certificate.link_hash, certificate.is_abandoned)
            actions += [*_for_records(wanted, here), *_for_cursors(document, link, name, here)]
    return tuple(actions)


def droppable(document: ChainDocument, held: Iterable[Epoch]) -> tuple[Epoch, ...]:
    """Of the links held of a queue, those below the first kept one; all where the queue is deleted.

    A link at or above it that the document doesn't name is not touched: the document may be older than the link.
    """
    return tuple(epoch for epoch in held if document.is_deleted or epoch < document.dropped.epoch)


def unfinished(
    name: MemberName,
    me: Incarnation,
    documents: Mapping[QueueId, ChainDocument],
    held: Collection[Holding],
    told: Callable[[LinkKey], str],
) -> dict[QueueId, str]:
    """Why this member may soon lack something, though nothing is to be done now: by queue, of those of which that can be.

    `told`: a link for people, as whoever else speaks of it here has it: a registration that changes to and fro wakes all who watch.

    A link of its group that hasn't ended, and that this process can take no more records for, gets its end from the other
    member: in sync is only who holds that, too (invariant 6). Who waits for a lost link would wait for an operator. And
    what was told here counts, however old the documents are.
    """
    found: dict[QueueId, str] = {}
    sealed = set()
    for holding in held:
        record = holding.record
        if record.end is not None and not record.is_abandoned and not holding.has_it:
            found.setdefault(record.queue_id, f"{told(record.key)} isn't whole here")
        if record.is_sealed:
            sealed.add(record.key)
    for queue_id, document in documents.items():
        for link in () if document.is_deleted else document.links:
            if link.group != name.group or link.state in (LinkState.SEALED, LinkState.LOST):
                continue
            side = link.side(name.member)
            if side is None or side.incarnation != me or (queue_id, link.epoch) in sealed:
                found.setdefault(queue_id, f"{told((queue_id, link.epoch))}: its end isn't recorded yet")
    return _missing_cursors(name, documents, held, told) | found


def _missing_cursors(
    name: MemberName,
    documents: Mapping[QueueId, ChainDocument],
    held: Iterable[Holding],
    told: Callable[[LinkKey], str],
) -> dict[QueueId, str]:
    """Cursors that are lost here and stale on the other member, of a link that somebody has yet to read."""
    found: dict[QueueId, str] = {}
    for holding in held:
        record = holding.record
        document = documents.get(record.queue_id)
        if document is None or not record.lacks_cursors:
            continue
        lost = [one.name for one in _missing(document, record) if _are_stale_there(document, record.epoch, name, one)]
        if lost:
            found.setdefault(
                record.queue_id, f"{told(record.key)}: the newest cursors are lost; seek {', '.join(lost)}"
            )
    return found


def _missing(document: ChainDocument, record: LinkRecord) -> list[Subscription]:
    """The subscriptions that have yet to read a link and of which commits may be missing here."""
    return [one for one in document.readers_of(record.epoch) if record.lacks_of(one.whose)]


def _are_stale_there(document: ChainDocument, epoch: Epoch, name: MemberName, subscription: Subscription) -> bool:
    """Whether the other member missed a commit of theirs, so that its cursor is none to take (H7)."""
    note = document.stale_note(epoch, name.peer.member)
    return note is not None and note.is_of(subscription)


def _for_cursors(document: ChainDocument, link: Link, name: MemberName, holding: Holding | None) -> list[Action]:
    """Whose cursors to take from the other member, once the records are here; first of all is noted whose are to take.

    Whoever comes to the link after that, or is sought, begins without a cursor, and his commits come here or are noted
    (H9): so what is missing ends, at the latest, when all of them were sought, also where no disk is left that has it.
    """
    if link.end == 0 or (holding is not None and not holding.record.lacks_cursors):
        return []
    record = LinkRecord(document.queue_id, link.epoch) if holding is None else holding.record
    missing = _missing(document, record)
    of = tuple(one.whose for one in missing)
    if of != record.lacks:
        return [Lack(document.queue_id, link.epoch, of)]
    if any(_are_stale_there(document, link.epoch, name, one) for one in missing):
        return []
    is_here = holding is not None and holding.has_it
    return [TakeCursors(document.queue_id, link.epoch, tuple(one.name for one in missing))] if is_here else []


def _for_records(wanted: Adopt, holding: Holding | None) -> list[Action]:
    if holding is None:
        return [wanted]
    record, end = holding.record, wanted.end
    if record.ending != (end, wanted.end_hash, wanted.is_abandoned):
        return [wanted]
    if holding.has_it:
        return []
    if holding.next_index > end and holding.hash_at_end == record.end_hash:
        return [wanted]  # what lies beyond was still to be removed
    return [Copy(*record.key, holding.next_index if holding.next_index < end else Index(0), end)]
