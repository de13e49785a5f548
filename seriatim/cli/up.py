"""`seriatim up`: a whole development cluster in the foreground."""

from __future__ import annotations

import json
from pathlib import Path

import click

from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.cli.foreground import say_ended, until_signalled, wait_for_signal
from seriatim.cli.options import Folder


@click.command(short_help="Run a whole development cluster in the foreground.")
@click.option(
    "--dir", "directory", required=True, type=Folder(),
    help="Where all data, logs and process ids lie; made if missing. A second start keeps all data.",
)  # fmt: skip
@click.option("--groups", type=click.IntRange(1, 50), help="How many groups of two brokers. [default: as before, or 3]")
@click.option(
    "--port",
    type=click.IntRange(1, 65_000),
    help="First of the ports to listen on: the coordinators', ZooKeeper's, the brokers'. [default: as before, or free ones]",
)
@click.option("--restart/--no-restart", default=True, show_default=True, help="Start again whatever dies.")
@click.option("--json", "is_json", is_flag=True, help="Print the line that says ready as a JSON object.")
def up(*, directory: Path, groups: int | None, port: int | None, restart: bool, is_json: bool) -> None:
    """Run ZooKeeper, two coordinators and broker groups in the foreground, each server a process of its own.

    Prints one line when all of it serves, and until then on standard error what does. Ctrl-C or SIGTERM ends it. DIR/pids.json says which process is which,
    DIR/logs holds what they write. For development: everything is on this machine.
    """
    settings = ClusterSettings(directory, groups=groups, first_port=port, is_restarted=restart)

    def say(line: str) -> None:
        if not is_json:
            click.echo(line, err=True)

    with until_signalled(), DevelopmentCluster(settings, say) as cluster:
        if is_json:
            line = json.dumps({
                "event": "ready",
                "coordinator": cluster.coordinators,
                "zookeeper": cluster.zookeeper,
                "directory": str(cluster.supervisor.directory),
            })  # fmt: skip
        else:
            line = f"ready coordinator={cluster.coordinators} zookeeper={cluster.zookeeper}"
        click.echo(line)
        supervisor = cluster.supervisor
        wait_for_signal(supervisor.ended, lambda name: say_ended(name, supervisor.log_end(name)))
