"""`seriatim capture`: a database's log into a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from seriatim.cli import exits
from seriatim.cli.foreground import on_signals
from seriatim.cli.health import answering
from seriatim.cli.options import (
    Names,
    connect_timeout_option,
    coordinator_option,
    service_options,
    session_timeout_option,
)
from seriatim.cli.pipes import Teller
from seriatim.protocol import log

if TYPE_CHECKING:
    from seriatim.producer.sources.postgres.capture import SnapshotProgress
    from seriatim.producer.sources.postgres.producing import CaptureSender

_REPORT_EVERY_S = 1.0
_MAX_BLOCK_S = 0.5


@click.group(short_help="Send a database's log to a queue.")
def capture() -> None:
    r"""Every committed change becomes a record, in commit order, once.

    \b
    Example:
      seriatim capture postgres --dsn postgresql://east/shop --queue orders
    """


@capture.command(short_help="Capture a PostgreSQL database.")
@click.option(
    "--dsn", required=True, metavar="DSN", help="The database, by a user who may replicate; wal_level is logical."
)
@click.option("--queue", required=True, metavar="NAME", help="Queue to send to; it must be there.")
@click.option(
    "--tables", type=Names(), metavar="S.T,…", help="Tables to capture, schema.table. [default: all of the database]"
)
@click.option(
    "--slot", metavar="NAME", help="Replication slot, made if missing; one for each queue. [default: seriatim_QUEUE]"
)
@click.option("--publication", metavar="NAME", help="Made if missing. [default: as the slot]")
@click.option("--name", help="This instance's name in the election. [default: host, process and chance]")
@session_timeout_option
@connect_timeout_option
@coordinator_option
@service_options
@click.option(
    "--json", "is_json", is_flag=True, help="One JSON object a line: waiting, elected, snapshot, progress, stopped."
)
def postgres(
    *,
    dsn: str,
    queue: str,
    tables: tuple[str, ...] | None,
    slot: str | None,
    publication: str | None,
    name: str | None,
    session_timeout_ms: int,
    connect_timeout: float,
    coordinator: str,
    log_to: str | None,
    health_listen: str | None,
    is_json: bool,
) -> int:
    r"""Capture a PostgreSQL database's log into a queue: first a snapshot, then each change, without gap or repeat.

    Several may run with one slot: one is elected, the others stand by. Runs until Ctrl-C or SIGTERM. The slot keeps the
    database's log until it is captured: drop the slot when you won't come back.

    \b
    Example:
      seriatim capture postgres --dsn postgresql://east/shop --queue orders --tables public.items,public.customers
    """
    try:
        from seriatim.producer.sources.postgres.capture import PostgresCapture
        from seriatim.producer.sources.postgres.core.naming import default_slot
        from seriatim.producer.sources.postgres.producing import CaptureSender
    except ModuleNotFoundError as error:
        raise click.ClickException(exits.not_installed(error, "postgres")) from error
    from seriatim.producer import Producer

    slot = slot or default_slot(queue)
    if log_to:
        log.start_logging(to=log_to)
    report = _Report(queue, slot, is_json=is_json, is_log=log_to is not None)
    producer = Producer(
        coordinator, queue, name, max_block_s=_MAX_BLOCK_S, session_timeout_s=session_timeout_ms / 1000
    )  # fmt: skip
    try:
        sender = CaptureSender(
            producer, on_elected=report.elected, on_waiting=report.waiting, connect_timeout_s=connect_timeout
        )
        running = PostgresCapture(
            dsn, slot, publication or slot, tables or (), sender,
            on_progress=report.snapshot, on_waiting=report.waiting,
        )  # fmt: skip
        answers = answering(
            health_listen,
            is_ready=lambda: producer.is_connected,
            is_elected=lambda: producer.is_elected and sender.is_elected(),
            is_live=lambda: producer.is_live,
        )
        report.on_failure = running.stop
        with on_signals(running.stop), report.regularly(sender), answers:
            running.run()
    finally:
        # What isn't acknowledged is found by the next capture's resume point.
        producer.abort()
    report.stopped(sender.sent)
    if report.failure is not None:
        raise report.failure
    return exits.DONE


class _Report:
    """What the command tells, on several threads. `failure`: why nothing more can be told; `on_failure` is called then."""

    def __init__(self, queue: str, slot: str, *, is_json: bool, is_log: bool) -> None:
        self._queue = queue
        self._slot = slot
        self._teller = Teller("capture", is_json=is_json, is_log=is_log)
        self.failure: OSError | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def _tell(self, event: str, text: str, **keys: object) -> None:
        if self.failure is None:
            try:
                self._teller.tell(event, text, queue=self._queue, slot=self._slot, **keys)
            except OSError as error:
                self.failure = error
                self.on_failure()

    def waiting(self, reason: str) -> None:
        self._tell("waiting", f"waiting: {reason}", reason=reason)

    def elected(self, token: int) -> None:
        self._tell("elected", f"elected with token {token}: capturing slot {self._slot}", token=token)

    def snapshot(self, progress: SnapshotProgress) -> None:
        table = f"{progress.schema}.{progress.table}"
        of = f" of about {progress.estimated_rows:,}" if progress.estimated_rows > 0 else ""
        self._tell(
            "snapshot",
            f"snapshot of {table}: {progress.rows:,}{of} rows",
            table=table,
            rows=progress.rows,
            estimated_rows=max(0, progress.estimated_rows),
        )

    def stopped(self, records: int) -> None:
        self._tell("stopped", f"stopped: {records:,} records sent", records=records)

    @contextmanager
    def regularly(self, sender: CaptureSender) -> Iterator[None]:
        """Tell how far it is, about once a second, while that changes."""
        ended = threading.Event()

        def watch() -> None:
            told, told_at_s, open_before = 0, time.monotonic(), 0
            while not ended.wait(_REPORT_EVERY_S):
                sent, unacknowledged, now_s = sender.sent, sender.unacknowledged, time.monotonic()
                if sent != told or unacknowledged != open_before:
                    rate = round((sent - told) / (now_s - told_at_s))
                    self._tell(
                        "progress",
                        f"{sent:,} records sent, {rate:,} a second, {unacknowledged:,} on their way",
                        records=sent,
                        records_per_s=rate,
                        unacknowledged=unacknowledged,
                    )
                told, told_at_s, open_before = sent, now_s, unacknowledged

        watcher = threading.Thread(target=watch, name="capture report", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
