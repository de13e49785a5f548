"""What the elected coordinator does unasked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from seriatim.coordinator import background as background_shell
from seriatim.coordinator.background import BackgroundWork
from seriatim.coordinator.core import background, chain, draining, retention, rotation, seal, status, subscriptions
from seriatim.coordinator.core.background import (
    Change,
    ClearQueue,
    CloseIt,
    FreeName,
    SeenChain,
    SweepQueue,
    TellDrop,
    TellEnd,
    Told,
    View,
    end_key,
)
from seriatim.coordinator.core.chain_point import filled, point_before
from seriatim.coordinator.core.events import Wait
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.protocol import chain_json
from seriatim.protocol.chain import ChainDocument, LinkState, QueueSettings, StaleCursors
from seriatim.protocol.names import TOKEN_MAX, ChainVersion, Epoch, Incarnation, Index, QueueId, Token
from seriatim.protocol.position import Position
from seriatim.protocol.registration import Registration
from tests.property.chain_world import World, close_call, send_call, with_member, with_subscription

LATER_MS = 10_000


def sending_world() -> World:
    world = World()
    with_subscription(world)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    return world


def planned(world: World, *, now_ms: int = LATER_MS, told: Told | None = None, **view: object) -> tuple:
    seen = SeenChain(world.document, world.version, since_ms=0)
    fields = {
        "chains": (seen,),
        "registry": world.registry(),
        "names": {"orders": QueueId(1)},
        "told": told or Told(),
    } | view
    return background.plan(View(**fields), now_ms)


def kinds(actions: tuple) -> list[type]:
    return [type(action) for action in actions]


def test_that_clients_come_and_go_is_no_change_and_all_else_is():
    """Else no link would ever be let go, nor a group come back, where some client comes every second."""
    world = sending_world()
    position = subscriptions.located(world.document, "earliest", None)
    seen = SeenChain.after(None, world.document, world.version, 5)
    assert seen.since_ms == 5
    for number, after in enumerate(
        (
            chain.with_sender(world.document, "another"),
            subscriptions.with_reader(world.document, "s", "another"),
            subscriptions.sought(world.document, "s", position),
            subscriptions.created(world.document, "t", position, 0),
            subscriptions.deleted(world.document, "s"),
        ),
        start=6,
    ):
        assert SeenChain.after(seen, after, ChainVersion(9), number) == SeenChain(after, ChainVersion(9), since_ms=5)
    closing = chain.closing(world.document, Epoch(1))
    assert SeenChain.after(seen, closing, ChainVersion(9), 6) == SeenChain(closing, ChainVersion(9), since_ms=6)


def test_a_switch_may_lead_to_who_is_on_the_send_list_also_where_the_queue_was_given_others_since():
    world = sending_world()
    given = replace(world.document, settings=replace(world.document.settings, groups=("g2",)))
    assert "g1" in given.send_list
    assert draining.may_lead_to(given, world.registry(), "g1")
    assert not draining.may_lead_to(replace(given, send_list=("g2",)), world.registry(), "g1")


def without_peers(world: World, group: str) -> Registry:
    registry = world.registry()
    members = {place: replace(state, peer=None) for place, state in registry.groups[group].members.items()}
    return Registry({**registry.groups, group: GroupState(group, members=members)})


def test_nothing_is_done_where_all_is_well():
    assert planned(sending_world()) == ()


def test_h18_an_open_link_is_closed_when_a_member_is_gone_restarted_or_sealed():
    world = sending_world()
    sealed = frozenset({(QueueId(1), Epoch(1))})
    assert planned(world, sealed=sealed) == (CloseIt(QueueId(1), Epoch(1), "a member has sealed it"),)
    world.restart(("g1", "b"))
    assert kinds(planned(world)) == [CloseIt]
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))
    assert kinds(planned(world)) == [CloseIt]


def test_a_closing_link_is_left_for_a_moment_to_whoever_closes_it():
    world = sending_world()
    world.document = chain.closing(world.document, Epoch(1))
    assert planned(world, now_ms=100) == ()
    assert kinds(planned(world, now_ms=LATER_MS)) == [CloseIt]


def test_a_clock_that_is_set_back_holds_nothing_up():
    """By an hour, say: nobody finished what a dead coordinator had begun, and no group came back, for so long."""
    world = sending_world()
    document, hour_ms = world.document, 3_600_000
    world.document = chain.closing(document, Epoch(1))
    assert kinds(planned(world, now_ms=-hour_ms)) == [CloseIt]
    world.document = replace(document, send_list=("g1", "g2"))
    (change,) = planned(world, now_ms=-hour_ms)
    assert change.document.send_list == ("g1", "g2", "g3")


def test_groups_come_back_though_a_lost_link_s_member_is_there_and_cannot_tell_its_end():
    """Its disk was replaced, and the other member's is gone: until an operator gave the link up, no group ever came back, and sending waited."""
    world = sending_world()
    for place in ("a", "b"):
        world.kill(("g1", place))
        world.expire(("g1", place))
    close_call(world, 1).finish()
    world.document = chain.without_group(world.document, "g3")
    world.restart(("g1", "b"))
    closing, change = planned(world)
    there = (world.registry().groups["g1"].members["b"].incarnation,)
    assert closing == CloseIt(QueueId(1), Epoch(1), "it is lost, and a member of its group is there", there)
    assert change.document.send_list == ("g2", "g3")
    # Of one that is being sealed the end comes first.
    send_call(world, token=1).finish()
    world.document = chain.closing(world.document, Epoch(2))
    assert [one.epoch for one in planned(world)] == [Epoch(1), Epoch(2)]


