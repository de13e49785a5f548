"""What a capture asks the source database: tables and their keys, the publication, the slot."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from seriatim.producer.sources.postgres.core.identity import parse_lsn
from seriatim.producer.sources.postgres.core.pgoutput import Column, Relation
from seriatim.producer.sources.postgres.core.resume import Slot
from seriatim.producer.sources.postgres.core.rows import full_identity, generated, has_identity, keyless, quote_name
from seriatim.producer.sources.postgres.errors import (
    CaptureRefused,
    KeylessTable,
    RowsHidden,
    SlotBusy,
    SourceLost,
    SourceTablesChanged,
)
from seriatim.producer.sources.postgres.replication import Connection, conninfo, session
from seriatim.protocol.postgres import HOLDER, PLAIN_NAMES, in_a_line, told_holder

OLDEST_VERSION = 150000
_SLOTS_OF_A_SNAPSHOT = 2
ONLY = "ONLY "
_UNREADABLE = (psycopg.errors.IoError, psycopg.errors.UndefinedFile, psycopg.errors.ProgramLimitExceeded)
"""A table's file is damaged, or gone, or a row is larger than what a server can write (1 GiB): a snapshot that began again would end there again,
each time behind the rows of all tables before it.
"""

_IDENTITY = """(
    SELECT x.indexrelid FROM pg_index x WHERE x.indrelid = c.oid AND x.indimmediate AND (x.indisvalid OR c.relkind = 'p')
       AND CASE c.relreplident WHEN 'd' THEN x.indisprimary WHEN 'i' THEN x.indisreplident END)"""
"""The index that tells the rows of table `c` apart, if any, as the query sees it. PostgreSQL's own function for it waits for whoever alters
the table, and then tells what is so now, beside what the query saw before."""

_TABLES = f"""
SELECT c.oid, n.nspname, c.relname, c.relreplident, c.relkind, p.rowfilter, greatest(c.reltuples, 0)::bigint,
       array(SELECT (a.attname::text, a.atttypid::bigint,
                     coalesce(a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]), false))  -- what it includes is no key
               FROM pg_attribute a LEFT JOIN pg_index i ON i.indexrelid = {_IDENTITY}
              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attname = ANY (p.attnames)
                -- PostgreSQL 15 names generated columns as well, and has none in its log
                AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 160000)
              ORDER BY a.attnum)
  FROM pg_publication_tables p
  JOIN pg_namespace n ON n.nspname = p.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
 WHERE p.pubname = %s ORDER BY n.nspname, c.relname"""  # noqa: S608 - a constant

_SLOT = """
SELECT plugin, database, active, confirmed_flush_lsn::text, wal_status, to_jsonb(s) ->> 'invalidation_reason'
  FROM pg_replication_slots s WHERE slot_name = %s"""

_IS_PUBLISHED = """
WITH named AS (SELECT %(oid)s::oid AS oid UNION SELECT relid FROM pg_partition_ancestors(%(oid)s::oid))
SELECT t.relpersistence = 'p' AND (
           p.puballtables
           OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid IN (SELECT oid FROM named))
           OR EXISTS (SELECT FROM pg_publication_namespace s JOIN pg_class c ON c.relnamespace = s.pnnspid
                       WHERE s.pnpubid = p.oid AND c.oid IN (SELECT oid FROM named)))
  FROM pg_publication p, pg_class t WHERE p.pubname = %(publication)s AND t.oid = %(oid)s::oid"""

_IS_GENERATED = f"""EXISTS (
    SELECT FROM pg_attribute g LEFT JOIN pg_index i ON i.indexrelid = {_IDENTITY}
     WHERE g.attrelid = c.oid AND g.attgenerated <> '' AND NOT g.attisdropped
       AND CASE c.relreplident WHEN 'f' THEN current_setting('server_version_num')::int >= 180000
                               ELSE g.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]) END)"""
"""Whether the replica identity of table `c` has a generated column. Unless that is published, rows can't be told apart by it; from version 18
on PostgreSQL then refuses to update them, also where the identity is full."""

_KEYLESS = f"""
WITH RECURSIVE wanted AS (
    SELECT unnest(%(oids)s::oid[]) AS oid UNION SELECT i.inhrelid FROM pg_inherits i JOIN wanted w ON i.inhparent = w.oid)
