"""What is seen of a running demo: on a terminal a table that is written over, else plain lines."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self, TextIO

_LINE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at everything. Rates are records a second, over the last seconds. `faults`: a line each."""

    since_s: float
    phase: str
    links: tuple[tuple[int, str, str, int], ...]
    """Epoch, group, state, committed records."""
    send_list: tuple[str, ...]
    consume_list: tuple[int, ...]
    sender: str
    reader: str
    sent: int
    applied: int
    sent_rate: float
    applied_rate: float
    lag_s: float
    waits: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def lag_records(self) -> int:
        """Committed in the queue and not in west."""
        return max(0, self.sent - self.applied)


class View(Protocol):
    """A context manager that shows the demo."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        """Something happened."""
        ...

    def show(self, sight: Sight) -> None:
        """This is how it looks now."""
        ...


def one_line(sight: Sight) -> str:
    """A sight as a line."""
    return (
        f"sent {sight.sent:,} ({sight.sent_rate:,.0f}/s)  applied {sight.applied:,} ({sight.applied_rate:,.0f}/s)  "
        f"lag {sight.lag_records:,} records, {sight.lag_s:.1f} s  "
        f"send list {' '.join(sight.send_list) or 'empty'}  consume list {' '.join(map(str, sight.consume_list)) or 'empty'}"
        + "".join(f"  waits for {wait}" for wait in sight.waits)
    )


class PlainView:
    """Lines, each with the seconds since the demo began."""

    def __init__(self, began_s: float, output: TextIO) -> None:
        self._began_s = began_s
        self._output = output
        self._shown_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.flush()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:7.1f} s  {text}", file=self._output, flush=True)

    def show(self, sight: Sight) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _LINE_EVERY_S:
            self._shown_s = now_s
            self.say(one_line(sight))


class LiveView:
    """A table at the foot of the terminal; what happens scrolls by above it."""

    def __init__(self, began_s: float) -> None:
        from rich.console import Console
        from rich.live import Live

        self._began_s = began_s
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a terminal that is closed
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began_s:7.1f} s  {text}", markup=False)

    def show(self, sight: Sight) -> None:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        chain = "  →  ".join(f"{epoch} {group} {state} {count:,}" for epoch, group, state, count in sight.links[-5:])
        rows = [
            ("send list", " → ".join(sight.send_list) or "empty"),
            ("chain", ("…  →  " if len(sight.links) > 5 else "") + (chain or "empty")),
            ("consume list", " → ".join(f"link {epoch}" for epoch in sight.consume_list) or "empty"),
            ("elected", f"sender {sight.sender or 'none'}, reader {sight.reader or 'none'}"),
            ("sent", f"{sight.sent:>12,} records   {sight.sent_rate:>9,.0f} a second"),
            ("applied", f"{sight.applied:>12,} records   {sight.applied_rate:>9,.0f} a second"),
            ("lag", f"{sight.lag_records:>12,} records   {sight.lag_s:>9.1f} s"),
            *(("waits for", wait) for wait in sight.waits),
            *(("fault", fault) for fault in sight.faults),
        ]
        for name, value in rows:
            table.add_row(name, Text(value))
        self._live.update(Panel(table, title=f"{sight.phase}, {sight.since_s:.0f} s", title_align="left"), refresh=True)


def chosen_view(began_s: float, *, is_json: bool) -> View:
    """Live on a terminal; plain elsewhere. With `--json` standard output is left to the one object."""
    if is_json:
        return PlainView(began_s, sys.stderr)
    return LiveView(began_s) if sys.stdout.isatty() else PlainView(began_s, sys.stdout)
