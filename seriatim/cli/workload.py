"""A sender and a reader as applications have them, in processes of their own, that report when what happened.

`seriatim bench failover` starts them (`Instance`) and reads their reports; each process runs `send` or `read` below.
A report is a line on standard output: a word, then CLOCK_MONOTONIC in seconds, which all processes of a machine share,
then a figure.

    acknowledged T LATENCY_S    a record was acknowledged at T, so long after it was handed over
    delivered T COUNT           the reader was given so many records at T
    waiting T 0                 the sender is connected, and stands by
    sending T 0                 the sender was elected
    lost T COUNT                so many records ended as unknown, because the sender was deposed or closed
    ended T COUNT               the process leaves by itself; so many records were sent, or read
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from seriatim.protocol.errors import DeadlineOver, NotElected, OutcomeUnknown, SeriatimError, Unreachable, Waiting

if TYPE_CHECKING:
    from seriatim.producer import Handle, Producer

_STAND_S = 0.2
_POLL_S = 0.2
_POLL_RECORDS = 1000
_COMMIT_MS = 200
_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What an instance does. `rate`: records a second; `subscription`: of a reader."""

    addresses: str
    queue: str
    size_bytes: int
    rate: float
    session_timeout_s: float
    subscription: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One line of an instance. `figure` as the module tells."""

    what: str
    at_s: float
    figure: float


class Instance:
    """A process that sends or reads. Its reports are collected by a thread of their own.

    The process ends by itself when whoever started it is gone: its standard input ends then.
    """

    def __init__(self, kind: str, workload: Workload) -> None:
        """`kind`: send or read."""
        self.reports: list[Report] = []
        arguments = (
            kind, workload.addresses, workload.queue, str(workload.size_bytes), str(workload.rate),
            str(workload.session_timeout_s), workload.subscription,
        )  # fmt: skip
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", __name__, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._collecting = threading.Thread(target=self._collect, name=f"reports of {kind}", daemon=True)
        self._collecting.start()

    def _collect(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                what, at_s, figure = line.split()
                self.reports.append(Report(what, float(at_s), float(figure)))

    def times_s(self, what: str, since_s: float = 0.0) -> list[float]:
        """When this was reported, from `since_s` on, in order."""
        found: list[float] = []
        for report in reversed(list(self.reports)):
            if report.at_s < since_s:
                break
            if report.what == what:
                found.append(report.at_s)
        found.reverse()
        return found

    def total(self, what: str) -> float:
        """Sum of the figures of such reports."""
        return sum(report.figure for report in list(self.reports) if report.what == what)

    def wait_for(self, what: str, timeout_s: float) -> None:
        """Wait for such a report. Raises DeadlineOver, and Unreachable where the process ended."""
        deadline_s = time.monotonic() + timeout_s
        while not self.times_s(what):
            if self._process.poll() is not None:
                raise Unreachable(f"a process of the measurement ended with status {self._process.returncode}")
            if time.monotonic() > deadline_s:
                raise DeadlineOver(f"no {what!r} from a process of the measurement within {timeout_s:g} s")
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """As an operator, or an accident, would."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End it as an application ends by itself, and wait until all its reports are read."""
        with self._process:  # which closes its pipes
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._collecting.join(_CLOSE_S)


# ---- inside the process ------------------------------------------------------------------------------------------


def _report(what: str, figure: float) -> None:
    """One write, so that reports of several threads don't mix."""
    os.write(1, f"{what} {time.monotonic():.6f} {figure:.6f}\n".encode())


def send(workload: Workload, stopping: threading.Event) -> None:
    """Send at a steady rate while elected, stand by otherwise; close the producer when told to stop."""
    from seriatim.producer import Producer

    sent = 0
    producer = Producer(workload.addresses, workload.queue, session_timeout_s=workload.session_timeout_s)
    try:
        while not stopping.is_set():
            try:
                producer.wait_until_elected(_STAND_S)
            except (NotElected, Waiting, Unreachable) as error:
                if error.message.startswith("standing by"):
                    _report("waiting", 0)
                continue
            _report("sending", 0)
            for _ in _sent_steadily(producer, workload, stopping):
                sent += 1
    finally:
        with suppress(OutcomeUnknown):  # each such record was reported
            producer.close()
        _report("ended", sent)


def _sent_steadily(producer: Producer, workload: Workload, stopping: threading.Event) -> Iterator[None]:
    """Sends, and yields for each record sent, until told to stop or deposed."""
    value = os.urandom(workload.size_bytes)
    interval_s = 1 / workload.rate
    started_s = time.monotonic()
    sent = 0
    while not stopping.is_set() and producer.elected is not None:
        due = int((time.monotonic() - started_s) / interval_s) + 1
        while sent < due:
            try:
                handle = producer.send(value)
            except NotElected:
                return
            handle.add_done_callback(_Ended(time.monotonic()))
            sent += 1
            yield
        time.sleep(max(0.0, started_s + sent * interval_s - time.monotonic()))


class _Ended:
    """Reports a record's end."""

    __slots__ = ("_sent_at_s",)

    def __init__(self, sent_at_s: float) -> None:
        self._sent_at_s = sent_at_s

    def __call__(self, handle: Handle) -> None:
        try:
            handle.result(0)
        except OutcomeUnknown:
            _report("lost", 1)
        else:
            _report("acknowledged", time.monotonic() - self._sent_at_s)


def read(workload: Workload, stopping: threading.Event) -> None:
    """Read from now on, commit regularly."""
    from seriatim.consumer import Consumer

    done = 0
    with Consumer(
        workload.addresses,
        workload.queue,
        workload.subscription,
        start="latest",
        auto_commit_ms=_COMMIT_MS,
        session_timeout_s=workload.session_timeout_s,
    ) as consumer:
        while not stopping.is_set():
            records = consumer.poll(_POLL_RECORDS, _POLL_S)
            if records:
                _report("delivered", len(records))
                done += len(records)
    _report("ended", done)


def main(arguments: list[str]) -> int:
    """Run one instance until SIGTERM, or until whoever started it is gone."""
    kind, addresses, queue, size, rate, session_timeout_s, subscription = arguments
    workload = Workload(addresses, queue, int(size), float(rate), float(session_timeout_s), subscription)
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    def follow_starter() -> None:
        sys.stdin.read()
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the starter ends its own
    threading.Thread(target=follow_starter, daemon=True).start()
    try:
        (send if kind == "send" else read)(workload, stopping)
    except SeriatimError as error:
        print(f"{kind} failed: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
