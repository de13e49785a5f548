"""`seriatim up` and the main way of a record through it, by the commands alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from seriatim.cli import foreground, main
from seriatim.cli import up as up_module
from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.cli.embedded.errors import EmbeddedError
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor
from tests.waiting import wait_until

SERIATIM = (sys.executable, "-m", "seriatim.cli.main")
NAMES = {"zookeeper", "coordinator-1", "coordinator-2", "g1-a", "g1-b", "g2-a", "g2-b"}
# Longer than a machine stands still; where a whole server is lost, short enough to be waited out.
ENVIRONMENT = os.environ | {"SERIATIM_SESSION_TIMEOUT_MS": "20000"}
# What a client's name is set by, and one server's address: no server of a whole cluster may take them for its own.
OF_OTHERS = {"SERIATIM_NAME": "shop", "SERIATIM_ADVERTISE": "192.0.2.1:1"}
WAITED_OUT = {"SERIATIM_SESSION_TIMEOUT_MS": "6000"}


@contextmanager
def up(directory, *arguments):
    """`seriatim up --json`, stopped by SIGTERM at the end; gives the process and what its ready line says."""
    command = (*SERIATIM, "up", "--dir", str(directory), "--json", *arguments)
    with (directory / "stderr").open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=ENVIRONMENT | OF_OTHERS)
    with process:
        try:
            line = process.stdout.readline()
            assert line, (directory / "stderr").read_text()
            yield process, json.loads(line)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    assert process.returncode == 0


def seriatim(ready, *arguments, given=None):
    done = subprocess.run(
        (*SERIATIM, *arguments, "--coordinator", ready["coordinator"]),
        input=given, capture_output=True, text=True, timeout=200, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(ready, *arguments):
    """What the command says whose answer is no."""
    command = (*SERIATIM, *arguments, "--coordinator", ready["coordinator"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    return done.stdout


def lines(first, last):
    return "".join(f"{number}\n" for number in range(first, last))


def produce(ready, log, first, last):
    arguments = ("--queue", "orders", "--ack-log", str(log), "--session-timeout-ms", "20000")
    seriatim(ready, "produce", *arguments, given=lines(first, last))


def pids(directory):
    return json.loads((directory / "pids.json").read_text())


def master(ready):
    link = json.loads(seriatim(ready, "queue", "describe", "orders", "--json"))["links"][-1]
    assert link["state"] == "open"
    return link["master"]["member"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_records_survive_a_killed_master_and_a_second_start(tmp_path):
    log = tmp_path / "acknowledged"
    with up(tmp_path, "--groups", "2") as (process, ready):
        running = pids(tmp_path)
        assert set(running) == NAMES
        assert all(psutil.Process(pid).parent().pid == process.pid for pid in running.values())

        refused = subprocess.run(
            (*SERIATIM, "up", "--dir", str(tmp_path)), capture_output=True, text=True, timeout=100, check=False
        )
        assert refused.returncode == 3
        assert f"in use by process {process.pid}" in refused.stderr

        seriatim(ready, "queue", "create", "orders")
        produce(ready, log, 0, 1000)
        killed = master(ready)
        os.kill(running[killed], signal.SIGKILL)
        produce(ready, log, 1000, 2000)
        assert seriatim(ready, "consume", "--queue", "orders", "--max", "2000") == lines(0, 2000)
        wait_until(lambda: pids(tmp_path).get(killed, running[killed]) != running[killed])
        assert {name for name, pid in pids(tmp_path).items() if pid != running[name]} == {killed}

    assert pids(tmp_path) == {}
    assert not any(psutil.pid_exists(pid) for pid in running.values())

    with up(tmp_path) as (_, again):
        assert again["coordinator"] == ready["coordinator"]
        assert set(pids(tmp_path)) == NAMES
        produce(again, log, 2000, 2500)
        read = seriatim(again, "consume", "--queue", "orders", "--subscription", "two", "--max", "2500", "--json")
        records = [json.loads(line) for line in read.splitlines()]
        assert [record["value"] for record in records] == [str(number) for number in range(2500)]
        assert [record["offset"] for record in records] == list(range(2500))
        # The log of acknowledgements names the very places from which the records were read; none where it only says that
        # one was stored before, as after a switch in the midst of it, which a machine that stands still brings about.
        places = [tuple(line.split()) for line in log.read_text().splitlines()]
        delivered = [tuple(str(record[key]) for key in ("seq", "epoch", "index", "offset")) for record in records]
        assert [place[0] for place in places] == [place[0] for place in delivered]
        assert all(told in (place, (place[0], "-", "-", "-")) for told, place in zip(places, delivered, strict=True))
        assert sum("-" in told for told in places) <= 1000
        # The first subscription goes on where it was.
        rest = seriatim(again, "consume", "--queue", "orders", "--max", "500")
        assert rest == lines(2000, 2500)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_with_a_zookeeper_that_was_set_back_or_lost_everything(tmp_path):
    data, older, newest, log = (tmp_path / name for name in ("zookeeper", "older", "newest", "acknowledged"))
    with up(tmp_path, "--groups", "2") as (_, ready):
        seriatim(ready, "queue", "create", "orders")
        produce(ready, log, 0, 1000)
    shutil.copytree(data, older)
    with up(tmp_path) as (_, ready):
        produce(ready, log, 1000, 2000)  # on the next group
    data.rename(newest)
    older.rename(data)

    with up(tmp_path) as (_, ready):
        wait_until(lambda: "ZooKeeper was set back" in seriatim(ready, "status", "orders"))
        sending = (*SERIATIM, "produce", "--queue", "orders", "--coordinator", ready["coordinator"])
        with subprocess.Popen(sending, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
            waiting.stdin.write(b"more\n")
            waiting.stdin.close()
            # Link 2, and none after 1; later ones, where a machine that stood still had the sender go on.
            told = next(
                (line for line in waiting.stderr if re.search(rb"it has link \d+, the chain none after ", line)), None
            )
            waiting.kill()
        assert told is not None

    shutil.rmtree(data)
    newest.rename(data)
    with up(tmp_path) as (_, ready):
        produce(ready, log, 2000, 2100)
        assert seriatim(ready, "consume", "--queue", "orders", "--max", "2100") == lines(0, 2100)

    shutil.rmtree(data)
    with up(tmp_path) as (_, ready):
        assert seriatim(ready, "queue", "list") == ""
        wait_until(
            lambda: (
                "it keeps a chain of which ZooKeeper knows nothing: queue orders" in seriatim(ready, "group", "list")
            )
        )
        seriatim(ready, "queue", "create", "another")
        recovered = json.loads(seriatim(ready, "queue", "recover", "orders", "--confirm", "orders", "--json"))
        assert recovered["is_done"]
        assert recovered["what"].endswith("ZooKeeper has no chain")
        produce(ready, log, 2100, 2200)
        read = seriatim(ready, "consume", "--queue", "orders", "--subscription", "two", "--max", "2200", "--json")
        records = [json.loads(line) for line in read.splitlines()]
        assert [(record["offset"], record["value"]) for record in records] == [(n, str(n)) for n in range(2200)]
        # The subscription that there was goes on where it stood.
        assert seriatim(ready, "consume", "--queue", "orders", "--max", "100") == lines(2100, 2200)
        assert "nothing is to be recovered" in refused(ready, "queue", "recover", "orders", "--confirm", "orders")
        ids = {
            one["queue"]: one["queue_id"]
            for one in map(json.loads, seriatim(ready, "queue", "list", "--json").splitlines())
        }
        assert ids["orders"] != ids["another"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_in_code_is_harmed_and_mended_by_name(tmp_path):
    settings = ClusterSettings(tmp_path, groups=2, environment=WAITED_OUT, start_timeout_s=90)
    with DevelopmentCluster(settings) as cluster:
        ready = {"coordinator": cluster.coordinators}
        seriatim(ready, "queue", "create", "orders")
        for name in ("coordinator-1", "g1-a", "g2-b"):
            before = cluster.kill(name)
            assert name not in pids(tmp_path)
            if name == "coordinator-1":
                produce(ready, tmp_path / "log", 0, 100)
            assert cluster.restart(name) not in {before, None}
        produce(ready, tmp_path / "log", 100, 200)
        assert seriatim(ready, "consume", "--queue", "orders", "--max", "200") == lines(0, 200)
    cluster.close()  # a second time: nothing happens
    assert pids(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_lost_with_both_members_is_waited_for_until_an_operator_gives_it_up(tmp_path):
    settings = ClusterSettings(tmp_path, groups=2, environment=WAITED_OUT, start_timeout_s=90)
    with DevelopmentCluster(settings) as cluster:
        ready = {"coordinator": cluster.coordinators}

        def view():
            return json.loads(seriatim(ready, "status", "orders", "--json"))

        seriatim(ready, "queue", "create", "orders", "--groups", "g1,g2")
        produce(ready, tmp_path / "log", 0, 100)
        assert seriatim(ready, "consume", "--queue", "orders", "--max", "40") == lines(0, 40)
        for name in ("g1-a", "g1-b"):
            cluster.kill(name)
        produce(ready, tmp_path / "log", 100, 200)  # sending goes on
        wait_until(lambda: view()["links"][0]["state"] == "lost")
        told = view()
        assert any("lost on g1" in wait["reason"] for wait in told["waits"])
        assert told["links"][1]["base"] is None

        command = (*SERIATIM, "consume", "--queue", "orders", "--max", "100", "--json")
        command += ("--coordinator", cluster.coordinators)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env=ENVIRONMENT, **pipes) as reading:
            try:
                assert any("g1" in line for line in reading.stderr)  # it says what it waits for
                seriatim(ready, "queue", "abandon-link", "orders", "--epoch", "1", "--confirm", "orders")
                rest, _ = reading.communicate(timeout=100)
            finally:
                reading.kill()
        records = [json.loads(line) for line in rest.splitlines()]
        assert [record["value"] for record in records] == [str(number) for number in range(100, 200)]
        assert [record["offset"] for record in records] == list(range(2**40, 2**40 + 100))
        told = view()
        assert [one["epoch"] for one in told["abandoned"]] == [1]
        assert 1 not in told["subscriptions"][0]["consume_list"]
        assert "ABANDONED epoch 1" in seriatim(ready, "status", "orders")


def test_what_serves_already_is_told_while_a_cluster_starts(tmp_path, monkeypatch):
    """A minute of silence, on a slow machine, looks like a command that hangs."""
    monkeypatch.setattr("seriatim.cli.embedded.cluster.start_zookeeper", lambda *_, **__: None)
    monkeypatch.setattr(Supervisor, "start", lambda *_: 1)
    monkeypatch.setattr(Supervisor, "wait_for_line", lambda *_, **__: "ready")
    monkeypatch.setattr("seriatim.cli.up.wait_for_signal", lambda *_: None)
    told = CliRunner().invoke(main.seriatim, ["up", "--dir", str(tmp_path), "--groups", "1"], standalone_mode=False)
    names = ("zookeeper", "coordinator-1", "coordinator-2", "g1-a", "g1-b")
    first, *others = told.stderr.splitlines()
    assert first == f"starting 5 servers in {tmp_path}"
    assert [line.split(" serves at ")[0] for line in others] == list(names)
    assert told.stdout.startswith("ready coordinator=")
    told = CliRunner().invoke(main.seriatim, ["up", "--dir", str(tmp_path), "--json"], standalone_mode=False)
    assert told.stderr == ""
    assert json.loads(told.stdout)["event"] == "ready"


def test_a_server_that_ended_and_is_not_started_again_is_told_once(tmp_path, monkeypatch):
    """Nobody said anything, and the command looked as if all of it served."""
    told = []
    looks = iter(range(6000))

    def sleep(_):
        time.sleep(0.01)
        if next(looks) > 3 and told:
            raise KeyboardInterrupt

    def say_ended(name, log_end):
        told.append(name)
        foreground.say_ended(name, log_end)

    def spec(_, name):
        return ProcessSpec(name, ("sh", "-c", "echo a word" if name == "g1-b" else "sleep 600"))

    monkeypatch.setattr("seriatim.cli.embedded.cluster.start_zookeeper", lambda *_, **__: None)
    monkeypatch.setattr(DevelopmentCluster, "_spec", spec)
    monkeypatch.setattr(Supervisor, "wait_for_line", lambda *_, **__: "ready")
    monkeypatch.setattr(foreground, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(up_module, "say_ended", say_ended)
    arguments = ["up", "--dir", str(tmp_path), "--groups", "1", "--no-restart"]
    said = CliRunner().invoke(main.seriatim, arguments, standalone_mode=False).stderr
    assert told == ["g1-b"]
    log = tmp_path / "logs" / "g1-b.log"
    assert said.endswith(f"g1-b ended by itself, and the others run on. Its log, {log}, ends with:\n  a word\n")


def test_fewer_groups_than_the_directory_holds_are_refused(tmp_path):
    for name in ("g1-a", "g1-b", "g2-a", "g2-b", "g3-a"):
        (tmp_path / name).mkdir()
    with pytest.raises(EmbeddedError, match="holds 3 groups"):
        DevelopmentCluster(ClusterSettings(tmp_path, groups=2))
    for wanted in (None, 3, 4):
        cluster = DevelopmentCluster(ClusterSettings(tmp_path, groups=wanted))
        assert len(cluster.groups) == (wanted or 3)
        cluster.close()
