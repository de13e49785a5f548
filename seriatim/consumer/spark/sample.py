"""A stream like a replay's, from a source that needs no cluster: what Spark loads for the one it loads for the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from seriatim.consumer.spark import class_archive
from seriatim.consumer.spark.engine import check_java, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

_ROWS = 100


class SampleSource(DataSource):
    """A hundred rows, once."""

    @classmethod
    def name(cls) -> str:
        """As in ``format("sample")``."""
        return "sample"

    def schema(self) -> str:
        """An offset and a value."""
        return "offset bigint, value binary"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 # Spark's name
        """For ``spark.readStream``."""
        del schema
        return _Reader()


class _Reader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802 # Spark's name
        return {"offset": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 # Spark's name
        del start, limit
        return {"offset": _ROWS}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition((start["offset"], end["offset"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        offsets = range(*partition.value)
        yield pa.record_batch({"offset": list(offsets), "value": [b"%d" % offset for offset in offsets]})


def run(spark: SparkSession, checkpoint: Path) -> None:
    """Stream the source's rows to the driver, in micro-batches."""

    def take(records: DataFrame, batch_id: int) -> None:
        del batch_id
        records.toArrow()

    spark.dataSource.register(SampleSource)
    records = spark.readStream.format(SampleSource.name()).load().select("offset", "value")
    writer = records.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def archive_classes(archive: Path, directory: Path) -> None:
    """Run the stream, with scratch files in `directory`, and write what Java loaded. Raises JavaMissing, SparkNotStarted."""
    check_java()
    spark = spark_session("local[1]", directory, archive_options=class_archive.making(archive))
    gateway: Any = SparkContext._gateway  # noqa: SLF001 - no public way
    run(spark, directory / "checkpoint")
    spark.stop()
    gateway.proc.stdin.close()  # the JVM ends by that
    gateway.proc.wait(class_archive.END_S)
