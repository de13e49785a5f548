"""What a slave confirms when the master's stream begins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import SealPhase
from seriatim.broker_group.replicate import first_confirmation
from seriatim.protocol.errors import Sealed
from seriatim.protocol.names import Epoch, QueueId


class Context:
    def __init__(self) -> None:
        self.written = []

    async def write(self, reply) -> None:
        self.written.append((reply.next_index, reply.hash))


class Runner:
    """A link with batches up to 5 taken, of which 3 records are durable until `settles` is reached."""

    def __init__(self, phase: SealPhase, *, settles: bool) -> None:
        self.record = LinkRecord(QueueId(1), Epoch(1))
        self.state = SimpleNamespace(phase=SealPhase.OPEN, tail=SimpleNamespace(index=5, hash=b"h"), durable=3)
        self.is_quiet = False
        self._after = (phase, settles)

    async def until(self, claim) -> None:
        assert not claim()
        self.state.phase, self.is_quiet = self._after
        assert claim()


def test_the_first_confirmation_waits_for_the_disk():
    context = Context()
    asyncio.run(first_confirmation(Runner(SealPhase.OPEN, settles=True), context))
    assert context.written == [(5, b"h")]


def test_a_seal_in_between_confirms_nothing_that_is_not_durable():
    context = Context()
    with pytest.raises(Sealed):
        asyncio.run(first_confirmation(Runner(SealPhase.WAITING, settles=False), context))
    assert context.written == []
