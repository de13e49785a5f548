from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psycopg
import pytest
from click.testing import CliRunner

from seriatim.cli import exits
from seriatim.cli.verify import verify
from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.apply.planner import plan
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.consumer.verification import chunks, comparison
from seriatim.consumer.verification.comparison import compare
from seriatim.consumer.verification.errors import (
    DatabaseUnreachable,
    ReadRefused,
    RowsHidden,
    SameDatabase,
    UnknownTable,
)
from seriatim.consumer.verification.result import Example, Progress
from tests.postgres.pool import Pool
from tests.postgres.test_capture import Queue, Sender, last_commit_of, running, streaming, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

SCHEMA = """
CREATE TABLE numbers (id integer PRIMARY KEY, note text, amount numeric);
CREATE TABLE texts (name text, part integer, note text, PRIMARY KEY (name, part));
CREATE TABLE keyless (id integer, note text);
INSERT INTO numbers SELECT i, nullif('n' || i, 'n7'), i / 8.0 FROM generate_series(1, 95) i;
INSERT INTO texts SELECT CASE WHEN i % 2 = 0 THEN 'Ab' ELSE 'aB' END || i / 3, i, 'x' FROM generate_series(1, 95) i;
INSERT INTO keyless SELECT i / 2, nullif(i, 7) FROM generate_series(1, 95) i;
INSERT INTO keyless VALUES (1, 'twice'), (1, 'twice'), (null, null), (null, null);
"""


