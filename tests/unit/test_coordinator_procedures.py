"""Golden traces of the coordinator's procedures: what is told, and what is ordered then.

Each trap of the protocol that lives here has its test, named after it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.coordinator import messages
from seriatim.coordinator.core import (
    acquire_read,
    acquire_send,
    acquiring,
    chain,
    close_link,
    invariants,
    readmission,
    recovery,
    seal,
    subscriptions,
)
from seriatim.coordinator.core import closing as closing_core
from seriatim.coordinator.core.acquire_read import ReadRequest
from seriatim.coordinator.core.acquire_send import SendRequest
from seriatim.coordinator.core.chain_point import point_before
from seriatim.coordinator.core.events import (
    Answer,
    ChainConflict,
    ChainRead,
    ChainWritten,
    Effect,
    ElectionSeen,
    KeptSealsRead,
    LinkOpened,
    LookUpElection,
    LookUpSessions,
    OpenFailed,
    ReadChain,
    ReaderNotTold,
    ReaderTold,
    ReadGrant,
    ReadKeptSeals,
    Refused,
    SealAnswered,
    SealFailed,
    SendGrant,
    SendOpen,
    SendSeal,
    SessionsSeen,
    TellReader,
    Wait,
    WakeAfter,
    Woken,
    WriteChain,
)
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Durability, LinkState, Readmit, StaleCursors, Whose
from seriatim.protocol.errors import (
    ChainSetBack,
    DeadlineOver,
    Fenced,
    InvalidArgument,
    InvariantBroken,
    NotElected,
    OlderGeneration,
    OlderVersion,
    StaleCursor,
    UnknownLink,
    UnknownQueue,
    Unreachable,
    Waiting,
    WrongIncarnation,
)
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Incarnation, Index, Offset, SubscriptionId, Token
from seriatim.protocol.position import START, Position
from tests.property.chain_world import World, close_call, send_call, with_subscription

DOWN = Unreachable("connection refused")


def shown(effect: Effect) -> str:  # noqa: C901, PLR0912 - a table
    match effect:
        case ReadChain(may_be_remembered, is_newest):
            return "read or remember" if may_be_remembered else "read the newest" if is_newest else "read"
        case WriteChain(_, expected, what):
            return f"write {expected}: {what}"
        case SendOpen(side, link, token, version):
            return f"open {side.name} link={link.epoch} token={token} version={version}"
        case SendSeal(side, link, version):
            return f"seal {side.name} link={link.epoch} version={version}"
        case TellReader(member, link, _, generation, token, cursor):
            passed_on = f" cursor={cursor}" if cursor else ""
            return f"tell {member} link={link.epoch} generation={generation} token={token}{passed_on}"
        case WakeAfter(delay_ms):
            return f"wake after {delay_ms} ms"
        case LookUpSessions(group):
            return f"sessions of {group}"
        case LookUpElection() | ReadKeptSeals():
            return {"LookUpElection": "election", "ReadKeptSeals": "kept seals"}[type(effect).__name__]
        case Answer(SendGrant() as grant):
            return f"grant link={grant.link.epoch} next={grant.next_index} token={grant.token}"
        case Answer(ReadGrant() as grant):
            return f"grant link={grant.link and grant.link.epoch} index={grant.index} token={grant.token}"
        case Answer(Wait(reasons)):
            return f"wait {'; '.join(f'{what}: {why}' for what, why in reasons.items())}"
        case Answer(Refused(error)):
            return f"refused {error.code}"
        case Answer():
            return "closed"


class Trace:
    """Tells a procedure events and keeps what it orders, as text."""

    def __init__(self, begun, step):
        self.state, effects = begun
        self.step = step
        self.effects = effects
        self.lines = [shown(effect) for effect in effects]

    def tell(self, *events):
        for event in events:
            self.state, self.effects = self.step(self.state, event, 5)
            self.lines += [f"  {type(event).__name__}", *(shown(effect) for effect in self.effects)]
        return self

    @property
    def document(self) -> ChainDocument:
        return next(effect.document for effect in self.effects if isinstance(effect, WriteChain))

    @property
    def orders(self) -> list[str]:
        return [shown(effect) for effect in self.effects]


def sending(failed_epoch: int = 0, token: int = 1) -> Trace:
    return Trace(acquire_send.start(SendRequest("node-1", Token(token), Epoch(failed_epoch))), acquire_send.step)


def closing(epoch: int = 1) -> Trace:
    return Trace(close_link.start(Epoch(epoch)), close_link.step)


def reading(token: int = 1) -> Trace:
    return Trace(acquire_read.start(ReadRequest("s", "node-1", Token(token))), acquire_read.step)


def told(place: str, cursor: int | None = None, *, by: int = 1, is_stale: bool = False) -> ReaderTold:
    return ReaderTold(place, None if cursor is None else Index(cursor), is_stale, Token(by))


def at(index: int, content: str = "x") -> Position:
    return Position(Index(index), f"{content}{index}".encode(), {"s": 10 + index}) if index else START


def whole(world: World, place: str, *positions: Position) -> SealAnswered:
    return SealAnswered(place, SealAnswer(Wholeness.WHOLE, world.members["g1", place].incarnation, positions))


@pytest.fixture
def world() -> World:
    """A queue whose sender has token 1 and the open link 1 on g1, with a subscription."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    return world


def read(world: World) -> ChainRead:
    return ChainRead(world.document, world.version, world.registry())


def test_a_link_of_a_deleted_queue_is_left_as_it_is(world: World) -> None:
    """Its members may have let it go already: a seal asked of them would leave it lost, and its group in use, for ever."""
    world.document = chain.deleted(world.document)
    trace = closing().tell(read(world))
    (answer,) = trace.effects
    assert isinstance(answer.result, Refused)
    assert isinstance(answer.result.error, UnknownQueue)
    assert reading().tell(read(world)).orders == ["refused unknown-queue"]


def test_a_link_that_has_ended_or_was_let_go_is_closed(world: World) -> None:
    close_call(world, 1).finish()
    assert closing().tell(read(world)).orders == ["closed"]
    world.document = replace(world.document, links=())
    assert closing().tell(read(world)).orders == ["closed"]


def test_a_lost_link_whose_end_still_nobody_tells_stays_lost_and_says_why(world: World) -> None:
    for place in ("a", "b"):
        world.kill(("g1", place))
        world.expire(("g1", place))
    close_call(world, 1).finish()
    world.restart(("g1", "a"), is_blank=True)
    trace = closing().tell(read(world), whole(world, "a"), SealFailed("b", DOWN))
    trace.tell(KeptSealsRead({}), SessionsSeen(world.registry()))
    assert trace.orders == [
        "wait link 1: its end can't be told (lost); g1-a: another disk (g1-a-disk2) is at its place; g1-b: connection refused"
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: chain.without_group(document, "g1"),  # it serves
        lambda document: chain.readmitted(document, "g2"),  # it is on the list
        lambda document: chain.next_link(document, World().registry(), avoid={}, now_ms=0),
        lambda document: chain.opened(document, Epoch(1)),
        lambda document: chain.closing(document, Epoch(7)),
        lambda document: closing_core.begin(document, ChainVersion(1), Epoch(7), 0),
    ],
)
def test_a_change_that_the_chain_doesnt_allow_is_a_bug(world: World, change) -> None:
    with pytest.raises(InvariantBroken):
        change(world.document)


def test_only_the_last_link_is_closed_and_one_that_has_ended_never_again(world: World) -> None:
    first = world.document.links[0]
    send_call(world, token=1, failed_epoch=1).finish()
    with pytest.raises(InvariantBroken):
        chain.closing(replace(world.document, links=(first, *world.document.links[1:])), Epoch(1))
    with pytest.raises(InvariantBroken):
        closing_core.begin(world.document, world.version, Epoch(1), 0)


def test_the_first_call_of_a_queue():
    world = World()
    trace = sending(token=0).tell(read(world), ElectionSeen("node-1"))
    trace.tell(ChainWritten(ChainVersion(1)), ChainWritten(ChainVersion(2)))
    trace.tell(LinkOpened("b", START), LinkOpened("a", START), ChainWritten(ChainVersion(3)))
    assert trace.lines == [
        "read or remember",
        "  ChainRead",
        "election",
        "  ElectionSeen",
        "write 0: sender node-1 elected token=1",
        "  ChainWritten",
        "write 1: link 1 listed for g1",
        "  ChainWritten",
        "open g1-a link=1 token=1 version=2",
        "open g1-b link=1 token=1 version=2",
        "  LinkOpened",
        "  LinkOpened",
        "write 2: link 1 open on g1",
        "  ChainWritten",
        "grant link=1 next=0 token=1",
    ]


def test_the_master_is_dead_and_the_slave_answers(world):
    world.kill(("g1", "a"))
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(SealFailed("a", DOWN), whole(world, "b", at(3), at(5)))
    ended = trace.document
    assert trace.lines == [
        "read or remember",
        "  ChainRead",
        "write 3: closing link 1",
        "  ChainWritten",
        "seal g1-a link=1 version=4",
        "seal g1-b link=1 version=4",
        "  SealFailed",
        "  SealAnswered",
        "write 4: link 1 sealed at 5 whole=True answered=g1-b-disk1#1; link 2 listed for g2",
    ]
    # One write: how it ended, the send list, the next link, the consume list (H24).
    assert ended.send_list == ("g2", "g3")
    assert [(link.epoch, link.group, link.state, link.end, link.base) for link in ended.links] == [
        (1, "g1", LinkState.SEALED, 5, 0),
        (2, "g2", LinkState.OPENING, None, 5),
    ]
    assert ended.subscriptions[0].consume_list == (1, 2)
    assert ended.links[1].marks_on_two == {"s": 13}  # what was committed, not what one member has (H2)
    trace.tell(ChainWritten(ChainVersion(5)))
    trace.tell(LinkOpened("a", START), LinkOpened("b", START), ChainWritten(ChainVersion(6)))
    assert trace.orders == ["grant link=2 next=0 token=1"]
    grant = trace.effects[0].result
    assert (grant.resume_point, grant.is_resume_known, grant.base) == ({"s": 13}, True, 5)
    assert (grant.held, grant.given_up_from) == ({"s": 15}, {})  # what the chain holds is no reason to skip anything


