"""The Append stream: batches in order from the elected sender, cumulative acknowledgements back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core import disk
from seriatim.broker_group.core.link_record import Role
from seriatim.broker_group.core.replica_events import (
    BatchArrived,
)
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.opening import end_rest
from seriatim.protocol import batch, errors
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchMessage, opening
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import (
    BadChecksum,
    CallerError,
    Fenced,
    PartlyResend,
    Resend,
    SeriatimError,
    UnknownLink,
    WrongIndex,
)
from seriatim.protocol.names import Index, Token
from seriatim.protocol.streams import each, read, send_now

SETTLE_S = 1.0
"""How long the acknowledgements of what came before a refused batch are waited for, and then for the sender to leave."""

_HARMLESS = (CallerError, Resend, PartlyResend, WrongIndex, BadChecksum)
"""Refusals that say nothing against the link: what came before is acknowledged first."""


class AppendStream:
    """One Append call."""

    def __init__(self, broker: Broker, context: Any) -> None:
        self._broker = broker
        self._context = context
        self._acknowledged: Index | None = None
        self._told: Index | None = None
        self._error: SeriatimError | None = None
        self._wake = asyncio.Event()
        self._reading: asyncio.Future[Any] | None = None

    def acknowledge(self, index: Index) -> None:
        self._acknowledged = index
        is_settling = self._reading is None or self._reading.done()
        if self._error is None and not is_settling and send_now(self._context, pb.AppendReply(next_index=index)):
            self._told = index
        else:
            self._wake.set()

    def confirm(self, index: Index, digest: bytes) -> None:
        """The master confirms to nobody."""

    def end(self, error: SeriatimError) -> None:
        self._error = self._error or error
        self._wake.set()

    async def run(self) -> None:
        """Until the sender ends the stream; raises the error that ends it otherwise, having told it first."""
        try:
            await self._serve()
        except SeriatimError as error:
            await self._refuse(error)
            raise
        finally:
            if self._reading is not None:
                self._reading.cancel()

    async def _refuse(self, error: SeriatimError) -> None:
        """Say why in a message, and wait for the sender to leave: one that is writing may not be told a status."""
        await self._context.write(pb.AppendReply(next_index=self._told or 0, refusal=errors.to_wire(error)))
        self._error = error
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._discard())
        await asyncio.wait((self._reading,), timeout=SETTLE_S)

    async def _discard(self) -> None:
        while await read(self._context) is not None:
            continue

    async def _serve(self) -> None:
        runner, token = await self._opened()
        await end_rest(self._broker, runner)
        runner.attach(self)
        self.acknowledge(runner.state.committed.index)
        reading = self._reading = asyncio.ensure_future(self._read(runner, token))
        try:
            await self._write(runner, reading)
        finally:
            runner.detach(self)

    async def _opened(self) -> tuple[LinkRunner, Token]:
        opened = await opening(self._context, "an Append")
        runner = self._broker.link(self._broker.check_name(opened.link))
        record = runner.record
        if record.role is not Role.MASTER:
            raise UnknownLink("this member isn't the master of this link", epoch=record.epoch)
        token = Token(opened.token)
        if token < record.token:
            raise Fenced("a newer sender was elected", token=record.token, epoch=record.epoch)
        if opened.next_index > runner.state.tail.index:
            raise WrongIndex(
                f"this link takes index {runner.state.tail.index} next", next_index=runner.state.tail.index
            )
        return runner, token

    async def _read(self, runner: LinkRunner, token: Token) -> SeriatimError | None:
        """Feed what arrives, as long as the bounds allow. Returns the error of the batch that was refused, None at the end."""
        refused: SeriatimError | None = None

        def feed(message: Any) -> bool:
            nonlocal refused
            if self._error is None:  # once it is ended nothing more is taken
                refused = self._refusal(runner, message, token)
            return refused is None and not runner.is_full

        while refused is None:
            await runner.until(lambda: not runner.is_full)
            if not await each(self._context, feed):
                return None
        return refused

    def _refusal(self, runner: LinkRunner, message: Any, token: Token) -> SeriatimError | None:
        """Take a batch; the error with which it was refused."""
        if not isinstance(message, BatchMessage):
            return BadChecksum("an Append stream goes on with batches: this was damaged on its way")
        try:
            return take(self._broker, runner, message, token)
        except SeriatimError as malformed:
            return malformed

    async def _write(self, runner: LinkRunner, reading: asyncio.Future[SeriatimError | None]) -> None:
        """Acknowledge until nothing more comes. What came before a harmless refusal is acknowledged before it."""
        reading.add_done_callback(lambda _: self._wake.set())
        deadline_s: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_s):
                    await self._wake.wait()
            self._wake.clear()
            if self._acknowledged is not None and self._acknowledged != self._told:
                self._told = self._acknowledged
                await self._context.write(pb.AppendReply(next_index=self._told))
            if self._error is not None:
                raise self._error
            if not reading.done():
                continue
            error = reading.result()
            now_s = asyncio.get_running_loop().time()
            if deadline_s is None:
                deadline_s = now_s + SETTLE_S
            is_settled = not runner.state.flight and self._acknowledged == self._told
            if is_settled or now_s >= deadline_s or (error is not None and not isinstance(error, _HARMLESS)):
                if error is not None:
                    raise error
                return


def take(broker: Broker, runner: LinkRunner, message: BatchMessage, token: Token | None) -> SeriatimError | None:
    """Check a batch that arrived and feed it to the link. Returns the error with which it was refused; raises what is wrong with its bytes."""
    encoded = batch.parse(message.header, message.payload)
    header = encoded.header
    hash_before = hash_after = None
    if header.first_index < runner.state.committed.index:
        hash_before, hash_after = runner.hash_at(header.first_index), runner.hash_at(header.end_index)
    lease_until_s = broker.lease.usable_until_s
    event = BatchArrived(
        header,
        encoded.header_bytes,
        token,
        boottime_s(),
        lease_until_s,
        broker.room.has_room,
        hash_before,
        hash_after,
    )
    error = runner.apply(event, encoded)
    if error is None:
        broker.room = disk.taken(broker.room, encoded.size_bytes)
    return error