SELECT n.nspname, c.relname, t.is_generated,
       EXISTS (SELECT FROM pg_attribute v WHERE v.attrelid = c.oid AND v.attgenerated = 'v' AND NOT v.attisdropped)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, LATERAL (SELECT {_IS_GENERATED} AS is_generated) t
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND (t.is_generated OR c.relreplident <> 'f' AND {_IDENTITY} IS NULL)
   AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
   AND (%(is_all)s OR c.oid IN (SELECT oid FROM wanted)) ORDER BY 1, 2 LIMIT 1"""  # noqa: S608 - a constant

_REWRITTEN = """
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relfilenode <> pg_relation_filenode(c.oid)
   AND c.oid IN (SELECT unnest(%(oids)s::oid[]) UNION SELECT t.relid FROM unnest(%(oids)s::oid[]) o, pg_partition_tree(o) t)
 ORDER BY 1, 2 LIMIT 1"""

_UNTOLD = f"""
WITH part AS (SELECT p.oid AS above, t.relid FROM pg_class p, pg_partition_tree(p.oid) t WHERE p.oid = ANY (%s) AND p.relkind = 'p'),
     told AS (SELECT c.oid, n.nspname, c.relname, c.relkind = 'r' AND c.relreplident <> 'f' AS is_by_key,
                     array(SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid
                            WHERE a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]) AND i.indexrelid = coalesce(
                                  {_IDENTITY}, (SELECT k.indexrelid FROM pg_index k WHERE k.indrelid = c.oid AND k.indisprimary))) AS columns
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid IN (SELECT relid FROM part))
SELECT own.nspname, own.relname, whole.relname
  FROM part JOIN told own ON own.oid = part.relid JOIN told whole ON whole.oid = part.above
 WHERE own.is_by_key AND (whole.columns = '{{}}' OR NOT whole.columns <@ own.columns) ORDER BY 1, 2 LIMIT 1"""  # noqa: S608 - a constant


_PUBLICATION = """
WITH own AS (SELECT oid, xmin FROM pg_publication WHERE pubname = %(name)s)
SELECT 0 AS kind, oid::int8 AS oid, xmin::text AS xmin FROM own
UNION ALL SELECT 1, r.oid, r.xmin::text FROM pg_publication_rel r JOIN own ON own.oid = r.prpubid
UNION ALL SELECT 2, n.oid, n.xmin::text FROM pg_publication_namespace n JOIN own ON own.oid = n.pnpubid
 ORDER BY 1, 2"""

_ATTACHED = """
WITH RECURSIVE seen AS (SELECT %(oid)s::oid AS oid UNION SELECT i.inhrelid FROM pg_inherits i JOIN seen ON i.inhparent = seen.oid)
SELECT n.nspname, c.relname
  FROM pg_partition_tree(%(oid)s::oid) t JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE t.relid NOT IN (SELECT oid FROM seen) ORDER BY 1, 2 LIMIT 1"""
"""`pg_inherits` and `pg_class` are as of the snapshot, the tree is as of now: a partition that was made since isn't among them, nor has rows to be read."""


@dataclass(frozen=True, slots=True)
class Named:
    """A table that somebody named: oid, schema and name."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table of the publication.

    Attributes:
        relation: its description, as the log gives it.
        place: the table as SQL names it; with ONLY, where it stands for no other.
        query: the statement that reads it.
        estimated_rows: the planner's estimate; 0 for unknown.
    """

    relation: Relation
    place: str
    query: str
    estimated_rows: int


def connect(dsn: str) -> Connection:
    """An ordinary connection.

    Raises:
        SourceLost: the server can't be reached, or refuses.
        InvalidArgument: the DSN can't be read.
    """
    info = conninfo(dsn, application_name="seriatim-capture")
    try:
        return session(info)
    except psycopg.Error as error:
        raise SourceLost(f"no connection to the source database: {in_a_line(error)}") from error


