from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import itertools
import json
import logging
import os
import pty
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from seriatim.cli import broker as broker_module
from seriatim.cli import capture as capture_module
from seriatim.cli import consume as consume_module
from seriatim.cli import coordinators, exits, foreground, main, pipes, views
from seriatim.cli import produce as produce_module
from seriatim.cli import queue as queue_module
from seriatim.cli import replay as replay_module
from seriatim.cli import status as status_module
from seriatim.cli.options import Duration, Names, duration_text
from seriatim.cli.pipes import is_output_read
from seriatim.cli.status import on_screen, with_members_knowledge
from seriatim.consumer.spark import progress
from seriatim.consumer.spark.targets.errors import Diverged
from seriatim.coordinator.process import CoordinatorProcess
from seriatim.producer.sources.lines import chunks
from seriatim.protocol import log, standard_streams
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.coordinators import CALL_TIMEOUT_S
from seriatim.protocol.errors import (
    BugError,
    DeadlineOver,
    Fenced,
    NotElected,
    OlderGeneration,
    UnknownGroup,
    UnknownQueue,
    Unreachable,
    Waiting,
    WorldError,
)

BROKER = ("broker", *["--zookeeper", "z:1", "--cluster", "c", "--group", "g1", "--member", "a", "--dir", "/dev/null/x"])
NOBODY = ("--coordinator", "127.0.0.1:1")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.delenv("SERIATIM_COORDINATOR", raising=False)


@pytest.fixture
def asked(monkeypatch):
    """Replaces the calls to coordinators: `asked.replies` by method (a list: in turn), `asked.calls` what was called."""
    found = SimpleNamespace(calls=[], replies={})

    def call(addresses, method, request, timeout_s=0.0):
        found.calls.append((method, type(request).FromString(request.SerializeToString())))
        reply = found.replies[method]
        if isinstance(reply, list):
            reply = reply.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(coordinators, "call", call)
    return found


@pytest.fixture
def terminal(monkeypatch):
    """Somebody can be asked."""
    monkeypatch.setattr(queue_module, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))


def invoke(*arguments, answer=""):
    return CliRunner().invoke(main.seriatim, [*arguments, *NOBODY], input=answer, standalone_mode=False)


# ---------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("500ms", 500), ("90s", 90_000), ("30m", 1_800_000), ("24h", 86_400_000), ("7d", 604_800_000), ("1 h", 3_600_000)],
)
def test_durations_are_read_and_written(text, duration_ms):
    assert Duration().convert(text, None, None) == duration_ms
    assert Duration().convert(duration_text(duration_ms), None, None) == duration_ms


@pytest.mark.parametrize("text", ["", "5", "0s", "-1s", "5x", "1.5h", "h", "²s", f"{'1' * 5000}s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(click.BadParameter, match="not a duration"):
        Duration().convert(text, None, None)


def test_names_keep_their_order_and_are_given_once():
    assert Names().convert("g2, g1", None, None) == ("g2", "g1")
    for text in ("", "g1,", "g1,g1"):
        with pytest.raises(click.BadParameter):
            Names().convert(text, None, None)


# ------------------------------------------------------------------------------------------------ the command's frame


def commands():
    """Every command and subcommand, with its words."""
    context = click.Context(main.seriatim)
    for name in main.seriatim.list_commands(context):
        command = main.seriatim.get_command(context, name)
        yield (name,), command
        if isinstance(command, click.Group):
            for sub, subcommand in command.commands.items():
                yield (name, sub), subcommand


def test_every_command_has_help_and_every_option_a_variable():
    for words, command in commands():
        assert command.help, words
        assert "\\b" not in command.help, words
        for option in command.params:
            if isinstance(option, click.Option) and any(name.startswith("--") for name in option.opts):
                assert bool(option.envvar) is option.allow_from_autoenv, (words, option.opts)
                assert option.allow_from_autoenv or words == ("queue", "alter"), "what would change things unasked"
                assert option.help, (words, option.opts)


@pytest.mark.parametrize("family", ["queue", "group", "status", "bench", "capture"])
def test_help_shows_an_example_that_the_command_understands(family):
    for words, command in commands():
        if words[0] != family:
            continue
        examples = [line.strip() for line in command.help.splitlines() if line.strip().startswith("seriatim ")]
        assert examples, words
        for example in examples:
            arguments = example.split("#")[0].split()[1:]
            arguments = [str(__file__) if argument == "DIR/pids.json" else argument for argument in arguments]
            # Parsed, not run.
            context = click.Context(main.seriatim)
            while arguments:
                command_found = context.command
                if not isinstance(command_found, click.Group):
                    break
                child = command_found.get_command(context, arguments[0])
                assert child is not None, example
                arguments = arguments[1:]
                context = click.Context(child, parent=context, info_name=child.name)
            context.command.parse_args(context, [*arguments, *NOBODY])


def test_every_command_that_prints_data_takes_json():
    no_data = {"coordinator", "broker"}
    for words, command in commands():
        if not isinstance(command, click.Group) and words[0] not in no_data:
            assert any("--json" in option.opts for option in command.params), words


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownQueue("x"), exits.WRONG_USE),
        (Unreachable("x"), exits.REFUSED),
        (Waiting("x"), exits.REFUSED),
        (BugError("x"), exits.DEFECT),
        (click.UsageError("x"), exits.WRONG_USE),
        (click.ClickException("x"), exits.REFUSED),
        (KeyboardInterrupt(), exits.INTERRUPTED),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), exits.REFUSED),
        (OSError("x"), exits.DEFECT),
        (ValueError("x"), exits.DEFECT),
    ],
)
def test_what_an_error_means_for_the_exit_code(error, code):
    assert exits.exit_code(error) == code


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["queue", "list"], 2, "SERIATIM_COORDINATOR"),
        (["queue", "list", "--coordinator", "here"], 2, "HOST:PORT"),
        (["queue", "list", "--coordinator", "127.0.0.1:²"], 2, "HOST:PORT"),
        (["queue", "list", "--coordinator", f"127.0.0.1:{'1' * 5000}"], 2, "HOST:PORT"),
        (["queue", "list", *NOBODY], 3, "no coordinator answers at 127.0.0.1:1: Connection refused"),
        (["status", "orders", *NOBODY], 3, "no coordinator answers"),
        (["bench", "latency", "--queue", "q", *NOBODY], 3, "no coordinator answers"),
        (["queue", "create", "q", "--groups", "g1", *NOBODY], 2, "two groups or more"),
        (["queue", "create", "q", "--durability", "no", *NOBODY], 2, "'no' is not one of"),
        (["queue", "create", "q", "--retention", "99999999999999999d", *NOBODY], 2, "longer than 36500d"),
        (["queue", "create", "q", "--flush-ms", "99999999999", *NOBODY], 2, "not in the range"),
        (["queue", "create", "q", "--max-record-bytes", f"{2**64}", *NOBODY], 2, "not in the range"),
        (["queue", "abandon-link", "q", "--epoch", f"{2**64}", "--confirm", "q", *NOBODY], 2, "not in the range"),
        (["queue", "alter", "q", *NOBODY], 2, "nothing is to be changed"),
        (["queue", "alter", "q", "--groups", "g1", *NOBODY], 2, "two groups or more"),
        (["queue", "alter", "q", "--groups", "g1,g2", "--all-groups", *NOBODY], 2, "either --groups or --all-groups"),
        (["queue", "delete", "q", *NOBODY], 2, "give --yes"),
        (["queue", "abandon-link", "q", "--epoch", "1", "--confirm", "p", *NOBODY], 2, "nothing was given up"),
        (["bench", "failover", "--queue", "q", "--pids", "/nowhere/pids.json", *NOBODY], 2, "does not exist"),
        (["up", "--dir", "/dev/null/x"], 3, "/dev/null/x/logs: Not a directory"),
        (["zookeeper", "--dir", "/dev/null/x"], 3, "/dev/null/x/logs: Not a directory"),
        (["nonsense"], 2, "No such command"),
        (["group", "drain", "g1", "--timeout", "nan", *NOBODY], 2, "'nan' is not a finite number"),
        (["consume", "--queue", "q", "--idle-exit", "nan", *NOBODY], 2, "'nan' is not a finite number"),
        (["verify", "--source", "password='x host=y", "--target", "dbname=b"], 2, "the source's DSN can't be read"),
        (["bench", "failover", "--queue", "q", "--rate", "nan", *NOBODY], 2, "'nan' is not a finite"),
        (["bench", "produce", "--queue", "q", "--size", f"{10**11}", *NOBODY], 2, "not in the range"),
        (["produce", "--queue", "q\udcff", *NOBODY], 2, "'--queue'"),
        (["queue", "create", "q\udcff", *NOBODY], 2, "its bytes are not UTF-8"),
        (["queue", "create", "q", "--groups", "g1,g\udcff", *NOBODY], 2, "its bytes are not UTF-8"),
        (["verify", "--source", "password=x\udcff", "--target", "dbname=b"], 2, "its bytes are not UTF-8"),
        (["health", "here"], 2, "'here' is not HOST:PORT"),
        (["health", "127.0.0.1:abc"], 2, "is not HOST:PORT"),
        (["health", "127.0.0.1:²"], 2, "is not HOST:PORT"),
        (["health", f"127.0.0.1:{'1' * 5000}"], 2, "is not HOST:PORT"),
        (["health", "127.0.0.1:1", "--timeout", "inf"], 2, "'inf' is not a finite number"),
        (["coordinator", "--zookeeper", "z:1", "--cluster", "a/b"], 2, "'a/b' can't name a cluster"),
        (["coordinator", "--zookeeper", "z:1", "--name", "a/b"], 2, "'a/b' can't name a coordinator"),
        (["coordinator", "--zookeeper", "z:1", "--session-timeout-ms", "9999999999"], 2, "2147483647 at most"),
        (["coordinator", "--zookeeper", "z:1", "--log-level", "loud"], 2, "'loud' is not one of"),
        (["coordinator", "--config", sys.executable], 2, "is not TOML"),
        (["coordinator", "--zookeeper", "\udcff:1"], 2, "Invalid value for '--zookeeper'"),
        (["queue", "describe", "\udcff", *NOBODY], 2, "Invalid value for 'NAME': its bytes are not UTF-8"),
        (["queue", "list", "--coordinator", "\udcff:1"], 2, "Invalid value for '--coordinator'"),
        (["queue", "create", "q", "--groups", "g1,\udcff", *NOBODY], 2, "Invalid value for '--groups'"),
        (["replay", "--queue", "q", "--target", "x", "--spark-conf", "spark.x=\udcff", *NOBODY], 2, "--spark-conf"),
        (["produce", "--queue", "q", "\udcff", *NOBODY], 2, "does not exist"),
        ([*BROKER, "--group", "g 1"], 2, "'g 1' can't name a group"),
        ([*BROKER, "--cluster", ""], 2, "'' can't name a cluster"),
        ([*BROKER, "--listen", "here"], 2, "listen has to be HOST:PORT"),
        ([*BROKER, "--listen", "127.0.0.1:99999"], 2, "listen has to be HOST:PORT, not '127.0.0.1:99999'"),
        ([*BROKER, "--listen", "::1:0"], 2, "listen has to be HOST:PORT"),
        ([*BROKER, "--listen", "[::1]:0", "--advertise", "here"], 2, "advertise has to be HOST:PORT"),
        ([*BROKER, "--advertise", "g1-a..svc:7100"], 2, "advertise has to be HOST:PORT, not 'g1-a..svc:7100'"),
        ([*BROKER, "--advertise-outside", f"{'x' * 64}:7100"], 2, "advertise_outside has to be HOST:PORT"),
        ([*BROKER, "--listen", "0.0.0.0:7100"], 2, "who listens on 0.0.0.0:7100 has to be given advertise"),
        ([*BROKER, "--listen", "[0:0::0]:7100"], 2, "has to be given advertise"),
        ([*BROKER, "--advertise-outside", ":1"], 2, "advertise_outside has to be HOST:PORT"),
        (["coordinator", "--zookeeper", "z:1", "--listen", ":7000"], 2, "listen has to be HOST:PORT"),
        (["coordinator", "--zookeeper", "z:1", "--advertise", "h:0"], 2, "advertise has to be HOST:PORT"),
        (["coordinator", "--zookeeper", "z:1", "--listen", "[::]:0"], 2, "has to be given advertise"),
        (["coordinator", "--zookeeper", "z:1,"], 2, "zookeeper has to be HOST:PORT[,HOST:PORT…], not 'z:1,'"),
        (
            ["coordinator", "--zookeeper", "z:1", "--zookeeper-outside", "z:a"],
            2,
            "zookeeper_outside has to be HOST:PORT",
        ),
        (
            ["coordinator", "--zookeeper", "z:1/apps", "--zookeeper-outside", "o:1"],
            2,
            "zookeeper_outside has to have the path of zookeeper",
        ),
        ([*BROKER, "--zookeeper", "z:99999"], 2, "zookeeper has to be HOST:PORT"),
        ([*BROKER, "--zookeeper", "z..example:2181"], 2, "zookeeper has to be HOST:PORT"),
        ([*BROKER, "--session-timeout-ms", "-1"], 2, "session_timeout_ms has to be more than 0"),
        ([*BROKER, "--reserve-mb", "-1"], 2, "reserve_mb has to be 0 or more"),
    ],
)
def test_wrong_use_and_nobody_there_are_said_in_one_line(arguments, code, message, capfd):
    assert main.run(arguments) == code
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_an_error_has_the_code_that_docs_call_it_by(monkeypatch, capfd):
    def run(_):
        raise Diverged("the row is not there")

    monkeypatch.setattr("seriatim.consumer.spark.replay.Replay.run", run)
    assert main.run(["queue", "list", *NOBODY]) == exits.REFUSED
    assert main.run(["produce", "--queue", "q", "--connect-timeout", "0", *NOBODY, os.devnull]) == exits.REFUSED
    assert main.run(["replay", "--queue", "q", "--target", "x", *NOBODY]) == exits.REFUSED
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert [line.rpartition(" ")[2] for line in said] == ["[unreachable]", "[unreachable]", "[diverged]"]
    assert exits.told(WorldError("can't read the file")) == "can't read the file"


