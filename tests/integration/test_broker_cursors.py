"""Cursors when a member is away, and what is drained: two real brokers, a coordinator that only listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from seriatim.protocol import rpc
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import LinkState, StaleCursors, Subscription
from seriatim.protocol.errors import DeadlineOver, Fenced, InvalidArgument, MemberBehind, StaleCursor, Unreachable
from seriatim.protocol.names import Epoch, Generation, Index, SubscriptionId, Token
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.rpc import answers_errors, call
from seriatim.protocol.seriatim_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from tests.faults.disks import Disk, Trouble, compile_library
from tests.integration.broker_members import CALL_S, Member, Members, batches, members, until

pytestmark = pytest.mark.timeout(300)


class Listener(CoordinatorServicer):
    """Notes what members tell it; refuses as long as `is_deaf`. `hears_of_all`: of an earlier version it hears of one in a report."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, bool]] = []
        self.drained: list[tuple[int, int, int]] = []
        self.reported_by: set[str] = set()
        self.is_deaf = False
        self.reader_token = 1
        self.hears_of_all = True
        self.refused = 0
        self.asked: list[int] = []
        """For how many at once."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def _listen(self) -> None:
        if self.is_deaf:
            self.refused += 1
            raise Unreachable("deaf")

    @answers_errors
    async def NoteStaleCursors(self, request: pb.StaleCursorsNote, context: Any) -> pb.Done:  # noqa: N802 - as in the .proto
        self._listen()
        if 0 < request.token < self.reader_token:
            raise Fenced("a newer reader was elected")
        self.notes.append((request.member, request.is_stale))
        return pb.Done()

    @answers_errors
    async def ReportDrained(self, request: pb.DrainedReport, context: Any) -> pb.DrainedNoted:  # noqa: N802 - as in the .proto
        self.asked.append(1 + len(request.also))
        await self.may_answer.wait()
        self._listen()
        of = (request, *request.also) if self.hears_of_all else (request,)
        self.reported_by.add(request.member)
        self.drained += [(request.epoch, one.subscription_id, one.generation) for one in of]
        noted = [pb.Drained(subscription_id=one.subscription_id, generation=one.generation) for one in of]
        return pb.DrainedNoted(noted=noted if self.hears_of_all else ())


@asynccontextmanager
async def listening(group: Members) -> AsyncIterator[Listener]:
    server, listener = rpc.server(), Listener()
    add_CoordinatorServicer_to_server(listener, server)
    address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1:0')}"
    await server.start()
    registration = CoordinatorRegistration(address).encode()
    await group.session.create(f"{group.paths.coordinators}/c1", registration, ephemeral=True, parents=True)
    try:
        yield listener
    finally:
        await server.stop(None)


@pytest.fixture
def run(zookeeper: str, cluster_name: str, tmp_path: Path) -> Callable[..., None]:
    def run(scenario: Callable[[Members, Listener], Awaitable[None]]) -> None:
        async def scenario_with_group() -> None:
            group = await members(zookeeper, cluster_name, tmp_path)
            try:
                async with asyncio.timeout(200), listening(group) as listener:
                    await group.open()
                    stream = await group.append(group.a).open()
                    await stream.send(batches(10))
                    await stream.until_acknowledged(100)
                    await stream.close()
                    await group.committed(100)
                    await scenario(group, listener)
            finally:
                await group.close()

        asyncio.run(scenario_with_group())

    return run


async def tell(
    group: Members,
    member: Member,
    token: int = 1,
    subscription_id: int = 3,
    generation: int = 1,
    timeout_s: float = CALL_S,
) -> pb.TellReaderReply:
    name = group.name(1, member.incarnation)
    request = pb.TellReaderRequest(link=name, subscription_id=subscription_id, generation=generation, token=token)
    return await call(member.stub.TellReader, request, timeout_s)


async def commit(group: Members, member: Member, index: int, subscription_id: int = 3, generation: int = 1) -> None:
    name = group.name(1, member.incarnation)
    request = pb.CommitCursorRequest(
        link=name, subscription_id=subscription_id, generation=generation, token=1, index=index
    )
    await call(member.stub.CommitCursor, request, CALL_S)


async def commit_on_both(group: Members, listener: Listener, index: int) -> None:
    """A commit while both can be reached; nothing is noted afterwards.

    A member that stands still for half a second is an outage to the other one: it is noted, and taken back soon after.
    """
    await commit(group, group.a, index)

    async def is_taken_back() -> bool:
        return not listener.notes or listener.notes[-1] == ("b", False)

    await until(is_taken_back)
    assert listener.notes == [("b", True), ("b", False)] * (len(listener.notes) // 2)
    listener.notes.clear()


def test_a_late_commit_of_an_earlier_reader_leaves_nothing_behind(run: Callable[..., None]) -> None:
    """It lay before a member that stood still, until another reader had been granted a place by its peer (invariant 7).

    It was refused, and kept all the same: once the peer was brought up to it, the next reader started there.
    """

    async def scenario(group: Members, listener: Listener) -> None:
        await group.write_chain(None, state=LinkState.OPEN)
        for member in group.both:
            await tell(group, member)
        await commit_on_both(group, listener, 10)
        await tell(group, group.b, token=2)
        with pytest.raises(Fenced):
            await commit(group, group.a, 20)
        await group.b.kill()
        listener.reader_token = 2
        with pytest.raises(Fenced):
            await commit(group, group.a, 20)
        assert listener.notes == []
        told = await tell(group, group.a, token=2)
        assert (told.cursor, told.is_stale) == (10, False)

    run(scenario)


def test_a_member_whose_disk_stands_still_knows_who_reads(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was elected waited until the disk went on. What lay before it is done then, and leaves nothing behind."""
    disk = Disk(tmp_path / "b", tmp_path / "control", compile_library(tmp_path))
    for name, value in disk.environment.items():
        monkeypatch.setenv(name, value)

    async def scenario(group: Members, listener: Listener) -> None:
        await group.write_chain(None, state=LinkState.OPEN)
        for member in group.both:
            await tell(group, member)
        await commit_on_both(group, listener, 10)
        disk.trouble(Trouble.STILL_FLUSH)
        late = asyncio.create_task(commit(group, group.b, 20))

        async def is_remembered() -> bool:
            with pytest.raises((StaleCursor, DeadlineOver)) as refused:
                await tell(group, group.b, token=2, timeout_s=0.5)
            return "its disk stands still" in str(refused.value)

        await until(is_remembered)
        with pytest.raises(Fenced):
            await group.fetch(group.b, subscription_id=3, generation=1, token=1)
        assert (await tell(group, group.a, token=2)).cursor == 10
        disk.mend()
        with pytest.raises((Fenced, DeadlineOver)):
            await late
        with pytest.raises(Fenced):
            await commit(group, group.b, 30)
        told = await tell(group, group.b, token=2)
        assert (told.cursor, told.is_stale) == (10, False)
        await group.b.kill()
        group.b.launch()
        await group.b.ready()
        await group.registered(lambda _, b: b.incarnation.start == 2)
        with pytest.raises(Fenced):  # it was written down, too
            await tell(group, group.b)

    run(scenario)


