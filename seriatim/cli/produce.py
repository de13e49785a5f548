"""`seriatim produce`: lines become records."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TypeGuard

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from seriatim.cli import exits
from seriatim.cli.acknowledgements import Acknowledgements
from seriatim.cli.foreground import on_signals
from seriatim.cli.options import connect_timeout_option, coordinator_option, session_timeout_option
from seriatim.producer import Producer
from seriatim.producer.core.first_answer import FirstAnswer
from seriatim.producer.sources.lines import Line, chunks, parsed
from seriatim.protocol.errors import (
    DeadlineOver,
    InvalidArgument,
    NotElected,
    OutcomeUnknown,
    RecordTooLarge,
    SeqNotRising,
    SeriatimError,
    Unreachable,
    Waiting,
    WorldError,
)

_LOOK_EVERY_S = 0.5
_LAST_FLUSH_S = 10
_Parse = Callable[[bytes, int], Line]
"""Of a line and its number."""


class _News:
    """Wakes whoever waits for input: a pipe, written from a signal handler or from the producer's thread."""

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def tell(self) -> None:
        """Something happened. A full pipe is told enough; a closed one has nobody waiting."""
        with contextlib.suppress(OSError):
            os.write(self._writing, b"x")

    def close(self) -> None:
        os.close(self._writing)
        os.close(self.descriptor)


class _Counts:
    """How far a run is, as of the moment in which it is drawn: the last acknowledgements come when nothing more is read."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __rich__(self) -> Text:
        return Text(f"{self._run.read:,} sent, {self._run.acknowledgements.acknowledged:,} acknowledged")


class _Run:
    """One run of the command."""

    def __init__(
        self, producer: Producer, acknowledgements: Acknowledgements, news: _News, first_answer: FirstAnswer
    ) -> None:
        self.producer = producer
        self._first_answer = first_answer
        self.acknowledgements = acknowledgements
        self.news = news
        self.read = 0
        self.sent = 0
        self.is_at_end = False
        self.is_stopping = False
        self.status: Status | None = None
        self._said = ""
        self._told: set[object] = set()
        self._told_at = -1

    def stop(self) -> None:
        """Read no more, flush. In a signal's handler."""
        self.is_stopping = True
        self.news.tell()

    def say(self, text: str) -> None:
        """Tell it, unless it is what was told last."""
        if text == self._said:
            return
        self._said = text
        if self.status is not None:
            self.status.update(Text(text))
        else:
            click.echo(text, err=True)

    def count(self) -> None:
        """Show how far it is, on a terminal, until something is said."""
        if self.status is not None:
            self._said = ""
            self.status.update(_Counts(self))

    def waits(self, reason: object) -> None:
        """Tell why, once of each reason until more is acknowledged."""
        if self._told_at != self.acknowledgements.acknowledged:
            self._told_at, self._said = self.acknowledgements.acknowledged, ""
            self._told.clear()
        if reason not in self._told:
            self._told.add(reason)
            self.say(f"waiting: {reason}")

    def may_go_on(self) -> bool:
        """False where the command is to stop. Raises WorldError where acknowledgements can't be logged."""
        if self.acknowledgements.failure is not None:
            raise self.acknowledgements.failure
        return not self.is_stopping

    def wait_until_elected(self) -> bool:
        """False where the command is to stop instead. Raises Unreachable where nobody answers, and nobody ever did."""
        while self.may_go_on():
            try:
                elected = self.producer.wait_until_elected(_LOOK_EVERY_S)
            except (NotElected, Waiting, Unreachable) as problem:
                is_connected, now_s = self.producer.is_connected, time.monotonic()
                if self._first_answer.is_overdue(problem, is_connected=is_connected, now_s=now_s):
                    raise
                self.say(f"waiting to be elected: {problem.message}")
                continue
            self._first_answer.came()
            self.say(f"elected with token {elected.token}")
            return True
        return False

    def send(self, line: Line) -> bool:
        """Send one line, however long that takes; False where the command is to stop first."""
        while self.may_go_on():
            if not self.acknowledgements.has_room(_LOOK_EVERY_S):
                continue
            try:
                handle = self.producer.send(line.value, line.key, seq=line.seq)
            except NotElected:
                if not self.go_on():
                    return False
            except (Waiting, Unreachable, DeadlineOver) as problem:
                self.waits(problem.message)
            else:
                self.acknowledgements.add(handle, line)
                return True
        return False

    def settle(self) -> bool:
        """Wait until it is known what came of all that was sent. False where the command is to stop first."""
        settled = self.acknowledgements.settling()
        while not settled.wait(_LOOK_EVERY_S):  # elected again meanwhile, with records on their way of that term
            if not self.may_go_on():
                return False
        return True

    def go_on(self) -> bool:
        """After a deposal: seqs of the user's go on from the resume point. False where nothing can go on."""
        if not self.settle():
            return False
        unknown = self.acknowledgements.unknown
        if unknown and unknown[0].seq is None:
            return False
        if not self.wait_until_elected():
            return False
        again = list(unknown)
        unknown.clear()
        for at, line in enumerate(again):
            if not self.send(line):
                unknown.extend(again[at:])
                return False
        return True