@pytest.mark.parametrize("name", ["up", "zookeeper", "broker", "demo"])
def test_no_folder_is_not_the_present_one(name):
    """`seriatim up --dir "$UNSET"` laid a cluster's files out in whatever folder one was in."""
    (command,) = (command for words, command in commands() if tuple(words) == (name,))
    with pytest.raises(click.BadParameter, match=r"it is empty; the present folder is called \."):
        command.make_context(name, ["--dir", ""])
    assert command.make_context(name, ["--dir", "."]).params["directory"].samefile(".")


@pytest.mark.parametrize("server", [BROKER, ("coordinator", "--zookeeper", "z:1", "--cluster", "a/b")])
def test_a_server_opens_as_many_files_as_it_may(server):
    """A thousand links take more than the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        assert main.run(server) == exits.WRONG_USE
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("most", "is_told"), [(256, True), (1 << 20, False), (resource.RLIM_INFINITY, False)])
def test_a_server_that_may_open_few_files_says_so_at_its_start(monkeypatch, caplog, most, is_told):
    """The first that it can't open may be one of its disk's, which then counts as failed."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    foreground._allow_open_files()
    assert ("few files can be open" in caplog.text) is is_told


def test_a_person_isn_t_told_of_each_try_to_reach_zookeeper():
    kazoo = logging.getLogger("kazoo")
    before = kazoo.level
    try:
        assert main.run(["queue", "--help"]) == exits.DONE
        assert not logging.getLogger("kazoo.client").isEnabledFor(logging.WARNING)
    finally:
        kazoo.setLevel(before)


def test_what_goes_wrong_is_said_once_where_there_is_no_log(monkeypatch, capfd):
    """By the command; by the library's log only where one was asked for, and with traces, which only that has."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    arguments = ["produce", "--queue", "q", "--connect-timeout", "0", *NOBODY, os.devnull]
    assert main.run(arguments) == exits.REFUSED
    assert capfd.readouterr().err.count("no coordinator answers") == 1
    trace = logging.LogRecord("seriatim.producer", logging.ERROR, "", 0, "a bug", (), (ValueError, ValueError(), None))
    assert main._is_told_nowhere_else(trace)
    logging.getLogger().addHandler(logging.NullHandler())
    assert main._is_told_nowhere_else(logging.makeLogRecord({}))


def test_output_that_nobody_reads_is_no_answer_and_no_failure():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "seriatim.cli.main", "queue", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=100, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (exits.DONE, b"")


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (">&-", exits.DONE, ""),
        ("| true", exits.DONE, ""),  # 1 would be an answer
        (">/dev/full", exits.REFUSED, "Error: No space left on device"),
        (">/dev/full 2>&1", exits.REFUSED, ""),
    ],
)
def test_output_that_nobody_takes_is_no_defect(output, code, said):
    # Started so late that a reader has gone by then.
    shell = f'(sleep 0.2; {sys.executable} -m seriatim.cli.main --help; echo "ends with $?" >&3) 3>&2 {output}'
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines() == [*([said] if said else []), f"ends with {code}"]


def test_an_answer_stands_where_nobody_reads_it():
    script = "from seriatim.cli import main; main.seriatim.main = lambda **_: print('no') or 1; main.main()"
    shell = f'(sleep 0.2; env -u PYTHONUNBUFFERED {sys.executable} -c "{script}"; echo "ends with $?" >&2) | true'
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert ended.stderr == "ends with 1\n"


def test_what_the_terminal_has_no_letter_for_is_no_defect():
    command = [sys.executable, "-m", "seriatim.cli.main", "queue", "list", "--help"]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (exits.DONE, "")
    assert r"HOST:PORT[,\u2026]" in done.stdout


def test_who_interrupts_does_not_wait_for_a_reader_that_reads_no_more():
    reading, writing = os.pipe()
    os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)))
    script = """
