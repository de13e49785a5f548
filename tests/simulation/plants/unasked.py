"""Wrong rules of what the elected coordinator does unasked, and of recovery."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seriatim.coordinator.core import background, recovery
from seriatim.coordinator.core.recovery import Copy
from tests.simulation.plants.plant import Plant, changed, instead
from tests.simulation.schedule import Shape


def _by_its_version(right: Any, seen: background.SeenChain, *arguments: Any) -> bool:
    return seen.version == 0 and right(seen, *arguments)


def _over_zookeepers(right: Any, copies: Iterable[Copy], queue: str) -> Copy:
    """A member's copy, unless ZooKeeper has more links."""
    copies = list(copies)
    newest: Copy = right([one for one in copies if one.holder != "ZooKeeper"], queue)
    more = (one for one in copies if one.holder == "ZooKeeper" and one.document.next_epoch > newest.document.next_epoch)
    return next(more, newest)


PLANTS = (
    Plant(
        "back when all is quiet",
        "a group that sending waits for comes back like any other, once nobody has changed the chain for a second",
        instead(background, "_waits_for_group", lambda *_: False),
        within=20,
        shape=Shape(kinds=("all unread",), faults=(1, 1)),
        finds="12: .* comes back at once",
    ),
    Plant(
        "lost, and all else waits",
        "beside a lost link of which a member is there nothing else is done for its queue",
        instead(background, "_lost", lambda *_: set()),
        within=20,
        shape=Shape(kinds=("lost beside others",), faults=(1, 1)),
        finds="12: .* sending goes on",
    ),
    Plant(
        "somebody's, by its version",
        "a queue whose making was cut off is somebody's once its chain was written again",
        changed(background, "_is_orphan", _by_its_version),
        within=60,
        shape=Shape(kinds=("orders at once",), faults=(1, 3)),
        finds="12: .* deleted queues are cleared away",
    ),
    Plant(
        "recovered over ZooKeeper's",
        "a queue goes on from the newest copy of a member, unless ZooKeeper's chain has more links",
        changed(recovery, "newest", _over_zookeepers),
        within=400,  # 8 of 1,600 find it
        shape=Shape(kinds=("recovered by several",), faults=(1, 1), coordinators=(2,), paces=(2,), replays=0.0),
        finds="4: ",
    ),
)
