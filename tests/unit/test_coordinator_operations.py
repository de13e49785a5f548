"""What an operator's or a member's call makes of a chain document that it read from a server that is behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.cli.views import cluster_warnings, group_lines, group_object, listed_objects, queue_object
from seriatim.coordinator import administration, execution, remembered, views
from seriatim.coordinator.abandoning import Abandoning
from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core import chain, chain_length
from seriatim.coordinator.core.background import SeenChain
from seriatim.coordinator.core.events import ChainConflict, ChainWritten, SealFailed, SendSeal, Wait, WriteChain
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.coordinator.execution import Execution
from seriatim.coordinator.members import Members
from seriatim.coordinator.messages import altered_settings
from seriatim.coordinator.service import CoordinatorService
from seriatim.coordinator.store import Lines, Store
from seriatim.protocol import chain_json
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Durability, StaleCursors, Subscription
from seriatim.protocol.errors import (
    InvalidArgument,
    OlderVersion,
    SeriatimError,
    SubscriptionExists,
    UnknownQueue,
    UnknownSubscription,
    Unreachable,
    Waiting,
)
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, MemberName, QueueId
from seriatim.protocol.zookeeper import NotAllowed, ZooKeeperSession
from tests.property.chain_world import Run, World, close_call, send_call, with_subscription


class BehindStore:
    """A ZooKeeper server that shows an old document until it is told to catch up."""

    lines = Lines()

    def __init__(self, old: ChainDocument, new: ChainDocument) -> None:
        self.shown, self._new = old, new
        self.written: ChainDocument | None = None

    async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self.shown, ChainVersion(2 if self.shown is self._new else 1)

    async def catch_up(self) -> None:
        self.shown = self._new

    async def write_chain(self, document: ChainDocument, expected: ChainVersion) -> ChainVersion | None:
        if expected != 2:
            self.shown = self._new  # the refusal came through the same server, behind all that was written before
            return None
        self.written = document
        return ChainVersion(3)


NOTE = StaleCursors(Epoch(1), "b", ())


def changed(store: BehindStore, transition: Any, **conditions: Any) -> ChainDocument:
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    document, _ = asyncio.run(operations.change(store.shown.queue_id, transition, "a test", "cause", **conditions))
    return document


def test_what_would_change_nothing_by_an_old_document_is_looked_at_again() -> None:
    new = World().document
    old = replace(new, stale_cursors=(NOTE,))
    store = BehindStore(old, new)
    noted = changed(store, lambda document: replace(document, stale_cursors=(NOTE,)))
    assert noted.stale_cursors == (NOTE,)
    assert store.written == noted


def test_what_is_refused_by_an_old_document_is_looked_at_again() -> None:
    new = World().document
    old = replace(new, settings=replace(new.settings, retention_ms=1))

    def refused_by_the_old(document: ChainDocument) -> ChainDocument:
        if document == old:
            raise UnknownSubscription("there is no subscription s")
        return replace(document, sender_node="seen")

    store = BehindStore(old, new)
    assert changed(store, refused_by_the_old).sender_node == "seen"


def test_what_is_refused_by_the_present_document_is_refused() -> None:
    new = World().document

    def refused(_: ChainDocument) -> ChainDocument:
        raise UnknownSubscription("there is no subscription s")

    store = BehindStore(new, new)
    with pytest.raises(UnknownSubscription):
        changed(store, refused)
    assert store.written is None


def unchanged(document: ChainDocument) -> ChainDocument:
    return document


def test_a_note_that_stands_is_written_again_and_is_another_version_of_the_chain() -> None:
    noted = World().document
    store = BehindStore(noted, noted)
    changed(store, unchanged, must_write=True)
    assert store.written == noted


@pytest.mark.parametrize("read_at", [1, 3])
def test_what_was_asked_for_at_another_version_of_the_chain_is_refused(read_at: int) -> None:
    """Version 2 is the newest; a server that is behind shows version 1, at which the call would have been in time."""
    new = World().document
    store = BehindStore(replace(new, stale_cursors=(NOTE,)), new)
    with pytest.raises(OlderVersion):
        changed(store, lambda document: replace(document, stale_cursors=()), only_at=ChainVersion(read_at))
    assert store.written is None


def test_what_was_asked_for_at_this_version_of_the_chain_is_done() -> None:
    new = replace(World().document, stale_cursors=(NOTE,))
    store = BehindStore(World().document, new)
    done = changed(store, lambda document: replace(document, stale_cursors=()), only_at=ChainVersion(2))
    assert done.stale_cursors == ()
    assert store.written == done


def altered(before: ChainDocument, *, all_groups: bool = False, **settings: Any) -> ChainDocument:
    """In a cluster of g1, g2 and g3."""
    request = pb.AlterQueueRequest(settings=pb.QueueSettings(**settings), all_groups=all_groups)
    return chain.altered(before, altered_settings(request, frozenset({"g1", "g2", "g3"}), before.settings))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"max_record_bytes": 1024 * 1024 - 1}, "only be raised, it is 1,048,576 bytes"),
        ({"max_record_bytes": 1 << 30}, "at most 33,553,408 bytes"),
        ({"groups": ["g1", "g4"]}, "no member of g4 was ever started"),
        ({"groups": ["g1", "g1"]}, "named twice"),
        ({"groups": ["g1", "g2"], "all_groups": True}, "either some groups, or all"),
    ],
)
def test_what_would_make_a_queue_worse_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        altered(World().document, **asked)


def test_an_altered_setting_leaves_the_others_and_every_link_as_they_are() -> None:
    before = World().document
    after = altered(before, durability="memory")
    assert after == replace(before, settings=replace(before.settings, durability=Durability.MEMORY))


def test_groups_that_may_serve_no_longer_leave_the_send_list_but_for_the_one_that_serves() -> None:
    world = World()
    send_call(world).finish()
    before = replace(world.document, send_list=("g1", "g2", "g3"))
    assert [link.group for link in before.links] == ["g1"]
    some = altered(before, groups=["g2", "g3"])
    assert (some.settings.groups, some.send_list) == (("g2", "g3"), ("g1", "g2", "g3"))
    assert some.links == before.links
    ended = chain.lost(chain.closing(some, Epoch(1)), Epoch(1))
    assert ended.send_list == ("g2", "g3")
    assert altered(some, groups=["g1", "g3"]).send_list == ("g1", "g3")
    every = altered(some, all_groups=True)
    assert (every.settings.groups, every.send_list) == ((), ("g1", "g2", "g3"))


def test_who_is_cut_off_from_zookeeper_lists_no_queues() -> None:
    """He knows of none that others made since; another coordinator is asked."""

    class CutOff:
        async def catch_up(self) -> None:
            raise Unreachable("ZooKeeper doesn't answer")

    operations = Operations(cast("Store", CutOff()), *cast("tuple[Any, Any]", (None, None)))
    with pytest.raises(Unreachable):
        asyncio.run(operations.list_queues(pb.ListQueuesRequest()))


class NamedStore:
    """What a coordinator remembers of queues that have names."""

    def __init__(self, world: World, *documents: ChainDocument) -> None:
        self.registry = world.registry()
        self.chains = {one.queue_id: SeenChain(one, ChainVersion(1), since_ms=0) for one in documents}
        self.names = {one.name: one.queue_id for one in documents}
        self.damaged: dict[QueueId, str] = {}

    async def catch_up(self) -> None: ...

    async def look_up_registry(self) -> Registry:
        return self.registry

    def listing(self) -> Operations:
        return Operations(cast("Store", self), *cast("tuple[Any, Any]", (None, None)))


def test_other_calls_have_their_turn_while_thousands_of_queues_are_listed_also_those_that_delete_some() -> None:
    """Both coordinators stood still for it, lost their sessions with ZooKeeper, and `status` said that nobody answers."""
    world = World()
    store = NamedStore(
        world, *(replace(world.document, queue_id=QueueId(at), name=f"q{at:03}") for at in range(1, 101))
    )
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 3:
                store.names = {name: queue_id for name, queue_id in store.names.items() if name != "q099"}
                del store.chains[QueueId(98)]
            await asyncio.sleep(0)

    async def both() -> tuple[pb.ListQueuesReply, int, pb.ListGroupsReply, int]:
        others = asyncio.create_task(take_turns())
        queues = await store.listing().list_queues(pb.ListQueuesRequest())
        so_far = turns
        groups = await store.listing().list_groups(pb.ListGroupsRequest())
        others.cancel()
        return queues, so_far, groups, turns - so_far

    queues, amid_queues, groups, amid_groups = asyncio.run(both())
    assert [view.queue for view in queues.queues] == [f"q{at:03}" for at in range(1, 101) if at not in (98, 99)]
    assert amid_queues >= 100 // 16
    assert amid_groups >= len(groups.groups) == len(store.registry.groups)


def test_a_listing_that_has_each_group_once_is_shown_as_one_that_has_them_in_each_queue() -> None:
    """Of 2,000 queues in 64 groups the groups are nine tenths of what is sent."""
    world = World()
    send_call(world).finish()
    used = replace(world.document, queue_id=QueueId(8), name="used", send_list=("g3", "g9"))
    store = NamedStore(world, world.document, used)
    whole = asyncio.run(store.listing().list_queues(pb.ListQueuesRequest()))
    apart = asyncio.run(store.listing().list_queues(pb.ListQueuesRequest(groups_apart=True)))
    assert not any(view.groups for view in apart.queues)
    shown = list(listed_objects(whole))
    assert list(listed_objects(apart)) == shown == [queue_object(view) for view in whole.queues]
    assert [[one["group"] for one in each["groups"]] for each in cast("Any", shown)][1] == ["g3", "g9", "g1"]


def test_a_chain_that_is_too_long_is_told_where_queues_are_listed_by_the_length_that_its_node_was_read_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only `status` of that very queue told, and encoded the chain to find out: 150 ms at 5,000 links, at each look."""
    world = World()
    other = replace(world.document, queue_id=QueueId(8), name="long")
    store = NamedStore(world, world.document, other)
    store.chains[QueueId(8)] = replace(store.chains[QueueId(8)], size_bytes=chain_length.SWITCHED_BYTES + 1)
    monkeypatch.setattr(chain_json, "encode", None)
    monkeypatch.setattr(chain_json, "size_bytes", None)
    listed = asyncio.run(store.listing().list_queues(pb.ListQueuesRequest())).queues
    assert [(one.queue, [wait.what for wait in one.waits]) for one in listed] == [("long", ["chain"]), ("orders", [])]
    assert "takes 500,001 bytes: beyond 500,000 no planned switch is made" in listed[0].waits[0].reason
    assert [line for line in cluster_warnings(listed) if "the chain of long is too long" in line]


