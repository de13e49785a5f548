"""The shell around the reading core: its timers."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from seriatim.consumer.core import reading
from seriatim.consumer.core.reading_events import Event, Heard, ReadFrom, StartArrived, Tick
from seriatim.consumer.core.view import ChainView, LinkView, Place, Side
from seriatim.consumer.fetching import Fetcher
from seriatim.consumer.transport import FetchStream
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import BugError, SeriatimError
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, Offset
from seriatim.protocol.patience import Patience


class SilentCall:
    """A stream on which nothing ever comes until it is cancelled, which ends it."""

    def __init__(self) -> None:
        self._is_over = asyncio.Event()

    async def write(self, message: Any) -> None:
        """Taken."""

    async def read(self) -> Any:
        await self._is_over.wait()
        return grpc.aio.EOF  # type: ignore[attr-defined] # grpc-stubs doesn't know it

    def cancel(self) -> None:
        """Told to whoever waits; a task that nobody wakes any more may be freed while it waits."""
        self._is_over.set()


def members_that_fetch(fetch: Any) -> Any:
    return SimpleNamespace(stub=lambda _: SimpleNamespace(Fetch=fetch), using=lambda _: nullcontext())


def test_a_member_that_was_waited_for_long_is_watched_closely_as_soon_as_it_speaks() -> None:
    sides = [Side("g1", member, f"{member}:1", Incarnation(member, 1)) for member in "ab"]
    link = LinkView(Epoch(1), LinkState.OPEN, Offset(0), None, sides[0], sides[1], {})
    view = ChainView("c", 1, "q", ChainVersion(1), (link,))

    async def scenario() -> None:
        calls = asyncio.Queue[SilentCall]()

        def fetch() -> SilentCall:
            calls.put_nowait(SilentCall())
            return SilentCall()

        members = members_that_fetch(fetch)
        fetcher = Fetcher(members, 1000, lambda _: None, lambda _: None, lambda: None, lambda _: None)
        fetcher.state = replace(fetcher.state, patience=Patience(silences=12))  # 19.2 s
        fetcher.happened(ReadFrom(view, Place(Epoch(1), Index(0))))
        fetcher.happened(StartArrived(1, Index(0), {}))
        fetcher.state = replace(fetcher.state, progress_at_s=0.0)  # it has been speaking for long
        fetcher.happened(Heard(1))
        async with asyncio.timeout(15):
            for _ in range(2):
                await calls.get()
        await fetcher.stop()

    asyncio.run(scenario())


def test_how_much_a_member_says_is_committed_is_heard_of_with_its_beat() -> None:
    class Beating(SilentCall):
        def __init__(self) -> None:
            super().__init__()
            self._left = [pb.FetchReply(start=pb.Position()), pb.FetchReply(committed_index=1)]

        async def read(self) -> Any:
            return self._left.pop(0) if self._left else await super().read()

    sides = Side("g1", "a", "a:1", Incarnation("a", 1)), Side("g1", "b", "", None)
    view = ChainView("c", 1, "q", ChainVersion(1), (LinkView(Epoch(1), LinkState.OPEN, Offset(0), None, *sides, {}),))

    async def scenario() -> None:
        fetcher = Fetcher(
            members_that_fetch(Beating), 1000, lambda _: None, lambda _: None, lambda: None, lambda _: None
        )
        fetcher.happened(ReadFrom(view, Place(Epoch(1), Index(0))))
        async with asyncio.timeout(15):
            while fetcher.state.fetch is None or fetcher.state.fetch.owes_until_s is None:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
        await fetcher.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("where", [StartArrived, Tick])
def test_a_bug_in_a_stream_or_a_timer_ends_the_reader_and_is_told(
    monkeypatch: pytest.MonkeyPatch, where: type[object]
) -> None:
    """Nobody looked at the task, or the timer: of the only member that was there the reader heard nothing more, for ever."""
    decide = reading.decide

    def broken(state: reading.Reading, event: Event, now_s: float) -> reading.Step:
        assert not isinstance(event, where), "a bug"
        return decide(state, event, now_s)

    class Starting(SilentCall):
        def __init__(self) -> None:
            super().__init__()
            self._left = [pb.FetchReply(start=pb.Position())]

        async def read(self) -> Any:
            return self._left.pop(0) if self._left else await super().read()

    sides = Side("g1", "a", "a:1", Incarnation("a", 1)), Side("g1", "b", "", None)
    view = ChainView("c", 1, "q", ChainVersion(1), (LinkView(Epoch(1), LinkState.OPEN, Offset(0), None, *sides, {}),))

    async def scenario() -> None:
        failed: asyncio.Future[SeriatimError] = asyncio.get_running_loop().create_future()
        fetcher = Fetcher(
            members_that_fetch(Starting),
            1000,
            lambda _: None,
            lambda _: None,
            lambda: None,
            on_failure=failed.set_result,
        )
        fetcher.happened(ReadFrom(view, Place(Epoch(1), Index(0))))
        monkeypatch.setattr(reading, "decide", broken)
        async with asyncio.timeout(60):
            assert isinstance(await failed, BugError)
        await fetcher.stop()

    asyncio.run(scenario())


def test_what_the_application_takes_is_told_when_something_can_follow_from_it() -> None:
    """Half of what is asked for at once: each time wakes the loop. Untold it stays below that, so that there is always something to ask for."""
    nobody: Any = SimpleNamespace()
    fetcher = Fetcher(nobody, 800, lambda _: None, lambda _: None, lambda: None, lambda _: None)
    assert [fetcher.taken(size_bytes) for size_bytes in (60, 60, 70, 430)] == [False, True, False, True]

    async def told() -> int:
        fetcher.state = replace(fetcher.state, buffered_bytes=700)
        fetcher.tell_taken()
        return fetcher.state.buffered_bytes

    assert asyncio.run(told()) == 80
    assert [fetcher.taken(size_bytes) for size_bytes in (79, 1)] == [False, True]  # at the seventh hundred
    assert Fetcher(nobody, 1, lambda _: None, lambda _: None, lambda: None, lambda _: None).taken(1), (
        "where there is no room to spare, at once"
    )


def test_credit_that_is_given_before_the_stream_is_open_comes_with_its_opening() -> None:
    """Connecting takes a while, in which the application may take what lies there: else the member would wait for ever."""
    written: list[pb.FetchRequest] = []

    class Call(SilentCall):
        async def write(self, message: Any) -> None:
            written.append(message)

    async def scenario() -> None:
        members = members_that_fetch(Call)
        side = Side("g1", "a", "a:1", Incarnation("a", 1))
        stream = FetchStream(members, side, pb.FetchOpen(credit_bytes=5))
        running = asyncio.create_task(stream.run(lambda _: True))
        stream.give_credit(7)
        await asyncio.sleep(0)
        stream.give_credit(11)
        for _ in range(5):
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(scenario())
    assert [(one.open.credit_bytes, one.credit_bytes) for one in written] == [(12, 0), (0, 11)]