import sys
from seriatim.cli import main

def interrupted(**_):
    sys.stdout.write("x")
    raise KeyboardInterrupt

main.seriatim.main = interrupted
main.main()
"""
    with os.fdopen(reading), os.fdopen(writing) as output:
        done = subprocess.run((sys.executable, "-c", script), stdout=output, timeout=60, check=False)
    assert done.returncode == exits.INTERRUPTED


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("when", ["while it is loaded", "when it has ended"])
def test_ctrl_c_where_there_is_nothing_to_be_undone_ends_a_command_without_a_traceback(when, is_ignored):
    module, function = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"][
        "seriatim"
    ].split(":")
    script = f"""
import atexit, os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

if {is_ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if {when == "while it is loaded"}:
    sys.meta_path.insert(0, Interrupting())
else:
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv[1:] = ["--version"]
from {module} import {function} as main
main()
"""
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (exits.DONE if is_ignored else -signal.SIGINT, "")


def test_no_file_takes_the_place_of_a_stream_that_is_closed():
    """Libraries would tell a person something in there: in a broker's data, say."""
    script = "import os; from seriatim.cli import main; main.run = lambda: os.open('/dev/null', os.O_RDWR); main.main()"
    ended = subprocess.run(["bash", "-c", f'{sys.executable} -c "{script}" <&- >&- 2>&-'], check=False)
    assert ended.returncode == 3  # the first number behind theirs


@pytest.mark.parametrize("asked", [None, "INFO"])
def test_grpc_itself_tells_nothing_on_standard_error_unless_it_is_asked_to(asked):
    """It writes on threads of its own, in which the process never ended where nobody took that."""
    script = "from seriatim.cli import main; main.run = lambda: __import__('grpc').insecure_channel('127.0.0.1:1').close(); main.main()"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"} | {
        "GRPC_TRACE": "api"
    }
    environment |= {} if asked is None else {"GRPC_VERBOSITY": asked}
    command = (sys.executable, "-c", script)
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True, timeout=120, env=environment)
    assert ("grpc_channel_create" in ended.stderr) is (asked is not None)


def test_a_standard_error_that_takes_nothing_just_now_ends_no_command():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    script = (
        "import sys; from seriatim.cli import main; main.run = lambda: print('x' * 10**6, file=sys.stderr); main.main()"
    )
    with os.fdopen(reading), os.fdopen(writing) as said:
        assert subprocess.run((sys.executable, "-c", script), stderr=said, check=False).returncode == exits.DONE


@pytest.mark.parametrize(
    "arguments",
    ["verify --source password=\\'x --target dbname=b 2>&-", "queue delete q --coordinator 127.0.0.1:1 <&-"],
)
def test_wrong_use_is_no_defect_where_a_stream_is_closed(arguments):
    command = f"{sys.executable} -m seriatim.cli.main {arguments}"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == exits.WRONG_USE


@pytest.mark.parametrize(("arguments", "missing", "extra"), [
    (("verify", "--source", "x", "--target", "x"), "psycopg", "[postgres]"),
    (("class-archive",), "pyspark", "[spark]"),
])  # fmt: skip
def test_what_is_not_installed_is_named(arguments, missing, extra):
    script = f"import sys; sys.modules[{missing!r}] = None; from seriatim.cli import main; main.main()"
    ended = subprocess.run((sys.executable, "-c", script, *arguments), capture_output=True, text=True, check=False)
    assert ended.returncode == exits.REFUSED
    assert f"{missing} is missing: install seriatim with its extra, pip install 'seriatim{extra}'" in ended.stderr


def a_full_pipe():
    """Both its ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    return reading, writing


def serve_in_turn(monkeypatch):
    """What a broker and a coordinator do once they serve, which is to tell it."""

    async def serves(_, ready, __):
        ready("g1-a", "127.0.0.1:1")
        ran.append("broker")

    async def does_nothing():
        pass

    async def runs():
        ran.append("coordinator")

    ran = []
    monkeypatch.setattr("seriatim.broker_group.process.serve", serves)
    monkeypatch.setattr(log, "start_logging", lambda *_: None)
    monkeypatch.setattr(broker_module, "run_server", lambda serve: asyncio.run(serve(None)))
    assert main.run(BROKER) == exits.DONE
    coordinator = SimpleNamespace(name="c", address="c:1", start=does_nothing, run=runs, stop=does_nothing)
    asyncio.run(CoordinatorProcess.live(coordinator, standard_streams.say_ready))
    return ran


def test_a_server_runs_on_where_its_word_that_it_serves_finds_no_room(monkeypatch):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        assert serve_in_turn(monkeypatch) == ["broker", "coordinator"]


@pytest.mark.timeout(60)
def test_a_server_runs_on_where_nobody_takes_its_word_that_it_serves(monkeypatch):
    """Such as a pipe that outlives it, as runit and s6 keep one: it stood still for good, and no signal ended it."""
    reading, writing = a_full_pipe()
    with os.fdopen(reading, "rb") as taken, os.fdopen(writing, "w") as untaken:
        monkeypatch.setattr(sys, "stdout", untaken)
        assert serve_in_turn(monkeypatch) == ["broker", "coordinator"]
        told = b""
        while told.count(b"\n") < 2:
            told += taken.read1().lstrip(b"x")
        assert sorted(told.splitlines()) == [b"ready c c:1", b"ready g1-a 127.0.0.1:1"]


@pytest.mark.parametrize("arguments", [("broker",), ("queue", "show", "q", *NOBODY)])
def test_a_command_that_fails_ends_where_nobody_takes_what_it_says(arguments):
    reading, writing = a_full_pipe()
    command = (sys.executable, "-m", "seriatim.cli.main", *arguments)
    with os.fdopen(reading), os.fdopen(writing, "w") as untaken:
        ended = subprocess.run(command, stdout=untaken, stderr=untaken, check=False, timeout=120)
    assert ended.returncode in {exits.WRONG_USE, exits.REFUSED}


def taken_behind(reading, output, told):
    """Takes what fills a pipe, and what is told once it is empty."""
    os.set_blocking(reading, False)
    with suppress(BlockingIOError):
        while os.read(reading, 1 << 20):
            pass
    os.set_blocking(reading, True)
    output(told)
    said = os.read(reading, 1 << 20)
    os.close(reading)
    return said


@pytest.mark.timeout(60)
def test_what_nobody_takes_on_standard_error_is_left_out_until_somebody_does():
    """`produce` stood still in its first word, elected, and no signal ended it: Python goes on with a write that a signal has interrupted."""
    reading, writing = a_full_pipe()
    with io.TextIOWrapper(io.BufferedWriter(main._Told(writing, "wb"))) as told:

        def tell(text):
            click.echo(text, file=told)
            told.flush()

        for text in ("waiting: nobody", "elected", "x" * 100_000):
            tell(text)
        assert taken_behind(reading, tell, "waiting: somebody") == b"waiting: somebody\n"
        tell("nobody reads any more")


def taken_from(terminal, told):
    """What a terminal shows, up to this."""
    shown = b""
    while told not in shown:
        shown += os.read(terminal, 1 << 16)
    return shown


@pytest.mark.timeout(60)
@pytest.mark.parametrize("characters", [20, 200, 2000])
def test_nor_is_a_terminal_waited_for_that_nobody_reads(characters, monkeypatch):
    """As over a line that hangs: it tells of room for a part of a line, and `replay` stood still in that one, elected, whatever signal came."""
    terminal, line = pty.openpty()
    with io.TextIOWrapper(io.BufferedWriter(main._Told(line, "wb", closefd=False))) as told:
        for number in range(20_000 // characters * 4):
            click.echo(f"waiting: {number} {'x' * characters}", file=told)
            told.flush()
        assert taken_from(terminal, b"x\r\n").startswith(b"waiting: 0 ")
        while select.select([terminal], [], [], 0)[0]:
            os.read(terminal, 1 << 16)
        click.echo("waiting: somebody", file=told)
        told.flush()
        assert b"\nwaiting: somebody" in taken_from(terminal, b"somebody")
    with os.fdopen(line, "w") as untaken:
        monkeypatch.setattr(sys, "stdout", untaken)
        tell = replay_module.reporter(is_json=False, is_log=False)
        for offset in range(4000):
            tell(progress.Started(queue="q" * characters, offset=offset, token=1))
        assert os.get_blocking(untaken.fileno())  # it is others' as well
    os.close(terminal)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_json", [False, True])
def test_a_capture_and_a_replay_go_on_where_nobody_takes_what_they_tell(is_json, monkeypatch):
    """Their threads met in the lock around the first line that found no room: what was captured, or applied, stood still behind it."""
    reading, writing = a_full_pipe()
    with os.fdopen(writing, "w") as untaken:
        monkeypatch.setattr(sys, "stdout", untaken)
        report = capture_module._Report("q", "slot", is_json=is_json, is_log=False)
        report.elected(3)
        with report.regularly(SimpleNamespace(sent=4, unacknowledged=4)):
            report.stopped(4)
        tell = replay_module.reporter(is_json=is_json, is_log=False)
        stopped = progress.Stopped(offset=4, records=4, changes=4)
        tell(stopped)
        tell(stopped)
        assert taken_behind(reading, tell, stopped).count(b"\n") == 1
        assert report.failure is None


@pytest.mark.timeout(60)
def test_a_line_that_is_not_taken_is_not_waited_for_where_the_log_that_goes_there_is_not_either(monkeypatch):
    reading, writing = a_full_pipe()
    with (
        os.fdopen(reading),
        os.fdopen(writing, "w") as untaken,
        standard_streams.undivided(),
    ):  # as while the log's thread writes
        monkeypatch.setattr(sys, "stdout", untaken)
        capture_module._Report("q", "slot", is_json=True, is_log=True).elected(3)


WATCHES = """
import asyncio, itertools, sys
from seriatim.cli import status
async def watch(_, __, screen, ___):
    print("begun", file=sys.stderr, flush=True)
    for number in itertools.count():
        screen.show([str(number)])