def test_a_lost_link_is_sealed_when_a_member_returns():
    world = sending_world()
    for place in ("a", "b"):
        world.kill(("g1", place))
        world.expire(("g1", place))
    close_call(world, 1).finish()
    assert world.document.links[0].state is LinkState.LOST
    assert planned(world) == ()
    world.restart(("g1", "b"))
    assert CloseIt in kinds(planned(world))
    close_call(world, 1).finish()
    assert world.document.links[0].end == 1


def test_a_lost_link_is_tried_again_rarely_and_at_once_when_somebody_else_is_there(monkeypatch):
    """One in each of 150 queues took a quarter of a processor, until an operator gave them up."""

    class Undecided:
        async def run(self, *_: object) -> Wait:
            return Wait({"link 1": "its end can't be told"})

    store = SimpleNamespace(on_change=lambda _: None)
    work = BackgroundWork(*cast("Any", (store, None, Undecided(), None, lambda: True, None)))
    monkeypatch.setattr(background_shell, "boottime_s", lambda: 100.0)

    def tried(there: tuple[Incarnation, ...]) -> dict[object, float]:
        action = CloseIt(QueueId(1), Epoch(1), "why", there)
        asyncio.run(work._act(background_shell._way(action), action))
        return work._not_before_s

    alone, both = (Incarnation("blank", 1),), (Incarnation("blank", 1), Incarnation("disk", 2))
    assert list(tried(()).values()) == [101.0]  # of one that is being sealed sending waits
    assert list(tried(alone).values()) == [101.0, 105.0]
    assert len(tried(both)) == 3


def test_ends_are_told_until_each_incarnation_has_them():
    world = sending_world()
    close_call(world, 1).finish()
    link = world.document.links[0]
    told = [action for action in planned(world) if isinstance(action, TellEnd)]
    assert [str(action.member) for action in told] == ["g1-a", "g1-b"]
    has_it = Told(ends=frozenset(end_key(world.document, link, action.incarnation) for action in told))
    assert TellEnd not in kinds(planned(world, told=has_it))
    world.restart(("g1", "a"), is_blank=True)
    again = [action for action in planned(world, told=has_it) if isinstance(action, TellEnd)]
    assert [str(action.member) for action in again] == ["g1-a"]
    world.kill(("g1", "a"))
    world.expire(("g1", "a"))
    assert TellEnd not in kinds(planned(world, told=has_it))


def test_ends_that_a_write_recorded_are_told_in_the_place_of_an_elected_coordinator_that_stands_still():
    """A member that was cut off from ZooKeeper was told by nobody, and its readers waited (campaign)."""
    world = sending_world()
    before = world.document
    close_call(world, 1).finish()
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))

    def told(before: ChainDocument) -> list[tuple[str, int]]:
        ends = background.ends_written(before, world.document, world.version, world.registry())
        return [(str(end.member), end.link.epoch) for end in ends]

    assert told(before) == [("g1-a", 1)]
    assert told(world.document) == [], "by an earlier write"


