from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.consumer.spark.apply import plan as orders
from seriatim.consumer.spark.apply.digits import rounding_columns
from seriatim.consumer.spark.apply.errors import (
    BrokenStream,
    GeneratedKey,
    GivenUp,
    MissingColumns,
    MissingKey,
    MissingTables,
    NarrowColumn,
)
from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.apply.planner import Unfinished, plan, plan_part
from seriatim.consumer.spark.apply.shape import ArrayType, RowType, TableName
from seriatim.protocol.change import Change, Origin, Table, encode
from seriatim.protocol.postgres import OWN_SCHEMA
from tests.property.change_strategies import KEYED, KEYLESS, SHAPES, SHARED, UNIQUE


def row(offset, op, before=None, after=None, name=KEYED, unchanged=(), key=("id",), lsn=1, **extra) -> ChangeRow:
    key = () if name == KEYLESS else key
    named = (name.schema, name.table, key) if op in "cudr" else (None, None, ())
    origin = Origin("db", "slot", lsn, offset + 1, 1, *named, unchanged=tuple(unchanged), **extra)
    return ChangeRow(offset, encode(Change(op, before, after, origin, 9)))


def commit(offset, changes, lsn=1) -> ChangeRow:
    return row(offset, "commit", changes=changes, end_lsn=2, lsn=lsn)


def only(rows):
    (segment,) = plan(rows, 0, SHAPES).segments
    return segment


def test_cut_at_the_last_commit() -> None:
    rows = [
        row(0, "begin"), row(1, "c", after={"id": 1}), commit(2, 1),
        row(3, "heartbeat"),
        row(4, "begin"), row(5, "c", after={"id": 2}),
    ]  # fmt: skip
    made = plan(rows, 0, SHAPES)
    assert (made.start, made.end, made.changes, made.transactions, made.commit_ts_ms) == (0, 4, 1, 1, 9)
    assert made.leftover == tuple(rows[4:])
    later = plan([*rows, commit(6, 1)], made.end, SHAPES)
    assert (later.start, later.end, len(later), later.leftover) == (4, 7, 1, ())


def test_a_plan_says_where_in_the_source_s_log_it_ends() -> None:
    rows = [
        row(0, "begin", lsn=7), row(1, "c", after={"id": 1}, lsn=7), commit(2, 1, lsn=7),
        row(3, "heartbeat", lsn=9), row(4, "begin", lsn=11), row(5, "c", after={"id": 1}, lsn=11),
    ]  # fmt: skip
    assert [plan(rows[:count], 0, SHAPES).source_lsn for count in (2, 3, 4, 6)] == [None, 7, 9, 9]
    parts = [plan_part(rows[:2], 0, 2, SHAPES, None), plan_part(rows[2:3], 2, 3, SHAPES, Unfinished(0, 7, 1))]
    assert [part.source_lsn for part, _ in parts] == [None, 7]


def test_a_transaction_longer_than_the_micro_batch_is_left_whole() -> None:
    rows = [row(0, "begin"), row(1, "c", after={"id": 1})]
    made = plan(rows, 0, SHAPES)
    assert (made.end, made.segments, made.leftover) == (0, (), tuple(rows))


def test_a_snapshot_may_be_cut_behind_any_row() -> None:
    table = Table("public", "keyed", ("id",), ("id",))
    rows = [row(0, "snapshot_begin", tables=(table,)), row(1, "r", after={"id": 1}), row(2, "r", after={"id": 2})]
    made = plan(rows, 0, SHAPES)
    assert (made.end, made.changes) == (3, 2)
    assert made.segments[0].truncate == orders.Truncate((KEYED,), 0, restart_identity=False)


def test_the_snapshot_of_a_database_without_tables_empties_none() -> None:
    rows = [row(0, "snapshot_begin"), row(1, "snapshot_end", changes=0), row(2, "begin"), row(3, "c", after={"id": 1})]
    made = plan([*rows, commit(4, 1)], 0, SHAPES)
    (segment,) = made.segments
    assert (made.end, segment.truncate, len(segment.collapsed)) == (5, None, 1)


def test_a_new_snapshot_drops_a_transaction_left_unfinished() -> None:
    table = Table("public", "keyed", ("id",), ("id",))
    rows = [row(0, "begin"), row(1, "c", after={"id": 1}), row(2, "snapshot_begin", tables=(table,))]
    made = plan(rows, 0, SHAPES)
    assert (made.end, made.changes, len(made.segments)) == (3, 0, 1)


def test_the_last_change_of_each_key_wins_in_order() -> None:
    rows = [
        row(0, "begin"),
        row(1, "c", after={"id": 1, "code": 1}),
        row(2, "u", after={"id": 1, "code": 2}),
        row(3, "c", after={"id": 2, "code": 3}),
        row(4, "d", before={"id": 1}),
        row(5, "u", before={"id": 2}, after={"id": 3, "code": 3}),
        row(6, "c", after={"id": 1, "code": 6}),
        commit(7, 6),
    ]
    (table,) = only(rows).collapsed
    assert (table.deletes.values, table.deletes.offsets, len(table)) == ([(2,)], [5], 3)
    assert [(rows.columns, rows.values, rows.offsets) for rows in table.upserts] == [
        (("id", "code"), [(3, 3), (1, 6)], [5, 6])
    ]


def test_a_value_not_sent_comes_from_an_earlier_image_or_stays() -> None:
    rows = [
        row(0, "begin"),
        row(1, "c", after={"id": 1, "note": "long"}),
        row(2, "u", after={"id": 1, "code": 2}, unchanged=("note",)),
        row(3, "u", after={"id": 2, "code": 5}, unchanged=("note",)),
        commit(4, 3),
    ]
    (table,) = only(rows).collapsed
    assert [dict(zip(rows.columns, values, strict=True)) for rows in table.upserts for values in rows.values] == [
        {"id": 1, "code": 2, "note": "long"}
    ]
    assert [(rows.columns, rows.values) for rows in table.patches] == [(("id", "code"), [(2, 5)])]


