"""A session with ZooKeeper whose path to it is cut, or that isn't let in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import pathlib
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from seriatim.cli.embedded.ports import free_port
from seriatim.protocol import zookeeper_threads
from seriatim.protocol.errors import Unreachable
from seriatim.protocol.zookeeper import NotAllowed, SessionState, ZooKeeperSession
from seriatim.protocol.zookeeper_threads import Handler
from tests.integration.test_coordinator_store import until

OFTEN = 2000
"""More than the socket holds by which kazoo wakes its thread."""

AT_ONCE = 301

pytestmark = pytest.mark.timeout(120)


class Path:
    """A port that leads to ZooKeeper, until it is cut."""

    def __init__(self, zookeeper: str) -> None:
        address, slash, folder = zookeeper.partition("/")
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._folder = slash + folder
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.port = free_port()
        """None that the system gives to whoever connects: while the path is cut nobody else has it."""
        self.is_full = False
        """Whether who comes is turned away."""
        self.spoils = False
        """Whether the next answer to a request is given the number of another one."""

    async def lay(self) -> str:
        self._server = await asyncio.start_server(self._lead, "127.0.0.1", self.port)
        return f"127.0.0.1:{self.port}{self._folder}"

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_full:
            writer.close()
            return
        there, back = await asyncio.open_connection(*self._to)
        self._writers += [writer, back]
        with contextlib.suppress(OSError):
            await asyncio.gather(_passed(reader, back), _passed(there, writer, self._answered))

    def _answered(self, data: bytes) -> bytes:
        number = int.from_bytes(data[4:8], "big", signed=True)
        if not self.spoils or number <= 0:  # of the connection itself, a ping, or a watch
            return data
        self.spoils = False
        return data[:4] + (number + 1).to_bytes(4, "big") + data[8:]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def _passed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, changed: Callable[[bytes], bytes] = bytes
) -> None:
    while data := await reader.read(65536):
        writer.write(changed(data))
    writer.close()


@asynccontextmanager
async def connected(zookeeper: str) -> AsyncIterator[tuple[Path, ZooKeeperSession]]:
    path = Path(zookeeper)
    session = ZooKeeperSession(await path.lay(), 30)
    await session.start()
    try:
        yield path, session
    finally:
        await session.stop()
        await path.cut()


def test_what_is_asked_while_no_zookeeper_answers_fails_at_once_and_is_not_done_later(zookeeper: str) -> None:
    async def main() -> None:
        async with connected(zookeeper) as (path, session):
            await session.create("/cut-off", b"before", parents=True)
            session_id = session.session_id
            await path.cut()
            await until(lambda: session.state is SessionState.SUSPENDED, "the cut is noticed")
            for _ in range(OFTEN):
                with pytest.raises(Unreachable, match="doesn't answer at 127"):
                    await asyncio.wait_for(session.set("/cut-off", b"late"), 10)
            await path.lay()
            await until(lambda: session.state is SessionState.CONNECTED, "it is connected again")
            assert session.session_id == session_id
            assert (await session.get("/cut-off"))[0] == b"before"
            await session.delete("/cut-off")

    asyncio.run(main())


def test_a_server_whose_machine_is_gone_is_passed_over_long_before_a_session_is_over(zookeeper: str) -> None:
    """Where the leader's was lost, nobody is let in before there is another one, and meanwhile each comes by the dead one."""

    async def main() -> None:
        address, slash, folder = zookeeper.partition("/")
        with socket.socket() as full, socket.socket() as waiting, socket.socket() as unheard:
            full.bind(("127.0.0.1", 0))
            full.listen(0)  # nobody accepts: what comes beyond the backlog is dropped
            waiting.connect(full.getsockname())
            unheard.setblocking(False)
            unheard.connect_ex(full.getsockname())
            session = ZooKeeperSession(f"127.0.0.1:{full.getsockname()[1]},{address}{slash}{folder}", 32)
            session._client.randomize_hosts = False
            try:
                async with asyncio.timeout(14):  # the dead one is given up after 4 s; by kazoo itself, after 16
                    await session.start()
            finally:
                await session.stop()

    asyncio.run(main())


