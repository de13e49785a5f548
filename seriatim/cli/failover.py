"""Failover, measured: records at a steady rate, the current master killed again and again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from seriatim.cli import coordinators
from seriatim.cli.measurement import milliseconds, outage_s, percentile, throughput
from seriatim.cli.views import open_link
from seriatim.producer import Handle, Producer
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, SeriatimError, Waiting, WorldError

_LOOK_EVERY_S = 0.1
_SETTLE_S = 1.0
_RETURN_TIMEOUT_S = 90.0


class SteadySender:
    """Sends records at a steady rate on a thread of its own, and notes when each was acknowledged."""

    def __init__(self, producer: Producer, size_bytes: int, rate: float) -> None:
        """`rate`: records a second."""
        self.sent = 0
        self.acknowledged_at_s: list[float] = []
        self.latencies_s: list[float] = []
        self.failure: SeriatimError | None = None
        self._producer = producer
        self._value = os.urandom(size_bytes)
        self._interval_s = 1 / rate
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steady sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and wait for what is on its way. Raises what sending failed with."""
        self._stopping.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        self._producer.flush(60)

    def _run(self) -> None:
        started_s = time.perf_counter()
        try:
            while not self._stopping.is_set():
                due = int((time.perf_counter() - started_s) / self._interval_s) + 1
                while self.sent < due:
                    self._send()
                time.sleep(max(0.0, started_s + self.sent * self._interval_s - time.perf_counter()))
        except SeriatimError as error:
            self.failure = error

    def _send(self) -> None:
        sent_at_s = time.perf_counter()

        def ended(handle: Handle) -> None:
            now_s = time.perf_counter()
            try:
                handle.result(0)
            except SeriatimError as error:
                self.failure = error
                return
            self.acknowledged_at_s.append(now_s)
            self.latencies_s.append(now_s - sent_at_s)

        self._producer.send(self._value).add_done_callback(ended)
        self.sent += 1


@dataclass(slots=True)
class FailoverRun:
    """One measurement. `pids`: file that maps members to process ids; None: switches are planned ones (`rotate`)."""

    addresses: str
    queue: str
    size_bytes: int
    rate: float
    harms: int
    pids: Path | None
    on_outage: Callable[[int, float], None]
    outages_s: list[float] = field(default_factory=list)

    def measure(self) -> dict[str, object]:
        """Run it; the figures. Raises InvalidArgument for a file that doesn't fit, Waiting where a group doesn't return."""
        with Producer(self.addresses, self.queue, linger_ms=0) as producer:
            producer.wait_until_elected(30)
            sender = SteadySender(producer, self.size_bytes, self.rate)
            sender.start()
            started_s = time.perf_counter()
            try:
                for number in range(1, self.harms + 1):
                    self._wait_for_acknowledgements(sender)
                    self.outages_s.append(self._one(sender))
                    self.on_outage(number, self.outages_s[-1])
            finally:
                sender.stop()
            seconds = time.perf_counter() - started_s
        return {
            "bench": "failover",
            "queue": self.queue,
            "size": self.size_bytes,
            "kind": "planned" if self.pids is None else "killed",
            "harms": self.harms,
            "records_sent": sender.sent,
            "records_acknowledged": len(sender.acknowledged_at_s),
            **throughput(len(sender.acknowledged_at_s), self.size_bytes, seconds, sender.latencies_s),
            "outage_p50_ms": milliseconds(percentile(self.outages_s, 50)),
            "outage_p99_ms": milliseconds(percentile(self.outages_s, 99)),
            "outage_max_ms": milliseconds(max(self.outages_s, default=None)),
            "outages_ms": [milliseconds(one) for one in self.outages_s],
        }

    def _one(self, sender: SteadySender) -> float:
        """Harm the current master, wait until all is as before; how long sending stood still."""
        group = self._describe_serving()
        harmed_at_s = time.perf_counter()
        if self.pids is None:
            coordinators.call(self.addresses, "RotateQueue", pb.QueueRequest(queue=self.queue), 30.0)
            name, pid = group.group, 0
        else:
            name = f"{group.group}-{group.master.member}"
            pid = _pid(self.pids, name)
            harmed_at_s = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
        self._wait_for_return(sender, group.group, name, pid, group.epoch)
        result = outage_s(sender.acknowledged_at_s, harmed_at_s, time.perf_counter())
        if result is None:
            raise Waiting(f"nothing was acknowledged any more after {name} was killed", reasons={name: "killed"})
        return result

    def _describe_serving(self) -> pb.LinkView:
        deadline_s = time.monotonic() + 10
        while True:
            view = coordinators.call(self.addresses, "DescribeQueue", pb.QueueRequest(queue=self.queue))
            link = open_link(view)
            if link is not None and link.state == "open":
                return link
            if time.monotonic() > deadline_s:
                raise Waiting(f"queue {self.queue} has no open link", reasons={self.queue: "no open link"})
            time.sleep(_LOOK_EVERY_S)

    def _wait_for_acknowledgements(self, sender: SteadySender) -> None:
        """Until records flow again at their ordinary rate, so that the next harm meets an ordinary state."""
        deadline_s = time.monotonic() + _RETURN_TIMEOUT_S
        while True:
            before = len(sender.acknowledged_at_s)
            time.sleep(_SETTLE_S)
            if len(sender.acknowledged_at_s) - before >= self.rate * _SETTLE_S * 0.8:
                return
            if sender.failure is not None:
                raise sender.failure
            if time.monotonic() > deadline_s:
                raise DeadlineOver(f"fewer than {self.rate:g} records a second are acknowledged; lower --rate")

    def _wait_for_return(self, sender: SteadySender, group: str, name: str, pid: int, epoch: int) -> None:
        """Until the killed process runs again, and its group is on the send list again."""
        deadline_s = time.monotonic() + _RETURN_TIMEOUT_S
        while sender.failure is None:
            time.sleep(_LOOK_EVERY_S)
            is_back = self.pids is None or _new_pid(self.pids, name) not in {None, pid}
            try:
                view = coordinators.call(self.addresses, "DescribeQueue", pb.QueueRequest(queue=self.queue))
            except WorldError:
                view = pb.QueueView()
            link = open_link(view)
            if is_back and link is not None and link.epoch > epoch and group in view.send_list:
                return
            if time.monotonic() > deadline_s:
                reasons = "; ".join(f"{wait.what}: {wait.reason}" for wait in view.waits) or "no reason is given"
                what = f"{name} was not started again" if not is_back else f"group {group} was not re-admitted"
                raise Waiting(f"{what} within {_RETURN_TIMEOUT_S:g} s: {reasons}", reasons={name: reasons})


def _new_pid(pids: Path, name: str) -> int | None:
    content = json.loads(pids.read_text())
    return content.get(name) if isinstance(content, dict) else None


def _pid(pids: Path, name: str) -> int:
    try:
        pid = _new_pid(pids, name)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"can't read {pids}: {error}") from error
    if not isinstance(pid, int):
        raise InvalidArgument(
            f"{pids} doesn't name the master {name}: is it the pids.json of this cluster's `seriatim up`?"
        )
    return pid
