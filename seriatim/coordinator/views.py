"""Queues, links and groups as callers are shown them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from seriatim.coordinator import messages
from seriatim.coordinator.core import chain_length, readmission, status
from seriatim.coordinator.core.chain_point import ChainPoint, points
from seriatim.coordinator.core.events import ReadGrant
from seriatim.coordinator.core.registry import MEMBERS, Registry
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, Subscription
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.names import ChainVersion, QueueId

KNOWN_LINKS: Final = 4096
FEW_SOURCES: Final = 100
"""Bounds on what is kept of links that were shown."""
KNOWN_GROUPS: Final = 1024
"""As many groups' views are kept."""
View = TypeVar("View")


def read_grant(grant: ReadGrant, registry: Registry) -> pb.ReadGrant:
    """A grant to read as a message."""
    return pb.ReadGrant(
        subscription_id=grant.subscription_id,
        generation=grant.generation,
        epoch=0 if grant.link is None else grant.link.epoch,
        index=grant.index,
        view=queue_view(grant.document, grant.version, registry),
    )


def group_view(name: str, registry: Registry) -> pb.GroupView:
    """A group and its members, without what queues have on it."""
    group = registry.group(name)
    view = pb.GroupView(group=name, is_draining=group.is_draining)
    for place in MEMBERS:
        state = group.members.get(place)
        if state is None:
            view.members.append(pb.MemberView(member=place))
            continue
        view.members.append(
            pb.MemberView(
                member=place,
                is_registered=True,
                incarnation=as_message(state.incarnation),
                address=state.address,
                is_in_sync=state.is_in_sync and not state.unread,
                is_peer_connected=group.is_peer_connected(place),
                problem=state.problem,
            )
        )
    return view


def link_view(link: Link, point: ChainPoint, registry: Registry) -> pb.LinkView:
    """A link, with what the chain knows of it; `point`: the state of the chain where it starts."""
    view = pb.LinkView(
        epoch=link.epoch,
        group=link.group,
        state=link.state,
        durability=link.durability,
        has_base=link.base is not None,
        base=link.base or 0,
        has_end=link.end is not None,
        end=link.end or 0,
        master=messages.link_member(link.master, registry),
        slave=messages.link_member(link.slave, registry),
        marks=point.marks,
        are_marks_known=point.is_known,
    )
    for side, now in ((link.master, view.master_now), (link.slave, view.slave_now)):
        state = registry.member(side.name)
        if state is not None:
            now.CopyFrom(as_message(state.incarnation))
    certificate = link.certificate
    if certificate is not None:
        view.is_abandoned = certificate.is_abandoned
        view.link_hash = certificate.link_hash
        view.chain_hash = certificate.chain_hash or b""
        view.sealed_at_ms = certificate.sealed_at_ms
        view.answered.extend(
            side.name.member
            for side in link.sides
            if any(one.disk_id == side.incarnation.disk_id for one in certificate.answered)
        )
    return view


class _Made(Generic[View]):
    """Views as they were made last, and of what; for reading only: everybody who watches a queue is told of all, at each change."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[object, tuple[tuple[object, ...], View]] = {}

    def of(self, what: object, shows: tuple[object, ...], make: Callable[[], View]) -> View:
        """The view of `what`, made anew where what it shows is something else by now."""
        made = self._made.get(what)
        if made is None or made[0] != shows:
            if len(self._made) >= self._most:
                del self._made[next(iter(self._made))]
            made = self._made[what] = shows, make()
        return made[1]


_links: _Made[pb.LinkView] = _Made(KNOWN_LINKS)
"""By `id`: a link is kept with its view, so that no other one gets its number."""
_groups: _Made[pb.GroupView] = _Made(KNOWN_GROUPS)


def shown_link(link: Link, point: ChainPoint, registry: Registry) -> pb.LinkView:
    """As `link_view`, made once for each state of one that ended; for reading only."""
    if link.certificate is None or len(point.marks) > FEW_SOURCES:
        return link_view(link, point, registry)
    shows = link, point.marks, point.is_known, registry.member(link.master.name), registry.member(link.slave.name)
    return _links.of(id(link), shows, lambda: link_view(link, point, registry))


def shown_group(name: str, registry: Registry) -> pb.GroupView:
    """As `group_view`, made once for each state; for reading only."""
    return _groups.of(name, (registry.group(name),), lambda: group_view(name, registry))


def subscription_view(subscription: Subscription) -> pb.SubscriptionView:
    """A subscription as the chain document shows it: its reader is who was elected last."""
    return pb.SubscriptionView(
        subscription=subscription.name,
        subscription_id=subscription.subscription_id,
        generation=subscription.generation,
        reader_token=subscription.reader_token,
        reader=subscription.reader_node,
        consume_list=subscription.consume_list,
        position_epoch=subscription.position_epoch,
        position_index=subscription.position_index,
    )


def named_groups(document: ChainDocument) -> dict[str, None]:
    """The groups that a queue names, in the order in which they are shown."""
    return dict.fromkeys([*document.send_list, *document.settings.groups, *(link.group for link in document.links)])


def shown_of(document: ChainDocument, registry: Registry) -> tuple[object, ...]:
    """What of the registry a queue's view depends on: where that is equal, so is the view."""
    names = named_groups(document) | dict.fromkeys(readmission.candidates(document, registry))
    return (registry.standstill(document.queue_id), *names, *map(registry.groups.get, names))


def add_chain_wait(view: pb.QueueView, document: ChainDocument, size_bytes: int) -> None:
    """Tell where the chain, whose node has this size, is too long for a further link, or soon will be."""
    if error := chain_length.switch_error(document, size_bytes):
        view.waits.append(pb.WaitReason(what="chain", reason=str(error)))


def damaged_queue_view(queue_id: QueueId, name: str, reason: str) -> pb.QueueView:
    """A queue of which nothing is known but its name, and why."""
    return pb.QueueView(queue_id=queue_id, queue=name, waits=[pb.WaitReason(what="damage", reason=reason)])


def queue_view(
    document: ChainDocument, version: ChainVersion, registry: Registry, *, has_groups: bool = True
) -> pb.QueueView:
    """A queue as its chain document and the registry show it. `has_groups`: with the groups that it names, most of it where they are many."""
    return pb.QueueView(
        queue_id=document.queue_id,
        queue=document.name,
        cluster=document.cluster,
        chain_version=version,
        settings=messages.settings(document.settings),
        sender_token=document.sender_token,
        sender=document.sender_node,
        send_list=document.send_list,
        links=[shown_link(link, point, registry) for link, point in points(document)],
        subscriptions=map(subscription_view, document.subscriptions),
        waits=messages.reasons(status.waits(document, registry)),
        switches_left=status.switches_left(document, registry),
        abandoned=[pb.AbandonedView(epoch=one.epoch, what=one.what, at_ms=one.at_ms) for one in document.abandoned],
        groups=[shown_group(name, registry) for name in named_groups(document)] if has_groups else [],
        created_at_ms=document.created_at_ms,
        is_deleted=document.is_deleted,
        first_offset=document.dropped.offset,
        may_be_outdated=bool(registry.standstill(document.queue_id)),
    )
