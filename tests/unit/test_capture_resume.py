"""What a term starts with: every answer of `resume.plan`, and names that never meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seriatim.producer.sources.postgres.core.identity import Server, Source, base_seq, parse_source, source_name
from seriatim.producer.sources.postgres.core.naming import NAME_BYTES, default_slot
from seriatim.producer.sources.postgres.core.resume import GiveUpSlot, Kept, Slot, Stream, TakeSnapshot, plan
from seriatim.producer.sources.postgres.errors import CaptureGap, CaptureRefused, SlotBusy, SlotForeign

START = 0x10_0000
SOURCE = source_name("77", 3, "cap", START)
FREE = Slot("pgoutput", "db", is_active=False, confirmed_lsn=START, wal_status="reserved", invalidation=None)
WHOLE = base_seq(START)


def planned(
    slot: Slot | None, marks: dict[str, int], held: dict[str, int] | None = None, **other: Any
) -> TakeSnapshot | Stream | GiveUpSlot:
    """`marks`: the resume point. `held`: what the chain holds, where that is more."""
    settings: dict[str, Any] = {
        "slot_name": "cap",
        "log_end": 1 << 40,
        **other,
    }
    server = Server(settings.pop("system_id", "77"), settings.pop("timeline", 3), "db")
    kept = Kept(marks, marks if held is None else held, settings.pop("given_up_from", {}))
    return plan(server=server, slot=slot, kept=kept, **settings)


def gap(slot: Slot | None, marks: dict[str, int], **other: Any) -> str:
    with pytest.raises(CaptureGap) as refused:
        planned(slot, marks, **other)
    assert refused.value.details["slot"] == "cap"
    return str(refused.value.details["reason"])


def test_nothing_anywhere_starts_with_a_snapshot() -> None:
    assert planned(None, {}) == TakeSnapshot(drops_slot=False)
    assert planned(None, {"pg/77.3/other/100000": WHOLE, "an application": 5, "pg/77/cap/no": 5}) == TakeSnapshot(
        drops_slot=False
    )


def test_an_unfinished_snapshot_is_taken_again_with_a_new_slot() -> None:
    assert planned(FREE, {SOURCE: WHOLE - 1}) == TakeSnapshot(drops_slot=True)
    assert planned(None, {SOURCE: 1}) == TakeSnapshot(drops_slot=False)


def test_a_whole_snapshot_is_gone_on_from() -> None:
    assert planned(FREE, {SOURCE: WHOLE}) == Stream(SOURCE, WHOLE, START)
    inside = base_seq(START + 0x1000) | 3
    assert planned(FREE, {SOURCE: inside}) == Stream(SOURCE, inside, START)


def test_the_slot_made_last_counts() -> None:
    later = source_name("77", 3, "cap", START + 0x1000)
    slot = replace(FREE, confirmed_lsn=START + 0x1000)
    whole = base_seq(START + 0x1000)
    assert planned(slot, {SOURCE: WHOLE + 9, later: whole}) == Stream(later, whole, START + 0x1000)
    # The snapshot of the later one is unfinished: what the earlier one sent is no reason to stream.
    assert planned(slot, {SOURCE: WHOLE + 9, later: 4}) == TakeSnapshot(drops_slot=True)


@pytest.mark.parametrize("mark", [1, WHOLE - 1, WHOLE])
def test_a_busy_slot_is_waited_for_however_much_the_queue_has_of_its_snapshot(mark: int) -> None:
    with pytest.raises(SlotBusy):
        planned(replace(FREE, is_active=True), {SOURCE: mark})


@pytest.mark.parametrize("is_active", [True, False])
def test_a_slot_of_which_the_queue_has_nothing_is_another_queues_and_never_dropped(is_active: bool) -> None:
    """Two clusters may have a queue of one name, and one capture may be away when the other looks: it would come back to a gap."""
    with pytest.raises(SlotForeign, match="pg_drop_replication_slot"):
        planned(replace(FREE, is_active=is_active), {})


@pytest.mark.parametrize("is_active", [True, False])
def test_a_slot_made_behind_an_unfinished_snapshot_is_another_queues_and_never_dropped(is_active: bool) -> None:
    """This one's capture died before it had made its slot, or that was dropped; the other one's came meanwhile."""
    for mark in (1, WHOLE - 1):
        with pytest.raises(SlotForeign):
            planned(replace(FREE, is_active=is_active, confirmed_lsn=START + 8), {SOURCE: mark})


@pytest.mark.parametrize("slot", [replace(FREE, plugin="test_decoding"), replace(FREE, db="elsewhere"), replace(FREE, plugin=None, db=None, confirmed_lsn=None)])  # fmt: skip
def test_a_slot_of_somebody_else_is_never_touched(slot: Slot) -> None:
    with pytest.raises(CaptureRefused):
        planned(slot, {})


def test_a_slot_that_is_gone_is_a_gap() -> None:
    assert "gone" in gap(None, {SOURCE: WHOLE})


@pytest.mark.parametrize("slot", [replace(FREE, wal_status="lost"), replace(FREE, invalidation="wal_removed"), replace(FREE, invalidation="idle_timeout", wal_status="reserved")])  # fmt: skip
def test_a_slot_that_postgres_gave_up_is_a_gap(slot: Slot) -> None:
    assert "given up" in gap(slot, {SOURCE: WHOLE})


def test_a_slot_whose_log_is_only_in_danger_is_used() -> None:
    for status in ("extended", "unreserved"):
        assert isinstance(planned(replace(FREE, wal_status=status), {SOURCE: WHOLE}), Stream)


def test_a_slot_further_than_the_queue_is_a_gap() -> None:
    """Debezium PR 3970: a slot made again starts later, and nobody noticed what lay between."""
    assert "made again or moved" in gap(replace(FREE, confirmed_lsn=START + 32), {SOURCE: WHOLE})
    assert "nothing" in gap(replace(FREE, confirmed_lsn=None), {SOURCE: WHOLE})
    assert isinstance(planned(replace(FREE, confirmed_lsn=START + 31), {SOURCE: WHOLE}), Stream)


def test_a_slot_confirmed_inside_a_transaction_that_the_queue_holds_in_part_is_gone_on_from() -> None:
    """It is confirmed to the start of the commit record at most, so the whole transaction comes once more."""
    slot = replace(FREE, confirmed_lsn=START + 0x1000)
    inside = base_seq(START + 0x1000) | 2
    assert planned(slot, {SOURCE: inside}) == Stream(SOURCE, inside, START + 0x1000)


LATE = START + 0x1000
ACKNOWLEDGED = replace(FREE, confirmed_lsn=LATE)
"""A slot after a transaction at LATE was acknowledged."""


def test_what_the_chain_holds_beyond_the_resume_point_is_no_gap_and_is_sent_again_where_the_log_has_it() -> None:
    """One answer sealed the link: it didn't know that its last records were committed, and the slot is confirmed to them."""
    known, held = WHOLE + 1, base_seq(LATE) | 3
    assert planned(ACKNOWLEDGED, {SOURCE: known}, {SOURCE: held}) == Stream(SOURCE, known, LATE)
    # What wasn't acknowledged may be on one disk only: the chain's holding it is no reason to skip it (H2).
    assert planned(FREE, {SOURCE: known}, {SOURCE: held}) == Stream(SOURCE, known, START)


