"""Wrong rules of reading: marks, cursors, fencing of readers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from seriatim.broker_group.core import cursors
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.resyncer import Resyncer
from seriatim.consumer.client import Consumer
from seriatim.consumer.core import cursor, reading, tenure
from seriatim.consumer.core.reading_events import ReadFrom, StartArrived, ViewChanged
from seriatim.consumer.fetching import Fetcher
from seriatim.consumer.handover import HandOver
from seriatim.consumer.range_reader import Positions
from seriatim.consumer.session import ReaderSession
from seriatim.consumer.spark.ranges import offset_ranges
from seriatim.coordinator.core import acquire_read, subscriptions
from seriatim.coordinator.description import Description
from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.names import Index, QueueId, Token
from tests.simulation import applications
from tests.simulation.limits import Limits, Sizes
from tests.simulation.plants.plant import Plant, changed, instead, together
from tests.simulation.schedule import Shape

# ---- credit


def _room_without_debt(state: reading.Reading) -> int:
    promised = 0 if state.fetch is None else max(0, state.fetch.credit_bytes)
    return state.limit_bytes - state.buffered_bytes - promised


# ---- by offset


def _without_marks(right: Any, self: Fetcher, event: Any) -> None:
    grant = event.grant if isinstance(event, ReadFrom) else self.state.grant
    if not grant.subscription_id:
        if isinstance(event, StartArrived):
            event = replace(event, marks={})
        elif isinstance(event, ReadFrom | ViewChanged):
            links = tuple(replace(link, marks={}) for link in event.view.links)
            event = replace(event, view=replace(event.view, links=links))
    right(self, event)


# ---- what is granted


def _anew_where_the_view_lacks_it(right: Any, state: cursor.CursorState, event: cursor.Granted) -> Any:
    """Where the link of the last commit was let go, whatever of the next one was handed out."""
    is_lacking = event.view.link(state.wanted.epoch) is None
    if cursor.START.epoch < state.wanted.epoch < event.head.epoch and is_lacking:
        state = replace(state, grant=None)
    return right(state, event)


# ---- where somebody is put


def _whole(right: Any, epoch: Any, base: Any, batch: Any, start: Any, stop: Any, *others: Any) -> Any:
    del start
    return right(epoch, base, batch, batch.header.first_index, stop, *others)


async def _as_anybody_says(right: Any, *arguments: Any) -> subscriptions.Committed | None:
    committed = await right(*arguments)
    return None if committed is None else replace(committed, is_exact=True)


def _at_its_link(right: Any, *arguments: Any) -> subscriptions.QueuePosition:
    position: subscriptions.QueuePosition = right(*arguments)
    return replace(position, index=Index(0))


def _as_told_now(_: Any, positions: Positions, start: int, end: int, records_per_partition: int) -> list[range]:
    return offset_ranges(positions.spans, start, end, records_per_partition)


# ---- what applications ask for


async def _as_soon_as_it_is_moved(_: Any, self: ReaderSession, to: str, timeout_s: float) -> None:
    await self._sought(to, boottime_s() + timeout_s)


async def _by_the_view_at_hand(_: Any, self: ReaderSession, *arguments: Any) -> bool:
    del arguments
    return self.view is not None and self._fetcher is not None and self._fetcher.state.has_all_of(_all_known(self.view))


def _all_known(view: Any) -> Any:
    links = tuple(replace(link, is_committed_exact=True) for link in view.links)
    return replace(view, links=links, may_be_outdated=False)


# ---- coming back


async def _as_the_peer(right: Any, self: Resyncer) -> str:
    """What lies beyond the peer's copy is cut before anything is planned."""
    broker, peer = self._broker, self._broker.peer.registered
    for record in broker.links() if peer is not None else ():
        if record.end is None:
            continue
        runner = broker.link(record.key)
        asked = pb.DescribeLinkRequest(link=broker.link_name(record.key, peer.incarnation))
        reply = await rpc.call(broker.peer.stub(peer.address).DescribeLink, asked, 1.0)
        if reply.next_index < runner.state.durable:
            await broker.store.cut(record, Index(reply.next_index))
            runner.reload(record)
    return await right(self)


