"""What all who use PostgreSQL have in common: a schema of Seriatim's own, and how a connection notices that the other side is gone.

It may be gone without a word: a machine without power, a cut between sites. Left alone, TCP asks after two hours whether an idle
connection's other side is still there. So long a replay would wait for an answer of its target; and so long a target would keep the
transaction of a replay that is gone, and the lock on its position, for which the next one waits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

OWN_SCHEMA: Final = "seriatim_replay"
"""Where a replay keeps its positions in a target. What stands there is of that database alone: no copy of it has a use for it."""

CLIENT_DEFAULTS: Final[Mapping[str, str]] = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""libpq's parameters: a server that is silent when it is asked, or has to take what was sent to it, is gone after a minute.

So is one that takes nothing for so long because a statement waits for a lock, where much is sent behind it; that is tried again.
"""

SERVER_SETTINGS: Final[Mapping[str, str]] = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""Settings of a session: a silent client is gone after 25 s, and with it its transaction and its locks. It may wait as long as it likes."""

NO_TIMEOUTS: Final[Mapping[str, str]] = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
"""A role's or a database's may be for a web application; a snapshot takes hours, and would begin again for ever."""
TRANSACTION_TIMEOUT: Final = "transaction_timeout"
"""To be 0 as well, where a server knows it (PostgreSQL 17); older ones refuse it."""

PLAIN_NAMES: Final[Mapping[str, str]] = {"search_path": ""}
"""A name that is a value (regclass, regproc, …) is written with its schema, so that it means the same under every path; as PostgreSQL's own subscribers ask."""

TARGET_SETTINGS: Final[Mapping[str, str]] = {
    **SERVER_SETTINGS,
    "tcp_user_timeout": "60000",
    "idle_in_transaction_session_timeout": "1min",
    "default_transaction_isolation": "read committed",
}
"""For a client that always takes what it is sent: gone after a minute, also where something is on its way to it.

And for one that has all it needs before a transaction begins, or speaks up while it reads more within it: where it says
nothing for a minute, it was stopped (by a signal, by a container's pause), and its machine goes on answering for its connection.
PostgreSQL doesn't count the time within a COPY or a pipeline, nor after a pipeline's end.

And for one that waits for locks, and then has to see what those did that had them, whatever a role's or a database's default is: to a
snapshot from before, a table that was rewritten meanwhile is empty.
"""

HOLDER: Final = b"""
SELECT pid, usename, application_name, state, date_trunc('second', xact_start)::text
  FROM unnest(%s::int[]) waiting, unnest(pg_blocking_pids(waiting)) pid LEFT JOIN pg_stat_activity USING (pid)
 ORDER BY xact_start, pid LIMIT 1"""
"""Who makes one of some server processes wait, given by their ids; no row where none waits for anybody. `told_holder` reads it."""


def told_holder(row: Sequence[object] | None) -> str | None:
    """Who it is, in a sentence; None for nobody."""
    if row is None:
        return None
    pid, role, application, state, since = row
    if pid == 0:
        return "a prepared transaction of the database has to end first: pg_prepared_xacts shows them"
    who = ", ".join(str(each) for each in (role, application, state, since and f"since {since}") if each)
    return f"a transaction of the database has to end first: process {pid} ({who})"


def in_a_line(error: Exception | str) -> str:
    """What libpq says, which breaks it into lines with tabs."""
    return " ".join(str(error).split())


def cut(descriptor: int) -> None:
    """End a connection, given by its socket, under whoever waits for its server, and is told so.

    To close it would free what that one uses: it would wait for whoever has the descriptor next, which may be for ever.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:  # closed meanwhile
        end.shutdown(socket.SHUT_RDWR)


def defaults_beside(given: Mapping[str, object]) -> dict[str, str]:
    """Of CLIENT_DEFAULTS those that a DSN, taken apart, doesn't give itself."""
    return {name: value for name, value in CLIENT_DEFAULTS.items() if name not in given}
