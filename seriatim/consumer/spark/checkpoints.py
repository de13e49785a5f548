"""Folders for Spark's checkpoints. One is never gone on with: the target says where to start (protocol.md 6)."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def query_folder(parent: Path, queue_id: int, job: str, token: int) -> Iterator[str]:
    """A folder in `parent` for one query, gone afterwards, and with it what runs of this queue and job with older tokens left.

    Others may use `parent`, too: tokens of other queues and jobs say nothing about those of this one.
    """
    parent.mkdir(parents=True, exist_ok=True)
    owner = f"run-{queue_id}-{hashlib.sha256(job.encode()).hexdigest()[:16]}-"
    folder = tempfile.mkdtemp(prefix=f"{owner}{token}-", dir=parent)
    for other in parent.glob(f"{owner}*"):
        older = other.name.removeprefix(owner).split("-")[0]
        if older.isdigit() and int(older) < token:
            shutil.rmtree(other, ignore_errors=True)  # left behind by a run that was killed
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
