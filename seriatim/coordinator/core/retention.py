"""Which links leave the chain document (protocol.md 3; 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from seriatim.coordinator.core.chain_point import is_settled, point_before
from seriatim.protocol.chain import ChainDocument, Dropped, Link
from seriatim.protocol.names import Epoch

EMPTY_KEPT_MS = 60_000
"""An empty link is kept as long as it takes everyone to see that it ended."""
MAX_CHAIN_BYTES = 2 * 1024 * 1024
"""About so much of a chain document is kept for the sake of retention, before it is compressed: some 2,000 links of a few sources. A
node of ZooKeeper holds no more than 1 MiB, and a queue whose chain can't be written goes on with no other group.
"""
_LINK_BYTES = 900
_MARK_BYTES = 50


def due(document: ChainDocument, now_ms: int) -> tuple[Epoch, ...]:
    """The first links of the chain that may be let go: sealed, all known before them, read by all, kept long enough.

    Empty links need not be kept for their records, so the queue's retention doesn't count for them; nor for the first ones of
    a chain that gets too long.
    """
    listed = {epoch for one in document.subscriptions for epoch in one.consume_list}
    excess_bytes = sum(map(_size_bytes, document.links)) - MAX_CHAIN_BYTES
    epochs = []
    for number, link in enumerate(document.links):
        if link.epoch in listed or not is_settled(link):
            break
        sealed_at_ms = _sealed_at_ms(document.links[number:], now_ms)
        if excess_bytes <= 0 and not _is_over(link, sealed_at_ms, document.settings.retention_ms, now_ms):
            break
        epochs.append(link.epoch)
        excess_bytes -= _size_bytes(link)
    return tuple(epochs)


def _size_bytes(link: Link) -> int:
    """Of a link's text in the document, about."""
    marks = len(link.marks_on_two)
    if link.certificate is not None:
        marks += len(link.certificate.marks) + len(link.certificate.marks_on_two)
    return _LINK_BYTES + marks * _MARK_BYTES


def _sealed_at_ms(links: Sequence[Link], now_ms: int) -> float:
    """When the first of them was sealed, at the latest; later than now says a clock that was ahead, and it was before those behind it.

    Else nothing of a queue would go until it is as late again, however full disks are.
    """
    stamps = (link.certificate.sealed_at_ms for link in links if link.certificate is not None)
    return next((stamp for stamp in stamps if stamp <= now_ms), math.inf)


def _is_over(link: Link, sealed_at_ms: float, retention_ms: int, now_ms: int) -> bool:
    kept_ms = min(retention_ms, EMPTY_KEPT_MS) if link.end == 0 else retention_ms
    return now_ms - sealed_at_ms >= kept_ms


def without(document: ChainDocument, epochs: tuple[Epoch, ...]) -> ChainDocument:
    """The document without these first links; `dropped` keeps what a later link's certificate builds on."""
    kept = document.links[len(epochs) :]
    first_kept = kept[0].epoch if kept else document.next_epoch
    point = point_before(document, first_kept)
    if point.offset is None or point.chain_hash is None:
        return document
    return replace(
        document,
        links=kept,
        dropped=Dropped(first_kept, point.offset, point.chain_hash, point.marks, point.marks_on_two),
        stale_cursors=tuple(one for one in document.stale_cursors if one.epoch not in epochs),
    )
