"""PostgreSQL's streaming replication protocol, over psycopg's wrapper of libpq (manual, "Streaming Replication Protocol").

psycopg has no API for it, but its `PGconn` has all that is needed: simple queries, and COPY in both directions.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from seriatim.producer.sources.postgres.core.identity import Server, parse_lsn
from seriatim.producer.sources.postgres.core.naming import CAPTURE
from seriatim.producer.sources.postgres.core.pgoutput import POSTGRES_EPOCH_MS
from seriatim.producer.sources.postgres.core.rows import quote_name
from seriatim.producer.sources.postgres.errors import (
    CaptureGap,
    CaptureRefused,
    LogUnreadable,
    MalformedLog,
    SlotBusy,
    SourceLost,
    SourceSilent,
)
from seriatim.protocol.change import TEXT_SETTINGS, format_lsn
from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.postgres import (
    NO_TIMEOUTS,
    PLAIN_NAMES,
    SERVER_SETTINGS,
    TRANSACTION_TIMEOUT,
    defaults_beside,
    in_a_line,
)

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
_OBJECT_IN_USE: Final = "55006"
_NOT_IN_STATE: Final = "55000"
_REFUSALS: Final = frozenset({"42501", "28000", "28P01", "53400"})  # rights, log-in, no slot free
_PASSING_CLASSES: Final = frozenset({"08", "40", "53", "55", "57", "58"})
"""The connection; collisions; what the server lacks; the slot's state, which is looked at next; somebody's hand, or a shutdown; its disk."""
_FILE_GONE: Final = "58P01"
"""A part of the log that the slot needs isn't there: somebody made room by hand, or a copy of the server was made without it. It stays so."""
_HAS_TRANSACTION_TIMEOUT: Final = 170000
_DATA = ord("w")
_KEEPALIVE = ord("k")
_DATA_HEAD = struct.Struct(">xQQq")
_KEEPALIVE_BODY = struct.Struct(">xQqB")
_STATUS = struct.Struct(">cQQQqB")
_BATCH_MESSAGES: Final = 2000
STATUS_INTERVAL_S: Final = 2.0
"""A status goes out at least this often."""
_SENDER_TIMEOUT: Final = "20s"
"""A slot is free again so long after the machine of its capture died without a word; PostgreSQL's default is a minute."""
_ASK_AFTER_S: Final = 10.0
"""A server that sends nothing for so long is asked whether it is there."""
SILENCE_S: Final = 60.0
"""It has so long to answer, as by `wal_receiver_timeout` of PostgreSQL's own subscribers. One that decodes a large transaction of which it has
nothing to send looks for questions every hundred changes, once half of _SENDER_TIMEOUT is over (`WalSndUpdateProgress`)."""
_TELLING: Final = {"client_min_messages": "warning"}
"""From version 18 on PostgreSQL goes on where a publication is gone, and a warning is all that tells of the changes it left out."""


def conninfo(dsn: str, settings: Mapping[str, str] = MappingProxyType({}), **more: str) -> str:
    """The DSN with the settings that values are written as text under, and with those that notice a silent server, or client.

    What the DSN, or PGOPTIONS, has of options stays, before ours: a role to act as, or where a hosted database is.

    Raises:
        InvalidArgument: the DSN can't be read.
    """
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise InvalidArgument(f"the source's DSN can't be read: {in_a_line(error)}") from error
    ours = " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in {**_options(), **settings}.items()
    )
    options = f"{given.get('options') or os.environ.get('PGOPTIONS', '')} {ours}".strip()
    return make_conninfo(dsn, client_encoding="UTF8", options=options, **defaults_beside(given), **more)


def _options() -> dict[str, str]:
    settings = {name: value for name, value in TEXT_SETTINGS.items() if name != "client_encoding"}
    return {**settings, **SERVER_SETTINGS, **NO_TIMEOUTS, **_TELLING, "wal_sender_timeout": _SENDER_TIMEOUT}


def session(info: str) -> Connection:
    """A connection with this information, whose transactions last as long as they need to."""
    connection: Connection = psycopg.connect(info, autocommit=True)
    try:
        if connection.info.server_version >= _HAS_TRANSACTION_TIMEOUT:
            # Older ones would refuse it among the options.
            connection.pgconn.exec_(f"SET {TRANSACTION_TIMEOUT} = 0".encode())
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass(frozen=True, slots=True)
class Data:
    """A message of the plugin, and the log position it belongs to."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server has read its log up to `lsn`."""

    lsn: int


