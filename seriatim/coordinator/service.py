"""The Coordinator service: each call read from its message, decided by the core, answered as a message."""

# ruff: noqa: N802, ARG002 - the methods' names and parameters are those of the .proto file

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc.aio

from seriatim import __version__
from seriatim.coordinator import messages, views
from seriatim.coordinator.abandoning import Abandoning
from seriatim.coordinator.administration import Operations
from seriatim.coordinator.core import subscriptions
from seriatim.coordinator.core.acquire_read import ReadRequest
from seriatim.coordinator.core.acquire_send import SendRequest
from seriatim.coordinator.core.background import SeenChain
from seriatim.coordinator.core.events import ReadGrant, SendGrant, Wait
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.description import Description
from seriatim.coordinator.execution import Execution
from seriatim.coordinator.members import Members
from seriatim.coordinator.recovery import Recovery
from seriatim.coordinator.store import Store
from seriatim.protocol import log, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Whose
from seriatim.protocol.coordinators import QUIET_S
from seriatim.protocol.errors import InvalidArgument, InvariantBroken, UnknownQueue, Unreachable, WrongCluster
from seriatim.protocol.flag import is_set_within
from seriatim.protocol.names import ChainVersion, Epoch, Generation, QueueId, SubscriptionId, Token
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorServicer
from seriatim.protocol.zookeeper import SessionState

_log = log.logger("coordinator")
_Context = grpc.aio.ServicerContext[Any, Any]
SETTLE_S = 0.002
"""Watchers are told so much after a change: the procedure that made it goes on first, and sending waits for that one."""
BEAT_S = QUIET_S / 2
_BEAT: Final = pb.QueueView(is_beat=True)


@dataclass(frozen=True, slots=True)
class _Made:
    """A view, the chain that it is of, and of the registry what it shows. `registry`: the last one in which that was the same."""

    seen: SeenChain
    registry: Registry
    shown: tuple[object, ...]
    view: pb.QueueView


def _by_operator(do: Callable[[Operations, Any], Awaitable[Any]]) -> Any:
    """A method of the service that does what an operator asks for. Any: the base class names its parameters, no Callable can."""

    @functools.wraps(do)
    async def answer(self: CoordinatorService, request: Any, _: _Context) -> Any:
        return await do(self._operations, request)

    return rpc.answers_errors(answer)


