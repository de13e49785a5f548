"""`seriatim consume` and `seriatim subscription` as processes, against the small fakes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from seriatim.cli.consume import _json
from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper
from seriatim.consumer import Consumer
from seriatim.protocol.names import Epoch, Index, Offset
from seriatim.protocol.record import Record
from tests.integration.consumer_fakes import FakeCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

COMMAND = [sys.executable, "-m", "seriatim.cli.main"]
ENVIRONMENT = os.environ | {"SERIATIM_SESSION_TIMEOUT_MS": "20000"}
"""Who is elected stays it where the machine stands still: what was printed isn't printed again."""


@pytest.fixture
def cluster(zookeeper_server: EmbeddedZooKeeper, cluster_name: str) -> Iterator[FakeCluster]:
    with FakeCluster(zookeeper_server.address, cluster_name) as made:
        made.append([b"%d" % number for number in range(10)], 0)
        made.switch()
        made.append([b"%d" % number for number in range(8, 20)], 8)
        yield made


def run(cluster: FakeCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments, "--coordinator", cluster.coordinator]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=ENVIRONMENT)


def start(cluster: FakeCluster, *arguments: str) -> subprocess.Popen[str]:
    """The command, which hears of a terminal that is closed also where these tests run under nohup."""
    command = ["env", "--default-signal=HUP", *COMMAND, "consume", "--queue", "q", *arguments]
    command += ["--coordinator", cluster.coordinator]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def test_prints_goes_on_where_it_was_and_moves_when_told(cluster: FakeCluster) -> None:
    first = run(cluster, "consume", "--queue", "q", "--max", "5")
    assert (first.returncode, first.stdout.split()) == (0, ["0", "1", "2", "3", "4"]), first.stderr
    assert "moved" not in first.stderr
    assert cluster.cursor_offset("default") == 5
    rest = run(cluster, "consume", "--queue", "q", "--max", "15")
    assert (rest.returncode, rest.stdout.split()) == (0, [str(number) for number in range(5, 20)]), rest.stderr
    idle = run(cluster, "consume", "--queue", "q", "--idle-exit", "0.5")
    assert (idle.returncode, idle.stdout) == (0, ""), idle.stderr
    again = run(cluster, "consume", "--queue", "q", "--from", "3", "--max", "1", "--json", "--no-commit")
    assert json.loads(again.stdout) == {
        "queue": "q",
        "offset": 3,
        "epoch": 1,
        "index": 3,
        "source": "s",
        "seq": 3,
        "key": None,
        "value": "3",
        "timestamp": 1,
        "headers": [],
    }
    assert cluster.cursor_offset("default") == 3
    assert "moved default to 3: cursor unknown, reader none" in again.stderr


def test_to_stop_before_records_that_can_t_be_read_now_is_no_success(cluster: FakeCluster) -> None:
    for member in "ab":
        cluster.kill_member(member)
    idle = run(cluster, "consume", "--queue", "q", "--idle-exit", "0.5")
    assert (idle.returncode, idle.stdout) == (3, "")
    assert "waiting for g1-a or g1-b: neither is registered" in idle.stderr


def test_silence_of_who_tells_of_the_next_link_is_no_end(cluster: FakeCluster) -> None:
    """A coordinator that stood still while the queue was rotated: all behind the rotation was unread, and its exit code 0."""
    process = start(cluster, "--idle-exit", "1")
    assert process.stdout is not None
    first = [process.stdout.readline().strip() for _ in range(20)]
    cluster.is_watch_still = True
    cluster.switch()
    cluster.append([b"%d" % number for number in range(20, 30)], 20)
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, [*first, *output.split()]) == (0, [str(number) for number in range(30)]), errors


def test_where_nobody_tells_the_end_it_is_no_success(cluster: FakeCluster) -> None:
    """With both members of a link standing still for two seconds a thirteenth of its records was read, and the exit code 0."""
    cluster.is_end_told = False
    ended = run(cluster, "consume", "--queue", "q", "--idle-exit", "0.5", "--connect-timeout", "5")
    assert (ended.returncode, len(ended.stdout.split())) == (3, 20)
    assert "nothing came for 5.5 s, and there may be more" in ended.stderr
    assert "waiting for more records, or to be told where the queue ends" in ended.stderr


