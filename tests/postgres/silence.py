"""Connections to PostgreSQL that fall silent: no packet of theirs arrives any more, and neither side is told.

Runs in a network of its own (`python -m tests.postgres.silence DIRECTORY`), and prints, as one JSON object, after how many
seconds each of those who depend on a silent connection went on.
"""

# ruff: noqa: T201 - prints what it found

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg

from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.consumer.spark.apply.plan import Plan
from seriatim.consumer.spark.targets import postgres as target
from seriatim.consumer.spark.targets.errors import TargetBusy, TargetLost
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.producer.sources.postgres.errors import SlotBusy
from seriatim.producer.sources.postgres.replication import ReplicationConnection
from seriatim.protocol.postgres import TARGET_SETTINGS
from tests.faults import network

PATIENCE_S = 120.0
TIMEOUT_MS = 15_000
"""In the place of a minute."""
CAPTURE = "seriatim-capture"
_RULES = """
table inet silence {
    set ports { type inet_service; }
    chain input { type filter hook input priority 0; tcp sport @ports drop; tcp dport @ports drop; }
}
"""


class Silence:
    """A server, and who is connected to it, by application name."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._admin = psycopg.connect(dsn, autocommit=True)

    def named(self, name: str) -> str:
        return f"{self.dsn}?application_name={name}&tcp_user_timeout={TIMEOUT_MS}"

    def fall(self, name: str) -> float:
        """Nothing of these connections arrives any more. When that was."""
        found = self._admin.execute("SELECT client_port FROM pg_stat_activity WHERE application_name = %s", (name,))
        ports = ", ".join(str(port) for (port,) in found)
        subprocess.run(["nft", f"add element inet silence ports {{ {ports} }}"], check=True)
        return time.monotonic()

    def until(self, query: str) -> None:
        """Wait until the query finds something."""
        while self._admin.execute(query.encode()).fetchone() is None:
            time.sleep(0.02)


def a_replay_holds_its_position(server: Silence) -> float:
    """The machine of a replay dies within a transaction: how long until the next replay has the position."""
    moved = threading.Event()

    def hold(_step: str) -> None:
        moved.set()
        time.sleep(PATIENCE_S)

    dead = PostgresTarget(server.named("dead"), "held", on_step=hold)
    dead.claim(1, "q", 1)
    threading.Thread(target=dead.apply, args=(1, Plan(0, 1, (), 0, 0, None, ()), 1), daemon=True).start()
    moved.wait()
    began_s = server.fall("dead")
    with PostgresTarget(server.dsn, "held") as following:
        while True:
            with suppress(TargetBusy):  # told each 10 s
                assert following.claim(1, "q", 2).offset == 0
                return time.monotonic() - began_s


def a_target_owes_an_answer(server: Silence) -> float:
    """The machine of a target dies while a replay waits for its answer: how long until that replay knows."""
    with PostgresTarget(server.named("waiting"), "waiting") as waiting, psycopg.connect(server.dsn) as locking:
        waiting.claim(2, "other", 1)
        locking.execute("SELECT FROM seriatim_replay.positions WHERE job = 'waiting' FOR UPDATE")
        fallen: list[float] = []

        def fall() -> None:
            server.until(
                "SELECT 1 FROM pg_stat_activity WHERE application_name = 'waiting' AND wait_event_type = 'Lock'"
            )
            fallen.append(server.fall("waiting"))

        falling = threading.Thread(target=fall)
        falling.start()
        with suppress(TargetLost):
            waiting.apply(2, Plan(0, 1, (), 0, 0, None, ()), 1)
        falling.join()
        return time.monotonic() - fallen[0]


def a_capture_holds_its_slot(server: Silence) -> float:
    """The machine of a capture dies: how long until the next one can stream from the slot."""
    dead = ReplicationConnection(server.dsn)
    dead.start("slot", "pub", 0)
    began_s = server.fall(CAPTURE)
    while time.monotonic() < began_s + PATIENCE_S:
        following = ReplicationConnection(server.dsn)
        try:
            following.start("slot", "pub", 0)
        except SlotBusy:
            time.sleep(0.2)
        else:
            break
        finally:
            following.close()
    return time.monotonic() - began_s


def main() -> None:
    network.enter("tests.postgres.silence")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["nft", "-f", "-"], input=_RULES, text=True, check=True)
    cases: list[Callable[[Silence], float]] = [
        a_replay_holds_its_position, a_target_owes_an_answer, a_capture_holds_its_slot,
    ]  # fmt: skip
    vars(target)["TARGET_SETTINGS"] = {**TARGET_SETTINGS, "tcp_user_timeout": str(TIMEOUT_MS)}
    with EmbeddedPostgres(Path(sys.argv[1])) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
            connection.execute("SELECT pg_create_logical_replication_slot('slot', 'pgoutput')")
        PostgresTarget(server.dsn(), "first").claim(3, "another", 1)  # makes the table of positions
        with ThreadPoolExecutor() as pool:
            took = {case.__name__: pool.submit(case, Silence(server.dsn())) for case in cases}
            print(json.dumps({name: round(found.result(PATIENCE_S), 1) for name, found in took.items()}), flush=True)
        server.supervisor.kill("postgres")  # else it may wait for whoever is silent


if __name__ == "__main__":
    main()
