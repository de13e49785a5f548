"""A chain made again from the copies that members keep."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from seriatim.broker_group.core import setback
from seriatim.broker_group.core.setback import KeptChain, SeenChain
from seriatim.coordinator.core import chain, recovery, seal, subscriptions
from seriatim.coordinator.core.chain_point import point_before
from seriatim.coordinator.core.recovery import BEYOND, Copy
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.coordinator.recovery import Recovery, _what_is_recovered
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, ChainMember, LinkState
from seriatim.protocol.errors import ChainSetBack, QueueExists, UnknownQueue, Unreachable, Waiting
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Incarnation, MemberName, QueueId
from tests.property.chain_world import World, close_call, send_call, with_subscription


def a_copy(world: World, holder: str = "g1-a", **changes) -> Copy:
    return Copy(replace(world.document, **changes), world.version, holder)


@pytest.fixture
def world() -> World:
    """A queue with a subscription and the open link 1."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    return world


def test_the_newest_copy_is_the_one_with_the_last_link_whoever_changed_an_older_chain_since(world):
    older = replace(a_copy(world), version=ChainVersion(99))
    close_call(world, 1).finish()
    send_call(world, token=1).finish()
    newest = a_copy(world, "g2-b")
    assert recovery.newest([older, newest, older], "orders") is newest
    assert recovery.newest([older], "orders") is older
    assert recovery.version([older, newest]) == 99 + BEYOND
    of_another = a_copy(world, queue_id=QueueId(7), next_epoch=Epoch(1))
    assert recovery.newest([of_another, newest], "orders") is of_another
    with pytest.raises(ChainSetBack, match="no member"):
        recovery.newest([], "orders")


def test_copies_of_a_chain_whose_links_were_let_go_since_are_of_one_history(world):
    close_call(world, 1).finish()
    before = a_copy(world)
    after = replace(a_copy(world, "g2-b", links=()), version=ChainVersion(world.version + 1))
    assert recovery.newest([after, before], "orders") is after
    assert recovery.recovered(after).links == ()


def test_a_link_that_was_given_up_unasked_had_been_let_send_to(world):
    """Both disks were gone; it was lost in an older copy, and a link that was closed unasked never is."""
    lost = chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1))
    certificate = seal.given_up(lost.links[0], point_before(lost, Epoch(1)), [], now_ms=9)
    given_up = chain.abandoned(lost, Epoch(1), certificate, "all of it", 9)
    older, newest = Copy(lost, ChainVersion(9), "g2-a"), Copy(given_up, ChainVersion(5), "g2-b")
    assert recovery.newest([newest, older], "orders") is newest


def test_two_histories_are_not_made_one(world):
    link = world.document.links[0]
    other = replace(link, master=ChainMember(link.master.name, Incarnation("elsewhere", 1)))
    another = a_copy(world, "g3-a", links=(other,))
    with pytest.raises(
        ChainSetBack, match="link 1 is on g1 in the chain of g1-a, and another one on g1 in that of g3-a"
    ):
        recovery.newest([a_copy(world), another], "orders")


def test_the_history_of_an_earlier_queue_of_that_name_is_another_one_s_h16(world):
    """It was deleted while a member was away that keeps a copy of its chain, and made again."""
    link = world.document.links[0]
    other = replace(link, master=ChainMember(link.master.name, Incarnation("elsewhere", 1)))
    again = a_copy(world, queue_id=QueueId(7), links=(other,))
    assert recovery.newest([a_copy(world, "g3-a"), again], "orders") is again


def test_a_recovered_chain_names_no_reader(world):
    """Where ZooKeeper lost all, election nodes are numbered anew: one of the same name is somebody else's."""
    newest = sought(world)
    named = replace(newest, document=subscriptions.with_reader(newest.document, "s", "node-1"))
    recovered = recovery.recovered(named)
    assert recovered.subscriptions[0].reader_node == ""
    (found,) = recovery.with_last_seeks(recovery.recovered(a_copy(world)), [named]).subscriptions
    assert (found.generation, found.reader_node) == (2, "")


