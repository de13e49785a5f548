"""The Python data source ``seriatim``: a queue as a DataFrame, in batch and in stream.

    spark.dataSource.register(SeriatimDataSource)
    spark.readStream.format("seriatim").option("coordinators", "host:7000").option("queue", "orders").load()

A position is an offset of the queue, ``{"offset": n, "of": queue}``: the first record not yet read, and which queue it is one of,
as another may be made by the same name. Every record has its offset, so a range of offsets is the same records whoever reads it,
and any number of tasks may read parts of one range. Rows come in order within a task; across tasks the offset column has the order. Re-sends aren't handed out, so offsets may have gaps.

Options are described in `options.SourceOptions`, the schema in `columns.SCHEMA`. The source commits nothing: the checkpoint
of the query is its memory.

The partitioned stream reader is used, not the simple one: the latter fetches on the driver, in one piece, as Python tuples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from seriatim.consumer.range_reader import Positions, RangeReader
from seriatim.consumer.spark.columns import SCHEMA, arrow_batch
from seriatim.consumer.spark.options import Place, SourceOptions, read_options
from seriatim.consumer.spark.ranges import offset_after, offset_ranges, promised_ranges
from seriatim.protocol import log
from seriatim.protocol.errors import InvalidArgument, RefusedError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_log = log.logger("replay")

NAME: Final = "seriatim"


@dataclass(frozen=True)
class OffsetRange(InputPartition):
    """What one task reads: `start` <= offset < `end`, `of` the queue that had the name when that was decided."""

    start: int
    end: int
    of: str = ""


class TooMuchAtOnce(RefusedError):
    """The records of one task are more than the option maxBytesPerTask allows."""

    code = "too-much-at-once"


class SeriatimDataSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """As in ``format("seriatim")``."""
        return NAME

    def schema(self) -> str:
        """`columns.SCHEMA`, whatever the queue."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``. Raises InvalidArgument for a wrong option."""
        del schema
        return _BatchReader(read_options(self.options, is_stream=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 # Spark's name
        """For ``spark.readStream``. Raises InvalidArgument for a wrong option."""
        del schema
        return _StreamReader(read_options(self.options, is_stream=True))


def _tasks(ranges: Sequence[range], of: str) -> list[OffsetRange]:
    return [OffsetRange(one.start, one.stop, of) for one in ranges]


def _opened(options: SourceOptions) -> RangeReader:
    return RangeReader(
        options.coordinators,
        options.queue,
        token=options.token,
        subscription_id=options.subscription_id,
        generation=options.generation,
    )


_idle: dict[SourceOptions, RangeReader] = {}
"""The reader of this process's last task: Spark keeps its Python workers, and to connect costs more than a short read."""


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, OffsetRange):  # Spark's stand-in for "no partitions"
        return
    reader = _idle.pop(options, None) or _opened(options)
    start, size_bytes = partition.start, 0
    try:
        while start < partition.end:
            try:
                for rows in reader.read_columns(start, partition.end, partition.of):
                    start = rows.base + rows.next_index
                    if len(rows.columns):
                        batch = arrow_batch(options.queue, rows)
                        size_bytes += batch.nbytes
                        _check_size(options, size_bytes)
                        yield batch
                start = partition.end
            except InvalidArgument as error:  # retention may have come by since the range was planned
                earliest = error.details.get("earliest")
                if options.fails_on_data_loss or not isinstance(earliest, int) or earliest <= start:
                    raise
                start = _kept_start(options, start, earliest)
    except BaseException:
        reader.close()
        raise
    while _idle:
        _idle.popitem()[1].close()
    _idle[options] = reader


def _check_size(options: SourceOptions, size_bytes: int) -> None:
    limit_bytes: int = getattr(options, "max_task_bytes", 0)
    if 0 < limit_bytes < size_bytes:
        raise TooMuchAtOnce(
            f"the records are more than {limit_bytes:,} bytes, which is as much as may come to the driver at once "
            "(spark.driver.maxResultSize)",
            limit_bytes=limit_bytes,
        )


def _kept_start(options: SourceOptions, start: int, earliest: int) -> int:
    """`start`, or what is left of it. Raises InvalidArgument where records are gone and that must not pass unseen."""
    if start >= earliest:
        return start
    if options.fails_on_data_loss:
        raise InvalidArgument(
            f"offset {start} of queue {options.queue!r} is no longer kept, the first one is {earliest}; "
            "start from another offset, or set failOnDataLoss to false to pass over what is gone",
            queue=options.queue,
            offset=start,
            earliest=earliest,
        )
    _log.warning("records are gone", queue=options.queue, start=start, end=earliest)
    return earliest


def _resolved(place: Place, earliest: int, end: int) -> int:
    if place == "earliest":
        return earliest
    return end if place == "latest" else place


def _check_not_behind(queue: str, end: int, **offsets: int) -> None:
    """Raises InvalidArgument where one of these options' offsets is behind the queue's end."""
    for name, offset in offsets.items():
        if offset > end:
            raise InvalidArgument(
                f"{name} {offset} is behind the end of queue {queue!r}, which is {end}",
                queue=queue,
                offset=offset,
                latest=end,
            )


def _positions_for(reader: RangeReader, *places: Place) -> Positions:
    """With an end that is known, where that matters for these places: what nobody tells isn't the end."""
    positions = reader.positions()
    if all(place == "earliest" or (place != "latest" and place <= positions.end) for place in places):
        return positions
    return reader.positions(needs_end=True)


class _BatchReader(DataSourceReader):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with _opened(options) as reader:
            positions = _positions_for(reader, options.starting_offsets, options.ending_offsets)
        earliest, latest = positions.earliest, positions.end
        start = _kept_start(options, _resolved(options.starting_offsets, earliest, latest), earliest)
        end = _resolved(options.ending_offsets, earliest, latest)
        _check_not_behind(options.queue, latest, startingOffsets=start, endingOffsets=end)
        return _tasks(offset_ranges(positions.spans, start, end, options.records_per_partition), positions.of)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)


