"""What schedules are played on says nothing of the system that isn't so."""

from __future__ import annotations

import random

from seriatim.broker_group.writer import Deletion, Write
from tests.simulation.disk import KEY, Disk


def _ignore(*_: object) -> None: ...


def test_what_bypassed_the_log_and_was_deleted_is_not_back_when_memory_is_emptied() -> None:
    """A dropped link of a queue with durability memory was on the disk again after a power failure."""
    disk, key = Disk("disk", random.Random(0)), KEY.pack(b"B", 1, 1, 0)
    disk.write(Write(((key, b"batch"),), _ignore, uses_log=False))
    disk.write(Write((), _ignore, deletions=(Deletion(key, key + b"\0"),)))
    disk.emptied_memory()
    disk.power_failed()
    assert disk.links() == set()
