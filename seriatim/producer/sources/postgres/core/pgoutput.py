"""Messages of the pgoutput plugin, protocol version 1 (PostgreSQL manual, "Logical Replication Message Formats").

Row messages (insert, update, delete) are read in `rows`, straight into JSON; the rest here. All numbers big-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from seriatim.producer.sources.postgres.errors import MalformedLog

BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
ORIGIN: Final = ord("O")
RELATION: Final = ord("R")
TYPE: Final = ord("Y")
INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
TRUNCATE: Final = ord("T")
MESSAGE: Final = ord("M")
STREAM_ABORT: Final = ord("A")
"""Of protocol version 2. PostgreSQL 18 sends it in version 1 as well, of large transactions that were rolled back: it has sent nothing of them."""

POSTGRES_EPOCH_MS: Final = 946_684_800_000
"""2000-01-01 in milliseconds since 1970: PostgreSQL counts microseconds from there."""

_BEGIN = struct.Struct(">xQqI")
_COMMIT = struct.Struct(">xBQQq")
_RELATION = struct.Struct(">xI")
_TRUNCATE = struct.Struct(">xIB")
_COUNT = struct.Struct(">H")
_TYPE = struct.Struct(">Ii")


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction starts. `commit_lsn` is the start of its commit record."""

    commit_lsn: int
    ts_ms: int
    tx_id: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction ends. `end_lsn` is the position after its commit record."""

    commit_lsn: int
    end_lsn: int


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a relation; `is_key`: part of the replica identity (every column, where that is full)."""

    name: str
    type_oid: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as the messages after this one describe its rows. `identity`: one of d, n, f, i as in pg_class."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables emptied by one statement."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


def read_begin(data: bytes) -> Begin:
    """Read a Begin message."""
    commit_lsn, time_us, tx_id = _unpack(_BEGIN, data)
    return Begin(commit_lsn, time_us // 1000 + POSTGRES_EPOCH_MS, tx_id)


def read_commit(data: bytes) -> Commit:
    """Read a Commit message."""
    _, commit_lsn, end_lsn, _ = _unpack(_COMMIT, data)
    return Commit(commit_lsn, end_lsn)


def read_origin(data: bytes) -> str:
    """Read an Origin message: the name of the replication origin."""
    name, _ = _text(data, 9)
    return name


def read_truncate(data: bytes) -> Truncate:
    """Read a Truncate message."""
    count, flags = _unpack(_TRUNCATE, data)
    if len(data) < _TRUNCATE.size + 4 * count:
        raise MalformedLog("truncate message ends early")
    oids = struct.unpack_from(f">{count}I", data, _TRUNCATE.size)
    return Truncate(oids, bool(flags & 1), bool(flags & 2))


def read_relation(data: bytes) -> Relation:
    """Read a Relation message. An empty schema name stands for pg_catalog."""
    (oid,) = _unpack(_RELATION, data)
    schema, position = _text(data, _RELATION.size)
    name, position = _text(data, position)
    try:
        identity = chr(data[position])
        (count,) = _COUNT.unpack_from(data, position + 1)
        position += 3
        columns = []
        for _ in range(count):
            is_key = bool(data[position] & 1)
            column, position = _text(data, position + 1)
            type_oid, _modifier = _TYPE.unpack_from(data, position)
            position += _TYPE.size
            columns.append(Column(column, type_oid, is_key))
    except (IndexError, struct.error) as error:
        raise MalformedLog(f"relation message of {schema}.{name} ends early") from error
    return Relation(oid, schema or "pg_catalog", name, identity, tuple(columns))


def _unpack(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    try:
        return form.unpack_from(data)
    except struct.error as error:
        raise MalformedLog(f"message {data[:1]!r} ends early: {len(data)} bytes") from error


def _text(data: bytes, start: int) -> tuple[str, int]:
    end = data.find(b"\0", start)
    if end < 0:
        raise MalformedLog(f"message {data[:1]!r} has an unended string")
    try:
        return data[start:end].decode(), end + 1
    except UnicodeDecodeError as error:
        raise MalformedLog(f"message {data[:1]!r} has a string that is not UTF-8") from error