Noted = dict[str, Any]
"""A position of a stream, as its checkpoint has it."""


def _noted(positions: Positions, offset: int) -> Noted:
    return {"offset": offset, "of": positions.of} if positions.of else {"offset": offset}


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process of the driver's, where it keeps one connection; `read` runs in the tasks, on a copy."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._reader: RangeReader | None = None
        self._last_offset: int | None = None  # with Trigger.AvailableNow

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_reader": None, "_last_offset": None}

    def _opened(self) -> RangeReader:
        if self._reader is None:
            self._reader = _opened(self._options)
        return self._reader

    def _positions(self, since: Noted, *places: Place) -> Positions:
        """As `_positions_for`. Raises InvalidArgument where `since` was noted of another queue."""
        positions = _positions_for(self._opened(), *places)
        positions.check_same(self._options.queue, since.get("of", ""), since["offset"])
        return positions

    def initialOffset(self) -> Noted:  # noqa: N802 # Spark's name
        options = self._options
        positions = _positions_for(self._opened(), options.starting_offsets)
        earliest, latest = positions.earliest, positions.end
        start = _kept_start(options, _resolved(options.starting_offsets, earliest, latest), earliest)
        _check_not_behind(options.queue, latest, startingOffsets=start)
        return _noted(positions, start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 # Spark's name
        return ReadMaxRows(self._options.max_records) if self._options.max_records else ReadAllAvailable()

    def latestOffset(self, start: Noted, limit: ReadLimit) -> Noted:  # noqa: N802 # Spark's name
        # With Trigger.AvailableNow the query is done where there is nothing more.
        places = () if self._last_offset is None else (self._last_offset,)
        positions = self._positions(start, *places)
        latest = min([positions.end, *places])
        if isinstance(limit, ReadMaxRows):
            latest = offset_after(positions.spans, start["offset"], limit.max_rows, latest)
        return _noted(positions, max(latest, start["offset"]))

    def reportLatestOffset(self) -> Noted:  # noqa: N802 # Spark's name
        positions = self._opened().positions()
        return _noted(positions, positions.end)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 # Spark's name
        self._last_offset = self._opened().positions(needs_end=True).end

    def partitions(self, start: Noted, end: Noted) -> Sequence[InputPartition]:
        options = self._options
        positions = self._positions(start)
        first, stop = _kept_start(options, start["offset"], positions.earliest), end["offset"]
        return _tasks(promised_ranges(positions, first, stop, options.records_per_partition), positions.of)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
