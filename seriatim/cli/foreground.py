"""Commands that run servers in the foreground until a signal ends them."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from seriatim.protocol import values


@contextmanager
def until_signalled() -> Iterator[None]:
    """Around a foreground command: SIGTERM and Ctrl-C end the block like a normal return, at any point in it.

    The block's own `finally` and `with` run first. A second signal while they do ends the process at once, and the kernel
    ends its children (see `embedded.processes`).
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)


def run_server(main: Coroutine[Any, Any, object]) -> None:
    """Run a server to its end. What it has imported stays: else each full collection looks through it, 10 ms in which nobody is answered."""
    values.make_faster()
    gc.freeze()
    asyncio.run(main)


def wait_for_signal() -> None:
    """Sleep until a signal ends the block of `until_signalled`."""
    while True:
        signal.pause()