class Laggard:
    """A session at a ZooKeeper server that is behind: it shows the queue that had a name before."""

    def __init__(self) -> None:
        self.shown = b"7"
        self.deleted: list[str] = []

    def on_state(self, _: object) -> None:
        pass

    async def sync(self, _: str) -> None:
        self.shown = b"8"

    async def get(self, *_: object) -> tuple[bytes, int]:
        return self.shown, 0

    async def delete(self, path: str, *_: object) -> None:
        self.deleted.append(path)


def test_a_name_means_the_queue_that_has_it_now_also_where_zookeeper_s_server_is_behind() -> None:
    """Its reader was told that his queue was deleted, and `queue delete` said that it was done and deleted nothing."""
    store = Store(cast("ZooKeeperSession", Laggard()), "c")
    assert asyncio.run(store.queue_id("orders")) == 8


def test_a_deleted_queue_s_name_is_not_taken_from_the_one_that_has_it_now() -> None:
    """Nobody could send to that one, or read it, by its name any more; made and not used yet, it was cleared away."""
    session = Laggard()
    asyncio.run(Store(cast("ZooKeeperSession", session), "c").free_name("orders", QueueId(7)))
    assert session.deleted == []


class QueuesStore:
    """What a coordinator remembers of these queues."""

    lines = Lines()

    def __init__(self, world: World, *documents: ChainDocument) -> None:
        self.registry = world.registry()
        self.chains = {one.queue_id: SimpleNamespace(document=one) for one in documents}
        self.closed: list[QueueId] = []
        self.problem: SeriatimError = UnknownQueue("it was deleted meanwhile")
        self.aside: dict[MemberName, str] = {}

    async def standing_aside(self, member: MemberName) -> str:
        assert self.registry.member(member) is None
        return self.aside.get(member, "")

    async def set_draining(self, _: str, *, is_draining: bool) -> None:
        assert is_draining

    async def look_up_registry(self) -> Any:
        return self.registry

    async def read_chains(self) -> list[ChainDocument]:
        return [one.document for one in self.chains.values()]

    async def read_chain(self, queue_id: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self.chains[queue_id].document, ChainVersion(1)

    async def write_chain(self, document: ChainDocument, expected: ChainVersion) -> ChainVersion:
        self.chains[document.queue_id].document = document
        return ChainVersion(expected + 1)

    def size_bytes(self, _: QueueId) -> int:
        return 0

    async def first_in_line(self, queue_id: QueueId, _: object) -> str:
        self.closed.append(queue_id)
        raise self.problem


def test_a_deleted_queue_asks_nothing_of_a_group_that_is_drained() -> None:
    """It stays as long as a member is away that may hold something of it; no other group waits for that."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    used = replace(world.document, queue_id=QueueId(8), name="used")
    store = QueuesStore(world, chain.deleted(world.document), used)
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    view = asyncio.run(operations.drain_group(pb.GroupRequest(group="g1")))
    assert store.closed == [8]
    assert (list(view.sending_queues), list(view.backlog_queues)) == (["used"], ["used"])


def test_a_group_is_drained_also_where_a_link_on_it_can_t_be_closed_now() -> None:
    """Both members stand still, and a call waits a second for each link: the elected coordinator goes on."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    store = QueuesStore(world, world.document, replace(world.document, queue_id=QueueId(8), name="another"))
    store.problem = Waiting("link 1 can't be closed now")
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    view = asyncio.run(operations.drain_group(pb.GroupRequest(group="g1")))
    assert store.closed == [world.document.queue_id]
    assert "another" in view.sending_queues


def test_a_group_is_drained_of_a_queue_only_once_another_one_can_take_it_over() -> None:
    """`queue rotate` refuses that; a drain had sending stand still until another group was there."""
    world = World()
    send_call(world).finish()
    store = QueuesStore(world, world.document)
    store.registry = Registry({"g1": world.registry().groups["g1"]})
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    view = asyncio.run(operations.drain_group(pb.GroupRequest(group="g1")))
    assert store.closed == []
    assert list(view.sending_queues) == ["orders"]


def test_who_drains_a_group_is_answered_however_many_queues_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand links take longer than a command waits for an answer."""
    world = World()
    send_call(world).finish()
    store = QueuesStore(world, world.document, replace(world.document, queue_id=QueueId(8), name="another"))
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    monkeypatch.setattr(administration, "DRAINING_S", -1.0)
    view = asyncio.run(operations.drain_group(pb.GroupRequest(group="g1")))
    assert store.closed == []
    assert list(view.sending_queues) == ["orders", "another"]


class MarkedWorld(World):
    """A world of two groups, and the store of a coordinator in it."""

    def __init__(self) -> None:
        super().__init__(groups=("g1", "g2"))
        self.marked: set[str] = set()

    def registry(self) -> Registry:
        groups = super().registry().groups
        return Registry({name: replace(one, is_draining=name in self.marked) for name, one in groups.items()})

    def store(self) -> Store:
        return cast("Store", MarkedStore(self))

    def drained(self, group: str) -> pb.GroupView:
        operations = Operations(self.store(), *cast("tuple[Any, Any]", (None, None)))
        return asyncio.run(operations.drain_group(pb.GroupRequest(group=group)))


class MarkedStore:
    """What it remembers is as it was before anybody switched."""

    lines = Lines()

    def __init__(self, world: MarkedWorld) -> None:
        self._world = world
        self.registry = world.registry()
        self.chains = {document.queue_id: SimpleNamespace(document=document) for document, _ in world.earlier[:1]}

    def size_bytes(self, _: QueueId) -> int:
        return 0

    async def set_draining(self, group: str, *, is_draining: bool) -> None:
        assert is_draining
        self._world.marked.add(group)

    async def look_up_registry(self, _: Any = None) -> Registry:
        self.registry = self._world.registry()
        return self.registry

    async def read_chains(self) -> list[ChainDocument]:
        return [self._world.document]

    async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self._world.document, self._world.version

    async def write_chain(self, document: ChainDocument, expected: ChainVersion) -> ChainVersion | None:
        event = self._world.write(document, expected, "drained")
        return event.version if isinstance(event, ChainWritten) else None

    async def first_in_line(self, *_: object) -> str:
        raise Waiting("link 1 can't be closed now")


def about_to_lead_to_g2(*, is_listed: bool) -> tuple[MarkedWorld, Run]:
    """The master of g1 is dead, and its sender's call is about to list a link for g2, which is on the send list, or comes back to it."""
    world = MarkedWorld()
    with_subscription(world)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    if not is_listed:
        world.write(replace(world.document, send_list=("g1",)), world.version, "g2 has served before")
    world.kill(("g1", "a"))
    switch = send_call(world, token=1, failed_epoch=1)
    while not (isinstance(write := switch.pending[0], WriteChain) and "listed for g2" in write.what):
        switch.go()
    return world, switch


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_switch_that_began_before_a_group_was_drained_does_not_lead_there(is_listed: bool) -> None:
    """`group drain` had said that nothing was left: who stopped the members then lost the end of the link that was listed."""
    world, switch = about_to_lead_to_g2(is_listed=is_listed)
    view = world.drained("g2")
    assert (view.is_draining, list(view.sending_queues)) == (True, [])
    answer = switch.finish()
    assert isinstance(answer, Wait)
    assert answer.reasons["g2"] == "it is being drained by an operator"
    assert {link.group for link in world.document.links} == {"g1"}
    assert "g2" not in world.document.send_list


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_switch_that_led_to_a_group_before_it_was_drained_is_told(is_listed: bool) -> None:
    """Also where the coordinator that drains it hasn't heard of that yet."""
    world, switch = about_to_lead_to_g2(is_listed=is_listed)
    switch.go()
    assert list(world.drained("g2").sending_queues) == ["orders"]
    assert world.document.send_list == ("g2",)


def test_a_group_that_may_not_serve_a_queue_is_drained_without_a_word_to_it() -> None:
    world = MarkedWorld()
    settings = replace(world.document.settings, groups=("g1",))
    world.write(replace(world.document, settings=settings, send_list=("g1",)), world.version, "g1 alone")
    world.earlier = [(world.document, world.version)]
    before = world.version
    world.drained("g2")
    assert world.version == before


@pytest.mark.parametrize(("is_listed", "is_marked"), [(True, False), (False, False), (False, True)])
def test_a_group_that_comes_back_is_looked_up_before_a_link_is_listed_for_it(is_listed: bool, is_marked: bool) -> None:
    """What is remembered showed the mark of who drained it after the chain that he wrote: the next try led there all the same."""
    world, switch = about_to_lead_to_g2(is_listed=is_listed)
    write = switch.pending[0]
    assert isinstance(write, WriteChain)
    read, looked_up = world.document, list[str]()

    class Watching(MarkedStore):
        async def look_up_registry(self, groups: Any = ()) -> Registry:
            looked_up.extend(groups)
            return await super().look_up_registry()

    store = Watching(world)
    world.marked |= {"g2"} if is_marked else set()
    run = execution._Run(*cast("Any", (store, None, read.queue_id, "cause")))
    run._queue = read
    event = asyncio.run(run._written(write))
    assert looked_up == ([] if is_listed else ["g2"])
    assert isinstance(event, ChainConflict if is_marked else ChainWritten)
    assert (world.document == read) == is_marked
    assert store.registry.group("g2").is_draining == is_marked


def test_a_group_is_drained_also_of_a_queue_that_this_coordinator_has_not_heard_of_yet() -> None:
    """It came back to ZooKeeper just now; the drain had said that nothing was left, and the queue sent to the group for a while yet."""
    world = MarkedWorld()
    send_call(world).finish()
    store = MarkedStore(world)
    store.chains = {}
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    view = asyncio.run(operations.drain_group(pb.GroupRequest(group="g1")))
    assert list(view.sending_queues) == ["orders"]


class NewQueueStore(MarkedStore):
    """Makes the world's queue; `drained_meanwhile`: groups whose drain has read all chains before."""

    cluster = "c"

    def __init__(self, world: MarkedWorld, *drained_meanwhile: str) -> None:
        super().__init__(world)
        self._drained_meanwhile = drained_meanwhile

    async def new_queue_id(self) -> QueueId:
        return self._world.document.queue_id

    async def create_queue(self, document: ChainDocument, _: str) -> ChainVersion | None:
        self._world.marked |= set(self._drained_meanwhile)
        self._world.document = document
        return self._world.version


def made(store: NewQueueStore, *groups: str) -> pb.QueueView:
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    request = pb.CreateQueueRequest(queue="orders", settings=pb.QueueSettings(groups=groups))
    return asyncio.run(operations.create_queue(request))


@pytest.mark.parametrize("groups", [(), ("g2", "g1")])
def test_no_drained_group_is_on_a_new_queue_s_send_list(groups: tuple[str, ...]) -> None:
    """A coordinator that heard of the mark late led there, after the drain was answered."""
    world = MarkedWorld()
    world.marked = {"g2"}
    assert list(made(NewQueueStore(world), *groups).send_list) == ["g1"]
    world = MarkedWorld()
    assert list(made(NewQueueStore(world, "g2"), *groups).send_list) == ["g1"]
    assert world.document.send_list == ("g1",)


def test_a_queue_is_made_also_where_all_groups_are_drained_and_says_what_it_waits_for() -> None:
    world = MarkedWorld()
    world.marked = {"g1", "g2"}
    view = made(NewQueueStore(world))
    why = "it is being drained by an operator"
    assert (list(view.send_list), {one.what: one.reason for one in view.waits}) == ([], {"g1": why, "g2": why})
    answer = send_call(world).finish()
    assert isinstance(answer, Wait)
    assert answer.reasons == {"g1": why, "g2": why}
    world.marked = {"g1"}  # the other one is resumed
    send_call(world).finish()
    assert chain.serving(world.document) == "g2"


@pytest.mark.parametrize("is_marked", [True, False])
def test_the_group_of_a_queue_s_first_link_is_looked_up_before_that_is_listed(is_marked: bool) -> None:
    """Who drained it had read all chains before this one was there, and its maker hasn't looked again yet."""
    world = MarkedWorld()
    switch = send_call(world)
    while not (isinstance(write := switch.pending[0], WriteChain) and "listed for g1" in write.what):
        switch.go()
    world.marked = {"g1"} if is_marked else set()
    run = execution._Run(*cast("Any", (MarkedStore(world), None, world.document.queue_id, "cause")))
    run._queue = world.document
    event = asyncio.run(run._written(write))
    assert isinstance(event, ChainConflict if is_marked else ChainWritten)


def test_a_group_whose_link_is_still_being_closed_is_not_free_yet() -> None:
    """Who stopped both members now would lose the end of the link, and readers would stop there."""
    world = World()
    send_call(world).finish()
    last = world.document.last_link
    assert last is not None
    being_closed = chain.closing(world.document, last.epoch)
    operations = Operations(cast("Store", QueuesStore(world, being_closed)), *cast("tuple[Any, Any]", (None, None)))
    shown = asyncio.run(operations.list_groups(pb.ListGroupsRequest())).groups
    assert {one.group: list(one.sending_queues) for one in shown if one.sending_queues} == {
        last.group: [being_closed.name]
    }


def test_a_group_shows_which_queues_have_a_lost_link_on_it() -> None:
    """Who looked after its machines now, or emptied a disk, could lose the end of the link for good."""
    world = World()
    send_call(world).finish()
    lost = chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1))
    operations = Operations(cast("Store", QueuesStore(world, lost)), *cast("tuple[Any, Any]", (None, None)))
    found = asyncio.run(operations.list_groups(pb.ListGroupsRequest())).groups
    assert {one.group: list(one.lost_queues) for one in found} == {"g1": ["orders"], "g2": [], "g3": []}
    assert not any(one.sending_queues for one in found)