def check_server(connection: Connection) -> None:
    """Refuse a server whose log can't be captured.

    Raises:
        CaptureRefused: too old, no logical log, or text in an unknown encoding.
        SourceLost: a stand-by, whose log is that of another server.
    """
    if _one(connection, "SELECT pg_is_in_recovery()"):
        raise SourceLost(
            "the source database is a stand-by, and only a primary is captured; a DSN may name all: "
            "postgresql://a,b/db?target_session_attrs=read-write"
        )
    if connection.info.server_version < OLDEST_VERSION:
        raise CaptureRefused("the source database has to be PostgreSQL 15 or newer")
    if _one(connection, "SHOW wal_level") != "logical":
        statement = "ALTER SYSTEM SET wal_level = logical"
        raise CaptureRefused(
            f"the source database keeps no logical log; run: {statement}, and restart it", statement=statement
        )
    if _one(connection, "SHOW server_encoding") == "SQL_ASCII":
        raise CaptureRefused("a database in SQL_ASCII does not say what its text means, so it can't be captured")


def has_publication(connection: Connection, publication: str) -> bool:
    """Whether the publication exists.

    Raises:
        CaptureRefused: it exists, but leaves some kind of change out.
    """
    row = connection.execute(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s",
        (publication,),
    ).fetchone()
    if row is not None and not row[0]:
        statement = f"ALTER PUBLICATION {quote_name(publication)} SET (publish = 'insert, update, delete, truncate')"
        raise CaptureRefused(
            f"publication {publication} leaves some kinds of change out; run: {statement}; and where a stream has begun, of which it left some "
            "out, capture with another slot, which starts with a new snapshot",
            statement=statement,
        )
    return row is not None


def create_publication(connection: Connection, publication: str, tables: Sequence[str]) -> None:
    """Make the publication: of these tables, or with none named of all.

    Raises:
        CaptureRefused: a table doesn't exist, or this role may not publish it.
    """
    found = [sql.Identifier(named.schema, named.name) for named in resolve_all(connection, tables)]
    target = sql.SQL("TABLE ") + sql.SQL(", ").join(found) if found else sql.SQL("ALL TABLES")
    statement = sql.SQL("CREATE PUBLICATION {} FOR ").format(sql.Identifier(publication)) + target
    try:
        connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege as error:
        text = statement.as_string(connection)
        raise CaptureRefused(
            f"publication {publication} can't be made: {in_a_line(error)}; let somebody who may run: {text}",
            statement=text,
        ) from error


def resolve_all(connection: Connection, tables: Sequence[str]) -> list[Named]:
    """The tables given as ``schema.table`` or ``table``.

    Raises:
        CaptureRefused: there is no such table.
    """
    found = []
    for table in tables:
        named = resolve(connection, table)
        if named is None:
            raise CaptureRefused(f"the source database has no table {table}", table=table)
        found.append(named)
    return found


def resolve(connection: Connection, table: str) -> Named | None:
    """The table given as ``schema.table`` or ``table``, if there is one."""
    row = connection.execute(
        "SELECT c.oid, n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = to_regclass(%s) AND c.relkind IN ('r', 'p')",
        (table,),
    ).fetchone()
    return None if row is None else Named(*row)


def check_tables(connection: Connection, publication: str, tables: Sequence[str]) -> None:
    """Refuse wanted tables that are missing in an existing publication; not those that aren't there at all.

    One that was dropped, or renamed, since a stream began is no reason to end that: it goes on without a gap, and its slot keeps the log meanwhile.

    What the publication names counts, and not what it comes to: that is the partitions of a partitioned table, and of one
    that has none yet it is nothing.

    Raises:
        CaptureRefused: names the statement that adds it.
    """
    for table in tables:
        named = resolve(connection, table)
        if named is None:
            continue
        found = connection.execute(_IS_PUBLISHED, {"oid": named.oid, "publication": publication}).fetchone()
        if found is None or not found[0]:
            name = f"{quote_name(named.schema)}.{quote_name(named.name)}"
            statement = f"ALTER PUBLICATION {quote_name(publication)} ADD TABLE {name}"
            raise CaptureRefused(
                f"publication {publication} exists without table {table}; choose another publication and slot, which starts with a "
                f"new snapshot; or run: {statement}, which leaves out the rows that the table has by then",
                table=table,
                statement=statement,
            )


