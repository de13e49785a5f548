"""Rows to JSON: the path that every change takes, so it is prepared once per relation and works on bytes.

PostgreSQL sends each value as text in UTF-8. An integer's text is already JSON; other text needs quotes, and escapes
only where a quote, a backslash or a control character is in it, which one search over the bytes tells. A row is then
one formatting of a template prepared for its relation (``{"id":%b,"name":%b}``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Final, TypeAlias

from seriatim.producer.sources.postgres.core.pgoutput import Relation
from seriatim.producer.sources.postgres.errors import KeylessTable, MalformedLog
from seriatim.protocol.change import Table, dump_json

Values: TypeAlias = list[bytes | None]
"""JSON texts of a row's values in the order of the columns; None for a value that was not sent."""

BOOLEAN_OID: Final = 16
INTEGER_OIDS: Final = frozenset({20, 21, 23})
"""int8, int2, int4."""
TEXT_OIDS: Final = frozenset({18, 19, 25, 1043})
""""char", name, text, varchar. Not char, to which blanks at the end are none, as to a char of a target."""

_NULL_KIND = ord("n")
_TEXT_KIND = ord("t")
_UNCHANGED_KIND = ord("u")

_search_escapes = re.compile(rb'[\x00-\x1f"\\]').search


def _text_value(raw: bytes) -> bytes:
    if _search_escapes(raw) is None:
        return b'"%b"' % raw
    return encode_basestring(raw.decode()).encode()


def _integer_value(raw: bytes) -> bytes:
    return raw


def _boolean_value(raw: bytes) -> bytes:
    return b"true" if raw == b"t" else b"false"


def converter_of(type_oid: int) -> Callable[[bytes], bytes]:
    """How a value of this type becomes JSON: from PostgreSQL's text in UTF-8 to JSON's."""
    if type_oid in INTEGER_OIDS:
        return _integer_value
    return _boolean_value if type_oid == BOOLEAN_OID else _text_value


def object_template(names: Sequence[str]) -> bytes:
    """Template of a JSON object with these members, in order; their values are to be filled in as bytes."""
    members = ",".join(f"{dump_json(name).replace('%', '%%')}:%b" for name in names)
    return f"{{{members}}}".encode()


