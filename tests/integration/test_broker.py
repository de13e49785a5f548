"""Two real brokers: append, crash, seal, resync, fetch."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from seriatim.broker_group.link_runner import REST_S
from seriatim.broker_group.store import open_store
from seriatim.protocol import batch_streams
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.batch_streams import TOGETHER_BYTES, BatchMessage
from seriatim.protocol.chain import LinkState
from seriatim.protocol.errors import (
    BadChecksum,
    DiskFull,
    Fenced,
    InvalidArgument,
    LeaseOver,
    MalformedFrame,
    MemberBehind,
    OlderGeneration,
    PartlyResend,
    PeerLost,
    Resend,
    Sealed,
    UnknownLink,
    WrongCluster,
    WrongIncarnation,
    WrongIndex,
)
from seriatim.protocol.names import Epoch, Incarnation, Index
from seriatim.protocol.registration import Registration
from seriatim.protocol.rpc import call
from seriatim.protocol.streams import each, read, write
from tests.chains import without_checksum
from tests.files import sizes
from tests.integration.broker_members import (
    CALL_S,
    GROUP,
    QUEUE,
    Member,
    Members,
    as_sent,
    batches,
    members,
    message,
    sent_batches,
    until,
)

pytestmark = pytest.mark.timeout(300)

Scenario = Callable[[Members], Awaitable[None]]


@pytest.fixture
def run(zookeeper: str, cluster_name: str, tmp_path: Path) -> Callable[..., None]:
    """Run a scenario with a started group."""

    def run(scenario: Scenario, *flags: str) -> None:
        async def scenario_with_group() -> None:
            group = await members(zookeeper, cluster_name, tmp_path, *flags)
            try:
                async with asyncio.timeout(200):
                    await scenario(group)
            finally:
                await group.close()

        asyncio.run(scenario_with_group())

    return run


async def filled(group: Members, count: int = 20, durability: str = "sync") -> pb.Position:
    """Link 1 with that many batches acknowledged."""
    await group.open(durability=durability)
    stream = await group.append(group.a).open()
    await stream.send(batches(count))
    await stream.until_acknowledged(count * 10)
    await stream.close()
    await group.committed(count * 10)
    return await group.open(durability=durability)


async def ended(group: Members, sent: list[EncodedBatch]) -> None:
    """Link 1 with these batches, sealed, its end recorded on both members and in the chain."""
    await group.open()
    stream = await group.append(group.a).open()
    await stream.send(sent)
    await stream.until_acknowledged(sent[-1].header.end_index)
    await stream.close()
    end = (await group.seal(group.a)).positions[-1]
    for member in group.both:
        assert (await group.record_end(member, end)).has_it
    await group.write_chain(end)


async def has_it(group: Members, end: pb.Position) -> bool:
    """Whether the second member says that it has all of link 1."""
    return bool((await group.record_end(group.b, end)).has_it)


@pytest.mark.parametrize(
    ("durability", "flags"),
    [("sync", ()), ("sync", ("--direct-port", "-1")), ("interval", ()), ("async", ()), ("memory", ())],
)
def test_many_batches_in_flight_are_acknowledged_and_on_both(
    run: Callable[..., None], durability: str, flags: tuple[str, ...]
) -> None:
    async def scenario(group: Members) -> None:
        assert all((member.direct == "") is (flags != ()) for member in group.both)
        position = await filled(group, 200, durability)
        assert position.index == 2000
        assert dict(position.marks) == {"source": 1999}
        ends = [await group.seal(member, durability=durability) for member in group.both]
        for end in ends:
            assert end.answer == pb.SealReply.WHOLE
            assert end.positions[-1].index == 2000
            assert end.positions[-1].hash == position.hash
        for member in group.both:
            assert (await group.record_end(member, ends[0].positions[-1])).has_it
            assert sent_batches(await group.fetch(member)) == as_sent(batches(200))

    run(scenario, *flags)


def test_a_killed_slave_is_noticed_at_once_and_the_seal_covers_all_acknowledged(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        stream = await group.append(group.a).open()
        sending = asyncio.ensure_future(stream.send(batches(3000)))
        await stream.until_acknowledged(500)
        await group.b.kill()
        error = await stream.error()
        assert isinstance(error, PeerLost)
        # At once: because the connection broke, and not because it was silent for some seconds ("Connection timed out").
        assert not re.search("timed out|timeout", error.message), error
        await sending
        reply = await group.seal(group.a)
        assert reply.answer == pb.SealReply.WHOLE
        assert reply.positions[-1].index >= stream.acknowledged
        assert reply.committed_index >= stream.acknowledged
        assert [one.index for one in reply.positions] == sorted({one.index for one in reply.positions})

    run(scenario)


def test_a_link_that_nobody_sends_to_keeps_no_stream_and_takes_records_again(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        async def rested(times: int) -> None:
            async def holds() -> bool:
                return group.a.log_path.read_text().count("slave let go") == times

            await until(holds)

        await filled(group, 5)
        await rested(1)
        stream = await group.append(group.a, next_index=50).open()
        await stream.send(batches(5, first_index=50))
        await stream.until_acknowledged(100)
        await stream.close()
        await rested(2)
        await group.committed(100)
        await group.b.kill()
        stream = await group.append(group.a, next_index=100).open()
        await stream.send(batches(1, first_index=100))
        assert isinstance(await stream.error(), PeerLost)
        assert (await group.seal(group.a)).positions[-1].index == 100

    run(scenario)


def test_after_the_masters_death_the_slave_serves_what_is_committed_and_the_rest_at_the_end(
    run: Callable[..., None],
) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        stream = await group.append(group.a).open()
        sending = asyncio.ensure_future(stream.send(batches(3000)))
        await stream.until_acknowledged(500)
        await group.a.kill()
        await sending
        reply = await group.seal(group.b)
        assert reply.answer == pb.SealReply.WHOLE
        end = reply.positions[-1]
        assert end.index >= stream.acknowledged
        reading = asyncio.ensure_future(group.fetch(group.b))
        assert (await group.record_end(group.b, end)).has_it
        assert sent_batches(await reading) == as_sent(batches(end.index // 10))
        await stream.close()

    run(scenario)


def test_a_restarted_member_seals_its_links_is_another_incarnation_and_fills_up(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        stream = await group.append(group.a).open()
        sending = asyncio.ensure_future(stream.send(batches(3000)))
        await stream.until_acknowledged(500)
        await group.b.kill()
        await stream.error()
        await sending
        end = (await group.seal(group.a)).positions[-1]
        assert (await group.record_end(group.a, end)).has_it
        await group.write_chain(end)
        before = group.b.incarnation
        group.b.launch()
        await group.b.ready()
        await group.whole()
        assert (group.b.incarnation.disk_id, group.b.incarnation.start) == (before.disk_id, before.start + 1)
        assert (await group.record_end(group.b, end)).has_it
        assert sent_batches(await group.fetch(group.b)) == as_sent(batches(end.index // 10))
        described = await group.b.stub.DescribeLink(pb.DescribeLinkRequest(link=group.name(1, group.b.incarnation)))
        assert (described.end, described.hash) == (end.index, end.hash)
        with pytest.raises(Exception, match="takes no more records"):
            await group.open()

    run(scenario)


def test_a_blank_member_gives_no_answer_to_a_seal_and_is_filled_from_its_peer(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        position = await filled(group)
        before = group.b.incarnation
        assert await group.b.stop() == 0  # its session ends with it: another disk may take its place
        shutil.rmtree(group.b.directory)
        group.b.launch()
        await group.b.ready()
        await group.registered(lambda a, b: b.incarnation != before and a.peer == b.incarnation)
        assert group.b.incarnation.start == 1
        assert (await group.seal(group.b)).answer == pb.SealReply.UNKNOWN
        # It knows nothing, and still it must not take index 0 again (H25), nor be opened late (H11).
        master, slave = group.chain_members[Epoch(1)]
        request = pb.OpenLinkRequest(
            link=group.name(1, group.b.incarnation), chain_version=9, token=1, master=master, slave=slave,
            durability="sync",
        )  # fmt: skip
        with pytest.raises(Sealed):
            await call(group.b.stub.OpenLink, request, CALL_S)
        request.link.epoch = 2
        with pytest.raises(WrongIncarnation):
            await call(group.b.stub.OpenLink, request, CALL_S)
        end = (await group.seal(group.a)).positions[-1]
        assert end.index == position.index
        assert (await group.record_end(group.a, end)).has_it
        assert not (await group.record_end(group.b, end)).has_it
        with pytest.raises(MemberBehind):
            await group.fetch(group.b)
        await group.write_chain(end)
        await until(lambda: has_it(group, end))
        await group.whole()
        assert sent_batches(await group.fetch(group.b)) == as_sent(batches(20))

    run(scenario)


def test_a_refused_batch_ends_the_stream_and_what_came_before_is_acknowledged(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await filled(group)
        one, two = batches(2, first_index=200)
        damaged = type(two)(two.header, two.header_bytes, b"?" + two.payload[1:])
        gap = two.at(two.header.end_index)
        resent = batches(1, first_index=210, first_seq=0)
        partly = batches(1, first_index=210, first_seq=205)
        refusals: list[tuple[list, type[Exception]]] = [
            ([one, damaged, two], BadChecksum),
            ([one, gap, two], WrongIndex),
            ([one, *resent, two], Resend),
            ([one, *partly, two], PartlyResend),
            ([type(two)(two.header, b"nonsense", b""), two], MalformedFrame),
        ]
        for sent, expected in refusals:
            stream = await group.append(group.a).open()
            await stream.send(sent)
            error = await stream.error()
            assert isinstance(error, expected), error
            assert stream.acknowledged == 210
        stream = await group.append(group.a).open()
        await stream.send(batches(1, first_index=0))
        await stream.send([two])
        await stream.until_acknowledged(220)
        await stream.close()
        foreign = group.append(group.a)
        foreign._open.link.cluster = "another"
        assert isinstance(await (await foreign.open()).error(), WrongCluster)

    run(scenario)


def test_a_new_token_fences_the_old_sender_and_finds_equal_copies(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        old = await group.append(group.a).open()
        sending = asyncio.ensure_future(old.send(batches(2000)))
        await old.until_acknowledged(300)
        opening = asyncio.ensure_future(group.open(token=1))
        old.is_stopped = True
        await sending
        await old.until_acknowledged(old.sent_index)
        assert (await opening).index <= old.acknowledged
        position = await group.open(token=2)
        assert position.index == old.acknowledged
        old.is_stopped = False
        await old.send(batches(1, first_index=position.index))
        assert isinstance(await old.error(), Fenced)
        assert old.acknowledged == position.index
        new = await group.append(group.a, token=2).open()
        await new.send(batches(10, first_index=position.index))
        await new.until_acknowledged(position.index + 100)
        await new.close()
        assert isinstance(await (await group.append(group.a, token=1).open()).error(), Fenced)

    run(scenario)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "grpc"])
def test_a_fetch_with_nothing_to_send_says_so(run: Callable[..., None], *, is_direct: bool) -> None:
    async def scenario(group: Members) -> None:
        await filled(group)
        call = await batch_streams.fetch(group.b.direct if is_direct else "", lambda: group.b.stub)
        name = group.name(1, group.b.incarnation)
        await call.write(pb.FetchRequest(open=pb.FetchOpen(link=name, from_index=200, credit_bytes=1 << 20)))
        async with asyncio.timeout(CALL_S):
            replies = [await read(call) for _ in range(4)]
        assert [reply.WhichOneof("kind") for reply in replies] == ["start", None, None, None]
        assert [reply.committed_index for reply in replies] == [200] * 4
        call.cancel()

    run(scenario)


def test_a_fetch_says_that_its_link_is_sealed_until_its_end_is_told(run: Callable[..., None]) -> None:
    """By that a reader misses the end where nobody tells it of the chain, nor this member."""

    async def scenario(group: Members) -> None:
        await filled(group)
        call = await batch_streams.fetch(group.b.direct, lambda: group.b.stub)
        name = group.name(1, group.b.incarnation)
        await call.write(pb.FetchRequest(open=pb.FetchOpen(link=name, from_index=200, credit_bytes=1 << 20)))
        async with asyncio.timeout(CALL_S):
            assert not any([(await read(call)).is_sealed for _ in range(3)])
            end = (await group.seal(group.b)).positions[-1]
            while not (beat := await read(call)).is_sealed:
                pass
            assert (beat.WhichOneof("kind"), beat.committed_index) == (None, 200)
            await group.seal(group.a)
            assert (await group.record_end(group.b, end)).has_it
            while (last := await read(call)).WhichOneof("kind") is None:
                pass
        assert (last.end, last.is_sealed) == (200, False)
        call.cancel()

    run(scenario)


def test_a_reader_whose_credit_is_damaged_on_its_way_is_told(run: Callable[..., None]) -> None:
    """It heard for ever that the member lives, and got nothing any more: nobody looked after what reads the credit."""

    async def scenario(group: Members) -> None:
        await filled(group)
        call = await batch_streams.fetch(group.a.direct, lambda: group.a.stub)
        await call.write(pb.FetchRequest(open=pb.FetchOpen(link=group.name(1, group.a.incarnation), credit_bytes=1)))
        call.serialize = lambda message: (message,)
        await call.write(b"\xff")
        with pytest.raises(BadChecksum):
            await asyncio.wait_for(each(call, lambda _: True), CALL_S)
        call.cancel()

    run(scenario)


def test_a_sender_that_is_writing_is_told_why_it_is_refused(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        for token in range(1, 11):
            await group.open(token=token)
            at = (await group.open(token=token)).index
            stream = await group.append(group.a, token=token).open()
            sending = asyncio.ensure_future(stream.send(batches(3000, first_index=at)))
            await stream.until_acknowledged(at + 50)
            await group.open(token=token + 1)
            assert isinstance(await stream.error(), Fenced)
            await sending

    run(scenario)


def test_a_repeated_open_link_doesn_t_wait_for_the_stream_that_runs(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        stream = await group.append(group.a).open()
        # As long as it is asked, and no shorter: whoever waits for the end of the stream has no answer.
        numbers = itertools.count(0, 10)
        endless = (one for first_index in numbers for one in batches(1, first_index=first_index))
        sending = asyncio.ensure_future(stream.send(endless))
        await stream.until_acknowledged(100)
        for member in (group.a, group.b) * 3:
            reply = await member.stub.OpenLink(group.opening(member), timeout=CALL_S)
            assert 0 < reply.next.index <= stream.sent_index + 10  # one may be on its way
            assert not sending.done()
        stream.is_stopped = True
        await sending
        await stream.until_acknowledged(stream.sent_index)
        await stream.close()

    run(scenario)


@pytest.mark.parametrize("is_opened_before", [False, True], ids=["new", "opened before"])
def test_an_open_link_whose_slave_is_gone_says_so_and_doesn_t_wait(
    run: Callable[..., None], *, is_opened_before: bool
) -> None:
    async def scenario(group: Members) -> None:
        group.chain_members[Epoch(1)] = group.link_members()
        if is_opened_before:
            await group.open()
        await group.b.kill()

        async def is_refused() -> bool:
            try:
                reply = await call(group.a.stub.OpenLink, group.opening(group.a), CALL_S, "g1-a")
            except PeerLost as error:
                if "can't be reached" not in error.message:
                    raise
                return True
            # The master was asked before it saw that the connection is broken; its two copies are equal still.
            assert is_opened_before
            assert reply.next.index == 0
            return False

        await until(is_refused, timeout_s=CALL_S)

    run(scenario)


def test_a_reader_gets_what_commits_at_once_within_its_credit_from_both(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        stream = await group.append(group.a).open()
        sizes = [one.size_bytes for one in batches(3)]
        for member in group.both:
            fetching = group.fetching(member, credit_bytes=sum(sizes[:2]))
            start = await anext(fetching)
            assert start.start.index == 0
            first_index = 0 if member is group.a else 30
            await stream.send(batches(3, first_index=first_index))
            found = []
            async with asyncio.timeout(CALL_S):
                found = [await anext(fetching) for _ in range(2)]
            assert sent_batches(found) == as_sent(batches(2))
            if member is group.a:
                await stream.until_acknowledged(30)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await anext(fetching)
            await fetching.aclose()
        # The last batch of a quiet link reaches the slave's readers as well (H19).
        await stream.until_acknowledged(60)
        fetching = group.fetching(group.b, from_index=45)
        async with asyncio.timeout(CALL_S):
            start = await anext(fetching)
            assert (start.start.index, dict(start.start.marks)) == (40, {"source": 39})
            assert sent_batches([await anext(fetching), await anext(fetching)]) == as_sent(batches(6)[4:])
        await fetching.aclose()
        await stream.close()

    run(scenario)


def test_a_slave_that_can_t_tell_what_is_committed_leaves_its_readers_to_the_master(run: Callable[..., None]) -> None:
    """Its stream broke between the master's acknowledgement and its word to the slave, and nobody sends any more."""

    async def scenario(group: Members) -> None:
        await group.open()
        fetching = group.fetching(group.b)
        assert (await anext(fetching)).start.index == 0
        master = await batch_streams.replicate(group.b.direct, lambda: group.b.stub)
        me = pb.Incarnation(disk_id=group.a.incarnation.disk_id, start=group.a.incarnation.start)
        opening = pb.ReplicateOpen(link=group.name(1, group.b.incarnation), from_master=me, token=1)
        await write(master, pb.ReplicateRequest(open=opening))
        await read(master)
        first, second = batches(2)
        await write(master, BatchMessage.of(first))
        await write(master, BatchMessage.of(second, Index(10)))
        while (await read(master)).next_index < 20:
            pass
        async with asyncio.timeout(CALL_S):
            assert sent_batches([await anext(fetching)]) == as_sent([first])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2 * REST_S):  # while the stream lives it can be told
                    await anext(fetching)
        fetching = group.fetching(group.b)
        async with asyncio.timeout(CALL_S):
            assert sent_batches([await anext(fetching) for _ in range(2)][1:]) == as_sent([first])
            master.cancel()
            with pytest.raises(MemberBehind, match="can't tell whether its records from 10 on are committed"):
                await anext(fetching)

    run(scenario)


