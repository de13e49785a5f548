"""What a load asks of a client library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a client is opened for, so that it can be set the best way for that."""

    is_latency: bool = False
    """Each record counts, not the sum."""
    is_outage: bool = False
    """Servers will die or stop."""


class Client(ABC):
    """A sender and reader of one queue, used by one thread.

    A record counts as sent when the servers have acknowledged it as durably as the peer was set to.
    """

    has_bulk = False

    @abstractmethod
    def send_each(self, values: Sequence[bytes]) -> None:
        """Send records by one call of the library each; waits only where the library's buffer is full."""

    def send_bulk(self, values: Sequence[bytes]) -> None:
        """Send records by one call of the library. Only where `has_bulk`."""
        raise NotImplementedError(f"{type(self).__name__} has no call for many records")

    @abstractmethod
    def send_noted(self, value: bytes, notes: Sequence[Callable[[], None]]) -> None:
        """Send a record for each of `notes`, which is called, on any thread, when that record is acknowledged."""

    @abstractmethod
    def send_and_wait(self, value: bytes) -> None:
        """Send one record and wait for its acknowledgement."""

    @abstractmethod
    def idle(self, seconds: float) -> None:
        """Let time pass; a library without a thread of its own serves its callbacks meanwhile."""

    @abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Wait until everything is acknowledged. Raises where something was not."""

    @abstractmethod
    def open_reader(self) -> None:
        """Get ready to read the queue from its start."""

    @abstractmethod
    def read(self, most: int, timeout_s: float) -> tuple[int, int]:
        """Up to `most` records as soon as there are any: how many, and how many bytes their values have. (0, 0): none."""

    @abstractmethod
    def close(self) -> None:
        """End it; what isn't acknowledged is given up."""
