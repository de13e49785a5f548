"""Queues, links and groups as callers are shown them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from seriatim.coordinator import messages
from seriatim.coordinator.core import chain_length, readmission, status
from seriatim.coordinator.core.chain_point import ChainPoint, points
from seriatim.coordinator.core.events import ReadGrant
from seriatim.coordinator.core.registry import MEMBERS, GroupState, Registry
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, Subscription
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.names import ChainVersion
from seriatim.protocol.registration import Registration

KNOWN_LINKS: Final = 4096
FEW_SOURCES: Final = 100
"""Bounds on what is kept of links that were shown."""
KNOWN_GROUPS: Final = 1024
"""As many groups' views are kept."""


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
                is_in_sync=state.is_in_sync,
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
            for side in (link.master, link.slave)
            if any(one.disk_id == side.incarnation.disk_id for one in certificate.answered)
        )
    return view


@dataclass(frozen=True, slots=True)
class _Shown:
    """A link as it was shown, and what of the world that depends on. Equal is what is the same object."""

    link: Link
    marks: Mapping[str, int]
    are_marks_known: bool
    master: Registration | None
    slave: Registration | None
    view: pb.LinkView


class _Links:
    """Shows links, and again those that ended as they were shown last: everybody who watches a queue is told of all, at each change."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._shown: dict[int, _Shown] = {}

    def of(self, link: Link, point: ChainPoint, registry: Registry) -> pb.LinkView:
        """As `link_view`; for reading only."""
        if link.certificate is None or len(point.marks) > FEW_SOURCES:
            return link_view(link, point, registry)
        master, slave = registry.member(link.master.name), registry.member(link.slave.name)
        shown = self._shown.get(id(link))
        if (
            shown is not None
            and shown.link is link
            and shown.marks is point.marks
            and shown.are_marks_known == point.is_known
            and shown.master is master
            and shown.slave is slave
        ):
            return shown.view
        if len(self._shown) >= self._most:
            del self._shown[next(iter(self._shown))]
        view = link_view(link, point, registry)
        self._shown[id(link)] = _Shown(link, point.marks, point.is_known, master, slave, view)
        return view


_links = _Links(KNOWN_LINKS)
_groups: dict[str, tuple[GroupState, pb.GroupView]] = {}


def shown_group(name: str, registry: Registry) -> pb.GroupView:
    """As `group_view`, made once for each state; for reading only: everybody who watches a queue is told of all, at each change."""
    state = registry.group(name)
    known = _groups.get(name)
    if known is not None and known[0] is state:
        return known[1]
    if len(_groups) >= KNOWN_GROUPS:
        _groups.clear()
    view = group_view(name, registry)
    _groups[name] = state, view
    return view


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
        links=[_links.of(link, point, registry) for link, point in points(document)],
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
