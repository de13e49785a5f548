"""Faults with a story: what people do, and outages of which it can be said what has to go on meanwhile.

Those that say what has to go on begin with everything healed and whole, so that nothing else can be the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, LinkState, Readmit
from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.nodes import Paths
from tests.simulation.applications import Reader
from tests.simulation.ledger import Violation
from tests.simulation.queue import Queue
from tests.simulation.world import CLUSTER, MemberHost, names_of

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule

IDLE = "idle"
"""A subscription that nobody reads."""
SOON_S = 40.0
"""Longer than all time-outs together that an outage may cost."""


def to_create(queue: Queue, subscription: str, where: str) -> pb.CreateSubscriptionRequest:
    """A request for one that stands there."""
    request = pb.CreateSubscriptionRequest(queue=queue.name, subscription=subscription)
    setattr(request, "from", where)
    return request


def to_abandon_it(queue: Queue, link: Link) -> pb.AbandonLinkRequest:
    """A request to give up what is lost of a link."""
    return pb.AbandonLinkRequest(queue=queue.name, epoch=link.epoch, confirmed_queue=queue.name)


def both_ways(some: Iterable[str], others: Collection[str]) -> list[tuple[str, str]]:
    """Each direction between hosts of the one kind and of the other."""
    return [pair for one in some for other in others for pair in ((one, other), (other, one))]


def calmed(schedule: Schedule) -> Link:
    """Everything is healed, and whole again; the link that is open then."""
    schedule.calm()
    document = schedule.queue.document
    assert document is not None
    assert document.last_link is not None
    return document.last_link


def asked(schedule: Schedule, method: str, request: object) -> Any:
    """An operator asks, and waits for the answer; None where it is refused."""
    answers = []

    async def ask() -> None:
        answers.append(await schedule.answer(method, request))

    schedule.order(method, ask)
    schedule.until(lambda: bool(answers), f"the operator is answered: {method}", 30.0)
    return answers[0]


def switched(schedule: Schedule) -> None:
    """Sending goes on with another group: asked for, or because a member died, or both."""
    world, chance = schedule.world, schedule.chance
    document = schedule.queue.document
    assert document is not None
    link = document.last_link
    assert link is not None
    if chance.random() < 0.5:
        # A coordinator whose ZooKeeper server is behind may not see yet that there is a group to go on with.
        while asked(schedule, "RotateQueue", pb.QueueRequest(queue=schedule.queue.name)) is None:
            world.loop.run(world.loop.now_s + 1.0)
    else:
        for name in names_of(link)[: chance.choice((1, 2))]:
            world.kill(name, is_power=chance.random() < 0.5)
            schedule.later(SOON_S / 4, world.start, name)

    def has_switched() -> bool:
        now = schedule.queue.document
        return now is not None and now.last_link is not None and now.last_link.epoch > link.epoch

    schedule.until(has_switched, "sending goes on with another group", SOON_S)
    schedule.until_sending_goes_on(SOON_S)


# ---- crashes between two writes


def kill_at_write(schedule: Schedule) -> None:
    """A member dies between two writes; half of the time, of those that aren't batches."""
    name = schedule.any_member()
    host = schedule.world.hosts[name]
    assert isinstance(host, MemberHost)
    is_any = schedule.chance.random() < 0.3
    writes = schedule.chance.randint(1, 30 if is_any else 4)
    schedule.world.note(f"{name} has {writes} more {'writes' if is_any else 'writes of other than batches'}")
    schedule.world.dies_at_write[name] = writes, is_any
    schedule.later(4.0, schedule.world.start, name)


def kill_at_chain_write(schedule: Schedule, number: int = 1) -> None:
    """The coordinators die as soon as one of them has written a chain; or so many times."""
    world = schedule.world
    world.note(f"the coordinators die behind write {number} of a chain from now on")

    def written() -> None:
        for name in world.coordinator_names:
            world.kill(name, is_power=False)
            schedule.later(6.0 * schedule.chance.random() + schedule.some_s(), world.start, name)

    at_chain_write(schedule, number, written)


def at_chain_write(schedule: Schedule, number: int, happens: Callable[[], None]) -> None:
    """Behind this write of a chain from now on."""

    def written() -> None:
        if number > 1:
            at_chain_write(schedule, number - 1, happens)
        else:
            happens()

    schedule.world.at_chain_write = written


def empty_memory(schedule: Schedule) -> None:
    """The members' databases move what they have in memory to their disks, as they do when it is much."""
    for name in schedule.world.member_names:
        host = schedule.world.hosts[name]
        assert isinstance(host, MemberHost)
        if host.process is not None and host.process.is_alive and not host.disk.is_failing:
            schedule.world.note(f"{name} empties its memory")
            host.disk.emptied_memory()


def damage_on_the_way(schedule: Schedule) -> None:
    """Batches arrive with another bit than they were sent with, from a sender or from a master."""
    schedule.world.network.damages = schedule.chance.randint(1, 4)
    schedule.world.note(f"{schedule.world.network.damages} batches are damaged on their way")


