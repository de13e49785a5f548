"""From the log's messages to records with seqs, and what of the log may be confirmed.

One `Assembler` follows one stream from its start. It keeps what the stream's next message is to be read with (the open
transaction, the relations described so far), and nothing of it comes from anywhere but the messages: the same log gives
the same records.

Confirming. The slot is confirmed to the *start* of the commit record of the last transaction whose records are all
acknowledged (PostgreSQL then sends that transaction once more, and it is skipped by its seqs), or to the position of an
acknowledged heartbeat. Never to anything the queue doesn't hold a record of: so ``confirmed >> 5 <= held >> 22`` holds
at any take-over, and a slot that is further than the queue proves a gap (`resume`). The mark, the resume point, may be lower.

Partitions that are published as the table above them. An update comes with an old row where a column of the partition's own replica
identity changed, so where that lacks a part of the key above, an update of that part comes without. Which partition a row is of nobody
says; but before its first row in a stream, and anew when it was altered, a partition is described, directly behind the table above it. So where
one that lacks such was described for an earlier transaction, a stream that begins with the present one tells whether that has rows of it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from seriatim.producer.sources.postgres.core import pgoutput
from seriatim.producer.sources.postgres.core.identity import NUMBER_LIMIT, base_seq, too_large
from seriatim.producer.sources.postgres.core.resume import gap
from seriatim.producer.sources.postgres.core.rows import RowWriter, full_identity, has_identity, keyless, quote_name
from seriatim.producer.sources.postgres.errors import CaptureGap, MalformedLog, PartitionUnclear
from seriatim.protocol.change import Change, Origin, Table, dump_json, encode, format_lsn

_FULL_OLD: Final = ord("O")
_KEY_OLD: Final = ord("K")
_NEW: Final = ord("N")


class Outgoing(NamedTuple):
    """A record to be sent: an encoded envelope, its key and its seq."""

    value: bytes
    key: bytes | None
    seq: int


class Assembler:
    """Follows one stream of pgoutput messages.

    Attributes:
        in_transaction: a begin was read whose commit was not.
        last_seq: seq of the last record read, sent or skipped; at first the mark.
        confirmed_lsn: what `confirmable` answered last; never falls.
        reached_lsn: position reached between transactions that no record speaks of yet; 0 for none, and in a transaction.
    """

    def __init__(self, *, db: str, slot: str, mark: int, confirmed_lsn: int, heartbeat_ms: int) -> None:
        """Start at the slot's confirmed position.

        Args:
            db: database name, for the envelopes.
            slot: slot name, for the envelopes.
            mark: the resume point; records at or below it are skipped.
            confirmed_lsn: position to which the slot is confirmed.
            heartbeat_ms: least time between two heartbeats.
        """
        self.in_transaction = False
        self.last_seq = mark
        self.confirmed_lsn = confirmed_lsn
        self.reached_lsn = 0
        self._db = db
        self._slot = slot
        self._mark = mark
        self._heartbeat_ms = heartbeat_ms
        self._heartbeat_sent_ms: int | None = None
        self._open: deque[tuple[int, int]] = deque()  # (seq, lsn): once seq is acknowledged, lsn may be confirmed
        self._writers: dict[int, RowWriter] = {}
        self._accepted: set[tuple[str, str]] = set()
        self._described = (0, -1)  # the relation described last, and the record before it
        # By the table above: partitions whose replica identity lacks a part of its key, and for which transaction's rows each was described.
        self._blind: dict[int, dict[int, int]] = {}
        # the open transaction
        self._begin = pgoutput.Begin(0, 0, 0)
        self._base_seq = 0
        self._number = 0
        self._replicated_from: str | None = None
        stream = encode(Change("heartbeat", None, None, Origin(db, slot, 0, 0), 0))
        self._stream_head = stream[stream.index(b',"source":') : stream.index(b'"commit_lsn"')].replace(b"%", b"%%")
        self._head = b""  # of the source of every record of the transaction, as `encode` writes it
        self._tails: dict[int, bytes] = {}  # by relation: what follows on the head, up to the number
        self._end = b""

    def accept_keyless(self, schema: str, table: str) -> None:
        """Read a table without a key as one with replica identity full: it was mended, or dropped, later in the log."""
        self._accepted.add((schema, table))

    def feed(self, data: bytes) -> Outgoing | None:
        """Take one message of the stream; its record, if it gives one that the queue doesn't hold.

        Raises:
            KeylessTable: a Relation message of a table that can't be captured; nothing changed, it may be fed again.
            TransactionTooLarge: the transaction has more records than can be counted.
            CaptureGap: the log lacks values of a row that is new to the publication, or doesn't tell which row of a partition is meant.
            PartitionUnclear: it may not tell that; nothing changed. To be fed from `read_again` on, to another assembler.
            MalformedLog: the message can't be read, or can't come here.
        """
        kind = data[0] if data else None
        if kind == pgoutput.UPDATE:
            return self._update(data)
        if kind == pgoutput.INSERT:
            return self._insert(data)
        if kind == pgoutput.DELETE:
            return self._delete(data)
        if kind == pgoutput.BEGIN:
            return self._start(pgoutput.read_begin(data))
        if kind == pgoutput.COMMIT:
            return self._finish(pgoutput.read_commit(data))
        if kind == pgoutput.RELATION:
            self._describe(pgoutput.read_relation(data))
        elif kind == pgoutput.TRUNCATE:
            return self._truncate(pgoutput.read_truncate(data))
        elif kind == pgoutput.ORIGIN:
            self._replicated_from = pgoutput.read_origin(data)
            self._head = self._transaction_head()
        elif kind not in {pgoutput.TYPE, pgoutput.MESSAGE, pgoutput.STREAM_ABORT}:
            raise MalformedLog(f"unknown message {data[:1]!r}")
        return None

    def reach(self, lsn: int) -> None:
        """The server has read its log up to `lsn`: every transaction committed before it was sent before this."""
        if not self.in_transaction:
            self.reached_lsn = lsn

    def heartbeat(self, now_ms: int) -> Outgoing | None:
        """A heartbeat for the position reached, if no record speaks of it yet and the last one is long enough ago."""
        seq = base_seq(self.reached_lsn)
        if seq <= self.last_seq:
            return None
        sent_ms = self._heartbeat_sent_ms
        if sent_ms is not None and 0 <= now_ms - sent_ms < self._heartbeat_ms:
            return None
        lsn = self.reached_lsn
        origin = Origin(db=self._db, slot=self._slot, commit_lsn=lsn, number=0)
        self._heartbeat_sent_ms = now_ms
        self.reached_lsn = 0
        self.last_seq = seq
        self._open.append((seq, lsn))
        return Outgoing(encode(Change("heartbeat", None, None, origin, now_ms)), None, seq)

    def confirmable(self, acknowledged_seq: int) -> int:
        """Position to which the slot may be confirmed, all records up to this seq being acknowledged."""
        pending = self._open
        while pending and pending[0][0] <= acknowledged_seq:
            self.confirmed_lsn = max(self.confirmed_lsn, pending.popleft()[1])
        return self.confirmed_lsn

    def read_again(self) -> int:
        """Position to confirm, all records up to `last_seq` being acknowledged, so that the next stream begins with the open transaction.

        The queue holds its begin, and so a record of this position.
        """
        self._open.clear()
        self.confirmed_lsn = max(self.confirmed_lsn, self._begin.commit_lsn)
        return self.confirmed_lsn

    # ------------------------------------------------------------------------------------------ transaction

    def _start(self, begin: pgoutput.Begin) -> Outgoing | None:
        if self.in_transaction:
            raise MalformedLog("a transaction begins inside another")
        seq = base_seq(begin.commit_lsn)
        if seq < base_seq(self._begin.commit_lsn):
            raise MalformedLog("a transaction commits before the one that came before it")
        self.in_transaction = True
        self.reached_lsn = 0
        self._begin = begin
        self._base_seq = seq
        self._number = 0
        self._replicated_from = None
        self._head = self._transaction_head()
        self._end = b'},"ts_ms":%d}' % begin.ts_ms
        return self._mark_transaction(b"begin", None)

    def _finish(self, commit: pgoutput.Commit) -> Outgoing | None:
        if not self.in_transaction or commit.commit_lsn != self._begin.commit_lsn:
            raise MalformedLog("a commit that belongs to no transaction")
        outgoing = self._mark_transaction(b"commit", commit.end_lsn)
        self.in_transaction = False
        self._open.append((self._base_seq | self._number, commit.commit_lsn))
        return outgoing

    def _mark_transaction(self, operation: bytes, end_lsn: int | None) -> Outgoing | None:
        seq = self._next_seq()
        if seq <= self._mark:
            return None
        counts = b"" if end_lsn is None else b',"changes":%d,"end_lsn":%d' % (self._number - 2, end_lsn)
        value = b'{"op":"%b","before":null,"after":null%b%b,"number":%d%b' % (
            operation,
            self._head,
            counts,
            self._number,
            self._end,
        )
        return Outgoing(value, None, seq)

    def _transaction_head(self) -> bytes:
        """What the sources of all records of the transaction start with, as `encode` writes it."""
        numbers = (self._begin.tx_id, self._begin.commit_lsn)
        head = (self._stream_head + b'"txId":%d,"commit_lsn":%d') % numbers
        if self._replicated_from is None:
            return head
        return head + b',"origin":' + dump_json(self._replicated_from).encode()

    def _next_seq(self) -> int:
        """Count one more record of the open transaction."""
        number = self._number + 1
        if number > NUMBER_LIMIT:
            raise too_large(self._begin.tx_id)
        self._number = number
        seq = self._base_seq | number
        self.last_seq = max(self.last_seq, seq)
        return seq

    # ------------------------------------------------------------------------------------------------- rows

    def _insert(self, data: bytes) -> Outgoing | None:
        oid, writer = self._writer(data)
        seq = self._next_seq()
        if seq <= self._mark:
            return None
        values, _ = writer.read(data, 6)
        after, unsent = writer.row(values)
        if unsent:
            raise self._lacking(writer.table, unsent)
        head = b'{"op":"c","before":null,"after":' + after
        return Outgoing(self._envelope(head, oid, b""), writer.record_key(values), seq)

    def _lacking(self, table: Table, unsent: bytes) -> CaptureGap:
        """Of an update that a row filter makes an insert, PostgreSQL sends no more values than of the update."""
        name = f"{quote_name(table.schema)}.{quote_name(table.name)}"
        return gap(
            self._slot,
            f"an update brought a row of {name} into the publication's row filter, and the log lacks its values of {unsent.decode()}, which "
            f"are stored out of line and weren't touched; run before the new snapshot: {full_identity(table.schema, table.name)}",
        )

    def _update(self, data: bytes) -> Outgoing | None:
        oid, writer = self._writer(data)
        if self._blind.get(oid) and data[5] == _NEW and self._base_seq | (self._number + 1) > self._mark:
            raise self._unclear(oid, writer.table)
        seq = self._next_seq()
        if seq <= self._mark:
            return None
        before = b"null"
        old = None
        position = 5
        if data[position] != _NEW:
            old, before, position = self._old_image(writer, data)
            if data[position : position + 1] != b"N":
                raise MalformedLog("an update without the new row")
        values, _ = writer.read(data, position + 1)
        if old is not None and None in values:
            writer.fill(values, old)
        after, unchanged = writer.row(values)
        head = b'{"op":"u","before":%b,"after":%b' % (before, after)
        return Outgoing(self._envelope(head, oid, unchanged), writer.record_key(values), seq)

    def _delete(self, data: bytes) -> Outgoing | None:
        oid, writer = self._writer(data)
        seq = self._next_seq()
        if seq <= self._mark:
            return None
        old, before, _ = self._old_image(writer, data)
        head = b'{"op":"d","before":%b,"after":null' % before
        return Outgoing(self._envelope(head, oid, b""), writer.record_key(old), seq)

    def _old_image(self, writer: RowWriter, data: bytes) -> tuple[list[bytes | None], bytes, int]:
        kind = data[5]
        if kind not in {_FULL_OLD, _KEY_OLD}:
            raise MalformedLog(f"a row image of kind {kind}")
        old, position = writer.read(data, 6)
        if kind == _KEY_OLD and writer.lacks_key(old):
            raise self._untold(writer.table)
        return old, writer.row(old)[0] if kind == _FULL_OLD else writer.key_object(old), position

    def _untold(self, table: Table) -> CaptureGap:
        return gap(
            self._slot,
            f"a partition published as {table.schema}.{table.name} was given a replica identity that doesn't tell the rows of that apart, "
            f"and a row was changed; run: {full_identity(table.schema, table.name)}, on each such partition, too",
        )

    def _unclear(self, oid: int, table: Table) -> CaptureGap | PartitionUnclear:
        if self._base_seq in self._blind[oid].values():
            return self._untold(table)
        return PartitionUnclear(
            f"a partition published as {table.schema}.{table.name} had a replica identity that doesn't tell the rows of that apart: the "
            f"transaction at {format_lsn(self._begin.commit_lsn)} is read again, to see whether it changes that one"
        )

    def _envelope(self, head: bytes, oid: int, unchanged: bytes) -> bytes:
        tail = self._tails[oid]
        if unchanged:
            return b'%b%b%b,"unchanged":%b,"number":%d%b' % (head, self._head, tail, unchanged, self._number, self._end)
        return b'%b%b%b,"number":%d%b' % (head, self._head, tail, self._number, self._end)

    def _truncate(self, truncate: pgoutput.Truncate) -> Outgoing | None:
        if not self.in_transaction:
            raise MalformedLog("a truncate outside a transaction")
        try:
            tables = tuple(self._writers[oid].table for oid in truncate.oids)
        except KeyError as error:
            raise MalformedLog(f"a truncate of a relation never described: {error}") from error
        for partitions in self._blind.values():
            for oid in truncate.oids:
                partitions.pop(oid, None)  # described one behind the other, but tables of their own
        seq = self._next_seq()
        if seq <= self._mark:
            return None
        origin = Origin(
            db=self._db,
            slot=self._slot,
            commit_lsn=self._begin.commit_lsn,
            number=self._number,
            tx_id=self._begin.tx_id,
            tables=tables,
            cascade=truncate.cascade,
            restart_identity=truncate.restart_identity,
            replicated_from=self._replicated_from,
        )
        return Outgoing(encode(Change("t", None, None, origin, self._begin.ts_ms)), None, seq)

    # -------------------------------------------------------------------------------------------- relations

    def _describe(self, relation: pgoutput.Relation) -> None:
        if not has_identity(relation):
            if (relation.schema, relation.name) not in self._accepted:
                raise keyless(relation.schema, relation.name)
            relation = pgoutput.Relation(relation.oid, relation.schema, relation.name, "f", relation.columns)
        above, behind = self._described
        self._described = relation.oid, self._base_seq | self._number
        if behind == self._described[1]:
            self._note_partition(above, relation)
        writer = self._writers[relation.oid] = RowWriter(relation)
        table = writer.table
        row = Origin(self._db, self._slot, 0, 0, None, table.schema, table.name, table.key, writer.text_key)
        text = encode(Change("c", None, {}, row, 0))
        self._tails[relation.oid] = text[text.rindex(b',"schema":') : text.rindex(b',"number":')]

    def _note_partition(self, above: int, relation: pgoutput.Relation) -> None:
        """With nothing between the two, one is a partition of the other; or a truncate of both follows."""
        key = set(self._writers[above].table.key)
        named = key if relation.identity == "f" else {column.name for column in relation.columns if column.is_key}
        partitions = self._blind.setdefault(above, {})
        if key <= named:
            partitions.pop(relation.oid, None)
        else:
            partitions[relation.oid] = self._base_seq

    def _writer(self, data: bytes) -> tuple[int, RowWriter]:
        if not self.in_transaction or len(data) < 8:
            raise MalformedLog("a row outside a transaction, or cut short")
        oid = int.from_bytes(data[1:5])
        writer = self._writers.get(oid)
        if writer is None:
            raise MalformedLog(f"a row of relation {oid}, which was never described")
        return oid, writer
