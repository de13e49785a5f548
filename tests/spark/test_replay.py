"""`seriatim replay` as a process, into a real PostgreSQL: killed between steps, deposed, stopped, refused."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pyspark
import pytest
from fake_queue import QUEUE_ID, FakeQueue

from seriatim.cli.embedded.ports import free_port
from seriatim.consumer.spark import class_archive
from seriatim.consumer.spark.targets.postgres import PostgresTarget
from seriatim.consumer.subscriber import Term
from seriatim.protocol.change import Change, Origin, Table, encode

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(600)]

SPARK_HOME = str(Path(pyspark.__file__).parent)
JAVA_OPTIONS = shlex.join(("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *class_archive.using(class_archive.SPARK)))
"""As the replay gives them to the driver: what lives for seconds takes half the processor time with them."""
SESSION_TIMEOUT_MS = 10_000
"""Longer than a busy machine stands still: nobody is elected but where a test kills the one that is."""

TABLE = "CREATE TABLE public.stock (id bigint PRIMARY KEY, amount bigint NOT NULL CHECK (amount >= 0), note text)"
Rows = dict[int, tuple[int, str]]


class Source:
    """A database of one table and its log: what it holds is computed row by row, and so is what the target must hold."""

    def __init__(self, seed: int = 0) -> None:
        self.rows: Rows = {}
        self.note = ""
        self._chance = random.Random(seed)
        self._lsn = 0

    def transaction(self, changes: int) -> list[bytes]:
        """Envelopes of a transaction of so many changes, begin and commit included."""
        self._lsn += 1
        made = [self._envelope("begin", 1)]
        made.extend(self._change(number) for number in range(2, changes + 2))
        made.append(self._envelope("commit", changes + 2, changes=changes, end_lsn=self._lsn + 1))
        return made

    def _change(self, number: int) -> bytes:
        key = self._chance.randrange(300)
        named = {"schema": "public", "table": "stock", "key": ("id",)}
        if key in self.rows and self._chance.random() < 0.3:
            del self.rows[key]
            return self._envelope("d", number, before={"id": key}, **named)
        op = "u" if key in self.rows else "c"
        self.rows[key] = (self._chance.randrange(1000), f"note {self._lsn}.{number}{self.note}")
        after = {"id": key, "amount": self.rows[key][0], "note": self.rows[key][1]}
        return self._envelope(op, number, after=after, **named)

    def _envelope(self, op: str, number: int, before=None, after=None, **origin) -> bytes:
        source = Origin("db", "slot", self._lsn, number, self._lsn, **origin)
        return encode(Change(op, before, after, source, int(time.time() * 1000)))


def held(dsn: str) -> Rows:
    with psycopg.connect(dsn) as connection:
        return {row[0]: (row[1], row[2]) for row in connection.execute("SELECT id, amount, note FROM public.stock")}


def position(dsn: str) -> tuple[int, int] | None:
    with psycopg.connect(dsn) as connection:
        if connection.execute("SELECT to_regclass('seriatim_replay.positions')").fetchone() == (None,):
            return None
        return connection.execute(
            "SELECT next_offset, token FROM seriatim_replay.positions WHERE queue_id = %s", (QUEUE_ID,)
        ).fetchone()


class Process:
    """One replay with JSON lines; in a process group of its own, the JVM and its workers included."""

    def __init__(self, queue: FakeQueue, dsn: str, log: Path, *options: str, kill: tuple[str, int] = ("never", 0)):
        script = Path(__file__).with_name("replay_process.py")
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(script), kill[0], str(kill[1])),
                    *("--queue", queue.name, "--target", dsn, "--coordinator", queue.address, "--json"),
                    *("--master", "local[2]", "--session-timeout-ms", str(SESSION_TIMEOUT_MS), *options),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, timeout_s: float = 120) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def events(self) -> list[dict]:
        """What it has told; the last line may be half written yet."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith('{"event"') and line.endswith("\n")]

    def has(self, name: str) -> bool:
        return any(event["event"] == name for event in self.events())

    def has_reason(self, reason: str) -> bool:
        return any(reason in event.get("reason", "") for event in self.events())

    def wait_for(self, condition, what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, f"no {what}: {self.log.read_text()[-4000:]}"
            time.sleep(0.2)


@contextmanager
def running(*arguments, **keywords) -> Iterator[Process]:
    process = Process(*arguments, **keywords)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture
def queue(zookeeper_server, cluster_name):
    with FakeQueue("stock", zookeeper=zookeeper_server.address, cluster=cluster_name) as queue:
        yield queue


@pytest.fixture
def dsn(new_database) -> str:
    made = new_database()
    with psycopg.connect(made) as connection:
        connection.execute(TABLE)
    return made


def fill(queue: FakeQueue, source: Source, sizes: list[int], first: int = 0) -> int:
    """Transactions of these sizes into the queue, in batches that don't care where one ends. Returns the next offset."""
    values = [value for size in sizes for value in source.transaction(size)]
    queue.append_values(values, first, per_batch=37)
    return first + len(values)


def test_killed_at_any_step_it_neither_loses_nor_repeats(queue, dsn, tmp_path):
    """Every run is killed at another step; the next one starts from what the target holds, with an old checkpoint in place."""
    source, end, reached = Source(seed=1), 0, -1
    options = ("--checkpoint", str(tmp_path / "checkpoints"), "--max-records", "100", "--trigger-ms", "0")
    kills = [("changes carried out", 2), ("committed", 2), ("cursor wanted", 2)]
    for number, kill in enumerate(kills):
        end = fill(queue, source, [3, 250, 1, 40, 7], end)  # one is larger than a micro-batch
        if number == 1:
            queue.switch()
        with running(queue, dsn, tmp_path / f"{number}.log", *options, kill=kill) as process:
            assert process.end() == -signal.SIGKILL, process.log.read_text()[-4000:]
        offset, _ = position(dsn)
        assert offset >= reached
        reached = offset
    # Idle for long enough that the cursor, which is committed beside the replay, has come.
    with running(queue, dsn, tmp_path / "last.log", *options, "--until-idle", "5") as process:
        assert process.end() == 0, process.log.read_text()[-4000:]
    assert held(dsn) == source.rows
    offset, token = position(dsn)
    assert len(queue.tokens) > len(kills)
    assert (offset, token) == (end, Term(3, 1, len(queue.tokens), 0).fence)
    assert queue.cursors[-1] == end
    assert max(queue.cursors) == end
    assert list((tmp_path / "checkpoints").iterdir()) == []
    started, *_, stopped = [event for event in process.events() if event["event"] != "waiting"]
    assert (started["event"], started["offset"]) == ("started", reached)
    assert (stopped["event"], stopped["offset"]) == ("stopped", end)


def test_standby_takes_over_and_a_signal_ends_it_well(queue, dsn, tmp_path):
    source = Source(seed=2)
    end = fill(queue, source, [5] * 20)
    with (
        running(queue, dsn, tmp_path / "first.log") as first,
        running(queue, dsn, tmp_path / "second.log") as second,
    ):
        both = (first, second)
        first.wait_for(lambda: (position(dsn) or (0, 0))[0] == end, "replay")
        # Progress is told after the target has committed it.
        first.wait_for(lambda: any(one.has("progress") for one in both), "progress")
        elected = next(one for one in both if one.has("progress"))
        standby = second if elected is first else first
        standby.wait_for(lambda: standby.has_reason("another reader is elected"), "standby")
        assert {event["event"] for event in standby.events()} == {"waiting"}

        elected.kill()
        end = fill(queue, source, [5] * 20, end)
        standby.wait_for(lambda: position(dsn)[0] == end, "takeover")
        with psycopg.connect(dsn) as connection:  # the target throws everybody out; the replay comes back
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        end = fill(queue, source, [5] * 20, end)
        standby.wait_for(lambda: position(dsn)[0] == end, "replay after the target's connection broke")
        assert standby.has_reason("target's connection failed")
        assert held(dsn) == source.rows
        assert position(dsn)[1] == Term(3, 1, len(queue.tokens), 0).fence
        assert len(queue.tokens) >= 2
        assert queue.fetched_tokens >= {1, 2}

        standby.process.send_signal(signal.SIGTERM)
        assert standby.end() == 0, standby.log.read_text()[-4000:]
        assert standby.events()[-1]["event"] == "stopped"


def set_back(dsn: str, rows: Rows, offset: int) -> None:
    """As by a fail-over to a stand-by that lagged: sessions end, rows and position are what they were."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        connection.execute("DELETE FROM public.stock")
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO public.stock VALUES (%s, %s, %s)", [(key, *row) for key, row in rows.items()]
            )
        connection.execute("UPDATE seriatim_replay.positions SET next_offset = %s", (offset,))


def test_while_nothing_comes_it_goes_behind_re_sends_and_sees_that_the_target_was_set_back(queue, dsn, tmp_path):
    source = Source(seed=12)
    middle = fill(queue, source, [5] * 5)
    rows = dict(source.rows)
    values = [value for _ in range(5) for value in source.transaction(5)]
    queue.append_values(values, middle)
    queue.switch()
    queue.append_values(values, middle)  # sent again: the sender hadn't heard of them
    queue.switch()
    end = queue.links[-1].base
    assert end == middle + 2 * len(values)
    with running(queue, dsn, tmp_path / "log") as process:
        process.wait_for(lambda: queue.links[1].is_consumed, "drained link")
        assert position(dsn)[0] == end
        set_back(dsn, rows, middle)
        process.wait_for(lambda: position(dsn)[0] == end, "replay after the target was set back")
        assert process.has_reason(f"the target stands at offset {middle}, and had all up to {end}: it was set back")
        # What was applied again was kept for it, and is drained again.
        process.wait_for(lambda: queue.links[1].is_consumed, "drained link")
    assert held(dsn) == source.rows
    assert queue.generation == 2


def test_change_that_the_target_refuses_ends_it_with_the_offset(queue, dsn, tmp_path):
    source = Source(seed=3)
    end = fill(queue, source, [5])
    before = dict(source.rows)
    named = {"schema": "public", "table": "stock", "key": ("id",)}
    refused = [
        source._envelope("begin", 1),
        source._envelope("c", 2, after={"id": 9_999, "amount": -1, "note": "owed"}, **named),
        source._envelope("commit", 3, changes=1, end_lsn=9),
    ]
    queue.append_values(refused[:1], end)
    with running(queue, dsn, tmp_path / "log") as process:
        process.wait_for(lambda: (position(dsn) or (0, 0))[0] == end, "replay")
        queue.append_values(refused[1:], end + 1)
        assert process.end() == 3
    text = process.log.read_text()
    assert f"offset {end + 1}" in text
    assert "9999" in text
    assert held(dsn) == before
    assert position(dsn)[0] == end


@pytest.mark.parametrize(
    ("later_ms", "job", "tells"),
    [
        (1, "replay", "the target's position is that of another queue with id 7"),
        (0, "other", "not of the replay with subscription replay, but of another one, other, up to offset 7"),
    ],
)
def test_position_of_another_cluster_s_queue_or_another_job_ends_it(queue, dsn, tmp_path, later_ms, job, tells):
    end = fill(queue, Source(seed=6), [5])
    with PostgresTarget(dsn, job) as target:
        target.claim(QUEUE_ID, queue.name, 1, created_at_ms=queue.created_at_ms)
    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE seriatim_replay.positions SET next_offset = %s", (end,))
    queue.created_at_ms += later_ms
    fill(queue, Source(seed=7), [5], end)
    with running(queue, dsn, tmp_path / "log") as process:
        assert process.end() == 3, process.log.read_text()[-4000:]
    said = process.log.read_text()
    assert tells in said
    assert "Traceback" not in said
    assert position(dsn)[0] == end


def test_new_target_of_a_queue_whose_first_records_are_gone_begins_at_a_snapshot(queue, dsn, tmp_path):
    source = Source(seed=8)
    end = fill(queue, source, [50])
    queue.switch()
    queue.dropped_links = 1
    queue.links[0].cursor = queue.links[0].end
    end = fill(queue, source, [5], end)
    with running(queue, dsn, tmp_path / "none.log") as process:
        assert process.end() == 3, process.log.read_text()[-4000:]
    said = (tmp_path / "none.log").read_text()
    assert "the target has nothing yet, and queue 'stock' has no snapshot to begin with" in said
    assert "Traceback" not in said
    assert position(dsn)[0] == 0
    table = Table("public", "stock", ("id",), ("id", "amount", "note"))
    named = {"schema": "public", "table": "stock", "key": ("id",), "is_snapshot": True}
    snapshot = [
        source._envelope("snapshot_begin", 1, is_snapshot=True, tables=(table,)),
        *(
            source._envelope("r", number, after={"id": key, "amount": amount, "note": note}, **named)
            for number, (key, (amount, note)) in enumerate(source.rows.items(), 2)
        ),
        source._envelope("snapshot_end", 0, is_snapshot=True, changes=len(source.rows)),
    ]
    queue.append_values(snapshot, end)
    begun = end
    end = fill(queue, source, [5, 5], end + len(snapshot))
    with running(queue, dsn, tmp_path / "log", "--until-idle", "1") as process:
        assert process.end() == 0, process.log.read_text()[-4000:]
    assert held(dsn) == source.rows
    assert position(dsn)[0] == end
    assert next(event for event in process.events() if event["event"] == "started")["offset"] == begun


def test_micro_batches_too_large_for_spark_s_memory_are_made_smaller(queue, dsn, tmp_path):
    source = Source(seed=9)
    source.note = "x" * 5_000
    end = fill(queue, source, [1] * 200)
    small = ("--spark-conf", "spark.driver.maxResultSize=300k", "--max-records", "600", "--until-idle", "1")
    with running(queue, dsn, tmp_path / "log", *small) as process:
        assert process.end() == 0, process.log.read_text()[-4000:]
    assert process.has_reason("as much as may come to the driver at once (spark.driver.maxResultSize)")
    assert process.has_reason("the next try is with at most 300 records at a time")
    assert held(dsn) == source.rows
    assert position(dsn)[0] == end


def test_a_transaction_too_large_for_memory_is_applied_part_by_part(queue, dsn, tmp_path):
    source = Source(seed=11)
    end = fill(queue, source, [3, 3_000, 2])
    small = ("--spark-conf", "spark.driver.maxResultSize=400k", "--max-records", "600", "--until-idle", "1")
    with running(queue, dsn, tmp_path / "log", *small, kill=("segment 0: public.stock", 4)) as process:
        assert process.end() == -signal.SIGKILL, process.log.read_text()[-4000:]
    assert len(held(dsn)) <= 3
    with running(queue, dsn, tmp_path / "log", *small) as process:
        assert process.end() == 0, process.log.read_text()[-4000:]
    assert held(dsn) == source.rows
    assert position(dsn)[0] == end
    assert max(event["transactions"] for event in process.events() if event["event"] == "progress") >= 1
    assert not process.has_reason("spark.driver.maxResultSize")


def refused_at_once(
    queue: FakeQueue, target: str, environment: dict[str, str] | None = None, name: str = ""
) -> tuple[int, str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "seriatim.cli.main", "replay", "--queue", name or queue.name),
            *("--target", target, "--coordinator", queue.address, "--master", "local[1]"),
        ],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


@contextmanager
def spark_process(log: Path, role: str, *arguments: str) -> Iterator[None]:
    """A master or a worker of a Spark cluster of its own."""
    command = [
        f"{SPARK_HOME}/bin/spark-class",
        f"org.apache.spark.deploy.{role.lower()}.{role}",
        "--host",
        "127.0.0.1",
        *arguments,
    ]
    environment = os.environ | {
        "SPARK_HOME": SPARK_HOME,
        "SPARK_WORKER_DIR": str(log.parent / "work"),
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--webui-port", "0"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_without_executors_it_says_what_it_waits_for_and_goes_on_when_they_come(queue, dsn, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    source = Source(seed=5)
    end = fill(queue, source, [5] * 4)
    master = f"spark://127.0.0.1:{free_port()}"
    port = master.rpartition(":")[2]
    executor = f"spark.executor.extraJavaOptions={JAVA_OPTIONS}"
    with (
        spark_process(tmp_path / "master.log", "Master", "--port", port),
        running(queue, dsn, tmp_path / "log", "--master", master, "--spark-conf", executor) as process,
    ):
        process.wait_for(lambda: process.has_reason(f"Spark has no executors at {master}"), "word of it")
        assert position(dsn)[0] == 0
        with spark_process(tmp_path / "worker.log", "Worker", "--cores", "1", "--memory", "1g", master):
            process.wait_for(lambda: position(dsn)[0] == end, "replay")
            assert held(dsn) == source.rows


@contextmanager
def others_connect(process: Process) -> Iterator[list[int]]:
    """To each port that Spark's Java listens on, with the first bytes of HTTP/2: as clients do whose server had the port."""
    ports, done = [], threading.Event()

    def connect(open_ones: ExitStack) -> None:
        while not done.wait(0.02):
            with suppress(psutil.Error, OSError):
                for java in psutil.Process(process.process.pid).children(recursive=True):
                    for listening in java.net_connections("tcp") if java.name() == "java" else ():
                        if listening.status == psutil.CONN_LISTEN and listening.laddr.port not in ports:
                            ports.append(listening.laddr.port)
                            open_ones.enter_context(socket.create_connection(listening.laddr)).sendall(
                                b"PRI * HTTP/2.0\r\n\r\n"
                            )

    with ExitStack() as open_ones:
        thread = threading.Thread(target=connect, args=(open_ones,))
        thread.start()
        try:
            yield ports
        finally:
            done.set()
            thread.join()


def test_what_others_send_to_ports_of_java_s_harms_nothing(queue, dsn, tmp_path):
    """Found by CI: Spark took four bytes for a length, and the memory for that wasn't there.

    It does where the setting of `python_sockets` is lacking, and one of these meets a port in its second.
    """
    source = Source(seed=6)
    end = fill(queue, source, [5] * 4)
    with running(queue, dsn, tmp_path / "log") as process, others_connect(process) as ports:
        process.wait_for(lambda: position(dsn) is not None and position(dsn)[0] == end, "replay")
        assert ports
        # What makes it so: those that start Python workers listen, and at no port.
        listening = []
        for child in psutil.Process(process.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it ended
                if "pyspark.daemon" in child.cmdline():
                    listening.append([at for at in child.net_connections("tcp") if at.status == psutil.CONN_LISTEN])
        assert listening
        assert not any(listening)
    assert held(dsn) == source.rows


def test_a_master_that_is_none_is_refused_and_one_that_does_not_answer_is_waited_for_until_a_signal(
    queue, dsn, tmp_path
):
    with running(queue, dsn, tmp_path / "none.log", "--master", "sparkle") as process:
        assert process.end() == 3
    said = (tmp_path / "none.log").read_text()
    assert "Spark can't be started at sparkle" in said
    assert "check --master" in said
    assert "Traceback" not in said
    master = f"spark://127.0.0.1:{free_port()}"
    with running(queue, dsn, tmp_path / "silent.log", "--master", master) as process:
        process.wait_for(lambda: process.has_reason(f"Spark hasn't started yet at {master}"), "word of it")
        process.process.send_signal(signal.SIGTERM)
        assert process.end(30) == 0, process.log.read_text()[-4000:]
        assert process.events()[-1] == {"event": "stopped", "offset": None, "records": 0, "changes": 0}


def test_a_signal_ends_it_while_java_is_still_starting(queue, dsn, tmp_path):
    """Found on a slow machine: nothing was there yet that could be ended, so it waited a minute for the silent master."""
    with running(queue, dsn, tmp_path / "early.log", "--master", f"spark://127.0.0.1:{free_port()}") as process:
        threads = Path(f"/proc/{process.process.pid}/task")
        process.wait_for(lambda: any(children.read_text() for children in threads.glob("*/children")), "Java's start")
        process.process.send_signal(signal.SIGTERM)
        assert process.end(30) == 0, process.log.read_text()[-4000:]
        assert process.events()[-1] == {"event": "stopped", "offset": None, "records": 0, "changes": 0}


def test_java_that_does_not_take_a_setting_is_not_taken_for_a_master_that_does_not_answer(queue, dsn, tmp_path):
    with running(queue, dsn, tmp_path / "heap.log", "--spark-conf", "spark.driver.memory=1000000g") as process:
        assert process.end() == 3
    said = (tmp_path / "heap.log").read_text()
    assert "Spark can't be started: Java has ended (what it printed above" in said
    assert "heap" in said  # Java's own word for it
    assert "check --master" not in said


@pytest.mark.parametrize("last", ["create", "register"])
def test_java_that_is_killed_while_spark_starts_is_told(tmp_path, last):
    """As where memory is short. "Error: Connection refused" was all that was said where it had just been told of the source."""
    script = f"""
from pathlib import Path
from pyspark import SparkContext
from pyspark.sql import SparkSession
from seriatim.consumer.spark import engine

def killed(*arguments):
    SparkContext._gateway.proc.kill()
    return real(*arguments)

if {last!r} == "register":
    real = SparkSession.dataSource.fget
    SparkSession.dataSource = property(killed)
else:
    real = SparkContext._do_init
    SparkContext._do_init = killed
try:
    engine.spark_session("local[1]", Path({str(tmp_path)!r}))
except engine.JavaEnded as error:
    print("told:", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "told: Spark can't be started: Java has ended" in done.stdout, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_of_java_that_is_killed_amid_a_call_only_the_replay_s_own_line_is_told(tmp_path):
    """py4j and pyspark had some sixty lines of traces above it."""
    script = f"""
import threading
from pathlib import Path
from pyspark import SparkContext
from seriatim.consumer.spark import engine

spark = engine.spark_session("local[1]", Path({str(tmp_path)!r}))
spark.sparkContext.parallelize([1]).count()  # the server of accumulators has its connection then
threading.Timer(1, SparkContext._gateway.proc.kill).start()
try:
    spark._jvm.java.lang.Thread.sleep(60000)
except Exception as error:
    print("ended:", error)
    spark.sparkContext._accumulatorServer.shutdown()  # it has met its end of file by then
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "ended:" in done.stdout
    assert "Traceback" not in done.stderr


def test_settings_of_spark_s_are_checked_before_anything_is_started(queue, dsn):
    for given, why in (
        ("spark.master=local[4]", "--master"),
        ("spark.cores.max", "'spark.cores.max' is not KEY=VALUE"),
    ):
        code, said = refused_at_once(queue, dsn, {"SERIATIM_SPARK_CONF": given})
        assert code == 2
        assert why in said
        assert "Traceback" not in said


def test_without_java_it_says_what_to_install(queue, dsn, tmp_path):
    code, said = refused_at_once(queue, dsn, {"PATH": str(tmp_path), "JAVA_HOME": ""})
    assert code == 3
    assert "Spark needs Java 17 or newer" in said
    assert "apt-get install" in said
    assert "Traceback" not in said


def test_target_that_never_answered_ends_it(queue):
    code, said = refused_at_once(queue, "postgresql://127.0.0.1:1/nowhere")
    assert code == 3
    assert "the target's connection failed" in said
    assert "Traceback" not in said


def test_queue_that_is_not_there_ends_it(queue, dsn):
    code, said = refused_at_once(queue, dsn, name="nothing")
    assert code == 2
    assert "there is no queue 'nothing'" in said
    assert "Traceback" not in said


def test_signal_that_ends_spark_too_is_no_failure_and_a_dead_jvm_is_named(queue, dsn, tmp_path):
    end = fill(queue, Source(seed=4), [5] * 20)
    with running(queue, dsn, tmp_path / "signal.log") as process:
        process.wait_for(lambda: (position(dsn) or (0, 0))[0] == end, "replay")
        os.killpg(process.process.pid, signal.SIGTERM)
        assert process.end() == 0, process.log.read_text()[-4000:]
        assert process.events()[-1] == {"event": "stopped", "offset": end, "records": end, "changes": 100}
    with running(queue, dsn, tmp_path / "jvm.log") as process:
        process.wait_for(process.events, "start")
        process.wait_for(lambda: process.events()[-1]["event"] == "started", "start")
        (java,) = [child for child in psutil.Process(process.process.pid).children() if child.name() == "java"]
        java.kill()
        assert process.end() == 3, process.log.read_text()[-4000:]
        said = process.log.read_text()
        assert "Spark has ended" in said
        assert "start the replay again" in said
        assert "Traceback" not in said