def test_a_slot_further_than_the_chain_is_a_gap_wherever_the_resume_point_is() -> None:
    held = base_seq(LATE - 32) | 9
    assert "made again or moved" in gap(ACKNOWLEDGED, {SOURCE: WHOLE}, held={SOURCE: held})


def test_a_snapshot_that_only_the_chain_holds_counts_where_it_was_acknowledged() -> None:
    held = {SOURCE: base_seq(LATE) | 3}
    assert planned(FREE, {SOURCE: 5}, held) == TakeSnapshot(drops_slot=True)
    assert planned(FREE, {}, held) == TakeSnapshot(drops_slot=True)
    assert planned(ACKNOWLEDGED, {SOURCE: 5}, held) == Stream(SOURCE, 5, LATE)
    assert planned(ACKNOWLEDGED, {}, held) == Stream(SOURCE, 0, LATE)
    # What was acknowledged of a snapshot whose end was given up since looks like another queue's.
    with pytest.raises(SlotForeign):
        planned(ACKNOWLEDGED, {SOURCE: 5}, {SOURCE: WHOLE - 1})
    # A newer slot's, of which the resume point says nothing, is not mistaken for a gap of the older one.
    newer = source_name("77", 3, "cap", LATE)
    assert planned(ACKNOWLEDGED, {SOURCE: WHOLE}, {SOURCE: WHOLE, newer: 7}) == TakeSnapshot(drops_slot=True)