def test_an_end_that_was_given_up_is_told_again():
    world = sending_world()
    close_call(world, 1).finish()
    has_it = first_end_told(world)
    link = world.document.links[0]
    certificate = seal.given_up(link, point_before(world.document, link.epoch), [], now_ms=5)
    world.document = chain.abandoned(world.document, link.epoch, certificate, "all of it", 5)
    told = [action for action in planned(world, told=has_it) if isinstance(action, TellEnd)]
    assert [str(action.member) for action in told] == ["g1-a", "g1-b"]


def first_end_told(world: World) -> Told:
    """Both members of g1 have said that they hold the first link to its end."""
    members = (world.members["g1", place].incarnation for place in ("a", "b"))
    return Told(ends=frozenset(end_key(world.document, world.document.links[0], one) for one in members))


def test_invariant_6_a_group_comes_back_only_when_all_of_it_holds():
    world = sending_world()
    close_call(world, 1).finish()
    everything_told = first_end_told(world)
    assert planned(world, told=everything_told) == ()
    assert status.waits(world.document, world.registry()) == {"g1": "it holds unread records of s"}
    world.document = subscriptions.deleted(world.document, "s")
    (change,) = planned(world, told=everything_told)
    assert isinstance(change, Change)
    assert change.document.send_list == ("g2", "g3", "g1")
    assert planned(world, told=everything_told, registry=without_peers(world, "g1")) == ()
    for place in ("a", "b"):
        behind = with_member(world.registry(), "g1", place, is_in_sync=False)
        assert planned(world, told=everything_told, registry=behind) == ()
        assert status.waits(world.document, behind) == {"g1": f"g1-{place} has not caught up yet"}
        unread = with_member(world.registry(), "g1", place, unread=(QueueId(1),))
        assert planned(world, told=everything_told, registry=unread) == ()
        of_another = with_member(world.registry(), "g1", place, unread=(QueueId(2),))
        assert planned(world, told=everything_told, registry=of_another) == (change,)
        lacking = with_member(world.registry(), "g1", place, is_in_sync=False, lacking=(QueueId(1),))
        assert planned(world, told=everything_told, registry=lacking) == ()
        of_another = with_member(world.registry(), "g1", place, is_in_sync=False, lacking=(QueueId(2),))
        assert planned(world, told=everything_told, registry=of_another) == (change,)
    assert planned(world, told=everything_told, now_ms=background.QUIET_MS - 1) == ()


def test_a_group_that_sending_waits_for_comes_back_at_once():
    """And not a second after the last subscription had said that it has read all, each of which is a written chain."""
    world = sending_world()
    world.document = subscriptions.deleted(world.document, "s")
    close_call(world, 1).finish()
    told = first_end_told(world)
    assert planned(world, told=told, now_ms=0) == ()  # two groups are left
    world.document = replace(world.document, send_list=())
    (change,) = planned(world, told=told, now_ms=0)
    assert change.document.send_list == ("g1", "g2", "g3")
    assert kinds(planned(world, now_ms=0)) == [Change, TellEnd, TellEnd]
    assert planned(world, now_ms=0)[0].document.send_list == ("g2", "g3")  # of g1 nobody knows that it has its link
    send_call(world).finish()  # whoever serves is the only one, and sending doesn't wait
    world.document = replace(world.document, send_list=(chain.serving(world.document),))
    assert planned(world, told=told, now_ms=0) == ()
    assert kinds(planned(world, told=told)) == [Change]


def test_only_groups_that_may_serve_a_queue_come_to_its_send_list_in_the_order_given():
    world = sending_world()
    world.document = replace(world.document, send_list=("g1",))
    for groups, added in (((), ("g2", "g3")), (("g1", "g3"), ("g3",)), (("g3", "g2", "g1"), ("g3", "g2"))):
        settings = replace(world.document.settings, groups=groups)
        (change,) = background.plan(
            View(
                (SeenChain(replace(world.document, settings=settings), world.version, since_ms=0),),
                world.registry(),
                {"orders": QueueId(1)},
                Told(),
            ),
            LATER_MS,
        )
        assert change.document.send_list == ("g1", *added)