async def _takes_its_time(right: Any, self: Resyncer, *arguments: Any) -> None:
    await asyncio.sleep(6.0)  # there is much to copy
    await right(self, *arguments)


# ---- marks


def _without_the_links_marks(right: Any, state: Any, event: Any, now_s: float) -> Any:
    after, effects = right(state, event, now_s)
    is_first = state.marks is None and after.marks is not None
    return (replace(after, marks=dict(event.marks)) if is_first else after), effects


# ---- cursors


def _whoever_committed(one: CursorRecord | None, other: CursorRecord) -> CursorRecord:
    if one is None or one.generation != other.generation:
        return other if one is None or one.generation < other.generation else one
    last = max(one, other, key=lambda record: -1 if record.index is None else record.index)
    return replace(last, token=Token(max(one.token, other.token)))


def _counts(*_: object) -> None: ...


def _left_to_members(state: cursor.CursorState, *_: object) -> Any:
    return state, []


def _has_cursor(state: object, answer: Any, furthest: Index) -> bool:
    del state
    return (answer.cursor or 0) == furthest


async def _never_noted(right: Any, self: CursorKeeper, key: Any, whose: Any, **named: Any) -> None:
    if whose is None:
        await right(self, key, whose, **named)


async def _taken_back_whenever(right: Any, self: CursorKeeper, chain_version: Any) -> Any:
    del chain_version
    noted = {key: set(whose) for key, whose in self._noted.items()}

    async def any_version(_: QueueId) -> int:
        return 0

    try:
        return await right(self, any_version)
    finally:
        self._noted.update({key: noted[key] for key in self._noted.keys() & noted.keys()})


def _of_the_last(
    right: Any, document: ChainDocument, epoch: Any, member: str, whose: Any, *token: Any
) -> ChainDocument:
    others = tuple(one for one in document.stale_cursors if one is not document.stale_note(epoch, member))
    return right(replace(document, stale_cursors=others), epoch, member, whose, *token)


def _lacks_all_or_nothing(right: Any, self: LinkRecord, whose: Any) -> bool:
    del right, whose
    return not self.has_cursors


def _starts_unnoted(right: Any, state: Any, absent: str) -> Any:
    del right, absent
    link = acquire_read._head(state)
    furthest = max(answer.cursor or Index(0) for answer in state.told.values() if not answer.is_stale)
    return acquire_read._granted(state, max(furthest, subscriptions.start_index(state.subscription, link.epoch)))


def _not_passed_on(right: Any, state: Any, link: Any, behind: Any, furthest: Any) -> Any:
    del right, link, behind
    return acquire_read._granted(state, furthest)


async def _fails_with_the_peers_disk(right: Any, self: CursorKeeper, runner: Any, record: Any, cause_id: str) -> None:
    await self._relay(runner, record, cause_id)  # so that one member has a cursor that the other refused
    del right


def _as_first_read(right: Any, state: Any, again: Any) -> Any:
    del right, again
    return acquire_read._granted(state, state.index)


def _of_the_reader_alone(state: Any, now: ChainDocument) -> bool:
    found = state.subscription
    there = now.subscription(found.name)
    return there is not None and replace(there, consume_list=found.consume_list) == found


def _left_unsealed(right: Any, document: ChainDocument, subscription_id: Any, generation: Any, epoch: Any) -> Any:
    one = next((one for one in document.subscriptions if one.subscription_id == subscription_id), None)
    if one is None or generation != one.generation or one.consume_list[:1] != (epoch,):
        return right(document, subscription_id, generation, epoch)
    return subscriptions._with(document, replace(one, consume_list=one.consume_list[1:]))


async def _reports_what_is_committed(right: Any, self: CursorKeeper) -> Any:
    for record in self._broker.links():
        runner = self._broker.link(record.key)
        if record.end is None and record.is_sealed:
            for cursor in list(self.of_link(record.key).values()):
                if cursor.index is not None and cursor.index >= runner.state.committed.index:
                    await self._report(record.key, {cursor.whose: cursor.by}, "")
    return await right(self)


