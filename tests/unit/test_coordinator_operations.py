"""What an operator's or a member's call makes of a chain document that it read from a server that is behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from seriatim.coordinator.administration import Operations
from seriatim.coordinator.store import Store
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.errors import UnknownSubscription
from seriatim.protocol.names import ChainVersion, QueueId
from tests.property.chain_world import World


class BehindStore:
    """A ZooKeeper server that shows an old document until it is told to catch up."""

    def __init__(self, old: ChainDocument, new: ChainDocument) -> None:
        self.shown, self._new = old, new
        self.written: ChainDocument | None = None

    async def read_chain(self, _: QueueId) -> tuple[ChainDocument, ChainVersion]:
        return self.shown, ChainVersion(2 if self.shown is self._new else 1)

    async def catch_up(self) -> None:
        self.shown = self._new

    async def write_chain(self, document: ChainDocument, expected: ChainVersion) -> ChainVersion | None:
        if expected != 2:
            return None
        self.written = document
        return ChainVersion(3)


def changed(store: BehindStore, transition: Any) -> ChainDocument:
    operations = Operations(cast("Store", store), *cast("tuple[Any, Any, Any]", (None, None, None)))
    document, _ = asyncio.run(operations.change(store.shown.queue_id, transition, "a test", "cause"))
    return document


def test_what_would_change_nothing_by_an_old_document_is_looked_at_again() -> None:
    new = World().document
    old = replace(new, stale_cursors=((1, "b"),))
    store = BehindStore(old, new)
    noted = changed(store, lambda document: replace(document, stale_cursors=((1, "b"),)))
    assert noted.stale_cursors == ((1, "b"),)
    assert store.written == noted


def test_what_is_refused_by_an_old_document_is_looked_at_again() -> None:
    new = World().document
    old = replace(new, settings=replace(new.settings, retention_ms=1))

    def refused_by_the_old(document: ChainDocument) -> ChainDocument:
        if document == old:
            raise UnknownSubscription("there is no subscription s")
        return replace(document, sender_node="seen")

    store = BehindStore(old, new)
    assert changed(store, refused_by_the_old).sender_node == "seen"


def test_what_is_refused_by_the_present_document_is_refused() -> None:
    new = World().document

    def refused(_: ChainDocument) -> ChainDocument:
        raise UnknownSubscription("there is no subscription s")

    store = BehindStore(new, new)
    with pytest.raises(UnknownSubscription):
        changed(store, refused)
    assert store.written is None
