"""The form of a line of the log, ours and a library's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from _pytest.capture import CaptureResult

from seriatim.protocol import log, standard_streams
from tests.forks import in_a_fork

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
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    for name, before in chatty.items():
        logging.getLogger(name).setLevel(before)


def told_in(capfd: pytest.CaptureFixture[str]) -> CaptureResult[str]:
    log.flush()
    return capfd.readouterr()


@contextlib.contextmanager
def logged_to_a_pipe() -> Iterator[TextIO]:
    """Its end, from which the log is taken."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as taken, os.fdopen(writing, "w", errors="backslashreplace") as stream:
        with contextlib.redirect_stderr(stream):
            log.start_logging()
        yield taken
        log.flush()


def test_an_event_of_ours_has_its_keys(capfd: pytest.CaptureFixture[str]) -> None:
    log.start_logging(to="stdout")
    log.logger("coordinator").info("link sealed", queue="orders", end=12, reason="it is over", group=None)
    assert re.fullmatch(
        STAMP + " INFO coordinator link sealed queue=orders end=12 reason='it is over'\n", told_in(capfd).out
    )


def test_a_line_that_finds_no_room_makes_no_trace_elsewhere_but_a_defect_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose log's disk is full wrote some forty lines to standard error for each one."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        log.start_logging(to="stdout")
        log.logger("coordinator").info("link sealed", queue="orders")
        log.flush()
        monkeypatch.undo()
    assert told_in(capfd).err == ""
    log.start_logging()
    logging.getLogger("kazoo").warning("%d", "no number")
    assert "TypeError" in told_in(capfd).err


@pytest.mark.timeout(60)
def test_nobody_waits_for_who_takes_the_log_and_what_found_no_room_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody read from had an event loop stand still, and threads went on for it: it counted as there for ever."""
    monkeypatch.setattr(standard_streams, "LINES", 5)
    monkeypatch.setattr(standard_streams, "FLUSH_S", 0.1)
    coordinator, long = log.logger("coordinator"), "x" * log.MOST_CHARACTERS
    with logged_to_a_pipe() as taken:
        for number in range(20):  # more than a pipe holds
            coordinator.info("granted", number=number, why=long)
        log.flush()
        numbers: list[int] = []
        dropped = 0
        while len(numbers) + dropped < 20:
            line = taken.readline()
            if found := re.search(r" WARNING log lines were dropped, nobody took them count=(\d+)", line):
                dropped += int(found[1])
            else:
                numbers += [int(number) for number in re.findall(r" number=(\d+)", line)]
    assert numbers == sorted(set(numbers))
    assert dropped > 0
    assert len(numbers) + dropped == 20


@pytest.mark.timeout(60)
def test_who_makes_the_pipe_non_blocking_loses_no_line() -> None:
    """What didn't fit at once was thrown away, uncounted: a description is one for all who share it."""
    with logged_to_a_pipe() as taken:
        os.set_blocking(logging.getLogger().handlers[0]._writer._stream.fileno(), False)
        coordinator, long = log.logger("coordinator"), "x" * log.MOST_CHARACTERS
        for number in range(20):  # more than a pipe holds
            coordinator.info("granted", why=long, number=number)
        assert [int(taken.readline().rpartition("=")[2]) for _ in range(20)] == list(range(20))


FULL = """
import resource, sys
from seriatim.protocol import log
log.start_logging()
broker, limits = log.logger("broker"), resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_005, limits[1]))  # as a file system that has so much room
for number in range(4000):
    broker.info("full", number=number)
log.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
broker.info("room", number=4000)
"""


def test_what_finds_no_room_on_a_disk_is_counted_and_cuts_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab") as file:
        subprocess.run((sys.executable, "-c", FULL), stderr=file, check=True, timeout=60)
    lines = path.read_text().splitlines()
    whole = [line for line in lines if re.fullmatch(STAMP + r" INFO broker (full|room) number=\d{1,4}", line)]
    told = re.fullmatch(STAMP + r" WARNING log lines were dropped, nobody took them count=(\d+)", lines[-2])
    assert told
    assert lines[-1].endswith(" room number=4000")
    assert len(whole) > 1000
    # Of the line that was cut so much may be there that it looks whole.
    assert len(whole) + int(told[1]) - 4001 in (0, 1)
    assert len(lines) - len(whole) in (1, 2)


