"""Messages of a real server, recorded as hex, and the records they give; messages cut short or out of place.

`test_pgoutput_traces/<name>.txt` holds a workload and the bytes PostgreSQL sent for it (tests/postgres/test_capture_traces.py
compares them with what a server sends today); `<name>.records` what the assembler has to make of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim.producer.sources.postgres.core import assembler as assembler_module
from seriatim.producer.sources.postgres.core import pgoutput
from seriatim.producer.sources.postgres.core import snapshot as snapshot_module
from seriatim.producer.sources.postgres.core.assembler import Assembler, Outgoing
from seriatim.producer.sources.postgres.core.identity import (
    LSN_LIMIT,
    NUMBER_BITS,
    NUMBER_LIMIT,
    base_seq,
    parse_lsn,
)
from seriatim.producer.sources.postgres.core.invariants import broken_order
from seriatim.producer.sources.postgres.core.snapshot import SnapshotWriter
from seriatim.producer.sources.postgres.errors import (
    CaptureGap,
    KeylessTable,
    LogTooFar,
    MalformedLog,
    PartitionUnclear,
    TransactionTooLarge,
)
from seriatim.protocol.change import MalformedChange, decode, encode, format_lsn
from tests.changes import key_of

TRACES = Path(__file__).parent / "test_pgoutput_traces"
NAMES = ("rows", "origin", "types")


def messages(name: str) -> list[bytes]:
    lines = (TRACES / f"{name}.txt").read_text().splitlines()
    return [bytes.fromhex(line) for line in lines if not line.startswith("#")]


def new(mark: int = 0) -> Assembler:
    following = Assembler(db="d", slot="s", mark=mark, confirmed_lsn=0, heartbeat_ms=1000)
    following.accept_keyless("public", "nokey")
    return following


def records(name: str, mark: int = 0) -> list[Outgoing]:
    following = new(mark)
    return [record for data in messages(name) if (record := following.feed(data)) is not None]


def as_text(record: Outgoing) -> str:
    at = f"{record.seq >> NUMBER_BITS << 5:X}+{record.seq & NUMBER_LIMIT}"
    key = "-" if record.key is None else record.key.decode()
    return f"{at} {key} {record.value.decode()}"


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_log_gives_its_records(name: str) -> None:
    made = records(name)
    assert [as_text(record) for record in made] == (TRACES / f"{name}.records").read_text().splitlines()
    assert broken_order(made, 0) is None
    for record in made:
        change = decode(record.value)
        assert encode(change) == record.value
        assert key_of(change) == record.key
        assert base_seq(change.source.commit_lsn) | change.source.number == record.seq


@pytest.mark.parametrize("name", NAMES)
def test_skipping_by_any_mark_gives_exactly_the_suffix_that_is_missing(name: str) -> None:
    everything = records(name)
    for place, record in enumerate(everything):
        assert records(name, record.seq) == everything[place + 1 :]
        assert records(name, record.seq - 1) == everything[place:]


def test_a_rolled_back_savepoint_leaves_no_trace() -> None:
    ids = [json.loads(record.value)["after"]["id"] for record in records("types") if b'"op":"c"' in record.value]
    assert ids == [1, 3, 1]


def test_what_is_told_of_a_transaction_that_was_rolled_back_is_passed_over() -> None:
    """As PostgreSQL 18.6 sent it to a capture behind a crash, one for each savepoint: of protocol 2, which nobody had asked for."""
    following = new()
    aborted = bytes.fromhex("4100000aca00000ad8")
    assert following.feed(aborted) is None
    assert not following.in_transaction
    alone = [record for data in messages("rows") if (record := following.feed(data)) is not None]
    assert alone == records("rows")


def test_changes_replicated_into_the_source_name_where_they_came_from() -> None:
    origins = [decode(record.value).source.replicated_from for record in records("origin")]
    # The begin message comes before the origin is told.
    assert origins == [None, "far", "far", None, None, None]


def test_a_keyless_table_can_be_fed_again_once_it_is_accepted() -> None:
    following = Assembler(db="d", slot="s", mark=0, confirmed_lsn=0, heartbeat_ms=1000)
    read = messages("types")
    (place,) = [place for place, data in enumerate(read) if b"nokey" in data]
    made = [following.feed(data) for data in read[:place]]
    with pytest.raises(KeylessTable) as refused:
        following.feed(read[place])
    assert refused.value.details["table"] == "nokey"
    following.accept_keyless("public", "nokey")
    made += [following.feed(data) for data in read[place:]]
    assert [record for record in made if record is not None] == records("types")


# ---------------------------------------------------------------------------------------------------- malformed


def cuts() -> Iterator[tuple[str, int, int]]:
    for name in NAMES:
        for place, data in enumerate(messages(name)):
            if data[0] not in (pgoutput.TYPE, pgoutput.MESSAGE):  # they are passed over unread
                yield from ((name, place, length) for length in range(min(len(data), 120)))


def test_a_message_cut_short_anywhere_is_malformed() -> None:
    """Never a record with less in it, never an error that the shell doesn't know."""
    for name, place, length in cuts():
        following = new()
        read = messages(name)
        for data in read[:place]:
            following.feed(data)
        with pytest.raises(MalformedLog):
            following.feed(read[place][:length])


