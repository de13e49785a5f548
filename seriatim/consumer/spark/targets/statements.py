"""The SQL text that carries out plans. Names are quoted; values are parameters, or come through a stage table.

Every statement is to be run with parameters, be it with none: per cent signs of names are doubled.
"""

# ruff: noqa: S608 - names are quoted, values never stand in the text

from __future__ import annotations

import re
from collections.abc import Iterable

from seriatim.consumer.spark.apply import errors
from seriatim.consumer.spark.apply.shape import TableName, TableShape
from seriatim.consumer.spark.apply.spelling import is_loose

_is_equal_when_whole = re.compile(
    r"smallint|integer|bigint|oid|boolean|uuid|bytea|date|time(stamp)?(\(\d\))? with(out)? time zone"
).fullmatch
"""Types whose equality is of the whole value. The others may have none (json), or one that takes different values for equal: 1.0 for
1.00, -0 for 0, 24 hours for a day, an A for an a by a collation, and an array or a domain of such values."""
_is_name = re.compile(
    r"reg(class|collation|config|dictionary|namespace|oper|operator|proc|procedure|role|type)(\[\])?"
).fullmatch
"""Its values are written with or without a schema, as the session's search path has it; captured ones with it."""
_is_padded = re.compile(r"character\(\d+\)").fullmatch
"""Its values are equal to others with fewer blanks at the end; a column pads all of them to one length."""


def quote(name: str) -> str:
    """A name as psycopg takes it in a statement with parameters."""
    return errors.quote(name).replace("%", "%%")


def table_name(name: TableName) -> str:
    """The table as SQL takes it."""
    return f"{quote(name.schema)}.{quote(name.table)}"


def listed(columns: Iterable[str]) -> str:
    """Columns with commas between them."""
    return ", ".join(map(quote, columns))


def rows_of(shape: TableShape) -> str:
    """The table as a statement names it that changes its rows: without those that inherit from it, which the source names itself.

    A partitioned table has no rows of its own: what its partitions hold is meant.
    """
    return table_name(shape.name) if shape.is_partitioned else f"ONLY {table_name(shape.name)}"


def truncate(shapes: Iterable[TableShape], above: Iterable[TableName], *, restart_identity: bool) -> str:
    """Empty these tables and no others. The source's own statement may have cascaded; its log then names all that it emptied.

    `above`: partitioned tables that have no rows but theirs.
    """
    names = ", ".join([*map(rows_of, shapes), *map(table_name, above)])
    return f"TRUNCATE {names}{' RESTART IDENTITY' if restart_identity else ''}"


def create_stage(stage: str, shape: TableShape, columns: tuple[str, ...]) -> str:
    """A table of the session's own with these columns of the target table."""
    return f"CREATE TEMPORARY TABLE {stage} AS SELECT {listed(columns)} FROM {table_name(shape.name)} WITH NO DATA"


def copy_into(stage: str) -> str:
    """Rows come as PostgreSQL's text."""
    return f"COPY {stage} FROM STDIN"


def _same_key(shape: TableShape, key: Iterable[str]) -> str:
    return " AND ".join(_equal(shape, name, f"t.{quote(name)}", f"s.{quote(name)}") for name in key)


def _equal(shape: TableShape, name: str, one: str, other: str) -> str:
    """Whether two values of a column are one to a unique rule. Neither cast keeps PostgreSQL from the rule's index."""
    if name in shape.enums:
        enum = shape.enums[name].replace("%", "%%")
        one, other = f"CAST({one} AS {enum})", f"CAST({other} AS {enum})"
    return f"{one} {shape.operators.get(name, '=').replace('%', '%%')} {other}"


def delete_staged(stage: str, shape: TableShape, key: tuple[str, ...]) -> str:
    """Delete the rows whose keys are staged."""
    return f"DELETE FROM {rows_of(shape)} t USING {stage} s WHERE {_same_key(shape, key)}"


def update_staged(stage: str, shape: TableShape, key: tuple[str, ...], columns: tuple[str, ...]) -> str | None:
    """Update the staged columns of the rows whose keys are staged; None where no column is left to update."""
    sets = [f"{quote(name)} = s.{quote(name)}" for name in columns if name not in key]
    if not sets:
        return None
    return f"UPDATE {rows_of(shape)} t SET {', '.join(sets)} FROM {stage} s WHERE {_same_key(shape, key)}"


