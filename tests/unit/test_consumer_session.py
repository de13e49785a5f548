"""How long a reader may hand out: as far as the last write that ZooKeeper answered allows, whatever else answers (H8, H10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from seriatim.consumer import session as session_module
from seriatim.consumer.core import cursor, tenure
from seriatim.consumer.core.following import Following
from seriatim.consumer.core.reading_events import Drained, ReadFrom, Stopped, ViewChanged
from seriatim.consumer.core.view import ChainView, Grant, Place
from seriatim.consumer.session import ReaderSession, ReaderSettings
from seriatim.consumer.views import chain_view
from seriatim.protocol import coordinators as coordinators_module
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.election import Standing
from seriatim.protocol.errors import (
    BugError,
    DeadlineOver,
    Fenced,
    IncompatibleVersion,
    NotElected,
    SeriatimError,
    UnknownQueue,
    UnknownSubscription,
    Unreachable,
    Waiting,
)
from seriatim.protocol.names import Epoch, Generation, Index, QueueId, SubscriptionId, Token
from seriatim.protocol.zookeeper import SessionState

TIMEOUT_S = 0.6
NODE = "n-0000000001"
GRANTED_VIEW = pb.QueueView(queue_id=1, queue="q", chain_version=1)


class ZooKeeper:
    """Answers writes until it `is_cut_off` from the leader; the session's state stays what it was: pings are answered."""

    session_timeout_s = TIMEOUT_S
    state = SessionState.CONNECTED
    is_cut_off = False
    written_s = 0.0

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """It never changes."""

    async def set(self, path: str, data: bytes) -> int:
        sent_s = boottime_s()
        if self.is_cut_off:
            await asyncio.get_running_loop().create_future()
        self.written_s = sent_s
        return 1


async def granted(method: str, request: pb.AcquireReadRequest, *_: object) -> pb.AcquireReadReply:
    """A coordinator: the chain still has this token, for whoever follows hasn't acquired yet."""
    return pb.AcquireReadReply(grant=pb.ReadGrant(subscription_id=1, generation=1, epoch=1, view=GRANTED_VIEW), token=5)


def open_link() -> ChainView:
    """The queue by the time that its first link is open, and read."""
    side = pb.LinkMember(group="g", member="a", address="127.0.0.1:1")
    there = pb.Incarnation(disk_id="d", start=1)
    link = pb.LinkView(epoch=1, state="open", master=side, slave=side, slave_now=there)
    read = pb.SubscriptionView(subscription_id=1, generation=1, reader_token=5, consume_list=[1])
    return chain_view(pb.QueueView(queue_id=1, queue="q", chain_version=2, links=[link], subscriptions=[read]))


def reader(
    zookeeper: ZooKeeper, leases: list[float], on_failure: Callable[[SeriatimError], None] = lambda _: None
) -> ReaderSession:
    session = ReaderSession(
        "127.0.0.1:1",
        ReaderSettings("q", "s", session_timeout_s=TIMEOUT_S),
        on_grant=lambda *_: None,
        on_lease=leases.append,
        on_end=lambda: None,
        on_failure=on_failure,
    )
    session._zookeeper = zookeeper
    session._election = SimpleNamespace(standing=Standing.ELECTED, node=NODE)
    session._following = Following(QueueId(1), SubscriptionId(1))
    session.coordinators.call_within = granted
    return session


async def elected(session: ReaderSession) -> None:
    """It is first in line, and has a coordinator's answer."""
    session._standing_changed(Standing.ELECTED)
    await session._asking