def test_updates_of_a_second_unique_rule_keep_their_order() -> None:
    def swap(name):
        return [
            row(0, "begin"),
            row(1, "u", after={"id": 1, "code": 9}, name=name),
            row(2, "u", after={"id": 2, "code": 1}, name=name),
            row(3, "u", after={"id": 1, "code": 2}, name=name),
            commit(4, 3),
        ]

    assert [step.offset for step in only(swap(UNIQUE)).steps] == [1, 2, 3]
    assert len(only(swap(KEYED)).collapsed[0]) == 2


def test_inserts_and_deletes_beside_a_second_unique_rule_collapse() -> None:
    rows = [
        row(0, "begin"),
        row(1, "d", before={"id": 1}, name=UNIQUE),
        row(2, "c", after={"id": 2, "code": 1}, name=UNIQUE),
        commit(3, 2),
    ]
    assert len(only(rows).collapsed) == 1


def test_a_column_that_the_target_s_key_names_comes_to_the_source_within_a_micro_batch() -> None:
    shape = replace(SHAPES[KEYLESS], primary_key=("code",), arbiters=frozenset({frozenset({"code"})}))
    rows = [
        row(0, "begin"),
        row(1, "u", before={"id": 1}, after={"id": 2}, name=KEYLESS),
        row(2, "u", before={"id": 2, "code": 1}, after={"id": 3, "code": 1}, name=KEYLESS),
        row(3, "d", before={"id": 3, "code": 1}, name=KEYLESS),
        row(4, "c", after={"id": 4}, name=KEYLESS),
        commit(5, 4),
    ]
    (segment,) = plan(rows, 0, {KEYLESS: shape}).segments
    assert [type(step) for step in segment.steps] == [orders.ChangeOne, orders.Change, orders.Remove, orders.Put]
    assert segment.steps[3].key == ()
    (segment,) = plan([rows[0], *rows[2:4], commit(5, 2)], 0, {KEYLESS: shape}).segments
    assert [table.key for table in segment.collapsed] == [("code",)]
    (segment,) = plan([rows[0], *rows[2:5], commit(5, 3)], 0, {KEYLESS: shape}).segments  # it goes again
    assert [type(step) for step in segment.steps] == [orders.Change, orders.Remove, orders.Put]


def test_where_the_source_names_another_key_within_a_micro_batch_the_order_is_kept() -> None:
    """Each change by its own: two rows may have the same of what the other one names."""
    shape = replace(SHAPES[KEYED], unique=(frozenset({"id"}), frozenset({"note"})))
    rows = [
        row(0, "begin"),
        row(1, "c", after={"id": 1, "note": "a"}),
        row(2, "d", before={"note": "a"}, key=("note",)),
        commit(3, 2),
    ]
    (segment,) = plan(rows, 0, {KEYED: shape}).segments
    assert [(type(step), step.key) for step in segment.steps] == [(orders.Put, ("id",)), (orders.Remove, ("note",))]


def steps_of(changes, type_name) -> list[int]:
    """Offsets of the changes that are carried out one by one, where the key has this type in the target."""
    made = [row(number, op, before, after) for number, (op, before, after) in enumerate(changes, 1)]
    rows = [row(0, "begin"), *made, commit(len(made) + 1, len(made))]
    shape = replace(SHAPES[KEYED], columns={**SHAPES[KEYED].columns, "id": type_name})
    (segment,) = plan(rows, 0, {KEYED: shape}).segments
    return [step.offset for step in segment.steps]


@pytest.mark.parametrize(
    ("type_name", "before", "since"),
    [
        ("integer", 5, "5"),
        ("bigint", "5", 5),
        ("text", 5, "5"),
        ("boolean", True, "t"),
        ("numeric", 5, "5"),
        ("numeric", "5.0", "5.00"),
        ("numeric(9,3)", "5.00", "5.000"),
        ("character(5)", "5  ", "5    "),
        ("timestamp without time zone", "2026-11-26", "2026-11-26 00:00:00"),
        ("inet", "10.0.0.1/32", "10.0.0.1"),
    ],
)
def test_where_one_key_may_be_written_in_two_ways_the_order_is_kept(type_name, before, since) -> None:
    """As where a column gets another type at the source: the target takes both for one."""
    put = ("c", None, {"id": before, "note": "a"})
    assert steps_of([put, ("d", {"id": since}, None)], type_name) == [1, 2]
    assert steps_of([put, ("u", None, {"id": since, "note": "b"})], type_name) == [1, 2]
    assert steps_of([put, ("u", {"id": since}, {"id": 7, "note": "a"})], type_name) == [1, 2]
    renamed = ("u", {"id": since}, {"id": before, "note": "a"})
    assert steps_of([("c", None, {"id": since}), renamed, ("d", {"id": since}, None)], type_name) == [1, 2, 3]


def test_a_key_of_a_type_that_may_write_anything_collapses_as_long_as_rows_are_named_as_they_were_left() -> None:
    put, deleted = [("c", None, {"id": text}) for text in ("A", "a")], ("d", {"id": "a"}, None)
    assert steps_of([*put, ("u", {"id": "a"}, {"id": "b"}), ("u", None, {"id": "b"})], "citext") == []
    assert steps_of([deleted, *put], "citext") == []
    assert steps_of([*put, deleted, deleted], "citext") == [1, 2, 3, 4]
    # It is the target's row that may be written otherwise, in whose place none would be put in.
    assert steps_of([("u", None, {"id": "a"})], "citext") == [1]
    assert steps_of([("u", None, {"id": "a"})], "text") == []


