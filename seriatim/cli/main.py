"""The `seriatim` command: a table of commands, each loaded only when it is called.

To add one: write a click command in a module of this package and name it in `COMMANDS`. Every option gets an environment
variable from its long name (`--idle-exit`: SERIATIM_IDLE_EXIT), unless it names one itself. How a command ends is decided
in `exits`.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from seriatim import __version__
from seriatim.cli import exits
from seriatim.cli.options import TEXT
from seriatim.cli.pipes import Taker
from seriatim.protocol import log, standard_streams

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Entry(NamedTuple):
    """Where a command lives (module:attribute), and its line in the list of commands."""

    target: str
    summary: str


COMMANDS = {
    "demo": Entry("seriatim.cli.demo.command:demo", "The main job on this machine, under faults, with a verdict."),
    "up": Entry("seriatim.cli.up:up", "Run a whole development cluster in the foreground."),
    "coordinator": Entry("seriatim.cli.coordinator:coordinator", "Run one coordinator."),
    "broker": Entry("seriatim.cli.broker:broker", "Run one broker: a member of a group."),
    "zookeeper": Entry("seriatim.cli.zookeeper:zookeeper", "Run one ZooKeeper, for development."),
    "queue": Entry("seriatim.cli.queue:queue", "Make, list, look at and delete queues."),
    "subscription": Entry("seriatim.cli.subscription:subscription", "Make, list, move and delete subscriptions."),
    "group": Entry("seriatim.cli.group:group", "Look at groups; take one out of service and put it back."),
    "status": Entry("seriatim.cli.status:status", "Show what a cluster or a queue does now, and what waits for what."),
    "produce": Entry("seriatim.cli.produce:produce", "Send lines of a file or of standard input as records."),
    "consume": Entry("seriatim.cli.consume:consume", "Print a queue's records in order."),
    "capture": Entry("seriatim.cli.capture:capture", "Send a database's log to a queue."),
    "replay": Entry("seriatim.cli.replay:replay", "Apply a captured database log to another database."),
    "verify": Entry("seriatim.cli.verify:verify", "Compare two databases row by row."),
    "health": Entry("seriatim.cli.health:health", "Ask a process whether it can do its work."),
    "bench": Entry("seriatim.cli.bench:bench", "Measure throughput, latency and failover."),
    "class-archive": Entry(
        "seriatim.cli.class_archive:class_archive", "Once after installing: let Spark start sooner."
    ),
}


class LazyGroup(click.Group):
    """A group that lists commands from `COMMANDS` without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the table's order."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None when there is no such command."""
        del ctx
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, attribute = entry.target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.target} is not a click command")
        for one in _with_subcommands(command):
            name_variables(one)
            refuse_other_bytes(one)
            keep_examples(one)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in `--help`."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


def _with_subcommands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            yield from _with_subcommands(subcommand)


def name_variables(command: click.Command) -> None:
    """Give every option of a command its environment variable, but for those that refuse one."""
    for parameter in command.params:
        long_names = [name for name in parameter.opts if name.startswith("--")]
        if not isinstance(parameter, click.Option) or not parameter.allow_from_autoenv:
            continue
        if long_names and parameter.expose_value:
            if parameter.envvar is None:
                parameter.envvar = "SERIATIM_" + long_names[0].removeprefix("--").replace("-", "_").upper()
            parameter.show_envvar = True


def refuse_other_bytes(command: click.Command) -> None:
    """Have every text that a command takes be UTF-8, but for what says itself that it takes more."""
    for parameter in command.params:
        if parameter.type is click.STRING:
            parameter.type = TEXT


def keep_examples(command: click.Command) -> None:
    r"""Let click leave lines as they are where a help text says so by a line of `\b`, without a control character in the source."""
    command.help = (command.help or "").replace("\\b\n", "\b\n")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="seriatim")
