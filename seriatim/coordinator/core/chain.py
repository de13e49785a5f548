"""Every change of the links and the send list of a chain document, as pure functions.

Each takes a document and gives the next one; the caller writes it by compare-and-set on the version it read. A change
that the state of the chain doesn't allow raises InvariantBroken: procedures look before they change, so it is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from seriatim.coordinator.core import chain_length, readmission
from seriatim.coordinator.core.chain_point import filled, point_before, unsettled
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol.chain import (
    Abandoned,
    Certificate,
    ChainDocument,
    ChainMember,
    Dropped,
    Link,
    LinkState,
    QueueSettings,
)
from seriatim.protocol.errors import InvariantBroken, UnknownQueue, Waiting
from seriatim.protocol.hashing import EMPTY_HASH
from seriatim.protocol.names import Epoch, Index, MemberName, Offset, QueueId, Token

LIVE = (LinkState.OPENING, LinkState.OPEN, LinkState.CLOSING)
"""States of a link that hasn't ended; only the last link of a chain may be in one of them (invariant 1)."""


def serving(document: ChainDocument) -> str:
    """The group of the live link, which is the head of the send list (invariant 1); empty where there is none."""
    last = document.last_link
    return last.group if last is not None and last.state in LIVE else ""


def switch_of(document: ChainDocument) -> tuple[Epoch, LinkState] | None:
    """Which link is being sealed, or opened: sending waits for the writes that do it (AcquireSend). None: no switch is under way."""
    last = document.last_link
    if last is None or last.state not in (LinkState.OPENING, LinkState.CLOSING):
        return None
    return last.epoch, last.state


def created(
    *, cluster: str, queue_id: QueueId, name: str, settings: QueueSettings, groups: tuple[str, ...], now_ms: int
) -> ChainDocument:
    """A new queue's document. `groups`: its first send list."""
    return ChainDocument(
        cluster=cluster,
        queue_id=queue_id,
        name=name,
        settings=settings,
        created_at_ms=now_ms,
        dropped=Dropped(Epoch(1), Offset(0), EMPTY_HASH, {}, {}),
        send_list=settings.groups or groups,
    )


def deleted(document: ChainDocument) -> ChainDocument:
    """Marked as deleted: the members let go what they hold of it, then the document goes."""
    return replace(document, is_deleted=True)


def deleted_error(document: ChainDocument) -> UnknownQueue:
    """For whoever asks something of a queue that is deleted."""
    return UnknownQueue(f"queue {document.name} was deleted", queue=document.name)


def altered(document: ChainDocument, settings: QueueSettings) -> ChainDocument:
    """With other settings. A link keeps those that it was made with.

    Groups that may serve the queue no longer leave the send list, but for one with a live link, which leaves when that ends
    (invariant 1); others come to its tail as any group does (invariant 6).
    """
    may_serve = {*settings.groups, serving(document)}
    send_list = tuple(one for one in document.send_list if not settings.groups or one in may_serve)
    return replace(document, settings=settings, send_list=send_list)


def with_sender(document: ChainDocument, node: str) -> ChainDocument:
    """The next sender's token, given to the election node `node` (invariant 7)."""
    return replace(document, sender_token=Token(document.sender_token + 1), sender_node=node)


def without_empty(document: ChainDocument) -> ChainDocument:
    """Links of which a subscription has nothing to read leave its consume list.

    Sealed ones without records, wherever they stand: else their group would count as one with backlog for as long as what comes
    before them isn't read. And, at the head, the one in which it starts, where that is at the end: nobody commits a
    cursor there, so no member would report it as drained.
    """
    ends = {link.epoch: link.end for link in document.links if link.end is not None}
    subscriptions = []
    for one in document.subscriptions:
        consume_list = tuple(epoch for epoch in one.consume_list if ends.get(epoch) != 0)
        while consume_list and consume_list[0] in ends:
            start = one.position_index if one.position_epoch == consume_list[0] else 0
            if start < ends[consume_list[0]]:
                break
            consume_list = consume_list[1:]
        subscriptions.append(replace(one, consume_list=consume_list))
    return replace(document, subscriptions=tuple(subscriptions))


def without_group(document: ChainDocument, group: str) -> ChainDocument:
    """The group leaves the send list. Raises InvariantBroken while a live link is on it (invariant 1)."""
    last = document.last_link
    if last is not None and last.state in LIVE and last.group == group:
        raise _wrong(document, last, "its group can't leave the send list")
    return replace(document, send_list=tuple(one for one in document.send_list if one != group))


def readmitted(document: ChainDocument, group: str) -> ChainDocument:
    """The group is put at the tail of the send list (invariant 6; the caller asked `readmission`)."""
    if group in document.send_list:
        raise InvariantBroken(f"{group} is on the send list already", queue=document.name)
    return replace(document, send_list=(*document.send_list, group))


