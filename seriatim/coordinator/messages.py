"""Between the core's types and the messages on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from seriatim.coordinator.core import chain, status
from seriatim.coordinator.core.chain import ChainPoint
from seriatim.coordinator.core.events import ReadGrant, SendGrant, Wait
from seriatim.coordinator.core.registry import MEMBERS, Registry
from seriatim.coordinator.core.seal import START, Position, SealAnswer, Wholeness
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import MAX_RECORD_BYTES
from seriatim.protocol.chain import ChainDocument, ChainMember, Durability, Link, LinkState, QueueSettings, Readmit
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.names import ChainVersion, Incarnation, Index

_DEFAULT = QueueSettings()
MIN_ROTATE_MS = 1000
_WHOLENESS = {
    pb.SealReply.WHOLE: Wholeness.WHOLE,
    pb.SealReply.PARTIAL: Wholeness.PARTIAL,
    pb.SealReply.UNKNOWN: Wholeness.UNKNOWN,
}


def incarnation(value: Incarnation) -> pb.Incarnation:
    """An incarnation as a message."""
    return pb.Incarnation(disk_id=value.disk_id, start=value.start)


def incarnation_from(message: pb.Incarnation) -> Incarnation:
    """An incarnation from its message."""
    return Incarnation(message.disk_id, message.start)


def link_member(side: ChainMember, registry: Registry) -> pb.LinkMember:
    """One side of a link: who stood there when it was made, and where that place listens now (empty: nowhere)."""
    state = registry.member(side.name)
    return pb.LinkMember(
        group=side.name.group,
        member=side.name.member,
        incarnation=incarnation(side.incarnation),
        address="" if state is None else state.address,
    )


def position_from(message: pb.Position) -> Position:
    """A position from its message. An unset one is the link's start."""
    if message.index == 0:
        return START
    return Position(Index(message.index), message.hash, dict(message.marks))


def seal_answer_from(reply: pb.SealReply) -> SealAnswer:
    """A seal answer from its message."""
    return SealAnswer(
        _WHOLENESS.get(reply.answer, Wholeness.UNKNOWN),
        incarnation_from(reply.incarnation),
        tuple(position_from(one) for one in reply.positions),
        reply.reason,
    )


def settings_from(
    message: pb.QueueSettings, known_groups: frozenset[str], default: QueueSettings = _DEFAULT
) -> QueueSettings:
    """Settings from their message; what is not set is as in `default`. Raises InvalidArgument."""
    try:
        durability = Durability(message.durability) if message.durability else default.durability
        readmit = Readmit(message.readmit) if message.readmit else default.readmit
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    if message.max_record_bytes > MAX_RECORD_BYTES:
        raise InvalidArgument(
            f"a record has at most {MAX_RECORD_BYTES:,} bytes, whatever a queue's limit",
            max_record_bytes=MAX_RECORD_BYTES,
        )
    rotate_ms = message.rotate_ms if message.HasField("rotate_ms") else default.rotate_ms
    if 0 < rotate_ms < MIN_ROTATE_MS:
        raise InvalidArgument(f"a link is in use for at least {MIN_ROTATE_MS} ms", rotate_ms=rotate_ms)
    groups = tuple(message.groups) or default.groups
    if len(set(groups)) != len(groups):
        raise InvalidArgument("a group is named twice", groups=list(groups))
    unknown = [group for group in message.groups if group not in known_groups]
    if unknown:
        raise InvalidArgument(f"no member of {', '.join(unknown)} was ever started", groups=unknown)
    return QueueSettings(
        durability=durability,
        flush_ms=message.flush_ms or default.flush_ms,
        groups=groups,
        retention_ms=message.retention_ms or default.retention_ms,
        readmit=readmit,
        max_record_bytes=message.max_record_bytes or default.max_record_bytes,
        rotate_ms=rotate_ms,
    )


