"""Kills what the plan says, and starts it again."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from seriatim.cli.demo.errors import DemoFailed
from seriatim.cli.demo.plan import FaultKind, PlannedFault
from seriatim.cli.demo.stage import CAPTURES, REPLAY, Stage
from seriatim.cli.demo.watch import Watch
from seriatim.cli.embedded.errors import EmbeddedError
from seriatim.cli.views import member_name
from seriatim.protocol.errors import SeriatimError

_CLOSE_BEFORE_S = 0.5
_CLOSE_AFTER_S = 7.0
_PATIENCE_S = 10.0
_REST_S = 0.5
"""How long what was killed stays down before it is started again."""


@dataclass(frozen=True, slots=True)
class Strike:
    """`at_s`: on the clock of `time.monotonic`."""

    kind: FaultKind
    target: str
    at_s: float


class Nemesis:
    """A context manager around the load; `tick` it often. Starting again happens on a thread of its own."""

    def __init__(self, stage: Stage, watch: Watch, faults: tuple[PlannedFault, ...]) -> None:
        self._stage = stage
        self._watch = watch
        self._faults = list(faults)
        self._began_s = time.monotonic()
        self._restarting = ThreadPoolExecutor(1, thread_name_prefix="demo nemesis")
        self._restarts: list[tuple[Strike, Future[None]]] = []
        self.strikes: list[Strike] = []

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._restarting.shutdown(wait=True, cancel_futures=True)

    @property
    def down(self) -> set[str]:
        """What was killed and isn't there again yet."""
        return {strike.target for strike, restart in self._restarts if not restart.done()}

    def tick(self) -> Strike | None:
        """Kill what is due; answers what was killed. Raises `DemoFailed` where nothing fits, or a restart failed."""
        for strike, restart in self._restarts:
            if restart.done() and (error := restart.exception()) is not None:
                raise DemoFailed(f"{strike.target} couldn't be started again: {error}") from error
        since_s = time.monotonic() - self._began_s
        due_s = self._faults[0].at_s if self._faults else None
        struck_s = self.strikes[-1].at_s - self._began_s if self.strikes else None
        self._watch.is_close = (due_s is not None and since_s >= due_s - _CLOSE_BEFORE_S) or (
            struck_s is not None and since_s <= struck_s + _CLOSE_AFTER_S
        )
        if due_s is None or since_s < due_s:
            return None
        kind = self._faults[0].kind
        problem = ""
        try:
            target = self._target(kind)
        except SeriatimError as error:  # a busy machine, or a fault of before: nobody answers just now
            target, problem = None, f" ({error})"
        if target is None or target in self.down:
            if since_s > due_s + _PATIENCE_S:
                raise DemoFailed(f"found no {kind} to kill for {_PATIENCE_S:g} s{problem}")
            return None
        del self._faults[0]
        return self._strike(kind, target)

    def finish(self) -> None:
        """Wait until everything is there again. Raises `DemoFailed`."""
        self._watch.is_close = False
        for strike, restart in self._restarts:
            try:
                restart.result(60)
            except (EmbeddedError, TimeoutError) as error:
                raise DemoFailed(f"{strike.target} couldn't be started again: {error}") from error

    # ---- parts

    def _strike(self, kind: FaultKind, target: str) -> Strike:
        strike = Strike(kind, target, time.monotonic())
        self._stage.supervisor.kill(target)
        self.strikes.append(strike)
        self._restarts.append((strike, self._restarting.submit(self._start_again, strike)))
        return strike

    def _start_again(self, strike: Strike) -> None:
        time.sleep(_REST_S)
        self._stage.restart(strike.kind, strike.target)

    def _target(self, kind: FaultKind) -> str | None:
        """Name of the process to kill; None where there is none just now."""
        match kind:
            case FaultKind.MASTER:
                links = self._watch.describe().links
                return member_name(links[-1].master) if links else None
            case FaultKind.CAPTURE:
                # An election node is named for who made it, and ends with a number.
                sender = self._watch.describe().sender.rpartition("-")[0]
                return sender if sender in CAPTURES else None
            case FaultKind.REPLAY:
                return REPLAY if self._stage.supervisor.pid(REPLAY) is not None else None
            case FaultKind.COORDINATOR:
                elected = self._watch.elected_coordinator()
                cluster = self._stage.cluster
                return next((name for name in cluster.coordinator_names if cluster.address(name) == elected), None)
