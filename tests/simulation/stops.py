"""What people stop on purpose, and start again: a process, a machine, a whole cluster, one after the other or all at once.

A stop is begun at any step, and is under way when the next fault comes; or the process is killed in the midst of it. Those that
say how it ends, and what goes on meanwhile, begin with everything healed and whole, as in `scenarios`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seriatim.protocol.chain import Link, LinkState, Subscription
from seriatim.protocol.election import first_in_line
from seriatim.protocol.nodes import Paths
from tests.simulation.ledger import Violation
from tests.simulation.loop import PATIENCE_S
from tests.simulation.queue import Queue
from tests.simulation.scenarios import SOON_S, calmed
from tests.simulation.world import CLUSTER, World, names_of

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule

AT_ONCE_S = 2.5
"""Less than a session lasts: who goes on within that has waited for none."""
SESSION_S = 4.5
"""And this is longer."""
CLOSE_S = PATIENCE_S + 15.0
"""Nobody takes longer to stop. A sender may need long for what it has sent: where limits are small."""


def _stoppable(world: World) -> list[str]:
    return [name for name in world.hosts if name != "operator"]


def _stop(schedule: Schedule, name: str) -> None:
    """And sometimes it doesn't come to its end."""
    chance = schedule.stop_chance
    schedule.world.stop(name, chance.choice((0.0, 0.3, 6.0)) * chance.random())
    process = schedule.world.hosts[name].process
    if process is None or not process.is_alive:
        return
    process.patience_s = chance.choice((0.3, PATIENCE_S))
    if chance.random() < 0.3:
        process.steps_to_live = chance.randint(0, 150)


def stop_one(schedule: Schedule) -> None:
    """Any process; the members of the link that is open more often than others."""
    link, chance = schedule.queue.head, schedule.stop_chance
    names = _stoppable(schedule.world)
    if link is not None and chance.random() < 0.4:
        names = [*names_of(link)]
    _stop(schedule, chance.choice(names))


def stop_group(schedule: Schedule) -> None:
    """Both members of the link that is open, one a moment behind the other."""
    link, chance = schedule.queue.head, schedule.stop_chance
    for name in () if link is None else names_of(link):
        schedule.later(chance.choice((0.0, 0.05, 0.6)) * chance.random(), _stop, schedule, name)


def stop_all(schedule: Schedule) -> None:
    """Everything is shut down at once."""
    for name in _stoppable(schedule.world):
        _stop(schedule, name)


def _stopped(schedule: Schedule, name: str, away_s: float) -> None:
    """It is asked to stop, and has."""
    schedule.world.stop(name, away_s)
    schedule.until(lambda: name not in schedule.world.stopping, f"{name} stops", CLOSE_S)


def restart_one_by_one(schedule: Schedule) -> None:
    """As an upgrade does it: the next one once all is well again. Some of them: a schedule is to be short."""
    world = schedule.world
    calmed(schedule)
    names = _stoppable(world)
    schedule.stop_chance.shuffle(names)
    for name in names[:4]:
        _stopped(schedule, name, 0.2 * schedule.stop_chance.random())
        schedule.calm()


def stop_member(schedule: Schedule) -> None:
    """A member of the head stops: the other one seals the link, whole, and sending goes on before any session would have ended."""
    world = schedule.world
    schedule.calm()
    world.loop.run(world.loop.now_s + SESSION_S)  # a coordinator that has just come to ZooKeeper waits for all members
    link = calmed(schedule)
    if link.state is not LinkState.OPEN or schedule.has_damaged(link.group):
        return
    at_once_s = world.loop.now_s + AT_ONCE_S
    side = schedule.stop_chance.choice((link.master, link.slave))
    world.stop(str(side.name), 6.0)

    def is_sealed() -> bool:
        now = None if schedule.queue.document is None else schedule.queue.document.link(link.epoch)
        return now is None or now.certificate is not None

    schedule.until(is_sealed, f"link {link.epoch} is sealed at once, {side.name} stops", AT_ONCE_S)
    _check_sealed(schedule, link)

    def goes_on() -> bool:
        """Also where there is much to send first."""
        places = [one.place for one in schedule.queue.ledger.sent.values() if one.place is not None]
        return any(epoch > link.epoch for epoch, _ in places)

    schedule.until(goes_on, "sending goes on at once", at_once_s - world.loop.now_s)
    schedule.until(lambda: not world.stopping, f"{side.name} stops", AT_ONCE_S)


def _check_sealed(schedule: Schedule, link: Link) -> None:
    now = None if schedule.queue.document is None else schedule.queue.document.link(link.epoch)
    if now is not None and (
        now.state is not LinkState.SEALED or now.certificate is None or not now.certificate.is_whole
    ):
        raise Violation(f"4: a member of link {link.epoch} stopped, and the link is {now.state}, {now.certificate}")


