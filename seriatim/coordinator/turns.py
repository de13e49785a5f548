"""Calls of one kind to one member take turns, and the deadline of each counts from its turn.

Problem: hundreds of queues switch in one moment, and all ask the same two members. A call costs a member milliseconds, so that of all
side by side the last are answered behind their deadline, by a member that is well: each of them closes a link and costs its queue that
group, and they fall upon the next one together.

Idea: a few at once. Where the member stands still, those in line would wait for a deadline behind the other; so whoever stood there
when a call ran out, and nothing had been answered since that call began, has the same answer at once. Who asks later tries anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from seriatim.coordinator.core.reach import is_answer
from seriatim.protocol.errors import DeadlineOver, SeriatimError

AT_ONCE: Final = 16
"""Many enough to share a flush of the member's disk; few enough that the last is answered long before its deadline, at several
milliseconds each, and as many again from another coordinator.
"""
Reply = TypeVar("Reply")


class Turns:
    """In the order in which they were asked for: a master's answer to OpenLink waits for its slave's, and both lines reach that in turn.

    `_answers`: how many were given. `_ran_out`: as the last call ended that the member stood still for.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._answers = 0
        self._ran_out: DeadlineOver | None = None

    async def take(self, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """What `call` brings, begun when its turn has come. Raises as it does."""
        ran_out = self._ran_out
        async with self._turn:
            if self._ran_out is not None and self._ran_out is not ran_out:
                raise DeadlineOver(self._ran_out.message)
            answers = self._answers
            try:
                reply = await call()
            except SeriatimError as error:
                if is_answer(error):
                    self._answers += 1
                elif isinstance(error, DeadlineOver) and self._answers == answers:
                    self._ran_out = DeadlineOver(error.message)
                raise
            self._answers += 1
            return reply