def test_a_reader_learns_its_queue_from_the_chain_and_asks_members_only_where_the_queue_ends() -> None:
    """Hundreds that are rolled out at the same moment had members, and all elections of the queue, asked by each of them. Nobody else's
    election is looked at where the queue ends, either.
    """
    asked: list[pb.QueueRequest] = []

    async def told(_: str, request: object, *__: object) -> object:
        if isinstance(request, pb.QueueRequest):
            asked.append(request)
            return pb.QueueView(queue_id=1, queue="q", chain_version=1)
        return pb.DescribeClusterReply(cluster="c")

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        session.settings = ReaderSettings("q", "s", is_created=False)
        session.coordinators.call_within = told
        with pytest.raises(UnknownSubscription):
            await session.connect()
        await session.look()
        await session.is_all_delivered(1.0)

    asyncio.run(run())
    assert [request.only_chain for request in asked] == [True, True, False]
    assert all(request.no_elections for request in asked)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_subscription_of_which_nobody_says_whether_it_was_made_is_looked_for(is_made: bool) -> None:
    """A coordinator that stood still for two seconds ended the reader that was just starting."""
    there: list[pb.SubscriptionView] = []
    asked: list[str] = []

    async def told(method: str, request: object, *_: object) -> object:
        asked.append(method)
        if method == "CreateSubscription":
            is_first = asked.count(method) == 1
            if is_made or not is_first:
                there.append(pb.SubscriptionView(subscription="s", subscription_id=7))
            if is_first:
                raise DeadlineOver("no answer in time")
            return there[0]
        return pb.QueueView(queue_id=1, queue="q", chain_version=1, subscriptions=there)

    async def run() -> SubscriptionId:
        session = reader(ZooKeeper(), [])
        session.coordinators.call_within = told
        with pytest.raises(DeadlineOver):
            await session._find_subscription(await session._describe(), boottime_s())
        asked.clear()
        there.clear()
        return await session._find_subscription(await session._describe(), boottime_s() + 60)

    assert asyncio.run(run()) == SubscriptionId(7)
    assert asked.count("CreateSubscription") == (1 if is_made else 2)


def test_a_coordinator_s_answer_does_not_renew_the_lease() -> None:
    leases: list[float] = []
    zookeeper = ZooKeeper()

    async def run() -> None:
        session = reader(zookeeper, leases)
        renewing = asyncio.create_task(session._renew())
        session._standing_changed(Standing.ELECTED)
        await asyncio.sleep(TIMEOUT_S / 4)
        assert leases[-1] > boottime_s()
        zookeeper.is_cut_off = True
        until_s = boottime_s() + TIMEOUT_S
        while boottime_s() < until_s:
            await asyncio.sleep(0.05)
            session._acquire()  # a link was read to its end, or two commits failed: as in any outage
        renewing.cancel()

    asyncio.run(run())
    assert len(leases) > 5
    assert max(leases) < zookeeper.written_s + TIMEOUT_S


def test_who_is_elected_may_hand_out_at_once() -> None:
    """Not only when the next write is due."""
    leases: list[float] = []

    async def run() -> None:
        session = reader(ZooKeeper(), leases)
        session._election.standing = Standing.WAITING
        renewing = asyncio.create_task(session._renew())
        await asyncio.sleep(0)
        session._election.standing = Standing.ELECTED
        session._standing_changed(Standing.ELECTED)
        for _ in range(20):
            await asyncio.sleep(0)
        renewing.cancel()

    asyncio.run(run())
    assert leases
    assert leases[-1] > boottime_s()


def test_who_reads_hears_with_each_grant_what_of_the_queue_is_read() -> None:
    """Behind the view: it may know of no end of a link that was let go."""
    events: list[object] = []

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        session._fetcher = SimpleNamespace(happened=events.append)
        await elected(session)

    asyncio.run(run())
    assert [type(one) for one in events] == [ReadFrom, ViewChanged, Drained]
    assert events[0].grant == Grant(SubscriptionId(1), Generation(1), Token(5))
    assert events[-1] == Drained(Epoch(1))


@pytest.mark.parametrize(("timeout_s", "each_s"), [(60.0, [60, 60, 60]), (0.5, [0.5, 1, 1])])
def test_a_reader_looks_for_its_cluster_as_long_as_it_was_told(timeout_s: float, each_s: list[float]) -> None:
    """The subscription was made within five seconds, or not, whatever `connect_timeout_s` was."""
    within_s: list[float] = []

    async def told(method: str, _: object, for_s: float, *__: object) -> object:
        within_s.append(for_s)
        if method == "CreateSubscription":
            raise UnknownQueue("it is far enough")
        return (
            pb.QueueView(queue_id=1, queue="q") if method == "DescribeQueue" else pb.DescribeClusterReply(cluster="c")
        )

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        session.settings = ReaderSettings("q", "s", connect_timeout_s=timeout_s)
        session.coordinators.call_within = told
        with pytest.raises(UnknownQueue):
            await session.connect()

    asyncio.run(run())
    assert within_s == pytest.approx(each_s, rel=0.5)


