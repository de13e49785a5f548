"""What an operator's mark on a group asks of each chain (docs/protocol.md 7, planned switch): a switch that began before knows nothing of it."""

from __future__ import annotations

from seriatim.coordinator.core import chain, readmission
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol.chain import ChainDocument


def may_lead_to(document: ChainDocument, registry: Registry, group: str) -> bool:
    """Whether a switch may lead to the group: it is on the send list, or may come back to it while that switch is under way."""
    return group in document.send_list or group in readmission.candidates(document, registry)


def rid_of(document: ChainDocument, group: str) -> ChainDocument:
    """Without the group on the send list. A live link on it goes on until it is closed (invariant 1)."""
    return document if chain.serving(document) == group else chain.without_group(document, group)


def without_drained(document: ChainDocument, registry: Registry) -> ChainDocument:
    """Without any drained group on the send list: it comes back as others do, once it is in service again."""
    for group in document.send_list:
        if registry.group(group).is_draining:
            document = rid_of(document, group)
    return document
