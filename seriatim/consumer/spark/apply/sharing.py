"""Tables in which two rows of the source have one key of the target for a while.

Problem: rows of a source that names no key (replica identity full) are found by the target's primary key, where it has one. But nothing at the source
may keep two rows from having the same, or no rule before the commit (a deferrable key): `UPDATE t SET id = 3 - id` gives row 1 the key of row 2, which
has it still. By the key alone one would be taken for the other; and the target refuses two rows of one key at any moment.

Idea: when the transaction is over each row has a key of its own again. So all rows that it found are taken out first, then those that it
left are put in.

An old image of a key of which the transaction has brought a row is of that row, or of one that the target has, too. It may be of the first without
looking like it: ALTER TABLE writes values otherwise (4, "4", 4.00) and changes columns; and where partitions are published as the table above them, whose
replica identity is full, an old image has nulls for what the partition's own doesn't name. Where the transaction leaves a row of the key more than it
found, the target had none; where it leaves as many, only the target knows (`ChangeIfThere`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from seriatim.consumer.spark.apply.collapse import Entry, projection
from seriatim.consumer.spark.apply.plan import Step, Values
from seriatim.consumer.spark.apply.shape import TableShape
from seriatim.consumer.spark.apply.spelling import spelled
from seriatim.consumer.spark.apply.steps import change_if_there, put, removal, step
from seriatim.protocol.change import Change, Row


def share_a_key(shape: TableShape, entries: Sequence[Entry]) -> bool:
    """Whether two rows had the same key at once, for all that their images tell: another row has a key than the one that got it last."""
    first = entries[0][1]
    if first.source.key or not (key := shape.key_for(first)):
        return False
    values_of = projection(key)
    held: dict[Values, Row | None] = {}
    try:
        for _, change in entries:
            if change.op in {"u", "d"}:
                key_values = values_of(change.before or {})
                if held.get(key_values, change.before) != change.before:
                    return True
                held[key_values] = None
            if change.after is not None:
                key_values = values_of(change.after)
                if held.get(key_values) is not None:
                    return True
                held[key_values] = change.after
    except KeyError:
        return False  # the table got, or lost, a column of the key, and isn't to be collapsed for that
    return False


def untangled(shape: TableShape, entries: Sequence[Entry]) -> list[Step]:
    """The steps for a table whose rows share a key, transaction by transaction; in order, and up to a refusal, where an image can't be relied on."""
    key = shape.key_for(entries[0][1])
    are_spelled, values_of = spelled([shape.columns[name] for name in key]), projection(key)
    images = [image for _, change in entries for image in (change.before, change.after) if image is not None]
    if any(_lacks_images(change) for _, change in entries) or not all(
        image.keys() >= set(key) and are_spelled(values_of(image)) for image in images
    ):
        return [step(shape, offset, change) for offset, change in entries]
    transactions = groupby(entries, lambda entry: entry[1].source.commit_lsn)
    return [made for _, changes in transactions for made in _anew(shape, key, values_of, list(changes))]


def _lacks_images(change: Change) -> bool:
    """Whether a change may not tell all of its row, or nothing of the old one."""
    return bool(change.source.key or change.source.unchanged) or (change.op == "u" and change.before is None)


def _anew(
    shape: TableShape, key: tuple[str, ...], values_of: Callable[[Row], Values], changes: Sequence[Entry]
) -> list[Step]:
    """Take out what one transaction found, then put in what it left."""
    more = Counter(values_of(change.after) for _, change in changes if change.after is not None)
    more.subtract(values_of(change.before) for _, change in changes if change.before is not None)
    found: dict[Values, Step] = {}
    left: dict[Values, list[tuple[int, Row]]] = {}
    lost: list[Step] = []
    asked: list[Step] = []
    doubted: dict[Values, Row] = {}
    for offset, change in changes:
        if (before := change.before) is not None:
            key_values = values_of(before)
            rows = left.setdefault(key_values, [])
            same = [place for place, (_, row) in enumerate(rows) if row == before]
            if same:
                del rows[same[0]]
            elif key_values not in found and not (rows and more[key_values] > 0):
                found[key_values] = removal(shape, offset, () if rows else key, before)
                if rows and more[key_values] == 0:
                    doubted[key_values] = before
            elif len(rows) == 1:
                rows.clear()  # the one that was found has gone, or there was none, so this is it
            else:
                lost.append(removal(shape, offset, (), before))
        if change.after is not None:
            left.setdefault(values_of(change.after), []).append((offset, change.after))
    for key_values, before in doubted.items():
        if len(left[key_values]) == 1:
            ((offset, row),) = left.pop(key_values)
            del found[key_values]
            asked.append(change_if_there(shape, offset, key, before, row))
    return [
        *found.values(),
        *lost,
        *asked,
        *(put(shape, offset, (), row) for rows in left.values() for offset, row in rows),
    ]