def test_whoever_comes_next_gets_numbers_that_nobody_had(world):
    copy = a_copy(world)
    document = recovery.recovered(copy)
    before = world.document
    assert document.links == before.links
    assert (document.queue_id, document.created_at_ms) == (before.queue_id, before.created_at_ms)  # the same queue
    assert (document.sender_token, document.sender_node) == (before.sender_token + BEYOND, "")
    assert document.next_subscription_id == before.next_subscription_id + BEYOND
    assert document.subscriptions[0].reader_token == before.subscriptions[0].reader_token + BEYOND
    assert document.subscriptions[0].consume_list == before.subscriptions[0].consume_list


def test_a_link_that_is_opening_in_the_copy_may_have_been_granted_since(world):
    """Who copied it as it was listed had nothing more to do with it, and the members of the link, which know more, are away.

    It was closed unasked, and they said for good that it holds records, and that in the chain nobody was let send to it.
    """
    close_call(world, 1).finish()
    listed = chain.next_link(world.document, world.registry(), avoid={}, now_ms=0)
    copy = Copy(listed, world.version, "g1-a")
    assert recovery.recovered(copy).links == chain.opened(listed, Epoch(2)).links


def test_no_older_copy_is_written_over_a_chain_with_the_same_links(world):
    """A member that was away says that the chain is an old one, which it isn't: all others have copies from before the last writes."""
    older = a_copy(world)
    with_subscription(world, "made since")
    close_call(world, 1).finish()
    now = replace(a_copy(world, "ZooKeeper"), version=ChainVersion(world.version + 1))
    again = recovered_by(ZooKeeper(world, now), g1_a=older).document
    assert again.links == now.document.links
    assert [one.name for one in again.subscriptions] == ["s", "made since"]


def test_however_much_was_written_by_the_old_chain_the_copy_is_newer_in_which_the_last_link_was_granted(world):
    """By the old one it was closed as empty, for nobody had been let send to it."""
    copy = a_copy(world, "g2-b")
    listed = replace(world.document, links=(replace(world.document.links[0], state=LinkState.OPENING),))
    for now in (listed, chain.emptied(listed, Epoch(1), 0)):
        written = Copy(now, ChainVersion(copy.version + 9), "ZooKeeper")
        assert recovery.newest([copy, written], "orders") is copy
        assert recovered_by(ZooKeeper(world, written), g2_b=copy).document.links == copy.document.links
    for after in ("closing", "lost"):
        further = replace(copy, document=getattr(chain, after)(copy.document, Epoch(1)))
        assert recovery.newest([further, replace(copy, version=ChainVersion(99))], "orders") is further
        copy = further


def test_a_chain_that_went_on_without_asking_a_link_that_was_granted_is_another_history(world):
    """ZooKeeper lost the grant of link 1, its last write, and who has the records was away while the next group was sent to.

    The queue was recovered, again and again, and stood still: they said that link 1 holds records that nobody was let send.
    """
    copy = a_copy(world, "g1-a")
    listed = replace(world.document, links=(replace(world.document.links[0], state=LinkState.OPENING),))
    emptied = chain.emptied(listed, Epoch(1), 0)
    went_on = Copy(chain.next_link(emptied, world.registry(), avoid={}, now_ms=0), copy.version, "ZooKeeper")
    for granted in (copy.document, chain.closing(copy.document, Epoch(1))):
        with pytest.raises(ChainSetBack, match="in the chain of g1-a, and was closed unasked in that of ZooKeeper"):
            recovery.newest([replace(copy, document=granted), went_on], "orders")
    assert (
        recovery.newest([Copy(listed, copy.version, "g1-a"), went_on, replace(copy, document=emptied)], "orders")
        is went_on
    )


