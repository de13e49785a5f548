"""A coordinator that reaches ZooKeeper and its clients, and no broker."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seriatim.coordinator import background
from seriatim.coordinator.background import BackgroundWork
from seriatim.coordinator.core.reach import Reach
from seriatim.coordinator.core.registry import GroupState, Registry
from seriatim.coordinator.members import Members
from seriatim.coordinator.service import CoordinatorService
from seriatim.coordinator.store import Store
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.election import Election, Standing
from seriatim.protocol.errors import DeadlineOver, Fenced, SeriatimError, Unreachable
from seriatim.protocol.names import Epoch, Incarnation, MemberName, QueueId
from seriatim.protocol.registration import Registration
from seriatim.protocol.zookeeper import NoNode
from tests.unit.test_election_names import SlowToCommit

NAMES = [MemberName(group, place) for group in ("g1", "g2") for place in "ab"]
A, B, C, _ = NAMES


def test_it_is_in_doubt_only_where_several_were_silent_and_nobody_answered_since():
    reach = Reach()
    reach.unanswered(A, 1.0)
    assert not reach.is_in_doubt(4, 9.0)
    reach.unanswered(B, 2.0)
    assert reach.is_in_doubt(4, 2.0)
    assert not reach.is_in_doubt(2, 9.0)  # the two may be gone together
    assert [reach.is_in_doubt(4, now_s, 4.0) for now_s in (4.9, 5.0)] == [False, True]
    reach.unanswered(A, 8.0)
    assert reach.is_in_doubt(4, 9.0, 4.0)
    reach.answered()
    assert not reach.is_in_doubt(4, 9.0)
    reach.unanswered(C, 9.0)
    assert not reach.is_in_doubt(4, 19.0)


class Brokers:
    """What is called gets this, by where it is."""

    def __init__(self) -> None:
        self.answers: dict[str, SeriatimError | None] = {}
        self.asked: list[str] = []
        self.stand_still: set[str] = set()
        self.given_up: list[str] = []

    def keep_only(self, addresses: set[str]) -> None: ...

    async def call(self, _: str, __: object, ___: object, timeout_s: float, to: str) -> pb.DescribeLinksReply:
        self.asked.append(to)
        if to in self.stand_still:
            await asyncio.sleep(timeout_s)
            self.given_up.append(to)
            raise DeadlineOver("no answer in time")
        error = self.answers.get(to, Unreachable("No route to host"))
        if error is not None:
            raise error
        return pb.DescribeLinksReply()


def members(groups: tuple[str, ...] = ("g1", "g2")) -> tuple[Members, Brokers]:
    there = {
        group: GroupState(
            group, members={place: Registration(Incarnation(group + place, 1), f"{group}-{place}:1") for place in "ab"}
        )
        for group in groups
    }
    store = SimpleNamespace(registry=Registry(there), cluster="c", session=SimpleNamespace(session_timeout_s=0.0))
    found, brokers = Members(cast("Store", store), 1.0), Brokers()
    found._calls = cast("Any", brokers)
    return found, brokers


async def nothing(*_: object) -> None: ...


async def look(of: Members, *at: MemberName) -> None:
    for member in at:
        with pytest.raises((Unreachable, Fenced)):
            await of.describe_links(QueueId(1), (Epoch(1),), member)


def test_all_are_asked_before_a_coordinator_says_that_it_reaches_nobody():
    async def scenario() -> None:
        found, brokers = members()
        assert not await found.reaches_nobody()
        await look(found, A)
        assert not await found.reaches_nobody()
        await look(found, B)
        brokers.asked.clear()
        assert await found.reaches_nobody()
        assert brokers.asked == [str(name) for name in NAMES]
        brokers.answers[str(C)] = None
        assert not await found.reaches_nobody()
        brokers.answers[str(C)] = Unreachable("again")
        await look(found, A, B)
        brokers.answers[str(C)] = Fenced("an error is an answer, too")
        assert not await found.reaches_nobody()

    asyncio.run(scenario())


def test_whom_anybody_answers_reaches_somebody_however_many_stand_still():
    """Two that stood still were heard last, half a second after all others, and so nobody was reached: at each call, by each coordinator."""

    async def scenario() -> None:
        found, brokers = members(("g1", "g2", "g3"))
        brokers.answers = dict.fromkeys(map(str, NAMES))
        await look(found, MemberName("g3", "a"), MemberName("g3", "b"))
        brokers.stand_still = {"g3-a", "g3-b"}
        assert not await found.reaches_nobody()
        assert brokers.given_up == []  # whoever sends or reads waits for none of those
        brokers.asked.clear()
        assert not await found.reaches_nobody()
        assert brokers.asked == []

    asyncio.run(scenario())


def test_one_group_alone_may_be_gone():
    async def scenario() -> None:
        found, _ = members(("g1",))
        await look(found, A, B)
        assert not await found.reaches_nobody()

    asyncio.run(scenario())


def test_whoever_asks_where_to_send_or_read_is_left_to_another_coordinator():
    """Its wait was an answer: it closed the link that served well, and made hundreds of others that nobody opened."""

    async def scenario() -> None:
        found, brokers = members()
        unasked = cast("Any", None)
        service = CoordinatorService(unasked, found, unasked, unasked, unasked)
        await look(found, A, B)
        for method, request in (
            (service.AcquireSend, pb.AcquireSendRequest(queue="q")),
            (service.AcquireRead, pb.AcquireReadRequest(queue="q", subscription="s")),
        ):
            with pytest.raises(Unreachable, match="reaches no broker"):
                await method.__wrapped__(service, request, None)
        brokers.answers = dict.fromkeys(map(str, NAMES))
        await service._check_reach()

    asyncio.run(scenario())


def test_the_elected_one_leaves_what_nobody_asked_for_to_another(monkeypatch):
    """Ends were told to nobody, so no group came back, and sending waited for as long as it stayed elected."""
    monkeypatch.setattr(background, "ASK_MEMBERS_EVERY_S", 0.0)

    async def scenario() -> None:
        found, _ = members()
        await look(found, A, B)
        left: asyncio.Queue[str] = asyncio.Queue()
        store = found._store
        for name, value in (("on_change", lambda _: None), ("chains", {}), ("bare", {})):
            setattr(store, name, value)
        found._connections = cast("Any", SimpleNamespace(forget_dead=nothing))

        execution = SimpleNamespace(give_way=nothing)
        work = BackgroundWork(*cast("Any", (store, found, execution, None, lambda: True, left.put_nowait)))
        running = asyncio.create_task(work.run())
        async with asyncio.timeout(60):
            assert await left.get() == "it reaches no broker"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


class Several(SlowToCommit):
    """Others stand behind it, or nobody does."""

    session_timeout_s = 4.0

    def __init__(self, *others: str) -> None:
        super().__init__()
        self.nodes = ["c1-0000000000", *others]
        self.deleted: list[str] = []

    async def delete(self, path: str) -> None:
        self.deleted.append(path)
        self.nodes.remove(path.rsplit("/", 1)[1])


@pytest.mark.parametrize("others", [(), ("c2-0000000001",)])
def test_an_election_is_left_where_others_stand(others):
    session = Several(*others)
    election = Election(cast("Any", session), "/c", "c1", lambda _: None, gives_way=True)

    async def stand() -> None:
        await election._look()
        assert election.standing is Standing.ELECTED
        election.give_way("it reaches no broker")
        with pytest.raises(NoNode) if others else contextlib.nullcontext():
            await election._look()

    asyncio.run(stand())
    assert session.deleted == (["/c/c1-0000000000"] if others else [])