def test_a_commit_on_one_member_is_answered_only_when_the_other_is_noted_as_stale(run: Callable[..., None]) -> None:
    async def scenario(group: Members, listener: Listener) -> None:
        await group.write_chain(None, state=LinkState.OPEN)  # a note is taken back from a version of the chain
        for member in group.both:
            await tell(group, member)
        await commit_on_both(group, listener, 10)
        await group.b.kill()
        listener.is_deaf = True
        with pytest.raises(Unreachable):
            await commit(group, group.a, 20)
        listener.is_deaf = False
        await commit(group, group.a, 20)
        await commit(group, group.a, 30)
        # Once per outage.
        assert listener.notes == [("b", True)]
        group.b.launch()
        await group.b.ready()
        await group.registered(lambda a, b: a.peer == b.incarnation and b.peer == a.incarnation)

        async def is_taken_back() -> bool:
            return listener.notes[-1] == ("b", False)

        await until(is_taken_back)
        assert listener.notes == [("b", True), ("b", False)]
        listener.notes.clear()
        told = await tell(group, group.b)
        assert (told.cursor, told.is_stale) == (30, False)
        # The next outage is another one.
        await commit_on_both(group, listener, 40)
        await group.b.kill()
        await commit(group, group.a, 50)
        assert listener.notes == [("b", True)]
        # So is a seek within it: the note went with the older generation (H7).
        await tell(group, group.a, generation=2)
        await commit(group, group.a, 20, generation=2)
        await commit(group, group.a, 30, generation=2)
        assert listener.notes == [("b", True), ("b", True)]

    run(scenario)


