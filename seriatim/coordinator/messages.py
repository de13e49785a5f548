"""Between the core's types and the messages on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from seriatim.coordinator.core.events import SendGrant, Wait
from seriatim.coordinator.core.registry import MEMBERS, Registry
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import MAX_RECORD_BYTES
from seriatim.protocol.chain import ChainMember, Durability, QueueSettings, Readmit
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.incarnations import as_message, from_message
from seriatim.protocol.names import Index
from seriatim.protocol.position import START, Position

_DEFAULT = QueueSettings()
MIN_ROTATE_MS = 1000
CAUSE_CHARACTERS = 128
RETRY_AFTER_MS = 100
_WHOLENESS = {
    pb.SealReply.WHOLE: Wholeness.WHOLE,
    pb.SealReply.PARTIAL: Wholeness.PARTIAL,
    pb.SealReply.UNKNOWN: Wholeness.UNKNOWN,
}


def kept_cause(cause_id: str) -> str:
    """The cause by which a call is known again, as ZooKeeper keeps it: it breaks the connection of who sends it 1 MiB."""
    return cause_id[:CAUSE_CHARACTERS]


def link_member(side: ChainMember, registry: Registry) -> pb.LinkMember:
    """One side of a link: who stood there when it was made, and where that place listens now (empty: nowhere)."""
    state = registry.member(side.name)
    return pb.LinkMember(
        group=side.name.group,
        member=side.name.member,
        incarnation=as_message(side.incarnation),
        address="" if state is None else state.address,
        direct="" if state is None else state.direct,
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
        from_message(reply.incarnation),
        tuple(position_from(one) for one in reply.positions),
        reply.reason,
        has_failed=reply.has_failed,
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
    return pb.Wait(retry_after_ms=RETRY_AFTER_MS, reasons=reasons(value.reasons))


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
