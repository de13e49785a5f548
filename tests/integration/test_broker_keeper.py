"""What the two members' keepers of cursors do at the same time, and beside a disk that fails, on real stores."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.broker_group.broker import Broker
from seriatim.broker_group.coordinators import Coordinators
from seriatim.broker_group.core import cursors
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.cursor_keeper import CursorKeeper
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.peer import Peer
from seriatim.broker_group.store import Store, open_store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import Whose
from seriatim.protocol.errors import (
    ChainSetBack,
    DeadlineOver,
    DiskFailed,
    Fenced,
    IncompatibleVersion,
    SeriatimError,
    StaleCursor,
    UnknownQueue,
    Unreachable,
)
from seriatim.protocol.names import Epoch, Generation, Index, MemberName, QueueId, SubscriptionId, Token
from tests.integration.broker_members import batches
from tests.integration.test_broker_store import fill

LINK = LinkRecord(QueueId(1), Epoch(2), is_sealed=True, end=Index(50), lacks=())


class Member:
    """One that holds the link; `other`: whom it passes commits on to, when `may_pass` lets it."""

    def __init__(self, broker: Broker, may_pass: Callable[[], Awaitable[object]]) -> None:
        self.other = self
        self.broker = broker
        self.keeper = CursorKeeper(broker, cast("Coordinators", None))
        self.runner = broker.link(LINK.key)
        self._may_pass = may_pass
        self.keeper._relay = self._relay  # type: ignore[method-assign]
        self.keeper._note = self._note  # type: ignore[method-assign]
        self.notes: list[object] = []

    async def tell(self, subscription_id: int, token: int = 1) -> None:
        of, generation = SubscriptionId(subscription_id), Generation(0)
        await self.keeper.tell(self.runner, CursorRecord(of, generation, Token(token)))

    async def commit(self, subscription_id: int, index: int, **keys: Any) -> None:
        request = pb.CommitCursorRequest(subscription_id=subscription_id, index=index, **({"token": 1} | keys))
        await self.keeper.commit(self.runner, request)

    async def _relay(self, _: LinkRunner, record: CursorRecord, __: str, *, is_copied: bool = False) -> None:
        await self._may_pass()
        assert record.index is not None
        keys = {"token": record.token, "by": record.by, "is_relayed": True, "is_copied": is_copied}
        await self.other.commit(record.subscription_id, record.index, **keys)

    async def _note(self, _: LinkKey, whose: object, *, token: int = 0, version: int = 0) -> None:
        del token
        self.notes.append(whose or version)

    async def bring_up_peer(self) -> dict[QueueId, SeriatimError]:
        async def version(_: QueueId) -> int:
            return 7

        self.keeper.found_stale(LINK.key)
        return await self.keeper.bring_up_peer(version)

    def cursors(self) -> dict[int, int | None]:
        return {int(one.subscription_id): one.index for one in self.keeper.of_link(LINK.key).values()}


@contextlib.asynccontextmanager
async def pair(directory: Path, may_pass: Callable[[], Awaitable[object]]) -> AsyncIterator[tuple[Member, Member]]:
    async with contextlib.AsyncExitStack() as stores:
        found = []
        for place in "ab":
            store = open_store(directory / place, f"c/g1-{place}")
            stores.push_async_callback(store.close)
            await fill(store, LINK, batches(5))
            await store.keep_link(LINK)
            broker = Broker("c", MemberName("g1", place), store, Peer("c", store.incarnation), 0)
            found.append(Member(broker, may_pass))
        a, b = found
        a.other, b.other = b, a
        yield a, b


@pytest.mark.parametrize("is_bringing_up", [False, True])
def test_members_that_pass_commits_on_to_each_other_don_t_wait_for_each_other(
    tmp_path: Path, *, is_bringing_up: bool
) -> None:
    """Of two subscriptions, each at another member: both gave the other up after half a second, and noted it as stale."""

    async def scenario() -> None:
        both = asyncio.Barrier(2)
        async with pair(tmp_path, both.wait) as (a, b):
            for member in (a, b):
                await member.tell(3)
                await member.tell(4)
            if is_bringing_up:
                await a.commit(3, 10, is_relayed=True)
            async with asyncio.timeout(60):
                await asyncio.gather(a.bring_up_peer() if is_bringing_up else a.commit(3, 10), b.commit(4, 20))
            assert a.cursors() == b.cursors() == {3: 10, 4: 20}
            assert (a.notes, b.notes) == ([7] if is_bringing_up else [], [])

    asyncio.run(scenario())


@pytest.mark.parametrize("is_late", [False, True])
def test_what_came_to_a_member_cut_off_and_was_answered_to_nobody_doesn_t_count_behind_the_next_reader_s_commit(
    tmp_path: Path, *, is_late: bool
) -> None:
    """`is_late`: it comes when that one was granted its place by the other member. The reader after it started at 50 (invariant 7)."""
    is_cut = False

    async def may_pass() -> None:
        if is_cut:
            raise Unreachable("cut off")

    async def unanswered(*_: object, **__: object) -> None:
        raise Unreachable("no coordinator")

    async def scenario() -> None:
        nonlocal is_cut
        async with pair(tmp_path, may_pass) as (a, b):
            for member in (a, b):
                await member.tell(3)
            await a.commit(3, 10)
            is_cut = True
            b.keeper._note = unanswered  # type: ignore[method-assign]

            async def next_reader() -> None:
                await a.tell(3, token=2)
                await a.commit(3, 30, token=2)

            if is_late:
                await next_reader()
            with pytest.raises(Unreachable):
                await b.commit(3, 50)
            if not is_late:
                await next_reader()
            assert (a.cursors(), b.cursors()) == ({3: 30}, {3: 50})
            is_cut = False
            await a.bring_up_peer()
            assert b.cursors() == {3: 30}
            await b.tell(3, token=2)
            await b.commit(3, 40, token=2)
            assert a.cursors() == b.cursors() == {3: 40}

    asyncio.run(scenario())


def test_whom_a_note_names_isn_t_passed_on_until_the_other_member_is_brought_up(tmp_path: Path) -> None:
    """One that stood still was asked with each commit, half a second under the link's lock, and nobody's cursor got on."""
    asked = 0
    is_still = True

    async def may_pass() -> None:
        nonlocal asked
        asked += 1
        if is_still:
            raise DeadlineOver("no answer")

    async def scenario() -> None:
        nonlocal is_still
        async with pair(tmp_path, may_pass) as (a, b):
            for member in (a, b):
                await member.tell(3)
            for index in (10, 20, 30):
                await a.commit(3, index)
            assert (asked, len(a.notes), b.cursors()) == (1, 1, {3: None})
            is_still = False
            await a.bring_up_peer()
            await a.commit(3, 40)
            assert (asked, b.cursors()) == (3, {3: 40})

    asyncio.run(scenario())


def test_a_member_whose_disk_failed_remembers_who_reads_and_gives_no_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group's other member has all that the reader needs (invariant 12), who else waited until somebody started this one again."""

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        async with pair(tmp_path, asyncio.Event().wait) as (a, _):
            await a.tell(3)
            await a.commit(3, 10, is_relayed=True)
            monkeypatch.setattr(os, "fdatasync", failing)
            with pytest.raises(DiskFailed):
                await a.commit(3, 20, is_relayed=True)
            for _ in ("once", "again"):
                with pytest.raises(StaleCursor, match="Input/output error"):
                    await a.tell(3, token=2)
            told = a.keeper.get(LINK.key, SubscriptionId(3))
            assert told == CursorRecord(SubscriptionId(3), Generation(0), Token(2), Index(10), Token(1))
            cursors.check_reader(told, Generation(0), Token(2))
            with pytest.raises(Fenced):  # what it would still have read here is for another one (H8)
                cursors.check_reader(told, Generation(0), Token(1))

    asyncio.run(scenario())


