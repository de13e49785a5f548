"""The reader's calls to members."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from seriatim.consumer.core.view import Side
from seriatim.protocol import batch_streams, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchStub
from seriatim.protocol.direct import Take
from seriatim.protocol.direct_calls import DirectCalls
from seriatim.protocol.errors import IncompatibleVersion
from seriatim.protocol.streams import Outgoing, each

COMMIT_TIMEOUT_S = 2.0


class Members:
    """Channels to members, one an address."""

    def __init__(self) -> None:
        self._connections = rpc.Connections(BatchStub, has_batches=True)
        self._calls = DirectCalls()
        self._ahead: tuple[str, ...] = ()
        self._in_use: Counter[str] = Counter()

    def stub(self, address: str) -> BatchStub:
        return self._connections.stub(address)

    def connect(self, addresses: Iterable[str]) -> None:
        """Begin to connect, so that the first fetch finds a connection."""
        self._ahead = tuple(addresses)
        for address in self._ahead:
            self._connections.connect(address)

    @asynccontextmanager
    async def using(self, address: str) -> AsyncIterator[None]:
        """Where a member is read, or may be next, is tried again and again; any other address at which nobody answers is forgotten."""
        self._in_use[address] += 1
        try:
            await self._connections.forget_dead({*self._ahead, *self._in_use})
            yield
        finally:
            self._in_use[address] -= 1
            self._in_use = +self._in_use

    async def commit(self, side: Side, request: pb.CommitCursorRequest) -> None:
        """CommitCursor. Raises SeriatimErrors."""
        call: Any = lambda: self.stub(side.address).CommitCursor  # noqa: E731 - the stubs' file knows another type
        async with self.using(side.address):
            await self._calls.call(side.direct, call, request, COMMIT_TIMEOUT_S, side.address)

    async def close(self) -> None:
        await self._calls.close()
        await self._connections.close()


class FetchStream:
    """One Fetch at one member: credit goes there, batches come back."""

    def __init__(self, members: Members, side: Side, opening: pb.FetchOpen) -> None:
        self._members = members
        self._side = side
        self._opening = opening  # with all credit that was given: also before the stream is open, or a second time
        self._outgoing: Outgoing | None = None

    def give_credit(self, size_bytes: int) -> None:
        self._opening.credit_bytes += size_bytes
        if self._outgoing is not None:
            self._outgoing.put(pb.FetchRequest(credit_bytes=size_bytes))

    async def run(self, take: Take) -> None:
        """Give each reply to `take`, where it arrives, until it says no or the member is done. Raises SeriatimErrors, and what `take` raises."""
        async with self._members.using(self._side.address):
            try:
                await self._run(self._side.direct, take)
            except IncompatibleVersion:
                if not self._side.direct:
                    raise
                await self._run("", take)  # a member of an earlier version

    async def _run(self, direct: str, take: Take) -> None:
        call = await batch_streams.fetch(direct, lambda: self._members.stub(self._side.address))
        self._outgoing = Outgoing()
        writing = asyncio.create_task(self._outgoing.run(call, pb.FetchRequest(open=self._opening)))
        try:
            await each(call, take, self._side.address)
        finally:
            self._outgoing = None
            writing.cancel()
            call.cancel()
