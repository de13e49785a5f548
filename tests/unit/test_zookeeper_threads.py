"""kazoo waits for its sockets, and passes on answers, as with its own handler."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import (
    BadVersionError,
    ConnectionDropped,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    SessionExpiredError,
)
from kazoo.protocol.connection import DELETED_EVENT, WATCH_XID, ConnectionHandler
from kazoo.protocol.serialization import Exists, ReplyHeader
from kazoo.protocol.states import KeeperState

from seriatim.protocol import log, zookeeper_threads
from seriatim.protocol.errors import Unreachable
from seriatim.protocol.zookeeper import BadVersion, NodeExists, NoNode, NotEmpty, SessionExpired, ZooKeeperSession
from seriatim.protocol.zookeeper_threads import Handler

HIGH = 1500
"""Above what select(2) takes."""
MANY = 5000
"""More than a pair of sockets holds."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_sockets_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    assert Handler(1).select([one, other], [], [], 0) == ([], [], [])
    other.send(b"x")
    assert Handler(1).select([one, other], [], [], 5) == ([one], [], [])
    assert Handler(1).select([one], [one, other], [], 5) == ([one], [one, other], [])


def test_a_time_out_is_waited_for_and_no_shorter(pair: tuple[socket.socket, socket.socket]) -> None:
    began_s = time.monotonic()
    assert Handler(1).select([pair[0]], [], [], 0.0503) == ([], [], [])
    assert time.monotonic() - began_s >= 0.0503


