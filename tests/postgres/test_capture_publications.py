"""Publications that somebody made otherwise than a capture does: with row filters, or with partitions as one table."""

from __future__ import annotations

import pytest

from seriatim.producer.sources.postgres.errors import CaptureGap
from tests.postgres.test_capture import Queue, Sender, replayed, running, sql, streaming, table_rows, wait_for

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
