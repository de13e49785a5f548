"""What readers meet: subscriptions that are made again, or sought over what isn't read, and links of which one copy is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seriatim.protocol import seriatim_pb2 as pb
from tests.simulation.scenarios import IDLE, SOON_S, calmed, to_create
from tests.simulation.world import names_of

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule


def make_subscription_again(schedule: Schedule) -> None:
    """A subscription is deleted while it is read: by its readers, who are started again, or by an operator another one is made (H16)."""
    chance, document = schedule.chance, schedule.queue.document
    # The audit may be the only one that reads what another one is sought over.
    read = [] if document is None else [one.name for one in document.subscriptions if one.name not in (IDLE, "audit")]
    if not read:
        return
    name = chance.choice(read)
    schedule.queue.ledger.deleted.add(name)
    schedule.operate("DeleteSubscription", pb.SubscriptionRequest(queue=schedule.queue.name, subscription=name))
    if chance.random() < 0.5:
        schedule.operate("CreateSubscription", to_create(schedule.queue, name, "earliest"))


def seek_over(schedule: Schedule) -> None:
    """A subscription is sought to the end, or over what it hasn't read; another one reads all."""
    ledger, chance, document = schedule.queue.ledger, schedule.chance, schedule.queue.document
    if document is None or document.subscription("main") is None or document.subscription("audit") is None:
        return
    reached = max(ledger.progress["main"].delivered, default=-1)
    unread = sorted(offset for offset in ledger.told if offset > reached)
    to = str(chance.choice(unread)) if unread and chance.random() < 0.5 else "latest"
    schedule.operate(
        "SeekSubscription", pb.SeekSubscriptionRequest(queue=schedule.queue.name, subscription="main", to=to)
    )


def read_from_one(schedule: Schedule) -> None:
    """A member of the head is gone for long: what is there is read from the other one, and committed, to its end (12)."""
    link, world = calmed(schedule), schedule.world
    if schedule.has_damaged(link.group):
        return
    goes = schedule.chance.choice(names_of(link))
    world.kill(goes, is_power=schedule.chance.random() < 0.5)
    schedule.until_sending_goes_on(SOON_S)

    def is_read() -> bool:
        document = schedule.queue.document
        return document is not None and not any(
            link.epoch in one.consume_list for one in document.subscriptions if one.name != IDLE
        )

    schedule.until(is_read, f"without {goes} its link {link.epoch} is read, and committed, to its end", SOON_S)
    schedule.later(schedule.some_s(), world.start, goes)


READERS: dict[str, tuple[float, Callable[[Schedule], None]]] = {
    "subscription made again": (1, make_subscription_again),
    "sought over": (1, seek_over),
    "read from one": (0.5, read_from_one),
}
