"""The broker's smaller cores: room on disk, retention, cursors, resync."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from seriatim.broker_group.core import cursors, disk, link_record, resync, setback
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.disk import Room
from seriatim.broker_group.core.link_record import LinkRecord, Role
from seriatim.broker_group.core.resync import Adopt, Copy, Drop, Holding, Lack, TakeCursors
from seriatim.broker_group.core.setback import KeptChain, SeenChain
from seriatim.protocol.chain import (
    Certificate,
    ChainDocument,
    ChainMember,
    Dropped,
    Durability,
    Link,
    LinkState,
    QueueSettings,
    StaleCursors,
    Subscription,
)
from seriatim.protocol.errors import Fenced, IncompatibleVersion, InvalidArgument, MemberBehind, OlderGeneration
from seriatim.protocol.hashing import EMPTY_HASH
from seriatim.protocol.names import (
    ChainVersion,
    Epoch,
    Generation,
    Incarnation,
    Index,
    MemberName,
    Offset,
    QueueId,
    SubscriptionId,
    Token,
)

QUEUE = QueueId(4)
HASH = b"h" * 32

# ---- room on disk


def test_a_disk_that_was_full_takes_records_again_only_with_a_quarter_more() -> None:
    room = disk.seen(Room(1000), 1200)
    assert not room.has_room
    room = disk.seen(room, 1251)
    assert room.has_room
    assert disk.seen(room, 1001).has_room
    assert not disk.seen(room, 1000).has_room
    assert disk.taken(room, 100).has_room
    assert not disk.taken(room, 126).has_room
    assert not disk.taken(disk.taken(room, 63), 63).has_room  # though nobody looked in between
    assert not disk.taken(disk.seen(Room(1000), 1200), 1).has_room


def test_resync_leaves_half_of_the_reserve() -> None:
    assert disk.has_room_to_copy(disk.seen(Room(1000), 501))
    assert not disk.has_room_to_copy(disk.seen(Room(1000), 500))


# ---- retention


def document(*links: Link, **changes) -> ChainDocument:
    dropped = Dropped(Epoch(1), Offset(0), EMPTY_HASH, {}, {})
    return replace(ChainDocument("c", QUEUE, "q", QueueSettings(), 0, dropped, links=links), **changes)


def test_only_what_lies_before_the_first_kept_link_is_dropped() -> None:
    kept = document(dropped=Dropped(Epoch(3), Offset(9), EMPTY_HASH, {}, {}))
    held = [Epoch(1), Epoch(2), Epoch(3), Epoch(9)]
    assert resync.droppable(kept, held) == (1, 2)
    assert resync.droppable(replace(kept, is_deleted=True), held) == tuple(held)


# ---- cursors


def cursor(generation: int = 1, token: int = 1, index: int | None = 5, by: int | None = None) -> CursorRecord:
    at = None if index is None else Index(index)
    last = token if by is None and at is not None else by or 0
    return CursorRecord(SubscriptionId(2), Generation(generation), Token(token), at, Token(last))


def commit(
    record: CursorRecord,
    generation: int,
    token: int,
    index: int,
    *,
    is_relayed: bool = False,
    is_limit_known: bool = True,
) -> CursorRecord:
    return cursors.committed(
        record,
        Generation(generation),
        Token(token),
        Index(index),
        is_relayed=is_relayed,
        limit=Index(10),
        is_limit_known=is_limit_known,
    )


def test_only_the_reader_that_was_told_moves_the_cursor_and_only_forward() -> None:
    assert [commit(cursor(), 1, 1, index).index for index in (8, 10)] == [8, 10]
    assert commit(cursor(), 1, 1, 3) == cursor()
    with pytest.raises(InvalidArgument):
        commit(cursor(), 1, 1, 11)
    for generation, token, error in ((1, 0, Fenced), (1, 2, Fenced), (2, 1, Fenced), (0, 9, OlderGeneration)):
        with pytest.raises(error):
            commit(cursor(), generation, token, 8)


def test_a_commit_beyond_what_a_member_can_know_is_no_user_s_mistake() -> None:
    assert commit(cursor(), 1, 1, 10, is_limit_known=False).index == 10
    with pytest.raises(MemberBehind):
        commit(cursor(), 1, 1, 11, is_limit_known=False)
    with pytest.raises(Fenced):
        commit(cursor(), 1, 2, 11, is_limit_known=False)


def test_a_relayed_commit_brings_the_newer_reader_along() -> None:
    assert commit(cursor(), 1, 2, 8, is_relayed=True) == cursor(1, 2, 8)
    assert commit(cursor(), 2, 3, 1, is_relayed=True) == cursor(2, 3, 1)
    assert commit(cursor(), 1, 1, 11, is_relayed=True).index == 11
    with pytest.raises(Fenced):
        commit(cursor(), 1, 0, 8, is_relayed=True)
    with pytest.raises(OlderGeneration):
        commit(cursor(2), 1, 9, 8, is_relayed=True)


def test_a_new_generation_starts_without_a_cursor() -> None:
    assert cursors.told(cursor(), Generation(1), Token(2)) == cursor(1, 2, by=1)
    assert cursors.told(cursor(), Generation(2), Token(3)) == cursor(2, 3, None)
    with pytest.raises(Fenced):
        cursors.told(cursor(token=4), Generation(1), Token(3))


def test_a_cursor_that_only_the_other_member_had_is_taken_over_and_never_takes_one_back() -> None:
    assert cursors.told(cursor(index=5), Generation(1), Token(2), Index(8)) == cursor(1, 2, 8)
    assert cursors.told(cursor(index=5), Generation(1), Token(2), Index(3)) == cursor(1, 2, 5, by=1)
    assert cursors.told(cursor(index=None), Generation(1), Token(2), Index(8)) == cursor(1, 2, 8)
    assert cursors.told(cursor(index=5), Generation(2), Token(2), Index(3)) == cursor(2, 2, 3)
    # Where it starts, of what both have, is its own: a link that ends there was read by it.
    assert cursors.told(cursor(index=5), Generation(1), Token(2), Index(5)) == cursor(1, 2, 5)


def test_what_an_earlier_reader_committed_on_one_member_alone_counts_no_more_once_the_next_one_has_committed() -> None:
    """That one was granted a place before it: it would be led past records, or the one behind it (invariant 7)."""
    left, now = cursor(1, 1, 50), cursor(1, 2, 30)
    assert cursors.further(left, now) == cursors.further(now, left) == now
    told = cursors.told(left, Generation(1), Token(2))
    assert commit(told, 1, 2, 8) == cursor(1, 2, 8)
    assert commit(left, 1, 2, 8, is_relayed=True) == cursor(1, 2, 8)
    # Its own is never moved back, by whomever it is repeated.
    assert commit(cursor(1, 2, 9), 1, 2, 8) == cursor(1, 2, 9)
    assert cursors.further(cursor(1, 2, 30), cursor(1, 3, 20, by=2)) == cursor(1, 3, 30, by=2)


@pytest.mark.parametrize(
    "told", [cursor(1, 2, None), cursors.decode(b"[2, 1, 2, null]"), cursors.decode(b"[2, 1, 2, null, 2]")]
)
def test_a_newer_reader_that_has_committed_nothing_takes_no_cursor_back(told: CursorRecord) -> None:
    """What was answered with one member only was lost on both, as soon as they told each other what they had (H7)."""
    answered = cursor(1, 2, 30, by=1)
    assert cursors.further(told, answered) == cursors.further(answered, told) == answered


def test_where_it_is_not_known_who_committed_the_further_cursor_counts() -> None:
    untold = cursor(1, 2, 30, by=0)
    assert cursors.further(untold, cursor(1, 1, 50)) == cursor(1, 2, 50, by=1)
    assert cursors.further(cursor(1, 2, 20), untold) == untold
    assert (
        cursors.further(cursor(1, 3, 20), untold) == cursors.further(untold, cursor(1, 3, 20)) == cursor(1, 3, 30, by=0)
    )


def test_an_end_that_an_earlier_reader_came_to_stays_that_one_s() -> None:
    """As told: else a member that alone has it would report it drained by who reads now, who hasn't come to it (invariant 7)."""
    there = SubscriptionId(2), Generation(1), Token(3), Index(9), Token(2)
    assert cursors.from_parts(*there, end=Index(9)) == cursor(1, 3, 9, by=2)