def test_invariant_6_what_a_member_said_before_the_end_was_recorded_does_not_count():
    world = sending_world()
    close_call(world, 1).finish()
    world.document = subscriptions.deleted(world.document, "s")
    assert kinds(planned(world)) == [TellEnd, TellEnd]


def test_a_draining_group_leaves_every_send_list_and_its_link_is_closed():
    world = sending_world()
    groups = world.registry().groups
    one = Registry({**groups, "g3": replace(groups["g3"], is_draining=True)})
    (change,) = planned(world, registry=one)
    assert change.document.send_list == ("g1", "g2")
    head = Registry({**groups, "g1": replace(groups["g1"], is_draining=True)})
    assert kinds(planned(world, registry=head)) == [CloseIt]


def test_a_draining_group_serves_on_while_no_other_can_take_over():
    """Its link was closed all the same, and sending stood still until another group was there."""
    world = sending_world()
    groups = world.registry().groups
    alone = {"g1": replace(groups["g1"], is_draining=True), "g2": GroupState("g2"), "g3": GroupState("g3")}
    assert planned(world, registry=Registry(alone)) == ()
    members = {place: replace(state, peer=None) for place, state in groups["g3"].members.items()}
    assert planned(world, registry=Registry({**alone, "g3": replace(groups["g3"], members=members)})) == ()
    assert kinds(planned(world, registry=Registry({**alone, "g3": groups["g3"]}))) == [CloseIt]
    draining = {**alone, "g2": replace(groups["g2"], is_draining=True)}
    assert CloseIt not in kinds(planned(world, registry=Registry(draining)))
    # One that is on no list, and can come back at once, is there as well.
    world.document = replace(world.document, send_list=("g1",))
    coming = {"g1": alone["g1"], "g2": GroupState("g2"), "g3": groups["g3"]}
    assert CloseIt in kinds(planned(world, registry=Registry(coming)))


def sealed_links(count: int) -> World:
    world = World()
    send_call(world).finish()
    for epoch in range(1, count + 1):
        world.append(Epoch(epoch), 2)
        send_call(world, token=1, failed_epoch=epoch).finish()
    return world


def test_retention_lets_go_what_is_old_read_and_known_and_keeps_what_builds_on_it():
    world = sealed_links(2)
    document = world.document
    day_ms = document.settings.retention_ms
    assert retention.due(document, day_ms - 1) == ()
    assert retention.due(document, day_ms + 1) == (1, 2)
    left = retention.without(document, (Epoch(1),))
    assert (left.dropped.epoch, left.dropped.offset) == (2, 1)
    assert left.dropped.chain_hash == document.links[0].certificate.chain_hash
    assert filled(left) == left
    for number, link in enumerate(document.links[:2], 2):
        assert point_before(document, Epoch(number)).chain_hash == link.certificate.chain_hash
    assert subscriptions.located(left, "earliest", None).epoch == 2
    alone = replace(document, links=document.links[:2])  # nobody sends any more
    gone = retention.without(alone, (Epoch(1), Epoch(2)))
    assert (gone.links, gone.dropped.epoch, gone.dropped.offset) == ((), document.next_epoch, 2)


def test_a_clock_that_was_ahead_for_a_while_keeps_no_link_for_so_long():
    """By a year, say: nothing of the queue went before that was over, and disks were full, with no way out."""
    document = sealed_links(3).document
    day_ms, year_ms = document.settings.retention_ms, 365 * 86_400_000
    first, *others = document.links
    ahead = replace(first, certificate=replace(first.certificate, sealed_at_ms=year_ms))
    assert retention.due(replace(document, links=(ahead, *others)), day_ms + 1) == (1, 2, 3)
    assert retention.due(replace(document, links=(ahead, *others)), day_ms - 1) == ()
    open_one = others[-1]
    assert open_one.state is LinkState.OPEN
    alone = replace(document, links=(ahead, open_one))
    assert retention.due(alone, day_ms + 1) == ()
    assert rotation.is_due(
        replace(document, links=(replace(open_one, created_at_ms=year_ms),)), sending_world().registry(), 1
    )


