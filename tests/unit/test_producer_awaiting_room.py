"""`send_async` where the buffer is full, without a network."""

from __future__ import annotations

import asyncio

import pytest

from seriatim.producer.buffer import Buffer
from seriatim.producer.client import Producer
from seriatim.producer.core.batching import BatchLimits
from seriatim.producer.line import Lines
from seriatim.protocol.errors import NotElected
from seriatim.protocol.names import Token

VALUE = b"x" * 900
"""One is a batch."""


def full() -> Producer:
    """Elected, with a buffer that has no room, and nobody who takes from it."""
    producer = object.__new__(Producer)
    producer._max_block_s = 60
    producer._lines = Lines()
    producer._buffer = Buffer("a", BatchLimits(1024, 0), 2048, 0)
    producer._buffer.elect(Token(1), {})
    for _ in range(2):
        producer._buffer.send(VALUE)
    return producer


def make_room(producer: Producer) -> list[bytes]:
    """For one; what was stored by that."""
    taken = producer._buffer.take(0)
    assert taken is not None
    producer._buffer.complete(taken[0])
    return list(taken[1].values)


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


async def turns() -> None:
    """Of the loop, until nobody has anything to do."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_what_is_sent_on_one_loop_keeps_its_order_also_where_it_waits() -> None:
    """All who waited tried at once when room came, and whoever came at that moment was before them."""

    async def scenario() -> list[bytes]:
        producer, found = full(), []
        sending = [asyncio.create_task(producer.send_async(b"%d" % at)) for at in range(10)]
        await turns()
        for _ in range(20):
            found += make_room(producer)
            sending.append(asyncio.create_task(producer.send_async(b"%d" % len(sending) + VALUE)))
            await turns()
        for one in sending:
            one.cancel()
        await asyncio.wait(sending)
        assert not producer._lines._of
        return [value.rstrip(b"x") for value in found]

    found = asyncio.run(scenario())
    assert found[:2] == [b"", b""]  # that filled it
    assert found[2:] == [b"%d" % at for at in range(len(found) - 2)]
    assert len(found) > 20


def test_room_wakes_the_first_who_waits_and_nobody_else() -> None:
    """With 20,000 each end of a batch cost the application's thread half a second."""

    async def scenario() -> None:
        producer = full()
        sending = [asyncio.create_task(producer.send_async(VALUE)) for _ in range(10)]
        await turns()
        assert len(producer._buffer._waiters) == 1
        make_room(producer)
        await turns()
        assert [one.done() for one in sending] == [True] + [False] * 9
        assert len(producer._buffer._waiters) == 1
        for one in sending:
            one.cancel()
        await asyncio.wait(sending)
        assert not producer._buffer._waiters
        assert not producer._lines._of

    asyncio.run(scenario())


def test_whoever_gives_up_leaves_the_next_one_its_turn() -> None:
    """Also where it was its own turn at that moment."""

    async def scenario() -> None:
        producer = full()
        sending = [asyncio.create_task(producer.send_async(VALUE)) for _ in range(4)]
        await turns()
        sending[1].cancel()
        await turns()
        make_room(producer)
        sending[0].cancel()
        await turns()
        assert [one.done() for one in sending] == [True, True, True, False]
        assert not sending[2].cancelled()
        producer._buffer.stop(NotElected("closed"))
        with pytest.raises(NotElected):
            await sending[3]

    asyncio.run(scenario())


def test_who_waits_behind_others_is_refused_in_a_later_term_as_they_are() -> None:
    """Its seq lies behind those that ended as unknown, though it has never come to its turn in the term that it was sent in (H4)."""

    async def scenario() -> None:
        producer = full()
        sending = [asyncio.create_task(producer.send_async(VALUE, seq=1 + at, source="s")) for at in range(3)]
        await turns()
        producer._buffer.depose("another was elected", [])
        producer._buffer.elect(Token(2), {})
        producer._buffer.take_up(Token(2))
        ends = await asyncio.gather(*sending, return_exceptions=True)
        assert [type(one) for one in ends] == [NotElected] * 3

    asyncio.run(scenario())
