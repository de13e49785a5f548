"""`Subscriber`: elected reader with a token and commits by offset, for who reads by other means (Spark's driver)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from seriatim.consumer.commits import OVERDUE
from seriatim.consumer.core.view import ChainView, Grant, Place
from seriatim.consumer.loop import LoopThread, weakly
from seriatim.consumer.reader import CLOSE_TIMEOUT_S, Reader
from seriatim.consumer.session import ReaderSession, ReaderSettings
from seriatim.protocol import lifecycle, log
from seriatim.protocol.callbacks import call_back
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import (
    DeadlineOver,
    Fenced,
    InvalidArgument,
    NotElected,
    OlderGeneration,
    SeriatimError,
    copied,
)
from seriatim.protocol.flag import Waking
from seriatim.protocol.names import Generation, Offset, SubscriptionId, Token
from seriatim.protocol.timeouts import check_number

_log = log.logger("consumer")
_COMMIT_EVERY_S, _COMMIT_TIMEOUT_S = 0.2, 5.0
"""How often what was asked for is committed at most, and how long before it is looked at anew: more may be asked for by then."""


@dataclass(frozen=True, slots=True)
class Term:
    """What an elected subscriber works under. `cursor_offset`: all below it was committed when the term began."""

    subscription_id: SubscriptionId
    generation: Generation
    token: Token
    cursor_offset: Offset

    @property
    def fence(self) -> int:
        """Rises from term to term under one name: tokens begin anew where a subscription was deleted and made again, ids don't."""
        return self.subscription_id << 32 | self.token


