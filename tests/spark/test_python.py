"""The Python that Spark runs, as Java starts and uses it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pyspark
import pytest

from seriatim.consumer.spark.python import command

pytestmark = pytest.mark.spark


@pytest.fixture
def ours() -> str:
    path = command()
    assert path is not None
    return path


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_worker_whose_java_is_gone_ends_without_a_word(ours, is_ours):
    """pyspark's own tells it, in a traceback."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may not be long
        environment = {
            "PYTHON_UNIX_DOMAIN_ENABLED": "true",
            "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
            "SPARK_REUSE_WORKER": "1",
        }
        arguments = [ours if is_ours else sys.executable, "-m", "pyspark.daemon", "pyspark.worker"]
        pipe = subprocess.PIPE
        with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | environment) as parent:
            (size,) = struct.unpack("!i", parent.stdout.read(4))
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as java:
                java.connect(parent.stdout.read(size))
                (pid,) = struct.unpack("!i", java.recv(4, socket.MSG_WAITALL))
                worker = psutil.Process(pid)
            psutil.wait_procs([worker], timeout=120)
            _, said = parent.communicate(timeout=60)  # it ends with its standard input
    assert (b"BrokenPipeError" in said) is not is_ours
    assert not is_ours or not said


def test_for_all_else_it_is_the_python_of_its_folder(ours):
    said = subprocess.run(
        [ours, "-c", "import sys; print(sys.executable, sys.argv)", "x"], capture_output=True, check=True
    )
    assert said.stdout.decode() == f"{sys.executable} ['-c', 'x']\n"


@pytest.mark.parametrize("is_ours", [True, False])
def test_pyspark_is_imported_from_where_it_is_installed_though_spark_names_its_archive(ours, is_ours, tmp_path):
    archives = sorted(str(path) for path in Path(pyspark.__file__).parent.glob("python/lib/*.zip"))
    foreign = tmp_path / "foreign.zip"
    foreign.touch()
    python_path = os.pathsep.join([*archives, str(foreign), *sys.path])
    script = "import os, sys, py4j, pyspark; print(py4j.__file__, pyspark.__file__, *sys.path, sep=os.pathsep)"
    said = subprocess.run(
        [ours if is_ours else sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": python_path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    java, spark, *folders = said.stdout.rstrip().split(os.pathsep)
    assert {".zip" in java, ".zip" in spark} == {not is_ours}
    assert [archive in folders for archive in archives] == [not is_ours] * 2
    assert str(foreign) in folders  # all else is looked through