def seriatim() -> None:
    """Records in absolute order: run the servers, send, read, capture, replay, compare."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's); answers the exit code. Messages go to standard error."""
    stdout, stderr = sys.stdout, sys.stderr
    code = exits.DONE
    # A command tells a person in its own words what goes wrong; a log, once it is started, tells it too.
    logging.getLogger("kazoo").setLevel(logging.ERROR)
    logging.getLogger("seriatim.producer").addFilter(_is_told_nowhere_else)
    try:
        result = _result(arguments)
        code = result if isinstance(result, int) else exits.DONE
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Nothing is wrong, and an answer that was found stands.
        _discard_output()
    except SystemExit:
        if sys.stdout is stdout:
            raise
        # click found that nobody reads our output, put a wrapper around it, and ends with 1, which means "no" here.
        sys.stdout, sys.stderr = stdout, stderr
        _discard_output()
    except (KeyboardInterrupt, click.Abort) as error:
        _discard_output()  # else the interpreter's last flush would wait for whoever reads slowly, or not at all
        return exits.exit_code(error)
    except Exception as error:
        code = exits.exit_code(error)
        _say(error, code)
        if isinstance(error, OSError):
            _discard_output()
    return code


def _result(arguments: Sequence[str] | None) -> object:
    """What a command answers. What it logged is written before anything is said of its end, or its output discarded."""
    try:
        return seriatim.main(args=arguments, prog_name="seriatim", standalone_mode=False)
    finally:
        log.flush()


def _is_told_nowhere_else(record: logging.LogRecord) -> bool:
    """A filter for a library's log: a trace is, and all where there is a log."""
    return record.exc_info is not None or bool(logging.getLogger().handlers)


def _say(error: Exception, code: int) -> None:
    """Past standard error's buffer: who takes nothing, also of a server's log, doesn't keep the process from its end."""
    said = io.StringIO()
    with redirect_stderr(said):
        _explain(error, code)
    standard_streams.say(said.getvalue().removesuffix("\n"))


def _explain(error: Exception, code: int) -> None:
    if isinstance(error, click.ClickException):
        error.show()
    elif code == exits.DEFECT:
        traceback.print_exc()
    elif isinstance(error, OSError):
        click.echo(
            f"Error: {error.filename}: {error.strerror}" if error.filename else f"Error: {error.strerror}", err=True
        )
    else:
        click.echo(f"Error: {exits.told(error)}", err=True)


def _discard_output() -> None:
    """Keep the interpreter's own last flush quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Told(io.FileIO):
    """Where a person is told what goes on: that nobody takes it ends no command, and keeps none from going on, nor from its end."""

    def __init__(self, descriptor: int, mode: str, *, closefd: bool = True) -> None:
        super().__init__(descriptor, mode, closefd)
        self._taker = Taker(self)

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            self._taker.write(memoryview(data))
        return memoryview(data).nbytes


def _prepare_streams() -> None:
    """What whoever started us has closed leads nowhere.

    Else the next file to be opened, such as a broker's data, would take its number, and be written into by libraries that tell a
    person something.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    # Buffered, also where PYTHONUNBUFFERED is set, as in containers: else a signal, or a full disk, would have a write done in part,
    # and nobody told, and `consume` would commit what wasn't printed.
    encoding = "utf-8" if sys.stdout is None else sys.stdout.encoding  # which may lack what a help text, or a name, has
    sys.stdout = os.fdopen(1, "w", encoding=encoding, errors="backslashreplace", closefd=False)
    told = io.BufferedWriter(_Told(2, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(told, encoding=sys.stdout.encoding, errors="backslashreplace", line_buffering=True)


def main() -> NoReturn:
    """The command, and what goes before it; `start` is the entry point."""
    _prepare_streams()
    # gRPC's core would tell on standard error of connections that end, on threads of its own: who takes nothing keeps them, and the process
    # from its end. What is wrong a call's status says, too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    is_heeded = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if is_heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = run()
    except KeyboardInterrupt:  # another one, while the last word was said
        code = exits.INTERRUPTED
    if is_heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in `start`: nothing is left to be undone
    sys.exit(code)


if __name__ == "__main__":
    main()