BEGIN = struct.pack(">cQqI", b"B", 0x2000, 0, 7)
COMMIT = struct.pack(">cBQQq", b"C", 0, 0x2000, 0x2030, 0)
RELATION = b"R" + struct.pack(">I", 5) + b"public\0t\0d" + struct.pack(">H", 1) + b"\1id\0" + struct.pack(">Ii", 23, -1)
INSERT = b"I" + struct.pack(">I", 5) + b"N" + struct.pack(">H", 1) + b"t" + struct.pack(">I", 1) + b"1"
TRUNCATE = b"T" + struct.pack(">IBI", 1, 0, 5)


@pytest.mark.parametrize(
    "log",
    [
        [COMMIT],
        [BEGIN, BEGIN],
        [BEGIN, COMMIT, COMMIT],
        [BEGIN, struct.pack(">cBQQq", b"C", 0, 0x2008, 0x2030, 0)],
        [BEGIN, COMMIT, struct.pack(">cQqI", b"B", 0x1000, 0, 8)],
        [BEGIN, INSERT],
        [RELATION, INSERT],
        [RELATION, TRUNCATE],
        [BEGIN, TRUNCATE],
        [BEGIN, RELATION, INSERT.replace(b"N\0\1", b"N\0\2")],
        [BEGIN, RELATION, INSERT.replace(b"\1t", b"\1x")],
        [BEGIN, RELATION, b"U" + INSERT[1:5] + b"K" + INSERT[6:] + b"X\0\1n"],
        [BEGIN, RELATION, b"U" + INSERT[1:5] + b"N\0\1u"],
        [BEGIN, RELATION, b"D" + INSERT[1:5] + b"N" + INSERT[6:]],
        [b"Z"],
        [b""],
        [RELATION.replace(b"id", b"\xff\xff")],
    ],
)
def test_a_message_out_of_place_is_malformed(log: list[bytes]) -> None:
    following = new()
    for data in log[:-1]:
        following.feed(data)
    with pytest.raises(MalformedLog):
        following.feed(log[-1])


# ------------------------------------------------------------------------------------- values that weren't sent


def relation(identity: bytes, *columns: tuple[bytes, int], keys: int) -> bytes:
    """Of a table t, whose first `keys` columns are of its replica identity."""
    described = [
        bytes([place < keys]) + name + b"\0" + struct.pack(">Ii", oid, -1) for place, (name, oid) in enumerate(columns)
    ]
    return (
        b"R" + struct.pack(">I", 5) + b"public\0t\0" + identity + struct.pack(">H", len(columns)) + b"".join(described)
    )


def image(*values: bytes) -> bytes:
    """One as it is sent; `n`: null, `u`: unchanged and stored out of line, else text."""
    sent = [one if one in (b"n", b"u") else b"t" + struct.pack(">I", len(one)) + one for one in values]
    return struct.pack(">H", len(values)) + b"".join(sent)


ID, NOTE = (b"id", 23), (b"note", 25)


def change_of(described: bytes, message: bytes) -> dict[str, object]:
    """A row's images, and which columns are in neither."""
    following = new()
    made = [following.feed(data) for data in (BEGIN, described, message[:1] + struct.pack(">I", 5) + message[1:])]
    assert made[-1] is not None
    change = json.loads(made[-1].value)
    return {"before": change["before"], "after": change["after"], "unchanged": change["source"].get("unchanged")}