def test_retention_is_done_unasked_where_nothing_else_is_to_be_written():
    world = sealed_links(1)
    changes = [
        one for one in planned(world, now_ms=world.document.settings.retention_ms + 1) if isinstance(one, Change)
    ]
    assert [[link.epoch for link in one.document.links] for one in changes] == [[2]]


def test_old_links_go_also_while_one_is_being_closed():
    """Where its end found no room in the chain, the chain never got shorter, and sending waited for ever, also once all was read."""
    world = sealed_links(3)
    last = world.document.last_link
    world.document = chain.closing(chain.without_group(world.document, "g3"), last.epoch)
    late_ms = world.document.settings.retention_ms + 1
    assert [type(one) for one in planned(world, now_ms=background.QUIET_MS - 1) if not isinstance(one, TellEnd)] == [
        CloseIt
    ]
    closing, change = (one for one in planned(world, now_ms=late_ms) if not isinstance(one, TellEnd))
    assert closing == CloseIt(QueueId(1), last.epoch, "nobody finished closing it")
    assert change.what == "links 1 to 3 are kept no longer"
    assert change.document == retention.without(world.document, (Epoch(1), Epoch(2), Epoch(3)))
    # Nor before the chain was left alone for a moment: who began to close it may be about to write.
    seen = SeenChain(world.document, world.version, since_ms=late_ms - background.QUIET_MS + 1)
    assert Change not in kinds(planned(world, now_ms=late_ms, chains=(seen,)))


def test_h7_a_note_of_stale_cursors_goes_with_its_link_and_no_other():
    world = sealed_links(2)
    notes = tuple(StaleCursors(Epoch(epoch), "a", ()) for epoch in (1, 2))
    document = replace(world.document, stale_cursors=notes)
    assert retention.without(document, (Epoch(1),)).stale_cursors == notes[1:]


