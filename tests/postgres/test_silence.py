"""Who depends on a connection to PostgreSQL that has fallen silent goes on soon, not when TCP gives it up after 15 minutes or 2 hours."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.producer.sources.postgres import catalog
from seriatim.producer.sources.postgres.replication import conninfo
from seriatim.protocol.postgres import SERVER_SETTINGS, TARGET_SETTINGS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.postgres


@pytest.mark.slow
def test_a_silent_connection_is_given_up_at_both_ends(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.postgres.silence", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.stdout, run.stderr
    took_s = json.loads(run.stdout.splitlines()[-1])
    assert took_s.keys() == {"a_replay_holds_its_position", "a_target_owes_an_answer", "a_capture_holds_its_slot"}
    assert all(5 < each < 60 for each in took_s.values()), took_s


def options_of(connection: psycopg.Connection) -> tuple[int, int]:
    """Seconds until TCP asks, and milliseconds until it gives up."""
    with socket.socket(fileno=connection.fileno()) as own:
        found = (
            own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        )
        own.detach()
    return found


def shown(connection: psycopg.Connection, name: str) -> str:
    row = connection.execute(f"SHOW {name}".encode()).fetchone()
    return str(row[0]) if row else ""


def test_both_ends_of_every_connection_are_told(new_database: Callable[[], str]) -> None:
    dsn = new_database()
    captured = catalog.connect(dsn)
    assert options_of(captured) == (10, 60_000)
    assert {name: shown(captured, name) for name in SERVER_SETTINGS} == SERVER_SETTINGS
    assert shown(captured, "tcp_user_timeout") == "0"  # a capture may have to wait
    assert shown(captured, "wal_sender_timeout") == "20s"
    captured.close()
    with PostgresTarget(dsn, "job") as target:
        target.claim(1, "q", 1)
        connection = vars(target)["_connection"]
        assert options_of(connection) == (10, 60_000)
        assert {name: shown(connection, name) for name in TARGET_SETTINGS} == TARGET_SETTINGS


def test_what_a_dsn_says_goes_first(new_database: Callable[[], str]) -> None:
    dsn = new_database() + "?keepalives_idle=7&tcp_user_timeout=9000&connect_timeout=3"
    assert psycopg.conninfo.conninfo_to_dict(conninfo(dsn))["connect_timeout"] == "3"
    connection = catalog.connect(dsn)
    assert options_of(connection) == (7, 9000)
    connection.close()
    with PostgresTarget(dsn, "job") as target:
        target.limits()
        assert options_of(vars(target)["_connection"]) == (7, 9000)
