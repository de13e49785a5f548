"""Changes one by one, for tables whose changes must keep their order or have no key."""

from __future__ import annotations

from seriatim.consumer.spark.apply import plan
from seriatim.consumer.spark.apply.collapse import written
from seriatim.consumer.spark.apply.errors import BrokenStream
from seriatim.consumer.spark.apply.plan import Step, Values
from seriatim.consumer.spark.apply.shape import TableShape
from seriatim.consumer.spark.apply.spelling import comes_otherwise, rewrites
from seriatim.protocol.change import Change, Origin, Row


def step(shape: TableShape, offset: int, change: Change) -> Step:
    """What one c, u, d or r change does. Raises BrokenStream when an image lacks what identifies the row."""
    key = shape.key_for(change)
    before, after = change.before, change.after
    try:
        if after is None:
            return removal(shape, offset, key, before or {})
        if change.op != "u":
            return put(shape, offset, _overwritten(shape, change.source, after), after)
        columns = written(shape, after)
        values = _values(columns, after)
        if key:
            held = after if before is None else before
            return plan.Change(shape.name, offset, key, _values(key, held), columns, values)
        if before is None:
            raise BrokenStream(f"{shape.name}: an update without key and without old image", offset)
        match = written(shape, before)
        return plan.ChangeOne(shape.name, offset, match, _values(match, before), columns, values)
    except KeyError as error:
        raise BrokenStream(f"{shape.name}: no value for key column {error}", offset) from error


def _overwritten(shape: TableShape, source: Origin, row: Row) -> tuple[str, ...]:
    """The key whose row may be overwritten by one that comes: none, where the source's column has another type, and may have another row there."""
    key = source.key
    comes = comes_otherwise(tuple([shape.columns[name] for name in key]))
    return () if rewrites(shape, source.text_key) or comes(_values(key, row)) else key


def put(shape: TableShape, offset: int, key: tuple[str, ...], row: Row) -> Step:
    """Put a row in, in the place of the one that has its key, if one is given.

    By a key that the source doesn't name none is overwritten: it might be another row, which has the same key for a while.
    """
    columns = written(shape, row)
    return plan.Put(shape.name, offset, key, columns, _values(columns, row))


def removal(shape: TableShape, offset: int, key: tuple[str, ...], before: Row) -> Step:
    """Take out the row of this key; without a key one that equals the whole image."""
    if key:
        return plan.Remove(shape.name, offset, key, _values(key, before))
    match = written(shape, before)
    return plan.RemoveOne(shape.name, offset, match, _values(match, before))


def change_if_there(shape: TableShape, offset: int, key: tuple[str, ...], before: Row, after: Row) -> Step:
    """Put a row in the place of the one that has its key, and equals the whole image, if one has it."""
    match, columns = written(shape, before), written(shape, after)
    return plan.ChangeIfThere(
        *(shape.name, offset, key, _values(key, before)),
        *(match, _values(match, before), columns, _values(columns, after)),
    )


def _values(columns: tuple[str, ...], row: Row) -> Values:
    return tuple(row[name] for name in columns)