def test_small_batches_come_together_to_who_takes_several_within_its_credit(
    run: Callable[..., None], tmp_path: Path
) -> None:
    async def scenario(group: Members) -> None:
        sent = [*batches(100), *batches(2, size_bytes=50_000, first_index=1000), *batches(100, first_index=1020)]
        await ended(group, sent)
        size_bytes = sent[0].size_bytes
        for _ in range(2):  # what is at hand in memory; then, after a start, what has to be read
            for member in group.both:
                assert sent_batches(await group.fetch(member)) == as_sent(sent)
                replies = await group.fetch(member, takes_several=True)
                assert sent_batches(replies) == as_sent(sent)
                assert len(replies) < 25
                together = [reply.ByteSize() for reply in replies if reply.batch.following]
                assert together
                assert max(together) < TOGETHER_BYTES * 1.1
                fetching = group.fetching(member, takes_several=True, credit_bytes=size_bytes * 5 - 1)
                found = [await anext(fetching) for _ in range(2)]
                assert sent_batches(found) == as_sent(sent[:5])
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await anext(fetching)
                await fetching.aclose()
            for member in group.both:
                assert await member.stop() == 0
                member.launch()
                await member.ready()
            await group.whole()

    run(scenario)


def test_what_comes_together_is_committed(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        stream = await group.append(group.a).open()
        sent = batches(10)
        await stream.send(sent[:5])
        await stream.until_acknowledged(50)
        group.b.process.send_signal(signal.SIGSTOP)  # what comes now is in the master's memory, and is nothing yet
        await stream.send(sent[5:])

        async def is_stored() -> bool:
            described = pb.DescribeLinkRequest(link=group.name(1, group.a.incarnation))
            return (await group.a.stub.DescribeLink(described, timeout=CALL_S)).next_index == 100

        await until(is_stored)
        fetching = group.fetching(group.a, takes_several=True)
        found = []
        async with asyncio.timeout(CALL_S):
            while len(sent_batches(found)) < 5:
                found.append(await anext(fetching))
        assert sent_batches(found) == as_sent(sent[:5])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await anext(fetching)
        group.b.process.send_signal(signal.SIGCONT)

    run(scenario)


def test_cursors_are_on_both_and_belong_to_the_reader_that_was_told(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await filled(group)

        def tell(member, generation: int, token: int):
            request = pb.TellReaderRequest(
                link=group.name(1, member.incarnation), subscription_id=3, generation=generation, token=token
            )
            return call(member.stub.TellReader, request, CALL_S)

        def commit(member, generation: int, token: int, index: int):
            request = pb.CommitCursorRequest(
                link=group.name(1, member.incarnation), subscription_id=3, generation=generation, token=token,
                index=index,
            )  # fmt: skip
            return call(member.stub.CommitCursor, request, CALL_S)

        with pytest.raises(Fenced):
            await commit(group.a, 1, 1, 5)
        for member in group.both:
            assert not (await tell(member, 1, 1)).has_cursor
        await commit(group.b, 1, 1, 57)
        await commit(group.a, 1, 1, 33)
        for member in group.both:
            told = await tell(member, 1, 2)
            assert (told.cursor, told.has_cursor, told.is_stale) == (57, True, False)
        for member in group.both:
            with pytest.raises(Fenced):
                await commit(member, 1, 1, 99)
        with pytest.raises(Fenced):
            await group.fetch(group.a, subscription_id=3, generation=1, token=1)
        for member in group.both:
            assert not (await tell(member, 2, 3)).has_cursor
        with pytest.raises(OlderGeneration):
            await commit(group.a, 1, 2, 99)
        # With the peer gone and no coordinator to note it, a commit isn't answered.
        await group.b.kill()
        with pytest.raises(Exception, match="no coordinator"):
            await commit(group.a, 2, 3, 99)

    run(scenario)


def test_a_full_disk_takes_no_records_and_still_seals(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await group.registered(lambda a, b: not a.is_accepting and "room" in a.problem)
        await group.open()
        stream = await group.append(group.a).open()
        await stream.send(batches(1))
        assert isinstance(await stream.error(), DiskFull)
        assert (await group.seal(group.a)).answer == pb.SealReply.WHOLE

    run(scenario, "--reserve-mb", str(1 << 24))


def test_what_a_full_disk_lets_go_makes_room(run: Callable[..., None]) -> None:
    """What was in the database stayed there: it clears up as it writes, and nobody writes to a disk that is full."""

    async def scenario(group: Members) -> None:
        await group.open(durability="async")
        stream = await group.append(group.a).open()
        await stream.send(batches(300, size_bytes=10_000))
        await stream.until_acknowledged(3000)
        await stream.close()
        member = group.b

        def size_bytes() -> int:
            return sum(sizes(member.directory / "data", "*.blob").values())

        assert await member.stop() == 0
        full_bytes = size_bytes()
        assert full_bytes > 10_000_000
        found = os.statvfs(member.directory)
        free_mb = found.f_bavail * found.f_frsize // (1 << 20)
        member._command += ("--reserve-mb", str(free_mb))
        member.launch()
        await member.ready()
        await group.registered(lambda _, b: b.incarnation.start == 2 and not b.is_accepting)
        drop = pb.DropLinksRequest(
            cluster=group.paths.cluster, to=message(member.incarnation), queue_id=QUEUE, below_epoch=2
        )
        await call(member.stub.DropLinks, drop, CALL_S)

        async def is_cleared() -> bool:
            return size_bytes() < full_bytes // 10

        await until(is_cleared)

    run(scenario)


def test_a_seal_of_a_link_never_heard_of_keeps_it_shut_and_outlives_a_restart(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        assert (await group.seal(group.a, epoch=4)).answer == pb.SealReply.UNKNOWN
        with pytest.raises(Exception, match="takes no more"):
            await group.open(epoch=4)
        assert await group.a.stop() == 0
        group.a.launch()
        await group.a.ready()
        await group.whole()
        with pytest.raises(Exception, match=r"takes no more|wasn't made"):
            await group.open(epoch=4)

    run(scenario)


def test_what_makes_no_sense_to_a_member_is_the_caller_s_fault(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        name, stub = group.name(1, group.a.incarnation), group.a.stub
        for method, request in (
            (stub.Seal, pb.SealRequest(link=name, durability="quick")),
            (stub.RecordEnd, pb.RecordEndRequest(link=name, durability="quick")),
        ):
            with pytest.raises(InvalidArgument):
                await call(method, request, CALL_S)

    run(scenario)


def test_a_disk_that_comes_back_older_than_a_link_gives_no_answer_to_its_seal(run: Callable[..., None]) -> None:
    """Put back from a backup: alone, its "nothing" would be the link's end, and what was acknowledged cut off on the good copy."""

    async def scenario(group: Members) -> None:
        backup = group.b.directory.with_suffix(".backup")
        assert await group.b.stop() == 0
        shutil.copytree(group.b.directory, backup)
        group.b.launch()
        await group.b.ready()
        await group.whole()
        position = await filled(group)
        opened = group.b.incarnation
        await group.b.kill()
        await group.session.delete(group.paths.member(GROUP, "b"))  # as the end of its session does
        shutil.rmtree(group.b.directory)
        backup.rename(group.b.directory)
        group.b.launch()
        await group.b.ready()
        await group.whole()
        assert group.b.incarnation == opened  # its starts are counted on the disk
        for _ in range(2):  # the second time the seal is there
            assert (await group.seal(group.b)).answer == pb.SealReply.UNKNOWN
        reply = await group.seal(group.a)
        assert (reply.answer, reply.positions[-1].index) == (pb.SealReply.WHOLE, position.index)

    run(scenario)


def test_what_lived_in_memory_is_not_whole_after_a_restart(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        position = await filled(group, durability="memory")
        await group.b.kill()
        group.b.launch()
        await group.b.ready()
        await group.whole()
        assert (await group.seal(group.b, durability="memory")).answer == pb.SealReply.PARTIAL
        reply = await group.seal(group.a, durability="memory")
        assert (reply.answer, reply.positions[-1].index) == (pb.SealReply.WHOLE, position.index)

    run(scenario)


def test_a_member_seals_a_closing_link_by_itself_when_no_coordinator_comes(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        group.chain_members[Epoch(1)] = group.link_members()
        await group.write_chain(None, state=LinkState.OPEN)
        position = await filled(group)
        await group.write_chain(None, state=LinkState.CLOSING)
        for member in group.both:
            path = group.paths.seal(QUEUE, Epoch(1), member.member)

            async def is_written(path: str = path) -> bool:
                return await group.session.exists(path)

            await until(is_written)
            reply = pb.SealReply.FromString((await group.session.get(path))[0])
            assert (reply.answer, reply.positions[-1].index) == (pb.SealReply.WHOLE, position.index)
            assert reply.incarnation == message(member.incarnation)

    run(scenario)


def test_a_member_serves_on_where_a_newer_version_has_written_the_chain(run: Callable[..., None]) -> None:
    """As in an upgrade in which it comes last: both members of each group that served such a queue ended, with a traceback."""

    async def scenario(group: Members) -> None:
        group.chain_members[Epoch(1)] = group.link_members()
        await group.write_chain(None, state=LinkState.OPEN)
        position = await filled(group)
        path = group.paths.chain(QUEUE)
        data, _ = await group.session.get(path)
        await group.session.set(path, without_checksum(data).replace(b'"format":1', b'"format":2'))
        await group.registered(lambda a, b: all(one.unread == (QUEUE,) for one in (a, b)))
        assert all(one.registration.problem.endswith(": its log says why") for one in group.both)
        assert all("has format 2, this version reads 1" in one.log_path.read_text() for one in group.both)
        assert [member.process.poll() for member in group.both] == [None, None]
        assert (await group.open()).index == position.index

    run(scenario)


def test_dropped_links_are_gone(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        await filled(group)
        for member in group.both:
            request = pb.DropLinksRequest(
                cluster=group.paths.cluster, to=message(member.incarnation), queue_id=QUEUE, below_epoch=2
            )
            await call(member.stub.DropLinks, request, CALL_S)
            with pytest.raises(UnknownLink):
                await group.fetch(member)
            described = await member.stub.DescribeLink(pb.DescribeLinkRequest(link=group.name(1, member.incarnation)))
            assert not described.is_known

    run(scenario)


def test_what_comes_late_makes_no_dropped_link_again(run: Callable[..., None]) -> None:
    """Its seal was dropped with it: opened anew, it would take records that no chain has (H11)."""

    async def scenario(group: Members) -> None:
        await filled(group)
        for below, epochs in ((2, (1,)), (0, (2, 3))):  # 0: the queue was deleted
            for member in group.both:
                drop = pb.DropLinksRequest(
                    cluster=group.paths.cluster, to=message(member.incarnation), queue_id=QUEUE, below_epoch=below
                )
                await call(member.stub.DropLinks, drop, CALL_S)
            for epoch in epochs:
                group.chain_members[Epoch(epoch)] = group.link_members()
                for member in group.both:
                    name = group.name(epoch, member.incarnation)
                    master, slave = group.chain_members[Epoch(epoch)]
                    seal = pb.SealRequest(link=name, chain_version=group.version + 1, master=master, slave=slave)
                    late = [
                        (member.stub.OpenLink, group.opening(member, epoch, 1, "sync")),
                        (member.stub.Seal, seal),
                        (member.stub.RecordEnd, pb.RecordEndRequest(link=name)),
                        (member.stub.TellReader, pb.TellReaderRequest(link=name, subscription_id=1, generation=1)),
                        (member.stub.CommitCursor, pb.CommitCursorRequest(link=name, is_relayed=True)),
                    ]
                    for method, request in late:
                        with pytest.raises(UnknownLink):
                            await call(method, request, CALL_S)
                    described = await member.stub.DescribeLink(pb.DescribeLinkRequest(link=name))
                    assert not described.is_known
            if below:
                await group.open(2)  # what comes behind it isn't meant

    run(scenario)


def test_h18_one_call_tells_which_of_many_links_are_sealed(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        for epoch in (1, 2):
            await group.open(epoch)
        await group.seal(group.a, 1)
        asked = [pb.LinkKey(queue_id=QUEUE, epoch=epoch) for epoch in (1, 2, 3)]

        async def sealed(member: Member, to: Incarnation) -> list[pb.LinkKey]:
            request = pb.FindSealedRequest(cluster=group.paths.cluster, to=message(to), links=asked)
            return list((await call(member.stub.FindSealed, request, CALL_S)).sealed)

        assert await sealed(group.a, group.a.incarnation) == asked[:1]
        assert await sealed(group.b, group.b.incarnation) == []
        with pytest.raises(WrongIncarnation):
            await sealed(group.a, group.b.incarnation)

    run(scenario)


def test_a_second_process_on_a_directory_says_so(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        first = group.a.process
        group.a.launch()
        second, group.a._process = group.a.process, first
        assert await asyncio.to_thread(second.wait, 60) == 2
        assert second.stdout is not None
        second.stdout.close()
        assert "another broker runs on the directory" in group.a.log_path.read_text()

    run(scenario)


def test_a_paused_master_takes_nothing_after_its_session_and_seals_before_it_registers_again(
    run: Callable[..., None],
) -> None:
    async def scenario(group: Members) -> None:
        position = await filled(group)
        stream = await group.append(group.a).open()
        await stream.until_acknowledged(position.index)  # the stream stands
        group.a.process.send_signal(signal.SIGSTOP)
        await stream.send(batches(1, first_index=position.index))
        member_path = group.paths.member("g1", "a")

        async def is_gone() -> bool:
            return not await group.session.exists(member_path)

        await until(is_gone)
        group.a.process.send_signal(signal.SIGCONT)
        assert isinstance(await stream.error(), (LeaseOver, PeerLost, Sealed))
        assert stream.acknowledged == position.index
        await group.whole()
        assert group.a.incarnation.start == 1
        reply = await group.seal(group.a)
        assert (reply.answer, reply.positions[-1].index) == (pb.SealReply.WHOLE, position.index)
        request = pb.OpenLinkRequest(link=group.name(1, group.a.incarnation), chain_version=99, token=9)
        with pytest.raises(Sealed):
            await call(group.a.stub.OpenLink, request, CALL_S)

    # It is waited out. A lease of four seconds, two thirds of it, outlasts a machine that stands still for a moment.
    run(scenario, "--session-timeout-ms", "6000")


def test_a_returning_member_waits_for_no_session_of_its_own(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        started_s = asyncio.get_running_loop().time()
        await group.b.kill()
        group.b.launch()
        await group.b.ready()
        await group.whole()
        # The session of the killed process would have lasted a minute from its last sign of life, which it gives every 8 s.
        assert asyncio.get_running_loop().time() - started_s < 45
        assert group.b.incarnation.start == 2

    run(scenario, "--session-timeout-ms", "60000")


def test_what_an_earlier_process_wrote_or_deleted_late_doesn_t_stand(run: Callable[..., None]) -> None:
    """Killed with that on its way, and started again at once: the member stayed registered as who was gone, or not at all."""

    async def scenario(group: Members) -> None:
        path, mine = group.paths.member(GROUP, "a"), group.a.incarnation
        said = Registration.decode((await group.session.get(path))[0])
        late = replace(said, incarnation=replace(mine, start=mine.start - 1), is_in_sync=False)
        await group.session.set(path, late.encode())
        await group.registered(lambda a, _: (a.incarnation, a.is_in_sync) == (mine, True))
        await group.session.delete(path)
        await group.registered(lambda a, b: (a.incarnation, b.peer) == (mine, mine))

    run(scenario)


def test_a_flipped_bit_is_a_bad_checksum_to_the_reader_and_mended_from_the_peer(
    run: Callable[..., None], tmp_path: Path
) -> None:
    async def scenario(group: Members) -> None:
        sent = batches(5, size_bytes=1000)
        await ended(group, sent)
        assert await group.b.stop() == 0
        flip(tmp_path / "b", sent[2])
        group.b.launch()
        await group.b.ready()
        await group.whole()
        with pytest.raises(BadChecksum):
            await group.fetch(group.b)

        async def is_mended() -> bool:
            try:
                return sent_batches(await group.fetch(group.b)) == as_sent(sent)
            except BadChecksum:
                return False

        await until(is_mended)
        await group.whole()

    run(scenario)


def test_damage_that_nobody_reads_is_found_and_mended_from_the_peer(run: Callable[..., None], tmp_path: Path) -> None:
    async def scenario(group: Members) -> None:
        sent = batches(20, size_bytes=1000)
        await ended(group, sent)
        files = [next((tmp_path / member.member / "segments").iterdir()) for member in group.both]
        for number, file in enumerate(files):
            with file.open("r+b") as stored:
                stored.seek(file.stat().st_size * (1 + number) // 3)
                stored.write(b"?")

        async def are_mended() -> bool:
            return all("damaged batch mended" in member.log_path.read_text() for member in group.both)

        await until(are_mended)
        await group.whole()
        for member in group.both:
            assert sent_batches(await group.fetch(member)) == as_sent(sent)
            log = member.log_path.read_text()
            assert log.count("damaged batch mended") == log.count("damaged batch queue_id") == 1

    run(scenario, "--scrub-interval-s", "1")


def test_a_lost_segment_file_is_no_whole_answer_and_is_filled_again_from_the_peer(
    run: Callable[..., None], tmp_path: Path
) -> None:
    async def scenario(group: Members) -> None:
        await group.open()
        stream = await group.append(group.a).open()
        sent = batches(5, size_bytes=1000)
        await stream.send(sent)
        await stream.until_acknowledged(50)
        await stream.close()
        await group.b.kill()
        (file,) = (tmp_path / "b" / "segments").iterdir()
        file.unlink()
        group.a.process.send_signal(signal.SIGSTOP)  # nothing can be had from it
        group.b.launch()
        await group.b.ready()
        await group.registered(lambda _, b: b.incarnation.start == 2)
        assert (await group.seal(group.b)).answer == pb.SealReply.PARTIAL
        group.a.process.send_signal(signal.SIGCONT)
        await group.registered(lambda a, b: a.peer == b.incarnation and b.peer == a.incarnation)
        end = (await group.seal(group.a)).positions[-1]
        for member in group.both:
            assert (await group.record_end(member, end)).has_it
        await group.write_chain(end)

        async def is_filled() -> bool:
            try:
                return sent_batches(await group.fetch(group.b)) == as_sent(sent)
            except BadChecksum:
                return False

        await until(is_filled)
        await group.whole()

    run(scenario)


def flip(directory: Path, one: EncodedBatch) -> None:
    """Damage a stored batch on a stopped member's disk, behind RocksDB's own checksum."""

    async def damage() -> None:
        store = open_store(directory, place_of(directory))
        bad = replace(one, payload=b"!" + one.payload[1:])
        store.repair((QUEUE, Epoch(1)), bad)
        await store.flushed()
        await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(damage()))
    thread.start()
    thread.join()


def place_of(directory: Path) -> str:
    """Whose directory it is, as it says when it is opened for another."""
    with pytest.raises(InvalidArgument) as refused:
        open_store(directory, "nobody")
    return str(refused.value).split(" belongs to ")[1].split(",")[0]


def test_what_a_member_holds_of_many_links_is_told_at_once_of_those_that_it_knows(run: Callable[..., None]) -> None:
    async def scenario(group: Members) -> None:
        sent = batches(20)
        await ended(group, sent)
        await group.open(2)
        stream = await group.append(group.a, 2).open()
        await stream.send(batches(3, first_seq=500))
        await stream.until_acknowledged(30)
        await stream.close()
        await group.committed(30, 2)

        async def told(member: Member, *epochs: int) -> list[tuple[int, int, int]]:
            request = pb.DescribeLinksRequest(
                cluster=group.paths.cluster, to=message(member.incarnation), queue_id=QUEUE, epochs=epochs
            )
            reply = await call(member.stub.DescribeLinks, request, CALL_S)
            return [(one.epoch, one.next_index, one.committed_index) for one in reply.links]

        for member in group.both:
            assert await told(member, 2, 7, 1) == [(2, 30, 30), (1, 200, 200)]
        # After a start nothing is loaded; who was started again has sealed what was open.
        assert await group.a.stop() == 0
        group.a.launch()
        await group.a.ready()
        await group.registered(lambda a, b: a.incarnation.start == 2 and b.peer == a.incarnation)
        first, second = await told(group.a, *range(1, 100))
        assert first == (1, 200, 200)
        assert second[:2] == (2, 30)  # up to where it is committed the process before was told only
        assert await told(group.a) == []
        former = group.a.incarnation
        group.a.registration = replace(group.a.registration, incarnation=replace(former, start=1))
        with pytest.raises(WrongIncarnation):
            await told(group.a, 1)

    run(scenario)
