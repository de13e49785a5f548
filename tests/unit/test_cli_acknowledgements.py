"""What follows the records of `seriatim produce`: its bound, and a log that can't be written."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from seriatim.cli import acknowledgements as module
from seriatim.cli import produce
from seriatim.cli.acknowledgements import Acknowledgements
from seriatim.producer.handle import Ends, Handle, SharedBatch
from seriatim.producer.sources.lines import Line
from seriatim.protocol import errors
from seriatim.protocol.names import Epoch
from tests.waiting import wait_until


def sent() -> SharedBatch:
    batch = SharedBatch(1, Ends())
    batch.source, batch.seqs, batch.epoch, batch.base = "s", 7, Epoch(1), 0
    return batch


@pytest.mark.parametrize("line", [Line(b"x" * 744, None, None), Line(b"x", b"k" * 743, None)])
def test_what_is_sent_and_not_followed_is_bounded_and_its_room_comes_back(
    monkeypatch: pytest.MonkeyPatch, line: Line
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 10_000)
    acknowledgements = Acknowledgements(None, lambda: None)
    batch, added = sent(), 0
    while acknowledgements.has_room(0.01):
        acknowledgements.add(Handle(batch, 0), line)
        added += 1
        assert added <= 20
    assert added == 20
    batch.finish()
    wait_until(lambda: acknowledgements.has_room(0.01))
    acknowledgements.close()
    assert acknowledgements.acknowledged == added


def test_who_is_to_stop_does_not_wait_for_records_of_a_later_term() -> None:
    batch = sent()
    acknowledgements = Acknowledgements(None, lambda: None)
    acknowledgements.add(Handle(batch, 0), Line(b"v", None, 7))
    run = produce._Run(SimpleNamespace(), acknowledgements, SimpleNamespace(tell=lambda: None), SimpleNamespace())  # type: ignore[arg-type]
    run.stop()
    went_on: list[bool] = []
    going_on = threading.Thread(target=lambda: went_on.append(run.go_on()), daemon=True)
    going_on.start()
    going_on.join(60)
    found = list(went_on)
    batch.finish()
    acknowledgements.close()
    assert found == [False]


def test_a_log_that_cannot_be_written_is_told_once_and_what_was_sent_is_followed_to_its_end() -> None:
    told: list[None] = []
    batch, lost = sent(), sent()
    with Path("/dev/full").open("w") as log:
        acknowledgements = Acknowledgements(log, lambda: told.append(None))
        acknowledgements.add(Handle(batch, 0), Line(b"v", None, 7))
        batch.finish()
        wait_until(lambda: acknowledgements.failure is not None)
        acknowledgements.add(Handle(lost, 0), Line(b"w", None, 8))
        lost.finish(errors.OutcomeUnknown("deposed"))
        acknowledgements.settling().wait(60)
        assert list(acknowledgements.unknown) == [Line(b"w", None, 8)]
        acknowledgements.close()
    assert acknowledgements.acknowledged == 1
    assert len(told) == 1
    with pytest.raises(errors.WorldError, match="can't write /dev/full: No space left on device"):
        raise acknowledgements.failure or AssertionError
