"""Entry point of the installed command: what it is made of takes half a second to load, in which Ctrl-C just ends it."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command. Until it has begun there is nothing to be undone, and Python would tell with a traceback where it stood."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and isn't ignored, as behind nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from seriatim.cli import main as command

    command.main()
