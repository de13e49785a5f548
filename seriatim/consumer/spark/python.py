"""The Python that Spark runs its workers with: the command ``seriatim-spark-python``.

Spark starts it as ``python -m pyspark.daemon``, the parent of the workers, and in other ways, which are as any Python's. A
worker that Java closes, as it hasn't been needed for a minute, tells Java that this was unexpected. By a file's socket
that fails at once, where by a port it goes nowhere, and was a traceback in the log of a replay that does well. Spark has
a setting that names the parent's module (``spark.python.daemon.module``), but not for the workers that plan.

Spark also has it find pyspark in an archive, a copy of the installed package that lies within that. Python compiles what
it imports from there anew in each process, which was most of what each takes to start.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket


def command() -> str | None:
    """Where it is, if it is installed where this Python's commands are."""
    path = Path(sysconfig.get_path("scripts"), "seriatim-spark-python")
    return str(path) if path.exists() else None


def import_what_is_installed() -> None:
    """Passes over the archives of Spark's that lie in the installed pyspark, here and in what this process becomes."""
    library = Path(sysconfig.get_path("purelib"), "pyspark", "python", "lib").resolve()
    archives = {entry for entry in sys.path if entry.endswith(".zip") and Path(entry).resolve().parent == library}
    if archives:
        sys.path[:] = [entry for entry in sys.path if entry not in archives]
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in inherited if entry not in archives)


def main() -> None:
    """What Python would do with these arguments, but for the worker's last word, and where pyspark is from."""
    import_what_is_installed()
    if sys.argv[1:3] != ["-m", "pyspark.daemon"]:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # noqa: S606 - as Spark would have started it
    del sys.argv[:2]
    from pyspark import daemon

    as_spark_has_it = daemon.worker

    def worker(sock: socket.socket, authenticated: bool) -> int:
        """In the worker, after the fork."""
        try:
            return as_spark_has_it(sock, authenticated)
        except BrokenPipeError:
            return 1

    daemon.worker = worker
    daemon.manager()
