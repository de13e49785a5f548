"""A supervisor of named child processes in one directory.

Problem: whoever starts servers for development or a test must not leave any behind, whatever happens to himself: an
exception, Ctrl-C, SIGTERM, SIGKILL. And others want to know at any time which process is which.

Idea: the kernel ends the children. Each child asks for a signal at its parent's death (`launcher`). That request is tied to
the *thread* that started the child, so one thread starts all children and lives as long as the supervisor; the same thread
notices deaths, keeps `pids.json` true, and starts again what is to be kept running.

The directory then holds: `lock` (held by the living supervisor, with its process id in it), `pids.json` (name to process
id, of what runs now, replaced in one step), `logs/NAME.log` (standard output and error, kept from start to start).
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TextIO

from seriatim.cli.embedded import launcher
from seriatim.cli.embedded.errors import DirectoryInUse, StartFailed
from seriatim.protocol import log

_log = log.logger("server")

_POLL_S = 0.02  # of waiting callers
_LOOK_S = 0.05  # how late a death may be noticed
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 5.0
_SETTLED_AFTER_S = 10.0  # a child that ran this long before it died starts again with the first back-off
_LAST_BYTES = 4096  # of a log in which its last line is looked for
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run, and how to end it."""

    name: str
    """Unique in its supervisor; also the log file's name."""
    command: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Added to this process's own environment; None: taken out of it."""
    is_restarted: bool = False
    """Start it again, after a short back-off, whenever it dies without having been asked to."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0
    """After this, SIGKILL."""
    death_signal: signal.Signals = signal.SIGKILL
    """What the kernel sends when the supervisor dies."""


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    log_offset: int  # where this run's output starts in its log, in bytes
    started_at_s: float
    backoff_s: float = _BACKOFF_FIRST_S
    is_stopping: bool = False
    restart_at_s: float | None = None
    told: tuple[int, str] | None = None  # how the run before it ended, and what was said of that


class Supervisor:
    """Owner of one directory and of the children that run in it. Use it as a context manager, from any thread."""

    def __init__(self, directory: Path) -> None:
        """Take the directory (made if missing). Raises `DirectoryInUse` when another supervisor has it."""
        self.directory = directory.resolve()
        self.logs = self.directory / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(self.directory)
        self._children: dict[str, _Child] = {}
        self._guard = threading.RLock()  # of _children and of pids.json
        # No SimpleQueue, whose `get` may wait on where its time-out has run out by the time it begins (see `Waking`): no death would be noticed.
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._is_closed = False
        self._written = ""  # what pids.json holds
        self._unwritten = ""  # why it isn't what it should be
        self._write_pids()
        self._thread = threading.Thread(target=self._run, name=f"supervisor {self.directory.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- what callers may ask

    def start(self, spec: ProcessSpec) -> int:
        """Start a child; answers its process id. Raises `StartFailed` when one of that name runs already."""
        if not _NAME.fullmatch(spec.name):
            raise ValueError(f"not a process name: {spec.name!r}")
        done: Future[int] = Future()

        def order() -> None:
            try:
                done.set_result(self._spawn(spec))
            except (OSError, StartFailed) as error:
                done.set_exception(error)

        if self._is_closed:
            raise StartFailed(f"{spec.name}: the supervisor of {self.directory} is closed")
        self._orders.put(order)
        return done.result(timeout=30)

    def stop(self, name: str) -> int | None:
        """End a child: its stop signal, then SIGKILL after its stop timeout. Answers its exit status, None if it didn't run."""
        return self.stop_all([name]).get(name)

    def stop_all(self, names: Iterable[str]) -> dict[str, int]:
        """End the named children at the same time; answers the exit status of those that ran."""
        with self._guard:
            chosen = [self._children[name] for name in names if name in self._children]
            for child in chosen:
                child.is_stopping, child.restart_at_s = True, None
                self._signal(child, child.spec.stop_signal)
        begun_s = time.monotonic()
        for child in chosen:
            left_s = child.spec.stop_timeout_s - (time.monotonic() - begun_s)
            try:
                child.process.wait(max(left_s, 0))
            except subprocess.TimeoutExpired:
                _log.warning("stop timed out, it is killed", name=child.spec.name)
                self._signal(child, signal.SIGKILL)
                child.process.wait()
            _kill_group(child.process.pid)
        with self._guard:
            for child in chosen:
                if self._children.get(child.spec.name) is child:
                    del self._children[child.spec.name]
            self._write_pids()
        return {child.spec.name: child.process.returncode for child in chosen}

    def kill(self, name: str, with_signal: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a child and all its own children, as an accident would; answers the process id it went to.

        Whether it is started again is its spec's choice. Raises `StartFailed` when it doesn't run.
        """
        with self._guard:
            child = self._running(name)
            self._signal(child, with_signal)
            if with_signal == signal.SIGKILL:
                child.process.wait()
                self._write_pids()
            return child.process.pid

    def pid(self, name: str) -> int | None:
        """The process id of a running child, else None."""
        return self.pids().get(name)

    def pids(self) -> dict[str, int]:
        """Name to process id of what runs now, in the order of starting."""
        with self._guard:
            return {name: child.process.pid for name, child in self._children.items() if child.process.poll() is None}

    def ended(self) -> list[str]:
        """Which children have ended by themselves, and aren't started again."""
        with self._guard:
            left = [one for one in self._children.values() if not (one.is_stopping or one.spec.is_restarted)]
            return [child.spec.name for child in left if child.process.poll() is not None]

    def log_path(self, name: str) -> Path:
        """Where a child's standard output and error go."""
        return self.logs / f"{name}.log"

    def output(self, name: str, last_bytes: int | None = None) -> str:
        """What a child has written since it was last started, or the end of that."""
        with self._guard:
            offset = self._children[name].log_offset if name in self._children else 0
        with self.log_path(name).open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(offset if last_bytes is None else max(offset, end - last_bytes))
            return log.read().decode(errors="replace")

    def _room(self) -> str:
        """What else to look at where a log says nothing: there is no room for it, most likely."""
        return f"{shutil.disk_usage(self.logs).free >> 20:,} MiB are free"

    def log_end(self, name: str) -> str:
        """What a child said last, for a person."""
        path = self.log_path(name)
        lines = self.output(name).splitlines()[-8:] if path.exists() else []
        if not lines:
            return f"Its log, {path}, says nothing; {self._room()} there."
        return f"Its log, {path}, ends with:\n" + "\n".join(f"  {line}" for line in lines)

    def wait_until(self, name: str, is_ready: Callable[[], bool], *, timeout_s: float, what: str = "serve") -> None:
        """Wait until `is_ready()`. Raises `StartFailed`, with the end of the log, when the child dies or time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            with self._guard:
                status = self._children[name].process.poll() if name in self._children else None
                is_gone = name not in self._children or status is not None
            if is_gone:
                raise StartFailed(f"{name} ended before it could {what} (exit status {status}). {self.log_end(name)}")
            if time.monotonic() > deadline_s:
                raise StartFailed(f"{name} didn't {what} within {timeout_s:g} s. {self.log_end(name)}")
            time.sleep(_POLL_S)

    def wait_for_line(self, name: str, prefix: str = "ready", *, timeout_s: float = 60.0) -> str:
        """Wait for a line of this run's output that starts with `prefix`; answers it. Raises as `wait_until`."""
        found: list[str] = []

        def has_line() -> bool:
            # A line counts when its end is written too.
            lines = self.output(name).split("\n")[:-1]
            found.extend(line for line in lines if line.startswith(prefix))
            return bool(found)

        self.wait_until(name, has_line, timeout_s=timeout_s, what=f"print '{prefix}'")
        return found[0]

    def close(self) -> None:
        """End all children, last started first, and give the directory up. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._guard:
            names = list(reversed(self._children))
        for name in names:
            self.stop(name)
        self._orders.put(_end_thread)
        self._thread.join()
        self._lock_file.close()

    # --------------------------------------------------------------------------------------------- the one thread

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look_after()
                continue
            if order is _end_thread:
                return
            order()

    def _spawn(
        self, spec: ProcessSpec, backoff_s: float = _BACKOFF_FIRST_S, told: tuple[int, str] | None = None
    ) -> int:
        with self._guard:
            before = self._children.get(spec.name)
            if before and before.process.poll() is None:
                raise StartFailed(f"{spec.name} runs already, as process {before.process.pid}")
            prefix = (sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), str(int(spec.death_signal)))
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment}
            with self.log_path(spec.name).open("ab") as log:
                log_offset = log.tell()
                process = subprocess.Popen(
                    (*prefix, *spec.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.directory,
                    env={name: value for name, value in environment.items() if value is not None},
                    start_new_session=True,  # Ctrl-C reaches the supervisor only, which then ends the rest in order
                )
            self._children[spec.name] = _Child(spec, process, log_offset, time.monotonic(), backoff_s, told=told)
            self._write_pids()
            return process.pid

    def _look_after(self) -> None:
        """Notice deaths; start again what is to be kept running and whose back-off is over."""
        with self._guard:
            now_s = time.monotonic()
            for child in list(self._children.values()):
                if child.process.poll() is None or child.is_stopping:
                    continue
                if child.restart_at_s is None and child.spec.is_restarted:
                    if now_s - child.started_at_s > _SETTLED_AFTER_S:
                        child.backoff_s = _BACKOFF_FIRST_S
                    child.restart_at_s = now_s + child.backoff_s
                    self._tell_of_death(child)
                    _kill_group(child.process.pid)
                elif child.restart_at_s is not None and now_s >= child.restart_at_s and not self._is_closed:
                    self._start_again(child, now_s)
            self._write_pids()

    def _tell_of_death(self, child: _Child) -> None:
        """With what it said last; the same again and again only until the back-off is at its longest."""
        said = self._last_line(child.spec.name)
        end = child.process.returncode, said
        if end != child.told or child.backoff_s < _BACKOFF_MAX_S:
            _log.warning(
                "process died", name=child.spec.name, pid=child.process.pid, status=child.process.returncode,
                restart_in_s=round(child.backoff_s, 1), said=said,
            )  # fmt: skip
        child.told = end

    def _last_line(self, name: str) -> str:
        """What a child said last. Nothing may be raised here: all children would end with this thread."""
        try:
            lines = [line for line in self.output(name, _LAST_BYTES).splitlines() if line.strip()]
            return lines[-1] if lines else f"(nothing; {self._room()} for its log)"
        except OSError as error:
            return f"(its log can't be read: {error.strerror})"

    def _start_again(self, child: _Child, now_s: float) -> None:
        child.backoff_s = min(child.backoff_s * 2, _BACKOFF_MAX_S)
        try:
            self._spawn(child.spec, child.backoff_s, child.told)
        except OSError as error:  # nothing may end this thread: all children would end with it
            child.restart_at_s = now_s + child.backoff_s
            retry_in_s = round(child.backoff_s, 1)
            _log.warning("process can't be started", name=child.spec.name, retry_in_s=retry_in_s, error=error)

    # ------------------------------------------------------------------------------------------------------ parts

    def _running(self, name: str) -> _Child:
        child = self._children.get(name)
        if child is None or child.process.poll() is not None:
            raise StartFailed(f"{name} doesn't run in {self.directory}")
        return child

    def _signal(self, child: _Child, with_signal: signal.Signals) -> None:
        """Signal the child's whole process group; nothing if it has ended and was waited for."""
        if child.process.poll() is None:
            os.killpg(child.process.pid, with_signal)

    def _write_pids(self) -> None:
        """Replace pids.json if it isn't true any more. Where that fails, as on a full disk, it is tried again at the next look."""
        path = self.directory / "pids.json"
        text = json.dumps(self.pids(), indent=1) + "\n"
        if text == self._written:
            return
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(text)
            partial.replace(path)
        except OSError as error:
            if self._unwritten != (reason := str(error)):
                self._unwritten = reason
                _log.warning("pids.json can't be written", error=reason)
        else:
            self._written, self._unwritten = text, ""


def _end_thread() -> None:
    """The last order; recognised, not run."""


def _kill_group(pid: int) -> None:
    """End what a dead child left in its process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nobody left, or only what changed its user and ends by itself


def _lock(directory: Path) -> TextIO:
    """The directory's lock, held until the file is closed or this process is gone. Raises `DirectoryInUse`."""
    lock_file = (directory / "lock").open("a+")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.seek(0)
        holder = lock_file.read().strip() or "unknown"
        lock_file.close()
        raise DirectoryInUse(
            f"{directory} is in use by process {holder}; stop that one, or choose another directory"
        ) from None
    lock_file.seek(0)
    lock_file.truncate()
    lock_file.write(f"{os.getpid()}\n")
    lock_file.flush()
    return lock_file
