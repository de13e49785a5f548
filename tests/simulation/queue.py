"""One queue of a world: what its applications say and hear, who they are, and its chain. Several share the same groups."""

from __future__ import annotations

from collections.abc import Callable

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link
from tests.simulation.ledger import Ledger


class Queue:
    """All that have this name, one after the other, and nothing to do with each other (H16).

    `settings`: with which it is made. `number`: the how manieth it is of all that were made, which each of its records says. `is_there`:
    from when it is about to be made until it is deleted; so long its applications run. `is_draining`: whether they are to send no more.
    `senders`, `readers`: the names of their hosts.
    """

    def __init__(self, name: str, ledger: Ledger, chain: Callable[[str], ChainDocument | None]) -> None:
        self.name = name
        self.ledger = ledger
        self.settings = pb.QueueSettings()
        self.number = 0
        self.is_there = False
        self.is_draining = False
        self.senders: list[str] = []
        self.readers: list[str] = []
        self._chain = chain

    @property
    def document(self) -> ChainDocument | None:
        """The chain that its name leads to."""
        return self._chain(self.name)

    @property
    def head(self) -> Link | None:
        """The last link, which records go to."""
        return None if self.document is None else self.document.last_link

    @property
    def applications(self) -> list[str]:
        return [*self.senders, *self.readers]