def test_a_second_answer_is_waited_for_only_a_moment(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), whole(world, "b", at(3), at(5)))
    assert trace.orders == ["wake after 10 ms"]
    trace.tell(Woken())
    assert trace.orders == ["write 4: link 1 sealed at 5 whole=True answered=g1-b-disk1#1; link 2 listed for g2"]


def test_seals_that_were_answered_hold_when_the_chain_changes(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(SealFailed("a", DOWN), whole(world, "b", at(3), at(5)))
    note = StaleCursors(Epoch(1), "a", ())
    marked = replace(chain.closing(world.document, Epoch(1)), stale_cursors=(note,))
    trace.tell(ChainConflict(), ChainRead(marked, ChainVersion(5), world.registry()))
    assert trace.orders == ["write 5: link 1 sealed at 5 whole=True answered=g1-b-disk1#1; link 2 listed for g2"]
    assert trace.document.stale_cursors == (note,)
    trace.tell(ChainConflict(), ChainRead(marked, ChainVersion(6), world.registry()))
    assert trace.orders == ["write 6: link 1 sealed at 5 whole=True answered=g1-b-disk1#1; link 2 listed for g2"]


def test_seals_that_told_no_end_are_asked_for_again(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), SealFailed("a", DOWN))
    trace.tell(SealFailed("b", OlderVersion("the chain has changed")))
    marked = chain.closing(world.document, Epoch(1))
    trace.tell(ChainRead(marked, ChainVersion(5), world.registry()))
    assert trace.orders == ["seal g1-a link=1 version=5", "seal g1-b link=1 version=5"]


def test_what_told_no_end_doesnt_count_beside_what_is_asked_for_again():
    world = World(Durability.ASYNC)
    send_call(world).finish()
    world.restart(("g1", "a"))
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(whole(world, "a", at(2)), SealFailed("b", DOWN), KeptSealsRead({}), SessionsSeen(world.registry()))
    assert trace.orders[0].startswith("write 4: link 1 lost: ")
    trace.tell(ChainConflict(), ChainRead(chain.closing(world.document, Epoch(1)), ChainVersion(5), world.registry()))
    trace.tell(SealFailed("b", DOWN))
    assert trace.orders == []
    trace.tell(whole(world, "a", at(2)))
    assert trace.orders == ["kept seals"]


def test_what_was_answered_of_one_link_says_nothing_of_the_next(world):
    """Another coordinator recorded the end first and granted the next link, which failed at once and is being closed."""
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(SealFailed("a", DOWN), whole(world, "b", at(3), at(5)))
    send_call(world, token=1, failed_epoch=1).finish()
    marked = chain.closing(world.document, Epoch(2))
    trace.tell(ChainConflict(), ChainRead(marked, ChainVersion(9), world.registry()))
    assert trace.orders == ["seal g2-a link=2 version=9", "seal g2-b link=2 version=9"]


def test_seals_that_were_answered_hold_for_the_background_closing_too(world):
    trace = closing().tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(whole(world, "a", at(3), at(5)), whole(world, "b", at(5)), ChainConflict())
    trace.tell(ChainRead(chain.closing(world.document, Epoch(1)), ChainVersion(6), world.registry()))
    assert trace.orders == ["write 6: link 1 sealed at 5 whole=True answered=g1-a-disk1#1,g1-b-disk1#1"]


def remembered(world: World) -> ChainRead:
    return replace(read(world), is_remembered=True)


def test_what_is_remembered_does_where_a_write_would_refuse_it(world):
    assert sending(failed_epoch=1).tell(remembered(world)).orders == ["write 3: closing link 1"]
    assert sending(token=0).tell(remembered(world)).orders == ["election"]


@pytest.mark.parametrize("claim", ["another epoch", "another token", "closing", "deleted"])
def test_what_is_remembered_does_not_do_for_anything_else(world, claim):
    failed_epoch, token = (2 if claim == "another epoch" else 1), (2 if claim == "another token" else 1)
    if claim == "closing":
        world.document = chain.closing(world.document, Epoch(1))
    elif claim == "deleted":
        world.document = chain.deleted(world.document)
    trace = sending(failed_epoch=failed_epoch, token=token).tell(remembered(world))
    assert trace.orders == ["read"]
    assert sending(token=1).lines == ["read"]


def test_a_grant_names_where_a_switch_would_lead(world):
    def granted():
        trace = sending().tell(read(world), LinkOpened("a", START), LinkOpened("b", START))
        return trace.effects[0].result.next_group

    assert granted() == "g2"
    world.kill(("g2", "b"))
    world.expire(("g2", "b"))
    assert granted() == "g3"
    world.document = replace(world.document, send_list=("g1",))
    assert granted() == ""


def test_h1_a_blank_disk_alone_seals_nothing(world):
    world.kill(("g1", "b"))
    world.restart(("g1", "a"), is_blank=True)
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(whole(world, "a"), SealFailed("b", DOWN), KeptSealsRead({}), SessionsSeen(world.registry()))
    lost = trace.document
    assert lost.links[0].state is LinkState.LOST
    assert lost.links[1].base is None


def test_h1_partial_answers_seal_nothing_in_sync(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    for place in ("a", "b"):
        incarnation = world.members["g1", place].incarnation
        trace.tell(SealAnswered(place, SealAnswer(Wholeness.PARTIAL, incarnation, (at(2),), "a checksum failed")))
    trace.tell(KeptSealsRead({}), SessionsSeen(world.registry()))
    assert trace.document.links[0].certificate is None


def test_h10_an_answer_that_is_none_is_no_seal_either(world):
    """Who can't read the link may not have sealed it; beside a member that can't be reached it may still take records."""
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), SealFailed("b", DOWN))
    unknown = SealAnswer(Wholeness.UNKNOWN, world.members["g1", "a"].incarnation, ())
    trace.tell(SealAnswered("a", unknown), KeptSealsRead({}), SessionsSeen(world.registry()))
    assert trace.orders[0].startswith("wait link 1: its end can't be told")


def failed(world: World, place: str) -> SealAnswered:
    incarnation = world.members["g1", place].incarnation
    return SealAnswered(place, SealAnswer(Wholeness.UNKNOWN, incarnation, (), "the disk failed: EIO", has_failed=True))


@pytest.mark.parametrize("other", ["fails, too", "says nothing", "is gone"])
def test_a_member_whose_disk_failed_takes_no_more_and_the_link_is_lost_until_one_of_them_answers(world, other):
    """Both stay registered, where both disks fail, and neither ever seals."""
    if other == "is gone":
        world.kill(("g1", "b"))
        world.expire(("g1", "b"))
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), failed(world, "a"))
    trace.tell(failed(world, "b") if other == "fails, too" else SealFailed("b", DOWN))
    trace.tell(KeptSealsRead({}), SessionsSeen(world.registry()))
    why = "g1-b is not registered" if other == "is gone" else "g1-a takes no more records: the disk failed: EIO"
    assert trace.orders == [f"write 4: link 1 lost: {why}; link 2 listed for g2"]
    world.document = lost = trace.document
    assert [link.state for link in lost.links] == [LinkState.LOST, LinkState.OPENING]
    assert lost.subscriptions[0].consume_list == (1, 2)
    # Lost it is already: only an answer says more, and by that nothing acknowledged is cut.
    again = closing().tell(read(world), failed(world, "a"), failed(world, "b"), KeptSealsRead({}))
    again.tell(SessionsSeen(world.registry()))
    assert again.orders[0].startswith("wait link 1: its end can't be told (lost)")
    back = closing().tell(read(world), failed(world, "b"), whole(world, "a", at(3), at(5)))
    assert back.document.link(Epoch(1)).end == 5


def test_a_member_whose_disk_failed_does_not_count_as_gone_where_the_other_one_answers(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), failed(world, "a"))
    trace.tell(whole(world, "b", at(3), at(5)))
    assert trace.document.links[0].end == 5
    # Also beside the chain.
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), failed(world, "a"))
    trace.tell(SealFailed("b", DOWN), KeptSealsRead({"b": whole(world, "b", at(3), at(5)).answer}))
    assert trace.document.links[0].end == 5


def test_that_a_disk_failed_is_said_of_the_link_s_own_incarnation_only(world):
    """Another one may answer there; of the link's own it says nothing."""
    link = world.document.last_link
    for incarnation in (
        replace(link.master.incarnation, start=9),
        Incarnation("another", link.master.incarnation.start),
    ):
        answer = replace(failed(world, "a").answer, incarnation=incarnation)
        trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), SealAnswered("a", answer))
        trace.tell(SealFailed("b", DOWN), KeptSealsRead({}), SessionsSeen(world.registry()))
        assert trace.orders[0].startswith("wait link 1: its end can't be told")


def test_what_a_member_says_of_its_disk_beside_the_chain_counts_too(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(SealFailed("a", DOWN), SealFailed("b", DOWN))
    reply = pb.SealReply(incarnation=as_message(world.members["g1", "b"].incarnation), has_failed=True)
    kept = messages.seal_answer_from(pb.SealReply.FromString(reply.SerializeToString()))
    trace.tell(KeptSealsRead({"b": kept}), SessionsSeen(world.registry()))
    assert trace.document.links[0].state is LinkState.LOST


@pytest.mark.parametrize("durability", Durability)
def test_no_end_is_told_by_the_absence_of_a_disk_that_failed(durability):
    """Beside one that may have lost records it may be the one that hasn't: both disks have to answer, or an operator says so."""
    world = World(durability)
    send_call(world).finish()
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), failed(world, "a"))
    partial = SealAnswer(Wholeness.PARTIAL, world.members["g1", "b"].incarnation, (at(2),), "a checksum failed")
    trace.tell(SealAnswered("b", partial), KeptSealsRead({}), SessionsSeen(world.registry()))
    assert trace.document.links[0].certificate is None


