"""The loop of a capture: stand by, and when elected go on where the queue says, snapshot if needed, stream.

The loop decides nothing about order or repeats: `core.resume` says how a term starts, `core.assembler` what each
message gives and what may be confirmed. A lost database or a busy slot is waited for, a lost database after half a minute by the next
instance, where one stands by, and so is the limit that a record is over; a gap ends the capture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn

import psycopg

from seriatim.producer.sources.postgres import catalog
from seriatim.producer.sources.postgres.attendant import Attendant
from seriatim.producer.sources.postgres.core.assembler import Assembler, Outgoing
from seriatim.producer.sources.postgres.core.identity import Server, base_seq, source_name
from seriatim.producer.sources.postgres.core.naming import check_slot, snapshot_slot
from seriatim.producer.sources.postgres.core.resume import GiveUpSlot, Stream, TakeSnapshot, gap, plan
from seriatim.producer.sources.postgres.core.snapshot import SnapshotWriter
from seriatim.producer.sources.postgres.errors import (
    CaptureGap,
    CaptureRefused,
    KeylessTable,
    LogUnreadable,
    PartitionUnclear,
    ResumePointUnknown,
    SlotBusy,
    SlotForeign,
    SlotGivenUp,
    SourceLost,
    SourceSilent,
    SourceTablesChanged,
)
from seriatim.producer.sources.postgres.replication import SILENCE_S, Connection, Data, ReplicationConnection
from seriatim.producer.sources.postgres.sender import Deposed, OrderedSender
from seriatim.protocol import log
from seriatim.protocol.batch import MAX_RECORD_BYTES
from seriatim.protocol.change import decode, format_lsn
from seriatim.protocol.errors import RecordTooLarge
from seriatim.protocol.flag import Flag
from seriatim.protocol.postgres import in_a_line

_log = log.logger("capture")
_POLL_S: Final = 0.1
_ACKNOWLEDGED_POLL_S: Final = 0.01
_TELL_EVERY_S: Final = 1.0
_MOVED_S: Final = 10.0
"""A server that reads what it was told takes less."""
_PATIENCE_S: Final = 30.0
"""Who is elected and can't connect to the database for so long lets another instance go first: it may be its own path that is cut."""
_READ_TRIES: Final = 10
"""An error of the server's that is met so often at one place of its log stays: of a row filter, or of its own."""
_LISTS: Final = {"snapshot_begin": "snapshot", "t": "truncate"}


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far a snapshot is: rows of a table that were sent, and the planner's estimate of all (0: unknown)."""

    schema: str
    table: str
    rows: int
    estimated_rows: int


