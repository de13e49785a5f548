"""What a reader makes of a queue's view."""

from __future__ import annotations

from seriatim.consumer.views import chain_view
from seriatim.protocol import seriatim_pb2 as pb


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