def test_a_call_that_was_cut_off_goes_on_where_it_was(world):
    copy = a_copy(world)
    now = replace(copy, document=recovery.recovered(copy))
    assert recovery.goes_on_from(now, copy)
    assert recovery.goes_on_from(replace(now, document=chain.with_sender(now.document, "node-2")), copy)
    assert not recovery.goes_on_from(copy, copy)
    assert not recovery.goes_on_from(replace(now, document=replace(now.document, next_epoch=Epoch(1))), copy)


def sought(world: World) -> Copy:
    """A copy in which the subscription was sought, of which no other one tells."""
    document = subscriptions.sought(world.document, "s", subscriptions.located(world.document, "earliest", None))
    return Copy(document, ChainVersion(world.version + 1), "g2-b")


def complaints(copy: Copy, now: Copy) -> dict[QueueId, str]:
    """What the member with this copy says of the chain as it is now."""
    chains = {now.document.queue_id: SeenChain(now.document, now.version)}
    return setback.queues(
        MemberName("g2", "b"), "disk", chains, (), {QueueId(1): KeptChain.of(copy.document, copy.version)}
    )


class ZooKeeper:
    """The queue's chain as it is now, if it is there."""

    def __init__(self, world: World, now: Copy | None) -> None:
        self._registry, self.now = world.registry(), now
        self.chains = {} if now is None else {now.document.queue_id: now}

    async def look_up_registry(self) -> Registry:
        groups = self._registry.groups
        state = replace(groups["g2"].members["b"], set_back=(QueueId(1),))
        return Registry({**groups, "g2": GroupState("g2", members={**groups["g2"].members, "b": state})})

    async def catch_up(self) -> None: ...

    async def new_queue_id(self, _: QueueId) -> None: ...

    async def queue_id(self, _: str) -> QueueId:
        return QueueId(1)

    async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
        if self.now is None:
            raise UnknownQueue("it is gone")
        return self.now.document, self.now.version

    async def recover_queue(self, document: ChainDocument, expected: ChainVersion | None) -> bool:
        assert expected == (None if self.now is None else self.now.version)
        self.now = Copy(document, ChainVersion(0 if expected is None else expected + 1), "ZooKeeper")
        return True

    async def raise_version(self, _: QueueId, version: ChainVersion) -> None:
        self.now = replace(self.now, version=version)


def recovered_by(zookeeper: ZooKeeper, **copies: Copy) -> Copy:
    """What an operator's call makes of it where these members, `g1_a`, keep copies."""

    class Members:
        async def kept_chains(self, _: str, member: MemberName) -> tuple[list[Copy], QueueId]:
            there = copies.get(f"{member.group}_{member.member}")
            return ([] if there is None else [there]), QueueId(1)

    request = pb.RecoverQueueRequest(queue="orders", confirmed_queue="orders")
    assert asyncio.run(Recovery(zookeeper, Members()).recover_queue(request)).is_done
    assert zookeeper.now is not None
    return zookeeper.now


def test_a_seek_that_only_a_member_knows_that_was_away_is_recovered_when_it_is_back(world):
    """The queue stood still for ever: that member said that the chain is an old one, and no other copy tells of the seek."""
    older, newest = a_copy(world), sought(world)
    zookeeper = ZooKeeper(world, None)
    now = recovered_by(zookeeper, g1_a=older)
    assert "was sought to generation 2" in complaints(newest, now)[QueueId(1)]
    lost = chain.lost(chain.closing(now.document, Epoch(1)), Epoch(1))
    listed = chain.next_link(lost, world.registry(), avoid={}, now_ms=0)
    zookeeper.now = later = replace(now, document=chain.opened(listed, Epoch(2)))
    # At last only one of before link 2: those whose link it is are away.
    for copies in ({"g1_a": older}, {"g1_a": later}, {"g1_a": now}):
        zookeeper.now = later
        again = recovered_by(zookeeper, **copies, g2_b=newest)
        assert complaints(newest, again) == {}
        (before,), (after,) = newest.document.subscriptions, again.document.subscriptions
        assert (after.generation, after.consume_list) == (before.generation, (Epoch(1), Epoch(2)))
        assert after.reader_token > before.reader_token
        assert again.document.links == later.document.links


