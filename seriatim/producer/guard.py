"""A lock that says no to a thread that holds it already, instead of letting it wait for itself."""

from __future__ import annotations

import threading
from typing import Final

from seriatim.protocol.errors import InvalidArgument

IS_COMPILED: Final = not __file__.endswith(".py")


class Guard:
    """Holds `lock` for a `with`, and knows the thread that does.

    Problem: while a thread holds the lock, the interpreter may run a signal's handler there, or a finalizer; those may call what takes
    the same lock, and would wait for what goes on only when they have returned. Here they get InvalidArgument.

    Only where it is compiled: elsewhere Ctrl-C could come between these lines, and the lock would be held for good.
    """

    __slots__ = ("_holder", "_lock")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._holder = 0

    @property
    def is_own(self) -> bool:
        """Whether the calling thread holds it."""
        return self._holder == threading.get_ident()

    def __enter__(self) -> None:
        caller = threading.get_ident()
        if self._holder == caller:
            raise InvalidArgument(
                "called in the middle of another call of the same thread, by a signal's handler or a finalizer"
            )
        self._lock.acquire()
        self._holder = caller

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._holder = 0
        self._lock.release()