def run(dsn: str, statements: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(statements)


@pytest.fixture
def pair(new_database) -> tuple[str, str]:
    made = new_database(), new_database()
    for dsn in made:
        run(dsn, SCHEMA)
    return made


@pytest.mark.parametrize("chunk_rows", [1, 10, 95, 1000])
def test_equal_databases_are_identical(pair, chunk_rows) -> None:
    told: list[Progress] = []
    found = compare(*pair, chunk_rows=chunk_rows, on_progress=told.append)
    assert found.is_identical
    assert [(table.table, table.rows) for table in found.tables] == [
        ("public.keyless", 99), ("public.numbers", 95), ("public.texts", 95),
    ]  # fmt: skip
    assert told[-1] == Progress("public.texts", 2, 3, 95)


@pytest.mark.parametrize("chunk_rows", [1, 10, 95, 1000])
@pytest.mark.parametrize(
    ("harm", "table", "counts", "example"),
    [
        ("DELETE FROM numbers WHERE id = 50", "numbers", (1, 0, 0), Example("missing", ("50",))),
        ("DELETE FROM numbers WHERE id = 95", "numbers", (1, 0, 0), Example("missing", ("95",))),
        ("INSERT INTO numbers VALUES (0)", "numbers", (0, 1, 0), Example("extra", ("0",))),
        ("INSERT INTO numbers VALUES (96)", "numbers", (0, 1, 0), Example("extra", ("96",))),
        ("UPDATE numbers SET note = '' WHERE id = 7", "numbers", (0, 0, 1), Example("different", ("7",), ("note",))),
        ("UPDATE numbers SET amount = 1.0 WHERE id = 8", "numbers", (0, 0, 1), Example("different", ("8",), ("amount",))),
        ("TRUNCATE numbers", "numbers", (95, 0, 0), Example("missing", ("1",))),
        ("UPDATE texts SET name = 'ab0' WHERE part = 2", "texts", (1, 1, 0), None),
        ("DELETE FROM keyless WHERE ctid = (SELECT max(ctid) FROM keyless)", "keyless", (1, 0, 0), Example("missing", (None, None))),
        ("INSERT INTO keyless VALUES (1, 'twice')", "keyless", (0, 1, 0), Example("extra", ("1", "twice"))),
        ("UPDATE keyless SET note = 'other' WHERE id = 40", "keyless", (2, 2, 0), None),
    ],
)  # fmt: skip
def test_each_harm_is_found(pair, chunk_rows, harm, table, counts, example) -> None:
    run(pair[1], "ALTER TABLE numbers ALTER amount SET DEFAULT 0;" + harm)
    found = compare(*pair, chunk_rows=chunk_rows)
    results = {result.table: result for result in found.tables}
    harmed = results.pop(f"public.{table}")
    assert (harmed.missing, harmed.extra, harmed.different) == counts
    assert example is None or example in harmed.examples
    assert not found.is_identical
    assert all(result.is_identical for result in results.values())


@pytest.mark.parametrize("key", ["PRIMARY KEY (id)", "CHECK (id > 0)"])
@pytest.mark.parametrize(
    "harm", ["DELETE FROM ONLY animals WHERE id = 1", "UPDATE ONLY animals SET name = 'other' WHERE id = 1"]
)
def test_a_row_is_missed_also_where_a_table_that_inherits_has_one_of_its_key(new_database, key, harm) -> None:
    """A primary key holds within a table, and reading one brings the rows of its heirs: the heir's row stood for both."""
    pair = new_database(), new_database()
    for dsn in pair:
        run(dsn, f"CREATE TABLE animals (id integer, name text, {key}); CREATE TABLE cats ({key}) INHERITS (animals)")
        run(dsn, "INSERT INTO animals VALUES (1, 'any'), (2, 'any'); INSERT INTO cats VALUES (1, 'tom'), (3, 'kit')")
    found = compare(*pair)
    assert found.is_identical
    assert [(table.table, table.rows) for table in found.tables] == [("public.animals", 2), ("public.cats", 2)]
    run(pair[1], harm)
    assert [(table.table, table.is_identical) for table in compare(*pair).tables] == [
        ("public.animals", False),
        ("public.cats", True),
    ]


def test_a_database_is_not_compared_with_itself(pair) -> None:
    """As with one DSN typed twice, or two variables that aren't set: it was identical."""
    with pytest.raises(SameDatabase):
        compare(pair[0], f"{pair[0]}?application_name=other")


def test_a_table_is_the_same_in_partitions_and_without(pair) -> None:
    run(
        pair[1],
        "DROP TABLE numbers; CREATE TABLE numbers (id integer PRIMARY KEY, note text, amount numeric) PARTITION BY RANGE (id)",
    )
    run(
        pair[1],
        "CREATE TABLE few PARTITION OF numbers FOR VALUES FROM (0) TO (50); CREATE TABLE more PARTITION OF numbers DEFAULT",
    )
    run(pair[1], "INSERT INTO numbers SELECT i, nullif('n' || i, 'n7'), i / 8.0 FROM generate_series(1, 95) i")
    for sides in (pair, pair[::-1]):
        [table] = compare(*sides, ["numbers"], chunk_rows=10).tables
        assert (table.is_identical, table.rows) == (True, 95)


@pytest.mark.parametrize("kept", ["first", "other"])
def test_a_key_that_a_damaged_index_let_in_twice_counts_twice(pair, kept) -> None:
    for dsn in pair:
        run(
            dsn,
            "CREATE TABLE kept (id integer PRIMARY KEY, note text); INSERT INTO kept VALUES (1, 'first'), (2, 'other')",
        )
    run(pair[1], f"DELETE FROM kept WHERE note <> '{kept}'; UPDATE kept SET id = 1")
    with psycopg.connect(pair[0]) as connection:
        connection.execute(
            "UPDATE pg_index SET indisready = false, indisvalid = false WHERE indexrelid = 'kept_pkey'::regclass"
        )
        connection.execute("UPDATE kept SET id = 1")
    [table] = compare(*pair, ["kept"]).tables
    assert (table.rows, table.missing, table.extra, table.different) == (2, 1, 0, 0)


@pytest.mark.parametrize("key", ["PRIMARY KEY", ""])
def test_names_are_what_they_are(pair, key) -> None:
    for dsn in pair:
        run(dsn, f'CREATE TABLE "sh%are" ("of 100%" text {key}, "%s {{}}" text)')
        run(dsn, """INSERT INTO "sh%are" SELECT '%' || i || E'\\n\\'', '%s' FROM generate_series(1, 20) i""")
    run(pair[1], """UPDATE "sh%are" SET "%s {}" = '' WHERE "of 100%" LIKE '%12%'""")
    [table] = compare(*pair, ["sh%are"], chunk_rows=5).tables
    assert (table.rows, table.different + table.missing) == (20, 1)


def test_a_chunk_has_as_many_rows_as_it_should_also_where_keys_as_text_have_another_order(pair) -> None:
    told: list[Progress] = []
    compare(*pair, ["numbers"], chunk_rows=40, on_progress=told.append)
    assert [progress.rows for progress in told] == [40, 80, 95]


def test_no_more_rows_are_held_than_are_needed_to_find_a_difference(pair, monkeypatch) -> None:
    for dsn in pair:
        run(dsn, "INSERT INTO numbers SELECT i, 'n' || i, i FROM generate_series(1001, 3000) i")
    run(pair[1], "UPDATE numbers SET note = 'other' WHERE id IN (1003, 2999); INSERT INTO numbers VALUES (2000000)")
    fetched: list[int] = []
    rows_of = chunks._rows

    def counted(*arguments):
        fetched.append(0)
        for row in rows_of(*arguments):
            fetched[-1] += 1
            yield row

    monkeypatch.setattr(chunks, "_rows", counted)
    table = next(one for one in compare(*pair).tables if one.table == "public.numbers")
    assert (table.rows, table.missing, table.extra, table.different) == (2095, 0, 1, 2)
    assert 0 < max(fetched) <= 501


def test_differences_of_the_schema_are_told(pair) -> None:
    run(pair[1], "ALTER TABLE numbers DROP note, ADD more integer, ALTER amount TYPE float8; DROP TABLE keyless;")
    run(pair[1], "ALTER TABLE texts DROP CONSTRAINT texts_pkey; CREATE TABLE own (id integer)")
    schema = {table.table: table.schema for table in compare(*pair).tables}
    assert schema == {
        "public.keyless": ("the target lacks the table",),
        "public.numbers": (
            "the target lacks column note",
            "the source lacks column more",
            "column amount is numeric in the source, double precision in the target",
        ),
        "public.own": ("the source lacks the table",),
        "public.texts": ("the primary key is (name, part) in the source, (none) in the target",),
    }


def test_rows_are_compared_also_where_their_keys_are_of_types_without_a_common_order(pair) -> None:
    for dsn, kind in zip(pair, ("uuid", "text"), strict=True):
        run(dsn, f"CREATE TABLE ids (id {kind} PRIMARY KEY, name varchar(9))")
        run(dsn, "INSERT INTO ids SELECT md5(i::text)::uuid::text::" + kind + ", i FROM generate_series(1, 20) i")
    run(pair[1], "UPDATE ids SET name = 'other' WHERE name = '7'")
    [table] = compare(*pair, ["ids"], chunk_rows=5).tables
    assert (table.rows, table.missing, table.extra) == (20, 1, 1)
    assert table.schema == ("column id is uuid in the source, text in the target",)


def test_rows_are_compared_also_where_the_values_of_an_enum_were_added_in_another_order(pair) -> None:
    for dsn, place in zip(pair, ("BEFORE 'c'", "AFTER 'c'"), strict=True):
        run(dsn, f"CREATE TYPE kind AS ENUM ('a', 'c'); ALTER TYPE kind ADD VALUE 'b' {place}")
        run(dsn, "CREATE TABLE kinds (kind kind, id integer, PRIMARY KEY (kind, id))")
        run(dsn, "INSERT INTO kinds SELECT (ARRAY['a', 'b', 'c'])[1 + i % 3]::kind, i FROM generate_series(1, 30) i")
    [table] = compare(*pair, ["kinds"], chunk_rows=4).tables
    assert (table.is_identical, table.rows) == (True, 30)


KINDS = (
    "SELECT {}, i FROM generate_series(1, 30) i, LATERAL (SELECT (ARRAY['a', 'b', 'c'])[1 + i % 3]::kind) AS k(kind)"
)


@pytest.mark.parametrize(
    ("kind", "made", "value"),
    [("kind[]", "", "ARRAY[kind]"), ("k", "CREATE TYPE k AS (kind kind)", "ROW(kind)::k"), ("k", "CREATE DOMAIN k AS kind", "kind::k")],
)  # fmt: skip
def test_rows_are_compared_also_where_an_enum_is_within_a_key_s_type(new_database, kind, made, value) -> None:
    """An array or a composite of it has its order, too; a domain has no operators of its own."""
    pair = new_database(), new_database()
    for dsn, place in zip(pair, ("BEFORE 'c'", "AFTER 'c'"), strict=True):
        run(dsn, f"CREATE TYPE kind AS ENUM ('a', 'c'); ALTER TYPE kind ADD VALUE 'b' {place}")
        run(dsn, f"{made}; CREATE TABLE kinds (kind {kind}, id integer, PRIMARY KEY (kind, id))")
        run(dsn, f"INSERT INTO kinds {KINDS.format(value)}")
    [table] = compare(*pair, chunk_rows=4).tables
    assert (table.is_identical, table.rows) == (True, 30)


@pytest.mark.parametrize(
    ("kind", "made", "value"),
    [
        ("jsonb", "", "to_jsonb(x)"),
        ("citext", "CREATE EXTENSION citext", "x::citext"),
        ("composite", "CREATE TYPE composite AS (x text)", "ROW(x)::composite"),
        ("textrange", "CREATE TYPE textrange AS RANGE (subtype = text)", "textrange(x, x, '[]')"),
    ],
)
def test_rows_are_compared_by_their_values_where_keys_go_by_the_database_s_locale(
    new_database, kind, made, value
) -> None:
    """Of these, citext has another order in these two locales."""
    pair = tuple(new_database(f"TEMPLATE template0 LOCALE '{locale}'") for locale in ("C.UTF-8", "C"))
    for dsn in pair:
        run(dsn, f"{made}; CREATE TABLE keys (k {kind} PRIMARY KEY, n integer)")
        run(dsn, f"INSERT INTO keys SELECT {value}, n FROM unnest('{{a,B,É,ä,c}}'::text[]) WITH ORDINALITY AS u(x, n)")
    [table] = compare(*pair, chunk_rows=1).tables
    assert (table.is_identical, table.rows) == (True, 5)
    run(pair[1], "UPDATE keys SET n = 9 WHERE n = 3")
    [table] = compare(*pair, chunk_rows=1).tables
    assert (table.missing, table.extra, table.different) == (1, 1, 0)


BY_KEY = [
    ("smallint", "i"), ("bigint", "i"), ("numeric(9,2)", "i"), ("real", "i / 7.0"), ("float8", "i / 7.0"), ("money", "1000 * i"), ("oid", "i"),
    ("boolean", "i > 1"), ("uuid", "md5(i::text)"), ("bytea", "'x' || i"), ("pg_lsn", "'0/' || i"), ("text", "i"), ("varchar(9)", "i"),
    ("char(9)", "i"), ("name", "i"), ('"char"', "i"), ("bit(2)", "i::bit(2)"), ("varbit", "i::bit(2)"), ("date", "'2020-01-0' || i"),
    ("time", "'00:0' || i"), ("timetz(3)", "'00:0' || i"), ("timestamp(3)", "'2020-01-0' || i"), ("timestamptz", "'2020-01-0' || i"),
    ("interval", "i || ' days'"), ("inet", "'10.0.0.' || i || '/8'"), ("cidr", "'10.0.0.' || i"), ("macaddr", "'00:00:00:00:00:0' || i"),
    ("macaddr8", "'00:00:00:00:00:00:00:0' || i"), ("int4range", "int4range(i, 9)"), ("int8range", "int8range(i, 9)"),
    ("numrange", "numrange(i, 9)"), ("daterange", "daterange('2020-01-01'::date + i, NULL)"),
    ("tsrange", "tsrange('2020-01-01'::timestamp + i * interval '1 s', NULL)"), ("tstzrange", "tstzrange('2020-01-01'::timestamptz, NULL, '[)')"),
    ("kind", "(ARRAY['a', 'b', 'c'])[i]"),
]  # fmt: skip


@pytest.mark.parametrize("is_domain", [False, True])
def test_a_key_of_one_order_is_walked(new_database, is_domain) -> None:
    """So a row that differs is told by its key. A domain's values have the order of its type's."""
    pair = new_database(), new_database()
    types = [f"d{number}" if is_domain else kind for number, (kind, _) in enumerate(BY_KEY)]
    for dsn in pair:
        run(dsn, "CREATE TYPE kind AS ENUM ('a', 'b', 'c')")
        for number, (kind, value) in enumerate(BY_KEY):
            run(
                dsn,
                f"CREATE DOMAIN d{number} AS {kind}; CREATE TABLE t{number} (k {types[number]}, n integer, note text, PRIMARY KEY (k, n))",
            )
            run(dsn, f"INSERT INTO t{number} SELECT (({value})::text)::{kind}, i, 'x' FROM generate_series(1, 3) i")
    assert compare(*pair, chunk_rows=1).is_identical
    for number in range(len(BY_KEY)):
        run(pair[1], f"UPDATE t{number} SET note = 'other' WHERE n = 2")
    told = {table.table: (table.missing, table.extra, table.different) for table in compare(*pair, chunk_rows=1).tables}
    by_values = ["kind"] if is_domain else []
    wanted = [(1, 1, 0) if kind in by_values else (0, 0, 1) for kind, _ in BY_KEY]
    assert told == {f"public.t{number}": counts for number, counts in enumerate(wanted)}


def test_a_domain_may_be_over_another_type_on_the_other_side(new_database) -> None:
    pair = new_database(), new_database()
    for dsn, kind in zip(pair, ("integer", "text"), strict=True):
        run(
            dsn,
            f"CREATE DOMAIN k AS {kind}; CREATE TABLE t (k k PRIMARY KEY); INSERT INTO t SELECT i::text::{kind} FROM generate_series(1, 30) i",
        )
    [table] = compare(*pair, chunk_rows=5).tables
    assert (table.is_identical, table.rows) == (True, 30)


@pytest.mark.parametrize(("encoding", "letter"), [("LATIN1", "ÿ"), ("LATIN9", "€")])
def test_rows_are_compared_also_where_letters_have_another_order_in_the_source_s_encoding(
    new_database, encoding, letter
) -> None:
    pair = new_database(f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'"), new_database()
    for dsn in pair:
        run(dsn, "CREATE TABLE letters (letter text PRIMARY KEY, code integer)")
        run(f"{dsn}?client_encoding=UTF8", f"INSERT INTO letters VALUES ('a', 1), ('é', 2), ('{letter}', 3), ('z', 4)")
    [table] = compare(*pair, chunk_rows=1).tables
    assert (table.is_identical, table.rows) == (True, 4)
    run(pair[1], "UPDATE letters SET code = 5 WHERE code = 3")
    [table] = compare(*pair, chunk_rows=1).tables
    assert (table.missing, table.extra, table.different) == (0, 0, 1)


@pytest.mark.parametrize("kind", ["text", 'text COLLATE "C"', "varchar(20)", "char(12)"])
def test_a_table_whose_key_has_a_text_is_read_a_few_times_however_many_rows_it_has(pair, kind) -> None:
    """It was read twice for each chunk: its key's index has the database's collation."""
    for dsn in pair:
        run(dsn, f"CREATE TABLE named (name {kind}, n integer, note text, PRIMARY KEY (name, n))")
        run(dsn, "INSERT INTO named SELECT 'é' || i, i % 7, 'x' FROM generate_series(1, 2000) i")
        run(dsn, "ANALYZE named")
    [table] = compare(*pair, ["named"], chunk_rows=10).tables
    assert (table.is_identical, table.rows) == (True, 2000)
    run(pair[1], "UPDATE named SET note = 'y' WHERE n = 3 AND name IN ('é3', 'é10', 'é1001')")
    run(pair[1], "DELETE FROM named WHERE name = 'é77'")
    run(pair[1], "INSERT INTO named VALUES ('another', 1), ('one more', 1)")
    [table] = compare(*pair, ["named"], chunk_rows=10).tables
    assert (table.missing, table.extra, table.different, table.rows) == (1, 2, 2, 2000)
    for dsn in pair:
        with psycopg.connect(dsn) as connection:
            scans = connection.execute(
                "SELECT seq_scan + idx_scan FROM pg_stat_user_tables WHERE relname = 'named'"
            ).fetchone()
        assert scans is not None
        assert scans[0] < 20, "of which some were this test's"


def test_rows_of_many_buckets_that_differ_are_found_by_a_hash_not_by_a_list(pair, monkeypatch) -> None:
    """A list of 32,000 was gone through for each row."""
    plans: list[str] = []
    streamed = chunks._streamed

    def planned(side, query):
        plans.extend(line for (line,) in side.connection.execute(chunks.sql.SQL("EXPLAIN ") + query))
        return streamed(side, query)

    monkeypatch.setattr(chunks, "_FETCHED", 1)
    monkeypatch.setattr(chunks, "_streamed", planned)
    for dsn in pair:
        run(dsn, "CREATE TABLE named (name text PRIMARY KEY, n integer)")
        run(dsn, "INSERT INTO named SELECT i, 1 FROM generate_series(1, 2000) i; ANALYZE named")
    run(pair[1], "UPDATE named SET n = 2")
    [table] = compare(*pair, ["named"]).tables
    assert (table.rows, table.different) == (2000, 2000)
    assert sum("Hash Cond" in line for line in plans) == 2, plans


@pytest.mark.parametrize("kind", ["integer", "text"])
@pytest.mark.parametrize(("encoding", "letter"), [("SQL_ASCII", r"\351"), ("UTF8", r"\303\251")])
def test_rows_of_a_database_without_an_encoding_are_compared_by_their_bytes(
    new_database, kind, encoding, letter
) -> None:
    pair = [new_database(f"TEMPLATE template0 ENCODING '{one}' LOCALE 'C'") for one in ("SQL_ASCII", encoding)]
    for dsn in pair:
        run(dsn, f"CREATE TABLE cafes (id {kind} PRIMARY KEY, name text)")
        run(dsn, f"INSERT INTO cafes VALUES (1, E'caf{letter}'), (2, 'pub')")
    [table] = compare(*pair).tables
    assert (table.is_identical, table.rows) == (True, 2)


def test_sessions_of_a_pool_have_nothing_left_of_a_comparison(pair) -> None:
    """Who had one of them next had no time-outs there; and the next comparison met a statement of its name, and was refused."""
    settings = (
        "row_security",
        "idle_in_transaction_session_timeout",
        "tcp_keepalives_idle",
        "search_path",
        "datestyle",
    )
    run(pair[0], f"ALTER DATABASE {pair[0].rpartition('/')[2]} SET idle_in_transaction_session_timeout = '7min'")
    with Pool(pair[0]) as source, Pool(pair[1]) as target:
        before = {name: (source.found(name), target.found(name)) for name in settings}
        for _ in range(3):
            assert compare(source.dsn, target.dsn).is_identical
        assert {name: (source.found(name), target.found(name)) for name in settings} == before
        for session in (*source.sessions, *target.sessions):
            assert session.execute("SELECT name FROM pg_prepared_statements").fetchall() == []


def test_a_type_is_the_same_under_whatever_search_path(pair) -> None:
    for dsn in pair:
        run(dsn, "CREATE SCHEMA shop; CREATE TYPE shop.mood AS ENUM ('glad', 'sad')")
        run(dsn, "CREATE TABLE moods (mood shop.mood PRIMARY KEY); INSERT INTO moods VALUES ('sad'), ('glad')")
    shop = f"{pair[1]}?options=-csearch_path%3Dshop,public"
    for sides in ((pair[0], shop), (shop, pair[0])):
        [table] = compare(*sides, ["moods"], chunk_rows=1).tables
        assert (table.is_identical, table.rows) == (True, 2)


@pytest.mark.parametrize("key", ["PRIMARY KEY", ""])
@pytest.mark.parametrize(
    ("kind", "value"),
    [("regclass", "'{}.t'"), ("regclass[]", "'{{{}.t}}'"), ("called", "'{}.t'"), ("names", "'({}.t)'")],
)
def test_a_name_is_the_same_under_whatever_search_path(new_database, key, kind, value) -> None:
    pair = new_database(), new_database()
    for dsn, schema in zip(pair, ("a", "b"), strict=True):
        run(dsn, "CREATE SCHEMA a; CREATE SCHEMA b; CREATE TABLE a.t (); CREATE TABLE b.t ()")
        run(dsn, "CREATE DOMAIN called AS regclass; CREATE TYPE names AS (t regclass)")
        run(dsn, f"CREATE TABLE refs (id integer {key}, t {kind}); INSERT INTO refs VALUES (1, {value.format(schema)})")
    own = [f"{dsn}?options=-csearch_path%3D{path},public" for dsn, path in zip(pair, "ab", strict=True)]
    assert not compare(*own, ["refs"]).is_identical
    run(pair[1], f"UPDATE refs SET t = {value.format('a')}")
    assert compare(*own, ["refs"]).is_identical


def test_an_extension_s_type_is_the_same_in_whatever_schema(pair) -> None:
    for dsn, schema in zip(pair, ("public", "my extensions"), strict=True):
        run(dsn, f'CREATE SCHEMA IF NOT EXISTS "{schema}"; CREATE EXTENSION citext SCHEMA "{schema}"')
        run(
            dsn,
            f'SET search_path = public, "{schema}"; CREATE TABLE mails (mail citext PRIMARY KEY, others citext[], at text)',
        )
        run(dsn, "INSERT INTO mails VALUES ('a@b', '{}', 'x'), ('C@d', '{a@b}', 'x')")
    [table] = compare(*pair, ["mails"], chunk_rows=1).tables
    assert (table.is_identical, table.rows) == (True, 2)
    run(pair[1], 'ALTER TABLE mails ALTER at TYPE "my extensions".citext')
    [table] = compare(*pair, ["mails"]).tables
    assert table.schema == ('column at is text in the source, "my extensions".citext in the target',)


@pytest.fixture
def looks(monkeypatch) -> list:
    """What is done before each look again, by turns; a look is then soon."""
    done: list = []
    take = comparison._as_it_is

    def look(source: str, target: str):
        for dsn, statements in done.pop(0) if done else []:
            run(dsn, statements)
        return take(source, target)

    monkeypatch.setattr(comparison, "_as_it_is", look)
    monkeypatch.setattr(chunks, "_AGAIN_S", 0.01)
    return done


CHANGES = """
UPDATE numbers SET note = 'new' WHERE id < 5; DELETE FROM numbers WHERE id = 50; INSERT INTO numbers VALUES (-1);
UPDATE texts SET note = 'new' WHERE part = 7; DELETE FROM texts WHERE part = 8; INSERT INTO texts VALUES ('ö%', 0);
"""


def test_rows_that_are_on_their_way_are_no_differences_to_who_looks_again(pair, looks) -> None:
    run(pair[0], CHANGES)
    assert not compare(*pair).is_identical
    looks += [[], [], [(pair[1], CHANGES)]]
    assert compare(*pair, settle_s=60).is_identical
    assert looks == []


def test_what_stays_different_is_told_as_it_is_then(pair, looks) -> None:
    """With how many rows there are of which nobody can tell, as they change all the time."""
    hot = (pair[0], "UPDATE numbers SET amount = amount + 1 WHERE id IN (1, 2)")
    run(*hot)
    run(
        pair[0],
        "INSERT INTO numbers VALUES (-1), (-2); UPDATE numbers SET note = 'new' WHERE id = 3; DELETE FROM keyless",
    )
    run(pair[1], "DELETE FROM texts WHERE part < 4")
    looks += [[hot, (pair[1], "INSERT INTO numbers VALUES (-1, 'other')")], *[[hot]] * 10_000]
    found = {table.table: table for table in compare(*pair, settle_s=0.001).tables}
    numbers, texts, keyless = (found[f"public.{name}"] for name in ("numbers", "texts", "keyless"))
    assert (numbers.missing, numbers.extra, numbers.different, numbers.changing) == (1, 0, 4, 2)
    assert set(numbers.examples) == {
        Example("different", ("-1",), ("note",)),
        Example("missing", ("-2",)),
        Example("different", ("1",), ("amount",)),
        Example("different", ("2",), ("amount",)),
        Example("different", ("3",), ("note",)),
    }
    assert (texts.missing, texts.changing) == (3, 0)
    assert (keyless.extra, keyless.changing) == (99, 0)


def test_rows_that_differ_are_not_looked_at_again_where_they_are_many(pair, looks, monkeypatch) -> None:
    """They are held, and asked for by their keys."""
    monkeypatch.setattr(chunks, "MOST_AGAIN", 3)
    run(pair[1], "DELETE FROM numbers WHERE id < 4; DELETE FROM texts WHERE part < 5")
    looks += [[(pair[0], "DELETE FROM numbers WHERE id < 4; DELETE FROM texts WHERE part < 5")]]
    found = {table.table: table for table in compare(*pair, settle_s=0.1).tables}
    assert (found["public.numbers"].missing, found["public.texts"].missing) == (0, 4)


def test_a_side_that_fails_while_it_is_looked_at_again_is_named(pair, looks) -> None:
    run(pair[0], "INSERT INTO numbers VALUES (-1)")
    for side, dsn, other in (("source", *pair), ("target", *reversed(pair))):
        lets_in = f"ALTER DATABASE {dsn.rsplit('/', 1)[1]} ALLOW_CONNECTIONS"
        looks[:] = [[(other, f"{lets_in} false")]]
        with pytest.raises(DatabaseUnreachable) as failed:
            compare(*pair, settle_s=10)
        assert failed.value.details["side"] == side
        run(other, f"{lets_in} true")


def test_only_the_tables_asked_for(pair) -> None:
    run(pair[1], "TRUNCATE texts")
    assert [table.table for table in compare(*pair, ["numbers", "public.keyless"]).tables] == [
        "public.keyless",
        "public.numbers",
    ]
    with pytest.raises(UnknownTable):
        compare(*pair, ["nowhere"])


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "transaction_timeout"])
def test_time_outs_of_a_database_end_no_comparison(pair, setting) -> None:
    run(pair[1], f"ALTER DATABASE {pair[1].rpartition('/')[2]} SET {setting} = 1000")

    def wait_once(progress: Progress) -> None:
        if progress.rows == 40:
            time.sleep(1.2)

    assert compare(*pair, ["numbers"], chunk_rows=40, on_progress=wait_once).is_identical


