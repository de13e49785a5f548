"""`seriatim verify`: is one database a copy of another?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from seriatim.cli import exits
from seriatim.cli.foreground import interruptible
from seriatim.cli.options import Finite

if TYPE_CHECKING:
    from seriatim.consumer.verification.result import Comparison, Progress, TableResult

_WIPE = "\r\x1b[K"


@click.command(short_help="Compare two databases row by row.")
@click.option("--source", required=True, metavar="DSN", help="PostgreSQL database that is the original.")
@click.option("--target", required=True, metavar="DSN", help="PostgreSQL database that should be the same.")
@click.option("--tables", multiple=True, metavar="NAME[,…]", help="Only these: table or schema.table. [default: all]")
@click.option(
    "--settle",
    "settle_s",
    type=Finite(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Look again, for so long, at rows that differ: where the source is written to, the target is behind. [default: not]",
)
@click.option(
    "--examples",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Of the rows that differ tell the first ones of each table, by their keys.",
)
@click.option("--json", "is_json", is_flag=True, help="One JSON object a table, and a last one with the verdict.")
@click.pass_context
def verify(
    context: click.Context,
    *,
    source: str,
    target: str,
    tables: tuple[str, ...],
    settle_s: float,
    examples: int,
    is_json: bool,
) -> None:
    """Compare two databases, chunk by chunk along the primary keys; ends with 0 when identical, 1 when not.

    The databases should be at rest: each side is read in a snapshot of its own. With --settle they may be written to.
    """
    try:
        from seriatim.consumer.verification.comparison import compare
    except ModuleNotFoundError as error:
        raise click.ClickException(exits.not_installed(error, "postgres")) from error

    wanted = [name for part in tables for name in part.split(",") if name]
    if tables and not wanted:
        raise click.BadParameter("name a table", param_hint="--tables")
    output = _Output(is_json=is_json)
    try:
        with interruptible():  # psycopg cancels the query under way then; else the server would go on with it
            comparison = compare(
                source,
                target,
                wanted,
                settle_s=settle_s,
                examples=examples,
                on_progress=output.progress,
                on_table=output.table,
            )
    finally:
        output.wipe()
    output.verdict(comparison)
    if not comparison.is_identical or not comparison.tables:
        context.exit(exits.ANSWER_IS_NO)


class _Output:
    """Tells each table's result as soon as there is one, and on a terminal how far it is, in a line that is written over."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._has_head = is_json
        self._has_progress = sys.stderr.isatty() and not is_json

    def progress(self, progress: Progress) -> None:
        if self._has_progress:
            where = f"{progress.tables_done + 1}/{progress.tables} {progress.table} {progress.rows:,} rows"
            click.echo(f"{_WIPE}{where}", nl=False, err=True)

    def wipe(self) -> None:
        if self._has_progress:
            click.echo(_WIPE, nl=False, err=True)

    def table(self, table: TableResult) -> None:
        self.wipe()
        if self._is_json:
            exits.answer(json.dumps(table.as_json()))
            return
        if not self._has_head:
            self._has_head = True
            exits.answer(f"{'rows':>12}  {'missing':>9}  {'extra':>9}  {'different':>9}  table")
        exits.answer(f"{table.rows:>12,}  {table.missing:>9,}  {table.extra:>9,}  {table.different:>9,}  {table.table}")
        for line in _details(table):
            exits.answer(line)

    def verdict(self, comparison: Comparison) -> None:
        verdict = "identical" if comparison.is_identical else "different"
        if not comparison.tables:
            verdict = "nothing to compare"
        if self._is_json:
            found = {"verdict": verdict, "tables": len(comparison.tables), "rows": comparison.rows}
            exits.answer(json.dumps(found))
        else:
            exits.answer(f"{verdict}: {comparison.rows:,} rows of {len(comparison.tables)} tables")


def _details(table: TableResult) -> Iterator[str]:
    for sentence in table.schema:
        yield f"    schema: {sentence}"
    for example in table.examples:
        columns = f" in {', '.join(example.columns)}" if example.columns else ""
        yield f"    {example.kind}: {', '.join('null' if v is None else str(v) for v in example.key)}{columns}"
    if table.changing:
        yield f"    {table.changing:,} of these rows were changed at the source between the last two looks: they may be on their way"