class ReplicationConnection:
    """One connection in replication mode. Used by one thread, but for the status that a thread of its own repeats.

    session: what psycopg makes of it, to cancel what it does.
    """

    def __init__(self, dsn: str) -> None:
        """Connect.

        Raises:
            SourceLost: the server can't be reached, or refuses.
        """
        info = conninfo(dsn, PLAIN_NAMES, replication="database", application_name=CAPTURE)
        try:
            self.session = session(info)
        except psycopg.Error as error:
            raise SourceLost(f"no replication connection to the source database: {in_a_line(error)}") from error
        self._connection = self.session.pgconn
        self._connection.nonblocking = 0
        self._lock = threading.Lock()
        self._received_lsn = 0
        self._confirmed_lsn = 0
        self._status_sent_s = 0.0
        self._heard_s = 0.0
        self._asked_s: float | None = None  # since when an answer is waited for
        self._warning: str | None = None
        self._failed: Exception | None = None
        self._ended = threading.Event()
        self._repeater: threading.Thread | None = None
        self._connection.notice_handler = self._notice

    def identify(self) -> Server:
        row = self._query(b"IDENTIFY_SYSTEM")
        return Server(row[0], int(row[1]), row[3])

    def create_slot(self, slot: str) -> tuple[int, str]:
        """Make a slot that goes with this connection; its consistent point, and the name of the snapshot exported there.

        The snapshot can be taken up until the next command on this connection.
        """
        command = f"CREATE_REPLICATION_SLOT {quote_name(slot)} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
        row = self._query(command.encode())
        return parse_lsn(row[1]), row[2]

    def drop_slot(self, slot: str) -> None:
        """Drop the slot."""
        self._query(f"DROP_REPLICATION_SLOT {quote_name(slot)}".encode())

    def start(self, slot: str, publication: str, confirmed_lsn: int) -> None:
        """Start streaming at the slot's confirmed position.

        From now on the slot is in use, also where nothing is received for a long time: one that isn't is given up by
        PostgreSQL after `idle_replication_slot_timeout`.
        """
        names = quote_name(publication).replace("'", "''")
        command = (
            f"START_REPLICATION SLOT {quote_name(slot)} LOGICAL 0/0 (proto_version '1', publication_names '{names}')"
        )
        result = self._connection.exec_(command.encode())  # other than `get_result`, it lets other threads run
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._failure(result)
        self._received_lsn = self._confirmed_lsn = confirmed_lsn
        self._heard_s = time.monotonic()
        self._repeater = threading.Thread(target=self._repeat_status, name="capture-status", daemon=True)
        self._repeater.start()

    def receive(self, timeout_s: float, silence_s: float = SILENCE_S) -> list[Data | Keepalive]:
        """What has arrived, waiting for the first message at most this long; empty after that.

        Raises:
            SourceLost: the server ended the stream.
            SourceSilent: it sends nothing, and hasn't answered for `silence_s`, either.
            LogUnreadable: it met an error in its log.
            CaptureGap: the server warned that it leaves changes out.
        """
        with self._on_stream():
            messages = self._drain()
            if messages:
                return messages
        # Readable or not: TLS may hold the end of what came, and then nothing more is to be read from the socket.
        readable, _, _ = select.select([self._connection.socket], [], [], timeout_s)
        with self._on_stream():
            self._connection.consume_input()
            messages = self._drain()
            self._heed_silence(silence_s, is_heard=bool(readable or messages))
            return messages

    def report(self, confirmed_lsn: int) -> None:
        """Confirm up to here; told at once when it rose and the last status is a while ago, else with the next one."""
        self._confirmed_lsn = max(self._confirmed_lsn, confirmed_lsn)
        if time.monotonic() - self._status_sent_s >= STATUS_INTERVAL_S / 2:
            self.send_status()

    def send_status(self) -> None:
        """Tell the server what was received and what is confirmed.

        Raises:
            SourceLost: the connection is gone.
        """
        with self._on_stream():
            self._put_status()

    def close(self) -> None:
        """Close the connection; the slot is free for another."""
        self._ended.set()
        if self._repeater is not None:
            self._repeater.join()
        self.session.close()

    # ---------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """One thread at a time. Raises SourceLost where it breaks."""
        with self._lock:
            try:
                yield
            except psycopg.OperationalError as error:
                raise SourceLost(f"the stream broke: {in_a_line(error)}") from error

    def _drain(self) -> list[Data | Keepalive]:
        messages: list[Data | Keepalive] = []
        answers = False
        while self._failed is None and len(messages) < _BATCH_MESSAGES:
            size, view = self._connection.get_copy_data(1)
            if size == 0:
                break
            if size < 0:
                self._failed = self._failure(self._connection.get_result())
                break
            data = bytes(view)
            if data[0] == _DATA:
                self._received_lsn = max(self._received_lsn, _DATA_HEAD.unpack_from(data)[0])
                messages.append(Data(data[_DATA_HEAD.size :]))
            elif data[0] == _KEEPALIVE:
                lsn, _, wants_reply = _KEEPALIVE_BODY.unpack_from(data)
                self._received_lsn = max(self._received_lsn, lsn)
                messages.append(Keepalive(lsn))
                answers = answers or bool(wants_reply)
            else:
                raise MalformedLog(f"unknown message {data[:1]!r} in the replication stream")
        if self._warning is not None:
            raise CaptureGap(f"the source database leaves changes out: {self._warning}", reason=self._warning)
        if self._failed is not None:
            if messages:
                return messages  # they come before it, and may not come without it the next time
            raise self._failed
        if answers:
            self._put_status()
        return messages

    def _heed_silence(self, silence_s: float, *, is_heard: bool) -> None:
        """A part of a message counts as heard; what came while nobody received has been heard by now."""
        now_s = time.monotonic()
        if is_heard:
            self._heard_s, self._asked_s = now_s, None
        elif self._asked_s is None:
            if now_s - self._heard_s >= _ASK_AFTER_S:
                self._put_status(asks=True)
                self._asked_s = now_s
        elif now_s - self._asked_s >= silence_s:
            raise SourceSilent(f"the source database sends nothing, and hasn't answered for {silence_s:g} s")

    def _put_status(self, *, asks: bool = False) -> None:
        if self._failed is not None:
            return  # nobody takes it any more; the receiving thread raises what happened
        now_us = (time.time_ns() // 1_000_000 - POSTGRES_EPOCH_MS) * 1000
        status = _STATUS.pack(b"r", self._received_lsn, self._confirmed_lsn, self._confirmed_lsn, now_us, asks)
        self._connection.put_copy_data(status)
        self._connection.flush()
        self._status_sent_s = time.monotonic()

    def _repeat_status(self) -> None:
        """Keep the server from giving up on us while the sender blocks for back-pressure."""
        while not self._ended.wait(STATUS_INTERVAL_S):
            try:
                self.send_status()
            except SourceLost:
                return  # the receiving thread meets the same, and says so

    def _notice(self, result: pq.abc.PGresult) -> None:
        state = result.error_field(pq.DiagnosticField.SQLSTATE)
        severity = result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
        if severity == b"WARNING" and state == _NOT_IN_STATE.encode():  # "skipped loading publication"
            self._warning = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")

    def _query(self, command: bytes) -> list[str]:
        result = self._connection.exec_(command)
        if result.status == pq.ExecStatus.COMMAND_OK:
            return []
        if result.status != pq.ExecStatus.TUPLES_OK or result.ntuples != 1:
            raise self._failure(result)
        return [(result.get_value(0, place) or b"").decode() for place in range(result.nfields)]

    def _failure(self, result: pq.abc.PGresult | None) -> Exception:
        if result is None:
            return SourceLost("the source database ended the stream")
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        message = in_a_line(result.get_error_message()) or "the source database ended the stream"
        if state == _OBJECT_IN_USE:
            return SlotBusy(message)
        if state in _REFUSALS:
            return CaptureRefused(message)
        message = f"{message} (at {format_lsn(self._received_lsn)})"
        passes = not state or (state[:2] in _PASSING_CLASSES and state != _FILE_GONE)
        return SourceLost(message) if passes else LogUnreadable(message)