def test_a_cursor_s_record_is_read_as_it_was_written_also_an_earlier_version_s() -> None:
    for record in (cursor(), cursor(1, 3, 9, by=2), cursor(1, 3, 9, by=0), cursor(index=None)):
        assert cursors.decode(cursors.encode(record)) == record
    assert cursors.decode(b"[2, 1, 3, 9]") == cursor(1, 3, 9)
    assert cursors.decode(b"[2, 1, 3, 9, 3]") == cursor(1, 3, 9)


def test_an_earlier_version_starts_on_the_cursor_of_who_reads_now_or_on_one_of_its_like_at_a_link_s_end() -> None:
    """It reads four parts, and ended at each start by the fifth. Of a link that all have read nobody would write it anew."""

    def taken(index: int) -> CursorRecord:
        return cursors.from_parts(SubscriptionId(2), Generation(1), Token(3), Index(index), Token(0), end=Index(9))

    assert taken(8) == cursor(1, 3, 8, by=0)
    told = cursors.told(cursor(), Generation(1), Token(3), Index(5))
    for record in (
        cursor(),
        taken(9),
        commit(cursor(1, 3, by=1), 1, 3, 8),
        told,
        cursor(1, 3, None),
        CursorRecord(SubscriptionId(2)),
    ):
        assert len(json.loads(cursors.encode(record))) == 4


