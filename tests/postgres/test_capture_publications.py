"""Publications that somebody made otherwise than a capture does: with row filters, or with partitions as one table."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from seriatim.producer.sources.postgres.errors import CaptureGap, CaptureRefused, KeylessTable
from tests.postgres.test_capture import (
    Queue,
    Sender,
    is_free,
    last_commit_of,
    replayed,
    running,
    sql,
    streaming,
    table_rows,
    wait_for,
)

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

LARGE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 300) g)"


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_a_row_that_an_update_brings_into_a_row_filter_comes_whole_or_not_at_all(new_database, identity):
    """PostgreSQL makes an insert of such an update, and leaves out what is stored out of line, as of an update."""
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE filtered (id int PRIMARY KEY, large text)",
        f"ALTER TABLE filtered REPLICA IDENTITY {identity}",
        f"INSERT INTO filtered VALUES (200, {LARGE})",
        "CREATE PUBLICATION pub FOR TABLE filtered WHERE (id < 100)",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "UPDATE filtered SET id = 2")
        wait_for(lambda: run.error is not None or queue.changes()[-1].op == "commit")
    if identity == "FULL":
        assert replayed(queue) == table_rows(dsn, "filtered")
    else:
        assert isinstance(run.error, CaptureGap)
        assert 'ALTER TABLE "public"."filtered" REPLICA IDENTITY FULL' in str(run.error)
        assert not queue.rows()


def test_a_log_that_the_server_can_t_read_is_a_gap_when_it_has_been_tried_for_long_enough(new_database):
    """Here by a row filter; PostgreSQL has defects of its own by which a slot is stuck."""
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE a WHERE (1 / id < 9)")
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "INSERT INTO a VALUES (1)", "INSERT INTO a VALUES (0)")
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, CaptureGap)
    assert "can't read its log for it: division by zero" in " ".join(str(run.error).split())
    assert [change.after for change in queue.rows()] == [{"id": 1}]


GONE_FOR_A_WHILE = (
    "DROP PUBLICATION pub",
    "INSERT INTO a VALUES (2)",
    "CREATE PUBLICATION pub FOR ALL TABLES",
    "INSERT INTO a VALUES (3)",
)


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("level", ["notice", "error"])
def test_what_came_while_there_was_no_publication_is_a_gap_whatever_the_database_shows_its_clients(
    new_database, level, is_streaming
):
    """PostgreSQL 18 leaves it out with a warning, before that it is an error."""
    dsn = new_database()
    sql(
        dsn,
        f"ALTER DATABASE {dsn.rpartition('/')[2]} SET client_min_messages = {level}",
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "INSERT INTO a VALUES (1)")
        wait_for(lambda: last_commit_of(queue, 1), run)
        if is_streaming:
            sql(dsn, *GONE_FOR_A_WHILE)
            wait_for(lambda: run.error is not None or last_commit_of(queue, 3))
    if not is_streaming:
        wait_for(lambda: is_free(dsn))
        sql(dsn, *GONE_FOR_A_WHILE)
    with running(dsn, Sender(queue)) as again:
        wait_for(lambda: again.error is not None or last_commit_of(queue, 3))
    assert isinstance(again.error, CaptureGap)
    assert not is_streaming or isinstance(run.error, CaptureGap)
    assert [change.after for change in queue.rows()] == [{"id": 1}]


@pytest.fixture
def begun(new_database: Callable[[], str]) -> tuple[str, Queue]:
    """A database with tables a and b, and the queue of both, which were captured for a moment."""
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)", "INSERT INTO b VALUES (1)")
    queue = Queue()
    with running(dsn, Sender(queue), tables=("a", "b")) as run:
        wait_for(lambda: streaming(queue), run)
    wait_for(lambda: is_free(dsn))
    return dsn, queue


@pytest.mark.parametrize("change", ["DROP TABLE b", "ALTER TABLE b RENAME TO c"])
def test_a_stream_goes_on_with_what_is_there_of_the_tables_that_were_asked_for(begun, caplog, change):
    """Else nobody takes over from who captures them, and the slot keeps the log, until somebody alters a command."""
    dsn, queue = begun
    sql(dsn, change)
    is_renamed = "RENAME" in change
    with running(dsn, Sender(queue), tables=("a", "b")) as run:
        sql(dsn, *(["INSERT INTO c VALUES (2)"] if is_renamed else []), "INSERT INTO a VALUES (3)")
        wait_for(lambda: last_commit_of(queue, 3), run)
    names = [(change.source.table, change.after["id"]) for change in queue.rows()]
    assert names == [("b", 1), *([("c", 2)] if is_renamed else []), ("a", 3)]
    assert "missing=b " in next(record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_a_table_that_was_made_again_is_not_what_a_publication_names(begun):
    dsn, queue = begun
    sql(dsn, "DROP TABLE b", "CREATE TABLE b (id int PRIMARY KEY)")
    with running(dsn, Sender(queue), tables=("a", "b")) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, CaptureRefused)
    assert run.error.details["statement"] == 'ALTER PUBLICATION "pub" ADD TABLE "public"."b"'


@pytest.mark.parametrize("is_slot_there", [True, False])
def test_a_snapshot_is_of_all_tables_that_were_asked_for(begun, is_slot_there):
    """With another slot, or since the one before was never finished."""
    dsn, queue = begun
    slot = "new"
    if is_slot_there:
        sender = Sender(queue, 1)
        with running(dsn, sender, tables=("a", "b"), slot=slot) as run:
            wait_for(lambda: sender.is_over, run)
        wait_for(lambda: is_free(dsn, slot))
    before = len(queue.records)
    sql(dsn, "DROP TABLE b")
    with running(dsn, Sender(queue), tables=("a", "b"), slot=slot) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, CaptureRefused)
    assert "has no table b" in str(run.error)
    assert len(queue.records) == before


PARTED = (
    "CREATE TABLE parted (id int, part int, large text) PARTITION BY LIST (part)",
    "CREATE TABLE leaf PARTITION OF parted FOR VALUES IN (1)",
    "CREATE PUBLICATION pub FOR TABLE parted WITH (publish_via_partition_root)",
)
AS_ONE = {
    "full above, a key of the partition's": (
        "ALTER TABLE parted REPLICA IDENTITY FULL",
        "ALTER TABLE leaf ADD PRIMARY KEY (id)",
    ),
    "an index of the partition's": (
        "ALTER TABLE parted ADD PRIMARY KEY (id, part)",
        "CREATE UNIQUE INDEX own ON leaf (id)",
        "ALTER TABLE leaf REPLICA IDENTITY USING INDEX own",
    ),
}


@pytest.mark.parametrize("case", AS_ONE)
def test_partitions_that_are_published_as_one_tell_their_rows_apart_as_that_one_does(new_database, case):
    """The log has of an old row what the partition's identity names, and describes the table above."""
    dsn = new_database()
    sql(dsn, *PARTED, *AS_ONE[case], "INSERT INTO parted VALUES (1, 1, 'x'), (2, 1, 'y')")
    with running(dsn, Sender(Queue())) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, KeylessTable)
    assert run.error.details["table"] == "leaf"
    sql(dsn, str(run.error.details["statement"]))
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "UPDATE parted SET large = 'z' WHERE id = 1", "DELETE FROM parted WHERE id = 2")
        wait_for(lambda: queue.changes()[-2].op == "d", run)
    assert replayed(queue) == table_rows(dsn, "parted")
    assert {column for change in queue.rows()[-2:] for column in change.before} >= {"id", "part"}


