"""Tables that are made of others: partitioned ones, and those that others inherit from."""

from __future__ import annotations

import time

import pytest

from seriatim.producer.sources.postgres import catalog
from seriatim.producer.sources.postgres.errors import CaptureGap, CaptureRefused, KeylessTable
from tests.postgres.test_capture import (
    Queue,
    Sender,
    is_free,
    last_commit_of,
    one,
    replayed,
    running,
    sql,
    streaming,
    table_rows,
    wait_for,
)

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]


class Standby(Sender):
    """Never elected."""

    asked = 0

    def wait_until_elected(self, timeout_s: float) -> bool:
        self.asked += 1
        time.sleep(0.02)
        return False


FAMILIES = {
    "partitions": (
        "CREATE TABLE top (id int NOT NULL, part int NOT NULL) PARTITION BY LIST (part)",
        "CREATE TABLE middle PARTITION OF top FOR VALUES IN (1, 2) PARTITION BY LIST (part)",
        "CREATE TABLE leaf PARTITION OF middle FOR VALUES IN (1)",
    ),
    "heirs": (
        "CREATE TABLE top (id int PRIMARY KEY, part int NOT NULL)",
        "CREATE TABLE middle (PRIMARY KEY (id)) INHERITS (top)",
        "CREATE TABLE leaf () INHERITS (middle)",
    ),
}


@pytest.mark.parametrize("tables", [("public.top",), ()])
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_partitions_and_heirs_count_before_anything_is_made(new_database, family, tables):
    """With a publication that names a table without a key, the application's own updates fail."""
    dsn = new_database()
    sql(dsn, *FAMILIES[family])
    queue = Queue()
    with running(dsn, Sender(queue), tables=tables) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, KeylessTable)
    assert run.error.details["table"] == "leaf"
    assert one(dsn, "SELECT count(*) FROM pg_publication") == 0
    sql(dsn, "INSERT INTO leaf VALUES (1, 1)", "UPDATE leaf SET id = 2", str(run.error.details["statement"]))
    with running(dsn, Sender(queue), tables=tables) as run:
        wait_for(lambda: streaming(queue), run)
    assert replayed(queue)["leaf", 2] == {"id": 2, "part": 1}


def test_a_publication_that_can_t_be_captured_isn_t_left_behind(new_database, monkeypatch):
    """A table whose key went just after it was looked at."""
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int)")
    monkeypatch.setattr(catalog, "check_keys", lambda _connection, _tables: None)
    with running(dsn, Sender(Queue()), tables=("a",)) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, KeylessTable)
    assert one(dsn, "SELECT count(*) FROM pg_publication") == 0


NAMED = {
    "made by the capture": "",
    "by table": "CREATE PUBLICATION pub FOR TABLE parted",
    "by schema": "CREATE PUBLICATION pub FOR TABLES IN SCHEMA public",
    "all": "CREATE PUBLICATION pub FOR ALL TABLES",
    "as one": "CREATE PUBLICATION pub FOR TABLE parted WITH (publish_via_partition_root)",
}


@pytest.mark.parametrize("named", NAMED)
def test_a_partitioned_table_is_copied_streamed_gone_on_with_and_stood_by_for(new_database, named):
    dsn = new_database()
    sql(
        dsn,
        "CREATE SCHEMA elsewhere",
        "CREATE TABLE parted (id int PRIMARY KEY, t text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE elsewhere.high PARTITION OF parted FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id)",
        "CREATE TABLE elsewhere.high_1 PARTITION OF elsewhere.high FOR VALUES FROM (100) TO (200)",
        "INSERT INTO parted VALUES (1, 'x'), (101, 'y')",
        *filter(None, [NAMED[named]]),
    )
    queue = Queue()
    for marker in (10, 110):  # the second one goes on
        with running(dsn, Sender(queue), tables=("public.parted", "low", "elsewhere.high")) as run:
            wait_for(lambda: streaming(queue), run)
            sql(dsn, f"UPDATE parted SET t = '{marker}' WHERE id = 101", f"INSERT INTO parted VALUES ({marker}, 'z')")
            wait_for(lambda marker=marker: last_commit_of(queue, marker), run)
            standby = Standby(queue)
            with running(dsn, standby, tables=("parted",)) as waiting:
                wait_for(lambda standby=standby: standby.asked, waiting)
        wait_for(lambda: is_free(dsn))
    assert [change.op for change in queue.changes()].count("snapshot_begin") == 1
    found = {row["id"]: row for row in replayed(queue).values()}
    assert found == {row["id"]: row for row in table_rows(dsn, "parted").values()}
    tables = {"parted"} if named == "as one" else {"low", "high_1"}
    assert {change.source.table for change in queue.rows()} == tables


def test_a_partitioned_table_that_the_publication_doesn_t_name_is_refused_with_what_adds_it(new_database):
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "CREATE PUBLICATION pub FOR TABLE low",
    )
    with running(dsn, Sender(Queue()), tables=("parted",)) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, CaptureRefused)
    sql(dsn, str(run.error.details["statement"]))
    queue = Queue()
    with running(dsn, Sender(queue), tables=("parted",)) as run:
        wait_for(lambda: streaming(queue), run)


