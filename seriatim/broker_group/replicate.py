"""The Replicate stream: batches in order from the master, and what is durable here back; the slave's end of `replication`."""

from __future__ import annotations

import asyncio
from typing import Any

from seriatim.broker_group.append import take
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core.link_record import Role, sealed_error
from seriatim.broker_group.core.replica import SealPhase
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchMessage, opening
from seriatim.protocol.errors import SeriatimError, UnknownLink, WrongIncarnation
from seriatim.protocol.incarnations import from_message
from seriatim.protocol.names import Index
from seriatim.protocol.streams import each, send_now

OPENING_S = 1.0
"""How long a master is kept waiting for the OpenLink that makes this member its slave."""


class MasterStream:
    """The slave's end: a Replicate call. `confirm` keeps only the newest, which says all before it."""

    def __init__(self, broker: Broker, context: Any) -> None:
        self._broker = broker
        self._context = context
        self._newest: tuple[Index, bytes] | None = None
        self._is_confirming = False
        self._wake = asyncio.Event()
        self.error: SeriatimError | None = None

    def acknowledge(self, index: Index) -> None:
        """A slave has no sender."""

    def confirm(self, index: Index, digest: bytes) -> None:
        is_due = self._is_confirming and self._newest is None and self.error is None
        if is_due and send_now(self._context, pb.ReplicateReply(next_index=index, hash=digest)):
            return
        self._newest = (index, digest)
        self._wake.set()

    def end(self, error: SeriatimError) -> None:
        self.error = self.error or error
        self._wake.set()

    async def run(self) -> None:
        """Until the master ends the stream; raises the error with which it is ended otherwise."""
        opened = await opening(self._context, "a Replicate")
        runner = await self._broker.until_opened(self._broker.check_name(opened.link), OPENING_S)
        record, master = runner.record, from_message(opened.from_master)
        if runner.state.phase is not SealPhase.OPEN:
            raise sealed_error(record)
        if record.role is not Role.SLAVE or record.opened_start == 0:
            raise UnknownLink("this member isn't the slave of this link", epoch=record.epoch)
        if master != record.peer:
            raise WrongIncarnation(f"{master} isn't the master of this link", epoch=record.epoch)
        runner.attach(self)
        tasks: list[asyncio.Future[None]] = []
        try:
            await first_confirmation(runner, self._context)
            tasks.append(asyncio.ensure_future(self.write_confirmations()))
            tasks.append(asyncio.ensure_future(self._read(runner)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            runner.detach(self)

    async def _read(self, runner: LinkRunner) -> None:
        def feed(message: Any) -> bool:
            if self.error is not None:
                return False
            if isinstance(message, BatchMessage):
                error = take(self._broker, runner, message, None)
                if error is not None:
                    raise error
            if message.committed_index > runner.state.committed.index:
                runner.learn_committed(Index(message.committed_index))
            return True

        await each(self._context, feed)

    async def write_confirmations(self) -> None:
        """Until the stream is ended; raises the error with which it was. The first one is written before."""
        self._is_confirming = True
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.error is not None:
                raise self.error
            if self._newest is not None:
                index, digest = self._newest
                self._newest = None
                await self._context.write(pb.ReplicateReply(next_index=index, hash=digest))


async def first_confirmation(runner: LinkRunner, context: Any) -> None:
    """Tell the master what is durable here, when nothing is being written.

    Raises Sealed where a seal came first: what it found being written may never become durable, so it isn't confirmed.
    """
    await runner.until(lambda: runner.is_quiet or runner.state.phase is not SealPhase.OPEN)
    if runner.state.phase is not SealPhase.OPEN:
        raise sealed_error(runner.record)
    tail = runner.state.tail
    await context.write(pb.ReplicateReply(next_index=tail.index, hash=tail.hash))