def test_a_slot_made_again_for_a_snapshot_of_which_nothing_was_sent_acknowledges_no_earlier_one() -> None:
    """One disk had the whole snapshot; it was to be taken again, and another queue's capture came first."""
    held = {SOURCE: WHOLE}
    for known in ({SOURCE: 5}, {}):
        with pytest.raises(SlotForeign):
            planned(ACKNOWLEDGED, known, held)
    # A stream that began behind it was acknowledged as far as the chain holds it.
    assert planned(ACKNOWLEDGED, {SOURCE: 5}, {SOURCE: base_seq(LATE)}) == Stream(SOURCE, 5, LATE)
    # Known to be on two disks, it counts, and the slot lets changes go that the queue lacks.
    assert "made again or moved" in gap(ACKNOWLEDGED, {SOURCE: WHOLE})


def test_what_an_operator_gave_up_is_a_gap_once_this_term_would_not_send_it() -> None:
    inside = base_seq(LATE) | 2
    held = {SOURCE: base_seq(LATE + 64) | 1}
    for given_up in (WHOLE + 1, base_seq(LATE) - 1):
        assert "gave up" in gap(ACKNOWLEDGED, {SOURCE: WHOLE}, held=held, given_up_from={SOURCE: given_up})
    # The transaction at the slot's position comes once more, and all that follows on it.
    assert planned(ACKNOWLEDGED, {SOURCE: WHOLE}, held, given_up_from={SOURCE: inside}) == Stream(SOURCE, WHOLE, LATE)
    # But where two members hold later ones, they are skipped, and nobody can tell whether the earlier ones are among them.
    assert "gave up" in gap(ACKNOWLEDGED, {SOURCE: inside}, held=held, given_up_from={SOURCE: inside})
    assert planned(ACKNOWLEDGED, {SOURCE: inside}, held, given_up_from={"another": 1}) == Stream(SOURCE, inside, LATE)


def test_the_slot_of_a_database_set_back_is_given_up_as_long_as_that_is_seen() -> None:
    mark = base_seq(START + 0x1000)
    for held in (None, {SOURCE: mark}):
        step = planned(FREE, {SOURCE: WHOLE if held else mark}, held, log_end=START + 0xFE0)
        assert isinstance(step, GiveUpSlot)
        assert "set back" in step.reason
    # Once it has written past what the queue holds, it looks as any other: so the slot has to be gone by then.
    assert isinstance(planned(FREE, {SOURCE: mark}, log_end=START + 0x1000), Stream)
    assert "gone" in gap(None, {SOURCE: mark}, log_end=START + 0x1000)


def test_nothing_else_gives_a_slot_up() -> None:
    """What stays true while the database writes on needs no drop, and a slot of somebody else gets none."""
    mark = base_seq(START + 0x1000)
    early: dict[str, Any] = {"log_end": START + 0xFE0}
    assert "given up" in gap(replace(FREE, wal_status="lost"), {SOURCE: mark}, **early)
    assert "timeline" in gap(FREE, {SOURCE: mark}, timeline=4, **early)
    with pytest.raises(CaptureRefused):
        planned(replace(FREE, db="elsewhere"), {SOURCE: mark}, **early)
    with pytest.raises(SlotBusy):
        planned(replace(FREE, is_active=True), {SOURCE: mark}, **early)


def test_another_cluster_under_the_same_slot_name_is_a_gap() -> None:
    for slot in (FREE, None):
        assert "cluster 77" in gap(slot, {SOURCE: WHOLE}, system_id="78")
    # Another slot of another cluster is another capture.
    assert planned(None, {source_name("78", 3, "other", START): WHOLE}) == TakeSnapshot(drops_slot=False)
    # One that was captured before doesn't stand in the way of the present one.
    both = {SOURCE: WHOLE, source_name("78", 3, "cap", START): WHOLE}
    assert planned(FREE, both, system_id="78") == Stream(source_name("78", 3, "cap", START), WHOLE, START)


