"""A queue's view with what only members know: committed indexes, cursors, lag, living copies; and who is elected.

Members are asked side by side with a short deadline; what nobody answers stays unset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from seriatim.coordinator import views
from seriatim.coordinator.core import rotation, subscriptions
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, LinkState, Subscription
from seriatim.protocol.clock import now_ms
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.names import ChainVersion, Epoch, Index, MemberName


@dataclass(slots=True)
class Told:
    """What the members that know a link tell of it. `by_master`: its master among them, the very process that answers its sender."""

    held: list[pb.HeldLink] = field(default_factory=list)
    by_master: bool = False

    @property
    def committed(self) -> subscriptions.Committed | None:
        """How far the link is committed; None where nobody tells."""
        if not self.held:
            return None
        return subscriptions.Committed(Index(max(one.committed_index for one in self.held)), self.by_master)


Answers = Mapping[Epoch, Told]


class Description:
    """Asks members about links."""

    def __init__(self, store: Store, members: Members) -> None:
        self._store = store
        self._members = members

    async def committed(self, document: ChainDocument) -> subscriptions.Committed | None:
        """How far the last link is committed, as its members tell; None where none answered or there is no open link."""
        last = document.last_link
        if last is None or last.state is not LinkState.OPEN:
            return None
        return (await self._asked(document, [last]))[last.epoch].committed

    async def queue(
        self, document: ChainDocument, version: ChainVersion, *, has_elections: bool = True
    ) -> pb.QueueView:
        """The whole view. `has_elections`: with who is elected; the chain document has only who got the latest token, and that one may be gone."""
        registry = self._store.registry
        view = views.queue_view(document, version, registry)
        asked = self._asked(document, document.links)
        if has_elections:
            lines = [None, *(one.subscription_id for one in document.subscriptions)]
            answers, elected = await asyncio.gather(asked, self._store.first_in_lines(document.queue_id, lines))
            view.sender, *readers = elected
            for told, reader in zip(view.subscriptions, readers, strict=True):
                told.reader = reader
        else:
            answers = await asked
        for link, shown in zip(document.links, view.links, strict=True):
            _describe_link(link, shown, answers[link.epoch])
            if link.end and shown.copies < 2:
                copies = "one copy" if shown.copies else "no member tells of a copy"
                reason = f"{copies} of its {link.end} records"
                view.waits.append(pb.WaitReason(what=f"link {link.epoch}", reason=reason))
        for subscription, told in zip(document.subscriptions, view.subscriptions, strict=True):
            _describe_cursor(document, subscription, told, answers)
        is_due = rotation.is_due(document, registry, now_ms())
        if is_due and (reason := rotation.obstacle(document, registry, lags(view))):
            view.waits.append(pb.WaitReason(what="rotation", reason=reason))
        views.add_chain_wait(view, document, self._store.size_bytes(document.queue_id))
        return view

    async def subscription(self, document: ChainDocument, subscription: Subscription) -> pb.SubscriptionView:
        """What the whole view has of one subscription; nothing is asked for others."""
        view = views.subscription_view(subscription)
        links = [link for link in document.links if link.epoch in subscription.consume_list]
        answers, view.reader = await asyncio.gather(
            self._asked(document, links),
            self._store.first_in_line(document.queue_id, subscription.subscription_id),
        )
        _describe_cursor(document, subscription, view, answers)
        return view

    async def _asked(self, document: ChainDocument, links: Sequence[Link]) -> Answers:
        """One call for each member."""
        asked: dict[MemberName, list[Epoch]] = {}
        told = {link.epoch: Told() for link in links}
        masters = {link.epoch: link.master for link in links}
        for link in links:
            for side in link.sides:
                state = self._store.registry.member(side.name)
                # A link without an end is copied to no other disk: what is in the place of its own holds nothing of it.
                if state and (link.end is not None or state.incarnation.disk_id == side.incarnation.disk_id):
                    asked.setdefault(side.name, []).append(link.epoch)
        answers = await asyncio.gather(*(self._ask(document, epochs, member) for member, epochs in asked.items()))
        for member, held in zip(asked, answers, strict=True):
            for epoch, one in held.items():
                told[epoch].held.append(one)
                # Asked for by its incarnation, which is of one process and never comes back: who is registered now has answered.
                master = masters[epoch]
                told[epoch].by_master |= master.name == member and self._store.registry.is_present(master)
        return told

    async def _ask(
        self, document: ChainDocument, epochs: Iterable[Epoch], member: MemberName
    ) -> dict[Epoch, pb.HeldLink]:
        try:
            return await self._members.describe_links(document.queue_id, epochs, member)
        except SeriatimError:
            return {}  # the view shows as unknown what nobody tells


def lags(view: pb.QueueView) -> dict[str, int | None]:
    """How many records each subscription has left to read; None: nobody can tell, or nobody is there who reads them."""
    return {
        one.subscription: one.lag_records if one.has_lag and (one.reader or not one.lag_records) else None
        for one in view.subscriptions
    }


def _describe_link(link: Link, shown: pb.LinkView, told: Told) -> None:
    if link.end is not None:
        shown.has_committed, shown.committed_index, shown.is_committed_exact = True, link.end, True
        shown.copies = sum(answer.next_index >= link.end for answer in told.held)
    elif (committed := told.committed) is not None:
        shown.has_committed, shown.committed_index, shown.is_committed_exact = True, committed.index, committed.is_exact
        shown.copies = len(told.held)


def _describe_cursor(
    document: ChainDocument, subscription: Subscription, told: pb.SubscriptionView, answers: Answers
) -> None:
    """The cursor, as far as the members of the head link tell it, and how many records lie behind it."""
    if not subscription.consume_list:
        _describe_end(document, subscription, told)
        return
    head = subscription.consume_list[0]
    link = document.link(head)
    known = answers[head].held if head in answers else []
    if link is None or not (known or link.state is LinkState.OPENING):
        return
    cursor = max(
        [
            subscriptions.start_index(subscription, head),
            *(
                one.index
                for answer in known
                for one in answer.cursors
                if one.subscription_id == subscription.subscription_id and one.generation == subscription.generation
            ),
        ]
    )
    cursor = cursor if link.end is None else min(cursor, link.end)
    told.has_cursor, told.cursor_epoch, told.cursor_index = True, head, cursor
    if link.base is not None:
        told.has_offset, told.cursor_offset = True, link.base + cursor
    ends = [_known_end(document.link(epoch), answers.get(epoch)) for epoch in subscription.consume_list]
    if None not in ends:
        told.has_lag, told.lag_records = True, max(0, sum(end or 0 for end in ends) - cursor)


def _describe_end(document: ChainDocument, subscription: Subscription, told: pb.SubscriptionView) -> None:
    """The cursor of a subscription that has read all: at the end of the last link."""
    told.has_cursor, told.has_lag, told.lag_records = True, True, 0
    last = document.last_link
    if last is None or last.end is None:
        told.cursor_epoch, told.cursor_index = subscription.position_epoch, subscription.position_index
    else:
        told.cursor_epoch, told.cursor_index = last.epoch, last.end
    if last is None:
        told.has_offset, told.cursor_offset = True, document.dropped.offset
    elif last.base is not None and last.end is not None:
        told.has_offset, told.cursor_offset = True, last.base + last.end


def _known_end(link: Link | None, told: Told | None) -> int | None:
    if link is None or link.state is LinkState.OPENING:
        return 0
    if link.end is not None:
        return link.end
    committed = None if told is None else told.committed
    return None if committed is None else committed.index
