"""`seriatim health`: a probe, for containers and for people."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import click

from seriatim.cli import exits
from seriatim.cli.options import Finite, json_option

_CODES = {"SERVING": exits.DONE, "NOT_SERVING": exits.ANSWER_IS_NO, "SERVICE_UNKNOWN": exits.WRONG_USE}


def answering(
    address: str | None, *, is_ready: Callable[[], bool], is_elected: Callable[[], bool], is_live: Callable[[], bool]
) -> AbstractContextManager[object]:
    """Answer health checks at `address`, where there is one, while the block runs."""
    if address is None:
        return nullcontext()
    from seriatim.protocol.health import ELECTED, LIVE, READY, HealthServer

    return HealthServer(address, {READY: is_ready, ELECTED: is_elected, LIVE: is_live})


@click.command(short_help="Ask a process whether it can do its work.")
@click.argument("address", metavar="HOST:PORT")
@click.option(
    "--service",
    default="",
    metavar="NAME",
    help="live: whether it runs at all; elected: whether it is the one. [default: whether it can do its work now]",
)
@click.option("--timeout", type=Finite(min=0), default=2.0, show_default=True, help="Seconds to wait.")
@json_option
def health(*, address: str, service: str, timeout: float, is_json: bool) -> int:
    r"""Ask the process at HOST:PORT by gRPC's health protocol. Ends with 0 for yes, 1 for no, 3 where nobody answers.

    \b
    Example:
      seriatim health 127.0.0.1:7000
    """
    from seriatim.protocol.health import ask
    from seriatim.protocol.names import is_host_and_port

    if not is_host_and_port(address):
        raise click.UsageError(f"{address!r} is not HOST:PORT")
    status = ask(address, service, timeout)
    exits.answer(json.dumps({"address": address, "service": service, "status": status}) if is_json else status)
    return _CODES.get(status, exits.REFUSED)