def split_head(schedule: Schedule) -> None:
    """Master and slave don't reach each other, and everybody else does."""
    link = schedule.queue.head
    if link is not None:
        one, other = names_of(link)
        pairs = [(one, other), (other, one)]
        seconds = schedule.some_s()
        for pair in pairs[: schedule.chance.choice((1, 2, 2))]:
            schedule.world.cut(*pair)
            schedule.later(seconds, schedule.world.heal_cut, *pair)


# ---- outages in which something has to go on


def _head_dies(schedule: Schedule) -> Link:
    link = calmed(schedule)
    for name in names_of(link):
        schedule.world.kill(name, is_power=schedule.chance.random() < 0.5)
    return link


def lose_head(schedule: Schedule) -> None:
    """Both members of the head are gone for a while: sending goes on with another group (protocol.md 5.4)."""
    link = _head_dies(schedule)
    schedule.until_sending_goes_on(SOON_S)
    for name in names_of(link):
        schedule.later(schedule.some_s(), schedule.world.start, name)


def fail_head(schedule: Schedule) -> None:
    """A disk of the head fails, and the other one fails, is full, or is gone: sending goes on with another group (protocol.md 5.4)."""
    link, world = calmed(schedule), schedule.world
    one, other = schedule.chance.sample(names_of(link), 2)
    mends = [schedule.fail_disk_of(one)]
    what = schedule.chance.choice(("fails", "fails", "fails", "is full", "is gone"))
    if what == "fails":
        world.loop.run(world.loop.now_s + schedule.chance.choice((0.0, 0.1, 2.0)) * schedule.chance.random())
        mends.append(schedule.fail_disk_of(other))
    elif what == "is full":
        mends.append(schedule.fill_disk_of(other))
    else:
        world.kill(other, is_power=schedule.chance.random() < 0.5)
        mends.append(lambda: world.start(other))
    schedule.until_sending_goes_on(SOON_S)
    for mend in mends:
        schedule.later(schedule.some_s(), mend)


def hang_head(schedule: Schedule) -> None:
    """The disks of the head stand still, as on one storage: sending goes on with another group as long as they do (protocol.md 5.4)."""
    link = calmed(schedule)
    go_on = [schedule.stop_disk_of(name) for name in names_of(link)]
    schedule.until_sending_goes_on(SOON_S)
    for disk_goes_on in go_on:
        schedule.later(schedule.some_s(), disk_goes_on)


def abandon_head(schedule: Schedule) -> None:
    """Both members of the head are gone for good: an operator gives the link up. Then they come back all the same (H21).

    It counts as lost by then, or was sealed before they died, by a planned switch that was under way.
    """
    link, world = _head_dies(schedule), schedule.world
    schedule.until_sending_goes_on(SOON_S)

    def to_abandon() -> list[Link]:
        """With the head, earlier links of its group that a subscription was sought back to."""
        document = schedule.queue.document
        if document is None:
            return []
        listed = {epoch for one in document.subscriptions for epoch in one.consume_list}
        return [
            one
            for one in document.links
            if one.group == link.group
            and (one.epoch == link.epoch or (one.epoch < link.epoch and one.epoch in listed))
            and not (one.certificate is not None and one.certificate.is_abandoned)
        ]

    def is_closed() -> bool:
        return all(one.state in (LinkState.LOST, LinkState.SEALED) for one in to_abandon())

    schedule.until(is_closed, "the link counts as lost, or is sealed", SOON_S)
    for name in [name for name in world.coordinator_names if schedule.chance.random() < 0.3]:
        world.kill(name, is_power=False)
        world.start(name)
    for _ in range(10):
        for one in to_abandon():
            asked(schedule, "AbandonLink", to_abandon_it(schedule.queue, one))
    schedule.until(schedule.is_all_read, "what comes behind the abandoned link is read", SOON_S)
    for name in names_of(link):
        schedule.later(schedule.some_s(), world.start, name)


def unreachable_head(schedule: Schedule) -> None:
    """Both members of the head are registered, and no coordinator and no sender reaches them (H15)."""
    link, world = calmed(schedule), schedule.world
    others = [*world.coordinator_names, *schedule.queue.senders]
    cuts = both_ways(names_of(link), others)
    for pair in cuts:
        world.cut(*pair)
    schedule.until_sending_goes_on(SOON_S)
    for pair in cuts:
        world.heal_cut(*pair)


def nobody_sends(schedule: Schedule) -> None:
    """The head's members start again while nobody sends: the tail has to become readable all the same (H18)."""
    link, world = calmed(schedule), schedule.world
    readers = schedule.queue.readers
    for name in readers:
        world.kill(name, is_power=False)
    world.loop.run(world.loop.now_s + 0.2 + 0.5 * schedule.chance.random())
    for name in schedule.queue.senders:
        world.kill(name, is_power=False)
    for name in names_of(link):
        world.kill(name, is_power=True)
    for name in (*names_of(link), *readers):
        schedule.later(0.1 + 0.2 * schedule.chance.random(), world.start, name)
    world.loop.run(world.loop.now_s + 0.5)
    schedule.until(schedule.is_all_read, "what was sent is read, though nobody sends", SOON_S)
    for name in schedule.queue.senders:
        world.start(name)


