"""An asyncio loop in simulated time that runs the code of many processes, each on a host with a clock of its own.

Everything that runs belongs to a process: a callback inherits it from the callback that asked for it, a message brings that of
whom it is for. So a killed process simply never runs again, wherever it was, and a paused one finds all that came
meanwhile when it goes on. Time passes only when nothing is left to do at its present point.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal

PATIENCE_S = 30.0
"""So long a sender waits, when it closes, for what it has sent."""


class Host:
    """A machine: its name and address, and a clock that runs at `clock_rate` of the world's, `clock_offset_s` off."""

    def __init__(self, name: str, address: str, clock_rate: float = 1.0, clock_offset_s: float = 0.0) -> None:
        self.name = name
        self.address = address
        self.clock_rate = clock_rate
        self.clock_offset_s = clock_offset_s
        self.process: Process | None = None

    def local_s(self, world_s: float) -> float:
        return world_s * self.clock_rate + self.clock_offset_s

    def world_s(self, local_s: float) -> float:
        return (local_s - self.clock_offset_s) / self.clock_rate

    def __repr__(self) -> str:
        return self.name


class Process:
    """One life of a process. `steps_to_live`: killed when so many more of its steps have run; None: not.

    `is_stopping`: it was asked to end, as by SIGTERM, which `at_stop` tells it; it is started again `away_s` after its end.
    `patience_s`: how long a sender waits for what it has sent.
    """

    __slots__ = (
        "_kept_tasks", "at_stop", "away_s", "backlog", "host", "is_alive", "is_paused", "is_stopping", "patience_s", "steps_to_live",
        "tasks",
    )  # fmt: skip

    def __init__(self, host: Host) -> None:
        self.host = host
        self.is_alive = True
        self.is_paused = False
        self.backlog: list[_Due] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._kept_tasks = 32
        self.steps_to_live: int | None = None
        self.is_stopping = False
        self.at_stop: Callable[[], object] = lambda: None
        self.away_s = 0.0
        self.patience_s = PATIENCE_S

    def begins(self, task: asyncio.Task[Any]) -> None:
        """Know it until it is done and somebody has seen how."""
        self.tasks.append(task)
        if len(self.tasks) > self._kept_tasks:
            self.tasks = [one for one in self.tasks if not one.done() or _is_unseen(one)]
            self._kept_tasks = 2 * len(self.tasks) + 32

    def told_to_stop(self) -> None:
        """As a signal's handler, which goes by what is being done when the signal comes."""
        self.at_stop()

    def __repr__(self) -> str:
        return self.host.name


class Step:
    """What can be taken back until it is due; stands for asyncio's handles. `at_s`: when it is due, by the world's time."""

    __slots__ = ("at_s", "is_cancelled", "process")

    def __init__(self, process: Process | None, at_s: float) -> None:
        self.process = process
        self.at_s = at_s
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.at_s if self.process is None else self.process.host.local_s(self.at_s)


_Due = tuple[Callable[..., object], tuple[Any, ...], Process | None, Step | None]
"""A callback that is due, its arguments, whose it is, and what takes it back. A tuple: most of all time is steps."""
_Timer = tuple[float, int, Callable[..., object], tuple[Any, ...], Process | None, Step | None]
"""When it is due, its number among all, and what is due, as above."""

_push = heapq.heappush


class SimulatedTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set doesn't depend on where it lies in memory, so that a seed always runs the same way."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


_new_task, _begin_task = SimulatedTask.__new__, SimulatedTask.__init__
_CONTEXT: Final = contextvars.Context()
"""Of all tasks; each would have a copy."""


def _is_unseen(task: Any) -> bool:
    """Whether it failed and nobody has asked with what."""
    return bool(task._log_traceback)


class SimulatedEvent(asyncio.Event):
    """As asyncio's, of one loop, in half as many calls and a tenth of the memory: there are hundreds, and mostly one waits."""

    def __init__(self) -> None:
        self._value = False
        self._waiters: list[asyncio.Future[None]] = []  # type: ignore[assignment] # a deque there

    def set(self) -> None:
        if not self._value:
            self._value = True
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> Literal[True]:
        if not self._value:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        return True


