"""`seriatim subscription`: make, list, move and delete subscriptions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from seriatim.cli import coordinators
from seriatim.cli.options import coordinator_option, json_option

if TYPE_CHECKING:
    from seriatim.protocol import seriatim_pb2 as pb


class _Position(click.ParamType[str]):
    """earliest, latest, or an offset from 0."""

    name = "position"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text not in {"earliest", "latest"} and not (text.isascii() and text.isdigit()):
            self.fail(f"{text!r} is neither earliest nor latest nor an offset", param, ctx)
        return text


POSITION = _Position()

_queue = click.option("--queue", required=True, metavar="NAME", help="Queue of the subscription.")


@click.group(short_help="Make, list, move and delete subscriptions.")
def subscription() -> None:
    """Each subscription of a queue reads all of it, with a cursor of its own."""


@subscription.command(short_help="Make a subscription.")
@click.argument("name")
@_queue
@click.option(
    "--from", "start", type=POSITION, default="earliest", show_default=True, help="earliest, latest or an offset."
)
@coordinator_option
@json_option
def create(*, name: str, queue: str, start: str, coordinator: str, is_json: bool) -> None:
    r"""Make subscription NAME of a queue.

    \b
    Example:
      seriatim subscription create billing --queue orders --from latest
    """
    from seriatim.protocol import seriatim_pb2 as pb

    request = pb.CreateSubscriptionRequest(queue=queue, subscription=name, **{"from": start})
    _show(queue, coordinators.call(coordinator, "CreateSubscription", request), is_json=is_json)


@subscription.command("list", short_help="List a queue's subscriptions.")
@_queue
@coordinator_option
@json_option
def list_(*, queue: str, coordinator: str, is_json: bool) -> None:
    """List the subscriptions of a queue: cursor, lag, and who is elected to read."""
    from seriatim.protocol import seriatim_pb2 as pb

    view = coordinators.call(coordinator, "DescribeQueue", pb.QueueRequest(queue=queue))
    for one in view.subscriptions:
        _show(queue, one, is_json=is_json)
    if not view.subscriptions and not is_json:
        click.echo(
            f"queue {queue} has no subscriptions; whoever consumes makes his, or `seriatim subscription create`",
            err=True,
        )


@subscription.command(short_help="Move a subscription.")
@click.argument("name")
@_queue
@click.option("--to", "position", type=POSITION, required=True, help="earliest, latest or an offset.")
@coordinator_option
@json_option
def seek(*, name: str, queue: str, position: str, coordinator: str, is_json: bool) -> None:
    r"""Move subscription NAME; whoever reads it goes on from the new position.

    \b
    Example:
      seriatim subscription seek billing --queue orders --to 100000
    """
    from seriatim.protocol import seriatim_pb2 as pb

    request = pb.SeekSubscriptionRequest(queue=queue, subscription=name, to=position)
    _show(queue, coordinators.call(coordinator, "SeekSubscription", request), is_json=is_json)


@subscription.command(short_help="Delete a subscription.")
@click.argument("name")
@_queue
@coordinator_option
@json_option
def delete(*, name: str, queue: str, coordinator: str, is_json: bool) -> None:
    """Delete subscription NAME and its cursor; records are kept as long as others need them, or retention says."""
    from seriatim.protocol import seriatim_pb2 as pb

    view = coordinators.call(coordinator, "DescribeQueue", pb.QueueRequest(queue=queue))
    # By its id: a coordinator that dies before it answers may have done it, and the next one is asked then.
    meant = next((one.subscription_id for one in view.subscriptions if one.subscription == name), 0)
    request = pb.SubscriptionRequest(queue=queue, subscription=name, subscription_id=meant)
    coordinators.call(coordinator, "DeleteSubscription", request)
    click.echo(
        json.dumps({"queue": queue, "subscription": name, "is_deleted": True}) if is_json else f"{name} is deleted"
    )


async def seek_existing(
    coordinator: str, queue: str, name: str, position: str, within_s: float
) -> pb.SubscriptionView | None:
    """Move a subscription that is there; None where it isn't. `within_s`: so long a coordinator is looked for."""
    from seriatim.cli.coordinators import CALL_TIMEOUT_S
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.coordinators import Coordinators
    from seriatim.protocol.errors import UnknownSubscription

    request = pb.SeekSubscriptionRequest(queue=queue, subscription=name, to=position)
    async with Coordinators(coordinator) as coordinators:
        await coordinators.call_within("DescribeCluster", pb.DescribeClusterRequest(), within_s)
        try:
            moved: pb.SubscriptionView = await coordinators.call("SeekSubscription", request, CALL_TIMEOUT_S)
        except UnknownSubscription:
            return None
    return moved


def standing(view: pb.SubscriptionView) -> str:
    """A subscription for a person: where it stands, and who reads it."""
    cursor = f"offset {view.cursor_offset:,}" if view.has_offset else "cursor unknown"
    records = "1 record" if view.lag_records == 1 else f"{view.lag_records:,} records"
    lag = f", {records} behind" if view.has_lag else ""
    return f"{cursor}{lag}, reader {view.reader or 'none'}"


def _show(queue: str, view: pb.SubscriptionView, *, is_json: bool) -> None:
    content: dict[str, object] = {
        "queue": queue,
        "subscription": view.subscription,
        "generation": view.generation,
        "reader": view.reader or None,
        "consume_list": list(view.consume_list),
        "cursor_offset": view.cursor_offset if view.has_offset else None,
        "lag_records": view.lag_records if view.has_lag else None,
    }
    click.echo(json.dumps(content) if is_json else f"{view.subscription}: {standing(view)}")
