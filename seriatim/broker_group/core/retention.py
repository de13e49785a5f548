"""Which links a member may forget: those that the chain document no longer keeps."""

from __future__ import annotations

from collections.abc import Iterable

from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.names import Epoch


def droppable(document: ChainDocument | None, held: Iterable[Epoch]) -> tuple[Epoch, ...]:
    """Of the links held of a queue, those below the first kept one; all where the queue is deleted (None: its node is gone).

    A link at or above it that the document doesn't name is not touched: the document may be older than the link.
    """
    if document is None or document.is_deleted:
        return tuple(held)
    return tuple(epoch for epoch in held if epoch < document.dropped.epoch)
