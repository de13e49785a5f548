"""The source `seriatim` in Spark: golden rows, ranges, restarts, and what it says when something is wrong."""

from __future__ import annotations

import datetime as dt
import re
import time
from decimal import Decimal
from pathlib import Path

import pytest
from fake_queue import FakeQueue, Link
from pyspark.errors import PySparkException

from seriatim.consumer.spark import class_archive
from seriatim.consumer.spark.engine import check_conf, result_limit_bytes
from seriatim.consumer.spark.options import NAMES
from seriatim.protocol.batch import RecordColumns
from seriatim.protocol.errors import InvalidArgument

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

_SEQ_MAX = 2**64 - 1


@pytest.fixture
def queue():
    with FakeQueue("orders") as queue:
        yield queue


def reader(spark, fake, **options):
    source = spark.read.format("seriatim").option("coordinators", fake.address).option("queue", "orders")
    return source.options(**options)


def offsets(frame):
    return [row.offset for row in frame.select("offset").collect()]


def test_a_user_s_settings_go_before_ours_and_java_s_are_added(spark):
    assert spark.conf.get("spark.driver.memory") == "800m"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert result_limit_bytes(spark) == 2**30  # Spark's own, where the memory is the user's
    properties = spark._jvm.System
    assert properties.getProperty("seriatim.tests") == "yes"
    assert properties.getProperty("log4j2.configurationFile").endswith("log4j2.properties")
    assert properties.getProperty("java.io.tmpdir") == spark.conf.get("spark.local.dir")


def test_java_s_classes_come_from_the_archive_that_set_up_made(spark):
    if not class_archive.using(class_archive.SPARK):
        pytest.skip("set-up made no archive of Java's classes; `seriatim class-archive` says why")
    loaded = Path(spark.conf.get("spark.local.dir"), "loaded").read_text()
    assert loaded.count("source: shared objects file (top)") > 5000


def test_workers_import_pyspark_from_where_it_is_installed(spark):
    def found(_):
        import py4j
        import pyspark

        return py4j.__file__, pyspark.__file__

    (paths,) = spark.sparkContext.parallelize([0], 1).map(found).collect()
    assert not any(".zip" in path for path in paths)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("spark.master", "--master"),
        ("spark.sql.session.timeZone", "is UTC: a replay needs it so"),
        ("driver.memory", "no setting of Spark's"),
    ],
)
def test_a_setting_that_isn_t_the_user_s_is_refused(name, why):
    with pytest.raises(InvalidArgument, match=why):
        check_conf({"spark.cores.max": "4", name: "CET"})


def test_every_column_comes_through_unchanged(spark, queue):
    queue.append(
        RecordColumns(
            [b"\x00\xff", b""],
            [5, _SEQ_MAX],
            ["east", "west"],
            [1_700_000_000_123, -1],
            [None, b"\x80key"],
            [(), (("trace", b"\x01"), ("trace", b""))],
        )
    )
    queue.switch()
    queue.append(RecordColumns([b"v"], [6], "east", [1_700_000_000_124]))
    frame = reader(spark, queue).load()
    assert [field.dataType.simpleString() for field in frame.schema] == [
        "string", "bigint", "bigint", "bigint", "string", "decimal(20,0)", "binary", "binary",
        "array<struct<name:string,value:binary>>", "timestamp",
    ]  # fmt: skip
    rows = [row.asDict(recursive=True) for row in frame.orderBy("offset").collect()]
    places = [(row["queue"], row["offset"], row["epoch"], row["index"], row["source"], row["seq"]) for row in rows]
    assert places == [
        ("orders", 0, 1, 0, "east", Decimal(5)),
        ("orders", 1, 1, 1, "west", Decimal(_SEQ_MAX)),
        ("orders", 2, 2, 0, "east", Decimal(6)),
    ]
    assert [(row["key"], row["value"]) for row in rows] == [(None, b"\x00\xff"), (b"\x80key", b""), (None, b"v")]
    assert [row["headers"] for row in rows] == [
        [],
        [{"name": "trace", "value": b"\x01"}, {"name": "trace", "value": b""}],
        [],
    ]
    micros = [row["timestamp"].astimezone(dt.UTC).timestamp() for row in rows]
    assert micros == [1_700_000_000.123, -0.001, 1_700_000_000.124]


def test_batch_reads_the_range_that_was_asked_for_in_several_tasks(spark, queue):
    queue.append_values([b"%d" % number for number in range(2_000)], 0)
    queue.switch()
    queue.append_values([b"%d" % number for number in range(1_990, 3_000)], 1_990)  # ten were sent again
    frame = reader(spark, queue, startingOffsets="5", endingOffsets="2500", recordsPerPartition="700").load()
    assert frame.rdd.getNumPartitions() == 4
    assert offsets(frame) == [*range(5, 2_000), *range(2_010, 2_500)]
    values = [int(bytes(row.value)) for row in frame.select("value").collect()]
    assert values == list(range(5, 2_490))
    assert offsets(reader(spark, queue, startingOffsets="latest").load()) == []


