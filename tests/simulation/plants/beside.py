"""Wrong rules that only show where several queues share a group: what belongs to one of them is taken for another's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from seriatim.broker_group import append, replicate, sealing
from seriatim.broker_group.batch_cache import BatchCache
from seriatim.broker_group.broker import EVERY_EPOCH, Broker
from seriatim.broker_group.core import resync
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.membership import Membership
from seriatim.protocol.names import QueueId
from seriatim.protocol.registration import Registration
from tests.simulation.plants.plant import Maker, Plant, changed, instead, together
from tests.simulation.schedule import Shape


class _ByEpoch(dict[Any, Any]):
    """What is kept by a link's epoch, whichever queue's."""

    def get(self, key: LinkKey, default: Any = None) -> Any:
        return super().get(key[1], default)

    def setdefault(self, key: LinkKey, default: Any = None) -> Any:
        return super().setdefault(key[1], default)

    def pop(self, key: LinkKey, default: Any = None) -> Any:
        return super().pop(key[1], default)

    def __setitem__(self, key: LinkKey, value: Any) -> None:
        super().__setitem__(key[1], value)

    def items(self) -> Any:
        return ()  # whose they are isn't known


class _EpochsOnly(set[Any]):
    """The same of what is a set."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key[1])  # type: ignore[index]

    def add(self, key: LinkKey) -> None:
        super().add(key[1])

    def __iter__(self) -> Any:
        return iter(())  # whose they are isn't known


def _kept_by_epoch(owner: type, name: str, kept: type) -> Maker:
    def begin(right: Any, self: Any, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        setattr(self, name, kept())

    return changed(owner, "__init__", begin)


def _of_any_queue(right: Any, self: BatchCache, link: LinkKey, *arguments: Any) -> Any:
    return right(self, (0, link[1]), *arguments)


def _lets_all_go(right: Any, self: Broker, queue_id: QueueId, below: Any) -> Any:
    if below != EVERY_EPOCH:
        return right(self, queue_id, below)
    return [record.key for record in self.links()]


async def _of_all(right: Any, self: Broker, _: QueueId) -> None:
    for queue_id in self.kept_chains:
        await right(self, queue_id)


async def _of_the_first(_: Any, broker: Broker) -> None:
    unsealed = broker.unsealed()
    first = min((record.queue_id for record in unsealed), default=0)
    await asyncio.gather(*(sealing._seal_open(broker, record) for record in unsealed if record.queue_id == first))


def _looked_at_for_the_first(right: Any, broker: Broker, runner: LinkRunner, *arguments: Any) -> Any:
    lease = broker.lease
    is_first = runner.record.queue_id == min(record.queue_id for record in broker.links())
    broker.lease = lease if is_first or not lease.is_admitted else replace(lease, until_s=float("inf"))
    try:
        return right(broker, runner, *arguments)
    finally:
        broker.lease = lease


def _first_only(right: Any, name: Any, me: Any, documents: Any, held: Any, told: Any) -> Any:
    first = min(documents, default=None)
    some = {one: document for one, document in documents.items() if one == first}
    return right(name, me, some, [one for one in held if one.record.queue_id == first], told)


PLANTS = (
    Plant(
        "cursors, by epoch",
        "a member keeps a link's cursors by its epoch, whichever queue's it is",
        _kept_by_epoch(CursorKeeper, "_records", _ByEpoch),
        within=20,
        shape=Shape(kinds=("kill a reader and whom it reads", "rotate"), beside=1.0, changes=0.0),
        finds="[679]: ",
    ),
    Plant(
        "cached, by epoch",
        "a member finds the newest batches by epoch and index, whichever queue's they are",
        together(*(changed(BatchCache, name, _of_any_queue) for name in ("add", "get", "forget"))),
        within=40,
        shape=Shape(kinds=("seek",), faults=(2, 4), beside=1.0, changes=0.0),
        finds="(9|11): ",
    ),
    Plant(
        "sealed by itself, by epoch",
        "a member that has written its answer beside one queue's chain writes none for the same epoch of another",
        _kept_by_epoch(Membership, "_seals_written", _EpochsOnly),
        within=60,
        shape=Shape(kinds=("unreachable head",), faults=(1, 2), beside=1.0, changes=0.0),
        finds="12: ",
    ),
    Plant(
        "let go with another queue",
        "who lets a deleted queue's links go lets go all that it holds",
        changed(Broker, "to_drop", _lets_all_go),
        within=20,
        shape=Shape(kinds=("pause an application",), beside=1.0, changes=1.0),
    ),
    Plant(
        "copies forgotten with another queue",
        "who forgets the chain of a deleted queue forgets those of all",
        changed(Broker, "forget_chain", _of_all),
        within=40,
        shape=Shape(kinds=("queue recovered",), faults=(1, 2), beside=1.0, changes=1.0),
    ),
    Plant(
        "sealed for the first queue",
        "a member that comes back seals the open links of its first queue, and registers",
        changed(sealing, "seal_open_links", _of_the_first),
        within=60,
        shape=Shape(kinds=("kill both members", "expire session"), beside=1.0, changes=0.0),
        finds="5.5: ",
    ),
    Plant(
        "lease of the first queue",
        "whether the lease runs is looked at for links of a member's first queue",
        together(*(changed(one, "take", _looked_at_for_the_first) for one in (append, replicate))),
        within=150,
        shape=Shape(kinds=("pause", "cut", "isolate"), faults=(2, 4), lasts_s=(9.0,), beside=1.0, changes=0.0),
        finds="its session is gone",
    ),
    Plant(
        "in sync with one queue",
        "a member that lacks nothing of its first queue says that it is in sync",
        changed(resync, "unfinished", _first_only),
        within=40,
        shape=Shape(kinds=("blank disk unseen",), faults=(1, 2), beside=1.0, changes=0.0),
        finds="6: ",
    ),
    Plant(
        "in sync with all or none",
        "a member that lacks something of one queue is in sync with no other either",
        instead(
            Registration, "is_in_sync_with", lambda self, queue_id: self.is_in_sync and queue_id not in self.unread
        ),
        within=40,
        shape=Shape(kinds=("cursors of another queue lost",), faults=(1, 1), beside=1.0, changes=0.0),
        finds="12: .* comes back for",
    ),
)
