"""The command `seriatim demo`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from seriatim.cli import exits
from seriatim.cli.demo import plan, verdict
from seriatim.cli.demo.errors import DemoFailed
from seriatim.cli.embedded.errors import EmbeddedError
from seriatim.cli.foreground import interruptible, say_ended, wait_for_signal
from seriatim.cli.options import Folder
from seriatim.protocol.errors import SeriatimError

if TYPE_CHECKING:
    from seriatim.cli.demo.stage import Stage


@click.command(short_help="The main job on this machine, under faults, with a verdict.")
@click.option("--seconds", type=click.IntRange(5, 3600), default=30, show_default=True, help="How long pgbench runs.")
@click.option("--clients", type=click.IntRange(1, 100), default=4, show_default=True, help="Clients of pgbench.")
@click.option(
    "--scale",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="How large pgbench's tables are: 100,000 accounts each.",
)
@click.option(
    "--rate", type=click.IntRange(0), default=200, show_default=True,
    help="Transactions a second at most; 0: as many as pgbench can. The default leaves room for the rest on two cores.",
)  # fmt: skip
@click.option("--faults/--no-faults", "has_faults", default=True, show_default=True, help="Kill processes meanwhile.")
@click.option(
    "--keep", "is_kept", is_flag=True, help="Afterwards leave everything running until Ctrl-C; keep the data."
)
@click.option(
    "--dir", "directory", type=Folder(),
    help="Where data and logs lie, and stay. [default: a temporary directory, removed at the end]",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="The last line is the verdict as one JSON object.")
def demo(
    *,
    seconds: int,
    clients: int,
    scale: int,
    rate: int,
    has_faults: bool,
    is_kept: bool,
    directory: Path | None,
    is_json: bool,
) -> int:
    """Capture a PostgreSQL database's log into a queue and replay it into another one, while processes are killed.

    Starts everything itself: ZooKeeper, two coordinators, three groups of two brokers, two PostgreSQL servers, two
    captures and a Spark job. pgbench loads the first database; the master in use, the elected capture, the Spark job and
    the elected coordinator are killed one after the other and started again. Then all tables are compared row by row and
    the queue's offsets are checked. Ends with 0 when all of it held, with 1 when not.

    How long sending stood still at each fault is measured by looking at the queue's committed end every 25 ms.
    """
    try:
        import psycopg

        from seriatim.cli.demo.run import Demo
        from seriatim.cli.demo.stage import Load, Stage
        from seriatim.cli.demo.view import chosen_view
        from seriatim.consumer.spark.engine import check_java
    except ModuleNotFoundError as error:
        raise click.ClickException(exits.not_installed(error, "demo")) from error
    check_java()
    began_s = time.monotonic()
    faults = plan.planned(seconds) if has_faults else ()
    report: dict[str, object]
    with interruptible(), Stage(directory, is_kept=is_kept) as stage, _logging_to(stage.supervisor.log_path("demo")):
        try:
            with chosen_view(began_s, is_json=is_json) as view:
                figures = Demo(stage, view, Load(seconds, clients, scale, rate), faults, began_s).run()
            report = figures.as_json()
            click.echo(verdict.as_text(figures), err=is_json)
        except KeyboardInterrupt:
            stage.keeps_logs = False
            click.echo("interrupted: stopping everything", err=True)
            raise
        except BrokenPipeError:
            stage.keeps_logs = False
            click.echo("nobody reads on: stopping everything, without a verdict", err=True)
            return exits.ANSWER_IS_NO
        except (DemoFailed, EmbeddedError, SeriatimError, psycopg.Error, OSError) as error:
            report = verdict.failed(str(error))
            click.echo(f"the demo failed: {error}", err=True)
        is_good = report["verdict"] == verdict.IDENTICAL
        stage.keeps_logs = not is_good
        if not is_good:
            click.echo(f"logs: {stage.directory / 'logs'}", err=True)
        if is_kept:
            _keep(stage)
    if is_json:
        exits.answer(json.dumps(report))
    return exits.DONE if is_good else exits.ANSWER_IS_NO


def _keep(stage: Stage) -> None:
    """Leave running what runs until a signal, and say how to look around.

    A process that ends meanwhile ends nothing else: a replay does where somebody who looks around makes a table in east.
    """
    from seriatim.cli.demo.stage import QUEUE, REPLAY

    if stage.ended():
        click.echo(f"nothing is kept running; data: {stage.directory}", err=True)
        return
    coordinators, east, west = stage.cluster.coordinators, stage.east.dsn(), stage.west.dsn()
    click.echo(
        "\n".join([
            "Everything is left running until Ctrl-C. To look around:",
            f"  export SERIATIM_COORDINATOR={coordinators}",
            "  seriatim status east-log --watch",
            "  seriatim consume --queue east-log --subscription look --json --max 10",
            "  seriatim group list",
            f"  psql {east}",
            f"  psql {west}",
            f"  seriatim verify --source {east} --target {west}",
            f"  logs and data: {stage.directory}",
        ]),
        err=True,
    )  # fmt: skip

    def tell(name: str) -> None:
        say_ended(name, stage.supervisor.log_end(name))
        if name == REPLAY:
            click.echo(f"to start it again: seriatim replay --queue {QUEUE} --target {west}", err=True)

    try:
        wait_for_signal(stage.ended, tell)
    except KeyboardInterrupt:
        click.echo("stopping", err=True)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """What the library logs goes beside the children's logs: the terminal shows the demo."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