def next_link(document: ChainDocument, registry: Registry, *, avoid: Mapping[str, str], now_ms: int) -> ChainDocument:
    """A new link, opening, for the first group that can take records (protocol.md 4, step 4; invariant 2).

    Groups that can't are taken off the send list. `avoid`: groups that were tried in vain by this very call, and why.
    Raises Waiting with a reason for each group where none is left.
    """
    last = document.last_link
    if last is not None and last.state in LIVE:
        raise _wrong(document, last, "no link can follow it")
    able = tuple(one for one in document.send_list if one not in avoid and not registry.send_obstacle(one))
    changed = replace(document, send_list=able)
    if not able:
        back = tuple(one for one in back_at_once(changed, registry) if one not in avoid)
        if not back:
            raise Waiting("no group can take records", reasons=obstacles(document, registry, avoid))
        for group in back:
            changed = readmitted(changed, group)
    group = changed.send_list[0]
    point = point_before(changed, changed.next_epoch)
    sides = {
        place: ChainMember(MemberName(group, place), state.incarnation)
        for place, state in registry.group(group).members.items()
    }
    link = Link(
        epoch=changed.next_epoch,
        group=group,
        master=sides["a"],
        slave=sides["b"],
        state=LinkState.OPENING,
        durability=changed.settings.durability,
        flush_ms=changed.settings.flush_ms,
        base=point.offset,
        marks_on_two=point.marks_on_two,
        created_at_ms=now_ms,
    )
    return replace(
        changed,
        next_epoch=Epoch(changed.next_epoch + 1),
        links=(*changed.links, link),
        subscriptions=tuple(
            replace(one, consume_list=(*one.consume_list, link.epoch)) for one in changed.subscriptions
        ),
    )


def back_at_once(document: ChainDocument, registry: Registry) -> tuple[str, ...]:
    """The groups that may be put at the send list's tail without asking their members what they hold.

    That a member is in sync may have been said before the end of its last link was recorded (invariant 6).
    """
    return tuple(one for one in readmission.eligible(document, registry) if not _unproven(document, one))


def _unproven(document: ChainDocument, group: str) -> tuple[Epoch, ...]:
    """The links on a group of which the chain doesn't tell that both members hold them to the end."""
    return tuple(link.epoch for link in document.links if link.group == group and not _is_on_two(link.certificate))


def _is_on_two(certificate: Certificate | None) -> bool:
    """Whether both members answered the seal, wholly, so that the end is what both have, and can't have lost it since."""
    if certificate is None or certificate.end == 0:
        return certificate is not None
    return certificate.is_whole and len(certificate.answered) == 2 and certificate.durability.survives_restart


def next_group(document: ChainDocument, registry: Registry) -> str:
    """Where a switch would lead now: the first group behind the one that serves on which a link can be opened; else empty."""
    now = serving(document)
    return next((one for one in document.send_list if one != now and not registry.link_obstacle(one)), "")


def can_switch(document: ChainDocument, registry: Registry, size_bytes: int) -> bool:
    """Whether another group could take over now, so that a planned switch doesn't have sending stand still for nothing.

    `size_bytes`: of the chain's node.
    """
    has_group = next_group(document, registry) != "" or back_at_once(document, registry) != ()
    return has_group and chain_length.switch_error(document, size_bytes) is None


def obstacles(document: ChainDocument, registry: Registry, avoid: Mapping[str, str]) -> dict[str, str]:
    """For each group that may serve the queue: why it can't take records now."""
    reasons = {}
    for group in readmission.candidates(document, registry) or ("any group",):
        why = avoid.get(group) or registry.link_obstacle(group)
        if not why and group not in document.send_list:
            unproven = _unproven(document, group)
            links = ", ".join(f"link {epoch}" for epoch in unproven)
            why = readmission.obstacle(document, registry, group) or (links and f"its members are asked for {links}")
        if why:
            reasons[group] = why
    return reasons


def opened(document: ChainDocument, epoch: Epoch) -> ChainDocument:
    """The last link, opening until now, may be granted (H13)."""
    link = _last(document, epoch, LinkState.OPENING)
    return _with_link(document, replace(link, state=LinkState.OPEN))


def closing(document: ChainDocument, epoch: Epoch) -> ChainDocument:
    """The last link, open until now, is being sealed."""
    link = _last(document, epoch, LinkState.OPEN)
    return _with_link(document, replace(link, state=LinkState.CLOSING))


def emptied(document: ChainDocument, epoch: Epoch, now_ms: int) -> ChainDocument:
    """The last link, never granted to anyone, ends as empty, without asking anybody, and leaves all consume lists."""
    link = _last(document, epoch, LinkState.OPENING)
    point = point_before(document, epoch)
    certificate = Certificate(
        end=Index(0),
        answered=(),
        durability=link.durability,
        is_whole=True,
        marks=point.marks,
        marks_on_two=point.marks_on_two,
        link_hash=EMPTY_HASH,
        chain_hash=None,
        sealed_at_ms=now_ms,
    )
    changed = _with_link(document, replace(link, state=LinkState.SEALED, certificate=certificate))
    return without_empty(filled(without_group(changed, link.group)))