def test_h3_unequal_copies_are_asked_again_and_never_granted(world):
    trace = sending().tell(read(world), LinkOpened("a", at(5, "one")), LinkOpened("b", at(5, "other")))
    assert trace.orders == ["wake after 5 ms"]
    trace.tell(Woken())
    assert trace.orders == ["open g1-a link=1 token=1 version=3", "open g1-b link=1 token=1 version=3"]
    trace.tell(LinkOpened("a", at(5)), LinkOpened("b", at(5)))
    assert trace.orders == ["grant link=1 next=5 token=1"]
    assert trace.effects[0].result.resume_point == {"s": 15}


def test_copies_that_stay_unequal_while_both_answer_cost_no_group(world):
    trace = sending().tell(read(world))
    for index in range(acquire_send.MAX_OPENS):
        trace.tell(LinkOpened("a", at(5 + index)), LinkOpened("b", at(6 + index)))
        if index < acquire_send.MAX_OPENS - 1:
            assert trace.orders == ["wake after 5 ms"]
            trace.tell(Woken())
    assert trace.orders == ["wait link 1: records are still on their way (44 and 45)"]


def test_h9_a_drained_report_from_before_a_seek_changes_nothing(world):
    close_call(world, 1).finish()
    before = world.document
    world.append(Epoch(1), 2)
    sought = subscriptions.sought(before, "s", subscriptions.located(before, "earliest", None))
    generation = before.subscriptions[0].generation
    one = replace(sought.subscriptions[0], consume_list=(Epoch(1),), reader_token=Token(1))
    kept = replace(sought, subscriptions=(one,))
    assert subscriptions.drained(kept, SubscriptionId(1), generation, Epoch(1)) is kept
    drained = subscriptions.drained(kept, SubscriptionId(1), sought.subscriptions[0].generation, Epoch(1))
    assert drained != kept
    # Nor does one that comes twice, or of a subscription that is gone.
    assert subscriptions.drained(drained, SubscriptionId(1), sought.subscriptions[0].generation, Epoch(1)) is drained
    assert subscriptions.drained(kept, SubscriptionId(9), generation, Epoch(1)) is kept
    # Of several each that can be noted is, whatever is to be said of the others.
    whose = sought.subscriptions[0].whose
    assert subscriptions.all_drained(kept, Epoch(1), by_first((SubscriptionId(9), generation), whose)) == (
        drained,
        ((SubscriptionId(9), generation), whose),
    )
    later = replace(
        kept,
        subscriptions=(
            *kept.subscriptions,
            replace(kept.subscriptions[0], subscription_id=SubscriptionId(2), consume_list=(Epoch(2), Epoch(1))),
        ),
    )
    waits = later.subscriptions[1].whose
    changed, noted = subscriptions.all_drained(later, Epoch(1), by_first(waits, whose))
    assert (changed.subscriptions[0].consume_list, noted) == ((), (whose,))
    with pytest.raises(Waiting, match="link 1 can't be drained yet"):
        subscriptions.all_drained(later, Epoch(1), by_first(waits))


def by_first(*of: Whose) -> dict[Whose, Token]:
    return dict.fromkeys(of, Token(1))


def test_an_earlier_reader_s_end_leads_nobody_past_what_it_hasn_t_read(world):
    """That commit was answered to nobody, and kept by a member that was cut off; the next one started before it (invariant 7)."""
    close_call(world, 1).finish()
    world.append(Epoch(1), 2)
    sought = subscriptions.sought(world.document, "s", subscriptions.located(world.document, "earliest", None))
    one = replace(sought.subscriptions[0], reader_token=Token(2), consume_list=(Epoch(1),))
    document = replace(sought, subscriptions=(one,))
    with pytest.raises(Waiting, match="a newer reader of s was elected than the one that came to the end"):
        subscriptions.all_drained(document, Epoch(1), {one.whose: Token(1)})
    for by in (Token(2), Token(0)):  # its own commit; a member of an earlier version doesn't say
        changed, gone = subscriptions.all_drained(document, Epoch(1), {one.whose: by})
        assert (changed.subscriptions[0].consume_list, gone) == ((), (one.whose,))
    later = replace(document, subscriptions=(replace(one, generation=Generation(one.generation + 1)),))
    assert subscriptions.all_drained(later, Epoch(1), {one.whose: Token(1)}) == (later, (one.whose,))


def test_of_a_link_that_is_left_nothing_is_said_again_whoever_came_to_its_end(world):
    """A member that was started again reported each such link once a second, for as long as retention kept it."""
    close_call(world, 1).finish()
    world.append(Epoch(1), 2)
    sought = subscriptions.sought(world.document, "s", subscriptions.located(world.document, "earliest", None))
    one = replace(sought.subscriptions[0], reader_token=Token(2), consume_list=(Epoch(2),))
    document = replace(sought, subscriptions=(one,))
    assert subscriptions.all_drained(document, Epoch(1), {one.whose: Token(1)}) == (document, (one.whose,))


def exactly(index: int) -> subscriptions.Committed:
    return subscriptions.Committed(Index(index), is_exact=True)


def test_an_offset_of_a_link_whose_end_isnt_known_is_waited_for(world):
    for state in (
        chain.closing(world.document, Epoch(1)),
        chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1)),
    ):
        with pytest.raises(Waiting, match="how far link 1 reaches"):
            subscriptions.located(state, "3", None)
    with pytest.raises(Waiting, match="how far link 1 reaches"):
        subscriptions.located(world.document, "3", None)  # its members didn't answer
    with pytest.raises(InvalidArgument, match="beyond the queue's end"):
        subscriptions.located(world.document, "7", exactly(6))


def test_an_offset_behind_a_link_whose_end_is_lost_is_waited_for(world):
    link = replace(world.document.links[0], epoch=Epoch(2), base=None)
    document = replace(
        world.document, links=(chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1)).links[0], link)
    )
    sealed = replace(world.document, links=(link,))
    for one in (document, sealed):
        with pytest.raises(Waiting):
            subscriptions.located(one, "3", exactly(6))


def test_latest_is_what_the_members_say_of_an_open_link_and_can_t_be_told_of_any_other(world):
    assert subscriptions.located(world.document, "latest", exactly(4)).index == 4
    with pytest.raises(Waiting, match="can't be told now"):
        subscriptions.located(world.document, "latest", None)
    for state in (
        chain.closing(world.document, Epoch(1)),
        chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1)),
    ):
        with pytest.raises(Waiting, match="can't be told now"):
            subscriptions.located(state, "latest", exactly(4))


def test_what_a_slave_or_a_member_that_was_restarted_says_is_a_lower_bound(world):
    at_least = subscriptions.Committed(Index(4), is_exact=False)
    assert [subscriptions.located(world.document, offset, at_least).index for offset in ("0", "3", "4")] == [0, 3, 4]
    with pytest.raises(Waiting, match="how far link 1 reaches"):
        subscriptions.located(world.document, "5", at_least)
    with pytest.raises(Waiting, match="can't be told now"):
        subscriptions.located(world.document, "latest", at_least)


def test_an_offset_that_is_no_longer_kept_is_refused(world):
    document = replace(world.document, dropped=replace(world.document.dropped, offset=Offset(5)))
    for offset in ("0", "4"):
        with pytest.raises(InvalidArgument, match="earliest offset still kept is 5"):
            subscriptions.located(document, offset, exactly(6))


@pytest.mark.parametrize("begun", [sending, reading])
def test_who_meets_a_chain_that_keeps_changing_is_asked_to_come_again(world, begun):
    trace, rounds = begun(token=0), 0
    while not trace.orders[0].startswith("wait") and rounds < 100:
        trace.tell(read(world), ElectionSeen("node-1"), ChainConflict())
        rounds += 1
    assert trace.orders == ["wait chain: it keeps changing"]
    assert rounds == acquiring.MAX_ROUNDS + 1


def test_a_closing_that_meets_a_chain_that_keeps_changing_comes_to_an_end(world):
    trace, rounds = closing(), 0
    while not trace.orders[0].startswith("wait") and rounds < 100:
        trace.tell(read(world), ChainConflict())
        rounds += 1
    assert trace.orders == ["wait link 1: the chain keeps changing"]
    assert rounds == close_link.MAX_RESTARTS + 1


def test_a_sought_subscription_starts_where_it_was_sought_to_in_whatever_link():
    world = World()
    with_subscription(world)
    send_call(world).finish()
    for _ in range(2):
        world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    records = world.document.links[0].end
    assert records == 2
    position = subscriptions.located(world.document, str(records + 1), exactly(3))
    sought = subscriptions.sought(world.document, "s", position).subscription("s")
    assert (sought.position_epoch, sought.position_index, sought.consume_list) == (2, 1, (2,))
    assert [subscriptions.start_index(sought, Epoch(epoch)) for epoch in (1, 2, 3)] == [0, 1, 0]


def test_where_a_subscription_starts_in_one_link_says_nothing_of_the_next():
    """It was sought to index 5 of a link that it has read; the next one ends at 1."""
    world = World()
    with_subscription(world)
    send_call(world).finish()
    world.append(Epoch(1), 3)
    send_call(world, token=1, failed_epoch=1).finish()
    position = subscriptions.QueuePosition(Epoch(1), Index(5), (Epoch(2),))
    world.document = subscriptions.sought(world.document, "s", position)
    world.append(Epoch(2), 2)
    close_call(world, 2).finish()
    assert world.document.links[1].end == 1
    assert world.document.subscriptions[0].consume_list == (2,)