def _change_places(schedule: Schedule, *, goes: str, comes: str) -> None:
    """One member goes, with the readers, for longer than its session, and the other one is back."""
    world = schedule.world
    world.kill(goes, is_power=True)
    schedule.kill_readers()
    world.start(comes)
    schedule.later(6 + 6 * schedule.chance.random(), world.start, goes)


def _noted(schedule: Schedule, link: Link, name: str) -> Callable[[], bool]:
    def is_noted() -> bool:
        document = schedule.queue.document
        return document is not None and document.stale_note(link.epoch, name[-1]) is not None

    return is_noted


def let_go_at_rest(schedule: Schedule) -> None:
    """All of a link is read, and let go, while nobody sends. Whoever reads is in the next one before it is granted to him."""
    link, world = calmed(schedule), schedule.world
    for name in schedule.queue.senders:
        world.kill(name, is_power=False)
    settle_idle(schedule, schedule.queue)
    asked(
        schedule,
        "AlterQueue",
        pb.AlterQueueRequest(queue=schedule.queue.name, settings=pb.QueueSettings(retention_ms=1)),
    )
    asked(schedule, "RotateQueue", pb.QueueRequest(queue=schedule.queue.name))

    def is_let_go() -> bool:
        return schedule.queue.document is None or schedule.queue.document.link(link.epoch) is None

    schedule.until(is_let_go, "what is read is let go", SOON_S)
    readers = [name for name in schedule.queue.readers if name.startswith("reader")]
    cuts = [(reader, coordinator) for reader in readers for coordinator in world.coordinator_names]
    for pair in cuts:  # who is watched tells, and isn't heard when asked for a grant
        world.cut(*pair)
    for name in schedule.queue.senders:
        world.start(name)
    schedule.until_sending_goes_on(SOON_S)
    world.loop.run(world.loop.now_s + 0.3)
    for pair in cuts:
        world.heal_cut(*pair)


def note_taken_back_late(schedule: Schedule) -> None:
    """A member's cursors were stale and aren't any more, which is recorded late, or unheard by its peer; both go, in turn (H7)."""
    world, chance = schedule.world, schedule.chance
    link = schedule.link_read()
    if link is None:
        return
    one, other = chance.sample(names_of(link), 2)
    is_noted = _noted(schedule, link, one)
    world.kill(one, is_power=True)
    world.loop.run(world.loop.now_s + 10.0, is_noted)
    for name in world.coordinator_names:
        if chance.random() < 0.5:
            world.cut(name, other)
            schedule.later(12.0, world.heal_cut, name, other)
        else:
            world.network.slow_s[other, name] = 3 * chance.random()
            schedule.later(12.0, world.network.slow_s.pop, (other, name), None)
    world.start(one)
    world.loop.run(world.loop.now_s + 8.0, lambda: not is_noted())
    world.kill(one, is_power=True)
    world.loop.run(world.loop.now_s + 2.5 + 2.5 * chance.random())
    _change_places(schedule, goes=other, comes=one)


def commit_on_one(schedule: Schedule) -> None:
    """A commit comes to one member, and isn't answered; a reader starts there while the other one is away; then they change (H7)."""
    world, chance = schedule.world, schedule.chance
    link = schedule.link_read()
    if link is None:
        return
    one, other = chance.sample(names_of(link), 2)
    cuts = [(one, other), (other, one), *((one, name) for name in world.coordinator_names)]
    for pair in cuts:
        world.cut(*pair)
    world.loop.run(world.loop.now_s + 0.5 + chance.random())
    for name in (one, other):
        world.kill(name, is_power=True)
    for pair in cuts:
        world.heal_cut(*pair)
    schedule.kill_readers()
    world.start(one)
    world.loop.run(world.loop.now_s + 4.0 + 4.0 * chance.random())
    _change_places(schedule, goes=one, comes=other)


def commit_left_behind(schedule: Schedule) -> None:
    """A commit comes to one member, cut off with its reader, and isn't answered; the next reader commits at the other one before it is back."""
    world, chance = schedule.world, schedule.chance
    link = schedule.link_read()
    if link is None:
        return
    one, other = chance.sample(names_of(link), 2)
    cuts = [*both_ways((one,), (other, *world.coordinator_names)), *both_ways(schedule.readers, (other,))]
    for pair in cuts:
        world.cut(*pair)
    world.loop.run(world.loop.now_s + 0.5 + 2 * chance.random())
    world.kill(one, is_power=False)
    schedule.kill_readers()
    for pair in cuts:
        world.heal_cut(*pair)
    is_committed = world.oracle.readings.commits_of_the_next()
    world.loop.run(world.loop.now_s + 12.0, is_committed)
    if chance.random() < 0.5:
        schedule.kill_readers()
    world.start(one)
    world.loop.run(world.loop.now_s + 4.0)