def test_a_seek_that_only_zookeeper_tells_of_is_not_undone(world):
    """What a reader commits there is told to members, which would refuse who reads by the generation before."""
    now = replace(sought(world), holder="ZooKeeper")
    (subscription,) = recovered_by(ZooKeeper(world, now), g1_a=a_copy(world)).document.subscriptions
    assert subscription.generation == now.document.subscriptions[0].generation


def test_of_each_subscription_the_last_seek_counts_whichever_copy_comes_last(world):
    with_subscription(world, "t")
    older, newest = a_copy(world), sought(world)
    now = recovery.recovered(older)
    for copies in ([older, newest], [newest, older]):
        s, t = recovery.with_last_seeks(now, copies).subscriptions
        assert (s.name, s.generation) == ("s", 2)
        assert t == now.subscriptions[1]
    # What was read since the last seek isn't put back by a copy from before.
    (read, _), links = now.subscriptions, now.links
    read = replace(read, consume_list=())
    now = replace(now, subscriptions=(read, now.subscriptions[1]))
    assert recovery.with_last_seeks(now, [older]) is now
    assert links == older.document.links


def test_a_seek_is_not_taken_from_another_queue_s_chain(world):
    assert recovery.with_last_seeks(world.document, [a_copy(world)]) is world.document
    of_another = sought(world)
    of_another = replace(of_another, document=replace(of_another.document, queue_id=QueueId(7)))
    assert recovery.with_last_seeks(world.document, [of_another]) is world.document


def test_who_was_not_asked_is_said_also_where_zookeeper_knows_nothing_of_a_group_any_more(world):
    """Its brokers may have newer copies, or the newest link: who reads this starts them first."""
    close_call(world, 1).finish()  # g1 is off the send list
    there = Registry({"g2": world.registry().groups["g2"]})
    what = _what_is_recovered(None, a_copy(world, "g2-a"), there)
    assert what.endswith("not asked, because not registered: g1-a, g1-b, g3-a, g3-b")


@pytest.mark.parametrize("has_compared", [False, True])
def test_that_nothing_is_to_be_recovered_is_said_only_once_the_disks_were_compared(world, has_compared):
    """An operator asks as soon as all are started: nobody has said yet that the chain is an old one."""

    class JustCome(ZooKeeper):
        async def look_up_registry(self) -> Registry:
            groups = self._registry.groups
            state = replace(groups["g2"].members["b"], has_compared=has_compared)
            known = {**groups, "g2": GroupState("g2", members={**groups["g2"].members, "b": state})}
            return Registry(known, is_new=True)

    class Members:
        async def kept_chains(self, _: str, __: MemberName) -> tuple[list[Copy], QueueId]:
            return [a_copy(world)], QueueId(1)

    recovery_of = Recovery(JustCome(world, a_copy(world, "ZooKeeper")), Members())
    asked = recovery_of.recover_queue(pb.RecoverQueueRequest(queue="orders"))
    if has_compared:
        assert asyncio.run(asked).is_needless
    else:
        with pytest.raises(Unreachable, match="waits for g2-b"):
            asyncio.run(asked)


