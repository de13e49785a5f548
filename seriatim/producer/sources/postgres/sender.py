"""What a capture sends through: the producer library as a capture sees it, so that it can be run without a cluster."""

from __future__ import annotations

from typing import Protocol

from seriatim.producer.sources.postgres.core.resume import Kept


class Deposed(Exception):
    """This instance is not, or no longer, elected: it stops at once and stands by."""


class OrderedSender(Protocol):
    """Sends records in order for whoever is elected. Called from one thread; `is_elected` from any."""

    def wait_until_elected(self, timeout_s: float) -> bool:
        """Stand for election; whether this instance is elected now."""
        ...

    def is_elected(self) -> bool:
        """Whether this instance may still send."""
        ...

    def stand_again(self) -> None:
        """Let another instance be elected where one stands by; else it will be this one, in another term."""
        ...

    def stop(self) -> None:
        """Make every call that waits, now or later, raise Deposed soon. From any thread or a signal handler."""
        ...

    def kept(self) -> Kept:
        """Where the queue stands, after waiting for what this instance has in flight.

        Raises:
            Deposed: no longer elected.
            ResumePointUnknown: nobody can tell; to be asked again after the next election.
        """
        ...

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        """Hand over a record; blocks while too much is in flight.

        Raises:
            Deposed: no longer elected. Whether records in flight were stored is not known; the next resume point tells.
        """
        ...

    def acknowledged(self, source: str) -> int:
        """Highest seq of the source up to which every record sent in this term is acknowledged; 0 for none.

        Raises:
            Deposed: no longer elected.
        """
        ...