def _of_any_generation(right: Any, document: ChainDocument, subscription_id: Any, generation: Any, epoch: Any) -> Any:
    one = next((one for one in document.subscriptions if one.subscription_id == subscription_id), None)
    return right(document, subscription_id, generation if one is None else one.generation, epoch)


# ---- fencing


def _tells_whom_it_can(right: Any, state: Any, registry: Any) -> Any:
    del right, registry
    return acquire_read._with_cursors(state)


def _never_over(right: Any, self: HandOver, valid_until_s: float) -> None:
    del valid_until_s
    right(self, float("inf"))


def _proved_by_a_grant(right: Any, self: ReaderSession, event: tenure.Event) -> None:
    if isinstance(event, tenure.Answered) and event.granted is not None and self._zookeeper is not None:
        right(self, tenure.Proved(event.node, boottime_s(), self._zookeeper.session_timeout_s))
    right(self, event)


def _passed_by_what_follows(right: Any, self: Consumer, *, is_done: bool = True) -> Any:
    del is_done
    return right(self)


def _whoever_commits(right: Any, record: Any, generation: Any, token: Any, *arguments: Any, **named: Any) -> Any:
    if generation != record.generation:
        return right(record, generation, token, *arguments, **named)
    after = right(replace(record, token=token), generation, token, *arguments, **named)
    return replace(after, token=max(record.token, token))


