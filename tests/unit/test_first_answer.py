"""How long who has just begun waits for a first answer."""

from __future__ import annotations

import pytest

from seriatim.producer.core.first_answer import FirstAnswer
from seriatim.protocol.errors import NotElected, SeriatimError, Unreachable, Waiting

NOBODY = Unreachable("no coordinator answers")


def test_who_is_never_answered_gives_up_in_time_and_not_before() -> None:
    first = FirstAnswer(10.0)
    assert not first.is_overdue(NOBODY, is_connected=False, now_s=9.9)
    assert first.is_overdue(NOBODY, is_connected=False, now_s=10.0)
    assert not FirstAnswer(None).is_overdue(NOBODY, is_connected=False, now_s=1e9)


def test_who_was_answered_once_waits_for_any_time() -> None:
    first = FirstAnswer(10.0)
    assert not first.is_overdue(NOBODY, is_connected=True, now_s=11.0)
    assert not first.is_overdue(NOBODY, is_connected=False, now_s=1e9)


def test_who_was_elected_waits_for_any_time() -> None:
    first = FirstAnswer(10.0)
    first.came()
    assert not first.is_overdue(NOBODY, is_connected=False, now_s=1e9)


@pytest.mark.parametrize("problem", [NotElected("standing by"), Waiting("no group")])
def test_what_somebody_answered_is_waited_out(problem: SeriatimError) -> None:
    assert not FirstAnswer(10.0).is_overdue(problem, is_connected=False, now_s=11.0)
