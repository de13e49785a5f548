"""`seriatim capture postgres` by hand: two instances, one elected and killed, against a real cluster and server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psycopg
import pytest

from seriatim.cli.embedded.cluster import ClusterSettings
from seriatim.cli.embedded.postgres import EmbeddedPostgres
from tests.clusters import sound_cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(900)]
SERIATIM = (sys.executable, "-m", "seriatim.cli.main")
ENVIRONMENT = {"SERIATIM_SESSION_TIMEOUT_MS": "10000"}
"""Longer than a busy machine stands still: the one that is elected stays so until it is killed."""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    settings = ClusterSettings(
        tmp_path_factory.mktemp("cluster"), groups=2, environment=ENVIRONMENT, start_timeout_s=90
    )
    with sound_cluster(settings) as cluster:
        yield cluster.coordinators


@pytest.fixture(scope="module")
def dsn(tmp_path_factory):
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), settings={"fsync": "off"}) as server:
        yield server.dsn()


def seriatim(coordinator, *arguments):
    command = (*SERIATIM, *arguments, "--coordinator", coordinator)
    environment = os.environ | ENVIRONMENT
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


class Capture:
    """A capture process; `events` is what it has printed."""

    def __init__(self, coordinator, dsn, queue, output, *more):
        self.output = output
        self.errors = output.with_suffix(".err")
        command = (*SERIATIM, "capture", "postgres", "--dsn", dsn, "--queue", queue, "--coordinator", coordinator)
        with output.open("w") as out, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                (*command, "--json", *more), stdout=out, stderr=errors, env=os.environ | ENVIRONMENT
            )

    @property
    def events(self):
        text = self.output.read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def has(self, event):
        assert self.process.poll() is None, self.errors.read_text()
        return any(one["event"] == event for one in self.events)


@contextmanager
def running(*captures):
    try:
        yield
    finally:
        for capture in captures:
            capture.process.kill()
            capture.process.wait()


def changes(coordinator, queue):
    """Offsets, and the changes of rows, of all that the queue holds; fewer where the queue is silent for two seconds."""
    done = seriatim(coordinator, "consume", "--queue", queue, "--idle-exit", "2", "--no-commit", "--json")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    envelopes = [json.loads(record["value"]) for record in records]
    rows = [(one["op"], one["after"]["id"], one["after"]["v"]) for one in envelopes if one["op"] in {"r", "c", "u"}]
    return [record["offset"] for record in records], rows


def test_the_other_capture_takes_over_without_gap_or_repeat(coordinator, dsn, tmp_path):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (id int PRIMARY KEY, v text)")
        connection.execute("INSERT INTO kept SELECT g, 'old' FROM generate_series(0, 299) g")
        assert seriatim(coordinator, "queue", "create", "log").returncode == 0
        one = Capture(coordinator, dsn, "log", tmp_path / "one")
        with running(one):
            wait_until(lambda: one.has("snapshot"))
            two = Capture(coordinator, dsn, "log", tmp_path / "two")
            with running(two):
                wait_until(lambda: two.has("waiting"))
                connection.execute("UPDATE kept SET v = 'new' WHERE id < 100")
                wait_until(lambda: one.has("progress"))
                one.process.send_signal(signal.SIGKILL)
                connection.execute("INSERT INTO kept SELECT g, 'late' FROM generate_series(300, 349) g")
                wait_until(lambda: two.has("elected"))
                expected = [("r", number, "old") for number in range(300)]
                expected += [("u", number, "new") for number in range(100)]
                expected += [("c", number, "late") for number in range(300, 350)]
                wait_until(lambda: len(changes(coordinator, "log")[1]) >= len(expected))
                two.process.send_signal(signal.SIGTERM)
                assert two.process.wait(60) == 0
        found = []

        def is_whole():
            found[:] = changes(coordinator, "log")
            return len(found[1]) >= len(expected)

        wait_until(is_whole)
        offsets, rows = found
        assert rows == expected
        assert offsets == list(range(len(offsets)))
        assert two.events[-1]["event"] == "stopped"
        assert {event["slot"] for event in two.events} == {"seriatim_log"}


def test_what_can_t_be_captured_is_said_in_one_line(coordinator, dsn):
    missing = seriatim(coordinator, "capture", "postgres", "--dsn", dsn, "--queue", "nowhere")
    # Where the coordinator takes its time, it says before that it waits.
    (said,) = [line for line in missing.stderr.splitlines() if not line.startswith("waiting: ")]
    assert missing.returncode == 2
    assert "there is no queue nowhere" in said
    away = seriatim(coordinator, "capture", "postgres", "--dsn", "host=127.0.0.1 port=1", "--queue", "log")
    assert away.returncode == 3
    assert "is the database running" in away.stderr
    alone = seriatim("127.0.0.1:1", "capture", "postgres", "--dsn", dsn, "--queue", "log", "--connect-timeout", "0.5")
    assert alone.returncode == 3
    assert "no coordinator answers" in alone.stderr
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE keyless (v text)")
        refused = seriatim(coordinator, "capture", "postgres", "--dsn", dsn, "--queue", "log2", "--tables", "keyless")
        connection.execute("DROP TABLE keyless")
    assert refused.returncode == 2
    assert "REPLICA IDENTITY" in refused.stderr


def test_what_the_database_refuses_is_waited_for_and_told_as_an_event(coordinator, dsn, tmp_path):
    assert seriatim(coordinator, "queue", "create", "refused").returncode == 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE plain LOGIN; CREATE PUBLICATION plain FOR ALL TABLES")
    capture = Capture(
        coordinator, dsn.replace("postgres@", "plain@"), "refused", tmp_path / "one", "--publication=plain"
    )
    with running(capture):
        wait_until(lambda: capture.has("elected") and capture.events[-1]["event"] == "waiting")
        assert "permission denied to start WAL sender" in capture.events[-1]["reason"]
        capture.process.send_signal(signal.SIGTERM)
        assert capture.process.wait(60) == 0
    assert capture.errors.read_text() == ""


def test_a_capture_whose_reader_goes_ends(coordinator, dsn, tmp_path):
    """It has only its progress to tell then, which another thread does."""
    assert seriatim(coordinator, "queue", "create", "unread").returncode == 0
    command = (*SERIATIM, "capture", "postgres", "--dsn", dsn, "--queue", "unread", "--coordinator", coordinator)
    with (tmp_path / "errors").open("w+") as errors, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE unread (id serial PRIMARY KEY)")
        capture = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=os.environ | ENVIRONMENT)
        try:
            while b"on their way" not in (line := capture.stdout.readline()):
                assert line
            capture.stdout.close()

            def is_over():
                connection.execute("INSERT INTO unread DEFAULT VALUES")
                return capture.poll() is not None

            wait_until(is_over, 60)
        finally:
            capture.kill()
            capture.wait()
        errors.seek(0)
        assert (capture.returncode, errors.read()) == (0, "")