def test_names_that_can_t_be_looked_up_now_lead_where_they_led_before(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name server may be gone together with a server of ZooKeeper's; one of several that is gone makes each look-up take 5 s."""
    answers, look_up = threading.Event(), socket.getaddrinfo
    answers.set()

    def slow(host: str, *how: Any) -> Any:
        if host == "b.there.test":
            raise OSError(errno.EMFILE, "Too many open files")
        if host.endswith(".test"):
            answers.wait(100)
        return look_up("127.0.0.1" if host.endswith(".test") else host, *how)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def main() -> None:
        path = Path(zookeeper)
        port, slash, folder = (await path.lay()).removeprefix("127.0.0.1:").partition("/")
        session = ZooKeeperSession(f"a.there.test:{port},b.there.test:{port},there.test:{port}{slash}{folder}", 30)
        await session.start()
        try:
            session_id = session.session_id
            answers.clear()
            await path.cut()
            await until(lambda: session.state is SessionState.SUSPENDED, "the cut is noticed")
            await path.lay()
            await until(lambda: session.state is SessionState.CONNECTED, "it is connected again")
            assert session.session_id == session_id
        finally:
            answers.set()
            await session.stop()
            await path.cut()

    asyncio.run(main())


def test_a_server_that_gives_no_session_is_told_as_that_and_not_as_silence(zookeeper: str) -> None:
    """It runs, and the address is right: it has no majority, or as many connections from there as it takes."""

    async def main() -> None:
        async with connected(zookeeper) as (path, session):
            await path.cut()
            await until(lambda: session.state is SessionState.SUSPENDED, "the cut is noticed")
            path.is_full = True
            await path.lay()
            told = ""
            async with asyncio.timeout(60):
                while "gives no session: it may have no majority, too many connections" not in told:
                    await asyncio.sleep(0.1)
                    with pytest.raises(Unreachable) as raised:
                        await session.exists("/")
                    told = raised.value.message

    asyncio.run(main())


def test_what_zookeeper_refuses_is_told_as_that_and_not_as_silence(zookeeper: str) -> None:
    async def main() -> None:
        session = ZooKeeperSession(zookeeper, 30)
        await session.start()
        try:
            with pytest.raises(NotAllowed, match=r"ZooKeeper refuses /theirs: NoAuthError \(whoever serves"):
                await session.get("/theirs")
        finally:
            await session.stop()

    client = KazooClient(zookeeper)
    client.start()
    client.create("/theirs", acl=[make_digest_acl("somebody", "else", all=True)], makepath=True)
    asyncio.run(main())
    client.stop()
    client.close()


def test_much_that_is_asked_at_once_while_nodes_are_made_is_answered(zookeeper: str) -> None:
    """A queue with hundreds of subscriptions is described, which asks of each who is elected, while another one is made."""

    async def main() -> None:
        session = ZooKeeperSession(zookeeper, 30)
        await session.start()
        try:
            for number in range(30):
                made = [asyncio.ensure_future(session.ensure(f"/made/{number}/{place}/senders")) for place in "ab"]
                await asyncio.sleep(0.001 * (number % 4))  # what the first answers lead to meets the rest
                await asyncio.gather(*(session.sync("/") for _ in range(AT_ONCE)), *made)
        finally:
            await session.stop()

    asyncio.run(main())


def test_an_answer_that_cant_be_one_ends_the_connection_and_not_the_session(zookeeper: str) -> None:
    async def main() -> None:
        async with connected(zookeeper) as (path, session):
            session_id, states = session.session_id, list[SessionState]()
            session.on_state(states.append)
            path.spoils = True
            with pytest.raises(Unreachable):
                await session.exists("/")
            await until(lambda: len(states) == 2, "the connection is given up, and there is another one")
            assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
            assert await session.exists("/")
            assert session.session_id == session_id

    asyncio.run(main())


def test_a_loop_that_stands_still_for_longer_than_the_time_out_loses_its_session_and_a_busy_one_does_not(
    zookeeper: str,
) -> None:
    """kazoo's thread goes on: a server whose log nobody took was there for ever, and did nothing."""
    session_s = 2.0
    looking = KazooClient(zookeeper)

    async def main() -> bool:
        """Whether it says nothing: the session was lost, but all of this machine stood still meanwhile."""
        session, states = ZooKeeperSession(zookeeper, session_s), list[SessionState]()
        await session.start()
        session.on_state(states.append)
        try:
            session_id = session.session_id
            await session.create("/there", ephemeral=True)
            longest_s = 0.0
            for _ in range(4):
                began_s = time.monotonic()
                time.sleep(session_s / 2)  # noqa: ASYNC251 - as whoever keeps the loop
                await asyncio.sleep(session_s / 10)
                longest_s = max(longest_s, time.monotonic() - began_s)
            if states and longest_s > session_s * 0.7:
                return True
            assert (states, session.session_id) == ([], session_id)
            until_s = time.monotonic() + 10 * session_s
            while looking.exists("/there"):
                assert time.monotonic() < until_s, "it is there for ever"
                time.sleep(0.1)  # noqa: ASYNC251
            assert session.stands_still
            await until(lambda: states[-1:] == [SessionState.CONNECTED], "the loop goes on, with another session")
            assert not session.stands_still
            assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
            assert session.session_id != session_id
            return False
        finally:
            await session.stop()

    looking.start()
    try:
        while asyncio.run(main()):
            pass
    finally:
        looking.stop()
        looking.close()


class Limit:
    """Of a process's threads or files: of those that kazoo takes for a session, number `at` isn't given out, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self._left = at
        spawn, wakings = Handler.spawn, Handler.create_socket_pair

        def take(error: Exception) -> None:
            self._left -= 1
            if self._left == 0:
                raise error

        def spawned(handler: Handler, *of: Any) -> Any:
            take(RuntimeError("can't start new thread"))
            return spawn(handler, *of)

        def opened(handler: Handler) -> Any:
            take(OSError(errno.EMFILE, "Too many open files"))
            return wakings(handler)

        monkeypatch.setattr(Handler, "spawn", spawned)
        monkeypatch.setattr(Handler, "create_socket_pair", opened)


def taken() -> tuple[int, int]:
    """Threads, but for an executor's, which stay, and files."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return len(threads), len([*pathlib.Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize(("at", "why"), [(1, "thread"), (2, "thread"), (3, "open files"), (4, "thread")])
def test_a_session_for_which_no_file_or_thread_is_left_is_told_as_unreachable_and_leaves_nothing(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch, at: int, why: str
) -> None:
    """What was raised ended who was to begin it; and each try took of what there was too little of."""

    async def main() -> None:
        before = taken()
        Limit(monkeypatch, at)
        session = ZooKeeperSession(zookeeper, 30)
        with pytest.raises(Unreachable, match=rf"can be begun.*{why}"):
            await session.start()
        # What others left may end meanwhile.
        await until(lambda: all(now <= then for now, then in zip(taken(), before, strict=True)), "all is given back")
        assert session._is_ended, "and its loop notes nothing for it any more"
        await session.stop()
        another = ZooKeeperSession(zookeeper, 30)
        await another.start()
        await another.stop()

    asyncio.run(main())


def test_a_session_that_is_begun_while_no_thread_is_given_out_is_begun_once(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor keeps what it had no thread for, and gives it to the next one: by then the session may be another's, or cut off."""
    begun, begin, given_out = list[KazooClient](), KazooClient.start_async, ThreadPoolExecutor._adjust_thread_count  # type: ignore[attr-defined]

    def start_async(client: KazooClient) -> Any:
        begun.append(client)
        return begin(client)

    def none(_: ThreadPoolExecutor) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        monkeypatch.setattr(KazooClient, "start_async", start_async)
        session = ZooKeeperSession(zookeeper, 30)
        monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", none)
        await session.start()
        monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", given_out)
        try:
            await asyncio.to_thread(int)  # behind what was left
            assert len(begun) == 1
            assert await session.exists("/")
        finally:
            await session.stop()

    asyncio.run(main())


def test_who_is_led_elsewhere_while_names_are_looked_up_waits_for_no_look_up_that_nobody_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread would have waited for ever, where the ensemble has more servers now."""
    session, look_up = ZooKeeperSession("a.there.test:1", 8), socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *how: look_up("127.0.0.1", *how))

    class LedElsewhere(list[tuple[str, int]]):
        def __iter__(self) -> Iterator[tuple[str, int]]:
            session.go_to("b.there.test:1,c.there.test:1")
            return super().__iter__()

    session._client.hosts = LedElsewhere(session._client.hosts)
    ended: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    connection = session._client._connection
    threading.Thread(target=lambda: ended.put(connection._expand_client_hosts()), daemon=True).start()
    assert ended.get(timeout=30) == [("a.there.test", "127.0.0.1", 1)]


def test_a_look_up_that_ends_as_its_time_runs_out_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for until it ended, were it minutes, where nothing of its time was left by the time the wait began."""
    connection = ZooKeeperSession("a.there.test:1,b.there.test:1", 8)._client._connection
    known = ("a.there.test", "127.0.0.1", 1)
    connection._found["a.there.test", 1] = [known]
    monkeypatch.setattr(connection, "_look_up", lambda *_: None)  # none of them ends
    monkeypatch.setattr(zookeeper_threads, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(zookeeper_threads, "LOOK_UP_S", 1e-9)

    def looked_up() -> None:
        for _ in range(2000):  # once in some hundred
            assert connection._expand_client_hosts() == [known]

    looking = threading.Thread(target=looked_up, daemon=True)
    looking.start()
    looking.join(60)
    assert not looking.is_alive()