def check_keys(connection: Connection, tables: Sequence[str]) -> None:
    """Refuse a table without a key, before a publication names it; with none named all tables of the database.

    A table stands for its partitions, and for those that inherit from it: it is their keys that count, and the publication
    takes them in.

    Raises:
        KeylessTable: the first of them, with the statement that mends it.
    """
    oids = [named.oid for named in resolve_all(connection, tables)]
    while (row := connection.execute(_KEYLESS, {"oids": oids, "is_all": not tables}).fetchone()) is not None:
        schema, table, is_generated, has_virtual = row
        if is_generated:
            raise generated(schema, table, may_be_published=not has_virtual)
        if is_keyless_now(connection, schema, table):
            raise keyless(schema, table)


def published_tables(connection: Connection, publication: str) -> list[CapturedTable]:
    """The tables of the publication, with the columns and rows that it publishes.

    Raises:
        KeylessTable: one has no replica identity; or it is published as one, and a partition's isn't enough for it.
    """
    tables = []
    for oid, schema, name, identity, kind, row_filter, estimate, columns in connection.execute(_TABLES, (publication,)):
        described = tuple(
            Column(column, int(type_oid), identity == "f" or is_key in {"t", True})
            for column, type_oid, is_key in columns
        )
        relation = Relation(oid, schema, name, identity, described)
        if not has_identity(relation):
            raise keyless(schema, name)
        names = ", ".join(quote_name(column.name) for column in described)
        only = "" if kind == "p" else ONLY
        where = f" WHERE {row_filter}" if row_filter else ""
        place = f"{only}{quote_name(schema)}.{quote_name(name)}"
        query = f"COPY (SELECT {names} FROM {place}{where}) TO STDOUT"  # noqa: S608 - quoted
        tables.append(CapturedTable(relation, place, query, estimate))
    _check_partitions(connection, tables)
    return tables


def _check_partitions(connection: Connection, tables: Sequence[CapturedTable]) -> None:
    """With `publish_via_partition_root` the log describes the table above, and has of an old row what the partition's own identity names.

    All else is null there. Where the one above has replica identity full, its primary key will do: a target has that, too.
    """
    oids = [table.relation.oid for table in tables]
    row = connection.execute(_UNTOLD, (oids,)).fetchone()
    if row is not None:
        schema, table, above = row
        statement = full_identity(schema, table)
        raise KeylessTable(
            f"partition {schema}.{table} is published as {above}, of which its replica identity doesn't tell rows apart; run: {statement}",
            schema=schema,
            table=table,
            statement=statement,
        )


def check_rows(connection: Connection, publication: str) -> None:
    """Refuse a table of which this role isn't shown every row: a snapshot would leave rows out, and the log doesn't.

    Raises:
        RowsHidden: the first of them, with the statement that mends it.
    """
    row = connection.execute(
        "SELECT n.nspname, c.relname, current_user FROM pg_publication_tables p"
        " JOIN pg_namespace n ON n.nspname = p.schemaname"
        " JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename"
        " WHERE p.pubname = %s AND row_security_active(c.oid) ORDER BY 1, 2 LIMIT 1",
        (publication,),
    ).fetchone()
    if row is not None:
        schema, table, role = row
        statement = f"ALTER ROLE {quote_name(role)} BYPASSRLS"
        raise RowsHidden(
            f"row-level security hides rows of table {schema}.{table} from role {role}, so a snapshot would leave "
            f"them out; run: {statement}",
            schema=schema,
            table=table,
            role=role,
            statement=statement,
        )


