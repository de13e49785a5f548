"""Commands that run servers in the foreground until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

import click

from seriatim.protocol import log, values

_log = log.logger("server")
_LOOK_EVERY_S = 0.5
_FEW_FILES = 4096
"""Fewer are soon used up, by a stream each and a link in use one or two."""


@contextlib.contextmanager
def _on_ends(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """These signals, and a terminal that is closed, unless under nohup, call the handler while the block runs."""

    def told(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # comes twice, from the kernel and from the shell: the second one is no second wish
            signal.signal(number, signal.SIG_IGN)
        handler(number, frame)

    ends = [*numbers]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        ends.append(signal.SIGHUP)
    before = {number: signal.signal(number, told) for number in ends}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, end the block as Ctrl-C does, so that what it has begun is undone."""
    with _on_ends(signal.default_int_handler, signal.SIGTERM):
        yield


@contextlib.contextmanager
def on_signals(stop: Callable[[], object], again: Any = signal.SIG_DFL) -> Iterator[None]:
    """SIGTERM, Ctrl-C and a closed terminal call `stop`. A second SIGTERM or Ctrl-C kills, which does no harm: whoever is waited for may never let go.

    `again`: another handler of a second one.
    """

    def told(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            signal.signal(number, again)
        stop()

    with _on_ends(told, signal.SIGTERM, signal.SIGINT):
        yield


@contextlib.contextmanager
def until_signalled() -> Iterator[None]:
    """Around a foreground command: SIGTERM, SIGHUP and Ctrl-C end the block like a normal return, at any point in it.

    The block's own `finally` and `with` run first. A second signal while they do ends the process at once, and the kernel
    ends its children (see `embedded.processes`).
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt), interruptible():
        yield


def run_server(serve: Callable[[asyncio.Event], Coroutine[Any, Any, object]]) -> None:
    """Run a server until it ends, or SIGTERM or Ctrl-C sets its event.

    What it has imported stays: else each full collection looks through it, 10 ms in which nobody is answered.
    """
    values.make_faster()
    _allow_open_files()
    gc.freeze()
    asyncio.run(_until_asked(serve))


async def _until_asked(serve: Callable[[asyncio.Event], Coroutine[Any, Any, object]]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(stop)


def _allow_open_files() -> None:
    """As many as the system lets this process have.

    It starts with fewer, often 1024, for the sake of `select`, which nobody calls here. A stream takes one of them, and a link in use
    a few: where none was left, a broker couldn't open the next file it had to write, and its disk counted as failed.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # it goes on as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if 0 <= most < _FEW_FILES:  # less than 0: without end
        _log.warning("few files can be open at once, raise the hard limit (ulimit -Hn)", limit=most, wanted=_FEW_FILES)


def wait_for_signal(ended: Callable[[], Iterable[str]], tell: Callable[[str], object]) -> NoReturn:
    """Wait until a signal ends the block around this, and tell meanwhile, once each, of servers that ended by themselves.

    Else whoever watches the command alone takes for served what isn't any more.
    """
    told: set[str] = set()
    while True:
        for name in ended():
            if name not in told:
                told.add(name)
                tell(name)
        time.sleep(_LOOK_EVERY_S)


def say_ended(name: str, log_end: str) -> None:
    """Tell of a server that ended by itself, where that ends no other."""
    click.echo(f"{name} ended by itself, and the others run on. {log_end}", err=True)
