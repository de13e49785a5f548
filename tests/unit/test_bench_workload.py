"""`seriatim bench failover`: its sender, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from seriatim.cli import coordinators, exits, failover, main, workload
from seriatim.cli.failover import FailoverRun, Fault
from seriatim.cli.workload import Instance, Workload
from seriatim.protocol import errors


def test_what_fails_before_there_is_a_reader_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def instance(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def call(*_: object) -> NoReturn:
        raise errors.UnknownSubscription("it has none")

    monkeypatch.setattr(failover, "Instance", instance)
    monkeypatch.setattr(coordinators, "call", call)
    load = Workload("127.0.0.1:1", "q", 100, 10.0, 4.0, "bench-1")
    with pytest.raises(KeyboardInterrupt):
        FailoverRun(Fault.ROTATE, load, 1, None, lambda: None).measure()


def test_what_is_called_as_a_module_of_pythons_in_the_present_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("open('was run', 'w')\n")
    monkeypatch.chdir(tmp_path)
    instance = Instance("send", Workload("nowhere", "q", 100, 10.0, 4.0))
    try:
        with pytest.raises(errors.Unreachable, match="ended with status 3"):
            instance.wait_for("sending", 60)
    finally:
        instance.close()
    assert not (tmp_path / "was run").exists()


def test_sigterm_ends_it_as_ctrl_c_does_so_that_what_it_has_made_or_harmed_is_put_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(*_: object) -> NoReturn:
        os.kill(os.getpid(), signal.SIGTERM)
        raise errors.Unreachable("it was told to end before")

    monkeypatch.setattr(coordinators, "call", call)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        code = main.run(["bench", "latency", "--queue", "q", "--coordinator", "127.0.0.1:1"])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == exits.INTERRUPTED


@pytest.mark.parametrize(
    "problem", [errors.Waiting("no group"), errors.Unreachable("down"), errors.NotElected("not yet")]
)
def test_whoever_is_not_elected_yet_goes_on_standing(
    problem: errors.SeriatimError, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopping, tries = threading.Event(), []

    class Standing:
        def __init__(self, *_: object, **__: object) -> None: ...

        def wait_until_elected(self, timeout: float) -> None:
            tries.append(timeout)
            if len(tries) == 3:
                stopping.set()
            raise problem

        def close(self) -> None: ...

    monkeypatch.setattr("seriatim.producer.Producer", Standing)
    workload.send(Workload("127.0.0.1:1", "q", 100, 10.0, 4.0), stopping)
    assert len(tries) == 3
    assert capfd.readouterr().out.split()[0] == "ended"
