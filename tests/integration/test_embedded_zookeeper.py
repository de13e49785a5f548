from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from kazoo.client import KazooClient

from seriatim.cli import class_archive as class_archive_command
from seriatim.cli import exits, main
from seriatim.cli.embedded import zookeeper as zookeeper_module
from seriatim.cli.embedded.errors import EmbeddedError, Missing, PortInUse
from seriatim.cli.embedded.ports import PortBook, free_port
from seriatim.cli.embedded.processes import ProcessSpec
from seriatim.cli.embedded.zookeeper import EmbeddedZooKeeper, answers
from seriatim.consumer.spark import class_archive

SERIATIM = (sys.executable, "-m", "seriatim.cli.main")


def test_each_test_has_an_empty_tree_and_short_sessions_are_granted(zookeeper):
    client = KazooClient(zookeeper, timeout=1.0)
    client.start(timeout=60)
    try:
        assert client._session_timeout == 1000
        # A session this short may be over, and another one under way, where the machine stands still.
        assert client.retry(client.get_children, "/") == []
    finally:
        client.stop()
        client.close()


def test_a_second_start_keeps_port_and_data(tmp_path):
    directory = tmp_path / "Größe \\1"
    with EmbeddedZooKeeper(directory) as server:
        address = server.address
        client = KazooClient(address)
        client.start(timeout=60)
        client.create("/kept", b"yes")
        client.stop()
        client.close()
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    with EmbeddedZooKeeper(directory) as server:
        assert server.address == address
        client = KazooClient(address)
        client.start(timeout=60)
        assert client.get("/kept")[0] == b"yes"
        client.stop()
        client.close()


@pytest.fixture
def archive_options():
    options = class_archive.using(class_archive.ZOOKEEPER)
    if not options:
        pytest.skip("set-up made no archive of Java's classes; `seriatim class-archive` says why")
    return options


def test_classes_come_from_the_archive_that_set_up_made(tmp_path, archive_options):
    loaded = tmp_path / "loaded"
    with EmbeddedZooKeeper(tmp_path, archive_options=(*archive_options, f"-Xlog:class+load:file={loaded}")):
        pass
    assert loaded.read_text().count("source: shared objects file (top)") > 500


@pytest.mark.usefixtures("archive_options")
def test_an_archive_of_other_jars_is_passed_over_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(zookeeper_module, "class_path", lambda right=zookeeper_module.class_path: f"/tmp:{right()}")
    with EmbeddedZooKeeper(tmp_path):
        log = (tmp_path / "logs" / "zookeeper.log").read_text()
    assert "archive" not in log


def test_without_java_no_archive_is_made_and_the_line_to_type_is_shown(tmp_path):
    ended = subprocess.run(
        (*SERIATIM, "class-archive"), env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 3
    assert "apt-get install openjdk-17-jre-headless" in ended.stderr
    assert "\nspark: Spark needs Java" in ended.stderr, "the first that fails isn't the end"


def test_java_may_take_long_to_write_its_classes(tmp_path, monkeypatch):
    """On a machine that has hardly a processor for it, as when images are built beside tests: it was killed after 5 s."""
    (tmp_path / "bin").mkdir()
    slow_java = tmp_path / "bin" / "java"
    slow_java.write_text(f"""#!/bin/sh
setsid setpriv --pdeathsig KILL {zookeeper_module.java_path()} "$@" & java=$!
trap 'sleep 7; kill $java; wait $java; exit' TERM
wait $java
""")
    slow_java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    archive, scratch = tmp_path / "zookeeper.jsa", tmp_path / "scratch"
    class_archive_command._make_zookeeper(archive, scratch)
    assert archive.stat().st_size > 1e6


def test_where_no_archive_was_made_none_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert class_archive.using(class_archive.ZOOKEEPER) == ()


def test_a_port_in_use_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            EmbeddedZooKeeper(tmp_path, port=port).start()


@pytest.mark.parametrize(
    "content", [b"", b'{"zookeeper":', b'{"zookeeper": null}', b'{"zookeeper": 70000}', b"[]", b"\xff"]
)
def test_ports_that_can_t_be_read_are_told(tmp_path, content):
    (tmp_path / "ports.json").write_bytes(content)
    with pytest.raises(EmbeddedError, match=r"ports\.json is damaged: remove it"):
        EmbeddedZooKeeper(tmp_path).start()


def test_a_port_that_another_name_was_given_is_not_given_twice(tmp_path):
    """As after `up --port P`, and an `up --port P+1` that was refused because a later port of it was in use."""
    port = free_port()
    PortBook(tmp_path).port("coordinator-2", wanted=port)
    PortBook(tmp_path).port("coordinator-1", wanted=port)
    book = PortBook(tmp_path)
    assert book.port("coordinator-1") == port
    assert book.port("coordinator-2") != port


def test_an_address_of_no_machine_is_not_called_a_port_in_use(tmp_path):
    with pytest.raises(PortInUse, match=r"can't listen on 192\.0\.2\.1:\d+: Cannot assign requested address"):
        EmbeddedZooKeeper(tmp_path, host="192.0.2.1").start()


def test_without_java_the_line_to_type_is_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="apt-get install openjdk-17-jre-headless"):
        EmbeddedZooKeeper(tmp_path).start()


def test_the_command_serves_until_sigterm_and_refuses_a_second_one(tmp_path):
    command = (*SERIATIM, "zookeeper", "--dir", str(tmp_path))
    with subprocess.Popen((*command, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        host, port = json.loads(first.stdout.readline())["zookeeper"].split(":")
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 3
        assert f"in use by process {first.pid}" in second.stderr
        deadline_s = time.monotonic() + 60
        while not answers(host, int(port)):  # it asks for a second each time
            assert time.monotonic() < deadline_s, "it doesn't serve"
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert first.returncode == 0
    assert not answers(host, int(port))


def test_the_command_ends_with_its_zookeeper(tmp_path, monkeypatch, capfd):
    """It waited for a signal for ever, and said ready to whoever looked after it."""

    def start(supervisor, *_, **__):
        supervisor.start(ProcessSpec("zookeeper", ("sh", "-c", "echo memory is short; exit 3")))

    monkeypatch.setattr(zookeeper_module, "start_zookeeper", start)
    assert main.run(["zookeeper", "--dir", str(tmp_path)]) == exits.REFUSED
    said = capfd.readouterr().err
    assert said.startswith("Error: zookeeper ended by itself. Its log, ")
    assert said.endswith("ends with:\n  memory is short\n")
