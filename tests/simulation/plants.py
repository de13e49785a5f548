"""Rules that look right and are not: each a small change of a core or of the world, which some schedule has to find.

`PLANTS` maps a name to what makes the rule wrong while a schedule runs. H1 to H25 are the traps of docs/traps.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from seriatim.broker_group.core import replica, replica_events

Plant = Callable[[], AbstractContextManager[Any]]


def _changed(owner: Any, name: str, wrong: Callable[..., Any]) -> Plant:
    """A plant that puts `wrong(right, *arguments)` in the place of `owner.name`."""

    def plant() -> AbstractContextManager[Any]:
        right = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *arguments, **named: wrong(right, *arguments, **named))

    return plant


def _one_copy(right: Any, state: Any) -> Any:
    return right(replace(state, confirmed=state.tail.index))


def _believes_the_slave(right: Any, state: Any, event: replica_events.PeerConfirmed) -> Any:
    position = next((one for one in (state.committed, *state.flight) if one.index == event.index), None)
    return right(state, event if position is None else replace(event, hash=position.hash))


PLANTS: dict[str, Plant] = {
    "one copy": _changed(replica, "_commit", _one_copy),
    "slave believed": _changed(replica, "_confirmed", _believes_the_slave),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Run the block with this rule made wrong; "" with all rules right."""
    if not name:
        yield
        return
    with PLANTS[name]():
        yield
