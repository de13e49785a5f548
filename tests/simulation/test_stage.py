"""What schedules are played on says nothing of the system that isn't so."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from seriatim.broker_group.writer import Deletion, Write
from seriatim.coordinator.core import chain
from seriatim.protocol import chain_json
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.names import QueueId
from tests.property.chain_world import World
from tests.simulation.disk import KEY, Disk
from tests.simulation.ensemble import Node
from tests.simulation.oracle import Oracle
from tests.simulation.readings import Readings
from tests.simulation.scenarios import add_group
from tests.simulation.world import World as SimulatedWorld


def _ignore(*_: object) -> None: ...


def test_what_bypassed_the_log_and_was_deleted_is_not_back_when_memory_is_emptied() -> None:
    """A dropped link of a queue with durability memory was on the disk again after a power failure."""
    disk, key = Disk("disk", random.Random(0)), KEY.pack(b"B", 1, 1, 0)
    disk.write(Write(((key, b"batch"),), _ignore, uses_log=False))
    disk.write(Write((), _ignore, deletions=(Deletion(key, key + b"\0"),)))
    disk.emptied_memory()
    disk.power_failed()
    assert disk.links() == set()


def test_a_queue_that_was_deleted_is_not_the_one_that_goes_on_where_zookeeper_is_put_back() -> None:
    """It was made again; a member was away, so that its chain is still there. Whoever asked for the chain got that one."""
    document = World().document
    deleted, again = (f"/seriatim/main/queues/{number}/chain" for number in (1, 2))
    oracle = Oracle(*cast("tuple[Any, Any, Any]", (None, {}, None)))
    oracle.put_back(
        {
            deleted: Node(chain_json.encode(chain.deleted(document)), 3),
            again: Node(chain_json.encode(document), 3),
        }
    )
    assert oracle.documents == {again: document}


def test_a_group_is_added_also_where_the_first_one_was_removed() -> None:
    started: list[str] = []
    world = SimpleNamespace(group_names=["g2", "g3", "g4"], add_group=_ignore, start=started.append)
    add_group(cast("Any", SimpleNamespace(world=world)))
    assert started == ["g1-a", "g1-b"]


def test_a_queue_s_deletion_leaves_the_chains_of_others() -> None:
    document = World().document
    paths = [f"/seriatim/main/queues/{number}/chain" for number in (1, 2)]
    oracle = Oracle(*cast("tuple[Any, Any, Any]", (None, {}, {})))
    oracle.documents.update({path: replace(document, name=path) for path in paths})
    oracle.forget(paths[0])
    assert list(oracle.documents) == paths[1:]


def test_a_judge_that_fails_itself_ends_the_schedule() -> None:
    """A coordinator's answers were lost instead, each of them, and a reader waited for ever."""
    world = SimulatedWorld(0)
    world.told({}.__getitem__, "unknown")
    assert str(world.loop.failure) == "KeyError('unknown')"


def test_a_commit_under_way_when_a_chain_is_recovered_is_held_against_nobody() -> None:
    readings = Readings({}, {}, {}, {})
    readings._answered[1, 1] = (1, 1)
    readings.recovered(QueueId(2))
    grant = pb.AcquireReadReply(queue_id=1, token=2, grant=pb.ReadGrant(subscription_id=1, generation=1, epoch=1))
    readings._check_not_led_past(grant)
