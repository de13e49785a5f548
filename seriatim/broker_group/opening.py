"""How a link begins to take records on this member, at a coordinator's word, and how its master reaches the slave (protocol.md 4)."""

from __future__ import annotations

from typing import Any

from seriatim.broker_group.broker import Broker, durability_from
from seriatim.broker_group.core import setback
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord, Role, sealed_error
from seriatim.broker_group.core.replica import SealPhase, disk_failed
from seriatim.broker_group.core.replica_events import Opened
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.replication import SlaveStream
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import PeerLost, WrongIncarnation
from seriatim.protocol.incarnations import from_message
from seriatim.protocol.names import ChainVersion, Incarnation, Index, Token
from seriatim.protocol.position import Position

_log = log.logger("broker")


async def open_link(broker: Broker, request: pb.OpenLinkRequest) -> tuple[LinkRunner, Position]:
    """Take records for a link from a token; the two copies are made equal while this is answered (H3).

    Answers where the link went on when the call came, or when the copies were equal: durable here and, on the
    master, on the slave. A stream that brings records meanwhile isn't waited for.
    """
    key = broker.check_name(request.link)
    async with broker.lock(key):
        runner = _opened(broker, key, request)
    if runner.record.role is Role.MASTER:
        await connect_slave(broker, runner, broker.peer.stub(request.slave.address), request.slave.direct)
    await runner.kept()
    position = runner.state.tail
    await runner.until(lambda: _is_over(runner) or _is_kept(runner, position.index))
    if runner.state.failure:
        raise disk_failed(runner.state)
    if _is_over(runner):
        raise sealed_error(runner.record)
    return runner, position


def _opened(broker: Broker, key: LinkKey, request: pb.OpenLinkRequest) -> LinkRunner:
    """The link, with what of its record is new on the way to the disk."""
    broker.is_another(key[0], request.queue)
    broker.check_not_set_back(key[0])
    runner = broker.find(key)
    if runner is None or (runner.record.opened_start == 0 and not runner.record.is_sealed):
        record = _new_record(broker, key, request)
        runner = broker.opens(record)
        _log.info("link opened", **record.named, role=record.role, cause_id=request.cause_id)
        return runner
    side = _side(broker, request)
    if side is not None and (what := setback.opened_before(runner.record, broker.incarnation.start, *side)):
        raise broker.found_set_back(key[0], what)
    opened = Opened(ChainVersion(request.chain_version), Token(request.token), request.max_record_bytes)
    refused = runner.apply(opened)
    if refused is not None:
        raise refused
    return runner


def _side(broker: Broker, request: pb.OpenLinkRequest) -> tuple[Role, Incarnation] | None:
    """What this member is to be in the link, and its peer there; None where the link wasn't made for this process."""
    is_master = broker.side_of(request.master)
    mine, other = (request.master, request.slave) if is_master else (request.slave, request.master)
    if not broker.side_of(mine) or from_message(mine.incarnation) != broker.incarnation:
        return None
    return Role.MASTER if is_master else Role.SLAVE, from_message(other.incarnation)


def _new_record(broker: Broker, key: LinkKey, request: pb.OpenLinkRequest) -> LinkRecord:
    side = _side(broker, request)
    if side is None:
        raise WrongIncarnation("this link wasn't made for this member", incarnation=str(broker.incarnation))
    role, peer = side
    return LinkRecord(
        *key,
        queue=request.queue,
        role=role,
        durability=durability_from(request.durability),
        flush_ms=request.flush_ms,
        max_record_bytes=request.max_record_bytes,
        peer=peer,
        start_marks=dict(request.marks),
        token=Token(request.token),
        chain_version=ChainVersion(request.chain_version),
        opened_start=broker.incarnation.start,
        lacks=(),
    )


async def end_rest(broker: Broker, runner: LinkRunner) -> None:
    """Before records come: reach the slave again, where the link has let it go and the peer is there. Raises PeerLost."""
    peer = broker.peer.registered
    if runner.slave is not None or _is_over(runner) or peer is None:
        return
    if broker.peer.connected == runner.record.peer == peer.incarnation:
        await connect_slave(broker, runner, broker.peer.stub(peer.address), peer.direct)


async def connect_slave(broker: Broker, runner: LinkRunner, stub: Any, direct: str) -> None:
    """Open the stream to the slave unless it is open, and wait until both copies are equal. Raises PeerLost."""
    if runner.slave is None:
        slave = runner.record.peer
        if slave is None:
            raise PeerLost("this link has no other member", epoch=runner.record.epoch)
        runner.slave = SlaveStream(broker, runner, slave, stub, direct)
    stream_now: Any = runner.slave
    await runner.until(lambda: runner.state.is_peer_ready or runner.slave is not stream_now)
    if not runner.state.is_peer_ready:
        raise PeerLost("the other member of this link can't be reached", epoch=runner.record.epoch)
    runner.rest_soon()


def _is_over(runner: LinkRunner) -> bool:
    return runner.state.phase is not SealPhase.OPEN or bool(runner.state.failure)


def _is_kept(runner: LinkRunner, index: Index) -> bool:
    """All before `index` is durable here, and on the slave as well while it is connected."""
    state = runner.state
    is_on_two = state.record.role is not Role.MASTER or state.confirmed >= index or not state.is_peer_ready
    return state.durable >= index and is_on_two
