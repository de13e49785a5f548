"""`send_async` where the buffer is full, without a network."""

from __future__ import annotations

import asyncio

import pytest

from seriatim.producer.buffer import Buffer
from seriatim.producer.client import Producer
from seriatim.producer.core.batching import BatchLimits
from seriatim.protocol.names import Token

VALUE = b"x" * 900
"""One is a batch."""


def full() -> Producer:
    """Elected, with a buffer that has no room, and nobody who takes from it."""
    producer = object.__new__(Producer)
    producer._max_block_s = 60
    producer._buffer = Buffer("a", BatchLimits(1024, 0), 2048, 0)
    producer._buffer.elect(Token(1), {})
    for _ in range(2):
        producer._buffer.send(VALUE)
    return producer


def make_room(producer: Producer) -> None:
    """For one."""
    taken = producer._buffer.take(0)
    assert taken is not None
    producer._buffer.complete(taken[0])


@pytest.mark.parametrize("turns", range(5))
def test_who_is_cancelled_ends_also_where_room_comes_at_that_moment(turns: int) -> None:
    async def scenario() -> None:
        producer = full()
        sending = asyncio.create_task(producer.send_async(VALUE))
        await asyncio.sleep(0)
        make_room(producer)
        for _ in range(turns):
            await asyncio.sleep(0)
        if sending.cancel():
            with pytest.raises(asyncio.CancelledError):
                await sending
        else:
            assert await sending

    asyncio.run(scenario())