def test_a_bug_ends_the_reader_and_is_told() -> None:
    """Nobody looked at the task: it was gone, and the reader, elected, stood still for ever."""
    failures: list[SeriatimError] = []

    async def nonsense(*_: object) -> None:
        """What no coordinator answers."""

    async def run() -> None:
        session = reader(ZooKeeper(), [], failures.append)
        session.coordinators.call_within = nonsense
        session._standing_changed(Standing.ELECTED)
        await asyncio.wait([session._asking])

    asyncio.run(run())
    assert [type(one) for one in failures] == [BugError]


def test_a_grant_that_this_version_does_not_understand_ends_the_reader_by_that_and_not_as_a_bug() -> None:
    failures: list[SeriatimError] = []

    async def newer(*_: object) -> pb.AcquireReadReply:
        view = pb.QueueView(queue_id=1, queue="q", chain_version=1, links=[pb.LinkView(epoch=1, state="of tomorrow")])
        return pb.AcquireReadReply(grant=pb.ReadGrant(subscription_id=1, generation=1, epoch=1, view=view), token=5)

    async def run() -> None:
        session = reader(ZooKeeper(), [], failures.append)
        session.coordinators.call_within = newer
        await elected(session)
        assert "of tomorrow" in session.waiting_for
        assert session.grant is None

    asyncio.run(run())
    assert [type(one) for one in failures] == [IncompatibleVersion]


def test_nor_does_who_waits_for_a_commit_wait_for_ever() -> None:
    async def nonsense(*_: object) -> None:
        raise AssertionError("a bug")

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        await elected(session)
        session.members.commit = nonsense
        session._see(open_link())
        with pytest.raises(BugError):
            async with asyncio.timeout(60):
                await session.commit(Place(Epoch(1), Index(3)))

    asyncio.run(run())


def test_a_commit_that_was_ordered_in_one_term_is_not_sent_in_the_name_of_the_next() -> None:
    """Where the reader was deposed and granted anew just between, the member took for the new term's what the old one was done with."""
    asked: list[pb.CommitCursorRequest] = []

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        await elected(session)

        async def commit(_: object, request: pb.CommitCursorRequest) -> None:
            asked.append(request)

        session.members.commit = commit
        session._see(open_link())
        session.ask_commit(Place(Epoch(1), Index(3)))
        (committing,) = session._commits._tasks
        grant = Grant(SubscriptionId(1), Generation(1), Token(7))
        granted = cursor.Granted(chain_view(GRANTED_VIEW), grant, Place(Epoch(1), Index(1)))
        session._happened(tenure.Answered(NODE, Token(7), granted))
        await committing

    asyncio.run(run())
    assert [(one.token, one.index) for one in asked] == [(5, 3)]


@pytest.mark.parametrize(
    ("standing", "is_end", "waiting_for"),
    [
        (Standing.UNSURE, False, "ZooKeeper"),
        (Standing.WAITING, True, "another reader is elected"),
        (Standing.OUT, True, "ZooKeeper"),
    ],
)
def test_who_is_not_elected_any_more_stops_and_where_that_is_known_its_term_ends_for_all_who_have_to_do_with_it(
    standing: Standing, is_end: bool, waiting_for: str
) -> None:
    leases: list[float] = []
    events: list[object] = []
    ended: list[bool] = []

    async def run() -> None:
        session = reader(ZooKeeper(), leases)
        session._on_end = lambda: ended.append(True)
        session._fetcher = SimpleNamespace(happened=events.append)
        await elected(session)
        session._happened(tenure.Proved(NODE, boottime_s(), TIMEOUT_S))
        assert leases[-1] > boottime_s()
        waiting = asyncio.create_task(session.commit(Place(Epoch(1), Index(3))))
        await asyncio.sleep(0)
        session._standing_changed(standing)
        assert leases[-1] == 0.0
        assert session.waiting_for == waiting_for
        assert (session.grant is None) is is_end
        assert isinstance(events[-1], Stopped) is is_end
        if is_end:
            with pytest.raises(Fenced):
                await waiting
            with pytest.raises(NotElected):
                await session.commit(Place(Epoch(1), Index(3)))
            session.ask_commit(Place(Epoch(1), Index(3)))
            assert session._commits.state.wanted == Place(Epoch(0), Index(0))
        waiting.cancel()

    asyncio.run(run())
    assert ended == [True] * is_end


