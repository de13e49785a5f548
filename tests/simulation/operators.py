"""Several operators at once, and outages of all groups at once: what each of them was told may not hold any more when it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, LinkState
from tests.simulation.scenarios import (
    IDLE,
    SOON_S,
    asked,
    both_ways,
    calmed,
    is_read_on,
    kill_at_chain_write,
    settle_idle,
    to_abandon_it,
    to_create,
)
from tests.simulation.world import names_of

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule

Order = tuple[str, object]
"""A method, and what is asked of it."""


def order_at_once(schedule: Schedule) -> None:
    """Some give orders at the same time, the same one or others; meanwhile a member dies, or all coordinators behind a write of the chain."""
    world, chance = schedule.world, schedule.chance
    document = schedule.queue.document
    if document is None or document.subscription("main") is None:
        return
    orders = [chance.choice(_ORDERS)(schedule, document) for _ in range(chance.randint(2, 5))]
    answered = [
        schedule.beside(*order, after_s=chance.choice((0.0, 0.02, 0.5)) * chance.random())
        for order in orders
        if order is not None
        for _ in range(chance.choice((1, 1, 2)))
    ]
    match chance.randrange(4):
        case 0:
            schedule.kill()
        case 1:
            kill_at_chain_write(schedule, chance.randint(1, 4))
    schedule.until(lambda: all(one.is_set() for one in answered), "all operators are answered", SOON_S)
    for group in world.group_names:
        schedule.operate("ResumeGroup", pb.GroupRequest(group=group))


def _rotate(schedule: Schedule, document: ChainDocument) -> Order:
    """Off the link that is open now, or off whichever is."""
    return "RotateQueue", pb.QueueRequest(
        queue=schedule.queue.name, epoch=0 if document.last_link is None else document.last_link.epoch
    )


def _rotate_any(schedule: Schedule, _: ChainDocument) -> Order:
    return "RotateQueue", pb.QueueRequest(queue=schedule.queue.name)


def _drain(schedule: Schedule, _: ChainDocument) -> Order:
    return "DrainGroup", pb.GroupRequest(group=schedule.chance.choice(schedule.world.group_names))


def _resume(schedule: Schedule, _: ChainDocument) -> Order:
    return "ResumeGroup", pb.GroupRequest(group=schedule.chance.choice(schedule.world.group_names))


def _remove(schedule: Schedule, _: ChainDocument) -> Order:
    """It is refused: its members are there."""
    return "RemoveGroup", pb.GroupRequest(group=schedule.chance.choice(schedule.world.group_names))


def _alter(schedule: Schedule, _: ChainDocument) -> Order:
    chance = schedule.chance
    names = schedule.world.group_names
    settings = pb.QueueSettings(
        retention_ms=chance.choice((1, 1000)),
        readmit=chance.choice(("drained", "in-sync")),
        groups=chance.sample(names, 2) if chance.random() < 0.7 else (),
    )
    return "AlterQueue", pb.AlterQueueRequest(
        queue=schedule.queue.name, settings=settings, all_groups=not settings.groups
    )


def _abandon(schedule: Schedule, document: ChainDocument) -> Order | None:
    """A lost link, though its members may come back; or a sealed one, of which nothing is to be given up."""
    ended = [one for one in document.links if one.state in (LinkState.LOST, LinkState.SEALED)]
    if not ended:
        return None
    return "AbandonLink", to_abandon_it(schedule.queue, schedule.chance.choice(ended))


def _seek(schedule: Schedule, _: ChainDocument) -> Order:
    return "SeekSubscription", pb.SeekSubscriptionRequest(queue=schedule.queue.name, subscription="main", to="earliest")


def _subscribe(schedule: Schedule, _: ChainDocument) -> Order:
    schedule.queue.ledger.idle.add(IDLE)
    return "CreateSubscription", to_create(schedule.queue, IDLE, schedule.chance.choice(("latest", "earliest")))


def _unsubscribe(schedule: Schedule, _: ChainDocument) -> Order:
    return "DeleteSubscription", pb.SubscriptionRequest(queue=schedule.queue.name, subscription=IDLE)


def _recover(schedule: Schedule, _: ChainDocument) -> Order:
    """There is nothing to recover."""
    return "RecoverQueue", pb.RecoverQueueRequest(queue=schedule.queue.name, confirmed_queue=schedule.queue.name)


def _make(schedule: Schedule, _: ChainDocument) -> Order:
    """It is there already."""
    return "CreateQueue", pb.CreateQueueRequest(queue=schedule.queue.name, settings=schedule.queue.settings)


_ORDERS: tuple[Callable[[Schedule, ChainDocument], Order | None], ...] = (
    _rotate,
    _rotate,
    _rotate_any,
    _drain,
    _drain,
    _resume,
    _remove,
    _alter,
    _alter,
    _abandon,
    _seek,
    _subscribe,
    _unsubscribe,
    _recover,
    _make,
)


def lose_all_groups(schedule: Schedule) -> None:
    """Of each group a member is gone at once, or its disk slow, or the two don't reach each other: sending waits, and goes on when one is back."""
    world, chance = schedule.world, schedule.chance
    calmed(schedule)
    for group in world.group_names:
        pair = [f"{group}-a", f"{group}-b"]
        chance.shuffle(pair)
        away_s = chance.choice((0.3, 8.0)) * chance.random()
        match chance.randrange(6):
            case 0:
                schedule.slow_down(pair[0], 0.5, away_s)
            case 1:
                schedule.cut_for(away_s, tuple(pair), tuple(pair[::-1]))
            case 2:
                schedule.cut_for(away_s, *both_ways(pair, schedule.queue.senders))
            case _:
                for name in pair[: chance.choice((1, 1, 2))]:
                    world.kill(name, is_power=chance.random() < 0.5)
                    schedule.later(away_s * chance.uniform(0.5, 1), world.start, name)
        world.loop.run(world.loop.now_s + chance.choice((0.0, 0.05, 1.0)) * chance.random())
    schedule.until_sending_goes_on(SOON_S)


