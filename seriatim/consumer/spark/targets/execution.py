"""Carrying out a plan on a connection, within the caller's transaction.

Two ways for a collapsed table, chosen by the number of its changes: few go as one statement each, sent in a pipeline;
many go by COPY into a stage table of the session's own, and from there by one statement for all. `singly` sends one
statement after the other instead, so that an error names its row: for finding out, not for speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import psycopg

from seriatim.consumer.spark.apply import plan as orders
from seriatim.consumer.spark.apply.plan import Plan, Rows, Segment, Step, TableChanges, Truncate, Values
from seriatim.consumer.spark.apply.shape import TableName, TableShape
from seriatim.consumer.spark.targets import statements
from seriatim.consumer.spark.targets.catalogue import read_above
from seriatim.consumer.spark.targets.errors import CoarseKey, Diverged, TablesChanged, TruncateRefused
from seriatim.protocol.change import Row, Value

BULK_FROM = 20
"""Changes of one table from which COPY and one statement take no longer than a pipeline of statements: measured on pgbench's
tables, 2.8 against 3.1 ms for 10 transactions, 3.4 against 3.3 for 20, 7.2 against 4.4 for 100."""
IDLE_S = 3600.0
"""A table keeps PostgreSQL from freezing what is newer than its last TRUNCATE, in all of the database, where only its own session may
vacuum it; after 2**31 transactions the target would take none any more.
"""
_PIPELINED = 500
"""Statements sent before their answers are read: bounds what both ends keep."""


class Place(NamedTuple):
    """What is being carried out: for messages."""

    table: TableName
    key: Values | None
    offset: int | None


class _Statement(NamedTuple):
    """`rows`: how many it has to find; None for any number. `doubtful`: of the key of a row that it puts in, as `statements` has it."""

    place: Place
    text: str
    values: Values
    rows: int | None
    doubtful: str = ""


_Wanted = tuple[object, ...]
"""A table, and some of its columns with their types."""


class Stages:
    """The session's stage tables; they are made once, are empty after each transaction, and go when they weren't used for IDLE_S.

    Each transaction empties those that it filled. PostgreSQL would do it (ON COMMIT DELETE ROWS), but of all that the session has: where
    it had staged rows of 200 tables, each commit took 0.4 s. A transaction that is rolled back takes those it made with it, and leaves the others.
    """

    def __init__(self) -> None:
        self._known: dict[_Wanted, tuple[str, float]] = {}  # name, and when it was used last; that longest ago first
        self._made = 0
        self._new: list[_Wanted] = []
        self._filled: set[str] = set()
        self._dropped: dict[_Wanted, tuple[str, float]] = {}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Around one: what it did to stages is undone where it is rolled back, which whatever is raised within says."""
        self.begin()
        try:
            yield
        except BaseException:
            self.roll_back()
            raise

    def begin(self) -> None:
        """A transaction begins: all stages are empty."""
        self._new.clear()
        self._filled.clear()
        self._dropped.clear()

    def roll_back(self) -> None:
        """The transaction was rolled back."""
        self._known = self._dropped | self._known
        for wanted in self._new:
            self._known.pop(wanted, None)
        self.begin()

    def forget(self) -> None:
        """The session is another one."""
        self._known.clear()
        self.begin()

    def empty(self, connection: psycopg.Connection[Any]) -> None:
        """The transaction is about to be committed."""
        if self._filled:
            run(connection, f"TRUNCATE {', '.join(sorted(self._filled))}")
            self._filled.clear()
        if self._known:
            wanted, (name, used_s) = next(iter(self._known.items()))
            if time.monotonic() - used_s > IDLE_S:
                run(connection, f"DROP TABLE {name}")
                self._dropped[wanted] = self._known.pop(wanted)

    def ready(self, connection: psycopg.Connection[Any], shape: TableShape, columns: tuple[str, ...]) -> str:
        """An empty stage with these columns of the table."""
        wanted = (shape.name, tuple((name, shape.columns[name]) for name in columns))
        name, _ = self._known.get(wanted, ("", 0.0))
        if not name:
            self._made += 1
            name = f"seriatim_stage_{self._made}"
            run(connection, statements.create_stage(name, shape, columns))
            self._new.append(wanted)
        elif name in self._filled:
            run(connection, f"TRUNCATE {name}")
        self._known.pop(wanted, None)  # to be the last
        self._known[wanted] = name, time.monotonic()
        self._filled.add(name)
        return name


