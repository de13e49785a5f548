"""Records are made a few at a time; what they are doesn't depend on how many."""

from __future__ import annotations

import pytest

from seriatim.consumer.core.handed_out import Chunk
from seriatim.consumer.core.rows import Delivery, decoded
from seriatim.consumer.core.view import Place
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.names import Epoch, Index, Offset
from seriatim.protocol.record import Record

FIRST, COUNT = 40, 9


def delivery(*, has_all: bool, marks: dict[str, int] | None, start: int = FIRST) -> Delivery:
    """A batch at index 40; with all columns, or the fewest. Seqs of `s` are 1 to 9, or every second of them."""
    values = [bytes((number,)) for number in range(COUNT)]
    seqs = list(range(1, COUNT + 1))
    if has_all:
        sources: str | list[str] = ["s" if number % 2 == 0 else "t" for number in range(COUNT)]
        keys: list[bytes | None] | None = [None if number % 3 == 0 else bytes((number,)) for number in range(COUNT)]
        headers = [() if number % 4 else (("name", bytes((number,))),) for number in range(COUNT)]
        columns = RecordColumns(values, seqs, sources, list(range(COUNT)), keys, headers)
    else:
        columns = RecordColumns(values, seqs, "s", [7] * COUNT)
    batch = encode(columns, Index(FIRST))
    return Delivery(Epoch(3), Offset(1000), batch, Index(start), batch.header.end_index, marks)


@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize("marks", [None, {"s": 4, "t": 0}], ids=["whole", "with re-sends"])
@pytest.mark.parametrize("start", [FIRST, FIRST + 2])
def test_a_few_at_a_time_are_the_same_records_as_all_at_once(
    marks: dict[str, int] | None, start: int, *, has_all: bool
) -> None:
    rows = decoded(delivery(has_all=has_all, marks=marks, start=start))
    whole = rows.records("q")
    assert all(type(one) is Record for one in whole)
    assert [(one.index, one.offset) for one in whole] == [(index, index + 1000) for index in rows.indexes]
    assert [one.value for one in whole] == [bytes((index - FIRST,)) for index in rows.indexes]
    for size in (1, 2, 5, 100):
        cut = [rows.records("q", at, at + size) for at in range(0, len(whole), size)]
        assert [one for some in cut for one in some] == whole


@pytest.mark.parametrize("marks", [None, {"s": 4, "t": 6}], ids=["whole", "with re-sends"])
def test_each_record_keeps_what_is_its_own_where_others_are_dropped(marks: dict[str, int] | None) -> None:
    rows = decoded(delivery(has_all=True, marks=marks, start=FIRST + 1))
    kept = [1, 2, 3, 4, 5, 6, 7, 8] if marks is None else [4, 6, 7, 8]
    assert rows.dropped == 8 - len(kept)
    assert [(one.seq, one.source, one.key, one.headers, one.timestamp_ms) for one in rows.records("q")] == [
        (
            number + 1,
            "st"[number % 2],
            None if number % 3 == 0 else bytes((number,)),
            () if number % 4 else (("name", bytes((number,))),),
            number,
        )
        for number in kept
    ]


def test_of_one_source_what_lies_at_or_below_its_mark_is_dropped() -> None:
    rows = decoded(delivery(has_all=False, marks={"s": 4, "t": 9}))
    assert ([one.seq for one in rows.records("q")], rows.dropped) == ([5, 6, 7, 8, 9], 4)


def test_the_place_behind_records_is_that_of_the_next_one_also_where_some_were_dropped() -> None:
    rows = decoded(delivery(has_all=True, marks={"s": 4, "t": 6}))
    before = Place(Epoch(3), Index(FIRST))
    chunk = Chunk(1, rows, "q", before, 100)
    records = chunk.records(0, chunk.count)
    assert 0 < len(records) < COUNT, "re-sends were dropped"
    places = [chunk.place_after(count) for count in range(chunk.count + 1)]
    assert places[0] == before
    assert places[1:-1] == [Place(Epoch(3), Index(one.index + 1)) for one in records[:-1]]
    assert places[-1] == Place(Epoch(3), Index(FIRST + COUNT)), "behind the re-sends at its end, too"
