"""What can't be captured as it is said, in a line, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.producer.sources.postgres.capture import PostgresCapture
from seriatim.producer.sources.postgres.errors import CaptureRefused, SourceLost
from seriatim.protocol.errors import InvalidArgument
from tests.postgres.test_capture import Queue, Sender, one, running, sql, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]


@pytest.fixture
def dsn(new_database: Callable[[], str]) -> str:
    made = new_database()
    sql(made, "CREATE TABLE a (id int PRIMARY KEY)")
    return made


@pytest.fixture
def few(dsn: str) -> Iterator[str]:
    """DSN of a role that may read and replicate, and has no table of its own."""
    sql(dsn, "CREATE ROLE few LOGIN REPLICATION", "GRANT SELECT ON a TO few")
    yield dsn.replace("postgres@", "few@")
    sql(dsn, "DROP OWNED BY few", "DROP ROLE few")


def refused(dsn: str, tables: tuple[str, ...] = ()) -> Exception | None:
    with running(dsn, Sender(Queue()), tables=tables) as run:
        wait_for(lambda: run.error is not None)
    return run.error


@pytest.mark.parametrize("tables", [(), ("a",)])
def test_a_role_that_may_not_publish_is_told_what_has_to_be_run(dsn: str, few: str, tables: tuple[str, ...]) -> None:
    error = refused(few, tables)
    assert isinstance(error, CaptureRefused)
    sql(dsn, str(error.details["statement"]))
    assert one(dsn, "SELECT string_agg(tablename, '') FROM pg_publication_tables WHERE pubname = 'pub'") == "a"


def test_a_table_that_joins_a_publication_is_told_to_come_without_the_rows_it_has(dsn: str) -> None:
    sql(dsn, "CREATE TABLE b (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE a")
    error = refused(dsn, ("a", "b"))
    assert isinstance(error, CaptureRefused)
    assert str(error.details["statement"]) == 'ALTER PUBLICATION "pub" ADD TABLE "public"."b"'
    assert 'ADD TABLE "public"."b", which leaves out the rows that the table has by then' in str(error)


def test_a_publication_that_leaves_updates_out_is_told_to_have_left_them_out(dsn: str) -> None:
    sql(dsn, "CREATE PUBLICATION pub FOR TABLE a WITH (publish = 'insert')")
    error = refused(dsn)
    assert isinstance(error, CaptureRefused)
    assert "where a stream has begun, of which it left some out, capture with another slot" in str(error)
    sql(dsn, str(error.details["statement"]))
    with running(dsn, Sender(Queue())) as run:
        wait_for(lambda: one(dsn, "SELECT count(*) FROM pg_replication_slots WHERE active"), run)


def test_what_nobody_foresaw_is_a_refusal_and_no_traceback(dsn: str) -> None:
    error = refused(dsn, ("a.b.c.d",))
    assert isinstance(error, CaptureRefused)
    assert "improper relation name" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["My-Slot", "", "x" * 64, "ä", "a\n"])
def test_a_name_that_no_slot_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="no name of a slot"):
        PostgresCapture("", name, "pub", (), Sender(Queue()))


def test_a_dsn_that_can_t_be_read_is_wrong_use() -> None:
    error = refused("postgresql://east/shop?nonsense=1")
    assert isinstance(error, InvalidArgument)
    assert "nonsense" in str(error)
    assert "\n" not in str(error)


def test_a_stand_by_is_no_source_and_says_so(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path, settings={"fsync": "off"}) as server:
        sql(server.dsn(), "CREATE TABLE a (id int PRIMARY KEY)")
    (tmp_path / "data" / "standby.signal").touch()
    with EmbeddedPostgres(tmp_path, settings={"fsync": "off"}) as server:
        error = refused(server.dsn())
    assert isinstance(error, SourceLost)
    assert "is a stand-by" in str(error)
