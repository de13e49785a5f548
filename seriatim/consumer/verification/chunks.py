"""Comparing one table.

With a key both sides have, the table is walked along it. The source says where a chunk ends (the key of its
20,000th row); both sides then hash what lies between two such keys. A chunk whose hashes differ is walked in the same way by
smaller ones, and only of those that differ are the rows fetched and compared: rows may be large, and those are held. The last chunk
has no upper end, so rows of the target beyond the source's last key are seen too.

A key with a text in it isn't walked: two servers need not order text alike but by COLLATE "C", by which its index seldom is, and a table
without an index for that would be read twice for each chunk. There, rows go into buckets by a hash of their key. Both sides hash each bucket,
reading the table once, and the rows of those buckets whose hashes differ are fetched, bucket by bucket.

A hash is a sum of the first 60 bits of each row's md5, together with the count: it doesn't depend on an order.

Without a common key, or where it is, or may be, ordered otherwise on the two sides, rows count as a multiset: both sides give each different row
with its number, ordered by its text's bytes, and the two are merged.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count, groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import psycopg
from psycopg import sql

from seriatim.consumer.verification.result import Example, Kind, TableResult
from seriatim.consumer.verification.tables import Table, schema_differences

Connection: TypeAlias = psycopg.Connection[Any]
Fragment: TypeAlias = sql.SQL | sql.Composed
Key: TypeAlias = tuple[str, ...]
Between: TypeAlias = tuple[Key | None, Key | None]
Texts: TypeAlias = tuple[str | None, ...]

_is_cast_as_written = re.compile(
    r"(smallint|integer|bigint|numeric|real|double precision|boolean|text|character|character varying|bytea|uuid|jsonb?|date|time.*|interval.*)"
    r"(\(.*\))?"
).fullmatch
_CAST = sql.SQL("{}::text")
_WRITTEN = sql.SQL("CASE num_nulls({0}) WHEN 0 THEN format('%s', {0}) END")
_CURSORS = count(1)
_FETCHED = 500
"""Rows that are held, or on their way, at a time."""
_MOST_BUCKETS = 1_000_000
MOST_AGAIN: Final = 10_000
"""Rows of a table that differ, and are looked at again: more are hardly on their way."""
_AGAIN_S: Final = 1.0
_NO_BUCKET: Final[tuple[int, Iterator[Texts]]] = (-1, iter(()))


class _Side(NamedTuple):
    """Where a table is read, and what of it: the source's key, and the columns that both have.

    `rows`: its own, without those of tables that inherit from it, which are compared by themselves.
    """

    connection: Connection
    rows: Fragment
    table: Table
    columns: tuple[str, ...]

    @property
    def keys(self) -> Fragment:
        """Values of the key, as text."""
        return _texts(self.table, self.table.key_columns)

    @property
    def values(self) -> Fragment:
        """Values of the columns, as text."""
        return _texts(self.table, self.columns)


@dataclass(slots=True)
class _Tally:
    """Counts of one table on the way, and who is told how many rows are compared."""

    most_examples: int
    on_rows: Callable[[int], None]
    rows: int = 0
    differences: Counter[Kind] = field(default_factory=Counter)
    examples: list[Example] = field(default_factory=list)

    def note(self, example: Example, number: int = 1) -> None:
        self.differences[example.kind] += number
        if len(self.examples) < self.most_examples:
            self.examples.append(example)


def compare_table(
    connections: tuple[Connection, Connection],
    source: Table,
    target: Table,
    *,
    chunk_rows: int,
    examples: int,
    on_rows: Callable[[int], None],
    settle: Settle | None = None,
) -> TableResult:
    """Compare the rows of a table that both sides have, by the columns that both have.

    `on_rows` is told how many rows are compared after each chunk. `settle`: to look again at rows that differ, if they have a key and are at
    most `MOST_AGAIN`. Raises what psycopg raises.
    """
    columns = tuple(name for name in source.columns if name in target.columns)
    ours = _Side(connections[0], _rows_of(source), source, columns)
    sides = ours, _Side(connections[1], _rows_of(target), source, columns)
    is_by_key = bool(source.key_order) and source.key_order == target.key_order
    again = settle if is_by_key else None  # of other tables an example is a whole row
    tally = _Tally(examples if again is None else max(examples, MOST_AGAIN), on_rows)
    if not is_by_key:
        _compare_as_multiset(sides, tally)
    elif any(column.has_collation for column in source.key):
        _compare_by_buckets(sides, tally)
    else:
        _compare_by_key(sides, chunk_rows, tally)
    found, told, changing = tally.differences, tally.examples, 0
    if again is not None and 0 < found.total() <= MOST_AGAIN:
        told, changing = _settled(sides, told, again)
        found = Counter(example.kind for example in told)
    return TableResult(
        ".".join(source.name), tally.rows, found["missing"], found["extra"], found["different"],
        schema_differences(source, target), tuple(told[:examples]), changing,
    )  # fmt: skip


def _rows_of(table: Table) -> Fragment:
    return sql.SQL("{}" if table.is_partitioned else "ONLY {}").format(sql.Identifier(*table.name))


# ------------------------------------------------------------------------------------------------------------ by key


def _compare_by_key(sides: tuple[_Side, _Side], chunk_rows: int, tally: _Tally) -> None:
    source, target = sides
    for between in _chunks(source, (None, None), chunk_rows):
        found = _sum(source, between)
        tally.rows += found[0]
        if found != _sum(target, between):
            for part in _chunks(source, between, min(chunk_rows, _FETCHED)):
                if _sum(source, part) != _sum(target, part):
                    _compare_rows(source, _rows(source, part), _rows(target, part), tally)
        tally.on_rows(tally.rows)


def _chunks(side: _Side, between: Between, chunk_rows: int) -> Iterator[Between]:
    """Parts of what lies between two keys, each with so many rows of this side, the last one with what is left."""
    lower, last = between
    while (upper := _end_of_chunk(side, (lower, last), chunk_rows)) is not None:
        yield lower, upper
        lower = upper
    yield lower, last


def _end_of_chunk(side: _Side, between: Between, chunk_rows: int) -> Key | None:
    """The key, as text, of the chunk's last row; None where what lies between ends before."""
    query = sql.SQL("SELECT {} FROM {}{} ORDER BY {} OFFSET {} LIMIT 1").format(
        side.keys,
        side.rows,
        _between(side.table, *between),
        _keyed(side.table),
        sql.Literal(chunk_rows - 1),
    )
    return cast("Key | None", side.connection.execute(query).fetchone())