def test_a_lack_of_memory_ends_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    write, lacks = os.write, [True]

    def lacking(descriptor: int, data: memoryview | bytes) -> int:
        if lacks and descriptor == logging.getLogger().handlers[0]._writer._stream.fileno():
            raise MemoryError
        return write(descriptor, data)

    with logged_to_a_pipe() as taken:
        monkeypatch.setattr(os, "write", lacking)
        for number in range(3):
            log.logger("coordinator").info("granted", number=number)
        log.flush()
        lacks.clear()
        log.logger("coordinator").info("granted", number=3)
        assert taken.readline().endswith(" lines were dropped, nobody took them count=3\n")
        assert taken.readline().endswith(" granted number=3\n")


def test_who_was_forked_logs_too() -> None:
    def say(what: str) -> None:
        log.logger("producer").info(what)
        log.flush()

    with logged_to_a_pipe() as taken:
        say("before")
        assert in_a_fork(lambda: say("forked")) == ["returned"]
        say("after")
        assert [taken.readline().split()[-1] for _ in range(3)] == ["before", "forked", "after"]


SAID = (
    "from seriatim.protocol import log\nlog.start_logging()\nfor _ in range(2000): log.logger('broker').info('{}')\n{}"
)


LOGS_IN_A_FINALIZER = """
import sys, threading
from seriatim.protocol import log

told = log.logger("test")
before, moments = getattr(*eval(sys.argv[1])), []

def meanwhile(*arguments):  # the collector may run here, and with it a finalizer that logs
    thread = arguments[0] if arguments else threading.current_thread()
    if thread.name == "seriatim-log" and not moments and (at_the_start or has_begun):
        moments.append(1)
        told.error("from a finalizer")
    return before(*arguments)

at_the_start, has_begun = sys.argv[2] == "start", False
setattr(*eval(sys.argv[1]), meanwhile)
log.start_logging()
told.info("first")
log.flush()
has_begun = True
told.info("second")
log.flush()
log.flush()
assert moments
"""


@pytest.mark.parametrize(
    ("place", "moment"), [("threading.Thread, '_set_native_id'", "start"), ("threading, '_allocate_lock'", "wait")]
)
def test_a_finalizer_may_log_on_the_log_s_own_thread(place: str, moment: str) -> None:
    """As it begins, when whoever started it waits for it; and between its look for lines and its wait, when nobody wakes it."""
    command = [sys.executable, "-c", LOGS_IN_A_FINALIZER, place, moment]
    ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "from a finalizer" in ended.stderr
    assert ended.stderr.count("second") == 1


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_what_was_logged_is_written_before_the_end(end: str) -> None:
    command = (sys.executable, "-c", SAID.format("said", end))
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.stderr.count(" INFO broker said\n") == 2000


def test_an_end_waits_for_nobody_who_takes_no_log() -> None:
    with subprocess.Popen((sys.executable, "-c", SAID.format("x" * 100, "")), stderr=subprocess.PIPE) as untaken:
        assert untaken.wait(60) == 0


PRINTS_AND_LOGS = """
import sys, threading
from types import SimpleNamespace
from seriatim.cli import consume
from seriatim.cli.main import _prepare_streams
from seriatim.protocol import log
_prepare_streams()
log.start_logging(to=sys.argv[1])
records, ended = [SimpleNamespace(value=b"r" * 200)] * 10_000, threading.Event()
def tell():
    while not ended.wait(0.001):
        log.logger("consumer").info("told", why="y" * 60)
telling = threading.Thread(target=tell)
telling.start()
reader = SimpleNamespace(poll=lambda most, _: records[:most])
waiting = SimpleNamespace(ended=lambda: None)
consume._print(reader, consume._plain, SimpleNamespace(is_asked=False), 50_000, waiting)
ended.set()
telling.join()
"""


@pytest.mark.parametrize("to", ["stdout", "stderr"])
def test_no_line_of_the_log_comes_into_the_midst_of_a_record(to: str) -> None:
    """A pipe takes megabytes in parts, and the log is written by a thread of its own."""
    command = (sys.executable, "-c", PRINTS_AND_LOGS, to)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    told = [line for line in lines if re.fullmatch(STAMP + " INFO consumer told why=y{60}", line)]
    assert told
    assert lines.count("r" * 200) == 50_000
    assert len(told) == len(lines) - 50_000


def test_what_a_caller_says_makes_no_line_and_moves_no_cursor(capfd: pytest.CaptureFixture[str]) -> None:
    log.start_logging(to="stdout")
    log.logger("coordinator").info("granted", queue="orders\r", cause_id="\x1b[2J", failure="\u2028", what="ordené")
    line = told_in(capfd).out
    assert line.endswith(r" granted queue='orders\r' cause_id='\x1b[2J' failure='\u2028' what=ordené" + "\n")