def test_the_further_cursor_of_the_newer_generation_counts() -> None:
    assert cursors.further(None, cursor()) == cursor()
    assert cursors.further(cursor(1, 1, 5), cursor(1, 2, 3, by=1)) == cursor(1, 2, 5, by=1)
    assert cursors.further(cursor(1, 1, None), cursor(1, 1, 3)) == cursor(1, 1, 3)
    assert cursors.further(cursor(1, 1, None), cursor(1, 2, None)) == cursor(1, 2, None)
    assert cursors.further(cursor(1, 1, 9), cursor(2, 1, None)) == cursor(2, 1, None)
    assert cursors.further(cursor(2, 1, None), cursor(1, 7, 9)) == cursor(2, 1, None)


def test_who_may_fetch_is_the_reader_that_was_told_a_newer_one_or_one_of_whom_nothing_was() -> None:
    for record in (None, cursor(1, 1), cursor(1, 2), cursor(0, 9)):
        cursors.check_reader(record, Generation(1), Token(2))
    with pytest.raises(Fenced):
        cursors.check_reader(cursor(1, 3), Generation(1), Token(2))
    with pytest.raises(OlderGeneration):
        cursors.check_reader(cursor(2, 1), Generation(1), Token(2))


def test_a_cursor_at_or_beyond_the_end_is_drained() -> None:
    assert [cursors.is_drained(cursor(index=index), Index(5)) for index in (4, 5, 6, None)] == [
        False,
        True,
        True,
        False,
    ]
    assert not cursors.is_drained(cursor(), None)


WHOSE = (SubscriptionId(1), Generation(1))


def test_what_is_written_is_read() -> None:
    for one in (cursor(), cursor(index=None)):
        assert cursors.decode(cursors.encode(one)) == one
    record = LinkRecord(
        QUEUE, Epoch(2), "q", Role.SLAVE, Durability.INTERVAL, 20, 100, Incarnation("d", 3), {"s": 2**64 - 1}, Token(4),
        ChainVersion(5), 6, True, False, Index(7), HASH, True, (),
    )  # fmt: skip
    assert link_record.decode(link_record.encode(record)) == record
    assert link_record.decode(link_record.encode(LinkRecord(QUEUE, Epoch(1)))) == LinkRecord(QUEUE, Epoch(1))


@pytest.mark.parametrize("newer", [{"of_two": 1}, {"durability": "quorum"}, {"role": "witness"}])
def test_a_record_of_a_newer_version_is_refused_in_a_line(newer) -> None:
    """A broker that is set back to an earlier version ended with a trace, and no word of what to do."""
    content = json.loads(link_record.encode(LinkRecord(QUEUE, Epoch(1)))) | newer
    with pytest.raises(IncompatibleVersion, match="start the version that wrote it, or a newer one"):
        link_record.decode(json.dumps(content).encode())