def test_a_member_that_restarted_doesn_t_call_a_commit_wrong_of_which_it_wasn_t_told(run: Callable[..., None]) -> None:
    """Its reader got an InvalidArgument for what both members had confirmed, when both had just started again.

    What is committed is told in the next batch, and kept with that: of the last one nobody told the disk.
    """

    async def scenario(group: Members, listener: Listener) -> None:
        del listener
        for member in group.both:
            await member.kill()
        for member in group.both:
            member.launch()
        for member in group.both:
            await member.ready()
        await group.registered(lambda a, b: a.peer == b.incarnation and b.peer == a.incarnation)
        for member in group.both:
            await tell(group, member)
            with pytest.raises(MemberBehind, match="not to 100"):
                await commit(group, member, 100)
        end = (await group.seal(group.a)).positions[-1]
        for member in group.both:
            assert (await group.record_end(member, end)).has_it
        await commit(group, group.a, 100)
        with pytest.raises(InvalidArgument, match="committed up to 100"):
            await commit(group, group.a, 101)

    run(scenario)


def test_a_blank_member_gives_no_cursor_until_it_has_taken_them(run: Callable[..., None]) -> None:
    async def scenario(group: Members, listener: Listener) -> None:
        for member in group.both:
            await tell(group, member)
        await commit(group, group.a, 40)
        await group.write_chain(None, state=LinkState.CLOSING)
        end = (await group.seal(group.a)).positions[-1]
        assert (await group.record_end(group.a, end)).has_it
        assert await group.b.stop() == 0  # its session ends with it: another disk may take its place
        (group.b.directory).rename(group.b.directory.with_name("away"))
        group.b.launch()
        await group.b.ready()
        await group.registered(lambda a, b: a.peer == b.incarnation and b.peer == a.incarnation)
        told = await tell(group, group.b)
        assert told.is_stale
        assert not told.has_cursor
        with pytest.raises(StaleCursor):
            await commit(group, group.b, 50)
        await group.write_chain(end, readers=reading(1))

        async def has_taken() -> bool:
            return not (await tell(group, group.b)).is_stale

        await until(has_taken)
        assert (await tell(group, group.b)).cursor == 40

    run(scenario)


def test_cursors_go_with_their_subscriptions(run: Callable[..., None]) -> None:
    """Where each job has a subscription of its own, whoever reads waited until thousands were passed on to a member that came back."""

    async def scenario(group: Members, listener: Listener) -> None:
        for subscription_id in (1, 2, 3, 4):
            for member in group.both:
                await tell(group, member, subscription_id=subscription_id)
            await commit(group, group.a, 10, subscription_id)
        await group.b.kill()
        await commit(group, group.a, 20, subscription_id=2)
        await commit(group, group.a, 20)
        # 1 and 2 were deleted; 4 was made since.
        await group.write_chain(None, state=LinkState.OPEN, readers=reading(1), next_subscription_id=4)
        group.b.launch()
        await group.b.ready()
        await group.registered(lambda a, b: a.peer == b.incarnation and b.peer == a.incarnation)

        async def cursors(member: Member) -> dict[int, int]:
            described = pb.DescribeLinkRequest(link=group.name(1, member.incarnation))
            found = (await call(member.stub.DescribeLink, described, CALL_S)).cursors
            return {one.subscription_id: one.index for one in found}

        async def have_both() -> bool:
            return [await cursors(member) for member in group.both] == [{3: 20, 4: 10}] * 2

        await until(have_both)

    run(scenario)


def reading(generation: int) -> tuple[Subscription, ...]:
    """A subscription that has yet to read link 1."""
    whose = (SubscriptionId(3), Generation(generation))
    return (Subscription(whose[0], "audit", whose[1], Token(1), "", (Epoch(1),), Epoch(0), Index(0), 0),)