def test_what_an_update_left_out_is_taken_from_the_old_row_unless_that_tells_nothing_of_it() -> None:
    full = relation(b"f", ID, NOTE, keys=2)
    updated = change_of(full, b"UO" + image(b"1", b"long") + b"N" + image(b"2", b"u"))
    assert updated == {"before": {"id": 1, "note": "long"}, "after": {"id": 2, "note": "long"}, "unchanged": None}
    of_partition = change_of(full, b"UO" + image(b"1", b"n") + b"N" + image(b"2", b"u"))
    assert (of_partition["after"], of_partition["unchanged"]) == ({"id": 2}, ["note"])
    emptied = change_of(full, b"UO" + image(b"1", b"long") + b"N" + image(b"2", b"n"))
    assert emptied["after"] == {"id": 2, "note": None}
    by_key = change_of(relation(b"d", ID, NOTE, keys=1), b"UN" + image(b"1", b"u"))
    assert by_key == {"before": None, "after": {"id": 1}, "unchanged": ["note"]}


def test_what_may_be_of_a_partition_whose_identity_is_too_little_is_told_by_a_stream_that_begins_with_it() -> None:
    """There the partition is described only if the transaction has rows of it."""
    begins = [struct.pack(">cQqI", b"B", lsn, 0, 7) for lsn in (64, 128)]
    ended = struct.pack(">cBQQq", b"C", 0, 64, 96, 0)
    above = relation(b"d", ID, NOTE, keys=1)
    blind = b"R" + struct.pack(">I", 6) + b"public\0z1\0" + relation(b"i", NOTE, ID, keys=1)[14:]
    inserted, updated = (kind + struct.pack(">I", 5) + b"N" + image(b"1", b"x") for kind in (b"I", b"U"))
    following = new()
    for data in (begins[0], above, blind, inserted, ended, begins[1]):
        following.feed(data)
    last = following.last_seq
    for _ in range(2):
        with pytest.raises(PartitionUnclear, match="read again"):
            following.feed(updated)
    assert (following.last_seq, following.confirmable(last - 1), following.read_again()) == (last, 64, 128)
    for described, is_told in (((above,), True), ((above, blind), False)):
        again = new(mark=last)
        for data in (begins[1], *described):
            again.feed(data)
        if is_told:
            assert again.feed(updated) is not None
        else:
            with pytest.raises(CaptureGap, match="doesn't tell the rows of that apart"):
                again.feed(updated)


def test_a_row_that_an_update_brought_in_without_all_its_values_is_a_gap() -> None:
    with pytest.raises(CaptureGap, match="note"):
        change_of(relation(b"d", ID, NOTE, keys=1), b"IN" + image(b"1", b"u"))


def test_a_row_says_which_columns_of_its_key_are_texts() -> None:
    """In the log and in a snapshot: to a target whose column isn't one, two texts may be one key."""
    columns = (ID, NOTE, (b"code", 1043), (b"at", 1114), (b"more", 25))
    rows = []
    for identity, keys in ((b"d", 4), (b"f", 5)):
        described, following = relation(identity, *columns, keys=keys), new()
        following.feed(BEGIN)
        following.feed(described)
        logged = following.feed(b"I" + struct.pack(">I", 5) + b"N" + image(b"1", b"a", b"b", b"c", b"d"))
        writer = SnapshotWriter(db="d", slot="s", consistent_point=0x2000, ts_ms=7)
        copied = writer.table(pgoutput.read_relation(described)).row(b"1\ta\tb\tc\td")
        rows += [decode(one.value) for one in (logged, copied) if one is not None]
    assert [change.source.text_key for change in rows] == [("note", "code")] * 2 + [()] * 2
    assert [change.source.key for change in rows] == [("id", "note", "code", "at")] * 2 + [()] * 2
    assert [encode(change) for change in rows] == [encode(decode(encode(change))) for change in rows]


def test_an_envelope_that_is_cut_short_or_has_more_behind_it_is_malformed() -> None:
    value = records("rows")[1].value
    whole = decode(value)
    for broken in [*(value[:end] for end in range(len(value))), value + b"}", value + value, b"[" + value + b"]"]:
        with pytest.raises(MalformedChange):
            decode(broken)
    assert decode(b" \n" + value + b" ") == decode(value.decode()) == whole


def test_a_boolean_is_one() -> None:
    described = relation(b"d", ID, (b"is_on", 16), keys=1)
    rows = [change_of(described, b"IN" + image(b"1", sent))["after"] for sent in (b"t", b"f")]
    assert rows == [{"id": 1, "is_on": True}, {"id": 1, "is_on": False}]


# ----------------------------------------------------------------------------------------------------- snapshot


