"""Carries out what `core.cursor` orders: commits at members, and who waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from seriatim.consumer.core import cursor
from seriatim.consumer.core.cursor import CursorState
from seriatim.consumer.core.view import Place
from seriatim.consumer.transport import Members
from seriatim.consumer.views import link_name
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import Fenced, InvalidArgument, NotElected, OlderGeneration, SeriatimError

_log = log.logger("consumer")

OVERDUE = "the commit may still be"
"""It stays asked for, as long as the term goes on."""


class Commits:
    """The cursor of one reader. To be used on one loop.

    `on_acquire`: a coordinator is to be asked again; `on_start`: reading starts, in a new term, or because the subscription was
    sought. `or_fail(work)`: what runs in a task.
    """

    def __init__(
        self,
        members: Members,
        on_acquire: Callable[[], object],
        on_start: Callable[[cursor.StartReading], object],
        or_fail: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]],
    ) -> None:
        self.state = CursorState()
        self._members = members
        self._on_acquire = on_acquire
        self._on_start = on_start
        self._or_fail = or_fail
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: list[tuple[Place, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def commit(self, place: Place) -> None:
        """Commit everything before `place`, and wait until the members have it.

        Raises what `give_up` was given, OlderGeneration where somebody seeks, InvalidArgument where there is less than that.
        """
        self.ask(place)
        if self.state.committed >= place:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((place, waiter))
        await waiter

    def ask(self, place: Place) -> None:
        """Commit everything before `place`, some time soon."""
        if place > self.state.wanted:
            self.happened(cursor.CommitAsked(place))

    def give_up(self, error: SeriatimError) -> None:
        """Nobody waits any more: this is why."""
        waiters, self._waiters = self._waiters, []
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def close(self) -> None:
        """Cancel what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in [*self._tasks]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def happened(self, event: cursor.Event) -> None:
        """Step the core and carry out its orders."""
        before = self.state
        self.state, effects = cursor.decide(before, event, boottime_s())
        for effect in effects:
            match effect:
                case cursor.Commit():
                    self._send(effect)
                case cursor.AcquireAgain():
                    self._on_acquire()
                case cursor.StartReading():
                    self.give_up(OlderGeneration("the subscription was sought: the cursor is elsewhere now"))
                    self._on_start(effect)
                case cursor.Refuse(place, reason):
                    self._refuse(place, reason)
                case cursor.WakeAt(at_s):
                    self._wake_at(at_s)
        still = []
        for place, waiter in self._waiters:
            if self.state.committed >= place:
                if not waiter.done():
                    waiter.set_result(None)
            else:
                still.append((place, waiter))
        self._waiters = still

    def _refuse(self, place: Place, reason: str) -> None:
        """Whoever waits for `place` or more waits for nothing; others want less, which is asked for again."""
        waiters, self._waiters = self._waiters, []
        for wanted, waiter in waiters:
            if wanted < place:
                self._waiters.append((wanted, waiter))
            elif not waiter.done():
                waiter.set_exception(InvalidArgument(reason))
        if self._waiters:
            self.ask(max(wanted for wanted, _ in self._waiters))

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at_s - boottime_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.happened, cursor.Tick())

    def _send(self, order: cursor.Commit) -> None:
        view, grant = self.state.view, order.grant
        if view is None:
            return
        request = pb.CommitCursorRequest(
            link=link_name(view, order.epoch, order.side.incarnation),
            subscription_id=grant.subscription_id,
            generation=grant.generation,
            token=grant.token,
            index=order.index,
            cause_id=log.new_cause_id("commit"),
        )
        task = asyncio.create_task(self._or_fail(self._commit(order, request)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, order: cursor.Commit, request: pb.CommitCursorRequest) -> None:
        try:
            await self._members.commit(order.side, request)
        except SeriatimError as error:
            _log.info("commit failed", epoch=order.epoch, index=order.index, member=order.side, reason=error.message)
            is_grant_old = error.code in {Fenced.code, OlderGeneration.code, NotElected.code}
            is_beyond = error.code == InvalidArgument.code
            reason = f"{order.side}: {error.message}"
            self.happened(cursor.CommitFailed(order.commit_id, reason, is_grant_old, is_beyond))
        else:
            self.happened(cursor.Committed(order.commit_id))
