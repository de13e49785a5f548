"""Directories whose entries survive a power failure: a file is durable only when its name is, too, and so up to the root.

A process that was killed may have left a name that the system knows and the disk doesn't; so each life makes sure of its own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync(directory: Path) -> None:
    """The names in it are durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make(directory: Path) -> None:
    """Make it, and what is missing on the way to it, durably. Raises OSError."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)
    if not missing:
        with contextlib.suppress(OSError):  # a mount point's parent, perhaps: somebody else's, who made it long ago
            sync(directory.parent)