@pytest.mark.parametrize(("lacks", "has_cursors"), [((), True), (None, False), ((WHOSE,), False)])
def test_an_earlier_version_knows_all_or_nothing_of_what_is_missing(lacks, has_cursors) -> None:
    record = LinkRecord(QUEUE, Epoch(1), lacks=lacks)
    content = json.loads(link_record.encode(record))
    assert content["has_cursors"] is has_cursors
    assert ("lacks" in content) is bool(lacks)
    assert link_record.decode(link_record.encode(record)) == record
    assert [record.lacks_of(one) for one in (WHOSE, (WHOSE[0], Generation(2)))] == [lacks != (), lacks is None]


# ---- resync


def sealed(epoch: int, end: int, group: str = "g1", digest: bytes = HASH) -> Link:
    sides = [ChainMember(MemberName(group, name), Incarnation(name, 1)) for name in "ab"]
    certificate = Certificate(Index(end), (), Durability.SYNC, True, {}, {}, digest, None, 0)
    return Link(
        Epoch(epoch), group, sides[0], sides[1], LinkState.SEALED, Durability.SYNC, 0, Offset(0), {}, 0, certificate
    )


UNREAD = (Subscription(*WHOSE[:1], "s", WHOSE[1], Token(0), "", (Epoch(1),), Epoch(0), Index(0), 0),)


def held(epoch: int, end: int | None, next_index: int, digest: bytes | None = HASH, **changes) -> Holding:
    record = LinkRecord(
        QUEUE, Epoch(epoch), is_sealed=True, end=None if end is None else Index(end),
        end_hash=b"" if end is None else HASH, lacks=(),
    )  # fmt: skip
    return Holding(replace(record, **changes), Index(next_index), digest)


def plan(*links: Link, holding: tuple[Holding, ...] = (), **changes) -> tuple[resync.Action, ...]:
    return resync.plan(MemberName("g1", "a"), {QUEUE: document(*links, **changes)}, holding)


def test_a_member_that_has_all_is_in_sync() -> None:
    assert plan(sealed(1, 9), sealed(2, 9, group="g2"), holding=(held(1, 9, 9),)) == ()
    assert plan() == ()


def test_a_blank_member_learns_the_end_then_copies_then_takes_cursors() -> None:
    key = (QUEUE, Epoch(1))
    adopt = Adopt(*key, Index(9), HASH, is_abandoned=False)
    assert plan(sealed(1, 9)) == (adopt, Lack(*key, ()))
    assert plan(sealed(1, 9), subscriptions=UNREAD) == (adopt, Lack(*key, (WHOSE,)))
    assert plan(sealed(1, 9), holding=(held(1, None, 0),)) == (Adopt(*key, Index(9), HASH, is_abandoned=False),)
    assert plan(sealed(1, 9), holding=(held(1, 9, 0, None),)) == (Copy(*key, Index(0), Index(9)),)
    assert plan(sealed(1, 9), holding=(held(1, 9, 4, None),)) == (Copy(*key, Index(4), Index(9)),)
    assert plan(sealed(1, 9), holding=(held(1, 9, 4, None, lacks=None),), subscriptions=UNREAD) == (
        Copy(*key, Index(4), Index(9)),
        Lack(*key, (WHOSE,)),
    )
    lacking = (held(1, 9, 4, None, lacks=(WHOSE,)),)
    assert plan(sealed(1, 9), holding=lacking, subscriptions=UNREAD) == (Copy(*key, Index(4), Index(9)),)
    lacking = (held(1, 9, 9, lacks=(WHOSE,)),)
    assert plan(sealed(1, 9), holding=lacking, subscriptions=UNREAD) == (TakeCursors(*key, ("s",)),)


