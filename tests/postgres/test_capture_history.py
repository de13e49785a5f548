"""A database that goes on in another history than the queue's: restored, promoted, or its files put back.

The slot comes along, as it does with a copy of all files, so that PostgreSQL itself has nothing against going on.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.producer.sources.postgres.errors import CaptureGap, CaptureRefused, SlotGivenUp
from seriatim.producer.sources.postgres.replication import ReplicationConnection
from tests.postgres.test_capture import (
    Queue,
    Sender,
    is_free,
    last_commit_of,
    one,
    running,
    sql,
    streaming,
    wait_for,
)

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]
SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'cap'"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server whose files a test may put back; a restore finds no log but its own."""
    settings = {"fsync": "off", "full_page_writes": "off", "restore_command": "false"}
    with EmbeddedPostgres(tmp_path / "server", settings=settings) as started:
        sql(started.dsn(), "CREATE TABLE a (id int PRIMARY KEY)")
        yield started


def captured(server: EmbeddedPostgres) -> Queue:
    queue = Queue()
    with running(server.dsn(), Sender(queue)) as run:
        wait_for(lambda: streaming(queue), run)
    wait_for(lambda: is_free(server.dsn()))
    return queue


def data_of(server: EmbeddedPostgres) -> Path:
    return Path(str(one(server.dsn(), "SHOW data_directory")))


def refusal(server: EmbeddedPostgres, queue: Queue) -> Exception | None:
    """What ends a capture, of a process that has seen nothing yet; the row with id 1 is what it may not go on to."""
    with running(server.dsn(), Sender(queue)) as run:
        wait_for(lambda: run.error is not None or last_commit_of(queue, 1))
    return run.error


def test_a_part_of_the_log_that_is_gone_is_a_gap(server: EmbeddedPostgres) -> None:
    """Deleted by hand, to make room. It counted as trouble of a disk's, which passes, and was tried again for ever."""
    queue = captured(server)
    needed = one(server.dsn(), "SELECT pg_walfile_name(restart_lsn) FROM pg_replication_slots")
    sql(server.dsn(), "INSERT INTO a VALUES (1)", "SELECT pg_switch_wal()", "INSERT INTO a VALUES (2)")
    (data_of(server) / "pg_wal" / str(needed)).unlink()
    error = refusal(server, queue)
    assert isinstance(error, CaptureGap)
    assert f"can't read its log for it: requested WAL segment {needed} has already been removed" in str(error)


def test_another_timeline_is_a_gap_for_every_process_and_stays_one(server: EmbeddedPostgres) -> None:
    queue = captured(server)
    data = data_of(server)
    server.close()
    (data / "recovery.signal").touch()
    (data / "recovery.signal").chmod(0o666)  # the server, which isn't this user, takes it away
    server.start()
    wait_for(lambda: one(server.dsn(), "SELECT pg_is_in_recovery()") is False)
    assert one(server.dsn(), SLOTS) == 1
    sql(server.dsn(), "INSERT INTO a VALUES (1)")
    for _ in range(2):
        error = refusal(server, queue)
        assert isinstance(error, CaptureGap)
        assert "timeline 1" in str(error)
    assert not queue.rows()


@pytest.fixture
def set_back(server: EmbeddedPostgres) -> Queue:
    """What a queue holds of a server whose files were put back since."""
    queue = captured(server)
    data = data_of(server)
    server.close()
    copy = data.with_name("copy")
    subprocess.run(("cp", "-a", str(data), str(copy)), check=True, timeout=60)
    server.start()
    sql(server.dsn(), "INSERT INTO a SELECT generate_series(1001, 3000)")
    with running(server.dsn(), Sender(queue)) as run:
        wait_for(lambda: last_commit_of(queue, 3000), run)
    server.close()
    shutil.rmtree(data)
    copy.rename(data)
    server.start()
    queue.records.clear()
    return queue


def test_a_database_set_back_stays_a_gap_when_it_has_written_on(server: EmbeddedPostgres, set_back: Queue) -> None:
    assert one(server.dsn(), SLOTS) == 1
    error = refusal(server, set_back)
    assert isinstance(error, SlotGivenUp)
    assert "the slot was dropped" in str(error)
    assert one(server.dsn(), SLOTS) == 0
    # Two files of the log further: past what the queue holds.
    sql(server.dsn(), "INSERT INTO a VALUES (2)", "SELECT pg_switch_wal()")
    sql(server.dsn(), "INSERT INTO a VALUES (1)", "SELECT pg_switch_wal()", "INSERT INTO a VALUES (3)")
    for _ in range(2):
        error = refusal(server, set_back)
        assert isinstance(error, CaptureGap)
        assert "drop the old slot" in str(error)
    assert not set_back.records


def test_a_slot_that_can_t_be_dropped_is_a_gap_all_the_same(
    server: EmbeddedPostgres, set_back: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: ReplicationConnection, _slot: str) -> None:
        raise CaptureRefused("permission denied")

    monkeypatch.setattr(ReplicationConnection, "drop_slot", refuse)
    error = refusal(server, set_back)
    assert isinstance(error, CaptureGap)
    assert not isinstance(error, SlotGivenUp)
    assert "can't be dropped: permission denied" in str(error)


def test_a_stream_that_an_earlier_version_began_goes_on(server: EmbeddedPostgres) -> None:
    """Its source has no timeline."""
    queue = captured(server)
    (source,) = queue.marks
    earlier = source.replace(".1/", "/")
    assert earlier != source
    queue.marks = {earlier: queue.marks[source]}
    with running(server.dsn(), Sender(queue)) as run:
        sql(server.dsn(), "INSERT INTO a VALUES (1)")
        wait_for(lambda: last_commit_of(queue, 1), run)
    assert set(queue.marks) == {earlier}
