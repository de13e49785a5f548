"""From the wire's messages to what the core decides by."""

from __future__ import annotations

import functools
from typing import Final

from seriatim.consumer.core.view import ChainView, LinkView, Side, SubscriptionView
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import IncompatibleVersion
from seriatim.protocol.incarnations import as_message, from_message
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Incarnation, Index, Offset, SubscriptionId

KNOWN_LINKS: Final = 1024
KNOWN_LINK_BYTES: Final = 4096
"""Bounds on what is kept of links that were read: most are told again and again, at each change, and haven't changed themselves."""


def chain_view(view: pb.QueueView) -> ChainView:
    """A queue as the core sees it. Raises IncompatibleVersion where a newer coordinator tells what this version doesn't know."""
    return ChainView(
        cluster=view.cluster,
        queue_id=view.queue_id,
        queue=view.queue,
        version=ChainVersion(view.chain_version),
        links=tuple(_link(link) for link in view.links),
        subscriptions=tuple(_subscription(one) for one in view.subscriptions),
        is_deleted=view.is_deleted,
        ahead=_ahead(view),
        created_at_ms=view.created_at_ms,
        first_offset=Offset(view.first_offset),
        may_be_outdated=view.may_be_outdated,
    )


def _ahead(view: pb.QueueView) -> tuple[str, ...]:
    """The first group of the send list behind the one that the last link is on."""
    serving = view.links[-1].group if view.links else ""
    following = next((group for group in view.send_list if group != serving), "")
    group = next((one for one in view.groups if one.group == following), pb.GroupView())
    return tuple(member.address for member in group.members if member.is_registered)


def _link(link: pb.LinkView) -> LinkView:
    if not link.has_end or link.ByteSize() > KNOWN_LINK_BYTES:
        return _read_link(link)
    return _known_link(link.SerializeToString())


@functools.lru_cache(maxsize=KNOWN_LINKS)
def _known_link(message: bytes) -> LinkView:
    return _read_link(pb.LinkView.FromString(message))


def _read_link(link: pb.LinkView) -> LinkView:
    try:
        state = LinkState(link.state)
    except ValueError as error:
        raise IncompatibleVersion(
            f"link {link.epoch} is {link.state!r}, which this version doesn't know: start the coordinators' version, or a newer one"
        ) from error
    end = Index(link.end) if link.has_end else None
    if end is None and link.is_abandoned:
        end = Index(0)  # given up whole: there is nothing to read in it
    return LinkView(
        epoch=Epoch(link.epoch),
        state=state,
        base=Offset(link.base) if link.has_base else None,
        end=end,
        master=_side(link.master, link.master_now),
        slave=_side(link.slave, link.slave_now),
        marks=dict(link.marks),
        are_marks_known=link.are_marks_known,
        is_abandoned=link.is_abandoned,
        committed=Index(link.committed_index) if link.has_committed else None,
        is_committed_exact=link.is_committed_exact,
        answered=tuple(link.answered),
    )


def _side(member: pb.LinkMember, now: pb.Incarnation) -> Side:
    incarnation = from_message(now) if now.disk_id else None
    return Side(member.group, member.member, member.address, incarnation, member.direct)


def _subscription(one: pb.SubscriptionView) -> SubscriptionView:
    return SubscriptionView(
        SubscriptionId(one.subscription_id),
        one.subscription,
        Generation(one.generation),
        tuple(Epoch(epoch) for epoch in one.consume_list),
    )


def link_name(view: ChainView, epoch: Epoch, to: Incarnation | None) -> pb.LinkName:
    """The link and the process that is meant (H25)."""
    return pb.LinkName(
        cluster=view.cluster,
        queue_id=view.queue_id,
        epoch=epoch,
        to=pb.Incarnation() if to is None else as_message(to),
    )
