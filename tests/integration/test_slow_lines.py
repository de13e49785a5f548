"""A reader, each line of one of its modules slow in turn: whatever the other thread sees meanwhile is right."""

from __future__ import annotations

import pytest

from seriatim.consumer import RangeReader
from tests.integration.consumer_fakes import FakeCluster
from tests.slow_lines import SlowLines


@pytest.mark.parametrize("module", ["fetching", "range_reader", "loop"])
def test_a_range_is_read_whole_whichever_thread_is_slow(module: str) -> None:
    """The first time that threads were slowed down it showed the worst defect of weeks: a range that ended without its last batches."""
    with FakeCluster("127.0.0.1:1", "c") as cluster, SlowLines(f"consumer/{module}.py"):
        for first in range(0, 40, 5):
            cluster.append([b"v"] * 5, first)
            if first == 15:
                cluster.switch()
        with RangeReader(cluster.coordinator, "q") as reader:
            for start, end in ((0, 40), (3, 17)):
                assert [record.offset for record in reader.read(start, end)] == list(range(start, end))
