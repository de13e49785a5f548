"""What a capture tells of what it waits for in its database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from seriatim.producer.sources.postgres.capture import PostgresCapture
from tests.postgres.test_capture import SLOT, Queue, Sender, last_commit_of, sql, streaming, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]


class Told:
    """A capture on a thread of its own, and what it has told."""

    def __init__(self, dsn: str) -> None:
        self.queue = Queue()
        self.reasons: list[str] = []
        self.capture = PostgresCapture(
            dsn, SLOT, "pub", (), Sender(self.queue), retry_s=0.05, on_waiting=self.reasons.append
        )
        self.thread = Thread(target=self.capture.run)


@contextmanager
def told(dsn: str) -> Iterator[Told]:
    one = Told(dsn)
    one.thread.start()
    try:
        yield one
    finally:
        one.capture.stop()
        one.thread.join(60)
        assert not one.thread.is_alive()


@pytest.fixture
def dsn(new_database: Callable[[], str]) -> str:
    made = new_database()
    sql(made, "CREATE TABLE a (id int PRIMARY KEY, n int)", "CREATE PUBLICATION pub FOR ALL TABLES")
    return made


@pytest.fixture
def role(dsn: str) -> Iterator[str]:
    sql(dsn, "CREATE ROLE waiter LOGIN", "GRANT SELECT ON a TO waiter")
    yield "waiter"
    sql(dsn, "DROP OWNED BY waiter", "DROP ROLE waiter")


def test_what_the_database_refuses_is_told_once_and_in_a_line(
    dsn: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    end_all = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'waiter'"
    with told(dsn.replace("postgres@", f"{role}@")) as capture:
        wait_for(lambda: capture.reasons)
        assert "permission denied to start WAL sender" in capture.reasons[0]
        sql(dsn, f"ALTER ROLE {role} REPLICATION")
        wait_for(lambda: streaming(capture.queue))
        assert len(capture.reasons) == 1
        sql(dsn, f"ALTER ROLE {role} NOREPLICATION", end_all)
        wait_for(lambda: "permission denied to start WAL sender" in capture.reasons[-1] and len(capture.reasons) > 1)
        sql(dsn, f"ALTER ROLE {role} REPLICATION", "INSERT INTO a VALUES (1, 1)")
        wait_for(lambda: last_commit_of(capture.queue, 1))
    assert not [reason for reason in capture.reasons if "\n" in reason or "\t" in reason]
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]