def insert_staged(stage: str, shape: TableShape, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
    """Insert the staged rows, or overwrite those of the same key."""
    names = listed(columns)
    if not names:
        return f"INSERT INTO {table_name(shape.name)} SELECT FROM {stage}"
    return (
        f"INSERT INTO {table_name(shape.name)} AS t ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM {stage}"
        + _on_conflict(shape, key, columns)
    )


def insert(shape: TableShape, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
    """Insert one row, or overwrite that of the same key. Parameters: the columns."""
    if not columns:
        return f"INSERT INTO {table_name(shape.name)} DEFAULT VALUES"
    return (
        f"INSERT INTO {table_name(shape.name)} AS t ({listed(columns)}) OVERRIDING SYSTEM VALUE "
        f"VALUES ({', '.join(['%s'] * len(columns))}){_on_conflict(shape, key, columns)}"
    )


def delete(shape: TableShape, key: tuple[str, ...]) -> str:
    """Delete the row of a key. Parameters: the key."""
    return f"DELETE FROM {rows_of(shape)} WHERE {of_key(shape, key)}"


def of_key(shape: TableShape, key: Iterable[str]) -> str:
    """Which row is meant. Parameters: the key."""
    return " AND ".join(_equal(shape, name, quote(name), _typed(shape.columns[name])) for name in key)


def _typed(type_name: str) -> str:
    """A parameter of that type: beside a composite value, or a name, it would be taken for one of another type.

    A cast to a type with a length cuts off what is longer, and those need none.
    """
    return "%s" if "(" in type_name else f"CAST(%s AS {type_name.replace('%', '%%')})"


def of_image(shape: TableShape, match: tuple[str, ...]) -> str:
    """One of the rows that equal an image. Parameters: the image."""
    same = " AND ".join(_equals(shape, name) for name in match) or "true"
    place = "tableoid, ctid" if shape.is_partitioned else "ctid"
    return f"({place}) = (SELECT {place} FROM {rows_of(shape)} WHERE {same} LIMIT 1)"


def unlike(shape: TableShape, key: Iterable[str], match: tuple[str, ...]) -> str:
    """Find a row that has a key and doesn't equal an image. Parameters: the key, then the image."""
    same = " AND ".join(_equals(shape, name) for name in match)
    return f"SELECT FROM {rows_of(shape)} WHERE {of_key(shape, key)} AND NOT ({same})"


def update(shape: TableShape, which: str, sets: tuple[str, ...]) -> str:
    """Update a row. Parameters: the columns set, then those of `which`."""
    return f"UPDATE {rows_of(shape)} SET {', '.join(f'{quote(name)} = %s' for name in sets)} WHERE {which}"


def put_anew(shape: TableShape, which: str, sets: tuple[str, ...]) -> str:
    """Take a row out and put it in with other values: an identity column may be set so. Parameters: those of `which`, then the columns set."""
    kept = [name for name in shape.columns if name not in sets and name not in shape.generated]
    return (
        f"WITH gone AS (DELETE FROM {rows_of(shape)} WHERE {which} RETURNING *) "
        f"INSERT INTO {table_name(shape.name)} ({listed([*sets, *kept])}) OVERRIDING SYSTEM VALUE "
        f"SELECT {', '.join([*['%s'] * len(sets), *(f'gone.{quote(name)}' for name in kept)])} FROM gone"
    )


def delete_one(shape: TableShape, match: tuple[str, ...]) -> str:
    """Delete one of the rows that equal an image. Parameters: the image."""
    return f"DELETE FROM {rows_of(shape)} WHERE {of_image(shape, match)}"


def can_overwrite(shape: TableShape, key: tuple[str, ...], columns: tuple[str, ...]) -> bool:
    """Whether one INSERT can overwrite: the key's unique rule is immediate, and no column refuses to be updated.

    Where it can't, the row of the key is deleted first.
    """
    return frozenset(key) in shape.arbiters and not shape.always_identity.difference(key).intersection(columns)


def doubtful(shape: TableShape, key: Iterable[str]) -> list[str]:
    """Columns of a key that the target may compare more coarsely than the source: a row that comes may have there the key of another one.

    That one is written otherwise, since the source, which has no two rows of one key, has the row that comes nowhere else.
    """
    return [name for name in key if name in shape.coarse or is_loose(shape.columns[name])]


def _on_conflict(shape: TableShape, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
    """What to do about a row that has the key: nothing, where it is one that is written otherwise.

    The statement names the table by an alias, as the table may itself be called `excluded`.
    """
    if not key or not can_overwrite(shape, key, columns):
        return ""
    sets = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in columns if name not in key)
    if names := doubtful(shape, key):
        sets = sets or ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in names)
        same = (
            f"format('%%s', t.{quote(name)}) COLLATE \"C\" = format('%%s', excluded.{quote(name)})" for name in names
        )
        sets += f" WHERE {' AND '.join(same)}"
    return f" ON CONFLICT ({listed(key)}) DO " + (f"UPDATE SET {sets}" if sets else "NOTHING")


def _equals(shape: TableShape, name: str) -> str:
    """Whether a column holds exactly the value of an image: compared as text in what any but the simplest types write as theirs.

    A cast to text isn't that for all (an inet gets its mask, a boolean is spelled out); `format` is. No index is lost: none
    serves IS NOT DISTINCT FROM, but one of a primary key does where the column, which is never null, is compared by its equality.
    """
    column, type_name = quote(name), shape.columns[name]
    if _is_equal_when_whole(type_name):
        if name in shape.primary_key:
            return f"{column} = %s"
        return f"{column} IS NOT DISTINCT FROM %s"
    if _is_name(type_name):
        return f"{column} IS NOT DISTINCT FROM {_typed(type_name)}"
    if _is_padded(type_name):
        return f'{column}::text COLLATE "C" IS NOT DISTINCT FROM %s::bpchar::text'
    # What `format` makes of null is the empty text. A composite of nulls IS NULL, too, but isn't one.
    return f"CASE num_nulls({column}) WHEN 0 THEN format('%%s', {column}) END COLLATE \"C\" IS NOT DISTINCT FROM %s"
