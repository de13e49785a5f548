"""What an application gave to be told by, called on a thread of ours."""

from __future__ import annotations

from collections.abc import Callable

from seriatim.protocol.log import KeyValueLogger


def call_back(log: KeyValueLogger, callback: Callable[..., object] | None, *arguments: object) -> None:
    """Call it, if there is one. What it raises is logged, and nothing else of ours: SystemExit would end our thread, and nobody else."""
    if callback is not None:
        try:
            callback(*arguments)
        except BaseException:
            log.exception("a callback of the application failed")