class PostgresCapture:
    """Captures a database's log into a queue, for as long as `run` runs and this instance is elected."""

    def __init__(
        self,
        dsn: str,
        slot: str,
        publication: str,
        tables: Sequence[str],
        sender: OrderedSender,
        *,
        heartbeat_s: float = 3.0,
        retry_s: float = 1.0,
        on_progress: Callable[[SnapshotProgress], None] | None = None,
        on_waiting: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing is connected before `run`.

        Args:
            dsn: of the source database, as libpq reads it.
            slot: replication slot, made if missing; one for each queue.
            publication: made if missing when a snapshot is taken.
            tables: tables to capture, ``schema.table``; empty for all of the publication, or all of the database.
            sender: what records are sent through.
            heartbeat_s: least time between two heartbeats.
            retry_s: pause before a lost database or a busy slot is tried again.
            on_progress: told about once a second while a snapshot is sent, and at each table's end.
            on_waiting: told, in a line, what of the database is waited for, whenever that changes.

        Raises:
            InvalidArgument: no slot can have this name.
        """
        check_slot(slot)
        self._dsn = dsn
        self._slot = slot
        self._publication = publication
        self._tables = tuple(tables)
        self._sender = sender
        self._heartbeat_ms = int(heartbeat_s * 1000)
        self._retry_s = retry_s
        self._on_progress = on_progress
        self._on_waiting = on_waiting
        self._reason = ""
        self._unread = ""  # what the server could not read at the last try
        self._unread_tries = 0
        self._silence_s = SILENCE_S
        self._stopped = Flag()
        self._timeline: tuple[str, int] | None = None
        self._connected_at_s = 0.0

    def stop(self) -> None:
        """End `run` soon, from any thread or a signal handler. Records in flight stay unconfirmed until a later start."""
        self._stopped.set()
        self._sender.stop()

    def run(self) -> None:
        """Capture until `stop`.

        Raises:
            CaptureRefused, KeylessTable: the database can't be captured as it is.
            CaptureGap: going on would leave changes out.
            TransactionTooLarge, LogTooFar: a seq can't be given.
            SourceLost: the database could not be reached at the start; later it is waited for.
            InvalidArgument: the DSN can't be read.
        """
        try:
            self._run()
        except psycopg.Error as error:
            raise CaptureRefused(f"the source database refuses: {in_a_line(error)}") from error

    def _run(self) -> None:
        self._check_at_start()
        self._connected_at_s = time.monotonic()
        while not self._stopped.is_set():
            if not self._sender.wait_until_elected(_POLL_S * 5):
                self._connected_at_s = time.monotonic()  # as far as anybody asked
                continue
            try:
                self._serve()
            except Deposed:
                _log.info("capture deposed", slot=self._slot)
            except ResumePointUnknown:  # the sender tells
                self._stopped.wait(self._retry_s)
            except (SlotBusy, SlotForeign, SourceLost, SourceTablesChanged, psycopg.OperationalError) as error:
                self._judge(error)
                self._wait_for(in_a_line(error))
                self._stopped.wait(self._retry_s)
                if time.monotonic() - self._connected_at_s > _PATIENCE_S:
                    self._connected_at_s = time.monotonic()
                    self._sender.stand_again()

    def _judge(self, error: Exception) -> None:
        """Count what the server can't read; raise CaptureGap where it stays.

        A server that was silent may have been busy with what it begins anew on another connection: it gets twice the time.
        """
        if isinstance(error, SourceSilent):
            self._silence_s *= 2
        unread = error.message if isinstance(error, LogUnreadable) else ""
        self._unread_tries = self._unread_tries + 1 if unread == self._unread else 1
        self._unread = unread
        if unread and self._unread_tries == _READ_TRIES:
            raise gap(self._slot, f"the database can't read its log for it: {unread}") from error

    def _wait_for(self, reason: str) -> None:
        if reason == self._reason:
            return
        self._reason = reason
        _log.info("capture waits", slot=self._slot, reason=reason)
        if self._on_waiting is not None:
            self._on_waiting(reason)

    # ------------------------------------------------------------------------------------------------- a term

    def _check_at_start(self) -> None:
        attendant = Attendant(self._dsn, lambda: not self._stopped.is_set(), self._wait_for)
        with closing(catalog.connect(self._dsn)) as connection, attendant:
            attendant.attend(connection)
            while not self._stopped.is_set():
                try:
                    self._check(connection)
                    if catalog.find_slot(connection, self._slot) is None:  # a snapshot is to come
                        catalog.resolve_all(connection, self._tables)
                except psycopg.errors.DeadlockDetected as error:
                    # Who alters tables waits for one that was looked at before.
                    self._wait_for(in_a_line(error))
                    self._stopped.wait(self._retry_s)
                except psycopg.OperationalError as error:
                    if not self._stopped.is_set():  # else it was cancelled for that
                        raise SourceLost(f"the source database ended the connection: {in_a_line(error)}") from error
                else:
                    return

    def _check(self, connection: Connection) -> bool:
        """Refuse what can't be captured; whether the publication exists."""
        catalog.check_server(connection)
        exists = catalog.has_publication(connection, self._publication)
        if exists:
            catalog.check_tables(connection, self._publication, self._tables)
            catalog.published_tables(connection, self._publication)
        else:
            catalog.check_keys(connection, self._tables)
        return exists

    def _serve(self) -> None:
        with (
            closing(catalog.connect(self._dsn)) as connection,
            closing(ReplicationConnection(self._dsn)) as replication,
        ):
            try:
                with self._attending(connection, replication.session) as attendant:
                    step, db = self._prepare(connection, replication, attendant)
                self._stream(connection, replication, step, db)
            finally:
                self._connected_at_s = time.monotonic()

    @contextmanager
    def _attending(self, *connections: Connection) -> Iterator[Attendant]:
        """What these do meanwhile and isn't wanted any more is broken off, also where the server has to wait."""
        with Attendant(self._dsn, self._is_wanted, self._wait_for) as attendant:
            for connection in connections:
                attendant.attend(connection)
            try:
                yield attendant
            except (SourceLost, psycopg.OperationalError):
                self._watch()  # cancelled for that
                raise

    def _prepare(
        self, connection: Connection, replication: ReplicationConnection, attendant: Attendant
    ) -> tuple[Stream, str]:
        exists = self._check(connection)
        server = replication.identify()
        self._check_timeline(server)
        kept = self._sender.kept()
        step = plan(
            server=server,
            slot_name=self._slot,
            slot=catalog.find_slot(connection, self._slot),
            kept=kept,
            log_end=catalog.log_end(connection),
        )
        if isinstance(step, GiveUpSlot):
            self._give_up_slot(replication, step)
        if isinstance(step, TakeSnapshot):
            self._publish(connection, exists=exists)
            step = self._take_snapshot(connection, replication, attendant, step, server)
        elif not exists:
            raise CaptureGap(
                f"publication {self._publication} is gone, and changes since may be missing", slot=self._slot
            )
        else:
            self._start(connection, replication, step.confirmed_lsn)
            self._tell_missing(connection)
        return step, server.db

    def _tell_missing(self, connection: Connection) -> None:
        missing = [table for table in self._tables if catalog.resolve(connection, table) is None]
        if missing:
            reason = f"dropped, renamed or misspelt; what publication {self._publication} names is captured"
            _log.warning("capture goes on", slot=self._slot, missing=",".join(missing), reason=reason)

    def _publish(self, connection: Connection, *, exists: bool) -> None:
        """Have a publication of which a snapshot can be taken, with all that was asked for, or make none.

        One that names a table without a key would end the application's own updates.
        """
        with connection.transaction():
            catalog.resolve_all(connection, self._tables)
            if not exists:
                catalog.create_publication(connection, self._publication, self._tables)
                catalog.published_tables(connection, self._publication)
            catalog.check_rows(connection, self._publication)

    def _give_up_slot(self, replication: ReplicationConnection, step: GiveUpSlot) -> NoReturn:
        try:
            replication.drop_slot(self._slot)
        except (CaptureRefused, SlotBusy, SourceLost) as error:
            raise gap(self._slot, f"{step.reason}, and the slot can't be dropped: {error.message}") from error
        _log.warning("capture drops its slot", slot=self._slot, reason=step.reason)
        raise gap(self._slot, step.reason, SlotGivenUp)

    def _check_timeline(self, server: Server) -> None:
        now = server.system_id, server.timeline
        if self._timeline not in (None, now):
            raise CaptureGap(
                f"slot {self._slot}: another server answers: cluster and timeline were {self._timeline}, are {now}",
                slot=self._slot,
            )
        self._timeline = now

    # ----------------------------------------------------------------------------------------------- snapshot

    def _take_snapshot(
        self,
        connection: Connection,
        replication: ReplicationConnection,
        attendant: Attendant,
        step: TakeSnapshot,
        server: Server,
    ) -> Stream:
        if step.drops_slot:
            _log.warning("capture drops its slot", slot=self._slot, reason="its snapshot was never finished")
            replication.drop_slot(self._slot)
        with closing(catalog.connect(self._dsn)) as reader:
            attendant.attend(reader)
            with catalog.making_slot(connection, self._slot):
                temporary = snapshot_slot(replication.session.info.backend_pid)
                consistent_point, name = replication.create_slot(temporary)
                source = source_name(server.system_id, server.timeline, self._slot, consistent_point)
                _log.info("capture snapshot", slot=self._slot, at=format_lsn(consistent_point), source=source)
                ts_ms = catalog.start_snapshot(reader, name)
                tables = catalog.published_tables(reader, self._publication)
                catalog.hold_tables(reader, tables)
                catalog.check_not_altered(reader, connection, self._publication)
                writer = SnapshotWriter(db=server.db, slot=self._slot, consistent_point=consistent_point, ts_ms=ts_ms)
                begin = writer.begin([table.relation for table in tables])
                self._send(begin, source)
                self._wait_for_acknowledgement(source, begin.seq)
                catalog.keep_slot(connection, temporary, self._slot)
            # Not before the snapshot was taken, which ends with the next command. What comes waits until it is read.
            replication.drop_slot(temporary)
            self._start(reader, replication, consistent_point)
            for table in tables:
                self._send_table(reader, writer, table, source)
            self._send(writer.end(), source)
        return Stream(source, base_seq(consistent_point), consistent_point)

    def _wait_for_acknowledgement(self, source: str, seq: int) -> None:
        while self._sender.acknowledged(source) < seq:
            self._watch()
            self._stopped.wait(_ACKNOWLEDGED_POLL_S)

    def _send_table(
        self, reader: Connection, writer: SnapshotWriter, table: catalog.CapturedTable, source: str
    ) -> None:
        relation = table.relation
        rows = writer.table(relation)
        count = 0
        tell_at_s = time.monotonic() + _TELL_EVERY_S
        with closing(catalog.read_rows(reader, table)) as lines:
            for line in lines:
                self._send(rows.row(line), source)
                count += 1
                if count % 1000 == 0:
                    self._watch()
                    if time.monotonic() >= tell_at_s:
                        self._progress(SnapshotProgress(relation.schema, relation.name, count, table.estimated_rows))
                        tell_at_s = time.monotonic() + _TELL_EVERY_S
        catalog.check_not_attached(reader, table)
        self._progress(SnapshotProgress(relation.schema, relation.name, count, max(count, table.estimated_rows)))

    def _progress(self, progress: SnapshotProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    def _watch(self) -> None:
        """Leave a long piece of work when it is no longer wanted."""
        if not self._is_wanted():
            raise Deposed

    def _is_wanted(self) -> bool:
        return not self._stopped.is_set() and self._sender.is_elected()

    # ------------------------------------------------------------------------------------------------- stream

    def _stream(self, connection: Connection, replication: ReplicationConnection, step: Stream, db: str) -> None:
        _log.info("capture streams", slot=self._slot, start=format_lsn(step.confirmed_lsn), mark=step.mark)
        assembler = Assembler(
            db=db,
            slot=self._slot,
            mark=step.mark,
            confirmed_lsn=step.confirmed_lsn,
            heartbeat_ms=self._heartbeat_ms,
        )
        self._reason = ""
        while not self._stopped.is_set():
            if not self._sender.is_elected():
                raise Deposed
            for message in replication.receive(_POLL_S, self._silence_s):
                if isinstance(message, Data):
                    try:
                        outgoing = self._feed(connection, assembler, message.payload)
                    except PartitionUnclear:
                        self._read_again(connection, assembler, replication, step)
                        raise
                    if outgoing is not None:
                        self._send(outgoing, step.source)
                else:
                    assembler.reach(message.lsn)
            if assembler.last_seq > step.mark:
                self._silence_s = SILENCE_S
            heartbeat = assembler.heartbeat(time.time_ns() // 1_000_000)
            if heartbeat is not None:
                self._send(heartbeat, step.source)
            self._confirm(assembler, replication, step)
        self._confirm(assembler, replication, step)
        replication.send_status()

    def _start(self, connection: Connection, replication: ReplicationConnection, confirmed_lsn: int) -> None:
        """Stream from the slot, if it still is where it was looked at: from now on nobody else moves it."""
        replication.start(self._slot, self._publication, confirmed_lsn)
        slot = catalog.find_slot(connection, self._slot)
        if slot is None or slot.confirmed_lsn != confirmed_lsn:
            raise SlotBusy(f"slot {self._slot} was moved, or made again, by somebody else just now", slot=self._slot)

    def _confirm(self, assembler: Assembler, replication: ReplicationConnection, step: Stream) -> None:
        acknowledged = max(step.mark, self._sender.acknowledged(step.source))
        replication.report(assembler.confirmable(acknowledged))

    def _read_again(
        self, connection: Connection, assembler: Assembler, replication: ReplicationConnection, step: Stream
    ) -> None:
        """Have the next stream begin with the open transaction."""
        if assembler.last_seq > step.mark:
            self._wait_for_acknowledgement(step.source, assembler.last_seq)
        position = assembler.read_again()
        replication.report(position)
        replication.send_status()
        # The server may not have read that yet when it learns that the connection has ended.
        deadline_s = time.monotonic() + _MOVED_S
        while (slot := catalog.find_slot(connection, self._slot)) is not None and time.monotonic() < deadline_s:
            if slot.confirmed_lsn is not None and slot.confirmed_lsn >= position:
                return
            self._watch()
            self._stopped.wait(_ACKNOWLEDGED_POLL_S)

    def _feed(self, connection: Connection, assembler: Assembler, data: bytes) -> Outgoing | None:
        try:
            return assembler.feed(data)
        except KeylessTable as error:
            schema, table = str(error.details["schema"]), str(error.details["table"])
            with self._attending(connection):
                is_keyless = catalog.is_keyless_now(connection, schema, table)
            if is_keyless:
                raise
            assembler.accept_keyless(schema, table)
            return assembler.feed(data)

    def _send(self, outgoing: Outgoing, source: str) -> None:
        """Hand over; a record over the queue's limit waits for a higher one.

        Who ended with it would be started again, and begin the snapshot anew each time: under another source, from empty tables.
        """
        is_waiting = False
        while True:
            try:
                self._sender.send(outgoing.value, outgoing.key, outgoing.seq, source)
            except RecordTooLarge as error:
                is_waiting = True
                self._wait_for(_why_too_large(outgoing, error))
                self._stopped.wait(self._retry_s)
                self._watch()
            else:
                break
        if is_waiting:
            self._reason = ""  # the same is news again


def _why_too_large(outgoing: Outgoing, error: RecordTooLarge) -> str:
    """Which record it is, and what helps."""
    if outgoing.key is not None:
        what = f"table {json.loads(outgoing.key)[0]}"
    else:
        change = decode(outgoing.value)
        what = f"the list of the {len(change.source.tables)} tables of a {_LISTS.get(change.op, change.op)}"
    if error.details["limit_bytes"] == MAX_RECORD_BYTES:
        return (
            f"{what}: {error.message}, and no queue has a higher one: stop, leave it out, and capture with another slot"
        )
    return (
        f"{what}: {error.message}; raise it with `seriatim queue alter NAME --max-record-bytes N`, then "
        "`seriatim queue rotate NAME`"
    )