status._watch_queue = watch
asyncio.run(status._run("127.0.0.1:1", "q", is_watching=True, is_json=True))
"""


@pytest.mark.timeout(60)
def test_a_second_signal_ends_a_watch_that_nobody_takes():
    """The loop's own handlers never had their turn: SIGTERM and Ctrl-C did nothing, however often they came."""
    reading, writing = a_full_pipe()
    command = (sys.executable, "-c", WATCHES)
    with os.fdopen(reading), subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True) as process:
        os.close(writing)
        try:
            assert process.stderr.readline() == "begun\n"
            while process.poll() is None:
                process.terminate()
                time.sleep(0.05)
        finally:
            process.kill()
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("server", [("coordinator",), ("broker", "--group", "g1", "--member", "a", "--dir", "g1-a")])
def test_a_server_that_looks_for_zookeeper_stops_when_told_to(server, tmp_path):
    command = (sys.executable, "-m", "seriatim.cli.main", *server, "--zookeeper", "127.0.0.1:1", "--cluster", "c")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        while "Connection refused" not in process.stderr.readline():
            assert process.poll() is None
        process.terminate()
        _, said = process.communicate(timeout=100)
    assert process.returncode == exits.DONE
    assert "Traceback" not in said


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed_ends_what_has_something_to_undo_unless_it_is_to_go_on(nohup):
    script = """
import os, signal, sys
from seriatim.cli.foreground import interruptible
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
with interruptible():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        print("goes on")
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGHUP)  # of the kernel and of the shell: each sends one
        print("undone")
"""
    command = (sys.executable, "-c", script, "SIG_IGN" if nohup else "SIG_DFL")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n" if nohup else "undone\n")


def test_a_signal_that_comes_just_as_it_is_waited_for_waits_for_no_other(monkeypatch):
    """`up` and `zookeeper`, told to end as soon as they had said that they serve, went on once in some thousand times."""
    monkeypatch.setattr(foreground, "_LOOK_EVERY_S", 0.01)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(3000):
            began_s = time.monotonic()
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 20), 40)
                foreground.wait_for_signal(list, print)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert time.monotonic() - began_s < 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_second_signal_kills_a_replay_that_does_not_stop():
    script = """
import signal, time
from seriatim.cli import main
from seriatim.consumer.spark.replay import Replay
def run(self):
    print("runs", flush=True)
    while True:
        time.sleep(0.01)  # a signal just before signal.pause() would wait for the next one
Replay.run = run
Replay.stop = lambda self: print("told", flush=True)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else, under nohup, it is for nobody
main.run(["replay", "--queue", "q", "--target", "dbname=x", "--coordinator", "127.0.0.1:1"])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            for number in (signal.SIGHUP, signal.SIGTERM):
                assert process.stdout.readline() in ("runs\n", "told\n")
                process.send_signal(number)
            assert process.stdout.readline() == "told\n"
            process.terminate()
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()


def test_the_last_that_a_capture_tells_is_how_it_stands(monkeypatch):
    """The queue took nothing for a while, and nothing is sent since."""
    told = []
    monkeypatch.setattr(capture_module, "_REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(pipes.Taker, "tell", lambda _, text: told.append(json.loads(text)))
    sender = SimpleNamespace(sent=4, unacknowledged=4)
    report = capture_module._Report("q", "slot", is_json=True, is_log=False)

    def wait_for(unacknowledged):
        deadline_s = time.monotonic() + 60
        while [event["unacknowledged"] for event in told][-1:] != [unacknowledged]:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    with report.regularly(sender):
        wait_for(4)
        sender.unacknowledged = 0
        wait_for(0)
    assert len(told) == 2


@pytest.mark.parametrize("is_log", [False, True])
def test_who_asks_for_json_gets_it_also_where_there_is_a_log(is_log, caplog, capsys):
    """In containers, where SERIATIM_LOG_TO is set, `capture --json` and `replay --json` logged in its place, and printed nothing."""
    caplog.set_level(logging.INFO)
    capture_module._Report("q", "slot", is_json=True, is_log=is_log).elected(3)
    replay_module.reporter(is_json=True, is_log=is_log)(progress.Waiting("standing by"))
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in told] == ["elected", "waiting"]
    assert caplog.records == []


def test_who_asks_for_no_json_is_told_by_the_log_where_there_is_one(caplog, capsys):
    caplog.set_level(logging.INFO)
    capture_module._Report("q", "slot", is_json=False, is_log=True).elected(3)
    replay_module.reporter(is_json=False, is_log=True)(progress.Waiting("standing by"))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["elected", "waiting"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["produce", "consume"])
def test_sender_and_reader_are_as_patient_as_is_asked(command, monkeypatch):
    seen = {}

    def client(*_, session_timeout_s, connect_timeout_s=None, **__):
        seen.update(session_timeout_s=session_timeout_s, connect_timeout_s=connect_timeout_s)
        raise Unreachable("nobody there")

    monkeypatch.setattr("seriatim.consumer.Consumer", client)
    monkeypatch.setattr("seriatim.cli.produce.Producer", client)
    result = invoke(command, "--queue", "orders", "--session-timeout-ms", "9000", "--connect-timeout", "0.5")
    assert isinstance(result.exception, Unreachable)
    # A producer is made without a connection; the command itself waits for it.
    assert seen == {"session_timeout_s": 9.0, "connect_timeout_s": 0.5 if command == "consume" else None}


def test_a_reader_that_moves_its_subscription_first_is_as_patient(monkeypatch):
    seen = []

    async def call_within(_, method, __, within_s):
        seen.append((method, within_s))
        raise Unreachable("nobody there")

    monkeypatch.setattr("seriatim.protocol.coordinators.Coordinators.call_within", call_within)
    result = invoke("consume", "--queue", "orders", "--from", "3", "--connect-timeout", "0.5")
    assert isinstance(result.exception, Unreachable)
    assert seen == [("DescribeCluster", 0.5)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Fenced("x"), ""),
        (NotElected("x"), ""),
        (OlderGeneration("the subscription was sought"), ""),
        (UnknownQueue("it was deleted"), ""),
        (DeadlineOver("no answer"), "the last records may be printed again: no answer\n"),
    ],
)
def test_a_last_commit_that_fails_is_no_failure_of_a_reader_that_printed_all(error, said, capsys):
    def commit(*, timeout_s):
        raise error

    consume_module._commit(SimpleNamespace(commit=commit))
    assert capsys.readouterr().err == said


LOST = "the end of link 1, which is lost until g1-a or g1-b is back"


@pytest.mark.parametrize(
    ("reasons", "blocked_by"),
    [
        ([""], ""),
        (["the next link"], ""),
        (["link 2 to be opened"], ""),  # nobody was granted it so far
        (["the next link: no coordinator answers at c1:7000"], ""),
        ([LOST], LOST),
        (["", "g1-a: nobody answers"], "g1-a: nobody answers"),  # between two tries nothing is waited for
        ([LOST, LOST, *[""] * 20], ""),  # the group was back before it was enough
    ],
)
def test_a_reader_that_stops_knows_whether_all_is_read(reasons, blocked_by):
    told = itertools.cycle(reasons)
    consumer = SimpleNamespace(is_elected=True, waiting_for="")
    consumer.is_at_end = lambda **_: (
        (consumer.waiting_for.startswith(("the next link", "link 2 to be opened")) or not consumer.waiting_for)
        and not blocked_by
    )
    waiting = consume_module._Waiting(consumer, 0.5, 10)
    for _ in range(20):
        consumer.waiting_for = next(told)
        if waiting.is_over():
            break
    else:
        pytest.fail("it never stops")
    assert waiting.blocked_by == blocked_by


@pytest.mark.parametrize("reason", ["", "the next link"])
@pytest.mark.parametrize("error", [None, Unreachable("no coordinator answers")])
def test_a_reader_that_nobody_tells_that_all_is_read_says_so(reason, error):
    """It ended with 0, before records, where both members stood still, or the coordinator that told it of the next link."""

    def is_at_end(*, timeout_s):
        asked.append(timeout_s)
        if error:
            raise error
        return False

    asked = []
    consumer = SimpleNamespace(is_elected=True, waiting_for=reason, is_at_end=is_at_end)
    waiting = consume_module._Waiting(consumer, 0.5, 2)
    assert not any(waiting.is_over() for _ in range(24))
    assert any(waiting.is_over() for _ in range(2))
    assert len(asked) < 10
    assert waiting.blocked_by.startswith("more records, or to be told where the queue ends")
    assert waiting.blocked_s == 2.5
    assert ("no coordinator answers" in waiting.blocked_by) is (error is not None)


def test_a_reader_that_went_on_is_asked_anew_whether_all_is_read():
    consumer = SimpleNamespace(is_elected=True, waiting_for="", is_at_end=lambda **_: False)
    waiting = consume_module._Waiting(consumer, 0.5, 2)
    assert not any(waiting.is_over() for _ in range(20))
    waiting.ended()
    consumer.is_at_end = lambda **_: True
    assert not any(waiting.is_over() for _ in range(4))
    assert any(waiting.is_over() for _ in range(2))
    assert waiting.blocked_by == ""


def test_a_reader_that_nobody_tells_where_to_read_stops_too_unless_it_stands_by():
    """The head's group was down: with `--idle-exit` it waited until that was back, however long."""
    reason = "g1: no member of g1 is registered, so nobody can tell where link 1 was read to"
    consumer = SimpleNamespace(is_elected=False, is_first_in_line=False, waiting_for=reason)
    waiting = consume_module._Waiting(consumer, 0.5, 2)
    assert not any(waiting.is_over() for _ in range(50))
    consumer.is_first_in_line = True
    assert not any(waiting.is_over() for _ in range(15))
    consumer.is_elected = True  # it was told for a moment
    assert not waiting.is_over()
    consumer.is_elected = False
    assert not any(waiting.is_over() for _ in range(15))
    assert any(waiting.is_over() for _ in range(10))
    assert (waiting.blocked_by, waiting.blocked_s) == (reason, 2)


