"""From all changes of one table to the last change of each key.

Deletes are carried out before upserts, so a value of a second unique rule that a deleted row had is free for a new row.
What that order can't do is to pass such a value from one living row to another (debezium PR 7801): rows would
have to change in the order they did at the source. `collapse` then gives up, and the table's changes are carried out
one by one (`steps`). It gives up for the same reason wherever an update touches, or may touch, a second unique
rule; where a key is deleted and comes back in a table that has one; where a row gets another key while one of its values
was not sent and isn't known from an earlier change; and where one key may be written in two ways (`spelling`), so that a row is named that may
be the one of an earlier change, or of the target, under another name: a row that is put in may be in the place of none that is written otherwise.

A row that the changes themselves brought, of a source that names no key, is inserted: were there another one of its key in the target, which the
source doesn't rule out, that one would be overwritten; and one that they took away again is none of the target's rows. So is one whose key is
spelled as the target's type spells none: the source's column has another type, and may have another row that the target has under this key. And so is
each row of a source whose column is one of texts, where the target's is of none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from seriatim.consumer.spark.apply.errors import BrokenStream
from seriatim.consumer.spark.apply.plan import Rows, TableChanges, Values
from seriatim.consumer.spark.apply.shape import TableShape
from seriatim.consumer.spark.apply.spelling import comes_otherwise, rewrites, spelled
from seriatim.protocol.change import Change, Row, Value

Entry: TypeAlias = tuple[int, Change]
"""An offset and the change there."""
Unique: TypeAlias = Sequence[frozenset[str] | None]


class _Last(NamedTuple):
    """The last state of a key: `row` is None for deleted; `is_whole` is False where values that were not sent lack.

    `is_new`: no change found a row of the key in the target.
    """

    offset: int
    row: Row | None
    is_whole: bool = True
    is_new: bool = False


def collapse(shape: TableShape, entries: Sequence[Entry]) -> tuple[TableChanges, ...] | None:
    """The last change of each key, in the order of these last changes; None where the order must be kept in full.

    `entries` are the c, u, d and r changes of the table between two truncates, not empty. No two rows have the same key at once (`sharing`).
    Raises BrokenStream when an image lacks a column of the key.
    """
    first = entries[0][1]
    named = first.source.key
    key = shape.key_for(first)
    if not key:
        return _only_inserts(shape, entries)
    types = tuple([shape.columns[name] for name in key])
    others = shape.other_unique(frozenset(key))
    text_key = first.source.text_key
    overwrites = bool(named) and not rewrites(shape, text_key)
    states = _States(projection(key), spelled(types), comes_otherwise(types), others, bool(named), overwrites)
    offset = entries[0][0]
    try:
        for offset, change in entries:
            source = change.source
            if source.key != named or source.text_key != text_key or not states.take(offset, change):
                return None
    except KeyError as error:
        if not named:
            return None  # the table got, or lost, a column of the target's key
        raise BrokenStream(f"{shape.name}: no value for key column {error}", offset) from error
    return _grouped(shape, key, states.last)


@dataclass(slots=True)
class _States:
    """The last state of each key that changes were about, in the order of these changes.

    values_of: the key of an image. are_spelled: whether a key's values are spelled as their types spell them. others: the other unique rules.
    comes_otherwise: as `spelling` has it. all_are: whether all keys so far were spelled so. finds_rows: whether the source names the key. overwrites:
    whether a row of a key that is put in may be there already: it is to be overwritten then.
    """

    values_of: Callable[[Row], Values]
    are_spelled: Callable[[Values], bool]
    comes_otherwise: Callable[[Values], bool]
    others: Unique
    finds_rows: bool
    overwrites: bool
    last: dict[Values, _Last] = field(default_factory=dict)
    all_are: bool = True

    def take(self, offset: int, change: Change) -> bool:
        """Take one change; False where it must not be collapsed with those before it."""
        last, after = self.last, change.after
        if after is None:
            key = self.values_of(change.before or {})
            if not self._is_known(key):
                return False
            self._delete(key, offset, last.pop(key, None))
            return True
        key = self.values_of(after)
        is_whole, comes = True, change.op != "u"
        if change.op == "u":
            if self.others and touches(change, self.others):
                return False
            if change.before is None and not self.finds_rows:
                return False  # of a partition whose own replica identity may lack the key, which may be another one than it was
            old_key = key if change.before is None else self.values_of(change.before)
            if not self._is_known(old_key):
                return False
            held = last.pop(old_key, None)
            if held is None and not self.all_are:
                return False
            if change.source.unchanged:
                after, is_whole = _merged(after, change, held)
            if old_key != key:
                if not is_whole or self.others:
                    return False
                self._delete(old_key, offset, held)
                comes, held = True, last.pop(key, None)
        else:
            held = last.pop(key, None)
            if held is not None and self.others:
                return False
        self._look(key)
        is_new = comes and not self._may_overwrite(key) if held is None else held.is_new
        last[key] = _Last(offset, after, is_whole, is_new)
        return True

    def _delete(self, key: Values, offset: int, held: _Last | None) -> None:
        if held is None or not held.is_new:
            self.last[key] = _Last(offset, None)

    def _may_overwrite(self, key: Values) -> bool:
        return self.overwrites and (self.all_are or not self.comes_otherwise(key))

    def _look(self, key: Values) -> None:
        self.all_are = self.all_are and self.are_spelled(key)

    def _is_known(self, key: Values) -> bool:
        """Whether a row is named as the last change of it left it, or no change of it was before: not where another key may be the same, nor by a null."""
        if None in key:
            return False
        self._look(key)
        if self.all_are or not self.last:
            return True
        held = self.last.get(key)
        return held is not None and held.row is not None


def _merged(after: Row, change: Change, held: _Last | None) -> tuple[Row, bool]:
    """The new image with the values that were not sent, as far as an earlier image has them; and whether all are there."""
    known: dict[str, Value] = {}
    for image in (held.row if held else None, change.before):
        known |= {
            name: image[name] for name in change.source.unchanged if image is not None and image.get(name) is not None
        }
    row = {**after, **known}
    return row, all(name in row for name in change.source.unchanged)


def touches(change: Change, others: Unique) -> bool:
    """Whether an update changes a column of a second unique rule, or may do so for all that is known."""
    before, after = change.before, change.after
    if before is None or after is None:
        return True
    unchanged = change.source.unchanged
    return any(
        columns is None
        or any(name not in unchanged and (name not in before or before[name] != after.get(name)) for name in columns)
        for columns in others
    )


def _only_inserts(shape: TableShape, entries: Sequence[Entry]) -> tuple[TableChanges, ...] | None:
    """A table without a key can take rows in bulk as long as nothing but inserts comes."""
    if any(change.op not in {"c", "r"} for _, change in entries):
        return None
    return (_inserts(shape, ((offset, change.after) for offset, change in entries if change.after is not None)),)


def _inserts(shape: TableShape, rows: Iterable[tuple[int, Row]]) -> TableChanges:
    return TableChanges(shape.name, (), Rows(()), (), grouped(shape, rows))


def _grouped(shape: TableShape, key: tuple[str, ...], last: dict[Values, _Last]) -> tuple[TableChanges, ...]:
    deletes = Rows(key)
    for key_values, state in last.items():
        if state.row is None:
            deletes.values.append(key_values)
            deletes.offsets.append(state.offset)
    there = [state for state in last.values() if not state.is_new]
    patches = grouped(shape, ((s.offset, s.row) for s in there if s.row is not None and not s.is_whole))
    upserts = grouped(shape, ((s.offset, s.row) for s in there if s.row is not None and s.is_whole))
    new = _inserts(shape, ((s.offset, s.row) for s in last.values() if s.row is not None and s.is_new))
    return tuple(changes for changes in (TableChanges(shape.name, key, deletes, patches, upserts), new) if len(changes))


def grouped(shape: TableShape, rows: Iterable[tuple[int, Row]]) -> tuple[Rows, ...]:
    """Rows by their columns, without those that the target generates; in the order given within each set of columns."""
    groups: dict[tuple[str, ...], tuple[Rows, Callable[[Row], Values]]] = {}
    for offset, row in rows:
        names = tuple(row)
        group = groups.get(names)
        if group is None:
            columns = written(shape, names)
            group = groups[names] = (Rows(columns), projection(columns))
        into, values_of = group
        into.values.append(values_of(row))
        into.offsets.append(offset)
    return tuple(rows for rows, _ in groups.values())


def written(shape: TableShape, columns: Iterable[str]) -> tuple[str, ...]:
    """The columns that a target can be told; the generated ones it makes itself."""
    return tuple(name for name in columns if name not in shape.generated)


def projection(columns: tuple[str, ...]) -> Callable[[Row], Values]:
    """A function that takes these columns' values out of an image, as a tuple."""
    if not columns:
        return lambda _row: ()
    if len(columns) == 1:
        (name,) = columns
        return lambda row: (row[name],)
    return itemgetter(*columns)
