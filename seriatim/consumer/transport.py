"""The reader's calls over gRPC to members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio

from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchMessage, BatchStub


class Members:
    """Channels to members, one an address."""

    def __init__(self) -> None:
        self._connections = rpc.Connections(BatchStub, has_batches=True)

    def stub(self, address: str) -> BatchStub:
        return self._connections.stub(address)

    def connect(self, addresses: Iterable[str]) -> None:
        """Begin to connect, so that the first fetch finds a connection."""
        for address in addresses:
            self._connections.connect(address)

    async def close(self) -> None:
        await self._connections.close()


class FetchStream:
    """One Fetch at one member: credit goes there, batches come back.

    Iterate it for the replies. Raises SeriatimErrors.
    """

    def __init__(self, stub: BatchStub, address: str, opening: pb.FetchOpen) -> None:
        self._address = address
        self._requests: asyncio.Queue[pb.FetchRequest | None] = asyncio.Queue()
        self._requests.put_nowait(pb.FetchRequest(open=opening))
        self._call: Any = stub.Fetch(self._outgoing())  # type: ignore[arg-type] # grpc-stubs knows sync calls only

    async def _outgoing(self) -> AsyncIterator[pb.FetchRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def give_credit(self, size_bytes: int) -> None:
        self._requests.put_nowait(pb.FetchRequest(credit_bytes=size_bytes))

    def close(self) -> None:
        self._requests.put_nowait(None)
        self._call.cancel()

    async def replies(self) -> AsyncIterator[pb.FetchReply | BatchMessage]:
        try:
            async for reply in self._call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise rpc.translated(error, self._address) from error
        finally:
            self.close()