@pytest.mark.parametrize("ends", [os.pipe, lambda: [one.detach() for one in socket.socketpair()]])
def test_a_watch_that_shows_nothing_new_notices_that_nobody_reads(ends, monkeypatch):
    """`status --watch | head -n 2` hung until something changed."""
    reading, writing = ends()
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        screen = status_module._Plain(has_stamp=False)
        screen.show(["queue orders"])
        screen.show(["queue orders"])
        screen.say("no coordinator answers")
        assert os.read(reading, 100) == b"queue orders\n"
        os.close(reading)
        with pytest.raises(BrokenPipeError):
            screen.show(["queue orders"])
        with pytest.raises(BrokenPipeError):
            screen.say("no coordinator answers")
        monkeypatch.undo()


def test_what_is_no_pipe_is_read(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        for output in (file, io.StringIO(), None):
            monkeypatch.setattr(sys, "stdout", output)
            assert is_output_read()
        monkeypatch.undo()


def test_what_is_shown_of_a_sender_is_how_it_stands_when_it_is_drawn():
    """The last line's acknowledgement comes while nothing more is read, as with `tail -f`."""
    run = SimpleNamespace(read=1000, acknowledgements=SimpleNamespace(acknowledged=999))
    shown = produce_module._Counts(run)
    run.acknowledgements.acknowledged += 1
    assert shown.__rich__().plain == "1,000 sent, 1,000 acknowledged"


@pytest.mark.timeout(60)
def test_a_named_pipe_that_nobody_writes_to_yet_keeps_no_signal_waiting(tmp_path):
    """The sender hung in its `open`, and one SIGTERM or Ctrl-C didn't end it."""
    os.mkfifo(tmp_path / "lines")
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as news, produce_module._opened(tmp_path / "lines") as descriptor:
        incoming = chunks(descriptor, reading)
        for _ in range(2):
            print("a signal came", file=news, flush=True)
            assert next(incoming) == []
        with (tmp_path / "lines").open("w") as lines:
            lines.write("1\n2\n")
            lines.flush()
            assert next(incoming) == [b"1", b"2"]
        assert list(incoming) == []


# ------------------------------------------------------------------------------------------------------------ queues


def test_create_sends_what_was_given_and_leaves_the_rest_to_the_cluster(asked):
    asked.replies["CreateQueue"] = a_view()
    result = invoke("queue", "create", "orders", "--groups", "g2,g1", "--retention", "7d", "--json")
    assert json.loads(result.output)["queue"] == "orders"
    [(method, request)] = asked.calls
    assert (method, request.queue) == ("CreateQueue", "orders")
    assert request.settings == pb.QueueSettings(groups=["g2", "g1"], retention_ms=604_800_000)


def test_alter_sends_what_was_given_and_nothing_of_the_environment(asked, monkeypatch):
    monkeypatch.setenv("SERIATIM_DURABILITY", "memory")
    asked.replies["AlterQueue"] = a_view()
    result = invoke("queue", "alter", "orders", "--retention", "7d", "--json")
    assert json.loads(result.output)["queue"] == "orders"
    [(method, request)] = asked.calls
    assert (method, request.queue) == ("AlterQueue", "orders")
    assert request.settings == pb.QueueSettings(retention_ms=604_800_000)


@pytest.mark.parametrize(("given", "rotate_ms"), [("never", 0), ("6h", 21_600_000)])
def test_never_to_rotate_is_a_setting_too(asked, given, rotate_ms):
    asked.replies["AlterQueue"] = a_view()
    assert invoke("queue", "alter", "orders", "--rotate-every", given).exception is None
    [(_, request)] = asked.calls
    assert request.settings == pb.QueueSettings(rotate_ms=rotate_ms)


@pytest.mark.parametrize(
    ("group", "said"), [("g1", "goes on on g1 as it is; `seriatim queue rotate orders`"), ("g2", "")]
)
def test_alter_says_where_the_queue_stays_until_its_next_link(asked, group, said):
    link = pb.LinkView(epoch=1, group=group, state="open")
    asked.replies["AlterQueue"] = pb.QueueView(
        queue="orders", settings=pb.QueueSettings(groups=["g2", "g3"]), links=[link]
    )
    result = invoke("queue", "alter", "orders", "--groups", "g2,g3")
    assert said in result.stderr
    assert bool(said) == bool(result.stderr)
    [(_, request)] = asked.calls
    assert (request.settings, request.all_groups) == (pb.QueueSettings(groups=["g2", "g3"]), False)


@pytest.mark.parametrize(("answer", "calls"), [("y\n", ["DeleteQueue"]), ("n\n", []), ("\n", [])])
def test_delete_asks(asked, terminal, answer, calls):
    asked.replies |= {"DescribeQueue": pb.QueueView(queue_id=7), "DeleteQueue": pb.Done()}
    result = invoke("queue", "delete", "orders", answer=answer)
    # The queue that was there when it was asked for, not one that has its name by the answer.
    assert [(method, request.queue_id) for method, request in asked.calls[1:]] == [(method, 7) for method in calls]
    assert result.return_value == (exits.DONE if calls else exits.ANSWER_IS_NO)


def test_delete_with_yes_doesn_t_ask(asked):
    asked.replies |= {"DescribeQueue": pb.QueueView(queue_id=7), "DeleteQueue": pb.Done()}
    result = invoke("queue", "delete", "orders", "--yes", "--json")
    assert json.loads(result.output) == {"queue": "orders", "is_deleted": True}


def test_a_name_that_is_left_of_a_queue_can_be_deleted(asked):
    asked.replies |= {"DescribeQueue": UnknownQueue("there is no queue with id 7"), "DeleteQueue": pb.Done()}
    assert invoke("queue", "delete", "orders", "--yes").return_value == exits.DONE
    assert asked.calls[-1][1].queue_id == 0


SHOWN = pb.AbandonLinkReply(what="7 records")
GIVEN_UP = pb.AbandonLinkReply(what="7 records", is_done=True)


@pytest.mark.parametrize(
    ("answer", "confirmed", "code"),
    [("orders\n", ["", "orders"], exits.DONE), ("order\n", [""], exits.ANSWER_IS_NO), ("\n", [""], exits.ANSWER_IS_NO)],
)
def test_abandon_link_shows_first_and_wants_the_queue_s_name(asked, terminal, answer, confirmed, code):
    asked.replies["AbandonLink"] = [SHOWN, GIVEN_UP]
    result = invoke("queue", "abandon-link", "orders", "--epoch", "4", answer=answer)
    said = [(request.confirmed_queue, request.confirmed_what, request.epoch) for _, request in asked.calls]
    assert said == [(name, "7 records" if name else "", 4) for name in confirmed]
    assert "would be given up for good: 7 records" in result.output
    assert result.return_value == code


def test_abandon_link_where_nobody_can_be_asked_shows_and_gives_up_nothing(asked):
    asked.replies["AbandonLink"] = [SHOWN]
    result = invoke("queue", "abandon-link", "orders", "--epoch", "4")
    assert isinstance(result.exception, click.UsageError)
    assert [request.confirmed_queue for _, request in asked.calls] == [""]


def test_abandon_link_with_confirm_needs_nobody(asked):
    asked.replies["AbandonLink"] = [SHOWN, GIVEN_UP]
    result = invoke("queue", "abandon-link", "orders", "--epoch", "4", "--confirm", "orders", "--json")
    assert json.loads(result.output) == {"queue": "orders", "epoch": 4, "what": "7 records", "is_done": True}


def test_recover_confirms_what_was_shown(asked, terminal):
    replies = [pb.RecoverQueueReply(what="from g1-a", is_done=is_done) for is_done in (False, True)]
    asked.replies["RecoverQueue"] = replies
    assert invoke("queue", "recover", "orders", answer="orders\n").return_value == exits.DONE
    said = [(request.confirmed_queue, request.confirmed_what) for _, request in asked.calls]
    assert said == [("", ""), ("orders", "from g1-a")]


def test_a_recovery_that_takes_too_long_says_that_it_goes_on_when_it_is_asked_for_again(asked):
    asked.replies["RecoverQueue"] = [pb.RecoverQueueReply(what="from g1-a"), DeadlineOver("it may have done it")]
    result = invoke("queue", "recover", "orders", "--confirm", "orders")
    with pytest.raises(DeadlineOver, match="it may have done it: run it again, it goes on from there"):
        raise result.exception


def test_where_nothing_is_to_be_recovered_nobody_is_asked(asked, terminal):
    asked.replies["RecoverQueue"] = [pb.RecoverQueueReply(what="nothing is to be recovered", is_needless=True)]
    result = invoke("queue", "recover", "orders", "--json")
    assert json.loads(result.output) == {"queue": "orders", "what": "nothing is to be recovered", "is_done": False}
    assert result.return_value == exits.ANSWER_IS_NO


# ------------------------------------------------------------------------------------------------------------ groups


def a_group(sending=(), backlog=(), lost=(), *, is_draining=True):
    members = [
        pb.MemberView(member="a", is_registered=True, address="h:1", is_in_sync=True, is_peer_connected=True),
        pb.MemberView(member="b", is_registered=True, address="h:2", problem="disk full"),
    ]
    return pb.GroupView(
        group="g1", is_draining=is_draining, members=members, sending_queues=sending, backlog_queues=backlog,
        lost_queues=lost,
    )  # fmt: skip


def groups(*found):
    return pb.ListGroupsReply(groups=found)


def test_a_member_whose_peer_is_away_is_shown_in_sync_where_it_is(asked):
    """Then, and only then, may the other one's disk be emptied; and where that doesn't start, this one is connected to nobody."""
    alone = a_group(is_draining=False)
    alone.members[0].is_peer_connected = False
    asked.replies["ListGroups"] = groups(alone)
    assert "in service  in sync, not connected to g1-b at h:2  disk full" in invoke("group", "list").output
    alone.members[1].CopyFrom(pb.MemberView(member="b"))
    asked.replies["ListGroups"] = groups(alone)
    assert "in service  in sync, not connected to g1-b  not there" in invoke("group", "list").output


def test_what_troubles_members_is_said_once_below_the_table_where_it_is_long(asked):
    """Three groups that said the same in a hundred characters made lines of 400."""
    long = "it doesn't understand the chain, and so not what it lacks, of queue orders"
    troubled = [a_group(is_draining=False), a_group(is_draining=False)]
    for one, name in zip(troubled, ("g1", "g2"), strict=True):
        one.group, one.members[0].problem = name, long
    asked.replies["ListGroups"] = groups(*troubled)
    lines = invoke("group", "list").output.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        [name, "in", "service", "see", "below", "disk", "full", "-", "-"] for name in ("g1", "g2")
    ]
    assert lines[3:] == [f"g1-a, g2-a: {long}"]


