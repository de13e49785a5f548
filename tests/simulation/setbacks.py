"""ZooKeeper is given an older copy of its data, by somebody who means well, or by a machine that lost its newest writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.ensemble import Kept
from tests.simulation.ledger import Violation
from tests.simulation.scenarios import SOON_S, calmed, switched

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule


def set_zookeeper_back(schedule: Schedule) -> None:
    """To before a switch or two: nothing is sent, nor cut off, until it has its newest data again."""
    world, chance = schedule.world, schedule.chance
    calmed(schedule)
    older = world.ensemble.copied()
    switched(schedule)
    if chance.random() < 0.5:
        calmed(schedule)
        switched(schedule)
    world.loop.run(world.loop.now_s + chance.choice((0.3, 3.0)) * chance.random())
    newest = world.ensemble.copied()
    _put_back(schedule, older)
    began_s = world.loop.now_s
    for name in world.hosts:
        world.start(name)
    world.loop.run(began_s + 8 * chance.random())
    if any((one.acknowledged_at_s or 0) > began_s for one in world.ledger.sent.values()):
        raise Violation("8: sending goes on by a chain that was set back")
    _put_back(schedule, newest)
    for name in world.hosts:
        world.start(name)
    schedule.until_sending_goes_on(SOON_S)


def _put_back(schedule: Schedule, kept: Kept) -> None:
    """Everybody ends, and ZooKeeper begins again with these data."""
    world = schedule.world
    for name in (one for one in world.hosts if one != "operator"):
        world.kill(name, is_power=schedule.chance.random() < 0.3)
    world.note(f"ZooKeeper begins with a copy of {len(kept.nodes)} nodes")
    world.ensemble.put_back(kept)
    world.oracle.put_back(kept.nodes)
