"""From one database into another by all that lies between but the queue: capture, and what a replay applies.

Random transactions on tables of all kinds, random micro-batches: at the end of each transaction that is marked the target holds what the
source held. So it does where tables are altered beside, and captures are killed, take over and send again; and where tables are renamed. More of them:
SERIATIM_DIFFERENTIAL=100:300, the seeds.
"""

from __future__ import annotations

import contextlib
import os
import random

import psycopg
import pytest

from seriatim.consumer.spark import application
from seriatim.consumer.spark.application import Application
from seriatim.consumer.spark.apply.errors import UnfitTarget
from seriatim.consumer.spark.apply.plan import ChangeRow
from seriatim.consumer.spark.targets.errors import ApplyFailed
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.producer.sources.postgres.core.identity import base_seq, parse_source
from seriatim.producer.sources.postgres.core.resume import Kept
from seriatim.producer.sources.postgres.errors import CaptureGap
from seriatim.protocol.change import decode
from tests.postgres.random_sql import (
    ALTERED,
    EXTENSIONS,
    LATER,
    OUT_OF_LINE,
    RENAMED,
    TABLES,
    TARGET_KINDS,
    AlteringSql,
    RandomSql,
    RenamingSql,
    quoted,
    read_columns,
)
from tests.postgres.test_capture import Queue, Run, Sender, running, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]
MARKER = "zz_marker"
SEEDS = os.environ.get("SERIATIM_DIFFERENTIAL")
FIRST, LAST = map(int, (SEEDS or "1:7").split(":"))
PARTITIONED = {"parts", "hashed", "sub", "later", "circle_p"}
AS_READ = {
    "retyped": "(trim_scale(digits::numeric), trim_scale(digits2::numeric), array(SELECT trim_scale(n::numeric) FROM unnest(digits3) n), big, note)",
    "retyped_pair": "(trim_scale(digits::numeric), code, trim_scale(digits2::numeric), big)",
    "grown": "jsonb_strip_nulls(to_jsonb(one))",
    "shed": "(id, big)",
}
"""Of tables that are altered, what is the same before and behind that; of all others, the row."""
Contents = dict[str, list[str]]


