"""`seriatim queue`: make, look at and delete queues; move one to its next group; give up what is lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from seriatim.cli import coordinators, exits, views
from seriatim.cli.options import NUMBER_MAX, Duration, Names, coordinator_option, json_option

if TYPE_CHECKING:
    from seriatim.protocol import seriatim_pb2 as pb


@click.group(short_help="Make, list, look at and delete queues.")
def queue() -> None:
    r"""A queue is one stream of records in absolute order; work that needs no common order goes to different queues.

    \b
    Example:
      seriatim queue create orders --durability sync
    """


_Command = Callable[..., Any]


def _settings(*, is_new: bool) -> Callable[[_Command], _Command]:
    """The options of what can be changed later, too, and of which `_message` makes a message.

    For a new queue what isn't given has a default, and the environment counts, which else would change what nobody asked for.
    """

    def option(name: str, default: str, text: str, **settings: Any) -> Callable[[_Command], _Command]:
        shown = f"{text} [default: {default}]" if is_new else text
        return click.option(name, help=shown, allow_from_autoenv=is_new, **settings)

    options = (
        option("--groups", "all", "Groups that may serve it, in order.", type=Names(), metavar="G1,G2,…"),
        option(
            "--durability",
            "sync",
            "When a record is acknowledged, on both members: on disk (sync, interval), in the operating system (async), "
            "in the process (memory).",
            type=click.Choice(["sync", "interval", "async", "memory"]),
        ),
        option("--retention", "24h", "How long read links are kept, such as 30m or 7d.", type=Duration()),
        option("--flush-ms", "5", "Between flushes, for interval and async.", type=click.IntRange(1, NUMBER_MAX)),
        option(
            "--readmit",
            "drained",
            "When a group that failed comes back: when nothing is left to read on it, or as soon as it is in sync.",
            type=click.Choice(["drained", "in-sync"]),
        ),
        option(
            "--rotate-every",
            "24h",
            "About how long one group serves before the next one does, such as 1h, or never. What it holds can be let go only behind that.",
            type=Duration(or_never=True),
            metavar="DURATION",
        ),
        option("--max-record-bytes", "1 MiB", "Limit of one record.", type=click.IntRange(1, NUMBER_MAX)),
    )

    def added(command: _Command) -> _Command:
        for one in reversed(options):
            command = one(command)
        return command

    return added


@queue.command(short_help="Make a queue.")
@click.argument("name")
@_settings(is_new=True)
@click.option("--if-missing", is_flag=True, help="A queue of this name that is there already is left as it is.")
@coordinator_option
@json_option
def create(
    *,
    name: str,
    if_missing: bool,
    coordinator: str,
    is_json: bool,
    **given: Any,
) -> None:
    r"""Make queue NAME.

    \b
    Example:
      seriatim queue create orders --groups g1,g2 --retention 7d
    """
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.errors import QueueExists

    settings = _message(**given)
    try:
        view = coordinators.call(coordinator, "CreateQueue", pb.CreateQueueRequest(queue=name, settings=settings))
    except QueueExists:
        if not if_missing:
            raise
        view = coordinators.call(coordinator, "DescribeQueue", pb.QueueRequest(queue=name))
        _show(view, is_json=is_json, done="there already")
    else:
        _show(view, is_json=is_json, done="made")


@queue.command(short_help="Change a queue's settings.")
@click.argument("name")
@_settings(is_new=False)
@click.option(
    "--all-groups", is_flag=True, allow_from_autoenv=False, help="Every group may serve it, also those to come."
)
@coordinator_option
@json_option
def alter(
    *,
    name: str,
    all_groups: bool,
    coordinator: str,
    is_json: bool,
    **given: Any,
) -> None:
    r"""Change settings of queue NAME; what isn't given stays. Records keep flowing.

    Retention, readmission and rotation change at once: with a shorter retention, links that were read longer ago than that go.
    All else changes from the queue's next link on, `seriatim queue rotate NAME` begins one: durability and flushing; the
    groups, where the one that serves now is no longer named; and the limit of a record, which can only be raised.

    \b
    Examples:
      seriatim queue alter orders --retention 7d
      seriatim queue alter orders --groups g2,g3
    """
    from seriatim.protocol import seriatim_pb2 as pb

    if not all_groups and all(value is None for value in given.values()):
        raise click.UsageError(
            "nothing is to be changed: give one of the settings, `seriatim queue alter --help` tells them"
        )
    if given["groups"] and all_groups:
        raise click.UsageError("either --groups or --all-groups")
    settings = _message(**given)
    request = pb.AlterQueueRequest(queue=name, settings=settings, all_groups=all_groups)
    view = coordinators.call(coordinator, "AlterQueue", request)
    _show(view, is_json=is_json, done="altered")
    link = views.open_link(view)
    if link is None or is_json:
        return
    is_left = bool(view.settings.groups) and link.group not in view.settings.groups
    if is_left or given["durability"] or given["flush_ms"] or given["max_record_bytes"]:
        where = f" on {link.group}" if is_left else ""
        said = f"the open link goes on{where} as it is; `seriatim queue rotate {name}` begins the next one"
        click.echo(said, err=True)


@queue.command("list", short_help="List queues.")
@coordinator_option
@json_option
def list_(*, coordinator: str, is_json: bool) -> None:
    r"""List all queues of the cluster.

    \b
    Example:
      seriatim queue list --json
    """
    from seriatim.protocol import seriatim_pb2 as pb

    reply = coordinators.call(coordinator, "ListQueues", pb.ListQueuesRequest(groups_apart=True))
    if is_json:
        for one in views.listed_objects(reply):
            click.echo(json.dumps(one))
    elif reply.queues:
        click.echo("\n".join(views.columns(views.queue_summary(reply.queues))))
    else:
        click.echo("no queues; `seriatim queue create NAME` makes one", err=True)


@queue.command(short_help="Show a queue: settings, chain, lists, cursors.")
@click.argument("name")
@coordinator_option
@json_option
def describe(*, name: str, coordinator: str, is_json: bool) -> None:
    r"""Show queue NAME, with what its members know.

    \b
    Example:
      seriatim queue describe orders
    """
    from seriatim.protocol import seriatim_pb2 as pb

    view = coordinators.call(coordinator, "DescribeQueue", pb.QueueRequest(queue=name))
    click.echo(json.dumps(views.queue_object(view)) if is_json else "\n".join(views.queue_lines(view)))


@queue.command(short_help="Delete a queue with all its records.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Don't ask.")
@coordinator_option
@json_option
def delete(*, name: str, yes: bool, coordinator: str, is_json: bool) -> int:
    r"""Delete queue NAME with all its records and subscriptions.

    \b
    Example:
      seriatim queue delete orders --yes
    """
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.errors import UnknownQueue

    if not yes and not _can_ask():
        raise click.UsageError("nobody can be asked here: give --yes to delete the queue")
    # By its id, as `rotate` by the link's epoch: where it is asked for again, another queue may have the name.
    queue_id = 0
    with suppress(UnknownQueue):  # also of a queue that is gone a name may be left, to be deleted
        queue_id = coordinators.call(coordinator, "DescribeQueue", pb.QueueRequest(queue=name)).queue_id
    if not yes and not click.confirm(f"Delete queue {name} with all its records?", err=True):
        click.echo("nothing was deleted", err=True)
        return exits.ANSWER_IS_NO
    coordinators.call(coordinator, "DeleteQueue", pb.QueueRequest(queue=name, queue_id=queue_id))
    click.echo(json.dumps({"queue": name, "is_deleted": True}) if is_json else f"queue {name} is deleted")
    return exits.DONE


@queue.command(short_help="Move a queue on to its next group, as after a failure.")
@click.argument("name")
@coordinator_option
@json_option
def rotate(*, name: str, coordinator: str, is_json: bool) -> None:
    r"""Close queue NAME's open link and go on with the next group: a planned switch.

    \b
    Example:
      seriatim queue rotate orders
    """
    from seriatim.protocol import seriatim_pb2 as pb

    view = coordinators.call(coordinator, "DescribeQueue", pb.QueueRequest(queue=name))
    link = views.live_link(view)
    if link is None:
        _show(view, is_json=is_json, done="as it was, for no link of it is open")
        return
    # By its epoch: a coordinator that dies before it answers may have done it, and the next one is asked then.
    view = coordinators.call(coordinator, "RotateQueue", pb.QueueRequest(queue=name, epoch=link.epoch), 30.0)
    click.echo(json.dumps(views.queue_object(view)) if is_json else _moved(link, view))


@queue.command("abandon-link", short_help="Give up for good what is lost of a queue.")
@click.argument("name")
@click.option(
    "--epoch", type=click.IntRange(1, NUMBER_MAX), required=True, help="The link, as `seriatim status NAME` shows it."
)
@click.option("--confirm", metavar="NAME", help="The queue's name again, instead of being asked for it.")
@coordinator_option
@json_option
def abandon_link(*, name: str, epoch: int, confirm: str | None, coordinator: str, is_json: bool) -> int:
    r"""Give up a lost link of queue NAME, or the tail of one whose only full copy is gone. Shows first what that is.

    Only for disks that won't come back: what is given up is never delivered, and every status shows that it was.

    \b
    Example:
      seriatim queue abandon-link orders --epoch 4
    """
    from seriatim.protocol import seriatim_pb2 as pb

    _check_confirmed(name, confirm, "given up")
    request = pb.AbandonLinkRequest(queue=name, epoch=epoch)
    reply = coordinators.call(coordinator, "AbandonLink", request, 30.0)
    if confirm is None and not _is_confirmed(
        name, f"would be given up for good: {reply.what}", "give this up", "given up"
    ):
        return exits.ANSWER_IS_NO
    request.confirmed_queue, request.confirmed_what = name, reply.what
    reply = coordinators.call(coordinator, "AbandonLink", request, 30.0)
    if is_json:
        exits.answer(json.dumps({"queue": name, "epoch": epoch, "what": reply.what, "is_done": reply.is_done}))
    else:
        exits.answer(f"{'given up' if reply.is_done else 'not given up'}: {reply.what}")
    return exits.DONE if reply.is_done else exits.ANSWER_IS_NO


@queue.command(short_help="Make a queue's chain again that ZooKeeper lost.")
@click.argument("name")
@click.option("--confirm", metavar="NAME", help="The queue's name again, instead of being asked for it.")
@coordinator_option
@json_option
def recover(*, name: str, confirm: str | None, coordinator: str, is_json: bool) -> int:
    r"""Go on with queue NAME from the newest copy of its chain that brokers keep. Shows first what that is.

    For a ZooKeeper that was set back, or lost all it had, and whose newest data are gone for good: `seriatim status`
    says so. Start every broker first, for the newest copy may be on any. No record is lost; a subscription that was
    made, sought or deleted in the last seconds may have to be again.

    \b
    Example:
      seriatim queue recover orders
    """
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.errors import DeadlineOver

    _check_confirmed(name, confirm, "recovered")
    request = pb.RecoverQueueRequest(queue=name)
    reply = coordinators.call(coordinator, "RecoverQueue", request, 30.0)
    if not reply.is_needless:
        if confirm is None and not _is_confirmed(name, reply.what, "do this", "recovered"):
            return exits.ANSWER_IS_NO
        request.confirmed_queue, request.confirmed_what = name, reply.what
        try:
            reply = coordinators.call(coordinator, "RecoverQueue", request, 120.0)
        except DeadlineOver as error:
            raise DeadlineOver(f"{error.message}: run it again, it goes on from there") from error
    if is_json:
        exits.answer(json.dumps({"queue": name, "what": reply.what, "is_done": reply.is_done}))
    else:
        exits.answer(f"recovered: {reply.what}" if reply.is_done else reply.what)
    return exits.DONE if reply.is_done else exits.ANSWER_IS_NO


def _check_confirmed(name: str, confirm: str | None, done: str) -> None:
    """Raises UsageError where another queue's name was said."""
    if confirm is not None and confirm != name:
        raise click.UsageError(f"--confirm says {confirm!r}, but the queue is {name!r}; nothing was {done}")


