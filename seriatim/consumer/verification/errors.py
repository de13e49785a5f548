"""What keeps a comparison from being made (a difference is an answer, no error)."""

from __future__ import annotations

from seriatim.protocol.errors import CallerError, WorldError


class DatabaseUnreachable(WorldError):
    """One side can't be reached, or was lost on the way. `details["side"]` is source or target."""

    code = "database-unreachable"
    next_step = "is it running, and is the connection string right?"


class SameDatabase(CallerError):
    """Both sides are one database, of which nothing could differ."""

    code = "same-database"


class UnknownTable(CallerError):
    """A table asked for is on neither side."""

    code = "unknown-table"


class ReadRefused(WorldError):
    """A side refused a read: a missing right, say. `details["side"]` is source or target."""

    code = "read-refused"
    can_retry = False


class RowsHidden(ReadRefused):
    """Row-level security hides rows of a table from the role that compares. `details`: side, table."""

    code = "comparison-rows-hidden"
    next_step = "compare as a superuser, or give the role what shows it every row: ALTER ROLE … BYPASSRLS"
