"""What a broker keeps of a Fetch stream whose reader takes no more."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from seriatim.broker_group.batch_cache import BatchCache
from seriatim.broker_group.fetch import FetchStream
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch, RecordColumns, encode
from seriatim.protocol.names import Epoch, Index, QueueId

KEY = (QueueId(1), Epoch(1))


class Disk:
    """Of a broker: batches of a record each, read up to a limit as the store does. `reads`: how many each time."""

    def __init__(self, count: int) -> None:
        self.stored = [encode(RecordColumns([b"v"], [at], "s", [1]), Index(at)) for at in range(count)]
        self.cache = BatchCache(0)
        self.reads: list[int] = []

    def check_kept(self, _key: object) -> None: ...

    async def batches(self, _key: object, index: Index, end: Index, limit_bytes: int) -> list[EncodedBatch]:
        found: list[EncodedBatch] = []
        while index + len(found) < end and sum(one.size_bytes for one in found) < limit_bytes:
            found.append(self.stored[index + len(found)])
        self.reads.append(len(found))
        return found

    def kept(self) -> list[int]:
        """By how many each of its batches is kept."""
        return [sys.getrefcount(one) for one in self.stored]


@pytest.mark.parametrize("takes_several", [False, True])
@pytest.mark.parametrize("credit_batches", [1, 7, 20])
def test_nothing_is_kept_for_a_reader_that_takes_no_more(takes_several: bool, credit_batches: int) -> None:
    """A megabyte each, or the largest batch, as long as each stood still: 164 MB for 20 of them with records of 8 MiB."""

    async def scenario() -> None:
        disk, sent = Disk(20), []

        class Context:
            async def write(self, message: Any) -> None:
                sent.append(len(message.batches()))

        stream: Any = FetchStream(disk, None, Context())  # type: ignore[arg-type]
        stream._credit_bytes = credit_batches * disk.stored[0].size_bytes
        state = SimpleNamespace(committed=SimpleNamespace(index=20))
        runner: Any = SimpleNamespace(key=KEY, readable_end=20, record=SimpleNamespace(end=None), state=state)
        before = disk.kept()
        pushing = asyncio.create_task(stream._push(runner, pb.FetchOpen(takes_several=takes_several), Index(0)))
        await asyncio.sleep(0.01)
        assert sum(sent) == sum(disk.reads) == credit_batches
        assert disk.kept() == before
        stream._credit_bytes += disk.stored[0].size_bytes
        stream._wake.set()
        await asyncio.sleep(0.01)
        assert sum(sent) == min(20, credit_batches + 1)
        pushing.cancel()

    asyncio.run(scenario())
