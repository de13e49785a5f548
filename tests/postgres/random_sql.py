"""Tables of all kinds, and transactions on them by chance: what any application might do to a database that is captured."""

from __future__ import annotations

import random
from typing import NamedTuple

import psycopg

EXTENSIONS = "CREATE EXTENSION citext; CREATE EXTENSION btree_gist"
TABLES = r"""
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TYPE pair AS (x int, y text);
CREATE DOMAIN small AS int CHECK (value > -1000);
CREATE TABLE deferred (id int PRIMARY KEY, code int UNIQUE DEFERRABLE INITIALLY DEFERRED, big text, note text);
CREATE TABLE named (id text PRIMARY KEY, big text, big2 text, n numeric, f float8);
CREATE TABLE whole (id int PRIMARY KEY, big text, arr text[], c pair, m mood);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE keyless (id int, big text, f float8, n numeric, j json, jb jsonb, c pair, t timestamptz, ch char(5));
ALTER TABLE keyless REPLICA IDENTITY FULL;
CREATE TABLE by_index (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, code int NOT NULL UNIQUE, big text,
                       g int GENERATED ALWAYS AS (code * 2) STORED);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code_key;
CREATE TABLE parts (id int, p int, big text, note text, PRIMARY KEY (id, p)) PARTITION BY RANGE (p);
CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (MINVALUE) TO (3);
CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (3) TO (MAXVALUE);
CREATE TABLE excluding (id int PRIMARY KEY, r int4range, big text, EXCLUDE USING gist (r WITH &&));
CREATE TABLE tree (id int PRIMARY KEY, code int REFERENCES tree ON DELETE CASCADE ON UPDATE CASCADE, big text);
CREATE TABLE leaf (id int PRIMARY KEY, code int REFERENCES tree ON DELETE SET NULL ON UPDATE CASCADE, note text);
CREATE TABLE uniques (id int PRIMARY KEY, code int, b int, note text, big text, UNIQUE NULLS NOT DISTINCT (code, b));
CREATE UNIQUE INDEX ON uniques (lower(note));
CREATE UNIQUE INDEX ON uniques (b) WHERE code > 3;
CREATE TABLE deferred_key (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, code int, big text);
ALTER TABLE deferred_key REPLICA IDENTITY FULL;
CREATE TABLE by_numeric (id numeric PRIMARY KEY, n numeric(9,2), big text);
CREATE TABLE by_float (id float8 PRIMARY KEY, t timestamptz, d date, big text);
CREATE TABLE by_char (id char(5) PRIMARY KEY, note varchar(40), big text);
CREATE TABLE by_citext (id citext PRIMARY KEY, m mood, big text);
CREATE TABLE "w""e.i%r" (id small, "a%b" text, "c.d" text, big text, PRIMARY KEY (id, "a%b"));
CREATE TABLE identity_beside (id int GENERATED ALWAYS AS IDENTITY, code int PRIMARY KEY, big text, note text);
CREATE TABLE whole_unique (id int PRIMARY KEY, code int UNIQUE, big text);
ALTER TABLE whole_unique REPLICA IDENTITY FULL;
CREATE TABLE by_time (id timestamp PRIMARY KEY, code uuid, b bytea, big text);
CREATE TABLE keyless_excluding (id int4range, code tstzrange, big text, note text, EXCLUDE USING gist (id WITH =, code WITH &&));
ALTER TABLE keyless_excluding REPLICA IDENTITY FULL;
CREATE TABLE by_pair (id pair PRIMARY KEY, code int[], big text);
CREATE TABLE including (id int, code int, big text, PRIMARY KEY (id) INCLUDE (code));
ALTER TABLE including REPLICA IDENTITY FULL;
CREATE TABLE no_columns ();
ALTER TABLE no_columns REPLICA IDENTITY FULL;
CREATE TABLE by_bool (id bool PRIMARY KEY, code money, big text, i interval, b bit(3), ip inet);
CREATE TABLE parent (id int PRIMARY KEY, big text);
CREATE TABLE child (code int) INHERITS (parent);
ALTER TABLE child ADD PRIMARY KEY (id);
"""
OUT_OF_LINE = """
DO $$ DECLARE one record; BEGIN
    FOR one IN SELECT attrelid::regclass AS name, attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
                WHERE attname LIKE 'big%' AND relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace LOOP
        EXECUTE format('ALTER TABLE %s ALTER %I SET STORAGE EXTERNAL', one.name, one.attname);
    END LOOP;
END $$
"""
"""At the source: long values lie beside their rows, and aren't logged again where they don't change."""

