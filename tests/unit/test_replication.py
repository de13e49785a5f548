"""How the master's stream begins: what the slave confirms, and what is copied."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import SealPhase
from seriatim.broker_group.replicate import first_confirmation
from seriatim.broker_group.replication import copied
from seriatim.protocol import batch_streams, rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch_streams import BatchStub
from seriatim.protocol.errors import Sealed, Unreachable
from seriatim.protocol.names import Epoch, Index, QueueId


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


@pytest.mark.parametrize(
    "begin",
    [
        lambda stub: anext(copied(stub, pb.LinkName(), Index(0), Index(1))),
        lambda stub: batch_streams.replicate("", lambda: stub),
    ],
)
def test_a_slave_whose_channel_was_closed_meanwhile_is_one_that_nobody_reaches(begin):
    """As where it came back at another address: the master's stream to it ended with a traceback of gRPC's."""

    async def begin_late() -> None:
        connections = rpc.Connections(BatchStub)
        stub = connections.stub("127.0.0.1:1")
        await connections.forget_dead(())
        with pytest.raises(Unreachable, match="was closed"):
            await begin(stub)

    asyncio.run(begin_late())