@pytest.mark.parametrize(("until", "looks"), [("switched", 1), ("drained", 2)])
def test_drain_waits_as_long_as_asked(asked, monkeypatch, until, looks):
    monkeypatch.setattr("seriatim.cli.group._LOOK_EVERY_S", 0.0)
    asked.replies = {
        "DrainGroup": a_group(["orders"], ["orders"]),
        "ListGroups": [groups(a_group([], ["orders"])), groups(a_group())],
    }
    result = invoke("group", "drain", "g1", "--until", until)
    assert result.return_value == exits.DONE
    assert [method for method, _ in asked.calls] == ["DrainGroup", *["ListGroups"] * looks]
    assert "g1 still takes records of orders" in result.output


def test_drain_waits_for_coordinators_that_are_away_for_a_while(asked, monkeypatch):
    monkeypatch.setattr("seriatim.cli.group._LOOK_EVERY_S", 0.0)
    away = Unreachable("no coordinator answers [at /h:1]")
    asked.replies = {"DrainGroup": a_group(["orders"]), "ListGroups": [away, away, groups(a_group())]}
    result = invoke("group", "drain", "g1")
    assert result.return_value == exits.DONE
    assert result.stderr.splitlines() == [
        "g1 still takes records of orders, until another group can (`seriatim status orders`)",
        "no coordinator answers [at /h:1]",
    ]


@pytest.mark.parametrize("until", ["switched", "drained"])
def test_drain_waits_for_the_end_of_a_lost_link(asked, monkeypatch, until):
    monkeypatch.setattr("seriatim.cli.group._LOOK_EVERY_S", 0.0)
    asked.replies = {"DrainGroup": a_group(lost=["orders"]), "ListGroups": [groups(a_group())]}
    result = invoke("group", "drain", "g1", "--until", until)
    assert result.return_value == exits.DONE
    assert result.stderr == "a link of orders is lost on g1: start its members, or `seriatim queue abandon-link`\n"


def test_drain_says_no_when_somebody_puts_the_group_back_into_service(asked, monkeypatch):
    """It waited on for what takes records again, or said that a group is drained that is about to be sent to."""
    monkeypatch.setattr("seriatim.cli.group._LOOK_EVERY_S", 0.0)
    for sending in (["orders"], []):
        asked.replies = {
            "DrainGroup": a_group(["orders"]),
            "ListGroups": [groups(a_group(sending, is_draining=False))],
        }
        result = invoke("group", "drain", "g1")
        assert result.return_value == exits.ANSWER_IS_NO
        assert result.stderr.splitlines()[-1] == "g1 was put back into service meanwhile"


