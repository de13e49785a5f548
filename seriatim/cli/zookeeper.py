"""`seriatim zookeeper`: one ZooKeeper in the foreground."""

from __future__ import annotations

import json
from pathlib import Path

import click

from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper
from seriatim.cli.foreground import until_signalled, wait_for_signal
from seriatim.cli.options import Folder


@click.command(short_help="Run one ZooKeeper, for development.")
@click.option(
    "--dir", "directory", required=True, type=Folder(),
    help="Where its data, log and process id lie; made if missing.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65_535), help="Port to listen on. [default: as before, or a free one]")
@click.option("--json", "is_json", is_flag=True, help="Print the line that says ready as a JSON object.")
def zookeeper(*, directory: Path, host: str, port: int | None, is_json: bool) -> None:
    """Run one Apache ZooKeeper 3.9 (from PySpark's jars) in the foreground; prints one line when it serves.

    For development. Production wants an ensemble of its own.
    """
    with until_signalled(), EmbeddedZooKeeper(directory, port=port, host=host) as server:
        if is_json:
            click.echo(json.dumps({"event": "ready", "zookeeper": server.address, "directory": str(directory)}))
        else:
            click.echo(f"ready zookeeper={server.address}")
        wait_for_signal(server.ended, server.fail)
