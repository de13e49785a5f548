"""What a member answers to a Seal, whoever asks for it: a coordinator, or the member itself where none comes (protocol.md 5.2, 5.4)."""

from __future__ import annotations

from seriatim.broker_group.broker import Broker, durability_from
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import sealed_positions
from seriatim.broker_group.replication import position_message
from seriatim.broker_group.uninterrupted import uninterrupted
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import DiskFailed
from seriatim.protocol.incarnations import as_message, from_message
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, QueueId

_log = log.logger("broker.sealing")


@uninterrupted
async def seal(broker: Broker, request: pb.SealRequest) -> pb.SealReply:
    """Take no more records for a link, for good, and say what is durable; also for a link never heard of (H11).

    One of another group's, whose member had this address before, is none of this member's: nothing is kept of it.
    """
    key = QueueId(request.link.queue_id), Epoch(request.link.epoch)
    version = ChainVersion(request.chain_version)
    try:
        durability = durability_from(request.durability or "sync")
        mine = request.master if broker.side_of(request.master) else request.slave
        if not broker.side_of(mine):
            return _unknown(broker, f"this is {broker.name}, for which the link wasn't made")
        async with broker.lock(key):
            runner = broker.find(key)
            if runner is None:
                record = LinkRecord(*key, durability=durability, chain_version=version, is_sealed=True)
                runner = await broker.introduced(record)
            refused = await runner.sealed(version)
    except DiskFailed as error:
        return _unknown(broker, error.message)
    if isinstance(refused, DiskFailed):
        return _unknown(broker, refused.message)
    if refused is not None:
        raise refused
    unlike = _unlike(broker, runner.record, from_message(mine.incarnation))
    if unlike and runner.record.end is None:
        return _unknown(broker, unlike)
    is_whole = not unlike and runner.record.is_whole and not broker.is_damaged(key)
    _log.lasting("seal answered", queue_id=key[0], epoch=key[1], is_whole=is_whole, cause_id=request.cause_id)
    return pb.SealReply(
        answer=pb.SealReply.WHOLE if is_whole else pb.SealReply.PARTIAL,
        incarnation=as_message(broker.incarnation),
        committed_index=runner.state.committed.index,
        positions=[position_message(runner, position) for position in sealed_positions(runner.state)],
        reason="" if is_whole else unlike or "this member may have lost records that it acknowledged",
    )


def _unlike(broker: Broker, record: LinkRecord, mine: Incarnation) -> str:
    """Why this disk isn't the one that the link was made with, as it was then, or empty.

    It can tell no end. Once the end is recorded it may hold a copy all the same, made by resync: for who gives up the
    tail, all that is left counts (protocol.md 5.7).
    """
    if mine.disk_id != broker.incarnation.disk_id:
        return "this is another disk than the one that the link was made with"
    if record.opened_start != mine.start:
        if not record.opened_start:
            # So says a disk of before its opening, and one of a link that a recovered chain has for open, and nobody opened.
            return "this disk never had the link's opening: nobody sent to it, or this is an older copy of the disk"
        # A link is closed by a Seal only once both members had written its opening: this is what the disk was before.
        return "this disk lacks the link's opening, so it is an older copy of itself"
    return ""


def _unknown(broker: Broker, reason: str) -> pb.SealReply:
    incarnation, has_failed = as_message(broker.incarnation), broker.store.failure is not None
    return pb.SealReply(answer=pb.SealReply.UNKNOWN, incarnation=incarnation, reason=reason, has_failed=has_failed)