def read_behind_a_note(schedule: Schedule) -> None:
    """A coordinator reads the chain from a server that is behind; since then a first commit has come to one member only, which goes (H7).

    First in that reader's generation: it was sought to a link whose members don't reach each other.
    """
    world, ensemble, link = schedule.world, schedule.world.ensemble, _sealed(schedule)
    if link is None or len(world.coordinator_names) < 2:
        return
    behind, other = schedule.chance.sample(world.coordinator_names, 2)
    readers = [name for name in schedule.queue.readers if name.startswith("reader")]
    pair = names_of(link)
    cuts = {pair, pair[::-1]}
    to_behind = {path for name in (*pair, *readers) for path in ((name, behind), (behind, name))}
    to_other = {path for name in readers for path in ((name, other), (other, name))}
    for path in cuts:
        world.cut(*path)
    request = pb.SeekSubscriptionRequest(queue=schedule.queue.name, subscription="main", to=str(link.base))
    process, is_sought = world.hosts[behind].process, asked(schedule, "SeekSubscription", request) is not None
    server = next((one.server for one in ensemble.sessions_of(process)), None)
    if server is not None and is_sought:
        world.note(f"ZooKeeper server {server.number}, which {behind} asks, is cut off")
        ensemble.catch_up(server)
        ensemble.cut_off(server, drops_after_s=SOON_S)
        for session in [one for one in server.sessions if one.process is not process]:
            session.disconnect()
        for path in to_behind:
            world.cut(*path)
        are_noted = {name: _noted(schedule, link, name) for name in pair}
        world.loop.run(world.loop.now_s + 2.5, lambda: any(is_noted() for is_noted in are_noted.values()))
        for path in to_behind:
            world.heal_cut(*path)
        goes = next((pair[1 - pair.index(name)] for name in pair if are_noted[name]()), None)
        if goes is not None:
            _read_again_without(schedule, goes, readers, to_other)
        ensemble.rejoin(server)
    world.loop.run(world.loop.now_s + 0.5)
    for path in cuts | to_other:
        world.heal_cut(*path)


def sought_while_cut_off(schedule: Schedule) -> None:
    """The ZooKeeper server of an elected reader is cut off, and goes on answering its pings; a coordinator answers the reader, too (H8, H10)."""
    world, ensemble = schedule.world, schedule.world.ensemble
    subscriptions = () if schedule.queue.document is None else schedule.queue.document.subscriptions
    nodes = [one.reader_node for one in subscriptions if one.name == "main"]
    readers = [name for name in world.hosts if name.startswith("reader") and any(name in node for node in nodes)]
    session = next((one for name in readers for one in ensemble.sessions_of(world.hosts[name].process)), None)
    server = None if session is None else session.server
    if session is None or server is None or server.is_cut_off:
        return
    for other in [one for one in server.sessions if one is not session]:
        other.disconnect()
    world.note(f"ZooKeeper server {server.number}, which {readers[0]} asks, is cut off")
    ensemble.cut_off(server, drops_after_s=SOON_S)
    world.loop.run(world.loop.now_s + session.session_timeout_s * schedule.chance.uniform(0.5, 0.95))
    schedule.operate(
        "SeekSubscription", pb.SeekSubscriptionRequest(queue=schedule.queue.name, subscription="main", to="earliest")
    )
    world.loop.run(world.loop.now_s + 1.5 * session.session_timeout_s)
    if server.is_cut_off:
        ensemble.rejoin(server)


def _sealed(schedule: Schedule) -> Link | None:
    """A link that has ended, with records that its readers have reached; a switch makes one."""
    world, queue = schedule.world, schedule.queue
    for _ in range(2):
        progress = queue.ledger.progress
        reached = max(progress["main"].delivered, default=0) if "main" in progress else 0
        for link in () if queue.document is None else queue.document.links:
            if link.certificate is not None and link.end and link.base is not None and link.base <= reached:
                return link
        schedule.operate("RotateQueue", pb.QueueRequest(queue=schedule.queue.name))
        world.loop.run(world.loop.now_s + 2.0)
    return None


def _read_again_without(schedule: Schedule, goes: str, readers: list[str], cuts: set[tuple[str, str]]) -> None:
    """The readers' connections to ZooKeeper break, so that the elected one asks again where it reads; meanwhile a member goes."""
    world = schedule.world
    for path in cuts:
        world.cut(*path)
    for name in readers:
        for session in world.ensemble.sessions_of(world.hosts[name].process):
            session.disconnect()
    world.loop.run(world.loop.now_s + 0.3 + 0.5 * schedule.chance.random())
    for session in world.ensemble.sessions_of(world.hosts[goes].process):
        world.ensemble.expire(session.session_id)
    world.kill(goes, is_power=True)
    schedule.later(4 + 4 * schedule.chance.random(), world.start, goes)


