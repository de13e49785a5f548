"""Nobody answers who has just begun: how long that is waited for. Afterwards coordinators may be away for as long as they like."""

from __future__ import annotations

from seriatim.protocol.errors import SeriatimError, Unreachable


class FirstAnswer:
    """`give_up_at_s`: when the first answer is overdue, by the clock of `now_s`; None: never, also once there was one."""

    def __init__(self, give_up_at_s: float | None) -> None:
        self._give_up_at_s = give_up_at_s

    def came(self) -> None:
        """There was one, as to be elected is."""
        self._give_up_at_s = None

    def is_overdue(self, problem: SeriatimError, *, is_connected: bool, now_s: float) -> bool:
        """Whether to give up, for what a producer isn't elected. `is_connected`: it stands in the election.

        That is an answer: who it stands by for may be gone later together with the coordinators.
        """
        if is_connected:
            self.came()
        is_late = self._give_up_at_s is not None and now_s >= self._give_up_at_s
        return is_late and isinstance(problem, Unreachable)