@pytest.mark.parametrize(
    "changes",
    [
        # Row 1 becomes row 2, and row 3 becomes row 1: as upserts, the new row 2 would meet its own code in the old row 1.
        [
            ("u", {"id": 1, "code": 5}, {"id": 2, "code": 5}),
            ("u", {"id": 3, "code": 7}, {"id": 1, "code": 7}),
        ],
        # Row 1 is deleted, row 2 takes its code, and row 1 comes back with another one.
        [("d", {"id": 1}, None), ("c", None, {"id": 2, "code": 5}), ("c", None, {"id": 1, "code": 7})],
        # Nothing is known of what was there before.
        [("u", None, {"id": 1, "code": 5})],
        [("u", {"id": 1}, {"id": 1, "code": 5})],
        [("u", {"id": 1, "code": 5}, {"id": 1, "code": 7})],
    ],
)
def test_what_may_pass_a_unique_value_from_row_to_row_keeps_its_order(changes) -> None:
    made = [row(number, op, before, after, UNIQUE) for number, (op, before, after) in enumerate(changes, 1)]
    segment = only([row(0, "begin"), *made, commit(len(made) + 1, len(made))])
    assert [step.offset for step in segment.steps] == list(range(1, len(made) + 1))


@pytest.mark.parametrize(
    ("after", "unchanged"), [({"id": 1, "code": 5, "note": "b"}, ()), ({"id": 1, "note": "b"}, ("code",))]
)
def test_an_update_that_leaves_every_unique_value_as_it_was_collapses(after, unchanged) -> None:
    before = {"id": 1, "code": 5, "note": "a"}
    rows = [row(0, "begin"), row(1, "u", before, after, UNIQUE, unchanged), commit(2, 1)]
    assert len(only(rows).collapsed) == 1
    # Of a rule that isn't a plain list of columns nobody can tell, nor where one of several is changed.
    for rule, others in ((None, ()), (frozenset({"note"}), (frozenset({"code"}),))):
        shape = replace(SHAPES[UNIQUE], unique=(frozenset({"id"}), rule, *others))
        (segment,) = plan(rows, 0, {UNIQUE: shape}).segments
        assert len(segment.steps) == 1


def test_a_row_that_gets_another_key_while_one_of_two_values_that_were_not_sent_is_known_is_changed_in_place() -> None:
    rows = [
        row(0, "begin"),
        row(1, "u", {"id": 1, "note": "a"}, {"id": 2}, unchanged=("code", "note")),
        commit(2, 1),
    ]
    (step,) = only(rows).steps
    assert (step.key_values, step.columns, step.values) == ((1,), ("id",), (2,))


def test_a_truncate_splits() -> None:
    table = Table("public", "keyed", ("id",), ("id",))
    rows = [
        row(0, "begin"), row(1, "c", after={"id": 1}),
        row(2, "t", tables=(table,), cascade=True), row(3, "c", after={"id": 1}), commit(4, 3),
    ]  # fmt: skip
    made = plan(rows, 0, SHAPES)
    assert (made.tables, len(made)) == ({KEYED}, 3)
    first, second = made.segments
    assert (first.truncate, len(first.collapsed)) == (None, 1)
    assert second.truncate == orders.Truncate((KEYED,), 2, restart_identity=False)
    assert len(second.collapsed) == 1


def test_of_truncates_behind_each_other_each_is_carried_out() -> None:
    tables = [Table(name.schema, name.table, ("id",), ("id",)) for name in (KEYED, UNIQUE)]
    rows = [
        row(0, "begin"),
        *(row(number, "t", tables=(table,)) for number, table in enumerate(tables, 1)),
        commit(3, 2),
    ]
    made = plan(rows, 0, SHAPES)
    assert [one.truncate.tables for one in made.segments] == [(KEYED,), (UNIQUE,)]
    assert (made.tables, len(made)) == ({KEYED, UNIQUE}, 2)


@pytest.mark.parametrize(
    "rows",
    [
        [row(0, "c", after={"id": 1})],
        [row(0, "begin"), row(1, "begin")],
        [commit(0, 0)],
        [row(0, "begin"), row(1, "c", after={"id": 1}), commit(2, 2)],
        [row(0, "begin"), row(1, "c", after={"code": 1}), commit(2, 1)],
        [row(0, "begin"), row(1, "d", before={"code": 1}), commit(2, 1)],
        [row(1, "begin"), row(0, "heartbeat")],
        [ChangeRow(0, b"{")],
    ],
    ids=[
        "no begin",
        "begin twice",
        "commit alone",
        "change lost",
        "key lost",
        "deleted key lost",
        "offsets fall",
        "no envelope",
    ],
)
def test_a_broken_stream_stops_loudly(rows) -> None:
    with pytest.raises(BrokenStream):
        plan(rows, 0, SHAPES)


def test_a_table_that_doesnt_fit_is_named_with_what_it_lacks() -> None:
    keyed = SHAPES[KEYED]
    columns = {name: "text" for name in keyed.columns if name != "note"}
    rows = [
        row(0, "begin"),
        row(1, "c", after={"id": 1}),
        row(2, "u", after={"id": 1, "note": "a"}),
        row(3, "d", before={"id": 1}),
        commit(4, 3),
    ]
    assert len(plan(rows, 0, SHAPES).segments) == 1
    for error, shape in (
        (MissingColumns, replace(keyed, columns=columns)),
        (MissingKey, replace(keyed, unique=(frozenset({"id", "code"}),))),
        (GeneratedKey, replace(keyed, generated=frozenset({"id"}))),
    ):
        with pytest.raises(error) as refused:
            plan(rows, 0, {KEYED: shape})
        assert refused.value.details["offset"] == (2 if error is MissingColumns else 1)