def test_what_is_missing_ends_with_a_seek_also_where_no_disk_has_it() -> None:
    """Found by reading: two members, each with a new disk, waited for each other's cursors, whatever people did."""
    key = (QUEUE, Epoch(1))
    lacking = held(1, 9, 9, lacks=(WHOSE, (SubscriptionId(2), Generation(1))))
    other = replace(UNREAD[0], subscription_id=SubscriptionId(2), name="t")
    sought = replace(UNREAD[0], generation=Generation(2))
    assert plan(sealed(1, 9), holding=(lacking,), subscriptions=(*UNREAD, other)) == (TakeCursors(*key, ("s", "t")),)
    left = Lack(*key, ((SubscriptionId(2), Generation(1)),))
    assert plan(sealed(1, 9), holding=(lacking,), subscriptions=(sought, other)) == (left,)
    assert plan(sealed(1, 9), holding=(lacking,), subscriptions=(sought,)) == (Lack(*key, ()),)
    # Who comes to the link when this disk knew whose are missing isn't among them.
    assert plan(sealed(1, 9), holding=(held(1, 9, 9, lacks=left.of),), subscriptions=(*UNREAD,)) == (Lack(*key, ()),)


def test_it_is_cut_to_the_certificate_never_to_the_peer() -> None:
    key = (QUEUE, Epoch(1))
    assert plan(sealed(1, 9), holding=(held(1, 9, 12),)) == (Adopt(*key, Index(9), HASH, is_abandoned=False),)
    other = b"x" * 32
    assert plan(sealed(1, 9), holding=(held(1, 9, 12, other),)) == (Copy(*key, Index(0), Index(9)),)
    assert plan(sealed(1, 9), holding=(held(1, 9, 9, other),)) == (Copy(*key, Index(0), Index(9)),)


def test_an_end_that_was_given_up_is_recorded_anew() -> None:
    key = (QUEUE, Epoch(1))
    assert plan(given_up(sealed(1, 9)), holding=(held(1, 9, 9),)) == (Adopt(*key, Index(9), HASH, is_abandoned=True),)
    tail = given_up(sealed(1, 4, digest=b"x" * 32))
    assert plan(tail, holding=(held(1, 9, 9, is_abandoned=True),)) == (
        Adopt(*key, Index(4), b"x" * 32, is_abandoned=True),
    )


def test_what_was_abandoned_is_kept_aside_uncut() -> None:
    assert plan(given_up(sealed(1, 9)), holding=(held(1, 9, 12, is_abandoned=True),)) == ()


def test_what_cant_be_read_is_left_alone() -> None:
    """Nothing is known of it, so nothing of it is copied, cut, or ended anew."""
    unreadable = replace(held(1, 9, 0, None), is_readable=False)
    for end in (8, 9):
        assert plan(sealed(1, end), sealed(2, 9), holding=(unreadable, held(2, 9, 9))) == ()


def test_links_without_an_end_are_left_alone_and_dropped_ones_go() -> None:
    lost = replace(sealed(2, 9), state=LinkState.LOST, certificate=None)
    dropped = Dropped(Epoch(2), Offset(9), EMPTY_HASH, {}, {})
    assert plan(lost, holding=(held(1, 9, 9), held(2, None, 5)), dropped=dropped) == (Drop(QUEUE, Epoch(1)),)
    # Of a queue that was deleted nothing is taken up again.
    assert plan(sealed(1, 9), sealed(2, 9), holding=(held(1, 9, 9),), is_deleted=True) == (Drop(QUEUE, Epoch(1)),)


def test_an_empty_link_that_neither_member_opened_needs_no_cursors_from_the_other() -> None:
    """Both would wait for the other's for ever: found by killing a whole cluster at once."""
    adopted = held(1, 0, 0, lacks=None, digest=EMPTY_HASH, end_hash=EMPTY_HASH)
    empty = sealed(1, 0, digest=EMPTY_HASH)
    assert plan(empty, holding=(adopted,)) == ()
    assert plan(empty, subscriptions=UNREAD) == (Adopt(QUEUE, Epoch(1), Index(0), EMPTY_HASH, is_abandoned=False),)
    assert unfinished(empty, holding=(adopted,), subscriptions=UNREAD, stale_cursors=(noted("b"),)) == ""


def noted(member: str) -> StaleCursors:
    return StaleCursors(Epoch(1), member, (WHOSE,))


