"""Calls to brokers. Each goes to whoever is registered at a place of a group now, with a deadline."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from seriatim.coordinator import messages
from seriatim.coordinator.core.background import TellEnd
from seriatim.coordinator.core.events import SendOpen, SendSeal, TellReader
from seriatim.coordinator.core.reach import Reach, is_answer
from seriatim.coordinator.core.recovery import Copy
from seriatim.coordinator.core.registry import Registry
from seriatim.coordinator.core.seal import SealAnswer
from seriatim.coordinator.store import Store
from seriatim.coordinator.turns import Turns
from seriatim.protocol import chain_json, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.direct_calls import DirectCalls
from seriatim.protocol.errors import SeriatimError, Unreachable
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, MemberName, QueueId
from seriatim.protocol.position import Position
from seriatim.protocol.registration import Registration
from seriatim.protocol.seriatim_pb2_grpc import BrokerStub

if TYPE_CHECKING:
    from seriatim.protocol.seriatim_pb2_grpc import BrokerAsyncStub  # the stubs' file knows it, the module doesn't

Reply = TypeVar("Reply")

DESCRIBE_TIMEOUT_S = 0.5
"""Of calls that only look."""
KEPT_TIMEOUT_S = 10.0
"""A member looks through all the chains that it keeps."""


class Members:
    """Brokers by their place. `timeout_s`: deadline of each call but those that only look."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._connections: rpc.Connections[BrokerAsyncStub] = rpc.Connections(rpc.checked(BrokerStub))
        self._calls = DirectCalls()
        self._turns: weakref.WeakValueDictionary[tuple[MemberName, type], Turns] = weakref.WeakValueDictionary()
        """By member and type of the request, for as long as somebody calls, or stands in line."""
        self._connected = Registry()
        self._reach = Reach()

    async def close(self) -> None:
        """Close all connections."""
        await self._calls.close()
        await self._connections.close()

    async def forget_gone(self) -> None:
        """Close connections to addresses where nobody is registered any more: by gRPC, once nobody answers there either."""
        states = self._store.registry.registered.values()
        self._calls.keep_only({state.direct for state in states})
        await self._connections.forget_dead({state.address for state in states})

    def connect(self) -> None:
        """Begin to connect to all that are registered, so that a switch finds its connections."""
        registry = self._store.registry
        if registry is self._connected:
            return
        self._connected = registry
        for state in registry.registered.values():
            by_grpc = functools.partial(self._connections.connect, state.address)
            if state.direct:
                self._calls.connect(state.direct, by_grpc)
            else:
                by_grpc()

    async def reaches_nobody(self, for_s: float = 0.0) -> bool:
        """Whether, by `core.reach`, the path to all brokers is cut, and has been for `for_s`."""
        if not self._reach.silent_since_s:
            return False  # whoever is granted a place waits for this
        names = tuple(self._store.registry.registered)
        if not self._reach.is_in_doubt(len(names), boottime_s(), for_s):
            return False
        asked = [asyncio.ensure_future(self._answers(name)) for name in names]
        try:
            for answers in asyncio.as_completed(asked):
                if await answers:
                    return False
        finally:
            for one in asked:
                one.cancel()
        return True

    async def _answers(self, member: MemberName) -> bool:
        try:
            await self.describe_links(QueueId(0), (), member)
        except SeriatimError as error:
            return is_answer(error)
        return True

    async def open_link(self, effect: SendOpen, queue: ChainDocument, cause_id: str) -> Position:
        """OpenLink to the very incarnation that the link names."""
        link, registry = effect.link, self._store.registry
        request = pb.OpenLinkRequest(
            link=self._name(queue.queue_id, link.epoch, effect.side.incarnation),
            chain_version=effect.version,
            token=effect.token,
            master=messages.link_member(link.master, registry),
            slave=messages.link_member(link.slave, registry),
            durability=link.durability,
            flush_ms=link.flush_ms,
            marks=link.marks_on_two,
            max_record_bytes=effect.max_record_bytes,
            queue=queue.name,
            cause_id=cause_id,
        )
        reply = await self._call_in_turn(effect.side.name, lambda stub: stub.OpenLink, request)
        return messages.position_from(reply.next)

    async def seal(self, effect: SendSeal, queue_id: QueueId, cause_id: str) -> SealAnswer:
        """Seal to whoever is at the place now; the request names the incarnation that the link was made with."""
        link, registry = effect.link, self._store.registry
        request = pb.SealRequest(
            link=self._name(queue_id, link.epoch, effect.side.incarnation),
            chain_version=effect.version,
            master=messages.link_member(link.master, registry),
            slave=messages.link_member(link.slave, registry),
            durability=link.durability,
            cause_id=cause_id,
        )
        reply = await self._call_in_turn(effect.side.name, lambda stub: stub.Seal, request)
        return messages.seal_answer_from(reply)

    async def tell_reader(self, effect: TellReader, queue_id: QueueId, cause_id: str) -> pb.TellReaderReply:
        """TellReader to whoever is at the place now."""
        state = self._state(effect.member)
        request = pb.TellReaderRequest(
            link=self._name(queue_id, effect.link.epoch, state.incarnation),
            subscription_id=effect.subscription_id,
            generation=effect.generation,
            token=effect.token,
            cursor=effect.cursor,
            cause_id=cause_id,
        )
        return await self._call(effect.member, lambda stub: stub.TellReader, request, self._timeout_s)

    async def record_end(self, action: TellEnd, cause_id: str) -> pb.RecordEndReply:
        """RecordEnd of a sealed link to whoever is at the place now."""
        link, certificate = action.link, action.link.certificate
        if certificate is None:
            raise ValueError(f"link {link.epoch} has no end to tell")
        state, registry = self._state(action.member), self._store.registry
        request = pb.RecordEndRequest(
            link=self._name(action.document.queue_id, link.epoch, state.incarnation),
            chain_version=action.version,
            master=messages.link_member(link.master, registry),
            slave=messages.link_member(link.slave, registry),
            end=certificate.end,
            link_hash=certificate.link_hash,
            is_abandoned=certificate.is_abandoned,
            durability=link.durability,
            cause_id=cause_id,
        )
        return await self._call(action.member, lambda stub: stub.RecordEnd, request, self._timeout_s)

    async def drop_links(self, queue: ChainDocument, below: Epoch, member: MemberName, cause_id: str) -> None:
        """DropLinks to whoever is at the place now; `below` 0 drops the whole queue."""
        state = self._state(member)
        request = pb.DropLinksRequest(
            cluster=self._store.cluster,
            to=as_message(state.incarnation),
            queue_id=queue.queue_id,
            below_epoch=below,
            cause_id=cause_id,
            queue=queue.name,
            created_at_ms=queue.created_at_ms,
        )
        await self._call(member, lambda stub: stub.DropLinks, request, self._timeout_s)

    async def describe_links(
        self, queue_id: QueueId, epochs: Iterable[Epoch], member: MemberName
    ) -> dict[Epoch, pb.HeldLink]:
        """What the member at the place now holds of these links; one that it doesn't know is left out."""
        state = self._state(member)
        request = pb.DescribeLinksRequest(
            cluster=self._store.cluster, to=as_message(state.incarnation), queue_id=queue_id, epochs=epochs
        )
        reply = await self._call(member, lambda stub: stub.DescribeLinks, request, DESCRIBE_TIMEOUT_S)
        return {Epoch(one.epoch): one for one in reply.links}

    async def find_sealed(
        self, links: Iterable[tuple[QueueId, Epoch]], member: MemberName
    ) -> set[tuple[QueueId, Epoch]]:
        """Which of these links the member at the place now has sealed."""
        state = self._state(member)
        request = pb.FindSealedRequest(
            cluster=self._store.cluster,
            to=as_message(state.incarnation),
            links=[pb.LinkKey(queue_id=queue_id, epoch=epoch) for queue_id, epoch in links],
        )
        reply = await self._call(member, lambda stub: stub.FindSealed, request, DESCRIBE_TIMEOUT_S)
        return {(QueueId(one.queue_id), Epoch(one.epoch)) for one in reply.sealed}

    async def kept_chains(self, queue: str, member: MemberName) -> tuple[list[Copy], QueueId]:
        """The copies that the member at the place now keeps of the chains of queues of this name; the last queue that it has one of."""
        state = self._state(member)
        request = pb.ListKeptChainsRequest(cluster=self._store.cluster, to=as_message(state.incarnation), queue=queue)
        reply = await self._call(member, lambda stub: stub.ListKeptChains, request, KEPT_TIMEOUT_S)
        copies = [Copy(chain_json.decode(one.document), ChainVersion(one.version), str(member)) for one in reply.chains]
        return copies, QueueId(reply.last_queue_id)

    async def _call_in_turn(
        self, to: MemberName, method: Callable[[BrokerAsyncStub], Callable[..., Awaitable[Reply]]], request: object
    ) -> Reply:
        """As `_call`, one of a herd: each queue asks when a group fails."""
        turns = self._turns.setdefault((to, type(request)), Turns())
        return await turns.take(lambda: self._call(to, method, request, self._timeout_s))

    async def _call(
        self,
        to: MemberName,
        method: Callable[[BrokerAsyncStub], Callable[..., Awaitable[Reply]]],
        request: object,
        timeout_s: float,
    ) -> Reply:
        """A unary call to whoever is at a place now."""
        state = self._state(to)
        try:
            reply = await self._calls.call(
                state.direct, lambda: method(self._connections.stub(state.address)), request, timeout_s, str(to)
            )
        except SeriatimError as error:
            if is_answer(error):
                self._reach.answered()
            else:
                self._reach.unanswered(to, boottime_s())
            raise
        self._reach.answered()
        return reply

    def _name(self, queue_id: QueueId, epoch: Epoch, to: Incarnation) -> pb.LinkName:
        return pb.LinkName(cluster=self._store.cluster, queue_id=queue_id, epoch=epoch, to=as_message(to))

    def _state(self, member: MemberName) -> Registration:
        registry: Registry = self._store.registry
        state = registry.member(member)
        if state is None:
            raise Unreachable(f"{member} is not registered", member=str(member))
        return state
