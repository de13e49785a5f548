"""`pyspark.daemon`, which Spark starts for its Python workers, but that a worker whose Java is gone ends without a word.

Java closes a worker that it hasn't needed for a minute, and the worker tells it that this was unexpected: by a file's socket that fails at
once, where it would have gone nowhere by a port, and each was a traceback in the log of a replay that does well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import daemon

if TYPE_CHECKING:
    import socket

_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """In the worker, after the fork."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
