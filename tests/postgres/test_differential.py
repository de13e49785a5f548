"""From one database into another by all that lies between but the queue: capture, and what a replay applies.

Random transactions on tables of all kinds, random micro-batches: at the end of each transaction that is marked the target holds what the
source held. More of them: SERIATIM_DIFFERENTIAL=100:300, the seeds.
"""

from __future__ import annotations

import os
import random

import psycopg
import pytest

from seriatim.consumer.spark import application
from seriatim.consumer.spark.application import Application
from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.protocol.change import decode
from tests.postgres.random_sql import EXTENSIONS, OUT_OF_LINE, TABLES, RandomSql, quoted, read_columns
from tests.postgres.test_capture import Queue, Sender, running, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]
MARKER = "zz_marker"
FIRST, LAST = map(int, os.environ.get("SERIATIM_DIFFERENTIAL", "1:7").split(":"))
Contents = dict[str, list[str]]


def contents(dsn: str, tables: list[str]) -> Contents:
    with psycopg.connect(dsn) as connection:
        return {
            table: sorted(
                row
                for (row,) in connection.execute(
                    f"SELECT one::text FROM {'' if table == 'parts' else 'ONLY '}{quoted(table)} one".encode()
                )
            )
            for table in tables
        }


def captured(dsn: str, chance: random.Random, seed: int) -> tuple[list[ChangeRow], list[Contents], list[str]]:
    """What the log's records are, what the source held at each mark, and its tables."""
    queue, held = Queue(), list[Contents]()
    with psycopg.connect(dsn, autocommit=True) as connection:
        columns = read_columns(connection)
        tables = list(columns)
        random_sql = RandomSql(chance, columns)
        connection.execute("SELECT setseed(%s)", (seed % 1000 / 1000,))
        connection.execute(f"CREATE TABLE {MARKER} (id int PRIMARY KEY)".encode())
        for _ in range(3):  # for the snapshot
            random_sql.transact(connection)
        with running(dsn, Sender(queue), slot=f"differential_{seed}") as run:
            wait_for(lambda: any(change.op == "snapshot_end" for change in queue.changes()), run)
            for number in range(chance.choice((3, 8, 25))):
                random_sql.transact(connection)
                connection.execute(f"INSERT INTO {MARKER} VALUES ({number})".encode())
                held.append(contents(dsn, tables))
            wait_for(lambda: len(marks(rows_of(queue))) == len(held), run)
    return rows_of(queue), held, tables


def rows_of(queue: Queue) -> list[ChangeRow]:
    return [ChangeRow(offset, source, seq, value) for offset, (source, seq, _, value) in enumerate(queue.records)]


def marks(rows: list[ChangeRow]) -> dict[int, int]:
    """Behind which offsets marked transactions end."""
    found, number = dict[int, int](), None
    for row in rows:
        change = decode(row.value)
        if change.op == "c" and change.source.table == MARKER:
            number = int(change.after["id"])
        elif change.op == "commit" and number is not None:
            found[row.offset + 1], number = number, None
    return found


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_whatever_a_database_goes_through_its_copy_does_too(new_database, monkeypatch, seed) -> None:
    chance = random.Random(seed)
    source, target = new_database(), new_database()
    for dsn in (source, target):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(EXTENSIONS.encode())
            connection.execute(TABLES.encode())
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute(OUT_OF_LINE.encode())
    rows, held, tables = captured(source, chance, seed)
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {MARKER} (id int PRIMARY KEY)".encode())

    ends = marks(rows)
    monkeypatch.setattr(application, "HELD_ROWS", chance.choice((3, 50, 10_000)))
    cuts = {chance.randint(0, len(rows)) for _ in range(chance.choice((0, 2, 8, 40)))}
    cuts |= {*chance.sample(list(ends), min(len(ends), chance.randint(0, 6))), len(rows)}
    with PostgresTarget(target, "job") as applied:
        applied.claim(1, "q", 1)
        replay = Application(applied, 1, 1, 0, lambda start, end: rows[start:end])
        at = 0
        for cut in sorted(cuts - {0}):
            replay.apply(rows[at:cut])
            at = cut
            if replay.position in ends:
                assert contents(target, tables) == held[ends[replay.position]]
    assert contents(target, tables) == held[-1]