def test_latest_is_behind_a_sealed_link_and_before_one_that_nobody_was_let_send_to(world):
    fresh = World().document
    assert chain.switch_of(fresh) is None
    assert subscriptions.located(fresh, "latest", None) == subscriptions.QueuePosition(Epoch(1), Index(0), ())
    close_call(world, 1).finish()
    ended = world.document
    assert subscriptions.located(ended, "latest", None) == subscriptions.QueuePosition(Epoch(2), Index(0), ())
    listed = chain.next_link(ended, world.registry(), avoid={}, now_ms=0)
    assert subscriptions.located(listed, "latest", None) == subscriptions.QueuePosition(Epoch(2), Index(0), (Epoch(2),))
    with pytest.raises(InvalidArgument, match="is no position"):
        subscriptions.located(listed, "newest", None)


def test_a_seek_ends_the_notes_of_what_was_missed_before_it(world):
    """H9: it starts without a cursor, so none of its can be stale; else the group would wait for what nobody has."""
    noted = subscriptions.with_stale_cursors(world.document, Epoch(1), "b", None)
    assert noted.stale_note(Epoch(1), "b") is not None
    position = subscriptions.located(noted, "earliest", None)
    assert subscriptions.sought(noted, "s", position).stale_cursors == ()


def test_a_seek_in_a_recovered_chain_is_new_also_to_who_saw_one_after_its_copy(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    copy = world.document
    for _ in range(3):  # of what is lost
        world.document = subscriptions.with_reader(world.document, "s", "node-2")
        position = subscriptions.located(world.document, "earliest", None)
        world.document = subscriptions.sought(world.document, "s", position)
    lost = world.document.subscription("s").generation
    recovered = recovery.recovered(recovery.Copy(copy, ChainVersion(4), "g1-a"))
    again = subscriptions.sought(recovered, "s", subscriptions.located(recovered, "earliest", None))
    assert again.subscription("s").generation > lost


@pytest.mark.parametrize("is_at_end", [False, True])
def test_a_subscription_that_starts_at_a_links_end_leaves_it_when_it_ends(is_at_end):
    world = World()
    with_subscription(world)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    records = world.members["g1", "a"].copy(Epoch(1)).answer()[-1].index
    position = subscriptions.QueuePosition(Epoch(1), Index(records - (not is_at_end)), (Epoch(1),))
    world.document = subscriptions.sought(world.document, "s", position)
    close_call(world, 1).finish()
    assert world.document.links[0].end == records
    assert world.document.subscriptions[0].consume_list == (() if is_at_end else (Epoch(1),))


@pytest.mark.parametrize("error", [OlderVersion("older"), Fenced("newer token")])
def test_h12_older_is_no_failure_of_a_member(world, error):
    trace = sending().tell(read(world), OpenFailed("a", error))
    assert trace.orders == ["wake after 5 ms"]
    trace.tell(Woken())
    assert trace.orders == ["read"]
    trace.tell(read(world))
    assert trace.orders == ["open g1-a link=1 token=1 version=3", "open g1-b link=1 token=1 version=3"]


def test_h12_a_seal_that_is_older_starts_again_from_the_chain(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), SealFailed("a", OlderVersion("")))
    assert trace.orders == ["read"]


def test_h12_a_slow_coordinator_doesnt_seal_what_another_has_granted():
    world = World()
    slow = send_call(world)
    for _ in range(4):
        slow.go()  # its OpenLink is about to leave, with the version it knows
    assert world.document.last_link.state is LinkState.OPENING
    quick = send_call(world, token=1).finish()
    assert isinstance(quick, SendGrant)
    granted = world.document.last_link
    answer = slow.finish()
    assert isinstance(answer, SendGrant)
    assert world.document.last_link == granted
    assert granted.state is LinkState.OPEN


def test_a_repeated_call_writes_nothing_and_gets_the_same_grant(world):
    written = len(world.written)
    answer = send_call(world, token=1).finish()
    assert isinstance(answer, SendGrant)
    assert (answer.link.epoch, len(world.written)) == (1, written)


def test_a_report_about_an_older_epoch_is_ignored(world):
    send_call(world, token=1, failed_epoch=1).finish()
    answer = send_call(world, token=1, failed_epoch=1).finish()
    assert isinstance(answer, SendGrant)
    assert answer.link.epoch == 2
    assert world.document.last_link.state is LinkState.OPEN


def test_h13_a_link_is_open_in_the_chain_before_its_first_grant():
    world = World()
    trace = sending(token=0).tell(read(world), ElectionSeen("node-1"))
    trace.tell(ChainWritten(ChainVersion(1)), ChainWritten(ChainVersion(2)), LinkOpened("a", START))
    trace.tell(LinkOpened("b", START))
    assert trace.orders == ["write 2: link 1 open on g1"]
    trace.tell(ChainConflict())
    assert trace.orders == ["read"]


def test_h13_a_dead_group_that_was_only_tried_leaves_nothing_to_wait_for():
    world = World()
    with_subscription(world)
    world.kill(("g1", "b"))
    answer = send_call(world).finish()
    assert isinstance(answer, SendGrant)
    assert (answer.link.epoch, answer.link.group) == (2, "g2")
    assert world.document.subscriptions[0].consume_list == (2,)
    assert (world.document.links[0].end, world.document.send_list) == (0, ("g2", "g3"))


def test_h14_sending_goes_on_past_unread_links_where_the_queue_allows_it(world):
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    drained_only = world.document
    in_sync = replace(drained_only, settings=replace(drained_only.settings, readmit=Readmit.IN_SYNC))
    assert readmission.eligible(drained_only, world.registry()) == ()
    assert readmission.eligible(in_sync, world.registry()) == ("g1",)


def test_an_empty_link_behind_one_that_is_still_to_be_read_keeps_no_group_out(world):
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    send_call(world, token=1, failed_epoch=2).finish()
    assert [(link.group, link.end) for link in world.document.links] == [("g1", 1), ("g2", 0), ("g3", None)]
    assert world.document.subscriptions[0].consume_list == (1, 3)
    assert readmission.eligible(world.document, world.registry()) == ("g2",)


def test_where_no_group_is_left_only_one_comes_back_whose_members_are_known_to_hold_its_links(world):
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    alone = replace(world.document, settings=replace(world.document.settings, readmit=Readmit.IN_SYNC))
    link = alone.links[0]
    one_answer = replace(link, certificate=replace(link.certificate, answered=link.certificate.answered[:1]))
    doubtful = replace(alone, links=(one_answer, *alone.links[1:]), send_list=())
    not_whole = replace(link, certificate=replace(link.certificate, is_whole=False))  # as where a tail is given up
    assert "g1" not in chain.back_at_once(replace(doubtful, links=(not_whole, *alone.links[1:])), world.registry())
    assert chain.back_at_once(replace(alone, send_list=("g2", "g3")), world.registry()) == ("g1",)
    assert readmission.eligible(doubtful, world.registry())[0] == "g1"
    assert "g1" not in chain.back_at_once(doubtful, world.registry())
    assert chain.obstacles(doubtful, world.registry(), {})["g1"] == "its members are asked for link 1"


@pytest.mark.parametrize("durability", list(Durability))
def test_what_two_members_said_of_a_link_is_no_proof_where_they_can_have_lost_it_since(durability):
    world = World(durability)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    assert len(world.document.links[0].certificate.answered) == 2
    back = chain.back_at_once(replace(world.document, send_list=("g2", "g3")), world.registry())
    assert back == (("g1",) if durability.survives_restart else ())
    send_call(world, token=1, failed_epoch=2).finish()  # in that one is nothing that could have been lost
    assert world.document.links[1].end == 0
    assert chain.back_at_once(replace(world.document, send_list=("g1", "g3")), world.registry()) == ("g2",)


def test_h10_h15_lost_only_when_a_session_was_seen_gone_after_the_chain_was_read(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(SealFailed("a", DOWN), SealFailed("b", DeadlineOver("no answer")))
    assert trace.orders == ["kept seals"]
    trace.tell(KeptSealsRead({}))
    assert trace.orders == ["sessions of g1"]
    both_there = trace.state
    trace.tell(SessionsSeen(world.registry()))
    assert trace.orders[0].startswith("wait link 1: its end can't be told")
    trace.state = both_there
    world.kill(("g1", "a"))
    world.expire(("g1", "a"))
    trace.tell(SessionsSeen(world.registry()))
    assert trace.orders == ["write 4: link 1 lost: g1-a is not registered; link 2 listed for g2"]


def test_h15_a_member_missing_in_what_is_remembered_is_looked_up_before_it_costs_a_group(world):
    remembered = replace(read(world), registry=World(groups=()).registry())
    trace = sending().tell(remembered)
    assert trace.orders == ["sessions of g1"]
    looking = trace.state
    trace.tell(SessionsSeen(world.registry()))
    assert trace.orders == ["open g1-a link=1 token=1 version=3", "open g1-b link=1 token=1 version=3"]
    trace.state = looking
    assert trace.tell(SessionsSeen(remembered.registry)).orders == ["write 3: closing link 1"]


def test_what_a_member_wrote_beside_the_chain_counts(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(SealFailed("a", DOWN), SealFailed("b", DOWN))
    answer = SealAnswer(Wholeness.WHOLE, world.members["g1", "b"].incarnation, (at(2),))
    trace.tell(KeptSealsRead({"b": answer}))
    assert trace.document.links[0].end == 2


@pytest.mark.parametrize(("there", "is_told"), [(Wholeness.UNKNOWN, True), (Wholeness.PARTIAL, False)])
def test_what_a_member_wrote_beside_the_chain_counts_where_it_says_nothing_now_and_not_where_it_says_less(
    world, there, is_told
):
    """Its disk was replaced since, or failed a check since: then it can't give what it had."""
    incarnation = world.members["g1", "b"].incarnation
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)), SealFailed("a", DOWN))
    trace.tell(SealAnswered("b", SealAnswer(there, incarnation, (at(1),) if there is Wholeness.PARTIAL else ())))
    trace.tell(KeptSealsRead({"b": SealAnswer(Wholeness.WHOLE, incarnation, (at(2),))}))
    assert trace.orders[0].startswith("write 4: link 1 sealed at 2" if is_told else "sessions of g1")


