"""Wrong rules of what readers are handed, from where on, and of what is committed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seriatim.broker_group import layout
from seriatim.broker_group.core import cursors
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.store import Store
from seriatim.broker_group.writer import Write
from seriatim.consumer import handover, range_reader
from seriatim.consumer.core import cursor
from seriatim.consumer.core.reading_events import ReadFrom
from seriatim.consumer.core.rows import Delivery, Rows
from seriatim.consumer.core.view import LinkView, Place, Side
from seriatim.consumer.fetching import Fetcher
from seriatim.coordinator import description
from seriatim.coordinator.core import acquire_read, subscriptions
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link
from seriatim.protocol.names import Index, SubscriptionId
from tests.simulation import applications
from tests.simulation.plants.plant import Maker, Plant, changed, instead, together
from tests.simulation.schedule import Shape

# ---- what is granted


def _one_for_all(right: Any, state: acquire_read.AcquireRead, first: str) -> Any:
    node = state.request.election_node
    if node and first == node and state.subscription.reader_token:
        return acquire_read._look(acquire_read._with_own_token(state))
    return right(state, first)


def _from_the_links_start(right: Any, self: Fetcher, event: Any) -> None:
    if isinstance(event, ReadFrom) and event.grant.subscription_id:
        event = replace(event, place=Place(event.place.epoch, Index(0)))
    right(self, event)


# ---- what members serve


def _all_that_is_here(self: LinkRunner) -> Index:
    end, durable = self.record.end, self.state.durable
    return durable if end is None else min(end, durable)


def _side(name: str) -> Maker:
    """Readers go to this member, and wait until it is there."""

    def choice(right: Any, link: LinkView, avoid: str, *first: Any) -> Any:
        if not first:  # of who commits
            return right(link, avoid)
        side: Side = getattr(link, name)
        return side if side.is_registered else None

    return changed(LinkView, "choice", choice)


def _without_keys(right: Any, delivery: Delivery) -> Rows:
    found: Rows = right(delivery)
    is_whole = len(found.columns) == delivery.batch.header.count
    return found if is_whole else replace(found, columns=replace(found.columns, keys=None, headers=None))


# ---- where somebody is put


def _further_than_it_is(right: Any, document: ChainDocument, committed: Any) -> subscriptions.QueuePosition:
    position: subscriptions.QueuePosition = right(document, committed)
    is_open = bool(position.consume_list) and committed is not None
    return replace(position, index=Index(position.index + 2)) if is_open else position


def _told_further(right: Any, link: Link, shown: pb.LinkView, told: Any) -> None:
    right(link, shown, told)
    if link.end is None and shown.has_committed:
        shown.committed_index += 2


def _with_what_was_left(
    right: Any, document: ChainDocument, name: str, position: subscriptions.QueuePosition, meant: SubscriptionId
) -> ChainDocument:
    left = subscriptions.found(document, name).consume_list
    both = replace(position, consume_list=tuple(sorted({*left, *position.consume_list})))
    sought: ChainDocument = right(document, name, both, meant)
    return sought


def _lowest_id(right: Any, document: ChainDocument, *arguments: Any) -> ChainDocument:
    """The lowest above those that there are."""
    taken = max((one.subscription_id for one in document.subscriptions), default=0)
    made = right(replace(document, next_subscription_id=SubscriptionId(taken + 1)), *arguments)
    return replace(made, next_subscription_id=max(made.next_subscription_id, document.next_subscription_id))


# ---- what is committed


def _at_ends_only(right: Any, state: cursor.CursorState, link: LinkView) -> Index:
    return Index(0) if link.end is None else right(state, link)


async def _not_flushed(self: Store, link: LinkKey, record: CursorRecord) -> None:
    put = layout.key(b"C", link, record.subscription_id), cursors.encode(record)
    self._writer.submit(Write((put,), lambda *_: None, waits_for_flush=False))


async def _counts_as_taken(self: CursorKeeper, runner: LinkRunner) -> None:
    await self.lack(runner, ())


PLANTS: tuple[Plant, ...] = (
    Plant(
        "read before it is committed",
        "a member serves readers all that it has of a link",
        instead(LinkRunner, "readable_end", property(_all_that_is_here)),
        within=10,
        finds="8: .* is read up to",
    ),
    Plant(
        "read from the start of the link",
        "a reader is handed the link of its grant from its first record on",
        changed(Fetcher, "happened", _from_the_links_start),
        within=30,
        shape=Shape(kinds=("kill an application", "rotate"), faults=(2, 4)),
        finds="6: .* granted from",
    ),
    Plant(
        "one token for all readers",
        "a token is given to the first reader of a subscription, and to all after it",
        changed(acquire_read, "_elected", _one_for_all),
        within=30,
        shape=Shape(kinds=("kill an application", "rotate"), faults=(2, 4)),
        finds="7: two readers",
    ),
    *(
        Plant(
            f"read from the {name} alone",
            f"a reader waits until the {name} of a link is there",
            _side(name),
            within=60,
            shape=Shape(kinds=("read from one",), faults=(1, 1)),
            finds="12: .* is read, and committed",
        )
        for name in ("master", "slave")
    ),
    Plant(
        "without its key",
        "who is handed a part of a batch is handed it without keys and headers",
        together(*(changed(one, "decoded", _without_keys) for one in (handover, range_reader, applications))),
        within=30,
        finds="(9|11): ",
    ),
    Plant(
        "latest, and further",
        "latest lies beyond what is committed",
        changed(subscriptions, "_latest", _further_than_it_is),
        within=30,
        shape=Shape(kinds=("subscription made", "kill", "rotate"), faults=(2, 4)),
        finds="9: .* is put at latest",
    ),
    Plant(
        "told, and further",
        "a queue's end is told to lie beyond what is committed",
        changed(description, "_describe_link", _told_further),
        within=30,
        shape=Shape(kinds=("kill", "rotate"), faults=(2, 4), replays=1.0),
        finds="9: the end is told",
    ),
    Plant(
        "sought over, and read",
        "a subscription that is sought forward has what was left before it to read still",
        changed(subscriptions, "sought", _with_what_was_left),
        within=60,
        shape=Shape(kinds=("sought over", "rotate", "pause an application"), faults=(4, 7), paces=(2,)),
        finds="[69]: ",
    ),
    Plant(
        "made again under its id",
        "a subscription has the lowest id above those that there are",
        changed(subscriptions, "created", _lowest_id),
        within=60,
        shape=Shape(
            kinds=("subscription made again", "subscription made again", "pause an application"),
            faults=(3, 5),
            paces=(4,),
        ),
    ),
    Plant(
        "committed at ends",
        "what a reader is done with is committed when its link has ended",
        changed(cursor, "_target", _at_ends_only),
        within=10,
        finds="12: .* is committed, at both members",
    ),
    Plant(
        "cursor not flushed",
        "a commit is answered before it is on a disk",
        instead(Store, "keep_cursor", _not_flushed),
        within=10,
        finds="6: .* is committed",
    ),
    Plant(
        "cursors not taken",
        "a replaced disk lacks no cursors once it has the link's records",
        instead(CursorKeeper, "take_from_peer", _counts_as_taken),
        within=150,
        shape=Shape(
            kinds=("blank disk", "kill a reader and whom it reads", "pause an application"),
            faults=(3, 5),
            paces=(2,),
            groups=(2,),
        ),
        finds="6: .* is committed",
    ),
)
