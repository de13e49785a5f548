"""The folder in which a replay has Spark's scratch files, and Java's.

Who is killed leaves its folder behind, and a replay may be killed again and again, as where memory is short. A living one holds a
lock on its folder, which the kernel lets go whatever ends it; so the next one knows those that are nobody's any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PREFIX: Final = "seriatim-spark-"
"""Not that of earlier versions, whose living ones hold no lock."""
_YOUNG_S: Final = 60.0
"""One so young may have been made just now, and be locked in a moment."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one replay, gone afterwards, and with it what others left that were killed."""
    # Java may still be at it, or a network's file system keep what is open: then the next one removes the rest.
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody's is known to be left
                fcntl.flock(lock, fcntl.LOCK_EX)
            for other in folder.parent.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):  # somebody else's, in use, or gone by now
                    _remove_if_left(other)
            yield folder
        finally:
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """Raises OSError where somebody holds the lock."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.time() - os.fstat(lock).st_mtime > _YOUNG_S:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
