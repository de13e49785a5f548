"""The form of a line of the log, ours and a library's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim.protocol import log

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A process starts its logging once; these tests share theirs with others."""
    root = logging.getLogger()
    chatty = {name: logging.getLogger(name).level for name in ("kazoo", "py4j")}
    level, handlers = root.level, list(root.handlers)
    root.handlers.clear()  # pytest's own would be closed
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    for name, before in chatty.items():
        logging.getLogger(name).setLevel(before)


def test_an_event_of_ours_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    log.start_logging(to="stdout")
    log.logger("coordinator").info("link sealed", queue="orders", end=12, reason="it is over", group=None)
    assert re.fullmatch(
        STAMP + " INFO coordinator link sealed queue=orders end=12 reason='it is over'\n", capsys.readouterr().out
    )


def test_a_line_that_finds_no_room_makes_no_trace_elsewhere_but_a_defect_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose log's disk is full wrote some forty lines to standard error for each one."""
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        log.start_logging(to="stdout")
        log.logger("coordinator").info("link sealed", queue="orders")
        monkeypatch.undo()
    assert capsys.readouterr().err == ""
    log.start_logging()
    logging.getLogger("kazoo").warning("%d", "no number")
    assert "TypeError" in capsys.readouterr().err


def test_what_a_caller_says_makes_no_line_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    log.start_logging(to="stdout")
    log.logger("coordinator").info("granted", queue="orders\r", cause_id="\x1b[2J", failure="\u2028", what="ordené")
    line = capsys.readouterr().out
    assert line.endswith(r" granted queue='orders\r' cause_id='\x1b[2J' failure='\u2028' what=ordené" + "\n")


def test_what_a_caller_says_fills_no_log_and_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """A coordinator remembers ten thousand failures that senders tell it, each of which may be a message long, which is 64 MB."""
    log.start_logging(to="stdout")
    coordinator = log.logger("coordinator")
    coordinator.lasting("link reported as failed", failure="x" * 1_000_000, cause_id="y" * 1_000_000)
    assert len(capsys.readouterr().out) < 3 * log.MOST_CHARACTERS
    assert sum(map(len, coordinator._told_at_s)) < 2 * log.MOST_CHARACTERS


def test_what_lasts_is_told_once_a_minute_whatever_caused_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that waits asks nine times a second: over night that took the place of what had led to it in a log of 60 MB."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    log.start_logging(to="stdout")
    coordinator = log.logger("coordinator")
    for at_s, reason in [(1000.0, "x"), (1001.0, "x"), (1002.0, "y"), (1003.0, "x"), (1061.0, "x"), (1061.5, "y")]:
        now_s = at_s
        coordinator.lasting("reading waits", queue="orders", reason=reason, cause_id=f"read-{at_s}")
    told = [line.split(" reading waits ")[1] for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "queue=orders reason=x cause_id=read-1000.0",
        "queue=orders reason=y cause_id=read-1002.0",
        "queue=orders reason=x cause_id=read-1061.0",
    ]


def test_what_a_library_says_is_the_value_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    log.start_logging()
    logging.getLogger("kazoo.client").warning("AUTH_FAILED closing: %s", "refused")
    assert re.fullmatch(
        STAMP + " WARNING kazoo.client says message='AUTH_FAILED closing: refused'\n", capsys.readouterr().err
    )


def test_a_search_for_zookeeper_is_told_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(log._search, "_told_at_s", {})
    log.start_logging()
    kazoo = logging.getLogger("kazoo.client")

    def tried() -> list[str]:
        kazoo.warning("Connection dropped: %s", "socket connection error: Connection refused")
        kazoo.warning("Transition to CONNECTING")
        return capsys.readouterr().err.splitlines()

    told = [tried(), tried()]
    kazoo.warning("Cannot resolve %s: %s", "zk1", "no such name")
    told.append(capsys.readouterr().err.splitlines())
    now_s += log.AGAIN_S
    told.append(tried())
    searched = " WARNING zookeeper it can't be reached, and is tried again reason="
    refused = f"{searched}'socket connection error: Connection refused'"
    wanted = [refused, None, f"{searched}'Cannot resolve zk1: no such name'", refused]
    assert [len(lines) for lines in told] == [1, 0, 1, 1]
    for lines, line in zip(told, wanted, strict=True):
        assert line is None or re.fullmatch(STAMP + re.escape(line), lines[0])


def test_that_nobody_can_connect_any_more_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member without descriptors: asyncio tries a hundred times each second."""
    monkeypatch.setattr(log._no_more, "_told_at_s", {})
    log.start_logging()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as caller:
            caller.setblocking(False)
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            try:
                await loop.sock_connect(caller, server.sockets[0].getsockname())
                for _ in range(1000):
                    if told := capsys.readouterr().err:
                        break
                    await asyncio.sleep(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server.close()
        assert re.fullmatch(STAMP + " ERROR direct nobody can connect now reason='Too many open files'\n", told)

    asyncio.run(main())


def test_exceptions_on_their_way_through_java_are_not_told_twice(capsys: pytest.CaptureFixture[str]) -> None:
    log.start_logging()
    logging.getLogger("py4j.clientserver").warning("There was an exception while executing the Python Proxy")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_caller_that_has_gone_is_no_error(capsys: pytest.CaptureFixture[str], level: str) -> None:
    """As gRPC says it of a broker that stood still while whoever asked it gave up."""
    log.start_logging(level)
    library = logging.getLogger("grpc._cython.cygrpc")
    said = "ExecuteBatchError raised in core by servicer method [/seriatim.v1.Broker/CommitCursor]"
    library.error(said, exc_info=OSError("Failed"))
    library.error("Unexpected [OSError] raised by servicer method [/a/B]", exc_info=OSError("Failed"))
    brief, *rest = capsys.readouterr().err.splitlines()
    if level == "INFO":
        assert re.fullmatch(STAMP + f" INFO grpc._cython.cygrpc says message='{re.escape(said)}'", brief)
        brief, *rest = rest
    assert "ERROR grpc._cython.cygrpc says message='Unexpected" in brief
    assert rest[-1] == "OSError: Failed"