def test_a_group_shows_which_deleted_queues_wait_for_it() -> None:
    world = World()
    empty = chain.deleted(replace(world.document, queue_id=QueueId(7), name="never sent to"))
    send_call(world).finish()
    world.kill(("g2", "a"))
    world.expire(("g2", "a"))
    used = replace(world.document, queue_id=QueueId(8), name="used")
    store = QueuesStore(world, chain.deleted(world.document), used, empty)
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    found = asyncio.run(operations.list_groups(pb.ListGroupsRequest())).groups
    assert {one.group: list(one.deleted_queues) for one in found} == {"g1": [], "g2": ["orders"], "g3": []}


def test_a_group_shows_why_a_member_that_is_there_is_not_registered() -> None:
    world = World()
    for name in (("g2", "a"), ("g3", "b")):
        world.kill(name)
        world.expire(name)
    store = QueuesStore(world)
    store.aside[MemberName("g2", "a")] = "its disk stands still"
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, None)))
    found = asyncio.run(operations.list_groups(pb.ListGroupsRequest())).groups
    shown = {line.split()[0]: line.split(maxsplit=3)[3] for line in group_lines(found)}
    assert shown["g2"].startswith("its disk stands still  ")
    assert "not there" in shown["g3"]
    assert "its disk" not in shown["g3"]
    member = cast("Any", group_object(found[1]))["members"][0]
    assert (member["is_registered"], member["problem"]) == (False, "its disk stands still")