def test_the_side_that_fails_is_named(pair) -> None:
    with pytest.raises(DatabaseUnreachable) as unreachable:
        compare(pair[0], "postgresql://postgres@127.0.0.1:1/none")
    assert unreachable.value.details["side"] == "target"
    role = f"reader_{pair[0].rsplit('_', 1)[1]}"
    run(pair[0], f"CREATE ROLE {role} LOGIN")
    try:
        with pytest.raises(ReadRefused) as refused:
            compare(pair[0].replace("postgres@", f"{role}@"), pair[1])
        assert refused.value.details["side"] == "source"
    finally:
        run(pair[0], f"DROP ROLE {role}")


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_side_that_hides_rows_is_never_found_identical(pair, side) -> None:
    """Both sides show the same rows: those that differ are hidden on one of them."""
    place = ("source", "target").index(side)
    role = f"reader_{pair[0].rsplit('_', 1)[1]}"
    run(pair[place], "INSERT INTO numbers VALUES (1000, 'hidden')")
    run(pair[place], f"CREATE ROLE {role} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    run(pair[place], "ALTER TABLE numbers ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON numbers USING (id < 1000)")
    asked = list(pair)
    asked[place] = pair[place].replace("postgres@", f"{role}@")
    try:
        with pytest.raises(RowsHidden) as refused:
            compare(*asked)
        assert refused.value.details == {"side": side, "table": "public.numbers"}
        assert compare(*asked, ["texts"]).is_identical
        run(pair[place], f"ALTER ROLE {role} BYPASSRLS")
        assert not compare(*asked).is_identical
    finally:
        run(pair[place], f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_who_reads_no_further_is_told_by_the_exit_code(pair) -> None:
    run(pair[1], "DELETE FROM numbers WHERE id = 5")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "seriatim.cli.main", "verify", "--source", pair[0], "--target", pair[1]]
    with os.fdopen(writing) as output:
        assert subprocess.run(command, stdout=output, timeout=100, check=False).returncode == exits.ANSWER_IS_NO


def test_sigterm_ends_the_query_under_way_too(pair) -> None:
    command = [sys.executable, "-m", "seriatim.cli.main", "verify", "--source", pair[0], "--target", pair[1]]
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(pair[1]) as holding, psycopg.connect(pair[1], autocommit=True) as looking:

        def wait_until(number: int) -> None:
            deadline_s = time.monotonic() + 60
            while looking.execute(waiting).fetchone() != (number,):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)

        holding.execute("LOCK TABLE numbers IN ACCESS EXCLUSIVE MODE")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            wait_until(1)
            process.terminate()
            assert process.wait(60) == exits.INTERRUPTED
        wait_until(0)