def start_snapshot(connection: Connection, name: str) -> int:
    """Read from now on as of an exported snapshot, and every row or none; its time in milliseconds.

    With `row_security` off a query that policies would take rows from fails (PostgreSQL manual, "Row Security Policies").

    Raises:
        SourceLost: the snapshot is gone, with the connection that exported it.
    """
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(name)))
    except (
        psycopg.errors.UndefinedObject,
        psycopg.errors.InvalidParameterValue,
    ) as error:  # the latter by older servers
        raise SourceLost(f"the source database ended the connection that made the slot: {in_a_line(error)}") from error
    for setting, value in {"row_security": "off", **PLAIN_NAMES}.items():
        connection.execute("SELECT set_config(%s, %s, true)", (setting, value))
    return int(str(_one(connection, "SELECT (extract(epoch FROM now()) * 1000)::bigint")))


def hold_tables(connection: Connection, tables: Sequence[CapturedTable]) -> None:
    """Keep tables as they are until the snapshot's transaction ends, as pg_dump does.

    To a snapshot that is older a table that ALTER TABLE has written anew is empty (PostgreSQL manual, "Caveats" of MVCC), and the log
    doesn't hold what was written so. The snapshot shows the file that a table had; what the function shows is the present one.

    Raises:
        CaptureRefused: this role, or the server, can't read one.
        SourceTablesChanged: one was written anew, or dropped, since the snapshot, or another one has its name.
    """
    for table in tables:
        with _reading(table):
            # Takes the lock, and needs no more rights than the rows that are read: LOCK needs the whole table's.
            connection.execute(f"SELECT FROM {table.place} LIMIT 0".encode())
            found = connection.execute("SELECT to_regclass(%s)::oid", (table.place.removeprefix(ONLY),)).fetchone()
            if found != (table.relation.oid,):
                raise SourceTablesChanged(f"{table.place} was another table's name when the snapshot began")
    oids = [table.relation.oid for table in tables]
    row = connection.execute(_REWRITTEN, {"oids": oids}).fetchone()
    if row is not None:
        raise SourceTablesChanged(f"table {row[0]}.{row[1]} was written anew while the snapshot began")


def check_not_altered(reader: Connection, connection: Connection, publication: str) -> None:
    """`reader`: sees the snapshot; `connection`: the present.

    The log is read with the publication of that time, and what PostgreSQL tells of its tables is of now, whatever snapshot asks: where
    they differ, the log lacks what was changed between.

    Raises:
        SourceTablesChanged: the publication isn't made of what it was made of in the snapshot.
    """
    seen, present = (one.execute(_PUBLICATION, {"name": publication}).fetchall() for one in (reader, connection))
    if seen != present:
        raise SourceTablesChanged(f"publication {publication} was altered while the snapshot began")


def check_not_attached(connection: Connection, table: CapturedTable) -> None:
    """To be asked in the snapshot behind the rows of a table.

    Raises:
        SourceTablesChanged: a table that was none of its partitions in the snapshot is one by now, and may have been read along: as of
            the snapshot, where the log lacks what was changed in it since.
    """
    row = connection.execute(_ATTACHED, {"oid": table.relation.oid}).fetchone()
    if row is not None:
        raise SourceTablesChanged(f"table {row[0]}.{row[1]} was attached to {table.place} while that was read")


def read_rows(connection: Connection, table: CapturedTable) -> Generator[bytes, None, None]:
    """The rows of a table, as lines of COPY's text without their newlines.

    Raises:
        CaptureRefused: this role may not read it, or not all of it; or the server can't.
        SourceTablesChanged: a column of it was dropped since the snapshot.
    """
    with _reading(table), connection.cursor().copy(table.query.encode()) as copy:
        for block in copy:
            yield bytes(block).removesuffix(b"\n")


