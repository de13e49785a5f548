"""`seriatim status`: what a cluster or a queue does now, and what waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import click

from seriatim.cli import views
from seriatim.cli.coordinators import CALL_TIMEOUT_S
from seriatim.cli.foreground import on_signals
from seriatim.cli.options import coordinator_option, json_option
from seriatim.cli.pipes import is_output_read

if TYPE_CHECKING:
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.coordinators import Coordinators

_REFRESH_S = 1.0
_HEAD_ROWS = 4
"""So many rows at the top stay on a screen that is too small: who sends, and where, or which cluster it is."""


@click.command(short_help="Show what a cluster or a queue does now, and what waits for what.")
@click.argument("queue", required=False)
@click.option("--watch", is_flag=True, help="Go on showing, until Ctrl-C.")
@coordinator_option
@json_option
def status(*, queue: str | None, watch: bool, coordinator: str, is_json: bool) -> None:
    r"""Show QUEUE: chain, send list, consume lists, cursors, lag, who is elected, what waits for what, warnings.

    Without QUEUE: coordinators, groups, a line for each queue, and warnings; `seriatim status QUEUE` says why.

    \b
    Examples:
      seriatim status
      seriatim status orders --watch
    """
    asyncio.run(_run(coordinator, queue, is_watching=watch, is_json=is_json))


async def _run(coordinator: str, queue: str | None, *, is_watching: bool, is_json: bool) -> None:
    from seriatim.protocol.coordinators import Coordinators

    async with Coordinators(coordinator) as coordinators:
        if not is_watching:
            lines = await (_cluster(coordinators, is_json) if queue is None else _queue(coordinators, queue, is_json))
            click.echo("\n".join(lines))
            return
        with _screen(is_json=is_json) as screen:
            watching = asyncio.create_task(
                _watch_cluster(coordinators, screen, is_json)
                if queue is None
                else _watch_queue(coordinators, queue, screen, is_json)
            )
            loop = asyncio.get_running_loop()
            # Not the loop's own handlers: they would wait for a write that nobody takes.
            with (
                contextlib.suppress(asyncio.CancelledError),
                on_signals(lambda: loop.call_soon_threadsafe(watching.cancel)),
            ):
                await watching


async def _queue(coordinators: Coordinators, queue: str, is_json: bool) -> list[str]:
    from seriatim.protocol import seriatim_pb2 as pb

    return _queue_lines(await coordinators.call("DescribeQueue", pb.QueueRequest(queue=queue)), is_json)


def _queue_lines(view: pb.QueueView, is_json: bool) -> list[str]:
    return [json.dumps(views.queue_object(view))] if is_json else list(views.queue_lines(view))


async def _cluster(coordinators: Coordinators, is_json: bool) -> list[str]:
    from seriatim.protocol import seriatim_pb2 as pb

    cluster = await coordinators.call("DescribeCluster", pb.DescribeClusterRequest())
    groups = (await coordinators.call("ListGroups", pb.ListGroupsRequest(), CALL_TIMEOUT_S)).groups
    listed = await coordinators.call("ListQueues", pb.ListQueuesRequest(groups_apart=True), CALL_TIMEOUT_S)
    queues = listed.queues
    if is_json:
        return [
            json.dumps({"kind": "cluster"} | views.cluster_object(cluster)),
            *(json.dumps({"kind": "group"} | views.group_object(group)) for group in groups),
            *(json.dumps({"kind": "queue"} | one) for one in views.listed_objects(listed)),
        ]
    lines = [
        f"cluster {cluster.cluster}, version {cluster.version}",
        f"  zookeeper     {cluster.zookeeper}{cluster.root}",
        f"  coordinators  {', '.join(cluster.coordinators)}   (elected: {cluster.elected_coordinator or 'none'})",
        "  groups",
        *views.group_lines(groups, indent="    "),
    ]
    if queues:
        table = views.columns(views.queue_summary(queues), indent="    ")
        return [*lines, "  queues", *table, *views.cluster_warnings(queues, indent="  ")]
    return [*lines, "  queues        none"]


# ------------------------------------------------------------------------------------------------------------ watching


async def _watch_cluster(coordinators: Coordinators, screen: _Screen, is_json: bool) -> None:
    from seriatim.protocol.errors import WorldError

    while True:
        try:
            screen.show(await _cluster(coordinators, is_json))
        except WorldError as error:
            screen.say(error.message)
        await asyncio.sleep(_REFRESH_S)


async def _watch_queue(coordinators: Coordinators, queue: str, screen: _Screen, is_json: bool) -> None:
    """Changes of the chain are pushed; what only members know is asked for about once a second."""
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.errors import WorldError

    described = await coordinators.call("DescribeQueue", pb.QueueRequest(queue=queue))
    screen.show(_queue_lines(described, is_json))
    pushed = described

    async def follow() -> None:
        nonlocal pushed
        async for view in coordinators.watch(queue):
            pushed = view
            screen.show(_queue_lines(with_members_knowledge(pushed, described), is_json))

    async def refresh() -> None:
        nonlocal described
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                described = await coordinators.call("DescribeQueue", pb.QueueRequest(queue=queue))
            except WorldError as error:
                screen.say(error.message)
            else:
                screen.show(_queue_lines(with_members_knowledge(pushed, described), is_json))

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow())
            tasks.create_task(refresh())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # by itself it says how the command ends


def with_members_knowledge(pushed: pb.QueueView, described: pb.QueueView) -> pb.QueueView:
    """The newer of two views of a queue; a pushed one is completed with the cursors and indexes that members told."""
    from seriatim.protocol import seriatim_pb2 as pb

    if described.chain_version >= pushed.chain_version:
        return described
    view = pb.QueueView()
    view.CopyFrom(pushed)
    links = {link.epoch: link for link in described.links}
    for link in view.links:
        known = links.get(link.epoch)
        if known is not None and known.has_committed and not link.has_committed:
            link.has_committed, link.committed_index, link.copies = True, known.committed_index, known.copies
    subscriptions = {(one.subscription_id, one.generation): one for one in described.subscriptions}
    for one in view.subscriptions:
        earlier = subscriptions.get((one.subscription_id, one.generation))
        if earlier is not None and earlier.has_cursor and not one.has_cursor:
            one.has_cursor, one.cursor_epoch, one.cursor_index = True, earlier.cursor_epoch, earlier.cursor_index
            one.has_lag, one.lag_records = earlier.has_lag, earlier.lag_records
            one.has_offset, one.cursor_offset = earlier.has_offset, earlier.cursor_offset
    return view


class _Screen(Protocol):
    """Where a watch shows."""

    def show(self, lines: list[str]) -> None: ...

    def say(self, problem: str) -> None: ...


class _Plain:
    """Prints what differs from what it printed last, for files and programs."""

    def __init__(self, *, has_stamp: bool) -> None:
        self._has_stamp = has_stamp
        self._shown: list[str] = []
        self._said = ""

    def show(self, lines: list[str]) -> None:
        self._said = ""
        if lines == self._shown:
            _check_read()
            return
        self._shown = lines
        if self._has_stamp:
            click.echo(time.strftime("%H:%M:%S"))
        click.echo("\n".join(lines))
        sys.stdout.flush()

    def say(self, problem: str) -> None:
        _check_read()
        if problem != self._said:
            self._said = problem
            click.echo(problem, err=True)


def _check_read() -> None:
    """Raises BrokenPipeError, as a write would, where nobody reads any more."""
    if not is_output_read():
        raise BrokenPipeError


@contextmanager
def _screen(*, is_json: bool) -> Iterator[_Screen]:
    if is_json or not sys.stdout.isatty():
        yield _Plain(has_stamp=not is_json)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:

        class Terminal:
            lines: tuple[str, ...] = ()

            def show(self, lines: list[str]) -> None:
                self.lines = tuple(lines)
                rows = on_screen(lines, *live.console.size)
                shown = (Text(row, style=style, no_wrap=True, overflow="ellipsis") for row, style in rows)
                live.update(Group(*shown), refresh=True)

            def say(self, problem: str) -> None:
                self.show([*(line for line in self.lines if not line.startswith("! ")), f"! {problem}"])

        yield Terminal()


def on_screen(lines: Sequence[str], width: int, height: int) -> list[tuple[str, str]]:
    """Rows that a screen has room for, each with its style: tables are cut at its edge, but no sentence is.

    Where there are too many, those in the middle are left out: what is wrong stands at the end.
    """
    rows: list[tuple[str, str]] = []
    is_table = True
    for line in lines:
        is_table = is_table and line != "  waits" and not _is_warning(line)
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        parts = [line] if is_table else textwrap.wrap(line, width, subsequent_indent=indent)
        rows += [(part, _style(line)) for part in parts]
    over = len(rows) - (height - 1)
    if over > 0:
        rows[_HEAD_ROWS : _HEAD_ROWS + over + 1] = [
            (f"  ({over + 1} lines not shown: the screen is too small)", "bold")
        ]
    return rows


def _is_warning(line: str) -> bool:
    return line.startswith("! ") or line.lstrip().startswith(("WARNING", "ABANDONED"))


def _style(line: str) -> str:
    if _is_warning(line):
        return "bold red"
    return "bold" if not line.startswith(" ") else ""