def lose_beside(schedule: Schedule) -> None:
    """A link is lost, and who is there of its group can't tell its end; meanwhile the other groups fail, and come back (12)."""
    link, world = calmed(schedule), schedule.world
    one, other = schedule.chance.sample(names_of(link), 2)
    settings = pb.QueueSettings(readmit="in-sync")
    for queue in world.live_queues:
        if asked(schedule, "AlterQueue", pb.AlterQueueRequest(queue=queue.name, settings=settings)) is None:
            return
    for name in (one, other):
        world.kill(name, is_power=True)
    is_blank = not schedule.has_damaged(link.group) and schedule.is_twice(one)
    if is_blank:
        schedule.blank_disk_of(one)
    schedule.until_sending_goes_on(SOON_S)
    if not is_blank:
        world.start(other)
    world.start(one)
    world.loop.run(world.loop.now_s + 2.0)
    for group in [name for name in world.group_names if name != link.group]:
        name = f"{group}-{schedule.chance.choice('ab')}"
        world.kill(name, is_power=False)
        world.start(name)
    schedule.until_sending_goes_on(SOON_S)
    world.start(other)


def leave_all_unread(schedule: Schedule) -> None:
    """All groups have failed, and have records that nobody reads, so that sending waits; the first that is read comes back at once (12)."""
    calmed(schedule)
    world, chance = schedule.world, schedule.chance
    settings = pb.QueueSettings(readmit="drained", rotate_ms=0)
    if asked(schedule, "AlterQueue", pb.AlterQueueRequest(queue=schedule.queue.name, settings=settings)) is None:
        return
    settle_idle(schedule, schedule.queue)
    readers = schedule.queue.readers
    for name in readers:
        world.kill(name, is_power=False)

    def serving() -> Link | None:
        document = schedule.queue.document
        last = None if document is None else document.last_link
        return last if last is not None and document is not None and last.group in document.send_list else None

    def has_records() -> bool:
        link = serving()
        return link is None or any(
            one.place is not None and one.place[0] == link.epoch for one in schedule.queue.ledger.sent.values()
        )

    for _ in range(2 * len(world.group_names)):
        schedule.until(has_records, "the next group takes records", SOON_S)
        link = serving()
        if link is None:
            break
        name = chance.choice(names_of(link))
        world.kill(name, is_power=False)
        world.start(name)
        schedule.until(lambda link=link: serving() != link, f"link {link.epoch} ends", SOON_S)  # type: ignore[misc]
    world.loop.run(world.loop.now_s + 6.0)  # the members are there again, and in sync
    if schedule.queue.document is None or schedule.queue.document.send_list:
        return  # somebody else's order came between
    groups = schedule.queue.document.settings.groups or world.group_names
    for name in readers:
        world.start(name)

    def is_one_read() -> bool:
        return any(is_read_on(schedule.queue, group) for group in groups)

    def is_one_back() -> bool:
        return schedule.queue.document is not None and bool(schedule.queue.document.send_list)

    schedule.until(is_one_read, "all of a group is read", SOON_S)
    schedule.until(is_one_back, "a group that is read, and that sending waits for, comes back at once", 0.5)


OPERATORS: dict[str, tuple[float, Callable[[Schedule], None]]] = {
    "orders at once": (1, order_at_once),
    "all groups away": (0.5, lose_all_groups),
    "lost beside others": (0.3, lose_beside),
    "all unread": (0.3, leave_all_unread),
}
