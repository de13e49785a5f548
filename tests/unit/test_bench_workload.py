"""The sender of `seriatim bench failover`."""

from __future__ import annotations

import threading

import pytest

from seriatim.cli import workload
from seriatim.cli.workload import Workload
from seriatim.protocol import errors


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
