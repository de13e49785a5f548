"""`seriatim produce` as a process, against the small cluster of the producer's tests."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from seriatim.cli import acknowledgements, exits, main, produce
from seriatim.protocol import errors
from seriatim.protocol import seriatim_pb2 as pb
from tests.integration.test_producer_client import SmallCluster, new
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

COMMAND = [sys.executable, "-m", "seriatim.cli.main", "produce", "--queue", "q", "--session-timeout-ms", "20000"]


@pytest.fixture
def cluster(zookeeper: str) -> Iterator[SmallCluster]:
    with SmallCluster(zookeeper) as small:
        yield small


def start(cluster: SmallCluster, *arguments: str, given: int | IO[str] = subprocess.DEVNULL) -> subprocess.Popen[str]:
    command = [*COMMAND, "--coordinator", cluster.address, *arguments]
    return subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stored(cluster: SmallCluster, process: subprocess.Popen[str], line: str) -> None:
    """Give it its first line, and wait until that is stored."""
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
    wait_until(lambda: cluster.end() == 1)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, said = process.communicate(timeout=100)
    return process.returncode, output, said


@pytest.mark.parametrize(
    ("number", "is_given"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_a_signal_while_it_stands_by_ends_it_and_a_file_that_was_not_read_is_no_success(
    cluster: SmallCluster, tmp_path: Path, number: int, is_given: bool
) -> None:
    """`is_given`: as standard input, `produce < lines`."""
    file = tmp_path / "lines"
    file.write_text("1\n2\n")
    with new(cluster) as other, file.open() as opened:
        other.wait_until_elected(60)
        process = start(cluster, "--json", given=opened) if is_given else start(cluster, str(file), "--json")
        assert process.stderr is not None
        assert any("standing by" in line for line in process.stderr)
        process.send_signal(number)
        code, output, said = ended(process)
    assert code == exits.REFUSED
    assert json.loads(output)["read"] == 0
    called = "standard input" if is_given else file
    assert f"Stopped before the end of {called}: line 1 and those behind it weren't sent" in said
    assert cluster.values() == []


def test_who_stops_it_amid_a_file_is_told_where_to_go_on(cluster: SmallCluster, tmp_path: Path) -> None:
    """It told how many lines were read: one more than were sent, which whoever went on behind them left out."""
    file = tmp_path / "lines"
    file.write_text("".join(f"{number}\n" for number in range(1, 2_000_001)))
    with start(cluster, str(file), "--json") as process:
        wait_until(lambda: cluster.end() > 0)
        process.send_signal(signal.SIGTERM)
        code, output, said = ended(process)
    assert code == exits.REFUSED
    found = re.search(f"Stopped before the end of {file}: line ([0-9]+) and those behind it weren't sent", said)
    assert found is not None, said
    assert cluster.values() == [str(number).encode() for number in range(1, int(found[1]))]
    assert json.loads(output)["acknowledged"] == int(found[1]) - 1


def test_nothing_is_written_over_what_somebody_types(cluster: SmallCluster) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, "--coordinator", cluster.address], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"a line\n")
    wait_until(lambda: cluster.end() == 1)
    os.write(ours, b"\x04")  # Ctrl-D
    assert process.wait(100) == 0
    seen = os.read(ours, 65536).decode().replace("\r", "")
    os.close(ours)
    # The waiting is told where it takes a second, as on a machine that is busy.
    said = r"(waiting to be elected: .*\n)?elected with token 1\n1 of 1 records acknowledged in .* s\n"
    assert re.fullmatch(rf"a line\n(\^D\x08\x08)?{said}", seen), seen


def test_a_file_that_was_read_to_its_end_is_a_success(cluster: SmallCluster, tmp_path: Path) -> None:
    file, log = tmp_path / "lines", tmp_path / "log"
    file.write_text("1\n2\n3")
    assert ended(start(cluster, str(file), "--ack-log", str(log)))[0] == exits.DONE
    assert cluster.values() == [b"1", b"2", b"3"]
    assert [line.split()[1:] for line in log.read_text().splitlines()] == [["1", str(at), str(at)] for at in range(3)]


def test_a_line_of_the_log_that_a_full_disk_has_cut_is_not_gone_on_with(cluster: SmallCluster, tmp_path: Path) -> None:
    file, log = tmp_path / "lines", tmp_path / "log"
    file.write_text("7\tv\n")
    log.write_text("5 1 4 4\n6")
    for places in (["1", "0", "0"], ["-", "-", "-"]):
        assert ended(start(cluster, str(file), "--name", "n", "--with-seq", "--ack-log", str(log)))[0] == exits.DONE
        assert log.read_text().splitlines()[-1].split() == ["7", *places]
    assert log.read_text().startswith("5 1 4 4\n6\n7 1 0 0\n7 ")


def test_a_separator_is_what_its_bytes_are(cluster: SmallCluster, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"k\xffv\nk\xc3\xbfw\n")
    process = start(cluster, str(file), "--key-separator", os.fsdecode(b"\xff"))
    assert ended(process)[0] == exits.DONE
    assert cluster.values() == [b"v", b"k\xc3\xbfw"]


def test_sending_goes_on_where_nobody_takes_what_it_says(cluster: SmallCluster) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "--coordinator", cluster.address]
    with os.fdopen(writing) as said:
        done = subprocess.run(command, input=b"1\n2\n", stderr=said, timeout=100, check=False)
    assert (done.returncode, cluster.values()) == (exits.DONE, [b"1", b"2"])


def test_coordinators_may_be_away_for_longer_than_at_the_start(cluster: SmallCluster) -> None:
    arguments = ("--name", "n", "--with-seq", "--connect-timeout", "0.5")
    with start(cluster, *arguments, given=subprocess.PIPE) as process:
        stored(cluster, process, "1\tv\n")
        cluster.token += 1
        cluster.reply_with += [errors.Fenced("another one was elected")]
        cluster.reply_with += [errors.Unreachable("it is being restarted")] * 10_000
        cluster.break_streams()
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("2\tw\n")
        process.stdin.flush()
        assert any("waiting to be elected: " in line and "it is being restarted" in line for line in process.stderr)
        cluster.loop.call_soon_threadsafe(cluster.reply_with.clear)
        assert ended(process)[0] == exits.DONE
    assert cluster.values() == [b"v", b"w"]


def test_and_also_where_it_has_stood_by_until_then(cluster: SmallCluster, tmp_path: Path) -> None:
    """It ended just where it was to take over: it had stood by for longer than a coordinator is looked for at the start."""
    file = tmp_path / "lines"
    file.write_text("v\n")
    with new(cluster) as other:
        other.wait_until_elected(60)
        process = start(cluster, str(file), "--connect-timeout", "0.5")
        assert process.stderr is not None
        assert any("standing by" in line for line in process.stderr)
        cluster.reply_with += [errors.Unreachable("it is being restarted")] * 10_000
    assert any("waiting to be elected: " in line and "it is being restarted" in line for line in process.stderr)
    cluster.loop.call_soon_threadsafe(cluster.reply_with.clear)
    assert ended(process)[0] == exits.DONE
    assert cluster.values() == [b"v"]


def test_why_it_ends_is_said_where_nobody_can_tell_what_was_stored(cluster: SmallCluster) -> None:
    cluster.silent_epochs = set(range(1, 1000))  # whatever it goes on with meanwhile
    with start(cluster, given=subprocess.PIPE) as process:
        stored(cluster, process, "1\n")
        cluster.token += 1
        cluster.break_streams()
        code, _, said = ended(process)
    assert code == exits.REFUSED
    assert "0 of 1 records acknowledged" in said
    assert "; 1 may have been stored or not: " in said
    assert "a newer sender was elected" in said


def test_records_that_were_not_acknowledged_are_no_success_where_nobody_reads_the_summary(
    cluster: SmallCluster,
) -> None:
    """Python writes at once where PYTHONUNBUFFERED is set, as in containers."""
    cluster.silent_epochs = set(range(1, 1000))  # whatever it goes on with meanwhile
    reading, writing = os.pipe()
    os.close(reading)
    command, unbuffered = (
        [*COMMAND, "--coordinator", cluster.address, "--json"],
        {**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    given = subprocess.PIPE
    with subprocess.Popen(command, stdin=given, stdout=writing, stderr=given, text=True, env=unbuffered) as process:
        os.close(writing)
        stored(cluster, process, "1\n")
        cluster.token += 1
        cluster.break_streams()
        assert ended(process)[0] == exits.REFUSED


def test_what_the_last_acknowledgements_wait_for_is_said_once(cluster: SmallCluster) -> None:
    reasons = [pb.WaitReason(what="g1", reason="it is at [fd00::1]:7000")]
    wait = pb.AcquireSendReply(wait=pb.Wait(retry_after_ms=50, reasons=reasons), token=1)
    process = start(cluster, given=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    stored(cluster, process, "1\n")
    cluster.silent_epochs = {1}
    cluster.reply_with += [wait] * 10_000
    process.stdin.write("2\n")
    process.stdin.close()
    said = "waiting: no group can take records (g1: it is at [fd00::1]:7000)\n"
    assert any(line == said for line in process.stderr)
    wait_until(lambda: len(cluster.reply_with) < 9_960)  # some seconds
    cluster.loop.call_soon_threadsafe(cluster.reply_with.clear)
    process.stdin = None
    code, _, rest = ended(process)
    assert (code, cluster.values()) == (exits.DONE, [b"1", b"2"])
    assert said not in rest


def test_what_was_read_before_a_disk_failed_is_sent(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def read(*_: int) -> Iterator[list[bytes]]:
        yield [b"1", b"2"]
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(produce, "chunks", read)
    arguments = ["produce", "--queue", "q", "--coordinator", cluster.address, "--session-timeout-ms", "20000", __file__]
    assert main.run(arguments) == exits.REFUSED
    assert cluster.values() == [b"1", b"2"]
    said = capfd.readouterr().err
    assert "2 of 2 records acknowledged" in said
    assert f"Error: can't read {__file__}: Input/output error" in said


def test_a_log_on_a_full_disk_ends_the_command_with_what_was_acknowledged(cluster: SmallCluster) -> None:
    with start(cluster, "--ack-log", "/dev/full", "--json", given=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write("1\n2\n")
        process.stdin.flush()  # and it isn't closed: the command ends by itself
        assert process.wait(100) == exits.REFUSED
        _, output, said = ended(process)
    assert json.loads(output)["acknowledged"] == 2
    assert "can't write /dev/full: No space left on device" in said
    assert "Traceback" not in said


def test_a_log_on_a_full_disk_and_a_deposal_end_the_command(cluster: SmallCluster) -> None:
    cluster.silent_epochs = set(range(1, 1000))  # whatever it goes on with meanwhile
    arguments = ("--ack-log", "/dev/full", "--name", "n", "--with-seq")
    with start(cluster, *arguments, given=subprocess.PIPE) as process:
        stored(cluster, process, "1\tv\n")
        cluster.silent_epochs = set()
        cluster.token += 1
        cluster.break_streams()  # deposed: the record's end is unknown, and in the next term it is found stored
        assert process.wait(100) == exits.REFUSED


def test_a_deposal_that_was_lived_through_is_no_failure(cluster: SmallCluster) -> None:
    cluster.silent_epochs = set(range(1, 1000))  # whatever it goes on with meanwhile
    with start(cluster, "--name", "n", "--with-seq", "--json", given=subprocess.PIPE) as process:
        stored(cluster, process, "1\tv\n")
        cluster.silent_epochs = set()
        cluster.token += 1
        cluster.break_streams()
        assert process.stdin is not None
        process.stdin.write("2\tw\n")
        process.stdin.flush()
        wait_until(lambda: len(cluster.values()) == 2)
        process.send_signal(signal.SIGTERM)
        code, output, said = ended(process)
    assert json.loads(output)["acknowledged"] == 2, said
    assert code == exits.DONE, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_the_last_acknowledgements_is_told_how_many_came(cluster: SmallCluster, number: int) -> None:
    """All members stand still: the second Ctrl-C ended it without a word, also of what `--json` prints."""
    with start(cluster, "--json", given=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        stored(cluster, process, "1\n")
        cluster.silent_epochs = set(range(1, 1000))  # whatever it goes on with meanwhile
        process.stdin.write("2\n3\n")
        process.stdin.flush()
        wait_until(lambda: cluster.end() >= 3)
        process.send_signal(number)
        assert any(line == "stopping: waiting up to 10 s for 2 records\n" for line in process.stderr)
        process.send_signal(number)
        code, output, _ = ended(process)
    assert code == exits.INTERRUPTED
    summary = json.loads(output)
    assert [summary[name] for name in ("read", "acknowledged", "unknown")] == [3, 1, 2]


def test_what_the_last_lines_wait_for_is_told(cluster: SmallCluster, tmp_path: Path) -> None:
    cluster.wrong_address = "127.0.0.1:1"
    file = tmp_path / "lines"
    file.write_text("1\n")
    with start(cluster, str(file)) as process:
        assert process.stderr is not None
        assert any("waiting: the master at 127.0.0.1:1 failed" in line for line in process.stderr)
        cluster.wrong_address = ""
        assert ended(process)[0] == exits.DONE


def test_what_the_next_line_waits_for_is_told_once(cluster: SmallCluster, tmp_path: Path) -> None:
    cluster.silent_epochs = set(range(1, 1000))  # whatever it goes on with meanwhile
    file = tmp_path / "lines"
    file.write_text(f"{'x' * 900}\n" * 40_000)  # more than waits in the buffer
    reasons = [pb.WaitReason(what="g1", reason="not there")]
    with start(cluster, str(file)) as process:
        wait_until(lambda: cluster.end() > 0)
        cluster.reply_with += [pb.AcquireSendReply(wait=pb.Wait(retry_after_ms=10, reasons=reasons), token=1)] * 10_000
        cluster.break_streams()
        said = "waiting: waited 0.5 s; no group can take records (g1: not there)\n"
        assert process.stderr is not None
        assert any(line == said for line in process.stderr)
        asked = len(cluster.acquired)
        wait_until(lambda: len(cluster.acquired) > asked + 100)
        cluster.loop.call_soon_threadsafe(cluster.reply_with.clear)
        cluster.silent_epochs = set()
        code, _, rest = ended(process)
    assert code == exits.DONE
    assert said not in rest


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        (("--ack-log", "/dev/null/log"), "v\n", "can't write /dev/null/log: Not a directory"),
        (("--name", "n", "--with-seq"), "1" * 5000 + "\tv\n", "line 1: it has to start with its seq"),
        ((), None, "standard input is closed"),
        (("--name", "n", "--with-seq"), "3\tv\n3\tw\n", "line 2: seq 3 of source 'n' comes after 3"),
        ((), "v\n" + "w" * (1 << 20) + "x\n", "line 2: a record of 1048577 bytes is over the limit"),
    ],
    ids=["log in no folder", "a seq of many digits", "no standard input", "a seq twice", "a long line"],
)
def test_wrong_use_is_told_without_a_trace(
    cluster: SmallCluster, arguments: tuple[str, ...], given: str | None, said: str
) -> None:
    command = [*COMMAND, "--coordinator", cluster.address, *arguments]
    if given is None:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == exits.WRONG_USE, done.stderr
    assert said in done.stderr
    assert "0 of 0 records" not in done.stderr
    assert "Traceback" not in done.stderr


def test_more_than_may_wait_to_be_followed_is_sent_and_logged_in_order(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acknowledgements, "PART_BYTES", 10_000)
    assert threading.current_thread() is threading.main_thread()
    file, log = tmp_path / "lines", tmp_path / "log"
    file.write_text("".join(f"{number}\n" for number in range(2000)))
    arguments = ["produce", "--queue", "q", "--coordinator", cluster.address, "--ack-log", str(log), str(file)]
    assert main.run(arguments) == exits.DONE
    assert cluster.values() == [b"%d" % number for number in range(2000)]
    assert [line.split()[3] for line in log.read_text().splitlines()] == [str(number) for number in range(2000)]