def test_cursors_that_are_lost_on_both_members_are_waited_for_until_the_subscription_is_sought(
    run: Callable[..., None],
) -> None:
    """One disk was replaced while the other one lacked a commit, then that one (invariant 12)."""

    async def scenario(group: Members, listener: Listener) -> None:
        for member in group.both:
            await tell(group, member)
        await commit_on_both(group, listener, 40)
        end = (await group.seal(group.a)).positions[-1]
        readers = reading(1)
        note = StaleCursors(Epoch(1), "a", (readers[0].whose,))
        await group.write_chain(end, readers=readers, stale=(note,))
        for member in group.both:
            assert (await group.record_end(member, end)).has_it
        for member in (group.b, group.a):
            assert await member.stop() == 0
            member.directory.rename(member.directory.with_name(f"{member.directory.name} away"))
            member.launch()
            await member.ready()
            await group.registered(lambda a, b: a.peer == b.incarnation and b.peer == a.incarnation)

            async def has_records(member: Member = member) -> bool:
                described = pb.DescribeLinkRequest(link=group.name(1, member.incarnation))
                return (await call(member.stub.DescribeLink, described, CALL_S)).next_index == 100

            await until(has_records)
        await group.registered(lambda a, b: "seek audit" in a.problem and "seek audit" in b.problem)
        for member in group.both:
            assert (await tell(group, member)).is_stale
            with pytest.raises(StaleCursor):
                await commit(group, member, 50)
            told = await tell(group, member, generation=2)
            assert not told.is_stale
            assert not told.has_cursor
        await commit(group, group.a, 10, generation=2)
        await group.write_chain(end, readers=reading(2))
        await group.registered(lambda a, b: a.is_in_sync and b.is_in_sync)
        assert [(await tell(group, member, generation=2)).cursor for member in group.both] == [10, 10]

    run(scenario)


def test_drained_is_reported_until_it_is_noted(run: Callable[..., None]) -> None:
    async def scenario(group: Members, listener: Listener) -> None:
        for member in group.both:
            await tell(group, member)
        end = (await group.seal(group.a)).positions[-1]
        await commit(group, group.b, 100)
        assert listener.drained == []
        listener.is_deaf = True
        for member in group.both:
            assert (await group.record_end(member, end)).has_it

        async def is_refused() -> bool:
            return listener.refused >= 2

        await until(is_refused)
        listener.is_deaf = False

        async def is_noted() -> bool:
            return len(listener.drained) >= 2  # one whose answer was late is repeated

        await until(is_noted)
        assert set(listener.drained) == {(1, 3, 1)}
        assert listener.reported_by <= {"a", "b"}  # a coordinator of before looks for notes of that member's cursors

    run(scenario)


@pytest.mark.parametrize("hears_of_all", [True, False], ids=["", "an earlier version of it"])
def test_all_who_have_read_a_link_are_reported_at_once(run: Callable[..., None], *, hears_of_all: bool) -> None:
    """Each by itself was a write of the chain, one after the other: the last of 24 readers read on 0.7 s after the first."""

    async def scenario(group: Members, listener: Listener) -> None:
        listener.hears_of_all = hears_of_all
        readers = 3, 4, 5
        for member in group.both:
            for one in readers:
                await tell(group, member, subscription_id=one)
        end = (await group.seal(group.a)).positions[-1]
        for one in readers:
            await commit(group, group.b, 100, subscription_id=one)
        assert (await group.record_end(group.b, end)).has_it

        async def is_noted() -> bool:
            return {one for _, one, _ in listener.drained} == set(readers)

        await until(is_noted)
        assert listener.asked[0] == len(readers)  # one whose answer is late is repeated
        assert hears_of_all or len(listener.asked) >= len(readers)

    run(scenario)


def test_a_reader_that_comes_while_drained_is_being_reported_is_reported_in_its_turn(run: Callable[..., None]) -> None:
    async def scenario(group: Members, listener: Listener) -> None:
        for member in group.both:
            await tell(group, member)
        end = (await group.seal(group.a)).positions[-1]
        await commit(group, group.b, 100)
        listener.may_answer.clear()
        for member in group.both:
            await group.record_end(member, end)

        async def is_asked() -> bool:
            return len(listener.asked) >= 2  # again where the answer is late

        await until(is_asked)
        for member in group.both:
            await tell(group, member, subscription_id=4)
        listener.may_answer.set()
        await commit(group, group.a, 100, subscription_id=4)

        async def is_noted() -> bool:
            return set(listener.drained) == {(1, 3, 1), (1, 4, 1)} and len(listener.drained) >= 4

        await until(is_noted)

    run(scenario)