class RowWriter:
    """Reads and writes the rows of one relation, as its Relation message describes them.

    Attributes:
        table: names, key and columns. Its key is empty where the replica identity is full.
        text_key: those columns of the key that are texts.
    """

    def __init__(self, relation: Relation) -> None:
        self.table = table_of(relation)
        columns = self.table.columns
        self._converters = tuple(converter_of(column.type_oid) for column in relation.columns)
        self._template = object_template(columns)
        self._names = columns
        key_positions = [place for place, column in enumerate(relation.columns) if column.is_key]
        self._key_positions = () if relation.identity == "f" else tuple(key_positions)
        self.text_key = tuple(columns[i] for i in self._key_positions if relation.columns[i].type_oid in TEXT_OIDS)
        self._old_positions = tuple(key_positions)
        self._key_template = object_template(self.table.key)
        head = dump_json(f"{relation.schema}.{relation.name}").replace("%", "%%")
        self._record_key = f"[{head}{',%b' * len(self._key_positions)}]".encode()

    def read(self, data: bytes, position: int) -> tuple[Values, int]:
        """Read a tuple of a message; its values, and the position after it.

        Raises:
            MalformedLog: it doesn't fit the relation, or ends early.
        """
        if int.from_bytes(data[position : position + 2]) != len(self._converters):
            raise MalformedLog(f"a row of {self.table.schema}.{self.table.name} has not the columns of its relation")
        position += 2
        values: Values = []
        append = values.append
        try:
            for convert in self._converters:
                kind = data[position]
                if kind == _TEXT_KIND:
                    start = position + 5
                    position = start + int.from_bytes(data[position + 1 : start])
                    append(convert(data[start:position]))
                elif kind == _NULL_KIND:
                    append(b"null")
                    position += 1
                elif kind == _UNCHANGED_KIND:
                    append(None)
                    position += 1
                else:
                    raise MalformedLog(f"a value of kind {kind} in {self.table.schema}.{self.table.name}")
        except (IndexError, UnicodeDecodeError) as error:
            raise MalformedLog(
                f"a row of {self.table.schema}.{self.table.name} ends early, or inside a letter"
            ) from error
        if position > len(data):
            raise MalformedLog(f"a row of {self.table.schema}.{self.table.name} ends early")
        return values, position

    def fill(self, new: Values, old: Values) -> None:
        """Take values that were not sent from the old image, where that has them.

        One that is stored out of line is never null: a null stands for a column that a partition's own replica identity doesn't name.
        """
        for place in self._old_positions:
            if new[place] is None and old[place] != b"null":
                new[place] = old[place]

    def row(self, values: Values) -> tuple[bytes, bytes]:
        """A whole row as a JSON object, and the JSON list of the columns that are missing in it (empty: none is)."""
        if None not in values:
            return self._template % tuple(values), b""
        present = [(name, value) for name, value in zip(self._names, values, strict=True) if value is not None]
        missing = [name for name, value in zip(self._names, values, strict=True) if value is None]
        template = object_template([name for name, _ in present])
        return template % tuple(value for _, value in present), dump_json(missing).encode()

    def lacks_key(self, old: Values) -> bool:
        """Whether a column of the key is null, which none of a replica identity is: what was sent is another one's (of a partition)."""
        return any(old[place] == b"null" for place in self._key_positions)

    def key_object(self, values: Values) -> bytes:
        """The key columns of a row as a JSON object."""
        return self._key_template % tuple([values[place] for place in self._key_positions])

    def record_key(self, values: Values) -> bytes:
        """The record's key, as `seriatim.protocol.change.record_key` writes it.

        Raises:
            MalformedLog: a key value was not sent.
        """
        key_values = [values[place] for place in self._key_positions]
        if None in key_values:
            raise MalformedLog(f"a key value of {self.table.schema}.{self.table.name} was not sent")
        return self._record_key % tuple(key_values)


def table_of(relation: Relation) -> Table:
    """Names, key and columns of a relation."""
    names = tuple(column.name for column in relation.columns)
    key = () if relation.identity == "f" else tuple(column.name for column in relation.columns if column.is_key)
    return Table(relation.schema, relation.name, key, names)


def quote_name(name: str) -> str:
    """An identifier as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def full_identity(schema: str, table: str) -> str:
    """The statement by which the log tells of an old row all that it had."""
    return f"ALTER TABLE {quote_name(schema)}.{quote_name(table)} REPLICA IDENTITY FULL"


def keyless(schema: str, table: str) -> KeylessTable:
    """The error for a table without a replica identity, with the statement that mends it."""
    statement = full_identity(schema, table)
    return KeylessTable(
        f"table {schema}.{table} has no key, so its updates and deletes can't be told apart; give it a primary key, "
        f"or run: {statement}",
        schema=schema,
        table=table,
        statement=statement,
    )


def generated(schema: str, table: str, *, may_be_published: bool) -> KeylessTable:
    """The error for a table with a generated column in its replica identity that isn't published, and can't be where it is virtual."""
    published = (
        "; or FULL, before PostgreSQL 18; or from then on make the publication before, WITH (publish_generated_columns = stored)"
        if may_be_published
        else ": PostgreSQL publishes no virtual column"
    )
    return KeylessTable(
        f"the replica identity of table {schema}.{table} has a generated column, which isn't published, so its updates and deletes can't be told "
        f"apart; have a unique index of other columns: ALTER TABLE {quote_name(schema)}.{quote_name(table)} REPLICA IDENTITY USING INDEX NAME{published}",
        schema=schema,
        table=table,
    )


def has_identity(relation: Relation) -> bool:
    """Whether a table's rows can be told apart by what the log gives of them."""
    return relation.identity == "f" or any(column.is_key for column in relation.columns)
