"""What works in a process that was forked while clients were in use."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable


def in_a_fork(*works: Callable[[], object]) -> list[str]:
    """What each of them raises in a forked process, or that it returned; less where it waits for too long."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons advise against a fork where there are threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            for work in works:
                try:
                    work()
                    said = "returned"
                except BaseException as error:
                    said = f"{type(error).__name__}: {error}"
                os.write(writing, f"{said}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said_by_all = told.read().splitlines()
    os.waitpid(child, 0)
    return said_by_all
