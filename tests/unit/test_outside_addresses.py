"""What a coordinator's second door answers: every address in terms of outside, and nothing else changed."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from seriatim.coordinator.outside import outside
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.registration import CoordinatorRegistration, Registration

ADDRESSES = {"g1-a:7000": "host:7101", "c1:7000": "host:7001", "z1:2181,z2:2181": "host:2181,host:2182"}


def test_addresses_of_members_and_only_they_change_deep_inside_a_view() -> None:
    view = pb.QueueView(
        queue="g1-a:7000",  # a name may look like an address
        links=[
            pb.LinkView(
                epoch=1,
                master=pb.LinkMember(group="g1", member="a", address="g1-a:7000", direct="g1-a:4711"),
                slave=pb.LinkMember(group="g1", member="b", address="g1-b:7000"),  # has none from outside
                marks={"g1-a:7000": 4},
            )
        ],
        groups=[pb.GroupView(group="g1", members=[pb.MemberView(member="a", address="g1-a:7000")])],
    )
    before = pb.QueueView()
    before.CopyFrom(view)

    told = outside(view, ADDRESSES)

    assert isinstance(told, pb.QueueView)
    assert view == before, "what the coordinator keeps was changed"
    assert told.links[0].master.address == "host:7101"
    assert told.links[0].master.direct == "", "nobody gets there from outside"
    assert told.links[0].slave.address == "g1-b:7000"
    assert told.groups[0].members[0].address == "host:7101"
    assert (told.queue, dict(told.links[0].marks)) == ("g1-a:7000", {"g1-a:7000": 4})


def test_coordinators_and_zookeeper_change() -> None:
    reply = pb.DescribeClusterReply(
        zookeeper="z1:2181,z2:2181",
        coordinators=["c1:7000", "c2:7000"],
        elected_coordinator="c1:7000",
        is_outside=False,
    )
    told = outside(reply, ADDRESSES)
    assert isinstance(told, pb.DescribeClusterReply)
    assert (told.zookeeper, list(told.coordinators)) == ("host:2181,host:2182", ["host:7001", "c2:7000"])
    assert told.elected_coordinator == "host:7001"
    assert told.is_outside


def _texts(of: Descriptor, path: str = "", seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Each field of text in a message, with its path."""
    if of.full_name in seen:
        return
    for field in of.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield f"{path}{field.name}"
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _texts(field.message_type, f"{path}{field.name}.", seen | {of.full_name})


def test_no_reply_has_a_text_that_nobody_decided_about() -> None:
    """A new field of text in a reply is an address or isn't; this test wants to be told which."""
    no_address = {
        "cluster", "root", "version", "queue", "group", "member", "disk_id", "state", "durability", "sender",
        "send_list", "reason", "what", "problem", "reader", "subscription", "readmit", "groups", "sending_queues",
        "backlog_queues", "deleted_queues", "lost_queues", "answered",
    }  # fmt: skip
    addresses = {"address", "coordinators", "elected_coordinator", "next_master", "zookeeper", "direct"}
    found = {
        path.rsplit(".", 1)[-1]
        for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods
        for path in _texts(method.output_type)
    }
    assert found - no_address <= addresses


def test_registrations_of_an_earlier_version_have_no_address_from_outside() -> None:
    assert CoordinatorRegistration.decode(b'{"address": "c1:7000"}') == CoordinatorRegistration("c1:7000")
    earlier = b'{"disk_id": "d", "start": 1, "address": "a:1", "peer": null, "is_in_sync": true, "is_accepting": true, "problem": ""}'
    assert (Registration.decode(earlier).outside, Registration.decode(earlier).direct) == ("", "")