PLANTS: tuple[Plant, ...] = (
    Plant(
        "H5",
        "a member resyncs until it is equal to its peer",
        together(changed(Resyncer, "_pass", _as_the_peer), changed(Resyncer, "_copy", _takes_its_time)),
        within=30,
        shape=Shape(kinds=("blank disk",), faults=(2, 2), paces=(1,)),
    ),
    Plant(
        "H6",
        "a reader's marks are kept only with its cursor",
        changed(reading, "_started", _without_the_links_marks),
        within=150,
        shape=Shape(kinds=("pause the slave", "seek", "seek"), faults=(6, 9), paces=(2,), senders=0.0),
    ),
    Plant(
        "H7",
        "a cursor counts that one member has, and nobody notes that the other's is older",
        changed(CursorKeeper, "_note", _never_noted),
        within=100,
        shape=Shape(kinds=("divide and kill",), faults=(1, 2), lasts_s=(16.0,), paces=(1,)),
        finds="6:",
    ),
    Plant(
        "H7, started from one",
        "a reader starts at a cursor that one member refused, or never got",
        together(
            changed(acquire_read, "_pass_on", _not_passed_on),
            changed(CursorKeeper, "_on_both", _fails_with_the_peers_disk),
        ),
        within=300,
        shape=Shape(kinds=("disk full", "kill an application", "divide and kill"), faults=(7, 10), paces=(2,)),
        finds="6:",
    ),
    Plant(
        "H7, taken back late",
        "a note of stale cursors is taken back whenever that arrives, and stands for whoever made it until it hears of that",
        changed(CursorKeeper, "bring_up_peer", _taken_back_whenever),
        within=300,
        shape=Shape(kinds=("note taken back late",), coordinators=(1,), faults=(1, 2), paces=(1,)),
        finds="6:",
    ),
    Plant(
        "further, whoever committed",
        "of two members' cursors the further counts, also an earlier reader's that was answered to nobody",
        instead(cursors, "further", _whoever_committed),
        within=300,
        shape=Shape(kinds=("commit left behind",), faults=(1, 2), paces=(1,)),
        finds="7:",
    ),
    Plant(
        "drained, by an earlier reader's end",
        "a link is drained by whoever committed its end",
        instead(subscriptions, "_check_own", _counts),
        within=300,
        shape=Shape(kinds=("commit left behind",), faults=(1, 2), paces=(1,)),
        finds="7:",
    ),
    Plant(
        "drained, by nobody",
        "where a reader starts is an earlier one's cursor, as long as it has committed nothing itself, and it waits for ever for its link to leave",
        together(instead(acquire_read, "_has_start", _has_cursor), instead(cursor, "_at_end", _left_to_members)),
        within=1500,
        shape=Shape(kinds=("disk full", "kill an application", "divide and kill"), faults=(7, 10), paces=(2,)),
        finds="12: not within 120 s",
    ),
    Plant(
        "H7, started unnoted",
        "a reader starts at a cursor that an absent member may lack, and that isn't noted",
        changed(acquire_read, "_note_stale", _starts_unnoted),
        within=300,
        shape=Shape(kinds=("commit on one member",), faults=(1, 2), paces=(1,)),
        finds="6:",
    ),
    Plant(
        "H7, read once",
        "a reader is granted by the chain as it was read first, maybe from a server that was behind",
        changed(acquire_read, "_confirmed", _as_first_read),
        within=10,
        shape=Shape(kinds=("read behind a note",), coordinators=(2,), faults=(1, 2), paces=(1,)),
        finds="6:",
    ),
    Plant(
        "H7, read for the reader's sake",
        "a reader is granted where nothing of its own has changed in the chain, whoever was told",
        instead(acquire_read, "_is_as_read", _of_the_reader_alone),
        within=60,
        shape=Shape(kinds=("read behind a note",), coordinators=(2,), faults=(1, 2), paces=(1,)),
        finds="6:",
    ),
    Plant(
        "H7, whose",
        "a note of stale cursors names the last one only of those that had a commit",
        changed(subscriptions, "with_stale_cursors", _of_the_last),
        within=300,
        shape=Shape(kinds=("divide and kill",), faults=(1, 2), lasts_s=(16.0,), paces=(1,)),
        finds="6:",
    ),
    Plant(
        "H7, what no disk has",
        "a replaced disk waits for all cursors of a link, also of who was sought, until the other member has them",
        changed(LinkRecord, "lacks_of", _lacks_all_or_nothing),
        within=60,
        shape=Shape(kinds=("cursors lost with a disk",), faults=(1, 2), paces=(1,)),
        finds="12:",
    ),
    Plant(
        "H8",
        "a reader is fenced by the members alone, each by the highest token that it was told",
        together(
            changed(acquire_read, "_checked", _tells_whom_it_can),
            changed(HandOver, "renew", _never_over),
        ),
        within=100,
        shape=Shape(kinds=("pause an application",), faults=(3, 5), lasts_s=(12.0,)),
        finds="7:",
    ),
    Plant(
        "H8, a coordinator's word",
        "a reader's session lives where a coordinator answers its AcquireRead",
        changed(ReaderSession, "_happened", _proved_by_a_grant),
        within=100,
        shape=Shape(kinds=("sought while cut off",), faults=(1, 2)),
        finds="7:",
    ),
    Plant(
        "passed by what follows",
        "a batch of nothing but re-sends is passed as soon as it is looked at, and with it all before it",
        changed(Consumer, "_take", _passed_by_what_follows),
        within=60,
        shape=Shape(kinds=("kill", "pause"), faults=(4, 6), polls=1.0),
        finds="6:",
    ),
    Plant(
        "H9",
        "a drained report names the subscription only",
        changed(subscriptions, "drained", _of_any_generation),
        within=150,
        shape=Shape(kinds=("rotate", "seek", "kill", "slow path"), faults=(5, 8), paces=(2,)),
        finds="12:",
    ),
    Plant(
        "sought, and put at a link",
        "a subscription that is sought stands where the link of its offset begins",
        changed(subscriptions, "_at_offset", _at_its_link),
        within=30,
        shape=Shape(kinds=("seek",), faults=(2, 4)),
        finds="9: .* is put at",
    ),
    Plant(
        "latest, by a slave's word",
        "a link is committed as far as any member says that is asked",
        changed(Description, "committed", _as_anybody_says),
        within=200,
        shape=Shape(kinds=("subscription made", "kill", "pause", "kill all"), faults=(3, 5), lasts_s=(0.1,)),
        finds="9: .* is put at latest",
    ),
    Plant(
        "sought, and a batch whole",
        "who starts in the middle of a batch is handed all of it",
        changed(reading, "Delivery", _whole),
        within=30,
        shape=Shape(kinds=("seek",), faults=(2, 4)),
        finds="6: .* granted from",
    ),
    Plant(
        "read anew behind what was let go",
        "a reader starts anew at its grant where the link in which it committed last was let go",
        changed(cursor, "_granted", _anew_where_the_view_lacks_it),
        within=120,
        shape=Shape(kinds=("let go at rest",), faults=(1, 1)),
        finds="9: .* in one term",
    ),
    Plant(
        "token not checked on fetch",
        "a member serves whoever fetches",
        instead(cursors, "check_reader", lambda *_: None),
        within=100,
        shape=Shape(kinds=("cut an application from ZooKeeper",), faults=(3, 5), lasts_s=(12.0,)),
        finds="Fetch",
    ),
    Plant(
        "token not checked on commit",
        "a member takes a cursor from whoever commits in this generation",
        changed(cursors, "committed", _whoever_commits),
        within=100,
        shape=Shape(kinds=("pause an application",), faults=(3, 5), lasts_s=(12.0,)),
        finds="CommitCursor",
    ),
    Plant(
        "cursor leaves an unsealed link",
        "a link is drained when its cursor is at what is committed, whether its end is recorded or not",
        together(
            changed(subscriptions, "drained", _left_unsealed),
            changed(CursorKeeper, "_report_once", _reports_what_is_committed),
        ),
        within=100,
        shape=Shape(kinds=("kill both members", "isolate", "cut", "expire session"), faults=(2, 4)),
        finds="5:",
    ),
    Plant(
        "credit without its debt",
        "what a batch took beyond the credit of its reader is given back in parts, each as large as the reader's limit",
        instead(reading.Reading, "room_bytes", property(_room_without_debt)),
        within=20,
        shape=Shape(kinds=("abandon the head",), faults=(1, 1), limits=Limits(sizes=Sizes(prefetch_bytes=150))),
        finds="12: .* read",
    ),
    Plant(
        "marks only for subscriptions",
        "who reads by offset says itself where it is, and needs no marks of what came before",
        changed(Fetcher, "happened", _without_marks),
        within=40,
        shape=Shape(kinds=("kill", "pause the slave"), faults=(2, 4), replays=1.0),
        finds="10:",
    ),
    Plant(
        "what is told now",
        "the tasks of a micro-batch read what is told to be there when they are planned",
        changed(applications, "promised_ranges", _as_told_now),
        within=200,
        shape=Shape(kinds=("kill both members", "kill", "pause"), faults=(3, 5), replays=1.0),
        finds="12: .* read",
    ),
    Plant(
        "sought and not granted",
        "who seeks goes on as soon as its subscription is moved, and is handed what was fetched before",
        changed(ReaderSession, "seek", _as_soon_as_it_is_moved),
        within=60,
        shape=Shape(kinds=("kill", "pause"), faults=(1, 2), acts=1.0, paces=(4,)),
        finds="6: .* before it sought",
    ),
    Plant(
        "all by the view at hand",
        "who asks whether it has all goes by what it was told last, which says nothing of what was committed since",
        changed(ReaderSession, "is_all_delivered", _by_the_view_at_hand),
        within=20,
        shape=Shape(kinds=("kill", "pause"), faults=(1, 2), acts=1.0, paces=(4,)),
        finds="9: .* told to have all",
    ),
    Plant(
        "fetched counts as handed out",
        "who asks whether it has all is told so as soon as all is fetched",
        changed(Consumer, "_has_all_of", lambda *_: True),
        within=20,
        shape=Shape(kinds=("kill", "pause"), faults=(1, 2), acts=1.0, paces=(4,)),
        finds="9: .* told to have all",
    ),
)
