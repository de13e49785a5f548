"""The stream of a link's batches from master to slave: the master's end (the slave's is in `replicate`).

The master opens it when a coordinator opens the link, or a sender comes to one at rest, makes the two copies equal, and from then
passes on each batch before it stores it itself. Many are in flight; the slave confirms what is durable, in order, and hears
what is committed within a moment even when nothing follows (H19).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core import replica_events
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.peer import of_peer
from seriatim.protocol import batch_streams, log, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import BatchMessage
from seriatim.protocol.errors import MemberBehind, PeerLost, SeriatimError, UnknownLink
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.marks import merged
from seriatim.protocol.names import Incarnation, Index
from seriatim.protocol.position import Position
from seriatim.protocol.streams import each, intact, read, send_now, write

_log = log.logger("broker.replication")

COPY_BYTES = 1024 * 1024
RETRY_S = 0.005
PATIENCE_S = 2.0
"""How long a slave may not know the link: longer than a coordinator tries to open it there."""


class SlaveStream:
    """The master's end, as long as the stream lives: it ends by `end`, by `let_go`, or when the slave is lost.

    `stub`, `direct`: see `batch_streams.replicate`.
    """

    def __init__(self, broker: Broker, runner: LinkRunner, slave: Incarnation, stub: Any, direct: str) -> None:
        self._broker = broker
        self._runner = runner
        self._stub = stub
        self._direct = direct
        self._name = broker.link_name(runner.key, slave)
        self._call: Any = None  # while both copies are equal
        self._outgoing: deque[EncodedBatch] = deque()
        self._committed = Index(0)
        self._committed_told = Index(0)
        self._wake = asyncio.Event()
        self._is_let_go = False
        self.is_ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="slave-stream")

    def forward(self, encoded: EncodedBatch) -> None:
        if not self._outgoing and send_now(self._call, BatchMessage.of(encoded, self._committed)):
            self._committed_told = self._committed
            return
        self._outgoing.append(encoded)
        self._wake.set()

    def tell_committed(self, index: Index) -> None:
        self._committed = index
        self._wake.set()

    def end(self, error: SeriatimError) -> None:
        if not self.is_ended:
            self.is_ended = True
            _log.info("stream to the slave ends", epoch=self._runner.record.epoch, reason=error.message)
            self._task.cancel()

    def let_go(self) -> None:
        """End without an error, behind what the slave is still to be told."""
        self._is_let_go = True
        self._wake.set()

    async def _run(self) -> None:
        reason = "it ended the stream"
        try:
            await self._serve()
        except SeriatimError as error:
            reason = error.message
        except asyncio.CancelledError:
            reason = "the stream was ended"
            if not self.is_ended:
                raise
        finally:
            self.is_ended = True
            self._runner.slave_ended(self, reason)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        patience_s = loop.time() + PATIENCE_S
        while True:
            call = await batch_streams.replicate(self._direct, lambda: self._stub)
            try:
                await write(call, pb.ReplicateRequest(open=self._open()))
                first = await read(call)
                if first is None:
                    raise PeerLost("the slave ended the stream")
                await self._equalise(call, Index(first.next_index), first.hash)
                self._call = call
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send(call))
                    tasks.create_task(self._receive(call))
            except UnknownLink:
                # The slave gets its OpenLink at the same moment; until then it doesn't know the link.
                if loop.time() > patience_s:
                    raise
                await asyncio.sleep(RETRY_S)
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
            else:
                return
            finally:
                self._call = None
                call.cancel()

    def _open(self) -> pb.ReplicateOpen:
        me = as_message(self._broker.incarnation)
        return pb.ReplicateOpen(link=self._name, from_master=me, token=self._runner.record.token)

    async def _equalise(self, call: Any, index: Index, digest: bytes) -> None:
        """Whichever has more passes the rest to the other, so that a grant finds two equal copies (H3)."""
        runner = self._runner
        await runner.until(lambda: runner.is_quiet)
        mine = runner.state.tail.index
        if index > mine:
            await self._fetch(index)
        elif runner.hash_at(index) != digest:
            raise PeerLost(f"the two copies of this link differ before index {index}")
        else:
            sent = index
            while sent < mine:
                for encoded in await self._broker.batches(runner.key, sent, mine, COPY_BYTES):
                    await write(call, BatchMessage.of(encoded))
                    sent = encoded.header.end_index
            while index < mine:
                reply = await read(call)
                if reply is None:
                    raise PeerLost("the slave ended the stream")
                index, digest = Index(reply.next_index), reply.hash
        refused = runner.apply(replica_events.PeerReady(index, digest))
        if refused is not None:
            raise refused

    async def _fetch(self, end: Index) -> None:
        runner = self._runner
        async for encoded in copied(self._stub, self._name, runner.state.tail.index, end):
            refused = runner.apply(replica_events.BatchCopied(encoded.header, encoded.header_bytes), encoded)
            if refused is not None:
                raise refused
        if runner.state.tail.index != end:
            raise MemberBehind(f"the slave said it has {end}, and sent up to {runner.state.tail.index}")
        await runner.until(lambda: runner.is_quiet)

    async def _send(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing:
                encoded = self._outgoing.popleft()
                self._committed_told = committed = self._committed
                await write(call, BatchMessage.of(encoded, committed))
            if self._committed > self._committed_told:
                self._committed_told = self._committed
                await write(call, pb.ReplicateRequest(committed_index=self._committed_told))
            if self._is_let_go:
                await call.done_writing()
                return

    async def _receive(self, call: Any) -> None:
        def confirmed(reply: pb.ReplicateReply) -> bool:
            self._runner.apply(replica_events.PeerConfirmed(Index(reply.next_index), reply.hash))
            return True

        await each(call, confirmed)
        if not self._is_let_go:
            raise PeerLost("the slave ended the stream")


async def copied(stub: Any, link: pb.LinkName, start: Index, end: Index) -> AsyncIterator[EncodedBatch]:
    """What the other member has of a link. Raises what it says, as its own (`of_peer`), and BadChecksum."""
    request = pb.CopyLinkRequest(link=link, from_index=start, to_index=end, takes_several=True)
    try:
        async for message in rpc.opened(lambda: stub.CopyLink(request)):
            for encoded in intact(message).batches():
                yield encoded
    except grpc.aio.AioRpcError as error:
        raise of_peer(rpc.translated(error)) from error
    except asyncio.CancelledError:
        rpc.check_cancelled()  # the peer may have come back elsewhere meanwhile
        raise


def position_message(runner: LinkRunner, position: Position) -> pb.Position:
    """A position with all marks that this member knows up to there, those from before the link included."""
    marks = merged(runner.record.start_marks, position.marks)
    return pb.Position(index=position.index, hash=position.hash, marks=marks)