@pytest.mark.parametrize("is_sent_to", [False, True])
def test_a_queue_made_anew_under_the_name_of_one_that_zookeeper_lost_is_said_to_be_in_the_way(world, is_sent_to):
    """A start script made it. Once it had been sent to, an operator was told that nothing is to be recovered."""
    older = a_copy(world)
    anew = replace(older, document=replace(older.document, queue_id=QueueId(2)), holder="ZooKeeper")

    class Members:
        async def kept_chains(self, _: str, __: MemberName) -> tuple[list[Copy], QueueId]:
            return [older, anew] if is_sent_to else [older], QueueId(2)

    asked = pb.RecoverQueueRequest(queue="orders", confirmed_queue="orders")
    zookeeper = ZooKeeper(world, anew)
    with pytest.raises(QueueExists, match=r"the queue orders, with id 1, .* once that one is deleted"):
        asyncio.run(Recovery(zookeeper, Members()).recover_queue(asked))
    going = replace(older, document=chain.deleted(older.document))
    zookeeper.chains[QueueId(1)] = going  # it was deleted, and is being cleared away
    if is_sent_to:
        assert asyncio.run(Recovery(zookeeper, Members()).recover_queue(asked)).is_needless


class Unnamed(ZooKeeper):
    """The id of the queue has a chain, and its name leads nowhere, until it is `taken` by another one."""

    taken: QueueId | None = None

    async def queue_id(self, _: str) -> QueueId:
        if self.taken is None:
            raise UnknownQueue("it has no name")
        return self.taken


@pytest.mark.parametrize("name", ["orders", "extra"])
def test_another_queue_that_got_the_id_is_in_the_way_until_it_is_cleared_away_h16(world, name):
    """Its chain was written over by the second call, after the first had let the name of the lost one lead to it."""
    lost = a_copy(world, created_at_ms=5_000)
    other = Copy(replace(world.document, name=name, created_at_ms=70_000), ChainVersion(1), "ZooKeeper")
    zookeeper = (ZooKeeper if name == "orders" else Unnamed)(world, other)
    said = f"queue {name} now, with id 1, made 1970-01-01 00:01:10 UTC; the queue orders, with id 1, made 1970-01-01 00:00:05 UTC"
    with pytest.raises(QueueExists, match=said):
        recovered_by(zookeeper, g1_a=lost)
    if name == "orders":  # and it was sent to: it is the newest of the name
        with pytest.raises(QueueExists, match=said):
            recovered_by(zookeeper, g1_a=lost, g2_b=replace(other, holder="g2-b"))
    zookeeper.now = going = replace(other, document=chain.deleted(other.document))
    with pytest.raises(Waiting, match=f"queue {name}, with id 1, .* is deleted: look again"):
        recovered_by(zookeeper, g1_a=lost)
    assert zookeeper.now == going
    zookeeper.now = None
    assert recovered_by(zookeeper, g1_a=lost).document.created_at_ms == 5_000


def test_a_queue_whose_name_was_taken_while_it_was_recovered_is_not_said_to_be_recovered(world):
    """Nobody could reach it: the name led to the queue that a start script had made meanwhile."""

    class Taken(Unnamed):
        async def recover_queue(self, *_: object) -> bool:
            self.taken, self.now = QueueId(7), other
            return False

    other = Copy(replace(world.document, queue_id=QueueId(7), created_at_ms=70_000), ChainVersion(0), "ZooKeeper")
    with pytest.raises(QueueExists, match="queue orders now, with id 7"):
        recovered_by(Taken(world, None), g1_a=a_copy(world))


def test_a_chain_that_lost_its_name_is_given_it_again(world):
    """As where the name was taken while it was recovered, and who had taken it is deleted."""

    class Given(Unnamed):
        async def recover_queue(self, document: ChainDocument, expected: ChainVersion | None) -> bool:
            self.taken = document.queue_id
            return await super().recover_queue(document, expected)

    copy = a_copy(world)
    zookeeper = Given(world, replace(copy, document=recovery.recovered(copy), holder="ZooKeeper"))
    assert recovered_by(zookeeper, g1_a=copy).document == recovery.recovered(copy)
    assert zookeeper.taken == copy.document.queue_id


