"""How long one may act by one's own clock: as far as the last write that ZooKeeper answered allows (protocol.md 4, Lease; H8, H10).

A member takes records under a lease, an elected reader hands them out under one. Each lease is of one holder, which never comes again
once it is gone: of a member's session with ZooKeeper, or of a reader's election node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

Holder = TypeVar("Holder", int, str)
SHARE: Final = 2 / 3
"""Of the session time-out (protocol.md 4, Lease): the rest covers clocks that don't run at quite the same rate."""
RENEWALS: Final = 5
"""Writes in the time that one lease lasts."""


@dataclass(frozen=True, slots=True)
class Lease(Generic[Holder]):
    """A new holder has none.

    `until_s`: CLOCK_BOOTTIME at which it is over. `is_admitted`: whether the holder has what it needs besides: a member has sealed its
    links (5.5), a reader has been granted where to read.
    """

    holder: Holder
    until_s: float = 0.0
    is_admitted: bool = False

    @property
    def usable_until_s(self) -> float:
        return self.until_s if self.is_admitted else 0.0

    def admitted(self) -> Lease[Holder]:
        return replace(self, is_admitted=True)

    def dismissed(self) -> Lease[Holder]:
        """Until it is admitted again. What was proved of its holder stands."""
        return replace(self, is_admitted=False)

    def renewed(self, holder: Holder, sent_at_s: float, session_timeout_s: float) -> Lease[Holder]:
        """After a write of this holder, sent at `sent_at_s`, was answered. Nothing else renews (H10)."""
        if holder != self.holder:
            return self
        return replace(self, until_s=max(self.until_s, sent_at_s + session_timeout_s * SHARE))


def renewal_interval_s(session_timeout_s: float) -> float:
    """Between two writes."""
    return session_timeout_s * SHARE / RENEWALS
