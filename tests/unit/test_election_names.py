"""Names in an election, which become names of ZooKeeper's nodes, and who stands first there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

import pytest

from seriatim.consumer import Consumer, Subscriber
from seriatim.producer import Producer
from seriatim.protocol.election import Election, Standing, first_in_line, number_of, right_before
from seriatim.protocol.errors import InvalidArgument, Unreachable
from seriatim.protocol.zookeeper import NoNode, SessionState, ZooKeeperSession


@pytest.mark.parametrize("client", [Consumer, Subscriber, Producer])
@pytest.mark.parametrize(
    "name", ["team/app", "two\nlines", "\x7f", "\ud800", "\ufff0", "\U0001f600", "n" * 201, "é" * 101]
)
def test_a_name_that_zookeeper_refuses_is_refused_at_once(client, name):
    with pytest.raises(InvalidArgument, match="name has 1 to 200 bytes"):
        client("127.0.0.1:1", "q", name=name)


@pytest.mark.parametrize("client", [Consumer, Subscriber])
@pytest.mark.parametrize("name", ["", "team app", "équipe-1", "\u65e5\u672c", "n" * 200])
def test_other_names_are_a_reader_s_to_choose(client, name):
    instance = client("127.0.0.1:1", "q", name=name)._settings.instance
    assert instance == name or not name


def test_a_node_by_hand_is_no_candidate():
    assert first_in_line(["by-hand", "0000000000", "a-0000000010"]) == "a-0000000010"


def test_each_instance_watches_the_one_right_before_it_and_nobody_whom_it_comes_before() -> None:
    nodes = ["c-0000000007", "by-hand", "z-0000000002", "a-0000000010"]
    assert right_before(nodes, "a-0000000010") == "c-0000000007"
    assert right_before(nodes, "c-0000000007") == "z-0000000002"
    assert right_before(nodes, "z-0000000002") is None


class SlowToCommit:
    """ZooKeeper, whose connection breaks while a create is on its way: it is done, and the next server shows it a moment later."""

    session_id, state = 1, SessionState.CONNECTED

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.under_way: list[str] = []

    def on_state(self, _: object) -> None:
        pass

    async def ensure(self, _: str) -> None:
        pass

    async def sync(self, _: str) -> None:
        self.nodes += self.under_way
        self.under_way.clear()

    async def children(self, path: str, *_: object) -> list[str]:
        return [] if path.endswith(("0", "1")) else list(self.nodes)

    async def owner(self, _: str) -> int:
        return self.session_id

    async def create(self, path: str, **_: object) -> str:
        made = f"{path.rsplit('/', 1)[1]}{len(self.nodes) + len(self.under_way):010}"
        self.under_way.append(made)
        if len(self.under_way) == 1 and not self.nodes:
            raise Unreachable("ZooKeeper didn't answer: ConnectionLoss")
        self.nodes += self.under_way
        self.under_way.clear()
        return f"{path.rsplit('/', 1)[0]}/{made}"


def test_an_instance_does_not_wait_behind_its_own_node():
    """It made a second one, which stood behind the first for as long as the session lived: nobody was elected."""
    session = SlowToCommit()
    election = Election(cast("ZooKeeperSession", session), "/senders", "app", lambda _: None)

    async def stand() -> None:
        with pytest.raises(Unreachable):
            await election._look()
        await election._look()

    asyncio.run(stand())
    assert (election.standing, session.nodes) == (Standing.ELECTED, ["app-0000000000"])


class SilentToWrites(SlowToCommit):
    """Its server has lost the leader: it still answers what is read."""

    asked = 0

    async def create(self, path: str, **_: object) -> str:
        self.nodes.append(f"{path.rsplit('/', 1)[1]}0000000000")
        return f"{path}0000000000"

    async def delete(self, _: str) -> None:
        self.asked += 1
        await asyncio.Event().wait()


def test_who_closes_does_not_wait_for_a_zookeeper_that_answers_no_write(monkeypatch):
    """A close took more than its ten seconds, and raised, where a server kept its clients for eight without a leader."""
    monkeypatch.setattr("seriatim.protocol.election._RESIGN_S", 0.01)
    session = SilentToWrites()
    is_elected = asyncio.Event()
    election = Election(cast("ZooKeeperSession", session), "/senders", "app", lambda _: is_elected.set())

    async def stand() -> None:
        run = asyncio.create_task(election.run())
        await is_elected.wait()
        run.cancel()
        await asyncio.wait((run,), timeout=60)
        assert run.cancelled()

    asyncio.run(stand())
    assert (election.standing, election.node, session.asked) == (Standing.OUT, "", 1)


class BreaksAgainAndAgain(SlowToCommit):
    """Each connection begins well, and ends when something larger than a ping is to pass."""

    session_timeout_s = 4.0

    async def create(self, path: str, **_: object) -> str:
        made = f"{path}{1 + max((number_of(one) for one in self.nodes), default=-1):010}"
        self.nodes.append(made.rsplit("/", 1)[1])
        return made

    async def children(self, path: str, *_: object) -> list[str]:
        return list(self.nodes) if path == "/coordinators" else []

    async def delete(self, path: str) -> None:
        self.nodes.remove(path.rsplit("/", 1)[1])


@pytest.mark.parametrize(
    ("gives_way", "others", "first"),
    [
        (True, ["b-0000000001"], "b-0000000001"),
        (False, ["b-0000000001"], "a-0000000000"),  # a sender's records are on their way
        (True, [], "a-0000000000"),  # nobody to give way to
    ],
)
def test_a_coordinator_whose_connection_breaks_again_and_again_gives_way(
    gives_way: bool, others: list[str], first: str
) -> None:
    """Behind a path that lets only pings through it stayed elected, and nobody did what it was elected for."""
    session = BreaksAgainAndAgain()

    async def stand() -> None:
        election = Election(
            cast("ZooKeeperSession", session), "/coordinators", "a", lambda _: None, gives_way=gives_way
        )
        await election._look()
        session.nodes += others
        for _ in range(4):
            election._session_changed(SessionState.SUSPENDED)
            await election._look()
            assert election.standing is Standing.ELECTED  # it happens to anybody
        election._session_changed(SessionState.SUSPENDED)
        with contextlib.suppress(NoNode):
            await election._look()

    asyncio.run(stand())
    assert first_in_line(session.nodes) == first