def answering(*answers: pb.AcquireReadReply | SeriatimError) -> tuple[list[int], Callable[..., object]]:
    """A coordinator that says these, one after the other; and with which tokens it was asked."""
    tokens, left = list[int](), list(answers)

    async def told(_: str, request: pb.AcquireReadRequest, *__: object) -> pb.AcquireReadReply:
        tokens.append(request.token)
        answer = left.pop(0)
        if isinstance(answer, SeriatimError):
            raise answer
        return answer

    return tokens, told


WAIT = pb.AcquireReadReply(
    wait=pb.Wait(retry_after_ms=20, reasons=[pb.WaitReason(what="g1-a", reason="it can't be told")]), token=5
)
GRANTED = pb.AcquireReadReply(
    grant=pb.ReadGrant(subscription_id=1, generation=1, epoch=1, index=0, view=GRANTED_VIEW), token=5
)


@pytest.mark.parametrize(
    ("first", "waiting_for", "token", "contradictions"),
    [
        (WAIT, "g1-a: it can't be told", 5, 0),
        (Unreachable("no coordinator answers"), "no coordinator answers", 0, 0),
        (NotElected("not first in line"), "not first in line", 0, 1),
        (Fenced("a newer reader was elected"), "a newer reader was elected", 0, 0),
    ],
)
def test_a_reader_asks_again_until_it_is_granted(
    first: pb.AcquireReadReply | SeriatimError, waiting_for: str, token: int, contradictions: int
) -> None:
    contradicted: list[bool] = []

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        session._election.contradicted = lambda: contradicted.append(True)
        tokens, session.coordinators.call_within = answering(first, GRANTED, GRANTED)
        await elected(session)
        assert session.waiting_for.startswith(waiting_for)
        assert session.grant is None
        async with asyncio.timeout(60):
            while session.grant is None:
                await session._asking
        assert session.waiting_for == ""
        session._refused(Fenced("another reader's token was told"))  # by a member
        await session._asking
        assert tokens == [0, token, 5]

    asyncio.run(run())
    assert len(contradicted) == contradictions


def test_who_seeks_goes_on_once_it_is_granted_the_new_position() -> None:
    moved = pb.ReadGrant(subscription_id=1, generation=2, epoch=1, index=3, view=GRANTED_VIEW)

    async def told(method: str, *_: object) -> object:
        if method == "SeekSubscription":
            return pb.SubscriptionView(generation=2)
        return pb.AcquireReadReply(grant=moved, token=5) if method == "AcquireRead" else pb.DescribeClusterReply()

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        await elected(session)
        session.coordinators.call_within = told
        await session.seek("3", 60.0)
        assert session.grant.generation == 2
        assert session.committed == Place(Epoch(1), Index(3))

    asyncio.run(run())


def test_h16_a_subscription_of_the_same_name_is_another_one() -> None:
    """It was deleted and made again: its reader is elected elsewhere, and may have got the very same token."""
    leases: list[float] = []
    failures: list[SeriatimError] = []

    async def run() -> None:
        session = reader(ZooKeeper(), leases, failures.append)
        session._following = Following(QueueId(1), SubscriptionId(7))
        await elected(session)
        assert session.grant is None

    asyncio.run(run())
    assert [type(one) for one in failures] == [UnknownSubscription]
    assert not any(leases)


