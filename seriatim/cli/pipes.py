"""Whether anybody reads what a command prints: a pipe that was closed is told of by the next write only, and that may never come."""

from __future__ import annotations

import os
import select
import stat
import sys
from contextlib import suppress


def is_output_read() -> bool:
    """False where standard output is a pipe or a socket whose other end was closed."""
    with suppress(AttributeError, OSError):  # there is none, or it is no file
        output = sys.stdout.fileno()
        mode = os.fstat(output).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            look = select.poll()
            look.register(output, 0)
            return not look.poll(0)
    return True
