"""What can be wrong with the rows of a micro-batch, or with the tables they are meant for.

SeriatimError
├── CallerError
│   └── UnfitTarget           the target's tables don't fit; the message has the statement that mends it
│       ├── MissingTables
│       ├── MissingColumns
│       ├── MissingKey
│       ├── GeneratedKey
│       ├── NarrowColumn
│       └── UnloggedTable
├── RefusedError
│   └── GivenUp               a transaction of which a part was planned was never finished
└── BugError
    └── BrokenStream          the rows are no run of whole transactions and snapshots: something before this lost or changed one
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from seriatim.consumer.spark.apply.shape import TableName
from seriatim.protocol.errors import BugError, CallerError, RefusedError


class UnfitTarget(CallerError):
    """The target's tables don't fit a transaction. Mend the target, then start the replay again: all before it is applied, nothing of it."""

    code = "unfit-target"


class MissingTables(UnfitTarget):
    """`details["tables"]` names the tables."""

    code = "missing-tables"

    def __init__(self, tables: Iterable[TableName]) -> None:
        tables = sorted(tables)
        names = [str(table) for table in tables]
        wanted = " ".join("--table=" + shlex.quote(f"{_named(one.schema)}.{_named(one.table)}") for one in tables)
        super().__init__(
            f"the target lacks {'table' if len(names) == 1 else 'tables'} {', '.join(names)}; "
            f"make them with: pg_dump --schema-only {wanted} SOURCE | psql TARGET",
            tables=names,
        )


class MissingColumns(UnfitTarget):
    """`details` holds table, columns and offset."""

    code = "missing-columns"

    def __init__(self, table: TableName, columns: Iterable[str], offset: int) -> None:
        names = sorted(columns)
        adds = ", ".join(f"ADD COLUMN {quote(name)} TYPE_AND_DEFAULT_AS_IN_THE_SOURCE" for name in names)
        super().__init__(
            f"the target's table {table} lacks {', '.join(names)}, which the change at offset {offset} has; "
            f"mend it with: ALTER TABLE {quote(table.schema)}.{quote(table.table)} {adds}; "
            "or rename one, where the source did",
            table=str(table),
            columns=names,
            offset=offset,
        )


class MissingKey(UnfitTarget):
    """`details` holds table, key and offset."""

    code = "missing-key"

    def __init__(self, table: TableName, key: tuple[str, ...], offset: int) -> None:
        columns = ", ".join(map(quote, key))
        super().__init__(
            f"the target's table {table} has no unique rule over ({columns}), the key of the change at offset {offset}; "
            f"mend it with: ALTER TABLE {quote(table.schema)}.{quote(table.table)} ADD PRIMARY KEY ({columns})",
            table=str(table),
            key=list(key),
            offset=offset,
        )


class GeneratedKey(UnfitTarget):
    """The target makes a column itself by which the source tells rows apart. `details` holds table, columns and offset."""

    code = "generated-key"

    def __init__(self, table: TableName, columns: Iterable[str], offset: int) -> None:
        names = sorted(columns)
        alters = ", ".join(f"ALTER COLUMN {quote(name)} DROP EXPRESSION" for name in names)
        super().__init__(
            f"the target's table {table} generates {', '.join(names)}, of the key of the change at offset {offset}; "
            f"mend it with: ALTER TABLE {quote(table.schema)}.{quote(table.table)} {alters}",
            table=str(table),
            columns=names,
            offset=offset,
        )


class NarrowColumn(UnfitTarget):
    """The target would hold less of a value, or more, and two keys might become one. `details` holds table, column, type and offset."""

    code = "narrow-column"

    def __init__(self, table: TableName, column: str, type_name: str, offset: int) -> None:
        super().__init__(
            f"column {column} of the target's table {table} is {type_name}, which holds fewer digits, fields, bytes, or blanks at the end, than "
            f"the change at offset {offset} has, or another kind of time; mend it with: ALTER TABLE {quote(table.schema)}.{quote(table.table)} ALTER COLUMN {quote(column)} TYPE TYPE_AS_IN_THE_SOURCE",
            table=str(table),
            column=column,
            type=type_name,
            offset=offset,
        )


class UnloggedTable(UnfitTarget):
    """PostgreSQL empties it when it recovers from a crash, and the position of what was applied stays. `details` holds table and offset."""

    code = "unlogged-table"

    def __init__(self, table: TableName, unlogged: str, offset: int) -> None:
        super().__init__(
            f"a crash of the target would empty its table {table} for good, of which the change at offset {offset} is: {unlogged} is UNLOGGED; "
            f"mend it with: ALTER TABLE {unlogged} SET LOGGED",
            table=str(table),
            offset=offset,
        )


class BrokenStream(BugError):
    """The rows are no run of whole transactions and snapshots. Going on would leave a silent gap, so nothing is applied."""

    code = "broken-stream"
    next_step = (
        "start the capture with another --slot, which takes a new snapshot, and have the target's row go on there, with its next_offset: "
        'docs/databases.md, "A replay\'s target"'
    )

    def __init__(self, what: str, offset: int) -> None:
        super().__init__(f"{what} at offset {offset}; nothing of this micro-batch was applied", offset=offset)


class GivenUp(RefusedError):
    """The transaction that began at offset `begun_at` was left unfinished: a snapshot at offset `ended_at` takes its place."""

    code = "given-up"

    def __init__(self, begun_at: int, ended_at: int) -> None:
        super().__init__(f"the transaction at offset {begun_at} was given up at offset {ended_at}")
        self.begun_at = begun_at
        self.ended_at = ended_at


def _named(name: str) -> str:
    """As pg_dump takes it, to which capital letters without quotes are small ones."""
    return name if re.fullmatch("[a-z_][a-z0-9_]*", name) else quote(name)


def quote(name: str) -> str:
    """A name as SQL takes it in any case."""
    return '"' + name.replace('"', '""') + '"'