def test_cursors_are_not_taken_from_a_member_that_missed_some() -> None:
    """H7: the only copy of a commit went with a disk; found by the simulator as a cursor that moved back."""
    lacking = (held(1, 9, 9, lacks=(WHOSE,)),)
    takes = (TakeCursors(QUEUE, Epoch(1), ("s",)),)
    assert plan(sealed(1, 9), holding=lacking, stale_cursors=(noted("a"),), subscriptions=UNREAD) == takes
    assert plan(sealed(1, 9), holding=lacking, stale_cursors=(noted("b"),), subscriptions=UNREAD) == ()
    others = replace(noted("b"), of=((SubscriptionId(2), Generation(1)),))  # what it missed is had here
    assert plan(sealed(1, 9), holding=lacking, stale_cursors=(others,), subscriptions=UNREAD) == takes
    both = (*UNREAD, replace(UNREAD[0], subscription_id=SubscriptionId(2), name="t"))
    lacking = (held(1, 9, 9, lacks=(WHOSE, both[1].whose)),)
    assert plan(sealed(1, 9), holding=lacking, stale_cursors=(others,), subscriptions=both) == ()


def unfinished(*links: Link, holding: tuple[Holding, ...] = (), start: int = 1, **changes) -> str:
    me = MemberName("g1", "a")
    documents = {QUEUE: document(*links, **changes)}
    return resync.unfinished(me, Incarnation("a", start), documents, holding, str).get(QUEUE, "")


def test_who_waits_for_an_end_or_for_cursors_is_not_in_sync() -> None:
    open_link = replace(sealed(1, 9), state=LinkState.OPEN, certificate=None)
    assert unfinished(open_link) == ""
    assert "isn't recorded yet" in unfinished(open_link, start=2)
    assert "isn't recorded yet" in unfinished(open_link, holding=(held(1, None, 9),))
    assert unfinished(open_link, holding=(held(1, None, 9, is_sealed=False),)) == ""
    assert unfinished(open_link, start=2, is_deleted=True) == ""
    assert unfinished(replace(open_link, state=LinkState.LOST), start=2) == ""
    assert unfinished(replace(open_link, group="g2"), start=2) == ""
    # Told of an end that the documents don't show yet.
    assert "isn't whole here" in unfinished(holding=(held(1, 9, 4, None),))
    assert unfinished(holding=(held(1, 9, 4, None, is_abandoned=True),)) == ""
    lacking, note = held(1, 9, 9, lacks=(WHOSE,)), (noted("b"),)
    lost = unfinished(sealed(1, 9), holding=(lacking,), stale_cursors=note, subscriptions=UNREAD)
    assert "the newest cursors are lost; seek s" in lost
    assert unfinished(sealed(1, 9), holding=(lacking,), stale_cursors=note) == ""
    assert unfinished(sealed(1, 9), holding=(lacking,), subscriptions=UNREAD) == ""  # the other one has them
    unread = resync.unfinished(MemberName("g1", "a"), Incarnation("a", 1), {}, (lacking,), str)
    assert unread == {}  # nothing is known of the queue yet
    sought = (replace(UNREAD[0], generation=Generation(2)),)
    assert unfinished(sealed(1, 9), holding=(lacking,), stale_cursors=note, subscriptions=sought) == ""


def test_a_queue_that_was_not_read_is_left_alone() -> None:
    assert resync.plan(MemberName("g1", "a"), {}, [held(1, 9, 3, None)]) == ()


# ---- ZooKeeper was set back


def known_more(holding: Holding, *links: Link, version: int = 9, **changes) -> str:
    """What a disk `a` knows more than a chain with these links, as g1-a says it; empty: nothing."""
    chain = document(*links, **{"next_epoch": Epoch(3), "sender_token": Token(4)} | changes)
    seen = {QUEUE: SeenChain(chain, ChainVersion(version))}
    found = setback.queues(MemberName("g1", "a"), "a", seen, [holding], {})
    assert all(found.values())
    return found.get(QUEUE, "")


def answered(link: Link) -> Link:
    return replace(link, certificate=replace(link.certificate, answered=(Incarnation("a", 1),)))