def lose_cursors(schedule: Schedule) -> None:
    """A member may lack commits, and the other one's disk, which has them all, is replaced, then its own: people seek (H7)."""
    world = schedule.world
    link = schedule.link_read()
    if link is None:
        return
    one, other = schedule.chance.sample(names_of(link), 2)
    is_lost = lost_with_a_disk(schedule, link, one, other)
    if is_lost and schedule.chance.random() < 0.5:
        world.loop.run(world.loop.now_s + 12.0, lambda: schedule.is_twice(one, (b"B",)))
        if schedule.is_twice(one, (b"B",)):  # the records have two copies again: people see to the other disk
            schedule.blank_disk_of(one)
            schedule.later(3 * schedule.chance.random(), world.start, one)


def lost_with_a_disk(schedule: Schedule, link: Link, one: str, other: str) -> bool:
    """Whether it came to that: a member is away, and the disk of the other one is replaced."""
    world = schedule.world
    world.kill(one, is_power=True)
    is_noted = _noted(schedule, link, one)
    world.loop.run(world.loop.now_s + 10.0, is_noted)
    is_lost = is_noted() and not schedule.has_damaged(link.group) and schedule.is_twice(other, (b"B",))
    if is_lost:
        schedule.blank_disk_of(other)
        world.start(other)
    schedule.later(3 * schedule.chance.random(), world.start, one)
    return is_lost


def disk_fills(schedule: Schedule) -> None:
    """The disks of the head fill with records: others take over, and all that was kept can be read (H17)."""
    link, world = calmed(schedule), schedule.world
    reserve_bytes = world.reserve_mb * 1024 * 1024
    for name in names_of(link):
        host = world.hosts[name]
        assert isinstance(host, MemberHost)
        host.disk.room_bytes = reserve_bytes + schedule.chance.randint(1000, 8000)
        world.note(f"the disk of {name} has {host.disk.room_bytes} bytes left, {reserve_bytes} of them kept for others")

    def is_elsewhere() -> bool:
        return schedule.queue.head is not None and schedule.queue.head.epoch > link.epoch

    schedule.until(is_elsewhere, "another group takes over from the full one", SOON_S)
    schedule.until_sending_goes_on(SOON_S)

    def is_read() -> bool:
        document = schedule.queue.document
        if document is None or not schedule.is_all_read():
            return False
        ended = document.link(link.epoch)
        return document.dropped.epoch >= link.epoch if ended is None else ended.certificate is not None

    schedule.until(is_read, "what is on full disks is read", SOON_S)


def blank_disk_unseen(schedule: Schedule) -> None:
    """A member of the head comes back at its address with a blank disk while neither coordinators nor senders look (H25)."""
    link, world = calmed(schedule), schedule.world
    if schedule.has_damaged(link.group):
        return
    away = [*world.coordinator_names, *schedule.queue.senders]
    for name in away:
        world.kill(name, is_power=False)
    name = schedule.chance.choice(names_of(link))
    schedule.blank_disk_of(name)
    world.start(name)
    world.loop.run(world.loop.now_s + 6.0)
    for other in away:
        world.start(other)


def change_addresses(schedule: Schedule) -> None:
    """Members go, and come back at other addresses: at new ones, or at each other's, where those who don't know yet still call them (H25)."""
    world, chance = schedule.world, schedule.chance
    link = schedule.queue.head
    names = chance.sample(world.member_names, chance.choice((1, 2, 2, 3)))
    if link is not None and chance.random() < 0.6:
        names = list(dict.fromkeys((*names_of(link)[: chance.choice((1, 2))], *names)))
    for name in names:
        world.kill(name, is_power=chance.random() < 0.5)
    before = [world.hosts[name].address for name in names]
    are_new = len(names) == 1 or chance.random() < 0.3
    after = [world.address(2) for _ in names] if are_new else [*before[1:], before[0]]
    world.move(dict(zip(names, after, strict=True)))
    for name in names:
        schedule.later(schedule.some_s(), world.start, name)


# ---- people


def rotate_quietly(schedule: Schedule) -> None:
    """A switch while nothing is sent: readers wait for the next link while it is opened, and slowly; some start there."""
    world = schedule.world
    document = schedule.queue.document
    schedule.queue.is_draining = True
    world.loop.run(world.loop.now_s + 0.6 + 0.4 * schedule.chance.random())
    if schedule.chance.random() < 0.3:
        _new_subscription(schedule, "latest")
        world.loop.run(world.loop.now_s + 1.0)
    if document is not None and len(document.send_list) > 1:
        schedule.slow_down(f"{document.send_list[1]}-{schedule.chance.choice('ab')}", 0.2, 2.0)
    schedule.operate("RotateQueue", pb.QueueRequest(queue=schedule.queue.name))
    world.loop.run(world.loop.now_s + 0.5)
    schedule.queue.is_draining = False


