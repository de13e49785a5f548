"""`seriatim group`: look at groups, take one out of service, put it back, remove it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import click

from seriatim.cli import coordinators, exits, views
from seriatim.cli.options import Finite, coordinator_option, json_option

if TYPE_CHECKING:
    from seriatim.protocol import seriatim_pb2 as pb

_LOOK_EVERY_S = 0.3


@click.group(short_help="Look at groups; take one out of service, put it back or remove it.")
def group() -> None:
    r"""A group is two brokers that hold the same records.

    \b
    Example:
      seriatim group drain g1      # before its machines are looked after
      seriatim group resume g1
    """


@group.command("list", short_help="List groups.")
@coordinator_option
@json_option
def list_(*, coordinator: str, is_json: bool) -> None:
    r"""List all groups of the cluster.

    \b
    Example:
      seriatim group list
    """
    found = _groups(coordinator)
    if is_json:
        for view in found:
            click.echo(json.dumps(views.group_object(view)))
    elif found:
        click.echo("\n".join(views.group_lines(found)))
    else:
        click.echo("no groups; each broker that starts makes its own", err=True)


@group.command(short_help="Show a group and its members.")
@click.argument("name")
@coordinator_option
@json_option
def describe(*, name: str, coordinator: str, is_json: bool) -> None:
    r"""Show group NAME.

    \b
    Example:
      seriatim group describe g1 --json
    """
    _show(_one(coordinator, name), is_json=is_json)


@group.command(short_help="Take a group out of service, without loss.")
@click.argument("name")
@click.option(
    "--until",
    type=click.Choice(["switched", "drained"]),
    default="switched",
    show_default=True,
    help="Wait until no queue sends to it and none of its links is lost, or until also nothing is left to read on it.",
)
@click.option("--no-wait", is_flag=True, help="Only mark the group; don't wait until its queues have left it.")
@click.option(
    "--timeout",
    type=Finite(min=0),
    metavar="SECONDS",
    help="Wait so long at most. [default: as long as it takes]",
)
@coordinator_option
@json_option
def drain(*, name: str, until: str, no_wait: bool, timeout: float | None, coordinator: str, is_json: bool) -> int:
    r"""Take group NAME out of service: its queues go on with other groups, and it gets no new ones until `resume`.

    A queue that no other group can take over now goes on there until one can. Ends with 1 when the time is over first, and the group goes on draining; or when somebody puts it back into service.

    \b
    Example:
      seriatim group drain g1 --until drained --timeout 60
    """
    from seriatim.protocol import seriatim_pb2 as pb

    view = coordinators.call(coordinator, "DrainGroup", pb.GroupRequest(group=name), 30.0)
    is_done = True
    if not no_wait:
        try:
            view, is_done = _wait(coordinator, view, until, timeout)
        except KeyboardInterrupt:
            said = f"{name} goes on draining; `seriatim group resume {name}` puts it back into service"
            click.echo(said, err=True)
            raise
    _show(view, is_json=is_json)
    return exits.DONE if is_done else exits.ANSWER_IS_NO


@group.command(short_help="Put a drained group back into service.")
@click.argument("name")
@coordinator_option
@json_option
def resume(*, name: str, coordinator: str, is_json: bool) -> None:
    r"""Put group NAME back into service: it may be chosen again where it is whole.

    \b
    Example:
      seriatim group resume g1
    """
    from seriatim.protocol import seriatim_pb2 as pb

    _show(coordinators.call(coordinator, "ResumeGroup", pb.GroupRequest(group=name)), is_json=is_json)


@group.command(short_help="Forget a group that was switched off for good.")
@click.argument("name")
@coordinator_option
@json_option
def remove(*, name: str, coordinator: str, is_json: bool) -> None:
    r"""Forget group NAME, which was drained, and whose members were stopped for good: no list shows it any more.

    Refused as long as a member is registered, or a queue keeps a link there. Wipe its disks, or keep them out of the cluster: a
    member that starts again makes the group anew, in service, and nobody tells it which queues were deleted meanwhile.

    \b
    Example:
      seriatim group drain g4 --until drained
      seriatim group remove g4         # once its links are gone, and its members are stopped
    """
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.errors import UnknownGroup

    _one(coordinator, name)
    with suppress(UnknownGroup):  # it was there, so a coordinator that died before it answered has done it
        coordinators.call(coordinator, "RemoveGroup", pb.GroupRequest(group=name), 30.0)
    click.echo(json.dumps({"group": name, "is_removed": True}) if is_json else f"group {name} is removed")


def _wait(coordinator: str, view: pb.GroupView, until: str, timeout_s: float | None) -> tuple[pb.GroupView, bool]:
    """Wait until the group is out of service; the last view, and whether it is. Says what is left when that changes.

    Who puts it back into service meanwhile ends that.
    """
    from rich.console import Console
    from rich.text import Text

    from seriatim.protocol.errors import WorldError

    console = Console(stderr=True)
    give_up_at_s = None if timeout_s is None else time.monotonic() + timeout_s
    said = problem = ""
    with console.status("draining") if sys.stderr.isatty() else nullcontext() as status:
        while view.is_draining and (left := problem or _left(view, until)):
            if status is not None:
                status.update(Text(left))
            elif left != said:
                console.print(Text(left), highlight=False, soft_wrap=True)
            said = left
            if give_up_at_s is not None and time.monotonic() >= give_up_at_s:
                console.print(Text(f"time is over: {left}"), highlight=False, soft_wrap=True)
                return view, False
            time.sleep(_LOOK_EVERY_S)
            try:
                view, problem = _one(coordinator, view.group), ""
            except WorldError as error:  # of the coordinators, not of the draining
                problem = error.message
    if not view.is_draining:
        console.print(Text(f"{view.group} was put back into service meanwhile"), highlight=False, soft_wrap=True)
    return view, view.is_draining


def _left(view: pb.GroupView, until: str) -> str:
    """What the draining still waits for; empty when it is done. It is said again whenever it changes."""
    if view.sending_queues:
        look = f"`seriatim status {view.sending_queues[0]}`"
        return (
            f"{view.group} still takes records of {views.some(view.sending_queues)}, until another group can ({look})"
        )
    if view.lost_queues:
        queues = views.some(view.lost_queues)
        return f"a link of {queues} is lost on {view.group}: start its members, or `seriatim queue abandon-link`"
    if until == "drained" and view.backlog_queues:
        return f"{view.group} still has unread records of {views.some(view.backlog_queues)}"
    return ""


def _groups(coordinator: str) -> list[pb.GroupView]:
    from seriatim.protocol import seriatim_pb2 as pb

    return list(coordinators.call(coordinator, "ListGroups", pb.ListGroupsRequest()).groups)


def _one(coordinator: str, name: str) -> pb.GroupView:
    from seriatim.protocol.errors import UnknownGroup

    for view in _groups(coordinator):
        if view.group == name:
            return view
    raise UnknownGroup(f"there is no group {name}", group=name)


def _show(view: pb.GroupView, *, is_json: bool) -> None:
    exits.answer(json.dumps(views.group_object(view)) if is_json else "\n".join(views.group_lines([view])))