def given_up(link: Link) -> Link:
    return replace(link, certificate=replace(link.certificate, is_abandoned=True))


def unended(link: Link, state: LinkState) -> Link:
    return replace(link, state=state, certificate=None)


def opened(epoch: int, end: int | None, next_index: int, **changes) -> Holding:
    return held(
        epoch, end, next_index, **{"opened_start": 1, "token": Token(4), "chain_version": ChainVersion(9)} | changes
    )


def test_a_chain_that_explains_the_disk_is_the_newest() -> None:
    for chain in (
        answered(sealed(1, 9)),
        unended(sealed(1, 9), LinkState.OPEN),
        unended(sealed(1, 9), LinkState.LOST),
        sealed(2, 0, group="g2"),
    ):
        assert known_more(opened(1, 9, 9), chain) == ""
    assert known_more(opened(1, 9, 9)) == ""  # retention let it go
    assert known_more(opened(1, 9, 9, opened_start=0), answered(sealed(1, 9))) == ""  # copied to a new disk
    assert known_more(opened(1, None, 0), unended(sealed(1, 9), LinkState.OPENING)) == ""
    assert known_more(opened(1, None, 0), sealed(1, 0)) == ""  # closed before it was granted
    # A Seal of another group's link came to this address, which that one's member had before.
    assert known_more(opened(1, None, 0, opened_start=0), sealed(1, 9, group="g2")) == ""
    # Given up while this disk was away, the whole link or its tail: it is kept aside (H21).
    assert known_more(opened(1, None, 5), given_up(sealed(1, 0))) == ""
    assert known_more(opened(1, 9, 9), given_up(answered(sealed(1, 4, digest=b"x" * 32)))) == ""
    assert known_more(opened(7, 9, 9), is_deleted=True) == ""
    assert setback.queues(MemberName("g1", "a"), "a", {}, [opened(7, 9, 9)], {}) == {}  # not read


def test_a_copy_of_the_chain_that_is_newer_than_the_chain_shows_what_no_link_was_told() -> None:
    def found(version: int, **changes) -> dict[QueueId, str]:
        seen = {QUEUE: SeenChain(document(**changes), ChainVersion(version))}
        kept = {QUEUE: KeptChain(ChainVersion(9), "q", 0), QueueId(77): KeptChain(ChainVersion(9), "gone", 0)}
        return setback.queues(MemberName("g1", "a"), "a", seen, [], kept)

    assert found(8) == {QUEUE: "it keeps version 9 of the chain, which is at 8"}
    kept_sought = KeptChain(
        ChainVersion(9), "q", 0, {UNREAD[0].subscription_id: Generation(2), SubscriptionId(77): Generation(9)}
    )
    seen = {QUEUE: SeenChain(document(subscriptions=UNREAD), ChainVersion(12))}
    said = setback.queues(MemberName("g1", "a"), "a", seen, [], {QUEUE: kept_sought})[QUEUE]
    assert (
        "was sought to generation 2, in the chain to 1" in said
    )  # though others were elected by it, so that its version is beyond
    assert found(9) == found(10) == found(8, is_deleted=True) == {}
    as_sought = {QUEUE: replace(kept_sought, generations={UNREAD[0].subscription_id: Generation(1)})}
    assert setback.queues(MemberName("g1", "a"), "a", seen, [], as_sought) == {}