# ---- giving up a link


class OneLinkStore:
    """One queue, and what its members wrote beside its chain."""

    def __init__(self, world: World, **kept: SealAnswer) -> None:
        self.document, self._kept = world.document, kept

    async def queue_id(self, _: str) -> QueueId:
        return self.document.queue_id

    async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self.document, ChainVersion(7)

    async def kept_seals(self, *_: object) -> dict[str, SealAnswer]:
        return dict(self._kept)

    async def write_chain(self, document: ChainDocument, expected: ChainVersion) -> ChainVersion:
        assert expected == 7
        self.document = document
        return ChainVersion(8)


class Answering:
    """Members, by place; whoever isn't among them is not registered."""

    def __init__(self, **answers: SealAnswer) -> None:
        self._answers = answers

    async def seal(self, effect: SendSeal, *_: object) -> SealAnswer:
        if (answer := self._answers.get(effect.side.name.member)) is None:
            raise Unreachable("it is not registered")
        return answer


def given_up(
    store: OneLinkStore, *, shown: str = "", confirmed: str = "orders", **there: SealAnswer
) -> pb.AbandonLinkReply:
    abandoning = Abandoning(cast("Store", store), cast("Members", Answering(**there)))
    request = pb.AbandonLinkRequest(queue="orders", epoch=1, confirmed_queue=confirmed, confirmed_what=shown)
    return asyncio.run(abandoning.abandon_link(request))


