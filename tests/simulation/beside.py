"""Another queue, on the same groups: it is made, deleted and made again, whatever goes on with them and with the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import LinkState
from tests.simulation.ledger import Violation
from tests.simulation.queue import Queue
from tests.simulation.scenarios import SOON_S, asked, calmed, lost_with_a_disk, to_make
from tests.simulation.setbacks import recover_from
from tests.simulation.world import names_of

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule

_TRIES = 40
"""An operator asks so often, each second: with everything down he isn't answered."""


def make_queue(schedule: Schedule, queue: Queue) -> None:
    """An operator asks for it until it is there; its applications wait for that."""
    world = schedule.world
    world.begin_queue(queue)
    _until(schedule, lambda: queue.document is not None, "CreateQueue", to_make(schedule, queue))
    for name in queue.applications:
        world.start(name)


def delete_queue(schedule: Schedule, queue: Queue) -> None:
    """With all that lies in it, read or not; its applications end first."""
    for name in queue.applications:
        schedule.world.kill(name, is_power=False)
    document = queue.document
    assert document is not None
    request = pb.QueueRequest(queue=queue.name, queue_id=document.queue_id)
    _until(schedule, lambda: queue.document is None, "DeleteQueue", request)
    schedule.world.end_queue(queue)


def _until(schedule: Schedule, is_done: Callable[[], bool], method: str, request: object) -> None:
    world = schedule.world
    for _ in range(_TRIES):
        asked(schedule, method, request)
        if is_done():
            return
        world.loop.run(world.loop.now_s + 1.0)
    raise Violation(f"12: {method} is never done")


def make_other_again(schedule: Schedule) -> None:
    """Made, where it isn't there; else deleted first (H16)."""
    if schedule.other.is_there:
        delete_queue(schedule, schedule.other)
    make_queue(schedule, schedule.other)


def delete_other(schedule: Schedule) -> None:
    """Or made, where it isn't there."""
    change = delete_queue if schedule.other.is_there else make_queue
    change(schedule, schedule.other)


def set_back_before_other(schedule: Schedule) -> None:
    """ZooKeeper is set back to before it was made, and it is recovered from a member's copy: the first one has gone on meanwhile, or is set
    back, too."""
    world, other = schedule.world, schedule.other
    world.may_seek = False
    calmed(schedule)
    if other.is_there:
        delete_queue(schedule, other)
    older = world.ensemble.copied()
    make_queue(schedule, other)
    schedule.until_sending_goes_on(SOON_S)
    recover_from(schedule, older)


def _is_to_be_sought(schedule: Schedule, queue: Queue) -> bool:
    return queue.document is not None and bool(schedule.links_without_cursors(queue.document))


def _has_lost(queue: Queue) -> bool:
    """Whether it waits for an operator itself."""
    document = queue.document
    return document is not None and any(link.state is LinkState.LOST for link in document.links)


def lose_cursors_of_other(schedule: Schedule) -> None:
    """Of a link of it, both members lack commits, until somebody says from where to read: their group comes back for the first queue (12)."""
    world, first, other = schedule.world, schedule.world.queues[0], schedule.other
    if not other.is_there:
        make_queue(schedule, other)
        schedule.until_sending_goes_on(SOON_S)
    calmed(schedule)
    link = other.head
    if link is None or first.head is None or first.head.group != link.group:
        return
    schedule.queue = other
    schedule.leave()
    for name in first.readers:  # who commits nothing meanwhile loses nothing
        world.kill(name, is_power=False)
    if lost_with_a_disk(schedule, link, *schedule.chance.sample(names_of(link), 2)):
        if not world.loop.run(world.loop.now_s + SOON_S, lambda: _is_to_be_sought(schedule, other)):
            return  # all had read it to its end by then
        for name in first.readers:
            world.start(name)
        schedule.until(
            lambda: schedule.is_listed(first) or _has_lost(first), f"{link.group} comes back for {first.name}", SOON_S
        )


BESIDE: dict[str, tuple[float, Callable[[Schedule], None]]] = {
    "another queue made": (2, make_other_again),
    "another queue deleted": (1, delete_other),
    "cursors of another queue lost": (0.3, lose_cursors_of_other),
    "set back before another queue": (0.3, set_back_before_other),
}
