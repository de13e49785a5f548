"""How a link ends on this member: it seals, at a coordinator's word or by itself, and keeps where the chain says that the link ends (protocol.md 5)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from seriatim.broker_group.broker import Broker, durability_from
from seriatim.broker_group.core import setback
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import sealed_positions
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.replication import position_message
from seriatim.broker_group.uninterrupted import uninterrupted
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import DiskFailed, InvalidArgument, OlderVersion
from seriatim.protocol.incarnations import as_message, from_message
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, QueueId

_log = log.logger("broker")


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


async def seal_open_links(broker: Broker) -> None:
    """Seal all links that are not sealed: after a restart and after the session's end (protocol.md 5.5).

    Side by side: a flush serves all that wait for it. One whose seal is on its way to the disk is waited for, whoever asked.
    """
    await asyncio.gather(*(_seal_open(broker, record) for record in broker.unsealed()))


async def _seal_open(broker: Broker, record: LinkRecord) -> None:
    try:
        runner = broker.find(record.key)
    except DiskFailed as error:
        # What isn't loaded takes no records, and was opened for an earlier start: the others can be sealed, and served.
        broker.found_lacking(record.queue_id, f"{broker.told(record.key)}: {error}")
        return
    if runner is None:
        return  # let go meanwhile
    if record.opened_start != broker.incarnation.start and not record.durability.survives_restart:
        # What it took lived in memory of the process or of the system: something acknowledged may be lost.
        runner.changed_record(replace(record, is_whole=False))
    async with broker.lock(record.key):
        refused = await runner.sealed(runner.record.chain_version)
    broker.found_lacking(record.queue_id, f"{broker.told(record.key)}: its end isn't recorded yet")
    broker.resync_wanted.set()
    if refused is None:
        _log.info("link sealed by the member itself", **record.named)


@uninterrupted
async def record_end(broker: Broker, ended: LinkRecord) -> tuple[LinkRunner, bool]:
    """Keep where the chain says that the link ends, and cut what lies beyond. Whether this member has exactly that.

    `ended`: key and `ending` of a link that this member may never have heard of, and the chain version that says so. Raises
    ChainSetBack where another one was recorded before, and OlderVersion for what was said before an operator gave it up.
    """
    end, end_hash, is_abandoned = ended.ending
    if end is None:
        raise InvalidArgument("a link ends somewhere")
    async with broker.lock(ended.key):
        known = broker.record(ended.key)
        is_news = known is None or known.ending != ended.ending
        if is_news:
            broker.check_not_set_back(ended.queue_id)
        if known is not None and (what := setback.changed_end(known, ended)):
            raise broker.found_set_back(ended.queue_id, what)
        if is_news and known is not None and known.is_abandoned and ended.chain_version < known.chain_version:
            raise OlderVersion("the chain has changed", chain_version=known.chain_version, epoch=known.epoch)
        runner = broker.find(ended.key) or broker.made(replace(ended, is_sealed=True, end=None, end_hash=b""))
        if not runner.record.is_sealed:
            refused = await runner.sealed(ended.chain_version)
            if refused is not None:
                raise refused
        record = runner.record
        if record.ending != ended.ending:
            version = max(record.chain_version, ended.chain_version)
            record = replace(record, end=end, end_hash=end_hash, is_abandoned=is_abandoned, chain_version=version)
            await broker.keep(runner, record)
        if not is_abandoned and runner.state.durable > end and runner.hash_at(end) == end_hash:
            await broker.cut(runner, record, end)
            _log.info("link cut", **record.named, end=end)
        has_it = runner.holding().has_it
    if not has_it or record.lacks_cursors:
        if is_news:  # else it was said: a coordinator asks each second, and all that watch are told what changes
            broker.found_lacking(record.queue_id, f"{broker.told(record.key)} isn't whole here")
        broker.resync_wanted.set()
    broker.look_for_drained(ended.key)
    return runner, has_it
