"""What the planner has to know of a target's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from seriatim.protocol.change import Change


class TableName(NamedTuple):
    """Schema and name of a table, as the catalogue spells them."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


@dataclass(frozen=True, slots=True)
class RowType:
    """A composite type."""

    fields: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array of a composite type."""

    element: Kind


Kind: TypeAlias = str | RowType | ArrayType
"""A type as SQL spells it, unless there is a composite one in it. It is no domain."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """A target table as far as order and keys are concerned.

    columns: type of each column as SQL spells it, in the table's order.
    primary_key: its columns in the key's order; empty where there is none.
    beneath: of columns with a domain or a composite type in theirs, what that is made of; as far as it was asked for.
    generated: columns whose values the target makes itself; they are never written.
    unique: the columns of each unique rule, the primary key among them; None for one that isn't a plain list of columns (expression, predicate,
        exclusion constraint), and for those that only partitions have, or that aren't valid yet. A key WITHOUT OVERLAPS is one: no two rows have the same.
    arbiters: the unique column sets that ON CONFLICT can name: immediate, plain, without predicate.
    keeps_order: the target will enforce a foreign key at each statement, so changes of this table and of others
        like it must be carried out in their original order.
    is_partitioned: rows live in partitions; a ctid alone doesn't name a row.
    unlogged: it, or the partition of it, that a crash of the target's server empties, as SQL spells it; "" for none.
    operators: of columns in unique rules, whose type an extension brings: its equality as SQL spells it where the extension's schema isn't searched.
    coarse: columns whose collation takes different texts for equal (it is not deterministic).
    enums: of columns of a domain over an enum, that enum: PostgreSQL knows no equality of the domain's.
    """

    name: TableName
    columns: Mapping[str, str]
    primary_key: tuple[str, ...] = ()
    generated: frozenset[str] = frozenset()
    always_identity: frozenset[str] = frozenset()
    unique: tuple[frozenset[str] | None, ...] = ()
    arbiters: frozenset[frozenset[str]] = frozenset()
    keeps_order: bool = False
    is_partitioned: bool = False
    unlogged: str = ""
    operators: Mapping[str, str] = field(default_factory=dict)
    enums: Mapping[str, str] = field(default_factory=dict)
    coarse: frozenset[str] = frozenset()
    beneath: Mapping[str, Kind] = field(default_factory=dict, compare=False)

    def key_for(self, change: Change) -> tuple[str, ...]:
        """The columns that identify a row: those the change names, else the target's own primary key, else none.

        The target's key is of use only where the source has its columns: by one that the target numbers itself no row is found.
        Nor is a deferrable one: within a transaction two rows may have the same (the source then has replica identity full, as
        PostgreSQL takes no such key for an identity); nor one with a column that the target makes itself, which it is never told.
        Of a key that the source doesn't name two of its rows may have the same for a while (`sharing`). None has a null there: that stands
        for what the replica identity of a partition doesn't name, which is published as the table above it, with replica identity full.
        """
        named = change.source.key
        if named or frozenset(self.primary_key) not in self.arbiters or not self.generated.isdisjoint(self.primary_key):
            return named
        image = change.after if change.before is None else change.before
        return self.primary_key if image is not None and all(image.get(c) is not None for c in self.primary_key) else ()

    def other_unique(self, key: frozenset[str]) -> tuple[frozenset[str] | None, ...]:
        """The unique rules beside the one over `key`."""
        return tuple(columns for columns in self.unique if columns != key)


Shapes = Mapping[TableName, TableShape]
