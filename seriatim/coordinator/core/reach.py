"""Whether it isn't brokers that are gone, but this coordinator's path to all of them.

Problem: whoever reaches ZooKeeper and its clients, and no broker, takes each group for one that fails: it closes links that serve
well, lists others that nobody opens, and where it is elected tells no end, so that no group ever comes back. All the while another
coordinator could do all that.

Idea: what one member doesn't answer another one may. Only where several have given no answer since anybody did, all that are
registered are asked, and if nobody answers that, this coordinator says so instead of deciding anything. The first answer is enough:
those that are silent still are when their time is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from seriatim.protocol.errors import DeadlineOver, SeriatimError, Unreachable
from seriatim.protocol.names import MemberName

FEWEST_SILENT: Final = 2
FEWEST_REGISTERED: Final = 3
"""A group's two may be gone together, and stay registered for a session's time-out; of two groups somebody would answer."""


def is_answer(error: SeriatimError) -> bool:
    """Whether who was called has answered with this error, and isn't silent."""
    return not isinstance(error, (Unreachable, DeadlineOver))


@dataclass(slots=True)
class Reach:
    """Who gave no answer since anybody did, and from when on."""

    silent_since_s: dict[MemberName, float] = field(default_factory=dict)

    def answered(self) -> None:
        """Somebody did, be it with an error."""
        self.silent_since_s.clear()

    def unanswered(self, member: MemberName, now_s: float) -> None:
        """It was called, and gave no answer, or couldn't be reached."""
        self.silent_since_s.setdefault(member, now_s)

    def is_in_doubt(self, registered: int, now_s: float, for_s: float = 0.0) -> bool:
        """Whether all of the `registered` members should be asked: several have been silent for `for_s`, and nobody else answered."""
        silent = self.silent_since_s
        if len(silent) < FEWEST_SILENT or registered < FEWEST_REGISTERED:
            return False
        return now_s - min(silent.values()) >= for_s