def test_a_commit_that_waits_is_refused_once_a_disk_that_stands_still_has_another_reader_named_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered behind that (H8), where it waited for the other member, or for a coordinator to note that it lacks it."""

    async def scenario() -> None:
        waits, goes_on = asyncio.Event(), asyncio.Event()

        async def passed() -> None:
            waits.set()
            await goes_on.wait()

        async with pair(tmp_path, passed) as (a, b):
            await a.tell(3)
            await b.tell(3)
            waiting = asyncio.create_task(a.commit(3, 10))
            await waits.wait()
            with monkeypatch.context() as still:
                still.setattr(Store, "stands_still", True)
                with pytest.raises(StaleCursor, match="stands still"):
                    await a.tell(3, token=2)
            goes_on.set()
            with pytest.raises(Fenced):
                await waiting

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [IncompatibleVersion("newer"), UnknownQueue("lost"), SeriatimError("of later")])
def test_what_is_drained_is_reported_until_that_is_noted(tmp_path: Path, error: SeriatimError) -> None:
    """A coordinator that can't read the chain, or a ZooKeeper that lost it until it was recovered: the link counted as unread for good."""

    async def scenario() -> None:
        async with pair(tmp_path, asyncio.Event().wait) as (a, _):
            await a.tell(3)
            await a.commit(3, 50, is_relayed=True)
            answers: list[Exception | None] = [error, None]

            async def reported(_: object, of: Iterable[Whose], *__: object) -> frozenset[Whose]:
                if (answer := answers.pop(0)) is not None:
                    raise answer
                return frozenset(of)

            a.keeper._report = reported  # type: ignore[method-assign]
            assert not await a.keeper._report_once()
            assert await a.keeper._report_once()
            assert answers == []

    asyncio.run(scenario())