def lost_disks() -> World:
    """The only link holds records, and both its members are gone."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    return world


def whole(world: World, place: str) -> SealAnswer:
    member = world.members["g1", place]
    return SealAnswer(Wholeness.WHOLE, member.incarnation, member.copy(Epoch(1)).answer())


def test_what_disks_that_are_gone_said_of_their_copies_holds_nobody_up() -> None:
    world = lost_disks()
    kept = {place: whole(world, place) for place in ("a", "b")}
    close_call(world, 1).finish()
    store = OneLinkStore(world, **kept)
    reply = given_up(store)
    assert reply.is_done
    assert "no answer from g1-a, g1-b" in reply.what
    certificate = store.document.links[0].certificate
    assert certificate is not None
    assert (certificate.end, certificate.is_abandoned) == (0, True)


def shown_with_a_damaged_copy() -> tuple[OneLinkStore, SealAnswer, str]:
    """A lost link, what one of its members has of it, and what an operator was shown of that."""
    world = lost_disks()
    damaged = replace(whole(world, "a"), wholeness=Wholeness.PARTIAL)
    world.document = chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1))
    store = OneLinkStore(world)
    return store, damaged, given_up(store, confirmed="", a=damaged).what


def test_no_more_is_given_up_than_was_shown() -> None:
    """A damaged copy was there when the operator was asked for the queue's name, and is away when it has been typed."""
    store, damaged, shown = shown_with_a_damaged_copy()
    before = store.document
    assert "from index 1 (offset 1) on; no answer from g1-b" in shown
    with pytest.raises(Waiting, match=r"nothing was given up, look again: .* from index 0 "):
        given_up(store, shown=shown)
    assert store.document == before
    assert given_up(store, shown=shown, a=damaged).is_done