def test_what_was_found_before_a_side_fails_is_told(pair) -> None:
    role = f"reader_{pair[0].rsplit('_', 1)[1]}"
    run(
        pair[1],
        f"CREATE ROLE {role} LOGIN; GRANT SELECT ON keyless, numbers TO {role}; DELETE FROM numbers WHERE id = 5",
    )
    try:
        arguments = ["--source", pair[0], "--target", pair[1].replace("postgres@", f"{role}@"), "--json"]
        done = CliRunner().invoke(verify, arguments)
        assert isinstance(done.exception, ReadRefused)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(table["table"], table["missing"]) for table in found] == [("public.keyless", 0), ("public.numbers", 1)]
    finally:
        run(pair[1], f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_no_name_among_the_tables_is_wrong_use() -> None:
    """As of a variable that isn't set: all tables were compared."""
    done = CliRunner().invoke(verify, ["--source", "", "--target", "", "--tables", ","])
    assert (done.exit_code, "name a table" in done.output) == (2, True)


def test_the_command(pair) -> None:
    arguments = ["--source", pair[0], "--target", pair[1]]
    done = CliRunner().invoke(verify, arguments)
    assert done.exit_code == exits.DONE
    assert done.output.splitlines()[-1] == "identical: 289 rows of 3 tables"
    run(pair[1], "DELETE FROM numbers WHERE id = 5")
    done = CliRunner().invoke(verify, [*arguments, "--json", "--tables", "numbers,texts"])
    assert done.exit_code == exits.ANSWER_IS_NO
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert lines[0]["missing"] == 1
    assert lines[0]["examples"] == [{"kind": "missing", "key": ["5"], "columns": []}]
    assert lines[-1] == {"verdict": "different", "tables": 2, "rows": 190}
    done = CliRunner().invoke(verify, [*arguments, "--settle", "0.1"])
    assert done.exit_code == exits.ANSWER_IS_NO
    assert "    missing: 5" in done.output.splitlines()
    run(pair[1], "DELETE FROM numbers WHERE id > 7")
    done = CliRunner().invoke(verify, [*arguments, "--examples", "80", "--tables", "numbers"])
    assert [line for line in done.output.splitlines() if "missing:" in line] == [
        f"    missing: {number}" for number in (5, *range(8, 87))
    ]


def test_rows_that_differ_are_mended_by_hand_as_the_docs_say(new_database) -> None:
    """While the capture and the replay go on, in tables whose rows are replayed in either way."""
    pair = new_database(), new_database()
    for dsn in pair:
        run(dsn, "CREATE TABLE a (id int PRIMARY KEY, n int, big text); ALTER TABLE a ALTER big SET STORAGE EXTERNAL")
        run(
            dsn,
            "CREATE TABLE b (id int PRIMARY KEY, n int UNIQUE, big text); ALTER TABLE b ALTER big SET STORAGE EXTERNAL",
        )
    for table in "ab":
        run(pair[0], f"INSERT INTO {table} SELECT i, i, repeat('x', 9000) FROM generate_series(1, 9) i")
    queue, rows = Queue(), 0
    with running(pair[0], Sender(queue)) as capture, PostgresTarget(pair[1], "job") as target:
        wait_for(lambda: streaming(queue), capture)
        position = target.claim(7, "q", 1)

        def replay(marker: int) -> None:
            nonlocal rows
            run(pair[0], f"INSERT INTO a VALUES ({marker})")
            wait_for(lambda: last_commit_of(queue, marker), capture)
            made = [ChangeRow(offset, value) for offset, (*_, value) in enumerate(queue.records)]
            target.apply(7, plan(made, rows, target.tables()), 1)
            rows = len(made)

        assert position.offset == 0
        replay(100)
        assert compare(*pair).is_identical
        for table in "ab":
            run(pair[1], f"UPDATE {table} SET n = -1 WHERE id = 1; UPDATE {table} SET big = '' WHERE id = 2")
            run(pair[1], f"DELETE FROM {table} WHERE id IN (3, 4); INSERT INTO {table} VALUES (50)")
        found = {one.table: one for one in compare(*pair, examples=9).tables}
        assert {(one.missing, one.extra, one.different) for one in found.values()} == {(2, 1, 2)}
        for table in "ab":
            with psycopg.connect(pair[0]) as east, psycopg.connect(pair[1]) as west:
                west.execute("SET session_replication_role = replica")
                out = east.cursor().copy(f"COPY (SELECT * FROM {table} WHERE id IN (3, 4)) TO STDOUT".encode())
                with out as taken, west.cursor().copy(f"COPY {table} FROM STDIN".encode()) as put:
                    for block in taken:
                        put.write(block)
                west.execute(f"DELETE FROM {table} WHERE id IN (50)".encode())
            run(pair[0], f"UPDATE {table} SET id = id WHERE id IN (1, 3, 4)")
            run(pair[0], f"UPDATE {table} SET big = big || '' WHERE id IN (2)")
        replay(101)
        assert compare(*pair).is_identical
    done = CliRunner().invoke(verify, ["--source", pair[0], "--target", "postgresql://postgres@127.0.0.1:1/none"])
    assert exits.exit_code(done.exception) == exits.REFUSED


@pytest.mark.parametrize("key", ["id integer PRIMARY KEY", "id integer"])
def test_values_are_compared_as_they_are_written_whatever_a_cast_to_text_makes_of_them(new_database, key) -> None:
    """So an xml, of which a cast leaves the declaration, and a copy has none."""
    pair = new_database(), new_database()
    for dsn, value in zip(pair, ("sad", "glad"), strict=True):
        run(
            dsn,
            "CREATE TYPE mood AS ENUM ('sad', 'glad');"
            "CREATE FUNCTION told(mood) RETURNS text LANGUAGE sql IMMUTABLE RETURN 'a mood';"
            "CREATE CAST (mood AS text) WITH FUNCTION told(mood);"
            f"CREATE TABLE kept ({key}, now mood);"
            f"INSERT INTO kept VALUES (1, '{value}'), (2, NULL)",
        )
    assert not compare(*pair).is_identical
    run(pair[1], "UPDATE kept SET now = 'sad' WHERE id = 1")
    assert compare(*pair).is_identical
