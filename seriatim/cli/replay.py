"""`seriatim replay`: apply a queue of captured changes to another database, with Spark."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from seriatim.cli import exits
from seriatim.cli.foreground import on_signals
from seriatim.cli.health import answering
from seriatim.cli.options import Finite, Setting, coordinator_option, service_options, session_timeout_option
from seriatim.cli.pipes import Teller
from seriatim.protocol import log

if TYPE_CHECKING:
    from seriatim.consumer.spark.progress import Event


@click.command(short_help="Apply a captured database log to another database.")
@click.option("--queue", required=True, metavar="QUEUE", help="Queue that a capture fills.")
@click.option("--target", required=True, metavar="DSN", help="PostgreSQL database to apply to; it needs the tables.")
@coordinator_option
@click.option(
    "--subscription",
    default="replay",
    show_default=True,
    metavar="NAME",
    help="Of those with one name one is elected; it also names the position in the target.",
)
@click.option(
    "--master",
    default="local[*]",
    show_default=True,
    metavar="URL",
    help="Where Spark runs, such as spark://HOST:7077.",
)
@click.option(
    "--checkpoint",
    default="",
    metavar="DIR",
    help="Folder for Spark's checkpoints, on this machine; the target alone says where to go on. [default: a temporary one]",
)
@click.option(
    "--trigger-ms",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="A micro-batch starts at most so often.",
)
@click.option(
    "--max-records",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="A micro-batch has at most so many records.",
)
@click.option(
    "--until-idle",
    "until_idle_s",
    type=Finite(min=0.1),
    metavar="SECONDS",
    help="End when all is applied and nothing came for so long.",
)
@session_timeout_option
@click.option(
    "--spark-log",
    "spark_log_level",
    type=click.Choice(["off", "fatal", "error", "warn", "info"]),
    default="fatal",
    show_default=True,
    help="What Spark's driver logs to standard error; executors log on their workers.",
)
@click.option(
    "--spark-conf",
    type=Setting(),
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of Spark's, such as spark.cores.max=4; as often as there are some.",
)
@service_options
@click.option("--json", "is_json", is_flag=True, help="One JSON object a line: waiting, started, progress, stopped.")
def replay(
    *,
    coordinator: str,
    session_timeout_ms: int,
    spark_conf: tuple[tuple[str, str], ...],
    log_to: str | None,
    health_listen: str | None,
    is_json: bool,
    **others: Any,  # as ReplaySettings calls them
) -> int:
    """Apply a queue of captured changes to a PostgreSQL database, transaction by transaction, each exactly once.

    Goes on from the position that the target holds. Several may run: one is elected, the others stand by. Ends with 0
    on Ctrl-C or SIGTERM, after the micro-batch under way (a second one kills it); needs Java 17 or newer.
    """
    try:
        from seriatim.consumer.spark.apply.errors import BrokenStream, UnfitTarget
        from seriatim.consumer.spark.beginning import RecordsGone
        from seriatim.consumer.spark.replay import Replay
        from seriatim.consumer.spark.run import ReplaySettings
        from seriatim.consumer.spark.targets.errors import ApplyFailed, OtherJob, OtherQueue
    except ModuleNotFoundError as error:
        raise click.ClickException(exits.not_installed(error, "spark,postgres")) from error
    from seriatim.protocol.errors import Fenced

    settings = ReplaySettings(
        coordinators=coordinator,
        session_timeout_s=session_timeout_ms / 1000,
        spark_conf=dict(spark_conf),
        **others,
    )
    if log_to:
        log.start_logging(to=log_to)

    def answers() -> AbstractContextManager[object]:
        return answering(
            health_listen,
            is_ready=lambda: running.is_connected,
            is_elected=lambda: running.is_elected,
            is_live=lambda: running.is_live,
        )

    running = Replay(settings, reporter(is_json=is_json, is_log=log_to is not None), answers)

    try:
        with on_signals(running.stop):
            running.run()
    except (UnfitTarget, ApplyFailed, OtherJob, OtherQueue, BrokenStream, RecordsGone, Fenced) as error:
        # The command was right; somebody has to mend the target, and the message says how.
        raise click.ClickException(exits.told(error)) from error
    return exits.DONE


def reporter(*, is_json: bool, is_log: bool) -> Callable[[Event], None]:
    """Tells what a replay does, on any thread. Who doesn't take it is told nothing: the replay goes on."""
    teller = Teller("replay", is_json=is_json, is_log=is_log)
    return lambda event: teller.tell(type(event).__name__.lower(), as_text(event), **asdict(event))


def as_text(event: Event) -> str:
    """One line for a person."""
    from seriatim.consumer.spark.progress import Applying, Progress, Started, Stopped, Waiting

    match event:
        case Waiting(reason):
            return f"waiting: {reason}"
        case Started():
            return f"replaying queue {event.queue} from offset {event.offset:,} (token {event.token})"
        case Applying():
            return f"a large transaction: {event.offset:,} of {event.end:,} carried out, nothing of it to be seen before the end"
        case Progress():
            lag = "lag unknown" if event.lag_records is None else f"lag {event.lag_records:,} records"
            seconds = "" if event.lag_s is None else f", {event.lag_s:.2f} s"
            return (
                f"offset {event.offset:,}  {event.records:,} records, {event.changes:,} changes of "
                f"{event.transactions:,} transactions in {event.batch_s:.2f} s  {lag}{seconds}"
            )
        case Stopped():
            return f"stopped: {event.records:,} records, {event.changes:,} changes applied"
