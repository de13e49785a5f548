"""Spark's parent of Python workers, as Java starts and uses it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile

import psutil
import pytest

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    ("module", "is_told"), [("seriatim.consumer.spark.python_daemon", False), ("pyspark.daemon", True)]
)
def test_a_worker_whose_java_is_gone_ends_without_a_word(module, is_told):
    """pyspark's own tells it, in a traceback."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may not be long
        environment = {
            "PYTHON_UNIX_DOMAIN_ENABLED": "true",
            "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
            "SPARK_REUSE_WORKER": "1",
        }
        command = [sys.executable, "-m", module, "pyspark.worker"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | environment) as parent:
            (size,) = struct.unpack("!i", parent.stdout.read(4))
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as java:
                java.connect(parent.stdout.read(size))
                (pid,) = struct.unpack("!i", java.recv(4, socket.MSG_WAITALL))
                worker = psutil.Process(pid)
            psutil.wait_procs([worker], timeout=120)
            _, said = parent.communicate(timeout=60)  # it ends with its standard input
    assert (b"BrokenPipeError" in said) is is_told
    assert is_told or not said