def altered_settings(
    request: pb.AlterQueueRequest, known_groups: frozenset[str], before: QueueSettings
) -> QueueSettings:
    """The settings of a queue that has others. Raises InvalidArgument."""
    limit_bytes = request.settings.max_record_bytes
    if limit_bytes and limit_bytes < before.max_record_bytes:
        raise InvalidArgument(
            f"the limit of a record can only be raised, it is {before.max_record_bytes:,} bytes: senders may hold records as large",
            max_record_bytes=before.max_record_bytes,
        )
    if request.all_groups:
        if request.settings.groups:
            raise InvalidArgument("either some groups, or all")
        before = replace(before, groups=())
    return settings_from(request.settings, known_groups, before)


def settings(value: QueueSettings) -> pb.QueueSettings:
    """Settings as a message."""
    return pb.QueueSettings(
        durability=value.durability,
        flush_ms=value.flush_ms,
        groups=value.groups,
        retention_ms=value.retention_ms,
        readmit=value.readmit,
        max_record_bytes=value.max_record_bytes,
        rotate_ms=value.rotate_ms,
    )


def wait(value: Wait) -> pb.Wait:
    """A wait as a message, with a reason for each thing that is waited for."""
    return pb.Wait(retry_after_ms=value.retry_after_ms, reasons=reasons(value.reasons))


def reasons(value: Mapping[str, str]) -> list[pb.WaitReason]:
    """Reasons as messages."""
    return [pb.WaitReason(what=what, reason=str(reason)) for what, reason in value.items()]


def send_grant(grant: SendGrant, registry: Registry) -> pb.SendGrant:
    """A grant to send as a message."""
    return pb.SendGrant(
        epoch=grant.link.epoch,
        master=link_member(grant.link.master, registry),
        slave=link_member(grant.link.slave, registry),
        next_index=grant.next_index,
        is_resume_known=grant.is_resume_known,
        resume_point=grant.resume_point,
        held=grant.held,
        given_up_from=grant.given_up_from,
        durability=grant.link.durability,
        max_record_bytes=grant.max_record_bytes,
        has_base=grant.base is not None,
        base=grant.base or 0,
        next_master=_master_address(grant.next_group, registry),
    )


def _master_address(group: str, registry: Registry) -> str:
    """Where the master of a new link on this group would be reached; empty where there is none."""
    state = registry.group(group).members.get(MEMBERS[0])
    return "" if state is None else state.address


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
                incarnation=incarnation(state.incarnation),
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
        master=link_member(link.master, registry),
        slave=link_member(link.slave, registry),
        marks=point.marks,
        are_marks_known=point.is_known,
    )
    for side, now in ((link.master, view.master_now), (link.slave, view.slave_now)):
        state = registry.member(side.name)
        if state is not None:
            now.CopyFrom(incarnation(state.incarnation))
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


def queue_view(document: ChainDocument, version: ChainVersion, registry: Registry) -> pb.QueueView:
    """A queue as its chain document and the registry show it."""
    groups = dict.fromkeys([*document.send_list, *document.settings.groups, *(link.group for link in document.links)])
    return pb.QueueView(
        queue_id=document.queue_id,
        queue=document.name,
        cluster=document.cluster,
        chain_version=version,
        settings=settings(document.settings),
        sender_token=document.sender_token,
        sender=document.sender_node,
        send_list=document.send_list,
        links=[link_view(link, point, registry) for link, point in chain.points(document)],
        subscriptions=[
            pb.SubscriptionView(
                subscription=one.name,
                subscription_id=one.subscription_id,
                generation=one.generation,
                reader_token=one.reader_token,
                reader=one.reader_node,
                consume_list=one.consume_list,
                position_epoch=one.position_epoch,
                position_index=one.position_index,
            )
            for one in document.subscriptions
        ],
        waits=reasons(status.waits(document, registry)),
        switches_left=status.switches_left(document, registry),
        abandoned=[pb.AbandonedView(epoch=one.epoch, what=one.what, at_ms=one.at_ms) for one in document.abandoned],
        groups=[group_view(name, registry) for name in groups],
        created_at_ms=document.created_at_ms,
        is_deleted=document.is_deleted,
    )


def is_serving(document: ChainDocument, group: str) -> bool:
    """Whether the queue's open link is on this group."""
    last = document.last_link
    return last is not None and last.state is LinkState.OPEN and last.group == group
