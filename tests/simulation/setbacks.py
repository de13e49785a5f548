"""ZooKeeper is given an older copy of its data, by somebody who means well, or by a machine that lost its newest writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from seriatim.broker_group import layout
from seriatim.protocol import chain_json
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.names import Epoch, QueueId
from seriatim.protocol.nodes import Paths
from tests.simulation.ensemble import Kept
from tests.simulation.ledger import Violation
from tests.simulation.queue import Queue
from tests.simulation.scenarios import (
    SOON_S,
    asked,
    at_chain_write,
    calmed,
    give_up_lost,
    kill_at_chain_write,
    switched,
)
from tests.simulation.world import CLUSTER, MemberHost

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule

_UNAWARE_S = 1.0
"""So long may a sender go on in the link that it was named, until it hears that it has lost its connection."""


def set_zookeeper_back(schedule: Schedule) -> None:
    """To before a switch or two, with all who run, or none of them: nothing is sent, nor cut off, until it has its newest data again."""
    _put_back(schedule, _set_back(schedule, _switched_from(schedule)))
    _go_on(schedule)


def set_back_a_seek(schedule: Schedule) -> None:
    """To before a subscription was sought, of which no link was told: a copy of the chain says so. By the older one the same
    generation would be given a second time, and what was read since the first would be skipped."""
    world = schedule.world
    world.may_seek = False
    calmed(schedule)
    older, document = world.ensemble.copied(), schedule.queue.document
    if document is None or not document.links or not document.subscriptions:
        return
    request = pb.SeekSubscriptionRequest(
        queue=schedule.queue.name, subscription=document.subscriptions[0].name, to="earliest"
    )
    if asked(schedule, "SeekSubscription", request) is None:
        return
    schedule.until(lambda: _is_kept(schedule), "a disk has a copy of the newest chain", SOON_S)
    _put_back(schedule, _set_back(schedule, older))
    _go_on(schedule)


def _go_on(schedule: Schedule) -> None:
    """By the newest data of the queue that was set back; others, which had gone on by the older ones, are recovered."""
    _start_all(schedule)
    for queue in [one for one in schedule.world.live_queues if one is not schedule.queue]:
        schedule.until(lambda: _are_all_there(schedule), "every member is registered", SOON_S)
        _recovered_one(schedule, queue, others=0)
    schedule.until_sending_goes_on(SOON_S)


def recover_queue(schedule: Schedule) -> None:
    """The same, or to nothing at all, and the newest data are gone: the queue goes on from a copy that a member keeps."""
    older = _switched_from(schedule)
    schedule.until(lambda: _is_kept(schedule), "a disk has a copy of the newest chain", SOON_S)
    if schedule.chance.random() < 0.5:
        _set_back(schedule, older)
    else:
        _put_back(schedule, Kept())  # with everybody ended: who reads hears that there is no such queue, and ends
        _nothing_is_sent(schedule)
    _recovered_with_all(schedule)


def recover_from(schedule: Schedule, older: Kept) -> None:
    """The same, from when a queue wasn't made yet, with everybody ended."""
    schedule.until(lambda: _is_kept(schedule), "a disk has a copy of the newest chain", SOON_S)
    _put_back(schedule, older)
    _start_all(schedule)
    _recovered_with_all(schedule)


def _recovered_with_all(schedule: Schedule) -> None:
    schedule.until(lambda: _are_all_there(schedule), "every member is registered", SOON_S)
    _recovered(schedule)
    schedule.until_sending_goes_on(SOON_S)


def recover_by_several(schedule: Schedule) -> None:
    """The same, and others ask for it, too, each a moment later: what the first one has made goes on meanwhile.

    A coordinator may stand still in the middle, and find that when it goes on.
    """
    recover_without(schedule, others=4)


def recover_without(schedule: Schedule, others: int = 0) -> None:
    """The same, while some brokers are away; the others know which links there are. They come back meanwhile, or afterwards, a disk maybe
    replaced. Somebody else asks for it at the same time, and coordinators die in between."""
    world, chance = schedule.world, schedule.chance
    if chance.random() < 0.4:
        soon = pb.QueueSettings(retention_ms=1)
        asked(schedule, "AlterQueue", pb.AlterQueueRequest(queue=schedule.queue.name, settings=soon))
    older = _switched_from(schedule)
    schedule.until(lambda: _is_kept(schedule), "a disk has a copy of the newest chain", SOON_S)
    away = _away(schedule)
    _put_back(schedule, older if chance.random() < 0.5 else Kept())
    world.note(f"away are {away}")
    for name in world.hosts:
        if name not in away:
            world.start(name)
    replaced = chance.choice(away)
    if chance.random() < 0.3 and not schedule.has_damaged(replaced.split("-")[0]) and schedule.is_twice(replaced):
        schedule.blank_disk_of(replaced)
    elif chance.random() < 0.3:
        for name in away:
            schedule.later(12 * chance.random(), world.start, name)
    world.loop.run(world.loop.now_s + 8 * chance.random())
    if chance.random() < 0.3:
        kill_at_chain_write(schedule, chance.randint(1, 30))
    if others and chance.random() < 0.7:
        at_chain_write(schedule, chance.randint(1, 8), schedule.pause_coordinator)
    _recovered(schedule, others)
    world.loop.run(world.loop.now_s + chance.choice((0.1, 8.0)) * chance.random())
    _start_all(schedule)
    schedule.until(lambda: _are_all_there(schedule), "every member is registered", SOON_S)
    _recovered(schedule, others)  # who came back may know more
    schedule.later(10.0, give_up_lost, schedule)
    schedule.until_sending_goes_on(SOON_S)


