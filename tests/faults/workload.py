"""One process of the workload: a sender or a reader that keeps a history of its own.

    python -m tests.faults.workload sender COORDINATORS QUEUE NAME HISTORY RECORDS_PER_S
    python -m tests.faults.workload reader COORDINATORS QUEUE NAME HISTORY SUBSCRIPTION

Senders share one source, `log`, and its seqs: whoever is elected goes on behind the resume point, as with a database's
log. A record's value is a function of its seq. A sender writes *sent* before it sends and *acknowledged* after it was
told; a reader writes *delivered* before it asks for more, and so before anything is committed. SIGTERM ends both gently.
"""

from __future__ import annotations

import faulthandler
import os
import queue as queues
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from seriatim.consumer import Consumer
from seriatim.consumer.core.view import Place
from seriatim.consumer.session import Grant
from seriatim.producer import Handle, Producer
from seriatim.protocol import log
from seriatim.protocol.errors import DeadlineOver, NotElected, OutcomeUnknown, Unreachable, Waiting
from seriatim.protocol.flag import Waking
from tests.faults.history import Acknowledged, Delivered, Recorder, Resumed, Sent

SOURCE = "log"
SESSION_VARIABLE = "SERIATIM_WORKLOAD_SESSION_S"
SESSION_TIMEOUT_S = float(os.environ.get(SESSION_VARIABLE, "1.5"))
_STEP_S = 0.002
_MOST_AT_ONCE = 20
_FLUSH_S = 8.0
_ENDS_WITHIN_S = 40.0
_TELLS_WITHIN_S = 10.0


def value_of(seq: int) -> str:
    return f"{seq}:{seq * 7919 % 104729}"


class Stopping:
    """Whether SIGTERM asked to end. Who doesn't come to an end tells where it stands, in its log, before it is killed.

    By Python's own means first: faulthandler looks at threads that go on meanwhile, and may end the process by that.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._asked = Waking()
        threading.Thread(target=self._watch, daemon=True).start()
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, _number: int, _frame: object) -> None:
        self.is_asked = True
        self._asked.wake()
        faulthandler.dump_traceback_later(_ENDS_WITHIN_S + _TELLS_WITHIN_S)

    def _watch(self) -> None:
        self._asked.wait(None)
        time.sleep(_ENDS_WITHIN_S)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
        told = [
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
        ]
        os.write(sys.stderr.fileno(), "".join(told).encode())


class Sender:
    """Sends at a steady rate while elected; what it couldn't send on time is sent a little faster afterwards."""

    def __init__(self, coordinators: str, queue: str, name: str, history: Path, records_per_s: float) -> None:
        self._history = Recorder(history)
        self._interval_s = 1 / records_per_s
        self._due_at_s = 0.0  # of the next record
        self._acknowledged: queues.SimpleQueue[Acknowledged] = queues.SimpleQueue()
        self._producer = Producer(
            coordinators, queue, name, linger_ms=2, max_block_s=0.5, session_timeout_s=SESSION_TIMEOUT_S
        )
        self._token = 0
        self._next_seq = 0
        self._stored_seq = -1  # up to here a resume point told that all is stored

    def run(self, stopping: Stopping) -> None:
        while not stopping.is_asked:
            if self._is_elected():
                self._send_some()
            self._note()
        try:
            if self._producer.is_elected:
                self._producer.flush(_FLUSH_S)
        except (DeadlineOver, OutcomeUnknown):
            pass  # what isn't acknowledged isn't in the history either
        self._producer.abort()
        self._note()

    def _is_elected(self) -> bool:
        """Elected, and it is known where to go on."""
        try:
            elected = self._producer.wait_until_elected(0.3)
        except (NotElected, Waiting, Unreachable):
            return False
        if elected.token == self._token:
            return True
        if elected.resume_point is None:
            time.sleep(0.3)
            self._producer.stand_again()
            return False
        stored = elected.resume_point.get(SOURCE, -1)
        now_s = time.monotonic()
        if stored > self._stored_seq:
            self._history.write([Resumed(SOURCE, self._stored_seq + 1, stored, now_s)])
            self._stored_seq = stored
        self._token, self._next_seq, self._due_at_s = elected.token, stored + 1, now_s
        return True

    def _send_some(self) -> None:
        now_s = time.monotonic()
        due = min(_MOST_AT_ONCE, int((now_s - self._due_at_s) / self._interval_s) + 1)
        if due < 1:
            time.sleep(max(0.0, self._due_at_s - now_s))
            return
        self._due_at_s = max(self._due_at_s + due * self._interval_s, now_s - 1)
        seqs = range(self._next_seq, self._next_seq + due)
        self._history.write(Sent(SOURCE, seq, value_of(seq), now_s) for seq in seqs)
        for seq in seqs:
            try:
                handle = self._producer.send(value_of(seq).encode(), seq=seq, source=SOURCE)
            except (NotElected, Waiting, Unreachable, DeadlineOver):
                return
            handle.add_done_callback(self._ended)
            self._next_seq = seq + 1
        time.sleep(_STEP_S)

    def _ended(self, handle: Handle) -> None:
        try:
            end = handle.result(0)
        except OutcomeUnknown:
            return
        self._acknowledged.put(Acknowledged(SOURCE, end.seq, end.offset, time.monotonic()))

    def _note(self) -> None:
        events = []
        while not self._acknowledged.empty():
            events.append(self._acknowledged.get())
        if events:
            self._history.write(events)


class RecordingConsumer(Consumer):
    """Knows what an application can't tell: of which of its terms a record was, and of which generation a term."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.generations: dict[int, int] = {}

    def _granted(self, grant: Grant, place: Place) -> None:
        super()._granted(grant, place)
        self.generations[self._hand_over.term] = grant.generation

    @property
    def last_term(self) -> int:
        """Of the records that the last poll gave."""
        return self._handed_out.term


def read(coordinators: str, queue: str, name: str, history: Path, subscription: str, stopping: Stopping) -> None:
    recorder = Recorder(history)
    consumer = RecordingConsumer(
        coordinators, queue, subscription, session_timeout_s=SESSION_TIMEOUT_S, auto_commit_ms=50, name=name
    )
    run = time.monotonic_ns()
    with consumer:
        while not stopping.is_asked:
            records = consumer.poll(200, 0.2)
            if not records:
                continue
            now_s, term = time.monotonic(), consumer.last_term
            session, generation = f"{name}-{run}-{term}", consumer.generations[term]
            recorder.write(
                Delivered(subscription, session, one.offset, one.source, one.seq, one.value.decode(), now_s, generation)
                for one in records
            )


def main() -> None:
    kind, coordinators, queue, name, history, *rest = sys.argv[1:]
    stopping = Stopping()
    log.start_logging("INFO")
    if kind == "sender":
        Sender(coordinators, queue, name, Path(history), float(rest[0])).run(stopping)
    else:
        read(coordinators, queue, name, Path(history), rest[0], stopping)


if __name__ == "__main__":
    main()