def test_what_a_changed_chain_refused_is_not_said_to_be_given_up() -> None:
    store, damaged, shown = shown_with_a_damaged_copy()
    store.write_chain = lambda *_: asyncio.sleep(0, None)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(Waiting, match="the chain changed meanwhile: look again"):
        given_up(store, shown=shown, a=damaged)


def test_a_link_that_was_given_up_by_a_call_whose_answer_was_lost_is_given_up() -> None:
    """The next coordinator is asked the same, and would find nothing left to give up, or give up the rest, too."""
    store, damaged, shown = shown_with_a_damaged_copy()
    assert given_up(store, shown=shown, a=damaged).is_done
    done = store.document
    for there in ({"a": damaged}, {}):
        assert given_up(store, shown=shown, **there) == pb.AbandonLinkReply(what=shown, is_done=True)
    assert store.document == done


@pytest.mark.parametrize("confirmed", ["", "orders"])
def test_what_was_given_up_whole_is_not_given_up_again(confirmed: str) -> None:
    """Who asked a second time was shown `0 records`, and that given up ended as a defect: with a trace, and 70."""
    world = lost_disks()
    close_call(world, 1).finish()
    store = OneLinkStore(world)
    assert given_up(store).is_done
    done = store.document
    with pytest.raises(InvalidArgument, match="no records to give up"):
        given_up(store, confirmed=confirmed)
    assert store.document == done


def test_an_end_that_can_be_told_of_a_lost_link_is_written_instead_of_given_up() -> None:
    world = lost_disks()
    kept = {"b": whole(world, "b")}
    world.document = chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1))
    store = OneLinkStore(world, **kept)
    with pytest.raises(InvalidArgument, match="its end can be told, 1"):
        given_up(store)
    certificate = store.document.links[0].certificate
    assert certificate is not None
    assert (certificate.end, certificate.is_abandoned) == (1, False)


def sealed_on_disks_that_were_replaced() -> tuple[OneLinkStore, SealAnswer]:
    """A sealed link of 2 records, and what a member answers whose disk was replaced since, and filled from the other one."""
    world = lost_disks()
    world.append(Epoch(1), 2)
    held = world.members["g1", "a"].copy(Epoch(1)).positions
    close_call(world, 1).finish()
    certificate = world.document.links[0].certificate
    assert certificate is not None
    assert certificate.end == held[-1].index == 2
    return OneLinkStore(world), SealAnswer(Wholeness.PARTIAL, Incarnation("new-disk", 1), tuple(held), "another disk")


def test_what_another_disk_was_filled_with_is_not_given_up() -> None:
    """The other member was gone for good amid the filling: all of the link was given up, and what had been copied went with it."""
    store, filled = sealed_on_disks_that_were_replaced()
    part = replace(filled, positions=filled.positions[:-1])
    reply = given_up(store, a=part)
    assert "1 records of link 1 of queue orders on g1, from index 1 (offset 1) on; no answer from g1-b" in reply.what
    certificate = store.document.links[0].certificate
    assert certificate is not None
    assert (certificate.end, certificate.link_hash) == (1, part.next.hash)


def test_a_link_that_another_disk_has_whole_need_not_be_given_up() -> None:
    """The other member was merely stopped."""
    store, filled = sealed_on_disks_that_were_replaced()
    before = store.document
    with pytest.raises(InvalidArgument, match="g1-a has all its 2 records"):
        given_up(store, a=filled)
    assert store.document == before


def test_who_has_nothing_to_tell_of_what_is_given_up_is_shown() -> None:
    store, filled = sealed_on_disks_that_were_replaced()
    none = SealAnswer(Wholeness.UNKNOWN, filled.incarnation, (), "this is another disk")
    assert given_up(store, a=none).what.endswith("no answer from g1-b; nothing from g1-a: this is another disk")


# ---- asked again by a call whose answer was lost