def test_who_interrupts_a_drain_is_told_that_it_goes_on(asked, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("seriatim.cli.group._one", interrupted)
    asked.replies = {"DrainGroup": a_group(["orders"])}
    result = invoke("group", "drain", "g1")
    assert exits.exit_code(result.exception) == exits.INTERRUPTED
    assert "g1 goes on draining; `seriatim group resume g1` puts it back into service" in result.stderr


def test_drain_tells_the_first_of_many_queues(asked):
    asked.replies["DrainGroup"] = a_group([f"q{number}" for number in range(1000)])
    result = invoke("group", "drain", "g1", "--timeout", "0")
    assert "g1 still takes records of q0, q1, q2, q3, q4, q5, 994 more, until another group can" in result.stderr


def test_drain_says_no_when_the_time_is_over(asked):
    asked.replies["DrainGroup"] = a_group(["orders"])
    result = invoke("group", "drain", "g1", "--timeout", "0", "--json")
    assert result.return_value == exits.ANSWER_IS_NO
    assert json.loads(result.stdout)["sending_queues"] == ["orders"]


def test_drain_without_waiting_doesn_t_look(asked):
    asked.replies["DrainGroup"] = a_group(["orders"])
    assert invoke("group", "drain", "g1", "--no-wait").return_value == exits.DONE
    assert len(asked.calls) == 1


def test_a_group_that_deleted_queues_wait_for_says_so(asked):
    away = pb.GroupView(group="g2", deleted_queues=["orders", "carts"])
    asked.replies["ListGroups"] = groups(a_group(is_draining=False), away)
    header, _, line = invoke("group", "list").stdout.splitlines()
    assert header.endswith("awaited by")
    assert line.split("  ")[-1].strip() == "2 deleted queues"
    listed = invoke("group", "list", "--json").stdout.splitlines()
    assert [json.loads(one)["deleted_queues"] for one in listed] == [[], ["orders", "carts"]]
    asked.replies["ListGroups"] = groups(a_group(is_draining=False))
    assert "awaited" not in invoke("group", "list").stdout


def test_a_group_is_removed(asked):
    asked.replies |= {"ListGroups": groups(a_group()), "RemoveGroup": pb.Done()}
    assert invoke("group", "remove", "g1").stdout == "group g1 is removed\n"
    assert json.loads(invoke("group", "remove", "g1", "--json").stdout) == {"group": "g1", "is_removed": True}
    assert [request.group for method, request in asked.calls if method == "RemoveGroup"] == ["g1", "g1"]


def test_a_group_that_a_call_removed_at_its_first_try_is_removed(asked):
    asked.replies |= {"ListGroups": groups(a_group()), "RemoveGroup": UnknownGroup("there is no group g1")}
    assert invoke("group", "remove", "g1").stdout == "group g1 is removed\n"
    assert isinstance(invoke("group", "remove", "g7").exception, UnknownGroup)


@pytest.mark.parametrize(("name", "meant"), [("s", 3), ("unknown", 0)])
def test_a_subscription_is_deleted_by_its_id(asked, name, meant):
    view = pb.QueueView(subscriptions=[pb.SubscriptionView(subscription="s", subscription_id=3)])
    asked.replies |= {"DescribeQueue": view, "DeleteSubscription": pb.Done()}
    assert invoke("subscription", "delete", name, "--queue", "orders").stdout == f"{name} is deleted\n"
    assert asked.calls[-1] == (
        "DeleteSubscription",
        pb.SubscriptionRequest(queue="orders", subscription=name, subscription_id=meant),
    )


def test_a_group_that_isn_t_there(asked):
    asked.replies["ListGroups"] = groups(a_group())
    assert isinstance(invoke("group", "describe", "g7").exception, UnknownGroup)


def test_a_group_s_line_says_what_is_wrong():
    heading, line = views.group_lines([a_group(["q"], is_draining=False)])
    assert heading.split("  ")[0] == "group"
    assert line == "g1     in service  in sync  disk full  q          -"


def test_a_queue_without_subscriptions_says_so(asked):
    asked.replies["DescribeQueue"] = pb.QueueView(queue="orders")
    result = invoke("subscription", "list", "--queue", "orders")
    assert result.stdout == ""
    assert "queue orders has no subscriptions" in result.stderr
    assert invoke("subscription", "list", "--queue", "orders", "--json").output == ""


@pytest.mark.parametrize("links", [0, 1])
def test_a_queue_without_an_open_link_isn_t_said_to_be_rotated(asked, links):
    view = a_view()
    del view.links[links:]
    asked.replies["DescribeQueue"] = view
    assert "queue orders is as it was, for no link of it is open" in invoke("queue", "rotate", "orders").stdout
    assert len(asked.calls) == 1


@pytest.mark.parametrize("state", ["opening", "open", "closing"])
def test_a_rotation_names_the_link_that_it_leaves(asked, state):
    view = a_view()
    view.links[-1].state = state
    asked.replies = {"DescribeQueue": view, "RotateQueue": a_view()}
    assert "is rotated" in invoke("queue", "rotate", "orders").stdout
    assert asked.calls[1] == ("RotateQueue", pb.QueueRequest(queue="orders", epoch=2))


def test_a_rotation_says_from_where_to_where(asked):
    before, after = a_view(), a_view()
    after.links[-1].state = "sealed"
    after.send_list[:] = ["g3", "g1"]
    asked.replies = {"DescribeQueue": before, "RotateQueue": after}
    told = invoke("queue", "rotate", "orders").stdout  # nobody is elected to send
    assert told == "queue orders is rotated: it left g2 (epoch 2); who sends next begins a link on g3\n"
    after.links.add(epoch=3, group="g3", state="open")
    assert invoke("queue", "rotate", "orders").stdout == "queue orders is rotated: from g2 (epoch 2) to g3 (epoch 3)\n"
    assert json.loads(invoke("queue", "rotate", "orders", "--json").stdout)["links"][-1]["group"] == "g3"


# ------------------------------------------------------------------------------------------------------------- views


def a_link(epoch, **fields):
    group = f"g{epoch}"
    sides = {
        side: pb.LinkMember(
            group=group,
            member=place,
            incarnation=pb.Incarnation(disk_id=f"disk-{place}", start=1),
            address=f"h:{place}",
        )
        for side, place in (("master", "a"), ("slave", "b"))
    }
    now = pb.Incarnation(disk_id="disk-a", start=1)
    return pb.LinkView(epoch=epoch, group=group, durability="sync", master_now=now, **sides, **fields)


def a_view():
    return pb.QueueView(
        queue="orders",
        queue_id=7,
        cluster="main",
        chain_version=12,
        settings=pb.QueueSettings(
            durability="interval", flush_ms=5, retention_ms=86_400_000, readmit="drained", max_record_bytes=1024,
            rotate_ms=86_400_000,
        ),
        sender="app-0000000001",
        sender_token=3,
        send_list=["g2", "g3"],
        switches_left=1,
        links=[
            a_link(1, state="sealed", has_base=True, has_end=True, end=40, has_committed=True, copies=1),
            a_link(2, state="open", has_base=True, base=40, has_committed=True, committed_index=2500, copies=2),
        ],
        subscriptions=[
            pb.SubscriptionView(
                subscription="all", subscription_id=1, reader="r-1", reader_token=2, consume_list=[1, 2],
                has_cursor=True, cursor_epoch=1, cursor_index=10, has_offset=True, cursor_offset=10, has_lag=True,
                lag_records=2530,
            ),
            pb.SubscriptionView(subscription="new"),
        ],
        waits=[pb.WaitReason(what="g1", reason="it has unread records")],
        abandoned=[pb.AbandonedView(epoch=1, what="3 records of link 1")],
    )  # fmt: skip


SETTINGS_LINE = "  settings       interval, flushed every 5 ms, groups all, retention 1d, readmit drained, rotated every 1d, records up to 1,024 bytes"


def test_a_queue_for_a_person():
    assert list(views.queue_lines(a_view())) == [
        "queue orders (id 7, chain version 12)",
        SETTINGS_LINE,
        "  sender         app-0000000001 (token 3)",
        "  send list      g2 > g3   (switches left: 1)",
        "  chain",
        "    epoch  group  state   durability  base  records  copies  master    slave",
        "    1      g1     sealed  sync        0     40       1       g1-a h:a  g1-b (not there)",
        "    2      g2     open    sync        40    2,500    2       g2-a h:a  g2-b (not there)",
        "  subscriptions",
        "    name  reader                    consume list  cursor      offset  lag",
        "    all   r-1 (token 2)             1 > 2         1:10        10      2,530",
        "    new   nobody elected (token 0)  empty         at the end  ?       ?",
        "  waits",
        "    g1: it has unread records",
        "  WARNING one copy: 40 unread records of epoch 1 have one living copy",
        "  ABANDONED epoch 1: 3 records of link 1",
    ]


def test_a_queue_for_a_program_has_all_keys_and_null_for_what_nobody_told():
    content = json.loads(json.dumps(views.queue_object(a_view())))
    assert list(content) == [
        "queue", "queue_id", "cluster", "chain_version", "created_at_ms", "settings", "sender", "sender_token",
        "send_list", "switches_left", "links", "subscriptions", "waits", "one_copy", "abandoned", "groups",
    ]  # fmt: skip
    assert content["one_copy"] == [{"epoch": 1, "records": 40}]
    listed = a_view()  # of whose links nobody asked the members, as `queue list` and `status` show it
    listed.links[0].has_committed = False
    assert views.queue_object(listed)["one_copy"] is None
    assert content["links"][1] | {"master": None, "slave": None} == {
        "epoch": 2, "group": "g2", "state": "open", "durability": "sync", "base": 40, "end": None, "committed": 2500,
        "copies": 2, "is_abandoned": False, "sealed_at_ms": None, "master": None, "slave": None, "link_hash": None,
        "chain_hash": None,
    }  # fmt: skip
    assert content["links"][0]["slave"] == {
        "member": "g1-b", "address": "h:b", "disk_id": "disk-b", "start": 1, "is_registered": False,
    }  # fmt: skip
    assert content["subscriptions"][1]["cursor_epoch"] is None
    empty = views.queue_object(pb.QueueView())
    assert list(empty) == list(content)


def test_status_waits_for_a_list_of_thousands_of_queues_as_long_as_queue_list_does():
    """It gave up after 5 s and said that nobody answers."""
    waited = {}

    async def call(method, request, timeout_s=CALL_TIMEOUT_S):
        waited[method] = timeout_s
        return getattr(pb, f"{method}Reply")()

    for is_json in (False, True):
        assert asyncio.run(status_module._cluster(SimpleNamespace(call=call), is_json))
        assert waited["ListGroups"] == waited["ListQueues"] == coordinators.CALL_TIMEOUT_S > CALL_TIMEOUT_S


def test_no_queue_s_name_is_not_the_whole_cluster(monkeypatch):
    """A probe whose variable isn't set looked at something else than a queue, and ended with 0."""

    async def call(_, method, request, *__):
        asked.append((method, request))
        raise UnknownQueue("no such name")

    asked = []
    monkeypatch.setattr("seriatim.protocol.coordinators.Coordinators.call", call)
    for more in ((), ("--watch",)):
        assert isinstance(invoke("status", "", *more).exception, UnknownQueue)
    assert asked == 2 * [("DescribeQueue", pb.QueueRequest(queue=""))]


def test_many_links_are_not_all_shown_to_a_person():
    view = pb.QueueView(links=[a_link(epoch, state="sealed") for epoch in range(1, 31)])
    lines = list(views.queue_lines(view))
    assert "    (18 earlier links not shown)" in lines
    assert sum(" sealed " in line for line in lines) == 12
    assert len(views.queue_object(view)["links"]) == 30


def test_a_subscription_that_nobody_reads_and_a_group_of_many_queues_have_a_line_that_can_be_read():
    """A year's links, and a thousand queues."""
    view = pb.QueueView(subscriptions=[pb.SubscriptionView(subscription="s", consume_list=range(1, 366))])
    assert " 1 > 2 > 3 > 4 > … > 365  " in list(views.queue_lines(view))[-1]
    names = [f"q{number}" for number in range(1000)]
    line = list(views.group_lines([a_group(sending=names, backlog=names[:6])]))[-1]
    assert line.endswith("  q0, q1, q2, q3, q4, q5, 994 more  q0, q1, q2, q3, q4, q5")


def test_a_member_that_is_away_is_not_told_with_a_line_for_each_link():
    """And none of them is told twice: what else waits, or is wrong, would be lost among them."""
    view = a_view()
    view.links.extend(
        a_link(epoch, state="sealed", has_end=True, end=10, has_committed=True, copies=1) for epoch in range(3, 103)
    )
    view.waits.extend(
        pb.WaitReason(what=f"link {epoch}", reason="one copy of its 10 records") for epoch in range(3, 103)
    )
    view.subscriptions[0].consume_list.extend(range(3, 53))
    lines = list(views.queue_lines(view))
    at = lines.index("  waits")
    assert lines[at + 1 : at + 3] == ["    g1: it has unread records", "    link 53: one copy of its 10 records"]
    assert lines[at + 8] == "    (44 more links of which one copy is left)"
    assert (
        lines[at + 9]
        == "  WARNING one copy: 540 unread records of epochs 1, 3, 4, 5, 6, 7, 45 more have one living copy"
    )


def test_a_watch_on_a_small_screen_shows_what_is_wrong():
    view = a_view()
    view.links.extend(a_link(epoch, state="sealed") for epoch in range(3, 31))
    view.waits[0].reason = "it has unread records of " + ", ".join(f"subscription-{number}" for number in range(7))
    lines = list(views.queue_lines(view))
    rows = on_screen(lines, 80, 24)
    assert len(rows) == 23
    assert [row for row, _ in rows[:4]] == lines[:4]
    assert "lines not shown" in rows[4][0]
    assert rows[-1] == (lines[-1], "bold red")
    shown = [row for row, _ in rows]
    said = shown[shown.index("  waits") + 1 : -2]
    assert len(said) == 2
    assert " ".join(row.strip() for row in said) == lines[-3].strip()
    assert all(len(row) <= 80 for row in said)
    assert [row for row, _ in on_screen(lines, 200, 60)] == lines


def test_a_cluster_s_status_warns_of_what_is_wrong_with_some_queue():
    """A lost link, and that the next failure has sending wait, were two among the many that wait."""
    well = pb.QueueView(queue="well", switches_left=2, links=[a_link(1, state="open")])
    assert list(views.cluster_warnings([well])) == []
    damaged = pb.QueueView(queue="damaged", waits=[pb.WaitReason(what="damage", reason="bits have changed")])
    (warning,) = views.cluster_warnings([well, damaged])
    assert warning == "WARNING the chain of damaged can't be read: nobody sends or reads there"
    assert views.queue_summary([damaged])[1] == ["damaged", "-", "-", "-", "-", "0", "0", "1"]
    lost = pb.QueueView(queue="lost", switches_left=1, links=[a_link(1, state="lost"), a_link(2, state="open")])
    queues = [well, lost, *(pb.QueueView(queue=f"q{number}") for number in range(100))]
    queues[-1].abandoned.add(epoch=1, what="3 records")
    queues[0].waits.add(what="chain", reason="it takes 600,000 bytes")
    assert list(views.cluster_warnings(queues, indent="  ")) == [
        "  WARNING no switch is left for q0, q1, q2, q3, q4, q5, 94 more: sending waits, now or after the next failure",
        "  WARNING the chain of well is too long for a planned switch, and soon, or already, for any, until links are read",
        "  WARNING a link of lost is lost: readers stop there",
        "  ABANDONED records of q99",
    ]


def test_a_list_of_queues_does_not_say_that_who_sent_last_is_elected():
    """Nobody was asked: he may have gone months ago."""
    heading, row = views.queue_summary([a_view()])
    assert row[heading.index("last sender")] == "app-0000000001"


@pytest.mark.parametrize(
    ("first_offset", "why"), [(0, "nobody has sent yet"), (30_000, "all that was sent was let go")]
)
def test_a_queue_whose_records_are_all_gone_is_not_said_to_have_had_none(first_offset, why):
    assert f"  chain          empty: {why}" in views.queue_lines(pb.QueueView(first_offset=first_offset))


def test_a_pushed_view_is_completed_with_what_members_told_before():
    described, pushed = a_view(), a_view()
    pushed.chain_version += 1
    for link in pushed.links:
        link.has_committed, link.committed_index, link.copies = False, 0, 0
    pushed.links.append(a_link(3, state="opening"))
    pushed.subscriptions[0].has_cursor = pushed.subscriptions[0].has_lag = pushed.subscriptions[0].has_offset = False
    merged = with_members_knowledge(pushed, described)
    assert merged.chain_version == 13
    assert [link.committed_index for link in merged.links] == [0, 2500, 0]
    assert (merged.subscriptions[0].cursor_index, merged.subscriptions[0].lag_records) == (10, 2530)
    pushed.subscriptions[0].generation = 2  # sought meanwhile: the old cursor says nothing about the new position
    assert not with_members_knowledge(pushed, described).subscriptions[0].has_cursor


def test_an_older_push_gives_way_to_a_newer_description():
    described, pushed = a_view(), a_view()
    described.chain_version += 1
    assert with_members_knowledge(pushed, described) is described