DIGITS = [
    # type at the target, what it holds as it is, what it would round
    ("numeric(9,2)", ["1", "-1.5", "1.50", "1.5000", "1.00" + "0" * 40, "NaN", "-Infinity", "1e2", 5], ["1.001", "-0.0001", "1.5001", "1e-03"]),
    ("numeric(9,0)", ["12", "12.000", 5], ["0.5"]),
    ("numeric(3,-2)", ["1200", "0", "0.0"], ["1250", "1200.1"]),
    ("numeric", ["1." + "3" * 50], []),
    ("timestamp(0) with time zone", ["2024-01-01 10:00:00+00", "infinity"], ["2024-01-01 10:00:00.1+00"]),
    ("timestamp(3) without time zone", ["2024-01-01 10:00:00.123", "0044-03-15 12:00:00.12 BC"], ["2024-01-01 10:00:00.1234"]),
    ("time(0) without time zone", ["10:00:00"], ["10:00:00.1"]),
    ("time(2) with time zone", ["10:00:00.12+05:30"], ["10:00:00.123+05:30"]),
    ("interval(0)", ["1 day 00:00:01"], ["1 day -00:00:01.1"]),
    ("interval day to second(1)", ["1 day 00:00:01.1"], ["00:00:01.12"]),
    ("timestamp(6) without time zone", ["2024-01-01 10:00:00.123456"], []),
    ("timestamp without time zone", ["2024-01-01 10:00:00.123456", "2024-01-01", "-infinity", "12024-01-01 10:00:00"], ["2024-01-01 10:00:00+00"]),
    ("timestamp with time zone", ["2024-01-01 10:00:00.1+00", "0044-03-15 12:00:00+00 BC", "2024-01-01", "infinity"], ["2024-01-01 10:00:00", "2024-01-01 10:00:00.123", "0044-03-15 12:00:00 BC"]),
    ("timestamp(3) with time zone[]", ['{"2024-01-01 10:00:00.123+00",NULL}'], ['{"2024-01-01 10:00:00","2024-01-01 10:00:00+00"}', '{"2024-01-01 10:00:00.1234+00"}']),
    ("time without time zone", ["10:00:00.123456", "24:00:00"], ["10:00:00+00", "10:00:00-05:30", "2024-01-01 10:00:00"]),
    ("time with time zone", ["10:00:00.5+00", "10:00:00-05:30", "10:00:00+05:30:15"], ["10:00:00", "10:00:00.5", "2024-01-01 10:00:00+00"]),
    ("time without time zone[]", ["{10:00:00,11:00:00}"], ["{10:00:00,11:00:00+00}"]),
    ("time with time zone[]", ["{10:00:00+00,11:00:00-05:30}"], ["{10:00:00+00,11:00:00}"]),
    ("tsrange", ['["2024-01-01 10:00:00",)', "empty"], ['["2024-01-01 10:00:00+00",)']),
    ("tstzmultirange", ['{["2024-01-01 10:00:00+00",infinity)}'], ['{["2024-01-01 10:00:00","2024-01-02 10:00:00")}']),
    ("daterange", ["[2024-01-01,2024-03-01)", '["0044-03-15 BC",)'], ['["2024-01-01 10:00:00","2024-01-02 10:00:00")']),
    ("interval", ["1 year 2 mons 3 days 04:05:06.789"], []),
    ("interval day to second", ["1 year 2 mons 3 days 04:05:06.789"], []),
    ("interval minute", ["1 year 2 mons -3 days +04:05:00", "00:00:00"], ["04:05:06", "-00:00:00.01"]),
    ("interval day to hour", ["3 days 04:00:00", "100:00:00"], ["04:05:00", "00:00:00.01"]),
    ("interval day", ["1 mon 3 days", "00:00:00"], ["04:00:00", "1 day 00:00:01", "10:00:00"]),
    ("interval year to month", ["1 year 2 mons", "00:00:00"], ["1 mon 3 days", "1 year 00:00:01"]),
    ("interval year", ["-3 years"], ["1 year 1 mon", "1 year -1 days"]),
    ("interval hour[]", ['{04:00:00,"1 day"}'], ['{04:00:00,"1 day 04:05:00"}']),
    ("name", ["", "n" * 63, "\u00e9" * 31, 123], ["n" * 64, "\u00e9" * 32, "n" * 62 + "\u00e9"]),
    ('"char"', ["", "a", "\\303", 5], ["ab", "\u00e9", "9123", 12]),
    ('"char"[]', ['{a,"\\\\303",NULL}'], ["{a,bc}"]),
    ("real", ["0.1", "1e+20", "-1.1754944e-38", "3.4028235e+38", "16777216", "9.8607613e-32", "0.12345679", "-Infinity", "NaN", "no number", 16777216], ["0.123456789", "16777219", "0.1234567890123", "1.00000001", 16777217]),
    ("double precision", ["0.1234567890123456", "0.30000000000000004", "5e-324", "1.7976931348623157e+308", "1" * 400, 5], ["0.12345678901234567", "0.33333333333333333333", 9007199254740993]),
    ("date", ["2024-01-01", "2024-01-01 00:00:00", "2024-01-01 00:00:00+00", "0044-03-15 BC", "infinity"], ["2024-01-01 10:00:00", "2024-01-01 00:00:00.1+00"]),
    ("money", ["$1,000.50", "-1.500"], ["1.505"]),
    ("numeric(9,2)[]", ["{}", "{1.50,NULL}", "[0:1]={1,2.5}", "{{1,2},{3,4}}"], ["{1.50,NULL,1.001}", "[0:1]={1.001,2}"]),
    ("real[]", ["{0.1,NULL}"], ["{0.1,0.123456789}"]),
    ("timestamp(0) without time zone[]", ['{"2024-01-01 10:00:00",NULL}'], ['{"2024-01-01 10:00:00","2024-01-01 10:00:00.1"}']),
    ("text", ["1.23456"], []),
    ("character varying(3)", ["", "ab ", "abc", "abcd", "a   b", "é \n", 'a "b', "   ", 1234], ["abc ", "ab  ", "    ", "\n     "]),
    ("character varying(3)[]", ["{abc,NULL}", '{"ab ","a,"}', r'{"\\\" "}', "{abcd}"], ['{a,"abc  "}', r'{"\"    "}']),
    ("character(3)", ["a    "], []),
]  # fmt: skip