class UnheardStore:
    """One queue, of whose next write nobody hears that it was done: ZooKeeper's answer is lost, or the coordinator dies."""

    lines = Lines()

    def __init__(self, world: World) -> None:
        self.document, self.version = world.document, 1
        self.is_unheard = False
        self.freed: list[tuple[str, int]] = []

    async def queue_id(self, name: str, known: int = 0) -> QueueId:
        if known:
            return QueueId(known)
        if self.document.is_deleted:
            raise UnknownQueue(f"there is no queue {name}")
        return self.document.queue_id

    async def catch_up(self) -> None:
        pass

    async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self.document, ChainVersion(self.version)

    async def write_chain(self, document: ChainDocument, expected: ChainVersion) -> ChainVersion:
        assert expected == self.version
        self.document, self.version = document, self.version + 1
        if self.is_unheard:
            self.is_unheard = False
            raise Unreachable("ZooKeeper didn't answer: ConnectionLoss")
        return ChainVersion(self.version)

    async def free_name(self, name: str, queue_id: QueueId) -> None:
        self.freed.append((name, queue_id))

    async def sweep_readers(self, document: ChainDocument) -> None:
        assert document is self.document


class Describing:
    """What is recorded, without what members know."""

    async def committed(self, _: ChainDocument) -> None:
        return None

    async def subscription(self, _: ChainDocument, subscription: Subscription) -> pb.SubscriptionView:
        return views.subscription_view(subscription)


def operated(store: UnheardStore, method: str, request: Any, *, is_unheard: bool = False) -> Any:
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any]", (None, Describing())))
    store.is_unheard = is_unheard
    if is_unheard:
        with pytest.raises(Unreachable):
            asyncio.run(getattr(operations, method)(request))
    return asyncio.run(getattr(operations, method)(request))


def test_a_subscription_that_a_call_made_at_its_first_try_is_made() -> None:
    store = UnheardStore(World())
    request = pb.CreateSubscriptionRequest(queue="orders", subscription="s", cause_id="x" * 1_000_000)
    made = operated(store, "create_subscription", request, is_unheard=True)
    assert (made.subscription, made.subscription_id, store.version) == ("s", 1, 2)
    assert len(store.document.subscriptions[0].cause_id) <= 128
    assert chain_json.decode(chain_json.encode(store.document)) == store.document
    for another in ("create-2", ""):
        request.cause_id = another
        with pytest.raises(SubscriptionExists):
            operated(store, "create_subscription", request)


def test_a_seek_that_was_done_at_its_first_try_is_not_done_again() -> None:
    """A reader has gone on from there meanwhile, and would be put back."""
    store = UnheardStore(World())
    operated(store, "create_subscription", pb.CreateSubscriptionRequest(queue="orders", subscription="s"))
    request = pb.SeekSubscriptionRequest(queue="orders", subscription="s", to="earliest", cause_id="seek-1")
    assert operated(store, "seek_subscription", request, is_unheard=True).generation == 2
    request.cause_id = "seek-2"
    assert operated(store, "seek_subscription", request).generation == 3
    request.cause_id = ""
    assert operated(store, "seek_subscription", request).generation == 4
    assert operated(store, "seek_subscription", request).generation == 5


def test_who_names_ids_seeks_in_no_other_queue_and_subscription_of_these_names() -> None:
    """A reader that wasn't told yet that its own was deleted moved those who read what has the name now (H16)."""
    store = UnheardStore(World())
    made = pb.CreateSubscriptionRequest(queue="orders", subscription="s")
    operated(store, "create_subscription", made)
    ids = {"queue_id": store.document.queue_id, "subscription_id": 1}
    request = pb.SeekSubscriptionRequest(queue="orders", subscription="s", to="earliest", **ids)
    assert operated(store, "seek_subscription", request).generation == 2
    operated(store, "delete_subscription", pb.SubscriptionRequest(queue="orders", subscription="s"))
    operated(store, "create_subscription", made)
    before = store.document
    with pytest.raises(UnknownSubscription, match="made again"):
        operated(store, "seek_subscription", request)
    assert store.document == before
    operated(store, "delete_queue", pb.QueueRequest(queue="orders"))
    with pytest.raises(UnknownQueue, match="was deleted"):
        operated(store, "seek_subscription", request)


def test_a_subscription_that_a_call_deleted_at_its_first_try_is_deleted_and_no_other_of_its_name() -> None:
    store = UnheardStore(World())
    with_id = pb.SubscriptionRequest(queue="orders", subscription="s", subscription_id=1)
    by_name = pb.SubscriptionRequest(queue="orders", subscription="s")
    operated(store, "create_subscription", pb.CreateSubscriptionRequest(queue="orders", subscription="s"))
    operated(store, "delete_subscription", with_id, is_unheard=True)
    assert store.document.subscriptions == ()
    with pytest.raises(UnknownSubscription):
        operated(store, "delete_subscription", by_name)
    operated(store, "create_subscription", pb.CreateSubscriptionRequest(queue="orders", subscription="s"))
    operated(store, "delete_subscription", with_id)
    assert [one.subscription_id for one in store.document.subscriptions] == [2]
    operated(store, "delete_subscription", by_name)
    assert store.document.subscriptions == ()


def test_a_queue_that_a_call_deleted_at_its_first_try_is_deleted() -> None:
    store = UnheardStore(World())
    queue_id = store.document.queue_id
    operated(store, "delete_queue", pb.QueueRequest(queue="orders", queue_id=queue_id), is_unheard=True)
    assert store.document.is_deleted
    assert store.freed == [("orders", queue_id)]
    with pytest.raises(UnknownQueue):
        operated(store, "delete_queue", pb.QueueRequest(queue="orders"))


@pytest.mark.parametrize("name", ["", "/", "orders/"])
def test_who_names_an_id_and_no_queue_s_name_deletes_nothing(name: str) -> None:
    """The queue was deleted; then what isn't a name couldn't be freed, and a defect was told."""
    store = UnheardStore(World())
    with pytest.raises(InvalidArgument):
        operated(store, "delete_queue", pb.QueueRequest(queue=name, queue_id=store.document.queue_id))
    assert not store.document.is_deleted


