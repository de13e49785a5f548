"""The recorded messages of tests/unit/test_pgoutput_traces are what a server sends for their workloads.

`SERIATIM_RECORD=1` writes them anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from seriatim.producer.sources.postgres.core.identity import parse_lsn
from seriatim.producer.sources.postgres.replication import Data, ReplicationConnection

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]
TRACES = Path(__file__).parents[1] / "unit" / "test_pgoutput_traces"
MARGIN = "#   "


def recorded(dsn: str, name: str, workload: list[str]) -> tuple[str, list[bytes]]:
    """The server's version, and its messages for these statements."""
    with psycopg.connect(dsn, autocommit=True) as connection, closing(ReplicationConnection(dsn)) as replication:
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        start, _ = replication.create_slot(f"trace_{name}")
        for statement in workload:
            connection.execute(statement.encode())
        version, end = connection.execute(
            "SELECT current_setting('server_version'), pg_current_wal_flush_lsn()::text"
        ).fetchone() or ("", "0/0")
        replication.start(f"trace_{name}", "pub", start)
        messages: list[bytes] = []
        reached = 0
        deadline_s = time.monotonic() + 60
        while reached < parse_lsn(end):
            assert time.monotonic() < deadline_s, "the server never said that it had read all"
            for message in replication.receive(0.2):
                if isinstance(message, Data):
                    messages.append(message.payload)
                else:
                    reached = max(reached, message.lsn)
            replication.send_status()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin")
    return version.split()[0], messages


def without_chance(data: bytes, oids: dict[bytes, bytes]) -> bytes:
    """A message without what differs from server to server: positions, times, transaction ids, oids."""
    kind = data[:1]
    if kind in b"BC":
        return kind
    if kind in b"RIUDY":
        return kind + oids.setdefault(data[1:5], b"%d" % len(oids)) + data[5:]
    if kind == b"T":
        return data[:6] + b"".join(oids[data[at : at + 4]] for at in range(6, len(data), 4))
    return data


def normal(messages: list[bytes]) -> list[bytes]:
    oids: dict[bytes, bytes] = {}
    texts = [without_chance(data, oids) for data in messages]
    for oid, number in oids.items():  # a column of a type of the workload's own
        texts = [text.replace(oid, number) for text in texts]
    return texts


@pytest.mark.parametrize("name", ["rows", "origin", "types"])
def test_a_server_sends_what_was_recorded(new_database: Callable[[], str], name: str) -> None:
    path = TRACES / f"{name}.txt"
    lines = path.read_text().splitlines()
    workload = [line.removeprefix(MARGIN) for line in lines if line.startswith(MARGIN)]
    version, messages = recorded(new_database(), name, workload)
    if os.environ.get("SERIATIM_RECORD"):
        head = [f"# Sent by PostgreSQL {version} for:", *(MARGIN + statement for statement in workload)]
        path.write_text("\n".join([*head, *(data.hex() for data in messages)]) + "\n")
    assert normal(messages) == normal([bytes.fromhex(line) for line in lines if not line.startswith("#")])