@dataclass(slots=True)
class Execution:
    """One plan on its way into the target. `place` is where it is; `applied` counts rows written per table. `shapes`: of the plan's tables."""

    connection: psycopg.Connection[Any]
    shapes: dict[TableName, TableShape]
    stages: Stages
    on_step: Callable[[str], None]
    singly: bool = False
    place: Place | None = None
    applied: dict[str, int] = field(default_factory=dict)

    def run(self, plan: Plan) -> None:
        """All segments in order. Raises Diverged, and whatever psycopg raises."""
        for number, segment in enumerate(plan.segments):
            self._segment(segment, number)

    def _segment(self, segment: Segment, number: int) -> None:
        if segment.truncate is not None:
            self._truncate(segment.truncate)
            self.on_step(f"segment {number}: truncated")
        for changes in segment.collapsed:
            shape = self.shapes[changes.table]
            if self.singly or len(changes) < BULK_FROM or _may_renumber(shape, changes):
                self._send(_collapsed(shape, changes))
            else:
                self._bulk(shape, changes)
            self._count(changes.table, len(changes))
            self.on_step(f"segment {number}: {changes.table}")
        if segment.steps:
            self._send(_stepwise(self.shapes[step.table], step) for step in segment.steps)
            for step in segment.steps:
                self._count(step.table, 1)
            self.on_step(f"segment {number}: steps")

    def _truncate(self, order: Truncate) -> None:
        self.place = Place(order.tables[0], None, order.offset)
        above: set[TableName] = set()
        try:
            try:
                self._empty(order, above)
            except psycopg.errors.FeatureNotSupported:
                # Where partitions are captured, the table above them isn't named, and PostgreSQL takes it for another one that refers to theirs.
                above = read_above(self.connection, order.tables)
                if not above:
                    raise
                self._empty(order, above)
        except psycopg.errors.FeatureNotSupported as error:  # a foreign key, whatever the session's role
            raise TruncateRefused(order.tables, order.offset, error.diag.message_detail or str(error)) from error
        if above and not above <= read_above(self.connection, order.tables):  # one got a partition before it was locked
            raise TablesChanged(above)

    def _empty(self, order: Truncate, above: Collection[TableName], *, is_checked: bool = False) -> None:
        shapes = [self.shapes[name] for name in order.tables]
        text = statements.truncate(shapes, above, restart_identity=order.restart_identity)
        try:
            with self.connection.transaction():
                run(self.connection, text)
        except psycopg.errors.ObjectInUse:
            if is_checked:
                raise
            # Deferred checks of earlier transactions' rows, which the source had made by then. Only a role that can't switch
            # triggers off has any.
            run(self.connection, "SET CONSTRAINTS ALL IMMEDIATE")
            run(self.connection, "SET CONSTRAINTS ALL DEFERRED")
            self._empty(order, above, is_checked=True)
        except psycopg.errors.InsufficientPrivilege:
            if not order.restart_identity:
                raise
            # Only its owner may restart a sequence, and no values of sequences are replicated.
            self._empty(replace(order, restart_identity=False), above, is_checked=is_checked)

    def _count(self, table: TableName, rows: int) -> None:
        self.applied[str(table)] = self.applied.get(str(table), 0) + rows

    def _send(self, sent: Iterable[Iterable[_Statement]]) -> None:
        flat = (statement for some in sent for statement in some)
        while part := list(islice(flat, 1 if self.singly else _PIPELINED)):
            self.place = part[0].place
            with nullcontext() if self.singly or len(part) == 1 else self.connection.pipeline():
                cursors = [run(self.connection, s.text, s.values) for s in part]
            for statement, cursor in zip(part, cursors, strict=True):
                if statement.rows not in {None, cursor.rowcount}:
                    if statement.doubtful:
                        raise _coarse(statement.place, statement.doubtful)
                    raise _diverged(statement.place, cursor.rowcount if statement.rows else 0)

    def _bulk(self, shape: TableShape, changes: TableChanges) -> None:
        key = changes.key
        self.place = Place(changes.table, None, None)
        if changes.deletes:
            stage = self._copy(shape, changes.deletes)
            run(self.connection, statements.delete_staged(stage, shape, key))
        for patches in changes.patches:
            stage = self._copy(shape, patches)
            text = statements.update_staged(stage, shape, key, patches.columns)
            if text is not None and (count := run(self.connection, text).rowcount) != len(patches):
                raise _diverged(Place(changes.table, None, patches.offsets[0]), count - len(patches))
        for upserts in changes.upserts:
            stage = self._copy(shape, upserts)
            if key and not statements.can_overwrite(shape, key, upserts.columns):
                run(self.connection, statements.delete_staged(stage, shape, key))
            count = run(self.connection, statements.insert_staged(stage, shape, key, upserts.columns)).rowcount
            if (doubtful := _doubtful(shape, key)) and count != len(upserts):
                raise _coarse(Place(changes.table, None, upserts.offsets[0]), doubtful)

    def _copy(self, shape: TableShape, rows: Rows) -> str:
        stage = self.stages.ready(self.connection, shape, rows.columns)
        with self.connection.cursor() as cursor, cursor.copy(statements.copy_into(stage).encode(), ()) as copy:
            for values in rows.values:
                copy.write_row(values)
        return stage