def test_the_log_of_another_timeline_is_a_gap_whoever_looks_and_whatever_the_slot_says() -> None:
    """A stand-by that was promoted, or a restored database: positions that the queue holds mean other transactions there."""
    marks = {SOURCE: base_seq(START + 0x1000)}
    for timeline in (2, 4):
        for slot in (FREE, None, replace(FREE, confirmed_lsn=START + 0x1000)):
            assert "of timeline 3" in gap(slot, marks, timeline=timeline)


def test_a_snapshot_that_another_timeline_left_unfinished_is_taken_again() -> None:
    marks = {SOURCE: 4}
    assert planned(FREE, marks, timeline=4) == TakeSnapshot(drops_slot=True)
    # The new one counts from then on, also where that timeline began before the slot was made.
    earlier = source_name("77", 4, "cap", START - 0x1000)
    point = START - 0x1000
    slot = replace(FREE, confirmed_lsn=point)
    assert planned(slot, {**marks, earlier: base_seq(point)}, timeline=4) == Stream(earlier, base_seq(point), point)


@pytest.mark.parametrize("timeline", [3, None])
@pytest.mark.parametrize("sent", [1, base_seq(LATE)])
def test_a_slot_behind_which_another_one_began_a_snapshot_is_not_gone_back_to(timeline: int | None, sent: int) -> None:
    """Whoever applies the queue emptied the tables there, and has, or lacks, what comes from the older slot once more."""
    older, newer = source_name("77", timeline, "cap", START), source_name("77", 3, "new", LATE)
    marks = {older: WHOLE, newer: sent}
    assert "slot new began a snapshot behind it" in gap(FREE, marks)
    assert planned(None, marks, slot_name="other") == TakeSnapshot(drops_slot=False)
    if sent > 1:
        assert planned(replace(FREE, confirmed_lsn=LATE), marks, slot_name="new") == Stream(newer, sent, LATE)
    # Another cluster's, or another timeline's, says nothing about when.
    for other in (source_name("78", 3, "new", LATE), source_name("77", 2, "new", LATE)):
        if timeline is not None:
            assert planned(FREE, {older: WHOLE, other: sent}) == Stream(older, WHOLE, START)


def test_a_stream_of_an_earlier_version_goes_on_on_any_timeline_under_its_own_source() -> None:
    source = source_name("77", None, "cap", START)
    assert source == "pg/77/cap/100000"
    for timeline in (3, 4):
        assert planned(FREE, {source: WHOLE}, timeline=timeline) == Stream(source, WHOLE, START)
    assert "cluster 77" in gap(FREE, {source: WHOLE}, system_id="78")
    assert "gone" in gap(None, {source: WHOLE})
    # Its unfinished snapshot is taken again, under a source with a timeline, which is the later one.
    assert planned(FREE, {source: 5}) == TakeSnapshot(drops_slot=True)
    assert planned(FREE, {source: 5, SOURCE: WHOLE}) == Stream(SOURCE, WHOLE, START)


@pytest.mark.parametrize("timeline", [None, 1, 4_294_967_295])
def test_a_sources_name_says_what_was_put_in(timeline: int | None) -> None:
    name = source_name("7581224471190847263", timeline, "seriatim_log", 0x16_B374_D848)
    assert parse_source(name) == Source("7581224471190847263", timeline, "seriatim_log", 0x16_B374_D848)


@pytest.mark.parametrize("name", ["producer", "pg/77/cap", "pg/77/cap/", "pg/77/cap/xyz", "pg/77./cap/1", "pg/77.3/cap/1/2", "a/77/cap/1", "pg//cap/1"])  # fmt: skip
def test_what_somebody_else_calls_a_source_is_none(name: str) -> None:
    assert parse_source(name) is None


def test_default_names_hold_the_queues_name_and_fit_postgres() -> None:
    assert default_slot("orders") == "seriatim_orders"
    queues = [
        "orders",
        "Orders",
        "orders.eu",
        "orders-eu",
        "orders_eu",
        "ö",
        "ü",
        "x" * 54,
        "x" * 55,
        "x" * 200,
        "x" * 201,
    ]
    slots = [default_slot(queue) for queue in queues]
    assert len(set(slots)) == len(queues)
    for slot in slots:
        assert len(slot) <= NAME_BYTES
        assert set(slot) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
