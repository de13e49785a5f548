"""Becomes the command it is given, after asking the kernel to end it together with its parent.

Usage: python launcher.py PARENT_PID SIGNAL COMMAND [ARGUMENT…]. Runs without the rest of the package (`python -I -S`), so
that it costs a few milliseconds. The kernel forgets the request when the user changes, so whoever changes it asks again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the parent-death signal (prctl(2)), then exec. Ends quietly when the parent is gone already."""
    parent_pid, death_signal, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)
    # What is ignored stays so after exec: Python ignores SIGPIPE, and a shell SIGINT for what it starts in the background.
    for ignored in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 (no shell is what is wanted)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
