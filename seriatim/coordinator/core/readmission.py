"""Which groups may come back to a queue's send list (protocol.md 2, invariant 6; 7; H14)."""

from __future__ import annotations

from seriatim.coordinator.core.registry import MEMBERS, Registry
from seriatim.protocol.chain import ChainDocument, Readmit


def candidates(document: ChainDocument, registry: Registry) -> tuple[str, ...]:
    """The groups that may serve the queue, in order: those it was given, or else every known group by name."""
    return document.settings.groups or tuple(sorted(registry.groups))


def backlog(document: ChainDocument, group: str) -> tuple[str, ...]:
    """The subscriptions whose consume list names a link on this group."""
    on_group = {link.epoch for link in document.links if link.group == group}
    return tuple(one.name for one in document.subscriptions if on_group.intersection(one.consume_list))


def obstacle(document: ChainDocument, registry: Registry, group: str) -> str:
    """Why a group can't be put at the send list's tail now, or empty."""
    cannot_send = registry.send_obstacle(group)
    if cannot_send:
        return cannot_send
    state = registry.group(group)
    for place in MEMBERS:
        if not state.members[place].is_in_sync_with(document.queue_id):
            return f"{group}-{place} has not caught up yet"
    if apart := registry.apart(group):
        return apart
    if document.settings.readmit is Readmit.DRAINED:
        unread = backlog(document, group)
        if unread:
            return f"it holds unread records of {', '.join(unread)}"
    return ""


def eligible(document: ChainDocument, registry: Registry) -> tuple[str, ...]:
    """The groups that are not on the send list and may be put at its tail now, in order."""
    return tuple(
        group
        for group in candidates(document, registry)
        if group not in document.send_list and not obstacle(document, registry, group)
    )
