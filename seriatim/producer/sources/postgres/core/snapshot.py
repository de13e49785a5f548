"""A snapshot's records: the tables as they were at the slot's consistent point, counted 1, 2, 3 and so on.

Rows come as lines of ``COPY … TO STDOUT`` in its text format (PostgreSQL manual, COPY, "Text Format").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from seriatim.producer.sources.postgres.core.assembler import Outgoing
from seriatim.producer.sources.postgres.core.identity import base_seq
from seriatim.producer.sources.postgres.core.pgoutput import Relation
from seriatim.producer.sources.postgres.core.rows import RowWriter, Values, converter_of
from seriatim.producer.sources.postgres.errors import MalformedLog
from seriatim.protocol.change import Change, Operation, Origin, encode

_ESCAPES: Final[Mapping[bytes, bytes]] = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_NULL: Final = b"\\N"
_replace_escapes = re.compile(rb"\\(.)", re.DOTALL).sub


def _plain(field: bytes) -> bytes:
    return _replace_escapes(lambda match: _ESCAPES.get(match[1], match[1]), field)


class SnapshotWriter:
    """Writes the records of one snapshot, in the order begin, rows of each table, end."""

    def __init__(self, *, db: str, slot: str, consistent_point: int, ts_ms: int) -> None:
        self._db = db
        self._slot = slot
        self._consistent_point = consistent_point
        self._ts_ms = ts_ms
        self._number = 0
        self._limit = base_seq(consistent_point)

    def begin(self, relations: Sequence[Relation]) -> Outgoing:
        """The first record: which tables follow."""
        tables = tuple(RowWriter(relation).table for relation in relations)
        origin = Origin(self._db, self._slot, self._consistent_point, self._next(), is_snapshot=True, tables=tables)
        return self._record("snapshot_begin", origin, self._number)

    def end(self) -> Outgoing:
        """The last record: a mark at or past its seq says that the snapshot is whole."""
        rows = self._number - 1
        origin = Origin(self._db, self._slot, self._consistent_point, 0, is_snapshot=True, changes=rows)
        return self._record("snapshot_end", origin, self._limit)

    def table(self, relation: Relation) -> TableRows:
        """What writes the rows of one table."""
        return TableRows(self, relation)

    def _record(self, operation: Operation, origin: Origin, seq: int) -> Outgoing:
        return Outgoing(encode(Change(operation, None, None, origin, self._ts_ms)), None, seq)

    def _next(self) -> int:
        self._number += 1
        if self._number >= self._limit:
            raise MalformedLog("a snapshot with more rows than fit below its end's seq")
        return self._number

    def _around(self, writer: RowWriter) -> tuple[bytes, bytes]:
        table = writer.table
        origin = Origin(
            self._db,
            self._slot,
            self._consistent_point,
            0,
            schema=table.schema,
            table=table.name,
            key=table.key,
            text_key=writer.text_key,
            is_snapshot=True,
        )
        text = encode(Change("r", None, {}, origin, self._ts_ms))
        return text[text.index(b',"source":') : text.rindex(b"0},")], text[text.rindex(b'},"ts_ms"') :]


class TableRows:
    """Writes the rows of one table of a snapshot."""

    def __init__(self, snapshot: SnapshotWriter, relation: Relation) -> None:
        self._snapshot = snapshot
        self._writer = RowWriter(relation)
        self._converters = tuple(converter_of(column.type_oid) for column in relation.columns)
        self._tail, self._end = snapshot._around(self._writer)  # noqa: SLF001 - one noun, two classes

    def row(self, line: bytes) -> Outgoing:
        """The record of one line, given without its newline.

        Raises:
            MalformedLog: it has not the columns of the table.
        """
        fields = line.split(b"\t") if self._converters else []
        if len(fields) != len(self._converters):
            raise MalformedLog(f"a row of {self._writer.table.name} with {len(fields)} columns")
        if b"\\" in line:
            values: Values = [
                b"null" if field == _NULL else convert(_plain(field) if b"\\" in field else field)
                for convert, field in zip(self._converters, fields, strict=True)
            ]
        else:
            values = [convert(field) for convert, field in zip(self._converters, fields, strict=True)]
        number = self._snapshot._next()  # noqa: SLF001 - one noun, two classes
        after, _ = self._writer.row(values)
        value = b'{"op":"r","before":null,"after":%b%b%d%b' % (after, self._tail, number, self._end)
        return Outgoing(value, self._writer.record_key(values), number)
