"""The reading side: elected readers that are handed a queue in strict order.

- `Consumer`: one subscription's reader; an iterator of records, with commit, seek and a handler loop.
- `RangeReader`: records between two offsets, without election.
- `Subscriber`: election, token and commits by offset, for who reads by other means.

How a reader works. It stands for election in ZooKeeper, one election a subscription. Elected, it asks a coordinator for
a grant: its token, the head of the consume list and the cursor there. From there it reads by the chain: a fetch stream
at a member of the link (the slave first), the other member on any trouble, the next link at the recorded end and never
before. Records that were delivered before, from an earlier link, are dropped by the marks of the position. Commits go to
the head of the consume list, at both members; when the coordinator has taken a consumed link off, the reader asks for
the next head with the same token. Every ZooKeeper write it is answered moves on the moment until which, by its own
clock, it may hand out.

Decisions are in `core`, pure: `core.tenure`, `core.cursor` and `core.reading`. `fetching` and `session` carry them out on a loop;
`handover` lies between that loop and the application's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seriatim.consumer.client import Consumer
    from seriatim.consumer.handling import Blocked
    from seriatim.consumer.range_reader import Positions, RangeReader
    from seriatim.consumer.subscriber import Subscriber, Term

__all__ = ["Blocked", "Consumer", "Positions", "RangeReader", "Subscriber", "Term"]

_HOMES = {
    "Blocked": "handling",
    "Consumer": "client",
    "Positions": "range_reader",
    "RangeReader": "range_reader",
    "Subscriber": "subscriber",
    "Term": "subscriber",
}


def __getattr__(name: str) -> object:
    """Import on first use: the core and the commands' help need no gRPC."""
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(f"seriatim.consumer.{_HOMES[name]}"), name)