@pytest.mark.parametrize("is_deleted", [False, True])
def test_the_chain_of_another_queue_that_got_the_id_explains_nothing_h16(is_deleted: bool) -> None:
    """ZooKeeper had lost what counted them. An operator deleted it, and members let go of what they had of the one before."""

    def found(holding: Holding | None, kept: KeptChain | None, **changes) -> str:
        seen = {QUEUE: SeenChain(document(is_deleted=is_deleted, **changes), ChainVersion(9))}
        held_here = [] if holding is None else [holding]
        copies = {} if kept is None else {QUEUE: kept}
        return setback.queues(MemberName("g1", "a"), "a", seen, held_here, copies).get(QUEUE, "")

    for holding in (opened(1, 9, 9, queue="audit"), None):
        said = found(holding, KeptChain(ChainVersion(9), "audit", 0))
        assert said == "it keeps the chain of queue audit, under the id of queue q"
        said = found(holding, KeptChain(ChainVersion(9), "q", 5_000), created_at_ms=65_999)
        assert said == "it keeps the chain of the queue q that was made 60 s before the one that has its id"
    said = found(opened(1, 9, 9, queue="audit"), None, next_epoch=Epoch(2))
    assert said == "its link 1 is of queue audit, under the id of queue q"
    same = {"next_epoch": Epoch(2), "sender_token": Token(4)}
    assert found(opened(1, 9, 9, queue="q"), KeptChain(ChainVersion(9), "q", 0), **same) == ""
    for created_at_ms in (0, 5_000):  # 0: an OpenLink doesn't tell
        assert setback.another_queue("q", created_at_ms, KeptChain(ChainVersion(9), "q", 5_000), ()) == ""
    assert found(opened(1, 9, 9, queue=""), None, **same) == ""


@pytest.mark.parametrize(
    ("holding", "chain", "said"),
    [
        (opened(3, None, 0), answered(sealed(1, 9)), "it has link 3, the chain none after 2"),
        (
            opened(1, 9, 9, chain_version=ChainVersion(10)),
            answered(sealed(1, 9)),
            "version 10 of the chain, which is at 9",
        ),
        (opened(1, 9, 9, token=Token(5)), answered(sealed(1, 9)), "told of sender 5, the chain of none after 4"),
        (opened(1, 9, 9), answered(sealed(1, 9, group="g2")), "it has link 1, which is g2's in the chain"),
        (held(1, None, 0, opened_start=1), answered(sealed(1, 9, group="g2")), "which is g2's in the chain"),
        (held(1, None, 9), answered(sealed(1, 9, group="g2")), "which is g2's in the chain"),
        (held(1, 9, 0), answered(sealed(1, 9, group="g2")), "which is g2's in the chain"),
        (opened(1, 9, 9, opened_start=2), answered(sealed(1, 9)), "was made for a#2, in the chain it is for a#1"),
        (
            opened(1, None, 5),
            unended(sealed(1, 9), LinkState.OPENING),
            "holds 5 records, in the chain nobody was let send",
        ),
        (opened(1, None, 5), sealed(1, 0), "holds 5 records, in the chain nobody was let send"),
        (opened(1, 9, 9), answered(sealed(1, 8)), "link 1 ends at 9 here, in the chain at 8"),
        (opened(1, 9, 9), answered(sealed(1, 9, digest=b"x" * 32)), "link 1 ends at 9 here, in the chain at 9"),
    ],
)
def test_what_the_chain_cant_explain_a_later_one_said(holding, chain, said) -> None:
    assert said in known_more(holding, chain)


def test_an_end_is_final_unless_an_operator_gives_it_up() -> None:
    ended, other = opened(1, 9, 9).record, LinkRecord(QUEUE, Epoch(1), end=Index(4), end_hash=HASH)
    assert setback.changed_end(ended, other)
    assert setback.changed_end(replace(ended, end=None), other) == ""
    assert setback.changed_end(ended, replace(other, end=Index(9))) == ""
    assert setback.changed_end(ended, replace(other, is_abandoned=True)) == ""
    # What was said before comes late: that is refused as older.
    assert setback.changed_end(replace(ended, is_abandoned=True), other) == ""


def test_the_sides_of_a_link_never_change() -> None:
    record = opened(1, None, 5, role=Role.MASTER, peer=Incarnation("b", 1)).record
    assert setback.opened_before(record, 1, Role.MASTER, Incarnation("b", 1)) == ""
    assert setback.opened_before(record, 2, Role.MASTER, Incarnation("b", 1))
    assert setback.opened_before(record, 1, Role.SLAVE, Incarnation("b", 1))
    assert setback.opened_before(record, 1, Role.MASTER, Incarnation("b", 2))
    # A seal of a link never heard of says nothing (H11); a copy with records does.
    assert setback.opened_before(replace(record, opened_start=0), 2, Role.MASTER, Incarnation("b", 1)) == ""
    assert setback.opened_before(held(1, 9, 9).record, 2, Role.MASTER, Incarnation("b", 1))
