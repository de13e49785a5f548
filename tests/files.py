"""Files that another process, or RocksDB, may delete while they are looked at."""

import contextlib
from pathlib import Path


def sizes(directory: Path, pattern: str) -> dict[str, int]:
    """Bytes of each file in it whose name fits, by name, without those that go meanwhile."""
    found = {}
    for path in directory.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_size
    return found