def run(connection: psycopg.Connection[Any], text: str, values: Values = ()) -> psycopg.Cursor[Any]:
    """Run a statement. Parameters go as text of no declared type: the server takes them for what the column is."""
    return connection.execute(text.encode(), [as_text(value) for value in values])


def as_text(value: Value) -> str | None:
    """A value of an envelope as PostgreSQL's text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value)


def _rows(rows: Rows) -> Iterator[tuple[Values, int]]:
    return zip(rows.values, rows.offsets, strict=True)


def _collapsed(shape: TableShape, changes: TableChanges) -> Iterator[Iterator[_Statement]]:
    key = changes.key
    for values, offset in _rows(changes.deletes):
        yield _stepwise(shape, orders.Remove(shape.name, offset, key, values))
    for patches in changes.patches:
        for values, offset in _rows(patches):
            named = _taken(key, patches.columns, values)
            yield _stepwise(shape, orders.Change(shape.name, offset, key, named, patches.columns, values))
    for upserts in changes.upserts:
        for values, offset in _rows(upserts):
            yield _stepwise(shape, orders.Put(shape.name, offset, key, upserts.columns, values))


def _taken(names: Iterable[str], columns: tuple[str, ...], values: Values) -> Values:
    row = dict(zip(columns, values, strict=True))
    return tuple(row[name] for name in names)


def _stepwise(shape: TableShape, step: Step) -> Iterator[_Statement]:
    """The statements of one step."""
    if isinstance(step, orders.Put):
        named = _taken(step.key, step.columns, step.values)
        own_key = [name for name in shape.primary_key if name in step.columns]
        place = Place(step.table, named or _taken(own_key, step.columns, step.values), step.offset)
        if step.key and not statements.can_overwrite(shape, step.key, step.columns):
            yield _Statement(place, statements.delete(shape, step.key), named, rows=None)
        doubtful = _doubtful(shape, step.key)
        text = statements.insert(shape, step.key, step.columns)
        yield _Statement(place, text, step.values, rows=1 if doubtful else None, doubtful=doubtful)
    elif isinstance(step, orders.Remove):
        place = Place(step.table, step.key_values, step.offset)
        yield _Statement(place, statements.delete(shape, step.key), step.key_values, rows=None)
    elif isinstance(step, orders.RemoveOne):
        place = Place(step.table, step.match_values, step.offset)
        yield _Statement(place, statements.delete_one(shape, step.match), step.match_values, rows=1)
    elif isinstance(step, orders.Change):
        place = Place(step.table, step.key_values, step.offset)
        yield from _update(shape, step, place)
    elif isinstance(step, orders.ChangeIfThere):
        place = Place(step.table, step.match_values, step.offset)
        yield _Statement(place, statements.unlike(shape, step.key, step.match), step.key_values + step.match_values, 0)
        held = dict(zip(step.key, step.key_values, strict=True))
        if sets := _changed(step, held):
            yield _set(shape, sets, place, statements.of_key(shape, held), step.key_values)._replace(rows=None)
    else:
        place = Place(step.table, step.match_values, step.offset)
        sets = _changed(step, dict(zip(step.match, step.match_values, strict=True)))
        if sets:
            yield _set(shape, sets, place, statements.of_image(shape, step.match), step.match_values)


def _update(shape: TableShape, step: orders.Change, place: Place) -> Iterator[_Statement]:
    """An update by key."""
    held = dict(zip(step.key, step.key_values, strict=True))
    sets = _changed(step, held)
    if shape.keeps_order:
        # A row that is taken out would take those with it that refer to it. Where its number is another one, none is found.
        held |= {name: sets.pop(name) for name in shape.always_identity.difference(held) & sets.keys()}
    if sets:
        yield _set(shape, sets, place, statements.of_key(shape, held), tuple(held.values()))


def _changed(step: orders.Change | orders.ChangeOne | orders.ChangeIfThere, held: Row) -> dict[str, Value]:
    """What has another value than before, or may have."""
    row = zip(step.columns, step.values, strict=True)
    return {name: value for name, value in row if name not in held or held[name] != value}


def _set(shape: TableShape, sets: Row, place: Place, which: str, named: Values) -> _Statement:
    columns, values = tuple(sets), tuple(sets.values())
    if shape.keeps_order or shape.always_identity.isdisjoint(sets):
        return _Statement(place, statements.update(shape, which, columns), (*values, *named), rows=1)
    # The source set it by DEFAULT, which is all that PostgreSQL lets anybody do in an UPDATE.
    return _Statement(place, statements.put_anew(shape, which, columns), (*named, *values), rows=1)


def _may_renumber(shape: TableShape, changes: TableChanges) -> bool:
    """Whether rows that are updated have an identity column beside their key: `_set` knows how."""
    return any(shape.always_identity.difference(changes.key).intersection(rows.columns) for rows in changes.patches)


def _doubtful(shape: TableShape, key: Iterable[str]) -> str:
    return ", ".join(f"{name} is {shape.columns[name]}" for name in statements.doubtful(shape, key))


def _coarse(place: Place, doubtful: str) -> CoarseKey:
    return CoarseKey(
        f"{place.table}: the row {'' if place.key is None else f'{place.key} '}that the change at offset {place.offset} brings has the key "
        f"of another row of the target, which is written otherwise ({doubtful}), or a trigger or rule there passes it over; "
        "nothing of its transaction was applied",
        table=str(place.table),
        key=place.key,
        offset=place.offset,
    )


def _diverged(place: Place, count: int) -> Diverged:
    found = "more than once" if count > 0 else "not there"
    return Diverged(
        f"{place.table}: the row {'' if place.key is None else f'{place.key} '}that the change at offset "
        f"{place.offset} is for is {found} in the target; nothing of its transaction was applied",
        table=str(place.table),
        key=place.key,
        offset=place.offset,
    )