def test_gap_of_an_abandoned_link_costs_nothing(spark, queue):
    queue.append_values([b"x"] * 10, 0)
    queue.links[-1].end = 10
    queue.links.append(Link(2, 2**40))
    queue.append_values([b"y"] * 10, 100)
    frame = reader(spark, queue, recordsPerPartition="10").load()
    assert offsets(frame) == [*range(10), *range(2**40, 2**40 + 10)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "nothing"}, "there is no queue 'nothing'"),
        ({"startingOffsets": "yesterday"}, "startingOffsets is earliest, latest or a number"),
        ({"startingOffsets": "11"}, "startingOffsets 11 is behind the end of queue 'orders', which is 10"),
        ({"endingOffsets": "earliest"}, "endingOffsets is latest or an offset"),
        ({"kafka.group.id": "x"}, "unknown option kafka.group.id"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss is true or false"),
    ],
)
def test_wrong_options_are_named(spark, queue, options, message):
    queue.append_values([b"x"] * 10, 0)
    with pytest.raises(PySparkException) as raised:
        reader(spark, queue, **options).load().collect()
    assert message in str(raised.value)


def test_coordinator_that_does_not_answer_is_named(spark):
    source = spark.read.format("seriatim").option("coordinators", "127.0.0.1:1").option("queue", "orders")
    with pytest.raises(PySparkException) as raised:
        source.load().collect()
    assert "no coordinator answers at 127.0.0.1:1" in str(raised.value)


def test_records_dropped_by_retention_are_refused_or_passed_over(spark, queue):
    queue.append_values([b"x"] * 10, 0)
    queue.switch()
    queue.append_values([b"y"] * 10, 10)
    queue.dropped_links, queue.version = 1, 99
    with pytest.raises(PySparkException) as raised:
        reader(spark, queue, startingOffsets="3").load().collect()
    assert "offset 3 of queue 'orders' is no longer kept, the first one is 10" in str(raised.value)
    passed = reader(spark, queue, startingOffsets="3", failOnDataLoss="false").load()
    assert offsets(passed) == list(range(10, 20))


def test_stream_is_limited_and_goes_on_from_its_checkpoint(spark, queue, tmp_path):
    seen: list[list[int]] = []

    def take(frame, _batch):
        seen.append(frame.select("offset").toArrow().column("offset").to_pylist())

    def run_until(count: int) -> None:
        source = spark.readStream.format("seriatim").option("coordinators", queue.address).option("queue", "orders")
        source = source.option("startingOffsets", "earliest").option("maxRecordsPerTrigger", "400")
        writer = source.load().writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path))
        query = writer.trigger(processingTime="50 milliseconds").start()
        try:
            deadline = time.monotonic() + 60
            while sum(map(len, seen)) < count:
                assert query.isActive, query.exception()
                assert time.monotonic() < deadline, seen
                time.sleep(0.02)
            query.processAllAvailable()
        finally:
            query.stop()

    queue.append_values([b"x"] * 1_000, 0)
    run_until(1_000)
    assert [len(part) for part in seen] == [400, 400, 200]
    queue.switch()
    queue.append_values([b"x"] * 300, 1_000)
    run_until(1_300)
    assert [offset for part in seen for offset in part] == list(range(1_300))


def test_a_gap_behind_what_was_given_up_is_a_micro_batch_without_records(spark, queue, tmp_path):
    queue.append_values([b"x"] * 10, 0)
    queue.links[-1].end = 10
    queue.links.append(Link(2, 2**40))
    source = spark.readStream.format("seriatim").option("coordinators", queue.address).option("queue", "orders")
    frame = source.option("startingOffsets", "10").load()
    seen: list[list[int]] = []
    writer = frame.writeStream.foreachBatch(lambda part, _batch: seen.append(offsets(part)))
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert seen == [[]]


def test_available_now_ends_where_the_queue_ended(spark, queue, tmp_path):
    queue.append_values([b"x"] * 500, 0)
    source = spark.readStream.format("seriatim").option("coordinators", queue.address).option("queue", "orders")
    frame = source.option("startingOffsets", "earliest").option("maxRecordsPerTrigger", "200").load()
    seen: list[int] = []
    writer = frame.writeStream.foreachBatch(lambda part, _batch: seen.extend(offsets(part)))
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert seen == list(range(500))
    # Java would run it for each file of the checkpoint, if Spark chose how these are written.
    assert not Path(spark.conf.get("spark.local.dir"), "readlink").exists()


def test_the_tutorial_s_job_reads_a_queue_in_batch_and_in_stream(spark, queue, tmp_path, capfd):
    text = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
    (job,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    queue.append_values([b"order %d" % number for number in range(5)], 0)
    exec(job.replace("127.0.0.1:7000", queue.address).replace("/tmp/tutorial", str(tmp_path)), {})
    assert re.findall(r"order \d", capfd.readouterr().out) == ["order 0", "order 1", "order 2"]
    assert sorted(offsets(spark.read.parquet(str(tmp_path / "orders")))) == list(range(5))


def test_the_tutorial_names_each_option_that_a_user_may_set():
    text = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
    said = {*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE), "coordinators", "queue"}
    assert said == set(NAMES) - {
        "subscriptionId",
        "generation",
        "token",
        "maxBytesPerTask",
    }  # the replay's own
