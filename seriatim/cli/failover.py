"""Failover, measured: records at a steady rate through real processes, harmed in one way again and again.

A sender, a reader, and for faults of the sender a second one that stands by, run as processes of their own
(`workload`). After each harm everything is healed, and the next one waits until all is as before. Sending stood still
between two acknowledgements, reading between two deliveries.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from seriatim.cli import coordinators
from seriatim.cli.measurement import milliseconds, percentile, standstill, throughput
from seriatim.cli.views import member_name, open_link
from seriatim.cli.workload import Instance, Workload
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import DeadlineOver, InvalidArgument, UnknownSubscription, Waiting, WorldError

_LOOK_EVERY_S = 0.1
_SETTLE_S = 1.0
_SHOWS_WITHIN_S = 0.2
"""An outage begins within this time of its cause; what stands still later does so while things are healed."""
_HELD_S = 0.5
"""A paused process stays paused for so long after records flow again."""
_BEFORE_S = 2.0
"""So much before a harm tells what is ordinary."""
_RETURN_TIMEOUT_S = 90.0
_START_TIMEOUT_S = 60.0


class Fault(StrEnum):
    """What is done to the system. The first ones are done to a member of the open link's group."""

    MASTER_KILL = "master-kill"
    SLAVE_KILL = "slave-kill"
    MASTER_PAUSE = "master-pause"
    SLAVE_PAUSE = "slave-pause"
    ROTATE = "rotate"
    SENDER_KILL = "sender-kill"
    SENDER_STOP = "sender-stop"

    @property
    def needs_pids(self) -> bool:
        """Whether a broker's process is harmed."""
        return self in _OF_MEMBERS

    @property
    def needs_standby(self) -> bool:
        return self in {Fault.SENDER_KILL, Fault.SENDER_STOP}


_OF_MEMBERS = {
    Fault.MASTER_KILL: signal.SIGKILL,
    Fault.SLAVE_KILL: signal.SIGKILL,
    Fault.MASTER_PAUSE: signal.SIGSTOP,
    Fault.SLAVE_PAUSE: signal.SIGSTOP,
}


@dataclass(frozen=True, slots=True)
class Outage:
    """How long sending and reading stood still because of one harm, and the longest that sending did later; seconds."""

    sending_s: float
    reading_s: float
    later_s: float = 0.0


