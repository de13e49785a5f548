"""A capture under settings that a DSN, a role or a database gives its sessions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from seriatim.producer.sources.postgres import catalog
from seriatim.producer.sources.postgres.replication import ReplicationConnection

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
