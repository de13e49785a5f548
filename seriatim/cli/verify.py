"""`seriatim verify`: is one database a copy of another?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import click

from seriatim.cli import exits

if TYPE_CHECKING:
    from collections.abc import Callable

    from seriatim.consumer.verification.result import Comparison, Progress, TableResult


@click.command(short_help="Compare two databases row by row.")
@click.option("--source", required=True, metavar="DSN", help="PostgreSQL database that is the original.")
@click.option("--target", required=True, metavar="DSN", help="PostgreSQL database that should be the same.")
@click.option("--tables", multiple=True, metavar="NAME[,…]", help="Only these: table or schema.table. [default: all]")
@click.option("--json", "is_json", is_flag=True, help="One JSON object a table, and a last one with the verdict.")
@click.pass_context
def verify(context: click.Context, *, source: str, target: str, tables: tuple[str, ...], is_json: bool) -> None:
    """Compare two databases, chunk by chunk along the primary keys; ends with 0 when identical, 1 when not.

    The databases should be at rest: each side is read in a snapshot of its own.
    """
    try:
        from seriatim.consumer.verification.comparison import compare
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is missing: install seriatim with its extra, pip install 'seriatim[postgres]'"
        ) from error

    wanted = [name for part in tables for name in part.split(",") if name]
    with _progress() if sys.stderr.isatty() and not is_json else nullcontext(lambda _progress: None) as on_progress:
        comparison = compare(source, target, wanted, on_progress=on_progress)
    with suppress(BrokenPipeError):  # who reads no further is told by the exit code
        for line in _json(comparison) if is_json else _text(comparison):
            click.echo(line)
    if not comparison.is_identical or not comparison.tables:
        context.exit(exits.ANSWER_IS_NO)


def _json(comparison: Comparison) -> Iterator[str]:
    for table in comparison.tables:
        yield json.dumps(table.as_json())
    yield json.dumps({"verdict": _verdict(comparison), "tables": len(comparison.tables), "rows": comparison.rows})


def _verdict(comparison: Comparison) -> str:
    if not comparison.tables:
        return "nothing to compare"
    return "identical" if comparison.is_identical else "different"


def _text(comparison: Comparison) -> Iterator[str]:
    width = max([5, *(len(table.table) for table in comparison.tables)])
    yield f"{'table':<{width}}  {'rows':>12}  {'missing':>9}  {'extra':>9}  {'different':>9}"
    for table in comparison.tables:
        yield (
            f"{table.table:<{width}}  {table.rows:>12,}  {table.missing:>9,}  {table.extra:>9,}  {table.different:>9,}"
        )
        yield from _details(table)
    yield f"{_verdict(comparison)}: {comparison.rows:,} rows of {len(comparison.tables)} tables"


def _details(table: TableResult) -> Iterator[str]:
    for sentence in table.schema:
        yield f"    schema: {sentence}"
    for example in table.examples:
        columns = f" in {', '.join(example.columns)}" if example.columns else ""
        yield f"    {example.kind}: {', '.join('null' if v is None else str(v) for v in example.key)}{columns}"


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A line on standard error that is written over, and wiped at the end."""

    def show(progress: Progress) -> None:
        click.echo(
            f"\r\x1b[K{progress.tables_done + 1}/{progress.tables} {progress.table} {progress.rows:,} rows",
            nl=False, err=True,
        )  # fmt: skip

    try:
        yield show
    finally:
        click.echo("\r\x1b[K", nl=False, err=True)