def test_of_whom_a_link_s_end_was_reported_is_known_as_long_as_they_have_a_cursor_there(tmp_path: Path) -> None:
    """A link may be kept for years, while subscriptions are sought each minute, or made, read and deleted."""

    async def scenario() -> None:
        async with pair(tmp_path, asyncio.Event().wait) as (a, _):
            reports: list[Whose] = []

            async def reported(_: object, of: Iterable[Whose], *__: object) -> frozenset[Whose]:
                reports.extend(of)
                return frozenset(of)

            a.keeper._report = reported  # type: ignore[method-assign]
            for subscription_id, generation in [(3, 0), (3, 1), (3, 2), (4, 0), (5, 0)]:
                of = SubscriptionId(subscription_id), Generation(generation)
                await a.keeper.tell(a.runner, CursorRecord(*of, Token(1), Index(50)))
                a.broker.look_for_drained(LINK.key)
                assert await a.keeper._report_once()
                if subscription_id == 4:
                    await a.keeper._forget(LINK.key, {SubscriptionId(4)})
            assert reports == [(3, 0), (3, 1), (3, 2), (4, 0), (5, 0)], "each of them, and once"
            assert a.keeper._reported == {LINK.key: {(3, 2), (5, 0)}}

    asyncio.run(scenario())


def test_cursors_that_can_t_be_brought_up_keep_no_others_from_it(tmp_path: Path) -> None:
    """Of a queue that ZooKeeper was set back in, and that waits for an operator: readers of all others had one member's cursors only."""

    async def scenario() -> None:
        async def passed() -> None:
            pass

        async with pair(tmp_path, passed) as (a, b):
            first = replace(LINK, queue_id=QueueId(0))
            await a.broker.store.keep_link(first)
            a.broker.made(first)
            for member in (a, b):
                await member.tell(3)
            await a.commit(3, 10, is_relayed=True)

            async def note(key: LinkKey, _: object, **__: object) -> None:
                if key == first.key:
                    raise ChainSetBack("an old one")

            a.keeper._note = note  # type: ignore[method-assign]
            a.keeper.found_stale(first.key)
            assert isinstance((await a.bring_up_peer())[first.key[0]], ChainSetBack)
            assert list(a.keeper._noted) == [first.key]
            assert b.cursors() == {3: 10}

    asyncio.run(scenario())


def test_a_peer_that_missed_a_commit_is_brought_up_soon(tmp_path: Path) -> None:
    """It stood still for half a second. Until the next look at all chains, half a minute later, readers had one member's cursors only."""

    async def scenario() -> None:
        async def late() -> None:
            raise DeadlineOver("no answer in time")

        async with pair(tmp_path, late) as (a, _):
            await a.tell(3)
            await a.commit(3, 10)
            assert a.notes == [(3, 0)]
            assert a.broker.resync_wanted.is_set()

    asyncio.run(scenario())


def test_a_commit_that_one_member_alone_has_is_not_taken_back_by_one_that_was_told_of_the_next_reader(
    tmp_path: Path,
) -> None:
    """It was read as if that reader had committed that there is nothing: the cursor was lost on both, and read again from the start."""

    async def scenario() -> None:
        is_cut_off = True

        async def passed() -> None:
            if is_cut_off:
                raise Unreachable("cut off")

        async with pair(tmp_path, passed) as (a, b):
            await a.tell(3)
            await a.commit(3, 30)
            is_cut_off = False
            for member in (a, b):
                await member.tell(3, token=2)

            async def listed(*_: object) -> pb.ListCursorsReply:
                return b.keeper.listed(LINK.key)

            to_call = SimpleNamespace(incarnation=b.broker.incarnation)
            a.broker.peer = cast("Peer", SimpleNamespace(to_call=lambda: to_call, call=listed))
            await a.keeper.take_from_peer(a.runner)  # for want of another subscription's cursors
            await a.bring_up_peer()
            assert a.cursors() == b.cursors() == {3: 30}

    asyncio.run(scenario())
