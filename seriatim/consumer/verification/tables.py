"""What both sides have to compare."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import psycopg

Name: TypeAlias = tuple[str, str]

_TABLES = """
SELECT n.nspname, c.relname,
       (SELECT coalesce(json_agg(json_build_array(a.attname, format_type(a.atttypid, a.atttypmod),
                                                  (SELECT quote_ident(s.nspname) || '.' FROM pg_type t JOIN pg_namespace s ON s.oid = t.typnamespace
                                                    WHERE t.oid = a.atttypid AND EXISTS (
                                                          SELECT FROM pg_depend d WHERE d.classid = 'pg_type'::regclass
                                                             AND d.objid IN (t.oid, t.typelem) AND d.deptype = 'e'))) ORDER BY a.attnum), '[]')
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       (SELECT json_agg(json_build_array(a.attname, format_type(coalesce(nullif(t.typbasetype, 0), t.oid), -1), a.attcollation <> 0,
                            (SELECT json_agg(e.enumlabel ORDER BY e.enumsortorder)::text FROM pg_enum e WHERE e.enumtypid = t.oid)) ORDER BY k.place)
          FROM pg_index i, unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, place)
          JOIN pg_attribute a ON a.attnum = k.attnum JOIN pg_type t ON t.oid = a.atttypid
         WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid),
       row_security_active(c.oid), c.relkind = 'p'
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
   AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'seriatim_replay')
"""

_ORDERED_ALIKE = frozenset({
    "smallint", "integer", "bigint", "numeric", "real", "double precision", "money", "oid", "boolean", "uuid", "bytea", "pg_lsn",
    "text", "character varying", "bpchar", "name", '"char"', '"bit"', "bit varying",
    "date", "time without time zone", "time with time zone", "timestamp without time zone", "timestamp with time zone", "interval",
    "inet", "cidr", "macaddr", "macaddr8", "int4range", "int8range", "numrange", "daterange", "tsrange", "tstzrange",
})  # fmt: skip
"""Types whose values have one order in all databases, or, texts, need none. An array, a composite or a range may have a text or an enum in
it; jsonb and citext go by the database's locale."""
_ORDERED_AS = {"smallint": "bigint", "integer": "bigint", "character varying": "text"}


class KeyColumn(NamedTuple):
    """A primary key's column.

    kind: its type without a length, or that beneath its domain. order: what its order depends on beside that: of an enum, its values, which
    may have been added in another order; None for all else.
    """

    name: str
    kind: str
    has_collation: bool
    order: str | None

    @property
    def is_ordered_alike(self) -> bool:
        """Whether its values have the same order in each database where `kind` and `order` are the same."""
        return self.order is not None or self.kind in _ORDERED_ALIKE


@dataclass(frozen=True, slots=True)
class Table:
    """One side's table.

    columns: name and type in order. types: the same, without the schema where the type is of an extension, which each database has
    where it likes. key: of the primary key. hides_rows: row-level security keeps rows of it from the role that asks. is_partitioned: it has
    no rows of its own.
    """

    name: Name
    columns: dict[str, str]
    types: dict[str, str]
    key: tuple[KeyColumn, ...]
    hides_rows: bool = False
    is_partitioned: bool = False

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Names of the primary key's columns."""
        return tuple(column.name for column in self.key)

    @property
    def key_order(self) -> tuple[tuple[str, str, str | None], ...]:
        """By what the primary key is ordered: its columns, each with a type that all have that are compared with it.

        None of them where databases may order such values in ways of their own.
        """
        if not all(column.is_ordered_alike for column in self.key):
            return ()
        return tuple((name, _ORDERED_AS.get(kind, kind), order) for name, kind, _, order in self.key)


def read_tables(connection: psycopg.Connection[Any]) -> dict[Name, Table]:
    """All user tables; a partitioned one counts as one. With PLAIN_NAMES in force types have their schemas in their names."""
    rows = connection.execute(_TABLES).fetchall()
    return {
        (schema, table): Table(
            (schema, table),
            {name: kind for name, kind, _ in columns},
            {name: kind.removeprefix(extensions or "") for name, kind, extensions in columns},
            tuple(KeyColumn(*column) for column in key or ()),
            hides_rows,
            is_partitioned,
        )
        for schema, table, columns, key, hides_rows, is_partitioned in rows
    }


def chosen(names: Collection[Name], wanted: Collection[str]) -> tuple[list[Name], list[str]]:
    """The names that `wanted` (`table` or `schema.table`; all where empty) means, and what it names in vain."""
    if not wanted:
        return sorted(names), []
    found = [name for name in names if name[1] in wanted or ".".join(name) in wanted]
    unknown = [text for text in wanted if not any(text in {name[1], ".".join(name)} for name in names)]
    return sorted(found), unknown


def schema_differences(source: Table | None, target: Table | None) -> tuple[str, ...]:
    """What is not the same about the tables themselves; the order of columns doesn't count."""
    if source is None or target is None:
        return ("the target lacks the table" if target is None else "the source lacks the table",)
    found = [f"the target lacks column {name}" for name in source.columns if name not in target.columns]
    found += [f"the source lacks column {name}" for name in target.columns if name not in source.columns]
    found += [
        f"column {name} is {kind} in the source, {target.columns[name]} in the target"
        for name, kind in source.columns.items()
        if name in target.columns and target.types[name] != source.types[name]
    ]
    if source.key_columns != target.key_columns:
        sides = [", ".join(table.key_columns) or "none" for table in (source, target)]
        found.append(f"the primary key is ({sides[0]}) in the source, ({sides[1]}) in the target")
    return tuple(found)
