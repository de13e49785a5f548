"""Records as Arrow batches, in the shape that the data source promises to Spark."""

from __future__ import annotations

import pyarrow as pa

from seriatim.consumer.core.rows import Rows
from seriatim.protocol.record import Headers

SCHEMA = (
    "queue string, offset bigint, epoch bigint, index bigint, source string, seq decimal(20,0), key binary, value binary, "
    "headers array<struct<name: string, value: binary>>, timestamp timestamp"
)
"""What Spark shows. A seq is an unsigned 64-bit number: Spark's bigint would lose the upper half, decimal(20,0) loses none.

The offset, the epoch and the index are unsigned, too, but count up from 0 by one and stay far below the half.
"""

_HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
_SEQ = pa.decimal128(20, 0)
_TIMESTAMP = pa.timestamp("us", tz="UTC")
_TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""Spark counts microseconds, in as many bits as a record has for milliseconds: what it can't hold is null."""

ARROW_SCHEMA = pa.schema(
    [
        ("queue", pa.string()),
        ("offset", pa.int64()),
        ("epoch", pa.int64()),
        ("index", pa.int64()),
        ("source", pa.string()),
        ("seq", _SEQ),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("timestamp", _TIMESTAMP),
    ]
)
"""`SCHEMA` as Arrow has it; Spark compares the two before it takes a batch."""


def arrow_batch(queue: str, rows: Rows) -> pa.RecordBatch:
    """One Arrow batch of `ARROW_SCHEMA` with the records of `rows`, in their order."""
    columns = rows.columns
    count = len(columns)
    sources = columns.sources
    stamps: list[int] | list[int | None] = columns.timestamps_ms
    if max(map(abs, columns.timestamps_ms), default=0) > _TIMESTAMP_MS_MAX:
        stamps = [None if abs(stamp) > _TIMESTAMP_MS_MAX else stamp for stamp in columns.timestamps_ms]
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(queue), count),
            pa.array(rows.offsets, pa.int64()),
            pa.repeat(pa.scalar(int(rows.epoch), pa.int64()), count),
            pa.array(rows.indexes, pa.int64()),
            pa.repeat(pa.scalar(sources), count) if isinstance(sources, str) else pa.array(sources, pa.string()),
            pa.array(columns.seqs, pa.uint64()).cast(_SEQ),
            pa.nulls(count, pa.binary()) if columns.keys is None else pa.array(columns.keys, pa.binary()),
            pa.array(columns.values, pa.binary()),
            _headers([()] * count if columns.headers is None else columns.headers),
            pa.array(stamps, pa.int64()).cast(pa.timestamp("ms", tz="UTC")).cast(_TIMESTAMP),
        ],
        schema=ARROW_SCHEMA,
    )


def _headers(headers: list[Headers]) -> pa.Array:
    """Built from flat columns: a thousandth of the time that a list of dicts takes where there are no headers."""
    bounds = [0]
    for one in headers:
        bounds.append(bounds[-1] + len(one))
    names = pa.array([name for one in headers for name, _ in one], pa.string())
    values = pa.array([value for one in headers for _, value in one], pa.binary())
    pairs = pa.StructArray.from_arrays([names, values], fields=list(_HEADERS.value_type))
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pairs, type=_HEADERS)