@pytest.mark.parametrize(("type_name", "held", "rounded"), DIGITS)
def test_a_value_that_the_target_would_round_is_refused(type_name, held, rounded) -> None:
    """Two keys would become one, without a word; a column that got more digits at the source has to get them at the target."""
    columns, unique = {**SHAPES[KEYED].columns, "note": type_name}, (frozenset({"id"}), frozenset({"note"}))
    shape = replace(SHAPES[KEYED], columns=columns, unique=unique)
    for value in [None, *held]:
        rows = [row(0, "begin"), row(1, "c", after={"id": 1, "note": value}), commit(2, 1)]
        assert plan(rows, 0, {KEYED: shape}).changes == 1, value
    for value in rounded:
        # Of rows with the same columns each is looked at.
        first = row(1, "c", after={"id": 1, "note": None})
        rows = [row(0, "begin"), first, row(2, "c", after={"id": 2, "note": value}), commit(3, 2)]
        with pytest.raises(NarrowColumn, match='ALTER COLUMN "note" TYPE') as refused:
            plan(rows, 0, {KEYED: shape})
        assert (refused.value.details["type"], refused.value.details["offset"]) == (type_name, 2)
        # What the target makes itself is never written.
        assert plan(rows, 0, {KEYED: replace(shape, generated=frozenset({"note"}))}).changes == 2


def test_a_text_that_is_of_no_key_is_not_looked_at() -> None:
    shape = replace(SHAPES[KEYED], columns={**SHAPES[KEYED].columns, "note": "character varying(3)"})
    assert rounding_columns(shape) == []
    (found,) = rounding_columns(replace(shape, unique=(None, frozenset({"id", "note"}))))
    assert found.column == "note"


PAIR = RowType(("numeric(9,2)", "text"))
COMPOSITES = [
    (PAIR, ["", "(,)", '(1.00,"a,(""\\\\1.001")', '(,"1.001")'], ["(1.001,)", '(1.001,"a")']),
    (ArrayType(PAIR), ["{}", "{NULL}", '{"(1.0,a)"}', '{(1),"(1,1.001)"}'], ['{"(1.001,a)"}', "{NULL,(1.001)}"]),
    (RowType(("text", PAIR)), ['(1.001,"(1.00,1.001)")'], ['(a,"(1.001,""a """"b"")")']),
    (
        RowType(("text", ArrayType(PAIR))),
        [r'(1.001,"{""(1.00,\\""x\\"")""}")'],
        [r'(,"{""(1.00,\\""x\\"")"",""(1.001,\\""x\\"")""}")'],
    ),
    (RowType(("numeric(9,2)[]", "timestamp(0) without time zone")), ['("{1.00,1}","2024-01-01 00:00:00")'],
     ['("{1,1.001}",)', '("{1}","2024-01-01 00:00:00.5")']),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "held", "rounded"), COMPOSITES)
def test_a_field_of_a_composite_value_that_the_target_would_round_is_refused(kind, held, rounded) -> None:
    shape = replace(SHAPES[KEYED], columns={**SHAPES[KEYED].columns, "note": "made"}, beneath={"note": kind})
    for value in [*held, *rounded]:
        rows = [row(0, "begin"), row(1, "c", after={"id": 1, "note": value}), commit(2, 1)]
        if value in held:
            assert plan(rows, 0, {KEYED: shape}).changes == 1, value
        else:
            with pytest.raises(NarrowColumn, match="is made, which holds fewer digits, fields"):
                plan(rows, 0, {KEYED: shape})


def test_a_composite_value_is_not_looked_at_where_its_type_loses_nothing() -> None:
    """Nor a text in it, where it is of no key."""
    columns = {**SHAPES[KEYED].columns, "note": "made"}
    for kind in (RowType(("text", "integer")), RowType(("character varying(3)",)), ArrayType(RowType(("date[]",)))):
        shape = replace(SHAPES[KEYED], columns=columns, beneath={"note": kind})
        assert len(rounding_columns(shape)) == ("date" in str(kind))


def test_what_is_beneath_a_domain_says_what_it_holds() -> None:
    shape = replace(SHAPES[KEYED], columns={**SHAPES[KEYED].columns, "note": "price"}, beneath={"note": "numeric(9,2)"})
    rows = [row(0, "begin"), row(1, "c", after={"id": 1, "note": "1.001"}), commit(2, 1)]
    with pytest.raises(NarrowColumn, match="is price, which holds fewer digits, fields"):
        plan(rows, 0, {KEYED: shape})


def test_a_row_that_comes_overwrites_none_where_the_key_is_a_text_at_the_source_alone() -> None:
    """`1.0` and `1.00` are two rows there, and one key of a number: the second one took the place of the first."""
    columns = {"id": "numeric(9,2)", "code": "integer", "note": "text"}
    shape = replace(SHAPES[KEYED], columns=columns)
    unique = replace(SHAPES[UNIQUE], columns=columns)

    def put(text_key, kind="numeric(9,2)", beneath=None):
        known = {"columns": {**columns, "id": kind}, "beneath": {"id": beneath} if beneath else {}}
        made = [row(1, "c", after={"id": "1.00"}, text_key=text_key),
                row(2, "c", after={"id": "7.00", "code": 1}, name=UNIQUE, text_key=text_key),
                row(3, "u", after={"id": "7.00", "code": 2}, name=UNIQUE, text_key=text_key)]  # fmt: skip
        shapes = {KEYED: replace(shape, **known), UNIQUE: replace(unique, **known)}
        (segment,) = plan([row(0, "begin"), *made, commit(4, 3)], 0, shapes).segments
        (table,) = segment.collapsed
        assert table.key == segment.steps[0].key
        return table.key

    assert (put(()), put(("id",))) == (("id",), ())
    for kind in ("text", "character varying(9)", "citext", "ext.citext", "name"):
        assert put(("id",), kind) == ("id",)
    assert (put(("id",), "code", "text"), put(("id",), "code", "numeric(9,2)")) == (("id",), ())


