"""What is made of the same message, or of the same chain, is made once: everybody in a world is told the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from seriatim.consumer.core.view import ChainView
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument
from seriatim.protocol.names import ChainVersion

_KEPT = 8


def once_viewed(view: Callable[[pb.QueueView], ChainView]) -> Callable[[pb.QueueView], ChainView]:
    """Every reader is sent the same message, which nobody changes: the last ones are read once."""
    last: deque[tuple[pb.QueueView, ChainView]] = deque(maxlen=_KEPT)

    def viewed(message: pb.QueueView) -> ChainView:
        for known, made in last:
            if known is message:
                return made
        made = view(message)
        last.append((message, made))
        return made

    return viewed


def once_described(
    describe: Callable[[ChainDocument, ChainVersion, Registry], pb.QueueView],
) -> Callable[[ChainDocument, ChainVersion, Registry], pb.QueueView]:
    """Coordinators know the same mostly: they tell a copy of what one of them has made of it."""
    last: deque[tuple[ChainVersion, Registry, ChainDocument, pb.QueueView]] = deque(maxlen=_KEPT)

    def described(document: ChainDocument, version: ChainVersion, registry: Registry) -> pb.QueueView:
        view = pb.QueueView()
        for known_version, known_registry, known, made in last:
            if known_version == version and known_registry == registry and known == document:
                view.CopyFrom(made)
                return view
        view.CopyFrom(made := describe(document, version, registry))
        last.append((version, registry, document, made))
        return view

    return described
