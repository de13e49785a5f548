"""kazoo waits for its sockets, and passes on answers, as with its own handler."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

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
