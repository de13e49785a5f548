"""Wrong rules of the chain: links, lists, groups that come back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from seriatim.broker_group.core import cursors
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.coordinator import views
from seriatim.coordinator.core import (
    acquire_read,
    acquire_send,
    background,
    chain,
    chain_point,
    closing,
    readmission,
    recovery,
    removal,
    retention,
)
from seriatim.coordinator.core.chain_point import is_settled, point_before
from seriatim.coordinator.core.events import ReadChain, SendOpen
from seriatim.coordinator.core.registry import MEMBERS, Registry
from seriatim.coordinator.store import Store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import Certificate, ChainDocument, Link, LinkState, QueueSettings
from seriatim.protocol.chain_json import encode
from seriatim.protocol.names import ChainVersion, Epoch, Index, Offset, QueueId
from tests.simulation.plants.plant import Maker, Plant, changed, instead, together
from tests.simulation.schedule import Shape
from tests.simulation.zookeeper_session import SimulatedSession

# ---- ZooKeeper that is set back


async def _always_new(*_: object) -> int:
    return 1 << 31


def _never_outdated(right: Callable[..., pb.QueueView], *arguments: Any) -> pb.QueueView:
    view = right(*arguments)
    view.may_be_outdated = False
    return view


# ---- who comes back


def _obstacle(*, sync: bool = True, connection: bool = True, backlog: bool = True) -> Maker:
    """Without one of the looks."""

    def obstacle(_: Any, document: ChainDocument, registry: Registry, group: str) -> str:
        found = registry.send_obstacle(group)
        state = registry.group(group)
        for place in MEMBERS:
            if not found and sync and not state.members[place].is_in_sync_with(document.queue_id):
                found = "not in sync"
            if not found and connection and not state.is_peer_connected(place):
                found = "not connected"
        if not found and backlog and readmission.backlog(document, group):
            found = "backlog"
        return found

    return changed(readmission, "obstacle", obstacle)


# ---- who goes


def _away_for_good(right: Any, seen: Any, view: Any, now_ms: int) -> Any:
    links = () if seen.document.next_epoch == 1 else seen.document.links
    awaited = any(view.registry.group(link.group).missing for link in links)
    return [one for one in right(seen, view, now_ms) if not (awaited and isinstance(one, background.ClearQueue))]


def _only_who_may_serve(right: Any, document: ChainDocument, settings: QueueSettings) -> ChainDocument:
    altered: ChainDocument = right(document, settings)
    may_serve = settings.groups or altered.send_list
    return replace(altered, send_list=tuple(one for one in altered.send_list if one in may_serve))


def _listed_as_before(right: Any, document: ChainDocument, settings: QueueSettings) -> ChainDocument:
    return replace(right(document, settings), send_list=document.send_list)


# ---- two writes


def _sealed_and_listed_still(right: Any, document: ChainDocument, *arguments: Any) -> ChainDocument:
    return replace(right(document, *arguments), send_list=document.send_list)


def _ended_first(
    right: Any, state: Any, document: ChainDocument, expected: ChainVersion, what: str, now_ms: int
) -> Any:
    """The end now, the send list with the next write, from memory."""
    if what:
        return acquire_send._writing(state, document, expected, what)
    last = document.last_link
    if last is not None and state.closing is None and last.group in document.send_list and last.state not in chain.LIVE:
        document = replace(document, send_list=tuple(one for one in document.send_list if one != last.group))
    return right(state, document, expected, what, now_ms)


def _listed_for_sending_first(right: Any, document: ChainDocument, *arguments: Any, **named: Any) -> ChainDocument:
    listed = right(document, *arguments, **named)
    return replace(listed, subscriptions=document.subscriptions)


def _listed_for_reading_later(right: Any, state: Any, version: ChainVersion, now_ms: int) -> Any:
    """The consume lists, with a write of their own."""
    document = state.pending
    last = None if document is None else document.last_link
    if state.phase is not acquire_send.Phase.LISTING or last is None or last.state is not LinkState.OPENING:
        return right(state, version, now_ms)
    subscriptions = tuple(
        replace(one, consume_list=(*(epoch for epoch in one.consume_list if epoch != last.epoch), last.epoch))
        for one in document.subscriptions
    )
    if subscriptions == document.subscriptions:
        return right(state, version, now_ms)
    return acquire_send._writing(state, replace(document, subscriptions=subscriptions), version, "read lists")


# ---- opened before it is listed


def _opened_before_listed(
    right: Any, state: Any, document: ChainDocument, expected: ChainVersion, what: str, now_ms: int
) -> Any:
    after, effects = right(state, document, expected, what, now_ms)
    link: Link | None = None if after.pending is None else after.pending.last_link
    if link is None or link.state is not LinkState.OPENING or isinstance(effects[0], ReadChain):
        return after, effects
    token, limit_bytes = after.pending.sender_token, after.pending.settings.max_record_bytes
    opens = tuple(
        SendOpen(side, link, token, ChainVersion(expected + 1), limit_bytes) for side in (link.master, link.slave)
    )
    return after, (*opens, *effects)


# ---- an end that is lost


def _waits_for_the_hash_before(right: Any, document: ChainDocument, registry: Registry, **named: Any) -> ChainDocument:
    if not point_before(document, document.next_epoch).is_known:
        raise chain.Waiting("the chain's hash isn't known", reasons={"chain": "an earlier end is lost"})
    return right(document, registry, **named)


def _ends_where_it_was_seen(_: Any, base: Offset, certificate: Certificate) -> Offset:
    return Offset(base + certificate.end)


# ---- who waits for what


def _lost_when_both_are_gone(right: Any, state: Any, registry: Registry) -> Any:
    link = state.link
    if any(registry.is_present(side) for side in (link.master, link.slave)):
        return closing.Undecidable(closing._reasons(state))
    return right(state, registry)


def _never_kept(*_: Any) -> Any:
    async def nothing() -> dict[str, Any]:
        return {}

    return nothing()


def _left_to_senders(right: Any, seen: Any, view: Any, now_ms: int) -> Any:
    links = {link.epoch: link.state for link in seen.document.links}
    return [one for one in right(seen, view, now_ms) if links[one.epoch] is not LinkState.OPEN]


def _kept_long_enough(_: Any, document: ChainDocument, now_ms: int) -> tuple[Epoch, ...]:
    kept_ms = document.settings.retention_ms
    settled = [(one, one.certificate) for one in itertools.takewhile(is_settled, document.links)]
    return tuple(
        link.epoch
        for link, certificate in settled
        if certificate is not None and retention._is_over(link, certificate.sealed_at_ms, kept_ms, now_ms)
    )


def _short_at_any_price(right: Any, document: ChainDocument, now_ms: int) -> tuple[Epoch, ...]:
    """As if nobody had to read anything, where the chain is too long."""
    is_long = sum(map(retention._size_bytes, document.links)) > retention.MAX_CHAIN_BYTES
    unread = tuple(replace(one, consume_list=()) for one in document.subscriptions)
    return right(replace(document, subscriptions=unread) if is_long else document, now_ms)


def _backlog_always(right: Any, document: ChainDocument, registry: Registry, group: str) -> str:
    return right(document, registry, group) or ("backlog" if readmission.backlog(document, group) else "")


def _drained_exactly(_: Any, record: CursorRecord, end: Index | None) -> bool:
    return end is not None and record.index == end


def _never_beyond(right: Any, state: Any) -> Any:
    """No look whether the cursor lies behind the end."""
    link = state.head
    cursors = [answer.cursor for answer in state.told.values() if answer.cursor is not None]
    if link is not None and link.end is not None and cursors and max(cursors) > link.end:
        return acquire_read._granted(state, max(cursors))
    return right(state)


# ---- names


def _id_of_the_name(*_: Any) -> Any:
    async def same() -> QueueId:
        return QueueId(1)

    return same()


async def _made_in_its_place(_: Any, store: Store, document: ChainDocument, __: str) -> ChainVersion:
    path = store.paths.chain(document.queue_id)
    for below in (store.paths.senders(document.queue_id), store.paths.seals(document.queue_id), path):
        await store.session.ensure(below)
    version = await store.session.set(path, encode(document))
    await store.session.create(store.paths.name(document.name), json.dumps(document.queue_id).encode())
    return ChainVersion(version)


async def _awaited_for_ever(right: Any, store: Store, queue_id: QueueId) -> None:
    await right(store, queue_id)
    if queue_id not in store.chains:
        await store.session.exists(store.paths.chain(queue_id), store._watch(str(queue_id)))


# ---- a chain that ZooKeeper lost


async def _raised_over_others(self: Store, queue_id: QueueId, version: ChainVersion) -> None:
    path = self.paths.chain(queue_id)
    data, now = await self.session.get(path)
    while now < version:
        now = await self.session.set(path, data)


PLANTS: tuple[Plant, ...] = (
    Plant(
        "H14",
        "backlog always keeps a group out",
        changed(readmission, "obstacle", _backlog_always),
        within=20,
        shape=Shape(kinds=("idle subscription",), settings=pb.QueueSettings(readmit="in-sync")),
        finds="12:",
    ),
    Plant(
        "H15",
        "a link counts as lost when neither member can take records, and nobody looks for what they wrote beside the chain",
        together(
            changed(closing, "_without_answer", _lost_when_both_are_gone), changed(Store, "kept_seals", _never_kept)
        ),
        within=20,
        shape=Shape(kinds=("unreachable head",), faults=(1, 1)),
        finds="12:",
    ),
    Plant(
        "H16",
        "what is stored and said belongs to a queue's name",
        together(changed(Store, "new_queue_id", _id_of_the_name), changed(Store, "create_queue", _made_in_its_place)),
        within=100,
        shape=Shape(kinds=("queue made again",), faults=(1, 1)),
    ),
    Plant(
        "H18",
        "only a sender's call closes a link",
        changed(background, "_closings", _left_to_senders),
        within=20,
        shape=Shape(kinds=("nobody sends",), faults=(1, 1)),
        finds="12:",
    ),
    Plant(
        "H21",
        "an abandoned link ends where somebody last saw it",
        changed(chain_point, "_offset_after", _ends_where_it_was_seen),
        within=20,
        shape=Shape(kinds=("abandon the head",), faults=(1, 1)),
        finds="11:",
    ),
    Plant(
        "H22",
        "a cursor never lies beyond a link's end",
        together(
            changed(cursors, "is_drained", _drained_exactly), changed(acquire_read, "_with_cursors", _never_beyond)
        ),
        within=50,
        shape=Shape(
            kinds=(*["memory emptied"] * 6, "kill both members"),
            settings=pb.QueueSettings(durability="memory"),
            faults=(4, 6),
        ),
        finds="12:",
    ),
    Plant(
        "H20",
        "a link's hash starts from the hash before, which isn't known while an end is lost",
        changed(chain, "next_link", _waits_for_the_hash_before),
        within=50,
        shape=Shape(kinds=("lose the head",), faults=(1, 2)),
        finds="12:",
    ),
    Plant(
        "H23",
        "the next link is opened before it is listed",
        changed(acquire_send, "_listed", _opened_before_listed),
        within=20,
        finds="1:",
    ),
    Plant(
        "H24",
        "a link's end and the send list are written one after the other",
        together(changed(chain, "sealed", _sealed_and_listed_still), changed(acquire_send, "_listed", _ended_first)),
        within=20,
        finds="H24",
    ),
    Plant(
        "two lists in two writes",
        "a new link is put on the send list's chain first, on the consume lists with the next write",
        together(
            changed(chain, "next_link", _listed_for_sending_first),
            changed(acquire_send, "_written", _listed_for_reading_later),
        ),
        within=20,
        finds="2:",
    ),
    Plant(
        "readmitted with backlog",
        "a group comes back while it holds unread links",
        _obstacle(backlog=False),
        within=100,
        shape=Shape(kinds=("rotate", "drain group", "pause")),
        finds="6:",
    ),
    Plant(
        "readmitted out of sync",
        "a group comes back before its members hold all that they should",
        _obstacle(sync=False),
        within=100,
        shape=Shape(kinds=("kill both members", "kill", "blank disk")),
        finds="6:",
    ),
    Plant(
        "said before the end",
        "that a member is in sync counts, though it said so before the link's end was recorded",
        changed(background, "_untold", lambda *_: ()),
        within=100,
        shape=Shape(kinds=("blank disk", "disk fails"), faults=(2, 4), lasts_s=(5.0,)),
        finds="6:",
    ),
    Plant(
        "back on a member's word",
        "where no group is left, one comes back at once though nobody asked whether its members hold its links' ends",
        changed(chain, "_unproven", lambda *_: ()),
        within=100,
        shape=Shape(
            kinds=("isolate", "kill"), settings=pb.QueueSettings(durability="sync", readmit="in-sync"), groups=(2,)
        ),
        finds="6:",
    ),
    Plant(
        "readmitted unconnected",
        "a group comes back though its members can't reach each other",
        _obstacle(connection=False),
        within=100,
        shape=Shape(kinds=("cut", "isolate", "kill")),
        finds="6:",
    ),
    Plant(
        "kept by time alone",
        "retention lets a link go when its time is over, read or not",
        changed(retention, "due", _kept_long_enough),
        within=60,
        shape=Shape(kinds=("settings altered", "rotate", "pause an application"), faults=(3, 5), lasts_s=(5.0,)),
        finds="5:",
    ),
    Plant(
        "short at any price",
        "a chain that gets too long lets go of links that aren't read",
        changed(retention, "due", _short_at_any_price),
        within=60,
        shape=Shape(kinds=("rotate", "pause an application"), faults=(4, 7), lasts_s=(5.0,)),
        finds="5:",
    ),
    Plant(
        "altered at the head",
        "groups that may serve the queue no longer leave the send list at once, also the one that serves",
        changed(chain, "altered", _only_who_may_serve),
        within=30,
        shape=Shape(kinds=("settings altered",), groups=(3,)),
        finds="1:",
    ),
    Plant(
        "altered, and listed still",
        "groups that may serve the queue no longer leave the send list as any other, when their turn is over",
        changed(chain, "altered", _listed_as_before),
        within=30,
        shape=Shape(kinds=("settings altered",), groups=(3,)),
        finds="12:",
    ),
    Plant(
        "removed with its links",
        "a group whose members are gone may be removed, whatever lies on it",
        changed(removal, "_kept", lambda *_: ""),
        within=30,
        shape=Shape(kinds=("group removed",), groups=(3,), faults=(1, 1)),
        finds="a link is on it",
    ),
    Plant(
        "removed, and awaited",
        "a deleted queue stays until every member that may hold something of it was told, those of removed groups among them",
        changed(background, "_deletion", _away_for_good),
        within=30,
        shape=Shape(kinds=("group removed",), groups=(3,), faults=(1, 1)),
        finds="cleared away",
    ),
    Plant(
        "a chain awaited for ever",
        "whose chain isn't there has it made just now",
        changed(Store, "_read_seen", _awaited_for_ever),
        within=20,
        shape=Shape(kinds=("queue made again",), faults=(1, 1)),
        finds="12: somebody watches",
    ),
    Plant(
        "versions raised over others",
        "a recovered chain is written again until it has the version that is wanted, whoever wrote it meanwhile",
        instead(Store, "raise_version", _raised_over_others),
        within=200,
        shape=Shape(kinds=("recovered by several",), faults=(1, 1)),
        finds="[47]:",
    ),
    Plant(
        "recovered as it was listed",
        "a link that is opening in the copy of a recovered chain was granted to nobody",
        changed(recovery, "opened", lambda _, document, __: document),
        within=120,
        shape=Shape(kinds=("recovered without some",), faults=(1, 1)),
    ),
    Plant(
        "recovered once more",
        "a recovery that was cut off begins anew, whoever was elected since (by a coordinator that no member told of it)",
        together(
            changed(recovery, "goes_on_from", lambda *_: False),
            instead(Registry, "set_back_error", lambda *_: None),
        ),
        within=100,
        shape=Shape(kinds=("queue recovered",), faults=(2, 3)),
        finds="7:",
    ),
    Plant(
        "said to an earlier leader",
        "a member that is registered has compared its disk, also where its registration is of before ZooKeeper was set back",
        instead(SimulatedSession, "leader_of", _always_new),
        within=100,
        shape=Shape(kinds=("ZooKeeper set back",), faults=(1, 2)),
        finds="(4|6): ",
    ),
    Plant(
        "the end of an old chain",
        "a queue ends where its chain says, also where somebody knows a newer chain",
        changed(views, "queue_view", _never_outdated),
        within=60,
        shape=Shape(kinds=("ZooKeeper set back",), faults=(1, 2)),
        finds="9:",
    ),
)
