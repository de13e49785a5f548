"""The Fetch stream: committed batches to a reader, pushed as they commit, within its credit. Only a recorded end ends it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core import cursors
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import BatchMessage, opening, together
from seriatim.protocol.errors import (
    InvalidArgument,
    MemberBehind,
    SeriatimError,
)
from seriatim.protocol.names import Generation, Index, SubscriptionId, Token
from seriatim.protocol.streams import read

READ_BYTES = 1024 * 1024
BEAT_S = 0.1
"""A stream with nothing to say says so this often, so that a reader notices a member that stands still."""


class FetchStream:
    """One Fetch call."""

    def __init__(self, broker: Broker, keeper: CursorKeeper, context: Any) -> None:
        self._broker = broker
        self._keeper = keeper
        self._context = context
        self._credit_bytes = 0
        self._failure: SeriatimError | None = None
        self._is_over = False
        self._wake = asyncio.Event()
        self._said_at_s = 0.0
        self._is_beat_due = False
        self._read_ahead: deque[EncodedBatch] = deque()

    async def run(self) -> None:
        """Until the link's end is sent or the reader leaves. Raises the error that ends it."""
        opened = await opening(self._context, "a Fetch")
        runner = self._broker.link(self._broker.check_name(opened.link))
        self._check(runner, opened)
        self._credit_bytes = opened.credit_bytes
        wake = self._wake.set
        runner.readers[wake] = None
        self._said_at_s = asyncio.get_running_loop().time()
        reading = asyncio.ensure_future(self._read_credit())
        beating = asyncio.ensure_future(self._beat())
        try:
            start = self._start(runner, Index(opened.from_index))
            await self._say(pb.FetchReply(start=start, committed_index=runner.state.committed.index))
            await self._push(runner, opened, Index(start.index))
        finally:
            runner.readers.pop(wake, None)
            reading.cancel()
            beating.cancel()

    async def _say(self, reply: pb.FetchReply | BatchMessage) -> None:
        await self._context.write(reply)
        self._said_at_s = asyncio.get_running_loop().time()

    async def _beat(self) -> None:
        """One timer, however much is said."""
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._said_at_s + BEAT_S - loop.time()
            if left_s <= 0:
                self._is_beat_due = True
                self._wake.set()
            await asyncio.sleep(left_s if left_s > 0 else BEAT_S)

    def _check(self, runner: LinkRunner, opened: pb.FetchOpen) -> None:
        """Whether this reader may have this link from here. Raises why not."""
        self._broker.check_kept(runner.key)
        self._check_reader(runner, opened)
        if runner.record.end is not None and not runner.holding().has_it:
            raise MemberBehind("this member doesn't hold this link whole", epoch=runner.record.epoch)

    def _check_reader(self, runner: LinkRunner, opened: pb.FetchOpen) -> None:
        """Whether nobody newer was named as the reader. Raises Fenced, OlderGeneration."""
        if opened.subscription_id:
            record = self._keeper.get(runner.key, SubscriptionId(opened.subscription_id))
            cursors.check_reader(record, Generation(opened.generation), Token(opened.token))

    def _start(self, runner: LinkRunner, from_index: Index) -> pb.Position:
        if from_index > runner.readable_end:
            raise MemberBehind(
                f"this member knows records up to {runner.readable_end} to be committed", epoch=runner.record.epoch
            )
        position = self._broker.store.position_before(runner.key, from_index).position
        for recent in (runner.state.committed, *runner.state.flight):
            if position.index < recent.index <= from_index:
                position = recent
        return pb.Position(index=position.index, hash=position.hash, marks=position.marks)

    async def _read_credit(self) -> None:
        try:
            while (message := await read(self._context)) is not None:
                if message.WhichOneof("kind") != "credit_bytes":
                    raise InvalidArgument("a Fetch stream goes on with credit")
                self._credit_bytes += message.credit_bytes
                self._wake.set()
            self._is_over = True
        except SeriatimError as error:
            self._failure = error
        self._wake.set()

    async def _push(self, runner: LinkRunner, opened: pb.FetchOpen, index: Index) -> None:
        while not self._is_over:
            if self._failure is not None:
                raise self._failure
            self._check(runner, opened)
            end = runner.readable_end
            while index < end and self._credit_bytes > 0:
                index = await self._send(runner, opened, index, end)
            if runner.record.end is not None and index >= runner.record.end:
                await self._say(pb.FetchReply(end=runner.record.end, committed_index=runner.record.end))
                return
            if self._is_beat_due:
                self._is_beat_due = False
                if index >= runner.readable_end and runner.is_left_unsure:
                    raise MemberBehind(
                        f"this member can't tell whether its records from {index} on are committed",
                        epoch=runner.record.epoch,
                    )
                is_sealed = runner.record.is_sealed and runner.record.end is None
                await self._say(pb.FetchReply(committed_index=runner.readable_end, is_sealed=is_sealed))
            elif index >= runner.readable_end or self._credit_bytes <= 0:
                await self._wake.wait()
                self._wake.clear()

    async def _send(self, runner: LinkRunner, opened: pb.FetchOpen, index: Index, end: Index) -> Index:
        """Send what follows, as far as the credit goes, and say where that ends. Nothing of it is kept: a reader may take no more for hours."""
        encoded = await self._next(runner, index, end)
        self._check_reader(runner, opened)  # named while this waited: nothing more to the one before (H8)
        several = next(together(self._waiting(runner, encoded, end))) if opened.takes_several else [encoded]
        self._credit_bytes -= sum(one.size_bytes for one in several)
        index = several[-1].header.end_index
        self._forget_sent(index)
        self._is_beat_due = False
        await self._say(BatchMessage.of_several(several, runner.state.committed.index))
        return index

    async def _next(self, runner: LinkRunner, index: Index, end: Index) -> EncodedBatch:
        found = self._at_hand(runner, index)
        if found is None:
            limit_bytes = min(READ_BYTES, self._credit_bytes)
            self._read_ahead = deque(await self._broker.batches(runner.key, index, end, limit_bytes))
            found = self._read_ahead[0]
        return found

    def _at_hand(self, runner: LinkRunner, index: Index) -> EncodedBatch | None:
        """The batch that starts there, where the disk needn't be asked."""
        found = self._broker.cache.get(runner.key, index)
        if found is not None:
            self._read_ahead.clear()
            return found
        self._forget_sent(index)
        is_there = self._read_ahead and self._read_ahead[0].header.first_index == index
        return self._read_ahead[0] if is_there else None

    def _forget_sent(self, index: Index) -> None:
        while self._read_ahead and self._read_ahead[0].header.first_index < index:
            self._read_ahead.popleft()

    def _waiting(self, runner: LinkRunner, first: EncodedBatch, end: Index) -> Iterator[EncodedBatch]:
        """It, and what is at hand behind it, within the credit."""
        found: EncodedBatch | None = first
        left_bytes = self._credit_bytes
        while found is not None:
            yield found
            left_bytes -= found.size_bytes
            index = found.header.end_index
            found = self._at_hand(runner, index) if left_bytes > 0 and index < end else None