def close_sender(schedule: Schedule) -> None:
    """The elected sender closes: all that it took is acknowledged, and another one goes on at once."""
    world, queue, ledger = schedule.world, schedule.queue, schedule.queue.ledger
    calmed(schedule)
    name = _elected(schedule, _senders)
    token, unknown, began_s = _sender_token(queue), ledger.unknown, world.loop.now_s
    _stopped(schedule, name, 6.0)
    if ledger.unknown > unknown and world.loop.now_s < began_s + PATIENCE_S:
        raise Violation(f"8: {name} was closed, and {ledger.unknown - unknown} of its records ended as unknown")
    schedule.until(lambda: _sender_token(queue) > token, f"another sender than {name} is elected at once", AT_ONCE_S)
    elected_s = world.loop.now_s

    def goes_on() -> bool:
        """Also where there is much to send first."""
        return any((one.acknowledged_at_s or 0) > elected_s for one in ledger.sent.values())

    schedule.until(goes_on, "sending goes on at once", AT_ONCE_S)


def close_reader(schedule: Schedule) -> None:
    """The elected reader closes: what its application was done with is committed, and another one goes on at once, there."""
    queue = schedule.queue
    calmed(schedule)
    schedule.until(schedule.is_all_read, "all is read", SOON_S)
    name = _elected(schedule, _readers)
    progress, token, reached = queue.ledger.progress["main"], _reader_token(queue), _reached(queue)
    if not token:
        return
    _stopped(schedule, name, 6.0)
    generation, place = queue.ledger.done.get(name, (0, (0, 0)))
    if generation == progress.generation and progress.committed < place:
        raise Violation(f"6: {name} was closed, done up to {place}, and {progress.committed} is committed")
    schedule.until(lambda: _reader_token(queue) > token, f"another reader than {name} is elected at once", AT_ONCE_S)
    schedule.until(lambda: _reached(queue) > reached, "reading goes on at once", AT_ONCE_S)


def resign(schedule: Schedule) -> None:
    """The elected coordinator stops: another one is elected at once."""
    world = schedule.world
    calmed(schedule)
    if len(world.coordinator_names) > 1:
        name = _elected(schedule, _coordinators)
        _stopped(schedule, name, 6.0)
        schedule.until(
            lambda: _first(schedule, _coordinators) not in ("", name), "another coordinator is elected", AT_ONCE_S
        )


def _sender_token(queue: Queue) -> int:
    return 0 if queue.document is None else queue.document.sender_token


def _main(queue: Queue) -> Subscription | None:
    return None if queue.document is None else queue.document.subscription("main")


def _reader_token(queue: Queue) -> int:
    main = _main(queue)
    return 0 if main is None else main.reader_token


def _reached(queue: Queue) -> int:
    return max(queue.ledger.progress["main"].delivered, default=-1)


# ---- who stands

_Election = Callable[[Queue], str]
"""Where it is."""


def _coordinators(_: Queue) -> str:
    return Paths(CLUSTER).coordinator_election


def _senders(queue: Queue) -> str:
    return "" if queue.document is None else Paths(CLUSTER).senders(queue.document.queue_id)


def _readers(queue: Queue) -> str:
    main = _main(queue)
    if queue.document is None or main is None:
        return ""
    return Paths(CLUSTER).readers(queue.document.queue_id, main.subscription_id)


def _first(schedule: Schedule, election: _Election) -> str:
    """Who is first in line; empty: nobody."""
    world, path = schedule.world, election(schedule.queue)
    leader = world.ensemble.leader
    node = first_in_line(list(leader.children.get(path, ())))
    process = None if node is None else world.ensemble.process_of(leader.nodes[f"{path}/{node}"].owner)
    return "" if process is None else process.host.name


def _elected(schedule: Schedule, election: _Election) -> str:
    """Who is elected, once somebody else stands by, and nobody any more who was killed before: he would be next."""
    world = schedule.world
    leader = world.ensemble.leader

    def is_lined_up() -> bool:
        path = election(schedule.queue)
        nodes = [leader.nodes[f"{path}/{node}"] for node in leader.children.get(path, ())]
        standing = [world.ensemble.process_of(node.owner) for node in nodes]
        return len(standing) > 1 and all(one is not None and one.is_alive for one in standing)

    schedule.until(is_lined_up, "two stand for election", SOON_S)
    return _first(schedule, election)


STOPS: dict[str, tuple[float, Callable[[Schedule], None]]] = {
    "stop": (8, stop_one),
    "stop a group": (1, stop_group),
    "stop all": (1, stop_all),
    "restart one by one": (0.5, restart_one_by_one),
    "stop a member of the head": (1, stop_member),
    "close the sender": (1, close_sender),
    "close the reader": (1, close_reader),
    "resign": (0.5, resign),
}
