"""Plan, then apply to a model of a target, equals the source's own tables at every commit a plan reaches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.consumer.spark.apply import plan as orders
from seriatim.consumer.spark.apply.errors import GivenUp
from seriatim.consumer.spark.apply.planner import plan, plan_part
from seriatim.consumer.spark.apply.shape import TableName
from tests.property import change_strategies as changes


class Refused(Exception):
    """By a rule that is broken, or for a row that isn't there."""


class Model:
    """A target that enforces unique rules at every single row, as PostgreSQL does, and reads a number from what it is written as."""

    def __init__(self) -> None:
        self.tables = {name: [] for name in changes.SHAPES}

    def check(self, name) -> None:
        for columns in changes.SHAPES[name].unique:
            seen = [tuple(row[c] for c in sorted(columns)) for row in self.tables[name]]
            seen = [values for values in seen if None not in values]
            if len(seen) > len(set(seen)):
                raise Refused(name)

    def read(self, columns, values) -> dict:
        row = dict(zip(columns, values, strict=True))
        return {c: v if v is None or changes.TYPES[c] == "text" else int(v) for c, v in row.items()}

    def find(self, name, columns, values) -> list[dict]:
        wanted = self.read(columns, values)
        return [row for row in self.tables[name] if all(row[c] == v for c, v in wanted.items())]

    def put(self, name, key, columns, values) -> None:
        row = self.read(columns, values)
        held = self.find(name, key, [row[c] for c in key]) if key else []
        if held:
            held[0].update(row)
        else:
            self.tables[name].append(row)
        self.check(name)

    def change(self, name, match, match_values, columns, values) -> None:
        held = self.find(name, match, match_values)
        if not held:
            raise Refused(name)
        held[0].update(self.read(columns, values))
        self.check(name)

    def remove(self, name, match, match_values, needed) -> None:
        held = self.find(name, match, match_values)
        if needed and not held:
            raise Refused(name)
        if held:
            self.tables[name] = [row for row in self.tables[name] if row is not held[0]]

    def refusal(self, planned: orders.Plan) -> TableName | None:
        """Apply it; which table refuses, if one does."""
        try:
            self.apply(planned)
        except Refused as refused:
            return refused.args[0]
        return None

    def apply(self, planned: orders.Plan) -> None:
        for segment in planned.segments:
            for name in segment.truncate.tables if segment.truncate else ():
                self.tables[name] = []
            for table in segment.collapsed:
                for values in table.deletes.values:
                    self.remove(table.table, table.key, values, needed=False)
                for patches in table.patches:
                    for values in patches.values:
                        named = [values[patches.columns.index(c)] for c in table.key]
                        self.change(table.table, table.key, named, patches.columns, values)
                for upserts in table.upserts:
                    for values in upserts.values:
                        self.put(table.table, table.key, upserts.columns, values)
            for step in segment.steps:
                self.step(step)

    def step(self, step: orders.Step) -> None:
        if isinstance(step, orders.Put):
            self.put(step.table, step.key, step.columns, step.values)
        elif isinstance(step, orders.Change):
            self.change(step.table, step.key, step.key_values, step.columns, step.values)
        elif isinstance(step, orders.ChangeOne):
            self.change(step.table, step.match, step.match_values, step.columns, step.values)
        elif isinstance(step, orders.ChangeIfThere):
            held, wanted = self.find(step.table, step.key, step.key_values), self.read(step.match, step.match_values)
            if any(row != wanted for row in held):
                raise Refused(step.table)
            if held:
                self.put(step.table, step.key, step.columns, step.values)
        elif isinstance(step, orders.Remove):
            self.remove(step.table, step.key, step.key_values, needed=False)
        else:
            self.remove(step.table, step.match, step.match_values, needed=True)


def in_order(tables) -> list[list]:
    return [sorted(([row[c] for c in changes.COLUMNS] for row in rows), key=repr) for rows in tables]


@settings(max_examples=400)
@given(st.data())
def test_planned_and_applied_equals_row_by_row(data) -> None:
    source = data.draw(changes.sources())
    model = Model()
    wanted = dict(source.after_commit)
    position = 0
    for cut in data.draw(changes.cuts(len(source.rows))):
        rows = source.rows[:cut]  # also rows that are in the target already: they are skipped
        planned = plan(rows, position, changes.SHAPES)
        if refused := model.refusal(planned):
            assert (refused, source.is_altered) == (changes.SHARED, True)
            return
        position = planned.end
        assert planned.leftover == tuple(row for row in rows if row.offset >= position)
        assert in_order(model.tables.values()) == in_order(wanted[position])
    assert position == len(source.rows), "all transactions were whole at the end"


@settings(max_examples=400)
@given(st.data())
def test_in_parts_that_end_anywhere_it_is_the_same_at_the_end(data) -> None:
    source = data.draw(changes.sources())
    gaps: list[range] = []
    cuts = sorted(data.draw(st.sets(st.integers(0, len(source.rows)), max_size=6)) | {len(source.rows)})
    while True:
        model, position, unfinished = Model(), 0, None
        try:
            for cut in cuts:
                rows = [row for row in source.rows[position:cut] if not any(row.offset in gap for gap in gaps)]
                planned, unfinished = plan_part(rows, position, cut, changes.SHAPES, unfinished)
                assert (planned.start, planned.end, planned.leftover) == (position, cut, ())
                if refused := model.refusal(planned):
                    assert refused == changes.SHARED  # one row comes in a part before that in which the other one goes
                    return
                position = cut
        except GivenUp as error:
            gaps.append(range(error.begun_at, error.ended_at))
            continue
        break
    assert unfinished is None
    assert in_order(model.tables.values()) == in_order(dict(source.after_commit)[position])


@settings(max_examples=200)
@given(changes.sources())
def test_no_key_stands_twice_in_a_collapsed_table(source) -> None:
    for segment in plan(source.rows, 0, changes.SHAPES).segments:
        for table in segment.collapsed:
            if table.key:
                keys = [
                    *table.deletes.values,
                    *(
                        (values[rows.columns.index("id")],)
                        for rows in (*table.patches, *table.upserts)
                        for values in rows.values
                    ),
                ]
                assert len(keys) == len(set(keys))
