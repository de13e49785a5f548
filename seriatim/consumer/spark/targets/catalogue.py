"""The target's tables, read from its catalogue in one query."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import psycopg

from seriatim.consumer.spark.apply.errors import quote
from seriatim.consumer.spark.apply.shape import ArrayType, Kind, RowType, TableName, TableShape

_TABLES = b"""
WITH RECURSIVE domain AS (  -- what is beneath each, which may be a domain
     SELECT oid, typbasetype AS kind FROM pg_type WHERE typtype = 'd'
      UNION ALL
     SELECT d.oid, t.typbasetype FROM domain d JOIN pg_type t ON t.oid = d.kind AND t.typtype = 'd'),
     equal AS MATERIALIZED (  -- of types that extensions bring
     SELECT o.oid AS class, format('OPERATOR(%%I.%%s)', s.nspname, e.oprname) AS operator
       FROM pg_opclass o JOIN pg_am m ON m.oid = o.opcmethod AND m.amname = 'btree'
       JOIN pg_amop p ON p.amopfamily = o.opcfamily AND p.amopstrategy = 3
                     AND p.amoplefttype = o.opcintype AND p.amoprighttype = o.opcintype
       JOIN pg_operator e ON e.oid = p.amopopr
       JOIN pg_namespace s ON s.oid = e.oprnamespace AND s.nspname <> 'pg_catalog'),
     enforced_at_once AS MATERIALIZED (  -- looked for table by table it took nine tenths of the time
     SELECT unnest(ARRAY[conrelid, confrelid]) AS relid
       FROM pg_constraint WHERE contype = 'f' AND NOT (condeferrable AND confupdtype = 'a' AND confdeltype = 'a'))