def test_a_key_that_becomes_a_text_within_a_micro_batch_is_not_collapsed() -> None:
    rows = [row(0, "begin"), row(1, "c", after={"id": "1.00"}), row(2, "c", after={"id": "2.00"}, text_key=("id",))]
    shape = replace(SHAPES[KEYED], columns={**SHAPES[KEYED].columns, "id": "numeric(9,2)"})
    (segment,) = plan([*rows, commit(3, 2)], 0, {KEYED: shape}).segments
    assert [step.key for step in segment.steps] == [("id",), ()]


def test_what_the_target_makes_itself_it_is_not_told() -> None:
    """Nor is a row found by it, nor by what two rows may share within a transaction, nor by a column that the source hasn't."""
    rows = [
        row(0, "begin"),
        row(1, "c", after={"id": 1, "code": 5}, name=KEYLESS),
        row(2, "d", before={"id": 1, "code": 5}, name=KEYLESS),
        commit(3, 2),
    ]
    (put, removal) = only(rows).steps
    assert (put.key, removal.match) == ((), ("id", "code"))
    shape = replace(SHAPES[KEYLESS], generated=frozenset({"code"}))
    (put, removal) = plan(rows, 0, {KEYLESS: shape}).segments[0].steps
    assert (put.columns, removal.match) == (("id",), ("id",))
    arbiter = {"primary_key": ("code",), "arbiters": frozenset({frozenset({"code"})})}
    for other in ({"generated": frozenset({"code"})}, {"arbiters": frozenset()}, {"primary_key": ("number",)}):
        (put, removal) = plan(rows, 0, {KEYLESS: replace(SHAPES[KEYLESS], **arbiter | other)}).segments[0].steps
        assert put.key == ()
    (by_key,) = (
        plan([rows[0], rows[2], commit(3, 1)], 0, {KEYLESS: replace(SHAPES[KEYLESS], **arbiter)}).segments[0].collapsed
    )
    assert (by_key.key, by_key.deletes.values) == (("code",), [(5,)])


def shared(*transactions):
    """The one segment of a table whose key the source doesn't name; steps are (op, before, after), rows (id, note)."""
    rows: list[ChangeRow] = []
    for number, steps in enumerate(transactions, 1):
        rows.append(row(len(rows), "begin", lsn=number))
        for op, *images in steps:
            before, after = (image and dict(zip(("id", "note"), image, strict=True)) for image in images)
            made = Origin("db", "slot", number, len(rows), 1, SHARED.schema, SHARED.table)
            rows.append(ChangeRow(len(rows), encode(Change(op, before, after, made, 9))))
        rows.append(commit(len(rows), len(steps), number))
    return only(rows)


def test_a_row_that_the_changes_themselves_brought_is_inserted_where_the_source_names_no_key() -> None:
    """There might be another row of its key, which nothing at the source rules out: it would be overwritten without a word."""
    put, change, removal = ("c", None, (1, "a")), ("u", (1, "a"), (1, "b")), ("d", (1, "b"), None)
    (table,) = shared([put, change]).collapsed
    assert (table.key, [rows.values for rows in table.upserts]) == ((), [[(1, "b")]])
    assert shared([put, change, removal]).collapsed == ()
    (table,) = shared([change, removal, put]).collapsed
    assert (table.key, [rows.values for rows in table.upserts]) == (("id",), [[(1, "a")]])
    by_key, new = shared([change, ("u", (1, "b"), (2, "b"))], [("u", (2, "b"), (2, "c"))]).collapsed
    assert (by_key.deletes.values, by_key.upserts) == ([(1,)], ())
    assert (new.key, [rows.values for rows in new.upserts]) == ((), [[(2, "c")]])


def test_an_update_without_an_old_image_is_of_a_row_that_is_there_where_the_source_names_no_key() -> None:
    """It is a partition's, whose own replica identity may lack the key: put in, the row would be there twice, under its old key as well."""
    (step,) = shared([("u", None, (1, "b"))]).steps
    assert (type(step), step.key_values) == (orders.Change, (1,))


def test_of_rows_that_have_one_key_for_a_while_those_that_went_are_taken_out_before_those_that_came_are_put_in() -> (
    None
):
    swap = [("u", (1, "a"), (2, "a")), ("u", (2, "b"), (1, "b"))]
    back = [("u", (2, "a"), (1, "a")), ("u", (1, "b"), (2, "b"))]
    steps = shared(swap, back).steps
    # The second one by its image, too, if it is there: the key has been given to the first one.
    assert [type(step) for step in steps] == 2 * [orders.Remove, orders.ChangeIfThere, orders.Put]
    assert [(step.key_values, step.match_values, step.values) for step in steps[1:6:3]] == [
        ((2,), (2, "b"), (2, "a")),
        ((1,), (1, "b"), (1, "a")),
    ]
    assert [step.values for step in steps[2:6:3]] == [(1, "b"), (2, "b")]
    put, removal = ("c", None, (1, "new")), ("d", (1, "a"), None)
    (step,) = shared([put, removal]).steps
    assert (step.key_values, step.match_values, step.values) == ((1,), (1, "a"), (1, "new"))
    # Neither of these is another row: what a column's type is called since isn't what it was.
    (taken, came) = shared([("u", (1, "a"), (1, "5")), ("u", (1, 5), (1, 6))]).steps
    assert (taken.key_values, came.values) == ((1,), (1, 6))
    steps = shared([("u", (1, "a"), (1, "b")), removal, removal]).steps
    assert [type(step) for step in steps] == [orders.Remove, orders.RemoveOne]  # of which the last finds none