_NUMBERS = ("NULL", *map(str, range(1, 6)), *map(str, range(1, 6)))
_TIMES = ("NULL", "'infinity'", "'4000-01-01 BC'", "'2024-01-01 10:00:00.1'", "'2024-01-01'", "'20000-05-05'")
_VALUES: dict[str, tuple[str, ...]] = {
    "integer": _NUMBERS,
    "small": _NUMBERS,
    "boolean": ("true", "false"),
    "citext": ("'a'", "'A'", "'b'", "'B'", "'c'", "''"),
    "text": ("NULL", "''", "'a'", "'A '", r"E'\\N'", r"E't\tb\n'", "'%s'"),
    "character varying(40)": ("NULL", "''", "'a'", "'A '", "'%s'"),
    "character(5)": ("'a'", "'a '", "'B'", "'bb'", "'ü'"),
    "numeric": ("NULL", "1", "1.0", "1.00", "2.50", "2.5", "-0.0", "'NaN'", "'Infinity'", "3"),
    "numeric(9,2)": ("NULL", "1", "2.5", "'NaN'"),
    "double precision": ("NULL", "1", "-0.0", "0", "'NaN'", "'-Infinity'", "1e300", "0.1"),
    "mood": ("NULL", "'sad'", "'ok'"),
    "pair": ("NULL", "ROW(1, 'a,\"')", "ROW(NULL, NULL)", "ROW(2, '')", "ROW(2, NULL)"),
    "text[]": ("NULL", "'{}'", "ARRAY['NULL', NULL, 'a,b']", "'[0:1]={a,b}'"),
    "integer[]": ("NULL", "'{}'", "ARRAY[1, NULL]", "'[0:1]={1,2}'"),
    "json": ("NULL", "'{\"a\": 1.0}'", "'{\"a\":1}'", "'null'", "'[1, 2]'"),
    "jsonb": ("NULL", "'{\"a\": 1.0}'", "'{\"a\":1}'", "'null'", "'[1, 2]'"),
    "timestamp without time zone": _TIMES,
    "timestamp with time zone": _TIMES,
    "date": ("NULL", "'-infinity'", "'0001-01-01 BC'", "'2024-02-29'"),
    "int4range": ("NULL", "'[1,3)'", "'[3,5)'", "'[5,6)'", "'empty'", "'[2,)'"),
    "tstzrange": ("NULL", "'[2024-01-01,2024-02-01)'", "'[2024-02-01,2024-03-01)'", "'empty'"),
    "uuid": ("NULL", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"),
    "bytea": ("NULL", r"'\x00ff'", "''"),
    "money": ("NULL", "'$1,000.50'", "'-3'"),
    "interval": ("NULL", "'24 hours'", "'1 day'", "'-1 mon 3 days'"),
    "bit(3)": ("NULL", "B'101'"),
    "inet": ("NULL", "'10.0.0.1'", "'10.0.0.1/8'"),
}
_CAN_BE_TURNED = {"integer", "small", "numeric"}
_WITHOUT_CTID = {"parts", "parent"}
"""Rows of several tables, which may have the same one."""


class Column(NamedTuple):
    name: str
    kind: str
    is_identity: bool


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def read_columns(connection: psycopg.Connection) -> dict[str, list[Column]]:
    """Of each table, those that can be written."""
    found: dict[str, list[Column]] = {}
    rows = connection.execute(
        "SELECT c.relname, a.attname, format_type(atttypid, atttypmod), attidentity = 'a'"
        "  FROM pg_class c LEFT JOIN pg_attribute a ON attrelid = c.oid AND attnum > 0 AND NOT attisdropped AND attgenerated = ''"
        " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') ORDER BY 1, attnum"
    )
    for table, name, kind, is_identity in rows:
        columns = found.setdefault(table, [])
        if name is not None:
            columns.append(Column(name, kind, is_identity))
    return found


class RandomSql:
    """Statements on some of the tables. The server's own chance is to be set by `setseed` for the same to come again."""

    def __init__(self, chance: random.Random, columns: dict[str, list[Column]]) -> None:
        self._chance = chance
        self._columns = columns
        every = list(columns)
        self._tables = chance.sample(every, chance.randint(1, 6)) if chance.random() < 0.8 else every

    def transact(self, connection: psycopg.Connection) -> None:
        """One transaction; what a table refuses is taken back, by savepoints."""
        chance = self._chance
        connection.execute("BEGIN")
        for _ in range(chance.choice((1, 2, 4, 10, 30, 80))):
            connection.execute("SAVEPOINT one")
            try:
                connection.execute(self.statement().encode())
            except psycopg.Error:
                connection.execute("ROLLBACK TO one")
        try:
            connection.execute("ROLLBACK" if chance.random() < 0.1 else "COMMIT")
        except psycopg.Error:  # of what is checked at the end
            connection.execute("ROLLBACK")

    def statement(self) -> str:
        chance = self._chance
        table = chance.choice(self._tables)
        columns, name = self._columns[table], quoted(table)
        kind = chance.choice(("insert",) * 4 + ("update",) * 7 + ("update many", "turn", "delete", "delete"))
        if chance.random() < 0.02:
            return f"TRUNCATE {name} {chance.choice(('CASCADE', 'RESTART IDENTITY CASCADE'))}"
        one = f"ctid = (SELECT ctid FROM {name} ORDER BY random() LIMIT 1)"
        if table in _WITHOUT_CTID:
            one = f"id = {chance.randint(1, 5)}"
        if not columns:
            return chance.choice((f"INSERT INTO {name} DEFAULT VALUES", f"DELETE FROM {name} WHERE {one}"))
        if kind == "insert":
            rows = ", ".join(f"({', '.join(map(self._value, columns))})" for _ in range(chance.choice((1, 1, 1, 3))))
            names = ", ".join(quoted(column.name) for column in columns)
            conflict = chance.choice(("", " ON CONFLICT DO NOTHING"))
            return f"INSERT INTO {name} ({names}) OVERRIDING SYSTEM VALUE VALUES {rows}{conflict}"
        if kind.startswith("update"):
            some = chance.sample(columns, chance.randint(1, len(columns)))
            new = ", ".join(
                f"{quoted(one.name)} = {'DEFAULT' if one.is_identity else self._value(one)}" for one in some
            )
            return f"UPDATE {name} SET {new} WHERE {'random() < 0.5' if kind == 'update many' else one}"
        if kind == "turn":  # keys are exchanged
            numbers = [column for column in columns if column.kind in _CAN_BE_TURNED and not column.is_identity]
            if numbers:
                column = quoted(chance.choice(numbers).name)
                which = chance.choice(("", f" WHERE {one}"))
                return f"UPDATE {name} SET {column} = {chance.choice((6, 7, 10))} - {column}{which}"
        return f"DELETE FROM {name} WHERE {one if chance.random() < 0.8 else 'random() < 0.4'}"

    def _value(self, column: Column) -> str:
        chance = self._chance
        if column.name.startswith("big"):
            long = f"repeat('{chance.choice('abcd')}', {chance.choice((2500, 3000, 9000))})"
            return chance.choice(("NULL", "'s'", long, long))
        if column.name == "id" and column.kind == "text":
            return chance.choice(_VALUES["citext"])
        return chance.choice(_VALUES[column.kind])
