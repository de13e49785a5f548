"""Which offsets a micro-batch or a range reader gets, whatever is known of the queue when they are asked for; without Spark."""

from __future__ import annotations

import copy
import threading
import time
from types import SimpleNamespace

import pytest
from fake_queue import FakeQueue, Link
from pyspark.sql.streaming.datasource import ReadAllAvailable

from seriatim.consumer import range_reader
from seriatim.consumer.range_reader import Positions, RangeReader
from seriatim.consumer.spark.datasource import OffsetRange, SeriatimDataSource, TooMuchAtOnce
from seriatim.consumer.spark.options import SourceOptions, read_options
from seriatim.protocol.batch import RecordColumns
from seriatim.protocol.errors import InvalidArgument, Unreachable

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def queue():
    with FakeQueue("orders") as queue:
        yield queue


@pytest.fixture
def stream(queue):
    options = {"coordinators": queue.address, "queue": "orders", "recordsPerPartition": "4"}
    stream = SeriatimDataSource(options).streamReader(None)
    yield stream
    stream.stop()


def read(stream, start: int, end: int) -> list[int]:
    """What the tasks of a micro-batch hand out."""
    return handed_out(stream, stream.partitions({"offset": start}, {"offset": end}))


def handed_out(stream, parts) -> list[int]:
    return [offset for part in parts for batch in stream.read(part) for offset in batch.column("offset").to_pylist()]


def test_a_micro_batch_has_all_that_it_was_to_have_though_members_fall_silent_before_it_is_planned(queue, stream):
    queue.append_values([b"x"] * 10, 0)
    assert stream.latestOffset({"offset": 2}, ReadAllAvailable())["offset"] == 10
    queue.tells_committed = False
    assert read(stream, 2, 10) == list(range(2, 10))


def test_a_micro_batch_that_a_laggard_plans_has_what_is_beyond_a_gap_that_it_does_not_know_of(queue, stream):
    queue.append_values([b"x"] * 10, 0)
    queue.links[-1].end = 10
    parts = stream.partitions({"offset": 0}, {"offset": 2**40 + 3})
    queue.links.append(Link(2, 2**40))
    queue.append_values([b"y"] * 5, 100)
    assert len(parts) < 10
    assert handed_out(stream, parts) == [*range(10), *range(2**40, 2**40 + 3)]