@pytest.mark.parametrize("change", ["DELETE FROM z WHERE id = 1", "UPDATE z SET id = 101 WHERE id = 1"])
def test_a_partition_whose_identity_no_longer_tells_rows_apart_is_a_gap_with_its_first_change(new_database, change):
    """A delete without a key was sent, and applied to nothing; an update, also one without an old row, made a second row of one."""
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE z (id int PRIMARY KEY, u int NOT NULL) PARTITION BY RANGE (id)",
        "CREATE TABLE z1 PARTITION OF z FOR VALUES FROM (0) TO (200)",
        "CREATE UNIQUE INDEX zu ON z1 (u)",
        "INSERT INTO z VALUES (1, 10), (2, 20)",
        "CREATE PUBLICATION pub FOR TABLE z WITH (publish_via_partition_root)",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "ALTER TABLE z1 REPLICA IDENTITY USING INDEX zu", "INSERT INTO z VALUES (3, 30)")
        wait_for(lambda: last_commit_of(queue, 3), run)
        sql(dsn, change, "INSERT INTO z VALUES (4, 40)")
        wait_for(lambda: run.error is not None or last_commit_of(queue, 4))
    if change.startswith("UPDATE"):  # which may be of another partition: that is seen once this one is mended
        assert isinstance(run.error, KeylessTable)
        sql(dsn, str(run.error.details["statement"]))
        wait_for(lambda: is_free(dsn))
        with running(dsn, Sender(queue)) as run:
            wait_for(lambda: run.error is not None or last_commit_of(queue, 4))
    assert isinstance(run.error, CaptureGap)
    assert "doesn't tell the rows of that apart" in str(run.error)
    assert not [change for change in queue.changes() if change.op in {"d", "u"}]


def test_rows_of_other_partitions_than_one_whose_identity_does_not_tell_them_apart_are_no_gap(new_database):
    """Also behind it was given one that does again: the log says neither, and the capture ended though nothing was missing."""
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE z (id int PRIMARY KEY, u int NOT NULL) PARTITION BY RANGE (id)",
        "CREATE TABLE z1 PARTITION OF z FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE z2 PARTITION OF z FOR VALUES FROM (100) TO (200)",
        "CREATE UNIQUE INDEX zu ON z1 (u)",
        "INSERT INTO z VALUES (1, 10), (101, 110)",
        "CREATE PUBLICATION pub FOR TABLE z WITH (publish_via_partition_root)",
    )
    queue, told = Queue(), []
    with running(dsn, Sender(queue), on_waiting=told.append) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "ALTER TABLE z1 REPLICA IDENTITY USING INDEX zu", "INSERT INTO z VALUES (2, 20)")
        sql(dsn, "ALTER TABLE z1 REPLICA IDENTITY DEFAULT", "UPDATE z SET u = 111 WHERE id = 101")
        sql(
            dsn,
            "UPDATE z SET u = 11 WHERE id = 1",
            "UPDATE z SET u = 112 WHERE id = 101",
            "INSERT INTO z VALUES (3, 30)",
        )
        wait_for(lambda: last_commit_of(queue, 3), run)
        assert len([reason for reason in told if "is read again, to see whether it changes that one" in reason]) == 1
        sql(dsn, "ALTER TABLE z1 REPLICA IDENTITY USING INDEX zu", "INSERT INTO z VALUES (4, 40)")
        sql(dsn, "BEGIN; INSERT INTO z VALUES (102, 0); UPDATE z SET u = 113 WHERE id = 101; COMMIT")
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, KeylessTable)
    sql(dsn, str(run.error.details["statement"]), "INSERT INTO z VALUES (5, 50)")
    wait_for(lambda: is_free(dsn))
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: last_commit_of(queue, 5), run)
    assert replayed(queue) == table_rows(dsn, "z")


def test_an_update_without_an_old_row_is_told_where_each_partition_tells_its_rows_apart(new_database):
    """Also once one does so again; and of tables that are described one behind the other as they are truncated together."""
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE z (id int PRIMARY KEY, u int NOT NULL) PARTITION BY RANGE (id)",
        "CREATE TABLE z1 PARTITION OF z FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE z2 PARTITION OF z FOR VALUES FROM (100) TO (200)",
        "CREATE UNIQUE INDEX zu ON z1 (u, id)",
        "CREATE UNIQUE INDEX zw ON z1 (u)",
        "ALTER TABLE z1 REPLICA IDENTITY USING INDEX zu",
        "ALTER TABLE z2 REPLICA IDENTITY FULL",
        "CREATE TABLE a (id int PRIMARY KEY, n int)",
        "CREATE TABLE b (n int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE z, a, b WITH (publish_via_partition_root)",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(
            dsn,
            "TRUNCATE a, b",
            "INSERT INTO a VALUES (1, 1)",
            "UPDATE a SET n = 2",
            "INSERT INTO z VALUES (1, 10), (101, 110)",
            "ALTER TABLE z1 REPLICA IDENTITY USING INDEX zw",
            "INSERT INTO z VALUES (2, 20)",
            "ALTER TABLE z1 REPLICA IDENTITY DEFAULT",
            "UPDATE z SET u = u + 1",
            "INSERT INTO a VALUES (3, 3)",
        )
        wait_for(lambda: last_commit_of(queue, 3), run)
    assert replayed(queue) == table_rows(dsn, "z") | table_rows(dsn, "a")
