"""The checker must reject every bad history; a broken checker passes everything."""

from __future__ import annotations

import pytest

from tests.faults.checker import check
from tests.faults.history import Acknowledged, Delivered, Event, Positioned, Refused, Resumed, Sent, Tail, read, write


def good() -> list[Event]:
    """Three records, sent one after the other, read by two subscriptions; the second reader of `s` starts again at 1."""
    events: list[Event] = []
    for seq in range(3):
        events += [Sent("p", seq, f"v{seq}", seq * 1.0), Acknowledged("p", seq, seq, seq + 0.5)]
    for subscription in ("s", "t"):
        events += [Delivered(subscription, f"{subscription}-1", seq, "p", seq, f"v{seq}", 5.0) for seq in range(3)]
    events += [Delivered("s", "s-2", seq, "p", seq, f"v{seq}", 6.0) for seq in range(1, 3)]
    return events


def test_accepts_a_good_history():
    verdict = check(good())
    assert verdict.is_clean, verdict.anomalies
    assert verdict.counts == {"sent": 3, "acknowledged": 3, "delivered": 3, "handed_out_again": 2}


def test_accepts_an_unacknowledged_record_that_was_delivered_or_not():
    assert check([*good(), Sent("p", 3, "v3", 9.0)]).is_clean
    assert check([*good(), Sent("p", 3, "v3", 9.0), *[Delivered(s, s, 3, "p", 3, "v3", 10.0) for s in "st"]]).is_clean


def _without(kind: type, **fields: object) -> list[Event]:
    return [
        event
        for event in good()
        if not (isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()))
    ]


@pytest.mark.parametrize(
    ("kind", "history"),
    [
        ("lost-write", _without(Delivered, seq=2)),
        ("lost-write", _without(Delivered, subscription="t", seq=1)),
        ("lost-write", [event for event in good() if not isinstance(event, Delivered)]),
        ("duplicate", [*good(), Delivered("s", "s-2", 3, "p", 2, "v2", 7.0)]),
        ("offset-disagreement", [*good(), Sent("q", 0, "w", 0.0), Delivered("t", "t-2", 2, "q", 0, "w", 7.0)]),
        ("offset-disagreement", [*good(), Sent("q", 0, "w", 0.0), Acknowledged("q", 0, 2, 1.0)]),
        ("aborted-read", [*good(), Delivered("s", "s-2", 3, "p", 3, "v3", 7.0)]),
        ("aborted-read", [*good(), Refused("p", 1, 1.2)]),
        ("wrong-value", [*_without(Sent, seq=1), Sent("p", 1, "other", 1.0)]),
        ("skipped-poll", [*good(), Sent("p", 3, "v3", 3.0), Sent("p", 4, "v4", 3.1),
            Delivered("s", "s-3", 4, "p", 4, "v4", 7.0), Delivered("s", "s-4", 3, "p", 3, "v3", 8.0)]),
        ("backward-poll", [*good(), Delivered("s", "s-2", 1, "p", 1, "v1", 7.0)]),
        ("backward-poll", [*good(), Delivered("s", "s-2", 2, "p", 2, "v2", 7.0)]),
        ("reordering", [*good(), Sent("q", 0, "w", 1.9), Delivered("s", "s-3", -1, "q", 0, "w", 7.0)]),
        ("skipped-poll", _without(Delivered, subscription="t", seq=1)),
        ("skipped-poll", _without(Delivered, subscription="t", seq=0)),
        ("skipped-poll", [*good(), Positioned("s", 2, 0, 6.5), Delivered("s", "s-3", 1, "p", 1, "v1", 7.0, 2)]),
        ("lost-write", [*good(), Positioned("s", 2, 1, 6.5), Delivered("s", "s-3", 1, "p", 1, "v1", 7.0, 2)]),
        ("lost-write", [*good(), Positioned("late", 1, 2, 6.5)]),
        ("lost-write", [*good(), Sent("p", 3, "v3", 3.0), Acknowledged("p", 3, None, 3.5)]),
        ("backward-poll", [*good(), Positioned("s", 2, 2, 6.5), Delivered("s", "s-3", 1, "p", 1, "v1", 7.0, 2)]),
        ("duplicate", [*good(), Positioned("s", 2, 2, 6.5), Delivered("s", "s-3", 2, "p", 2, "v2", 7.0, 2),
            Delivered("s", "s-3", 3, "p", 2, "v2", 7.0, 2)]),
        ("source-order", [*good(), Sent("p", 9, "v9", 0.0), Delivered("s", "s-3", -1, "p", 9, "v9", 7.0)]),
    ],
)  # fmt: skip
def test_rejects(kind, history):
    assert kind in check(history).kinds()


def test_reading_that_did_not_end_loses_nothing():
    assert check(_without(Delivered, seq=2), read_to_end=False).is_clean


def test_accepts_a_subscription_that_was_sought_back_or_forward_or_created_late():
    back = [Positioned("s", 2, 1, 6.5), *[Delivered("s", "s-3", at, "p", at, f"v{at}", 7.0, 2) for at in (1, 2)]]
    forward = [Positioned("t", 2, 2, 6.5), Delivered("t", "t-3", 2, "p", 2, "v2", 7.0, 2)]
    late = [Positioned("late", 1, 2, 6.5), Delivered("late", "late-1", 2, "p", 2, "v2", 7.0)]
    assert check([*good(), *back, *forward, *late]).anomalies == ()


def test_an_earlier_generation_need_not_reach_the_end():
    start = [
        event for event in good() if not (isinstance(event, Delivered) and event.subscription == "t" and event.seq)
    ]
    again = [Positioned("t", 2, 0, 6.0), *[Delivered("t", "t-2", at, "p", at, f"v{at}", 7.0, 2) for at in range(3)]]
    assert check([*start, *again]).anomalies == ()


def test_a_tail_gives_what_came_since(tmp_path):
    path, events = tmp_path / "history.jsonl", good()
    tail = Tail(path)
    assert list(tail.follow()) == []
    write(events[:4], path)
    with path.open("a") as file:
        file.write('{"type":"Se')
    assert list(tail.follow()) == events[:4]
    with path.open("a") as file:
        file.write('nt","count":1,"source":"p","seq":9,"value":"v","at_s":1.0}\n')
    assert list(tail.follow()) == [Sent("p", 9, "v", 1.0)]


def test_a_history_survives_a_file_and_a_cut_line(tmp_path):
    path = tmp_path / "history.jsonl"
    write(good(), path)
    with path.open("a") as file:
        file.write('{"type": "Sent", "sou')
    assert list(read(path)) == good()


def test_what_a_resume_point_told_counts_as_told_record_by_record(tmp_path):
    path = tmp_path / "history.jsonl"
    write([*good(), Resumed("p", 1, 2, 7.0)], path)
    events = list(read(path))
    assert events[-2:] == [Acknowledged("p", seq, None, 7.0, is_resumed=True) for seq in (1, 2)]
    assert check(events).is_clean
    write([Sent("p", 3, "v3", 8.0), Resumed("p", 3, 3, 9.0)], path)
    assert {one.kind for one in check(list(read(path))).anomalies} == {"lost-write"}
