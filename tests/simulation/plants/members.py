"""Wrong rules of a group's members: what they store, believe and resync."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from seriatim.broker_group import membership, opening, peer
from seriatim.broker_group.append import AppendStream, take
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core import cursors, disk, replica, replica_events, resync, setback
from seriatim.broker_group.core.disk import Room
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.membership import Membership
from seriatim.broker_group.replicate import MasterStream
from seriatim.broker_group.replication import SlaveStream
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import Link
from seriatim.protocol.errors import DeadlineOver, NotElected, SeriatimError, Unreachable
from seriatim.protocol.names import Epoch, Index, QueueId
from seriatim.protocol.streams import read
from tests.simulation import world as simulated_world
from tests.simulation.disk import SimulatedWriter
from tests.simulation.plants.plant import Plant, changed, instead, together
from tests.simulation.schedule import Shape

# ---- addresses


def _where_it_was_first(right: Any, self: peer.Peer, registered: peer.Registered | None) -> None:
    if registered is not None:
        first = vars(self).setdefault("first_address", registered.address)
        registered = registered._replace(address=first)
    right(self, registered)


# ---- sessions


async def _makes_in_any_session(self: Membership, path: str, data: bytes, _: int) -> None:
    await self._session.create(path, data, ephemeral=True)


async def _believes_what_it_wrote(self: Membership, session_id: int) -> None:
    self._broker.is_registration_old.clear()
    await self._own(self._place, self._registration().encode(), session_id)


# ---- a slave that says more than it has


def _lies(right: Any, stream: MasterStream, index: Index, digest: bytes) -> None:
    """Now and then a slave claims a record that it was never sent."""
    is_lie = digest[0] < 16  # as good as chance, and the same in each run of a schedule
    right(stream, Index(index + 1) if is_lie else index, digest)


def _believes(_: Any, state: Any, event: replica_events.PeerConfirmed) -> Any:
    if state.phase is not replica.SealPhase.OPEN or not state.is_peer_ready or event.index <= state.confirmed:
        return state, ()
    return replica._commit(replace(state, confirmed=event.index))


LYING_SLAVES = Plant(
    "slaves lie",
    "no rule is wrong, and slaves claim more than they have now and then: masters find out",
    changed(MasterStream, "confirm", _lies),
    within=30,
    shape=Shape(kinds=("rotate", "kill", "pause")),
)

# ---- what is written in two


def _in_two(is_split: Any, apart_s: float) -> Any:
    def submit(right: Any, writer: SimulatedWriter, write: Any) -> None:
        if not is_split(write):
            right(writer, write)
            return
        first = replace(write, puts=write.puts[1:], deletions=write.deletions[1:], done=lambda *_: None, size_bytes=0)
        right(writer, first)
        rest = replace(write, puts=write.puts[:1], deletions=write.deletions[:1])
        writer._loop.after(apart_s, writer._process, right, writer, rest)

    return submit


def _is_batch(write: Any) -> bool:
    return len(write.puts) == 2 and write.puts[0][0][:1] == b"B"


def _is_cut(write: Any) -> bool:
    return len(write.deletions) == 2


# ---- a stream that goes on


async def _reads_on(_: Any, stream: AppendStream, runner: LinkRunner, token: Any) -> None:
    while (message := await read(stream._context)) is not None:
        with contextlib.suppress(SeriatimError):
            take(stream._broker, runner, message, token)


def _takes_in_the_order_of_arrival(right: Any, state: Any, event: replica_events.BatchArrived) -> Any:
    gap = replace(state.tail, index=max(state.tail.index, event.header.first_index))
    after, effects = right(replace(state, tail=gap), event)
    is_refused = any(isinstance(effect, replica_events.Refuse) for effect in effects)
    return (state if is_refused else after), effects


# ---- room on the disk


def _until_it_is_full(_: Any, room: Room, free_bytes: int) -> Room:
    return replace(room, free_bytes=free_bytes, has_room=free_bytes > 0)


# ---- who one is


def _whoever_is_there(_: Any, broker: Broker, name: Any) -> Any:
    broker.check_cluster(name.cluster)
    return QueueId(name.queue_id), Epoch(name.epoch)


def _for_whoever_is_there(right: Any, broker: Broker, key: Any, request: Any) -> Any:
    asked = type(request)()
    asked.CopyFrom(request)
    mine = asked.master if broker.side_of(asked.master) else asked.slave
    mine.incarnation.disk_id, mine.incarnation.start = broker.incarnation.disk_id, broker.incarnation.start
    return right(broker, key, asked)


def _absent_by_name(_: Any, registry: Registry, link: Link) -> str:
    gone = [str(side.name) for side in (link.master, link.slave) if registry.member(side.name) is None]
    return f"{gone[0]} is not registered" if gone else ""


# ---- reports


async def _reports_from_the_live_records(_: Any, keeper: CursorKeeper) -> bool:
    for record in keeper._broker.links():
        if record.end is None or not record.has_cursors:
            continue
        for cursor in keeper.of_link(record.key).values():
            reported = keeper._reported.setdefault(record.key, set())
            if cursor.whose in reported or not cursors.is_drained(cursor, record.end):
                continue
            try:
                await keeper._report(record.key, {cursor.whose: cursor.by}, "")
            except SeriatimError as error:
                if isinstance(error, (Unreachable, DeadlineOver)):
                    return False
                if error.can_retry:
                    continue
            reported.add(cursor.whose)
    return True


def _told_with_the_next_batch(_: Any, stream: SlaveStream, index: Index) -> None:
    stream._committed = index


PLANTS: tuple[Plant, ...] = (
    Plant(
        "H19",
        "the committed index travels with the next batch",
        changed(SlaveStream, "tell_committed", _told_with_the_next_batch),
        within=5,
        finds="12:",
    ),
    Plant(
        "H17",
        "records are taken until the disk is full",
        together(
            instead(simulated_world, "RESERVE_MB", 0),
            changed(disk, "seen", _until_it_is_full),
            changed(disk, "taken", lambda _, room, __: room),
        ),
        within=20,
        shape=Shape(kinds=("disk fills",), faults=(1, 1)),
        finds="12:",
    ),
    Plant(
        "H25",
        "an address says who is there: a blank disk says yes to OpenLink, and takes index 0 again",
        together(
            changed(Broker, "check_name", _whoever_is_there),
            changed(opening, "_new_record", _for_whoever_is_there),
            changed(Registry, "absence", _absent_by_name),
        ),
        within=30,
        shape=Shape(kinds=("blank disk unseen",), faults=(1, 1)),
        finds="1:",
    ),
    Plant(
        "goes on after a refusal",
        "a refused batch is left out, and those behind it are taken",
        together(
            changed(AppendStream, "_read", _reads_on),
            changed(replica, "_take", _takes_in_the_order_of_arrival),
        ),
        within=100,
        shape=Shape(kinds=("damaged on the way",), faults=(2, 4)),
    ),
    Plant(
        "slave believed",
        "what a slave confirms is believed, beyond what it was sent too; and slaves lie now and then",
        together(LYING_SLAVES.make, changed(replica, "_confirmed", _believes)),
        within=20,
        finds="3:",
    ),
    Plant(
        "mark and record in two writes",
        "a batch's marks and hash are written first, its records behind them",
        changed(SimulatedWriter, "submit", _in_two(_is_batch, 0.0005)),
        within=100,
        shape=Shape(kinds=("kill", "kill at a step", "kill both members"), faults=(2, 4)),
        finds="3:",
    ),
    Plant(
        "cut in two writes",
        "what lies beyond a link's end goes in two writes",
        changed(SimulatedWriter, "submit", _in_two(_is_cut, 0.5)),
        within=100,
        shape=Shape(kinds=("split head", "kill at a write"), faults=(9, 12), lasts_s=(0.5,)),
        finds="3:",
    ),
    Plant(
        "reports from live records",
        "reports of drained links go through the records while commits change them",
        changed(CursorKeeper, "_report_once", _reports_from_the_live_records),
        within=150,
        shape=Shape(kinds=("rotate", "drain group", "slow path", "subscription made"), faults=(5, 8), groups=(3,)),
        finds="changed size",
    ),
    Plant(
        "in sync too early",
        "a member that lacks nothing of what has ended says that it is in sync",
        changed(resync, "unfinished", lambda *_: {}),
        within=10,
        shape=Shape(kinds=("blank disk unseen",), faults=(1, 1)),
        finds="6:",
    ),
    Plant(
        "made anew",
        "a link that was let go, its seal with it, is a link never heard of",
        changed(Broker, "check_kept", lambda *_: None),
        within=60,
        shape=Shape(kinds=("opened late",), coordinators=(2,), faults=(1, 1)),
        finds="2:",
    ),
    Plant(
        "said by who is gone",
        "what a member wrote stands, whatever an earlier process of its place wrote just before it ended",
        instead(Membership, "_register", _believes_what_it_wrote),
        within=10,
        shape=Shape(kinds=("said late",), faults=(1, 1)),
        finds="12: ",
    ),
    Plant(
        "registered by a later session",
        "whoever began to register in a session goes on in the next one",
        instead(Membership, "_make", _makes_in_any_session),
        within=150,
        shape=Shape(kinds=("expire session",), faults=(4, 6), lasts_s=(0.1,)),
        finds="5.5:",
    ),
    Plant(
        "written to a call that is over",
        "a stream that was ended says so, with its reason, to whoever writes to it next",
        instead(peer, "write", lambda call, message: call.write(message)),
        within=40,
        shape=Shape(kinds=("reset connections",)),
        finds="not handled: Peer",
    ),
    Plant(
        "let go while it was looked at",
        "whoever looks at the chain of a link finds the link there still",
        instead(membership, "UnknownLink", NotElected),
        within=300,
        shape=Shape(
            kinds=("slow disk", "rotate"), faults=(3, 6), lasts_s=(5.0,), settings=pb.QueueSettings(retention_ms=1)
        ),
        finds="12:",
    ),
    Plant(
        "a chain that was set back is believed",
        "the chain that ZooKeeper has is the newest there ever was",
        together(
            instead(setback, "queues", lambda *_: {}),
            instead(setback, "opened_before", lambda *_: ""),
            instead(setback, "changed_end", lambda *_: ""),
        ),
        within=20,
        shape=Shape(kinds=("ZooKeeper set back",), faults=(1, 2)),
        finds="[468]:",
    ),
    Plant(
        "a chain is the newest that told every link what it knows",
        "what no link was told, as that a subscription was sought, shows in nothing that a disk has",
        changed(setback, "queues", lambda right, *known: right(*known[:-1], {})),
        within=20,
        shape=Shape(kinds=("a seek set back",), faults=(1, 2)),
        finds="8:",
    ),
    Plant(
        "a peer stays where it is",
        "a member is looked for at the address that its peer heard of first",
        changed(peer.Peer, "register", _where_it_was_first),
        within=20,
        shape=Shape(kinds=("addresses change",), faults=(1, 1)),
        finds="12:",
    ),
)