def test_a_chain_of_few_links_with_many_sources_is_too_long_for_a_node_all_the_same():
    document = sealed_links(2).document
    assert retention.due(document, 0) == ()
    marks = {f"source {number}": number for number in range(retention.MAX_CHAIN_BYTES // 3 // 50)}
    first, *others = document.links
    many = replace(first, certificate=replace(first.certificate, marks=marks, marks_on_two=marks), marks_on_two=marks)
    assert retention.due(replace(document, links=(many, *others)), 0) == (1,)
    assert retention.due(replace(document, links=(replace(many, marks_on_two={}), *others)), 0) == ()
    lost = replace(many, state=LinkState.LOST, certificate=None, marks_on_two=dict.fromkeys(range(3 * len(marks)), 0))
    assert retention.due(replace(document, links=(lost, *others)), 0) == ()  # however long


def test_an_empty_link_is_kept_for_a_minute_and_no_longer_than_any_other():
    world = World()
    send_call(world).finish()
    send_call(world, token=1, failed_epoch=1).finish()
    document = world.document
    assert document.links[0].end == 0
    assert retention.due(document, retention.EMPTY_KEPT_MS - 1) == ()
    assert retention.due(document, retention.EMPTY_KEPT_MS + 1) == (1,)
    soon = replace(document, settings=replace(document.settings, retention_ms=1000))
    assert retention.due(soon, 1001) == (1,)


def test_a_chain_that_gets_too_long_lets_go_of_its_first_links_early_and_of_no_more_than_it_has_to(monkeypatch):
    world = sealed_links(4)
    document = world.document
    sizes = [retention._size_bytes(link) for link in document.links]
    assert sum(sizes) / 2 < len(chain_json.encode(document)) < sum(sizes) * 1.5
    for kept, expected in ((5, ()), (4, (1,)), (3, (1, 2)), (1, (1, 2, 3, 4))):
        monkeypatch.setattr(retention, "MAX_CHAIN_BYTES", sum(sizes[5 - kept :]))
        assert retention.due(document, 0) == expected
    # What is still to be read holds it, however long it gets.
    with_subscription(world)
    reader = replace(world.document.subscriptions[0], consume_list=(Epoch(3), Epoch(4), Epoch(5)))
    assert retention.due(replace(world.document, subscriptions=(reader,)), 0) == (1, 2)


def test_retention_never_takes_a_link_that_a_consume_list_names():
    world = sending_world()
    send_call(world, token=1, failed_epoch=1).finish()
    assert retention.due(world.document, 10 * world.document.settings.retention_ms) == ()


def test_members_are_told_what_is_no_longer_kept():
    world = sealed_links(1)
    world.document = retention.without(world.document, (Epoch(1),))
    told = [action for action in planned(world) if isinstance(action, TellDrop)]
    assert {str(action.member) for action in told} == {f"g{n}-{place}" for n in (1, 2, 3) for place in "ab"}
    assert {action.below for action in told} == {2}


def test_h16_a_deleted_queue_is_let_go_by_the_members_before_its_nodes_go():
    world = sending_world()
    world.document = chain.deleted(world.document)
    actions = planned(world, names={})
    assert set(kinds(actions)) == {TellDrop}
    drops = frozenset((QueueId(1), Epoch(0), action.incarnation) for action in actions)
    assert planned(world, names={}, told=Told(drops=drops)) == (ClearQueue(QueueId(1), "orders"),)


def test_a_deleted_queue_stays_until_a_member_that_is_away_has_let_it_go_too():
    world = sending_world()
    world.document = chain.deleted(world.document)
    world.kill(("g2", "a"))
    world.expire(("g2", "a"))
    drops = frozenset((QueueId(1), Epoch(0), action.incarnation) for action in planned(world, names={}))
    assert len(drops) == 5
    assert planned(world, names={}, told=Told(drops=drops)) == ()
    world.restart(("g2", "a"))
    (told,) = planned(world, names={}, told=Told(drops=drops))
    assert (type(told), str(told.member)) == (TellDrop, "g2-a")


def test_a_deleted_queue_s_name_is_freed_where_who_deleted_it_died_before_also_while_a_member_is_away():
    world = sending_world()
    world.document = chain.deleted(world.document)
    world.kill(("g2", "a"))
    world.expire(("g2", "a"))
    drops = frozenset((QueueId(1), Epoch(0), action.incarnation) for action in planned(world, names={}))
    for names, due in (({"orders": QueueId(1)}, (FreeName(QueueId(1), "orders"),)), ({"orders": QueueId(2)}, ())):
        assert planned(world, names=names, told=Told(drops=drops)) == due


def test_a_deleted_queue_s_name_is_left_to_who_deletes_it_at_first():
    """Freed a second time, a little late, it was freed of the queue that had been made under it meanwhile."""
    world = World()
    world.document = chain.deleted(world.document)
    drops = frozenset((QueueId(1), Epoch(0), action.incarnation) for action in planned(world, names={}))
    for names in ({"orders": QueueId(1)}, {}):
        assert planned(world, names=names, told=Told(drops=drops), now_ms=500) == ()


def test_a_queue_whose_making_was_cut_off_is_cleared_away():
    world = World()
    seen = (SeenChain(world.document, ChainVersion(0), since_ms=0),)
    assert planned(world, chains=seen, names={}, now_ms=1000) == ()
    for names in ({}, {"orders": QueueId(2)}):
        (marked,) = planned(world, chains=seen, names=names, now_ms=100_000)
        # By compare-and-set, so that it stays where somebody has begun to use it.
        assert marked == Change(chain.deleted(world.document), ChainVersion(0), "deleted: its making was cut off")
    assert planned(world, chains=seen, now_ms=100_000) == ()
    # It is just being made, by a coordinator whose clock is behind, or is first seen by one whose clock is.
    just_seen = (replace(seen[0], since_ms=99_000),)
    just_made = (replace(seen[0], document=replace(world.document, created_at_ms=99_000)),)
    assert planned(world, chains=just_seen, names={}, now_ms=100_000) == ()
    assert planned(world, chains=just_made, names={}, now_ms=100_000) == ()


def test_a_queue_whose_making_was_cut_off_goes_though_a_group_was_drained_meanwhile():
    """Nobody could have deleted it: it has no name."""
    world = World()
    world.document = chain.without_group(world.document, "g1")
    seen = (SeenChain(world.document, ChainVersion(1), 0),)
    (marked,) = planned(world, chains=seen, names={"orders": QueueId(2)}, now_ms=100_000)
    assert marked == Change(chain.deleted(world.document), ChainVersion(1), "deleted: its making was cut off")
    with_subscription(world)
    seen = (SeenChain(world.document, ChainVersion(2), 0),)
    assert chain.deleted(world.document) not in [
        one.document for one in planned(world, chains=seen, names={}, now_ms=100_000)
    ]


def test_nodes_of_a_queue_that_has_no_chain_after_a_while_are_swept_away():
    bare = {QueueId(7): 1_000_000}
    assert planned(World(), bare=bare, now_ms=1_001_000) == ()
    assert planned(World(), bare=bare, now_ms=1_100_000) == (SweepQueue(QueueId(7)),)


def test_a_queue_that_was_used_is_not_deleted_because_its_name_isnt_seen():
    assert planned(sending_world(), names={}, now_ms=100_000) == ()
    unread = World()
    send_call(unread).finish()
    assert planned(unread, names={}, now_ms=100_000) == ()


def test_status_says_what_waits_and_how_many_switches_are_left():
    world = sending_world()
    assert status.switches_left(world.document, world.registry()) == 2
    assert status.waits(world.document, world.registry()) == {}
    master = world.document.links[0].master
    assert [one.is_present(master) for one in (world.registry(), Registry())] == [True, False]
    world.kill(("g2", "a"))
    world.expire(("g2", "a"))
    assert status.switches_left(world.document, world.registry()) == 1
    assert status.waits(world.document, world.registry()) == {"g2": "g2-a not registered"}
    alone = World(groups=("g1",))
    assert "one group only" in status.waits(alone.document, alone.registry())["queue"]


def test_status_says_before_a_queue_has_had_all_the_senders_that_it_can_tell_apart():
    world = sending_world()
    few = status.FEW_TOKENS
    for token, said in (
        (TOKEN_MAX - few, ""),
        (TOKEN_MAX - few + 1, f"{few - 1:,} more"),
        (TOKEN_MAX, "0 more"),
        (TOKEN_MAX + 9, "0 more"),
    ):
        waits = status.waits(replace(world.document, sender_token=Token(token)), world.registry())
        assert waits.get("senders", "")[: len(said)] == said
        assert bool(waits) == bool(said)


def test_a_group_whose_members_don_t_reach_each_other_is_no_switch_that_is_left():
    """Registered under an address of inside, say: a switch was said to be left, nothing to be wrong, and the next failure had sending wait."""
    world = sending_world()
    registry = without_peers(world, "g2")
    assert status.switches_left(world.document, registry) == 1
    assert status.waits(world.document, registry) == {"g2": "g2-a is not connected to g2-b at g2-b:1"}
    assert status.switches_left(world.document, without_peers(world, "g1")) == 2


def test_a_group_that_is_drained_or_may_come_at_once_is_told_apart() -> None:
    world = sending_world()
    groups = world.registry().groups
    drained = Registry({**groups, "g2": replace(groups["g2"], is_draining=True)})
    assert status.switches_left(world.document, drained) == 1
    assert chain.next_group(world.document, drained) == "g3"
    # Off the list, with nothing in its way: it waits for nobody.
    assert status.waits(replace(world.document, send_list=("g1", "g2")), world.registry()) == {}


def test_status_says_which_link_stops_readers_or_is_being_closed() -> None:
    world = sending_world()
    closing = chain.closing(world.document, Epoch(1))
    assert status.waits(closing, world.registry()) == {"link 1": "being closed on g1"}
    lost = status.waits(chain.lost(closing, Epoch(1)), world.registry())
    assert lost["link 1"].startswith("lost on g1: readers stop there")


def test_a_group_that_serves_and_can_take_no_other_link_is_no_switch_that_is_left() -> None:
    world = sending_world()
    world.kill(("g1", "a"))
    world.expire(("g1", "a"))
    assert status.switches_left(world.document, world.registry()) == 2


def test_a_member_without_room_takes_no_new_link_h17():
    full = Registration(World().members["g1", "a"].incarnation, "x:1", is_accepting=False, problem="disk full")
    world = World()
    groups = world.registry().groups
    registry = Registry({**groups, "g1": GroupState("g1", members={**groups["g1"].members, "a": full})})
    listed = chain.next_link(world.document, registry, avoid={}, now_ms=0)
    assert (listed.last_link.group, listed.send_list) == ("g2", ("g2", "g3"))


def test_the_tail_of_a_sealed_link_can_be_given_up_without_moving_any_offset():
    world = sealed_links(1)
    document: ChainDocument = world.document
    link = document.links[0]
    certificate = seal.given_up(link, point_before(document, link.epoch), [], now_ms=5)
    given_up = chain.abandoned(document, link.epoch, certificate, "one record", 5)
    assert (given_up.links[0].end, given_up.links[1].base) == (0, 1)
    later = point_before(given_up, Epoch(2))
    assert later.chain_hash == given_up.links[0].certificate.chain_hash != link.certificate.chain_hash


def test_what_was_given_up_is_no_record_of_later_links_that_only_began_behind_it():
    """Its disks were lost one after the other, behind a link that has nothing of its source: what was sent again counted as there."""
    world = sealed_links(1)

    def sealed(document: ChainDocument, *positions: Position) -> ChainDocument:
        link = document.last_link
        answers = {
            side.name.member: seal.SealAnswer(seal.Wholeness.WHOLE, side.incarnation, positions)
            for side in (link.master, link.slave)
        }
        certificate = seal.decide(link, point_before(document, link.epoch), answers, now_ms=2)
        return chain.sealed(chain.closing(document, link.epoch), link.epoch, certificate)

    def listed(document: ChainDocument) -> ChainDocument:
        document = chain.next_link(document, world.registry(), avoid={}, now_ms=1)
        return chain.opened(document, document.last_link.epoch)

    def position(index: int, **marks: int) -> Position:
        return Position(Index(index), bytes([index]) * 32, marks)

    document = listed(chain.created(cluster="c", queue_id=QueueId(1), name="q", settings=QueueSettings(), groups=("g1", "g2", "g3"), now_ms=1))  # fmt: skip
    document = sealed(document, position(4, s=104), position(5, s=105))
    document = sealed(listed(document), position(3, t=7))
    link = document.links[0]
    left = seal.SealAnswer(seal.Wholeness.WHOLE, link.slave.incarnation, (position(4, s=104),))
    certificate = seal.given_up(link, point_before(document, Epoch(1)), [left], now_ms=3)
    document = chain.abandoned(document, Epoch(1), certificate, "one", 4)
    point = point_before(document, Epoch(3))
    assert (point.marks, point.marks_on_two) == ({"s": 104, "t": 7},) * 2
    assert listed(document).last_link.marks_on_two == {"s": 104, "t": 7}


# ---- ZooKeeper was set back


def set_back(registry: Registry, *, is_said: bool = True, **changes) -> Registry:
    """g2-a has said of the queue that its chain is older than its disk, or hasn't looked yet."""
    said = (QueueId(1),) if is_said else ()
    return replace(with_member(registry, "g2", set_back=said, problem="older", has_compared=is_said), **changes)


def test_nothing_is_done_by_a_chain_that_is_older_than_a_disk():
    world = sending_world()
    world.kill(("g1", "a"))
    world.expire(("g1", "a"))
    registry = set_back(world.registry())
    assert planned(world) != ()
    assert planned(world, registry=registry) == ()
    assert status.waits(world.document, registry)["g2-a"] == "older"
    assert registry.standstill(QueueId(2)) == {}


def test_a_deleted_queue_goes_also_where_a_disk_has_another_one_s_records_under_its_id():
    """Else that one couldn't be recovered: its id was taken for good."""
    world = sending_world()
    world.document = chain.deleted(world.document)
    registry = set_back(world.registry())
    told = [action.document for action in planned(world, registry=registry, names={})]
    assert told == [world.document] * 6
    assert planned(world, registry=set_back(registry, is_said=False, is_new=True), names={}) == ()


def test_who_has_just_come_to_zookeeper_waits_for_the_members_it_knows():
    registry = sending_world().registry()
    assert replace(registry, is_new=True).standstill(QueueId(1)) == {}
    uncompared = set_back(registry, is_said=False)
    assert uncompared.standstill(QueueId(1)) == {}
    assert "waits for g2-a" in replace(uncompared, is_new=True).standstill(QueueId(1))["coordinator"]
    absent = registry.groups | {"g2": GroupState("g2")}
    assert "waits for g2-a, g2-b" in Registry(absent, is_new=True).standstill(QueueId(1))["coordinator"]