def idle_subscription(schedule: Schedule) -> None:
    """A subscription that nobody reads, and switches while it is there (H14)."""
    world = schedule.world
    schedule.queue.ledger.idle.add(IDLE)
    asked(schedule, "CreateSubscription", to_create(schedule.queue, IDLE, "latest"))
    for number in range(schedule.chance.randint(1, 4)):
        schedule.later(number * 1.5, schedule.operate, "RotateQueue", pb.QueueRequest(queue=schedule.queue.name))
    world.loop.run(world.loop.now_s + 2.0)


def give_up_lost(schedule: Schedule) -> None:
    """Where a link's durability allows loss, one disk may be gone and the other not whole: only an operator ends that."""
    found = [
        (queue, link)
        for queue in schedule.world.live_queues
        for link in (() if queue.document is None else queue.document.links)
        if link.state is LinkState.LOST and not link.durability.survives_restart and schedule.has_damaged(link.group)
    ]
    for queue, link in found:
        schedule.operate("AbandonLink", to_abandon_it(queue, link))
    if found:
        schedule.later(10.0, give_up_lost, schedule)


def seek_lost(schedule: Schedule) -> None:
    """Where a replaced disk has met a member that lacks commits, only an operator can say from where to read again."""
    documents = [queue.document for queue in schedule.world.live_queues]
    found = [(one, schedule.links_without_cursors(one)) for one in documents if one is not None]
    for document, lost in found:
        _seek_lost_of(schedule, document, lost)
    if any(lost for _, lost in found):  # a member tells of one at a time
        schedule.later(10.0, seek_lost, schedule)


def _seek_lost_of(schedule: Schedule, document: ChainDocument, lost: set[int]) -> None:
    for one in document.subscriptions:
        link = document.link(one.consume_list[0]) if one.consume_list else None
        # Who is read comes to the others, and may find its cursors by then; who isn't has to be sought from where it is.
        if link is not None and (link.epoch in lost or (one.name == IDLE and lost.intersection(one.consume_list))):
            to = "earliest" if link.base is None else str(link.base)
            request = pb.SeekSubscriptionRequest(queue=document.name, subscription=one.name, to=to)
            schedule.operate("SeekSubscription", request)


def settle_idle(schedule: Schedule, queue: Queue) -> None:
    """Where groups come back drained only, somebody has to delete what nobody reads."""
    document = queue.document
    if document is not None and document.settings.readmit is Readmit.DRAINED and document.subscription(IDLE):
        schedule.operate("DeleteSubscription", pb.SubscriptionRequest(queue=queue.name, subscription=IDLE))


def alter_settings(schedule: Schedule) -> None:
    """The next links are kept otherwise, or elsewhere; groups come back otherwise; what everybody has read may go soon, or at once."""
    world, chance = schedule.world, schedule.chance
    document = schedule.queue.document
    if document is None or document.subscription("main") is None:
        return  # what nobody has subscribed to may go unread
    settings = pb.QueueSettings(
        durability=chance.choice(("sync", "sync", "interval", "async", "memory")),
        flush_ms=chance.choice((5, 200)),
        retention_ms=chance.choice((1, 1000, 24 * 3600 * 1000)),
        readmit=chance.choice(("drained", "in-sync")),
        rotate_ms=chance.choice((None, 0, 1000)),
        max_record_bytes=chance.choice((0, 1 << 20)),
        groups=chance.sample(world.group_names, 2) if chance.random() < 0.5 else (),
    )
    is_for_all = not settings.groups and chance.random() < 0.5
    schedule.operate(
        "AlterQueue", pb.AlterQueueRequest(queue=schedule.queue.name, settings=settings, all_groups=is_for_all)
    )
    for number in range(chance.randint(0, 3)):
        schedule.later(
            number * schedule.some_s(), schedule.operate, "RotateQueue", pb.QueueRequest(queue=schedule.queue.name)
        )


def open_late(schedule: Schedule) -> None:
    """A coordinator stands still between what it wrote and OpenLink, until the link has been read and let go (H11).

    Nor do senders reach it: it isn't told that they ask another one.
    """
    world, chance = schedule.world, schedule.chance
    link = calmed(schedule)
    document = schedule.queue.document
    if document is None or document.subscription("main") is None or len(world.coordinator_names) < 2:
        return
    settings = pb.QueueSettings(retention_ms=1, readmit="in-sync")
    if asked(schedule, "AlterQueue", pb.AlterQueueRequest(queue=schedule.queue.name, settings=settings)) is None:
        return
    paused, other = chance.sample(world.coordinator_names, 2)
    cuts = both_ways(schedule.queue.senders, (paused,))

    async def rotate() -> None:
        with contextlib.suppress(SeriatimError):
            async with Coordinators(f"{world.hosts[other].address}:7000") as beside:
                await beside.call_within("RotateQueue", pb.QueueRequest(queue=schedule.queue.name), 3.0)

    def stand_still() -> None:
        now = schedule.queue.document
        if now is None or now.sender_token == document.sender_token:
            world.at_chain_write = stand_still
            return
        world.pause(paused)
        for pair in cuts:
            world.cut(*pair)
        process = world.hosts["operator"].process
        assert process is not None
        world.loop.start(process, rotate)

    def is_let_go() -> bool:
        now = schedule.queue.document
        return now is not None and now.dropped.epoch > link.epoch

    world.at_chain_write = stand_still
    for name in schedule.queue.senders:
        world.kill(name, is_power=False)
        world.start(name)
    world.loop.run(world.loop.now_s + SOON_S, lambda: world.at_chain_write is None)
    world.loop.run(world.loop.now_s + 3.5, is_let_go)  # its session is to outlive it
    world.loop.run(world.loop.now_s + 0.1 * chance.random())
    world.at_chain_write = None
    world.resume(paused)
    world.loop.run(world.loop.now_s + 1.0)
    for pair in cuts:
        world.heal_cut(*pair)
    schedule.until_sending_goes_on(SOON_S)


