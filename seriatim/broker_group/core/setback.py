"""What shows that ZooKeeper was set back: somebody put an older copy of it in its place, or its newest writes were lost.

All that a member keeps of a link was said by a chain document. What the document that is there now can't explain was said by
a later one, which is gone. By the older one epochs would be given, and ends recorded, a second time, and what was
acknowledged in between would be cut off on both disks. So a member does nothing by such a document, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from seriatim.broker_group.core.link_record import LinkRecord, Role
from seriatim.broker_group.core.resync import Holding
from seriatim.protocol.chain import ChainDocument, Link, LinkState
from seriatim.protocol.names import ChainVersion, Generation, Incarnation, MemberName, QueueId, SubscriptionId


@dataclass(frozen=True, slots=True)
class SeenChain:
    """A chain document, the version in which it was read, and the node's content."""

    document: ChainDocument
    version: ChainVersion
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class KeptChain:
    """Which copy of a queue's chain is on this disk."""

    version: ChainVersion
    queue: str
    created_at_ms: int
    generations: Mapping[SubscriptionId, Generation] = field(default_factory=dict)
    """Of its subscriptions: where they were sought."""

    @staticmethod
    def of(document: ChainDocument, version: ChainVersion) -> KeptChain:
        """What is to be known of a copy."""
        generations = {one.subscription_id: one.generation for one in document.subscriptions}
        return KeptChain(version, document.name, document.created_at_ms, generations)


def queues(
    name: MemberName,
    disk_id: str,
    chains: Mapping[QueueId, SeenChain],
    held: Iterable[Holding],
    kept: Mapping[QueueId, KeptChain],
) -> dict[QueueId, str]:
    """The queues of which this disk knows more than their chains, and what.

    `held` and `kept` have to be older than `chains`, and these not older than ZooKeeper was then: what was told here comes
    from a document that ZooKeeper had. A copy also shows what no link was told: that a subscription was sought. A deleted
    queue's chain may be an older one, but not another queue's.
    """
    found: dict[QueueId, str] = {}
    for holding in held:
        queue_id = holding.record.queue_id
        if queue_id in chains and queue_id not in found:
            document, version = chains[queue_id].document, chains[queue_id].version
            what = another_queue(document.name, document.created_at_ms, kept.get(queue_id), (holding.record,))
            if not what and not document.is_deleted:
                what = _unexplained(name, disk_id, document, version, holding)
            if what:
                found[queue_id] = what
    for queue_id in kept.keys() & chains.keys() - found.keys():
        seen, copy = chains[queue_id], kept[queue_id]
        what = another_queue(seen.document.name, seen.document.created_at_ms, copy, ())
        if not what and not seen.document.is_deleted:
            what = _older_than(copy, seen)
        if what:
            found[queue_id] = what
    return found


def another_queue(queue: str, created_at_ms: int, copy: KeptChain | None, records: Iterable[LinkRecord]) -> str:
    """How what is here of an id is another queue's than this one, which got it after ZooKeeper had lost what was given (H16).

    `created_at_ms` 0: it isn't told. A link that was only ever sealed here says no name.
    """
    if copy is not None:
        if copy.queue != queue:
            return f"it keeps the chain of queue {copy.queue}, under the id of queue {queue}"
        if created_at_ms and copy.created_at_ms != created_at_ms:
            return f"it keeps the chain of the queue {queue} that was made {_apart(copy.created_at_ms, created_at_ms)}"
        return ""
    other = next((one for one in records if one.queue not in ("", queue)), None)
    return "" if other is None else f"its link {other.epoch} is of queue {other.queue}, under the id of queue {queue}"


def _apart(copied_ms: int, there_ms: int) -> str:
    return f"{abs(there_ms - copied_ms) // 1000:,} s {'before' if copied_ms < there_ms else 'after'} the one that has its id"


def _older_than(copy: KeptChain, seen: SeenChain) -> str:
    """What shows that the copy came later; the version alone doesn't, once others were elected by the old chain."""
    if copy.version > seen.version:
        return f"it keeps version {copy.version} of the chain, which is at {seen.version}"
    for one in seen.document.subscriptions:
        known = copy.generations.get(one.subscription_id, one.generation)
        if known > one.generation:
            return f"subscription {one.name} was sought to generation {known}, in the chain to {one.generation}"
    return ""


def _unexplained(
    name: MemberName, disk_id: str, document: ChainDocument, version: ChainVersion, holding: Holding
) -> str:
    record = holding.record
    if record.epoch >= document.next_epoch:
        return f"it has link {record.epoch}, the chain none after {document.next_epoch - 1}"
    if record.chain_version > version:
        return f"link {record.epoch} was told version {record.chain_version} of the chain, which is at {version}"
    if record.token > document.sender_token:
        return f"link {record.epoch} was told of sender {record.token}, the chain of none after {document.sender_token}"
    link = document.link(record.epoch)
    return "" if link is None else _differing(name, disk_id, link, holding)


def _differing(name: MemberName, disk_id: str, link: Link, holding: Holding) -> str:
    """How the chain's link is another one than this disk has under its epoch."""
    record, certificate = holding.record, link.certificate
    side = link.side(name.member)
    opened = Incarnation(disk_id, record.opened_start)
    if link.group != name.group or side is None:
        if not record.opened_start and not holding.next_index and record.end is None:
            return ""  # a Seal that an earlier version kept, and that was for whoever had this address before
        return f"it has link {link.epoch}, which is {link.group}'s in the chain"
    if record.opened_start and side.incarnation != opened:
        return f"link {link.epoch} was made for {opened}, in the chain it is for {side.incarnation}"
    was_granted = link.state is not LinkState.OPENING and (
        certificate is None or certificate.is_abandoned or bool(certificate.answered)
    )
    if not was_granted and holding.next_index > 0:
        return f"link {link.epoch} holds {holding.next_index} records, in the chain nobody was let send to it"
    if certificate is None or certificate.is_abandoned:
        return ""
    return changed_end(record, LinkRecord(*record.key, end=certificate.end, end_hash=certificate.link_hash))


def changed_end(record: LinkRecord, told: LinkRecord) -> str:
    """How an end that is told differs from the one that was recorded here before: it is final, unless an operator gives it up."""
    if record.end is None or told.is_abandoned or record.is_abandoned:
        return ""
    if (record.end, record.end_hash) == (told.end, told.end_hash):
        return ""
    return f"link {record.epoch} ends at {record.end} here, in the chain at {told.end}"


def opened_before(record: LinkRecord, start: int, role: Role, peer: Incarnation) -> str:
    """How a link that is here is another one than the one to be opened, for this start of the process: its sides never change."""
    if record.opened_start == 0:
        return f"link {record.epoch} ended at {record.end} here" if record.end else ""
    if (record.opened_start, record.role, record.peer) == (start, role, peer):
        return ""
    return f"link {record.epoch} was opened here for another start of the process, or with another peer"
