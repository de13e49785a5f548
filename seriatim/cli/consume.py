"""`seriatim consume`: a queue's records in order, on standard output."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from seriatim.cli.foreground import on_signals
from seriatim.cli.health import answering
from seriatim.cli.options import (
    Finite,
    connect_timeout_option,
    coordinator_option,
    service_options,
    session_timeout_option,
)
from seriatim.cli.pipes import is_output_read
from seriatim.cli.subscription import POSITION, seek_existing, standing
from seriatim.protocol import log, standard_streams

if TYPE_CHECKING:
    from seriatim.consumer import Consumer
    from seriatim.protocol.record import Record

_POLL_RECORDS = 10_000
_POLL_S = 0.1
_SILENCE_S = 1.0
"""Who waits longer than this is told what for."""
_NOTHING_YET = "the next link"
_NOTHING_IN_IT = "to be opened"
"""A link of which that is waited for was granted to nobody so far."""
_MORE = "more records, or to be told where the queue ends"
_ASKED_AGAIN_S = 0.5
_ASK_TIMEOUT_S = 2.0


@click.command(short_help="Print a queue's records in order.")
@click.option("--queue", required=True, metavar="NAME", help="Queue to read.")
@click.option("--subscription", default="default", show_default=True, metavar="NAME", help="Made where it isn't there.")
@click.option(
    "--from",
    "start",
    type=POSITION,
    metavar="POSITION",
    help="earliest, latest or an offset. A subscription that is there is moved by it, at each start, also past what is yet to be read. [default: where it stands; of a new one earliest]",
)
@click.option("--max", "max_records", type=click.IntRange(min=1), metavar="N", help="Stop after so many records.")
@click.option(
    "--idle-exit",
    type=Finite(min=0),
    metavar="SECONDS",
    help="Once elected, stop when no record came for so long and the cluster says that all are read. Ends with 3 where some may be left that can't be read now, or where nobody can tell; that is waited for as long as --connect-timeout says.",
)
@click.option("--commit/--no-commit", "is_committing", default=True, help="Commit what was printed.  [default: commit]")
@click.option("--json", "is_json", is_flag=True, help="One JSON object a record, instead of its value.")
@coordinator_option
@connect_timeout_option
@session_timeout_option
@service_options
def consume(
    *,
    queue: str,
    subscription: str,
    start: str | None,
    max_records: int | None,
    idle_exit: float | None,
    is_committing: bool,
    is_json: bool,
    coordinator: str,
    connect_timeout: float,
    session_timeout_ms: int,
    log_to: str | None,
    health_listen: str | None,
) -> None:
    """Print a queue's records in order, one a line.

    Of all that consume one subscription one is elected, the others stand by. What was printed and flushed is committed,
    at latest when the command ends, also by a signal or because nobody reads its output any more. That counts what lies in a
    pipe as printed, whoever leaves it unread: say --max N, not `| head -n N`.
    """
    from seriatim.consumer import Consumer
    from seriatim.protocol import errors

    if log_to:
        log.start_logging(to=log_to)
    stopping = _Stopping()
    with on_signals(stopping.ask, signal.default_int_handler):
        if start is not None:
            moved = asyncio.run(seek_existing(coordinator, queue, subscription, start, connect_timeout))
            if moved is not None:  # with whoever reads it, and its earlier position is kept nowhere
                click.echo(f"moved {subscription} to {start}: {standing(moved)}", err=True)
                start = None
        consumer = Consumer(
            coordinator,
            queue,
            subscription,
            start=start or "earliest",
            auto_commit_ms=1000 if is_committing else None,
            session_timeout_s=session_timeout_ms / 1000,
            connect_timeout_s=connect_timeout,
        )
        answers = answering(
            health_listen,
            is_ready=lambda: consumer.is_connected,
            is_elected=lambda: consumer.is_elected,
            is_live=lambda: consumer.is_live,
        )
        with consumer, answers:
            stopping.is_gentle = True
            waiting = _Waiting(consumer, idle_exit, connect_timeout)
            is_all_printed = _print(consumer, _json if is_json else _plain, stopping, max_records, waiting)
            if is_committing and is_all_printed:
                _commit(consumer)
    if waiting.blocked_by:
        raise errors.Waiting(
            f"nothing came for {waiting.blocked_s:g} s, and there may be more: waiting for {waiting.blocked_by}"
        )


class _Stopping:
    """Whether a signal asked to stop. Before reading began, and at the second one, it interrupts."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_gentle = False

    def ask(self) -> None:
        """In a signal's handler."""
        if self.is_asked or not self.is_gentle:
            raise KeyboardInterrupt
        self.is_asked = True


def _print(
    consumer: Consumer,
    formatted: Callable[[list[Record]], bytes],
    stopping: _Stopping,
    max_records: int | None,
    waiting: _Waiting,
) -> bool:
    """Print until it is enough; False where the reader of the output has gone, before it took all that was handed out.

    The consumer counts what `poll` returned as done when `poll` is called again: after it was written and flushed.
    """
    output = sys.stdout.buffer
    left = max_records
    while not stopping.is_asked and left != 0:
        records = consumer.poll(_POLL_RECORDS if left is None else min(left, _POLL_RECORDS), _POLL_S)
        if not records:
            if not is_output_read():
                return False
            if waiting.is_over():
                break
            continue
        waiting.ended()
        text = formatted(records)
        try:
            with standard_streams.undivided():
                output.write(text)
                output.flush()
        except BrokenPipeError:
            # Keep the interpreter's own last flush quiet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return False
        if left is not None:
            left -= len(records)
    return True


