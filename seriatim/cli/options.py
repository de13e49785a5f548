"""Options and kinds of values that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LONGEST_MS = 36_500 * _UNITS_MS["d"]

NUMBER_MAX = 2**32 - 1
"""The largest number of an option that goes into a message's field."""


coordinator_option = click.option(
    "--coordinator", required=True, metavar="HOST:PORT[,…]", help="Coordinators; any of them serves."
)
json_option = click.option("--json", "is_json", is_flag=True, help="One JSON object a line.")
session_timeout_option = click.option(
    "--session-timeout-ms",
    type=click.IntRange(500, 2**31 - 1),
    default=4000,
    show_default=True,
    help="How long after its death another instance is elected.",
)


def log_options(command: Command) -> Command:
    """`--log-level` and `--log-to`, as every command that runs a server has them."""
    level = click.option(
        "--log-level",
        type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], case_sensitive=False),
        default="INFO",
        show_default=True,
        help="Least level that is logged.",
    )
    to = click.option(
        "--log-to", type=click.Choice(["stderr", "stdout"]), default="stderr", show_default=True,
        help="Where the log goes; in a container, standard output.",
    )  # fmt: skip
    return level(to(command))


def service_options(command: Command) -> Command:
    """`--log-to` and `--health-listen`, for senders and readers that run as services."""
    to = click.option(
        "--log-to",
        type=click.Choice(["stderr", "stdout"]),
        help="Log key=value lines there. [default: sentences for a person]",
    )
    health = click.option(
        "--health-listen", metavar="HOST:PORT", help="Answer gRPC health checks there, as `seriatim health` asks them."
    )
    return to(health(command))


class Text(click.types.StringParamType):
    """Text that can be sent on: an argument, or a variable, of other bytes than UTF-8's is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text."""
        text = super().convert(value, param, ctx)
        try:
            str(text).encode()
        except UnicodeEncodeError:
            self.fail("its bytes are not UTF-8", param, ctx)  # which may hold a password
        return text


TEXT = Text()


class Folder(click.Path):
    """A folder that is there, or is made. No name, as of a shell's variable that isn't set, is refused: to Python it is the present folder."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "":
            self.fail("it is empty; the present folder is called .", param, ctx)
        return super().convert(value, param, ctx)


class Duration(click.ParamType[int]):
    """A number and a unit, such as 500ms, 90s, 30m, 24h, 7d; milliseconds to the command. `or_never`: also never, which is 0."""

    name = "duration"

    def __init__(self, *, or_never: bool = False) -> None:
        self._or_never = or_never

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Milliseconds, from 1 to a hundred years."""
        if isinstance(value, int):
            return value
        if self._or_never and value == "never":
            return 0
        match = re.fullmatch(r"([0-9]{1,20})\s*(ms|s|m|h|d)", str(value).strip())
        duration_ms = int(match[1]) * _UNITS_MS[match[2]] if match else 0
        if duration_ms < 1:
            never = ", nor never" if self._or_never else ""
            self.fail(f"{value!r} is not a duration such as 500ms, 90s, 30m, 24h or 7d{never}", param, ctx)
        if duration_ms > _LONGEST_MS:
            self.fail(f"{value!r} is longer than {duration_text(_LONGEST_MS)}", param, ctx)
        return duration_ms


class Finite(click.FloatRange):
    """A number in a range, and neither nan, which no clock ever passes, nor inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


connect_timeout_option = click.option(
    "--connect-timeout",
    type=Finite(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to look for a coordinator at the start.",
)


class Setting(click.ParamType[tuple[str, str]]):
    """KEY=VALUE."""

    name = "setting"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Key and value, which may hold more equals signs."""
        if isinstance(value, tuple):
            return value
        key, equals, rest = str(TEXT.convert(value, param, ctx)).partition("=")
        if not key.strip() or not equals:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        return key.strip(), rest


class Names(click.ParamType[tuple[str, ...]]):
    """Names with commas between, each once."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names, in the order given."""
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in str(TEXT.convert(value, param, ctx)).split(","))
        if not all(names) or len(set(names)) != len(names):
            self.fail(f"{value!r} is not a list of names with commas between, each once", param, ctx)
        return names


def duration_text(duration_ms: int) -> str:
    """A duration as `Duration` reads it, in the largest unit that leaves no rest."""
    for unit in ("d", "h", "m", "s"):
        if duration_ms and duration_ms % _UNITS_MS[unit] == 0:
            return f"{duration_ms // _UNITS_MS[unit]}{unit}"
    return f"{duration_ms}ms"