def test_a_task_ends_before_it_hands_out_more_than_who_collects_it_has_room_for(queue):
    """Spark itself looks when all of it is in its memory, which may be out by then."""
    queue.append_values([b"x" * 1000] * 10, 0, per_batch=2)
    for limit, fits in ((0, 10), (20_000, 10), (5_000, 4)):
        batches = source(queue, maxBytesPerTask=str(limit)).streamReader(None).read(OffsetRange(0, 10))
        assert sum(next(batches).num_rows for _ in range(fits // 2)) == fits
        if fits < 10:
            with pytest.raises(TooMuchAtOnce, match=r"more than 5,000 bytes.*spark\.driver\.maxResultSize"):
                next(batches)
        else:
            assert list(batches) == []


def test_a_task_reads_for_a_driver_of_an_earlier_version_that_tells_of_fewer_options(queue, stream):
    """Spark's workers were upgraded first: each task failed, and with them a replay, until its own turn came."""
    queue.append_values([b"x"] * 10, 0)
    options = read_options({"coordinators": queue.address, "queue": "orders"}, is_stream=True)
    earlier = SourceOptions.__new__(SourceOptions)
    earlier.__setstate__(options.__getstate__()[:-1])
    reader = copy.copy(stream)
    reader._options = earlier
    assert handed_out(reader, [OffsetRange(0, 4), OffsetRange(4, 10)]) == [*range(10)]


def test_a_time_that_spark_can_not_hold_is_null_and_keeps_nothing_from_being_read(queue, stream):
    """As of a sender that gives nanoseconds for milliseconds."""
    stamps_ms = [1_700_000_000_000, 1_700_000_000_000_000_000, -(2**63), 2**63 // 1000]
    queue.append(RecordColumns([b"x"] * 4, [0, 1, 2, 3], "s", stamps_ms))
    (part,) = stream.partitions({"offset": 0}, {"offset": 4})
    (batch,) = stream.read(part)
    assert batch.column("timestamp").cast("int64").to_pylist() == [
        1_700_000_000_000_000,
        None,
        None,
        2**63 // 1000 * 1000,
    ]


def test_a_range_beyond_the_end_that_is_known_begins_where_it_was_asked_for(queue):
    queue.append_values([b"x"] * 10, 0)
    queue.switch()
    following = queue.links.pop()

    def follow() -> None:
        while reader._fetcher is None:
            time.sleep(0.01)
        queue.links.append(following)
        queue.append_values([b"y"] * 10, 10, per_batch=4)
        queue.version += 1

    with RangeReader(queue.address, "orders") as reader:
        later = threading.Thread(target=follow)
        later.start()
        assert [record.offset for record in reader.read(13, 19)] == list(range(13, 19))
        later.join()


def test_what_is_let_go_between_two_looks_is_not_passed_over(queue):
    for first in (0, 10, 20):
        queue.append_values([b"x"] * 10, first)
        queue.switch()
    kept = queue.links
    queue.links = kept[:1]
    with RangeReader(queue.address, "orders") as reader:
        records = reader.read(0, 25)
        assert next(records).offset == 0
        queue.links, queue.dropped_links, queue.version = kept, 2, 99
        with pytest.raises(InvalidArgument, match=r"offset 10 of queue 'orders' was let go before it was read.* is 20"):
            list(records)


@pytest.mark.parametrize("fails", ["true", "false"])
def test_what_is_let_go_behind_the_planning_is_passed_over_where_that_is_wanted(queue, fails):
    """Whether it goes before a task begins, or within one that reads several links."""
    for first in (0, 10, 20):
        queue.append_values([b"x"] * 10, first)
        queue.switch()
    stream = source(queue, failOnDataLoss=fails).streamReader(None)
    parts = [*stream.partitions({"offset": 0}, {"offset": 30}), OffsetRange(8, 25)]
    kept, queue.links = queue.links, queue.links[:1]
    within = stream.read(OffsetRange(2, 25))
    found = next(within).column("offset").to_pylist()
    queue.links, queue.dropped_links, queue.version = kept, 2, 99
    if fails == "true":
        for reads in (lambda: next(within), lambda: handed_out(stream, parts[:1])):
            with pytest.raises(InvalidArgument, match=r"the first one( kept)? is 20"):
                reads()
    else:
        found += [offset for batch in within for offset in batch.column("offset").to_pylist()]
        assert found == [*range(2, 10), *range(20, 25)]
        assert handed_out(stream, parts) == [*range(20, 30), *range(20, 25)]
    stream.stop()


def test_what_was_given_up_is_passed_over(queue):
    queue.append_values([b"x"] * 10, 0)
    queue.links[-1].end = 10
    queue.links.append(Link(2, 2**40))
    queue.append_values([b"y"] * 5, 100)
    with RangeReader(queue.address, "orders") as reader:
        assert [record.offset for record in reader.read(8, 2**40 + 2)] == [8, 9, 2**40, 2**40 + 1]


@pytest.mark.parametrize("kept", [8, 0])
def test_what_was_given_up_of_a_sealed_link_is_passed_over(queue, kept):
    """The next link had its base by then."""
    queue.append_values([b"x"] * 10, 0)
    queue.switch()
    queue.append_values([b"y"] * kept, 10)
    queue.links[-1].end = kept
    queue.links.append(Link(3, 20))
    queue.version += 1
    queue.append_values([b"z"] * 3, 30)
    with RangeReader(queue.address, "orders") as reader:
        assert [record.offset for record in reader.read(5, 22)] == [*range(5, 10 + kept), 20, 21]


def test_only_an_offset_in_a_gap_has_another_one_behind_it():
    known = Positions(5, 2**40, (range(5, 10), range(10, 20)))
    assert [known.beyond_gap(offset) for offset in (4, 5, 12, 20, 2**40)] == [4, 5, 12, 2**40, 2**40]
    assert Positions(0, 2**40 + 3, (range(20), range(2**40, 2**40 + 3))).beyond_gap(21) == 2**40
    assert Positions(0, 20, (range(20),)).beyond_gap(25) == 25


def test_offsets_of_a_queue_mean_nothing_in_one_that_was_made_later_by_its_name(queue, stream):
    queue.append_values([b"x"] * 10, 0)
    noted = stream.latestOffset({"offset": 5}, ReadAllAvailable())  # as a checkpoint of an earlier version has it
    assert stream.latestOffset(noted, ReadAllAvailable()) == noted
    queue.created_at_ms += 1
    with pytest.raises(InvalidArgument, match="another one than that of which offset 10 was noted"):
        stream.latestOffset(noted, ReadAllAvailable())
    with pytest.raises(InvalidArgument, match="another one"):
        stream.partitions(noted, {**noted, "offset": 12})


def test_a_task_reads_no_queue_that_was_made_by_the_name_since_it_was_planned(queue, stream):
    """As where it waits for members that are away, and is tried again."""
    queue.append_values([b"x"] * 10, 0)
    planned = [*stream.partitions({"offset": 8}, {"offset": 10}), *source(queue).reader(None).partitions()]
    assert handed_out(stream, planned) == [8, 9, *range(10)]
    queue.created_at_ms += 1
    for part in planned:
        with pytest.raises(InvalidArgument, match=r"another one than that of which offset [80] was noted"):
            handed_out(stream, [part])


def source(queue, **options):
    return SeriatimDataSource({"coordinators": queue.address, "queue": "orders", **options})


def first_offset_of_a_stream(queue, **options) -> int:
    stream = source(queue, **options).streamReader(None)
    try:
        return stream.initialOffset()["offset"]
    finally:
        stream.stop()


LATEST = {
    "a batch": lambda queue: max(part.end for part in source(queue).reader(None).partitions()),
    "a stream": lambda queue: first_offset_of_a_stream(queue, startingOffsets="latest"),
}


@pytest.mark.parametrize("slave_lacks", [None, 3, 0], ids=["nobody tells", "a slave tells less", "a slave tells"])
@pytest.mark.parametrize("what", LATEST)
def test_the_latest_offset_is_asked_for_until_the_master_tells_it(queue, monkeypatch, what, slave_lacks):
    queue.append_values([b"x"] * 10, 0)
    queue.switch()
    queue.append_values([b"y"] * 10, 10)
    queue.tells_committed, queue.slave_lacks = slave_lacks is not None, slave_lacks
    asked = []

    def passes(_s: float) -> None:
        asked.append(queue.slave_lacks)
        queue.tells_committed, queue.slave_lacks = True, None

    monkeypatch.setattr(range_reader, "time", SimpleNamespace(sleep=passes))
    assert LATEST[what](queue) == 20
    assert asked == [slave_lacks]


@pytest.mark.parametrize("what", LATEST)
def test_a_latest_offset_that_nobody_tells_is_no_answer(queue, monkeypatch, what):
    queue.append_values([b"x"] * 10, 0)
    queue.tells_committed = False
    monkeypatch.setattr(range_reader, "END_WITHIN_S", 0.0)
    with pytest.raises(Unreachable, match="no member tells where queue 'orders' ends"):
        LATEST[what](queue)
    queue.tells_committed, queue.may_be_outdated = True, True
    with pytest.raises(Unreachable, match="ZooKeeper may have been set back: nobody knows where queue 'orders' ends"):
        LATEST[what](queue)


def test_a_stream_of_what_is_there_now_does_not_end_where_nobody_tells_the_end(queue, stream, monkeypatch):
    queue.append_values([b"x"] * 10, 0)
    stream.prepareForTriggerAvailableNow()
    queue.append_values([b"y"] * 10, 10)
    queue.tells_committed = False
    told = SimpleNamespace(sleep=lambda _s: setattr(queue, "tells_committed", True))
    monkeypatch.setattr(range_reader, "time", told)
    assert stream.latestOffset({"offset": 4}, ReadAllAvailable())["offset"] == 10
    assert stream.latestOffset({"offset": 10}, ReadAllAvailable())["offset"] == 10
    queue.tells_committed = False
    monkeypatch.setattr(range_reader, "END_WITHIN_S", 0.0)
    with pytest.raises(Unreachable):
        stream.latestOffset({"offset": 4}, ReadAllAvailable())


def test_what_is_kept_is_read_though_nobody_tells_the_end(queue, monkeypatch):
    queue.append_values([b"x"] * 10, 0)
    queue.switch()
    queue.tells_committed = False
    monkeypatch.setattr(range_reader, "END_WITHIN_S", 0.0)
    assert len(source(queue, endingOffsets="10").reader(None).partitions()) == 1
    assert first_offset_of_a_stream(queue, startingOffsets="10") == 10
