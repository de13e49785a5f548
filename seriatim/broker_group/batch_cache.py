"""The newest batches of all links in memory, so that a reader that keeps up costs the disk nothing. Bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from seriatim.broker_group.core.link_record import LinkKey
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.names import Index

BESIDE_BYTES: Final = 700
"""What the objects of a cached batch take beside its bytes (measured: 878 B for one of 175): most, where batches are small."""


class BatchCache:
    """Batches by link and first index; the oldest go first. `limit_bytes`: of memory, objects included."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._order: deque[tuple[LinkKey, EncodedBatch]] = deque()
        self._by_link: dict[LinkKey, OrderedDict[Index, EncodedBatch]] = {}

    def add(self, link: LinkKey, encoded: EncodedBatch) -> None:
        self._by_link.setdefault(link, OrderedDict())[encoded.header.first_index] = encoded
        self._order.append((link, encoded))
        self._size_bytes += encoded.size_bytes + BESIDE_BYTES
        while self._size_bytes > self._limit_bytes:
            old_link, old = self._order.popleft()
            self._size_bytes -= old.size_bytes + BESIDE_BYTES
            of_link = self._by_link.get(old_link)
            if of_link is not None and of_link.get(old.header.first_index) is old:
                del of_link[old.header.first_index]
                if not of_link:
                    del self._by_link[old_link]

    def get(self, link: LinkKey, first_index: Index) -> EncodedBatch | None:
        """The batch that starts exactly there."""
        of_link = self._by_link.get(link)
        return None if of_link is None else of_link.get(first_index)

    def forget(self, link: LinkKey) -> None:
        self._by_link.pop(link, None)