def _can_ask() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _is_confirmed(name: str, what: str, to_do: str, done: str) -> bool:
    """Show what would be done, and ask for the queue's name. Raises UsageError where nobody can be asked."""
    click.echo(what, err=True)
    if not _can_ask():
        raise click.UsageError(f"nobody can be asked here: give --confirm {name} to {to_do}")
    if click.prompt(f"Type the queue's name to {to_do}", default="", show_default=False, err=True) != name:
        click.echo(f"nothing was {done}", err=True)
        return False
    return True


def _message(
    *,
    groups: tuple[str, ...] | None,
    durability: str | None,
    retention: int | None,
    flush_ms: int | None,
    readmit: str | None,
    rotate_every: int | None,
    max_record_bytes: int | None,
) -> pb.QueueSettings:
    """With what was given."""
    from seriatim.protocol import seriatim_pb2 as pb

    if groups is not None and len(groups) < 2:
        raise click.UsageError("a queue needs two groups or more, so that it can go on when one fails")
    return pb.QueueSettings(
        groups=groups or (),
        durability=durability or "",
        retention_ms=retention or 0,
        flush_ms=flush_ms or 0,
        readmit=readmit or "",
        rotate_ms=rotate_every,
        max_record_bytes=max_record_bytes or 0,
    )


def _moved(left: pb.LinkView, view: pb.QueueView) -> str:
    """From where to where a queue moved. Where nobody is elected to send, no link is open behind a switch."""
    begun, here = views.open_link(view), f"{left.group} (epoch {left.epoch})"
    if begun is not None:
        return f"queue {view.queue} is rotated: from {here} to {begun.group} (epoch {begun.epoch})"
    next_one = view.send_list[0] if view.send_list else "the first group that can"
    return f"queue {view.queue} is rotated: it left {here}; who sends next begins a link on {next_one}"


def _show(view: pb.QueueView, *, is_json: bool, done: str) -> None:
    if is_json:
        click.echo(json.dumps(views.queue_object(view)))
        return
    link = views.open_link(view)
    where = "" if link is None else f", sends to {link.group} (epoch {link.epoch})"
    click.echo(f"queue {view.queue} is {done} (id {view.queue_id}){where}: {views.settings_text(view.settings)}")