@click.command()
@click.option("--queue", required=True, help="Queue to send to.")
@coordinator_option
@click.option(
    "--name",
    help="The application's name, the same for all its instances, and the source of its records. [default: host, process "
    "and chance; the source is then `producer`]",
)
@click.option(
    "--key-separator",
    type=click.UNPROCESSED,
    metavar="TEXT",
    help="Text between a line's key and its value, of any bytes. [default: lines have no key]",
)
@click.option(
    "--with-seq",
    is_flag=True,
    help="Each line starts with its seq, a number that rises, and a tab. Only for a --name that never sent without it: "
    "seqs that are given by themselves are larger, so that these lines would count as stored before.",
)
@click.option(
    "--ack-log",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for `seq epoch index offset` of each acknowledged record.",
)
@click.option("--compression", type=click.Choice(["zstd"]), help="Compress batches.")
@connect_timeout_option
@session_timeout_option
@click.option("--json", "as_json", is_flag=True, help="Print a summary as one object at the end.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path), required=False)
@click.pass_context
def produce(
    context: click.Context,
    queue: str,
    coordinator: str,
    name: str | None,
    key_separator: str | None,
    with_seq: bool,
    ack_log: Path | None,
    compression: str | None,
    connect_timeout: float,
    session_timeout_ms: int,
    as_json: bool,
    file: Path | None,
) -> None:
    """Send lines of FILE, or of standard input, as records to a queue, in order.

    Waits until this instance is elected. With --with-seq a deposed instance goes on from the resume point when it is
    elected again; else it ends then, because nobody can tell whether the last records were stored.
    """
    if with_seq and name is None:
        raise click.UsageError("--with-seq needs --name: the seqs belong to it")
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty")
    separator = None if key_separator is None else os.fsencode(key_separator)
    parse = partial(parsed, key_separator=separator, has_seq=with_seq)
    started_s, interruption = time.monotonic(), None
    with contextlib.ExitStack() as stack:
        log = None if ack_log is None else _opened_log(ack_log)
        news = stack.enter_context(contextlib.closing(_News()))
        acknowledgements = stack.enter_context(contextlib.closing(Acknowledgements(log, news.tell)))
        producer = Producer(
            coordinator, queue, name, compression="zstd" if compression else None,
            max_block_s=_LOOK_EVERY_S, session_timeout_s=session_timeout_ms / 1000, on_deposed=lambda _: news.tell(),
        )  # fmt: skip
        stack.callback(producer.abort)
        run = _Run(producer, acknowledgements, news, FirstAnswer(time.monotonic() + connect_timeout))
        failure = None
        try:
            failure = _produce(run, file, parse)
        except KeyboardInterrupt as error:
            interruption = error
    failure = failure or acknowledgements.failure
    if as_json or failure is None or run.read:  # else the error says it all
        _summarise(run, queue, producer.name, time.monotonic() - started_s, as_json=as_json)
    if interruption is not None:
        raise interruption
    if failure is not None:
        raise failure
    if _has_end(file) and not run.is_at_end:
        run.say(f"Stopped before the end of {_called(file)}: line {run.sent + 1} and those behind it weren't sent")
        context.exit(exits.REFUSED)
    if run.acknowledgements.acknowledged < run.read:
        context.exit(exits.REFUSED)


def _produce(run: _Run, file: Path | None, parse: _Parse) -> SeriatimError | None:
    """Send everything; the error that ended it, if one did. What was sent is flushed, until a second signal: raises KeyboardInterrupt."""
    with on_signals(run.stop, signal.default_int_handler):
        failure = _send(run, file, parse)
        if run.producer.elected is None:
            return failure
        waits_for = run.read - run.acknowledgements.acknowledged
        if run.is_stopping and waits_for:
            run.say(f"stopping: waiting up to {_LAST_FLUSH_S} s for {waits_for:,} records")
        try:
            run.producer.flush(_LAST_FLUSH_S)
        except OutcomeUnknown:
            pass  # the summary tells of those that were not sent again since
        except SeriatimError as error:
            return failure or error
    return failure


def _send(run: _Run, file: Path | None, parse: _Parse) -> SeriatimError | None:
    try:
        with _showing(run, is_typed=_is_typed(file)), _opened(file) as descriptor:
            if run.wait_until_elected():
                _send_lines(run, chunks(descriptor, run.news.descriptor), parse)
                _finish(run)
    except SeriatimError as error:
        return error
    except OSError as error:
        return WorldError(f"can't read {_called(file)}: {error.strerror}")
    return None


def _send_lines(run: _Run, incoming: Iterator[list[bytes]], parse: _Parse) -> None:
    for texts in incoming:
        # Nothing to read, but news: lines that a deposal left unknown are sent again before any that comes later.
        if not texts and not (run.may_go_on() and run.go_on()):
            return
        for text in texts:
            line = parse(text, run.read + 1)
            run.read += 1
            try:
                is_sent = run.send(line)
            except (RecordTooLarge, SeqNotRising) as error:
                raise type(error)(f"line {run.read}: {error.message}", **error.details) from error
            if not is_sent:
                return
            run.sent += 1
        run.count()
    run.is_at_end = True


def _finish(run: _Run) -> None:
    """Wait for the last acknowledgements; a deposal meanwhile is lived through as while sending."""
    while not run.is_stopping:
        try:
            run.producer.flush(_LOOK_EVERY_S)
        except DeadlineOver as error:
            if "reason" in error.details:
                run.waits(error.details["reason"])
            continue
        except OutcomeUnknown:
            pass  # handles tell of each
        if not (run.settle() and run.acknowledgements.unknown and run.go_on()):
            return


def _opened_log(path: Path) -> IO[str]:
    """To go on behind what is there; a line that a full disk, or a kill, has cut stays one of its own."""
    try:
        log = path.open("a")
        if path.is_file() and _is_cut(path):
            log.write("\n")
    except OSError as error:
        raise InvalidArgument(f"can't write {path}: {error.strerror}") from error
    return log


def _is_cut(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as log:  # one that is empty, or may only be written
        log.seek(-1, os.SEEK_END)
        return log.read() != b"\n"
    return False


def _is_file(file: Path | None) -> TypeGuard[Path]:
    """False for standard input."""
    return file is not None and str(file) != "-"


def _has_end(file: Path | None) -> bool:
    """False for a terminal or a pipe: whoever writes there goes on until it is told that nobody reads."""
    return _is_file(file) or (sys.stdin is not None and stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode))


def _called(file: Path | None) -> str:
    return str(file) if _is_file(file) else "standard input"


@contextmanager
def _opened(file: Path | None) -> Iterator[int]:
    """Its descriptor. A named pipe that nobody writes to yet is opened at once: Python waits there whatever signal comes, `chunks` doesn't."""
    if not _is_file(file):
        if sys.stdin is None:
            raise InvalidArgument("standard input is closed: name a FILE, or give it something to read")
        yield sys.stdin.fileno()
        return
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidArgument(f"can't read {file}: {error.strerror}") from error
    try:
        os.set_blocking(descriptor, True)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_typed(file: Path | None) -> bool:
    return not _is_file(file) and sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def _showing(run: _Run, *, is_typed: bool) -> Iterator[None]:
    """Shows on a terminal how it stands; not where somebody types there, who would be written over."""
    console = Console(stderr=True)
    if is_typed or not console.is_terminal:
        yield
        return
    with console.status("connecting") as status:
        run.status = status
        try:
            yield
        finally:
            run.status = None


def _summarise(run: _Run, queue_name: str, name: str, seconds: float, *, as_json: bool) -> None:
    done = run.acknowledgements
    summary = {
        "queue": queue_name,
        "name": name,
        "read": run.read,
        "acknowledged": done.acknowledged,
        "stored_before": done.stored_before,
        "unknown": len(done.unknown),
        "seconds": round(seconds, 3),
        "records_per_s": round(done.acknowledged / seconds) if seconds > 0 else 0,
    }
    if as_json:
        exits.answer(json.dumps(summary))
        return
    text = f"{done.acknowledged:,} of {run.read:,} records acknowledged in {seconds:.1f} s"
    if done.stored_before:
        text += f", {done.stored_before:,} of them stored before"
    if done.unknown:
        text += f"; {len(done.unknown):,} may have been stored or not: {done.why_unknown}"
    click.echo(text, err=True)