def _away(schedule: Schedule) -> list[str]:
    """A group, one of its members, or all but one; somebody who knows which links there are stays, of each queue."""
    world, chance = schedule.world, schedule.chance
    knowing = [[name for name in world.member_names if _knows(schedule, one, name)] for one in world.live_queues]
    stay = [chance.choice(names) for names in knowing]
    group = chance.choice(world.group_names)
    members = [f"{group}-a", f"{group}-b"]
    away = chance.choice((members, members[:1], members[1:], world.member_names))
    for names, stays in zip(knowing, stay, strict=True):
        if set(names) <= set(away):
            away = [name for name in away if name != stays]
    return away or [next(name for name in world.member_names if name not in stay)]


def _knows(schedule: Schedule, queue: Queue, name: str) -> bool:
    """Whether this disk has a flushed copy of the chain with all its links, and none that were let go."""
    document = queue.document
    assert document is not None
    data = _copy(schedule, name, document.queue_id)
    copy = None if data is None else chain_json.decode(data[8:])
    return copy is not None and (copy.dropped, copy.next_epoch) == (document.dropped, document.next_epoch)


def _copy(schedule: Schedule, name: str, queue_id: QueueId) -> bytes | None:
    host = schedule.world.hosts[name]
    assert isinstance(host, MemberHost)
    return host.disk.durable.values.get(layout.key(b"Q", (queue_id, Epoch(0))))


def _recovered(schedule: Schedule, others: int = 0) -> None:
    """An operator has each queue recovered, and asks again until it is, or need not be. `others`: so many do so once, within moments."""
    for queue in schedule.world.live_queues:
        _recovered_one(schedule, queue, others)


def _recovered_one(schedule: Schedule, queue: Queue, others: int) -> None:
    world, chance = schedule.world, schedule.chance
    request = pb.RecoverQueueRequest(queue=queue.name, confirmed_queue=queue.name)
    was_cut_off = False
    for _ in range(others):
        schedule.beside("RecoverQueue", request, after_s=chance.choice((0.05, 0.3, 1.5)) * chance.random())
    for _ in range(40):
        if chance.random() < 0.2:
            schedule.beside("RecoverQueue", request)
        reply = asked(schedule, "RecoverQueue", request)
        if reply is not None and (reply.is_done or reply.is_needless or was_cut_off):
            return
        was_cut_off = reply is None
        world.loop.run(world.loop.now_s + 1.0)
    raise Violation("12: the queue is never recovered")


def _switched_from(schedule: Schedule) -> Kept:
    """What ZooKeeper has; then sending goes on with another group, once or twice."""
    world, chance = schedule.world, schedule.chance
    world.may_seek = False
    calmed(schedule)
    older = world.ensemble.copied()
    switched(schedule)
    if chance.random() < 0.5:
        calmed(schedule)
        switched(schedule)
    world.loop.run(world.loop.now_s + chance.choice((0.3, 3.0)) * chance.random())
    return older


def _set_back(schedule: Schedule, older: Kept) -> Kept:
    """ZooKeeper has these data for a while, under all who run, or with everybody ended: nothing may be sent. Returns its newest data."""
    world = schedule.world
    living = random.Random(f"living {schedule.seed} {world.loop.now_s}")
    newest = world.ensemble.copied()
    if living.random() < 0.5:
        _put_back_under_all(schedule, older, living)
    else:
        _put_back(schedule, older)
    _nothing_is_sent(schedule)
    return newest


def _nothing_is_sent(schedule: Schedule) -> None:
    """For a while, with everybody there. Raises Violation."""
    world = schedule.world
    began_s = world.loop.now_s
    _start_all(schedule)
    world.loop.run(began_s + 8 * schedule.chance.random())
    if any((one.acknowledged_at_s or 0) > began_s for one in schedule.queue.ledger.sent.values()):
        raise Violation("8: sending goes on by a chain that was set back")


def _put_back_under_all(schedule: Schedule, kept: Kept, chance: random.Random) -> None:
    """As `_put_back`, while everybody runs on, but for coordinators at times. Returns when no sender goes on unaware."""
    world = schedule.world
    world.note(f"ZooKeeper goes on with a copy of {len(kept.nodes)} nodes")
    world.ensemble.set_back_under_all(kept)
    world.oracle.put_back(kept.nodes)
    for name in world.coordinator_names:
        if chance.random() < 0.4:
            world.kill(name, is_power=False)
            schedule.later(chance.random() * _UNAWARE_S, world.start, name)
    world.loop.run(world.loop.now_s + _UNAWARE_S)


def _start_all(schedule: Schedule) -> None:
    for name in schedule.world.hosts:
        schedule.world.start(name)


def _are_all_there(schedule: Schedule) -> bool:
    world, paths = schedule.world, Paths(CLUSTER)
    return all(paths.member(*name.split("-")) in world.ensemble.leader.nodes for name in world.member_names)


def _is_kept(schedule: Schedule) -> bool:
    """Whether some disk has a flushed copy of each chain as it is now."""
    return all(_is_kept_of(schedule, queue) for queue in schedule.world.live_queues)


def _is_kept_of(schedule: Schedule, queue: Queue) -> bool:
    world = schedule.world
    document = queue.document
    assert document is not None
    now = world.ensemble.leader.nodes[Paths(CLUSTER).chain(document.queue_id)].version
    copies = (_copy(schedule, name, document.queue_id) for name in world.member_names)
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
    "recovered without some": (0.3, recover_without),
    "recovered by several": (0.2, recover_by_several),
}
