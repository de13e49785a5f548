"""A capture under settings that a DSN, a role or a database gives its sessions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from seriatim.producer.sources.postgres import catalog, replication
from seriatim.producer.sources.postgres.replication import Data, ReplicationConnection
from tests.postgres.test_capture import Queue, Sender, last_commit_of, running, sql, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

_OWN = "-c%20work_mem%3D777kB%20-c%20DateStyle%3DGerman"


def shown(dsn: str) -> tuple[str, str]:
    with closing(catalog.connect(dsn)) as connection:
        row = connection.execute("SELECT current_setting('work_mem'), current_setting('DateStyle')").fetchone()
    assert row is not None
    return row


def test_options_of_a_dsn_count_but_for_those_that_values_are_written_under(
    new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = new_database()
    assert shown(f"{dsn}?options={_OWN}") == ("777kB", "ISO, YMD")
    with closing(ReplicationConnection(f"{dsn}?options={_OWN}")) as replication:
        assert replication._query(b"SHOW work_mem") == ["777kB"]
        assert replication._query(b"SHOW datestyle") == ["ISO, YMD"]
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=888kB")
    assert shown(dsn) == ("888kB", "ISO, YMD")
    assert shown(f"{dsn}?options={_OWN}") == ("777kB", "ISO, YMD")


def test_a_name_that_is_a_value_is_written_the_same_under_every_search_path_and_quoting(
    new_database: Callable[[], str],
) -> None:
    dsn = new_database()
    sql(
        dsn,
        "CREATE SCHEMA app",
        f"ALTER DATABASE {dsn.rpartition('/')[2]} SET quote_all_identifiers = on",
        f"ALTER DATABASE {dsn.rpartition('/')[2]} SET search_path = app",
        "CREATE TABLE app.items (id int PRIMARY KEY, place regclass)",
        "CREATE TABLE public.items (id int PRIMARY KEY)",
        "INSERT INTO app.items VALUES (1, 'app.items'), (2, 'public.items')",
    )
    queue = Queue()
    with running(dsn, Sender(queue), tables=("items",)) as run:
        wait_for(lambda: any(change.op == "snapshot_end" for change in queue.changes()), run)
        sql(dsn, "INSERT INTO app.items SELECT id + 2, place FROM app.items ORDER BY id")
        wait_for(lambda: last_commit_of(queue, 4), run)
    rows = {change.after["id"]: change.after["place"] for change in queue.rows() if change.after is not None}
    assert rows == {1: "app.items", 2: "public.items", 3: "app.items", 4: "public.items"}


def test_what_tls_has_read_already_is_received_though_the_socket_has_nothing(
    new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = new_database()
    sql(dsn, "CREATE TABLE a (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    monkeypatch.setattr(replication.select, "select", lambda *_: ([], [], []))
    with closing(ReplicationConnection(dsn)) as connection:
        connection.create_slot("tls")
        connection.start("tls", "pub", 0)
        sql(dsn, "INSERT INTO a VALUES (1)")
        received: list[object] = []
        wait_for(lambda: received.extend(connection.receive(0)) or any(isinstance(one, Data) for one in received))