def test_bytes_that_are_no_text_are_in_base64(cluster: FakeCluster) -> None:
    cluster.append([b"\xff\x00"], 20)
    found = run(cluster, "consume", "--queue", "q", "--max", "21", "--json").stdout.splitlines()
    assert json.loads(found[-1])["value_base64"] == "/wA="
    assert "value" not in json.loads(found[-1])


def test_headers_are_shown_in_their_order_each_as_text_or_in_base64() -> None:
    headers = (("trace", b"7"), ("raw", b"\xff\x00"), ("trace", b"8"))
    shown = json.loads(_json([Record("q", Offset(1), Epoch(1), Index(1), "s", 1, None, b"v", headers, 1)]))
    assert shown["headers"] == [
        {"name": "trace", "value": "7"},
        {"name": "raw", "value_base64": "/wA="},
        {"name": "trace", "value": "8"},
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_commits_what_was_printed(cluster: FakeCluster, number: int) -> None:
    process = start(cluster)
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(20)] == [str(number) for number in range(20)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert cluster.cursor_offset("default") == 22


def test_a_signal_in_the_midst_of_a_write_loses_nothing(cluster: FakeCluster) -> None:
    """PYTHONUNBUFFERED is set in containers: what Python writes then is done in part where a signal comes, and it goes on."""
    values = [b"%01000d" % number for number in range(300)]
    cluster.append(values, 20)
    reading, writing = os.pipe()
    command = [*COMMAND, "consume", "--queue", "q", "--coordinator", cluster.coordinator]
    process = subprocess.Popen(command, stdout=writing, env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"})
    os.close(writing)
    try:
        wait_until(lambda: _unread_bytes(reading) > 50_000)  # some of the 300,000, for which a pipe has no room
    finally:
        process.terminate()
    with os.fdopen(reading, "rb") as output:
        assert output.read().split() == [*(b"%d" % number for number in range(20)), *values]
    assert process.wait(100) == 0
    assert cluster.cursor_offset("default") == 322


def _unread_bytes(pipe: int) -> int:
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


@pytest.mark.parametrize("following", [[b"x", b"y"], []], ids=["more", "quiet"])
def test_nobody_reads_the_output_any_more(cluster: FakeCluster, following: list[bytes]) -> None:
    """On a quiet queue nothing is written that would tell: it hung, elected, before all others."""
    process = start(cluster)
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    for seq, value in enumerate(following, 20):
        cluster.append([value], seq)
    assert process.wait(100) == 0
    assert process.stderr is not None
    assert "Error" not in process.stderr.read()
    process.stderr.close()


def test_a_standby_says_so(cluster: FakeCluster) -> None:
    with Consumer(cluster.coordinator, "q", session_timeout_s=20) as elected:
        assert elected.poll(1, 60.0)
        process = start(cluster)
        assert process.stderr is not None
        assert any(line.startswith("standing by: another reader is elected") for line in process.stderr)
        process.terminate()
        output, _ = process.communicate(timeout=100)
        assert (process.returncode, output) == (0, "")


def test_what_is_wrong_has_its_exit_code(cluster: FakeCluster) -> None:
    assert run(cluster, "consume", "--queue", "nothing").returncode == 2
    assert run(cluster, "consume", "--queue", "q", "--from", "yesterday").returncode == 2
    command = [*COMMAND, "subscription", "list", "--queue", "q", "--coordinator", "127.0.0.1:1"]
    gone = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert gone.returncode == 3
    assert "127.0.0.1:1" in gone.stderr


def test_subscriptions_are_made_listed_and_moved(cluster: FakeCluster) -> None:
    made = run(cluster, "subscription", "create", "s1", "--queue", "q", "--json")
    assert json.loads(made.stdout)["subscription"] == "s1"
    assert run(cluster, "subscription", "create", "s1", "--queue", "q").returncode == 2
    moved = run(cluster, "subscription", "seek", "s1", "--queue", "q", "--to", "12", "--json")
    assert json.loads(moved.stdout)["consume_list"] == [2]
    assert cluster.cursor_offset("s1") == 12
    listed = run(cluster, "subscription", "list", "--queue", "q", "--json")
    assert [json.loads(line)["subscription"] for line in listed.stdout.splitlines()] == ["s1"]