def test_a_session_s_end_waits_neither_for_its_last_answer_nor_for_its_first_as_long_as_it_may_last(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who closed a consumer with a session of 30 s while ZooKeeper stood still was told after 20 s that it wasn't done within 10 s."""
    monkeypatch.setattr(zookeeper_threads, "END_S", 0.1)
    handler, ended = Handler(1), threading.Event()

    def wait() -> None:
        with pytest.raises(ConnectionDropped):
            handler.select([pair[0]], [], [], 600)
        ended.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    handler.end_soon()
    assert ended.wait(60)
    waiting.join()

    async def begin() -> None:
        with pytest.raises(Unreachable):
            await ZooKeeperSession("{}:{}".format(*silent.getsockname()), 600).start(0.1)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(asyncio.wait_for(begin(), 60))


def test_what_ended_can_be_read_and_written_so_that_it_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    other.close()
    assert Handler(1).select([one], [one], [], 5) == ([one], [one], [])
    one.close()
    with pytest.raises(ValueError, match="negative"):
        Handler(1).select([one], [], [], 5)


def test_a_descriptor_may_have_any_number(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], HIGH + 1), limits[1]))
    try:
        with socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, HIGH)) as high:
            other.send(b"x")
            assert high.fileno() >= HIGH
            assert Handler(1).select([high], [], [], 5) == ([high], [], [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_answer_is_passed_on_by_the_thread_that_has_it_and_one_that_fails_ends_nothing() -> None:
    handler = Handler(1)
    handler.start()
    try:
        passed: list[object] = []
        for fails in (True, False):
            result = handler.async_result()
            result.rawlink(
                lambda one, fails=fails: 1 / 0 if fails else passed.append((one.value, threading.get_ident()))
            )
            result.set(b"data")
        assert passed == [(b"data", threading.get_ident())]
    finally:
        handler.stop()
    assert not handler.running


@pytest.mark.timeout(60)
def test_who_asks_never_waits_for_kazoo_s_thread_and_each_request_wakes_it_once() -> None:
    handler = Handler(1)
    reading, writing = handler.create_socket_pair()
    assert handler.select([reading], [], [], 0) == ([], [], [])
    for _ in range(MANY):
        writing.send(b"\0")
    for _ in range(MANY):
        assert handler.select([reading], [], [], 5) == ([reading], [], [])
        reading.recv(1)
    assert handler.select([reading], [], [], 0) == ([], [], [])
    writing.close()
    reading.close()
    with pytest.raises(ValueError, match="negative"):
        writing.send(b"\0")
    with pytest.raises(ValueError, match="negative"):
        handler.select([reading], [], [], 5)


@pytest.mark.parametrize(
    "body", [struct.pack("!iii2s", 3, 3, 2, b"/\xff"), struct.pack("!ii", 3, 3)], ids=["no text", "cut off"]
)
def test_a_change_told_in_bytes_that_were_damaged_ends_the_connection_and_not_kazoo_s_thread(body: bytes) -> None:
    """Whoever had the session waited for the next connection for ever."""
    connection = ZooKeeperSession("127.0.0.1:1", 1)._client._connection
    connection._read_header = lambda timeout: (ReplyHeader(WATCH_XID, 0, 0), body, 0)
    with pytest.raises(ConnectionDropped):
        connection._read_socket(1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("!iiiqi17x", 37, 0, 4000, 1, 16 - 2**31),
        bytes(4),
        struct.pack("!i", -1),
    ],
    ids=["another server's, larger than memory", "a bit flipped in the password's length", "empty", "less than empty"],
)
def test_a_first_answer_that_makes_no_sense_costs_the_connection_and_nothing_else(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended kazoo's thread: whoever had the session waited for the next one as long as its process lived."""
    read = ConnectionHandler._read

    def read_with_little_memory(self: Any, size_bytes: int, timeout: float) -> Any:
        if size_bytes > 1 << 30:
            raise MemoryError
        return read(self, size_bytes, timeout)

    monkeypatch.setattr(ConnectionHandler, "_read", read_with_little_memory)
    given = struct.pack("!iiiqi16s?", 37, 0, 4000, 1, 16, b"password", False)
    asked: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        for said in (answer, given):
            connection, _ = listening.accept()
            asked.append(connection.recv(1024))
            connection.sendall(said)
            with connection, contextlib.suppress(OSError):  # it may not have read all
                connection.recv(1024)

    async def scenario(port: int) -> None:
        session = ZooKeeperSession(f"127.0.0.1:{port}", 60)
        await session.start(60)
        await session.stop()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        asyncio.run(scenario(listening.getsockname()[1]))
    assert len(set(asked)) == 1  # nothing of the first session is left
    assert not [line for line in caplog.records if line.exc_info and log._search.filter(line)]


def test_what_is_written_by_its_version_has_the_next_one_whatever_comes_back() -> None:
    """A Seal names it, and a member goes by the highest that it was told."""

    class Answer:
        exception, value = None, SimpleNamespace(version=8 | 1 << 20)

        def rawlink(self, settle: Any) -> None:
            settle(self)

    async def scenario() -> None:
        session = ZooKeeperSession("127.0.0.1:1", 1)
        session._client = SimpleNamespace(connected=True, set_async=lambda *_: Answer())
        session._loop = asyncio.get_running_loop()
        assert await session.set("/a", b"", 7) == 8

    asyncio.run(scenario())


@pytest.mark.parametrize("bit", range(32))
def test_whoever_asked_is_told_where_the_answer_is_an_error_that_there_is_none_of(bit: int) -> None:
    """One bit flipped in an answer's code: a lease, an election or a coordinator's look waited for that answer for as long as the process lived."""

    async def scenario() -> None:
        session = ZooKeeperSession("127.0.0.1:1", 1)
        client, connection = session._client, session._client._connection
        session._loop = asyncio.get_running_loop()
        answer = client.handler.async_result()
        session._client = SimpleNamespace(connected=True, exists_async=lambda *_, **__: answer)
        client._pending.append((Exists("/a", None), answer, 1))
        code = struct.unpack("!i", struct.pack("!I", 1 << bit))[0]
        connection._read_header = lambda timeout: (ReplyHeader(1, 1, code), b"", 0)
        asking = asyncio.ensure_future(session.exists("/a"))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionDropped):
            connection._read_socket(1)
        assert answer.ready()
        with pytest.raises(Unreachable):
            await asking

    asyncio.run(scenario())


@pytest.mark.filterwarnings(
    "ignore:The 'warn' method:DeprecationWarning"
)  # kazoo's, of a kind of change that there isn't
def test_a_change_that_was_damaged_on_its_way_is_noticed_by_whoever_waits_for_it() -> None:
    """It was told of what nobody watched, and once: who stands behind the one that is elected never learned that it had gone."""

    async def scenario() -> None:
        session = ZooKeeperSession("127.0.0.1:1", 1)
        client, connection = session._client, session._client._connection
        session._loop = asyncio.get_running_loop()
        told = asyncio.Event()
        client._stopped.clear()
        client.handler.dispatch_callback = lambda callback: callback.func(*callback.args)
        path = b"/senders/one-0000000001"
        notice = struct.pack(f"!iii{len(path)}s", DELETED_EVENT, 3, len(path), path)
        for bit in range(8 * len(notice)):
            damaged = bytearray(notice)
            damaged[bit // 8] ^= 1 << bit % 8
            client._child_watchers[path.decode()].add(session._watch(told.set))
            client._state = KeeperState.CONNECTED
            connection._read_header = lambda _, said=bytes(damaged): (ReplyHeader(WATCH_XID, 0, 0), said, 0)
            try:
                connection._read_socket(1)
            except ConnectionDropped:
                client._session_callback(KeeperState.CONNECTING)  # as kazoo's loop does
            await asyncio.sleep(0)
            assert told.is_set(), bit
            told.clear()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("ask", "error", "told"),
    [
        (lambda session: session.set("/a", b""), BadVersionError, Unreachable),
        (lambda session: session.set("/a", b"", 3), BadVersionError, BadVersion),
        (lambda session: session.set("/a", b"", 3), NodeExistsError, Unreachable),
        (lambda session: session.get("/a"), BadVersionError, Unreachable),
        (lambda session: session.get("/a"), NoNodeError, NoNode),
        (lambda session: session.create("/a"), NodeExistsError, NodeExists),
        (lambda session: session.delete("/a"), BadVersionError, Unreachable),
        (lambda session: session.delete("/a", 3), NotEmptyError, NotEmpty),
        (lambda session: session.get("/a"), SessionExpiredError, SessionExpired),
    ],
)
def test_what_zookeeper_never_says_to_that_was_damaged_on_its_way(
    ask: Any, error: type[Exception], told: type[Exception]
) -> None:
    """A member whose lease, and a reader whose election node, had another version by it, though none was named, ended by a defect of their own."""

    class Answer:
        exception = error()

        def rawlink(self, settle: Any) -> None:
            settle(self)

    async def scenario() -> None:
        session = ZooKeeperSession("127.0.0.1:1", 1)
        answers = dict.fromkeys(("get_async", "set_async", "create_async", "delete_async"), lambda *_, **__: Answer())
        session._client = SimpleNamespace(connected=True, **answers)
        session._loop = asyncio.get_running_loop()
        with pytest.raises(told):
            await ask(session)

    asyncio.run(scenario())