def test_a_large_value_isn_t_taken_from_an_old_row_that_lacks_it(new_database):
    """Replica identity full of a partitioned table reaches no partition: theirs, the key, is all that is sent of an old row."""
    dsn = new_database()
    sql(
        dsn,
        *PARTED,
        "ALTER TABLE parted ADD PRIMARY KEY (id, part), REPLICA IDENTITY FULL",
        f"INSERT INTO parted VALUES (1, 1, {LARGE})",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "UPDATE parted SET id = 2")
        wait_for(lambda: queue.changes()[-1].op == "commit", run)
    assert replayed(queue) == table_rows(dsn, "parted")


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
@pytest.mark.parametrize("key", ["id, twice", "twice"])
def test_a_key_with_a_generated_column_is_none_to_a_log_that_leaves_that_out(new_database, key, identity):
    """PostgreSQL 18 refuses the application's updates once a publication names such a table; before, half a key was taken for the key."""
    dsn = new_database()
    with psycopg.connect(dsn) as connection:
        is_refused = connection.info.server_version >= 180000 or identity == "DEFAULT"
    sql(
        dsn,
        f"CREATE TABLE g (id int, n int, twice int GENERATED ALWAYS AS (n * 2) STORED, PRIMARY KEY ({key}))",
        f"ALTER TABLE g REPLICA IDENTITY {identity}",
        "INSERT INTO g VALUES (1, 1)",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: run.error is not None or streaming(queue))
    sql(dsn, "UPDATE g SET n = 2")
    assert isinstance(run.error, KeylessTable) is is_refused
    sql(dsn, "ALTER TABLE g ADD CONSTRAINT told UNIQUE (id), ALTER id SET NOT NULL")
    sql(dsn, "ALTER TABLE g REPLICA IDENTITY USING INDEX told")
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "UPDATE g SET n = 3")
        wait_for(lambda: queue.changes()[-1].op == "commit", run)
    assert queue.rows()[-1].source.key == ("id",)


def test_a_snapshot_has_the_columns_that_the_log_has(new_database):
    """PostgreSQL 15 names generated columns in a publication and has none in its log: a target kept what the snapshot had of them."""
    dsn = new_database()
    sql(
        dsn,
        "CREATE TABLE g (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED, m int)",
        "INSERT INTO g VALUES (1, 1)",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "UPDATE g SET n = 2")
        wait_for(lambda: queue.changes()[-1].op == "commit", run)
    assert [change.after for change in queue.rows()] == [{"id": 1, "n": n, "m": None} for n in (1, 2)]
    assert queue.changes()[0].source.tables[0].columns == ("id", "n", "m")


def test_a_virtual_column_is_not_told_to_be_published_which_postgresql_does_not_do(new_database):
    """With such a publication it refuses the application's updates of a table whose replica identity is full."""
    dsn = new_database()
    with psycopg.connect(dsn) as connection:
        if connection.info.server_version < 180000:
            pytest.skip("there are virtual columns from PostgreSQL 18 on")
    sql(
        dsn,
        "CREATE TABLE g (id int NOT NULL CONSTRAINT told UNIQUE, n int, twice int GENERATED ALWAYS AS (n * 2) VIRTUAL)",
        "ALTER TABLE g REPLICA IDENTITY FULL",
        "INSERT INTO g VALUES (1, 1)",
    )
    queue = Queue()
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: run.error is not None)
    assert isinstance(run.error, KeylessTable)
    assert "USING INDEX" in str(run.error)
    assert "publish_generated_columns" not in str(run.error)
    sql(dsn, "ALTER TABLE g REPLICA IDENTITY USING INDEX told")
    with running(dsn, Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
        sql(dsn, "UPDATE g SET n = 3")
        wait_for(lambda: queue.changes()[-1].op == "commit", run)
    assert queue.rows()[-1].after == {"id": 1, "n": 3}