class _Waiting:
    """Counts how long no record came while elected, and says on standard error what is waited for.

    Silence is no proof that all is read: when it has lasted, that is asked for, again and again, for as long as a coordinator is looked for.
    `blocked_by`: what keeps records from being read, where it is enough because of that, and for how long.
    """

    def __init__(self, consumer: Consumer, idle_exit_s: float | None, connect_timeout_s: float) -> None:
        self._consumer = consumer
        self._idle_exit_s = idle_exit_s
        self._connect_timeout_s = connect_timeout_s
        self._ungranted_s = 0.0
        self._silent_s = 0.0
        self._begin_anew()
        self._said = ""
        self.blocked_by = ""
        self.blocked_s = 0.0

    def _begin_anew(self) -> None:
        self._idle_s = 0.0
        self._ask_at_s = self._idle_exit_s or 0.0

    def ended(self) -> None:
        self._silent_s = 0.0
        self._begin_anew()
        if self._said:
            self._said = ""
            click.echo("reading", err=True)

    def is_over(self) -> bool:
        """Called each `_POLL_S` without records. Raises UnknownQueue where the queue was deleted."""
        consumer, idle_exit_s = self._consumer, self._idle_exit_s
        self._silent_s += _POLL_S
        reason = consumer.waiting_for
        if reason != _NOTHING_YET:
            self._say(reason)
        if not consumer.is_elected:
            self._begin_anew()
            self._ungranted_s = self._ungranted_s + _POLL_S if consumer.is_first_in_line else 0.0
            # A grant may take a moment, as in a switch.
            if idle_exit_s is None or self._ungranted_s < max(idle_exit_s, self._connect_timeout_s):
                return False
            return self._gave_up(reason, max(idle_exit_s, self._connect_timeout_s))
        self._ungranted_s = 0.0
        self._idle_s += _POLL_S
        if idle_exit_s is None or self._idle_s < self._ask_at_s:
            return False
        return self._is_enough(idle_exit_s)

    def _is_enough(self, idle_exit_s: float) -> bool:
        from seriatim.protocol.errors import WorldError

        asked_s, more = time.monotonic(), _MORE
        try:
            if self._consumer.is_at_end(timeout_s=_ASK_TIMEOUT_S):
                return True
        except WorldError as error:
            more = f"{_MORE}: {error.message}"
        self._idle_s += time.monotonic() - asked_s
        reason = self._consumer.waiting_for
        is_more_likely = reason.startswith(_NOTHING_YET) or _NOTHING_IN_IT in reason
        if reason and not is_more_likely:
            return self._gave_up(reason, idle_exit_s)
        if self._idle_s >= idle_exit_s + self._connect_timeout_s:
            return self._gave_up(more, idle_exit_s + self._connect_timeout_s)
        self._ask_at_s = self._idle_s + _ASKED_AGAIN_S
        self._say(more)
        return False

    def _gave_up(self, reason: str, after_s: float) -> bool:
        self.blocked_by, self.blocked_s = reason, after_s
        return True

    def _say(self, reason: str) -> None:
        if reason and reason != self._said and self._silent_s >= _SILENCE_S:
            self._said = reason
            click.echo(f"{'waiting for' if self._consumer.is_elected else 'standing by:'} {reason}", err=True)


def _commit(consumer: Consumer) -> None:
    """All of it was printed and flushed. Who reads now instead prints it again; who moved the subscription wants it elsewhere, or nowhere."""
    from seriatim.protocol.errors import (
        Fenced,
        NotElected,
        OlderGeneration,
        UnknownQueue,
        UnknownSubscription,
        WorldError,
    )

    try:
        consumer.commit(timeout_s=5)
    except (Fenced, NotElected, OlderGeneration, UnknownQueue, UnknownSubscription):
        pass
    except WorldError as error:
        click.echo(f"the last records may be printed again: {error}", err=True)


def _plain(records: list[Record]) -> bytes:
    return b"\n".join([*(record.value for record in records), b""])


def _json(records: list[Record]) -> bytes:
    return "".join([json.dumps(_as_json(record)) + "\n" for record in records]).encode()


def _as_json(record: Record) -> dict[str, object]:
    return {
        "queue": record.queue,
        "offset": record.offset,
        "epoch": record.epoch,
        "index": record.index,
        "source": record.source,
        "seq": record.seq,
        **_text("key", record.key),
        **_text("value", record.value),
        "timestamp": record.timestamp_ms,
        "headers": [{"name": name, **_text("value", value)} for name, value in record.headers],
    }


def _text(name: str, content: bytes | None) -> dict[str, object]:
    """Bytes as text where they are UTF-8, else in base64 under another name."""
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content).decode()}