@contextmanager
def _reading(table: CapturedTable) -> Iterator[None]:
    name = f"{table.relation.schema}.{table.relation.name}"
    try:
        yield
    except (psycopg.errors.InsufficientPrivilege, *_UNREADABLE) as error:
        raise CaptureRefused(f"table {name} can't be read: {in_a_line(error)}", table=name) from error
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName) as error:
        raise SourceTablesChanged(f"table {name} was changed while the snapshot began: {in_a_line(error)}") from error


def is_keyless_now(connection: Connection, schema: str, table: str) -> bool:
    """Whether a table has no replica identity today; one that was dropped counts as mended. Waits for whoever alters it.

    Or drops it: the size of a table that is gone by then is null, where other functions that wait fail.
    """
    connection.execute(
        "SELECT pg_relation_size(c.oid) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s",
        (schema, table),
    )
    return (  # as it is behind that
        _one(
            connection,
            "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s"  # noqa: S608
            f" AND c.relname = %s AND c.relreplident <> 'f' AND {_IDENTITY} IS NULL",
            schema,
            table,
        )
        == 1
    )


def find_slot(connection: Connection, slot: str) -> Slot | None:
    """The slot as the server shows it; None if there is none."""
    row = connection.execute(_SLOT, (slot,)).fetchone()
    if row is None:
        return None
    plugin, db, is_active, confirmed, wal_status, invalidation = row
    return Slot(plugin, db, is_active, parse_lsn(confirmed) if confirmed else None, wal_status, invalidation)


@contextmanager
def making_slot(connection: Connection, slot: str) -> Iterator[None]:
    """One at a time makes a slot of this name: from the look that none is there on, until it is. The connection is in a transaction meanwhile.

    Raises:
        SlotBusy: another capture is about to, or has made it.
        CaptureRefused: the server has no place for the slot and the temporary one that it is made of.
    """
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")  # it goes on to see the present
        if not _one(connection, "SELECT pg_try_advisory_xact_lock(hashtextextended('seriatim ' || %s, 0))", slot):
            raise SlotBusy(f"another capture takes a snapshot for slot {slot}", slot=slot)
        if find_slot(connection, slot) is not None:
            raise SlotBusy(f"slot {slot} was made by somebody else just now", slot=slot)
        _check_room(connection)
        yield


def _check_room(connection: Connection) -> None:
    row = connection.execute(
        "SELECT count(*), current_setting('max_replication_slots')::int FROM pg_replication_slots"
    ).fetchone()
    used, most = row or (0, 0)
    if used + _SLOTS_OF_A_SNAPSHOT > most:
        raise CaptureRefused(
            f"a snapshot needs {_SLOTS_OF_A_SNAPSHOT} replication slots, one of them until it has begun, and {used} of the {most} of the source database "
            "are in use: drop one, or raise max_replication_slots"
        )


def keep_slot(connection: Connection, temporary: str, slot: str) -> None:
    """Make the slot of this name, at the point of the temporary one of a session that is there.

    Raises:
        SlotBusy: there is one of this name.
        SourceLost: the temporary one is gone, with its session.
        CaptureRefused: the server has no place for one more.
    """
    try:
        connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s, false)", (temporary, slot))
    except psycopg.errors.DuplicateObject as error:
        raise SlotBusy(f"slot {slot} was made by somebody else just now", slot=slot) from error
    except psycopg.errors.UndefinedObject as error:
        raise SourceLost(f"the source database ended the connection that made the slot: {in_a_line(error)}") from error
    except psycopg.errors.ConfigurationLimitExceeded as error:
        raise CaptureRefused(f"slot {slot} can't be made: {in_a_line(error)}") from error


def holder(connection: Connection, pids: Sequence[int]) -> str | None:
    """Who makes one of these server processes wait, in a sentence; None where none waits for anybody."""
    return told_holder(connection.execute(HOLDER, (list(pids),)).fetchone())


def log_end(connection: Connection) -> int:
    """Position to which the server's log is written."""
    return parse_lsn(str(_one(connection, "SELECT pg_current_wal_flush_lsn()::text")))


def _one(connection: Connection, query: str, *arguments: object) -> object:
    row = connection.execute(query.encode(), arguments or None).fetchone()
    return None if row is None else row[0]