@dataclass(slots=True)
class FailoverRun:
    """One measurement. `pids`: file that maps members to process ids; needed for faults of members."""

    fault: Fault
    workload: Workload
    harms: int
    pids: Path | None
    on_outage: Callable[[], object]
    outages: list[Outage] = field(default_factory=list)
    senders: list[Instance] = field(default_factory=list)
    readers: list[Instance] = field(default_factory=list)

    def measure(self) -> dict[str, object]:
        """Run it; the figures. Raises InvalidArgument for a file that doesn't fit, Waiting where something doesn't return."""
        if self.fault.needs_pids and self.pids is None:
            raise InvalidArgument(f"{self.fault} needs the process ids of the members: --pids DIR/pids.json")
        started_s = time.monotonic()
        try:
            self._start_sender("sending")
            self.readers.append(Instance("read", self.workload))
            if self.fault.needs_standby:
                self._start_sender("waiting")
            for _ in range(self.harms):
                self._wait_for_flow()
                self.outages.append(self._one())
                self.on_outage()
        finally:
            for instance in (*self.senders, *self.readers):
                instance.close()
            request = pb.SubscriptionRequest(queue=self.workload.queue, subscription=self.workload.subscription)
            with suppress(UnknownSubscription):  # what failed before there was a reader is what is to be told
                coordinators.call(self.workload.addresses, "DeleteSubscription", request)
        return self._figures(time.monotonic() - started_s)

    def _figures(self, seconds: float) -> dict[str, object]:
        latencies_s = [
            report.figure for sender in self.senders for report in sender.reports if report.what == "acknowledged"
        ]
        sending_s = [outage.sending_s for outage in self.outages]
        reading_s = [outage.reading_s for outage in self.outages]
        return {
            "bench": "failover",
            "queue": self.workload.queue,
            "size": self.workload.size_bytes,
            "fault": self.fault.value,
            "harms": self.harms,
            "rate": self.workload.rate,
            "session_timeout_s": self.workload.session_timeout_s,
            "records_sent": round(sum(sender.total("ended") for sender in self.senders)),
            "records_acknowledged": len(latencies_s),
            "records_unknown": round(sum(sender.total("lost") for sender in self.senders)),
            "records_read": round(sum(reader.total("delivered") for reader in self.readers)),
            **throughput(len(latencies_s), self.workload.size_bytes, seconds, latencies_s),
            "outage_p50_ms": milliseconds(percentile(sending_s, 50)),
            "outage_p99_ms": milliseconds(percentile(sending_s, 99)),
            "outage_max_ms": milliseconds(max(sending_s, default=None)),
            "reading_outage_p50_ms": milliseconds(percentile(reading_s, 50)),
            "reading_outage_p99_ms": milliseconds(percentile(reading_s, 99)),
            "reading_outage_max_ms": milliseconds(max(reading_s, default=None)),
            "later_max_ms": milliseconds(max((outage.later_s for outage in self.outages), default=None)),
            "outages_ms": [milliseconds(one) for one in sending_s],
            "reading_outages_ms": [milliseconds(one) for one in reading_s],
        }

    def _start_sender(self, standing: str) -> None:
        sender = Instance("send", self.workload)
        self.senders.append(sender)
        sender.wait_for(standing, _START_TIMEOUT_S)

    # ---- one harm

    def _one(self) -> Outage:
        """Harm, heal, wait until all is as before; how long sending and reading stood still."""
        if self.fault.needs_standby:
            harmed_at_s = self._harm_sender()
        elif self.fault is Fault.ROTATE:
            harmed_at_s = self._rotate()
        else:
            harmed_at_s = self._harm_member(_OF_MEMBERS[self.fault])
        until_s = time.monotonic()
        since_s = harmed_at_s - _BEFORE_S
        sending = standstill(self._acknowledged_at_s(since_s), harmed_at_s, until_s, _SHOWS_WITHIN_S)
        reading = standstill(self._delivered_at_s(since_s), harmed_at_s, until_s, _SHOWS_WITHIN_S)
        if sending is None or reading is None:
            what = "acknowledged" if sending is None else "read"
            raise Waiting(f"nothing was {what} any more after {self.fault}", reasons={self.fault: "nothing flows"})
        return Outage(sending.shown_s, reading.shown_s, sending.later_s)

    def _harm_sender(self) -> float:
        """Kill the elected sender, or tell it to stop; another one stands by afterwards."""
        elected = self.senders[-2]
        harmed_at_s = time.monotonic()
        elected.signal(signal.SIGKILL if self.fault is Fault.SENDER_KILL else signal.SIGTERM)
        self._wait_for_flow_after(harmed_at_s)
        self._start_sender("waiting")
        return harmed_at_s

    def _rotate(self) -> float:
        before = self._describe_serving()
        harmed_at_s = time.monotonic()
        coordinators.call(self.workload.addresses, "RotateQueue", pb.QueueRequest(queue=self.workload.queue), 30.0)
        self._wait_for_return(before, "")
        return harmed_at_s

    def _harm_member(self, number: signal.Signals) -> float:
        before = self._describe_serving()
        side = before.slave if self.fault in {Fault.SLAVE_KILL, Fault.SLAVE_PAUSE} else before.master
        name = member_name(side)
        pid = self._pid(side)
        harmed_at_s = time.monotonic()
        os.kill(pid, number)
        if number is signal.SIGSTOP:
            try:
                self._wait_for_flow_after(harmed_at_s)
                time.sleep(_HELD_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            self._wait_for_return(before, "")
        else:
            self._wait_for_return(before, name, pid)
        return harmed_at_s

    # ---- what is seen

    def _acknowledged_at_s(self, since_s: float) -> list[float]:
        return sorted(at_s for sender in self.senders for at_s in sender.times_s("acknowledged", since_s))

    def _delivered_at_s(self, since_s: float) -> list[float]:
        return sorted(at_s for reader in self.readers for at_s in reader.times_s("delivered", since_s))

    def _describe_serving(self) -> pb.LinkView:
        deadline_s = time.monotonic() + 10
        while True:
            with suppress(WorldError):  # asked again
                link = open_link(self._view())
                if link is not None and link.state == "open":
                    return link
            if time.monotonic() > deadline_s:
                queue = self.workload.queue
                raise Waiting(f"queue {queue} has no open link", reasons={queue: "no open link"})
            time.sleep(_LOOK_EVERY_S)

    def _view(self) -> pb.QueueView:
        request = pb.QueueRequest(queue=self.workload.queue)
        view: pb.QueueView = coordinators.call(self.workload.addresses, "DescribeQueue", request)
        return view

    def _wait_for_flow(self) -> None:
        """Until records flow at their ordinary rate, to the reader too, so that the next harm meets an ordinary state."""
        deadline_s = time.monotonic() + _RETURN_TIMEOUT_S
        wanted = self.workload.rate * _SETTLE_S * 0.8
        while True:
            since_s = time.monotonic()
            time.sleep(_SETTLE_S)
            is_sending = len(self._acknowledged_at_s(since_s)) >= wanted
            if is_sending and _is_even(self._delivered_at_s(since_s)):
                return
            if time.monotonic() > deadline_s:
                raise DeadlineOver(f"fewer than {self.workload.rate:g} records a second pass; lower --rate")

    def _wait_for_flow_after(self, harmed_at_s: float) -> None:
        """Until records are acknowledged and read again, behind a silence in both that began with the harm."""
        deadline_s = harmed_at_s + _RETURN_TIMEOUT_S
        while True:
            time.sleep(_LOOK_EVERY_S)
            now_s = time.monotonic()
            has_passed = now_s - harmed_at_s > 2 * _LOOK_EVERY_S
            times = (self._acknowledged_at_s(harmed_at_s), self._delivered_at_s(harmed_at_s))
            if has_passed and all(found and now_s - found[-1] < _LOOK_EVERY_S for found in times):
                return
            if now_s > deadline_s:
                raise Waiting(f"records don't flow after {self.fault}", reasons={self.fault: "nothing flows"})

    def _wait_for_return(self, before: pb.LinkView, name: str, pid: int = 0) -> None:
        """Until the group that served is on the send list again; `name`, `pid`: a process that was killed runs again."""
        deadline_s = time.monotonic() + _RETURN_TIMEOUT_S
        while True:
            time.sleep(_LOOK_EVERY_S)
            is_back = not name or self._new_pid(name) not in {None, pid}
            try:
                view = self._view()
            except WorldError:
                view = pb.QueueView()
            link = open_link(view)
            if is_back and link is not None and link.epoch > before.epoch and before.group in view.send_list:
                return
            if time.monotonic() > deadline_s:
                reasons = "; ".join(f"{wait.what}: {wait.reason}" for wait in view.waits) or "no reason is given"
                what = f"group {before.group} was not re-admitted" if is_back else f"{name} was not started again"
                raise Waiting(f"{what} within {_RETURN_TIMEOUT_S:g} s: {reasons}", reasons={before.group: reasons})

    def _new_pid(self, name: str) -> int | None:
        content = json.loads(self.pids.read_text()) if self.pids is not None else None
        return content.get(name) if isinstance(content, dict) else None

    def _pid(self, side: pb.LinkMember) -> int:
        """Of a member. Raises InvalidArgument where the file names none, or a process that isn't it: one of before, whose number another has by now."""
        name = member_name(side)
        try:
            pid = self._new_pid(name)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"can't read {self.pids}: {error}") from error
        if isinstance(pid, int) and {side.group, side.member, side.address} <= _arguments(pid):
            return pid
        raise InvalidArgument(
            f"{self.pids} doesn't name the member {name}'s process: is it the pids.json of this cluster's `seriatim up`?"
        )


def _arguments(pid: int) -> set[str]:
    """Of a process, and the empty text; none of one that is gone."""
    try:
        return set(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return set()


def _is_even(times_s: list[float]) -> bool:
    """Whether something came all the time: no silence is longer than a tenth of a second."""
    return len(times_s) > 1 and max(later - earlier for earlier, later in pairwise(times_s)) < 0.1