class CoordinatorService(CoordinatorServicer):
    """Answers clients, members and operators. Every method is safe to call again, at any coordinator."""

    def __init__(
        self, store: Store, members: Members, execution: Execution, description: Description, operations: Operations
    ) -> None:
        self._store = store
        self._members = members
        self._execution = execution
        self._description = description
        self._operations = operations
        self._abandoning = Abandoning(store, members)
        self._recovery = Recovery(store, members)
        self._views: dict[QueueId, _Made] = {}
        self._turns = asyncio.Lock()

    @rpc.answers_errors
    async def DescribeCluster(self, request: pb.DescribeClusterRequest, context: _Context) -> pb.DescribeClusterReply:
        """Where elections are held, and who coordinates."""
        coordinators = await self._store.coordinators()
        elected = await self._store.elected_coordinator()
        return pb.DescribeClusterReply(
            cluster=self._store.cluster,
            zookeeper=self._store.session.hosts,
            root=self._store.paths.root,
            version=__version__,
            coordinators=sorted(coordinators.values()),
            elected_coordinator=coordinators.get(elected[:-11], ""),
            is_outside=False,
        )

    async def _check_reach(self) -> None:
        """Raises Unreachable where another coordinator had better be asked: this one would take each group for one that failed."""
        if await self._members.reaches_nobody():
            raise Unreachable("this coordinator reaches no broker, and ZooKeeper has several that are there")

    @rpc.answers_errors
    async def AcquireSend(self, request: pb.AcquireSendRequest, context: _Context) -> pb.AcquireSendReply:
        """protocol.md 4."""
        await self._check_reach()
        queue_id = await self._store.queue_id(request.queue, request.queue_id)
        cause_id = request.cause_id or log.new_cause_id("acquire-send")
        asked = SendRequest(request.election_node, Token(request.token), Epoch(request.failed_epoch))
        if request.failed_epoch:
            _log.lasting(
                "link reported as failed",
                queue=request.queue,
                epoch=request.failed_epoch,
                failure=request.failure,
                cause_id=cause_id,
            )
        result = await self._execution.acquire_send(queue_id, asked, cause_id)
        match result:
            case SendGrant():
                _log.info(
                    "send granted",
                    queue=request.queue,
                    epoch=result.link.epoch,
                    group=result.link.group,
                    next_index=result.next_index,
                    cause_id=cause_id,
                )
                grant = messages.send_grant(result, self._store.registry)
                return pb.AcquireSendReply(grant=grant, queue_id=queue_id, token=result.token)
            case Wait():
                _log.lasting("sending waits", queue=request.queue, reasons=dict(result.reasons), cause_id=cause_id)
                return pb.AcquireSendReply(wait=messages.wait(result), queue_id=queue_id, token=result.token)
            case _:
                raise InvariantBroken(f"AcquireSend ended with {type(result).__name__}")

    @rpc.answers_errors
    async def AcquireRead(self, request: pb.AcquireReadRequest, context: _Context) -> pb.AcquireReadReply:
        """protocol.md 6."""
        await self._check_reach()
        queue_id = await self._store.queue_id(request.queue, request.queue_id)
        cause_id = request.cause_id or log.new_cause_id("acquire-read")
        asked = ReadRequest(request.subscription, request.election_node, Token(request.token))
        result = await self._execution.acquire_read(queue_id, asked, cause_id)
        match result:
            case ReadGrant():
                _log.info(
                    "read granted",
                    queue=request.queue,
                    subscription=request.subscription,
                    epoch=None if result.link is None else result.link.epoch,
                    index=result.index,
                    cause_id=cause_id,
                )
                grant = views.read_grant(result, self._store.registry)
                return pb.AcquireReadReply(grant=grant, queue_id=queue_id, token=result.token)
            case Wait():
                _log.lasting("reading waits", queue=request.queue, reasons=dict(result.reasons), cause_id=cause_id)
                return pb.AcquireReadReply(wait=messages.wait(result), queue_id=queue_id, token=result.token)
            case _:
                raise InvariantBroken(f"AcquireRead ended with {type(result).__name__}")

    @rpc.stream_answers_errors
    async def WatchQueue(self, request: pb.QueueRequest, context: _Context) -> AsyncIterator[pb.QueueView]:
        """The view now, and again whenever it changes; changes that come quickly are told as one.

        Who asks for beats is told every BEAT_S that nothing has changed: this loop goes on, and follows ZooKeeper.
        """
        queue_id = await self._store.queue_id(request.queue)
        changed = asyncio.Event()
        stop = self._store.on_change(changed.set)
        try:
            document, version = await self._store.read_chain(queue_id)
            told = views.queue_view(document, version, self._store.registry)
            yield told
            while True:
                is_beat = not await is_set_within(changed, BEAT_S if request.wants_beats else None)
                if not is_beat:
                    await asyncio.sleep(SETTLE_S)
                    changed.clear()
                if self._store.session.state is not SessionState.CONNECTED:
                    raise Unreachable("this coordinator can't follow ZooKeeper now")  # another one may
                if is_beat:
                    yield _BEAT
                    continue
                seen = self._store.chains.get(queue_id)
                if seen is None:
                    if await self._store.is_gone(queue_id):
                        raise UnknownQueue(f"queue {request.queue} was deleted", queue=request.queue)
                    continue
                view = await self._view(queue_id, seen)
                if view.chain_version >= told.chain_version and view != told:
                    told = view
                    yield view
        finally:
            stop()

    async def _view(self, queue_id: QueueId, seen: SeenChain) -> pb.QueueView:
        """What all watchers of a queue are told: made once, and again once something differs that it shows.

        One at a time, with a turn for other calls before each: what a thousand queues show changes at once, as when a member dies.
        """
        if (known := self._made(queue_id, seen)) is not None:
            return known
        async with self._turns:
            await asyncio.sleep(0)
            seen = self._store.chains.get(queue_id, seen)
            if (known := self._made(queue_id, seen)) is not None:
                return known
            if queue_id not in self._views:  # it wasn't watched before: room is made by those that were deleted
                self._views = {one: made for one, made in self._views.items() if one in self._store.chains}
            registry = self._store.registry
            view = views.queue_view(seen.document, seen.version, registry)
            self._views[queue_id] = _Made(seen, registry, views.shown_of(seen.document, registry), view)
            return view

    def _made(self, queue_id: QueueId, seen: SeenChain) -> pb.QueueView | None:
        made, registry = self._views.get(queue_id), self._store.registry
        if made is None or made.seen is not seen:
            return None
        if made.registry is not registry:
            if made.shown != views.shown_of(seen.document, registry):
                return None
            self._views[queue_id] = replace(made, registry=registry)
        return made.view

    @rpc.answers_errors
    async def DescribeQueue(self, request: pb.QueueRequest, context: _Context) -> pb.QueueView:
        """The view, with what members know. None older than now: what is told to be a queue's end is not behind what was acknowledged.

        Who wants only the chain is told no more: hundreds that start at the same moment ask for each other's elections else.
        """
        document, version = await self._store.read_chain(await self._store.queue_id(request.queue))
        if request.only_chain:
            return views.queue_view(document, version, self._store.registry)
        return await self._description.queue(document, version, has_elections=not request.no_elections)

    # ---- members

    @rpc.answers_errors
    async def ReportDrained(self, request: pb.DrainedReport, context: _Context) -> pb.DrainedNoted:
        """Subscriptions have read a link to its end: it leaves the heads of their consume lists, all in one."""
        self._check_cluster(request.cluster)
        epoch = Epoch(request.epoch)
        ends: list[pb.DrainedReport | pb.Drained] = [request, *request.also]
        of = {(SubscriptionId(one.subscription_id), Generation(one.generation)): Token(one.by) for one in ends}
        noted: tuple[Whose, ...] = ()

        def changed(document: ChainDocument) -> ChainDocument:
            nonlocal noted
            document, noted = subscriptions.all_drained(document, epoch, of)
            return document

        await self._execution.give_way_in(QueueId(request.queue_id))
        await self._operations.change(
            QueueId(request.queue_id),
            changed,
            f"link {epoch} drained by {'subscriptions' if request.also else 'subscription'} {', '.join(str(one) for one, _ in of)}",
            request.cause_id or log.new_cause_id("drained"),
        )
        return pb.DrainedNoted(
            noted=[pb.Drained(subscription_id=one, generation=generation) for one, generation in noted]
        )

    @rpc.answers_errors
    async def NoteStaleCursors(self, request: pb.StaleCursorsNote, context: _Context) -> pb.Done:
        """A member's cursors of a link are stale, or no longer (H7).

        A note that stands already is written again, and one is taken back only while the chain is as whoever asks has read
        it: what takes back an earlier note, and is late, can't take back this one.
        """
        self._check_cluster(request.cluster)
        if request.member not in ("a", "b"):
            raise InvalidArgument(f"{request.member!r} is no member: a or b")
        epoch, member = Epoch(request.epoch), request.member
        whose = None  # a member of an earlier version doesn't say
        if request.subscription_id:
            whose = SubscriptionId(request.subscription_id), Generation(request.generation)

        def noted(document: ChainDocument) -> ChainDocument:
            if request.is_stale:
                return subscriptions.with_stale_cursors(document, epoch, member, whose, Token(request.token))
            return subscriptions.without_stale_cursors(document, epoch, member)

        await self._execution.give_way_in(QueueId(request.queue_id))
        await self._operations.change(
            QueueId(request.queue_id),
            noted,
            f"cursors of link {request.epoch} on {request.member} {'are' if request.is_stale else 'no longer'} stale",
            request.cause_id or log.new_cause_id("stale-cursors"),
            must_write=request.is_stale,
            only_at=ChainVersion(request.chain_version),
        )
        return pb.Done()

    # ---- operators

    CreateQueue = _by_operator(Operations.create_queue)
    AlterQueue = _by_operator(Operations.alter_queue)
    ListQueues = _by_operator(Operations.list_queues)
    DeleteQueue = _by_operator(Operations.delete_queue)
    RotateQueue = _by_operator(Operations.rotate_queue)

    @rpc.answers_errors
    async def AbandonLink(self, request: pb.AbandonLinkRequest, context: _Context) -> pb.AbandonLinkReply:
        """Give up what is gone for good (protocol.md 5.7)."""
        return await self._abandoning.abandon_link(request)

    @rpc.answers_errors
    async def RecoverQueue(self, request: pb.RecoverQueueRequest, context: _Context) -> pb.RecoverQueueReply:
        """Make a chain again that ZooKeeper lost (protocol.md 7)."""
        return await self._recovery.recover_queue(request)

    ListGroups = _by_operator(Operations.list_groups)
    DrainGroup = _by_operator(Operations.drain_group)
    ResumeGroup = _by_operator(Operations.resume_group)
    RemoveGroup = _by_operator(Operations.remove_group)
    CreateSubscription = _by_operator(Operations.create_subscription)
    SeekSubscription = _by_operator(Operations.seek_subscription)
    DeleteSubscription = _by_operator(Operations.delete_subscription)

    def _check_cluster(self, cluster: str) -> None:
        if cluster != self._store.cluster:
            raise WrongCluster(f"this is cluster {self._store.cluster}, not {cluster}", cluster=self._store.cluster)