# ---- a switch goes first


class Listened:
    """What a coordinator knows of the one chain, and tells whoever listens."""

    cluster = "c"

    def __init__(self, document: ChainDocument) -> None:
        self.chains = {document.queue_id: SeenChain(document, ChainVersion(1), since_ms=0)}
        self.listeners: list[Any] = []

    def on_change(self, listener: Any) -> Any:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def now_is(self, document: ChainDocument) -> None:
        self.chains[document.queue_id] = SeenChain(document, ChainVersion(2), since_ms=0)
        for listener in list(self.listeners):
            listener()


class Changes:
    """Counts what is to be written."""

    def __init__(self) -> None:
        self.count = 0

    async def change(self, *_: Any, **__: Any) -> None:
        self.count += 1


DRAINED = pb.DrainedReport(cluster="c", queue_id=1, subscription_id=1, generation=1, epoch=1)
STALE = pb.StaleCursorsNote(cluster="c", queue_id=1, epoch=1, member="a", is_stale=True)


def served(document: ChainDocument) -> tuple[Listened, Changes, CoordinatorService]:
    """A service that knows this chain, what tells it of changes, and what it writes."""
    store, changes, nothing = Listened(document), Changes(), cast("Any", None)
    execution = Execution(cast("Store", store), nothing, 1.0, lambda: True)
    service = CoordinatorService(cast("Store", store), nothing, execution, nothing, cast("Any", changes))
    return store, changes, service


async def reported(service: CoordinatorService, report: Any) -> None:
    method = service.ReportDrained if report is DRAINED else service.NoteStaleCursors
    await method(report, cast("Any", None))


def in_a_switch() -> tuple[ChainDocument, ChainDocument]:
    """A chain whose only link is being sealed, and the same behind it."""
    world = World()
    send_call(world).finish()
    is_open = world.document
    return chain.closing(is_open, Epoch(1)), is_open


def test_that_a_member_does_not_seal_a_lost_link_is_not_told_each_second(caplog: pytest.LogCaptureFixture) -> None:
    """Until an operator gives it up, maybe for days: 150 links of a group of which one member was gone made 110 lines a second."""
    world = World()
    send_call(world).finish()
    link = world.document.links[0]

    class Gone:
        async def seal(self, effect: SendSeal, *_: object) -> None:
            raise Unreachable(f"{effect.side.name} is not registered")

    async def tried(queue_id: int) -> None:
        run = execution._Run(*cast("Any", (None, Gone(), queue_id, "cause")))
        assert isinstance(await run._sealed(SendSeal(link.slave, link, world.version)), SealFailed)

    caplog.set_level("INFO")
    for queue_id in (7, 8, 7, 8):
        asyncio.run(tried(queue_id))
    told = [one.getMessage() for one in caplog.records if "link not sealed" in one.getMessage()]
    assert len(told) == 2
    assert "queue_id=8 epoch=1 member=g1-b code=unreachable" in told[1]


@pytest.mark.parametrize("report", [DRAINED, STALE])
def test_what_a_member_reports_in_a_switch_is_written_behind_it(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "GIVE_WAY_S", 600.0)
    switching, settled = in_a_switch()

    async def main() -> None:
        store, changes, service = served(switching)
        task = asyncio.ensure_future(reported(service, report))
        for document in (switching, switching):
            store.now_is(document)
            await asyncio.sleep(0.01)
        assert changes.count == 0
        store.now_is(settled)
        await asyncio.wait_for(task, 60)
        assert changes.count == 1
        assert not store.listeners

    asyncio.run(main())


def test_a_switch_that_comes_to_no_end_holds_up_the_first_report_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "GIVE_WAY_S", 0.01)
    switching, _ = in_a_switch()

    async def main() -> None:
        store, changes, service = served(switching)
        await asyncio.wait_for(reported(service, STALE), 60)
        assert changes.count == 1
        monkeypatch.setattr(execution, "GIVE_WAY_S", 600.0)
        await asyncio.wait_for(reported(service, DRAINED), 60)
        assert changes.count == 2
        assert not store.listeners

    asyncio.run(main())


def test_another_switch_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "GIVE_WAY_S", 0.01)
    switching, settled = in_a_switch()

    async def main() -> None:
        store, changes, service = served(switching)
        await reported(service, STALE)
        store.now_is(replace(switching, links=(replace(switching.links[0], epoch=Epoch(2)),)))
        monkeypatch.setattr(execution, "GIVE_WAY_S", 600.0)
        task = asyncio.ensure_future(reported(service, DRAINED))
        await asyncio.sleep(0.01)
        assert changes.count == 1
        store.now_is(settled)
        await asyncio.wait_for(task, 60)
        assert changes.count == 2

    asyncio.run(main())


def test_what_keeps_a_coordinator_from_following_zookeeper_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[SeriatimError | None] = [Unreachable("away")] * 3 + [None, Unreachable("away"), NotAllowed("no right")]

    async def refresh(self: Store) -> None:
        if not looks:
            raise asyncio.CancelledError
        look = looks.pop(0)
        self.changed(remembered.Listing.GROUPS)
        if look is not None:
            raise look

    monkeypatch.setattr(remembered, "_RETRY_S", 0)
    monkeypatch.setattr(Store, "_refresh", refresh)
    watched = Store(cast("ZooKeeperSession", SimpleNamespace(on_state=lambda _: None)), "c")
    watched.changed(remembered.Listing.GROUPS)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watched.run())
    assert [record.getMessage().count("away") for record in caplog.records] == [1, 1, 0]
