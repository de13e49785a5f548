"""The change envelope: what a captured database log puts into a record's value, and a replay takes out of it.

JSON in the manner of Debezium's envelope, so that its users find their way::

    {"op": "u", "before": {"id": 7}, "after": {"id": 8, "name": "x"}, "source": {...}, "ts_ms": 1760000000000}

Operations (`op`):

=================  ====================================================================================================
``begin``          a transaction starts; carries txId, commit_lsn, ts_ms
``c`` ``u`` ``d``  insert, update, delete of one row
``t``              truncate; ``source.tables`` lists all tables of the statement, with cascade and restart_identity
``commit``         the transaction is over; ``source.changes`` is the number of its c, u, d, t records
``snapshot_begin`` a snapshot starts: ``source.tables`` lists its tables. Whoever applies it empties these tables first,
                   also when an earlier snapshot was left unfinished
``r``              one row of the snapshot (``source.snapshot`` is true)
``snapshot_end``   the snapshot is whole; ``source.changes`` is the number of its rows
``heartbeat``      nothing of ours changed up to ``commit_lsn``; to be skipped by whoever applies
=================  ====================================================================================================

Values are lossless: integers (int2, int4, int8) and booleans are JSON's own, null is null, everything else is the text
PostgreSQL writes with `TEXT_SETTINGS` in force. Read them back with the same settings.

Images. ``after`` holds the new row (c, u, r), ``before`` what the replica identity gives of the old one: the whole row
(replica identity full), or the key columns (d always, u only when the key changed). A value that PostgreSQL did not
send, because it is stored out of line and was not touched, is absent from ``after`` and named in ``source.unchanged``.

Keys. ``source.key`` names the columns that identify a row: the replica identity's. It is empty for a table whose
replica identity is full: there the whole ``before`` identifies the row, and equal rows may exist several times (a
target may still use a primary key of its own that the columns cover). It is also empty for a snapshot row of such a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from seriatim.protocol.errors import CallerError

Operation: TypeAlias = Literal[
    "begin", "c", "u", "d", "t", "commit", "snapshot_begin", "r", "snapshot_end", "heartbeat"
]
Value: TypeAlias = int | bool | str | None
Row: TypeAlias = Mapping[str, Value]

OPERATIONS: Final[frozenset[str]] = frozenset(get_args(Operation))
ROW_OPERATIONS: Final[frozenset[str]] = frozenset({"c", "u", "d", "r"})
CONNECTOR: Final = "postgresql"

TEXT_SETTINGS: Final[Mapping[str, str]] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "xmloption": "content",
    "array_nulls": "on",
    "quote_all_identifiers": "off",
}
"""Session settings under which values were written as text; a session that reads them back uses the same."""


class MalformedChange(CallerError):
    """A record's value is no change envelope."""

    code = "malformed-change"
    next_step = "the queue holds something else than a captured log, or a newer version wrote it"


@dataclass(frozen=True, slots=True)
class Table:
    """A table as a snapshot_begin or a truncate names it.

    Attributes:
        schema: schema name.
        name: table name.
        key: names of the columns that identify a row; empty with replica identity full.
        columns: names of the columns sent, in order.
    """

    schema: str
    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]


class Origin(NamedTuple):
    """Where a change comes from: the envelope's ``source``. A tuple, as it and `Change` are made for each record: in a third of the time.

    Attributes:
        db: database name.
        slot: replication slot.
        commit_lsn: position of the transaction's commit record (its start); in a snapshot the consistent point; in a
            heartbeat the position reached.
        number: place inside the transaction: 1 for begin, then the changes, the commit last. In a snapshot the place
            inside the snapshot. 0 for a heartbeat and for snapshot_end.
        tx_id: transaction id; None in a snapshot and a heartbeat. (``txId`` in the JSON.)
        schema: of the table; None where no single table is meant.
        table: the table; None where no single table is meant.
        key: names of the columns that identify a row, see the module's docstring.
        text_key: those of them that are texts, and tell apart all that is written differently: `1.0` and `1.00`.
        is_snapshot: part of a snapshot. (``snapshot`` in the JSON.)
        unchanged: columns absent from ``after`` because their stored value was not touched.
        tables: of a snapshot_begin or a truncate.
        cascade: of a truncate.
        restart_identity: of a truncate.
        changes: of a commit or a snapshot_end: the number of c, u, d, t or r records before it.
        end_lsn: of a commit: the position after the commit record.
        replicated_from: name of the replication origin, where the change was itself replicated into the source
            database by a session that set one. (``origin`` in the JSON.)
    """

    db: str
    slot: str
    commit_lsn: int
    number: int
    tx_id: int | None = None
    schema: str | None = None
    table: str | None = None
    key: tuple[str, ...] = ()
    text_key: tuple[str, ...] = ()
    is_snapshot: bool = False
    unchanged: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    cascade: bool = False
    restart_identity: bool = False
    changes: int | None = None
    end_lsn: int | None = None
    replicated_from: str | None = None


class Change(NamedTuple):
    """One envelope.

    Attributes:
        op: operation.
        before: old image, or None.
        after: new image, or None.
        source: where it comes from.
        ts_ms: milliseconds since 1970: commit time; in a snapshot and a heartbeat the time of the capture.
    """

    op: Operation
    before: Row | None
    after: Row | None
    source: Origin
    ts_ms: int


dump_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
"""Compact JSON, not escaped to ASCII: the one way all parts of an envelope are written."""
_decoder = json.JSONDecoder()


