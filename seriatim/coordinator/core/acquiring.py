"""What AcquireSend and AcquireRead have in common: an election node that asks, with its token once it has one, and rounds, each from reading the chain on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from seriatim.coordinator.core import chain
from seriatim.coordinator.core.events import Answer, ChainRead, Effects, ReadChain, Refused, Wait, WakeAfter
from seriatim.coordinator.core.registry import Registry, not_ready
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.errors import Fenced, InvariantBroken, NotElected, SeriatimError
from seriatim.protocol.names import ChainVersion, Token

MAX_ROUNDS = 40
"""So often may the chain change under one call before the caller is asked to come again."""
OLDER_PAUSE_MS = 5
"""A member knew a newer version than was read: ZooKeeper needs a moment to show it here, too."""


@dataclass(frozen=True, slots=True)
class Acquiring:
    """`request`: with `election_node`, and `token`, 0 where the caller has none yet.

    `read`: the chain as this round read or wrote it. `pending`: the document whose write is under way.
    """

    request: Any
    read: ChainRead | None = None
    pending: ChainDocument | None = None
    rounds: int = 0

    @property
    def document(self) -> ChainDocument:
        return self._read().document

    @property
    def version(self) -> ChainVersion:
        return self._read().version

    @property
    def registry(self) -> Registry:
        return self._read().registry

    def _read(self) -> ChainRead:
        if self.read is None:
            raise InvariantBroken("the chain wasn't read yet")
        return self.read

    def looked_up(self, registry: Registry) -> Self:
        """With what was seen of sessions after the chain was read (H10)."""
        return replace(self, read=ChainRead(self.document, self.version, registry))

    def written(self, version: ChainVersion) -> Self:
        """With the chain as it was just written."""
        if self.pending is None:
            raise InvariantBroken("a write was answered that nobody asked for")
        return replace(self, read=ChainRead(self.pending, version, self.registry), pending=None)

    @property
    def kept(self) -> dict[str, Any]:
        """What the next round knows of this one, beside the request."""
        return {}

    def again(self, pause_ms: int = 0) -> tuple[Self, Effects]:
        """Start again from reading the chain."""
        if self.rounds >= MAX_ROUNDS:
            return self.waits({"chain": "it keeps changing"})
        fresh = type(self)(self.request, rounds=self.rounds + 1, **self.kept)
        return fresh, (WakeAfter(pause_ms) if pause_ms else ReadChain(),)

    def waits(self, reasons: Mapping[str, str]) -> tuple[Self, Effects]:
        return self, (Answer(Wait(reasons, token=self.request.token)),)

    def refused(self, error: SeriatimError) -> tuple[Self, Effects]:
        return self, (Answer(Refused(error)),)

    def with_another_token(self, newest: Token, who: str, **details: object) -> tuple[Self, Effects] | None:
        """What follows where the caller's token and the newest one in the chain differ; None where it is that."""
        token = self.request.token
        if token == newest:
            return None
        if token > newest:
            return self.again(OLDER_PAUSE_MS)  # this ZooKeeper server is behind the one that showed the token
        text = f"the {who} with token {newest} was elected after the one with {token}"
        return self.refused(Fenced(text, queue=self.document.name, **details, token=newest))

    @property
    def unserved(self) -> SeriatimError | None:
        """Why nobody is served by this chain, or by this coordinator now."""
        if self.document.is_deleted:
            return chain.deleted_error(self.document)
        awaited = self.registry.awaited
        return not_ready(awaited) if awaited else None

    def not_elected(self, first: str) -> NotElected | None:
        """The error where another election node than the caller's is first in line."""
        node = self.request.election_node
        if node and first == node:
            return None
        return NotElected(f"{first or 'nobody'} is first in line, not {node!r}", queue=self.document.name)
