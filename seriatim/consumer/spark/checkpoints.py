"""Folders for Spark's checkpoints. One is never gone on with: the target says where to start (protocol.md 6)."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from seriatim.protocol.errors import InvalidArgument


def check_folder(given: str) -> None:
    """Raises InvalidArgument for a URL: it would be a folder `hdfs:` here, and for Spark another one, of which nothing is ever removed."""
    if "://" in given:
        raise InvalidArgument(
            f"checkpoints go to a folder of this machine, not to {given}: they serve one run, and the target alone says where to go on"
        )


@contextlib.contextmanager
def query_folder(parent: Path, queue_id: int, created_at_ms: int, job: str, token: int) -> Iterator[str]:
    """A folder in `parent` for one query, as a URL; gone afterwards, and with it what runs of this queue and job with older tokens left.

    Others may use `parent`, too: tokens of other queues, also of other clusters, and of other jobs say nothing about those of this one.
    """
    parent = parent.absolute()
    parent.mkdir(parents=True, exist_ok=True)
    owner = f"run-{queue_id}-{hashlib.sha256(f'{created_at_ms} {job}'.encode()).hexdigest()[:16]}-"
    folder = tempfile.mkdtemp(prefix=f"{owner}{token}-", dir=parent)
    for other in parent.glob(f"{owner}*"):
        older = other.name.removeprefix(owner).split("-")[0]
        if older.isdigit() and int(older) < token:
            shutil.rmtree(other, ignore_errors=True)  # left behind by a run that was killed
    try:
        yield f"file://{folder}"  # a path alone would be one of what Spark's cluster stores files in
    finally:
        shutil.rmtree(folder, ignore_errors=True)
