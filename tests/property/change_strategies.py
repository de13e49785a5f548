"""Streams of change envelopes as a database would write them, beside the slow, obvious way to apply them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from hypothesis import strategies as st

from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.apply.shape import TableName, TableShape
from seriatim.protocol.change import Change, Origin, Table, encode

KEYED = TableName("public", "keyed")
UNIQUE = TableName("public", "with_unique")
KEYLESS = TableName("public", "keyless")
SHARED = TableName("public", "shared")
"""The source checks its key at the commit, the target at each row."""
WHOLE = frozenset({KEYLESS, SHARED})
"""Replica identity full."""
COLUMNS = ("id", "code", "note")
TYPES = dict(zip(COLUMNS, ("integer", "integer", "text"), strict=True))
SHAPES = {
    KEYED: TableShape(
        KEYED,
        TYPES,
        ("id",),
        unique=(frozenset({"id"}),),
        arbiters=frozenset({frozenset({"id"})}),
    ),
    UNIQUE: TableShape(
        UNIQUE,
        TYPES,
        ("id",),
        unique=(frozenset({"id"}), frozenset({"code"})),
        arbiters=frozenset({frozenset({"id"}), frozenset({"code"})}),
    ),
    KEYLESS: TableShape(KEYLESS, TYPES),
    SHARED: TableShape(SHARED, TYPES, ("id",), unique=(frozenset({"id"}),), arbiters=frozenset({frozenset({"id"})})),
}
SCHEMA = """
CREATE TABLE keyed (id integer PRIMARY KEY, code integer, note text);
CREATE TABLE with_unique (id integer PRIMARY KEY, code integer UNIQUE, note text);
CREATE TABLE keyless (id integer, code integer, note text);
CREATE TABLE shared (id integer PRIMARY KEY, code integer, note text);
ALTER TABLE keyless REPLICA IDENTITY FULL;
"""

Tables = dict[TableName, list[dict[str, object]]]


@dataclass
class Source:
    """A database in memory that writes its log; its tables are what a target must become."""

    tables: Tables = field(default_factory=lambda: {name: [] for name in SHAPES})
    rows: list[ChangeRow] = field(default_factory=list)
    after_commit: list[tuple[int, Tables]] = field(default_factory=list)
    pending: list[tuple[str, dict, dict | None, dict | None]] = field(default_factory=list)
    transaction: int = 0
    texts: set[str] = field(default_factory=set)
    is_altered: bool = False

    def alter(self, column: str) -> None:
        """From now on its values are written as those of another type."""
        self.texts ^= {column}
        self.is_altered = True

    def written(self, image):
        return image and {c: str(v) if c in self.texts and v is not None else v for c, v in image.items()}

    def write(self, op: str, name: TableName | None, before=None, after=None, unchanged=(), **extra) -> None:
        key = () if name is None or name in WHOLE else ("id",)
        offset = len(self.rows)
        source = Origin(
            "db", "slot", 1000 + self.transaction, offset + 1, self.transaction,
            *((name.schema, name.table, key) if name else (None, None, ())),
            unchanged=tuple(unchanged), **extra,
        )  # fmt: skip
        self.rows.append(ChangeRow(offset, encode(Change(op, *map(self.written, (before, after)), source, 1))))

    def committed(self) -> None:
        self.after_commit.append((len(self.rows), json.loads(json.dumps(list(self.tables.values())))))

    def begin(self) -> None:
        self.transaction += 1
        self.write("begin", None)
        self.began = len(self.rows)

    def settle(self) -> None:
        """Leave each row a key of its own."""
        while len(ids := [row["id"] for row in self.tables[SHARED]]) > len(set(ids)):
            self.delete(SHARED, next(place for place, number in enumerate(ids) if ids.count(number) > 1))

    def commit(self) -> None:
        self.settle()
        self.write("commit", None, changes=len(self.rows) - self.began, end_lsn=1)
        self.committed()

    def insert(self, name: TableName, row: dict[str, object]) -> bool:
        if not self.fits(name, row, None):
            return False
        self.tables[name].append(dict(row))
        self.write("c", name, after=row)
        return True

    def update(self, name: TableName, place: int, new: dict[str, object], keep_note: bool) -> bool:
        if not self.tables[name]:
            return False
        old = self.tables[name][place % len(self.tables[name])]
        keeps = keep_note and old["note"] is not None
        row = {**new, "note": old["note"] if keeps else new["note"]}
        if not self.fits(name, row, old):
            return False
        before = dict(old) if name in WHOLE else {"id": old["id"]} if old["id"] != row["id"] else None
        unchanged = ("note",) if keeps and name != SHARED else ()
        after = {column: value for column, value in row.items() if column not in unchanged}
        old.update(row)
        self.write("u", name, before=before, after=after, unchanged=unchanged)
        return True

    def delete(self, name: TableName, place: int) -> bool:
        if not self.tables[name]:
            return False
        old = self.tables[name].pop(place % len(self.tables[name]))
        self.write("d", name, before=old if name in WHOLE else {"id": old["id"]})
        return True

    def truncate(self, names: list[TableName], op: str = "t") -> None:
        self.settle()  # no row is taken out before a truncate for one that goes behind it
        for name in names:
            self.tables[name].clear()
        tables = tuple(Table(n.schema, n.table, () if n in WHOLE else ("id",), COLUMNS) for n in names)
        self.write(op, None, tables=tables)

    def fits(self, name: TableName, row: dict[str, object], old: dict[str, object] | None) -> bool:
        others = [held for held in self.tables[name] if held is not old]
        if (name not in WHOLE or (name == SHARED and not self.transaction)) and any(
            held["id"] == row["id"] for held in others
        ):
            return False
        return name != UNIQUE or row["code"] is None or all(held["code"] != row["code"] for held in others)


_rows = st.fixed_dictionaries(
    {
        "id": st.integers(1, 4),
        "code": st.none() | st.integers(1, 4),
        "note": st.none() | st.sampled_from(["", "a", "\\N", "tab\there", "line\nend", "ü\\"]),
    }
)
_names = st.sampled_from(list(SHAPES))
_actions = st.one_of(
    st.tuples(st.just("insert"), _names, _rows),
    st.tuples(st.just("update"), _names, st.integers(0, 9), _rows, st.booleans()),
    st.tuples(st.just("update"), _names, st.integers(0, 9), _rows, st.booleans()),
    st.tuples(st.just("delete"), _names, st.integers(0, 9)),
    st.tuples(st.just("alter"), st.sampled_from(("id", "code"))),
    st.tuples(st.just("truncate"), st.lists(_names, min_size=1, unique=True)),
)


@st.composite
def sources(draw: st.DrawFn) -> Source:
    """A source after a snapshot and a few transactions."""
    source = Source()
    source.committed()
    if draw(st.booleans()):
        source.truncate(list(SHAPES), "snapshot_begin")
        source.committed()
        for name in SHAPES:
            for row in draw(st.lists(_rows, max_size=3)):
                if source.fits(name, row, None):
                    source.tables[name].append(dict(row))
                    source.write("r", name, after=row)
                    source.committed()
        source.write("snapshot_end", None, changes=len(source.rows) - 1)
        source.committed()
    alters = draw(st.booleans())
    for actions in draw(st.lists(st.lists(_actions, max_size=10), max_size=5)):
        source.begin()
        for kind, *arguments in actions:
            if kind != "alter" or alters:
                getattr(source, kind)(*arguments)
        source.commit()
    return source


@st.composite
def cuts(draw: st.DrawFn, count: int) -> list[int]:
    """Where micro-batches end, in rows; the last one has all."""
    return [*sorted(draw(st.lists(st.integers(0, count), max_size=4))), count]
