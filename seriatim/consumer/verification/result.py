"""What a comparison found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from seriatim.protocol.change import Value

Kind = Literal["missing", "extra", "different"]


@dataclass(frozen=True, slots=True)
class Example:
    """One difference. key: the row's key, or the whole row without one. columns: names of those that differ."""

    kind: Kind
    key: tuple[Value, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableResult:
    """One table.

    rows: of the source that were compared. missing: in the source only. extra: in the target only. different: same key,
    other values. schema: differences of columns and key, as sentences; a table that only one side has is one of them.
    examples: the first of the differences. changing: rows among the differences that the source changed between the last two looks at them.
    """

    table: str
    rows: int
    missing: int
    extra: int
    different: int
    schema: tuple[str, ...]
    examples: tuple[Example, ...]
    changing: int = 0

    @property
    def is_identical(self) -> bool:
        """Same columns, same key, same rows."""
        return not (self.missing or self.extra or self.different or self.schema)

    def as_json(self) -> dict[str, object]:
        """For `--json`; stable keys."""
        return {**asdict(self), "identical": self.is_identical}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All tables, in order of their names."""

    tables: tuple[TableResult, ...]

    @property
    def is_identical(self) -> bool:
        """All tables are; true also where there is none (the command line says so)."""
        return all(table.is_identical for table in self.tables)

    @property
    def rows(self) -> int:
        """Rows of the source that were compared."""
        return sum(table.rows for table in self.tables)


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after each chunk: how many tables are done of how many, and rows of the present one."""

    table: str
    tables_done: int
    tables: int
    rows: int
