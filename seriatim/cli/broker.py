"""`seriatim broker`: one member of a group."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from seriatim.cli.foreground import run_server
from seriatim.cli.options import Folder, log_options


@click.command(short_help="Run one broker: a member of a group.")
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), help="TOML file; its table [broker] is read."
)
@click.option("--zookeeper", help="HOST:PORT[,…][/PATH] of ZooKeeper. [required]")
@click.option("--cluster", help="Name of the cluster. [required]")
@click.option("--group", help="The group it is a member of. [required]")
@click.option("--member", help="Its place in the group: a or b. [required]")
@click.option("--dir", "directory", type=Folder(), help="Where its data lies; made if missing. [required]")
@click.option("--listen", help="HOST:PORT to listen on; port 0: any free one. [default: 127.0.0.1:0]")
@click.option("--advertise", help="HOST:PORT that others are told. [default: the one listened on]")
@click.option(
    "--advertise-outside", help="HOST:PORT that clients outside of the cluster's network are told. [default: as inside]"
)
@click.option("--session-timeout-ms", type=int, help="Time-out of its ZooKeeper session. [default: 4000]")
@click.option("--reserve-mb", type=int, help="Room kept free of records on the disk. [default: 256]")
@click.option("--segment-bytes", type=int, help="Batches from this size on get files beside RocksDB. [default: 16384]")
@click.option(
    "--scrub-interval-s",
    type=int,
    help="Seconds between reads of all that is stored, to find damage; 0: never. [default: 86400]",
)
@click.option(
    "--direct-port",
    type=int,
    help="Port for batches and calls without gRPC around them, on the same host; 0: any free one, -1: none. [default: 0]",
)
@log_options
def broker(config: Path | None, directory: Path | None, log_level: str, log_to: str, **flags: object) -> None:
    r"""Run one broker in the foreground; prints one line when it serves, and ends cleanly on SIGTERM or Ctrl-C.

    A group takes records when both its members, a and b, are there, best on machines of their own.

    \b
    Example:
      seriatim broker --zookeeper zk:2181 --cluster prod --group g1 --member a --dir /data \
          --listen 0.0.0.0:7100 --advertise HOST:7100
    """
    from seriatim.broker_group.allocator import keep_freed_memory
    from seriatim.broker_group.process import BrokerSettings, serve
    from seriatim.protocol import log, settings, standard_streams

    keep_freed_memory()
    log.start_logging(log_level, log_to)
    flags["dir"] = directory
    loaded = settings.load(BrokerSettings, section="broker", file=config, environment=os.environ, flags=flags)
    run_server(partial(serve, loaded, standard_streams.say_ready))