def test_h18_a_link_is_closed_without_a_sender_and_its_group_leaves_in_the_same_write(world):
    world.kill(("g1", "b"))
    trace = closing().tell(read(world), ChainWritten(ChainVersion(4)), whole(world, "a", at(1)), SealFailed("b", DOWN))
    assert (trace.document.links[0].end, trace.document.send_list) == (1, ("g2", "g3"))
    trace.tell(ChainWritten(ChainVersion(5)))
    assert trace.orders == ["closed"]


def test_h20_bases_marks_and_hashes_follow_when_a_lost_end_is_found(world):
    world.append(Epoch(1), 2)
    for place in ("a", "b"):
        world.kill(("g1", place))
        world.expire(("g1", place))
    grant = send_call(world, token=1, failed_epoch=1).finish()
    assert isinstance(grant, SendGrant)
    assert (grant.link.epoch, grant.base, grant.is_resume_known) == (2, None, False)
    world.source = "t"  # of "s" the second link has nothing
    world.append(Epoch(2), 2)
    send_call(world, token=1, failed_epoch=2).finish()
    assert world.document.links[1].certificate.chain_hash is None
    assert [link.base for link in world.document.links] == [0, None, None]
    world.restart(("g1", "a"))
    close_call(world, 1).finish()
    assert [link.base for link in world.document.links] == [0, 1, 2]
    certificate = world.document.links[1].certificate
    assert certificate.marks == certificate.marks_on_two == {"s": 1, "t": 2}
    assert [link.marks_on_two for link in world.document.links[1:]] == [{"s": 1}, {"s": 1, "t": 2}]
    assert point_before(world.document, Epoch(3)).marks == {"s": 1, "t": 2}
    assert all(link.certificate.chain_hash for link in world.document.links[:2])


def test_what_is_known_from_before_a_lost_link_holds_behind_it(world):
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    lost = chain.lost(chain.closing(world.document, Epoch(2)), Epoch(2))
    behind = point_before(lost, Epoch(3))
    assert (behind.is_known, behind.marks, behind.marks_on_two) == (False, {"s": 1}, {"s": 1})
    listed = chain.next_link(lost, world.registry(), avoid={}, now_ms=0)
    closed = chain.emptied(listed, Epoch(3), 0)
    assert point_before(closed, Epoch(4)) == behind


def test_h21_behind_an_abandoned_link_offsets_start_where_none_can_have_been_used(world):
    for place in ("a", "b"):
        world.kill(("g1", place))
        world.expire(("g1", place))
    send_call(world, token=1, failed_epoch=1).finish()
    link = world.document.links[0]
    certificate = seal.given_up(link, point_before(world.document, link.epoch), [], now_ms=9)
    given_up = chain.abandoned(world.document, link.epoch, certificate, "all of it", 9)
    invariants.check_change(world.document, given_up)
    assert given_up.links[1].base == 2**40
    assert given_up.links[0].certificate.is_abandoned
    assert [(one.epoch, one.what) for one in given_up.abandoned] == [(1, "all of it")]


def test_an_offset_that_was_given_up_is_the_end_of_the_chain_until_a_link_follows(world):
    """A reader that keeps its position itself goes on there: what comes next is what is to be read next."""
    lost = chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1))
    certificate = seal.given_up(lost.links[0], point_before(lost, Epoch(1)), [], now_ms=9)
    given_up = chain.abandoned(lost, Epoch(1), certificate, "all of it", 9)
    for offset in (0, 7, 2**40):
        assert subscriptions.located(given_up, str(offset), None) == subscriptions.QueuePosition(Epoch(2), Index(0), ())
    with pytest.raises(InvalidArgument, match="beyond the queue's end"):
        subscriptions.located(given_up, str(2**40 + 1), None)
    followed = chain.next_link(given_up, world.registry(), avoid={}, now_ms=0)
    for offset in (0, 7, 2**40):
        behind = subscriptions.QueuePosition(Epoch(2), Index(0), (Epoch(2),))
        assert subscriptions.located(followed, str(offset), None) == behind
    with pytest.raises(InvalidArgument, match="beyond the queue's end"):
        subscriptions.located(followed, str(2**40 + 1), None)  # nobody was let send to that link
    with pytest.raises(InvariantBroken, match="nothing of it lies beyond 0"):
        chain.abandoned(given_up, Epoch(1), certificate, "nothing", 9)


def test_a_tail_given_up_is_no_longer_held_and_says_from_which_seq_on(world):
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(whole(world, "b", at(3), at(5)), SealFailed("a", DOWN))
    ended = trace.document
    link = ended.links[0]
    left = SealAnswer(Wholeness.WHOLE, world.members["g1", "b"].incarnation, (at(4),))
    certificate = seal.given_up(link, point_before(ended, link.epoch), [left], now_ms=9)
    given_up = chain.abandoned(ended, link.epoch, certificate, "one record", 9)
    invariants.check_change(ended, given_up)
    assert chain.given_up_from(given_up) == {"s": 15}
    assert point_before(given_up, Epoch(2)).marks == {"s": 14}
    # Again, with nothing left of it: the lower one counts. Of a source that had nothing there, nothing was given up.
    certificate = seal.given_up(link, point_before(ended, link.epoch), [], now_ms=9)
    given_up = chain.abandoned(given_up, link.epoch, certificate, "the rest", 9)
    assert chain.given_up_from(given_up) == {"s": 0}
    world.document = given_up
    trace = sending().tell(read(world), LinkOpened("a", START), LinkOpened("b", START), ChainWritten(ChainVersion(6)))
    grant = trace.effects[0].result
    assert (grant.held, grant.given_up_from) == ({}, {"s": 0})


def test_of_a_source_that_a_tail_has_nothing_of_nothing_is_given_up(world):
    ended = sealed_by_one(world, epoch=Epoch(1), positions=(at(3), at(5)))
    certificate = ended.links[0].certificate
    ended = replace(
        ended, links=(replace(ended.links[0], certificate=replace(certificate, marks={"s": 15, "t": 3, "u": 7})),)
    )
    left = replace(certificate, end=Index(4), marks={"s": 14, "t": 3}, link_hash=b"4" * 32)
    assert chain.given_up_from(chain.abandoned(ended, Epoch(1), left, "a record of s, all of u", 9)) == {
        "s": 15,
        "u": 0,
    }


def sealed_by_one(world, *, epoch, positions):
    """The document after link `epoch` was sealed by b's answer alone, which knows the first of these to be committed."""
    link = world.document.link(epoch)
    answer = SealAnswer(Wholeness.WHOLE, world.members[link.group, "b"].incarnation, positions)
    certificate = seal.decide(link, point_before(world.document, epoch), {"b": answer}, now_ms=7)
    return chain.sealed(chain.closing(world.document, epoch), epoch, certificate)


def test_a_source_of_which_all_was_given_up_has_no_mark_in_a_later_link(world):
    world.document = sealed_by_one(world, epoch=Epoch(1), positions=(at(3), at(5)))
    send_call(world, token=1).finish()
    ended = sealed_by_one(world, epoch=Epoch(2), positions=(START,))
    ended = replace(
        ended, links=tuple(replace(one, certificate=replace(one.certificate, marks_on_two={})) for one in ended.links)
    )
    nothing = replace(ended.links[0].certificate, end=Index(0), marks={})
    assert chain.abandoned(ended, Epoch(1), nothing, "all", 9).links[1].certificate.marks == {}


def test_what_two_members_hold_of_a_later_link_counts_also_where_it_began_with_what_was_given_up(world):
    world.document = sealed_by_one(world, epoch=Epoch(1), positions=(at(5),))
    send_call(world, token=1).finish()
    ended = sealed_by_one(world, epoch=Epoch(2), positions=(at(6),))
    assert ended.links[1].marks_on_two == {"s": 15}
    left = SealAnswer(Wholeness.WHOLE, world.members["g1", "b"].incarnation, (at(4),))
    certificate = seal.given_up(ended.links[0], point_before(ended, Epoch(1)), [left], now_ms=9)
    later = chain.abandoned(ended, Epoch(1), certificate, "one record", 9).links[1]
    assert (later.marks_on_two, later.certificate.marks_on_two) == ({"s": 14}, {"s": 16})


@pytest.mark.parametrize(
    ("positions", "left"), [((START,), 14), ((START, at(6)), 16), ((at(5),), 15), ((START, at(5)), 14)]
)
def test_what_was_given_up_is_not_taken_for_a_resend_in_a_later_link(world, positions, left):
    """The second link has nothing of its own, more, as much on two members, or as much on one."""
    world.document = sealed_by_one(world, epoch=Epoch(1), positions=(at(3), at(5)))
    send_call(world, token=1).finish()
    ended = sealed_by_one(world, epoch=Epoch(2), positions=positions)
    assert point_before(ended, Epoch(3)).marks == {"s": max(15, left)}
    certificate = replace(ended.links[0].certificate, end=Index(4), marks={"s": 14}, link_hash=b"4" * 32)
    given_up = chain.abandoned(ended, Epoch(1), certificate, "one record", 9)
    invariants.check_change(ended, given_up)
    assert point_before(given_up, Epoch(3)).marks == {"s": left}


def test_h22_a_cursor_beyond_the_end_counts_as_the_end(world):
    world.append(Epoch(1), 2)
    send_call(world, token=1, failed_epoch=1).finish()
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", 7), told("b", 3), read(world))
    assert trace.orders == [f"write {world.version}: s has read link 1 to its end 1"]
    assert trace.document.subscriptions[0].consume_list == (2,)