def test_who_waits_for_a_commit_is_told_that_the_queue_was_deleted() -> None:
    """Not that it will be handed out again, nor by whom else: nobody reads it any more."""
    failures: list[SeriatimError] = []

    async def run() -> None:
        session = reader(ZooKeeper(), [], failures.append)
        await elected(session)
        session._watch = deleted
        waiting = asyncio.create_task(session.commit(Place(Epoch(1), Index(3))))
        await asyncio.sleep(0)
        session._election.run = session._renew
        await session.run()
        await waiting

    async def deleted() -> None:
        raise UnknownQueue("queue 'q' was deleted")

    with pytest.raises(UnknownQueue):
        asyncio.run(run())
    assert [type(one) for one in failures] == [UnknownQueue]


@pytest.mark.parametrize("view", [pb.QueueView(queue_id=1, is_deleted=True), pb.QueueView(queue_id=2)])
def test_a_reader_of_a_queue_that_was_deleted_is_told_so(view) -> None:
    """And not what to do about a subscription. Another queue may have the name by then."""

    async def watched(_: str) -> AsyncIterator[pb.QueueView]:
        yield view

    async def run() -> None:
        session = reader(ZooKeeper(), [])
        session.coordinators.watch = watched
        await session._watch()

    with pytest.raises(UnknownQueue):
        asyncio.run(run())


def sought(session: ReaderSession, timeout_s: float, seek: Callable[[float], object]) -> list[tuple[str, float]]:
    """A seek of an elected reader, by a clock of its own that goes on where it waits. What coordinators were asked, and for how long each.

    `seek(timeout_s)` is what one of them makes of that; it raises, or answers how long it took.
    """
    asked: list[tuple[str, float]] = []
    clock = [1000.0]

    async def call(method: str, _: object, timeout_s: float) -> object:
        if method == "AcquireRead":
            return await granted(method, pb.AcquireReadRequest())
        asked.append((method, round(timeout_s, 3)))
        if method == "SeekSubscription":
            took_s = seek(timeout_s)
            clock[0] += took_s
            return pb.SubscriptionView(generation=2)
        return pb.DescribeClusterReply()

    async def sleep(seconds: float) -> None:
        clock[0] += seconds
        await real_sleep(0)

    async def run() -> None:
        await elected(session)
        del session.coordinators.call_within  # the real one
        session.coordinators.call = call
        with pytest.MonkeyPatch.context() as patch:
            for module in (session_module, coordinators_module):
                patch.setattr(module, "boottime_s", lambda: clock[0])
            patch.setattr(asyncio, "sleep", sleep)
            await session.seek("3", timeout_s)

    real_sleep = asyncio.sleep
    try:
        asyncio.run(run())
    finally:
        assert clock[0] <= 1000 + timeout_s + 0.1
    return asked


def test_a_seek_waits_as_long_as_it_was_told_for_the_one_coordinator_that_is_asked_and_no_longer() -> None:
    """It ended after two seconds, whatever its time-out, or after twice that."""

    def silent(timeout_s: float) -> float:
        waited.append(timeout_s)
        raise DeadlineOver("no answer in time")

    waited: list[float] = []
    with pytest.raises(DeadlineOver, match="no answer in time"):
        sought(reader(ZooKeeper(), []), 30.0, silent)
    assert waited == [30.0]
    with pytest.raises(DeadlineOver, match=r"was moved, but within 30.0 s this reader wasn't granted"):
        sought(reader(ZooKeeper(), []), 30.0, lambda _: 29.0)


def test_a_seek_asks_again_where_a_position_can_t_be_told_as_in_a_switch() -> None:
    """It was refused after a second. Each time somebody who answers is looked for first: who is asked to move it is asked alone."""
    left = [Waiting("how far link 1 reaches isn't known now")] * 2

    def moved(_: float) -> float:
        if left:
            raise left.pop()
        state = session._commits.state
        session._commits.state = replace(
            state, grant=replace(state.grant, generation=2)
        )  # another of its tasks acquires
        return 0.0

    session = reader(ZooKeeper(), [])
    asked = sought(session, 30.0, moved)
    assert [method for method, _ in asked] == ["DescribeCluster", "SeekSubscription"] * 3
    assert [timeout_s for method, timeout_s in asked if method == "SeekSubscription"] == [30.0, 29.9, 29.8]
    left += [Waiting("how far link 1 reaches isn't known now")] * 100
    with pytest.raises(Waiting):
        sought(reader(ZooKeeper(), []), 3.0, moved)
