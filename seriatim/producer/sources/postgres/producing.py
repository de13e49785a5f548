"""The producer library as a capture's sender."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Final, NamedTuple

from seriatim.producer.client import Producer
from seriatim.producer.handle import Handle
from seriatim.producer.loop import Elected
from seriatim.producer.sources.postgres.errors import ResumePointUnknown
from seriatim.producer.sources.postgres.sender import Deposed
from seriatim.protocol.errors import DeadlineOver, NotElected, OutcomeUnknown, Unreachable, Waiting

_log = logging.getLogger(__name__)
_POLL_S: Final = 0.2


class _Sent(NamedTuple):
    """The last record so far that one batch holds of one source: it is acknowledged with all before it in the batch."""

    source: str
    seq: int
    handle: Handle


class CaptureSender:
    """An `OrderedSender` over a `Producer`, which it neither makes nor closes.

    Memory: one entry for each batch in flight, and those are bounded by the producer's `max_buffer_bytes`. A producer
    with `max_block_s` of about a second lets a blocked `send` notice `give_up` as soon; the send goes on blocking
    while the queue takes nothing, whatever it is.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._elected: Elected | None = None
        self._sent: deque[_Sent] = deque()
        self._acknowledged: dict[str, int] = {}
        self._given_up = threading.Event()

    def wait_until_elected(self, timeout_s: float) -> bool:
        """See OrderedSender.

        Raises:
            SeriatimError: the producer has stopped and can't be elected any more (UnknownQueue, closed).
        """
        started_s = time.monotonic()
        try:
            elected = self._producer.wait_until_elected(timeout_s)
        except (NotElected, Waiting, Unreachable, DeadlineOver) as error:
            if time.monotonic() - started_s < timeout_s:
                raise  # it didn't wait: the producer has stopped for good
            _log.debug("capture stands by reason=%s", error.message)
            return False
        if self._elected is None or self._elected.token != elected.token:
            self._elected = elected
            self._sent.clear()
            self._acknowledged.clear()
        return True

    def is_elected(self) -> bool:
        """See OrderedSender."""
        return self._elected is not None and self._producer.is_elected and not self._given_up.is_set()

    def give_up(self) -> None:
        """See OrderedSender."""
        self._given_up.set()

    def resume_point(self) -> dict[str, int]:
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
            raise ResumePointUnknown(f"queue {self._producer.queue}: nobody can tell yet which changes it holds")
        while self._sent:
            elected = self._present()
            self._take_acknowledged(_POLL_S)
        point = dict(elected.resume_point or {})
        for source, seq in self._acknowledged.items():
            point[source] = max(seq, point.get(source, 0))
        return point

    def send(self, value: bytes, key: bytes | None, seq: int, source: str) -> None:
        """See OrderedSender."""
        handle = self._hand_over(value, key, seq, source)
        last = self._sent[-1] if self._sent else None
        if last is not None and last.handle.batch is handle.batch and last.source == source:
            self._sent.pop()
        self._sent.append(_Sent(source, seq, handle))
        if self._sent[0].handle.done():
            self._take_acknowledged(0)

    def _hand_over(self, value: bytes, key: bytes | None, seq: int, source: str) -> Handle:
        while True:
            self._present()
            try:
                return self._producer.send(value, key, seq=seq, source=source)
            except (NotElected, OutcomeUnknown) as error:
                raise Deposed from error
            except (DeadlineOver, Waiting, Unreachable) as error:
                _log.warning("capture waits queue=%s reason=%s", self._producer.queue, error.message)

    def acknowledged(self, source: str) -> int:
        """See OrderedSender."""
        self._present()
        self._take_acknowledged(0)
        return self._acknowledged.get(source, 0)

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
            self._sent.popleft()
            timeout_s = 0
