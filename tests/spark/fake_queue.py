"""A queue in memory behind real gRPC: what Spark's tasks need of a coordinator and a member, and a grant for an election.

It holds links as the real ones do (recorded ends, bases, marks for re-sends) but promises nothing when killed: tests of the
replay kill the replay, not the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from seriatim.consumer.loop import LoopThread
from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch, RecordColumns, encode
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import OlderGeneration, UnknownQueue
from seriatim.protocol.names import Index
from seriatim.protocol.seriatim_pb2_grpc import (
    BrokerServicer,
    CoordinatorServicer,
    add_BrokerServicer_to_server,
    add_CoordinatorServicer_to_server,
)

QUEUE_ID = 7


@dataclass
class Link:
    epoch: int
    base: int
    marks: dict[str, int] = field(default_factory=dict)
    batches: list[EncodedBatch] = field(default_factory=list)
    end: int | None = None
    cursor: int = 0

    @property
    def is_consumed(self) -> bool:
        return self.end is not None and self.cursor >= self.end

    @property
    def next_index(self) -> int:
        return self.batches[-1].header.end_index if self.batches else 0


class FakeQueue(CoordinatorServicer, BrokerServicer):
    """A context manager; `address` is coordinator and member at once.

    `may_be_outdated`: what its views say. `tells_committed`: False: no member answers a coordinator, so that its views lack the
    committed index of an open link. `slave_lacks`: not None: only the slave answers, which doesn't know that these last records
    are committed.
    """

    def __init__(self, name: str, *, zookeeper: str = "", cluster: str = "fake") -> None:
        self.name = name
        self.cluster = cluster
        self.zookeeper = zookeeper
        self.links = [Link(1, 0)]
        self.dropped_links = 0
        self.created_at_ms = 1_700_000_000_000
        self.version = 1
        self.tells_committed = True
        self.may_be_outdated = False
        self.slave_lacks: int | None = None
        self.cursors: list[int] = []
        self.generation = 1
        self.tokens: dict[str, int] = {}
        self.fetched_tokens: set[int] = set()
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread = LoopThread("fake queue")
        self._thread.run(self._serve(), 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._server.stop(None), 60)
        self._thread.close()

    async def _serve(self) -> None:
        self._server = rpc.server()
        add_CoordinatorServicer_to_server(self, self._server)
        add_BrokerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{rpc.listen(self._server, '127.0.0.1:0')}"
        await self._server.start()

    # ---- what tests do

    def append(self, columns: RecordColumns) -> None:
        """One batch into the last link."""
        link = self.links[-1]
        link.batches.append(encode(columns, Index(link.next_index)))

    def append_values(
        self, values: Sequence[bytes], first_seq: int, *, per_batch: int = 500, source: str = "s"
    ) -> None:
        for at in range(0, len(values), per_batch):
            part = list(values[at : at + per_batch])
            seqs = list(range(first_seq + at, first_seq + at + len(part)))
            self.append(RecordColumns(part, seqs, source, [1_700_000_000_000] * len(part)))

    def switch(self) -> None:
        """Seal the last link and open another; its readers know what was delivered before."""
        last = self.links[-1]
        last.end = last.next_index
        marks = dict(last.marks)
        for batch in last.batches:
            for span in batch.header.spans:
                marks[span.source] = max(marks.get(span.source, -1), span.last_seq)
        self.links.append(Link(last.epoch + 1, last.base + last.end, marks))
        self.version += 1

    # ---- as coordinator

    def _told(self, link: Link) -> int:
        if link.end is None and not self.tells_committed:
            return 0
        return link.next_index if link.end is not None else link.next_index - (self.slave_lacks or 0)

    def _view(self) -> pb.QueueView:
        member = pb.LinkMember(group="g1", member="a", address=self.address)
        slave = pb.LinkMember(group="g1", member="b", address=self.address)
        now = pb.Incarnation(disk_id="d", start=1)
        links = [
            pb.LinkView(
                epoch=link.epoch,
                state=(LinkState.OPEN if link.end is None else LinkState.SEALED).value,
                has_base=True,
                base=link.base,
                has_end=link.end is not None,
                end=link.end or 0,
                master=member,
                slave=slave,
                master_now=now,
                slave_now=now,
                marks=link.marks,
                are_marks_known=True,
                has_committed=self.tells_committed or link.end is not None,
                committed_index=self._told(link),
                is_committed_exact=link.end is not None or (self.tells_committed and self.slave_lacks is None),
            )
            for link in self.links[self.dropped_links :]
        ]
        subscription = pb.SubscriptionView(
            subscription="replay",
            subscription_id=3,
            generation=self.generation,
            consume_list=[link.epoch for link in self.links if not link.is_consumed],
        )
        return pb.QueueView(
            queue_id=QUEUE_ID,
            queue=self.name,
            cluster=self.cluster,
            chain_version=self.version,
            created_at_ms=self.created_at_ms,
            links=links,
            subscriptions=[subscription],
            may_be_outdated=self.may_be_outdated,
            first_offset=self.links[self.dropped_links].base
            if links
            else self.links[-1].base + self.links[-1].next_index,
        )

    def _check(self, queue: str) -> None:
        if queue != self.name:
            raise UnknownQueue(f"there is no queue {queue!r}", queue=queue)

    @rpc.answers_errors
    async def DescribeCluster(self, request, context):  # noqa: N802
        return pb.DescribeClusterReply(cluster=self.cluster, zookeeper=self.zookeeper, coordinators=[self.address])

    @rpc.answers_errors
    async def DescribeQueue(self, request, context):  # noqa: N802
        self._check(request.queue)
        return self._view()

    @rpc.stream_answers_errors
    async def WatchQueue(self, request, context):  # noqa: N802
        self._check(request.queue)
        seen = 0
        while True:
            if self.version != seen:
                seen = self.version
                yield self._view()
            await asyncio.sleep(0.05)

    @rpc.answers_errors
    async def AcquireRead(self, request, context):  # noqa: N802
        self._check(request.queue)
        token = self.tokens.setdefault(request.election_node, len(self.tokens) + 1)
        head = next(link for link in self.links if not link.is_consumed)
        grant = pb.ReadGrant(
            subscription_id=3, generation=self.generation, epoch=head.epoch, index=head.cursor, view=self._view()
        )
        return pb.AcquireReadReply(queue_id=QUEUE_ID, token=token, grant=grant)

    @rpc.answers_errors
    async def SeekSubscription(self, request, context):  # noqa: N802
        self._check(request.queue)
        self.generation += 1
        self.version += 1
        for link in self.links:
            link.cursor = max(0, min(int(request.to) - link.base, link.next_index))
        return pb.SubscriptionView(subscription="replay", subscription_id=3, generation=self.generation)

    # ---- as member

    @rpc.stream_answers_errors
    async def Fetch(self, request_iterator, context):  # noqa: N802
        opening = (await anext(aiter(request_iterator))).open
        self.fetched_tokens.add(opening.token)
        link = next(link for link in self.links if link.epoch == opening.link.epoch)
        marks = dict(link.marks)
        at = 0
        is_started = False
        while True:
            for batch in link.batches[at:]:
                at += 1
                if batch.header.end_index > opening.from_index:
                    if not is_started:
                        yield pb.FetchReply(start=pb.Position(index=batch.header.first_index, marks=marks))
                        is_started = True
                    yield pb.FetchReply(
                        batch=pb.Batch(header=batch.header_bytes, payload=batch.payload),
                        committed_index=link.next_index,
                    )
                for span in batch.header.spans:
                    marks[span.source] = max(marks.get(span.source, -1), span.last_seq)
            if link.end is not None and at == len(link.batches):
                yield pb.FetchReply(end=link.end, committed_index=link.next_index)
                return
            await asyncio.sleep(0.01)

    @rpc.answers_errors
    async def CommitCursor(self, request, context):  # noqa: N802
        if request.generation != self.generation:
            raise OlderGeneration("the subscription was sought")
        link = next(link for link in self.links if link.epoch == request.link.epoch)
        self.cursors.append(link.base + request.index)
        link.cursor = max(link.cursor, request.index)
        self.version += link.is_consumed
        return pb.CommitCursorReply()
