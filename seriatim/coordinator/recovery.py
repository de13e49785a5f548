"""An operator has a queue's chain made again that ZooKeeper lost (protocol.md 7)."""

from __future__ import annotations

import asyncio

from seriatim.coordinator.core import recovery
from seriatim.coordinator.core.recovery import Copy
from seriatim.coordinator.core.registry import Registry, not_ready
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.errors import InvalidArgument, QueueExists, UnknownQueue, Waiting
from seriatim.protocol.names import MemberName, QueueId, checked_name

_log = log.logger("coordinator.recovery")


class Recovery:
    """See the module. A call that was cut off may be made again, at any coordinator."""

    def __init__(self, store: Store, members: Members) -> None:
        self._store = store
        self._members = members

    async def recover_queue(self, request: pb.RecoverQueueRequest) -> pb.RecoverQueueReply:
        """Show from which copy of its chain a queue would go on; do it where the queue's name was said again (protocol.md 7)."""
        name = checked_name(request.queue, "queue")
        registry = await self._store.look_up_registry()
        copies, last_queue_id = await self._kept_chains(name, registry)
        now = await self._present_chain(name)
        if now is not None and not copies and not registry.set_back(now.document.queue_id):
            copy = now  # of a queue that nobody has sent to no member keeps one
        else:
            copy = recovery.newest(copies, name)
        document = copy.document
        if now is not None and now.document.queue_id != document.queue_id:
            raise _in_the_way(name, now.document.queue_id, document.queue_id)
        if now is not None and not registry.set_back(document.queue_id):
            if awaited := registry.awaited:
                raise not_ready(awaited)  # their disks may yet turn out to know more
            # Else a queue that was made anew under the name, and sent to, would hide the one that ZooKeeper lost.
            lost = {one.document.queue_id for one in copies} - {document.queue_id} - self._store.chains.keys()
            if lost:
                raise _in_the_way(name, document.queue_id, max(lost))
            unasked = _unasked(document, registry)
            what = f"nothing is to be recovered: no disk knows more than the chain of queue {name}{unasked}"
            return pb.RecoverQueueReply(what=what, is_needless=True)
        goes_on = now is not None and recovery.goes_on_from(now, copy)
        if now is not None:
            # Of two with the same version, a member's is from before ZooKeeper was set back.
            copies.insert(0, now)
            copy = recovery.newest(copies, name)
        what = _what_is_recovered(now, copy, registry)
        if not request.confirmed_queue:
            return pb.RecoverQueueReply(what=what)
        if request.confirmed_queue != name:
            raise InvalidArgument(f"{request.confirmed_queue!r} is not the queue's name: nothing was recovered")
        await self._store.skip_queue_ids(last_queue_id)
        version = recovery.version(copies)
        base = now.document if now is not None and goes_on else recovery.recovered(copy)
        wanted = recovery.with_last_seeks(base, copies)
        if now is None or wanted != now.document:
            expected = None if now is None else now.version
            if not await self._store.recover_queue(wanted, expected):
                raise Waiting("the chain changed meanwhile: look again", reasons={"chain": "it changed"})
        await self._store.raise_version(document.queue_id, version)
        _log.warning("queue recovered", queue=name, what=what, version=version, cause_id=request.cause_id)
        return pb.RecoverQueueReply(what=what, is_done=True)

    async def _kept_chains(self, queue: str, registry: Registry) -> tuple[list[Copy], QueueId]:
        """All copies of its chain that registered members keep; the last queue that one of them has a copy of."""
        members = [MemberName(group.name, place) for group in registry.groups.values() for place in group.members]
        copies, last = [], QueueId(0)
        for found, last_there in await asyncio.gather(*(self._members.kept_chains(queue, one) for one in members)):
            copies += found
            last = max(last, last_there)
        return copies, last

    async def _present_chain(self, queue: str) -> Copy | None:
        """What ZooKeeper has; None where it knows no such queue."""
        try:
            document, version = await self._store.read_chain(await self._store.queue_id(queue))
        except UnknownQueue:
            return None
        return Copy(document, version, "ZooKeeper")


def _in_the_way(name: str, there: QueueId, lost: QueueId) -> QueueExists:
    return QueueExists(
        f"there is another queue {name} now, with id {there}; the one with id {lost}, whose chain is kept on disks, can be "
        f"recovered once that one is deleted",
        queue=name,
    )


def _what_is_recovered(now: Copy | None, copy: Copy, registry: Registry) -> str:
    def shown(one: Copy) -> str:
        links = f"links to {one.document.next_epoch - 1}" if one.document.next_epoch > 1 else "no link"
        return f"version {one.version} ({links}, {len(one.document.subscriptions)} subscriptions)"

    before = "no chain" if now is None else shown(now)
    unasked = _unasked(copy.document, registry)
    return f"queue {copy.document.name} goes on from the copy of {copy.holder}, {shown(copy)}; ZooKeeper has {before}{unasked}"


def _unasked(document: ChainDocument, registry: Registry) -> str:
    """Who may have a newer copy. Where ZooKeeper lost all, the registry knows only of who is there."""
    known = {*registry.groups, *document.send_list, *(link.group for link in document.links)}
    missing = [name for group in sorted(known) for name in registry.group(group).missing]
    return f"; not asked, because not registered: {', '.join(missing)}" if missing else ""
