"""Who is told to stop by a signal's handler, which runs in the middle of whatever its thread does, also of its wait for that."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from seriatim.consumer.spark.replay import Replay
from seriatim.producer.sources.postgres.capture import PostgresCapture
from seriatim.protocol import flag
from seriatim.protocol.flag import Flag

WAIT_S = 30.0


def a_replay() -> tuple[Callable[[], None], Any]:
    replay = Replay(SimpleNamespace(), print)
    return replay.stop, replay._run.stopping


def a_capture() -> tuple[Callable[[], None], Any]:
    capture = PostgresCapture("", "slot", "slot", (), SimpleNamespace(stop=lambda: None))
    return capture.stop, capture._stopped


class Handler:
    """Runs at the line of this number, of those in which something is waited for."""

    def __init__(self, number: int, handler: Callable[[], None]) -> None:
        self.left = number
        self._handler = handler

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in (flag.__file__, threading.__file__):
            return None
        self.left -= event == "line"
        if self.left == 0:
            sys.settrace(None)
            self._handler()
        return self if self.left > 0 else None


@pytest.mark.parametrize("make", [a_replay, a_capture])
def test_wherever_a_signal_interrupts_who_waits_to_be_stopped_he_is_stopped(make) -> None:
    """A capture that waited for its database, or a replay, stood still for good after one SIGTERM in some thousands."""

    def wait(waiting: Any, handler: Handler) -> None:
        sys.settrace(handler)
        waiting.wait(0.001)
        sys.settrace(None)

    number = 0
    while True:
        number += 1
        stop, waiting = make()
        handler = Handler(number, stop)
        thread = threading.Thread(target=wait, args=(waiting, handler), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"interrupted at {number}"
        if handler.left > 0:
            break
        assert waiting.is_set()
    assert number > 3


def test_all_who_wait_are_told() -> None:
    told, everybody = Flag(), [threading.Thread(target=lambda: told.wait(WAIT_S), daemon=True) for _ in range(3)]
    for one in everybody:
        one.start()
    assert not told.wait(0.01)
    told.set()
    for one in everybody:
        one.join(WAIT_S)
        assert not one.is_alive()
    assert told.wait(0)
