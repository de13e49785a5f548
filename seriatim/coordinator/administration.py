"""What operators ask for: queues, groups, subscriptions (protocol.md 6, 7)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from seriatim.coordinator import messages, views
from seriatim.coordinator.core import (
    background,
    chain,
    chain_length,
    close_link,
    draining,
    readmission,
    removal,
    rotation,
    status,
    subscriptions,
)
from seriatim.coordinator.core.acquire_send import SendRequest
from seriatim.coordinator.core.events import LinkClosed, Wait
from seriatim.coordinator.core.registry import Registry, unknown_group
from seriatim.coordinator.core.subscriptions import QueuePosition
from seriatim.coordinator.description import Description, lags
from seriatim.coordinator.execution import Execution
from seriatim.coordinator.remembered import side_by_side
from seriatim.coordinator.store import Store
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, LinkState, QueueSettings
from seriatim.protocol.clock import boottime_s, now_ms
from seriatim.protocol.errors import (
    ChainSetBack,
    Fenced,
    InvalidArgument,
    OlderVersion,
    QueueExists,
    SeriatimError,
    UnknownQueue,
    Waiting,
    WorldError,
)
from seriatim.protocol.names import ChainVersion, Epoch, MemberName, QueueId, SubscriptionId, checked_name

_log = log.logger("coordinator")
MAX_CONFLICTS = 50
POSITION_PATIENCE_S, POSITION_PAUSE_S = 1.0, 0.05
"""So long a position is looked for while it can't be told, and how often: longer than a switch takes, shorter than callers wait."""
DRAINING_S = 5.0
"""So long links are closed by the call that drains their group: who asked is answered, however many there are."""
SHOWN_AT_ONCE = 16
"""So many queues are shown before other calls have their turn."""
ANY_VERSION = ChainVersion(0)
"""A queue's first, in which it has no links yet."""
_Put = TypeVar("_Put")


async def _in_time(put: Callable[[], Awaitable[_Put]]) -> _Put:
    """Where a position can't be told, as in the middle of a switch, it is looked for again, for a while."""
    until_s = boottime_s() + POSITION_PATIENCE_S
    while True:
        try:
            return await put()
        except Waiting:
            if boottime_s() > until_s:
                raise
        await asyncio.sleep(POSITION_PAUSE_S)


