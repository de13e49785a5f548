"""Which records of a batch are handed out.

A record at or below its source's mark was delivered before, from an earlier link: a re-send, dropped. The marks are
those at the start of the batch, and the whole batch is judged by them, wherever in it somebody starts to read. So
the answer depends on the position alone and every reader drops the same (protocol.md 6, H6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

from zstandard import frame_content_size

from seriatim.protocol.batch import EncodedBatch, RecordColumns, decode
from seriatim.protocol.names import Epoch, Index, Offset
from seriatim.protocol.record import Record

_as_record = partial(tuple.__new__, Record)
"""`Record._make` without a call of Python's for each: that there are as many fields as columns is seen here."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch in its place in the queue, not decoded yet.

    Rows with `start` <= index < `stop` are asked for. `marks`: at the start of the batch; None where the header
    shows that no record is a re-send.
    """

    epoch: Epoch
    base: Offset
    batch: EncodedBatch
    start: Index
    stop: Index
    marks: Mapping[str, int] | None

    @property
    def size_bytes(self) -> int:
        return self.batch.size_bytes

    @property
    def decoded_bytes(self) -> int:
        """What its records take, but for the objects around them; of a batch that can be decoded."""
        batch = self.batch
        return frame_content_size(batch.payload) if batch.header.is_compressed else batch.size_bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Decoded records, with their places.

    `indexes`: of each record, in the link; as many as `columns` has rows. `next_index`: the first index behind what
    was looked at; above the last of `indexes` also where the last records were dropped. `dropped`: re-sends among
    what was asked for.
    """

    epoch: Epoch
    base: Offset
    indexes: Sequence[int]
    columns: RecordColumns
    next_index: Index
    dropped: int

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each record."""
        return self._offsets(self.indexes)

    def _offsets(self, indexes: Sequence[int]) -> Sequence[int]:
        if isinstance(indexes, range):
            return range(self.base + indexes.start, self.base + indexes.stop)
        return [self.base + index for index in indexes]

    def records(self, queue: str, start: int = 0, stop: int | None = None) -> list[Record]:
        """Those of the rows from `start` on, before `stop`: a column each, zipped."""
        columns, rows = self.columns, slice(start, stop)
        indexes = self.indexes[rows]
        return list(
            map(
                _as_record,
                zip(
                    repeat(queue),
                    self._offsets(indexes),
                    repeat(self.epoch),
                    indexes,
                    repeat(columns.sources) if isinstance(columns.sources, str) else columns.sources[rows],
                    columns.seqs[rows],
                    repeat(None) if columns.keys is None else columns.keys[rows],
                    columns.values[rows],
                    repeat(()) if columns.headers is None else columns.headers[rows],
                    columns.timestamps_ms[rows],
                    strict=False,
                ),
            )
        )


def decoded(delivery: Delivery) -> Rows:
    """The records to hand out. Raises MalformedFrame where the batch can't be decoded."""
    first = delivery.batch.header.first_index
    columns = decode(delivery.batch)
    start, stop = delivery.start - first, delivery.stop - first
    if delivery.marks is None:
        if stop - start != len(columns):
            columns = columns.taken(range(start, stop))
        return Rows(delivery.epoch, delivery.base, range(first + start, first + stop), columns, delivery.stop, 0)
    kept = columns.above(delivery.marks, range(start, stop))
    return Rows(
        delivery.epoch,
        delivery.base,
        [first + row for row in kept],
        columns.taken(kept),
        delivery.stop,
        stop - start - len(kept),
    )