class EndOfSteps(Exception):
    """The schedule used more steps than any sensible one does: something runs in a circle."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """See the module. `now_s`: the world's time. `steps`: how many have run."""

    def __init__(self, max_steps: int = 400_000) -> None:
        self.now_s = 1.0
        self.steps = 0
        self.process: Process | None = None
        self.on_kill: Callable[[Process], None] = lambda _: None
        self.problems: list[str] = []
        self._processes: list[Process] = []
        self.failure: Exception | None = None
        """Set by whoever judges: the schedule ends with it after the present step."""
        self.is_over = False
        self._max_steps = max_steps
        self._ready: deque[_Due] = deque()
        self._timers: list[_Timer] = []
        self._next_order = itertools.count().__next__
        self._next_task = itertools.count(1).__next__
        self.create_future = functools.partial(asyncio.Future, loop=self)

    # ---- what asyncio asks for

    def time(self) -> float:
        process = self.process
        if process is None:
            return self.now_s
        host = process.host
        return self.now_s * host.clock_rate + host.clock_offset_s

    def call_soon(self, callback: Any, *arguments: Any, context: contextvars.Context | None = None) -> Any:
        """Contexts aren't entered: nobody has a variable in one."""
        if context is not None:  # asyncio's own tasks and futures, which take nothing back
            self._ready.append((callback, arguments, self.process, None))
            return None
        step = Step(self.process, self.now_s)
        self._ready.append((callback, arguments, self.process, step))
        return step

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        del context
        process, now_s = self.process, self.now_s
        if process is None:
            return self.call_at(now_s + delay, callback, *arguments)
        host = process.host  # as `call_at` of `time()`, without the calls
        when = now_s * host.clock_rate + host.clock_offset_s + delay
        at_s = max((when - host.clock_offset_s) / host.clock_rate, now_s) + 1e-6
        step = Step(process, at_s)
        _push(self._timers, (at_s, self._next_order(), callback, arguments, process, step))
        return step

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        del context
        process, now_s = self.process, self.now_s
        if process is not None:
            host = process.host
            when = (when - host.clock_offset_s) / host.clock_rate  # `world_s`, without the call
        # Never early, whatever the two roundings made of it: a timer that is would be set again, and again.
        at_s = max(when, now_s) + 1e-6
        step = Step(process, at_s)
        _push(self._timers, (at_s, self._next_order(), callback, arguments, process, step))
        return step

    def create_task(
        self, coro: Any, *, name: str | None = "", context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: SimulatedTask = _new_task(SimulatedTask)
        task.number = self._next_task()
        _begin_task(task, coro, loop=self, name=name, context=context or _CONTEXT)
        process = self.process
        if process is not None:
            process.begins(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """At once, as the next step: no thread of anybody's runs beside the loop."""
        del executor
        future = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_soon(run)
        return future

    get_debug = bool
    """False; each new future asks, and so no call of ours is made."""

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_exception_handler(self, handler: Any) -> None:
        """Whatever a program would do with it, here it is a problem of the schedule."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.is_over or "never retrieved" in str(context.get("message")):
            return
        if "was destroyed" in str(context.get("message")):
            return
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's
        pass

    def close(self) -> None:
        pass

    # ---- what the world asks for

    def after(self, delay_s: float, process: Process | None, callback: Any, *arguments: Any) -> Step:
        """Run a callback as a step of `process` (None: of the world's own) in so many seconds of the world's time."""
        step = Step(process, self.now_s + delay_s)
        _push(self._timers, (step.at_s, self._next_order(), callback, arguments, process, step))
        return step

    def at(self, at_s: float, process: Process | None, callback: Any, *arguments: Any) -> None:
        """As `after`, at a time of the world, which isn't over; it can't be taken back."""
        _push(self._timers, (at_s, self._next_order(), callback, arguments, process, None))

    def start(self, process: Process, main: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Begin a process with this coroutine."""
        self._processes.append(process)
        before, self.process = self.process, process
        try:
            return self.create_task(main())
        finally:
            self.process = before

    def unseen(self) -> list[str]:
        """Tasks of the living processes that failed, and nobody looked: what they were to do isn't done any more.

        Python says that when it frees a task, which is too late here. To be asked where no step is due.
        """
        return [one for process in self._processes if process.is_alive for one in self.unseen_of(process)]

    def unseen_of(self, process: Process) -> list[str]:
        """As `unseen`, of one that ends."""
        return [
            f"{one.get_coro().__qualname__} of {process} failed and nobody knows: {one.exception()!r}"
            for one in process.tasks
            if _is_unseen(one)
        ]

    def resume(self, process: Process) -> None:
        """What came while the process was paused runs now, in the order in which it came."""
        process.is_paused = False
        backlog, process.backlog = process.backlog, []
        self._ready.extend(backlog)

    def run(self, until_s: float, is_done: Callable[[], bool] | None = None, look_every_s: float = 0.05) -> bool:
        """Until the world's time is `until_s`, or `is_done` holds, which is looked at from time to time."""
        asyncio._set_running_loop(self)
        ready, timers, next_look_s = self._ready, self._timers, self.now_s
        next_ready, pop, max_steps = ready.popleft, heapq.heappop, self._max_steps
        try:
            while True:
                if ready:
                    callback, arguments, process, step = next_ready()
                else:
                    if is_done is not None and self.now_s >= next_look_s:
                        if is_done():
                            return True
                        next_look_s = self.now_s + look_every_s
                    while timers and (step := timers[0][5]) is not None and step.is_cancelled:
                        pop(timers)
                    if not timers or timers[0][0] > until_s:
                        self.now_s = max(self.now_s, until_s)
                        return is_done is not None and is_done()
                    self.now_s, _, callback, arguments, process, step = pop(timers)
                if step is not None and step.is_cancelled:
                    continue
                if (
                    process is not None
                    and (process.is_paused or not process.is_alive or process.steps_to_live is not None)
                    and not self._may_run(process, (callback, arguments, process, step))
                ):
                    continue
                self.process = process
                self.steps += 1
                callback(*arguments)
                if self.failure is not None:
                    raise self.failure
                if self.steps > max_steps:
                    raise EndOfSteps(f"more than {self._max_steps} steps")
        finally:
            self.process = None
            asyncio._set_running_loop(None)

    def _may_run(self, process: Process, due: _Due) -> bool:
        """Of a process that is dead, paused, or soon killed."""
        if not process.is_alive:
            return False
        if process.is_paused:
            process.backlog.append(due)
            return False
        if process.steps_to_live is not None:
            process.steps_to_live -= 1
            if process.steps_to_live < 0:
                self.process = None
                self.on_kill(process)
                return False
        return True