def say_late(schedule: Schedule) -> None:
    """What a member said of itself just before it died comes to ZooKeeper behind what the process that follows it said.

    Its server had lost the others meanwhile, for less time than its session lasts.
    """
    link = calmed(schedule)
    world, ensemble = schedule.world, schedule.world.ensemble
    name, peer = schedule.chance.sample(names_of(link), 2)
    path = Paths(CLUSTER).member(*name.split("-"))
    session = next(iter(ensemble.sessions_of(world.hosts[name].process)), None)
    if session is None:
        return
    world.kill(peer, is_power=False)  # which is to be said
    world.start(peer)
    world.loop.run(world.loop.now_s + 1.0, lambda: ("set", path) in session.undecided, look_every_s=0.0)
    server = session.server
    if server is None or ("set", path) not in session.undecided:
        return
    ensemble.cut_off(server, drops_after_s=SOON_S)
    for other in [one for one in server.sessions if one is not session]:
        other.disconnect()
    world.kill(name, is_power=False)
    world.start(name)

    world.loop.run(world.loop.now_s + session.session_timeout_s / 2)  # it has said then all that there is to say
    ensemble.rejoin(server)


def make_queue_again(schedule: Schedule) -> None:
    """The queue is deleted, and another one is made under its name at once (H16)."""
    calmed(schedule)
    is_one_away = schedule.chance.random() < 0.5
    _make_again(schedule, lambda: is_one_away and schedule.world.kill(schedule.any_member(), is_power=False))


def _make_again(schedule: Schedule, meanwhile: Callable[[], object]) -> None:
    """`meanwhile`: done when all is read, and before the queue is deleted."""
    world, queue = schedule.world, schedule.queue
    queue.is_draining = True
    schedule.until(schedule.is_all_read, "everything is read before the queue is deleted", SOON_S)
    meanwhile()
    for name in queue.applications:
        world.kill(name, is_power=False)
    assert queue.document is not None
    gone = pb.QueueRequest(queue=queue.name, queue_id=queue.document.queue_id)
    for _ in range(schedule.chance.choice((0, 0, 1))):  # others delete it, too, and may be late
        schedule.beside("DeleteQueue", gone, after_s=0.2 * schedule.chance.random())
    asked(schedule, "DeleteQueue", gone)
    world.end_queue(queue)
    world.begin_queue(queue)
    made = to_make(schedule, queue)
    others = [
        schedule.beside("CreateQueue", made, after_s=0.02 * schedule.chance.random())
        for _ in range(schedule.chance.choice((0, 0, 1)))
    ]
    asked(schedule, "CreateQueue", made)
    schedule.until(lambda: all(one.is_set() for one in others), "the other operator is answered", 30.0)
    for name in (*queue.applications, *world.member_names):
        world.start(name)
    schedule.until_sending_goes_on(SOON_S)


def to_make(schedule: Schedule, queue: Queue) -> pb.CreateQueueRequest:
    """A request for it, on groups that there are."""
    settings = pb.QueueSettings()
    settings.CopyFrom(queue.settings)
    if not set(settings.groups) <= set(schedule.world.group_names):
        settings.ClearField("groups")
    return pb.CreateQueueRequest(queue=queue.name, settings=settings)


def add_group(schedule: Schedule) -> None:
    """Two more members."""
    names = schedule.world.group_names
    if len(names) < 4:
        _start_group(schedule, next(name for name in ("g2", "g3", "g4", "g1") if name not in names))


def _start_group(schedule: Schedule, group: str) -> None:
    world = schedule.world
    world.group_names.append(group)
    world.add_group(group)
    for member in "ab":
        world.start(f"{group}-{member}")