@pytest.mark.parametrize("other", [{"id": "2", "note": "b"}, {"note": "b"}])
def test_rows_that_have_one_key_for_a_while_keep_their_order_where_the_key_of_one_is_uncertain(other) -> None:
    named = [("c", None, {"id": 1, "note": "new"}), ("d", {"id": 1, "note": "a"}, None), ("c", None, other)]
    made = [row(number, op, before, after, SHARED, key=()) for number, (op, before, after) in enumerate(named, 1)]
    steps = only([row(0, "begin"), *made, commit(4, 3)]).steps
    assert [(type(step), step.key) for step in steps] == [(orders.Put, ()), (orders.Remove, ("id",)), (orders.Put, ())]


def test_where_a_transaction_leaves_a_row_more_of_a_key_than_it_found_the_target_had_none() -> None:
    """So an old image is of the row that it brought, whatever that looks like since an ALTER TABLE."""
    (came,) = shared([("c", None, (1, 4)), ("u", (1, "4.00"), (1, "5.00")), ("u", (1, 5), (1, 6))]).steps
    assert (came.key, came.values) == ((), (1, 6))
    (came,) = shared([("c", None, (1, 4)), ("d", (1, "4.00"), None), ("c", None, (1, 6))]).steps
    assert (came.key, came.values) == ((), (1, 6))


def test_a_row_that_is_changed_without_an_old_image_is_found_by_its_key() -> None:
    """As one of a partition is, where the table above is published and has replica identity full: it was taken for one that came."""
    named = [
        ("c", {"id": 1, "note": "a"}, None),
        ("d", None, {"id": 1, "note": None}),
        ("u", {"id": 2, "note": "b"}, None),
    ]
    rows = [row(n, op, before, after, SHARED, key=()) for n, (op, after, before) in enumerate(named, 1)]
    steps = only([row(0, "begin"), *rows, commit(4, 3)]).steps
    assert [(type(step), step.key) for step in steps] == [
        (orders.Put, ()),
        (orders.Remove, ("id",)),
        (orders.Change, ("id",)),
    ]


@pytest.mark.parametrize("others", [[], [("c", None, (1, "a"))], [("d", (2, "b"), None)]])
def test_by_a_null_in_its_key_no_row_is_found(others) -> None:
    """What a partition's own replica identity doesn't name is null. By the key nothing was deleted, without a word."""
    *_, step = shared([*others, ("d", (None, "a"), None)]).steps
    assert (type(step), step.match_values) == (orders.RemoveOne, (None, "a"))


def test_only_inserts_of_a_table_without_a_key_go_in_bulk() -> None:
    rows = [row(0, "begin"), *(row(offset, "c", after={"id": 1}, name=KEYLESS) for offset in (1, 2)), commit(3, 2)]
    (table,) = only(rows).collapsed
    assert ([rows.values for rows in table.upserts], table.key) == ([[(1,), (1,)]], ())


def test_changes_of_tables_that_keep_their_order_are_carried_out_in_the_order_of_the_source() -> None:
    shapes = {name: replace(shape, keeps_order=True) for name, shape in SHAPES.items()}
    names = (KEYED, UNIQUE, KEYED, UNIQUE)
    rows = [
        row(0, "begin"),
        *(row(n, "c", after={"id": n}, name=name) for n, name in enumerate(names, 1)),
        commit(5, 4),
    ]
    (segment,) = plan(rows, 0, shapes).segments
    assert [(step.offset, step.table) for step in segment.steps] == list(enumerate(names, 1))


def test_a_transaction_in_parts_is_counted_over_all_of_them_and_given_up_where_a_snapshot_comes_instead() -> None:
    table = Table("public", "keyed", ("id",), ("id",))
    rows = [row(0, "begin"), *(row(offset, "c", after={"id": offset}) for offset in (1, 2, 3))]
    first, unfinished = plan_part(rows[:3], 0, 3, SHAPES, None)
    assert (first.end, len(first), unfinished) == (3, 2, Unfinished(0, 1, 2))
    second, unfinished = plan_part(rows[3:], 3, 4, SHAPES, unfinished)
    assert (len(second), unfinished) == (1, Unfinished(0, 1, 3))
    last, ended = plan_part([commit(4, 3)], 4, 5, SHAPES, unfinished)
    assert (last.transactions, ended) == (1, None)
    with pytest.raises(BrokenStream, match="came with 3"):
        plan_part([commit(4, 4)], 4, 5, SHAPES, unfinished)
    with pytest.raises(GivenUp):
        plan_part([row(4, "snapshot_begin", tables=(table,))], 4, 5, SHAPES, unfinished)
    with pytest.raises(BrokenStream, match="a transaction begins within a snapshot"):
        plan_part(rows, 0, 4, SHAPES, None, orders.Snapshot(1, 7))


def test_two_halves_are_no_transaction_though_together_they_have_its_number_of_changes() -> None:
    """The end of the first one and the begin of the last one are in what an operator gave up."""
    gap = 1 << 40
    rows = [row(0, "begin", lsn=5), row(1, "c", after={"id": 51}, lsn=5)]
    for behind in (
        [row(gap, "c", after={"id": 72}, lsn=7), commit(gap + 1, 2, lsn=7)],
        [row(gap, "t", tables=(Table("public", "keyed", ("id",), ("id",)),), lsn=7), commit(gap + 1, 2, lsn=7)],
        [commit(gap, 1, lsn=7)],
    ):
        with pytest.raises(BrokenStream, match="of another transaction than began at offset 0") as broken:
            plan([*rows, *behind], 0, SHAPES)
        assert broken.value.details == {"offset": gap}
        _, unfinished = plan_part(rows, 0, 2, SHAPES, None)
        with pytest.raises(BrokenStream, match="of another transaction than began at offset 0"):
            plan_part(behind, 2, gap + 2, SHAPES, unfinished)


