"""`seriatim coordinator`: one coordinator in the foreground."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from seriatim.cli.foreground import run_server
from seriatim.cli.options import log_options


@click.command(short_help="Run one coordinator.")
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), help="TOML file; its table [coordinator] is read."
)
@click.option("--zookeeper", help="HOST:PORT[,…][/PATH] of ZooKeeper. [required]")
@click.option("--cluster", help="Name of the cluster. [default: main]")
@click.option("--listen", help="HOST:PORT to listen on; port 0: any free one. [default: 127.0.0.1:0]")
@click.option("--advertise", help="HOST:PORT that others are told. [default: the one listened on]")
@click.option("--listen-outside", help="HOST:PORT of a second door, for clients outside of the cluster's network.")
@click.option("--advertise-outside", help="HOST:PORT that this second door is reached by from there.")
@click.option(
    "--zookeeper-outside",
    help="HOST:PORT[,…] that ZooKeeper is reached by from there, with the path of --zookeeper, if any.",
)
@click.option("--name", help="Its name in the cluster. [default: a new one at each start]")
@click.option("--session-timeout-ms", type=int, help="Time-out of its ZooKeeper session. [default: 4000]")
@log_options
def coordinator(config: Path | None, log_level: str, log_to: str, **flags: object) -> None:
    r"""Run one coordinator in the foreground; prints one line when it serves, and ends cleanly on SIGTERM or Ctrl-C.

    \b
    Example:
      seriatim coordinator --zookeeper zk:2181 --cluster prod --listen 0.0.0.0:7000 --advertise HOST:7000
    """
    from seriatim.coordinator.process import CoordinatorSettings, serve
    from seriatim.protocol import log, settings, standard_streams

    log.start_logging(log_level, log_to)
    loaded = settings.load(CoordinatorSettings, section="coordinator", file=config, environment=os.environ, flags=flags)
    run_server(partial(serve, loaded, standard_streams.say_ready))
