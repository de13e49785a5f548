"""How many records a micro-batch of a replay may have."""

from __future__ import annotations

from seriatim.consumer.spark.batch_size import FIRST_S, MAX_S, BatchSize


def moving(size: BatchSize, *times_s: float) -> bool:
    """Whether a query that moves the target then is ended for one with more."""
    size.begin()
    for now_s in times_s:
        size.moved(now_s)
    return size.may_grow


def test_what_passes_for_a_minute_is_doubled_up_to_what_was_set() -> None:
    size = BatchSize(20_000)
    assert not moving(size, 0, MAX_S)  # it is at what was set
    for _ in range(3):
        size.halve()
    seen = [size.records]
    while moving(size, 100, 100 + FIRST_S):
        size.grow()
        seen.append(size.records)
    assert seen == [2_500, 5_000, 10_000, 20_000]
    odd = BatchSize(3)
    odd.halve()
    odd.grow()
    assert odd.records == 2
    odd.grow()
    assert odd.records == 3


def test_a_query_that_has_not_moved_the_target_for_so_long_goes_on() -> None:
    size = BatchSize(20_000)
    size.halve()
    assert not moving(size)
    assert not moving(size, 100)
    assert not moving(size, 100, 99 + FIRST_S)
    assert not moving(size, 100 + FIRST_S)  # the one before moved it, too


def test_each_try_that_was_one_too_many_makes_the_next_one_wait_twice_as_long() -> None:
    size = BatchSize(20_000)
    for _ in range(4):  # in a row, of which none was tried with more
        size.halve()
    waits = []
    for _ in range(8):
        waits.append(next(wait_s for wait_s in range(60, 4_000, 60) if moving(size, 0, wait_s)))
        size.grow()
        assert size.records == 2_500
        size.halve()
    assert waits == [60, 120, 240, 480, 960, 1_920, MAX_S, MAX_S]