def test_h23_no_member_hears_of_a_link_before_it_is_listed(world):
    for trace in (sending(token=0), sending(failed_epoch=1)):
        trace.tell(read(world))
        assert not any(isinstance(effect, SendOpen) and effect.link.epoch > 1 for effect in trace.effects)
    trace.tell(ChainWritten(ChainVersion(4)), whole(world, "b", at(3)), SealFailed("a", DOWN))
    assert not any(isinstance(effect, SendOpen) for effect in trace.effects)


def test_h24_where_no_group_is_left_the_end_is_recorded_all_the_same():
    world = World(groups=("g1",))
    with_subscription(world)
    send_call(world).finish()
    world.append(Epoch(1), 2)
    world.kill(("g1", "a"))
    answer = send_call(world, token=1, failed_epoch=1).finish()
    assert isinstance(answer, Wait)
    assert (world.document.links[0].end, world.document.send_list) == (1, ())
    assert "g1" in answer.reasons


def test_another_incarnation_costs_the_link_at_once(world):
    trace = sending().tell(read(world), OpenFailed("a", WrongIncarnation("another process")))
    assert trace.orders == ["write 3: closing link 1"]


def test_an_older_token_is_refused_and_only_the_first_in_line_gets_one(world):
    world.document = chain.with_sender(world.document, "node-2")
    assert sending(token=1).tell(read(world)).orders == ["refused fenced"]
    assert sending(token=3).tell(read(world)).orders == [f"wake after {acquire_send.OLDER_PAUSE_MS} ms"]
    trace = sending(token=0).tell(read(world), ElectionSeen("node-2"))
    assert trace.orders == ["refused not-elected"]
    assert isinstance(trace.effects[0].result.error, NotElected)


def test_of_readers_too_only_the_first_in_line_gets_a_token(world):
    trace = reading(token=0).tell(read(world), ElectionSeen("node-2"))
    assert trace.orders == ["refused not-elected"]
    trace = reading(token=0).tell(read(world), ElectionSeen(None))
    assert trace.orders == ["refused not-elected"]
    trace = reading(token=0).tell(read(world), ElectionSeen("node-1"))
    assert trace.orders == ["write 3: reader node-1 of s elected token=1"]


def test_who_names_no_election_node_is_not_elected_where_nobody_stands(world):
    """A reader of no name even seemed to have been given its token before: 0, which is none."""
    for begun, step in (
        (acquire_send.start(SendRequest("")), acquire_send.step),
        (acquire_read.start(ReadRequest("s", "")), acquire_read.step),
    ):
        assert Trace(begun, step).tell(read(world), ElectionSeen("")).orders == ["refused not-elected"]


def test_h4_who_was_deposed_by_its_own_clock_gets_a_new_token_though_its_node_is_still_first(world):
    assert world.document.sender_node == "node-1"
    trace = sending(token=0).tell(read(world), ElectionSeen("node-1"))
    assert trace.orders == ["write 3: sender node-1 elected token=2"]


def test_a_group_that_couldnt_be_opened_isnt_tried_again_in_the_same_call():
    world = World()
    for group in ("g1", "g2", "g3"):
        world.kill((group, "b"))  # all of them still registered
    answer = send_call(world).finish()
    assert isinstance(answer, Wait)
    assert set(answer.reasons) == {"g1", "g2", "g3"}


def test_the_only_group_isnt_tried_again_by_a_call_that_couldnt_open_it_though_its_members_are_fine():
    """It would go round and round: each time both tell at once that they hold nothing."""
    world = World(groups=("g1",))
    send_call(world).finish()
    trace = sending().tell(read(world), OpenFailed("a", DeadlineOver("no answer")), ChainWritten(ChainVersion(4)))
    trace.tell(whole(world, "a", START), whole(world, "b", START))
    assert trace.orders == ["write 4: link 1 sealed at 0 whole=True answered=g1-a-disk1#1,g1-b-disk1#1"]
    assert trace.tell(ChainWritten(ChainVersion(5))).orders == ["wait g1: g1-a: no answer"]


def test_a_group_that_was_tried_in_vain_is_neither_left_on_the_list_nor_brought_back_by_that_call():
    world = World()
    tried = {"g1": "no answer", "g2": "its disk is full"}
    for send_list in (("g1", "g2", "g3"), ()):
        before = replace(world.document, send_list=send_list)
        listed = chain.next_link(before, world.registry(), avoid=tried, now_ms=0)
        assert (listed.last_link.group, listed.send_list) == ("g3", ("g3",))
        with pytest.raises(Waiting) as waiting:
            chain.next_link(before, world.registry(), avoid=tried | {"g3": "gone"}, now_ms=0)
        assert waiting.value.details["reasons"] == tried | {"g3": "gone"}
    assert chain.obstacles(world.document, Registry(), {}) == {"any group": "no member of it was ever started"}


def test_a_queue_begins_with_the_groups_that_it_is_given():
    made = World().document
    given = replace(made.settings, groups=("g3", "g1"))
    for settings, send_list in ((made.settings, ("g1", "g2")), (given, ("g3", "g1"))):
        document = chain.created(
            cluster="c", queue_id=made.queue_id, name="q", settings=settings, groups=("g1", "g2"), now_ms=0
        )
        assert document.send_list == send_list


def test_the_end_of_a_lost_link_that_is_found_leaves_its_group_where_it_has_come_back_to(world):
    lost = chain.lost(chain.closing(world.document, Epoch(1)), Epoch(1))
    later = chain.readmitted(chain.next_link(lost, world.registry(), avoid={}, now_ms=0), "g1")
    answer = SealAnswer(Wholeness.WHOLE, world.members["g1", "b"].incarnation, (at(2),))
    certificate = seal.decide(later.links[0], point_before(later, Epoch(1)), {"b": answer}, now_ms=7)
    assert chain.sealed(later, Epoch(1), certificate).send_list == later.send_list == ("g2", "g3", "g1")


def test_the_first_call_of_a_reader(world):
    trace = reading(token=0).tell(read(world), ElectionSeen("node-1"), ChainWritten(ChainVersion(4)))
    trace.tell(SessionsSeen(world.registry()), told("a"))
    trace.tell(told("b"))
    assert trace.lines == [
        "read",
        "  ChainRead",
        "election",
        "  ElectionSeen",
        "write 3: reader node-1 of s elected token=1",
        "  ChainWritten",
        "sessions of g1",
        "  SessionsSeen",
        "tell g1-a link=1 generation=1 token=1",
        "tell g1-b link=1 generation=1 token=1",
        "  ReaderTold",
        "  ReaderTold",
        "read",
    ]
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    assert _granted(trace, world, 4) == ["grant link=1 index=0 token=1"]
    # The answer was lost: the same node gets the same token. So does nobody else, and nobody with an older one.
    assert reading(token=0).tell(read(world), ElectionSeen("node-1")).orders == ["sessions of g1"]
    world.document = subscriptions.with_reader(world.document, "s", "node-2")
    assert reading(token=1).tell(read(world)).orders == ["refused fenced"]
    assert reading(token=3).tell(read(world)).orders == [f"wake after {acquire_read.OLDER_PAUSE_MS} ms"]


def test_who_has_nothing_left_to_read_is_told_so_without_asking_anybody(world):
    close_call(world, 1).finish()  # it was empty
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    assert reading().tell(read(world)).orders == ["grant link=None index=0 token=1"]


def test_a_head_that_has_ended_is_read_on_and_left_only_at_its_end(world):
    for _ in range(3):
        world.append(Epoch(1), 2)
    close_call(world, 1).finish()
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    begun = trace.state
    trace.tell(told("a", 2), told("b", 2))
    assert _granted(trace, world) == ["grant link=1 index=2 token=1"]
    trace.state = begun
    trace.tell(told("a", 3), told("b", 3), read(world))
    assert trace.orders == [f"write {world.version}: s has read link 1 to its end 3"]
    trace.tell(ChainWritten(ChainVersion(world.version + 1)))
    assert trace.orders == ["grant link=None index=0 token=1"]


def test_a_member_that_can_t_be_told_keeps_nobody_at_a_link_s_end(world):
    """Its disk hangs, and the other one has it that all was read: who came there was told to both, and nobody before it is served."""
    for _ in range(3):
        world.append(Epoch(1), 2)
    close_call(world, 1).finish()
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    asked = reading().tell(read(world), SessionsSeen(world.registry())).state

    def orders(*answers):
        trace = reading()
        trace.state = asked
        trace.tell(*answers, ReaderNotTold("b", DOWN), SessionsSeen(world.registry()))
        return (trace.tell(read(world)) if trace.orders == ["read"] else trace).orders

    assert orders(told("a", 3)) == [f"write {world.version}: s has read link 1 to its end 3"]
    for unread in (told("a", 2), told("a"), told("a", 3, is_stale=True)):
        assert orders(unread)[0].startswith("wait g1-b: it is registered, but can't be told who reads")
    # One that was sought there says nothing of who still reads.
    (one,) = world.document.subscriptions
    world.document = replace(
        world.document, subscriptions=(replace(one, position_epoch=Epoch(1), position_index=Index(3)),)
    )
    asked = reading().tell(read(world), SessionsSeen(world.registry())).state
    assert orders(told("a"))[0].startswith("wait g1-b")


def test_a_link_of_whose_members_none_is_registered_is_waited_for(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(World(groups=()).registry()))
    assert trace.orders[0].startswith("wait g1: no member of g1 is registered")
    # Who waits is told its token all the same, be it new or not: one that reads would take another for a newer reader's.
    trace = reading(token=0).tell(read(world), ElectionSeen("node-1"))
    assert trace.tell(SessionsSeen(World(groups=()).registry())).effects[0].result.token == 1
    world.document = replace(
        world.document, subscriptions=(replace(world.document.subscriptions[0], reader_node="old"),)
    )
    trace = reading(token=0).tell(read(world), ElectionSeen("node-1"), ChainWritten(ChainVersion(4)))
    assert trace.tell(SessionsSeen(World(groups=()).registry())).effects[0].result.token == 2


