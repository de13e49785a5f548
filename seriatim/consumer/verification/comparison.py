"""Comparing two databases."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from seriatim.consumer.verification.chunks import Settle, compare_table
from seriatim.consumer.verification.errors import (
    DatabaseUnreachable,
    ReadRefused,
    RowsHidden,
    SameDatabase,
    UnknownTable,
)
from seriatim.consumer.verification.result import Comparison, Progress, TableResult
from seriatim.consumer.verification.tables import Name, Table, chosen, read_tables, schema_differences
from seriatim.protocol.change import TEXT_SETTINGS
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.postgres import (
    NO_TIMEOUTS,
    PLAIN_NAMES,
    SERVER_SETTINGS,
    TRANSACTION_TIMEOUT,
    defaults_beside,
    in_a_line,
)

CHUNK_ROWS = 20_000


def compare(
    source: str,
    target: str,
    tables: Sequence[str] = (),
    *,
    chunk_rows: int = CHUNK_ROWS,
    examples: int = 5,
    settle_s: float = 0.0,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    on_table: Callable[[TableResult], None] = lambda _table: None,
) -> Comparison:
    """Compare all tables of two databases, or those named (`table` or `schema.table`).

    Each side is read in one REPEATABLE READ snapshot; the two are taken one after the other, so a source that is still
    written to has changed in between, and the target is behind it. `settle_s`: for so long, at most, a table's rows that differ are looked at
    again, as they are by then. Values are compared as text under the settings the capture writes them with. `on_table` is told of each table
    as soon as it is compared: with large ones the end comes hours later, or never.

    Raises:
        DatabaseUnreachable: a side can't be reached, or was lost.
        SameDatabase: both sides are one database.
        UnknownTable: a table named is on neither side.
        ReadRefused: a side refused a read.
        RowsHidden: a side doesn't show every row of a table: only what it shows would be compared.
    """
    with _opened("source", source) as ours, _opened("target", target) as theirs:
        try:
            for connection in (ours, theirs):
                _take_snapshot(connection)
            _refuse_same(ours, theirs)
            settle = Settle(settle_s, lambda: _as_it_is(source, target)) if settle_s > 0 else None
            return _compare((ours, theirs), tables, chunk_rows, examples, settle, on_progress, on_table)
        except psycopg.Error as error:
            raise _failed(error, ours, theirs) from error


def _failed(
    error: psycopg.Error, ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any]
) -> DatabaseUnreachable | ReadRefused:
    is_source = ours.closed or ours.info.transaction_status == TransactionStatus.INERROR
    side = "source" if is_source else "target"
    if ours.closed or theirs.closed:
        return DatabaseUnreachable(f"the {side} was lost: {str(error).strip()}", side=side)
    return ReadRefused(f"the {side} refused a read: {str(error).strip()}", side=side)


def _compare(
    sides: tuple[psycopg.Connection[Any], psycopg.Connection[Any]],
    wanted: Sequence[str],
    chunk_rows: int,
    examples: int,
    settle: Settle | None,
    on_progress: Callable[[Progress], None],
    on_table: Callable[[TableResult], None],
) -> Comparison:
    ours, theirs = (read_tables(side) for side in sides)
    names, unknown = chosen(ours.keys() | theirs.keys(), wanted)
    if unknown:
        raise UnknownTable(f"neither side has {', '.join(unknown)}", tables=unknown)
    _refuse_hidden("source", ours, names)
    _refuse_hidden("target", theirs, names)
    results: list[TableResult] = []
    for done, name in enumerate(names):
        text = ".".join(name)

        def on_rows(rows: int, text: str = text, done: int = done) -> None:
            on_progress(Progress(text, done, len(names), rows))

        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            result = TableResult(text, 0, 0, 0, 0, schema_differences(mine, other), ())
        else:
            result = compare_table(
                sides, mine, other, chunk_rows=chunk_rows, examples=examples, on_rows=on_rows, settle=settle
            )
        results.append(result)
        on_table(result)
    return Comparison(tuple(results))


@contextmanager
def _as_it_is(source: str, target: str) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    """Both sides, in snapshots of now."""
    with _opened("source", source) as ours, _opened("target", target) as theirs:
        try:
            for connection in (ours, theirs):
                _take_snapshot(connection)
            yield ours, theirs
        except psycopg.Error as error:
            raise _failed(error, ours, theirs) from error


def _refuse_same(ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any]) -> None:
    """By whatever addresses: of one database two can't have one lock. It ends with the snapshot; any role may have it, also at a stand-by."""
    key = secrets.randbits(63)
    locked = [side.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone() for side in (ours, theirs)]
    if locked[1] == (False,):
        raise SameDatabase("source and target are the same database, which would be compared with itself")


def _refuse_hidden(side: str, tables: Mapping[Name, Table], names: Iterable[Name]) -> None:
    for name in names:
        if name in tables and tables[name].hides_rows:
            text = ".".join(name)
            raise RowsHidden(f"row-level security of the {side} hides rows of table {text}", side=side, table=text)


def _opened(side: str, dsn: str) -> psycopg.Connection[Any]:
    try:
        defaults: dict[str, Any] = defaults_beside(conninfo_to_dict(dsn))
        return psycopg.connect(dsn, autocommit=True, prepare_threshold=None, **defaults)
    except psycopg.ProgrammingError as error:
        raise InvalidArgument(f"the {side}'s DSN can't be read: {in_a_line(error)}") from error
    except psycopg.Error as error:
        raise DatabaseUnreachable(f"the {side} can't be reached: {in_a_line(error)}", side=side) from error


def _take_snapshot(connection: psycopg.Connection[Any]) -> None:
    """By the first query. What is set is set for the transaction: behind it a pool's session (transaction mode) is somebody else's.

    Nor does a statement that is prepared stay there: its name would be taken for whoever compares next.
    """
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    names = [*NO_TIMEOUTS, TRANSACTION_TIMEOUT]  # while one side is read the other waits
    connection.execute("SELECT set_config(name, '0', true) FROM pg_settings WHERE name = ANY(%s)", (names,))
    for name, value in (*TEXT_SETTINGS.items(), *PLAIN_NAMES.items(), *SERVER_SETTINGS.items()):
        connection.execute("SELECT set_config(%s, %s, true)", (name, value))
    connection.execute("SET LOCAL row_security = off")  # a read that policies would take rows from fails