def test_what_a_caller_says_fills_no_log_and_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """A coordinator remembers ten thousand failures that senders tell it, each of which may be a message long, which is 64 MB."""
    log.start_logging(to="stdout")
    coordinator = log.logger("coordinator")
    coordinator.lasting("link reported as failed", failure="x" * 1_000_000, cause_id="y" * 1_000_000)
    assert len(told_in(capfd).out) < 3 * log.MOST_CHARACTERS
    assert sum(map(len, coordinator._told_at_s)) < 2 * log.MOST_CHARACTERS


def test_what_lasts_is_told_once_a_minute_whatever_caused_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that waits asks nine times a second: over night that took the place of what had led to it in a log of 60 MB."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    log.start_logging(to="stdout")
    coordinator = log.logger("coordinator")
    for at_s, reason in [(1000.0, "x"), (1001.0, "x"), (1002.0, "y"), (1003.0, "x"), (1061.0, "x"), (1061.5, "y")]:
        now_s = at_s
        coordinator.lasting("reading waits", queue="orders", reason=reason, cause_id=f"read-{at_s}")
    told = [line.split(" reading waits ")[1] for line in told_in(capfd).out.splitlines()]
    assert told == [
        "queue=orders reason=x cause_id=read-1000.0",
        "queue=orders reason=y cause_id=read-1002.0",
        "queue=orders reason=x cause_id=read-1061.0",
    ]


def test_what_a_library_says_is_the_value_of_a_key(capfd: pytest.CaptureFixture[str]) -> None:
    log.start_logging()
    logging.getLogger("kazoo.client").warning("AUTH_FAILED closing: %s", "refused")
    assert re.fullmatch(
        STAMP + " WARNING kazoo.client says message='AUTH_FAILED closing: refused'\n", told_in(capfd).err
    )


def test_a_search_for_zookeeper_is_told_once_a_minute(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(log._search, "_told_at_s", {})
    log.start_logging()
    kazoo = logging.getLogger("kazoo.client")

    def tried() -> list[str]:
        kazoo.warning("Connection dropped: %s", "socket connection error: Connection refused")
        kazoo.warning("Transition to CONNECTING")
        return told_in(capfd).err.splitlines()

    told = [tried(), tried()]
    kazoo.warning("Cannot resolve %s: %s", "zk1", "no such name")
    told.append(told_in(capfd).err.splitlines())
    now_s += log.AGAIN_S
    told.append(tried())
    searched = " WARNING zookeeper it can't be reached, and is tried again reason="
    refused = f"{searched}'socket connection error: Connection refused'"
    wanted = [refused, None, f"{searched}'Cannot resolve zk1: no such name'", refused]
    assert [len(lines) for lines in told] == [1, 0, 1, 1]
    for lines, line in zip(told, wanted, strict=True):
        assert line is None or re.fullmatch(STAMP + re.escape(line), lines[0])


def test_a_search_for_servers_that_are_ever_others_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names lead to an address that is new each day, as a container's."""
    told_at_s: dict[str, float] = {}
    monkeypatch.setattr(log, "_REMEMBERED", 3)
    monkeypatch.setattr(log._search, "_told_at_s", told_at_s)
    for number in range(10):
        said = f"Cannot resolve zk{number}: no such name"
        assert log._search.filter(logging.LogRecord("kazoo.client", logging.WARNING, "", 0, said, (), None))
        assert len(told_at_s) <= 3


def test_that_nobody_can_connect_any_more_is_told_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
                    if told := told_in(capfd).err:
                        break
                    await asyncio.sleep(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server.close()
        assert re.fullmatch(STAMP + " ERROR direct nobody can connect now reason='Too many open files'\n", told)

    asyncio.run(main())


def test_exceptions_on_their_way_through_java_are_not_told_twice(capfd: pytest.CaptureFixture[str]) -> None:
    log.start_logging()
    logging.getLogger("py4j.clientserver").warning("There was an exception while executing the Python Proxy")
    assert not told_in(capfd).err


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_caller_that_has_gone_is_no_error(capfd: pytest.CaptureFixture[str], level: str) -> None:
    """As gRPC says it of a broker that stood still while whoever asked it gave up."""
    log.start_logging(level)
    library = logging.getLogger("grpc._cython.cygrpc")
    said = "ExecuteBatchError raised in core by servicer method [/seriatim.v1.Broker/CommitCursor]"
    library.error(said, exc_info=OSError("Failed"))
    library.error("Unexpected [OSError] raised by servicer method [/a/B]", exc_info=OSError("Failed"))
    brief, *rest = told_in(capfd).err.splitlines()
    if level == "INFO":
        assert re.fullmatch(STAMP + f" INFO grpc._cython.cygrpc says message='{re.escape(said)}'", brief)
        brief, *rest = rest
    assert "ERROR grpc._cython.cygrpc says message='Unexpected" in brief
    assert rest[-1] == "OSError: Failed"
