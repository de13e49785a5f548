"""What a process does that was forked from one with clients: their threads aren't in it, and whatever they hold stays the parent's."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Client = TypeVar("Client")

_clients: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def call_in_child(client: Client, leave: Callable[[Client], None]) -> None:
    """Call `leave(client)` in each process forked from this one from now on, as long as the client is there."""
    _clients[client] = leave


def _forked() -> None:
    for client, leave in list(_clients.items()):
        leave(client)


os.register_at_fork(after_in_child=_forked)
