"""ZooKeeper is given an older copy of its data, by somebody who means well, or by a machine that lost its newest writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seriatim.broker_group import layout
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.names import Epoch
from seriatim.protocol.zookeeper import Paths
from tests.simulation.applications import QUEUE
from tests.simulation.ensemble import Kept
from tests.simulation.ledger import Violation
from tests.simulation.scenarios import SOON_S, asked, calmed, switched
from tests.simulation.world import CLUSTER

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule


def set_zookeeper_back(schedule: Schedule) -> None:
    """To before a switch or two: nothing is sent, nor cut off, until it has its newest data again."""
    newest = _set_back(schedule, _switched_from(schedule))
    _put_back(schedule, newest)
    _start_all(schedule)
    schedule.until_sending_goes_on(SOON_S)


def set_back_a_seek(schedule: Schedule) -> None:
    """To before a subscription was sought, of which no link was told: a copy of the chain says so. By the older one the same
    generation would be given a second time, and what was read since the first would be skipped."""
    world = schedule.world
    calmed(schedule)
    older, document = world.ensemble.copied(), world.document
    if document is None or not document.links or not document.subscriptions:
        return
    request = pb.SeekSubscriptionRequest(queue=QUEUE, subscription=document.subscriptions[0].name, to="earliest")
    if asked(schedule, "SeekSubscription", request) is None:
        return
    schedule.until(lambda: _is_kept(schedule), "a disk has a copy of the newest chain", SOON_S)
    newest = _set_back(schedule, older)
    _put_back(schedule, newest)
    _start_all(schedule)
    schedule.until_sending_goes_on(SOON_S)


def recover_queue(schedule: Schedule) -> None:
    """The same, or to nothing at all, and the newest data are gone: the queue goes on from a copy that a member keeps."""
    world = schedule.world
    older = _switched_from(schedule)
    schedule.until(lambda: _is_kept(schedule), "a disk has a copy of the newest chain", SOON_S)
    _set_back(schedule, older if schedule.chance.random() < 0.5 else Kept({}, {}))
    schedule.until(lambda: _are_all_there(schedule), "every member is registered", SOON_S)
    request = pb.RecoverQueueRequest(queue=QUEUE, confirmed_queue=QUEUE)
    was_cut_off = False
    for _ in range(40):
        reply = asked(schedule, "RecoverQueue", request)
        if reply is not None and (reply.is_done or was_cut_off):
            break
        was_cut_off = reply is None
        world.loop.run(world.loop.now_s + 1.0)
    else:
        raise Violation("12: the queue is never recovered")
    schedule.until_sending_goes_on(SOON_S)


def _switched_from(schedule: Schedule) -> Kept:
    """What ZooKeeper has; then sending goes on with another group, once or twice."""
    world, chance = schedule.world, schedule.chance
    calmed(schedule)
    older = world.ensemble.copied()
    switched(schedule)
    if chance.random() < 0.5:
        calmed(schedule)
        switched(schedule)
    world.loop.run(world.loop.now_s + chance.choice((0.3, 3.0)) * chance.random())
    return older


def _set_back(schedule: Schedule, older: Kept) -> Kept:
    """ZooKeeper has these data for a while, by which nothing may be sent; its newest."""
    world = schedule.world
    newest = world.ensemble.copied()
    _put_back(schedule, older)
    began_s = world.loop.now_s
    _start_all(schedule)
    world.loop.run(began_s + 8 * schedule.chance.random())
    if any((one.acknowledged_at_s or 0) > began_s for one in world.ledger.sent.values()):
        raise Violation("8: sending goes on by a chain that was set back")
    return newest


def _start_all(schedule: Schedule) -> None:
    for name in schedule.world.hosts:
        schedule.world.start(name)


def _are_all_there(schedule: Schedule) -> bool:
    world, paths = schedule.world, Paths(CLUSTER)
    return all(paths.member(*name.split("-")) in world.ensemble.leader.nodes for name in world.member_names)


def _is_kept(schedule: Schedule) -> bool:
    """Whether some disk has a flushed copy of the chain as it is now."""
    world = schedule.world
    document = world.document
    assert document is not None
    now = world.ensemble.leader.nodes[Paths(CLUSTER).chain(document.queue_id)].version
    key = layout.key(b"Q", (document.queue_id, Epoch(0)))
    copies = (world.hosts[name].disk.durable.values.get(key) for name in world.member_names)
    return any(copy is not None and copy[:8] == now.to_bytes(8, "big") for copy in copies)


def _put_back(schedule: Schedule, kept: Kept) -> None:
    """Everybody ends, and ZooKeeper begins again with these data."""
    world = schedule.world
    for name in (one for one in world.hosts if one != "operator"):
        world.kill(name, is_power=schedule.chance.random() < 0.3)
    world.note(f"ZooKeeper begins with a copy of {len(kept.nodes)} nodes")
    world.ensemble.put_back(kept)
    world.oracle.put_back(kept.nodes)


SETBACKS: dict[str, tuple[float, Callable[[Schedule], None]]] = {
    "ZooKeeper set back": (0.5, set_zookeeper_back),
    "a seek set back": (0.3, set_back_a_seek),
    "queue recovered": (0.5, recover_queue),
}