def encode(change: Change) -> bytes:
    """The envelope as UTF-8 JSON. Members of ``source`` that hold nothing are left out."""
    source = _encode_origin(change.source)
    return dump_json(
        {"op": change.op, "before": change.before, "after": change.after, "source": source, "ts_ms": change.ts_ms}
    ).encode()


def encode_table(table: Table) -> dict[str, object]:
    """A member of ``source.tables``."""
    return {"schema": table.schema, "table": table.name, "key": table.key, "columns": table.columns}


def _encode_origin(origin: Origin) -> dict[str, object]:
    source: dict[str, object] = {"connector": CONNECTOR, "db": origin.db, "slot": origin.slot}
    if origin.tx_id is not None:
        source["txId"] = origin.tx_id
    source["commit_lsn"] = origin.commit_lsn
    if origin.replicated_from is not None:
        source["origin"] = origin.replicated_from
    if origin.is_snapshot:
        source["snapshot"] = True
    if origin.table is not None:
        source["schema"] = origin.schema
        source["table"] = origin.table
        source["key"] = origin.key
    if origin.text_key:
        source["text_key"] = origin.text_key
    if origin.tables:
        source["tables"] = [encode_table(table) for table in origin.tables]
        source["cascade"] = origin.cascade
        source["restart_identity"] = origin.restart_identity
    if origin.changes is not None:
        source["changes"] = origin.changes
    if origin.end_lsn is not None:
        source["end_lsn"] = origin.end_lsn
    if origin.unchanged:
        source["unchanged"] = origin.unchanged
    source["number"] = origin.number
    return source


def decode(value: bytes | str) -> Change:
    """Read an envelope. Members it doesn't know are ignored.

    Raises:
        MalformedChange: not JSON, a member missing or of the wrong type, an unknown operation, or images that the
            operation can't have.
    """
    try:
        envelope = _load(value if isinstance(value, str) else str(value, "utf-8"))
        operation = envelope["op"]
        before, after = envelope["before"], envelope["after"]
        source, ts_ms = envelope["source"], envelope["ts_ms"]
        origin = _decode_origin(source)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedChange(f"not a change envelope: {error!r}; value starts {value[:80]!r}") from error
    flaw = _flaw(operation, before, after, origin, ts_ms)
    if flaw is not None:
        raise MalformedChange(f"{flaw}; value starts {value[:80]!r}")
    return Change(operation, before, after, origin, ts_ms)


def _load(text: str) -> Any:
    """As JSONDecoder.decode, which looks for blanks around the text, and takes a quarter longer for that."""
    if text[:1] == "{":
        found, end = _decoder.raw_decode(text)
        if end == len(text):
            return found
    return _decoder.decode(text)


def _decode_origin(source: dict[str, Any]) -> Origin:
    if "tables" not in source and "table" in source:  # a row: the usual case, kept short
        return Origin(
            source["db"],
            source["slot"],
            source["commit_lsn"],
            source["number"],
            source.get("txId"),
            source["schema"],
            source["table"],
            tuple(source["key"]),
            tuple(source.get("text_key", ())),
            source.get("snapshot", False),
            tuple(source.get("unchanged", ())),
            replicated_from=source.get("origin"),
        )
    return Origin(
        db=source["db"],
        slot=source["slot"],
        commit_lsn=source["commit_lsn"],
        number=source["number"],
        tx_id=source.get("txId"),
        is_snapshot=source.get("snapshot", False),
        tables=tuple(
            Table(table["schema"], table["table"], tuple(table["key"]), tuple(table["columns"]))
            for table in source.get("tables", ())
        ),
        cascade=source.get("cascade", False),
        restart_identity=source.get("restart_identity", False),
        changes=source.get("changes"),
        end_lsn=source.get("end_lsn"),
        replicated_from=source.get("origin"),
    )


_IMAGES: Final[Mapping[str, tuple[bool | None, bool | None]]] = {
    # operation: must there be a before, an after? None: either way
    "c": (False, True),
    "u": (None, True),
    "d": (True, False),
    "r": (False, True),
}


def _flaw(operation: object, before: object, after: object, origin: Origin, ts_ms: object) -> str | None:
    """What is wrong with an envelope whose members are all there."""
    if not isinstance(operation, str) or operation not in OPERATIONS:
        return f"unknown operation {operation!r}"
    if type(ts_ms) is not int or type(origin.commit_lsn) is not int or type(origin.number) is not int:
        return "ts_ms, commit_lsn and number must be integers"
    needs_before, needs_after = _IMAGES.get(operation, (False, False))
    for name, image, needed in (("before", before, needs_before), ("after", after, needs_after)):
        if image is not None and type(image) is not dict:
            return f"{name} must be an object or null"
        if needed is not None and needed is (image is None):
            return f"operation {operation} {'without' if needed else 'with'} {name}"
    if operation in ROW_OPERATIONS and (type(origin.table) is not str or type(origin.schema) is not str):
        return f"operation {operation} without a table"
    if operation == "t" and not origin.tables:
        return "truncate without tables"
    if operation == "commit" and (type(origin.changes) is not int or type(origin.end_lsn) is not int):
        return "commit without the number of its changes and its end"
    return None


def format_lsn(lsn: int) -> str:
    """A log position in PostgreSQL's form."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def record_key(schema: str, table: str, key_values: Sequence[Value]) -> bytes:
    """A change record's key: ``["schema.table",value,…]`` as compact JSON, the row's key values in order.

    The new row's values, for a delete the old one's. Without a key (replica identity full) the table alone.
    """
    return dump_json([f"{schema}.{table}", *key_values]).encode()