def sealed(document: ChainDocument, epoch: Epoch, certificate: Certificate) -> ChainDocument:
    """The end of a closing or lost link is recorded, and a closing link's group leaves the send list (H24)."""
    link = _link(document, epoch, LinkState.CLOSING, LinkState.LOST)
    changed = _with_link(document, replace(link, state=LinkState.SEALED, certificate=certificate))
    if link.state is LinkState.CLOSING:
        changed = without_group(changed, link.group)
    return without_empty(filled(changed))


def lost(document: ChainDocument, epoch: Epoch) -> ChainDocument:
    """Nobody can tell the end of a closing link now; sending may go on with another group (protocol.md 5.4)."""
    link = _last(document, epoch, LinkState.CLOSING)
    return without_group(_with_link(document, replace(link, state=LinkState.LOST)), link.group)


def abandoned(document: ChainDocument, epoch: Epoch, certificate: Certificate, what: str, now_ms: int) -> ChainDocument:
    """An operator gives up a lost link, or the tail of a sealed one, from `certificate.end` on (protocol.md 5.7)."""
    link = _link(document, epoch, LinkState.LOST, LinkState.SEALED)
    if link.end is not None and certificate.end >= link.end:
        raise _wrong(document, link, f"nothing of it lies beyond {certificate.end}")
    changed = _with_link(
        document, replace(link, state=LinkState.SEALED, certificate=replace(certificate, is_abandoned=True))
    )
    noted = Abandoned(epoch, what, now_ms, _given_up_from(link, certificate))
    links = (_without_given_up(one, noted.from_seqs, link) if one.epoch > epoch else one for one in changed.links)
    return without_empty(
        filled(replace(changed, links=tuple(map(unsettled, links)), abandoned=(*changed.abandoned, noted)))
    )


def _given_up_from(link: Link, certificate: Certificate) -> dict[str, int]:
    """The first seq of each source behind the new end of a sealed link; of a lost one nobody knows what it had."""
    had = {} if link.certificate is None else link.certificate.marks
    left = certificate.marks
    return {source: left.get(source, -1) + 1 for source, seq in had.items() if left.get(source, -1) < seq}


def _without_given_up(later: Link, from_seqs: Mapping[str, int], link: Link) -> Link:
    """A later link whose marks no longer count what was given up of `link`, where it only has it from there.

    Else a record that is sent again would be taken for a re-send, and be handed to nobody. A later link that was sealed
    at the very same mark may have the record itself, unless it began with that mark; it counts as far as two members are known to hold it.
    """
    certificate = later.certificate
    if certificate is None or link.certificate is None:
        return later
    marks, on_two, at_start = dict(certificate.marks), dict(certificate.marks_on_two), dict(later.marks_on_two)
    for source, seq in from_seqs.items():
        given_up = link.certificate.marks[source]
        if at_start.get(source) == given_up:
            for inherited in (at_start, on_two):
                if inherited.get(source) == given_up:
                    _lower(inherited, source, seq - 1)
        if marks.get(source) == given_up:
            _lower(marks, source, max(seq - 1, on_two.get(source, -1)))
    lowered = replace(certificate, marks=marks, marks_on_two=on_two)
    return replace(later, certificate=lowered, marks_on_two=at_start)


def _lower(marks: dict[str, int], source: str, to: int) -> None:
    """A mark of a source, or none where `to` is before its first seq."""
    if to < 0:
        del marks[source]
    else:
        marks[source] = to


def given_up_from(document: ChainDocument) -> dict[str, int]:
    """For each source the first seq that may have been in what an operator gave up (protocol.md 5.7)."""
    first: dict[str, int] = {}
    for one in document.abandoned:
        for source, seq in one.from_seqs.items():
            first[source] = min(seq, first.get(source, seq))
    return first


def _with_link(document: ChainDocument, link: Link) -> ChainDocument:
    return replace(document, links=tuple(link if one.epoch == link.epoch else one for one in document.links))


def _link(document: ChainDocument, epoch: Epoch, *states: LinkState) -> Link:
    link = document.link(epoch)
    if link is None:
        raise InvariantBroken(f"link {epoch} is not in the chain", queue=document.name, epoch=epoch)
    if link.state not in states:
        raise _wrong(document, link, f"expected {' or '.join(states)}")
    return link


def _last(document: ChainDocument, epoch: Epoch, state: LinkState) -> Link:
    link = _link(document, epoch, state)
    if link is not document.last_link:
        raise _wrong(document, link, "it is not the last link")
    return link


def _wrong(document: ChainDocument, link: Link, why: str) -> InvariantBroken:
    return InvariantBroken(f"link {link.epoch} is {link.state}: {why}", queue=document.name, epoch=link.epoch)