def test_only_who_can_t_be_told_is_waited_for_not_who_has_nothing_beside_him(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(ReaderNotTold("a", DOWN), ReaderNotTold("b", UnknownLink("it has nothing of it")))
    world.kill(("g1", "a"))
    world.expire(("g1", "a"))
    trace.tell(SessionsSeen(world.registry()))
    assert trace.orders[0].startswith("wait g1: no registered member of g1 has sound cursors of link 1")


def test_h8_every_registered_member_is_told_who_reads(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    assert trace.orders == ["tell g1-a link=1 generation=1 token=1", "tell g1-b link=1 generation=1 token=1"]
    is_down = trace.tell(told("a", 4), ReaderNotTold("b", DOWN)).state
    assert trace.orders == ["sessions of g1"]
    trace.tell(SessionsSeen(world.registry()))
    assert trace.orders[0].startswith("wait g1-b: it is registered, but can't be told who reads")
    trace.state = is_down
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))
    trace.tell(SessionsSeen(world.registry()))
    assert trace.tell(read(world)).orders == [_note(world, "b")]


def test_a_member_whose_disk_failed_keeps_no_reader_waiting_and_is_noted_as_stale(world):
    """It remembers who reads, as long as its process lives; what it has of cursors is older than the other one's."""
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", 4), ReaderNotTold("b", StaleCursor("its disk failed")))
    assert trace.tell(read(world)).orders == [_note(world, "b")]


def test_a_blank_disk_has_no_cursors_to_be_stale(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", 4), ReaderNotTold("b", UnknownLink("it has nothing of it")))
    assert _granted(trace, world) == ["grant link=1 index=4 token=1"]


def test_a_member_that_is_back_when_it_has_been_noted_is_told_who_reads_and_waited_for(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", 4), ReaderNotTold("b", DOWN))
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))
    trace.tell(SessionsSeen(world.registry()))
    assert trace.tell(read(world)).orders == [_note(world, "b")]
    world.restart(("g1", "b"))
    trace.tell(ChainWritten(ChainVersion(world.version + 1)), SessionsSeen(world.registry()))
    assert trace.orders == ["tell g1-a link=1 generation=1 token=1", "tell g1-b link=1 generation=1 token=1"]
    assert trace.tell(told("a", 4)).orders == []
    trace.tell(told("b", 2))
    assert _granted(trace, world, world.version + 1) == ["grant link=1 index=4 token=1"]


@pytest.mark.parametrize("error", [OlderVersion("older"), Fenced("fenced"), OlderGeneration("sought")])
def test_h8_a_member_that_knows_of_a_newer_reader_or_chain_makes_it_read_again(world, error):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", 4), ReaderNotTold("b", error))
    assert trace.orders == [f"wake after {acquire_read.OLDER_PAUSE_MS} ms"]


def _note(world, gone):
    return f"write {world.version}: {gone} of g1 may lack cursors of s in link 1: they are stale"


def _granted(trace, world, version=None):
    """What is ordered once the chain was read again, and found as it was."""
    assert trace.orders == ["read"]
    return trace.tell(replace(read(world), version=ChainVersion(version or world.version))).orders


def test_h7_nobody_starts_where_one_member_alone_has_the_cursor_before_the_absent_one_is_noted_as_stale(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    begun = trace.state
    trace.tell(told("a", 4))
    assert trace.tell(read(world)).orders == [_note(world, "b")]
    assert trace.document.stale_note(Epoch(1), "b") is not None
    trace.tell(ChainWritten(ChainVersion(world.version + 1)), SessionsSeen(world.registry()))
    trace.tell(told("a", 4))
    assert _granted(trace, world, world.version + 1) == ["grant link=1 index=4 token=1"]
    trace.state = begun  # from where everybody starts it needs none
    trace.tell(told("a"))
    assert _granted(trace, world) == ["grant link=1 index=0 token=1"]


def test_h7_a_note_that_was_made_meanwhile_or_wasnt_seen_at_first_counts(world):
    """Read from a server that is behind, or before the only member that had the commit went: the other one has no cursor."""
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    world.kill(("g1", "a"))
    world.expire(("g1", "a"))
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("b"))
    noted = subscriptions.with_stale_cursors(world.document, Epoch(1), "b", None)
    now = replace(read(world), document=noted, version=ChainVersion(world.version + 1))
    assert trace.tell(now).orders == ["read"]
    trace.tell(now, SessionsSeen(world.registry()), told("b"))
    assert trace.orders[0].startswith("wait g1: no registered member of g1 has sound cursors of link 1")


def test_h7_a_note_that_stands_is_written_again_so_that_nothing_late_takes_it_back(world):
    document = subscriptions.with_reader(world.document, "s", "node-1")
    world.document = subscriptions.with_stale_cursors(document, Epoch(1), "b", None)
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", 4), told("b", 2))
    assert trace.tell(read(world)).orders == [_note(world, "b")]
    assert trace.document == world.document
    trace.tell(ChainWritten(ChainVersion(world.version + 1)), SessionsSeen(world.registry()))
    trace.tell(told("a", 4), told("b", 2))
    assert _granted(trace, world, world.version + 1) == ["grant link=1 index=4 token=1"]


def test_h7_a_note_from_before_a_seek_says_nothing_of_the_subscription_that_was_sought(world):
    """Of two subscriptions only the other one may have commits that this member missed (seed 77335)."""
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "t", position, 0)
    document = subscriptions.with_stale_cursors(document, Epoch(1), "b", None)
    document = subscriptions.sought(document, "s", position)
    world.document = subscriptions.with_reader(document, "s", "node-1")
    assert world.document.stale_note(Epoch(1), "b") is not None
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", is_stale=True), told("b"))
    assert _granted(trace, world) == ["grant link=1 index=0 token=1"]


def test_a_note_for_a_reader_in_whose_place_another_was_elected_is_refused(world):
    """A member that stood still found a commit late, and its peer away: it was answered after the next reader had been granted a place."""
    for node in ("node-1", "node-2"):
        world.document = subscriptions.with_reader(world.document, "s", node)
    (whose,) = (one.whose for one in world.document.subscriptions)
    with pytest.raises(Fenced, match="a newer reader was elected"):
        subscriptions.with_stale_cursors(world.document, Epoch(1), "b", whose, Token(1))
    for token in (Token(2), Token(0)):  # 0: a member of an earlier version doesn't say
        noted = subscriptions.with_stale_cursors(world.document, Epoch(1), "b", whose, token)
        assert noted.stale_note(Epoch(1), "b") is not None
    position = subscriptions.located(world.document, "earliest", None)
    others = subscriptions.created(world.document, "t", position, 0)
    for number in range(3):
        others = subscriptions.with_reader(others, "t", f"node-{number}")
    assert (
        subscriptions.with_stale_cursors(others, Epoch(1), "b", whose, Token(2)).stale_note(Epoch(1), "b") is not None
    )


def test_a_note_of_a_link_or_for_somebody_that_a_chain_hasn_t_come_to_is_refused(world):
    """ZooKeeper was set back: nobody would have kept it, and the commit was answered with one copy."""
    (one,) = world.document.subscriptions
    for epoch, subscription_id in ((world.document.next_epoch, one.subscription_id), (Epoch(1), SubscriptionId(2))):
        with pytest.raises(ChainSetBack, match="it is an old one"):
            subscriptions.with_stale_cursors(world.document, epoch, "b", (subscription_id, one.generation))


def test_a_subscription_that_an_older_server_doesnt_know_is_looked_for_in_the_newest_chain(world):
    unknown = replace(read(world), document=replace(world.document, subscriptions=()))
    trace = reading(token=0).tell(unknown)
    assert trace.orders == ["read the newest"]
    missing = trace.state
    trace.tell(read(world))
    assert trace.orders == ["election"]
    trace.state = missing
    trace.tell(unknown)
    assert trace.orders == ["refused unknown-subscription"]


def test_who_was_led_on_meanwhile_does_not_start_in_the_next_link_where_it_was_in_the_last(world):
    """The same reader asked twice; its first grant was good, and by the second answer it has read the link, which was reported."""
    world.append(Epoch(1), 2)
    world.append(Epoch(1), 2)
    close_call(world, 1).finish()
    send_call(world).finish()
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()), told("a", 1), told("b", 1))
    assert trace.orders == ["read"]
    led_on = subscriptions.drained(world.document, *world.document.subscription("s").whose, Epoch(1))
    assert trace.tell(ChainRead(led_on, ChainVersion(9), world.registry())).orders == ["read"]


def test_h7_a_note_of_another_link_says_nothing_of_this_one(world):
    """The member that wasn't told may have taken an earlier reader's commit here, whatever is noted of it there."""
    world.append(Epoch(1), 2)
    close_call(world, 1).finish()
    send_call(world).finish()
    document = subscriptions.with_reader(world.document, "s", "node-1")
    world.document = subscriptions.with_stale_cursors(document, Epoch(2), "b", None)
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a"), ReaderNotTold("b", UnknownLink("it has nothing of it")))
    assert trace.orders == ["read"]
    others = chain.with_sender(world.document, "node-3")
    assert trace.tell(ChainRead(others, ChainVersion(9), world.registry())).orders == ["read"]


def test_h7_stale_cursors_dont_count(world):
    document = subscriptions.with_reader(world.document, "s", "node-1")
    world.document = subscriptions.with_stale_cursors(document, Epoch(1), "b", None)
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    asked = trace.state
    trace.tell(told("a", 4), told("b", 9), read(world))
    trace.tell(ChainWritten(ChainVersion(world.version + 1)), SessionsSeen(world.registry()))
    trace.tell(told("a", 4), told("b", 9))
    assert _granted(trace, world, world.version + 1) == ["grant link=1 index=4 token=1"]
    trace.state = asked
    trace.tell(told("a", 4, is_stale=True), told("b", 9))
    assert trace.orders[0].startswith("wait g1: no registered member of g1 has sound cursors of link 1")


