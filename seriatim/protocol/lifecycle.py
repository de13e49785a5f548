"""What a process does with clients when it is forked from one that has some, and when it ends.

In a child their threads aren't there, and whatever they hold stays the parent's.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Client = TypeVar("Client")


class _Calls:
    """What is to be called of each client that is there by then."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()

    def add(self, client: Client, call: Callable[[Client], None]) -> None:
        self._calls[client] = call

    def make(self) -> None:
        for client, call in list(self._calls.items()):
            call(client)


_in_child = _Calls()
_at_exit = _Calls()


def call_in_child(client: Client, leave: Callable[[Client], None]) -> None:
    """Call `leave(client)` in each process forked from this one from now on, as long as the client is there."""
    _in_child.add(client, leave)


def call_at_exit(client: Client, tell: Callable[[Client], None]) -> None:
    """Call `tell(client)` where this process ends, as long as the client is there: behind all that applications registered for that."""
    _at_exit.add(client, tell)


os.register_at_fork(after_in_child=_in_child.make)
atexit.register(_at_exit.make)