def test_no_queue_made_later_gets_an_id_of_which_some_member_keeps_a_chain_h16(world):
    """Of queues of other names, too: ZooKeeper lost whose they were, and would give them anew."""
    last = iter((5, 9, 7, 6, 5, 4))
    passed: list[int] = []

    class Members:
        async def kept_chains(self, *_: object) -> tuple[list[Copy], QueueId]:
            return [a_copy(world)], QueueId(next(last))

    class Numbering(ZooKeeper):
        async def new_queue_id(self, beyond: QueueId) -> None:
            passed.append(beyond)

    request = pb.RecoverQueueRequest(queue="orders", confirmed_queue="orders")
    assert asyncio.run(Recovery(Numbering(world, None), Members()).recover_queue(request)).is_done
    assert passed == [9]


def test_nothing_else_is_recovered_than_was_shown_and_confirmed(world):
    """The member with the newest copy went in between: what it alone knew of was written over, as if the operator had agreed."""
    older = a_copy(world, "g2-b")
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    there = {"g1-a": a_copy(world), "g2-b": older}

    class Members:
        async def kept_chains(self, _: str, member: MemberName) -> tuple[list[Copy], QueueId]:
            return [one for one in there.values() if one.holder == str(member)], QueueId(1)

    zookeeper = ZooKeeper(world, None)
    recovery_of = Recovery(zookeeper, Members())
    asked = pb.RecoverQueueRequest(queue="orders")
    asked.confirmed_what = asyncio.run(recovery_of.recover_queue(asked)).what
    asked.confirmed_queue = "orders"
    newest = there.pop("g1-a")
    with pytest.raises(Waiting, match="nothing was recovered, look again: queue orders goes on from the copy of g2-b"):
        asyncio.run(recovery_of.recover_queue(asked))
    assert zookeeper.now is None
    there["g1-a"] = newest
    assert asyncio.run(recovery_of.recover_queue(asked)).is_done
    assert asyncio.run(recovery_of.recover_queue(asked)).is_done  # the answer to the first one was lost


def test_a_deleted_queue_is_not_recovered_while_it_is_cleared_away(world):
    """It was said, for as long as a member was away, that the chain changed meanwhile."""
    going = Copy(chain.deleted(world.document), ChainVersion(9), "ZooKeeper")
    with pytest.raises(UnknownQueue, match="queue orders was deleted"):
        recovered_by(Unnamed(world, going), g1_a=a_copy(world))


def test_of_a_queue_that_nobody_has_sent_to_nothing_is_to_be_recovered(world):
    """No member keeps a copy of its chain, and nothing is wrong with ZooKeeper; but who is away may keep one."""

    class Members:
        async def kept_chains(self, _: str, __: MemberName) -> tuple[list[Copy], QueueId]:
            return [], QueueId(0)

    class Quiet(ZooKeeper):
        async def look_up_registry(self) -> Registry:
            return Registry({**self._registry.groups, "g2": GroupState("g2")})

    asked = pb.RecoverQueueRequest(queue="orders")
    reply = asyncio.run(Recovery(Quiet(world, a_copy(world, "ZooKeeper")), Members()).recover_queue(asked))
    assert reply.is_needless
    assert reply.what.endswith("the chain of queue orders; not asked, because not registered: g2-a, g2-b")
    for lacking in (
        Quiet(world, None),
        ZooKeeper(world, a_copy(world, "ZooKeeper")),
    ):  # no chain, and one that a disk says is old
        with pytest.raises(ChainSetBack, match="no member"):
            asyncio.run(Recovery(lacking, Members()).recover_queue(asked))


def test_a_seek_is_taken_with_what_was_to_be_read_then_and_what_came_since(world):
    """The first link was behind the place that was sought; the third came after the copy that tells of it."""
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    sought_in = a_copy(
        world,
        subscriptions=(replace(world.document.subscriptions[0], generation=Generation(2), consume_list=(Epoch(2),)),),
    )
    world.append(Epoch(2), 2)
    send_call(world, token=1, failed_epoch=2).finish()
    (found,) = recovery.with_last_seeks(world.document, [sought_in]).subscriptions
    assert (found.generation, found.consume_list) == (2, (2, 3))