def test_what_others_read_meanwhile_holds_up_no_reader(world):
    """Of 24 that came to a link's end at once, each asked both members again with each of the others' writes."""
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "t", position, 0)
    before = world.document = subscriptions.with_reader(document, "s", "node-1")
    both = told("a", 3), told("b", 3)

    def orders(after, *answers):
        world.document = before
        trace = reading().tell(read(world), SessionsSeen(world.registry())).tell(*(answers or both))
        assert trace.orders == ["read"]
        return trace.tell(ChainRead(after, ChainVersion(world.version + 1), world.registry())).orders

    others = subscriptions.with_reader(before, "t", "node-2")
    assert orders(others) == ["grant link=1 index=3 token=1"]
    assert orders(chain.with_sender(others, "node-3")) == ["grant link=1 index=3 token=1"]
    assert orders(subscriptions.with_reader(before, "s", "node-3")) == ["read"]
    assert orders(subscriptions.sought(before, "s", position)) == ["read"]
    assert orders(subscriptions.deleted(before, "s")) == ["read"]
    assert orders(chain.deleted(before)) == ["read"]
    assert orders(chain.closing(before, Epoch(1))) == ["read"]
    assert orders(subscriptions.with_stale_cursors(others, Epoch(1), "b", None)) == ["read"]
    # One that wasn't told, or whose cursors don't count, may have taken a commit of an earlier reader meanwhile.
    assert orders(others, both[0], ReaderNotTold("b", UnknownLink("it has nothing of it"))) == ["read"]
    assert orders(others, both[0], told("b", 3, is_stale=True)) == ["read"]


def test_what_others_write_meanwhile_holds_up_no_reader_of_a_link_one_of_whose_members_is_away(world):
    """Each of them has to be noted there, and each note had all others tell the other member again."""
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "t", position, 0)
    before = world.document = subscriptions.with_reader(document, "s", "node-1")
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))
    s, t = (one.whose for one in before.subscriptions)

    def noted(document, member="b", whose=s):
        return subscriptions.with_stale_cursors(document, Epoch(1), member, whose)

    def read_as(document, number):
        return ChainRead(document, ChainVersion(number), world.registry())

    def writes(after):
        trace = reading().tell(read(world), SessionsSeen(world.registry()), told("a", 4))
        assert trace.orders == ["read"]
        return trace.tell(read_as(after, 9)).orders[0].startswith("write 9: b of g1 may lack cursors of s")

    others = noted(subscriptions.with_reader(before, "t", "node-2"), whose=t)
    assert writes(others)
    for after in (
        subscriptions.with_reader(before, "s", "node-3"),
        subscriptions.sought(before, "s", position),
        subscriptions.deleted(before, "s"),
        chain.closing(before, Epoch(1)),
        noted(others, "a"),
        noted(others),
    ):
        assert not writes(after)

    def orders(after):
        trace = reading().tell(read(world), SessionsSeen(world.registry()), told("a", 4), read_as(before, 8))
        trace.tell(ChainWritten(ChainVersion(9)), SessionsSeen(world.registry()), told("a", 4))
        assert trace.orders == ["read"]
        return trace.tell(read_as(after, 10)).orders

    assert orders(noted(others)) == ["grant link=1 index=4 token=1"]
    for after in (others, noted(noted(others), "a"), subscriptions.with_reader(noted(others), "s", "node-3")):
        assert orders(after) == ["read"]


def test_what_others_write_meanwhile_keeps_no_reader_at_a_link_s_end(world):
    """Nor has members told again. What is its own, or may have brought an earlier reader's commit, has all looked at anew."""
    world.append(Epoch(1), 2)
    close_call(world, 1).finish()
    position = subscriptions.located(world.document, "earliest", None)
    document = subscriptions.created(world.document, "t", position, 0)
    before = world.document = subscriptions.with_reader(document, "s", "node-1")
    both = told("a", 1), told("b", 1)

    def orders(after, *answers):
        world.document = before
        trace = reading().tell(read(world), SessionsSeen(world.registry())).tell(*(answers or both))
        assert trace.orders == ["read"]
        trace.tell(ChainRead(after, ChainVersion(9), world.registry()))
        return trace.orders, str(trace.state.phase)

    others = subscriptions.with_reader(before, "t", "node-2")
    assert orders(others) == (["write 9: s has read link 1 to its end 1"], "leaving")
    for after in (
        subscriptions.with_reader(before, "s", "node-3"),
        subscriptions.sought(before, "s", position),
        subscriptions.deleted(before, "s"),
        subscriptions.with_stale_cursors(others, Epoch(1), "b", None),
        subscriptions.drained(others, *before.subscription("s").whose, Epoch(1)),
    ):
        assert orders(after) == (["read"], "reading")
    assert orders(others, both[0], told("b", 1, is_stale=True)) == (["read"], "reading")
    trace = reading().tell(read(world), SessionsSeen(world.registry())).tell(*both)
    for _ in range(acquire_read.MAX_ROUNDS):
        trace.tell(ChainRead(others, ChainVersion(9), world.registry()), ChainConflict())
        assert (trace.orders == ["read"]) is (trace.state.rounds < acquire_read.MAX_ROUNDS)
    assert trace.orders == ["wait chain: it keeps changing"]


def test_h7_a_cursor_that_one_member_has_is_passed_on_before_anybody_starts_there(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    told_all = trace.state
    trace.tell(told("a", 3, by=0), told("b", 3, by=0))  # an earlier reader's, by all that is known
    assert trace.orders == [f"tell g1-{place} link=1 generation=1 token=1 cursor=3" for place in "ab"]
    trace.tell(told("a", 3), told("b", 3))
    assert _granted(trace, world) == ["grant link=1 index=3 token=1"]
    trace.state = told_all
    trace.tell(told("a"), told("b", 3))
    assert trace.orders == ["tell g1-a link=1 generation=1 token=1 cursor=3"]
    passing = trace.state
    trace.tell(told("a", 3))
    assert _granted(trace, world) == ["grant link=1 index=3 token=1"]
    trace.state = passing  # a member of an older version keeps what it had: no reason to ask for ever
    trace.tell(told("a"))
    assert _granted(trace, world) == ["grant link=1 index=3 token=1"]
    trace.state = passing
    trace.tell(ReaderNotTold("a", DOWN), SessionsSeen(world.registry()))
    assert trace.orders[0].startswith("wait g1-a: it is registered, but can't be told")
    trace.state = passing
    world.kill(("g1", "a"))
    world.expire(("g1", "a"))
    trace.tell(ReaderNotTold("a", DOWN), SessionsSeen(world.registry()))
    assert trace.tell(read(world)).orders == [_note(world, "a")]


def test_what_was_passed_on_is_not_passed_on_again_where_the_one_member_is_of_before_and_the_other_goes(world):
    world.document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = reading().tell(read(world), SessionsSeen(world.registry()))
    trace.tell(told("a", 3, by=0), ReaderNotTold("b", DOWN))
    world.kill(("g1", "b"))
    world.expire(("g1", "b"))
    trace.tell(SessionsSeen(world.registry()))
    assert trace.orders == ["tell g1-a link=1 generation=1 token=1 cursor=3"]
    trace.tell(told("a", 3, by=0), SessionsSeen(world.registry()))
    assert trace.tell(read(world)).orders == [_note(world, "b")]


def test_events_that_nothing_asked_for_are_bugs(world):
    with pytest.raises(InvariantBroken):
        sending().tell(read(world), ChainWritten(ChainVersion(9)))
    with pytest.raises(InvariantBroken):
        reading().tell(SessionsSeen(world.registry()))


def test_in_async_two_partial_answers_end_the_link_and_the_certificate_says_so():
    world = World(Durability.ASYNC)
    send_call(world).finish()
    for place in ("a", "b"):
        world.restart(("g1", place))
    trace = sending(failed_epoch=1).tell(read(world), ChainWritten(ChainVersion(4)))
    trace.tell(whole(world, "a", at(2)), whole(world, "b", at(1), at(2), at(3)))
    certificate = trace.document.links[0].certificate
    assert (certificate.end, certificate.is_whole) == (3, False)
    assert certificate.answered == tuple(Incarnation(f"g1-{place}-disk1", 2) for place in ("a", "b"))


@pytest.mark.parametrize(
    ("begun", "answer"),
    [
        (sending, "wait g3-b: it has link 2"),
        (reading, "wait g3-b: it has link 2"),
        (lambda: sending(token=0), "refused chain-set-back"),  # before a token makes the chain look newer than it is
        (lambda: reading(token=0), "refused chain-set-back"),
        (closing, "wait g3-b: it has link 2"),
    ],
)
def test_nothing_is_sent_read_or_closed_by_a_chain_that_is_older_than_a_disk(world, begun, answer):
    registry = world.registry()
    group = registry.groups["g3"]
    member = replace(group.members["b"], set_back=(world.document.queue_id,), problem="it has link 2")
    changed = {**registry.groups, "g3": replace(group, members={**group.members, "b": member})}
    document = subscriptions.with_reader(world.document, "s", "node-1")
    trace = begun().tell(ChainRead(document, world.version, Registry(changed)))
    assert trace.orders == [answer]


@pytest.mark.parametrize("begun", [sending, reading])
def test_who_has_just_come_to_zookeeper_leaves_it_to_another_coordinator(world, begun):
    absent = {**world.registry().groups, "g3": GroupState("g3")}
    trace = begun(token=0).tell(ChainRead(world.document, world.version, Registry(absent, is_new=True)))
    assert trace.orders == ["refused unreachable"]
    trace = begun(token=0).tell(ChainRead(world.document, world.version, Registry(absent)))
    assert trace.orders == ["election"]


def test_a_member_whose_disk_knows_more_costs_no_group(world):
    trace = sending().tell(read(world), OpenFailed("a", ChainSetBack("its chain is older")))
    assert trace.orders == ["wait g1-a: its chain is older"]