def _sum(side: _Side, between: Between) -> tuple[int, int]:
    query = sql.SQL("SELECT count(*), coalesce(sum({}), 0)::text FROM {}{}").format(
        _hash(side, side.values, 60), side.rows, _between(side.table, *between)
    )
    row = side.connection.execute(query).fetchone()
    return (0, 0) if row is None else (row[0], int(row[1]))


def _hash(side: _Side, texts: Fragment, bits: int) -> Fragment:
    """The first bits of a row's md5, in whatever encoding the server has it.

    A database without one (SQL_ASCII) may hold what is no UTF-8, and refuses to make that of it: its bytes are taken as they are.
    """
    has_encoding = side.connection.info.parameter_status("server_encoding") != "SQL_ASCII"
    return sql.SQL("('x' || left(md5(convert_to(ROW({})::text, {})), {}))::bit({})::bigint::numeric").format(
        texts, sql.Literal("UTF8" if has_encoding else "SQL_ASCII"), sql.Literal(bits // 4), sql.Literal(bits)
    )


def _compare_rows(of: _Side, ours: Iterable[Texts], theirs: Iterable[Texts], tally: _Tally) -> None:
    """Hold the source's rows of a chunk, each behind its key, and stream the target's past them (the target may have any number more).

    A key that is there twice, where the index of the primary key is damaged, counts as often as it is there.
    """
    size = len(of.table.key)
    held: defaultdict[Texts, list[Texts]] = defaultdict(list)
    for row in ours:
        held[row[:size]].append(row[size:])
    for row in theirs:
        key, values = row[:size], row[size:]
        others = held.get(key)
        if not others:
            tally.note(Example("extra", key))
        elif values in others:
            others.remove(values)
        else:
            names = (
                name for name, ours, theirs in zip(of.columns, others.pop(), values, strict=True) if ours != theirs
            )
            tally.note(Example("different", key, tuple(names)))
    for key, others in held.items():
        if others:
            tally.note(Example("missing", key), len(others))


def _rows(side: _Side, between: Between) -> Iterator[Texts]:
    query = sql.SQL("SELECT {}, {} FROM {}{} ORDER BY {}").format(
        side.keys, side.values, side.rows, _between(side.table, *between), _keyed(side.table)
    )
    return _streamed(side, query)


def _between(table: Table, lower: Key | None, upper: Key | None) -> Fragment:
    """WHERE lower < key <= upper. Keys come as text; the server makes their types of it.

    As literals: where a statement has parameters, a name with a % in it is taken for one more.
    """
    key = sql.SQL("({})").format(_keyed(table))
    parts: list[Fragment] = [sql.SQL("{} > {}").format(key, _value(table, lower))] if lower is not None else []
    parts += [sql.SQL("{} <= {}").format(key, _value(table, upper))] if upper is not None else []
    return sql.SQL(" WHERE ") + sql.SQL(" AND ").join(parts) if parts else sql.SQL("")


def _value(table: Table, key: Texts) -> Fragment:
    # format_type's own spelling of a type, which is SQL already
    kinds = [sql.SQL(column.kind) for column in table.key]
    casts = (sql.SQL("CAST({} AS {})").format(sql.Literal(text), kind) for text, kind in zip(key, kinds, strict=True))
    return sql.SQL("({})").format(sql.SQL(", ").join(casts))


def _keyed(table: Table) -> Fragment:
    """The key's columns. By their full names: ORDER BY takes a mere name for what is selected, which is the key's text."""
    return sql.SQL(", ").join(sql.Identifier(*table.name, column.name) for column in table.key)


def _texts(table: Table, columns: tuple[str, ...]) -> Fragment:
    """Values as the server writes them.

    A cast to text isn't that for all types: it leaves in an xml what no copy gets (the declaration), and of any type anybody may have
    made another one.
    """
    return sql.SQL(", ").join(
        (_CAST if _is_cast_as_written(table.columns[name]) else _WRITTEN).format(sql.Identifier(name))
        for name in columns
    )


# -------------------------------------------------------------------------------------------------------- by buckets


def _compare_by_buckets(sides: tuple[_Side, _Side], tally: _Tally) -> None:
    counted = sides[0].connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sides[0].rows)).fetchone()
    tally.rows = 0 if counted is None else counted[0]
    buckets = min(_MOST_BUCKETS, tally.rows // _FETCHED + 1)
    ours, theirs = (_sums(side, buckets) for side in sides)
    unlike = sorted(one for one in ours.keys() | theirs.keys() if ours.get(one) != theirs.get(one))
    tally.on_rows(tally.rows)
    if unlike:
        _compare_buckets(sides, buckets, unlike, tally)


def _bucket(side: _Side, buckets: int) -> Fragment:
    return sql.SQL("({} % {})::integer").format(_hash(side, side.keys, 32), sql.Literal(buckets))


def _sums(side: _Side, buckets: int) -> dict[int, tuple[int, str]]:
    query = sql.SQL("SELECT {}, count(*), sum({})::text FROM {} GROUP BY 1").format(
        _bucket(side, buckets), _hash(side, side.values, 60), side.rows
    )
    return {number: (rows, total) for number, rows, total in side.connection.execute(query)}


def _compare_buckets(sides: tuple[_Side, _Side], buckets: int, wanted: list[int], tally: _Tally) -> None:
    of_both = [_buckets(side, buckets, wanted) for side in sides]
    nexts = [next(found, _NO_BUCKET) for found in of_both]
    for number in wanted:
        ours, theirs = (rows if found == number else iter(()) for found, rows in nexts)
        _compare_rows(sides[0], ours, theirs, tally)
        nexts = [next(of_both[side], _NO_BUCKET) if nexts[side][0] == number else nexts[side] for side in (0, 1)]


def _buckets(side: _Side, buckets: int, wanted: list[int]) -> Iterator[tuple[int, Iterator[Texts]]]:
    """Those that have rows, in their order. Each one's rows are to be taken before the next one is.

    By a join: PostgreSQL before 14 goes through a list for each row, and later ones go through what isn't a list of the column's very type.
    """
    query = sql.SQL("SELECT {0}, {1}, {2} FROM {3} WHERE {0} IN (SELECT unnest({4}::integer[])) ORDER BY 1").format(
        _bucket(side, buckets), side.keys, side.values, side.rows, sql.Literal(wanted)
    )
    rows = cast("Iterator[tuple[Any, ...]]", _streamed(side, query))
    for number, found in groupby(rows, itemgetter(0)):
        yield number, (row[1:] for row in found)


# ------------------------------------------------------------------------------------------------------- as multiset


def _compare_as_multiset(sides: tuple[_Side, _Side], tally: _Tally) -> None:
    ours, theirs = map(_counted, sides)
    left, right = next(ours, None), next(theirs, None)
    while left is not None or right is not None:
        if left is not None and (right is None or left[0] < right[0]):
            tally.rows += left[2]
            tally.note(Example("missing", left[1]), left[2])
            left = next(ours, None)
        elif right is not None and (left is None or right[0] < left[0]):
            tally.note(Example("extra", right[1]), right[2])
            right = next(theirs, None)
        elif left is not None and right is not None:
            tally.rows += left[2]
            if left[2] != right[2]:
                kind = Example("missing" if left[2] > right[2] else "extra", left[1])
                tally.note(kind, abs(left[2] - right[2]))
            left, right = next(ours, None), next(theirs, None)
        if tally.rows % _FETCHED == 0:
            tally.on_rows(tally.rows)
    tally.on_rows(tally.rows)


def _counted(side: _Side) -> Iterator[tuple[bytes, Texts, int]]:
    """Each different row: its text's bytes, by which they are ordered, its values, and how often it is there."""
    query = sql.SQL(
        "SELECT convert_to(ROW({0})::text, 'UTF8') AS seriatim_row, count(*), ARRAY[{0}]::text[] FROM {1} GROUP BY 1, 3 ORDER BY 1"
    ).format(side.values, side.rows)
    for row, number, values in cast("Iterator[tuple[bytes, int, list[str | None]]]", _streamed(side, query)):
        yield row, tuple(values), number


def _streamed(side: _Side, query: Fragment) -> Iterator[Texts]:
    with side.connection.cursor(name=f"seriatim_verify_{next(_CURSORS)}") as cursor:
        cursor.itersize = _FETCHED
        yield from cursor.execute(query)


# -------------------------------------------------------------------------------------------------------------- again


@dataclass(frozen=True, slots=True)
class Settle:
    """How long to look again at rows that differ, in seconds, and a way to see both sides as they are then."""

    within_s: float
    look: Callable[[], AbstractContextManager[tuple[Connection, Connection]]]


def _settled(sides: tuple[_Side, _Side], differences: list[Example], settle: Settle) -> tuple[list[Example], int]:
    """The differences that stay, whatever each is by then, and how many rows of these the source changed between the last two looks.

    Of databases that are written to, the target is behind: a row that was equal at one look was changed the same on both sides. It is looked
    twice at least, unless nothing differs any more.
    """
    deadline_s = time.monotonic() + settle.within_s
    before: dict[Texts, list[Texts]] | None = None  # the source's rows at the look before
    while True:
        keys = list(dict.fromkeys(cast("Texts", example.key) for example in differences))
        with settle.look() as connections:
            ours, theirs = (
                _by_key(side._replace(connection=now), keys) for side, now in zip(sides, connections, strict=True)
            )
        differences, changing = [], 0
        for key in keys:
            left, right = ours.get(key, []), theirs.get(key, [])
            differences += _unlike(sides[0].columns, key, left, right)
            changing += left != right and before is not None and before.get(key, []) != left
        left_s = deadline_s - time.monotonic()
        if not differences or (left_s <= 0 and before is not None):
            return differences, changing
        before = ours
        time.sleep(min(_AGAIN_S, max(0.0, left_s)))


def _by_key(side: _Side, keys: Sequence[Texts]) -> dict[Texts, list[Texts]]:
    """The rows of these keys. One that is there twice is of a damaged index."""
    found: defaultdict[Texts, list[Texts]] = defaultdict(list)
    size = len(side.table.key)
    for start in range(0, len(keys), _FETCHED):
        values = sql.SQL(", ").join(_value(side.table, key) for key in keys[start : start + _FETCHED])
        query = sql.SQL("SELECT {}, {} FROM {} WHERE ({}) IN ({}) ORDER BY 1").format(
            side.keys, side.values, side.rows, _keyed(side.table), values
        )
        for row in side.connection.execute(query):
            found[row[:size]].append(row[size:])
    return found


def _unlike(columns: Sequence[str], key: Texts, ours: Sequence[Texts], theirs: Sequence[Texts]) -> list[Example]:
    if sorted(ours, key=str) == sorted(theirs, key=str):
        return []
    if len(ours) != len(theirs):
        return [Example("missing" if len(ours) > len(theirs) else "extra", key)]
    names = (name for name, left, right in zip(columns, ours[0], theirs[0], strict=True) if left != right)
    return [Example("different", key, tuple(names))]
