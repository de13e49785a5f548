"""When a group may be forgotten (docs/protocol.md 7): nothing that is still wanted lies on it, and nobody is there to take more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from seriatim.coordinator.core import chain, status
from seriatim.coordinator.core.registry import GroupState
from seriatim.protocol.chain import ChainDocument, LinkState
from seriatim.protocol.errors import Waiting


def obstacles(group: GroupState, documents: Iterable[ChainDocument]) -> dict[str, str]:
    """Why the group can't be removed now, for each member and queue that it is for. `documents`: of all queues that aren't deleted."""
    reasons = {}
    if not group.is_draining:
        reasons[group.name] = "it is in service, drain it first"
    for place in group.members:
        reasons[f"{group.name}-{place}"] = "it is registered, stop it first"
    for document in documents:
        if reason := _kept(document, group.name):
            reasons[f"queue {document.name}"] = reason
    return reasons


def without(document: ChainDocument, group: str) -> ChainDocument:
    """The group is off the send list. Raises Waiting where a link was put on it since `obstacles` were looked for."""
    if reason := _kept(document, group):
        raise refused(group, {f"queue {document.name}": reason})
    return chain.without_group(document, group)


def refused(group: str, reasons: Mapping[str, str]) -> Waiting:
    """The error: for a person the first few reasons, for a program all of them, unless a call can't end with so many."""
    return Waiting(f"group {group} can't be removed now: {status.told(reasons)}", reasons=dict(reasons))


def _kept(document: ChainDocument, group: str) -> str:
    """What the queue keeps on the group, or wants of it, or empty."""
    links = [link for link in document.links if link.group == group]
    if not links:
        is_named = group in document.settings.groups
        return "it was given this group to be served by, name others with `seriatim queue alter`" if is_named else ""
    if lost := [str(link.epoch) for link in links if link.state is LinkState.LOST]:
        return f"link {', '.join(lost)} is lost there, abandon it"
    return f"{len(links)} of its links are there, until all is read and its retention is over"
