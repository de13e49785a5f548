"""What is freed stays with the process, so that the next batch finds it there."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
from seriatim.broker_group.allocator import keep_freed_memory
assert sys.argv[1] == "as it comes" or keep_freed_memory()
def batches():
    kept = [bytearray(1 << 20) for _ in range(16)]  # as they wait for their flush
for _ in range(3):
    batches()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    batches()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Of 160 MiB in ten turns."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(ended.stdout)


def test_freed_batches_are_not_faulted_in_again() -> None:
    assert page_faults("kept") * 10 < page_faults("as it comes")