def contents(dsn: str, tables: list[str]) -> Contents:
    with psycopg.connect(dsn) as connection:
        return {
            table: sorted(
                row
                for (row,) in connection.execute(
                    f"SELECT {AS_READ.get(table, 'one')}::text FROM {'' if table in PARTITIONED else 'ONLY '}{quoted(table)} one".encode()
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
        make_marker(connection)
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


def make_marker(connection: psycopg.Connection) -> None:
    connection.execute(f"CREATE TABLE {MARKER} (id int PRIMARY KEY)".encode())


def rows_of(queue: Queue) -> list[ChangeRow]:
    return [ChangeRow(offset, value) for offset, (_, _, _, value) in enumerate(queue.records)]


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


def replay(
    target: str, rows: list[ChangeRow], held: list[Contents], tables: list[str], chance: random.Random, monkeypatch
) -> None:
    """Into the target, in micro-batches that end anywhere; at each mark where one ends it is compared."""
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
        make_marker(connection)
    replay(target, rows, held, tables, chance, monkeypatch)


class Resending(Sender):
    """What is acknowledged lags, and the resume point is anywhere below what the queue holds: what is sent again has to be the same."""

    def __init__(self, queue: Queue, limit: int | None, chance: random.Random) -> None:
        super().__init__(queue, limit)
        self._chance = chance
        self._acknowledged: dict[str, int] = {}

    def kept(self) -> Kept:
        held = dict(self.queue.marks)
        return Kept({source: self._resume_point(source) for source in held}, held)

    def _resume_point(self, source: str) -> int:
        held = self.queue.marks[source]
        snapshot_end = base_seq(parse_source(source).consistent_point)
        seqs = [
            seq
            for of, seq, *_ in self.queue.records[-400:]
            if of == source and (seq >= snapshot_end or held < snapshot_end)
        ]
        return self._chance.choice(seqs) if seqs and self._chance.random() < 0.5 else held

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        if seq > self.queue.marks.get(source, 0):
            super().send(value, key, seq, source)
        elif not value.startswith(b'{"op":"heartbeat"'):  # which tells the time
            assert (source, seq, key, value) in self.queue.records

    def acknowledged(self, source: str) -> int:
        if self._chance.random() < 0.7:
            self._acknowledged[source] = super().acknowledged(source)
        return self._acknowledged.get(source, 0)


class Captures:
    """One capture after the other: each is deposed after some records, or at a whim, and another one takes over."""

    def __init__(self, dsn: str, queue: Queue, slot: str, chance: random.Random, *, are_deposed: bool) -> None:
        self._dsn = dsn
        self._queue = queue
        self._slot = slot
        self._chance = chance
        self._limits = (None, 1, 7, 100, 600) if are_deposed else (None,)
        self._begin()

    def _begin(self) -> None:
        self._sender = Resending(self._queue, self._chance.choice(self._limits), random.Random(self._chance.random()))
        self._run = Run(self._dsn, self._sender, slot=self._slot, heartbeat_s=self._chance.choice((0, 0.05, 3.0)))

    def renew(self) -> None:
        """Where the last one was deposed, or has failed, which is raised."""
        if self._sender.is_over or self._run.error is not None:
            self.end()
            self._begin()

    def end(self) -> None:
        self._run.end()
        if self._run.error is not None:
            raise self._run.error


def last_is(queue: Queue, number: int) -> bool:
    """Whether the queue has this mark, be it in a snapshot, with all that belongs to it."""
    last = [value for *_, value in queue.records[-400:] if not value.startswith(b'{"op":"heartbeat"')][-100:]
    is_there = any(
        b'"table":"%b"' % MARKER.encode() in value and b'"after":{"id":%d}' % number in value for value in last
    )
    return is_there and last[-1].startswith((b'{"op":"commit"', b'{"op":"snapshot_end"'))


def altered_and_captured(
    dsn: str, chance: random.Random, seed: int, target_kind: str, slot: str
) -> tuple[list[ChangeRow], list[Contents], list[str]]:
    """As `captured`, while tables are altered, the server ends what streams, and captures follow each other."""
    queue, held = Queue(), list[Contents]()
    are_harmed = chance.random() < 0.6
    with psycopg.connect(dsn, autocommit=True) as connection:
        columns = read_columns(connection)
        tables = list(columns)
        is_by_root = chance.random() < 0.5
        random_sql = AlteringSql(chance, columns, target_kind, is_by_root=is_by_root)
        connection.execute("SELECT setseed(%s)", (seed % 1000 / 1000,))
        make_marker(connection)
        more = (
            chance.choice(("", "", ", publish_generated_columns = stored"))
            if connection.info.server_version >= 180000
            else ""
        )
        connection.execute(
            f"CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = {is_by_root}{more})".encode()
        )
        for _ in range(3):
            random_sql.transact(connection)
        captures = Captures(dsn, queue, slot, random.Random(seed), are_deposed=are_harmed)
        try:
            for number in range(chance.choice((8, 20, 40))):
                random_sql.transact(connection)
                if are_harmed and chance.random() < 0.15:
                    connection.execute(
                        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active AND database = current_database()"
                    )
                connection.execute(f"INSERT INTO {MARKER} VALUES ({number})".encode())
                held.append(contents(dsn, tables))
                captures.renew()

            def is_all_there() -> bool:
                captures.renew()
                return last_is(queue, len(held) - 1)

            wait_for(is_all_there, timeout_s=120)
        finally:
            captures.end()
    return rows_of(queue), held, tables


@pytest.mark.parametrize("seed", range(FIRST, LAST if SEEDS else FIRST + 3))
def test_a_copy_stays_one_while_tables_are_altered_and_captures_die(new_database, monkeypatch, seed) -> None:
    """PostgreSQL itself at times finds one file's number at two tables while it decodes what was altered: nobody can read on there."""
    try:
        copy_altered(new_database, monkeypatch, seed, f"altered_{seed}")
    except CaptureGap as error:
        if "unexpected duplicate for tablespace" not in error.message:
            raise
        copy_altered(new_database, monkeypatch, seed, f"altered_{seed}_again")


def copy_altered(new_database, monkeypatch, seed: int, slot: str) -> None:
    chance = random.Random(seed)
    source, target = new_database(), new_database()
    target_kind = chance.choice(list(TARGET_KINDS))
    with psycopg.connect(source, autocommit=True) as connection:
        name = source.rpartition("/")[2]
        connection.execute(f"ALTER DATABASE {name} SET logical_decoding_work_mem = '64kB'".encode())
        connection.execute(
            (EXTENSIONS + ";" + TABLES + ALTERED.format(kind="int", number="int", more="") + OUT_OF_LINE).encode()
        )
    with psycopg.connect(target, autocommit=True) as connection:
        wide = ALTERED.format(kind=target_kind, number="numeric", more=", x1 text, x2 int, x3 numeric")
        connection.execute((EXTENSIONS + ";" + TABLES + wide + LATER).encode())
        make_marker(connection)
    rows, held, tables = altered_and_captured(source, chance, seed, target_kind, slot)
    replay(target, rows, held, tables, chance, monkeypatch)


def all_contents(dsn: str) -> Contents:
    with psycopg.connect(dsn) as connection:
        names = connection.execute(
            "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables WHERE schemaname IN ('public', 'other') AND tablename <> %s",
            (MARKER,),
        ).fetchall()
        rows = {name: connection.execute(f"SELECT to_jsonb(one)::text FROM {name} one".encode()) for (name,) in names}
        return {name: sorted(row for (row,) in found) for name, found in rows.items()}


@pytest.mark.parametrize("seed", range(FIRST, LAST if SEEDS else FIRST + 2))
def test_a_copy_whose_tables_are_renamed_when_the_replay_asks_for_it_stays_one(new_database, monkeypatch, seed) -> None:
    """All before the first transaction that the target doesn't fit is in there by then, and nothing of it."""
    chance, source, target = random.Random(seed), new_database(), new_database()
    for dsn in (source, target):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(RENAMED.encode())
            make_marker(connection)
    queue, held, altered = Queue(), list[Contents](), list[tuple[int, str]]()
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute(OUT_OF_LINE.encode())
        connection.execute("SELECT setseed(%s)", (seed % 1000 / 1000,))
        random_sql = RenamingSql(chance)
        random_sql.transact(connection)
        with running(source, Sender(queue), slot=f"renamed_{seed}") as run:
            wait_for(lambda: any(change.op == "snapshot_end" for change in queue.changes()), run)
            for number in range(chance.choice((8, 25))):
                random_sql.transact(connection)
                with contextlib.suppress(psycopg.Error):
                    connection.execute((alteration := random_sql.alteration()).encode())
                    altered.append((number, alteration))
                random_sql.transact(connection)
                connection.execute(f"INSERT INTO {MARKER} VALUES ({number})".encode())
                held.append(all_contents(source))
            wait_for(lambda: len(marks(rows_of(queue))) == len(held), run)
    rows = rows_of(queue)
    ends = marks(rows)
    cuts = {chance.randint(0, len(rows)) for _ in range(chance.choice((0, 2, 8)))}
    with PostgresTarget(target, "job") as applied, psycopg.connect(target, autocommit=True) as operator:
        applied.claim(1, "q", 1)
        replay, at = Application(applied, 1, 1, 0, lambda start, end: rows[start:end]), 0

        def alter() -> None:
            operator.execute(altered.pop(0)[1].encode())

        for cut in sorted(cuts - {0} | {*chance.sample(list(ends), 3), len(rows)}):
            while True:
                try:
                    replay.apply(rows[at:cut])
                    break
                except (UnfitTarget, ApplyFailed):
                    if not altered:
                        raise
                    alter()
            at = cut
            if replay.position in ends:
                while altered and altered[0][0] <= ends[replay.position]:
                    alter()
                assert all_contents(target) == held[ends[replay.position]]
    assert all_contents(target) == held[-1]
