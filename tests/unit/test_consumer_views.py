"""What a reader makes of a queue's view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.consumer.core.view import START, Place
from seriatim.consumer.views import chain_view
from seriatim.coordinator import views
from seriatim.coordinator.core import chain, retention
from seriatim.coordinator.core.chain_point import filled
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import (
    Certificate,
    ChainDocument,
    ChainMember,
    Durability,
    Link,
    LinkState,
    QueueSettings,
)
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, MemberName, Offset, QueueId


def group(name: str, *, is_registered: bool = True) -> pb.GroupView:
    members = [
        pb.MemberView(member=member, is_registered=is_registered, address=f"{name}-{member}:1") for member in "ab"
    ]
    return pb.GroupView(group=name, members=members)


def test_ahead_are_the_members_of_the_group_that_follows_on_the_send_list() -> None:
    view = pb.QueueView(send_list=["g2", "g3"], groups=[group("g1"), group("g2"), group("g3")], created_at_ms=5)
    assert chain_view(view).created_at_ms == 5
    view.links.add(epoch=1, group="g2", state="open", answered=["a"])
    assert chain_view(view).ahead == ("g3-a:1", "g3-b:1")
    assert chain_view(view).links[0].answered == ("a",)
    view.links.add(epoch=2, group="g3", state="opening")
    assert chain_view(view).ahead == ("g2-a:1", "g2-b:1")


def test_nothing_is_ahead_without_another_group_or_its_members() -> None:
    assert chain_view(pb.QueueView()).ahead == ()
    alone = pb.QueueView(send_list=["g1"], groups=[group("g1")])
    alone.links.add(epoch=1, group="g1", state="open")
    assert chain_view(alone).ahead == ()
    gone = pb.QueueView(send_list=["g1"], groups=[group("g1", is_registered=False)])
    assert chain_view(gone).ahead == ()


def sealed_once(end: int) -> ChainDocument:
    """A queue with one link, which is sealed."""
    settings = QueueSettings()
    new = chain.created(cluster="c", queue_id=QueueId(1), name="q", settings=settings, groups=("g1", "g2"), now_ms=0)
    sides = [ChainMember(MemberName("g1", place), Incarnation(place, 1)) for place in "ab"]
    certificate = Certificate(Index(end), (), Durability.SYNC, True, {"s": 99}, {"s": 99}, b"h", None, 0)
    link = Link(Epoch(1), "g1", *sides, LinkState.SEALED, Durability.SYNC, 0, Offset(0), {}, 0, certificate)
    return filled(replace(new, next_epoch=Epoch(2), links=(link,)))


def test_a_queue_keeps_its_offsets_where_all_its_links_were_dropped() -> None:
    document = sealed_once(100)
    seen = chain_view(views.queue_view(document, ChainVersion(8), Registry()))
    assert (seen.earliest, seen.latest, seen.place_of(Offset(0))) == (0, 100, Place(Epoch(1), Index(0)))
    document = retention.without(document, retention.due(document, document.settings.retention_ms + 1))
    assert document.links == ()
    seen = chain_view(views.queue_view(document, ChainVersion(9), Registry()))
    assert (seen.earliest, seen.latest, seen.place_of(Offset(100))) == (100, 100, START)
    with pytest.raises(InvalidArgument, match="no longer kept, the first one is 100"):
        seen.place_of(Offset(99))


def test_where_a_queue_ends_is_known_where_its_last_link_is_sealed_or_empty_or_its_master_tells() -> None:
    ended = chain_view(views.queue_view(sealed_once(100), ChainVersion(8), Registry()))
    assert (ended.is_latest_known, ended.latest) == (True, 100)
    assert (ended.offset_of(Place(Epoch(1), Index(7))), ended.offset_of(Place(Epoch(2), Index(0)))) == (7, None)
    (link,) = ended.links

    def followed_by(**changes) -> tuple[bool, int]:
        last = replace(link, epoch=Epoch(2), **{"base": Offset(100), "end": None, "state": LinkState.OPEN} | changes)
        seen = replace(ended, links=(link, last))
        return seen.is_latest_known, seen.latest

    assert followed_by() == (False, 100)
    assert followed_by(state=LinkState.OPENING) == (True, 100)
    assert followed_by(committed=Index(5)) == (False, 105)
    assert followed_by(committed=Index(5), is_committed_exact=True) == (True, 105)
    assert followed_by(base=None, committed=Index(5), is_committed_exact=True) == (False, 100)


def test_where_a_queue_ends_is_not_known_by_a_chain_that_may_be_an_old_one() -> None:
    document = sealed_once(100)
    set_back = Registry(outdated={QueueId(1): "seen"})
    waiting = Registry({"g1": GroupState("g1")}, is_new=True)
    for registry in (set_back, waiting):
        seen = chain_view(views.queue_view(document, ChainVersion(8), registry))
        assert (seen.is_latest_known, seen.latest) == (False, 100)
    assert chain_view(views.queue_view(document, ChainVersion(8), replace(waiting, is_new=False))).is_latest_known


def test_an_offset_and_a_place_are_the_same_but_in_gaps_and_beyond_an_end() -> None:
    """The second link was given up at 3, so that the third one starts far behind it (H21); nobody knows yet where the fourth starts."""
    ended = chain_view(views.queue_view(sealed_once(5), ChainVersion(8), Registry()))
    (link,) = ended.links
    given_up = replace(link, epoch=Epoch(2), base=Offset(5), end=Index(3))
    is_open = replace(link, epoch=Epoch(3), base=Offset(100), end=None, state=LinkState.OPEN)
    seen = replace(ended, links=(link, given_up, is_open))
    places = {0: (1, 0), 4: (1, 4), 5: (2, 0), 7: (2, 2), 8: (3, 0), 99: (3, 0), 100: (3, 0), 107: (3, 7)}
    for offset, place in places.items():
        assert seen.place_of(Offset(offset)) == Place(*place), offset
        if offset not in (8, 99):
            assert seen.offset_of(Place(*place)) == offset
    assert seen.offset_of(Place(Epoch(1), Index(9))) == 5  # H22
    lost = replace(seen, links=(link, replace(is_open, base=None)))
    assert lost.place_of(Offset(4)) == Place(Epoch(1), Index(4))
    with pytest.raises(InvalidArgument, match="an earlier link's end is lost"):
        lost.place_of(Offset(5))
    assert lost.offset_of(Place(Epoch(3), Index(0))) is None


def test_of_a_coordinator_of_an_earlier_version_a_queue_without_links_is_taken_as_before() -> None:
    seen = chain_view(pb.QueueView())
    assert (seen.earliest, seen.latest, seen.place_of(Offset(0))) == (0, 0, START)
    kept = pb.QueueView(links=[pb.LinkView(epoch=3, group="g1", state="open", has_base=True, base=7)])
    assert chain_view(kept).earliest == 7
