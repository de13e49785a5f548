"""`seriatim class-archive`: what Java reads of its classes at each start, kept in a file. See `consumer.spark.class_archive`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from seriatim.cli import exits
from seriatim.cli.embedded.errors import EmbeddedError
from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper
from seriatim.consumer.spark import class_archive as archives
from seriatim.protocol.errors import WorldError
from seriatim.protocol.zookeeper import ZooKeeperSession

_SESSION_S = 60.0
_START_S = 300.0


@click.command(name="class-archive", short_help="Once after installing: let Spark start sooner.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object an archive: name, path, size_bytes.")
def class_archive(*, is_json: bool) -> None:
    """Keep what Java reads and verifies of Spark's classes, and of ZooKeeper's, at each start.

    With it a replay, or a stand-by that takes over from one, starts with some two thirds of the processor time. Takes
    half a minute and some 180 MB beside the installed packages; to be called again when these, or Java, were changed
    (Java itself tells whether an archive fits, and passes over one that doesn't).
    """
    failed: list[str] = []
    for name, make in ((archives.ZOOKEEPER, _make_zookeeper), (archives.SPARK, _make_spark)):
        path = archives.path(name)
        if not is_json:
            click.echo(f"{name}: starting it, to see what it loads", err=True)
        try:
            _make(path, make)
        except (EmbeddedError, WorldError) as error:  # the other one is worth having
            failed.append(f"{name}: {error}")
            continue
        size_bytes = path.stat().st_size
        if is_json:
            click.echo(json.dumps({"name": name, "path": str(path), "size_bytes": size_bytes}))
        else:
            click.echo(f"{name}: {size_bytes / 1e6:.0f} MB in {path}")
    if failed:
        raise EmbeddedError("\n".join(failed))


def _make(path: Path, make: Callable[[Path, Path], None]) -> None:
    """Make it under another name: whoever starts meanwhile uses the old one, or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="seriatim-classes-") as scratch:
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            make(new, Path(scratch))
            if not new.is_file():
                raise EmbeddedError("Java ended without writing its classes: is it a HotSpot of version 17 or newer?")
            with new.open("rb") as file:
                os.fsync(file.fileno())  # Java maps what it finds there: a part of it would end a process
            new.replace(path)
    except ModuleNotFoundError as error:
        raise EmbeddedError(exits.not_installed(error, "spark")) from error
    except subprocess.TimeoutExpired as error:
        raise EmbeddedError(f"Java didn't end within {error.timeout:.0f} s") from error
    except OSError as error:
        raise EmbeddedError(f"can't write {path}: {error.strerror}") from error


def _make_zookeeper(archive: Path, directory: Path) -> None:
    """Run a server, use it a little, and end it."""
    server = EmbeddedZooKeeper(directory, archive_options=archives.making(archive), stop_timeout_s=archives.END_S)
    server.start(timeout_s=_START_S)
    with contextlib.closing(server):
        asyncio.run(_use(server.address))


def _make_spark(archive: Path, directory: Path) -> None:
    # Only here: the command is there where Spark isn't installed.
    from seriatim.consumer.spark import sample

    sample.archive_classes(archive, directory)


async def _use(address: str) -> None:
    session = ZooKeeperSession(address, _SESSION_S)
    await session.start()
    await session.create("/sample", b"", parents=True)
    await session.get("/sample", lambda: None)
    await session.set("/sample", b"changed")
    await session.delete("/sample")
    await session.stop()
