"""How long a member may take records: its own clock's answer to "does my ZooKeeper session still live?"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

SHARE: Final = 2 / 3
"""Of the session time-out (protocol.md 4, Lease): the rest covers clocks that don't run at quite the same rate."""
RENEWALS: Final = 5
"""Writes in the time that one lease lasts."""


@dataclass(frozen=True, slots=True)
class Lease:
    """`until_s`: CLOCK_BOOTTIME at which it is over. `is_admitted`: this session's links were sealed first (5.5)."""

    session_id: int = 0
    until_s: float = 0.0
    is_admitted: bool = False

    @property
    def usable_until_s(self) -> float:
        return self.until_s if self.is_admitted else 0.0


def session_began(session_id: int) -> Lease:
    """A new session gives no lease before the links of the one before are sealed (protocol.md 5.5)."""
    return Lease(session_id)


def admitted(lease: Lease) -> Lease:
    """The member has sealed what it had open and registered."""
    return replace(lease, is_admitted=True)


def renewed(lease: Lease, session_id: int, sent_at_s: float, session_timeout_s: float) -> Lease:
    """After a write of this session, sent at `sent_at_s`, was answered. Nothing else renews (H10)."""
    if session_id != lease.session_id:
        return lease
    return replace(lease, until_s=max(lease.until_s, sent_at_s + session_timeout_s * SHARE))


def renewal_interval_s(session_timeout_s: float) -> float:
    """Between two writes."""
    return session_timeout_s * SHARE / RENEWALS