class Subscriber(Reader):
    """Stands for election as a subscription's reader, without reading.

    `term` is there while elected; by its own clock it ends before the session can (H8). `on_elected(term)` and
    `on_deposed()` are called on another thread and must return quickly: what would wait there raises InvalidArgument, and what they
    raise is logged. A context manager; opening raises Unreachable, UnknownQueue, UnknownSubscription. A process forked from the one
    that opened it has no term, as with a `Consumer`.
    """

    def __init__(
        self,
        coordinators: str | Iterable[str] | None,
        queue: str,
        subscription: str = "default",
        *,
        start: str | int = "earliest",
        create: bool = True,
        session_timeout_s: float = 4.0,
        connect_timeout_s: float = 10.0,
        on_elected: Callable[[Term], object] | None = None,
        on_deposed: Callable[[], object] | None = None,
        name: str = "",
    ) -> None:
        super().__init__(
            coordinators,
            ReaderSettings(queue, subscription, str(start), create, session_timeout_s, connect_timeout_s, name),
        )
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._woken = Waking()  # when something has changed; and no lock, as in HandOver
        self._term: Term | None = None
        self._told: Term | None = None  # the application
        self._valid_until_s = 0.0
        self._error: SeriatimError | None = None
        self._asked: tuple[Offset, Term] | None = None
        self._is_asked = asyncio.Event()  # on the loop
        lifecycle.call_in_child(self, Subscriber._leave_to_parent)

    def open(self) -> Self:
        """Connect, and stand for election. Raises as `term`."""
        if self._error is not None:
            raise copied(self._error)
        if self._thread is None:
            thread = LoopThread(f"seriatim-subscriber-{self.queue}")
            try:
                thread.run(self._start())
            except BaseException:
                thread.end(self._stop(), CLOSE_TIMEOUT_S, self._leave)
                raise
            self._opened_on(thread)
        return self

    def close(self) -> None:
        """Give the election node back."""
        thread = self._thread
        if thread is None:
            return
        thread.check_may_wait()
        self._thread = None
        thread.end(self._stop(), 2 * CLOSE_TIMEOUT_S, self._leave)

    def _leave_to_parent(self) -> None:
        """In a process that was forked from the one that is elected: the term, and its token, stay there."""
        if self._thread is not None:
            self._thread = self._session = None
            self._error = InvalidArgument(
                "the subscriber was opened before a fork, and is elected in the parent only: start processes by spawn, and make one there"
            )

    @property
    def term(self) -> Term | None:
        """Token, generation and cursor while elected. Raises what can't be mended, such as UnknownSubscription."""
        term = self._present()
        if term is not None:
            self._told = term
        return term

    def _present(self) -> Term | None:
        """See `term`; nobody is told."""
        if self._error is not None:
            raise copied(self._error)
        return self._term if boottime_s() < self._valid_until_s else None

    @property
    def queue_id(self) -> int:
        """Of the queue; 0 before the first term."""
        view = None if self._session is None else self._session.view
        return 0 if view is None else view.queue_id

    @property
    def queue_created_at_ms(self) -> int:
        """When the queue was made; 0 before the first term."""
        view = None if self._session is None else self._session.view
        return 0 if view is None else view.created_at_ms

    @property
    def waiting_for(self) -> str:
        """What keeps it from being elected, for a person."""
        return "" if self._session is None else self._session.waiting_for

    def wait_elected(self, timeout_s: float | None = None) -> Term:
        """Wait to be elected. Raises DeadlineOver, InvalidArgument where it isn't open, or is closed meanwhile, and as `term`."""
        deadline_s = None
        if timeout_s is not None:
            check_number("timeout_s", timeout_s)
            deadline_s = boottime_s() + timeout_s
        while (term := self.term) is None:
            if self._thread is None:
                raise InvalidArgument("the subscriber isn't open: nobody stands for election")
            left_s = 1.0 if deadline_s is None else deadline_s - boottime_s()
            if left_s <= 0:
                raise DeadlineOver(f"not elected in {timeout_s} s: {self.waiting_for}")
            self._woken.wait(min(1.0, left_s))
        return term

    def commit(self, offset: int, *, term: Term | None = None, timeout_s: float = 30.0) -> None:
        """Commit everything below `offset`, and wait until both members have it.

        `term`: in which that was read; None: the one that was told last, by `term`, `wait_elected` or `on_elected`. Raises Fenced
        or NotElected where another reader is elected, or was since, OlderGeneration after a seek, DeadlineOver, InvalidArgument where
        the offset is no longer kept, or beyond what there is.
        """
        present, thread, session = self._elected()
        if term is None:
            term = self._told = self._told or present
        thread.run(self._commit(session, Offset(offset), term), timeout_s, OVERDUE)

    def ask_commit(self, offset: int, *, term: Term) -> None:
        """Commit everything below `offset` some time soon, again and again until it is done, or `term` is over. Only what was asked last counts."""
        thread = self._thread
        if thread is not None:
            thread.tell(self._ask, Offset(offset), term)

    def seek(self, offset: int, *, timeout_s: float = 30.0) -> None:
        """Move the subscription to `offset`, and wait for the term that begins there.

        Raises NotElected, InvalidArgument where the offset is no longer kept, or beyond what there is, and after `timeout_s` as `Consumer.seek`.
        """
        check_number("timeout_s", timeout_s)
        _, thread, session = self._elected()
        thread.run(session.seek(str(offset), timeout_s), timeout_s + 1)

    def _elected(self) -> tuple[Term, LoopThread, ReaderSession]:
        """The present term, and what it is served by. Raises NotElected, and as `term`."""
        present, thread, session = self._present(), self._thread, self._session
        if present is None or thread is None or session is None:
            raise NotElected("this subscriber isn't elected", queue=self.queue)
        return present, thread, session

    async def _commit(self, session: ReaderSession, offset: Offset, term: Term) -> None:
        """The caller may have read further than this view shows: then the offset is in a later link than it seems."""
        self._check(term)
        view = session.view
        if view is None:
            raise NotElected("this subscriber isn't elected")
        if _offset(view, view.place_of(offset)) < offset:
            view = await session.look()
        while True:
            place = view.place_of(offset)
            self._check(term)
            try:
                await session.commit(place)
            except InvalidArgument:
                view = await session.look()
                if view.place_of(offset) == place:
                    raise
            else:
                view = session.view or view
                if offset < view.earliest or view.place_of(offset) <= place:
                    return

    def _check(self, term: Term) -> None:
        """Raises OlderGeneration, Fenced or NotElected where `term` isn't the present one."""
        present = self._term
        if present is None:
            raise NotElected("this subscriber isn't elected", queue=self.queue)
        if present.generation != term.generation:
            raise OlderGeneration("the subscription was sought: the cursor is elsewhere now", queue=self.queue)
        if present.fence != term.fence:
            raise Fenced("what was read is of an earlier term, and will be read again", queue=self.queue)

    # ---- on the loop

    async def _start(self) -> None:
        session = ReaderSession(
            self._coordinators,
            self._settings,
            on_grant=weakly(self._granted),
            on_lease=weakly(self._leased),
            on_end=weakly(self._ended),
            on_failure=weakly(self._failed),
        )
        await self._stand(session)
        commit = partial(weakly(self._commit_asked), session)
        self._tasks.append(asyncio.create_task(_repeatedly(self._is_asked, commit)))

    def _ask(self, offset: Offset, term: Term) -> None:
        self._asked = offset, term
        self._is_asked.set()

    async def _commit_asked(self, session: ReaderSession) -> None:
        if self._asked is not None:
            offset, term = self._asked
            try:
                async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                    await self._commit(session, offset, term)
            except (Fenced, NotElected, OlderGeneration):
                pass  # if its term goes on after all, `_granted` says so
            except (SeriatimError, TimeoutError) as error:
                _log.debug("not committed yet", queue=self.queue, offset=offset, reason=error)
                self._is_asked.set()

    def _granted(self, grant: Grant, place: Place) -> None:
        view = None if self._session is None else self._session.view
        offset = Offset(0) if view is None else _offset(view, place)
        term = Term(grant.subscription_id, grant.generation, grant.token, offset)
        self._term = term
        self._is_asked.set()
        self._woken.wake()
        if self._on_elected is not None:
            self._told = term
        call_back(_log, self._on_elected, term)

    def _leased(self, valid_until_s: float) -> None:
        self._valid_until_s = valid_until_s
        self._woken.wake()

    def _ended(self) -> None:
        self._term = None
        self._woken.wake()
        call_back(_log, self._on_deposed)

    def _failed(self, error: SeriatimError) -> None:
        self._error = error
        self._woken.wake()


async def _repeatedly(is_asked: asyncio.Event, commit: Callable[[], Coroutine[Any, Any, None] | None]) -> None:
    while True:
        await is_asked.wait()
        is_asked.clear()
        committing = commit()
        if committing is not None:
            await committing
        del committing  # which has the subscriber
        await asyncio.sleep(_COMMIT_EVERY_S)


def _offset(view: ChainView, place: Place) -> Offset:
    """Offset of a place; in a link whose base isn't known yet, or that isn't kept any more, the earliest one kept."""
    found = view.offset_of(place)
    return view.earliest if found is None else found