class Operations:
    """The operators' calls. Each may be made again, at any coordinator."""

    def __init__(
        self,
        store: Store,
        execution: Execution,
        description: Description,
    ) -> None:
        self._store = store
        self._execution = execution
        self._description = description

    async def change(
        self,
        queue_id: QueueId,
        transition: Callable[[ChainDocument], ChainDocument],
        what: str,
        cause_id: str,
        *,
        must_write: bool = False,
        only_at: ChainVersion = ANY_VERSION,
    ) -> tuple[ChainDocument, ChainVersion]:
        """Read, change by a transition of the core, write by compare-and-set, in turn; again where the chain changed meanwhile.

        A transition that changes nothing writes nothing, so no compare-and-set would tell that what was read is old, as it
        can be where a ZooKeeper server is behind: then, and before anything is refused, it is read again, behind all that
        was written until now. Raises what the transition raises, and Waiting.

        `must_write`: also what changes nothing, so that the chain gets another version. `only_at`: only from this version of
        the chain on, else OlderVersion.
        """
        is_present = False
        async with self._store.lines.of(queue_id):
            for _ in range(MAX_CONFLICTS):
                document, version = await self._store.read_chain(queue_id)
                changed, refused = document, None
                try:
                    if only_at not in (ANY_VERSION, version):
                        raise OlderVersion("the chain has changed", queue=document.name, chain_version=version)
                    if document.is_deleted:
                        raise chain.deleted_error(document)
                    changed = transition(document)
                except SeriatimError as error:
                    refused = error
                if refused is None and (must_write or changed != document):
                    written = await self._store.write_chain(changed, version)
                    if written is not None:
                        _log.info("chain written", queue=document.name, what=what, version=written, cause_id=cause_id)
                        return changed, written
                elif not is_present:
                    await self._store.catch_up()
                    is_present = True
                elif refused is not None:
                    raise refused
                else:
                    return document, version
        raise Waiting("the chain keeps changing", reasons={"chain": "it keeps changing"})

    # ---- queues

    async def create_queue(self, request: pb.CreateQueueRequest) -> pb.QueueView:
        """A new queue, whose first send list are the groups named, or all known ones by name, but for drained ones. Raises QueueExists.

        Who drains a group reads all chains once the mark is set. So the mark is looked up again once this chain is there.
        """
        name = checked_name(request.queue, "queue")
        registry = await self._store.look_up_registry()
        settings = messages.settings_from(request.settings, frozenset(registry.groups))
        try:
            document, version = await self._made(name, settings, registry, request.cause_id)
        except QueueExists:
            made = await self._store.made_by(request.cause_id, name)
            if made is None:
                raise
            document, version = await self._store.read_chain(made)
        registry = await self._store.look_up_registry()
        if draining.without_drained(document, registry) != document:
            document, version = await self.change(
                document.queue_id,
                lambda now: draining.without_drained(now, registry),
                "drained groups off the send list",
                request.cause_id,
            )
        _log.info("queue created", queue=name, queue_id=document.queue_id, cause_id=request.cause_id)
        return views.queue_view(document, version, registry)

    async def _made(
        self, name: str, settings: QueueSettings, registry: Registry, cause_id: str
    ) -> tuple[ChainDocument, ChainVersion]:
        """Under the first id of which nothing is there (H16)."""
        while True:
            document = chain.created(
                cluster=self._store.cluster,
                queue_id=await self._store.new_queue_id(),
                name=name,
                settings=settings,
                groups=tuple(sorted(registry.groups)),
                now_ms=now_ms(),
            )
            document = draining.without_drained(document, registry)
            version = await self._store.create_queue(document, cause_id)
            if version is not None:
                return document, version

    async def alter_queue(self, request: pb.AlterQueueRequest) -> pb.QueueView:
        """Other settings for a queue: retention and readmission at once, durability from the next link on."""
        registry = await self._store.look_up_registry() if request.settings.groups else self._store.registry
        known_groups = frozenset(registry.groups)

        def altered(document: ChainDocument) -> ChainDocument:
            return chain.altered(document, messages.altered_settings(request, known_groups, document.settings))

        queue_id = await self._store.queue_id(request.queue)
        document, version = await self.change(queue_id, altered, "settings altered", request.cause_id)
        return views.queue_view(document, version, registry)

    async def list_queues(self, request: pb.ListQueuesRequest) -> pb.ListQueuesReply:
        """All queues that have a name, in its order. Raises Unreachable: cut off from ZooKeeper, nobody knows what was made since.

        Other calls have their turn amid it, for there may be thousands; what one of them deletes before it is shown is left out.
        """
        await self._store.catch_up()
        reply = pb.ListQueuesReply()
        named: dict[str, None] = {}
        for at, name in enumerate(sorted(self._store.names)):
            if at % SHOWN_AT_ONCE == 0:
                await asyncio.sleep(0)
            queue_id = self._store.names.get(name, QueueId(0))
            if queue_id in self._store.damaged:
                reply.queues.append(views.damaged_queue_view(queue_id, name, self._store.damaged[queue_id]))
            seen = self._store.chains.get(queue_id)
            if seen is None or seen.document.name != name:
                continue
            registry = self._store.registry
            view = views.queue_view(seen.document, seen.version, registry, has_groups=not request.groups_apart)
            views.add_chain_wait(view, seen.document, seen.size_bytes)
            reply.queues.append(view)
            named |= views.named_groups(seen.document)
        if request.groups_apart:
            reply.groups.extend(views.shown_group(name, self._store.registry) for name in sorted(named))
        return reply

    async def delete_queue(self, request: pb.QueueRequest) -> pb.Done:
        """Mark it as deleted and free its name; the elected coordinator clears it away (H16).

        Who names its id may ask again, whoever has its name by then.
        """
        name = checked_name(request.queue, "queue")
        queue_id = await self._store.queue_id(name, request.queue_id)
        try:
            await self.change(queue_id, chain.deleted, "deleted", request.cause_id)
        except UnknownQueue:
            _log.info("queue was deleted before", queue=name, cause_id=request.cause_id)
        await self._store.free_name(name, queue_id)
        return pb.Done()

    async def rotate_queue(self, request: pb.QueueRequest) -> pb.QueueView:
        """Close the open link as after a failure; the sender goes on with the next group.

        Raises Waiting where no other group could take over, ChainTooLong where no link might follow: sending would stand still for
        nothing. Who names the link has it left once, however often a call whose answer was lost is made again.
        """
        queue_id = await self._store.queue_id(request.queue)
        document, version = await self._store.read_chain(queue_id)
        last = document.last_link
        if last is not None and last.state in chain.LIVE and request.epoch in (0, last.epoch):
            size_bytes = self._store.size_bytes(queue_id)
            if error := chain_length.switch_error(document, size_bytes):
                raise error
            if not await self._next_group(document):
                registry = await self._store.look_up_registry()
                if not chain.can_switch(document, registry, size_bytes):
                    reasons = chain.obstacles(document, registry, {})
                    text = f"no other group could take over queue {request.queue}: {status.told(reasons)}"
                    raise Waiting(text, reasons=reasons)
            document, version = await self._switched(document, last, request.cause_id)
        return views.queue_view(document, version, self._store.registry)

    async def rotate_aged(self, queue_id: QueueId, epoch: Epoch, cause_id: str) -> bool:
        """A planned switch that nobody asked for, off the link of this epoch; False where it had better wait."""
        document, version = await self._store.read_chain(queue_id)
        last = document.last_link
        if last is None or last.epoch != epoch or last.state is not LinkState.OPEN:
            return True  # somebody else was faster
        await self._next_group(document)
        lagging = lags(await self._description.queue(document, version))
        registry = self._store.registry
        is_due = rotation.is_due(document, registry, now_ms())
        is_too_long = chain_length.switch_error(document, self._store.size_bytes(queue_id)) is not None
        if not is_due or rotation.obstacle(document, registry, lagging) or is_too_long:
            return False  # status says why
        await self._switched(document, last, cause_id)
        _log.info("link rotated by age", queue=document.name, epoch=epoch, cause_id=cause_id)
        return True

    async def _next_group(self, document: ChainDocument) -> str:
        """Where a switch would lead; empty where it leads to none. Only that group is looked up: there may be many."""
        looked_up: set[str] = set()
        while (group := chain.next_group(document, self._store.registry)) and group not in looked_up:
            await self._store.look_up_registry([group])
            looked_up.add(group)
        return group

    async def _switched(self, document: ChainDocument, last: Link, cause_id: str) -> tuple[ChainDocument, ChainVersion]:
        """Close the last link, and open the next one where a sender is elected, who then finds it ready."""
        elected = await self._store.first_in_line(document.queue_id, None)
        if elected == "" or elected != document.sender_node or last.state is LinkState.OPENING:
            return await self._closed(document.queue_id, last.epoch, cause_id)
        asked = SendRequest(document.sender_node, document.sender_token, last.epoch)
        with contextlib.suppress(Fenced):  # a newer sender was elected meanwhile: the link may be closed all the same
            await self._execution.acquire_send(document.queue_id, asked, cause_id)
        document, version = await self._store.read_chain(document.queue_id)
        now_last = document.last_link
        if now_last is not None and now_last.epoch == last.epoch and now_last.state in chain.LIVE:
            return await self._closed(document.queue_id, last.epoch, cause_id)
        return document, version

    async def _closed(self, queue_id: QueueId, epoch: Epoch, cause_id: str) -> tuple[ChainDocument, ChainVersion]:
        result = await self._execution.run(queue_id, close_link.start(epoch), close_link.step, cause_id)
        if isinstance(result, LinkClosed):
            return result.document, result.version
        reasons = dict(result.reasons) if isinstance(result, Wait) else {}
        why = f": {status.told(reasons)}" if reasons else ""
        raise Waiting(f"link {epoch} can't be closed now{why}", reasons=reasons)

    # ---- groups

    async def list_groups(self, _request: pb.ListGroupsRequest) -> pb.ListGroupsReply:
        """All groups, by name, with the queues that send to them and those with unread links on them."""
        registry = await self._store.look_up_registry()
        reply = pb.ListGroupsReply()
        for name in sorted(registry.groups):
            await asyncio.sleep(0)  # each looks at all queues, and other calls have their turn between two
            reply.groups.append(self._group_view(name, self._queues()))
        away = [
            (MemberName(group.group, one.member), one)
            for group in reply.groups
            for one in group.members
            if not one.is_registered
        ]
        for (_, view), why in await side_by_side(away, lambda each: self._store.standing_aside(each[0])):
            view.problem = why
        return reply

    async def drain_group(self, request: pb.GroupRequest) -> pb.GroupView:
        """Take a healthy group out of service: mark it, close what is open on it at once, and have no switch lead there any more. Raises UnknownGroup.

        What can't be closed now, or soon, or has no other group to go on with, is left to the elected coordinator: the group is
        drained all the same. Also where a chain can't be read, which raises NoChainDocument: nobody knows whether it sends there.
        """
        registry = await self._marked(request, is_draining=True)
        queues = [document for document in await self._store.read_chains() if not document.is_deleted]
        await self._close_on(request.group, queues, registry, request.cause_id)
        concerned = [one for one in queues if draining.may_lead_to(one, registry, request.group)]
        written = await side_by_side(concerned, lambda one: self._rid_of(one, request.group, request.cause_id))
        now = {document.queue_id: document for _, document in written}
        return self._group_view(request.group, [now.get(one.queue_id, one) for one in queues])

    async def resume_group(self, request: pb.GroupRequest) -> pb.GroupView:
        """Put a drained group back into service. Raises UnknownGroup."""
        await self._marked(request, is_draining=False)
        return self._group_view(request.group, self._queues())

    async def _marked(self, request: pb.GroupRequest, *, is_draining: bool) -> Registry:
        """The registry, behind the group's mark. Raises UnknownGroup."""
        checked_name(request.group, "group")
        await self._store.set_draining(request.group, is_draining=is_draining)
        registry = await self._store.look_up_registry()
        if request.group not in registry.groups:
            raise unknown_group(request.group)
        _log.info("group marked", group=request.group, is_draining=is_draining, cause_id=request.cause_id)
        return registry

    async def _rid_of(self, document: ChainDocument, group: str, cause_id: str) -> ChainDocument:
        """A queue's chain once no switch can lead to the drained group any more; where one did before, the chain tells.

        A switch that began before the mark was set knows nothing of it. So the chain is written even as it is: what such a one is
        about to write is refused, and it looks again.
        """
        what = f"no switch leads to {group}, it is being drained"
        with contextlib.suppress(UnknownQueue, ChainSetBack):  # it was deleted meanwhile; or nothing is done by it now
            document, _ = await self.change(
                document.queue_id, lambda now: draining.rid_of(now, group), what, cause_id, must_write=True
            )
        return document

    async def _close_on(
        self, group: str, documents: Iterable[ChainDocument], registry: Registry, cause_id: str
    ) -> None:
        """Close what is open on the group; what can't be closed now, or soon, is left."""
        until_s = boottime_s() + DRAINING_S
        for document in documents:
            if boottime_s() > until_s:
                break
            last = document.last_link
            if last is None or last.state is not LinkState.OPEN or last.group != group:
                continue
            if not chain.can_switch(document, registry, self._store.size_bytes(document.queue_id)):
                continue  # it goes on there until another group can take over
            try:
                await self._switched(document, last, cause_id)
            except UnknownQueue:
                continue  # it was deleted meanwhile
            except WorldError as error:
                _log.info(
                    "link can't be closed yet",
                    queue=document.name,
                    epoch=last.epoch,
                    reason=error.message,
                    cause_id=cause_id,
                )
                break

    async def remove_group(self, request: pb.GroupRequest) -> pb.Done:
        """Forget a drained group without members. Raises UnknownGroup, and Waiting with all that stands against it.

        Its mark has to be the same from before the chains are read until it goes: where a group is drained no new link is made.
        """
        name = checked_name(request.group, "group")
        mark_version = await self._store.mark_version(name)
        registry = await self._store.look_up_registry([name])
        documents = [document for document in await self._store.read_chains() if not document.is_deleted]
        if reasons := removal.obstacles(registry.group(name), documents):
            raise removal.refused(name, reasons)
        what = f"{name} off the send list, it is being removed"
        for document in documents:
            if name in document.send_list:
                with contextlib.suppress(UnknownQueue):  # it was deleted meanwhile
                    await self.change(document.queue_id, lambda now: removal.without(now, name), what, request.cause_id)
        await self._store.remove_group(name, mark_version)
        _log.info("group removed", group=name, cause_id=request.cause_id)
        return pb.Done()

    def _queues(self) -> Iterator[ChainDocument]:
        """All that aren't deleted. One that is stays until every member that held anything of it has been told, and asks nothing of a group."""
        return (seen.document for seen in self._store.chains.values() if not seen.document.is_deleted)

    def _group_view(self, name: str, queues: Iterable[ChainDocument]) -> pb.GroupView:
        """`queues`: the chains of those that aren't deleted."""
        view = views.group_view(name, self._store.registry)
        for document in queues:
            # Also where the link is being closed: until it is, it isn't safe to stop the group.
            if chain.serving(document) == name:
                view.sending_queues.append(document.name)
            if readmission.backlog(document, name):
                view.backlog_queues.append(document.name)
            if any(link.group == name and link.state is LinkState.LOST for link in document.links):
                view.lost_queues.append(document.name)
        group = self._store.registry.group(name)
        for seen in self._store.chains.values():
            if seen.document.is_deleted and background.awaits(seen.document, group):
                view.deleted_queues.append(seen.document.name)
        return view

    # ---- subscriptions

    async def create_subscription(self, request: pb.CreateSubscriptionRequest) -> pb.SubscriptionView:
        """A new subscription; by default at the earliest kept record."""
        name = checked_name(request.subscription, "subscription")
        where = getattr(request, "from") or subscriptions.EARLIEST
        return await self._positioned(
            request.queue,
            name,
            where,
            lambda document, position: subscriptions.created(document, name, position, now_ms()),
            request.cause_id,
        )

    async def seek_subscription(self, request: pb.SeekSubscriptionRequest) -> pb.SubscriptionView:
        """A new generation of a subscription, at another position."""
        if not request.to:
            raise InvalidArgument("seek needs a position: earliest, latest or an offset")
        meant = SubscriptionId(request.subscription_id)
        return await self._positioned(
            request.queue,
            request.subscription,
            request.to,
            lambda document, position: subscriptions.sought(document, request.subscription, position, meant),
            request.cause_id,
            request.queue_id,
        )

    async def _positioned(
        self,
        queue: str,
        subscription: str,
        where: str,
        transition: Callable[[ChainDocument, QueuePosition], ChainDocument],
        cause_id: str,
        known_queue_id: int = 0,
    ) -> pb.SubscriptionView:
        queue_id = await self._store.queue_id(queue, known_queue_id)
        what = f"subscription {subscription} at {where}"
        made_by = messages.kept_cause(cause_id)

        async def put() -> tuple[ChainDocument, ChainVersion]:
            before, _ = await self._store.read_chain(queue_id)
            committed = None if where == subscriptions.EARLIEST else await self._description.committed(before)

            def change(document: ChainDocument) -> ChainDocument:
                if subscriptions.is_put_by(document, subscription, made_by):
                    return document
                is_same = document.last_link == before.last_link
                position = subscriptions.located(document, where, committed if is_same else None)
                return subscriptions.put_by(transition(document, position), subscription, made_by)

            return await self.change(queue_id, change, what, cause_id)

        document, _ = await _in_time(put)
        return await self._description.subscription(document, subscriptions.found(document, subscription))

    async def delete_subscription(self, request: pb.SubscriptionRequest) -> pb.Done:
        """The subscription goes, with its backlog. Who names its id may ask again, whoever has its name by then."""
        queue_id = await self._store.queue_id(request.queue)
        what = f"subscription {request.subscription} deleted"
        meant = SubscriptionId(request.subscription_id)
        document, _ = await self.change(
            queue_id,
            lambda document: subscriptions.deleted(document, request.subscription, meant),
            what,
            request.cause_id,
        )
        await self._store.sweep_readers(document)
        return pb.Done()
