"""Who is told to stop by a signal's handler, which runs in the middle of whatever its thread does, also of its wait for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from seriatim.consumer.spark.replay import Replay
from seriatim.producer.sources.postgres.capture import PostgresCapture
from seriatim.protocol import flag
from seriatim.protocol.flag import Flag
from tests.interruption import Interruption

WAIT_S = 30.0


def a_replay() -> tuple[Callable[[], None], Any]:
    replay = Replay(SimpleNamespace(), print)
    return replay.stop, replay._run.stopping


def a_capture() -> tuple[Callable[[], None], Any]:
    capture = PostgresCapture("", "slot", "slot", (), SimpleNamespace(stop=lambda: None))
    return capture.stop, capture._stopped


@pytest.mark.parametrize("make", [a_replay, a_capture])
def test_wherever_a_signal_interrupts_who_waits_to_be_stopped_he_is_stopped(make) -> None:
    """A capture that waited for its database, or a replay, stood still for good after one SIGTERM in some thousands."""

    def wait(waiting: Any, interruption: Interruption) -> None:
        with interruption:
            waiting.wait(0.001)

    number = 0
    while True:
        number += 1
        stop, waiting = make()
        interruption = Interruption(number, stop, flag.__file__, threading.__file__)
        thread = threading.Thread(target=wait, args=(waiting, interruption), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"interrupted at {number}"
        if not interruption.has_come:
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