def test_a_snapshot_counts_its_rows_and_reads_what_copy_writes() -> None:
    table = pgoutput.read_relation(relation(b"d", ID, NOTE, keys=1))
    writer = SnapshotWriter(db="d", slot="s", consistent_point=0x2000, ts_ms=7)
    begun, rows = writer.begin([table]), writer.table(table)
    lines = [b"1\tplain", b"2\t\\N", b"3\tone\\ttwo\\nthree\\\\four", b"4\t"]
    made = [rows.row(line) for line in lines]
    ended = writer.end()
    assert [decode(one.value).after for one in made] == [
        {"id": 1, "note": "plain"},
        {"id": 2, "note": None},
        {"id": 3, "note": "one\ttwo\nthree\\four"},
        {"id": 4, "note": ""},
    ]
    assert [one.key for one in made] == [key_of(decode(one.value)) for one in made]
    assert [one.seq for one in (begun, *made, ended)] == [1, 2, 3, 4, 5, base_seq(0x2000)]
    assert decode(ended.value).source.changes == len(lines)
    for line in (b"1", b"1\ta\tb"):
        with pytest.raises(MalformedLog):
            rows.row(line)
    empty = writer.table(pgoutput.read_relation(relation(b"f", keys=0)))
    assert decode(empty.row(b"").value).after == {}


def test_a_snapshot_never_reaches_the_seq_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "base_seq", lambda _: 3)
    table = pgoutput.read_relation(relation(b"d", ID, keys=1))
    writer = SnapshotWriter(db="d", slot="s", consistent_point=0x2000, ts_ms=7)
    writer.begin([table])
    assert writer.table(table).row(b"1").seq == 2
    with pytest.raises(MalformedLog, match="more rows"):
        writer.table(table).row(b"2")


# ------------------------------------------------------------------------------------------------------- limits


def test_a_transaction_larger_than_a_seq_can_count_is_refused_and_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembler_module, "NUMBER_LIMIT", 5)
    following = new()
    sent = [following.feed(data) for data in (BEGIN, RELATION, *[INSERT] * 4)]
    with pytest.raises(TransactionTooLarge) as refused:
        following.feed(INSERT)
    assert refused.value.details["tx_id"] == 7
    assert sent[-1] is not None
    assert sent[-1].seq == base_seq(0x2000) | 5
    assert following.confirmable(2**64 - 1) == 0


def test_the_largest_transaction_that_can_be_counted_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler_module, "NUMBER_LIMIT", 6)
    following = new()
    made = [following.feed(data) for data in (BEGIN, RELATION, *[INSERT] * 4, COMMIT)]
    assert made[-1] is not None
    assert made[-1].seq == base_seq(0x2000) | 6


def test_numbers_and_positions_fill_a_seq_and_not_more() -> None:
    assert base_seq(LSN_LIMIT - 1) | NUMBER_LIMIT == 2**64 - 1
    with pytest.raises(LogTooFar):
        base_seq(LSN_LIMIT)


def test_a_log_too_far_is_refused_at_a_begin_and_at_a_heartbeat() -> None:
    with pytest.raises(LogTooFar):
        new().feed(struct.pack(">cQqI", b"B", LSN_LIMIT, 0, 7))
    following = new()
    following.reach(LSN_LIMIT)
    with pytest.raises(LogTooFar):
        following.heartbeat(0)


def test_positions_are_written_as_postgres_writes_them() -> None:
    assert parse_lsn("16/B374D848") == 0x16B374D848
    assert format_lsn(0x16B374D848) == "16/B374D848"


def test_heartbeats_wait_their_time_and_never_split_a_transaction() -> None:
    following = new()
    following.reach(0x1000)
    first = following.heartbeat(0)
    assert first is not None
    assert first.seq == base_seq(0x1000)
    following.reach(0x1800)
    assert following.heartbeat(999) is None
    following.feed(BEGIN)
    following.reach(0x2800)  # the server's keepalive inside a transaction
    assert following.heartbeat(5000) is None
    following.feed(COMMIT)
    assert following.heartbeat(5000) is None
    assert following.confirmable(base_seq(0x1000)) == 0x1000
    assert following.confirmable(base_seq(0x2000) | 2) == 0x2000
    for number, now_ms in enumerate((1000, 2000, -3_600_000)):  # its clock was set back by an hour
        following.reach(0x3000 + number * 0x100)
        assert following.heartbeat(now_ms) is not None
        following.reach(0x3080 + number * 0x100)
        assert following.heartbeat(now_ms + 999) is None
