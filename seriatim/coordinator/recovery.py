"""An operator has a queue's chain made again that ZooKeeper lost (protocol.md 7)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from seriatim.coordinator.core import recovery
from seriatim.coordinator.core.chain import deleted_error
from seriatim.coordinator.core.recovery import Copy
from seriatim.coordinator.core.registry import Registry, not_ready
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.errors import InvalidArgument, QueueExists, UnknownQueue, Waiting
from seriatim.protocol.names import QueueId, checked_name

_log = log.logger("coordinator.recovery")


class Recovery:
    """See the module. A call that was cut off may be made again, at any coordinator."""

    def __init__(self, store: Store, members: Members) -> None:
        self._store = store
        self._members = members

    async def recover_queue(self, request: pb.RecoverQueueRequest) -> pb.RecoverQueueReply:
        """Show from which copy of its chain a queue would go on; do it where the queue's name was said again (protocol.md 7).

        Raises Waiting where it isn't what was shown any more: who had the newest copy then may be away now.
        """
        name = checked_name(request.queue, "queue")
        registry = await self._store.look_up_registry()
        copies, last_queue_id = await self._kept_chains(name, registry)
        named = await self._present_chain(name)
        now, copy = await self._found(name, named, copies, registry)
        if named is not None and not registry.set_back(named.document.queue_id):
            self._check_nothing_is_lost(named.document, copies, registry)
            unasked = _unasked(named.document, registry)
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
        if request.confirmed_what not in ("", what) and not goes_on:
            raise Waiting(f"nothing was recovered, look again: {what}", reasons={f"queue {name}": what})
        await self._store.new_queue_id(last_queue_id)  # no queue gets one up to that: ZooKeeper lost whose it was (H16)
        version = recovery.version(copies)
        base = now.document if now is not None and goes_on else recovery.recovered(copy)
        wanted = recovery.with_last_seeks(base, copies)
        if named is None or wanted != named.document:
            await self._write(wanted, now)
        await self._store.raise_version(base.queue_id, version)
        _log.warning("queue recovered", queue=name, what=what, version=version, cause_id=request.cause_id)
        return pb.RecoverQueueReply(what=what, is_done=True)

    async def _found(
        self, name: str, named: Copy | None, copies: list[Copy], registry: Registry
    ) -> tuple[Copy | None, Copy]:
        """What ZooKeeper has now of the queue, be it without its name, and the newest copy of it.

        Raises ChainSetBack, and as `_check_not_in_the_way`.
        """
        if named is not None and not copies and not registry.set_back(named.document.queue_id):
            return named, named  # of a queue that nobody has sent to no member keeps one
        copy = recovery.newest(copies, name)
        now = named or await self._chain_of(copy.document.queue_id)
        if now is not None:
            _check_not_in_the_way(now.document, copy.document)
            for one in copies:
                if one.document.queue_id == now.document.queue_id:
                    _check_not_in_the_way(now.document, one.document)
        return now, copy

    def _check_nothing_is_lost(self, now: ChainDocument, copies: list[Copy], registry: Registry) -> None:
        """Raises Unreachable where disks may yet turn out to know more.

        Raises QueueExists where this queue was made anew under the name, and sent to, and would hide the one that ZooKeeper lost.
        """
        if awaited := registry.awaited:
            raise not_ready(awaited)
        for one in copies:
            seen = self._store.chains.get(one.document.queue_id)
            is_going = seen is not None and seen.document.is_deleted and recovery.is_same(seen.document, one.document)
            if not is_going:
                _check_not_in_the_way(now, one.document)

    async def _write(self, wanted: ChainDocument, now: Copy | None) -> None:
        """Raises Waiting where the chain changed, and QueueExists where another queue got the name meanwhile."""
        if not await self._store.recover_queue(wanted, None if now is None else now.version):
            if (there := await self._present_chain(wanted.name)) is not None:
                _check_not_in_the_way(there.document, wanted)
            raise Waiting("the chain changed meanwhile: look again", reasons={"chain": "it changed"})

    async def _kept_chains(self, queue: str, registry: Registry) -> tuple[list[Copy], QueueId]:
        """All copies of its chain that registered members keep; the last queue that one of them has a copy of."""
        copies, last = [], QueueId(0)
        asked = (self._members.kept_chains(queue, one) for one in registry.registered)
        for found, last_there in await asyncio.gather(*asked):
            copies += found
            last = max(last, last_there)
        return copies, last

    async def _present_chain(self, queue: str) -> Copy | None:
        """What ZooKeeper has; None where it knows no such queue."""
        try:
            return await self._chain_of(await self._store.queue_id(queue))
        except UnknownQueue:
            return None

    async def _chain_of(self, queue_id: QueueId) -> Copy | None:
        """What ZooKeeper has under this id, whoever's it is."""
        try:
            document, version = await self._store.read_chain(queue_id)
        except UnknownQueue:
            return None
        return Copy(document, version, "ZooKeeper")


def _check_not_in_the_way(there: ChainDocument, lost: ChainDocument) -> None:
    """Raises QueueExists where another queue has the name now, or the id, and Waiting while that one is cleared away.

    Raises UnknownQueue where it is the same one, and was deleted.
    """
    if recovery.is_same(there, lost):
        if there.is_deleted:
            raise deleted_error(there)
        return
    if there.is_deleted:
        what = f"queue {there.name}, {_told(there)}, is deleted: look again when it is cleared away"
        raise Waiting(what, reasons={f"queue {there.name}": what})
    raise QueueExists(
        f"there is another queue {there.name} now, {_told(there)}; the queue {lost.name}, {_told(lost)}, whose chain is kept on disks, "
        f"can be recovered once that one is deleted",
        queue=there.name,
    )


def _told(document: ChainDocument) -> str:
    made = datetime.fromtimestamp(document.created_at_ms // 1000, UTC)
    return f"with id {document.queue_id}, made {made:%Y-%m-%d %H:%M:%S} UTC"


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
