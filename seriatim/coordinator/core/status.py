"""What waits for what (protocol.md 2, invariant 12)."""

from __future__ import annotations

from collections.abc import Mapping

from seriatim.coordinator.core import chain, readmission
from seriatim.coordinator.core.registry import Registry
from seriatim.protocol.chain import ChainDocument, LinkState
from seriatim.protocol.names import TOKEN_MAX

TOLD = 6
"""So many reasons are in an error's text."""
FEW_TOKENS = TOKEN_MAX // 10
"""With so many left, who opens a sender each second has nineteen days."""


def told(reasons: Mapping[str, str]) -> str:
    """The first few of them, for a person."""
    texts = [f"{what}: {reason}" for what, reason in reasons.items()]
    if len(texts) > TOLD:
        texts[TOLD:] = [f"and {len(texts) - TOLD} more"]
    return "; ".join(texts)


def waits(document: ChainDocument, registry: Registry) -> dict[str, str]:
    """Everything that something of this queue waits for, or would have to wait for at the next failure, and why."""
    reasons = {**chain.obstacles(document, registry, {}), **registry.standstill(document.queue_id)}
    for link in document.links:
        if link.state is LinkState.LOST:
            reasons[f"link {link.epoch}"] = (
                f"lost on {link.group}: readers stop there until a member returns with its disk, or it is abandoned"
            )
        if link.state is LinkState.CLOSING:
            reasons[f"link {link.epoch}"] = f"being closed on {link.group}"
    if len(readmission.candidates(document, registry)) == 1:
        reasons["queue"] = "it has one group only: when that fails, sending waits for it"
    left = TOKEN_MAX - document.sender_token
    if left < FEW_TOKENS:
        reasons["senders"] = (
            f"{max(0, left):,} more can be elected whose records have no seqs of their own, then that needs another queue: "
            "keep senders open, each that is opened is an election"
        )
    return reasons


def switches_left(document: ChainDocument, registry: Registry) -> int:
    """How often sending can go on with another group before it would wait (H14)."""
    able = [group for group in document.send_list if not registry.link_obstacle(group)]
    return len(able) - 1 if chain.serving(document) in able else len(able)
