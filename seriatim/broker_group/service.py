"""The broker's gRPC service: reads a request, calls what decides, writes the answer."""

# ruff: noqa: N802, ARG002 - the methods' names and parameters are those of the .proto file

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from seriatim.broker_group import opening, sealing
from seriatim.broker_group.append import AppendStream
from seriatim.broker_group.broker import EVERY_EPOCH, Broker, durability_from
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.fetch import FetchStream
from seriatim.broker_group.membership import Membership
from seriatim.broker_group.replicate import MasterStream
from seriatim.broker_group.replication import COPY_BYTES, position_message
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchMessage, together
from seriatim.protocol.errors import (
    DiskFailed,
    MemberBehind,
    WrongIncarnation,
)
from seriatim.protocol.incarnations import as_message, from_message
from seriatim.protocol.names import ChainVersion, Epoch, Generation, Index, QueueId, SubscriptionId, Token
from seriatim.protocol.rpc import answers_errors
from seriatim.protocol.seriatim_pb2_grpc import BrokerServicer
from seriatim.protocol.streams import read

LINKS_AT_ONCE = 16
"""So many links are described before others have their turn."""


class BrokerService(BrokerServicer):
    """See the module."""

    def __init__(self, broker: Broker, keeper: CursorKeeper, membership: Membership) -> None:
        self._broker = broker
        self._keeper = keeper
        self._membership = membership

    # ---- links

    @answers_errors
    async def OpenLink(self, request: pb.OpenLinkRequest, context: Any) -> pb.OpenLinkReply:
        runner, position = await opening.open_link(self._broker, request)
        return pb.OpenLinkReply(next=position_message(runner, position))

    @answers_errors
    async def Append(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # reads and writes
        await self.append(context)

    async def append(self, context: Any) -> None:
        """Serve an Append, by gRPC or direct."""
        await AppendStream(self._broker, context).run()

    @answers_errors
    async def Replicate(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # reads and writes
        await self.replicate(context)

    async def replicate(self, context: Any) -> None:
        """Serve a Replicate, by gRPC or direct."""
        await MasterStream(self._broker, context).run()

    @answers_errors
    async def Seal(self, request: pb.SealRequest, context: Any) -> pb.SealReply:
        self._broker.check_cluster(request.link.cluster)
        return await sealing.seal(self._broker, request)

    @answers_errors
    async def RecordEnd(self, request: pb.RecordEndRequest, context: Any) -> pb.RecordEndReply:
        broker = self._broker
        key = broker.check_name(request.link)
        runner, has_it = await sealing.record_end(
            broker,
            LinkRecord(
                *key,
                durability=durability_from(request.durability or "sync"),
                chain_version=ChainVersion(request.chain_version),
                end=Index(request.end),
                end_hash=request.link_hash,
                is_abandoned=request.is_abandoned,
            ),
        )
        reason = "" if has_it else "this member doesn't hold what the certificate names (yet)"
        return pb.RecordEndReply(has_it=has_it, next_index=runner.state.durable, reason=reason)

    @answers_errors
    async def CopyLink(self, request: pb.CopyLinkRequest, context: Any) -> None:  # type: ignore[override] # reads and writes
        runner = self._broker.link(self._broker.check_name(request.link))
        index, end = Index(request.from_index), Index(request.to_index)
        if end > runner.state.durable:
            raise MemberBehind(f"this member has records up to {runner.state.durable}", epoch=runner.record.epoch)
        while index < end:
            found = await self._broker.batches(runner.key, index, end, COPY_BYTES)
            for several in together(found) if request.takes_several else ([one] for one in found):
                await context.write(BatchMessage.of_several(several))
            index = found[-1].header.end_index

    @answers_errors
    async def DropLinks(self, request: pb.DropLinksRequest, context: Any) -> pb.DropLinksReply:
        broker = self._broker
        broker.check_addressed(request.cluster, request.to)
        queue_id, below = QueueId(request.queue_id), Epoch(request.below_epoch) or EVERY_EPOCH
        if broker.is_another(queue_id, request.queue, request.created_at_ms):
            # Nothing of that queue is here: it may be cleared away, and the one that is here recovered.
            return pb.DropLinksReply()
        broker.check_not_set_back(queue_id)
        broker.lets_go(queue_id, below)
        for key in broker.to_drop(queue_id, below):
            await broker.drop(key)
            self._keeper.forget(key)
        if below == EVERY_EPOCH:
            await broker.forget_chain(queue_id)
        return pb.DropLinksReply()

    # ---- reading

    @answers_errors
    async def Fetch(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # reads and writes
        await self.fetch(context)

    async def fetch(self, context: Any) -> None:
        """Serve a Fetch, by gRPC or direct."""
        await FetchStream(self._broker, self._keeper, context).run()

    @answers_errors
    async def TellReader(self, request: pb.TellReaderRequest, context: Any) -> pb.TellReaderReply:
        broker = self._broker
        key = broker.check_name(request.link)
        of, generation = SubscriptionId(request.subscription_id), Generation(request.generation)
        reader = CursorRecord(of, generation, Token(request.token), Index(request.cursor))
        try:
            runner = broker.find(key)
        except DiskFailed as why:  # the other member may serve it
            await self._keeper.tell_unread(key, reader, why)
        if runner is None:
            # Listed and not opened here yet, or this disk is new: the chain document knows.
            lacks = () if await self._membership.is_first_disk(key) else None
            runner = await broker.known(LinkRecord(*key, lacks=lacks))
        cursor = await self._keeper.tell(runner, reader)
        is_stale = runner.record.lacks_of(cursor.whose)
        index = None if is_stale else cursor.index
        return pb.TellReaderReply(cursor=index or 0, has_cursor=index is not None, is_stale=is_stale, by=cursor.by)

    @answers_errors
    async def CommitCursor(self, request: pb.CommitCursorRequest, context: Any) -> pb.CommitCursorReply:
        broker = self._broker
        key = broker.check_name(request.link)
        runner = broker.find(key) if request.is_relayed else broker.link(key)
        if runner is None:
            runner = await broker.known(LinkRecord(*key))
        await self._keeper.commit(runner, request)
        return pb.CommitCursorReply()

    @answers_errors
    async def ListCursors(self, request: pb.ListCursorsRequest, context: Any) -> pb.ListCursorsReply:
        runner = self._broker.link(self._broker.check_name(request.link))
        if not runner.record.has_cursors:
            raise MemberBehind("this member's cursors aren't whole either", epoch=runner.record.epoch)
        return self._keeper.listed(runner.key)

    @answers_errors
    async def DescribeLink(self, request: pb.DescribeLinkRequest, context: Any) -> pb.DescribeLinkReply:
        key = self._broker.check_name(request.link)
        runner = self._broker.find(key)
        if runner is None:
            return pb.DescribeLinkReply(is_known=False)
        record, state = runner.record, runner.state
        return pb.DescribeLinkReply(
            is_known=True,
            next_index=state.durable,
            committed_index=runner.readable_end,
            is_sealed=record.is_sealed,
            has_end=record.end is not None,
            end=record.end or 0,
            hash=runner.hash_at(state.durable) or b"",
            size_bytes=runner.size_bytes,
            cursors=self._cursors(key),
        )

    @answers_errors
    async def DescribeLinks(self, request: pb.DescribeLinksRequest, context: Any) -> pb.DescribeLinksReply:
        self._broker.check_addressed(request.cluster, request.to)
        reply = pb.DescribeLinksReply()
        for number, epoch in enumerate(request.epochs, 1):
            key = QueueId(request.queue_id), Epoch(epoch)
            with contextlib.suppress(DiskFailed):  # one that can't be read is no copy; that is said elsewhere
                extent = self._broker.extent(key)
                if extent is not None:
                    indexes = {"next_index": extent[0], "committed_index": extent[1]}
                    reply.links.add(epoch=epoch, **indexes, cursors=self._cursors(key))
            if number % LINKS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return reply

    def _cursors(self, key: LinkKey) -> list[pb.Cursor]:
        return [
            pb.Cursor(
                subscription_id=one.subscription_id, generation=one.generation, token=one.token, index=one.index or 0
            )
            for one in self._keeper.of_link(key).values()
            if one.index is not None
        ]

    @answers_errors
    async def FindSealed(self, request: pb.FindSealedRequest, context: Any) -> pb.FindSealedReply:
        self._broker.check_addressed(request.cluster, request.to)
        keys = ((QueueId(one.queue_id), Epoch(one.epoch)) for one in request.links)
        sealed = (key for key in keys if self._broker.is_sealed(key))
        return pb.FindSealedReply(sealed=[pb.LinkKey(queue_id=queue_id, epoch=epoch) for queue_id, epoch in sealed])

    @answers_errors
    async def ListKeptChains(self, request: pb.ListKeptChainsRequest, context: Any) -> pb.ListKeptChainsReply:
        self._broker.check_addressed(request.cluster, request.to)
        kept = self._broker.kept_chains
        reply = pb.ListKeptChainsReply(last_queue_id=max(kept, default=0))
        for queue_id in sorted(one for one, copy in kept.items() if copy.queue == request.queue):
            if (found := self._broker.store.chain(queue_id)) is not None:  # else it is on its way to the disk, or gone
                reply.chains.add(queue_id=queue_id, version=found[0], document=found[1])
        return reply

    @answers_errors
    async def Connect(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # reads and writes
        await self.connect(context)

    async def connect(self, context: Any) -> None:
        """Serve a Connect, by gRPC or direct."""
        broker = self._broker
        while (message := await read(context)) is not None:
            broker.check_cluster(message.cluster)
            if from_message(message.to) != broker.incarnation:
                raise WrongIncarnation(f"this is {broker.incarnation}", incarnation=str(broker.incarnation))
            await context.write(pb.ConnectReply(**{"from": as_message(broker.incarnation)}))
