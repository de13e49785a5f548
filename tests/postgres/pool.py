"""A pool of sessions before PostgreSQL, as PgBouncer is one: a client has one for each of its transactions, or, in session mode, for as long as it stays.

It knows what a client without encryption sends that copies nothing. Whoever is let in isn't told who serves it.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from typing import Any, Self

import psycopg

_STARTUP = 196608
_PATIENCE_S = 300.0


class Pool:
    """`dsn`: what leads to the database through it. `in_turn`: the session that was free for longest comes next; else, as PgBouncer has it, that for shortest."""

    def __init__(self, dsn: str, size: int = 2, *, in_turn: bool = False, is_session_mode: bool = False) -> None:
        """Sessions stay until the pool ends, with whatever was set in them."""
        self.sessions = [psycopg.connect(dsn, autocommit=True, prepare_threshold=None) for _ in range(size)]
        self._is_session_mode = is_session_mode
        self._free: queue.Queue[socket.socket] = queue.Queue() if in_turn else queue.LifoQueue()
        self._sockets = [socket.socket(fileno=session.pgconn.socket) for session in self.sessions]
        for one in self._sockets:
            one.settimeout(_PATIENCE_S)
            self._free.put(one)
        self._listening = socket.create_server(("127.0.0.1", 0))
        head, _, database = dsn.rpartition("/")
        self.dsn = f"{head.rpartition(':')[0]}:{self._listening.getsockname()[1]}/{database}?sslmode=disable"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in self._sockets:
            one.detach()
        for session in self.sessions:
            session.close()

    def found(self, setting: str) -> list[Any]:
        """What those who come next find in each session. None may be in use."""
        return [session.execute("SELECT current_setting(%s)", (setting,)).fetchone()[0] for session in self.sessions]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        session: socket.socket | None = None
        with client:
            try:
                if not self._greet(client):
                    return
                while (message := _message(client))[:1] != b"X":
                    session = session or self._free.get()
                    session.sendall(message)
                    if message[:1] in b"QS" and self._answer(client, session) and not self._is_session_mode:
                        self._free.put(session)
                        session = None
            except OSError:
                return
            finally:
                if session is not None:
                    self._free.put(session)

    def _greet(self, client: socket.socket) -> bool:
        (size,) = struct.unpack("!i", _exactly(client, 4))
        if struct.unpack("!i", _exactly(client, size - 4)[:4]) != (_STARTUP,):
            return False
        client.sendall(_told(b"R", struct.pack("!i", 0)))
        for name in ("server_version", "server_encoding", "client_encoding", "standard_conforming_strings"):
            value = self.sessions[0].info.parameter_status(name) or ""
            client.sendall(_told(b"S", f"{name}\0{value}\0".encode()))
        client.sendall(_told(b"K", struct.pack("!ii", 1, 1)) + _told(b"Z", b"I"))
        return True

    @staticmethod
    def _answer(client: socket.socket, session: socket.socket) -> bool:
        """Pass on what is answered; whether no transaction is open behind it."""
        while True:
            answer = _message(session)
            client.sendall(answer)
            if answer[:1] == b"Z":
                return answer[5:] == b"I"


def _told(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _message(end: socket.socket) -> bytes:
    head = _exactly(end, 5)
    return head + _exactly(end, struct.unpack("!i", head[1:])[0] - 4)


def _exactly(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = end.recv(size - len(found))
        if not part:
            raise ConnectionError
        found += part
    return found