def remove_group(schedule: Schedule) -> None:
    """A group is drained and switched off for good, and removed: once retention let its links go, or its queue was deleted.

    Sometimes others take its name.
    """
    world, chance = schedule.world, schedule.chance
    if len(world.group_names) < 3:
        return
    head = calmed(schedule).group
    group = head if chance.random() < 0.7 else chance.choice(world.group_names)
    for_others = [pb.AlterQueueRequest(queue=one.name, all_groups=True) for one in world.live_queues]
    for alter in for_others:
        asked(schedule, "AlterQueue", alter)
    request = pb.GroupRequest(group=group)
    asked(schedule, "DrainGroup", request)
    if chance.random() < 0.5:
        if not world.loop.run(
            world.loop.now_s + SOON_S, lambda: all(is_read_on(one, group) for one in world.live_queues)
        ):
            return  # there is a subscription that nobody reads
        world.remove_group(group)
        world.loop.run(world.loop.now_s + 6.0)  # for longer than sessions last
        asked(schedule, "RemoveGroup", request)
        _check_removed(schedule, group)
        kept = world.live_queues
    else:
        kept = [one for one in world.live_queues if one is not schedule.queue]
        if kept and not world.loop.run(world.loop.now_s + SOON_S, lambda: all(is_read_on(one, group) for one in kept)):
            return
        _make_again(schedule, lambda: world.remove_group(group))
    for one in kept:
        settings = pb.QueueSettings(retention_ms=1)
        asked(schedule, "AlterQueue", pb.AlterQueueRequest(queue=one.name, settings=settings))
    # What was asked for before may come late: that it be resumed, that it serve this queue; an empty link is kept for a minute.
    for _ in range(70):
        asked(schedule, "DrainGroup", request)
        for alter in for_others:
            asked(schedule, "AlterQueue", alter)
        asked(schedule, "RemoveGroup", request)
        if _check_removed(schedule, group):
            break
        world.loop.run(world.loop.now_s + 1.0)
    else:
        raise Violation(f"12: group {group} is never removed")
    if chance.random() < 0.3:
        world.loop.run(world.loop.now_s + 2 * chance.random())
        _start_group(schedule, group)


def is_read_on(queue: Queue, group: str) -> bool:
    """Whether no subscription of it has a link on the group left to read."""
    document = queue.document
    assert document is not None
    unread = {epoch for one in document.subscriptions for epoch in one.consume_list}
    return not any(link.epoch in unread for link in document.links if link.group == group)


def _check_removed(schedule: Schedule, group: str) -> bool:
    """Whether the group is removed; if so, no link may be on it."""
    world = schedule.world
    is_removed = Paths(CLUSTER).group(group) not in world.ensemble.leader.nodes
    links = [link for one in world.live_queues if one.document is not None for link in one.document.links]
    if is_removed and any(link.group == group for link in links):
        raise Violation(f"12: group {group} was removed, and a link is on it")
    return is_removed


def _somewhere(schedule: Schedule) -> str:
    records = schedule.queue.ledger.records
    where = schedule.chance.choice(("earliest", "latest", "offset"))
    return (
        str(schedule.chance.choice(sorted(records)))
        if where == "offset" and records
        else where.replace("offset", "latest")
    )


def make_subscription(schedule: Schedule) -> None:
    """A subscription more, and somebody who reads it."""
    _new_subscription(schedule, _somewhere(schedule))


def _new_subscription(schedule: Schedule, where: str) -> None:
    world, queue = schedule.world, schedule.queue
    name = f"extra-{len(world.hosts)}"
    schedule.operate("CreateSubscription", to_create(queue, name, where))
    schedule.add(name, Reader(world, queue, name, name).main, queue)
    queue.readers.append(name)
    world.start(name)


SCENARIOS: dict[str, tuple[float, Callable[[Schedule], None]]] = {
    "kill at a write": (4, kill_at_write),
    "kill at a chain write": (3, kill_at_chain_write),
    "memory emptied": (0.5, empty_memory),
    "damaged on the way": (2, damage_on_the_way),
    "split head": (3, split_head),
    "lose the head": (1, lose_head),
    "disks of the head fail": (1, fail_head),
    "disks of the head hang": (0.5, hang_head),
    "abandon the head": (0.5, abandon_head),
    "unreachable head": (1, unreachable_head),
    "nobody sends": (0.5, nobody_sends),
    "let go at rest": (0.5, let_go_at_rest),
    "note taken back late": (0.5, note_taken_back_late),
    "commit on one member": (0.5, commit_on_one),
    "commit left behind": (0.5, commit_left_behind),
    "read behind a note": (0.5, read_behind_a_note),
    "sought while cut off": (0.5, sought_while_cut_off),
    "cursors lost with a disk": (0.5, lose_cursors),
    "disk fills": (0.5, disk_fills),
    "blank disk unseen": (0.5, blank_disk_unseen),
    "addresses change": (1, change_addresses),
    "rotate quietly": (1, rotate_quietly),
    "idle subscription": (1, idle_subscription),
    "settings altered": (3, alter_settings),
    "opened late": (0.5, open_late),
    "said late": (0.5, say_late),
    "queue made again": (0.5, make_queue_again),
    "group added": (2, add_group),
    "group removed": (0.5, remove_group),
    "subscription made": (2, make_subscription),
}