SNAPSHOT = [
    row(0, "snapshot_begin", tables=(Table("public", "keyed", ("id",), ("id",)),)),
    *(row(offset, "r", after={"id": offset}) for offset in (1, 2, 3)),
    row(4, "snapshot_end", changes=3),
]


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("lost", range(5))
def test_a_snapshot_with_a_hole_is_not_whole_wherever_a_micro_batch_ended(lost, cut) -> None:
    rows = [*SNAPSHOT, row(5, "begin"), commit(6, 0)]
    reached = plan(rows[:cut], 0, SHAPES).end
    assert plan(rows[max(0, cut - 1) :], reached, SHAPES).end == 7
    del rows[lost]
    if lost == 0:
        assert plan(rows, 0, SHAPES).end == 7  # it may have been before
        with pytest.raises(BrokenStream, match="record 2 of a snapshot came without its begin"):
            plan(rows, 0, SHAPES, orders.NO_SNAPSHOT)
        return
    with pytest.raises(BrokenStream, match="snapshot"):
        plan(rows[max(0, cut - 1) :], plan(rows[:cut], 0, SHAPES).end, SHAPES)


def test_a_snapshot_may_begin_anew_and_be_gone_on_with_where_it_is_not_known_what_came_before() -> None:
    again = [each._replace(offset=10 + each.offset) for each in SNAPSHOT]
    assert plan([*SNAPSHOT[:2], *again], 0, SHAPES).end == 15
    assert plan(SNAPSHOT[2:], 2, SHAPES).end == 5


@pytest.mark.parametrize("before", [row(0, "heartbeat"), commit(0, 0), SNAPSHOT[4]])
@pytest.mark.parametrize("behind", [SNAPSHOT[1], SNAPSHOT[4]])
def test_a_snapshot_of_which_the_begin_is_missing_is_not_whole_where_none_can_have_begun_before(before, behind) -> None:
    rows = [before._replace(offset=8), behind._replace(offset=1 << 40)]
    with pytest.raises(BrokenStream, match="of a snapshot came without its begin"):
        plan(rows, 9, SHAPES)
    behind = [row(9, "begin"), commit(10, 0), *rows[1:]]
    with pytest.raises(BrokenStream, match="of a snapshot came without its begin"):
        plan(behind, 9, SHAPES)


@pytest.mark.parametrize("place", [2, 4])
def test_the_halves_of_two_snapshots_are_none_though_their_numbers_go_on(place) -> None:
    end = row(place, "snapshot_end", changes=3, lsn=7)
    other = end if place == 4 else row(place, "r", after={"id": 9}, lsn=7)
    with pytest.raises(BrokenStream, match="of another snapshot came after"):
        plan([*SNAPSHOT[:place], other], 0, SHAPES)


@pytest.mark.parametrize("place", range(1, 5))
def test_a_heartbeat_within_a_snapshot_comes_behind_a_hole_or_is_of_another_database(place) -> None:
    """A capture begins with them when the queue holds its whole snapshot. One alone in its micro-batch hid what was lost before."""
    begun = [row(each.offset, "r", after={"id": 1}, lsn=5) for each in SNAPSHOT[1:place]]
    rows = [row(0, "snapshot_begin", tables=(Table("public", "keyed", ("id",), ("id",)),), lsn=5), *begun]
    reached = plan(rows, 0, SHAPES).snapshot
    assert reached == orders.Snapshot(5, place)
    for known in (reached, None):
        with pytest.raises(BrokenStream, match="a heartbeat came within a snapshot"):
            plan([*rows, row(place, "heartbeat", lsn=5)], place, SHAPES, known)
        assert plan([*rows, row(place, "heartbeat", lsn=4)], place, SHAPES, known).snapshot == reached


def test_a_change_without_what_identifies_its_row_is_a_broken_stream_also_where_order_is_kept() -> None:
    ordered = {KEYED: replace(SHAPES[KEYED], keeps_order=True)}
    for op, before, after, shapes, name in (
        ("d", {"code": 1}, None, ordered, KEYED),
        ("u", None, {"code": 1}, ordered, KEYED),
        ("u", None, {"id": 1}, SHAPES, KEYLESS),
    ):
        with pytest.raises(BrokenStream):
            plan([row(0, "begin"), row(1, op, before, after, name), commit(2, 1)], 0, shapes)


def test_missing_tables_are_named() -> None:
    with pytest.raises(MissingTables, match=r"public\.keyed"):
        plan([row(0, "begin"), row(1, "c", after={"id": 1}), commit(2, 1)], 0, {})


def test_positions_of_a_replay_into_the_source_are_passed_over() -> None:
    """A to B to C: what is captured of B holds the position of the replay from A, which moves with each transaction."""
    own = TableName(OWN_SCHEMA, "positions")
    tables = [Table(name.schema, name.table, ("id",), ("id",)) for name in (own, KEYED)]
    rows = [
        row(0, "snapshot_begin", tables=tuple(tables)),
        row(1, "r", after={"queue_id": 7, "job": "replay"}, name=own),
        row(2, "r", after={"id": 1}),
        row(3, "snapshot_end", changes=2),
        row(4, "begin"),
        row(5, "u", after={"queue_id": 7, "job": "replay"}, name=own),
        row(6, "c", after={"id": 2}),
        row(7, "t", tables=(tables[0],)),
        commit(8, 3),
        row(9, "begin"),
        row(10, "u", after={"queue_id": 7, "job": "replay"}, name=own),
        commit(11, 1),
    ]
    made = plan(rows, 0, SHAPES)
    assert (made.end, made.changes, made.transactions) == (12, 2, 2)
    (segment,) = made.segments
    assert segment.truncate == orders.Truncate((KEYED,), 0, restart_identity=False)
    assert [(table.table, len(table)) for table in segment.collapsed] == [(KEYED, 2)]
    assert plan([row(0, "snapshot_begin", tables=(tables[0],))], 0, SHAPES).segments == ()
    with pytest.raises(MissingTables, match=r"lacks table public\.keyed;"):
        plan(rows, 0, {})