SELECT n.nspname, c.relname, c.relkind = 'p',
       (SELECT coalesce(json_agg(json_build_array(a.attname, format_type(a.atttypid, a.atttypmod),
                                                  a.attgenerated <> '', a.attidentity = 'a',
                                                  a.attcollation IN (SELECT oid FROM pg_collation WHERE NOT collisdeterministic)) ORDER BY a.attnum), '[]')
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       (SELECT coalesce(json_agg(json_build_array(
                   (SELECT json_agg(a.attname ORDER BY k.place)
                      FROM unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, place)
                      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum),
                   i.indisprimary,
                   i.indexprs IS NULL AND i.indpred IS NULL AND (i.indisunique OR NOT i.indisexclusion),  -- WITHOUT OVERLAPS is both
                   i.indimmediate AND NOT i.indisexclusion,
                   i.indisvalid)), '[]')
          FROM pg_index i WHERE i.indrelid = c.oid AND i.indisready AND (i.indisunique OR i.indisexclusion)),
       CASE WHEN c.relkind = 'p'
            THEN EXISTS (SELECT FROM pg_partition_tree(c.oid) t JOIN pg_index i ON i.indrelid = t.relid AND i.indrelid <> c.oid
                           JOIN pg_class p ON p.oid = i.indexrelid AND NOT p.relispartition  -- and so no part of one of the table's
                          WHERE i.indisready AND (i.indisunique OR i.indisexclusion))
            ELSE false END,
       c.oid IN (SELECT relid FROM enforced_at_once),
       (SELECT coalesce(json_object_agg(a.attname, e.operator), '{}')
          FROM pg_index i, unnest(i.indkey[0:i.indnkeyatts - 1], i.indclass[0:i.indnkeyatts - 1]) AS k(attnum, class)
          JOIN equal e USING (class) JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
         WHERE i.indrelid = c.oid AND i.indisvalid AND i.indisunique),
       (SELECT coalesce(json_object_agg(a.attname, format_type(t.oid, NULL)), '{}')
          FROM domain d JOIN pg_type t ON t.oid = d.kind AND t.typtype = 'e' JOIN pg_attribute a ON a.atttypid = d.oid
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       CASE WHEN c.relkind = 'p'  -- whose own persistence means nothing
            THEN (SELECT coalesce(min(format('%%I.%%I', s.nspname, p.relname)), '')
                    FROM pg_partition_tree(c.oid) t JOIN pg_class p ON p.oid = t.relid JOIN pg_namespace s ON s.oid = p.relnamespace
                   WHERE t.isleaf AND p.relpersistence = 'u')
            WHEN c.relpersistence = 'u' THEN format('%%I.%%I', n.nspname, c.relname)
            ELSE '' END
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast', 'seriatim_replay')
"""

_NAMED = b"   AND (n.nspname, c.relname) IN (SELECT * FROM unnest(%s::text[], %s::text[]))"
"""Behind _TABLES: of tables of these schemas and names alone."""

_MADE = b"""
SELECT t.oid::bigint, t.typarray::bigint, t.typtype = 'c',
       CASE t.typtype WHEN 'd' THEN json_build_array(json_build_array(t.typbasetype::bigint, format_type(t.typbasetype, t.typtypmod)))
                      ELSE (SELECT coalesce(json_agg(json_build_array(a.atttypid::bigint, format_type(a.atttypid, a.atttypmod)) ORDER BY a.attnum), '[]')
                              FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) END
  FROM pg_type t
 WHERE t.typtype = 'd'
    OR t.typtype = 'c' AND (t.oid IN (SELECT atttypid FROM pg_attribute WHERE attnum > 0) OR t.typarray IN (SELECT atttypid FROM pg_attribute WHERE attnum > 0)
                            OR t.oid IN (SELECT typbasetype FROM pg_type) OR t.typarray IN (SELECT typbasetype FROM pg_type))
"""
"""Domains, and composite types that something is of (each table is one): what each is made of."""

_OF_MADE = b"""
SELECT n.nspname, c.relname, json_object_agg(a.attname, a.atttypid::bigint)
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid = ANY (%s::bigint[]::oid[])
 GROUP BY 1, 2
"""
"""Columns of such a type, or of an array of one."""

_ABOVE = b"""
SELECT n.nspname, c.relname
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'p' AND EXISTS (SELECT FROM pg_constraint f WHERE f.contype = 'f' AND f.conrelid = c.oid)
   AND NOT EXISTS (SELECT FROM pg_partition_tree(c.oid) t WHERE t.isleaf AND t.relid <> ALL (%s::text[]::regclass[]))
"""


def read_above(connection: psycopg.Connection[Any], tables: Iterable[TableName]) -> set[TableName]:
    """The partitioned tables that refer to others, and have no rows but what is in these tables: none, where they have no partitions."""
    names = [f"{quote(name.schema)}.{quote(name.table)}" for name in tables]
    return {TableName(*row) for row in connection.execute(_ABOVE, (names,)).fetchall()}


def read_shapes(
    connection: psycopg.Connection[Any], names: Collection[TableName] | None = None, *, fires_triggers: bool
) -> dict[TableName, TableShape]:
    """Of all user tables that the connection's database has, or of those of these names that are there.

    `fires_triggers`: the session can't switch foreign keys off, so tables that have one keep the order of their changes.
    """
    if names is None:
        rows = connection.execute(_TABLES, ())
    else:
        rows = connection.execute(_TABLES + _NAMED, ([name.schema for name in names], [name.table for name in names]))
    return {TableName(row[0], row[1]): _shape(row, fires_triggers=fires_triggers) for row in rows.fetchall()}


def read_beneath(connection: psycopg.Connection[Any], shapes: dict[TableName, TableShape]) -> None:
    """Add to the shapes what domains and composite types are made of: what a plan is made with, and nobody else needs."""
    rows = connection.execute(_MADE).fetchall()
    made = {oid: (is_row, parts) for oid, _, is_row, parts in rows}
    elements = {array: oid for oid, array, *_ in rows if array}

    def kind(oid: int, spelled: str = "") -> Kind:
        if oid in elements:
            element = kind(elements[oid])
            return f"{element}[]" if isinstance(element, str) else ArrayType(element)
        if oid not in made:
            return spelled
        is_row, parts = made[oid]
        return RowType(tuple(kind(*part) for part in parts)) if is_row else kind(*parts[0])

    for schema, table, columns in connection.execute(_OF_MADE, ([*made, *elements],)).fetchall():
        name = TableName(schema, table)
        if name in shapes:
            shapes[name] = replace(shapes[name], beneath={column: kind(oid) for column, oid in columns.items()})


def _shape(row: tuple[Any, ...], *, fires_triggers: bool) -> TableShape:
    schema, table, is_partitioned, columns, indexes, has_own_rule, has_foreign_key, operators, enums, unlogged = row
    valid = [index for index in indexes if index[-1]]
    rules = [_rule(index) for index in valid]
    # Enforced, but maybe not kept by all rows: one that is being built CONCURRENTLY, or was given up. Beside a valid one of its columns it asks for no more.
    has_half_rule = any(_rule(index) not in rules for index in indexes)
    return TableShape(
        name=TableName(schema, table),
        columns={name: type_name for name, type_name, *_ in columns},
        primary_key=next((tuple(names) for names, is_primary, *_ in valid if is_primary), ()),
        generated=frozenset(name for name, _, is_generated, *_ in columns if is_generated),
        always_identity=frozenset(name for name, _, _, is_always, _ in columns if is_always),
        coarse=frozenset(name for name, *_, is_coarse in columns if is_coarse),
        unique=(*rules, *([None] if has_own_rule or has_half_rule else [])),
        arbiters=frozenset(
            frozenset(names) for names, _, is_plain, is_immediate, _ in valid if is_plain and is_immediate
        ),
        keeps_order=fires_triggers and has_foreign_key,
        is_partitioned=is_partitioned,
        operators=operators,
        enums=enums,
        unlogged=unlogged,
    )


def _rule(index: Any) -> frozenset[str] | None:
    names, _, is_plain, *_ = index
    return frozenset(names) if is_plain else None
