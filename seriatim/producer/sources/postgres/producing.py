"""The producer library as a capture's sender."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from seriatim.producer.client import Producer
from seriatim.producer.core.first_answer import FirstAnswer
from seriatim.producer.handle import Handle
from seriatim.producer.sources.postgres.core.resume import Kept
from seriatim.producer.sources.postgres.errors import ResumePointUnknown
from seriatim.producer.sources.postgres.sender import Deposed
from seriatim.producer.terms import Elected
from seriatim.protocol import log
from seriatim.protocol.errors import DeadlineOver, NotElected, OutcomeUnknown, Unreachable, Waiting
from seriatim.protocol.marks import merged
from seriatim.protocol.names import Token

_log = log.logger("capture")
_POLL_S: Final = 0.2


class _Sent(NamedTuple):
    """The last record so far that one batch holds of one source: it is acknowledged with all before it in the batch."""

    source: str
    seq: int
    number: int  # among all records sent
    handle: Handle


class CaptureSender:
    """An `OrderedSender` over a `Producer`, which it neither makes nor closes.

    producer: one with `max_block_s` of about a second lets a blocked `send` notice `stop` as soon; the send goes on
        blocking while the queue takes nothing, whatever it is.
    on_elected: told the token of each term.
    on_waiting: told why nothing can be sent: once of each reason, until something is sent again.
    connect_timeout_s: `wait_until_elected` raises Unreachable where nobody has ever answered for so long; None: waits.

    Memory: one entry for each batch in flight, and those are bounded by the producer's `max_buffer_bytes`.
    """

    def __init__(
        self,
        producer: Producer,
        *,
        on_elected: Callable[[Token], None] = lambda _token: None,
        on_waiting: Callable[[str], None] = lambda _reason: None,
        connect_timeout_s: float | None = None,
    ) -> None:
        self.sent = 0
        """Records handed over, in all terms."""
        self._producer = producer
        self._on_elected = on_elected
        self._on_waiting = on_waiting
        self._first_answer = FirstAnswer(None if connect_timeout_s is None else time.monotonic() + connect_timeout_s)
        self._reasons: set[str] = set()
        self._ended = 0
        self._elected: Elected | None = None
        self._sent: deque[_Sent] = deque()
        self._acknowledged: dict[str, int] = {}
        self._is_stopped = False

    def wait_until_elected(self, timeout_s: float) -> bool:
        """See OrderedSender.

        Raises:
            SeriatimError: the producer has stopped and can't be elected any more (UnknownQueue, closed).
            Unreachable: nobody answered within `connect_timeout_s`.
        """
        try:
            elected = self._producer.wait_until_elected(timeout_s)
        except (NotElected, Waiting, Unreachable) as error:
            is_connected, now_s = self._producer.is_connected, time.monotonic()
            if self._first_answer.is_overdue(error, is_connected=is_connected, now_s=now_s):
                raise
            self._tell(error.message)
            return False
        self._first_answer.came()
        if self._elected is None or self._elected.token != elected.token:
            self._elected = elected
            self._ended = self.sent
            self._sent.clear()
            self._acknowledged.clear()
            self._reasons.clear()
            self._on_elected(elected.token)
        return True

    def is_elected(self) -> bool:
        """See OrderedSender."""
        return self._is_same_term() and not self._is_stopped

    def _is_same_term(self) -> bool:
        """Whether the term goes on that `wait_until_elected` told of last: of a later one this instance knows nothing yet."""
        known, present = self._elected, self._producer.elected
        return known is not None and present is not None and known.token == present.token

    def stand_again(self) -> None:
        """See OrderedSender."""
        self._producer.stand_again()

    def stop(self) -> None:
        """See OrderedSender."""
        self._is_stopped = True

    def kept(self) -> Kept:
        """See OrderedSender. What the election told, and what was acknowledged since.

        Raises:
            Deposed: no longer elected.
            ResumePointUnknown: the end of an earlier link is lost, so nobody can tell what the queue holds. An unknown
                point is not an empty one: that would send all again. This instance stands for election again, and the
                next election asks again.
        """
        elected = self._present()
        if elected.resume_point is None:
            self._producer.stand_again()
            problem = ResumePointUnknown(f"queue {self._producer.queue}: nobody can tell yet which changes it holds")
            self._tell(str(problem))
            raise problem
        while self._sent:
            elected = self._present()
            self._take_acknowledged(_POLL_S)
        point = merged(elected.resume_point or {}, self._acknowledged)
        return Kept(point, merged(elected.held, point), elected.given_up_from)

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        """See OrderedSender."""
        handle = self._hand_over(value, key, seq, source)
        last = self._sent[-1] if self._sent else None
        if last is not None and last.handle.batch is handle.batch and last.source == source:
            self._sent.pop()
        self.sent += 1
        self._sent.append(_Sent(source, seq, self.sent, handle))
        if self._sent[0].handle.done():
            self._take_acknowledged(0)

    def _hand_over(self, value: bytes, key: bytes | None, seq: int, source: str) -> Handle:
        while True:
            self._present()
            try:
                handle = self._producer.send(value, key, seq=seq, source=source)
            except (NotElected, OutcomeUnknown) as error:
                raise Deposed from error
            except (DeadlineOver, Waiting, Unreachable) as error:
                self._tell(error.message)
            else:
                self._reasons.clear()  # the same is news again
                return handle

    def acknowledged(self, source: str) -> int:
        """See OrderedSender. Also once it is stopped: what a capture has confirmed then, the next one needn't read again."""
        if not self._is_same_term():
            raise Deposed
        self._take_acknowledged(0)
        return self._acknowledged.get(source, 0)

    @property
    def unacknowledged(self) -> int:
        """Records of this term that aren't known to be acknowledged; of a batch in flight all count."""
        return self.sent - self._ended

    def _tell(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.info("capture waits", queue=self._producer.queue, reason=reason)
            self._on_waiting(reason)

    def _present(self) -> Elected:
        """The present term."""
        if self._elected is None or not self.is_elected():
            raise Deposed
        return self._elected

    def _take_acknowledged(self, timeout_s: float) -> None:
        """Take off the front what is acknowledged, waiting for the first of it at most this long."""
        while self._sent and (self._sent[0].handle.done() or timeout_s > 0):
            first = self._sent[0]
            try:
                first.handle.result(timeout_s)
            except DeadlineOver:
                return
            except (NotElected, OutcomeUnknown) as error:
                raise Deposed from error
            self._acknowledged[first.source] = max(first.seq, self._acknowledged.get(first.source, 0))
            self._ended = first.number
            self._sent.popleft()
            timeout_s = 0
